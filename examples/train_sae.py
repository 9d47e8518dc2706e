"""Train a small sparse autoencoder on one hook of a dataset.

python examples/train_sae.py PATH --hook resid_post.10 --steps 200 --batch 256
"""

import argparse
from typing import Any

import torch

import actds


class SparseAutoencoder(torch.nn.Module):
    """An overcomplete ReLU dictionary of unit atoms, tied to its encoder at the start."""

    def __init__(self, d_model: int, n_latents: int) -> None:
        super().__init__()
        atoms = torch.nn.functional.normalize(torch.randn(d_model, n_latents), dim=0)
        self.decoder = torch.nn.Parameter(atoms)
        self.encoder = torch.nn.Parameter(atoms.T.clone())
        self.encoder_bias = torch.nn.Parameter(torch.zeros(n_latents))
        self.bias = torch.nn.Parameter(torch.zeros(d_model))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents = torch.relu((rows - self.bias) @ self.encoder.T + self.encoder_bias)
        return latents @ self.decoder.T + self.bias, latents


def scale_of(rows: torch.Tensor) -> float:
    """Return mean row norm / sqrt(d_model): rows divided by it have unit values on average.

    Rows whose norm is far above the median are left out: attention sinks in the first position
    are hundreds of times longer, and would set the scale of all others.
    """
    norms = rows.norm(dim=1)
    norms = norms[norms <= 10 * norms.median()]
    return max(norms.mean().item() / rows.shape[1] ** 0.5, 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="a sealed dataset")
    parser.add_argument("--hook", help="the last hook of the dataset when not given")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--l1", type=float, default=0.01, help="weight of the sparsity penalty")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the loader's threads want the other cores
    dataset = actds.open(args.path)
    hook = args.hook or list(dataset.hooks)[-1]
    loader = actds.Loader(
        dataset,
        hook,
        batch=min(args.batch, dataset.n_rows),
        epochs=None,
        weights="multiplicity",
    )
    with loader:
        train(loader, hook, args)


def train(loader: Any, hook: str, args: argparse.Namespace) -> None:
    scale = clip = 0.0
    sae: Any = None
    for step in range(1, args.steps + 1):
        rows = next(loader).float()  # stored in bfloat16, trained in float32
        if sae is None:
            scale = scale_of(rows)
            clip = 10 * rows.shape[1] ** 0.5
            sae = SparseAutoencoder(rows.shape[1], 4 * rows.shape[1])
            optimizer = torch.optim.Adam(sae.parameters(), lr=1e-3)
            print(f"{hook}: {rows.shape[1]} channels, divided by {scale:.3g}")
        rows = rows / scale
        # What is still longer than ten ordinary rows is shortened, not trusted with the loss.
        rows = rows * (clip / rows.norm(dim=1, keepdim=True).clamp(min=clip))
        rebuilt, latents = sae(rows)
        loss = (rebuilt - rows).square().mean() + args.l1 * latents.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            sae.decoder /= sae.decoder.norm(dim=0, keepdim=True)
        if step == 1 or step % max(1, args.steps // 10) == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
