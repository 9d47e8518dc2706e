"""The page of an audit in a real browser: no error, no request, no text outside its picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actds_studies.pages.regimes import page as regimes_page
from actds_studies.pages.stability import page as stability_page
from actds_testing.audit_results import CASES, audit, enormous, hostile, wide
from actds_testing.browser import Browser, chromium
from actds_testing.regime_results import hostile as hostile_regimes
from actds_testing.regime_results import made as regimes
from actds_testing.regime_results import many as many_regimes
from actds_testing.stability_results import hostile as hostile_stability
from actds_testing.stability_results import made as stability
from actds_testing.stability_results import many as many_stability
from actds_validators.audit.result import Audit
from actds_validators.pages.accounting import waterfall
from actds_validators.pages.index import Entry
from actds_validators.pages.index import render as render_index
from actds_validators.pages.mechanism import lag_plot
from actds_validators.pages.report import render
from actds_validators.sections import About

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed (apt: chromium)"),
]

# Boxes of texts that leave the view box of their picture by more than a pixel.
OUTSIDE = """
[...document.querySelectorAll("figure svg")].flatMap(svg => {
  const view = svg.viewBox.baseVal, to = svg.getScreenCTM().inverse();
  return [...svg.querySelectorAll("text")].filter(text => {
    const r = text.getBoundingClientRect();
    const a = new DOMPoint(r.left, r.top).matrixTransform(to);
    const b = new DOMPoint(r.right, r.bottom).matrixTransform(to);
    return a.x < -1 || a.y < -1 || b.x > view.width + 1 || b.y > view.height + 1;
  }).map(text => svg.querySelector("title").textContent + ": " + text.textContent);
})
"""
# Pairs of texts of a picture that cover each other by more than a sliver.
COVERED = """
[...document.querySelectorAll("figure svg")].flatMap(svg => {
  const texts = [...svg.querySelectorAll("text")].map(t => [t, t.getBoundingClientRect()]);
  return texts.flatMap(([s, a], k) => texts.slice(k + 1).filter(([t, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 5
  ).map(([t]) => s.textContent + " / " + t.textContent));
})
"""
# Boxes that scroll without a name, a role or a visible hint, and hints where nothing scrolls.
UNSAID = """
[...document.querySelectorAll(".scroll")].flatMap(box => {
  const scrolls = box.scrollWidth > box.clientWidth + 1, name = box.getAttribute("aria-label");
  const hint = box.parentElement.querySelector(".hint");
  const shown = hint !== null && hint.getBoundingClientRect().height > 0 &&
    hint.textContent.trim() === "scroll →";
  const region = box.getAttribute("role") === "region" && name && box.tabIndex === 0;
  return region && shown === scrolls ? [] : [name + (scrolls ? " scrolls" : " fits")];
})
"""
# What makes the page itself wider than the window.
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

# Tables and pictures that do not fit in their box.
SCROLLED = """
[...document.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth)
  .map(box => box.getAttribute("aria-label"))
"""
# Heights of the figures, with what is below them.
FIGURES = "[...document.querySelectorAll('figure')].map(f => f.getBoundingClientRect().height)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = chromium()
    assert executable is not None
    with Browser(executable) as opened:
        yield opened


def write(path: Path, source: str) -> Path:
    path.write_text(source, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", [*CASES, "wide", "hostile", "enormous"])
def test_page_says_nothing_asks_nothing_and_fits(
    browser: Browser, tmp_path: Path, name: str
) -> None:
    made = {"wide": wide, "hostile": hostile, "enormous": enormous}
    page = write(tmp_path / "page.html", render(made[name]() if name in made else audit(name)))
    for width in (900, 400):
        browser.open(page, width=width)
        assert browser.console == []
        assert browser.requests == [page.as_uri()]
        assert browser.evaluate(WIDER) == 0
        assert browser.evaluate(OUTSIDE) == []
    if name in CASES or name == "wide":
        assert browser.evaluate(COVERED) == []
    assert browser.evaluate("document.querySelectorAll('script').length") == 0


@pytest.mark.parametrize("name", [*CASES, "wide"])
@pytest.mark.parametrize("width", [390, 600, 1280])
def test_on_a_phone_the_page_fits_and_what_scrolls_says_so(
    browser: Browser, tmp_path: Path, name: str, width: int
) -> None:
    about = About(("org/model-8b",), ("vllm 0.11.0",), ("resid_post.10 (4,096 × bfloat16)",) * 6,
                  1_763_800_000 * 10**9, f"actds audit {'x' * 90} --html audit.html")  # fmt: skip
    source = render(wide() if name == "wide" else audit(name), about)
    browser.open(write(tmp_path / "page.html", source), width=width)
    assert browser.evaluate(WIDER) == 0
    assert browser.evaluate(UNSAID) == []
    assert (len(browser.evaluate(SCROLLED)) > 0) == (width < 900)  # the control


def test_a_box_that_scrolls_without_a_hint_is_found(browser: Browser, tmp_path: Path) -> None:
    """The control: hidden hints, and boxes without a role, are reported."""
    source = render(audit("load"))
    page = write(tmp_path / "page.html", source.replace('class="hint', 'class="none', 1))
    browser.open(page, width=390)
    assert browser.evaluate(UNSAID) == ["Table: Places between the source and a batch scrolls"]
    browser.open(write(page, source.replace('role="region"', 'role="group"', 1)), width=390)
    assert browser.evaluate(UNSAID) == ["Table: Places between the source and a batch scrolls"]


@pytest.mark.parametrize("name", ["load", "heavy", "unexplained", "wide"])
def test_no_table_and_no_picture_runs_out_of_the_page(
    browser: Browser, tmp_path: Path, name: str
) -> None:
    page = write(tmp_path / "page.html", render(wide() if name == "wide" else audit(name)))
    for width in (985, 1400):  # a window of 1,000 pixels less its scroll bar
        browser.open(page, width=width)
        assert browser.evaluate(SCROLLED) == []
    browser.open(page, width=600)  # the control: there they scroll within their box
    assert len(browser.evaluate(SCROLLED)) > 0


@pytest.mark.parametrize("loss", [1e-7, 1e-5, 3e-4, 0.0057, 0.049, 0.31, 0.5, 0.9, 0.999])
def test_words_of_the_bound_stand_whole_wherever_its_point_lies(
    browser: Browser, tmp_path: Path, loss: float
) -> None:
    few = audit("few").missingness
    assert few is not None
    bound = few.bound.model_copy(update={"loss_share": loss, "bias": math.sqrt(loss / (1 - loss))})
    missingness = few.model_copy(update={"bound": bound})
    source = render(audit("few", missingness=missingness))
    assert "…" not in source[source.index('id="bound-title"') :].partition("</svg>")[0]
    browser.open(write(tmp_path / "page.html", source))
    assert browser.evaluate(OUTSIDE) == []
    assert browser.evaluate(COVERED) == []


def test_every_section_is_seen_and_every_link_leads_to_one(
    browser: Browser, tmp_path: Path
) -> None:
    browser.open(write(tmp_path / "page.html", render(audit("heavy"))))
    heights = browser.evaluate(
        "[...document.querySelectorAll('section')].map(s => s.getBoundingClientRect().height)"
    )
    assert len(heights) == 13 and min(heights) > 60
    broken = "[...document.querySelectorAll('nav a')].filter(a => !document.querySelector(a.hash))"
    assert browser.evaluate(f"{broken}.length") == 0
    # The verdict, the number and the first step stand on the first screen.
    first = browser.evaluate("document.querySelector('#next li').getBoundingClientRect().bottom")
    assert first < 600


def test_style_holds_under_the_policy_in_light_and_in_dark(
    browser: Browser, tmp_path: Path
) -> None:
    page = write(tmp_path / "page.html", render(audit("load")))
    seen = []
    for scheme in ("light", "dark"):
        browser.open(page, media=[("prefers-color-scheme", scheme)])
        ink, ground = "getComputedStyle(document.body).color", "backgroundColor"
        seen.append(browser.evaluate(f"{ink} + ' on ' + getComputedStyle(document.body).{ground}"))
        assert browser.console == []
    assert seen == [
        "rgb(27, 31, 36) on rgb(255, 255, 255)",
        "rgb(230, 237, 243) on rgb(13, 17, 23)",
    ]


def test_page_prints(browser: Browser, tmp_path: Path) -> None:
    browser.open(
        write(tmp_path / "page.html", render(audit("heavy"))),
        media=[("prefers-color-scheme", "dark")],
    )
    assert browser.pdf().startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )


def test_the_policy_stops_what_a_hole_would_let_in(browser: Browser, tmp_path: Path) -> None:
    """The control: were text to become markup, the policy would stop it, and these tests see it."""
    hole = "<script>document.title = 'run'</script><p style='color:red'></p><img src='x.png'>"
    source = render(audit("load")).replace("</main>", f"{hole}</main>")
    browser.open(write(tmp_path / "page.html", source))
    assert len(browser.console) >= 3
    assert all("Content Security Policy" in said for said in browser.console)
    assert browser.evaluate("document.title") != "run"


def test_text_outside_its_picture_is_found(browser: Browser, tmp_path: Path) -> None:
    """The control: a text pushed over the edge, and one over another, are reported."""
    outside = '<text x="855" y="20">far outside</text><text x="90" y="20">a</text>'
    source = render(audit("load")).replace("</svg></div>", f"{outside}</svg></div>", 1)
    browser.open(write(tmp_path / "page.html", source))
    assert browser.evaluate(OUTSIDE) == [
        "Length of the prompt that a token is of, source and served: far outside"
    ]
    covered = '<text x="300" y="16">one</text><text x="300" y="16">two</text></svg></div>'
    browser.open(write(tmp_path / "page.html", source.replace("</svg></div>", covered, 1)))
    assert "one / two" in browser.evaluate(COVERED)


@pytest.mark.parametrize("make", [wide, enormous])
def test_every_figure_fits_on_a_printed_page(
    browser: Browser, tmp_path: Path, make: Callable[[], Audit]
) -> None:
    browser.open(write(tmp_path / "page.html", render(make())), width=718)
    browser.call("Emulation.setEmulatedMedia", media="print")
    heights = browser.evaluate(FIGURES)
    assert len(heights) > 10
    assert max(heights) < 979  # A4 in width, Letter in height, with the margins of a browser
    if make is wide:
        assert browser.evaluate(WIDER) == 0


@pytest.mark.parametrize("make", [regimes, many_regimes, hostile_regimes])
@pytest.mark.parametrize("width", [390, 940, 1280])
def test_the_report_of_regimes_fits_and_asks_nothing(
    browser: Browser, tmp_path: Path, make: Callable[[], Any], width: int
) -> None:
    page = write(tmp_path / "page.html", regimes_page(make(), f"actds regimes {'x' * 90}").html())
    for scheme in ("light", "dark"):
        browser.open(page, width=width, media=[("prefers-color-scheme", scheme)])
        assert browser.console == []
        assert browser.requests == [page.as_uri()]
    assert browser.evaluate(WIDER) == 0
    assert browser.evaluate(OUTSIDE) == []
    if make is not hostile_regimes:
        assert browser.evaluate(UNSAID) == []
        assert browser.evaluate(COVERED) == []
    if make is regimes:
        # How large, of what and the first step stand on the first screen of a desk.
        first = browser.evaluate(
            "document.querySelector('#next li').getBoundingClientRect().bottom"
        )
        assert width < 900 or first < 760


@pytest.mark.parametrize("make", [stability, many_stability, hostile_stability])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_report_of_stability_fits_and_asks_nothing(
    browser: Browser, tmp_path: Path, make: Callable[[], Any], width: int
) -> None:
    page = write(
        tmp_path / "page.html", stability_page(make(), f"actds stability {'x' * 90}").html()
    )
    browser.open(page, width=width)
    assert browser.console == []
    assert browser.requests == [page.as_uri()]
    assert browser.evaluate(WIDER) == 0
    assert browser.evaluate(OUTSIDE) == []
    if make is not hostile_stability:
        assert browser.evaluate(UNSAID) == []
        assert browser.evaluate(COVERED) == []


def test_the_numbers_of_a_figure_are_downloaded_under_the_policy(
    browser: Browser, tmp_path: Path
) -> None:
    result, folder = audit("heavy"), tmp_path / "downloads"
    folder.mkdir()
    page = write(tmp_path / "page.html", render(result))
    browser.open(page)
    drawn = {"waterfall": waterfall(result), "lags": lag_plot(result)}
    for name, picture in drawn.items():
        assert picture is not None
        came = browser.download(f'a[download="{name}.csv"]', folder)
        assert came == picture.data.csv().encode()
    assert browser.console == []
    assert browser.evaluate("location.href") == page.as_uri()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_index_fits_and_its_links_lead_to_the_pages_beside_it(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    known = About(("org/model-8b",), ("vllm 0.11.0",), ("resid_post.10 (4,096 × bfloat16)",) * 3,
                  1_763_800_000 * 10**9, "")  # fmt: skip
    entries = [
        Entry(
            f"/data/runs/{name}", audit(name).answer.words, audit(name), known, page=f"{name}.html"
        )
        for name in CASES
    ]
    entries.append(Entry("/data/bad", "No: it is not valid", why="E201 shards/s-1: 4,095 bytes"))
    page = write(tmp_path / "index.html", render_index(entries, f"actds check {'x' * 90}"))
    browser.open(page, width=width)
    assert browser.console == [] and browser.requests == [page.as_uri()]
    assert browser.evaluate(WIDER) == 0 and browser.evaluate(UNSAID) == []
    heavy = write(tmp_path / "heavy.html", render(audit("heavy")))
    browser.evaluate("document.querySelector('a[href=\"heavy.html\"]').click()")
    for _ in range(100):
        if browser.evaluate("document.querySelector('#checks') !== null"):
            break
    assert browser.evaluate("location.href") == heavy.as_uri()
