"""Interventions: rows that a run changed on purpose, where, by what, and in which requests.

Writer, validator and reader compute from the run record alone which positions those are.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from actds.errors import ActdsError
from actds.format import canonical
from actds.format.inclusion import is_condition, matches
from actds.format.schema import RunRecord

FIELD = "capture.interventions"
"""The run record's field with the interventions of a run (section 7.11)."""
Op = Literal["add", "project", "clamp", "patch"]
Part = Literal["prompt", "generated"]
MAX_INTERVENTIONS = 4096
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,80}")
_DECIMAL = re.compile(r"-?[0-9]{1,16}(\.[0-9]{1,24})?(e-?[0-9]{1,3})?")


class Edit(NamedTuple):
    """What an intervention does to the rows of one hook.

    Args:
        hook: its name.
        op: ``add`` a vector, ``project`` off a direction, ``clamp`` a coordinate or a feature,
            ``patch`` in other rows.
        strength: factor of what is added or taken off, value that is clamped to; 1 of a patch.
        sha256: digest of its arrays, float32 little endian, in the order of section 7.11.
    """

    hook: str
    op: Op
    strength: float
    sha256: str


class Applied(NamedTuple):
    """The positions ``[start, stop)`` of a request that an intervention changes, by its number.

    ``origin`` is the first position that it would change if no other one came before it.
    """

    number: int
    start: int
    stop: int
    origin: int


@dataclass(frozen=True)
class Intervention:
    """Edits that are made together.

    Args:
        name: of the intervention.
        edits: one for each hook.
        part: of the request that ``positions`` count from the beginning of, and do not leave: what
            was given, or what was sampled; ``None`` for all of it.
        positions: first one, and the one after the last, ``None`` for no end.
        request: names of ``about_request`` and patterns that a request has to match, all of them.

    Spec: 0.1 section 7.11.
    """

    name: str
    edits: tuple[Edit, ...]
    part: Part | None = None
    positions: tuple[int, int | None] = (0, None)
    request: tuple[tuple[str, str], ...] = ()

    def within(self, n_given: int) -> tuple[int, int]:
        """Return the positions ``[start, stop)`` of a request with so many that were given."""
        base = n_given if self.part == "generated" else 0
        end = n_given if self.part == "prompt" else 1 << 32
        start, stop = self.positions
        return min(base + start, end), end if stop is None else min(base + stop, end)

    def as_json(self) -> dict[str, object]:
        edits = [
            {"hook": e.hook, "op": e.op, "sha256": e.sha256, "strength": repr(e.strength)}
            for e in self.edits
        ]
        return {
            "edits": edits,
            "name": self.name,
            "part": self.part,
            "positions": list(self.positions),
            "request": [list(pair) for pair in self.request] or None,
        }

    @classmethod
    def from_json(cls, fields: object) -> Intervention | None:
        """Return what a run record says, ``None`` where it says something else."""
        if not isinstance(fields, dict) or fields.keys() != cls("", ()).as_json().keys():
            return None
        name, part, positions = fields["name"], fields["part"], fields["positions"]
        request, edits = fields["request"], fields["edits"]
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return None
        if part not in (None, *get_args(Part)) or not _is_range(positions):
            return None
        if request is not None and not (isinstance(request, list) and request):
            return None
        if not all(map(is_condition, request or ())):
            return None
        made = [_edit(edit) for edit in edits] if isinstance(edits, list) else []
        known = tuple(edit for edit in made if edit is not None)
        if not known or len({edit.hook for edit in known}) < len(made):
            return None
        conditions = tuple((key, pattern) for key, pattern in request or ())
        return cls(name, known, part, (positions[0], positions[1]), conditions)


def _edit(fields: object) -> Edit | None:
    if not isinstance(fields, dict) or fields.keys() != {"hook", "op", "sha256", "strength"}:
        return None
    hook, op, digest, strength = (fields[k] for k in ("hook", "op", "sha256", "strength"))
    if not all(isinstance(text, str) for text in (hook, op, digest, strength)):
        return None
    if op not in get_args(Op) or not hook or not _DIGEST.fullmatch(digest):
        return None
    if not _DECIMAL.fullmatch(strength) or not math.isfinite(float(strength)):
        return None
    return Edit(hook, op, float(strength), digest)


def _is_range(place: object) -> bool:
    if not isinstance(place, list) or len(place) != 2:
        return False
    start, stop = place
    return (
        type(start) is int and start >= 0 and (stop is None or (type(stop) is int and stop > start))
    )


def as_field(interventions: Sequence[Intervention]) -> str:
    """Return the value of ``capture.interventions`` in the run record."""
    value = [item.as_json() for item in interventions]
    return canonical.dump(value).decode("ascii").rstrip("\n")


def interventions_of(record: RunRecord | None) -> tuple[Intervention, ...]:
    """Return the interventions in a run record, none for a run that changes no row.

    Raises:
        ActdsError: E102 or E103 when the text is no value of the spec.
    """
    field = None if record is None else record.fields.get(FIELD)
    if record is None or field is None or field.value is None:
        return ()
    return parse_field(str(field.value), f"runs/{record.run}.json {FIELD}")


def parse_field(text: str, place: str) -> tuple[Intervention, ...]:
    """Return the interventions that a text says; raises E102 or E103 with the place."""
    values = canonical.parse(f"{text}\n".encode(), place)
    if isinstance(values, list) and 0 < len(values) <= MAX_INTERVENTIONS:
        known = [Intervention.from_json(fields) for fields in values]
        every = tuple(item for item in known if item is not None)
        if len({item.name for item in every}) == len(values):
            return every
    raise ActdsError("E103", place, got=text[:200], expected="the spec's fields")


def applied(
    interventions: Sequence[Intervention], about: Mapping[str, str], n_given: int
) -> tuple[Applied, ...]:
    """Return which positions of a request are changed, by what; no two share a position.

    Of several interventions of a position the first one counts. Numbers count from 1.

    Args:
        about: as ``about_request`` returns it.
        n_given: positions of the request that were given, its prompt's unless it is a replay.
    """
    free = [(0, 1 << 32)]  # ascending, and apart
    result: list[Applied] = []
    for number, intervention in enumerate(interventions, 1):
        if not matches(intervention.request, about):
            continue
        start, stop = intervention.within(n_given)
        low = max(bisect.bisect_right(free, (start, 1 << 33)) - 1, 0)
        low += low < len(free) and free[low][1] <= start
        high = bisect.bisect_left(free, (stop, 0), low)
        if start >= stop or low >= high:
            continue
        pieces = free[low:high]
        cut = [(max(first, start), min(last, stop)) for first, last in pieces]
        result += [Applied(number, first, last, start) for first, last in cut]
        ends = [(pieces[0][0], start), (stop, pieces[-1][1])]
        free[low:high] = [(first, last) for first, last in ends if first < last]
    return tuple(sorted(result, key=lambda part: part.start))
