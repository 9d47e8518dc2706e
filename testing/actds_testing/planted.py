"""Datasets whose rows are sums of a few planted directions, so that what to find is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from actds.format.schema import Hook
from actds_testing import synthetic

__all__ = ["directions", "planted_dataset", "rotated"]

N_ACTIVE = 2


def directions(n: int, d_model: int, seed: int = 0) -> np.ndarray:
    """Return random directions of length 1, ``(n, d_model)``."""
    found = np.random.default_rng(seed).normal(size=(n, d_model))
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))


def rotated(planted: np.ndarray, share: float, seed: int = 1) -> np.ndarray:
    """Return directions of which the first share is turned by a random rotation."""
    d_model = planted.shape[1]
    turn, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(d_model, d_model)))
    n = round(share * len(planted))
    return np.concatenate([planted[:n] @ turn, planted[n:]])


def planted_dataset(
    path: Path,
    planted: np.ndarray,
    seed: int = 0,
    more: Callable[[int, int], np.ndarray | float] = lambda request, position: 0.0,
    **options: Any,
) -> Path:
    """Write a dataset of float32 rows, each a positive sum of some of the planted directions.

    What is active follows from request, position and seed alone.

    Args:
        path: the new folder.
        planted: ``(n, d_model)``.
        seed: of what is active.
        more: what is added to the row of a request and position ``(d_model,)``.
        options: of ``make_dataset``.
    """

    def states(tokens: dict[str, Any], token_ids: list[list[int]], hook: Hook) -> Any:
        rows = np.empty((len(tokens["request"]), planted.shape[1]), np.float32)
        for n, place in enumerate(zip(tokens["request"], tokens["position"], strict=True)):
            rng = np.random.default_rng([seed, *map(int, place)])
            active = rng.choice(len(planted), N_ACTIVE, replace=False)
            rows[n] = rng.uniform(1, 2, N_ACTIVE) @ planted[active] + more(*map(int, place))
        return rows.view(np.uint32)

    with patch.object(synthetic, "states", states):
        return synthetic.make_dataset(
            path, d_model=planted.shape[1], dtype="float32", **({"cache": False} | options)
        )
