"""What a loader reads, as parts: of one dataset or several, each with its share of every batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from actds.executor import ExecutorName, open_executor
from actds.explore.dataset import Dataset, OpenOptions
from actds.explore.dataset import open as open_dataset
from actds.explore.lazy import rows_together
from actds.explore.requests import Partners, find_partners, prefix_hashes
from actds.explore.stats import Stats, cache_folder, stats_of_rows
from actds.format import canonical, tables
from actds.format.arrays import DTYPES, chunk_rows
from actds.format.roles import Roles
from actds.format.schema import Hook
from actds.format.shard import Shard
from actds.loader.filters import BUILT_IN, NOT_FINITE, bad, check_finite, finite_rows
from actds.loader.order import BatchSpec, Geometry, Part, order_key
from actds.loader.selection import (
    LEAVE_OUT,
    PROVENANCE_COLUMNS,
    Counts,
    Floats,
    Selection,
    key_of,
    provenance_columns,
    refuse_changed,
    sample_of,
)
from actds.loader.where import ROLE

Source = str | os.PathLike[str] | Dataset
Side = Literal["train", "held_out"]
Select = Callable[[Dataset, str | None, str | None], Selection]
"""Returns the rows of a dataset in a phase for which an expression is true; None takes all."""

_MIN_WINDOW_ROWS = 1 << 16
_WINDOW_NBYTES = 1 << 27  # of the widest hook, unless that is fewer rows than the least
_SHARES = 10_000  # what the shares of a mixture add up to, as integers
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Mixture:
    """The parts of what a loader reads; one where nothing is mixed.

    Args:
        names: what each part is called: its key in the argument; empty for an only part.
        shares: the share of each part as integers; their sum is that of all.
        partners: per hook of these where the partners of the rows of all shards are.
    """

    parts: Sequence[Sequence[Selection]]
    names: Sequence[str]
    shares: Sequence[int]
    others: Mapping[str, Dataset] = field(default_factory=dict)
    partners: Sequence[Partners] = ()
    once: bool = False

    @property
    def selections(self) -> list[Selection]:
        return [selection for part in self.parts for selection in part]

    @property
    def datasets(self) -> list[Dataset]:
        return list(
            {id(selection.dataset): selection.dataset for selection in self.selections}.values()
        )

    @property
    def hooks(self) -> Sequence[Hook]:
        return self.selections[0].hooks

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(sorted({run for selection in self.selections for run in selection.runs}))

    @property
    def excluded(self) -> dict[str, int]:
        """Return how many stored rows each name of ``exclude`` leaves out of the parts."""
        excluded = dict.fromkeys(self.selections[0].excluded, 0)
        for selection in self.selections:
            for name, n in selection.excluded.items():
                excluded[name] += n
        return excluded

    @property
    def n_kept(self) -> int:
        return sum(selection.n_kept for selection in self.selections)

    @property
    def n_stored(self) -> int:
        return sum(selection.n_stored for selection in self.selections)

    @property
    def digest(self) -> str:
        """Return the digest of the dataset, or one of those of all datasets in their order."""
        digests = [dataset.digest for dataset in self.datasets]
        return digests[0] if len(digests) == 1 else canonical.digest(canonical.dump(digests))

    @property
    def identity(self) -> dict[str, Any]:
        """Return what chooses and weights the rows, as JSON: a state of another is refused."""
        first = self.selections[0]
        files = [
            selection.row_weights.sha256
            for selection in self.selections
            if selection.row_weights is not None
        ]
        names = [shard.name for selection in self.selections for shard in selection.shards]
        return {
            "shards": canonical.digest(canonical.dump(names)),
            "where": [selection.filter.identity["where"] for selection in self.selections],
            "exclude": first.filter.identity["exclude"] or None,
            "split": first.filter.identity["split"],
            "mix": dict(zip(self.names, self.shares, strict=False)) or None,
            "paired": {label: other.digest for label, other in self.others.items()} or None,
            "once": self.once or None,
            "frequency": None if first.frequency is None else first.frequency.text,
            "weights_sha256": files[0] if files else None,
            "weights": None if first.loss_weight is None else first.loss_weight.text,
        }


def open_sources(
    source: Source | Sequence[Source] | Mapping[Source, float], how: OpenOptions
) -> tuple[list[Dataset], Mapping[str, float] | None]:
    """Return the datasets of an argument, and their shares by path where it says them."""
    several = not isinstance(source, str | os.PathLike | Dataset)
    if how.get("seal") is not None and (several or isinstance(source, Dataset)):
        raise bad("seal", "a pin, and not one path", "datasets from actds.open(path, seal=...)")
    given = list(source) if several else [source]  # type: ignore[arg-type]
    if not given:
        raise bad("source", "no dataset", "a path, a dataset, several, or datasets with shares")
    datasets = [
        item if isinstance(item, Dataset) else open_dataset(os.fspath(item), **how)  # type: ignore[arg-type]
        for item in given
    ]
    digests = [dataset.digest for dataset in datasets]
    for i, digest in enumerate(digests):
        if digest in digests[:i]:
            raise bad("source", f"{datasets[i].path} twice", "different datasets")
    if not isinstance(source, Mapping):
        return datasets, None
    return datasets, {d.path: share for d, share in zip(datasets, source.values(), strict=True)}


def open_partners(paired: Mapping[str, Source] | None, how: OpenOptions) -> dict[str, Dataset]:
    opened: dict[str, Dataset] = {}
    for label, source in (paired or {}).items():
        partner, _ = open_sources(source, how)
        if len(partner) > 1:
            raise bad("paired", f"several datasets for {label!r}", "one dataset for each name")
        opened[label] = partner[0]
    return opened


def make_mixture(
    datasets: Sequence[Dataset],
    dataset_shares: Mapping[str, float] | None,
    mix: Mapping[str, float] | None,
    phase: str | None,
    where: str | None,
    select: Select,
) -> Mixture:
    """Return the parts of what a loader reads.

    Args:
        dataset_shares: the share of each by its path; None joins them to one part.

    Raises:
        ActdsError: E014 shares of datasets and of rows at once, or that do not add up; hooks that
            differ between datasets; and as ``select``.
    """
    if mix is not None and dataset_shares is not None:
        raise bad("mix", "shares of rows and of datasets", "one of them")
    if dataset_shares is not None:
        shares = _integers("source", dataset_shares)
        parts = [[select(dataset, phase, where)] for dataset in datasets]
        mixture = Mixture(parts, list(dataset_shares), shares)
    elif mix is not None:
        shares = _integers("mix", mix)
        parts = [
            [select(dataset, *_part(name, phase, where)) for dataset in datasets] for name in mix
        ]
        mixture = Mixture(parts, list(mix), shares)
    else:
        mixture = Mixture([[select(dataset, phase, where) for dataset in datasets]], [], [1])
    _check_hooks(mixture)
    return mixture


def with_partners(mixture: Mixture, others: Mapping[str, Dataset]) -> Mixture:
    """Return a mixture of the rows that have a partner in every other dataset."""
    if len(mixture.datasets) > 1:
        raise bad("paired", "partners for several datasets", "one dataset as source")
    for label in others:
        if not label or "/" in label:
            raise bad("paired", repr(label)[:80], "a name without a slash")
    for selection in mixture.selections:
        where = selection.filter.where
        for other in others.values():
            refuse_changed(other, None if where is None else where.text)
    shards = [shard for selection in mixture.selections for shard in selection.shards]
    hashes = prefix_hashes(mixture.datasets[0], shards)
    counts = [count for selection in mixture.selections for count in selection.counts]
    partners = [
        _with_finite_rows(
            find_partners(hashes, shards, label, other, hook.name),
            None if NOT_FINITE in mixture.excluded else counts,
        )
        for label, other in others.items()
        for hook in mixture.hooks
    ]
    at, parts = 0, []
    for part in mixture.parts:
        selections = []
        for selection in part:
            n = len(selection.shards)
            present = [
                np.logical_and.reduce([pair.rows[i] >= 0 for pair in partners])
                for i in range(at, at + n)
            ]
            selections.append(_restricted(selection, present))
            at += n
        parts.append(selections)
    if not all(selection.n_kept for part in parts for selection in part):
        raise bad("paired", f"no row with a partner in {', '.join(others)}", "harvests of one text")
    return replace(mixture, parts=parts, others=dict(others), partners=partners)


def _with_finite_rows(pair: Partners, counts: Sequence[Counts | None] | None) -> Partners:
    if counts is not None:
        check_finite(pair.hook, pair.shards, _partner_counts(pair, counts), LEAVE_OUT)
        return pair
    masks = [finite_rows(shard, pair.hook) for shard in pair.shards]
    if all(mask is None for mask in masks):
        return pair
    finite = np.concatenate(
        [
            np.ones(shard.n_rows, np.bool_) if mask is None else mask
            for shard, mask in zip(pair.shards, masks, strict=True)
        ]
    )
    return replace(pair, rows=[np.where(finite[rows], rows, -1) for rows in pair.rows])


def _restricted(selection: Selection, present: Sequence[npt.NDArray[np.bool_]]) -> Selection:
    """Return a selection without the rows that are not there, ``(n_rows,)`` per shard."""
    counts = [
        mask.astype(np.uint8) if count is None else count * mask
        for count, mask in zip(selection.counts, present, strict=True)
    ]
    n_kept = sum(int(np.count_nonzero(count)) for count in counts)
    return replace(selection, counts=counts, n_kept=n_kept)


def statistics(
    mixture: Mixture, served: bool, executor: ExecutorName = "threads"
) -> dict[str, Stats]:
    """Return statistics of what a mixture gives, by hook: each row as often as it comes.

    That is as often as it was served, in proportion to ``frequency``, and as the shares of the
    parts have it: in the mean of many epochs, whatever the seed. Of loss weights those of
    inclusion count, since a row with them stands for rows that were not drawn.

    Raises:
        ActdsError: E104, E108, E201 to E204 when a shard is missing or damaged; E014 values that
            are not finite.
    """
    shards = [shard for selection in mixture.selections for shard in selection.shards]
    times = _times(mixture)
    keys = [selection.result_key for selection in (*mixture.datasets, *mixture.others.values())]
    key = key_of([keys, mixture.identity, served])
    # A filter of others may choose other rows tomorrow, under the same name.
    cache = cache_folder() if BUILT_IN.issuperset(mixture.excluded) else None
    work = [(hook.name, hook, shards, times) for hook in mixture.hooks]
    work += [
        (pair.name, pair.hook, list(pair.shards), _partner_counts(pair, times))
        for pair in mixture.partners
    ]
    with open_executor(executor) as on:
        return {
            name: stats_of_rows(hook, shards, times, key=f"{key} {name}", cache=cache, executor=on)
            for name, hook, shards, times in work
        }


def _times(mixture: Mixture) -> list[Counts | Floats | None]:
    """Return how often each row of each shard comes: counts, or shares of all entries as floats."""
    weights = _inclusion_weights(mixture)
    first = mixture.selections[0]
    if len(mixture.parts) == 1 and first.frequency is None and weights is None:
        return [count for selection in mixture.selections for count in selection.counts]
    times: list[Floats] = []
    for part, share in zip(mixture.parts, mixture.shares, strict=True):
        shares = [
            row for selection in part for row in selection.frequencies() or _as_floats(selection)
        ]
        scale = share / sum(mixture.shares) / sum(float(row.sum()) for row in shares)
        times += [row * scale for row in shares]
    if weights is not None:
        times = [row * weight for row, weight in zip(times, weights, strict=True)]
    return [*times]


def _inclusion_weights(mixture: Mixture) -> list[Floats] | None:
    """Return 1 over the inclusion of each row of each shard; None where all weigh alike."""
    selections = mixture.selections
    sample = sample_of(selections) if selections[0].weighs_by_inclusion else None
    if sample is None or not sample.is_unequal:
        return None
    return [1 / row for selection in selections for row in selection.inclusion()]


def _as_floats(selection: Selection) -> list[Floats]:
    return [
        np.ones(shard.n_rows) if count is None else count.astype(np.float64)
        for shard, count in zip(selection.shards, selection.counts, strict=True)
    ]


def _partner_counts(
    pair: Partners, times: Sequence[Counts | Floats | None]
) -> list[Counts | Floats | None]:
    kind = np.result_type(np.uint32, *(array.dtype for array in times if array is not None))
    total = np.zeros(int(pair.starts[-1]), kind)
    for rows, time in zip(pair.rows, times, strict=True):
        present = rows >= 0 if time is None else (rows >= 0) & (time > 0)
        np.add.at(total, rows[present], 1 if time is None else time[present].astype(kind))
    return [total[first:last] for first, last in pairwise(pair.starts.tolist())]


def batch_hooks(mixture: Mixture) -> dict[str, Hook]:
    hooks = {hook.name: hook for hook in mixture.hooks}
    return hooks | {pair.name: pair.hook for pair in mixture.partners}


def _part(name: str, phase: str | None, where: str | None) -> tuple[str | None, str | None]:
    if name not in tables.PHASES:
        return phase, name if where is None else f"({where}) and ({name})"
    if phase not in (None, name):
        raise bad("mix", f"{name!r} with phase={phase!r}", "parts of that phase")
    return name, where


def _integers(argument: str, shares: Mapping[str, float]) -> list[int]:
    if not isinstance(shares, Mapping) or not shares:
        raise bad(argument, repr(shares)[:80], "shares by name, as {'prefill': 0.5, 'decode': 0.5}")
    for name, share in shares.items():
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not number or not 1 / _SHARES <= share <= 1:
            raise bad(argument, f"{share!r} for {name!r}", f"a share from {1 / _SHARES} to 1")
    if abs(sum(shares.values()) - 1) > _TOLERANCE:
        raise bad(argument, f"shares that add up to {sum(shares.values()):g}", "1")
    exact = [share * _SHARES for share in shares.values()]
    whole = [int(share + _TOLERANCE) for share in exact]
    # What is lost by rounding goes to the shares that lost most.
    for i in sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])[: _SHARES - sum(whole)]:
        whole[i] += 1
    common = gcd(*whole)
    return [share // common for share in whole]


def _check_hooks(mixture: Mixture) -> None:
    first = mixture.selections[0]
    for other in mixture.selections[1:]:
        for a, b in zip(first.hooks, other.hooks, strict=True):
            if (a.name, a.d_model, a.dtype) != (b.name, b.d_model, b.dtype):
                raise bad(
                    "source",
                    f"{b.name} of {b.d_model} {b.dtype} in {other.dataset.path}",
                    f"{a.name} of {a.d_model} {a.dtype}, as in {first.dataset.path}",
                )


def default_window_rows(datasets: Sequence[Dataset]) -> int:
    """Return the rows of a window: as many of the widest hook as fit, the same for all hooks."""
    hooks = [hook for dataset in datasets for hook in dataset.hooks.values()]
    row_nbytes = max(hook.d_model * DTYPES[hook.dtype].itemsize for hook in hooks)
    return max(_MIN_WINDOW_ROWS, 1 << (_WINDOW_NBYTES // row_nbytes).bit_length() - 1)


def rows_of_pieces(datasets: Sequence[Dataset], most: int) -> int:
    hooks = [hook for dataset in datasets for hook in dataset.hooks.values()]
    return rows_together((chunk_rows(h.d_model, DTYPES[h.dtype].itemsize) for h in hooks), most)


def batch_spec(
    rows: Mixture,
    geometry: Geometry,
    seed: int,
    lanes: range,
    provenance: tuple[str, ...],
    pinned: bool,
) -> BatchSpec:
    shards: list[Shard] = []
    weights: list[Any] = []
    parts = []
    for number, (selections, share) in enumerate(zip(rows.parts, rows.shares, strict=True)):
        first = len(shards)
        counts: list[Any] = []
        frequencies: list[Any] = []
        for selection in selections:
            shards += selection.shards
            counts += selection.counts
            frequencies += selection.frequencies() or []
            weights += selection.weights() or []
        n_entries = sum(
            shard.n_rows if count is None else int(count.sum(dtype=np.int64))
            for shard, count in zip(shards[first:], counts, strict=True)
        )
        digests = [selection.dataset.digest for selection in selections]
        digest = digests[0] if len(digests) == 1 else canonical.digest(canonical.dump(digests))
        key = order_key(digest, seed, number)
        span = range(first, len(shards))
        parts.append(Part(span, counts, frequencies or None, n_entries, share, key))
    return BatchSpec(
        rows.hooks,
        shards,
        rows.runs,
        parts,
        geometry,
        lanes,
        provenance,
        weights or None,
        pinned,
        rows.partners,
        _roles(rows) if ROLE in provenance else {},
    )


def row_columns(wanted: bool | Sequence[str], shards: Sequence[Shard]) -> tuple[str, ...]:
    if isinstance(wanted, bool):
        wanted = PROVENANCE_COLUMNS if wanted else ()
    names = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    return provenance_columns("provenance", names, PROVENANCE_COLUMNS, shards)


def _roles(rows: Mixture) -> dict[str, Roles]:
    catalogs = {
        shard.run: selection.dataset.catalog
        for selection in rows.selections
        for shard in selection.shards
    }
    tables = {run: catalog.table("roles", run) for run, catalog in catalogs.items()}
    if not any(table.num_rows for table in tables.values()):
        raise bad("provenance", "'role', and no run has roles", "a harvest of chats")
    return {run: Roles(table) for run, table in tables.items()}
