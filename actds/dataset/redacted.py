"""Redaction: what of a request is to be gone, and what is left of it all the same.

Beside the account, which holds without a redacted request as well: who seals or validates asks here
whether the redaction is whole. What redacts writes by the same rules.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.catalog import Catalog
from actds.errors import Finding
from actds.format.schema import PartTable
from actds.format.tables import TableName
from actds.store import layout

LINES: tuple[PartTable, ...] = (
    *("roles", "origins", "sampled"),
    *("readouts", "alerts", "attention", "canary"),
)
"""Tables whose lines of a request go; others keep them, without what the request said."""
FORGOTTEN = (
    "internal_id",
    "token_digest",
    "sampling",
    "block_digests",
    "labels",
    "conversation",
    "turn",
    "reason",
)
"""Columns of ``requests`` that are null, where there was one."""
_MOVED = ("captured", "cache_ref")


def redacted_id(request: int) -> str:
    """Return what stands for the id of a redacted request.

    Spec: 0.1 section 8.6.
    """
    return f"redacted-{request}"


def is_of(table: pa.Table, requests: pa.Array) -> pa.ChunkedArray:
    """Return which lines are of some requests."""
    return pc.is_in(table["request"], requests)


def left_over(catalog: Catalog, run: str) -> list[Finding]:
    """Return an E427 for everything that is left of the redacted requests of a run.

    Raises:
        ActdsError: as ``Catalog.table``.

    Spec: 0.1 section 8.6.
    """
    numbers = catalog.redacted(run)
    if not numbers:
        return []
    requests = pa.array(sorted(numbers), pa.uint32())
    leftovers = [
        (path, "a file", "none: requests of it were redacted") for path in files_left(catalog, run)
    ]
    for shard in catalog.shards_of(run):
        path = layout.manifest_path(shard.name)
        n = pc.sum(is_of(shard.tokens(["request"]), requests)).as_py() or 0
        leftovers += [(path, f"{n} rows of redacted requests", "none")] if n else []
    for name in (*LINES, "requests", "spans"):
        table = catalog.sound_table(run, name)
        if table is None:
            continue
        n = pc.sum(_says_something(name, table.filter(is_of(table, requests)))).as_py() or 0
        place = layout.part_path(name, run, 0).rpartition("-")[0]
        leftovers += [(place, f"{n} lines of redacted requests", "none")] if n else []
    return [Finding("E427", place, got, expected) for place, got, expected in leftovers]


def files_left(catalog: Catalog, run: str) -> list[str]:
    """Return the files that are there of what was redacted, and of what it had replaced."""
    redacted = catalog.redacted_paths(run)
    paths = (path for path in catalog.superseded if layout.committed_path(path) in redacted)
    return [path for path in paths if catalog.store.exists(path)]


def _says_something(name: TableName, lines: pa.Table) -> pa.ChunkedArray | pa.Array:
    if name == "spans":
        return pc.is_in(lines["disposition"], pa.array(_MOVED))
    if name != "requests":
        return pa.array([True] * lines.num_rows)
    ids = pa.array([redacted_id(n) for n in lines["request"].to_pylist()])
    says = pc.not_equal(lines["external_id"], ids)
    for column in FORGOTTEN[:-1]:
        says = pc.or_(says, pc.is_valid(lines[column]))
    return says
