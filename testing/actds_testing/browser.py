"""Headless Chromium through its DevTools pipe: load a page, hear what it says, look at it.

Needs the system's Chromium and the standard library only.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # tests run as root, on pages that they made themselves
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

# Chromium reads orders on 3 and answers on 4; first away from them, for either may be the other.
_LAUNCH = """
import os, sys
ends = [os.dup(int(word)) for word in sys.argv[1:3]]
ends = [os.dup(end) if end in (3, 4) else end for end in ends]
ends = [os.dup(end) if end in (3, 4) else end for end in ends]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    """Return the system's Chromium, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one page; ``console`` and ``requests`` hold what the page said and asked."""

    def __init__(self, executable: str) -> None:
        self.console: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="actds-browser-")
        self._next = 0
        self._buffer = b""
        self._loaded: set[tuple[str, str]] = set()
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._in, self._out = ours_in, ours_out
        command = [sys.executable, "-c", _LAUNCH, str(theirs_in), str(theirs_out), executable]
        command += _FLAGS
        command += [f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._out)  # the end of its orders ends the browser
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._in)
        shutil.rmtree(self._profile.name, ignore_errors=True)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the answer to a command.

        Raises:
            RuntimeError: the browser refused it, or ended.
        """
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") != self._next:
                self._hear(answer)
                continue
            if "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            return answer["result"]

    def open(self, path: Path, *, width: int = 900, media: Sequence[tuple[str, str]] = ()) -> None:
        """Load a file and wait for its load event; forgets what earlier pages said."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": name, "value": value} for name, value in media]
        self.call("Emulation.setEmulatedMedia", media="", features=features)
        self.console.clear()
        self.requests.clear()
        loader = self.call("Page.navigate", url=path.as_uri())["loaderId"]
        while ("load", loader) not in self._loaded:
            self._hear(self._read())
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, top: float = 0, height: float | None = None) -> None:
        """Write a PNG of the page, or of a strip of it."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": top, "width": size["width"], "scale": 1}
        clip["height"] = min(height or size["height"], size["height"] - top)
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def download(self, selector: str, path: Path, *, timeout_s: float = 20) -> bytes:
        """Click a link that downloads a file, and return what came.

        Args:
            selector: of the link.
            path: folder for the file, under the name that the link gives it.
            timeout_s: how long to wait for it.
        """
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(path))
        name = self.evaluate(f"document.querySelector({selector!r}).download")
        self.call(
            "Runtime.evaluate",
            expression=f"document.querySelector({selector!r}).click()",
            userGesture=True,
        )
        end = time.monotonic() + timeout_s
        while not (path / name).exists():
            if time.monotonic() > end:
                raise RuntimeError(f"{name} did not come; there are {sorted(os.listdir(path))}")
            time.sleep(0.05)
        return (path / name).read_bytes()

    def pdf(self) -> bytes:
        """Return the page as it prints."""
        answer = self.call("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        return base64.b64decode(answer["data"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser ended")
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def _hear(self, event: dict[str, Any]) -> None:
        method, said = event.get("method"), event.get("params", {})
        if method == "Page.lifecycleEvent":
            self._loaded.add((said["name"], said["loaderId"]))
        elif method == "Log.entryAdded":
            self.console.append(f"{said['entry']['level']}: {said['entry']['text']}")
        elif method == "Runtime.consoleAPICalled":
            self.console.append(f"{said['type']}: {said['args']}")
        elif method == "Runtime.exceptionThrown":
            self.console.append(f"exception: {said['exceptionDetails']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
