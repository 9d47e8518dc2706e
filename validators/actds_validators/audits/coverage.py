"""Coverage: which token classes at which positions are stored, reused and lost.

A section of the audit. A dataset stores a repeated prefix once; training without multiplicity
weights sees it once as well, however often it was served. Imports `sources` and the result.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from actds_validators.audits.result import CapturedShift, Coverage, CoverageCell
from actds_validators.audits.sources import RunSource
from actds_validators.statistics.distances import jensen_shannon, total_variation
from actds_validators.statistics.runs import Floats

__all__ = ["CoverageCounts", "coverage", "read_coverage"]

NOWHERE = "reference without a row"
CLASSES = ("special", "shared prefix", "prompt", "generated", NOWHERE)
CLASSES_FROM = (
    "special: the tokenizer's special tokens; shared prefix: prompt positions that were served "
    "more than once (system prompts, templates); prompt and generated: the others, by phase"
)
LABELS_FROM = "given labels, and for what they leave out"
_BAND = "floor(log2(position + 1))::int"
N_RARITY = 24


@dataclass
class CoverageCounts:
    """Positions by class and band: stored, reused, lost, filtered; by rarity in bits: stored, with
    their servings, with what was lost."""

    cells: dict[tuple[str, int], list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0, 0, 0])
    )
    rarity: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    stored: int = 0
    served: int = 0
    repeated: int = 0
    largest: int = 1


def read_coverage(source: RunSource, counts: CoverageCounts, *, labelled: bool = False) -> None:
    """Add a run.

    Args:
        source: the run, with the table ``vocabulary`` and the views of `tokens.prepare`.
        counts: what to add to.
        labelled: whether there is a table ``labels`` with classes that somebody gave.
    """
    run = source.connection
    run.execute(
        "create temp table reused as select request, position, count(*)::int n from (select "
        "ref_request as request, unnest(range(start::bigint, stop::bigint))::uinteger as position "
        "from spans where disposition = 'cache_ref' and ref_request is not null) group by all"
    )
    word = _class(
        "case when v.special then 'special' when r.n is not null then 'shared prefix' "
        "when t.phase = 'prefill' then 'prompt' else 'generated' end",
        labelled=labelled,
    )
    rows = (
        f"{_labelled('tokens', labelled=labelled)} left join reused r using (request, position) "
        "left join vocabulary v using (token_id)"
    )
    for name, band, rare, stored, reused, repeated, largest in source.rows(
        f"select {word} class, {_BAND} band, {_bits('v.rarity')} rare, "
        "count(*), coalesce(sum(r.n), 0), count(r.n), coalesce(max(r.n), 0) "
        f"from {rows} group by all"
    ):
        cell = counts.cells[name, int(band)]
        cell[0] += int(stored)
        cell[1] += int(reused)
        if rare is not None:
            for slot, n in enumerate((stored, stored + reused, stored + reused)):
                counts.rarity[int(rare)][slot] += int(n)
        counts.stored += int(stored)
        counts.served += int(stored) + int(reused)
        counts.repeated += int(repeated)
        counts.largest = max(counts.largest, 1 + int(largest))
    # A reference to a row that is not stored has no class: nothing says which token it was.
    for band, n in source.rows(
        f"select {_BAND} band, sum(n) from reused anti join tokens using (request, position) "
        "group by all"
    ):
        counts.cells[NOWHERE, int(band)][1] += int(n)
    by_phase = "case when position < prompt_len then 'prompt' else 'generated' end"
    word = _class(f"case when special then 'special' else {by_phase} end", labelled=labelled)
    for name, band, rare, n in source.rows(
        f"select {word} class, {_BAND} band, {_bits('rarity')} rare, count(*) "
        f"from {_labelled('gone', labelled=labelled)} group by all"
    ):
        counts.cells[name, int(band)][2] += int(n)
        if rare is not None:
            counts.rarity[int(rare)][2] += int(n)
    word = _class(by_phase, labelled=labelled)
    for disposition, slot in (("aborted", 2), ("filtered", 3)):
        positions = (
            "(select request, unnest(range(start::bigint, stop::bigint))::uinteger as position "
            f"from spans where disposition = '{disposition}')"
        )
        for name, band, n in source.rows(
            f"select {word} class, {_BAND} band, count(*) "
            f"from {_labelled(positions, labelled=labelled)} join asked using (request) "
            "group by all"
        ):
            counts.cells[name, int(band)][slot] += int(n)


def _labelled(rows: str, *, labelled: bool) -> str:
    """Return rows as ``t`` with the label, if any, that begins last before their position."""
    if not labelled:
        return f"{rows} t"
    return (
        f"{rows} t asof left join labels l on t.request = l.label_request and t.position >= l.start"
    )


def _class(otherwise: str, *, labelled: bool) -> str:
    if not labelled:
        return otherwise
    return f"case when l.stop > t.position then l.class else {otherwise} end"


def coverage(counts: CoverageCounts, *, labelled: bool = False) -> Coverage | None:
    """Return the section, ``None`` when nothing is stored."""
    if not counts.stored:
        return None
    cells = []
    given = sorted({name for name, _ in counts.cells} - set(CLASSES))
    for name in (*given, *CLASSES):
        for (word, band), (stored, reused, lost, filtered) in sorted(counts.cells.items()):
            if word == name:
                served = stored + reused
                cells.append(
                    CoverageCell(
                        token_class=name,
                        low=2**band - 1,
                        high=2 ** (band + 1) - 1,
                        computed=stored,
                        reused=reused,
                        lost=lost,
                        filtered=filtered,
                        served_once=stored / served if served else None,
                    )
                )
    rarity = [n for _, n in sorted(counts.rarity.items())]
    triples = {
        "token class": _by(counts, 0),
        "position band": _by(counts, 1),
        "rarity of the token": np.array(rarity, np.float64).T,
    }
    shifts = [
        shift for name, triple in triples.items() if (shift := _shift(name, triple)) is not None
    ]
    return Coverage(
        cells=cells,
        classes_from=f"{LABELS_FROM}; {CLASSES_FROM}" if labelled else CLASSES_FROM,
        reused_share=1 - counts.stored / counts.served,
        repeated_prefixes=counts.repeated,
        largest_multiplicity=counts.largest,
        mean_multiplicity=counts.served / counts.stored,
        shifts=shifts,
    )


def _bits(rarity: str) -> str:
    """Return SQL of the rarity in whole bits; ``least`` alone would take 24 for an unknown one."""
    return f"case when {rarity} is not null then least(floor({rarity}), {N_RARITY})::int end"


def _by(counts: CoverageCounts, axis: int) -> Floats:
    """Return stored, weighted and existing positions ``(3, n)`` by class (0) or band (1)."""
    found: dict[str | int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for key, (stored, reused, lost, _filtered) in sorted(counts.cells.items()):
        known = key[0] != NOWHERE
        found[key[axis]][0] += stored
        found[key[axis]][1] += stored + (reused if known else 0)
        found[key[axis]][2] += stored + reused + lost
    return np.array(list(found.values()), np.float64).T


def _shift(name: str, triple: Floats) -> CapturedShift | None:
    stored, weighted, existing = triple
    if not stored.sum():
        return None
    return CapturedShift(
        variable=name,
        total_variation=_known(total_variation(stored, existing)),
        jensen_shannon=_known(jensen_shannon(stored, existing)),
        weighted_total_variation=_known(total_variation(weighted, existing)),
        weighted_jensen_shannon=_known(jensen_shannon(weighted, existing)),
    )


def _known(distance: float | None) -> float:
    assert distance is not None  # both histograms hold something
    return distance
