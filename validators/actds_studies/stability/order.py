"""The order of rows: a function of what a row is and of a seed, never of a digest or a shard.

A row is known by its request, its position and, where a request has several rows there, by which
of them it is. So rows that two arms share come in the same order in both.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from actds.format.positions import Keys
from actds_validators.arrays import Ints

_POSITION, _COPY = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


def name_hash(*names: object) -> int:
    """Return a number of 64 bits for names."""
    text = "\0".join("" if name is None else f"={name}" for name in names)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def row_keys(request: Keys, position: Ints, copy: Ints) -> Keys:
    """Return a number for each row, alike in every dataset that has it ``(n,)``.

    Args:
        request: hash of each row's request ``(n,)``.
        position: position in the request ``(n,)``.
        copy: which of several rows there it is ``(n,)``.
    """
    return _mixed(
        request ^ _mixed(position.astype(np.uint64) * _POSITION + copy.astype(np.uint64) * _COPY)
    )


def copies(request: Keys, position: Ints, prefix: Keys) -> Ints:
    """Return for each row how many of its request and position come before it ``(n,)``.

    Args:
        request: hash of each row's request ``(n,)``.
        position: position in the request ``(n,)``.
        prefix: hash of the tokens up to it ``(n,)``, which orders those at one place.
    """
    order = np.lexsort((prefix, position, request))
    one, place = request[order], position[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (one[1:] != one[:-1]) | (place[1:] != place[:-1])
    starts = np.flatnonzero(first)
    found = np.empty(len(order), np.int64)
    found[order] = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
    return found


def epoch_order(keys: Keys, seed: int, epoch: int) -> Ints:
    """Return the order of rows in an epoch, a permutation ``(n,)``.

    Args:
        keys: the number of each row ``(n,)``.
        epoch: from 0.
    """
    salt = np.uint64(name_hash("order", seed, epoch))
    return np.argsort(_mixed(keys ^ salt), kind="stable").astype(np.int64)


def _mixed(x: npt.NDArray[np.uint64]) -> Keys:
    """Return a number that looks random for each number (the finalizer of SplitMix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)), np.uint64)
