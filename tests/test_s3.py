"""Object stores: a dataset under s3:// is written once, read in ranges, equal to a local one."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("obstore", reason="needs the extra actds[s3]")
pytest.importorskip("moto", reason="needs moto's S3 server")

from s3_server import BUCKET, Exchange, proxy, s3_server

from actds.errors import ActdsError
from actds.store import TEMPORARY, file_sha256, open_for_writing, open_store
from actds.store.s3 import S3Store

Environment = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def root(server: int, monkeypatch: Environment, request: pytest.FixtureRequest) -> str:
    """Return a location of this test alone, with the environment that a person would set."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    point_to(monkeypatch, server)
    digest = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    return f"s3://{BUCKET}/{digest}/dataset"


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
    assert store.read_range("a/b/c", 3, 4) == b"3456"
    assert store.read_range("a/b/c", 10, 0) == b""
    assert file_sha256(store, "a/b/c") == put.sha256
    assert store.exists("a/b/c") and not store.exists("a/b")
    assert store.size("a/b/c") == 10
    with pytest.raises(ActdsError, match="E102 a/b/c: 10 bytes"):
        store.read("a/b/c", 9)
    for offset in (8, 10, 20):
        with pytest.raises(ActdsError, match="E104 a/b/c: the end"):
            store.read_range("a/b/c", offset, 4)
    with pytest.raises(ActdsError, match="E309"):
        store.put_new("a/b/c", [b"0123456789"])  # the very bytes: still somebody else's
    assert store.read("a/b/c") == b"0123456789"


def test_what_is_not_there_is_missing(root: str) -> None:
    store = open_store(root)
    for use in (store.read, store.size, store.open_file):
        with pytest.raises(ActdsError, match="E104 a/b: no such object"):
            use("a/b")
    with pytest.raises(ActdsError, match="E104 a/b"):
        store.read_range("a/b", 0, 1)
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
    store._create(f"{TEMPORARY}probe-1", b"left behind")
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
    root: str, server: int, monkeypatch: Environment
) -> None:
    def strip(exchange: Exchange) -> None:
        exchange.headers = {
            name: value
            for name, value in exchange.headers.items()
            if name.lower() != "if-none-match"
        }

    with proxy(server, strip) as port:
        point_to(monkeypatch, port)
        with pytest.raises(ActdsError, match=r"E016 .*overwrote the first.*\n.*If-None-Match"):
            open_for_writing(root)
        assert open_store(root)._listed("", temporary=True) == []
    point_to(monkeypatch, server)
    open_for_writing(root)
    assert open_store(root)._listed("", temporary=True) == []


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
    monkeypatch.setattr("actds.store.s3.PATIENCE_S", 0.3)
    monkeypatch.setattr("actds.store.s3.FIRST_PATIENCE_S", 0.3)
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
    with pytest.raises(ActdsError, match=r"E503 a/b: 101 bytes.*\n.*--rows-per-shard"):
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
