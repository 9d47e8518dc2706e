"""A replay through the real engine: other batches, no cache, the same tokens and the same rows."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import actds
from actds.explore.pairs import find_partners, prefix_hashes
from actds_testing import harvest as h
from actds_testing.tiny import make_tiny_model

pytestmark = pytest.mark.engine

HOOKS = ("resid_post.0", "resid_post.3")
REPLAY = "from actds_writers.cli import replay; replay()"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tokenizer=True)


@pytest.fixture(scope="module")
def source(model: Path, tmp_path_factory: pytest.TempPathFactory) -> actds.Dataset:
    """A harvest with prefix-cache hits, chunked prefill and requests that share steps."""
    folder = tmp_path_factory.mktemp("source")
    shared = "all work and no play makes " * 4
    records = [{"id": f"q{i}", "prompt": shared + "abcdefgh" * (2 + i)} for i in range(8)]
    prompts = h.write_prompts(folder / "prompts.jsonl", records)
    chunks = ("--engine-arg", "max_num_batched_tokens=64", "--engine-arg", "max_num_seqs=4")
    return h.harvest_alone(
        folder / "acts", model, prompts, "--hooks", "resid_post:0,3", "--max-tokens", "9",
        *h.TINY, *h.EAGER, *chunks,
    )  # fmt: skip


@pytest.fixture(scope="module")
def replayed(
    source: actds.Dataset, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> actds.Dataset:
    out = tmp_path_factory.mktemp("replayed") / "acts"
    arguments = [source.path, str(out), "--model", str(model), "--alone", "--neighbours", "5"]
    done = h.warm_engine().run(
        ["-c", REPLAY, *arguments, *h.TINY, *h.EAGER, *h.ALONE],
        h.environment(**h.ONE_PROCESS),
        h.TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return h.validated(out)


def test_every_token_of_the_source_has_a_row_in_its_replay(
    source: actds.Dataset, replayed: actds.Dataset
) -> None:
    assert "cache_ref" in source.spans()["disposition"].to_pylist()
    assert max(source.tokens()["chunk"].to_pylist()) > 8  # prefill in chunks, then decode
    assert replayed.spans()["disposition"].unique().to_pylist() == ["captured"]
    assert {step["n_requests"] for step in replayed.steps().to_pylist()} == {1}
    before = dict(
        zip(*(source.requests()[n].to_pylist() for n in ("request", "token_digest")), strict=True)
    )
    after = dict(
        zip(*(replayed.requests()[n].to_pylist() for n in ("request", "token_digest")), strict=True)
    )
    origins = replayed.origins().to_pylist()
    assert len(origins) == len(before) == 8
    assert {after[o["request"]] == before[o["source_request"]] for o in origins} == {True}
    # Every position that the source owed, those that its cache served included.
    assert replayed.n_rows == h.total(source.spans(), "stop") - h.total(source.spans(), "start")


def test_rows_of_a_replay_are_those_of_the_source_in_float32(
    source: actds.Dataset, replayed: actds.Dataset
) -> None:
    for hook in HOOKS:
        shards = source.shards_of(hook)
        partners = find_partners(prefix_hashes(source, shards), shards, "R", replayed, hook)
        assert partners.n_pairs == source.n_rows
        mine = source.array(hook)[np.arange(source.n_rows)]
        theirs = replayed.array(hook)[np.concatenate(list(partners.rows))]
        assert h.relative_l2(theirs, mine).max() <= 1e-5


@pytest.fixture(scope="module")
def many(model: Path, tmp_path_factory: pytest.TempPathFactory) -> actds.Dataset:
    """A harvest whose replay takes long enough to be killed in the middle."""
    folder = tmp_path_factory.mktemp("many")
    records = [{"id": f"m{i}", "prompt": f"number {i} " * 9} for i in range(150)]
    prompts = h.write_prompts(folder / "prompts.jsonl", records)
    return h.harvest_alone(
        folder / "acts", model, prompts, "--hooks", "resid_post:0,3", "--max-tokens", "4",
        *h.TINY, *h.EAGER,
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("options", [("--alone", "--neighbours", "5"), ("--neighbours", "5")])
def test_a_replay_that_was_killed_resumes_to_each_request_once(
    many: actds.Dataset, model: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    out = tmp_path / "acts"
    # The engine waits for a writer that is behind, and cannot be done before it.
    small = ("--rows-per-shard", "64", "--ring-mib", "1", "--staging-mib", "1")
    arguments = [many.path, str(out), "--model", str(model), *options, *small,
                 "--engine-arg", "max_num_seqs=2", *h.TINY, *h.EAGER, *h.ALONE]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", REPLAY, *arguments], env=h.environment(**h.ONE_PROCESS)
    )
    deadline = time.monotonic() + h.TIMEOUT_S
    while len(list(out.glob("shards/*/shard.json"))) < 8:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    h.kill(process)
    assert not list(out.glob("seal/*.json"))

    done = h.warm_engine().run(
        ["-c", REPLAY, *arguments, "--resume", "--compare"],
        h.environment(**h.ONE_PROCESS),
        h.TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    dataset = h.validated(out)
    assert len(dataset.runs) == 2
    wanted = set(many.requests()["request"].to_pylist())
    origins = {(line["run"], line["request"]): line["source_request"]
               for line in dataset.origins(run=True).to_pylist()}  # fmt: skip
    requests = dataset.requests(run=True).to_pylist()
    assert {(line["run"], line["request"]) for line in requests} == set(origins)
    first, second = dataset.runs
    cut = {line["request"] for line in dataset.spans(run=True).to_pylist()
           if line["run"] == first and line["disposition"] == "aborted"}  # fmt: skip
    ended = {(line["run"], line["request"]) for line in requests
             if line["finish_reason"] in ("stop", "length")}  # fmt: skip
    kept = {origins[run, n] for run, n in ended if run == first and n not in cut}
    assert 0 < len(kept) < len(wanted), "it was killed in the middle"
    # What the kill cut off is served again, whole; what had ended, is not: each request once.
    again = [origins[run, n] for run, n in ended if run == second]
    assert sorted(again) == sorted(wanted - kept)
    # Every position of the source has a row of an equal token.
    rows = {(origins[line["run"], line["request"]], line["position"]): line["token_id"]
            for line in dataset.tokens(run=True).to_pylist()}  # fmt: skip
    for span in dataset.spans(run=True).to_pylist():
        if span["disposition"] == "cache_ref":
            own, theirs = (origins[span["run"], span[n]] for n in ("request", "ref_request"))
            rows |= {(own, n): rows[theirs, n] for n in range(span["start"], span["stop"])
                     if (theirs, n) in rows}  # fmt: skip
    for line in many.tokens().to_pylist():
        assert rows[line["request"], line["position"]] == line["token_id"]
    assert "foreign 0" in done.stdout
