"""Failures of other projects, replayed: made as the cited bug made them, and caught by a code.

Each test corrupts a harvest at the place where that project went wrong, lets every digest, count
and seal be as the broken writer would have written them, and shows which check notices. The table
of ``docs/gate.md`` lists them; the last test compares the two.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import torch

import actds
import actds.dataset.commit
from actds.errors import ActdsError
from actds.format import tables
from actds.store.local import LocalStore
from actds_testing import harvest as h
from actds_testing import synthetic, toy
from actds_testing.forge import rehash, relink
from actds_testing.places import DOCS
from actds_testing.schedules import Schedule, simulate
from actds_testing.synthetic import make_dataset
from actds_validators.validate.validation import Level, validate
from actds_writers.capture import hooks
from actds_writers.capture.taps import Tap, decoder_layers
from actds_writers.engines.account import WorkerSide

CAUGHT: dict[str, set[str]] = {}
"""The codes by which each failure was caught, by the name under which the guide has it."""


def caught(failure: str, *codes: str) -> None:
    CAUGHT.setdefault(failure, set()).update(codes)


def found(path: Path, level: Level) -> set[str]:
    """Return the codes that fail a dataset at a level."""
    return {finding.code for finding in validate(path, level).errors}


def with_states(
    folder: Path, patch: pytest.MonkeyPatch, spoil: Callable[[Any, dict[str, Any], str], Any],
    **options: Any,
) -> Path:  # fmt: skip
    """Return a dataset whose hooks left other rows than the model computed; all else is true."""
    real = synthetic.states

    def states(tokens: Any, token_ids: Any, hook: Any) -> Any:
        return spoil(real(tokens, token_ids, hook), tokens, hook.name)

    patch.setattr(synthetic, "states", states)
    path = make_dataset(folder / "acts", **{"n_requests": 12, **options})
    assert found(path, "full") == set(), "digests, counts and census are those of the broken writer"
    return path


# ---- the engine hands over other rows: a real harvest by the toy engine, of a real small model


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    site = toy.register(tmp_path_factory.mktemp("site"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
        patch.syspath_prepend(str(site))
        yield site


def harvest(folder: Path, **options: Any) -> Path:
    """Harvest with the toy engine, in this process; writer and census are others."""
    model = toy.write_model(folder / "model")
    prompts = [{"id": f"q{i}", "prompt": f"{i}{i} and {i} ".ljust(20, "xyzw"[i])} for i in range(4)]
    actds.write(
        out=folder / "acts", model=model,
        prompts=h.write_prompts(folder / "prompts.jsonl", prompts),
        hooks="resid_post:0,1", max_tokens=4, engine="toy",
        engine_args={"max_num_seqs": 4, "chunk": 32}, readouts=False, ring_mib=1, staging_mib=1,
        **options,
    )  # fmt: skip
    return folder / "acts"


def spoil_hand_over(patch: pytest.MonkeyPatch, spoil: Callable[[Any, int], None]) -> None:
    """Change the rows between the model and the capture, as a broken runner does."""
    real = WorkerSide.hand_over

    def hand_over(self: Any, step: Any, *more: Any, **named: Any) -> None:
        for rows in self.buffers.rows:
            spoil(rows, int(step.n_rows.sum()))
        real(self, step, *more, **named)

    patch.setattr(WorkerSide, "hand_over", hand_over)


@pytest.mark.standard
def test_rows_of_another_request_under_concurrency(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DMI #68: concurrent requests got each other's rows; every count was right."""

    def mix(rows: torch.Tensor, n: int) -> None:
        if n % 4 == 0:  # all four requests of the batch have rows: two trade places
            part = n // 4
            first = rows[:part].clone()
            rows[:part] = rows[part : 2 * part]
            rows[part : 2 * part] = first

    spoil_hand_over(monkeypatch, mix)
    with pytest.raises(ActdsError, match="E418"):
        harvest(tmp_path, canary="100%")
    assert found(tmp_path / "acts", "standard") == {"E418"}
    caught("another request's row", "E418")


@pytest.mark.standard
def test_states_of_the_call_before(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """speculators #279: a batched or repeated call returned what an earlier call had left."""
    before: list[torch.Tensor] = []

    def stale(rows: torch.Tensor, n: int) -> None:
        if n == 4:  # decode: the rows of the first such step are handed over ever after
            before.append(rows[:n].clone())
            rows[:n] = before[len(before) % 2 - 1] if len(before) <= 2 else before[len(before) % 2]

    spoil_hand_over(monkeypatch, stale)
    with pytest.raises(ActdsError, match="E418"):
        harvest(tmp_path, canary="100%")
    assert found(tmp_path / "acts", "deep") == {"E418", "E603"}
    caught("states of an earlier call", "E418", "E603")


def _tap_of(patch: pytest.MonkeyPatch, where: Callable[[Any, int], torch.nn.Module]) -> None:
    """Let the hook of the residual stream read another module's output."""

    def read(args: Any, kwargs: Any, output: torch.Tensor) -> tuple[torch.Tensor, None]:
        return output.flatten(0, -2).to(torch.bfloat16), None

    patch.setattr(
        type(hooks.BUILT_IN["resid_post"]),
        "tap",
        lambda self, model, layer, form: Tap(where(decoder_layers(model), layer), read),
    )


@pytest.mark.standard
def test_one_half_of_a_split_residual(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nnsight #630: the residual stream was in two tensors, and only one of them was taken."""
    _tap_of(monkeypatch, lambda layers, layer: layers[layer].down)
    with pytest.raises(ActdsError, match="E507"):
        harvest(tmp_path)
    assert not list((tmp_path / "acts").glob("shards/*")), "before the first row"
    caught("half of a split residual", "E507")


@pytest.mark.standard
def test_the_layer_after(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchSpec #87: rows of layer L + 1 were stored as those of L."""
    _tap_of(monkeypatch, lambda layers, layer: layers[layer + 1])
    with pytest.raises(ActdsError, match="E507"):
        harvest(tmp_path)
    caught("off-by-one layer", "E507")


def test_the_layer_after_beside_the_layer_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, unchecked, where the next hook is right: both hold the same rows."""
    right: dict[int, Any] = {}

    def late(bits: Any, tokens: dict[str, Any], hook: str) -> Any:
        return right.setdefault(len(bits), bits) if hook == "resid_post.0" else right[len(bits)]

    path = with_states(tmp_path, monkeypatch, late)
    assert found(path, "deep") == {"E603"}
    caught("off-by-one layer", "E603")
    caught("aliased memory", "E603")  # nnsight #630: two names, one buffer


# ---- what the model left is no state


def test_zeros_of_a_hybrid_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #46301: layers of a hybrid model that the hook does not reach left zeros."""

    def zero(bits: Any, tokens: dict[str, Any], hook: str) -> Any:
        return np.zeros_like(bits) if hook == "resid_post.1" else bits

    path = with_states(tmp_path, monkeypatch, zero)
    assert found(path, "deep") == {"E602"}
    caught("all-zero states", "E602")


def test_nan_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """speculators #615: a draft model was trained on NaN."""

    def broken(bits: Any, tokens: dict[str, Any], hook: str) -> Any:
        values = bits.view(ml_dtypes.bfloat16).copy()
        values[np.asarray(tokens["position"]) == 3, 7] = np.nan
        return values.view(bits.dtype)

    path = with_states(tmp_path, monkeypatch, broken)
    assert found(path, "deep") == {"E601"}
    with pytest.raises(ActdsError, match="E601"):
        actds.require(path, level="deep")
    caught("NaN states", "E601")


# ---- rows that are missing, or that nobody served


def without(schedule: Schedule, gone: np.ndarray) -> Schedule:
    """Return what is written when rows do not arrive and nobody says so."""
    return schedule.with_(rows=schedule.rows.filter(pa.array(~gone)))


def test_rows_that_the_prefix_cache_served(tmp_path: Path) -> None:
    """vllm #44485, vLLM-Hook #14: positions of a cached prefix had no row, and none was missed."""
    schedule = simulate(16, seed=1)
    assert "cache_ref" in schedule.spans["disposition"].to_pylist()
    spans = schedule.spans.to_pylist()
    step_of = {s["request"]: s["step"] for s in reversed(spans) if s["step"] is not None}
    for span in spans:  # the writer believes that every position was computed and captured
        if span["disposition"] == "cache_ref":
            span.update(disposition="captured", ref_request=None, step=step_of[span["request"]])
    claimed = schedule.with_(spans=pa.Table.from_pylist(spans, tables.SCHEMAS["spans"]))
    path = make_dataset(tmp_path / "acts", schedule=claimed, sealed=False)
    assert {"E406", "E411"} <= found(path, "standard")
    caught("too few rows under prefix caching", "E406", "E411")


def test_rows_of_rejected_drafts(tmp_path: Path) -> None:
    """vllm-omni #6863: rows of drafted tokens that were rejected were stored like others."""
    schedule = simulate(8, seed=4)
    rows = schedule.rows.to_pylist()
    draft = next(row for row in rows if row["phase"] == "decode")
    ends = {r["request"]: r["prompt_len"] + max(r["generated_len"] - 1, 0)
            for r in schedule.requests.to_pylist()}  # fmt: skip
    other = {**draft, "token_id": draft["token_id"] + 1}  # rejected, then computed again
    past = {**draft, "position": ends[draft["request"]] + 3}  # never accepted
    for extra, code in ((other, "E407"), (past, "E406")):
        drafted = pa.Table.from_pylist([*rows, extra], tables.SCHEMAS["tokens"])
        token_ids = [[*ids, *range(9)] for ids in schedule.token_ids]
        told = Schedule(
            schedule.requests, schedule.steps, schedule.spans, schedule.drops, drafted, token_ids
        )
        path = make_dataset(tmp_path / code, schedule=told, sealed=False)
        assert code in found(path, "standard")
        caught("rejected draft rows", code)


def test_bos_with_the_id_zero(tmp_path: Path) -> None:
    """SAELens #724: ``if bos_token_id`` was false for the id 0, and its rows were left out."""
    schedule = simulate(8, seed=5, cache=False)
    token = schedule.rows["token_id"].to_numpy().copy()
    token[token == 1] = 0  # a tokenizer whose BOS is 0
    at = schedule.rows.column_names.index("token_id")
    field = schedule.rows.schema.field(at)
    renamed = schedule.with_(rows=schedule.rows.set_column(at, field, pa.array(token, field.type)))
    assert (token == 0).sum() > 4
    path = make_dataset(tmp_path / "acts", schedule=without(renamed, token == 0), sealed=False)
    assert "E406" in found(path, "standard")
    caught("BOS with id 0 dropped", "E406")


def test_a_mask_of_bos_by_column_under_left_padding(tmp_path: Path) -> None:
    """dictionary_learning #44: the mask took column 0, where shorter texts have padding."""
    schedule = simulate(8, seed=6, cache=False)
    longest = max(request["prompt_len"] for request in schedule.requests.to_pylist())
    pad = {r["request"]: longest - r["prompt_len"] for r in schedule.requests.to_pylist()}
    rows = schedule.rows.to_pylist()
    for row in rows:
        row["flags"] = 3 if row["position"] + pad[row["request"]] == 0 else 0
    flagged = schedule.with_(rows=pa.Table.from_pylist(rows, tables.SCHEMAS["tokens"]))
    path = make_dataset(tmp_path / "acts", schedule=flagged)
    # The harm: whoever leaves BOS out by the mask trains on it.
    loader = actds.Loader(path, "resid_post.0", batch=64, exclude="bos", provenance=["token_id"])
    kept = np.concatenate([np.asarray(labels["token_id"]) for _, labels in loader])
    assert (kept == 1).any()
    assert found(path, "standard") == {"E414"}
    caught("BOS mask under left padding", "E414")


# ---- files


def test_unshuffled_though_it_says_shuffled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SAELens #612: the rows on disk were in the order of their texts."""
    monkeypatch.setattr(actds.dataset.commit, "row_order", lambda n, seed: np.arange(n))
    path = make_dataset(tmp_path / "acts", n_requests=12, rows_per_shard=1000)
    assert found(path, "standard") == {"E415"}
    caught("unshuffled though claimed", "E415")


def test_a_resumed_run_that_rewrites_finished_files(tmp_path: Path) -> None:
    """Model-Optimizer #2080: a resumed dump wrote files again that were finished."""
    path = make_dataset(tmp_path / "acts", n_requests=12, seed=1)
    file = next(iter(sorted(path.glob("shards/*/acts.zarr/resid_post.1/c/0/0"))))
    again = file.read_bytes()
    with pytest.raises(ActdsError, match="E309"):
        LocalStore(path).put_new(file.relative_to(path).as_posix(), [again])
    # A writer that does not go through the store: other rows, the same length.
    rewritten = bytearray(again)
    rewritten[64:80] = bytes(16)
    file.write_bytes(rewritten)
    assert found(path, "full") == {"E202"}
    caught("finished files rewritten", "E202", "E309")


def test_a_table_without_a_footer(tmp_path: Path) -> None:
    """lerobot #3522: after a crash a Parquet file had no footer, and the rest was lost with it."""
    path = make_dataset(tmp_path / "acts", n_requests=12, seed=1)
    # Never committed: a leftover of the crash, which nothing reads.
    stray = path / "shards" / "s-crashed" / "tokens.parquet"
    stray.parent.mkdir()
    table = next(iter(sorted(path.glob("shards/r-*/tokens.parquet"))))
    stray.write_bytes(table.read_bytes()[:-8])
    assert found(path, "deep") == set()
    shutil.rmtree(stray.parent)
    # Committed, and cut afterwards; or committed by a writer that never closed the file.
    whole = table.read_bytes()
    table.write_bytes(whole[:-8])
    assert "E201" in found(path, "quick")
    rehash(table.parent / "shard.json")
    relink(path)
    assert "E206" in found(path, "standard")
    caught("Parquet without a footer", "E201", "E206")


@pytest.mark.standard
def test_the_guide_lists_every_failure_with_its_codes() -> None:
    """Runs last: the table says what the tests of this file have seen."""
    text = (DOCS / "gate.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| ((?:E\d{3}(?:, )?)+) \|$", text, re.M)
    listed = {name: set(codes.split(", ")) for name, codes in rows}
    seen = {name: codes for name, codes in CAUGHT.items() if name in listed}
    assert len(listed) == 14 and CAUGHT.keys() <= listed.keys()
    assert seen.items() <= listed.items()
