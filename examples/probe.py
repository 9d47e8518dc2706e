"""Train a linear probe with a label for each request, and test it on requests it has not seen.

Labels are records of ``id``, that of the prompt, and ``label``, in CSV or JSON lines. Those of the
demo say whether a request asks about documentation or about code:

python examples/probe.py demo/acts --labels demo/prompts.jsonl --out probe.pt
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

import actds

Request = tuple[str, int]  # run and number: each run numbers its requests from 0


def read_labels(dataset: actds.Dataset, path: Path) -> dict[Request, int]:
    """Return the label of each request that has one, as a number in the order of their names."""
    with path.open(encoding="utf-8", newline="") as file:
        records = csv.DictReader(file) if path.suffix == ".csv" else map(json.loads, file)
        by_id = {str(record["id"]): str(record["label"]) for record in records}
    numbers = {name: number for number, name in enumerate(sorted(set(by_id.values())))}
    table = dataset.requests(run=True).select(["run", "request", "external_id"]).to_pylist()
    return {
        (line["run"], line["request"]): numbers[by_id[line["external_id"]]]
        for line in table
        if line["external_id"] in by_id
    }


def requests_of(columns: dict[str, Any]) -> list[Request]:
    return list(zip(columns["run"], columns["request"], strict=True))


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
    args = parser.parse_args(argv)
    args.labels = read_labels(actds.open(args.path), args.labels)
    if not args.labels:
        parser.error("no id of the labels is that of a request: see dataset.requests()")
    return args


def open_loader(
    args: argparse.Namespace, split: Literal["train", "held_out"] = "train"
) -> actds.Loader:
    dataset = actds.open(args.path)
    return actds.Loader(
        dataset,
        args.hook or list(dataset.hooks)[-1],
        batch=args.batch,
        seed=args.seed,
        where=args.where,
        split=split,  # by request: no request has rows on both sides
        held_out=args.held_out,
        normalize="channel",
        provenance=True,  # batches are (rows, columns), which say whose rows they are
        epochs=None if split == "train" else 1,
        drop_last=split == "train",
    )


def train(
    batches: Iterable[tuple[torch.Tensor, dict[str, Any]]], d_model: int, args: argparse.Namespace
) -> tuple[torch.nn.Linear, list[float]]:
    torch.manual_seed(args.seed)
    probe = torch.nn.Linear(d_model, max(args.labels.values()) + 1)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=args.lr)
    losses = []
    for step, (rows, columns) in enumerate(islice(batches, args.steps), 1):
        wanted = torch.tensor([args.labels.get(request, -1) for request in requests_of(columns)])
        loss = torch.nn.functional.cross_entropy(probe(rows), wanted, ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        if step == 1 or step % max(1, args.steps // 10) == 0:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    return probe, losses


@torch.no_grad()
def held_out_accuracy(probe: torch.nn.Linear, args: argparse.Namespace) -> tuple[float, int]:
    """Return the share of held-out requests whose rows together say their label, and how many."""
    votes: dict[Request, Any] = defaultdict(float)
    with open_loader(args, "held_out") as loader:
        for rows, columns in loader:
            for request, vote in zip(requests_of(columns), probe(rows).log_softmax(1), strict=True):
                votes[request] += vote
    labels = args.labels
    right = [int(vote.argmax()) == labels[at] for at, vote in votes.items() if at in labels]
    return sum(right) / len(right), len(right)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the loader's threads want the other cores
    with open_loader(args) as loader:
        print(loader)
        (hook,) = loader.hooks.values()
        probe, _ = train(loader, hook.d_model, args)
        if args.out:
            torch.save({"weights": probe.state_dict(), "data": loader.config}, args.out)
    accuracy, n = held_out_accuracy(probe, args)
    print(f"accuracy {accuracy:.3f} over {n} held-out requests")


if __name__ == "__main__":
    main()
