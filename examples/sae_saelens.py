"""Train a TopK sparse autoencoder with SAELens on one hook of a dataset.

SAELens estimates the scale of the rows from the first batches and folds it into the weights, so
that what it saves takes rows as they are stored. Its cfg.json says which rows it was trained on.

python examples/sae_saelens.py PATH --hook resid_post.10 --out sae
"""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
from sae_lens.config import SAETrainerConfig
from sae_lens.training.sae_trainer import SAETrainer

import actds


class Trainer(SAETrainer):  # type: ignore[misc]
    """SAELens' own, which keeps the losses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.losses: list[float] = []

    def step(self, batch: torch.Tensor) -> Any:
        output = super().step(batch)
        self.losses.append(output.loss.item())
        return output


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
    return actds.Loader(
        dataset,
        args.hook or list(dataset.hooks)[-1],
        batch=args.batch,
        seed=args.seed,
        epochs=None,  # SAELens asks for as many batches as it wants, some before the first step
        exclude="first_position",  # often an attention sink, which would rule the scale
        split="train" if args.held_out else None,
        held_out=args.held_out or 0.0,
        dtype="float32",
    )


def train(
    batches: Iterable[torch.Tensor], d_model: int, args: argparse.Namespace
) -> tuple[Any, list[float]]:
    torch.manual_seed(args.seed)
    sae = TopKTrainingSAE(
        TopKTrainingSAEConfig(
            d_in=d_model,
            d_sae=args.expansion * d_model,
            k=args.k,
            normalize_activations="expected_average_only_in",
        )
    )
    config = SAETrainerConfig(
        total_training_samples=args.steps * args.batch,
        train_batch_size_samples=args.batch,
        n_batches_for_norm_estimate=20,
        lr=args.lr,
        lr_end=args.lr,
    )
    trainer = Trainer(config, sae, iter(batches))
    sae = trainer.fit()
    print(f"loss {trainer.losses[0]:.4f} at first, {trainer.losses[-1]:.4f} at last")
    return sae, trainer.losses


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the loader's threads want the other cores
    with open_loader(args) as loader:
        print(loader)
        (hook,) = loader.hooks.values()
        sae, _ = train(loader, hook.d_model, args)
        print(loader.progress)
        if args.out:
            sae.cfg.metadata.actds = loader.config
            sae.cfg.metadata.hook_name = hook.name
            if len(models := loader.config["models"]) == 1:
                sae.cfg.metadata.model_name = models[0]["name"]
            sae.save_model(args.out)


if __name__ == "__main__":
    main()
