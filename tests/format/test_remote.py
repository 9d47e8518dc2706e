"""Remote datasets of every scheme are read as a local one, through faults, and never written."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("obstore", reason="needs the extra actds[cloud]")
pytest.importorskip("moto", reason="needs moto's S3 server")

import obstore
import obstore.store

import actds
from actds.errors import ActdsError
from actds.publish.sealing import seal
from actds.store import Store, layout, open_for_writing, open_store
from actds_testing.remote_servers import (
    AZURITE,
    CONTAINER,
    azure_environment,
    azurite,
    azurite_program,
    google_environment,
    sign,
    web_server,
)
from actds_testing.s3_server import BUCKET, Exchange, proxy, s3_environment
from actds_testing.synthetic import make_dataset
from actds_validators.validate.validation import validate

pytestmark = pytest.mark.standard

Patch = pytest.MonkeyPatch
REMOTE = "actds.store.remote"


@pytest.fixture(scope="module")
def s3_dataset(s3_port: int, dataset_path: Path) -> str:
    """Put the conforming dataset into the server of this module; return its prefix."""
    with Patch.context() as patch:
        s3_environment(patch, s3_port)
        upload(open_store(f"s3://{BUCKET}/shared/dataset"), dataset_path)
    return "shared/dataset"


def upload(store: Store, folder: Path) -> None:
    local = open_store(folder)
    for path in local.list():
        store.put_new(path, [local.read(path)])


@pytest.fixture(scope="module")
def azure_port(dataset_path: Path) -> Iterator[int]:
    if azurite_program() is None:
        pytest.skip(f"needs {AZURITE} of npm: make emulators")
    with azurite() as port, Patch.context() as patch:
        azure_environment(patch, port)
        client = obstore.store.AzureStore(
            CONTAINER, prefix="a/dataset", client_options={"allow_http": True}
        )
        for path in open_store(dataset_path).list():
            obstore.put(client, path, (dataset_path / path).read_bytes())
        yield port


@pytest.fixture(params=["s3", "gs", "az", "http"])
def remote(
    request: pytest.FixtureRequest, monkeypatch: Patch, dataset_path: Path
) -> Iterator[tuple[str, Callable[[Callable[[Exchange], None]], None]]]:
    """Yield a location of the dataset, and a function that sets how its server misbehaves."""
    behave: list[Callable[[Exchange], None]] = [lambda exchange: None]

    def change(exchange: Exchange) -> None:
        if request.param == "gs":
            sign(exchange)
        behave[0](exchange)

    def set_behaviour(new: Callable[[Exchange], None]) -> None:
        behave[0] = new

    if request.param == "http":
        with web_server(dataset_path.parent) as port, proxy(port, change) as front:
            yield f"http://127.0.0.1:{front}/{dataset_path.name}", set_behaviour
        return
    if request.param == "az":
        with proxy(request.getfixturevalue("azure_port"), change) as front:
            azure_environment(monkeypatch, front)
            yield f"az://{CONTAINER}/a/dataset", set_behaviour
        return
    prefix = request.getfixturevalue("s3_dataset")
    with proxy(request.getfixturevalue("s3_port"), change) as front:
        if request.param == "s3":
            s3_environment(monkeypatch, front)
        else:
            google_environment(monkeypatch, front)
        yield f"{request.param}://{BUCKET}/{prefix}", set_behaviour


Remote = tuple[str, Callable[[Callable[[Exchange], None]], None]]


def same_batches(near: Path, far: str | actds.Dataset) -> None:
    with (
        actds.Loader(near, batch=16, provenance=True, epochs=1) as expected,
        actds.Loader(far, batch=16, provenance=True, epochs=1) as loader,
    ):
        n = 0
        for (acts, rows), (wanted, near_rows) in zip(loader, expected, strict=True):
            for name in wanted:
                assert torch.equal(acts[name].view(torch.int16), wanted[name].view(torch.int16))
            for column in near_rows:
                assert np.array_equal(rows[column], near_rows[column])
            n += 1
        assert n > 3


def test_a_loader_gives_the_batches_of_the_local_folder(remote: Remote, dataset_path: Path) -> None:
    uri, _ = remote
    same_batches(dataset_path, uri)
    near, far = actds.open(dataset_path), actds.open(uri)
    assert (far.path, far.digest) == (uri, near.digest)
    for table in ("requests", "steps", "spans"):
        assert far.catalog.table(table).equals(near.catalog.table(table))
    again = pickle.loads(pickle.dumps(far.catalog.store))
    assert again.read(layout.GENESIS) == (dataset_path / layout.GENESIS).read_bytes()
    report = validate(uri, level="deep")
    assert not report.findings and report.digest == near.digest


def test_a_loader_gives_the_same_batches_through_faults(
    remote: Remote, dataset_path: Path, monkeypatch: Patch
) -> None:
    """Every third request fails: with 503, cut in its body, or without an answer in time."""
    monkeypatch.setattr(f"{REMOTE}.REQUEST_TIMEOUT_S", 1)
    monkeypatch.setattr(f"{REMOTE}.LIKELY_NBYTES", 1 << 20)
    uri, behave = remote
    numbers, lock, never = iter(range(10**9)), threading.Lock(), threading.Event()
    faults = {"503": 0, "cut": 0, "timeout": 0}
    failed: set[tuple[str, str, str]] = set()

    def fail(exchange: Exchange) -> None:
        key = (exchange.method, exchange.path, exchange.headers.get("range", ""))
        with lock:
            number = next(numbers)
            if number % 3 != 1 or key in failed:
                return
            failed.add(key)
            kinds = ["503"] if exchange.method == "HEAD" else ["timeout", "cut", "503"]
            # In turns; one without an answer costs a second, so there are three of them.
            fault = min(
                (k for k in kinds if k != "timeout" or faults[k] < 3), key=faults.__getitem__
            )
            faults[fault] += 1
        if fault == "503":
            exchange.forward, exchange.status = False, 503
        elif fault == "cut":
            exchange.cut = 7
        else:
            exchange.stall = never

    behave(fail)
    try:
        same_batches(dataset_path, uri)
    finally:
        never.set()
    assert all(faults.values()), faults


def test_a_server_that_stays_away_is_named(remote: Remote, monkeypatch: Patch) -> None:
    for name in ("PATIENCE_S", "FIRST_PATIENCE_S"):
        monkeypatch.setattr(f"{REMOTE}.{name}", 0.3)
    uri, behave = remote

    def refuse(exchange: Exchange) -> None:
        exchange.forward, exchange.status = False, 503

    behave(refuse)
    with pytest.raises(ActdsError, match=r"E104 actds\.json: the store answers 503"):
        actds.open(uri)


def test_an_answer_that_is_too_short_is_asked_for_again(remote: Remote, dataset_path: Path) -> None:
    """A proxy that says the wrong length itself is noticed by the size that is known."""
    uri, behave = remote
    path = max(open_store(dataset_path).list(), key=lambda p: (dataset_path / p).stat().st_size)
    whole = (dataset_path / path).read_bytes()
    store = open_store(uri)
    store.learn_sizes("")
    store.ask_sizes([path])
    asked = []

    def shorten(exchange: Exchange) -> None:
        if exchange.method == "GET":
            asked.append(exchange.headers)
            if len(asked) == 1:
                exchange.cut, exchange.lie = 5, True

    behave(shorten)
    with store.open_file(path) as file:
        assert bytes(file.read(4, 100)) == whole[4:104]
        assert len(asked) >= 2
        with pytest.raises(EOFError, match="the end"):
            file.read(len(whole) - 4, 8)


def test_large_files_come_in_ranges_side_by_side(
    remote: Remote, dataset_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("actds.store.StoredFile.read_nbytes", 1000)
    uri, behave = remote
    path = max(open_store(dataset_path).list(), key=lambda p: (dataset_path / p).stat().st_size)
    store = open_store(uri)
    store.learn_sizes("")
    store.ask_sizes([path])
    seen: list[str] = []
    behave(lambda exchange: seen.append(exchange.method))
    data = (dataset_path / path).read_bytes()
    assert len(data) > 2000 and store.read(path) == data
    assert seen == ["GET"] * -(-len(data) // 1000)


@pytest.mark.parametrize("uri", ["gs://bucket/x", "az://bucket/x", "https://127.0.0.1:1/x"])
def test_a_location_for_reading_refuses_every_write(uri: str) -> None:
    """Without asking the server: there is none."""
    store = open_store(uri)
    writes: list[Callable[[], object]] = [
        lambda: open_for_writing(uri),
        lambda: store.put_new("a/b", [b"x"]),
        lambda: store.replace("card.md", b"x"),
        lambda: store.remove("a/b"),
        store.remove_temporary,
    ]
    for write in writes:
        with pytest.raises(ActdsError, match=r"E009 .*for reading.*\n.*Write to a local folder"):
            write()


def test_commands_that_write_refuse_a_location_for_reading(tmp_path: Path) -> None:
    for command in (
        ["seal", "gs://bucket/x"],
        ["recover", "https://127.0.0.1:1/x"],
        ["recompress", "az://bucket/x"],
        ["write", "gs://bucket/x", "--model", str(tmp_path), "--prompts", str(tmp_path),
         "--hooks", "resid_post:1"],
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "actds", *command], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 2 and "E009" in done.stderr, (command, done.stderr)
        assert "local" in done.stderr


# the web ---------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Yield a folder and where a web server shows it."""
    with web_server(tmp_path) as port:
        yield tmp_path, f"http://127.0.0.1:{port}"


def test_the_web_shows_a_dataset_as_its_highest_seal_has_it(
    site: tuple[Path, str], dataset_path: Path
) -> None:
    folder, url = site
    copy = Path(shutil.copytree(dataset_path, folder / "d"))
    seal(copy)
    for again in range(2):
        actds.recompress(copy)
        far = actds.open(f"{url}/d/")
        assert far.digest == actds.open(copy).digest, again
    assert far.seal is not None and far.catalog.chains.keys() == far.seal.heads.keys()


def test_the_web_needs_a_seal(site: tuple[Path, str]) -> None:
    folder, url = site
    make_dataset(folder / "d", n_requests=4)
    shutil.rmtree(folder / "d" / "seal")
    with pytest.raises(ActdsError, match=r"E306 seal/0001\.json: no seal.*names the chains.*\n"):
        actds.open(f"{url}/d", i_accept_unsealed=True)
    with pytest.raises(ActdsError, match=r"E101 actds\.json"):
        actds.open(f"{url}/nothing")


@pytest.mark.parametrize("fault", ["record", "after", "manifest"])
def test_the_web_hides_no_fault_of_the_ledger(
    site: tuple[Path, str], dataset_path: Path, fault: str
) -> None:
    folder, url = site
    copy = Path(shutil.copytree(dataset_path, folder / "d"))
    records = sorted((copy / "ledger").glob("w*/*.json"))
    if fault == "record":
        records[1].unlink()
    elif fault == "after":
        shutil.copy(records[1], records[-1].parent / f"{len(records):08d}.json")
    else:
        (copy / layout.manifest_path(actds.open(copy).shards[0].name)).unlink()
    with pytest.raises(ActdsError) as near:
        actds.open(copy)
    with pytest.raises(ActdsError) as far:
        actds.open(f"{url}/d")
    codes = {"record": ("E301", "E104"), "after": ("E303", "E303"), "manifest": ("E104", "E104")}
    assert (near.value.code, far.value.code) == codes[fault]


def test_a_server_without_ranges_is_named(tmp_path: Path, dataset_path: Path) -> None:
    with web_server(dataset_path.parent, ranges=False) as port:
        dataset = actds.open(f"http://127.0.0.1:{port}/{dataset_path.name}")
        hook = next(iter(dataset.hooks))
        with pytest.raises(ActdsError, match=r"E104 .*[Rr]ange"):
            dataset.array(hook)[0:1]


def test_a_file_that_changed_on_the_web_is_noticed(
    site: tuple[Path, str], dataset_path: Path
) -> None:
    folder, url = site
    copy = Path(shutil.copytree(dataset_path, folder / "d"))
    table = next((copy / "shards").glob("*/tokens.parquet"))
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    dataset = actds.open(f"{url}/d")
    place = table.relative_to(copy).as_posix()
    with pytest.raises(ActdsError, match=f"E202 {place}"):
        dataset.tokens()
