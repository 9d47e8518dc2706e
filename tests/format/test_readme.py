"""The README's Python blocks and commands run as they stand, after ``make demo``."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from actds.cli import cli
from actds_testing.places import ROOT
from actds_testing.synthetic import make_dataset

README = (ROOT / "README.md").read_text("utf-8")
TOUR = README.split("## A tour", 1)[1].split("\n## ", 1)[0]
COMMANDS = [
    shlex.split(line.replace("\\\n", " "))
    for line in re.findall(r"^ {4}(actds (?:.*\\\n)*.*)$", TOUR, re.M)
]
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
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


def test_the_commands_of_the_tour_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the project's folder after ``make demo``: with demo/acts, demo/model and the prompts."""
    made_by_demo = {"demo/acts", "demo/model", "demo/prompts.jsonl"}
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert all(f"$(DEMO){path.removeprefix('demo')}" in makefile for path in made_by_demo)
    assert re.findall(r"^ {4}(\S+ \S+)", TOUR, re.M)[0] == ". .venv/bin/activate"
    (tmp_path / "demo").mkdir()
    made = make_dataset(tmp_path / "demo" / "acts", n_requests=40)
    monkeypatch.chdir(tmp_path)
    ran = []
    for _, name, *words in COMMANDS:
        if name == "write":  # needs the engine: a test of its own runs this line
            out, options = words[0], dict(zip(words[1::2], words[2::2], strict=True))
            assert (
                out not in made_by_demo
                and {options["--model"], options["--prompts"]} <= made_by_demo
            )
            shutil.copytree(made, out)
            ran.append(name)
            continue
        done = CliRunner().invoke(cli, [name, *words], prog_name="actds")
        assert done.exit_code in (0, 1) and not done.stderr.startswith(("E", "Usage")), done.output
        ran.append(name)
    assert ran == ["write", "validate", "info", "check", "regimes"]


def test_every_link_works_on_a_package_index_or_is_none() -> None:
    core = ProjectMetadata(str(ROOT), PluginManager()).core
    links = re.findall(r"\]\(([^)\s]+)\)", README)
    inside = [link.split("#")[0] for link in links if not link.startswith(("https://", "#"))]
    assert inside and not [path for path in inside if not (ROOT / path).exists()]
    page = core.readme
    home = "https://host.example/owner/actds"
    hook = ProjectMetadata(
        str(ROOT), PluginManager(), tomllib.loads((ROOT / "pyproject.toml").read_text())
    )
    hook.hatch.metadata.hook_config["custom"]["repository"] = home
    for text in (page, hook.core.readme):
        assert not re.findall(r"\]\((?!https://|#)[^)]*\)", text)
    assert set(hook.core.urls) == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(home) for url in hook.core.urls.values())
    words = re.compile(r"!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)|\[")
    assert words.sub("", page).split() == words.sub("", README).split()
