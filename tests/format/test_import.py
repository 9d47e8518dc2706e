"""Imports: values keep their bits, what nobody said stays unknown, nothing is left by halves."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import actds
import actds.publish.sealing
from actds.cli import cli
from actds.errors import ActdsError, NoProvenanceError
from actds.exchange import importing
from actds.exchange.containers import read_header
from actds.format.schema import REQUIRED_PROVENANCE
from actds_testing.schedules import busy_shares, simulate
from actds_testing.synthetic import make_dataset, make_thinned

TWO = ("resid_post.3", "resid_post.7")
SILENT = ["attempt", "chunk", "flags", "phase", "step"]
LENGTHS = (5, 1, 9, 12)


def opened(path: Path) -> actds.Dataset:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dataset = actds.open(path, i_accept_unsealed=True, i_accept_unprovenanced=True)
    assert ["E306" in str(told[0].message), "E403" in str(told[1].message)] == [True, True]
    return dataset


def rows_of(path: Path, hook: str) -> tuple[list[tuple[int, int]], torch.Tensor, list[Any]]:
    """Return request and position, values and token ids of an imported set, in order."""
    dataset = opened(path)
    table = dataset.tokens(hook)
    order = np.lexsort((table["position"].to_numpy(), table["request"].to_numpy()))
    lines = table.take(order).to_pylist()
    keys = [(line["request"], line["position"]) for line in lines]
    return keys, dataset.array(hook).torch(order), [line["token_id"] for line in lines]


def hidden_states(folder: Path, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Write files as vLLM's hidden states connector and speculators do; return their states."""
    folder.mkdir()
    made = []
    for n, length in enumerate(LENGTHS):
        states = torch.randn(length, 2, 8, generator=torch.manual_seed(n)).to(dtype)
        ids = torch.arange(length) + 100 * n
        # A number of two digits, which no order of letters has in its place.
        name = folder / f"hs_{n * 5}.safetensors"
        save_file({"hidden_states": states, "token_ids": ids}, name)
        (folder / f"{name.name}.lock").touch()
        made.append(states)
    return made


def stacked(made: list[torch.Tensor], hook: int) -> torch.Tensor:
    return torch.cat([states[:, hook] for states in made])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)


KEYS = [(request, position) for request, n in enumerate(LENGTHS) for position in range(n)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_hidden_states_of_vllm_and_speculators(tmp_path: Path, dtype: torch.dtype) -> None:
    made = hidden_states(tmp_path / "set", dtype)
    done = actds.import_foreign(tmp_path / "set", tmp_path / "acts", hooks=TWO)
    assert (done.kind, done.n_rows, done.n_sequences) == ("safetensors", 27, 4)
    assert done.unknown == SILENT
    for n, hook in enumerate(TWO):
        keys, values, tokens = rows_of(tmp_path / "acts", hook)
        assert keys == KEYS and tokens == [100 * r + p for r, p in KEYS]
        assert values.dtype == dtype and torch.equal(bits(values), bits(stacked(made, n)))


@pytest.mark.parametrize("form", ["list", "stack", "one"])
def test_samples_of_torch_with_their_tokens(tmp_path: Path, form: str) -> None:
    made = hidden_states(tmp_path / "other")
    (tmp_path / "set").mkdir()
    for n, states in enumerate(made):
        parts: Any = {"list": list(states.unbind(1)), "stack": states, "one": states[:, 0]}[form]
        sample = {"input_ids": torch.arange(len(states)), "hidden_states": parts,
                  "loss_mask": torch.ones(len(states))}  # fmt: skip
        torch.save(sample, tmp_path / "set" / f"data_{n}.pt")
    hooks = TWO[:1] if form == "one" else TWO
    done = actds.import_foreign(tmp_path / "set", tmp_path / "acts", hooks=hooks)
    assert (done.unknown, done.left_out) == (SILENT, ["loss_mask"])
    for n, hook in enumerate(hooks):
        keys, values, tokens = rows_of(tmp_path / "acts", hook)
        assert keys == KEYS and tokens == [position for _, position in KEYS]
        assert torch.equal(bits(values), bits(stacked(made, n)))


@pytest.mark.parametrize("kind", ["pt", "npy"])
@pytest.mark.parametrize("shape", [(30, 8), (3, 10, 8)])
def test_bare_arrays_say_nothing_but_their_values(
    tmp_path: Path, kind: str, shape: tuple[int, ...]
) -> None:
    values = torch.randn(shape, generator=torch.manual_seed(0))
    if kind == "pt":
        torch.save(values, tmp_path / "rows.pt")
    else:
        np.save(tmp_path / "rows.npy", values.numpy())
    done = actds.import_foreign(tmp_path / f"rows.{kind}", tmp_path / "acts", hooks="resid_post.4")
    expected = {*SILENT, "token_id", "position"} | ({"request"} if kind + str(len(shape)) == "npy2"
                                                     else set())  # fmt: skip
    assert set(done.unknown) == expected
    assert done.n_sequences == (1 if len(shape) == 2 else 3)
    _, got, tokens = rows_of(tmp_path / "acts", "resid_post.4")
    assert torch.equal(got, values.reshape(-1, 8)) and set(tokens) == {None}


def test_bfloat16_in_numpy_needs_its_name(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(3, 8).astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "resid_post.4.npy", values)
    with pytest.raises(ActdsError, match=r'E019 .*dtype="bfloat16"'):
        actds.import_foreign(tmp_path / "resid_post.4.npy", tmp_path / "acts")
    source = tmp_path / "resid_post.4.npy"
    actds.import_foreign(source, tmp_path / "acts", dtype="bfloat16")
    got = rows_of(tmp_path / "acts", "resid_post.4")[1]
    assert got.dtype == torch.bfloat16 and got.float().numpy().tolist() == values.tolist()


@pytest.mark.parametrize("to", ["safetensors", "memmap", "sae-lens"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_there_and_back_is_the_same(tmp_path: Path, to: Any, dtype: Any) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=15, seed=1, rows_per_shard=30, dtype=dtype)
    size = 8 if to == "sae-lens" else 1
    record = actds.export(path, tmp_path / "files", to=to, context_size=size)
    options: dict[str, Any] = {
        "safetensors": {"hooks": ["resid_post.0", "resid_post.1"]},
        "memmap": {"dtype": "bfloat16"},
        "sae-lens": {},
    }[to]
    done = actds.import_foreign(tmp_path / "files", tmp_path / "back", **options)
    assert done.n_rows == record.n_rows and done.hooks == ["resid_post.0", "resid_post.1"]
    before = actds.open(path)
    table = before.tokens()
    order = np.lexsort((table["position"].to_numpy(), table["request"].to_numpy()))
    for hook in before.hooks:
        keys, values, tokens = rows_of(tmp_path / "back", hook)
        want = before.array(hook).torch(order)[: len(values)]
        same = want.float() if (to, dtype) == ("sae-lens", "bfloat16") else want
        assert values.dtype == same.dtype and torch.equal(bits(values), bits(same))
        if to == "safetensors":
            assert [p for _, p in keys] == table["position"].to_numpy()[order].tolist()
        if to != "memmap":
            assert tokens == table["token_id"].to_numpy()[order].tolist()[: len(tokens)]
    (run,) = opened(tmp_path / "back").runs.values()
    field = run.fields["import.dataset_digest"]
    assert (field.value, field.origin) == (before.digest, "declared")
    # What SAELens takes as a context is here a window of any requests.
    assert ("request" in done.unknown) == (to != "safetensors")


def test_everything_else_is_marked_unknown(tmp_path: Path) -> None:
    hidden_states(tmp_path / "set")
    said: dict[str, Any] = {"model.name": "Qwen3-8B", "model.n_layers": 36}
    actds.import_foreign(tmp_path / "set", tmp_path / "acts", hooks=TWO, declare=said)
    (run,) = opened(tmp_path / "acts").runs.values()
    known = {n: f for n, f in run.fields.items() if f.origin != "unknown"}
    assert {n for n in known if n in REQUIRED_PROVENANCE} == {*said, "capture.order"}
    assert {n: known[n].value for n in said} == said
    assert {known[n].origin for n in said} == {"declared"}
    for name in REQUIRED_PROVENANCE.keys() - known.keys():
        assert run.fields[name].value is None and "does not say" in str(run.fields[name].reason)
    assert known["import.hooks"].origin == "declared"
    assert known["import.source"].value == "set" and known["import.n_files"].value == 4


def test_it_is_sealed_as_imported_and_as_nothing_else(tmp_path: Path) -> None:
    made = hidden_states(tmp_path / "set")
    path = tmp_path / "acts"
    actds.import_foreign(tmp_path / "set", path, hooks=TWO)
    run = partial(CliRunner().invoke, cli, prog_name="actds")
    assert run(["seal", str(path)]).exit_code == 3
    assert run(["seal", str(path), "--imported"]).exit_code == 0
    sealed = json.loads((path / "seal" / "0001.json").read_bytes())
    assert sealed["totals"] == {name: 27 if name == "rows" else 0 for name in sealed["totals"]}
    # Everybody who is not told otherwise refuses it as before.
    assert [finding.code for finding in actds.validate(path, "deep").errors] == ["E403"]
    for call in (actds.open, actds.require, actds.view, actds.audit):
        with pytest.raises(ActdsError, match=r"E403|E701"):
            call(path)
    assert run(["validate", str(path)]).exit_code == 1
    # By name it is accepted: by a policy, and by arguments.
    policy = tmp_path / "policy.toml"
    policy.write_text("[provenance]\nimported = true\n")
    done = run(["validate", str(path), "--policy", str(policy)])
    assert done.exit_code == 0 and "E403" in done.output
    with pytest.warns(UserWarning, match="E403"):
        dataset = actds.require(path, policy=policy)
    assert dataset.seal is not None and dataset.n_rows == 27
    with pytest.warns(UserWarning, match="E403"):
        page = actds.view(path, i_accept_unprovenanced=True, stats=True).html
    assert all(hook in page for hook in TWO)
    with pytest.warns(UserWarning, match="E403"):
        done = run(["view", str(path), "--imported", "--out", str(tmp_path / "view.html")])
        assert done.exit_code == 0, done.output
    with pytest.warns(UserWarning, match="E403"):
        done = run(["export", str(path), str(tmp_path / "files"), "--to", "memmap", "--imported"])
        assert done.exit_code == 0, done.output
    for n, hook in enumerate(TWO):
        values = np.load(tmp_path / "files" / f"{hook}.npy").view(ml_dtypes.bfloat16)
        assert values.astype("f4").tolist() == stacked(made, n).float().tolist()


def test_a_harvest_without_its_census_is_no_import(copy_dataset: Callable[[], Path]) -> None:
    path = copy_dataset()
    shutil.rmtree(path / "seal")
    for chain in (path / "ledger").iterdir():
        if b'"kind":"census"' in (chain / "00000000.json").read_bytes():
            shutil.rmtree(chain)
    with pytest.raises(ActdsError, match="E403"):
        actds.publish.sealing.seal(path, imported=True)


def test_it_is_never_sealed_nor_taken_for_valid(tmp_path: Path) -> None:
    hidden_states(tmp_path / "set")
    path = tmp_path / "acts"
    actds.import_foreign(tmp_path / "set", path, hooks=TWO)
    codes = [finding.code for finding in actds.validate(path).errors]
    assert codes == ["E306", "E403"]
    with pytest.raises(NoProvenanceError, match="E403"):
        actds.seal(path)
    assert not (path / "seal").exists()
    with pytest.raises(ActdsError, match="E306"):
        actds.open(path)
    with pytest.warns(UserWarning, match="E306"), pytest.raises(ActdsError, match="E403"):
        actds.open(path, i_accept_unsealed=True)
    assert "Rows: 27 (27 unknown)" in CliRunner().invoke(cli, ["info", str(path)]).output


def _rows(loader: Callable[..., actds.Loader], split: str, share: float) -> int:
    """Return the rows of a part of a split, 0 where it is refused as empty."""
    try:
        return loader(split=split, held_out=share).n_rows
    except ActdsError as error:
        assert error.code == "E014" and "no request in" in str(error)
        return 0


def test_readers_make_nothing_of_unknown_columns(tmp_path: Path) -> None:
    hidden_states(tmp_path / "set")
    actds.import_foreign(tmp_path / "set", tmp_path / "acts", hooks=TWO)
    dataset = opened(tmp_path / "acts")
    table = dataset.tokens()
    assert all(table[name].null_count == 27 for name in SILENT)
    assert dataset.phases == ()

    def loader(**options: Any) -> actds.Loader:
        return actds.Loader(dataset, TWO[0], batch=1, **options)

    assert loader().n_rows == 27 and loader(where="position > 4").n_rows == 11
    # A comparison with what is unknown is unknown; it can be asked for.
    for where in ("step == 0", "phase == 'prefill'", "not special", "request.prompt_len >= 0"):
        with pytest.raises(ActdsError, match=r"E014 where: .*true for no row"):
            loader(where=where)
    assert loader(where="step is None and phase is None and request == 1").n_rows == 1
    assert loader(exclude="first_position").n_rows == 23
    refused: list[dict[str, Any]] = [
        {"phase": "prefill"}, {"exclude": "bos"}, {"provenance": True}, {"weights": "multiplicity"},
    ]  # fmt: skip
    for options in refused:
        with pytest.raises(ActdsError, match=r"E014 \w+: .*(unknown in run|is unknown)"):
            loader(**options)
    # Which of the four requests a share holds out is chance: some share divides them.
    parts = [[_rows(loader, s, k / 64) for s in ("train", "held_out")] for k in range(1, 64)]
    assert all(sum(rows) == 27 for rows in parts) and any(all(rows) for rows in parts)
    with loader() as batches:
        seen = torch.cat(list(batches))
    every = dataset.array(TWO[0]).torch()
    assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, every.tolist()))


def test_hugging_face_gets_the_columns_that_are_known(tmp_path: Path) -> None:
    hidden_states(tmp_path / "set")
    actds.import_foreign(tmp_path / "set", tmp_path / "acts", hooks=TWO)
    options: dict[str, Any] = {
        "streaming": True, "hooks": TWO[0], "i_accept_unsealed": True,
        "i_accept_unprovenanced": True,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (first, *_) = actds.load_dataset(tmp_path / "acts", **options)
        with pytest.raises(ActdsError, match="E014 columns: step unknown in run"):
            actds.load_dataset(tmp_path / "acts", columns=["step"], **options)
    assert set(first) == {TWO[0], "run", "request", "position", "token_id"}


def test_shards_of_any_size_hold_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hidden_states(tmp_path / "set")
    monkeypatch.setattr(importing, "BLOCK_NBYTES", 2 * 2 * 8 * 4)  # four rows
    seen: list[int] = []
    actds.import_foreign(tmp_path / "set", tmp_path / "acts", hooks=TWO, progress=seen.append)
    shards = opened(tmp_path / "acts").shards
    assert max(shard.n_rows for shard in shards) == 4
    assert seen == np.cumsum([shard.n_rows for shard in shards]).tolist()
    assert len({shard.manifest.permutation_seed for shard in shards}) == len(shards)
    keys, values, _ = rows_of(tmp_path / "acts", TWO[1])
    assert keys == KEYS and torch.equal(bits(values), bits(stacked(made, 1)))
    codes = [finding.code for finding in actds.validate(tmp_path / "acts").errors]
    assert codes == ["E306", "E403"]


@pytest.mark.parametrize("to", ["memmap", "safetensors", "sae-lens"])
def test_rows_of_an_export_that_were_drawn_keep_their_inclusion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    schedule = simulate(20, 3)
    source = make_thinned(tmp_path / "a", schedule, busy_shares(schedule), hooks=TWO[:1])
    size = {"context_size": 8} if to == "sae-lens" else {}
    record = actds.export(source, tmp_path / "set", to=to, **size)
    assert record.drawn
    monkeypatch.setattr(importing, "BLOCK_NBYTES", 2 * 16 * 20)  # several shards
    named: dict[str, Any] = {"hooks": TWO[0], "dtype": "bfloat16" if to == "memmap" else None}
    actds.import_foreign(tmp_path / "set", tmp_path / "acts", **named)
    # Row i of the table is of row i of the files, and of a request rows come in its order.
    expected = pq.read_table(tmp_path / "set" / "rows.parquet")["inclusion"].to_numpy()
    dataset = opened(tmp_path / "acts")
    tokens = dataset.tokens(TWO[0], columns=["request", "position", "inclusion"])
    order = np.lexsort((tokens["position"].to_numpy(), tokens["request"].to_numpy()))
    assert tokens["inclusion"].to_numpy()[order].tolist() == expected.tolist()
    assert {*expected} == {0.25, 1.0} and len(dataset.shards) > 1
    values = torch.from_numpy(dataset.array(TWO[0])[order].astype(np.float32))
    stored = actds.open(source)
    keys = ("position", "request")
    of_source = stored.tokens(TWO[0], columns=[*keys, "inclusion"])
    order = np.lexsort(tuple(of_source[name].to_numpy() for name in keys))[: len(values)]
    assert of_source["inclusion"].to_numpy()[order].tolist() == expected.tolist()
    assert torch.equal(values, torch.from_numpy(stored.array(TWO[0])[order].astype(np.float32)))
    accept = {"i_accept_unsealed": True, "i_accept_unprovenanced": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with actds.Loader(tmp_path / "acts", TWO[0], batch=8, weights="inclusion", **accept) as w:
            weights = np.concatenate([rows["weight"] for _, rows in w])
    assert {*weights.tolist()} == {4.0, 1.0} and w.sample.least == 0.25
    shown = CliRunner().invoke(cli, ["info", str(tmp_path / "acts")])
    assert "a sample, as its set says" in shown.output

    shutil.rmtree(tmp_path / "acts")
    part = next(iter(sorted((tmp_path / "set").glob("hs_*"))), None)
    if part is not None:
        refused(tmp_path, r"E019 .*rows, and inclusion of .*all files", part, **named)
    (tmp_path / "set" / "rows.parquet").unlink()
    refused(tmp_path, r"E019 .*rows\.parquet: no such file; expected the inclusion", **named)


def refused(tmp_path: Path, words: str, source: Path | None = None, **options: Any) -> None:
    """Check that an import is refused in these words, and that it leaves nothing."""
    before = {one.name for one in tmp_path.iterdir()}
    with pytest.raises(ActdsError, match=words):
        actds.import_foreign(source or tmp_path / "set", tmp_path / "acts", **options)
    assert {one.name for one in tmp_path.iterdir()} == before


@pytest.mark.parametrize("nbytes", [1, 300, 10**6])
@pytest.mark.parametrize("kind", ["safetensors", "pt", "npy", "sae-lens"])
def test_a_truncated_file_is_refused(tmp_path: Path, kind: str, nbytes: int) -> None:
    made = hidden_states(tmp_path / "other")
    if kind == "safetensors":
        (tmp_path / "other").rename(tmp_path / "set")
        file = tmp_path / "set" / "hs_10.safetensors"
    elif kind == "sae-lens":
        path = make_dataset(tmp_path / "made", n_requests=10)
        actds.export(path, tmp_path / "set", to="sae-lens", context_size=4)
        file = tmp_path / "set" / "data-00000-of-00001.arrow"
    else:
        (tmp_path / "set").mkdir()
        file = tmp_path / "set" / f"resid_post.1.{kind}"
        if kind == "pt":
            torch.save(made[0], file)
        else:
            np.save(file, made[0].float().numpy())
    file.write_bytes(file.read_bytes()[:-nbytes])
    refused(tmp_path, f"E019 .*{file.name}", hooks=None if kind == "sae-lens" else TWO)


def test_mixed_widths_and_types_are_refused(tmp_path: Path) -> None:
    hidden_states(tmp_path / "set")
    file = tmp_path / "set" / "hs_99.safetensors"
    ids = torch.arange(3)
    save_file({"hidden_states": torch.zeros(3, 2, 9).bfloat16(), "token_ids": ids}, file)
    refused(tmp_path, "E019 .*hs_99.*bfloat16 rows of 9.*expected .*rows of 8", hooks=TWO)
    save_file({"hidden_states": torch.zeros(3, 2, 8), "token_ids": ids}, file)
    refused(tmp_path, "E019 .*hs_99.*float32 rows of 8.*expected bfloat16", hooks=TWO)
    save_file({"hidden_states": torch.zeros(3, 3, 8).bfloat16(), "token_ids": ids}, file)
    refused(tmp_path, "E019 .*hs_99", hooks=TWO)
    (tmp_path / "npy").mkdir()
    for n in range(2):
        np.save(tmp_path / "npy" / f"resid_post.{n}.npy", np.zeros((3 + n, 4), np.float32))
    refused(tmp_path, r"E019 .*resid_post.1.*\(4, 4\)", source=tmp_path / "npy")


STATES = torch.zeros(3, 2, 8)


@pytest.mark.parametrize(
    ("words", "tensors"),
    [
        ("tensors embedding int64", {"embedding": STATES.long()}),
        ("hidden_states of shape", {"hidden_states": STATES[0, 0]}),
        ("values of float64", {"hidden_states": STATES.double()}),
        ("values of F8_E4M3", {"hidden_states": STATES.to(torch.float8_e4m3fn)}),
        ("one per row", {"hidden_states": STATES, "token_ids": torch.arange(4)}),
        ("one per row", {"hidden_states": STATES, "token_ids": torch.zeros(3)}),
        ("below 2", {"hidden_states": STATES, "token_ids": torch.tensor([0, -1, 2])}),
        ("ascend", {"hidden_states": STATES, "positions": torch.tensor([0, 2, 2])}),
        ("no row", {"hidden_states": STATES[:0]}),
    ],
)
def test_tensors_of_another_form_are_refused(
    tmp_path: Path, words: str, tensors: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "set").mkdir()
    save_file(tensors, tmp_path / "set" / "hs_0.safetensors")
    refused(tmp_path, f"E019 .*{words}", hooks=TWO)


def test_tokens_of_windows_that_no_column_can_hold_are_refused(tmp_path: Path) -> None:
    """They were cut to 32 bits in silence."""
    features = datasets.Features(
        {
            "blocks.3.hook_resid_post": datasets.Array2D((4, 8), "float32"),
            "token_ids": datasets.List(datasets.Value("int64"), 4),
        }
    )
    rows = {"blocks.3.hook_resid_post": np.zeros((2, 4, 8), "f4")}
    values = rows | {"token_ids": np.full((2, 4), 2**32 + 5)}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(values, features=features).save_to_disk(str(tmp_path / "set"))
    refused(tmp_path, "E019 .*token_ids to 4294967301; expected numbers from 0 below 2", hooks=None)


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
     b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
     b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}', b"[" * 9999],
)  # fmt: skip
def test_a_hostile_header_is_refused(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    with pytest.raises(ActdsError, match="E019"):
        read_header(file)
    file.write_bytes((2**63).to_bytes(8, "little") + header)
    with pytest.raises(ActdsError, match="E019"):
        read_header(file)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "run",))

    (tmp_path / "set").mkdir()
    torch.save({"hidden_states": Trap()}, tmp_path / "set" / "data_0.pt")
    refused(tmp_path, "E019 .*data_0.pt", hooks=TWO)


def test_hooks_that_nobody_names_are_asked_for(tmp_path: Path) -> None:
    hidden_states(tmp_path / "set")
    refused(tmp_path, r'E007 .*a hook without a name(.|\n)*hooks="KIND.LAYER"')
    refused(tmp_path, "E007 .*1 names; expected 2 hooks", hooks="resid_post.1")
    refused(tmp_path, "E007 .*'pattern.1'", hooks=("resid_post.1", "pattern.1"))
    refused(tmp_path, "E007", hooks=("resid_post.1", "resid_post.1"))
    refused(tmp_path, "E007", hooks=("resid_post.1", "resid_post.01"))
    refused(tmp_path, "E009 declare", hooks=TWO, declare={"model.colour": "red"})
    refused(tmp_path, "E009 declare", hooks=TWO, declare={"model.name": 0.5})


def test_names_that_no_document_holds_are_written_another_way(tmp_path: Path) -> None:
    values = torch.ones(3, 4)
    many = {f"{n}" * 9: n for n in range(3000)}
    torch.save({"acts\ud800": values, "other\udcff": torch.ones(3), **many}, tmp_path / "a.pt")
    done = actds.import_foreign(tmp_path / "a.pt", tmp_path / "acts", hooks=TWO[0])
    assert len(done.left_out) == 1001 and done.left_out[-1] == "and 2001 more"
    assert [finding.code for finding in actds.validate(tmp_path / "acts").errors] == [
        "E306",
        "E403",
    ]
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.npy"))
    with path.open("wb") as file:
        np.save(file, values.numpy())
    actds.import_foreign(path, tmp_path / "more", hooks=TWO[0])
    (run,) = opened(tmp_path / "more").runs.values()
    assert run.fields["import.source"].value == "\\udcff.npy"


def test_more_than_a_dataset_may_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for n in range(4097):
        np.save(tmp_path / "set" / f"resid_post.{n}.npy", np.ones((1, 1), np.float32))
    refused(tmp_path, "E019 .*4097 hooks")
    for width in (0, 2**20 + 1):
        torch.save({"acts": torch.ones(1, width)}, tmp_path / "a.pt")
        refused(tmp_path, "E019 .*channels", source=tmp_path / "a.pt", hooks=TWO[0])


def test_what_is_no_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    refused(tmp_path, "E019 .*no file of sae-lens, datasets, safetensors, pt, npy, npz")
    refused(tmp_path, "E019 .*no such path", source=tmp_path / "nowhere")
    refused(tmp_path, "E009 kind", kind="csv")
    np.save(tmp_path / "set" / "a.npy", np.zeros((2, 2)))
    torch.save(torch.zeros(2, 2), tmp_path / "set" / "a.pt")
    refused(tmp_path, "E019 .*files of pt and npy")
    refused(tmp_path, "E019 .*values of float64", kind="npy", hooks="resid_post.0")
    (tmp_path / "acts").mkdir()
    refused(tmp_path, "E008", kind="pt", hooks="resid_post.0")


def test_an_import_that_fails_late_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden_states(tmp_path / "set")
    commit = importing.commit_shard

    def failing(*args: Any, **options: Any) -> Any:
        if options["seed"] == 3:
            raise ActdsError("E503", "shards", got="No space left", expected="a durable write")
        return commit(*args, **options)

    monkeypatch.setattr(importing, "BLOCK_NBYTES", 128)
    monkeypatch.setattr(importing, "commit_shard", failing)
    refused(tmp_path, "E503", hooks=TWO)


def test_the_command_says_what_is_unknown(tmp_path: Path) -> None:
    def run(*args: object) -> Any:
        return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="actds")

    hidden_states(tmp_path / "set")
    names = ["--hook", TWO[0], "--hook", TWO[1], "--declare", "serving.max_num_seqs=8"]
    done = run("import", tmp_path / "set", tmp_path / "acts", *names)
    assert done.exit_code == 0, done.output
    assert "27 rows of resid_post.3, resid_post.7 in 4 sequences" in done.output
    assert f"unknown: {', '.join(SILENT)}" in done.output and "--imported" in done.output
    (run_record,) = opened(tmp_path / "acts").runs.values()
    assert run_record.fields["serving.max_num_seqs"].value == 8
    told = json.loads(run("import", tmp_path / "set", tmp_path / "b", *names, "--json").stdout)
    assert told["format"] == "actds.import" and told["unknown"] == SILENT
    assert run("import", tmp_path / "set", tmp_path / "acts", *names).exit_code == 2
    assert run("import", tmp_path / "set", tmp_path / "c", "--declare", "x").exit_code == 2


def _odd_rows() -> npt.NDArray[np.float32]:
    """Return rows of which one is not finite, one is zero, and one a copy of the one before."""
    rows = np.random.default_rng(5).standard_normal((40, 8)).astype(np.float32)
    rows[3, 2], rows[5], rows[8] = np.nan, 0, rows[7]
    return rows


def _labelled(path: Path, rows: npt.NDArray[np.float32]) -> None:
    torch.save({"acts": torch.from_numpy(rows), "labels": torch.ones(len(rows))}, path)


def _flat(path: Path, rows: npt.NDArray[np.float32]) -> None:
    save_file({"blocks.3.hook_resid_post": torch.from_numpy(rows)}, path)


def _zipped(path: Path, rows: npt.NDArray[np.float32]) -> None:
    np.savez(path, acts=rows, token_ids=np.arange(len(rows)))


def _command(*words: object) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # E403: what is imported is read all the same
        return CliRunner().invoke(cli, [str(word) for word in words], prog_name="actds")


@pytest.mark.parametrize(
    ("name", "save"), [("rows.pt", _labelled), ("rows.safetensors", _flat), ("rows.npz", _zipped)]
)
def test_every_command_has_an_answer_for_what_was_imported(
    tmp_path: Path, name: str, save: Callable[[Path, npt.NDArray[np.float32]], None]
) -> None:
    hook, rows, path = "resid_post.3", _odd_rows(), tmp_path / "acts"
    save(tmp_path / name, rows)
    assert _command("import", tmp_path / name, path, "--hook", hook).exit_code == 0
    done = _command("check", path)
    assert done.exit_code == 1 and f"actds seal {path} --imported" in done.output
    assert _command("seal", path, "--imported").exit_code == 0
    # No, unless it is allowed by name, and then no for what is wrong with the rows.
    unrecorded = "nobody recorded how these rows were made"
    for words, answer in (
        ([], f"No: {unrecorded}"),
        (["--imported"], f"No: 1 of 40 rows of {hook} are not finite"),
    ):
        done = _command("check", path, *words)
        assert done.exit_code == 1 and done.output.splitlines()[0] == f"✗ {answer}"
        facts = json.loads(_command("check", path, "--json", *words).output)
        assert (facts["answer"], facts["verdict"], facts["exit_code"]) == (answer, "FAIL", 1)
        assert facts["imported"]["hooks"] == [{
            "name": hook, "dtype": "float32", "d_model": 8, "n_rows": 40, "n_not_finite": 1,
            "n_zero": 1, "n_repeated": 1,
        }]  # fmt: skip
        lacks = {lack["missing"] for lack in facts["imported"]["lacks"]}
        assert {"positions", "a census"} <= lacks and ("token ids" in lacks) != ("npz" in name)
    for command in (["audit"], ["regimes"], ["view", "--out", tmp_path / "no.html"]):
        done = _command(command[0], path, *command[1:])
        assert done.exit_code == 3 and "E403" in done.output
        assert "actds check says" in done.output
    # A policy allows it by name; what it asks of a census nobody knows.
    allowed = {"provenance": {"imported": True}}
    asked: dict[str, Any] = {
        "audit": {"worst": "FAIL"}, "losses": {"max_dropped": 1.0}, "harvest": {"max_age_days": 1},
    }  # fmt: skip
    with pytest.warns(UserWarning, match="E403"):
        dataset = actds.require(path, policy=allowed)
    assert dataset.n_rows == 40
    for rule, values in asked.items():
        with pytest.raises(ActdsError, match=f"E701 {rule}.{next(iter(values))}"):
            actds.require(path, policy=allowed | {rule: values})
    assert "IMPORTED (E403)" in _command("info", path).output
    assert _command("view", path, "--imported", "--out", tmp_path / "v.html").exit_code == 0
    finite = np.isfinite(rows).all(axis=1)
    keywords: dict[str, Any] = {"i_accept_unprovenanced": True, "exclude": "not_finite"}
    with pytest.warns(UserWarning, match="E403"):
        stats = actds.Loader(path, hook, batch=8, **keywords).stats()[hook]
    np.testing.assert_allclose(stats.mean, rows[finite].mean(axis=0), atol=1e-6)
    with pytest.warns(UserWarning, match="E403"):
        lines = list(actds.load_dataset(path, **keywords))
    loaded = np.stack([line[hook].numpy() for line in lines])
    assert sorted(map(tuple, loaded)) == sorted(map(tuple, rows[finite]))
    words = ["--to", "memmap", "--imported", "--exclude", "not_finite"]
    assert _command("export", path, tmp_path / "files", *words).exit_code == 0
    assert np.array_equal(np.load(tmp_path / "files" / f"{hook}.npy"), rows[finite])
    # A copy is what it is a copy of, and so is what is recovered.
    assert _command("shuffle", path, tmp_path / "mixed").exit_code == 0
    again = json.loads(_command("check", tmp_path / "mixed", "--json").output)
    assert again["imported"]["hooks"] == facts["imported"]["hooks"]
    assert _command("recover", path).exit_code == 0
    assert _command("card", path).exit_code == 0
    card = (path / "README.md").read_text()
    assert "i_accept_unprovenanced=True" in card and "captured" not in card


def test_a_flawless_import_is_not_known_where_it_is_allowed(tmp_path: Path) -> None:
    rows = np.random.default_rng(6).standard_normal((20, 8)).astype(np.float32)
    np.save(tmp_path / "resid_post.2.npy", rows)
    actds.import_foreign(tmp_path / "resid_post.2.npy", tmp_path / "acts")
    actds.publish.sealing.seal(tmp_path / "acts", imported=True)
    done = _command("check", tmp_path / "acts", "--imported")
    assert done.exit_code == 0 and done.output.startswith("? Not known: nobody recorded")
    assert "every row is finite" in done.output
    assert _command("check", tmp_path / "acts", "--imported", "--strict").exit_code == 1
    page = tmp_path / "index.html"
    both = [tmp_path / "acts", tmp_path / "acts", "--html", page]
    assert _command("check", *both, "--imported").exit_code == 0
    assert "2 not known" in page.read_text().lower()
    assert _command("check", *both).exit_code == 1 and "2 no" in page.read_text().lower()
