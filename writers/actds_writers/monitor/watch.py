"""Alerts while a model serves: readouts of each step beside the profile of a regime.

In the writer's process, behind the lane of the readouts and beside their log; the engine's thread
does nothing for it. Scores are those of ``actds alerts``, look by look.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from actds.format.profile import (
    Floats,
    Ints,
    Profile,
    Trajectories,
    features,
    regime_of,
    turns,
)
from actds.format.schema import Hook, RunRecord
from actds.format.telemetry import KINDS
from actds_writers.ipc.messages import StepReadouts, WatchTotals
from actds_writers.ipc.scores import Score, ScorePage

log = logging.getLogger("actds")
URL_TIMEOUT_S = 5.0
N_WAITING = 1000
"""Alerts that wait for the URL; further ones are in the table, and not sent."""


class Watch:
    """Scores the requests of one run.

    Args:
        page: receives every score, ``None`` where nobody asks.
        url: receives every request's first alert.
        logs: whether each first alert is logged.

    Raises:
        ActdsError: E024 the run is of another regime than the profile, or has no such hooks.
    """

    def __init__(
        self,
        profile: Profile,
        record: RunRecord,
        hooks: Sequence[Hook],
        *,
        page: ScorePage | None = None,
        url: str | None = None,
        logs: bool = False,
    ) -> None:
        of_profile = [hook for hook in hooks if hook.name in profile.hooks]
        profile.require(regime_of(record, of_profile), f"profile of run {record.run}")
        self._profile, self._run, self._dataset = profile, record.run, record.dataset
        self._threshold = profile.calibration.threshold
        self._hooks, self._page, self._logs = profile.hooks, page, logs
        self._sender = AlertPost(url) if url else None
        self._state = Trajectories(profile)
        self._next: dict[int, int] = {}
        """By request, the first position that was not looked at: others are computed again."""
        self._high: dict[int, tuple[float, int]] = {}
        """By request that alerted, its score in the last line, and the position of the first."""
        self._lines: list[dict[str, Any]] = []
        self._n_looks = self._n_requests = 0
        self._alerts: Counter[str] = Counter()

    @property
    def totals(self) -> WatchTotals:
        alerts = {hook: self._alerts[hook] for hook in self._hooks}
        unsent = self._sender.n_unsent if self._sender else 0
        sha256 = self._profile.sha256
        return WatchTotals(sha256, self._n_requests, self._n_looks, alerts, unsent)

    def take(self, message: StepReadouts, readouts: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Look at a step: readouts of each hook are ``(n, width)``."""
        rows = self._looks(message)
        if len(rows):
            numbers = features(np.stack([readouts[hook][rows] for hook in self._hooks], axis=1))
            request, position = message.requests[rows], message.positions[rows]
            depth = position - message.prompt_lens[rows]
            for turn in turns(request):
                at = request[turn], position[turn], depth[turn]
                self._take_rows(message.step, *at, numbers[turn])
        if self._page is not None:
            self._page.advance(message.step)
        for number in message.finished:
            self._state.end(number)
            self._next.pop(number, None)
            self._high.pop(number, None)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of ``alerts`` since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def forget_after(self, step: int) -> None:
        """Discard the lines of later steps, which the stages have not in common."""
        self._lines = [line for line in self._lines if line["step"] <= step]

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _looks(self, message: StepReadouts) -> Ints:
        """Return which rows of a step are looked at, each once."""
        look, requests = self._profile.look, message.requests
        entropy = None if message.entropy is None else message.entropy.astype(np.float64)
        takes = look.rows(message.positions - message.prompt_lens, entropy)
        if look.share < 1:
            takes &= look.requests(self._run, requests)
        rows = np.flatnonzero(takes)
        fresh = [
            position >= self._next.get(request, 0)
            for request, position in zip(
                requests[rows].tolist(), message.positions[rows].tolist(), strict=True
            )
        ]
        return np.asarray(rows[np.array(fresh, bool)])

    def _take_rows(
        self, step: int, request: Ints, position: Ints, depth: Ints, numbers: Floats
    ) -> None:
        keys = request.tolist()
        self._n_looks += len(keys)
        self._n_requests += sum(key not in self._next for key in keys)
        self._next.update(zip(keys, (position + 1).tolist(), strict=True))
        windows = self._state.add(keys, numbers, depth)
        peaks = self._state.peaks(keys)
        scores = self._profile.combined(peaks)
        if self._threshold is not None:
            above = scores > self._threshold
            if above.any():
                at = position[above], depth[above], scores[above], peaks[above]
                hooks = self._furthest(windows[above], numbers[above], depth[above])
                self._alert(step, request[above].tolist(), *at, hooks)
        if self._page is not None:
            firsts = [self._high[key][1] if key in self._high else -1 for key in keys]
            rows = zip(scores.tolist(), position.tolist(), firsts, strict=True)
            self._page.write(keys, [Score(*row) for row in rows])

    def _furthest(self, windows: Floats, numbers: Floats, depth: Ints) -> list[str]:
        """Return the hook whose numbers are furthest from the middle, in spreads."""
        standard = np.where((depth < 0)[:, None], self._profile.standard(numbers), windows)
        far = (standard.reshape(len(numbers), len(self._hooks), -1) ** 2).mean(axis=2)
        return [self._hooks[k] for k in far.argmax(axis=1).tolist()]

    def _alert(
        self,
        step: int,
        requests: list[int],
        position: Ints,
        depth: Ints,
        scores: Floats,
        peaks: Floats,
        hooks: list[str],
    ) -> None:
        rarer = self._profile.rarer(peaks)
        for n, request in enumerate(requests):
            score, before = float(scores[n]), self._high.get(request)
            if before is not None and score <= before[0]:
                continue
            line = {
                "request": request,
                "position": int(position[n]),
                "step": step,
                "score": score,
                "kind": KINDS[int(rarer[n])],
                "hook": hooks[n],
            }
            self._lines.append(line)
            self._high[request] = score, int(position[n]) if before is None else before[1]
            if before is None:
                self._alerts[hooks[n]] += 1
                self._tell({**line, "depth": int(depth[n])})

    def _tell(self, line: dict[str, Any]) -> None:
        if self._logs:
            log.warning(
                "request %(request)d left the regime of the profile at position %(position)d: "
                "score %(score).2f, %(kind)s, %(hook)s",
                line,
            )
        if self._sender is not None:
            about = {"dataset": self._dataset, "run": self._run, "threshold": self._threshold}
            self._sender.send({**about, **line, "profile": self._profile.sha256})


class AlertPost:
    """Posts documents to a URL, on a thread of its own; what cannot be sent is counted."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.n_unsent = 0
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(N_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="actds-alerts", daemon=True)
        self._thread.start()

    def send(self, document: dict[str, Any]) -> None:
        try:
            self._waiting.put_nowait(document)
        except queue.Full:
            self.n_unsent += 1

    def close(self) -> None:
        with suppress(queue.Full):
            self._waiting.put(None, timeout=URL_TIMEOUT_S)
        self._thread.join(2 * URL_TIMEOUT_S)

    def _send_all(self) -> None:
        while (document := self._waiting.get()) is not None:
            body = json.dumps(document).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self._url, body, headers)
            try:
                urllib.request.urlopen(request, timeout=URL_TIMEOUT_S).close()
            except (OSError, ValueError) as error:
                if not self.n_unsent:
                    log.error("alerts are not sent to %s: %s", self._url, error)
                self.n_unsent += 1
