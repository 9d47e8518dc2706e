"""Datasets for the loader's benchmarks: made rows, sealed, as many as wanted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np

from actds.dataset.commit import ShardRows, commit_part, commit_shard
from actds.dataset.ledger import Chain
from actds.format import encoding, schema, tables
from actds.format.schema import (
    REQUIRED_PROVENANCE,
    Genesis,
    Hook,
    ProvenanceField,
    RunBody,
    RunRecord,
)
from actds.format.tables import TableName
from actds.publish.sealing import seal
from actds.store import Buffer, NewFile, Put, layout
from actds.store.local import LocalStore

HOOK, RUN = "resid_post.10", "r-bench"
PROMPT_LEN = 512
CHOSEN = "chosen"
"""The prompt source of the first tenth of the requests."""


def activations(n_rows: int, d_model: int, seed: int) -> np.ndarray:
    """Return bf16 bits that compress like a residual stream: channels of different scales."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(0, 0.7, d_model)).astype(np.float32)
    rows = rng.standard_normal((n_rows, d_model), dtype=np.float32) * scale
    return rows.astype(ml_dtypes.bfloat16).view(np.uint16)


class _LinkingStore(LocalStore):
    """A store whose arrays are all hard links of the first: 100 GB in the space of one."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._first: _FirstFile | None = None

    def begin(self, path: str) -> NewFile:  # type: ignore[override]
        file = super().begin(path)
        if not path.endswith("/c/0/0"):
            return file
        if self._first is None:
            self._first = _FirstFile(self.root / path, file)
            return self._first
        file.abandon()
        return _LinkedFile(self.root / path, self._first)


class _FirstFile(NewFile):
    """The file that the others are links of."""

    def __init__(self, path: Path, file: NewFile) -> None:
        self.path, self._file = path, file

    def hash(self, parts: Sequence[Buffer]) -> None:
        self._file.hash(parts)

    def write(self, parts: Sequence[Buffer]) -> None:
        self._file.write(parts)

    def abandon(self) -> None:
        self._file.abandon()

    def commit(self) -> Put:
        self.put = self._file.commit()
        return self.put


class _LinkedFile(NewFile):
    """A link of the first file, whatever is written."""

    def __init__(self, path: Path, first: _FirstFile) -> None:
        self._path, self._first = path, first

    def hash(self, parts: Sequence[Buffer]) -> None:
        pass

    def write(self, parts: Sequence[Buffer]) -> None:
        pass

    def abandon(self) -> None:
        pass

    def commit(self) -> Put:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.hardlink_to(self._first.path)
        return self._first.put


def _encode_once() -> AbstractContextManager[object]:
    """Encode the chunks of the first array, and nothing after it: the store ignores the bytes."""
    real, sizes = encoding.ArrayEncoder.encode, {}

    def encode(self: encoding.ArrayEncoder, index: int, out: np.ndarray) -> int:
        if index not in sizes:
            sizes[index] = real(self, index, out)
        return sizes[index]

    return patch.object(encoding.ArrayEncoder, "encode", encode)


def make_dataset(
    path: Path, base: np.ndarray, n_shards: int, raw: bool, linked: bool = False
) -> Path:
    """Write a sealed dataset of prompts of 512 tokens, one request per step.

    Args:
        path: a folder that is not there.
        base: the rows of each shard, bits ``(n_rows, d_model)``, in another order in each.
        n_shards: shards.
        raw: copy the chunks instead of compressing them.
        linked: let all shards share the file of the first; then the order is the same in each.
    """
    hook, run = HOOK, RUN
    n_rows, d_model, rows_per_shard = n_shards * len(base), base.shape[1], len(base)
    store = _LinkingStore(path) if linked else LocalStore(path)
    genesis = Genesis(
        dataset="0" * 32,
        created_ns=0,
        writer="bench_load",
        hooks=[Hook(name=hook, kind="resid_post", layer=10, d_model=d_model, dtype="bfloat16")],
    )
    store.put_new(layout.GENESIS, [schema.to_bytes(genesis)])
    writer = Chain.begin(store, genesis.dataset, run, "writer", "bench_load")
    census = Chain.begin(store, genesis.dataset, run, "census", "bench_load")
    unknown = ProvenanceField(value=None, origin="unknown", reason="made by a benchmark")
    record = RunRecord(
        dataset=genesis.dataset,
        run=run,
        started_ns=0,
        fields=dict.fromkeys(REQUIRED_PROVENANCE, unknown),
    )
    written = store.put_new(layout.run_path(run), [schema.to_bytes(record)])
    writer.append("run", RunBody(run=run, sha256=written.sha256))
    with _encode_once() if linked else nullcontext():
        for first in range(0, n_rows, rows_per_shard):
            row = np.arange(first, min(first + rows_per_shard, n_rows))
            request = row // PROMPT_LEN
            zero = np.zeros(row.size, np.uint16)
            rows = ShardRows(
                hooks={hook: base},
                dtypes={hook: "bfloat16"},
                tokens={
                    "request": request,
                    "position": row % PROMPT_LEN,
                    "token_id": row % 50_000,
                    "step": request,
                    "attempt": zero,
                    "chunk": zero,
                    "flags": zero,
                },
                phase="prefill",
                first_step=int(request[0]),
                last_step=int(request[-1]),
            )
            commit_shard(
                store,
                writer,
                rows,
                shard=f"{run}-{first:09d}",
                run=run,
                order="sequence" if linked else "permuted",
                seed=first,
                raw=raw,
                n_threads=2,
            )
    for name, table in census_tables(n_rows // PROMPT_LEN).items():
        commit_part(store, census, name, run, 0, table)
    n_requests = n_rows // PROMPT_LEN
    writer.close("finished", {"rows": n_rows, "dropped_tokens": 0, "recomputed_tokens": 0})
    none = dict.fromkeys(tables.DISPOSITIONS, 0)
    totals = {"requests": n_requests, "scheduled_tokens": n_rows, **none, "captured": n_rows}
    census.close("finished", totals)
    seal(store)
    return path


def census_tables(n_requests: int) -> dict[Any, Any]:
    """Return requests, steps and spans: each request is prefilled in a step of its own."""
    index, zero = np.arange(n_requests), np.zeros(n_requests, int)
    length = np.full(n_requests, PROMPT_LEN)
    known: dict[TableName, dict[str, Any]] = {
        "requests": {
            "request": index,
            "external_id": index.astype(str),
            "source": np.where(index < n_requests // 10, CHOSEN, "other"),
            "prompt_len": length,
            "generated_len": zero + 1,
            "cached_tokens": zero,
            "n_preemptions": zero,
            "finish_reason": np.full(n_requests, "length"),
        },
        "steps": {
            **{name: zero for name in tables.SCHEMAS["steps"].names},
            "inclusion": [None] * n_requests,
            "step": index,
            "batch_tokens": length,
            "n_requests": zero + 1,
            "prefill_tokens": length,
            "captured_tokens": length,
            "max_seq_len": length,
            "kernel_mode": np.full(n_requests, "eager"),
        },
        "spans": {
            "request": index,
            "start": zero,
            "stop": length,
            "disposition": np.full(n_requests, "captured"),
            "step": index,
        },
    }
    return {
        name: tables.build(
            name,
            {
                column: columns.get(column, [None] * n_requests)
                for column in tables.SCHEMAS[name].names
            },
        )
        for name, columns in known.items()
    }
