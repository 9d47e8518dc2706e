"""Conclusions: a verdict per instrument and hook, and the answer of all of them.

Pages and terminals word what stands here; they decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from actds.text import counted
from actds_studies.regimes.result import (
    About,
    Answer,
    ContrastResult,
    GapPart,
    Largest,
    Outcome,
    Separated,
    Value,
    Verdict,
)
from actds_studies.regimes.strata import ALL
from actds_studies.regimes.wording import ADDED, beyond, in_floor, in_words, limits_of, rows_of

LEADS = (("dictionary", "FVU over the reference's variance"), ("moments", "mean"))
"""Instrument and measure that charts and sentences follow, where they are there."""
_ORDER: tuple[Outcome, ...] = ("shifts", "undecided", "carries over")
_MAX_SHORT = 5
_ALIKE = 0.02
"""Difference of the shares of decode rows up to which two arms were computed alike."""
_WHAT = {
    "moments": "Take means and scales for normalization from rows of {other}, not of {first}",
    "numerics": "Do not mix rows of {first} and {other}: compute with the settings of one of them "
    "throughout",
    "dictionary": "Fit the dictionary on rows of both {first} and {other}, or report its numbers "
    "for each of them",
    "overlap": "Do not expect the same features in {first} and {other}: compare features within "
    "one arm",
    "probes": "Set the probes' thresholds on rows of {other}, or fit them on rows of both",
}


def about(pairing: str, decode: tuple[float | None, float | None]) -> About:
    """Return what differs between two arms.

    Args:
        pairing: how their rows were paired: pairs by token are equal tokens behind equal prefixes.
        decode: share of the rows of either arm that decode steps computed; None unknown.
    """
    if pairing == "token":
        return "computation"
    reference, other = decode
    if reference is None or other is None or abs(reference - other) > _ALIKE:
        return "both"
    return "authorship" if pairing == "position" else "text"


# verdicts -----------------------------------------------------------------------------------------


def verdicts(
    values: Sequence[Value], names: tuple[str, str] = ("the reference", "the other arm")
) -> list[Verdict]:
    """Return a verdict per instrument and hook: over all its measures and strata.

    It shifts when any value does; it carries over when every value that was judged does; else it is
    undecided. Strata of too few requests or rows are named, and decide nothing.

    Args:
        names: of the reference and of the other arm.
    """
    groups: dict[tuple[str, str], list[Value]] = {}
    for value in values:
        groups.setdefault((value.instrument, value.hook), []).append(value)
    return [_verdict(*key, group, names) for key, group in groups.items()]


def _verdict(instrument: str, hook: str, values: list[Value], names: tuple[str, str]) -> Verdict:
    tested = [value for value in values if value.outcome is not None]
    shifted = [value for value in tested if value.outcome == "shifts"]
    undecided = [value for value in tested if value.outcome == "undecided"]
    silent = [value for value in values if value.value is None and value.short]
    short = [f"{_place(value)}: {value.short}" for value in undecided if value.short]
    short += [f"{_stratum(value)}: {value.short}" for value in silent]
    outcome: Outcome
    if shifted:
        outcome = "shifts"
        sentence = _shift(shifted, len(tested), names)
    elif undecided or not tested:
        outcome = "undecided"
        n = f"{len(undecided)} of {counted(len(tested), 'value')}"
        sentence = f"undecided, {n if tested else 'nothing could be tested'}."
    else:
        outcome = "carries over"
        n = f"all {len(tested)} values lie" if len(tested) > 1 else "the only value lies"
        sentence = f"carries over, {n} within the limit."
    return Verdict(
        instrument=instrument,
        hook=hook,
        outcome=outcome,
        sentence=f"{instrument.capitalize()} at {hook}: {sentence}",
        short=list(dict.fromkeys(short))[:_MAX_SHORT],
    )


def _shift(shifted: Sequence[Value], n_tested: int, names: tuple[str, str]) -> str:
    first = min(shifted, key=lambda value: (*_telling(value), value.adjusted_p, -beyond(value)))
    none = ", none over all rows" if first.axis != ALL else ""
    where, shift = rows_of(first, names), in_words(first, names)
    beside = f"{limits_of(first, names)}; adjusted p {first.adjusted_p:.2g}"
    return (
        f"shifts in {len(shifted)} of {counted(n_tested, 'value')}{none}. "
        f"{where[0].upper()}{where[1:]} {shift} ({beside})."
    )


def _telling(value: Value) -> tuple[bool, bool, bool]:
    """Return what orders values that shift: one that tells a reader most comes first.

    One over all rows is a number to weigh; a stratum may be of few rows and fewer tokens. What
    lies below its floor may shift, but is no example of it.
    """
    leads = (value.instrument, value.measure) in LEADS
    return value.axis != ALL, in_floor(value), not leads


def _place(value: Value) -> str:
    return value.measure if value.axis == ALL else f"{value.measure}, {_stratum(value)}"


def _stratum(value: Value) -> str:
    return value.axis + (" rows" if value.axis == ALL else f" {value.stratum}")


def judged(contrasts: Sequence[ContrastResult]) -> Iterator[tuple[ContrastResult, Verdict]]:
    pairs = [(contrast, verdict) for contrast in contrasts for verdict in contrast.verdicts]
    yield from sorted(pairs, key=lambda pair: _ORDER.index(pair[1].outcome))


def outcome_of(ended: Sequence[Verdict]) -> Outcome:
    """Return what verdicts say together: one that shifts decides, then one that is undecided."""
    outcomes = {verdict.outcome for verdict in ended}
    return next((outcome for outcome in _ORDER if outcome in outcomes), "undecided")


# the answer ---------------------------------------------------------------------------------------


def answer_of(contrasts: Sequence[ContrastResult]) -> Answer:
    """Return whether what is measured changes, by how much, and whether that is authorship."""
    ended = [verdict for contrast in contrasts for verdict in contrast.verdicts]
    separated, reason = _separated(contrasts)
    outcome, verdicts = outcome_of(ended), counted(len(ended), "verdict")
    n_shifts = sum(verdict.outcome == "shifts" for verdict in ended)
    n_undecided = sum(verdict.outcome == "undecided" for verdict in ended)
    words: dict[Outcome, str] = {
        "shifts": f"Yes: {n_shifts} of {verdicts} shift",
        "undecided": f"Undecided: {n_undecided} of {verdicts}",
        "carries over": f"No: {verdicts}, and all carry over",
    }
    return Answer(
        outcome=outcome,
        words=words[outcome],
        n_verdicts=len(ended),
        n_shifts=n_shifts,
        n_undecided=n_undecided,
        separated=separated,
        reason=reason,
        largest=_largest(contrasts),
        parts=_parts(contrasts),
        next_steps=_next_steps(contrasts, separated),
    )


def _largest(contrasts: Sequence[ContrastResult]) -> Largest | None:
    """Return the value that shifts and lies farthest beyond its limit; a dictionary's fit first."""
    shifted = [
        (contrast, value)
        for contrast in contrasts
        for value in contrast.values
        if value.outcome == "shifts"
    ]
    if not shifted:
        return None
    contrast, value = min(
        shifted,
        key=lambda pair: (
            pair[1].axis != ALL,
            pair[0].about in ("both", "text"),  # its parts say more, where they are compared
            (pair[1].instrument, pair[1].measure) != LEADS[0],
            in_floor(pair[1]),
            -beyond(pair[1]),
        ),
    )
    names = contrast.first.name, contrast.second.name
    times = f"{beyond(value):.2g} times the limit; " if value.limit else ""
    sentence = (
        f"{contrast.name} at {value.hook}, {rows_of(value, names)}: {in_words(value, names)} "
        f"({times}{limits_of(value, names)})."
    )
    return Largest(
        contrast=contrast.name, value=value.model_copy(update={"elements": []}), sentence=sentence
    )


def _separated(contrasts: Sequence[ContrastResult]) -> tuple[Separated, str]:
    """Return whether what shifts is authorship or computation, and why that is said."""
    by: dict[About, list[Verdict]] = {}
    for contrast in contrasts:
        by.setdefault(contrast.about, []).extend(contrast.verdicts)
    outcomes = {about: outcome_of(ended) for about, ended in by.items()}
    abouts: tuple[Literal["computation", "authorship"], ...] = ("computation", "authorship")
    ends = [f"{name} {_ends(by[name])}" for name in abouts if name in by]
    shifting = [name for name in abouts if outcomes.get(name) == "shifts"]
    reason = "; ".join(ends)
    rest = _beside(by)
    if shifting == ["computation"] and "authorship" not in by and rest:
        # What only other tokens shift is not laid at the door of the computation.
        carried = {v.instrument for v in by["computation"]} - _instruments(by, "undecided")
        separated: Separated = "both" if set(rest) <= carried else "not separated"
        return separated, f"{reason}; {', '.join(rest)} only where the tokens differ as well"
    if shifting:
        more = "" if len(ends) == 2 else "; the other of the two was not compared"
        return ("both" if len(shifting) == 2 else shifting[0]), reason + more
    if "shifts" in (outcomes.get("both"), outcomes.get("text")):
        if outcomes.get("computation") == "carries over":
            why = "computation carries over on equal tokens, and other tokens shift"
            return "authorship, or the text", why
        if outcomes.get("both") == "shifts":
            return "not separated", (
                "the two arms differ in who wrote the tokens and in how they were computed; "
                "compare the generated tokens read again as prompts (actds replay) as well"
            )
        return "not separated", (
            "other texts shift by themselves; compare arms behind the same prompts"
        )
    if ends and all(outcome == "carries over" for outcome in outcomes.values()):
        if len(ends) == 2:
            return "neither", reason
        return ("not computation" if "computation" in by else "not authorship"), reason
    return "undecided", reason or "nothing was found to separate"


def _beside(by: dict[About, list[Verdict]]) -> list[str]:
    """Return the instruments that shift where the tokens differ, and not by computation alone."""
    other = [*by.get("both", []), *by.get("text", [])]
    shifting = dict.fromkeys(v.instrument for v in other if v.outcome == "shifts")
    return [name for name in shifting if name not in _instruments(by, "shifts")]


def _instruments(by: dict[About, list[Verdict]], outcome: Outcome) -> set[str]:
    """Return the instruments that end so by computation, at any hook."""
    return {v.instrument for v in by.get("computation", []) if v.outcome == outcome}


def _ends(ended: Sequence[Verdict]) -> str:
    outcome = outcome_of(ended)
    if outcome != "shifts":
        return "is undecided" if outcome == "undecided" else outcome
    names = dict.fromkeys(verdict.instrument for verdict in ended if verdict.outcome == outcome)
    return f"shifts in {', '.join(names)}"


def leading(contrast: ContrastResult) -> tuple[str, str]:
    """Return the instrument and measure that charts follow: a dictionary's fit, else the first."""
    measured = dict.fromkeys((value.instrument, value.measure) for value in contrast.values)
    return next((lead for lead in LEADS if lead in measured), next(iter(measured), LEADS[-1]))


def _parts(contrasts: Sequence[ContrastResult]) -> list[GapPart]:
    by_hook: dict[str, dict[str, GapPart]] = {}
    for contrast in contrasts:
        if contrast.about not in ("computation", "authorship"):
            continue
        for value in contrast.values:
            key = value.instrument, value.measure
            if key != LEADS[0] or value.axis != ALL or value.value is None:
                continue
            part = GapPart(
                hook=contrast.hook,
                about=contrast.about,
                contrast=contrast.name,
                measure=value.measure,
                value=value.value,
                low=value.low,
                high=value.high,
            )
            by_hook.setdefault(contrast.hook, {}).setdefault(contrast.about, part)
    return [
        parts[about]
        for parts in by_hook.values()
        if len(parts) == 2
        for about in ("authorship", "computation")
    ]


def _next_steps(contrasts: Sequence[ContrastResult], separated: Separated) -> list[str]:
    """Return what to do, in the order of how much depends on it."""
    steps: list[str] = []
    pairs = list(judged(contrasts))
    abouts = {contrast.about for contrast in contrasts}
    # Their sum needs no advice of its own.
    known = {"both"} if {"computation", "authorship"} <= abouts else set()
    for contrast, verdict in pairs:
        if verdict.outcome == "shifts" and contrast.about not in known:
            added = ADDED.get(verdict.instrument)
            words = (added.advice if added else _WHAT[verdict.instrument]).format(
                first=contrast.first.name, other=contrast.second.name
            )
            hooks = [
                c.hook
                for c, v in pairs
                if (c.name, v.instrument, v.outcome)
                == (contrast.name, verdict.instrument, "shifts")
            ]
            steps.append(f"{words} ({', '.join(dict.fromkeys(hooks))}).")
    shifts = any(verdict.outcome == "shifts" for _, verdict in pairs)
    if shifts and separated in ("not separated", "undecided"):
        steps.append(
            "To separate authorship from computation, serve the tokens of the sampled arm again "
            "as prompts, and compare all three."
        )
    undecided = [(c, v) for c, v in pairs if v.outcome == "undecided"]
    if undecided:
        contrast, verdict = undecided[0]
        why = verdict.short[0] if verdict.short else "nothing could be tested"
        steps.append(
            f"Do not take {counted(len(undecided), 'undecided verdict')} for agreement. The first, "
            f"{verdict.instrument} of {contrast.name} at {contrast.hook}: {why}."
        )
    if not shifts and not undecided:
        steps.append(
            "Nothing: what was measured on one arm holds for the other, within the limits."
        )
    return list(dict.fromkeys(steps))
