"""Tokens: one pass over the rows and losses of a run, down to sums per tick, block, cell and band.

Part of the third stage, after the lookup. What is summed are the covariates of every computed
token, over the stored and over the lost ones; every part's sums are numbers of their own, added in
the order of the parts. Imports `lookup`, `sources` and the sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from actds_validators.audit.cell_sums import CellSums, cell_sums, joined
from actds_validators.audit.class_counts import N_BANDS, N_BITS, ClassCounts, position_band
from actds_validators.audit.lookup import Lookup
from actds_validators.audit.ranges import explode
from actds_validators.audit.result import Covariate
from actds_validators.audit.series import SYSTEM
from actds_validators.audit.sources import Part
from actds_validators.audit.words import column

__all__ = ["SOURCE", "CellEdges", "TokenPass", "TokenSums", "content_covariates", "lost_pieces"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CONTENT = {
    "position": ("position in the request", "log2 tokens"),
    "prompt_len": ("prompt length of the request", "log2 tokens"),
    "request_len": ("length of the request", "log2 tokens"),
    "prefill": ("prefill, against decode", "share"),
    "special": ("special token", "share"),
    "rarity": ("rarity of the token", "bits"),
}
"""Content covariates: label and unit."""
NEED_IDS = ("special", "rarity")
BANDED = {
    "position": N_BANDS,
    "prompt_len": N_BANDS,
    "request_len": N_BANDS,
    "prefill": 2,
    "special": 2,
    "rarity": N_BITS,
}
SOURCE = "source:"
DENSE = 8
"""Numbers are counted in an array of so many times their number at most, else sorted."""


def _n_bands(name: str) -> int:
    """Return the number of bands of a covariate: two of a source, itself and the others."""
    return 2 if name.startswith(SOURCE) else BANDED[name]


def content_covariates(sources: tuple[str, ...], *, has_ids: bool) -> dict[str, Covariate]:
    """Return the content covariates by name.

    Args:
        sources: prompt sources that get a covariate each.
        has_ids: whether the ids of lost tokens are known.
    """
    found = {
        name: Covariate(name=name, label=label, unit=unit, group="content")
        for name, (label, unit) in CONTENT.items()
        if has_ids or name not in NEED_IDS
    }
    for word in sources:
        name = f"{SOURCE}{word}"
        found[name] = Covariate(name=name, label=f"from {word}", unit="share", group="content")
    return found


@dataclass(frozen=True)
class CellEdges:
    """Cells of load by complexity.

    Args:
        load: inner edges of the load, rising.
        complexity: ``rarity`` or, where lost tokens have no ids, ``position``.
        edges: inner edges of the complexity.
    """

    load: tuple[float, ...]
    complexity: str
    edges: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of loads and of complexities; the last is that of unknown tokens."""
        return len(self.load) + 1, len(self.edges) + 1 + self.has_unknown

    @property
    def has_unknown(self) -> bool:
        """Return whether a token may have no complexity: a rarity needs its id."""
        return self.complexity == "rarity"

    @property
    def n_cells(self) -> int:
        """Return the number of cells."""
        return self.shape[0] * self.shape[1]

    def of(self, lookup: Lookup, step: Ints, position: Ints, token: Ints) -> Ints:
        """Return the cell of each row, ``load * n_complexities + complexity``.

        Args:
            lookup: of the run.
            step: places of the steps.
            position: positions; used where the complexity is the position.
            token: places of the token ids; used where it is the rarity.
        """
        load = np.searchsorted(np.array(self.load, np.float32), lookup.load[step], side="right")
        value = lookup.vocabulary.rarity(token) if self.has_unknown else position
        other = np.searchsorted(np.array(self.edges), value, side="right")
        if self.has_unknown:
            other = np.where(np.isnan(value), len(self.edges) + 1, other)
        found: Ints = load * self.shape[1] + other
        return found


class TokenSums:
    """Sums over some tokens of a run, the first axis saying whether they were lost.

    Args:
        names: covariates, in order.
        n_ticks: length of the series.
        n_blocks: blocks of the jackknife.
        n_cells: of load and complexity.
        classes: names of token classes that somebody gave.
        n_slots: token ids that are counted block by block.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        n_ticks: int,
        n_blocks: int,
        n_cells: int,
        classes: tuple[str, ...],
        n_slots: int,
    ) -> None:
        self.names = names
        self.low, self.high = n_ticks, 0
        self.n = np.zeros((2, n_ticks))
        self.known = np.zeros((2, n_ticks))
        self.x = np.zeros((2, len(names), n_ticks))
        self.xx = np.zeros((2, len(names), n_ticks))
        self.bands = {name: np.zeros((2, n_blocks, _n_bands(name))) for name in names}
        self.cell_n = np.zeros((2, n_blocks, n_cells))
        self.cell_known = np.zeros((n_blocks, n_cells))
        self.cell_x = np.zeros((len(names), n_blocks, n_cells))
        self.cell_system = np.zeros((len(SYSTEM), n_blocks, n_cells))
        self.classes = ClassCounts(classes)
        # Special tokens, the classes and the ids, by the block in which the request began.
        self.strata = np.zeros((2, 1 + len(classes) + n_slots, n_blocks))
        self.within: list[CellSums] = []

    def cut(self) -> TokenSums:
        """Return the same without the ticks that nothing fell into: `add` knows where they are."""
        self.low = min(self.low, self.high)
        for name in ("n", "known", "x", "xx"):
            setattr(self, name, getattr(self, name)[..., self.low : self.high].copy())
        self.within = [joined(self.within)] if self.within else []
        return self

    def add(self, other: TokenSums) -> None:
        """Add what `cut` returned."""
        for name in ("n", "known", "x", "xx"):
            getattr(self, name)[..., other.low : other.high] += getattr(other, name)
        for name, counts in other.bands.items():
            self.bands[name] += counts
        for name in ("cell_n", "cell_known", "cell_x", "cell_system", "strata"):
            getattr(self, name)[...] += getattr(other, name)
        self.classes.add(other.classes)
        self.within += other.within

    def take_within(self) -> list[CellSums]:
        """Return the sums by step and request, and forget them: another run has other steps."""
        parts, self.within = self.within, []
        return parts


@dataclass(frozen=True)
class TokenPass:
    """Sums one part of the table ``tokens``, or some of the lost positions.

    Args:
        lookup: of the run.
        names: content covariates.
        cells: of the weights; ``None`` where nothing was lost: then classes alone are counted.
    """

    lookup: Lookup
    names: tuple[str, ...]
    cells: CellEdges | None

    def sums(self) -> TokenSums:
        """Return sums of nothing."""
        labels = self.lookup.labels
        return TokenSums(
            self.names if self.cells else (),
            self.lookup.n_ticks if self.cells else 0,
            self.lookup.n_blocks,
            self.cells.n_cells if self.cells else 0,
            labels.words if labels else (),
            self.lookup.n_slots if self.cells else 0,
        )

    def __call__(self, piece: Part | range) -> TokenSums:
        """Return the sums of stored rows, or of a range of lost positions."""
        sums = self.sums()
        lost = isinstance(piece, range)
        for rows in self._lost(piece) if isinstance(piece, range) else self._stored(piece):
            label = _add_classes(sums.classes, rows, lost=lost)
            if self.cells is not None:
                _add_strata(sums, rows, label, int(lost))
                _add(sums, rows, self.cells, int(lost))
        return sums.cut()

    def _stored(self, part: Part) -> Iterator[_Rows]:
        for batch in part.batches(["request", "position", "token_id", "step"]):
            step = self.lookup.steps.of(column(batch, "step"))
            request = self.lookup.requests.of(column(batch, "request"))
            position, token = column(batch, "position"), column(batch, "token_id")
            token = self.lookup.vocabulary.places(token)
            known = (step >= 0) & (request >= 0)
            if not known.all():
                step, request, position, token = (
                    values[known] for values in (step, request, position, token)
                )
            yield _Rows(self.lookup, step, request, position, token)

    def _lost(self, piece: range) -> Iterator[_Rows]:
        losses = self.lookup.losses
        some = slice(piece.start, piece.stop)
        for which, position in explode(losses.start[some], losses.stop[some]):
            step, request = losses.step[some][which], losses.request[some][which]
            token = np.full(len(step), -1, np.int64)
            if self.lookup.has_ids:
                ids = self.lookup.lost_ids[losses.find(step, request, position)]
                token = self.lookup.vocabulary.places(ids)
            yield _Rows(self.lookup, step, request, position, token)


def lost_pieces(lookup: Lookup, size: int = 1 << 18) -> list[range]:
    """Return the lost positions in pieces for `TokenPass`, of about so many positions each."""
    lengths = lookup.losses.stop - lookup.losses.start
    if not len(lengths):
        return []
    number = (np.cumsum(lengths) - lengths) // size
    firsts = np.flatnonzero(np.diff(number, prepend=-1))
    return [range(int(a), int(b)) for a, b in zip(firsts, [*firsts[1:], len(lengths)], strict=True)]


@dataclass(frozen=True)
class _Rows:
    """Rows with what the lookup knows of them; every array is a place in the lookup."""

    lookup: Lookup
    step: Ints
    request: Ints
    position: Ints
    token: Ints

    @cached_property
    def prefill(self) -> Bools:
        return self.position < self.lookup.prompt_len[self.request]

    @cached_property
    def special(self) -> Bools:
        return self.lookup.vocabulary.special(self.token)

    @cached_property
    def bits(self) -> Ints:
        return self.lookup.vocabulary.bits(self.token)

    @cached_property
    def band(self) -> Ints:
        return position_band(self.position)

    def value(self, name: str) -> Floats:
        """Return a covariate, NaN where a row has none."""
        lookup = self.lookup
        if name == "position":
            at: Floats = np.log2(self.position + 1.0)
            return at
        if name == "prompt_len":
            return lookup.prompt_log[self.request]
        if name == "request_len":
            return lookup.request_log[self.request]
        if name == "rarity":
            return lookup.vocabulary.rarity(self.token)
        found: Floats = self._flag(name).astype(np.float64)
        return found

    def band_of(self, name: str) -> Ints:
        """Return the band of each row in the covariate."""
        if name == "position":
            return self.band
        if name == "prompt_len":
            return self.lookup.prompt_band[self.request]
        if name == "request_len":
            return self.lookup.request_band[self.request]
        if name == "rarity":
            return self.bits
        return self._flag(name).astype(np.int64)

    def _flag(self, name: str) -> Bools:
        """Return whether each row is what a covariate of two bands asks for."""
        if not name.startswith(SOURCE):
            return self.prefill if name == "prefill" else self.special
        number = self.lookup.sources.index(name.removeprefix(SOURCE))
        found: Bools = self.lookup.source[self.request] == number
        return found


def _add_strata(sums: TokenSums, rows: _Rows, label: Ints | None, lost: int) -> None:
    """Add to the strata that only a token tells: special, classes, ids."""
    lookup, n_blocks = rows.lookup, sums.strata.shape[2]
    slots = [(np.zeros(len(rows.step), np.int64), rows.special)]
    if label is not None:
        slots.append((1 + label, label >= 0))
    if lookup.n_slots:
        slot = lookup.token_slot[rows.token]
        slots.append((slot + sums.strata.shape[1] - lookup.n_slots, slot >= 0))
    for slot, used in slots:
        some = np.flatnonzero(used)
        if len(some):
            at = slot[some] * n_blocks + lookup.request_block[rows.request[some]]
            n = np.bincount(at, minlength=sums.strata[lost].size)
            sums.strata[lost] += n.reshape(sums.strata.shape[1:])


def _add_classes(counts: ClassCounts, rows: _Rows, *, lost: bool) -> Ints | None:
    """Count rows for the coverage map, and return the places of their labels, if there are any."""
    lookup = rows.lookup
    number = lookup.requests.numbers(rows.request)
    served = None if lost else lookup.servings.of(number, rows.position)
    label = lookup.labels.of(number, rows.position) if lookup.labels else None
    counts.count(
        special=rows.special,
        prefill=rows.prefill,
        served=served,
        label=label,
        band=rows.band,
        bits=rows.bits,
    )
    return label


def _add(sums: TokenSums, rows: _Rows, edges: CellEdges, lost: int) -> None:
    lookup = rows.lookup
    if not len(rows.step):
        return
    ticks = lookup.tick[rows.step]
    low = int(ticks.min())
    tick = ticks - low
    n = np.bincount(tick)
    here = slice(low, low + len(n))
    sums.low, sums.high = min(sums.low, here.start), max(sums.high, here.stop)
    sums.n[lost, here] += n
    block = lookup.block[rows.step]
    cell = edges.of(lookup, rows.step, rows.position, rows.token)
    shape = sums.cell_n.shape[1:]
    at = block * shape[1] + cell
    sums.cell_n[lost] += np.bincount(at, minlength=shape[0] * shape[1]).reshape(shape)
    if not lost:
        _add_system(sums, rows, cell)
    inside = np.flatnonzero(lookup.within[rows.step])
    values = []
    for k, name in enumerate(sums.names):
        x = rows.value(name)
        if len(inside):
            values.append(x[inside])
        ticked, celled = tick, at
        if name == "rarity":
            known = ~np.isnan(x)
            if not known.all():
                x, ticked, celled = x[known], tick[known], at[known]
            sums.known[lost, here] += np.bincount(ticked, minlength=len(n))
            if not lost:
                counted = np.bincount(celled, minlength=shape[0] * shape[1])
                sums.cell_known += counted.reshape(shape)
        total = np.bincount(ticked, weights=x, minlength=len(n))
        sums.x[lost, k, here] += total
        if name in CONTENT and name not in ("prefill", "special"):
            total = np.bincount(ticked, weights=x * x, minlength=len(n))
        sums.xx[lost, k, here] += total  # the square of a share's 0 or 1 is itself
        if not lost:
            total = np.bincount(celled, weights=x, minlength=shape[0] * shape[1])
            sums.cell_x[k] += total.reshape(shape)
        width = _n_bands(name)
        counted = np.bincount(block * width + rows.band_of(name), minlength=shape[0] * width)
        sums.bands[name][lost] += counted.reshape(shape[0], width)
    if len(inside):
        gone = np.full(len(inside), bool(lost))
        sums.within.append(cell_sums(rows.step[inside], rows.request[inside], values, gone))


def _add_system(sums: TokenSums, rows: _Rows, cell: Ints) -> None:
    """Add the system covariates of stored rows: once for all rows of a step and a cell."""
    lookup, (n_blocks, n_cells) = rows.lookup, sums.cell_system.shape[1:]
    pairs, n = _counted(rows.step * n_cells + cell)
    step = pairs // n_cells
    at = lookup.block[step] * n_cells + pairs % n_cells
    for k, name in enumerate(SYSTEM):
        total = np.bincount(at, weights=n * lookup.system[name][step], minlength=n_blocks * n_cells)
        sums.cell_system[k] += total.reshape(n_blocks, n_cells)


def _counted(numbers: Ints) -> tuple[Ints, Ints]:
    """Return the numbers that there are, and how often each is."""
    low = int(numbers.min())
    if int(numbers.max()) - low > DENSE * len(numbers):
        return np.unique(numbers, return_counts=True)
    counts = np.bincount(numbers - low)
    found = np.flatnonzero(counts)
    return found + low, counts[found]
