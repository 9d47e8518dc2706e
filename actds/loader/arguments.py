"""Arguments of a loader: what cannot be served is refused, each under its own name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from actds.errors import not_installed
from actds.format.shard import Shard
from actds.loader.filters import bad, need_known
from actds.loader.selection import ROLE

MULTIPLICITY = "multiplicity"
_WEIGHTS = "'multiplicity', the path of a weights file or an expression, or one of each"


def provenance_columns(
    argument: str, names: Sequence[str], known: Sequence[str], shards: Iterable[Shard]
) -> tuple[str, ...]:
    """Return the columns that an argument names beside ``role``.

    Args:
        argument: its name.
        names: the columns that are asked for.
        known: those that there are.
        shards: the shards whose rows they say.

    Raises:
        ActdsError: E014 for a column that there is not, or of which a run says nothing.
    """
    for name in names:
        if name not in (*known, ROLE) or names.count(name) > 1:
            raise bad(argument, repr(name), f"different ones of {', '.join((*known, ROLE))}")
    needed = [n for n in names if n != ROLE] + (["request", "position"] if ROLE in names else [])
    for shard in shards:
        need_known(shard, needed, argument)
    return tuple(names)


def split_weights(
    weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
) -> tuple[bool, str | os.PathLike[str] | None]:
    """Return whether ``multiplicity`` is asked for, and the weights file or expression."""
    if weights is None:
        return False, None
    given = list(weights) if isinstance(weights, list | tuple) else [weights]
    others = [one for one in given if isinstance(one, str | os.PathLike) and one != MULTIPLICITY]
    if not given or len(others) > 1 or len(given) != len(others) + (MULTIPLICITY in given):
        raise bad("weights", repr(weights)[:200], _WEIGHTS)
    return MULTIPLICITY in given, others[0] if others else None


def check_numbers(**values: int | None) -> None:
    """Refuse arguments that are no numbers, or too small ones; some may be None."""
    for name, value in values.items():
        if value is not None or name not in ("epochs", "lanes", "window_rows"):
            check_int(name, value, 0 if name in ("seed", "rank") else 1)


def check_int(name: str, value: object, low: int) -> None:
    """Refuse what is no integer from ``low`` on."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        raise bad(name, repr(value)[:80], f"an integer from {low}")


def check_torch() -> None:
    """Raise E011 where torch cannot be imported: every batch is made of its tensors."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise not_installed("torch", "torch", "actds.Loader") from error


def check_worker(rank: int, world: int) -> None:
    """Refuse to serve the same batches in several workers of a torch DataLoader."""
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
    """Refuse numbers that do not divide a batch in equal parts."""
    if batch % lanes:
        raise bad("lanes", str(lanes), f"a divisor of batch {batch}")
    if lanes % world:
        raise bad("world", str(world), f"a divisor of lanes {lanes}; give lanes=")
    if rank >= world:
        raise bad("rank", str(rank), f"less than world {world}")
