"""How the census of a run ends: the writer's chain first, then the tables, part by part.

Stands between census and ledger; the census process uses it at the end of a run, and recovery in
its place when that process was killed.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from actds import schema
from actds.commit import commit_part
from actds.errors import ActdsError
from actds.format import layout, tables
from actds.format.shard import read_checked
from actds.ledger import Chain, fence, read_ledger
from actds.schema import PartBody, PartTable, RunBody, ShardBody, ShardManifest
from actds.store import Store
from actds_writers.census.census import CensusTables

RESERVE = ".tmp-reserve-"
"""How the name of the file begins that holds disk space back for the end of a run."""
ROWS_PER_PART = 1_000_000
LOST_REASON = "writer_ended"
"""Reason of rows that were computed and are not committed."""


@dataclass(frozen=True)
class WriterEnd:
    """How a writer ended.

    Args:
        acknowledged: per phase, the last step whose rows are committed.
        dropped_steps: steps that stand in the committed drop log.
    """

    acknowledged: dict[str, int]
    dropped_steps: frozenset[int]


def end_writer_chain(store: Store, dataset: str, run: str) -> WriterEnd | None:
    """Fence the run's writer chain if it is still open; return what is committed.

    Returns ``None`` when the run never began: it has no writer chain, or one that ended before the
    run record, and then nothing but that is committed.

    The ledger decides what is committed: an acknowledgement that got lost on its way is no loss.

    Spec: 0.1 section 8.3.
    """
    for state in read_ledger(store, dataset).values():
        if state.run != run or state.kind != "writer":
            continue
        acknowledged: dict[str, int] = {}
        dropped: set[int] = set()
        began = False
        if state.state == "open":
            # Whoever it belongs to may have been faster than the fence: what it has then, counts.
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
                data = store.read(body.file.path)
                steps = tables.from_parquet("drops", data, body.file.path, ["step"])["step"]
                dropped.update(steps.to_pylist())
        return WriterEnd(acknowledged, frozenset(dropped)) if began else None
    return None


def commit_census(
    store: Store,
    chain: Chain,
    run: str,
    found: CensusTables,
    present: dict[str, PartBody] | None = None,
) -> None:
    """Commit the tables of a census in parts.

    Args:
        store: where the dataset stands.
        chain: the open census chain of the run.
        run: the run.
        found: the tables.
        present: parts of the run that a census before has committed, by path; they stay.

    Raises:
        ActdsError: E312 when a part that is committed says something else; E308, E309 or E503.
    """
    named: list[tuple[PartTable, pa.Table]] = [
        ("requests", found.requests),
        ("steps", found.steps),
        ("spans", found.spans),
    ]
    for name, table in named:
        for n, first in enumerate(range(0, max(table.num_rows, 1), ROWS_PER_PART)):
            piece = table.slice(first, ROWS_PER_PART)
            path = layout.part_path(name, run, n)
            body = (present or {}).get(path)
            if body is not None:
                _compare(store, name, piece, body)
                continue
            if present is not None and store.exists(path):
                store.remove(path)  # its process died between the file and the record
            commit_part(store, chain, name, run, n, piece)


def _compare(store: Store, name: PartTable, piece: pa.Table, body: PartBody) -> None:
    path = body.file.path
    before = tables.from_parquet(name, read_checked(store, path, body.file), path)
    if not before.equals(piece.cast(tables.bare_schema(name))):
        raise ActdsError(
            "E312", path, got="a part that differs from the journal", expected="the same rows"
        )
