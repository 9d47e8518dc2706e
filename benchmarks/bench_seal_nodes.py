"""What a seal costs by shards and runs: seconds, CPU, requests and bytes, in a folder and over S3.

Real ledgers, shards and census tables of simulated runs; the seal is the command in a process of
its own. moto is behind a proxy that counts; a Ceph of one machine writes a log of its requests.

    python benchmarks/bench_seal_nodes.py --shards 100 1000 --runs 64
    python benchmarks/bench_seal_nodes.py --shards 10000 --runs 64 --server ceph
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_puts import kind_of

from actds.store import open_store
from actds_testing.ceph import GATEWAY_LOG, ceph
from actds_testing.s3_server import BUCKET, Exchange, proxy, s3_environment
from actds_testing.schedules import Schedule, simulate
from actds_testing.synthetic import make_dataset

SERVER = """
import sys
from pathlib import Path
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer
folder, bucket = Path(sys.argv[1]), sys.argv[2]
backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
backend.create_bucket(bucket, "us-east-1")
for path in folder.rglob("*"):
    if path.is_file():
        name = f"bench/{path.relative_to(folder).as_posix()}"
        backend.put_object(bucket, name, path.read_bytes())
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
HOOK, D_MODEL, N_REQUESTS = "resid_post.0", 16, 12


def rows_per_shard(schedule: Schedule, n_shards: int) -> int:
    """Return how many rows make the number of a run's shards nearest to what is wanted."""
    phases = np.asarray(schedule.rows["phase"])
    sizes = [int((phases == phase).sum()) for phase in np.unique(phases)]
    made = {rows: sum(-(-size // rows) for size in sizes) for rows in range(1, max(sizes) + 1)}
    return min(made, key=lambda rows: abs(made[rows] - n_shards))


def make(folder: Path, n_runs: int, n_shards: int) -> int:
    """Write the runs of a dataset that is not sealed; return how many shards it has."""
    n_requests, made = max(N_REQUESTS, n_shards // n_runs // 6), 0
    for number in range(n_runs):
        schedule = simulate(n_requests, number)
        wanted = round((n_shards - made) / (n_runs - number))
        make_dataset(
            folder, schedule=schedule, hooks=(HOOK,), d_model=D_MODEL, run=f"r-{number:03}",
            rows_per_shard=rows_per_shard(schedule, wanted), sealed=False,
        )  # fmt: skip
        made = sum(1 for _ in (folder / "shards").iterdir())
    return made


def command(*words: str) -> dict[str, float]:
    """Run a command of ``actds``; return its seconds, and CPU seconds and memory of its own."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "actds", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, said.decode()
    return {
        "s": round(time.monotonic() - began, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_mb": used.ru_maxrss // 1000,
    }


@contextmanager
def loaded_server(folder: Path) -> Iterator[int]:
    """Yield the port of an S3 server that has the files already: 60,000 puts are not the bench."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder), BUCKET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def over_ceph(folder: Path, scratch: Path) -> dict[str, Any]:
    """Put the files into a Ceph and seal them there; return what that took."""
    with pytest.MonkeyPatch.context() as patch, ceph(scratch / "ceph") as port:
        s3_environment(patch, port)
        local, far, began = open_store(folder), open_store(f"s3://{BUCKET}/bench"), time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            files = local.list()
            list(pool.map(lambda path: far.put_new(path, [local.read(path)]), files))
        put_s = round(time.monotonic() - began, 1)
        log = scratch / "ceph" / GATEWAY_LOG
        before = log.stat().st_size
        spent = command("seal", f"s3://{BUCKET}/bench")
        time.sleep(5)  # the log is written by a thread of its own
        with log.open(encoding="utf-8", errors="replace") as lines:
            lines.seek(before)
            said = re.findall(
                r'"(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP/1.1" (\d+) (\d+)', lines.read()
            )
    counts: Counter[str] = Counter()
    for method, path, status, _ in said:
        kind = "listing" if "list-type" in path else kind_of(path)
        counts[f"{method} {kind}" if status < "300" else f"{method} {kind}: {status}"] += 1
    nbytes = sum(int(n) for method, _, _, n in said if method == "GET")
    about = {"files": len(files), "put_s": put_s, "s3": spent, "n_requests": len(said)}
    return about | {"requests": dict(sorted(counts.items())), "bytes": {"GET": nbytes}}


def measure(n_runs: int, n_shards: int, scratch: Path, server: str) -> dict[str, Any]:
    folder = scratch / f"{n_shards}"
    is_there = folder.exists()
    made = len([*(folder / "shards").iterdir()]) if is_there else make(folder, n_runs, n_shards)
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    lock = threading.Lock()

    def count(exchange: Exchange) -> None:
        name = f"{exchange.method} {kind_of(exchange.path)}"
        name = "GET listing" if "list-type" in exchange.path else name
        with lock:
            counts[name] += 1
            if exchange.method == "PUT":
                nbytes["PUT"] += int(exchange.headers.get("content-length", 0))
            elif exchange.method == "GET":  # documents and tables are asked for whole
                file = folder / exchange.path.partition("/bench/")[2].partition("?")[0]
                nbytes["GET"] += file.stat().st_size if file.is_file() else 0

    found: dict[str, Any] = {"runs": n_runs, "shards": made}
    if server == "ceph":
        found |= over_ceph(folder, scratch)
    elif server == "moto":
        with pytest.MonkeyPatch.context() as patch, loaded_server(folder) as port:
            with proxy(port, count) as front:
                s3_environment(patch, front)
                found["s3"] = command("seal", f"s3://{BUCKET}/bench")
            found["requests"] = dict(sorted(counts.items()))
            found["n_requests"], found["bytes"] = sum(counts.values()), dict(nbytes)
    found["folder"] = command("seal", str(folder))
    found["validate"] = command("validate", str(folder), "--level", "quick")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--server", choices=["moto", "ceph", "none"], default="moto")
    parser.add_argument("--scratch", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        for n_shards in given.shards:
            found = measure(given.runs, n_shards, Path(scratch), given.server)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
