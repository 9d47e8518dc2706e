"""Verdicts: what each instrument finds at a hook, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from actds_validators.regimes.result import About, Outcome, Value, Verdict

__all__ = ["LEADS", "about", "beyond", "element_of", "in_floor", "signed", "verdicts"]

LEADS = (("dictionary", "FVU over the reference's variance"), ("moments", "mean"))
"""Instrument and measure that charts and sentences follow, where they are there."""
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
        worst = min(shifted, key=_telling)
        said = f"{worst.measure} {_number(worst)} ({_stratum(worst)}; "
        said += "" if worst.limit is None else f"limit {worst.limit:g}, "
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


def in_floor(value: Value) -> bool:
    """Return whether a value is no larger than what halves of the reference differ by."""
    if value.kind == "overlap" or value.floor is None:  # an overlap is measured from its floor
        return False
    return abs(value.value or 0.0) <= value.floor


def _telling(value: Value) -> tuple[bool, bool, bool, float, float]:
    """Return what orders values that shift: one that tells a reader most comes first.

    A leading measure of all rows is one number to weigh. What lies below its floor may shift, but
    is no example of it.
    """
    leads = (value.instrument, value.measure) in LEADS
    return (
        in_floor(value), not leads, value.axis != "all", value.adjusted_p or 0.0, -beyond(value)
    )  # fmt: skip


def signed(value: Value, figures: int) -> str:
    """Return the number of a value; a difference has a sign, a size or an overlap has none."""
    sign = "+" if value.kind == "difference" else ""
    return f"{value.value:{sign}.{figures}g}"


def _number(value: Value) -> str:
    element = f"of {element_of(value)} " if value.element else ""
    return f"{element}{signed(value, 2)} {value.unit}"


def element_of(value: Value) -> str:
    """Return which element a value is of, with its noun: ``channel 12``; empty for none."""
    return f"{_NOUNS.get(value.instrument, '')}{value.element}" if value.element else ""


def _place(value: Value) -> str:
    return value.measure if value.axis == "all" else f"{value.measure}, {_stratum(value)}"


def _stratum(value: Value) -> str:
    return value.axis + (" rows" if value.axis == "all" else f" {value.stratum}")
