"""Scores in vLLM's responses: a request that asks for its own gets it with its last output.

vLLM hands ``kv_transfer_params`` of a request's last output on to the client, as part of the body
of a response that is not streamed. Without a KV connector nothing else is in it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from actds.format.profile import Profile
from actds_writers.ipc.scores import ScorePage

XARG = "actds_score"
"""What a request says in ``vllm_xargs`` to get its score: 1."""
KEY = "actds"


class Scores:
    """The answers of one run; ``profile`` is the file beside which the page of the scores is."""

    def __init__(self, profile: Path) -> None:
        self._folder = profile.parent
        of_profile = Profile.read(profile)
        self._threshold, self._sha256 = of_profile.calibration.threshold, of_profile.sha256
        self._page: ScorePage | None = None
        self._ended: dict[str, int] = {}

    def ended(self, request: Any, number: int) -> None:
        """Note the end of a request, if it asks."""
        params = request.sampling_params
        if (getattr(params, "extra_args", None) or {}).get(XARG):
            self._ended[request.request_id] = number

    def answer(self, outputs: Any) -> None:
        """Add the scores to the last outputs, by client, of requests that have ended."""
        if not self._ended:
            return
        for of_client in outputs.values():
            for output in of_client.outputs:
                number = self._ended.pop(output.request_id, None)
                if number is not None:
                    before = output.kv_transfer_params or {}
                    output.kv_transfer_params = {**before, KEY: self._of(number)}
        self._ended.clear()  # those that were aborted get no output

    def _of(self, request: int) -> dict[str, Any]:
        if self._page is None:
            with suppress(OSError):  # a writer that has failed has made none
                self._page = ScorePage.attach(self._folder)
        score = None if self._page is None else self._page.read(request)
        about = {"request": request, "profile": self._sha256, "threshold": self._threshold}
        if score is None:
            return {**about, "score": None, "position": None, "alert": None}
        alert = score.alert if score.alert >= 0 else None
        return {**about, "score": score.score, "position": score.position, "alert": alert}
