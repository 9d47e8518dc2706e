"""The scheduler side and the worker side of the account, as every engine uses them.

The scheduler side reports its decisions to the census and never sees a row; the worker side hooks
the model and hands over the rows of every step.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from actds.errors import ActdsError
from actds.format.schema import DType
from actds.text import format_nbytes
from actds_writers.capture import op as capture
from actds_writers.capture.attending import Looker, attention_hooks
from actds_writers.capture.check import NO_CHECK, HookCheck
from actds_writers.capture.edits import Edits
from actds_writers.capture.hooks import cast_of, directions, hook_specs
from actds_writers.capture.op import Reading
from actds_writers.capture.stages import Stages, Step, memory_of
from actds_writers.capture.taps import ModelConfig, StreamForm
from actds_writers.capture.transfer import Mark
from actds_writers.engine_protocol import OPTION, refused
from actds_writers.interventions import Planned
from actds_writers.ipc.link import Link, RowLayout, Sender
from actds_writers.ipc.messages import (
    Fact,
    HookSpec,
    Reference,
    RequestArrived,
    RequestFinished,
    StepScheduled,
    TokensSampled,
)
from actds_writers.sampling import Regime
from actds_writers.sizing import WorkerMemory

Channel = Connection | Sender


class SchedulerSide:
    """Numbers requests and steps, and reports them to the census.

    An engine whose steps have results later than their schedule overrides ``report``.
    """

    def __init__(self, census: Channel) -> None:
        self._census = census
        self._n_requests = 0
        self._step = -1
        self.last_step = -1
        """The last step that had tokens."""
        self._ended: list[int] = []
        self._preempted: list[int] = []

    def number_request(
        self,
        external_id: str,
        prompt_len: int,
        sampling: Mapping[str, object] | None,
        *,
        internal_id: str | None = None,
        arrival_ns: int | None = None,
        **about: Any,
    ) -> int:
        """Report a request that the scheduler took; return its number.

        Args:
            internal_id: the engine's id, if it differs.
            arrival_ns: wall clock of its arrival, ``None`` for now.
            about: further fields of ``RequestArrived``.
        """
        number = self._n_requests
        self._n_requests += 1
        names = encodable(internal_id or external_id), encodable(external_id)
        arrived = time.time_ns() if arrival_ns is None else arrival_ns
        self._census.send(
            RequestArrived(number, *names, prompt_len, arrived, in_json(sampling), **about)
        )
        return number

    def number_step(
        self,
        requests: Sequence[int],
        starts: Sequence[int],
        n_tokens: Sequence[int],
        *,
        waiting: int,
        running: int,
        references: tuple[Reference, ...] = (),
        preempted: tuple[int, ...] = (),
        **columns: Any,
    ) -> tuple[int, tuple[int, ...]]:
        """Report a step; return its number and the requests that ended since the last one.

        A step without tokens is numbered and not reported; whom it preempted, the next one tells.
        ``columns`` are further fields of ``StepScheduled``, as the others are.
        """
        self._step += 1
        ended = tuple(self._ended)
        self._preempted += preempted
        if len(requests):
            preempted, self._preempted = tuple(self._preempted), []
            self.last_step = self._step
            self._ended.clear()
            self.report(
                StepScheduled(
                    step=self._step,
                    t_ns=time.time_ns(),
                    requests=np.array(requests, np.int64),
                    starts=np.array(starts, np.int64),
                    n_tokens=np.array(n_tokens, np.int64),
                    references=references,
                    waiting=waiting,
                    running=running,
                    preempted=preempted,
                    **columns,
                )
            )
        return self._step, ended

    def end_request(
        self, number: int, reason: str, token_ids: Sequence[int], prompt_len: int
    ) -> None:
        self.retire(number)
        self.report(self.end_of(number, reason, token_ids, prompt_len))

    def retire(self, number: int) -> None:
        """Tell the workers, with the next step, that no further step has the request."""
        self._ended.append(number)

    @staticmethod
    def end_of(
        number: int,
        reason: str,
        token_ids: Sequence[int],
        prompt_len: int,
        *,
        cached_as_reported: bool = True,
        roles: str = "",
    ) -> RequestFinished:
        """Return what the census is told of the end of a request, as in ``RequestFinished``.

        Args:
            reason: ``stop``, ``length``, ``abort`` or another reason of the engine.
            token_ids: prompt, then sampled tokens.
        """
        n_sampled = len(token_ids) - prompt_len
        # Without a sampled token the whole prompt counts, as in spec section 7.1.
        ids = np.array(token_ids[: prompt_len + max(n_sampled - 1, 0)], dtype="<u4")
        return RequestFinished(
            request=number,
            t_ns=time.time_ns(),
            reason=reason,
            generated_len=n_sampled,
            token_digest=hashlib.sha256(ids.tobytes()).hexdigest(),
            cached_as_reported=cached_as_reported,
            roles=roles,
        )

    def tell_sampled(
        self, step: int, requests: Sequence[int], positions: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Report the tokens that requests got from a step, where entropies are recorded.

        Also of a step from which nobody got one: the census keeps what its logits said until then.
        """
        columns = (np.array(column, np.int64) for column in (requests, positions, token_ids))
        self._census.send(TokensSampled(step, *columns))

    def report(self, message: StepScheduled | RequestFinished) -> None:
        self._census.send(message)

    def close(self) -> None:
        self._census.close()


def encodable(name: str) -> str:
    """Return a text as tables and the journal have it: no lone surrogate is in one."""
    return name.encode(errors="backslashreplace").decode()


def in_json(sampling: Mapping[str, object] | None) -> str | None:
    """Return the parameters of a request as in the column ``sampling``."""
    if sampling is None:
        return None
    return json.dumps(sampling, sort_keys=True, separators=(",", ":"))


@contextlib.contextmanager
def reporting_failure(link: Link) -> Iterator[None]:
    try:
        yield
    except ActdsError as error:
        if link.is_near:
            with link.connect("writer", "worker") as writer:
                writer.send(error)
        raise


@dataclass(frozen=True)
class Room:
    """The bytes of a GPU that capture can have.

    ``but_for`` is the engine's option that leaves no more, if not all that is free is left.
    """

    nbytes: int
    but_for: str = ""
    next_step: str = "take a GPU with more memory"


def free_nbytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + int(unused)


def _require_room(link: Link, room: Room, needed: WorkerMemory, beside: int = 0) -> None:
    """Say what capture takes of a GPU, and refuse what is not there; raises E012."""
    device_nbytes = needed.device_nbytes + beside
    nbytes = format_nbytes(device_nbytes)
    pinned = format_nbytes(needed.pinned_nbytes)
    words = f"Reserving {nbytes} of the GPU for capture, and {pinned} of page-locked memory"
    link.note(words)
    if link.live:  # nobody waits for the notes of a server
        logging.getLogger("vllm.actds").info("actds: %s", words)
    if device_nbytes > room.nbytes:
        left = f"{format_nbytes(max(room.nbytes, 0))} of it free"
        raise refused(
            "memory of the GPU",
            f"{nbytes} for capture, and {left}{room.but_for and f' beside {room.but_for}'}",
            "room for the hooks' buffers and the steps in flight",
            f"Take fewer hooks, lower max_num_batched_tokens or staging_mib, or {room.next_step}.",
        )


def edits_of(
    link: Link,
    model: torch.nn.Module,
    *,
    config: ModelConfig,
    computed: torch.dtype,
    device: torch.device,
    max_rows: int,
    form: StreamForm = "first",
    layers: Collection[int] | None = None,
) -> Edits:
    """Install the interventions of a harvest behind its hooks; arguments as of ``WorkerSide``."""
    assert link.interventions_path is not None
    planned = Planned.read(link.interventions_path)
    places = [(kind, int(layer)) for kind, layer in (name.rsplit(".", 1) for name in planned.hooks)]
    specs = {spec.name: spec for spec in hook_specs(places, config, _stored_type(computed))}
    return Edits(model, planned, specs, max_rows=max_rows, device=device, form=form, layers=layers)


class WorkerSide:
    """Captures from one model: installs the hooks, then hands over each step.

    Args:
        model: the loaded model, not yet compiled.
        padding: further rows that a forward may have.
        in_flight: most steps whose results the scheduler has not taken.
        layers: decoder layers of its pipeline stage, whose hooks it captures; ``None`` for all.
        gather: as in ``capture.install``.
        room: what the engine leaves of the free bytes of its GPU.
        folder: of the model's weights, where attention may be looked at.

    Raises:
        ActdsError: E007 unknown layer or none that can be captured, E012 a type that cannot be
            stored, or a GPU without room for the capture.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        link: Link,
        *,
        config: ModelConfig,
        computed: torch.dtype,
        device: torch.device,
        max_rows: int,
        padding: int = 0,
        in_flight: int = 1,
        form: StreamForm = "first",
        stage: int = 0,
        layers: Collection[int] | None = None,
        gather: capture.Gather | None = None,
        room: Callable[[int], Room] = lambda free: Room(free),
        folder: Path | None = None,
    ) -> None:
        self.link, self._device = link, device
        self._introduced = False
        self._began: Mark | None = None
        self._check_fact = NO_CHECK
        every = specs_of(link, config, computed)
        its = [i for i, hook in enumerate(every) if layers is None or hook.layer in layers]
        self.hooks = tuple(replace(every[i], stage=stage) for i in its)
        read = directions(link.readouts, link.probes_path, every)
        self._cast = cast_of(self.hooks, _stored_type(computed))
        if device.type == "cuda":
            width = 0 if read is None else 1 + read[0].shape[1]
            sizes = (device, max_rows, in_flight)
            memory = memory_of(link, self.hooks, *sizes, n_readouts=width, padding=padding)
            beside = 0
            if (attending := link.settings.attending(link.run)) is not None:
                looked = attention_hooks(attending.layers, config, _stored_type(computed))
                beside = 2 * RowLayout(looked).row_nbytes * (max_rows + padding)
            _require_room(link, room(free_nbytes(device)), memory, beside)
        self.buffers = capture.install(
            model,
            self.hooks,
            max_rows=max_rows + padding,
            device=device,
            form=form,
            directions=None if read is None else [read[i] for i in its],
            gather=gather,
        )
        self._looker: Looker | None = None
        attending = link.settings.attending(link.run)
        if attending is not None and folder is not None:
            self._looker = Looker(
                model,
                attending.layers,
                folder,
                config=config,
                computed=_stored_type(computed),
                device=device,
                max_rows=max_rows + padding,
                form=form,
                gather=gather,
                start=len(self.hooks),
            )
            beside = self.buffers.beside_nbytes + self._looker.nbytes
            self.buffers = replace(self.buffers, beside_nbytes=beside)
        self._stages_of = functools.partial(
            Stages, buffers=self.buffers, hooks=self.hooks, max_rows=max_rows, in_flight=in_flight
        )
        self.stages = self._stages_of(link)
        self.edits: Edits | None = None
        """What changes its rows, where a harvest does."""
        self._begin_looks()

    def _begin_looks(self) -> None:
        attending = self.link.settings.attending(self.link.run)
        if self._looker is not None and attending is not None:
            self._looker.begin(attending, self.stages.handover.send, self._end_looks)

    def _end_looks(self, error: ActdsError) -> None:
        """Take why attention is not looked at any more: it ends a harvest, and no server."""
        if self.link.live:
            logging.getLogger("vllm.actds").error("actds: attention is not looked at: %s", error)
        else:
            with contextlib.suppress(ActdsError):  # the writer may be what is gone
                self.stages.fail(error)

    def learn(self, request: int, regime: Regime) -> None:
        """Note, before the first step of a request, what is known of it."""
        self.stages.learn(request, regime)
        if self._looker is not None:
            self._looker.learn(request, regime.roles)

    def check(self, run: Callable[[], HookCheck]) -> None:
        """Check the hooks before any request, and note the result; raises E507 or E007.

        An engine that never comes up is not shut down: where this raises, it has to ``close``.
        """
        try:
            self._check_fact = run().fact()
        except ActdsError as error:
            self.stages.fail(error)
            raise

    def change_run(self, link: Link, timeout_s: float) -> None:
        """End what was captured for one run, and capture for the next with the same hooks.

        Args:
            timeout_s: how long the writer may take to catch up; what it has not taken then is lost
                to the run that ends, whose census counts it as aborted.
        """
        self.stages.abandon()
        self.stages.drain(timeout_s)
        self.close()
        if self._check_fact.origin == "observed":
            reason = f"checked in run {self.link.run} of the same engine, with other weights"
            self._check_fact = Fact("capture.check", None, "unknown", reason)
        self.link, self._introduced, self._began = link, False, None
        self.stages = self._stages_of(link)
        self._begin_looks()

    def before_step(self) -> None:
        self.buffers.reset()
        if self._looker is not None:
            self._looker.buffers.reset()
        self._began = Mark(self._device, timed=True)

    def introduce(self, facts: Callable[[], tuple[Fact, ...]]) -> None:
        """Send the writer the engine's observed facts, once, when it is completely set up."""
        if not self._introduced:
            self._introduced = True
            cast = Fact("capture.cast", self._cast, "observed")
            entropy = Fact("capture.entropy", self.link.settings.entropy, "observed")
            self.stages.beside_nbytes = 0 if self.edits is None else self.edits.nbytes
            self.stages.introduce((*facts(), cast, entropy, self._check_fact))

    def hand_over(
        self,
        step: Step,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        waits: bool = False,
        changed: torch.Tensor | None = None,
    ) -> None:
        """Hand over the rows of the step that just ran; arguments as of ``Stages``.

        Raises:
            ActdsError: E501 when a hook did not see every row, E502 when the writer is gone.
        """
        step = replace(step, began=self._began)
        if self._looker is not None:
            self._looker.take(step, positions)
        self.stages.hand_over(step, token_ids, positions, waits=waits, changed=changed)

    def add_sampled(
        self, step: int, requests: Sequence[int], reading: Reading, token_ids: torch.Tensor
    ) -> None:
        """Add to a held step what its logits said of the tokens sampled from them.

        Args:
            requests: of each row of the logits, -1 for one that is not reported.
            token_ids: its token, ``(n,)`` on the device.

        Raises:
            ActdsError: E501 when there are other rows of logits than requests or tokens.
        """
        n, counts = len(requests), (len(reading.logits), len(token_ids))
        if counts != (n, n):
            self.stop(step, f"{counts[0]} rows of logits, {counts[1]} tokens", f"{n} of each")
        self.stages.add_sampled(step, np.array(requests, np.int64), reading.of_tokens(token_ids))

    def stop(self, step: int, got: str, expected: str) -> NoReturn:
        error = ActdsError("E501", f"step {step}", got=got, expected=expected)
        self.stages.fail(error)
        raise error

    def close(self) -> None:
        if self._looker is not None:
            self._looker.close()
        self.stages.close()


def _stored_type(computed: torch.dtype) -> DType:
    for name, dtype in capture.TORCH_TYPES.items():
        if dtype == computed:
            return name
    raise refused(f"{OPTION} dtype", str(computed), ", ".join(capture.TORCH_TYPES))


def specs_of(link: Link, config: ModelConfig, computed: torch.dtype) -> tuple[HookSpec, ...]:
    """Return the hooks of a harvest in a model; raises as ``WorkerSide``."""
    return hook_specs(link.hooks, config, _stored_type(computed), link.settings.store_dtype)


def layer_config(config: Any, d_model: int, n_layers: int) -> dict[str, Any]:
    return {**vars(config), "hidden_size": d_model, "num_hidden_layers": n_layers}
