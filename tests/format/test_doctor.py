"""The doctor: it names what foreign sets hold and lack, runs nothing of them and writes nothing."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

import actds
from actds.cli import cli
from actds.errors import ActdsError
from actds_testing.synthetic import make_dataset

datasets = pytest.importorskip("datasets")
LINUX = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(),
    reason="no limit of memory where no process says its size",
)


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="actds")


def lacks(path: Path) -> dict[str, str]:
    [found] = actds.doctor(path).sets
    return {one.missing: one.unknowable for one in found.lacks}


def hidden_states(folder: Path) -> Path:
    """As vLLM's ``ExampleHiddenStatesConnector`` and speculators write them."""
    folder.mkdir()
    for n, length in enumerate((5, 3, 9)):
        ids = torch.arange(length)
        states = torch.randn(length, 2, 8).bfloat16()
        save_file({"hidden_states": states, "token_ids": ids}, folder / f"hs_{n}.safetensors")
    return folder


def samples(folder: Path) -> Path:
    """As speculators' offline data generation saves them."""
    folder.mkdir()
    for n, length in enumerate((5, 3)):
        states = [torch.randn(length, 8) for _ in range(3)]
        mask = torch.ones(length)
        one = {"input_ids": torch.arange(length), "hidden_states": states, "loss_mask": mask}
        torch.save(one, folder / f"data_{n}.pt")
    return folder


def windows(folder: Path) -> Path:
    """As SAELens' cached activations."""
    features = datasets.Features(
        {
            "blocks.3.hook_resid_post": datasets.Array2D((4, 8), "float32"),
            "token_ids": datasets.List(datasets.Value("int32"), 4),
        }
    )
    values = {
        "blocks.3.hook_resid_post": np.random.default_rng(0).normal(size=(6, 4, 8)).astype("f4"),
        "token_ids": np.zeros((6, 4), "i4"),
    }
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(values, features=features).save_to_disk(str(folder))
    return folder


def arrays(folder: Path) -> Path:
    folder.mkdir()
    for layer in (10, 20):
        np.save(folder / f"layer{layer}.npy", np.ones((7, 8), np.float16))
    return folder


SETS = {
    # What makes it; its form, rows of a hook, hooks, what it lacks, what it does not.
    "vllm": (hidden_states, "safetensors", 17, 2, {"names of hooks"}, {"token ids", "positions"}),
    "speculators": (samples, "pt", 8, 3, {"names of hooks"}, {"token ids", "request ids"}),
    "sae_lens": (windows, "sae-lens", 24, 1, {"positions"}, {"token ids", "names of hooks"}),
    "npy": (arrays, "npy", 7, 2, {"token ids", "positions", "request ids"}, set()),
}


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_described_and_the_command_imports_it(name: str, tmp_path: Path) -> None:
    make, kind, n_rows, n_hooks, missing, said = SETS[name]
    path = make(tmp_path / "set")
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    report = actds.doctor(path)
    [found] = report.sets
    assert (found.kind, found.n_rows, len(found.hooks)) == (kind, n_rows, n_hooks)
    assert all(hook["d_model"] == 8 for hook in found.hooks)
    assert not found.faults and report.can_import
    assert missing | {"a drop log", "a census", "precision"} <= lacks(path).keys()
    assert not said & lacks(path).keys()
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before
    # The command is one that runs, once the places of the model are named.
    words = shlex.split(found.command or "")
    assert words[:3] == ["actds", "import", str(path)]
    words[3] = str(tmp_path / "acts")
    layers = iter(range(9))
    words = [f"resid_post.{next(layers)}" if word.startswith("KIND.") else word for word in words]
    done = run(*words[1:], "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["n_rows"] == found.n_rows
    assert actds.doctor(tmp_path / "acts").is_dataset


ROWS = torch.randn(12, 8, generator=torch.manual_seed(0))
LENGTHS = (5, 3, 4)
TEXTS = list(ROWS.split(LENGTHS))


def _saved(data: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        torch.save(data, folder / "rows.pt")
        return folder / "rows.pt"

    return make


def _flat(folder: Path) -> Path:
    tensors = {"layer_10": ROWS, "layer_20": -ROWS, "labels": torch.ones(12)}
    save_file(tensors, folder / "rows.safetensors")
    return folder / "rows.safetensors"


def _npz(folder: Path) -> Path:
    np.savez(folder / "rows.npz", acts=ROWS.numpy(), tokens=np.arange(12), y=np.ones(12))
    return folder / "rows.npz"


def _npz_deflated(folder: Path) -> Path:
    np.savez_compressed(folder / "rows.npz", acts=ROWS.numpy(), y=np.ones(12))
    return folder / "rows.npz"


def _memmap(folder: Path) -> Path:
    array = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.float32, (12, 8))
    array[:] = ROWS.numpy()
    array.flush()
    return folder / "rows.npy"


def _raw(folder: Path) -> Path:
    array = np.memmap(folder / "rows.dat", np.float32, "w+", shape=(12, 8))
    array[:] = ROWS.numpy()
    array.flush()
    return folder / "rows.dat"


def _lists(values: Callable[[torch.Tensor], Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        datasets.disable_progress_bars()
        lines = {"acts": values(ROWS), "text": [str(n) for n in range(len(values(ROWS)))]}
        datasets.Dataset.from_dict(lines).save_to_disk(str(folder / "saved"))
        return folder / "saved"

    return make


CACHE = {
    "blocks.10.hook_resid_post": ROWS.view(3, 4, 8),
    "blocks.10.attn.hook_z": -ROWS.view(3, 4, 2, 4),
    "blocks.10.attn.hook_pattern": torch.rand(3, 2, 4, 4),
    "blocks.10.ln1.hook_scale": torch.rand(3, 4, 1),
}
"""A ``dict(cache)`` of TransformerLens: batch, position, and head where there are heads."""
HANDMADE: dict[str, tuple[Callable[[Path], Path], list[str], list[int], list[str]]] = {
    # What makes it, what its hooks are, signs of their rows, what is left out.
    "pt acts and labels": (_saved({"acts": ROWS, "labels": torch.ones(12)}), ["resid_post.10"],
                           [1], ["labels"]),
    "pt by layer": (_saved({"layer_10": ROWS, "layer_20": -ROWS}),
                    ["resid_post.10", "resid_post.20"], [1, -1], []),
    "pt list of texts": (_saved(TEXTS), ["resid_post.10"], [1], []),
    "pt list of rows": (_saved(list(ROWS)), ["resid_post.10"], [1], []),
    "pt lists by layer": (_saved({"layer_10": TEXTS, "layer_20": [-one for one in TEXTS]}),
                          ["resid_post.10", "resid_post.20"], [1, -1], []),
    "pt hidden states by layer": (_saved((ROWS.view(3, 4, 8), -ROWS.view(3, 4, 8))),
                                  ["resid_post.0", "resid_post.1"], [1, -1], []),
    "TransformerLens": (_saved(CACHE), ["resid_post.10", "z.10"], [1, -1],
                        ["blocks.10.attn.hook_pattern", "blocks.10.ln1.hook_scale"]),
    "flat safetensors": (_flat, ["resid_post.10", "resid_post.20"], [1, -1], ["labels"]),
    "npz": (_npz, ["resid_post.10"], [1], ["y"]),
    "npz deflated": (_npz_deflated, ["resid_post.10"], [1], ["y"]),
    "npy": (_memmap, ["resid_post.10"], [1], []),
    "raw": (_raw, ["resid_post.10"], [1], []),
    "datasets of rows": (_lists(lambda rows: list(rows.numpy())), ["resid_post.10"], [1], ["text"]),
    "datasets of lists of doubles": (_lists(torch.Tensor.tolist), ["resid_post.10"], [1], ["text"]),
    "datasets of texts": (_lists(lambda rows: [one.numpy() for one in rows.split(LENGTHS)]),
                          ["resid_post.10"], [1], ["text"]),
}  # fmt: skip


@pytest.mark.standard
@pytest.mark.parametrize("name", HANDMADE)
def test_the_recipe_brings_in_what_people_save(name: str, tmp_path: Path) -> None:
    make, hooks, signs, left_out = HANDMADE[name]
    path = make(tmp_path)
    [found] = actds.doctor(path, hooks=hooks).sets
    page = run("doctor", path, *(word for hook in hooks for word in ("--hook", hook))).stdout
    assert page.splitlines()[-len(found.recipe) :] == [f"  {line}" for line in found.recipe]
    # Literally, as from the page, but for what raw bytes do not say.
    script = "\n".join(found.recipe).replace("D_MODEL", "8")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    if left_out:
        assert f"left out: {', '.join(left_out)}" in done.stdout.splitlines()
    with pytest.warns(UserWarning, match="E306|E403"):
        dataset = actds.open(tmp_path / "acts", i_accept_unsealed=True, i_accept_unprovenanced=True)
    table = dataset.tokens()
    order = np.lexsort((table["position"].to_numpy(), table["request"].to_numpy()))
    for hook, sign in zip(hooks, signs, strict=True):
        assert torch.equal(dataset.array(hook).torch(order), sign * ROWS)
    if name == "npz":
        assert table["token_id"].to_numpy()[order].tolist() == list(range(12))
    if "texts" in name:
        assert np.bincount(table["request"].to_numpy()).tolist() == list(LENGTHS)


RAW = {
    # The name of a file, and what stands beside it, by its type.
    "float16": ("acts_12x8_float16.dat", "", {}),
    "bfloat16": ("acts-3x4x8.bf16.bin", "", {}),
    "float32": ("acts.bin", "acts.json", {"shape": [12, 8], "dtype": "torch.float32"}),
    "float64": ("acts_f64.mmap", "meta.json", {"d_model": 8}),
}


@pytest.mark.standard
@pytest.mark.parametrize("dtype", RAW)
def test_a_raw_file_whose_name_or_neighbour_says_its_shape_needs_nothing_by_hand(
    dtype: str, tmp_path: Path
) -> None:
    called, beside, document = RAW[dtype]
    (tmp_path / "set").mkdir()
    file = tmp_path / "set" / called
    values = ROWS.to(getattr(torch, dtype))
    file.write_bytes(values.view(torch.uint8).numpy().tobytes())
    if beside:
        file.with_name(beside).write_text(json.dumps(document))
    [found] = actds.doctor(file, hooks="resid_post.10").sets
    assert found.refused and f"{dtype} with 8 channels" in found.refused
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(
        ["bash", "-ec", "\n".join(found.recipe)], cwd=tmp_path, env=environment, check=True
    )
    with pytest.warns(UserWarning, match="E306|E403"):
        dataset = actds.open(tmp_path / "acts", i_accept_unsealed=True, i_accept_unprovenanced=True)
    table = dataset.tokens()
    order = np.lexsort((table["position"].to_numpy(), table["request"].to_numpy()))
    assert torch.equal(dataset.array("resid_post.10").torch(order).double(), values.double())


@pytest.mark.parametrize(
    ("called", "document", "lacks"),
    [
        ("rows.dat", None, "put for float32 its type and for D_MODEL the channels of a row"),
        ("rows_float16.dat", None, "put for D_MODEL the channels of a row"),
        ("rows_12x8.bin", None, ""),  # four bytes a value
        ("rows_12x7.dat", None, "put for float32 its type and for D_MODEL"),  # not of this size
        ("rows_0x0.dat", None, "put for float32 its type and for D_MODEL"),
        ("rows.dat", '{"shape": [12, -8], "dtype": 4}', "put for float32 its type and for D_MODEL"),
        ("rows.dat", "[" * 100_000, "put for float32 its type and for D_MODEL"),
        ("rows.dat", '{"shape": [1e999, "8"]}', "put for float32 its type and for D_MODEL"),
        ("rows.dat", '{"shape": [12, 8], "dtype": "<f4"}', ""),
    ],
)  # fmt: skip
def test_what_a_raw_file_does_not_say_is_asked_for_in_one_sentence(
    called: str, document: str | None, lacks: str, tmp_path: Path
) -> None:
    ROWS.float().numpy().tofile(tmp_path / called)
    if document is not None:
        (tmp_path / "rows.json").write_text(document)
    [found] = actds.doctor(tmp_path).sets
    assert found.kind == "raw" and found.refused and lacks in found.refused
    if lacks:
        assert "384 bytes are rows x channels x bytes of a value" in found.refused
    script = "\n".join(found.recipe)
    assert ("D_MODEL" in script) == ("D_MODEL" in lacks)
    assert shlex.split(found.recipe[-1])[-1] == "KIND.LAYER"


def test_a_bin_file_of_torch_stays_one(tmp_path: Path) -> None:
    for number, zipped in enumerate((True, False)):
        torch.save(
            {"resid_post.10": ROWS}, tmp_path / f"{number}.bin",
            _use_new_zipfile_serialization=zipped,
        )  # fmt: skip
    assert [one.kind for one in actds.doctor(tmp_path).sets] == ["pt"]


def test_what_is_missing_says_what_nobody_can_know(tmp_path: Path) -> None:
    told = lacks(arrays(tmp_path / "set"))
    assert "split by request" in told["request ids"] and "mixed" in told["request ids"]
    assert "BOS" in told["positions"] and "sinks" in told["positions"]
    assert "MNAR" in told["a drop log"]


def test_the_page_ends_with_the_command(tmp_path: Path) -> None:
    path = windows(tmp_path / "set")
    done = run("doctor", path)
    assert done.exit_code == 0 and done.stderr == ""
    assert "  blocks.3.hook_resid_post  float32 (6, 4, 8)" in done.stdout.splitlines()
    last = done.stdout.splitlines()[-1]
    assert last == f"  actds import {path} acts"


def test_a_bfloat16_array_without_a_name_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "resid_post.3.npy", np.zeros((4, 8), np.uint16))
    [found] = actds.doctor(tmp_path).sets
    assert found.command is not None and "--dtype bfloat16" in found.command


def test_other_forms_are_shown_but_not_imported(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict({"text": ["a", "b"], "emb": [[1.0, 2.0], [3.0]]})
    made.save_to_disk(str(tmp_path / "saved"))
    made.to_parquet(str(tmp_path / "parquet" / "train.parquet"))
    os.mkdir(tmp_path / "npz")
    np.savez(tmp_path / "npz" / "rows.npz", a=np.ones((3, 8), np.int32), b=np.ones(3))
    for name, kind in (("saved", "datasets"), ("parquet", "parquet"), ("npz", "npz")):
        report = actds.doctor(tmp_path / name)
        [found] = report.sets
        assert found.kind == kind and found.command is None and found.refused
        assert run("doctor", tmp_path / name).exit_code == 1
    shapes = {a.name: (a.dtype, a.shape) for a in actds.doctor(tmp_path / "npz").sets[0].arrays}
    assert shapes == {"a": ("int32", [3, 8]), "b": ("float64", [3])}
    assert actds.doctor(tmp_path).elsewhere == ["npz", "parquet", "saved"]


def test_mixed_kinds_get_a_command_each(tmp_path: Path) -> None:
    path = hidden_states(tmp_path / "set")
    np.save(path / "resid_post.1.npy", np.ones((3, 4), np.float32))
    commands = {one.kind: one.command or "" for one in actds.doctor(path).sets}
    assert set(commands) == {"safetensors", "npy"}
    assert all(f"--from {kind}" in words for kind, words in commands.items())


def test_what_validate_does_not_know_is_for_the_doctor(tmp_path: Path) -> None:
    told = run("validate", arrays(tmp_path / "set"))
    assert told.exit_code == 3 and "actds doctor" in told.stdout
    make_dataset(tmp_path / "acts", n_requests=2)
    assert "actds validate" in run("doctor", tmp_path / "acts").stdout


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def _hostile(folder: Path, name: str) -> None:
    """Write a file of a kind that no honest program writes."""
    header = {"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}
    text = json.dumps(header).encode()
    match name:
        case "pickle.pt":
            torch.save({"hidden_states": Trap(folder / "run")}, folder / name)
        case "bare.pt":
            (folder / name).write_bytes(pickle.dumps(Trap(folder / "run")))
        case "object.npy":
            np.save(folder / name, np.array([Trap(folder / "run")], object), allow_pickle=True)
        case "object.npz":
            np.savez(folder / name, a=np.array([Trap(folder / "run")], object))
        case "long.npy":
            head = b"{'descr':'<f4','fortran_order':False,'shape':(" + b"9," * 40_000 + b")}"
            size = len(head).to_bytes(4, "little")
            (folder / name).write_bytes(b"\x93NUMPY\x02\x00" + size + head)
        case "cut.npy":
            np.save(folder / name, np.ones((100, 8)))
            os.truncate(folder / name, 300)
        case "cut.safetensors":
            (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
        case "huge.safetensors":
            (folder / name).write_bytes((2**62).to_bytes(8, "little") + text)
        case "deep.safetensors":
            deep = b"[" * 50_000
            (folder / name).write_bytes(len(deep).to_bytes(8, "little") + deep)
        case "bomb.npz":
            with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("a.npy", b"\0" * 50_000_000)
        case "strides.pt":  # 400 GB of four bytes
            torch.save({"acts": torch.zeros(1).expand(100_000, 1_000_000)}, folder / name)
        case "deflated.npz":  # 500 MB of zeros that say that they are as many
            with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
                head = np.lib.format.magic(1, 0)
                text = b"{'descr':'<f4','fortran_order':False,'shape':(125000,1000),}\n"
                with archive.open("acts.npy", "w", force_zip64=True) as member:
                    member.write(head + len(text).to_bytes(2, "little") + text)
                    for _ in range(5):
                        member.write(bytes(100_000_000))
        case "twice.safetensors":
            one = b'"a":{"dtype":"F32","shape":[2,8],"data_offsets":[0,64]}'
            twice = b"{" + one + b"," + one + b"}"
            (folder / name).write_bytes(len(twice).to_bytes(8, "little") + twice + bytes(64))
        case "shared.safetensors":
            entry = {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]}
            shared = json.dumps({"a": entry, "b": entry}).encode()
            (folder / name).write_bytes(len(shared).to_bytes(8, "little") + shared + bytes(64))
        case "offsets.arrow":  # lists whose ends lie behind their values
            values = pa.array(np.arange(8, dtype=np.float32))
            ends = np.array([0, 4, 8], np.int32)
            sink = pa.BufferOutputStream()
            rows = pa.ListArray.from_arrays(ends, values)
            with pa.ipc.new_stream(sink, pa.schema([("acts", rows.type)])) as stream:
                stream.write(pa.RecordBatch.from_arrays([rows], ["acts"]))
            data, wrong = sink.getvalue().to_pybytes(), np.array([0, 4, 1_000_000], np.int32)
            assert ends.tobytes() in data
            (folder / name).write_bytes(data.replace(ends.tobytes(), wrong.tobytes()))
            state = {"_data_files": [{"filename": name}]}
            (folder / "state.json").write_text(json.dumps(state))
            (folder / "dataset_info.json").write_text('{"features":{}}')
        case "cut.arrow":
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, pa.schema([("a", pa.int64())])) as stream:
                stream.write(pa.record_batch({"a": [1, 2]}))
            (folder / name).write_bytes(sink.getvalue().to_pybytes()[:-60])
        case _:
            (folder / name).write_bytes(b"\x00\xff no such thing" * 9)


@pytest.mark.parametrize(
    "name",
    ["pickle.pt", "bare.pt", "object.npy", "object.npz", "long.npy", "cut.npy", "cut.safetensors",
     "huge.safetensors", "deep.safetensors", "bomb.npz", "cut.arrow", "noise.pt", "noise.npy",
     "noise.npz", "noise.safetensors", "noise.parquet", "noise.arrow", "strides.pt",
     "twice.safetensors", "shared.safetensors", "offsets.arrow"],
)  # fmt: skip
def test_hostile_files_are_faults_and_nothing_of_them_runs(name: str, tmp_path: Path) -> None:
    _hostile(tmp_path, name)
    done = run("doctor", tmp_path)
    assert not (tmp_path / "run").exists()
    assert done.exit_code == 1 and "Traceback" not in done.output and "E901" not in done.output
    [found] = actds.doctor(tmp_path).sets
    assert found.faults and found.faults[0].startswith("E019") and name in found.faults[0]
    assert found.command is None
    with pytest.raises(ActdsError, match="E019"):
        actds.import_foreign(tmp_path, tmp_path / "acts", hooks="resid_post.0")
    assert not (tmp_path / "acts").exists()


@pytest.mark.standard
@LINUX
def test_an_array_that_fills_the_memory_is_refused(tmp_path: Path) -> None:
    _hostile(tmp_path, "deflated.npz")
    with pytest.raises(ActdsError, match=r"E019 .*(MemoryError|takes too long|ends its parser)"):
        actds.import_foreign(tmp_path / "deflated.npz", tmp_path / "acts", hooks="resid_post.0")


@LINUX
@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "actds_export.json"])
def test_a_document_that_is_three_gigabytes_of_nothing_is_not_read(
    name: str, tmp_path: Path
) -> None:
    path = windows(tmp_path / "set")
    with (path / name).open("wb") as file:
        file.truncate(3 << 30)
    with limited(1 << 30):
        [found] = actds.doctor(path).sets
        with pytest.raises(ActdsError, match=f"E019 .*{name}"):
            actds.import_foreign(path, tmp_path / "acts")
    assert name == "actds_export.json" or found.command is None


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Let this process take no more memory than so much beside what it holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    held = int(Path("/proc/self/statm").read_text("ascii").split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (held + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_what_is_no_file_is_neither_opened_nor_waited_for(tmp_path: Path) -> None:
    for name in ("rows.npy", "rows.pt", "state.json", "dataset_info.json", "actds.json"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "zero.npy").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.npz").symlink_to(tmp_path / "nowhere")
    report = actds.doctor(tmp_path)
    assert not report.sets and not report.is_dataset and report.others == 4
    for path in (tmp_path, tmp_path / "rows.npy", Path("/dev/zero"), tmp_path / "gone.npz"):
        with pytest.raises(ActdsError, match="E019"):
            actds.import_foreign(path, tmp_path / "acts", hooks="resid_post.0")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_one_file_is_not_taken_twice(link: Callable[[Path, Path], None], tmp_path: Path) -> None:
    path = arrays(tmp_path / "set")
    link(path / "layer10.npy", path / "layer30.npy")
    hooks = ["resid_post.10", "resid_post.20", "resid_post.30"]
    with pytest.raises(ActdsError, match=r"E019 .*layer30\.npy: the same file as layer10.npy"):
        actds.import_foreign(path, tmp_path / "acts", hooks=hooks)
    saved = windows(tmp_path / "saved")
    state = json.loads((saved / "state.json").read_bytes())
    for more, words in (
        ({"_data_files": state["_data_files"] * 2}, "the same file"),
        ({"_data_files": [{"filename": "../saved/data-00000-of-00001.arrow"}]}, "no such file"),
        ({"_data_files": [{"filename": "x" * 5000}]}, "no such file"),
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "a saved selection"),
    ):
        (saved / "state.json").write_text(json.dumps({**state, **more}))
        with pytest.raises(ActdsError, match=f"E019 .*{words}"):
            actds.import_foreign(saved, tmp_path / "acts")


def test_values_are_counted_where_they_are_asked_for(tmp_path: Path) -> None:
    rows = np.ones((40, 8), np.float32)
    rows[3, 2], rows[4, 5], rows[5], rows[6, 1], rows[7, 0] = np.nan, np.inf, 0, 7e4, 3.4e38
    np.save(tmp_path / "resid_post.3.npy", rows)
    assert actds.doctor(tmp_path).sets[0].values is None
    [counts] = actds.doctor(tmp_path, values=True).sets[0].values or []
    finite = torch.from_numpy(rows[np.isfinite(rows).all(axis=1)])
    beyond = {
        name: int((~finite.to(getattr(torch, name)).isfinite()).any(dim=1).sum())
        for name in ("float16", "bfloat16")
    }
    assert (counts.hook, counts.n_rows, counts.not_finite, counts.zero) == (
        "resid_post.3",
        40,
        2,
        1,
    )
    assert counts.overflow == beyond == {"float16": 2, "bfloat16": 1}
    page = run("doctor", tmp_path, "--values").stdout
    words = "2 NaN or infinite, 1 all zeros, 2 beyond float16, 1 beyond bfloat16"
    assert f"  resid_post.3: 40 rows, {words}" in page.splitlines()
    # As at a harvest, the manifests of what is imported count the same.
    actds.import_foreign(tmp_path / "resid_post.3.npy", tmp_path / "acts")
    manifests = [json.loads(one.read_bytes()) for one in tmp_path.glob("acts/shards/*/shard.json")]
    values = {"not_finite": 2, "zero": 1, "infinite": 1}
    assert [one["values"] for one in manifests] == [{"resid_post.3": values}]
    # A type that cannot hold a value is refused, with the number of them.
    np.save(tmp_path / "resid_post.4.npy", rows.astype(np.float64) * 1e5)
    with pytest.raises(ActdsError, match=r"E019 .* values as \S+, which float16 cannot hold"):
        actds.import_foreign(tmp_path / "resid_post.4.npy", tmp_path / "more", dtype="float16")


def test_names_of_arrays_cannot_paint_the_terminal(tmp_path: Path) -> None:
    save_file({"\x1b[31mred": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    assert "\x1b" not in run("doctor", tmp_path).stdout


@pytest.mark.parametrize(
    ("path", "words"), [("nowhere", "E019 .*no such path"), ("s3://bucket/x", "E009")]
)
def test_no_path_is_an_error(path: str, words: str, tmp_path: Path) -> None:
    where = path if ":" in path else tmp_path / path
    with pytest.raises(ActdsError, match=words):
        actds.doctor(where)
    assert run("doctor", where).exit_code == 2
