"""Harvests of a real model whose rows are not finite: counted, said, and never taken for clean."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import actds
from actds.dataset.reading import read_catalog
from actds.format.schema import RowCounts
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing.faulty_disk import wait_until
from actds_testing.tiny import make_random_model
from actds_validators.validate.validation import validate
from actds_writers.harvest.result import HarvestResult, Observer
from actds_writers.monitor.progress import Snapshot

pytestmark = pytest.mark.engine

HOOKS = ("resid_post.0", "resid_post.3")
LAST_LAYER = "model.layers.3.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
CAST = "float32 to float16, nearest even"


class LastSnapshot(Observer):
    """Keeps the counters of the live view, as soon as a shard is committed."""

    @contextmanager
    def harvesting(self, snapshot: Callable[[], Snapshot]) -> Iterator[None]:
        yield  # the engine has ended, and the writer may have committed nothing yet
        wait_until(lambda: snapshot().commits.n_rows > 0, "the first commit")
        self.snapshot = snapshot()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = ("plain words", "one Z in it", "Z first", "two of them: ZZ", "nothing here")
    records = [{"id": f"q{i}", "prompt": text} for i, text in enumerate(texts)]
    return h.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", records)


def model_with(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Write a tiny model with changed weights."""
    file = make_random_model(folder) / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def harvest(
    out: Path, model: Path, prompts: Path, **more: Any
) -> tuple[HarvestResult, dict[str, RowCounts], Snapshot]:
    """Return the result, the counts of the manifests, and the last counters of the live view."""
    observer = LastSnapshot()
    result = actds.write(
        out=str(out), model=str(model), prompts=str(prompts), hooks="resid_post:0,3",
        engine="transformers", max_tokens=4, rows_per_shard=16, observer=observer,
        engine_args={"max_num_seqs": 1}, **more,
    )  # fmt: skip
    shards = read_catalog(open_store(out)).shards
    assert len(shards) > 3
    return result, RowCounts.by_hook(shard.values for shard in shards), observer.snapshot


def rows(out: Path, hook: str) -> np.ndarray:
    return np.stack(list(h.rows_of(actds.open(out), hook).values()))


def test_a_weight_that_is_nan_is_counted_in_the_layers_behind_it(
    prompts: Path, tmp_path: Path
) -> None:
    def change(weights: dict[str, Any]) -> None:
        weights[LAST_LAYER][5, 7] = float("nan")

    model, out = model_with(tmp_path / "model", change), tmp_path / "acts"
    result, counts, live = harvest(out, model, prompts, check=False)
    n_rows = result.seal.totals["rows"]
    assert not np.isfinite(rows(out, HOOKS[1])).all(axis=1).any()
    assert np.isfinite(rows(out, HOOKS[0])).all()
    assert counts[HOOKS[0]] == RowCounts(not_finite=0, zero=0)
    assert counts[HOOKS[1]] == RowCounts(not_finite=n_rows, zero=0)
    durable = live.commits.n_rows  # the last shards are committed when the view has ended
    assert live.commits.values[HOOKS[1]].not_finite == durable > 0
    words = f"{n_rows} of {n_rows} rows of resid_post.3 are not finite (NaN or infinity)\n"
    assert f"values     {words}" in result.summary  # no cast, and so none is named
    assert {finding.code for finding in validate(out, "deep").findings} == {"E601"}


def test_a_model_that_computes_nan_is_refused_by_the_check_as_what_it_is(
    prompts: Path, tmp_path: Path
) -> None:
    def change(weights: dict[str, Any]) -> None:
        weights[LAST_LAYER][5, 7] = float("nan")

    model = model_with(tmp_path / "model", change)
    with pytest.raises(actds.ActdsError) as raised:
        harvest(tmp_path / "acts", model, prompts)
    assert (raised.value.code, raised.value.place) == ("E601", "hook resid_post.3")
    assert re.search(
        r"E601 hook resid_post.3: NaN .* in 41 of 41 rows .* float32;", str(raised.value)
    )
    assert "check=False" in raised.value.next_step and not (tmp_path / "acts").exists()


def test_a_cast_that_overflows_in_the_check_is_refused_with_the_type_that_holds_the_rows(
    prompts: Path, tmp_path: Path
) -> None:
    def change(weights: dict[str, Any]) -> None:
        weights[EMBEDDING] *= 1e8

    model = model_with(tmp_path / "model", change)
    with pytest.raises(
        actds.ActdsError, match=r"E601 2 hooks: .*infinity in 41 of 41 rows.*"
    ) as raised:
        harvest(tmp_path / "acts", model, prompts, store_dtype="float16")
    assert "after the cast from float32 to float16" in raised.value.got
    assert 'store_dtype="float32"' in raised.value.next_step
    harvest(tmp_path / "acts", model, prompts)  # which holds them


def test_a_cast_that_overflows_is_counted_and_named(prompts: Path, tmp_path: Path) -> None:
    """The same rows are finite in float32: numpy says which of them float16 has no number for."""

    def change(weights: dict[str, Any]) -> None:
        weights[EMBEDDING][ord("Z") - ord("!") + 3] *= 1e8

    model = model_with(tmp_path / "model", change)
    plain, clean, live = harvest(tmp_path / "plain", model, prompts)
    assert clean == dict.fromkeys(HOOKS, RowCounts(not_finite=0, zero=0)) == live.commits.values
    assert "values" not in plain.summary
    h.validated(tmp_path / "plain")
    result, counts, live = harvest(tmp_path / "cast", model, prompts, store_dtype="float16")
    with np.errstate(over="ignore"):
        narrow = {hook: rows(tmp_path / "plain", hook).astype(np.float16) for hook in HOOKS}
    for hook, values in narrow.items():
        n_lost = int((~np.isfinite(values)).any(axis=1).sum())
        assert counts[hook].infinite == counts[hook].not_finite == n_lost
        assert 4 <= n_lost < len(values)
    assert live.cast == CAST and live.commits.values.keys() == counts.keys()
    words = f"are not finite (NaN or infinity); {n_lost} overflowed in the cast {CAST}\n"
    assert words in result.summary
    card = (tmp_path / "cast/README.md").read_text().splitlines()
    assert [line.endswith(CAST) for line in card if line.startswith("- 4 of ")] == [True]
