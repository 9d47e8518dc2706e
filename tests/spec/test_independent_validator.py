"""A validator made from the text alone and that of the package say the same of every dataset.

Where they differ, the text is open or one of the two is wrong. ``OPEN`` has what is known.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from actds.errors import ActdsError
from actds_testing import independent, synthetic
from actds_testing.independent import Finding
from actds_testing.mutations import mutate
from actds_testing.places import VECTORS
from actds_testing.reframing import FAULTS, reframe
from actds_testing.settling import settle
from actds_testing.synthetic import make_dataset
from actds_validators.validate.validation import validate

OPEN: dict[str, str] = {}
"""Findings of the text that the package's validator may lack, by what they say.

Take a line out when the package has the rule: then a difference in it fails these tests again.
"""
ATTACKS = sorted(
    path.parent for path in (VECTORS.parent / "attacks/semantic").glob("*/expect.json")
)
ELSEWHERE = ("E110", "E8")  # what a card says is the program's own; trust is section 15
N_FAST, N_FULL, BATCH = 32, 1200, 100


def said(findings: Iterable[Finding]) -> list[str]:
    return [str(finding) for finding in findings if finding.severity == "error"]


def codes(lines: Iterable[str]) -> set[str]:
    return {line[:4] for line in lines}


def package(path: Path, level: str = "deep") -> list[str]:
    """Return the errors of the package's validator, one line each."""
    try:
        found = validate(path, level).errors  # type: ignore[arg-type]
    except ActdsError as error:
        return [str(error)]
    return [finding.line() for finding in found]


def is_valid(lines: Iterable[str]) -> bool:
    return not {code for code in codes(lines) if "E101" <= code < "E500"}


def is_open(lines: list[str]) -> bool:
    """Return whether some finding is one that the package is known to lack."""
    return any(re.search(pattern, line) for pattern in OPEN for line in lines)


def difference(path: Path) -> str | None:
    """Return how the validators differ about a dataset, None when they agree."""
    return compare(said(independent.validate(path, deep=True)), path)


def compare(mine: list[str], path: Path) -> str | None:
    try:
        theirs = package(path)
    except Exception as error:  # an internal error is a finding, too
        return None if is_open(mine) else f"{error!r} of the package; here {mine[:2]}"
    if is_valid(mine) != is_valid(theirs):
        return None if is_open(mine) else f"here {mine[:2]}; the package {theirs[:2]}"
    if not codes(mine) & codes(theirs) and (mine or theirs):
        return None if is_open(mine) else f"here {mine[:2]}; the package {theirs[:2]}"
    return None


# ---- vectors


def unpack(vector: Path, out: Path) -> Path:
    """Build the dataset of a vector or an attack, as their pages say."""
    expect = json.loads((vector / "expect.json").read_text())
    shutil.copytree(VECTORS / expect["base"], out)
    for path in expect["remove"]:
        (out / path).unlink()
    if (vector / "files").is_dir():  # one that only removes files has none
        shutil.copytree(vector / "files", out, dirs_exist_ok=True)
    for path in expect.get("folders", []):
        (out / path).mkdir(parents=True, exist_ok=True)
    for path, target in expect.get("links", {}).items():
        if (out / path).is_dir():
            shutil.rmtree(out / path)
        (out / path).unlink(missing_ok=True)
        (out / path).symlink_to(target)
    return out


@pytest.mark.parametrize("name", sorted(path.name for path in (VECTORS / "valid").iterdir()))
def test_accepts_valid_vectors(name: str) -> None:
    assert independent.validate(VECTORS / "valid" / name, deep=True) == []


@pytest.mark.parametrize("value", [0, 1, "true"])
def test_only_a_boolean_says_whether_entropies_are_recorded(
    value: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(synthetic._OBSERVED, "capture.entropy", value)  # noqa: SLF001
    path = make_dataset(tmp_path / "acts", n_requests=3)
    assert difference(path) is None and codes(package(path)) == {"E103"}


# To make the card again a Validator needs the words of the program that made it: a SHOULD (2.4).
JUDGED = {path.name for path in (VECTORS / "invalid").iterdir()} - {"E110-card-edited"}


@pytest.mark.parametrize("name", sorted(JUDGED))
def test_refuses_invalid_vectors_with_the_code_at_the_place(name: str, tmp_path: Path) -> None:
    vector = VECTORS / "invalid" / name
    expect = json.loads((vector / "expect.json").read_text())
    if expect["code"].startswith(ELSEWHERE):
        return
    path = unpack(vector, tmp_path / "dataset")
    found = independent.validate(path, deep=expect["level"] == "deep")
    assert {finding.code for finding in found} - {*expect["also"]} == {expect["code"]}
    mine = [finding for finding in found if finding.code == expect["code"]]
    assert any(finding.place.startswith(expect["place"]) for finding in mine), found
    assert {finding.severity for finding in mine} == {expect["severity"]}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_refuses_attacks_that_every_digest_agrees_with(attack: Path, tmp_path: Path) -> None:
    expect = json.loads((attack / "expect.json").read_text())
    if expect["code"].startswith(ELSEWHERE):
        return
    path = unpack(attack, tmp_path / "dataset")
    found = independent.validate(path, deep=expect["level"] == "deep")
    assert {f.code for f in found} - {*expect["also"]} == {expect["code"]}, found


# ---- mutations


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the valid vectors and two larger datasets, one of two runs."""
    folder = tmp_path_factory.mktemp("bases")
    make_dataset(folder / "two", n_requests=8, drops=True, filtered=True, roles=True)
    make_dataset(folder / "two", n_requests=4, seed=7, run="r-second", order="sequence")
    make_dataset(folder / "wide", n_requests=6, d_model=48, dtype="float32", rows_per_shard=400)
    return [*sorted((VECTORS / "valid").iterdir()), folder / "two", folder / "wide"]


def judge(seeds: Iterable[int], bases: list[Path], tmp_path: Path) -> Counter[str]:
    """Compare the validators over mutations; return how many datasets were of which kind."""
    differ, kinds = [], Counter[str]()
    for seed in seeds:
        rng = random.Random(seed)
        path = shutil.copytree(rng.choice(bases), tmp_path / str(seed))
        done = mutate(path, rng)
        mine = said(independent.validate(path, deep=True))
        found = compare(mine, path)
        if found:
            differ.append(f"seed {seed}: {done}: {found}")
        kinds["valid" if is_valid(mine) else "invalid"] += 1
        shutil.rmtree(path)
    assert not differ, "\n".join(differ)
    return kinds


def test_validators_agree_on_mutations(bases: list[Path], tmp_path: Path) -> None:
    kinds = judge(range(N_FAST), bases, tmp_path)
    assert min(kinds["valid"], kinds["invalid"]) > N_FAST // 16, "all of one kind prove little"


@pytest.mark.attack
@pytest.mark.parametrize("first", range(N_FAST, N_FAST + N_FULL, BATCH))
def test_validators_agree_on_many_mutations(first: int, bases: list[Path], tmp_path: Path) -> None:
    judge(range(first, first + BATCH), bases, tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_validators_agree_on_frames(seed: int, bases: list[Path], tmp_path: Path) -> None:
    """Any encoder's frames have the same rows; of each fault both say that it is one."""
    rng, seen = random.Random(seed), set[str]()
    for n in range(8):
        path = shutil.copytree(bases[-1 if n % 2 else 0], tmp_path / str(n))
        done = reframe(path, rng)
        settle(path, totals=False)
        assert difference(path) is None, done
        seen.add(done)
    assert any("no fault" in done for done in seen) and any(
        fault in done for done in seen for fault in FAULTS
    )


def test_a_difference_is_seen(
    bases: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(independent.conservation.Account, "_judge_drops", lambda self: None)
    path = unpack(VECTORS / "invalid/E408-drop-moved", tmp_path / "dataset")
    assert difference(path) is not None
