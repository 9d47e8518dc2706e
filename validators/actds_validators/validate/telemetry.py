"""Alerts and attention: that each line is of a row that the run computed, and may be there.

What a profile makes of readouts is a program's affair: ``actds alerts`` computes it again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.catalog import Catalog
from actds.dataset.columns import Notes, floats, ints
from actds.format.positions import Index, position_key
from actds.format.tables import ROLES, TableName
from actds.format.telemetry import (
    ATTENTION,
    KINDS,
    N_TOP,
    PROFILE,
    Attending,
    attending_of,
    profile_entry,
)
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.validate.readouts import sound_tables

_SLACK = 1e-3
"""Of sums of shares, which are float32."""
_SHARES = ("first", "prompt", "generated", "sinks")
Fault = tuple[Bools | Ints, str, str]


def check_telemetry(catalog: Catalog) -> None:
    """Check alerts and attention of every run; notes E426, and E102 or E103 for their fields.

    Spec: 0.1 sections 7.12 and 7.13.
    """
    for run in catalog.runs_with_data:
        record, notes = catalog.runs.get(run), Notes(run)
        if record is None:
            continue
        with catalog.findings.noting("accounting"):
            _check(catalog, "alerts", PROFILE, profile_entry(record) is not None, None, notes)
        with catalog.findings.noting("accounting"):
            attending = attending_of(record)
            _check(catalog, "attention", ATTENTION, attending is not None, attending, notes)
        for finding in notes.findings():
            catalog.findings.take("accounting", finding)


def _check(
    catalog: Catalog,
    name: TableName,
    field: str,
    is_recorded: bool,
    attending: Attending | None,
    notes: Notes,
) -> None:
    if not any(part.n_rows for part in catalog.parts.get((notes.run, name), [])):
        return
    read = sound_tables(catalog, notes.run, name, "requests", "steps", "spans")
    if not read:
        return
    table, requests, steps, spans = read
    if not is_recorded:
        got = f"{table.num_rows} lines"
        notes.add("E426", f"readouts/{notes.run}/{name}", got, f"none: there is no {field}")
        return
    faults = [_not_computed(table, steps, spans)]
    if attending is None:
        faults += _of_alerts(table, [hook.name for hook in catalog.genesis.hooks])
    else:
        faults += _of_attention(table, requests, attending)
    request, position = ints(table, "request"), ints(table, "position")
    for wrong, got, expected in faults:
        for row in notes.each("E426", np.flatnonzero(wrong)):
            place = notes.place("readouts", name, request[row], position[row])
            notes.add("E426", place, got, expected)


def _not_computed(table: pa.Table, steps: pa.Table, spans: pa.Table) -> Fault:
    """Rows of steps or positions that nobody computed, as of readouts (section 7.8)."""
    computed = spans.filter(pc.is_valid(spans["step"]))
    request, number = np.unique(computed["request"].to_numpy(), return_inverse=True)
    end = np.zeros(len(request) + 1, np.int64)  # the last is of requests that it does not have
    np.maximum.at(end, number, ints(computed, "stop"))
    limit = end[Index(request).of(table["request"].to_numpy())]
    odd = ints(table, "position") >= limit
    odd |= ~np.isin(ints(table, "step"), ints(steps, "step"))
    return odd, "a row that was not computed", "one that the census has"


def _of_alerts(table: pa.Table, hooks: list[str]) -> Iterator[Fault]:
    for column, words in (("kind", list(KINDS)), ("hook", hooks)):
        wrong = ~np.isin(table[column].to_numpy(zero_copy_only=False).astype(str), words)
        yield wrong, f"another {column}", f"one of {', '.join(words)[:200]}"
    score = floats(table, "score")
    yield ~(np.isfinite(score) & (score > 0)), "no score", "a finite one above 0"
    key = position_key(table["request"], table["position"])
    order = np.argsort(key, kind="stable")
    request = ints(table, "request")[order]
    rises = (np.diff(key[order]) > 0) & (np.diff(score[order]) > 0)
    falls = np.flatnonzero((np.diff(request) == 0) & ~rises)
    at = np.zeros(len(key), bool)
    at[order[falls + 1]] = True
    yield at, "a score that did not rise", "more than at the positions before it"


def _of_attention(table: pa.Table, requests: pa.Table, attending: Attending) -> Iterator[Fault]:
    request, position, layer = (ints(table, name) for name in ("request", "position", "layer"))
    numbers = ints(requests, "request")
    order = np.argsort(numbers, kind="stable")
    prompt_len = np.append(ints(requests, "prompt_len")[order], 0)
    depth = position - prompt_len[Index(numbers[order]).of(request)]
    looked = np.isin(layer, attending.layers) & attending.draws(request)
    looked &= (depth >= 0) & (depth % attending.every == 0)
    yield ~looked, "a step that is not looked at", f"one of {ATTENTION}"
    line = np.stack([request, position, layer, ints(table, "head")])
    _, first = np.unique(line, axis=1, return_index=True)
    twin = np.ones(table.num_rows, bool)
    twin[first] = False
    yield twin, "a second line of a head", "one"
    keys, entropy = ints(table, "keys"), floats(table, "entropy")
    shares = np.stack([floats(table, name) for name in _SHARES])
    right = ((shares >= 0) & (shares <= 1 + _SLACK)).all(axis=0)
    right &= np.abs(shares.sum(axis=0) - 1) <= _SLACK
    right &= (keys >= 1) & (keys <= position + 1)
    right &= (entropy >= 0) & (entropy <= np.log2(keys + 1) + _SLACK)
    yield ~right, "values that no attention has", "shares of 1, and the entropy of its keys"
    yield ~_roles_fit(table, shares[1]), "other shares of roles", "parts of the prompt's share"
    yield ~_top_fits(table, position), "other keys", "8 at most, the largest share first"


def _roles_fit(table: pa.Table, prompt: Floats) -> Bools:
    n, sums, least = _lists(table, "roles")
    some = (n == len(ROLES)) & (least >= 0) & (sums <= prompt + _SLACK)
    return np.asarray((n == 0) | some)


def _top_fits(table: pa.Table, position: Ints) -> Bools:
    tops, shares = table["top"].to_pylist(), table["shares"].to_pylist()
    return np.array(
        [
            0 < len(top) == len(of_top) <= N_TOP
            and len({*top}) == len(top)
            and max(top) <= at
            and of_top == sorted(of_top, reverse=True)
            and of_top[-1] >= 0
            and sum(of_top) <= 1 + _SLACK
            for top, of_top, at in zip(tops, shares, position.tolist(), strict=True)
        ],
        bool,
    )


def _lists(table: pa.Table, name: str) -> tuple[Ints, Floats, Floats]:
    """Return length, sum and least value of each list ``(n,)``."""
    column = table[name].combine_chunks()
    n = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    of = np.repeat(np.arange(len(n)), n)
    sums, least = np.zeros(len(n)), np.zeros(len(n))
    np.add.at(sums, of, values)
    np.minimum.at(least, of, values)
    return n, sums, least
