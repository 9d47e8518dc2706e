"""What hurts a reader: any bit changed, any file cut, megabytes of it, what a fuzzer finds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds.store import layout
from actds_testing import fuzz
from actds_testing.attacks import judge
from actds_testing.places import SPEC, VECTORS
from actds_validators.validate.validation import validate

sys.path.insert(0, str(SPEC / "0.1"))
import attacks_hostile

MAX_CPU_S, MAX_NBYTES = 10, 512 << 20
BASES = ("minimal", "readouts")
LICENCES = {
    layout.CARD: re.compile(rb"^license: (.*)$", re.MULTILINE),
    layout.CROISSANT: re.compile(rb'"license": ?"(.*?)"'),
}


SEALED_NS = re.compile(rb'"sealed_ns":([0-9]+)')


def caught(root: Path, what: str, *, warned: bool = False) -> None:
    """The dataset is refused at level full, with codes that somebody foresaw.

    Card and list are no data: of a changed one there is a warning. So there is (``warned``) of the
    time of a seal, which card and list contradict, for they name another digest.
    """
    found = validate(root, "full")
    assert found.exit_code(strict=warned or what.startswith(layout.BESIDE)) != 0, what
    assert all(one.code != "E901" for one in found.findings), (what, found.errors)
    with suppress(ActdsError):
        actds.open(root)


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def _flips(root: Path, n: int, seed: int) -> Iterator[tuple[Path, int, int]]:
    """Yield file, byte and bit: as many of each file, spread over its length."""
    rng = np.random.default_rng(seed)
    files = _files(root)
    for k in range(n):
        path = files[k % len(files)]
        rounds, mine = -(-n // len(files)), k // len(files)
        low, high = (path.stat().st_size * (mine + i) // rounds for i in (0, 1))
        yield path, int(rng.integers(low, max(high, low + 1))), int(rng.integers(8))


def _is_licence(name: str, data: bytes, at: int) -> bool:
    """Return whether a byte is of the licence, which the owner may change (section 2.4)."""
    return name in LICENCES and _is_in(LICENCES[name], data, at)


def _is_in(pattern: re.Pattern[bytes], data: bytes, at: int) -> bool:
    found = pattern.search(data)
    return found is not None and found.start(1) <= at < found.end(1)


def _flip_all(tmp_path: Path, base: str, n: int, seed: int) -> None:
    root = Path(shutil.copytree(VECTORS / "valid" / base, tmp_path / "dataset"))
    for path, at, bit in _flips(root, n, seed):
        data = path.read_bytes()
        if _is_licence(path.name, data, at):
            continue
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        of_time = path.parent.name == "seal" and _is_in(SEALED_NS, data, at)
        caught(root, f"{path.relative_to(root)} byte {at} bit {bit}", warned=of_time)
        path.write_bytes(data)
    assert validate(root, "full").exit_code() == 0


@pytest.mark.parametrize("base", BASES)
def test_a_changed_bit_is_caught(tmp_path: Path, base: str) -> None:
    _flip_all(tmp_path, base, 40, seed=0)


@pytest.mark.standard
@pytest.mark.parametrize("base", BASES)
def test_hundreds_of_changed_bits_are_caught(tmp_path: Path, base: str) -> None:
    _flip_all(tmp_path, base, 150, seed=1)


@pytest.mark.attack
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_changed_bits_are_caught(tmp_path: Path, part: int) -> None:
    _flip_all(tmp_path, BASES[part % 2], 1000, seed=2 + part)


def _cut_all(tmp_path: Path, every: int) -> None:
    root = Path(shutil.copytree(VECTORS / "valid" / "minimal", tmp_path / "dataset"))
    for path in _files(root):
        data = path.read_bytes()
        step = every if len(data) < 1024 else 4096
        for size in sorted({*range(0, len(data), step), len(data) - 1}):
            if path.name in layout.BESIDE and data[:size] == data.rstrip():
                continue  # a card without its last line break says the same
            path.write_bytes(data[:size])
            caught(root, f"{path.relative_to(root)} cut at {size}")
        path.write_bytes(data)
    assert validate(root, "full").exit_code() == 0


def test_a_cut_file_is_caught(tmp_path: Path) -> None:
    _cut_all(tmp_path, every=512)


@pytest.mark.attack
def test_a_small_file_cut_at_any_byte_is_caught(tmp_path: Path) -> None:
    _cut_all(tmp_path, every=1)


@pytest.mark.standard
@pytest.mark.parametrize("name", attacks_hostile.LARGE)
def test_megabytes_of_it_cost_neither_time_nor_memory(tmp_path: Path, name: str) -> None:
    dataset = Path(shutil.copytree(VECTORS / "valid" / "minimal", tmp_path / "dataset"))
    try:
        code, level = attacks_hostile.make(name, dataset)
        outcome = judge(dataset, level)
    finally:
        subprocess.run(["rm", "-rf", dataset])  # Python's own cannot remove a thousand levels
    assert outcome.error is None and outcome.exit_code, outcome
    codes = {one[0] for one in outcome.findings}
    assert code in codes and "E901" not in codes, outcome.findings[:10]
    assert outcome.duration_s < MAX_CPU_S
    assert outcome.peak_nbytes < MAX_NBYTES


@pytest.mark.standard
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_a_fuzzer_finds_nothing_in_seconds(target: str) -> None:
    """A minute in all; ``make fuzz MINUTES=60`` is the real one."""
    pytest.importorskip("atheris", reason="atheris has builds for Linux and CPython alone")
    command = [sys.executable, "-m", "actds_testing.fuzz", target, "--seconds", "7"]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout[-4000:]
