"""Distances of pairs of rows equal independent computations; halves are halves."""

from __future__ import annotations

import numpy as np

from actds_studies.regimes.contrast import halves
from actds_studies.regimes.instruments import distances


def test_distances_equal_a_direct_computation() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 5000, 7)).astype(np.float32)
    relative = np.linalg.norm((second - first).astype(float), axis=1)
    relative /= np.linalg.norm(first.astype(float), axis=1)
    of_pairs = distances(first, second)
    assert np.allclose(of_pairs[0], relative, rtol=1e-6)
    cosine = [1 - np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b)
              for a, b in zip(first.astype(float), second.astype(float), strict=True)]  # fmt: skip
    assert np.allclose(of_pairs[1], cosine, atol=1e-12)
    assert not distances(first, first)[1].any()


def test_halves_are_drawn_of_all_and_differ() -> None:
    found = halves(11, 50, seed=3)
    assert found.shape == (50, 11) and (found.sum(axis=1) == 5).all()
    assert len({tuple(line) for line in found.tolist()}) > 40
    assert (halves(11, 50, seed=3) == found).all()
