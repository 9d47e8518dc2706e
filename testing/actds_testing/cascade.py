"""One cascade, recorded: a real harvest whose disk stalls, made from the tables of its dataset.

    python -m actds_testing.cascade [--write docs/cascade.md] [--stall-s 12]

The engine, the writer and the census are the real ones; only the disk is held up, by the library
of ``faulty_disk``. The page says when each stage noticed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import actds
from actds.explore.dataset import Dataset
from actds_testing import harvest as h
from actds_testing.faulty_disk import FaultyDisk
from actds_testing.recovery import shard_records
from actds_testing.tiny import make_tiny_model
from actds_validators.validate.validation import validate

OPTIONS = (
    "--hooks", "resid_post:all", *h.TINY, *h.EAGER, "--engine-arg", "max_model_len=512",
    "--engine-arg", "max_num_seqs=16", "--engine-arg", "max_num_batched_tokens=128",
    "--rows-per-shard", "3072", "--ring-mib", "12", "--max-tokens", "64",
    "--overflow", "drop_newest",
)  # fmt: skip
N_PROMPTS = 330
SLOW_S = 0.5
"""A file that the disk has had for so long makes it a slow disk here."""
BEFORE_S, AFTER_S = 3, 10

PAGE = """# One cascade, second by second

A disk stalls for {stall_s:.0f} seconds, and {n_lost:,} rows are lost, some seconds after it began.
A harvest by a real vLLM on a CPU ({rows_per_s:,.0f} rows per second of a small model, four
hooks, policy `drop_newest`, a host ring of 12 MiB, 3,072 rows per shard), made from the tables
of its own dataset, `steps` and `drops`; the dataset passed `actds validate`. t is the moment at
which the disk took its last byte. Made by `python -m actds_testing.cascade`.

| when | what | from |
| ---: | --- | --- |
{events}

Second by second, the last step of each:

| t, s | disk p99, s | to encode, KB | full buffers | ring slots | rows lost |
| ---: | ---: | ---: | ---: | ---: | ---: |
{seconds}

`disk_write_latency_p99` rises first: a file that is being written counts with what it has taken so
far. What cannot be written is not encoded either (`compression_backlog_bytes`,
`queue_depth_stage3`), then the ring fills (`queue_depth_stage2`), and only then rows are lost. Each
stage hides the one behind it for as long as it has room; averages over a minute show none of it.
Whether the lost rows differ from the others is the audit's question ([audit.md](audit.md)); how
large a ring such a stall needs is that of `actds plan --stall` ([plan.md](plan.md)).
"""


@dataclass(frozen=True)
class Stall:
    """When the disk was held up, wall clock."""

    began_ns: int
    ended_ns: int


def record(folder: Path, stall_s: float) -> tuple[Dataset, Stall]:
    """Harvest on a disk that stalls once; return the dataset and when it stalled."""
    model = make_tiny_model(folder / "model", hidden=512, dtype="float32", tokenizer=True)
    disk = FaultyDisk(folder / "acts", folder / "control")
    prompts = h.write_prompts(
        folder / "prompts.jsonl",
        [
            {"id": f"p{n}", "prompt": f"Chapter {n}. " + "The disk and the ring. " * (1 + n % 9)}
            for n in range(N_PROMPTS)
        ],
    )
    with disk.injected():
        process = subprocess.Popen(
            h.command(disk.folder, model, prompts, *OPTIONS),
            env=h.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        _wait(lambda: len(shard_records(disk.folder)) >= 2, process)
        disk.stall()
        began_ns = time.time_ns()
        time.sleep(stall_s)
        stall = Stall(began_ns, time.time_ns())
        disk.release()
        _, stderr = process.communicate(timeout=h.TIMEOUT_S)
    finally:
        disk.release()
        process.kill()
    if process.returncode:
        raise SystemExit(stderr)
    found = validate(disk.folder)
    if found.findings:
        raise SystemExit(f"the dataset does not validate: {found.findings[0]}")
    return actds.open(disk.folder), stall


def _wait(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + h.TIMEOUT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the harvest ended too early: {process.communicate()[1]}")
        time.sleep(0.02)


def page(dataset: Dataset, stall: Stall) -> str:
    """Return the page."""
    steps, drops = dataset.steps().to_pandas(), dataset.drops().to_pandas()
    steps["t"] = (steps["t_ns"] - stall.began_ns) / 1e9
    drops["t"] = (drops["t_ns"] - stall.began_ns) / 1e9
    drops["n"] = drops["stop"] - drops["start"]
    if not len(drops):
        raise SystemExit("nothing was lost: the stall was too short for this machine")
    late = steps[steps["t"] > 0]
    calm = steps[steps["t"] <= 0]
    stall_s = (stall.ended_ns - stall.began_ns) / 1e9

    def first(column: str, above: float) -> float | None:
        found = late.loc[late[column] > above, "t"]
        return float(found.iloc[0]) if len(found) else None

    ring = int(drops["queue_depth_stage2"].max())
    fault = "the fault that was injected"
    told = [
        (0.0, "the disk takes no byte more", fault),
        (
            first("disk_write_latency_p99", SLOW_S),
            f"`disk_write_latency_p99` is over {SLOW_S} s",
            "`steps`",
        ),
        (first("queue_depth_stage3", 0), "a full buffer waits for its turn", "`steps`"),
        (first("queue_depth_stage2", ring - 1), f"the ring is full: {ring} slots", "`steps`"),
        (drops["t"].min(), "the first rows are lost, `queue_full`", "`drops`"),
        (stall_s, "the disk takes bytes again", fault),
        (drops["t"].max(), "the last rows are lost", "`drops`"),
    ]
    events = [
        f"| t + {t:.1f} s | {what} | {source} |"
        for t, what, source in sorted((t, *words) for t, *words in told if t is not None)
    ]
    rows = []
    for second in range(-BEFORE_S, int(stall_s) + AFTER_S):
        here = steps[(steps["t"] >= second) & (steps["t"] < second + 1)]
        lost = drops.loc[(drops["t"] >= second) & (drops["t"] < second + 1), "n"].sum()
        if not len(here):
            continue
        last = here.iloc[-1]
        cells = [
            f"{second + 1}",
            f"{last['disk_write_latency_p99']:.2f}",
            f"{last['compression_backlog_bytes'] / 1e3:,.0f}",
            f"{last['queue_depth_stage3']:.0f}",
            f"{last['queue_depth_stage2']:.0f}",
            f"{int(lost):,}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    span = max(1e-9, float(calm["t"].max() - calm["t"].min()))
    return PAGE.format(
        stall_s=stall_s,
        n_lost=int(drops["n"].sum()),
        rows_per_s=calm["batch_tokens"].sum() / span,
        events="\n".join(events),
        seconds="\n".join(rows),
    )


def main() -> None:
    """Record a cascade and print or write its page."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--stall-s", type=float, default=12.0)
    args = parser.parse_args()
    # In memory: the only disk in this is the one that is held up.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        dataset, stall = record(Path(folder), args.stall_s)
        text = page(dataset, stall)
    if args.write is None:
        print(text)
    else:
        args.write.write_text(text)
        print(json.dumps({"written": str(args.write)}))


if __name__ == "__main__":
    main()
