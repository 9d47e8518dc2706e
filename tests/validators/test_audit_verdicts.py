"""Verdicts: what harvests of known truth get, and every rule and border of the judge."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actds.format.tables import READOUTS_FULL
from actds_testing.audit_results import COVARIATES
from actds_testing.audit_tokens import audited, tables_of
from actds_testing.calibration.audit import HALF_QUEUE, QUEUE
from actds_testing.calibration.parts import with_hooks
from actds_testing.simulate import SCENARIOS, simulate
from actds_validators.audit.lookup import CellEdges
from actds_validators.audit.missingness import bound
from actds_validators.audit.result import (
    Accounting,
    Association,
    Balance,
    Covariate,
    Difference,
    Estimate,
    Family,
    Finding,
    Group,
    Limits,
    Mechanism,
    Missingness,
    Number,
    StratumLoss,
    Verdict,
    WaterfallStep,
    Weighting,
    Worse,
)
from actds_validators.audit.verdict import Evidence, judge
from actds_validators.audit.weights import Cells, weigh, weighting

LIMITS = Limits()
MEANS = Limits(worst_stratum_warn=1, worst_stratum_fail=1)
"""Limits under which means decide: the tails of what a loss goes with are lost to a fifth."""


def verdict_of(name: str, seed: int, limits: Limits = LIMITS, **changes: Any) -> Verdict:
    run = simulate(replace(SCENARIOS[name], **changes), seed)
    return judge(audited(tables_of(run), limits=limits), limits)


# harvests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "block"])
def test_a_harvest_that_lost_nothing_is_complete(name: str) -> None:
    found = verdict_of(name, 1, n_steps=800)
    assert (found.level, found.kind) == ("PASS", "complete")
    assert found.deciding.value == 0 and found.deciding.limit == LIMITS.negligible_bias


def test_a_tiny_loss_is_negligible_though_it_goes_with_the_values() -> None:
    found = verdict_of("negligible", 1, n_steps=1500)
    assert (found.level, found.kind) == ("PASS", "negligible")
    assert 0 < found.deciding.value <= LIMITS.negligible_bias


def test_a_fifth_is_heavy() -> None:
    found = verdict_of("heavy", 1, n_steps=800)
    assert (found.level, found.kind) == ("FAIL", "heavy")
    assert found.deciding.value > found.deciding.limit == LIMITS.max_loss  # type: ignore[operator]


def test_a_loss_at_random_is_uncorrelated_only_where_equivalence_is_proven() -> None:
    changes = {"n_steps": 4000, "rate": 0.04}
    narrow = Limits(negligible_bias=0.005)
    short = verdict_of("mcar_steps", 1, narrow, **changes)
    assert (short.level, short.kind) == ("INCONCLUSIVE", "too-little-evidence")
    assert len(short.lacks) == 1 and short.lacks[0].startswith("equivalence within 0.005 is not pr")
    proven = verdict_of("mcar_steps", 1, **changes)
    assert (proven.level, proven.kind) == ("PASS", "uncorrelated")
    assert proven.deciding.limit == 0.02 and 0.005 < proven.deciding.value < 0.02
    assert "within 0.02 SD" in proven.sentence


def test_few_events_are_too_few() -> None:
    found = verdict_of("few_events", 2, n_steps=4000, rate=0.02)
    assert (found.level, found.kind) == ("INCONCLUSIVE", "too-little-evidence")
    assert "3 independent loss events, of 30 needed" in found.lacks


def test_a_loss_under_load_warns() -> None:
    found = verdict_of("mar_load", 3, n_steps=6000, rate=0.04)
    assert (found.level, found.kind) == ("WARN", "load-dependent")
    assert found.deciding.value < LIMITS.fdr and found.deciding.ok is False
    assert "busy times" in found.sentence or "above its mean" in found.sentence


def test_a_queue_that_overflows_warns_of_the_load_and_of_the_content_that_comes_with_it() -> None:
    found = verdict_of("queue", 3, n_steps=12_000, rate=0.03, readouts=False)
    assert (found.level, found.kind) == ("WARN", "load-dependent")
    assert found.numbers[-1].value < LIMITS.serious
    assert found.sentence.startswith("Losses depend on the load")
    assert "prefill, against decode" in found.sentence
    assert "can come from the load: the mix of phases" in found.sentence
    assert "Content cannot be separated from load" in found.sentence
    assert "selection" not in found.sentence and "--weights" in found.next_steps[0]


@pytest.mark.parametrize("name", ["mnar_content", "mnar_projection", "mnar_steps"])
def test_a_loss_by_value_is_told_and_fails_when_it_is_serious(name: str) -> None:
    changes = {"n_steps": 3000, "rate": 0.03}
    found = verdict_of(name, 4, MEANS, **changes)
    # Only the one that takes whole steps can come from the load, which goes with the mean norm.
    whole = name == "mnar_steps"
    kind = "load-dependent" if whole else "values-dependent"
    assert (found.level, found.kind) == ("WARN", kind)
    assert ("even among the tokens of one step" in found.sentence) is not whole
    assert ("the values as well" in found.sentence) is whole
    effect = found.numbers[-1]
    assert 0 < effect.value < LIMITS.serious and effect.limit == LIMITS.serious
    strict = MEANS.model_copy(update={"serious": effect.value * 0.99})
    strict = verdict_of(name, 4, strict, **changes)
    assert (strict.level, strict.kind) == ("FAIL", kind)
    assert strict.deciding.value == pytest.approx(effect.value)


def test_a_strong_selection_fails_at_the_default_limits() -> None:
    changes = {"n_steps": 3000, "rate": 0.045}
    mild = verdict_of("mnar_content", 4, MEANS, **changes)
    strong = verdict_of("mnar_content", 4, MEANS, strength=3.0, **changes)
    assert (mild.level, strong.level) == ("WARN", "FAIL")
    assert strong.kind == "values-dependent"
    assert strong.deciding.name == "largest bias, content or values with a rejected test"
    assert strong.deciding.value > LIMITS.serious > mild.numbers[-1].value  # type: ignore[operator]
    # Below the share that is heavy, the worst case leaves room for it.
    assert LIMITS.serious < bound(LIMITS.max_loss).bias


def test_hooks_of_noise_beside_it_hide_no_loss_by_load() -> None:
    changes = {**QUEUE, "n_steps": 3000}
    made = tables_of(simulate(replace(SCENARIOS["queue"], **changes), 5))
    few, many = (audited(with_hooks(made, n, 5)) for n in (1, 8))
    assert few.mechanism is not None and many.mechanism is not None
    load = [next(f for f in m.mechanism.families if f.question == "load") for m in (few, many)]
    assert load[0].p == load[1].p <= 0.0125  # the losses were moved alike, however many hooks ask
    for found in (few, many):
        verdict = judge(found, LIMITS)
        assert (verdict.level, verdict.kind) == ("WARN", "load-dependent")
        assert verdict.sentence.startswith("Losses depend on the load")


def test_a_queue_that_took_a_part_of_each_step_is_a_loss_by_load() -> None:
    found = verdict_of("queue", 20_680_000, **{**HALF_QUEUE, "n_steps": 5000})
    assert (found.level, found.kind) == ("WARN", "load-dependent")


def test_a_run_too_short_for_any_test_says_so() -> None:
    made = tables_of(simulate(replace(SCENARIOS["mcar_steps"], n_steps=50, rate=0.1), 2))
    found = audited(made)
    assert found.mechanism is not None
    load = next(f for f in found.mechanism.families if f.question == "load")
    n = len(found.mechanism.families)
    assert (load.n_draws, load.least_p, load.could_be_found) == (50, 1 / 50, False)
    assert load.least_adjusted_p == pytest.approx(n / 50) and load.needed == 20 * n
    verdict = judge(found, Limits(max_loss=1.0))
    assert verdict.level == "INCONCLUSIVE"
    assert "whether losses depend on the load could not have been found here: 50 circular" in (
        " ".join(verdict.lacks))  # fmt: skip


def test_without_readouts_a_loss_by_value_cannot_be_told() -> None:
    found = audited(tables_of(simulate(
        replace(SCENARIOS["mnar_projection"], n_steps=2000, rate=0.03, readouts=False), 4
    )))  # fmt: skip
    assert found.missingness is not None
    assert any("MNAR" in question for question in found.missingness.could_not_ask)
    assert not any(d.covariate.group == "values" for d in found.missingness.differences)


def test_losses_that_left_no_readouts_are_no_pass() -> None:
    """Their worst case counts, as that of aborted tokens does."""
    for n, level in ((1, "PASS"), (100, "INCONCLUSIVE")):
        unread = WaterfallStep(name="dropped", reason=READOUTS_FULL, n_positions=n, share=0.01)
        found = judge(evidence(waterfall=[unread]), LIMITS)
        assert found.level == level
        assert any("not on record" in words for words in found.lacks) == (level != "PASS")


# the judge ------------------------------------------------------------------------------------


def account(n_lost: int, n: int = 10_000, **others: Any) -> Accounting:
    told: dict[str, Any] = {
        "positions": n, "computed": n, "captured": n - n_lost, "cache_ref": 0, "dropped": n_lost,
        "aborted": 0, "filtered": 0, "recomputed": 0, "unresolved": 0, "requests": 10, "steps": 100,
        "loss_share": n_lost / n, "waterfall": [], "findings": [], **others,
    }  # fmt: skip
    return Accounting(**told)


def covariate(group: Group) -> Covariate:
    name, label, unit, of = next(c for c in COVARIATES if c[3] == group)
    return Covariate(name=name, label=label, unit=unit, group=of)


def difference(
    group: Group, low: float = -0.01, high: float = 0.01, bias: float = 0.01
) -> Difference:
    return Difference(
        covariate=covariate(group), mean_all=0.0, sd_all=1.0, mean_lost=(low + high) / 2,
        smd=Estimate(value=(low + high) / 2, low=low - 0.01, high=high + 0.01),
        equivalence=Estimate(value=(low + high) / 2, low=low, high=high, confidence=0.9),
        before_weighting=Estimate(value=bias, low=bias - 0.01, high=bias + 0.01),
    )  # fmt: skip


def association(group: Group, p: float, *, rejected: bool, name: str = "shift") -> Association:
    return Association(
        name=name, covariate=covariate(group), statistic=1.0, p=p, adjusted_p=p,
        rejected=rejected, n_units=50, unit="shifts",
    )  # fmt: skip


def evidence(
    n_lost: int = 200,
    tests: tuple[Association, ...] = (),
    found: tuple[Difference, ...] = (difference("content"), difference("values")),
    n_events: int = 30,
    detectable: float | None = 0.01,
    *,
    long_enough: bool = True,
    least: float = 0.01,
    balance: dict[Group, tuple[float, float]] | None = None,
    **others: Any,
) -> Evidence:
    return Evidence(
        account(n_lost, **others),
        Missingness(differences=list(found), bound=bound(n_lost / 10_000), could_ask=[],
                    could_not_ask=[]),
        Mechanism(
            tests=[association("system", 0.4, rejected=False), *tests], n_events=n_events,
            families=[Family(
                question="load", n_tests=1, p=0.4, adjusted_p=0.4, n_draws=100, drawn="shifts",
                least_p=least, least_adjusted_p=least, could_be_found=least <= 0.05, needed=120,
            )],
            n_steps=100, n_lost_steps=40, n_partial_steps=0, n_blocks=20, block_steps=5,
            detectable=detectable,
        ),
        long_enough,
        None if balance is None else Weighting(
            n_cells=1, n_rows=1, effective_rows=1, largest=1, complexity="rarity", cells=[],
            balance=[Balance(group=g, before=b, after=a) for g, (b, a) in balance.items()],
            claim="",
        ),
    )  # fmt: skip


def lies_right(number: Number) -> bool:
    """Return whether a number lies on its side of its limit, by its own words."""
    value, limit = number.value, number.limit
    assert value is not None and limit is not None
    if math.isclose(value, limit, rel_tol=1e-12):  # of a root at its limit the last digit is off
        return number.must in ("at most", "at least")
    return (value < limit) == (number.must in ("at most", "below"))


def kind(given: Evidence, limits: Limits = LIMITS) -> tuple[str, str]:
    found = judge(given, limits)
    assert found.deciding in found.numbers and found.sentence and found.next_steps
    assert lies_right(found.deciding) == (found.level == "PASS")
    assert [n.ok for n in found.numbers] == [lies_right(n) for n in found.numbers]
    assert bool(found.lacks) == (found.level == "INCONCLUSIVE")
    assert all(n.limit is not None and n.ok is not None for n in found.numbers)
    assert len({n.name for n in found.numbers}) == len(found.numbers)
    return found.level, found.kind


ERROR = Finding(code="E406", place="here", got="1", expected="2", severity="error")
REJECTED = {group: association(group, 0.001, rejected=True)
            for group in ("system", "content", "values")}  # fmt: skip


def test_what_does_not_add_up_fails_whatever_else_there_is() -> None:
    assert kind(evidence(findings=[ERROR])) == ("FAIL", "unaccounted")
    assert kind(evidence(0, findings=[ERROR])) == ("FAIL", "unaccounted")
    noted = ERROR.model_copy(update={"severity": "warning"})
    assert kind(evidence(0, findings=[noted])) == ("PASS", "complete")


def test_negligible_ends_where_the_worst_case_does() -> None:
    # sqrt(s / (1 - s)) = 0.02 at s = 0.0004 / 1.0004.
    n = 10_004
    assert kind(evidence(4, n=n)) == ("PASS", "negligible")
    assert math.sqrt(4 / 10_000) == LIMITS.negligible_bias
    assert kind(evidence(5, n=n))[1] != "negligible"
    assert kind(evidence(4, tests=(REJECTED["values"],), n=n)) == ("PASS", "negligible")


def test_heavy_begins_above_the_limit() -> None:
    assert kind(evidence(500))[1] == "uncorrelated"
    assert kind(evidence(501)) == ("FAIL", "heavy")
    assert kind(evidence(10_000)) == ("FAIL", "heavy")
    assert kind(evidence(501, tests=(REJECTED["values"],))) == ("FAIL", "heavy")
    assert kind(evidence(501), Limits(max_loss=0.06))[1] == "uncorrelated"


def test_a_rejected_test_decides_by_its_group() -> None:
    assert kind(evidence(tests=(REJECTED["system"],))) == ("WARN", "load-dependent")
    assert kind(evidence(tests=(REJECTED["content"],))) == ("WARN", "content-dependent")
    both = (REJECTED["content"], REJECTED["values"])
    assert kind(evidence(tests=both)) == ("WARN", "values-dependent")


def test_what_the_load_explains_is_no_loss_by_content_or_values() -> None:
    for group in ("content", "values"):
        of_steps = (REJECTED["system"], REJECTED[group])
        assert kind(evidence(tests=of_steps)) == ("WARN", "load-dependent")
        sentence = judge(evidence(tests=of_steps), LIMITS).sentence
        assert sentence.startswith("Losses depend on the load: on load, last 8 steps")
        assert "which can come from the load" in sentence
        # The load of one step explains no difference between its tokens.
        inside = (*of_steps, WITHIN[group])
        assert kind(evidence(tests=inside)) == ("WARN", f"{group}-dependent")


@pytest.mark.parametrize(
    ("tests", "words"),
    [((), "No test finds what the losses depend on"), (("system",), "depend on the load"),
     (("values",), "depend on the values of whole steps")],
)  # fmt: skip
def test_a_heavy_loss_says_what_it_depends_on_or_that_nothing_was_found(
    tests: tuple[Group, ...], words: str
) -> None:
    given = evidence(600, tuple(REJECTED[group] for group in tests))
    assert kind(given) == ("FAIL", "heavy")
    found = judge(given, LIMITS)
    assert "6.00% of the computed tokens were lost" in found.sentence and words in found.sentence
    stratum = next(n for n in found.numbers if n.name.startswith("largest share lost of any"))
    assert stratum.name.endswith("beyond chance") and stratum.value == 0  # lost by coin: no stratum


WITHIN = {group: association(group, 0.002, rejected=True, name="within")
          for group in ("content", "values")}  # fmt: skip
KEPT = association("content", 0.4, rejected=False, name="within")
LOAD, WHOLE, INSIDE = "from the load alone", "of whole steps", "even among the tokens of one step"


@pytest.mark.parametrize(
    ("tests", "words", "others"),
    [
        ([REJECTED["content"]], [LOAD, "Content cannot be separated"], [WHOLE, INSIDE]),
        ([REJECTED["content"], KEPT], [LOAD, "No test among the tokens of"],
         ["Content cannot be", INSIDE]),
        ([WITHIN["content"]], [INSIDE, "0.002"], [LOAD, WHOLE]),
        # The test within is named, though another has a smaller p.
        ([REJECTED["content"], WITHIN["content"]], [INSIDE, "0.002"], [LOAD, WHOLE, "0.001"]),
        ([REJECTED["content"], WITHIN["values"]], [INSIDE, "content and the values", "row norm"],
         [LOAD]),
        ([REJECTED["values"]], [WHOLE, "No test of the load"], [LOAD, INSIDE]),
    ],
)  # fmt: skip
def test_only_a_test_within_steps_tells_content_from_load(
    tests: list[Association], words: list[str], others: list[str]
) -> None:
    given = evidence(tests=tuple(tests))
    assert kind(given)[0] == "WARN"
    sentence = judge(given, LIMITS).sentence
    assert [w for w in words if w not in sentence] == []
    assert [w for w in others if w in sentence] == []


@pytest.mark.parametrize("groups", [("system",), ("content",), ("values",), ()])
def test_weights_are_advised_where_they_bring_the_rows_nearer_and_nowhere_else(
    groups: tuple[Group, ...],
) -> None:
    tests = tuple(REJECTED[group] for group in groups)
    n_lost = 200 if groups else 600  # too many, without a test
    better: dict[Group, tuple[float, float]] = {"system": (0.03, 0.002), "content": (0.01, 0.011)}
    # A tenth less is worth it, not a little less, nor less of what is small.
    worse: dict[Group, tuple[float, float]] = {"system": (0.03, 0.028), "content": (0.01, 0.001)}

    def advice(balance: dict[Group, tuple[float, float]] | None) -> list[str]:
        steps = judge(evidence(n_lost, tests, balance=balance), LIMITS).next_steps
        assert steps
        return [step for step in steps if "weights" in step.lower()]

    [step] = advice(better)
    assert "system from 0.03 to 0.002, content from 0.01 to 0.011" in step
    assert advice(worse) == advice(None) == []


def test_what_is_short_says_how_many_events_it_would_take() -> None:
    # Half a width is 0.06 here, three times too wide: nine times the events.
    wide = (difference("content", -0.06, 0.06), difference("values"))
    found = judge(evidence(found=wide, n_events=40), LIMITS)
    assert any("about 360 events would be needed" in lack for lack in found.lacks)
    assert found.deciding.name.startswith("farthest end of an equivalence interval")
    few = judge(evidence(n_events=29), LIMITS)
    assert few.deciding.name == "independent loss events"
    assert few.lacks == ["29 independent loss events, of 30 needed"]


def test_where_no_test_rejects_no_covariate_is_named_however_far_off_its_interval() -> None:
    moved = (difference("content"), difference("system", 0.2, 0.6))
    found = judge(evidence(found=moved, n_events=10), LIMITS)
    assert found.kind == "too-little-evidence"
    assert found.sentence.endswith(
        "No test finds a pattern, but there is too little evidence to exclude one."
    )
    assert moved[1].covariate.label not in found.model_dump_json()


@pytest.mark.parametrize(("n_events", "blamed"), [(1, False), (2, False), (3, True)])
def test_under_three_events_no_cause_is_named(n_events: int, blamed: bool) -> None:
    given = evidence(tests=(REJECTED["values"], REJECTED["system"]), n_events=n_events)
    assert kind(given)[0] == ("WARN" if blamed else "INCONCLUSIVE")
    found = judge(given, LIMITS)
    label = covariate("values").label
    assert (label in found.sentence) is blamed
    if not blamed:
        events = f"{n_events} independent event{'s' * (n_events > 1)}"
        assert f"All losses are {events}: too few to tell a cause" in found.sentence


def stratum(rate: float, kind: str = "token id", label: str = "7") -> StratumLoss:
    return StratumLoss(kind=kind, label=label, n=1000, n_lost=round(1000 * rate), rate=rate,
                       n_blocks=20, adjusted_p=1e-9)  # fmt: skip


def with_strata(given: Evidence, *strata: StratumLoss) -> Evidence:
    assert given.missingness is not None
    update = {"worst_strata": list(strata), "n_strata": 500}
    return replace(given, missingness=given.missingness.model_copy(update=update))


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(0.05, ("WARN", "worst-stratum")), (0.199, ("WARN", "worst-stratum")),
     (0.2, ("FAIL", "worst-stratum")), (1.0, ("FAIL", "worst-stratum"))],
)  # fmt: skip
def test_a_stratum_decides_where_it_is_the_more_severe(
    rate: float, expected: tuple[str, str]
) -> None:
    worst = stratum(rate)
    for n_lost, tests, others in ((3, (), 10_004), (200, (), 10_000), (200, (), 10_000)):
        given = with_strata(evidence(n_lost, tests, n=others), worst)
        assert kind(given) == expected
        assert "Train on it." not in judge(given, LIMITS).next_steps
    loaded = with_strata(evidence(tests=(REJECTED["values"],)), worst)
    found = judge(loaded, LIMITS)
    assert (found.level == "FAIL") is (rate >= 0.2)
    assert "token id 7" in found.sentence and "depend on the values" in found.sentence
    heavy = with_strata(evidence(501), worst)
    assert kind(heavy) == ("FAIL", "heavy") and "token id 7" in judge(heavy, LIMITS).sentence
    mild = Limits(worst_stratum_warn=0.01, worst_stratum_fail=1)
    assert kind(with_strata(evidence(), stratum(0.5)), mild) == ("WARN", "worst-stratum")


@pytest.mark.parametrize(
    ("worst", "words"),
    [
        (stratum(1.0), "All 1,000 rows of token id 7 were lost, against 2.00% of all."),
        (stratum(0.25, "position from the end", "0"),
         "25% of the rows of the last token of each request were lost (250"),
        (stratum(0.25, "position from the end", "1 to 2"),
         "25% of the rows of the tokens 1 to 2 positions before the last of their request were"),
        (stratum(1.0, "source", "{0}"), "All 1,000 rows of source 0 were lost"),
        (stratum(1.0, "tail of a value", "highest 1% of the norm at resid_post.3"),
         "rows of the highest 1% of the norm at resid_post.3 were lost"),
    ],
)  # fmt: skip
def test_a_stratum_is_named_with_its_share(worst: StratumLoss, words: str) -> None:
    assert words in judge(with_strata(evidence(), worst), LIMITS).sentence
    two = judge(with_strata(evidence(), worst, stratum(0.1)), LIMITS).sentence
    assert "; 1 more stratum has excess loss." in two


def test_the_largest_cause_is_named_where_there_are_several() -> None:
    steps = [
        WaterfallStep(name="dropped", reason="queue_full", n_positions=150, share=0.015),
        WaterfallStep(name="aborted", reason="shutdown", n_positions=50, share=0.005),
    ]
    several = judge(evidence(n_events=5, waterfall=steps), LIMITS)
    assert "were lost (75% of them dropped: queue_full)" in several.sentence
    assert "of them" not in judge(evidence(n_events=5, waterfall=steps[:1]), LIMITS).sentence


def test_weights_that_make_something_worse_are_not_advised() -> None:
    balance: dict[Group, tuple[float, float]] = {"system": (0.2, 0.01), "content": (0.084, 0.105)}
    given = evidence(tests=(REJECTED["system"],), balance=balance)
    assert given.weighting is not None
    worse = [Worse(label="rarity of the token", group="content", before=0.084, after=0.105)]
    harmful = replace(given, weighting=given.weighting.model_copy(update={"worse": worse}))
    [step] = [s for s in judge(harmful, LIMITS).next_steps if "eights" in s]
    assert step.startswith("Weights (--weights) are not advised")
    assert "make rarity of the token worse (0.084 to 0.105)" in step
    [step] = [s for s in judge(given, LIMITS).next_steps if "eights" in s]
    assert step.startswith("Train with --weights")


def test_a_bias_that_grows_beyond_the_tolerance_is_told() -> None:
    def moved(group: Group, before: float, after: float) -> Difference:
        one = difference(group, bias=before)
        return one.model_copy(update={"after_weighting": Estimate(value=after, low=-1, high=1)})

    cells = weigh(Cells(CellEdges((), "position", ()), 1.0, np.array([[9.0]]), np.array([[1.0]])))
    found = [moved("system", 0.2, -0.01), moved("content", -0.084, 0.105),
             moved("values", 0.01, -0.0199), moved("values", 0.03, 0.0319)]  # fmt: skip
    section = weighting(cells, found, 0.02)
    assert section is not None
    assert [(w.group, w.before, w.after) for w in section.worse] == [("content", 0.084, 0.105)]
    assert weighting(cells, found[2:], 0.02).worse == []  # type: ignore[union-attr]


def test_of_clear_rejections_the_largest_difference_is_named() -> None:
    tiny, small = (association(g, p, rejected=True, name="within")
                   for g, p in (("content", 1e-140), ("values", 1e-110)))  # fmt: skip
    moved = (difference("content", 0.1, 0.2), difference("values", 1.4, 1.8))
    sentence = judge(evidence(tests=(tiny, small), found=moved), LIMITS).sentence
    assert "row norm, resid_post.10 differs" in sentence
    unclear = association("values", 0.04, rejected=True, name="within")
    assert "prompt length" in judge(evidence(tests=(tiny, unclear), found=moved), LIMITS).sentence


def test_a_change_in_time_is_no_load() -> None:
    time = Covariate(name="time", label="time in the run", unit="s", group="system")
    change = association("system", 0.001, rejected=True, name="change")
    change = change.model_copy(update={"covariate": time})
    balance: dict[Group, tuple[float, float]] = {"system": (0.03, 0.002)}
    alone = judge(evidence(tests=(change,), balance=balance), LIMITS)
    assert alone.kind == "time-dependent" and "on the time alone" in alone.sentence
    assert [step for step in alone.next_steps if "--weights" in step or "rings" in step] == []
    assert "Weights by load do not fix it" in alone.next_steps[0]
    both = judge(evidence(tests=(change, REJECTED["values"])), LIMITS)
    assert both.kind == "values-dependent" and "No test of the load" in both.sentence
    with_load = judge(evidence(tests=(change, REJECTED["system"]), balance=balance), LIMITS)
    assert with_load.kind == "load-dependent" and "--weights" in with_load.next_steps[0]
    assert any("trace" in step for step in with_load.next_steps)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("load_32", 0.4, "busy times are under-represented"),
        ("load_32", -0.4, "quiet times are under-represented"),
        ("waiting", 0.4, "above its mean are under-represented"),
        ("waiting", -0.4, "below its mean are under-represented"),
        ("time", 0.0, "its rate changed, 1 % lost before 3 s, 2 % after"),
    ],
)
def test_a_loss_with_the_system_says_which_steps_are_fewer(
    name: str, size: float, words: str
) -> None:
    one = Covariate(name=name, label=f"the {name}", unit="", group="system")
    test = association("system", 0.001, rejected=True)
    test = test.model_copy(update={"covariate": one, "statistic": size})
    if name == "time":
        note = "1 % lost before 3 s, 2 % after"
        test = test.model_copy(update={"name": "change", "note": note})
    # The mean over lost tokens, in which wide steps weigh more, lies on the other side.
    moved = difference("system", -size - 0.1, -size + 0.1).model_copy(update={"covariate": one})
    found = (difference("content"), *([moved] if size else []))
    given = evidence(tests=(test,), found=found)
    of = "time" if name == "time" else "load"
    assert kind(given) == ("WARN", f"{of}-dependent")
    verdict = judge(given, LIMITS)
    assert f"on the {name}" in verdict.sentence and words in verdict.sentence
    assert any("trace" in step for step in verdict.next_steps) == (name == "time")


def test_dependence_fails_when_what_was_rejected_is_seriously_off() -> None:
    serious = LIMITS.serious

    def values(bias: float) -> tuple[Difference, ...]:
        return (difference("content", bias=0.9), difference("values", bias=bias))

    asked = (REJECTED["values"],)
    assert kind(evidence(tests=asked, found=values(-serious))) == ("WARN", "values-dependent")
    assert kind(evidence(tests=asked, found=values(-serious - 0.01))) == (
        "FAIL", "values-dependent")  # fmt: skip
    both = (REJECTED["values"], REJECTED["content"])
    assert kind(evidence(tests=both, found=values(0.0))) == ("FAIL", "values-dependent")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (evidence(n_events=29), "29 independent loss events, of 30 needed"),
        (evidence(long_enough=False), "too short for its bursts"),
        (evidence(least=0.06), "depend on the load could not have been found here: 100 shifts"),
        (evidence(least=0.06), "a run of 120 steps or more could"),
        (evidence(found=()), "no content covariate has an interval"),
        (evidence(found=(difference("system"),)), "no content covariate has an interval"),
        (evidence(found=(difference("values", high=0.02),)), "not proven for row norm"),
        (evidence(found=(difference("content", low=-0.02),)), "not proven for prompt length"),
    ],
)
def test_inconclusive_says_what_is_short(given: Evidence, words: str) -> None:
    assert kind(given) == ("INCONCLUSIVE", "too-little-evidence")
    [lack] = judge(given, LIMITS).lacks
    assert words in lack


def test_the_system_needs_no_equivalence() -> None:
    found = (difference("content"), difference("system", high=3.0))
    assert kind(evidence(found=found)) == ("PASS", "uncorrelated")


def test_a_loss_that_no_step_shows_is_inconclusive() -> None:
    aborted = Evidence(account(200, dropped=0, aborted=200), None, None)
    assert kind(aborted) == ("INCONCLUSIVE", "too-little-evidence")
    assert kind(Evidence(account(0, n=1, positions=0, computed=0, captured=0), None, None)) == (
        "PASS", "complete")  # fmt: skip


def test_aborted_rows_that_no_test_saw_are_no_pass() -> None:
    """Rows of a crash look like nothing to the tests, which see dropped ones."""
    seen = evidence()
    assert kind(seen) == ("PASS", "uncorrelated")
    crashed = seen.accounting.model_copy(update={"aborted": 100, "dropped": 100})
    found = judge(replace(seen, accounting=crashed), LIMITS)
    assert (found.level, found.kind) == ("INCONCLUSIVE", "too-little-evidence")
    assert any("1.00% of the computed tokens were aborted" in lack for lack in found.lacks)
    few = seen.accounting.model_copy(update={"aborted": 3, "dropped": 197})
    assert kind(replace(seen, accounting=few)) == ("PASS", "uncorrelated")


def test_every_number_says_on_which_side_of_its_limit_it_has_to_lie() -> None:
    found = judge(evidence(cache_ref=1000, tests=(REJECTED["content"],)), LIMITS)
    assert {n.name.split(" (")[0]: n.must for n in found.numbers} == {
        "accounting mismatches": "at most",
        "share of computed tokens lost": "at most",
        "worst-case bias of any mean": "at most",
        "independent loss events": "at least",
        "smallest adjusted p of all tests": "above",
        "least adjusted p that any question could have had": "at most",
        "content bias that one interval would detect": "at most",
        "farthest end of an equivalence interval": "below",
        "largest share lost of any one stratum": "below",
        "largest bias, content or values with a rejected test": "at most",
    }


@pytest.mark.parametrize(("p", "rejected"), [(0.05, True), (0.0501, False)])
def test_a_p_at_the_rate_is_rejected_and_lies_on_the_wrong_side(p: float, rejected: bool) -> None:
    given = evidence(tests=(association("system", p, rejected=rejected),))
    assert kind(given)[1] == ("load-dependent" if rejected else "uncorrelated")
    [number] = [n for n in judge(given, LIMITS).numbers if n.name.startswith("smallest adjusted")]
    assert number.ok is not rejected


def test_a_limit_without_a_side_is_no_number() -> None:
    with pytest.raises(ValueError, match="a limit needs its side"):
        Number(name="x", value=1.0, limit=2.0, ok=True)
    with pytest.raises(ValueError, match="a limit needs its side"):
        Number(name="x", value=1.0, must="at most")


def test_every_limit_is_held_against_a_number() -> None:
    found = judge(evidence(cache_ref=1000, tests=(REJECTED["content"],)), LIMITS)
    limits = {n.limit for n in found.numbers}
    assert limits >= {LIMITS.negligible_bias, LIMITS.max_loss, LIMITS.serious,
                      LIMITS.min_events, LIMITS.fdr}  # fmt: skip
