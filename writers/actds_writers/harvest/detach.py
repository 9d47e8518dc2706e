"""Processes that outlive the tree they were started from.

A server that ends in a hurry kills its engine with every descendant of it. Writer and census of a
live harvest must commit what there is after that, so they are nobody's descendants: started
through a process that ends at once, as daemons are.

``python -m actds_writers.harvest.detach MODULE`` is that process.
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
    """A module that runs as a process of its own; answers as ``subprocess.Popen`` does.

    Args:
        module: module with a ``__main__``.
        env: its environment.
        pass_fds: descriptors that it inherits.

    Its exit code is not known to anybody, and reported as 0.
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
        # The number cannot be given to another process yet: the process waits for its input.
        self._handle = os.pidfd_open(self.pid)
        launcher.stdout.close()
        launcher.wait()

    def poll(self) -> int | None:
        """Return 0 when the process has ended, else ``None``."""
        return 0 if select.select([self._handle], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        if not select.select([self._handle], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return 0

    def kill(self) -> None:
        """End the process at once."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def main() -> None:
    """Fork, say the number of the child, and end; the child becomes the module."""
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
