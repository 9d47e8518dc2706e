"""The writer and census processes of a run: started before the engine, ended after it."""

from __future__ import annotations

import functools
import os
import pickle
import runpy
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from actds.errors import ActdsError
from actds.format.readouts import NONE
from actds.format.schema import CloseReason
from actds_writers.config import CensusSettings, WriterSettings
from actds_writers.ipc.link import Link, LinkFile, require_room
from actds_writers.ipc.messages import CensusProgress, ClientFacts, Done, Finish, WriterProgress
from actds_writers.sizing import LANE_NBYTES


class Detached:
    """A module running as a daemon, with the interface of ``subprocess.Popen``.

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
        return 0 if select.select([self._handle], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._handle], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return 0

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def main() -> None:
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


FINISH_TIMEOUT_S = 600.0
END_TIMEOUT_S = 120.0
"""Longer than either process waits for an engine that is still connected."""
SHARED_MEMORY = Path("/dev/shm")
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Frames of 1 MiB are allocated by the thousand; returning each to the system and allocating it
again costs more than encoding it."""


class Pipeline:
    """Writer and census of one run.

    Args:
        lock: open descriptor of the dataset's lock, which the processes inherit.
        lane_nbytes: size of the readouts' lane; at least two steps.
        files: what the processes and workers read, by name.

    Use as a context manager: leaving it ends the processes and removes the ring.
    """

    def __init__(
        self,
        writer: WriterSettings,
        hooks: tuple[tuple[str, int], ...],
        client_pid: int,
        lock: int,
        *,
        ring_nbytes: int | None = None,
        staging_nbytes: int | None = None,
        lane_nbytes: int = LANE_NBYTES,
        files: Mapping[LinkFile, bytes | None] | None = None,
    ) -> None:
        # Sockets and ring, in shared memory if there is any.
        parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        settings = writer.harvest
        ring_nbytes = settings.ring_nbytes if ring_nbytes is None else ring_nbytes
        require_room(parent, ring_nbytes + (0 if writer.readouts == NONE else lane_nbytes))
        folder = Path(tempfile.mkdtemp(prefix="actds-", dir=parent))
        paths: dict[LinkFile, str] = {}
        for name, data in (files or {}).items():
            if data is not None:
                (folder / name).write_bytes(data)
                paths[name] = str(folder / name)
        self.link = Link(
            folder=str(folder),
            key=secrets.token_hex(32),
            run=writer.run,
            hooks=hooks,
            settings=settings,
            ring_nbytes=ring_nbytes,
            staging_nbytes=settings.staging_nbytes if staging_nbytes is None else staging_nbytes,
            client_pid=client_pid,
            live=writer.shared,
            lane_nbytes=lane_nbytes,
            readouts=writer.readouts,
            probes_path=paths.get("probes"),
            interventions_path=paths.get("interventions"),
            # A run that follows another has other weights, and no profile.
            profile_path=paths.get("profile") if settings.profile is not None else None,
            replica=writer.replica,
        )
        dataset = None if writer.resume or writer.may_join else writer.dataset
        census = CensusSettings(settings.out, writer.run, writer.software, dataset, writer.part)
        self.processes = {
            "census": self._start("census.process", census, lock),
            "writer": self._start("writer_process", writer, lock),
        }
        self._connections: dict[str, Connection] = {}
        self._done: dict[str, Done] = {}
        self.written: WriterProgress | None = None
        self.counted: CensusProgress | None = None
        self.failure: ActdsError | None = None

    def connect(self) -> None:
        for name, process in self.processes.items():
            self._connections[name] = self.link.connect(
                name, "harvest", is_alive=functools.partial(_is_running, process)
            )

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        """End processes that are still alive and remove the private folder."""
        for connection in self._connections.values():
            connection.close()
        for name in ("writer", "census"):  # the census ends after the writer
            process = self.processes[name]
            if name not in self._connections:  # nobody can ask it to end
                process.kill()
            try:
                process.wait(timeout=END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.link.folder, ignore_errors=True)

    def poll(self) -> None:
        """Take the messages of the processes, without waiting.

        Raises:
            ActdsError: the failure of a process; E502 or E505 when one is gone.
        """
        for name, connection in self._connections.items():
            try:
                while connection.poll():
                    self._take(name, connection.recv())
            except (EOFError, OSError):
                self._gone(name)
        if self.failure is not None:
            raise self.failure

    def has_reached(self, step: int) -> bool:
        """Return whether writer and census know of a step; always for -1, no step."""
        seen = (self.written, self.counted)
        return step < 0 or all(known is not None and known.last_step >= step for known in seen)

    def send_client_facts(self, facts: ClientFacts) -> None:
        """Send the census the facts that only the client has."""
        self._send("census", facts)

    def end_writer(self, reason: CloseReason) -> None:
        """Let the writer commit and end as soon as its worker is gone; the census continues."""
        self._send("writer", Finish(reason))

    def finish(
        self, reason: CloseReason, *, unknown_weights: bool = False
    ) -> dict[str, dict[str, int]]:
        """End the run after its engine; return the totals of ``writer`` and ``census``."""
        for name in self.processes:
            self._send(name, Finish(reason, unknown_weights))
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        while set(self._done) != set(self.processes):
            for name in set(self.processes) - set(self._done):
                self._await(name)
            if time.monotonic() > deadline:
                missing = ", ".join(sorted(set(self.processes) - set(self._done)))
                got, expected = f"no answer within {FINISH_TIMEOUT_S:.0f} s", "a closed chain"
                raise ActdsError("E506", missing, got=got, expected=expected)
        return {name: done.totals for name, done in self._done.items()}

    def _await(self, name: str) -> None:
        connection = self._connections.get(name)
        try:
            if connection is not None and connection.poll(0.1):
                self._take(name, connection.recv())
        except (EOFError, OSError):
            connection = None
        if connection is None:  # it has ended, or never came
            self._gone(name)
            self._done[name] = Done({})

    def _take(self, name: str, message: object) -> None:
        if isinstance(message, ActdsError):
            # The first failure is the cause of the others.
            self.failure = self.failure or message
        elif isinstance(message, Done):
            self._done[name] = message
        elif isinstance(message, WriterProgress):
            self.written = message
        elif isinstance(message, CensusProgress):
            self.counted = message

    def _gone(self, name: str) -> None:
        if name in self._done:
            return
        self.failure = self.failure or ActdsError(
            "E502" if name == "writer" else "E505",
            f"{name} process",
            got="the process has ended"
            if self.link.live
            else f"the process ended with code {self.processes[name].poll()}",
            expected="a running process until the end",
        )

    def _send(self, name: str, message: object) -> None:
        try:
            if name in self._connections:
                self._connections[name].send(message)
        except OSError:
            self._gone(name)

    def _start(
        self, module: str, settings: WriterSettings | CensusSettings, lock: int
    ) -> subprocess.Popen[bytes] | Detached:
        name, env = f"actds_writers.{module}", {**os.environ, **KEEP_MEMORY}
        process: subprocess.Popen[bytes] | Detached
        if self.link.live:
            process = Detached(name, env, (lock,))
        else:
            process = subprocess.Popen(
                [sys.executable, "-m", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=env,
                start_new_session=True,  # a Ctrl-C is for the command, which ends the run in order
                pass_fds=(lock,),
            )
        assert process.stdin is not None
        pickle.dump((self.link, settings), process.stdin)
        process.stdin.close()
        return process


def _is_running(process: subprocess.Popen[bytes] | Detached) -> bool:
    return process.poll() is None
