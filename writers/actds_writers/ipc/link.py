"""Transport between the processes of one harvest: Unix sockets in a private folder, shared memory.

The link names the sockets, a sender never blocks its engine, and the hub is the event loop of the
writer and census processes. The worker creates the host ring, stage 2 of the data path, and
allocates slices for the rows of steps; the writer attaches to it, reads them and acknowledges.
Beside it is a page with the state of the writer's queues.

Folder and key are in one environment variable, which engine and worker processes inherit; a
configuration field would enter the engine's compile-cache key and make every run compile again.
"""

from __future__ import annotations

import bisect
import json
import logging
import mmap
import os
import pickle
import queue
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np

from actds.errors import ActdsError
from actds.format.arrays import DTYPES
from actds.format.readouts import NONE
from actds.format.schema import DType
from actds_writers.config import HarvestSettings
from actds_writers.ipc.messages import HookSpec, QueueState

ALIGNMENT = 64
PAGE = mmap.PAGESIZE
Arrays = tuple[np.ndarray, ...]
"""Rows of several hooks: bit patterns ``(n_hooks, n, d_model)``, one array per block."""


def create_memory(path: Path, nbytes: int) -> mmap.mmap:
    """Return new shared memory, reserved now; raises E503 where there is too little."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _too_little(path, nbytes, str(error.strerror)) from None


def require_room(folder: Path, nbytes: int) -> None:
    """Refuse a folder without room for so many bytes, before an engine is started; raises E503."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise _too_little(folder, nbytes, f"{free} bytes are free")


def _too_little(path: Path, nbytes: int, why: str) -> ActdsError:
    return ActdsError(
        "E503",
        str(path),
        got=f"{nbytes} bytes of shared memory: {why}",
        expected="enough shared memory for the ring",
        next_step="Lower ring_mib, or enlarge /dev/shm (of a container: its shm-size).",
    )


def attach_memory(path: Path, nbytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


def aligned(nbytes: int, unit: int = ALIGNMENT) -> int:
    return -(-nbytes // unit) * unit


class RingSpace:
    """The allocator of a ring, used by its producer: ``capacity`` bytes, and the slices in use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._starts: list[int] = []
        self._stops: dict[int, int] = {}
        self._next = 0
        self.n_used = 0
        """Bytes of the slices in use."""

    @property
    def depth(self) -> int:
        return len(self._starts)

    def reserve(self, nbytes: int) -> int | None:
        """Return the offset of a free slice, ``None`` while there is none; E009 if none ever is."""
        size = aligned(nbytes)
        if size > self.capacity:
            raise ActdsError(
                "E009",
                "ring",
                got=f"a step of {nbytes} bytes in a ring of {self.capacity}",
                expected="a ring that holds at least one step",
                next_step="Raise ring_mib or lower max_num_batched_tokens.",
            )
        start = self._find(size)
        if start is not None:
            bisect.insort(self._starts, start)
            self._stops[start] = self._next = start + size
            self.n_used += size
        return start

    def has_room(self, nbytes: int) -> bool:
        return self._find(aligned(nbytes)) is not None

    def free(self, offset: int) -> None:
        del self._starts[bisect.bisect_left(self._starts, offset)]
        self.n_used -= self._stops.pop(offset) - offset

    def _find(self, size: int) -> int | None:
        # Slices are freed nearly in the order of their reservation: mostly the first try succeeds.
        index = bisect.bisect_left(self._starts, self._next)
        limit = self._starts[index] if index < len(self._starts) else self.capacity
        if limit - self._next >= size:
            return self._next
        free_from = 0
        for start in self._starts:
            if start - free_from >= size:
                return free_from
            free_from = self._stops[start]
        return free_from if self.capacity - free_from >= size else None


@dataclass(frozen=True)
class Block:
    """Hooks of one stage, width and type, whose rows are one array ``(n_hooks, n, d_model)``.

    ``before_nbytes`` is the size of a row in the blocks before this one.
    """

    hooks: tuple[int, ...]
    d_model: int
    dtype: DType
    before_nbytes: int

    @property
    def row_nbytes(self) -> int:
        return len(self.hooks) * self.d_model * DTYPES[self.dtype].itemsize

    def shape(self, n_rows: int) -> tuple[int, int, int]:
        return len(self.hooks), n_rows, self.d_model


class RowLayout:
    """The memory layout of the rows of several hooks: one block per stage, width and type.

    Blocks of wide types come first, so that every block is aligned to its type for any number of
    rows, and ``n`` rows take exactly ``n * row_nbytes``. Those of a pipeline stage stand together.
    """

    def __init__(self, hooks: Sequence[HookSpec]) -> None:
        groups: dict[tuple[int, int, DType], list[int]] = {}
        for number, hook in enumerate(hooks):
            groups.setdefault((hook.stage, hook.d_model, hook.dtype), []).append(number)
        blocks: list[Block] = []
        self.row_nbytes = 0
        for (_, d_model, dtype), numbers in sorted(
            groups.items(), key=lambda group: (group[0][0], -DTYPES[group[0][2]].itemsize)
        ):
            blocks.append(Block(tuple(numbers), d_model, dtype, self.row_nbytes))
            self.row_nbytes += blocks[-1].row_nbytes
        self.blocks = tuple(blocks)
        self._bits = [(block, DTYPES[block.dtype].bits) for block in blocks]
        places = {
            number: (b, i) for b, block in enumerate(blocks) for i, number in enumerate(block.hooks)
        }
        self.places = tuple(places[number] for number in range(len(hooks)))
        """By hook, its block and its index in the block."""

    def arrays(self, memory: mmap.mmap, offset: int, n_rows: int) -> Arrays:
        """Return the bit patterns of ``n_rows`` rows in shared memory, by block, without a copy."""
        return tuple(
            view_memory(memory, offset + n_rows * b.before_nbytes, b.shape(n_rows), bits)
            for b, bits in self._bits
        )

    def empty(self, n_rows: int) -> Arrays:
        return tuple(np.empty(block.shape(n_rows), bits) for block, bits in self._bits)


def view_memory(
    memory: mmap.mmap, offset: int, shape: tuple[int, ...], bits: np.dtype[Any]
) -> np.ndarray:
    count = int(np.prod(shape))
    return np.frombuffer(memory, dtype=bits, count=count, offset=offset).reshape(shape)


NBYTES = PAGE
_NUMBER, _STATE = struct.Struct("<Q"), struct.Struct("<qqd")
_UNKNOWN = -1.0
_MAX_READS = 1000  # a process that is killed while it publishes leaves a page of no moment


class QueuePage:
    """A page in which a writer publishes the state of its queues: what is read is of one moment.

    A writer that waits for its disk sends nothing, and that is when its queues matter. The number
    is odd while the state changes, and another one afterwards.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._n_published = 0
        self._last: QueueState | None = None
        self._lock = threading.Lock()

    @classmethod
    def beside(cls, ring_path: Path, *, new: bool = False) -> QueuePage:
        """Return the page of a ring; the worker makes it."""
        path = ring_path.with_name(f"{ring_path.name}-queues")
        return cls(create_memory(path, NBYTES) if new else attach_memory(path, NBYTES))

    def publish(self, state: QueueState) -> None:
        """Replace the state; any thread of one process may."""
        depth, backlog, p99 = state
        with self._lock:
            self._n_published += 1
            _NUMBER.pack_into(self._memory, 0, 2 * self._n_published - 1)
            last = _UNKNOWN if p99 is None else p99
            _STATE.pack_into(self._memory, _NUMBER.size, depth, backlog, last)
            _NUMBER.pack_into(self._memory, 0, 2 * self._n_published)

    def read(self) -> QueueState | None:
        for _ in range(_MAX_READS):
            (before,) = _NUMBER.unpack_from(self._memory)
            depth, backlog, p99 = _STATE.unpack_from(self._memory, _NUMBER.size)
            (after,) = _NUMBER.unpack_from(self._memory)
            if before == after and not before % 2:
                known = None if p99 == _UNKNOWN else p99
                self._last = QueueState(depth, backlog, known) if before else None
                break
        return self._last


ENVIRONMENT = "ACTDS_LINK"
CONNECT_TIMEOUT_S = 180.0
"""A busy machine takes a minute to start a process; one that has died is noticed at once."""
MAX_WAITING = 100_000
"""Messages that may wait; about a minute of a busy engine."""
CLOSE_TIMEOUT_S = 10.0
NOTES_INTERVAL_S = 0.2


LinkFile = Literal["probes", "interventions", "profile"]
"""Files in the private folder of a harvest."""


@dataclass(frozen=True)
class Link:
    """The addresses of writer and census, and what every process of a harvest needs to know.

    Args:
        folder: private folder of the sockets and the ring.
        key: shared secret of the harvest, hexadecimal.
        hooks: ``(kind, layer)`` of each hook to capture.
        ring_nbytes: of the host ring; the worker takes more when two steps need it, as of the
            readouts' lane; of the staging ring, when one does.
        live: whether the engine serves traffic, which continues when capture fails.
        readouts: value of ``capture.readouts``.
        interventions_path: of ``interventions.Planned``, ``None`` where no row is changed.
        profile_path: of the profile whose alerts there are.
        replica: as in ``WriterSettings``.
    """

    folder: str
    key: str
    run: str
    hooks: tuple[tuple[str, int], ...]
    settings: HarvestSettings
    ring_nbytes: int
    staging_nbytes: int
    client_pid: int
    live: bool = False
    lane_nbytes: int = 0
    readouts: str = NONE
    probes_path: str | None = None
    interventions_path: str | None = None
    profile_path: str | None = None
    replica: tuple[int, int] = (0, 1)

    def to_environment(self) -> str:
        shared = set(HarvestSettings.model_fields)
        settings = self.settings.model_dump(mode="json", include=shared)
        return json.dumps({**self.__dict__, "settings": settings})

    @property
    def may_wait(self) -> bool:
        """Whether the engine may wait for a disk: not while it serves, unless it is told to.

        Whoever stores a least share of every step waits as well, where not even that has room.
        """
        return not self.live or self.settings.overflow == "block" or self.settings.reserves

    def far(self, interventions_path: str | None) -> Link:
        """Return the link of a worker on another machine: what to run, and nobody to speak to."""
        link = replace(self, folder="", key="", probes_path=None, profile_path=None)
        return replace(link, interventions_path=interventions_path)

    @property
    def is_near(self) -> bool:
        """Whether the processes of the harvest are on this machine, with the memory of its ring."""
        return bool(self.folder) and Path(self.folder).is_dir()

    @classmethod
    def from_environment(cls) -> Link | None:
        text = os.environ.get(ENVIRONMENT)
        return cls.of(text) if text else None

    @classmethod
    def of(cls, text: str) -> Link:
        """Return the link that ``to_environment`` has written."""
        fields = json.loads(text)
        fields["settings"] = HarvestSettings.model_validate_json(json.dumps(fields["settings"]))
        number, n_replicas = fields["replica"]
        fields["replica"] = (int(number), int(n_replicas))
        fields["hooks"] = tuple((kind, int(layer)) for kind, layer in fields["hooks"])
        return cls(**fields)

    def listen(self, name: str) -> Listener:
        return Listener(self._address(name), family="AF_UNIX", authkey=bytes.fromhex(self.key))

    def connect(
        self,
        name: str,
        role: str,
        timeout_s: float = CONNECT_TIMEOUT_S,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> Connection:
        """Return a connection whose first message is the sender's role.

        Args:
            name: the listener: ``writer``, ``census`` or ``readouts``.
            is_alive: whether the listener can still come up; E506 when it does not in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                connection = Client(
                    self._address(name), family="AF_UNIX", authkey=bytes.fromhex(self.key)
                )
                connection.send(role)
                return connection
            # A process that is killed as it accepts leaves an end of file.
            except (FileNotFoundError, ConnectionError, EOFError):
                alive = is_alive()
                if time.monotonic() > deadline or not alive:
                    waited = f"no listener within {timeout_s:.0f} s"
                    raise ActdsError(
                        "E506",
                        f"link {name}",
                        got=waited if alive else "its process has ended",
                        expected=f"the {name} process",
                    ) from None
                time.sleep(0.02)

    def note(self, words: str) -> None:
        """Say what an engine does while it starts; ``notes`` hands it to who waits for that."""
        if not self.folder:
            return
        with suppress(OSError), open(self._notes, "a", encoding="utf-8") as file:
            file.write(f"{words}\n")

    @contextmanager
    def notes(self, take: Callable[[str], None]) -> Iterator[None]:
        """Hand over each note once while the block runs, on thread ``actds-notes``."""
        taken: set[str] = set()
        ended = threading.Event()

        def look() -> None:
            while True:
                last = ended.wait(NOTES_INTERVAL_S)
                with suppress(OSError):
                    for words in self._notes.read_text("utf-8").splitlines():
                        if words not in taken:
                            taken.add(words)
                            take(words)
                if last:
                    return

        thread = threading.Thread(target=look, name="actds-notes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    @property
    def _notes(self) -> Path:
        return Path(self.folder) / "notes"

    def _address(self, name: str) -> str:
        return str(Path(self.folder) / f"{name}.sock")


def hang_up(connection: Connection) -> None:
    """Let both ends of a connection read its end, and leave it open.

    A connection is closed by the thread that reads it, and by no other: a descriptor that is closed
    while another thread reads or sends may be a stranger's file by then.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.shutdown(socket.SHUT_RDWR)


class Sender:
    """Sends in the background, in order, and never blocks its caller.

    A serving engine uses it: a socket whose receiver is stalled (a slow disk is enough) would stop
    its scheduler or worker, and with it the service. Their threads fill the queue; only the thread
    ``actds-sender`` writes to the connection.
    """

    def __init__(self, connection: Connection, limit: int = MAX_WAITING) -> None:
        self._connection, self._limit = connection, limit
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._gone = False
        self._thread = threading.Thread(target=self._work, name="actds-sender", daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        if self._gone:
            raise _lost_census("the process is gone")
        if self._queue.qsize() >= self._limit:
            self._gone = True  # a missing message would make the account wrong
            raise _lost_census(f"{self._limit} messages wait for it")
        self._queue.put(message)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self.end(timeout_s)
        if not self._thread.is_alive():
            self._connection.close()

    def end(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send what waits, within the timeout, and nothing after it."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._gone = True

    def _work(self) -> None:
        while (message := self._queue.get()) is not None and not self._gone:
            try:
                self._connection.send(message)
            except OSError:
                self._gone = True


def _lost_census(got: str) -> ActdsError:
    return ActdsError(
        "E505", "census process", got=got, expected="a process that takes every message"
    )


log = logging.getLogger("actds")
FIRST_CONTACT_S = 120.0
"""How long a process waits for the first message of the one that started it."""


class _Peer:
    """A connection on which every thread may send; the one that polls receives and closes."""

    def __init__(self, connection: Connection, role: str) -> None:
        self.connection, self.role = connection, role
        self._sending = threading.Lock()

    def send(self, message: object, *, patient: bool) -> bool:
        if not self._sending.acquire(blocking=patient):
            return False
        try:
            if not patient and not select.select([], [self.connection], [], 0)[1]:
                return False
            self.connection.send(message)
        except OSError:
            hang_up(self.connection)  # half a message may be sent; who polls reads the end
            return False
        finally:
            self._sending.release()
        return True

    def close(self) -> None:
        hang_up(self.connection)
        with self._sending:
            self.connection.close()


class Hub:
    """Accepts connections in the background and dispatches their messages.

    The thread ``actds-accept`` takes new peers, whose first message is their role; one thread polls
    them, and alone closes their connections; every thread may send. The table of peers is shared by
    all, under a lock.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._peers: dict[Connection, _Peer] = {}
        self._met: set[str] = set()
        self._left: dict[str, float] = {}
        self._began = time.monotonic()
        threading.Thread(target=self._accept, name="actds-accept", daemon=True).start()

    def close(self) -> None:
        with suppress(FileNotFoundError):
            self._listener.close()

    def has_met(self, role: str) -> bool:
        return role in self._met

    def is_left_by(self, role: str, for_s: float = 0.0) -> bool:
        """Return whether a peer of the role has gone, or did not connect in time.

        ``for_s``: only if an earlier call has seen that so many seconds ago.
        """
        now = time.monotonic()
        if role in self.roles() or not (self.has_met(role) or now - self._began > FIRST_CONTACT_S):
            return False
        return now - self._left.setdefault(role, now) >= for_s

    def roles(self) -> set[str]:
        with self._lock:
            return {peer.role for peer in self._peers.values()}

    def poll(self, timeout_s: float, take: Callable[[str, object, Connection], None]) -> int:
        """Pass waiting messages, one per peer, to ``take(role, message, connection)``.

        Returns how many there were. A connection that has ended is removed: that is how the loop
        learns that a peer is gone.
        """
        with self._lock:
            peers = dict(self._peers)
        if not peers:
            threading.Event().wait(timeout_s)
            return 0
        n_messages = 0
        for ready in wait(list(peers), timeout_s):
            if not isinstance(ready, Connection):
                continue
            try:
                message = ready.recv()
            except (EOFError, OSError):
                self._forget(peers[ready])
                continue
            n_messages += 1
            take(peers[ready].role, message, ready)
        return n_messages

    def send(self, role: str, message: object, *, patient: bool = True) -> bool:
        """Send a message to a role, from any thread; return whether it was sent.

        Args:
            patient: wait until the receiver has room. Progress, which the next message renews, must
                not: a command busy in its engine would stop the writer, and the writer the engine.
        """
        peer = self._peer(role)
        return peer is not None and peer.send(message, patient=patient)

    def is_connected(self, connection: Connection) -> bool:
        with self._lock:
            return connection in self._peers

    def disconnect(self, role: str) -> None:
        while (peer := self._peer(role)) is not None:
            self._forget(peer)

    def _peer(self, role: str) -> _Peer | None:
        with self._lock:
            return next((peer for peer in self._peers.values() if peer.role == role), None)

    def _forget(self, peer: _Peer) -> None:
        with self._lock:
            self._peers.pop(peer.connection, None)
        peer.close()
        log.debug("peer %s is gone", peer.role)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, ConnectionError) as error:
                log.warning("refused a connection: %r", error)
                continue
            except OSError:
                return  # the listener is closed
            try:
                role = str(connection.recv())
            except (EOFError, OSError) as error:
                log.warning("a peer disconnected before it sent its role: %r", error)
                connection.close()
                continue
            with self._lock:
                self._peers[connection] = _Peer(connection, role)
                self._met.add(role)


def process_arguments(name: str) -> tuple[Link, Any]:
    """Return link and settings of a process of a harvest, from its standard input.

    Also sets up its log and the mask of its files; Ctrl-C and SIGTERM are left to the command or
    server, which decides when a harvest ends: the process ends when those it is linked to have.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format=f"actds {name}: %(message)s", stream=sys.stderr)
    link, settings = pickle.load(sys.stdin.buffer)
    if link.settings.umask is not None:
        os.umask(link.settings.umask)
    return link, settings
