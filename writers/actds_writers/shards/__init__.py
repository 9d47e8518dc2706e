"""From the steps of pipeline stages to the buffers that become shards; no file, no socket.

Each stage captures the hooks of its own layers and sends every step, in step order. A step is
joined once every stage has sent it, all with the same rows; it is dropped for all hooks when one
stage has dropped it. Then the assembly decides, from what the workers saw alone, which rows are
computed for the first time. A buffer is filled in step order and handed over whole at a step's end,
so that 'committed up to step s' is exact per phase.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from actds.errors import ActdsError
from actds.format import canonical, tables
from actds.format.tables import FLAG_BOS, FLAG_EOS, FLAG_SPECIAL
from actds_writers.ipc.link import Arrays, RowLayout
from actds_writers.ipc.messages import (
    Fact,
    HookSpec,
    StepDropped,
    StepReadouts,
    StepRows,
    StepsDropped,
    WorkerHello,
)
from actds_writers.model_folder import SpecialTokens
from actds_writers.sampling import HookNames, Lot

SUMMED = ("capture.ring_nbytes", "capture.staging_nbytes", "model.n_layers")
"""Facts of the run record that are sums over the stages."""
CHECK = "capture.check"
AGAINST = ("transformers", "engine", "table")
"""References of the check of the hooks; the last of those that the stages had counts."""
_IDENTITY = ("step", "requests", "n_rows", "prompt_lens", "positions", "finished")


@dataclass(frozen=True)
class JoinedStep:
    """A step as all stages together have it: rows with the parts of every stage, or the drop.

    ``places``: by stage that waits for an acknowledgement, its offset in that stage's ring.
    """

    step: StepRows | StepDropped
    places: Mapping[int, int | None]


@dataclass(frozen=True)
class _Part:
    """A step of one stage; ``ends`` says whether it is the last one of its message."""

    rows: StepRows
    loss: StepDropped | None
    ends: bool

    @property
    def place(self) -> int | None:
        return self.rows.offset if self.loss is None and self.rows.nbytes else None


class StageJoin:
    """Joins the messages of the workers of one engine, usually one (spec 0.1 section 9.1).

    ``hooks``: kind and layer of every hook of the harvest.
    """

    def __init__(self, hooks: Sequence[tuple[str, int]]) -> None:
        self._wanted = {hook: number for number, hook in enumerate(hooks)}
        self._hellos: dict[int, WorkerHello] = {}
        self._parts: dict[int, deque[_Part]] = {}

    @property
    def n_stages(self) -> int:
        return len(self._hellos)

    def meet(self, hello: WorkerHello) -> WorkerHello | None:
        """Take the hello of a stage; return the hello of all once every hook has its stage.

        Raises E501 when two workers have one stage or one hook.
        """
        twice = {hook.name for known in self._hellos.values() for hook in known.hooks}
        twice &= {hook.name for hook in hello.hooks}
        if twice or hello.stage in self._hellos:
            names = ", ".join(sorted(twice)) or "other hooks"
            raise ActdsError(
                "E501",
                f"stage {hello.stage}",
                got=f"a second worker, with {names}",
                expected="each hook in one worker of one pipeline stage",
            )
        self._hellos[hello.stage] = hello
        self._parts[hello.stage] = deque()
        if self._missing():
            return None
        return hello if self.n_stages == 1 else self._joined_hello()

    def add(self, stage: int, message: StepRows | StepsDropped) -> None:
        parts = self._parts[stage]
        if isinstance(message, StepRows):
            parts.append(_Part(message, None, True))
        else:
            last = message.losses[-1]
            parts.extend(_Part(loss.rows, loss, loss is last) for loss in message.losses)

    def steps(self) -> Iterator[JoinedStep]:
        """Yield the steps that every stage has sent, in order; E501 when they disagree."""
        while not self._missing() and all(self._parts.values()):
            yield _joined({stage: parts[0] for stage, parts in sorted(self._parts.items())})
            for parts in self._parts.values():
                parts.popleft()

    def abandon(self) -> Iterator[tuple[int, int | None]]:
        """Yield stage and place of every message that waits, which is forgotten."""
        for stage, parts in self._parts.items():
            while parts:
                part = parts.popleft()
                if part.ends:
                    yield stage, part.place

    def late(self) -> tuple[int, set[int], ActdsError] | None:
        """Return the step that waits for a stage, the stages it waits for, and the error.

        The step is -1 before the first; ``None`` when nothing waits.
        """
        heads = {stage: parts[0].rows.step for stage, parts in self._parts.items() if parts}
        missing = self._missing() if self._hellos else []
        if not heads and not missing:
            return None
        step = min(heads.values(), default=-1)
        silent = set(self._hellos) - set(heads) if heads else set()
        absent = [f"no worker with {', '.join(missing)}"] if missing else []
        absent += [f"none of stage {stage}" for stage in sorted(silent)]
        here = ", ".join(map(str, sorted(heads)))
        error = ActdsError(
            "E501",
            f"step {step}" if heads else "start",
            got="; ".join([*([f"rows of stage {here}"] if heads else []), *absent]),
            expected="the rows of every pipeline stage",
        )
        return step, silent, error

    def _missing(self) -> list[str]:
        present = {(hook.kind, hook.layer) for h in self._hellos.values() for hook in h.hooks}
        return [f"{kind}.{layer}" for kind, layer in self._wanted if (kind, layer) not in present]

    def _joined_hello(self) -> WorkerHello:
        stages = tuple(hello for _, hello in sorted(self._hellos.items()))
        hooks = [hook for hello in stages for hook in hello.hooks]
        return WorkerHello(
            hooks=tuple(sorted(hooks, key=lambda hook: self._wanted[hook.kind, hook.layer])),
            facts=joined_facts([hello.facts for hello in stages]),
            ring_path="",
            ring_nbytes=sum(hello.ring_nbytes for hello in stages),
            max_step_rows=max(hello.max_step_rows for hello in stages),
            lane_nbytes=sum(hello.lane_nbytes for hello in stages),
            memory_nbytes=sum(hello.memory_nbytes for hello in stages),
            stages=stages,
        )


def _joined(parts: Mapping[int, _Part]) -> JoinedStep:
    """Return one step of several stages, given in their order; raises as ``StageJoin.steps``."""
    places = {stage: part.place for stage, part in parts.items() if part.ends}
    (first_stage, first), *later = parts.items()
    if not later:
        return JoinedStep(first.loss or first.rows, places)
    for stage, part in later:
        # A dropped step has no token ids any more.
        names = _IDENTITY if first.loss or part.loss else (*_IDENTITY, "token_ids")
        if first.rows.inclusion is None:
            names = (*names, "kept")
        if error := disagreement({first_stage: first.rows, stage: part.rows}, names):
            raise error
    rows = tuple(part.rows for part in parts.values())
    whole = replace(
        _drawn_by_all(rows),
        nbytes=sum(part.nbytes for part in rows),
        stalls=tuple(stall for part in rows for stall in part.stalls),
        depth_stage1=max(part.depth_stage1 for part in rows),
        depth_stage2=max(part.depth_stage2 for part in rows),
        parts=rows,
    )
    losses = [part.loss for part in parts.values() if part.loss is not None]
    # As in the census: without readouts at one hook, else for the reason of the first stage.
    loss = min(losses, key=lambda loss: loss.reason != tables.READOUTS_FULL, default=None)
    return JoinedStep(whole if loss is None else replace(loss, rows=whole), places)


def _drawn_by_all(rows: Sequence[StepRows]) -> StepRows:
    """Return the step of the first stage with the rows that every stage has drawn.

    Each stage draws with a probability of its own and one hash: what all of them have is drawn with
    the lowest (spec 0.1 section 7.10).
    """
    first = rows[0]
    if first.inclusion is None:
        return first
    inclusion, kept = first.inclusion, first.kept
    for part in rows[1:]:
        if part.inclusion is not None:
            inclusion = np.minimum(inclusion, part.inclusion)
        if part.kept is not None:
            kept = part.kept if kept is None else kept & part.kept
    return replace(first, inclusion=inclusion, kept=kept)


def disagreement(
    messages: Mapping[int, StepRows | StepReadouts], names: Sequence[str], of: str = ""
) -> ActdsError | None:
    """Return how the messages of the first two pipeline stages that differ do so, in some fields.

    In the same words for rows and for readouts: those of one fault arrive in either order.
    """
    (first_stage, first), *later = sorted(messages.items())
    for stage, message in later:
        unlike = [n for n in names if not np.array_equal(getattr(first, n), getattr(message, n))]
        if unlike:
            got = f"{of}other {', '.join(unlike)} in stage {stage} than in stage {first_stage}"
            expected = "the same rows in every pipeline stage"
            return ActdsError("E501", f"step {first.step}", got=got, expected=expected)
    return None


def joined_facts(by_stage: Sequence[Sequence[Fact]]) -> tuple[Fact, ...]:
    """Return the facts of a run from those of its stages.

    Sums where a stage has a part of the whole; else what all of them say, and unknown where they
    differ.
    """
    by_name: dict[str, list[Fact]] = {}
    for facts in by_stage:
        for fact in facts:
            by_name.setdefault(fact.name, []).append(fact)
    return tuple(_joined_fact(facts) for facts in by_name.values())


def _joined_fact(facts: Sequence[Fact]) -> Fact:
    first, values = facts[0], [fact.value for fact in facts]
    if first.name in SUMMED and all(isinstance(value, int) for value in values):
        return replace(first, value=sum(int(value) for value in values if value is not None))
    if all(value == values[0] for value in values):
        return first
    if first.name == CHECK:
        return replace(first, value=_joined_checks([str(value) for value in values]))
    if first.name == "capture.cast":
        return replace(first, value="; ".join(sorted({str(value) for value in values})))
    words = ", ".join(str(value) for value in values)
    return Fact(first.name, None, "unknown", f"the pipeline stages differ: {words}"[:500])


def _joined_checks(values: Sequence[str]) -> str:
    """Return ``capture.check`` of all stages, each of which has compared its own hooks."""
    checks = [json.loads(value) for value in values]
    bounds: dict[str, str] = {}
    for check in checks:
        bound = check.get("bound")
        for hook in check.get("hooks", {}):
            bounds[hook] = bound[hook] if isinstance(bound, dict) else bound
    whole: dict[str, object] = {
        "against": max((check["against"] for check in checks), key=AGAINST.index)
    }
    if bounds:
        values_of = set(bounds.values())
        whole["bound"] = values_of.pop() if len(values_of) == 1 else bounds
        whole["hooks"] = {h: d for check in checks for h, d in check.get("hooks", {}).items()}
        whole["rows"] = min(check["rows"] for check in checks if "rows" in check)
    eager = [check["eager"] for check in checks if "eager" in check]
    if eager:
        whole["eager"] = max(eager, key=float)
    reasons = dict.fromkeys(check["reason"] for check in checks if "reason" in check)
    if reasons:
        whole["reason"] = "; ".join(reasons)[:300]
    return canonical.dump(whole).decode().strip()


@dataclass
class _Request:
    high_water: int = 0
    next_position: int = 0
    n_chunks: int = 0
    attempt: int = 0


class Interval(NamedTuple):
    request: int
    start: int
    stop: int


class Assembly:
    def __init__(self, tokens: SpecialTokens) -> None:
        self._requests: dict[int, _Request] = {}
        self._special = np.array(sorted(tokens.special), np.int64)
        self._bos = tokens.bos
        self._eos = np.array(sorted(tokens.eos), np.int64)
        self._new = np.empty(0, bool)
        self.recomputed_tokens = 0
        self.cache_hit_ratio: float | None = None
        """Of the last step: prompt tokens that were not computed, of the requests it began."""

    def slices(self, step: StepRows, rows: Arrays) -> dict[Lot, Slice]:
        """Return the slice of each lot that has rows to store (spec 0.1 sections 6.3 and 7.2).

        ``rows``: ``(n_hooks, n_kept, d_model)`` bit patterns in the ring, of each block.
        """
        new, attempt, chunk = self._label(step)
        n = len(step.positions)
        prefill = step.positions < np.repeat(step.prompt_lens, step.n_rows)
        columns: dict[str, np.ndarray] = {
            "request": np.repeat(step.requests, step.n_rows),
            "position": step.positions,
            "token_id": step.token_ids,
            "step": np.full(n, step.step, np.int64),
            "attempt": attempt,
            "chunk": chunk,
            "flags": self._flags(step.token_ids),
        }
        if step.inclusion is not None:
            columns["inclusion"] = step.inclusion
        if step.interventions is not None:
            columns["intervention"] = step.interventions
        hooks = _by_choice(step)
        if step.kept is not None:
            new, prefill = new[step.kept], prefill[step.kept]
            columns = {name: column[step.kept] for name, column in columns.items()}
            hooks = {chosen: mask[step.kept] for chosen, mask in hooks.items()}
        slices: dict[Lot, Slice] = {}
        for phase, of_phase in (("prefill", new & prefill), ("decode", new & ~prefill)):
            for chosen, choose in hooks.items() or [(None, True)]:
                mask = of_phase & choose
                if len(mask) and mask.all():
                    slices[phase, chosen] = Slice(step.step, rows, None, columns)
                elif mask.any():
                    select = np.flatnonzero(mask)
                    some = {name: column[select] for name, column in columns.items()}
                    slices[phase, chosen] = Slice(step.step, rows, select, some)
        return slices

    def lost(self, step: StepRows) -> list[Interval]:
        """Return the intervals of a dropped step that would have been stored (spec 0.1, 7.4)."""
        new, _, _ = self._label(step)
        if step.kept is not None:
            new = new & step.kept
        return _intervals(step, new)

    def n_not_drawn(self, step: StepRows) -> int:
        """Return how many positions that is, of the step that was taken or lost last."""
        mask = step.wanted_but_not_drawn
        return 0 if mask is None else int(np.count_nonzero(self._new & mask))

    def not_drawn(self, step: StepRows) -> list[Interval]:
        """Return the intervals that were not drawn of the step that was taken or lost last."""
        if step.wanted_but_not_drawn is None:
            return []
        return _intervals(step, self._new & step.wanted_but_not_drawn)

    def _label(self, step: StepRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which rows are new, their attempt and their chunk; update the requests."""
        for request in step.finished:
            self._requests.pop(request, None)
        n = len(step.positions)
        new = np.empty(n, dtype=bool)
        attempt, chunk = np.empty(n, np.uint16), np.empty(n, np.uint32)
        first = n_hits = n_queried = 0
        counts = zip(
            step.requests.tolist(), step.n_rows.tolist(), step.prompt_lens.tolist(), strict=True
        )
        for request, count, prompt_len in counts:
            last = first + count
            start, stop = int(step.positions[first]), int(step.positions[last - 1]) + 1
            if (state := self._requests.get(request)) is None:
                state = self._requests[request] = _Request()
                n_hits, n_queried = n_hits + start, n_queried + prompt_len
            state.attempt += start < state.next_position  # resumed after a preemption
            state.next_position = stop
            new[first:last] = step.positions[first:last] >= state.high_water
            attempt[first:last], chunk[first:last] = state.attempt, state.n_chunks
            state.high_water = max(state.high_water, stop)
            state.n_chunks += 1
            first = last
        self.recomputed_tokens += int(n - np.count_nonzero(new))
        self.cache_hit_ratio = n_hits / n_queried if n_queried else None
        self._new = new
        return new, attempt, chunk

    def _flags(self, token_ids: np.ndarray) -> np.ndarray:
        flags = np.where(np.isin(token_ids, self._special), FLAG_SPECIAL, 0)
        if self._bos is not None:
            flags |= np.where(token_ids == self._bos, FLAG_BOS, 0)
        flags |= np.where(np.isin(token_ids, self._eos), FLAG_EOS, 0)
        return flags.astype(np.uint16)


def _by_choice(step: StepRows) -> dict[HookNames | None, np.ndarray]:
    """Return by the hooks that requests chose which rows are theirs; empty where none did."""
    of_request: dict[HookNames | None, list[bool]] = {
        chosen: [hooks == chosen for hooks in step.hooks] for chosen in dict.fromkeys(step.hooks)
    }
    return {chosen: np.repeat(mask, step.n_rows) for chosen, mask in of_request.items()}


def _intervals(step: StepRows, chosen: np.ndarray) -> list[Interval]:
    """Return the intervals of the chosen rows of a step, request by request."""
    request = np.repeat(step.requests, step.n_rows)[chosen]
    position = step.positions[chosen]
    begins = np.ones(len(request), bool)
    begins[1:] = (request[1:] != request[:-1]) | (position[1:] != position[:-1] + 1)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(request))[: len(first)] - 1
    columns = np.stack([request[first], position[first], position[last] + 1], axis=1)
    return [Interval(*line) for line in columns.tolist()]


TOKEN_COLUMNS = {
    "request": np.uint32,
    "position": np.uint32,
    "token_id": np.uint32,
    "step": np.uint64,
    "attempt": np.uint16,
    "chunk": np.uint32,
    "flags": np.uint16,
    "inclusion": np.float64,
    "intervention": np.uint16,
}


@dataclass(frozen=True)
class Slice:
    """The rows of one step and lot to store, with their token columns.

    Args:
        rows: ``(n_hooks, n, d_model)`` bit patterns of each block; may be views of the ring.
        select: indexes of the rows to store, ``None`` for all of them.
    """

    step: int
    rows: Arrays
    select: np.ndarray | None
    columns: dict[str, np.ndarray]

    @property
    def n_rows(self) -> int:
        return len(self.columns["request"])


class ShardBuffer:
    """Rows of one lot: at most those of a shard plus those of the largest step.

    ``further``: columns that not every run has: ``inclusion``, ``intervention``.
    """

    def __init__(
        self, hooks: tuple[HookSpec, ...], capacity: int, further: Collection[str] = ()
    ) -> None:
        self._every_hook = hooks
        self.capacity = capacity
        self._layout = RowLayout(hooks)
        self._rows = self._layout.empty(capacity)
        self._columns = {
            name: np.empty(capacity, dtype=kind)
            for name, kind in TOKEN_COLUMNS.items()
            if name in further or name not in tables.OF_SAMPLES
        }
        self.clear()

    def clear(self, chosen: HookNames | None = None) -> None:
        """Empty the buffer, for rows of these hooks, ``None`` for all."""
        places = zip(self._every_hook, self._layout.places, strict=True)
        self._places = {h: at for h, at in places if chosen is None or h.name in chosen}
        self._is_whole = chosen is None
        self.n_rows = 0
        self.first_step: int | None = None
        self.last_step = 0
        self._ends: list[tuple[int, int]] = []  # of each step, and the rows up to its end

    def append(self, piece: Slice) -> None:
        first, last = self.n_rows, self.n_rows + piece.n_rows
        blocks = list(zip(self._rows, piece.rows, strict=True))
        if not self._is_whole:
            places = self._places.values()
            blocks = [(blocks[b][0][i : i + 1], blocks[b][1][i : i + 1]) for b, i in places]
        for block, rows in blocks:
            target = block[:, first:last]
            if piece.select is None:
                np.copyto(target, rows)
            else:
                np.take(rows, piece.select, axis=1, out=target)
        for name, column in self._columns.items():
            column[first:last] = piece.columns[name]
        self.n_rows = last
        if self.first_step is None:
            self.first_step = piece.step
        self.last_step = piece.step
        self._ends.append((piece.step, last))

    def keep_through(self, step: int) -> None:
        while self._ends and self._ends[-1][0] > step:
            self._ends.pop()
        self.last_step, self.n_rows = self._ends[-1] if self._ends else (0, 0)

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows_by_hook().values())

    @property
    def dtypes(self) -> dict[str, str]:
        return {hook.name: hook.dtype for hook in self._places}

    def rows_by_hook(self) -> dict[str, np.ndarray]:
        """Return the rows of each hook, ``(n_rows, d_model)``, views of the buffer."""
        return {h.name: self._rows[b][i, : self.n_rows] for h, (b, i) in self._places.items()}

    def columns(self) -> dict[str, np.ndarray]:
        return {name: column[: self.n_rows] for name, column in self._columns.items()}
