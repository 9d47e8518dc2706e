"""The join of pipeline stages: one step of an engine whose layers are on several workers.

Each stage captures the hooks of its own layers and sends every step, in step order. A step is
stored once every stage has sent it, all with the same rows; it is dropped for all hooks when one
stage has dropped it. No file, no socket.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from actds.errors import ActdsError
from actds.format import canonical, tables
from actds_writers.ipc.messages import Fact, StepDropped, StepRows, StepsDropped, WorkerHello

SUMMED = ("capture.ring_nbytes", "capture.staging_nbytes", "model.n_layers")
"""Facts of the run record that are sums over the stages."""
CHECK = "capture.check"
AGAINST = ("transformers", "engine", "table")
"""References of the check of the hooks; the last of those that the stages had counts."""
_IDENTITY = ("step", "requests", "n_rows", "prompt_lens", "positions", "finished", "kept")


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

        Raises:
            ActdsError: E501 when two workers have one stage or one hook.
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
        differing = _differing(first, part)
        if differing:
            raise ActdsError(
                "E501",
                f"step {first.rows.step}",
                got=f"other {', '.join(differing)} in stage {stage} than in stage {first_stage}",
                expected="the same rows in every pipeline stage",
            )
    rows = tuple(part.rows for part in parts.values())
    whole = replace(
        first.rows,
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


def _differing(a: _Part, b: _Part) -> list[str]:
    # A dropped step has no token ids any more.
    names = _IDENTITY if a.loss or b.loss else (*_IDENTITY, "token_ids")
    return [n for n in names if not np.array_equal(getattr(a.rows, n), getattr(b.rows, n))]


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
