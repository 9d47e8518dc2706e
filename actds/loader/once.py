"""A dataset and its replays, read together: each position once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.multiplicity import Servings
from actds.dataset.reading import Catalog
from actds.explore.coverage import covered, rows_of_positions
from actds.explore.dataset import Dataset
from actds.format.positions import Index, Intervals, difference, position_key, split_key, union
from actds.loader.filters import bad
from actds.loader.mixture import Mixture
from actds.loader.selection import RowFilter, Selection

Known = dict[tuple[str, str], Intervals]


def read_once(mixture: Mixture, *, served: bool) -> Mixture:
    """Return a mixture that has each position of a dataset and its replays once.

    A row of a replay is read where it stands for a position of which neither the source nor a
    replay before it has a row: its own position, or that of a prefix-cache hit on it.

    Args:
        mixture: the rows of the datasets.
        served: let the row come once for each of these positions.

    Raises:
        ActdsError: E014 when none of the datasets is a replay of another one, or a part of the
            mixture has no further row.

    Spec: 0.1 sections 6.3 and 7.5.
    """
    sources = {one.catalog.genesis.dataset: one.catalog for one in mixture.datasets}
    known: Known = {}
    filters = {one.dataset.path: one.filter for part in mixture.parts for one in part}
    further = {
        run: _further(dataset.catalog, run, sources, known, filters[dataset.path], served=served)
        for dataset in mixture.datasets
        for run in dataset.catalog.run_ids
    }
    if all(one is None for one in further.values()):
        got = "no dataset that is a replay of another one of them"
        raise bad("once", got, "a dataset and its replays, as [source, missing]")
    parts = []
    for part in mixture.parts:
        read = [_restricted(one, further, served=served) for one in part]
        parts.append([one for one in read if one.n_kept])
        if not parts[-1]:
            got = f"no further row in {', '.join(one.dataset.path for one in part)}"
            raise bad("once", got, "replays of what the source lost")
    return replace(mixture, parts=parts, once=True)


def are_replays(datasets: Sequence[Dataset]) -> bool:
    """Return whether one of the datasets is a replay of another one."""
    ids = pa.array([one.catalog.genesis.dataset for one in datasets])
    return len(datasets) > 1 and any(
        pc.any(pc.is_in(one.catalog.table("origins")["source_dataset"], ids)).as_py()
        for one in datasets
    )


def _further(
    catalog: Catalog,
    run: str,
    sources: Mapping[str, Catalog],
    known: Known,
    chosen: RowFilter,
    *,
    served: bool,
) -> Servings | None:
    """Return for how many positions that are not known each row of a replay stands.

    None of a run that replays none of the sources. Adds the positions to those that are known, by
    dataset and run of the source.
    """
    origins = catalog.table("origins", run).sort_by("request")
    origins = origins.filter(pc.is_in(origins["source_dataset"], pa.array(list(sources))))
    if not origins.num_rows:
        return None
    names = list(
        zip(origins["source_dataset"].to_pylist(), origins["source_run"].to_pylist(), strict=True)
    )
    start, rows, length = rows_of_positions(catalog, run)
    request, position = split_key(start)
    line = Index(origins["request"].to_numpy()).of(request)
    there = line >= 0
    if served and chosen.split is not None:  # the positions of its requests, whoever has the rows
        there &= np.isin(request, chosen.requests_of(run))
    rows, length, line = rows[there], length[there], line[there]
    start = position_key(origins["source_request"].to_numpy()[line], position[there])
    found = []
    for name in dict.fromkeys(names):
        mine = np.array([one == name for one in names])[line]
        if name not in known:
            known[name] = covered(sources[name[0]], name[1])
        before, begin, end = known[name], start[mine], start[mine] + length[mine]
        which, first, after = difference(union(begin, end), before).cut(begin, end)
        row, at = split_key(rows[mine][which] + (first - begin[which]))
        found.append((row, at, at + (after - first).astype(np.int64)))
        known[name] = union(
            np.concatenate([before.start, begin]), np.concatenate([before.stop, end])
        )
    return Servings(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _restricted(
    selection: Selection, further: Mapping[str, Servings | None], *, served: bool
) -> Selection:
    """Return a selection with the rows of replays as often as they are needed."""
    counts = []
    for shard, count in zip(selection.shards, selection.counts, strict=True):
        times = further[shard.run]
        if times is not None:
            tokens = shard.tokens(["request", "position"])
            new = times.of(tokens["request"].to_numpy(), tokens["position"].to_numpy())
            new = new if served else np.minimum(new, 1)
            new = new if count is None else np.where(count > 0, new, 0)
            count = new.astype(np.min_scalar_type(int(new.max(initial=0))))
        counts.append(count)
    n_kept = sum(
        shard.n_rows if count is None else int(np.count_nonzero(count))
        for shard, count in zip(selection.shards, counts, strict=True)
    )
    return replace(selection, counts=counts, n_kept=n_kept)
