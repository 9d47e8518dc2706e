"""Token classes that somebody gave: system, user and the like, on the coverage map."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actds
from actds.errors import ActdsError
from actds_testing.simulate import SCENARIOS, simulate, write_dataset
from actds_testing.synthetic import make_dataset
from actds_validators.audit.api import audit
from actds_validators.audit.data import LABEL_COLUMNS, read_labels
from actds_validators.audit.result import Coverage


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scenario = replace(SCENARIOS["mcar_steps"], n_steps=300, rate=0.05)
    return write_dataset(simulate(scenario, 3), tmp_path_factory.mktemp("labels") / "acts")


def by_class(coverage: Coverage | None, field: str) -> Counter[str]:
    assert coverage is not None
    found: Counter[str] = Counter()
    for cell in coverage.cells:
        found[cell.token_class] += getattr(cell, field)
    return found


def test_labels_move_positions_between_classes_and_lose_none(dataset: Path, tmp_path: Path) -> None:
    opened = actds.open(dataset)
    requests, tokens = opened.requests(), opened.tokens()
    ids = requests["request"].to_pylist()
    half = [max(1, p // 2) for p in requests["prompt_len"].to_pylist()]
    path = tmp_path / "labels.parquet"
    table = {"request": ids, "start": [0] * len(ids), "stop": half, "class": ["system"] * len(ids)}
    pq.write_table(pa.table(table), path)
    plain, labelled = audit(dataset).result.coverage, audit(dataset, classes=path).result.coverage

    until = dict(zip(ids, half, strict=True))
    rows = zip(tokens["request"].to_pylist(), tokens["position"].to_pylist(), strict=True)
    stored = sum(position < until[request] for request, position in rows)
    drops = opened.drops().to_pylist()
    lost = sum(max(0, min(d["stop"], until[d["request"]]) - d["start"]) for d in drops)
    assert by_class(labelled, "stored")["system"] == stored > 0
    assert by_class(labelled, "lost")["system"] == lost > 0
    assert plain is not None and plain.loss_by_class == []
    n_all, n_lost = (by_class(plain, field).total() for field in ("stored", "lost"))
    assert labelled is not None
    assert [(one.token_class, one.n, one.n_lost) for one in labelled.loss_by_class] == [
        ("system", stored + lost, lost),
        ("all others", n_all + n_lost - stored - lost, n_lost - lost),
    ]
    assert all(one.rate == pytest.approx(one.n_lost / one.n) for one in labelled.loss_by_class)
    for field in ("stored", "reused", "lost", "filtered"):
        assert by_class(plain, field).total() == by_class(labelled, field).total()
    assert by_class(labelled, "stored")["generated"] == by_class(plain, "stored")["generated"]


def test_roles_of_the_dataset_are_classes_by_themselves(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=30, seed=5, drops=True, roles=True)
    opened = actds.open(path)
    role = {
        (line["request"], position): line["role"]
        for line in opened.roles().to_pylist()
        for position in range(line["start"], line["stop"])
    }
    tokens = opened.tokens(columns=["request", "position"]).to_pylist()
    stored = Counter(role.get((row["request"], row["position"])) for row in tokens)
    lost = Counter(
        role.get((drop["request"], position))
        for drop in opened.drops().to_pylist()
        for position in range(drop["start"], drop["stop"])
    )
    coverage = audit(path).result.coverage
    assert coverage is not None
    assert coverage.classes_from.startswith("the roles of chats, where they are known")
    for name in ("template", "user", "assistant"):
        assert by_class(coverage, "stored")[name] == stored[name] > 0
        assert lost[name] > 0
    told = {one.token_class: one for one in coverage.loss_by_class}
    assert set(told) == {"template", "user", "assistant", "all others"}
    assert all(told[name].n_lost >= lost[name] for name in ("template", "user", "assistant"))
    # What somebody gives stands in their place.
    given = write(tmp_path / "labels.parquet", [(0, 0, 3, "mine")])
    named = audit(path, classes=given).result.coverage
    assert named is not None
    assert {one.token_class for one in named.loss_by_class} == {"mine", "all others"}


def write(path: Path, rows: list[tuple[object, ...]], run: str | None = None) -> Path:
    names = ("request", "start", "stop", "class")
    table = {name: [row[k] for row in rows] for k, name in enumerate(names)}
    if run is not None:
        table["run"] = [run] * len(rows)
    pq.write_table(pa.table(table), path)
    return path


def test_the_result_says_how_much_of_the_dataset_the_labels_name(
    dataset: Path, tmp_path: Path
) -> None:
    requests = actds.open(dataset).requests()
    prompt, generated = (requests[name].to_pylist()[:3] for name in ("prompt_len", "generated_len"))
    length = [p + max(g, 1) - 1 for p, g in zip(prompt, generated, strict=True)]
    ids = requests["request"].to_pylist()
    rows = [
        (ids[0], 0, 3, "system"),
        (ids[0], 3, length[0], "user"),
        (ids[1], length[1] - 2, 2**32 - 1, "user"),  # goes on beyond the end
        (ids[2], length[2], length[2] + 9, "user"),  # begins at the end
        (max(ids) + 1, 0, 5, "user"),
    ]
    path = write(tmp_path / "labels.parquet", rows)
    result = audit(dataset, classes=path).result
    told = result.options.classes
    assert told is not None and result.coverage is not None
    assert (told.path, told.sha256) == (str(path), sha256(path.read_bytes()).hexdigest())
    assert (told.n_ranges, told.n_matching) == (5, 3)
    assert (told.n_labelled, told.n_positions) == (length[0] + 2, result.accounting.positions)
    seen = by_class(result.coverage, "stored") + by_class(result.coverage, "lost")
    assert seen["system"] + seen["user"] <= told.n_labelled
    words = "labels of labels.parquet: 3 of 5 ranges begin within a request of the dataset"
    assert result.coverage.classes_from.startswith(words)
    assert f"{told.n_labelled:,} of its {told.n_positions:,} positions" in (
        result.coverage.classes_from
    )


@pytest.mark.parametrize(("request_", "run"), [(10**6, None), (0, "r-of-another")])
def test_labels_of_no_request_of_the_dataset_are_refused(
    dataset: Path, tmp_path: Path, request_: int, run: str | None
) -> None:
    path = write(tmp_path / "labels.parquet", [(request_, 0, 9, "a"), (request_, 9, 12, "b")], run)
    with pytest.raises(ActdsError, match="none of 2 ranges") as caught:
        audit(dataset, classes=path)
    assert (caught.value.code, caught.value.place) == ("E009", f"classes {path}")
    assert f"request {request_}, positions 0 to 9" in caught.value.got


def test_labels_of_the_run_match_and_those_of_two_runs_do_not_overlap(
    dataset: Path, tmp_path: Path
) -> None:
    one, other = (
        pa.table({"request": [0], "start": [0], "stop": [2], "class": ["a"], "run": [run]})
        for run in ("r-simulated", "r-of-another")
    )
    path = tmp_path / "labels.parquet"
    pq.write_table(pa.concat_tables([one, other]), path)
    told = audit(dataset, classes=path).result.options.classes
    assert told is not None and (told.n_matching, told.n_labelled) == (1, 2)


@pytest.mark.parametrize(
    ("columns", "got"),
    [
        ({"request": [0], "start": [0], "stop": [4]}, "class"),
        ({"request": [0], "start": [4], "stop": [4], "class": ["user"]}, "before it begins"),
        ({"request": [None], "start": [0], "stop": [4], "class": ["user"]}, "null"),
        ({"request": [0] * 40, "start": [0] * 40, "stop": [4] * 40,
          "class": [f"c{k}" for k in range(40)]}, "40 classes"),
        (pa.table({name: pa.array([], kind) for name, kind in LABEL_COLUMNS.items()}), "no row"),
        ({"request": [7, 3, 7], "start": [5, 0, 0], "stop": [9, 4, 6], "class": ["a", "b", "c"]},
         r"row 2: request 7, positions 0 to 6 overlaps row 0: request 7, positions 5 to 9"),
        ({"request": [7, 7], "start": [0, 0], "stop": [9, 9], "class": ["a", "a"],
          "run": ["r", "r"]}, "row 1: run r, request 7, positions 0 to 9 overlaps row 0"),
        ({"request": [0, 0], "start": [0, 1], "stop": [1, 2], "class": ["a", ""]},
         "row 1: class is empty"),
        ({"request": [0], "start": [0], "stop": [1], "class": [" "]}, "row 0: class is empty"),
        *(
            ({"request": [0, 0], "start": [0, 1], "stop": [1, 2], "class": ["a", word]},
             f"row 1: class is '{word}', a class of the tables")
            for word in ("special", "shared prefix", "prompt", "generated",
                         "reference without a row")
        ),
        ({"request": [0], "start": [0], "stop": [1], "class": [3]}, "class of type int64"),
        ({"request": [0], "start": [0], "stop": [1], "class": [b"a"]}, "class of type binary"),
        ({"request": [0.0], "start": [0], "stop": [1], "class": ["a"]}, "request of type double"),
        ({"request": [0], "start": [0], "stop": [1.5], "class": ["a"]}, "stop of type double"),
        ({"request": [0], "start": [False], "stop": [1], "class": ["a"]}, "start of type bool"),
        ({"request": [0, -1], "start": [0, 0], "stop": [1, 1], "class": ["a", "a"]},
         "row 1: request is -1"),
        ({"request": [0], "start": [0], "stop": [2**32], "class": ["a"]},
         "row 0: stop is 4294967296"),
        ({"request": [0], "start": [0], "stop": pa.array([2**63 + 1], pa.uint64()),
          "class": ["a"]}, "row 0: stop is 9223372036854775809"),
        (pa.table([[0], [0], [1], ["a"], ["r"], ["r"]], [*LABEL_COLUMNS, "run", "run"]),
         "Multiple matches"),
        ({"request": [0], "start": [0], "stop": [1], "class": ["a"], "run": [4]},
         "run of type int64"),
    ],
)  # fmt: skip
def test_broken_labels_are_refused(
    tmp_path: Path, columns: dict[str, list] | pa.Table, got: str
) -> None:
    path = tmp_path / "labels.parquet"
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path)
    with pytest.raises(ActdsError, match=got) as caught:
        read_labels(path)
    assert (caught.value.code, caught.value.place) == ("E009", f"classes {path}")


def test_words_of_any_text_type_and_numbers_of_any_width_are_read(tmp_path: Path) -> None:
    path = tmp_path / "labels.parquet"
    columns = {
        "request": pa.array([1, 2**32 - 1], pa.uint64()),
        "start": pa.array([0, 4], pa.int8()),
        "stop": pa.array([4, 9], pa.uint16()),
        "class": pa.array(["user", "code"]).dictionary_encode(),
        "run": pa.array(["r", "r"], pa.large_string()),
        "note": pa.array([None, 1.5]),
    }
    pq.write_table(pa.table(columns), path)
    table = read_labels(path).table
    assert table.column_names == [*LABEL_COLUMNS, "run"]
    assert table["request"].to_pylist() == [1, 2**32 - 1]
    assert table["class"].to_pylist() == ["user", "code"]


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.parquet"
    path.write_text("request,start,stop,class\n")
    with pytest.raises(ActdsError) as caught:
        read_labels(path)
    assert caught.value.code == "E009"
