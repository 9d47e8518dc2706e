"""A harvest on the nodes of a Ray cluster: an engine on each, one dataset, prompts in pieces.

Ray places the engines and says which are gone; the ledger decides. Each engine is a run with
processes of its own (``harvest.replicas``). A run whose node is gone is fenced and accounted for,
and what it had not finished is handed out again; a node that only stalls is said to, and is waited
for as long as its heartbeat or its ledger moves.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import actds
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError, not_installed
from actds.store import open_store
from actds.text import counted, one_line
from actds_writers.config import WriteSettings
from actds_writers.engine_protocol import find_engine
from actds_writers.harvest.one_engine import Ended, Piece
from actds_writers.harvest.prepare import (
    Plan,
    files_facts,
    finished_of,
    has_dataset,
    hold,
    identity,
    request_key,
)
from actds_writers.harvest.recover import RunFound, clear_ended, recover_runs
from actds_writers.harvest.replicas import Began, Replica, Wanted, Work, interrupts_passed_on
from actds_writers.harvest.result import Observer
from actds_writers.monitor.progress import Snapshot, summed

POLL_S = 0.5
PLACE_TIMEOUT_S = 600.0
"""How long to wait until Ray has placed the engines."""
STALLED_S = 30.0
"""Silence of a node after which it is said to stall, and its run is watched."""
WATCH_EVERY_S = 5.0
MAX_PIECE = 256
ONE_ENGINE = ("E308", "E502", "E503", "E504", "E505", "E506")
"""Failures of an engine, after which the others serve what it has left."""


class Host:
    """The process of one engine, in an actor on its node."""

    def __init__(self, work: Work, version: str) -> None:
        _require_same(work, version)
        self._lock = hold(work.settings.out, shared=True)
        self._replica = Replica(replace(work, lock=self._lock))
        self._n_pieces = 0
        self._said: dict[int, object] = {}
        self._n_said = 0

    def exchange(self, n_heard: int, pieces: Mapping[int, Piece]) -> list[object]:
        """Hand pieces on; return what the process has said since, after a while at the latest.

        A call whose answer was lost may be repeated.

        Args:
            n_heard: messages that the caller has.
            pieces: by number, from 0; those that are known are passed over.
        """
        for number in range(n_heard):
            self._said.pop(number, None)
        for number, piece in sorted(pieces.items()):
            if number == self._n_pieces:
                self._n_pieces += 1
                with suppress(OSError):  # it has ended; that is the next message
                    self._replica.connection.send(piece)
        patience_s = 0.0 if self._said else POLL_S
        while self._replica.ended is None and self._replica.connection.poll(patience_s):
            message = self._replica.receive()
            self._said[self._n_said] = message
            self._n_said += 1
            patience_s = 0
            if isinstance(message, Ended):
                self._replica.ended = message
                self._replica.end()
                os.close(self._lock)
        return [self._said[number] for number in sorted(self._said)]

    def interrupt(self) -> None:
        self._replica.interrupt()

    def node(self) -> str:
        return socket.gethostname()


def _require_same(work: Work, version: str) -> None:
    """Raise E010 for a node with another version of this package, or other files of the model."""
    host = socket.gethostname()
    if actds.__version__ != version:
        raise ActdsError("E010", host, got=f"actds {actds.__version__}", expected=version)
    settings, declared = work.settings, {fact.name: fact.value for fact in work.plan.facts}
    for fact in files_facts(work.plan.engine.files(settings.model)):
        if fact.name in declared and fact.value != declared[fact.name]:
            expected = f"{declared[fact.name]}, as where the command runs"
            raise ActdsError("E010", f"{host} {fact.name}", got=str(fact.value), expected=expected)


@dataclass
class Node:
    """An engine of the cluster, as the command knows it."""

    number: int
    actor: Any
    name: str = ""
    run: str = ""
    handed: list[int] = field(default_factory=list)
    """Places of the prompts that it was handed, in the plan."""
    answer: Any = None
    sent: tuple[int, ...] = ()
    pieces: dict[int, Piece] = field(default_factory=dict)
    """Those that may not have arrived, by number."""
    n_pieces: int = 0
    n_heard: int = 0
    wants: Wanted | None = None
    snapshot: Snapshot | None = None
    ended: Ended | None = None
    failure: ActdsError | None = None
    taking_over: Future[tuple[set[int], Ended | None]] | None = None
    heard: float = field(default_factory=time.monotonic)
    is_stalled: bool = False
    watched: float = 0.0
    """When it was last looked whether its run can be taken over."""

    @property
    def is_over(self) -> bool:
        return self.ended is not None or self.failure is not None

    @property
    def is_lost(self) -> bool:
        """Whether prompts that it was handed are to be handed out again."""
        return self.taking_over is not None or (self.failure is not None and bool(self.handed))

    def interrupt(self) -> None:
        if not self.is_over:
            self.actor.interrupt.remote()

    def give(self, piece: Piece) -> None:
        self.wants = None
        self.pieces[self.n_pieces] = piece
        self.n_pieces += 1

    def exchange(self) -> None:
        self.sent = tuple(self.pieces)
        self.answer = self.actor.exchange.remote(self.n_heard, dict(self.pieces))


def harvest_cluster(settings: WriteSettings, plan: Plan, observer: Observer) -> list[Ended]:
    """Harvest a plan with the engines of a Ray cluster; return how each run ended.

    Raises:
        ActdsError: E011 Ray is not installed; E009 no cluster, or not what was asked of it; E010 a
            node with other software or another model; E504 no engine is left.
    """
    with _connected() as ray, _placed(ray, settings, plan, observer) as nodes:
        harvest = _Harvest(ray, settings, plan, observer, nodes)
        with interrupts_passed_on(nodes, observer) as n_interrupts:
            harvest.run(n_interrupts)
        if n_interrupts() > 1:
            raise KeyboardInterrupt
    harvest.clear()
    return harvest.ended()


@contextmanager
def _connected() -> Iterator[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise not_installed("ray", "ray", "executor ray") from error
    started_here = not ray.is_initialized()
    if started_here:
        try:
            address = os.environ.get("RAY_ADDRESS", "auto")
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            got, step = (
                str(error)[:200],
                "Start one with ray start, or set RAY_ADDRESS, and RAY_AUTH_MODE=token if asked.",
            )
            expected = "a Ray cluster that runs"
            raise ActdsError(
                "E009", "executor", got=got, expected=expected, next_step=step
            ) from None
    try:
        yield ray
    finally:
        if started_here:
            ray.shutdown()


@contextmanager
def _placed(
    ray: Any, settings: WriteSettings, plan: Plan, observer: Observer
) -> Iterator[list[Node]]:
    """Yield engines in the bundles of a placement group; a bundle is on one node.

    Raises:
        ActdsError: E009 an option that Ray does not have, or engines that find no place.
    """
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = {"num_cpus": 1, **settings.ray_options}
    alive = [node for node in ray.nodes() if node["Alive"]]
    if "num_gpus" not in options and any(node["Resources"].get("GPU") for node in alive):
        options["num_gpus"] = find_engine(settings.engine).devices(plan.engine)
    selector = options.pop("label_selector", None)
    wanted = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0)}
    wanted |= options.get("resources", {})
    bundle = {name: float(n) for name, n in wanted.items() if n}
    n_servable = sum(e.skip is None for e in plan.encoded)
    n_engines = min(settings.engines or _n_engines(alive, bundle), n_servable)
    place = "ray_options"
    if not n_engines:
        got, expected = f"no place for an engine with {bundle}", "what a node has"
        raise ActdsError("E009", place, got=got, expected=expected)
    more = {"bundle_label_selector": [selector] * n_engines} if selector else {}
    try:
        group = placement_group([bundle] * n_engines, strategy="SPREAD", **more)
        placed = group.wait(PLACE_TIMEOUT_S)
    except (ValueError, TypeError) as error:
        got, expected = str(error)[:200], "what Ray has"
        raise ActdsError("E009", place, got=got, expected=expected) from None
    try:
        if not placed:
            got = f"no place for {counted(n_engines, 'engine')} with {bundle}"
            raise ActdsError("E009", place, got=got, expected="what the nodes have")
        unserved = replace(plan, encoded=(), client=(), regimes={})
        n_beside = -(-n_engines // len(alive))
        nodes = []
        for number in range(n_engines):
            share = Work(settings, unserved, 0, number, n_engines, True, n_beside)
            strategy = PlacementGroupSchedulingStrategy(group, number)
            host = ray.remote(Host).options(
                **options, max_restarts=0, max_concurrency=4, scheduling_strategy=strategy
            )
            nodes.append(Node(number, host.remote(share, actds.__version__)))
        observer.doing(f"Starting {counted(n_engines, 'engine')} on {len(alive)} nodes")
        yield nodes
    finally:
        remove_placement_group(group)


def _n_engines(alive: Sequence[dict[str, Any]], bundle: dict[str, float]) -> int:
    """Return how many engines the nodes hold: by their devices, else one for each node."""
    n_engines = 0
    for node in alive:
        fit = min(int(node["Resources"].get(name, 0) // n) for name, n in bundle.items())
        n_engines += fit if bundle.get("GPU") else min(fit, 1)
    return n_engines


class _Harvest:
    """Hands the prompts out, hears the engines, takes over what is gone."""

    def __init__(
        self, ray: Any, settings: WriteSettings, plan: Plan, observer: Observer, nodes: list[Node]
    ) -> None:
        self._ray, self._settings, self._plan = ray, settings, plan
        self._observer, self._nodes = observer, nodes
        self._queue = deque(range(len(plan.encoded)))
        self._client = {prompt.key: prompt for prompt in plan.client}
        self._taken: list[Ended] = []
        self._recovered: list[RunFound] = []
        self._fatal: ActdsError | None = None
        self._has_served = False

    def run(self, n_interrupts: Callable[[], int]) -> None:
        with ThreadPoolExecutor(thread_name_prefix="actds-takeover") as pool, ExitStack() as stack:
            starting = stack.enter_context(ExitStack())
            starting.enter_context(self._observer.starting(f"Starting {len(self._nodes)} engines"))
            harvesting = False
            while any(not node.is_over or node.is_lost for node in self._nodes):
                if n_interrupts() > 1:
                    break
                for node in self._nodes:
                    if not node.is_over and node.answer is None:
                        node.exchange()
                self._hear()
                self._watch(pool)
                if not n_interrupts():
                    self._hand_out()
                if not harvesting and any(node.snapshot for node in self._nodes):
                    harvesting = True
                    starting.close()
                    stack.enter_context(self._observer.harvesting(self._snapshot))

    def _hear(self) -> None:
        answers = {node.answer: node for node in self._nodes if node.answer is not None}
        if not answers:
            time.sleep(POLL_S)
            return
        ready, _ = self._ray.wait([*answers], num_returns=len(answers), timeout=POLL_S)
        for answer in ready:
            node = answers[answer]
            node.answer = None
            try:
                messages = self._ray.get(answer)
            except self._ray.exceptions.ActorUnavailableError:
                time.sleep(POLL_S / len(self._nodes))  # for now: the call is repeated
                continue
            except self._ray.exceptions.RayTaskError as error:
                self._failed(node, error.cause)
                continue
            except self._ray.exceptions.RayError as error:
                self._failed(node, error)
                continue
            node.heard = time.monotonic()
            node.n_heard += len(messages)
            for number in node.sent:
                del node.pieces[number]
            for message in messages:
                self._take(node, message)
            if node.is_stalled:
                node.is_stalled = False
                self._observer.said(f"engine {node.number} answers again")

    def _take(self, node: Node, message: object) -> None:
        if isinstance(message, Began):
            node.run = message.run
        elif isinstance(message, Snapshot):
            node.snapshot, self._has_served = message, self._has_served or message.rows > 0
        elif isinstance(message, Wanted):
            node.wants = message
        elif isinstance(message, Ended):
            if message.failure is not None:
                self._failed(node, message.failure)
            else:
                node.ended = message
        else:
            self._observer.said(f"engine {node.number}: {message}")

    def _failed(self, node: Node, error: Exception) -> None:
        """Note that an engine is gone; what would fail everywhere ends the harvest."""
        if node.is_over:
            return
        place, served = f"engine {node.number}", self._has_served
        if isinstance(error, ActdsError):
            node.failure, served = error, served and error.code in ONE_ENGINE
        else:
            got, served = one_line(error, 200), True
            node.failure = ActdsError("E504", place, got=got, expected="a node that runs")
        if served and any(not other.is_over for other in self._nodes):
            self._observer.said(f"{place} is gone: {node.failure.got}; the others go on")
            return
        self._fatal = self._fatal or node.failure
        for other in self._nodes:
            other.interrupt()

    def _watch(self, pool: ThreadPoolExecutor) -> None:
        """Take over the runs of engines that are gone, and watch those that do not answer."""
        for node in self._nodes:
            silent_s = time.monotonic() - node.heard
            waits = not node.is_over and node.run and silent_s > STALLED_S
            if waits and not node.is_stalled:
                node.is_stalled = True
                self._observer.said(
                    f"engine {node.number} has not answered for {silent_s:.0f} s; it is waited for "
                    "while it writes"
                )
            due = node.taking_over is None and time.monotonic() - node.watched > WATCH_EVERY_S
            if due and (node.is_lost or (node.is_stalled and node.run)):
                node.watched = time.monotonic()
                node.taking_over = pool.submit(self._take_over, node)
            if node.taking_over is not None and node.taking_over.done():
                self._taken_over(node, node.taking_over)

    def _taken_over(self, node: Node, future: Future[tuple[set[int], Ended | None]]) -> None:
        node.taking_over = None
        try:
            left, ended = future.result()
        except ActdsError as error:
            if error.code != "E010":
                raise
            return  # it lives: it only stalls, or is about to end by itself
        if node.failure is None:
            got = "no answer, and no sign of life in the dataset"
            place = f"engine {node.number}"
            node.failure = ActdsError("E504", place, got=got, expected="a node that runs")
        node.handed = []
        self._queue.extendleft(sorted(left, reverse=True))
        if ended is not None:
            self._taken.append(ended)
        self._observer.said(
            f"engine {node.number}: its run is accounted for; {counted(len(left), 'prompt')} "
            "handed out again"
        )

    def _take_over(self, node: Node) -> tuple[set[int], Ended | None]:
        """Account for a run; return what it has left of its prompts.

        Raises:
            ActdsError: E010 where its processes may live.
        """
        out, run, handed = self._settings.out, node.run, set(node.handed)
        if not run or not has_dataset(out):
            return handed, None
        store = open_store(out)
        self._recovered += recover_runs(store, only=lambda other: other == run, alone=False)
        catalog = read_catalog(store)
        if run not in catalog.runs_with_data:
            return handed, None
        finished = finished_of(catalog, run)
        encoded = self._plan.encoded
        left = {
            place
            for place in handed
            if identity(self._client[request_key(encoded[place].prompt.index)]) not in finished
        }
        totals = next(
            chain.close.totals
            for chain in catalog.chains.values()
            if chain.run == run and chain.kind == "census" and chain.close is not None
        )
        n_rows = sum(shard.n_rows for shard in catalog.shards if shard.run == run)
        return left, Ended(run, False, None, {"census": totals, "writer": {"rows": n_rows}})

    def _hand_out(self) -> None:
        working = [node for node in self._nodes if not node.is_over]
        waiting = any(node.is_lost for node in self._nodes)
        for node in working:
            if node.wants is not None and self._queue:
                n = max(1, min(MAX_PIECE, len(self._queue) // (2 * len(working))))
                places = [self._queue.popleft() for _ in range(min(n, len(self._queue)))]
                node.handed += places
                node.give(self._piece(places))
        idle = all(node.wants is not None and node.wants.n_left == 0 for node in working)
        if idle and working and not waiting and not self._queue:
            # One stays for the prompts of those that die before they have committed all of theirs.
            last = max(working, key=lambda node: node.heard)
            for node in [node for node in working if node is not last] or [last]:
                node.give(Piece())

    def _piece(self, places: Sequence[int]) -> Piece:
        encoded = tuple(self._plan.encoded[place] for place in places)
        keys = [request_key(e.prompt.index) for e in encoded]
        regimes = self._plan.regimes
        return Piece(
            encoded,
            tuple(self._client[key] for key in keys),
            {key: regimes[key] for key in keys if key in regimes},
        )

    def _snapshot(self) -> Snapshot:
        whole = summed([node.snapshot for node in self._nodes if node.snapshot is not None])
        return replace(whole, requests_total=sum(e.skip is None for e in self._plan.encoded))

    def clear(self) -> None:
        """Remove what the lost runs left, as late as can be: an engine may only have stalled."""
        if self._recovered:
            clear_ended(open_store(self._settings.out), self._recovered)

    def ended(self) -> list[Ended]:
        """Return how the runs ended: with a failure where prompts are left for nobody."""
        ended = [*(node.ended for node in self._nodes if node.ended is not None), *self._taken]
        return ended if self._fatal is None else [*ended, Ended.failed(self._fatal)]
