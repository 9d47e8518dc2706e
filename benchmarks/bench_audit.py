"""Cost of ``actds audit`` by tokens: seconds, memory and size of the report.

    python benchmarks/bench_audit.py [--tokens 1000000 10000000] [--readouts] [--folder DIR]

Datasets come from the simulator (scenario ``large_batch``: full queues; readouts of one hook where
asked, norm and 8 projections) and stay in the folder, where a later call finds them; a token takes
about 20 bytes, with readouts 60, and writing 100 million takes minutes. The command runs in a
process of its own; seconds, CPU seconds and the largest resident memory are those that the kernel
counted for it (wait4), its start included. ``--json`` prints the numbers for machines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench_codec import table

ROOT = Path(__file__).resolve().parents[1]
SEED = 4


@dataclass(frozen=True)
class Result:
    """One audit."""

    tokens: int
    runs: int
    dataset_mb: float
    wall_s: float
    cpu_s: float
    peak_mb: float
    report_kb: float
    verdict: str


def dataset(folder: Path, n_tokens: int, *, readouts: bool) -> Path:
    """Return a sealed dataset of about so many computed tokens, written where it is missing."""
    path = folder / f"simulated-{n_tokens}{'-readouts' if readouts else ''}"
    if not (path / "written").exists():
        if path.exists():
            raise SystemExit(f"{path} was not written to its end; remove it")
        # Not here: what is started later would inherit the largest resident memory (ru_maxrss).
        process = multiprocessing.get_context("spawn").Process(
            target=write, args=(path, n_tokens, readouts)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{path} could not be written")
    return path / "dataset"


def write(path: Path, n_tokens: int, readouts: bool) -> None:
    """Write the dataset, and beside it, when it is complete, a mark."""
    from actds_testing.simulate import SCENARIOS, write_tables

    began, done = time.monotonic(), 0

    def progress(n: int) -> None:
        nonlocal done
        done += n
        said = f"{done / n_tokens:.0%} of {n_tokens:,} tokens, {time.monotonic() - began:.0f} s"
        print(said, file=sys.stderr, flush=True)

    scenario = replace(SCENARIOS["large_batch"], readouts=readouts, n_projections=8)
    write_tables(path / "dataset", n_tokens, scenario=scenario, seed=SEED, progress=progress)
    (path / "written").touch()


def measure(path: Path) -> Result:
    """Return what one audit of a dataset takes, everything written: page, JSON and terminal."""
    with tempfile.TemporaryDirectory() as out:
        page, result = Path(out) / "audit.html", Path(out) / "audit.json"
        command = [sys.executable, "-m", "actds", "audit", str(path)]
        command += ["--html", str(page), "--json", str(result), "--fail-on", "never"]
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"actds audit {path} ended with code {process.returncode}")
        found = json.loads(result.read_text())
        nbytes = page.stat().st_size
    return Result(
        tokens=found["accounting"]["computed"],
        runs=len(found["runs"]),
        dataset_mb=sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) / 1e6,
        wall_s=wall,
        cpu_s=used.ru_utime + used.ru_stime,
        peak_mb=used.ru_maxrss * 1024 / 1e6,
        report_kb=nbytes / 1e3,
        verdict=f"{found['verdict']['level']} ({found['verdict']['kind']})",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--readouts", action="store_true", help="of one hook")
    parser.add_argument("--folder", type=Path, help="where datasets stay; temporary when absent")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        results = [measure(dataset(folder, n, readouts=args.readouts)) for n in args.tokens]
    rows = [asdict(result) for result in results]
    if args.json:
        print(json.dumps({"format": "actds.bench_audit", "version": "1", "results": rows}))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
