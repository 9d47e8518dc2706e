"""Runs that end suddenly, on a disk or in an object store, and what a recovery must leave of them.

The synthetic pipeline is harvested and its processes are killed or stopped in the middle.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

import actds
from actds.store import open_store
from actds_testing.synthetic_engine import (
    D_MODEL,
    GENERATED,
    PROMPT_LEN,
    SyntheticEngine,
    pipeline_for,
)
from actds_validators.validate.validation import validate
from actds_writers.harvest.processes import Pipeline
from actds_writers.ipc.messages import ClientFacts, PromptFact

N_POSITIONS = PROMPT_LEN + GENERATED - 1


def prompts(n: int) -> tuple[PromptFact, ...]:
    """Return what a client tells of its prompts."""
    return tuple(PromptFact(f"p{k}", f"name {k}", "source", k) for k in range(n))


def serve_three_shards(
    pipeline: Pipeline, engine: SyntheticEngine, out: Path | str, *, drained: bool = False
) -> int:
    """Serve requests until three shards are acknowledged; return how many were served.

    Args:
        pipeline: of the harvest.
        engine: of the pipeline.
        out: where the pipeline writes to.
        drained: wait for the writer after each request, so that few are served on a slow store.
    """
    number = 0
    while len(shard_records(out)) < 3:
        engine.request(number)
        if drained:
            engine.drain(pipeline)
        pipeline.poll()
        number += 1
    return number


def harvest_and_kill(
    out: Path | str,
    *names: str,
    facts: ClientFacts | None = None,
    drained: bool = False,
    **options: Any,
) -> int:
    """Harvest until three shards are acknowledged, then kill; return the requests served."""
    pipeline = pipeline_for(out, **options)
    try:
        if facts is not None:
            pipeline.send_client_facts(facts)
        engine = SyntheticEngine(pipeline)
        number = serve_three_shards(pipeline, engine, out, drained=drained)
        kill(pipeline, *names)
        engine.close()
    finally:
        pipeline.__exit__()
    return number


def kill(pipeline: Pipeline, *names: str) -> None:
    """Kill processes of a pipeline, and wait until they are gone."""
    for name in names:
        os.kill(pipeline.processes[name].pid, signal.SIGKILL)
    for name in names:
        pipeline.processes[name].wait()


def shard_records(out: Path | str) -> list[dict[str, Any]]:
    """Return the ledger records of the shards that are acknowledged."""
    store = open_store(out)
    paths = [path for path in store.list("ledger") if path.startswith("ledger/w-")]
    found = [json.loads(store.read(path)) for path in paths if Path(path).name[0].isdigit()]
    return [record for record in found if record["type"] == "shard"]


def contents(out: Path | str) -> dict[str, bytes]:
    """Return the bytes of every file of a dataset."""
    store = open_store(out)
    return {path: store.read(path) for path in store.list()}


def clean(out: Path | str, *, warnings: frozenset[str] = frozenset({"E105"})) -> actds.Dataset:
    """Return a dataset that has no error, and no warning but these and that of a dead writer."""
    report = validate(out, level="deep")
    assert not report.errors, report.errors
    assert {finding.code for finding in report.warnings} <= warnings | {"E421"}
    return actds.open(out)


def accounts(out: Path | str) -> tuple[object, ...]:
    """Return what a dataset says of its requests and rows."""
    dataset = actds.open(out)
    tables = (dataset.requests, dataset.spans, dataset.steps)
    return (*(table(run=True) for table in tables), dataset.n_rows)


def check_values(dataset: actds.Dataset) -> None:
    """Check that every row is the one that the synthetic engine computed for its position."""
    for shard in dataset.shards:
        tokens = shard.tokens(["request", "position"])
        label = tokens["request"].to_numpy() * 100 + tokens["position"].to_numpy() + 1
        for index, hook in enumerate(("resid_post.1", "resid_post.2")):
            rows = shard.array(hook).read_all()
            mine = (label + index).astype(np.uint16)
            assert np.array_equal(rows, np.repeat(mine[:, None], D_MODEL, axis=1))
