"""Resume: what an earlier run has finished, so that the next one need not redo it.

Stands before the token's way: reads the ledger and the census of the dataset.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pyarrow.compute as pc

from actds.catalog import Catalog
from actds.errors import ActdsError
from actds.schema.v0_1 import RunRecord
from actds.store import open_store
from actds_writers.plan import Plan

MUST_AGREE = (
    "model.config_sha256",
    "model.weights_sha256",
    "tokenizer.sha256",
    "prompts.sha256",
    "sampling.temperature",
    "sampling.max_tokens",
)


def lock_dataset(folder: Path) -> int:
    """Return an open descriptor that holds the dataset's lock for as long as it is open.

    The processes of a run inherit it, so the lock outlives a command that was killed.

    Raises:
        ActdsError: E010 when another run writes the dataset.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ActdsError(
            "E010",
            str(folder),
            got="a run that is still writing it",
            expected="no other writer",
            next_step="Wait until it has ended.",
        ) from None
    return descriptor


def finished_rows(folder: Path, plan: Plan) -> set[int]:
    """Return the source rows whose requests an earlier run finished, every position accounted.

    A request counts as finished when it ended by itself and none of its positions is aborted.

    Raises:
        ActdsError: E010 when the dataset was made from another model or other prompts, or when a
            run of it has no census.
    """
    catalog = Catalog.read(open_store(folder))
    declared = {fact.name: fact.value for fact in plan.facts}
    finished: set[int] = set()
    for run, record in catalog.runs.items():
        _compare(record, declared)
        if (run, "requests") not in catalog.parts:
            raise ActdsError(
                "E010",
                f"{folder} run {run}",
                got="no census: its census process was killed",
                expected="an accounted run",
                next_step="The run cannot be accounted for; write a new dataset.",
            )
        finished |= _finished_of(catalog, run)
    return finished


def _finished_of(catalog: Catalog, run: str) -> set[int]:
    spans = catalog.table("spans", run)
    aborted = spans.filter(pc.equal(spans["disposition"], "aborted"))
    incomplete = set(aborted["request"].to_pylist())
    requests = catalog.table("requests", run).select(["request", "source_row", "finish_reason"])
    return {
        row["source_row"]
        for row in requests.to_pylist()
        if row["finish_reason"] in ("stop", "length", "skipped")
        and row["request"] not in incomplete
    }


def _compare(record: RunRecord, declared: dict[str, bool | int | str | None]) -> None:
    for name in MUST_AGREE:
        before = record.fields[name].value if name in record.fields else None
        if name in declared and before != declared[name]:
            raise ActdsError(
                "E010", name, got=repr(declared[name]), expected=f"{before!r} as in {record.run}"
            )
