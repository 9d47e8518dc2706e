"""Formats: which of them a path has, by what is in it, and the dictionary in it.

SAELens, a folder of ``cfg.json`` and ``sae_weights.safetensors``, is read as SAELens 6.54 does
(``sae_lens.saes``, ``loading.pretrained_sae_loaders``): configurations of 5.x and before are given
its defaults for them; what a trainer of BatchTopK saved is read as the JumpReLU dictionary that it
becomes for inference. Activations are float32, whatever ``dtype`` says.

Gemma Scope, ``params.npz``, is a JumpReLU dictionary of Gemma 2. The file has the weights and
nothing else; where it was trained is in the names of its folders, as the repositories
``google/gemma-scope-*`` have them. Read as ``gemma_2_sae_huggingface_loader`` of SAELens 6.54 does:
the decoder's bias is not taken off the input, and nothing is normalized.

dictionary_learning, a folder of ``ae.pt`` and, beside it, the ``config.json`` of its training, is
read as ``dictionary_learning.utils.load_dictionary`` of 0.1.0 does, tensors only. There an
``AutoEncoder`` is given directions of length 1 when it is read, and its features are longer by as
much; the others stay as they were saved. Its trainer scales the biases back before it saves, so
that no normalization is left. The trainer of a ``BatchTopKSAE`` begins to estimate the threshold
after `threshold_start_step`; before, the file has -1, and a dictionary without one is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from actds_validators.arrays import Array, Rows
from actds_validators.dictionaries import (
    Dictionary,
    Feature,
    Kind,
    Normalization,
    Source,
    Wanted,
    places_of,
    recorded,
)
from actds_validators.dictionaries.tensors import (
    Tensors,
    file_sha256,
    is_npz,
    is_torch,
    of_names,
    read_config,
    read_npz,
    read_safetensors,
    read_torch,
    refused,
    vector,
)

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
PARAMETERS = "params.npz"
TRAINING, STATE = "config.json", "ae.pt"
_EXPECTED = (
    f"a folder with {CONFIG} and {WEIGHTS} (SAELens), with "
    f"{PARAMETERS} (Gemma Scope) or {STATE} "
    "(dictionary_learning)"
)


def load_dictionary(
    path: str | Path,
    hook: str | None = None,
    d_model: int | None = None,
    *,
    model: str | None = None,
) -> Dictionary:
    """Return the dictionary of a path; no code in its files is run.

    What the files say of hook, width and model is compared with what is asked for before the
    weights are read. Where they do not say it, the caller's word is taken, and the dictionary
    notes that: ``source.hook_from``.

    Args:
        path: folder of a dictionary, or its file of weights.
        hook: of the rows, in the names of actds, such as ``resid_post.8``.
        d_model: channels of the rows.
        model: name of the model of the rows, or the path of its folder.

    Raises:
        ActdsError: E015 no dictionary there, or more than one; one of another hook, width or
            model; normalization that is not folded into the weights; a pickle with code; weights
            that are damaged, of other shapes, or not finite. E011 without torch, for an ``ae.pt``.
    """
    path = Path(path)
    try:
        return _of_path(path, Wanted(hook, d_model, model))
    except OSError as error:
        raise refused(path, error.strerror or error, _EXPECTED) from None


def dictionary_feature(path: str | Path, number: int, hook: str | None = None) -> Feature:
    """Return one feature of a dictionary; raises as ``load_dictionary``, and E015 without it."""
    return load_dictionary(path, hook).feature(number)


def _of_path(path: Path, wanted: Wanted) -> Dictionary:
    if path.is_dir():
        return _of_folder(path, wanted)
    if not path.is_file():
        raise refused(path, "no such file or folder", _EXPECTED)
    if is_npz(path):
        return _read_gemma_scope(path, wanted)
    if is_torch(path):
        return _read_dictionary_learning(path, wanted)
    if path.name in (CONFIG, WEIGHTS):
        return _read_saelens(path.with_name(WEIGHTS), wanted)
    with path.open("rb") as file:
        start = file.read(2)
    if start[:1] == b"\x80":
        next_step = "Nothing in it was run. Save it again with torch 1.6 or newer, weights alone."
        raise refused(path, "a bare pickle", _EXPECTED, next_step)
    got = "a zip that is cut, or without weights" if start == b"PK" else f"a file of {start!r}…"
    raise refused(path, got, _EXPECTED)


def _of_folder(path: Path, wanted: Wanted) -> Dictionary:
    readers = {
        WEIGHTS: _read_saelens,
        PARAMETERS: _read_gemma_scope,
        STATE: _read_dictionary_learning,
    }
    present = [name for name in readers if (path / name).is_file()]
    if len(present) > 1:
        raise refused(path, f"{' and '.join(present)}", "the path of one of them")
    if present:
        return readers[present[0]](path / present[0], wanted)
    for name in readers:
        if os.path.lexists(path / name):
            raise refused(path / name, "no regular file", "a file of weights")
    inside = sorted(file.name for file in path.iterdir())[:8]
    raise refused(path, f"a folder with {', '.join(inside) or 'nothing'}", _EXPECTED)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


def _float32(arrays: Tensors, names: Mapping[str, str]) -> dict[str, Rows]:
    """Return arrays by other names: those of SAELens, and as it has them."""
    with np.errstate(over="ignore"):  # infinity is refused with its name
        return {
            name: (arrays[of].T if of in _TRANSPOSED else arrays[of]).astype(np.float32, copy=False)
            for of, name in names.items()
        }


def _dictionary(kind: Kind, arrays: dict[str, Rows], source: Source, **more: Any) -> Dictionary:
    with np.errstate(over="ignore"):  # infinity is refused with its name
        gain = np.exp(arrays["r_mag"]) if kind == "gated" else None
    given: dict[str, Any] = {name.lower(): array for name, array in arrays.items()} | more
    given.pop("r_mag", None)
    return Dictionary(kind, source=source, gain=gain, **given)


def _rescaled(arrays: dict[str, Rows], norms: Rows) -> dict[str, Rows]:
    """Return the weights with directions shorter by their norms, and features longer by as much."""
    with np.errstate(all="ignore"):  # what is not finite is refused with its name
        w_enc, b_enc = arrays["W_enc"] * norms, arrays["b_enc"] * norms
        return arrays | {"W_enc": w_enc, "b_enc": b_enc, "W_dec": arrays["W_dec"] / norms[:, None]}


_MATRICES = ("W_enc", "b_enc", "W_dec", "b_dec")
_TRANSPOSED = ("encoder.weight", "decoder.weight")


# SAELens ------------------------------------------------------------------------------------------

_KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
_KINDS["matryoshka_batchtopk"] = "batchtopk"
_TENSORS: dict[Kind, dict[str, str]] = {
    "standard": {"b_enc": "b_enc"},
    "topk": {"b_enc": "b_enc"},
    "jumprelu": {"b_enc": "b_enc", "threshold": "threshold"},
    "batchtopk": {"b_enc": "b_enc", "topk_threshold": "threshold"},
    "gated": {"b_gate": "b_enc", "b_mag": "b_mag", "r_mag": "r_mag"},
}
_FOLD = {
    "expected_average_only_in": "sae.fold_activation_norm_scaling_factor(FACTOR)",
    "covariance_whitening": "sae.fold_activation_whitening(MEAN, MATRIX, INVERSE)",
}


class Metadata(_Model):
    """What SAELens notes of the training; anything else in it is left alone."""

    sae_lens_version: str | None = None
    model_name: str | None = None
    hook_name: str | None = None
    hook_name_out: str | None = None
    hook_head_index: int | None = None
    prepend_bos: StrictBool | None = None
    actds: Any = None


class Config(_Model):
    """``cfg.json``, of version 6 or, where it has no such version, of those before."""

    d_in: int = Field(ge=1, le=1 << 24)
    d_sae: int = Field(ge=1, le=1 << 30)
    architecture: str = "standard"
    apply_b_dec_to_input: StrictBool = True
    normalize_activations: str | StrictBool | None = None
    rescale_acts_by_decoder_norm: StrictBool = False
    k: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    metadata: Metadata | None = None
    # Of 5.x and before.
    sae_lens_version: str | None = None
    activation_fn: str | None = None
    activation_fn_str: str | None = None
    activation_fn_kwargs: dict[str, Any] | None = None
    hook_point: str | None = None
    hook_name: str | None = None
    hook_head_index: int | None = None
    hook_point_head_index: int | None = None
    model_name: str | None = None
    prepend_bos: StrictBool | None = None

    @property
    def version(self) -> str:
        """Return the version of SAELens that wrote it; empty where it says none."""
        of_metadata = self.metadata and self.metadata.sae_lens_version
        return self.sae_lens_version or of_metadata or ""

    @property
    def major(self) -> int:
        return int(re.match(r"\d{0,6}", self.version)[0] or 0)  # type: ignore[index]

    @property
    def described(self) -> Metadata:
        """Return the metadata of any version in the names of version 6."""
        if self.major >= 6:
            return self.metadata or Metadata()
        head = self.hook_head_index
        return Metadata(
            model_name=self.model_name,
            hook_name=self.hook_name or self.hook_point,
            hook_head_index=self.hook_point_head_index if head is None else head,
            prepend_bos=True if self.prepend_bos is None else self.prepend_bos,
        )


def _read_saelens(path: Path, wanted: Wanted) -> Dictionary:
    config_path = path.with_name(CONFIG)
    config = read_config(config_path, Config)
    if config.major > 6:
        next_step = "Save it with SAELens 6: what later ones mean by a file is not known here."
        raise refused(config_path, f"SAELens {config.version}", "6 or before", next_step)
    metadata = config.described
    kind, k = _kind(config_path, config)
    if metadata.hook_name_out is not None:
        got = f"reads {metadata.hook_name} and writes {metadata.hook_name_out}"
        raise refused(config_path, got, "a dictionary of one hook, no transcoder")
    if metadata.hook_head_index is not None:
        raise refused(config_path, f"head {metadata.hook_head_index} alone", "all of a hook")
    normalization = _normalization(config_path, config)
    source = Source("saelens", str(path), "", prepend_bos=metadata.prepend_bos)
    source = recorded(config_path, metadata.actds, source)
    model = metadata.model_name or source.model
    called = source.hook or metadata.hook_name
    places = () if called is None else places_of(called, model)
    hook, hook_from = wanted.hook_of(
        config_path, called, places, "file", model=model, d_model=config.d_in
    )
    names = {name: name for name in ("W_enc", "W_dec", "b_dec")} | _TENSORS[kind]
    arrays = _float32(_tensors(path, kind, names), names)
    source = replace(source, sha256=file_sha256(path), hook=hook, hook_from=hook_from, model=model)
    d, m = config.d_in, config.d_sae
    for name, shape in {"W_enc": (d, m), "W_dec": (m, d), "b_enc": (m,)}.items():
        if arrays[name].shape != shape:
            place = f"{path} {'encoder bias' if name == 'b_enc' else name}"
            raise refused(place, str(arrays[name].shape), f"{shape}, as {CONFIG} says")
    if "threshold" in arrays:
        arrays["threshold"] = vector(path, list(names)[-1], arrays["threshold"], m)
    if config.rescale_acts_by_decoder_norm and kind in ("topk", "batchtopk"):
        with np.errstate(all="ignore"):  # what is not finite is refused with its name
            norms = np.linalg.norm(arrays["W_dec"], axis=1)
        if not norms.all():
            got = f"{int((norms == 0).sum())} features without a direction"
            raise refused(f"{path} W_dec", got, "directions that can be rescaled")
        arrays = _rescaled(arrays, norms)
    apply = config.apply_b_dec_to_input
    return _dictionary(
        kind, arrays, source, k=k, apply_b_dec_to_input=apply, normalization=normalization
    )


def _kind(path: Path, config: Config) -> tuple[Kind, int | None]:
    architecture, k = config.architecture, config.k
    if config.major < 6:
        activation = config.activation_fn_str or config.activation_fn or "relu"
        if activation == "topk":
            architecture, k = "topk", (config.activation_fn_kwargs or {}).get("k")
        elif activation != "relu":
            raise refused(f"{path} activation_fn", repr(activation), "relu or topk")
    kind = _KINDS.get(architecture)
    if kind is None:
        place, known = f"{path} architecture", ", ".join(_KINDS)
        raise refused(place, repr(architecture), f"one of {known}")
    if kind != "topk":
        return kind, None
    if not isinstance(k, int | float) or not float(k).is_integer():
        raise refused(f"{path} k", repr(k), "the active features of a row")
    return kind, int(k)


def _normalization(path: Path, config: Config) -> Normalization:
    normalized = config.normalize_activations
    if isinstance(normalized, bool):  # of 3.x
        normalized = "expected_average_only_in" if normalized else "none"
    normalized = normalized or "none"
    if normalized in ("none", "layer_norm", "constant_norm_rescale"):
        return cast(Normalization, normalized)
    place = f"{path} normalize_activations"
    if normalized in _FOLD:
        next_step = (
            f"Fold it with SAELens and save again: {_FOLD[normalized]}; its trainer does so at the "
            "end, its checkpoints are not folded."
        )
        raise refused(place, f"{normalized}, not folded", "weights for rows as they are", next_step)
    raise refused(place, repr(normalized), "none, layer_norm or constant_norm_rescale")


def _tensors(path: Path, kind: Kind, names: Mapping[str, str]) -> dict[str, Array]:
    tensors = _unscaled(path, read_safetensors(path))
    if kind == "jumprelu" and "log_threshold" in tensors:  # of a trainer before 6.0
        with np.errstate(over="ignore"):
            tensors["threshold"] = np.exp(tensors.pop("log_threshold").astype(np.float32))
    return of_names(path, tensors, tuple(names))


def _unscaled(path: Path, stored: Tensors) -> dict[str, Array]:
    tensors = dict(stored)
    factor = tensors.pop("scaling_factor", None)
    if factor is not None and not np.allclose(factor.astype(np.float32), 1):
        raise refused(f"{path} scaling_factor", "factors other than 1", "none, as SAELens 6 has")
    return tensors


# Gemma Scope --------------------------------------------------------------------------------------

_REPOSITORY = re.compile(r"gemma-scope-(2b|9b|27b)-(pt|it)-(res|mlp|att)(?![a-z])")
_LAYER = re.compile(r"layer_(\d{1,6})")
_HOOKS = {"res": "hook_resid_post", "mlp": "hook_mlp_out", "att": "attn.hook_z"}


def _read_gemma_scope(path: Path, wanted: Wanted) -> Dictionary:
    model, called, layer = _of_folders(path)
    places = () if called is None else places_of(called, model)
    hook, hook_from = wanted.hook_of(path, called, places, "path", model=model, layer=layer)
    stored = _unscaled(path, {re.sub("^w_", "W_", n): array for n, array in read_npz(path).items()})
    stored = of_names(path, stored, (*_MATRICES, "threshold"))
    arrays = _float32(stored, {name: name for name in stored})
    if arrays["W_enc"].ndim != 2:
        raise refused(f"{path} W_enc", str(arrays["W_enc"].shape), "(d_model, n_features)")
    d_model, n_features = arrays["W_enc"].shape
    wanted.refuse_other_width(path, d_model)
    arrays["threshold"] = vector(path, "threshold", arrays["threshold"], n_features)
    # As SAELens has it; the file does not say it.
    bos = None if model is None else True
    source = Source("gemma_scope", str(path), file_sha256(path), hook, hook_from, model, bos)
    return _dictionary("jumprelu", arrays, source, apply_b_dec_to_input=False)


def _of_folders(path: Path) -> tuple[str | None, str | None, int | None]:
    parts = path.absolute().parts[:-1]
    for part in parts:
        if "gemma-scope" in part and "transcoder" in part:
            raise refused(path, "a transcoder", "a dictionary of one hook")
    layers = [match[1] for part in parts if (match := _LAYER.fullmatch(part))]
    layer = int(layers[-1]) if layers else None
    match = next((m for part in reversed(parts) if (m := _REPOSITORY.search(part))), None)
    if match is None:
        return None, None, layer
    if "embedding" in parts:
        expected = "a dictionary of the stream, the heads or the MLP: embeddings are scaled"
        raise refused(path, "a dictionary of the embedding", expected)
    model = f"gemma-2-{match[1]}{'-it' if match[2] == 'it' else ''}"
    if layer is None:
        return model, None, None
    return model, f"blocks.{layer}.{_HOOKS[match[3]]}", layer


# dictionary_learning ------------------------------------------------------------------------------

ClassName = Literal[
    "AutoEncoder",
    "AutoEncoderNew",
    "GatedAutoEncoder",
    "AutoEncoderTopK",
    "BatchTopKSAE",
    "MatryoshkaBatchTopKSAE",
    "JumpReluAutoEncoder",
]
_LINEAR = {"encoder.weight": "W_enc", "encoder.bias": "b_enc", "decoder.weight": "W_dec"}
_THRESHOLD = {name: name for name in (*_MATRICES, "threshold")}
_CLASSES: dict[ClassName, tuple[Kind, dict[str, str]]] = {
    "AutoEncoder": ("standard", _LINEAR | {"bias": "b_dec"}),
    "AutoEncoderNew": ("standard", _LINEAR | {"decoder.bias": "b_dec"}),
    "GatedAutoEncoder": (
        "gated",
        {
            "encoder.weight": "W_enc",
            "decoder.weight": "W_dec",
            "decoder_bias": "b_dec",
            "r_mag": "r_mag",
            "gate_bias": "b_enc",
            "mag_bias": "b_mag",
        },
    ),
    "AutoEncoderTopK": ("topk", _LINEAR | {"b_dec": "b_dec"}),
    "BatchTopKSAE": ("batchtopk", _LINEAR | {"b_dec": "b_dec", "threshold": "threshold"}),
    "MatryoshkaBatchTopKSAE": ("batchtopk", _THRESHOLD),
    "JumpReluAutoEncoder": ("jumprelu", _THRESHOLD),
}
"""Kind of each class, and of its tensors the names that SAELens has for them."""
_COUNTS = ("k", "group_sizes")
_SUBMODULE = re.compile(r"(resid_post|resid_pre|mlp_out|attn_out)_layer_(\d{1,6})")


class Trainer(_Model):
    """What the trainer says of itself."""

    dict_class: ClassName | None = None
    activation_dim: int | None = Field(default=None, ge=1)
    dict_size: int | None = Field(default=None, ge=1)
    k: int | None = Field(default=None, ge=1)
    layer: int | None = Field(default=None, ge=0, lt=1_000_000)
    lm_name: str | None = None
    submodule_name: str | None = None


class Training(_Model):
    """``config.json``; ``buffer`` is what the source of the rows says of itself."""

    trainer: Trainer = Trainer()
    buffer: Any = None


def _read_dictionary_learning(path: Path, wanted: Wanted) -> Dictionary:
    # The configuration is optional where the tensors' names tell the class.
    config_path = path.with_name(TRAINING)
    config = read_config(config_path, Training) if config_path.exists() else Training()
    trainer = config.trainer
    source = recorded(config_path, config.buffer, Source("dictionary_learning", str(path), ""))
    model, (called, places) = trainer.lm_name or source.model, _place(trainer, source.hook)
    width, layer = trainer.activation_dim, trainer.layer
    hook, hook_from = wanted.hook_of(
        config_path, called, places, "file", model=model, d_model=width, layer=layer
    )
    tensors = read_torch(path)
    name = _class_name(path, trainer, tensors)
    source = replace(source, sha256=file_sha256(path), hook=hook, hook_from=hook_from, model=model)
    dictionary = _of_class(path, name, trainer.k, tensors, source)
    wanted.refuse_other_width(path, dictionary.d_model)
    sizes = (dictionary.d_model, dictionary.n_features)
    expected = (trainer.activation_dim or sizes[0], trainer.dict_size or sizes[1])
    if sizes != expected:
        raise refused(path, f"{sizes} channels and features", f"{expected}, as {TRAINING} says")
    return dictionary


def _of_class(
    path: Path, class_name: ClassName, k: int | None, tensors: Tensors, source: Source
) -> Dictionary:
    kind, names = _CLASSES[class_name]
    floats = {name: array for name, array in tensors.items() if name not in _COUNTS}
    optional = ("threshold",) if kind == "topk" else ()
    arrays = _float32(of_names(path, floats, tuple(names), optional), names)
    w_enc, w_dec = arrays["W_enc"], arrays["W_dec"]
    if w_enc.ndim != 2 or w_dec.shape != w_enc.shape[::-1]:
        raise refused(path, f"an encoder {w_enc.shape}, a decoder {w_dec.shape}", "as many rows")
    if "threshold" in arrays:
        threshold = vector(path, "threshold", arrays["threshold"], w_enc.shape[1])
        arrays["threshold"] = threshold
        if kind == "batchtopk" and (threshold < 0).any():
            raise refused(
                f"{path} threshold",
                f"{threshold.min():g}: it was never estimated",
                "0 or more",
                "Train for more steps than threshold_start_step (1,000 by default), and save "
                "again.",
            )
    if class_name == "AutoEncoder":
        if arrays["b_enc"].shape != w_enc.shape[1:]:
            place, shape = f"{path} encoder.bias", str(arrays["b_enc"].shape)
            raise refused(place, shape, f"{w_enc.shape[1:]}")
        with np.errstate(all="ignore"):  # what is not finite is refused with its name
            norms = np.linalg.norm(w_dec, axis=1)
            is_scaled = not np.allclose(norms, 1)
        norms[norms == 0] = 1  # a dead feature stays one
        arrays = _rescaled(arrays, norms) if is_scaled else arrays
    active = _k(path, k, tensors) if kind == "topk" else None
    apply = class_name not in ("AutoEncoderNew", "JumpReluAutoEncoder")
    return _dictionary(kind, arrays, source, k=active, apply_b_dec_to_input=apply)


def _k(path: Path, configured: int | None, tensors: Tensors) -> int:
    stored = tensors.get("k")
    if stored is not None and (stored.size != 1 or stored.dtype.kind not in "iu"):
        raise refused(f"{path} k", f"{stored.dtype} {stored.shape}", "one integer")
    known = {k for k in (configured, None if stored is None else int(stored.reshape(()))) if k}
    if len(known) != 1:
        got = f"{stored} here, {configured} in {TRAINING}" if known else f"no k, nor in {TRAINING}"
        raise refused(f"{path} k", got, "the active features of a row")
    return known.pop()


def _class_name(path: Path, trainer: Trainer, tensors: Tensors) -> ClassName:
    if trainer.dict_class is not None:
        return trainer.dict_class
    if "group_sizes" in tensors:
        return "MatryoshkaBatchTopKSAE"
    if "k" in tensors:
        got = f"tensors of AutoEncoderTopK or of BatchTopKSAE, and no {TRAINING}"
        raise refused(path, got, f"{TRAINING} of its trainer beside it, with dict_class and k")
    for name, (kind, names) in _CLASSES.items():
        if kind not in ("topk", "batchtopk") and set(tensors) == set(names):
            return name
    got = f"tensors {', '.join(sorted(tensors))}"
    raise refused(path, got, f"those of {', '.join(get_args(ClassName))}")


def _place(trainer: Trainer, of_loader: str | None) -> tuple[str | None, tuple[str, ...]]:
    if of_loader is not None:
        return of_loader, (of_loader,)
    called = trainer.submodule_name
    if called is None:
        return None, ()
    if match := _SUBMODULE.fullmatch(called):
        return called, (f"{match[1]}.{int(match[2])}",)
    return called, places_of(called, trainer.lm_name)
