"""Format versions: a further one is registered, and nothing else is edited to read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner
from pydantic import Field, create_model

import actds
from actds.cli import cli
from actds.errors import ActdsError
from actds.format import schema
from actds_testing import forge
from actds_testing.synthetic import make_dataset

TOY = "0.2-toy"


@pytest.fixture
def toy() -> Iterator[None]:
    """Register a version whose genesis says more, as a package of somebody else would."""
    version: Any = (Literal["0.2-toy"], TOY)
    documents = {
        name: create_model(model.__name__, __base__=model, version=version)
        for name, model in schema.DOCUMENTS.items()
    }
    documents["genesis"] = create_model(
        "Genesis", __base__=schema.Genesis, version=version, purpose=(str, Field(max_length=80))
    )
    schema.register(schema.FormatVersion(TOY, documents))
    yield
    del schema.VERSIONS[TOY]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Return a dataset all of whose documents are of the toy version."""
    root = make_dataset(tmp_path / "d", n_requests=6)
    for path in root.rglob("*.json"):
        if path.name != "zarr.json":
            forge.edit(path, lambda document: document.update(version=TOY))
    forge.edit(root / "actds.json", lambda document: document.update(purpose="a test"))
    forge.relink(root)
    return root


def test_a_dataset_of_a_registered_version_is_read_and_valid(
    toy: None, dataset: Path, tmp_path: Path
) -> None:
    same = actds.open(make_dataset(tmp_path / "same", n_requests=6))
    read = actds.open(dataset)
    assert read.catalog.genesis.version == TOY
    assert read.catalog.genesis.purpose == "a test"  # type: ignore[attr-defined]
    for hook in read.hooks:
        assert (read.array(hook)[:] == same.array(hook)[:]).all()
    found = actds.validate(dataset, level="deep")
    assert [finding.line() for finding in found.findings] == []
    assert f"actds {TOY}" in CliRunner().invoke(cli, ["info", str(dataset)]).output


def test_a_version_that_nobody_registered_is_refused(dataset: Path) -> None:
    with pytest.raises(ActdsError, match=r"E106 actds.json: format version 0.2-toy"):
        actds.open(dataset)


def test_the_genesis_says_the_version_of_every_document(toy: None, dataset: Path) -> None:
    manifest = next(dataset.glob("shards/*/shard.json"))
    forge.edit(manifest, lambda document: document.update(version=schema.FORMAT_VERSION))
    forge.relink(dataset)
    with pytest.raises(ActdsError, match=r"E103 shards/.*/shard.json version"):
        actds.open(dataset)


def test_a_version_is_registered_once_and_has_every_document(toy: None) -> None:
    with pytest.raises(ValueError, match="registered already"):
        schema.register(schema.FormatVersion(TOY, schema.DOCUMENTS))
    wrong = {**schema.DOCUMENTS, "seal": schema.Head}
    with pytest.raises(ValueError, match="is no Seal"):
        schema.register(schema.FormatVersion("0.3-toy", wrong))
