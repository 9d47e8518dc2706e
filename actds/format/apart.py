"""Work apart: parsers of what strangers made, in a process that may die within its bounds.

Tables of a dataset are read so (``TablesApart``), and files of other libraries.

A library of C++ allocates what a file says, and has crashed on broken files before. What a file
says hides behind compression, dictionaries, strides and run lengths, so that no look at its header
bounds it. Hence the parse runs in a process of its own, and its death is a finding. The whole
parse, and not a trial of it: a trial would read everything twice, and what passed it could still
differ from what is parsed afterwards.

One process serves one request after the other, and ends by itself when it has nothing to do for a
minute. Before each it sets its own limits: ``RLIMIT_DATA`` above what it holds by what the request
is allowed, and ``RLIMIT_CPU``, which a loaded machine does not shorten. Where a system has no
``/proc/self/statm`` (macOS), there is no limit of memory: checks of lengths, the time and the death
of the process are what is left.
"""

from __future__ import annotations

import atexit
import importlib
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
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import pyarrow as pa

from actds.errors import ActdsError
from actds.format import parquet

if TYPE_CHECKING:
    from actds.format import tables

_IDLE_S = 60
MAX_DEATHS = 3
_BEGUN, _LENGTHS = b".", struct.Struct("<QQ")
_CPU_S, _CPU_NBYTES = 2, 1 << 23  # seconds for any request, and bytes that take a further one


class Request(NamedTuple):
    """What is asked of a process.

    Args:
        words: the request, as JSON, to which the bytes of ``parts`` belong.
        code: of the error at ``place`` when the process ends over it.
        nbytes: memory that the process may take for it beside what it holds.
        imports: modules to import before the limits are set, where they are installed.
    """

    words: dict[str, Any]
    parts: Sequence[bytes]
    place: str
    code: str
    expected: str
    nbytes: int
    cpu_s: int
    imports: tuple[str, ...] = ()

    def error(self, got: str) -> ActdsError:
        return ActdsError(self.code, self.place, got=got, expected=self.expected)


class Reply(NamedTuple):
    """One of the answers of a handler: words, buffers, and further bytes that it writes itself."""

    words: dict[str, Any]
    parts: Sequence[Any] = ()
    nbytes: int = 0
    write: Callable[[BinaryIO], None] = lambda sink: None


Handler = Callable[[dict[str, Any], pa.Buffer], Iterator[Reply]]


def cpu_seconds(nbytes: int) -> int:
    """Return the seconds that a parse of so many bytes may compute."""
    return _CPU_S + nbytes // _CPU_NBYTES


class _Gone(Exception):
    """The process had ended before a request."""


class Apart:
    """Processes that serve requests, one each, which are started when somebody asks.

    Args:
        handler: ``module:function``, a ``Handler``.
        numpy: whether it needs NumPy, which Arrow imports where there is one: a third longer.
    """

    def __init__(self, handler: str, *, numpy: bool = True) -> None:
        self._handler, self._numpy = handler, numpy
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        self.deaths: list[str] = []
        _all.add(self)

    def start(self) -> int:
        """Start a process, so that it is ready for the first request; return its id."""
        process = self._take()
        self._idle.append(process)
        return process.pid

    def ask(self, request: Request) -> Iterator[tuple[dict[str, Any], pa.Buffer]]:
        """Yield the answers: words, and the bytes that came with them.

        Raises:
            ActdsError: that of the handler; of the request's code for a process that ends, an
                exception that the handler did not foresee, and after three processes that ended.
        """
        if len(self.deaths) >= MAX_DEATHS:
            raise request.error(f"a file after {MAX_DEATHS} others that ended their parser")
        process = self._begin(request)
        answered = False
        try:
            while True:
                words, body = process.receive()
                if "error" in words or "fault" in words or "end" in words:
                    answered = True
                    break
                yield words, body
        except (OSError, EOFError):
            self.deaths.append(request.place)
            raise request.error(f"a file that {process.end()}") from None
        finally:
            if answered:
                self._idle.append(process)
            else:  # an answer that nobody took would be the next one's
                process.end()
        if "error" in words:
            code, where, got, expected, step = words["error"]
            raise ActdsError(code, where, got=got, expected=expected, next_step=step)
        if "fault" in words:
            raise request.error(words["fault"])

    def _begin(self, request: Request) -> _Process:
        for _ in range(2):
            process = self._take()
            try:
                process.send(request)
                return process
            except _Gone:  # since nobody asked: take another one
                process.end()
            except BaseException:
                process.end()
                raise
        self.deaths.append(request.place)
        raise request.error("a file that finds no parser")

    def _take(self) -> _Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_usable:
                    return process
                if process.owner == os.getpid():
                    process.end()
        return _Process(self._handler, self._numpy)

    def end(self) -> None:
        while self._idle:
            process = self._idle.pop()
            if process.owner == os.getpid():
                process.end()


_all: weakref.WeakSet[Apart] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    for apart in list(_all):
        apart.end()


class _Process:
    """One process, as its owner sees it."""

    def __init__(self, handler: str, numpy: bool) -> None:
        self.owner = os.getpid()
        # Of the path that found this package: never the folder that somebody happens to be in.
        paths = [str(Path(__file__).parents[2]), *(path for path in sys.path if path)]
        without = "" if numpy else "sys.modules['numpy'] = None; "
        code = f"import sys; {without}from {__name__} import serve; serve({handler!r})"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
            # Memory goes back to the system, and none of it is reserved beforehand.
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """The process is there, and is of this process and no fork's parent."""
        return self.owner == os.getpid() and self._process.poll() is None

    def send(self, request: Request) -> None:
        """Send a request, and wait until the process has begun with it: ``_Gone`` it cannot."""
        assert self._process.stdin is not None and self._process.stdout is not None
        limits = [request.nbytes, request.cpu_s, list(request.imports)]
        try:
            _send(self._process.stdin.fileno(), {"limits": limits, **request.words}, request.parts)
            _taken(self._process.stdout.fileno(), len(_BEGUN))
        except (OSError, EOFError):
            raise _Gone from None

    def receive(self) -> tuple[dict[str, Any], pa.Buffer]:
        """Return the next answer; EOFError the process ended."""
        assert self._process.stdout is not None
        return _receive(self._process.stdout.fileno())

    def end(self) -> str:
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


# the other process ------------------------------------------------------------------------------


def serve(handler: str) -> None:
    """Answer requests on standard input until it ends, or nobody asks for a minute."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What a library prints must not get among the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    module, _, name = handler.partition(":")
    handle: Handler = getattr(importlib.import_module(module), name)
    while select.select([0], [], [], _IDLE_S)[0]:
        _set(resource.RLIMIT_DATA, resource.getrlimit(resource.RLIMIT_DATA)[1])
        try:
            words, body = _receive(0)
        except EOFError:
            break
        os.write(answers, _BEGUN)
        nbytes, cpu_s, imports = words.pop("limits")
        for module in imports:
            with suppress(ImportError):
                importlib.import_module(module)
        _limit(nbytes, cpu_s)
        _answer(answers, handle, words, body)
        del body
    os._exit(0)  # with nothing to tidy up, and somebody waiting


def _answer(answers: int, handle: Handler, words: dict[str, Any], body: pa.Buffer) -> None:
    """Send all that a handler answers, and what it raises."""
    last: dict[str, Any] = {"end": True}
    try:
        for reply in handle(words, body):
            _send(answers, reply.words, reply.parts, reply.nbytes)
            with os.fdopen(answers, "wb", closefd=False) as sink:
                reply.write(sink)
    except BrokenPipeError:
        os._exit(0)
    except ActdsError as error:
        last = {"error": (error.code, error.place, error.got, error.expected, error.next_step)}
    except Exception as error:  # of libraries that raise anything
        text = (str(error).splitlines() or [""])[0][:200]
        last = {"fault": f"{type(error).__name__}: {text}" if text else type(error).__name__}
    _send(answers, last, [])


def _limit(nbytes: int, cpu_s: int) -> None:
    """Bound what this process holds, and the CPU time that it took, by a share for one request."""
    _set(resource.RLIMIT_CPU, int(time.process_time()) + 1 + cpu_s)
    try:
        data_pages = int(Path("/proc/self/statm").read_text("ascii").split()[5])
    except OSError:
        return
    _set(resource.RLIMIT_DATA, data_pages * resource.getpagesize() + nbytes)


def _set(what: int, soft: int) -> None:
    hard = resource.getrlimit(what)[1]
    if resource.RLIM_INFINITY not in (soft, hard):
        soft = min(soft, hard)
    resource.setrlimit(what, (soft, hard))


# what goes to and fro ---------------------------------------------------------------------------


def _send(pipe: int, words: dict[str, Any], parts: Sequence[Any], more_nbytes: int = 0) -> None:
    """Write a message: two lengths, words as JSON, then bytes, of which some may follow."""
    text = json.dumps(words).encode()
    buffers = [pa.py_buffer(part) for part in parts]
    lengths = _LENGTHS.pack(len(text), sum(buffer.size for buffer in buffers) + more_nbytes)
    views = [memoryview(part) for part in (lengths + text, *buffers)]
    while views:  # at once: the other side wakes up once for a small message
        n = os.writev(pipe, views)
        while views and n >= len(views[0]):
            n -= len(views.pop(0))
        if views:
            views[0] = views[0][n:]


def _receive(pipe: int) -> tuple[dict[str, Any], pa.Buffer]:
    """Return the next message; EOFError the other side closed the pipe."""
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


# tables of a dataset ----------------------------------------------------------------------------

_SLACK_NBYTES = 64 << 20  # of the decoder, beside columns that exist twice while they grow
_MIN_NBYTES, _MAX_RATIO = 1 << 25, 16
"""Bytes of all columns for a byte of the dataset: rows are larger than what is said about them, and
so are honest tables without rows than a sixteenth of their columns."""
_lock = threading.Lock()  # one file at a time: each may take the whole room
_parsers = Apart(f"{__name__}:parse", numpy=False)


def start() -> None:
    """Start the process, so that it is ready when the first table is; forget how others ended."""
    _parsers.deaths.clear()
    pid()


def pid() -> int:
    """Return the id of the process, which is started where there is none."""
    with _lock:
        return _parsers.start()


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
        self,
        name: tables.TableName,
        data: bytes,
        place: str,
        columns: list[str] | None = None,
        kept: list[str] | None = None,
    ) -> pa.Table:
        """Return a table from the bytes of a file, statistics checked; as ``tables.from_parquet``.

        Raises:
            ActdsError: as ``tables.from_parquet``; E206 also for a file that ends its parser, that
                makes the dataset's tables too large, or that comes after three such files.
        """
        nbytes_before = self._nbytes.get(place, 0)
        limit = self._room - self._total + nbytes_before
        from actds.format import tables  # the other process has no need of it

        head = tables.bare_schema(name).serialize().to_pybytes()
        words = {"place": place, "columns": columns, "kept": kept, "limit": limit}
        request = Request(
            {**words, "n_schema": len(head)},
            [head, data],
            place,
            "E206",
            "a readable Parquet file",
            _SLACK_NBYTES + 2 * limit,
            cpu_seconds(len(data)),
        )
        with _lock:
            [(answer, body)] = _parsers.ask(request)
        self._nbytes[place] = max(nbytes_before, answer["nbytes"])
        self._total += self._nbytes[place] - nbytes_before
        return pa.ipc.open_stream(body).read_all()


def parse(request: dict[str, Any], body: pa.Buffer) -> Iterator[Reply]:
    """Answer with a table as an Arrow stream: the handler in the other process."""
    schema = pa.ipc.read_schema(body.slice(0, request["n_schema"]))
    data, limit = body.slice(request["n_schema"]), request["limit"]
    place, columns = request["place"], request["columns"]
    table = parquet.read(data, place, schema, columns, statistics=True, limit=limit)
    nbytes = table.nbytes
    if request["kept"] is not None:
        table = table.select(request["kept"])
    yield stream_of(table, nbytes=nbytes)


def stream_of(table: pa.Table, **words: Any) -> Reply:
    """Return an answer with a table, as the other process gives it."""
    counted = pa.MockOutputStream()
    _stream(table, counted)
    return Reply(
        words, nbytes=counted.size(), write=lambda sink: _stream(table, pa.PythonFile(sink, "w"))
    )


def _stream(table: pa.Table, sink: Any) -> None:
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
