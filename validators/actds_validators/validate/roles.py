"""Roles: each line names positions of its request, and no position has two roles."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.columns import Notes, check_words
from actds.dataset.reading import Catalog
from actds.errors import ActdsError
from actds.format import tables
from actds.format.positions import Keys, difference, overlap, position_key, union

__all__ = ["check_roles"]


def check_roles(catalog: Catalog) -> None:
    """Check the roles of every run that has any.

    Args:
        catalog: the dataset; notes E103 for a word that is no role, E420 for positions that the
            request does not have, or that have two roles.

    Spec: 0.1 section 6.3.
    """
    for run in catalog.runs_with_data:
        if not catalog.parts.get((run, "roles")):
            continue
        try:
            roles, spans = (catalog.sound_table(run, name) for name in ("roles", "spans"))
        except ActdsError as error:
            catalog.findings.take("integrity", error)
            continue
        if roles is None or spans is None or run in catalog.incomplete:
            continue
        notes = Notes(run)
        check_words(roles, "role", tables.ROLES, f"census/{run}/roles", notes)
        empty = pc.greater_equal(roles["start"], roles["stop"])
        names = ("request", "start", "stop")
        for row in notes.each("E420", np.flatnonzero(empty.to_numpy())):
            place = notes.place("census", "roles", *(roles[name][row] for name in names))
            notes.add("E420", place, "no position", "a stop above the start")
        start, stop = _keys(roles.filter(pc.invert(empty)))
        for place in notes.places("E420", "census", "roles", overlap(start, stop)):
            notes.add("E420", place, "two roles", "one role, or none")
        theirs = union(*_keys(spans.filter(pc.less(spans["start"], spans["stop"]))))
        for place in notes.places(
            "E420", "census", "roles", difference(union(start, stop), theirs)
        ):
            notes.add("E420", place, "a role", "none: the request has no such position")
        for finding in notes.findings():
            catalog.findings.take("accounting", finding)


def _keys(table: pa.Table) -> tuple[Keys, Keys]:
    return (
        position_key(table["request"], table["start"]),
        position_key(table["request"], table["stop"]),
    )
