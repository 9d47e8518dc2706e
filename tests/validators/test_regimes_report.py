"""The report of regimes: what it answers, that it says what the result says, and is safe."""

from __future__ import annotations

import re
from collections import defaultdict
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from actds_studies.pages import regimes as report
from actds_studies.pages import regimes_charts as charts
from actds_studies.pages.regimes import page
from actds_studies.regimes.conclusions import MEASURES, about, big, in_words, verdicts
from actds_studies.regimes.instruments import Moments, Numerics
from actds_studies.regimes.instruments.probes import Probes
from actds_studies.regimes.instruments.reconstruction import Overlap, Reconstruction
from actds_studies.regimes.result import Limits, Outcome
from actds_testing.calibration.regimes import Orthonormal
from actds_testing.regime_results import (
    contrast,
    hostile,
    made,
    many,
    nothing,
    result_of,
    value,
)

ALL = {"made": made, "nothing": nothing, "many": many, "hostile": hostile}


class Page(HTMLParser):
    """The text of a page, and whether its tags are closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [v for k, v in attrs if k == "id" and v]
        if tag not in ("meta", "rect", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "circle"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style",):
            self.text.append(data)


def text_of(page: Page) -> str:
    return " ".join(" ".join(page.text).split())


@pytest.mark.parametrize("name", ALL)
def test_the_page_is_whole_small_and_without_script(name: str) -> None:
    source = page(ALL[name](), "actds regimes acts").html()
    parsed = Page(source)
    assert "script" not in parsed.tags and "<script" not in source
    assert len(parsed.ids) == len(set(parsed.ids))
    assert len(source.encode()) < 1_000_000
    assert "\x1b" not in source and "default-src 'none'" in source.replace("&#39;", "'")
    for svg in re.findall(r"<svg viewBox.*?</svg>", source, re.DOTALL):
        ElementTree.fromstring(svg)
    for line in page(ALL[name](), "actds regimes acts").lines():
        assert line.text.isprintable() or not line.text


def test_the_first_screen_says_how_large_of_what_and_what_to_do() -> None:
    text = text_of(Page(page(made(), "actds regimes H=a R=b G=c").html()))
    head = text[: text.index("Verdicts")]
    for words in (
        "Yes: 4 of 12 verdicts shift",
        "H is given tokens, many a step in prefill; R is",
        "G is generated tokens, one a step in decode. R-H is R compared with its reference, H.",
        "Largest shift 7 points more unexplained",
        "the dictionary leaves 7 percentage points more of the variance of H unexplained in R",
        "3.5 times the limit; 95 % interval 6 to 8 points; limit 2; floor 1 between halves of H",
        "Authorship (who wrote the tokens) or computation authorship",
        "computation carries over; authorship shifts in dictionary",
        "resid_post.10, variance unexplained: +7 points by authorship (R-H, 6 to 8), +0.3 points "
        "by computation (G-R, -0.7 to 1.3).",
        "Model small-135m",
        "Hooks resid_post.10 (576 × bfloat16), resid_post.20 (576 × bfloat16)",
        "Harvested 2026-09-21 14:13 UTC with vllm 0.32.0",
        "What to do Fit the dictionary on rows of both H and R",
        "actds regimes H=a R=b G=c",
    ):
        assert words in head, words


def test_a_sum_of_two_contrasts_needs_no_advice_of_its_own() -> None:
    (step,) = made().answer.next_steps
    assert "both H and R" in step
    alone = result_of([c for c in made().contrasts if c.name == "G-H"])
    assert "both H and G" in alone.answer.next_steps[0]
    assert "serve the tokens of the sampled arm again" in alone.answer.next_steps[1]


def test_every_verdict_of_the_result_has_its_sentence_on_both_pages() -> None:
    result = made()
    text = text_of(Page(page(result, "x").html()))
    lines = "\n".join(line.text for line in page(result, "x").lines())
    for one in result.contrasts:
        for verdict in one.verdicts:
            assert verdict.sentence in text and verdict.sentence in lines


@pytest.mark.parametrize(
    ("computation", "authorship", "both", "expected"),
    [
        ("shifts", "shifts", None, "both"),
        ("shifts", "carries over", None, "computation"),
        ("carries over", "shifts", None, "authorship"),
        ("carries over", "carries over", None, "neither"),
        ("carries over", None, None, "not computation"),
        ("carries over", None, "shifts", "authorship, or the text"),
        ("undecided", None, "shifts", "not separated"),
        (None, None, "shifts", "not separated"),
        ("undecided", "carries over", None, "undecided"),
        (None, None, "undecided", "undecided"),
    ],
)
def test_what_shifts_is_named_only_where_the_contrasts_separate_it(
    computation: str | None, authorship: str | None, both: str | None, expected: str
) -> None:
    asked = (("G-R", "computation", computation), ("R-H", "authorship", authorship),
             ("G-H", "both", both))  # fmt: skip
    found = []
    for name, what, outcome in asked:
        if outcome is None:
            continue
        values = [value("q.1", 0.5, outcome)]  # type: ignore[arg-type]
        one = contrast(name, "q.1", what, 0.5, outcome)  # type: ignore[arg-type]
        found.append(one.model_copy(update={"values": values, "verdicts": verdicts(values)}))
    answer = result_of(found).answer
    assert answer.separated == expected and answer.reason
    (fact,) = [fact for fact in report.facts(result_of(found)) if fact.value == expected]
    assert fact.is_known == (expected not in ("not separated", "undecided"))


def test_what_differs_follows_from_pairs_and_phases() -> None:
    assert about("token", (0.0, 1.0)) == "computation"
    assert about("position", (0.0, 0.0)) == "authorship"
    assert about("position", (0.0, 1.0)) == "both"
    assert about("position", (None, 0.0)) == "both"
    assert about("unpaired", (0.0, 1.0)) == "both"
    assert about("unpaired", (1.0, 1.0)) == "text"


def test_an_overlap_is_worst_where_most_is_lost_to_its_floor() -> None:
    def overlap(found: float, floor: float, step: str) -> object:
        return value("q.1", found, "shifts", instrument="overlap", measure="Spearman",
                     kind="overlap", axis="decode step", stratum=step, floor=floor)  # fmt: skip

    (verdict,) = verdicts([overlap(0.9, 0.95, "1"), overlap(0.3, 0.9, "6 to 10")])  # type: ignore[list-item]
    words = "shifts in 2 of 2 values, none over all rows. At decode step 6 to 10 (1,000 of "
    assert (
        words in verdict.sentence and "Spearman, is 0.3 between the reference" in verdict.sentence
    )
    assert "floor 0.9 within the reference" in verdict.sentence


def test_what_lies_below_its_floor_is_no_example_of_a_shift() -> None:
    one = contrast("R-H", "q.1", "authorship", 0.5, "shifts")
    below = value("q.1", 25.0, "shifts", measure="turn of features", kind="size", unit="degrees",
                  floor=26.0, limit=3.0, element="453")  # fmt: skip
    above = value("q.1", 0.09, "shifts", floor=0.07, limit=0.02)
    (verdict,) = verdicts([below, above])
    assert "9 percentage points more" in verdict.sentence and "2 of 2 values" in verdict.sentence
    assert "limit 2; floor 7 between halves of the reference" in verdict.sentence
    moved = above.model_copy(update={"measure": "something else"})
    changed = one.model_copy(update={"values": [below, moved], "verdicts": [verdict]})
    largest = result_of([changed]).answer.largest
    assert largest is not None and largest.value == moved
    (verdict,) = verdicts([below])
    assert "the direction of feature 453 turns by 25° from the reference" in verdict.sentence


def test_a_value_over_all_rows_comes_before_any_of_a_stratum() -> None:
    step = value("q.1", 0.9, "shifts", axis="decode step", stratum="1", adjusted_p=1e-9)
    turn = value("q.1", 60.0, "shifts", measure="turn of features", kind="direction", limit=3.0,
                 adjusted_p=1e-9)  # fmt: skip
    whole = value("q.1", 0.07, "shifts")
    (verdict,) = verdicts([step, turn, whole])
    assert "Over all rows" in verdict.sentence and "7 percentage points more" in verdict.sentence
    below = whole.model_copy(update={"measure": "active features of a row", "floor": 0.5})
    (verdict,) = verdicts([step, below])
    assert "Over all rows" in verdict.sentence and "1.07 times as many" in verdict.sentence
    one = contrast("R-H", "q.1", "authorship", 0.5, "shifts")
    changed = one.model_copy(update={"values": [step, below], "verdicts": [verdict]})
    largest = result_of([changed]).answer.largest
    assert largest is not None and largest.value == below


def test_a_stratum_is_named_with_what_it_is_made_of() -> None:
    step = value("q.1", 0.9, "shifts", axis="decode step", stratum="1", n_tokens=(1, 40))
    (verdict,) = verdicts([step], ("H", "G"))
    words = "At decode step 1 (1,000 of H, weighted worth 900, all of one token; 2,000 of G, "
    assert f"none over all rows. {words}weighted worth 1,800, 40 different tokens)" in (
        verdict.sentence
    )
    pairs = value("q.1", 0.02, "shifts", instrument="numerics", measure="relative L2", kind="size",
                  axis="entropy", stratum="quintile 5", limit=0.01, n_tokens=(9, 9))  # fmt: skip
    (verdict,) = verdicts([pairs], ("H", "G"))
    assert "In entropy quintile 5 (1,000 pairs, 9 different tokens) rows of the same tokens" in (
        verdict.sentence
    )


@pytest.mark.parametrize(
    ("measure", "instrument", "size", "figure", "words"),
    [
        ("mean", "moments", -0.95, "0.95 SD lower",
         "G lies 0.95 standard deviations lower than H in channel 7"),
        ("variance", "moments", 0.5, "1.65 × the variance",
         "the variance of channel 7 in G is 1.65 times that in H"),
        ("outlier rate of rows", "moments", -0.03, "3 points fewer outliers",
         "3 percentage points fewer rows of G than of H lie above 10 median norms"),
        ("rates of features", "dictionary", -1.0, "0.368 × as often active",
         "feature 7 is active 0.368 times as often in G as in H"),
        ("turn of features", "dictionary", 12.0, "turned by 12°",
         "the direction of feature 7 turns by 12° from H to G"),
        ("relative L2", "numerics", 0.012, "1.2 % of the norm apart",
         "rows of the same tokens lie 1.2 % of their norm apart in H and G"),
        ("ROC area", "probes", -0.05, "0.05 lower ROC area",
         "the area under the ROC curve of probe 7 is 0.05 lower in G than in H"),
    ],
)  # fmt: skip
def test_a_number_has_a_unit_and_a_direction(
    measure: str, instrument: str, size: float, figure: str, words: str
) -> None:
    found = value("q.1", size, "shifts", measure=measure, instrument=instrument, element="7")
    assert big(found, ("H", "G")) == figure
    assert in_words(found, ("H", "G")) == words


def test_the_words_of_every_measure_are_those_of_an_instrument() -> None:
    """A measure that is renamed would lose its words in silence."""
    limits, sums = Limits(), defaultdict(lambda: np.ones(8))
    instruments = [Moments(), Numerics(Orthonormal(np.eye(8))), Overlap(Orthonormal(np.eye(8))),
                   Probes(np.eye(8)[:1], labels=(np.zeros(1, np.int8),) * 2)]  # fmt: skip
    instruments.append(Reconstruction(Orthonormal(np.eye(8)), np.arange(2)))
    names = set()
    for one in instruments:
        names |= {m.name for m in getattr(one, "measures", lambda *_: [])(sums, limits)}
        names |= {m.name for m in getattr(one, "pair_measures", lambda *_: [])(limits)}
    assert set(MEASURES) <= names
    tested = {m for m in names if not m.startswith(("order of", "top "))}
    described = {"equal to the bit", "cosine distance", "KL divergence of a channel"}
    assert tested - set(MEASURES) == described


def test_the_head_says_in_which_instruments_each_of_the_two_shifts() -> None:
    found = []
    for name, what, instruments in (
        ("G-R", "computation", ("numerics",)),
        ("R-H", "authorship", ("dictionary", "probes")),
    ):
        values = [value("q.1", 0.5, "shifts", instrument=one) for one in instruments]
        one = contrast(name, "q.1", what, 0.5, "shifts")  # type: ignore[arg-type]
        found.append(one.model_copy(update={"values": values, "verdicts": verdicts(values)}))
    answer = result_of(found).answer
    assert answer.separated == "both"
    assert (
        answer.reason == "computation shifts in numerics; authorship shifts in dictionary, probes"
    )


@pytest.mark.parametrize(
    ("dictionary", "expected"), [("carries over", "both"), ("undecided", "not separated")]
)
def test_what_only_other_tokens_shift_is_not_said_to_be_computation(
    dictionary: Outcome, expected: str
) -> None:
    found = []
    for name, what, ends in (
        ("G-R", "computation", {"numerics": "shifts", "dictionary": dictionary}),
        ("G-H", "both", {"dictionary": "shifts"}),
    ):
        values = [value("q.1", 0.5, end, instrument=one) for one, end in ends.items()]  # type: ignore[arg-type]
        one = contrast(name, "q.1", what, 0.5, "shifts")  # type: ignore[arg-type]
        found.append(one.model_copy(update={"values": values, "verdicts": verdicts(values)}))
    answer = result_of(found).answer
    assert answer.separated == expected
    assert answer.reason == (
        "computation shifts in numerics; dictionary only where the tokens differ as well"
    )
    assert result_of(found[:1]).answer.separated == "computation"


def test_features_that_shift_are_drawn_before_those_that_do_not() -> None:
    result = made()
    pictures = charts.rates(result)
    last = result.contrasts[-1]
    drawn = next(v for c in result.contrasts for v in c.values if v.elements)
    still = [v.model_copy(update={"outcome": "carries over"}) for v in (drawn,)]
    moved = [v.model_copy(update={"outcome": "shifts"}) for v in (drawn,)]
    contrasts = [c.model_copy(update={"values": still}) for c in result.contrasts[:-1]]
    contrasts.append(last.model_copy(update={"values": moved}))
    assert len(contrasts) > len(pictures)
    first = charts.rates(result.model_copy(update={"contrasts": contrasts}))[0]
    assert first.title == f"Rates of features, {last.name} at {last.hook}"


def test_the_legend_of_a_chart_has_the_words_of_the_verdicts() -> None:
    steps = charts.step_gaps(made())
    assert steps is not None
    words = [s.text for s in steps.shapes if s.tag == "text"]
    assert set(report.LEVELS) <= set(words)


def test_nothing_that_shifts_says_so_and_undecided_is_no_agreement() -> None:
    lines = [line.text for line in page(nothing(), "x").lines()]
    assert lines[0] == "✓ No: 1 verdict, and all carry over"
    assert any("Nothing: what was measured on one arm holds" in line for line in lines)
    lines = [line.text for line in page(nothing("undecided"), "x").lines()]
    assert lines[0] == "? Undecided: 1 of 1 verdict"
    assert any("Do not take 1 undecided verdict for agreement" in line for line in lines)
    assert "What is short" in lines and "equal to the bit" in page(nothing(), "x").html()


def test_charts_are_drawn_where_the_result_has_their_numbers() -> None:
    result = made()
    steps = charts.step_gaps(result)
    assert steps is not None
    titles = [s.title for s in steps.shapes if s.tag == "circle"]
    assert len(titles) == 6 * 4 and titles[0].startswith("step 1: 0.035, shifts")
    cells = charts.positions(result)
    assert cells is not None and cells.height > 100
    shown = [s for s in cells.shapes if s.title.startswith("positions")]
    assert len(shown) == 6 * 7
    scatter = charts.rates(result)
    assert len(scatter) == 3  # at most
    dots = [s for s in scatter[0].shapes if s.tag == "circle"]
    far = [s for s in dots if dict(s.attributes)["class"] == "lost-mark mark"]
    # |ln of the ratio| - 1.96 * 0.1 > 0.5, of n / 60 - 1 for n below 120.
    assert (len(dots), len(far)) == (120, sum(abs(n / 60 - 1) > 0.696 for n in range(120)))
    rungs = charts.ladder(result)
    assert rungs is not None and len([s for s in rungs.shapes if s.tag == "circle"]) == 2
    some = result.contrasts[1]
    zero = some.quantiles[0].model_copy(update={"p50": 0.0})
    half = some.model_copy(update={"quantiles": [zero]})
    equal = charts.ladder(result.model_copy(update={"contrasts": [half]}))
    assert equal is not None
    (dot,) = [s for s in equal.shapes if s.tag == "circle"]
    at = {s.text: dict(s.attributes)["x"] for s in equal.shapes if s.tag == "text"}
    assert dict(dot.attributes)["cx"] == at["0"] < at["1e-3"]
    empty = result_of([])
    assert charts.step_gaps(empty) is charts.positions(empty) is charts.ladder(empty) is None
    assert charts.rates(empty) == []
