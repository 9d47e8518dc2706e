"""The steps of the first hour on a GPU start, end in time, and leave what they have measured."""

from __future__ import annotations

import os
import struct
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
            "CARRY": str(out / "none"),
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


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """Return device code as a compiler embeds it, of (kind, architecture, code)."""
    body = b""
    for kind, arch, code in entries:
        body += struct.pack("<HHIQ", kind, 0, 64, len(code)).ljust(28) + struct.pack("<I", arch)
        body = body.ljust(len(body) + 32, b"h") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_wheels_are_packed_for_one_card_and_unpacked_once(tmp_path: Path) -> None:
    ptx, elf, filler = 1, 2, b"host code"
    several = fat_binary((elf, 80, b"A" * 8), (elf, 90, b"B" * 16), (ptx, 80, b"C" * 8))
    only_ptx = fat_binary((elf, 80, b"D" * 8), (ptx, 80, b"E" * 8))
    files = {
        "thing.py": b"x = 1\n",
        "thing-1.0.dist-info/METADATA": b"Name: thing\n",
        "thing/_C.abi3.so": filler + several + filler + only_ptx,
        "thing/_C.cpython-310-x86_64-linux-gnu.so": b"of another Python",
        "thing/plain.so": filler,
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": several,
    }
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "thing-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    with zipfile.ZipFile(wheels / "numpy-2.0-cp312-cp312-manylinux_x86_64.whl", "w") as wheel:
        wheel.writestr("numpy.py", "")  # the image has one
    script = [sys.executable, str(FOLDER / "packages.py")]
    packed = [*script, "pack", "wheels", "carry"]
    subprocess.run(packed, cwd=tmp_path, check=True, capture_output=True)
    unpack = [*script, "unpack", "carry", "site"]
    subprocess.run(unpack, cwd=tmp_path, check=True)
    site = tmp_path / "site"
    there = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert {name for name in there if name.startswith(("thing", "vllm", "numpy"))} == {
        "thing.py", "thing-1.0.dist-info/METADATA", "thing/_C.abi3.so", "thing/plain.so",
    }  # fmt: skip
    left = several.replace(b"A" * 8, bytes(8)).replace(b"C" * 8, bytes(8))
    left = filler + left + filler + only_ptx.replace(b"D" * 8, bytes(8))
    assert (site / "thing/_C.abi3.so").read_bytes() == left
    (site / "thing.py").write_text("x = 2\n")
    subprocess.run(unpack, cwd=tmp_path, check=True)
    assert (site / "thing.py").read_text() == "x = 2\n"


def test_commands_are_found_where_nothing_is_installed(tmp_path: Path) -> None:
    unpack = [sys.executable, str(FOLDER / "packages.py"), "unpack", "none", "site"]
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
