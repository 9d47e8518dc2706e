"""Small conforming datasets, written through the real store, ledger and shard commit.

The schedule is simulated (``schedules.py``), the states are a pure function of the token prefix,
as those of a model are: the same prefix gives the same row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pyarrow as pa

from actds.dataset.commit import ShardRows, commit_part, commit_shard
from actds.dataset.ledger import Chain
from actds.format import schema, tables
from actds.format.inclusion import INCLUSION
from actds.format.readouts import Readouts, compute, matrix
from actds.format.schema import (
    REQUIRED_PROVENANCE,
    Genesis,
    Hook,
    PartTable,
    ProvenanceField,
    RunBody,
    RunRecord,
)
from actds.store import layout
from actds.store.local import LocalStore
from actds_testing.schedules import WALL_NS, Schedule, simulate, thinned

SOFTWARE = "actds synthetic"
DType = Literal["bfloat16", "float16", "float32"]
_NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
_BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
_OBSERVED: dict[str, bool | int | str] = {
    "engine.name": "synthetic",
    "engine.own_process": False,
    "model.name": "synthetic-2-layers",
    "model.n_layers": 2,
    "model.quantization": "none",
    "serving.mode": "offline",
    "serving.prefix_caching": True,
    "serving.chunked_prefill": True,
    "serving.block_size": 4,
    "serving.speculative_method": "none",
    "capture.method": "simulated",
    "capture.overflow_policy": "block",
    "numerics.device": "cpu",
}


def make_dataset(
    path: str | Path,
    *,
    n_requests: int = 12,
    seed: int = 0,
    drops: bool = False,
    cache: bool = True,
    filtered: bool = False,
    hooks: Sequence[str] = ("resid_post.0", "resid_post.1"),
    d_model: int | Mapping[str, int] = 16,
    dtype: DType | Mapping[str, DType] = "bfloat16",
    run: str = "r-synthetic",
    rows_per_shard: int = 64,
    order: Literal["permuted", "sequence"] = "permuted",
    schedule: Schedule | None = None,
    span_parts: int = 2,
    sealed: bool = True,
    readouts: Readouts | None = None,
    sinks: bool = False,
    roles: bool | str | pa.Table = False,
    origins: bool | pa.Table = False,
    entropy: bool = False,
    facts: Mapping[str, bool | int | str | None] | None = None,
    looks: Mapping[PartTable, pa.Table] | None = None,
    profile: bytes | None = None,
) -> Path:
    """Write a dataset of one run and return its path.

    Args:
        path: the folder; a further run is added when it holds a dataset already.
        n_requests: requests of the simulated run.
        seed: seed of the schedule.
        drops: lose some steps to an overflow.
        cache: let requests of a common prefix hit the prefix cache.
        filtered: leave some tokens out by a filter.
        hooks: names ``KIND.LAYER``.
        d_model: channels of a row; by hook where they differ.
        dtype: type of the rows; by hook where they differ.
        run: id of the run.
        rows_per_shard: rows of one phase that are committed together.
        order: row order of the shards.
        schedule: what to write instead of a simulated schedule.
        span_parts: parts that the spans are written in.
        sealed: seal at the end.
        readouts: which readouts every computed row leaves.
        sinks: flag first positions as special and BOS, and give them 256 times the norm.
        roles: call the prompts chats: template, user, template, and what is sampled assistant, or
            another role that is given; or the table.
        origins: call the requests replays of one run of a made-up dataset, the last of them aside;
            or the table.
        entropy: record what the logits, of 16 tokens, said of each sampled one.
        facts: what else the run record says, None for what it does not know.
        looks: tables of what was looked at, to be committed as they are.
        profile: the bytes of the profile's file.
    """
    told = schedule or simulate(n_requests, seed, drops=drops, cache=cache, filtered=filtered)
    if sinks:
        flags = np.where(np.asarray(told.rows["position"]) == 0, 3, 0).astype(np.uint16)
        at = told.rows.column_names.index("flags")
        told = told.with_(rows=told.rows.set_column(at, "flags", pa.array(flags)))
    store = LocalStore(Path(path))
    if store.exists(layout.GENESIS):
        genesis = schema.parse(Genesis, store.read(layout.GENESIS), layout.GENESIS)
    else:
        genesis = _write_genesis(store, seed, hooks, d_model, dtype)
    writer = Chain.begin(store, genesis.dataset, run, "writer", SOFTWARE)
    census = Chain.begin(store, genesis.dataset, run, "census", SOFTWARE)
    _write_run_record(store, writer, run, len(told.requests), dtype, readouts, entropy, facts or {})
    if readouts is not None:
        part = _readout_table(told, genesis.hooks, readouts, sinks)
        commit_part(store, writer, "readouts", run, 0, part)
    if profile is not None:
        store.put_new(layout.profile_path(run), [profile])
    for table, lines in (looks or {}).items():
        commit_part(store, writer, table, run, 0, lines)
    n_shards = _write_shards(store, writer, run, told, genesis.hooks, rows_per_shard, order, sinks)
    if len(told.drops):
        commit_part(store, writer, "drops", run, 0, told.drops)
    commit_part(store, writer, "stalls", run, 0, tables.empty("stalls"))
    commit_part(store, census, "requests", run, 0, told.requests)
    commit_part(store, census, "steps", run, 0, told.steps)
    step = -(-len(told.spans) // span_parts) or 1
    for n in range(span_parts):
        commit_part(store, census, "spans", run, n, told.spans.slice(n * step, step))
    if roles:
        if not isinstance(roles, pa.Table):
            roles = _role_table(told, roles if isinstance(roles, str) else "assistant")
        commit_part(store, census, "roles", run, 0, roles)
    if origins is not False:
        lines = _origin_table(told) if origins is True else origins
        commit_part(store, census, "origins", run, 0, lines)
    if entropy:
        n_scores = str((facts or {}).get(INCLUSION)).count('"probe":[')
        commit_part(store, census, "sampled", run, 0, sampled_table(told, n_scores))
    writer.close("finished", _writer_totals(told))
    census.close("finished", _census_totals(told))
    assert n_shards or not len(told.rows)
    if sealed:
        from actds.publish.sealing import seal

        seal(store)
    return Path(path)


SALT = 0x0123456789ABCDEF


def thinned_facts(unit: str = "row", keep: str = "[]") -> dict[str, bool | int | str | None]:
    """Return what the run record says of rows drawn under ``SALT``, each step with 0.125 at least.

    Args:
        keep: rules for shares, as JSON.
    """
    design = f'{{"keep":{keep},"minimum":"0.125","salt":"{SALT:016x}","unit":"{unit}"}}'
    return {"capture.overflow_policy": "thin", "capture.inclusion": design}


def make_thinned(
    path: str | Path,
    schedule: Schedule,
    shares: Mapping[int, float],
    unit: str = "row",
    facts: Mapping[str, bool | int | str | None] | None = None,
    **options: Any,
) -> Path:
    """Write a dataset of a run that stores a part of the rows of a schedule, drawn by hash.

    Args:
        shares: probability by step, at least 0.125; 1 where it is left out.
        unit: ``row`` or ``request``.
        facts, options: as of ``make_dataset``.
    """
    drawn = thinned(schedule, SALT, shares, unit)
    told = {**thinned_facts(unit), **(facts or {})}
    return make_dataset(path, schedule=drawn, facts=told, **options)


def _write_genesis(
    store: LocalStore,
    seed: int,
    hooks: Sequence[str],
    d_model: int | Mapping[str, int],
    dtype: DType | Mapping[str, DType],
) -> Genesis:
    named = [
        Hook(
            name=name,
            kind=name.rpartition(".")[0],
            layer=int(name.rpartition(".")[2]),
            d_model=d_model if isinstance(d_model, int) else d_model[name],
            dtype=dtype if isinstance(dtype, str) else dtype[name],
        )
        for name in hooks
    ]
    genesis = Genesis(dataset=f"{seed:032x}", created_ns=WALL_NS, writer=SOFTWARE, hooks=named)
    store.put_new(layout.GENESIS, [schema.to_bytes(genesis)])
    return genesis


def _write_run_record(
    store: LocalStore,
    writer: Chain,
    run: str,
    n_records: int,
    dtype: DType | Mapping[str, DType],
    readouts: Readouts | None,
    entropy: bool,
    facts: Mapping[str, bool | int | str | None],
) -> None:
    fields = {
        name: ProvenanceField(value=None, origin="unknown", reason="a simulated run has none")
        for name in REQUIRED_PROVENANCE
    }
    observed = {
        **_OBSERVED,
        "numerics.dtype": dtype if isinstance(dtype, str) else "float32",
        "prompts.n_records": n_records,
    }
    if readouts is not None:
        observed["capture.readouts"] = readouts.as_field()
    if entropy:
        observed["capture.entropy"] = True
    for name, value in {**observed, **facts}.items():
        known = value is not None
        origin, reason = ("observed", None) if known else ("unknown", "nobody looked")
        fields[name] = ProvenanceField(value=value, origin=origin, reason=reason)
    record = RunRecord(dataset=writer.dataset, run=run, started_ns=WALL_NS, fields=fields)
    written = store.put_new(layout.run_path(run), [schema.to_bytes(record)])
    writer.append("run", RunBody(run=run, sha256=written.sha256))


def _write_shards(
    store: LocalStore,
    writer: Chain,
    run: str,
    told: Schedule,
    hooks: Sequence[Hook],
    rows_per_shard: int,
    order: Literal["permuted", "sequence"],
    sinks: bool,
) -> int:
    """Commit the rows in shards of one phase and the hooks of their requests; return how many."""
    chosen = dict(zip(*(told.requests[n].to_pylist() for n in ("request", "hooks")), strict=True))
    columns: dict[str, np.ndarray[Any, Any]] = {
        name: np.asarray(told.rows[name]) for name in told.rows.column_names
    }
    n_shards = 0
    of_row = np.array([chosen[request] or "" for request in columns["request"].tolist()], "U256")
    every = hooks
    for phase, names in product(tables.PHASES, sorted(set(chosen.values()), key=str)):
        mine = np.flatnonzero((columns["phase"] == phase) & (of_row == (names or "")))
        hooks = [hook for hook in every if names is None or hook.name in names.split(",")]
        lot = phase if names is None else f"{phase}-{names.replace(',', '-')}"
        for first in range(0, len(mine), rows_per_shard):
            which = mine[first : first + rows_per_shard]
            tokens = {name: column[which] for name, column in columns.items()}
            bits = {
                hook.name: _lengthened(states(tokens, told.token_ids, hook), tokens, hook, sinks)
                for hook in hooks
            }
            rows = ShardRows(
                hooks=bits,
                dtypes={hook.name: hook.dtype for hook in hooks},
                tokens=tokens,
                phase=phase,  # type: ignore[arg-type]
                first_step=int(tokens["step"].min()),
                last_step=int(tokens["step"].max()),
            )
            name = f"{run}-{lot}-{first // rows_per_shard:04d}"
            commit_shard(
                store, writer, rows, shard=name, run=run, order=order, seed=1000 + n_shards
            )
            n_shards += 1
    return n_shards


def _role_table(told: Schedule, sampled: str) -> pa.Table:
    """Return roles of all positions but the first: of that one none is known."""
    lines = []
    for one in told.requests.to_pylist():
        if one["finish_reason"] == "skipped":
            continue  # it has no positions
        prompt = one["prompt_len"]
        stop = prompt + max(one["generated_len"] - 1, 0)
        edges = [1, 3, max(3, prompt - 2), prompt, stop]
        for role, start, end in zip(
            ("template", "user", "template", sampled), edges, edges[1:], strict=False
        ):
            if start < min(end, stop):
                lines.append((one["request"], start, min(end, stop), role))
    names = tables.SCHEMAS["roles"].names
    return tables.build("roles", dict(zip(names, zip(*lines, strict=True), strict=True)))


def _origin_table(told: Schedule) -> pa.Table:
    """Return origins of all requests but the last, of which half of the prompt was given."""
    lines = told.requests.to_pylist()[:-1]
    columns: dict[str, object] = {
        "request": [line["request"] for line in lines],
        "source_dataset": ["ab" * 16] * len(lines),
        "source_seal": ["cd" * 32] * len(lines),
        "source_run": ["r-source"] * len(lines),
        "source_request": [10 + line["request"] for line in lines],
        "n_given": [line["prompt_len"] // 2 for line in lines],
    }
    return tables.build("origins", columns)


def sampled_table(told: Schedule, n_scores: int = 0) -> pa.Table:
    """Return what logits, and so many scores, said that follow from the tokens before."""
    request, position, step = (list(column) for column in zip(*sorted(told.sampled), strict=True))
    keys = list(zip(request, position, strict=True))
    seeds = [_prefix_hashes(told.token_ids[r][:p], 0)[-1] for r, p in keys]
    channel = np.arange(1, 17, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = _mix(np.array(seeds, np.uint64)[:, None] ^ channel) >> np.uint64(11)
    logits = 8 * mixed.astype(np.float64) / 2**53
    odds = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    highest = np.sort(logits, axis=1)
    columns: dict[str, object] = {
        "request": request,
        "position": position,
        "step": step,
        "token_id": [told.token_ids[r][p] for r, p in keys],
        "entropy": -(odds * np.log(odds)).sum(axis=1),
        "logprob": np.log(odds[:, 0]),
        "margin": highest[:, -1] - highest[:, -2],
        "scores": (logits[:, :n_scores] - 4).astype(np.float32).tolist(),
    }
    return tables.build("sampled", columns)


def _readout_table(
    told: Schedule, hooks: Sequence[Hook], readouts: Readouts, sinks: bool
) -> pa.Table:
    """Return the readouts of every row that was stored or dropped."""
    rows = told.rows if told.computed is None else told.computed
    keys = [(row["request"], row["position"], row["step"]) for row in rows.to_pylist()]
    for drop in told.drops.to_pylist():
        keys += [
            (drop["request"], position, drop["step"])
            for position in range(drop["start"], drop["stop"])
        ]
    request, position, step = (np.array(column) for column in zip(*sorted(keys), strict=True))
    parts = []
    for hook in hooks:
        place = {"request": request, "position": position}
        bits = _lengthened(states(place, told.token_ids, hook), place, hook, sinks)
        rows = bits.view(_NUMPY[hook.dtype]).astype(np.float32)
        packed = matrix(readouts, None, 1, hook.d_model)[0]
        values = compute(rows, packed)
        columns: dict[str, object] = {
            "request": request,
            "position": position,
            "token_id": [told.token_ids[r][p] for r, p, _ in sorted(keys)],
            "step": step,
            "hook": [hook.name] * len(keys),
            "norm": values[:, 0],
            "projections": list(values[:, 1:]),
            "probes": [[]] * len(keys),
        }
        parts.append(tables.build("readouts", columns))
    return pa.concat_tables(parts)


def states(tokens: dict[str, Any], token_ids: list[list[int]], hook: Hook) -> np.ndarray[Any, Any]:
    """Return the bits ``(n_rows, d_model)`` of rows: a pure function of hook and prefix."""
    prefix_hash = [_prefix_hashes(ids, hook.layer) for ids in token_ids]
    seeds = np.array(
        [prefix_hash[r][p] for r, p in zip(tokens["request"], tokens["position"], strict=True)],
        np.uint64,
    )
    channel = np.arange(1, hook.d_model + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = _mix(seeds[:, None] ^ channel)
    uniform = (mixed >> np.uint64(11)).astype(np.float64) / 2**53
    values = np.sqrt(-2 * np.log(uniform + 1e-12)) * np.where(mixed & np.uint64(1), 1.0, -1.0)
    return values.astype(_NUMPY[hook.dtype]).view(_BITS[hook.dtype])


def _lengthened(
    bits: np.ndarray[Any, Any], tokens: dict[str, Any], hook: Hook, sinks: bool
) -> np.ndarray[Any, Any]:
    """Return the bits of rows, those of first positions 256 times as long."""
    values = bits.view(_NUMPY[hook.dtype]).astype(np.float32)
    values[np.asarray(tokens["position"]) == 0] *= 256
    return values.astype(_NUMPY[hook.dtype]).view(bits.dtype) if sinks else bits


def _prefix_hashes(ids: list[int], layer: int) -> list[int]:
    state, out = 0xC2B2AE3D27D4EB4F + layer, []
    for token in ids:
        state = (state * 6364136223846793005 + token + 1442695040888963407) % 2**64
        out.append(state)
    return out


def _mix(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _writer_totals(told: Schedule) -> dict[str, int]:
    lost = np.asarray(told.drops["stop"]).astype(int) - np.asarray(told.drops["start"]).astype(int)
    return {
        "rows": len(told.rows),
        "dropped_tokens": int(lost.sum()),
        "recomputed_tokens": _sum(told.steps, "recomputed_tokens"),
    }


def _census_totals(told: Schedule) -> dict[str, int]:
    length = np.asarray(told.spans["stop"]).astype(int) - np.asarray(told.spans["start"])
    kind = np.asarray(told.spans["disposition"])
    return {
        "requests": len(told.requests),
        "scheduled_tokens": _sum(told.steps, "batch_tokens"),
        **{name: int(length[kind == name].sum()) for name in tables.DISPOSITIONS},
    }


def _sum(table: pa.Table, name: str) -> int:
    return int(np.asarray(table[name]).astype(int).sum())
