"""Inclusion by hash: the number in [0, 1) of each row, that writer, validator and reader compute.

Whoever is below a probability is included: so a sample of 1 % lies within one of 2 % of the same
salt, and the probability of every row is known before the row is.
"""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import numpy.typing as npt

from actds.format.positions import position_key
from actds.format.schema import RunRecord

Keys = npt.NDArray[np.uint64]
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


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


def mixed(x: Keys) -> Keys:
    """Return a number that looks random for each number (SplitMix64), in place."""
    with np.errstate(over="ignore"):  # of a single number NumPy warns
        x += _INCREMENT
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            x ^= x >> np.uint64(shift)
            x *= np.uint64(factor)
    return x
