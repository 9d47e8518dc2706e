"""Profiles of a regime: rows with readouts, scores of their trajectories, fit and threshold."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.errors import ActdsError
from actds.explore.dataset import Dataset, open_apart
from actds.format.canonical import MAX_DOCUMENT_NBYTES
from actds.format.interventions import interventions_of
from actds.format.positions import position_key, split_key
from actds.format.profile import (
    OPENING,
    QUANTILES,
    Bools,
    Calibration,
    Cell,
    Floats,
    Ints,
    Kept,
    Look,
    Profile,
    RowMoments,
    Tail,
    Trajectories,
    features,
    regime_of,
    rounded,
    turns,
)
from actds.format.roles import Roles
from actds.format.sampled import Sampled
from actds.format.tables import READOUTS_FULL, is_served
from actds.format.telemetry import KINDS
from actds_validators.statistics.design import exact_share

LENGTHS = (1, 17, 65, 257, 1025)
"""First answer lengths, in rows, of the strata by length."""
_COUNTS = ("n_lost", "n_adapted")
_N_FOLDS = 8
_LEAST_ROWS, _LEAST_REQUESTS = 100, 20
_RANKS = {"prefill": (32, 10), "decode": (32, 10), "drift": (32, 10), "opening": (96, 4)}
"""Axes at most, and rows for each: those of an opening are one of a request, and independent."""


@dataclass(frozen=True)
class Rows:
    """The rows with readouts of the requests of a dataset, in the order of their positions.

    Args:
        runs: run of each request.
        requests: its number in its run, ``(n_requests,)``.
        names: what its client called it.
        of: which of the requests a row is of, ``(n,)``.
        position: of the row.
        depth: position minus prompt length: below 0 in the prompt.
        readouts: ``(n, n_hooks, 1 + products)``.
        role: of the position, empty where it is not known.
        entropy: of the logits of the row, NaN where it is not known.
        n_lost: computed positions whose readouts were lost.
        n_adapted: requests left out, since an adapter changed the weights.
    """

    runs: npt.NDArray[np.str_]
    requests: Ints
    names: npt.NDArray[np.str_]
    of: Ints
    position: Ints
    depth: Ints
    readouts: npt.NDArray[np.float32]
    role: npt.NDArray[np.str_]
    entropy: Floats
    n_lost: int
    n_adapted: int

    def only(self, chosen: Bools) -> Rows:
        """Return the rows that are chosen ``(n,)``, of the same requests."""
        names = ("of", "position", "depth", "readouts", "role", "entropy")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    def lengths(self) -> Ints:
        """Return rows of the answer of each request, ``(n_requests,)``."""
        return np.bincount(self.of[self.depth >= 0], minlength=len(self.requests))


def read_rows(dataset: Dataset, hooks: Sequence[str]) -> Rows:
    """Return the rows with readouts of all hooks.

    Raises:
        ActdsError: E014 a run without readouts.
    """
    parts = [_of_run(dataset, run, hooks) for run in dataset.catalog.run_ids]
    starts = np.cumsum([0, *(len(part.requests) for part in parts)])
    parts = [replace(p, of=p.of + start) for p, start in zip(parts, starts, strict=False)]
    columns = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
    return Rows(
        **{name: sum(column) for name, column in columns.items() if name in _COUNTS},
        **{name: np.concatenate(c) for name, c in columns.items() if name not in _COUNTS},
    )


def _of_run(dataset: Dataset, run: str, hooks: Sequence[str]) -> Rows:
    catalog = dataset.catalog
    served = catalog.table("requests", run)
    served = served.filter(is_served(served)).sort_by("request")
    plain = served.filter(pc.is_null(served["adapter"]))
    requests = plain["request"].to_numpy().astype(np.int64)
    table = catalog.table("readouts", run)
    if not table.num_rows or not len(requests):
        expected = "a run with readouts"
        raise ActdsError("E014", dataset.path, got=f"none in run {run}", expected=expected)
    by_hook = [_of_hook(table.filter(pc.equal(table["hook"], hook))) for hook in hooks]
    keys = by_hook[0][0]
    for known, _ in by_hook[1:]:
        keys = np.intersect1d(keys, known)
    numbers = [values[np.searchsorted(known, keys)] for known, values in by_hook]
    request, position = split_key(keys)
    of = np.searchsorted(requests, request)
    here = requests[np.minimum(of, len(requests) - 1)] == request
    of, request, position = of[here], request[here], position[here]
    role = Roles(catalog.table("roles", run)).of(request, position)
    entropy = Sampled(catalog.table("sampled", run)).after("entropy", request, position)
    drops = catalog.table("drops", run)
    drops = drops.filter(pc.equal(drops["drop_reason"], READOUTS_FULL))
    return Rows(
        np.full(len(requests), run),
        requests,
        np.array(plain["external_id"].to_pylist(), dtype=np.str_),
        of,
        position,
        position - plain["prompt_len"].to_numpy().astype(np.int64)[of],
        np.stack(numbers, axis=1)[here],
        np.array(role.fill_null("").to_pylist(), dtype=np.str_),
        entropy.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False),
        int(pc.sum(pc.subtract(drops["stop"], drops["start"])).as_py() or 0),
        served.num_rows - plain.num_rows,
    )


def _of_hook(table: pa.Table) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
    keys = position_key(table["request"].to_numpy(), table["position"].to_numpy())
    n = table.num_rows
    columns = [table["norm"].to_numpy().reshape(n, 1)]
    for name in ("projections", "probes"):
        values = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        columns.append(values.reshape(n, len(values) // max(n, 1)))
    # What was computed again after a preemption was looked at before.
    keys, first = np.unique(keys, return_index=True)
    return keys, np.concatenate(columns, axis=1)[first].astype(np.float32)


@dataclass(frozen=True)
class Looks:
    """The looks at rows, and what they come to.

    Args:
        rows: those that were looked at, in the order of the rows of each request.
        windows: that end at each, ``(n, size)``, NaN in openings; none unless they were asked for.
        scores: of its request after it, ``(n,)``; they never fall.
        kind: which of KINDS made the score, ``(n,)``.
        peaks: of each request ``(n_requests, 2)``; 0 without a look.
    """

    rows: Rows
    windows: Floats
    scores: Floats
    kind: Ints
    peaks: Floats

    @property
    def last(self) -> Floats:
        """Return the score of each request, ``(n_requests,)``; 0 without a look."""
        last = np.zeros(len(self.rows.requests))
        np.maximum.at(last, self.rows.of, self.scores)
        return last

    def first_above(self, threshold: float) -> dict[int, int]:
        """Return by request its first look with a score above, as a row of ``rows``."""
        above = np.flatnonzero(self.scores > threshold)
        of, at = np.unique(self.rows.of[above], return_index=True)
        return dict(zip(of.tolist(), above[at].tolist(), strict=True))


def score(profile: Profile, rows: Rows, *, keep_windows: bool = False) -> Looks:
    """Look at the rows of a dataset as a server would while it computes them."""
    rows = rows.only(profile.look.rows(rows.depth, rows.entropy))
    numbers = features(rows.readouts)
    n, state = len(rows.of), Trajectories(profile)
    windows = np.zeros((n if keep_windows else 0, len(profile.spread[0])))
    peaks = np.zeros((n, len(KINDS)))
    for batch in turns(rows.of):
        keys = rows.of[batch].tolist()
        ending = state.add(keys, numbers[batch], rows.depth[batch])
        if keep_windows:
            windows[batch] = ending
        peaks[batch] = state.peaks(keys)
    last = np.zeros((len(rows.requests), len(KINDS)))
    np.maximum.at(last, rows.of, peaks)
    return Looks(rows, windows, profile.combined(peaks), profile.rarer(peaks), last)


# ---- fitting


def profile(
    dataset: str | os.PathLike[str] | Dataset,
    *,
    hooks: Sequence[str] = (),
    alpha: float = 0.05,
    every: int = 4,
    above: float | None = None,
    share: float = 1.0,
    calibration: float = 0.25,
    check: float = 0.25,
    seed: int = 0,
) -> Profile:
    """Return the profile of the regime in which a sealed dataset was served.

    Args:
        dataset: path or URI, or an open one, with readouts.
        hooks: whose readouts count; all by default.
        alpha: promised rate of false alarms per request.
        every: decode steps from one look at a trajectory to the next.
        above: look only where the logits have this entropy or more, in nats.
        share: of later requests, chosen by hash, that are looked at at all.
        calibration: share of the requests that only set the threshold.
        check: share that only show the rate that is kept.
        seed: of the choice of these requests, and of the hash.

    Raises:
        ActdsError: E009 an argument out of range; E014 no such hook, no readouts, or no entropy;
            E024 runs of several regimes, or one that is not recorded; and as ``actds.open``.
    """
    parts = {"alpha": alpha, "calibration": calibration, "check": check}
    for name, value in parts.items():
        if not 0 < value < 1 or (name != "alpha" and calibration + check >= 1):
            expected = "above 0 and below 1, and requests left for the fit"
            raise ActdsError("E009", name, got=str(value), expected=expected)
    opened = dataset if isinstance(dataset, Dataset) else open_apart(os.fspath(dataset))
    for hook in hooks:
        opened.shards_of(hook)
    if any(interventions_of(record) for record in opened.runs.values()):
        got, expected = "rows that interventions changed", "a harvest without interventions"
        raise ActdsError("E024", opened.path, got=got, expected=expected)
    names = sorted(hooks or opened.hooks)
    look = Look(every=every, above=above, share=share, salt=str(seed))
    rows = read_rows(opened, names)
    need_entropy(opened, look, rows)
    origin = {
        "dataset": opened.catalog.genesis.dataset,
        "digest": opened.digest,
        "regime": regime_in(opened, names),
        "hooks": names,
    }
    made = fit(rows, origin, look, alpha, (calibration, check), seed)
    if (nbytes := len(made.as_bytes())) > MAX_DOCUMENT_NBYTES:
        expected = f"{MAX_DOCUMENT_NBYTES:,} at most: fewer hooks, or a harvest with fewer probes"
        raise ActdsError("E009", "hooks", got=f"a profile of {nbytes:,} bytes", expected=expected)
    return made


def fit(
    rows: Rows,
    origin: Mapping[str, Any],
    look: Look,
    alpha: float,
    shares: tuple[float, float],
    seed: int,
) -> Profile:
    """Return the profile of rows.

    Args:
        origin: ``dataset``, ``digest``, ``regime`` and ``hooks`` of the profile.
        shares: of the requests, for the threshold alone, and for the rate that is kept alone.
    """
    n = len(rows.requests)
    order = np.random.default_rng(seed).permutation(n)
    n_reserved, n_check = (round(n * share) for share in shares)
    reserved, checked, fitted = np.split(order, [n_reserved, n_reserved + n_check])
    # How rare a peak is, is said by requests that the moments did not see: each fold by the others.
    of_folds, has_openings = [], True
    for k in range(_N_FOLDS):
        rest = np.delete(fitted, np.s_[k::_N_FOLDS])
        fold = _fitted(origin, look, rows.only(_among(rows, rest)))
        looks = score(fold, rows.only(_among(rows, fitted[k::_N_FOLDS])))
        of_folds.append(looks.peaks[np.unique(looks.rows.of)])
        has_openings &= ("opening", None) in fold.parts
    peaks = np.concatenate(of_folds)
    bare = _fitted(origin, look, rows.only(_among(rows, fitted)))
    cells = [cell for cell in bare.cells if has_openings or cell.phase != "opening"]
    scores = [Tail.of(peaks[:, k]) for k in range(len(KINDS))]
    bare = _with(bare, cells=cells, scores=scores)
    last = score(bare, rows.only(~_among(rows, fitted))).last
    threshold = Calibration.of(last[reserved], alpha)
    made = _with(bare, calibration=threshold)
    seen = score(made, rows.only(_among(rows, checked)))
    return _with(made, kept=kept(seen, checked, rows.lengths(), threshold))


def _with(profile: Profile, **fields: Any) -> Profile:
    """Return a profile with other fields; a copy would keep what was worked out of the old ones."""
    names = Profile.model_fields.keys() - {"schema_"}
    return Profile(**{name: getattr(profile, name) for name in names} | fields)


def need_entropy(dataset: Dataset, look: Look, rows: Rows) -> None:
    if look.above is not None and np.isnan(rows.entropy).all():
        expected = "a dataset that was written with entropy=True"
        raise ActdsError("E014", dataset.path, got="entropy of no row", expected=expected)


def _among(rows: Rows, requests: Ints) -> Bools:
    chosen = np.zeros(len(rows.requests), bool)
    chosen[requests] = True
    return np.asarray(chosen[rows.of])


def _fitted(origin: Mapping[str, Any], look: Look, rows: Rows) -> Profile:
    rows = rows.only((rows.position > 0) & np.isfinite(rows.readouts).all(axis=(1, 2)))
    numbers = features(rows.readouts)
    seen = look.model_copy(update={"every": 1}).rows(rows.depth, rows.entropy) & (rows.depth >= 0)
    if not seen.any():
        got, expected = "none in the requests of the fit", "answers with rows to look at"
        raise ActdsError("E014", f"dataset {origin['dataset']}", got=got, expected=expected)
    in_prompt = rows.depth < 0
    prompts: dict[str | None, Bools] = {None: in_prompt}
    prompts |= {role: in_prompt & (rows.role == role) for role in sorted({*rows.role} - {""})}
    cells = [
        *_cells("decode", None, rows.depth, numbers, rows.of, seen),
        *_openings(rows.depth, numbers, rows.of),
        *(
            cell
            for role, chosen in prompts.items()
            for cell in _cells("prefill", role, rows.position, numbers, rows.of, chosen)
        ),
    ]
    flat = numbers[seen].reshape(int(seen.sum()), -1)
    low, center, high = np.quantile(flat, QUANTILES[1:4], axis=0)
    bare = Profile(
        **origin,
        created_ns=time.time_ns(),
        n_requests=len(np.unique(rows.of)),
        look=look,
        cells=cells,
        spread=rounded([center, np.maximum((high - low) / 2, 1e-6)]),
        scores=[Tail(knots=[0, 1])] * len(KINDS),
        calibration=Calibration(alpha=0.5, n=0, rank=1, threshold=None),
        kept=[],
    )
    first = score(bare, rows, keep_windows=True)
    at = np.where(first.rows.depth < 0, -1, bare.cells_at(first.rows.depth))
    for k, cell in enumerate(cells[: int(at.max()) + 1]):
        # A cell with few looks has the moments of all.
        here = (at == k) if (at == k).sum() >= _LEAST_ROWS else at >= 0
        drift = _moments(first.windows[here], "drift")
        cells[k] = cell.model_copy(update={"drift": drift})
    return _with(bare, cells=cells)


def _cells(
    phase: Literal["prefill", "decode"],
    role: str | None,
    place: Ints,
    numbers: Floats,
    of: Ints,
    chosen: Bools,
) -> Iterator[Cell]:
    """Yield the cells of rows by bands of places that double; small bands join the one before."""
    if phase == "prefill" and not _are_enough(of[chosen]):
        return
    edges = [0, *(2**k for k in range(int(place[chosen].max()).bit_length() + 1))]
    starts = [0]
    for start, stop in pairwise(edges):
        here = chosen & (place >= start) & (place < stop)
        if _are_enough(of[here]):
            starts.append(start)
    starts = [0, *starts[2:]]  # the first band begins at 0, whatever joins it
    for start, stop in zip(starts, [*starts[1:], None], strict=True):
        here = chosen & (place >= start) & (place < (np.inf if stop is None else stop))
        yield _cell(
            {"phase": phase, "role": role, "start": start, "stop": stop}, numbers[here], of[here]
        )


def _openings(depth: Ints, numbers: Floats, of: Ints) -> Iterator[Cell]:
    here = [depth == start for start in range(-OPENING, 0)]
    if all(_are_enough(of[some]) for some in here):
        for start, some in zip(range(-OPENING, 0), here, strict=True):
            band = {"phase": "opening", "role": None, "start": start, "stop": start + 1}
            yield _cell(band, numbers[some].reshape(int(some.sum()), 1, -1), of[some])


def _cell(band: dict[str, Any], numbers: Floats, of: Ints) -> Cell:
    moments = [_moments(numbers[:, k], band["phase"]) for k in range(numbers.shape[1])]
    return Cell(**band, n_rows=len(of), n_requests=len(np.unique(of)), hooks=moments)


def _are_enough(of: Ints) -> bool:
    return len(of) >= _LEAST_ROWS and len(np.unique(of)) >= _LEAST_REQUESTS


def _moments(numbers: Floats, phase: str) -> RowMoments:
    """Return quantiles and moments of rows ``(n, width)``; what is far off counts as 6 spreads."""
    n, width = numbers.shape
    quantiles = rounded(np.quantile(numbers, QUANTILES, axis=0))
    part = RowMoments(quantiles=quantiles, axes=[], variance=[], rest=1.0, tail=Tail(knots=[0, 1]))
    standard = np.clip(part.standard(numbers), -6, 6)
    variance, axes = np.linalg.eigh(standard.T @ standard / n)
    most, rows_per_axis = _RANKS[phase]
    rank = min(width, most, max(1, n // rows_per_axis))
    rest = float(variance[: width - rank].mean()) if rank < width else 1.0
    made = RowMoments(
        quantiles=quantiles,
        axes=rounded(axes[:, width - rank :].T),
        variance=rounded(np.maximum(variance[width - rank :], 1e-4)),
        rest=rounded(max(rest, 1e-4)),
        tail=part.tail,
    )
    return made.model_copy(update={"tail": Tail.of(made.squared(numbers))})


def regime_in(dataset: Dataset, hooks: Sequence[str]) -> dict[str, str | None]:
    """Return the regime of all runs of a dataset.

    Raises:
        ActdsError: E024 they differ.
    """
    known = [hook for name, hook in dataset.hooks.items() if name in hooks]
    first, *more = [regime_of(record, known) for record in dataset.runs.values()]
    for other in more:
        if other != first:
            expected = "runs of one regime"
            got = ", ".join(name for name in first if first[name] != other[name])
            raise ActdsError(
                "E024", dataset.path, got=f"runs that differ in {got}", expected=expected
            )
    return first


def kept(scored: Looks, requests: Ints, lengths: Ints, threshold: Calibration) -> list[Kept]:
    """Return alerts among requests: of all, by the role of the position, by length of answer."""
    if threshold.threshold is None:
        return []
    first = scored.first_above(threshold.threshold)
    alerts = np.isin(requests, list(first))
    strata = [("all", requests, alerts)]
    for role in sorted(set(scored.rows.role) - {""}):
        seen = np.isin(requests, scored.rows.of[scored.rows.role == role])
        at = [int(r) in first and scored.rows.role[first[int(r)]] == role for r in requests]
        strata.append((f"role {role}", requests[seen], np.array(at, bool)[seen]))
    for low, high in zip(LENGTHS, [*LENGTHS[1:], None], strict=True):
        words = f"{low:,} to {high - 1:,} rows" if high else f"{low:,} rows or more"
        within = (lengths[requests] >= low) & (lengths[requests] < (high or np.inf))
        strata.append((f"answers of {words}", requests[within], alerts[within]))
    return [_rate(name, len(some), int(hits.sum())) for name, some, hits in strata if len(some)]


def _rate(stratum: str, n: int, n_alerts: int) -> Kept:
    low, high = exact_share(np.array([n_alerts]), np.array([n]), 0.95)
    return Kept(stratum=stratum, n=n, n_alerts=n_alerts, low=float(low[0]), high=float(high[0]))
