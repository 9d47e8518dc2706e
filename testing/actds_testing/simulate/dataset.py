"""Simulated runs as sealed datasets, through the format's own store, ledger, shards and seal.

Right of the run. Imports it and ``actds``.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.commit import ShardRows, commit_part, commit_shard
from actds.dataset.ledger import Chain
from actds.format import schema, tables
from actds.format.readouts import NONE, Readouts
from actds.format.schema import (
    REQUIRED_PROVENANCE,
    Genesis,
    Hook,
    PartTable,
    ProvenanceField,
    RunBody,
    RunRecord,
)
from actds.publish.sealing import seal
from actds.store import layout
from actds.store.local import LocalStore
from actds_testing.simulate.assemble import HOOK, WALL_NS
from actds_testing.simulate.losses import Truth
from actds_testing.simulate.run import Simulated, simulate
from actds_testing.simulate.scenario import SCENARIOS, Scenario

__all__ = ["write_dataset", "write_tables"]

SOFTWARE = "actds simulator"
Order = Literal["permuted", "sequence"]
_TOKENS_PER_RUN = 10_000_000
_TOKENS_PER_PIECE = 2_000_000


def write_dataset(
    simulated: Simulated,
    path: str | Path,
    *,
    run: str = "r-simulated",
    rows_per_shard: int = 1 << 17,
    order: Order = "permuted",
    sealed: bool = True,
) -> Path:
    """Write a simulated run as a dataset of one hook, and return its path.

    The values of the rows are those that the readouts were computed from.

    Args:
        simulated: the run.
        path: a folder that does not exist or is empty.
        run: id of the run.
        rows_per_shard: rows of one phase that are committed together.
        order: row order of the shards.
        sealed: seal at the end.

    Raises:
        ActdsError: E309 when a dataset stands there; E503 when the disk refuses.

    Spec: 0.1 sections 5 to 8.
    """
    store = LocalStore(Path(path))
    dataset = _begin(store, simulated.scenario, simulated.seed)
    writer = _Run(
        store, dataset, run, simulated.scenario, simulated.seed, rows_per_shard, order,
        n_records=len(simulated.requests),
    )  # fmt: skip
    writer.add(simulated)
    writer.close()
    if sealed:
        seal(store)
    return Path(path)


def write_tables(
    path: str | Path,
    n_tokens: int,
    *,
    scenario: Scenario = SCENARIOS["large_batch"],
    seed: int = 0,
    n_runs: int | None = None,
    sealed: bool = True,
    progress: Callable[[int], None] = lambda n_tokens: None,
    told: Callable[[Truth], None] = lambda truth: None,
) -> Path:
    """Write a dataset of many tokens in bounded memory, and return its path.

    A run is simulated in pieces of about two million tokens, one after the other in time, each
    with traffic and a prefix cache of its own. Rows have one channel, so that the tables are
    nearly all there is. It validates at level ``full``; ``deep`` finds equal rows of different
    tokens (E603), because one bfloat16 cannot tell so many apart.

    Args:
        path: a folder that does not exist or is empty.
        n_tokens: computed tokens, reached to a few percent.
        scenario: the parameters; its ``n_steps`` is not used.
        seed: at least 0.
        n_runs: runs to divide the tokens over. Sealing accounts for one run at a time, at about
            100 bytes a row; ``None`` takes one for every ten million tokens.
        sealed: seal at the end.
        progress: called with the computed tokens of each piece that is written.
        told: called with the truth about the losses of each piece.

    Raises:
        ActdsError: E309 when a dataset stands there; E503 when the disk refuses.
    """
    store = LocalStore(Path(path))
    scenario = replace(scenario, d_model=1)
    dataset = _begin(store, scenario, seed)
    n_runs = n_runs or math.ceil(n_tokens / _TOKENS_PER_RUN)
    n_pieces = max(1, round(n_tokens / n_runs / _TOKENS_PER_PIECE))
    n_steps = max(1, round(n_tokens / n_runs / n_pieces / scenario.mean_batch_tokens))
    scenario = replace(scenario, n_steps=n_steps)
    for number in range(n_runs):
        run = f"r-simulated-{number:04d}"
        writer = _Run(store, dataset, run, scenario, seed, 1 << 20, "sequence")
        for piece in range(n_pieces):
            state = np.random.SeedSequence([seed, number, piece]).generate_state(1)
            simulated = simulate(scenario, int(state[0]))
            writer.add(simulated)
            progress(len(simulated.lost))
            told(simulated.truth)
            del simulated
        writer.close()
    if sealed:
        seal(store)
    return Path(path)


def _begin(store: LocalStore, scenario: Scenario, seed: int) -> str:
    """Write the genesis; return the dataset's id, a function of scenario and seed."""
    dataset = hashlib.sha256(f"{scenario!r} {seed}".encode()).hexdigest()[:32]
    hook = Hook(name=HOOK, kind="resid_post", layer=0, d_model=scenario.d_model, dtype="bfloat16")
    genesis = Genesis(dataset=dataset, created_ns=WALL_NS, writer=SOFTWARE, hooks=[hook])
    store.put_new(layout.GENESIS, [schema.to_bytes(genesis)])
    return dataset


class _Run:
    """Writes one run, a piece after the other; each piece goes on where the last one ended."""

    def __init__(
        self,
        store: LocalStore,
        dataset: str,
        run: str,
        scenario: Scenario,
        seed: int,
        rows_per_shard: int,
        order: Order,
        n_records: int | None = None,
    ) -> None:
        self.store, self.run, self.scenario = store, run, scenario
        self.rows_per_shard: int = rows_per_shard
        self.order: Order = order
        self.writer = Chain.begin(store, dataset, run, "writer", SOFTWARE)
        self.census = Chain.begin(store, dataset, run, "census", SOFTWARE)
        self._shift: Counter[str] = Counter()
        self._n_parts: Counter[PartTable] = Counter()
        self._n_shards = 0
        self._rows, self._dropped = 0, 0
        self._counts: Counter[str] = Counter()
        self._stood: dict[tuple[str, int, int], list[int]] = {}
        record = RunRecord(
            dataset=dataset,
            run=run,
            started_ns=WALL_NS,
            fields=_provenance(scenario, seed, rows_per_shard, order, n_records),
        )
        written = store.put_new(layout.run_path(run), [schema.to_bytes(record)])
        self.writer.append("run", RunBody(run=run, sha256=written.sha256))

    def add(self, piece: Simulated) -> None:
        """Commit a piece: readouts first, as the spec asks, then rows, losses and census."""
        if piece.readouts is not None:
            self._part(self.writer, "readouts", piece.readouts)
        self._shards(piece)
        if len(piece.drops):
            self._part(self.writer, "drops", piece.drops)
        self._part(self.writer, "stalls", piece.stalls)
        requests = piece.requests
        first = self._shift["request"]
        if first:
            names = [f"sim-{first + i}" for i in range(len(requests))]
            requests = _with(requests, "external_id", pa.array(names))
        self._part(self.census, "requests", requests)
        self._part(self.census, "steps", piece.steps)
        self._part(self.census, "spans", piece.spans)
        self._count(piece)

    def close(self) -> None:
        """Commit the occupancy of all pieces, and close both chains with their totals."""
        lines = [(*key, *sums) for key, sums in sorted(self._stood.items())]
        columns = [[line[i] for line in lines] for i in range(5)]
        names = ["stage", "depth", "capacity", "duration_ns", "n_visits"]
        occupancy = tables.build("occupancy", dict(zip(names, columns, strict=True)))
        commit_part(self.store, self.writer, "occupancy", self.run, 0, occupancy)
        totals = {"rows": self._rows, "dropped_tokens": self._dropped, "recomputed_tokens": 0}
        self.writer.close("finished", totals)
        census = {name: self._counts[name] for name in tables.DISPOSITIONS}
        census |= {name: self._counts[name] for name in ("requests", "scheduled_tokens")}
        self.census.close("finished", census)

    def _part(self, chain: Chain, table: PartTable, rows: pa.Table) -> None:
        n = self._n_parts[table]
        commit_part(self.store, chain, table, self.run, n, self._shifted(rows))
        self._n_parts[table] += 1

    def _shifted(self, rows: pa.Table) -> pa.Table:
        """Return a table whose numbers and times follow those of the pieces before."""
        if not self._shift:
            return rows
        for name in rows.column_names:
            kind = {
                "ref_request": "request",
                "source_row": "request",
                "arrival_ns": "t_ns",
                "first_token_ns": "t_ns",
                "finish_ns": "t_ns",
            }.get(name, name)
            if kind in self._shift:
                by = pa.scalar(self._shift[kind], rows[name].type)
                rows = _with(rows, name, pc.add(rows[name], by))
        return rows

    def _shards(self, piece: Simulated) -> None:
        """Commit the stored rows, in the order of their steps, by phase."""
        rows = piece.tokens
        order = np.argsort(rows["step"].to_numpy(), kind="stable")
        prefill = piece.computed.prefill[piece.stored][order]
        shifted = self._shifted(rows)
        for phase in tables.PHASES:
            mine = order[prefill == (phase == "prefill")]
            for first in range(0, len(mine), self.rows_per_shard):
                which = mine[first : first + self.rows_per_shard]
                columns = {
                    name: shifted[name].to_numpy()[which]
                    for name in shifted.column_names
                    if name != "phase"
                }
                shard_rows = ShardRows(
                    hooks={HOOK: piece.rows.bits[piece.stored[which]]},
                    dtypes={HOOK: "bfloat16"},
                    tokens=columns,
                    phase="prefill" if phase == "prefill" else "decode",
                    first_step=int(columns["step"].min()),
                    last_step=int(columns["step"].max()),
                )
                commit_shard(
                    self.store,
                    self.writer,
                    shard_rows,
                    shard=f"{self.run}-{self._n_shards:06d}",
                    run=self.run,
                    order=self.order,
                    seed=self._n_shards,
                )
                self._n_shards += 1

    def _count(self, piece: Simulated) -> None:
        """Add a piece to the totals, and move the numbers and times on behind it."""
        length = pc.subtract(piece.spans["stop"], piece.spans["start"])
        spans = pa.table({"disposition": piece.spans["disposition"], "length": length})
        for line in spans.group_by("disposition").aggregate([("length", "sum")]).to_pylist():
            self._counts[line["disposition"]] += line["length_sum"]
        self._counts["requests"] += len(piece.requests)
        self._counts["scheduled_tokens"] += len(piece.lost)
        self._rows += len(piece.tokens)
        self._dropped = self._counts["dropped"]
        for line in piece.occupancy.to_pylist():
            sums = self._stood.setdefault((line["stage"], line["depth"], line["capacity"]), [0, 0])
            sums[0] += line["duration_ns"]
            sums[1] += line["n_visits"]
        last = piece.steps.slice(len(piece.steps) - 1).to_pylist()[0]
        self._shift["request"] += len(piece.requests)
        self._shift["step"] += len(piece.steps)
        self._shift["t_ns"] += last["t_ns"] + last["duration_ns"] - WALL_NS
        n_drops = pc.max(piece.drops["drop"]).as_py() + 1 if len(piece.drops) else 0
        self._shift["drop"] += n_drops


def _with(table: pa.Table, name: str, column: object) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(index), column)


def _provenance(
    scenario: Scenario, seed: int, rows_per_shard: int, order: str, n_records: int | None
) -> dict[str, ProvenanceField]:
    readouts = Readouts(scenario.n_projections, 0).as_field() if scenario.readouts else NONE
    known: dict[str, bool | int | str] = {
        "engine.name": "simulated",
        "engine.own_process": False,
        "model.name": "simulated-1-layer",
        "model.n_layers": 1,
        "model.d_model": scenario.d_model,
        "model.quantization": "none",
        "model.weights_sha256": hashlib.sha256(b"simulated").hexdigest(),
        "numerics.dtype": "bfloat16",
        "numerics.device": "cpu",
        "serving.mode": "live",
        "serving.prefix_caching": scenario.prefix_share > 0,
        "serving.chunked_prefill": True,
        "serving.async_scheduling": scenario.cancel_share > 0,
        "serving.max_num_seqs": scenario.max_num_seqs,
        "serving.max_num_batched_tokens": scenario.max_batch_tokens,
        "serving.speculative_method": "none",
        "capture.method": "simulated",
        "capture.overflow_policy": scenario.policy,
        "capture.cast": "none",
        "capture.order": order,
        "capture.rows_per_shard": rows_per_shard,
        "capture.sampling": "all",
        "capture.readouts": readouts,
        "simulation.scenario": repr(scenario),
        "simulation.seed": seed,
    }
    if n_records is not None:
        known["prompts.n_records"] = n_records
    reason = "a simulated run has none"
    fields = {
        name: ProvenanceField(value=None, origin="unknown", reason=reason)
        for name in REQUIRED_PROVENANCE
    }
    for name, value in known.items():
        fields[name] = ProvenanceField(value=value, origin="observed", reason=None)
    return fields
