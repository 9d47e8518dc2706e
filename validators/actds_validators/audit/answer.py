"""The answer: whether to train on a dataset, over every place where rows go on their way to it.

Spec: 0.1 section 14.10.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from actds.text import counted, format_seconds, share
from actds_validators.audit.place import LEVELS, TITLES, Answer, Decision, Level, Place, PlaceName
from actds_validators.audit.result import Queues, Verdict

NEAR_MISS_S = 60.0
"""Seconds that the writer may have held up the engine, in all, before it is told."""
NEAR_MISS_SHARE = 0.05
"""The same as a share of the time of the run."""
_WORDS: dict[Decision, str] = {
    "yes": "Yes: train on it",
    "yes, loaded like this": "Yes, loaded like this",
    "yes, with limits": "Yes, with these limits",
    "not known": "Not known",
    "no": "No",
}
_LEVELS: dict[Decision, Level] = {
    "yes": "PASS",
    "yes, loaded like this": "WARN",
    "yes, with limits": "WARN",
    "not known": "INCONCLUSIVE",
    "no": "FAIL",
}


def unaccounted(verdict: Verdict) -> Answer:
    """Return the answer where rows, losses and census disagree: no place can be judged."""
    return Answer(
        decision="no",
        level="FAIL",
        words="No: there are accounting mismatches",
        place=None,
        sentence=verdict.sentence,
        load=None,
        next_steps=verdict.next_steps,
    )


def conclude(
    places: Sequence[Place], accepted: Sequence[PlaceName], path: str, queues: Queues | None
) -> tuple[list[Place], Answer]:
    """Return the places with what the user accepted, and the answer over them.

    Yes where every place passes or is accepted; with a loader line where arguments make every
    other one pass; no where one fails; not known where something is not on record; else yes with
    limits. The place that decides is the most severe, and of equal ones that of the largest bias.

    Args:
        places: of `places.places`.
        queues: the section, None without a step.
    """
    judged = [p.model_copy(update={"accepted": p.name in accepted}) for p in places]
    against = [p for p in judged if p.counts_as != "PASS"]
    against.sort(key=_first)
    decision = _decision(against)
    first = against[0] if against else None
    load = _loader(against, path) if against and all(p.loaded for p in against) else None
    waived = [p for p in judged if p.accepted and p.level != "PASS"]
    words = _WORDS[decision]
    if first is not None:
        words = f"{words}: {first.headline}"
    elif waived:
        words = f"{words}; accepted: {', '.join(TITLES[p.name] for p in waived)}"
    sentences = [p.sentence for p in against] or ["Nothing that was looked at speaks against it."]
    steps = [step for p in against for step in p.to_do]
    return judged, Answer(
        decision=decision,
        level=_LEVELS[decision],
        words=words,
        place=first.name if first is not None else None,
        sentence=sentences[0],
        load=load,
        accepted=[p.name for p in waived],
        near_misses=list(_near_misses(judged, queues)),
        next_steps=steps or ["Train on it."],
    )


def _first(place: Place) -> tuple[int, bool, float]:
    """Return what places are sorted by: the level, then the bias, the largest if not known."""
    bias = math.inf if place.bias is None else place.bias
    return -LEVELS.index(place.counts_as), bool(place.loaded), -bias


def _decision(against: Sequence[Place]) -> Decision:
    levels = {p.counts_as for p in against}
    if not against:
        return "yes"
    if "FAIL" in levels:
        return "no"
    if "INCONCLUSIVE" in levels:
        return "not known"
    return "yes, loaded like this" if all(p.loaded for p in against) else "yes, with limits"


def _loader(places: Sequence[Place], path: str) -> str:
    """Return the line of a loader with which every place passes."""
    arguments: dict[str, list[str]] = {}
    for place in places:
        for name, values in place.loaded.items():
            held = arguments.setdefault(name, [])
            held += [value for value in values if value not in held]
    words = [repr(path)]
    for name, values in arguments.items():
        if name == "where":
            words.append(f'where="{" and ".join(values)}"')
        elif len(values) == 1:
            words.append(f'{name}="{values[0]}"')
        else:
            listed = ", ".join(f'"{value}"' for value in values)
            words.append(f"{name}=({listed})")
    return f"actds.Loader({', '.join(words)})"


def _near_misses(places: Sequence[Place], queues: Queues | None) -> Iterator[str]:
    """Yield what held up the engine and cost no row."""
    if queues is None or not queues.trace or any(p.name == "queues" and p.n for p in places):
        return
    lasted = queues.trace[-1].t_s + queues.trace[-1].seconds
    for stall in queues.stalls:
        if stall.seconds >= min(NEAR_MISS_S, NEAR_MISS_SHARE * lasted) and stall.seconds >= 1.0:
            part = share(round(stall.seconds * 1000), round(lasted * 1000))
            yield (
                f"the writer held up the engine for {format_seconds(stall.seconds)} ({part} of "
                f"the run) in {counted(stall.n, 'wait')} at the {stall.stage}. No row was lost, "
                "because the engine waited; with a drop policy these rows would be gone."
            )
