"""Rows in memory: what dictionaries are trained on and scored on, and what of it is left aside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format.arrays import DTYPES
from actds.loader.filters import SINK_NORM
from actds_studies.stability.arms import Arm, Entries, chosen, most
from actds_studies.stability.cross import Scored, groups_of, rare_tokens
from actds_studies.stability.fit import TrainingRows
from actds_studies.stability.result import Limits, Rare
from actds_validators.arrays import Bools, Floats, Ints

if TYPE_CHECKING:
    import torch

N_SCORED = 8192
"""Held-out rows of an arm that score dictionaries, at most."""
_BLOCK = 65_536


@dataclass(frozen=True)
class Plan:
    """How many rows and features there will be.

    Args:
        n_rows: rows of an arm to train on.
    """

    n_rows: int
    n_features: int


@dataclass(frozen=True)
class Held:
    """The rows of one arm in memory.

    Args:
        entries: what the rows to train on are.
        n_sinks: rows to train on that are sinks or not finite, and weigh nothing.
    """

    arm: Arm
    entries: Entries
    train: TrainingRows
    scored: Scored
    n_sinks: int


@dataclass(frozen=True)
class Gathered:
    """The rows of all arms, and what is the same for all of them.

    Args:
        arms: the rows of each arm, the reference first.
        scale: what brings the reference's rows to a mean norm of the square root of ``d_model``.
        centre: mean of the reference's rows ``(d_model,)``.
    """

    arms: tuple[Held, ...]
    scale: float
    centre: Floats
    rare: Rare


def plan(arms: Sequence[Arm], hook: str, limits: Limits) -> Plan:
    """Return how many rows and features there will be; no activation is read.

    Raises:
        ActdsError: E014 an arm without held-out rows; E009 rows, features or memory that do not
            do.
    """
    d_model = arms[0].dataset.hooks[hook].d_model
    n_features = limits.features or 4 * d_model
    if n_features < limits.k:
        got = f"{n_features:,} features, {limits.k:,} of them active"
        raise ActdsError("E009", "features", got=got, expected=f"{limits.k:,} at least, as k")
    there = {arm.name: most(arm.train, arm.shares) for arm in arms}
    name, least = min(there.items(), key=lambda pair: pair[1])
    n_rows = least if limits.rows is None else limits.rows
    if n_rows > least:
        got, expected = f"{n_rows:,}", f"at most the {least:,} rows of arm {name}"
        raise ActdsError("E009", "rows", got=got, expected=expected)
    if n_rows < limits.batch:
        option = "batch" if limits.rows is None else "rows"
        got = f"{n_rows:,} rows of arm {name} and batches of {limits.batch:,}"
        raise ActdsError("E009", option, got=got, expected="one batch at least")
    for arm in arms:
        if not most(arm.scored, arm.shares):
            raise ActdsError(
                "E014",
                f"arm {arm.name}",
                got="no held-out row that no arm is trained on",
                expected="some",
                next_step="Hold out a larger share of the requests: held_out=0.5",
            )
    _need_memory(arms, hook, limits, n_rows, n_features)
    return Plan(n_rows, n_features)


def _need_memory(
    arms: Sequence[Arm], hook: str, limits: Limits, n_rows: int, n_features: int
) -> None:
    of_hook = arms[0].dataset.hooks[hook]
    row_nbytes = of_hook.d_model * DTYPES[of_hook.dtype].itemsize
    n_dictionaries = (len(arms) + 1) * limits.seeds
    n_scored = sum(min(N_SCORED, most(arm.scored, arm.shares)) for arm in arms)
    fixed = n_dictionaries * (8 * n_features * of_hook.d_model + 8 * limits.k * n_scored)
    fixed += 4 * n_scored * of_hook.d_model + 24 * n_features**2
    budget = limits.max_memory << 20
    need = fixed + len(arms) * n_rows * row_nbytes
    if need > budget:
        fitting = (budget - fixed) // (len(arms) * row_nbytes)
        fewer = f"rows={fitting}" if fitting >= limits.batch else "fewer features"
        raise ActdsError(
            "E009",
            "max_memory",
            got=f"{need >> 20:,} MiB for {n_rows:,} rows of {len(arms)} arms and "
            f"{n_dictionaries} dictionaries",
            expected=f"at most {limits.max_memory:,} MiB",
            next_step=f"Give {fewer}, or max_memory={(need >> 20) + 1}",
        )


def gather(arms: Sequence[Arm], hook: str, n_rows: int) -> Gathered:
    """Read the rows of all arms.

    Args:
        arms: the arms, the reference first.

    Raises:
        ActdsError: E014 an arm without a row that counts; what reading raises.
    """
    entries = [chosen(arm.train, arm.shares, n_rows) for arm in arms]
    values = [_read(arm, hook, one.row) for arm, one in zip(arms, entries, strict=True)]
    norms = [_norms(rows) for rows in values]
    finite = norms[0][np.isfinite(norms[0])]
    limit = SINK_NORM * float(np.median(finite)) if len(finite) else 0.0
    kept = [own <= limit for own in norms]
    for arm, fine, one in zip(arms, kept, entries, strict=True):
        if not limit or not (fine & (one.weight > 0)).any():
            got = "no finite row with a weight"
            raise ActdsError("E014", f"arm {arm.name} at {hook}", got=got, expected="some")
    counted = kept[0] & (entries[0].weight > 0)
    for own, fine in zip(values, kept, strict=True):
        own[~fine] = 0
    centre = _mean(values[0], counted)
    scale = float(values[0].shape[1] ** 0.5 / norms[0][counted].mean())
    rare, frequent = rare_tokens(entries[0].token_id)
    scored = [_scored_rows(arm, hook, limit) for arm in arms]
    groups = groups_of([one for one, _ in scored])
    held = [
        Held(
            arm,
            one,
            TrainingRows(own, one.key, np.where(fine, one.weight, 0.0)),
            Scored(rows, told, group, ~np.isin(told.token_id, frequent)),
            int((~fine).sum()),
        )
        for arm, one, own, fine, (told, rows), group in zip(
            arms, entries, values, kept, scored, groups, strict=True
        )
    ]
    return Gathered(tuple(held), scale, centre, rare)


def _scored_rows(arm: Arm, hook: str, limit: float) -> tuple[Entries, npt.NDArray[np.float32]]:
    n = min(N_SCORED, most(arm.scored, arm.shares))
    entries = chosen(arm.scored, arm.shares, n)
    values = _read(arm, hook, entries.row)
    kept = _norms(values) <= limit
    if not kept.any():
        got = "held-out rows that are all sinks or not finite"
        raise ActdsError("E014", f"arm {arm.name} at {hook}", got=got, expected="others")
    return entries.take(kept), values.float().numpy()[kept]


def _read(arm: Arm, hook: str, rows: Ints) -> torch.Tensor:
    """Return rows in the given order and their stored type; each chunk is decoded once."""
    import torch

    wanted, place = np.unique(rows, return_inverse=True)
    found = arm.dataset.array(hook).torch(wanted)
    return found[torch.from_numpy(place.reshape(-1))]


def _norms(rows: torch.Tensor) -> Floats:
    """Return the length of each row, infinite for one that is not finite ``(n,)``."""
    found = np.empty(len(rows))
    for at in range(0, len(rows), _BLOCK):
        found[at : at + _BLOCK] = rows[at : at + _BLOCK].float().norm(dim=1).numpy()
    return np.where(np.isfinite(found), found, np.inf)


def _mean(rows: torch.Tensor, counted: Bools) -> Floats:
    import torch

    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for at in range(0, len(rows), _BLOCK):
        part = rows[at : at + _BLOCK].double()
        total += part[torch.from_numpy(counted[at : at + _BLOCK])].sum(dim=0)
    return np.asarray(total.numpy() / counted.sum())
