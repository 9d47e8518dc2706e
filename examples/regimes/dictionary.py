"""A small TopK dictionary of one hook, fitted with PyTorch and saved as SAELens saves one."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import actds


def fit(
    dataset: Path,
    hook: str,
    out: Path,
    *,
    held_out: float,
    features: int,
    k: int,
    steps: int,
    batch: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Fit a dictionary on the requests that are not held out, and return how it went.

    The rows are scaled to a mean norm of sqrt(d_model), by a factor that is folded into the weights
    at the end: the file is for rows as they are stored. Its cfg.json has the loader's record,
    by which ``actds regimes`` knows which requests it must not be scored on.
    """
    torch.manual_seed(seed)
    with actds.Loader(
        dataset, hook, batch=batch, seed=seed, epochs=None, dtype="float32",
        exclude="first_position", split="train", held_out=held_out,
    ) as loader:  # fmt: skip
        (place,) = loader.hooks.values()
        batches = iter(loader)
        some = torch.cat(list(islice(batches, 8)))
        scale = place.d_model**0.5 / some.norm(dim=1).mean().item()
        weights = _start(some * scale, features)
        losses = _train(batches, weights, scale, k, steps)
        record, n_rows = loader.config, loader.progress.n_rows
    _save(out, weights, scale, k, hook, record)
    return {
        "hook": hook, "features": features, "k": k, "steps": steps, "batch": batch,
        "rows_read": n_rows, "fvu_first": losses[0], "fvu_last": sum(losses[-20:]) / 20,
    }  # fmt: skip


def _start(rows: torch.Tensor, features: int) -> dict[str, torch.Tensor]:
    """Return weights that begin at the mean of rows ``(n, d_model)``, in random directions."""
    mean = rows.mean(dim=0)
    atoms = torch.nn.functional.normalize(torch.randn(features, rows.shape[1]), dim=1)
    start = {
        "W_enc": atoms.T.clone(),
        "W_dec": atoms,
        "b_enc": torch.zeros(features),
        "b_dec": mean,
    }
    return {name: torch.nn.Parameter(value) for name, value in start.items()}


def _train(
    batches: Any, weights: dict[str, torch.Tensor], scale: float, k: int, steps: int
) -> list[float]:
    """Return the fraction of variance unexplained of each batch, while fitting the weights."""
    optimizer = torch.optim.Adam(weights.values(), lr=1e-3)
    losses = []
    for rows in islice(batches, steps):
        x = rows * scale
        latents = (x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
        top = latents.topk(k, dim=1)
        active = torch.zeros_like(latents).scatter(1, top.indices, torch.relu(top.values))
        rebuilt = active @ weights["W_dec"] + weights["b_dec"]
        loss = (rebuilt - x).square().sum() / (x - x.mean(dim=0)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            weights["W_dec"] /= weights["W_dec"].norm(dim=1, keepdim=True)
        losses.append(loss.item())
    return losses


def _save(
    out: Path, weights: dict[str, torch.Tensor], scale: float, k: int, hook: str, record: Any
) -> None:
    """Write both files of a SAELens folder, for rows as they are stored."""
    out.mkdir(parents=True, exist_ok=True)
    w = {name: value.detach() for name, value in weights.items()}
    folded = {
        "W_enc": w["W_enc"] * scale, "b_enc": w["b_enc"],
        "W_dec": w["W_dec"] / scale, "b_dec": w["b_dec"] / scale,
    }  # fmt: skip
    save_file({n: v.contiguous() for n, v in folded.items()}, out / "sae_weights.safetensors")
    kind, layer = hook.split(".")
    config = {
        "architecture": "topk", "d_in": w["W_enc"].shape[0], "d_sae": w["W_enc"].shape[1], "k": k,
        "apply_b_dec_to_input": True, "normalize_activations": "none",
        "metadata": {"sae_lens_version": "6.0.0", "actds": record,
                     "hook_name": f"blocks.{layer}.hook_{kind}"},
    }  # fmt: skip
    (out / "cfg.json").write_text(json.dumps(config, indent=1))
