"""Verdicts: what each instrument finds at a hook, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from actds_validators.regimes.result import About, Outcome, Value, Verdict

__all__ = ["about", "beyond", "element_of", "verdicts"]

_MAX_SHORT = 5
_NOUNS = {"moments": "channel ", "dictionary": "feature ", "probes": "probe "}
_ALIKE = 0.02
"""Difference of the shares of decode rows up to which two arms were computed alike."""


def about(pairing: str, decode: tuple[float | None, float | None]) -> About:
    """Return what differs between two arms.

    Args:
        pairing: how their rows were paired: pairs by token are equal tokens behind equal prefixes.
        decode: share of the rows of either arm that decode steps computed; None unknown.
    """
    if pairing == "token":
        return "computation"
    one, other = decode
    if one is None or other is None or abs(one - other) > _ALIKE:
        return "both"
    return "authorship" if pairing == "position" else "text"


def verdicts(values: Sequence[Value]) -> list[Verdict]:
    """Return a verdict per instrument and hook: over all its measures and strata.

    It shifts when any value does; it carries over when every value that was judged does; else it is
    undecided. Strata of too few requests are told, and decide nothing.
    """
    groups: dict[tuple[str, str], list[Value]] = {}
    for value in values:
        groups.setdefault((value.instrument, value.hook), []).append(value)
    return [_verdict(*key, own) for key, own in groups.items()]


def _verdict(instrument: str, hook: str, values: list[Value]) -> Verdict:
    judged = [value for value in values if value.outcome is not None]
    shifted = [value for value in judged if value.outcome == "shifts"]
    open_ = [value for value in judged if value.outcome == "undecided"]
    silent = [value for value in values if value.value is None and value.short]
    short = [f"{_place(value)}: {value.short}" for value in open_ if value.short]
    short += [f"{_stratum(value)}: {value.short}" for value in silent]
    short = list(dict.fromkeys(short))
    outcome: Outcome
    if shifted:
        outcome = "shifts"
        worst = min(shifted, key=lambda value: (value.adjusted_p or 0.0, -beyond(value)))
        said = f"{worst.measure} {_number(worst)} ({_stratum(worst)}; "
        floor = "no floor" if worst.floor is None else f"floor {worst.floor:.2g}"
        said += f"{floor}, adjusted p {worst.adjusted_p:.2g})"
        sentence = f"{instrument} shifts at {hook}: {said}; {len(shifted)} of {len(judged)} values."
    elif open_ or not judged:
        outcome = "undecided"
        what = f"{len(open_)} of {len(judged)} values" if judged else "nothing could be tested"
        sentence = f"{instrument} is undecided at {hook}: {what}."
    else:
        outcome = "carries over"
        what = f"all {len(judged)} values lie within their limits"
        sentence = f"{instrument} carries over at {hook}: {what}."
    return Verdict(
        instrument=instrument,
        hook=hook,
        outcome=outcome,
        sentence=sentence,
        short=short[:_MAX_SHORT],
    )


def beyond(value: Value) -> float:
    """Return the size of a value over its limit; of an overlap, what is lost to its floor."""
    found = value.value or 0.0
    size = (value.floor or 0.0) - found if value.kind == "overlap" else abs(found)
    return size / (value.limit or 1.0)


def _number(value: Value) -> str:
    element = f"of {element_of(value)} " if value.element else ""
    return f"{element}{value.value:+.2g} {value.unit}"


def element_of(value: Value) -> str:
    """Return which element a value is of, with its noun: ``channel 12``; empty for none."""
    return f"{_NOUNS.get(value.instrument, '')}{value.element}" if value.element else ""


def _place(value: Value) -> str:
    return value.measure if value.axis == "all" else f"{value.measure}, {_stratum(value)}"


def _stratum(value: Value) -> str:
    return value.axis + (" rows" if value.axis == "all" else f" {value.stratum}")
