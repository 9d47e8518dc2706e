"""The Python blocks of the README run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from actds_testing.places import ROOT
from actds_testing.synthetic import make_dataset

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
READING = [block for block in BLOCKS if "actds.write(" not in block]


def test_the_blocks_that_read_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    assert len(READING) >= 2 and len(BLOCKS) > len(READING)
    hooks = ("resid_post.10", "resid_post.20")
    (tmp_path / "demo").mkdir()
    make_dataset(tmp_path / "demo" / "acts", n_requests=700, hooks=hooks, rows_per_shard=4096)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in READING:
        exec(compile(block, "README.md", "exec"), names)  # the README's own lines
    assert names["batch"].shape == (4096, 16)
