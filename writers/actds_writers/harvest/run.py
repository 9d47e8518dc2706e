"""One harvest in the caller's process: plan, processes, engine, requests, seal."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal

import pyarrow.compute as pc

from actds.errors import ActdsError
from actds.format.arrays import DTYPES
from actds.reading import Catalog
from actds.schema import CloseReason, Seal
from actds.sealing import seal
from actds.store import open_store
from actds.text import one_line
from actds_writers.config import WriterSettings, WriteSettings, keywords_of
from actds_writers.engine_protocol import Engine, Finished, find_engine
from actds_writers.harvest.canary import Canary, Outcome, Share
from actds_writers.harvest.prepare import (
    Plan,
    discard_empty,
    finished_rows,
    has_dataset,
    hold,
    is_taken,
    make_plan,
    request_key,
)
from actds_writers.harvest.processes import Pipeline
from actds_writers.harvest.recover import recover_runs, require_accounted
from actds_writers.ipc.messages import ClientFacts, PromptFact
from actds_writers.monitor.progress import (
    Observer,
    Snapshot,
    Totals,
    format_summary,
    take_snapshot,
)
from actds_writers.prompts.encoding import Encoded
from actds_writers.sizing.machine import usual_threads

CONNECT_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 300.0
CAUSE_TIMEOUT_S = 5.0
"""How long to wait for the cause, from the writer, when the engine has died."""


@dataclass(frozen=True)
class HarvestResult:
    """The result of a harvest.

    Args:
        path: the dataset, as given.
        run: id of the run, ``None`` when every prompt was finished before.
        reason: ``interrupted`` by Ctrl-C or SIGTERM: committed, sealed, and can be resumed.
        totals: counts of every request and position of the run, ``None`` without one.
        canary: result of the canary replay, ``None`` without one.
    """

    path: str
    run: str | None
    reason: Literal["finished", "interrupted"]
    seal: Seal
    totals: Totals | None = None
    canary: Outcome | None = None

    @property
    def summary(self) -> str:
        """Return the result as text."""
        if self.totals is None:
            return f"Every prompt is finished; {self.path} is sealed."
        return format_summary(self.totals)


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


def harvest(
    settings: WriteSettings, observer: Observer | None = None, feed: type[Feed] | None = None
) -> HarvestResult:
    """Harvest one run into a new or a resumed dataset; raises as ``write``.

    Args:
        feed: the class that hands requests to the engine, ``Feed`` by default.
    """
    began, observer = time.monotonic(), observer or Observer()
    engine = find_engine(settings.engine).checked(settings.engine_args)
    if settings.canary is not None:
        Share.parse(settings.canary)
    _check_out(settings)
    _check_metrics(settings)
    plan = make_plan(settings, engine)
    created = not is_taken(settings.out)
    if created:
        _require_prompt(settings, plan)
    lock = hold(settings.out)
    try:
        if settings.resume:
            plan = _without(plan, finished_rows(settings.out, plan))
            if not _servable(plan):
                sealed = seal(open_store(settings.out))
                result = HarvestResult(settings.out, None, "finished", sealed)
                observer.ended(result)
                return result
        return _Run(settings, plan, lock, began, observer, feed or Feed).harvest()
    finally:
        os.close(lock)
        if created:
            discard_empty(settings.out)


def harvest_plan(
    settings: WriteSettings, plan: Plan, heard: Callable[[Finished], None]
) -> HarvestResult:
    """Harvest a plan into a new dataset, reporting finished requests; raises as ``write``."""
    lock = hold(settings.out)
    try:
        run = _Run(settings, plan, lock, time.monotonic(), Observer(), Feed)
        run.feed.heard = heard
        return run.harvest()
    finally:
        os.close(lock)


def _servable(plan: Plan) -> bool:
    return any(encoded.skip is None for encoded in plan.encoded)


def _require_prompt(settings: WriteSettings, plan: Plan) -> None:
    if _servable(plan):
        return
    skips = [prompt.skip for prompt in plan.client if prompt.skip]
    raise ActdsError(
        "E006",
        settings.prompts,
        got=f"{len(skips)} prompts, all skipped; the first: {skips[0] if skips else 'none'}",
        expected="at least one prompt that fits the model",
    )


def _check_out(settings: WriteSettings) -> None:
    if settings.resume and not has_dataset(settings.out):
        raise ActdsError(
            "E010",
            settings.out,
            got="no dataset",
            expected="a dataset to resume",
            next_step="To write a new dataset, omit --resume.",
        )
    if not settings.resume and is_taken(settings.out):
        raise ActdsError("E008", settings.out, got="it exists", expected="a new path")


def _check_metrics(settings: WriteSettings) -> None:
    """Raise for a metrics port that cannot be used, before the engine starts."""
    if settings.metrics_port is not None:
        from actds_writers.monitor.metrics import serve_metrics

        idle = Snapshot(elapsed_s=0.0, requests_done=0, requests_total=0)
        serve_metrics(settings.metrics_host, settings.metrics_port, lambda: idle).close()


def _without(plan: Plan, done: set[int]) -> Plan:
    """Return the plan without the prompts that an earlier run finished."""
    return replace(
        plan,
        encoded=tuple(e for e in plan.encoded if e.prompt.row not in done),
        client=tuple(prompt for prompt in plan.client if prompt.source_row not in done),
    )


class Feed:
    """Hands the requests of a plan to an engine, and keeps the outcome of each.

    A subclass may override ``serve`` to hand them over at other times.

    Args:
        poll: called between steps; raises the failure of a process of the harvest.
    """

    def __init__(self, plan: Plan, poll: Callable[[], None]) -> None:
        self.poll = poll
        self.heard: Callable[[Finished], None] = lambda finished: None
        self.queue = [e for e in plan.encoded if e.skip is None]
        self.n_requests = len(self.queue)
        self.queue.reverse()
        self.live: set[str] = set()
        self.n_finished = 0
        self.interrupted = False
        self._client = plan.client
        self._cached: dict[str, int] = {}
        self.refused: dict[str, str] = {}

    def serve(self, engine: Engine) -> None:
        """Add every prompt and step the engine until all requests have ended."""
        window = 2 * engine.max_num_seqs
        while self.queue or self.live:
            while self.queue and len(self.live) < window and not self.interrupted:
                self.add(engine, self.queue.pop())
            if self.interrupted:
                self.abort(engine, self.live)
                break
            self.step(engine)

    def add(self, engine: Engine, encoded: Encoded) -> None:
        """Add a prompt, or note why the engine refuses it."""
        key, limit = request_key(encoded.prompt.index), engine.max_model_len
        room = limit - len(encoded.token_ids)
        if room < 1:
            length = len(encoded.token_ids)
            self.refused[key] = (
                f"E004 row {encoded.prompt.row}: {length} prompt tokens; "
                f"the engine takes {limit - 1}"
            )
            return
        try:
            engine.add(key, encoded.token_ids, min(encoded.max_tokens, room))
        except ValueError as error:
            self.refused[key] = (
                f"E002 row {encoded.prompt.row}: the engine says: {one_line(error, 300)}"
            )
            return
        self.live.add(key)

    def step(self, engine: Engine) -> None:
        """Run one step of the engine, if a request is running."""
        for finished in engine.step() if self.live else []:
            self.live.discard(finished.key)
            self.n_finished += 1
            self.heard(finished)
            if finished.cached_tokens is not None:
                self._cached[finished.key] = finished.cached_tokens
        self.poll()

    def abort(self, engine: Engine, keys: set[str]) -> None:
        """Abort running requests."""
        engine.abort(sorted(keys))
        self.n_finished += len(keys)
        self.live = self.live - keys

    def facts(self) -> ClientFacts:
        """Return the facts of every prompt that was handed over."""
        unfed = {request_key(e.prompt.index) for e in self.queue}

        def outcome(prompt: PromptFact) -> PromptFact:
            words = self.refused.get(prompt.key)
            return prompt if words is None else replace(prompt, skip=words)

        prompts = tuple(outcome(prompt) for prompt in self._client if prompt.key not in unfed)
        return ClientFacts(prompts, self._cached)


class _Run:
    """One run, from its processes to its seal."""

    def __init__(
        self,
        settings: WriteSettings,
        plan: Plan,
        lock: int,
        began: float,
        observer: Observer,
        feed: type[Feed],
    ) -> None:
        self._settings, self._plan, self._began = settings, plan, began
        self._observer = observer
        self._canary = Canary(settings, plan) if settings.canary else None
        self._interrupts = 0
        self._writer = WriterSettings(
            harvest=settings,
            facts=plan.facts,
            tokens=plan.tokens,
            rows_per_shard=plan.rows_per_shard,
            n_threads=usual_threads(),
            readouts=plan.readouts,
            resume=settings.resume,
        )
        self._pipeline = Pipeline(self._writer, plan.hooks, os.getpid(), lock, probes=plan.probes)
        self.feed = feed(plan, self._pipeline.poll)
        if self._canary is not None:
            self.feed.heard = self._canary.finished

    def harvest(self) -> HarvestResult:
        """Run to the end; return the result.

        Raises:
            ActdsError: what stopped the run.
        """
        with self._pipeline, self._interruptible(), ExitStack() as watch:
            failure, reason = self._serve(watch)
            self._pipeline.send_client_facts(self.feed.facts())
            try:
                ended = self._pipeline.finish(reason)
                self._pipeline.poll()
            except ActdsError as error:
                failure = failure or error
        if failure is not None:
            self._seal_what_there_is()
            raise failure
        if not has_dataset(self._settings.out):
            raise ActdsError(
                "E006", "harvest", got="interrupted before the first step", expected="a step"
            )
        outcome: Outcome | None = None
        if self._canary is not None and reason == "finished":
            with self._interruptible():
                try:
                    outcome = self._replay(self._canary)
                except ActdsError as error:
                    failure = error
        sealed = seal(open_store(self._settings.out))
        result = HarvestResult(
            path=self._settings.out,
            run=self._writer.run,
            reason="interrupted" if self._interrupts else "finished",
            seal=sealed,
            totals=self._totals(ended, sealed, outcome),
            canary=outcome,
        )
        self._observer.ended(result)
        if outcome is not None:
            failure = outcome.error(self._writer.run)
        if failure is not None:
            raise failure
        return result

    def _serve(self, watch: ExitStack) -> tuple[ActdsError | None, CloseReason]:
        """Start the engine, serve and drain; return the failure, and how the run ends.

        Args:
            watch: ends the metrics, after the last commit.
        """
        engine: Engine | None = None
        failure: ActdsError | None = None
        self._pipeline.connect()
        # Sent early, so that the journal of a killed census has the prompts of the requests.
        self._pipeline.send_client_facts(ClientFacts(self._plan.client))
        try:
            engine = self._start()
            self._serve_metrics(watch)
            with self._observer.harvesting(self._snapshot):
                self.feed.serve(engine)
                self._require_served()
                self._drain()
        except ActdsError as error:
            failure = self._cause(error)
        finally:
            # Also after a second Ctrl-C: writer and census end only when the engine has.
            if engine is not None:
                engine.shutdown()
        return failure, "failed" if failure else "interrupted" if self._interrupts else "finished"

    def _replay(self, canary: Canary) -> Outcome | None:
        """Replay the canaries and commit their table, before the seal."""
        run, software = self._writer.run, self._writer.software
        outcome = canary.replay(run, software, lambda: self._interrupts, self._observer.said)
        if outcome is None:
            self._observer.said("The canary replay was interrupted; nothing was compared.")
        return outcome

    def _start(self) -> Engine:
        with self._observer.starting(f"Starting the engine for {self._settings.model}"):
            return self._connected_engine()

    def _connected_engine(self) -> Engine:
        settings = self._settings
        engine = find_engine(settings.engine).start(
            settings.model,
            self._plan.engine,
            self._pipeline.link,
            temperature=settings.temperature,
            seed=settings.seed,
        )
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not (self._pipeline.counted and self._pipeline.counted.connected):
            self._pipeline.poll()
            if time.monotonic() > deadline:
                engine.shutdown()
                raise ActdsError(
                    "E501",
                    "engine",
                    got="no message from the plugin inside it",
                    expected="the vllm plugin of actds to be loaded",
                    next_step="Install actds where vllm is installed; see VLLM_PLUGINS.",
                )
            time.sleep(0.02)
        return engine

    def _require_served(self) -> None:
        if not self.feed.n_finished and not self._interrupts:
            first = next(iter(self.feed.refused.values()), "none")
            raise ActdsError(
                "E006", self._settings.prompts, got=first, expected="a prompt the engine takes"
            )

    def _drain(self) -> None:
        """Wait until every request has left the scheduler and the writer has every step.

        Raises:
            ActdsError: the failure of a process.
        """
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while time.monotonic() < deadline:
            self._pipeline.poll()
            counted = self._pipeline.counted
            ended = counted is not None and counted.n_finished >= self.feed.n_finished
            if counted and ended and self._pipeline.has_reached(counted.last_step):
                return
            time.sleep(0.02)
        self._observer.said(
            f"The writer is still behind after {DRAIN_TIMEOUT_S:.0f} s; the rest counts as aborted."
        )

    def _cause(self, error: ActdsError) -> ActdsError:
        """Return the cause of an engine failure, which writer or census may report."""
        deadline = time.monotonic() + CAUSE_TIMEOUT_S
        while error.code == "E504" and time.monotonic() < deadline:
            try:
                self._pipeline.poll()
            except ActdsError as cause:
                return cause
            time.sleep(0.05)
        return error

    def _seal_what_there_is(self) -> None:
        """Seal what was committed before a failure, if possible."""
        out = self._settings.out
        try:
            if not has_dataset(out):
                return
            store = open_store(out)
            require_accounted(recover_runs(store))
            sealed = seal(store)
        except ActdsError as error:
            self._observer.said(f"{out} is not sealed: {error}")
        else:
            self._observer.said(f"{out} is sealed with {sealed.totals['rows']:,} rows.")

    def _snapshot(self) -> Snapshot:
        return take_snapshot(
            self._pipeline.written,
            self._pipeline.counted,
            elapsed_s=time.monotonic() - self._began,
            requests_done=self.feed.n_finished,
            requests_total=self.feed.n_requests,
        )

    def _serve_metrics(self, watch: ExitStack) -> None:
        """Serve metrics until the end of the run; not earlier, because the engine may fork."""
        port, host = self._settings.metrics_port, self._settings.metrics_host
        if port is None:
            return
        from actds_writers.monitor.metrics import serve_metrics

        server = watch.enter_context(serve_metrics(host, port, self._snapshot))
        self._observer.said(f"Metrics at http://{host}:{server.port}/metrics")

    def _totals(
        self, ended: dict[str, dict[str, int]], sealed: Seal, outcome: Outcome | None
    ) -> Totals:
        """Return the counts of every request and position.

        Raises:
            ActdsError: E409 when they differ from what the engine computed.
        """
        catalog = Catalog.read(open_store(self._settings.out))
        run = self._writer.run
        shards = [shard for shard in catalog.shards if shard.run == run]
        stored = sum(entry.nbytes for shard in shards for entry in shard.files)
        reasons = catalog.table("requests", run)["finish_reason"].value_counts().to_pylist()
        hooks = catalog.genesis.hooks
        row_nbytes = sum(hook.d_model * DTYPES[hook.dtype].itemsize for hook in hooks)
        census = ended["census"]
        spans = catalog.table("spans", run)
        never = pc.and_(pc.equal(spans["disposition"], "aborted"), pc.is_null(spans["step"]))
        owed = spans.filter(never)
        uncomputed = pc.sum(pc.subtract(owed["stop"], owed["start"])).as_py() or 0
        totals = Totals(
            path=self._settings.out,
            elapsed_s=time.monotonic() - self._began,
            requests={row["values"]: row["counts"] for row in reasons},
            scheduled=census["scheduled_tokens"],
            recomputed=census["recomputed"],
            captured=census["captured"],
            cache_ref=census["cache_ref"],
            dropped=census["dropped"],
            aborted=census["aborted"],
            aborted_uncomputed=uncomputed,
            filtered=census["filtered"],
            unresolved=sealed.totals.get("unresolved", 0),
            n_hooks=len(hooks),
            n_shards=len(shards),
            row_nbytes=ended["writer"]["rows"] * row_nbytes,
            stored_nbytes=stored,
            seal=catalog.seal_sha256,
            canary=outcome.line() if outcome else None,
        )
        totals.check()
        return totals

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C or SIGTERM end the run in order, the second one at once.

        Only the main thread can set signal handlers; on another one they are unchanged.
        """

        def note(signum: int, _frame: FrameType | None) -> None:
            self._interrupts += 1
            self.feed.interrupted = True
            if self._interrupts > 1:
                raise KeyboardInterrupt
            name = signal.Signals(signum).name
            self._observer.said(f"\n{name}: draining; repeat to stop at once.")

        ours = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if ours else ()
        before = {s: signal.signal(s, note) for s in signals}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
