"""A reader made from the text of the specification alone sees what ``actds.open`` sees."""

from __future__ import annotations

import ast
import struct
from pathlib import Path

import numpy as np
import pytest

import actds
from actds_testing import independent
from actds_testing.independent import Breach, IndependentReader
from actds_testing.independent.arrays import decode
from actds_testing.places import ROOT, VECTORS
from actds_testing.synthetic import make_dataset

PACKAGE = Path(independent.__file__).parent


def test_independent_package_shares_no_code_with_actds() -> None:
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else name.name
        for path in PACKAGE.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    ours = {name for name in imported if name.startswith("actds")}
    assert ours and all(name.startswith("actds_testing.independent") for name in ours), ours
    others = {name.split(".")[0] for name in imported} - {"actds_testing"}
    allowed = {"numpy", "pyarrow", "zstandard", "google_crc32c"}
    assert not others & {"zarr", "numcodecs", "blosc", "pydantic"} and allowed <= others


def same_as_package(path: Path) -> None:
    theirs, ours = IndependentReader(path), actds.open(path)
    assert theirs.digest == ours.digest
    shards = {shard.name: shard for shard in ours.shards}
    assert theirs.shards and len(theirs.shards) == len(shards)
    for mine in theirs.shards:
        shard = shards[mine.name]
        assert theirs.tokens(mine) == shard.tokens().to_pylist()
        for hook in shard.hooks:
            bits = theirs.array(mine, hook)
            with shard.array(hook) as reader:
                np.testing.assert_array_equal(bits, reader.read_all())
            assert np.unique(bits).size > 2, "a comparison of constants proves nothing"
    assert ours.seal is not None
    assert theirs.account() == ours.seal.totals


@pytest.mark.parametrize("name", sorted(path.name for path in (VECTORS / "valid").iterdir()))
def test_reads_the_valid_vectors_as_the_package_does(name: str) -> None:
    same_as_package(VECTORS / "valid" / name)


def test_reads_two_runs_of_float32_with_drops_and_hits_as_the_package_does(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", drops=True, filtered=True, dtype="float32")
    make_dataset(tmp_path / "d", n_requests=4, seed=7, run="r-second", order="sequence")
    reader = IndependentReader(tmp_path / "d")
    assert reader.seal is not None
    assert reader.seal["n"] == 2 and len(reader.runs) == 2
    assert reader.seal["totals"]["dropped"] and reader.seal["totals"]["cache_ref"]
    same_as_package(tmp_path / "d")


def test_decodes_the_frames_that_the_text_shows() -> None:
    page = (ROOT / "spec/0.1/04-arrays.md").read_text().partition("**Examples.**")[2]
    lines = [line[4:76].partition("     ")[0] for line in page.splitlines() if line[:4] == "    "]
    shown = [bytes.fromhex(line) for line in lines]
    coded, copied = b"".join(shown[:4]), shown[4]
    for frame, values in ((coded, [0x3F80] * 128), (copied, [0x3F80, 0xBF80])):
        crc = struct.pack("<I", independent.arrays.google_crc32c.value(frame))
        assert decode(frame + crc, len(values), "bfloat16", "").tolist() == values
    assert shown[5] == crc


def test_refuses_an_unsealed_dataset(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", n_requests=2, sealed=False)
    with pytest.raises(Breach, match=r"^E306"):
        IndependentReader(tmp_path / "d")
