"""The vLLM plugin: loaded in every vLLM process, inactive outside a harvest.

A process belongs to a harvest if ``actds write`` has set an environment variable for its engine, or
if a server has the key ``actds`` in ``--additional-config``. Without the variable, two wrappers
look for that key, around the constructors of the engine's executor and of the front end's input
processor; nothing else is imported or patched.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from actds.errors import ActdsError
from actds_writers.engines import wrap
from actds_writers.ipc.link import ENVIRONMENT, Link

if TYPE_CHECKING:
    from actds.format.schema import CloseReason
    from actds_writers.engines.vllm.serving import LiveRun

EXECUTOR = "vllm.v1.executor.abstract"
INPUTS = "vllm.v1.engine.input_processor"
WORKER = "vllm.v1.worker.gpu_worker"
FURTHER = "ACTDS_FURTHER_NODE"
"""In the environment of workers on another node than their engine's, of a harvest."""
log = logging.getLogger("vllm.actds")
DRAIN_TIMEOUT_S = 300.0
VERIFY_TIMEOUT_S = 60.0
CLIENT_GONE_S = 1.0
CRASH_PATIENCE_S = 5.0
"""After a crash the last step may never arrive, as it may not have run."""

_registered = False
_wrapped = False
_link: Link | None = None
"""Harvest of the engine or worker in this process."""
_live: LiveRun | None = None
"""The live harvest that this process supervises."""
_closers: list[Callable[[], None]] = []


def register() -> None:
    """Wrap worker and scheduler if this process belongs to a harvest; else wait for one."""
    global _registered
    if _registered:
        return
    _registered = True
    link = Link.from_environment()
    if link is not None:
        _attach(link)
    else:
        when_imported(EXECUTOR, _wrap_executor)
        when_imported(INPUTS, _wrap_inputs)
        if FURTHER in os.environ:
            when_imported(WORKER, _wrap_further)


def renew() -> None:
    """Belong to the harvest that the environment names now, or to none.

    A process loads its plugins once, and its forks not at all; it may harvest several times.
    """
    global _link
    link = Link.from_environment()
    if link is None:
        _link = None
    elif _registered:
        _attach(link)


def close() -> None:
    """Close the connections of this process, if the engine ran in the command's own process."""
    global _link
    while _closers:
        _closers.pop()()
    if _live is not None:
        _link = None


def _attach(link: Link) -> None:
    global _link, _wrapped
    _link = link
    if not _wrapped:
        _wrapped = True
        _wrap_worker()
        _wrap_scheduler()


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with a module once it is imported, which some of vLLM's processes never do."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, then))


class _Watch(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute: Callable[[ModuleType], None] = spec.loader.exec_module

        def executing(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = executing  # type: ignore[method-assign]
        return spec


def _wrap_executor(module: Any) -> None:
    """Start a live harvest when an engine core with its settings builds its executor.

    The plugin is loaded while the engine core is being built; its executor is built next, before
    scheduler and workers.
    """

    @wrap(module.Executor, "__init__")
    def initialising(init: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        additional = _additional(vllm_config)
        if "actds" in additional and _is_further(vllm_config):
            os.environ[FURTHER] = "1"  # for workers that are started anew; forks have the wrapper
            when_imported(WORKER, _wrap_further)
            init(self, vllm_config, *args, **kwargs)
            return
        if "actds" not in additional:
            init(self, vllm_config, *args, **kwargs)
            return
        live = _start_live(vllm_config, additional["actds"])
        try:
            init(self, vllm_config, *args, **kwargs)
        except BaseException:
            close()
            live.end("failed")
            raise
        from actds_writers.engines.vllm.weights import WeightsWatch

        folder = Path(vllm_config.model_config.model)
        live.watch = WeightsWatch(self, folder, functools.partial(_give_up, "engine core"))


def _is_further(vllm_config: Any) -> bool:
    """Whether this is another node than that of the engine, its writer and its first rank."""
    parallel = vllm_config.parallel_config
    return bool(parallel.nnodes > 1 and parallel.node_rank > 0)


def _wrap_further(module: Any) -> None:
    """Let workers of further nodes ask the first rank for the harvest before they load weights."""

    @wrap(module.Worker, "load_model")
    def loading(load_model: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.vllm_config
        if _link is not None or "actds" not in _additional(config) or not _is_further(config):
            return load_model(self, *args, **kwargs)
        from actds_writers.engines.vllm.nodes import join
        from actds_writers.engines.vllm.options import graph_key
        from actds_writers.engines.vllm.worker import agreed

        _attach(join(agreed(self)))
        assert _link is not None
        config.additional_config = {**config.additional_config, "actds": graph_key(_link)}
        return self.load_model(*args, **kwargs)  # by the wrapper of a harvest


def _additional(vllm_config: Any) -> dict[str, Any]:
    additional = vllm_config.additional_config
    return additional if isinstance(additional, dict) else {}


def _wrap_inputs(module: Any) -> None:
    """Refuse unlisted interventions, and label chats, in the front end of a live harvest.

    Where vLLM has not the names for it, a dataset lacks roles; the start does not fail.
    """
    if not hasattr(module, "InputProcessor"):
        return

    @wrap(module.InputProcessor, "__init__")
    def initialising(init: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        document = _additional(vllm_config).get("actds")
        if not isinstance(document, dict):
            return
        from actds_writers.engines.vllm.requests import refuse_in

        refuse_in(self, document)
        if document.get("roles") is False:
            return
        try:
            from actds_writers.engines.vllm.requests import label_chats

            label_chats(self)
        except Exception as error:
            log.warning("actds: chats have no roles: %r", error)


def _start_live(vllm_config: Any, document: Any) -> LiveRun:
    from vllm.v1.engine.core import EngineCore

    from actds_writers.engines.vllm.serving import start

    global _live
    first = _live is None
    _live = live = start(vllm_config, document)
    os.environ[ENVIRONMENT] = live.link.to_environment()
    _attach(live.link)
    if first:
        wrap(EngineCore, "shutdown")(_shutting_down)
        atexit.register(_end_live, None)
    return live


def _shutting_down(shutdown: Any, engine_core: Any, *args: Any, **kwargs: Any) -> Any:
    reason: CloseReason | None = None
    if _live is not None:
        try:
            reason = _drain(_live, engine_core)
        except Exception as error:
            _live.fail(error)
            reason = "failed"
    try:
        return shutdown(engine_core, *args, **kwargs)
    finally:
        _end_live(reason)


def _drain(live: LiveRun, engine_core: Any) -> CloseReason:
    """Wait for the writer, close this process's connections; return how the run ends."""
    state = getattr(engine_core, "shutdown_state", None)
    crashed = state is not None and getattr(state, "name", "") == "RUNNING"
    scheduler = engine_core.scheduler
    account = getattr(scheduler, "_actds", None)
    if not crashed:
        settle_last_step(engine_core)
    unfinished = scheduler.get_num_unfinished_requests()
    patience_s = CRASH_PATIENCE_S if crashed else DRAIN_TIMEOUT_S
    drained = account is not None and live.drain(lambda: account.last_step, patience_s)
    if not crashed and live.watch is not None:
        try:
            live.watch.verify(VERIFY_TIMEOUT_S)
        except ActdsError as error:
            live.fail(error)
    close()
    return "failed" if crashed else "finished" if drained and not unfinished else "interrupted"


def _end_live(reason: CloseReason | None) -> None:
    global _live
    live, _live = _live, None
    if live is None:
        return
    os.environ.pop(ENVIRONMENT, None)
    close()
    live.end(reason or "interrupted")


def _give_up(where: str, error: Exception) -> None:
    """End capture in this process while serving continues; offline, raise the error."""
    assert _link is not None
    if not _link.live:
        raise error
    if _live is not None:
        _live.fail(error)
    else:
        log.error("actds: capture ends in the %s: %s", where, error)


def _wrap_worker() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    @wrap(Worker, "load_model")
    def loading(load_model: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if _link is None:
            return load_model(self, *args, **kwargs)
        from actds_writers.engines.account import reporting_failure
        from actds_writers.engines.vllm.nodes import require_near, tell
        from actds_writers.engines.vllm.runner import captures, loaded_model
        from actds_writers.engines.vllm.worker import WorkerCapture, agreed, give_heads, steer

        with reporting_failure(_link):
            require_near(_link)
            if self.vllm_config.parallel_config.nnodes > 1:
                tell(_link, self.vllm_config.parallel_config, agreed(self))

        _link.note("Loading the weights")
        result = load_model(self, *args, **kwargs)
        if captures(self, loaded_model(self.model_runner), _link):
            self._actds = WorkerCapture(self, _link)
            _closers.append(self._actds.close)
            self._actds.watch_logits(functools.partial(_guarded, self))
        else:
            give_heads(self, _link)
        steering = steer(self, _link)
        if getattr(self, "_actds", None) is not None:
            self._actds.edits = None if steering is None else steering.edits
        _watch_set_up(self, _link)
        return result

    @wrap(Worker, "execute_model")
    def executing(execute_model: Any, self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        capture = getattr(self, "_actds", None)
        if capture is None or not capture.is_set_up:
            return execute_model(self, scheduled, *args, **kwargs)
        is_live = _link is not None and _link.live
        if is_live and getattr(scheduled, "_actds", None) is None:
            _detach(self)  # the scheduler side has ended: its steps have no mark
            return execute_model(self, scheduled, *args, **kwargs)
        _guarded(self, capture.settle_steps, scheduled)
        if self._actds is None or not scheduled.total_num_scheduled_tokens:
            return execute_model(self, scheduled, *args, **kwargs)
        _guarded(self, capture.before_step)
        began = time.monotonic_ns()
        result = execute_model(self, scheduled, *args, **kwargs)
        if self._actds is not None:
            duration_ns = time.monotonic_ns() - began
            _guarded(self, capture.after_step, self.model_runner, scheduled, duration_ns)
        return result


def _watch_set_up(worker: Any, link: Link) -> None:
    """Capture from the end of a worker's set-up: its warm-up runs steps that nobody scheduled.

    The check of the hooks is the last part of the set-up, on every rank, unless it is off.
    """

    # The CPU's worker has a method of its own, which a wrapper of the class would miss.
    @wrap(worker, "compile_or_warm_up_model")
    def setting_up(warm_up: Any, *args: Any, **kwargs: Any) -> Any:
        link.note("Compiling the model, and warming up")
        result = warm_up(*args, **kwargs)
        capture = getattr(worker, "_actds", None)
        if link.settings.check:
            link.note("Comparing rows of two short prompts with the model's own")
            from actds_writers.engines.vllm.check import check_hooks, join_check

            if capture is None:
                join_check(worker, live=link.live)
            else:
                hooked = capture.buffers, capture.hooks, capture.form
                capture.check(lambda: check_hooks(worker, *hooked, live=link.live))
        if capture is not None:
            capture.is_set_up = True
        return result


def _guarded(worker: Any, call: Callable[..., None], *args: Any) -> None:
    """Call the worker side; if it fails in a live engine, the engine continues without capture."""
    if worker._actds is None:
        return
    try:
        call(*args)
    except Exception as error:
        _give_up("worker", error)
        _detach(worker)


def _detach(worker: Any) -> None:
    """End a worker's capture; its hooks stay in the model without effect.

    In a live engine on a thread of its own: a writer that stands still is waited for a while.
    """
    assert _link is not None
    capture, worker._actds = worker._actds, None
    if capture.close in _closers:
        _closers.remove(capture.close)

    def closing() -> None:
        try:
            capture.close()
        except Exception as error:
            _give_up("worker", error)

    if _link.live:
        threading.Thread(target=closing, name="actds-detach", daemon=True).start()
    else:
        closing()


def _end_without(client_pid: int) -> None:
    """End this engine core in order when its client is gone: vLLM's waits for requests for ever."""

    def watching() -> None:
        while os.getppid() == client_pid:
            time.sleep(CLIENT_GONE_S)
        log.warning("actds: process %d, the engine's client, is gone: it ends", client_pid)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watching, name="actds-client", daemon=True).start()


def _wrap_scheduler() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    @wrap(Scheduler, "__init__")
    def initialising(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if _link is not None and _link.client_pid != os.getpid():
            _end_without(_link.client_pid)
        self._actds = None if _link is None else _scheduler_side(self, _link)
        self._actds_planned = _planned(_link)

    @wrap(Scheduler, "add_request")
    def adding(add_request: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if (planned := getattr(self, "_actds_planned", None)) is not None:
            from actds_writers.engines.vllm.steering import of_request

            of_request(request, planned)
        _look_at_weights(self)
        _report(self, "arrived", request)
        return add_request(self, request, *args, **kwargs)

    @wrap(Scheduler, "schedule")
    def scheduling(schedule: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        _look_at_weights(self)
        if self._actds is None:
            return _marked(self, schedule(self, *args, **kwargs))
        running = {request.request_id for request in self.running}
        output = _marked(self, schedule(self, *args, **kwargs))
        now = {request.request_id for request in self.running}
        preempted = tuple(r for r in running - now if r in self.requests)
        mark = _report(self, "scheduled", self, output, preempted)
        # A worker that sees no mark ends its capture.
        output._actds = None if _live is not None and _live.failure is not None else mark
        return output

    @wrap(Scheduler, "update_from_output")
    def updating(update: Any, self: Any, output: Any, results: Any, *args: Any, **kw: Any) -> Any:
        if self._actds is not None and self.connector is not None:
            from actds_writers.engines.vllm.requests import refuse_unseen

            _reported(self, refuse_unseen, self, output, results)
        _report(self, "taking", output, results)
        outputs = update(self, output, results, *args, **kw)
        _report(self, "taken", output)
        _report(self, "answer", outputs)
        return outputs

    @wrap(Scheduler, "has_requests")
    def having(has_requests: Any, self: Any) -> Any:
        # One more step, without tokens, tells the workers the results of the last one.
        return has_requests(self) or (self._actds is not None and self._actds.has_news)

    @wrap(Scheduler, "_free_request")
    def freeing(free_request: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _report(self, "finished", request)
        return free_request(self, request, *args, **kwargs)


def _planned(link: Link | None) -> Any:
    """Return the interventions of a harvest, and key KV blocks by them; ``None`` without any."""
    if link is None:
        return None
    from actds_writers.engines.vllm.steering import key_blocks
    from actds_writers.interventions import Planned

    path = link.interventions_path
    planned = None if path is None else Planned.read(path)
    key_blocks(planned)
    return planned


def _marked(scheduler: Any, output: Any) -> Any:
    """Tell the workers with a step what is changed of its requests, whatever became of capture."""
    # A scheduler that was built before a harvest followed its engine has none.
    if (planned := getattr(scheduler, "_actds_planned", None)) is not None:
        from actds_writers.engines.vllm.steering import mark_step

        mark_step(scheduler, output, planned)
    return output


def _look_at_weights(scheduler: Any) -> None:
    """Begin another run before a step, if its weights are not those of the last, or one is due."""
    if scheduler._actds is not None and _live is not None:
        _reported(scheduler, _follow_weights, scheduler, _live)
    if scheduler._actds is not None and _live is not None:
        _reported(scheduler, _rotate, scheduler, _live)


def _follow_weights(scheduler: Any, live: LiveRun) -> None:
    from actds_writers.engines.vllm.requests import WrittenBlocks
    from actds_writers.engines.vllm.weights import weights_facts

    watch, old = live.watch, scheduler._actds
    if watch is None or not watch.is_due or live.failure is not None:
        return
    pause = getattr(getattr(scheduler, "pause_state", None), "name", "")
    if pause == "PAUSED_ALL" or (pause == "PAUSED_NEW" and not scheduler.running):
        return  # no step follows, and an update may have come half of the way
    change = watch.look()
    old.weights = watch.digest
    if change is None:
        return
    before, hashed = live.link.run, getattr(live.link.settings, "weights_digest", False)
    following = live.follow(weights_facts(change, before, hashed=hashed))
    log.warning(
        "actds: the weights were changed by %s: run %s ends, run %s begins.",
        change.words(),
        before,
        following.link.run,
    )
    groups = scheduler.kv_cache_config.kv_cache_groups
    written = WrittenBlocks([int(group.kv_cache_spec.block_size) for group in groups])

    def take_over(side: Any) -> None:
        for request in scheduler.requests.values():
            if not request.is_finished():
                side.arrived(request, old.known(request))

    more = {"written": written, "weights": change.digest}
    _change_run(scheduler, live, following, take_over, more)


def _rotate(scheduler: Any, live: LiveRun) -> None:
    following, old = live.take_following(), scheduler._actds
    if following is None:
        return
    log.info("actds: run %s ends, run %s begins.", live.link.run, following.link.run)

    def take_over(side: Any) -> None:
        running = [r for r in scheduler.requests.values() if not r.is_finished()]
        side.take_over(old, running)

    _change_run(scheduler, live, following, take_over, {"before": old})


def _change_run(
    scheduler: Any,
    live: LiveRun,
    following: LiveRun,
    take_over: Callable[[Any], None],
    more: dict[str, Any],
) -> None:
    """Let the engine's processes capture for another run, whose requests ``take_over`` reports."""
    from actds_writers.engines.vllm.weights import change_run

    global _live, _link
    old = scheduler._actds
    assert live.watch is not None
    _live, _link = following, following.link
    os.environ[ENVIRONMENT] = _link.to_environment()
    try:
        side = _scheduler_side(scheduler, _link, **more)
        live.watch.rpc(change_run, args=(_link, old.take_settled()))
        take_over(side)
        scheduler._actds = side
    finally:
        _closers.remove(old.close)
        old.hand_on()
        old.close()
        heir = None if "before" not in more else following
        live.end_aside("interrupted" if scheduler.requests else "finished", heir)


def _scheduler_side(scheduler: Any, link: Link, **more: Any) -> Any:
    from actds_writers.engines.vllm.answers import Answers
    from actds_writers.engines.vllm.requests import tokenizer_of
    from actds_writers.engines.vllm.scheduler import VllmSchedulerSide
    from actds_writers.ipc.link import Sender
    from actds_writers.sampling import keep_rules

    connection = link.connect("census", "scheduler")
    census = Sender(connection) if link.live else connection
    block_size = int(getattr(scheduler, "hash_block_size", None) or scheduler.block_size)
    n_blocks = int(scheduler.kv_cache_config.num_blocks)
    rules = _live.rules if _live else None
    side = VllmSchedulerSide(
        census,
        block_size,
        n_blocks,
        rules,
        adapters=not link.live,
        entropy=link.settings.entropy,
        keep=keep_rules(link.settings.keep) if link.live else None,
        tokenizer=functools.partial(tokenizer_of, scheduler),
        attending=link.settings.attending(link.run),
        answers=Answers(link, _live.dataset if _live else "") if link.live else None,
        switch=_live.switch if _live else None,
        **more,
    )
    if scheduler.connector is not None:
        side.follow(scheduler.connector)
    _closers.append(side.close)
    return side


def settle_last_step(engine_core: Any) -> None:
    """Let an engine core without unfinished requests tell its workers so.

    In a process of its own it does that by itself; in the client's, it is no longer stepped.
    """
    scheduler = engine_core.scheduler
    while not scheduler.get_num_unfinished_requests() and (
        scheduler.has_requests() or engine_core.batch_queue
    ):
        engine_core.step_fn()


def _report(scheduler: Any, name: str, *args: Any) -> Any:
    """Call a method of the scheduler side as ``_reported``, if there is one."""
    side = scheduler._actds
    return None if side is None else _reported(scheduler, getattr(side, name), *args)


def _reported(scheduler: Any, call: Callable[..., Any], *args: Any) -> Any:
    """Call the scheduler side; if it fails in a live engine, the engine continues without."""
    try:
        return call(*args)
    except Exception as error:
        _give_up("scheduler", error)
        scheduler._actds = None
        return None
