"""Wording: what losses depend on, what to do about it, and what an audit would not notice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actds.text import counted
from actds_validators.audit.covariates import COVARIATES, MAX_PROBES, CovariateDef, Widths
from actds_validators.audit.missingness import MIN_TOKENS
from actds_validators.audit.result import (
    MIN_BLAMED,
    Accounting,
    Association,
    FollowUp,
    Limits,
    Mechanism,
    Missingness,
    Sample,
    StratumLoss,
    Weighting,
)
from actds_validators.statistics.strata import MIN_HITS

CLEAR_P = 0.001
"""Tests of an adjusted p up to this are told apart by their differences, not by their p."""
DOMINANT = 0.1
"""Share of the squared deviation from which one token id at one position is an outlier."""
WORTHWHILE = 0.9
"""Weights are advised where they reduce the largest bias to less than this share of it."""


def largest(tests: list[Association], missing: Missingness) -> Association:
    """Return the test to name: of those clearly rejected, the one of the largest difference.

    Which of two tiny p is smaller says nothing. Where none is clear, the smallest p.
    """
    smd = {d.covariate.name: abs(d.smd.value) for d in missing.differences}
    least = min(t.adjusted_p for t in tests)
    clear = [t for t in tests if t.adjusted_p <= max(least, CLEAR_P)]
    return max(clear, key=lambda t: (smd.get(t.covariate.name, 0.0), -t.adjusted_p))


def adjusted(test: Association) -> str:
    """Return a test's adjusted p in words; which of two tiny ones it is says nothing."""
    p = test.adjusted_p
    return "adjusted p < 0.0001" if p < 1e-4 else f"adjusted p {p:.2g}"


@dataclass(frozen=True)
class Cause:
    """What the losses depend on, as far as the tests say.

    Args:
        kind: of a verdict: ``values-dependent``, ``content-dependent``, ``load-dependent`` or
            ``time-dependent``.
    """

    kind: str
    rejected: list[Association]

    @property
    def content(self) -> list[Association]:
        return [t for t in self.rejected if t.covariate.group != "system"]

    @property
    def load(self) -> list[Association]:
        return [t for t in self.rejected if t.covariate.group == "system" and t.name != "change"]


def cause_of(mechanism: Mechanism) -> Cause | None:
    """Return what the losses depend on; ``None`` where no test says so.

    Tokens of one step met the same load: only `within` separates content from it. The other tests
    compare steps, whose mix of phases, positions and lengths changes with the load: a queue that
    prefill filled overflows some steps later, under drop_newest over more decode than usual. So
    where the load is rejected and no `within` is, the load is the cause.
    """
    rejected = [t for t in mechanism.tests if t.rejected]
    if mechanism.n_events < MIN_BLAMED or not rejected:
        return None
    cause = Cause("", rejected)
    if cause.content and (not cause.load or any(t.name == "within" for t in rejected)):
        with_values = any(t.covariate.group == "values" for t in cause.content)
        return replace(cause, kind="values-dependent" if with_values else "content-dependent")
    return replace(cause, kind="load-dependent" if cause.load else "time-dependent")


def on_cause(cause: Cause | None, mechanism: Mechanism, missing: Missingness) -> str:
    if cause is None:
        if mechanism.n_events < MIN_BLAMED:
            return unproven(mechanism, MIN_BLAMED)
        n = sum(not family.could_be_found for family in mechanism.families)
        more = f", and {n} of {len(mechanism.families)} questions could not have" if n else ""
        return f"No test finds what the losses depend on{more}."
    if cause.kind == "load-dependent":
        return _on_load(cause, mechanism, missing)
    if cause.kind == "time-dependent":
        first = largest(cause.rejected, missing)
        return (
            f"Losses depend on the time alone ({adjusted(first)}): {fewer(first)}. No test of the "
            f"load is rejected, and none of any {asked(missing, 'or')}."
        )
    return _on_content(cause, mechanism, missing)


_GROUP_WORDS = {"content": "content", "values": "the values"}


def _groups(tests: list[Association]) -> str:
    return " and ".join(_GROUP_WORDS[g] for g in sorted({t.covariate.group for t in tests}))


def _inside(mechanism: Mechanism) -> str:
    if any(t.name == "within" for t in mechanism.tests):
        return "No test among the tokens of one step, which have the same load, is rejected."
    return "Content cannot be separated from load: no step could be tested by its own tokens."


def _on_load(cause: Cause, mechanism: Mechanism, missing: Missingness) -> str:
    first = largest(cause.load, missing)
    load = f"Losses depend on the load: on {first.covariate.label} ({adjusted(first)})"
    if not cause.content:
        return f"{load}, and on no {asked(missing, 'or')}: {fewer(first)}."
    other = largest(cause.content, missing)
    return (
        f"{load}: {fewer(first)}. Steps that lost tokens differ in {_groups(cause.content)} as "
        f"well ({other.covariate.label}, {adjusted(other)}), which can come from the load: the mix "
        f"of phases, positions and lengths changes with it. {_inside(mechanism)}"
    )


def _on_content(cause: Cause, mechanism: Mechanism, missing: Missingness) -> str:
    within = [t for t in cause.content if t.name == "within"]
    first = largest(within or cause.content, missing)
    named, p, what = first.covariate.label, adjusted(first), _groups(cause.content)
    if within:
        return (
            f"Losses depend on {what}: {named} differs even among the tokens of one step ({p}), "
            "which the load of the step does not explain."
        )
    inside = f"No test of the load is rejected. {_inside(mechanism)}"
    if what == "content":
        return (
            f"Losses depend on the content of the steps ({named}, {p}), which can come from the "
            f"load alone: the mix of phases, positions and lengths changes with it. {inside}"
        )
    return f"Losses depend on {what} of whole steps ({named}, {p}). {inside}"


def fewer(test: Association) -> str:
    """Return which steps are under-represented among the stored rows, as the test found them.

    Its own sign says so: the mean over lost tokens, in which wide steps weigh more, may lie on the
    other side.
    """
    if test.name == "change":
        return f"its rate changed, {test.note}" if test.note else "its rate changed"
    covariate = COVARIATES.get(test.covariate.name, CovariateDef)
    return f"{covariate.sides[0 if test.statistic > 0 else 1]} are under-represented"


def unproven(mechanism: Mechanism, least: int) -> str:
    """Return what is said where no cause is named and none is excluded.

    No covariate is named: of thirty intervals some leave out 0 in most runs, however harmless.
    """
    n, untested = (
        mechanism.n_events,
        sum(not family.could_be_found for family in mechanism.families),
    )
    if n < least:
        return (
            f"All losses are {n} independent event{'' if n == 1 else 's'}: too few to tell a cause "
            "from chance."
        )
    if untested:
        return (
            f"No test finds a pattern, and {untested} of {len(mechanism.families)} questions "
            "could have found none here, however strong."
        )
    return "No test finds a pattern, but there is too little evidence to exclude one."


def lost(account: Accounting) -> str:
    words = f"{account.loss_share:.2%} of the computed tokens were lost"
    causes = [w for w in account.waterfall if w.name in ("dropped", "aborted")]
    if len(causes) > 1:
        most = max(causes, key=lambda w: w.n_positions)
        part = most.n_positions / sum(w.n_positions for w in causes)
        words += f" ({part:.0%} of them {most.name}: {most.reason or 'no reason given'})"
    return words


_PLACES = {
    "special tokens": "the special tokens",
    "position": "the tokens at position {}",
    "position from the end": "the tokens {} positions before the last of their request",
    "phase": "the {} tokens",
    "tail of a value": "the {}",
    "first prompt block": "the requests of first prompt block {}",
    "overflow policy": "the runs under overflow policy {}",
}


def stratum_words(stratum: StratumLoss) -> str:
    if (stratum.kind, stratum.label) == ("position from the end", "0"):
        return "the last token of each request"
    words = _PLACES.get(stratum.kind, f"{stratum.kind} {{}}")
    return words.format(stratum.label.replace("{", "").replace("}", ""))


RUNS = ("run", "replica")
"""Kinds of strata that are whole runs."""


def on_stratum(worst: StratumLoss) -> list[str]:
    if worst.kind not in RUNS:
        return [
            "Harvest again with --overflow block: no weight makes up for rows that are not there.",
            "Or document that the dataset lacks them: the report lists strata with excess loss.",
        ]
    what = stratum_words(worst)
    loss = "stored nothing" if worst.n_lost == worst.n else "lost far more than the others"
    return [
        f"{what[0].upper()}{what[1:]} {loss}: look at its log, its disk and its rings. Harvest its "
        "prompts again, with --overflow block, or leave its run out of the training."
    ]


def on_policies(policies: Sequence[str]) -> list[str]:
    if len(policies) < 2:
        return []
    return [
        f"The runs have {len(policies)} overflow policies ({', '.join(policies)}), which lose "
        "other rows: compare them run by run, or train on those of one policy."
    ]


def on_strata(strata: list[StratumLoss], share: float) -> str:
    worst = strata[0]
    if worst.n_lost == worst.n:
        loss = f"All {worst.n:,} rows of {stratum_words(worst)} were lost"
    else:
        loss = (
            f"{worst.rate:.0%} of the rows of {stratum_words(worst)} were lost "
            f"({worst.n_lost:,} of {worst.n:,})"
        )
    n_others = len(strata) - 1
    more = (
        f"; {n_others} more strat{'a have' if n_others > 1 else 'um has'} excess loss"
        if n_others
        else ""
    )
    return f"{loss}, against {share:.2%} of all{more}."


QUESTIONS: dict[str, str] = {
    "time": "whether the rate of the losses changed in time",
    "load": "whether losses depend on the load",
    "content of steps": "whether losses depend on the content of the steps",
    "values of steps": "whether losses depend on the values of the steps",
    "content of tokens": "whether lost tokens differ in content from others of their step",
    "values of tokens": "whether lost tokens differ in values from others of their step",
}
"""The families of tests in words."""


def not_found(mechanism: Mechanism, limits: Limits) -> list[str]:
    return [
        f"{QUESTIONS[family.question]} could not have been found here: {family.n_draws:,} "
        f"{family.drawn} give an adjusted p of {family.least_adjusted_p:.2g} at least, the limit "
        f"is {limits.fdr:g}"
        + (f"; a run of {family.needed:,} steps or more could" if family.needed else "")
        for family in mechanism.families
        if not family.could_be_found
    ]


def events_needed(mechanism: Mechanism, missing: Missingness, limits: Limits) -> int:
    """Return about how many loss events the widest equivalence interval would need, at least.

    An interval narrows with the root of the number of events.
    """
    halves = [
        (d.equivalence.high - d.equivalence.low) / 2
        for d in missing.differences
        if d.equivalence and d.covariate.group != "system"
    ]
    widest = max(halves, default=0.0) / limits.negligible_bias
    return math.ceil(mechanism.n_events * max(1.0, widest**2) - 1e-6)


def look_when(rejected: list[Association]) -> list[str]:
    if not any(t.name == "change" for t in rejected):
        return []
    return [
        "Look at the trace: what changed at that time? Weights by load do not fix it; leave out "
        "the part of the run that lost more, or harvest it again."
    ]


def remedy(weighting: Weighting | None, words: str) -> list[str]:
    """Return the step to train with weights, with what they do.

    None where they do little; where they make something worse, what that is instead.
    """
    if weighting is None:
        return []
    before, after = (
        max((getattr(b, side) for b in weighting.balance), default=0.0)
        for side in ("before", "after")
    )
    if not after < WORTHWHILE * before:
        return []
    changes = ", ".join(
        f"{b.group} from {b.before:.3g} to {b.after:.3g}" for b in weighting.balance
    )
    if weighting.worse:
        worst = weighting.worse[0]
        n_others = len(weighting.worse) - 1
        more = f", and {n_others} more" if n_others else ""
        return [
            f"Weights (--weights) are not advised: they change the largest biases ({changes}), but "
            f"make {worst.label} worse ({worst.before:.3g} to {worst.after:.3g}{more})."
        ]
    return [f"{words}; the largest bias of a mean of stored rows changes: {changes}."]


def asked(missing: Missingness, joint: str = "and") -> str:
    has_values = any(d.covariate.group == "values" for d in missing.differences)
    other = f"{joint} readout" if has_values else "that was tested"
    return f"content covariate {other}"


def training(missing: Missingness) -> list[str]:
    if any(d.covariate.group == "values" for d in missing.differences):
        return ["Train on it."]
    return [
        "Train on it, unless you study the activation values themselves: without readouts it is "
        "unknown whether losses depend on them."
    ]


def on_follow_up(follow_up: FollowUp, off: str) -> str:
    """Return what a follow-up found.

    Args:
        off: what it says of the means of the stored rows.
    """
    farthest = follow_up.farthest
    bias = farthest.bias
    numerics = f", and {farthest.numerics:.4f} for its numerics" if farthest.numerics else ""
    return (
        f"A replay of requests drawn with probability {follow_up.fraction:.3g} computed "
        f"{follow_up.n_answered:,} of {follow_up.n_missing:,} positions that lack a row again: "
        f"{off} ({farthest.variable} of {farthest.hook}: {bias.value:+.4f} SD, "
        f"{100 * bias.confidence:g} % interval for all means at once {bias.low:+.4f} to "
        f"{bias.high:+.4f}{numerics})."
    )


def short_of(follow_up: FollowUp, unknown: float, limits: Limits) -> list[str]:
    """Return why a follow-up does not decide, and what would."""
    farthest, negligible = follow_up.farthest, limits.negligible_bias
    half = (farthest.bias.high - farthest.bias.low) / 2
    other = unknown + (farthest.numerics or 0.0) + abs(farthest.bias.value)
    lacks = []
    if unknown > negligible / 2 and follow_up.n_answered < follow_up.n_drawn:
        lacks.append(
            f"the follow-up has no row of {follow_up.n_drawn - follow_up.n_answered:,} of the "
            f"{follow_up.n_drawn:,} positions that it drew"
        )
    few = follow_up.n_requests < limits.min_events
    if follow_up.fraction < 1 and (half > negligible / 2 or few):
        # The variance goes with (1 - F) / F.
        room = max(negligible - other, negligible / 4)
        odds = (1 - follow_up.fraction) / follow_up.fraction * (room / max(half, room)) ** 2
        needed = max(1 / (1 + odds), follow_up.fraction * limits.min_events / follow_up.n_requests)
        share = f"a --fraction of about {needed:.2g}" if needed < 0.9 else "all of them"
        lacks.append(
            f"the follow-up drew {counted(follow_up.n_requests, 'request')} that "
            f"{'lacks' if follow_up.n_requests == 1 else 'lack'} a row; {share}, with the same "
            "seed, would decide"
        )
    return lacks or ["the follow-up finds a bias that is neither negligible nor proven"]


_STORED_WRONG = (
    "rows that are stored but wrong: the audit reads tables; actds validate and the check "
    "before a harvest look at values, and actds regimes compares those of phases, runs or "
    "datasets"
)


def on_sample(sample: Sample, reach: float) -> str:
    """Return what the draw of a run's rows says of its means."""
    n, check, farthest = sample.n_thinned + sample.n_dropped, sample.readouts, sample.farthest
    words = (
        f"{counted(n, 'row')} {'was' if n == 1 else 'were'} not drawn, each with a known "
        f"probability ({sample.minimum:.3g} at least)"
    )
    if check is not None and not check.agrees:
        return (
            f"{words}, but the stored rows are not such a draw: by them the mean of "
            f"{check.variable} is off by {check.deviation:+.4f} SD from that of "
            f"all {check.n_rows:,} readouts, and chance allows {check.room:.4f}."
        )
    words += f": weighted by 1/inclusion the stored ones are {sample.effective_rows:,.0f} effective"
    if farthest.half_width is None:
        return f"{words}, too few to say how far a mean may be off."
    agreement = ""
    if check is not None:
        agreement = (
            f" All {check.n_values:,} means of readouts, which every row has, lie where the drawn "
            "rows say."
        )
    return (
        f"{words} rows, and no mean of a channel or norm is off by more than {reach:.3f} SD, "
        f"whatever the load depended on ({farthest.variable} of {farthest.hook}; 95 % for all "
        f"means at once).{agreement}"
    )


def short_of_sample(sample: Sample, unknown: float, limits: Limits) -> list[str]:
    """Return why a draw does not decide, and what would."""
    half, negligible = sample.farthest.half_width, limits.negligible_bias
    lacks = []
    if unknown > negligible / 2:
        lacks.append(
            f"rows were lost that no draw left out: they may move a mean by {unknown:.3f} SD"
        )
    if half is None:
        lacks.append("the rows that were drawn with a probability below 1 are too few")
    elif half + unknown > negligible:
        room = max(negligible - unknown, negligible / 4)
        needed = sample.effective_rows * max(1.0, half / room) ** 2
        lacks.append(
            f"{sample.effective_rows:,.0f} effective rows; about {needed:,.0f} would decide, drawn "
            "alike"
        )
    return lacks


def blind_spots(
    hooks: tuple[str, ...],
    widths: Widths,
    n_probes: int,
    *,
    followed_up: bool = False,
    drawn: bool = False,
) -> list[str]:
    """Return what the audit of some runs cannot detect, each in a sentence.

    Args:
        hooks: hooks with readouts in every run that lost something.
        n_probes: user's probes of a hook, those that are not looked at as well.
        followed_up: whether a replay says what rows are like that were lost.
        drawn: whether every row that is not stored was left out by a draw of known probability.

    Spec: 0.1 section 14.9.
    """
    if followed_up:
        values = (
            "losses that leave the mean of every channel and of the norm as it is, and change "
            "something else (the rate of a rare feature, a variance), or are of a few requests "
            "unlike all that the follow-up drew"
        )
    elif hooks:
        seen = f"the norm, {widths.n_projections} random projections"
        seen += f" and {widths.n_probes} probes" if widths.n_probes else ""
        values = (
            f"losses that depend on a direction of the activations that no readout has ({seen} of "
            "each hook are all that is known of a lost row)"
        )
    else:
        values = (
            "losses that depend on the values of the rows or on token ids: without readouts "
            "neither is known of a lost row"
        )
    more = []
    if n_probes > MAX_PROBES:
        more.append(
            f"losses that depend on a probe beyond the first {MAX_PROBES} of a hook (there are "
            f"{n_probes})"
        )
    if drawn:  # a mean of whatever function of a row is known by design
        return [
            "what a rate or a mean is that few rows carry, beyond its interval",
            "tokens that never reached the engine of a server: requests that it refused or never "
            "got",
            _STORED_WRONG,
        ]
    return [
        values,
        *more,
        f"any pattern in fewer than {MIN_BLAMED} independent loss events",
        "a dependence on load or content that is too weak for its number of events",
        "losses that follow the load after a longer time than its moving averages cover",
        f"the loss of a token id, source or other kind of fewer than {MIN_TOKENS} tokens, or lost "
        f"in fewer than {MIN_HITS} blocks of the run (one request, one burst)",
        "a pattern in aborted tokens, which were computed when a request or run ended: they count "
        "in the share lost, and are in no test",
        "the loss of all requests of one user, where neither the source nor the first block of "
        "the prompts identifies that user",
        "losses by the meaning of a text, where its token ids, lengths, positions and sources are "
        "like the rest",
        "tokens that never reached the engine of a server: requests that it refused or never got",
        _STORED_WRONG,
    ]
