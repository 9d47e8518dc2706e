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
_FURTHEST = -80.0
"""A logit so far below the largest has less than 2e-35 of its probability."""


@dataclass(frozen=True)
class Reading:
    """Logits ``(n, vocabulary)`` of a step, of the model's type, and what they say.

    ``values``: float32 ``(n, 4)``: entropy, margin, largest logit, its log-probability.
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
        largest, second = _two_largest(logits)
        memory = largest.new_empty((2, min(n_at_once, len(logits)), logits.shape[1]))
        rows, tops = torch.split(logits, n_at_once), torch.split(largest, n_at_once)
        read = [_read(row, top, memory) for row, top in zip(rows, tops, strict=True)]
        totals, sums = (torch.cat(parts) for parts in zip(*read, strict=True))
        of_largest = -totals.log()
        entropy = (-of_largest - sums / totals).clamp_(min=0.0)
        values = torch.stack([entropy, largest - second, largest, of_largest], dim=1)
        # A sampler computes in float32: only such logits are its own and change in place.
        kept = logits.clone() if logits.dtype == torch.float32 else logits
        return cls(kept, values)

    def of_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return int32 ``(n, 4)``: token, and the float32 bits of entropy, logprob and margin."""
        ids = token_ids.to(torch.int64)
        logit = self.logits.gather(1, ids[:, None])[:, 0].float()
        entropy, margin, largest, of_largest = self.values.unbind(1)
        logprob = (logit - largest + of_largest).clamp_(max=0.0)
        bits = torch.stack([entropy, logprob, margin], dim=1).view(torch.int32)
        return torch.cat([ids.to(torch.int32)[:, None], bits], dim=1)


def _read(
    logits: torch.Tensor, largest: torch.Tensor, memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of all odds against the largest logit, and of the logits below it by them.

    Of differences from the largest, so that large logits cost no digits. What is further below adds
    nothing that float32 holds, and numbers that are nearly 0 take twenty times as long; without a
    bound, what has no probability would be minus infinity times 0. Logits that are no number stay
    so. One ``exp`` takes a third of the time of ``softmax``.

    Args:
        memory: float32 ``(2, n, vocabulary)`` to work in.
    """
    n = len(logits)
    below = torch.sub(logits, largest[:, None], out=memory[0, :n]).clamp_(min=_FURTHEST)
    odds = torch.exp(below, out=memory[1, :n])
    return odds.sum(dim=-1), odds.mul_(below).sum(dim=-1)


def _two_largest(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest and second largest value of each row in float32, equal for a tie.

    By the largest of groups, which takes a fifth of the time of ``topk`` over the vocabulary.
    """
    n, vocabulary = rows.shape
    if vocabulary % _GROUPS:
        top = rows.topk(min(2, vocabulary), dim=-1).values.float()
        return top[:, 0], top[:, -1]
    grouped = rows.view(n, _GROUPS, -1)
    best = grouped.amax(dim=1).topk(min(2, vocabulary // _GROUPS), dim=-1)
    index = best.indices[:, :1, None].expand(n, 1, _GROUPS)
    within = grouped.transpose(1, 2).gather(1, index)[:, 0].topk(2, dim=-1).values
    seconds = torch.cat([within[:, 1:], best.values[:, 1:]], dim=1)
    return within[:, 0].float(), seconds.amax(dim=1).float()
