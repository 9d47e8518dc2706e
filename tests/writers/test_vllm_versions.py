"""A vLLM that the tests never ran with starts with a warning, and never without the check."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

from actds.errors import ActdsError
from actds_testing.places import ROOT
from actds_writers.engines.vllm import options
from actds_writers.engines.vllm.options import SEAMS, missing


@pytest.fixture(scope="module")
def package() -> Path:
    """Return the folder of the installed vLLM, which is read and not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, package: Path) -> pytest.MonkeyPatch:
    monkeypatch.setattr(options, "installed", lambda: "0.99.1+cpu")
    monkeypatch.setattr(options, "folder", lambda: package)
    return monkeypatch


@pytest.fixture
def older(package: Path, tmp_path: Path) -> Path:
    """Return a copy in which two names are others, and without the second runner."""
    for file in {place.partition(" ")[0] for place in SEAMS}:
        if not file.startswith("v1/worker/gpu/"):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            text = (package / file).read_text()
            text = text.replace("block_hashes", "hashes").replace("max_concurrent_batches", "most")
            (tmp_path / file).write_text(text)
    return tmp_path


def test_the_installed_version_has_every_name(package: Path) -> None:
    assert missing(package) == []


def test_a_version_without_some_names_is_refused_with_all_of_them(
    pretend: pytest.MonkeyPatch, older: Path
) -> None:
    lacks = [
        "v1/request.py:Request.block_hashes",
        "config/vllm.py:VllmConfig.max_concurrent_batches",
    ]
    assert missing(older) == lacks
    pretend.setattr(options, "folder", lambda: older)
    with pytest.raises(ActdsError) as caught:
        options.admit(check=True)
    assert (caught.value.code, caught.value.place) == ("E012", "vLLM 0.99.1+cpu")
    assert all(name in caught.value.got for name in lacks)


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.32.0", True), ("0.31.2+cpu", True), ("0.32", True), ("0.3.2", False), ("1.32.0", False),
     ("0.320.0", False), ("dev", False)],
)  # fmt: skip
def test_a_version_is_known_by_its_minor_number(version: str, tested: bool) -> None:
    assert options.is_tested(version) is tested


def test_an_unknown_version_starts_with_a_warning(
    pretend: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        options.admit(check=True)
    assert "never ran with vLLM 0.99.1+cpu, but with 0.31, 0.32" in caplog.text


def test_an_unknown_version_is_refused_without_the_check(pretend: pytest.MonkeyPatch) -> None:
    with pytest.raises(ActdsError) as caught:
        options.admit(check=False)
    assert (caught.value.code, caught.value.place) == ("E012", "vLLM 0.99.1+cpu")


def test_a_tested_version_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(options, "installed", lambda: "0.32.0")
    options.admit(check=False)
    assert not caplog.records


def test_the_table_of_the_docs_has_every_tested_version() -> None:
    text = (Path(ROOT) / "docs" / "versions.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| 0.")]
    states = {version.strip(): state.strip() for _, version, state, *_ in rows}
    tested = {version.rpartition(".")[0] for version, state in states.items() if state == "tested"}
    assert tested == set(options.TESTED)
    assert set(states.values()) == {"tested", "run", "read", "refused"}
