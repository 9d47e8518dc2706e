"""Train a linear probe with a label for each request, and test it on requests it has not seen.

The labels are records of ``id`` and ``label``, in CSV or JSON lines; an id is that of the prompt.
Those of the demo say whether a request asks about documentation or about code:

python examples/train_probe.py demo/acts --labels demo/prompts.jsonl
"""

import argparse
import csv
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import actds

UNKNOWN = -1


class Labels:
    """The class of each request; UNKNOWN for those without a label."""

    def __init__(self, dataset: actds.Dataset, path: Path) -> None:
        with path.open(encoding="utf-8", newline="") as file:
            records = csv.DictReader(file) if path.suffix == ".csv" else map(json.loads, file)
            by_id = {str(record["id"]): str(record["label"]) for record in records}
        self.names = [*sorted(set(by_id.values()))]
        # Each run numbers its requests from 0: a request is a run and a number.
        table = dataset.requests(run=True).select(["run", "request", "external_id"]).to_pylist()
        self.place = {(line["run"], line["request"]): at for at, line in enumerate(table)}
        named = [by_id.get(line["external_id"]) for line in table]
        self.of = torch.tensor([self.names.index(n) if n else UNKNOWN for n in named])

    def requests(self, rows: dict[str, Any]) -> torch.Tensor:
        """Return the request of each row of a batch, as a place in ``of``."""
        keys = zip(rows["run"].tolist(), rows["request"].tolist(), strict=True)
        return torch.tensor([self.place[key] for key in keys])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="a sealed dataset")
    parser.add_argument("--labels", type=Path, required=True, help="JSONL or CSV of id and label")
    parser.add_argument("--hook", help="the last hook of the dataset when not given")
    parser.add_argument("--where", default="position > 0", help="which rows of the requests")
    parser.add_argument("--held-out", type=float, default=0.25, help="share of the requests")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file for the weights, and for what they were trained on")
    return parser.parse_args(argv)


def open_loader(args: argparse.Namespace, split: str = "train") -> actds.Loader:
    dataset = actds.open(args.path)
    return actds.Loader(
        dataset,
        args.hook or list(dataset.hooks)[-1],
        batch=args.batch,
        seed=args.seed,
        where=args.where,
        split=split,  # by request: rows of one request never are on both sides
        held_out=args.held_out,
        normalize="channel",
        provenance=True,  # batches are (rows, columns): the columns say whose rows they are
        epochs=None if split == "train" else 1,
        drop_last=split == "train",
    )


def train(
    batches: Iterable[tuple[torch.Tensor, dict[str, Any]]], d_model: int, args: argparse.Namespace
) -> tuple[torch.nn.Linear, list[float]]:
    torch.manual_seed(args.seed)
    labels = Labels(actds.open(args.path), args.labels)
    probe = torch.nn.Linear(d_model, len(labels.names))
    optimizer = torch.optim.AdamW(probe.parameters(), lr=args.lr)
    losses = []
    for step, (rows, columns) in enumerate(islice(batches, args.steps), 1):
        wanted = labels.of[labels.requests(columns)]
        loss = cross_entropy(probe(rows), wanted, ignore_index=UNKNOWN)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1 or step % max(1, args.steps // 10) == 0:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    return probe, losses


@torch.no_grad()
def accuracy(probe: torch.nn.Linear, args: argparse.Namespace) -> tuple[float, float, int]:
    """Return accuracy and that of the most common class over held-out requests, and their number.

    A request is what its rows say together.
    """
    labels = Labels(actds.open(args.path), args.labels)
    votes = torch.zeros(len(labels.of), len(labels.names))
    with open_loader(args, "held_out") as loader:
        for rows, columns in loader:
            votes.index_add_(0, labels.requests(columns), probe(rows).log_softmax(dim=1))
    seen = votes.any(dim=1) & (labels.of != UNKNOWN)
    right = votes[seen].argmax(dim=1) == labels.of[seen]
    common = labels.of[seen].bincount().max() / seen.sum()
    return right.float().mean().item(), common.item(), int(seen.sum())


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the loader's threads want the other cores
    with open_loader(args) as loader:
        print(loader)
        (hook,) = loader.config["hooks"]
        probe, _ = train(loader, loader.dataset.hooks[hook].d_model, args)
        if args.out:
            torch.save({"weights": probe.state_dict(), "data": loader.config}, args.out)
    share, common, n = accuracy(probe, args)
    print(f"{n} held-out requests: accuracy {share:.3f}, the most common class {common:.3f}")


if __name__ == "__main__":
    main()
