"""Four ways to lose rows to a slow disk, against the whole set: which losses do not matter?

    python examples/thinning/run.py [--seeds 8] [--out DIR]

serves the same prompts with the real engine on the CPU, once for every arm: ``block`` on the disk
as it is, and on one that is too slow ``drop_newest``, ``thin``, ``drop_newest --always`` and
``drop_newest`` with a follow-up. Writes figures.json and the table of README.md beside this file.
What is in --out is kept: a run that was cut off goes on. Linux with a C compiler.

The writer is slow because of what the rows hold: the embeddings of half the vocabulary have one
magnitude, as those of a table of few bits, and compress to a seventh; prompts of either half come
in long runs, as a corpus of two sources has them. Nothing tells the writer which rows are which.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

import actds
from actds.format.inclusion import inclusion_of
from actds_testing import harvest as h
from actds_testing.faulty_disk import FaultyDisk, unavailable
from actds_testing.tiny import make_random_model

HERE = Path(__file__).resolve().parent
HOOK = "resid_post.3"
PLAIN, COARSE = np.arange(160, 310), np.arange(10, 160)
"""Token ids of the two halves of the vocabulary."""
SIZES = {"n_layers": 8, "hidden": 128, "n_heads": 4, "n_kv_heads": 4, "head_dim": 32}
OPTIONS = (
    "--hooks", "embed;resid_post:3", "--store-dtype", "bfloat16", "--max-tokens", "1",
    "--rows-per-shard", "512", "--ring-mib", "1", "--staging-mib", "1", "--no-check",
    "--quiet",
)  # fmt: skip
ENGINE = ("dtype=float32", "enforce_eager=true", "block_size=32", "max_model_len=256",
          "max_num_seqs=8", "max_num_batched_tokens=256",
          "enable_prefix_caching=false")  # fmt: skip
ARMS = {
    "block": ("--overflow", "block"),
    "drop newest": ("--overflow", "drop_newest"),
    "thin": ("--overflow", "thin"),
    "drop newest, 1/64 always": ("--overflow", "drop_newest", "--always", "0.015625"),
}
FOLLOWED = "drop newest, followed up"
FRACTION = 0.25
"""Of the requests that lack a row, those that the follow-up serves again."""
LENGTH, RUN, N_RUNS = 128, 64, 4
"""Tokens of a prompt, prompts of a run of one kind, and runs."""
BEGIN, END = "<!-- begin: figures -->\n\n", "\n\n<!-- end: figures -->"
N_FEATURES, K, BATCH, STEPS = 256, 8, 512, 400


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("build/thinning"), help="datasets")
    parser.add_argument("--share", type=float, default=0.9, help="disk over plain writing")
    args = parser.parse_args()
    if why := unavailable():
        print(f"The experiment cannot run here: {why}.", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.out / "model"
    if not model.exists():
        make_model(model)
    found = []
    for seed in range(args.seeds):
        path = args.out / f"seed-{seed}.json"
        if not path.exists():
            path.write_text(json.dumps(one_seed(args, model, seed)))
        found.append(json.loads(path.read_text()))
    figures = summary(found, args)
    (HERE / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    text = (HERE / "README.md").read_text()
    (HERE / "README.md").write_text(f"{text.split(BEGIN)[0]}{BEGIN}{table(figures)}{END}"
                                    f"{text.split(END)[1]}")  # fmt: skip
    print(table(figures))
    return 0


# ---- harvests


def make_model(path: Path) -> None:
    """Make a model with random weights, the embeddings of half its vocabulary of one magnitude."""
    make_random_model(path, **SIZES)
    weights = load_file(path / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    table[COARSE] = np.sign(table[COARSE]) * np.float32(2.0**-6)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def make_prompts(path: Path, seed: int) -> Path:
    """Write runs of prompts, whose tokens are of one half of the vocabulary in a run."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, len(PLAIN) + 1)
    records: list[dict[str, Any]] = []
    for number in range(N_RUNS):
        words = (COARSE, PLAIN)[number % 2]
        for _ in range(RUN):
            ids = rng.choice(words, LENGTH, p=share / share.sum()).tolist()
            records.append({"id": str(len(records)), "prompt_token_ids": ids})
    return h.write_prompts(path, records)


def one_seed(args: argparse.Namespace, model: Path, seed: int) -> dict[str, Any]:
    """Harvest the arms of a seed, and compare them with the whole set."""
    folder = args.out / f"seed-{seed}"
    folder.mkdir(exist_ok=True)
    prompts = make_prompts(folder / "prompts.jsonl", seed)
    rate, speed = 0, {}
    arms: dict[str, Rows] = {}
    for name, options in ARMS.items():
        out = folder / name.replace(" ", "-").replace(",", "").replace("/", "-")
        words = ["write", str(out), "--prompts", str(prompts), *OPTIONS, *options]
        execute(out, rate, model, words, seed)
        arms[name] = read(out)
        speed[name] = engine_speed(out)
        if name == "block":
            sizes = bytes_per_row(out)
            rate = int(args.share * speed[name] * np.mean(list(sizes.values())))
        if name == "drop newest":
            again = folder / "follow-up"
            words = ["replay", str(out), str(again), "--only", "missing", "--fraction",
                     str(FRACTION), *OPTIONS[2:4], "--no-check", "--quiet"]  # fmt: skip
            execute(again, 0, model, words, seed)
            arms[FOLLOWED] = arms[name].followed_by(read(again))
    return {
        "seed": seed, "rate": rate, "speed": speed, "bytes": sizes,
        "arms": compare(arms, seed),
    }  # fmt: skip


def execute(out: Path, rate: int, model: Path, words: list[str], seed: int) -> None:
    """Run a command of ``actds``, unless its dataset is there.

    Args:
        rate: bytes a second that the disk takes; 0 for as many as come.
    """
    if (out / "seal").exists():
        return
    disk = FaultyDisk(out, out.with_suffix(".control"))
    disk.throttle(rate)
    engine = [part for one in ENGINE for part in ("--engine-arg", one)]
    arguments = ["-m", "actds", *words, "--model", str(model), "--seed", str(seed), *engine]
    own = h.environment(**h.ONE_PROCESS, **disk.environment())
    done = h.warm_engine().run([*arguments, *h.ALONE], own, h.TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{done.stderr}\n{' '.join(words[:2])} failed")


def engine_speed(out: Path) -> float:
    """Return the tokens a second of a run, from its first step to its last."""
    steps = actds.open(out).steps()
    t = steps["t_ns"].to_numpy()
    return float(steps["batch_tokens"].to_numpy().sum() / (t.max() - t.min()) * 1e9)


def bytes_per_row(out: Path) -> dict[str, float]:
    """Return the bytes on disk of a row, over the shards whose rows are of one kind."""
    found: dict[str, list[float]] = {"coarse": [], "plain": []}
    for shard in actds.open(out).shards:
        plain = shard.tokens(["token_id"])["token_id"].to_numpy() >= PLAIN[0]
        if plain.all() or not plain.any():
            folder = out / "shards" / shard.manifest.shard
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            found["plain" if plain.all() else "coarse"].append(size / len(plain))
    return {kind: float(np.mean(sizes)) for kind, sizes in found.items()}


# ---- rows


@dataclass
class Rows:
    """Rows of an arm: ``key`` says which, ``weight`` how many each stands for."""

    key: np.ndarray
    plain: np.ndarray
    values: np.ndarray
    weight: np.ndarray

    def followed_by(self, other: Rows) -> Rows:
        """Add those rows of a follow-up that are not here."""
        new = ~np.isin(other.key, self.key)
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Rows(*(np.concatenate([ours, theirs[new]]) for ours, theirs in pairs))

    def where(self, chosen: np.ndarray) -> Rows:
        """Return some of the rows."""
        return Rows(*(column[chosen] for column in vars(self).values()))


def read(out: Path) -> Rows:
    """Return the rows of a dataset, each with 1 over its inclusion as its weight."""
    dataset, parts = actds.open(out), []
    names = h.external_ids(dataset)
    for shard in dataset.shards:
        tokens = shard.tokens(["request", "position", "token_id", "inclusion"])
        ids = [int(names[shard.manifest.run, r]) for r in tokens["request"].to_pylist()]
        drawn = np.nan_to_num(tokens["inclusion"].to_numpy().astype(np.float64), nan=1.0)
        array = shard.array(HOOK)
        parts.append((
            np.array(ids) * 4096 + tokens["position"].to_numpy(),
            tokens["token_id"].to_numpy() >= PLAIN[0],
            h.values(array.read_all(), array.dtype),
            1 / (drawn * inclusion_of(dataset.runs[shard.manifest.run])),
        ))  # fmt: skip
    return Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


# ---- statistics


def compare(arms: dict[str, Rows], seed: int) -> dict[str, Any]:
    """Return the figures of each arm, with and without its weights."""
    whole = arms["block"]
    held_out = whole.where(whole.key // 4096 % 5 == 0)
    trained = {
        name: train(rows.where(rows.key // 4096 % 5 != 0), seed) for name, rows in arms.items()
    }
    unit, scale = trained["block"], whole.values.std(axis=0)
    rates = feature_rates(unit, whole, np.ones(len(whole.key)))
    found = {}
    for name, rows in arms.items():
        line: dict[str, Any] = {
            "rows": len(rows.key) / len(whole.key),
            "rows of plain": float(rows.plain.sum() / whole.plain.sum()),
            "rows of coarse": float((~rows.plain).sum() / (~whole.plain).sum()),
            "effective": float(rows.weight.sum() ** 2 / (rows.weight**2).sum() / len(whole.key)),
            "fvu": fvu(trained[name], held_out),
            "fvu of plain": fvu(trained[name], held_out.where(held_out.plain)),
            "fvu of coarse": fvu(trained[name], held_out.where(~held_out.plain)),
        }
        for kind, weight in (("naive", np.ones(len(rows.key))), ("weighted", rows.weight)):
            mean = np.average(rows.values, axis=0, weights=weight)
            line[f"{kind} means"] = ((mean - whole.values.mean(axis=0)) / scale).tolist()
            off = feature_rates(unit, rows, weight) - rates
            line[f"{kind} rates"] = float(np.abs(off).sum() / rates.sum())
            line[f"{kind} share of plain"] = float(np.average(rows.plain, weights=weight))
        found[name] = line
    return found


Weights = dict[str, torch.Tensor]


def codes(sae: Weights, values: np.ndarray) -> torch.Tensor:
    """Return the features of rows, of which K are active in each."""
    inputs = (torch.from_numpy(values) - sae["mean"]) / sae["scale"]
    before = torch.relu((inputs - sae["bias"]) @ sae["encoder"])
    top = before.topk(K, dim=1)
    return torch.zeros_like(before).scatter(1, top.indices, top.values)


def train(rows: Rows, seed: int) -> Weights:
    """Train a TopK dictionary on rows that are drawn in proportion to their weights."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    mean = np.average(rows.values, axis=0, weights=rows.weight)
    scale = np.sqrt(np.average((rows.values - mean) ** 2, axis=0, weights=rows.weight).mean())
    atoms = torch.nn.functional.normalize(torch.randn(N_FEATURES, rows.values.shape[1]), dim=1)
    sae = {"mean": torch.from_numpy(mean.astype(np.float32)), "scale": torch.tensor(float(scale)),
           "encoder": atoms.T.clone(), "decoder": atoms,
           "bias": torch.zeros(rows.values.shape[1])}  # fmt: skip
    learned = [sae[name].requires_grad_() for name in ("encoder", "decoder", "bias")]
    optimizer = torch.optim.Adam(learned, lr=2e-3)
    for _ in range(STEPS):
        chosen = rng.choice(len(rows.key), BATCH, p=rows.weight / rows.weight.sum())
        values = rows.values[chosen]
        wanted = (torch.from_numpy(values) - sae["mean"]) / sae["scale"]
        loss = (codes(sae, values) @ sae["decoder"] + sae["bias"] - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach() for name, value in sae.items()}


def fvu(sae: Weights, rows: Rows) -> float:
    """Return the share of the variance of rows that a dictionary leaves unexplained."""
    wanted = (torch.from_numpy(rows.values) - sae["mean"]) / sae["scale"]
    rebuilt = codes(sae, rows.values) @ sae["decoder"] + sae["bias"]
    total = (wanted - wanted.mean(dim=0)).square().sum()
    return float((rebuilt - wanted).square().sum() / total)


def feature_rates(sae: Weights, rows: Rows, weight: np.ndarray) -> np.ndarray:
    """Return the share of rows in which each feature is active, weighted."""
    active = (codes(sae, rows.values) > 0).numpy()
    return np.asarray(np.average(active, axis=0, weights=weight))


# ---- the page


def summary(found: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Return what the page says, over the seeds."""

    def of_arm(name: str) -> dict[str, Any]:
        lines = [one["arms"][name] for one in found]
        figures: dict[str, Any] = {
            field: spread([line[field] for line in lines])
            for field, value in lines[0].items()
            if not isinstance(value, list)
        }
        for kind in ("naive", "weighted"):
            off = np.array([line[f"{kind} means"] for line in lines])
            figures[f"{kind} means"] = spread(np.sqrt((off**2).mean(axis=1)).tolist())
            bias = np.sqrt((off.mean(axis=0) ** 2).mean())
            figures[f"{kind} means, mean of the seeds"] = float(bias)
        return figures

    return {
        "load": os.getloadavg()[0], "seeds": len(found), "share": args.share,
        "rate": spread([one["rate"] for one in found]),
        "speed": {name: spread([one["speed"][name] for one in found]) for name in ARMS},
        "bytes": {kind: spread([one["bytes"][kind] for one in found])
                  for kind in ("coarse", "plain")},
        "arms": {name: of_arm(name) for name in found[0]["arms"]},
    }  # fmt: skip


def spread(values: list[float]) -> list[float]:
    """Return mean and standard error."""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return [float(np.mean(values)), float(error)]


def table(figures: dict[str, Any]) -> str:
    """Return the table of the page."""
    arms = figures["arms"]
    lines = [["what", *arms], ["---", *(["---:"] * len(arms))]]
    for what, (field, kind) in COLUMNS.items():
        values = [np.atleast_1d(arm[field]) for arm in arms.values()]
        lines.append([what, *(FORMATS[kind].format(*value) for value in values)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


FORMATS = {"%": "{0:.1%}", "3": "{0:.3f}", "±": "{0:.3f} ± {1:.3f}"}
COLUMNS = {
    "rows, of the whole set": ("rows", "%"), "of plain": ("rows of plain", "%"),
    "of coarse": ("rows of coarse", "%"), "effective rows": ("effective", "%"),
    "means, naive": ("naive means", "±"), "means, weighted": ("weighted means", "±"),
    "of the mean over seeds, weighted": ("weighted means, mean of the seeds", "3"),
    "rates, naive": ("naive rates", "±"), "rates, weighted": ("weighted rates", "±"),
    "FVU": ("fvu", "±"), "FVU of plain": ("fvu of plain", "±"),
    "FVU of coarse": ("fvu of coarse", "±"),
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
