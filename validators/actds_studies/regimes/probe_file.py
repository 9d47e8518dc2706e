"""Files of linear probes: weights, biases and names; nothing in them is run.

``.safetensors`` with the tensors ``weights`` ``(n_probes, d_model)`` and, where wanted, ``bias``
``(n_probes,)``; its metadata may say ``hook``, and ``names`` as a JSON list. Or ``.npz`` with the
same two arrays, which can name neither.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.exchange.containers import read_header
from actds_studies.dictionaries.tensors import (
    file_sha256,
    is_npz,
    of_names,
    read_npz,
    read_safetensors,
    refused,
)

MAX_PROBES = 1024
MAX_NAME = 80
_MAX_WEIGHT = float(np.finfo(np.float32).max)
_EXPECTED = "a .safetensors or .npz file with weights (n_probes, d_model)"
_NEXT_STEP = (
    "Save float weights (n_probes, d_model), and bias (n_probes,), with safetensors or numpy.savez."
)


@dataclass(frozen=True)
class ProbeFile:
    """Linear probes of a file.

    Args:
        weights: float64 ``(n_probes, d_model)``.
        bias: float64 ``(n_probes,)``.
        names: of the probes; their numbers where the file has none.
        hook: that they are for; None where the file does not say.
    """

    path: str
    sha256: str
    weights: npt.NDArray[np.float64]
    bias: npt.NDArray[np.float64]
    names: tuple[str, ...]
    hook: str | None


def read_probes(path: str | Path) -> ProbeFile:
    """Return the probes of a file.

    Raises:
        ActdsError: E015 no such file, another format, a pickle, other shapes, more than 1,024
            probes, values that are not finite, or names of another number.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise refused(path, "no such file", _EXPECTED, _NEXT_STEP)
        if is_npz(path):
            tensors, said = read_npz(path), {}
        elif path.suffix == ".safetensors":
            tensors, said = read_safetensors(path), read_header(path)[1]
        else:
            got = f"a {path.suffix or 'bare'} file"
            raise refused(path, got, _EXPECTED, f"Nothing in it was run. {_NEXT_STEP}")
        found = of_names(path, tensors, ("weights",), ("bias",))
    except OSError as error:
        if isinstance(error, ActdsError):
            raise
        raise refused(path, error.strerror or error, _EXPECTED, _NEXT_STEP) from None
    weights = found["weights"].astype(np.float64)
    if weights.ndim != 2 or not 1 <= len(weights) <= MAX_PROBES or not weights.shape[1]:
        expected = f"(n_probes, d_model), at most {MAX_PROBES:,} probes"
        raise refused(f"{path} weights", str(weights.shape), expected, _NEXT_STEP)
    n = len(weights)
    bias = found["bias"].astype(np.float64) if "bias" in found else np.zeros(n)
    if bias.shape != (n,):
        raise refused(f"{path} bias", str(bias.shape), f"({n},)", _NEXT_STEP)
    for name, array in (("weights", weights), ("bias", bias)):
        if not np.isfinite(array).all():
            raise refused(f"{path} {name}", "NaN or infinity", "finite numbers", _NEXT_STEP)
        # Products with rows, and their squares, have to be finite as well.
        if np.abs(array).max() > _MAX_WEIGHT:
            got = f"{np.abs(array).max():g}"
            raise refused(f"{path} {name}", got, f"at most {_MAX_WEIGHT:g}", _NEXT_STEP)
    names = _names(path, said.get("names"), n)
    return ProbeFile(str(path), file_sha256(path), weights, bias, names, said.get("hook"))


def _names(path: Path, text: str | None, n: int) -> tuple[str, ...]:
    if text is None:
        return tuple(str(k) for k in range(n))
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) and _is_name(name) for name in names)
        or len(set(names)) != n
        or len(names) != n
    ):
        expected = f"a JSON list of {n} different names of up to {MAX_NAME} characters"
        raise refused(f"{path} names", text[:80], expected, _NEXT_STEP)
    return tuple(names)


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= MAX_NAME and not any("\ud800" <= c <= "\udfff" for c in text)
