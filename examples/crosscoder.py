"""Train a crosscoder: one sparse code of several hooks at once, rows in lockstep.

Three hooks are made by a harvest with ``--hooks resid_post:5,10,20``; two work as well.

python examples/crosscoder.py PATH --hooks resid_post.5 resid_post.10 resid_post.20
"""

import argparse
from collections.abc import Iterable
from itertools import islice

import torch

import actds


class Crosscoder(torch.nn.Module):
    """ReLU latents that are summed from all hooks and written to each of them."""

    def __init__(self, n_hooks: int, d_model: int, n_latents: int) -> None:
        super().__init__()
        atoms = torch.randn(n_latents, n_hooks, d_model)
        atoms = 0.1 * torch.nn.functional.normalize(atoms, dim=2)
        self.decoder = torch.nn.Parameter(atoms)
        self.encoder = torch.nn.Parameter(atoms.clone())
        self.encoder_bias = torch.nn.Parameter(torch.zeros(n_latents))
        self.bias = torch.nn.Parameter(torch.zeros(n_hooks, d_model))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents = torch.einsum("bhd,lhd->bl", rows, self.encoder) + self.encoder_bias
        latents = torch.relu(latents)
        return torch.einsum("bl,lhd->bhd", latents, self.decoder) + self.bias, latents


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="a sealed dataset of several hooks of the same width")
    parser.add_argument("--hooks", nargs="+", help="all hooks of the dataset when not given")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--latents", type=int, default=2048)
    parser.add_argument("--l1", type=float, default=0.01, help="weight of the sparsity penalty")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file for the weights, and for what they were trained on")
    args = parser.parse_args(argv)
    args.hooks = args.hooks or list(actds.open(args.path).hooks)
    if len(args.hooks) < 2:
        parser.error("one hook: harvest several, as --hooks resid_post:5,10,20")
    return args


def open_loader(args: argparse.Namespace) -> actds.Loader:
    return actds.Loader(
        args.path,
        args.hooks,  # batches are dicts by hook; row i is the same token in all of them
        batch=args.batch,
        seed=args.seed,
        epochs=None,
        exclude="first_position",
        normalize="norm",  # each hook by itself: later layers are longer, and would rule the loss
    )


def train(
    batches: Iterable[dict[str, torch.Tensor]], d_model: int, args: argparse.Namespace
) -> tuple[Crosscoder, list[float]]:
    torch.manual_seed(args.seed)
    crosscoder = Crosscoder(len(args.hooks), d_model, args.latents)
    optimizer = torch.optim.Adam(crosscoder.parameters(), lr=args.lr)
    losses = []
    for step, batch in enumerate(islice(batches, args.steps), 1):
        rows = torch.stack([batch[hook] for hook in args.hooks], dim=1)
        rebuilt, latents = crosscoder(rows)
        # A latent that several hooks share is paid for in each: shared ones have to be worth it.
        lengths = crosscoder.decoder.norm(dim=2).sum(dim=1)
        loss = (rebuilt - rows).square().mean() + args.l1 * (latents * lengths).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1 or step % max(1, args.steps // 10) == 0:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    return crosscoder, losses


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the loader's threads want the other cores
    with open_loader(args) as loader:
        print(loader)
        crosscoder, _ = train(loader, loader.hooks[args.hooks[0]].d_model, args)
        print(loader.progress)
        if args.out:
            torch.save({"weights": crosscoder.state_dict(), "data": loader.config}, args.out)


if __name__ == "__main__":
    main()
