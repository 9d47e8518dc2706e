"""Rows of a replay held against those of the harvest that it replays.

Canary, backfill and ``actds replay --compare`` compare here. The row of a position is found by
request and position, also through prefix-cache references, and never by its tokens: a worker that
mixes up rows and tokens together would agree with itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.reading import Catalog
from actds.errors import ActdsError
from actds.explore.requests import TokenSequence, prefix_sums
from actds.format import tables
from actds.format.arrays import widen
from actds.format.positions import Keys, position_key
from actds.format.schema import DType
from actds.format.shard import Shard

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]

ROWS_AT_A_TIME = 1 << 13
POSITIONS_AT_A_TIME = 1 << 20

FAR: dict[DType, float] = {"bfloat16": 0.4, "float16": 0.1, "float32": 0.01}
"""Relative L2 from which a row is a different one, by the type it was computed in: several times
the largest distance between a batch and the same request alone, see docs/canary.md."""
NEAR: dict[DType, float] = {"bfloat16": 0.04, "float16": 0.01, "float32": 0.001}
"""Relative L2 up to which a row is never a different one."""
MARGIN = 2.0
"""Between the two: how many times nearer another replayed row has to be."""
NOWHERE = 2**32 - 1
"""The owner of a position without a row: no run has so many requests."""


@dataclass(frozen=True)
class Pair:
    """A request and its replay, each by run and number.

    Args:
        token_id: what the request fed to the model, int64 ``(n,)``.
    """

    run: str
    request: int
    again_run: str
    again: int
    token_id: Ints


def pairs_of(replay: Catalog, sequences: Iterable[TokenSequence]) -> Iterator[Pair]:
    """Yield each request with its replays, as the table ``origins`` of the replay names them.

    A request that the replay did not serve has none.
    """
    replays: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for run in replay.run_ids:
        requests = replay.table("requests", run)
        served = set(requests.filter(tables.is_served(requests))["request"].to_pylist())
        for line in replay.table("origins", run).to_pylist():
            if line["request"] in served:
                source = line["source_run"], line["source_request"]
                replays.setdefault(source, []).append((run, line["request"]))
    for sequence in sequences:
        for again_run, again in replays.get((sequence.run, sequence.request), []):
            yield Pair(sequence.run, sequence.request, again_run, again, sequence.token_id)


@dataclass(frozen=True)
class Compared:
    """Positions of a harvest and of its replay, and how far their rows are apart.

    Args:
        n_unreplayed: positions with a row in the harvest and none in the replay.
        n_foreign: positions with a row of another request or position at any hook.
    """

    n_rows: int
    n_unreplayed: int
    median: float
    p99: float
    n_foreign: int
    first: str | None

    def words(self) -> str:
        return (
            f"median relative L2 {self.median:.1e}, p99 {self.p99:.1e}, foreign {self.n_foreign:,}"
        )

    def error(self, place: str, next_step: str | None = None) -> ActdsError | None:
        """Return E418 when a row belongs to another request."""
        if not self.n_foreign:
            return None
        return ActdsError(
            "E418",
            f"{place}/{self.first}",
            got=f"{self.n_foreign} rows far from their replay",
            expected="rows of the request under which they are stored",
            next_step=next_step,
        )


def compare(
    harvest: Catalog,
    replay: Catalog,
    pairs: Iterable[Pair],
    *,
    keep: Callable[[pa.Table], None] = lambda table: None,
    rows_at_a_time: int = ROWS_AT_A_TIME,
) -> Compared:
    """Return how the rows of a replay compare with those of the harvest, at the common hooks.

    Args:
        rows_at_a_time: rows that are held, and among which a nearer one is looked for. Beside
            these about 150 bytes for each of a million positions, and 8 for each row compared.

    Spec: 0.1 section 7.9.
    """
    n_rows = n_unreplayed = 0
    apart: list[Floats] = [np.empty(0)]
    foreign: list[tuple[str, int, int, str]] = []
    for some in _groups(pairs, max(rows_at_a_time, POSITIONS_AT_A_TIME)):
        run, again_run = some[0].run, some[0].again_run
        places = _Places.of(harvest, replay, some)
        computed = coarser([*types_of(harvest, run), *types_of(replay, again_run)])
        for number, (hooks, shards, again_shards) in enumerate(
            _row_sets(harvest, run, replay, again_run)
        ):
            stored = locate(shards, position_key(places.owner, places.position))
            again = locate(again_shards, position_key(places.again, places.position))
            is_stored = stored.shard >= 0  # a prefix-cache hit may name a row that was lost
            is_replayed = is_stored & (again.shard >= 0)
            n_rows += 0 if number else int(is_replayed.sum())
            n_unreplayed += int((is_stored & ~is_replayed).sum())
            wrong = is_replayed & (stored.token_id != places.token_id)
            after = _after(places.request, places.position, wrong)
            for rows in _blocks(is_replayed, again, rows_at_a_time):
                for hook in hooks:
                    rows_of_harvest = gather(shards, stored.only(rows), hook)
                    other = gather(again_shards, again.only(rows), hook)
                    relative, cosine = distances(rows_of_harvest, other)
                    far = is_foreign(
                        rows_of_harvest, other, relative, places.prefix[rows], computed
                    )
                    verdict = np.where(far, np.where(after[rows], "diverged", "foreign"), "same")
                    verdict[wrong[rows]] = "foreign"
                    apart.append(relative[verdict == "same"])
                    keep(_lines(places, stored, rows, hook, relative, cosine, verdict))
                    foreign += [
                        (run, int(places.request[row]), int(places.position[row]), hook)
                        for row in rows[verdict == "foreign"]
                    ]
    distance = np.concatenate(apart)
    median, p99 = np.quantile(distance, [0.5, 0.99]) if len(distance) else (math.nan, math.nan)
    first = "{} request {} position {} hook {}".format(*min(foreign)) if foreign else None
    n_foreign = len({place[:3] for place in foreign})
    return Compared(n_rows, n_unreplayed, float(median), float(p99), n_foreign, first)


@dataclass(frozen=True)
class _Places:
    """The positions of requests that may have a row in the harvest, ``(n,)`` each."""

    request: Ints
    position: Ints
    token_id: Ints
    prefix: Hashes
    owner: Ints
    again: Ints

    @classmethod
    def of(cls, harvest: Catalog, replay: Catalog, pairs: Sequence[Pair]) -> _Places:
        owners = _owners(harvest, pairs[0].run, [pair.request for pair in pairs])
        agains = _owners(replay, pairs[0].again_run, [pair.again for pair in pairs])
        columns = []
        for pair in pairs:
            n = len(pair.token_id)
            owner = _owner_of(owners.get(pair.request, []), n)
            again = _owner_of(agains.get(pair.again, []), n)
            at = np.flatnonzero(owner != NOWHERE)
            same = np.full(len(at), pair.request)
            prefix = prefix_sums(pair.token_id)[at]
            columns.append((same, at, pair.token_id[at], prefix, owner[at], again[at]))
        return cls(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _owners(
    catalog: Catalog, run: str, requests: Sequence[int]
) -> dict[int, list[tuple[int, int, int]]]:
    """Return by request ``(start, stop, owner)`` of the positions that have a row.

    The owner is the request itself, or the one that computed them.
    """
    spans = catalog.table("spans", run)
    spans = spans.filter(pc.is_in(spans["request"], pa.array(requests, pa.uint32())))
    owners: dict[int, list[tuple[int, int, int]]] = {}
    for span in spans.to_pylist():
        owner = {"captured": span["request"], "cache_ref": span["ref_request"]}
        request = owner.get(span["disposition"])
        if request is not None:
            place = (span["start"], span["stop"], request)
            owners.setdefault(span["request"], []).append(place)
    return owners


def _owner_of(places: list[tuple[int, int, int]], n: int) -> Ints:
    owner = np.full(n, NOWHERE, np.int64)
    for start, stop, request in places:
        owner[start:stop] = request
    return owner


def _groups(pairs: Iterable[Pair], n_positions: int) -> Iterator[list[Pair]]:
    groups: dict[tuple[str, str], list[Pair]] = {}
    n_held = 0
    for pair in pairs:
        groups.setdefault((pair.run, pair.again_run), []).append(pair)
        n_held += len(pair.token_id)
        if n_held >= n_positions:
            yield from groups.values()
            groups, n_held = {}, 0
    yield from groups.values()


def _row_sets(
    harvest: Catalog, run: str, replay: Catalog, again_run: str
) -> Iterator[tuple[list[str], list[Shard], list[Shard]]]:
    theirs = replay.row_sets(again_run)
    for hooks, shards in harvest.row_sets(run):
        for again_hooks, again_shards in theirs:
            common = [hook for hook in hooks if hook in again_hooks]
            if common and shards and again_shards:
                yield common, shards, again_shards


def _blocks(mask: npt.NDArray[np.bool_], again: Located, n: int) -> Iterator[Ints]:
    """Yield the rows of a mask, ``n`` at a time, as they are stored in the replay."""
    rows = np.flatnonzero(mask)
    rows = rows[np.lexsort((again.row[rows], again.shard[rows]))]
    for first in range(0, len(rows), n):
        yield rows[first : first + n]


def _lines(
    places: _Places,
    stored: Located,
    rows: Ints,
    hook: str,
    relative: Floats,
    cosine: Floats,
    verdict: np.ndarray,
) -> pa.Table:
    return tables.build(
        "canary",
        {
            "request": places.request[rows],
            "position": places.position[rows],
            "hook": [hook] * len(rows),
            "step": stored.step[rows],
            "token_id": stored.token_id[rows],
            "replayed_token_id": places.token_id[rows],
            "relative_l2": relative,
            "cosine": cosine,
            "verdict": verdict,
        },
    )


def _after(request: Ints, position: Ints, wrong: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    first: dict[int, int] = {}
    for i in np.flatnonzero(wrong):
        number = int(request[i])
        first[number] = min(first.get(number, int(position[i])), int(position[i]))
    if not first:
        return np.zeros(len(request), np.bool_)
    limits = np.array([first.get(int(number), NOWHERE) for number in request], np.int64)
    return np.asarray(position > limits)


def types_of(catalog: Catalog, run: str) -> list[DType]:
    fields = catalog.runs[run].fields
    computed, precision = fields["numerics.dtype"].value, fields["numerics.matmul_precision"].value
    types = [hook.dtype for hook in catalog.genesis.hooks]
    types += [name for name in FAR if name == computed]
    if precision not in ("highest", None):
        types.append("float16")  # TF32 has the same precision
    return types


def coarser(types: Iterable[DType]) -> DType:
    order: tuple[DType, ...] = ("float32", "float16", "bfloat16")
    return max(types, key=order.index)


@dataclass(frozen=True)
class Located:
    """The location of rows of a run."""

    shard: Ints
    row: Ints
    token_id: Ints
    step: Ints

    def only(self, rows: Ints) -> Located:
        return Located(self.shard[rows], self.row[rows], self.token_id[rows], self.step[rows])


def locate(shards: Sequence[Shard], keys: Keys) -> Located:
    """Return the location of the rows of (request, position) keys, in any order, also repeated."""
    unique, back = np.unique(keys, return_inverse=True)
    columns = {
        name: np.full(len(unique), -1, np.int64) for name in ("shard", "row", "token", "step")
    }
    for number, shard in enumerate(shards if len(unique) else ()):
        tokens = shard.tokens(["request", "position", "token_id", "step"])
        present = position_key(tokens["request"].to_numpy(), tokens["position"].to_numpy())
        at = np.minimum(np.searchsorted(unique, present), len(unique) - 1)
        rows = np.flatnonzero(unique[at] == present)
        at = at[rows]
        columns["shard"][at], columns["row"][at] = number, rows
        columns["token"][at] = tokens["token_id"].to_numpy()[rows]
        columns["step"][at] = tokens["step"].to_numpy()[rows]
    return Located(*(columns[name][back] for name in ("shard", "row", "token", "step")))


def gather(shards: Sequence[Shard], located: Located, hook: str) -> Rows:
    """Return the rows of a hook, float32 ``(n, d_model)``, in the order of ``located``."""
    rows: Rows | None = None
    for number, shard in enumerate(shards):
        places = np.flatnonzero(located.shard == number)
        if not len(places):
            continue
        with shard.array(hook) as reader:
            values = widen(reader.gather(located.row[places]), reader.dtype)
        if rows is None:
            rows = np.zeros((len(located.row), values.shape[1]), np.float32)
        rows[places] = values
    return np.zeros((len(located.row), 1), np.float32) if rows is None else rows


def distances(stored: Rows, replayed: Rows) -> tuple[Floats, Floats]:
    """Return relative L2 and cosine of each pair of rows.

    The distance is relative to the replayed row's norm; to a row of zeros, or one that is not
    finite, it is infinite, unless the two are equal.
    """
    row, other = stored.astype(np.float64), replayed.astype(np.float64)
    equal = ((row == other) | (np.isnan(row) & np.isnan(other))).all(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.linalg.norm(row - other, axis=1)
        norms = np.linalg.norm(row, axis=1), np.linalg.norm(other, axis=1)
        relative = np.where(equal, 0.0, apart / norms[1])
        cosine = np.where(equal, 1.0, (row * other).sum(axis=1) / (norms[0] * norms[1]))
    return np.nan_to_num(relative, nan=np.inf), np.nan_to_num(cosine, nan=0.0)


def is_foreign(
    stored: Rows, replayed: Rows, relative: Floats, prefix: Hashes, computed: DType
) -> npt.NDArray[np.bool_]:
    """Return which stored rows belong to another request or position than their own.

    A row far from its own replay is foreign. One that is neither near nor far is foreign when
    another replayed row is nearer by a clear margin: rounding moves a row, but not onto another
    one. Rows with equal tokens up to their position are interchangeable.

    Args:
        prefix: equal where the tokens up to the row are equal.

    Spec: 0.1 section 7.9.
    """
    foreign = relative > FAR[computed]
    unsure = np.flatnonzero(~foreign & (relative > NEAR[computed]))
    squares = (replayed.astype(np.float64) ** 2).sum(axis=1)
    for row in unsure:
        with np.errstate(invalid="ignore", over="ignore"):
            products = (replayed @ stored[row]).astype(np.float64)
        apart = squares - 2 * products + float(stored[row].astype(np.float64) @ stored[row])
        apart[(prefix == prefix[row]) | ~np.isfinite(apart)] = np.inf
        # The difference of large numbers finds the nearest row, and is too coarse for its distance.
        nearest = replayed[int(apart.argmin())].astype(np.float64)
        own_distance = np.sqrt(squares[row]) * relative[row]
        comparable = np.isfinite(apart).any()
        foreign[row] = comparable and np.linalg.norm(nearest - stored[row]) * MARGIN < own_distance
    return foreign
