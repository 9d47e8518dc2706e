"""Provenance: every run that has rows says how they came to be."""

from __future__ import annotations

from actds.format import layout
from actds_validators.validate.inventory import CENSUS_TABLES, Inventory


def check_provenance(inventory: Inventory) -> None:
    """Check that every run with data has a run record and a census; notes E401 and E403.

    A provenance field that is null without a reason (E402) is noted where the record is read.

    Spec: 0.1 section 6.
    """
    told = {finding.place.split(" ")[0] for _, finding in inventory.findings}
    for run in inventory.runs_with_data:
        path = layout.run_path(run)
        if run not in inventory.runs and path not in told:
            inventory.add(
                "provenance", "E401", path, "no run record", "one for every run with rows"
            )
        missing = [table for table in CENSUS_TABLES if not inventory.parts.get((run, table))]
        if missing and run not in inventory.incomplete:
            inventory.add(
                "provenance",
                "E403",
                f"census/{run}",
                f"no {', no '.join(missing)}",
                "the tables requests, steps and spans",
            )
