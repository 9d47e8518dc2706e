"""One engine of a harvest at work: its processes, its requests, and the end of its run."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from types import FrameType

from actds.errors import ActdsError
from actds.format.schema import CloseReason
from actds.text import one_line
from actds_writers.config import WriterSettings, WriteSettings
from actds_writers.engine_protocol import Engine, Finished, find_engine
from actds_writers.harvest.canary import Canary, Outcome
from actds_writers.harvest.prepare import Plan, has_dataset, request_key
from actds_writers.harvest.processes import Pipeline
from actds_writers.harvest.result import Observer
from actds_writers.ipc.messages import ClientFacts, PromptFact, packed
from actds_writers.monitor.progress import Snapshot, take_snapshot
from actds_writers.prompts.encoding import Encoded
from actds_writers.prompts.roles import sampled_labels
from actds_writers.sampling import Regime
from actds_writers.sizing import usual_threads

CONNECT_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 300.0
IDLE_S = 0.1
CAUSE_TIMEOUT_S = 5.0
"""How long to wait for the cause, from the writer, when the engine has died."""


@dataclass(frozen=True)
class Ended:
    run: str | None
    interrupted: bool
    failure: ActdsError | None
    totals: dict[str, dict[str, int]] | None = None
    outcome: Outcome | None = None
    replay_failure: ActdsError | None = None

    @classmethod
    def failed(cls, failure: ActdsError) -> Ended:
        return cls(None, False, failure)


@dataclass(frozen=True)
class Piece:
    """Prompts that are handed to an engine while it runs; none when all have been."""

    encoded: tuple[Encoded, ...] = ()
    client: tuple[PromptFact, ...] = ()
    regimes: Mapping[str, Regime] = field(default_factory=dict)


class Feed:
    """Hands the requests of a plan to an engine, and keeps the outcome of each.

    A subclass may override ``serve`` to hand them over at other times.
    """

    def __init__(self, plan: Plan, poll: Callable[[], None]) -> None:
        self.poll = poll
        self.heard: Callable[[Finished], None] = lambda finished: None
        self.tell: Callable[[ClientFacts], None] = lambda facts: None
        self.queue = [e for e in plan.encoded if e.skip is None]
        self.n_requests = len(self.queue)
        self.queue.reverse()
        self.live: set[str] = set()
        self.n_finished = 0
        self.interrupted = False
        self._client = plan.client
        self._encoded = {request_key(e.prompt.index): e for e in self.queue if e.roles}
        self._thinking = plan.thinking
        self._regimes: Mapping[str, Regime] = plan.regimes
        self._roles: dict[str, str] = {}
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
            of_keep = [self._regimes[key]] if self._regimes else []
            engine.add(key, encoded.token_ids, min(encoded.max_tokens, room), *of_keep)
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
            self._note_roles(finished)
            if finished.cached_tokens is not None:
                self._cached[finished.key] = finished.cached_tokens
        self.poll()

    def _note_roles(self, finished: Finished) -> None:
        """Note the roles of prompt and sampled tokens; the last of these is never fed."""
        encoded = self._encoded.pop(finished.key, None)
        if encoded is not None:
            fed = finished.token_ids[:-1]
            labels = sampled_labels(fed, self._thinking, thinks=encoded.thinks)
            self._roles[finished.key] = encoded.roles + packed(labels)

    def abort(self, engine: Engine, keys: set[str]) -> None:
        engine.abort(sorted(keys))
        self.n_finished += len(keys)
        self.live = self.live - keys

    def facts(self, unbegun: str) -> ClientFacts:

        def outcome(prompt: PromptFact) -> PromptFact:
            words = self.refused.get(prompt.key, prompt.skip)
            return replace(prompt, skip=words, roles=self._roles.get(prompt.key, prompt.roles))

        return ClientFacts(tuple(map(outcome, self._client)), self._cached, unbegun)


class PieceFeed(Feed):
    """Serves the pieces that it asks for, until there are no more.

    Args:
        ask: takes how many of the prompts so far have not ended, whenever another piece has room,
            and again at 0.
        pieces: where the pieces arrive; an empty one is the last.
    """

    def __init__(
        self,
        plan: Plan,
        poll: Callable[[], None],
        ask: Callable[[int], None],
        pieces: SimpleQueue[Piece],
    ) -> None:
        super().__init__(plan, poll)
        self._ask, self._pieces = ask, pieces
        self._asked: int | None = None

    def serve(self, engine: Engine) -> None:
        """Serve pieces; the census has the prompts of each before the engine has."""
        window, is_last = 2 * engine.max_num_seqs, False
        while not self.interrupted:
            n_left = len(self.queue) + len(self.live)
            wanted = n_left < window and self._asked is None
            if not is_last and (wanted or (n_left == 0 and self._asked)):
                self._ask(n_left)
                self._asked = n_left
            try:
                # An engine that is idle waits; one that is not looks whether there is a piece.
                idle = not n_left and not is_last
                piece = self._pieces.get(idle, IDLE_S) if idle else self._pieces.get_nowait()
            except Empty:
                piece = None
            if piece is not None:
                self._asked, is_last = None, not piece.client
                self._take(piece)
            elif is_last and not n_left:
                return
            while self.queue and len(self.live) < window:
                self.add(engine, self.queue.pop())
            self.step(engine)
        self.abort(engine, self.live)

    def _take(self, piece: Piece) -> None:
        servable = [e for e in piece.encoded if e.skip is None]
        self._client = (*self._client, *piece.client)
        self._regimes = {**self._regimes, **piece.regimes}
        self._encoded |= {request_key(e.prompt.index): e for e in servable if e.roles}
        self.n_requests += len(servable)
        self.queue = [*reversed(servable), *self.queue]
        self.tell(ClientFacts(piece.client))


@contextmanager
def interrupts_handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM; only the main thread can, on another one nothing changes."""
    # Within a second they are one: a job's end is for every process, and its script passes it on.
    is_main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    last = -math.inf

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last >= 1:
            last = time.monotonic()
            handle(number, frame)

    before = {number: signal.signal(number, note) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Run:
    def __init__(
        self,
        settings: WriteSettings,
        plan: Plan,
        lock: int,
        began: float,
        observer: Observer,
        feed: Callable[[Plan, Callable[[], None]], Feed] = Feed,
        replica: tuple[int, int] = (0, 1),
        n_beside: int = 1,
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
            n_threads=max(1, usual_threads() // n_beside),
            readouts=plan.readouts,
            resume=settings.resume and settings.part is None,  # a part may be the first of all
            replica=replica,
        )
        edits = None if plan.interventions is None else plan.interventions.to_bytes()
        self._pipeline = Pipeline(
            self._writer,
            plan.hooks,
            os.getpid(),
            lock,
            files={"probes": plan.probes, "interventions": edits, "profile": plan.profile},
        )
        self.feed = feed(plan, self._pipeline.poll)
        self.feed.tell = self._pipeline.send_client_facts
        if self._canary is not None:
            self.feed.heard = self._canary.finished

    @property
    def id(self) -> str:
        return self._writer.run

    def run(self) -> Ended:
        """Run to the end, canaries included; the dataset is not sealed yet."""
        ended: dict[str, dict[str, int]] | None = None
        with self._pipeline, self._interruptible(), ExitStack() as watch:
            failure, reason = self._serve(watch)
            how = f"{reason} ({failure.code})" if failure else f"was {reason}"
            facts = self.feed.facts(f"the harvest {how} before it was served")
            self._pipeline.send_client_facts(facts)
            try:
                ended = self._pipeline.finish(reason)
                self._pipeline.poll()
            except ActdsError as error:
                failure = failure or error
        outcome, wrong = None, None
        done = failure is None and has_dataset(self._settings.out)
        if self._canary is not None and reason == "finished" and done:
            with self._interruptible():
                try:
                    outcome = self._replay(self._canary)
                except ActdsError as error:
                    wrong = error
        interrupted = bool(self._interrupts)
        return Ended(self._writer.run, interrupted, failure, ended, outcome, wrong)

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
            self._observer.doing(f"Serving {self.feed.n_requests:,} requests")
            with self._observer.harvesting(self._snapshot):
                self.feed.serve(engine)
                if self.feed.n_requests and not self.feed.n_finished and not self._interrupts:
                    got = next(iter(self.feed.refused.values()), "none")
                    expected = "a prompt the engine takes"
                    raise ActdsError("E006", self._settings.prompts, got=got, expected=expected)
                self._drain()
        except ActdsError as error:
            failure = self._cause(error)
        finally:
            # Also after a second Ctrl-C: writer and census end only when the engine has.
            if engine is not None:
                engine.shutdown()
        return failure, "failed" if failure else "interrupted" if self._interrupts else "finished"

    def _replay(self, canary: Canary) -> Outcome | None:
        run, software = self._writer.run, self._writer.software
        outcome = canary.replay(run, software, lambda: self._interrupts, self._observer.said)
        if outcome is None:
            self._observer.said("The canary replay was interrupted; nothing was compared.")
        return outcome

    def _start(self) -> Engine:
        settings, link, observer = self._settings, self._pipeline.link, self._observer
        words = f"Starting the engine for {settings.model}"
        with observer.starting(words), link.notes(observer.doing):
            engine = find_engine(settings.engine).start(
                settings.model,
                self._plan.engine,
                link,
                temperature=settings.temperature,
                seed=settings.seed,
            )
            self._await_plugin(engine)
        return engine

    def _await_plugin(self, engine: Engine) -> None:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not (self._pipeline.counted and self._pipeline.counted.connected):
            self._pipeline.poll()
            if time.monotonic() > deadline:
                engine.shutdown()
                got = "no message from the plugin inside it"
                expected = "the vllm plugin of actds to be loaded"
                step = "Install actds where vllm is installed; see VLLM_PLUGINS."
                raise ActdsError("E501", "engine", got=got, expected=expected, next_step=step)
            time.sleep(0.02)

    def _drain(self) -> None:
        """Wait until every request has left the scheduler and the writer has every step."""
        # Each sample of a prompt is a request of the scheduler.
        n_requests = self.feed.n_finished * self._plan.engine.n_samples
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while time.monotonic() < deadline:
            self._pipeline.poll()
            counted = self._pipeline.counted
            ended = counted is not None and counted.n_finished >= n_requests
            if counted and ended and self._pipeline.has_reached(counted.last_step):
                return
            if self._pipeline.written and self._pipeline.written.is_left:
                self._observer.said("The engine is gone; steps on their way count as aborted.")
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

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C or SIGTERM end the run in order, the second one at once."""

        def note(signum: int, _frame: FrameType | None) -> None:
            self._interrupts += 1
            self.feed.interrupted = True
            if self._interrupts > 1:
                raise KeyboardInterrupt
            name = signal.Signals(signum).name
            self._observer.said(f"\n{name}: draining; repeat to stop at once.")

        with interrupts_handled(note):
            yield
