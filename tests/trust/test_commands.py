"""The commands of docs/trust.md and section 15.4 run as they are; OpenSSL and coreutils agree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import actds
from actds_testing.places import DOCS, ROOT
from actds_testing.synthetic import make_dataset

pytestmark = [
    pytest.mark.standard,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
]
SECTION = (ROOT / "spec" / "0.1" / "annexes" / "15-trust.md").read_text("utf-8")
Pair = tuple[Path, Path]


def blocks(text: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", text, re.DOTALL)


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run lines of a guide, each of which has to succeed, with ``actds`` on the path."""
    tools = folder.parent / "bin"
    tools.mkdir(exist_ok=True)
    for name, words in (("actds", "-m actds"), ("python3", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (tools / name).chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )


def test_the_commands_of_the_guide_run_one_after_the_other(acts: Path) -> None:
    script = blocks((DOCS / "trust.md").read_text("utf-8"))
    assert len(script) == 5
    said = run("\n".join(script), acts.parent)
    assert said.returncode == 0, said.stdout + said.stderr
    digest = actds.open(acts).digest
    assert said.stdout.count(f"seal 1 sha256:{digest}") == 3
    assert "valid (validation at level full" in said.stdout and "(audit, " in said.stdout
    assert "were checked, no table and no array was read" in said.stdout
    assert f"{digest} {actds.open(acts).n_rows}" in said.stdout


def test_openssl_and_sha256sum_alone_verify_a_dataset(
    acts: Path, pair: Callable[[str], Pair]
) -> None:
    (script,) = blocks(SECTION)
    private, public = pair("key")
    assert public.name == "key.pub" and public.parent == acts.parent
    actds.sign(acts, pair("other")[0])
    actds.sign(acts, private)
    said = run(script, acts)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "Signature Verified Successfully" in said.stdout
    for path in ("seal/0001.json", "SHA256SUMS"):
        assert re.search(rf"^[0-9a-f]{{64}}  {path}$", said.stdout, re.MULTILINE)
        assert f"{path}: OK" in said.stdout


def another_key(acts: Path, pair: Callable[[str], Pair]) -> None:
    shutil.copy(pair("mallory")[1], acts.parent / "key.pub")


def another_byte(acts: Path, pair: Callable[[str], Pair]) -> None:
    array = next(acts.glob("shards/*/acts.zarr/*/c/0/0"))
    data = array.read_bytes()
    array.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


def another_list(acts: Path, pair: Callable[[str], Pair]) -> None:
    (acts / "SHA256SUMS").write_bytes(b"".join((acts / "SHA256SUMS").open("rb").readlines()[1:]))


def another_seal(acts: Path, pair: Callable[[str], Pair]) -> None:
    other = make_dataset(acts.parent / "other", n_requests=3, seed=8)
    shutil.copy(other / "seal" / "0001.json", acts / "seal" / "0001.json")


def another_envelope(acts: Path, pair: Callable[[str], Pair]) -> None:
    other = make_dataset(acts.parent / "other", n_requests=3, seed=8)
    name = actds.sign(other, acts.parent / "key.pem").file
    shutil.copy(other / name, acts / name)


@pytest.mark.parametrize(
    "attack", [another_key, another_byte, another_list, another_seal, another_envelope],
    ids=lambda attack: attack.__name__,
)  # fmt: skip
def test_openssl_and_sha256sum_alone_refuse_an_attack(
    attack: Callable[[Path, Callable[[str], Pair]], None],
    acts: Path,
    pair: Callable[[str], Pair],
) -> None:
    actds.sign(acts, pair("key")[0])
    attack(acts, pair)
    assert run(blocks(SECTION)[0], acts).returncode != 0


def test_a_key_of_openssl_signs_and_its_id_is_what_openssl_says(acts: Path) -> None:
    script = """
        openssl genpkey -algorithm ed25519 -aes256 -pass pass:sesame -out locked.pem
        openssl pkey -in locked.pem -passin pass:sesame -pubout -out locked.pub
        ACTDS_KEY_PASSWORD=sesame actds sign acts --key locked.pem
        openssl pkey -pubin -in locked.pub -outform DER | sha256sum
        openssl genpkey -algorithm rsa -out rsa.pem
        ! actds sign acts --key rsa.pem
    """
    said = run(script, acts.parent)
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stderr.count("E021 rsa.pem: a key of another algorithm") == 1
    (key,) = actds.verify(acts, [acts.parent / "locked.pub"]).keys
    assert f"{key.keyid}  -" in said.stdout
