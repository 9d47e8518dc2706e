"""Which share of a step's rows is stored: decided in stage 1, before any row is looked at.

Under ``thin`` the share falls from 1 to its least as the rings fill. Under a drop policy with a
reserve it is 1 while the step has room, and else the reserve's. Which rows these are is decided by
hash (``actds.format.inclusion``), so whoever knows the share of each step knows the rows.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Protocol, get_args

import numpy as np

from actds.format.inclusion import Design, Role
from actds_writers.config import HarvestSettings
from actds_writers.ipc.messages import BoolArray, FloatArray, IntArray, intervals
from actds_writers.sampling import Regime

FULL_FROM = 0.5
"""Share of the host ring up to which every row is stored."""
ROOM_FOR_STEP = 0.8
"""A step is expected to fill at most this share of the room that is left."""
GRID = 16
"""Probabilities per factor of two: few values, so that neighbouring positions share a span."""
RESERVE = 0.25
"""Share of the host ring that is kept for the rows that are stored of every step."""


class Controller(Protocol):
    """Chooses the probability of the rows of a step.

    Args:
        fill: bytes that wait in the rings, over the capacity of the host ring.
        step: bytes of the step's rows, over that capacity.
    """

    def __call__(self, fill: float, step: float) -> float: ...


class Thin:
    """Lets the probability fall evenly in its logarithm while the ring fills.

    So the share of rows changes by the same factor for each further step that waits, wherever the
    ring stands, and a lasting load of n times what the writer can take finds its balance at 1/n.
    """

    def __init__(self, minimum: float) -> None:
        self._minimum = minimum

    def __call__(self, fill: float, step: float) -> float:
        over = (fill - FULL_FROM) / (1 - FULL_FROM)
        share = self._minimum ** min(max(over, 0.0), 1.0)
        if step > 0:
            share = min(share, ROOM_FOR_STEP * max(1 - fill, 0.0) / step)
        return on_grid(share, self._minimum)


class Reserve:
    """Stores all of a step that has room outside the reserve, and a fixed share of every other."""

    def __init__(self, minimum: float) -> None:
        self._minimum = minimum

    def __call__(self, fill: float, step: float) -> float:
        return 1.0 if fill + step <= 1 - RESERVE else self._minimum


def on_grid(share: float, minimum: float) -> float:
    """Return the largest probability of the grid that is not above a share, in [minimum, 1]."""
    if share >= 1:
        return 1.0
    if share <= minimum:
        return minimum
    return max(math.exp2(math.floor(GRID * math.log2(share)) / GRID), minimum)


def controller_of(settings: HarvestSettings, design: Design) -> Controller:
    if settings.always is not None:
        return Reserve(design.minimum)
    return Thin(design.minimum) if settings.overflow == "thin" else lambda fill, step: 1.0


_ROLES = ("", *get_args(Role))


class Draws:
    """The probability of each row of a run, in the worker: step by step, in their order."""

    def __init__(self, design: Design, controller: Controller) -> None:
        self.design, self._controller = design, controller
        self._of_request: dict[int, float] = {}
        self._sampled: dict[int, tuple[int, FloatArray]] = {}
        """By request, the position of its last sampled token; entropy and scores behind it."""
        self._regimes: dict[int, tuple[Regime, np.ndarray]] = {}
        """By request; beside it, of each prompt position the place of its role in ``_ROLES``."""

    def learn(self, request: int, regime: Regime) -> None:
        """Note what rules ask of a request; before its first step."""
        places = intervals(regime.roles)
        roles = np.zeros(max((stop for _, stop, _ in places), default=0), np.int8)
        for start, stop, role in places:
            roles[start:stop] = _ROLES.index(role)
        self._regimes[request] = regime, roles

    def of_step(
        self, requests: IntArray, finished: tuple[int, ...], fill: float, step: float
    ) -> tuple[float, FloatArray]:
        """Return the probability of a step, and that of the rows of each of its requests.

        A request that is drawn whole keeps the probability of its first step.

        Args:
            requests: number of each scheduled request.
            finished: requests that ended before the step.
            fill, step: as ``Controller``.
        """
        share = self._controller(fill, step)
        if self.design.unit == "row":
            return share, np.full(len(requests), share)
        for request in finished:
            self._of_request.pop(request, None)
        shares = [self._of_request.setdefault(request, share) for request in requests.tolist()]
        return share, np.array(shares, np.float64)

    def of_rows(self, requests: IntArray, positions: IntArray, prompt_lens: IntArray) -> np.ndarray:
        """Return the share that the rules give each row of a step, ``(n,)``."""
        entropy = scores = role = takes = None
        if self.design.reads_sampled:
            known = np.full((1 + len(self.design.probes), len(positions)), np.nan)
            for row in np.flatnonzero(positions >= prompt_lens).tolist():
                at, values = self._sampled.get(int(requests[row]), (-1, known[:, row]))
                if at == positions[row]:
                    known[:, row] = values
            entropy, scores = known[0], known[1:]
        if self.design.reads_roles or self.design.reads_requests:
            role, takes = self._of_requests(requests, positions)
        return self.design.shares(positions, prompt_lens, entropy, role, takes, scores)

    def _of_requests(
        self, requests: IntArray, positions: IntArray
    ) -> tuple[np.ndarray, dict[int, BoolArray]]:
        """Return the role of each prompt position, and of which rules its request is."""
        role = np.zeros(len(positions), np.int8)
        rules = [k for k, rule in enumerate(self.design.keep) if rule.request]
        takes = {k: np.zeros(len(positions), bool) for k in rules}
        edges = np.flatnonzero(np.diff(requests, prepend=-1)).tolist()
        for start, stop in pairwise([*edges, len(requests)]):
            regime, roles = self._regimes[int(requests[start])]
            at = positions[start:stop]
            is_known = at < len(roles)
            role[start:stop][is_known] = roles[at[is_known]]
            for k in rules:
                takes[k][start:stop] = regime.takes.get(k, False)
        return np.array(_ROLES)[role], takes

    def sampled(self, requests: IntArray, positions: IntArray, known: FloatArray) -> None:
        """Note entropy and scores ``(n, 1 + n_probes)`` of the tokens at some positions.

        An engine may sample behind a part of a prompt as well, and discard the token: it stands
        below the last one that counts.
        """
        if not self.design.reads_sampled:
            return
        for row, (request, position) in enumerate(
            zip(requests.tolist(), positions.tolist(), strict=True)
        ):
            if request not in self._sampled or position >= self._sampled[request][0]:
                self._sampled[request] = (position, known[row])

    def forget(self, finished: tuple[int, ...]) -> None:
        for request in finished:
            self._sampled.pop(request, None)
            self._regimes.pop(request, None)
