"""A lossy harvest of a real model with the real engine, backfilled: every position has a row.

Checked from the outside: Parquet and zarr are read by libraries of others, and nothing of the
accounting of this package is asked.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorstore

import actds
from actds_testing import harvest as h

pytestmark = [pytest.mark.engine, pytest.mark.full]

HOOKS = ("resid_post.5", "resid_post.10", "resid_post.20", "resid_post.25")
N_GROUPS, N_EACH = 6, 5
# The writer stands still while requests are served, so that the ring runs over; then two are cut
# off in the middle.
LOSSY = """
import json, sys
from actds_testing.synthetic_engine import writer_stopped
from actds_writers.config import WriteSettings
from actds_writers.harvest.one_engine import Feed
from actds_writers.harvest.run import harvest

class Stalled(Feed):
    def serve(self, engine):
        last = [self.queue.pop(0) for _ in range(2)]
        with writer_stopped(self.poll.__self__):
            super().serve(engine)
        for encoded in last:
            self.add(engine, encoded)
        for _ in range(3):
            self.step(engine)
        self.abort(engine, set(self.live))

harvest(WriteSettings.of(json.loads(sys.argv[1])), feed=Stalled)
"""
REPLAY = "from actds_writers.cli import replay; replay()"

Position = tuple[int, int]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = h.warm_engine().run(
        ["-c", code, *arguments], h.environment(**h.ONE_PROCESS), h.FORKED_TIMEOUT_S
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def lines(path: Path, table: str) -> list[dict[str, Any]]:
    """Return the lines of a table of the only run of a dataset."""
    [run] = (path / "census").iterdir()
    return [line for part in sorted(run.glob(f"{table}-*.parquet"))
            for line in pq.read_table(part).to_pylist()]  # fmt: skip


def values_of(array: Path) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(array)}}
    values: np.ndarray = tensorstore.open(spec, read=True).result().read().result()
    return values.view(np.uint16)


def stored(path: Path) -> dict[Position, tuple[int, np.ndarray]]:
    """Return token and bits of the first hook's row of each stored position."""
    found: dict[Position, tuple[int, np.ndarray]] = {}
    for shard in sorted((path / "shards").iterdir()):
        tokens = pq.read_table(shard / "tokens.parquet").to_pylist()
        rows = {name: values_of(shard / "acts.zarr" / name) for name in HOOKS}
        for i, line in enumerate(tokens):
            name = line["request"], line["position"]
            assert name not in found
            assert all(rows[hook][i].any() for hook in HOOKS)
            found[name] = line["token_id"], rows[HOOKS[0]][i]
        assert all(len(rows[hook]) == len(tokens) for hook in HOOKS)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    records = [
        {"id": f"g{group}-{i}",
         "prompt": f"Story {group}. " + f"Once upon a time there were {group} old foxes. " * 4
         + f"The one of number {i} said that"}
        for group in range(N_GROUPS) for i in range(N_EACH)
    ]  # fmt: skip
    settings = {
        "out": str(folder / "acts"), "model": str(h.REAL_MODEL), "hooks": "resid_post:5,10,20,25",
        "prompts": str(h.write_prompts(folder / "prompts.jsonl", records)), "max_tokens": 6,
        "overflow": "drop_newest", "ring_mib": 1, "staging_mib": 1, "rows_per_shard": 128,
        "check": False, "engine_args": {
            "enforce_eager": True, "max_model_len": 512, "max_num_seqs": N_EACH,
            "max_num_batched_tokens": 96, "distributed_executor_backend": "uni",
            "block_size": 32,
        },
    }  # fmt: skip
    run(LOSSY, json.dumps(settings))
    h.validated(folder / "acts")
    return folder / "acts"


@pytest.fixture(scope="module")
def backfill(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the replay of what is missing, and its summary."""
    out = tmp_path_factory.mktemp("missing") / "missing"
    done = run(
        REPLAY, str(source), str(out), "--model", str(h.REAL_MODEL), "--only", "missing",
        "--no-check", *h.EAGER, *h.ALONE, "--engine-arg", "max_model_len=512",
        "--engine-arg", "block_size=32", "--engine-arg", "max_num_seqs=4",
    )  # fmt: skip
    h.validated(out)
    return out, done.stdout


def rows_by_position(path: Path) -> dict[Position, Position]:
    """Return by position where its row is: its own, or that of the request that it was hit on."""
    rows, found = stored(path), {}
    for span in lines(path, "spans"):
        owner = span["ref_request"] if span["disposition"] == "cache_ref" else span["request"]
        for n in range(span["start"], span["stop"]):
            if owner is not None and (owner, n) in rows:
                found[span["request"], n] = owner, n
    return found


def test_after_a_backfill_no_position_lacks_a_row(source: Path, backfill: tuple[Path, str]) -> None:
    out, summary = backfill
    requests = {line["request"]: line for line in lines(source, "requests")}
    known = {n: line for n, line in requests.items() if line["token_digest"] is not None}
    reasons = Counter(line["finish_reason"] for line in requests.values())
    assert reasons == {"length": N_GROUPS * N_EACH - 2, "abort": 2}
    assert len(known) == len(requests), "the census knows what each has fed"
    owed = {
        (n, position)
        for n, line in known.items()
        for position in range(line["prompt_len"] + line["generated_len"] - 1)
    }
    before = rows_by_position(source)
    lost = {place for place in owed if place not in before}
    kinds = Counter(
        span["disposition"] for span in lines(source, "spans")
        if any((span["request"], n) in lost for n in range(span["start"], span["stop"]))
    )  # fmt: skip
    assert kinds["dropped"] and kinds["cache_ref"], "a hit on a dropped row has none either"
    assert any(place in before for place in owed)

    origin = {line["request"]: line["source_request"] for line in lines(out, "origins")}
    after = {(origin[n], at): row for (n, at), row in rows_by_position(out).items()}
    assert owed <= before.keys() | after.keys()

    # The tokens are those of the prompt, which neither dataset was asked for.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(h.REAL_MODEL)
    prompts = {
        record["id"]: tokenizer(record["prompt"]).input_ids
        for record in map(json.loads, (source.parent / "prompts.jsonl").read_text().splitlines())
    }
    mine, theirs = stored(source), stored(out)
    for n, at in sorted(owed):
        tokens = {rows[where[n, at]][0] for rows, where in ((mine, before), (theirs, after))
                  if (n, at) in where}  # fmt: skip
        prompt = prompts[known[n]["external_id"]]
        assert len(tokens) == 1 and (at >= len(prompt) or tokens == {prompt[at]})

    n = len(lost)
    assert f"backfill   {n:,} of {n:,} positions that lacked a row have one now\n" in summary
    both = re.search(r"compared +([\d,]+) positions have a row in both: .*foreign 0", summary)
    assert both is not None
    assert int(both[1].replace(",", "")) == len(before.keys() & after.keys())


def test_a_loader_of_both_has_each_position_once(source: Path, backfill: tuple[Path, str]) -> None:
    out, _ = backfill
    before, after = rows_by_position(source), rows_by_position(out)
    origin = {line["request"]: line["source_request"] for line in lines(out, "origins")}
    [mine] = actds.open(source).runs
    served: Counter[tuple[bool, Position]] = Counter()
    served.update((True, row) for row in before.values())
    served.update((False, row) for (n, at), row in after.items() if (origin[n], at) not in before)

    def read(**options: Any) -> Counter[tuple[bool, Position]]:
        found: Counter[tuple[bool, Position]] = Counter()
        with actds.Loader(
            [source, out], hooks=HOOKS[0], once=True, batch=32, drop_last=False,
            provenance=["run", "request", "position"], **options,
        ) as loader:  # fmt: skip
            for _, rows in loader:
                columns = (rows[name].tolist() for name in ("run", "request", "position"))
                found.update((run == mine, (n, at)) for run, n, at in zip(*columns, strict=True))
        return found

    assert read() == dict.fromkeys(served, 1)
    assert read(weights="multiplicity") == served
    # Sides of a split have what their requests were served: together that is everything.
    sides = [read(weights="multiplicity", split=side, held_out=0.5)
             for side in ("train", "held_out")]  # fmt: skip
    assert all(sides) and sides[0] + sides[1] == served
    assert max(served.values()) > 1 and len(served) < len(before) + len(after)
