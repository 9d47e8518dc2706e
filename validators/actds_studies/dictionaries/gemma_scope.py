"""Gemma Scope: ``params.npz``, a JumpReLU dictionary of Gemma 2.

The file has the weights and nothing else; where it was trained stands in the names of its folders,
as the repositories ``google/gemma-scope-*`` have them. Read as ``gemma_2_sae_huggingface_loader``
of SAELens 6.54 does: the decoder's bias is not taken off the input, and nothing is normalized.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from actds_studies.dictionaries.dictionary import Dictionary, Source
from actds_studies.dictionaries.places import places_of
from actds_studies.dictionaries.refusal import refused
from actds_studies.dictionaries.tensors import file_sha256, of_names, read_npz, vector
from actds_studies.dictionaries.wanted import Wanted

PARAMETERS = "params.npz"
_REPOSITORY = re.compile(r"gemma-scope-(2b|9b|27b)-(pt|it)-(res|mlp|att)(?![a-z])")
_LAYER = re.compile(r"layer_(\d{1,6})")
_HOOKS = {"res": "hook_resid_post", "mlp": "hook_mlp_out", "att": "attn.hook_z"}
_NAMES = ("W_enc", "b_enc", "W_dec", "b_dec", "threshold")


def read_gemma_scope(path: Path, wanted: Wanted) -> Dictionary:
    """Return the dictionary of a ``params.npz``.

    Raises:
        ActdsError: E015 a file that is missing or damaged, has other arrays, or whose folders name
            a transcoder, an embedding, another hook or another model; another width.
    """
    model, called, layer = _of_folders(path)
    wanted.refuse_other_model(path, model)
    places = () if called is None else places_of(called, model)
    hook, hook_from = wanted.hook_of(path, called, places, "path")
    wanted.refuse_other_layer(path, layer)
    found = {_name(name): array for name, array in read_npz(path).items()}
    factor = found.pop("scaling_factor", None)
    if factor is not None and not np.allclose(factor, 1):
        raise refused(f"{path} scaling_factor", "factors other than 1", "none, as SAELens 6 has")
    arrays = of_names(path, found, _NAMES)
    if arrays["W_enc"].ndim != 2:
        raise refused(f"{path} W_enc", str(arrays["W_enc"].shape), "(d_model, n_features)")
    d_model, n_features = arrays["W_enc"].shape
    wanted.refuse_other_width(path, d_model)
    source = Source(
        "gemma_scope", str(path), file_sha256(path), hook, hook_from, model,
        # As SAELens has it; the file does not say it.
        prepend_bos=None if model is None else True,
    )  # fmt: skip
    return Dictionary(
        "jumprelu", arrays["W_enc"], arrays["b_enc"], arrays["W_dec"], arrays["b_dec"], source,
        threshold=vector(path, "threshold", arrays["threshold"], n_features),
        apply_b_dec_to_input=False,
    )  # fmt: skip


def _of_folders(path: Path) -> tuple[str | None, str | None, int | None]:
    """Return the model, the hook as TransformerLens names it, and the layer."""
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


def _name(name: str) -> str:
    return f"W_{name[2:]}" if name.startswith("w_") else name
