"""Rows of a set made elsewhere: sequences of them, their labels, and the blocks they are read in.

It runs in the process of ``actds.exchange.apart``, between the forms of sets and what they are
imported as.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from actds.exchange.tensors import foreign
from actds.format.arrays import DTYPES

Array = npt.NDArray[Any]
BLOCK_ROWS, BLOCK_NBYTES = 4096, 1 << 26
"""Rows of a sequence that are read at a time, and their bytes, unless one row has more."""
NEVER_SAID = ("attempt", "chunk", "flags", "phase", "step")
"""Columns of the token table that no such set has."""
LABELS = {
    "token_id": ("token_ids", "input_ids", "token_id", "tokens"),
    "position": ("positions", "position_ids", "position"),
}
"""Names under which arrays that label rows are known, by what they label."""
_TLENS = re.compile(
    r"blocks\.(\d+)\.(?:hook_(resid_pre|resid_mid|resid_post|attn_out|mlp_out)"
    r"|attn\.hook_([qkvz]))"
)
"""Names of TransformerLens: what stands there is what the format means by the same kind."""


@dataclass(frozen=True)
class ForeignHook:
    """The rows of one place in the model.

    Args:
        called: what the set calls it; empty where it gives no name.
        d_model: channels of a row.
        dtype: type of the values as they are imported.
    """

    called: str
    d_model: int
    dtype: str


@dataclass(frozen=True)
class Block:
    """Rows of one sequence.

    Args:
        sequence: number of the sequence, from 0.
        position: positions of the rows, ``(n,)``.
        token_ids: their tokens, ``(n,)``; None where the set has none.
        bits: bit patterns of the rows of each hook, ``(n, d_model)``.
    """

    sequence: int
    position: Array
    token_ids: Array | None
    bits: list[Array]


@dataclass(frozen=True)
class ForeignSet:
    """A set that was opened.

    Args:
        kind: one of ``KINDS``.
        files: its files, in the order of their rows.
        hooks: its hooks.
        unknown: columns of the token table of which it says nothing.
        n_rows: rows of a hook.
        blocks: reads its rows.
        left_out: what else is there, which is not imported.
    """

    kind: str
    files: list[Path]
    hooks: list[ForeignHook]
    unknown: tuple[str, ...]
    n_rows: int
    blocks: Callable[[], Iterator[Block]]
    left_out: tuple[str, ...] = field(default=())


def own_name(hook: ForeignHook) -> str:
    """Return the name of a hook for what the set calls it."""
    match = _TLENS.fullmatch(hook.called)
    return f"{match[2] or match[3]}.{int(match[1])}" if match else hook.called


@dataclass(frozen=True)
class SequenceRows:
    """One sequence of rows of a file, not yet read: ``(n, d_model)`` of each hook.

    Args:
        rows: values of each hook, or what reads them.
        dtypes: types of the values.
        token_ids: tokens, if any.
        position: positions, if any.
        first: position of the first row where nobody says it.
    """

    rows: list[Array]
    dtypes: list[str]
    token_ids: Array | None
    position: Array | None
    first: int = 0


def check_labels(file: Path, one: SequenceRows) -> None:
    """Refuse labels that are no numbers of 32 bits, or not one per row."""
    n = len(one.rows[0])
    for name, values in (("token_ids", one.token_ids), ("positions", one.position)):
        if values is None:
            continue
        if values.shape != (n,) or values.dtype.kind not in "iu":
            got = f"{name} of {values.dtype} {values.shape}"
            raise foreign(file, got, f"integers ({n},), one per row")
        if n and not (int(values.min()) >= 0 and int(values.max()) < 2**32):
            raise foreign(file, f"{name} to {values.max()}", "numbers from 0 below 2^32")
    if one.position is not None and (np.diff(one.position.astype(np.int64)) <= 0).any():
        raise foreign(file, "positions that do not ascend", "each position once")


def cut_rows(
    file: Path, number: int, one: SequenceRows, dtypes: list[str], tokens: bool
) -> Iterator[Block]:
    """Yield the rows of a sequence in blocks, in the types that they are imported in."""
    row_nbytes = sum(rows.shape[1] * rows.itemsize for rows in one.rows)
    step = max(1, min(BLOCK_ROWS, BLOCK_NBYTES // max(row_nbytes, 1)))
    for start in range(0, len(one.rows[0]), step):
        stop = min(start + step, len(one.rows[0]))
        given = one.position
        where = one.first + np.arange(start, stop) if given is None else given[start:stop]
        ids = one.token_ids[start:stop] if tokens and one.token_ids is not None else None
        bits = [
            _bits(file, rows[start:stop], dtype, stored)
            for rows, dtype, stored in zip(one.rows, one.dtypes, dtypes, strict=True)
        ]
        yield Block(number, where, ids, bits)


def _bits(file: Path, values: Array, dtype: str, stored: str) -> Array:
    """Return rows as the bit patterns of a type, rounded where it is not their own.

    Raises:
        ActdsError: E019 a finite value that the type cannot hold.
    """
    if dtype == stored:
        bits: Array = np.ascontiguousarray(values).view(DTYPES[stored].bits)
        return bits
    with np.errstate(over="ignore"):
        narrow = values.astype(DTYPES[stored].native)
    lost = np.isfinite(values) & ~np.isfinite(narrow.astype(np.float32))
    if lost.any():
        got = f"{int(lost.sum()):,} values as {values[lost][0]:g}, which {stored} cannot hold"
        raise foreign(file, got, "a wider type: dtype=")
    cast: Array = narrow.view(DTYPES[stored].bits)
    return cast


def stored_type(place: object, dtype: str, wanted: str | None) -> str:
    """Return the type in which values are imported: their own, or for float64 what is wanted."""
    if dtype in DTYPES:
        return dtype
    if dtype == "float64" and wanted in DTYPES:
        return wanted
    expected = f"one of {', '.join(DTYPES)}, unrounded"
    more = ', or dtype="float32", which rounds' if dtype == "float64" else ""
    raise foreign(place, f"values of {dtype}", expected + more)
