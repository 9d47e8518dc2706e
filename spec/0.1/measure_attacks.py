"""Run every attack and write ``attacks/README.md``: which code refused it, in what time and memory.

python spec/0.1/measure_attacks.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from actds_testing.attacks import Attack, Outcome, attacks, judge, refused, unpack
from actds_testing.places import ATTACKS

HEAD = """# Attacks on 0.1

Small datasets of somebody who may write every byte of them, and every digest again. A Validator
MUST refuse each, at the level that is named or a higher one, with the code that is named; none may
end it in any other way, or cost memory or time out of proportion to its files.

To build one: copy the folder `base` of its `expect.json` (it lies in `../vectors`), remove the
files that `remove` lists, copy the tree `files` over it, make the empty `folders`, then the
`links`. The other keys are those of the [vectors](../vectors/README.md), and `group` is the class
that an attack belongs to.

`semantic` ones are lies that every digest agrees with; `hostile` ones are made for a parser. What
no Validator can refuse is in [section 13](../13-security.md). `python spec/0.1/make_attacks.py`
writes them all again, and `python spec/0.1/measure_attacks.py` runs them and writes this page. Time
is that of the processor, memory the peak above what the imports of Python hold, both of `actds
validate` and of nothing else.
"""


def page(outcomes: list[tuple[Attack, Outcome]]) -> str:
    """Return the page: a table of every attack."""
    lines = [HEAD, f"{len(outcomes)} attacks:\n"]
    lines += ["| class | attack | what it does | code | level | ms | MiB |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for one, outcome in sorted(
        outcomes, key=lambda pair: (pair[0].folder.parent.name, pair[0].group)
    ):
        lines.append(
            f"| {one.group} | `{one.name}` | {one.what} | {one.code} | {one.level} "
            f"| {outcome.duration_s * 1e3:.0f} | {outcome.peak_nbytes / 2**20:.0f} |"
        )
    return "\n".join([*lines, ""])


def main() -> int:
    """Run them all; return 1 when one was not refused."""
    outcomes, wrong = [], list[str]()
    for one in attacks():
        with tempfile.TemporaryDirectory() as temporary:
            outcome = judge(unpack(one, Path(temporary) / "dataset"), one.level)
        wrong += refused(one, outcome)
        outcomes.append((one, outcome))
    (ATTACKS / "README.md").write_text(page(outcomes), encoding="utf-8")
    print("\n".join(wrong) or f"{len(outcomes)} attacks, each refused", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
