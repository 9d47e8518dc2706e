"""The packed matrices that the hooks multiply rows with, as the link names them.

Stands before the capture op, in the worker of any engine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from actds.format.readouts import Readouts, matrix
from actds_writers.ipc.link import Link


def directions(link: Link, n_hooks: int, d_model: int) -> np.ndarray | None:
    """Return the packed matrices of the readouts, ``None`` for a harvest without."""
    readouts = Readouts.from_field(link.readouts, "readouts")
    if readouts is None:
        return None
    probes = np.load(Path(link.probes_path)) if link.probes_path else None
    return matrix(readouts, probes, n_hooks, d_model)
