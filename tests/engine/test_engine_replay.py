"""A replay through the real engine: other batches, no cache, the same tokens and the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import actds
from actds.load.pairs import find_partners, prefix_hashes
from actds_testing import harvest as h
from actds_testing.tiny import make_tiny_model

pytestmark = pytest.mark.engine

HOOKS = ("resid_post.0", "resid_post.3")
REPLAY = "from actds_writers.cli.replay import replay; replay()"


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
