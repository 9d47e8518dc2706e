"""Servers of the other schemes on loopback: Azure's emulator, Google's API, a web server.

Google's XML API is the one of S3, and no package carries an emulator of it: moto's S3 server
answers in its place, behind a proxy that signs requests in S3's way. Azure's is Azurite, of npm.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from actds_testing.s3_server import Exchange, serving

AZURITE = "azurite-blob"
CONTAINER = "harvest"
# The account that Azurite's manual names; it opens nothing else.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_SIGNED = (
    "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
)


def sign(exchange: Exchange) -> None:
    """Let a request without a signature pass for one of a known user: moto checks no more."""
    exchange.headers["Authorization"] = _SIGNED


def google_environment(patch: pytest.MonkeyPatch, port: int) -> None:
    """Set the environment of a server in Google's place, and no other of its kind."""
    for name in [name for name in os.environ if name.startswith("GOOGLE_")]:
        patch.delenv(name)
    patch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{port}")
    patch.setenv("GOOGLE_SKIP_SIGNATURE", "true")


def azurite_program() -> str | None:
    """Return Azurite's program: of ``make emulators`` or on the path; None where there is none."""
    folder = Path(__file__).resolve().parents[2] / ".venv-emulators" / "node_modules" / ".bin"
    return shutil.which(AZURITE, path=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")


@contextmanager
def azurite() -> Iterator[int]:
    """Yield the port of Azure's emulator, which keeps all in memory and has one container."""
    program = azurite_program()
    assert program is not None
    process = subprocess.Popen(
        [program, "--inMemoryPersistence", "--blobPort", "0", "--skipApiVersionCheck",
         "--disableTelemetry", "--silent"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = (re.search(r"listens on http://127.0.0.1:(\d+)", line) for line in process.stdout)
        port = int(next(match for match in found if match)[1])
        _make_container(port)
        yield port
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _make_container(port: int) -> None:
    date, version = formatdate(usegmt=True), "2021-08-06"
    resource = f"/{_ACCOUNT}/{_ACCOUNT}/{CONTAINER}\nrestype:container"
    text = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    digest = hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}",
    }
    url = f"http://127.0.0.1:{port}/{_ACCOUNT}/{CONTAINER}?restype=container"
    request = urllib.request.Request(url, method="PUT", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 201


def azure_environment(patch: pytest.MonkeyPatch, port: int) -> None:
    """Set the environment of the emulator, and no other of its kind."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        patch.delenv(name)
    patch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    patch.setenv("AZURITE_BLOB_STORAGE_URL", f"http://127.0.0.1:{port}")


@contextmanager
def web_server(folder: Path, ranges: bool = True) -> Iterator[int]:
    """Yield the port of a web server of a folder, which lists nothing.

    Args:
        folder: what it serves.
        ranges: whether it answers requests for ranges of files.
    """

    class Handler(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = Path(self.translate_path(self.path))
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if not path.is_file() or asked is None or not ranges:
                super().do_GET()
                return
            data = path.read_bytes()
            first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
            if first > last:
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
            self.end_headers()
            self.wfile.write(data[first : last + 1])

        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def list_directory(self, path: object) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as port:
        yield port
