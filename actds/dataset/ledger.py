"""The ledger: one append-only hash chain per process, whose records are the commit points."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from actds.dataset.heartbeat import Heartbeat, remove_heartbeat
from actds.errors import ActdsError
from actds.format import canonical, schema
from actds.format.schema import (
    Body,
    ChainKind,
    CloseBody,
    CloseReason,
    FenceBody,
    Head,
    LedgerRecord,
    OpenBody,
    RecordType,
)
from actds.store import Store, layout
from actds.text import printable

GENESIS_PREV = "0" * 64
_RECORD_NAME = re.compile(r"[0-9]+\.json")
_FENCE_ATTEMPTS = 64

State = Literal["open", "closed", "fenced", "broken"]


class Chain:
    """The chain of this process: every append is durable when it returns.

    One chain belongs to one incarnation of one process. After a failed write it is dead, because
    it is unknown what the disk stored. Threads of the process may share it.

    Spec: 0.1 section 8.2.
    """

    def __init__(self, store: Store, dataset: str, chain: str) -> None:
        self.store = store
        self.dataset = dataset
        self.chain = chain
        self._seq = 0
        self._prev = GENESIS_PREV
        self.ended: ActdsError | None = None
        self._lock = threading.RLock()
        self._heartbeat: Heartbeat | None = None

    @classmethod
    def begin(
        cls,
        store: Store,
        dataset: str,
        run: str,
        kind: ChainKind,
        software: str,
        chain_id: str | None = None,
        part: str = "",
    ) -> Chain:
        """Return a new chain whose ``open`` record is durable, and whose heart beats until it ends.

        Args:
            store: the dataset's store.
            dataset: id of the dataset.
            run: run that the process works for.
            kind: ``writer``, ``census`` or ``tool``.
            software: program and version of the process.
            chain_id: its id, where that was drawn before; a new one when None.
            part: share of the prompts that the run serves, as ``3/16``; empty for all.

        Raises:
            ActdsError: E503 when the disk refuses; E010 when another run serves the same part.
        """
        chain = cls(store, dataset, chain_id or layout.new_id(kind[0]))
        opening = OpenBody(kind=kind, run=run, started_ns=time.time_ns(), software=software)
        chain._heartbeat = Heartbeat(store, run, chain.chain, part)
        chain.append("open", opening)
        return chain

    def append(self, record_type: RecordType, body: Body) -> LedgerRecord:
        """Commit one record: what it names is acknowledged when this returns.

        Args:
            record_type: type of the record.
            body: its body, the model of that type.

        Raises:
            ActdsError: E308 when another process fenced the chain; E503 when the disk refused now
                or before; E304 after the close.

        Spec: 0.1 section 8.2.
        """
        with self._lock, self.fatal():
            record = LedgerRecord(
                dataset=self.dataset,
                chain=self.chain,
                seq=self._seq,
                prev=self._prev,
                type=record_type,
                body=body.model_dump(mode="json"),
            )
            data = schema.to_bytes(record)
            path = layout.record_path(self.chain, self._seq)
            try:
                self.store.put_new(path, [data])
            except ActdsError as error:
                if error.code != "E309":
                    raise
                got = _ended_by(self.store, path)
                raise ActdsError("E308", path, got=got, expected="no record yet") from None
            self._seq += 1
            self._prev = canonical.digest(data)
            return record

    def close(self, reason: CloseReason, totals: dict[str, int]) -> LedgerRecord:
        """Commit the last record; the chain takes no more.

        Raises:
            ActdsError: as ``append``.
        """
        with self._lock:
            record = self.append("close", CloseBody(reason=reason, totals=totals))
            self.ended = ActdsError(
                "E304", f"ledger/{self.chain}", got="an append after close", expected="none"
            )
            self._stop_beating()
            return record

    def _stop_beating(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()

    @contextmanager
    def fatal(self) -> Iterator[None]:
        """Run a block of puts; a failed one ends the chain for good.

        Raises:
            ActdsError: what ended the chain before, or what the block raised.
        """
        if self.ended is not None:
            raise self.ended
        try:
            yield
        except ActdsError as error:
            if error.code not in ("E308", "E309", "E503"):
                raise
            self.ended = self._fenced() if error.code == "E309" else None
            self.ended = self.ended or error
            self._stop_beating()
            raise self.ended from None

    def _fenced(self) -> ActdsError | None:
        """Return E308 when a name is taken because who took the run over has ended this chain."""
        path = layout.record_path(self.chain, self._seq)
        try:
            if not self.store.exists(path):
                return None
        except ActdsError:
            return None  # a store that does not answer: what is known is that the name is taken
        got = _ended_by(self.store, path)
        return ActdsError("E308", path, got=got, expected="no record yet")


def _ended_by(store: Store, path: str) -> str:
    """Return what stands where a record was to stand: a fence says why."""
    try:
        record = schema.parse(LedgerRecord, store.read(path, canonical.MAX_DOCUMENT_NBYTES), path)
        body = record.typed_body()
    except ActdsError:
        body = None
    if isinstance(body, FenceBody):
        return f"a fence: {printable(body.reason)[:300]}"
    return "a record of another process"


@dataclass(frozen=True)
class ChainState:
    """A chain as it was read.

    Args:
        chain: its id.
        records: all records, in order; of a broken chain those that can be read.
        head: digest of the last record; empty when broken.
        state: ``open``, ``closed``, ``fenced``, or ``broken`` when a link does not hold.
        kind: process that wrote it; ``unknown`` when a broken chain does not say.
        run: run that it belongs to; empty when a broken chain does not say.
    """

    chain: str
    records: list[LedgerRecord]
    head: str
    state: State
    kind: ChainKind | Literal["unknown"]
    run: str

    @property
    def close(self) -> CloseBody | None:
        """Return the body of the close record, if there is one."""
        body = self.records[-1].typed_body() if self.records else None
        return body if isinstance(body, CloseBody) else None

    @property
    def head_entry(self) -> Head | None:
        """Return the head that a seal pins; None while the chain is open, or when broken."""
        if self.state == "open" or self.state == "broken":
            return None
        return Head(n_records=len(self.records), sha256=self.head, state=self.state)


def read_chain(store: Store, dataset: str, chain: str, version: str | None = None) -> ChainState:
    """Return a chain after checking every link.

    Args:
        store: the dataset's store.
        dataset: its id.
        chain: id of the chain.
        version: format version of the dataset; None takes each record's own.

    Raises:
        ActdsError: E301 gap or wrong number; E302 broken link; E303 foreign record; E304 record
            after the end; E102, E103 or E106 malformed record.

    Spec: 0.1 section 8.2.
    """
    layout.segment(chain, f"ledger/{ascii(chain)[1:65]}")
    names = [path.split("/")[2:] for path in store.list(f"ledger/{chain}")]
    numbered = {name[0] for name in names if len(name) == 1 and _RECORD_NAME.fullmatch(name[0])}
    ahead = (layout.record_path(chain, seq) for seq in range(len(numbered)))
    store.read_ahead(ahead, canonical.MAX_DOCUMENT_NBYTES)
    records: list[LedgerRecord] = []
    prev = GENESIS_PREV
    for seq in range(len(numbered)):
        path = layout.record_path(chain, seq)
        if path.rpartition("/")[2] not in numbered:
            raise ActdsError("E301", path, got="no record", expected=f"{len(numbered)} in a row")
        record, head = read_record(store, dataset, chain, seq, prev, version)
        if records and records[-1].type in ("close", "fence"):
            raise ActdsError("E304", path, got=f"a {record.type} record", expected="none")
        records.append(record)
        prev = head
    if not records:
        raise ActdsError("E301", f"ledger/{chain}", got="no record", expected="an open record")
    opening = records[0].typed_body()
    if not isinstance(opening, OpenBody):
        raise ActdsError(
            "E301",
            layout.record_path(chain, 0),
            got=f"a {records[0].type} record",
            expected="an open record",
        )
    ends: dict[str, State] = {"close": "closed", "fence": "fenced"}
    state = ends.get(records[-1].type, "open")
    return ChainState(chain, records, prev, state, opening.kind, opening.run)


def read_record(
    store: Store, dataset: str, chain: str, seq: int, prev: str, version: str | None = None
) -> tuple[LedgerRecord, str]:
    """Return one record of a chain and its digest, after checking its link to the one before.

    Args:
        store: the dataset's store.
        dataset: its id.
        chain: id of the chain.
        seq: number of the record.
        prev: digest of the record before; ``GENESIS_PREV`` for the first.
        version: as for ``read_chain``.

    Raises:
        ActdsError: E104 no such record; E301, E302, E303, E102, E103, E106 as ``read_chain``.

    Spec: 0.1 section 8.2.
    """
    path = layout.record_path(chain, seq)
    data = store.read(path, canonical.MAX_DOCUMENT_NBYTES)
    record = schema.parse(LedgerRecord, data, path, version)
    _check_link(record, dataset, chain, seq, prev, path)
    return record, canonical.digest(data)


def _check_link(
    record: LedgerRecord, dataset: str, chain: str, seq: int, prev: str, path: str
) -> None:
    got = (record.dataset, record.chain, record.seq)
    if got != (dataset, chain, seq):
        raise ActdsError(
            "E303",
            path,
            got=f"record {record.seq} of {record.chain} in dataset {record.dataset}",
            expected=f"record {seq} of {chain} in dataset {dataset}",
        )
    if record.prev != prev:
        raise ActdsError("E302", path, got=f"prev {record.prev[:16]}…", expected=f"{prev[:16]}…")
    if (record.type == "open") != (seq == 0):
        raise ActdsError(
            "E301", path, got=f"a {record.type} record", expected="open first, and only there"
        )


def read_broken_chain(store: Store, dataset: str, chain: str) -> ChainState:
    """Return the readable records of a chain that ``read_chain`` refused."""
    records = []
    for path in store.list(f"ledger/{chain}"):
        try:
            data = store.read(path, canonical.MAX_DOCUMENT_NBYTES)
            record = schema.parse(LedgerRecord, data, path)
        except ActdsError:
            continue  # the first fault of the chain is reported already; this one follows from it
        if record.dataset == dataset:
            records.append(record)
    opening = records[0].typed_body() if records else None
    if not isinstance(opening, OpenBody):
        return ChainState(chain, records, "", "broken", "unknown", "")
    return ChainState(chain, records, "", "broken", opening.kind, opening.run)


def chain_names(store: Store) -> list[str]:
    """Return the names of the folders that hold chains, sorted; a name may be a bad one."""
    paths = (path.split("/") for path in store.list("ledger"))
    return sorted({parts[1] for parts in paths if len(parts) > 2})


def read_ledger(store: Store, dataset: str) -> dict[str, ChainState]:
    """Return every chain of a dataset, by id, sorted.

    Raises:
        ActdsError: as ``read_chain``; E107 for a chain of a bad name.

    Spec: 0.1 section 8.
    """
    return {chain: read_chain(store, dataset, chain) for chain in chain_names(store)}


def fence(store: Store, dataset: str, chain: str, reason: str) -> ChainState:
    """End a chain whose writer is dead, and return the ended chain.

    The fence takes the chain's next number, so a writer that lives after all fails its next
    append. When that writer is faster, the fence tries the number after.

    Raises:
        ActdsError: E305 when the chain outruns the fence; as ``read_chain``; E503.

    Spec: 0.1 section 8.3.
    """
    for _ in range(_FENCE_ATTEMPTS):
        state = read_chain(store, dataset, chain)
        if state.state != "open":
            remove_heartbeat(store, state.run, chain)
            return state
        seq = len(state.records)
        record = LedgerRecord(
            dataset=dataset,
            chain=chain,
            seq=seq,
            prev=state.head,
            type="fence",
            body=FenceBody(reason=reason).model_dump(mode="json"),
        )
        try:
            store.put_new(layout.record_path(chain, seq), [schema.to_bytes(record)])
        except ActdsError as error:
            if error.code != "E309":
                raise
    state = read_chain(store, dataset, chain)
    if state.state == "open":
        raise ActdsError(
            "E305",
            f"ledger/{chain}",
            got="a writer that still appends",
            expected="a chain without a writer",
        )
    return state
