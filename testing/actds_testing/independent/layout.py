"""Section 2: names, canonical JSON, digests, and the files of a dataset."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from actds_testing.independent.findings import Breach, need

SEGMENT = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
MAX_DOCUMENT_NBYTES, MAX_SIGNS, MAX_DEPTH = 1 << 24, 1 << 17, 16
Json = dict[str, Any]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def is_segment(name: object) -> bool:
    return isinstance(name, str) and SEGMENT.fullmatch(name) is not None


def is_path(path: object) -> bool:
    """Return whether a path of a manifest is one to eight names, 512 characters at most."""
    if not isinstance(path, str) or len(path) > 512:
        return False
    names = path.split("/")
    return len(names) <= 8 and all(map(is_segment, names))


def numbered(name: str, width: int) -> int | None:
    """Return the number that a file name is, written as section 2 says, or None."""
    if re.fullmatch(r"[0-9]+", name) and name == f"{int(name):0{width}d}":
        return int(name)
    return None


def canonical(document: object) -> bytes:  # 2.2
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def parse(data: bytes, place: str) -> Any:
    """Return what canonical JSON says, or raise E102."""
    need(len(data) <= MAX_DOCUMENT_NBYTES, "E102", place, "more than 16 MiB")
    signs = sum(map(data.count, (b"{", b"[", b",")))
    need(signs <= MAX_SIGNS, "E102", place, "more than 2^17 braces, brackets and commas")
    need(_depth(data) <= MAX_DEPTH, "E102", place, "more than 16 objects and arrays deep")
    try:
        document = json.loads(
            data.decode("ascii"),
            object_pairs_hook=_no_key_twice,
            parse_float=_refuse,
            parse_constant=_refuse,
        )
        whole = canonical(document) == data and not _odd(document)
    except (ValueError, UnicodeError) as error:
        raise Breach("E102", place, error) from None
    need(whole, "E102", place, "not canonical")
    return document


def _depth(data: bytes) -> int:
    """Return how deep brackets stand in one another, strings left out; before any parser."""
    bare = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", data, flags=re.DOTALL)
    depth = deepest = 0
    for byte in bare:
        depth += (byte in b"[{") - (byte in b"]}")
        deepest = max(deepest, depth)
    return deepest


def _no_key_twice(pairs: list[tuple[str, Any]]) -> Json:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _refuse(number: str) -> None:
    raise ValueError(f"{number} is no integer")


def _odd(value: object) -> bool:
    """Return whether an integer is out of range or a string has a lone surrogate."""
    if isinstance(value, dict):
        return any(_odd(key) or _odd(item) for key, item in value.items())
    if isinstance(value, list):
        return any(map(_odd, value))
    if isinstance(value, str):
        return any(0xD800 <= ord(c) <= 0xDFFF for c in value)
    return isinstance(value, int) and abs(value) > 2**63 - 1


def merkle(leaves: list[bytes]) -> bytes:  # 2.3
    if len(leaves) < 2:
        return hashlib.sha256(b"\0" + leaves[0] if leaves else b"").digest()
    k = 1 << ((len(leaves) - 1).bit_length() - 1)
    return hashlib.sha256(b"\1" + merkle(leaves[:k]) + merkle(leaves[k:])).digest()


class Folder:
    """The files of a dataset; remembers which of them something reached."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reached: set[str] = set()

    def _kind(self, path: str) -> str:
        """Return file, folder or nothing; a link or another thing on the way is E107."""
        at = self.root
        for name in path.split("/"):
            at = at / name
            try:
                mode = os.lstat(at).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return "nothing"
            regular = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
            need(regular, "E107", path, "neither a regular file nor a folder")
        return "file" if stat.S_ISREG(mode) else "folder"

    def has(self, path: str) -> bool:
        return self._kind(path) == "file"

    def names(self, path: str) -> list[str]:
        """Return the names in a folder, none where there is no folder."""
        if self._kind(path) != "folder":
            return []
        return sorted(name for name in os.listdir(self.root / path) if name[:5] != ".tmp-")

    def holds_files(self, path: str) -> bool:
        """Return whether there is a folder with a file below it; a link may hold anything."""
        if (self.root / path).is_symlink():
            return True
        return any(files for _, _, files in os.walk(self.root / path))

    def numbers(self, path: str, width: int) -> list[int]:
        """Return the numbers of the documents in a folder, ascending."""
        found = []
        for name in self.names(path):
            number = numbered(name.removesuffix(".json"), width) if name[-5:] == ".json" else None
            if number is not None and self._kind(f"{path}/{name}") == "file":
                found.append(number)
        return sorted(found)

    def reach(self, path: str, nbytes: int | None = None, absent: str = "E104") -> None:
        """Note that something names a file; it must be there, and of its size."""
        self.reached.add(path)
        kind = self._kind(path)
        need(kind != "folder", "E107", path, "a folder in the place of a file")
        need(kind == "file", absent, path, "no such file")
        size = os.lstat(self.root / path).st_size
        need(nbytes in (None, size), "E201", path, f"{size} bytes, expected {nbytes}")

    def read(self, path: str, entry: Json | None = None, absent: str = "E104") -> bytes:
        """Return the bytes of a file: presence, size, digest in the order of 10.2."""
        self.reach(path, entry and entry["nbytes"], absent)
        data = (self.root / path).read_bytes()
        if entry is not None:
            need(sha256(data) == entry["sha256"], "E202", path, "another digest")
        return data

    def document(self, path: str, absent: str = "E104", sha: str | None = None) -> tuple[Json, str]:
        """Return a canonical JSON object and the digest of its file; the version is known."""
        self.reach(path, absent=absent)
        size = os.lstat(self.root / path).st_size
        need(size <= MAX_DOCUMENT_NBYTES, "E102", path, "more than 64 MiB")
        data = self.read(path)
        need(sha in (None, sha256(data)), "E202", path, "another digest")
        document = parse(data, path)
        need(isinstance(document, dict), "E103", path, "no object")
        version = document.get("version")
        if isinstance(version, str):  # before the fields are judged, section 11
            need(version == "0.1", "E106", path, f"version {version}")
        return document, sha256(data)

    def walk(self) -> list[tuple[str, bool]]:
        """Return every path under the dataset that is no folder, and whether it is a file."""
        found = []
        for at, folders, files in os.walk(self.root):
            here = Path(at).relative_to(self.root)
            links = [name for name in folders if (Path(at) / name).is_symlink()]
            for name in [*files, *links]:
                if not name.startswith(".tmp-"):
                    regular = stat.S_ISREG(os.lstat(Path(at) / name).st_mode)
                    found.append(((here / name).as_posix(), regular))
        return sorted(found)
