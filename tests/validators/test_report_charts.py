"""Single charts of the page: the coverage map, the loss rate per stratum, the map of weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actds_testing.audit_results import audit
from actds_validators.audit.result import (
    Audit,
    ClassLoss,
    Coverage,
    CoverageCell,
    Difference,
    Estimate,
    Stratum,
    WeightCell,
)
from actds_validators.pages.accounting import coverage_map, coverage_part
from actds_validators.pages.answer import Part
from actds_validators.pages.mechanism import weight_map
from actds_validators.pages.missingness import heat_map
from actds_validators.pages.svg import Picture
from actds_validators.pages.words import percent


def drawn(chart: Callable[[Audit], Picture | None], **changes: object) -> Picture:
    """Return a chart of the heavy case with some of its sections changed."""
    picture = chart(audit("heavy", **changes))
    assert picture is not None
    return picture


def coverage(section: Coverage) -> Part:
    part = coverage_part(audit("heavy", coverage=section))
    assert part is not None
    return part


def of_cells(cells: list[CoverageCell]) -> Coverage:
    section = audit("heavy").coverage
    assert section is not None
    return section.model_copy(update={"cells": cells})


def heat(differences: list[Difference]) -> Picture:
    section = audit("heavy").missingness
    assert section is not None
    return drawn(heat_map, missingness=section.model_copy(update={"differences": differences}))


def test_coverage_says_how_often_rows_were_served_over_those_served_again_and_over_all() -> None:
    result = audit("heavy").coverage
    assert result is not None
    said = coverage(result).lead
    assert "61,220 stored rows were served more than once (at most 812 times, 5.6 times on" in said
    assert "Over all stored rows a row was served 1.37 times on average" in said
    none = {"repeated_prefixes": 0, "largest_multiplicity": 1, "mean_multiplicity": 1.0}
    said = coverage(result.model_copy(update={**none, "repeated_multiplicity": None})).lead
    assert "no stored row was served more than once" in said
    assert "on average" not in said and "at most 1" not in said


def test_coverage_map_gives_the_share_stored_of_all_that_was_served_or_lost() -> None:
    cell = CoverageCell(
        token_class="prompt", low=0, high=1, stored=30, reused=20, lost=50, filtered=900,
        stored_share=0.3,
    )  # fmt: skip
    other = cell.model_copy(update={"low": 1, "high": 3, "stored": 40, "stored_share": 4 / 11})
    seen = [s.text for s in drawn(coverage_map, coverage=of_cells([cell, other])).shapes]
    assert "30 %" in seen and percent(4 / 11) in seen
    bands = [
        cell.model_copy(update={"low": 2**k - 1, "high": 2 ** (k + 1) - 1} | lost)
        for k in range(12)
        for lost in [{"lost": 950, "stored_share": 0.03} if k % 2 else {}]
    ]
    seen = [s.text for s in drawn(coverage_map, coverage=of_cells(bands)).shapes]
    assert seen.count(percent(60 / 1100)) == 6  # neighbours are drawn together


def test_loss_rates_of_given_classes_stand_in_a_table_where_there_are_any() -> None:
    result = audit("heavy").coverage
    assert result is not None
    some = [
        ClassLoss(token_class="system", n=4_000, n_lost=1_000, rate=0.25),
        ClassLoss(token_class="all others", n=50_000, n_lost=0, rate=0),
    ]
    tables = coverage(result.model_copy(update={"loss_by_class": some})).tables
    assert [row.cells for row in tables[-1].rows] == [
        ("system", "4,000", "1,000", "25 %"),
        ("all others", "50,000", "0", "0 %"),
    ]
    assert len(coverage(result).tables) == len(tables) - 1


def _banded(*strata: tuple[str, int, float]) -> Difference:
    found = audit("heavy")
    assert found.missingness is not None
    d = next(d for d in found.missingness.differences if d.strata)
    return d.model_copy(
        update={
            "strata": [
                Stratum(
                    label=label,
                    n=n,
                    n_lost=round(n * rate),
                    rate=Estimate(value=rate, low=rate, high=rate),
                )
                for label, n, rate in strata
            ]
        }
    )


def _classes(picture: Picture, label: str) -> str:
    """Return the class of the box whose title begins with a label."""
    box = next(s for s in picture.shapes if s.tag == "rect" and s.title.startswith(f"{label}:"))
    return str(dict(box.attributes)["class"])


def test_few_tokens_set_no_scale_and_have_no_shade() -> None:
    strata = ("few", 90, 0.8), ("some", 5_000, 0.5), ("less", 400_000, 0.1), ("more", 600_000, 0.2)
    picture = heat([_banded(*strata)])
    words = [s.text for s in picture.shapes]
    assert "20 % and more" in words
    assert _classes(picture, "few") == "few" and "n 90" in words and "80 %" in words
    assert _classes(picture, "some") == _classes(picture, "more") == "shade6"
    assert _classes(picture, "less") == "shade3"
    assert sum(word.startswith("n ") for word in words) == 1
    words = [s.text for s in heat([_banded(*strata[2:])]).shapes]
    assert words.count("20 %") == 2 and "20 % and more" not in words  # the scale and a cell


def test_strata_left_out_say_the_most_that_they_lost() -> None:
    many = [(f"s{k}", 100_000 - k, 0.1) for k in range(16)]
    left = [("t0", 50_000, 0.05), ("t1", 5, 0.4)]
    words = [s.text for s in heat([_banded(*many, *left)]).shapes]
    assert "2 left out, lost 40 % at most" in words
    words = [s.text for s in heat([_banded(*many, left[0])]).shapes]
    assert "1 left out, lost 5 %" in words


@pytest.mark.parametrize("share", [0.5, 0.00123])
def test_shares_of_a_row_have_the_sign_of_per_cent_all_or_none(share: float) -> None:
    rates = [0.5] * 11 + [share]
    picture = heat([_banded(*((f"s{k}", 10_000, rate) for k, rate in enumerate(rates)))])
    words = [s.text for s in picture.shapes]
    assert words.count("50 %") == (13 if share == 0.5 else 1)  # the scale has its own
    assert words.count("0.123") == words.count("50") // 11


def test_weight_map_names_its_sides_tells_loads_apart_and_what_lost_every_row() -> None:
    section = audit("heavy").weighting
    assert section is not None
    cell = section.cells[0]

    def of(low: float, high: float, label: str, **update: float) -> WeightCell:
        return cell.model_copy(
            update={"load_low": low, "load_high": high, "label": label, **update}
        )

    cells = [
        of(0, 91.54321, "rare", rate=0.3, weight=1.5),
        of(91.54321, 95.98123, "rare", rate=0.3, weight=1.5),
        of(95.98123, 96.02345, "rare", rate=0.1, weight=0.0, n=7, n_lost=7),
        of(96.02345, 96.02345, "rare", rate=0.2, weight=1.25),
    ]
    picture = drawn(
        weight_map, weighting=section.model_copy(update={"cells": cells, "complexity": "rarity"})
    )
    words = [s.text for s in picture.shapes]
    assert {"load, tokens per step →", "rarity ↓"} <= set(words)
    assert {"0–91.5", "91.5–95.98", "95.98–96.02", "96.02"} <= set(words)
    assert "all lost" in words and "n 7" in words and "× 0" not in words and "10 %" not in words
    assert "30 % and more" in words
