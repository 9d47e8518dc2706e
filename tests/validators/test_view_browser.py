"""The page to look at a dataset in a real browser: no error, no request, nothing wider than it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import actds
from actds.format.readouts import Readouts
from actds_testing.browser import Browser, chromium
from actds_testing.synthetic import make_dataset

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed (apt: chromium)"),
]

WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Texts that leave the view box of their picture by more than a pixel.
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
# Tokens whose shade is seen: they have another ground than none.
SHADED = """
[...document.querySelectorAll(".tokens .t")]
  .filter(t => getComputedStyle(t).backgroundColor !== "rgba(0, 0, 0, 0)").map(t => t.className)
"""
# The least contrast of the letters of a token with its ground.
CONTRAST = """
Math.min(...[...document.querySelectorAll(".tokens .t")].map(t => {
  const light = colour => {
    const parts = colour.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const style = getComputedStyle(t), bare = style.backgroundColor === "rgba(0, 0, 0, 0)";
  const ground = bare ? getComputedStyle(document.body).backgroundColor : style.backgroundColor;
  const both = [light(style.color), light(ground)].sort((a, b) => b - a);
  return (both[0] + 0.05) / (both[1] + 0.05);
}))
"""


class Long:
    """Decodes a token to words of every kind: markup, line ends, wide and endless ones."""

    _WORDS = ("<script>console.log(1)</script>", "\n", "字" * 60, "x" * 300, " and", "\u202e\x1b")

    def decode(self, token_ids: list[int]) -> str:
        return self._WORDS[token_ids[0] % len(self._WORDS)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = chromium()
    assert executable is not None
    with Browser(executable) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("view")
    path = make_dataset(
        root / ("long" * 40), n_requests=40, seed=3, drops=True, filtered=True, sinks=True,
        readouts=Readouts(1, seed=0),
    )  # fmt: skip
    np.save(root / "probe.npy", np.random.default_rng(0).normal(size=(2, 16)).astype("f4"))
    actds.view(path, tokenizer=Long(), probe=root / "probe.npy", stats=True).save(root / "p.html")
    return root / "p.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 600, 1280])
def test_page_says_nothing_asks_nothing_and_fits(
    browser: Browser, page: Path, width: int, scheme: str
) -> None:
    browser.open(page, width=width, media=[("prefers-color-scheme", scheme)])
    assert browser.console == []
    assert browser.requests == [page.as_uri()]
    assert browser.evaluate(WIDER) == 0
    assert browser.evaluate(OUTSIDE) == []
    assert browser.evaluate("document.querySelectorAll('script').length") == 0
    assert browser.evaluate("document.querySelectorAll('.tokens .t').length") > 100
    assert browser.evaluate(CONTRAST) > 4.5
    dark = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == ("rgb(13, 17, 23)" if scheme == "dark" else "rgb(255, 255, 255)")


def test_a_choice_of_colour_shades_the_tokens_by_it(browser: Browser, page: Path) -> None:
    browser.open(page)
    seen = []
    for letter in "abc":
        browser.evaluate(f"document.querySelector('#by-{letter}').click()")
        shaded = browser.evaluate(SHADED)
        assert shaded and all(f" {letter}" in kinds for kinds in shaded)
        grounds = (
            "[...document.querySelectorAll('.tokens .t')]"
            ".map(t => getComputedStyle(t).backgroundColor)"
        )
        seen.append(browser.evaluate(grounds))
        shown = "[...document.querySelectorAll('.scale')].filter(s => s.offsetHeight).length"
        assert browser.evaluate(shown) == 1
    assert seen[0] != seen[1] != seen[2]
    # What has no row has no shade.
    assert "rgba(0, 0, 0, 0)" in seen[0]


def test_every_link_leads_to_a_section_and_the_page_prints(browser: Browser, page: Path) -> None:
    browser.open(page)
    links = "[...document.querySelectorAll('nav a')]"
    assert browser.evaluate(f"{links}.length") == 4
    assert browser.evaluate(f"{links}.filter(a => !document.querySelector(a.hash)).length") == 0
    assert browser.pdf().startswith(b"%PDF")


def test_the_policy_stops_what_a_hole_would_let_in(browser: Browser, page: Path) -> None:
    """The control: were text to become markup, the policy would stop it, and these tests see it."""
    hole = "<script>document.title = 'run'</script><p style='color:red'></p><img src='x.png'>"
    source = page.read_text(encoding="utf-8").replace("</main>", f"{hole}</main>")
    broken = page.with_name("broken.html")
    broken.write_text(source, encoding="utf-8")
    browser.open(broken)
    assert len(browser.console) >= 3
    assert all("Content Security Policy" in said for said in browser.console)
    assert browser.evaluate("document.title") != "run"


def test_a_notebook_shows_it_in_a_frame_that_runs_nothing(browser: Browser, page: Path) -> None:
    from actds_studies.view import View

    whole = page.with_name("notebook.html")
    frame = View(page.read_text(encoding="utf-8"))._repr_html_()
    whole.write_text(f"<!doctype html><html><body>{frame}</body></html>", encoding="utf-8")
    browser.open(whole)
    assert browser.console == []
    assert browser.evaluate("document.querySelectorAll('iframe').length") == 1
    assert browser.evaluate("document.querySelectorAll('script').length") == 0
