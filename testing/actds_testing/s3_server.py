"""A real S3-speaking server in a process of its own, and a proxy that breaks what a test names."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

START_TIMEOUT_S = 60
BUCKET = "harvest"
KEY = "test"  # and the secret of it, which moto does not compare and Ceph does
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address=sys.argv[1], port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
SERVERS = [
    pytest.param("moto", marks=pytest.mark.standard),
    pytest.param("ceph", marks=pytest.mark.full),
]
"""Of the fixture ``s3_port``, for tests that are run against each of them."""
HOP_HEADERS = {"connection", "transfer-encoding", "keep-alive", "content-length"}

Change = Callable[["Exchange"], None]


@contextmanager
def s3_server(host: str = "127.0.0.1") -> Iterator[int]:
    """Yield the port of a server that keeps everything in memory and has one bucket."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, host],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        _await(host, port)
        request = urllib.request.Request(f"http://{host}:{port}/{BUCKET}", data=b"", method="PUT")
        with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as answer:
            assert answer.status == 200
        yield port
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def s3_environment(patch: pytest.MonkeyPatch, port: int, host: str = "127.0.0.1") -> None:
    """Set the environment that a person would set for the server, and no other of its kind."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    patch.setenv("AWS_ACCESS_KEY_ID", KEY)
    patch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
    patch.setenv("AWS_REGION", "us-east-1")
    patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")


def _await(host: str, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection((host, port)).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "the S3 server does not come up"
            time.sleep(0.02)


class Exchange:
    """One request on its way through the proxy.

    ``headers`` and ``path`` may be changed; with ``forward`` False the server never sees the
    request, with ``status`` set the client gets that instead of the server's answer, with
    ``hang_up`` nothing; with ``cut`` set only so many bytes of the body, with ``lie`` as if it had
    no more, and with ``stall`` set nothing until it is.
    """

    def __init__(self, method: str, path: str, headers: dict[str, str]) -> None:
        self.method, self.path, self.headers = method, path, headers
        self.forward, self.hang_up = True, False
        self.status: int | None = None
        self.cut: int | None = None
        self.lie = False
        self.stall: threading.Event | None = None


@contextmanager
def proxy(port: int, change: Change) -> Iterator[int]:
    """Yield the port of a proxy before the server that lets ``change`` see every request."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            exchange = Exchange(self.command, self.path, dict(self.headers))
            change(exchange)
            status, headers, data = 500, {}, b""
            if exchange.forward:
                upstream = http.client.HTTPConnection("127.0.0.1", port)
                upstream.request(self.command, exchange.path, body, exchange.headers)
                answer = upstream.getresponse()
                status, headers, data = answer.status, dict(answer.getheaders()), answer.read()
                upstream.close()
            if exchange.stall is not None:
                exchange.stall.wait(START_TIMEOUT_S)
            if exchange.hang_up:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if exchange.status is not None:
                status, headers, data = exchange.status, {}, b""
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in HOP_HEADERS:
                    self.send_header(name, value)
            data = data[: exchange.cut] if exchange.lie else data
            length = headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(data)))
            self.end_headers()
            self.wfile.write(data[: exchange.cut])
            self.close_connection = self.close_connection or exchange.cut is not None

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = serve

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as front:
        yield front


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Yield the port of a server in threads of this process."""
    # Else a body waits for the answer to its headers.
    handler.disable_nagle_algorithm = True

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing: clients hang up, and some of them are meant to."""

    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
