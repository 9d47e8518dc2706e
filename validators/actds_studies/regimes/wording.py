"""A value in words: what lies how far from what, in which direction, and over which rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from actds.errors import ActdsError
from actds_studies.regimes.result import Value

Names = tuple[str, str]
BUILT_IN = ("moments", "numerics", "dictionary", "overlap", "probes")
_NOUNS = {"moments": "channel ", "dictionary": "feature ", "probes": "probe "}
_MOST = 300.0  # of a logarithm: what is above has no number
WORDS: dict[str, tuple[str, str]] = {
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
"""By measure: in the room of a figure, and as a sentence."""


@dataclass(frozen=True)
class Words:
    """What an instrument of a study says, beside its measures' names.

    Args:
        advice: what to do where it shifts, with ``{first}`` and ``{other}`` for the arms.
        noun: of one of its elements, as ``channel``; empty where it has one alone.
        measures: by name of a measure what ``WORDS`` has: in the room of a figure, and as a
            sentence. A measure without them is told as its name and number.
    """

    advice: str
    noun: str = ""
    measures: Mapping[str, tuple[str, str]] = field(default_factory=dict)


ADDED: dict[str, Words] = {}
"""Words of the instruments that other studies than `regimes` brought, by name."""


def register_words(instrument: str, words: Words) -> None:
    """Make the words of an instrument known to sentences, pages and terminals.

    Raises:
        ActdsError: E009 another instrument has the name.
    """
    if instrument in BUILT_IN or ADDED.get(instrument, words) != words:
        expected = "a name that no other instrument has"
        raise ActdsError("E009", "instrument", got=instrument[:80], expected=expected)
    ADDED[instrument] = words


def _templates(value: Value) -> tuple[str, str] | None:
    added = ADDED.get(value.instrument)
    return (WORDS if added is None else added.measures).get(value.measure)


_UNITS = {"{ratio}": " times", "{points}": " points", "{percent}": " %"}
_AT: dict[str, str] = {
    "position": "at position {}",
    "decode step": "at decode step {}",
    "entropy": "in entropy {}",
    "margin": "at a margin {}",
}


def in_words(value: Value, names: Names) -> str:
    """Return how far, and in which direction, the second arm lies from the reference.

    Args:
        names: of the reference and of the other arm.
    """
    return _filled(value, names, 1, _plain)


def big(value: Value, names: Names) -> str:
    """Return the same in the room of a figure, with its unit."""
    return _filled(value, names, 0, _short)


def _filled(
    value: Value, names: Names, place: int, otherwise: Callable[[Value, Names], str]
) -> str:
    templates = _templates(value)
    if templates is None or value.value is None:
        return otherwise(value, names)
    size, rises = abs(value.value), value.value >= 0
    return templates[place].format(
        first=names[0],
        second=names[1],
        element=element_of(value) or "the only element",
        size=f"{size:.3g}",
        points=f"{100 * size:.3g}",
        percent=f"{100 * size:.3g}",
        ratio=f"{_exp(value.value):.3g}",
        higher="higher" if rises else "lower",
        more="more" if rises else "fewer",
        more_of="more" if rises else "less",
    )


def _exp(value: float) -> float:
    return math.exp(max(-_MOST, min(value, _MOST)))


def _plain(value: Value, names: Names) -> str:
    """Return an overlap, which is read beside that within the reference, or any other measure."""
    number = "nothing" if value.value is None else f"{value.value:.3g}"
    if value.kind == "overlap":
        return f"{value.measure}, is {number} between {names[0]} and {names[1]}"
    of = element_of(value)
    return f"{value.measure}{f' of {of}' if of else ''} is {number} ({value.unit})"


def _short(value: Value, names: Names) -> str:
    """Return the number with the first word of its unit: ``correlation 0.64``."""
    return f"{value.unit.partition(' ')[0]} {0.0 if value.value is None else value.value:.3g}"


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
    if value.floor is None:
        parts.append("no floor")
    elif value.kind == "overlap":
        parts.append(f"floor {number(value.floor)} within {names[0]}")
    elif "floor:" in value.note:
        parts.append(f"floor {number(value.floor)} between rows computed alike twice")
    else:
        parts.append(f"floor {number(value.floor)} between halves of {names[0]}")
    return "; ".join(parts)


def rows_of(value: Value, names: Names) -> str:
    """Return over which rows a value is, and what these are made of.

    A stratum is named with its rows, what they are worth where they are weighted, and how many
    different tokens they are.
    """
    where = "over all rows" if value.axis == "all" else _at(value)
    if value.kind == "size" or value.instrument == "numerics":
        return f"{where} ({value.n_rows[0]:,} pairs{_tokens(value, 0)})"
    rows = [
        f"{n:,} of {name}{_worth(value, k)}{_tokens(value, k)}"
        for k, (n, name) in enumerate(zip(value.n_rows, names, strict=True))
    ]
    return f"{where} ({'; '.join(rows)})"


def _at(value: Value) -> str:
    return _AT.get(value.axis, f"in {value.axis} {{}}").format(value.stratum)


def _worth(value: Value, k: int) -> str:
    n, worth = value.n_rows[k], value.n_effective[k]
    return f", weighted worth {worth:,.0f}" if worth < 0.99 * n else ""


def _tokens(value: Value, k: int) -> str:
    if value.n_tokens is None or value.axis == "all":
        return ""
    n = value.n_tokens[k]
    return ", all of one token" if n == 1 else f", {n:,} different tokens"


def element_of(value: Value) -> str:
    """Return which element a value is of, with its noun: ``channel 12``; empty for none."""
    added = ADDED.get(value.instrument)
    noun = f"{added.noun} ".lstrip() if added else _NOUNS.get(value.instrument, "")
    return f"{noun}{value.element}" if value.element else ""


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
