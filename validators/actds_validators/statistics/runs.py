"""Where runs begin and end in a series of steps.

Under every other module of this package; imports numpy alone.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Floats", "Ints", "as_floats", "slices"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def slices(run: ArrayLike) -> list[slice]:
    """Return the stretches of equal labels, in order.

    Args:
        run: ``(n_steps,)``, any labels. One that comes back after another is a new stretch.

    Raises:
        ValueError: not one-dimensional.
    """
    labels = np.asarray(run)
    if labels.ndim != 1:
        raise ValueError(f"run labels have shape {labels.shape}; expected (n_steps,)")
    if not len(labels):
        return []
    cuts = np.flatnonzero(labels[1:] != labels[:-1]) + 1
    edges = [0, *cuts.tolist(), len(labels)]
    return [slice(a, b) for a, b in pairwise(edges)]


def as_floats(values: ArrayLike, name: str, shape: tuple[int, ...] | None = None) -> Floats:
    """Return values as float64, checked.

    Raises:
        ValueError: a value is not finite, or the shape is not the expected one.
    """
    found = np.asarray(values, dtype=np.float64)
    if shape is not None and found.shape != shape:
        raise ValueError(f"{name} has shape {found.shape}; expected {shape}")
    if not np.isfinite(found).all():
        raise ValueError(f"{name} has a value that is not finite")
    return found
