"""What sealing costs where many engines wrote one dataset: seconds, and requests to a store.

    python benchmarks/bench_seal.py [--shards 100 1000 10000] [--on-store 1000] [--runs 64]

Runs and shards are real and small: every shard has 16 rows of 16 channels, every run its census of
one request for every two shards. Sealing reads documents and tables, no array. On the object store
a proxy in front of a real S3-speaking server counts what it is asked.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from actds.dataset.reading import Catalog
from actds.publish.sealing import seal
from actds.store import open_store
from actds.store.local import LocalStore
from actds_testing.s3_server import BUCKET, Exchange, proxy, s3_environment, s3_server
from actds_testing.synthetic import make_dataset

ROWS_PER_SHARD = 16


def write(path: Path, n_shards: int, n_runs: int) -> Path:
    """Write an unsealed dataset of about so many shards; nothing is synced to the disk."""
    per_run = max(1, n_shards // n_runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for run in range(n_runs):
            make_dataset(
                path, n_requests=max(1, per_run // 2), seed=run, run=f"r-{run:04d}", sealed=False,
                hooks=("resid_post.0",), rows_per_shard=ROWS_PER_SHARD,
            )  # fmt: skip
    return path


def timed(where: str) -> dict[str, Any]:
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    seal(where)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    catalog = Catalog.read(open_store(where))
    return {
        "runs": len(catalog.runs_with_data),
        "shards": len(catalog.shards),
        "rows": sum(manifest.n_rows for manifest in catalog.shards),
        "seconds": round(time.monotonic() - began, 2),
        "cpu_seconds": round(cpu_s, 2),
        "max_rss_mib": after.ru_maxrss >> 10,
    }


def on_store(path: Path) -> dict[str, Any]:
    """Copy an unsealed dataset to a server, and seal it there; returns the requests by method."""
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()

    def count(exchange: Exchange) -> None:
        counts[exchange.method] += 1
        nbytes[exchange.method] += int(exchange.headers.get("content-length", 0))

    with pytest.MonkeyPatch.context() as patch, s3_server() as port:
        s3_environment(patch, port)
        where, local = f"s3://{BUCKET}/seal", LocalStore(path)
        store = open_store(where)
        for name in local.list():
            store.put_new(name, [local.read(name)])
        with proxy(port, count) as front:
            s3_environment(patch, front)
            seal(where)
            asked = dict(counts)
        s3_environment(patch, port)
        shutil.rmtree(path)
        return {"shards": len(Catalog.read(open_store(where)).shards), "requests": asked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--on-store", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--runs", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        for n in given.shards:
            path = write(Path(base) / f"d{n}", n, given.runs)
            print(json.dumps({"store": "folder", **timed(str(path))}), flush=True)
            shutil.rmtree(path)
        for n in given.on_store:
            path = write(Path(base) / f"s{n}", n, given.runs)
            print(json.dumps({"store": "s3", **on_store(path)}), flush=True)


if __name__ == "__main__":
    main()
