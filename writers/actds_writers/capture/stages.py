"""Stages 1 and 2 of the data path: from the hooks' buffers to the host ring.

The engine's thread copies a step into the staging ring on the device and continues. Thread
``actds-identify`` reads which request and position each row is and sends the readouts through a
lane that no overflow policy touches: an engine that serves traffic gives up a whole step where
there is no room for them. Thread ``actds-move`` moves the rows into the host ring.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from actds.errors import ActdsError
from actds.format import tables
from actds.format.readouts import Readouts
from actds_writers.capture.op import TORCH_TYPES, HookBuffers
from actds_writers.capture.thinning import Draws, controller_of
from actds_writers.capture.transfer import (
    CLOSE_TIMEOUT_S,
    Copier,
    Entry,
    Handover,
    HostMemory,
    Lane,
    Mark,
    typed,
)
from actds_writers.ipc.link import Link, QueuePage, RingSpace, Sender, aligned, create_memory
from actds_writers.ipc.messages import (
    BoolArray,
    Fact,
    HookSpec,
    IntArray,
    LogitsRead,
    Stall,
    StepExecuted,
    StepLost,
    StepRows,
    WorkerHello,
)
from actds_writers.sampling import POLICIES, HookNames, LeftOut, Regime
from actds_writers.sizing import Geometry, Sizes, WorkerMemory, narrow_nbytes, worker_memory


@dataclass(frozen=True)
class Step:
    """A step that the model just ran, from the engine's host state.

    Args:
        requests: number of each scheduled request, in row order.
        left_out: what the sampling rules leave out of each; empty when they leave out nothing.
        finished: requests that ended before this step.
        duration_ns: how long the model ran, as far as the host can tell.
        kernel_mode: ``eager``, ``compiled``, ``piecewise``, ``full``, or ``None``: not known.
        began: mark before the model ran, for the time on the device.
        lost: why no row of the step may be stored, whatever the policy.
        share: probability of the step's rows, ``None`` where every row is stored; ``inclusion``,
            of the rows of each request, ``(n_requests,)``.
        interventions: as in ``StepRows``, of every computed row.
    """

    step: int
    requests: IntArray
    n_rows: IntArray
    prompt_lens: IntArray
    left_out: tuple[LeftOut, ...]
    finished: tuple[int, ...]
    duration_ns: int
    kernel_mode: str | None
    began: Mark | None = None
    lost: str | None = None
    share: float | None = None
    inclusion: np.ndarray | None = None
    interventions: np.ndarray | None = None

    def kept(self, positions: IntArray) -> BoolArray | None:
        if all(out.takes_all for out in self.left_out):
            return None
        prefill = np.array([out.prefill is None for out in self.left_out])
        decode = np.array([out.decode is None for out in self.left_out])
        columns = (self.prompt_lens, prefill, decode)
        edge, in_prompt, behind = (np.repeat(values, self.n_rows) for values in columns)
        mask: BoolArray = np.where(positions < edge, in_prompt, behind)
        first = np.cumsum(self.n_rows) - self.n_rows
        for row, n, out in zip(first.tolist(), self.n_rows.tolist(), self.left_out, strict=True):
            if out.ranges is not None:
                of_request = positions[row : row + n, None]
                starts, stops = np.array(out.ranges, np.int64).reshape(-1, 2).T
                inside = (of_request >= starts) & (of_request < stops)
                mask[row : row + n] &= inside.any(axis=1)
        return mask

    def cut(self, n_cut: Mapping[int, int]) -> tuple[Step, BoolArray | None]:
        """Return the step without the last rows of some requests, and which rows stay."""
        if not n_cut:
            return self, None
        cut = np.array([n_cut.get(request, 0) for request in self.requests.tolist()], np.int64)
        left = self.n_rows - cut
        some = np.flatnonzero(left)
        per_request = np.repeat(np.cumsum(self.n_rows) - cut, self.n_rows)
        stays: BoolArray = np.arange(int(self.n_rows.sum())) < per_request
        step = replace(
            self,
            requests=self.requests[some],
            n_rows=left[some],
            prompt_lens=self.prompt_lens[some],
            left_out=tuple(self.left_out[i] for i in some.tolist()) if self.left_out else (),
            inclusion=None if self.inclusion is None else self.inclusion[some],
        )
        return step, stays

    @property
    def hooks(self) -> tuple[HookNames | None, ...]:
        chosen = tuple(out.hooks for out in self.left_out)
        return chosen if any(chosen) else ()

    @property
    def keeps_nothing(self) -> bool:
        return bool(self.left_out) and all(
            out.prefill is not None and out.decode is not None for out in self.left_out
        )


@dataclass(frozen=True)
class _Sampled:
    requests: IntArray
    values: torch.Tensor
    done: Mark


@dataclass
class _Moving:
    """A step between the engine's thread and the writer.

    Args:
        n_cut: by request, the last rows that are not handed over.
        index: staged rows that are stored, ``None`` for all.
        changed: bool ``(1, 1, 1)`` on the device: whether its weights are not those of the run,
            ``None`` where they are not watched.
    """

    step: Step
    entry: Entry
    n_rows: int
    narrow: int
    done: Mark
    t_ns: int
    n_cut: Mapping[int, int] = field(default_factory=dict)
    message: StepRows | None = None
    sampled: _Sampled | None = None
    index: IntArray | None = None
    changed: torch.Tensor | None = None
    identified: threading.Event = field(default_factory=threading.Event)


def memory_of(
    link: Link,
    hooks: Sequence[HookSpec],
    device: torch.device,
    max_rows: int,
    in_flight: int,
    *,
    n_readouts: int,
    padding: int = 0,
) -> WorkerMemory:
    """Return the memory that a worker with these hooks reserves; arguments as of ``Stages``.

    ``n_readouts`` are values per row and hook, ``padding`` further rows of the hooks' buffers.
    """
    rings = (link.ring_nbytes, link.staging_nbytes, link.lane_nbytes)
    on_gpu = device.type == "cuda"
    sizes = Sizes(max_rows, 0, *rings, in_flight=in_flight, padding=padding, on_gpu=on_gpu)
    return worker_memory(Geometry.of(hooks, n_readouts), sizes)


class Stages:
    """Moves the steps of one worker from its hooks to writer and census.

    Raises E503 when memory cannot be reserved, E506 when no process listens.

    Args:
        hooks: at least one, all of one pipeline stage; the writer joins the stages.
        max_rows: rows of the largest step, padding excluded.
        in_flight: most steps that are held at a time.
    """

    def __init__(
        self,
        link: Link,
        buffers: HookBuffers,
        hooks: tuple[HookSpec, ...],
        max_rows: int,
        in_flight: int = 1,
    ) -> None:
        self._buffers, self._hooks, self._max_rows = buffers, hooks, max_rows
        self.stage = stage = hooks[0].stage
        self._layout, self._n_hooks = buffers.layout, len(hooks)
        self._width = buffers.readouts.shape[2]
        self._device = buffers.device
        self._row_nbytes = self._layout.row_nbytes
        self._readout_nbytes = 4 * self._n_hooks * self._width
        self._error: ActdsError | None = None
        self.n_engine_waits = self.beside_nbytes = 0

        memory = memory_of(link, hooks, self._device, max_rows, in_flight, n_readouts=self._width)
        self._memory = replace(memory, hooks=buffers.nbytes)
        self._staging = RingSpace(memory.staging)
        self._narrow = RingSpace(memory.narrow)
        self._narrow_freed = threading.Condition()
        self._staging_memory = self._device_bytes(memory.staging)
        self._narrow_memory = self._device_bytes(memory.narrow)
        self.ring_path = Path(link.folder) / f"ring-{stage}"
        self.ring_nbytes = memory.ring
        self._ring = RingSpace(memory.ring)
        self._host = HostMemory(create_memory(self.ring_path, memory.ring), self._device)
        queues = QueuePage.beside(self.ring_path, new=True)
        self._is_watched = link.profile_path is not None
        self.lane: Lane | None = None
        if self._width:
            connection = link.connect("readouts", str(stage))
            path = Path(link.folder) / f"lane-{stage}"
            room = None if link.may_wait else aligned(self._readout_nbytes * max_rows)
            self.lane = Lane(connection, path, memory.lane, room)

        design, policy = link.settings.design(link.run), POLICIES[link.settings.overflow]
        self._draws: Draws | None = None
        self._probes: list[tuple[int, int]] = []
        """Number of the hook, and column of the readouts, of each probe that rules read."""
        if design is not None:
            names = [hook.name for hook in hooks]
            readouts = Readouts.from_field(link.readouts, "readouts")
            first = self._width - (0 if readouts is None else readouts.n_probes)
            self._probes = [(names.index(hook), first + k) for hook, k in design.probes]
            self._draws = Draws(design, controller_of(link.settings, design))
            always = link.settings.always is not None
            if link.settings.reserves and not (always and link.live):
                policy = replace(policy, staging_is_full=POLICIES["thin"].staging_is_full)
        census = link.connect("census", "worker")
        self._census = Sender(census) if link.live else census
        self._census_lock = threading.Lock()
        self.handover = Handover(
            link.connect("writer", "worker"),
            self._staging,
            self._ring,
            policy,
            lambda step, reason: self._tell_census(StepLost(step, reason, stage)),
            queues.read,
            serves=link.live,
        )
        self._held: deque[_Moving] = deque()
        self._unidentified: queue.SimpleQueue[_Moving | None] = queue.SimpleQueue()
        self._unmoved: queue.SimpleQueue[_Moving | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (
                ("actds-identify", self._identify_all),
                ("actds-move", self._move_all),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def nbytes(self) -> int:
        """Return the memory of both stages, of the hooks' buffers, and of what is beside them."""
        return self._memory.nbytes + self.beside_nbytes

    @property
    def waiting(self) -> frozenset[str]:
        return frozenset(self.handover.waiting)

    def introduce(self, facts: tuple[Fact, ...]) -> None:
        of_rings = (
            Fact("capture.ring_nbytes", self.ring_nbytes, "observed"),
            Fact("capture.staging_nbytes", self._staging.capacity, "observed"),
        )
        lane = self.lane
        self.handover.send(
            WorkerHello(
                self._hooks,
                (*facts, *of_rings),
                str(self.ring_path),
                self.ring_nbytes,
                self._max_rows,
                str(lane.path) if lane else None,
                lane.nbytes if lane else 0,
                self.nbytes,
            )
        )

    def learn(self, request: int, regime: Regime) -> None:
        """Note, before the first step of a request, what rules for shares ask of it."""
        if self._draws is not None:
            self._draws.learn(request, regime)

    def fail(self, error: ActdsError) -> None:
        self._error = self._error or error
        self.handover.send(error)

    def hand_over(
        self,
        step: Step,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        waits: bool = False,
        changed: torch.Tensor | None = None,
    ) -> None:
        """Take the rows of the step that just ran; returns when the hooks' buffers are free.

        Raises of this or an earlier step: E501 rows that differ from the schedule, E502 the writer
        is gone.

        Args:
            token_ids: token fed at each row, ``(n,)``, from the buffer that the model read.
            waits: whether they stay here until ``settle``.
            changed: as in ``_Moving``.
        """
        self._check()
        n = int(step.n_rows.sum())
        narrow, stall = self._take_narrow(step.step, n)
        ids, seen, readouts = self._narrow_views(self._narrow_memory, narrow, n)
        ids[0].copy_(token_ids[:n])
        ids[1].copy_(positions[:n])
        seen.copy_(self._buffers.seen)
        readouts.copy_(self._buffers.readouts[:, :n])
        nbytes = 0 if step.keeps_nothing else n * self._row_nbytes
        if self._draws is not None:
            fill, size = self.handover.fill(), self.handover.share_of_ring(nbytes)
            drawn = self._draws.of_step(step.requests, step.finished, fill, size)
            step = replace(step, share=drawn[0], inclusion=drawn[1])
        try:
            share = (
                1.0 if step.inclusion is None else float(step.inclusion @ step.n_rows) / max(n, 1)
            )
            entry = self.handover.admit(nbytes, step.step, step.lost, share)
        except ActdsError as error:
            raise self._error or error from None
        if stall is not None:
            entry.stalls.insert(0, stall)
        self.n_engine_waits += bool(entry.stalls)
        if entry.slot is not None:
            for staged, rows in zip(
                self._rows_views(self._staging_memory, entry.slot, n),
                self._buffers.blocks,
                strict=True,
            ):
                staged.copy_(rows[:, :n])
        done = Mark(self._device, timed=True)
        moving = _Moving(step, entry, n, narrow, done, time.time_ns(), changed=changed)
        if waits:
            self._held.append(moving)
        else:
            self._release(moving)

    def add_sampled(self, step: int, requests: IntArray, values: torch.Tensor) -> None:
        """Add to a held step what the logits said of the tokens that were sampled in it.

        Args:
            requests: of each row, -1 for one that is not reported.
            values: as ``Reading.of_tokens`` returns them.
        """
        for moving in self._held:
            if moving.step.step == step:
                moving.sampled = _Sampled(requests, values, Mark(self._device))

    def is_sampled(self, step: int) -> bool:
        return any(m.sampled is not None for m in self._held if m.step.step == step)

    def settle(self, step: int, n_cut: Mapping[int, int]) -> None:
        """Release a held step; raises E501 when another one is the next.

        Args:
            n_cut: by request number, the last rows of it that are not handed over: they were
                computed past an end, or are of rejected drafts.
        """
        if not self._held or self._held[0].step.step != step:
            error = ActdsError(
                "E501",
                f"step {step}",
                got=f"{[moving.step.step for moving in self._held]} held",
                expected="the results of the oldest held step",
            )
            self.fail(error)
            raise error
        moving = self._held.popleft()
        moving.n_cut = n_cut
        self._release(moving)

    def _release(self, moving: _Moving) -> None:
        self._unidentified.put(moving)
        self._unmoved.put(moving)

    def abandon(self) -> None:
        """Release the steps whose results nobody will tell, without a row."""
        while self._held:
            step = self._held[0].step
            n_cut = dict(zip(step.requests.tolist(), step.n_rows.tolist(), strict=True))
            self.settle(step.step, n_cut)

    def drain(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._error is None:
            lane_is_idle = self.lane is None or not self.lane.depth
            if self.handover.is_idle and not self._narrow.depth and lane_is_idle:
                return True
            time.sleep(0.005)
        return False

    def close(self) -> None:
        """Close the connections, by which the writer learns that no step follows."""
        self._unidentified.put(None)
        self._unmoved.put(None)
        self.handover.close()
        if self.lane is not None:
            self.lane.close()
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._host.close()
            # The next run of the engine reserves as much while this object may still be held.
            self._staging_memory = self._narrow_memory = self._device_bytes(0)
        with self._census_lock:
            self._census.close()

    # the identifying thread -------------------------------------------------------------------

    def _identify_all(self) -> None:
        copier = Copier(self._device)
        host = torch.empty(self._memory.identified, dtype=torch.uint8)
        if self._device.type == "cuda":
            host = host.pin_memory()
        while (moving := self._unidentified.get()) is not None:
            try:
                self._identify(moving, copier, host)
            except Exception as error:  # the engine must not wait for ever
                self._give_up(error)
            finally:
                with self._narrow_freed:
                    self._narrow.free(moving.narrow)
                    self._narrow_freed.notify_all()
                moving.identified.set()

    def _identify(self, moving: _Moving, copier: Copier, host: torch.Tensor) -> None:
        (step, stays), n = moving.step.cut(moving.n_cut), moving.n_rows
        nbytes = self._narrow_nbytes(n)
        whole = typed(self._narrow_memory, moving.narrow, (1, 1, nbytes), torch.uint8)
        _, staged_seen, _ = self._narrow_views(self._narrow_memory, moving.narrow, n)
        ids, seen, readouts = self._narrow_views(host, 0, n)
        seen.fill_(-1)
        copier.copy([host[:nbytes].view(1, 1, nbytes)], [whole], None, moving.done, staged_seen)
        # Padding rows come behind the scheduled ones, so a hook may see more, never fewer.
        if int(seen.min()) < n:
            raise ActdsError(
                "E501",
                f"step {step.step}",
                got=f"{int(seen.min())} rows at one hook",
                expected=f"{n} scheduled rows",
            )
        token_ids, positions = ids[0].numpy().copy(), ids[1].numpy().copy()
        marks = step.interventions
        if stays is not None:
            token_ids, positions = token_ids[stays], positions[stays]
            marks = None if marks is None else marks[stays]
        chosen = wanted = kept = step.kept(positions)
        inclusion, draw = self._draw(step, positions)
        if draw is not None:
            wanted, kept = draw if chosen is None else (chosen & draw[0], chosen & draw[1])
        moving.index = _index(stays, kept)
        moving.message = StepRows(
            step=step.step,
            offset=0,
            nbytes=0,
            requests=step.requests,
            n_rows=step.n_rows,
            prompt_lens=step.prompt_lens,
            positions=positions,
            token_ids=token_ids,
            finished=step.finished,
            kept=kept,
            inclusion=inclusion,
            wanted=wanted,
            interventions=marks,
            hooks=step.hooks,
            t_ns=moving.t_ns,
        )
        entropy = None
        if moving.sampled is not None:
            bits = self._bits(moving.sampled, copier)
            if self._is_watched:
                entropy = _entropy(step, moving.sampled.requests, bits)
        if self.lane is not None:
            columns = (np.repeat(of, step.n_rows) for of in (step.requests, step.prompt_lens))
            requests, prompt_lens = columns
            rows: list[IntArray] = [requests, positions, token_ids, prompt_lens]
            index = _index(stays, chosen)  # of rows that are not drawn, too
            of_lane = readouts if index is None else readouts[:, torch.from_numpy(index)]
            if chosen is not None:
                rows = [column[chosen] for column in rows]
                entropy = None if entropy is None else entropy[chosen]
            if not self.lane.put(step.step, rows, of_lane, step.finished, entropy):
                self.handover.give_up_step(moving.entry)
        if moving.sampled is not None:
            if stays is not None and self._probes:
                readouts = readouts[:, torch.from_numpy(stays)]
            self._tell_sampled(step, positions, readouts, moving.sampled.requests, bits)
        if moving.changed is not None:
            flag = torch.empty(1, 1, 1, dtype=torch.bool, pin_memory=self._device.type == "cuda")
            copier.copy([flag], [moving.changed], None, moving.done)
            if bool(flag):
                self.handover.lose(moving.entry, tables.CHANGED_WEIGHTS)
        duration = moving.done.nanoseconds_since(step.began) if step.began else None
        self._executed(step, duration or step.duration_ns, max(int(seen.max()), n))

    def _draw(
        self, step: Step, positions: IntArray
    ) -> tuple[np.ndarray | None, tuple[BoolArray, BoolArray] | None]:
        """Return the inclusion of each row, and whether rules alone draw it, and whether it is.

        The latter are ``None`` where every row is drawn.
        """
        if self._draws is None or step.inclusion is None:
            return None, None
        self._draws.forget(step.finished)
        columns = (step.requests, step.prompt_lens, step.inclusion)
        requests, prompt_lens, inclusion = (np.repeat(column, step.n_rows) for column in columns)
        shares = self._draws.of_rows(requests, positions, prompt_lens)
        inclusion = inclusion * shares
        if (inclusion == 1).all():
            return inclusion, None
        numbers = self._draws.design.numbers(requests, positions)
        return inclusion, (numbers < shares, numbers < inclusion)

    def _bits(self, sampled: _Sampled, copier: Copier) -> np.ndarray:
        on_cuda = self._device.type == "cuda"
        host = torch.empty(sampled.values.shape, dtype=torch.int32, pin_memory=on_cuda)
        copier.copy([host], [sampled.values], None, sampled.done)
        return host.numpy()

    def _tell_sampled(
        self,
        step: Step,
        positions: IntArray,
        readouts: torch.Tensor,
        of: IntArray,
        bits: np.ndarray,
    ) -> None:
        """Tell the census what the logits said: of which requests, -1 for none, and their bits."""
        bits, requests = bits[of >= 0], of[of >= 0]
        values = np.ascontiguousarray(bits[:, 1:]).view(np.float32)
        ids = bits[:, 0].astype(np.int64)
        if self._draws is not None:
            last = dict(zip(step.requests.tolist(), np.cumsum(step.n_rows) - 1, strict=True))
            has_rows = np.array([request in last for request in requests.tolist()], bool)
            rows = np.array([last[request] for request in requests[has_rows].tolist()], np.int64)
            scores = np.full((len(requests), len(self._probes)), np.nan, np.float32)
            for nth, (hook, column) in enumerate(self._probes):
                scores[has_rows, nth] = readouts[hook, rows, column].numpy()
            known = np.concatenate([values[:, :1], scores], axis=1)
            self._draws.sampled(requests[has_rows], positions[rows] + 1, known[has_rows])
            values = np.concatenate([values, scores], axis=1)
        self._tell_census(LogitsRead(step.step, requests, ids, values.ravel()))

    # the moving thread ------------------------------------------------------------------------

    def _move_all(self) -> None:
        copier = Copier(self._device)
        while (moving := self._unmoved.get()) is not None:
            moving.identified.wait()
            if moving.message is None:
                return  # it could not be identified; the engine's next step raises why
            try:
                self._move(moving, moving.message, copier)
            except Exception as error:  # the engine must not wait for ever
                self._give_up(error)
                return

    def _move(self, moving: _Moving, message: StepRows, copier: Copier) -> None:
        entry, n_kept = moving.entry, message.n_kept
        nbytes = n_kept * self._row_nbytes
        offset = self.handover.place(entry, nbytes)
        if offset is not None and entry.slot is not None:
            index = None if moving.index is None else torch.from_numpy(moving.index)
            targets = self._rows_views(self._host.bytes, offset, n_kept)
            sources = self._rows_views(self._staging_memory, entry.slot, moving.n_rows)
            copier.copy(targets, sources, index, moving.done)
        if offset is not None:
            message = replace(message, offset=offset, nbytes=nbytes)
        self.handover.moved(entry, message)

    # ------------------------------------------------------------------------------------------

    def _executed(self, step: Step, duration_ns: int, padded: int) -> None:
        stage1, stage2 = self.handover.depths
        queues = self.handover.queues()
        self._tell_census(
            StepExecuted(
                step=step.step,
                duration_ns=duration_ns,
                kernel_mode=step.kernel_mode,
                padded_tokens=padded,
                queue_depth_stage1=stage1,
                queue_depth_stage2=stage2,
                queue_depth_readouts=self.lane.depth if self.lane else None,
                inclusion=step.share,
                stage=self.stage,
                **({} if queues is None else queues._asdict()),
            )
        )

    def _tell_census(self, message: object) -> None:
        with self._census_lock:
            try:
                self._census.send(message)
            except OSError:
                raise ActdsError(
                    "E505", "census", got="the census process is gone", expected="a census"
                ) from None

    def _give_up(self, error: Exception) -> None:
        """Note what ended a thread and tell the writer; the engine's next step raises it."""
        if not isinstance(error, ActdsError):
            words = repr(error)[:500]
            error = ActdsError("E901", "stages", got=words, expected="a step handed over")
        with suppress(ActdsError):  # the writer may be what is gone
            self.fail(error)
        self._error = self._error or error
        self.handover.end_waiting()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _take_narrow(self, step: int, n: int) -> tuple[int, Stall | None]:
        nbytes = self._narrow_nbytes(n)
        with self._narrow_freed:
            began, began_ns, depth = time.monotonic_ns(), time.time_ns(), self._narrow.depth
            waited = False
            while (offset := self._narrow.reserve(nbytes)) is None:
                waited = True
                self._narrow_freed.wait(0.1)
                self._check()
        duration = time.monotonic_ns() - began
        return offset, Stall("staging", began_ns, duration, depth, step) if waited else None

    def _device_bytes(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _narrow_nbytes(self, n: int) -> int:
        return narrow_nbytes(n, self._n_hooks, self._readout_nbytes)

    def _narrow_views(
        self, memory: torch.Tensor, offset: int, n: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return token ids over positions ``(2, n)``, rows seen ``(n_hooks,)``, and readouts."""
        seen_at = offset + aligned(16 * n)
        readouts_at = seen_at + aligned(8 * self._n_hooks)
        return (
            typed(memory, offset, (2, n), torch.int64),
            typed(memory, seen_at, (self._n_hooks,), torch.int64),
            typed(memory, readouts_at, (self._n_hooks, n, self._width), torch.float32),
        )

    def _rows_views(self, memory: torch.Tensor, offset: int, n: int) -> list[torch.Tensor]:
        return [
            typed(memory, offset + n * b.before_nbytes, b.shape(n), TORCH_TYPES[b.dtype])
            for b in self._layout.blocks
        ]


def _entropy(step: Step, of: IntArray, bits: np.ndarray) -> np.ndarray:
    """Return the entropy of the logits of each row: that of the last one of a request is known."""
    entropy = np.full(int(step.n_rows.sum()), np.nan, np.float32)
    known = dict(zip(of.tolist(), bits[:, 1].view(np.float32).tolist(), strict=True))
    values = [known.get(request, np.nan) for request in step.requests.tolist()]
    some = step.n_rows > 0
    entropy[(np.cumsum(step.n_rows) - 1)[some]] = np.array(values, np.float32)[some]
    return entropy


def _index(stays: BoolArray | None, kept: BoolArray | None) -> IntArray | None:
    """Return the indexes of the staged rows that are stored, ``None`` for all.

    Of the staged rows some stay, and of these the sampling rules keep some.
    """
    if stays is None:
        return None if kept is None else np.flatnonzero(kept)
    index = np.flatnonzero(stays)
    return index if kept is None else index[kept]
