"""Sets of activations made elsewhere: which of their arrays are rows, tokens and positions.

It runs in the process of ``actds.exchange.apart``. Opening a set reads the form of every file, so
that a truncated file or a width that differs is found before anything is written. Facts about the
forms: SAELens ``cache_activations_runner`` (6.54), the ``ExampleHiddenStatesConnector`` of vLLM
(0.32), ``train/data.py`` of speculators, ``ActivationCache`` of TransformerLens (2.16).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from actds.exchange.containers import READERS, Leaf, foreign, map_npy
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
    """The name KIND.LAYER of what TransformerLens names, else what the set calls it."""
    match = _TLENS.fullmatch(hook.called)
    return f"{match[2] or match[3]}.{int(match[1])}" if match else hook.called


@dataclass(frozen=True)
class SequenceRows:
    """One sequence of rows of a file, not yet read: ``(n, d_model)`` of each hook."""

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
    """The type in which values are imported: their own, or for float64 what is wanted."""
    if dtype in DTYPES:
        return dtype
    if dtype == "float64" and wanted in DTYPES:
        return wanted
    expected = f"one of {', '.join(DTYPES)}, unrounded"
    more = ', or dtype="float32", which rounds' if dtype == "float64" else ""
    raise foreign(place, f"values of {dtype}", expected + more)


@dataclass(frozen=True)
class _Held:
    """What one file holds.

    Args:
        names: of its hooks; empty strings where it gives none.
        sequences: of all hooks, in order.
        left_out: names of arrays that are not imported.
        ordered: whether its sequences are such, and not merely all rows of a file.
    """

    names: list[str]
    sequences: list[SequenceRows]
    left_out: set[str] = field(default_factory=set)
    ordered: bool = True


def _open_sequences(
    kind: str, files: list[Path], load: Callable[[Path], _Held], dtype: str | None
) -> ForeignSet:
    """Files that each hold one sequence or several."""
    forms: dict[tuple[tuple[str, int, str], ...], Path] = {}
    unknown, left_out, n_rows = set(NEVER_SAID), set(), 0
    for file in files:
        held = load(file)
        left_out |= held.left_out
        unknown |= set() if held.ordered or len(files) > 1 else {"request"}
        for one in held.sequences:
            form = tuple(
                (name, rows.shape[1], stored_type(file, one_type, dtype))
                for name, rows, one_type in zip(held.names, one.rows, one.dtypes, strict=True)
            )
            forms.setdefault(form, file)
            if len(forms) > 1:
                got, expected = (f"{_form(f)} in {p}" for f, p in reversed(forms.items()))
                raise foreign(file, got, expected)
            unknown |= {"token_id"} if one.token_ids is None else set()
            unknown |= {"position"} if one.position is None else set()
            check_labels(file, one)
            n_rows += len(one.rows[0])
    hooks = [ForeignHook(name, width, kept) for name, width, kept in next(iter(forms), ())]
    dtypes = [hook.dtype for hook in hooks]

    def blocks() -> Iterator[Block]:
        number = 0
        for file in files:
            for one in load(file).sequences:
                yield from cut_rows(file, number, one, dtypes, "token_id" not in unknown)
                number += 1

    if not hooks:
        raise foreign(files[0], "no row", "activations")
    columns, other = tuple(sorted(unknown)), tuple(sorted(left_out))
    return ForeignSet(kind, files, hooks, columns, n_rows, blocks, other)


def _form(form: Sequence[tuple[str, int, str]]) -> str:
    return ", ".join(f"{name} {dtype} rows of {width}".strip() for name, width, dtype in form)


# Tensors by name: what vLLM, speculators and people save.


def open_tensors(kind: str, path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """``.pt``, ``.npz`` and ``.safetensors`` files: what vLLM, speculators and people save."""

    def load(file: Path) -> _Held:
        node = READERS[kind](file)
        if isinstance(node, dict) and "hidden_states" in node:
            return _hidden_states(kind, file, node)
        if isinstance(node, dict):
            return _by_name(file, node)
        several = _all_leaves(node)
        if several and all(len(one.shape) == 3 for one in several):  # hidden states by layer
            return _by_name(file, {str(n): one for n, one in enumerate(several)})
        return _sequences_of(file, {"": node}, ordered=True)

    return _open_sequences(kind, files, load, dtype)


def _hidden_states(kind: str, file: Path, node: dict[str, Any]) -> _Held:
    """Rows of ``hidden_states (n, n_hooks, d_model)``, or of a list of hooks."""
    states, ids, position = node.pop("hidden_states"), _label(file, node, "token_id"), None
    if kind == "safetensors":
        position = _label(file, node, "position")
    if isinstance(states, Leaf):
        if len(states.shape) not in (2, 3):
            got = f"hidden_states of shape {states.shape}"
            raise foreign(file, got, "hidden_states (tokens, hooks, d_model)")
        _known_type(f"{file} hidden_states", states.dtype)
        values = states.read()
        values = values[:, None] if values.ndim == 2 else values
        rows, dtypes = [values[:, n] for n in range(values.shape[1])], [states.dtype]
    else:
        layers = _all_leaves(states)
        if layers is None or any(len(one.shape) != 2 for one in layers):
            raise foreign(file, "hidden_states that are no rows", "tensors (tokens, d_model)")
        if not layers or len({one.shape[0] for one in layers}) != 1:
            raise foreign(file, f"{len(layers)} tensors of other lengths", "one row per token")
        dtypes = [_known_type(file, one.dtype) for one in layers]
        rows = [one.read() for one in layers]
    if position is None and ids is not None:
        # The connector stores every token that was fed, from the first: one row for each.
        position = np.arange(len(rows[0]) if rows else 0)
    dtypes = dtypes * len(rows) if len(dtypes) == 1 else dtypes
    return _Held([""] * len(rows), [SequenceRows(rows, dtypes, ids, position)], set(node))


def _known_type(place: object, dtype: str) -> str:
    stored_type(place, dtype, "float32")
    return dtype


def _label(file: Path, node: dict[str, Any], label: str) -> Array | None:
    """Take the array that labels rows, ``(n,)``, out of what a file holds."""
    name = next((name for name in LABELS[label] if name in node), None)
    if name is None:
        return None
    found = node.pop(name)
    if isinstance(found, list) and _all_leaves(found) is not None:
        raise foreign(file, f"{name} in {len(found)} parts", "an array, one label per row")
    if not isinstance(found, Leaf):
        raise foreign(file, f"{name} of {found}", "a tensor")
    values = _read_labels(file, name, found)
    return values.reshape(-1) if values.ndim == 2 and values.shape[0] == 1 else values


def _read_labels(file: Path, name: str, leaf: Leaf) -> Array:
    if leaf.dtype == "bfloat16" or not leaf.dtype.startswith(("int", "uint", "float")):
        raise foreign(file, f"{name} of {leaf.dtype}", "integers")
    return leaf.read()


def _all_leaves(node: Any) -> list[Leaf] | None:
    is_list = isinstance(node, list) and all(isinstance(one, Leaf) for one in node)
    return node if is_list else None


def _by_name(file: Path, node: dict[str, Any]) -> _Held:
    """Return rows of arrays by name: those of places of the model, else all that may be rows.

    What TransformerLens names is known; beside it, what it names otherwise is no stream.
    """
    places = {n: x for n, x in node.items() if own_name(ForeignHook(n, 0, "")) != n}
    rows = {
        name: x
        for name, x in (places or node).items()
        if _is_rows(x) and name not in (*LABELS["token_id"], *LABELS["position"])
    }
    if not rows:
        named = ", ".join(f"{n} {x.dtype} {x.shape}" if isinstance(x, Leaf) else n
                          for n, x in node.items())[:200]  # fmt: skip
        got = f"tensors {named or 'none'}"
        raise foreign(file, got, "arrays of floats (rows, d_model), or sequences of it")
    rest = {name: x for name, x in node.items() if name not in rows}
    return _sequences_of(file, rows, ordered=False, rest=rest)


def _is_rows(node: Any) -> bool:
    """Floats of 2 to 4 axes, or a list of such."""
    if isinstance(node, Leaf):
        return node.dtype in (*DTYPES, "float64") and len(node.shape) in (2, 3, 4)
    leaves = _all_leaves(node)
    return bool(leaves) and all(
        one.dtype in (*DTYPES, "float64") and len(one.shape) in (1, 2) for one in leaves or ()
    )


def _sequences_of(
    file: Path, rows: dict[str, Any], ordered: bool, rest: dict[str, Any] | None = None
) -> _Held:
    """Of hooks side by side: the arrays have the same rows."""
    parts = {name: _parts(file, name, node) for name, node in rows.items()}
    shapes = {name: [len(one) for one in found] for name, (found, _) in parts.items()}
    first = next(iter(shapes.values()), [])
    for name, lengths in shapes.items():
        if lengths != first:
            got = f"{name} of {len(lengths)} sequences, {sum(lengths)} rows"
            expected = f"{len(first)} and {sum(first)}, as {next(iter(shapes))} has"
            raise foreign(file, got, expected)
    rest = {} if rest is None else rest
    tokens, positions = (_labels_of(file, rest, label, first) for label in LABELS)
    sequences = [
        SequenceRows(
            [found[n] for found, _ in parts.values()],
            [dtype for _, dtype in parts.values()],
            None if tokens is None else tokens[n],
            None if positions is None else positions[n],
        )
        for n in range(len(first))
    ]
    is_split = any(not isinstance(x, Leaf) or len(x.shape) > 2 for x in rows.values())
    return _Held(list(rows), sequences, set(rest), ordered or (is_split and len(first) > 0))


def _parts(file: Path, name: str, node: Any) -> tuple[list[Array], str]:
    """Rows ``(n, d_model)`` of each sequence, and their type."""
    if isinstance(node, Leaf):
        _known_type(f"{file} {name}".strip(), node.dtype)
        if len(node.shape) not in (2, 3, 4) or (len(node.shape) == 4 and not name):
            got = f"a tensor {node.shape}"
            raise foreign(file, got, "(rows, d_model), or sequences of it")
        values = node.read()
        if values.ndim == 4:  # heads of one position
            values = values.reshape(*values.shape[:2], -1)
        return ([values] if values.ndim == 2 else list(values)), node.dtype
    layers = _all_leaves(node)
    if not layers:
        got = f"{name} of {node}" if isinstance(node, str) else "nothing that may be rows"
        raise foreign(file, got, "a tensor, a list or a dict of tensors")
    kinds = {(one.dtype, len(one.shape), one.shape[-1] if one.shape else 0) for one in layers}
    if len(kinds) > 1 or not kinds <= {(d, n, w) for d, n, w in kinds if n in (1, 2)}:
        got = ", ".join(f"{one.dtype} {one.shape}" for one in layers)[:200]
        raise foreign(file, got, "a list of tensors (rows, d_model) of one width and type")
    dtype = _known_type(f"{file} {name}".strip(), layers[0].dtype)
    if len(layers[0].shape) == 1:  # a row each
        return [np.stack([one.read() for one in layers])], dtype
    return [one.read() for one in layers], dtype


def _labels_of(
    file: Path, rest: dict[str, Any], label: str, lengths: list[int]
) -> list[Array] | None:
    """Take the labels of rows out of what else a file holds; None where it has none."""
    name = next((name for name in LABELS[label] if name in rest), None)
    if name is None:
        return None
    found = rest.pop(name)
    several = _all_leaves(found)
    if several is not None:
        values = [_read_labels(file, name, one).reshape(-1) for one in several]
        if len(lengths) == 1 and all(one.shape == () for one in several):
            values = [np.concatenate(values)] if values else values
    elif isinstance(found, Leaf):
        array = _read_labels(file, name, found)
        values = list(array) if array.ndim == 2 else [array]
    else:
        raise foreign(file, f"{name} of {found}", "a tensor")
    if [one.shape for one in values] != [(n,) for n in lengths]:
        got = f"{name} of {len(values)} sequences, {sum(map(np.size, values))} labels"
        raise foreign(file, got, f"{len(lengths)} and {sum(lengths)}, one per row")
    return values


def open_npy(path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Arrays ``(rows, d_model)`` or ``(sequences, rows, d_model)``, a hook each."""
    arrays = {file: map_npy(file) for file in files}
    shape = next(iter(arrays.values())).shape[:-1]
    names, parts, dtypes, kept = [], [], [], []
    for file, leaf in arrays.items():
        if len(leaf.shape) not in (2, 3) or 0 in leaf.shape:
            raise foreign(file, f"an array {leaf.shape}", "(rows, d_model), or sequences of it")
        if leaf.shape[:-1] != shape:
            raise foreign(file, f"an array {leaf.shape}", f"rows {shape}, as in {files[0].name}")
        values = leaf.read()
        name = _npy_type(file, leaf.dtype, dtype)
        names.append(file.stem)
        parts.append(values if values.ndim == 3 else values[None])
        dtypes.append(name)
        kept.append(stored_type(file, name, dtype))
    hooks = [
        ForeignHook(name, rows.shape[-1], stored)
        for name, rows, stored in zip(names, parts, kept, strict=True)
    ]

    def blocks() -> Iterator[Block]:
        for number in range(len(parts[0])):
            one = SequenceRows([array[number] for array in parts], dtypes, None, None)
            yield from cut_rows(files[0], number, one, kept, False)

    unknown = {*NEVER_SAID, "token_id", "position"} | ({"request"} if len(shape) == 1 else set())
    n_rows = math.prod(shape)
    return ForeignSet("npy", files, hooks, tuple(sorted(unknown)), n_rows, blocks)


def _npy_type(file: Path, name: str, dtype: str | None) -> str:
    """Two bytes without a name are what the caller says."""
    if name in ("|V2", "uint16"):
        if dtype in ("bfloat16", "float16"):
            return dtype
        raise foreign(file, f"values of {name}", 'a name for them: dtype="bfloat16"')
    return name
