"""A dataset at a glance: norms by position, and what became of its positions.

What is read is bounded, but for the tables of spans and requests: rows and readouts are sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from actds.dataset.fates import fate_counts
from actds.format.tables import DISPOSITIONS, EXTERNAL, PHASES

if TYPE_CHECKING:
    from actds.explore.dataset import Dataset

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SAMPLED_ROWS = 16_384
"""Rows of a hook that are read for its norms, where the run has no readouts."""
SAMPLED_READOUTS = 1 << 21
"""Readouts of a hook that are read, in whole files, the first of which may have more."""
QUANTILES = (0.1, 0.5, 0.9)
BLOCK_ROWS = 64
_MAX_SHARDS = 64
_EXACT = 4  # positions that are a band of their own: the first ones are often sinks
_N_BANDS = 33


@dataclass(frozen=True)
class NormProfile:
    """Norms of rows of a hook by position, in ``n`` bands that have rows.

    Args:
        hook: the hook.
        low: first position of each band, int64 ``(n,)``.
        high: position after its last, int64 ``(n,)``.
        count: rows of each band that were looked at, int64 ``(n,)``.
        quantiles: of the norms of each band at 0.1, 0.5 and 0.9, float64 ``(3, n)``; nan where
            every norm of a band is not finite.
        source: ``readouts`` or ``rows``.
        n_rows: rows that were looked at.
    """

    hook: str
    low: Ints
    high: Ints
    count: Ints
    quantiles: Floats
    source: str
    n_rows: int


@dataclass(frozen=True)
class Fates:
    """What became of the positions of all requests.

    Args:
        low: first position of each band, int64 ``(n,)``: 0, 1, 3, 7 ...
        high: position after its last, int64 ``(n,)``.
        count: positions by phase, disposition (as ``PHASES`` and ``DISPOSITIONS``) and band, int64
            ``(2, 6, n)``.
        external: of the references, those to KV from outside the run, by phase and band, int64
            ``(2, n)``.
        reasons: positions by disposition and reason; those that no step computed are
            ``never computed``.
    """

    low: Ints
    high: Ints
    count: Ints
    external: Ints
    reasons: dict[tuple[str, str | None], int]

    @property
    def total(self) -> int:
        """Return the positions of all requests."""
        return int(self.count.sum())


def norm_profile(dataset: Dataset, hook: str) -> NormProfile:
    """Return the norms of a hook's rows by position, from readouts if there are any.

    Raises:
        ActdsError: E014 no such hook; and as reading tables and rows.
    """
    shards = dataset.shards_of(hook)
    source = "readouts"
    position, norm = _from_readouts(dataset, hook)
    if not len(norm) and shards:
        source = "rows"
        position, norm = _from_rows(dataset, hook)
    edges = _edges(int(position.max()) if len(position) else 0)
    band = np.searchsorted(edges, position, side="right") - 1
    order = np.argsort(band, kind="stable")
    there, starts, count = np.unique(band[order], return_index=True, return_counts=True)
    parts = np.split(norm[order].astype(np.float64), starts[1:]) if len(there) else []
    finite = [part[np.isfinite(part)] for part in parts]
    nothing = np.full(len(QUANTILES), np.nan)
    columns = [np.quantile(part, QUANTILES) if len(part) else nothing for part in finite]
    return NormProfile(
        hook,
        edges[there],
        edges[there + 1],
        count.astype(np.int64),
        np.array(columns).T.reshape(len(QUANTILES), len(there)),
        source,
        len(norm),
    )


def _edges(last: int) -> Ints:
    """Return where bands begin, and the end of the last: one each, then by half an octave."""
    rising = _EXACT * 2.0 ** (np.arange(1, 2 * _N_BANDS) / 2)
    edges: Ints = np.concatenate([np.arange(_EXACT + 1), np.round(rising)]).astype(np.int64)
    return edges[: int(np.searchsorted(edges, last, side="right")) + 1]


def _from_readouts(dataset: Dataset, hook: str) -> tuple[Ints, Floats]:
    """Return position and norm of readouts of a hook, from files spread evenly over the runs."""
    catalog = dataset.catalog
    files = [part for (_, name), parts in catalog.parts.items() if name == "readouts"
             for part in parts]  # fmt: skip
    n_files = len(files)
    # A file holds every hook; each file counts as the mean one does.
    n_lines = sum(part.n_rows for part in files) // max(len(dataset.hooks), 1)
    if n_lines > SAMPLED_READOUTS:
        n_files = max(1, n_files * SAMPLED_READOUTS // n_lines)
    found: list[tuple[Ints, Floats]] = []
    for k in range(n_files):
        part = files[k * len(files) // n_files]
        table = catalog.read_table("readouts", part.file.path, ["position", "hook", "norm"])
        mine = table.filter(table["hook"].to_numpy(zero_copy_only=False) == hook)
        found.append(
            (mine["position"].to_numpy().astype(np.int64), mine["norm"].to_numpy().astype(float))
        )
    return _joined(found)


def _from_rows(dataset: Dataset, hook: str) -> tuple[Ints, Floats]:
    """Return position and norm of rows of a hook: short blocks, spread evenly over its shards."""
    shards = dataset.shards_of(hook)
    array = dataset.array(hook)
    starts = np.cumsum([0, *(shard.n_rows for shard in shards)])
    n_shards = min(len(shards), _MAX_SHARDS)
    found: list[tuple[Ints, Floats]] = []
    for k in range(n_shards):
        number = k * len(shards) // n_shards
        shard = shards[number]
        position = shard.tokens(["position"])["position"].to_numpy().astype(np.int64)
        for block in _blocks(shard.n_rows, SAMPLED_ROWS // n_shards):
            rows = array[int(starts[number]) + block.start : int(starts[number]) + block.stop]
            norm = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
            found.append((position[block], norm))
    return _joined(found)


def _blocks(n_rows: int, room: int) -> Iterator[slice]:
    """Yield blocks of rows, all of them where there are no more than the room."""
    if n_rows <= room:
        yield slice(0, n_rows)
        return
    n_blocks = max(1, room // BLOCK_ROWS)
    for k in range(n_blocks):
        start = k * n_rows // n_blocks
        yield slice(start, min(start + BLOCK_ROWS, n_rows))


def _joined(found: list[tuple[Ints, Floats]]) -> tuple[Ints, Floats]:
    if not found:
        return np.empty(0, np.int64), np.empty(0)
    position, norm = (np.concatenate(column) for column in zip(*found, strict=True))
    return position, norm


def fates(dataset: Dataset) -> Fates:
    """Return what became of the positions of all requests, from spans and requests.

    Raises:
        ActdsError: as reading tables.
    """
    high = 2 ** np.arange(1, _N_BANDS + 1, dtype=np.int64) - 1
    low = np.concatenate([[0], high[:-1]])
    count = np.zeros((len(PHASES), len(DISPOSITIONS), _N_BANDS), np.int64)
    external = np.zeros((len(PHASES), _N_BANDS), np.int64)
    reasons: Counter[tuple[str, str | None]] = Counter()
    for run in dataset.catalog.run_ids:
        spans = dataset.catalog.table("spans", run)
        requests = dataset.catalog.table("requests", run)
        start, stop, request = (
            spans[name].to_numpy().astype(np.int64) for name in ("start", "stop", "request")
        )
        prompt = _prompt_len(requests["request"].to_numpy(), requests["prompt_len"].to_numpy())
        split = np.clip(prompt[request] if len(prompt) else stop, start, stop)
        kinds = np.array(spans["disposition"].to_pylist(), dtype=object)
        for k, disposition in enumerate(DISPOSITIONS):
            mine = kinds == disposition
            for phase, (a, b) in enumerate(((start, split), (split, stop))):
                count[phase, k] += _overlap(a[mine], b[mine], low, high)
        outside = np.array(spans["reason"].to_pylist(), dtype=object) == EXTERNAL
        for phase, (a, b) in enumerate(((start, split), (split, stop))):
            external[phase] += _overlap(a[outside], b[outside], low, high)
        reasons += fate_counts(spans)
    used = int(np.flatnonzero(count.any(axis=(0, 1))).max(initial=-1)) + 1
    return Fates(low[:used], high[:used], count[..., :used], external[:, :used], dict(reasons))


def _prompt_len(request: npt.NDArray[np.uint32], prompt_len: npt.NDArray[np.uint32]) -> Ints:
    """Return the prompt tokens by request number; 0 for a number without a request."""
    found = np.zeros(int(request.max()) + 1 if len(request) else 0, np.int64)
    found[request] = prompt_len
    return found


def _overlap(start: Ints, stop: Ints, low: Ints, high: Ints) -> Ints:
    """Return how many positions of all spans lie in each band."""
    return np.array(
        [
            np.clip(np.minimum(stop, b) - np.maximum(start, a), 0, None).sum()
            for a, b in zip(low.tolist(), high.tolist(), strict=True)
        ],
        np.int64,
    )
