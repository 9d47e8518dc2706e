"""A dataset at a glance: norms by position, what became of its positions; figures, and HTML.

What is read is bounded, but for the tables of spans and requests: rows and readouts are sampled.
Names, paths and facts come from whoever made the dataset: each is escaped here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actds.dataset.catalog import Catalog
from actds.dataset.fates import fate_counts
from actds.errors import not_installed
from actds.explore.lazy import LazyArray
from actds.format.tables import DISPOSITIONS, EXTERNAL, PHASES
from actds.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SAMPLED_ROWS = 16_384
"""Rows of a hook that are read for its norms, where the run has no readouts."""
SAMPLED_READOUTS = 1 << 21
"""Readouts of a hook that are read, in whole files, the first of which may have more."""
QUANTILES = (0.1, 0.5, 0.9)
BLOCK_ROWS = 64
_MAX_SHARDS = 64
_EXACT = 4  # positions that are a band of their own: the first ones are often sinks
_N_BANDS = 33


@dataclass(frozen=True)
class NormProfile:
    """Norms of rows of a hook by position, in ``n`` bands that have rows.

    Args:
        hook: the hook.
        low: first position of each band, int64 ``(n,)``.
        high: position after its last, int64 ``(n,)``.
        count: rows of each band that were looked at, int64 ``(n,)``.
        quantiles: of the norms of each band at 0.1, 0.5 and 0.9, float64 ``(3, n)``; nan where
            every norm of a band is not finite.
        source: ``readouts`` or ``rows``.
        n_rows: rows that were looked at.
    """

    hook: str
    low: Ints
    high: Ints
    count: Ints
    quantiles: Floats
    source: str
    n_rows: int


@dataclass(frozen=True)
class Fates:
    """What became of the positions of all requests.

    Args:
        low: first position of each band, int64 ``(n,)``: 0, 1, 3, 7 ...
        high: position after its last, int64 ``(n,)``.
        count: positions by phase, disposition (as ``PHASES`` and ``DISPOSITIONS``) and band, int64
            ``(2, 7, n)``.
        external: of the references, those to KV from outside the run, by phase and band, int64
            ``(2, n)``.
        reasons: positions by disposition and reason; those that no step computed are
            ``never computed``.
    """

    low: Ints
    high: Ints
    count: Ints
    external: Ints
    reasons: dict[tuple[str, str | None], int]

    @property
    def total(self) -> int:
        return int(self.count.sum())


def norm_profile(catalog: Catalog, array: LazyArray) -> NormProfile:
    """Return the norms of a hook's rows by position, from readouts if there are any."""
    source = "readouts"
    position, norm = _from_readouts(catalog, array.hook.name)
    if not len(norm) and array.shards:
        source = "rows"
        position, norm = _from_rows(array)
    edges = _edges(int(position.max()) if len(position) else 0)
    band = np.searchsorted(edges, position, side="right") - 1
    order = np.argsort(band, kind="stable")
    bands, starts, count = np.unique(band[order], return_index=True, return_counts=True)
    parts = np.split(norm[order].astype(np.float64), starts[1:]) if len(bands) else []
    finite = [part[np.isfinite(part)] for part in parts]
    nothing = np.full(len(QUANTILES), np.nan)
    columns = [np.quantile(part, QUANTILES) if len(part) else nothing for part in finite]
    return NormProfile(
        array.hook.name,
        edges[bands],
        edges[bands + 1],
        count.astype(np.int64),
        np.array(columns).T.reshape(len(QUANTILES), len(bands)),
        source,
        len(norm),
    )


def _edges(last: int) -> Ints:
    """Return where bands begin, and the end of the last: one each, then by half an octave."""
    rising = _EXACT * 2.0 ** (np.arange(1, 2 * _N_BANDS) / 2)
    edges: Ints = np.concatenate([np.arange(_EXACT + 1), np.round(rising)]).astype(np.int64)
    return edges[: int(np.searchsorted(edges, last, side="right")) + 1]


def _from_readouts(catalog: Catalog, hook: str) -> tuple[Ints, Floats]:
    files = [
        part for (_, name), parts in catalog.parts.items() if name == "readouts" for part in parts
    ]
    n_files = len(files)
    # A file holds every hook; each file counts as the mean one does.
    n_lines = sum(part.n_rows for part in files) // max(len(catalog.genesis.hooks), 1)
    if n_lines > SAMPLED_READOUTS:
        n_files = max(1, n_files * SAMPLED_READOUTS // n_lines)
    curves: list[tuple[Ints, Floats]] = []
    for k in range(n_files):
        part = files[k * len(files) // n_files]
        table = catalog.read_table("readouts", part.file.path, ["position", "hook", "norm"])
        of_hook = table.filter(table["hook"].to_numpy(zero_copy_only=False) == hook)
        curves.append(
            (
                of_hook["position"].to_numpy().astype(np.int64),
                of_hook["norm"].to_numpy().astype(float),
            )
        )
    return _joined(curves)


def _from_rows(array: LazyArray) -> tuple[Ints, Floats]:
    """Return position and norm of rows of a hook: short blocks, spread evenly over its shards."""
    shards = array.shards
    starts = np.cumsum([0, *(shard.n_rows for shard in shards)])
    n_shards = min(len(shards), _MAX_SHARDS)
    parts: list[tuple[Ints, Floats]] = []
    for k in range(n_shards):
        number = k * len(shards) // n_shards
        shard = shards[number]
        position = shard.tokens(["position"])["position"].to_numpy().astype(np.int64)
        for block in _blocks(shard.n_rows, SAMPLED_ROWS // n_shards):
            rows = array[int(starts[number]) + block.start : int(starts[number]) + block.stop]
            norm = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
            parts.append((position[block], norm))
    return _joined(parts)


def _blocks(n_rows: int, room: int) -> Iterator[slice]:
    if n_rows <= room:
        yield slice(0, n_rows)
        return
    n_blocks = max(1, room // BLOCK_ROWS)
    for k in range(n_blocks):
        start = k * n_rows // n_blocks
        yield slice(start, min(start + BLOCK_ROWS, n_rows))


def _joined(parts: list[tuple[Ints, Floats]]) -> tuple[Ints, Floats]:
    if not parts:
        return np.empty(0, np.int64), np.empty(0)
    position, norm = (np.concatenate(column) for column in zip(*parts, strict=True))
    return position, norm


def fates(catalog: Catalog) -> Fates:
    high = 2 ** np.arange(1, _N_BANDS + 1, dtype=np.int64) - 1
    low = np.concatenate([[0], high[:-1]])
    count = np.zeros((len(PHASES), len(DISPOSITIONS), _N_BANDS), np.int64)
    external = np.zeros((len(PHASES), _N_BANDS), np.int64)
    reasons: Counter[tuple[str, str | None]] = Counter()
    for run in catalog.run_ids:
        spans = catalog.table("spans", run)
        requests = catalog.table("requests", run)
        start, stop, request = (
            spans[name].to_numpy().astype(np.int64) for name in ("start", "stop", "request")
        )
        prompt = _prompt_len(requests["request"].to_numpy(), requests["prompt_len"].to_numpy())
        split = np.clip(prompt[request] if len(prompt) else stop, start, stop)
        kinds = np.array(spans["disposition"].to_pylist(), dtype=object)
        for k, disposition in enumerate(DISPOSITIONS):
            of_kind = kinds == disposition
            for phase, (a, b) in enumerate(((start, split), (split, stop))):
                count[phase, k] += _overlap(a[of_kind], b[of_kind], low, high)
        outside = np.array(spans["reason"].to_pylist(), dtype=object) == EXTERNAL
        for phase, (a, b) in enumerate(((start, split), (split, stop))):
            external[phase] += _overlap(a[outside], b[outside], low, high)
        reasons += fate_counts(spans)
    used = int(np.flatnonzero(count.any(axis=(0, 1))).max(initial=-1)) + 1
    return Fates(low[:used], high[:used], count[..., :used], external[:, :used], dict(reasons))


def _prompt_len(request: npt.NDArray[np.uint32], prompt_len: npt.NDArray[np.uint32]) -> Ints:
    lengths = np.zeros(int(request.max()) + 1 if len(request) else 0, np.int64)
    lengths[request] = prompt_len
    return lengths


def _overlap(start: Ints, stop: Ints, low: Ints, high: Ints) -> Ints:
    return np.array(
        [
            np.clip(np.minimum(stop, b) - np.maximum(start, a), 0, None).sum()
            for a, b in zip(low.tolist(), high.tolist(), strict=True)
        ],
        np.int64,
    )


_MAX_ROWS, _MAX_LETTERS = 20, 200
_COLOURS = {
    "captured": "#0072b2",
    "cache_ref": "#009e73",
    "dropped": "#d55e00",
    "aborted": "#cc79a7",
    "filtered": "#999999",
    "undelivered": "#f0e442",
    "thinned": "#56b4e9",
}


def page(
    title: str,
    facts: Mapping[str, str],
    head: Iterable[str] = (),
    lines: Sequence[Iterable[str]] = (),
) -> str:
    """Return a small table of facts, and one of lines, of which the first ones are shown."""

    def cell(tag: str, words: str) -> str:
        return f'<{tag} style="text-align:left">{_safe(words)}</{tag}>'

    def table(rows: str) -> str:
        return f"<table><tbody>{rows}</tbody></table>" if rows else ""

    known = "".join(f"<tr>{cell('th', k)}{cell('td', v)}</tr>" for k, v in facts.items())
    top = "".join(cell("th", word) for word in head)
    body = "".join(
        f"<tr>{''.join(cell('td', word) for word in line)}</tr>" for line in lines[:_MAX_ROWS]
    )
    more = len(lines) - _MAX_ROWS
    rest = f"<p>and {more:,} more</p>" if more > 0 else ""
    below = table(f"<tr>{top}</tr>{body}") if body else ""
    return f"<div><strong>{_safe(title)}</strong>{table(known)}{below}{rest}</div>"


def _safe(words: str) -> str:
    """Return text that can do no harm in a page, cut where it is longer than any honest one."""
    words = printable(words[: _MAX_LETTERS + 1])
    return escape(words if len(words) <= _MAX_LETTERS else f"{words[:_MAX_LETTERS]}…")


def plot_norms(profiles: Sequence[NormProfile]) -> Figure:
    """Return a figure: the median norm of each hook's rows by position, and its 10 to 90 % band."""
    figure, axes = _figure()
    for profile in profiles:
        low, middle, high = profile.quantiles
        # On a logarithmic axis position 0 stands at 1, position 1 at 2 ...
        place = 1 + (profile.low + profile.high - 1) / 2
        line = axes.plot(place, middle, marker=".", label=_plain(profile.hook))[0]
        axes.fill_between(place, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    source = ", ".join(sorted({f"{p.n_rows:,} {p.source}" for p in profiles}))
    axes.set(xscale="log", yscale="log", xlabel="position + 1", ylabel="norm of the row")
    axes.set_title(f"Norms by position: median, 10 to 90 % ({source})", fontsize="medium")
    axes.legend()
    return figure


def plot_coverage(of: Fates) -> Figure:
    """Return a figure: what became of the positions, as shares by band of positions and phase."""
    figure, axes = _figure()
    bars = [
        (f"{phase} {low:,}" + (f"–{high - 1:,}" if high - low > 1 else ""), of.count[k, :, band])
        for k, phase in enumerate(PHASES)
        for band, (low, high) in enumerate(zip(of.low, of.high, strict=True))
        if of.count[k, :, band].any()
    ]
    counts = np.array([count for _, count in bars]).reshape(len(bars), len(DISPOSITIONS))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    left = np.zeros(len(bars))
    for k, disposition in enumerate(DISPOSITIONS):
        axes.barh(
            range(len(bars)),
            shares[:, k],
            left=left,
            color=_COLOURS[disposition],
            label=f"{disposition} ({counts[:, k].sum():,})",
        )
        left += shares[:, k]
    axes.set_yticks(range(len(bars)), [words for words, _ in bars])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the positions")
    axes.set_title(f"What became of {of.total:,} positions", fontsize="medium")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    return figure


def _plain(words: str) -> str:
    """Return words for a label of matplotlib, which reads ``$`` as mathematics and hides ``_``."""
    return printable(words).replace("$", r"\$").removeprefix("_")


def _figure() -> tuple[Figure, Axes]:
    """Return an empty figure, which no window and no other plot knows."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise not_installed(error.name or "matplotlib", "plot", "plot") from None
    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.add_subplot()
