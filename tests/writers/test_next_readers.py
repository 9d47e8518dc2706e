"""What reads the stream behind a hook, in models whose layers return the same pair and mean two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from actds_writers.engines.vllm import check as vllm_check
from actds_writers.engines.vllm.check import NextReaders

D_MODEL, N_ROWS = 32, 20


class AddingNorm(torch.nn.Module):
    """vLLM's RMSNorm: adds the residual, in place, and hands the sum on."""

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return torch.nn.functional.layer_norm(hidden, hidden.shape[-1:])
        residual += hidden
        return torch.nn.functional.layer_norm(residual, hidden.shape[-1:]), residual


class IgnoringNorm(torch.nn.Module):
    """That of vLLM's Cohere: takes a residual and hands it on as it was."""

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.nn.functional.layer_norm(hidden, hidden.shape[-1:]), residual


class Split(torch.nn.Module):
    """A layer whose stream is the sum of the pair."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = AddingNorm(), torch.nn.Linear(D_MODEL, D_MODEL)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, normed = hidden.clone(), self.norm(hidden)
        else:
            normed, residual = self.norm(hidden, residual)
        return self.mlp(normed), residual


class Whole(torch.nn.Module):
    """A layer whose first output is the stream, and the second the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = IgnoringNorm(), torch.nn.Linear(D_MODEL, D_MODEL)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.norm(hidden, hidden)
        return residual + self.mlp(normed), residual


class Model(torch.nn.Module):
    def __init__(self, layer: type[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layer() for _ in range(4))
        self.norm = AddingNorm() if layer is Split else IgnoringNorm()
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, hidden: torch.Tensor) -> object:
        residual, self.pairs = None, []
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
            self.pairs.append((hidden.clone(), residual.clone()))
        return self.norm(hidden, residual)


@contextlib.contextmanager
def nothing(_runner: object) -> Iterator[None]:
    yield


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_check, "eager", nothing)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    # Dummy weights of vLLM are so small that a layer adds next to nothing, in bfloat16 less than
    # is rounded off.
    [
        (torch.float32, 1.0),
        (torch.float32, 1e-3),
        (torch.bfloat16, 1.0),
        (torch.bfloat16, 1e-3),
        (torch.bfloat16, 1e-6),
    ],
)
@pytest.mark.parametrize("layer", [Split, Whole])
def test_the_stream_is_near_and_every_other_reading_of_the_pair_far(
    layer: type[torch.nn.Module], dtype: torch.dtype, scale: float
) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        model = Model(layer).to(dtype)
        for one in model.layers:
            one.mlp.weight.mul_(scale)
            one.mlp.bias.mul_(scale)
        fed = torch.randn(N_ROWS, D_MODEL).to(dtype)
        model(fed.clone())
        pairs = [model.pairs[number] for number in (1, 3)]
        readings = {
            "sum": [a + b for a, b in pairs],
            "first": [a for a, _ in pairs],
            "second": [b for _, b in pairs],
        }
        if dtype is torch.bfloat16 and scale < 1.0:
            del readings["second"]  # stored, it is the sum
        for name, rows in readings.items():
            stacked = np.stack([part.float().numpy() for part in rows])
            readers = NextReaders(model, stacked, [1, 3])
            with readers.watching(None):
                model(fed.clone())
            right = name == ("sum" if layer is Split else "first")
            assert sorted(readers.distances) == [0, 1]
            for distance in readers.distances.values():
                # The stream before a layer that adds a thousandth is as near as that.
                far = 0.2 * min(1.0, scale) if name == "second" else 0.2
                near = 1e-5 if dtype is torch.float32 else 0.01
                assert (distance < near) if right else (distance > far), name
