"""Shards: rows and tokens come back as they went in, in the recorded order, or not at all."""

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_store import full_disk

from actds.dataset.commit import ShardRows, commit_part, commit_shard
from actds.dataset.ledger import Chain, read_chain
from actds.errors import ActdsError
from actds.format import schema, tables
from actds.format.schema import ShardManifest
from actds.format.shard import Shard, files_root, row_order, row_set_sha256
from actds.store.local import LocalStore, NewLocalFile

N = 700


def rows(n: int = N, **other: Any) -> ShardRows:
    numbers = np.arange(n)
    zeros = np.zeros(n, int)
    random = np.random.default_rng(3)
    tokens = {
        "request": numbers // 100,
        "position": numbers % 100,
        "token_id": numbers,
        "step": numbers // 64,
        "attempt": zeros,
        "chunk": zeros,
        "flags": zeros,
    }
    values: dict[str, Any] = {
        "hooks": {
            "resid_post.3": random.integers(0, 2**16, (n, 8)).astype(np.uint16),
            "resid_post.4": random.integers(0, 2**32, (n, 4)).astype(np.uint32),
        },
        "dtypes": {"resid_post.3": "bfloat16", "resid_post.4": "float32"},
        "tokens": tokens,
        "phase": "prefill",
        "first_step": 0,
        "last_step": n // 64,
    }
    return ShardRows(**{**values, **other})


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain.begin(LocalStore(tmp_path), "0" * 32, "r-1", "writer", "test 1")


def commit(chain: Chain, what: ShardRows, shard: str = "s-1", **options: Any) -> ShardManifest:
    options = {"order": "permuted", "seed": 11, **options}
    return commit_shard(chain.store, chain, what, shard=shard, run="r-1", **options)


@pytest.mark.parametrize("order", ["permuted", "sequence"])
@pytest.mark.parametrize("raw", [False, True])
def test_rows_and_tokens_come_back_in_one_recorded_order(
    chain: Chain, order: str, raw: bool
) -> None:
    what = rows()
    manifest = commit(chain, what, order=order, raw=raw, n_threads=2)
    expected = row_order(N, 11) if order == "permuted" else np.arange(N)
    shard = Shard(chain.store, manifest)
    for hook, bits in what.hooks.items():
        assert np.array_equal(shard.array(hook).read_all(), bits[expected])
    assert np.array_equal(shard.tokens()["token_id"].to_numpy(), expected)
    assert shard.tokens(["phase"]).column("phase").unique().to_pylist() == ["prefill"]
    assert (manifest.compression, manifest.order) == ("raw" if raw else "normal", order)
    assert manifest.root == files_root(manifest.files)


def test_the_row_order_is_that_of_the_spec() -> None:
    assert row_order(8, 5).tolist() == [4, 7, 6, 3, 5, 0, 2, 1]


def test_the_row_set_has_one_digest_in_any_order() -> None:
    request, position = np.array([7, 0, 0]), np.array([1, 2**32 - 1, 3])
    digest = row_set_sha256(request, position)
    assert digest == row_set_sha256(request[::-1], position[::-1])
    keys = struct.pack("<3Q", 3, 2**32 - 1, 7 << 32 | 1)
    assert digest == hashlib.sha256(keys).hexdigest()


@pytest.mark.parametrize("n_threads", [0, 2])
def test_the_record_comes_last(
    n_threads: int, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    real = NewLocalFile.commit

    def tell(file: NewLocalFile) -> Any:
        done = real(file)
        written.append(file.place)
        return done

    monkeypatch.setattr(NewLocalFile, "commit", tell)
    commit(chain, rows(), n_threads=n_threads)
    assert written[-2:] == ["shards/s-1/shard.json", f"ledger/{chain.chain}/00000001.json"]
    assert len(written) == 8


@pytest.mark.parametrize("limit", [64, 4096])
def test_a_failed_commit_acknowledges_nothing_and_ends_the_chain(chain: Chain, limit: int) -> None:
    with full_disk(limit), pytest.raises(ActdsError, match="E503"):
        commit(chain, rows())
    with pytest.raises(ActdsError, match="E503"):
        commit(chain, rows(), shard="s-2")
    with pytest.raises(ActdsError, match="E503"):
        commit_part(chain.store, chain, "drops", "r-1", 0, tables.empty("drops"))
    assert len(read_chain(chain.store, chain.dataset, chain.chain).records) == 1


def test_a_shard_name_is_used_once(chain: Chain) -> None:
    first = commit(chain, rows())
    with pytest.raises(ActdsError, match="E309"):
        commit(chain, rows(n=5))
    assert Shard(chain.store, first).tokens().num_rows == N


def test_refuses_rows_that_do_not_belong_together(chain: Chain) -> None:
    short = {**rows().hooks, "resid_post.3": rows().hooks["resid_post.3"][:-1]}
    with pytest.raises(ActdsError, match="E203"):
        commit(chain, rows(hooks=short))
    mixed = {**rows().tokens, "phase": np.array(["prefill"] * (N - 1) + ["decode"])}
    with pytest.raises(ActdsError, match="E414"):
        commit(chain, rows(tokens=mixed))
    # Nothing was written, so the chain goes on.
    assert chain.store.list("shards") == []
    commit(chain, rows())


def test_refuses_a_shard_that_was_changed_after_its_commit(chain: Chain, tmp_path: Path) -> None:
    shard = Shard(chain.store, commit(chain, rows()))
    folder = tmp_path / "shards" / "s-1"
    tokens = folder / "tokens.parquet"
    good = tokens.read_bytes()
    tokens.write_bytes(good[:-5] + bytes([good[-5] ^ 1]) + good[-4:])
    with pytest.raises(ActdsError, match="E202"):
        shard.tokens()
    tokens.write_bytes(good[:-1])
    with pytest.raises(ActdsError, match="E201"):
        shard.tokens()
    tokens.unlink()
    with pytest.raises(ActdsError, match="E104"):
        shard.tokens()
    (folder / "acts.zarr" / "resid_post.3" / "c" / "0" / "0").unlink()
    with pytest.raises(ActdsError, match="E104"):
        shard.array("resid_post.3")
    with pytest.raises(ActdsError, match="E014"):
        shard.array("resid_post.9")


def test_refuses_a_manifest_of_other_rows(chain: Chain) -> None:
    manifest = commit(chain, rows())
    told = schema.parse(
        ShardManifest, schema.to_bytes(manifest.model_copy(update={"n_rows": N + 1})), "x"
    )
    for read in (
        Shard(chain.store, told).tokens,
        lambda: Shard(chain.store, told).array("resid_post.3"),
    ):
        with pytest.raises(ActdsError, match="E203"):
            read()


def test_a_part_comes_back_as_it_was(chain: Chain) -> None:
    table = tables.build(
        "stalls",
        {"stage": ["ring"], "t_ns": [5], "duration_ns": [7], "depth": [1], "step": [None]},
    )
    body = commit_part(chain.store, chain, "stalls", "r-1", 0, table)
    assert body.file.path == "losses/r-1/stalls-000000.parquet" and body.n_rows == 1
    data = chain.store.read(body.file.path)
    assert tables.from_parquet("stalls", data, "x").equals(table)
