"""One run of ``actds write``: plan, processes, engine, feeding, end, seal.

Conducts the token's way from the command's process; carries no row itself.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FrameType

import pyarrow.compute as pc

import actds
from actds.errors import ActdsError
from actds.format import layout
from actds.reading import Catalog
from actds.schema import CloseReason, Seal
from actds.sealing import seal
from actds.store import open_store
from actds_writers.config import Plan, WriteOptions, make_plan, request_key
from actds_writers.engines.base import Engine, Finished, start_engine
from actds_writers.harvest.canary import Canary, Outcome, Share
from actds_writers.harvest.destination import discard_empty, has_dataset, hold, is_taken
from actds_writers.harvest.processes import Ended, Pipeline
from actds_writers.harvest.recover import recover_runs, require_accounted
from actds_writers.harvest.resume import finished_rows
from actds_writers.ipc.messages import ClientFacts
from actds_writers.monitor.progress import Progress
from actds_writers.monitor.snapshot import Snapshot, take_snapshot
from actds_writers.monitor.summary import Totals, format_summary
from actds_writers.prompts.encoding import Encoded
from actds_writers.settings import WriterSettings

CONNECT_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 300.0
CAUSE_TIMEOUT_S = 5.0
"""How long to wait for the cause when the engine has died of something the writer knows."""


@dataclass(frozen=True)
class Written:
    """What a run came to.

    Args:
        run: its id, ``None`` when there was nothing left to do.
        reason: ``finished`` or ``interrupted``.
        summary: lines for a person.
        seal: the dataset's seal.
    """

    run: str | None
    reason: str
    summary: str
    seal: Seal


def write(options: WriteOptions) -> Written:
    """Harvest one run into a new or a resumed dataset.

    Raises:
        ActdsError: what stopped it; everything committed before is sealed where that is possible.

    Spec: 0.1 section 9.
    """
    began = time.monotonic()
    if options.canary is not None:
        Share.parse(options.canary)
    _check_out(options)
    _check_metrics(options)
    plan = make_plan(options)
    created = not is_taken(options.out)
    if created and not _servable(plan):
        return _nothing_to_do(options, plan, resumed=False)
    lock = hold(options.out)
    try:
        if options.resume:
            plan = _without(plan, finished_rows(options.out, plan))
            if not _servable(plan):
                return _nothing_to_do(options, plan, resumed=True)
        return _Run(options, plan, lock, began).harvest()
    finally:
        os.close(lock)
        if created:
            discard_empty(options.out)


def run_plan(
    options: WriteOptions, plan: Plan, began: float, heard: Callable[[Finished], None]
) -> Written:
    """Harvest a plan into a new dataset.

    Args:
        options: the arguments.
        plan: what to serve.
        began: monotonic clock of the start.
        heard: told of every request that ended.

    Raises:
        ActdsError: as ``write``.
    """
    lock = hold(options.out)
    try:
        return _Run(options, plan, lock, began, heard).harvest()
    finally:
        os.close(lock)


def _servable(plan: Plan) -> bool:
    return any(encoded.skip is None for encoded in plan.encoded)


def _check_out(options: WriteOptions) -> None:
    if options.resume and not has_dataset(options.out):
        raise ActdsError(
            "E010",
            str(options.out),
            got="no dataset",
            expected="a dataset to go on with",
            next_step="Leave --resume away to begin a new one.",
        )
    if not options.resume and is_taken(options.out):
        raise ActdsError("E008", str(options.out), got="it exists", expected="a new path")


def _check_metrics(options: WriteOptions) -> None:
    """Refuse a port that cannot be served now rather than after the engine's start."""
    if options.metrics_port is not None:
        from actds_writers.monitor.metrics import serve_metrics

        idle = Snapshot(elapsed_s=0.0, requests_done=0, requests_total=0)
        serve_metrics(options.metrics_host, options.metrics_port, lambda: idle).close()


def _without(plan: Plan, done: set[int]) -> Plan:
    """Return the plan without the prompts that an earlier run finished."""
    return replace(
        plan,
        encoded=tuple(e for e in plan.encoded if e.prompt.row not in done),
        client=tuple(prompt for prompt in plan.client if prompt.source_row not in done),
    )


def _nothing_to_do(options: WriteOptions, plan: Plan, *, resumed: bool) -> Written:
    if not resumed:
        skips = [prompt.skip for prompt in plan.client if prompt.skip]
        raise ActdsError(
            "E006",
            options.prompts,
            got=f"{len(skips)} prompts, all skipped; the first: {skips[0] if skips else 'none'}",
            expected="at least one prompt that fits the model",
        )
    sealed = seal(open_store(options.out))
    text = f"Every prompt of {options.prompts} is finished; {options.out} is sealed."
    return Written(None, "finished", text, sealed)


class _Run:
    """One run from its processes to its seal."""

    def __init__(
        self,
        options: WriteOptions,
        plan: Plan,
        lock: int,
        began: float,
        heard: Callable[[Finished], None] | None = None,
    ) -> None:
        self._options, self._plan, self._began = options, plan, began
        self._canary = Canary(options, plan) if options.canary else None
        self._heard = heard or (self._canary.finished if self._canary else lambda finished: None)
        self._queue = [e for e in plan.encoded if e.skip is None]
        self._n_requests = len(self._queue)
        self._queue.reverse()
        self._live: set[str] = set()
        self._n_finished = 0
        self._cached: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self._interrupts = 0
        self._settings = WriterSettings(
            root=str(options.out),
            dataset=secrets.token_hex(16),
            run=layout.new_id("r"),
            resume=options.resume,
            started_ns=time.time_ns(),
            software=f"actds {actds.__version__}",
            facts=plan.facts,
            tokens=plan.tokens,
            rows_per_shard=plan.rows_per_shard,
            order=options.order,
            seed=options.seed,
            n_threads=max(1, (os.cpu_count() or 2) // 2),
            raw_threshold_nbytes=options.raw_mib << 20,
            readouts=plan.readouts,
        )
        self._pipeline = Pipeline(
            plan.hooks,
            options.store_dtype,
            options.overflow,
            options.ring_mib << 20,
            self._settings,
            os.getpid(),
            lock,
            staging_nbytes=options.staging_mib << 20,
            probes=plan.probes,
            check=options.check,
        )

    def harvest(self) -> Written:
        """Run to the end; return what was written.

        Raises:
            ActdsError: what stopped the run.
        """
        failure: ActdsError | None = None
        with self._pipeline, self._interruptible(), ExitStack() as watch:
            self._pipeline.connect()
            # Should the census be killed, its journal still knows whose the requests were.
            self._pipeline.tell_client_facts(ClientFacts(self._plan.client))
            engine: Engine | None = None
            try:
                engine = self._start()
                self._serve_metrics(watch)
                with Progress(self._snapshot, quiet=self._options.quiet):
                    self._feed(engine)
                    self._drain()
            except ActdsError as error:
                failure = self._cause(error)
            finally:
                # Also after a second Ctrl-C: writer and census end only when the engine has.
                if engine is not None:
                    engine.shutdown()
            reason: CloseReason = (
                "failed" if failure else "interrupted" if self._interrupts else "finished"
            )
            self._tell_client_facts()
            try:
                ended = self._pipeline.finish(reason)
                self._pipeline.poll()
            except ActdsError as error:
                failure = failure or error
        if failure is not None:
            self._seal_what_there_is()
            raise failure
        if not has_dataset(self._options.out):
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
            if self._interrupts:
                reason = "interrupted"
        sealed = seal(open_store(self._options.out))
        summary = self._summary(ended, sealed, outcome)
        if outcome is not None:
            failure = outcome.error(self._settings.run)
        if failure is not None:
            print(summary, flush=True)
            raise failure
        return Written(self._settings.run, reason, summary, sealed)

    def _replay(self, canary: Canary) -> Outcome | None:
        """Replay the canaries and commit what they say, before the seal."""
        settings = self._settings
        outcome = canary.replay(settings.run, settings.software, lambda: self._interrupts)
        if outcome is None:
            print("The canary replay was interrupted: nothing is compared.", file=sys.stderr)
        return outcome

    def _start(self) -> Engine:
        options = self._options
        print(f"Starting the engine for {options.model} ...", file=sys.stderr, flush=True)
        engine = start_engine(
            options.writer,
            options.model,
            options.engine,
            self._pipeline.link,
            temperature=options.temperature,
            seed=options.seed,
        )
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not (self._pipeline.counted and self._pipeline.counted.connected):
            self._pipeline.poll()
            if time.monotonic() > deadline:
                engine.shutdown()
                raise ActdsError(
                    "E501",
                    "engine",
                    got="no word from the plugin inside it",
                    expected="the vllm plugin of actds to be loaded",
                    next_step="Install actds where vllm is installed; see VLLM_PLUGINS.",
                )
            time.sleep(0.02)
        return engine

    def _feed(self, engine: Engine) -> None:
        """Feed every prompt and step the engine until all requests have ended."""
        window = 2 * engine.max_num_seqs
        limit = engine.max_model_len
        while self._queue or self._live:
            while self._queue and len(self._live) < window and not self._interrupts:
                self._add(engine, self._queue.pop(), limit)
            if self._interrupts:
                self._abort(engine)
                break
            for finished in engine.step() if self._live else []:
                self._live.discard(finished.key)
                self._n_finished += 1
                self._heard(finished)
                if finished.cached_tokens is not None:
                    self._cached[finished.key] = finished.cached_tokens
            self._pipeline.poll()
        if not self._n_finished and not self._interrupts:
            first = next(iter(self._refused.values()), "none")
            raise ActdsError(
                "E006", self._options.prompts, got=first, expected="a prompt the engine takes"
            )

    def _abort(self, engine: Engine) -> None:
        """End the requests under way; what they owe is accounted as aborted."""
        engine.abort(sorted(self._live))
        self._n_finished += len(self._live)
        self._live.clear()

    def _drain(self) -> None:
        """Wait until the scheduler has let go of every request and the writer has every step.

        Raises:
            ActdsError: what made a process fail meanwhile.
        """
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while time.monotonic() < deadline:
            self._pipeline.poll()
            counted, written = self._pipeline.counted, self._pipeline.written
            if counted and counted.n_finished >= self._n_finished:
                if counted.last_step < 0:
                    return
                if written and written.last_step >= counted.last_step:
                    return
            time.sleep(0.02)
        print(
            f"The writer is behind after {DRAIN_TIMEOUT_S:.0f} s; the rest counts as aborted.",
            file=sys.stderr,
        )

    def _add(self, engine: Engine, encoded: Encoded, limit: int) -> None:
        """Add a prompt, or note why the engine does not take it."""
        key = request_key(encoded.prompt.index)
        room = limit - len(encoded.token_ids)
        if room < 1:
            length = len(encoded.token_ids)
            self._refused[key] = (
                f"E004 row {encoded.prompt.row}: {length} prompt tokens; "
                f"the engine takes {limit - 1}"
            )
            return
        try:
            engine.add(key, encoded.token_ids, min(encoded.max_tokens, room))
        except ValueError as error:
            words = " ".join(str(error).split())[:300]
            self._refused[key] = f"E002 row {encoded.prompt.row}: the engine says: {words}"
            return
        self._live.add(key)

    def _tell_client_facts(self) -> None:
        """Tell the census what became of every prompt, those never fed included."""
        unfed = {request_key(e.prompt.index) for e in self._queue}
        prompts = tuple(
            replace(prompt, skip=self._refused[prompt.key])
            if prompt.key in self._refused
            else prompt
            for prompt in self._plan.client
            if prompt.key not in unfed
        )
        self._pipeline.tell_client_facts(ClientFacts(prompts, self._cached))

    def _cause(self, error: ActdsError) -> ActdsError:
        """Return what lies behind an engine that died: the pipeline often knows it better."""
        deadline = time.monotonic() + CAUSE_TIMEOUT_S
        while error.code == "E504" and time.monotonic() < deadline:
            try:
                self._pipeline.poll()
            except ActdsError as cause:
                return cause
            time.sleep(0.05)
        return error

    def _seal_what_there_is(self) -> None:
        """Seal what was committed before a failure, where that is possible."""
        try:
            if not has_dataset(self._options.out):
                return
            store = open_store(self._options.out)
            require_accounted(recover_runs(store))
            sealed = seal(store)
        except ActdsError as error:
            print(f"{self._options.out} is not sealed: {error}", file=sys.stderr)
        else:
            rows = sealed.totals["rows"]
            print(f"{self._options.out} is sealed with {rows:,} rows.", file=sys.stderr)

    def _snapshot(self) -> Snapshot:
        return take_snapshot(
            self._pipeline.written,
            self._pipeline.counted,
            elapsed_s=time.monotonic() - self._began,
            requests_done=self._n_finished,
            requests_total=self._n_requests,
        )

    def _serve_metrics(self, watch: ExitStack) -> None:
        """Serve metrics until the end of the run; only now, for the engine may have forked."""
        port, host = self._options.metrics_port, self._options.metrics_host
        if port is None:
            return
        from actds_writers.monitor.metrics import serve_metrics

        server = watch.enter_context(serve_metrics(host, port, self._snapshot))
        print(f"Metrics at http://{host}:{server.port}/metrics", file=sys.stderr, flush=True)

    def _summary(self, ended: Ended, sealed: Seal, outcome: Outcome | None) -> str:
        catalog = Catalog.read(open_store(self._options.out))
        run = self._settings.run
        shards = [shard for shard in catalog.shards if shard.run == run]
        stored = sum(entry.nbytes for shard in shards for entry in shard.files)
        reasons = catalog.table("requests", run)["finish_reason"].value_counts().to_pylist()
        row_nbytes = sum(
            hook.d_model * (4 if hook.dtype == "float32" else 2) for hook in catalog.genesis.hooks
        )
        census = ended.census
        spans = catalog.table("spans", run)
        never = pc.and_(pc.equal(spans["disposition"], "aborted"), pc.is_null(spans["step"]))
        owed = spans.filter(never)
        uncomputed = pc.sum(pc.subtract(owed["stop"], owed["start"])).as_py() or 0
        return format_summary(
            Totals(
                path=str(self._options.out),
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
                n_hooks=len(catalog.genesis.hooks),
                n_shards=len(shards),
                row_nbytes=ended.writer["rows"] * row_nbytes,
                stored_nbytes=stored,
                seal=catalog.seal_sha256,
                canary=outcome.line() if outcome else None,
            )
        )

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C or SIGTERM end the run in order; a second one end it at once."""

        def note(signum: int, _frame: FrameType | None) -> None:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
            name = signal.Signals(signum).name
            print(f"\n{name}: draining; once more to stop at once.", file=sys.stderr, flush=True)

        before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
