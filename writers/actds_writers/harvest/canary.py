"""Canary: a replay, alone, of a share of the requests of a harvest, and the comparison of its rows.

Its sequences are those that the client sent and received, not those of the harvest's tables: so
these are compared with what they do not know. Backfill and ``actds replay --compare`` compare here
as well. The row of a position is found by request and position, also through prefix-cache
references, and never by its tokens: a worker that mixes up rows and tokens together would agree
with itself.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.catalog import Catalog
from actds.dataset.commit import commit_part, in_parts
from actds.dataset.ledger import Chain
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.explore.requests import TokenSequence, prefix_sums
from actds.format import tables
from actds.format.arrays import widen
from actds.format.positions import Keys, position_key
from actds.format.schema import DType
from actds.format.shard import Shard
from actds.store import local_folder, open_store
from actds.text import counted
from actds_writers.config import WriteSettings
from actds_writers.engine_protocol import Finished, find_engine
from actds_writers.harvest.prepare import Plan, as_requests, request_key

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
        computed = computed_type(harvest, run, replay, again_run)
        in_both, in_harvest = np.zeros((2, len(places.position)), np.bool_)
        for hooks, shards, again_shards in _row_sets(harvest, run, replay, again_run):
            stored = locate(shards, position_key(places.owner, places.position))
            again = locate(again_shards, position_key(places.again, places.position))
            is_stored = stored.shard >= 0  # a prefix-cache hit may name a row that was lost
            is_replayed = is_stored & (again.shard >= 0)
            in_both |= is_replayed
            in_harvest |= is_stored
            wrong = is_replayed & (stored.token_id != places.token_id)
            after = _after(places.request, places.position, wrong)
            for rows in _blocks(is_replayed, again, rows_at_a_time):
                for hook in hooks:
                    kept = gather(shards, stored.only(rows), hook)
                    other = gather(again_shards, again.only(rows), hook)
                    relative, cosine = distances(kept, other)
                    far = is_foreign(kept, other, relative, places.prefix[rows], computed)
                    verdict = np.where(far, np.where(after[rows], "diverged", "foreign"), "same")
                    verdict[wrong[rows]] = "foreign"
                    apart.append(relative[verdict == "same"])
                    columns = {
                        "request": places.request[rows],
                        "position": places.position[rows],
                        "hook": [hook] * len(rows),
                        "step": stored.step[rows],
                        "token_id": stored.token_id[rows],
                        "replayed_token_id": places.token_id[rows],
                        "relative_l2": relative,
                        "cosine": cosine,
                        "verdict": verdict,
                    }
                    keep(tables.build("canary", columns))
                    foreign += [
                        (run, int(places.request[row]), int(places.position[row]), hook)
                        for row in rows[verdict == "foreign"]
                    ]
        n_rows += int(in_both.sum())
        n_unreplayed += int((in_harvest & ~in_both).sum())
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
        stored = owners(harvest, pairs[0].run, {p.request: len(p.token_id) for p in pairs})
        agains = owners(replay, pairs[0].again_run, {p.again: len(p.token_id) for p in pairs})
        columns = []
        for pair in pairs:
            owner, again = stored[pair.request], agains[pair.again]
            at = np.flatnonzero(owner != NOWHERE)
            same, prefix = np.full(len(at), pair.request), prefix_sums(pair.token_id)[at]
            columns.append((same, at, pair.token_id[at], prefix, owner[at], again[at]))
        return cls(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def owners(catalog: Catalog, run: str, lengths: Mapping[int, int]) -> dict[int, Ints]:
    """Return by request, for each of its positions, the request that has its row.

    It is the request itself, or the one that computed the position.
    """
    of_requests = {request: np.full(n, NOWHERE, np.int64) for request, n in lengths.items()}
    spans = catalog.table("spans", run)
    spans = spans.filter(pc.is_in(spans["request"], pa.array(list(of_requests), pa.uint32())))
    for span in spans.to_pylist():
        owner = {"captured": span["request"], "cache_ref": span["ref_request"]}
        request = owner.get(span["disposition"])
        if request is not None:
            of_requests[span["request"]][span["start"] : span["stop"]] = request
    return of_requests


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
    theirs = replay.shards_by_hooks(again_run)
    for hooks, shards in harvest.shards_by_hooks(run):
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


def _after(request: Ints, position: Ints, wrong: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which positions come after a wrong one of their request."""
    numbers, of_row = np.unique(request, return_inverse=True)
    first = np.full(len(numbers), NOWHERE, np.int64)
    np.minimum.at(first, of_row[wrong], position[wrong])
    return np.asarray(position > first[of_row])


def computed_type(harvest: Catalog, run: str, replay: Catalog, again_run: str) -> DType:
    """Return the coarsest type that rows of the two runs were computed in."""
    types: set[object] = set()
    for catalog, name in ((harvest, run), (replay, again_run)):
        fields = catalog.runs[name].fields
        types |= {hook.dtype for hook in catalog.genesis.hooks} | {fields["numerics.dtype"].value}
        if fields["numerics.matmul_precision"].value not in ("highest", None):
            types.add("float16")  # TF32 has the same precision
    return next(dtype for dtype in FAR if dtype in types)


@dataclass(frozen=True)
class Located:
    shard: Ints
    row: Ints
    token_id: Ints
    step: Ints

    def only(self, rows: Ints) -> Located:
        return Located(self.shard[rows], self.row[rows], self.token_id[rows], self.step[rows])


def locate(shards: Sequence[Shard], keys: Keys) -> Located:
    """Return the location of the rows of (request, position) keys, in any order, also repeated."""
    unique, back = np.unique(keys, return_inverse=True)
    columns = np.full((4, len(unique)), -1, np.int64)
    for number, shard in enumerate(shards if len(unique) else ()):
        tokens = shard.tokens(["request", "position", "token_id", "step"])
        present = position_key(tokens["request"].to_numpy(), tokens["position"].to_numpy())
        at = np.minimum(np.searchsorted(unique, present), len(unique) - 1)
        rows = np.flatnonzero(unique[at] == present)
        token_id, step = (tokens[name].to_numpy()[rows] for name in ("token_id", "step"))
        for column, values in zip(columns, (number, rows, token_id, step), strict=True):
            column[at[rows]] = values
    return Located(*columns[:, back])


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


SPARE = 16
"""Extra requests whose tokens are kept, in case some are aborted."""
POLL_S = 0.2


def n_replayed(share: str, n_requests: int) -> int:
    """Return how many requests ``--canary`` replays: ``0.1%`` of them, or ``5``; raises E009."""
    is_percent = share.strip().endswith("%")
    try:
        value = Decimal(share.strip().removesuffix("%"))
        fits = 0 < value <= (100 if is_percent else 1_000_000) and (is_percent or value % 1 == 0)
    except InvalidOperation:
        fits = False
    if not fits:
        got, expected = repr(share)[:80], "a share such as 0.1% or a number"
        raise ActdsError("E009", "canary", got=got, expected=expected)
    n = max(1, math.ceil(value * n_requests / 100)) if is_percent else int(value)
    return min(n, n_requests)


@dataclass(frozen=True)
class Outcome(Compared):
    n_requests: int
    n_same_token: int | None

    def line(self) -> str:
        words = f"{counted(self.n_requests, 'request')} replayed alone, {self.n_rows:,} rows: "
        words += self.words()
        if self.n_same_token is not None:
            words += f"; same last token in {self.n_same_token:,}"
        return words


class Canary:
    """The canaries of one run; ``canary`` is set in its settings."""

    def __init__(self, settings: WriteSettings, plan: Plan) -> None:
        self._settings, self._plan = settings, plan
        servable = [encoded for encoded in plan.encoded if encoded.skip is None]
        self._wanted = n_replayed(settings.canary or "", len(servable))
        order = np.random.Generator(np.random.Philox(key=settings.seed)).permutation(len(servable))
        chosen = [servable[i] for i in order[: 2 * self._wanted + SPARE]]
        self._candidates = {request_key(encoded.prompt.index): encoded for encoded in chosen}
        self._sampled: dict[str, tuple[int, ...]] = {}

    def finished(self, finished: Finished) -> None:
        if finished.key in self._candidates and finished.token_ids:
            self._sampled[finished.key] = finished.token_ids

    def replay(
        self, run: str, software: str, interrupted: Callable[[], int], say: Callable[[str], None]
    ) -> Outcome | None:
        """Replay, compare and commit the table; return the result, ``None`` when interrupted.

        Args:
            interrupted: returns the number of interruptions so far.
        """
        catalog = read_catalog(open_store(self._settings.out))
        sequences, last = self._sequences(catalog, run)
        if not sequences:
            raise _nothing(run, "no finished request with a stored row")
        say(f"Replaying {len(sequences)} requests alone ...")
        lines: list[pa.Table] = []
        beside = local_folder(self._settings.out)
        parent = beside.absolute().parent if beside else None
        with tempfile.TemporaryDirectory(
            prefix=".actds-canary-", dir=parent, ignore_cleanup_errors=True
        ) as folder:
            sampled = self._serve(f"{folder}/acts", catalog, sequences, interrupted)
            if sampled is None:
                return None
            alone = read_catalog(open_store(f"{folder}/acts"))
            compared = compare(
                catalog,
                alone,
                pairs_of(alone, sequences),
                keep=lines.append,
                rows_at_a_time=sys.maxsize,  # a row may be that of any other request
            )
        if compared.n_unreplayed:
            got = f"{compared.n_unreplayed} positions without a row"
            raise ActdsError("E504", "canary replay", got=got, expected="every row")
        if not compared.n_rows:
            raise _nothing(run, "no stored row of the requests that were replayed")
        n_same = sum(sampled.get(key) == token for key, token in last.items())
        outcome = Outcome(
            **vars(compared),
            n_requests=len(sequences),
            n_same_token=n_same if self._settings.temperature == 0 else None,
        )
        table = pa.concat_tables(lines)
        table = table.sort_by([(name, "ascending") for name in ("request", "position", "hook")])
        chain = Chain.begin(catalog.store, catalog.genesis.dataset, run, "tool", software)
        for n, piece in in_parts(table):
            commit_part(catalog.store, chain, "canary", run, n, piece)
        chain.close("finished", {"requests": len(sequences), "foreign": outcome.n_foreign})
        return outcome

    def _sequences(self, catalog: Catalog, run: str) -> tuple[list[TokenSequence], dict[str, int]]:
        """Return what is replayed: what each request fed, as the client knows it.

        Also the last token of each, which it sampled and did not feed, by the key of its replay.
        """
        rows = [encoded.prompt.row for encoded in self._candidates.values()]
        requests, stored = _served(catalog, run, rows)
        sequences: list[TokenSequence] = []
        last: dict[str, int] = {}
        for name, encoded in self._candidates.items():
            line = requests.get(encoded.prompt.row)
            if name in self._sampled and line is not None and line["request"] in stored:
                tokens = [*encoded.token_ids, *self._sampled[name]]
                fed = tokens[:-1]
                last[request_key(len(sequences))] = tokens[-1]
                ids, n_given = np.array(fed, np.int64), len(encoded.token_ids)
                roles: list[str | None] = [None] * len(fed)
                sequences.append(
                    TokenSequence(run, line["request"], line, ids, roles, n_given, None)
                )
            if len(sequences) == self._wanted:
                break
        return sequences, last

    def _serve(
        self,
        out: str,
        catalog: Catalog,
        sequences: list[TokenSequence],
        interrupted: Callable[[], int],
    ) -> dict[str, int] | None:
        encoded, client = as_requests(sequences, catalog)
        engine = find_engine(self._settings.engine).alone(self._plan.engine)
        plan = replace(
            self._plan,
            engine=engine,
            encoded=tuple(encoded),
            client=tuple(client),
            regimes={},
        )
        settings = self._settings.model_copy(
            update={
                "out": out,
                "resume": False,
                "canary": None,
                "entropy": False,
                "temperature": 0.0,
                "order": "sequence",
                "overflow": "block",
                "always": None,
                "keep": "",
                "metrics_port": None,
            }
        )
        return _run(settings, plan, interrupted)


def _served(
    catalog: Catalog, run: str, source_rows: list[int]
) -> tuple[dict[int, dict[str, Any]], set[int]]:
    """Return the requests of source rows by these, and the numbers of those that have a row.

    Aborted ones are left out. A row that a prefix-cache hit names will do.
    """
    requests = catalog.table("requests", run)
    ended = pc.is_in(requests["finish_reason"], pa.array(["stop", "length"]))
    chosen = pc.is_in(requests["source_row"], pa.array(source_rows, pa.int64()))
    requests = requests.filter(pc.and_(ended, chosen))
    spans = catalog.table("spans", run)
    stored = pc.or_(pc.equal(spans["disposition"], "captured"), pc.is_valid(spans["ref_request"]))
    spans = spans.filter(pc.and_(stored, pc.is_in(spans["request"], requests["request"])))
    lines = {line["source_row"]: line for line in requests.to_pylist()}
    return lines, set(spans["request"].to_pylist())


def _nothing(run: str, got: str) -> ActdsError:
    expected, step = "at least one to compare", "Nothing was compared; harvest more requests."
    return ActdsError("E006", f"canary/{run}", got=got, expected=expected, next_step=step)


def _run(
    settings: WriteSettings, plan: Plan, interrupted: Callable[[], int]
) -> dict[str, int] | None:
    process = subprocess.Popen(
        [sys.executable, "-m", "actds_writers.harvest.run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C reaches the command, which forwards it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    n_forwarded = interrupted()
    try:
        pickle.dump((settings, plan), process.stdin)
        process.stdin.close()
        while True:
            try:
                code = process.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                if interrupted() > n_forwarded:
                    n_forwarded = interrupted()
                    process.send_signal(signal.SIGINT)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    answer = process.stdout.read()
    if code == 1 and answer:
        raise pickle.loads(answer)
    if code == 0:
        sampled: dict[str, int] = pickle.loads(answer)
        return sampled
    if code != 2:
        raise ActdsError(
            "E504", "canary replay", got=f"it ended with code {code}", expected="a replay"
        )
    return None
