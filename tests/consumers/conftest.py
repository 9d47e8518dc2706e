"""One dataset for all consumers, and its rows and moments in float64, read without actds' arrays.

``ACTDS_CONSUMERS_DATASET`` names one that make_dataset.py made; without it a simulated one stands
in, so that a single test can be run at hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore

import actds
from actds.format.readouts import Readouts
from actds_testing.synthetic import make_dataset

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("consumers")
            # What other libraries warn of among themselves is not ours to mend.
            item.add_marker(pytest.mark.filterwarnings("default"))


@dataclass(frozen=True)
class Truth:
    """The rows of one hook, ``(n, d_model)`` in float64, and what follows from them."""

    rows: np.ndarray[Any, Any]

    def agree(self, **given: Any) -> None:
        """Compare mean, variance (over n), std and norm (per row, or their mean) with float64."""
        true = {
            "mean": self.rows.mean(axis=0),
            "variance": self.rows.var(axis=0),
            "std": self.rows.std(axis=0),
            "norm": np.linalg.norm(self.rows, axis=1),
        }
        for name, value in given.items():
            got = np.asarray(value, np.float64)
            want = true[name] if got.ndim else true[name].mean()
            scale = np.abs(want).max()
            assert np.allclose(got, want, rtol=1e-4, atol=1e-5 * scale), name

    def same_rows(self, rows: Any, *, ordered: bool = True) -> None:
        """Compare rows to the last bit, or as a set of rows."""
        got, want = np.asarray(rows, np.float64), self.rows
        if not ordered:
            got, want = (x[np.lexsort(x.T)] for x in (got, want))
        assert np.array_equal(got, want)


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of two runs, both phases, prefix hits, and sinks."""
    named = os.environ.get("ACTDS_CONSUMERS_DATASET")
    if named:
        return Path(named).resolve()
    folder = tmp_path_factory.mktemp("consumers") / "acts"
    common: dict[str, Any] = {
        "hooks": ("resid_post.10", "resid_post.15", "resid_post.20"),
        "d_model": 64,
        "sinks": True,
        "readouts": Readouts(8, seed=0),
    }
    make_dataset(folder, n_requests=40, seed=3, sealed=False, rows_per_shard=150, **common)
    return make_dataset(folder, n_requests=30, seed=4, run="r-second", **common)


@pytest.fixture(scope="session")
def hooks(path: Path) -> list[str]:
    return list(actds.open(path).hooks)


@pytest.fixture(scope="session")
def hook(hooks: list[str]) -> str:
    return hooks[-1]


@pytest.fixture(scope="session")
def truth_of(path: Path) -> Callable[[str], Truth]:
    """Return a function from a hook to its rows, decoded by tensorstore, in the order of shards."""

    def read(hook: str) -> Truth:
        parts = []
        for shard in actds.open(path).shards:
            folder = path / "shards" / shard.name / "acts.zarr" / hook
            spec = {"driver": "zarr3", "kvstore": f"file://{folder}/"}
            bits = tensorstore.open(spec, read=True).result().read().result().view(np.uint16)
            parts.append((bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64))
        return Truth(np.concatenate(parts))

    return read


@pytest.fixture(scope="session")
def truth(truth_of: Callable[[str], Truth], hook: str) -> Truth:
    return truth_of(hook)
