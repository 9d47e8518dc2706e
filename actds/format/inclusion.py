"""Inclusion by hash: the number in [0, 1) of each row, that writer, validator and reader compute.

Whoever is below a probability is included: so a sample of 1 % lies within one of 2 % of the same
salt, and the probability of every row is known before the row is.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format import canonical
from actds.format.positions import position_key
from actds.format.schema import RunRecord
from actds.format.shard import Shard
from actds.format.tables import INCLUSION

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Unit = Literal["row", "request"]
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Design:
    """How the rows of a run are drawn: each with a known probability, its *inclusion*.

    Args:
        salt: of the numbers that are compared with the inclusion.
        minimum: lowest inclusion, in (0, 1].
        unit: ``row``, whose inclusion is that of its step, or ``request``, which is stored whole or
            not at all, with the inclusion of the step in which it was first computed.

    Spec: 0.1 section 7.10.
    """

    salt: np.uint64
    minimum: float
    unit: Unit = "row"

    def numbers(self, request: npt.ArrayLike, position: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the number of each position, float64 ``(n,)``: it is drawn if below inclusion."""
        return uniform(self.salt, request, 0 if self.unit == "request" else position)

    def as_field(self) -> str:
        """Return the value of ``capture.inclusion`` in the run record."""
        fields = {"minimum": repr(self.minimum), "salt": f"{int(self.salt):016x}"}
        return canonical.dump({**fields, "unit": self.unit}).decode("ascii").rstrip("\n")

    @classmethod
    def of(cls, record: RunRecord | None) -> Design | None:
        """Return the design in a run record, ``None`` for a run that stores every row.

        Raises:
            ActdsError: E102 or E103 when the text is no value of the spec.
        """
        field = None if record is None else record.fields.get(INCLUSION)
        if record is None or field is None or field.value is None:
            return None
        place, text = f"runs/{record.run}.json {INCLUSION}", str(field.value)
        fields = canonical.parse(f"{text}\n".encode(), place)
        if isinstance(fields, dict) and fields.keys() == {"minimum", "salt", "unit"}:
            minimum, salt, unit = (fields[name] for name in ("minimum", "salt", "unit"))
            if (
                isinstance(minimum, str)
                and _DECIMAL.fullmatch(minimum)
                and 0 < float(minimum) <= 1
                and isinstance(salt, str)
                and _SALT.fullmatch(salt)
                and unit in get_args(Unit)
            ):
                return cls(np.uint64(int(salt, 16)), float(minimum), unit)
        raise ActdsError("E103", place, got=text[:200], expected="the spec's fields")


_DECIMAL, _SALT = re.compile(r"[0-9.e-]{1,32}"), re.compile(r"[0-9a-f]{16}")


@cache
def salt_of(*words: str | int) -> np.uint64:
    """Return the first 64 bits of the SHA-256 of words joined by newlines, big-endian.

    Spec: 0.1 section 9.11.
    """
    digest = hashlib.sha256("\n".join(map(str, words)).encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "big"))


def uniform(
    salt: np.uint64, request: npt.ArrayLike, position: npt.ArrayLike = 0
) -> npt.NDArray[np.float64]:
    """Return the number of each row, float64 ``(n,)`` in [0, 1); of a request that of position 0.

    Args:
        salt: of the choice: another salt gives independent numbers.
        request: request of each row, below 2^32.
        position: its position, below 2^32.

    Spec: 0.1 section 9.11.
    """
    key = mixed(position_key(request, position)) ^ salt
    return (mixed(key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def is_drawn(
    seed: int, dataset: str, run: str, request: npt.ArrayLike, fraction: float
) -> npt.NDArray[np.bool_]:
    """Return which requests a replay draws of a run of its source, ``(n,)``.

    Args:
        seed: of the draw.
        dataset: id of the source.
        fraction: probability of each request.

    Spec: 0.1 section 9.11.
    """
    return uniform(salt_of("actds replay", seed, dataset, run), request) < fraction


def inclusion_of(record: RunRecord | None) -> float:
    """Return the probability with which a row of a run was drawn: 1 but in a replay of a part.

    Spec: 0.1 section 9.11.
    """
    field = None if record is None else record.fields.get("replay.fraction")
    return 1.0 if field is None or field.value is None else float(str(field.value))


def draws_rows(record: RunRecord | None) -> bool:
    """Return whether a run drew its rows, so that each says its probability."""
    field = None if record is None else record.fields.get(INCLUSION)
    return field is not None and field.value is not None


def is_drawn_from(record: RunRecord | None) -> bool:
    """Return whether rows of a run may be there with a probability below 1."""
    return draws_rows(record) or inclusion_of(record) < 1


def inclusion_of_rows(shard: Shard, record: RunRecord | None) -> Floats:
    """Return the probability that each row of a shard is there with, float64 ``(n_rows,)``.

    It is that of the row in its run, 1 where that stores every row, times that of its request in a
    replay of a part.

    Args:
        shard: the shard.
        record: of its run.

    Raises:
        ActdsError: E424 a probability that is none; and as ``Shard.tokens``.

    Spec: 0.1 section 7.10.
    """
    fraction = inclusion_of(record)
    if not draws_rows(record):
        return np.full(shard.n_rows, fraction)
    column = shard.tokens(["inclusion"])["inclusion"]
    inclusion = np.array(column.fill_null(1.0).to_numpy(), np.float64)
    wrong = ~((inclusion > 0) & (inclusion <= 1))
    if wrong.any():
        row = int(np.argmax(wrong))
        got = f"{float(inclusion[row])!r} in row {row}"
        place = f"shards/{shard.name}/tokens.parquet inclusion"
        raise ActdsError("E424", place, got=got, expected="above 0, up to 1")
    inclusion *= fraction
    return inclusion


@dataclass(frozen=True)
class Sample:
    """Rows that were drawn, each with a known probability, its inclusion.

    Args:
        n_rows: rows.
        n_represented: rows that they stand for: the sum of 1 over their inclusion.
        least: lowest inclusion.
        greatest: highest.
        effective_rows: of the weights 1 over inclusion.
    """

    n_rows: int
    n_represented: float
    least: float
    greatest: float
    effective_rows: float

    @classmethod
    def of(cls, inclusion: Floats) -> Sample | None:
        """Return what the inclusion of rows ``(n_rows,)`` comes to, ``None`` where all is 1."""
        if not (inclusion < 1).any():
            return None
        weights = 1 / inclusion
        least, greatest = float(inclusion.min()), float(inclusion.max())
        represented = float(weights.sum())
        return cls(len(inclusion), represented, least, greatest, effective_rows(weights))

    @property
    def is_unequal(self) -> bool:
        """Return whether rows had different probabilities: a plain mean over them is biased."""
        return self.least < self.greatest

    def __str__(self) -> str:
        share = f"{self.least:.3g}"
        share += f" to {self.greatest:.3g}" if self.is_unequal else ""
        return (
            f"{self.n_rows:,} rows drawn with probability {share}, which represent about "
            f"{self.n_represented:,.0f}: {self.effective_rows:,.0f} effective rows"
        )


def effective_rows(weights: npt.ArrayLike) -> float:
    """Return how many rows of equal weight estimate a mean as well; 0 without a row.

    Kish's ``(sum w)^2 / sum w^2`` (1965), for values that do not depend on the weights.
    """
    w = np.asarray(weights, np.float64)
    squares = float(w @ w)
    return float(w.sum()) ** 2 / squares if squares else 0.0


def mixed(x: Keys) -> Keys:
    """Return a number that looks random for each number (SplitMix64), in place."""
    with np.errstate(over="ignore"):  # of a single number NumPy warns
        x += _INCREMENT
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            x ^= x >> np.uint64(shift)
            x *= np.uint64(factor)
    return x
