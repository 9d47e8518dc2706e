"""What is written, validated, audited and specified is what was recorded."""

from __future__ import annotations

from pathlib import Path

import golden
import pytest

pytestmark = pytest.mark.standard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize("name", golden.RECORDED)
def test_nothing_has_changed(name: str, folder: Path) -> None:
    now, then = golden.comparable(golden.RECORDED[name](folder), golden.read(name))
    found = golden.differences(now, then)
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:40])
