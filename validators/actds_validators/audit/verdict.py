"""Verdict: what a person may conclude, and every number that decided it.

Rules in order, the first that applies.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from actds_validators.audit.missingness import bound
from actds_validators.audit.result import (
    BOUND,
    DETECTABLE,
    EQUIVALENCE,
    EVENTS,
    LEAST,
    MIN_BLAMED,
    PROVEN,
    SAMPLE,
    Accounting,
    Coverage,
    Difference,
    Estimate,
    FollowUp,
    Level,
    Limits,
    Mechanism,
    Missingness,
    Must,
    Number,
    Sample,
    Verdict,
    Weighting,
)
from actds_validators.audit.wording import (
    RUNS,
    Cause,
    asked,
    cause_of,
    events_needed,
    look_when,
    lost,
    not_found,
    on_cause,
    on_follow_up,
    on_policies,
    on_sample,
    on_strata,
    on_stratum,
    remedy,
    short_of,
    short_of_sample,
    stratum_words,
    training,
    unproven,
)
from actds_validators.statistics.intervals import loss_that_allows, worst_case

_SEVERITY: dict[Level, int] = {"PASS": 0, "INCONCLUSIVE": 1, "WARN": 2, "FAIL": 3}
STRATUM = "largest share lost of any one stratum (kind of token), beyond chance"
DESIGN = "farthest that the mean of any channel or norm can be off, by the follow-up"
BY_DESIGN = "by-design"
"""Kind of a verdict that a random sample of the losses decides, not tests of what they go with."""
_UNTESTED = "the tests cover dropped tokens, not aborted ones"
_SIDES: dict[Must, Callable[[float, float], bool]] = {
    "at most": operator.le,
    "below": operator.lt,
    "at least": operator.ge,
    "above": operator.gt,
}


@dataclass(frozen=True)
class Evidence:
    """Everything that a verdict rests on.

    Args:
        missingness: the section, ``None`` when nothing was lost.
        blocks_long_enough: whether blocks are long against the bursts of losses.
    """

    accounting: Accounting
    missingness: Missingness | None = None
    mechanism: Mechanism | None = None
    blocks_long_enough: bool = True
    weighting: Weighting | None = None
    coverage: Coverage | None = None
    policies: tuple[str, ...] = ()
    follow_up: FollowUp | None = None
    sample: Sample | None = None

    @property
    def lost_otherwise(self) -> float:
        """Return the share of the computed positions that were lost, and not by a draw."""
        account = self.accounting
        n = account.dropped + account.aborted - (self.sample.n_dropped if self.sample else 0)
        return n / max(1, account.computed)

    @property
    def beyond_draw(self) -> float:
        """Return how far a mean may be off, in SD, by what no draw left out."""
        if self.follow_up is None:
            return worst_case(min(self.lost_otherwise, 1 - 1e-9))
        follow_up = self.follow_up
        return follow_up.farthest.reach + worst_case(follow_up.unanswered) + self.of_stored_mean

    @property
    def of_stored_mean(self) -> float:
        """Return how far a follow-up is off, in SD, because the stored rows are drawn ones."""
        if self.follow_up is None or self.sample is None:
            return 0.0
        return self.follow_up.share * (self.sample.farthest.half_width or 0.0)


def judge(evidence: Evidence, limits: Limits) -> Verdict:
    """Return the verdict, the largest hole first.

    A stratum with excess loss outweighs every verdict that is less severe.

    Spec: 0.1 section 14.6.
    """
    verdict = _Judge(evidence, limits, _numbers(evidence, limits)).verdict()
    if verdict.kind == "unaccounted":
        return verdict
    if evidence.follow_up is not None:
        verdict = _by_design(verdict, evidence.follow_up, limits, evidence.of_stored_mean)
    if evidence.sample is not None:
        verdict = _by_sample(verdict, evidence, evidence.sample, limits)
    elif evidence.accounting.thinned and verdict.level == "PASS":
        words = f"{evidence.accounting.thinned:,} rows were not drawn, and no stored row is finite."
        few = {"level": "INCONCLUSIVE", "kind": "too-little-evidence", "sentence": words}
        verdict = verdict.model_copy(update={**few, "lacks": ["a stored row"], "next_steps": []})
    if evidence.sample is None or verdict.kind not in (BY_DESIGN, "biased"):
        verdict = _with_strata(verdict, evidence.missingness, limits)
    steps = [*verdict.next_steps, *on_policies(evidence.policies)]
    return verdict.model_copy(update={"next_steps": steps})


def _by_design(
    verdict: Verdict, follow_up: FollowUp, limits: Limits, of_stored_mean: float
) -> Verdict:
    """Return the verdict with a replay of a random part of the losses, which decides where it can.

    Args:
        of_stored_mean: how far the stored mean is off, as of what the follow-up finds.

    Spec: 0.1 section 14.12.
    """
    farthest, unknown = follow_up.farthest, worst_case(follow_up.unanswered) + of_stored_mean
    reach, negligible = farthest.reach + unknown, limits.negligible_bias
    number = _held(DESIGN, reach, "at most", negligible, "SD")
    at_most = (
        f"no mean of a channel or norm over the stored rows is off by more than {reach:.3f} SD"
    )
    numbers = [*verdict.numbers, number]
    if verdict.kind in ("complete", "negligible"):
        return verdict.model_copy(update={"numbers": numbers})
    known: dict[str, object] = {"numbers": numbers, "deciding": number, "lacks": []}
    few = follow_up.fraction < 1 and follow_up.n_requests < limits.min_events
    if number.ok and not few:
        verdict = verdict.model_copy(update=known)
        sentence = on_follow_up(follow_up, at_most)
        words = f"{sentence} So the losses do not matter to a mean, whatever they depend on."
        passed = {"level": "PASS", "kind": BY_DESIGN, "sentence": words}
        return verdict.model_copy(update={**passed, "next_steps": ["Train on it."]})
    proven = follow_up.proven - unknown
    if proven > negligible:
        level = "FAIL" if proven > limits.serious else "WARN"
        sentence = on_follow_up(follow_up, "means of the stored rows are off, whatever the cause")
        words = f"{sentence} {verdict.sentence}"
        biased = {"level": level, "kind": "biased", "sentence": words}
        steps = [
            "Train on the dataset together with the follow-up, once=True and weights='inclusion' "
            "of the loader; or with a replay of all that it lacks (actds replay --only missing).",
            *(step for step in verdict.next_steps if not step.startswith("Train on it")),
        ]
        return verdict.model_copy(update={**known, **biased, "next_steps": steps})
    lacks = [*verdict.lacks, *short_of(follow_up, unknown, limits)]
    words = f"{verdict.sentence} {on_follow_up(follow_up, at_most)}"
    return verdict.model_copy(update={"numbers": numbers, "lacks": lacks, "sentence": words})


def _by_sample(verdict: Verdict, evidence: Evidence, sample: Sample, limits: Limits) -> Verdict:
    """Return the verdict of runs whose rows were drawn, which the draw decides where it can.

    Spec: 0.1 section 14.13.
    """
    unknown, negligible = evidence.beyond_draw, limits.negligible_bias
    reach = sample.farthest.reach + unknown
    number = _held(SAMPLE, min(reach, 1e9), "at most", negligible, "SD")
    known: dict[str, object] = {"numbers": [*verdict.numbers, number], "deciding": number}
    sentence = on_sample(sample, reach)
    if not sample.agrees:
        step = "Run actds validate --level deep: it draws every row again."
        failed = {"level": "FAIL", "kind": "biased", "sentence": sentence, "next_steps": [step]}
        return verdict.model_copy(update={**known, **failed})
    lacks, whole = short_of_sample(sample, unknown, limits), sentence
    if evidence.follow_up is not None:
        off = "the rows that no draw left out move a mean of the drawn ones this far"
        whole = f"{sentence} {on_follow_up(evidence.follow_up, off)}"
    weigh = "Load with weights='inclusion': each row as 1 over its inclusion."
    if number.ok:
        passed = {"level": "PASS", "kind": BY_DESIGN, "sentence": whole, "lacks": []}
        return verdict.model_copy(update={**known, **passed, "next_steps": [weigh]})
    if unknown > negligible or verdict.kind not in ("complete", "negligible", BY_DESIGN):
        words = f"{verdict.sentence} {sentence}"
        more = {"numbers": known["numbers"], "lacks": [*verdict.lacks, *lacks], "sentence": words}
        return verdict.model_copy(update=more)
    few = {"level": "INCONCLUSIVE", "kind": "too-little-evidence", "sentence": whole}
    steps = ["Harvest longer, with the same settings, or with a faster disk (actds plan).", weigh]
    return verdict.model_copy(update={**known, **few, "lacks": lacks, "next_steps": steps})


def _with_strata(verdict: Verdict, missing: Missingness | None, limits: Limits) -> Verdict:
    if missing is None or not missing.worst_strata:
        return verdict
    worst = missing.worst_strata[0]
    level: Level = "FAIL" if worst.rate >= limits.worst_stratum_fail else "WARN"
    sentence = on_strata(missing.worst_strata, missing.bound.loss_share)
    if _SEVERITY[level] <= _SEVERITY[verdict.level]:
        steps = [*(on_stratum(worst) if worst.kind in RUNS else []), *verdict.next_steps]
        return verdict.model_copy(
            update={"sentence": f"{verdict.sentence} {sentence}", "next_steps": steps}
        )
    limit = limits.worst_stratum_fail if level == "FAIL" else limits.worst_stratum_warn
    deciding = _held(f"share lost of {stratum_words(worst)}", worst.rate, "below", limit, "share")
    warned = verdict.level == "WARN"  # what a milder verdict says of nothing is no longer so
    return Verdict(
        level=level,
        kind="worst-stratum",
        sentence=f"{sentence} {verdict.sentence}" if warned else sentence,
        deciding=deciding,
        numbers=[*(n for n in verdict.numbers if n.name != STRATUM), deciding],
        next_steps=[*on_stratum(worst), *(verdict.next_steps if warned else [])],
    )


def _numbers(evidence: Evidence, limits: Limits) -> dict[str, Number]:
    numbers = {}
    n_errors = sum(f.severity == "error" for f in evidence.accounting.findings)
    numbers["unexplained"] = _held("accounting mismatches", n_errors, "at most", 0)
    share = evidence.accounting.loss_share
    numbers["loss"] = _held(
        "share of computed tokens lost", share, "at most", limits.max_loss, "share"
    )
    allowed = loss_that_allows(limits.negligible_bias)
    numbers["bias"] = _held(
        BOUND,
        bound(share).bias,
        "at most",
        limits.negligible_bias,
        "SD",
        ok=share <= allowed,  # of a root at its limit the last digit is off
    )
    if evidence.mechanism is not None:
        m = evidence.mechanism
        numbers["events"] = _held(EVENTS, m.n_events, "at least", limits.min_events)
        smallest = min((t.adjusted_p for t in m.tests), default=1.0)
        numbers["p"] = _held("smallest adjusted p of all tests", smallest, "above", limits.fdr, "p")
        if m.detectable is not None:
            numbers["detectable"] = _held(
                DETECTABLE, m.detectable, "at most", limits.negligible_bias, "SD"
            )
        least = max((f.least_adjusted_p for f in m.families), default=0.0)
        numbers["least"] = _held(LEAST, least, "at most", limits.fdr, "p")
    if evidence.missingness is not None:
        strata = evidence.missingness.worst_strata
        numbers["stratum"] = _held(
            STRATUM, strata[0].rate if strata else 0.0, "below", limits.worst_stratum_warn, "share"
        )
        means = [d for d in evidence.missingness.differences if d.covariate.group != "system"]
        worst = _farthest(means)
        if worst is not None and worst.equivalence is not None:
            far = max(abs(worst.equivalence.low), abs(worst.equivalence.high))
            of = f"{worst.covariate.label}, of {len(means)}; each {100 * PROVEN:g} % by itself"
            numbers["difference"] = _held(
                f"{EQUIVALENCE} ({of})", far, "below", limits.negligible_bias, "SD"
            )
    return numbers


def _held(
    name: str, value: float, must: Must, limit: float, unit: str = "", *, ok: bool | None = None
) -> Number:
    """Return a number held against a limit; ``ok`` where rounding asks for another comparison."""
    kept = _SIDES[must](value, limit) if ok is None else ok
    return Number(name=name, value=value, must=must, limit=limit, unit=unit, ok=kept)


_STEPS = {
    "load-dependent": (
        "Train with --weights: inverse-probability weights by load and complexity",
        "Harvest again with --overflow thin or block, or with larger rings (actds plan).",
    ),
    "time-dependent": ("", "Harvest again with --overflow block: then nothing is lost."),
}
_STEPS_BY_CONTENT = (
    "Weights (--weights) fix losses that depend on load and complexity, not on the values",
    "Harvest again with --overflow block: then nothing is lost.",
)
"""By kind of verdict what is said of the weights, where they are advised, and the step after."""


@dataclass(frozen=True)
class _Judge:
    """The rules in their order over the numbers that decide."""

    evidence: Evidence
    limits: Limits
    numbers: dict[str, Number]

    def verdict(self) -> Verdict:
        """Return the verdict.

        In order: positions that nobody accounts for FAIL; a loss whose worst case is negligible
        passes, whatever it depends on; a heavy loss FAILs, with its cause; a loss that depends on
        content, values, load or time WARNs, and FAILs when the stored rows may be off by a serious
        amount on content or values; one that depends on nothing passes when its equivalence is
        proven on every content covariate by enough events, and is else INCONCLUSIVE.
        """
        numbers, mechanism, missing = (
            self.numbers,
            self.evidence.mechanism,
            self.evidence.missingness,
        )
        if not numbers["unexplained"].ok:
            return self._unaccounted()
        if numbers["bias"].ok:
            return self._negligible()
        cause = cause_of(mechanism) if mechanism is not None else None
        if not numbers["loss"].ok:
            return self._heavy(cause)
        if mechanism is None or missing is None:
            return self._too_little([_UNTESTED])
        if cause is not None:
            return self._caused(cause, mechanism, missing)
        if lacks := _lacks(self.evidence, mechanism, missing, self.limits):
            return self._too_little(lacks)
        sentence = (
            f"{lost(self.evidence.accounting)}, in {mechanism.n_events} separate events, and no "
            "test finds what they depend on. Every tested mean is the same over the stored rows as "
            f"over all computed tokens, within {self.limits.negligible_bias:g} SD: of every "
            f"{asked(missing)}."
        )
        return self._say("PASS", "uncorrelated", sentence, "difference", training(missing))

    def _say(
        self,
        level: Level,
        kind: str,
        sentence: str,
        deciding: str,
        next_steps: list[str],
        lacks: Sequence[str] = (),
    ) -> Verdict:
        return Verdict(
            level=level,
            kind=kind,
            sentence=sentence,
            deciding=self.numbers[deciding],
            numbers=list(self.numbers.values()),
            lacks=list(lacks),
            next_steps=next_steps,
        )

    def _unaccounted(self) -> Verdict:
        n = int(self.numbers["unexplained"].value)
        sentence = (
            f"{n} accounting mismatch{'' if n == 1 else 'es'}: rows, losses and census disagree, "
            "so nothing can be estimated from them."
        )
        step = "Run actds validate, which says what is wrong position by position."
        return self._say("FAIL", "unaccounted", sentence, "unexplained", [step])

    def _negligible(self) -> Verdict:
        account, bias = self.evidence.accounting, self.numbers["bias"].value
        kind, sentence = "complete", f"No rows were lost: {_stored(account)}."
        if account.loss_share:
            kind = "negligible"
            sentence = (
                f"{account.loss_share:.4%} of the computed tokens were lost; whatever they were, "
                f"no mean over the rows is off by more than {bias:.3f} SD."
            )
        return self._say("PASS", kind, sentence, "bias", ["Train on it."])

    def _heavy(self, cause: Cause | None) -> Verdict:
        mechanism, missing = self.evidence.mechanism, self.evidence.missingness
        why = f" {on_cause(cause, mechanism, missing)}" if mechanism and missing else ""
        sentence = (
            f"{lost(self.evidence.accounting)}, more than {self.limits.max_loss:.2%}: a mean over "
            f"the rows may be off by up to {self.numbers['bias'].value:.2f} SD.{why}"
        )
        steps = [
            "Harvest again with --overflow thin or block, or with a faster disk (actds plan).",
            *remedy(self.evidence.weighting, "Or train with --weights, and say that you did"),
            *look_when(cause.rejected if cause else []),
        ]
        return self._say("FAIL", "heavy", sentence, "loss", steps)

    def _caused(self, cause: Cause, mechanism: Mechanism, missing: Missingness) -> Verdict:
        sentence, judge, more = on_cause(cause, mechanism, missing), self, []
        if cause.content:
            by_name = {d.covariate.name: d for d in missing.differences}
            of = [by_name[t.covariate.name] for t in cause.content if t.covariate.name in by_name]
            farthest = max(of, key=_stored_off, default=None)
            worst = _stored_off(farthest) if farthest else 0.0
            name = "largest bias, content or values with a rejected test"
            effect = _held(name, worst, "at most", self.limits.serious, "SD")
            judge = replace(self, numbers={**self.numbers, "effect": effect})
            sentence += (
                f" The means of these covariates over the stored rows are off by up to {worst:.3f} "
                "SD" + (f" ({_span(farthest.at_once)})." if farthest and farthest.at_once else ".")
            )
            more = ["Look at the differences: do they affect what you study?"]
        is_serious = "effect" in judge.numbers and not judge.numbers["effect"].ok
        weights, again = _STEPS.get(cause.kind, _STEPS_BY_CONTENT)
        advised = remedy(self.evidence.weighting, weights) if weights else []
        steps = [*advised, *more, *look_when(cause.rejected), again]
        level: Level = "FAIL" if is_serious else "WARN"
        return judge._say(level, cause.kind, sentence, "effect" if is_serious else "p", steps)

    def _too_little(self, lacks: list[str]) -> Verdict:
        numbers, mechanism, missing = (
            self.numbers,
            self.evidence.mechanism,
            self.evidence.missingness,
        )
        sentence = "No test finds a pattern, but there is too little evidence to exclude one."
        order = ["least", "events", "difference", "bias"]
        if mechanism is not None and missing is not None:
            sentence = unproven(mechanism, MIN_BLAMED)
            if events_needed(mechanism, missing, self.limits) > self.limits.min_events:
                order = ["least", "difference", "events", "bias"]
        short = [name for name in order if name in numbers and not numbers[name].ok]
        steps = [
            "Harvest longer, with the same settings, or without loss (--overflow block).",
            f"Or show that a bias of {numbers['bias'].value:.2f} SD, the worst case, does not "
            "matter to you.",
        ]
        sentence = f"{lost(self.evidence.accounting)}. {sentence}"
        deciding = short[0] if short else "loss"
        return self._say("INCONCLUSIVE", "too-little-evidence", sentence, deciding, steps, lacks)


def _stored(account: Accounting) -> str:
    if not account.captured:
        return "no computed token was to be stored"
    excepted = [
        f"{n:,} {words}"
        for n, words in (
            (account.thinned, "that were not drawn"),
            (account.filtered, "that a rule left out"),
            (account.undelivered, "computed past the end of a request"),
        )
        if n
    ]
    rest = f", but for {' and '.join(excepted)}" if excepted else ""
    return f"every computed token is stored{rest}"


def _lacks(
    evidence: Evidence, mechanism: Mechanism, missing: Missingness, limits: Limits
) -> list[str]:
    lacks = not_found(mechanism, limits)
    if mechanism.n_events < limits.min_events:
        n = mechanism.n_events
        events = f"{n} independent loss event{'' if n == 1 else 's'}"
        lacks.append(f"{events}, of {limits.min_events} needed")
    if not evidence.blocks_long_enough:
        lacks.append("the run is too short for its bursts of losses: intervals would be too narrow")
    account = evidence.accounting
    aborted = account.aborted / max(1, account.computed)
    if bound(aborted).bias > limits.negligible_bias:
        lacks.append(f"{aborted:.2%} of the computed tokens were aborted: {_UNTESTED}")
    unread = account.unread / max(1, account.computed)
    if bound(unread).bias > limits.negligible_bias:
        lacks.append(
            f"{unread:.2%} of the computed tokens were dropped without readouts: what they were is "
            "not on record"
        )
    covariates = [d for d in missing.differences if d.covariate.group != "system"]
    if not covariates:
        lacks.append("no content covariate has an interval")
    wide = [
        d.covariate.label
        for d in covariates
        if d.equivalence is None
        or max(-d.equivalence.low, d.equivalence.high) >= limits.negligible_bias
    ]
    if wide:
        more = f" and {len(wide) - 3} more" if len(wide) > 3 else ""
        needed = events_needed(mechanism, missing, limits)
        lacks.append(
            f"equivalence within {limits.negligible_bias:g} is not proven for "
            f"{', '.join(wide[:3])}{more}"
            + (f": about {needed:,} events would be needed" if needed > mechanism.n_events else "")
        )
    return lacks


def _span(interval: Estimate) -> str:
    """Return the interval of a bias in words, of its size: the sign is that of a mean."""
    ends = sorted((abs(interval.low), abs(interval.high)))
    low = 0.0 if interval.low <= 0 <= interval.high else ends[0]
    return f"{100 * interval.confidence:g} % interval for all at once {low:.3f} to {ends[1]:.3f}"


def _farthest(means: list[Difference]) -> Difference | None:
    return max(
        (d for d in means if d.equivalence is not None),
        key=lambda d: max(abs(d.equivalence.low), abs(d.equivalence.high)) if d.equivalence else 0,
        default=None,
    )


def _stored_off(difference: Difference) -> float:
    return abs(difference.before_weighting.value) if difference.before_weighting else 0.0
