"""Rows that are left out by name: special tokens, first positions, and rows of huge norm.

Attention sinks are hundreds of times longer than other rows. One of them, served by a prefix cache
to every request, makes up nearly all of a variance.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.errors import ActdsError
from actds.format import tables
from actds.format.shard import Shard
from actds.load.dataset import Dataset
from actds.schema import Hook

__all__ = ["NAMES", "SINK_NORM", "Exclusion", "read_exclusion", "warn_where_none"]

_FLAGS = {"special": tables.FLAG_SPECIAL, "bos": tables.FLAG_BOS, "eos": tables.FLAG_EOS}
NAMES = (*_FLAGS, "first_position", "sink")
"""What can be left out."""
SINK_NORM = 10.0
"""A row whose norm is above this many medians is a sink."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Exclusion:
    """Which rows are left out, by name.

    Args:
        names: names of ``NAMES``, in that order.
        sinks: per shard which rows are sinks, ``(n_rows,)``; empty where they are not asked for.

    Spec: 0.1 section 10.3.
    """

    names: tuple[str, ...]
    sinks: dict[str, Mask]

    def left_out(self, shard: Shard) -> dict[str, Mask]:
        """Return per name which rows of a shard it leaves out, each of shape ``(n_rows,)``."""
        columns = [c for c in ("position", "flags") if self._needs(c)]
        table = shard.tokens(columns) if columns else None
        found: dict[str, Mask] = {}
        for name in self.names:
            if name == "sink":
                found[name] = self.sinks[shard.name]
            elif name == "first_position":
                assert table is not None
                found[name] = table["position"].to_numpy() == 0
            else:
                assert table is not None
                found[name] = (table["flags"].to_numpy() & _FLAGS[name]) != 0
        return found

    def kept(self, shard: Shard) -> Mask | None:
        """Return which rows of a shard stay, ``(n_rows,)``; None for all."""
        out = list(self.left_out(shard).values())
        return ~np.logical_or.reduce(out) if out and np.any(out) else None

    def counts(self, shards: Sequence[Shard]) -> dict[str, int]:
        """Return how many rows of shards each name leaves out."""
        found = dict.fromkeys(self.names, 0)
        for shard in shards if self.names else ():
            for name, mask in self.left_out(shard).items():
                found[name] += int(mask.sum())
        return found

    def _needs(self, column: str) -> bool:
        return not (set(_FLAGS) if column == "flags" else {"first_position"}).isdisjoint(self.names)


def read_exclusion(
    dataset: Dataset, hooks: Sequence[Hook], exclude: str | Sequence[str]
) -> Exclusion:
    """Return what names leave out of a dataset.

    Args:
        dataset: the dataset.
        hooks: the hooks that are read; a row that is a sink of one of them is left out of all.
        exclude: names of ``NAMES``. A sink is a row whose norm readout is above ``SINK_NORM``
            times the median over the stored rows of its hook, or is not finite.

    Raises:
        ActdsError: E014 no such name, or sinks of a run that has no norm readouts; E416 a row
            without its readout.

    Spec: 0.1 sections 6.3, 7.8 and 10.3.
    """
    names = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    for name in names:
        if name not in NAMES:
            raise ActdsError(
                "E014", "exclude", got=repr(name)[:80], expected=f"some of {', '.join(NAMES)}"
            )
    sinks: dict[str, Mask] = {}
    if "sink" in names:
        for hook in hooks:
            norms = _norms(dataset, hook.name)
            middle = np.median(np.concatenate(list(norms.values())))
            for shard, norm in norms.items():
                found = ~(norm <= SINK_NORM * middle)  # one that is no number is a sink, too
                sinks[shard] = found | sinks[shard] if shard in sinks else found
    return Exclusion(tuple(name for name in NAMES if name in names), sinks)


def warn_where_none(excluded: dict[str, int], stacklevel: int) -> None:
    """Warn of names that leave out no row: a sink whose token has no flag would stay unseen."""
    for name, n in excluded.items():
        if not n:
            warnings.warn(
                f"exclude={name!r} leaves out no row of this selection: nothing in it is one. "
                "Sinks without a token of their own are found by first_position and sink.",
                UserWarning,
                stacklevel=stacklevel + 1,
            )


def _norms(dataset: Dataset, hook: str) -> dict[str, npt.NDArray[np.float32]]:
    """Return the norms of a hook's stored rows by shard, ``(n_rows,)`` each."""
    found: dict[str, npt.NDArray[np.float32]] = {}
    shards = dataset.shards_of(hook)
    for run in sorted({shard.run for shard in shards}):
        lines = _lines(dataset, run, hook)
        for shard in shards:
            if shard.run == run:
                found[shard.name] = _norms_of(shard, lines)
    return found


def _lines(dataset: Dataset, run: str, hook: str) -> pa.Table:
    """Return key and norm of a run's readouts of a hook, sorted by key."""
    table = dataset.catalog.table("readouts", run)
    table = table.filter(pc.equal(table["hook"], hook))
    if not table.num_rows:
        raise ActdsError(
            "E014",
            "exclude",
            got=f"'sink', and run {run} has no norm readouts",
            expected="names that need none: first_position, bos, special",
        )
    key = _keys(table["request"].to_numpy(), table["position"].to_numpy())
    order = np.argsort(key, kind="stable")
    return pa.table({"key": key[order], "norm": table["norm"].to_numpy()[order]})


def _norms_of(shard: Shard, lines: pa.Table) -> npt.NDArray[np.float32]:
    tokens = shard.tokens(["request", "position"])
    wanted = _keys(tokens["request"].to_numpy(), tokens["position"].to_numpy())
    keys = lines["key"].to_numpy()
    # A position that was computed more than once has a line for each: any of them tells a sink.
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


def _keys(
    request: npt.NDArray[np.integer], position: npt.NDArray[np.integer]
) -> npt.NDArray[np.uint64]:
    return (request.astype(np.uint64) << np.uint64(32)) | position.astype(np.uint64)
