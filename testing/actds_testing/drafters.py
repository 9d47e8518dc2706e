"""Drafters of a tiny model, for speculative decoding: models and heads that are sometimes right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

METHODS = ("draft_model", "eagle", "eagle3", "mtp")
N_DRAFTS = 3
_TOP = "model.layers.3."


def make_drafter(method: str, path: Path, model: Path) -> dict[str, Any]:
    """Write a drafter of a model of ``make_random_model``; return its ``speculative_config``.

    A draft model has the target's class, names and weights, slightly changed; a head has the
    target's last layer. The MTP layer of ``mtp`` is in the folder of a target of its own.

    Args:
        method: one of ``METHODS``.
        path: folder to make.
    """
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    hidden = int(config["hidden_size"])
    own = {name.removeprefix(_TOP): value for name, value in weights.items() if _TOP in name}
    chance = torch.Generator().manual_seed(3)

    def small(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=chance) / 50

    made: dict[str, torch.Tensor] = {}
    given: dict[str, Any] = {"method": method, "num_speculative_tokens": N_DRAFTS}
    if method == "draft_model":
        made = {name: value + small(*value.shape) / 4 for name, value in weights.items()}
    elif method == "mtp":
        config |= {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"],
                   "num_nextn_predict_layers": 1}  # fmt: skip
        made = {**weights, **{f"model.mtp_layers.0.{name}": own[name].clone() for name in own}}
        for name in list(made):
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                made[name.replace("weight", "bias")] = small(len(made[name]))
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            made[f"model.mtp_layers.0.{name}.weight"] = torch.ones(hidden)
        made["model.mtp_layers.0.input_proj.weight"] = torch.cat([torch.eye(hidden)] * 2, 1)
    else:
        n_states = 2 if method == "eagle" else 3
        layer = "layers.0." if method == "eagle" else "midlayer."
        eye = torch.eye(hidden)
        made = {"fc.weight": torch.cat([eye] * n_states, 1) / n_states}
        made |= {f"{layer}{name}": value for name, value in own.items()}
        if method == "eagle":
            del made[f"{layer}input_layernorm.weight"]
        else:
            made["norm.weight"] = weights["model.norm.weight"]
            made["lm_head.weight"] = weights["lm_head.weight"]
            made[f"{layer}hidden_norm.weight"] = torch.ones(hidden)
            for name in ("q_proj", "k_proj", "v_proj"):
                key = f"{layer}self_attn.{name}.weight"
                made[key] = torch.cat([made[key], made[key]], 1)
            config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
        config["num_hidden_layers"] = 1
    shutil.copytree(model, path, ignore=shutil.ignore_patterns("*.safetensors"))
    (path / "config.json").write_text(json.dumps(config))
    save_file(made, path / "model.safetensors")
    return given if method == "mtp" else {**given, "model": str(path)}
