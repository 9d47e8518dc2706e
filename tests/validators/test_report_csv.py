"""The numbers behind each figure as CSV: all of them, exact, and no formula of a spreadsheet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from urllib.request import urlopen

import pytest

from actds_studies.pages.regimes import page as regimes_page
from actds_studies.pages.stability import page as stability_page
from actds_testing.audit_results import CASES, audit, enormous, wide
from actds_testing.regime_results import made as regimes
from actds_testing.regime_results import many as many_regimes
from actds_testing.stability_results import made as stability
from actds_testing.stability_results import many as many_stability
from actds_validators.pages.accounting import coverage_map, waterfall
from actds_validators.pages.mechanism import capture_trace, lag_plot, weight_map
from actds_validators.pages.missingness import bound_curve, forest, heat_map
from actds_validators.pages.report import render
from actds_validators.pages.svg import FigureData, Picture

LINK = re.compile(r'<a download="([^"]+)" href="([^"]+)" aria-label="CSV: [^"]+">CSV</a>')
FORMULA = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")


def tables(source: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the name of each figure of a page, and the cells of its CSV."""
    for figure in re.findall(r"<figure.*?</figure>", source, re.S):
        title = re.search(r'<title id="(.+)-title">', figure)
        link = LINK.search(figure)
        assert title is not None
        # Comparisons of an audit have charts of their own, which regimes replaces.
        if link is None and title[1].endswith("-bars"):
            continue
        assert link is not None and link[1] == f"{title[1]}.csv", title[1]
        with urlopen(link[2]) as answer:
            assert answer.headers["Content-Type"] == "text/csv;charset=utf-8"
            text = answer.read().decode()
        yield title[1], list(csv.reader(io.StringIO(text, newline=""), strict=True))


def rows(picture: Picture | None) -> list[list[str]]:
    assert picture is not None
    return list(csv.reader(io.StringIO(picture.data.csv(), newline=""), strict=True))[1:]


PAGES: dict[str, Callable[[], str]] = {
    **{name: lambda name=name: render(audit(name)) for name in CASES},  # type: ignore[misc]
    "wide": lambda: render(wide()),
    "regimes": lambda: regimes_page(regimes(), "actds regimes").html(),
    "many regimes": lambda: regimes_page(many_regimes(), "actds regimes").html(),
    "stability": lambda: stability_page(stability(), "actds stability").html(),
    "many stability": lambda: stability_page(many_stability(), "actds stability").html(),
}


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_has_its_numbers_below_it(name: str) -> None:
    found = dict(tables(PAGES[name]()))
    assert found
    for figure, (header, *lines) in found.items():
        assert lines, figure
        assert len(set(header)) == len(header) and all(header), figure
        assert {len(line) for line in lines} == {len(header)}, figure
        numbers = [cell for line in lines for cell in line if re.fullmatch(r"-?\d[\d.e+-]*", cell)]
        assert len(numbers) >= len(lines), figure


def test_the_numbers_are_those_of_the_result() -> None:
    result = audit("heavy")
    assert result.missingness is not None and result.weighting is not None
    assert result.queues is not None and result.coverage is not None
    steps = result.accounting.waterfall
    assert rows(waterfall(result)) == [
        [s.name, s.reason or "", str(s.n_positions), repr(s.share)] for s in steps
    ]
    by = {d.covariate.label: d.smd for d in result.missingness.differences}
    lines = rows(forest(result, "content"))
    assert lines and all(
        [float(cell) for cell in line[3:]]
        == [(e := by[line[0]]).value, e.low, e.high, e.confidence]
        for line in lines
    )
    lost = {
        (d.covariate.label, s.label): s for d in result.missingness.differences for s in d.strata
    }
    lines = rows(heat_map(result))
    assert lines and all(
        [int(line[4]), float(line[5])] == [(s := lost[line[0], line[2]]).n_lost, s.rate.value]
        for line in lines
    )
    point = next(line for line in rows(bound_curve(result)) if line[0] == "this dataset")
    bound = result.missingness.bound
    assert [float(cell) for cell in point[1:]] == [bound.loss_share, bound.bias]
    assert [[float(c) for c in line[:2]] for line in rows(lag_plot(result))] == [
        [lag.steps, lag.correlation] for lag in result.queues.lags
    ]
    assert {(float(line[0]), line[2], float(line[5])) for line in rows(weight_map(result))} == {
        (cell.load_low, cell.label, cell.rate) for cell in result.weighting.cells
    }
    trace = rows(capture_trace(result))
    bins = [line for line in trace if line[0] == "bin"]
    assert sum(int(line[3]) for line in bins) == sum(t.computed for t in result.queues.trace)
    assert len(trace) - len(bins) == sum(len(s.marks_s) for s in result.queues.stalls)
    cells = result.coverage.cells
    assert sum(int(line[3]) for line in rows(coverage_map(result))) == sum(c.stored for c in cells)


def test_cells_are_quoted_as_rfc_4180_says_and_floats_keep_every_digit() -> None:
    data = FigureData(("a, b", "n"), [('say "no"', 0.1 + 0.2), ("x", -1e-300), ("é", None)])
    assert data.csv() == '"a, b",n\r\n"say ""no""",0.30000000000000004\r\nx,-1e-300\r\né,\r\n'
    plain = FigureData(("position", "share"), [(n, n / 7) for n in range(9)])
    for text in (data, plain, FigureData(("é" * 90,), [(1,)])):
        with urlopen(text.url()) as answer:
            assert answer.read().decode() == text.csv()
        assert re.fullmatch(r"[!#$%&'()*+,./:;=?@\[\]A-Za-z0-9_~-]+", text.url())
        assert (";base64," in text.url()) == (text is not plain)


@pytest.mark.parametrize("sign", FORMULA)
@pytest.mark.parametrize("before", ["", "  ", '"', "a,", "a; ", '",', "\n", "a\n"])
def test_no_text_is_a_formula_of_a_spreadsheet(before: str, sign: str) -> None:
    text = FigureData((f"{before}{sign}1",), [(f"{before}{sign}cmd|'/C calc'!A0",)]).csv()
    for delimiter in ",;\t":
        for line in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
            assert not [cell for cell in line if cell.strip('" ').startswith(FORMULA)]
    assert FigureData(("n",), [(-1.5,), (-2,)]).csv() == "n\r\n-1.5\r\n-2\r\n"


def test_a_page_without_room_says_whose_numbers_it_lacks() -> None:
    source = render(enormous())
    assert len(source.encode()) < 1_000_000
    lacking = source.count("(CSV: too long for this page; --json has the numbers)")
    assert lacking > 0 and lacking + len(LINK.findall(source)) == 15
    assert "CSV: too long" not in render(wide())
