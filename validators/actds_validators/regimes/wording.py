"""Verdicts: what each instrument finds at a hook, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from actds_validators.regimes.result import Outcome, Value, Verdict

__all__ = ["verdicts"]

_MAX_SHORT = 5


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
    short = [f"{_place(value)}: {value.short}" for value in (*open_, *silent) if value.short]
    outcome: Outcome
    if shifted:
        outcome = "shifts"
        worst = min(shifted, key=lambda value: (value.adjusted_p or 0.0, -_relative(value)))
        said = f"{worst.measure} {_number(worst)} ({_place(worst)}; "
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


def _relative(value: Value) -> float:
    """Return a value over its limit."""
    return abs(value.value or 0.0) / (value.limit or 1.0)


def _number(value: Value) -> str:
    element = f" of {value.element}" if value.element else ""
    return f"{element} {value.value:+.2g} {value.unit}".strip()


def _place(value: Value) -> str:
    return value.measure if value.axis == "all" else f"{value.axis} {value.stratum}"
