"""Fixtures that many tests share: one conforming dataset, written once, and copies to break."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic import make_dataset


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
