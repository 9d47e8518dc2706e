"""Attacks on the format: each is refused with its code, in little time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from actds_testing.attacks import Attack, attacks, judge, refused, unpack
from actds_testing.places import ATTACKS

ALL = attacks()
MAX_PEAK_NBYTES = 256 << 20
"""Of a dataset of some kilobytes: a decoded chunk may have 64 MiB, and is looked at in copies."""


@pytest.mark.standard
@pytest.mark.parametrize("attack", ALL, ids=lambda attack: attack.name)
def test_an_attack_is_refused_with_its_code(attack: Attack, tmp_path: Path) -> None:
    outcome = judge(unpack(attack, tmp_path / "dataset"), attack.level)
    assert list(refused(attack, outcome)) == []
    assert outcome.peak_nbytes < MAX_PEAK_NBYTES


def test_the_readme_lists_every_attack() -> None:
    page = (ATTACKS / "README.md").read_text("utf-8")
    assert [one.name for one in ALL if f"`{one.name}`" not in page] == []
