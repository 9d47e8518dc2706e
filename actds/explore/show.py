"""Datasets and loaders in a notebook: tables in HTML, and figures of matplotlib.

Names, paths and facts come from whoever made the dataset: each is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from actds.errors import not_installed
from actds.explore.overview import fates, norm_profile
from actds.format.tables import DISPOSITIONS, PHASES
from actds.store import layout
from actds.text import counted, format_nbytes, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from actds.explore.dataset import Dataset
    from actds.loader.loader import Loader

_MAX_ROWS, _MAX_LETTERS = 20, 200
_COLOURS = {
    "captured": "#0072b2",
    "cache_ref": "#009e73",
    "dropped": "#d55e00",
    "aborted": "#cc79a7",
    "filtered": "#999999",
    "undelivered": "#f0e442",
}


def dataset_html(dataset: Dataset) -> str:
    """Return a small table: what the dataset holds, who made it, and whether it is sealed."""
    seal = dataset.seal
    models = {
        str(field.value)
        for run in dataset.runs.values()
        if (field := run.fields.get("model.name")) is not None and field.value is not None
    }
    n_shards = len(dataset.shards)
    facts = {
        "path": dataset.path,
        "state": "not sealed" if seal is None else f"seal {seal.n}, {dataset.digest[:16]}",
        "model": ", ".join(sorted(models)) or "not recorded",
        "runs": f"{counted(len(dataset.runs), 'run')}, {counted(n_shards, 'shard')}",
        "phases": ", ".join(
            f"{sum(s.n_rows for s in dataset.shards if s.phase == phase):,} {phase}"
            for phase in dataset.phases
        )
        or "no row",
    }
    lines = []
    for name, hook in list(dataset.hooks.items())[:_MAX_ROWS]:
        array = dataset.array(name)
        nbytes = sum(
            entry.nbytes
            for shard in dataset.shards_of(name)
            for entry in shard.manifest.files
            if entry.path.startswith(f"{layout.array_dir(name)}/")
        )
        lines.append(
            (name, f"{len(array):,}", f"{hook.d_model:,}", hook.dtype, format_nbytes(nbytes))
        )
    more = len(dataset.hooks) - len(lines)
    return _page(
        "actds.Dataset", facts, ("hook", "rows", "channels", "type", "stored"), lines, more
    )


def loader_html(loader: Loader) -> str:
    """Return a small table: which rows, how many, in which batches, and where the pass is."""
    config, progress = loader.config, loader.progress
    n_stored = sum(dataset.n_rows for dataset in loader.datasets)
    hidden = {"format", "actds", "dataset", "digest", "datasets", "sealed", "runs", "hooks",
              "dtype", "excluded", "rows_per_epoch", "dropped_per_epoch", "order", "lanes",
              "window_rows", "batch", "drop_last", "epochs", "rank", "world", "seed"}  # fmt: skip
    chosen = ", ".join(
        f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in config.items()
        if key not in hidden and not key.endswith("sha256") and value not in (None, [], False, 0)
    )
    epochs = config["epochs"]
    facts = {
        "datasets": ", ".join(dataset.path for dataset in loader.datasets),
        "hooks": f"{', '.join(config['hooks'])} as {config['dtype']}",
        "rows": f"{loader.n_rows:,} of {n_stored:,}",
        "selection": chosen or "every row",
        "left out": ", ".join(f"{n:,} {name}" for name, n in loader.excluded.items()) or "none",
        "batches": f"{loader.batches_per_epoch:,} of {config['batch']:,} rows an epoch"
        + (f", which leaves out {loader.n_dropped:,} rows" if loader.n_dropped else ""),
        "epochs": "without end" if epochs is None else str(epochs),
        "now": f"epoch {progress.epoch}, batch {progress.step:,} of {loader.batches_per_epoch:,}",
        "rank": f"{config['rank']} of {config['world']}, seed {config['seed']}",
    }
    return _page("actds.Loader", facts, (), (), 0)


def _page(
    title: str,
    facts: Mapping[str, str],
    head: Iterable[str],
    lines: Iterable[Iterable[str]],
    more: int,
) -> str:
    def cell(tag: str, words: str) -> str:
        return f'<{tag} style="text-align:left">{_safe(words)}</{tag}>'

    def table(rows: str) -> str:
        return f"<table><tbody>{rows}</tbody></table>" if rows else ""

    known = "".join(f"<tr>{cell('th', k)}{cell('td', v)}</tr>" for k, v in facts.items())
    top = "".join(cell("th", word) for word in head)
    body = "".join(f"<tr>{''.join(cell('td', word) for word in line)}</tr>" for line in lines)
    rest = f"<p>and {more:,} more</p>" if more > 0 else ""
    below = table(f"<tr>{top}</tr>{body}") if body else ""
    return f"<div><strong>{_safe(title)}</strong>{table(known)}{below}{rest}</div>"


def _safe(words: str) -> str:
    """Return text that can do no harm in a page, cut where it is longer than any honest one."""
    words = printable(words[: _MAX_LETTERS + 1])
    return escape(words if len(words) <= _MAX_LETTERS else f"{words[:_MAX_LETTERS]}…")


def plot_norms(dataset: Dataset, hooks: str | Iterable[str] | None = None) -> Figure:
    """Return a figure: the median norm of each hook's rows by position, and its 10 to 90 % band.

    Raises:
        ActdsError: E011 matplotlib is not installed; E014 no such hook.
    """
    names = [hooks] if isinstance(hooks, str) else list(dataset.hooks if hooks is None else hooks)
    profiles = [norm_profile(dataset, name) for name in names]
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


def plot_coverage(dataset: Dataset) -> Figure:
    """Return a figure: what became of the positions, as shares by band of positions and phase.

    Raises:
        ActdsError: E011 matplotlib is not installed.
    """
    found = fates(dataset)
    figure, axes = _figure()
    bars = [
        (f"{phase} {low:,}" + (f"–{high - 1:,}" if high - low > 1 else ""), found.count[k, :, band])
        for k, phase in enumerate(PHASES)
        for band, (low, high) in enumerate(zip(found.low, found.high, strict=True))
        if found.count[k, :, band].any()
    ]
    counts = np.array([count for _, count in bars]).reshape(len(bars), len(DISPOSITIONS))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    left = np.zeros(len(bars))
    for k, disposition in enumerate(DISPOSITIONS):
        axes.barh(
            range(len(bars)), shares[:, k], left=left, color=_COLOURS[disposition],
            label=f"{disposition} ({counts[:, k].sum():,})",
        )  # fmt: skip
        left += shares[:, k]
    axes.set_yticks(range(len(bars)), [words for words, _ in bars])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the positions")
    axes.set_title(f"What became of {found.total:,} positions", fontsize="medium")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    return figure


def _plain(words: str) -> str:
    """Return words for a label of matplotlib, which reads ``$`` as mathematics and hides ``_``."""
    return printable(words).replace("$", r"\$").removeprefix("_")


def _figure() -> tuple[Figure, Axes]:
    """Return an empty figure, which no window and no other plot knows.

    Raises:
        ActdsError: E011 matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise not_installed(error.name or "matplotlib", "plot", "plot") from None
    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.add_subplot()
