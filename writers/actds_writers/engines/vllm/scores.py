"""Scores in vLLM's responses: a request that asks for its own gets it with its last output.

vLLM hands ``kv_transfer_params`` of a request's last output on to the client, as part of the body
of a response that is not streamed. Without a KV connector nothing else is in it. The output of a
request that asks is held until the writer has scored its last step; others are not touched.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actds.format.profile import Profile
from actds_writers.ipc.scores import ScorePage

XARG = "actds_score"
"""What a request says in ``vllm_xargs`` to get its score: 1."""
KEY = "actds"
PATIENCE_S = 0.5
"""How long a last output is held at most."""
IDLE_S = 0.001


@dataclass(frozen=True)
class _Held:
    client: int
    output: Any
    request: int
    step: int
    until: float


class Scores:
    """The answers of one run; ``profile`` is the file beside which the page of the scores is."""

    def __init__(self, profile: Path) -> None:
        self._folder = profile.parent
        of_profile = Profile.read(profile)
        self._threshold, self._sha256 = of_profile.calibration.threshold, of_profile.sha256
        self._page: ScorePage | None = None
        self._ended: dict[str, tuple[int, int]] = {}
        self._held: list[_Held] = []

    @property
    def is_waiting(self) -> bool:
        """Return whether a request waits for its score."""
        return bool(self._held)

    def ended(self, request: Any, number: int, step: int) -> None:
        """Note the end of a request, if it asks; ``step`` is the last that was scheduled."""
        params = request.sampling_params
        if (getattr(params, "extra_args", None) or {}).get(XARG):
            self._ended[request.request_id] = number, step

    def answer(self, outputs: dict[int, Any]) -> None:
        """Hold the last outputs, by client, of requests that ask, and return those with scores."""
        if self._ended:
            until = time.monotonic() + PATIENCE_S
            for client, of_client in outputs.items():
                for output in [o for o in of_client.outputs if o.request_id in self._ended]:
                    of_client.outputs.remove(output)
                    self._held.append(
                        _Held(client, output, *self._ended.pop(output.request_id), until)
                    )
            self._ended.clear()  # those that were aborted get no output
        if self._held:
            self._release(outputs)

    def _release(self, outputs: dict[int, Any]) -> None:
        from vllm.v1.engine import EngineCoreOutputs

        if self._page is None:
            with suppress(OSError):  # a writer that has failed has made none
                self._page = ScorePage.attach(self._folder)
        step, now = -1 if self._page is None else self._page.step, time.monotonic()
        ready = [answer for answer in self._held if answer.step <= step or answer.until < now]
        self._held = [answer for answer in self._held if answer not in ready]
        for answer in ready:
            before = answer.output.kv_transfer_params or {}
            answer.output.kv_transfer_params = {**before, KEY: self._of(answer.request)}
            outputs.setdefault(answer.client, EngineCoreOutputs()).outputs.append(answer.output)
        if self._held and not outputs:
            time.sleep(IDLE_S)  # an engine without other requests

    def _of(self, request: int) -> dict[str, Any]:
        score = None if self._page is None else self._page.read(request)
        about = {"request": request, "profile": self._sha256, "threshold": self._threshold}
        if score is None:
            return {**about, "score": None, "position": None, "alert": None}
        alert = score.alert if score.alert >= 0 else None
        return {**about, "score": score.score, "position": score.position, "alert": alert}
