"""The trainer: a TopK dictionary in PyTorch, whose start and order are given.

Equal rows in an equal order from an equal start give equal weights, bit for bit, on one machine
and one number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError, not_installed
from actds_studies.stability.arms import epoch_order
from actds_validators.arrays import Bools, Floats

if TYPE_CHECKING:
    import torch

    from actds.format.positions import Keys

_LAST = 20


@dataclass(frozen=True)
class TrainingRows:
    """What a dictionary is trained on.

    Args:
        values: the rows in their stored type ``(n, d_model)``; finite.
        keys: what each row is ``(n,)``.
        weight: weight of each row in the loss ``(n,)``.
    """

    values: torch.Tensor
    keys: Keys
    weight: Floats


@dataclass(frozen=True)
class Fitted:
    """A trained dictionary, for rows as they are stored.

    Args:
        w_enc: float32 ``(d_model, n_features)``.
        b_enc: float32 ``(n_features,)``.
        w_dec: float32 ``(n_features, d_model)``.
        b_dec: float32 ``(d_model,)``.
        fvu: fraction of variance unexplained of the last batches, mean.
        alive: features that were active in the last pass ``(n_features,)``.
    """

    w_enc: npt.NDArray[np.float32]
    b_enc: npt.NDArray[np.float32]
    w_dec: npt.NDArray[np.float32]
    b_dec: npt.NDArray[np.float32]
    fvu: float
    alive: Bools


@dataclass(frozen=True)
class Trainer:
    """How every dictionary is trained.

    Args:
        k: active features of a row.
        scale: what rows are multiplied by, the same for all arms.
        centre: where the decoder's bias starts, in stored units, the same for all arms
            ``(d_model,)``.
    """

    n_features: int
    k: int
    batch: int
    epochs: int
    learning_rate: float
    scale: float
    centre: Floats

    def start(self, seed: int) -> dict[str, torch.Tensor]:
        """Return the initial weights of a seed: the same whatever the rows are.

        Directions are random and of length 1, the encoder is their transpose.
        """
        import torch

        generator = torch.Generator().manual_seed(seed)
        atoms = torch.randn(self.n_features, len(self.centre), generator=generator)
        atoms /= atoms.norm(dim=1, keepdim=True)
        return {
            "w_enc": atoms.T.clone(),
            "b_enc": torch.zeros(self.n_features),
            "w_dec": atoms,
            "b_dec": torch.from_numpy(self.centre.astype(np.float32)) * self.scale,
        }

    def fit(self, rows: TrainingRows, seed: int, order: int) -> Fitted:
        """Train a dictionary.

        Args:
            rows: what it is trained on, a batch at least.

        Raises:
            ActdsError: E014 no batch has two rows that differ and have a weight.
        """
        import torch
        from torch.nn.functional import embedding_bag

        weights = {name: torch.nn.Parameter(value) for name, value in self.start(seed).items()}
        w_enc, b_enc, w_dec, b_dec = weights.values()
        optimizer = torch.optim.Adam(weights.values(), lr=self.learning_rate)
        share = torch.from_numpy(rows.weight.astype(np.float32))[:, None]
        alive = np.zeros(self.n_features, np.bool_)
        losses: list[float] = []
        for epoch in range(self.epochs):
            permutation = torch.from_numpy(epoch_order(rows.keys, order, epoch))
            for at in range(0, len(permutation) - self.batch + 1, self.batch):
                batch = permutation[at : at + self.batch]
                x, w = rows.values[batch].float() * self.scale, share[batch]
                if not (w > 0).any():
                    continue
                mean = (w * x).sum(dim=0) / w.sum()
                spread = (w * (x - mean).square()).sum()
                if not spread > 0:  # one row alone: there is no variance to explain
                    continue
                top = ((x - b_dec) @ w_enc + b_enc).topk(self.k, dim=1)
                active = torch.relu(top.values)
                # The product with the k directions alone, in half the time of the whole matrix.
                rebuilt = embedding_bag(top.indices, w_dec, per_sample_weights=active, mode="sum")
                loss = (w * (rebuilt + b_dec - x).square()).sum() / spread
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                with torch.no_grad():
                    w_dec.div_(w_dec.norm(dim=1, keepdim=True))
                losses.append(loss.item())
                if epoch == self.epochs - 1:
                    alive[top.indices[active > 0].numpy()] = True
        if not losses:
            got = "no batch in which two rows that differ have a weight"
            raise ActdsError("E014", "training rows", got=got, expected="some")
        arrays: dict[str, Any] = {name: value.detach().numpy() for name, value in weights.items()}
        scale = np.float32(self.scale)
        last = losses[-_LAST:]
        return Fitted(
            arrays["w_enc"] * scale,
            arrays["b_enc"],
            arrays["w_dec"] / scale,
            arrays["b_dec"] / scale,
            sum(last) / len(last),
            alive,
        )


def need_torch() -> None:
    """Raise E011 when PyTorch is not installed."""
    if find_spec("torch") is None:
        raise not_installed("torch", "audit,torch", "actds stability")
