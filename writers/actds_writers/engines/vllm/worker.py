"""Witness B's eyes: in the worker, from the hooks' buffers to the stages.

After every forward it reads who the rows are, compares them with the schedule, and hands the step
over; what follows happens beside the engine.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch

from actds.errors import ActdsError
from actds.schema import DType
from actds_writers.capture import op as capture
from actds_writers.capture.check import NO_CHECK
from actds_writers.capture.directions import directions
from actds_writers.capture.stages import Stages, Step
from actds_writers.capture.streams import StreamForm
from actds_writers.capture.transfer import Mark
from actds_writers.engines.vllm.check import check_hooks
from actds_writers.engines.vllm.check_run import loaded_model
from actds_writers.engines.vllm.families import form_of
from actds_writers.engines.vllm.layouts import RowIdentity, identify
from actds_writers.engines.vllm.observe import observe
from actds_writers.ipc.link import Link
from actds_writers.ipc.messages import EVERYTHING, Fact, Failed, HookSpec, LeftOut
from actds_writers.sizing.needs import PADDING_ROWS

DTYPES: dict[str, DType] = {
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float32": "float32",
}


class WorkerCapture:
    """Captures in one worker: installs the hooks, then hands over each step.

    Args:
        worker: the vLLM worker, its model loaded and not yet compiled.
        link: where writer and census listen.

    Raises:
        ActdsError: E007 unknown layer, or a model class that nobody verified and no check;
            E012 a configuration that cannot be accounted for.
    """

    def __init__(self, worker: Any, link: Link) -> None:
        self._worker, self._link = worker, link
        self._numbers: dict[str, tuple[int, int]] = {}
        self._left_out: dict[str, LeftOut] = {}
        self._introduced = False
        self._began: Mark | None = None
        self._check_fact = NO_CHECK
        try:
            self._install(worker.model_runner)
        except ActdsError as error:
            with link.connect("writer", "worker") as writer:
                writer.send(Failed.of(error))
            raise

    def _install(self, runner: Any) -> None:
        link = self._link
        self._refuse(self._worker.vllm_config)
        model = loaded_model(runner)
        self._form = _form(model, link)
        d_model = int(runner.model_config.get_hidden_size())
        dtype = getattr(torch, link.store_dtype or DTYPES[str(runner.model_config.dtype)])
        self._hooks = tuple(
            HookSpec(f"{kind}.{layer}", kind, layer, d_model, DTYPES[str(dtype)])
            for kind, layer in link.hooks
        )
        self._max_rows = int(runner.max_num_tokens)
        self._device = runner.device
        self._buffers = capture.install(
            model,
            [hook.layer for hook in self._hooks],
            max_rows=self._max_rows + PADDING_ROWS,
            d_model=d_model,
            dtype=dtype,
            device=runner.device,
            form=self._form,
            directions=directions(link, len(self._hooks), d_model),
        )
        computed = DTYPES[str(runner.model_config.dtype)]
        stored = self._hooks[0].dtype
        self._cast = "none" if computed == stored else f"{computed} to {stored}, nearest even"
        self._stages = Stages(link, self._buffers, self._hooks, self._max_rows)

    def check(self) -> None:
        """Hold the hooks' rows of two short prompts against the model's own, before any request.

        Raises:
            ActdsError: E507 when they differ; E007 when nothing can tell and nobody verified the
                model class.
        """
        try:
            self._check_fact = check_hooks(
                self._worker, self._buffers, self._hooks, self._form
            ).fact()
        except ActdsError as error:
            self._stages.fail(error)
            raise

    def close(self) -> None:
        """End the links; the writer learns that nothing more comes."""
        self._stages.close()

    def drain(self, timeout_s: float) -> bool:
        """Wait until the writer has taken every step; return whether it has."""
        return self._stages.drain(timeout_s)

    def before_step(self) -> None:
        """Forget the counts of the step before; introduce the engine before the first one.

        Only now is the engine completely set up: cache sized, kernels chosen, graphs compiled.
        """
        self._buffers.reset()
        self._began = Mark(self._device, timed=True)
        if not self._introduced:
            self._introduced = True
            facts = observe(self._worker, self._link.client_pid)
            cast = Fact("capture.cast", self._cast, "observed")
            self._stages.introduce((*facts, cast, self._check_fact))

    def after_step(self, runner: Any, scheduled: Any, duration_ns: int) -> None:
        """Hand over the rows of the step that just ran.

        Raises:
            ActdsError: E501 when the rows differ from the schedule, E502 when the writer is gone.
        """
        mark = getattr(scheduled, "_actds", None)
        if mark is None:
            self._stop(-1, "a step without the scheduler's mark", "a marked step")
        self._learn(scheduled, mark)
        identity = identify(runner, scheduled)
        self._compare(mark.step, identity, scheduled)
        rows = [
            (*self._numbers[request], count, self._left_out.get(request, EVERYTHING))
            for request, count in zip(identity.request_ids, identity.n_rows.tolist(), strict=True)
            if count
        ]
        numbers, prompt_lens, n_rows, left_out = zip(*rows, strict=True)
        step = Step(
            step=mark.step,
            requests=np.array(numbers, np.int64),
            n_rows=np.array(n_rows, np.int64),
            prompt_lens=np.array(prompt_lens, np.int64),
            left_out=left_out if self._left_out else (),
            finished=mark.finished,
            duration_ns=duration_ns,
            kernel_mode=_kernel_mode(runner),
            began=self._began,
        )
        self._stages.hand_over(step, identity.token_ids, identity.positions)

    def _learn(self, scheduled: Any, mark: Any) -> None:
        """Keep number, prompt length and rules of requests that are new to this worker."""
        for request in scheduled.finished_req_ids:
            self._numbers.pop(request, None)
            self._left_out.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            self._numbers[new.req_id] = (mark.numbers[new.req_id], int(new.prompt_len))
        self._left_out.update(mark.left_out)

    def _compare(self, step: int, identity: RowIdentity, scheduled: Any) -> None:
        """Stop unless the identity covers every scheduled row, and no other."""
        n = scheduled.total_num_scheduled_tokens
        wanted = {r: c for r, c in scheduled.num_scheduled_tokens.items() if c}
        got = {r: int(c) for r, c in zip(identity.request_ids, identity.n_rows, strict=True) if c}
        if wanted != got or len(identity.positions) != n:
            self._stop(step, f"{sum(got.values())} identified rows", f"{n} scheduled rows")

    def _stop(self, step: int, got: str, expected: str) -> NoReturn:
        error = ActdsError("E501", f"step {step}", got=got, expected=expected)
        self._stages.fail(error)
        raise error

    @staticmethod
    def _refuse(config: Any) -> None:
        parallel = config.parallel_config
        refused = {
            "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
            "data_parallel_size": parallel.data_parallel_size > 1,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "speculative_config": config.speculative_config is not None,
            "kv_transfer_config": config.kv_transfer_config is not None,
            "enable_lora": config.lora_config is not None,
        }
        for option, present in refused.items():
            if present:
                raise ActdsError(
                    "E012", f"engine option {option}", got="in use", expected="not in use"
                )


def _form(model: torch.nn.Module, link: Link) -> StreamForm:
    """Return where the stream is in what the model's layers return.

    Raises:
        ActdsError: E007 when nobody verified the model class and the check is off.
    """
    name = type(model).__name__
    form = form_of(name)
    if form == "unverified" and not link.check:
        raise ActdsError(
            "E007",
            name,
            got="a model class that was never verified, and no check",
            expected="a class of docs/families.md, or the check of the hooks",
            next_step="Leave --check on, or harvest with --writer transformers.",
        )
    return form


def _kernel_mode(runner: Any) -> str:
    """Return how the kernels of the step ran."""
    config = runner.vllm_config
    state = getattr(runner, "execute_model_state", None)
    stats = getattr(state, "cudagraph_stats", None)
    if stats is not None and str(getattr(stats, "runtime_mode", "NONE")) != "NONE":
        return "cudagraph"
    compiled = (
        int(config.compilation_config.mode or 0) > 0 and not config.model_config.enforce_eager
    )
    return "compiled" if compiled else "eager"
