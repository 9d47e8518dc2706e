"""What tokens are coloured by: the norm of a row, a probe's product, a feature's activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actds.errors import ActdsError
from actds.exchange.containers import map_npy
from actds_studies.dictionaries import Dictionary, gemma_scope, load_dictionary, saelens
from actds_studies.dictionaries.tensors import is_npz, is_torch, read_npz, read_safetensors
from actds_validators.arrays import Array

MAX_SCORES = 4
"""The norm, and three more."""
_ENCODERS = ("W_enc", "encoder.weight")


@dataclass(frozen=True)
class Score:
    """One number per row.

    Args:
        of: from rows ``(n, d_model)``, float32, to numbers ``(n,)``.
    """

    name: str
    words: str
    of: Callable[[Array], Array]


NORM = Score("norm", "Euclidean norm of the row", lambda rows: np.linalg.norm(rows, axis=1))


def read_probe(path: str | Path, d_model: int, chosen: Sequence[int] = ()) -> list[Score]:
    """Return the scores of probes: the product of a row with each.

    Args:
        path: ``.npy`` file, ``(d_model,)`` or ``(n_probes, d_model)``.
        chosen: which probes; the first ones by default.

    Raises:
        ActdsError: E015 no such file, another shape, or values that are not finite numbers.
    """
    path = Path(path)
    if is_npz(path):
        raise _bad(path, "several arrays", "an .npy file of one")
    try:
        found = map_npy(path).read()
    except OSError as error:
        raise _bad(path, error.strerror or str(error), "an .npy file of floats") from None
    except ActdsError as error:
        raise _bad(path, error.got, "an .npy file of floats") from None
    probes = found[None] if found.ndim == 1 else found
    if probes.ndim != 2 or probes.shape[1] != d_model or probes.dtype.kind != "f":
        expected = f"floats ({d_model},) or (n_probes, {d_model})"
        raise _bad(path, f"{found.dtype} {found.shape}", expected)
    return [
        Score(f"probe {n}", f"product with row {n} of {path.name}", _product(path, probes[n]))
        for n in _chosen(path, chosen or range(min(len(probes), MAX_SCORES - 1)), len(probes))
    ]


def read_sae(
    path: str | Path,
    d_model: int,
    chosen: Sequence[int],
    hook: str | None = None,
    model: str | None = None,
) -> list[Score]:
    """Return the scores of features of a dictionary: their activations.

    A file of its own, without ``cfg.json``, may be an encoder alone: ReLU of its product and bias,
    of the row less the decoder's bias where the file has one; a feature that has a threshold is 0
    up to it, and a top-k is not known. Names are those of SAELens and of dictionary_learning.

    Args:
        path: what ``load_dictionary`` takes, or a ``.safetensors`` or ``.npz`` file of an encoder.
        hook: the hook, in the names of actds; None where it is not known.
        model: the model of the rows; None where it is not known.

    Raises:
        ActdsError: E015 no such file or feature, another width, hook or model, or no encoder in it.
    """
    path = Path(path)
    if _is_whole(path):
        return _of_dictionary(path, load_dictionary(path, hook, d_model, model=model), chosen)
    tensors = _tensors(path)
    name = next((n for n in _ENCODERS if n in tensors), None)
    if name is None:
        raise _bad(path, f"tensors {', '.join(sorted(tensors))[:200]}", " or ".join(_ENCODERS))
    encoder = tensors[name].T if name == "W_enc" else tensors[name]  # (n_features, d_model)
    if encoder.ndim != 2 or encoder.shape[1] != d_model:
        raise _bad(path, f"{name} {tensors[name].shape}", f"an encoder of {d_model} channels")
    n = len(encoder)
    _need_some(path, chosen, n)
    bias = _vector(path, tensors, ("b_enc", "encoder.bias"), n)
    centre = _vector(path, tensors, ("b_dec", "bias", "decoder.bias"), d_model)
    threshold = _vector(path, tensors, ("threshold",), n)
    scores = []
    for k in _chosen(path, chosen, n):
        product = _product(path, encoder[k])
        shift = 0.0 if bias is None else float(bias[k])
        shift -= 0.0 if centre is None else float(product(centre[None])[0])
        least = 0.0 if threshold is None else max(0.0, float(threshold[k]))
        words = f"activation of feature {k} of {path.name}, before any top-k"
        scores.append(Score(f"feature {k}", words, _activation(product, shift, least)))
    return scores


def _is_whole(path: Path) -> bool:
    """Return whether a path is a dictionary with its settings, and no encoder alone."""
    if path.is_dir() or path.name in (saelens.CONFIG, gemma_scope.PARAMETERS) or is_torch(path):
        return True
    return path.name == saelens.WEIGHTS and path.with_name(saelens.CONFIG).exists()


def _of_dictionary(path: Path, one: Dictionary, chosen: Sequence[int]) -> list[Score]:
    _need_some(path, chosen, one.n_features)
    last: list[tuple[Array, Any]] = []

    def features(rows: Array) -> Any:
        if not last or last[0][0] is not rows:
            last[:] = [(rows, one.encode_sparse(rows).tocsc())]
        return last[0][1]

    def activation(k: int) -> Callable[[Array], Array]:
        return lambda rows: features(rows)[:, [k]].toarray()[:, 0]

    return [
        Score(f"feature {k}", f"activation of feature {k} of {path.name}", activation(k))
        for k in _chosen(path, chosen, one.n_features)
    ]


def _need_some(path: Path, chosen: Sequence[int], n: int) -> None:
    if not chosen:
        raise _bad(path, f"{n:,} features and none of them named", "features to look at")


def _product(path: Path, direction: Array) -> Callable[[Array], Array]:
    weights = np.asarray(direction, np.float32)
    if not np.isfinite(weights).all():
        raise _bad(path, "values that are not finite", "finite numbers")
    return lambda rows: np.asarray(rows, np.float32) @ weights


def _activation(
    product: Callable[[Array], Array], shift: float, least: float
) -> Callable[[Array], Array]:
    def of(rows: Array) -> Array:
        before = product(rows) + shift
        return np.where(before > least, before, 0.0)

    return of


def _chosen(path: Path, chosen: Sequence[int], n: int) -> Sequence[int]:
    for k in chosen:
        if not 0 <= k < n:
            raise _bad(path, f"number {k}", f"0 to {n - 1}")
    if len(chosen) > MAX_SCORES - 1:
        raise _bad(path, f"{len(chosen)} numbers", f"at most {MAX_SCORES - 1}")
    return chosen


def _vector(
    path: Path, tensors: Mapping[str, Array], names: tuple[str, ...], n: int
) -> Array | None:
    name = next((name for name in names if name in tensors), None)
    if name is None:
        return None
    values = np.asarray(tensors[name], np.float32)
    if values.shape != (n,) or not np.isfinite(values).all():
        raise _bad(path, f"{name} {values.shape}", f"finite numbers ({n},)")
    return values


def _tensors(path: Path) -> Mapping[str, Array]:
    """Return the tensors of a file by name; those of ``.safetensors`` stay on the disk."""
    read = {".safetensors": read_safetensors, ".npz": read_npz}.get(path.suffix)
    if read is None:
        raise _bad(path, f"a {path.suffix or 'bare'} file", "a .safetensors or .npz file")
    return read(path)


def _bad(path: Path, got: str, expected: str) -> ActdsError:
    return ActdsError("E015", str(path), got=got, expected=expected)
