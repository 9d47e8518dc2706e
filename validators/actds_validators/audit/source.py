"""Source: which of its records a request was begun for, and whether its runs are of one model.

A record that was skipped or never begun is a line of the requests table like any other; one that
a later run of the dataset served counts as served.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.codes import CODES
from actds.dataset.reading import Catalog
from actds.dataset.sources import records_read
from actds.format import tables
from actds.format.labels import label_table, label_text
from actds.format.schema import CloseBody, FenceBody
from actds_validators.arrays import Bools, Ints
from actds_validators.audit.covariates import N_BANDS, position_band
from actds_validators.audit.place import LeftOut, LengthBand, SourceAccount, Worst
from actds_validators.statistics.strata import total_variation

MODEL = ("model.weights_sha256", "model.config_sha256", "model.quantization", "tokenizer.sha256")
"""Facts in which runs of one model agree."""
LOADED = "model.parameters_sha256"
"""The weights in the memory of an engine; also of one whose weights came from no file."""
LAYOUT = (
    "engine.name",
    "engine.version",
    "engine.runner",
    "model.quantization",
    "machine.processor",
    "machine.torch",
    "numerics.device",
    "numerics.dtype",
    "serving.tensor_parallel",
    "serving.pipeline_parallel",
)
"""Facts on which the form of weights in memory depends: runs that differ in one say nothing."""
SETTINGS = (
    "capture.overflow_policy",
    "capture.cast",
    "capture.sampling",
    "engine.name",
    "engine.version",
    "engine.runner",
    "serving.mode",
    "serving.prefix_caching",
    "serving.chunked_prefill",
    "serving.enforce_eager",
    "serving.compilation_mode",
    "serving.cudagraph_mode",
    "serving.speculative_method",
    "serving.tensor_parallel",
    "sampling.temperature",
    "sampling.max_tokens",
)
"""Facts in which runs of one set of settings agree, beside all of the numerics."""


def one_model(name: str) -> bool:
    return name in MODEL or name == LOADED


def rows_of(catalog: Catalog) -> dict[str, int]:
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
    differing = {}
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
            differing[name] = values
    return differing


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
    n_rows = defaultdict[str | None, int](int)
    for run, requests in requests_of.items():
        spans = catalog.table("spans", run)
        spans = spans.filter(pc.equal(spans["disposition"], "captured"))
        spans = spans.append_column("n", pc.subtract(spans["stop"], spans["start"]))
        rows = spans.select(["request", "n"]).join(requests, "request")
        for line in rows.group_by("adapter_sha256").aggregate([("n", "sum")]).to_pylist():
            name = line["adapter_sha256"]
            n_rows[None if name is None else name[:12]] += line["n_sum"]
    return dict(n_rows)


NOT_ON_RECORD = "no line of the requests table says what became of them"
_CODE = re.compile(r"E\d{3}\b")
_MAX_REASONS = 20


def source_account(catalog: Catalog, records: pa.Table) -> SourceAccount:
    """Return what became of the records of the sources.

    Spec: 0.1 section 14.10.
    """
    begun = np.asarray(tables.is_served(records))
    length = records["prompt_len"].to_numpy().astype(np.int64)
    n_read = _n_read(catalog)
    silent = 0 if n_read is None else max(0, n_read - len(begun))
    bands = list(_bands(length, begun))
    tokens, served = (
        np.array([getattr(b, name) for b in bands], np.float64)
        for name in ("tokens", "served_tokens")
    )
    return SourceAccount(
        records=None if n_read is None else max(n_read, len(begun)),
        served=int(begun.sum()),
        left_out=_left_out(records.filter(pa.array(~begun)), silent),
        tokens=int(length.sum()),
        served_tokens=int(length[begun].sum()),
        unmeasured=int((length == 0).sum()) + silent,
        lengths=bands,
        length_shift=total_variation(served, tokens) if bands else None,
        interrupted=list(_interrupted(catalog)),
    )


def groups_left_out(records: pa.Table, account: SourceAccount) -> Iterator[Worst]:
    """Yield how many records of each group no request was begun for.

    Groups are the prompt sources, the values of the user's label columns, and bands of lengths.
    """
    left = ~np.asarray(tables.is_served(records))
    labels = {f"label {name}": column for name, column in label_table(records["labels"]).items()}
    sources = records["source"].combine_chunks().dictionary_encode()
    for kind, encoded in {"source": sources, **labels}.items():
        code = pc.fill_null(encoded.indices, len(encoded.dictionary)).to_numpy()
        n = np.bincount(code, minlength=len(encoded.dictionary) + 1).tolist()
        n_left = np.bincount(code[left], minlength=len(n)).tolist()
        for word, of, lost in zip(encoded.dictionary.to_pylist(), n, n_left, strict=False):
            label = str(word) if kind == "source" else label_text(json.loads(word))
            yield Worst(kind=kind, label=label, n=lost, of=of, unit="records")
    for band in account.lengths:
        words = f"{band.low:,} to {band.high:,} tokens"
        lost = band.records - band.served
        yield Worst(kind="prompt length", label=words, n=lost, of=band.records, unit="records")


def _n_read(catalog: Catalog) -> int | None:
    read = list(records_read(catalog).values())
    return None if None in read else sum(n for n in read if n is not None)


def _bands(length: Ints, begun: Bools) -> Iterator[LengthBand]:
    known = length > 0
    at = position_band(length)

    def counted(rows: Bools, weights: npt.NDArray[np.float64] | None = None) -> list[int]:
        chosen = None if weights is None else weights[rows]
        sums = np.bincount(at[rows], weights=chosen, minlength=N_BANDS)
        return [int(n) for n in sums.tolist()]

    tokens = length.astype(np.float64)
    columns = zip(
        counted(known),
        counted(known & begun),
        counted(known, tokens),
        counted(known & begun, tokens),
        strict=True,
    )
    for band, (records, served, n, n_served) in enumerate(columns):
        if records:
            yield LengthBand(
                low=2**band - 1,
                high=2 ** (band + 1) - 2,
                records=records,
                served=served,
                tokens=n,
                served_tokens=n_served,
            )


def _left_out(records: pa.Table, silent: int) -> list[LeftOut]:
    sums_of: dict[tuple[str, str], list[int]] = {}
    columns = (records[name].to_pylist() for name in ("finish_reason", "reason", "prompt_len"))
    for end, reason, n_tokens in zip(*columns, strict=True):
        sums = sums_of.setdefault((end, _kind(reason)), [0, 0])
        sums[0] += 1
        sums[1] += n_tokens
    records_out = [
        LeftOut(
            what="skipped" if end == "skipped" else "never begun",
            reason=reason,
            n=n,
            n_tokens=n_tokens or None,
        )
        for (end, reason), (n, n_tokens) in sums_of.items()
    ]
    if silent:
        records_out.append(
            LeftOut(what="not on record", reason=NOT_ON_RECORD, n=silent, n_tokens=None)
        )
    return sorted(records_out, key=lambda left: (-(left.n_tokens or 0), -left.n))[:_MAX_REASONS]


def _kind(reason: str | None) -> str:
    code = _CODE.match(reason or "")
    if code is not None and code[0] in CODES:
        return f"{CODES[code[0]].title} ({code[0]})"
    return (reason or "no reason given")[:200]


def _interrupted(catalog: Catalog) -> Iterator[str]:
    for state in catalog.chains.values():
        if state.kind != "census" or not state.records:
            continue
        last = state.records[-1].typed_body()
        if isinstance(last, CloseBody) and last.reason != "finished":
            yield f"{state.run}: {last.reason}"
        elif isinstance(last, FenceBody):
            yield f"{state.run}: ended by another process"
