"""What the arguments of a loader choose: hooks, shards, how often each row comes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actds.errors import ActdsError
from actds.format.shard import Shard
from actds.format.tables import PHASES
from actds.load.dataset import Dataset
from actds.load.exclusion import Exclusion, warn_where_none
from actds.load.weights import served_counts
from actds.schema import Hook

__all__ = [
    "MULTIPLICITY",
    "bad",
    "check_int",
    "check_lanes",
    "check_worker",
    "row_counts",
    "select_hooks",
    "select_shards",
    "split_weights",
]

MULTIPLICITY = "multiplicity"
_WEIGHTS = "'multiplicity', the path of a weights file, or one of each"


def select_hooks(dataset: Dataset, hooks: str | Sequence[str] | None) -> list[Hook]:
    """Return the named hooks of a dataset, in the order named; all when None.

    Raises:
        ActdsError: E014 when there is none of that name, or none is named, or one twice.
    """
    names = list(dataset.hooks) if hooks is None else [hooks] if isinstance(hooks, str) else hooks
    known = ", ".join(dataset.hooks)
    if not names or len(set(names)) != len(names):
        raise bad("hooks", repr(list(names)), f"different ones of {known}")
    for name in names:
        if name not in dataset.hooks:
            raise bad("hooks", repr(name), f"one of {known}")
    return [dataset.hooks[name] for name in names]


def select_shards(dataset: Dataset, hooks: Sequence[Hook], phase: str | None) -> list[Shard]:
    """Return the shards that hold the hooks' rows of a phase, of both when None.

    Raises:
        ActdsError: E014 when there is no such phase, no row of it, or the hooks have shards of
            their own.
    """
    if phase is not None and phase not in PHASES:
        raise bad("phase", repr(phase), f"None or one of {', '.join(PHASES)}")
    wanted = {hook.name for hook in hooks}
    shards = [
        shard
        for shard in dataset.shards
        if phase in (None, shard.phase) and not wanted.isdisjoint(shard.hooks)
    ]
    if not shards:
        raise bad("phase", f"no {phase or ''} row".replace("  ", " "), "at least one row")
    for shard in shards:
        # Stages of a pipeline-parallel engine write their own layers in shards of their own.
        for name in sorted(wanted.difference(shard.hooks)):
            raise bad("hooks", f"no {name} in shard {shard.name}", "hooks of the same shards")
    return shards


def row_counts(
    dataset: Dataset, shards: Sequence[Shard], weights: str | None, exclusion: Exclusion
) -> tuple[list[np.ndarray[Any, np.dtype[np.uint32]] | None], dict[str, int]]:
    """Return how often each row of the shards comes, and how many rows each name leaves out.

    Args:
        dataset: the dataset.
        shards: the shards that are read.
        weights: ``multiplicity`` for the served distribution, else None.
        exclusion: the rows that are left out.

    Raises:
        ActdsError: E014 when no row is left.
    """
    served = None if weights is None else dataset.multiplicity()
    counts: list[np.ndarray[Any, np.dtype[np.uint32]] | None] = []
    excluded = dict.fromkeys(exclusion.names, 0)
    n_kept = 0
    for shard in shards:
        count = None
        if served is not None:
            tokens = shard.tokens(["request", "position"])
            request, position = (tokens[name].to_numpy() for name in ("request", "position"))
            count = served_counts(shard.run, request, position, served)
        out = exclusion.left_out(shard)
        for name, mask in out.items():
            excluded[name] += int(mask.sum())
        if any(mask.any() for mask in out.values()):
            count = np.ones(shard.n_rows, np.uint32) if count is None else count
            count[np.logical_or.reduce(list(out.values()))] = 0
        counts.append(count)
        n_kept += shard.n_rows if count is None else int(np.count_nonzero(count))
    if not n_kept:
        raise bad("exclude", ", ".join(exclusion.names), "names that leave a row")
    warn_where_none(excluded, stacklevel=3)
    return counts, excluded


def split_weights(
    weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
) -> tuple[str | None, Path | None]:
    """Return ``multiplicity`` if it is asked for, and the weights file if one is.

    Raises:
        ActdsError: E014 when it is neither, or there is no such file.
    """
    if weights is None:
        return None, None
    given = list(weights) if isinstance(weights, list | tuple) else [weights]
    files = [
        Path(one) for one in given if isinstance(one, str | os.PathLike) and one != MULTIPLICITY
    ]
    if not given or len(files) > 1 or len(given) != len(files) + (MULTIPLICITY in given):
        raise bad("weights", repr(weights)[:200], _WEIGHTS)
    if files and not files[0].is_file():
        raise bad("weights", f"no file {str(files[0])!r}", _WEIGHTS)
    return MULTIPLICITY if MULTIPLICITY in given else None, files[0] if files else None


def check_int(name: str, value: object, low: int) -> None:
    """Refuse what is no integer from ``low`` on.

    Raises:
        ActdsError: E014.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        raise bad(name, repr(value)[:80], f"an integer from {low}")


def check_worker(rank: int, world: int) -> None:
    """Refuse to serve the same batches in several workers of a torch DataLoader.

    Raises:
        ActdsError: E014 when this is one of several workers, and not the rank of its number.
    """
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    if info is None or (world % info.num_workers == 0 and rank % info.num_workers == info.id):
        return
    raise bad(
        "world",
        f"rank {rank} of {world} in worker {info.id} of {info.num_workers}",
        f"num_workers=0, or rank {info.id} of {info.num_workers}: each worker would give all rows",
    )


def check_lanes(batch: int, lanes: int, rank: int, world: int) -> None:
    """Refuse numbers that do not divide a batch in equal parts.

    Raises:
        ActdsError: E014.
    """
    if batch % lanes:
        raise bad("lanes", str(lanes), f"a divisor of batch {batch}")
    if lanes % world:
        raise bad("world", str(world), f"a divisor of lanes {lanes}; give lanes=")
    if rank >= world:
        raise bad("rank", str(rank), f"less than world {world}")


def bad(name: str, got: str, expected: str) -> ActdsError:
    """Return the error of an argument that cannot be used."""
    return ActdsError("E014", name, got=got, expected=expected)
