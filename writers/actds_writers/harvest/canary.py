"""Canary replay: some requests run again alone after a harvest, and their rows are compared.

The exact sequence of tokens that the client sent and received is replayed as one prompt: so every
position is compared with any sampling, and independently of the harvest's own tables.
"""

from __future__ import annotations

import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.commit import commit_part, in_parts
from actds.errors import ActdsError
from actds.format import tables
from actds.format.arrays import widen
from actds.format.positions import Keys, position_key
from actds.format.shard import Shard
from actds.ledger import Chain
from actds.reading import Catalog
from actds.schema import DType
from actds.store import local_folder, open_store
from actds.text import counted
from actds_writers.config import WriteSettings
from actds_writers.engine_protocol import Finished, find_engine
from actds_writers.harvest.prepare import Plan, request_key
from actds_writers.prompts.encoding import Encoded

SPARE = 16
"""Extra requests whose tokens are kept, in case some are aborted."""
POLL_S = 0.2


@dataclass(frozen=True)
class Share:
    """How many requests are replayed.

    Args:
        percent: share of the requests, ``None`` when it is a number.
    """

    percent: Decimal | None
    count: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """Return what ``--canary`` says: ``0.1%`` or ``5``.

        Raises:
            ActdsError: E009 for anything else.
        """
        try:
            value = Decimal(text.strip().removesuffix("%"))
            percent = text.strip().endswith("%")
            if 0 < value <= (100 if percent else 1_000_000) and (percent or value % 1 == 0):
                return cls(value, 0) if percent else cls(None, int(value))
        except InvalidOperation:
            pass
        raise ActdsError(
            "E009", "--canary", got=repr(text)[:80], expected="a share such as 0.1% or a number"
        )

    def of(self, n_requests: int) -> int:
        """Return how many of ``n_requests`` to replay, at least one."""
        if self.percent is None:
            return min(self.count, n_requests)
        return min(max(1, math.ceil(self.percent * n_requests / 100)), n_requests)


@dataclass(frozen=True)
class Outcome:
    """The result of a replay.

    Args:
        n_rows: positions compared, at every hook.
        median: relative L2 of matching rows: the numeric floor of the run.
        p99: 99th percentile of the same.
        n_foreign: positions with a row of another request or position at any hook.
        n_same_token: replays that sample the last token of the harvest again.
        first: the first foreign row, described.
    """

    n_requests: int
    n_rows: int
    median: float
    p99: float
    n_foreign: int
    n_same_token: int | None
    first: str | None

    def line(self) -> str:
        """Return the outcome in one line."""
        words = (
            f"{counted(self.n_requests, 'request')} replayed alone, {self.n_rows:,} rows: "
            f"median relative L2 {self.median:.1e}, p99 {self.p99:.1e}, foreign {self.n_foreign:,}"
        )
        if self.n_same_token is not None:
            words += f"; same last token in {self.n_same_token:,}"
        return words

    def error(self, run: str) -> ActdsError | None:
        """Return E418 when a row belongs to another request."""
        if not self.n_foreign:
            return None
        return ActdsError(
            "E418",
            f"canary/{run} {self.first}",
            got=f"{self.n_foreign} rows far from their replay",
            expected="rows of the request under which they are stored",
        )


class Canary:
    """The canaries of one run; ``canary`` is set in its settings.

    Raises:
        ActdsError: E009 when ``--canary`` cannot be used.
    """

    def __init__(self, settings: WriteSettings, plan: Plan) -> None:
        self._settings, self._plan = settings, plan
        servable = [encoded for encoded in plan.encoded if encoded.skip is None]
        self._wanted = Share.parse(settings.canary or "").of(len(servable))
        order = np.random.Generator(np.random.Philox(key=settings.seed)).permutation(len(servable))
        chosen = [servable[i] for i in order[: 2 * self._wanted + SPARE]]
        self._candidates = {request_key(encoded.prompt.index): encoded for encoded in chosen}
        self._sampled: dict[str, tuple[int, ...]] = {}

    def finished(self, finished: Finished) -> None:
        """Keep the tokens that the client got, if the request is a candidate."""
        if finished.key in self._candidates and finished.token_ids:
            self._sampled[finished.key] = finished.token_ids

    def replay(
        self,
        run: str,
        software: str,
        interrupted: Callable[[], int],
        said: Callable[[str], None],
    ) -> Outcome | None:
        """Replay, compare and commit the table; return the result, ``None`` when interrupted.

        Args:
            run: run to check; its chains are closed.
            interrupted: returns the number of interruptions so far.
            said: takes a progress message.

        Raises:
            ActdsError: what stopped the replay.
        """
        catalog = Catalog.read(open_store(self._settings.out))
        requests = _Requests.of(
            catalog, run, {encoded.prompt.row for encoded in self._candidates.values()}
        )
        chosen: list[tuple[Encoded, int, list[int]]] = []
        for name, encoded in self._candidates.items():
            number = requests.served.get(encoded.prompt.row)
            if name in self._sampled and number is not None and number in requests.owners:
                tokens = [*encoded.token_ids, *self._sampled[name]]
                chosen.append((encoded, number, tokens))
        chosen = chosen[: self._wanted]
        if not chosen:
            raise _nothing(run, "no finished request with a stored row")
        said(f"Replaying {len(chosen)} requests alone ...")
        with self._replayed(chosen, interrupted) as (folder, sampled):
            if sampled is None:
                return None
            alone = Catalog.read(open_store(folder))
            table, outcome = _compare(catalog, run, requests, alone, chosen)
        if not table.num_rows:
            raise _nothing(run, "no stored row of the requests that were replayed")
        if self._settings.temperature == 0:
            same = [
                sampled.get(request_key(e.prompt.index)) == tokens[-1] for e, _, tokens in chosen
            ]
            outcome = replace(outcome, n_same_token=sum(same))
        _commit(catalog, run, software, table, outcome)
        return outcome

    @contextmanager
    def _replayed(
        self, chosen: list[tuple[Encoded, int, list[int]]], interrupted: Callable[[], int]
    ) -> Iterator[tuple[Path, dict[str, int] | None]]:
        """Yield the dataset of the replay and the tokens it sampled, ``None`` when interrupted.

        The dataset is removed afterwards.
        """
        beside = local_folder(self._settings.out)
        parent = beside.absolute().parent if beside else None
        folder = Path(tempfile.mkdtemp(prefix=".actds-canary-", dir=parent))
        try:
            settings = _alone(self._settings, folder / "acts")
            engine = find_engine(settings.engine).alone(self._plan.engine)
            encoded = tuple(
                replace(one, token_ids=tokens[:-1], max_tokens=1) for one, _, tokens in chosen
            )
            keys = {request_key(one.prompt.index) for one in encoded}
            client = tuple(prompt for prompt in self._plan.client if prompt.key in keys)
            plan = replace(self._plan, engine=engine, encoded=encoded, client=client)
            yield folder / "acts", _run(settings, plan, interrupted)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _nothing(run: str, got: str) -> ActdsError:
    return ActdsError(
        "E006",
        f"canary/{run}",
        got=got,
        expected="at least one to compare",
        next_step="Nothing was compared; harvest more requests.",
    )


def _alone(settings: WriteSettings, out: Path) -> WriteSettings:
    """Return the settings of a replay: the same engine, greedy, and no loss."""
    return settings.model_copy(
        update={
            "out": str(out),
            "resume": False,
            "canary": None,
            "entropy": False,
            "temperature": 0.0,
            "order": "sequence",
            "overflow": "block",
            "metrics_port": None,
        }
    )


def _run(
    settings: WriteSettings, plan: Plan, interrupted: Callable[[], int]
) -> dict[str, int] | None:
    """Run the replaying process; return the tokens it sampled, ``None`` if interrupted."""
    process = subprocess.Popen(
        [sys.executable, "-m", "actds_writers.harvest.canary_replay"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C reaches the command, which forwards it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    told = interrupted()
    try:
        pickle.dump((settings, plan), process.stdin)
        process.stdin.close()
        while True:
            try:
                code = process.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                if interrupted() > told:
                    told = interrupted()
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


@dataclass(frozen=True)
class _Requests:
    """Requests of a run, and under which request the row of each position is stored.

    Args:
        served: number by source row, of requests that were not aborted.
        owners: by number, ``(start, stop, request)`` of the positions that have a row: the request
            itself, or the one that computed them.
    """

    served: dict[int, int]
    owners: dict[int, list[tuple[int, int, int]]]

    @classmethod
    def of(cls, catalog: Catalog, run: str, source_rows: set[int]) -> _Requests:
        """Return the requests of some source rows."""
        requests = catalog.table("requests", run)
        requests = requests.filter(
            pc.and_(
                pc.is_in(requests["source_row"], pa.array(sorted(source_rows), pa.int64())),
                pc.is_in(requests["finish_reason"], pa.array(["stop", "length"])),
            )
        )
        numbers = requests["request"].combine_chunks()
        served = dict(zip(requests["source_row"].to_pylist(), numbers.to_pylist(), strict=True))
        spans = catalog.table("spans", run)
        spans = spans.filter(pc.is_in(spans["request"], numbers))
        owners: dict[int, list[tuple[int, int, int]]] = {}
        for span in spans.to_pylist():
            owner = {"captured": span["request"], "cache_ref": span["ref_request"]}
            request = owner.get(span["disposition"])
            if request is not None:
                place = (span["start"], span["stop"], request)
                owners.setdefault(span["request"], []).append(place)
        return cls(served, owners)


def _compare(
    catalog: Catalog,
    run: str,
    requests: _Requests,
    alone: Catalog,
    chosen: list[tuple[Encoded, int, list[int]]],
) -> tuple[pa.Table, Outcome]:
    """Return the table and its outcome."""
    source_rows = {encoded.prompt.row for encoded, _, _ in chosen}
    replays = _Requests.of(alone, alone.run_ids[0], source_rows)
    columns: list[np.ndarray] = []
    numbers = prefixes([tokens for _, _, tokens in chosen])
    for (encoded, number, tokens), prefix in zip(chosen, numbers, strict=True):
        replayed = replays.served[encoded.prompt.row]
        for start, stop, owner in requests.owners[number]:
            positions = np.arange(start, stop)
            one = np.ones(len(positions), np.int64)
            fed = np.array(tokens[start:stop])
            columns.append(
                np.stack(
                    [one * number, positions, one * owner, one * replayed, fed, prefix[start:stop]]
                )
            )
    request, position, owner, replayed_as, fed, same = np.concatenate(columns, axis=1)
    pieces = []
    computed = coarser(types_of(catalog, run))
    for hooks, shards in catalog.row_sets(run):
        stored_at = locate(shards, position_key(owner, position))
        there = stored_at.shard >= 0  # a prefix-cache hit may name a row that was lost
        stored_at = _only(stored_at, there)
        others = _shards_with(alone, hooks[0])
        replay_at = locate(others, position_key(replayed_as[there], position[there]))
        if (replay_at.shard < 0).any():
            raise ActdsError(
                "E504", "canary replay", got="a position without a row", expected="every row"
            )
        wrong_token = stored_at.token_id != fed[there]
        after = _after(request[there], position[there], wrong_token)
        for hook in hooks:
            stored = gather(shards, stored_at, hook)
            alone_rows = gather(others, replay_at, hook)
            relative, cosine = distances(stored, alone_rows)
            far = is_foreign(stored, alone_rows, relative, same[there], computed)
            verdict = np.where(far, np.where(after, "diverged", "foreign"), "same")
            verdict[wrong_token] = "foreign"
            pieces.append(
                tables.build(
                    "canary",
                    {
                        "request": request[there],
                        "position": position[there],
                        "hook": [hook] * len(relative),
                        "step": stored_at.step,
                        "token_id": stored_at.token_id,
                        "replayed_token_id": fed[there],
                        "relative_l2": relative,
                        "cosine": cosine,
                        "verdict": verdict,
                    },
                )
            )
    table = pa.concat_tables(pieces)
    return table, _outcome(table, len(chosen), len(pieces))


def _outcome(table: pa.Table, n_requests: int, n_hooks: int) -> Outcome:
    foreign = pc.equal(table["verdict"], "foreign")
    relative = table.filter(pc.equal(table["verdict"], "same"))["relative_l2"].to_numpy()
    median, p99 = np.quantile(relative, [0.5, 0.99]) if len(relative) else (math.nan, math.nan)
    order = [("request", "ascending"), ("position", "ascending"), ("hook", "ascending")]
    bad = table.filter(foreign).select(["request", "position", "hook"]).sort_by(order)
    first = next(
        (" ".join(f"{name} {value}" for name, value in row.items()) for row in bad.to_pylist()),
        None,
    )
    return Outcome(
        n_requests=n_requests,
        n_rows=table.num_rows // n_hooks,
        median=float(median),
        p99=float(p99),
        n_foreign=bad.group_by(["request", "position"]).aggregate([]).num_rows,
        n_same_token=None,
        first=first,
    )


def _after(request: np.ndarray, position: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Return which rows come after a token that differs."""
    first: dict[int, int] = {}
    for i in np.flatnonzero(wrong):
        number = int(request[i])
        first[number] = min(first.get(number, int(position[i])), int(position[i]))
    limits = np.array([first.get(int(number), 2**32) for number in request], np.int64)
    return position > limits


def _only(located: Located, mask: np.ndarray) -> Located:
    return Located(
        located.shard[mask], located.row[mask], located.token_id[mask], located.step[mask]
    )


def _shards_with(catalog: Catalog, hook: str) -> list[Shard]:
    return [shard for shard in catalog.shards_of(catalog.run_ids[0]) if hook in shard.hooks]


def types_of(catalog: Catalog, run: str) -> list[DType]:
    """Return the types that rows were computed and stored in."""
    fields = catalog.runs[run].fields
    computed, precision = fields["numerics.dtype"].value, fields["numerics.matmul_precision"].value
    types = [hook.dtype for hook in catalog.genesis.hooks]
    types += [name for name in FAR if name == computed]
    if precision not in ("highest", None):
        types.append("float16")  # TF32 has the same precision
    return types


def _commit(catalog: Catalog, run: str, software: str, table: pa.Table, outcome: Outcome) -> None:
    """Commit the table on a chain of its own."""
    chain = Chain.begin(catalog.store, catalog.genesis.dataset, run, "tool", software)
    for n, piece in in_parts(table):
        commit_part(catalog.store, chain, "canary", run, n, piece)
    chain.close("finished", {"requests": outcome.n_requests, "foreign": outcome.n_foreign})


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.float32]

FAR: dict[DType, float] = {"bfloat16": 0.4, "float16": 0.1, "float32": 0.01}
"""Relative L2 from which a row is a different one, by the type it was computed in: several times
the largest distance between a batch and the same request alone, see docs/canary.md."""
NEAR: dict[DType, float] = {"bfloat16": 0.04, "float16": 0.01, "float32": 0.001}
"""Relative L2 up to which a row is never a different one."""
MARGIN = 2.0
"""Between the two: how many times nearer another replayed row has to be."""


@dataclass(frozen=True)
class Located:
    """The location of rows of a run.

    Args:
        shard: index of the shard of each row, -1 where there is no row.
        row: row in the shard.
    """

    shard: Ints
    row: Ints
    token_id: Ints
    step: Ints


def locate(shards: Sequence[Shard], keys: Keys) -> Located:
    """Return the location of the rows of (request, position) keys, in any order, also repeated."""
    unique, back = np.unique(keys, return_inverse=True)
    found = {name: np.full(len(unique), -1, np.int64) for name in ("shard", "row", "token", "step")}
    for number, shard in enumerate(shards):
        tokens = shard.tokens(["request", "position", "token_id", "step"])
        mine = position_key(tokens["request"].to_numpy(), tokens["position"].to_numpy())
        at = np.minimum(np.searchsorted(unique, mine), len(unique) - 1)
        rows = np.flatnonzero(unique[at] == mine)
        at = at[rows]
        found["shard"][at], found["row"][at] = number, rows
        found["token"][at] = tokens["token_id"].to_numpy()[rows]
        found["step"][at] = tokens["step"].to_numpy()[rows]
    return Located(*(found[name][back] for name in ("shard", "row", "token", "step")))


def gather(shards: Sequence[Shard], located: Located, hook: str) -> Rows:
    """Return the rows of a hook, float32 ``(n, d_model)``, in the order of ``located``."""
    rows: Rows | None = None
    for number, shard in enumerate(shards):
        mine = np.flatnonzero(located.shard == number)
        if not len(mine):
            continue
        with shard.array(hook) as reader:
            values = widen(reader.gather(located.row[mine]), reader.dtype)
        if rows is None:
            rows = np.zeros((len(located.row), values.shape[1]), np.float32)
        rows[mine] = values
    return np.zeros((len(located.row), 1), np.float32) if rows is None else rows


def distances(stored: Rows, replayed: Rows) -> tuple[Floats, Floats]:
    """Return relative L2 and cosine of each pair of rows.

    The distance is relative to the replayed row's norm; to a row of zeros it is infinite, unless
    both are.
    """
    one, other = stored.astype(np.float64), replayed.astype(np.float64)
    apart = np.linalg.norm(one - other, axis=1)
    norms = np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(apart == 0, 0.0, apart / norms[1])
        cosine = np.where(apart == 0, 1.0, (one * other).sum(axis=1) / (norms[0] * norms[1]))
    return np.nan_to_num(relative, nan=np.inf), np.nan_to_num(cosine, nan=0.0)


def is_foreign(
    stored: Rows, replayed: Rows, relative: Floats, prefix: Ints, computed: DType
) -> npt.NDArray[np.bool_]:
    """Return which stored rows belong to another request or position than their own.

    A row far from its own replay is foreign. One that is neither near nor far is foreign when
    another replayed row is nearer by a clear margin: rounding moves a row, but not onto another
    one. Rows with equal tokens up to their position are interchangeable.

    Args:
        stored: rows of the harvest, ``(n, d_model)``.
        replayed: rows of the replay, in the same order.
        relative: relative L2 of the pairs.
        prefix: equal where the tokens up to the row are equal.
        computed: type that the rows were computed or stored in, the less precise of both.

    Spec: 0.1 section 7.9.
    """
    foreign = relative > FAR[computed]
    unsure = np.flatnonzero(~foreign & (relative > NEAR[computed]))
    squares = (replayed.astype(np.float64) ** 2).sum(axis=1)
    for row in unsure:
        products = (replayed @ stored[row]).astype(np.float64)
        apart = squares - 2 * products + float(stored[row].astype(np.float64) @ stored[row])
        apart[prefix == prefix[row]] = np.inf
        # The difference of large numbers finds the nearest row, and is too coarse for its distance.
        nearest = replayed[int(apart.argmin())].astype(np.float64)
        own = np.sqrt(squares[row]) * relative[row]
        others = np.isfinite(apart).any()
        foreign[row] = others and np.linalg.norm(nearest - stored[row]) * MARGIN < own
    return foreign


def prefixes(sequences: Sequence[Sequence[int]]) -> list[Ints]:
    """Return a number per token, equal where all tokens up to it are equal."""
    known: dict[tuple[int, int], int] = {}
    found = []
    for tokens in sequences:
        numbers, parent = np.empty(len(tokens), np.int64), -1
        for position, token in enumerate(tokens):
            parent = known.setdefault((parent, token), len(known))
            numbers[position] = parent
        found.append(numbers)
    return found


def coarser(types: Iterable[DType]) -> DType:
    """Return the least precise type."""
    order: tuple[DType, ...] = ("float32", "float16", "bfloat16")
    return max(types, key=order.index)
