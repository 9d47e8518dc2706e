"""Types of arrays that every package of the validators names alike."""

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
Labels = NDArray[np.int8]
Array = NDArray[Any]
