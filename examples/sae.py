"""Train a small sparse autoencoder on one hook of a dataset.

python examples/sae.py PATH --hook resid_post.10 --steps 200 --batch 256 --out sae.pt
"""

import argparse
from collections.abc import Iterable
from itertools import islice

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


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="a sealed dataset")
    parser.add_argument("--hook", help="the last hook of the dataset when not given")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--expansion", type=int, default=4, help="latents per channel")
    parser.add_argument("--l1", type=float, default=0.01, help="weight of the sparsity penalty")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file for the weights, and for what they were trained on")
    return parser.parse_args(argv)


def open_loader(args: argparse.Namespace) -> actds.Loader:
    dataset = actds.open(args.path)
    return actds.Loader(
        dataset,
        args.hook or list(dataset.hooks)[-1],
        batch=args.batch,
        seed=args.seed,
        epochs=None,
        weights="multiplicity",  # rows as often as they were served
        exclude="first_position",  # often an attention sink, hundreds of times longer than others
        normalize="norm",  # float32 rows of mean norm sqrt(d_model)
    )


def train(
    batches: Iterable[torch.Tensor], d_model: int, args: argparse.Namespace
) -> tuple[SparseAutoencoder, list[float]]:
    torch.manual_seed(args.seed)
    sae = SparseAutoencoder(d_model, args.expansion * d_model)
    optimizer = torch.optim.Adam(sae.parameters(), lr=args.lr)
    losses = []
    for step, rows in enumerate(islice(batches, args.steps), 1):
        rebuilt, latents = sae(rows)
        loss = (rebuilt - rows).square().mean() + args.l1 * latents.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            sae.decoder /= sae.decoder.norm(dim=0, keepdim=True)
        losses.append(loss.item())
        if step == 1 or step % max(1, args.steps // 10) == 0:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    return sae, losses


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the loader's threads want the other cores
    with open_loader(args) as loader:
        print(loader)
        (hook,) = loader.hooks.values()
        sae, _ = train(loader, hook.d_model, args)
        print(loader.progress)
        if args.out:
            torch.save({"weights": sae.state_dict(), "data": loader.config}, args.out)


if __name__ == "__main__":
    main()
