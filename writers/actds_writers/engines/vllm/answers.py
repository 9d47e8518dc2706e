"""Answers in vLLM's responses: a request that asks gets its score or handle with its last output.

vLLM hands ``kv_transfer_params`` of a request's last output on to the client, as part of the body
of a response that is not streamed. Without a KV connector nothing else is in it. A handle says
where the rows are. The output of a request that asks for its score is held until the writer has
scored its last step; others are not touched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actds.dataset.reading import read_genesis
from actds.errors import ActdsError
from actds.format.profile import Profile
from actds.store import open_store
from actds_writers.ipc.link import Link
from actds_writers.ipc.scores import ScorePage

SCORE, HANDLE = "actds_score", "actds_handle"
"""What a request says in ``vllm_xargs`` to get them: 1."""
KEY = "actds"
PATIENCE_S = 0.5
"""How long a last output is held at most."""
IDLE_S = 0.001


@dataclass(frozen=True)
class _Asked:
    """A request that has ended and asks; ``step`` is its last, of one that asks for its score."""

    request: int
    step: int | None
    handle: dict[str, Any]


@dataclass(frozen=True)
class _Held:
    client: int
    output: Any
    ended: _Asked
    until: float


class Answers:
    """The answers of one run; ``dataset`` is the id of its dataset, where that is known."""

    def __init__(self, link: Link, dataset: str = "") -> None:
        self._link, self._dataset = link, dataset
        self._profile: Profile | None = None
        if link.profile_path:
            self._profile = Profile.read(Path(link.profile_path))
        self._page: ScorePage | None = None
        self._ended: dict[str, _Asked] = {}
        self._held: list[_Held] = []

    @property
    def is_waiting(self) -> bool:
        """Return whether a request waits for its score."""
        return bool(self._held)

    def ended(
        self,
        request: Any,
        number: int,
        step: int,
        n_positions: int,
        stored: Sequence[tuple[int, int]],
        hooks: Sequence[str] | None = None,
    ) -> None:
        """Note the end of a request, if it asks.

        Args:
            number: of the request in the run.
            step: the last that was scheduled.
            n_positions: computed or served from the prefix cache.
            stored: those that the rules and the client want, as intervals.
            hooks: that the client chose, ``None`` for all.
        """
        asks = getattr(request.sampling_params, "extra_args", None) or {}
        score = bool(asks.get(SCORE)) and self._profile is not None
        handle: dict[str, Any] = {"request": number}
        if asks.get(HANDLE):
            handle |= {
                "dataset": self._dataset_id(),
                "run": self._link.run,
                "positions": n_positions,
                "stored": [list(interval) for interval in stored],
                **({} if hooks is None else {"hooks": list(hooks)}),
            }
        if score or len(handle) > 1:
            self._ended[request.request_id] = _Asked(number, step if score else None, handle)

    def answer(self, outputs: dict[int, Any]) -> None:
        """Hold the last outputs, by client, of requests that ask, and return those with answers."""
        if self._ended:
            until = time.monotonic() + PATIENCE_S
            for client, of_client in outputs.items():
                for output in [o for o in of_client.outputs if o.request_id in self._ended]:
                    ended = self._ended.pop(output.request_id)
                    if ended.step is None:
                        self._tell(output, ended.handle)
                        continue
                    of_client.outputs.remove(output)
                    self._held.append(_Held(client, output, ended, until))
            self._ended.clear()  # those that were aborted get no output
        if self._held:
            self._release(outputs)

    def _release(self, outputs: dict[int, Any]) -> None:
        from vllm.v1.engine import EngineCoreOutputs

        if self._page is None and self._link.profile_path:
            with suppress(OSError):  # a writer that has failed has made none
                self._page = ScorePage.attach(Path(self._link.profile_path).parent)
        step, now = -1 if self._page is None else self._page.step, time.monotonic()
        ready = [a for a in self._held if (a.ended.step or 0) <= step or a.until < now]
        self._held = [answer for answer in self._held if answer not in ready]
        for answer in ready:
            self._tell(answer.output, answer.ended.handle | self._of(answer.ended.request))
            outputs.setdefault(answer.client, EngineCoreOutputs()).outputs.append(answer.output)
        if self._held and not outputs:
            time.sleep(IDLE_S)  # an engine without other requests

    @staticmethod
    def _tell(output: Any, answer: dict[str, Any]) -> None:
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), KEY: answer}

    def _dataset_id(self) -> str | None:
        """Return the id of the dataset, once the writer has made it."""
        if not self._dataset:
            with suppress(ActdsError):
                self._dataset = read_genesis(open_store(self._link.settings.out)).dataset
        return self._dataset or None

    def _of(self, request: int) -> dict[str, Any]:
        assert self._profile is not None
        score = None if self._page is None else self._page.read(request)
        about = {
            "profile": self._profile.sha256,
            "threshold": self._profile.calibration.threshold,
        }
        if score is None:
            return {**about, "score": None, "position": None, "alert": None}
        alert = score.alert if score.alert >= 0 else None
        return {**about, "score": score.score, "position": score.position, "alert": alert}
