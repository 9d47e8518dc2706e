"""Write the attacks on spec 0.1: small datasets, each of which a Validator has to refuse.

    python spec/0.1/make_attacks.py [FOLDER]

Every attack is a valid vector with one thing changed by somebody who may write every byte of it and
every digest again, kept as the files that differ; ``expect.json`` says how it has to end. The
attacks of a family are functions in the module of its name.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

from attack_tools import ATTACKS, Attack, tree_of
from vector_tools import Vector

from actds_testing.places import ATTACKS as FOLDER
from actds_testing.places import VECTORS

MODULES = {"semantic": "attacks_semantic", "hostile": "attacks_hostile"}


def write(root: Path) -> None:
    """Write every attack below a folder that is made anew."""
    for family, module in MODULES.items():
        shutil.rmtree(root / family, ignore_errors=True)
        importlib.import_module(module)
    for one in ATTACKS:
        with tempfile.TemporaryDirectory() as temporary:
            dataset = Path(temporary) / "dataset"
            shutil.copytree(VECTORS / "valid" / one.base, dataset)
            one.make(Vector(dataset))
            _write_overlay(one, dataset, root / one.family / one.name)


def _write_overlay(one: Attack, changed: Path, out: Path) -> None:
    """Write what differs from the valid dataset, and what is expected of a Validator."""
    before, after = tree_of(VECTORS / "valid" / one.base), tree_of(changed)
    out.mkdir(parents=True)
    for path, data in sorted(after.files.items()):
        if before.files.get(path) != data:
            (out / "files" / path).parent.mkdir(parents=True, exist_ok=True)
            (out / "files" / path).write_bytes(data)
    expect = {
        "base": f"valid/{one.base}",
        "remove": sorted(set(before.files) - set(after.files)),
        "links": dict(sorted(after.links.items())),
        "folders": sorted(after.folders - before.folders),
        "group": one.group,
        "what": one.what,
        "code": one.code,
        "place": one.place,
        "level": one.level,
        "also": list(one.also),
        "severity": one.severity,
    }
    text = json.dumps(expect, indent=2) + "\n"
    (out / "expect.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
