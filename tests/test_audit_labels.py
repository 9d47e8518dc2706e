"""Token classes that somebody gave: system, user and the like, on the coverage map."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actds.errors import ActdsError
from actds_validators.audits.audit import audit
from actds_validators.audits.labels import read_labels
from actds_validators.audits.result import Coverage
from actds_validators.simulate import SCENARIOS, simulate, write_dataset


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
    import actds

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
    assert by_class(labelled, "computed")["system"] == stored > 0
    assert by_class(labelled, "lost")["system"] == lost > 0
    for field in ("computed", "reused", "lost", "filtered"):
        assert by_class(plain, field).total() == by_class(labelled, field).total()
    assert by_class(labelled, "computed")["generated"] == by_class(plain, "computed")["generated"]


@pytest.mark.parametrize(
    ("columns", "got"),
    [
        ({"request": [0], "start": [0], "stop": [4]}, "class"),
        ({"request": [0], "start": [4], "stop": [4], "class": ["user"]}, "before it begins"),
        ({"request": [None], "start": [0], "stop": [4], "class": ["user"]}, "null"),
        ({"request": [0] * 40, "start": [0] * 40, "stop": [4] * 40,
          "class": [f"c{k}" for k in range(40)]}, "40 classes"),
    ],
)  # fmt: skip
def test_broken_labels_are_refused(tmp_path: Path, columns: dict[str, list], got: str) -> None:
    path = tmp_path / "labels.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(ActdsError, match=got) as caught:
        read_labels(path)
    assert caught.value.code == "E009"


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.parquet"
    path.write_text("request,start,stop,class\n")
    with pytest.raises(ActdsError) as caught:
        read_labels(path)
    assert caught.value.code == "E009"
