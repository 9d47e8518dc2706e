"""Catalogue and seal: what the ledger reaches is whole, and a seal pins all of it."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import actds
from actds.dataset.commit import commit_part
from actds.dataset.ledger import Chain, fence
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.format import canonical, tables
from actds.format.schema import RunBody
from actds.publish.sealing import seal
from actds.store import layout
from actds.store.local import LocalStore
from actds_testing import forge
from actds_testing.synthetic import make_dataset


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("seal") / "d", n_requests=12, drops=True)


@pytest.fixture
def dataset(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "d")


def some(root: Path, glob: str) -> Path:
    return sorted(root.glob(glob))[0]


def code_of(root: Path) -> str | None:
    try:
        read_catalog(LocalStore(root))
    except ActdsError as error:
        return error.code
    return None


def test_a_seal_pins_the_ledger_and_says_the_totals(dataset: Path) -> None:
    catalog = read_catalog(LocalStore(dataset))
    assert catalog.is_sealed and catalog.seal is not None
    assert catalog.unreachable == []
    spans = catalog.table("spans").to_pandas()
    length = (spans["stop"].astype(int) - spans["start"]).groupby(spans["disposition"]).sum()
    totals = catalog.seal.totals
    for disposition in tables.DISPOSITIONS:
        assert totals[disposition] == length.get(disposition, 0)
    assert totals["dropped"] > 0
    assert totals["rows"] == totals["captured"] == sum(m.n_rows for m in catalog.shards)
    assert catalog.digest == canonical.digest((dataset / "seal/0001.json").read_bytes())


def test_a_seal_reads_each_record_and_each_file_of_a_shard_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_dataset(tmp_path / "d", n_requests=12, drops=True, sealed=False)
    reads, read = Counter[str](), LocalStore.read

    def counted(store: LocalStore, path: str, *args: Any, **how: Any) -> bytes:
        reads[path] += 1
        return read(store, path, *args, **how)

    monkeypatch.setattr(LocalStore, "read", counted)
    seal(LocalStore(path))
    of_shards = {n: times for n, times in reads.items() if n.startswith(("ledger/", "shards/"))}
    assert len(of_shards) >= 20
    assert set(of_shards.values()) == {1}, of_shards


def test_sealing_twice_changes_nothing_but_brings_back_the_card(dataset: Path) -> None:
    before = {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()}
    (dataset / "README.md").unlink()
    assert seal(dataset).n == 1
    assert {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()} == before


def test_a_further_run_gets_a_further_seal(dataset: Path) -> None:
    first = canonical.digest((dataset / "seal/0001.json").read_bytes())
    make_dataset(dataset, n_requests=5, seed=9, run="r-second", sealed=False)
    unsealed = read_catalog(LocalStore(dataset))
    assert not unsealed.is_sealed and unsealed.digest != first
    document = seal(dataset)
    assert (document.n, document.previous, len(document.heads)) == (2, first, 4)
    catalog = read_catalog(LocalStore(dataset))
    assert catalog.is_sealed and catalog.run_ids == ["r-synthetic", "r-second"]
    runs = catalog.table("multiplicity")["run"].to_pylist()
    assert runs == sorted(runs) and set(runs) == {"r-second", "r-synthetic"}
    assert catalog.unreachable == []
    assert catalog.seal is not None and catalog.seal.totals["requests"] == 17


def test_a_part_of_another_run_is_foreign_whatever_the_zeros_in_its_name() -> None:
    run = "r-0000001234567890"
    for n in (0, 7, 1_234_567):
        assert layout.is_part_path(layout.part_path("spans", run, n), "spans", run)
    for path in (
        "census/r-7654321234567890/spans-000000.parquet",
        f"census/{run}/steps-000000.parquet",
        f"census/{run}/spans-00000.parquet",
        f"census/{run}/spans-000000.parquet\n",
        f"losses/{run}/spans-000000.parquet",
    ):
        assert not layout.is_part_path(path, "spans", run), path


def test_an_open_chain_is_not_sealed_and_a_fenced_one_is(dataset: Path) -> None:
    store = LocalStore(dataset)
    chain = Chain.begin(store, f"{0:032x}", "r-killed", "writer", "test 1")
    with pytest.raises(ActdsError, match="E305") as caught:
        seal(store)
    assert chain.chain in caught.value.place
    fence(store, f"{0:032x}", chain.chain, "killed before it did anything")
    document = seal(store)
    assert document.heads[chain.chain].state == "fenced"


def test_of_two_who_seal_at_once_both_have_the_seal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_dataset(tmp_path / "d", n_requests=4, sealed=False)
    put_new, other = LocalStore.put_new, list[Any]()

    def overtaken(store: LocalStore, path: str, parts: Any) -> Any:
        if path == layout.seal_path(1) and not other:
            other.append(None)
            other[0] = seal(LocalStore(root))
        return put_new(store, path, parts)

    monkeypatch.setattr(LocalStore, "put_new", overtaken)
    assert seal(root) == other[0]
    assert not actds.validate(root, level="deep").findings


def test_what_does_not_add_up_is_not_sealed(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", n_requests=4, sealed=False)
    store = LocalStore(root)
    chain = Chain.begin(store, f"{0:032x}", "r-synthetic", "census", "test 1")
    spans = read_catalog(store).table("spans")
    commit_part(store, chain, "spans", "r-synthetic", 2, spans.slice(0, 1))
    chain.close("finished", {})
    with pytest.raises(ActdsError, match="E405"):
        seal(store)
    assert store.list("seal") == []


def test_a_run_without_census_is_not_sealed(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", n_requests=4, sealed=False)
    census = next(path for path in (root / "ledger").iterdir() if path.name.startswith("c-"))
    shutil.rmtree(census)
    with pytest.raises(ActdsError, match="E403"):
        seal(root)


def test_a_sealer_that_died_half_way_does_not_block_the_next(dataset: Path) -> None:
    (dataset / "seal/0001.json").unlink()
    (dataset / "seal/0001.multiplicity.parquet").write_bytes(b"of an older ledger")
    assert seal(dataset).n == 1
    assert read_catalog(LocalStore(dataset)).table("multiplicity").num_rows > 0


def edit(path: Path, **changes: object) -> None:
    path.write_bytes(canonical.dump({**json.loads(path.read_bytes()), **changes}))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def link(path: Path) -> None:
    moved = path.rename(path.parent.parent / "moved")
    path.symlink_to(moved)


DAMAGES: list[tuple[str, str, Callable[[Path], object]]] = [
    ("E101", "actds.json", Path.unlink),
    ("E102", "actds.json", cut),
    ("E106", "actds.json", lambda p: edit(p, version="0.2")),
    ("E307", "actds.json", lambda p: edit(p, created_ns=1)),
    ("E303", "actds.json", lambda p: edit(p, dataset="f" * 32)),
    ("E104", "shards/*/shard.json", Path.unlink),
    ("E202", "shards/*/shard.json", flip),
    ("E104", "shards/*/tokens.parquet", Path.unlink),
    ("E201", "shards/*/acts.zarr/resid_post.0/c/0/0", cut),
    ("E107", "shards/*/acts.zarr/resid_post.0/c/0/0", link),
    ("E104", "census/*/steps-000000.parquet", Path.unlink),
    ("E201", "losses/*/drops-000000.parquet", cut),
    ("E202", "runs/*.json", flip),
    ("E301", "ledger/w-*/00000001.json", Path.unlink),
    ("E307", "ledger/c-*/00000005.json", Path.unlink),
    ("E307", "ledger/c-*", shutil.rmtree),
    ("E102", "seal/0001.json", cut),
    ("E205", "seal/0001.json", lambda p: edit(p, root="0" * 64)),
    ("E205", "seal/0001.json", lambda p: edit(p, heads={})),
    ("E307", "seal/0001.json", lambda p: edit(p, n=2)),
    ("E307", "seal/0001.json", lambda p: edit(p, previous="0" * 64)),
    ("E307", "seal/0001.json", lambda p: p.rename(p.with_name("0002.json"))),
    ("E201", "seal/0001.multiplicity.parquet", cut),
]


@pytest.mark.parametrize(("code", "where", "damage"), DAMAGES)
def test_every_damage_to_the_structure_is_found(
    dataset: Path, code: str, where: str, damage: Callable[[Path], object]
) -> None:
    assert code_of(dataset) is None
    damage(some(dataset, where))
    assert code_of(dataset) == code


def test_nothing_is_committed_twice_or_under_another_run(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", n_requests=4, sealed=False)
    store = LocalStore(root)
    writer_first = sorted(read_catalog(store).chains.values(), key=lambda s: s.kind, reverse=True)
    bodies = {r.type: r.typed_body() for state in writer_first for r in state.records}
    for type_, run, kind, code in (
        # By the order of the chains' random ids: a second commit, or one of a foreign manifest.
        ("shard", "r-synthetic", "writer", "E303 E310"),
        ("part", "r-synthetic", "writer", "E303"),
        ("part", "r-synthetic", "census", "E310"),
        ("part", "r-other", "census", "E303"),
        ("run", "r-synthetic", "writer", "E310"),
        ("run", "r-other", "writer", "E303"),
    ):
        chain = Chain.begin(store, f"{0:032x}", run, kind, "test 1")  # type: ignore[arg-type]
        chain.append(type_, bodies[type_])  # type: ignore[arg-type]
        found = code_of(root)
        assert found is not None and found in code, (type_, run, kind)
        shutil.rmtree(root / "ledger" / chain.chain)


def test_a_run_record_that_is_gone_is_missing_and_one_of_another_run_is_foreign(
    dataset: Path,
) -> None:
    record = dataset / layout.run_path("r-synthetic")
    assert set(read_catalog(LocalStore(dataset)).runs) == {"r-synthetic"}
    data = record.read_bytes()
    record.unlink()
    assert read_catalog(LocalStore(dataset)).runs == {}
    store = LocalStore(dataset)
    chain = Chain.begin(store, f"{0:032x}", "r-other", "writer", "test 1")
    put = store.put_new(layout.run_path("r-other"), [data])
    chain.append("run", RunBody(run="r-other", sha256=put.sha256))
    assert code_of(dataset) == "E303"


def test_files_that_nothing_reaches_are_named_and_cannot_paint_a_terminal(dataset: Path) -> None:
    (dataset / "notes.txt").write_text("mine")
    (dataset / "shards/lost").mkdir()
    (dataset / "shards/lost/tokens.parquet").write_text("never committed")
    (dataset / "shards/.tmp-0123").write_text("half")
    (dataset / "red\x1b[31m\n").write_text("")
    assert read_catalog(LocalStore(dataset)).unreachable == [
        "notes.txt",
        "red\\x1b[31m\\n",
        "shards/lost/tokens.parquet",
    ]


def test_a_table_that_was_changed_is_not_read(dataset: Path) -> None:
    flip(some(dataset, "census/*/spans-000001.parquet"))
    catalog = read_catalog(LocalStore(dataset))
    catalog.table("requests")
    with pytest.raises(ActdsError, match=r"E202 census/r-synthetic/spans-000001\.parquet"):
        catalog.table("spans")


def to_other_path(seal: dict[str, Any]) -> None:
    seal["multiplicity"]["path"] = "seal/0002.multiplicity.parquet"


OPEN = {"kind": "writer", "run": "r-synthetic", "started_ns": 1, "software": "x"}
FORGERIES: list[tuple[str, str, Callable[[dict[str, Any]], object]]] = [
    ("E205", "shards/*/shard.json", lambda m: m.update(root="0" * 64)),
    ("E205", "shards/*/shard.json", lambda m: m["files"][0].update(sha256="0" * 64)),
    ("E103", "shards/*/shard.json", lambda m: m["files"].pop()),
    ("E103", "shards/*/shard.json", lambda m: m["files"].reverse()),
    ("E103", "shards/*/shard.json", lambda m: m["files"].append(m["files"][0])),
    ("E103", "shards/*/shard.json", lambda m: m.update(hooks=["resid_post.7"])),
    ("E103", "shards/*/shard.json", lambda m: m.update(hooks=["resid_post.0"])),
    ("E103", "shards/*/shard.json", lambda m: m.update(permutation_seed=None)),
    ("E103", "actds.json", lambda g: g["hooks"].pop()),
    ("E203", "shards/*/shard.json", lambda m: m.update(n_rows=m["n_rows"] + 1)),
    ("E303", "shards/*/shard.json", lambda m: m.update(run="r-other")),
    ("E303", "shards/*/shard.json", lambda m: m.update(dataset="f" * 32)),
    ("E303", "runs/*.json", lambda r: r.update(dataset="f" * 32)),
    ("E301", "ledger/w-*/00000002.json", lambda r: r.update(type="open", body=OPEN)),
    ("E301", "ledger/w-*/00000000.json", lambda r: r.update(type="fence", body={"reason": "x"})),
    ("E304", "ledger/w-*/00000002.json", lambda r: r.update(type="fence", body={"reason": "x"})),
    ("E307", "seal/0001.json", to_other_path),
]


@pytest.mark.parametrize(("code", "where", "change"), FORGERIES)
def test_a_forged_dataset_that_is_linked_anew_is_found(
    dataset: Path, code: str, where: str, change: Callable[[dict[str, Any]], object]
) -> None:
    other = dataset / "seal/0002.multiplicity.parquet"
    shutil.copy(dataset / "seal/0001.multiplicity.parquet", other)
    forge.edit(some(dataset, where), change)
    forge.relink(dataset)
    assert code_of(dataset) == code


def test_relinking_alone_forges_nothing(dataset: Path) -> None:
    def files() -> dict[Path, bytes]:
        found = (path for path in dataset.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in found if path.name not in layout.BESIDE}

    before = files()
    for manifest in dataset.glob("shards/*/shard.json"):
        forge.rehash(manifest)
    forge.relink(dataset)
    assert files() == before


def test_tables_and_arrays_of_another_size_than_committed_are_refused(dataset: Path) -> None:
    def count(record: dict[str, Any]) -> None:
        record["body"]["n_rows"] += 1

    (requests,) = dataset.glob("ledger/c-*/00000001.json")
    forge.edit(requests, count)
    genesis = dataset / "actds.json"
    forge.edit(genesis, lambda g: g["hooks"][0].update(dtype="float16"))
    forge.edit(genesis, lambda g: g["hooks"][1].update(d_model=8))
    forge.relink(dataset)
    opened = actds.open(dataset)
    with pytest.raises(ActdsError, match="E203 census/r-synthetic/requests"):
        opened.requests()
    for hook in opened.hooks:
        with pytest.raises(ActdsError, match="E108"):
            opened.array(hook)[:1]
