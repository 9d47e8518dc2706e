"""Requests that chose the hooks of their rows: what is read, accounted for, and said of it."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import actds
from actds.dataset.reading import read_catalog, read_genesis
from actds.explore.requests import token_sequences
from actds.format.readouts import Readouts
from actds.format.shard import HOOK_CHOICES
from actds.rewrite.recompression import recompress
from actds.rewrite.redaction import redact
from actds.rewrite.shuffling import shuffle
from actds.store import open_store
from actds_testing.harvest import validated
from actds_testing.schedules import simulate, table_of
from actds_testing.synthetic import make_dataset
from actds_validators.gate import check
from actds_writers.census.process import end_writer_chain
from actds_writers.harvest.canary import Pair, compare

CHOSEN = "resid_post.1"
OTHER = "resid_post.0"


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two datasets of one schedule; in the first every third request chose a hook."""
    folder = tmp_path_factory.mktemp("chosen")
    schedule = simulate(30, 3)
    requests = schedule.requests.to_pylist()
    for line in requests[::3]:
        line["hooks"] = CHOSEN
    chosen = schedule.with_(requests=table_of("requests", requests))
    facts = {HOOK_CHOICES: f'[["{CHOSEN}"]]'}
    readouts = Readouts(2, seed=4)
    return (
        make_dataset(folder / "chosen", schedule=chosen, facts=facts, readouts=readouts),
        make_dataset(folder / "whole", schedule=schedule, readouts=readouts),
    )


def rows_of(path: Path, hook: str) -> dict[tuple[int, int], bytes]:
    dataset = actds.open(path)
    tokens = dataset.tokens(hook, columns=["request", "position"])
    keys = zip(*(tokens[name].to_pylist() for name in ("request", "position")), strict=True)
    rows = np.asarray(dataset.array(hook)[:], np.float32)
    return {key: row.tobytes() for key, row in zip(keys, rows, strict=True)}


def test_each_hook_has_the_rows_of_the_requests_that_chose_it(
    datasets: tuple[Path, Path],
) -> None:
    chosen, whole = datasets
    validated(chosen)
    assert rows_of(chosen, CHOSEN) == rows_of(whole, CHOSEN)
    without = {key: row for key, row in rows_of(whole, OTHER).items() if key[0] % 3}
    assert rows_of(chosen, OTHER) == without
    seal = actds.open(chosen).seal
    assert seal is not None and seal.totals["rows"] == len(rows_of(whole, CHOSEN))


def test_a_loader_reads_rows_that_have_all_its_hooks_and_says_how_many_have_not(
    datasets: tuple[Path, Path],
) -> None:
    chosen, _ = datasets
    n_all, n_both = len(rows_of(chosen, CHOSEN)), len(rows_of(chosen, OTHER))
    for hooks, n in ((CHOSEN, n_all), (OTHER, n_both), ([CHOSEN, OTHER], n_both)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = actds.Loader(chosen, hooks, batch=1, provenance=["request"])
        said = [str(w.message) for w in caught if "chose other hooks" in str(w.message)]
        assert [text.split()[0] for text in said] == ([f"{n_all - n:,}"] if n < n_all else [])
        assert loader.n_rows == n
        requests = {int(r) for batch in loader for r in batch[1]["request"]}
        assert {r % 3 == 0 for r in requests} == ({True, False} if n == n_all else {False})


def test_a_check_says_of_which_hook_rows_lack(datasets: tuple[Path, Path]) -> None:
    chosen, whole = datasets
    for path, level in ((chosen, "WARN"), (whole, "PASS")):
        audited = check(path).audit
        assert audited is not None
        (rules,) = (place for place in audited.result.places if place.name == "rules")
        assert rules.level == level
        assert (OTHER in rules.headline) == (path == chosen)


def test_what_writes_a_dataset_again_keeps_the_choice(
    datasets: tuple[Path, Path], tmp_path: Path
) -> None:
    chosen, _ = datasets
    before = {hook: rows_of(chosen, hook) for hook in (CHOSEN, OTHER)}
    shuffle(chosen, tmp_path / "shuffled")
    recompress(tmp_path / "shuffled")
    redact(tmp_path / "shuffled", ["r-synthetic/0", "r-synthetic/1"])
    validated(tmp_path / "shuffled")
    for hook, rows in before.items():
        left = {key: row for key, row in rows.items() if key[0] not in (0, 1)}
        assert rows_of(tmp_path / "shuffled", hook) == left


def test_a_replay_is_compared_at_the_hooks_that_each_row_has(datasets: tuple[Path, Path]) -> None:
    chosen, whole = datasets
    sequences = token_sequences(actds.open(whole))
    pairs = [Pair(s.run, s.request, s.run, s.request, s.token_id) for s in sequences]
    lines: list[pa.Table] = []
    compared = compare(*map(read_catalog, map(open_store, datasets)), pairs, keep=lines.append)
    assert (compared.n_foreign, compared.n_unreplayed, compared.p99) == (0, 0, 0.0)
    table = pa.concat_tables(lines)
    of_hooks = {hook: set[tuple[int, int]]() for hook in (CHOSEN, OTHER)}
    for line in table.to_pylist():
        of_hooks[line["hook"]].add((line["request"], line["position"]))
    owned = {key for key in of_hooks[CHOSEN] if key in rows_of(chosen, CHOSEN)}
    assert owned == rows_of(chosen, CHOSEN).keys()
    assert {key for key in of_hooks[OTHER] if key in rows_of(whole, OTHER)} == {
        key for key in owned if key[0] % 3
    }
    assert compared.n_rows == len(of_hooks[CHOSEN])


def test_recovery_knows_how_far_the_rows_of_each_choice_were_committed(tmp_path: Path) -> None:
    schedule = simulate(12, 3)
    requests = schedule.requests.to_pylist()
    for line in requests[::3]:
        line["hooks"] = CHOSEN
    schedule = schedule.with_(requests=table_of("requests", requests))
    facts = {HOOK_CHOICES: f'[["{CHOSEN}"]]'}
    path = make_dataset(tmp_path / "acts", schedule=schedule, facts=facts, sealed=False)
    store = open_store(path)
    ended = end_writer_chain(store, read_genesis(store).dataset, "r-synthetic")
    wanted: dict[tuple[str, tuple[str, ...] | None], int] = {}
    for row in schedule.rows.to_pylist():
        lot = row["phase"], None if row["request"] % 3 else (CHOSEN,)
        wanted[lot] = max(wanted.get(lot, -1), row["step"])
    assert ended is not None and ended.acknowledged == wanted and len(wanted) == 4
