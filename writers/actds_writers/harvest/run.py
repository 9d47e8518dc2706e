"""One harvest from the caller's process: plan, the runs of its engines, seal.

vLLM runs the data-parallel replicas of a dense model as independent engines that share only the
requests. So each gets a share of the prompts and is a run with writer, census and chains of its
own, in a process: ``python -m actds_writers.harvest.run FD``, which takes its work from a
connection and tells its progress there. Without an argument the process replays canaries.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

import pyarrow.compute as pc

from actds.dataset.info import recorded_cast
from actds.dataset.reading import Catalog
from actds.errors import ActdsError
from actds.format.arrays import DTYPES
from actds.format.schema import RowCounts, Seal
from actds.format.telemetry import PROFILE
from actds.publish.sealing import seal
from actds.store import open_store
from actds_writers.config import WriteSettings, keywords_of
from actds_writers.engine_protocol import Finished, find_engine, refused
from actds_writers.harvest.canary import n_replayed
from actds_writers.harvest.one_engine import Ended, Feed, Run, interrupts_handled
from actds_writers.harvest.prepare import (
    Plan,
    ServedBy,
    check_metrics,
    check_out,
    discard_empty,
    finished_rows,
    has_dataset,
    hold,
    is_servable,
    is_taken,
    make_plan,
    request_key,
    require_prompt,
    say_second_bos,
    without_finished,
)
from actds_writers.harvest.recover import recover_runs, require_accounted
from actds_writers.harvest.result import OF_CENSUS, HarvestResult, Observer, Totals
from actds_writers.monitor.progress import Snapshot, beside, summed

MODULE = "actds_writers.harvest.run"
READY = "interrupts are heeded"
"""What a replica says when a signal ends its run in order; before that it would end the process."""
POLL_S = 0.2
SNAPSHOT_S = 0.5


@dataclass(frozen=True)
class Work:
    settings: WriteSettings
    plan: Plan
    lock: int
    number: int
    n_replicas: int


def shares(settings: WriteSettings, plan: Plan, n_replicas: int) -> list[Plan]:
    """Return the plan of each replica: every ``n_replicas``-th prompt; never more than prompts.

    Prompts that are skipped before the engine starts belong to the first.
    """
    servable = [encoded.prompt.index for encoded in plan.encoded if encoded.skip is None]
    n_replicas = max(1, min(n_replicas, len(servable)))
    owner = {index: number % n_replicas for number, index in enumerate(servable)}
    owners = {request_key(index): number for index, number in owner.items()}
    kind = find_engine(settings.engine)
    return [
        replace(
            plan,
            engine=kind.of_replica(plan.engine, number),
            encoded=tuple(e for e in plan.encoded if owner.get(e.prompt.index, 0) == number),
            client=tuple(p for p in plan.client if owners.get(p.key, 0) == number),
        )
        for number in range(n_replicas)
    ]


def harvest_replicas(
    settings: WriteSettings, plans: Sequence[Plan], lock: int, observer: Observer
) -> list[Ended]:
    """Harvest every plan with an engine of its own; return how each run ended.

    A replica that fails ends the others in order. Ctrl-C or SIGTERM ends all in order, a second one
    at once.
    """
    with ExitStack() as stack:
        replicas = [
            Replica(Work(settings, plan, lock, number, len(plans)))
            for number, plan in enumerate(plans)
        ]
        for replica in replicas:
            stack.callback(replica.end)
        with _interrupts_passed_on(replicas, observer) as n_interrupts:
            _await_all(replicas, settings, observer)
    if n_interrupts() > 1:
        raise KeyboardInterrupt
    return [replica.ended for replica in replicas if replica.ended is not None]


def _await_all(replicas: Sequence[Replica], settings: WriteSettings, observer: Observer) -> None:
    pending, is_ending = set(replicas), False
    words = f"Starting {len(replicas)} engines for {settings.model}"
    with ExitStack() as starting, ExitStack() as harvesting:
        starting.enter_context(observer.starting(words))
        serving = False
        while pending:
            by_connection = {replica.connection: replica for replica in pending}
            for ready in wait(list(by_connection), POLL_S):
                assert isinstance(ready, Connection)
                by_connection[ready].take(observer)
            pending = {replica for replica in pending if replica.ended is None}
            if not is_ending and any(r.ended is not None and r.ended.failure for r in replicas):
                is_ending = True
                for replica in pending:
                    replica.interrupt()
            heard = [r for r in replicas if r.snapshot is not None]
            if not serving and heard and all(r in heard or r.ended for r in replicas):
                serving = True
                starting.close()
                harvesting.enter_context(
                    observer.harvesting(
                        lambda: summed([r.snapshot for r in replicas if r.snapshot is not None])
                    )
                )


class Replica:
    def __init__(self, work: Work) -> None:
        self.number = work.number
        self.connection, theirs = Pipe()
        self.snapshot: Snapshot | None = None
        self.ended: Ended | None = None
        self._is_ready, self._n_interrupts = False, 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # what the engine prints; stdout is for the result
            start_new_session=True,  # a Ctrl-C is for the command, which passes it on
            pass_fds=(work.lock, theirs.fileno()),
        )
        theirs.close()
        with suppress(OSError):  # it has died; its end is noticed when it is read
            self.connection.send(work)

    def take(self, observer: Observer) -> None:
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            message = Ended.failed(
                ActdsError(
                    "E504",
                    f"replica {self.number}",
                    got=f"its process ended with code {code}",
                    expected="a process until the end of its run",
                )
            )
        if isinstance(message, Ended):
            self.ended = message
        elif message == READY:
            self._is_ready = True
            if self._n_interrupts:
                self._signal()
        elif isinstance(message, Snapshot):
            self.snapshot = message
        else:
            observer.said(f"replica {self.number}: {message}")

    def interrupt(self) -> None:
        """End its run in order, or at once the second time; one that starts hears of it later."""
        self._n_interrupts += 1
        if self._is_ready or self._n_interrupts > 1:
            self._signal()

    def _signal(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Wait for the end of the process, or bring it about."""
        self.connection.close()  # at which it ends its run
        try:
            self._process.wait(60 if self.ended is not None else 600)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def _interrupts_passed_on(
    replicas: Sequence[Replica], observer: Observer
) -> Iterator[Callable[[], int]]:
    """Pass Ctrl-C and SIGTERM on to all replicas; yields the number of both so far."""
    n_interrupts = 0

    def note(signum: int, _frame: FrameType | None) -> None:
        nonlocal n_interrupts
        n_interrupts += 1
        for replica in replicas:
            replica.interrupt()
        if n_interrupts == 1:
            observer.said(f"\n{signal.Signals(signum).name}: draining; repeat to stop at once.")

    with interrupts_handled(note):
        yield lambda: n_interrupts


class _Relay(Observer):
    """Tells the command what the run of this replica has to say."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self.is_ready = False

    def send(self, message: object) -> None:
        with self._sending, suppress(OSError):
            self._connection.send(message)

    def said(self, line: str) -> None:
        if "draining; repeat" not in line:
            self.send(line.strip())

    def starting(self, words: str) -> AbstractContextManager[object]:
        """Say that the run has its signal handlers: it sets them before it starts the engine."""
        self.is_ready = True
        self.send(READY)
        return super().starting(words)

    @contextmanager
    def harvesting(self, snapshot: Callable[[], Snapshot]) -> Iterator[None]:
        def work(ended: threading.Event) -> None:
            self.send(snapshot())
            while not ended.wait(SNAPSHOT_S):
                self.send(snapshot())

        try:
            with beside(work, "actds-relay"):
                yield
        finally:
            self.send(snapshot())


def _end_with(connection: Connection) -> None:
    """End the run in order when the command is gone."""
    with suppress(EOFError, OSError):
        connection.recv()
    os.kill(os.getpid(), signal.SIGTERM)


def serve_replica() -> int:
    connection = Connection(int(sys.argv[1]))
    work: Work = connection.recv()
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    relay = _Relay(connection)

    def interrupted(signum: int, _frame: FrameType | None) -> None:
        # The run has handlers of its own; once they are gone a late interrupt has nothing to end.
        if not relay.is_ready:
            os._exit(128 + signum)

    signal.signal(signal.SIGTERM, interrupted)
    settings = work.settings
    if settings.metrics_port:
        port = settings.metrics_port + work.number
        settings = settings.model_copy(update={"metrics_port": port})
    replica = (work.number, work.n_replicas)
    try:
        run = Run(settings, work.plan, work.lock, time.monotonic(), relay, replica=replica)
        ended = run.run()
    except ActdsError as error:
        ended = Ended.failed(error)
    relay.send(ended)
    return 0


@keywords_of(WriteSettings)
def write(*, observer: Observer | None = None, **settings: Any) -> HarvestResult:
    """Harvest activations from a real engine into a new dataset, or resume one.

    Serves every prompt, stores the activations of every token that the engine computes, accounts
    for every token, and seals. Prints nothing. On the main thread, the first Ctrl-C or SIGTERM
    ends the harvest in order.

    Args:
        observer: receives progress and result.
        settings: the fields of ``WriteSettings``, the options of ``actds write``: ``out``,
            ``model``, ``prompts`` and ``hooks`` are required.

    Raises:
        ActdsError: what stopped it; everything committed before is sealed if possible.

    Example:
        >>> result = actds.write(
        ...     out="acts", model="models/small", prompts="prompts.jsonl", hooks="resid_post:10,20",
        ...     engine="transformers", engine_args={"max_num_seqs": 4}, max_tokens=64,
        ... )  # doctest: +SKIP
        >>> result.seal.totals["rows"]  # doctest: +SKIP
        18_432

    Spec: 0.1 section 9.
    """
    return harvest(WriteSettings.of(settings), observer)


_harvesting = threading.Lock()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Refuse a second harvest beside another one; raises E009.

    Engines find their harvest in the environment, of which a process has one.
    """
    if not _harvesting.acquire(blocking=False):
        got = "a second harvest in this process, while the first is under way"
        expected = "one after the other"
        step = "Wait for the first, or start each in a process of its own."
        raise ActdsError("E009", "actds.write", got=got, expected=expected, next_step=step)
    try:
        yield
    finally:
        _harvesting.release()


@_one_at_a_time()
def harvest(
    settings: WriteSettings,
    observer: Observer | None = None,
    feed: type[Feed] | None = None,
    *,
    served_by: ServedBy | None = None,
    alone: bool = False,
) -> HarvestResult:
    """Harvest into a new or a resumed dataset; raises as ``write``."""
    began, observer = time.monotonic(), observer or Observer()
    kind = find_engine(settings.engine)
    engine = kind.checked(settings.engine_args)
    engine = kind.alone(engine) if alone else engine
    n_replicas = kind.replicas(engine)
    if settings.canary is not None:
        n_replayed(settings.canary, 0)
        if engine.n_samples > 1:
            got = f"{engine.n_samples} samples of each prompt"
            expected = "one: a replay must know which of them it compares with"
            raise ActdsError("E009", "canary", got=got, expected=expected)
    if settings.entropy:
        kind.require_logits(engine)
    if settings.intervene is not None and not kind.intervenes:
        got, expected = f"the engine {kind.name}, which changes no rows", "vllm or transformers"
        raise refused("intervene", got, expected)
    if settings.attention is not None and not kind.attends:
        got = f"the engine {kind.name}, which looks at no attention"
        raise refused("attention", got, "vllm, or rows of q, k, v and z: actds attention")
    check_out(settings)
    check_metrics(settings)
    observer.doing(f"Reading {settings.prompts}, and the weights of {settings.model} for a digest")
    plan = make_plan(settings, engine, n_replicas, served_by)
    say_second_bos(plan, observer.said)
    created = not is_taken(settings.out)
    if created:
        require_prompt(settings, plan)
    lock = hold(settings.out)
    try:
        if settings.resume:
            observer.doing(f"Looking for the requests that {settings.out} has")
            plan = without_finished(plan, finished_rows(settings.out, plan, observer.said))
            if not is_servable(plan):
                sealed = seal(open_store(settings.out))
                result = HarvestResult(settings.out, None, "finished", sealed)
                observer.ended(result)
                return result
        if n_replicas > 1:
            ended = harvest_replicas(settings, shares(settings, plan, n_replicas), lock, observer)
        else:
            ended = [Run(settings, plan, lock, began, observer, feed or Feed).run()]
        return _result(settings, ended, began, observer)
    finally:
        os.close(lock)
        if created:
            discard_empty(settings.out)


@_one_at_a_time()
def harvest_plan(
    settings: WriteSettings,
    plan: Plan,
    heard: Callable[[Finished], None] | None = None,
    feed: type[Feed] | None = None,
) -> HarvestResult:
    """Harvest a plan into a new dataset, reporting finished requests; raises as ``write``."""
    lock = hold(settings.out)
    try:
        began, observer = time.monotonic(), Observer()
        run = Run(settings, plan, lock, began, observer, feed or Feed)
        if heard is not None:
            run.feed.heard = heard
        return _result(settings, [run.run()], began, observer)
    finally:
        os.close(lock)


def _result(
    settings: WriteSettings, runs: Sequence[Ended], began: float, observer: Observer
) -> HarvestResult:
    """Seal the dataset after all runs have ended; return the result, or raise what stopped one."""
    failure = next((ended.failure for ended in runs if ended.failure is not None), None)
    if failure is not None:
        _seal_what_there_is(settings.out, observer)
        raise failure
    if not has_dataset(settings.out):
        raise ActdsError(
            "E006", "harvest", got="interrupted before the first step", expected="a step"
        )
    observer.doing(f"Sealing {settings.out}")
    sealed = seal(open_store(settings.out))
    # A replica that was interrupted before its first step has written nothing.
    counted = [ended for ended in runs if ended.totals and "captured" in ended.totals["census"]]
    outcomes = [ended.outcome for ended in runs if ended.outcome is not None]
    result = HarvestResult(
        path=settings.out,
        run=counted[0].run if counted else runs[0].run,
        reason="interrupted" if any(ended.interrupted for ended in runs) else "finished",
        seal=sealed,
        totals=_totals(settings.out, counted, time.monotonic() - began, sealed)
        if counted
        else None,
        canary=outcomes[0] if len(outcomes) == 1 else None,
        runs=tuple(ended.run for ended in counted if ended.run is not None),
    )
    observer.ended(result)
    for ended in runs:
        wrong = ended.outcome.error("canary") if ended.outcome is not None else None
        if wrong or ended.replay_failure:
            raise wrong or ended.replay_failure  # type: ignore[misc]
    return result


def _seal_what_there_is(out: str, observer: Observer) -> None:
    """Seal what was committed before a failure, if possible and nobody else is at work there."""
    try:
        if not has_dataset(out):
            return
        store = open_store(out)
        require_accounted(recover_runs(store, beside_others=True))
        sealed = seal(store)
    except ActdsError as error:
        observer.said(f"{out} is not sealed: {error}")
    else:
        observer.said(f"{out} is sealed with {sealed.totals['rows']:,} rows.")


def _totals(out: str, runs: Sequence[Ended], elapsed_s: float, sealed: Seal) -> Totals:
    """Return the counts of every request and position of all runs together."""
    catalog = Catalog.read(open_store(out))
    hooks = catalog.genesis.hooks
    row_nbytes = sum(hook.d_model * DTYPES[hook.dtype].itemsize for hook in hooks)
    whole: Totals | None = None
    for ended in runs:
        assert ended.totals is not None and ended.run is not None
        totals = _totals_of(catalog, ended.run, ended.totals, row_nbytes)
        totals.check()
        whole = totals if whole is None else whole.plus(totals)
    assert whole is not None
    lines = [ended.outcome.line() for ended in runs if ended.outcome is not None]
    return replace(
        whole,
        path=out,
        elapsed_s=elapsed_s,
        unresolved=sealed.totals.get("unresolved", 0),
        external=sealed.totals.get("external", 0),
        seal=catalog.seal_sha256,
        canary="; ".join(lines) or None,
        alerts=_alerts_of(catalog)
        if any(PROFILE in record.fields for record in catalog.runs.values())
        else None,
    )


def _alerts_of(catalog: Catalog) -> str:
    lines = [catalog.table("alerts", run)["request"] for run in catalog.run_ids]
    n = sum(len(pc.unique(requests)) for requests in lines)
    return f"{n:,} requests left the regime of the profile"


def _totals_of(
    catalog: Catalog, run: str, ended: dict[str, dict[str, int]], row_nbytes: int
) -> Totals:
    shards = [shard for shard in catalog.shards if shard.run == run]
    requests = catalog.table("requests", run)
    reasons = requests["finish_reason"].value_counts().to_pylist()
    skipped = requests.filter(pc.equal(requests["finish_reason"], "skipped"))
    census = ended["census"]
    counts: dict[str, Any] = {name: census[name] for name in OF_CENSUS}
    spans = catalog.table("spans", run)
    never = pc.and_(pc.equal(spans["disposition"], "aborted"), pc.is_null(spans["step"]))
    owed = spans.filter(never)
    return Totals(
        path=catalog.store.uri,
        elapsed_s=0.0,
        requests={row["values"]: row["counts"] for row in reasons},
        scheduled=census["scheduled_tokens"],
        **counts,
        aborted_uncomputed=pc.sum(pc.subtract(owed["stop"], owed["start"])).as_py() or 0,
        skipped_tokens=pc.sum(skipped["prompt_len"]).as_py() or 0,
        unresolved=0,
        n_hooks=len(catalog.genesis.hooks),
        n_shards=len(shards),
        row_nbytes=ended["writer"]["rows"] * row_nbytes,
        stored_nbytes=sum(entry.nbytes for shard in shards for entry in shard.files),
        seal=None,
        values=RowCounts.by_hook(shard.values for shard in shards),
        cast=recorded_cast(catalog.runs.get(run)),
    )


def replay_canaries() -> int:
    """Replay canaries, in a process where the engine has no state of the harvest's.

    Reads settings and plan; writes the sampled tokens by key, or the error, pickled.
    """
    settings, plan = pickle.load(sys.stdin.buffer)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # an engine may print
    sampled: dict[str, int] = {}

    def heard(finished: Finished) -> None:
        sampled[finished.key] = finished.token_ids[-1]

    with answer:
        try:
            result = harvest_plan(settings, plan, heard)
        except ActdsError as error:
            pickle.dump(error, answer)
            return 1
        pickle.dump(sampled, answer)
    return 0 if result.reason == "finished" else 2


if __name__ == "__main__":
    # Under its own name, so that what is sent can be read by the command.
    from actds_writers.harvest import run

    sys.exit(run.serve_replica() if sys.argv[1:] else run.replay_canaries())
