"""The directions that rows are multiplied with: random ones, and a user's probes from a file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format.readouts import DEFAULT_PROJECTIONS, Readouts, matrix, probe_bytes
from actds_writers.ipc.messages import HookSpec

Floats = npt.NDArray[np.float32]


def plan_readouts(
    seed: int, file: str | Path | None, hooks: Sequence[HookSpec]
) -> tuple[Readouts, bytes | None]:
    """Return the readouts of a run, and its probes as the bytes of their file.

    Args:
        file: the user's probes, ``None`` without.

    Raises:
        ActdsError: E015 when the file does not fit the hooks, or these differ in width: a dataset
            stores the probes of all hooks as one array.

    Spec: 0.1 section 7.8.
    """
    if file is None:
        return Readouts(DEFAULT_PROJECTIONS, seed), None
    path = Path(file)
    widths = sorted({hook.d_model for hook in hooks})
    if len(widths) > 1:
        got = f"probes for hooks of {' and '.join(map(str, widths))} channels"
        raise _bad(path, got, "hooks of one width, or no probes")
    probes = read_probes(path, [hook.name for hook in hooks], widths[0])
    data = probe_bytes(probes)
    digest = hashlib.sha256(data).hexdigest()
    return Readouts(DEFAULT_PROJECTIONS, seed, probes.shape[1], digest), data


def directions(
    field: str, probes_path: str | None, hooks: Sequence[HookSpec]
) -> list[Floats] | None:
    """Return the directions of each hook, float32 ``(d_model, n_products)``.

    Args:
        field: value of ``capture.readouts``; ``None`` is returned for a run without readouts.
        probes_path: npy file of the probes, ``None`` without.
    """
    readouts = Readouts.from_field(field, "readouts")
    if readouts is None:
        return None
    probes = np.load(Path(probes_path)) if probes_path else None
    return [
        matrix(readouts, None if probes is None else probes[i : i + 1], 1, hook.d_model)[0]
        for i, hook in enumerate(hooks)
    ]


def read_probes(path: Path, hooks: list[str], d_model: int) -> Floats:
    """Return the probes of every hook, float32 ``(n_hooks, n_probes, d_model)``.

    Args:
        path: ``.npy`` with ``(n_probes, d_model)`` for all hooks or ``(n_hooks, n_probes,
            d_model)``; ``.safetensors`` with one ``(n_probes, d_model)`` tensor per hook, under
            the hook's name.

    Raises:
        ActdsError: E015 unreadable, another shape, or values that are not finite.
    """
    if path.suffix == ".safetensors":
        found = _from_safetensors(path, hooks)
    elif path.suffix == ".npy":
        found = _from_npy(path, len(hooks))
    else:
        raise _bad(path, f"a file with the ending {path.suffix!r}", "a .npy or .safetensors file")
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
            "E011",
            "safetensors",
            got="not installed",
            expected="the package safetensors",
            next_step="pip install safetensors",
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
