"""Origins: each line names a request of its run, none twice, and a source that can be looked up."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.columns import Notes
from actds.dataset.reading import Catalog
from actds.errors import ActdsError
from actds.format.tables import UNSERVED

__all__ = ["check_origins"]

_FORMS = {
    "source_dataset": "[0-9a-f]{32}",
    "source_seal": "[0-9a-f]{64}",
    "source_run": "[a-z0-9][a-z0-9._-]{0,63}",
}


def check_origins(catalog: Catalog) -> None:
    """Check the origins of every run that has any.

    Args:
        catalog: the dataset; notes E103 for a name or a digest that is none, E422 for a request
            that the run does not have, that has an origin already, or of whose prompt more was
            given than there is.

    Spec: 0.1 section 6.3.
    """
    for run in catalog.runs_with_data:
        if not catalog.parts.get((run, "origins")):
            continue
        try:
            origins, requests = (catalog.sound_table(run, name) for name in ("origins", "requests"))
        except ActdsError as error:
            catalog.findings.take("integrity", error)
            continue
        if origins is None or requests is None or run in catalog.incomplete:
            continue
        notes = Notes(run)
        _check_names(origins, notes)
        _check_requests(origins, requests, notes)
        for finding in notes.findings():
            catalog.findings.take("accounting", finding)


def _check_names(origins: pa.Table, notes: Notes) -> None:
    for name, form in _FORMS.items():
        for value in pc.unique(origins[name]).to_pylist():
            if re.fullmatch(form, value) is None:
                place = f"census/{notes.run}/origins"
                notes.add("E103", place, f"{name} {value[:80]!r}", f"a text of the form {form}")


def _check_requests(origins: pa.Table, requests: pa.Table, notes: Notes) -> None:
    named, n_given = (origins[name].to_numpy().astype(np.int64) for name in ("request", "n_given"))
    there = requests["request"].to_numpy().astype(np.int64)
    served = ~np.isin(requests["finish_reason"].to_pylist(), UNSERVED)
    room = np.where(served, requests["prompt_len"].to_numpy().astype(np.int64), 2**32)
    order = np.argsort(there, kind="stable")
    at = np.minimum(np.searchsorted(there[order], named), max(len(there) - 1, 0))
    known = there[order][at] == named if len(there) else np.zeros(len(named), bool)
    first = np.zeros(len(named), bool)
    first[np.unique(named, return_index=True)[1]] = True
    beyond = known & (n_given > room[order][at]) if len(there) else ~known
    for wrong, got, expected in (
        (~known, "an origin", "none: the run has no such request"),
        (known & ~first, "two origins", "one at most"),
        (beyond, "more given positions than prompt tokens", "at most the tokens of the prompt"),
    ):
        for row in notes.each("E422", np.flatnonzero(wrong)):
            notes.add("E422", f"census/{notes.run}/origins request {named[row]}", got, expected)
