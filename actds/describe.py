"""What a dataset is, where it came from and what it lacks: the facts behind ``actds info``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from actds.format import arrays, layout
from actds.reading import Catalog
from actds.schema.v0_1 import CloseBody, FenceBody

__all__ = ["ChainFacts", "Facts", "HookFacts", "LossFacts", "RunFacts", "describe"]


@dataclass(frozen=True)
class HookFacts:
    """One hook: how many rows, and how large decoded (``nbytes``) and on the disk."""

    name: str
    kind: str
    layer: int
    d_model: int
    dtype: str
    n_rows: int
    nbytes: int
    stored_nbytes: int

    @property
    def ratio(self) -> float | None:
        """Return decoded over stored bytes; None without a row."""
        return self.nbytes / self.stored_nbytes if self.stored_nbytes else None


@dataclass(frozen=True)
class ChainFacts:
    """One chain of the ledger, and why it ended."""

    chain: str
    kind: str
    run: str
    n_records: int
    state: str
    reason: str | None


@dataclass(frozen=True)
class LossFacts:
    """Positions of one disposition and reason that are no rows."""

    disposition: str
    reason: str | None
    n_positions: int


@dataclass(frozen=True)
class RunFacts:
    """One run: its provenance, and what became of its positions.

    ``n_positions`` and all that follows it are None or empty while there is no census.
    """

    run: str
    started_ns: int | None
    has_record: bool
    has_census: bool
    provenance: dict[str, dict[str, Any]]
    n_rows: int
    n_requests: int | None = None
    n_steps: int | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    cached_tokens: int | None = None
    n_preemptions: int | None = None
    n_positions: int | None = None
    n_cache_ref: int | None = None
    finish_reasons: dict[str, int] = field(default_factory=dict)
    skips: dict[str, int] = field(default_factory=dict)
    losses: list[LossFacts] = field(default_factory=list)
    n_drop_events: int = 0
    n_stalls: int = 0
    stalled_ns: int = 0


@dataclass(frozen=True)
class Facts:
    """Everything that ``actds info`` says; ``as_json`` is its versioned form."""

    path: str
    dataset: str
    format_version: str
    created_ns: int
    writer: str
    sealed: bool
    seal: int | None
    sealed_ns: int | None
    digest: str
    totals: dict[str, int]
    phases: dict[str, int]
    n_shards: int
    raw_shards: int
    replaced_shards: int
    removable_nbytes: int
    hooks: list[HookFacts]
    runs: list[RunFacts]
    chains: list[ChainFacts]
    unreachable: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return the facts under the schema ``actds.info`` version 1."""
        head: dict[str, Any] = {"format": "actds.info", "version": "1"}
        return {**head, **asdict(self)}


def describe(catalog: Catalog) -> Facts:
    """Return the facts of a dataset, sealed or not.

    Raises:
        ActdsError: a table cannot be read, see ``Catalog.table``.
    """
    genesis, seal = catalog.genesis, catalog.seal
    phases: Counter[str] = Counter()
    for row_set in {manifest.row_set_sha256: manifest for manifest in catalog.shards}.values():
        phases[row_set.phase] += row_set.n_rows
    return Facts(
        path=catalog.store.uri,
        dataset=genesis.dataset,
        format_version=genesis.version,
        created_ns=genesis.created_ns,
        writer=genesis.writer,
        sealed=catalog.is_sealed,
        seal=seal.n if seal else None,
        sealed_ns=seal.sealed_ns if seal else None,
        digest=catalog.digest,
        totals=dict(seal.totals) if seal else {},
        phases={phase: phases[phase] for phase in ("prefill", "decode") if phases[phase]},
        n_shards=len(catalog.shards),
        raw_shards=sum(manifest.compression == "raw" for manifest in catalog.shards),
        replaced_shards=len(catalog.replaced),
        removable_nbytes=_removable_nbytes(catalog),
        hooks=_hooks(catalog),
        runs=[_run(catalog, run) for run in catalog.run_ids],
        chains=_chains(catalog),
        unreachable=catalog.unreachable,
    )


def _hooks(catalog: Catalog) -> list[HookFacts]:
    facts = []
    for hook in catalog.genesis.hooks:
        stored_path = f"{layout.array_dir(hook.name)}/{arrays.SHARD_PATH}"
        holding = [manifest for manifest in catalog.shards if hook.name in manifest.hooks]
        n_rows = sum(manifest.n_rows for manifest in holding)
        entries = [e for manifest in holding for e in manifest.files if e.path == stored_path]
        nbytes = n_rows * hook.d_model * arrays.DTYPES[hook.dtype].itemsize
        stored = sum(entry.nbytes for entry in entries)
        facts.append(
            HookFacts(**hook.model_dump(), n_rows=n_rows, nbytes=nbytes, stored_nbytes=stored)
        )
    return facts


def _removable_nbytes(catalog: Catalog) -> int:
    """Return the bytes of the data files of replaced shards that are still there."""
    paths = (
        f"{layout.shard_dir(manifest.shard)}/{entry.path}"
        for manifest in catalog.replaced
        for entry in manifest.files
    )
    return sum(catalog.store.size(path) for path in paths if catalog.store.exists(path))


def _chains(catalog: Catalog) -> list[ChainFacts]:
    facts = []
    for chain, state in catalog.chains.items():
        last = state.records[-1].typed_body()
        reason = last.reason if isinstance(last, CloseBody | FenceBody) else None
        facts.append(
            ChainFacts(chain, state.kind, state.run, len(state.records), state.state, reason)
        )
    return facts


def _run(catalog: Catalog, run: str) -> RunFacts:
    record = catalog.runs.get(run)
    shards = {m.row_set_sha256: m.n_rows for m in catalog.shards if m.run == run}
    has_census = bool(catalog.parts.get((run, "requests")) and catalog.parts.get((run, "spans")))
    provenance = record.model_dump(mode="json")["fields"] if record else {}
    base: dict[str, Any] = {
        "run": run,
        "started_ns": record.started_ns if record else None,
        "has_record": record is not None,
        "has_census": has_census,
        "provenance": provenance,
        "n_rows": sum(shards.values()),
        **_losses(catalog, run),
    }
    if has_census:
        base |= _census(catalog, run)
    return RunFacts(**base)


def _losses(catalog: Catalog, run: str) -> dict[str, Any]:
    drops, stalls = catalog.table("drops", run), catalog.table("stalls", run)
    return {
        "n_drop_events": pc.count_distinct(drops["drop"]).as_py(),
        "n_stalls": stalls.num_rows,
        "stalled_ns": _sum(stalls, "duration_ns"),
    }


def _census(catalog: Catalog, run: str) -> dict[str, Any]:
    requests, spans = catalog.table("requests", run), catalog.table("spans", run)
    length = pc.cast(pc.subtract(spans["stop"], spans["start"]), pa.int64())
    grouped = (
        spans.append_column("length", length)
        .group_by(["disposition", "reason"])
        .aggregate([("length", "sum")])
        .sort_by([("disposition", "ascending"), ("reason", "ascending")])
    )
    shares = [
        LossFacts(row["disposition"], row["reason"], row["length_sum"])
        for row in grouped.to_pylist()
    ]
    referenced = sum(one.n_positions for one in shares if one.disposition == "cache_ref")
    skipped = requests.filter(pc.equal(requests["finish_reason"], "skipped"))
    return {
        "n_requests": requests.num_rows,
        "n_steps": catalog.table("steps", run).num_rows,
        "prompt_tokens": _sum(requests, "prompt_len"),
        "generated_tokens": _sum(requests, "generated_len"),
        "cached_tokens": _sum(requests, "cached_tokens"),
        "n_preemptions": _sum(requests, "n_preemptions"),
        "n_positions": pc.sum(length).as_py() or 0,
        "finish_reasons": _counts(requests["finish_reason"]),
        "skips": _counts(skipped["reason"]),
        "n_cache_ref": referenced,
        "losses": [one for one in shares if one.disposition not in ("captured", "cache_ref")],
    }


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    counted = ((str(value), count) for value, count in Counter(column.to_pylist()).items())
    return dict(sorted(counted, key=lambda item: (-item[1], item[0])))


def _sum(table: pa.Table, column: str) -> int:
    total: int | None = pc.sum(table[column]).as_py()
    return total or 0
