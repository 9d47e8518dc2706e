"""Canaries: no stored row belongs to another request, as far as replays say."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.errors import ActdsError
from actds.format import tables
from actds.format.positions import position_key
from actds_validators.validate.inventory import Inventory

VERDICTS = ("same", "diverged", "foreign")
COLUMNS = ["request", "position", "hook", "verdict"]


def check_canary(inventory: Inventory) -> None:
    """Check the canary table of every run that has one.

    Args:
        inventory: the dataset; notes E418 for a row of another request, E414 for a line that
            names no stored row.

    Spec: 0.1 section 7.9.
    """
    for run in inventory.runs_with_data:
        if not inventory.parts.get((run, "canary")):
            continue
        try:
            canary = _read(inventory, run, "canary", COLUMNS)
            spans = _read(inventory, run, "spans", None)
        except ActdsError as error:
            inventory.add("integrity", error.code, error.place, error.got, error.expected)
            continue
        if canary is None:
            continue
        _check_words(inventory, run, canary)
        _check_foreign(inventory, run, canary)
        if spans is not None and run not in inventory.incomplete:
            _check_stored(inventory, run, canary, spans)


def _read(
    inventory: Inventory, run: str, name: tables.TableName, columns: list[str] | None
) -> pa.Table | None:
    """Return a table of a run, ``None`` when a part of it must not be parsed."""
    parts = [tables.empty(name) if columns is None else tables.empty(name).select(columns)]
    for _, body in inventory.parts.get((run, name), []):
        path = body.file.path
        if path in inventory.unsound:
            return None
        part = tables.from_parquet(name, inventory.read(path), path, columns)
        if part.num_rows != body.n_rows and name == "canary":
            inventory.add("integrity", "E203", path, f"{part.num_rows} rows", f"{body.n_rows} rows")
        parts.append(part)
    return pa.concat_tables(parts)


def _check_words(inventory: Inventory, run: str, canary: pa.Table) -> None:
    hooks = [hook.name for hook in inventory.genesis.hooks]
    for column, known in (("verdict", VERDICTS), ("hook", hooks)):
        unknown = sorted(set(pc.unique(canary[column]).to_pylist()) - set(known))
        if unknown:
            inventory.add(
                "accounting",
                "E414",
                f"canary/{run} {column}",
                repr(unknown[0])[:80],
                f"one of {', '.join(known)}",
            )


def _check_foreign(inventory: Inventory, run: str, canary: pa.Table) -> None:
    """Note each request with a row of another one, at its first such row."""
    foreign = canary.filter(pc.equal(canary["verdict"], "foreign")).sort_by(
        [("request", "ascending"), ("position", "ascending")]
    )
    request = foreign["request"].to_numpy()
    _, first, counts = np.unique(request, return_index=True, return_counts=True)
    for at, count in zip(first.tolist(), counts.tolist(), strict=True):
        row = foreign.slice(at, 1).to_pylist()[0]
        more = f" (and {count - 1} more rows)" if count > 1 else ""
        inventory.add(
            "accounting",
            "E418",
            f"canary/{run} {_who(row)} hook {row['hook']}{more}",
            "a row far from its replay",
            "the row of the request that it is stored under",
        )


def _check_stored(inventory: Inventory, run: str, canary: pa.Table, spans: pa.Table) -> None:
    """Note lines whose position has no row, neither its own nor a referenced one."""
    own = pc.equal(spans["disposition"], "captured")
    referenced = pc.and_(
        pc.equal(spans["disposition"], "cache_ref"), pc.is_valid(spans["ref_request"])
    )
    stored = spans.filter(pc.or_(own, referenced))
    start, stop = (position_key(stored["request"], stored[name]) for name in ("start", "stop"))
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    key = position_key(canary["request"], canary["position"])
    at = np.searchsorted(start, key, side="right") - 1
    missing = at < 0
    missing[~missing] = key[~missing] >= stop[at[~missing]]
    where = np.flatnonzero(missing)
    if len(where):
        row = canary.slice(int(where[0]), 1).to_pylist()[0]
        more = f" (and {len(where) - 1} more rows)" if len(where) > 1 else ""
        inventory.add(
            "accounting",
            "E414",
            f"canary/{run} {_who(row)}{more}",
            "a canary of a position without a row",
            "a captured position, or a reference to one",
        )


def _who(row: dict[str, object]) -> str:
    return f"request {row['request']} position {row['position']}"
