"""The steps of the first hour on a GPU start, end in time, and leave what they have measured."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from actds_testing.places import ROOT

pytestmark = pytest.mark.standard

FOLDER = Path(ROOT) / "benchmarks" / "gpu"
# A Python on a machine with a card: one part is measured, the other hangs or fails.
STUB = """#!/bin/bash
case "$*" in
*"rows.py card"*) echo "NVIDIA Test 80GB, torch 2.11.0" ;;
*"--compiled "*) echo "| two hooks | 0.99 |"; echo "not a table" ;;
*"--batch 32 "*) {} ;;
esac
"""


def run_step(step: str, out: Path, python: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", FOLDER / "run.sh", step],
        env={
            **os.environ,
            "PY": str(python),
            "OUT": str(out),
            "WHEELS": str(out / "none"),
            "SITE": str(out / "site"),
            **extra,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_step_without_a_gpu_says_so_in_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run_step("host", tmp_path, Path(sys.executable), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 3
    assert done.stdout.startswith("host: needs a GPU, and torch")
    assert done.stdout.count("\n") == 1
    assert not done.stderr


def test_a_step_that_is_none_names_them(tmp_path: Path) -> None:
    done = run_step("everything", tmp_path, Path(sys.executable))
    assert (done.returncode, done.stderr.split(":")[0]) == (2, "no step everything")


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    arguments = [sys.executable, str(FOLDER / "rows.py"), "card", "cpu", "no_such_package"]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 4
    assert "has no no_such_package; carry wheels" in done.stdout


@pytest.mark.parametrize(("ends", "outcome"), [("sleep 60", "stopped"), ("exit 7", "failed (7)")])
def test_a_part_that_hangs_or_fails_leaves_the_figures_of_the_others(
    ends: str, outcome: str, tmp_path: Path
) -> None:
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(STUB.format(ends))
    python.chmod(0o755)
    (out / "large").mkdir(parents=True)
    (out / "large" / "config.json").touch()
    done = run_step("cost", out, python, LIMIT="3")
    assert done.returncode == 1, done.stderr
    figures = (out / "gpu-cost.md").read_text().splitlines()
    assert figures[0] == "# Step cost: NVIDIA Test 80GB, torch 2.11.0"
    cells = [line.split(" | ")[:2] for line in figures if line.startswith("| batch")]
    assert [outcome for _, outcome in cells] == ["done", outcome]
    assert figures[-1] == "| two hooks | 0.99 |"


def test_wheels_in_pieces_are_unpacked_once(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    whole = wheels / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(whole, "w") as wheel:
        wheel.writestr("thing.py", "x = 1\n")
        wheel.writestr("thing-1.0.dist-info/METADATA", "Name: thing\n")
    data = whole.read_bytes()
    whole.unlink()
    pieces = [Path(f"{whole}.{number:02}") for number in range(3)]
    arguments = [sys.executable, str(FOLDER / "rows.py"), "unpack", "wheels", "site"]
    for lacking in range(3):
        for number, piece in enumerate(pieces):
            piece.write_bytes(data[100 * number : 100 * (number + 1) if number < 2 else None])
        pieces[lacking].unlink()
        left_out = subprocess.run(
            arguments, cwd=tmp_path, check=True, capture_output=True, text=True
        )
        assert left_out.stdout == "thing-1.0 lacks a piece: 2 are here, and it is left out\n"
    pieces[2].write_bytes(data[200:])
    subprocess.run(arguments, cwd=tmp_path, check=True)
    site = tmp_path / "site"
    assert (site / "thing.py").read_text() == "x = 1\n"
    (site / "thing.py").write_text("x = 2\n")
    subprocess.run(arguments, cwd=tmp_path, check=True)
    assert (site / "thing.py").read_text() == "x = 2\n"
    (wheels / "other-1.0-cp39-cp39-manylinux_2_28_x86_64.whl").touch()
    other = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert other.stderr.startswith("wheels is of another Python than cp3")


def test_commands_are_found_where_nothing_is_installed(tmp_path: Path) -> None:
    unpack = [sys.executable, str(FOLDER / "rows.py"), "unpack", "none", "site"]
    subprocess.run(unpack, cwd=tmp_path, check=True)
    names = (
        "from importlib.metadata import distributions; import sys; "
        "[site] = distributions(name='actds', path=['site']); "
        "print(*sorted(f'{entry.group} {entry.name}' for entry in site.entry_points))"
    )
    done = subprocess.run(
        [sys.executable, "-c", names], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    for entry in ("actds.commands write", "actds.commands validate", "actds.engines vllm",
                  "vllm.general_plugins actds", "zarr.data_type bfloat16"):  # fmt: skip
        assert entry in done.stdout
