"""The worker side of the account in vLLM, and the readers of a worker's facts.

After every forward it compares the rows with the schedule, and hands the step over.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actds.errors import ActdsError
from actds.format import canonical, tables
from actds.version import __version__
from actds_writers.capture.attending import attention_hooks
from actds_writers.capture.hooks import find_kind, raise_all
from actds_writers.capture.op import Reading, install
from actds_writers.capture.stages import Step
from actds_writers.capture.taps import ModelConfig, StreamForm
from actds_writers.engine_protocol import refused
from actds_writers.engines.account import (
    Room,
    WorkerSide,
    layer_config,
    reporting_failure,
    specs_of,
)
from actds_writers.engines.vllm.options import VERIFIED, installed, is_verified, refuse_options
from actds_writers.engines.vllm.requests import LoadErrors
from actds_writers.engines.vllm.runner import (
    Dispatch,
    RowIdentity,
    identify,
    loaded_model,
    stage_layers,
    stage_of,
    watch,
    whole,
)
from actds_writers.engines.vllm.steering import Steering
from actds_writers.engines.vllm.weights import WeightsSample
from actds_writers.ipc.link import Link
from actds_writers.ipc.messages import Fact
from actds_writers.model_folder import ModelFiles, local_folder_of, model_name, weights_sample
from actds_writers.provenance import Readers, batch_invariant, engine_facts, in_words
from actds_writers.sampling import EVERYTHING, LeftOut
from actds_writers.sizing import PADDING_ROWS

STARTUP_PLAN = "VLLM_ENABLE_STARTUP_PLAN"
_ADAPTIVE = "enable_adaptive_verification"


class WorkerCapture(WorkerSide):
    """The worker side: captures in one vLLM worker, the hooks of its pipeline stage.

    Its model is loaded and not yet compiled. Raises E007 unknown layer, or a model class that is
    not verified, without check; E012 a configuration that cannot be accounted for.
    """

    def __init__(self, worker: Any, link: Link) -> None:
        self._worker = worker
        self._prompt_lens: dict[str, int] = {}
        self._weights: str | None = None
        self.sample: WeightsSample | None = None
        """Of the weights that the run's steps compute with, where the engine core looks at them."""
        self._left_out: dict[str, LeftOut] = {}
        self.is_set_up = False
        self._loads: LoadErrors | None = None
        self._reads_logits = link.settings.entropy
        self._reading: Reading | None = None
        self._awaits_logits = False
        self._sampling: tuple[int, list[int]] | None = None
        """The step to sample from, and the request of each row of logits, -1 for one left out."""
        runner = worker.model_runner
        with reporting_failure(link):
            self.refuse(worker.vllm_config)
            design = link.settings.design(link.run)
            if worker.vllm_config.speculative_config and design and design.reads_sampled:
                # A draft is computed in the step that computes the logits which it is judged by.
                raise refused("keep", "a rule for sampled tokens, and drafts", "one or the other")
            if link.settings.attention is not None:
                _refuse_looks(worker.vllm_config)
            model = loaded_model(runner)
            self._dispatch = Dispatch(runner, model)
            self.form = _form(model, link)
            ranks = int(worker.vllm_config.parallel_config.tensor_parallel_size)
            require_kinds(type(model).__name__, link, ranks)
            super().__init__(
                model,
                link,
                config=_hook_config(runner),
                computed=runner.model_config.dtype,
                device=runner.device,
                max_rows=int(runner.max_num_tokens),
                padding=PADDING_ROWS,
                in_flight=int(worker.vllm_config.max_concurrent_batches),
                form=self.form,
                stage=stage_of(worker),
                layers=stage_layers(worker, model),
                gather=whole if ranks > 1 else None,
                room=functools.partial(room_beside, worker),
                folder=model_files(runner.model_config).weights,
            )

    def watch_logits(self, call: Callable[..., None]) -> None:
        """Read the logits of every step, if entropies are recorded; raises as ``watch``.

        Args:
            call: calls a method of this object, and knows what to do when it fails.
        """
        if self._reads_logits:
            runner = self._worker.model_runner
            with reporting_failure(self.link):
                watch(
                    runner,
                    loaded_model(runner),
                    functools.partial(call, self._read_logits),
                    functools.partial(call, self._read_tokens),
                )

    def _read_logits(self, logits: torch.Tensor) -> None:
        if self._awaits_logits:
            # Those of prompts, which a request may ask for, are computed after these.
            self._awaits_logits, self._reading = False, Reading.of(logits)

    def _read_tokens(self, token_ids: torch.Tensor) -> None:
        if self._sampling is None or self._reading is None:
            return
        (step, numbers), reading = self._sampling, self._reading
        self._sampling = self._reading = None
        self.add_sampled(step, numbers, reading, token_ids.flatten())

    def before_step(self) -> None:
        """Reset the row counts; before the first step, send the engine's facts.

        Only now the engine is completely set up: cache sized, kernels chosen, graphs compiled.
        """
        super().before_step()
        self._dispatch.forget()
        self._awaits_logits, self._reading, self._sampling = self._reads_logits, None, None
        weights = (Fact("model.parameters_sha256", self._weights, "observed"),)
        self.introduce(
            lambda: (*observe(self._worker, self.link), *(weights if self._weights else ()))
        )
        if self._loads is None:
            self._loads = LoadErrors()

    def settle_steps(self, scheduled: Any) -> None:
        """Release the steps whose results the scheduler took before it scheduled this one."""
        mark = getattr(scheduled, "_actds", None)
        self._weights = mark.weights if mark is not None else None
        self._settle(mark.settled if mark is not None else ())

    def _settle(self, steps: Sequence[Any]) -> None:
        for settled in steps:
            if self._reads_logits and not self.stages.is_sampled(settled.step):
                self.stop(settled.step, "no logits", "those that were sampled from")
            self.stages.settle(settled.step, settled.n_cut)

    def end_run(self, settled: Sequence[Any], link: Link, timeout_s: float) -> None:
        self._settle(settled)
        self.change_run(link, timeout_s)
        self._left_out.clear()
        self._sampling = self._reading = None

    def after_step(self, runner: Any, scheduled: Any, duration_ns: int) -> None:
        mark = getattr(scheduled, "_actds", None)
        if mark is None:
            self.stop(-1, "a step without the scheduler's mark", "a marked step")
        self._learn(scheduled, mark)
        identity = identify(runner, scheduled)
        self._compare(mark.step, identity, scheduled)
        rows = [
            (
                mark.numbers[request],
                self._prompt_lens[request],
                count,
                self._left_out.get(request, EVERYTHING),
            )
            for request, count in zip(identity.request_ids, identity.n_rows.tolist(), strict=True)
            if count
        ]
        *columns, left_out = zip(*rows, strict=True)
        numbers, prompt_lens, n_rows = (np.array(column, np.int64) for column in columns)
        wanted = zip(columns[0], left_out, strict=True)
        self._sampling = mark.step, [n if out.decode is None else -1 for n, out in wanted]
        failed = self._loads is not None and self._loads.touch(scheduled)
        step = Step(
            mark.step,
            numbers,
            n_rows,
            prompt_lens,
            left_out if self._left_out else (),
            mark.finished,
            duration_ns,
            self._dispatch.mode,
            interventions=None if self.edits is None else self.edits.marks,
            lost=tables.FAILED_LOAD if failed else mark.lost,
        )
        changed = self.sample.changed() if self.sample is not None else None
        self.hand_over(step, identity.token_ids, identity.positions, waits=True, changed=changed)

    def _learn(self, scheduled: Any, mark: Any) -> None:
        for request in scheduled.finished_req_ids:
            self._prompt_lens.pop(request, None)
            self._left_out.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            n_prompt = getattr(new, "prompt_len", None)  # since 0.29
            if n_prompt is None:
                n_prompt = len(new.prompt_token_ids or ())
            self._prompt_lens[new.req_id] = int(n_prompt)
        self._left_out.update(mark.left_out)
        for number, regime in mark.regimes.items():
            self.learn(number, regime)

    def _compare(self, step: int, identity: RowIdentity, scheduled: Any) -> None:
        n = scheduled.total_num_scheduled_tokens
        wanted = {r: c for r, c in scheduled.num_scheduled_tokens.items() if c}
        got = {r: int(c) for r, c in zip(identity.request_ids, identity.n_rows, strict=True) if c}
        if wanted != got or len(identity.positions) != n:
            self.stop(step, f"{sum(got.values())} identified rows", f"{n} scheduled rows")

    @staticmethod
    def refuse(config: Any) -> None:
        drafts = config.speculative_config
        refuse_options({"speculative_config": getattr(drafts, "method", None)})
        passes = config.compilation_config.pass_config
        in_use = {
            # The device alone knows how many drafts of which request are in a step.
            f"speculative_config.{_ADAPTIVE}": bool(getattr(drafts, _ADAPTIVE, False)),
            # Sequence parallelism, until 0.31: each rank has the residual stream of some rows.
            "compilation_config.pass_config.enable_sp": bool(getattr(passes, "enable_sp", False)),
            # The size of a KV cache that was measured without capture leaves no room for it.
            STARTUP_PLAN: os.environ.get(STARTUP_PLAN, "0") != "0",
        }
        for option, present in in_use.items():
            if present:
                raise refused(f"engine option {option}", "in use", "not in use")


def room_beside(worker: Any, free: int) -> Room:
    """Return what vLLM leaves to capture of the free bytes of a GPU, its weights loaded.

    Its KV cache is not there yet: of a given size, or what is left of a share of the GPU, of which
    capture must leave something.
    """
    cache = worker.vllm_config.cache_config
    if kv_cache := cache.kv_cache_memory_bytes:
        option = f"kv_cache_memory_bytes={kv_cache}"
        return Room(free - int(kv_cache), option, "lower kv_cache_memory_bytes")
    snapshot = getattr(worker, "init_snapshot", None)
    if snapshot is None:
        return Room(free)
    left = int(worker.requested_memory) - (int(snapshot.free_memory) - free)
    if left >= free:
        return Room(free)
    share = f"{1 - cache.gpu_memory_utilization:.0%}"
    option = f"the {share} that gpu_memory_utilization={cache.gpu_memory_utilization:g} leaves"
    return Room(left, option, "raise gpu_memory_utilization")


def _form(model: torch.nn.Module, link: Link) -> StreamForm:
    """Return where the stream is in the model's layers; E007 if neither table nor check says so."""
    name = type(model).__name__
    form = VERIFIED.get(name, "unverified")
    if form == "unverified" and not link.settings.check:
        raise ActdsError(
            "E007",
            name,
            got="a model class that was never verified, and the check is off",
            expected="a verified class, or the check of the hooks",
            next_step='Leave check=True, or harvest with engine="transformers".',
        )
    return form


def _refuse_looks(config: Any) -> None:
    """Refuse, with E012, steps whose attention cannot be followed."""
    if config.parallel_config.pipeline_parallel_size > 1:
        raise refused("attention", "attention, and pipeline stages", "one or the other")
    if config.speculative_config is not None:
        raise refused("attention", "attention, and drafts", "one or the other")


def require_kinds(model: str, link: Link, ranks: int) -> None:
    """Refuse, without the check, hooks that nobody verified; raises E007."""
    if link.settings.check:
        return
    got = "a kind that was never verified in this model class, and the check is off"
    expected = "a verified kind, or the check of the hooks"
    raise_all(
        [
            ActdsError("E007", f"{kind}:{layer}", got=got, expected=expected)
            for kind, layer in link.hooks
            if not is_verified(model, kind, ranks)
        ]
    )


def steer(worker: Any, link: Link) -> Steering | None:
    """Install the interventions of a harvest on one rank, behind its hooks; ``None`` for none.

    Raises:
        ActdsError: as ``Steering``; E012 what else a step may be computed from.
    """
    if link.interventions_path is None:
        return None
    runner, config = worker.model_runner, worker.vllm_config
    model = loaded_model(runner)
    with reporting_failure(link):
        for option in ("speculative_config", "kv_transfer_config"):
            if getattr(config, option, None) is not None:
                # A draft model is not changed, and who stores KV elsewhere keys it by the tokens.
                got = f"interventions, and {option}"
                raise refused("intervene", got, "one or the other")
        return Steering(
            worker,
            link,
            model=model,
            config=_hook_config(runner),
            computed=runner.model_config.dtype,
            device=runner.device,
            max_rows=int(runner.max_num_tokens) + PADDING_ROWS,
            form=_form(model, link),
            layers=stage_layers(worker, model),
        )


def give_heads(worker: Any, link: Link) -> None:
    """Let a rank that captures nothing give the heads of its hooks to the one that captures."""
    runner = worker.model_runner
    model = loaded_model(runner)
    layers = stage_layers(worker, model)
    hooks = [
        hook
        for hook in specs_of(link, _hook_config(runner), runner.model_config.dtype)
        if find_kind(hook.kind).split_by_rank and (layers is None or hook.layer in layers)
    ]
    if hooks:
        # A gather whose result nobody reads is traced away, and the other ranks wait for it.
        form = _form(model, link)
        install(model, hooks, max_rows=1, device=runner.device, form=form, gather=whole)
    attending = link.settings.attending(link.run)
    if attending is not None:
        computed = str(runner.model_config.dtype).removeprefix("torch.")
        looked = attention_hooks(attending.layers, _hook_config(runner), computed)
        form, start = _form(model, link), len(hooks)
        place = {"max_rows": 1, "device": runner.device, "form": form}
        install(model, looked, **place, gather=whole, start=start)


def _hook_config(runner: Any) -> ModelConfig:
    config = runner.model_config
    text = config.hf_text_config
    return layer_config(text, int(config.get_hidden_size()), int(text.num_hidden_layers))


def observe(worker: Any, link: Link) -> tuple[Fact, ...]:
    runner, config = worker.model_runner, worker.vllm_config
    readers: Readers = {
        **_engine(runner, config),
        **_model(runner, config),
        **_numerics(runner, config),
        **_serving(config, link.replica),
    }
    return engine_facts(
        readers,
        model=loaded_model(runner),
        folder=model_files(config.model_config).config,
        device=runner.device,
        client_pid=link.client_pid,
    )


def agreed(worker: Any) -> dict[str, str]:
    """Return what all ranks of one engine have to have alike, as far as it is known by now."""
    runner, config = worker.model_runner, worker.vllm_config
    readers = {**_numerics(runner, config), **_model(runner, config), **_serving(config, (0, 1))}
    del readers["model.name"]
    drafts = getattr(config.speculative_config, "num_speculative_tokens", 0)
    # Every rank samples for itself: with another seed, other tokens than the first.
    readers |= {"seed": lambda: config.model_config.seed, "speculative tokens": lambda: drafts}
    values = {"vllm": installed(), "actds": __version__}
    for name, read in readers.items():
        with contextlib.suppress(Exception):  # not known before the model is loaded
            values[name] = str(read())
    folder = model_files(config.model_config).weights
    return {**values, "weights": weights_sample(folder) if folder.is_dir() else "unknown"}


def model_files(model: Any) -> ModelFiles:
    """Return the folders of the files of a ``ModelConfig``, as far as they are on this machine."""
    weights = local_folder_of(str(model.model), model.revision)
    config = weights
    if model.hf_config_path:
        config = local_folder_of(str(model.hf_config_path))
    tokenizer = local_folder_of(str(model.tokenizer), model.tokenizer_revision)
    generation = config
    if model.generation_config not in ("auto", "vllm"):
        generation = local_folder_of(str(model.generation_config))
    return ModelFiles(weights, config, tokenizer, generation)


def _engine(runner: Any, config: Any) -> Readers:
    def place(kind: type) -> str:
        return f"{kind.__module__}.{kind.__qualname__}"

    return {
        "engine.name": lambda: "vllm",
        "engine.version": installed,
        "engine.runner": lambda: place(type(runner)),
        "engine.scheduler": lambda: place(config.scheduler_config.get_scheduler_cls()),
    }


def _model(runner: Any, config: Any) -> Readers:
    model = config.model_config

    def overrides() -> str:
        given = model.hf_overrides
        return canonical.dump(in_words(given)).decode().strip() if given else "none"

    def name() -> str:
        # By default it is served under its path, which stays when other weights are loaded.
        served = str(model.served_model_name)
        return model_name(model.model, None if Path(served).is_dir() else served)

    return {
        "model.name": name,
        "model.hf_overrides": overrides,
        "tokenizer.mode": lambda: str(model.tokenizer_mode),
        "model.d_model": lambda: int(runner.model_config.get_hidden_size()),
        "model.quantization": lambda: str(config.model_config.quantization or "none"),
        "model.load_format": lambda: str(config.load_config.load_format),
    }


def _numerics(runner: Any, config: Any) -> Readers:
    def attention() -> str:
        for layer in config.compilation_config.static_forward_context.values():
            backend = getattr(layer, "attn_backend", None)
            if backend is not None:
                return str(backend.get_name())
        raise AttributeError("no attention layer in the forward context")

    def kv_dtype() -> str:
        declared = str(config.cache_config.cache_dtype)
        return str(runner.kv_cache_dtype) if declared == "auto" else declared

    def all_reduce() -> str:
        from vllm.distributed.parallel_state import get_tp_group

        ranks = get_tp_group()
        if ranks.world_size == 1:
            return "none"
        communicator = ranks.device_communicator
        custom = getattr(communicator, "ca_comm", None)
        kind = "custom kernel" if custom is not None and not custom.disabled else "library"
        return f"{kind} ({type(communicator).__name__})"

    def split_kv() -> bool:
        from vllm import envs

        return bool(envs.VLLM_CPU_ATTN_SPLIT_KV)

    def passes() -> str:
        compilation = config.compilation_config
        if getattr(compilation.mode, "name", "NONE") != "VLLM_COMPILE":
            return "none"
        on = [name for name, value in vars(compilation.pass_config).items() if value is True]
        return ", ".join(sorted(on)) or "none"

    readers: Readers = {
        "numerics.dtype": lambda: str(runner.model_config.dtype).removeprefix("torch."),
        "numerics.kv_cache_dtype": lambda: kv_dtype().removeprefix("torch."),
        "numerics.attention_backend": attention,
        "numerics.batch_invariant": batch_invariant,
        "numerics.all_reduce": all_reduce,
        "numerics.compiler_passes": passes,
    }
    return {**readers, "numerics.split_kv": split_kv} if runner.device.type == "cpu" else readers


def _serving(config: Any, replica: tuple[int, int]) -> Readers:
    cache, scheduler = config.cache_config, config.scheduler_config
    parallel, compilation = config.parallel_config, config.compilation_config
    speculative, transfer = config.speculative_config, config.kv_transfer_config
    return {
        "serving.enforce_eager": lambda: bool(config.model_config.enforce_eager),
        "serving.compilation_mode": lambda: str(
            getattr(compilation.mode, "name", compilation.mode)
        ),
        "serving.cudagraph_mode": lambda: str(
            getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode)
        ),
        "serving.prefix_caching": lambda: bool(cache.enable_prefix_caching),
        "serving.chunked_prefill": lambda: bool(scheduler.enable_chunked_prefill),
        "serving.async_scheduling": lambda: bool(scheduler.async_scheduling),
        "serving.block_size": lambda: int(cache.block_size),
        "serving.n_kv_blocks": lambda: int(cache.num_gpu_blocks),
        "serving.max_model_len": lambda: int(config.model_config.max_model_len),
        "serving.max_num_seqs": lambda: int(scheduler.max_num_seqs),
        "serving.max_num_batched_tokens": lambda: int(scheduler.max_num_batched_tokens),
        "serving.tensor_parallel": lambda: int(parallel.tensor_parallel_size),
        **({"serving.nodes": lambda: int(parallel.nnodes)} if parallel.nnodes > 1 else {}),
        "serving.pipeline_parallel": lambda: int(parallel.pipeline_parallel_size),
        # A replica of a dense model is an engine of its own, whose configuration says 1.
        "serving.data_parallel": lambda: replica[1] or None,
        "serving.replica": lambda: replica[0],
        "serving.speculative_method": lambda: str(speculative.method) if speculative else "none",
        "serving.kv_connector": lambda: str(transfer.kv_connector) if transfer else "none",
        "serving.kv_role": lambda: str(transfer.kv_role) if transfer else "none",
    }
