"""Interventions on the device: tables that persist, and one op that changes the marked rows.

The op is traced into the graph as the hooks are, behind those that read the same place, so that a
stored row is the one before it. Which line of its tables changes each row is written into a buffer
before the model runs; line 0 changes nothing. On a CPU a step without a marked row costs one look
at that buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from actds.errors import ActdsError
from actds.format.interventions import Applied
from actds_writers.capture.hooks import find_kind
from actds_writers.capture.op import library, watch_tap
from actds_writers.capture.taps import StreamForm, Tap
from actds_writers.interventions import Planned
from actds_writers.ipc.messages import HookSpec, IntArray

library.define(
    "intervene(Tensor(a!) hidden, Tensor(b!)? residual, Tensor lines, Tensor readers, "
    "Tensor vectors, Tensor scalars) -> ()"
)


def changed(
    rows: torch.Tensor, readers: torch.Tensor, vectors: torch.Tensor, scalars: torch.Tensor
) -> torch.Tensor:
    """Return rows as edits leave them, float32 ``(n, d)``; arguments as of ``Arrays``, by row."""
    keep, bias, gain, shift, threshold = scalars.unbind(1)
    product = (rows * readers).sum(dim=1) + shift
    active = torch.where(product > threshold, product, torch.zeros_like(product))
    return keep[:, None] * rows + (bias + gain * active)[:, None] * vectors


def intervene(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    lines: torch.Tensor,
    readers: torch.Tensor,
    vectors: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    lines = lines[: hidden.shape[0]]
    hidden = hidden[: lines.shape[0]]
    if hidden.device.type == "cpu":
        at = lines.nonzero()[:, 0]
        if not len(at):
            return
        change_some(hidden, residual, at, lines[at], (readers, vectors, scalars))
        return
    change_all(hidden, residual, lines, (readers, vectors, scalars))


Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def change_some(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    at: torch.Tensor,
    lines: torch.Tensor,
    tables: Tables,
) -> None:
    # The two are added in the model's own type, as the norm behind them does.
    rows = hidden[at] if residual is None else hidden[at] + residual[at]
    edited = changed(rows.float(), *(table[lines] for table in tables)).to(hidden.dtype)
    if residual is None:
        hidden[at] = edited
    else:
        residual[at] = edited
        hidden[at] = 0


def change_all(
    hidden: torch.Tensor, residual: torch.Tensor | None, lines: torch.Tensor, tables: Tables
) -> None:
    """Change the marked rows by ops of a fixed shape, which a CUDA graph can replay."""
    marked = (lines > 0)[:, None]
    target = hidden if residual is None else residual[: len(lines)]
    rows = hidden if residual is None else hidden + target
    edited = changed(rows.float(), *(table[lines] for table in tables)).to(hidden.dtype)
    target.copy_(torch.where(marked, edited, target))
    if residual is not None:
        hidden.masked_fill_(marked, 0)


library.impl("intervene", intervene, "CompositeExplicitAutograd")
torch.library.register_fake("actds::intervene", lambda *_: None, lib=library)


class Row(NamedTuple):
    """Scheduled rows of one request: ``[first, first + n_rows)`` of a step.

    ``position`` is that of its first row.
    """

    first: int
    n_rows: int
    position: int
    applied: tuple[Applied, ...]


class _Lines:
    """Of one hook: the line of each intervention, by its number, and which have one a position."""

    def __init__(
        self, planned: Planned, hook: str, shape: tuple[int, int], device: torch.device
    ) -> None:
        n = len(planned.interventions) + 1
        self._first, self._is_patch = np.zeros(n, np.int64), np.zeros(n, bool)
        parts: list[tuple[np.ndarray, ...]] = []
        n_lines = 1
        edits = zip(planned.interventions, planned.arrays, strict=True)
        for number, (item, arrays) in enumerate(edits, 1):
            for edit, of_edit in zip(item.edits, arrays, strict=True):
                if edit.hook == hook:
                    self._first[number], self._is_patch[number] = n_lines, edit.op == "patch"
                    parts.append(of_edit)
                    n_lines += len(of_edit.vectors)
        readers, vectors = (torch.zeros(shape, device=device) for _ in range(2))
        scalars = torch.tensor([[1.0, 0.0, 0.0, 0.0, -np.inf]], device=device).repeat(shape[0], 1)
        self.tables: Tables = (readers, vectors, scalars)
        for table, every in zip(self.tables, zip(*parts, strict=True), strict=True):
            table[1:n_lines].copy_(torch.from_numpy(np.concatenate(every)))

    def of(self, numbers: IntArray, offsets: IntArray) -> IntArray:
        lines: IntArray = self._first[numbers] + np.where(self._is_patch[numbers], offsets, 0)
        return lines


class Edits:
    """The interventions of a run in one loaded model, not yet compiled.

    Args:
        specs: by name, the hooks that they may be at.
        max_rows: rows of the largest step, padding included.
        layers: decoder layers of this pipeline stage, ``None`` for all.

    Raises:
        ActdsError: E007 where the model has no such place.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        planned: Planned,
        specs: Mapping[str, HookSpec],
        *,
        max_rows: int,
        device: torch.device,
        form: StreamForm,
        layers: Collection[int] | None = None,
    ) -> None:
        hooks = [specs[name] for name in planned.hooks]
        hooks = [hook for hook in hooks if layers is None or hook.layer in layers]
        sizes = dict(planned.table_sizes)
        self._lines = [
            _Lines(planned, hook.name, (sizes[hook.name], hook.d_model), device) for hook in hooks
        ]
        self.buffer = torch.zeros(len(hooks), max_rows, dtype=torch.int64, device=device)
        self._is_clean = True
        self.marks = np.zeros(0, np.uint16)
        """Of each row of the step, the number of the intervention that changes it, 0 for none."""
        for number, (hook, lines) in enumerate(zip(hooks, self._lines, strict=True)):
            tap = find_kind(hook.kind).tap(model, hook.layer, form)
            _install(tap, hook, number, (self.buffer[number], *lines.tables))

    @property
    def nbytes(self) -> int:
        """Return the memory of the tables, and of the line of each row, on the device."""
        tables = [table for lines in self._lines for table in lines.tables]
        return sum(tensor.nbytes for tensor in (*tables, self.buffer))

    def set(self, n_rows: int, rows: Iterable[Row], index: torch.Tensor | None = None) -> None:
        """Say what the next forward changes, whose rows are ``n_rows``.

        Args:
            rows: those of requests that have an intervention.
            index: where each row stands in the forward, int64 ``(n_rows,)``; in order without it.
        """
        self.marks = marks = np.zeros(n_rows, np.uint16)
        offsets = np.zeros(n_rows, np.int64)
        for first, count, position, applied in rows:
            for number, start, stop, origin in applied:
                low, high = max(start, position), min(stop, position + count)
                if low < high:
                    at = slice(first + low - position, first + high - position)
                    marks[at], offsets[at] = number, np.arange(low - origin, high - origin)
        is_clean = not marks.any()
        if is_clean and self._is_clean:
            return
        if not self._is_clean:
            self.buffer.zero_()
        self._is_clean = is_clean
        if is_clean or not self._lines:
            return
        numbers = marks.astype(np.int64)
        lines = torch.from_numpy(np.stack([lines.of(numbers, offsets) for lines in self._lines]))
        if index is None:
            self.buffer[:, :n_rows].copy_(lines)
        else:
            self.buffer[:, index] = lines.to(self.buffer.device)


def _install(tap: Tap, spec: HookSpec, number: int, tensors: Iterable[torch.Tensor]) -> None:
    # Attributes of the module, as those of hooks are.
    names = []
    for i, tensor in enumerate(tensors):
        names.append(f"_actds_edit_{number}_{i}")
        setattr(tap.module, names[-1], tensor)
    read: Callable[..., Any] = tap.read

    def hook(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> None:
        hidden, residual = read(args, kwargs, output)
        if not torch.compiler.is_compiling():
            _require_shared(spec.name, hidden, (args, kwargs, output))
        torch.ops.actds.intervene(hidden, residual, *[getattr(module, name) for name in names])

    watch_tap(tap, hook)


def _require_shared(hook: str, rows: torch.Tensor, values: object) -> None:
    """Refuse a place whose rows are a copy: to change them would change nothing."""
    if rows.data_ptr() not in set(_pointers(values)):
        raise ActdsError(
            "E007",
            f"an intervention at {hook}",
            got="rows that the model computes anew",
            expected="a place whose rows the model itself reads on",
        )


def _pointers(value: object) -> Iterable[int]:
    if isinstance(value, torch.Tensor):
        yield value.data_ptr()
    elif isinstance(value, dict):
        yield from _pointers(list(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _pointers(part)
