"""Fixtures that many tests share: one conforming dataset, written once, and copies to break."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actds_testing.s3_server import BUCKET, s3_environment, s3_server
from actds_testing.synthetic import make_dataset


@pytest.fixture(scope="session")
def dataset_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a conforming sealed dataset with losses, references and preemptions; read only."""
    return make_dataset(
        tmp_path_factory.mktemp("synthetic") / "dataset",
        n_requests=16,
        seed=1,
        drops=True,
        filtered=True,
    )


@pytest.fixture
def copy_dataset(dataset_path: Path, tmp_path: Path) -> Callable[[], Path]:
    """Return a function that gives a fresh copy of the dataset, to be broken."""
    numbers = iter(range(1000))

    def copy() -> Path:
        return Path(shutil.copytree(dataset_path, tmp_path / f"copy-{next(numbers)}"))

    return copy


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    """Yield the port of an S3 server of this module alone."""
    pytest.importorskip("obstore", reason="needs the extra actds[cloud]")
    pytest.importorskip("moto", reason="needs moto's S3 server")
    with s3_server() as port:
        yield port


@pytest.fixture
def s3_root(s3_port: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Return a location of this test alone, with the environment that a person would set."""
    s3_environment(monkeypatch, s3_port)
    digest = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    return f"s3://{BUCKET}/{digest}/dataset"


@pytest.fixture(autouse=True, scope="session")
def results_are_kept_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep statistics in a folder of the test run, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTDS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
