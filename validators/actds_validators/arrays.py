"""Types of arrays that every package of the validators names alike; no package of an extra."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Whole = NDArray[np.signedinteger[Any]]
"""Whole numbers of any width: of each row there is one, and rows are many."""
Bools = NDArray[np.bool_]
Rows = NDArray[np.float32]
"""Rows of activations ``(n, d_model)``, and what is computed of them."""
Array = NDArray[Any]


def narrow(values: Whole) -> Whole:
    """Return whole numbers in the narrowest signed type that holds them."""
    low, high = (int(f()) for f in (values.min, values.max)) if values.size else (0, 0)
    kinds = (np.int8, np.int16, np.int32)
    wide = next((k for k in kinds if np.iinfo(k).min <= low and high <= np.iinfo(k).max), np.int64)
    return values.astype(wide, copy=False)
