"""``croissant.json`` is valid to ``mlcroissant``, which reads the tables by it."""

from __future__ import annotations

import json
from pathlib import Path

import mlcroissant
import pyarrow.parquet as pq
import pytest

import actds
from actds.dataset.info import describe
from actds.dataset.reading import read_catalog
from actds.store.local import LocalStore


@pytest.fixture(scope="module")
def croissant(path: Path) -> mlcroissant.Dataset:
    actds.card(path)
    return mlcroissant.Dataset(jsonld=str(path / "croissant.json"))


def test_mlcroissant_finds_no_error(croissant: mlcroissant.Dataset) -> None:
    issues = croissant.metadata.ctx.issues
    assert not issues.errors
    # Who made it and how to cite it is for its owner to say.
    assert all("citeAs" in warning for warning in issues.warnings)


def test_mlcroissant_reads_every_row_of_every_table(
    croissant: mlcroissant.Dataset, path: Path
) -> None:
    document = json.loads((path / "croissant.json").read_text())
    patterns = {
        one["@id"].removesuffix("-files"): one["includes"]
        for one in document["distribution"]
        if one["@type"] == "cr:FileSet"
    }
    assert {"tokens", "requests", "steps", "spans"} <= patterns.keys()
    hooks = {hook.name: hook for hook in describe(read_catalog(LocalStore(path))).hooks}
    for records in croissant.metadata.record_sets:
        files = [file for pattern in patterns[records.name] for file in path.glob(pattern)]
        if records.name in hooks:  # zarr, which it describes and cannot read
            [field] = records.fields
            assert field.array_shape_tuple == (-1, hooks[records.name].d_model)
            assert files
            continue
        n_rows = sum(pq.read_metadata(file).num_rows for file in files)
        assert sum(1 for _ in croissant.records(records.uuid)) == n_rows > 0
    rows = croissant.records("tokens")
    keys = sorted((row["tokens/request"], row["tokens/position"]) for row in rows)
    shards = actds.open(path).shards
    stored = [shard.tokens(["request", "position"]) for shard in shards]
    assert keys == sorted(
        key for table in stored for key in zip(*table.to_pydict().values(), strict=True)
    )


def test_a_file_without_its_digest_is_an_error(path: Path, tmp_path: Path) -> None:
    actds.card(path)
    document = json.loads((path / "croissant.json").read_text())
    files = [one for one in document["distribution"] if one["@type"] == "cr:FileObject"]
    del files[0]["sha256"]
    changed = tmp_path / "croissant.json"
    changed.write_text(json.dumps(document))
    with pytest.raises(mlcroissant.ValidationError, match="sha256"):
        mlcroissant.Dataset(jsonld=str(changed))
