"""Named filters: rows that ``exclude=`` leaves out, by token or by norm; others may add theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds.explore.lazy import open_array
from actds.format import tables
from actds.format.arrays import DTYPES
from actds.format.positions import position_key
from actds.format.schema import Hook
from actds.format.shard import Shard

Mask = npt.NDArray[np.bool_]
Columns = Mapping[str, npt.NDArray[Any]]

SINK_NORM = 10.0
"""A row whose norm is above this many medians is a sink: attention sinks are hundreds of times
longer than other rows. One of them, served by a prefix cache to every request, makes up nearly all
of a variance."""
_TOKEN_COLUMNS = frozenset(tables.SCHEMAS["tokens"].names)
_NORM_COLUMNS = frozenset(("norm", "median_norm"))
FINITE = "finite"
NOT_FINITE = "not_finite"
"""The name that leaves out rows with a value that is NaN or infinite."""


def bad(name: str, got: str, expected: str) -> ActdsError:
    return ActdsError("E014", name, got=got, expected=expected)


@dataclass(frozen=True)
class Filter:
    """Rows that ``exclude=`` leaves out by a name.

    Args:
        name: the name.
        help: which rows these are.
        columns: what ``rows`` asks for: columns of the token table, each ``(n_rows,)``; ``norm``,
            the norms ``(n_rows, n_hooks)`` that the readouts have of the hooks that are read;
            ``median_norm``, their medians over all stored rows, ``(n_hooks,)``; and ``finite``,
            whether all values of a row are, bool ``(n_rows, n_hooks)``.
        rows: given these columns of a shard, which rows to leave out, bool ``(n_rows,)``.
    """

    name: str
    help: str
    columns: tuple[str, ...]
    rows: Callable[[Columns], Mask]


FILTERS: dict[str, Filter] = {}
"""What can be left out, by name. The order is that of ``config`` and of a state."""


def register_filter(new: Filter) -> Filter:
    """Make a filter known to ``exclude=``, in this process; return it.

    Workers that are started afresh (``spawn``) must register it, too.

    Raises:
        ActdsError: E014 when the name is taken, or a column is not known.
    """
    if new.name in FILTERS:
        raise bad("filter", f"a second {new.name!r}", f"a name beside {', '.join(FILTERS)}")
    known = _TOKEN_COLUMNS | _NORM_COLUMNS | {FINITE}
    if not known.issuperset(new.columns):
        raise bad(f"filter {new.name}", ", ".join(new.columns), f"some of {', '.join(known)}")
    FILTERS[new.name] = new
    return new


def _register_flag(name: str, help_: str, flag: int) -> None:
    def rows(columns: Columns) -> Mask:
        return np.asarray((columns["flags"] & flag) != 0)

    register_filter(Filter(name, help_, ("flags",), rows))


_register_flag("special", "special tokens of the tokenizer", tables.FLAG_SPECIAL)
_register_flag("bos", "beginning-of-sequence tokens", tables.FLAG_BOS)
_register_flag("eos", "end-of-sequence tokens", tables.FLAG_EOS)
register_filter(
    Filter(
        "first_position",
        "the first position of each request",
        ("position",),
        lambda columns: np.asarray(columns["position"] == 0),
    )
)
register_filter(
    Filter(
        "sink",
        f"a norm above {SINK_NORM:g} medians of its hook, or not finite, in one of the hooks",
        ("norm", "median_norm"),
        # One that is no number is a sink, too.
        lambda columns: ~np.all(columns["norm"] <= SINK_NORM * columns["median_norm"], axis=1),
    )
)
register_filter(
    Filter(
        NOT_FINITE,
        "a value that is NaN or infinite, in one of the hooks",
        (FINITE,),
        lambda columns: ~np.all(columns[FINITE], axis=1),
    )
)


BUILT_IN = frozenset(FILTERS)
"""The names of this package: what others register under a name may change."""


def is_by_norm(name: str) -> bool:
    return not _NORM_COLUMNS.isdisjoint(FILTERS[name].columns)


def finite_rows(shard: Shard, hook: Hook) -> Mask | None:
    """Return which rows have finite values alone, ``(n_rows,)``; None for all of them.

    Only where the manifest counts other ones the rows are read.

    Raises:
        ActdsError: as ``open_array``, and E204.
    """
    if not shard.manifest.values[hook.name].not_finite:
        return None
    exponent = DTYPES[hook.dtype].exponent
    finite = np.empty(shard.n_rows, np.bool_)
    with open_array(shard, hook) as reader:
        for start in range(0, shard.n_rows, reader.rows_per_chunk):
            bits = reader.read(start, min(start + reader.rows_per_chunk, shard.n_rows))
            finite[start : start + len(bits)] = ((bits & exponent) != exponent).all(axis=1)
    return finite


def check_finite(
    hook: Hook, shards: Sequence[Shard], counts: Sequence[npt.NDArray[Any] | None], next_step: str
) -> None:
    """Refuse rows with a value that is NaN or infinite: one makes a mean, or a model, NaN."""
    n_rows = n_broken = 0
    for shard, count in zip(shards, counts, strict=True):
        n_rows += shard.n_rows if count is None else int(np.count_nonzero(count))
        finite = finite_rows(shard, hook) if count is None or count.any() else None
        if finite is not None:
            n_broken += int(np.count_nonzero(~finite if count is None else ~finite & (count > 0)))
    if n_broken:
        raise ActdsError(
            "E014",
            f"hook {hook.name}",
            got=f"{n_broken:,} of {n_rows:,} rows with a value that is NaN or infinite",
            expected="finite values",
            next_step=next_step,
        )


def median(norms: npt.NDArray[np.float32]) -> float:
    """Return the median of the norms that are numbers: one that is none must not hide them all."""
    finite = norms[np.isfinite(norms)]
    return float(np.median(finite)) if len(finite) else np.nan


def token_columns(shard: Shard, filters: Sequence[Filter]) -> dict[str, npt.NDArray[Any]]:
    wanted = {column for chosen in filters for column in chosen.columns if column in _TOKEN_COLUMNS}
    names = [name for name in tables.SCHEMAS["tokens"].names if name in wanted]
    need_known(shard, names, "exclude")
    table = shard.tokens(names) if names else None
    return {name: table[name].to_numpy() for name in names} if table is not None else {}


def applied(row_filter: Filter, columns: Columns, shard: Shard) -> Mask:
    """Return the rows that a filter leaves out; one of others may return anything."""
    mask = np.asarray(row_filter.rows({name: columns[name] for name in row_filter.columns}))
    if mask.dtype != np.bool_ or mask.shape != (shard.n_rows,):
        raise bad(
            f"filter {row_filter.name}", f"{mask.dtype} {mask.shape}", f"bool ({shard.n_rows},)"
        )
    return mask


def need_known(shard: Shard, columns: Iterable[str], argument: str) -> None:
    """Refuse an argument that asks for columns of which the run of a shard says nothing."""
    silent = sorted(shard.unknown.intersection(columns))
    if silent:
        raise bad(argument, f"{', '.join(silent)} unknown in run {shard.run}", "known columns")


def norms_of_hook(dataset: Dataset, hook: str) -> dict[str, npt.NDArray[np.float32]]:
    """Return the norms of a hook's stored rows by shard, ``(n_rows,)`` each.

    Raises:
        ActdsError: E014 a run that has no norm readouts; E416 a row without its readout.
    """
    norms: dict[str, npt.NDArray[np.float32]] = {}
    shards = dataset.shards_of(hook)
    for run in sorted({shard.run for shard in shards}):
        lines = _lines(dataset, run, hook)
        for shard in shards:
            if shard.run == run:
                norms[shard.name] = _norms_of(shard, lines)
    return norms


def _lines(dataset: Dataset, run: str, hook: str) -> pa.Table:
    table = dataset.catalog.table("readouts", run)
    table = table.filter(pc.equal(table["hook"], hook))
    if not table.num_rows:
        raise bad(
            "exclude",
            f"a filter by norm, and run {run} has no norm readouts",
            "names that need none: first_position, bos, special",
        )
    key = position_key(table["request"].to_numpy(), table["position"].to_numpy())
    order = np.argsort(key, kind="stable")
    return pa.table({"key": key[order], "norm": table["norm"].to_numpy()[order]})


def _norms_of(shard: Shard, lines: pa.Table) -> npt.NDArray[np.float32]:
    tokens = shard.tokens(["request", "position"])
    wanted = position_key(tokens["request"].to_numpy(), tokens["position"].to_numpy())
    keys = lines["key"].to_numpy()
    # A position that was computed more than once has a line for each: any of them will do.
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    missing = keys[at] != wanted
    if missing.any():
        raise ActdsError(
            "E416",
            f"shards/{shard.name}",
            got=f"no readout of row {int(np.argmax(missing))}",
            expected="one of each stored row",
        )
    return np.asarray(lines["norm"].to_numpy()[at], np.float32)
