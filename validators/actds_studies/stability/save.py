"""Trained dictionaries as files: the folder of SAELens that ``actds regimes --sae`` reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from actds.exchange.containers import NewTensor, write_tensors
from actds.store import refuse_within_dataset
from actds.text import storable
from actds.version import __version__
from actds_studies.dictionaries import Dictionary
from actds_studies.dictionaries.places import places_of
from actds_studies.dictionaries.saelens import CONFIG, WEIGHTS
from actds_studies.stability.arms import Arm
from actds_validators.about import about
from actds_validators.audit.outputs import unwritable


def refuse_out(out: Path) -> None:
    """Refuse a folder for dictionaries that cannot be made anew.

    Raises:
        ActdsError: E009 it is inside a dataset; E503 something is there already, or the folder
            around it is not.
    """
    refuse_within_dataset(out, "out")
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise unwritable(out, "it is there already", "Give a new folder.")
    if not out.parent.is_dir():
        raise unwritable(out, f"no folder {out.parent}", "Make the folder, or give another path.")


def save(
    folder: Path, dictionary: Dictionary, arm: Arm, hook: str, held_out: float, trained: Any
) -> None:
    """Write a dictionary with the record of what it was trained on.

    Args:
        held_out: share of the requests that it has not seen.

    Raises:
        ActdsError: E503 the folder cannot be written.
    """
    dataset, path = arm.dataset, storable(arm.dataset.path)
    models = about(dataset.catalog, "").models
    model = models[0] if len(models) == 1 else None
    config = {
        "architecture": "topk",
        "d_in": dictionary.d_model,
        "d_sae": dictionary.n_features,
        "k": dictionary.k,
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "metadata": {
            "sae_lens_version": "6.0.0",
            "model_name": model,
            "hook_name": _name_elsewhere(hook, model),
            "actds": {
                "format": "actds.loader",
                "actds": __version__,
                "dataset": path,
                "digest": dataset.digest,
                "datasets": [{"path": path, "digest": dataset.digest}],
                "models": list(dataset.models),
                "hooks": [hook],
                "split": ["train", held_out],
                "stability": trained,
            },
        },
    }
    arrays = {
        "W_enc": dictionary.w_enc,
        "b_enc": dictionary.b_enc,
        "W_dec": dictionary.w_dec,
        "b_dec": dictionary.b_dec,
    }
    try:
        folder.mkdir(parents=True)
        tensors = {
            name: NewTensor("float32", array.shape, [np.ascontiguousarray(array)])
            for name, array in arrays.items()
        }
        write_tensors(folder / WEIGHTS, tensors, {})
        (folder / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error.strerror or str(error), "Give another folder.") from None


def _name_elsewhere(hook: str, model: str | None) -> str:
    """Return what SAELens calls a hook; its own name where there is none."""
    kind, _, layer = hook.rpartition(".")
    names = [f"blocks.{layer}.hook_{kind}", f"blocks.{layer}.hook_{kind.removesuffix('_post')}"]
    names += [f"blocks.{layer}.attn.hook_{name}" for name in (kind, f"rot_{kind}")]
    return next((name for name in names if places_of(name, model)[:1] == (hook,)), hook)
