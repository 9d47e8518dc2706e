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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.errors import ActdsError
from actds.exchange.containers import READERS, Leaf, batches, features_of, map_npy, schema_of
from actds.exchange.tensors import foreign, read_document
from actds.format.arrays import DTYPES

__all__ = ["KINDS", "LABELS", "Block", "ForeignHook", "ForeignSet", "files_of", "open_set",
           "own_name"]  # fmt: skip

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
_NUMBERS = re.compile(r"(\d+)").split
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


def open_set(path: Path, kind: str, files: list[Path], dtype: str | None = None) -> ForeignSet:
    """Return what a set holds, after a look at the form of each of its files.

    Args:
        path: a file, or a folder of them.
        kind: one of ``KINDS``.
        files: its files, as ``files_of`` has them.
        dtype: type of two-byte values without a name, and of values that the format has no type
            for, which are rounded.

    Raises:
        ActdsError: E019 it is no such set, truncated, or mixes widths or types; E011 ``.pt`` files
            without torch.
    """
    return KINDS[kind][1](path, files, dtype)


def own_name(hook: ForeignHook) -> str:
    """Return the name of a hook for what the set calls it."""
    match = _TLENS.fullmatch(hook.called)
    return f"{match[2] or match[3]}.{int(match[1])}" if match else hook.called


def files_of(path: Path, kind: str) -> list[Path]:
    """Return the files of a kind, in the order of the numbers in their names.

    Raises:
        ActdsError: E019 the folder cannot be listed, has one file twice, or ``state.json`` of a
            saved Arrow dataset names what is not there.
    """
    try:
        return _files(path, kind)
    except OSError as error:
        if isinstance(error, ActdsError):
            raise
        raise foreign(path, error.strerror or str(error), "files that can be read") from None


def _files(path: Path, kind: str) -> list[Path]:
    if kind in ("sae-lens", "datasets"):
        files = _arrow_files(path, kind)
    elif path.is_file():
        return [path] if path.suffix == KINDS[kind][0] else []
    else:
        files = [one for one in path.iterdir() if one.suffix == KINDS[kind][0] and one.is_file()]
        files.sort(key=lambda one: [int(w) if w.isdigit() else w for w in _NUMBERS(one.name)])
    seen: dict[tuple[int, int], Path] = {}
    for file in files:
        status = file.stat()
        twin = seen.setdefault((status.st_dev, status.st_ino), file)
        if twin is not file:
            raise foreign(file, f"the same file as {twin.name}", "every file once")
    return files


def _arrow_files(path: Path, kind: str) -> list[Path]:
    state = path / "state.json"
    if not (state.is_file() and (path / "dataset_info.json").is_file()):
        return []
    features = features_of(path).values()
    windows = any(isinstance(one, dict) and one.get("_type") == "Array2D" for one in features)
    if windows != (kind == "sae-lens"):
        return []
    try:
        document = read_document(state)
        names = [str(one["filename"]) for one in document["_data_files"]]
        there = {one.name for one in path.iterdir() if one.is_file()}
    except (KeyError, TypeError):
        raise foreign(state, "a document that cannot be read", "data files") from None
    # Old versions of datasets saved a selection as an index beside the unselected rows.
    if document.get("_indices_data_files"):
        raise foreign(state, "a saved selection", "a dataset saved after flatten_indices()")
    for name in names:
        if name not in there:
            got = f"no such file in the folder: {name[:80]!r}"
            raise foreign(state, got, "every file that it names")
    return [path / name for name in names]


# Rows of sequences, from whatever container.


@dataclass(frozen=True)
class _Sequence:
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
    sequences: list[_Sequence]
    left_out: set[str] = field(default_factory=set)
    ordered: bool = True


def _open_sequences(
    kind: str, files: list[Path], load: Callable[[Path], _Held], dtype: str | None
) -> ForeignSet:
    """Return a set of files that each hold one sequence or several."""
    forms: dict[tuple[tuple[str, int, str], ...], Path] = {}
    unknown, left_out, n_rows = set(NEVER_SAID), set(), 0
    for file in files:
        held = load(file)
        left_out |= held.left_out
        unknown |= set() if held.ordered or len(files) > 1 else {"request"}
        for one in held.sequences:
            form = tuple(
                (name, rows.shape[1], _stored_type(file, one_type, dtype))
                for name, rows, one_type in zip(held.names, one.rows, one.dtypes, strict=True)
            )
            forms.setdefault(form, file)
            if len(forms) > 1:
                got, expected = (f"{_form(f)} in {p}" for f, p in reversed(forms.items()))
                raise foreign(file, got, expected)
            unknown |= {"token_id"} if one.token_ids is None else set()
            unknown |= {"position"} if one.position is None else set()
            _check_labels(file, one)
            n_rows += len(one.rows[0])
    hooks = [ForeignHook(name, width, kept) for name, width, kept in next(iter(forms), ())]
    dtypes = [hook.dtype for hook in hooks]

    def blocks() -> Iterator[Block]:
        number = 0
        for file in files:
            for one in load(file).sequences:
                yield from _cut(file, number, one, dtypes, "token_id" not in unknown)
                number += 1

    if not hooks:
        raise foreign(files[0], "no row", "activations")
    columns, other = tuple(sorted(unknown)), tuple(sorted(left_out))
    return ForeignSet(kind, files, hooks, columns, n_rows, blocks, other)


def _form(form: Sequence[tuple[str, int, str]]) -> str:
    return ", ".join(f"{name} {dtype} rows of {width}".strip() for name, width, dtype in form)


def _check_labels(file: Path, one: _Sequence) -> None:
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


def _cut(
    file: Path, number: int, one: _Sequence, dtypes: list[str], tokens: bool
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


def _stored_type(place: object, dtype: str, wanted: str | None) -> str:
    """Return the type in which values are imported: their own, or for float64 what is wanted."""
    if dtype in DTYPES:
        return dtype
    if dtype == "float64" and wanted in DTYPES:
        return wanted
    expected = f"one of {', '.join(DTYPES)}, unrounded"
    more = ', or dtype="float32", which rounds' if dtype == "float64" else ""
    raise foreign(place, f"values of {dtype}", expected + more)


# Tensors by name: what vLLM, speculators and people save.


def _open_tensors(kind: str, path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Open ``.pt``, ``.npz`` and ``.safetensors`` files."""

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
    """Return rows of ``hidden_states (n, n_hooks, d_model)``, or of a list of hooks."""
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
    return _Held([""] * len(rows), [_Sequence(rows, dtypes, ids, position)], set(node))


def _known_type(place: object, dtype: str) -> str:
    _stored_type(place, dtype, "float32")
    return dtype


def _label(file: Path, node: dict[str, Any], label: str) -> Array | None:
    """Take the array that labels rows out of what a file holds, and return it, ``(n,)``."""
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
    """Return whether something may be rows: floats of 2 to 4 axes, or a list of such."""
    if isinstance(node, Leaf):
        return node.dtype in (*DTYPES, "float64") and len(node.shape) in (2, 3, 4)
    leaves = _all_leaves(node)
    return bool(leaves) and all(
        one.dtype in (*DTYPES, "float64") and len(one.shape) in (1, 2) for one in leaves or ()
    )


def _sequences_of(
    file: Path, rows: dict[str, Any], ordered: bool, rest: dict[str, Any] | None = None
) -> _Held:
    """Return the sequences of arrays that have the same rows: of hooks side by side."""
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
        _Sequence(
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
    """Return the rows ``(n, d_model)`` of each sequence, and their type."""
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


def _open_npy(path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Open arrays ``(rows, d_model)`` or ``(sequences, rows, d_model)``, a hook each."""
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
        kept.append(_stored_type(file, name, dtype))
    hooks = [
        ForeignHook(name, rows.shape[-1], stored)
        for name, rows, stored in zip(names, parts, kept, strict=True)
    ]

    def blocks() -> Iterator[Block]:
        for number in range(len(parts[0])):
            one = _Sequence([array[number] for array in parts], dtypes, None, None)
            yield from _cut(files[0], number, one, kept, False)

    unknown = {*NEVER_SAID, "token_id", "position"} | ({"request"} if len(shape) == 1 else set())
    n_rows = math.prod(shape)
    return ForeignSet("npy", files, hooks, tuple(sorted(unknown)), n_rows, blocks)


def _npy_type(file: Path, name: str, dtype: str | None) -> str:
    """Return the type of an array's values; two bytes without a name are what the caller says."""
    if name in ("|V2", "uint16"):
        if dtype in ("bfloat16", "float16"):
            return dtype
        raise foreign(file, f"values of {name}", 'a name for them: dtype="bfloat16"')
    return name


# Arrow: the windows of SAELens, and lists of numbers.


def _open_sae_lens(path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Open a saved Arrow dataset with one two-dimensional array per hook and window."""
    info, features = path / "dataset_info.json", features_of(path)
    try:
        two = {n: f for n, f in features.items() if f.get("_type") == "Array2D"}
        sizes = {int(f["shape"][0]) for f in two.values()}
        types = [str(f["dtype"]) for f in two.values()]
        hooks = [
            ForeignHook(name, int(f["shape"][1]), _stored_type(info, str(f["dtype"]), dtype))
            for name, f in two.items()
        ]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, ActdsError):
            raise
        raise foreign(info, "features that cannot be read", "windows of activations") from None
    if len(sizes) != 1 or not hooks or min(sizes) < 1 or min(h.d_model for h in hooks) < 1:
        got = f"windows of {', '.join(map(str, sorted(sizes))) or 'no hook'}"
        raise foreign(info, got, "Array2D features of one context size")
    size, tokens = sizes.pop(), "token_ids" in features
    names = [hook.called for hook in hooks] + (["token_ids"] if tokens else [])
    for file in files:
        _check_columns(file, names)
    kept = [hook.dtype for hook in hooks]

    def blocks() -> Iterator[Block]:
        number = 0
        for file in files:
            for batch in batches(file):
                values = [_flat(batch, h, t, size, file) for h, t in zip(hooks, types, strict=True)]
                ids = _tokens(batch, size, file) if tokens else None
                for n in range(batch.num_rows):
                    cut = slice(n * size, (n + 1) * size)
                    own = None if ids is None else ids[cut]
                    one = _Sequence([rows[cut] for rows in values], types, own, None)
                    yield from _cut(file, number, one, kept, tokens)
                    number += 1

    unknown = {*NEVER_SAID, "position"} | (set() if tokens else {"token_id"})
    # What actds export packs are rows of any requests.
    unknown |= {"request"} if (path / "actds_export.json").exists() else set()
    other = tuple(sorted(set(features) - set(names)))
    n_rows = size * sum(batch.num_rows for file in files for batch in batches(file))
    return ForeignSet("sae-lens", files, hooks, tuple(sorted(unknown)), n_rows, blocks, other)


def _check_columns(file: Path, names: list[str]) -> None:
    schema = schema_of(file)
    missing = [name for name in names if name not in schema.names]
    if missing:
        got = f"columns {', '.join(schema.names)}"[:200]
        raise foreign(file, got, f"also {', '.join(missing)}")


def _flat(batch: pa.RecordBatch, hook: ForeignHook, dtype: str, size: int, file: Path) -> Array:
    """Return the rows of a column of windows, after a look at the length of each."""
    windows = _storage(batch.column(hook.called))
    lengths, rows = _lists(windows, hook.called, file)
    widths, flat = _lists(rows, hook.called, file)
    if set(widths.tolist()) - {hook.d_model} or set(lengths.tolist()) - {size}:
        got = f"{hook.called} windows of {sorted(set(lengths.tolist()))[:9]} rows of "
        got += f"{sorted(set(widths.tolist()))[:9]}"
        raise foreign(file, got, f"{size} rows of {hook.d_model}")
    return _values(flat, hook.called, dtype, file).reshape(-1, hook.d_model)


def _storage(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _lists(column: pa.Array, name: str, file: Path) -> tuple[Array, pa.Array]:
    """Return the lengths of the lists of a column, and their elements."""
    kind = column.type
    if not (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ):
        raise foreign(file, f"{name} of {kind}"[:200], "lists of numbers")
    if column.null_count:
        raise foreign(file, f"{name} with {column.null_count} nulls", "no null")
    lengths: Array = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths, column.flatten()


def _values(flat: pa.Array, name: str, dtype: str, file: Path) -> Array:
    if flat.null_count:
        raise foreign(file, f"{name} with {flat.null_count} nulls", "no null")
    values: Array = flat.to_numpy(zero_copy_only=False)
    if values.dtype.name != dtype:
        raise foreign(file, f"{name} of {values.dtype}", dtype)
    return values


def _tokens(batch: pa.RecordBatch, size: int, file: Path) -> Array:
    lengths, ids = _lists(batch.column("token_ids"), "token_ids", file)
    if ids.null_count or len(ids) != batch.num_rows * size or set(lengths.tolist()) - {size}:
        raise foreign(file, f"{len(ids)} token_ids", f"{size} for each of {batch.num_rows} windows")
    values: Array = ids.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "iu" or (len(values) and values.min() < 0):
        raise foreign(file, f"token_ids of {values.dtype}", "numbers from 0")
    return values


def _open_datasets(path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Open a dataset of lists of floats: a row of channels, or a sequence of them, in each line."""
    schema = schema_of(files[0])
    kinds = {column.name: _nesting(column.type) for column in schema}
    hooks = {n: k for n, k in kinds.items() if k[1] in (*DTYPES, "float64") and k[0] in (1, 2)}
    if not hooks:
        raise foreign(files[0], f"columns {', '.join(schema.names)}"[:200], "lists of floats")
    if len({depth for depth, _ in hooks.values()}) > 1:
        raise foreign(files[0], f"columns {', '.join(hooks)}"[:200], "rows, or sequences of rows")
    depth = next(iter(hooks.values()))[0]
    label = next((n for n in LABELS["token_id"] if kinds.get(n, (-1, ""))[0] == depth - 1), None)
    label = label if label and kinds[label][1].startswith(("int", "uint")) else None
    for file in files:
        if schema_of(file) != schema:
            raise foreign(file, "other columns", f"those of {files[0].name}")
    widths, n_rows = _widths(files, list(hooks), depth)
    stored = {n: _stored_type(f"{path} {n}", k[1], dtype) for n, k in hooks.items()}
    found = [ForeignHook(n, widths[n], stored[n]) for n in hooks]
    kept = list(stored.values())

    def blocks() -> Iterator[Block]:
        number, first = 0, 0
        for file in files:
            for batch in batches(file):
                for one in _lines(file, batch, hooks, widths, label, depth):
                    yield from _cut(
                        file, number, replace(one, first=first), kept, label is not None
                    )
                    number += depth - 1
                    first += len(one.rows[0]) if depth == 1 else 0

    unknown = {*NEVER_SAID, "position"} | (set() if label else {"token_id"})
    unknown |= {"request"} if depth == 1 else set()
    other = tuple(sorted(set(schema.names) - set(hooks) - {label}))
    return ForeignSet("datasets", files, found, tuple(sorted(unknown)), n_rows, blocks, other)


def _nesting(kind: pa.DataType) -> tuple[int, str]:
    """Return how deep lists are nested, and the type of their elements."""
    depth = 0
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or (
        pa.types.is_fixed_size_list(kind)
    ):  # fmt: skip
        depth, kind = depth + 1, kind.value_type
    names = {"float": "float32", "double": "float64", "halffloat": "float16"}
    return depth, names.get(str(kind), str(kind))


def _widths(files: list[Path], names: list[str], depth: int) -> tuple[dict[str, int], int]:
    """Return the channels of each hook and the rows of one, by the length of every list."""
    n_rows = 0
    widths: dict[str, set[int]] = {name: set() for name in names}
    for file in files:
        for batch in batches(file):
            for name in names:
                column = batch.column(name)
                for _ in range(depth - 1):
                    column = _lists(column, name, file)[1]
                lengths = _lists(column, name, file)[0]
                widths[name] |= set(np.unique(lengths).tolist())
            n_rows += len(lengths)
    for name, found in widths.items():
        if len(found) != 1 or 0 in found:
            got = f"{name} in lists of {sorted(found)[:9]}"
            raise foreign(files[0], got, "lists of one length")
    return {name: found.pop() for name, found in widths.items()}, n_rows


def _lines(
    file: Path, batch: pa.RecordBatch, hooks: dict[str, tuple[int, str]], widths: dict[str, int],
    label: str | None, depth: int,
) -> Iterator[_Sequence]:  # fmt: skip
    """Yield the sequences of a batch: all its lines as one, or one each."""
    lengths: Array | None = None
    rows: list[Array] = []
    for name, (_, dtype) in hooks.items():
        column = batch.column(name)
        if depth == 2:
            own, column = _lists(column, name, file)
            if lengths is not None and (own != lengths).any():
                raise foreign(file, f"{name} of other lengths", "those of the other columns")
            lengths = own
        flat = _lists(column, name, file)[1]
        rows.append(_values(flat, name, dtype, file).reshape(-1, widths[name]))
    ids: Array | None = None
    if label is not None:
        column = batch.column(label)
        if depth == 2:
            own, column = _lists(column, label, file)
            if lengths is not None and (own != lengths).any():
                raise foreign(file, f"{label} of other lengths", "one per row")
        if column.null_count:
            raise foreign(file, f"{label} with {column.null_count} nulls", "no null")
        ids = column.to_numpy(zero_copy_only=False)
    ends = [len(rows[0])] if lengths is None else np.cumsum(lengths).tolist()
    dtypes = [dtype for _, dtype in hooks.values()]
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        one = None if ids is None else ids[start:stop]
        sequence = _Sequence([values[start:stop] for values in rows], dtypes, one, None)
        _check_labels(file, sequence)
        yield sequence


Opener = Callable[[Path, list[Path], "str | None"], ForeignSet]
KINDS: dict[str, tuple[str, Opener]] = {
    "sae-lens": ("", _open_sae_lens),
    "datasets": ("", _open_datasets),
    "safetensors": (".safetensors", lambda *given: _open_tensors("safetensors", *given)),
    "pt": (".pt", lambda *given: _open_tensors("pt", *given)),
    "npy": (".npy", _open_npy),
    "npz": (".npz", lambda *given: _open_tensors("npz", *given)),
}
"""What ``actds import --from`` knows: the suffix of its files, and what opens them."""
