"""Weights files: what the audit writes is each row's weight; what does not fit is refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import actds
from actds.dataset.catalog import Catalog
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.format.positions import Index
from actds.format.row_weights import GROUP_ROWS
from actds.store import open_store
from actds_testing.simulate import SCENARIOS, simulate, write_dataset, write_tables
from actds_testing.synthetic import make_dataset
from actds_testing.weights_files import drawn_weights, write_weights_file
from actds_validators.audit import weights as audit_weights
from actds_validators.audit.data import catalog_source
from actds_validators.audit.lookup import Lookup
from actds_validators.audit.result import Limits
from actds_validators.audit.run import audit_sources
from actds_validators.audit.weights import Cells, write_weights

CLAIM = "MAR-consistent after weighting"


@pytest.fixture(scope="module")
def by_id(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset whose lost tokens have ids: cells of load by rarity."""
    scenario = replace(SCENARIOS["mar_load"], n_steps=500, rate=0.2)
    folder = tmp_path_factory.mktemp("by_id") / "acts"
    return write_dataset(simulate(scenario, 1), folder, rows_per_shard=900)


@pytest.fixture(scope="module")
def by_position(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of two runs without readouts: cells of load by position."""
    folder = tmp_path_factory.mktemp("by_position") / "acts"
    scenario = replace(SCENARIOS["heavy"], readouts=False)
    return write_tables(folder, 12_000, scenario=scenario, seed=2, n_runs=2)


Audited = tuple[Catalog, dict[str, Lookup], Cells]


@contextmanager
def audited(path: str | Path) -> Iterator[Audited]:
    """Yield a dataset as the audit leaves it, with a weight of its own for each cell."""
    catalog = read_catalog(open_store(path))
    sources = [catalog_source(catalog, run) for run in catalog.run_ids]
    sections = audit_sources(sources, Limits())
    cells = sections.cells
    assert cells is not None and cells.weights is not None
    stored = cells.n - cells.lost
    weights = 1.0 + np.arange(stored.size).reshape(stored.shape) / 100
    weights *= stored.sum() / (weights * stored).sum()
    yield catalog, sections.lookups, replace(cells, weights=weights)


@pytest.fixture(scope="module")
def found(by_id: Path) -> Iterator[Audited]:
    with audited(by_id) as found:
        yield found


def own_cells(dataset: actds.Dataset, cells: Cells) -> dict[str, list[int]]:
    """Return the cell of each stored row by shard, told from tokens and steps row by row."""
    seen = Counter[int]()
    readouts = dataset.readouts(run=False)
    if len(readouts):
        seen.update(readouts["token_id"].to_pylist())
    n_computed = sum(seen.values())
    load: dict[tuple[str, int], float] = {}
    for run in dataset.runs:
        level = 0.0
        rows = [row for row in dataset.steps(run=True).to_pylist() if row["run"] == run]
        for row in sorted(rows, key=lambda row: row["step"]):
            level += (row["batch_tokens"] - level) / 8
            load[run, row["step"]] = float(np.float32(level))
    found = {}
    for shard in dataset.shards:
        found[shard.name] = []
        for row in shard.tokens().to_pylist():
            measure = float(row["position"])
            if cells.edges.complexity == "rarity":
                measure = -math.log2(seen[row["token_id"]] / n_computed)
            i = sum(load[shard.run, row["step"]] >= edge for edge in cells.edges.load)
            j = sum(measure >= edge for edge in cells.edges.edges)
            found[shard.name].append(i * cells.n.shape[1] + j)
    return found


@pytest.mark.parametrize("kind, complexity", [("by_id", "rarity"), ("by_position", "position")])
@pytest.mark.parametrize("group_rows", [GROUP_ROWS, 1000])
def test_every_row_has_the_weight_of_its_cell(
    kind: str,
    complexity: str,
    group_rows: int,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit_weights, "GROUP_ROWS", group_rows)
    path = request.getfixturevalue(kind)
    dataset = actds.open(path)
    assert len(dataset.shards) > 2
    with audited(path) as (catalog, lookups, cells):
        n_rows = write_weights(tmp_path / "w.parquet", catalog, lookups, cells, CLAIM)
    assert cells.edges.complexity == complexity and cells.weights is not None
    assert n_rows == dataset.n_rows == (cells.n - cells.lost).sum()
    expected = own_cells(dataset, cells)
    read = dataset.row_weights(tmp_path / "w.parquet")
    assert read.claim == CLAIM
    weights = read.of_shards([shard.name for shard in dataset.shards])
    flat = cells.weights.reshape(-1).astype(np.float32)
    for shard in dataset.shards:
        np.testing.assert_array_equal(weights[shard.name], flat[expected[shard.name]])
    joined = np.concatenate(list(weights.values()))
    assert joined.mean(dtype=np.float64) == pytest.approx(1, abs=1e-6)
    # Each weight stands for one cell: they come as often as the audit counted stored rows.
    stored = (cells.n - cells.lost).reshape(-1)
    times = Counter(joined.tolist())
    assert times == {float(flat[k]): n for k, n in enumerate(stored.tolist()) if n}
    assert len(times) > 20
    groups = pq.ParquetFile(tmp_path / "w.parquet").metadata
    sizes = [groups.row_group(k).num_rows for k in range(groups.num_row_groups)]
    assert max(sizes) <= group_rows and len(sizes) == -(-n_rows // group_rows)


def test_the_file_has_the_form_of_the_specification_and_is_the_same_twice(
    found: Audited, tmp_path: Path
) -> None:
    catalog, lookups, cells = found
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path in files:
        write_weights(path, catalog, lookups, cells, CLAIM)
    assert files[0].read_bytes() == files[1].read_bytes()
    file = pq.ParquetFile(files[0])
    assert file.metadata.metadata == {
        b"actds.format": b"actds.weights",
        b"actds.version": b"1",
        b"actds.dataset": catalog.genesis.dataset.encode(),
        b"actds.digest": catalog.digest.encode(),
        b"actds.claim": CLAIM.encode(),
    }
    kinds = {field.name: (str(field.type), field.nullable) for field in file.schema_arrow}
    assert kinds == {
        "shard": ("string", False),
        "row": ("uint32", False),
        "weight": ("float", False),
    }
    rows = file.read().to_pylist()
    order = [(row["shard"], row["row"]) for row in rows]
    assert order == sorted(order)
    assert "RLE_DICTIONARY" in file.metadata.row_group(0).column(0).encodings
    # A few bytes a row at most: the file of a hundred million rows is small beside them.
    assert files[0].stat().st_size < 3 * len(rows) + 5000


@pytest.mark.standard
def test_rows_in_an_object_store_get_the_same_weights(
    by_id: Path, found: Audited, s3_root: str, tmp_path: Path
) -> None:
    store, local = open_store(s3_root), open_store(by_id)
    for path in local.list():
        store.put_new(path, [local.read(path)])
    write_weights(tmp_path / "local", *found, CLAIM)
    with audited(s3_root) as remote:
        write_weights(tmp_path / "remote", *remote, CLAIM)
    assert (tmp_path / "remote").read_bytes() == (tmp_path / "local").read_bytes()


def test_without_a_loss_every_row_weighs_one(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=6)
    catalog = read_catalog(open_store(path))
    n_rows = write_weights(tmp_path / "w.parquet", catalog, {}, None, "nothing was lost")
    dataset = actds.open(path)
    read = dataset.row_weights(tmp_path / "w.parquet")
    weights = read.of_shards([shard.name for shard in dataset.shards])
    assert n_rows == dataset.n_rows == sum(len(part) for part in weights.values())
    assert all((part == 1).all() for part in weights.values())


def test_a_file_that_cannot_be_finished_leaves_the_old_one(
    found: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "w.parquet"
    write_weights(out, *found, CLAIM)
    before = out.read_bytes()

    def fails(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(audit_weights, "_weights", fails)
    with pytest.raises(ActdsError, match=r"E503 .*No space left"):
        write_weights(out, *found, "another claim")
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


def test_refuses_to_write_where_it_must_not(by_id: Path, found: Audited, tmp_path: Path) -> None:
    with pytest.raises(ActdsError, match=r"E009 .*inside the dataset"):
        write_weights(by_id / "w.parquet", *found, CLAIM)
    with pytest.raises(ActdsError, match=r"E503 .*No such file"):
        write_weights(tmp_path / "none" / "w.parquet", *found, CLAIM)


def test_refuses_rows_of_a_step_that_computed_nothing(found: Audited, tmp_path: Path) -> None:
    catalog, lookups, cells = found
    [lookup] = lookups.values()
    numbers = lookup.steps.numbers(np.arange(len(lookup.steps)))
    less = {lookup.run: replace(lookup, steps=Index(numbers[numbers != 100]))}
    with pytest.raises(ActdsError, match=r"E412 shards/.*every row"):
        write_weights(tmp_path / "w.parquet", catalog, less, cells, CLAIM)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> actds.Dataset:
    folder = tmp_path_factory.mktemp("weighted") / "acts"
    return actds.open(make_dataset(folder, n_requests=12, rows_per_shard=50))


@pytest.mark.parametrize("group_rows", [1, 70, 10**6])
def test_weights_are_sliced_by_shard_however_the_file_is_grouped(
    dataset: actds.Dataset, tmp_path: Path, group_rows: int
) -> None:
    weights = drawn_weights(dataset)
    file = write_weights_file(tmp_path / "w", dataset, weights, group_rows=group_rows)
    read = dataset.row_weights(file)
    names = [shard.name for shard in dataset.shards]
    assert len(names) > 3
    for chosen in (names[::-1], names[1:2], []):
        found = read.of_shards(chosen)
        assert found.keys() == set(chosen)
        for name, values in found.items():
            assert values.dtype == np.float32
            np.testing.assert_array_equal(values, weights[name])


def drop_row(number: int) -> Callable[[pa.Table], pa.Table]:
    return lambda table: pa.concat_tables([table.slice(0, number), table.slice(number + 1)])


def drop_shard(table: pa.Table) -> pa.Table:
    return table.filter(pc.not_equal(table["shard"], table["shard"][0]))


def set_weight(value: float | None) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        weights = table["weight"].to_pylist()
        weights[77] = value
        return table.set_column(2, "weight", pa.array(weights, pa.float32()))

    return change


def heavier(table: pa.Table) -> pa.Table:
    return table.set_column(2, "weight", pc.multiply(table["weight"], np.float32(1.01)))


@pytest.mark.parametrize(
    "change, message",
    [
        (drop_row(0), r"row 1 of shard '.*'; expected row 0"),
        (drop_row(60), r"row \d+ of shard '.*'; expected row \d+"),
        (lambda t: t.slice(0, len(t) - 1), r"\d+ rows of shard '.*'; expected \d+, as stored"),
        (drop_shard, r"0 rows of shard '.*'; expected \d+, as stored"),
        (lambda t: pa.concat_tables([t, t.slice(0, 1)]), r"shard '.*' after '.*'; expected sorted"),
        (lambda t: pa.concat_tables([t, t.slice(len(t) - 1)]), r"row \d+ of shard"),
        (lambda t: t.slice(0, 0), r"0 rows of shard"),
        (set_weight(float("nan")), r"a weight of nan; expected finite"),
        (set_weight(float("inf")), r"a weight of inf; expected finite"),
        (set_weight(-0.5), r"a weight of -0\.5; expected finite weights of at least 0"),
        (set_weight(None), r"1 rows with no weight"),
        (heavier, r"mean weight 1\.01; expected 1"),
        (lambda t: t.drop_columns(["row"]), r"columns 'shard string, weight float'"),
        (lambda t: t.set_column(2, "weight", t["weight"].cast("double")), r"weight double"),
    ],
)
def test_refuses_a_file_that_does_not_weigh_each_row_once(
    dataset: actds.Dataset,
    tmp_path: Path,
    change: Callable[[pa.Table], pa.Table],
    message: str,
) -> None:
    weights = drawn_weights(dataset)
    file = write_weights_file(tmp_path / "w.parquet", dataset, weights, change=change)
    with pytest.raises(ActdsError, match=message) as caught:
        dataset.row_weights(file)
    assert (caught.value.code, caught.value.place) == ("E018", str(file))


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"actds.digest": "0" * 64}, "digest '0000"),
        ({"actds.dataset": "f" * 32}, "dataset 'ffff"),
        ({"actds.format": "actds"}, "format 'actds 1'"),
        ({"actds.version": "2"}, "format 'actds.weights 2'; expected 'actds.weights 1'"),
    ],
)
def test_refuses_the_weights_of_another_dataset_or_form(
    dataset: actds.Dataset, tmp_path: Path, metadata: dict[str, str], message: str
) -> None:
    weights = drawn_weights(dataset)
    file = write_weights_file(tmp_path / "w.parquet", dataset, weights, metadata=metadata)
    with pytest.raises(ActdsError, match=f"E018 .*{message}"):
        dataset.row_weights(file)


def test_refuses_a_dataset_that_went_on(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=6)
    before = actds.open(path)
    file = write_weights_file(tmp_path / "w.parquet", before, drawn_weights(before))
    before.row_weights(file)
    make_dataset(path, n_requests=6, run="r-more", seed=1)
    with pytest.raises(ActdsError, match=r"E018 .*digest .*\nWrite it again"):
        actds.open(path).row_weights(file)


def test_refuses_a_parquet_file_of_something_else(by_id: Path, tmp_path: Path) -> None:
    other = tmp_path / "classes.parquet"
    pq.write_table(pa.table({"request": [1], "class": ["code"]}), other)
    with pytest.raises(ActdsError, match=r"E018 .*classes\.parquet"):
        actds.open(by_id).row_weights(other)


def test_refuses_what_is_no_parquet_file_or_is_damaged(
    dataset: actds.Dataset, tmp_path: Path
) -> None:
    file = write_weights_file(tmp_path / "w.parquet", dataset, drawn_weights(dataset))
    data = file.read_bytes()
    for damaged in (b"", b"PAR1", data[:-9], b"\0" * len(data)):
        file.write_bytes(damaged)
        with pytest.raises(ActdsError, match=r"E018 .*; expected a readable Parquet file"):
            dataset.row_weights(file)
    with pytest.raises(ActdsError, match=r"E018 .*; expected a readable Parquet file"):
        dataset.row_weights(tmp_path / "none.parquet")


def test_refuses_a_file_that_changed_after_it_was_checked(
    dataset: actds.Dataset, tmp_path: Path
) -> None:
    weights = drawn_weights(dataset)
    file = write_weights_file(tmp_path / "w.parquet", dataset, weights)
    read = dataset.row_weights(file)
    write_weights_file(file, dataset, weights, group_rows=90)
    with pytest.raises(ActdsError, match=r"E018 .*another file than before"):
        read.of_shards(list(weights))
