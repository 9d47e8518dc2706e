"""A harvest beside a serving engine: its settings, and the supervision of its processes.

Around the token's way, in the engine-core process of a server; imports no engine. Nothing here is
on a request's way, and nothing that fails here ends the service.
"""

from __future__ import annotations

import difflib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actds.errors import ActdsError
from actds.schema import CloseReason
from actds_writers.harvest.processes import Pipeline
from actds_writers.harvest.sampling import Match, Phase, SamplingRules
from actds_writers.ipc.link import Link, Policy
from actds_writers.monitor.snapshot import Snapshot, take_snapshot

__all__ = ["LiveRun", "LiveSettings", "parse_live_settings"]

log = logging.getLogger("vllm.actds")
PLACE = "--additional-config actds"
POLL_S = 0.25


class LiveSettings(BaseModel):
    """The value of ``actds`` in ``--additional-config``.

    Args:
        out: dataset folder; made when it is not there, joined when another engine was first.
        hooks: places to capture, as ``actds write --hooks``.
        overflow: what happens to a step when the ring is full.
        fraction: as in ``SamplingRules``, like the next four.
        seed: seed of the sampling and of the row order.
        phases: phases that are stored.
        only: a request must match one of these.
        skip: a request that matches one of these is left out.
        order: row order inside a shard.
        rows_per_shard: rows per shard, ``None`` to choose by memory.
        ring_mib: size of the host ring.
        staging_mib: size of the staging ring on the device.
        readouts: whether every computed row that the rules leave in leaves readouts.
        probes: file of the user's probes, ``None`` without.
        raw_mib: MiB that wait to be committed, from which shards are written raw; 0 never.
        store_dtype: type to store rows in, ``None`` for the type the model computes in.
        weights_digest: whether the weight files are hashed before the server starts.
        metrics_host: where metrics of the capture are served.
        metrics_port: port of the metrics, ``None`` to serve none; replica N takes this plus N.
        check: whether the hooks are checked before the server is up.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    out: Annotated[str, Field(min_length=1)]
    hooks: Annotated[str, Field(min_length=1)]
    overflow: Policy = "drop_newest"
    fraction: float | int | str = 1
    seed: int = 0
    phases: list[Phase] = ["prefill", "decode"]
    only: list[Match] = []
    skip: list[Match] = []
    order: Literal["permuted", "sequence"] = "permuted"
    rows_per_shard: Annotated[int, Field(ge=1)] | None = None
    ring_mib: Annotated[int, Field(ge=1)] = 256
    staging_mib: Annotated[int, Field(ge=1)] = 64
    readouts: bool = True
    probes: Annotated[str, Field(min_length=1)] | None = None
    raw_mib: Annotated[int, Field(ge=0)] = 64
    store_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    weights_digest: bool = True
    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    check: bool = True

    def rules(self) -> SamplingRules:
        """Return the sampling rules."""
        names = ("fraction", "seed", "phases", "only", "skip")
        return SamplingRules.model_validate({name: getattr(self, name) for name in names})


def parse_live_settings(document: Any) -> LiveSettings:
    """Return the settings of a live harvest.

    Args:
        document: what ``--additional-config`` holds under ``actds``.

    Raises:
        ActdsError: E017 with the key, what it is and what it should be.
    """
    if not isinstance(document, dict):
        raise _bad("", _words(document), 'an object such as {"out": "...", "hooks": "..."}')
    unknown = sorted(set(map(str, document)) - set(LiveSettings.model_fields))
    if unknown:
        close = difflib.get_close_matches(unknown[0], LiveSettings.model_fields, n=2)
        known = " or ".join(close) or f"one of {', '.join(sorted(LiveSettings.model_fields))}"
        raise _bad(unknown[0][:80], "a key that is not known", known)
    try:
        settings = LiveSettings.model_validate(document)
        settings.rules()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise _bad(".".join(map(str, first["loc"])), *_explain(first)) from None
    return settings


def _explain(error: Any) -> tuple[str, str]:
    """Return what was got and what is expected, in words."""
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    if error["type"] == "missing":
        return "nothing", "a value"
    if error["type"] == "extra_forbidden":
        return "a key that is not known", "header or xarg, and values"
    return _words(error["input"]), message


def _words(value: object) -> str:
    return str(value) if isinstance(value, Decimal) else repr(value)[:80]


def _bad(key: str, got: str, expected: str) -> ActdsError:
    return ActdsError("E017", f"{PLACE}.{key}" if key else PLACE, got=got, expected=expected)


class LiveRun:
    """Writer and census of one engine, supervised in the background.

    Args:
        pipeline: both processes, started and not yet connected.
        rules: sampling rules.
        release: gives the dataset's lock back.
        metrics: host and port where metrics are served, ``None`` to serve none.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        rules: SamplingRules,
        release: Callable[[], None],
        metrics: tuple[str, int] | None = None,
    ) -> None:
        self._pipeline, self._release, self._metrics = pipeline, release, metrics
        self._began = time.monotonic()
        self.rules = rules
        self.failure: Exception | None = None
        self._failing = threading.Lock()
        self._ending = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._supervise, name="actds-live", daemon=True)
        self._thread.start()

    @property
    def link(self) -> Link:
        """Return where writer and census listen."""
        return self._pipeline.link

    def fail(self, error: Exception) -> None:
        """Note that capture has ended; said once, whoever notices."""
        with self._failing:
            if self.failure is not None:
                return
            self.failure = error
        log.error(
            "actds: CAPTURE HAS ENDED, serving goes on. %s What is committed stays; every token "
            "from here on is accounted as aborted.",
            str(error).splitlines()[0],  # the advice after it is for a command
        )

    def drain(self, last_step: Callable[[], int], timeout_s: float) -> bool:
        """Wait until the writer has every step that the scheduler has made.

        Args:
            last_step: the scheduler's last step that had tokens, -1 for none.
            timeout_s: the longest wait.

        Returns:
            Whether it has them all.
        """
        deadline = time.monotonic() + timeout_s
        while self.failure is None and time.monotonic() < deadline:
            written, counted, wanted = self._pipeline.written, self._pipeline.counted, last_step()
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
            reason: as in the close records; ``failed`` wins when capture had ended before.
        """
        if self._ended:
            return
        self._ended = True
        self._ending.set()
        self._thread.join()
        try:
            with self._pipeline:
                ended = self._pipeline.finish("failed" if self.failure is not None else reason)
            log.info(
                "actds: run %s is complete: %s rows stored, %s positions dropped, %s aborted, "
                "%s filtered. When every engine has ended: actds seal",
                self.link.run,
                *(ended.census.get(n, 0) for n in ("captured", "dropped", "aborted", "filtered")),
            )
        except ActdsError as error:
            log.error("actds: run %s: %s", self.link.run, error)
        finally:
            self._release()

    def _supervise(self) -> None:
        """Take what the processes say until the end."""
        try:
            self._pipeline.connect()
        except (ActdsError, OSError) as error:
            self.fail(error)
            return
        told = False
        with ExitStack() as watch:
            while not self._ending.wait(POLL_S):
                told = self._poll(told)
                counted = self._pipeline.counted
                # Only now, for the engine may have forked before its scheduler was there.
                if self._metrics is not None and counted is not None and counted.connected:
                    self._serve_metrics(watch, *self._metrics)
                    self._metrics = None

    def _poll(self, told: bool) -> bool:
        """Take what the processes say now; return whether the writer knows of a failure."""
        try:
            self._pipeline.poll()
        except ActdsError as error:
            self.fail(error)
        if self.failure is not None and not told:
            # What is buffered is worth committing now; the census counts on to the end.
            self._pipeline.end_writer("failed")
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
        counted = self._pipeline.counted
        return take_snapshot(
            self._pipeline.written,
            counted,
            elapsed_s=time.monotonic() - self._began,
            requests_done=counted.n_finished if counted else 0,
            requests_total=None,
        )
