"""Attacks: datasets of somebody who can write every byte of them, and every digest again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vector_tools import Vector

__all__ = ["ATTACKS", "Attack", "Family", "Tree", "attack", "tree_of"]

Family = Literal["semantic", "hostile"]
"""``semantic``: a lie that every digest agrees with. ``hostile``: a file made for its parser."""


@dataclass(frozen=True)
class Attack:
    """One attack on a valid dataset, and how it has to end.

    Args:
        family: what it is aimed at.
        group: class of the attack, one word or two: ``unhashed``, ``parquet page``.
        name: name of its folder below ``attacks/<family>/``.
        what: what the attacker did and hopes for, one sentence.
        make: changes a copy of the valid dataset.
        code: the code that MUST refuse it.
        place: how the place of that finding begins.
        level: the lowest level of ``actds validate`` that refuses it.
        also: further codes that may be found.
        base: the valid vector that is attacked.
        severity: of that finding; a warning fails ``actds validate --strict``.
    """

    family: Family
    group: str
    name: str
    what: str
    make: Callable[[Vector], Any]
    code: str
    place: str
    level: str = "full"
    also: tuple[str, ...] = ()
    base: str = "minimal"
    severity: str = "error"


ATTACKS: list[Attack] = []


def attack(
    family: Family, group: str, name: str, what: str, *, code: str, place: str, **more: Any
) -> Callable[[Callable[[Vector], Any]], Callable[[Vector], Any]]:
    """Register the function that makes an attack; arguments as of ``Attack``."""

    def register(make: Callable[[Vector], Any]) -> Callable[[Vector], Any]:
        ATTACKS.append(Attack(family, group, name, what, make, code, place, **more))
        return make

    return register


@dataclass(frozen=True)
class Tree:
    """What stands in a folder, links not followed.

    Args:
        files: bytes by path.
        links: target by path.
        folders: paths of empty folders.
    """

    files: dict[str, bytes]
    links: dict[str, str]
    folders: set[str]


def tree_of(root: Path) -> Tree:
    """Return what stands below a folder."""
    found = Tree({}, {}, set())
    for where, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(where, name)
            relative = path.relative_to(root).as_posix()
            if path.is_symlink():
                found.links[relative] = os.readlink(path)
            elif path.is_file():
                found.files[relative] = path.read_bytes()
            elif not any(path.iterdir()):
                found.folders.add(relative)
    return found
