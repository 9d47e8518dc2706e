"""Whether the process behind an open chain is gone: its heartbeat, which everybody can read.

On the data path this stands beside the ledger. A chain writes ``journal/<run>/<chain>.json`` before
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
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from actds import canonical, layout
from actds.errors import ActdsError, BusyError
from actds.store import Store, local_folder
from actds.text import printable

if TYPE_CHECKING:
    from actds.ledger import ChainState

__all__ = [
    "BEAT_S",
    "SILENCE_S",
    "Heartbeat",
    "Owners",
    "find_owners",
    "remove_heartbeat",
    "remove_stale",
]

BEAT_S = 10.0
"""Seconds between two beats."""
SILENCE_S = 60.0
"""Seconds without a beat and without a record after which a process of another machine is gone."""
_POLL_S = 1.0
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

    Raises:
        ActdsError: E503 when the store refuses the first beat.

    Spec: 0.1 section 9.9.
    """

    def __init__(self, store: Store, run: str, chain: str) -> None:
        self._store, self._path = store, layout.heartbeat_path(run, chain)
        self._chain, self._n_beats = chain, 0
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._beat()
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
        }
        self._store.replace(self._path, canonical.dump(beat))


def _go_on(heartbeat: Callable[[], Heartbeat | None], stopped: threading.Event) -> None:
    while not stopped.wait(BEAT_S):
        beating = heartbeat()
        if beating is None or not beating.beat_again():
            return
        del beating


@dataclass(frozen=True)
class _Owner:
    """The process of a chain, as its last heartbeat has it."""

    host: str
    machine: str
    pid: int
    started: int

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


@dataclass
class Owners:
    """Who is behind the open chains of a dataset.

    Args:
        gone: by chain, the process that is gone, in words.
        living: by run, the refusal to touch what a process may still write.
    """

    gone: dict[str, str] = field(default_factory=dict)
    living: dict[str, BusyError] = field(default_factory=dict)

    def require_gone(self) -> None:
        """Raise E010 for the first process that lives."""
        for error in self.living.values():
            raise error


def find_owners(
    store: Store,
    chains: Iterable[ChainState],
    *,
    silence_s: float = SILENCE_S,
    say: Callable[[str], None] = lambda line: None,
) -> Owners:
    """Return which processes of the open chains of a dataset are gone.

    A process of this machine is gone when it is not there any more. One of another machine is gone
    when neither its heartbeat nor its chain has changed while this one watched. A chain without a
    heartbeat is that of a dead process in a local folder, whose lock the caller holds, and is
    watched in an object store.

    Args:
        store: the dataset's store.
        chains: its chains; those that have ended are passed over.
        silence_s: how long to watch; 0 takes every process of another machine for alive.
        say: takes a line for the user before a wait.

    Raises:
        ActdsError: E104 when the store does not answer.

    Spec: 0.1 section 9.9.
    """
    owners, unseen = Owners(), []
    is_local = local_folder(store.uri) is not None
    for state in chains:
        if state.state != "open":
            continue
        owner, _ = _read(store, layout.heartbeat_path(state.run, state.chain))
        if owner is not None and owner.is_here:
            if owner.lives(state.chain):
                owners.living[state.run] = _busy(state, owner)
            else:
                owners.gone[state.chain] = f"{owner} is gone"
        elif owner is None and is_local:
            owners.gone[state.chain] = "its process is gone"
        else:
            unseen.append(_Unseen(state, owner, _signs(store, state)))
    if unseen and not owners.living and silence_s:
        runs = ", ".join(sorted({one.state.run for one in unseen}))
        say(f"Watching run {runs} for {silence_s:.0f} s: its processes may be at work elsewhere.")
    _watch(store, unseen, 0 if owners.living else silence_s, owners)
    return owners


@dataclass(frozen=True)
class _Unseen:
    """A chain whose process this one cannot see, and the signs of life of it so far."""

    state: ChainState
    owner: _Owner | None
    signs: tuple[bytes, int]


def _watch(store: Store, unseen: list[_Unseen], silence_s: float, owners: Owners) -> None:
    """Watch chains until one shows a sign of life, or the time is over."""
    deadline = time.monotonic() + silence_s
    while unseen and not owners.living and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(_POLL_S, left))
        for one in unseen:
            if _signs(store, one.state) != one.signs:
                owners.living[one.state.run] = _busy(one.state, one.owner)
    for one in unseen:
        if owners.living or not silence_s:
            owners.living.setdefault(one.state.run, _busy(one.state, one.owner))
        else:
            who = one.owner or "its process"
            owners.gone[one.state.chain] = f"{who} gave no sign of life for {silence_s:.0f} s"


def remove_heartbeat(store: Store, run: str, chain: str) -> None:
    """Remove what is left of the heartbeat of a chain that was ended; a store may keep it."""
    _remove(store, layout.heartbeat_path(run, chain))


def remove_stale(store: Store, living: Iterable[str] = ()) -> None:
    """Remove what processes of this machine left of heartbeats: a kill comes at any time.

    Args:
        store: the dataset's store; its chains are ended, but those of some runs.
        living: the runs whose heartbeats stay.

    Raises:
        ActdsError: E104 when the store does not answer.
    """
    for path in store.list("journal"):
        _, run, *names = path.split("/")
        if run in living or len(names) != 1 or not names[0].endswith(".json"):
            continue
        chain = names[0].removesuffix(".json")
        owner, _ = _read(store, path)
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


def _signs(store: Store, state: ChainState) -> tuple[bytes, int]:
    """Return what changes while the process of a chain lives: its last beat, and its records."""
    _, beat = _read(store, layout.heartbeat_path(state.run, state.chain))
    return beat, len(store.list(f"ledger/{state.chain}"))


def _read(store: Store, path: str) -> tuple[_Owner | None, bytes]:
    """Return the process that a heartbeat names, None without a readable one, and its bytes."""
    try:
        data = store.read(path, _MAX_NBYTES) if store.exists(path) else b""
    except ActdsError as error:
        if error.code not in ("E102", "E104", "E107"):
            raise
        data = b""
    try:
        beat = json.loads(data)
        owner = _Owner(
            printable(str(beat["host"]))[:64],
            str(beat["machine"]),
            int(beat["pid"]),
            beat["started"],
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, data
    return owner, data


def _busy(state: ChainState, owner: _Owner | None) -> BusyError:
    return BusyError(
        "E010",
        f"ledger/{state.chain}",
        got=f"run {state.run}, which {owner or 'a process'} may still write",
        expected="no other writer",
        next_step="End that process, or wait until it has ended.",
    )


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
