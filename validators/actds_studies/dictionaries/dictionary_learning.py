"""dictionary_learning: a folder of ``ae.pt`` and, beside it, the ``config.json`` of its training.

Read as ``dictionary_learning.utils.load_dictionary`` of 0.1.0 does, tensors only. There an
``AutoEncoder`` is given directions of length 1 when it is read, and its features are longer by as
much; the others stay as they were saved. Its trainer scales the biases back before it saves, so
that no normalization is left. The trainer of a ``BatchTopKSAE`` begins to estimate the threshold
after `threshold_start_step`; before, the file has -1, and a dictionary without one is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from actds_studies.dictionaries.dictionary import Dictionary, Kind, Source
from actds_studies.dictionaries.places import Wanted, places_of, recorded
from actds_studies.dictionaries.tensors import (
    Tensors,
    file_sha256,
    of_names,
    read_config,
    read_torch,
    refused,
    vector,
)
from actds_validators.arrays import Array

CONFIG = "config.json"
WEIGHTS = "ae.pt"
ClassName = Literal[
    "AutoEncoder",
    "AutoEncoderNew",
    "GatedAutoEncoder",
    "AutoEncoderTopK",
    "BatchTopKSAE",
    "MatryoshkaBatchTopKSAE",
    "JumpReluAutoEncoder",
]

_LINEAR = ("encoder.weight", "encoder.bias", "decoder.weight")
_MATRICES = ("W_enc", "b_enc", "W_dec", "b_dec")
_TENSORS: dict[ClassName, tuple[str, ...]] = {
    "AutoEncoder": (*_LINEAR, "bias"),
    "AutoEncoderNew": (*_LINEAR, "decoder.bias"),
    "GatedAutoEncoder": (
        "encoder.weight",
        "decoder.weight",
        "decoder_bias",
        "r_mag",
        "gate_bias",
        "mag_bias",
    ),
    "AutoEncoderTopK": (*_LINEAR, "b_dec"),
    "BatchTopKSAE": (*_LINEAR, "b_dec", "threshold"),
    "MatryoshkaBatchTopKSAE": (*_MATRICES, "threshold"),
    "JumpReluAutoEncoder": (*_MATRICES, "threshold"),
}
_KINDS: dict[ClassName, Kind] = {
    "AutoEncoder": "standard",
    "AutoEncoderNew": "standard",
    "GatedAutoEncoder": "gated",
    "AutoEncoderTopK": "topk",
    "BatchTopKSAE": "batchtopk",
    "MatryoshkaBatchTopKSAE": "batchtopk",
    "JumpReluAutoEncoder": "jumprelu",
}
_COUNTS = ("k", "group_sizes")
_OF_NAMES: tuple[ClassName, ...] = (
    "AutoEncoder",
    "AutoEncoderNew",
    "GatedAutoEncoder",
    "JumpReluAutoEncoder",
)
"""Classes that the names of their tensors tell from all others."""
_BIASES = ("b_dec", "bias", "decoder_bias", "decoder.bias")
_SUBMODULE = re.compile(r"(resid_post|resid_pre|mlp_out|attn_out)_layer_(\d{1,6})")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Trainer(_Model):
    """What the trainer says of itself."""

    dict_class: ClassName | None = None
    activation_dim: int | None = Field(default=None, ge=1)
    dict_size: int | None = Field(default=None, ge=1)
    k: int | None = Field(default=None, ge=1)
    layer: int | None = Field(default=None, ge=0, lt=1_000_000)
    lm_name: str | None = None
    submodule_name: str | None = None


class Config(_Model):
    """``config.json``; ``buffer`` is what the source of the rows says of itself."""

    trainer: Trainer = Trainer()
    buffer: Any = None


def read_dictionary_learning(path: Path, wanted: Wanted) -> Dictionary:
    """Return the dictionary of an ``ae.pt``.

    Args:
        path: of the file; ``config.json`` beside it is optional where the tensors' names tell the
            class, which those of ``AutoEncoderTopK`` and ``BatchTopKSAE`` do not.

    Raises:
        ActdsError: E011 without torch; E015 a file that is missing, damaged or has more than
            tensors, tensors that are not those of the class, a threshold that was never estimated,
            or another hook, width or model.
    """
    config_path = path.with_name(CONFIG)
    config = read_config(config_path, Config) if config_path.exists() else Config()
    trainer = config.trainer
    of_loader = recorded(config_path, config.buffer)
    model = trainer.lm_name or of_loader.model
    wanted.refuse_other_model(config_path, model)
    if trainer.activation_dim is not None:
        wanted.refuse_other_width(config_path, trainer.activation_dim)
    called, places = _place(trainer, of_loader.hook)
    hook, hook_from = wanted.hook_of(config_path, called, places, "file")
    if called is None:
        wanted.refuse_other_layer(config_path, trainer.layer)
    tensors = read_torch(path)
    name = _class_name(path, trainer, tensors)
    source = Source(
        "dictionary_learning", str(path), file_sha256(path), hook, hook_from, model,
        trained_on=of_loader.digests, held_out=of_loader.held_out, weights=of_loader.weights,
    )  # fmt: skip
    dictionary = _dictionary(path, name, trainer.k, tensors, source)
    wanted.refuse_other_width(path, dictionary.d_model)
    sizes = (dictionary.d_model, dictionary.n_features)
    expected = (trainer.activation_dim or sizes[0], trainer.dict_size or sizes[1])
    if sizes != expected:
        raise refused(path, f"{sizes} channels and features", f"{expected}, as {CONFIG} says")
    return dictionary


def _dictionary(
    path: Path, name: ClassName, k: int | None, tensors: Tensors, source: Source
) -> Dictionary:
    kind = _KINDS[name]
    floats = {name: array for name, array in tensors.items() if name not in _COUNTS}
    optional = ("threshold",) if kind == "topk" else ()
    floats = {
        name: array.astype(np.float32, copy=False)
        for name, array in of_names(path, floats, _TENSORS[name], optional).items()
    }
    if "W_enc" in floats:
        w_enc, w_dec, b_enc = floats["W_enc"], floats["W_dec"], floats["b_enc"]
    else:
        w_enc, w_dec = floats["encoder.weight"].T, floats["decoder.weight"].T
        b_enc = floats["gate_bias" if kind == "gated" else "encoder.bias"]
    if w_enc.ndim != 2 or w_dec.shape != w_enc.shape[::-1]:
        raise refused(path, f"an encoder {w_enc.shape}, a decoder {w_dec.shape}", "as many rows")
    n_features = w_enc.shape[1]
    b_dec = next(floats[bias] for bias in _BIASES if bias in floats)
    gain = b_mag = threshold = None
    if kind == "gated":
        with np.errstate(over="ignore"):  # infinity is refused with its name
            gain = np.exp(floats["r_mag"])
        b_mag = floats["mag_bias"]
    if kind in ("jumprelu", "batchtopk"):
        threshold = vector(path, "threshold", floats["threshold"], n_features)
    if kind == "batchtopk" and threshold is not None and (threshold < 0).any():
        raise refused(
            f"{path} threshold",
            f"{threshold.min():g}: it was never estimated",
            "0 or more",
            "Train for more steps than threshold_start_step (1,000 by default), and save again.",
        )
    if name == "AutoEncoder":
        w_enc, b_enc, w_dec = _unit_directions(path, w_enc, b_enc, w_dec)
    active = _k(path, k, tensors) if kind == "topk" else None
    return Dictionary(
        kind, w_enc, b_enc, w_dec, b_dec, source, k=active, threshold=threshold, gain=gain,
        b_mag=b_mag, apply_b_dec_to_input=name not in ("AutoEncoderNew", "JumpReluAutoEncoder"),
    )  # fmt: skip


def _unit_directions(path: Path, w_enc: Array, b_enc: Array, w_dec: Array) -> tuple[Array, ...]:
    """Return the weights with directions of length 1: the features are longer by as much."""
    if b_enc.shape != w_enc.shape[1:]:
        raise refused(f"{path} encoder.bias", str(b_enc.shape), f"{w_enc.shape[1:]}")
    with np.errstate(all="ignore"):  # what is not finite is refused with its name
        norms = np.linalg.norm(w_dec, axis=1)
        if np.allclose(norms, 1):
            return w_enc, b_enc, w_dec
        norms[norms == 0] = 1  # a dead feature stays one
        return w_enc * norms, b_enc * norms, w_dec / norms[:, None]


def _k(path: Path, configured: int | None, tensors: Tensors) -> int:
    """Return the active features of a row, of which file and configuration say the same."""
    stored = tensors.get("k")
    if stored is not None and (stored.size != 1 or stored.dtype.kind not in "iu"):
        raise refused(f"{path} k", f"{stored.dtype} {stored.shape}", "one integer")
    known = {k for k in (configured, None if stored is None else int(stored.reshape(()))) if k}
    if len(known) != 1:
        got = f"{stored} here, {configured} in {CONFIG}" if known else f"no k, nor in {CONFIG}"
        raise refused(f"{path} k", got, "the active features of a row")
    return known.pop()


def _class_name(path: Path, trainer: Trainer, tensors: Tensors) -> ClassName:
    if trainer.dict_class is not None:
        return trainer.dict_class
    if "group_sizes" in tensors:
        return "MatryoshkaBatchTopKSAE"
    if "k" in tensors:
        got = f"tensors of AutoEncoderTopK or of BatchTopKSAE, and no {CONFIG}"
        raise refused(path, got, f"{CONFIG} of its trainer beside it, with dict_class and k")
    for name in _OF_NAMES:
        if set(tensors) == set(_TENSORS[name]):
            return name
    got = f"tensors {', '.join(sorted(tensors))}"
    raise refused(path, got, f"those of {', '.join(get_args(ClassName))}")


def _place(trainer: Trainer, of_loader: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Return what the hook is called, and the hooks that this may be."""
    if of_loader is not None:
        return of_loader, (of_loader,)
    called = trainer.submodule_name
    if called is None:
        return None, ()
    if match := _SUBMODULE.fullmatch(called):
        return called, (f"{match[1]}.{int(match[2])}",)
    return called, places_of(called, trainer.lm_name)
