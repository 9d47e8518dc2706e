"""SAELens: a folder of ``cfg.json`` and ``sae_weights.safetensors``.

Read as SAELens 6.54 does (``sae_lens.saes``, ``loading.pretrained_sae_loaders``): configurations
of 5.x and before are given its defaults for them; what a trainer of BatchTopK saved is read as the
JumpReLU dictionary that it becomes for inference. Activations are float32, whatever ``dtype`` says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from actds_studies.dictionaries.dictionary import Dictionary, Kind, Normalization, Source
from actds_studies.dictionaries.places import Wanted, places_of, recorded
from actds_studies.dictionaries.tensors import (
    Tensors,
    file_sha256,
    of_names,
    read_config,
    read_safetensors,
    refused,
    vector,
)

CONFIG = "cfg.json"
WEIGHTS = "sae_weights.safetensors"

_KINDS: dict[str, Kind] = {
    "standard": "standard",
    "topk": "topk",
    "jumprelu": "jumprelu",
    "gated": "gated",
    "batchtopk": "batchtopk",
    "matryoshka_batchtopk": "batchtopk",
}
_TENSORS: dict[Kind, tuple[str, ...]] = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "batchtopk": ("b_enc", "topk_threshold"),
    "gated": ("b_gate", "b_mag", "r_mag"),
}
_FOLD = {
    "expected_average_only_in": "sae.fold_activation_norm_scaling_factor(FACTOR)",
    "covariance_whitening": "sae.fold_activation_whitening(MEAN, MATRIX, INVERSE)",
}


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


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
        """Return the first number of the version; 0 where it says none."""
        number = re.match(r"\d{1,6}", self.version)
        return int(number[0]) if number else 0

    @property
    def is_old(self) -> bool:
        """Return whether it was written before version 6."""
        return self.major < 6


def read_saelens(folder: Path, wanted: Wanted) -> Dictionary:
    """Return the dictionary of a SAELens folder.

    Raises:
        ActdsError: E015 files that are missing or damaged, an architecture that is no sparse
            autoencoder of one hook, a normalization that is not folded into the weights, or
            weights that are not those of the configuration; another hook, width or model.
    """
    path, config_path = folder / WEIGHTS, folder / CONFIG
    config = read_config(config_path, Config)
    if config.major > 6:
        next_step = "Save it with SAELens 6: what later ones mean by a file is not known here."
        raise refused(config_path, f"SAELens {config.version}", "6 or before", next_step)
    metadata = _metadata(config)
    kind, k = _kind(config_path, config)
    if metadata.hook_name_out is not None:
        got = f"reads {metadata.hook_name} and writes {metadata.hook_name_out}"
        raise refused(config_path, got, "a dictionary of one hook, no transcoder")
    if metadata.hook_head_index is not None:
        raise refused(config_path, f"head {metadata.hook_head_index} alone", "all of a hook")
    normalization = _normalization(config_path, config)
    of_loader = recorded(config_path, metadata.actds)
    model = metadata.model_name or of_loader.model
    wanted.refuse_other_model(config_path, model)
    wanted.refuse_other_width(config_path, config.d_in)
    called = of_loader.hook or metadata.hook_name
    places = () if called is None else places_of(called, model)
    hook, hook_from = wanted.hook_of(config_path, called, places, "file")
    tensors = _tensors(path, kind)
    source = Source(
        "saelens", str(path), file_sha256(path), hook, hook_from, model, metadata.prepend_bos,
        of_loader.digests, of_loader.held_out, of_loader.weights,
    )  # fmt: skip
    return _dictionary(path, config, kind, k, normalization, tensors, source)


def _dictionary(
    path: Path,
    config: Config,
    kind: Kind,
    k: int | None,
    normalization: Normalization,
    tensors: Tensors,
    source: Source,
) -> Dictionary:
    names = ("W_enc", "W_dec", "b_gate" if kind == "gated" else "b_enc")
    with np.errstate(over="ignore"):  # infinity is refused with its name
        w_enc, w_dec, b_enc = (tensors[name].astype(np.float32, copy=False) for name in names)
    d, m = config.d_in, config.d_sae
    shapes = {"W_enc": (w_enc, (d, m)), "W_dec": (w_dec, (m, d)), "encoder bias": (b_enc, (m,))}
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise refused(f"{path} {name}", str(array.shape), f"{shape}, as {CONFIG} says")
    threshold = gain = b_mag = None
    if kind == "gated":
        with np.errstate(over="ignore"):  # infinity is refused with its name
            gain = np.exp(tensors["r_mag"].astype(np.float32))
        b_mag = tensors["b_mag"]
    elif kind in ("jumprelu", "batchtopk"):
        name = _TENSORS[kind][1]
        threshold = vector(path, name, tensors[name], m)
    if config.rescale_acts_by_decoder_norm and kind in ("topk", "batchtopk"):
        with np.errstate(all="ignore"):  # what is not finite is refused with its name
            norms = np.linalg.norm(w_dec, axis=1)
            if not norms.all():
                got = f"{int((norms == 0).sum())} features without a direction"
                raise refused(f"{path} W_dec", got, "directions that can be rescaled")
            w_enc, b_enc, w_dec = w_enc * norms, b_enc * norms, w_dec / norms[:, None]
    return Dictionary(
        kind, w_enc, b_enc, w_dec, tensors["b_dec"], source, k=k, threshold=threshold, gain=gain,
        b_mag=b_mag, apply_b_dec_to_input=config.apply_b_dec_to_input,
        normalization=normalization,
    )  # fmt: skip


def _kind(path: Path, config: Config) -> tuple[Kind, int | None]:
    """Return the kind, and the active features of a row where it has a fixed number."""
    architecture, k = config.architecture, config.k
    if config.is_old:
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


def _tensors(path: Path, kind: Kind) -> Tensors:
    tensors = dict(read_safetensors(path))
    if (factor := tensors.pop("scaling_factor", None)) is not None and not np.allclose(
        factor.astype(np.float32), 1
    ):
        raise refused(f"{path} scaling_factor", "factors other than 1", "none, as SAELens 6 has")
    if kind == "jumprelu" and "log_threshold" in tensors:  # of a trainer before 6.0
        with np.errstate(over="ignore"):
            tensors["threshold"] = np.exp(tensors.pop("log_threshold").astype(np.float32))
    return of_names(path, tensors, ("W_enc", "W_dec", "b_dec", *_TENSORS[kind]))


def _metadata(config: Config) -> Metadata:
    """Return the metadata of any version in the names of version 6."""
    if not config.is_old:
        return config.metadata or Metadata()
    return Metadata(
        model_name=config.model_name,
        hook_name=config.hook_name or config.hook_point,
        hook_head_index=config.hook_head_index
        if config.hook_head_index is not None
        else config.hook_point_head_index,
        prepend_bos=True if config.prepend_bos is None else config.prepend_bos,
    )
