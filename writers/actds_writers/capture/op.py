"""What is read from a forward on its device: the rows of hooks, their readouts, and the logits.

A Python hook that copies is traced away under compilation without an error. So the hook's body is
one custom op, traced into the graph, which copies into a buffer and also writes how many rows it
saw; the worker compares that with the schedule at every step. The logits are read as the model
returns them, before a sampler changes them, and the token's own value is taken when it is sampled.
Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actds.errors import ActdsError
from actds.format.schema import DType
from actds_writers.capture.hooks import find_kind, raise_all
from actds_writers.capture.taps import StreamForm, Tap
from actds_writers.ipc.link import RowLayout
from actds_writers.ipc.messages import HookSpec

CHUNK_VALUES = 1 << 24
"""Most logits that are in float32 at a time on a GPU, 64 MiB; on a CPU it is a row, which fits its
cache and is several times as fast."""
_GROUPS = 64
_FURTHEST = -80.0
"""A logit so far below the largest has less than 2e-35 of its probability."""


@dataclass(frozen=True)
class Reading:
    """Logits ``(n, vocabulary)`` of a step, of the model's type, and what they say.

    ``values``: float32 ``(n, 4)``: entropy, margin, largest logit, its log-probability.
    """

    logits: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, n_at_once: int | None = None) -> Reading:
        """Return the reading of logits that a sampler may change afterwards.

        Args:
            n_at_once: rows that are in float32 at a time, ``None`` to choose.
        """
        if not len(logits):
            return cls(logits, logits.new_empty((0, 4), dtype=torch.float32))
        if n_at_once is None:
            on_cpu = logits.device.type == "cpu"
            n_at_once = 1 if on_cpu else max(1, CHUNK_VALUES // logits.shape[1])
        largest, second = _two_largest(logits)
        memory = largest.new_empty((2, min(n_at_once, len(logits)), logits.shape[1]))
        rows, tops = torch.split(logits, n_at_once), torch.split(largest, n_at_once)
        read = [_read(row, top, memory) for row, top in zip(rows, tops, strict=True)]
        totals, sums = (torch.cat(parts) for parts in zip(*read, strict=True))
        of_largest = -totals.log()
        entropy = (-of_largest - sums / totals).clamp_(min=0.0)
        values = torch.stack([entropy, largest - second, largest, of_largest], dim=1)
        # A sampler computes in float32: only such logits are its own and change in place.
        kept = logits.clone() if logits.dtype == torch.float32 else logits
        return cls(kept, values)

    def of_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return int32 ``(n, 4)``: token, and the float32 bits of entropy, logprob and margin."""
        ids = token_ids.to(torch.int64)
        logit = self.logits.gather(1, ids[:, None])[:, 0].float()
        entropy, margin, largest, of_largest = self.values.unbind(1)
        logprob = (logit - largest + of_largest).clamp_(max=0.0)
        bits = torch.stack([entropy, logprob, margin], dim=1).view(torch.int32)
        return torch.cat([ids.to(torch.int32)[:, None], bits], dim=1)


def _read(
    logits: torch.Tensor, largest: torch.Tensor, memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of all odds against the largest logit, and of the logits below it by them.

    Of differences from the largest, so that large logits cost no digits. What is further below adds
    nothing that float32 holds, and numbers that are nearly 0 take twenty times as long; without a
    bound, what has no probability would be minus infinity times 0. Logits that are no number stay
    so. One ``exp`` takes a third of the time of ``softmax``.

    Args:
        memory: float32 ``(2, n, vocabulary)`` to work in.
    """
    n = len(logits)
    below = torch.sub(logits, largest[:, None], out=memory[0, :n]).clamp_(min=_FURTHEST)
    odds = torch.exp(below, out=memory[1, :n])
    return odds.sum(dim=-1), odds.mul_(below).sum(dim=-1)


def _two_largest(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest and second largest value of each row in float32, equal for a tie.

    By the largest of groups, which takes a fifth of the time of ``topk`` over the vocabulary.
    """
    n, vocabulary = rows.shape
    if vocabulary % _GROUPS:
        top = rows.topk(min(2, vocabulary), dim=-1).values.float()
        return top[:, 0], top[:, -1]
    grouped = rows.view(n, _GROUPS, -1)
    best = grouped.amax(dim=1).topk(min(2, vocabulary // _GROUPS), dim=-1)
    index = best.indices[:, :1, None].expand(n, 1, _GROUPS)
    within = grouped.transpose(1, 2).gather(1, index)[:, 0].topk(2, dim=-1).values
    seconds = torch.cat([within[:, 1:], best.values[:, 1:]], dim=1)
    return within[:, 0].float(), seconds.amax(dim=1).float()


library: Any = torch.library.Library("actds", "FRAGMENT")  # type: ignore[no-untyped-call]
library.define("capture(Tensor hidden, Tensor? residual, Tensor(a!) rows, Tensor(b!) seen) -> ()")
library.define(
    "capture_and_read(Tensor hidden, Tensor? residual, Tensor(a!) rows, Tensor(b!) seen, "
    "Tensor directions, Tensor(c!) scratch, Tensor(d!) readouts) -> ()"
)


def _capture(
    hidden: torch.Tensor, residual: torch.Tensor | None, rows: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    # Every slice has its cost.
    seen.fill_(hidden.shape[0])
    if hidden.shape[0] > rows.shape[0]:
        hidden = hidden[: rows.shape[0]]
        residual = None if residual is None else residual[: rows.shape[0]]
    stored = rows[: hidden.shape[0]]
    if residual is None:
        stored.copy_(hidden)
    else:
        torch.add(hidden, residual, out=stored)
    return stored


def capture(
    hidden: torch.Tensor, residual: torch.Tensor | None, rows: torch.Tensor, seen: torch.Tensor
) -> None:
    _capture(hidden, residual, rows, seen)


def capture_and_read(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    rows: torch.Tensor,
    seen: torch.Tensor,
    directions: torch.Tensor,
    scratch: torch.Tensor,
    readouts: torch.Tensor,
) -> None:
    # From the row as stored, so that the readout can be recomputed.
    values = _capture(hidden, residual, rows, seen)
    if values.dtype != torch.float32:
        values = scratch[: len(values)].copy_(values)
    of_rows = readouts[: len(values)]
    torch.linalg.vector_norm(values, dim=1, out=of_rows[:, 0])
    with _ieee_products():
        torch.mm(values, directions, out=of_rows[:, 1:])


@contextmanager
def _ieee_products() -> Iterator[None]:
    """Multiply in float32 on a GPU, whatever the engine is set to.

    TF32 keeps 11 bits of a factor: a row with most of its norm in one channel is then off by up to
    2^-10 of it along that channel, ten times what spec section 7.8 allows.
    """
    matmul: Any = torch.backends.cuda.matmul
    name: str = "fp32_precision"
    ieee: str | bool = "ieee"
    if not hasattr(matmul, name):  # torch before 2.9
        name, ieee = "allow_tf32", False
    chosen = getattr(matmul, name)
    if chosen == ieee:
        yield
        return
    setattr(matmul, name, ieee)
    try:
        yield
    finally:
        setattr(matmul, name, chosen)


for _name, _body in (("capture", capture), ("capture_and_read", capture_and_read)):
    library.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"actds::{_name}", lambda *_: None, lib=library)


Gather = Callable[[torch.Tensor, int], torch.Tensor]
TORCH_TYPES: dict[DType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class HookBuffers:
    """The buffers that hooks write a step into; the same memory at every step.

    Args:
        blocks: ``(n_hooks, max_rows, d_model)`` of each block, on the model's device.
        seen: int64 ``(n_hooks,)``: rows each hook saw in the last step, 0 when it did not run.
        readouts: float32 ``(n_hooks, max_rows, n_readouts)``, no column without readouts.
        beside_nbytes: further memory of the readouts: directions and scratch.
    """

    layout: RowLayout
    blocks: tuple[torch.Tensor, ...]
    seen: torch.Tensor
    readouts: torch.Tensor
    beside_nbytes: int = 0

    @classmethod
    def allocate(
        cls,
        hooks: Sequence[HookSpec],
        max_rows: int,
        device: torch.device | str,
        n_readouts: int = 0,
        beside_nbytes: int = 0,
    ) -> HookBuffers:
        layout = RowLayout(hooks)
        blocks = tuple(
            torch.zeros(block.shape(max_rows), dtype=TORCH_TYPES[block.dtype], device=device)
            for block in layout.blocks
        )
        seen = torch.zeros(len(hooks), dtype=torch.int64, device=device)
        readouts = torch.zeros(len(hooks), max_rows, n_readouts, device=device)
        return cls(layout, blocks, seen, readouts, beside_nbytes)

    @property
    def device(self) -> torch.device:
        return self.seen.device

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.blocks[block][place] for block, place in self.layout.places)

    def reset(self) -> None:
        self.seen.zero_()

    def compact(self, index: torch.Tensor) -> None:
        """Move the rows of real tokens, ``index`` (int64, on the device), to the front."""
        for buffer in (*self.blocks, self.readouts):
            buffer[:, : len(index)] = buffer[:, index]

    @property
    def nbytes(self) -> int:
        tensors = (*self.blocks, self.seen, self.readouts)
        return self.beside_nbytes + sum(tensor.nbytes for tensor in tensors)


def install(
    model: torch.nn.Module,
    hooks: Sequence[HookSpec],
    *,
    max_rows: int,
    device: torch.device,
    form: StreamForm,
    directions: Sequence[np.ndarray] | None = None,
    gather: Gather | None = None,
    start: int = 0,
) -> HookBuffers:
    """Install hooks that write their rows into buffers at every forward.

    Raises E007 when a layer does not exist, or several lists could be the decoder's; at the first
    forward when the output of a layer has another form.

    Args:
        model: the model, its weights loaded and not yet compiled.
        hooks: rows are cast where the model computes in another type than is stored.
        max_rows: rows of the largest step, padding included.
        directions: of the readouts of each hook float32 ``(d_model, n_products)``.
        gather: of kinds that are ``split_by_rank``, returns the whole row of so many channels from
            this rank's part; every rank calls it. ``None`` for one rank.
        start: number of the first hook, behind those that are installed already.
    """
    taps = find_taps(model, hooks, form)
    if gather is not None:
        taps = [_gathered(*pair, gather) for pair in zip(taps, hooks, strict=True)]
    n_readouts = beside = widest = 0
    if directions is not None:
        widest = max(hook.d_model for hook in hooks)
        n_readouts = 1 + directions[0].shape[1]
        beside = sum(matrix.nbytes for matrix in directions) + 4 * max_rows * widest
    buffers = HookBuffers.allocate(hooks, max_rows, device, n_readouts, beside)
    # One scratch for all: the hooks run one after the other.
    scratch = torch.empty(max_rows * widest, device=device)
    for number, (hook, tap, rows) in enumerate(zip(hooks, taps, buffers.rows, strict=True)):
        tensors = [rows, buffers.seen[number : number + 1]]
        if directions is not None:
            matrix = torch.from_numpy(np.ascontiguousarray(directions[number])).to(device)
            part = scratch[: max_rows * hook.d_model].view(max_rows, hook.d_model)
            tensors += [matrix, part, buffers.readouts[number]]
        install_tap(tap, hook, start + number, tensors)
    return buffers


def find_taps(model: torch.nn.Module, hooks: Sequence[HookSpec], form: StreamForm) -> list[Tap]:
    taps, errors = [], []
    for hook in hooks:
        try:
            taps.append(find_kind(hook.kind).tap(model, hook.layer, form))
        except ActdsError as error:
            errors.append(error)
    raise_all(errors)
    return taps


def _gathered(tap: Tap, hook: HookSpec, gather: Gather) -> Tap:
    if not find_kind(hook.kind).split_by_rank:
        return tap

    def read(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        part, residual = tap.read(args, kwargs, output)
        return gather(part, hook.d_model), residual

    return tap._replace(read=read)


def install_tap(tap: Tap, spec: HookSpec, number: int, buffers: Sequence[torch.Tensor]) -> None:
    """Hook a tap: write its rows into a hook's buffers, and its readouts if there are five."""
    # Attributes of the module, so that the compiled graph takes them as inputs of the layer; with
    # the hook's number, as one module may have several hooks.
    names = [f"_actds_{number}_{i}" for i in range(len(buffers))]
    for name, buffer in zip(names, buffers, strict=True):
        setattr(tap.module, name, buffer)
    op = torch.ops.actds.capture if len(buffers) == 2 else torch.ops.actds.capture_and_read
    read = tap.read

    def hook(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> None:
        hidden, residual = read(args, kwargs, output)
        _require_channels(spec.name, hidden.shape[-1], spec.d_model)
        op(hidden, residual, *[getattr(module, name) for name in names])

    watch_tap(tap, hook)


# A compiler calls it, and does not trace the error.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _require_channels(hook: str, n_channels: int, d_model: int) -> bool:
    if n_channels != d_model:
        raise ActdsError(
            "E007",
            f"hook {hook}",
            got=f"rows of {n_channels} channels",
            expected=f"{d_model}, as the model's configuration says",
        )
    return True


def watch_tap(tap: Tap, hook: Callable[..., None]) -> Callable[[], None]:
    """Call ``hook(module, args, kwargs, output)`` at every forward; without output before it.

    Returns what removes it.
    """
    if tap.wrapped:
        forward = tap.module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            hook(tap.module, args, kwargs)
            return forward(*args, **kwargs)

        tap.module.forward = watched
        return lambda: setattr(tap.module, "forward", forward)
    if tap.before:
        return tap.module.register_forward_pre_hook(hook, with_kwargs=True).remove
    return tap.module.register_forward_hook(hook, with_kwargs=True).remove
