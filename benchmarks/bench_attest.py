"""How often `actds attest` accuses honest datasets, and how often it finds others.

    python benchmarks/bench_attest.py [--model demo/model] [--prompts FILE] [--work FOLDER]

One dataset is written by the engine. Its token sequences are then served by the model with other
kernels, and by changed copies of it: the readouts of each are taken for those of a dataset. All
requests are served once; some of these are drawn a thousand times, and `score` answers of each draw
as the command does. What is in FOLDER from an earlier call is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import torch
from safetensors.torch import load_file, save_file

from actds.dataset.reading import read_catalog
from actds.explore import dataset as reading
from actds.format.readouts import directions, readouts_of
from actds.format.schema import DType
from actds.store import open_store
from actds_writers.harvest.attest import depth_of, draw, readout_lines, replayed_readouts
from actds_writers.harvest.canary import pairs_of
from actds_writers.harvest.fingerprints import HookPairs, distances, score

HOOKS = "resid_post:10,20"
ENGINE = ("block_size=32", "max_model_len=2048", "enforce_eager=true")
OLD_CPU = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
ANY_MODEL = (
    "import actds_writers.harvest.replay as r; r.Replays._require_model = lambda *a: None; "
    "from actds.cli import main; main()"
)
"""A changed copy is served as if its digest were that on record: as who lies would say."""
Readouts = dict[str, np.ndarray]


def changed(kind: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a matrix: rounded by rows to 8 bits or by 64 weights to 4, or with Gaussian noise."""
    w = tensor.float()
    if kind == "8 bits":
        step = w.abs().amax(1, keepdim=True) / 127
        w = (w / step).round() * step
    elif kind == "4 bits":
        groups = w.reshape(w.shape[0], -1, 64)
        step = groups.abs().amax(2, keepdim=True) / 7
        w = ((groups / step).round() * step).reshape(w.shape)
    else:
        noise = torch.randn(w.shape, generator=generator)
        w = w + float(kind.split()[1]) * w.std() * noise
    return w.to(tensor.dtype)


def changed_copy(model: Path, kind: str, out: Path) -> Path:
    """Write a copy of a model with every matrix but the embedding changed, in its own type."""
    if not out.exists():
        shutil.copytree(model, out)
        generator = torch.Generator().manual_seed(0)
        tensors = load_file(out / "model.safetensors")
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and "embed" not in name:
                tensors[name] = changed(kind, tensor, generator)
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@dataclass(frozen=True)
class Served:
    """The token sequences of the dataset, as something serves them."""

    name: str
    dtype: DType = "bfloat16"
    kind: str | None = None
    engine: str = "vllm"
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


HONEST = (
    Served("other order", options=("--neighbours", "2")),
    Served("alone", options=("--alone",)),
    Served("AVX2 kernels", environment=tuple(OLD_CPU.items())),
    Served("transformers", engine="transformers"),
)
CONTROLS = tuple(
    Served(kind, kind=kind) for kind in ("8 bits", "4 bits", "noise 0.01", "noise 0.001")
)


def in_float32(served: Served) -> Served:
    return replace(served, name=f"{served.name}, float32", dtype="float32")


@dataclass(frozen=True)
class Work:
    model: Path
    prompts: Path
    folder: Path

    def source(self, n: int) -> Path:
        out = self.folder / "source"
        lines = self.prompts.read_text().splitlines()
        some = self.folder / "prompts.jsonl"
        some.write_text("\n".join(random.Random(1).sample(lines, min(n, len(lines)))) + "\n")
        words = ["write", str(out), "--prompts", str(some), "--hooks", HOOKS, "--max-tokens", "24"]
        self._run([*words, "--model", str(self.model), *_options("bfloat16")], out, {})
        return out

    def serve(self, served: Served) -> Path:
        out = self.folder / served.name.replace(", ", "-").replace(" ", "_")
        model = self.model
        if served.kind is not None:
            name = f"model-{served.kind.replace(' ', '_')}"
            model = changed_copy(model, served.kind, self.folder / name)
        words = ["replay", str(self.folder / "source"), str(out), "--model", str(model)]
        engine = ["--engine", "transformers", "--engine-arg", f"dtype={served.dtype}"]
        engine = engine if served.engine == "transformers" else _options(served.dtype)
        self._run([*words, *served.options, *engine], out, dict(served.environment))
        return out

    def _run(self, words: list[str], out: Path, environment: Mapping[str, str]) -> None:
        if (out / "seal").exists():
            return
        shutil.rmtree(out, ignore_errors=True)
        began = time.monotonic()
        command = [sys.executable, "-c", ANY_MODEL, *words, "--quiet"]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\n{done.stderr[-2000:]}")
        print(f"{out.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _options(dtype: str) -> list[str]:
    return [word for option in (*ENGINE, f"dtype={dtype}") for word in ("--engine-arg", option)]


class Fingerprints:
    """The readouts of every request of the dataset, as written and as served again."""

    def __init__(self, work: Work, n_requests: int) -> None:
        self.work = work
        source = reading.open(work.source(n_requests))
        (self.run,) = source.runs
        self.source, self.hooks = source, source.hooks
        self.drawn = draw(source, [self.run], 0, 1.0)
        self.number = {request: n for n, (_, request) in enumerate(self.drawn)}
        lengths = {r: len(self.drawn[self.run, r].token_id) for r in self.number}
        lines = readout_lines(source.catalog, self.run, lengths)
        self.lines = {name: lines.filter(pc.equal(lines["hook"], name)) for name in self.hooks}
        self.spec = readouts_of(source.runs[self.run])
        assert self.spec is not None

    @property
    def written(self) -> Readouts:
        return {
            name: np.column_stack([of["norm"].to_numpy(), np.stack(of["projections"].to_pylist())])
            for name, of in self.lines.items()
        }

    @cache  # noqa: B019
    def of(self, served: Served) -> Readouts:
        catalog = read_catalog(open_store(self.work.serve(served)))
        pairs = list(pairs_of(catalog, self.drawn.values()))
        assert self.spec is not None
        numbers = {}
        for name, of in self.lines.items():
            packed = directions(self.spec.n_projections, self.hooks[name].d_model, self.spec.seed)
            places = (of[c].to_numpy().astype(np.int64) for c in ("request", "position"))
            numbers[name] = replayed_readouts(catalog, pairs, name, packed, *places)
        return numbers

    def pairs(self, dataset: Readouts, again: Readouts, exact: Readouts) -> dict[str, HookPairs]:
        pairs = {}
        for name, of in self.lines.items():
            three = [part[name].astype(np.float32) for part in (dataset, again, exact)]
            has = np.isfinite([numbers[:, 0] for numbers in three]).all(axis=0)
            request = np.array([self.number[r] for r in of["request"].to_pylist()])[has]
            stored, replayed, reference = (numbers[has] for numbers in three)
            d = self.hooks[name].d_model
            apart, again_apart = (distances(rows, reference, d) for rows in (stored, replayed))
            pairs[name] = HookPairs(
                request, apart, again_apart, depth_of(self.hooks[name], self.source)
            )
        return pairs

    def swapped(self, numbers: Readouts, share: float) -> Readouts:
        """Return readouts in which every so-manieth request has the last rows of the one after."""
        made = {}
        for name, of in self.lines.items():
            request = np.array([self.number[r] for r in of["request"].to_pylist()])
            made[name] = numbers[name].copy()
            for first in range(0, len(self.number) - 1, round(1 / share)):
                rows, other = (np.flatnonzero(request == r) for r in (first, first + 1))
                n = min(len(rows), len(other))
                made[name][rows[len(rows) - n :]] = numbers[name][other[len(other) - n :]]
        return made


def some(pairs: Mapping[str, HookPairs], chosen: np.ndarray) -> dict[str, HookPairs]:
    """Return the pairs of chosen requests, numbered anew."""
    part = {}
    for name, of in pairs.items():
        rows = np.flatnonzero(np.isin(of.request, chosen))
        request = np.searchsorted(chosen, of.request[rows])
        part[name] = replace(of, request=request, dataset=of.dataset[rows], replay=of.replay[rows])
    return part


def cases(made: Fingerprints) -> Iterator[tuple[str, str, DType, dict[str, HookPairs]]]:
    """Yield what stands for the dataset, what replays it, the type on record, and the pairs."""
    again, exact = Served("again"), in_float32(Served("again"))
    by = {served.name: served for served in (again, *HONEST)}
    written, reference = made.written, made.of(exact)
    for replayed in (again, by["AVX2 kernels"], by["transformers"]):
        yield (
            "as written",
            replayed.name,
            "bfloat16",
            made.pairs(written, made.of(replayed), reference),
        )
    for served in (*HONEST, *CONTROLS):
        pairs = made.pairs(made.of(served), made.of(again), reference)
        yield served.name, again.name, "bfloat16", pairs
    names = ("alone", "AVX2 kernels", "transformers")
    old = made.of(in_float32(by["AVX2 kernels"]))
    yield exact.name, f"{exact.name} on AVX2", "float32", made.pairs(reference, old, reference)
    for served in (*(by[name] for name in names), CONTROLS[0], CONTROLS[-1]):
        pairs = made.pairs(made.of(in_float32(served)), reference, reference)
        yield in_float32(served).name, exact.name, "float32", pairs
    old = made.of(by["AVX2 kernels"])
    for share in (0.5, 0.1):
        pairs = made.pairs(made.swapped(written, share), old, reference)
        yield f"{share:.0%} of requests swapped", "AVX2 kernels", "bfloat16", pairs
    first, second = written
    layer = {**written, first: written[second]}
    yield "another layer", "AVX2 kernels", "bfloat16", made.pairs(layer, old, reference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--prompts", type=Path, default=Path("demo/prompts.jsonl"))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--draws", type=int, default=1000)
    given = parser.parse_args()
    folder = given.work or Path(tempfile.mkdtemp(prefix="actds-bench-attest-"))
    folder.mkdir(exist_ok=True)
    made = Fingerprints(Work(given.model.resolve(), given.prompts, folder), given.requests)
    print("| dataset | replay | requests | distance | ratio | same | another | cannot tell |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    everything = {}
    for dataset, replayed, dtype, pairs in cases(made):
        whole = score(pairs, list(map(str, range(len(made.drawn)))), dtype)
        distance, ratio = (
            " and ".join(f"{getattr(hook, name):.3g}" for hook in whole.hooks)
            for name in ("distance", "ratio")
        )
        for n in (5, 10, 20):
            rng = np.random.default_rng(n)
            answers: Counter[str] = Counter()
            for _ in range(given.draws):
                chosen = np.sort(rng.choice(len(made.drawn), n, replace=False))
                answers[score(some(pairs, chosen), list(map(str, chosen)), dtype).verdict] += 1
            shares = {a: answers[a] / given.draws for a in ("same", "another", "cannot tell")}
            everything[f"{dataset} / {replayed} / {n}"] = shares
            words = " | ".join(f"{share:.1%}" for share in shares.values())
            print(f"| {dataset} | {replayed} | {n} | {distance} | {ratio} | {words} |", flush=True)
    (folder / "results.json").write_text(json.dumps(everything, indent=1))
    if given.work is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
