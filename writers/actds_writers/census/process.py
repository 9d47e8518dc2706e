"""The census process: the scheduler side of the account, on disk and with its own ledger chain.

``python -m actds_writers.census.process`` reads its settings and link from standard input. It
outlives engine, writer and command, so it accounts for whatever happens to them. What the census
has seen is durable in a journal before any row that depends on it, so it may be killed itself: at
the end the process, or recovery in its place, ends the writer's chain, commits the tables and
removes the journal. The main thread owns the census and never waits for the disk;
``actds-accept`` accepts connections; ``actds-journal`` writes the journal and answers the writer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Union

import pyarrow as pa
import zstandard
from pydantic import ConfigDict, Discriminator, Tag, TypeAdapter

from actds.dataset.commit import commit_part, in_parts
from actds.dataset.ledger import Chain, fence, read_ledger
from actds.dataset.reading import read_genesis
from actds.errors import ActdsError
from actds.format import canonical, schema, tables
from actds.format.apart import TablesApart
from actds.format.schema import CloseReason, PartBody, PartTable, RunBody, ShardBody, ShardManifest
from actds.format.shard import read_checked
from actds.format.tables import UNKNOWN_WEIGHTS
from actds.store import Store, layout, local_folder, open_store
from actds_writers.census.census import Census, CensusTables
from actds_writers.config import CensusSettings
from actds_writers.ipc.link import Hub, Link, process_arguments
from actds_writers.ipc.messages import ClientFacts, Done, Finish, Secure, Secured
from actds_writers.sampling import Lot

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

Begin = Callable[[], str | None]
Answer = Callable[[ActdsError | None], object]


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
        # What comes meanwhile waits for the next time: a busy engine would let nobody be answered.
        n_left = len(self._lines)
        while n_left:
            self._dataset = self._dataset or self._begin()
            if self._dataset is None:
                return
            with self._changed:
                n_lines, nbytes = 0, 0
                while n_lines < n_left and nbytes < SEGMENT_NBYTES:
                    nbytes += len(self._lines[n_lines])
                    n_lines += 1
                taken = self._lines[:n_lines]
            self._put(taken)
            with self._changed:
                del self._lines[:n_lines]
                self._nbytes -= nbytes
            n_left -= n_lines

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
    acknowledged: dict[Lot, int]
    dropped_steps: frozenset[int]


def end_writer_chain(store: Store, dataset: str, run: str) -> WriterEnd | None:
    """Fence the run's writer chain if it is still open; return what it has committed, if it began.

    The ledger alone decides, also where an acknowledgement was lost (spec 0.1 section 8.3).
    """
    for state in read_ledger(store, dataset).values():
        if state.run != run or state.kind != "writer":
            continue
        n_hooks = len(read_genesis(store).hooks)
        acknowledged: dict[Lot, int] = {}
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
                is_whole = len(manifest.hooks) == n_hooks
                lot = manifest.phase, None if is_whole else tuple(manifest.hooks)
                acknowledged[lot] = max(acknowledged.get(lot, -1), manifest.last_step)
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


log = logging.getLogger("actds")
POLL_S = 0.1
PROGRESS_INTERVAL_S = 0.25
ORPHAN_PATIENCE_S = 60.0
MAX_DRAINED = 100_000
"""Messages taken before an answer to the writer; what its rows depend on has long been sent."""


class CensusProcess:
    """Runs one census until scheduler and writer are gone.

    Its memory grows with the run, because the tables are made at the end, from all of it; old
    entries are packed, and ``sizing.census_nbytes`` is the bound.
    """

    def __init__(self, link: Link, settings: CensusSettings) -> None:
        self._settings, self._link = settings, link
        self._hub = Hub(link.listen("census"))
        self._store = open_store(settings.root)
        self._census = Census()
        self._client = ClientFacts()
        self._chain: Chain | None = None
        self._engine_spoke = False
        self._told = False
        self._journal = Journal(self._store, settings.run, self._begin)
        self._wanted: Secure | None = None
        self._reason: CloseReason | None = None
        self._beside: dict[str, int] = {}
        self._last_progress = 0.0
        self._reserved: Path | None = None

    def run(self) -> int:
        while not self._ended():
            self._hub.poll(POLL_S, self._take)
            self._secure()
            self._reserve()
            self._report()
        if "harvest" not in self._hub.roles():
            # The command was killed; nobody else is left to remove sockets and ring.
            self._hub.close()
            shutil.rmtree(self._link.folder, ignore_errors=True)
        try:
            totals = self._finish()
        except ActdsError as error:
            log.error("%s", error)
            self._hub.send("harvest", error)
            return 1
        self._hub.send("harvest", replace(self._census.progress(), connected=True))
        self._hub.send("harvest", Done(totals))
        return 0

    def _take(self, role: str, message: object, _connection: Connection) -> None:
        if role in ("scheduler", "worker"):
            self._census.observe(message)
            self._tell_mismatch()
            self._journal.add(message)
            self._engine_spoke = True
        elif isinstance(message, ClientFacts):
            self._client = merged(self._client, message)
            self._journal.add(message)
        elif isinstance(message, Secure):
            self._wanted = message
        elif isinstance(message, Finish):
            self._reason = message.reason
            if message.unknown_weights:
                self._beside[UNKNOWN_WEIGHTS] = 1

    def _tell_mismatch(self) -> None:
        """End the run through its writer, once, when worker and scheduler name other tokens."""
        error = self._census.sampled.mismatch
        if error is not None and not self._told:
            self._told = self._hub.send("writer", error)

    def _secure(self) -> None:
        """Answer the writer when the census of its rows is durable.

        Worker and scheduler send before the writer does, over their own sockets: take what has
        arrived there first.
        """
        if self._wanted is None:
            return
        drained = 0
        while drained < MAX_DRAINED and (n_messages := self._hub.poll(0, self._take)):
            drained += n_messages
        step, n_drawing = self._wanted.last_step, self._wanted.n_drawing
        missing = [
            (role, expected)
            for role, expected, is_there in (
                ("scheduler", "the schedule of every row", self._census.has_scheduled(step)),
                (
                    "worker",
                    "how the rows of the step were drawn",
                    self._census.has_drawn(step, n_drawing),
                ),
            )
            if not is_there
        ]
        if missing:
            role, expected = missing[0]
            if role in self._hub.roles():
                return
            got, place = f"the {role} disconnected without reporting it", f"census at step {step}"
            self._hub.send("writer", ActdsError("E505", place, got=got, expected=expected))
        else:
            self._journal.secure(lambda error: self._hub.send("writer", error or Secured(step)))
        self._wanted = None

    def _begin(self) -> str | None:
        """Begin the chain once engine and dataset exist; return the dataset's id.

        Early, and not with the tables, so that a later recovery can fence it.
        """
        dataset = self._dataset() if self._engine_spoke else None
        if dataset is not None:
            self._chain = self._chain or self._begin_chain(dataset)
        return dataset

    def _dataset(self) -> str | None:
        """Return the id of the dataset; None while there is none, or one of another harvest."""
        if not self._store.exists(layout.GENESIS):
            return None
        dataset = read_genesis(self._store).dataset
        return dataset if self._settings.dataset in (None, dataset) else None

    def _begin_chain(self, dataset: str) -> Chain:
        run, software = self._settings.run, self._settings.software
        return Chain.begin(self._store, dataset, run, "census", software, part=self._settings.part)

    def _ended(self) -> bool:
        if self._hub.roles() & {"scheduler", "worker", "writer"}:
            return self._hub.is_left_by("harvest", ORPHAN_PATIENCE_S)
        return self._reason is not None or self._hub.is_left_by("harvest")

    def _report(self) -> None:
        if time.monotonic() - self._last_progress > PROGRESS_INTERVAL_S:
            self._last_progress = time.monotonic()
            connected = self._hub.has_met("scheduler")
            progress = replace(self._census.progress(), connected=connected)
            self._hub.send("harvest", progress, patient=False)

    def _reserve(self) -> None:
        """Hold back disk space as soon as the dataset exists."""
        folder = local_folder(self._settings.root)
        if folder is None or self._reserved is not None or self._dataset() is None:
            return
        self._reserved = folder / f"{RESERVE}{self._settings.run}"
        try:
            with open(self._reserved, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._settings.reserve_nbytes)
        except OSError as error:
            log.warning("cannot reserve disk space: %s", error.strerror)

    def _finish(self) -> dict[str, int]:
        """Write the tables, close the chain, end the writer's chain if it is still open."""
        if self._reserved is not None:
            self._reserved.unlink(missing_ok=True)
        store, run = self._store, self._settings.run
        dataset = self._dataset()
        if dataset is None:
            return {}  # the run never began: nothing of it exists that could be accounted for
        ended = end_writer_chain(store, dataset, run)
        # The tables follow from the journal, should they have to be written a second time.
        self._journal.finish()
        if ended is None:
            # The journal may have begun all the same.
            if self._chain is not None:
                self._chain.close("failed", {})
            remove_journal(store, run)
            return {}
        chain = self._chain or self._begin_chain(dataset)
        settings = self._link.settings
        tables = self._census.tables(
            ended.acknowledged,
            self._client,
            ended.dropped_steps,
            settings.design(run),
            settings.overflow,
        )
        commit_census(store, chain, run, tables)
        chain.close(self._reason or "interrupted", tables.totals | self._beside)
        remove_journal(store, run)
        return tables.totals


if __name__ == "__main__":
    sys.exit(CensusProcess(*process_arguments("census")).run())
