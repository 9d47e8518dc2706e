"""The vectors of the spec: the valid one passes, every invalid one gives its code at its place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from actds.dataset.reading import read_catalog, read_dataset
from actds.errors import CODES, ActdsError, Finding
from actds.format import canonical
from actds.store import open_store
from actds_testing.places import VECTORS
from actds_validators.validate.validation import Validation, validate

INVALID = sorted((VECTORS / "invalid").iterdir())
NOT_OF_A_DATASET = {"E308", "E309", "E312"}
"""Ledger codes that a writer or a recovery meets: no sealed dataset can show them."""


def expectation(vector: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((vector / "expect.json").read_text(encoding="utf-8"))
    return document


def unpack(vector: Path, out: Path) -> Path:
    """Build the dataset of an invalid vector, as spec/0.1/vectors/README.md tells it."""
    expect = expectation(vector)
    shutil.copytree(VECTORS / expect["base"], out)
    for path in expect["remove"]:
        (out / path).unlink()
    if (vector / "files").is_dir():
        shutil.copytree(vector / "files", out, dirs_exist_ok=True)
    return out


def lines(validation: Validation) -> list[str]:
    return [f"{finding.severity} {finding.line()}" for finding in validation.findings]


@pytest.mark.parametrize("name", sorted(path.name for path in (VECTORS / "valid").iterdir()))
def test_valid_vector_passes_at_every_level(name: str) -> None:
    found = validate(VECTORS / "valid" / name, "deep")
    assert lines(found) == []
    assert found.exit_code(strict=True) == 0
    shown = ("dropped", "aborted", "undelivered", "recomputed")
    # The requests that were taken out are those with hits.
    for total in shown if name == "redacted" else ("cache_ref", *shown):
        assert found.totals[total] > 0, f"the vector shows no {total}"


def test_valid_vectors_show_raw_and_replaced_shards() -> None:
    minimal, replaced = (
        read_catalog(open_store(VECTORS / "valid" / name)) for name in ("minimal", "replaced")
    )
    assert [m.compression for m in minimal.shards] == ["normal", "normal"]
    assert [m.compression for m in replaced.shards] == ["normal", "raw"]
    assert len(replaced.replaced) == 1 and replaced.seal is not None and replaced.seal.n == 2
    for ours, theirs in zip(
        minimal.shards_of("r-vector"), replaced.shards_of("r-vector"), strict=True
    ):
        assert ours.tokens().equals(theirs.tokens())
        with ours.array("resid_post.0") as one, theirs.array("resid_post.0") as other:
            assert (one.read_all() == other.read_all()).all()


@pytest.mark.parametrize("vector", INVALID, ids=lambda vector: vector.name)
def test_invalid_vector_gives_its_code_at_its_place(vector: Path, tmp_path: Path) -> None:
    expect = expectation(vector)
    assert vector.name.startswith(expect["code"])
    found = validate(unpack(vector, tmp_path / "dataset"), expect["level"])
    assert {f.code for f in found.findings} == {expect["code"], *expect["also"]}, lines(found)
    mine = [f for f in found.findings if f.code == expect["code"]]
    assert any(f.place.startswith(expect["place"]) for f in mine), lines(found)
    assert {f.severity for f in mine} == {expect["severity"]}
    assert found.exit_code(strict=True) in (1, 3)
    assert (found.exit_code() == 0) == (expect["severity"] == "warning"), lines(found)


def test_every_code_of_a_dataset_has_a_vector() -> None:
    families = {"structure", "integrity", "ledger", "provenance", "accounting", "values"}
    wanted = {code for code, entry in CODES.items() if entry.family in families}
    assert {vector.name[:4] for vector in INVALID} == wanted - NOT_OF_A_DATASET


def test_accounting_vectors_carry_no_other_mistake(tmp_path: Path) -> None:
    """What is wrong in E404 to E414 is seen by accounting alone: digests and seal are right."""
    for vector in INVALID:
        if "E404" <= vector.name[:4] <= "E414":
            out = unpack(vector, tmp_path / vector.name)
            assert lines(validate(out, "quick")) == [], vector.name


def test_vectors_are_small() -> None:
    files = [path for path in VECTORS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_700_000


def test_valid_vector_documents_are_canonical() -> None:
    for path in (VECTORS / "valid").rglob("*.json"):
        data = path.read_bytes()
        assert canonical.dump(canonical.parse(data, path.name)) == data


@pytest.mark.parametrize("vector", INVALID, ids=lambda vector: vector.name)
def test_strict_reading_raises_the_first_finding_of_the_reader(
    vector: Path, tmp_path: Path
) -> None:
    store = open_store(unpack(vector, tmp_path / "dataset"))
    try:
        found = [finding for _, finding in read_dataset(store).findings]
    except ActdsError as error:  # a dataset of which nothing can be read
        found = [Finding.from_error(error)]
    if not found:
        assert list(read_catalog(store).findings) == []
        return
    with pytest.raises(ActdsError) as raised:
        read_catalog(store)
    assert Finding.from_error(raised.value) == found[0]
