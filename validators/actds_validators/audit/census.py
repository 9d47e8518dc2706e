"""Census: what became of every record of the source and of every position of its requests.

``actds validate`` accounts position by position; here counts and sums of positions and of their
squares stand for the sets, so that a hundred million rows need no memory. A record that was skipped
or never begun is a line of the requests table like any other; one that a later run of the dataset
served counts as served. And whether the runs are of one model.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.codes import CODES
from actds.dataset.catalog import Catalog
from actds.dataset.fates import NEVER, WATERFALL, FateCounts, fate_counts
from actds.dataset.sources import records_read
from actds.format import tables
from actds.format.labels import label_table, label_text
from actds.format.positions import Index, position_key, union
from actds.format.schema import CloseBody, FenceBody
from actds_validators.arrays import Bools, Ints
from actds_validators.audit import data
from actds_validators.audit.covariates import band_edges, position_band
from actds_validators.audit.place import LeftOut, LengthBand, SourceAccount, Worst
from actds_validators.audit.result import Accounting, Finding, WaterfallStep
from actds_validators.statistics.strata import total_variation

MAX_FINDINGS = 20


@dataclass(frozen=True)
class _KeySums:
    """Sums over ranges of positions by a key, which stand for the sets of positions.

    Equal sums over the same key are equal sets but for cancellations that no fault makes by chance.

    Args:
        sums: ``(3, n)``, over [start, stop) of 1, of 2p + 1 and of 3p^2 + 3p + 1, which are
            differences of stop, its square and its cube; modulo 2^64.
    """

    keys: Ints
    sums: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, keys: Ints, sums: npt.NDArray[np.uint64]) -> _KeySums:
        known, at = np.unique(keys, return_inverse=True)
        total = np.zeros((len(sums), len(known)), np.uint64)
        for row, values in zip(total, sums, strict=True):
            np.add.at(row, at, values)
        return cls(known, total)

    @classmethod
    def of_ranges(cls, keys: Ints, start: Ints, stop: Ints) -> _KeySums:
        a, b = start.astype(np.uint64), stop.astype(np.uint64)
        return cls.of(keys, np.stack([b - a, b * b - a * a, b * b * b - a * a * a]))

    @classmethod
    def of_counts(cls, keys: Ints, n: npt.NDArray[Any]) -> _KeySums:
        some = n != 0
        return cls.of(keys[some], n[some].astype(np.int64).astype(np.uint64)[np.newaxis])

    @classmethod
    def together(cls, parts: Sequence[_KeySums]) -> _KeySums:
        return cls.of(
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.sums for part in parts], axis=1),
        )

    def counts(self) -> _KeySums:
        return _KeySums(self.keys, self.sums[:1])

    def differing(self, other: _KeySums) -> list[tuple[int, int, int]]:
        """Return key and both numbers of positions where the sums differ, the first ones."""
        keys = np.union1d(self.keys, other.keys)
        sides = np.zeros((2, len(self.sums), len(keys)), np.uint64)
        for side, part in enumerate((self, other)):
            sides[side][:, np.searchsorted(keys, part.keys)] = part.sums
        wrong = np.flatnonzero((sides[0] != sides[1]).any(axis=0))[:MAX_FINDINGS]
        n = sides[:, 0].astype(np.int64)
        return [(int(keys[k]), int(n[0, k]), int(n[1, k])) for k in wrong]


def _sum_rows(part: data.TablePart) -> tuple[_KeySums, _KeySums]:
    by_request = [_KeySums.of_ranges(*np.zeros((3, 0), np.int64))]
    by_step = [by_request[0].counts()]
    for batch in part.batches(["request", "step", "position"]):
        request, step = data.column(batch, "request"), data.column(batch, "step")
        p = data.column(batch, "position").astype(np.uint64)
        keys, at = data.places(request)
        n, first, second = (_exact(at, values, len(keys)) for values in (None, p, p * p))
        sums = np.stack([n, 2 * first + n, 3 * second + 3 * first + n])
        by_request.append(_KeySums(keys, sums))
        keys, at = data.places(step)
        by_step.append(_KeySums(keys, _exact(at, None, len(keys))[np.newaxis]))
    return _KeySums.together(by_request), _KeySums.together(by_step)


def _exact(at: Ints, values: npt.NDArray[np.uint64] | None, size: int) -> npt.NDArray[np.uint64]:
    """Return the sums of whole numbers by place, modulo 2^64; of 1 each without numbers.

    Of numbers up to 2^38 a batch adds up below 2^53, where floats are exact; larger ones go by
    halves of 32 bits.
    """
    if values is None:
        return np.bincount(at, minlength=size).astype(np.uint64)
    if not len(values) or int(values.max()) < 1 << 38:
        return np.bincount(at, weights=values, minlength=size).astype(np.uint64)
    low, high = values & np.uint64(0xFFFFFFFF), values >> np.uint64(32)
    sums = (np.bincount(at, weights=half, minlength=size).astype(np.uint64) for half in (low, high))
    return next(sums) + (next(sums) << np.uint64(32))


def account_run(
    source: data.RunSource, read: data.Read = map
) -> tuple[FateCounts, Counter[str], list[Finding]]:
    """Return positions by fate and reason, other counts, and what does not add up.

    The fate is the disposition, or ``never computed``.
    """
    table = source.table("spans", ["request", "start", "stop", "step", "disposition", "reason"])
    spans = data.numbers(table)
    length = spans["stop"] - spans["start"]
    is_computed = data.is_known(spans["step"])
    # Section 7.2: an aborted position without a step is owed, and no step computed it.
    never = (spans["disposition"] == "aborted") & ~is_computed
    fates = fate_counts(table)
    steps = source.columns("steps", ["step", "batch_tokens", *_FATES.values()])
    counts = Counter(
        requests=source.n_rows("requests"),
        steps=source.n_rows("steps"),
        recomputed=int(steps["recomputed_tokens"].sum()),
        unresolved=_unresolved(source) - fates["cache_ref", tables.EXTERNAL],
        never_computed_requests=len(np.unique(spans["request"][never & (length > 0)])),
    )
    return fates, counts, _findings(source, spans, is_computed, steps, read)


_FATES = {
    "captured": "captured_tokens",
    "dropped": "dropped_tokens",
    "aborted": "aborted_tokens",
    "filtered": "filtered_tokens",
    "undelivered": "undelivered_tokens",
    "thinned": "thinned_tokens",
    "recomputed": "recomputed_tokens",
    "rejected": "rejected_tokens",
}
"""Columns of the steps by what became of a token."""


def _findings(
    source: data.RunSource,
    spans: dict[str, npt.NDArray[Any]],
    is_computed: Bools,
    steps: dict[str, npt.NDArray[Any]],
    read: data.Read,
) -> list[Finding]:
    def ranges(disposition: str) -> _KeySums:
        chosen = spans["disposition"] == disposition
        return _KeySums.of_ranges(*(spans[n][chosen] for n in ("request", "start", "stop")))

    def counted(*names: str) -> _KeySums:
        return _KeySums.of_counts(steps["step"], np.sum([steps[name] for name in names], axis=0))

    parts = list(read(_sum_rows, source.parts["tokens"]))
    nothing = _KeySums.of_ranges(*np.zeros((3, 0), np.int64))
    rows = _KeySums.together([nothing, *(by_request for by_request, _ in parts)])
    n_rows = _KeySums.together([nothing.counts(), *(by_step for _, by_step in parts)])
    drops = source.columns("drops", ["request", "step", "start", "stop"])
    every = _KeySums.of_ranges(spans["request"], spans["start"], spans["stop"])
    dropped = _KeySums.of_ranges(drops["request"], drops["start"], drops["stop"])
    n_dropped = _KeySums.of_counts(drops["step"], drops["stop"] - drops["start"])
    owed, batch = _owed(source, spans, is_computed), counted("batch_tokens")
    census, of_census = f"census/{source.run}", "the census'"
    shards, losses = f"shards (run {source.run}) rows of", f"losses/{source.run} drops of"
    captured, lost = counted("captured_tokens"), counted("dropped_tokens")
    partition = "spans that partition the request's positions"
    compared = (
        ("E404", f"{census}/spans request", every, owed, partition),
        ("E406", f"{shards} request", rows, ranges("captured"), f"{of_census} captured positions"),
        ("E408", f"{losses} request", dropped, ranges("dropped"), f"{of_census} dropped positions"),
        ("E412", f"{shards} step", n_rows, captured, f"{of_census} captured_tokens"),
        ("E408", f"{losses} step", n_dropped, lost, f"{of_census} dropped_tokens"),
        (
            "E409",
            f"{census}/steps step",
            batch,
            counted(*_FATES.values()),
            "the sum of what became of them",
        ),
    )
    findings = [
        _finding(code, f"{place} {key}", n, n_wanted, expected)
        for code, place, got, wanted, expected in compared
        for key, n, n_wanted in got.differing(wanted)
    ]
    length = spans["stop"] - spans["start"]
    for word in ("aborted", "filtered", "undelivered", "thinned"):  # of these no row tells the step
        n = int(length[(spans["disposition"] == word) & is_computed].sum())
        n_wanted = int(steps[_FATES[word]].sum())
        if n != n_wanted:
            place = f"{census}/spans {word} in all: steps"
            findings.append(_finding("E409", place, n, n_wanted, f"{of_census} {word}_tokens"))
    return findings


def _finding(code: str, place: str, got: int, wanted: int, expected: str) -> Finding:
    return Finding(
        code=code,
        place=place,
        got=f"{got} tokens" if got != wanted else f"{got} tokens, at other positions",
        expected=f"{wanted}, {expected}",
        severity="error",
    )


def _owed(
    source: data.RunSource, spans: dict[str, npt.NDArray[Any]], is_computed: Bools
) -> _KeySums:
    """Return the positions that each request owes, from 0 on.

    Section 7.1: a request that an engine computed past its end owes that as well.
    """
    requests = source.columns(
        "requests", ["request", "prompt_len", "generated_len", "finish_reason"]
    )
    known, at = np.unique(requests["request"], return_inverse=True)
    reached = np.zeros(len(known) + 1, np.int64)
    place = Index(known).of(spans["request"][is_computed])
    np.maximum.at(reached, place, spans["stop"][is_computed])  # the last for requests of no line
    reached[-1] = 0
    n = requests["prompt_len"] + np.maximum(requests["generated_len"], 1) - 1
    n = np.maximum(n, reached[at])
    n[np.isin(requests["finish_reason"].astype(str), tables.UNSERVED)] = 0
    some = n > 0
    return _KeySums.of_ranges(requests["request"][some], np.zeros_like(n[some]), n[some])


def _unresolved(source: data.RunSource) -> int:
    served = source.spans("cache_ref", ["ref_request"])
    kept = [source.spans(fate, ["request"]) for fate in ("captured", "thinned")]
    edges = (
        np.concatenate([position_key(spans["request"], spans[name]) for spans in kept])
        for name in ("start", "stop")
    )
    stored = union(*edges)
    known = data.is_known(served["ref_request"])
    request = served["ref_request"][known].astype(np.int64)
    before, up_to = (
        stored.n_below(position_key(request, served[name][known])) for name in ("start", "stop")
    )
    return int((served["stop"] - served["start"]).sum() - (up_to - before).sum())


_COUNTS = ("never_computed_requests", "recomputed", "unresolved", "requests", "steps")


def accounting(sources: list[data.RunSource], read: data.Read) -> Accounting:
    spans: FateCounts = Counter()
    counts: Counter[str] = Counter()
    findings = []
    for source in sources:
        fates, more, wrong = account_run(source, read)
        spans += fates
        counts += more
        findings += wrong
    total = sum(spans.values())
    by = Counter[str]()
    for (disposition, _), n in spans.items():
        by[disposition] += n
    computed = by["captured"] + by["thinned"] + by["dropped"] + by["aborted"]
    waterfall = [WaterfallStep(name="positions", n_positions=total, share=1.0 if total else 0.0)]
    for name in WATERFALL:
        for (disposition, reason), n in sorted(spans.items(), key=lambda item: str(item[0])):
            if disposition == name and n:
                waterfall.append(
                    WaterfallStep(name=name, reason=reason, n_positions=n, share=n / total)
                )
    return Accounting(
        positions=total,
        computed=computed,
        **{name: by[name] for name in tables.DISPOSITIONS},
        never_computed=by[NEVER],
        **{name: counts[name] for name in _COUNTS},
        external=spans["cache_ref", tables.EXTERNAL],
        loss_share=(by["dropped"] + by["aborted"]) / computed if computed else 0.0,
        waterfall=waterfall,
        findings=findings,
    )


# the records of the source, and the models of the runs ---------------------------------------

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
    at = position_band(length)
    for band in np.unique(at[length > 0]).tolist():
        records, served = length[at == band], length[(at == band) & begun]
        low, high = band_edges(band)
        yield LengthBand(
            low=low,
            high=high,
            records=len(records),
            served=len(served),
            tokens=int(records.sum()),
            served_tokens=int(served.sum()),
        )


def _left_out(records: pa.Table, silent: int) -> list[LeftOut]:
    sums_of = defaultdict[tuple[str, str], list[int]](lambda: [0, 0])
    columns = (records[name].to_pylist() for name in ("finish_reason", "reason", "prompt_len"))
    for end, reason, n_tokens in zip(*columns, strict=True):
        sums = sums_of[end, _kind(reason)]
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
