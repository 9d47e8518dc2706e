"""The census on disk: its journal during a run, its tables when the run ends.

What the census has seen is durable before any row that depends on it. Thread ``actds-journal`` of
the census process writes the journal; the main thread adds messages and never waits for the disk.
At the end the process, or recovery in its place, ends the writer's chain, commits the tables and
removes the journal.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union

import pyarrow as pa
import zstandard
from pydantic import ConfigDict, Discriminator, Tag, TypeAdapter

from actds.dataset.commit import commit_part, in_parts
from actds.dataset.ledger import Chain, fence, read_ledger
from actds.errors import ActdsError
from actds.format import canonical, schema, tables
from actds.format.apart import TablesApart
from actds.format.schema import PartBody, PartTable, RunBody, ShardBody, ShardManifest
from actds.format.shard import read_checked
from actds.store import Store, layout, local_folder
from actds_writers.census.census import Census, CensusTables
from actds_writers.ipc.messages import ClientFacts

FORMAT, VERSION = "actds.journal", "0.1"
FIRST_PREV = "0" * 64
FLUSH_INTERVAL_S = 5.0
SEGMENT_NBYTES = 4 << 20
"""Bytes of lines after which a segment is written without a request."""
MAX_SEGMENT_NBYTES = 64 << 20
"""Most bytes of lines that a reader accepts in one segment."""
FACTS_PER_LINE = 5000
ROLES_PER_LINE = 1 << 20
"""Characters of the roles in a line of facts, from which on the next line begins."""

KINDS = (*Census.TAKES, ClientFacts)
"""The messages in a journal; a line has the name of the class."""

RESERVE = ".tmp-reserve-"
"""Prefix of the file that reserves disk space for the end of a run."""
LOST_REASON = "writer_ended"
"""Reason of rows that were computed and are not committed."""

Begin = Callable[[], str | None]
Answer = Callable[[ActdsError | None], None]


def _kind(pair: Any) -> Any:
    return pair[0] if isinstance(pair, list | tuple) and pair else None


_PAIRS: Any = tuple(
    Annotated[tuple[str, kind], Tag(kind.__name__)]  # type: ignore[valid-type]
    for kind in KINDS
)
_Line: Any = Annotated[Union[_PAIRS], Discriminator(_kind)]  # noqa: UP007
_LINE: TypeAdapter[tuple[str, object]] = TypeAdapter(
    _Line,
    config=ConfigDict(strict=True, extra="forbid", ser_json_bytes="hex", val_json_bytes="hex"),
)


def to_line(message: object) -> bytes:
    """Return a message as one line of JSON, ``["Kind", {fields}]``, with its line end.

    Arrays are lists of integers, bytes are hexadecimal; a number that JSON lacks is ``null``.
    """
    pair = type(message).__name__, message
    # numpy scalars are written as numbers, without a warning.
    return _LINE.dump_json(pair, warnings=False, fallback=lambda number: number.item()) + b"\n"


def from_line(line: bytes) -> object:
    return _LINE.validate_json(line)[1]


class Journal:
    """Makes messages durable in segments, on its own thread: the census never waits for it.

    What is not yet on disk waits in memory as lines of JSON: those of ``FLUSH_INTERVAL_S`` while
    the disk keeps up. ``begin`` is called before the first segment; it returns the id of the
    dataset, ``None`` while there is none. Spec: 0.1 section 9.7.
    """

    def __init__(self, store: Store, run: str, begin: Begin) -> None:
        self._store, self._run, self._begin = store, run, begin
        self._dataset: str | None = None
        self._lines: list[bytes] = []
        self._nbytes = 0
        self._waiting: list[Answer] = []
        self._changed = threading.Condition()
        self._stop = False
        self._n = 0
        self._prev = FIRST_PREV
        self.error: ActdsError | None = None
        self._thread = threading.Thread(target=self._work, name="actds-journal", daemon=True)
        self._thread.start()

    def add(self, message: object) -> None:
        """Take a message; it is durable after the next ``secure``, or after a few seconds."""
        lines = [to_line(part) for part in _split(message)]
        with self._changed:
            self._lines += lines
            self._nbytes += sum(map(len, lines))
            if self._nbytes >= SEGMENT_NBYTES:
                self._changed.notify()

    def secure(self, answer: Answer) -> None:
        with self._changed:
            self._waiting.append(answer)
            self._changed.notify()

    def finish(self) -> None:
        """End the thread and make the rest durable, or raise E503.

        What failed before is tried again: reserved disk space is free by now.
        """
        with self._changed:
            self._stop = True
            self._changed.notify()
        self._thread.join()
        self._write()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._is_due, timeout=FLUSH_INTERVAL_S)
                waiting, self._waiting = self._waiting, []
                if self._stop:
                    break
            try:
                if self.error is None:
                    self._write()
            except ActdsError as error:
                self.error = error
            except Exception as error:  # those who wait must get every error
                self.error = ActdsError(
                    "E901", "census journal", got=repr(error)[:500], expected="a segment"
                )
            for answer in waiting:
                answer(self.error or self._not_begun())
        for answer in waiting:
            answer(ActdsError("E505", "census", got="it is ending", expected="a running census"))

    def _is_due(self) -> bool:
        full = self._nbytes >= SEGMENT_NBYTES and self.error is None
        return self._stop or bool(self._waiting) or full

    def _not_begun(self) -> ActdsError | None:
        if self._dataset is not None:
            return None
        return ActdsError("E505", "census journal", got="no dataset", expected="one to write to")

    def _write(self) -> None:
        while self._lines:
            self._dataset = self._dataset or self._begin()
            if self._dataset is None:
                return
            with self._changed:
                n_lines, nbytes = 0, 0
                while n_lines < len(self._lines) and nbytes < SEGMENT_NBYTES:
                    nbytes += len(self._lines[n_lines])
                    n_lines += 1
                taken = self._lines[:n_lines]
            self._put(taken)
            with self._changed:
                del self._lines[:n_lines]
                self._nbytes -= nbytes

    def _put(self, lines: list[bytes]) -> None:
        header = _header(self._dataset, self._run, self._n, self._prev, len(lines))
        data = zstandard.ZstdCompressor(level=1).compress(canonical.dump(header) + b"".join(lines))
        path = layout.journal_path(self._run, self._n)
        if self._store.exists(path):
            # A put that failed after the file had its name; it was never reported as durable.
            self._store.remove(path)
        self._store.put_new(path, [data])
        self._prev = canonical.digest(data)
        self._n += 1


def merged(before: ClientFacts, new: ClientFacts) -> ClientFacts:
    prompts = {prompt.key: prompt for prompt in (*before.prompts, *new.prompts)}
    cached = {**before.engine_cached, **new.engine_cached}
    return ClientFacts(tuple(prompts.values()), cached, new.unbegun or before.unbegun)


def segments(store: Store, run: str) -> list[str]:
    return [path for path in store.list(f"journal/{run}") if _number(path) is not None]


def remove_journal(store: Store, run: str) -> None:
    """Remove the journal of a run whose census is closed, and its folder if it is local."""
    for path in segments(store, run):
        store.remove(path)
    folder = local_folder(store.uri)
    if folder is not None:
        with contextlib.suppress(OSError):  # another run's journal is still there
            (folder / "journal" / run).rmdir()
            (folder / "journal").rmdir()


def read_journal(store: Store, dataset: str, run: str) -> Iterator[object]:
    """Yield the messages of a run's journal, in the order in which the census took them.

    Raises:
        ActdsError: E312 when a segment is missing, foreign, not the next of its chain, or cannot
            be read.
    """
    numbers = {_number(path) for path in segments(store, run)}
    prev = FIRST_PREV
    for n in range(len(numbers)):
        path = layout.journal_path(run, n)
        if n not in numbers:
            raise broken(path, "no segment", f"{len(numbers)} consecutive segments")
        data = store.read(path, MAX_SEGMENT_NBYTES)
        header, lines = _opened(data, path)
        for name, value in _header(dataset, run, n, prev, len(lines)).items():
            if header[name] != value:
                raise broken(f"{path} {name}", f"{header[name]!r:.80}", repr(value))
        for number, line in enumerate(lines, 1):
            try:
                yield from_line(line)
            except (ValueError, RecursionError) as error:
                raise broken(f"{path} line {number}", str(error)[:200], "a message") from None
        prev = canonical.digest(data)


def _header(
    dataset: str | None, run: str, segment: int, prev: str, n_messages: int
) -> dict[str, object]:
    return {
        "dataset": dataset,
        "format": FORMAT,
        "n_messages": n_messages,
        "prev": prev,
        "run": run,
        "segment": segment,
        "version": VERSION,
    }


def _opened(data: bytes, path: str) -> tuple[dict[str, object], list[bytes]]:
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as reader:
            text = reader.read(MAX_SEGMENT_NBYTES + 1)
    except zstandard.ZstdError as error:
        raise broken(path, str(error)[:200], "a zstd frame") from None
    if len(text) > MAX_SEGMENT_NBYTES or not text.endswith(b"\n"):
        raise broken(path, f"{len(text)} bytes of lines", f"at most {MAX_SEGMENT_NBYTES}, whole")
    first, *lines = text.split(b"\n")[:-1]
    try:
        header = json.loads(first)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.keys() != _header(None, "", 0, "", 0).keys():
        raise broken(path, f"{first[:80]!r}", "a header")
    return header, lines


def _split(message: object) -> Iterator[object]:
    """Yield a message in parts that fit a segment: only client facts can be large."""
    if not isinstance(message, ClientFacts):
        yield message
        return
    cached = list(message.engine_cached.items())
    for first in range(0, len(cached), FACTS_PER_LINE):
        yield ClientFacts(engine_cached=dict(cached[first : first + FACTS_PER_LINE]))
    first = length = 0
    for last, prompt in enumerate(message.prompts, 1):
        length += len(prompt.roles)
        if length >= ROLES_PER_LINE or last - first >= FACTS_PER_LINE:
            yield ClientFacts(message.prompts[first:last])
            first, length = last, 0
    yield ClientFacts(message.prompts[first:], unbegun=message.unbegun)


def _number(path: str) -> int | None:
    match = re.fullmatch(r"journal/[^/]+/([0-9]{6,9})\.jsonl\.zst", path)
    return int(match[1]) if match else None


def broken(place: str, got: str, expected: str) -> ActdsError:
    return ActdsError("E312", place, got=got, expected=expected)


@dataclass(frozen=True)
class WriterEnd:
    acknowledged: dict[str, int]
    dropped_steps: frozenset[int]


def end_writer_chain(store: Store, dataset: str, run: str) -> WriterEnd | None:
    """Fence the run's writer chain if it is still open; return what it has committed, if it began.

    The ledger alone decides, also where an acknowledgement was lost (spec 0.1 section 8.3).
    """
    for state in read_ledger(store, dataset).values():
        if state.run != run or state.kind != "writer":
            continue
        acknowledged: dict[str, int] = {}
        dropped: set[int] = set()
        began = False
        if state.state == "open":
            # Its process may have been faster than the fence: the records after it count.
            state = fence(store, dataset, state.chain, "its writer ended without closing the chain")
        for record in state.records:
            body = record.typed_body()
            began = began or isinstance(body, RunBody)
            if isinstance(body, ShardBody):
                path = layout.manifest_path(body.shard)
                manifest = schema.parse(ShardManifest, store.read(path), path)
                last = acknowledged.get(manifest.phase, -1)
                acknowledged[manifest.phase] = max(last, manifest.last_step)
            elif isinstance(body, PartBody) and body.table == "drops":
                table = _read_apart(store, "drops", body, ["step"])
                dropped.update(table["step"].to_pylist())
        return WriterEnd(acknowledged, frozenset(dropped)) if began else None
    return None


def commit_census(
    store: Store,
    chain: Chain,
    run: str,
    census: CensusTables,
    present: dict[str, PartBody] | None = None,
) -> None:
    """Commit the tables of a census in parts; three of them only if they have rows.

    Args:
        present: parts that an earlier census of the run has committed, by path; they are kept.

    Raises:
        ActdsError: E312 when a committed part differs; E308, E309 or E503.
    """
    always: tuple[PartTable, ...] = ("requests", "steps", "spans")
    if_any: tuple[PartTable, ...] = ("roles", "origins", "sampled")
    for name in (*always, *if_any):
        table: pa.Table = getattr(census, name)
        if name in if_any and not table.num_rows:
            continue
        for n, piece in in_parts(table):
            path = layout.part_path(name, run, n)
            body = (present or {}).get(path)
            if body is not None:
                _compare(store, name, piece, body)
                continue
            if present is not None and store.exists(path):
                store.remove(path)  # its process died between the file and the record
            commit_part(store, chain, name, run, n, piece)


def _read_apart(
    store: Store, name: PartTable, body: PartBody, columns: list[str] | None = None
) -> pa.Table:
    """Return a committed table of a dataset that a stranger may have made."""
    path = body.file.path
    data = read_checked(store, path, body.file)
    return TablesApart(len(data)).from_parquet(name, data, path, columns)


def _compare(store: Store, name: PartTable, piece: pa.Table, body: PartBody) -> None:
    path = body.file.path
    before = _read_apart(store, name, body)
    if not before.equals(piece.cast(tables.bare_schema(name))):
        raise ActdsError(
            "E312", path, got="a part that differs from the journal", expected="the same rows"
        )
