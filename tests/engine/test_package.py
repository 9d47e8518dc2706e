"""The package works installed: a wheel in a fresh environment, without torch or vllm."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from actds_testing.places import ROOT

pytestmark = pytest.mark.package

VALID = ROOT / "spec" / "0.1" / "vectors" / "valid" / "minimal"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that holds the built wheel and its core dependencies only."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, str(wheel)], check=True)
    return python


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        [str(python), *arguments], capture_output=True, text=True, cwd="/", env=environment
    )


def test_the_wheel_brings_neither_torch_nor_vllm(python: Path) -> None:
    listed = run(python, "-m", "pip", "list", "--format=freeze").stdout.lower()
    assert "actds==" in listed
    assert "zarr==" in listed
    assert "torch" not in listed
    assert "vllm" not in listed


def test_the_installed_command_validates_and_describes(python: Path) -> None:
    command = str(python.parent / "actds")
    valid = subprocess.run([command, "validate", str(VALID)], capture_output=True, text=True)
    assert valid.returncode == 0, valid.stderr
    info = subprocess.run([command, "info", str(VALID)], capture_output=True, text=True)
    assert info.returncode == 0
    assert "sealed" in info.stdout


def test_the_installed_reader_reads_rows(python: Path) -> None:
    code = (
        "import actds, sys; d = actds.open(sys.argv[1]); name = next(iter(d.hooks));"
        "rows = d.array(name)[:]; assert len(rows) == d.n_rows > 0; print(rows.dtype)"
    )
    done = run(python, "-c", code, str(VALID))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "float32"


def test_writing_without_vllm_says_what_to_install(python: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("hello\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"num_hidden_layers": 2, "hidden_size": 8}')
    arguments = ["write", "out", "--model", str(model), "--prompts", str(prompts)]
    done = run(python, "-m", "actds", *arguments, "--hooks", "resid_post:0")
    assert done.returncode == 2
    assert "E011" in done.stderr
    assert "Traceback" not in done.stderr
