"""Statistics of the rows of a hook: one pass, kept between processes, continued where it stopped.

Each shard is a pure function of its rows, and shards are joined in their order: so the result is
the same to the bit whether the pass was interrupted, and whichever machine did which shard.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.executor import Executor
from actds.format import arrays
from actds.format.schema import Hook
from actds.format.shard import Shard

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[Any]

QUANTILES = (0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1)
"""The quantiles of norms that ``Stats`` has."""
BLOCK_NBYTES = 1 << 24
"""Bytes of float64 rows that are held at a time."""
SAMPLE_NBYTES = 1 << 25
"""Bytes of float32 rows from which the geometric median is found."""
_VERSION = 4
_CONSTANT = 1e-13  # of the mean: below it, a standard deviation is what rounding left
_MAX_STEPS = 200
_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Stats:
    """Statistics of rows of a hook; nan without rows.

    Rows of a mixture, that come in proportion to a number, or that were drawn with different
    probabilities, count with their share of all.

    Args:
        count: number of rows, each as often as it comes; with shares, of rows that come at all.
        mean: per channel, float64 ``(d_model,)``.
        variance: per channel, float64 ``(d_model,)``: mean squared deviation from ``mean``,
            divided by ``count``.
        mean_norm: mean Euclidean norm of a row.
        norm_quantiles: quantiles of the norms at ``QUANTILES``, float64 ``(13,)``, as
            ``numpy.quantile`` has them.
        geometric_median: the point with the least sum of distances to the rows, each as often as
            it comes, float64 ``(d_model,)``; of more than 32 MiB of rows, to an even sample.
        n_sampled: rows that it is of.
        effective_rows: rows of equal share that would say as much of a mean (Kish 1965).
    """

    count: int
    mean: Floats
    variance: Floats
    mean_norm: float
    norm_quantiles: Floats
    geometric_median: Floats
    n_sampled: int
    effective_rows: float = float("nan")

    @property
    def std(self) -> Floats:
        """Return the standard deviation per channel, float64 ``(d_model,)``; 0 of a constant."""
        std: Floats = np.sqrt(self.variance)
        return np.where(std > _CONSTANT * np.abs(self.mean), std, 0.0)

    @property
    def norms(self) -> dict[float, float]:
        """Return the quantiles of the norms by their share: 0.5 is the median."""
        return dict(zip(QUANTILES, self.norm_quantiles.tolist(), strict=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them as a file of numpy, ``.npz``."""
        _save(Path(path), {field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what ``save`` wrote.

        Raises:
            OSError, ValueError, KeyError: there is no such file, or it is not one of ``save``.
        """
        with np.load(path, allow_pickle=False) as file:
            values = {field.name: file[field.name] for field in fields(cls)}
        scalars = {"count": int, "mean_norm": float, "n_sampled": int, "effective_rows": float}
        return cls(**{k: scalars[k](v) if k in scalars else v for k, v in values.items()})


@dataclass(frozen=True)
class Moments:
    """Weight, mean, sum of squared deviations, of norms and of squared weights of rows.

    ``a + b`` is those of both.
    """

    count: float
    mean: Floats
    squares: Floats
    norms: float
    weight_squares: float

    def __add__(self, other: Moments) -> Moments:
        # Chan, Golub and LeVeque 1979: a mean far from zero costs no digits.
        total = self.count + other.count
        if not total:
            return self
        shift = other.mean - self.mean
        return Moments(
            total,
            self.mean + shift * (other.count / total),
            self.squares + other.squares + shift * shift * (self.count * other.count / total),
            self.norms + other.norms,
            self.weight_squares + other.weight_squares,
        )


def stats_of_rows(
    hook: Hook,
    shards: Sequence[Shard],
    counts: Sequence[Counts | None],
    *,
    key: str,
    cache: Path | None = None,
    executor: Executor | None = None,
) -> Stats:
    """Return the statistics of rows of a hook from one pass over them.

    Args:
        hook: the hook.
        shards: the shards that hold the rows.
        counts: how often each row of a shard comes, ``(n_rows,)``; None where each comes once.
            Floats are shares of all that comes, and then those of every shard are.
        key: names the rows: what is kept under it is taken as theirs.
        cache: folder for results and for shards that are done; None keeps nothing.
        executor: where the shards are read, the result is the same; None reads one after the other.

    Raises:
        ActdsError: E014 values that are not finite; E104, E108, E201 to E204 when a shard is
            missing or damaged.
    """
    name = hashlib.sha256(f"{_VERSION} {key} {hook.name}".encode()).hexdigest()[:32]
    folder = None if cache is None else cache / name
    kept = None if folder is None else _load(folder / "stats.npz")
    if kept is not None:
        return Stats.load(folder / "stats.npz")  # type: ignore[operator]
    n_present = [
        s.n_rows if c is None else int(np.count_nonzero(c))
        for s, c in zip(shards, counts, strict=True)
    ]
    n_sample = min(sum(n_present), max(1, SAMPLE_NBYTES // (4 * hook.d_model)))
    totals = [n if c is None else c.sum().item() for c, n in zip(counts, n_present, strict=True)]
    before = [0, *accumulate(totals)]
    size = None if n_sample == sum(n_present) else n_sample
    # By number: two parts of a mixture may read other rows of one shard.
    kept_parts = (None if folder is None else folder / f"{n}.npz" for n in range(len(shards)))
    parts = [None if path is None else _load(path) for path in kept_parts]
    left = [number for number, part in enumerate(parts) if part is None]
    work = [(hook, shards[n], counts[n], before[n], before[-1], size) for n in left]
    done = map(_of_shard, work) if executor is None else executor.map(_of_shard, work)
    for number, part in zip(left, done, strict=True):
        parts[number] = part
        if folder is not None:
            _keep(folder / f"{number}.npz", part)
    stats = _joined([part for part in parts if part is not None], hook.d_model)
    if folder is not None:
        _keep(folder / "stats.npz", {f.name: getattr(stats, f.name) for f in fields(stats)})
        for at in range(len(shards)):
            with contextlib.suppress(OSError):
                (folder / f"{at}.npz").unlink()
    return stats


def _of_shard(work: tuple[Any, ...]) -> dict[str, npt.NDArray[Any]]:
    return shard_statistics(*work)


def shard_statistics(
    hook: Hook,
    shard: Shard,
    counts: Counts | None,
    before: float,
    n_rows: float,
    n_sample: int | None,
) -> dict[str, npt.NDArray[Any]]:
    """Return what the rows of one shard add to the statistics: moments, norms and a sample.

    Args:
        counts: how often each row comes, or its share as a float; None where each comes once.
        before: rows of the shards before it, or the sum of their shares.
        n_rows: rows of all shards, or that sum.
        n_sample: rows of the sample over all shards, evenly spaced; None for every row, weighted.
    """
    rows = np.arange(shard.n_rows) if counts is None else np.flatnonzero(counts)
    shares = None if counts is None or counts.dtype.kind != "f" else counts[rows]
    times = None if counts is None else counts[rows].astype(np.int64 if shares is None else float)
    weights = drawn = np.ones(len(rows)) if times is None else times.astype(float)
    if n_sample is not None:
        number = before + np.concatenate([[0.0], np.cumsum(weights)])
        drawn = np.diff(np.floor(number * n_sample / n_rows))
    norms, sample = np.empty(len(rows), np.float32), []
    moments = _no_moments(hook.d_model)
    step = max(1, BLOCK_NBYTES // (8 * hook.d_model))
    with shard.array(hook.name) as reader:
        for start in range(0, len(rows), step):
            chosen = rows[start : start + step]
            bits = np.empty((len(chosen), hook.d_model), arrays.DTYPES[hook.dtype].bits)
            reader.take(chosen, bits)
            values = arrays.widen(bits, hook.dtype)
            sample.append(values[drawn[start : start + step] > 0])
            block = values.astype(np.float64)
            norms[start : start + step] = lengths = np.sqrt(np.einsum("ij,ij->i", block, block))
            if not np.isfinite(lengths).all():
                raise ActdsError(
                    "E014",
                    f"statistics of {hook.name}",
                    got=f"rows of shards/{shard.name} with values that are NaN or infinite",
                    expected="finite values",
                    next_step='Loader(path, hook, exclude="not_finite").stats() leaves them out.',
                )
            moments += _moments(
                block, lengths, None if times is None else times[start : start + step]
            )
    return {
        "count": np.array(moments.count),
        "mean": moments.mean,
        "squares": moments.squares,
        "norms": np.array(moments.norms),
        "weight_squares": np.array(moments.weight_squares),
        "lengths": np.repeat(norms, times) if times is not None and shares is None else norms,
        "shares": np.empty(0) if shares is None else shares,
        "sample": np.concatenate(sample) if sample else np.empty((0, hook.d_model), np.float32),
        "sample_weights": drawn[drawn > 0],
    }


def _moments(block: Floats, lengths: Floats, times: npt.NDArray[Any] | None) -> Moments:
    """Return the moments of float64 rows, which are overwritten; each comes ``times`` often."""
    if times is None:
        mean = block.mean(axis=0)
        block -= mean
        squares = np.einsum("ij,ij->j", block, block)
        return Moments(len(block), mean, squares, float(lengths.sum()), len(block))
    count = float(times.sum()) if times.dtype.kind == "f" else int(times.sum())
    mean = times @ block / count
    block -= mean
    weights = times.astype(np.float64)
    squares = np.einsum("i,ij,ij->j", weights, block, block)
    return Moments(count, mean, squares, float(times @ lengths), float(weights @ weights))


def _no_moments(d_model: int) -> Moments:
    return Moments(0, np.zeros(d_model), np.zeros(d_model), 0.0, 0.0)


def _joined(parts: Sequence[dict[str, npt.NDArray[Any]]], d_model: int) -> Stats:
    whole = reduce(
        Moments.__add__,
        (
            Moments(
                p["count"].item(),
                p["mean"],
                p["squares"],
                float(p["norms"]),
                float(p["weight_squares"]),
            )
            for p in parts
        ),
        _no_moments(d_model),
    )
    lengths = np.concatenate([p["lengths"] for p in parts]) if parts else np.empty(0)
    sample = np.concatenate([p["sample"] for p in parts]) if parts else np.empty((0, d_model))
    weights = np.concatenate([p["sample_weights"] for p in parts]) if parts else np.empty(0)
    shares = np.concatenate([p["shares"] for p in parts]) if parts else np.empty(0)
    if not whole.count:
        nothing, quantiles = np.full(d_model, np.nan), np.full(len(QUANTILES), np.nan)
        return Stats(0, nothing, nothing.copy(), float("nan"), quantiles, nothing.copy(), 0, 0.0)
    return Stats(
        int(whole.count) if not len(shares) else len(lengths),
        whole.mean,
        whole.squares / whole.count,
        whole.norms / whole.count,
        _quantiles(lengths.astype(np.float64), shares),
        geometric_median(sample, weights),
        len(sample),
        whole.count**2 / whole.weight_squares,
    )


def _quantiles(lengths: Floats, shares: Floats) -> Floats:
    """Return the quantiles; with shares, the least length that this share of all is up to."""
    if not len(shares):
        return np.asarray(np.quantile(lengths, QUANTILES, overwrite_input=True), np.float64)
    order = np.argsort(lengths)
    up_to = np.cumsum(shares[order])
    at = np.searchsorted(up_to, np.array(QUANTILES) * up_to[-1])
    return np.asarray(lengths[order[np.minimum(at, len(order) - 1)]])


def geometric_median(rows: npt.NDArray[Any], weights: npt.NDArray[Any] | None = None) -> Floats:
    """Return the point with the least sum of distances to rows ``(n, d)``, float64 ``(d,)``.

    Weiszfeld's iteration, from the mean, until a step is 1e-7 of the mean distance. A row that it
    comes to lie on is left out of that step (Vardi and Zhang 2000).

    Args:
        rows: the rows.
        weights: of their distances, positive ``(n,)``; None for 1 each.
    """
    if not len(rows):
        return np.full(rows.shape[1], np.nan)
    points = rows.astype(np.float64)
    # Of the mean weight, so that the sums are those of rows whatever the unit.
    weights = np.ones(len(points)) if weights is None else weights / weights.mean()
    at: Floats = weights @ points / weights.sum()
    for _ in range(_MAX_STEPS):
        distances = np.sqrt(np.einsum("ij,ij->i", points - at, points - at))
        apart = distances > 0
        if not apart.any():
            return at
        inverse = np.zeros(len(points))
        inverse[apart] = weights[apart] / distances[apart]
        target = inverse @ points / inverse.sum()
        if not apart.all():
            pull = float(np.linalg.norm(inverse.sum() * (target - at)))
            keep = min(1.0, float(weights[~apart].sum()) / pull) if pull else 1.0
            target = (1 - keep) * target + keep * at
        step, at = float(np.linalg.norm(target - at)), target
        if step <= _TOLERANCE * float(weights @ distances) / len(points):
            break
    return at


def cache_folder() -> Path:
    """Return where results are kept: ``ACTDS_CACHE``, or ``actds`` in the user's cache folder."""
    named = os.environ.get("ACTDS_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(named) if named else (Path(base) if base else Path.home() / ".cache") / "actds"


def _load(path: Path) -> dict[str, npt.NDArray[Any]] | None:
    """Return what was kept; None where nothing is, or what is there cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _keep(path: Path, values: dict[str, Any]) -> None:
    """Keep values for the next time; a cache that cannot be written is no reason to stop."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(path, values)
    except OSError as error:
        warnings.warn(f"statistics are not stored in {path}: {error}", UserWarning, stacklevel=4)


def _save(path: Path, values: dict[str, Any]) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            np.savez(file, **values)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
