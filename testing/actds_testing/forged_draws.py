"""Single rows that a draw does not imply, forged into every table alike: only the draw tells.

For tests and ``benchmarks/bench_thinning.py``.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

import numpy as np
import pyarrow as pa

from actds.dataset.account import Account, account
from actds.format.inclusion import Design, Unit
from actds_testing.schedules import Schedule, simulate, thinned

Kind = Literal["too many", "too few", "other probability", "other probability of a step", "salt"]
SALT = 0x5EED5EED5EED5EED
SHARES = (1.0, 0.5, 0.125)


class Draw:
    """A thinned run, and forgeries of it.

    Args:
        seed: of the schedule.
        unit: what is drawn.
    """

    def __init__(self, seed: int, unit: Unit) -> None:
        self.unit, self.whole = unit, simulate(12, seed=seed)
        steps = self.whole.steps["step"].to_pylist()
        self.shares = {step: SHARES[k % len(SHARES)] for k, step in enumerate(steps)}
        self.drawn = thinned(self.whole, SALT, self.shares, unit)

    def account(self, schedule: Schedule, salt: int = SALT) -> Account:
        tables = schedule.requests, schedule.steps, schedule.spans, schedule.drops
        design = Design(np.uint64(salt), min(SHARES), self.unit)
        return account("r", *tables, [schedule.rows], design)

    def _step(self, rng: np.random.Generator) -> int:
        """Return the place of a step whose probability is that of a stored row."""
        rows = self.drawn.rows.to_pylist()
        row = rows[int(rng.integers(len(rows)))]
        if self.unit == "request":
            computed = self.whole.rows.to_pylist()
            row = next(r for r in computed if r["request"] == row["request"])
        return int(self.drawn.steps["step"].to_pylist().index(row["step"]))

    def forged(self, kind: Kind, rng: np.random.Generator) -> Account:
        """Return the account of the run with one row, position, probability or the salt forged."""
        if kind == "salt":
            salt = SALT
            # Of a few requests another salt may draw the same ones: then nothing is forged.
            while thinned(self.whole, salt, self.shares, self.unit).rows == self.drawn.rows:
                salt = SALT ^ 1 << int(rng.integers(64))
            return self.account(self.drawn, salt)
        if kind.startswith("other probability"):
            name = "rows" if kind == "other probability" else "steps"
            table: pa.Table = getattr(self.drawn, name)
            at = table.schema.get_field_index("inclusion")
            shares = table["inclusion"].to_numpy().copy()
            place = rng.integers(len(shares)) if name == "rows" else self._step(rng)
            shares[place] *= rng.uniform(0.5, 0.999)
            column = pa.array(shares, pa.float64())
            changed = table.set_column(at, table.schema.field(at), column)
            return self.account(self.drawn.with_(**{name: changed}))
        keys = [set(zip(*(t[c].to_pylist() for c in ("request", "position")), strict=True))
                for t in (self.whole.rows, self.drawn.rows)]  # fmt: skip
        some = sorted(keys[0] - keys[1] if kind == "too many" else keys[1])
        key = some[int(rng.integers(len(some)))]
        return self.account(thinned(self.whole, SALT, self.shares, self.unit, flipped=key))


def detected(n: int, seed: int = 0) -> tuple[Counter[Kind], Counter[Kind]]:
    """Return how many forgeries of each kind were made, and how many the account notes as E424.

    Raises:
        AssertionError: the draw itself, before anything is forged, is noted.
    """
    rng = np.random.default_rng(seed)
    draws = [Draw(seed, unit) for seed in range(5) for unit in get_args(Unit)]
    for draw in draws:
        assert not draw.account(draw.drawn).findings
    made, noted = Counter[Kind](), Counter[Kind]()
    kinds = get_args(Kind)
    for k in range(n):
        kind = kinds[k % len(kinds)]
        made[kind] += 1
        findings = draws[k // len(kinds) % len(draws)].forged(kind, rng).findings
        noted[kind] += any(finding.code == "E424" for finding in findings)
    return made, noted
