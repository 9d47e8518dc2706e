"""The Python blocks and commands of README and tour run as they stand, after ``make demo``."""

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
from actds.format.readouts import Readouts
from actds_testing.places import DOCS, ROOT
from actds_testing.synthetic import make_dataset
from actds_testing.terminal_picture import picture

README = (ROOT / "README.md").read_text("utf-8")
TOUR = (DOCS / "tour.md").read_text("utf-8")
# What comes after the tour itself needs a model of the reader's, or a server.
PAGES = {"README.md": README, "tour.md": TOUR.split("\n## ", 1)[0]}
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_that_read_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    blocks = [block for block in BLOCK.findall(PAGES[page]) if "actds.write(" not in block]
    hooks = ("resid_post.10", "resid_post.20")
    (tmp_path / "demo").mkdir()
    # A real harvest has readouts, and sinks at first positions.
    shape: dict[str, Any] = {"n_requests": 700, "hooks": hooks, "rows_per_shard": 4096}
    shape |= {"readouts": Readouts(2, seed=4), "sinks": True}
    made = make_dataset(tmp_path / "demo" / "acts", **shape)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)  # the page's own lines
    assert names["batch"].shape == (4096, 16)
    assert names["loader"].config["digest"] == names["actds"].open(made).digest


@pytest.mark.parametrize(
    ("page", "commands"),
    [
        ("README.md", ["write", "check"]),
        ("tour.md", ["write", "validate", "info", "check", "regimes"]),
    ],
)
def test_the_commands_run_one_after_the_other(
    page: str, commands: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the project's folder after ``make demo``: with demo/acts, demo/model and the prompts."""
    made_by_demo = {"demo/acts", "demo/model", "demo/prompts.jsonl"}
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert all(f"$(DEMO){path.removeprefix('demo')}" in makefile for path in made_by_demo)
    assert ". .venv/bin/activate" in PAGES[page]
    (tmp_path / "demo").mkdir()
    made = make_dataset(tmp_path / "demo" / "acts", n_requests=40)
    monkeypatch.chdir(tmp_path)
    ran = []
    for line in re.findall(r"^ {4}(actds (?:.*\\\n)*.*)$", PAGES[page], re.M):
        _, name, *words = shlex.split(line.replace("\\\n", " "))
        ran.append(name)
        if name == "write":  # needs the engine: a test of its own runs this line
            out, options = words[0], dict(zip(words[1::2], words[2::2], strict=True))
            assert out not in made_by_demo
            assert {options["--model"], options["--prompts"]} <= made_by_demo
            shutil.copytree(made, out)
            continue
        done = CliRunner().invoke(cli, [name, *words], prog_name="actds")
        assert done.exit_code in (0, 1) and not done.stderr.startswith(("E", "Usage")), done.output
    assert ran == commands


def test_the_two_commands_of_the_readme_are_doors_and_ci_runs_the_test() -> None:
    doors = re.findall(r"^ {4}(make [a-z-]+) ", README, re.M)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert doors == ["make demo", "make test"]
    assert all(re.search(rf"^{door.split()[1]}: .*##", makefile, re.M) for door in doors)
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_the_readme_fits_on_a_few_screens_and_its_numbers_are_those_of_the_guides() -> None:
    assert len(README.encode()) <= 7_000
    families = (DOCS / "families.md").read_text("utf-8")
    right, refused, absent = re.search(
        r"(\d+) right, (\d+) refused, (\d+) not started", families
    ).groups()  # type: ignore[union-attr]
    said = f"{right} model families agree, {refused} are refused, {absent} do not start"
    assert said in " ".join(README.split())
    write = re.search(r"^ {4}actds write (?:.*\\\n)*.*$", README, re.M)
    assert write is not None and write[0] in TOUR  # one harvest, in both
    assert '"exclude": ("first_position", "sink")' in README  # as the answer of the tour says
    assert 'weights="multiplicity", exclude=("first_position", "sink"))' in TOUR
    assert "\n## Status\n" in README.split("\n## Install", 1)[0]


def test_the_picture_is_what_the_tour_says_that_the_command_prints() -> None:
    shown = re.search(r"    (actds check demo/acts) .*?```text\n(.*?)```", TOUR, re.DOTALL)
    assert shown is not None
    drawn = picture(shown[1], shown[2].splitlines())
    assert (DOCS / "answer.svg").read_text("utf-8") == drawn, "see actds_testing.terminal_picture"


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
