"""Train a transcoder: sparse latents of one hook that rebuild another one, rows in lockstep.

From ``mlp_in`` to ``mlp_out`` of a layer (``--hooks "mlp_in:8;mlp_out:8"`` of a harvest) it learns
what the MLP computes; between two layers of the residual stream, what the layers between them add.

python examples/transcoder.py PATH --source mlp_in.8 --target mlp_out.8
"""

import argparse
from collections.abc import Iterable
from itertools import islice

import torch

import actds


class Transcoder(torch.nn.Module):
    """ReLU latents of the source that add up to the target, beside a linear path."""

    def __init__(self, d_model: int, n_latents: int, *, same_stream: bool) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(d_model, n_latents)
        self.decoder = torch.nn.Linear(n_latents, d_model)
        self.skip = torch.nn.Linear(d_model, d_model, bias=False)
        torch.nn.init.zeros_(self.decoder.weight)
        if same_stream:  # the source is in the target already
            torch.nn.init.eye_(self.skip.weight)
        else:
            torch.nn.init.zeros_(self.skip.weight)

    def forward(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents = torch.relu(self.encoder(source))
        return self.decoder(latents) + self.skip(source), latents


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="a sealed dataset of two hooks or more, of the same width")
    parser.add_argument("--source", help="mlp_in of a layer that has both, else the first hook")
    parser.add_argument("--target", help="mlp_out of the same layer, else the last hook")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--expansion", type=int, default=4, help="latents per channel")
    parser.add_argument("--l1", type=float, default=0.001, help="weight of the sparsity penalty")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file for the weights, and for what they were trained on")
    args = parser.parse_args(argv)
    widths = {hook.name: hook.d_model for hook in actds.open(args.path).hooks.values()}
    hooks = list(widths)
    read = [name for name in hooks if name.replace("mlp_in.", "mlp_out.") in set(hooks) - {name}]
    pair = (read[0], read[0].replace("mlp_in.", "mlp_out.")) if read else (hooks[0], hooks[-1])
    args.source, args.target = args.source or pair[0], args.target or pair[1]
    if args.source == args.target:
        parser.error('source and target are the same hook: harvest two, as "mlp_in:8;mlp_out:8"')
    if widths[args.source] != widths[args.target]:
        parser.error(f"{args.source} and {args.target} differ in width")
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
    same_stream = args.source.split(".")[0] == args.target.split(".")[0]
    transcoder = Transcoder(d_model, args.expansion * d_model, same_stream=same_stream)
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
