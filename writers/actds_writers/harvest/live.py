"""A live harvest: the supervision of its processes beside a serving engine.

Runs in the engine-core process of a server, on thread ``actds-live``. No request waits for it, and
no failure here ends the service.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from actds.errors import ActdsError
from actds.schema import CloseReason
from actds_writers.config import LiveSettings, settings_of
from actds_writers.harvest.processes import Pipeline
from actds_writers.ipc.link import Link
from actds_writers.monitor.progress import Snapshot, take_snapshot
from actds_writers.sampling import SamplingRules

log = logging.getLogger("vllm.actds")
PLACE = "--additional-config actds"
POLL_S = 0.25


def parse_live_settings(document: Any) -> LiveSettings:
    """Return the settings of a live harvest.

    Args:
        document: the value of ``actds`` in ``--additional-config``.

    Raises:
        ActdsError: E017 with the key, its value and what is allowed.
    """
    if not isinstance(document, dict):
        expected = 'an object such as {"out": "...", "hooks": "..."}'
        raise ActdsError("E017", PLACE, got=repr(document)[:80], expected=expected)
    return settings_of(
        LiveSettings, document, lambda key: f"{PLACE}.{key}" if key else PLACE, "E017"
    )


class LiveRun:
    """Writer and census of one engine, supervised in the background.

    Args:
        pipeline: both processes, started and not yet connected.
        release: releases the dataset's lock.
        metrics: host and port where metrics are served, ``None`` to serve none.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        rules: SamplingRules,
        release: Callable[[], None],
        metrics: tuple[str, int] | None = None,
    ) -> None:
        self.pipeline, self._release, self._metrics = pipeline, release, metrics
        self.link: Link = pipeline.link
        self._began = time.monotonic()
        self.rules = rules
        self.failure: Exception | None = None
        self._failing = threading.Lock()
        self._ending = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._supervise, name="actds-live", daemon=True)
        self._thread.start()

    def fail(self, error: Exception) -> None:
        """Note that capture has ended, and log it once."""
        with self._failing:
            if self.failure is not None:
                return
            self.failure = error
        log.error(
            "actds: CAPTURE HAS ENDED, serving continues. %s Committed rows are kept; every token "
            "from here on is accounted as aborted.",
            str(error).splitlines()[0],  # the next step after it is for a command
        )

    def drain(self, last_step: Callable[[], int], timeout_s: float) -> bool:
        """Wait until the writer has every step of the scheduler; return whether it has.

        Args:
            last_step: returns the scheduler's last step that had tokens, -1 for none.
            timeout_s: the longest wait.
        """
        deadline = time.monotonic() + timeout_s
        while self.failure is None and time.monotonic() < deadline:
            written, counted, wanted = self.pipeline.written, self.pipeline.counted, last_step()
            reached = wanted < 0 or (
                written is not None
                and counted is not None
                and min(written.last_step, counted.last_step) >= wanted
            )
            if reached:
                return True
            time.sleep(0.02)
        return False

    def end(self, reason: CloseReason) -> None:
        """End the run after the engine's links are closed: commit, close the chains, clean up.

        Args:
            reason: for the close records; ``failed`` when capture had failed before.
        """
        if self._ended:
            return
        self._ended = True
        self._ending.set()
        self._thread.join()
        try:
            with self.pipeline:
                ended = self.pipeline.finish("failed" if self.failure is not None else reason)
            log.info(
                "actds: run %s is complete: %s rows stored, %s positions dropped, %s aborted, "
                "%s filtered. When all engines have ended: actds seal",
                self.link.run,
                *(ended.census.get(n, 0) for n in ("captured", "dropped", "aborted", "filtered")),
            )
        except ActdsError as error:
            log.error("actds: run %s: %s", self.link.run, error)
        finally:
            self._release()

    def _supervise(self) -> None:
        """Take the messages of the processes until the end."""
        try:
            self.pipeline.connect()
        except (ActdsError, OSError) as error:
            self.fail(error)
            return
        told = False
        with ExitStack() as watch:
            while not self._ending.wait(POLL_S):
                told = self._poll(told)
                counted = self.pipeline.counted
                # Only now: the engine may fork before its scheduler has connected.
                if self._metrics is not None and counted is not None and counted.connected:
                    self._serve_metrics(watch, *self._metrics)
                    self._metrics = None

    def _poll(self, told: bool) -> bool:
        """Take the messages of the processes; return whether the writer knows of a failure."""
        try:
            self.pipeline.poll()
        except ActdsError as error:
            self.fail(error)
        if self.failure is not None and not told:
            # Let the writer commit its buffers now; the census continues to the end.
            self.pipeline.end_writer("failed")
            return True
        return told

    def _serve_metrics(self, watch: ExitStack, host: str, port: int) -> None:
        try:
            from actds_writers.monitor.metrics import serve_metrics

            server = watch.enter_context(serve_metrics(host, port, self._snapshot))
        except ActdsError as error:
            log.error("actds: no metrics: %s", error)
        else:
            log.info("actds: metrics at http://%s:%s/metrics", host, server.port)

    def _snapshot(self) -> Snapshot:
        counted = self.pipeline.counted
        return take_snapshot(
            self.pipeline.written,
            counted,
            elapsed_s=time.monotonic() - self._began,
            requests_done=counted.n_finished if counted else 0,
            requests_total=None,
        )
