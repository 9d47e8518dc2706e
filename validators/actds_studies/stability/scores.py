"""Scores: what dictionaries are used for, on held-out rows.

That is to explain rows, by the fraction of variance unexplained (FVU), and to tell requests apart
by a linear probe on the features, by the area under its ROC curve (AUROC). Dictionaries of all arms
are scored on the same rows: their differences are paired, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actds.format.tables import PHASES
from actds_studies.stability.result import AUROC_MAXIMUM, AUROC_MEAN, FVU, RAW, CrossValue, Gap, Use
from actds_validators.arrays import Bools, Floats, Ints, Rows

if TYPE_CHECKING:
    from actds_validators.statistics.intervals import Interval

Entries = npt.NDArray[np.void]
"""Rows of a hook's array in the order of their keys, each as often as it is served."""
MAX_GROUPS, MIN_REQUESTS = 32, 8


@dataclass(frozen=True)
class Scored:
    """Held-out rows of an arm.

    Args:
        rows: finite ``(n, d_model)``.
        entries: what they are ``(n,)``.
        group: group of requests of each row ``(n,)``, the same in every arm.
        rare: rows of rare tokens ``(n,)``.
    """

    rows: Rows
    entries: Entries
    group: Ints
    rare: Bools

    def strata(self) -> dict[str, Bools]:
        from actds_studies.regimes.strata import step_bands  # it needs scipy, an extra

        phase = self.entries["phase"]
        names, band = step_bands(self.entries["step"])
        strata = {"all": np.ones(len(phase), np.bool_)}
        strata |= {name: phase == n for n, name in enumerate(PHASES)}
        strata |= {f"decode step {name}": band == n for n, name in enumerate(names)}
        strata["rare tokens"] = self.rare
        return {name: mask for name, mask in strata.items() if mask.any()}


@dataclass(frozen=True)
class Scores:
    """What a dictionary does to scored rows.

    Args:
        squared: squared error of each ``(n,)``.
        active: features that are active ``(n,)``.
        probe: score of the probe on its features ``(n,)``; None without labels.
    """

    squared: Floats
    active: Ints
    probe: Floats | None = None


def groups_of(arms: Sequence[Entries]) -> list[Ints]:
    """Return the group of requests of each row of each arm; a request has one in all of them."""
    requests = np.unique(np.concatenate([arm["request"] for arm in arms]))
    fewest = min(len(np.unique(arm["request"])) for arm in arms)
    n = max(1, min(MAX_GROUPS, fewest))
    return [np.searchsorted(requests, arm["request"]) % n for arm in arms]


# probes -------------------------------------------------------------------------------------------

_STEPS = 100


def ridge(features: Any, label: Ints) -> Floats:
    """Return the weights ``(p,)`` of a ridge regression on centred columns of standard deviation 1.

    The penalty is 1 for each row: it shrinks a direction of the variance of one column by half.
    Weights are for the columns as they are; an AUROC needs no intercept. One strength for all: with
    the few requests that there are, to choose one adds more noise than it takes away.

    Args:
        features: dense or sparse ``(n, p)``.
    """
    from scipy.sparse.linalg import LinearOperator, lsqr  # type: ignore[import-untyped]

    n = len(label)
    mean = np.asarray(features.sum(axis=0, dtype=np.float64)) / n
    square = features.multiply(features) if hasattr(features, "multiply") else np.square(features)
    spread = np.sqrt(np.maximum(square.sum(axis=0, dtype=np.float64) / n - mean**2, 0))
    inverse = np.divide(1, spread, out=np.zeros_like(spread), where=spread > 1e-6 * spread.max())
    operator = LinearOperator(
        features.shape,
        matvec=lambda w: features @ (w.ravel() * inverse) - mean @ (w.ravel() * inverse),
        rmatvec=lambda x: (features.T @ x.ravel() - mean * x.sum()) * inverse,
        dtype=np.float64,
    )
    solution = lsqr(operator, label - label.mean(), np.sqrt(n), iter_lim=_STEPS)[0]
    return np.asarray(solution * inverse)


def areas(score: Floats, label: Ints, group: Ints, n_groups: int) -> Floats:
    """Return the AUROC of all, and without each group ``(1 + n_groups,)``; ties count half."""
    place = np.unique(score, return_inverse=True)[1].reshape(-1)
    counts = np.zeros((2, n_groups, place.max(initial=0) + 1))
    np.add.at(counts, (label, group, place), 1)
    total = counts.sum(axis=1, keepdims=True)
    from actds_studies.regimes.instruments.probes import area

    return np.concatenate([area(*total), area(*(total - counts))])


def units(entries: Entries) -> tuple[Ints, Ints]:
    """Return the order of labelled rows unit by unit ``(n,)``, and where each unit starts in it.

    A unit is the rows of one request that have one label.
    """
    order = np.lexsort((entries["label"], entries["request"]))
    request, label = (entries[name][order] for name in ("request", "label"))
    new = (np.diff(request) != 0) | (np.diff(label) != 0)
    return order, np.flatnonzero(np.concatenate([[True], new]))


# values -------------------------------------------------------------------------------------------

Replicates = dict[str, Floats]
"""By what a dictionary was trained on: the value of each seed, of all rows and without each group
``(n_seeds, 1 + n_groups)``."""


def cross_values(
    scores: Mapping[str, Sequence[Scores]],
    rows_of: str,
    scored: Scored,
    reference: Scored,
    raw: Floats | None = None,
) -> Iterator[CrossValue]:
    """Yield what the dictionaries of every arm do to the scored rows of one, by stratum.

    Args:
        scores: by arm, of the dictionary of each seed.
        rows_of: the arm whose rows these are.
        raw: scores of a probe on the rows themselves ``(n,)``; None without labels.
    """
    n_groups = int(max(scored.group.max(), reference.group.max())) + 1
    d_model = scored.rows.shape[1]
    everything = np.ones(len(reference.group), np.bool_)
    whole = _sums(reference, everything, [], n_groups).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = float(_spread(whole, d_model) / whole[0])
    for stratum, mask in scored.strata().items():
        about = _about(scored, mask) | {"rows_of": rows_of, "rows": stratum}
        for value in _values(_unexplained(scored, mask, scores, n_groups), FVU, about):
            of, weight = scores[value.trained_on], scored.entries["represents"][mask]
            error, active = (
                float(
                    np.mean([np.average(getattr(each, name)[mask], weights=weight) for each in of])
                )
                for name in ("squared", "active")
            )
            by_reference = error / variance if variance > 0 else None
            yield value.model_copy(update={"fvu_reference": by_reference, "l0": active})
        mask = mask & (scored.entries["label"] >= 0)
        if raw is not None and stratum != "rare tokens" and mask.any():
            about |= _about(scored, mask)
            probes = {name: [each.probe for each in of] for name, of in scores.items()}
            for use, areas_of in _told_apart(scored, mask, probes | {RAW: [raw]}, n_groups).items():
                yield from _values(areas_of, use, about)


def _about(scored: Scored, mask: Bools) -> dict[str, Any]:
    n_requests = len(np.unique(scored.entries["request"][mask]))
    return {"n_rows": int(mask.sum()), "n_requests": n_requests}


def _unexplained(
    scored: Scored, mask: Bools, scores: Mapping[str, Sequence[Scores]], n_groups: int
) -> Replicates:
    squared = [each.squared for of in scores.values() for each in of]
    sums = _sums(scored, mask, squared, n_groups)
    total = sums.sum(axis=1, keepdims=True)
    values = _fvu(np.concatenate([total, total - sums], axis=1), scored.rows.shape[1])
    ends = np.cumsum([len(of) for of in scores.values()])
    return dict(zip(scores, np.split(values, ends[:-1]), strict=True))


def _told_apart(
    scored: Scored, mask: Bools, probes: Mapping[str, Sequence[Any]], n_groups: int
) -> dict[Use, Replicates]:
    order, starts = units(scored.entries[mask])
    row = np.flatnonzero(mask)[order]
    label, group = (of[row[starts]] for of in (scored.entries["label"], scored.group))
    weight = scored.entries["represents"][row]
    total = np.add.reduceat(weight, starts)
    pools: dict[Use, Callable[[Floats], Floats]] = {
        AUROC_MAXIMUM: lambda scores: np.maximum.reduceat(scores[row], starts),
        AUROC_MEAN: lambda scores: np.add.reduceat(scores[row] * weight, starts) / total,
    }
    return {
        use: {
            name: np.stack([areas(pool(each), label, group, n_groups) for each in of])
            for name, of in probes.items()
        }
        for use, pool in pools.items()
    }


def _values(values: Replicates, use: Use, about: Mapping[str, Any]) -> Iterator[CrossValue]:
    from scipy.special import stdtr  # type: ignore[import-untyped]

    home = values[about["rows_of"]]
    for name, of in values.items():
        known = bool(np.isfinite(of[:, 0]).all())
        interval = _interval(of, about)
        gap = _interval(of.mean(axis=0) - home.mean(axis=0), about)
        difference = None
        if gap is not None and name != about["rows_of"]:
            t = -abs(gap.value) / max(gap.error, 1e-300)
            p = None if name == RAW else float(2 * stdtr(gap.freedom, t))
            floor = float(np.ptp(home[:, 0]))
            difference = Gap(value=gap.value, low=gap.low, high=gap.high, floor=floor, p=p)
        yield CrossValue(
            trained_on=name,
            use=use,
            **about,
            value=float(of[:, 0].mean()) if known else None,
            low=interval.low if interval else None,
            high=interval.high if interval else None,
            seeds_low=float(of[:, 0].min()) if known else None,
            seeds_high=float(of[:, 0].max()) if known else None,
            difference=difference,
        )


def _interval(replicated: Floats, about: Mapping[str, Any]) -> Interval | None:
    """Return the interval over requests of a mean over seeds; None of too few requests."""
    from actds_validators.statistics.intervals import from_replicates

    mean = np.atleast_2d(replicated).mean(axis=0)
    if about["n_requests"] < MIN_REQUESTS or len(mean) < 3:
        return None
    return from_replicates(mean[:1], mean[np.newaxis, 1:])[0]


def _sums(scored: Scored, mask: Bools, squared: Sequence[Floats], n_groups: int) -> Floats:
    """Return sums over groups of requests ``(2 + d_model + n_errors, n_groups)``.

    Of rows: 1, their squared lengths, their channels, and squared errors of dictionaries, each
    times what the row represents.
    """
    rows = scored.rows[mask].astype(np.float64)
    lengths = np.einsum("nd,nd->n", rows, rows)
    columns = [np.ones(len(rows)), lengths, rows, *(error[mask] for error in squared)]
    sums = np.zeros((n_groups, 2 + rows.shape[1] + len(squared)))
    weight = scored.entries["represents"][mask, np.newaxis]
    np.add.at(sums, scored.group[mask], np.column_stack(columns) * weight)
    return sums.T


def _spread(sums: Floats, d_model: int) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(sums[1] - np.square(sums[2 : 2 + d_model]).sum(axis=0) / sums[0])


def _fvu(sums: Floats, d_model: int) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(sums[2 + d_model :] / _spread(sums, d_model))
