"""Rows in memory: what dictionaries are trained on and scored on, and what of it is left aside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format.arrays import DTYPES
from actds.format.tables import PHASES
from actds.loader.filters import SINK_NORM
from actds_studies.stability.arms import Arm, Entries, chosen, most
from actds_studies.stability.fit import TrainingRows
from actds_studies.stability.result import CrossValue, Limits, Rare, ScoredRows
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.statistics.intervals import from_replicates

if TYPE_CHECKING:
    import torch
    from scipy.sparse import csr_array  # type: ignore[import-untyped]

    from actds_studies.dictionaries import Dictionary

MAX_GROUPS, MIN_REQUESTS = 32, 8
RARE = 0.1


@dataclass(frozen=True)
class Scored:
    """Held-out rows of an arm.

    Args:
        rows: float32 ``(n, d_model)``, finite.
        entries: what they are ``(n,)``.
        group: group of requests of each row ``(n,)``, the same in every arm.
        rare: rows of rare tokens ``(n,)``.
    """

    rows: npt.NDArray[np.float32]
    entries: Entries
    group: Ints
    rare: Bools

    def strata(self) -> dict[ScoredRows, Bools]:
        """Return the rows of each stratum that has any."""
        phase = self.entries.phase
        masks: dict[ScoredRows, Bools] = {
            "all": np.ones(len(phase), np.bool_),
            "prefill": phase == PHASES.index("prefill"),
            "decode": phase == PHASES.index("decode"),
            "rare tokens": self.rare,
        }
        return {name: mask for name, mask in masks.items() if mask.any()}


@dataclass(frozen=True)
class Errors:
    """What a dictionary does to rows.

    Args:
        squared: squared error of each row ``(n,)``.
        active: active features of each row ``(n,)``.
    """

    squared: Floats
    active: Ints


def rare_tokens(token_id: Ints) -> tuple[Rare, Ints]:
    """Return which tokens are rare, and those that are not.

    Rare are the least frequent token ids that together make a tenth of the rows; ids that come
    as often as the last of them are all rare, and so is one that never comes.

    Args:
        token_id: of the reference's rows ``(n,)``.
    """
    ids, counts = np.unique(token_id, return_counts=True)
    order = np.argsort(counts, kind="stable")
    rows = np.cumsum(counts[order])
    most = int(counts[order][np.searchsorted(rows, RARE * len(token_id))])
    share = float(counts[counts <= most].sum() / len(token_id))
    return Rare(most=most, share=share), ids[counts > most]


def groups_of(arms: Sequence[Entries]) -> list[Ints]:
    """Return the group of requests of each row of each arm; a request has one in all of them."""
    requests = np.unique(np.concatenate([arm.request for arm in arms]))
    fewest = min(len(np.unique(arm.request)) for arm in arms)
    n = max(1, min(MAX_GROUPS, fewest))
    return [np.searchsorted(requests, arm.request) % n for arm in arms]


def errors_of(dictionary: Dictionary, rows: npt.NDArray[np.float32]) -> tuple[Errors, csr_array]:
    """Return what a dictionary does to rows, and their features ``(n, n_features)``."""
    features = dictionary.encode_sparse(rows)
    error = dictionary.decode(features) - rows
    squared = np.einsum("nd,nd->n", error, error, dtype=np.float64)
    return Errors(squared, np.diff(features.indptr).astype(np.int64)), features


def cross_values(
    trained_on: str, rows_of: str, errors: Sequence[Errors], scored: Scored, reference: Scored
) -> list[CrossValue]:
    """Return what the dictionaries of an arm leave unexplained of rows, by stratum."""
    n_groups = int(max(scored.group.max(), reference.group.max())) + 1
    whole = np.ones(len(reference.group), np.bool_)
    count = _left_out(np.bincount(reference.group, minlength=n_groups))
    with np.errstate(divide="ignore", invalid="ignore"):
        against = _spreads(reference, whole, n_groups) / count
    return [
        _value(trained_on, rows_of, name, mask, errors, scored, against, n_groups)
        for name, mask in scored.strata().items()
    ]


def _value(
    trained_on: str,
    rows_of: str,
    name: ScoredRows,
    mask: Bools,
    errors: Sequence[Errors],
    scored: Scored,
    against: Floats,
    n_groups: int,
) -> CrossValue:
    spread = _spreads(scored, mask, n_groups)
    unexplained = np.stack(
        [
            _left_out(np.bincount(scored.group[mask], error.squared[mask], n_groups))
            for error in errors
        ]
    )
    count = _left_out(np.bincount(scored.group[mask], minlength=n_groups))
    with np.errstate(divide="ignore", invalid="ignore"):
        by_seed = unexplained / spread
        of_reference = (unexplained / (count * against)).mean(axis=0)
    fvu = by_seed.mean(axis=0)
    n_requests = len(np.unique(scored.entries.request[mask]))
    interval = None
    if n_requests >= MIN_REQUESTS and n_groups > 1:
        (interval,) = from_replicates([fvu[0]], [fvu[1:]])
    known = bool(np.isfinite(fvu[0]))
    return CrossValue(
        trained_on=trained_on,
        rows_of=rows_of,
        rows=name,
        n_rows=int(mask.sum()),
        n_requests=n_requests,
        fvu=float(fvu[0]) if known else None,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        seeds_low=float(by_seed[:, 0].min()) if known else None,
        seeds_high=float(by_seed[:, 0].max()) if known else None,
        fvu_reference=float(of_reference[0]) if np.isfinite(of_reference[0]) else None,
        l0=float(np.mean([error.active[mask].mean() for error in errors])),
    )


def _spreads(scored: Scored, mask: Bools, n_groups: int) -> Floats:
    """Return the squared distances from the mean: of all rows, then without each group."""
    rows, group = scored.rows[mask].astype(np.float64), scored.group[mask]
    count = _left_out(np.bincount(group, minlength=n_groups))
    squares = _left_out(np.bincount(group, np.einsum("nd,nd->n", rows, rows), n_groups))
    sums = np.zeros((n_groups, rows.shape[1]))
    np.add.at(sums, group, rows)
    totals = sums.sum(axis=0) - np.concatenate([np.zeros((1, rows.shape[1])), sums])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(squares - np.square(totals).sum(axis=1) / count)


def _left_out(by_group: npt.NDArray[np.number[Any]]) -> Floats:
    """Return the sum of all groups, then the sums without each of them ``(n_groups + 1,)``."""
    return np.asarray(by_group.sum() - np.concatenate([[0.0], by_group]), np.float64)


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
    available = {arm.name: most(arm.train, arm.shares) for arm in arms}
    name, least = min(available.items(), key=lambda pair: pair[1])
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
    values = [_read(arm, hook, entry.row) for arm, entry in zip(arms, entries, strict=True)]
    norms = [_norms(rows) for rows in values]
    finite = norms[0][np.isfinite(norms[0])]
    limit = SINK_NORM * float(np.median(finite)) if len(finite) else 0.0
    kept = [rows_of <= limit for rows_of in norms]
    for arm, fine, entry in zip(arms, kept, entries, strict=True):
        if not limit or not (fine & (entry.weight > 0)).any():
            got = "no finite row with a weight"
            raise ActdsError("E014", f"arm {arm.name} at {hook}", got=got, expected="some")
    counted = kept[0] & (entries[0].weight > 0)
    for rows_of, fine in zip(values, kept, strict=True):
        rows_of[~fine] = 0
    centre = _mean(values[0], counted)
    scale = float(values[0].shape[1] ** 0.5 / norms[0][counted].mean())
    rare, frequent = rare_tokens(entries[0].token_id)
    scored = [_scored_rows(arm, hook, limit) for arm in arms]
    groups = groups_of([entry for entry, _ in scored])
    arms_held = [
        Held(
            arm,
            entry,
            TrainingRows(rows_of, entry.key, np.where(fine, entry.weight, 0.0)),
            Scored(rows, words, group, ~np.isin(words.token_id, frequent)),
            int((~fine).sum()),
        )
        for arm, entry, rows_of, fine, (words, rows), group in zip(
            arms, entries, values, kept, scored, groups, strict=True
        )
    ]
    return Gathered(tuple(arms_held), scale, centre, rare)


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
    stored = arm.dataset.array(hook).torch(wanted)
    return stored[torch.from_numpy(place.reshape(-1))]


def _norms(rows: torch.Tensor) -> Floats:
    """Return the length of each row, infinite for one that is not finite ``(n,)``."""
    norms = np.empty(len(rows))
    for at in range(0, len(rows), _BLOCK):
        norms[at : at + _BLOCK] = rows[at : at + _BLOCK].float().norm(dim=1).numpy()
    return np.where(np.isfinite(norms), norms, np.inf)


def _mean(rows: torch.Tensor, counted: Bools) -> Floats:
    import torch

    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for at in range(0, len(rows), _BLOCK):
        part = rows[at : at + _BLOCK].double()
        total += part[torch.from_numpy(counted[at : at + _BLOCK])].sum(dim=0)
    return np.asarray(total.numpy() / counted.sum())
