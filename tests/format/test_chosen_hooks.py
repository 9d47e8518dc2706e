"""Requests that chose the hooks of their rows: what is read, accounted for, and said of it."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import actds
from actds.dataset.info import describe, missing
from actds.dataset.reading import read_catalog, read_genesis
from actds.errors import ActdsError
from actds.explore.requests import token_sequences
from actds.format import tables
from actds.format.readouts import Readouts
from actds.format.shard import HOOK_CHOICES
from actds.rewrite.recompression import recompress
from actds.rewrite.redaction import redact
from actds.rewrite.shuffling import shuffle
from actds.store import open_store
from actds.text import share
from actds_studies.regimes.api import ArmWords
from actds_studies.regimes.arms import Arm, read_arm
from actds_studies.stability.rows import open_arm
from actds_testing.harvest import validated
from actds_testing.schedules import simulate, table_of
from actds_testing.synthetic import make_dataset
from actds_validators.audit.follow_up import follow_up
from actds_validators.gate import check
from actds_writers.census.process import end_writer_chain
from actds_writers.harvest.canary import Pair, compare

CHOSEN = "resid_post.1"
OTHER = "resid_post.0"
FACTS = {HOOK_CHOICES: f'[["{CHOSEN}"]]'}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two datasets of one schedule; in the first every third request chose a hook."""
    folder = tmp_path_factory.mktemp("chosen")
    schedule = simulate(30, 3)
    requests = schedule.requests.to_pylist()
    for line in requests[::3]:
        line["hooks"] = CHOSEN
    chosen = schedule.with_(requests=table_of("requests", requests))
    readouts = Readouts(2, seed=4)
    return (
        make_dataset(folder / "chosen", schedule=chosen, facts=FACTS, readouts=readouts),
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
        assert loader.n_rows == n and loader.config["other_hooks"] == n_all - n
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


def test_a_check_counts_what_was_served_from_rows_of_other_hooks(tmp_path: Path) -> None:
    schedule = simulate(60, 3)
    requests, spans = schedule.requests.to_pylist(), schedule.spans.to_pylist()
    owners = {span["ref_request"] for span in spans if span["disposition"] == "cache_ref"}
    for line in requests:
        line["hooks"] = CHOSEN if line["request"] in owners else None
    told = schedule.with_(requests=table_of("requests", requests))
    path = make_dataset(tmp_path / "acts", schedule=told, facts=FACTS)
    dataset, n_lacking, n = actds.open(path), 0, 0
    for number in range(60):
        rows, chosen = (dataset.request(number, hook=hook) for hook in (OTHER, CHOSEN))
        n_lacking += int(((rows.row < 0) & (chosen.row >= 0)).sum())
        n += int((rows.disposition != "undelivered").sum())
    assert n_lacking > dataset.n_rows - len(dataset.array(OTHER)) > 0
    audited = check(path).audit
    assert audited is not None
    (rules,) = (place for place in audited.result.places if place.name == "rules")
    assert f"{n_lacking:,} of {n:,} positions ({share(n_lacking, n)})" in rules.sentence


def test_a_server_that_nobody_called_lacks_no_hook(tmp_path: Path) -> None:
    """A run with choices and without a request."""
    path = make_dataset(tmp_path / "acts", schedule=simulate(0, 3), facts=FACTS)
    audited = check(path).audit
    assert audited is not None
    assert {place.level for place in audited.result.places if place.name == "rules"} == {"PASS"}


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
    path = make_dataset(tmp_path / "acts", schedule=schedule, facts=FACTS, sealed=False)
    store = open_store(path)
    ended = end_writer_chain(store, read_genesis(store).dataset, "r-synthetic")
    wanted: dict[tuple[str, tuple[str, ...] | None], int] = {}
    for row in schedule.rows.to_pylist():
        lot = row["phase"], None if row["request"] % 3 else (CHOSEN,)
        wanted[lot] = max(wanted.get(lot, -1), row["step"])
    assert ended is not None and ended.acknowledged == wanted and len(wanted) == 4


def origins_of(source: Path, requests: list[dict[str, object]]) -> pa.Table:
    """Return the origins of a replay whose requests have the numbers of the source's."""
    dataset, n = actds.open(source), len(requests)
    columns = {
        "source_dataset": [dataset.catalog.genesis.dataset] * n,
        "source_seal": [dataset.digest] * n,
        "source_run": ["r-synthetic"] * n,
        "n_given": [line["prompt_len"] for line in requests],
    }
    numbers = [line["request"] for line in requests]
    return table("origins", {"request": numbers, "source_request": numbers, **columns})


def table(name: tables.TableName, columns: dict[str, object]) -> pa.Table:
    return tables.build(name, {field: columns[field] for field in tables.SCHEMAS[name].names})


@pytest.mark.filterwarnings("ignore:.*chose other hooks")
def test_an_arm_of_a_study_says_how_many_rows_have_other_hooks(datasets: tuple[Path, Path]) -> None:
    chosen, whole = map(actds.open, datasets)
    n = whole.n_rows - len(chosen.array(OTHER))
    assert read_arm(Arm("A", chosen), OTHER).n_apart["of other hooks"] == n > 0
    assert "of other hooks" not in read_arm(Arm("A", chosen), CHOSEN).n_apart


def test_a_follow_up_is_of_hooks_that_all_rows_have(tmp_path: Path) -> None:
    lossy, whole = simulate(200, 5, drops=True), simulate(200, 5)
    assert lossy.token_ids == whole.token_ids
    shares = []
    for name, choices in (("every", [None]), ("some", [None, CHOSEN]), ("either", [OTHER, CHOSEN])):
        requests = lossy.requests.to_pylist()
        for line in requests:
            line["hooks"] = choices[line["request"] % len(choices)]
        told = lossy.with_(requests=table_of("requests", requests))
        facts = {HOOK_CHOICES: f'[["{OTHER}"],["{CHOSEN}"]]'}
        path = make_dataset(tmp_path / name, schedule=told, facts=facts)
        facts = {"replay.only": "all", "replay.seed": 0, "replay.fraction": "1"}
        options = {"origins": origins_of(path, whole.requests.to_pylist()), "facts": facts}
        out = tmp_path / f"{name}-again"
        make_dataset(out, schedule=whole, seed=7, run="r-again", **options)
        catalog = read_catalog(open_store(path))
        if name == "either":
            with pytest.raises(ActdsError, match="no hook that all rows have"):
                follow_up(catalog, str(out))
            continue
        result = follow_up(catalog, str(out))
        assert [of.hook for of in result.hooks] == [OTHER, CHOSEN][name == "some" :]
        shares.append(result.share)
    assert shares[0] == shares[1]


@pytest.mark.filterwarnings("ignore:.*chose other hooks")
@pytest.mark.parametrize("weights", [None, "multiplicity"])
def test_a_replay_has_the_rows_of_hooks_that_requests_did_not_choose(
    datasets: tuple[Path, Path], tmp_path: Path, weights: str | None
) -> None:
    chosen, whole = datasets
    schedule = simulate(30, 3)
    origins = origins_of(chosen, schedule.requests.to_pylist())
    facts = {"replay.only": "all", "replay.seed": 0, "replay.fraction": "1"}
    options = {"seed": 7, "run": "r-again", "origins": origins, "facts": facts}
    replay = make_dataset(tmp_path / "again", schedule=schedule, **options)
    for hooks in (CHOSEN, OTHER, [CHOSEN, OTHER]):
        times = [
            Counter(
                (int(r), int(p))
                for _, columns in actds.Loader(
                    source, hooks, batch=1, weights=weights, epochs=1, drop_last=False,
                    provenance=["request", "position"], once=once,
                )
                for r, p in zip(columns["request"], columns["position"], strict=True)
            )
            for source, once in ((whole, False), ([chosen, replay], True))
        ]  # fmt: skip
        assert times[0] == times[1]


def test_the_tokens_of_a_request_are_known_at_a_hook_that_it_did_not_choose(
    tmp_path: Path,
) -> None:
    schedule = simulate(30, 3)
    requests = schedule.requests.to_pylist()
    for line in requests[::3]:
        line["hooks"] = CHOSEN
    paths = [
        make_dataset(tmp_path / name, schedule=told, facts=facts)
        for name, told, facts in (
            ("chosen", schedule.with_(requests=table_of("requests", requests)), FACTS),
            ("whole", schedule, {}),
        )
    ]
    chosen, whole = map(actds.open, paths)
    for number in range(30):
        rows, every = (dataset.request(number, hook=OTHER) for dataset in (chosen, whole))
        np.testing.assert_array_equal(rows.token_id, every.token_id)
        has_row = (every.row >= 0) & (every.owner % 3 > 0)
        np.testing.assert_array_equal(rows.row >= 0, has_row)


@pytest.fixture(scope="module")
def lacking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset in which all requests chose one hook."""
    folder = tmp_path_factory.mktemp("lacking")
    schedule = simulate(30, 3)
    requests = [{**line, "hooks": CHOSEN} for line in schedule.requests.to_pylist()]
    told = schedule.with_(requests=table_of("requests", requests))
    return make_dataset(folder / "acts", schedule=told, facts=FACTS)


def test_a_hook_that_no_request_chose_is_refused_by_its_name(
    datasets: tuple[Path, Path], lacking: Path
) -> None:
    arm = ArmWords("A", str(lacking))
    for read in (
        lambda: actds.Loader(lacking, OTHER, batch=1),
        lambda: actds.Loader(lacking, batch=1),
        lambda: actds.pool(lacking, OTHER, by="request"),
        lambda: open_arm(arm, actds.open(lacking), OTHER, 0.2),
    ):
        with pytest.raises(ActdsError, match=f"no row of .* that has {OTHER}") as caught:
            read()
        assert caught.value.code == "E014"
    with pytest.raises(ActdsError, match="no row with a partner"):
        actds.Loader(datasets[1], OTHER, batch=1, paired={"other": lacking})
    assert "Hooks" in actds.view(lacking, hook=CHOSEN, stats=True).html


def test_rows_are_counted_once_whatever_hooks_they_have(
    datasets: tuple[Path, Path], tmp_path: Path
) -> None:
    chosen, whole = map(actds.open, datasets)
    n, n_lacking = whole.n_rows, whole.n_rows - len(rows_of(datasets[0], OTHER))
    assert chosen.n_rows == n and n_lacking > 0
    words = [line.text for line in missing(describe(chosen.catalog))]
    assert [text for text in words if "chose other hooks" in text] == [
        f"  {n_lacking:,} rows ({share(n_lacking, n)}) without {OTHER}: their requests chose "
        "other hooks"
    ]
    for run in ("r-first", "r-second"):  # the same numbers and positions
        make_dataset(tmp_path / "twice", run=run, sealed=run == "r-second")
    twice = actds.open(tmp_path / "twice")
    assert twice.seal is not None
    assert sum(describe(twice.catalog).phases.values()) == twice.n_rows == twice.seal.totals["rows"]


def test_a_replay_counts_each_position_once(tmp_path: Path) -> None:
    schedule = simulate(12, 3)
    requests = schedule.requests.to_pylist()
    for line in requests:
        line["hooks"] = (CHOSEN, OTHER)[line["request"] % 2]
    told = schedule.with_(requests=table_of("requests", requests))
    facts = {HOOK_CHOICES: f'[["{OTHER}"],["{CHOSEN}"]]'}
    paths = [
        make_dataset(tmp_path / "chosen", schedule=told, facts=facts),
        make_dataset(tmp_path / "whole", schedule=schedule),
    ]
    sequences = token_sequences(actds.open(paths[1]))
    pairs = [Pair(s.run, s.request, s.run, s.request, s.token_id) for s in sequences]
    compared = compare(*map(read_catalog, map(open_store, paths)), pairs)
    whole = compare(*[read_catalog(open_store(paths[1]))] * 2, pairs)
    assert (compared.n_rows, compared.n_unreplayed) == (whole.n_rows, 0)
