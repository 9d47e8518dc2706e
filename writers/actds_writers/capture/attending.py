"""Where decode steps attend, looked at while a model serves: of drawn requests, at some layers.

Beside the stages, in the worker. The engine's thread copies the rows of ``q``, ``k``, ``v`` and
``z`` of drawn requests, and continues; thread ``actds-attend`` keeps their keys and values in host
memory, computes the attention of every n-th step, holds what it gives against ``z``, and sends the
writer a line per head. The engine's own cache is never read. What cannot be followed (a key that
was never seen, memory at its bound) has no line; nothing waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actds.errors import ActdsError
from actds.format.tables import ROLES
from actds.format.telemetry import Attending
from actds_writers.capture import op
from actds_writers.capture.hooks import hook_specs, n_heads_of
from actds_writers.capture.scheme import LIMITS, Scheme, full_config, largest, sinks_of
from actds_writers.capture.stages import Step
from actds_writers.capture.taps import ModelConfig, StreamForm
from actds_writers.capture.transfer import Copier, Mark
from actds_writers.ipc.messages import HookSpec, IntArray, StepAttention, intervals

log = logging.getLogger("actds")
KINDS = "qkvz"
N_WAITING = 256
"""Steps that wait for the thread at most, with the rows of one largest step at most; the requests
of further ones are not followed any more."""
MAX_NBYTES = 1 << 30
"""Of keys and values; requests that find no room are not followed."""
N_OF_MEAN = 256
"""Heads of steps, from which their mean distance from ``z`` has to be below its limit as well."""
CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class _Taken:
    """The rows of drawn requests of a step, on the device.

    Args:
        blocks: as of the hooks' buffers, ``(n_hooks, n, d_model)``.
    """

    step: int
    requests: IntArray
    n_rows: IntArray
    prompt_lens: IntArray
    n_seen: int
    seen: torch.Tensor
    positions: torch.Tensor
    blocks: tuple[torch.Tensor, ...]
    done: Mark


@dataclass
class _Context:
    """The keys and values of a request so far, by layer; ``n`` positions from 0."""

    prompt_len: int
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    n: int = 0
    looked: int = -1
    roles: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in (*self.keys, *self.values))


def attention_hooks(
    layers: Sequence[int], config: ModelConfig, computed: Any
) -> tuple[HookSpec, ...]:
    """Return the hooks that attention is computed from; raises as ``hook_specs``."""
    return hook_specs([(kind, layer) for layer in layers for kind in KINDS], config, computed)


class Looker:
    """Follows the attention of one worker's model.

    Args:
        layers: to look at.
        folder: of the model's weights, for learned sinks.
        max_rows: rows of the largest step, padding included.
        start: number of the first of its hooks, behind those that are stored.

    Raises:
        ActdsError: E007 a model without these hooks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[int],
        folder: Path,
        *,
        config: ModelConfig,
        computed: Any,
        device: torch.device,
        max_rows: int,
        form: StreamForm,
        gather: op.Gather | None,
        start: int,
    ) -> None:
        self.hooks = attention_hooks(layers, config, computed)
        self.limit = LIMITS[computed]
        self.buffers = op.install(
            model,
            self.hooks,
            max_rows=max_rows,
            device=device,
            form=form,
            gather=gather,
            start=start,
        )
        whole = full_config(config, folder)
        widths = {hook.name: hook.d_model for hook in self.hooks}
        self._schemes: dict[int, Scheme] = {}
        for layer in layers:
            sinks = sinks_of(folder, layer, n_heads_of(whole))
            q, k = widths[f"q.{layer}"], widths[f"k.{layer}"]
            try:
                self._schemes[layer] = Scheme.of(whole, layer, q, k, sinks)
            except ValueError as error:
                expected = f"those of {n_heads_of(whole)} heads"
                raise ActdsError("E007", f"q.{layer}", got=str(error), expected=expected) from None
        self._run: _Run | None = None

    @property
    def nbytes(self) -> int:
        """Return the memory on the device: the buffers, and copies of a step."""
        return 2 * self.buffers.nbytes

    def begin(
        self,
        attending: Attending,
        send: Callable[[StepAttention], None],
        fail: Callable[[ActdsError], None],
    ) -> None:
        """Follow the requests of a run.

        Args:
            send: gives the writer the lines of a step.
            fail: is told why nothing is looked at any more.
        """
        self._run = _Run(self, attending, send, fail)

    def learn(self, request: int, roles: str) -> None:
        """Note, before the first step of a request, the packed roles of its prompt."""
        if self._run is not None:
            self._run.learn(request, roles)

    def take(self, step: Step, positions: torch.Tensor) -> None:
        """Copy the rows of a step that just ran, where a request is drawn."""
        if self._run is not None:
            self._run.take(step, positions)

    def close(self) -> None:
        """Send what waits, and end the run."""
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def scheme(self, layer: int) -> Scheme:
        return self._schemes[layer]

    def rows(self, blocks: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the rows ``(n, d_model)`` of each hook."""
        places = zip(self.hooks, self.buffers.layout.places, strict=True)
        return {hook.name: blocks[block][place] for hook, (block, place) in places}


class _Run:
    """The requests of one run, and the thread that follows them."""

    def __init__(
        self,
        looker: Looker,
        attending: Attending,
        send: Callable[[StepAttention], None],
        fail: Callable[[ActdsError], None],
    ) -> None:
        self._looker, self._attending, self._send, self._fail = looker, attending, send, fail
        self._is_drawn: dict[int, bool] = {}
        self._roles: dict[int, str] = {}
        self._contexts: dict[int, _Context | None] = {}
        self._ended: list[int] = []
        self._nbytes, self._distance, self._n_heads = 0, 0.0, 0
        self._waiting_nbytes, self._counting = 0, threading.Lock()
        self._has_failed = False
        self._waiting: queue.Queue[_Taken | tuple[int, ...] | None] = queue.Queue(N_WAITING)
        self._thread = threading.Thread(target=self._follow, name="actds-attend", daemon=True)
        self._thread.start()

    # the engine's thread ----------------------------------------------------------------------

    def learn(self, request: int, roles: str) -> None:
        if roles and not self._has_failed and self._draws(request):
            self._roles[request] = roles

    def take(self, step: Step, positions: torch.Tensor) -> None:
        if self._has_failed:
            return
        self._ended += [n for n in step.finished if self._is_drawn.pop(n, False)]
        drawn = np.array([self._draws(number) for number in step.requests.tolist()], bool)
        if not (self._ended or drawn.any()):
            return
        looker = self._looker
        try:
            if self._ended:
                self._waiting.put_nowait(tuple(self._ended))
                self._ended.clear()
            if not drawn.any():
                return
            rows = torch.from_numpy(np.flatnonzero(np.repeat(drawn, step.n_rows)))
            self._reserve(len(rows))
            rows = rows.to(looker.buffers.device, non_blocking=True)
            self._waiting.put_nowait(
                _Taken(
                    step.step,
                    step.requests[drawn],
                    step.n_rows[drawn],
                    step.prompt_lens[drawn],
                    int(step.n_rows.sum()),
                    looker.buffers.seen.clone(),
                    positions.index_select(0, rows),
                    tuple(block.index_select(1, rows) for block in looker.buffers.blocks),
                    Mark(looker.buffers.device),
                )
            )
        except queue.Full:
            pass  # a request without these positions has no further line

    def _reserve(self, n_rows: int) -> None:
        """Count rows that wait, below 0 those that do no more; raises ``queue.Full``."""
        buffers = self._looker.buffers
        with self._counting:
            nbytes = self._waiting_nbytes + n_rows * buffers.layout.row_nbytes
            if n_rows > 0 and (nbytes > buffers.nbytes or self._waiting.full()):
                raise queue.Full
            self._waiting_nbytes = nbytes

    def _draws(self, request: int) -> bool:
        drawn = self._is_drawn.get(request)
        if drawn is None:
            drawn = self._is_drawn[request] = bool(self._attending.draws([request])[0])
        return drawn

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    # the following thread ---------------------------------------------------------------------

    def _follow(self) -> None:
        copier = Copier(self._looker.buffers.device)
        while (taken := self._waiting.get()) is not None:
            try:
                if self._has_failed:
                    pass
                elif isinstance(taken, _Taken):
                    self._add(taken, copier)
                else:
                    for request in taken:
                        self._forget(request)
            except Exception as error:  # the engine goes on whatever becomes of a look
                self._has_failed = True
                self._contexts.clear()
                if not isinstance(error, ActdsError):
                    words = repr(error)[:500]
                    error = ActdsError("E901", "attention", got=words, expected="a look")
                self._fail(error)
            finally:
                if isinstance(taken, _Taken):
                    self._reserve(-len(taken.positions))

    def _forget(self, request: int) -> None:
        context = self._contexts.pop(request, None)
        self._nbytes -= 0 if context is None else context.nbytes
        self._roles.pop(request, None)

    def _add(self, taken: _Taken, copier: Copier) -> None:
        tensors = (taken.seen, taken.positions, *taken.blocks)
        host = [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
        flat = [t.view(1, 1, -1) for t in host]
        copier.copy(flat, [t.reshape(1, 1, -1) for t in tensors], None, taken.done)
        if int(host[0].min()) < taken.n_seen:
            got = f"{int(host[0].min())} rows at one hook of attention"
            place, expected = f"step {taken.step}", f"{taken.n_seen} scheduled rows"
            raise ActdsError("E501", place, got=got, expected=expected)
        positions, rows = host[1].numpy(), self._looker.rows(host[2:])
        lines: list[dict[str, Any]] = []
        stops = np.cumsum(taken.n_rows)
        for request, n, stop, prompt_len in zip(
            taken.requests.tolist(),
            taken.n_rows.tolist(),
            stops.tolist(),
            taken.prompt_lens.tolist(),
            strict=True,
        ):
            some = slice(stop - n, stop)
            if request not in self._contexts:
                self._contexts[request] = _Context(prompt_len, roles=self._roles_of(request))
            context = self._contexts[request]
            if context is None or not self._extend(context, rows, some, positions[some]):
                self._give_up(request)
                continue
            lines += self._look(request, context, taken.step, rows, some, positions[some])
        if lines:
            names = lines[0].keys()
            self._send(StepAttention(taken.step, {n: [line[n] for line in lines] for n in names}))

    def _roles_of(self, request: int) -> np.ndarray | None:
        places = intervals(self._roles.pop(request, ""))
        if not places:
            return None
        roles = np.full(max(stop for _, stop, _ in places), -1, np.int8)
        for start, stop, role in places:
            roles[start:stop] = ROLES.index(role)
        return roles

    def _give_up(self, request: int) -> None:
        self._forget(request)
        self._contexts[request] = None

    def _extend(
        self,
        context: _Context,
        rows: Mapping[str, torch.Tensor],
        some: slice,
        positions: np.ndarray,
    ) -> bool:
        """Add keys and values at positions; return whether all up to these are there."""
        first, stop = int(positions[0]), int(positions[-1]) + 1
        if first > context.n or stop - first != len(positions):
            return False
        before = context.nbytes
        for n, layer in enumerate(self._attending.layers):
            for kept, kind in ((context.keys, "k"), (context.values, "v")):
                new = rows[f"{kind}.{layer}"][some]
                if n == len(kept):
                    kept.append(new.new_empty((0, new.shape[1])))
                if len(kept[n]) < stop:
                    longer = new.new_empty((max(2 * len(kept[n]), stop, 64), new.shape[1]))
                    longer[: context.n] = kept[n][: context.n]
                    kept[n] = longer
                kept[n][first:stop] = new
        context.n = max(context.n, stop)  # what is computed again after a preemption is the same
        self._nbytes += context.nbytes - before
        return self._nbytes <= MAX_NBYTES

    def _look(
        self,
        request: int,
        context: _Context,
        step: int,
        rows: Mapping[str, torch.Tensor],
        some: slice,
        positions: np.ndarray,
    ) -> list[dict[str, Any]]:
        """Return the lines of the positions that are looked at, of all layers."""
        depth = positions - context.prompt_len
        at = (depth >= 0) & (depth % self._attending.every == 0) & (positions > context.looked)
        if not at.any():
            return []
        chosen = np.flatnonzero(at) + some.start
        positions = positions[at]
        context.looked = int(positions[-1])
        lines: list[dict[str, Any]] = []
        for n, layer in enumerate(self._attending.layers):
            q, z = (rows[f"{kind}.{layer}"][chosen].float().numpy() for kind in "qz")
            k, v = (kept[n][: context.n].float().numpy() for kept in (context.keys, context.values))
            about = {"request": request, "step": step, "layer": layer}
            lines += self._lines(about, context, (q, k, v, z), positions)
        return lines

    def _lines(
        self,
        about: Mapping[str, int],
        context: _Context,
        rows: Sequence[np.ndarray],
        positions: IntArray,
    ) -> list[dict[str, Any]]:
        scheme, lines = self._looker.scheme(about["layer"]), list[dict[str, Any]]()
        q, k, v, z = rows
        for block, low, shares in scheme.attend(q, k, positions):
            keys = np.arange(low, low + shares.shape[2])
            self._prove(scheme.distance(shares, v[keys], z[block]), about, positions[block])
            bits, sinks = scheme.bits(shares)
            parts = shares @ self._parts(context, keys)
            top = largest(shares, low)
            first = scheme.first(positions[block])
            for row, head in np.ndindex(*shares.shape[:2]):
                places = top[row, head][top[row, head] >= 0]
                of_top = shares[row, head, places - low]
                order = np.argsort(-of_top, kind="stable")
                position = int(positions[block][row])
                masses = [*parts[row, head, :3].tolist(), float(sinks[row, head])]
                names = ("first", "prompt", "generated", "sinks")
                lines.append(
                    {
                        **about,
                        "position": position,
                        "head": head,
                        "keys": position - int(first[row]) + 1,
                        "entropy": float(bits[row, head]),
                        **dict(zip(names, masses, strict=True)),
                        "roles": [] if context.roles is None else parts[row, head, 3:].tolist(),
                        "top": places[order].tolist(),
                        "shares": of_top[order].tolist(),
                    }
                )
        return lines

    def _parts(self, context: _Context, keys: IntArray) -> np.ndarray:
        """Return which keys are position 0, other ones of the prompt, generated; and of each role.

        Roles are those of the prompt without position 0, ``(n, 3 + roles)`` float32.
        """
        is_given, is_first = keys < context.prompt_len, keys == 0
        columns = [is_first, is_given & ~is_first, ~is_given]
        if context.roles is not None:
            of = np.full(len(keys), -1)
            inside = keys < len(context.roles)
            of[inside] = context.roles[keys[inside]]
            columns += [(of == n) & is_given & ~is_first for n in range(len(ROLES))]
        return np.column_stack(columns).astype(np.float32)

    def _prove(self, distance: np.ndarray, about: Mapping[str, int], positions: IntArray) -> None:
        """Raise E014 unless the attention gives what the heads gave out."""
        limit = self._looker.limit
        self._distance += float(distance.sum(dtype=np.float64))
        self._n_heads += distance.size
        mean = self._distance / self._n_heads
        at = float(np.nan_to_num(distance, nan=np.inf).max())
        if at <= limit and (self._n_heads < N_OF_MEAN or mean <= limit / 4):
            return
        place = f"layer {about['layer']}, request {about['request']}, position {positions[0]}"
        raise ActdsError(
            "E014",
            f"attention of {place}",
            got=f"softmax(q k) v is {at:.2g} from z, {mean:.2g} in the mean",
            expected=f"{limit:g} at most: this is not the attention of the model",
            next_step="Harvest without attention, or report it with the model's configuration. "
            "What gates or norms z cannot be proved.",
        )
