"""The cache of remote datasets: bounded, shared, checked, and never a reason to stop."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("obstore", reason="needs the extra actds[cloud]")

import actds
from actds.errors import ActdsError
from actds.store.cache import BLOCK_NBYTES, Cache
from actds_testing.remote_servers import web_server
from actds_testing.s3_server import Exchange, proxy

# Many small requests to servers: long for a check before each commit.
pytestmark = pytest.mark.standard

SHA = "ab" * 32


class Site:
    """A dataset on a web server whose requests are counted and may be changed."""

    def __init__(self, url: str, near: Path) -> None:
        self.url, self.near = url, near
        self.asked: list[str] = []
        self.change: Callable[[Exchange], None] = lambda exchange: None

    def see(self, exchange: Exchange) -> None:
        if exchange.method == "GET":
            self.asked.append(exchange.path.partition("/dataset/")[2])
        self.change(exchange)

    def data_asked(self) -> list[str]:
        """Return the tables and arrays that were asked for since the last call."""
        found = [p for p in self.asked if p.endswith((".parquet", "/0", "zarr.json"))]
        self.asked.clear()
        return found

    def contents_asked(self) -> set[bytes]:
        """Return what those tables and arrays hold: equal ones are kept, and asked for, once."""
        return {(self.near / path).read_bytes() for path in self.data_asked()}

    def open(self, cache: Path, cache_bytes: int | None = None) -> actds.Dataset:
        return actds.open(self.url, cache=cache, cache_bytes=cache_bytes)


@pytest.fixture
def site(dataset_path: Path) -> Iterator[Site]:
    with web_server(dataset_path.parent) as port:
        site = Site("", dataset_path)
        with proxy(port, site.see) as front:
            site.url = f"http://127.0.0.1:{front}/{dataset_path.name}"
            yield site


def batches(dataset: actds.Dataset | Path) -> list[dict[str, torch.Tensor]]:
    with actds.Loader(dataset, batch=16, epochs=1) as loader:
        return list(loader)


def same(got: actds.Dataset, near: Path) -> bool:
    return all(
        torch.equal(a[hook].view(torch.int16), b[hook].view(torch.int16))
        for a, b in zip(batches(got), batches(near), strict=True)
        for hook in b
    )


def entries(folder: Path) -> list[Path]:
    return [path for path in (folder / "blocks").rglob("*") if path.is_file()]


def test_what_was_read_once_is_not_asked_for_again(site: Site, tmp_path: Path) -> None:
    first = site.open(tmp_path / "c")
    tokens = first.tokens()
    assert same(first, site.near)
    assert site.data_asked()
    again = site.open(tmp_path / "c")
    assert same(again, site.near) and again.tokens().equals(tokens)
    assert site.data_asked() == []


def test_nothing_is_kept_unless_it_is_asked_for(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTDS_CACHE", str(tmp_path))
    assert same(actds.open(site.url), site.near)
    assert not list(tmp_path.rglob("blocks"))
    monkeypatch.setenv("ACTDS_CACHE_BYTES", str(1 << 24))
    assert same(actds.open(site.url), site.near)
    assert entries(tmp_path / "remote")
    for wrong in ("10GB", "0", "-1"):
        monkeypatch.setenv("ACTDS_CACHE_BYTES", wrong)
        with pytest.raises(ActdsError, match=f"E009 ACTDS_CACHE_BYTES: {wrong}"):
            actds.open(site.url)
    with pytest.raises(ActdsError, match="E009 cache_bytes: 0"):
        site.open(tmp_path / "c", 0)


def test_a_cache_of_a_few_blocks_gives_the_same_batches(site: Site, tmp_path: Path) -> None:
    nbytes = 20_000
    assert same(site.open(tmp_path / "c", nbytes), site.near)
    kept = sum(path.stat().st_size for path in entries(tmp_path / "c"))
    assert 0 < kept <= nbytes


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 4 * 1004)
    for number, name in enumerate("abcd"):
        cache.put(SHA, name, bytes([number]) * 1000)
        os.utime(tmp_path / "blocks" / "ab" / f"{SHA}-{name}", (number, number))
    assert cache.get(SHA, "a") == bytes(1000)
    cache.put(SHA, "e", b"e" * 1000)
    assert cache.get(SHA, "a") is not None and cache.get(SHA, "e") is not None
    assert cache.get(SHA, "b") is None
    cache.put(SHA, "large", bytes(5000))  # more than the bound: nothing goes for it
    assert cache.get(SHA, "large") is None and cache.get(SHA, "a") is not None


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_entry_is_noticed_and_fetched_again(
    site: Site, tmp_path: Path, damage: str
) -> None:
    dataset = site.open(tmp_path)
    dataset.tokens()
    batches(dataset)
    wanted = site.contents_asked()
    for path in entries(tmp_path):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes({"flip": data, "cut": data[:-9], "empty": b""}[damage])
    again = site.open(tmp_path)
    again.tokens()
    assert same(again, site.near)
    assert site.contents_asked() == wanted
    assert same(site.open(tmp_path), site.near) and site.data_asked() == []


def test_a_block_that_arrived_damaged_is_fetched_again(site: Site, tmp_path: Path) -> None:
    """The entry agrees with its own checksum; the chunks in it do not."""
    dataset = site.open(tmp_path)
    cache = Cache(tmp_path, 1 << 30)
    poisoned = 0
    for shard in dataset.shards:
        for entry in shard.manifest.files:
            if entry.path.endswith("/c/0/0"):
                cache.put(entry.sha256, "0", bytes(min(entry.nbytes, BLOCK_NBYTES)))
                poisoned += 1
    assert poisoned > 1
    assert same(dataset, site.near)
    assert len([p for p in site.data_asked() if p.endswith("/c/0/0")]) >= poisoned
    assert same(site.open(tmp_path), site.near) and site.data_asked() == []


def test_a_table_that_arrived_damaged_is_not_kept(site: Site, tmp_path: Path) -> None:
    def other_bytes(exchange: Exchange) -> None:
        if exchange.method == "GET" and "tokens" in exchange.path:
            exchange.path = exchange.path.replace("tokens.parquet", "shard.json")

    dataset = site.open(tmp_path)
    site.change = other_bytes
    with pytest.raises(ActdsError, match=r"E202 .*tokens\.parquet"):
        dataset.tokens()
    site.change = lambda exchange: None
    assert dataset.tokens().equals(actds.open(site.near).tokens())


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Let the system refuse to write files of more bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_the_cache_and_one_warning(site: Site, tmp_path: Path) -> None:
    dataset, expected = site.open(tmp_path / "c"), batches(site.near)
    with (
        pytest.warns(UserWarning, match="the cache .* keeps nothing more: File too large") as told,
        file_size_limit(100),
    ):
        found = batches(dataset)
    assert len(told) == 1
    for got, wanted in zip(found, expected, strict=True):
        for hook in wanted:
            assert torch.equal(got[hook].view(torch.int16), wanted[hook].view(torch.int16))
    # What did not fit left nothing half.
    assert all(path.stat().st_size <= 100 for path in entries(tmp_path / "c"))
    assert not (tmp_path / "c" / "blocks" / "draft").exists()


def test_a_folder_that_takes_nothing_costs_the_cache_and_one_warning(
    site: Site, tmp_path: Path
) -> None:
    (tmp_path / "c").write_bytes(b"a file, where a folder should be")
    with pytest.warns(UserWarning, match="keeps nothing more: .*directory") as told:
        assert same(site.open(tmp_path / "c"), site.near)
    assert len(told) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_still_read(site: Site, tmp_path: Path) -> None:
    assert same(site.open(tmp_path), site.near)
    site.data_asked()
    for folder in [tmp_path, *(p for p in tmp_path.rglob("*") if p.is_dir())]:
        folder.chmod(0o500)
    assert same(site.open(tmp_path), site.near) and site.data_asked() == []


WORKER = """
import random, sys, time
from pathlib import Path
from actds.store.cache import Cache
folder, nbytes, seed, n = Path(sys.argv[1]), *map(int, sys.argv[2:])
cache, draw, hits = Cache(folder, nbytes), random.Random(seed), 0
print("ready", flush=True)
for _ in range(n):
    block = draw.randrange(40)
    wanted = bytes([block]) * (1000 + 100 * block)
    found = cache.get("%064x" % block, "0")
    assert found is None or found == wanted, block
    hits += found is not None
    if found is None:
        cache.put("%064x" % block, "0", wanted)
print(hits, flush=True)
"""


@pytest.mark.standard
def test_processes_share_a_cache_and_its_bound_though_one_is_killed(tmp_path: Path) -> None:
    nbytes = 40_000

    def start(seed: int, n: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER, str(tmp_path), str(nbytes), str(seed), str(n)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    workers = [start(seed, 4000) for seed in range(2)]
    victims = [start(seed, 10**9) for seed in range(10, 12)]
    try:
        for one in workers + victims:
            assert one.stdout is not None and one.stdout.readline() == "ready\n"
        draw, most = random.Random(1), 0
        while any(one.poll() is None for one in workers):
            if victims and draw.random() < 0.2:
                victims.pop().send_signal(signal.SIGKILL)
            sizes = []
            for path in entries(tmp_path):
                try:
                    sizes.append(path.stat().st_size)
                except FileNotFoundError:
                    continue
            most = max(most, sum(sizes))
            time.sleep(0.01)
        outputs = [one.communicate()[0] for one in workers]
    finally:
        for one in workers + victims:
            one.kill()
            one.wait()
    assert [one.returncode for one in workers] == [0, 0]
    assert all(int(output) > 0 for output in outputs)
    assert sum(path.stat().st_size for path in entries(tmp_path)) <= nbytes
    assert most > 0
