"""What the rows of several kinds have to add up to, whatever the modules are called.

A decoder layer adds to its stream what its attention returns and what its MLP returns, as a rule
one after the other, in some families times one constant. Rows of a plain forward that do not add
up so were read at a place whose name means something else in that family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

NEEDED = (
    "resid_pre", "resid_mid", "resid_post", "attn_out", "attn_out_post", "mlp_out", "mlp_out_post",
)  # fmt: skip
OF_ATTENTION = ("attn_out", "attn_out_post")
OF_MLP = ("mlp_out", "mlp_out_post")
NEAR = 1e-3
"""Largest distance, relative to what is added; with rounding of the stream beside it."""


def require_sums(
    rows: Mapping[tuple[str, int], torch.Tensor], places: Mapping[str, Iterable[int]]
) -> list[tuple[str, int]]:
    """Return the kind and layer of rows that do not add up as their kind says.

    Args:
        rows: ``(n, d_model)`` by kind and layer, with all of ``NEEDED`` that the model has.
        places: layers by kind, of which those in ``NEEDED`` are looked at.
    """
    odd = []
    for kind, layers in places.items():
        if kind in ("resid_mid", *OF_ATTENTION, *OF_MLP):
            for layer in list(layers):
                here = {k: r for (k, at), r in rows.items() if at == layer and k in NEEDED}
                if not _adds_up(kind, here):
                    odd.append((kind, layer))
    return odd


def _adds_up(kind: str, here: Mapping[str, torch.Tensor]) -> bool:
    before, after = here.get("resid_pre"), here.get("resid_post")
    if before is None or after is None or before.shape != after.shape:
        return False
    attention: Any = here.get("attn_out_post", here.get("attn_out"))
    mlp: Any = here.get("mlp_out_post", here.get("mlp_out"))
    middle = here.get("resid_mid")
    if middle is None or middle.equal(before):  # side by side, or one block alone
        if kind == "resid_mid":
            return False
        blocks = [block for block in (attention, mlp) if block is not None]
        return _along(after - before, sum(blocks[1:], blocks[0]), before)
    of_attention = attention is not None and _along(middle - before, attention, before)
    of_mlp = mlp is not None and _along(after - middle, mlp, before)
    if kind == "resid_mid":
        return of_attention or (attention is None and of_mlp)
    return of_attention if kind in OF_ATTENTION else of_mlp


def _along(added: torch.Tensor, block: torch.Tensor, stream: torch.Tensor) -> bool:
    """Return whether what is added is a block's output times one constant."""
    if added.shape != block.shape or not bool(block.any()):
        return False
    eps = torch.finfo(stream.dtype).eps
    rounding = 100 * eps if stream.dtype == torch.float32 else 2 * eps
    added, block, stream = added.float(), block.float(), stream.float()
    times = (added * block).sum() / (block * block).sum()
    apart = (added - times * block).norm(dim=-1)
    allowed = max(NEAR, 2 * eps) * added.norm(dim=-1) + rounding * stream.norm(dim=-1)
    return bool((apart <= allowed).all()) and bool(times)
