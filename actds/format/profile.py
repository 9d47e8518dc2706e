"""A profile: what the readouts of one regime are like, and how unusual later rows are beside it.

NumPy alone, row by row: who serves a model asks it as who reads a dataset does. Fitting is in
``actds_studies.monitoring``. All that is unusual is in nats, ``-log`` of the share of rows of the
fit that are as unusual: 1 on average in the regime, whatever the depth.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field

from actds.errors import ActdsError
from actds.format import canonical
from actds.format.inclusion import salt_of, uniform
from actds.format.readouts import readouts_of
from actds.format.schema import Hook, RunRecord
from actds.format.telemetry import KINDS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
SCHEMA: Literal["actds.profile/1"] = "actds.profile/1"
WINDOW = 8
"""Looks whose mean says where a trajectory is."""
MOST = 50.0
"""Nats of a row at most, and of one that is not finite."""
QUANTILES = (0.02, 0.16, 0.5, 0.84, 0.98)
LEVELS = np.array([0, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8])
"""Nats at which the tail of a statistic is kept, as far as the fit has rows for them."""
REGIME = (
    "model.weights_sha256",
    "model.quantization",
    "numerics.dtype",
    "numerics.kv_cache_dtype",
    "capture.readouts",
)
"""Fields of a run record that have to be those of the fit; ``hooks`` is one more."""
OPENING = 4
"""Last positions of a prompt: in chats these tokens are those of every request, so that rows differ
by what is before them alone. Each is a look; the answer begins after them."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Look(_Part):
    """At which rows a trajectory is looked at: the threshold holds for these alone."""

    every: int = Field(default=4, ge=1, description="decode steps from one look to the next")
    above: float | None = Field(
        default=None, ge=0, description="only rows whose logits have this entropy or more, in nats"
    )
    share: float = Field(
        default=1.0, gt=0, le=1, description="of the requests, by hash: the others are never seen"
    )
    salt: str = Field(default="0", description="of the hash")

    def requests(self, run: str, request: npt.ArrayLike) -> Bools:
        """Return which requests of a run are looked at, ``(n,)``."""
        return np.asarray(
            uniform(salt_of("look at a trajectory", self.salt, run), request) < self.share
        )

    def rows(self, depth: Ints, entropy: Floats | None = None) -> Bools:
        """Return at which rows of a request there is a look, ``(n,)``.

        Args:
            depth: position minus prompt length: below 0 in the opening, always a look.
            entropy: of the logits of the row, NaN where that is not known.
        """
        takes: Bools = (depth >= 0) & (depth % self.every == 0)
        if self.above is not None:
            takes &= False if entropy is None else entropy >= self.above
        return np.asarray(takes | ((depth < 0) & (depth >= -OPENING)))


class Tail(_Part):
    """How often a statistic is as large: its values at ``LEVELS``, from the least on."""

    knots: list[float] = Field(min_length=2)

    @classmethod
    def of(cls, values: Floats) -> Tail:
        most = max(LEVELS[1], np.log(max(len(values), 1) / 4))
        levels = LEVELS[: np.searchsorted(LEVELS, most, side="right")]
        return cls(knots=rounded(np.quantile(values, 1 - np.exp(-levels))))

    def nats(self, values: Floats) -> Floats:
        """Return how unusual values are; beyond the fit the tail goes on as it fell before."""
        knots = np.asarray(self.knots)
        levels, half = LEVELS[: len(knots)], len(knots) // 2
        nats = np.interp(values, knots, levels)
        fell = (levels[-1] - levels[half]) / max(knots[-1] - knots[half], 1e-9)
        beyond = levels[-1] + fell * np.maximum(values - knots[-1], 0)
        nats = np.where(values > knots[-1], beyond, nats)
        return np.asarray(np.where(values <= knots[0], 0, np.fmin(nats, MOST)))


class RowMoments(_Part):
    """Readouts of one hook in one cell: quantiles, and moments of low rank about the median."""

    quantiles: list[list[float]] = Field(description="at QUANTILES, of each number")
    axes: list[list[float]] = Field(description="directions of the numbers over their spread")
    variance: list[float] = Field(description="along each axis")
    rest: float = Field(gt=0, description="variance along every other direction")
    tail: Tail = Field(description="of the squared distance")

    @cached_property
    def _arrays(self) -> tuple[Floats, ...]:
        q = np.asarray(self.quantiles)
        axes = np.asarray(self.axes).reshape(-1, q.shape[1])
        return q[2], np.maximum((q[3] - q[1]) / 2, 1e-6), axes, np.asarray(self.variance)

    def standard(self, numbers: Floats) -> Floats:
        """Return numbers in spreads from the median, ``(n, width)``."""
        center, spread, _, _ = self._arrays
        return np.asarray((numbers - center) / spread)

    def squared(self, numbers: Floats) -> Floats:
        """Return the squared Mahalanobis distance of each row, ``(n,)``."""
        _, _, axes, variance = self._arrays
        standard = self.standard(numbers)
        with np.errstate(invalid="ignore"):  # what is not finite is as far as it can be
            along = standard @ axes.T
            rest = np.maximum((standard**2).sum(1) - (along**2).sum(1), 0) / self.rest
            return np.asarray((along**2 / variance).sum(1) + rest)

    def nats(self, numbers: Floats) -> Floats:
        return self.tail.nats(self.squared(numbers))


class Cell(_Part):
    """Rows of one phase, role and band of depths."""

    phase: Literal["prefill", "opening", "decode"]
    role: str | None = Field(description="of prompt positions; null for all of the phase")
    start: int = Field(
        description="first position in prefill; else first depth, from the answer on"
    )
    stop: int | None = Field(description="the one after the last; null for no end")
    n_rows: int
    n_requests: int
    hooks: list[RowMoments] = Field(description="in the order of the profile's hooks")
    drift: RowMoments | None = Field(
        default=None,
        description="of the last 8 rows, all hooks: their sum over root of their number",
    )


class Calibration(_Part):
    """The threshold, from requests of which the fit saw nothing."""

    alpha: float = Field(gt=0, lt=1, description="promised rate of false alarms per request")
    n: int = Field(ge=0, description="held-out requests")
    rank: int = Field(description="of the threshold among their scores, from the least")
    threshold: float | None = Field(description="null: too few requests, undecided")

    @classmethod
    def of(cls, scores: Floats, alpha: float) -> Calibration:
        """Return the split-conformal threshold (Vovk et al. 2005): P(score above) <= alpha."""
        n = len(scores)
        # The sum is off by parts in 10^16, and 0.05 * 20 has to be 1.
        rank = int(np.ceil((n + 1) * (1 - alpha) - 1e-9))
        # A billionth more: the last bits of a score depend on how many rows were scored at once.
        threshold = float(np.sort(scores)[rank - 1]) * (1 + 1e-9) if rank <= n else None
        return cls(alpha=alpha, n=n, rank=rank, threshold=threshold)


class Kept(_Part):
    """Alerts among requests that neither fit nor threshold saw."""

    stratum: str = Field(description="all, or a role or a length")
    n: int = Field(description="requests")
    n_alerts: int
    low: float = Field(description="of the 95 % interval of Clopper and Pearson for the rate")
    high: float


class Profile(_Part):
    """What readouts are like in one regime, and the threshold from which a trajectory left it."""

    schema_: Literal["actds.profile/1"] = Field(default=SCHEMA, alias="schema")
    created_ns: int
    dataset: str = Field(description="id of the dataset of the fit")
    digest: str = Field(description="of its seal")
    regime: dict[str, str | None] = Field(description="fields that later rows have to have")
    hooks: list[str]
    n_requests: int = Field(description="of the fit")
    look: Look
    cells: list[Cell]
    spread: list[list[float]] = Field(description="median and spread of each number in decode")
    scores: list[Tail] = Field(description="of the trajectories of the fit, by KINDS")
    calibration: Calibration
    kept: list[Kept]

    def as_bytes(self) -> bytes:
        """Return the file: JSON of sorted keys without white space."""
        return _encoded(self.model_dump(by_alias=True))

    @computed_field(description="of the file without this field")  # type: ignore[prop-decorator]
    @cached_property
    def sha256(self) -> str:
        fields = self.model_dump(by_alias=True, exclude={"sha256"})
        return hashlib.sha256(_encoded(fields)).hexdigest()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Return the profile in a file.

        Raises:
            ActdsError: E024 it is none, or was changed.
        """
        place = str(path)
        try:
            data = canonical.read_bounded(Path(path))
        except OSError as error:
            expected = "a profile that actds profile wrote"
            raise ActdsError("E024", place, got=str(error), expected=expected) from None
        return cls.parse(data, place)

    @classmethod
    def parse(cls, data: bytes, place: str) -> Self:
        """Return the profile of bytes; raises as ``read``."""
        try:
            fields = json.loads(data)
            digest = fields.pop("sha256")
            profile = cls.model_validate(fields)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            got = str(error.errors()[0]) if isinstance(error, ValidationError) else str(error)
            expected = "a profile that actds profile wrote"
            raise ActdsError("E024", place, got=got[:300], expected=expected) from None
        if profile.sha256 != digest:
            got = f"content of digest {profile.sha256[:16]}"
            raise ActdsError("E024", place, got=got, expected=str(digest)[:16])
        return profile

    def differences(self, regime: Mapping[str, str | None]) -> list[str]:
        """Return in what a regime is another one; what nobody recorded is not the same."""
        return [
            f"{name} {_brief(regime.get(name))}, in the profile {_brief(value)}"
            for name, value in self.regime.items()
            if value is None or regime.get(name) != value
        ]

    def require(self, regime: Mapping[str, str | None], place: str) -> None:
        """Refuse rows of another regime than that of the fit.

        Raises:
            ActdsError: E024.
        """
        if wrong := self.differences(regime):
            expected = "the weights, hooks, readouts and precision of the profile"
            raise ActdsError("E024", place, got="; ".join(wrong), expected=expected)

    @cached_property
    def _by_part(self) -> dict[tuple[str, str | None], list[Cell]]:
        parts: dict[tuple[str, str | None], list[Cell]] = {}
        for cell in self.cells:
            parts.setdefault((cell.phase, cell.role), []).append(cell)
        return parts

    @property
    def parts(self) -> list[tuple[str, str | None]]:
        """Return phases and roles that have cells; no role is all of a phase."""
        return list(self._by_part)

    def cells_at(self, place: Ints, phase: str = "decode", role: str | None = None) -> Ints:
        """Return which of the cells of a phase and role each place is in, ``(n,)``."""
        starts = [cell.start for cell in self._by_part[phase, role]]
        return np.maximum(np.searchsorted(starts, place, side="right") - 1, 0)

    def distances(
        self, numbers: Floats, place: Ints, phase: str = "decode", role: str | None = None
    ) -> Floats:
        """Return how unusual rows are at their place, in nats: the mean over hooks ``(n,)``.

        Args:
            numbers: of ``features``.
            place: in prefill the position; else the depth, position minus prompt length.
            phase: of the cells that they are compared with.
            role: of these, one of ``parts``.
        """
        cells, at = self._by_part[phase, role], self.cells_at(place, phase, role)
        if phase == "opening":
            numbers = numbers.reshape(len(numbers), 1, -1)
        nats = np.zeros(len(numbers))
        for number in np.unique(at).tolist():
            here = at == number
            hooks = enumerate(cells[number].hooks)
            nats[here] = np.mean([m.nats(numbers[here, k]) for k, m in hooks], axis=0)
        return nats

    def drifts(self, window: Floats, depth: Ints) -> Floats:
        """Return how unusual windows of the last rows are at their depth, in nats, ``(n,)``.

        Args:
            window: what `Cell.drift` is of, ``(n, size)``.
            depth: of the last row, ``(n,)``.
        """
        nats, at = np.zeros(len(depth)), self.cells_at(depth)
        for number in np.unique(at).tolist():
            here, moments = at == number, self._by_part["decode", None][number].drift
            if moments is not None:
                nats[here] = moments.nats(window[here])
        return nats

    def standard(self, numbers: Floats) -> Floats:
        """Return numbers of all hooks in spreads of all of decode, ``(n, size)``."""
        center, spread = np.asarray(self.spread)
        flat = numbers.reshape(len(numbers), len(center))
        return np.asarray(np.nan_to_num(np.clip((flat - center) / spread, -6, 6), nan=np.inf))

    def combined(self, peaks: Floats) -> Floats:
        """Return the scores of trajectories from their peaks ``(n, 2)``: of KINDS the rarer."""
        return np.asarray(np.max(self._nats(peaks), axis=0))

    def rarer(self, peaks: Floats) -> Ints:
        """Return which of KINDS made the score, ``(n,)``."""
        return np.asarray(np.argmax(self._nats(peaks), axis=0))

    def _nats(self, peaks: Floats) -> list[Floats]:
        return [tail.nats(peaks[:, k]) for k, tail in enumerate(self.scores)]


class Trajectories:
    """The scores of requests while they are served: each look moves that of its request.

    The state is the last 8 rows and the nats of the opening, 1 each before they are known: that is
    an ordinary row. Peaks are the largest drift and the mean of the opening so far, and the score
    is that of the rarer peak. It never falls: an alert at any step is one at the end, so that the
    threshold of whole answers holds at any time.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._slots: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._state = self._new(0)

    def __len__(self) -> int:
        return len(self._slots)

    def look(self, requests: Sequence[Hashable], readouts: npt.ArrayLike, depth: Ints) -> Floats:
        """Return the scores of requests after a row of each, float64 ``(n,)``.

        Args:
            requests: any key of each, none twice.
            readouts: of the rows, ``(n, n_hooks, 1 + products)``.
            depth: position of each minus its prompt length, ``(n,)``.
        """
        self.add(requests, features(readouts), depth)
        return self.scores(requests)

    def add(self, requests: Sequence[Hashable], numbers: Floats, depth: Ints) -> Floats:
        """Take a look at a row of each request; return the windows ``(n, size)``, of answers."""
        slots = np.array([self._slot(key) for key in requests], np.int64)
        rows, count, openings, peaks = self._state  # a new slot may have made them anew
        opening, begun = (depth < 0) & (depth >= -OPENING), depth >= 0
        if opening.any() and ("opening", None) in self._profile.parts:
            at, place = slots[opening], depth[opening]
            openings[at, place] = self._profile.distances(numbers[opening], place, "opening")
            peaks[at, 1] = np.maximum(peaks[at, 1], openings[at].mean(axis=1))
        at, n = slots[begun], count[slots[begun]]
        rows[at, n % WINDOW] = self._profile.standard(numbers[begun])
        windows = np.full((len(slots), rows.shape[2]), np.nan)
        windows[begun] = rows[at].sum(axis=1) / np.sqrt(np.minimum(n + 1, WINDOW))[:, None]
        drifts = self._profile.drifts(windows[begun], depth[begun])
        peaks[at, 0] = np.maximum(peaks[at, 0], drifts)
        count[at] += 1
        return windows

    def peaks(self, requests: Sequence[Hashable]) -> Floats:
        """Return the peaks so far, ``(n, 2)``, by KINDS."""
        return np.asarray(self._state[-1][[self._slots[key] for key in requests]])

    def scores(self, requests: Sequence[Hashable]) -> Floats:
        """Return the scores so far, ``(n,)``."""
        return self._profile.combined(self.peaks(requests))

    def end(self, request: Hashable) -> None:
        """Forget a request."""
        if request in self._slots:
            self._free.append(self._slots.pop(request))

    def _slot(self, key: Hashable) -> int:
        if key in self._slots:
            return self._slots[key]
        if not self._free:
            n = len(self._state[0])
            new = self._new(max(64, n))
            self._free = list(range(n + len(new[0]) - 1, n - 1, -1))
            self._state = tuple(map(np.concatenate, zip(self._state, new, strict=True)))
        slot = self._slots[key] = self._free.pop()
        for part, empty in zip(self._state, self._new(1), strict=True):
            part[slot] = empty[0]
        return slot

    def _new(self, n: int) -> tuple[npt.NDArray[Any], ...]:
        """Return the state of requests before a look: rows, looks, openings, peaks."""
        rows, looks = np.zeros((n, WINDOW, len(self._profile.spread[0]))), np.zeros(n, np.int64)
        return rows, looks, np.ones((n, OPENING)), np.zeros((n, len(KINDS)))


def turns(of: Ints) -> Iterator[Ints]:
    """Yield the first rows of all requests, then their second ones, and so on.

    Args:
        of: request of each row, ``(n,)``.
    """
    order = np.argsort(of, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(of[order]) != 0])
    turn = np.empty(len(of), np.int64)
    turn[order] = np.arange(len(of)) - np.repeat(starts, np.diff(np.r_[starts, len(of)]))
    by_turn = np.argsort(turn, kind="stable")
    yield from np.split(by_turn, np.cumsum(np.bincount(turn))[:-1] if len(of) else [])


def features(readouts: npt.ArrayLike) -> Floats:
    """Return the numbers that are compared, float64: log norm, and products at length 1.

    Args:
        readouts: ``(n, n_hooks, 1 + products)`` as the table has them, hooks as the profile's.
    """
    numbers = np.asarray(readouts, np.float64)
    norm = numbers[..., :1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.concatenate([np.log(norm), numbers[..., 1:] / norm], axis=-1)


def regime_of(record: RunRecord, hooks: Sequence[Hook]) -> dict[str, str | None]:
    """Return what rows of a run are rows of: weights, precision, readouts and hooks."""
    values = {name: record.fields[name].value for name in REGIME if name in record.fields}
    regime = {name: None if (v := values.get(name)) is None else str(v) for name in REGIME}
    if readouts_of(record) is None:
        regime["capture.readouts"] = None
    named = [[hook.name, hook.kind, hook.d_model, hook.dtype] for hook in hooks]
    return {**regime, "hooks": json.dumps(sorted(named))}


def rounded(values: npt.ArrayLike) -> Any:
    """Return numbers as nested lists, with seven digits: what a file holds."""
    array = np.asarray(values, np.float64)
    return np.array([float(f"{v:.7g}") for v in array.ravel()]).reshape(array.shape).tolist()


def _brief(value: str | None) -> str:
    return "not recorded" if value is None else value if len(value) <= 40 else f"{value[:16]}…"


def _encoded(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"
