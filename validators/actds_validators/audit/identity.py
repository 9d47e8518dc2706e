"""Identity: whether the runs of a dataset are of one model, one set of settings, one policy."""

from __future__ import annotations

from collections import defaultdict

import pyarrow.compute as pc

from actds.dataset.reading import Catalog
from actds.format import tables

MODEL = (
    "model.weights_sha256", "model.config_sha256", "model.quantization", "tokenizer.sha256",
)  # fmt: skip
"""Facts in which runs of one model agree."""
LOADED = "model.parameters_sha256"
"""The weights in the memory of an engine; also of one whose weights came from no file."""
LAYOUT = (
    "engine.name", "engine.version", "engine.runner", "model.quantization",
    "machine.processor", "machine.torch", "numerics.device", "numerics.dtype",
    "serving.tensor_parallel", "serving.pipeline_parallel",
)  # fmt: skip
"""Facts on which the form of weights in memory depends: runs that differ in one say nothing."""
SETTINGS = (
    "capture.overflow_policy", "capture.cast", "capture.sampling", "engine.name",
    "engine.version", "engine.runner", "serving.mode", "serving.prefix_caching",
    "serving.chunked_prefill", "serving.enforce_eager", "serving.compilation_mode",
    "serving.cudagraph_mode", "serving.speculative_method", "serving.tensor_parallel",
    "sampling.temperature", "sampling.max_tokens",
)  # fmt: skip
"""Facts in which runs of one set of settings agree, beside all of the numerics."""


def one_model(name: str) -> bool:
    """Return whether runs that differ in a fact are of different models."""
    return name in MODEL or name == LOADED


def rows_of(catalog: Catalog) -> dict[str, int]:
    """Return the stored rows of each run that has data."""
    return {
        run: sum({m.row_set_sha256: m.n_rows for m in catalog.shards_by_run[run]}.values())
        for run in catalog.runs_with_data
    }


def differing_facts(catalog: Catalog) -> dict[str, dict[str, str]]:
    """Return the facts in which runs differ, the model first, each with its value in every run.

    A fact that some run does not know is no difference.
    """
    records = {run: catalog.runs[run].fields for run in catalog.runs_with_data}
    numerics = sorted({n for f in records.values() for n in f if n.startswith("numerics.")})
    found = {}
    for name in (*MODEL, LOADED, *numerics, *SETTINGS):
        values = {
            run: str(fields[name].value)
            for run, fields in records.items()
            if name in fields and fields[name].value is not None
        }
        alike = defaultdict[object, set[str]](set)
        for run, value in values.items():
            fields = records[run]
            alike[name == LOADED and tuple(repr(fields.get(n)) for n in LAYOUT)].add(value)
        if any(len(some) > 1 for some in alike.values()):
            found[name] = values
    return found


def of_unknown_weights(catalog: Catalog) -> list[str]:
    """Return the runs with rows whose weights changed, nobody knows when (section 9.4)."""
    closes = {c.run: c.close for c in catalog.chains.values() if c.kind == "census" and c.close}
    return [
        run
        for run in catalog.runs_with_data
        if run in closes and closes[run].totals.get(tables.UNKNOWN_WEIGHTS)
    ]


def rows_by_adapter(catalog: Catalog) -> dict[str | None, int]:
    """Return the stored rows of each adapter by its digest, None for the model alone.

    Empty where no request had an adapter.
    """
    columns = ["request", "adapter_sha256"]  # the others of a million requests are most of them
    requests_of = {
        run: catalog.table("requests", run).select(columns) for run in catalog.runs_with_data
    }
    if all(t["adapter_sha256"].null_count == t.num_rows for t in requests_of.values()):
        return {}  # no need to read the spans, which are long
    found = defaultdict[str | None, int](int)
    for run, requests in requests_of.items():
        spans = catalog.table("spans", run)
        spans = spans.filter(pc.equal(spans["disposition"], "captured"))
        spans = spans.append_column("n", pc.subtract(spans["stop"], spans["start"]))
        rows = spans.select(["request", "n"]).join(requests, "request")
        for line in rows.group_by("adapter_sha256").aggregate([("n", "sum")]).to_pylist():
            name = line["adapter_sha256"]
            found[None if name is None else name[:12]] += line["n_sum"]
    return dict(found)
