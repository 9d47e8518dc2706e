"""The vectors of section 15: each is accepted, or refused with its code, here and by its text."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_public_key

import actds
from actds.errors import ActdsError
from actds_testing.places import VECTORS

FOLDER = VECTORS / "signatures"
CASES = sorted(path for path in FOLDER.iterdir() if path.name != "keys")


def built(case: Path, out: Path) -> tuple[Path, dict[str, Any]]:
    expect: dict[str, Any] = json.loads((case / "expect.json").read_bytes())
    shutil.copytree(VECTORS / expect["base"], out)
    if (case / "files").is_dir():
        shutil.copytree(case / "files", out, dirs_exist_ok=True)
    return out, expect


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_vector_is_accepted_or_refused_with_its_code(case: Path, tmp_path: Path) -> None:
    path, expect = built(case, tmp_path / "acts")
    keys = [FOLDER / "keys" / name for name in expect["keys"]]
    if expect["code"] is None:
        assert len(actds.verify(path, keys, need=expect["need"]).keys) >= expect["need"]
        return
    with pytest.raises(ActdsError) as caught:
        actds.verify(path, keys, need=expect["need"])
    assert caught.value.code == expect["code"]


def test_the_vectors_have_every_answer_to_a_signature() -> None:
    codes = {json.loads((case / "expect.json").read_bytes())["code"] for case in CASES}
    assert codes == {None, "E102", "E103", "E801", "E802", "E803", "E806"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plain_ed25519_finds_the_good_signatures(case: Path, tmp_path: Path) -> None:
    """What ``cryptography`` says of each signature decides E802, without a line of ours."""
    path, expect = built(case, tmp_path / "acts")
    file = path / "seal" / "0001.dsse.json"
    if expect["code"] in ("E801", "E102", "E103"):
        return
    document = json.loads(file.read_bytes())
    payload, kind = base64.b64decode(document["payload"]), document["payloadType"].encode()
    signed = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    good = set()
    for name in expect["keys"]:
        key: Any = load_pem_public_key((FOLDER / "keys" / name).read_bytes())
        for one in document["signatures"]:
            try:
                key.verify(base64.b64decode(one["sig"]), signed)
            except InvalidSignature:
                continue
            good.add(name)
    enough = len(good) >= expect["need"]
    assert enough == (expect["code"] != "E802" and case.name != "payload-type-changed")
