"""The check of the hooks in a vLLM worker, between the set-up of its engine and its first step.

Two steps (both prompts, then one decoded token each) run through the model as it will serve,
compiled and in graphs; then again in eager mode, whose rows have to be the same, and where the
inputs of every module can be observed.
The schedule is built here and leaves no trace in scheduler, census or writer. Every
rank runs it; those that capture compare, each pipeline stage its own hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from actds.errors import ActdsError
from actds_writers.capture.check import (
    DID_NOT_RUN,
    HookCheck,
    NoReferenceError,
    States,
    bound,
    check_prompts,
    compare_with_eager,
    compare_with_forward,
    load_reference,
    reference_states,
    require_finite,
    row_distances,
    states_in_fresh_process,
    without_reference,
)
from actds_writers.capture.hooks import find_kind, raise_all
from actds_writers.capture.op import HookBuffers
from actds_writers.capture.taps import StreamForm, decoder_layers
from actds_writers.engine_protocol import refused
from actds_writers.engines.vllm.options import is_verified, random_adapters
from actds_writers.engines.vllm.runner import (
    Dispatch,
    eager,
    execute,
    identify,
    loaded_model,
    share_tokens,
)
from actds_writers.ipc.messages import HookSpec

_NAME = "actds-check-{}"
_CLEARLY = 0.25
"""Largest share of the other distance at which a norm returns the sum, or the residual."""


def check_hooks(
    worker: Any,
    buffers: HookBuffers,
    hooks: tuple[HookSpec, ...],
    form: StreamForm,
    *,
    live: bool = False,
) -> HookCheck:
    """Return the result of the check of the hooks, as in spec 0.1 section 9.1.

    Raises E507 when rows are not the model's, E601 when they are not finite; E007 when nothing can
    be compared and the model class is not verified; E012 when the KV cache has no room for a short
    prompt, or an adapter changes rows of a request without one.

    Args:
        worker: a worker whose engine is set up and has not run a request.
        live: whether requests with and without a LoRA adapter may meet in a step.
    """
    prompts = prompts_of(worker)
    if not prompts:
        raise refused(
            "engine option num_gpu_blocks_override",
            "a KV cache without room for one short prompt",
            "room for the two prompts of the check",
        )
    forwarded = forward_prompts(worker, prompts, buffers)
    assert forwarded is not None
    beside = _forward_beside_adapter(worker, prompts, buffers) if live else None
    model = loaded_model(worker.model_runner)
    # Only for these kinds the module after the layer is known to read the rows themselves.
    read = [i for i, hook in enumerate(hooks) if find_kind(hook.kind).next_reads]
    layers = [hooks[i].layer for i in read]
    readers = NextReaders(model, [forwarded.prompt_rows[i] for i in read], layers)
    with readers.watching(worker.model_runner):
        plain = forward_prompts(worker, prompts, buffers, after_prompts=readers.stop)
    assert plain is not None
    rows = dict(zip(hooks, forwarded.rows, strict=True))
    require_finite(rows, _computed(worker))  # after the last forward: other ranks take part in it
    bounds = _bounds(worker, hooks)
    if beside is not None:
        _require_base_rows(hooks, forwarded, beside, bounds)
    # Rows of a second replay would be the same and say nothing.
    was_eager = Dispatch(worker.model_runner, model).mode == "eager"
    apart = None
    if was_eager and not worker.vllm_config.model_config.enforce_eager:
        parts = [~forwarded.decoded]
        if forwarded.sequences == plain.sequences:  # else another token was decoded
            parts.append(forwarded.decoded)
        eager_rows = dict(zip(hooks, plain.rows, strict=True))
        apart = compare_with_eager(rows, eager_rows, bounds, parts)
    try:
        states = _reference_states(worker, model, hooks, forwarded)
    except NoReferenceError as missing:
        seen = {hooks[read[i]].name: distance for i, distance in readers.distances.items()}
        n_rows = len(forwarded.prompt_rows[0])
        check = HookCheck("engine", seen, bounds, n_rows, str(missing), apart).require()
        ranks = int(worker.vllm_config.parallel_config.tensor_parallel_size)
        return _without_reference(type(model).__name__, ranks, form, hooks, check)
    raise_all(without_reference(rows, states))
    return replace(compare_with_forward(rows, states, bounds, forwarded.decoded), eager=apart)


def _forward_beside_adapter(
    worker: Any, prompts: tuple[list[int], ...], buffers: HookBuffers | None
) -> Forwarded | None:
    """Forward the prompts again, the last one with a LoRA adapter, in an engine that has them."""
    if worker.vllm_config.lora_config is None:
        return None
    with random_adapters(worker, loaded_model(worker.model_runner)) as adapter:
        return forward_prompts(worker, prompts, buffers, adapter=adapter)


def _require_base_rows(
    hooks: Sequence[HookSpec], alone: Forwarded, beside: Forwarded, bounds: dict[str, float]
) -> None:
    """Raise E012 unless the first prompt has the same rows beside an adapter, the last has not."""
    n_all = len(alone.sequences[0])
    n_same = n_all - (alone.sequences[0] != beside.sequences[0])  # another token was decoded
    changed = False
    for hook, rows, rows_beside in zip(hooks, alone.rows, beside.rows, strict=True):
        apart = row_distances(rows_beside, rows)
        distance = float(apart[:n_same].mean())
        if not distance <= bounds[hook.name]:  # also true for not-a-number
            got = f"{hook.name} of a request without an adapter changes beside one with: rows are "
            got += f"{distance:.2g} (mean relative L2) from its own"
            raise _mixed_rows(got, f"at most {bounds[hook.name]:.2g}")
        changed |= bool((apart[n_all:] > bounds[hook.name]).any())
    if not changed:
        raise _mixed_rows(
            "no row that an adapter changes, so nothing is known", "one, and two prompts"
        )


def _mixed_rows(got: str, expected: str) -> ActdsError:
    return refused(
        "engine option enable_lora",
        got,
        expected,
        "Serve requests with adapters from another engine.",
    )


def join_check(worker: Any, *, live: bool) -> None:
    prompts = prompts_of(worker)
    if not prompts:
        return
    forward_prompts(worker, prompts, None)
    if live:
        _forward_beside_adapter(worker, prompts, None)
    with eager(worker.model_runner):
        forward_prompts(worker, prompts, None)


def _bounds(worker: Any, hooks: Sequence[HookSpec]) -> dict[str, float]:
    config = worker.vllm_config
    kv_dtype = str(config.cache_config.cache_dtype)
    coarse = (
        config.model_config.quantization is not None
        or kv_dtype.startswith(("fp8", "int8", "nvfp4", "turboquant"))
        or torch.get_float32_matmul_precision() != "highest"
    )
    computed = _computed(worker)
    return {hook.name: bound(computed, hook.dtype, coarse=coarse) for hook in hooks}


def _computed(worker: Any) -> str:
    return str(worker.model_runner.model_config.dtype).removeprefix("torch.")


def _reference_states(
    worker: Any, model: torch.nn.Module, hooks: Sequence[HookSpec], forwarded: Forwarded
) -> States:
    config = worker.vllm_config
    wanted = config.model_config
    if str(config.load_config.load_format) == "dummy":
        raise NoReferenceError("load_format is dummy: the weights are random")
    if wanted.quantization is not None:
        raise NoReferenceError(f"the weights are quantized ({wanted.quantization})")
    if wanted.hf_overrides:
        raise NoReferenceError("hf_overrides: the engine runs a changed configuration")
    stages = int(config.parallel_config.pipeline_parallel_size)
    ranks = stages * int(config.parallel_config.tensor_parallel_size)
    size = ranks * sum(parameter.numel() for parameter in model.parameters())
    options = {
        "revision": wanted.revision,
        "trust_remote_code": bool(wanted.trust_remote_code),
        "n_copies": stages,
    }
    kinds = sorted({hook.kind for hook in hooks})
    # vLLM's transformers backend patches transformers' classes in this whole process.
    if type(model).__module__.startswith("vllm.model_executor.models.transformers"):
        states = states_in_fresh_process(wanted.model, size, forwarded.sequences, kinds, **options)
    else:
        reference = load_reference(wanted.model, size, **options)
        states = reference_states(reference, forwarded.sequences, kinds)
    for hook, rows in zip(hooks, forwarded.rows, strict=True):
        state = states.get(hook.kind, {}).get(hook.layer)
        if hook.kind == "resid_post" and state is not None and state.shape != rows.shape:
            raise NoReferenceError(
                f"transformers' layers return {state.shape}, the hooks see {rows.shape}"
            )
    return states


def _without_reference(
    model: str, ranks: int, form: StreamForm, hooks: Sequence[HookSpec], check: HookCheck
) -> HookCheck:
    """Return a check against the engine alone, if that is enough, or raise E007.

    A hook that could not be compared has to be of a verified model class and kind.
    """
    unseen = [hook for hook in hooks if hook.name not in check.distances]
    if not unseen:
        return check
    odd = [hook for hook in unseen if not is_verified(model, hook.kind, ranks)]
    if not odd:
        names = ", ".join(hook.name for hook in unseen)
        reason = f"{check.reason}; nothing to compare with {names}"
        return replace(check, against="engine" if check.distances else "table", reason=reason)
    unknown = form == "unverified"
    what = f"a model class{'' if unknown else ' and kind'} that was never verified"
    raise_all(
        [
            ActdsError(
                "E007",
                place,
                got=f"{what}, and nothing to compare its rows with: {check.reason}",
                expected="a verified class and kind, or a model that transformers loads",
                next_step='Harvest it with engine="transformers", which runs the model itself.',
            )
            for place in ([model] if unknown else [f"{hook.kind}:{hook.layer}" for hook in odd])
        ]
    )
    raise AssertionError("unreachable: there is an odd hook")


@dataclass(frozen=True)
class Forwarded:
    """The rows of the check's prompts.

    Args:
        sequences: token ids of each prompt as the model read them, the decoded one included.
        rows: float32 ``(n, d_model)`` of each hook, the sequences concatenated.
        decoded: bool ``(n,)``: rows of the decode step.
        prompt_rows: float32 ``(m, d_model)`` of each hook, of the prompts' step, in its order.
    """

    sequences: tuple[tuple[int, ...], ...]
    rows: list[np.ndarray]
    decoded: np.ndarray
    prompt_rows: list[np.ndarray]


def prompts_of(worker: Any) -> tuple[list[int], ...]:
    """Return the prompts of the check: two, fewer or shorter in a small KV cache, or none."""
    runner, scheduler = worker.model_runner, worker.vllm_config.scheduler_config
    model = runner.model_config
    longest = min(int(scheduler.max_num_batched_tokens) // 2, int(model.max_model_len) - 1)
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    # Block 0 is the null block.
    room = int(runner.kv_cache_config.num_blocks) - 1
    for length in (longest, min(longest, 4)):
        prompts = check_prompts(int(model.get_vocab_size()), length)
        for n in range(min(len(prompts), int(scheduler.max_num_seqs)), 0, -1):
            if sum(_n_blocks(s, len(p) + 1) for p in prompts[:n] for s in specs) <= room:
                return prompts[:n]
    return ()


def forward_prompts(
    worker: Any,
    prompts: tuple[list[int], ...],
    buffers: HookBuffers | None,
    after_prompts: Callable[[], None] = lambda: None,
    adapter: Any = None,
) -> Forwarded | None:
    """Run the prompts and one decode step through the worker's model runner.

    Args:
        buffers: what the hooks write; ``None`` on a rank without hooks.
        after_prompts: called between the prompts' step and the decode step.
        adapter: ``LoRARequest`` of the last prompt.
    """
    runner = worker.model_runner
    names = [_NAME.format(number) for number in range(len(prompts))]
    with without_connector(runner):
        sampled, first = _run(worker, _prefill(runner, names, prompts, adapter), buffers)
        after_prompts()
        _, second = _run(worker, _decode(runner, names, prompts, sampled), buffers)
        _forget(runner, names)  # not after an error: the engine does not start then
    if buffers is None:
        return None
    tokens = tuple((*first[name][0].tolist(), *second[name][0].tolist()) for name in names)
    parts = [part[name][1] for name in names for part in (first, second)]
    decoded = [np.full(len(part[0]), number % 2 == 1) for number, part in enumerate(parts)]
    return Forwarded(
        tokens,
        _joined(parts),
        np.concatenate(decoded),
        _joined([rows for _, rows in first.values()]),
    )


def _joined(parts: list[list[np.ndarray]]) -> list[np.ndarray]:
    return [np.concatenate(of_hook) for of_hook in zip(*parts, strict=True)]


@torch.inference_mode()
def _run(
    worker: Any, scheduled: Any, buffers: HookBuffers | None
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    from vllm.distributed import get_pp_group

    try:
        output, rows = _step(worker, scheduled, buffers)
    except Exception:
        # No other stage may wait for its tokens. vLLM ends one that waits for a stage's rows.
        if get_pp_group().is_last_rank:
            with contextlib.suppress(ActdsError):
                share_tokens(None)
        raise
    return share_tokens(output), rows


def _step(
    worker: Any, scheduled: Any, buffers: HookBuffers | None
) -> tuple[Any, dict[str, tuple[np.ndarray, list[np.ndarray]]]]:
    runner = worker.model_runner
    if buffers is not None:
        buffers.reset()
    execute(worker, scheduled)
    by_request: dict[str, tuple[np.ndarray, list[np.ndarray]]] = {}
    if buffers is not None:
        identity = identify(runner, scheduled)
        ids = identity.token_ids.cpu().numpy()
        # Copies, for the next step overwrites the buffers.
        rows = [of_hook[: len(ids)].float().cpu().numpy().copy() for of_hook in buffers.rows]
        for of_hook, seen in zip(rows, buffers.seen.tolist(), strict=True):
            if seen < len(ids):  # a hook that did not run left the rows of an earlier step
                of_hook[:] = DID_NOT_RUN
        stops = np.cumsum(identity.n_rows)
        for name, start, stop in zip(
            identity.request_ids, stops - identity.n_rows, stops, strict=True
        ):
            by_request[name] = ids[start:stop].copy(), [of_hook[start:stop] for of_hook in rows]
    output = runner.sample_tokens(None)
    if hasattr(output, "get_output"):  # asynchronous: the token must be there for the next step
        output = output.get_output()
    return output, by_request


def _prefill(runner: Any, names: list[str], prompts: tuple[list[int], ...], adapter: Any) -> Any:
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    known = {field.name for field in dataclasses.fields(NewRequestData)}
    # Block 0 is vLLM's null block. No request has a block yet; what is written is overwritten.
    blocks = iter(range(1, 1 << 30))
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    scheduled = SchedulerOutput.make_empty()
    for name, prompt in zip(names, prompts, strict=True):
        fields = {
            "req_id": name,
            "prompt_token_ids": prompt,
            "mm_features": [],
            "sampling_params": SamplingParams(temperature=0.0, max_tokens=2),
            "pooling_params": None,
            "block_ids": tuple(
                [next(blocks) for _ in range(_n_blocks(spec, len(prompt) + 1))] for spec in specs
            ),
            "num_computed_tokens": 0,
            "lora_request": adapter if name == names[-1] else None,
            "prefill_token_ids": prompt,
        }
        scheduled.scheduled_new_reqs.append(
            NewRequestData(**{name: value for name, value in fields.items() if name in known})
        )
        scheduled.num_scheduled_tokens[name] = len(prompt)
    scheduled.total_num_scheduled_tokens = sum(map(len, prompts))
    return scheduled


def _n_blocks(spec: Any, n_tokens: int) -> int:
    spec = getattr(spec, "first_spec", spec)
    return -(-n_tokens // int(spec.block_size)) + int(getattr(spec, "num_speculative_blocks", 0))


def _decode(
    runner: Any, names: list[str], prompts: tuple[list[int], ...], sampled: dict[str, list[int]]
) -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    scheduled = SchedulerOutput.make_empty()
    cached = scheduled.scheduled_cached_reqs
    cached.req_ids = list(names)
    config = runner.vllm_config
    stages = int(config.parallel_config.pipeline_parallel_size)
    if stages > 1 and not config.scheduler_config.async_scheduling:
        # As the scheduler does, for the stages before the one that sampled them.
        cached.new_token_ids = [sampled[name] for name in names]
    else:
        cached.new_token_ids = []
    cached.new_block_ids = [None] * len(names)
    cached.num_computed_tokens = [len(prompt) for prompt in prompts]
    cached.num_output_tokens = [1] * len(names)
    scheduled.num_scheduled_tokens = dict.fromkeys(names, 1)
    scheduled.total_num_scheduled_tokens = len(names)
    return scheduled


def _forget(runner: Any, names: list[str]) -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    scheduled = SchedulerOutput.make_empty()
    scheduled.finished_req_ids = set(names)
    with torch.inference_mode():
        runner.execute_model(scheduled)


class NextReaders:
    """Compares the rows of each hook with what the following module reads, in an eager forward.

    The stream after layer L is the input of a module in layer L+1, usually its first norm; after
    the last layer, of a module outside all layers. A norm with a residual argument reads the sum if
    it returns the sum, and its first argument alone if it returns the residual unchanged (vLLM's
    Cohere); if it returns neither, it shows nothing.
    """

    def __init__(
        self, model: torch.nn.Module, rows: Sequence[np.ndarray], layers: Sequence[int]
    ) -> None:
        self._model, self._rows, self._hooked = model, rows, layers
        self._handles: list[Any] = []
        self._past_last = False
        self.distances: dict[int, float] = {}
        """Smallest mean relative L2 by hook; missing for a hook without a following reader."""

    @contextlib.contextmanager
    def watching(self, runner: Any) -> Iterator[None]:
        layers = decoder_layers(self._model)
        inside = {id(module) for layer in layers.values() for module in layer.modules()}
        last = max(layers)  # of this pipeline stage
        outside = [m for m in self._model.modules() if id(m) not in inside]
        for hook, number in enumerate(self._hooked):
            if number < last:
                for module in list(layers[number + 1].modules())[1:]:
                    self._watch(module, hook, lambda: True)
            else:
                for module in outside:
                    if not list(module.children()):
                        self._watch(module, hook, lambda: self._past_last)
        self._handles.append(layers[last].register_forward_hook(self._at_last))
        self._handles.append(layers[min(layers)].register_forward_pre_hook(self._at_first))
        try:
            with eager(runner):
                yield
        finally:
            self.stop()

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _at_first(self, *_: Any) -> None:
        self._past_last = False

    def _at_last(self, *_: Any) -> None:
        self._past_last = True

    def _watch(self, module: torch.nn.Module, hook: int, now: Callable[[], bool]) -> None:
        given: list[torch.Tensor] = []  # copies: kernels work in place

        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given[:] = self._matching(hook, [*args, *kwargs.values()]) if now() else []
            if len(given) == 1:
                self._compare(hook, given[0])

        def after(_module: Any, _inputs: Any, output: Any) -> None:
            if len(given) != 2 or not isinstance(output, tuple):
                return
            hidden, residual = (tensor.float() for tensor in given)
            # As the engine stores it: what one layer adds may be less than that rounds off.
            added = (hidden + residual).to(given[0].dtype).float()
            handed_on = [tensor.float() for tensor in self._matching(hook, list(output))]
            if not handed_on:
                return
            to_sum, to_residual = (
                min(float(torch.linalg.norm(part - kept)) for part in handed_on)
                for kept in (added, residual)
            )
            # Where both are nearly equal, it is not clear which one was read.
            if to_sum <= to_residual * _CLEARLY:
                self._compare(hook, added)
            elif to_residual <= to_sum * _CLEARLY:
                self._compare(hook, hidden)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after))

    def _matching(self, hook: int, values: list[Any]) -> list[torch.Tensor]:
        want = self._rows[hook]
        tensors = [
            value.flatten(0, -2)[: len(want)].clone()
            for value in values
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1
        ]
        return [tensor for tensor in tensors if tensor.shape == want.shape]

    def _compare(self, hook: int, stream: torch.Tensor) -> None:
        distance = float(row_distances(self._rows[hook], stream.float().cpu().numpy()).mean())
        if not distance >= self.distances.get(hook, np.inf):
            self.distances[hook] = distance


@contextlib.contextmanager
def without_connector(runner: Any) -> Iterator[None]:
    """Run forwards of which a KV connector knows nothing, as vLLM itself does to warm up."""
    from vllm.distributed.kv_transfer import kv_transfer_state as state

    name = "_KV_CONNECTOR_AGENT"
    agent, of_second = getattr(state, name), getattr(runner, "kv_connector", None)
    disable = getattr(of_second, "set_disabled", None) if agent is not None else None
    setattr(state, name, None)
    if disable is not None:
        disable(True)
    try:
        yield
    finally:
        if disable is not None:
            disable(False)
        setattr(state, name, agent)
