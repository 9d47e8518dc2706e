"""The page of an audit: what it says first, what it holds, what no text and no number can do."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from actds.text import counted
from actds_testing import audit_results
from actds_testing.audit_results import (
    CASES,
    LABELS,
    SHARES,
    audit,
    enormous,
    hostile,
    wide,
)
from actds_validators.audit.place import TITLES
from actds_validators.audit.result import Accounting, Audit, Must, Number
from actds_validators.pages import report as page
from actds_validators.pages import words
from actds_validators.pages.answer import SectionOf
from actds_validators.pages.missingness import heat_map, stored_bias
from actds_validators.pages.report import render
from actds_validators.pages.svg import FigureData, Picture, fit
from actds_validators.pages.words import LOOKS, percent
from actds_validators.sections import About

MAX_NBYTES = 1_000_000
SECTIONS = ("checks", "accounting", "coverage", "missingness", "mechanism", "queues", "weights")
PICTURES = (
    "places",
    "lengths",
    "waterfall",
    "coverage-map",
    "forest-system",
    "forest-content",
    "forest-values",
    "stored-bias",
    "heat-map",
    "bound",
    "trace",
    "loss-by-load",
    "loss-by-step",
    "occupancy",
    "lags",
    "weight-map",
)
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Tags with their attributes in order, and the text; refuses tags that do not nest."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def ids(self) -> list[str]:
        return [a["id"] or "" for _, a in self.tags if "id" in a]


@pytest.mark.parametrize("name", CASES)
def test_verdict_deciding_number_and_next_steps_come_before_everything_else(name: str) -> None:
    result = audit(name)
    source = render(result)
    page = html.unescape(re.sub(r"<[^>]+>", " ", source[source.index("<body") :]))
    head, rest = page.split("Every place where rows go" if result.places else "The first number", 1)
    assert result.verdict.sentence in head
    said = " ".join(head.split())
    assert f"{LOOKS[result.answer.level].mark} {result.answer.words}" in said
    assert all(place.headline in said for place in result.places)
    assert f"{result.verdict.level} ({result.verdict.kind})" in said
    assert f"Decided by: {result.verdict.deciding.name}" in head
    assert all(step in head for step in (*result.verdict.next_steps, *result.verdict.lacks))
    assert rest.count(result.verdict.sentence) <= 1  # in the table of the places


def _words(source: str) -> str:
    return " ".join(" ".join(Page(source).text).split())


def test_first_screen_says_in_order_whether_to_train_the_bias_and_what_the_dataset_is() -> None:
    about = About(
        models=("org/model-8b",),
        engines=("vllm 0.11.0",),
        hooks=("resid_post.10 (4,096 × bfloat16)",),
        started_ns=1_763_800_000 * 10**9,
        command="actds audit acts --html 'my audit.html'",
    )
    source = _words(render(audit("load"), about))
    told = (
        "Yes, with these limits: 2.10% of the computed rows were dropped",
        "✓ source nothing went at source",
        "2.1 % of the computed tokens were lost",
        "Model org/model-8b",
        "Hooks resid_post.10 (4,096 × bfloat16)",
        "Rows 1,387,884 of 1,417,655 computed",
        "Harvested 2025-11-22 08:26 UTC with vllm 0.11.0",
        "Command actds audit acts --html 'my audit.html'",
        "What to do",
        "Losses of queues and ends Worst-case bias of any mean 0.146 SD",
        "Largest estimated bias -0.00",
        "CI [",
        "Decided by: adjusted p",
    )
    body = source[source.index("May I train on") :]
    places = [body.index(said) for said in told]
    assert places == sorted(places)


def test_bias_is_not_known_where_the_accounting_does_not_match() -> None:
    source = render(audit("unexplained"))
    head = _words(source[source.index('<section id="losses"') : source.index("<nav")])
    assert "any mean not known" in head and "bias not estimated" in head and " SD" not in head
    assert source.count('<p class="unknown">') == 2
    complete = render(audit("negligible", accounting=_no_losses(), missingness=None))
    assert 'class="biases"' not in complete  # nothing was lost, so losses are no headline


def _no_losses() -> Accounting:
    found = audit_results.accounting(0)
    update = {"aborted": 0, "dropped": 0, "loss_share": 0.0}
    return found.model_copy(update=update)


def test_too_little_evidence_is_not_painted_as_a_failure_of_the_data() -> None:
    few = audit("few")
    source = render(few)
    row = next(r for r in source.split("<tr")[1:] if "independent loss events" in r)
    assert 'class="dim"' in row and "too little evidence" in row
    bound = next(r for r in source.split("<tr")[1:] if "worst-case bias" in r)
    assert 'class="dim"' in bound and "above: the tests decide" in bound
    heavy = next(
        r for r in render(audit("heavy")).split("<tr")[1:] if "share of computed tokens" in r
    )
    assert 'class="bad"' in heavy  # the control
    assert ".INCONCLUSIVE{--tone:var(--unsure)}" in source and "--unsure:#57606a" in source
    # What passes needs no number that is painted as a failure, however a test came out.
    failed = Number(name="smallest adjusted p", value=0.001, must="above", limit=0.05, ok=False)
    for name, tone in (("negligible", "dim"), ("load", "bad")):
        verdict = audit(name).verdict.model_copy(update={"numbers": [failed]})
        page = render(audit(name, verdict=verdict))
        assert f'class="{tone}"' in next(r for r in page.split("<tr")[1:] if "smallest adj" in r)


def _luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * c for c in digits) if len(digits) == 3 else digits
    parts = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize("ground", ["ground", "panel"])
@pytest.mark.parametrize("ink", ["ink", "dim", "good", "warn", "bad", "unsure", "stored"])
def test_text_has_the_contrast_of_wcag_aa(scheme: int, ground: str, ink: str) -> None:
    source = render(audit("load"))
    style = source[source.index("<style>") : source.index("</style>")]
    schemes = re.findall(r":root\{(.*?)\}", style, re.S)
    colours = dict(re.findall(r"--(\w+):(#[0-9a-f]+)", schemes[scheme]))
    light, dark = sorted((_luminance(colours[ink]), _luminance(colours[ground])), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_a_complete_result_has_every_section_and_every_picture() -> None:
    ids = Page(render(audit("heavy"))).ids()
    assert set(SECTIONS) | {"settings"} <= set(ids)
    assert {f"{name}-title" for name in PICTURES} <= set(ids)
    assert "absent" not in ids
    assert len(ids) == len(set(ids))


def test_a_chart_is_one_entry_of_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(result: Audit) -> Picture | None:
        if result.verdict.level != "WARN":
            return None
        picture = Picture("mine", "My chart", "What it shows.", 200, 40, FigureData(("x",)))
        picture.text(10, 20, "drawn by a test")
        return picture

    added = (SectionOf(page.SECTIONS[0].part, (mine,)), *page.SECTIONS[1:])
    monkeypatch.setattr(page, "SECTIONS", added)
    assert "drawn by a test" in render(audit("load")) and "My chart" in render(audit("load"))
    assert "drawn by a test" not in render(audit("heavy"))


def test_every_picture_has_a_title_and_a_description() -> None:
    page = Page(render(audit("heavy")))
    named = [a["aria-labelledby"] for tag, a in page.tags if tag == "svg" and "role" in a]
    assert len(named) == len(PICTURES)
    assert all(set((label or "").split()) <= set(page.ids()) for label in named)


def test_a_section_that_is_missing_is_left_out_and_says_why() -> None:
    source = render(audit("unexplained"))
    assert not {"coverage", "missingness", "mechanism", "queues"} & set(Page(source).ids())
    assert "Coverage, Missingness, Mechanism, Time and queues, Weights" in source
    assert "there are accounting mismatches, so nothing can be estimated" in source
    nothing = render(audit("negligible", missingness=None, accounting=audit_results.accounting(0)))
    assert "no token was lost" not in nothing  # 1,200 were aborted
    assert "no token was dropped; those of aborted requests are counted" in nothing
    dropped = render(audit("heavy", missingness=None))
    assert "the result does not hold it, although tokens were dropped" in dropped


def test_weights_are_missing_where_nothing_was_dropped_or_nothing_is_stored() -> None:
    some = audit("few").accounting
    said = "no token was dropped: every weight is 1"
    for aborted in (0, 1_200):
        none = some.model_copy(update={"dropped": 0, "aborted": aborted})
        assert said in render(audit("few", accounting=none))
    assert said not in render(audit("few"))
    assert "although tokens were dropped" in render(audit("few"))
    bare = some.model_copy(update={"captured": 0})
    assert "no row is stored, so none can have a weight" in render(audit("few", accounting=bare))


def test_numbers_stand_in_the_check_table_beside_their_limits() -> None:
    source = render(audit("heavy"))
    row = next(r for r in source.split("<tr") if "share lost" in r)
    assert ">31 %</td>" in row and ">≤ 5 %</td>" in row and ">✗ fail</td>" in row
    assert "limit ≤ 5 %: fail" in source[: source.index("<nav")]


@pytest.mark.parametrize(
    ("must", "sign"), [("at most", "≤"), ("below", "&lt;"), ("at least", "≥"), ("above", "&gt;")]
)
def test_check_table_says_on_which_side_of_its_limit_a_number_has_to_lie(
    must: Must, sign: str
) -> None:
    result = audit("few")
    held = Number(name="what is held", value=0.5, must=must, limit=0.25, ok=False)
    verdict = result.verdict.model_copy(update={"numbers": [held]})
    source = render(audit("few", verdict=verdict))
    row = next(r for r in source.split("<tr") if "what is held" in r)
    assert f">{sign} 0.25</td>" in row
    free = Number(name="what is free", value=0.5)
    source = render(audit("few", verdict=verdict.model_copy(update={"numbers": [free]})))
    assert ">-</td>" in next(r for r in source.split("<tr") if "what is free" in r)


def test_lag_plot_draws_the_band_of_unrelated_series_around_zero() -> None:
    source = render(audit("load"))
    picture = next(s for s in source.split("<svg") if 'id="lags-title"' in s)
    said = "<title>band of chance: -0.070 to 0.110</title>"
    box = next(tag for tag in picture.split("<rect") if said in tag)
    y, height = (float(re.findall(rf' {name}="([^"]+)"', box)[0]) for name in ("y", "height"))
    nought = re.findall(r'<circle cx="[^"]+" cy="([^"]+)"[^>]*><title>[+-]40 steps', picture)
    assert len(nought) == 2 and 'class="band"' in box
    assert all(y < float(place) < y + height for place in nought)
    peak = re.findall(r'cy="([^"]+)"[^>]*><title>\+12 steps', picture)
    assert float(peak[0]) < y
    assert "95 % of the correlations of unrelated series" in source
    assert "about 412 independent ones" in source
    assert audit("load").queues is not None
    bare = audit("load").queues.model_copy(update={"lag_band": None})  # type: ignore[union-attr]
    assert "unrelated series" not in render(audit("load", queues=bare))


def test_mechanism_says_which_tests_tell_content_from_load() -> None:
    result = audit("load")
    source = render(result)
    assert "can come from the load, with which the mix of tokens changes" in source
    assert "Here too few steps" not in source
    assert result.mechanism is not None
    between = [t for t in result.mechanism.tests if t.name != "within"]
    alone = result.mechanism.model_copy(update={"tests": between})
    assert "Here too few steps lost only some" in render(audit("load", mechanism=alone))


def test_naive_p_is_marked_as_not_deciding() -> None:
    source = render(audit("load"))
    assert "naive p (not deciding)" in source
    assert "(&lt; 0.0001)" in source
    assert "no verdict uses it" in source


@pytest.mark.parametrize("make", [lambda: audit("heavy"), hostile, enormous])
def test_page_runs_and_fetches_nothing(make: Any) -> None:
    source = render(make())
    page = Page(source)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "form", "use", "base"}
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        assert not {"src", "srcset", "action", "xlink:href"} & set(attributes)
        assert (attributes.get("href") or "#").startswith(("#", "data:text/csv;charset=utf-8"))
    assert "url(" not in source.replace("url(#stripes)", "").replace("url(#dots)", "")


def test_policy_allows_the_one_style_sheet_and_nothing_else() -> None:
    source = render(audit("heavy"))
    style = source[source.index("<style>") + 7 : source.index("</style>")]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    metas = [a for tag, a in Page(source).tags if tag == "meta"]
    policy = next(a["content"] for a in metas if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def test_hostile_text_is_shown_and_does_nothing() -> None:
    source = render(hostile())
    plain, page = Page(render(audit("heavy"))), Page(source)
    known = {tag for tag, _ in plain.tags}
    assert {tag for tag, _ in page.tags} <= known
    assert "{{7*7}}" in "".join(page.text)
    assert all(c.isprintable() or c == "\n" for c in source)
    assert "\\x1b[31m\\u202e\\x00" in source


def test_page_stays_under_a_megabyte_whatever_the_result_holds() -> None:
    result = enormous()
    assert len(json.dumps(result.as_json())) > 10 * MAX_NBYTES
    source = render(result)
    assert len(source.encode()) < MAX_NBYTES
    assert "more, all in the result (--json)" in source


def test_same_result_gives_the_same_page() -> None:
    assert render(audit("heavy")) == render(audit("heavy"))


@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-9, 1e9, 1e300])
def test_numbers_of_any_size_are_drawn_inside_the_picture(scale: float) -> None:
    source = render(_scaled(audit("heavy"), scale))
    assert not re.search(r"\b(nan|inf)\b", source)
    for picture in re.findall(r"<svg viewBox.*?</svg>", source, re.S):
        width, height = map(float, re.findall(r'viewBox="0 0 (\S+) (\S+)"', picture)[0])
        for x in re.findall(r' (?:x|x1|x2|cx)="([^"]+)"', picture):
            assert 0 <= float(x) <= width
        for y in re.findall(r' (?:y|y1|y2|cy)="([^"]+)"', picture):
            assert 0 <= float(y) <= height


def _scaled(result: Audit, scale: float) -> Audit:
    """Multiply every number that is no share and no count."""
    free = {"value", "low", "high", "mean_all", "mean_lost", "sd_all", "load", "bias", "statistic"}
    free |= {"floor", "t_s", "seconds", "load_low", "load_high", "weight", "limit", "fitted"}
    free |= {"marks_s", "largest", "effective_rows", "correlation", "detectable"}

    def walk(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: walk(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [walk(v, key) for v in value]
        return value * scale if key in free and isinstance(value, float) else value

    parts = walk(result.as_json())
    for cell in parts["coverage"]["cells"]:  # positions are whole
        cell["low"], cell["high"] = int(cell["low"]), int(cell["high"])
    return Audit.model_validate(parts)


def test_sections_without_a_single_entry_are_drawn_without_pictures() -> None:
    def emptied(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: emptied(v, k) for k, v in value.items()}
        return [] if isinstance(value, list) else value

    ids = Page(render(Audit.model_validate(emptied(audit("heavy").as_json())))).ids()
    assert {"coverage", "missingness", "mechanism", "queues", "weights"} <= set(ids)
    assert not {"forest-system-title", "trace-title", "coverage-map-title"} & set(ids)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0, "0 %"),
        (1e-6, "< 0.01 %"),
        (0.31, "31 %"),
        (0.99951, "99.95 %"),
        (math.nextafter(1, 0), "> 99.99 %"),
        (1.0, "100 %"),
    ],
)
def test_a_part_is_never_rounded_to_nothing_or_to_all(share: float, words: str) -> None:
    assert percent(share) == words


def test_the_page_says_what_was_audited_with_which_options() -> None:
    asked, plain = (
        " ".join(" ".join(Page(render(audit(name))).text).split()) for name in ("heavy", "load")
    )
    for said in (
        "/data/classes.parquet", "c1a5" * 16, "12,345 of 20,000", "1,234,567 of 2,000,001",
    ):  # fmt: skip
        assert said in asked, said
    for said in ("executor threads", "from the tables of the dataset"):
        assert said in plain, said


def _drawn(source: str) -> list[tuple[str, str]]:
    """Return the texts of all pictures, each with its title, empty where it has none."""
    found = re.findall(r"<text[^>]*>(?:<title>(.*?)</title>)?(.*?)</text>", source)
    return [(html.unescape(text), html.unescape(title)) for title, text in found]


@pytest.mark.parametrize("make", [wide, lambda: audit("heavy"), lambda: audit("few")])
@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1.0, 1e9, 1e300])
def test_no_number_of_a_picture_is_cut(make: Any, scale: float) -> None:
    drawn = _drawn(render(_scaled(make(), scale)))
    assert len(drawn) > 200
    assert [text for text, _ in drawn if any(c.isdigit() for c in text) and "…" in text] == []
    assert [text for text, _ in drawn if text == "…"] == []


def test_shares_of_narrow_cells_are_drawn_whole() -> None:
    source = render(wide())
    for name in ("heat-map", "weight-map", "coverage-map"):
        picture = next(s for s in source.split("<svg") if f'id="{name}-title"' in s)
        drawn = {text.removesuffix(" %") for text, _ in _drawn(picture)}
        assert {percent(share).removesuffix(" %") for share in SHARES} <= drawn
        assert name != "heat-map" or "was lost, in per cent" in picture


def test_p_of_the_head_and_of_the_checks_is_never_a_power_of_ten() -> None:
    held = Number(
        name="smallest adjusted p", value=3.168e-143, must="above", limit=0.05, unit="p", ok=False
    )
    few = audit("few")
    verdict = few.verdict.model_copy(update={"deciding": held, "numbers": [held]})
    source = render(audit("few", verdict=verdict))
    assert "<b>&lt; 0.0001</b> <span>limit &gt; 0.05: fail</span>" in source
    assert "e-143" not in source
    row = next(r for r in source.split("<tr")[1:] if "smallest adjusted p" in r)
    assert ">&lt; 0.0001</td>" in row and ">&gt; 0.05</td>" in row


@pytest.mark.parametrize(("n_events", "told"), [(1, True), (29, True), (30, False)])
def test_intervals_of_few_events_are_told_to_be_too_narrow(n_events: int, told: bool) -> None:
    result = audit("heavy")
    assert result.mechanism is not None
    mechanism = result.mechanism.model_copy(update={"n_events": n_events})
    source = render(audit("heavy", mechanism=mechanism))
    said = f"All losses are {counted(n_events, 'independent event')}: with fewer than 30 the"
    assert source.count(said) == (9 if told else 0)  # lead, four plots and their captions
    assert "All losses are" not in render(audit("heavy", mechanism=None))


def test_mechanism_says_how_many_units_count() -> None:
    source = render(audit("load"))
    assert ">effective units</th>" in source and ">units</th>" not in source
    assert "neighbouring shifts of the losses are alike" in source


@pytest.mark.parametrize("n", [16, 17, 26])
def test_strata_beyond_the_room_are_left_out_by_size_and_counted(n: int) -> None:
    found = audit("heavy")
    assert found.missingness is not None
    d = next(d for d in found.missingness.differences if d.strata)
    strata = [
        d.strata[0].model_copy(update={"label": f"s{k}", "n": 1000 if k % 2 else 10 + k})
        for k in range(n)
    ]
    changed = found.missingness.model_copy(
        update={"differences": [d.model_copy(update={"strata": strata})]}
    )
    picture = heat_map(audit("heavy", missingness=changed))
    assert picture is not None
    names = [s.text for s in picture.shapes if re.fullmatch(r"s\d+", s.text)]
    kept = sorted(sorted(range(n), key=lambda k: -strata[k].n)[:16])
    assert names == [f"s{k}" for k in kept]
    told = any(f"{n - 16} left out" in s.text for s in picture.shapes)
    assert told == (n > 16)


def test_covariates_of_real_hooks_are_drawn_whole_and_longer_ones_keep_their_name() -> None:
    source = render(wide())
    for name in ("forest-values", "forest-content", "heat-map"):
        picture = next(s for s in source.split("<svg") if f'id="{name}-title"' in s)
        drawn = " ".join(text for text, _ in _drawn(picture))  # a label may have two lines
        assert drawn.count(" at layers") == sum(map(drawn.count, LABELS)) > 0
    picture = Picture("p", "t", "d", 860, 40, FigureData(("x",)))
    label = f"{LABELS[1]}, of the model before its last step of training"
    picture.text(250, 20, label, "end", room=240)
    assert picture.shapes[0].title == label
    assert label.startswith(picture.shapes[0].text.removesuffix("…"))


@pytest.mark.parametrize("room", range(5, 130, 5))
def test_a_text_is_cut_before_a_number_and_never_through_it(room: int) -> None:
    seen = fit("layer 12,345.25 of -67", room)
    assert not re.search(r"\d…", seen) or seen.startswith("layer 12,345.25")


def test_zero_has_no_sign() -> None:
    for said in (words.number, words.short, percent, words.thousandths, words.signed):
        assert not said(-0.0).startswith(("-", "+"))
        for value in (-1e-300, -4.9e-4, -0.0009999, -0.04, -1.0):
            assert re.search(r"[1-9]", said(value)), (said, value)
    for scale in (-0.0, -1e-300, -1e-5, 1e-5):
        source = render(_scaled(audit("heavy"), scale))
        texts = [*Page(source).text, *re.findall(r"<title>(.*?)</title>", source)]
        assert [t for t in texts if re.search(r"(?<![\w.])-0(\.0*)?(?![.\w])", t)] == []
        assert '"-0"' not in source


def test_notes_stand_below_their_row() -> None:
    source = render(wide())
    noted = re.findall(
        r'<tr class="[a-z ]*noted">(.*?)</tr>\s*<tr class="[a-z ]*note">(.*?)</tr>', source, re.S
    )
    assert len(noted) == 5 + len(TITLES)
    for cells, note in noted:
        n_columns = len(re.findall(r"<t[hd]", cells))
        assert note.startswith(f'<td colspan="{n_columns}">')


@pytest.mark.full
def test_forest_of_any_number_of_covariates_fits_on_a_printed_page() -> None:
    source = render(enormous())
    pictures = [s for s in source.split("<svg") if re.search('id="(forest-|stored-bias)', s)]
    assert len(pictures) == 4
    for picture in pictures:
        width, height = map(float, re.findall(r'viewBox="0 0 (\S+) (\S+)"', picture)[0])
        assert height / width * 718 < 900  # a page of A4 or Letter holds 718 by 979 pixels
        assert "more, all in the result (--json)" in picture
        legend = "serious, with a rejected test" if "stored-bias" in picture else "lost against all"
        assert any(legend in text for text, _ in _drawn(picture))


@pytest.mark.parametrize(("serious", "in_plot"), [(0.001, True), (0.9, False)])
def test_bias_before_and_after_weighting_has_a_scale_of_its_own(
    serious: float, in_plot: bool
) -> None:
    found = audit("heavy")
    assert found.missingness is not None
    limits = found.limits.model_copy(update={"serious": serious})
    picture = stored_bias(audit("heavy", limits=limits))
    assert picture is not None
    said = [shape.text for shape in picture.shapes if shape.tag == "text"]
    limit = f"serious, with a rejected test: {'' if in_plot else 'beyond '}±{serious}"
    assert limit + ("" if in_plot else ", not in the plot") in said
    drawn = [s for s in picture.shapes if ("class", "limit") in s.attributes]
    assert len(drawn) == (3 if in_plot else 0)  # two and the legend
    for d in found.missingness.differences:
        assert d.covariate.label in " ".join(said)  # it may have two lines
        for one in (d.before_weighting, d.after_weighting):
            assert one is None or words.signed(one.value, three=True) in said
