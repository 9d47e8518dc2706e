"""What the logits say of a sampled token: entropy, log-probability and margin, on their device.

The logits are read as the model returns them, before a sampler changes them, and the token's own
value is taken when it is sampled. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK_VALUES = 1 << 24
"""Most logits that are in float32 at a time on a GPU, 64 MiB; on a CPU it is a row, which fits its
cache and is several times as fast."""
_GROUPS = 64
_FLOOR = -1e4
"""Instead of a logit of minus infinity: its probability is 0, and 0 times infinity is no number."""


@dataclass(frozen=True)
class Reading:
    """The logits of the rows of a step that are sampled from.

    Args:
        logits: ``(n, vocabulary)`` as the model returned them, of its type.
        values: float32 ``(n, 4)``: entropy, margin, largest logit, its log-probability.
    """

    logits: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, n_at_once: int | None = None) -> Reading:
        """Return the reading of logits that a sampler may change afterwards.

        Args:
            n_at_once: rows that are in float32 at a time, ``None`` to choose.
        """
        if not len(logits):
            return cls(logits, logits.new_empty((0, 4), dtype=torch.float32))
        if n_at_once is None:
            on_cpu = logits.device.type == "cpu"
            n_at_once = 1 if on_cpu else max(1, CHUNK_VALUES // logits.shape[1])
        values = torch.cat([_read(rows) for rows in torch.split(logits, n_at_once)])
        # A sampler computes in float32: only such logits are its own and change in place.
        kept = logits.clone() if logits.dtype == torch.float32 else logits
        return cls(kept, values)

    def of_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return int32 ``(n, 4)``: token, and the float32 bits of entropy, logprob and margin.

        Args:
            token_ids: the sampled token of each row, ``(n,)``.
        """
        ids = token_ids.to(torch.int64)
        own = self.logits.gather(1, ids[:, None])[:, 0].float()
        entropy, margin, largest, of_largest = self.values.unbind(1)
        logprob = (own - largest + of_largest).clamp_(max=0.0)
        bits = torch.stack([entropy, logprob, margin], dim=1).view(torch.int32)
        return torch.cat([ids.to(torch.int32)[:, None], bits], dim=1)


def _read(logits: torch.Tensor) -> torch.Tensor:
    """Return entropy, margin, largest logit and its log-probability, float32 ``(n, 4)``."""
    rows = logits.float()
    largest, second = _two_largest(rows)
    below = rows - largest[:, None]
    odds = torch.softmax(below, dim=-1)
    of_largest = odds.amax(dim=-1).log()
    # Of differences from the largest, so that large logits cost no digits.
    mean = odds.mul_(below.clamp_(min=_FLOOR)).sum(dim=-1)
    entropy = (-of_largest - mean).clamp_(min=0.0)
    return torch.stack([entropy, largest - second, largest, of_largest], dim=1)


def _two_largest(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest and second largest value of each row, equal for a tie.

    By the largest of groups, which takes a fifth of the time of ``topk`` over the vocabulary.
    """
    n, vocabulary = rows.shape
    if vocabulary % _GROUPS:
        top = rows.topk(min(2, vocabulary), dim=-1).values
        return top[:, 0], top[:, -1]
    grouped = rows.view(n, _GROUPS, -1)
    best = grouped.amax(dim=1).topk(min(2, vocabulary // _GROUPS), dim=-1)
    index = best.indices[:, :1, None].expand(n, 1, _GROUPS)
    within = grouped.transpose(1, 2).gather(1, index)[:, 0].topk(2, dim=-1).values
    other = within[:, 1]
    if best.values.shape[1] > 1:
        other = torch.maximum(other, best.values[:, 1])
    return within[:, 0], other
