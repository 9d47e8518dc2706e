"""Decode steps of a vLLM engine, timed with and without probes.

    python benchmarks/probe_timing.py < SESSION

runs one engine in a process of its own and reports the median step of each round. Packed probes are
those of ``actds write --probes``: the capture op, the readouts' lane, and a writer that stores rows
and scores. An eager engine has all arms at once, and hooks are put in and taken out between rounds,
so that every arm has the same engine. A compiled one has the probes in its graph: there each arm of
each round is an engine of its own, and naive hooks, which no graph calls, have an eager one.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from probe_cost import RING_MIB, SHARD_NBYTES, Arm, Timed, Timing, TimingTask

from actds.errors import ActdsError
from actds_writers.capture.hooks import plan_readouts
from actds_writers.capture.op import find_taps, watch_tap
from actds_writers.capture.taps import StreamForm, Tap
from actds_writers.config import WriterSettings, WriteSettings
from actds_writers.engine_protocol import OPTION, refused
from actds_writers.engines.vllm import VLLM, VllmEngine, plugin
from actds_writers.engines.vllm.check import check_hooks
from actds_writers.engines.vllm.options import DRAFTS, VERIFIED, VllmOptions
from actds_writers.engines.vllm.runner import Dispatch, loaded_model
from actds_writers.engines.vllm.worker import WorkerCapture
from actds_writers.harvest.prepare import Plan, hold, make_plan
from actds_writers.harvest.processes import Pipeline
from actds_writers.ipc.link import Link
from actds_writers.sizing import Geometry, rows_per_shard

PROMPT_TOKENS, N_STEPS, N_UNTIMED = 16, 16, 4
"""Of a request: the prompt, the generated tokens, and how many of their steps are not timed: the
first is prefill's, and the last ones end requests."""
MAX_STEP_TOKENS = 512
DRAIN_TIMEOUT_S = 60.0
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@dataclass(frozen=True)
class Session:
    """What one engine times.

    Args:
        eager: whether arms are put in and taken out; else there is one, in the graph.
        first_round: number of its first round.
    """

    task: TimingTask
    eager: bool
    first_round: int = 0


def with_step_options(task: TimingTask) -> TimingTask:
    """Return the task with the options that the timing needs where the user's say nothing.

    Raises E009 or E012 for an option with which steps cannot be timed.
    """
    given = dict(task.engine_args)
    longest = max(task.batches)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"):
        if given.get(name) not in (None, 1):
            got, expected = f"{given[name]}: the steps of one worker are timed", "1"
            raise refused(f"{OPTION} {name}", got, expected)
    if any(given.get(name) for name in DRAFTS):
        got = "drafts, with which a step is no token"
        raise refused(f"{OPTION} speculative_config", got, "no such option")
    for name, least, words in (
        ("max_num_seqs", longest, f"at least {longest}, the largest batch"),
        ("max_model_len", PROMPT_TOKENS + N_STEPS, f"at least {PROMPT_TOKENS + N_STEPS}"),
    ):
        value = given.get(name)
        if isinstance(value, int) and value < least:
            raise ActdsError("E009", f"{OPTION} {name}", got=str(value), expected=words)
    usual = {
        "max_num_seqs": longest,
        "max_model_len": 8 * (-(-(PROMPT_TOKENS + N_STEPS) // 8)),
        "max_num_batched_tokens": max(MAX_STEP_TOKENS, longest * PROMPT_TOKENS),
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
    }
    sampling = {**given.get("sampling_params", {}), "ignore_eos": True}
    return replace(task, engine_args={**usual, **given, "sampling_params": sampling})


def worker_of(engine_core: Any) -> Any:
    return engine_core.model_executor.driver_worker.worker


def time_probes(task: TimingTask, progress: Callable[[str], None]) -> Timing:
    """Return the decode steps of every arm, batch and round.

    Raises E009 or E012 for an option with which steps cannot be timed, E504 for an engine that does
    not start or dies.
    """
    task = with_step_options(task)
    VLLM.checked(task.engine_args)
    timed: list[Timed] = []
    facts: dict[str, str] = {}
    for session in sessions(task):
        beside = session.eager and not task.is_eager  # for naive hooks
        if not session.eager:
            (arm,) = session.task.arms
            progress(f"round {session.first_round + 1}: an engine for {arm.way} {arm.n_probes}")
        for message in _run(session):
            if isinstance(message, Timed):
                timed.append(message)
            elif isinstance(message, str):
                progress(message)
            elif not beside:
                facts = message
    return Timing(tuple(timed), facts)


def sessions(task: TimingTask) -> Iterator[Session]:
    if task.is_eager:
        yield Session(task, eager=True)
        return
    naive = tuple(arm for arm in task.arms if arm.way == "naive")
    separate: list[tuple[Arm, ...]] = [(arm,) for arm in task.arms if arm.way != "naive"]
    eager_args = {**task.engine_args, "enforce_eager": True}
    for number in range(task.n_rounds):
        order = [*separate, naive] if naive else list(separate)
        random.Random(number).shuffle(order)
        for arms in order:
            part = replace(task, arms=arms, n_rounds=1)
            if arms is naive:
                yield Session(replace(part, engine_args=eager_args), True, number)
            else:
                yield Session(part, False, number)


def _run(session: Session) -> Iterator[Any]:
    """Yield what the process of a session reports."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        pickle.dump(session, process.stdin)
        process.stdin.close()
        while True:
            try:
                message = pickle.load(process.stdout)
            except (EOFError, pickle.UnpicklingError):
                break
            if isinstance(message, ActdsError):
                raise message
            yield message
        code = process.wait()
        if code:
            got = f"a process that ended with code {code}"
            raise ActdsError("E504", "engine", got=got, expected="timed steps")
    finally:
        process.stdout.close()
        if process.poll() is None:
            process.terminate()
            process.wait()


class _Bench:
    """One engine and the harvests that can follow it."""

    def __init__(self, session: Session, stack: ExitStack) -> None:
        self._task, self._harvests = session.task, ExitStack()
        stack.callback(self._harvests.close)
        self._pipelines: dict[Arm, Pipeline] = {}
        self._sides: dict[Arm, tuple[Any, Any]] = {}
        self._states: dict[Arm, ModelState] = {}
        self._options = VllmOptions.model_validate(dict(session.task.engine_args))
        link = None
        self._plan: Plan | None = None
        if not session.eager:
            (arm,) = session.task.arms
            if arm.way == "packed":
                link = self._pipeline(arm).link
        self.engine = VllmEngine(
            session.task.model, self._options, link, temperature=0.0, seed=session.task.seed
        )
        stack.callback(self._end)
        self.core: Any = self.engine._engine.engine_core.engine_core
        runner = worker_of(self.core).model_runner
        self._dispatch = Dispatch(runner, loaded_model(runner))
        if session.eager:
            self._install()

    def put_in(self, arm: Arm) -> None:
        if arm in self._states:
            self._states[arm].restore()
            _hand_to(self.core, self._sides.get(arm, (None, None)))

    def step_seconds(self, arm: Arm, batch: int, key: str) -> tuple[float, float]:
        """Serve a batch of requests; return the medians of its decode steps: wall and CPU."""
        rng = random.Random(key)
        vocabulary = int(self.engine._engine.model_config.get_vocab_size())
        for i in range(batch):
            ids = [rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
            self.engine.add(f"{key}-{i}", ids, N_STEPS)
        n_ended = 0
        while not self._decodes(batch):
            n_ended += len(self.engine.step())
        wall, cpu = [], []
        for _ in range(N_STEPS - N_UNTIMED):
            began, worked = time.perf_counter(), time.process_time()
            n_ended += len(self.engine.step())
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - worked)
        if n_ended:
            got = f"{n_ended} of {batch} requests ended early"
            raise ActdsError("E504", "engine", got=got, expected=f"{N_STEPS} tokens of each")
        while n_ended < batch:
            n_ended += len(self.engine.step())
        self._drain(arm)
        return statistics.median(wall), statistics.median(cpu)

    def facts(self) -> dict[str, str]:
        import vllm

        runner = worker_of(self.core).model_runner
        device = runner.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        compilation = runner.vllm_config.compilation_config
        graphs = getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode)
        return {
            "engine": f"vllm {vllm.__version__}, torch {torch.__version__}",
            "device": name,
            "mode": self._dispatch.mode or "unknown kernels",
            "cudagraphs": str(graphs) if device.type == "cuda" else "none",
            "dtype": str(runner.model_config.dtype).removeprefix("torch."),
            "threads": str(torch.get_num_threads()),
            "positions": f"{PROMPT_TOKENS + 1} to {PROMPT_TOKENS + N_STEPS}",
            "cores": str(len(os.sched_getaffinity(0))),
        }

    def _decodes(self, batch: int) -> bool:
        running = self.core.scheduler.running
        return len(running) == batch and all(
            request.num_computed_tokens >= request.num_prompt_tokens for request in running
        )

    def _install(self) -> None:
        worker = worker_of(self.core)
        model = loaded_model(worker.model_runner)
        alone = ModelState.of(model)
        form: StreamForm = VERIFIED.get(type(model).__name__, "unverified")
        is_checked = False
        for arm in self._task.arms:
            if arm.way == "packed":
                capture, side = _follow(self.core, self._pipeline(arm).link)
                self._sides[arm] = (capture, side)
                if not is_checked:
                    capture.check(
                        lambda capture=capture: check_hooks(
                            worker, capture.buffers, capture.hooks, capture.form
                        )
                    )
                    is_checked = True
            elif arm.way == "naive":
                add_naive(
                    find_taps(model, self._task.hooks, form),
                    _probes(self._task, arm.n_probes),
                    worker.model_runner.device,
                )
            self._states[arm] = ModelState.of(model)
            alone.restore()
        _hand_to(self.core, (None, None))

    def _pipeline(self, arm: Arm) -> Pipeline:
        out = self._task.folder / f"acts-{arm.n_probes}-{time.monotonic_ns()}"
        places = ";".join(f"{hook.kind}:{hook.layer}" for hook in self._task.hooks)
        prompt = self._task.folder / "prompt.txt"
        prompt.write_text("probes\n", encoding="utf-8")
        row_nbytes = Geometry.of(self._task.hooks).row_nbytes
        settings = WriteSettings(
            out=str(out),
            model=self._task.model,
            prompts=str(prompt),
            hooks=places,
            max_tokens=1,
            ring_mib=RING_MIB,
            staging_mib=8,
            rows_per_shard=max(1, min(rows_per_shard(row_nbytes), SHARD_NBYTES // row_nbytes)),
        )
        if self._plan is None:
            self._plan = make_plan(settings, self._options)
        plan = self._plan
        if arm.n_probes:
            file = self._task.folder / f"probes-{arm.n_probes}.npy"
            np.save(file, _probes(self._task, arm.n_probes))
            readouts, probes = plan_readouts(settings.seed, file, self._task.hooks)
            plan = replace(plan, readouts=readouts.as_field(), probes=probes)
        writer = WriterSettings(
            harvest=settings,
            facts=plan.facts,
            tokens=plan.tokens,
            rows_per_shard=plan.rows_per_shard,
            n_threads=1,
            readouts=plan.readouts,
        )
        lock = hold(out)
        pipeline = Pipeline(writer, plan.hooks, os.getpid(), lock, files={"probes": plan.probes})
        self._harvests.enter_context(pipeline)
        pipeline.connect()
        self._pipelines[arm] = pipeline
        return pipeline

    def _drain(self, arm: Arm) -> None:
        """Wait until the writer of an arm has nothing to do, so that no other arm pays for it."""
        pipeline = self._pipelines.get(arm)
        if pipeline is None:
            return
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        side = self.core.scheduler._actds
        while time.monotonic() < deadline:
            pipeline.poll()
            written = pipeline.written
            if pipeline.has_reached(side.last_step) and written and not written.backlog_nbytes:
                return
            time.sleep(0.01)

    def _end(self) -> None:
        self.engine.shutdown()
        for pipeline in self._pipelines.values():
            pipeline.finish("finished")


def _follow(engine_core: Any, link: Link) -> tuple[Any, Any]:
    """Hook the model of an engine that is up, eager and in this process; return both sides.

    Of several harvests that follow one engine, ``_hand_to`` says whose its requests are.
    """
    plugin._attach(link)
    capture = WorkerCapture(worker_of(engine_core), link)
    plugin._closers.append(capture.close)
    capture.is_set_up = True
    return capture, plugin._scheduler_side(engine_core.scheduler, link)


def _hand_to(engine_core: Any, sides: tuple[Any, Any]) -> None:
    """Let both sides of a harvest, or twice ``None``, account for an engine without requests."""
    worker_of(engine_core)._actds, engine_core.scheduler._actds = sides


class ModelState:
    """The hooks of a model's modules, and what capture has set on them."""

    def __init__(self, modules: dict[torch.nn.Module, dict[str, Any]]) -> None:
        self._found = modules

    @classmethod
    def of(cls, model: torch.nn.Module) -> ModelState:
        return cls(
            {
                module: {
                    name: copy.copy(value) if name in _HOOKS else value
                    for name, value in vars(module).items()
                    if name in _HOOKS or _is_ours(name)
                }
                for module in model.modules()
            }
        )

    def restore(self) -> None:
        for module, attributes in self._found.items():
            now = vars(module)
            for name in [name for name in now if _is_ours(name) and name not in attributes]:
                del now[name]
            for name, value in attributes.items():
                if name in _HOOKS:
                    now[name].clear()
                    now[name].update(value)
                else:
                    now[name] = value


def _is_ours(name: str) -> bool:
    return name == "forward" or name.startswith("_actds_")


def add_naive(taps: Sequence[Tap], probes: np.ndarray, device: torch.device) -> list[list[Any]]:
    """Hook as one does in a notebook: a product and a copy to the host for each probe.

    Args:
        probes: float32 ``(n_hooks, n_probes, d_model)``.

    Returns the scores of the last forward, by hook: ``n_probes`` tensors ``(n_rows,)`` each.
    """
    scores: list[list[Any]] = [[] for _ in taps]
    for tap, directions, of_tap in zip(
        taps, torch.from_numpy(probes).to(device), scores, strict=True
    ):
        vectors = list(directions)

        def hook(
            _module: Any,
            args: Any,
            kwargs: Any,
            output: Any = None,
            *,
            tap: Tap = tap,
            vectors: list[torch.Tensor] = vectors,
            of_tap: list[Any] = of_tap,
        ) -> None:
            hidden, residual = tap.read(args, kwargs, output)
            rows = (hidden if residual is None else hidden + residual).float()
            of_tap[:] = [(rows @ vector).cpu() for vector in vectors]

        watch_tap(tap, hook)
    return scores


def _probes(task: TimingTask, n_probes: int) -> np.ndarray:
    """Return random probes, float32 ``(n_hooks, n_probes, d_model)``; those of more begin alike."""
    width = {hook.d_model for hook in task.hooks}.pop()
    rng = np.random.default_rng(task.seed)
    shape = (n_probes, len(task.hooks), width)
    return np.ascontiguousarray(rng.standard_normal(shape, dtype=np.float32).transpose(1, 0, 2))


def _timed(session: Session) -> Iterator[Any]:
    task = session.task
    with ExitStack() as stack:
        bench = _Bench(session, stack)
        for number in range(-1, task.n_rounds):  # the first one warms up
            began = time.monotonic()
            batches = task.batches if number >= 0 else task.batches[:1]
            order = list(itertools.product(batches, task.arms))
            random.Random(f"{task.seed} {session.first_round} {number}").shuffle(order)
            order.sort(key=lambda pair: pair[0])
            for batch, arm in order:
                bench.put_in(arm)
                key = f"{arm.way}-{arm.n_probes}-{number}-{batch}"
                wall, cpu = bench.step_seconds(arm, batch, key)
                if number >= 0:
                    yield Timed(arm, batch, session.first_round + number, wall, cpu)
            if session.eager and number >= 0:
                spent = time.monotonic() - began
                yield f"round {session.first_round + number + 1}: {spent:.0f} s"
        yield bench.facts()  # the check of the hooks ran eager: only now by a step that was timed
        bench.put_in(Arm("none"))


def main() -> None:
    """Run the session on standard input; report on standard output."""
    session = pickle.load(sys.stdin.buffer)
    assert isinstance(session, Session)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what engines print
        try:
            for message in _timed(session):
                pickle.dump(message, out)
                out.flush()
        except ActdsError as error:
            pickle.dump(error, out)


if __name__ == "__main__":
    from probe_timing import main as run  # the module whose Session was pickled

    run()
