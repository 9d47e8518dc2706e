"""Processes that outlive the process tree they were started from.

A server that is stopped kills its engine with all its descendants. Writer and census of a live
harvest must still commit after that, so they are started as daemons, through a process that ends at
once: ``python -m actds_writers.harvest.detach MODULE``.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import IO


class Detached:
    """A module running as a daemon, with the interface of ``subprocess.Popen``.

    Args:
        module: module with a ``__main__``.

    Its exit code cannot be known, and is reported as 0.
    """

    def __init__(self, module: str, env: dict[str, str], pass_fds: Sequence[int]) -> None:
        launcher = subprocess.Popen(
            [sys.executable, "-m", __name__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        assert launcher.stdin is not None and launcher.stdout is not None
        self.stdin: IO[bytes] = launcher.stdin
        self.pid = int(launcher.stdout.readline())
        # The pid cannot be reused yet: the process waits for its input.
        self._handle = os.pidfd_open(self.pid)
        launcher.stdout.close()
        launcher.wait()

    def poll(self) -> int | None:
        """Return 0 when the process has ended, else ``None``."""
        return 0 if select.select([self._handle], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if not select.select([self._handle], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return 0

    def kill(self) -> None:
        """Kill the process."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def main() -> None:
    """Fork, print the pid of the child, and exit; the child runs the module."""
    child = os.fork()
    if child:
        os.write(1, b"%d\n" % child)
        os._exit(0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
