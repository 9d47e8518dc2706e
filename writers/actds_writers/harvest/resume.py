"""Resume: what an earlier run has finished, so that the next one need not redo it.

Stands before the token's way: reads the ledger and the census of the dataset.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc

from actds.errors import ActdsError
from actds.reading import Catalog
from actds.schema import RunRecord
from actds.store import open_store
from actds.store.local import lock_dataset as lock_dataset
from actds_writers.config import Plan
from actds_writers.harvest.recover import recover_runs, require_accounted

MUST_AGREE = (
    "model.config_sha256",
    "model.weights_sha256",
    "tokenizer.sha256",
    "prompts.source",
    "prompts.n_records",
    "prompts.sha256",
    "sampling.temperature",
    "sampling.max_tokens",
)


def finished_rows(folder: str | Path, plan: Plan) -> set[int]:
    """Return the source rows whose requests an earlier run finished, every position accounted.

    A request counts as finished when it ended by itself and none of its positions is aborted;
    what an overflow policy dropped stays dropped. The caller holds the dataset's lock, so no
    process of an earlier run is left: what was killed is recovered.

    Raises:
        ActdsError: E010 when the dataset was made from another model or other prompts; E312 when
            a run of it has neither census nor journal.
    """
    store = open_store(folder)
    require_accounted(recover_runs(store))
    store.remove_temporary()
    catalog = Catalog.read(store)
    declared = {fact.name: fact.value for fact in plan.facts}
    finished: set[int] = set()
    for run in catalog.runs_with_data:
        if run in catalog.runs:
            _compare(catalog.runs[run], declared)
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
        if row["finish_reason"] in ("stop", "length") and row["request"] not in incomplete
    }


def _compare(record: RunRecord, declared: dict[str, bool | int | str | None]) -> None:
    for name in MUST_AGREE:
        before = record.fields[name].value if name in record.fields else None
        if name in declared and before != declared[name]:
            raise ActdsError(
                "E010", name, got=repr(declared[name]), expected=f"{before!r} as in {record.run}"
            )
