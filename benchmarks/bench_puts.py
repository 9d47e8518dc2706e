"""What live capture sends to an object store: requests and bytes, by kind of object.

A real writer and census write to a real S3-speaking server, through a proxy that counts.

    python benchmarks/bench_puts.py --requests 400
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections import Counter
from typing import Any

import pytest

from actds.dataset.reading import read_catalog
from actds.format.readouts import Readouts
from actds.format.schema import DType
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing.s3_server import BUCKET, Exchange, proxy, s3_environment, s3_server
from actds_testing.synthetic_engine import GENERATED, PROMPT_LEN, SyntheticEngine, pipeline_for
from actds_writers.ipc.messages import ClientFacts, HookSpec

KINDS = (
    (r"shards/[^/]+/shard\.json", "manifest of a shard"),
    (r"shards/[^/]+/.*zarr\.json", "metadata of a shard's arrays"),
    (r"shards/[^/]+/", "arrays and tokens of a shard"),
    (r"ledger/", "record of the ledger"),
    (r"journal/[^/]+/[0-9]+\.jsonl", "segment of the census journal"),
    (r"journal/", "heartbeat"),
    (r"readouts/", "part of the readouts"),
    (r"\.tmp-probe", "probe of the condition"),
    (r"", "other tables, genesis, run record"),
)


def kind_of(path: str) -> str:
    return next(name for pattern, name in KINDS if re.search(pattern, path))


def measure(n_hooks: int, rows_per_shard: int, n_requests: int, d_model: int) -> dict[str, Any]:
    """Return what a run of one engine has sent until its end, without the seal."""
    counts: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[str] = Counter()
    extra: set[str] = set()

    def count(exchange: Exchange) -> None:
        kind = kind_of(exchange.path)
        counts[exchange.method, kind] += 1
        extra.update(name for name in exchange.headers if "encryption" in name.lower())
        if exchange.method == "PUT":
            nbytes[kind] += int(exchange.headers.get("content-length", 0))

    dtype: DType = "bfloat16"
    hooks = tuple(
        HookSpec(f"resid_post.{i}", "resid_post", i, d_model, dtype) for i in range(n_hooks)
    )
    with pytest.MonkeyPatch.context() as patch, s3_server() as port, proxy(port, count) as front:
        s3_environment(patch, front)
        for name, value in os.environ.items():
            if name.startswith("BENCH_AWS_"):
                patch.setenv(name.removeprefix("BENCH_"), value)
        out, began = f"s3://{BUCKET}/bench", time.monotonic()
        pipeline = pipeline_for(
            out, hooks=hooks, rows_per_shard=rows_per_shard, live=True, ring_nbytes=1 << 24,
            lane_nbytes=1 << 22, readouts=Readouts(n_projections=8, seed=0),
        )  # fmt: skip
        with pipeline:
            engine = SyntheticEngine(pipeline, hooks=hooks)
            for number in range(n_requests):
                engine.request(number)
                engine.finished = (number,)
            engine.drain(pipeline)
            engine.close()
            pipeline.send_client_facts(ClientFacts())
            pipeline.finish("finished")
        seconds = time.monotonic() - began
        n_shards = len(read_catalog(open_store(out)).shards)
        before = Counter(counts)
        seal(open_store(out))
    puts = {kind: n for (method, kind), n in sorted(before.items()) if method == "PUT"}
    beats = puts.pop("heartbeat", 0)
    return {
        "hooks": n_hooks,
        "rows_per_shard": rows_per_shard,
        "rows": n_requests * (PROMPT_LEN + GENERATED - 1),
        "shards": n_shards,
        "puts": puts,
        "puts_per_shard": round(sum(puts.values()) / n_shards, 2),
        "heartbeats_per_minute": round(60 * beats / seconds, 1),
        "bytes": {kind: nbytes[kind] for kind in puts},
        "other_requests": {
            method: sum(n for (m, _), n in before.items() if m == method)
            for method in ("GET", "HEAD", "DELETE", "POST")
        },
        "encryption_headers": sorted(extra),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--d-model", type=int, default=576)
    given = parser.parse_args()
    for n_hooks in (1, 2, 4):
        for rows in (400, 1600):
            print(json.dumps(measure(n_hooks, rows, given.requests, given.d_model)), flush=True)


if __name__ == "__main__":
    main()
