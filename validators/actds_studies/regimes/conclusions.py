"""Conclusions: a value in words, a verdict per instrument and hook, and the answer of all of them.

Pages and terminals word what stands here; they decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from actds.errors import ActdsError
from actds.text import counted
from actds_studies.regimes.result import (
    ALL,
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

Names = tuple[str, str]
"""Of the reference and of the other arm."""
LEADS = (("dictionary", "FVU over the reference's variance"), ("moments", "mean"))
"""Instrument and measure that charts and sentences follow, where they are there."""
_ORDER: tuple[Outcome, ...] = ("shifts", "undecided", "carries over")
_MAX_SHORT = 5
_ALIKE = 0.02
"""Difference of the shares of decode rows up to which two arms were computed alike."""
_MOST = 300.0  # of a logarithm: what is above has no number


@dataclass(frozen=True)
class Words:
    """What an instrument says, beside its measures' names.

    Args:
        advice: what to do where it shifts, with ``{first}`` and ``{other}`` for the arms.
        noun: of one of its elements, as ``channel``; empty where it has one alone.
        measures: by name of a measure what is said in the room of a figure, and as a sentence. A
            measure without them is told as its name and number.
    """

    advice: str
    noun: str = ""
    measures: Mapping[str, tuple[str, str]] = field(default_factory=dict)


MEASURES: dict[str, tuple[str, str]] = {
    "mean": (
        "{size} SD {higher}",
        "{second} lies {size} standard deviations {higher} than {first} in {element}",
    ),
    "variance": (
        "{ratio} × the variance",
        "the variance of {element} in {second} is {ratio} times that in {first}",
    ),
    "kurtosis": (
        "{ratio} × the kurtosis",
        "the kurtosis of {element} in {second} is {ratio} times that in {first}",
    ),
    "outlier rate of rows": (
        "{points} points {more} outliers",
        "{points} percentage points {more} rows of {second} than of {first} lie above 10 median "
        "norms",
    ),
    "outlier rate of channels": (
        "{points} points {more} outliers",
        "in {element} {points} percentage points {more} values of {second} than of {first} lie "
        "beyond 6 standard deviations",
    ),
    "FVU over the reference's variance": (
        "{points} points {more_of} unexplained",
        "the dictionary leaves {points} percentage points {more_of} of the variance of {first} "
        "unexplained in {second} than in {first}",
    ),
    "FVU over the arm's own variance": (
        "{points} points {more_of} unexplained",
        "the dictionary leaves {points} percentage points {more_of} of the variance unexplained in "
        "{second} than in {first}, each over its own variance",
    ),
    "active features of a row": (
        "{ratio} × the active features",
        "a row of {second} has {ratio} times as many active features as one of {first}",
    ),
    "rates of features": (
        "{ratio} × as often active",
        "{element} is active {ratio} times as often in {second} as in {first}",
    ),
    "turn of features": (
        "turned by {size}°",
        "the direction of {element} turns by {size}° from {first} to {second}",
    ),
    "relative L2": (
        "{percent} % of the norm apart",
        "rows of the same tokens lie {percent} % of their norm apart in {first} and {second}",
    ),
    "drift over the dictionary's error": (
        "{percent} % of the dictionary's error apart",
        "the squared distance between rows of the same tokens in {first} and {second} is {percent} "
        "% of the dictionary's squared error",
    ),
    "features that switch": (
        "{percent} % of the features switch",
        "{percent} % of the features that are active on a token in {first} or {second} are active "
        "in one of them only",
    ),
    "features of a token that differ": (
        "{percent} % of a token's features differ",
        "{percent} % of the features of a token are active in {first} or in {second} only, mean "
        "over tokens",
    ),
    "score": (
        "{size} SD {higher}",
        "scores of {element} lie {size} standard deviations {higher} in {second} than in {first}",
    ),
    "ROC area": (
        "{size} {higher} ROC area",
        "the area under the ROC curve of {element} is {size} {higher} in {second} than in {first}",
    ),
}
"""Of the instruments of regimes, by measure: in the room of a figure, and as a sentence."""
WORDS = {
    "moments": Words(
        "Take means and scales for normalization from rows of {other}, not of {first}",
        "channel",
        MEASURES,
    ),
    "numerics": Words(
        "Do not mix rows of {first} and {other}: compute with the settings of one of them "
        "throughout",
        "",
        MEASURES,
    ),
    "dictionary": Words(
        "Fit the dictionary on rows of both {first} and {other}, or report its numbers for each of "
        "them",
        "feature",
        MEASURES,
    ),
    "overlap": Words(
        "Do not expect the same features in {first} and {other}: compare features within one arm",
        "",
        MEASURES,
    ),
    "probes": Words(
        "Set the probes' thresholds on rows of {other}, or fit them on rows of both",
        "probe",
        MEASURES,
    ),
}
"""By instrument; `register_words` adds those that other studies bring."""


def register_words(instrument: str, words: Words) -> None:
    """Make the words of an instrument known to all pages; E009 where another has its name."""
    if WORDS.setdefault(instrument, words) != words:
        expected = "a name that no other instrument has"
        raise ActdsError("E009", "instrument", got=instrument[:80], expected=expected)


def _templates(value: Value) -> tuple[str, str] | None:
    words = WORDS.get(value.instrument)
    return words.measures.get(value.measure) if words else None


_UNITS = {"{ratio}": " times", "{points}": " points", "{percent}": " %"}
_AT = {
    "all": "over all rows",
    "position": "at position {}",
    "decode step": "at decode step {}",
    "entropy": "in entropy {}",
    "margin": "at a margin {}",
}


def in_words(value: Value, names: Names) -> str:
    """Return how far, and in which direction, the second arm lies from the reference.

    An overlap is read beside that within the reference.
    """
    if value.value is not None and (templates := _templates(value)):
        return _filled(templates[1], value, value.value, names)
    number = "nothing" if value.value is None else f"{value.value:.3g}"
    if value.kind == "overlap":
        return f"{value.measure}, is {number} between {names[0]} and {names[1]}"
    of = element_of(value)
    return f"{value.measure}{f' of {of}' if of else ''} is {number} ({value.unit})"


def big(value: Value, names: Names) -> str:
    """Return the same in the room of a figure, with the first word of its unit at least."""
    if value.value is not None and (templates := _templates(value)):
        return _filled(templates[0], value, value.value, names)
    return f"{value.unit.partition(' ')[0]} {value.value or 0.0:.3g}"


def _filled(template: str, value: Value, number: float, names: Names) -> str:
    size, rises = abs(number), number >= 0
    return template.format(
        first=names[0],
        second=names[1],
        element=element_of(value) or "the only element",
        size=f"{size:.3g}",
        points=f"{100 * size:.3g}",
        percent=f"{100 * size:.3g}",
        ratio=f"{_exp(number):.3g}",
        higher="higher" if rises else "lower",
        more="more" if rises else "fewer",
        more_of="more" if rises else "less",
    )


def _exp(value: float) -> float:
    return math.exp(max(-_MOST, min(value, _MOST)))


def limits_of(value: Value, names: Names) -> str:
    """Return what a value is compared with, in its own unit: interval, limit and floor."""
    template = (_templates(value) or ("", ""))[1]
    hundred = "{points}" in template or "{percent}" in template

    def number(of: float) -> str:
        return f"{_exp(of) if '{ratio}' in template else 100 * of if hundred else of:.3g}"

    unit = next((words for field, words in _UNITS.items() if field in template), "")
    parts = []
    if value.low is not None and value.high is not None:
        parts.append(f"95 % interval {number(value.low)} to {number(value.high)}{unit}")
    if value.limit is not None:
        under = " below the floor" if value.kind == "overlap" else ""
        parts.append(f"limit {number(value.limit)}{under}")
    between = f"between halves of {names[0]}"
    if value.kind == "overlap":
        between = f"within {names[0]}"
    elif "floor:" in value.note:
        between = "between rows computed alike twice"
    parts.append("no floor" if value.floor is None else f"floor {number(value.floor)} {between}")
    return "; ".join(parts)


def rows_of(value: Value, names: Names) -> str:
    """Return over which rows a value is, what they are worth weighted, and of how many tokens."""
    where = _AT.get(value.axis, f"in {value.axis} {{}}").format(value.stratum)
    tokens = ["", ""]
    if value.n_tokens is not None and value.axis != ALL:
        tokens = [
            ", all of one token" if n == 1 else f", {n:,} different tokens" for n in value.n_tokens
        ]
    if value.kind == "size" or value.instrument == "numerics":
        return f"{where} ({value.n_rows[0]:,} pairs{tokens[0]})"
    rows = [
        f"{n:,} of {name}{f', weighted worth {worth:,.0f}' if worth < 0.99 * n else ''}{of_tokens}"
        for n, name, worth, of_tokens in zip(
            value.n_rows, names, value.n_effective, tokens, strict=True
        )
    ]
    return f"{where} ({'; '.join(rows)})"


def element_of(value: Value) -> str:
    """Return which element a value is of, with its noun: ``channel 12``; empty for none."""
    words = WORDS.get(value.instrument)
    return f"{words.noun if words else ''} {value.element}".lstrip() if value.element else ""


def beyond(value: Value) -> float:
    """Return the size of a value over its limit; of an overlap, what is lost to its floor."""
    number = value.value or 0.0
    size = (value.floor or 0.0) - number if value.kind == "overlap" else abs(number)
    return size / (value.limit or 1.0)


def in_floor(value: Value) -> bool:
    """Return whether a value is no larger than what halves of the reference differ by."""
    if value.kind == "overlap" or value.floor is None:  # an overlap is measured from its floor
        return False
    return abs(value.value or 0.0) <= value.floor


def about(pairing: str, decode: tuple[float | None, float | None]) -> About:
    """Return what differs between two arms; decode steps computed a share of each, None unknown.

    Pairs by token are equal tokens behind equal prefixes.
    """
    if pairing == "token":
        return "computation"
    reference, other = decode
    if reference is None or other is None or abs(reference - other) > _ALIKE:
        return "both"
    return "authorship" if pairing == "position" else "text"


# verdicts -----------------------------------------------------------------------------------------


def verdicts(
    values: Sequence[Value], names: Names = ("the reference", "the other arm")
) -> list[Verdict]:
    """Return a verdict per instrument and hook: over all its measures and strata.

    It shifts when any value does; it carries over when every value that was judged does; else it is
    undecided. Strata of too few requests or rows are named, and decide nothing.
    """
    groups: dict[tuple[str, str], list[Value]] = {}
    for value in values:
        groups.setdefault((value.instrument, value.hook), []).append(value)
    return [_verdict(*key, group, names) for key, group in groups.items()]


def _verdict(instrument: str, hook: str, values: list[Value], names: Names) -> Verdict:
    tested = [value for value in values if value.outcome is not None]
    shifted = [value for value in tested if value.outcome == "shifts"]
    undecided = [value for value in tested if value.outcome == "undecided"]
    silent = [value for value in values if value.value is None and value.short]
    short = [f"{_place(value)}: {value.short}" for value in undecided if value.short]
    short += [f"{_stratum(value)}: {value.short}" for value in silent]
    outcome = outcome_of(tested)
    if outcome == "shifts":
        sentence = _shift(shifted, len(tested), names)
    elif outcome == "undecided":
        n = f"{len(undecided)} of {counted(len(tested), 'value')}"
        sentence = f"undecided, {n if tested else 'nothing could be tested'}."
    else:
        n = f"all {len(tested)} values lie" if len(tested) > 1 else "the only value lies"
        sentence = f"carries over, {n} within the limit."
    return Verdict(
        instrument=instrument,
        hook=hook,
        outcome=outcome,
        sentence=f"{instrument.capitalize()} at {hook}: {sentence}",
        short=list(dict.fromkeys(short))[:_MAX_SHORT],
    )


def _shift(shifted: Sequence[Value], n_tested: int, names: Names) -> str:
    # One over all rows is a number to weigh; a stratum may be of few rows and fewer tokens. What
    # lies below its floor may shift, but is no example of it.
    first = min(
        shifted,
        key=lambda value: (
            value.axis != ALL,
            in_floor(value),
            (value.instrument, value.measure) not in LEADS,
            value.adjusted_p,
            -beyond(value),
        ),
    )
    none = ", none over all rows" if first.axis != ALL else ""
    where, shift = rows_of(first, names), in_words(first, names)
    beside = f"{limits_of(first, names)}; adjusted p {first.adjusted_p:.2g}"
    return (
        f"shifts in {len(shifted)} of {counted(n_tested, 'value')}{none}. "
        f"{where[0].upper()}{where[1:]} {shift} ({beside})."
    )


def _place(value: Value) -> str:
    return value.measure if value.axis == ALL else f"{value.measure}, {_stratum(value)}"


def _stratum(value: Value) -> str:
    return value.axis + (" rows" if value.axis == ALL else f" {value.stratum}")


def judged(contrasts: Sequence[ContrastResult]) -> Iterator[tuple[ContrastResult, Verdict]]:
    pairs = [(contrast, verdict) for contrast in contrasts for verdict in contrast.verdicts]
    yield from sorted(pairs, key=lambda pair: _ORDER.index(pair[1].outcome))


def outcome_of(ended: Sequence[Verdict] | Sequence[Value]) -> Outcome:
    """Return what they say together: one that shifts decides, then one that is undecided."""
    outcomes = {each.outcome for each in ended}
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
    names = contrast.names
    times = f"{beyond(value):.2g} times the limit; " if value.limit else ""
    sentence = (
        f"{contrast.name} at {value.hook}, {rows_of(value, names)}: {in_words(value, names)} "
        f"({times}{limits_of(value, names)})."
    )
    return Largest(
        contrast=contrast.name, value=value.model_copy(update={"elements": []}), sentence=sentence
    )


def _separated(contrasts: Sequence[ContrastResult]) -> tuple[Separated, str]:
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
    other = [*by.get("both", []), *by.get("text", [])]
    shifting = dict.fromkeys(v.instrument for v in other if v.outcome == "shifts")
    return [name for name in shifting if name not in _instruments(by, "shifts")]


def _instruments(by: dict[About, list[Verdict]], outcome: Outcome) -> set[str]:
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
    steps: list[str] = []
    pairs = list(judged(contrasts))
    abouts = {contrast.about for contrast in contrasts}
    # Their sum needs no advice of its own.
    known = {"both"} if {"computation", "authorship"} <= abouts else set()
    for contrast, verdict in pairs:
        if verdict.outcome == "shifts" and contrast.about not in known:
            first, other = contrast.names
            words = WORDS[verdict.instrument].advice.format(first=first, other=other)
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
