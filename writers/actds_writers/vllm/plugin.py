"""The vLLM plugin: loaded in every vLLM process, inert outside a harvest.

``actds write`` sets one environment variable for its engine; without it ``register`` returns at
once, imports nothing of vLLM or torch, and patches nothing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from actds_writers.link import Link

_registered = False
_closers: list[Callable[[], None]] = []


def register() -> None:
    """Wrap worker and scheduler when this process belongs to a harvest; else do nothing."""
    global _registered
    link = Link.from_environment()
    if link is None or _registered:
        return
    _registered = True
    _wrap_worker(link)
    _wrap_scheduler(link)


def close() -> None:
    """End the links of this process, when the engine ran inside the command's own process."""
    while _closers:
        _closers.pop()()


def _wrap_worker(link: Link) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    load_model, execute_model = Worker.load_model, Worker.execute_model

    @functools.wraps(load_model)
    def loading(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_model(self, *args, **kwargs)
        # Tensor-parallel ranks hold identical residual streams; rank 0 writes.
        if self.rank == 0:
            from actds_writers.vllm.worker import WorkerCapture

            self._actds = WorkerCapture(self, link)
            _closers.append(self._actds.close)
        return result

    @functools.wraps(execute_model)
    def executing(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        capture = getattr(self, "_actds", None)
        if capture is None or not scheduled.total_num_scheduled_tokens:
            return execute_model(self, scheduled, *args, **kwargs)
        capture.before_step()
        began = time.monotonic_ns()
        result = execute_model(self, scheduled, *args, **kwargs)
        capture.after_step(self.model_runner, scheduled, time.monotonic_ns() - began)
        return result

    Worker.load_model, Worker.execute_model = loading, executing


def _wrap_scheduler(link: Link) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    init, add_request = Scheduler.__init__, Scheduler.add_request
    schedule, free_request = Scheduler.schedule, Scheduler._free_request

    @functools.wraps(init)
    def initialising(self: Any, *args: Any, **kwargs: Any) -> None:
        from actds_writers.vllm.scheduler import SchedulerWitness

        init(self, *args, **kwargs)
        census = link.connect("census", "scheduler")
        block_size = int(getattr(self, "hash_block_size", None) or self.block_size)
        self._actds = SchedulerWitness(census, block_size)
        _closers.append(census.close)

    @functools.wraps(add_request)
    def adding(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._actds.arrived(request)
        return add_request(self, request, *args, **kwargs)

    @functools.wraps(schedule)
    def scheduling(self: Any, *args: Any, **kwargs: Any) -> Any:
        running = {request.request_id for request in self.running}
        output = schedule(self, *args, **kwargs)
        now = {request.request_id for request in self.running}
        preempted = tuple(r for r in running - now if r in self.requests)
        output._actds = self._actds.scheduled(self, output, preempted)
        return output

    @functools.wraps(free_request)
    def freeing(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._actds.finished(request)
        return free_request(self, request, *args, **kwargs)

    Scheduler.__init__, Scheduler.add_request = initialising, adding
    Scheduler.schedule, Scheduler._free_request = scheduling, freeing
