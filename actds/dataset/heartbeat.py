"""The heartbeat of an open chain: what shows everybody that its process lives.

On the data path this stands below the ledger. A chain writes ``journal/<run>/<chain>.json`` before
its first record, again every ``BEAT_S`` and removes it when it ends. A lock shows the processes of
one machine at best, and an object store has none; a heartbeat is seen wherever the dataset is.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from actds.errors import ActdsError, BusyError
from actds.format import canonical
from actds.store import Store, layout, local_folder
from actds.text import printable

BEAT_S = 10.0
"""Seconds between two beats."""
_MAX_NBYTES = 4096

log = logging.getLogger("actds")
_beating: weakref.WeakValueDictionary[str, Heartbeat] = weakref.WeakValueDictionary()
"""The heartbeats of this process by chain: a chain that was forgotten beats no more."""


class Heartbeat:
    """Shows that this process has a chain open, until it is stopped or forgotten.

    Args:
        store: the dataset's store.
        run: run of the chain.
        chain: id of the chain.
        part: share of the prompts that the run serves, as ``3/16``; empty for all.

    Raises:
        ActdsError: E503 when the store refuses the first beat; E010 when another run of the same
            part may be at work.

    Spec: 0.1 section 9.9.
    """

    def __init__(self, store: Store, run: str, chain: str, part: str = "") -> None:
        self._store, self._path = store, layout.heartbeat_path(run, chain)
        self._chain, self._part, self._n_beats = chain, part, 0
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._beat()
        if part and (owner := find_other(store, run, part)):
            # Of two that begin at once each has beaten before it looks: no two go on.
            _remove(store, self._path)
            raise busy(f"journal/{run}", f"part {part}, which {owner} may still write")
        _beating[chain] = self
        work = functools.partial(_go_on, weakref.ref(self), self._stopped)
        threading.Thread(target=work, name="actds-heartbeat", daemon=True).start()

    def stop(self) -> None:
        """End the heartbeat and remove its file; a store that refuses keeps it."""
        with self._lock:
            if not self._stopped.is_set():
                self._stopped.set()
                _beating.pop(self._chain, None)
                _remove(self._store, self._path)

    def beat_again(self) -> bool:
        """Beat once more; return whether there is anything left to beat for."""
        with self._lock:
            try:
                if self._stopped.is_set() or not self._store.exists(self._path):
                    return False  # the chain was ended, by this process or by another one
                self._beat()
            except ActdsError as error:
                log.debug("no heartbeat of %s: %s", self._chain, error)
        return True

    def _beat(self) -> None:
        self._n_beats += 1
        beat = {
            "beat": self._n_beats,
            "host": socket.gethostname()[:64],
            "machine": _machine(),
            "pid": os.getpid(),
            "started": _start_of(os.getpid()),
            **({"part": self._part} if self._part else {}),
        }
        self._store.replace(self._path, canonical.dump(beat))


def _go_on(heartbeat: Callable[[], Heartbeat | None], stopped: threading.Event) -> None:
    while not stopped.wait(BEAT_S):
        beating = heartbeat()
        if beating is None or not beating.beat_again():
            return
        del beating


@dataclass(frozen=True)
class Owner:
    """The process of a chain, as its last heartbeat has it."""

    host: str
    machine: str
    pid: int
    started: int
    part: str = ""
    """Share of the prompts that the run of the chain serves."""

    @property
    def is_here(self) -> bool:
        """Return whether the process is, or was, one that this process could see."""
        return bool(self.machine) and self.machine == _machine()

    def lives(self, chain: str) -> bool:
        """Return whether a process of this machine is still there, with this chain."""
        if self.pid == os.getpid():
            return chain in _beating
        started = _start_of(self.pid)
        return started == self.started or (started < 0 and _is_hidden(self.pid))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def busy(place: str, got: str) -> BusyError:
    """Return E010 for what another process may still write."""
    step = "End that process, or wait until it has ended."
    return BusyError("E010", place, got=got, expected="no other writer", next_step=step)


def heartbeats(store: Store) -> Iterator[tuple[str, str, str]]:
    """Yield run, chain and path of every heartbeat that is there."""
    for path in store.list("journal"):
        _, run, *names = path.split("/")
        if len(names) == 1 and names[0].endswith(".json"):
            yield run, names[0].removesuffix(".json"), path


def find_other(store: Store, run: str, part: str) -> Owner | None:
    """Return a process that may serve the same part of the prompts as a run does."""
    for other, chain, path in heartbeats(store):
        if other != run:
            owner, _ = read_heartbeat(store, path)
            dead = owner is not None and owner.is_here and not owner.lives(chain)
            if owner is not None and owner.part == part and not dead:
                return owner
    return None


def remove_heartbeat(store: Store, run: str, chain: str) -> None:
    """Remove what is left of the heartbeat of a chain that was ended; a store may keep it."""
    _remove(store, layout.heartbeat_path(run, chain))


def remove_stale(store: Store, stay: Callable[[str], bool] = lambda run: False) -> None:
    """Remove what processes of this machine left of heartbeats: a kill comes at any time.

    Args:
        store: the dataset's store; its chains are ended, but those of some runs.
        stay: whether the heartbeats of a run stay.

    Raises:
        ActdsError: E104 when the store does not answer.
    """
    for run, chain, path in heartbeats(store):
        owner, _ = (None, b"") if stay(run) else read_heartbeat(store, path)
        if owner is not None and owner.is_here and not owner.lives(chain):
            _remove(store, path)


def _remove(store: Store, path: str) -> None:
    with contextlib.suppress(ActdsError):
        store.remove(path)
    folder = local_folder(store.uri)
    if folder is not None:
        with contextlib.suppress(OSError):  # the run's journal, or that of another run
            (folder / path).parent.rmdir()
            (folder / path).parent.parent.rmdir()


def read_heartbeat(store: Store, path: str) -> tuple[Owner | None, bytes]:
    """Return the process that a heartbeat names, None without a readable one, and its bytes."""
    try:
        data = store.read(path, _MAX_NBYTES) if store.exists(path) else b""
    except ActdsError as error:
        if error.code not in ("E102", "E104", "E107"):
            raise
        data = b""
    try:
        beat = json.loads(data)
        owner = Owner(
            printable(str(beat["host"]))[:64],
            str(beat["machine"]),
            int(beat["pid"]),
            beat["started"],
            str(beat.get("part", "")),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, data
    return owner, data


@functools.cache
def _machine() -> str:
    """Return which processes this one can see: those of one boot and one space of process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_hidden(pid: int) -> bool:
    """Return whether a process is there and belongs to a user whose processes are not shown."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        pass
    return False


def _start_of(pid: int) -> int:
    """Return when a process was started, in ticks since the boot; -1 when it cannot be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    # A zombie has ended: nobody has asked for its exit code yet.
    state, *fields = stat.rpartition(")")[2].split()
    return -1 if state in "ZX" else int(fields[18])
