"""Whether writing or loading got slower: this tree against an older one, in turns.

    python benchmarks/against.py OLD_TREE [--rounds 20] [--what write load audit] [--json]

One process of each tree does the same work, never both at a time: which is first changes from
round to round. *Write*: from the ring to committed shards of 2,048 channels, 0.54 GB in a memory
file system, on one thread (``bench_writer.py`` of each tree). *Load*: a pass over 65,536 rows of
576 channels after a first one, files in the page cache. Each with the default codec and raw.
*Audit*: ``actds.audit`` of 300,000 simulated tokens with readouts, as the tree wrote them. The
ratio is taken per round, of CPU seconds, so that what slows a machine down for a while is in both;
its interval is that of the median (order statistics, 95 %).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from math import comb
from pathlib import Path

from bench_codec import synthetic, table, timed

MIB, N_SHARDS = 128, 4
N_ROWS, D_MODEL, BATCH = 65_536, 576, 4096
N_TOKENS = 300_000
WHAT = ("write", "load")


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; ratios are new to old, of CPU seconds."""

    work: str
    old_cpu_s: float
    new_cpu_s: float
    old_wall_s: float
    new_wall_s: float
    ratio: float
    low: float
    high: float


class Tree:
    """A process with the packages and the benchmarks of a tree."""

    def __init__(self, root: Path, folder: Path) -> None:
        parts = [root, root / "writers", root / "validators", root / "testing", root / "benchmarks"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, parts))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(root), "--serve", str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def time(self, work: str) -> tuple[float, float]:
        """Return CPU and wall seconds of some work."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(work, file=self._process.stdin, flush=True)
        cpu, wall = json.loads(self._process.stdout.readline())
        return cpu, wall

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(root: Path, folder: Path) -> None:
    """Do the work that standard input names, and print what each took: the other process."""
    from bench_audit import write
    from bench_writer import Work, ours
    from load_data import activations, make_dataset

    import actds

    if not Path(actds.__file__).is_relative_to(root.resolve()):
        raise SystemExit(f"{actds.__file__} is not of {root}")
    loaders, work = {}, Work(synthetic(MIB * 2**20 // 4096), 1, N_SHARDS)
    for line in sys.stdin:
        what, _, codec = line.strip().partition(", ")
        if what == "write":
            with tempfile.TemporaryDirectory(dir=folder) as base:
                took = timed(partial(ours(1, raw=codec == "raw"), Path(base), work))
        elif what == "audit":
            if not (folder / what).exists():
                write(folder / what, N_TOKENS, readouts=True)
            took = timed(partial(actds.audit, folder / what / "dataset"))
        else:
            if codec not in loaders:  # of its own tree: a format may have changed between them
                rows = activations(N_ROWS // 4, D_MODEL, 0)
                make_dataset(folder / codec, rows, 4, codec == "raw")
                loaders[codec] = actds.Loader(folder / codec, "resid_post.10", batch=BATCH)
            batches = islice(loaders[codec], N_ROWS // BATCH)
            took = timed(partial(deque, batches, maxlen=0))
        print(json.dumps(took), flush=True)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the order statistics between which the median lies with 95 %."""
    n, below, k = len(values), 0.0, 0
    while below + comb(n, k) / 2**n <= 0.025:
        below += comb(n, k) / 2**n
        k += 1
    ordered, k = sorted(values), max(0, k - 1)
    return ordered[k], ordered[n - 1 - k]


def measure(trees: dict[str, Tree], work: str, rounds: int) -> Result:
    """Return what some work takes in each tree."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
    for number in range(-1, rounds):
        for name in sorted(trees, reverse=bool(number % 2)):
            took = trees[name].time(work)
            taken[name] += [took] * (number >= 0)
    ratios = [new[0] / old[0] for old, new in zip(taken["old"], taken["new"], strict=True)]
    cpu, wall = (
        {name: statistics.median(pair[i] for pair in taken[name]) for name in trees} for i in (0, 1)
    )
    return Result(
        work, cpu["old"], cpu["new"], wall["old"], wall["new"],
        statistics.median(ratios), *interval(ratios),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--what", nargs="+", choices=(*WHAT, "audit"), default=WHAT)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.old, args.serve)
        return
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shm) as base:
        roots = {"old": args.old, "new": Path(__file__).resolve().parents[1]}
        for name in roots:
            (Path(base) / name).mkdir()
        trees = {name: Tree(root, Path(base) / name) for name, root in roots.items()}
        codecs = ("default codec", "raw")
        works = [f"{what}, {codec}" for what in args.what if what in WHAT for codec in codecs]
        works += ["audit"] if "audit" in args.what else []
        results = [asdict(measure(trees, work, args.rounds)) for work in works]
        for tree in trees.values():
            tree.end()
    if args.json:
        print(json.dumps({"schema": "actds.against/1", "results": results}))
        return
    print(table(results))


if __name__ == "__main__":
    main()
