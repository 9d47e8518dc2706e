"""The store: whole files or none, never over another, and no way out of the dataset."""

import errno
import hashlib
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actds.errors import ActdsError
from actds.store import TEMPORARY, file_sha256, open_store
from actds.store.local import LocalStore


@contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """Let the kernel refuse to grow a file beyond ``nbytes``, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_put_writes_every_part_in_order_and_says_its_digest(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "new" / "dataset")
    # More parts than one writev takes, empty ones and wide items among them.
    parts = [bytes([i % 256]) * (i % 5) for i in range(3000)] + [memoryview(b"abcd").cast("I")]
    put = store.put_new("a/b/c", parts)
    whole = b"".join(bytes(part) for part in parts)
    assert store.read("a/b/c") == whole
    assert (put.nbytes, put.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())
    assert store.list() == ["a/b/c"]
    assert list(tmp_path.rglob(f"{TEMPORARY}*")) == []


def test_put_never_writes_over_a_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_new("a/b", [b"first"])
    with pytest.raises(ActdsError, match="E309"):
        store.put_new("a/b", [b"second"])
    assert store.read("a/b") == b"first"
    assert list(tmp_path.rglob(f"{TEMPORARY}*")) == []


def test_a_refused_write_leaves_nothing_and_names_the_cause(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with full_disk(4096), pytest.raises(ActdsError, match=os.strerror(errno.EFBIG)) as caught:
        store.put_new("a/b", [b"x" * 3000, b"y" * 3000])
    assert caught.value.code == "E503"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not store.exists("a/b")


@pytest.mark.parametrize("name", ["fsync", "close"])
def test_a_failing_sync_or_close_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = getattr(os, name)
    LocalStore(tmp_path).put_new("a/first", [b"x"])

    def failing(handle: int) -> None:
        if name == "close":
            real(handle)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, name, failing)
    with pytest.raises(ActdsError, match=os.strerror(errno.EIO)) as caught:
        LocalStore(tmp_path).put_new("a/second", [b"x"])
    monkeypatch.undo()
    assert caught.value.code == "E503"
    assert LocalStore(tmp_path).list() == ["a/first"]


def test_bytes_are_durable_before_their_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, link = os.fsync, os.link

    def tell_fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        inside = path.relative_to(tmp_path).as_posix()
        events.append("sync file" if path.is_file() else f"sync {inside}")
        fsync(handle)

    def tell_link(source: Path, target: Path) -> None:
        events.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", tell_fsync)
    monkeypatch.setattr(os, "link", tell_link)
    (tmp_path / "a").mkdir()  # by another process, which may not have synced it yet
    store = LocalStore(tmp_path)
    store.put_new("a/b/c", [b"x"])
    assert events == ["sync .", "sync a", "sync file", "link", "sync a/b"]
    events.clear()
    store.put_new("a/b/d", [b"x"])
    assert events == ["sync file", "link", "sync a/b"]


@pytest.mark.parametrize(
    "path",
    ["../x", "a/../../x", "/etc/passwd", "a//b", "", "A", ".hidden", "a/.tmp-1", "a\n", "a\0b"],
)
def test_no_path_leaves_the_dataset(tmp_path: Path, path: str) -> None:
    store = LocalStore(tmp_path / "dataset")
    for use in (store.read, store.exists, store.size, store.local_path):
        with pytest.raises(ActdsError, match="E107"):
            use(path)
    with pytest.raises(ActdsError, match="E107"):
        store.put_new(path, [b"x"])
    assert list(tmp_path.rglob("*")) == []


def test_no_link_is_followed(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "dataset"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root.mkdir()
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    (root / "dangling").symlink_to(outside / "none")
    os.mkfifo(root / "pipe")
    store = LocalStore(root)
    for path in ("folder/secret", "file", "dangling", "pipe", "folder"):
        with pytest.raises(ActdsError, match="E107"):
            store.read(path)
    with pytest.raises(ActdsError, match="E107"):
        store.put_new("folder/new", [b"x"])
    with pytest.raises(ActdsError, match="E107"):
        store.list("folder")
    with pytest.raises(ActdsError, match="E309"):
        store.put_new("dangling", [b"x"])
    # They are listed, as files that nothing reaches, and nothing behind them is.
    assert store.list() == ["dangling", "file", "folder", "pipe"]
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]


def test_temporary_files_are_no_data_and_can_be_removed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_new("a/b", [b"x"])
    (tmp_path / "a" / f"{TEMPORARY}0123").write_bytes(b"half a shard")
    assert store.list() == ["a/b"]
    assert store.remove_temporary() == 1
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b"]


def test_a_removed_file_is_gone_and_no_folder_or_way_out_is_removed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "dataset")
    store.put_new("a/b/c", [b"x"])
    store.remove("a/b/c")
    store.remove("a/b/c")
    store.remove("none/at-all")
    assert store.list() == []
    for path in ("a/b", "../x", ""):
        with pytest.raises(ActdsError, match="E107"):
            store.remove(path)


def test_a_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ActdsError, match="E102"):
        store.read("sparse", 1 << 20)


def test_replace_is_whole_and_leaves_no_other_file(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    for text in (b"old", b"new"):
        store.replace("README.md", text)
    assert store.read("README.md") == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize("removed", ["journal/r-a", "journal"])
def test_a_folder_that_another_process_removes_is_made_again(
    removed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ends the last chain of a run removes its empty folders, at any moment."""
    store, mkdir, n_removed = LocalStore(tmp_path), os.mkdir, 0
    store.replace("journal/r-a/one.json", b"1")
    store.remove("journal/r-a/one.json")

    def rivalled(path: str | Path, *args: int) -> None:
        nonlocal n_removed
        mkdir(path, *args)
        if n_removed < 2 and Path(path) == tmp_path / removed:
            n_removed += 1
            os.rmdir(path)

    for folder in ("journal/r-a", "journal"):
        (tmp_path / folder).rmdir()
    monkeypatch.setattr(os, "mkdir", rivalled)
    store.replace("journal/r-a/two.json", b"2")
    assert store.read("journal/r-a/two.json") == b"2" and n_removed == 2


def test_a_range_is_read_and_a_range_past_the_end_is_not(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_new("a/b", [b"0123456789"])
    with store.open_file("a/b") as file:
        assert file.nbytes == 10
        assert bytes(file.read(3, 4)) == b"3456"
        assert bytes(file.read(10, 0)) == b""
        with pytest.raises(EOFError, match="the end at byte 10"):
            file.read(8, 4)
        assert bytes(file.read(0, 10)) == b"0123456789"
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.read(0, 1)
    assert file_sha256(store, "a/b") == hashlib.sha256(b"0123456789").hexdigest()


@pytest.mark.parametrize(
    "uri",
    [
        "ftp://bucket/x",
        "s3:/bucket/x",
        Path("s3://bucket/x"),
        Path("https://host/x"),
        "file+s3://b/x",
    ],
)
def test_a_location_of_another_kind_is_refused(uri: str | Path) -> None:
    with pytest.raises(ActdsError, match=r"E009 .*s3://BUCKET/PREFIX"):
        open_store(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://",
        "s3:///x",
        "s3://b",
        "s3://bucket/a//b",
        "s3://bucket/../x",
        "s3://bucket/?x",
        "gs://",
        "az://Upper/x",
        "abfs://c@host/x",
        "https://",
        "https://user:pw@host/x",
        "https://host/x?token=1",
        "https://host/a b",
        "http://host:port/x",
    ],
)
def test_a_malformed_object_uri_is_refused(uri: str) -> None:
    with pytest.raises(ActdsError, match=r"E009 .*malformed"):
        open_store(uri)


def test_a_missing_extra_is_named_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ActdsError, match=r"E011 s3://bucket/x.*\n.*pip install '\.\[cloud\]'"):
        open_store("s3://bucket/x")
