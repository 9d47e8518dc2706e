"""SHA256SUMS: everything that a seal pins, checked by a program that is not ours."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import actds
from actds.format import canonical
from actds.publish.card import card
from actds.rewrite.recompression import recompress
from actds.store.local import LocalStore
from actds_testing.places import VECTORS
from actds_testing.synthetic import make_dataset
from actds_validators.validate.validation import validate

NOT_DATA = {"README.md", "croissant.json", "SHA256SUMS"}


def listed(acts: Path) -> dict[str, str]:
    """Return the list, read by its form: digest, two blanks, path."""
    text = (acts / "SHA256SUMS").read_bytes().decode("ascii")
    assert text.endswith("\n")
    pairs = [line.split("  ") for line in text.splitlines()]
    paths = [path for _, path in pairs]
    assert paths == sorted(set(paths))
    return {path: digest for digest, path in pairs}


def files(acts: Path) -> set[str]:
    return {path.relative_to(acts).as_posix() for path in acts.rglob("*") if path.is_file()}


def sha256sum(acts: Path) -> subprocess.CompletedProcess[str]:
    command = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    return subprocess.run(command, cwd=acts, capture_output=True, text=True)


def test_every_file_of_data_is_listed_with_its_digest(acts: Path) -> None:
    found = listed(acts)
    assert found.keys() == files(acts) - NOT_DATA
    assert found == {path: canonical.digest((acts / path).read_bytes()) for path in found}


@pytest.mark.parametrize("name", sorted(path.name for path in (VECTORS / "valid").iterdir()))
def test_the_list_of_a_vector_is_whole(name: str, tmp_path: Path) -> None:
    vector = Path(shutil.copytree(VECTORS / "valid" / name, tmp_path / name))
    actds.seal(vector)  # writes the list of a dataset that has none
    found = listed(vector)
    assert found == {path: canonical.digest((vector / path).read_bytes()) for path in found}
    missing = files(vector) - NOT_DATA - found.keys()
    replaced = {shard.shard for shard in actds.open(vector).catalog.replaced}
    assert {path.split("/")[1] for path in missing} <= replaced


def test_a_seal_renews_the_list_and_a_card_leaves_it_alone(acts: Path) -> None:
    first = (acts / "SHA256SUMS").read_bytes()
    card(acts, licence="cc-by-4.0")
    actds.seal(acts)
    assert (acts / "SHA256SUMS").read_bytes() == first
    make_dataset(acts, n_requests=4, seed=9, run="r-second")
    assert (acts / "SHA256SUMS").read_bytes() != first
    assert listed(acts).keys() == files(acts) - NOT_DATA
    (acts / "SHA256SUMS").unlink()
    assert validate(acts).warnings == [], "a dataset needs no list"
    actds.seal(acts)
    assert listed(acts).keys() == files(acts) - NOT_DATA


def test_a_list_that_the_seal_does_not_say_is_a_warning(acts: Path) -> None:
    data = (acts / "SHA256SUMS").read_bytes()
    for wrong in (data[:-1], data.replace(b"a", b"b", 1), b"", data + data):
        (acts / "SHA256SUMS").write_bytes(wrong)
        found = validate(acts)
        assert [finding.code for finding in found.findings] == ["E806"]
        assert found.exit_code() == 0 and found.exit_code(strict=True) == 1
    actds.open(acts)  # no reader takes anything from it
    (acts / "SHA256SUMS").unlink()
    (acts / "SHA256SUMS").symlink_to("/etc/passwd")
    assert "E107" in {finding.code for finding in validate(acts).findings}


def test_writing_the_list_reads_no_data(acts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (acts / "SHA256SUMS").unlink()
    catalog = actds.open(acts).catalog

    def refuse(self: object, path: str, *args: object) -> bytes:
        raise AssertionError(path)

    monkeypatch.setattr(LocalStore, "read", refuse)
    monkeypatch.setattr(LocalStore, "open_file", refuse)
    from actds.publish.sealing import put_sums

    put_sums(catalog)
    assert listed(acts).keys() == files(acts) - NOT_DATA


@pytest.mark.standard
def test_sha256sum_finds_every_change(acts: Path) -> None:
    assert sha256sum(acts).returncode == 0
    for path in sorted(files(acts) - NOT_DATA)[::4]:
        data = (acts / path).read_bytes()
        (acts / path).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        said = sha256sum(acts)
        assert said.returncode == 1 and f"{path}: FAILED" in said.stdout
        (acts / path).unlink()
        assert sha256sum(acts).returncode == 1
        (acts / path).write_bytes(data)
    assert sha256sum(acts).returncode == 0


@pytest.mark.standard
def test_sha256sum_accepts_a_dataset_that_was_recompressed(tmp_path: Path) -> None:
    vector = Path(shutil.copytree(VECTORS / "valid" / "replaced", tmp_path / "d"))
    actds.seal(vector)
    assert sha256sum(vector).returncode == 0
    recompress(vector)
    assert sha256sum(vector).returncode == 0, "files that were removed are not listed"
