"""Loading: which of the formats a path has, by what is in it, and the dictionary in it.

Also Gemma Scope itself, ``params.npz``: a JumpReLU dictionary of Gemma 2. The file has the weights
and nothing else; where it was trained is in the names of its folders, as the repositories
``google/gemma-scope-*`` have them. Read as ``gemma_2_sae_huggingface_loader`` of SAELens 6.54 does:
the decoder's bias is not taken off the input, and nothing is normalized.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from actds_studies.dictionaries import dictionary_learning, saelens
from actds_studies.dictionaries.dictionary import Dictionary, Source
from actds_studies.dictionaries.places import Wanted, places_of
from actds_studies.dictionaries.tensors import (
    file_sha256,
    is_npz,
    is_torch,
    of_names,
    read_npz,
    refused,
    vector,
)

PARAMETERS = "params.npz"
_REPOSITORY = re.compile(r"gemma-scope-(2b|9b|27b)-(pt|it)-(res|mlp|att)(?![a-z])")
_LAYER = re.compile(r"layer_(\d{1,6})")
_HOOKS = {"res": "hook_resid_post", "mlp": "hook_mlp_out", "att": "attn.hook_z"}
_NAMES = ("W_enc", "b_enc", "W_dec", "b_dec", "threshold")
_EXPECTED = (
    f"a folder with {saelens.CONFIG} and {saelens.WEIGHTS} (SAELens), with "
    f"{PARAMETERS} (Gemma Scope) or {dictionary_learning.WEIGHTS} "
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


def _of_path(path: Path, wanted: Wanted) -> Dictionary:
    if path.is_dir():
        return _of_folder(path, wanted)
    if not path.is_file():
        raise refused(path, "no such file or folder", _EXPECTED)
    if is_npz(path):
        return read_gemma_scope(path, wanted)
    if is_torch(path):
        return dictionary_learning.read_dictionary_learning(path, wanted)
    if path.name in (saelens.CONFIG, saelens.WEIGHTS):
        return saelens.read_saelens(path.parent, wanted)
    with path.open("rb") as file:
        start = file.read(2)
    if start[:1] == b"\x80":
        next_step = "Nothing in it was run. Save it again with torch 1.6 or newer, weights alone."
        raise refused(path, "a bare pickle", _EXPECTED, next_step)
    got = "a zip that is cut, or without weights" if start == b"PK" else f"a file of {start!r}…"
    raise refused(path, got, _EXPECTED)


def _of_folder(path: Path, wanted: Wanted) -> Dictionary:
    names = (saelens.WEIGHTS, PARAMETERS, dictionary_learning.WEIGHTS)
    present = [name for name in names if (path / name).is_file()]
    if len(present) > 1:
        raise refused(path, f"{' and '.join(present)}", "the path of one of them")
    if not present:
        for name in names:
            if os.path.lexists(path / name):
                raise refused(path / name, "no regular file", "a file of weights")
        inside = sorted(file.name for file in path.iterdir())[:8]
        raise refused(path, f"a folder with {', '.join(inside) or 'nothing'}", _EXPECTED)
    if present == [saelens.WEIGHTS]:
        return saelens.read_saelens(path, wanted)
    if present == [PARAMETERS]:
        return read_gemma_scope(path / PARAMETERS, wanted)
    return dictionary_learning.read_dictionary_learning(path / dictionary_learning.WEIGHTS, wanted)


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
    stored = {_name(name): array for name, array in read_npz(path).items()}
    factor = stored.pop("scaling_factor", None)
    if factor is not None and not np.allclose(factor, 1):
        raise refused(f"{path} scaling_factor", "factors other than 1", "none, as SAELens 6 has")
    arrays = of_names(path, stored, _NAMES)
    if arrays["W_enc"].ndim != 2:
        raise refused(f"{path} W_enc", str(arrays["W_enc"].shape), "(d_model, n_features)")
    d_model, n_features = arrays["W_enc"].shape
    wanted.refuse_other_width(path, d_model)
    source = Source(
        "gemma_scope",
        str(path),
        file_sha256(path),
        hook,
        hook_from,
        model,
        # As SAELens has it; the file does not say it.
        prepend_bos=None if model is None else True,
    )
    return Dictionary(
        "jumprelu",
        arrays["W_enc"],
        arrays["b_enc"],
        arrays["W_dec"],
        arrays["b_dec"],
        source,
        threshold=vector(path, "threshold", arrays["threshold"], n_features),
        apply_b_dec_to_input=False,
    )


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
