"""The provenance tables in SQL and data frames: two runs, whose requests have the same numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import actds
from actds_testing import places


@pytest.fixture(scope="module")
def expected(path: Path) -> Counter[tuple[str, str]]:
    """Return the stored rows of each (run, client's id), told shard by shard."""
    dataset, found = actds.open(path), Counter[tuple[str, str]]()
    for shard in dataset.shards:
        table = dataset.catalog.table("requests", shard.run)
        ids = dict(zip(*(table[c].to_pylist() for c in ("request", "external_id")), strict=True))
        numbers = shard.tokens(["request"])["request"].to_pylist()
        found.update((shard.run, ids[number]) for number in numbers)
    assert len({run for run, _ in found}) == 2
    return found


def test_duckdb(path: Path, expected: Counter[tuple[str, str]]) -> None:
    import duckdb

    dataset = actds.open(path)
    tokens, requests = dataset.tokens(run=True), dataset.requests(run=True)
    assert tokens.num_rows and requests.num_rows
    page = (places.DOCS / "use.md").read_text()
    found = duckdb.sql(page.split('"""')[1]).fetchall()
    assert {(run, client): n for run, client, n in found} == expected


def test_pandas(path: Path, expected: Counter[tuple[str, str]]) -> None:
    dataset = actds.open(path)
    tokens = dataset.tokens(run=True).to_pandas()
    requests = dataset.requests(run=True).to_pandas()
    joined = tokens.merge(requests, on=["run", "request"], validate="many_to_one")
    assert joined.groupby(["run", "external_id"]).size().to_dict() == expected


def test_polars(path: Path, expected: Counter[tuple[str, str]]) -> None:
    import polars as pl

    dataset = actds.open(path)
    tokens = pl.from_arrow(dataset.tokens(run=True))
    requests = pl.from_arrow(dataset.requests(run=True))
    joined = tokens.join(requests, on=["run", "request"], validate="m:1")  # type: ignore[union-attr, arg-type]
    found = joined.group_by("run", "external_id").len().rows()
    assert {(run, client): n for run, client, n in found} == expected


def test_tables_line_up_with_rows(path: Path, hook: str, truth: object) -> None:
    """A norm by phase, from a table beside an array."""
    dataset = actds.open(path)
    phase = dataset.tokens(hook, run=True)["phase"].to_numpy(zero_copy_only=False)
    norms = np.linalg.norm(dataset.array(hook)[:], axis=1)
    for shard_phase in dataset.phases:
        of_shards = np.concatenate(
            [s.array(hook).read_all() for s in dataset.shards if s.phase == shard_phase]
        )
        wide = (of_shards.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        assert np.isclose(
            norms[phase == shard_phase].mean(), np.linalg.norm(wide, axis=1).mean(), rtol=1e-5
        )


def test_a_join_without_the_run_is_refused_before_it_is_made(path: Path) -> None:
    dataset = actds.open(path)
    for table in (dataset.tokens, dataset.requests, dataset.steps, dataset.spans, dataset.readouts):
        with pytest.raises(actds.ActdsError, match="E014"):
            table()
