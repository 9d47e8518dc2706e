"""Sampled tokens: each has one line where the run records them, of values that a softmax has."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.columns import Notes, ints
from actds.dataset.reading import Catalog
from actds.errors import ActdsError
from actds.format.positions import Keys, position_key
from actds.format.schema import RunRecord
from actds.format.shard import TOKENS
from actds.store import layout

__all__ = ["check_sampled"]

FIELD = "capture.entropy"
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def check_sampled(catalog: Catalog) -> None:
    """Check the sampled tokens of every run that records them.

    Args:
        catalog: the dataset; notes E103 for a field that is no boolean, E423 for a line that is of
            no sampled token of its request, of one that has a line already, of another token than
            the stored row, of an unknown step or with values that no softmax has, and for tokens
            without a line: a warning where the run was cut off.

    Spec: 0.1 section 6.3.
    """
    for run in catalog.runs_with_data:
        record = catalog.runs.get(run)
        if record is None or run in catalog.incomplete:
            continue
        notes, field = Notes(run), record.fields.get(FIELD)
        said = None if field is None else field.value
        if said is not None and not isinstance(said, bool):
            place = f"{layout.run_path(run)} {FIELD}"
            catalog.findings.add("accounting", "E103", place, repr(said)[:80], "true or false")
            continue
        if not said and not catalog.parts.get((run, "sampled")):
            continue
        try:
            sampled = catalog.sound_table(run, "sampled")
            requests, steps = (catalog.sound_table(run, name) for name in ("requests", "steps"))
            spans = catalog.sound_table(run, "spans")
        except ActdsError as error:
            catalog.findings.take("integrity", error)
            continue
        if sampled is None or requests is None or steps is None or spans is None:
            continue
        if said:
            key, is_owed = _check_lines(sampled, requests, steps, notes)
            _check_values(sampled, notes)
            _check_missing(catalog, requests, _free(record, spans), key[is_owed], notes)
            _check_tokens(catalog, run, key, ints(sampled, "token_id"), notes)
        elif sampled.num_rows:
            got = f"{sampled.num_rows} lines"
            notes.add("E423", f"census/{run}/sampled", got, f"none: {FIELD} is not true")
        for finding in notes.findings():
            catalog.findings.take("accounting", finding)


def _check_lines(
    sampled: pa.Table, requests: pa.Table, steps: pa.Table, notes: Notes
) -> tuple[Keys, Bools]:
    """Return the key of each line, and which are the first of a token that was sampled."""
    named, position, step = (ints(sampled, name) for name in ("request", "position", "step"))
    order = np.argsort(ints(requests, "request"), kind="stable")
    there, first, n = (
        ints(requests, name)[order] for name in ("request", "prompt_len", "generated_len")
    )
    known = np.isin(named, there)
    at = np.where(known, np.searchsorted(there, named), 0)
    within = known.copy()
    if len(there):
        within &= (position >= first[at]) & (position < first[at] + n[at])
    key = position_key(sampled["request"], sampled["position"])
    once = np.zeros(len(key), bool)
    once[np.unique(key, return_index=True)[1]] = True
    for wrong, got, expected in (
        (~within, "a line", "none: its request sampled no token there"),
        (within & ~once, "two lines", "one"),
        (~np.isin(step, ints(steps, "step")), "an unknown step", "a step of the run"),
    ):
        for row in notes.each("E423", np.flatnonzero(wrong)):
            notes.add("E423", _place(notes, named[row], position[row]), got, expected)
    return key, within & once


def _check_values(sampled: pa.Table, notes: Notes) -> None:
    for name, sign in (("entropy", 1), ("logprob", -1), ("margin", 1)):
        values = sampled[name].to_numpy()
        wrong = ~(np.isfinite(values) & (sign * values >= 0))
        for row in notes.each("E423", np.flatnonzero(wrong)):
            request, position = (sampled[n][row].as_py() for n in ("request", "position"))
            expected = f"a finite number, at {'least' if sign > 0 else 'most'} 0"
            place = f"{_place(notes, request, position)} {name}"
            notes.add("E423", place, f"{values[row]}", expected)


def _check_missing(
    catalog: Catalog, requests: pa.Table, free: Ints | None, owed: Keys, notes: Notes
) -> None:
    """Note the requests that have fewer lines than sampled tokens, by number.

    Args:
        free: numbers of those that may have none at all, ``None`` for every one.
    """
    ended = np.asarray(requests["finish_reason"].to_pylist()) != "unfinished"
    there, n = (ints(requests, name)[ended] for name in ("request", "generated_len"))
    with_lines, n_lines = np.unique(owed >> np.uint64(32), return_counts=True)
    found = np.zeros(len(there), np.int64)
    if len(with_lines):
        at = np.minimum(np.searchsorted(with_lines, there), len(with_lines) - 1)
        found = np.where(with_lines[at] == there, n_lines[at], 0)
    may_lack = np.ones(len(there), bool) if free is None else np.isin(there, free)
    short = np.flatnonzero((found < n) & ~((found == 0) & may_lack))
    if not len(short):
        return
    if _was_cut_off(catalog, notes.run):
        got = f"{(n - found)[short].sum()} sampled tokens of {len(short)} requests without a line"
        place = f"census/{notes.run}/sampled"
        notes.add("E423", place, got, "a line for each", "warning")
        return
    for row in notes.each("E423", short):
        place = f"census/{notes.run}/sampled request {there[row]}"
        notes.add("E423", place, f"{found[row]} lines", f"{n[row]}, one per sampled token")


def _free(record: RunRecord, spans: pa.Table) -> Ints | None:
    """Return the requests whose sampled tokens a rule may leave out, ``None`` for every one."""
    if record.fields["capture.sampling"].value not in (None, "all"):
        return None
    return ints(spans.filter(pc.equal(spans["disposition"], "filtered")), "request")


def _check_tokens(catalog: Catalog, run: str, key: Keys, token: Ints, notes: Notes) -> None:
    """Compare the tokens with those of the stored rows."""
    order = np.argsort(key, kind="stable")
    key, token = key[order], token[order]
    for manifest in catalog.shards_by_run[run]:
        path = f"{layout.shard_dir(manifest.shard)}/{TOKENS}"
        if path in catalog.unsound or not len(key):
            continue
        rows = catalog.read_table("tokens", path, ["request", "position", "token_id"])
        mine = position_key(rows["request"], rows["position"])
        at = np.minimum(np.searchsorted(key, mine), len(key) - 1)
        fed = ints(rows, "token_id")
        for row in notes.each("E423", np.flatnonzero((key[at] == mine) & (token[at] != fed))):
            place = _place(notes, *(rows[name][row].as_py() for name in ("request", "position")))
            notes.add("E423", place, f"token {token[at[row]]}", f"{fed[row]}, as in {path}")


def _was_cut_off(catalog: Catalog, run: str) -> bool:
    """Return whether a process of the harvest did not end in order."""
    chains = [chain for chain in catalog.chains.values() if chain.run == run]
    return any(
        chain.close is None or chain.close.reason != "finished"
        for chain in chains
        if chain.kind in ("census", "writer")
    )


def _place(notes: Notes, request: object, position: object) -> str:
    return notes.place("census", "sampled", request, position)
