"""A small Hugging Face Hub on loopback, for ``huggingface_hub``, with faults.

It has dataset repositories with commits, regular and LFS files, pages of listings and a token, in
the memory of a thread of this process. Xet, branches and pull requests are not there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_secretsecretsecret"
PAGE = 7
"""Entries of one page of a listing."""
LFS_NBYTES = 4000
"""Files from this size on, and all Parquet files, are LFS files."""

Kind = Literal["503", "403", "cut", "flip"]


@dataclass
class Fault:
    """What happens to requests that match.

    Args:
        kind: ``503`` or ``403`` an answer of that status, with the request's token in its words;
            ``cut`` the connection ends in the middle; ``flip`` a bit of the file is another one.
        pattern: regular expression that is searched in ``METHOD PATH``.
        times: how often; None without end.
    """

    kind: Kind
    pattern: str
    times: int | None = 1
    seen: int = 0


@dataclass
class Repo:
    """One repository: its commits, each the bytes and the storage of every path."""

    private: bool
    commits: list[dict[str, tuple[bytes, bool]]] = field(default_factory=lambda: [{}])
    messages: list[str] = field(default_factory=list)

    @property
    def files(self) -> dict[str, bytes]:
        """Return the files of the last commit."""
        return {path: data for path, (data, _) in self.commits[-1].items()}


class Hub:
    """What the server holds, and what it was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.url = ""
        self.lock = threading.Lock()

    def fail(self, kind: Kind, pattern: str, times: int | None = 1) -> Fault:
        """Add a fault, and return it: ``seen`` counts."""
        self.faults.append(Fault(kind, pattern, times))
        return self.faults[-1]

    def count(self, pattern: str) -> int:
        """Return how many requests matched."""
        return sum(re.search(pattern, request) is not None for request in self.requests)

    def fault(self, request: str) -> Kind | None:
        """Note a request, and return what becomes of it."""
        with self.lock:
            self.requests.append(request)
            for one in self.faults:
                left = one.times is None or one.seen < one.times
                if left and re.search(one.pattern, request):
                    one.seen += 1
                    return one.kind
        return None


@contextmanager
def serve() -> Iterator[Hub]:
    """Run a hub for as long as the context lasts."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def flipped(data: bytes) -> bytes:
    """Return bytes with one bit changed."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def git_oid(data: bytes) -> str:
    """Return the name that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body in one packet: two would wait 40 ms for each other.
    wbufsize = -1
    disable_nagle_algorithm = True
    state: Hub

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.fault = self.state.fault(f"{self.command} {unquote(url.path)}")
        if self.fault in ("503", "403"):
            words = f"no, {self.headers.get('Authorization')}"
            return self._answer({"error": words}, int(self.fault))
        if self.fault == "cut" and self.command != "GET":
            return self._cut(b"")
        token = self.headers.get("Authorization")
        upload = re.fullmatch(r"/upload/([0-9a-f]{64})", url.path)
        if upload is None and token != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid username or password."}, 401)
        if upload is not None:
            good = hashlib.sha256(body).hexdigest() == upload[1]
            if good:
                self.state.objects[upload[1]] = body
            return self._answer({}, 200 if good else 400)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self._route(unquote(url.path), query, body)

    def _route(self, path: str, query: dict[str, str], body: bytes) -> None:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            taken = name in self.state.repos
            private = asked.get("visibility", "") == "private" or bool(asked.get("private"))
            self.state.repos.setdefault(name, Repo(private))
            return self._answer({"url": f"{self.state.url}/datasets/{name}"}, 409 if taken else 200)
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        found = re.fullmatch(
            r"/(?:api/)?datasets/([^/]+/[^/.]+)(?:\.git)?"
            r"(?:/(revision|tree|preupload|commit|resolve|info)(?:/([^/]+)(?:/(.*))?)?)?",
            path,
        )
        repo = None if found is None else self.state.repos.get(found[1])
        if found is None or repo is None:
            return self._answer({"error": "no"}, 404, {"X-Error-Code": "RepoNotFound"})
        what, revision, rest = found[2] or "revision", found[3], found[4] or ""
        n = len(repo.commits) - 1
        if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
            n = int(revision, 16)
        getattr(self, f"_{what}")(found[1], repo, n, rest, query, body)

    def _revision(self, name: str, repo: Repo, n: int, *_: Any) -> None:
        self._answer({"id": name, "sha": f"{n:040x}", "tags": [], "private": repo.private})

    def _tree(
        self, name: str, repo: Repo, n: int, rest: str, query: dict[str, str], _: bytes
    ) -> None:
        entries: list[dict[str, Any]] = [{"type": "directory", "path": "ledger", "oid": "0" * 40}]
        for path, (data, lfs) in sorted(repo.commits[n].items()):
            entry = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
            if lfs:
                sha256 = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 130}
            entries.append(entry)
        start = int(query.get("cursor", 0))
        headers = {}
        if start + PAGE < len(entries):
            url = f"{self.state.url}/api/datasets/{name}/tree/{n:040x}?recursive=1"
            headers["Link"] = f'<{url}&cursor={start + PAGE}>; rel="next"'
        self._answer(entries[start : start + PAGE], headers=headers)

    def _preupload(self, _: str, repo: Repo, n: int, *rest: Any) -> None:
        files = []
        for one in json.loads(rest[-1])["files"]:
            path = one["path"]
            large = one["size"] >= LFS_NBYTES or path.endswith(".parquet")
            there = repo.commits[n].get(path)
            oid = None if there is None else git_oid(there[0])
            mode = "lfs" if large else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._answer({"files": files})

    def _info(self, name: str, repo: Repo, n: int, rest: str, *more: Any) -> None:
        objects = []
        for one in json.loads(more[-1])["objects"]:
            href = f"{self.state.url}/upload/{one['oid']}"
            actions = {} if one["oid"] in self.state.objects else {"upload": {"href": href}}
            objects.append({**one, **({"actions": actions} if actions else {})})
        self._answer({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repo: Repo, n: int, *rest: Any) -> None:
        lines = [json.loads(line) for line in rest[-1].splitlines()]
        files = dict(repo.commits[-1])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                data = base64.b64decode(value["content"])
                files[value["path"]] = (flipped(data) if self.fault == "flip" else data, False)
            elif line["key"] == "lfsFile":
                files[value["path"]] = (self.state.objects[value["oid"]], True)
        with self.state.lock:
            repo.commits.append(files)
            repo.messages.append(lines[0]["value"]["summary"])
        oid = f"{len(repo.commits) - 1:040x}"
        url = f"{self.state.url}/datasets/{name}/commit/{oid}"
        self._answer({"commitUrl": url, "commitOid": oid})

    def _resolve(self, _: str, repo: Repo, n: int, path: str, *__: Any) -> None:
        if path not in repo.commits[n]:
            return self._answer({"error": "no"}, 404, {"X-Error-Code": "EntryNotFound"})
        data, lfs = repo.commits[n][path]
        etag = hashlib.sha256(data).hexdigest() if lfs else git_oid(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": f"{n:040x}", "Accept-Ranges": "bytes"}
        status, size = 200, len(data)
        if self.fault == "flip":
            data = flipped(data)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked is not None:
            start = int(asked[1])
            status, data = 206, data[start:]
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        if self.fault == "cut":
            return self._cut(data, headers)
        self._send(data, status, headers)

    def _answer(
        self, document: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        kind = {"Content-Type": "application/json"}
        self._send(json.dumps(document).encode(), status, kind | (headers or {}))

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        with suppress(ConnectionError):
            self._head(len(data), status, headers)
            if self.command != "HEAD":
                self.wfile.write(data)

    def _cut(self, data: bytes, headers: dict[str, str] | None = None) -> None:
        """Promise all of it, send half, and hang up."""
        if data:
            self._head(len(data), 200, headers or {})
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
        self.close_connection = True

    def _head(self, nbytes: int, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(nbytes)}.items():
            self.send_header(name, value)
        self.end_headers()
