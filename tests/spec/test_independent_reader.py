"""A reader made from the text of the specification alone sees what ``actds.open`` sees."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import actds
from actds_testing import independent_reader
from actds_testing.independent_reader import IndependentReader
from actds_testing.places import VECTORS
from actds_testing.synthetic import make_dataset

JUDGED = (
    *("E102", "E104-replaced", "E106", "E2", "E302", "E303", "E304", "E306", "E310", "E311"),
    *("E404", "E406", "E407", "E408", "E416"),
    "E417-readout-of-another-token",
)
"""Beginnings of the codes that two hundred lines already tell from each other."""


def test_independent_reader_shares_no_code_with_the_package() -> None:
    tree = ast.parse(Path(independent_reader.__file__).read_text())
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert imported and not {name for name in imported if name.split(".")[0].startswith("actds")}


def same_as_package(path: Path) -> None:
    theirs, ours = IndependentReader(path), actds.open(path)
    assert theirs.digest == ours.digest
    shards = {shard.name: shard for shard in ours.shards}
    assert [manifest["shard"] for manifest in theirs.shards] and len(theirs.shards) == len(shards)
    for manifest in theirs.shards:
        shard = shards[manifest["shard"]]
        assert theirs.tokens(manifest).to_pylist() == shard.tokens().to_pylist()
        for hook in shard.hooks:
            bits = theirs.array(manifest, hook)
            with shard.array(hook) as reader:
                np.testing.assert_array_equal(bits, reader.read_all())
            assert np.unique(bits).size > 2, "a comparison of constants proves nothing"
    assert ours.seal is not None
    assert theirs.account() == ours.seal.totals


def read_everything(reader: IndependentReader) -> None:
    for manifest in reader.shards:
        reader.tokens(manifest)
        for hook in manifest["hooks"]:
            reader.array(manifest, hook)
    reader.account()


@pytest.mark.parametrize("name", ["minimal", "readouts", "replaced"])
def test_reads_the_valid_vectors_as_the_package_does(name: str) -> None:
    same_as_package(VECTORS / "valid" / name)


def test_reads_two_runs_of_float32_with_drops_and_hits_as_the_package_does(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", drops=True, filtered=True, dtype="float32")
    make_dataset(tmp_path / "d", n_requests=4, seed=7, run="r-second", order="sequence")
    reader = IndependentReader(tmp_path / "d")
    assert reader.seal["n"] == 2 and len(reader.runs) == 2
    assert reader.seal["totals"]["dropped"] and reader.seal["totals"]["cache_ref"]
    same_as_package(tmp_path / "d")


def test_refuses_broken_vectors_with_the_code_of_the_specification(tmp_path: Path) -> None:
    refused = {}
    for vector in sorted((VECTORS / "invalid").iterdir()):
        if not vector.name.startswith(JUDGED):
            continue
        dataset = tmp_path / vector.name
        expect = json.loads((vector / "expect.json").read_text())
        shutil.copytree(VECTORS / expect["base"], dataset)
        for path in expect["remove"]:
            (dataset / path).unlink()
        if (vector / "files").is_dir():  # one that only removes files has none
            shutil.copytree(vector / "files", dataset, dirs_exist_ok=True)
        with pytest.raises(ValueError) as caught:
            read_everything(IndependentReader(dataset))
        refused[vector.name] = str(caught.value)
    assert len(refused) > 15
    assert not {name: said for name, said in refused.items() if said[:4] != name[:4]}
