"""The writer: from ring slices to committed shards, and the writer-side witness.

Stage 3 of the token's way, inside the writer process. Knows the ring on its left and the
committer on its right; no sockets, no vLLM.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from actds import layout, schema, tables
from actds.errors import ActdsError
from actds.ledger import Chain
from actds.schema.v0_1 import CloseReason, Genesis, Hook, ProvenanceField, RunBody, RunRecord
from actds.shard import commit_part
from actds.store import Store
from actds_writers import ring
from actds_writers.assembly import Assembly
from actds_writers.buffers import BITS, ShardBuffer
from actds_writers.committer import CommitPlan, Committer
from actds_writers.losses import DropLog
from actds_writers.messages import (
    HookSpec,
    RingFree,
    Stall,
    StepDropped,
    StepRows,
    WorkerHello,
)
from actds_writers.settings import WriterSettings

PHASES = ("prefill", "decode")
SPARE_BUFFERS = 1
"""Full buffers that may wait for the disk beside the two being filled."""


class Writer:
    """Writes one run.

    Args:
        store: where the dataset stands.
        settings: what the command decided.
        hello: what the worker found.
        before_commit: as in ``Committer``.

    Raises:
        ActdsError: E010 when the dataset has other hooks, E503 when the disk refuses.
    """

    def __init__(
        self,
        store: Store,
        settings: WriterSettings,
        hello: WorkerHello,
        before_commit: Callable[[int], None] = lambda last_step: None,
    ) -> None:
        self._settings, self._store = settings, store
        self._hooks = hello.hooks
        self._memory: mmap.mmap = ring.attach(Path(hello.ring_path), hello.ring_nbytes)
        self._bits = BITS[hello.hooks[0].dtype]
        dataset = _genesis(store, settings, hello.hooks)
        self._chain = Chain.begin(store, dataset, settings.run, "writer", settings.software)
        self._begin_run(dataset, hello)
        capacity = settings.rows_per_shard + hello.max_step_rows
        buffers = [ShardBuffer(hello.hooks, capacity) for _ in range(len(PHASES) + SPARE_BUFFERS)]
        plan = CommitPlan(
            settings.run,
            settings.order,
            settings.seed,
            settings.n_threads,
            settings.raw_threshold_nbytes,
        )
        self._committer = Committer(store, self._chain, plan, buffers, before_commit)
        self._filling: dict[str, ShardBuffer] = {phase: self._committer.spare() for phase in PHASES}
        self._assembly = Assembly(settings.tokens)
        self._stalls: list[Stall] = []
        self._losses = DropLog()
        self.last_step = -1

    @property
    def committer(self) -> Committer:
        """Return the committer, for meters and its error."""
        return self._committer

    @property
    def row_nbytes(self) -> int:
        """Return the bytes of one row over all hooks."""
        return sum(hook.d_model * np.dtype(self._bits).itemsize for hook in self._hooks)

    @property
    def n_rows_seen(self) -> int:
        """Return rows committed, being committed and being filled."""
        return self._committer.n_rows + sum(b.n_rows for b in self._filling.values())

    def step(self, message: StepRows) -> RingFree:
        """Take the rows of a step out of the ring; return what the ring may forget.

        After the disk has failed the rows are discarded, so that the engine can end; nothing
        of them was acknowledged, and the census calls them aborted.
        """
        if message.stall is not None:
            self._stalls.append(message.stall)
        if self._committer.error is None:
            self._take(message)
        self.last_step = message.step
        return self._taken(message.offset)

    def _taken(self, offset: int | None) -> RingFree:
        return RingFree(
            offset=offset,
            queue_depth_stage3=self._committer.queue_depth,
            compression_backlog_bytes=self._committer.backlog_nbytes,
            disk_write_latency_p99=self._committer.latency_p99(),
        )

    def dropped(self, message: StepDropped) -> RingFree:
        """Log a step that never came; return the acknowledgement."""
        if message.rows.stall is not None:
            self._stalls.append(message.rows.stall)
        self.last_step = message.rows.step
        taken = self._taken(None)
        state = {
            "queue_depth_stage1": 0,
            "queue_depth_stage2": message.depth,
            "queue_depth_stage3": taken.queue_depth_stage3,
            "disk_write_latency_p99": taken.disk_write_latency_p99,
            "compression_backlog_bytes": taken.compression_backlog_bytes,
            "cache_hit_ratio": None,
        }
        self._losses.add(message, self._assembly.lost(message.rows), state)
        return taken

    def finish(self, reason: CloseReason) -> dict[str, int]:
        """Commit what is buffered, close the chain; return its totals.

        Raises:
            ActdsError: E503 when the disk refuses or has refused.
        """
        for phase, buffer in self._filling.items():
            if buffer.n_rows:
                self._committer.commit(phase, buffer)
        self._committer.finish()
        if self._committer.error is not None:
            raise self._committer.error
        self._losses.commit(self._store, self._chain, self._settings.run)
        if self._stalls:
            commit_part(
                self._store, self._chain, "stalls", self._settings.run, 0, _stalls(self._stalls)
            )
        totals = {"rows": self._committer.n_rows, "dropped_tokens": self._losses.n_tokens}
        if reason == "finished":
            # A writer that was cut off has not seen every step that the scheduler has.
            totals["recomputed_tokens"] = self._assembly.recomputed_tokens
        self._chain.close(reason, totals)
        return totals

    def _take(self, message: StepRows) -> None:
        shape = (len(self._hooks), len(message.positions), self._hooks[0].d_model)
        rows = ring.view(self._memory, message.offset, shape, self._bits)
        for phase, piece in self._assembly.slices(message, rows).items():
            buffer = self._filling[phase]
            buffer.append(piece)
            if buffer.n_rows >= self._settings.rows_per_shard:
                self._committer.commit(phase, buffer)
                self._filling[phase] = self._committer.spare()

    def _begin_run(self, dataset: str, hello: WorkerHello) -> None:
        fields = {fact.name: fact for fact in (*self._settings.facts, *hello.facts)}
        record = RunRecord(
            dataset=dataset,
            run=self._settings.run,
            started_ns=self._settings.started_ns,
            fields={
                name: ProvenanceField(value=f.value, origin=f.origin, reason=f.reason)
                for name, f in sorted(fields.items())
            },
        )
        put = self._store.put_new(layout.run_path(self._settings.run), [schema.to_bytes(record)])
        self._chain.append("run", RunBody(run=self._settings.run, sha256=put.sha256))


def _genesis(store: Store, settings: WriterSettings, found: tuple[HookSpec, ...]) -> str:
    """Write the genesis of a new dataset, or compare with the one that is there; return its id."""
    hooks = [
        Hook(
            name=h.name,
            kind="resid_post",
            layer=h.layer,
            d_model=h.d_model,
            dtype=h.dtype,
        )
        for h in found
    ]
    if not settings.resume:
        genesis = Genesis(
            dataset=settings.dataset,
            created_ns=settings.started_ns,
            writer=settings.software,
            hooks=hooks,
        )
        try:
            store.put_new(layout.GENESIS, [schema.to_bytes(genesis)])
            return settings.dataset
        except ActdsError as error:
            if error.code != "E309" or not settings.shared:
                raise  # else another engine was first, and this one joins
    present = schema.parse(Genesis, store.read(layout.GENESIS), layout.GENESIS)
    if present.hooks != hooks:
        raise ActdsError(
            "E010",
            "hooks",
            got=", ".join(f"{h.name} {h.dtype}" for h in hooks),
            expected=", ".join(f"{h.name} {h.dtype}" for h in present.hooks),
        )
    return present.dataset


def _stalls(stalls: list[Stall]) -> pa.Table:
    return tables.build(
        "stalls",
        {
            "stage": [s.stage for s in stalls],
            "t_ns": [s.t_ns for s in stalls],
            "duration_ns": [s.duration_ns for s in stalls],
            "depth": [s.depth for s in stalls],
            "step": [s.step for s in stalls],
        },
    )
