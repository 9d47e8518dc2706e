"""Fixtures that many tests share: one conforming dataset, written once, and copies to break."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actds_testing.ceph import ceph, ceph_lacks
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


@pytest.fixture(scope="session")
def ceph_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Yield the port of a Ceph that all tests share."""
    pytest.importorskip("obstore", reason="needs the extra actds[cloud]")
    pytest.importorskip("boto3", reason="makes the bucket")
    if lacks := ceph_lacks():
        pytest.skip(f"needs {lacks} of Ceph: make ceph")
    with ceph(tmp_path_factory.mktemp("ceph")) as port:
        yield port


@pytest.fixture(scope="module")
def s3_port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Yield the port of an S3 server of this module alone, or of the Ceph that all share."""
    if getattr(request, "param", "moto") == "ceph":
        yield request.getfixturevalue("ceph_port")
        return
    pytest.importorskip("obstore", reason="needs the extra actds[cloud]")
    pytest.importorskip("moto", reason="needs moto's S3 server")
    with s3_server() as port:
        yield port


@pytest.fixture
def s3_root(s3_port: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Return a location of this test alone, with the environment that a person would set."""
    return _root(s3_port, monkeypatch, request)


@pytest.fixture
def ceph_root(
    ceph_port: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    """Return the same on Ceph."""
    return _root(ceph_port, monkeypatch, request)


def _root(port: int, patch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    s3_environment(patch, port)
    digest = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    return f"s3://{BUCKET}/{digest}/dataset"


@pytest.fixture(autouse=True, scope="session")
def results_are_kept_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep statistics in a folder of the test run, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTDS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
