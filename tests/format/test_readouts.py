"""Readouts: kept for every computed row, lost or not, and refused when they are not the row's."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import torch

import actds
from actds.errors import ActdsError, Findings
from actds.format import canonical, schema, tables
from actds.format.readouts import Readouts, compute, directions, load_probes, matrix, probe_bytes
from actds.format.schema import LedgerRecord, PartBody
from actds.publish.sealing import seal
from actds.store import layout, open_store
from actds_testing.synthetic_engine import (
    D_MODEL,
    GENERATED,
    HOOKS,
    PROMPT_LEN,
    SyntheticEngine,
    pipeline_for,
    writer_stopped,
)
from actds_validators.validate.readouts import HookReadouts, RunReadouts, compare
from actds_validators.validate.validation import validate
from actds_writers.capture.hooks import plan_readouts, read_probes
from actds_writers.capture.op import capture_and_read
from actds_writers.capture.transfer import Lane
from actds_writers.ipc.messages import ClientFacts, HookSpec
from actds_writers.monitor.progress import take_snapshot
from actds_writers.sampling import LeftOut

pytestmark = pytest.mark.standard


N_POSITIONS = PROMPT_LEN + GENERATED - 1
PLANNED = Readouts(8, seed=5)


class RandomRows(SyntheticEngine):
    """Rows like a model's, each a function of whose it is."""

    def row_bits(self, number: int, positions: np.ndarray) -> np.ndarray:
        rows = np.stack(
            [
                np.random.default_rng([number, int(p)]).normal(size=(len(HOOKS), D_MODEL))
                for p in positions
            ],
            axis=1,
        )
        return rows.astype(ml_dtypes.bfloat16).view(np.uint16)


def harvested(
    out: Path,
    policy: str = "block",
    *,
    readouts: Readouts | None = PLANNED,
    probes: bytes | None = None,
    stall: bool = False,
    left_out: LeftOut | None = None,
) -> actds.Dataset:
    with pipeline_for(out, policy, readouts=readouts, probes=probes) as pipeline:
        engine = RandomRows(pipeline)
        engine.request(0)
        engine.drain(pipeline)
        with writer_stopped(pipeline) if stall else nullcontext():
            for number in range(1, 60 if stall else 8):
                engine.request(number, left_out or LeftOut())
        engine.drain(pipeline)
        engine.close()
        pipeline.send_client_facts(ClientFacts())
        pipeline.finish("finished")
    seal(open_store(out))
    return actds.open(out)


def errors(path: Path) -> list[str]:
    return [finding.code for finding in validate(path, level="deep").errors]


def test_every_computed_row_has_its_readouts(tmp_path: Path) -> None:
    dataset = harvested(tmp_path / "acts")
    table = dataset.readouts()
    assert errors(tmp_path / "acts") == []
    assert table.num_rows == 8 * N_POSITIONS * len(HOOKS)
    keys = set(zip(*(table[n].to_pylist() for n in ("request", "position", "hook")), strict=True))
    assert keys == {(r, p, h.name) for r in range(8) for p in range(N_POSITIONS) for h in HOOKS}
    wanted = {"request": 3, "position": 7, "hook": HOOKS[1].name}
    row = next(row for row in table.to_pylist() if wanted.items() <= row.items())
    rows = np.random.default_rng([3, 7]).normal(size=(len(HOOKS), D_MODEL))[1]
    rows = rows.astype(ml_dtypes.bfloat16).astype(np.float32)[None]
    want = compute(rows, directions(8, D_MODEL, 5))[0]
    assert np.allclose([row["norm"], *row["projections"]], want, rtol=1e-5)
    assert row["probes"] == []
    assert table["token_id"].to_pylist() == table["position"].to_pylist()


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest"])
def test_a_lost_row_leaves_its_readouts_behind(policy: str, tmp_path: Path) -> None:
    dataset = harvested(tmp_path / "acts", policy, stall=True)
    drops = dataset.drops().to_pylist()
    assert drops
    assert errors(tmp_path / "acts") == []
    assert dataset.n_rows < 60 * N_POSITIONS
    table = dataset.readouts()
    assert table.num_rows == 60 * N_POSITIONS * len(HOOKS)
    assert table["token_id"].to_pylist() == table["position"].to_pylist()


@pytest.mark.parametrize("policy", ["block", "drop_newest"])
def test_rows_and_drops_whose_readouts_never_came_are_aborted(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is killed may have sent rows and not yet their readouts."""
    silent, put = threading.Event(), Lane.put

    def put_or_not(lane: Lane, *args: Any) -> bool:
        return silent.is_set() or put(lane, *args)

    monkeypatch.setattr(Lane, "put", put_or_not)
    out = tmp_path / "acts"
    with pipeline_for(out, policy, readouts=PLANNED) as pipeline:
        engine = RandomRows(pipeline)
        writer = pipeline.processes["writer"].pid
        for number in range(3):
            engine.request(number)
        engine.drain(pipeline)
        silent.set()
        if policy == "drop_newest":
            os.kill(writer, signal.SIGSTOP)  # so that some of the last are dropped
        try:
            for number in range(3, 60 if policy == "drop_newest" else 5):
                engine.request(number)
        finally:
            os.kill(writer, signal.SIGCONT)
        engine.close()  # at once: while the link is there, a commit waits for the readouts
        pipeline.finish("interrupted")
    seal(open_store(out))
    dataset = actds.open(out)
    assert errors(out) == []
    assert dataset.n_rows == 3 * N_POSITIONS
    assert set(dataset.requests()["request"].to_pylist()) >= {0, 1, 2, 3}
    assert dataset.drops().num_rows == 0
    assert dataset.readouts().num_rows == 3 * N_POSITIONS * len(HOOKS)
    assert {s["disposition"] for s in dataset.spans().to_pylist()} == {"captured", "aborted"}


def test_a_full_lane_makes_the_engine_wait_and_loses_no_readout(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    with pipeline_for(out, "drop_newest", readouts=PLANNED, lane_nbytes=1) as pipeline:
        engine = RandomRows(pipeline)
        engine.request(0)
        engine.drain(pipeline)
        with writer_stopped(pipeline, 0.5):
            for number in range(1, 60):
                engine.request(number)
        engine.drain(pipeline)
        engine.close()
        pipeline.finish("finished")
        pipeline.poll()
        lane = take_snapshot(
            pipeline.written, pipeline.counted, elapsed_s=1.0, requests_done=60, requests_total=60
        ).lane
    seal(open_store(out))
    dataset = actds.open(out)
    assert errors(out) == []
    assert dataset.readouts().num_rows == 60 * N_POSITIONS * len(HOOKS)
    waits = [row for row in dataset.stalls().to_pylist() if row["stage"] == "readouts"]
    assert waits and lane is not None
    assert lane.n_stalls == len(waits)
    assert lane.stall_s == pytest.approx(sum(row["duration_ns"] for row in waits) / 1e9)
    assert lane.nbytes == 60 * N_POSITIONS * len(HOOKS) * PLANNED.width * 4


def test_what_the_rules_leave_out_leaves_no_readouts(tmp_path: Path) -> None:
    rules = LeftOut(prefill="sampling:phase")
    dataset = harvested(tmp_path / "acts", left_out=rules)
    assert errors(tmp_path / "acts") == []
    n_decode = GENERATED - 1
    assert dataset.n_rows == N_POSITIONS + 7 * n_decode
    assert dataset.readouts().num_rows == len(HOOKS) * dataset.n_rows


def test_probes_are_stored_pinned_and_read_out(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(len(HOOKS), 3, D_MODEL)).astype(np.float32)
    data = probe_bytes(values)
    planned = Readouts(2, 7, 3, hashlib.sha256(data).hexdigest())
    out = tmp_path / "acts"
    dataset = harvested(out, readouts=planned, probes=data)
    report = validate(out, level="deep")
    assert not report.findings
    row = next(r for r in dataset.readouts().to_pylist() if r["hook"] == HOOKS[1].name)
    rows = np.random.default_rng([row["request"], row["position"]]).normal(size=(2, D_MODEL))[1]
    rows = rows.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.allclose(row["probes"], values[1] @ rows, rtol=1e-4, atol=1e-5)
    path = out / layout.probes_path(dataset.catalog.run_ids[0])
    path.write_bytes(probe_bytes(values + 1))
    assert "E202" in errors(out)


def rewrite(out: Path, change: object) -> None:
    """Replace the readouts of a run by others, with a ledger that says so truly."""
    store = open_store(out)
    for path in sorted(out.glob("ledger/w-*/*.json")):
        record = schema.parse(LedgerRecord, path.read_bytes(), path.name)
        body = record.typed_body()
        if isinstance(body, PartBody) and body.table == "readouts":
            file = out / body.file.path
            table = tables.from_parquet("readouts", file.read_bytes(), body.file.path)
            data = tables.to_parquet("readouts", change(table))  # type: ignore[operator]
            file.write_bytes(data)
            entry = body.file.model_copy(
                update={"nbytes": len(data), "sha256": canonical.digest(data)}
            )
            n_rows = tables.from_parquet("readouts", data, "x").num_rows
            body = body.model_copy(update={"file": entry, "n_rows": n_rows})
            record = record.model_copy(update={"body": body.model_dump(mode="json")})
            path.write_bytes(schema.to_bytes(record))
    for chain in out.glob("ledger/*"):
        prev = "0" * 64
        for path in sorted(chain.glob("*.json")):
            record = schema.parse(LedgerRecord, path.read_bytes(), path.name)
            record = record.model_copy(update={"prev": prev})
            path.write_bytes(schema.to_bytes(record))
            prev = canonical.digest(path.read_bytes())
    for path in out.glob("seal/*"):
        path.unlink()
    seal(store)


def without_one(table: pa.Table) -> pa.Table:
    keep = np.ones(table.num_rows, bool)
    keep[table.num_rows // 2] = False  # a part is as long as the machine let it become
    return table.filter(pa.array(keep))


def with_a_stranger(table: pa.Table) -> pa.Table:
    stranger = table.slice(0, 1).set_column(1, "position", pa.array([999], pa.uint32()))
    return pa.concat_tables([table, stranger.cast(table.schema)])


def twice(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table, table.slice(2, 1)])


def shifted(table: pa.Table) -> pa.Table:
    norms = np.roll(table["norm"].to_numpy(), 1)
    return table.set_column(5, table.schema.field("norm"), pa.array(norms, pa.float32()))


def with_tokens(table: pa.Table, lines: np.ndarray) -> pa.Table:
    """Return the table with the token of some lines one higher."""
    ids = table["token_id"].to_numpy() + lines.astype(np.uint32)
    return table.set_column(2, table.schema.field("token_id"), pa.array(ids))


def another_token(table: pa.Table) -> pa.Table:
    return with_tokens(table, np.arange(table.num_rows) == 4)


def another_token_at_every_hook(table: pa.Table) -> pa.Table:
    first = table.slice(0, 1).to_pylist()[0]
    same = [(row["request"], row["position"]) for row in table.to_pylist()]
    return with_tokens(table, np.array([k == (first["request"], first["position"]) for k in same]))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (without_one, "E416"),
        (with_a_stranger, "E416"),
        (twice, "E416"),
        (shifted, "E417"),
        (another_token, "E417"),
        (another_token_at_every_hook, "E417"),
    ],
)
def test_readouts_that_are_not_those_of_the_rows_are_refused(
    change: object, code: str, tmp_path: Path
) -> None:
    out = tmp_path / "acts"
    harvested(out)
    rewrite(out, lambda table: table)
    assert errors(out) == []
    rewrite(out, change)
    assert set(errors(out)) == {code}


def test_the_token_of_a_lost_row_is_checked_with_the_digest_of_the_census(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    dataset = harvested(out, "drop_newest", stall=True)
    lost = {(d["request"], p) for d in dataset.drops().to_pylist() for p in
            range(d["start"], d["stop"])}  # fmt: skip
    one = min(lost)

    def other(table: pa.Table) -> pa.Table:
        lines = np.array([(r["request"], r["position"]) == one for r in table.to_pylist()])
        return with_tokens(table, lines)

    rewrite(out, other)
    report = validate(out, level="full")
    assert {finding.code for finding in report.errors} == {"E417"}
    assert f"request {one[0]} token_id" in report.errors[0].place


@pytest.mark.parametrize("flush", [False, True], ids=["subnormal", "flushed to zero"])
@pytest.mark.parametrize("exponent", [0, -10, -18, -19, -20, -22, -30, -37, -40])
def test_rows_of_a_tiny_norm_are_those_that_they_are(exponent: int, flush: bool) -> None:
    """What an engine computes in float32, with its squares below the smallest number of it."""
    n, d = 8, 64
    rows = (np.random.default_rng(3).normal(size=(n, d)) * 10.0**exponent).astype(np.float32)
    planned = Readouts(2, 5)
    packed = matrix(planned, None, 1, d)[0]
    torch.set_flush_denormal(flush)
    try:
        given = torch.from_numpy(rows)
        norms = given.square().sum(dim=1).sqrt().numpy()
        projections = (given @ torch.from_numpy(packed)).numpy()
    finally:
        torch.set_flush_denormal(False)

    def found(norm: np.ndarray) -> list[str]:
        return codes(rows, np.column_stack([norm, projections]), planned)

    assert found(norms) == []
    if exponent > -18:
        assert found(norms * np.float32(1.001)) == ["E417"]


def codes(
    rows: np.ndarray, numbers: np.ndarray, planned: Readouts, probes: np.ndarray | None = None
) -> list[str]:
    """Return what a validator finds in the readouts ``(n, width)`` of float32 rows."""
    n, k = len(rows), 1 + planned.n_projections
    keys = {"request": np.zeros(n, "u4"), "position": np.arange(n), "step": np.arange(n)}
    lists = {
        name: pa.array(list(part), pa.list_(pa.float32()))
        for name, part in (("projections", numbers[:, 1:k]), ("probes", numbers[:, k:]))
    }
    table = pa.table(keys | {"norm": numbers[:, 0]} | lists)
    of_hook = {} if probes is None else {"h": probes}
    stored = RunReadouts({"h": HookReadouts(table)}, planned, of_hook)
    findings = Findings()
    compare(findings, stored, "h", pa.table(keys), rows.view("u4"), "float32", "s")
    return [finding.code for _, finding in findings]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_of_float32_in_an_engine_that_multiplies_in_tf32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have most of their norm in one channel, as a model's do, and a probe is along it."""
    n, d, multiply = 16, 256, torch.mm
    rows = torch.from_numpy(np.random.default_rng(3).normal(size=(n, d)).astype(np.float32))
    rows[:, 5] = 1000 + 10 * torch.arange(n)
    probes = np.zeros((1, d), np.float32)
    probes[0, 5] = 0.7
    planned = Readouts(8, 5, 1, "0" * 64)
    packed = torch.from_numpy(matrix(planned, probes[None], 1, d)[0])

    def rounded(values: torch.Tensor) -> torch.Tensor:
        """Keep 10 bits behind the first, to the nearest, as tensor cores do."""
        bits = values.contiguous().view(torch.int32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)

    def cublas(one: torch.Tensor, two: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            one, two = rounded(one), rounded(two)
        return multiply(one, two, out=out)

    monkeypatch.setattr(torch, "mm", cublas)
    stored = torch.empty(n, d, dtype=dtype)
    seen, scratch = torch.zeros(1, dtype=torch.int64), torch.empty(n, d)
    readouts, in_tf32 = torch.empty(2, n, 10)
    torch.set_float32_matmul_precision("high")
    try:
        capture_and_read(rows, None, stored, seen, packed, scratch, readouts)
        in_tf32[:, 0] = readouts[:, 0]
        torch.mm(stored.float(), packed, out=in_tf32[:, 1:])
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    kept = stored.float().numpy()
    assert codes(kept, readouts.numpy(), planned, probes) == []
    assert codes(kept, in_tf32.numpy(), planned, probes) == ["E417"]


def test_directions_are_signs_of_a_shake_stream() -> None:
    found = directions(3, 16, 9)
    assert found.shape == (16, 3)
    assert np.array_equal(np.abs(found), np.full((16, 3), 0.25, np.float32))
    bits = hashlib.shake_256(b"actds projections 9 16").digest(6)
    first = [1 - 2 * ((bits[i // 8] >> (i % 8)) & 1) for i in range(16)]
    assert (found[:, 0] * 4).tolist() == first


def test_the_field_of_a_run_record_is_read_back() -> None:
    assert Readouts.from_field("none", "x") is None
    assert Readouts.from_field(PLANNED.as_field(), "x") == PLANNED
    for text in (
        '{"seed":1}',
        "[]",
        '{"n_projections":-1,"n_probes":0,"probes_sha256":null,"seed":1}',
    ):
        with pytest.raises(ActdsError, match=r"E10[23] x"):
            Readouts.from_field(text, "x")


def test_probe_files(tmp_path: Path) -> None:
    hooks = ["resid_post.1", "resid_post.2"]
    one = np.random.default_rng(0).normal(size=(4, 8))
    np.save(tmp_path / "one.npy", one)
    assert np.allclose(read_probes(tmp_path / "one.npy", hooks, 8), np.stack([one, one]))
    specs = [HookSpec(name, "resid_post", int(name[-1]), 8, "bfloat16") for name in hooks]
    planned, data = plan_readouts(3, tmp_path / "one.npy", specs)
    assert planned.n_probes == 4 and data is not None
    assert np.allclose(load_probes(data, "x", (2, 4, 8)), [one, one])
    assert matrix(planned, load_probes(data, "x", (2, 4, 8)), 2, 8).shape == (2, 8, 12)
    wider = dataclasses.replace(specs[1], d_model=16)
    with pytest.raises(ActdsError, match=r"E015.*hooks of 8 and 16 channels"):
        plan_readouts(3, tmp_path / "one.npy", [specs[0], wider])
    from safetensors.numpy import save_file

    save_file({hook: one.astype(np.float32) for hook in hooks}, tmp_path / "two.safetensors")
    assert np.allclose(read_probes(tmp_path / "two.safetensors", hooks, 8), [one, one])


@pytest.mark.parametrize("kind", ["missing", "shape", "nan", "text", "name", "suffix"])
def test_a_bad_probe_file_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("probes.safetensors" if kind == "name" else "probes.npy")
    if kind == "shape":
        np.save(path, np.ones((3, 9)))
    elif kind == "nan":
        np.save(path, np.full((3, 8), np.nan))
    elif kind == "text":
        path.write_text("no array")
    elif kind == "name":
        from safetensors.numpy import save_file

        save_file({"resid_post.9": np.ones((3, 8), np.float32)}, path)
    elif kind == "suffix":
        path = tmp_path / "probes.pt"
    with pytest.raises(ActdsError, match=r"E015 .*probes"):
        read_probes(path, ["resid_post.1"], 8)
