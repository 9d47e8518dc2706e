"""Train a TopK dictionary with dictionary_learning on one hook of a dataset.

trainSAE writes ``loader.config`` into its config.json by itself, and folds the scale of the rows
into the weights, so that what it saves takes rows as they are stored.

python examples/sae_dictionary_learning.py PATH --hook resid_post.10 --out dictionaries
"""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from dictionary_learning.trainers.top_k import TopKTrainer
from dictionary_learning.training import trainSAE

import actds


class Trainer(TopKTrainer):  # type: ignore[misc]
    """The library's own, which keeps the losses."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []

    def update(self, step: int, x: torch.Tensor) -> None:
        self.losses.append(super().update(step, x))


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
    parser.add_argument(
        "--held-out", type=float, help="share of the requests that actds regimes will score it on"
    )
    parser.add_argument("--out", help="folder for the weights, and for what they were trained on")
    return parser.parse_args(argv)


def open_loader(args: argparse.Namespace) -> actds.Loader:
    dataset = actds.open(args.path)
    args.hook = args.hook or list(dataset.hooks)[-1]
    names = {model["name"] for model in dataset.models}
    args.lm_name = names.pop() if len(names) == 1 else None
    return actds.Loader(
        dataset,
        args.hook,
        batch=args.batch,
        seed=args.seed,
        # A first loop takes 102 batches for the scale, a second one trains. This one goes on; what
        # ends, as one epoch or iter(loader), would be short of them, and nothing would say so.
        epochs=None,
        exclude="first_position",  # often an attention sink, which would rule the scale
        split="train" if args.held_out else None,
        held_out=args.held_out or 0.0,
        dtype="float32",  # norms are summed in the type of the batches: bfloat16 is 9 % off
    )


def train(
    batches: Iterable[torch.Tensor], d_model: int, args: argparse.Namespace
) -> tuple[Any, list[float]]:
    trainers: list[Trainer] = []

    def build(**options: Any) -> Trainer:
        trainers.append(Trainer(**options))
        return trainers[-1]

    config = {
        "trainer": build,
        "steps": args.steps,
        "activation_dim": d_model,
        "dict_size": args.expansion * d_model,
        "k": args.k,
        "layer": int(args.hook.rpartition(".")[2]),
        "lm_name": args.lm_name or "",
        "lr": args.lr,
        "warmup_steps": args.steps // 20,
        "threshold_start_step": args.steps // 2,
        "seed": args.seed,
        "device": "cpu",
    }
    trainSAE(
        batches, [config], args.steps, save_dir=args.out, normalize_activations=True, device="cpu"
    )
    (trainer,) = trainers
    if len(trainer.losses) < args.steps:  # it stops without a word where the batches end
        raise SystemExit(f"{len(trainer.losses)} of {args.steps} updates: the batches ended")
    print(f"loss {trainer.losses[0]:.4f} at first, {trainer.losses[-1]:.4f} at last")
    return trainer.ae, trainer.losses


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the loader's threads want the other cores
    with open_loader(args) as loader:
        print(loader)
        train(loader, loader.hooks[args.hook].d_model, args)
        print(loader.progress)


if __name__ == "__main__":
    main()
