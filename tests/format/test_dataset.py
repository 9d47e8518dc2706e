"""Opening: what is sealed and has provenance reads as it was written; the rest is refused."""

import ast
import re
import shutil
from importlib import import_module
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import actds
from actds import ActdsError
from actds_testing import places
from actds_testing.synthetic import make_dataset

HOOK = "resid_post.1"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dataset") / "d"
    make_dataset(root, n_requests=10, sealed=False)
    return make_dataset(root, n_requests=6, seed=4, run="r-second")


@pytest.fixture
def dataset(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "d")


def test_a_dataset_says_what_it_holds(original: Path) -> None:
    opened = actds.open(original)
    assert list(opened.hooks) == ["resid_post.0", HOOK]
    assert opened.phases == ("prefill", "decode")
    assert opened.n_rows == sum(shard.n_rows for shard in opened.shards) == len(opened.array(HOOK))
    assert list(opened.runs) == ["r-synthetic", "r-second"]
    assert opened.seal is not None and opened.seal.n == 1
    assert opened.digest == actds.open(f"file://{original}").digest


def test_arrays_index_like_the_whole_array(original: Path) -> None:
    opened = actds.open(original)
    array = opened.array(HOOK)
    parts = [shard.array(HOOK).read_all() for shard in opened.shards]
    whole = np.concatenate(parts).view(ml_dtypes.bfloat16).astype(np.float32)
    assert len(parts) > 3
    assert array.shape == whole.shape and array.dtype == whole.dtype
    assert array.ndim == 2 and array.nbytes == whole.nbytes
    n = len(whole)
    rng = np.random.default_rng(0)
    indices = [
        slice(None),
        slice(0, 0),
        slice(n, n + 5),
        slice(n - 3, 2),
        slice(50, n - 7),
        slice(None, None, -3),
        slice(-20, None),
        5,
        -1,
        np.int64(n - 1),
        ...,
        rng.integers(-n, n, 300),
        [],
        [n - 1, 0, 0],
        np.arange(n) % 3 == 0,
        (slice(60, 70), slice(2, 9)),
        (3, 4),
        ([1, 2], slice(None)),
        (slice(9), ...),
    ]
    for index in indices:
        # Bits, because NaN differs from itself.
        got, expected = np.asarray(array[index]), np.asarray(whole[index])
        assert got.shape == expected.shape, index
        assert got.dtype == expected.dtype
        assert got.tobytes() == expected.tobytes(), index
    assert np.asarray(array).tobytes() == whole.tobytes()
    for index in (n, -n - 1, [n], 1.5, "x", np.array([[1]]), np.array([True]), (1, 2, 3)):
        with pytest.raises(IndexError):
            array[index]


def test_arrays_keep_few_files_open(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actds.explore.lazy.MAX_OPEN_ARRAYS", 2)
    opened = actds.open(original)
    array = opened.array(HOOK)
    assert len(opened.shards) > 3
    for _ in range(2):
        whole = np.concatenate([shard.array(HOOK).read_all() for shard in opened.shards])
        assert array.bits(0, len(array)).tobytes() == whole.tobytes()
        assert len(array.files) == 2


def test_rows_belong_to_the_caller(original: Path) -> None:
    array = actds.open(original).array(HOOK)
    first = array[:10]
    first[:] = 0
    assert array[:10].astype(np.float32).any()


def test_tables_line_up_with_rows_and_name_their_run(original: Path) -> None:
    opened = actds.open(original)
    tokens = opened.tokens(run=True)
    assert tokens.num_rows == opened.n_rows
    assert tokens.column_names[:3] == ["run", "request", "position"]
    keys = set(zip(*(tokens[name].to_pylist() for name in tokens.column_names[:3]), strict=True))
    assert len(keys) == opened.n_rows
    assert opened.tokens(columns=["step"], run=False).column_names == ["step"]
    by_shard = [shard.tokens()["token_id"].to_pylist() for shard in opened.shards]
    assert opened.tokens(run=False)["token_id"].to_pylist() == list(chain.from_iterable(by_shard))
    for name in ("requests", "steps", "spans", "drops", "stalls"):
        table = getattr(opened, name)(run=True)
        assert table.column_names[0] == "run"
        assert getattr(opened, name)(run=False).num_rows == table.num_rows
    assert opened.requests(run=True)["run"].value_counts().to_pylist() == [
        {"values": "r-synthetic", "counts": 10},
        {"values": "r-second", "counts": 6},
    ]
    assert min(opened.multiplicity()["count"].to_pylist()) > 1


def test_tables_of_several_runs_are_not_handed_out_without_a_word_on_the_run(
    original: Path, dataset_path: Path
) -> None:
    opened, one = actds.open(original), actds.open(dataset_path)
    names = ["requests", "steps", "spans", "drops", "stalls", "occupancy", "readouts", "canary"]
    for name in ("tokens", *names):
        with pytest.raises(ActdsError, match=rf"E014 {name}[\s\S]*run=True"):
            getattr(opened, name)()
        # Of one run there is nothing to confuse.
        assert getattr(one, name)().column_names == getattr(one, name)(run=False).column_names


def test_a_join_on_run_and_request_finds_the_request_of_each_row(original: Path) -> None:
    """The query of docs/use.md."""
    duckdb = pytest.importorskip("duckdb")
    dataset = actds.open(original)
    page = (places.DOCS / "use.md").read_text()
    query = page.split('"""')[1]
    tokens, requests = dataset.tokens(run=True), dataset.requests(run=True)
    assert tokens.num_rows and requests.num_rows
    found = duckdb.sql(query).fetchall()
    # Told row by row from the files of each run.
    expected: dict[tuple[str, str], int] = {}
    for shard in dataset.shards:
        table = dataset.catalog.table("requests", shard.run)
        name = dict(zip(*(table[c].to_pylist() for c in ("request", "external_id")), strict=True))
        for request in shard.tokens(["request"])["request"].to_pylist():
            key = (shard.run, name[request])
            expected[key] = expected.get(key, 0) + 1
    assert {(run, client): n for run, client, n in found} == expected
    crossed = duckdb.sql("SELECT count(*) FROM tokens JOIN requests USING (request)").fetchall()
    assert crossed[0][0] > tokens.num_rows


def test_refuses_names_that_are_not_there(original: Path) -> None:
    opened = actds.open(original)
    for use in (
        lambda: opened.array("resid_post.7"),
        lambda: opened.tokens("resid_post.7"),
        lambda: opened.tokens(columns=["nope"], run=True),
    ):
        with pytest.raises(ActdsError, match="E014"):
            use()


def test_refuses_an_unsealed_dataset_until_told_in_so_many_words(dataset: Path) -> None:
    make_dataset(dataset, n_requests=3, seed=5, run="r-third", sealed=False)
    with pytest.raises(ActdsError, match=r"E306[\s\S]*actds seal"):
        actds.open(dataset)
    with pytest.warns(UserWarning, match="E306"):
        opened = actds.open(dataset, i_accept_unsealed=True)
    assert opened.seal is None and len(opened.runs) == 3
    assert opened.array(HOOK)[:].shape == (opened.n_rows, 16)
    with pytest.raises(ActdsError, match="E306"):
        opened.multiplicity()


def test_refuses_rows_without_provenance_until_told_in_so_many_words(dataset: Path) -> None:
    (dataset / "runs/r-second.json").unlink()
    with pytest.raises(ActdsError, match=r"E401 runs/r-second\.json"):
        actds.open(dataset)
    with pytest.raises(ActdsError, match="E401"):
        actds.open(dataset, i_accept_unsealed=True)
    with pytest.warns(UserWarning, match="E401"):
        opened = actds.open(dataset, i_accept_unprovenanced=True)
    assert opened.array(HOOK)[0].shape == (16,)


def test_refuses_what_is_no_dataset(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ActdsError, match="E101"):
            actds.open(path)


def test_public_names_are_lazy_complete_and_known_to_type_checkers() -> None:
    assert set(actds.__all__) <= set(dir(actds))
    stub = ast.parse(Path(actds.__file__).with_suffix(".pyi").read_text())
    typed = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*typed, "__version__"} == set(actds.__all__)
    for name, module in typed.items():
        assert getattr(actds, name) is getattr(import_module(str(module)), name)


def test_the_facade_names_no_other_package() -> None:
    text = Path(actds.__file__).read_text()
    assert not re.search(r"actds_\w+\.\w", text)
    added = {entry.name for entry in entry_points(group=actds.FUNCTIONS)}
    assert {"audit", "validate", "write"} <= added and not added & {"open", "Loader", "seal"}


def test_what_is_no_public_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="nope"):
        actds.nope  # noqa: B018
