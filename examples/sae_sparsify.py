"""Train a sparsify SparseCoder on one hook of a dataset.

The trainer of sparsify runs a model for its rows; its coder takes them from anywhere.

python examples/sae_sparsify.py PATH --hook resid_post.10 --out coder
"""

import argparse
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import torch
from sparsify import SparseCoder, SparseCoderConfig

import actds


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="a sealed dataset")
    parser.add_argument("--hook", help="the last hook of the dataset when not given")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--expansion", type=int, default=4, help="latents per channel")
    parser.add_argument("--k", type=int, default=32, help="latents of a row that are not 0")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the weights and loader.json")
    return parser.parse_args(argv)


def open_loader(args: argparse.Namespace) -> actds.Loader:
    dataset = actds.open(args.path)
    return actds.Loader(
        dataset,
        args.hook or list(dataset.hooks)[-1],
        batch=args.batch,
        seed=args.seed,
        epochs=None,
        exclude="first_position",  # often an attention sink, hundreds of times longer than others
        normalize="norm",  # float32 rows of mean norm sqrt(d_model)
    )


def train(
    batches: Iterable[torch.Tensor], d_model: int, args: argparse.Namespace
) -> tuple[SparseCoder, list[float]]:
    torch.manual_seed(args.seed)
    coder = SparseCoder(d_model, SparseCoderConfig(expansion_factor=args.expansion, k=args.k))
    optimizer = torch.optim.Adam(coder.parameters(), lr=args.lr)
    losses = []
    for step, rows in enumerate(islice(batches, args.steps), 1):
        if step == 1:
            coder.b_dec.data = rows.mean(dim=0)
        loss = coder(rows).fvu  # the fraction of variance unexplained
        optimizer.zero_grad()
        loss.backward()
        coder.remove_gradient_parallel_to_decoder_directions()
        optimizer.step()
        coder.set_decoder_norm_to_unit_norm()
        losses.append(loss.item())
        if step == 1 or step % max(1, args.steps // 10) == 0:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    return coder, losses


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the loader's threads want the other cores
    with open_loader(args) as loader:
        print(loader)
        (hook,) = loader.hooks.values()
        coder, _ = train(loader, hook.d_model, args)
        print(loader.progress)
        if args.out:
            coder.save_to_disk(args.out)
            (args.out / "loader.json").write_text(json.dumps(loader.config, indent=1))


if __name__ == "__main__":
    main()
