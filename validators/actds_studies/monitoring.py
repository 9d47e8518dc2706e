"""Profiles of a regime and the alerts of a dataset beside one: fit, threshold, scores, result."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from actds.errors import ActdsError
from actds.explore.dataset import Dataset, open_apart
from actds.explore.requests import Tokenizer
from actds.format.positions import position_key
from actds.format.profile import (
    KINDS,
    QUANTILES,
    Bools,
    Calibration,
    Cell,
    Floats,
    Ints,
    Kept,
    Look,
    Moments,
    Profile,
    Tail,
    Trajectories,
    features,
    regime_of,
    rounded,
)
from actds.format.roles import Roles
from actds.format.sampled import Sampled
from actds.format.tables import READOUTS_FULL, is_served
from actds_validators.sections import Document, LimitsSection, Section
from actds_validators.statistics.design import exact_share

LENGTHS = (1, 17, 65, 257, 1025)
"""First answer lengths, in rows, of the strata by length."""
AROUND = 24
"""Tokens of text on either side of an alert."""
_RANK, _ROWS_PER_AXIS, _LEAST_ROWS, _LEAST_REQUESTS = 32, 20, 200, 20
_N_PATHS = 8


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

    runs: list[str]
    requests: Ints
    names: list[str]
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
    shifted = [replace(p, of=p.of + start) for p, start in zip(parts, starts, strict=False)]
    return Rows(
        [run for part in parts for run in part.runs],
        np.concatenate([part.requests for part in parts]),
        [name for part in parts for name in part.names],
        *(
            np.concatenate([getattr(part, name) for part in shifted])
            for name in ("of", "position", "depth", "readouts", "role", "entropy")
        ),
        sum(part.n_lost for part in parts),
        sum(part.n_adapted for part in parts),
    )


def _of_run(dataset: Dataset, run: str, hooks: Sequence[str]) -> Rows:
    catalog = dataset.catalog
    served = catalog.table("requests", run)
    served = served.filter(is_served(served)).sort_by("request")
    plain = served.filter(pc.is_null(served["adapter"]))
    requests = plain["request"].to_numpy().astype(np.int64)
    table = catalog.table("readouts", run)
    if not table.num_rows or not len(requests):
        expected = "a run with readouts: actds write --readouts"
        raise ActdsError("E014", dataset.path, got=f"none in run {run}", expected=expected)
    by_hook = [_of_hook(table.filter(pc.equal(table["hook"], hook))) for hook in hooks]
    keys = by_hook[0][0]
    for others, _ in by_hook[1:]:
        keys = np.intersect1d(keys, others)
    numbers = [values[np.searchsorted(known, keys)] for known, values in by_hook]
    request, position = (keys >> np.uint64(32)).astype(np.int64), keys & np.uint64(0xFFFFFFFF)
    of = np.searchsorted(requests, request)
    known = requests[np.minimum(of, len(requests) - 1)] == request
    of, request, position = of[known], request[known], position[known].astype(np.int64)
    entropy = Sampled(catalog.table("sampled", run)).after("entropy", request, position)
    drops = catalog.table("drops", run)
    drops = drops.filter(pc.equal(drops["drop_reason"], READOUTS_FULL))
    return Rows(
        [run] * len(requests),
        requests,
        plain["external_id"].to_pylist(),
        of,
        position,
        position - plain["prompt_len"].to_numpy().astype(np.int64)[of],
        np.stack(numbers, axis=1)[known],
        np.array(_roles(catalog.table("roles", run), request, position), dtype="<U11"),
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
    order = np.argsort(keys, kind="stable")
    return keys[order], np.concatenate(columns, axis=1)[order].astype(np.float32)


def _roles(table: pa.Table, request: Ints, position: Ints) -> list[str]:
    return Roles(table).of(request, position).fill_null("").to_pylist()


@dataclass(frozen=True)
class Scored:
    """The looks at rows, and what they come to.

    Args:
        rows: those that were looked at, in the order of the rows of each request.
        nearness: of each, ``(n,)``.
        scores: of its request after it, ``(n,)``; they never fall.
        kind: which of KINDS made the score, ``(n,)``.
        peaks: of each request ``(n_requests, 2)``; 0 without a look.
    """

    rows: Rows
    nearness: Floats
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


def score(profile: Profile, rows: Rows) -> Scored:
    """Look at the rows of a dataset as a server would while it computes them."""
    rows = rows.only(profile.look.rows(rows.depth, rows.entropy))
    numbers = features(rows.readouts)
    n, state = len(rows.of), Trajectories(profile)
    nearness, peaks = np.zeros(n), np.zeros((n, len(KINDS)))
    for batch in _turns(rows.of):
        keys = rows.of[batch].tolist()
        _, nearness[batch] = state.add(keys, numbers[batch], rows.depth[batch])
        peaks[batch] = state.peaks(keys)
    last = np.zeros((len(rows.requests), len(KINDS)))
    np.maximum.at(last, rows.of, peaks)
    kind = np.argmax([t.nats(peaks[:, k]) for k, t in enumerate(profile.scores)], axis=0)
    return Scored(rows, nearness, profile.combined(peaks), kind, last)


def _turns(of: Ints) -> Iterator[Ints]:
    """Yield the first rows of all requests, then their second ones, and so on."""
    order = np.argsort(of, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(of[order]) != 0])
    turn = np.empty(len(of), np.int64)
    turn[order] = np.arange(len(of)) - np.repeat(starts, np.diff(np.r_[starts, len(of)]))
    by_turn = np.argsort(turn, kind="stable")
    yield from np.split(by_turn, np.cumsum(np.bincount(turn))[:-1] if len(of) else [])


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
    names = sorted(hooks or opened.hooks)
    look = Look(every=every, above=above, share=share, salt=str(seed))
    rows = read_rows(opened, names)
    _need_entropy(opened, look, rows)
    origin = {
        "dataset": opened.catalog.genesis.dataset,
        "digest": opened.digest,
        "regime": regime_in(opened, names),
        "hooks": names,
    }
    return fit(rows, origin, look, alpha, (calibration, check), seed)


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
    n_held, n_check = (round(n * share) for share in shares)
    held, checked, fitted = np.split(order, [n_held, n_held + n_check])
    bare = _fitted(origin, look, rows.only(_among(rows, fitted)))
    last = score(bare, rows.only(~_among(rows, fitted))).last
    threshold = Calibration.of(last[held], alpha)
    made = _with(bare, calibration=threshold)
    kept = _kept(score(made, rows.only(_among(rows, checked))), checked, rows.lengths(), threshold)
    return _with(made, kept=kept)


def _with(profile: Profile, **fields: Any) -> Profile:
    """Return a profile with other fields; a copy would keep what was worked out of the old ones."""
    names = Profile.model_fields.keys() - {"schema_"}
    return Profile(**{name: getattr(profile, name) for name in names} | fields)


def _need_entropy(dataset: Dataset, look: Look, rows: Rows) -> None:
    if look.above is not None and np.isnan(rows.entropy).all():
        expected = "a dataset that was written with --entropy"
        raise ActdsError("E014", dataset.path, got="entropy of no row", expected=expected)


def _among(rows: Rows, requests: Ints) -> Bools:
    chosen = np.zeros(len(rows.requests), bool)
    chosen[requests] = True
    return np.asarray(chosen[rows.of])


def _fitted(origin: Mapping[str, Any], look: Look, rows: Rows) -> Profile:
    """Return the profile of rows; its threshold is not set."""
    rows = rows.only((rows.position > 0) & np.isfinite(rows.readouts).all(axis=(1, 2)))
    numbers = features(rows.readouts)
    seen = look.model_copy(update={"every": 1}).rows(rows.depth, rows.entropy)
    if not seen.any():
        got, expected = "none in the requests of the fit", "answers with rows to look at"
        raise ActdsError("E014", f"dataset {origin['dataset']}", got=got, expected=expected)
    cells = [
        *_cells("decode", None, rows.depth, numbers, rows.of, seen),
        *(
            cell
            for role in (None, *sorted(set(rows.role[rows.depth < 0]) - {""}))
            for cell in _cells(
                "prefill", role, rows.position, numbers, rows.of,
                (rows.depth < 0) & (True if role is None else rows.role == role),
            )
        ),
    ]  # fmt: skip
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
    first = score(bare, rows)
    at = bare.cells_at(first.rows.depth)
    decode = sum(cell.phase == "decode" for cell in cells)
    near = [first.nearness[at == k] for k in range(decode)]
    # A cell with few looks has the tail of all.
    backs = [Tail.of(some if len(some) >= _LEAST_ROWS else first.nearness) for some in near]
    cells[:decode] = [
        cell.model_copy(update={"back": back})
        for cell, back in zip(cells[:decode], backs, strict=True)
    ]
    bare = _with(bare, cells=cells)
    peaks = score(bare, rows).peaks[np.unique(rows.of)]
    return _with(bare, scores=[Tail.of(peaks[:, k]) for k in range(len(KINDS))])


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
        moments = [_moments(numbers[here, k]) for k in range(numbers.shape[1])]
        n_requests = len(np.unique(of[here]))
        yield Cell(
            phase=phase, role=role, start=start, stop=stop, n_rows=int(here.sum()),
            n_requests=n_requests, hooks=moments,
        )  # fmt: skip


def _are_enough(of: Ints) -> bool:
    """Return whether rows of these requests are enough for a cell."""
    return len(of) >= _LEAST_ROWS and len(np.unique(of)) >= _LEAST_REQUESTS


def _moments(numbers: Floats) -> Moments:
    """Return quantiles and moments of rows ``(n, width)``; what is far off counts as 6 spreads."""
    n, width = numbers.shape
    quantiles = rounded(np.quantile(numbers, QUANTILES, axis=0))
    part = Moments(quantiles=quantiles, axes=[], variance=[], rest=1.0, tail=Tail(knots=[0, 1]))
    standard = np.clip(part.standard(numbers), -6, 6)
    variance, axes = np.linalg.eigh(standard.T @ standard / n)
    rank = min(width, _RANK, max(1, n // _ROWS_PER_AXIS))
    rest = float(variance[: width - rank].mean()) if rank < width else 1.0
    made = Moments(
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


def _kept(scored: Scored, requests: Ints, lengths: Ints, threshold: Calibration) -> list[Kept]:
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


# ---- alerts


class AlertLimits(LimitsSection):
    """The settings of what is said of a rate of alerts."""

    options: ClassVar = frozenset[str]()

    p: float = Field(
        default=0.01, gt=0, lt=1, description="chance of as many alerts in the regime: departed"
    )


class Alert(Section):
    """A request whose trajectory left the regime."""

    run: str
    request: int
    external_id: str
    position: int = Field(description="of the row after which its score was first above")
    depth: int = Field(description="the same, from the end of the prompt")
    role: str = Field(description="of the position, empty where it is not known")
    kind: Literal["distance", "return"] = Field(
        description="what was rare: far from the rows of its depth, or back at earlier rows"
    )
    score: float = Field(description="at the end, in nats")
    before: str = Field(description="text up to the position, or tokens without a tokenizer")
    after: str = Field(description="the text that follows")


class Unusual(Section):
    """How unusual rows are beside those of the profile, in nats: 0.69 and 3.0 in the regime."""

    name: str = Field(description="phase, and role of a prompt")
    n_rows: int
    median: float
    high: float = Field(description="of 95 % of the rows no more")


class Trace(Section):
    """Scores of a request by depth."""

    request: int
    depth: list[int]
    score: list[float]


class Answer(Section):
    """What the alerts come to."""

    outcome: Literal["in the regime", "departed", "undecided"]
    words: str
    next_steps: list[str]


class Alerts(Document):
    """Requests whose readouts left the regime of a profile."""

    schema_: Literal["actds.alerts/1"] = Field(default="actds.alerts/1", alias="schema")
    path: str
    digest: str = Field(description="of the dataset's seal")
    profile: str = Field(description="SHA-256 of the profile")
    profile_dataset: str
    profile_digest: str = Field(description="of the seal of the profile's dataset")
    profile_created_ns: int
    hooks: list[str]
    look: Look
    limits: AlertLimits
    calibration: Calibration
    promised: list[Kept] = Field(description="of requests of the profile's dataset")
    differences: list[str] = Field(description="from the profile's regime, accepted by the caller")
    n_requests: int
    n_seen: int = Field(description="of these, chosen to be looked at")
    n_blind: int = Field(description="of these, without a look: too short, or no entropy as high")
    n_adapted: int = Field(description="left out, since an adapter changed the weights")
    n_looks: int
    n_lost: int = Field(description="positions without readouts, which no look was at")
    rates: list[Kept]
    p: float | None = Field(description="of as many alerts, were these requests of the regime")
    parts: list[Unusual]
    alerts: list[Alert]
    usual: list[tuple[int, float, float]] = Field(
        description="first depth of a band; median and 95 % of the scores of the others in it"
    )
    traces: list[Trace] = Field(description="of the requests with the highest scores")
    answer: Answer


def alerts(
    dataset: str | os.PathLike[str] | Dataset,
    profile: str | os.PathLike[str] | Profile,
    *,
    tokenizer: Tokenizer | None = None,
    other_regime: bool = False,
    limits: AlertLimits | None = None,
) -> Alerts:
    """Return which requests of a sealed dataset left the regime of a profile, and where.

    Args:
        dataset: path or URI, or an open one, with readouts.
        profile: a profile, or its file.
        tokenizer: decodes the text around an alert.
        other_regime: score rows of other weights or precision, to see how far they are: what the
            profile promises does not hold for them. Hooks and readouts have to be the same.
        limits: of what is said.

    Raises:
        ActdsError: E014 no readouts, or no entropy; E024 another regime, or no profile; and as
            ``actds.open``.
    """
    given = profile if isinstance(profile, Profile) else Profile.read(profile)
    opened = dataset if isinstance(dataset, Dataset) else open_apart(os.fspath(dataset))
    regime = regime_in(opened, given.hooks)
    differences = given.differences(regime)
    if not other_regime or any(d.startswith(("hooks", "capture.")) for d in differences):
        given.require(regime, opened.path)
    everything = read_rows(opened, given.hooks)
    _need_entropy(opened, given.look, everything)
    seen = np.concatenate(
        [
            given.look.requests(run, everything.requests[[r == run for r in everything.runs]])
            for run in dict.fromkeys(everything.runs)
        ]
    )
    scored = score(given, everything.only(seen[everything.of]))
    threshold, chosen = given.calibration, np.flatnonzero(seen)
    rates = _kept(scored, chosen, everything.lengths(), threshold)
    first = {} if threshold.threshold is None else scored.first_above(threshold.threshold)
    p = _chance(threshold, rates)
    limits = limits or AlertLimits()
    looked = np.bincount(scored.rows.of, minlength=len(seen)) > 0
    return Alerts(
        path=opened.path,
        digest=opened.digest,
        profile=given.sha256,
        profile_dataset=given.dataset,
        profile_digest=given.digest,
        profile_created_ns=given.created_ns,
        hooks=given.hooks,
        look=given.look,
        limits=limits,
        calibration=threshold,
        promised=given.kept,
        differences=differences,
        n_requests=len(seen),
        n_seen=len(chosen),
        n_blind=int((~looked[chosen]).sum()),
        n_adapted=everything.n_adapted,
        n_looks=len(scored.rows.of),
        n_lost=everything.n_lost,
        rates=rates,
        p=p,
        parts=list(_parts(given, everything)),
        alerts=[_alert(opened, scored, r, at, tokenizer) for r, at in _by_score(scored, first)],
        usual=_usual(scored, first),
        traces=[_trace(scored, r) for r in np.argsort(-scored.last)[:_N_PATHS].tolist()],
        answer=_answer(threshold, rates, p, limits),
    )


def _chance(threshold: Calibration, rates: Sequence[Kept]) -> float | None:
    """Return the chance of as many alerts or more if the requests are as those of the calibration.

    The threshold is one of their scores: the number above it is beta-binomial, which allows for the
    calibration's own chance, and holds exactly whatever the scores are.
    """
    from scipy.stats import betabinom

    if not rates:
        return None
    k, n = threshold.rank, threshold.n
    return float(betabinom.sf(rates[0].n_alerts - 1, rates[0].n, n + 1 - k, k))


def _parts(profile: Profile, rows: Rows) -> Iterator[Unusual]:
    """Yield how unusual rows are beside those of their phase and role, and answers beside prompts.

    Of prompts a part alone has rows: the prefix cache computes none.
    """
    decode = rows.depth >= 0
    for beside, role in profile.parts:
        of_prompts = beside == "prefill"
        chosen = ~decode & (rows.position > 0) if of_prompts else decode
        named = [(f"{beside} {role or ''}".strip(), chosen & (role is None or rows.role == role))]
        if of_prompts and role is None:
            named.append(("decode beside prefill", decode))
        for name, some in named:
            if some.any():
                place = (rows.position if of_prompts else rows.depth)[some]
                numbers = features(rows.readouts[some])
                nats = profile.distances(numbers, place, beside, role)
                median, high = np.quantile(nats, (0.5, 0.95)).tolist()
                yield Unusual(name=name, n_rows=len(nats), median=median, high=high)


def _by_score(scored: Scored, first: dict[int, int]) -> list[tuple[int, int]]:
    last = scored.last
    return sorted(first.items(), key=lambda item: -last[item[0]])


def _alert(
    dataset: Dataset, scored: Scored, number: int, at: int, tokenizer: Tokenizer | None
) -> Alert:
    rows = scored.rows
    run, request, position = rows.runs[number], int(rows.requests[number]), int(rows.position[at])
    places = dataset.request(request, run=run)
    start, stop = max(0, position + 1 - AROUND), position + 1 + AROUND
    if tokenizer is None:
        words = [f" {token}" for token in places.token_id[start:stop].tolist()]
    else:
        words = places.pieces(tokenizer, start, stop)
    cut = position + 1 - start
    return Alert(
        run=run,
        request=request,
        external_id=rows.names[number],
        position=position,
        depth=int(rows.depth[at]),
        role=str(rows.role[at]),
        kind=KINDS[int(scored.kind[at])],
        score=float(scored.last[number]),
        before="".join(words[:cut]),
        after="".join(words[cut:]),
    )


def _usual(scored: Scored, first: dict[int, int]) -> list[tuple[int, float, float]]:
    """Return median and 95 % of the scores of requests without an alert, by doubling depths."""
    plain = ~np.isin(scored.rows.of, list(first))
    depth, scores = scored.rows.depth[plain], scored.scores[plain]
    bands = np.where(depth > 0, 2 ** np.log2(np.maximum(depth, 1)).astype(np.int64), 0)
    return [
        (int(band), *map(float, np.quantile(scores[bands == band], (0.5, 0.95))))
        for band in np.unique(bands)
    ]


def _trace(scored: Scored, number: int) -> Trace:
    at = np.flatnonzero(scored.rows.of == number)
    depth, path = scored.rows.depth[at].tolist(), scored.scores[at].tolist()
    return Trace(request=int(scored.rows.requests[number]), depth=depth, score=path)


def _answer(
    threshold: Calibration, rates: Sequence[Kept], p: float | None, limits: AlertLimits
) -> Answer:
    if threshold.threshold is None or p is None or not rates:
        need = int(np.ceil(1 / threshold.alpha - 1 - 1e-9))
        words = f"Undecided: {threshold.n} held-out requests promise no {threshold.alpha:.3g}"
        steps = [f"Fit a profile with {need:,} held-out requests or more, or a larger alpha."]
        if threshold.threshold is not None:
            words, steps = "Undecided: no request was looked at", ["Serve more requests."]
        return Answer(outcome="undecided", words=words, next_steps=steps)
    rate = rates[0]
    shares = (
        f"{rate.n_alerts:,} of {rate.n:,} answers ({rate.n_alerts / rate.n:.1%}) left the regime, "
        f"where {threshold.alpha:.3g} are promised in it"
    )
    if p < limits.p:
        steps = [
            "Read the text of the alerts: what do they have in common?",
            "Do not apply dictionaries or probes of the regime to these answers unchecked.",
            "If this traffic is to stay, harvest it, and fit a profile and a dictionary to it.",
        ]
        return Answer(outcome="departed", words=f"Departed: {shares}", next_steps=steps)
    steps = ["Nothing: false alarms are expected at the promised rate."]
    return Answer(outcome="in the regime", words=f"In the regime: {shares}", next_steps=steps)
