"""Object stores: a dataset under s3:// is written once, read in ranges, equal to a local one."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("obstore", reason="needs the extra actds[cloud]")

import actds
from actds.dataset.ledger import Chain, fence, read_ledger
from actds.errors import ActdsError
from actds.publish.sealing import seal
from actds.store import TEMPORARY, Store, file_sha256, open_for_writing, open_store
from actds.store.s3 import S3Store
from actds_testing.s3_server import SERVERS, Exchange, proxy
from actds_testing.synthetic import make_dataset
from actds_testing.synthetic_engine import (
    D_MODEL,
    GENERATED,
    HOOKS,
    PROMPT_LEN,
    SyntheticEngine,
    pipeline_for,
)
from actds_validators.validate.validation import validate
from actds_writers.ipc.messages import ClientFacts

pytestmark = pytest.mark.parametrize("s3_port", SERVERS, indirect=True)


Environment = pytest.MonkeyPatch


@pytest.fixture
def server(s3_port: int) -> int:
    return s3_port


@pytest.fixture
def root(s3_root: str) -> str:
    return s3_root


def point_to(monkeypatch: Environment, port: int) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")


def test_an_object_is_put_once_and_read_back_whole_and_in_ranges(root: str) -> None:
    store = open_store(root)
    parts = [b"0123", bytearray(b"45"), memoryview(b"6789"), b""]
    put = store.put_new("a/b/c", parts)
    assert (put.nbytes, put.sha256) == (10, hashlib.sha256(b"0123456789").hexdigest())
    store = open_store(root)  # knows nothing of the put
    assert store.uri == root
    assert store.read("a/b/c") == b"0123456789"
    assert file_sha256(store, "a/b/c") == put.sha256
    assert store.exists("a/b/c") and not store.exists("a/b")
    assert store.size("a/b/c") == 10
    with pytest.raises(ActdsError, match="E102 a/b/c: 10 bytes"):
        store.read("a/b/c", 9)
    with store.open_file("a/b/c") as file:
        assert bytes(file.read(3, 4)) == b"3456"
        assert bytes(file.read(10, 0)) == b""
        for offset in (8, 10, 20):
            with pytest.raises(EOFError, match="the end"):
                file.read(offset, 4)
    with pytest.raises(ActdsError, match="E309"):
        store.put_new("a/b/c", [b"0123456789"])  # the very bytes: still somebody else's
    assert store.read("a/b/c") == b"0123456789"


def test_what_is_not_there_is_missing(root: str) -> None:
    store = open_store(root)
    for use in (store.read, store.size, store.open_file):
        with pytest.raises(ActdsError, match="E104 a/b: no such object"):
            use("a/b")
    assert store.list() == store.list("a") == []
    with pytest.raises(ActdsError, match="NoSuchBucket"):
        open_store("s3://no-such-bucket/x").list()
    with pytest.raises(ActdsError, match=r"E503.*NoSuchBucket"):
        open_for_writing("s3://no-such-bucket/x")
    with pytest.raises(ActdsError, match="E009"):
        store.local_path("a/b")


def test_listings_know_folders_and_pass_over_temporary_objects(root: str) -> None:
    store = open_store(root)
    for path in ("actds.json", "a/b", "a/c/d", "ab/c"):
        store.put_new(path, [b"x"])
    neighbour = open_store(root + "-2")
    neighbour.put_new("a/b", [b"x"])
    store.create(f"{TEMPORARY}probe-1", b"left behind")
    assert store.list() == ["a/b", "a/c/d", "ab/c", "actds.json"]
    assert store.list("a") == ["a/b", "a/c/d"]
    assert store.remove_temporary() == 1
    assert store.remove_temporary() == 0
    store.remove("a/b")
    store.remove("a/b")
    assert store.list("a") == ["a/c/d"]


def test_sizes_learned_from_a_listing_are_forgotten_with_the_next(root: str) -> None:
    store, other = open_store(root), open_store(root)
    store.put_new("a/b", [b"12345"])
    other.learn_sizes("a")
    store.replace("a/b", b"1")
    store.put_new("a/late", [b"123"])
    assert (other.size("a/b"), other.size("a/late")) == (5, 3)
    other.learn_sizes("")
    assert other.size("a/b") == 1
    store.remove("a/b")
    other.learn_sizes("a")
    with pytest.raises(ActdsError, match="E104"):
        other.size("a/b")


def test_documents_read_ahead_are_handed_out_once_and_errors_where_they_belong(root: str) -> None:
    store, other = open_store(root), open_store(root)
    for n in range(40):
        other.put_new(f"a/{n}", [str(n).encode()])
    other.put_new("a/large", [bytes(1 << 20)])
    store.learn_sizes("a")
    other.remove("a/7")
    store.read_ahead([*(f"a/{n}" for n in range(40)), "a/large", "a/none"], 100)
    assert len(store.ahead) == 40
    for n in range(40):
        if n == 7:
            with pytest.raises(ActdsError, match="E104 a/7"):
                store.read("a/7", 100)
        else:
            assert store.read(f"a/{n}", 100) == str(n).encode()
    assert not store.ahead
    with pytest.raises(ActdsError, match="E102 a/large"):
        store.read("a/large", 100)
    other.replace("a/1", b"new")
    assert store.read("a/1", 100) == b"new"


def test_what_is_read_ahead_waits_in_bounded_memory_whatever_the_order(
    root: str, monkeypatch: Environment
) -> None:
    monkeypatch.setattr("actds.store.remote.AHEAD_NBYTES", 100)
    store, other = open_store(root), open_store(root)
    names = [f"a/{n:02d}" for n in range(40)]
    for n, name in enumerate(names):
        other.put_new(name, [b"%010d" % n])
    other.put_new("a/large", [bytes(26)])  # more than a quarter
    store.learn_sizes("a")
    store.read_ahead([*names, "a/large"], None)
    for n in [39, 20, *range(20), *range(21, 39)]:
        assert len(store.ahead) <= 10 and "a/large" not in {path for path, _ in store.ahead}
        assert store.read(names[n]) == b"%010d" % n
    assert not store.ahead
    assert store.read("a/large") == bytes(26)


def test_a_seal_asks_for_many_tables_at_a_time(
    root: str, server: int, monkeypatch: Environment, tmp_path: Path
) -> None:
    local = open_store(make_dataset(tmp_path / "dataset", rows_per_shard=8, sealed=False))
    for path in local.list():
        open_store(root).put_new(path, [local.read(path)])
    fourth, asked = threading.Event(), list[str]()
    early: list[bool] = []

    def wait(exchange: Exchange) -> None:
        if exchange.method == "GET" and exchange.path.endswith("/tokens.parquet"):
            asked.append(exchange.path)
            if len(asked) == 4:
                fourth.set()
            if exchange.path == asked[0]:
                early.append(fourth.wait(20))

    with proxy(server, wait) as port:
        point_to(monkeypatch, port)
        seal(root)
    assert early == [True], "the fourth table was asked for before the first one had come"
    assert len(asked) == len(list(tmp_path.glob("dataset/shards/*"))) > 8


@pytest.mark.parametrize("path", ["../x", "a/../x", "a//b", "", "A", "a/.tmp-1", "a\n", "a%2fb"])
def test_no_path_leaves_the_prefix(root: str, path: str) -> None:
    store = open_store(root)
    for use in (store.read, store.exists, store.size, store.open_file, store.remove):
        with pytest.raises(ActdsError, match="E107"):
            use(path)
    with pytest.raises(ActdsError, match="E107"):
        store.put_new(path, [b"x"])
    assert open_store(root.rpartition("/")[0]).list() == []


RACER = """
import sys
from actds.errors import ActdsError
from actds.store import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for n in range(40):
    try:
        store.put_new(f"race/{n:02d}", [sys.argv[2].encode() * 1000])
        print(n, flush=True)
    except ActdsError as error:
        assert error.code == "E309", error
    assert f"race/{n:02d}" in store.list("race"), "what was acknowledged is listed"
"""


def test_of_two_processes_exactly_one_creates_each_object(root: str) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, root, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    won = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        out, _ = racer.communicate(timeout=120)
        assert racer.returncode == 0
        won.append({int(line) for line in out.split()})
    assert won[0] | won[1] == set(range(40))
    assert not won[0] & won[1]
    store = open_store(root)
    for name, mine in zip("ab", won, strict=True):
        for n in mine:
            assert store.read(f"race/{n:02d}") == name.encode() * 1000


def test_a_store_that_overwrites_is_refused(
    root: str, server: int, monkeypatch: Environment, request: pytest.FixtureRequest
) -> None:
    # The condition is signed: who compares signatures does not take a put that has lost it.
    signed = request.node.callspec.params["s3_port"] == "ceph"
    refused = r"E503 .*SignatureDoesNotMatch" if signed else r"E016 .*overwrote.*\n.*If-None-Match"

    def strip(exchange: Exchange) -> None:
        exchange.headers = {
            name: value
            for name, value in exchange.headers.items()
            if name.lower() != "if-none-match"
        }

    with proxy(server, strip) as port:
        point_to(monkeypatch, port)
        with pytest.raises(ActdsError, match=refused):
            open_for_writing(root)
        assert open_store(root).listed("", temporary=True) == []
    point_to(monkeypatch, server)
    open_for_writing(root)
    assert open_store(root).listed("", temporary=True) == []


def test_a_store_that_does_not_know_the_condition_is_refused(
    root: str, server: int, monkeypatch: Environment
) -> None:
    def refuse(exchange: Exchange) -> None:
        if any(name.lower() == "if-none-match" for name in exchange.headers):
            exchange.forward, exchange.status = False, 501

    with proxy(server, refuse) as port:
        point_to(monkeypatch, port)
        with pytest.raises(ActdsError, match=r"E016 .*501"):
            open_for_writing(root)


@pytest.mark.parametrize("answer", ["hang_up", "503"])
def test_a_put_whose_answer_was_lost_finds_its_own_object(
    root: str, server: int, monkeypatch: Environment, answer: str
) -> None:
    lost = []

    def lose(exchange: Exchange) -> None:
        if exchange.method == "PUT" and exchange.path not in lost:
            lost.append(exchange.path)
            exchange.hang_up = answer == "hang_up"
            exchange.status = None if answer == "hang_up" else int(answer)

    with proxy(server, lose) as port:
        point_to(monkeypatch, port)
        put = open_store(root).put_new("ledger/w-1/00000000.json", [b"a record"])
    assert len(lost) == 1
    point_to(monkeypatch, server)
    assert put.sha256 == hashlib.sha256(b"a record").hexdigest()
    assert open_store(root).read("ledger/w-1/00000000.json") == b"a record"


@pytest.mark.parametrize("theirs", [b"a fence!", b"another length"])
def test_a_repeated_put_does_not_take_another_object_for_its_own(
    root: str, server: int, monkeypatch: Environment, theirs: bytes
) -> None:
    path = "ledger/w-1/00000000.json"
    attempts = []

    def overtake(exchange: Exchange) -> None:
        if exchange.method == "PUT":
            attempts.append(exchange.path)
            if len(attempts) == 1:
                # Lost before it arrived, and meanwhile somebody else took the name.
                other.put_new(path, [theirs])
                exchange.forward, exchange.hang_up = False, True

    other = open_store(root)
    other.exists(path)  # its client is made: it speaks to the server itself
    with proxy(server, overtake) as port:
        point_to(monkeypatch, port)
        with pytest.raises(ActdsError, match="E309"):
            open_store(root).put_new(path, [b"a record"])
    assert len(attempts) == 2
    assert other.read(path) == theirs


def test_a_store_that_does_not_answer_is_given_up_with_the_reason(
    root: str, server: int, monkeypatch: Environment
) -> None:
    monkeypatch.setattr("actds.store.remote.PATIENCE_S", 0.3)
    monkeypatch.setattr("actds.store.remote.FIRST_PATIENCE_S", 0.3)
    statuses = [503, 403]

    def refuse(exchange: Exchange) -> None:
        seen.append(exchange.method)
        exchange.forward, exchange.status = False, statuses[0]

    with proxy(server, refuse) as port:
        point_to(monkeypatch, port)
        for status, n_attempts in ((503, 2), (403, 1)):
            statuses[0], seen = status, []
            with pytest.raises(ActdsError, match=f"E503 a/b: .*{status}"):
                open_store(root).put_new("a/b", [b"x"])
            assert len(seen) >= n_attempts if status == 503 else len(seen) == n_attempts
            seen = []
            with pytest.raises(ActdsError, match=f"E104 a/b: .*{status}"):
                open_store(root).read("a/b")
            assert len(seen) >= n_attempts if status == 503 else len(seen) == n_attempts


def test_a_put_above_the_limit_of_one_request_is_refused(
    root: str, monkeypatch: Environment
) -> None:
    monkeypatch.setattr("actds.store.s3.MAX_PUT_NBYTES", 100)
    store = open_store(root)
    with pytest.raises(ActdsError, match=r"E503 a/b: 101 bytes.*\n.*rows_per_shard"):
        store.put_new("a/b", [b"x" * 100, b"y"])
    store.put_new("a/b", [b"x" * 100])


def test_an_endpoint_without_a_scheme_is_named(root: str, monkeypatch: Environment) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(ActdsError, match="E009 AWS_ENDPOINT_URL: 'localhost:9000'"):
        open_store(root).read("a/b")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_to_be_spawned(root: str) -> None:
    store = open_store(root)
    store.put_new("a/b", [b"x"])
    pid = os.fork()
    if pid == 0:
        try:
            open_store(root).read("a/b")
        except ActdsError as error:
            os._exit(42 if error.code == "E009" and "spawn" in error.next_step else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    again = pickle.loads(pickle.dumps(store))
    assert isinstance(again, S3Store) and again.read("a/b") == b"x"


def test_a_fence_on_an_object_store_stops_a_writer_that_is_not_dead(root: str) -> None:
    zombie = Chain.begin(open_store(root), "0" * 32, "r-1", "writer", "test 1")
    ended = fence(open_store(root), "0" * 32, zombie.chain, "its process is thought dead")
    assert ended.state == "fenced"
    with pytest.raises(ActdsError, match="E308"):
        zombie.close("finished", {})
    assert read_ledger(open_store(root), "0" * 32)[zombie.chain].state == "fenced"


def copied(store: Store, folder: Path) -> Path:
    """Return a local folder with every object of a store."""
    for path in store.list():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(store.read(path))
    return folder


@pytest.fixture
def uploaded(root: str, dataset_path: Path) -> str:
    """Return where the conforming dataset stands as objects."""
    store, local = open_store(root), open_store(dataset_path)
    for path in local.list():
        store.put_new(path, [local.read(path)])
    return root


def test_a_harvest_onto_an_object_store_is_sealed_valid_and_loads_as_a_local_one(
    root: str, tmp_path: Path
) -> None:
    with pipeline_for(root) as pipeline:
        engine = SyntheticEngine(pipeline)
        for number in range(6):
            engine.request(number)
        engine.drain(pipeline)
        engine.close()
        pipeline.send_client_facts(ClientFacts())
        ended = pipeline.finish("finished")
    seal(root)
    n_rows = 6 * (PROMPT_LEN + GENERATED - 1)
    assert ended["census"]["captured"] == ended["writer"]["rows"] == n_rows
    report = validate(root, level="deep")
    assert not report.findings and report.digest is not None
    dataset = actds.open(root)
    assert (dataset.path, dataset.n_rows, dataset.digest) == (root, n_rows, report.digest)
    hook = HOOKS[1].name
    tokens = dataset.tokens(hook)
    label = tokens["request"].to_numpy() * 100 + tokens["position"].to_numpy() + 2
    assert np.array_equal(dataset.array(hook).bits(0, n_rows), np.tile(label, (D_MODEL, 1)).T)
    assert open_store(root).listed("", temporary=True) == []
    local = actds.open(copied(open_store(root), tmp_path / "copy"))
    assert local.digest == dataset.digest
    with (
        actds.Loader(root, batch=16, provenance=True) as far,
        actds.Loader(local.path, batch=16, provenance=True) as near,
    ):
        for _ in range(3):
            (acts, rows), (expected, near_rows) = next(far), next(near)
            for name in acts:
                assert torch.equal(acts[name].view(torch.int16), expected[name].view(torch.int16))
            for column in rows:
                assert np.array_equal(rows[column], near_rows[column])


def test_commands_and_readers_take_an_object_uri(
    uploaded: str, dataset_path: Path, tmp_path: Path
) -> None:
    local, far = actds.open(dataset_path), actds.open(uploaded)
    for command in (["info"], ["validate", "--level", "deep"], ["seal"]):
        done = subprocess.run(
            [sys.executable, "-m", "actds", command[0], uploaded, *command[1:]],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert local.digest[:16] in done.stdout
    for hook in local.hooks:
        assert np.array_equal(far.array(hook)[3:90:7], local.array(hook)[3:90:7])
        with far.shards_of(hook)[0].array(hook) as reader:
            expected = local.shards_of(hook)[0].array(hook).read_all()
            assert np.array_equal(reader.read_all(), expected)
            assert reader.read(0, 1).flags.writeable
    stream = actds.load_dataset(uploaded, streaming=True, batched_chunks=True)
    near = actds.load_dataset(str(dataset_path), streaming=True, batched_chunks=True)
    for one, other in zip(stream, near, strict=True):
        assert one.keys() == other.keys()
        for hook in local.hooks:
            assert torch.equal(one[hook].view(torch.int16), other[hook].view(torch.int16))
    rows = actds.load_dataset(uploaded, cache_dir=tmp_path)
    assert len(rows) == local.n_rows


def test_readers_fetch_ranges_and_never_a_whole_shard(
    uploaded: str, server: int, monkeypatch: Environment
) -> None:
    gets = []

    def note(exchange: Exchange) -> None:
        if exchange.method == "GET" and exchange.path.endswith("/c/0/0"):
            gets.append({name.lower() for name in exchange.headers})
        if exchange.method == "HEAD":
            heads.append(exchange.path)

    heads: list[str] = []
    with proxy(server, note) as port:
        point_to(monkeypatch, port)
        dataset = actds.open(uploaded)
        # The sizes of all files come with one listing, not with a request for each.
        assert heads and not [path for path in heads if "/shards/" in path]
        hook = next(iter(dataset.hooks))
        assert dataset.array(hook)[:1].shape[0] == 1
    assert gets and all("range" in headers for headers in gets)


def test_a_missing_object_is_e104_and_a_changed_one_e202(uploaded: str) -> None:
    store = open_store(uploaded)
    data = next(path for path in store.list("shards") if path.endswith("/c/0/0"))
    table = next(path for path in store.list("shards") if path.endswith("tokens.parquet"))
    sound = store.read(data), store.read(table)
    store.replace(data, bytes(len(sound[0])))
    store.replace(table, sound[1][:-1] + b"?")
    found = {(finding.code, finding.place) for finding in validate(uploaded).findings}
    assert {("E202", data), ("E202", table)} <= found
    store.replace(data, sound[0])
    store.replace(table, sound[1])
    assert not validate(uploaded).findings
    store.remove(data)
    assert [(f.code, f.place) for f in validate(uploaded, "quick").findings] == [("E104", data)]
    with pytest.raises(ActdsError, match=f"E104 {data}"):
        actds.open(uploaded)


def test_an_object_that_goes_while_it_is_read_is_missing(uploaded: str) -> None:
    dataset = actds.open(uploaded)
    hook = next(iter(dataset.hooks))
    store = open_store(uploaded)
    reader = dataset.shards_of(hook)[0].array(hook)
    for path in store.list("shards"):
        if path.endswith("/c/0/0"):
            store.remove(path)
    with pytest.raises(ActdsError, match=r"E104 shards/.*no such object"):
        reader.read_all()
    with (
        pytest.raises(ActdsError, match="E104 shards/"),
        actds.Loader(uploaded, hook, batch=4) as loader,
    ):
        next(loader)
