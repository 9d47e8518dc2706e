"""Resume: what an earlier run has finished, so that the next one need not redo it.

Stands before the token's way: reads the ledger and the census of the dataset.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc

from actds import layout, schema
from actds.catalog import Catalog
from actds.errors import ActdsError
from actds.ledger import fence, read_ledger
from actds.lock import lock_dataset as lock_dataset
from actds.schema.v0_1 import Genesis, RunRecord
from actds.seal import runs_with_data
from actds.store import LocalStore, open_store
from actds_writers.plan import Plan

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


def finished_rows(folder: Path, plan: Plan) -> set[int]:
    """Return the source rows whose requests an earlier run finished, every position accounted.

    A request counts as finished when it ended by itself and none of its positions is aborted;
    what an overflow policy dropped stays dropped. The caller holds the dataset's lock, so no
    process of an earlier run is left: chains that are still open are fenced.

    Raises:
        ActdsError: E010 when the dataset was made from another model or other prompts, or when a
            run of it has no census.
    """
    store = open_store(folder)
    _end_dead_chains(store)
    catalog = Catalog.read(store)
    declared = {fact.name: fact.value for fact in plan.facts}
    finished: set[int] = set()
    for run in runs_with_data(catalog):
        if run in catalog.runs:
            _compare(catalog.runs[run], declared)
        if not _census_closed(catalog, run):
            raise ActdsError(
                "E010",
                f"{folder} run {run}",
                got="no census: its census process was killed",
                expected="an accounted run",
                next_step="The run cannot be accounted for; write a new dataset.",
            )
        finished |= _finished_of(catalog, run)
    return finished


def _end_dead_chains(store: LocalStore) -> None:
    genesis = schema.parse(Genesis, store.read(layout.GENESIS), layout.GENESIS)
    for state in read_ledger(store, genesis.dataset).values():
        if state.state == "open":
            fence(store, genesis.dataset, state.chain, "its process ended without closing it")
    store.remove_temporary()


def _census_closed(catalog: Catalog, run: str) -> bool:
    return any(
        chain.run == run and chain.kind == "census" and chain.state == "closed"
        for chain in catalog.chains.values()
    )


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
