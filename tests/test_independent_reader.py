"""A reader made from the text of the specification alone sees what ``actds.open`` sees."""

from __future__ import annotations

import ast
from pathlib import Path

import independent_reader
import numpy as np
import pytest
from independent_reader import IndependentReader
from synthetic import make_dataset

import actds

VECTORS = Path(__file__).parents[1] / "spec" / "0.1" / "vectors" / "valid"


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


def test_reads_the_minimal_vector_as_the_package_does() -> None:
    same_as_package(VECTORS / "minimal")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_reads_a_run_with_drops_hits_and_two_seals_as_the_package_does(
    tmp_path: Path, dtype: str
) -> None:
    make_dataset(tmp_path / "d", drops=True, filtered=True, dtype=dtype)  # type: ignore[arg-type]
    make_dataset(tmp_path / "d", n_requests=4, seed=7, run="r-second", order="sequence")
    reader = IndependentReader(tmp_path / "d")
    assert reader.seal["n"] == 2 and len(reader.runs) == 2
    assert reader.seal["totals"]["dropped"] and reader.seal["totals"]["cache_ref"]
    same_as_package(tmp_path / "d")


def test_both_readers_refuse_a_flipped_bit(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", n_requests=3)
    victim = sorted(path.glob("census/*/spans-000000.parquet"))[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(ValueError, match="E202"):
        IndependentReader(path).account()
    with pytest.raises(actds.ActdsError, match="E202"):
        actds.open(path).spans()
