"""Train a transcoder: sparse latents of one hook that rebuild another one, rows in lockstep.

Between two layers of the residual stream it learns what the layers between them add.

python examples/train_transcoder.py PATH --source resid_post.10 --target resid_post.20
"""

import argparse
from collections.abc import Iterable
from itertools import islice

import torch

import actds


class Transcoder(torch.nn.Module):
    """ReLU latents of the source that add up to the target, beside a linear path."""

    def __init__(self, d_model: int, n_latents: int) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(d_model, n_latents)
        self.decoder = torch.nn.Linear(n_latents, d_model)
        self.skip = torch.nn.Linear(d_model, d_model, bias=False)
        torch.nn.init.zeros_(self.decoder.weight)
        torch.nn.init.eye_(self.skip.weight)

    def forward(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents = torch.relu(self.encoder(source))
        return self.decoder(latents) + self.skip(source), latents


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="a sealed dataset of two hooks or more, of the same width")
    parser.add_argument("--source", help="the first hook of the dataset when not given")
    parser.add_argument("--target", help="the last hook of the dataset when not given")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--expansion", type=int, default=4, help="latents per channel")
    parser.add_argument("--l1", type=float, default=0.001, help="weight of the sparsity penalty")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file for the weights, and for what they were trained on")
    args = parser.parse_args(argv)
    hooks = list(actds.open(args.path).hooks)
    args.source, args.target = args.source or hooks[0], args.target or hooks[-1]
    if args.source == args.target:
        parser.error("source and target are the same hook: harvest two, as resid_post:10,20")
    return args


def open_loader(args: argparse.Namespace) -> actds.Loader:
    return actds.Loader(
        args.path,
        [args.source, args.target],  # batches are dicts by hook; row i is the same token in both
        batch=args.batch,
        seed=args.seed,
        epochs=None,
        exclude="first_position",
        normalize="norm",
    )


def train(
    batches: Iterable[dict[str, torch.Tensor]], d_model: int, args: argparse.Namespace
) -> tuple[Transcoder, list[float]]:
    torch.manual_seed(args.seed)
    transcoder = Transcoder(d_model, args.expansion * d_model)
    optimizer = torch.optim.Adam(transcoder.parameters(), lr=args.lr)
    losses = []
    for step, rows in enumerate(islice(batches, args.steps), 1):
        rebuilt, latents = transcoder(rows[args.source])
        # How much a latent says is its value times the length of what it writes.
        said = latents * transcoder.decoder.weight.norm(dim=0)
        loss = (rebuilt - rows[args.target]).square().mean() + args.l1 * said.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1 or step % max(1, args.steps // 10) == 0:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    return transcoder, losses


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the loader's threads want the other cores
    with open_loader(args) as loader:
        print(loader)
        transcoder, _ = train(loader, loader.hooks[args.source].d_model, args)
        print(loader.progress)
        if args.out:
            torch.save({"weights": transcoder.state_dict(), "data": loader.config}, args.out)


if __name__ == "__main__":
    main()
