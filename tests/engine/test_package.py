"""The package works installed: a wheel in a fresh environment, without torch or vllm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
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


def test_what_the_tools_made_is_in_no_archive(tmp_path: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    sources = [name for name in tracked.split("\0") if name and (ROOT / name).is_file()]
    made = [
        "build/site/index.html",
        "dist/old.whl",
        "demo/acts/actds.json",
        "actds/__pycache__/x.pyc",
    ]
    tree = tmp_path / "tree"
    for name in [*sources, *made]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if name in made:
            (tree / name).touch()
        else:
            shutil.copy(ROOT / name, tree / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(tree)]
    subprocess.run(build, check=True, capture_output=True)
    [sdist] = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held - {"PKG-INFO"} == set(sources) - set(made)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    rooms = ("actds/", "writers/actds_writers/", "validators/actds_validators/")
    shipped = {name for name in sources if name.startswith(rooms)}
    assert packed == {name.removeprefix("writers/").removeprefix("validators/") for name in shipped}
