"""Cross-reconstruction: what dictionaries of one arm leave unexplained of the rows of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actds.format.tables import PHASES
from actds_studies.stability.arms import Entries
from actds_studies.stability.result import CrossValue, Rare, ScoredRows
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.statistics.intervals import from_replicates

if TYPE_CHECKING:
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
        found: dict[ScoredRows, Bools] = {
            "all": np.ones(len(phase), np.bool_),
            "prefill": phase == PHASES.index("prefill"),
            "decode": phase == PHASES.index("decode"),
            "rare tokens": self.rare,
        }
        return {name: mask for name, mask in found.items() if mask.any()}


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
    requests = np.unique(np.concatenate([one.request for one in arms]))
    fewest = min(len(np.unique(one.request)) for one in arms)
    n = max(1, min(MAX_GROUPS, fewest))
    return [np.searchsorted(requests, one.request) % n for one in arms]


def errors_of(dictionary: Dictionary, rows: npt.NDArray[np.float32]) -> tuple[Errors, csr_array]:
    """Return what a dictionary does to rows, and their features ``(n, n_features)``."""
    features = dictionary.encode_sparse(rows)
    away = dictionary.decode(features) - rows
    squared = np.einsum("nd,nd->n", away, away, dtype=np.float64)
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
    trained_on: str, rows_of: str, name: ScoredRows, mask: Bools, errors: Sequence[Errors],
    scored: Scored, against: Floats, n_groups: int,
) -> CrossValue:  # fmt: skip
    own = _spreads(scored, mask, n_groups)
    unexplained = np.stack(
        [
            _left_out(np.bincount(scored.group[mask], one.squared[mask], n_groups))
            for one in errors
        ]
    )  # fmt: skip
    count = _left_out(np.bincount(scored.group[mask], minlength=n_groups))
    with np.errstate(divide="ignore", invalid="ignore"):
        by_seed = unexplained / own
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
        l0=float(np.mean([one.active[mask].mean() for one in errors])),
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
