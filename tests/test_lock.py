"""The lock of the development environment fits pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = (ROOT / "requirements-dev.lock").read_text(encoding="utf-8")
EXTRAS = ("cpu", "dev", "hf")


def pins() -> dict[str, str]:
    lines = [line for line in LOCK.splitlines() if line and not line.lstrip().startswith("#")]
    return {canonicalize_name(name): pin for name, pin in (line.split("==") for line in lines)}


def test_every_requirement_has_a_pin_that_satisfies_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    locked = pins()
    stale = []
    for requirement in map(Requirement, lines):
        pin = locked.get(canonicalize_name(requirement.name))
        if pin is None or pin not in requirement.specifier:
            stale.append(f"{requirement}, locked {pin}")
    assert not stale, "run: make lock"


def test_the_lock_names_versions_and_no_place() -> None:
    # Where packages come from is the business of each machine: an index, a mirror, a folder.
    assert "://" not in LOCK and "--" not in LOCK and "+" not in LOCK
    assert len(pins()) > 100
