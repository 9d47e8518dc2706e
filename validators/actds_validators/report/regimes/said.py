"""What the report says of a comparison of regimes: the answer, how large, of what, what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from actds.text import counted
from actds_validators.regimes.result import About, ContrastResult, Outcome, Regimes, Value, Verdict
from actds_validators.regimes.wording import LEADS, beyond, element_of, in_floor, signed
from actds_validators.report.words import Fact, count, percent, short

__all__ = [
    "ABOUT",
    "MARKS",
    "answer",
    "arms",
    "facts",
    "gap",
    "judged",
    "lead",
    "level",
    "next_steps",
    "number",
    "outcome",
    "separated",
    "split",
    "worst",
]

Level = Literal["PASS", "WARN", "INCONCLUSIVE"]
LEVELS: dict[Outcome, Level] = {
    "carries over": "PASS",
    "shifts": "WARN",
    "undecided": "INCONCLUSIVE",
}
MARKS: dict[Outcome, str] = {"carries over": "✓", "shifts": "!", "undecided": "?"}
ABOUT: dict[About, str] = {
    "computation": "computation: the same tokens behind the same prefix, computed another way",
    "authorship": "authorship: other tokens at equal positions behind the same prompt, computed "
    "alike",
    "both": "authorship and computation together: other tokens, computed another way",
    "text": "text: other tokens, computed alike",
}
_ORDER: tuple[Outcome, ...] = ("shifts", "undecided", "carries over")
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


def judged(result: Regimes) -> Iterator[tuple[ContrastResult, Verdict]]:
    """Yield every verdict with its contrast, those that shift first."""
    found = [(contrast, verdict) for contrast in result.contrasts for verdict in contrast.verdicts]
    yield from sorted(found, key=lambda pair: _ORDER.index(pair[1].outcome))


def outcome(verdicts: Sequence[Verdict]) -> Outcome:
    """Return what verdicts say together: one that shifts decides, then one that is undecided."""
    there = {verdict.outcome for verdict in verdicts}
    return next((one for one in _ORDER if one in there), "undecided")


def level(result: Regimes) -> Level:
    """Return the level of all verdicts, which is the colour of the page's head."""
    return LEVELS[outcome([verdict for _, verdict in judged(result)])]


def answer(result: Regimes) -> str:
    """Return the answer: whether the way it was served changes what is measured."""
    verdicts = [verdict for _, verdict in judged(result)]
    n = sum(verdict.outcome == "shifts" for verdict in verdicts)
    if n:
        return f"Yes: {n} of {counted(len(verdicts), 'verdict')} shift"
    n = sum(verdict.outcome == "undecided" for verdict in verdicts)
    if n:
        return f"Undecided: {n} of {counted(len(verdicts), 'verdict')}"
    return f"No: {counted(len(verdicts), 'verdict')}, and all carry over"


def facts(result: Regimes) -> list[Fact]:
    """Return how large it is, and whether it is authorship or computation."""
    return [_how_large(result), separated(result)]


def worst(result: Regimes) -> tuple[ContrastResult, Value] | None:
    """Return the value that shifts and lies farthest beyond its limit; of leading measures first.

    A leading measure of all rows is one number that a reader can weigh; the farthest channel of
    the farthest stratum is not. One that lies below its floor comes after those that do not.
    """
    found = [
        (contrast, value)
        for contrast in result.contrasts
        for value in contrast.values
        if value.outcome == "shifts"
    ]
    return max(
        found,
        key=lambda pair: (
            (pair[1].instrument, pair[1].measure) == LEADS[0] and pair[1].axis == "all",
            not in_floor(pair[1]),
            pair[1].axis == "all",
            beyond(pair[1]),
        ),
        default=None,
    )


def _how_large(result: Regimes) -> Fact:
    found = worst(result)
    if found is None:
        values = [v for c in result.contrasts for v in c.values if v.outcome is not None]
        within = sum(value.outcome == "carries over" for value in values)
        note = f"{within:,} of {len(values):,} tested values lie within their limits"
        return Fact("How large", "no shift found", note, is_known=bool(values))
    contrast, value = found
    assert value.value is not None
    times = f"{beyond(value):.2g} × the limit, " if value.limit else ""
    of = element_of(value)
    note = (
        f"{value.measure}{f' of {of}' if of else ''} ({value.unit}) at {value.hook}, "
        f"{contrast.name}{'' if value.axis == 'all' else f', {value.axis} {value.stratum}'}; "
        f"{times}95 % interval {_interval(value)}, {_floor(value)}"
    )
    return Fact("How large", signed(value, 3), note)


def _interval(value: Value) -> str:
    if value.low is None or value.high is None:
        return "unknown"
    return f"{value.low:.3g} to {value.high:.3g}"


def _floor(value: Value) -> str:
    return "no floor" if value.floor is None else f"floor {value.floor:.2g}"


def separated(result: Regimes) -> Fact:
    """Return whether what shifts is authorship or computation, as far as the contrasts show it."""
    title = "Authorship or computation"
    by: dict[About, list[Verdict]] = {}
    for contrast in result.contrasts:
        by.setdefault(contrast.about, []).extend(contrast.verdicts)
    found = {about: outcome(verdicts) for about, verdicts in by.items()}
    computation, authorship = found.get("computation"), found.get("authorship")
    asked: tuple[About, About] = ("computation", "authorship")
    said = [f"{name} {_ends(by[name])}" for name in asked if name in by]
    shifting = [n for n, o in (("computation", computation), ("authorship", authorship))
                if o == "shifts"]  # fmt: skip
    told = "; ".join(said)
    if shifting == ["computation"] and authorship is None and (rest := _beside(by)):
        # What only other tokens shift is not laid at the door of the computation.
        carried = {v.instrument for v in by["computation"]} - _instruments(by, "undecided")
        note = f"{told}; {', '.join(rest)} only where the tokens differ as well"
        if set(rest) <= carried:
            return Fact(title, "both", note)
        return Fact(title, "not separated", note, is_known=False)
    if shifting:
        value = "both" if len(shifting) == 2 else shifting[0]
        note = told if len(said) == 2 else f"{told}; the other of the two was not compared"
        return Fact(title, value, note)
    if "shifts" in (found.get("both"), found.get("text")):
        if computation == "carries over":
            note = "computation carries over on equal tokens, and other tokens shift"
            return Fact(title, "authorship, or the text", note)
        note = (
            "the arms differ in both; compare the tokens of G read again in prefill (arm R) as well"
            if found.get("both") == "shifts"
            else "other texts shift by themselves; compare arms behind the same prompts"
        )
        return Fact(title, "not separated", note, is_known=False)
    if said and all(one == "carries over" for one in found.values()):
        return Fact(title, "neither" if len(said) == 2 else f"not {said[0].split()[0]}", told)
    note = told or "nothing was found to separate"
    return Fact(title, "undecided", note, is_known=False)


def _beside(by: dict[About, list[Verdict]]) -> list[str]:
    """Return the instruments that shift where the tokens differ, and not by computation alone."""
    other = [*by.get("both", []), *by.get("text", [])]
    found = dict.fromkeys(verdict.instrument for verdict in other if verdict.outcome == "shifts")
    return [name for name in found if name not in _instruments(by, "shifts")]


def _instruments(by: dict[About, list[Verdict]], one: Outcome) -> set[str]:
    """Return the instruments that end so by computation, at any hook."""
    return {v.instrument for v in by.get("computation", []) if v.outcome == one}


def _ends(verdicts: Sequence[Verdict]) -> str:
    """Return how verdicts end together, and which instruments shift."""
    one = outcome(verdicts)
    if one != "shifts":
        return "is undecided" if one == "undecided" else one
    found = dict.fromkeys(verdict.instrument for verdict in verdicts if verdict.outcome == one)
    return f"shifts in {', '.join(found)}"


def lead(contrast: ContrastResult) -> tuple[str, str]:
    """Return the instrument and measure that charts follow: a dictionary's fit where it can."""
    there = {(value.instrument, value.measure) for value in contrast.values}
    return next((one for one in LEADS if one in there), LEADS[-1])


def gap(contrast: ContrastResult, axis: str) -> list[Value]:
    """Return the leading measure in the strata of an axis, of those where it is estimated."""
    chosen = lead(contrast)
    return [
        value
        for value in contrast.values
        if (value.instrument, value.measure) == chosen
        and value.axis == axis
        and value.value is not None
    ]


def split(result: Regimes) -> list[tuple[str, str]]:
    """Return per hook how a gap divides into authorship and computation, where both are there."""
    found = []
    hooks = dict.fromkeys(contrast.hook for contrast in result.contrasts)
    for hook in hooks:
        own = [one for one in result.contrasts if one.hook == hook]
        parts: dict[str, str] = {}
        for one in own:
            values = gap(one, "all")
            if values and lead(one) == LEADS[0] and one.about in ("computation", "authorship"):
                value = values[0]
                said = f"{value.value:+.3g} {one.about} ({one.name}, {_interval(value)})"
                parts.setdefault(one.about, said)
        if len(parts) == 2:
            found.append((hook, f"FVU {parts['authorship']} and {parts['computation']}"))
    return found


def next_steps(result: Regimes) -> list[str]:
    """Return what to do, in the order of how much depends on it."""
    steps: list[str] = []
    pairs = list(judged(result))
    abouts = {contrast.about for contrast in result.contrasts}
    # Their sum needs no advice of its own.
    known = {"both"} if {"computation", "authorship"} <= abouts else set()
    for contrast, verdict in pairs:
        if verdict.outcome == "shifts" and contrast.about not in known:
            words = _WHAT[verdict.instrument].format(
                first=contrast.first.name, other=contrast.second.name
            )
            hooks = [
                c.hook
                for c, v in pairs
                if (c.name, v.instrument, v.outcome)
                == (contrast.name, verdict.instrument, "shifts")
            ]
            steps.append(f"{words} ({', '.join(dict.fromkeys(hooks))}).")
    if not separated(result).is_known and any(v.outcome == "shifts" for _, v in pairs):
        steps.append(
            "To separate authorship from computation, serve the tokens of the sampled arm again "
            "as prompts, and compare all three: docs/regimes.md says how."
        )
    undecided = [(c, v) for c, v in pairs if v.outcome == "undecided"]
    if undecided:
        contrast, verdict = undecided[0]
        why = verdict.short[0] if verdict.short else "nothing could be tested"
        steps.append(
            f"Do not take {counted(len(undecided), 'undecided verdict')} for agreement. The first, "
            f"{verdict.instrument} of {contrast.name} at {contrast.hook}: {why}."
        )
    if not any(v.outcome == "shifts" for _, v in pairs) and not undecided:
        steps.append(
            "Nothing: what was measured on one arm holds for the other, within the limits."
        )
    return list(dict.fromkeys(steps))


def arms(contrast: ContrastResult) -> str:
    """Return how two arms were compared, in a sentence."""
    how = {
        "token": f"{count(contrast.n_pairs)} pairs of the same token behind the same prefix",
        "position": f"{count(contrast.n_pairs)} pairs of the same prompt and position",
        "unpaired": "unpaired, the reference weighted to the other arm's token ids and positions: "
        "adjusted, not matched"
        if contrast.adjusted
        else "unpaired, as they are",
    }[contrast.pairing]
    covered = percent(contrast.coverage)
    return (
        f"{contrast.name} at {contrast.hook}: {how}; {covered} of {contrast.second.name}'s rows "
        f"compared, {counted(contrast.n_groups, 'group')} of requests. {ABOUT[contrast.about]}."
    )


def number(value: float | None) -> str:
    """Return a number of a table, a dash for none."""
    return "-" if value is None else short(value)
