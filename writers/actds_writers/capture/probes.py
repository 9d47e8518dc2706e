"""A user's probes: read from a file, checked against the hooks, packed for the capture op.

Stands before the token's way.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format.readouts import DEFAULT_PROJECTIONS, Readouts, probe_bytes

Floats = npt.NDArray[np.float32]


def plan_readouts(
    seed: int, path: Path | None, hooks: list[str], d_model: int
) -> tuple[Readouts, bytes | None]:
    """Return the readouts of a run, and its probes as the bytes of their file.

    Args:
        seed: seed of the random directions.
        path: file of the user's probes, ``None`` without.
        hooks: names of the hooks, in order.
        d_model: channels of a row.

    Raises:
        ActdsError: E015 when the file does not fit the hooks.

    Spec: 0.1 section 7.8.
    """
    if path is None:
        return Readouts(DEFAULT_PROJECTIONS, seed), None
    probes = read_probes(path, hooks, d_model)
    data = probe_bytes(probes)
    digest = hashlib.sha256(data).hexdigest()
    return Readouts(DEFAULT_PROJECTIONS, seed, probes.shape[1], digest), data


def read_probes(path: Path, hooks: list[str], d_model: int) -> Floats:
    """Return the probes of every hook, float32 ``(n_hooks, n_probes, d_model)``.

    Args:
        path: ``.npy`` with ``(n_probes, d_model)`` for all hooks or ``(n_hooks, n_probes,
            d_model)``; ``.safetensors`` with one ``(n_probes, d_model)`` tensor per hook, named
            as the hook.
        hooks: names of the hooks, in order.
        d_model: channels of a row.

    Raises:
        ActdsError: E015 unreadable, another shape, or values that are not finite.
    """
    if path.suffix == ".safetensors":
        found = _from_safetensors(path, hooks)
    elif path.suffix == ".npy":
        found = _from_npy(path, len(hooks))
    else:
        raise _bad(path, f"a {path.suffix or 'nameless'} file", "a .npy or .safetensors file")
    if found.ndim != 3 or found.shape[::2] != (len(hooks), d_model) or not found.shape[1]:
        raise _bad(path, f"shape {found.shape}", f"({len(hooks)} hooks, n_probes, {d_model})")
    probes: Floats = np.ascontiguousarray(found, dtype=np.float32)
    if not np.isfinite(probes).all():
        raise _bad(path, "NaN or infinity", "finite values")
    return probes


def _from_npy(path: Path, n_hooks: int) -> np.ndarray:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _bad(path, str(error).splitlines()[0][:200], "a readable npy file") from None
    if not isinstance(found, np.ndarray) or found.dtype.kind != "f":
        raise _bad(path, str(getattr(found, "dtype", type(found))), "an array of floats")
    return np.repeat(found[None], n_hooks, axis=0) if found.ndim == 2 else found


def _from_safetensors(path: Path, hooks: list[str]) -> np.ndarray:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise ActdsError(
            "E011", "safetensors", got="not installed", expected="pip install safetensors"
        ) from None
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _bad(path, str(error).splitlines()[0][:200], "a readable safetensors file") from None
    missing = sorted(set(hooks) ^ set(tensors))
    if missing:
        raise _bad(path, f"names {sorted(tensors)}", f"one tensor for each of {hooks}")
    arrays = [tensors[hook].float().numpy() for hook in hooks]
    if len({array.shape for array in arrays}) > 1:
        raise _bad(path, f"shapes {[a.shape for a in arrays]}", "one shape for every hook")
    return np.stack(arrays)


def _bad(path: Path, got: str, expected: str) -> ActdsError:
    return ActdsError("E015", str(path), got=got, expected=expected)
