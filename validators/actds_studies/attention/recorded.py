"""Attention rows from the table ``attention``: looked at, and proved, while an engine served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.explore.dataset import Dataset
from actds.format.roles import Roles
from actds.format.tables import ROLES
from actds.format.telemetry import N_TOP, attending_of
from actds_studies.attention.rows import (
    MEASURES,
    Attended,
    Proof,
    Read,
    Request,
    jumps_of,
    prompt_odds,
)
from actds_validators.arrays import Ints, Rows

ABSENT = "it was not looked at: a key, time or room was missing"
_COLUMNS = {"entropy": "entropy", "first": "position 0", "prompt": "prompt"}
_COLUMNS |= {"generated": "generated", "sinks": "sinks"}


@dataclass
class RecordedLayer:
    """The lines of a layer, sorted by run, request, position and head."""

    layer: int
    lines: pa.Table
    n_heads: int
    n_decode: int = 0
    absent: Counter[str] = field(default_factory=Counter)
    proof: Proof | None = None
    scheme: ClassVar[None] = None

    @cached_property
    def _first(self) -> dict[tuple[str, int], list[int]]:
        """The lines of each request, from the first on: where, and how many."""
        names = ["run", "request"]
        rows = self.lines.select(names).append_column("row", pa.array(range(len(self.lines))))
        of_group = rows.group_by(names).aggregate([("row", "min"), ("row", "count")])
        groups = of_group.select([*names, "row_min", "row_count"]).to_pydict().values()
        return {(run, number): of for run, number, *of in zip(*groups, strict=True)}

    def of(self, request: Request) -> pa.Table:
        """Return the lines of a request."""
        return self.lines.slice(*self._first.get((request.run, request.number), (0, 0)))


def recorded_layers(dataset: Dataset, layers: Sequence[int]) -> list[RecordedLayer]:
    """Return the layers that were looked at, of those that are asked for; all by default."""
    if not any(map(attending_of, dataset.runs.values())):
        return []
    table = dataset.attention(run=True)
    known = sorted(set(table["layer"].to_pylist()))
    result = []
    for layer in sorted(set(layers)) or known:
        lines = table.filter(pc.equal(table["layer"], layer))
        if lines.num_rows:
            keys = ("run", "request", "position", "head")
            lines = lines.sort_by([(key, "ascending") for key in keys]).combine_chunks()
            result.append(RecordedLayer(layer, lines, int(pc.max(lines["head"]).as_py()) + 1))
    return result


def recorded_rows(
    dataset: Dataset, requests: Sequence[Request], layers: Sequence[RecordedLayer]
) -> Iterator[Read]:
    """Yield the attention rows of every request at every layer."""
    roles = {run: Roles(dataset.catalog.table("roles", run)) for run in dataset.catalog.run_ids}
    for request in requests:
        attending = attending_of(dataset.runs[request.run])
        if attending is None:
            continue
        wanted = len(range(request.n_given, request.n_fed, attending.every))
        for at, of_layer in enumerate(layers):
            lines = of_layer.of(request)
            steps = _attended(lines, of_layer.n_heads, request, roles[request.run], attending.every)
            of_layer.n_decode += wanted
            if missing := wanted - len(steps.step):
                of_layer.absent[ABSENT] += missing
            yield request, at, steps


def _attended(
    lines: pa.Table, n_heads: int, request: Request, roles: Roles, every: int
) -> Attended:
    n = lines.num_rows // n_heads
    position = lines["position"].to_numpy().astype(np.int64)[:: max(n_heads, 1)]
    values = np.full((n, n_heads, len(MEASURES)), np.nan, np.float32)

    def column(name: str) -> Rows:
        return np.asarray(lines[name].to_numpy(), np.float32).reshape(n, n_heads)

    for name, measure in _COLUMNS.items():
        values[..., MEASURES.index(measure)] = column(name)
    keys = lines["keys"].to_numpy().astype(np.int64).reshape(n, n_heads)[:, :1]
    first = position - keys[:, 0] + 1 if n else position
    has_sinks = bool((values[..., MEASURES.index("sinks")] > 0).any())
    if not has_sinks:
        values[..., MEASURES.index("sinks")] = np.nan
    outcomes = keys + has_sinks
    with np.errstate(divide="ignore", invalid="ignore"):
        even = np.where(outcomes > 1, column("entropy") / np.log2(outcomes), np.nan)
    values[..., MEASURES.index("relative entropy")] = even
    of_roles = lines["roles"].to_pylist()
    if n and all(of_roles):
        start = MEASURES.index(f"role {ROLES[0]}")
        shares = np.array(of_roles, np.float32).reshape(n, n_heads, len(ROLES))
        values[..., start : start + len(ROLES)] = shares
    masses = column("prompt"), column("generated")
    values[..., MEASURES.index("prompt odds")] = prompt_odds(
        *masses, position, first, request.n_given
    )
    top = np.full((n, n_heads, N_TOP), -1, np.int64)
    for row, places in enumerate(lines["top"].to_pylist()):
        top[row // n_heads, row % n_heads, : len(places)] = places
    step = position - request.n_given + 1
    follows = np.flatnonzero(np.diff(step) == every) + 1
    values[follows, :, MEASURES.index("jump")] = jumps_of(top[follows - 1], top[follows])
    names = roles.of(np.full(n, request.number), position).to_pylist()
    role: Ints = np.array([ROLES.index(name) if name else -1 for name in names], np.int64)
    return Attended(step, np.zeros(n, np.int64), role, values)
