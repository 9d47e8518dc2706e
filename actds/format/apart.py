"""Tables of strangers, read apart: in a process that may die, and has bounds of memory and time.

A Parquet file is parsed by a library of C++ that allocates what the file says and has crashed on
broken files before. What it says hides behind compression, dictionaries and run lengths, so that
no look at the footer bounds it. Hence the parse runs in a process of its own, and its death is a
finding. The whole parse, and not a trial of it: a trial would read every table twice, and what
passed it could still differ from what is parsed afterwards. The columns come back as Arrow IPC of
a process that runs this module, never of the file.

One process serves all files of a validator, one after the other, and ends by itself when it has
nothing to do for a minute. Before each file it sets its own limits: ``RLIMIT_DATA`` above what it
holds by twice the columns that are allowed, and ``RLIMIT_CPU``, which a loaded machine does not
shorten. Where a system has no ``/proc/self/statm`` (macOS), there is no limit of
memory: the claims of the footer, the time and the death of the process are what is left.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from actds.errors import ActdsError
from actds.format import parquet

if TYPE_CHECKING:
    from actds.format import tables

__all__ = ["TablesApart", "pid", "start"]

_IDLE_S = 60
_MAX_DEATHS = 3
_BEGUN, _LENGTHS = b".", struct.Struct("<QQ")
_SLACK_NBYTES = 64 << 20  # of the decoder, beside columns that exist twice while they grow
_CPU_S, _CPU_NBYTES = 2, 1 << 23  # seconds for any file, and bytes that take a further one
_MIN_NBYTES, _MAX_RATIO = 1 << 25, 16
"""Bytes of all columns for a byte of the dataset: rows are larger than what is said about them, and
so are honest tables without rows than a sixteenth of their columns."""


class _Reader:
    """The process that reads, as its owner sees it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        # Of the path that found this package: never the folder that somebody happens to be in.
        paths = [str(Path(__file__).parents[2]), *(path for path in sys.path if path)]
        # Arrow imports numpy where there is one, and takes a third longer; nothing here needs it.
        code = f"import sys; sys.modules['numpy'] = None; from {__name__} import serve; serve()"
        command = [sys.executable, "-P", "-c", code]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
            # Memory goes back to the system, and none of it is reserved beforehand.
            "ARROW_DEFAULT_MEMORY_POOL": "system",
        }
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment,
        )

    @property
    def pid(self) -> int:
        """Return its id."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Return whether the process is there, and is of this process and no fork's parent."""
        return self.owner == os.getpid() and self._process.poll() is None

    def ask(self, request: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], pa.Buffer]:
        """Return the answer and what came with it.

        Raises:
            _Gone: the process had ended before it began.
            EOFError: it ended while it worked.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            _send(self._process.stdin.fileno(), request, parts)
            _taken(self._process.stdout.fileno(), len(_BEGUN))
        except (OSError, EOFError):
            raise _Gone from None
        return _receive(self._process.stdout.fileno())

    def end(self) -> str:
        """End the process, and return the words for how it ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code == -signal.SIGXCPU:
            return "takes too long"
        return f"ends its parser with {signal.Signals(-code).name if code < 0 else f'code {code}'}"


class _Gone(Exception):
    """The process had ended before a request."""


_lock = threading.Lock()
_reader: _Reader | None = None
_deaths: list[str] = []


def start() -> None:
    """Start the process, so that it is ready when the first table is; forget how others ended."""
    with _lock:
        _deaths.clear()
        _usable()


def pid() -> int:
    """Return the id of the process, which is started where there is none."""
    with _lock:
        return _usable().pid


class TablesApart:
    """Reads the tables of one dataset in the other process.

    Args:
        dataset_nbytes: size of all its files: what all columns together may have follows from it.
    """

    def __init__(self, dataset_nbytes: int) -> None:
        self._room = _MIN_NBYTES + _MAX_RATIO * dataset_nbytes
        self._nbytes: dict[str, int] = {}
        self._total = 0
        start()

    def from_parquet(
        self, name: tables.TableName, data: bytes, place: str, columns: list[str] | None = None
    ) -> pa.Table:
        """Return a table from the bytes of a file, statistics checked; as ``tables.from_parquet``.

        Raises:
            ActdsError: as ``tables.from_parquet``; E206 also for a file that ends its parser, that
                makes the dataset's tables too large, or that comes after three such files.
        """
        held = self._nbytes.get(place, 0)
        limit = self._room - self._total + held
        from actds.format import tables  # the other process has no need of it

        table = _read(data, place, tables.bare_schema(name), columns, limit)
        self._nbytes[place] = max(held, table.nbytes)
        self._total += self._nbytes[place] - held
        return table


def _read(
    data: bytes, place: str, schema: pa.Schema, columns: list[str] | None, limit: int
) -> pa.Table:
    head = schema.serialize().to_pybytes()
    request = {"place": place, "columns": columns, "limit": limit, "n_schema": len(head)}
    with _lock:
        if len(_deaths) >= _MAX_DEATHS:
            got = f"a table after {_MAX_DEATHS} others that ended their parser"
            raise ActdsError("E206", place, got=got, expected="tables that can be parsed")
        answer, body = _ask(request, [head, data], place)
    if "error" in answer:
        code, where, got, expected = answer["error"]
        raise ActdsError(code, where, got=got, expected=expected)
    return pa.ipc.open_stream(body).read_all()


def _ask(
    request: dict[str, Any], parts: list[bytes], place: str
) -> tuple[dict[str, Any], pa.Buffer]:
    how = "finds no parser"
    for _ in range(2):
        reader = _usable()
        try:
            return reader.ask(request, parts)
        except _Gone:  # since nobody asked: ask another one
            reader.end()
        except (OSError, EOFError):
            how = reader.end()
            break
        except BaseException:  # an answer that nobody took would be the next one's
            reader.end()
            raise
    _deaths.append(place)
    raise ActdsError("E206", place, got=f"a file that {how}", expected="a readable Parquet file")


def _usable() -> _Reader:
    global _reader
    if _reader is None or not _reader.is_usable:
        if _reader is not None and _reader.owner == os.getpid():
            _reader.end()
        _reader = _Reader()
    return _reader


@atexit.register
def _end() -> None:
    if _reader is not None and _reader.owner == os.getpid():
        _reader.end()


# the other process ------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests on standard input until it ends, or nobody asks for a minute."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What a library prints must not get among the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    while select.select([0], [], [], _IDLE_S)[0]:
        _set(resource.RLIMIT_DATA, resource.getrlimit(resource.RLIMIT_DATA)[1])
        try:
            request, body = _receive(0)
        except EOFError:
            break
        os.write(answers, _BEGUN)
        n_schema = request["n_schema"]
        data = body.slice(n_schema)
        _limit(data.size, request["limit"])
        try:
            schema = pa.ipc.read_schema(body.slice(0, n_schema))
            table = parquet.read(
                data,
                request["place"],
                schema,
                request["columns"],
                statistics=True,
                limit=request["limit"],
            )
        except ActdsError as error:
            said = (error.code, error.place, error.got, error.expected)
            _send(answers, {"error": said}, [])
            continue
        counted = pa.MockOutputStream()
        _stream(table, counted)
        _send(answers, {}, [], counted.size())
        with os.fdopen(answers, "wb", closefd=False) as sink:
            _stream(table, pa.PythonFile(sink, "w"))
        del table, data, body
    os._exit(0)  # with nothing to tidy up, and somebody waiting


def _stream(table: pa.Table, sink: Any) -> None:
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)


def _limit(file_nbytes: int, columns_nbytes: int) -> None:
    """Bound this process: what it holds and the CPU time that it took, and a share for one file."""
    seconds = int(time.process_time()) + 1 + _CPU_S + file_nbytes // _CPU_NBYTES
    _set(resource.RLIMIT_CPU, seconds)
    try:
        held = int(Path("/proc/self/statm").read_text("ascii").split()[5]) * resource.getpagesize()
    except OSError:
        return
    _set(resource.RLIMIT_DATA, held + _SLACK_NBYTES + 2 * columns_nbytes)


def _set(what: int, soft: int) -> None:
    hard = resource.getrlimit(what)[1]
    if resource.RLIM_INFINITY not in (soft, hard):
        soft = min(soft, hard)
    resource.setrlimit(what, (soft, hard))


# what goes to and fro ---------------------------------------------------------------------------


def _send(pipe: int, words: dict[str, Any], parts: list[bytes], more_nbytes: int = 0) -> None:
    """Write a message: two lengths, words as JSON, then bytes, of which some may follow."""
    text = json.dumps(words).encode()
    lengths = _LENGTHS.pack(len(text), sum(map(len, parts)) + more_nbytes)
    for part in (lengths, text, *parts):
        view = memoryview(part)
        while view:
            view = view[os.write(pipe, view) :]


def _receive(pipe: int) -> tuple[dict[str, Any], pa.Buffer]:
    """Return the next message.

    Raises:
        EOFError: the other side closed the pipe.
    """
    n_text, n_bytes = _LENGTHS.unpack(_taken(pipe, _LENGTHS.size))
    words = json.loads(bytes(_taken(pipe, n_text)))
    return words, _taken(pipe, n_bytes)


def _taken(pipe: int, nbytes: int) -> pa.Buffer:
    buffer = pa.allocate_buffer(nbytes)
    view = memoryview(buffer)
    while view:
        n = os.readv(pipe, [view])
        if n == 0:
            raise EOFError("the other process is gone")
        view = view[n:]
    return buffer
