"""Sets of activations made elsewhere: which of their arrays are rows, tokens and positions.

It runs in the process of ``actds.exchange.opening``. Opening a set reads the form of every file, so
that a truncated file or a width that differs is found before anything is written. Facts about the
forms: SAELens ``cache_activations_runner`` (6.54), the ``ExampleHiddenStatesConnector`` of vLLM
(0.32), ``train/data.py`` of speculators, ``ActivationCache`` of TransformerLens (2.16); saved Arrow
datasets are the windows of SAELens, and lists of numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from actds.exchange.containers import (
    READERS,
    Array,
    Leaf,
    batches,
    features_of,
    foreign,
    lists_of,
    map_npy,
    nesting,
    numbers_of,
    refuse_nulls,
    schema_of,
)
from actds.format.arrays import DTYPES

_FLOATS = (*DTYPES, "float64")
BLOCK_ROWS, BLOCK_NBYTES = 4096, 1 << 26
"""Rows of a sequence that are read at a time, and their bytes, unless one row has more."""
RECORD_FILE, ROWS_FILE = "actds_export.json", "rows.parquet"
"""What ``actds export`` says of the files beside it, and of each row."""
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
    """A place in the model; ``called`` is the set's name of it, empty where it gives none."""

    called: str
    d_model: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.called} {self.dtype} rows of {self.d_model}".strip()


@dataclass(frozen=True)
class Block:
    """Rows of a sequence: position and tokens ``(n,)``, bit patterns ``(n, d_model)`` by hook."""

    sequence: int
    position: Array
    token_ids: Array | None
    bits: list[Array]


@dataclass(frozen=True)
class ForeignSet:
    """A set that was opened: of the columns ``unknown`` it says nothing, ``left_out`` stays out."""

    kind: str
    files: list[Path]
    hooks: list[ForeignHook]
    unknown: Collection[str]
    n_rows: int
    blocks: Callable[[], Iterator[Block]]
    left_out: Collection[str]


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


def check_labels(file: Path, sequence: SequenceRows) -> None:
    """Refuse labels that are no numbers of 32 bits, or not one per row."""
    n, position = len(sequence.rows[0]), sequence.position
    for name, values in (("token_ids", sequence.token_ids), ("positions", position)):
        if values is None:
            continue
        if values.shape != (n,) or values.dtype.kind not in "iu":
            got = f"{name} of {values.dtype} {values.shape}"
            raise foreign(file, got, f"integers ({n},), one per row")
        if n and not (int(values.min()) >= 0 and int(values.max()) < 2**32):
            raise foreign(file, f"{name} to {values.max()}", "numbers from 0 below 2^32")
    if position is not None and (np.diff(position.astype(np.int64)) <= 0).any():
        raise foreign(file, "positions that do not ascend", "each position once")


def cut_rows(file: Path, number: int, sequence: SequenceRows, stored: list[str]) -> Iterator[Block]:
    """Yield the rows of a sequence in blocks, in the types that they are imported in."""
    row_nbytes = sum(rows.shape[1] * rows.itemsize for rows in sequence.rows)
    step = max(1, min(BLOCK_ROWS, BLOCK_NBYTES // max(row_nbytes, 1)))
    n, ids = len(sequence.rows[0]), sequence.token_ids
    for start in range(0, n, step):
        cut = slice(start, min(start + step, n))
        if sequence.position is None:
            position = sequence.first + np.arange(cut.start, cut.stop)
        else:
            position = sequence.position[cut]
        types = zip(sequence.rows, sequence.dtypes, stored, strict=True)
        bits = [_bits(file, rows[cut], dtype, kept) for rows, dtype, kept in types]
        yield Block(number, position, None if ids is None else ids[cut], bits)


def _bits(file: Path, values: Array, dtype: str, stored: str) -> Array:
    """Rows as bit patterns, rounded where the type is not their own; E019 it cannot hold one."""
    if dtype == stored:
        bits: Array = np.ascontiguousarray(values).view(DTYPES[stored].bits)
        return bits
    bits, lost = narrowed(values, stored)
    if lost.any():
        got = f"{int(lost.sum()):,} values as {values[lost][0]:g}, which {stored} cannot hold"
        raise foreign(file, got, "a wider type: dtype=")
    return bits


def narrowed(values: Array, dtype: str) -> tuple[Array, Array]:
    """Bit patterns of the nearest values of a type, and which finite values it cannot hold."""
    with np.errstate(over="ignore"):
        narrow = values.astype(DTYPES[dtype].native)
    lost = np.isfinite(values) & ~np.isfinite(narrow.astype(np.float32))
    return narrow.view(DTYPES[dtype].bits), lost


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
class _FileRows:
    """Rows of a file; ``ordered`` where its sequences are such, and not merely all its rows."""

    names: list[str]
    sequences: list[SequenceRows]
    left_out: set[str] = field(default_factory=set)
    ordered: bool = True


def _open_sequences(
    kind: str, files: list[Path], load: Callable[[Path], _FileRows], dtype: str | None
) -> ForeignSet:
    forms: dict[tuple[ForeignHook, ...], Path] = {}
    unknown, left_out, n_rows = set(NEVER_SAID), set(), 0
    for file in files:
        opened = load(file)
        left_out |= opened.left_out
        unknown |= set() if opened.ordered or len(files) > 1 else {"request"}
        for sequence in opened.sequences:
            places = zip(opened.names, sequence.rows, sequence.dtypes, strict=True)
            form = tuple(
                ForeignHook(name, rows.shape[1], stored_type(file, stored, dtype))
                for name, rows, stored in places
            )
            forms.setdefault(form, file)
            if len(forms) > 1:
                words = (f"{', '.join(map(str, f))} in {path}" for f, path in forms.items())
                expected, got = words
                raise foreign(file, got, expected)
            unknown |= {"token_id"} if sequence.token_ids is None else set()
            unknown |= {"position"} if sequence.position is None else set()
            check_labels(file, sequence)
            n_rows += len(sequence.rows[0])
    if not forms:
        raise foreign(files[0], "no row", "activations")
    hooks = list(next(iter(forms)))
    dtypes = [hook.dtype for hook in hooks]

    def blocks() -> Iterator[Block]:
        number = 0
        for file in files:
            for sequence in load(file).sequences:
                if "token_id" in unknown:  # of another sequence
                    sequence = replace(sequence, token_ids=None)
                yield from cut_rows(file, number, sequence, dtypes)
                number += 1

    return ForeignSet(kind, files, hooks, unknown, n_rows, blocks, left_out)


def open_tensors(kind: str, path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """``.pt``, ``.npz`` and ``.safetensors`` files: what vLLM, speculators and people save."""

    def load(file: Path) -> _FileRows:
        node = READERS[kind](file)
        if isinstance(node, dict) and "hidden_states" in node:
            return _hidden_states(kind, file, node)
        layers = _all_leaves(node)
        if layers and all(len(leaf.shape) == 3 for leaf in layers):  # hidden states by layer
            node = {str(n): leaf for n, leaf in enumerate(layers)}
        if isinstance(node, dict):
            return _by_name(file, node)
        return _sequences_of(file, {"": node}, ordered=True, rest={})

    return _open_sequences(kind, files, load, dtype)


def _hidden_states(kind: str, file: Path, node: dict[str, Any]) -> _FileRows:
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
        if layers is None or any(len(leaf.shape) != 2 for leaf in layers):
            raise foreign(file, "hidden_states that are no rows", "tensors (tokens, d_model)")
        if not layers or len({leaf.shape[0] for leaf in layers}) != 1:
            raise foreign(file, f"{len(layers)} tensors of other lengths", "one row per token")
        dtypes = [_known_type(file, leaf.dtype) for leaf in layers]
        rows = [leaf.read() for leaf in layers]
    if position is None and ids is not None:
        # The connector stores every token that was fed, from the first: one row for each.
        position = np.arange(len(rows[0]) if rows else 0)
    dtypes = dtypes * len(rows) if len(dtypes) == 1 else dtypes
    return _FileRows([""] * len(rows), [SequenceRows(rows, dtypes, ids, position)], set(node))


def _known_type(place: object, dtype: str) -> str:
    stored_type(place, dtype, "float32")
    return dtype


def _label(file: Path, node: dict[str, Any], label: str) -> Array | None:
    """Take the array that labels rows, ``(n,)``, out of what a file holds."""
    name, labels = _taken(node, label)
    if name is None:
        return None
    if isinstance(labels, list) and _all_leaves(labels) is not None:
        raise foreign(file, f"{name} in {len(labels)} parts", "an array, one label per row")
    values = _read_labels(file, name, labels)
    return values.reshape(-1) if values.ndim == 2 and values.shape[0] == 1 else values


def _taken(node: dict[str, Any], label: str) -> tuple[str | None, Any]:
    name = next((name for name in LABELS[label] if name in node), None)
    return name, None if name is None else node.pop(name)


def _read_labels(file: Path, name: str, leaf: Any) -> Array:
    if not isinstance(leaf, Leaf):
        raise foreign(file, f"{name} of {leaf}", "a tensor")
    if leaf.dtype == "bfloat16" or not leaf.dtype.startswith(("int", "uint", "float")):
        raise foreign(file, f"{name} of {leaf.dtype}", "integers")
    return leaf.read()


def _all_leaves(node: Any) -> list[Leaf] | None:
    is_list = isinstance(node, list) and all(isinstance(part, Leaf) for part in node)
    return node if is_list else None


def _by_name(file: Path, node: dict[str, Any]) -> _FileRows:
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
        words = (f"{n} {x.dtype} {x.shape}" if isinstance(x, Leaf) else n for n, x in node.items())
        got = f"tensors {', '.join(words)[:200] or 'none'}"
        raise foreign(file, got, "arrays of floats (rows, d_model), or sequences of it")
    rest = {name: x for name, x in node.items() if name not in rows}
    return _sequences_of(file, rows, ordered=False, rest=rest)


def _is_rows(node: Any) -> bool:
    """Floats of 2 to 4 axes, or a list of such."""
    if isinstance(node, Leaf):
        return node.dtype in _FLOATS and len(node.shape) in (2, 3, 4)
    layers = _all_leaves(node) or []
    return layers != [] and all(x.dtype in _FLOATS and len(x.shape) in (1, 2) for x in layers)


def _sequences_of(
    file: Path, hooks: dict[str, Any], ordered: bool, rest: dict[str, Any]
) -> _FileRows:
    """Of hooks side by side: the arrays have the same rows."""
    parts = {name: _parts(file, name, node) for name, node in hooks.items()}
    shapes = {name: [len(rows) for rows in sequences] for name, (sequences, _) in parts.items()}
    first = next(iter(shapes.values()), [])
    for name, lengths in shapes.items():
        if lengths != first:
            got = f"{name} of {len(lengths)} sequences, {sum(lengths)} rows"
            expected = f"{len(first)} and {sum(first)}, as {next(iter(shapes))} has"
            raise foreign(file, got, expected)
    tokens, positions = (_labels_of(file, rest, label, first) for label in LABELS)
    sequences = [
        SequenceRows(
            [rows[n] for rows, _ in parts.values()],
            [dtype for _, dtype in parts.values()],
            None if tokens is None else tokens[n],
            None if positions is None else positions[n],
        )
        for n in range(len(first))
    ]
    is_split = any(not isinstance(x, Leaf) or len(x.shape) > 2 for x in hooks.values())
    return _FileRows(list(hooks), sequences, set(rest), ordered or (is_split and len(first) > 0))


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
    kinds = {(leaf.dtype, leaf.shape[-1:]) for leaf in layers}
    axes = {len(leaf.shape) for leaf in layers}
    if len(kinds) > 1 or axes not in ({1}, {2}):
        got = ", ".join(f"{leaf.dtype} {leaf.shape}" for leaf in layers)[:200]
        raise foreign(file, got, "a list of tensors (rows, d_model) of one width and type")
    dtype = _known_type(f"{file} {name}".strip(), layers[0].dtype)
    arrays = [leaf.read() for leaf in layers]
    return ([np.stack(arrays)] if axes == {1} else arrays), dtype  # of one axis: a row each


def _labels_of(
    file: Path, rest: dict[str, Any], label: str, lengths: list[int]
) -> list[Array] | None:
    """Take the labels of rows out of what else a file holds; None where it has none."""
    name, labels = _taken(rest, label)
    if name is None:
        return None
    parts = _all_leaves(labels)
    if parts is not None:
        values = [_read_labels(file, name, part).reshape(-1) for part in parts]
        if len(lengths) == 1 and values and all(part.shape == () for part in parts):
            values = [np.concatenate(values)]
    else:
        array = _read_labels(file, name, labels)
        values = list(array) if array.ndim == 2 else [array]
    if [part.shape for part in values] != [(n,) for n in lengths]:
        got = f"{name} of {len(values)} sequences, {sum(map(np.size, values))} labels"
        raise foreign(file, got, f"{len(lengths)} and {sum(lengths)}, one per row")
    return values


def open_npy(path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Arrays ``(rows, d_model)`` or ``(sequences, rows, d_model)``, a hook each."""
    arrays = {file: map_npy(file) for file in files}
    shape = next(iter(arrays.values())).shape[:-1]
    names, parts, dtypes = [], [], []
    for file, leaf in arrays.items():
        if len(leaf.shape) not in (2, 3) or 0 in leaf.shape:
            raise foreign(file, f"an array {leaf.shape}", "(rows, d_model), or sequences of it")
        if leaf.shape[:-1] != shape:
            raise foreign(file, f"an array {leaf.shape}", f"rows {shape}, as in {files[0].name}")
        values, name = leaf.read(), leaf.dtype
        if name in ("|V2", "uint16"):  # two bytes without a name are what the caller says
            if dtype not in ("bfloat16", "float16"):
                raise foreign(file, f"values of {name}", 'a name for them: dtype="bfloat16"')
            name = dtype
        stored_type(file, name, dtype)
        names.append(file.stem)
        parts.append(values if values.ndim == 3 else values[None])
        dtypes.append(name)

    def load(_: Path) -> _FileRows:
        numbers = range(len(parts[0]))
        rows = [SequenceRows([hook[n] for hook in parts], dtypes, None, None) for n in numbers]
        return _FileRows(names, rows, ordered=len(shape) == 2)

    return replace(_open_sequences("npy", files[:1], load, dtype), files=files)


def open_sae_lens(path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Open a saved Arrow dataset with one two-dimensional array per hook and window."""
    info, features = path / "dataset_info.json", features_of(path)
    try:
        two = {n: f for n, f in features.items() if f.get("_type") == "Array2D"}
        sizes = {int(f["shape"][0]) for f in two.values()}
        types = [str(f["dtype"]) for f in two.values()]
        widths = [int(f["shape"][1]) for f in two.values()]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise foreign(info, "features that cannot be read", "windows of activations") from None
    kept = [stored_type(info, name, dtype) for name in types]
    hooks = [ForeignHook(*hook) for hook in zip(two, widths, kept, strict=True)]
    if len(sizes) != 1 or not hooks or min(sizes) < 1 or min(h.d_model for h in hooks) < 1:
        got = f"windows of {', '.join(map(str, sorted(sizes))) or 'no hook'}"
        raise foreign(info, got, "Array2D features of one context size")
    size, tokens = sizes.pop(), "token_ids" in features
    names = [hook.called for hook in hooks] + (["token_ids"] if tokens else [])
    for file in files:
        columns = schema_of(file).names
        if missing := [name for name in names if name not in columns]:
            got = f"columns {', '.join(columns)}"[:200]
            raise foreign(file, got, f"also {', '.join(missing)}")

    def read(file: Path, batch: pa.RecordBatch) -> _Batch:
        rows = [_flat(batch, h, t, size, file) for h, t in zip(hooks, types, strict=True)]
        ids = _tokens(batch, size, file) if tokens else None
        return rows, ids, [size] * batch.num_rows

    unknown = {*NEVER_SAID, "position"} | (set() if tokens else {"token_id"})
    # What actds export packs are rows of any requests.
    unknown |= {"request"} if (path / RECORD_FILE).exists() else set()
    n_rows = size * sum(batch.num_rows for file in files for batch in batches(file))
    blocks = partial(_blocks, files, hooks, types, read)
    return ForeignSet("sae-lens", files, hooks, unknown, n_rows, blocks, {*features} - {*names})


def _flat(batch: pa.RecordBatch, hook: ForeignHook, dtype: str, size: int, file: Path) -> Array:
    """Rows of a column of windows, each window of the size that the features say."""
    column = batch.column(hook.called)
    windows = column.storage if isinstance(column, pa.ExtensionArray) else column
    lengths, rows = lists_of(windows, hook.called, file)
    widths, flat = lists_of(rows, hook.called, file)
    if set(widths.tolist()) - {hook.d_model} or set(lengths.tolist()) - {size}:
        got = f"{hook.called} windows of {sorted(set(lengths.tolist()))[:9]} rows of "
        got += f"{sorted(set(widths.tolist()))[:9]}"
        raise foreign(file, got, f"{size} rows of {hook.d_model}")
    return numbers_of(flat, hook.called, dtype, file).reshape(-1, hook.d_model)


def _tokens(batch: pa.RecordBatch, size: int, file: Path) -> Array:
    lengths, ids = lists_of(batch.column("token_ids"), "token_ids", file)
    if ids.null_count or len(ids) != batch.num_rows * size or set(lengths.tolist()) - {size}:
        raise foreign(file, f"{len(ids)} token_ids", f"{size} for each of {batch.num_rows} windows")
    values: Array = ids.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "iu" or (len(values) and values.min() < 0):
        raise foreign(file, f"token_ids of {values.dtype}", "numbers from 0")
    return values


def open_datasets(path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Open a dataset of lists of floats: a row of channels, or a sequence of them, in each line."""
    schema = schema_of(files[0])
    kinds = {column.name: nesting(column.type) for column in schema}
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
    types = {n: dtype for n, (_, dtype) in hooks.items()}
    places = [
        ForeignHook(n, widths[n], stored_type(f"{path} {n}", kind, dtype))
        for n, kind in types.items()
    ]
    unknown = {*NEVER_SAID, "position"} | (set() if label else {"token_id"})
    unknown |= {"request"} if depth == 1 else set()
    other = set(schema.names) - set(hooks) - {label}
    read = partial(_lines, hooks=types, widths=widths, label=label, depth=depth)
    blocks = partial(_blocks, files, places, list(types.values()), read)
    return ForeignSet("datasets", files, places, unknown, n_rows, blocks, other)


_Batch = tuple[list[Array], "Array | None", "list[int] | None"]
"""Rows of each hook, labels, and the lengths of the sequences; None where all rows are of one."""


def _blocks(
    files: list[Path],
    hooks: list[ForeignHook],
    types: list[str],
    read: Callable[[Path, pa.RecordBatch], _Batch],
) -> Iterator[Block]:
    """The sequences of all batches, one after the other; ``types`` are those in the files."""
    number = first = 0
    for file in files:
        for batch in batches(file):
            rows, ids, lengths = read(file, batch)
            ends = np.cumsum([len(rows[0])] if lengths is None else lengths).tolist()
            for start, stop in pairwise([0, *map(int, ends)]):
                cut = [values[start:stop] for values in rows]
                labels = None if ids is None else ids[start:stop]
                sequence = SequenceRows(cut, types, labels, None, first)
                check_labels(file, sequence)
                yield from cut_rows(file, number, sequence, [hook.dtype for hook in hooks])
                number += lengths is not None
                first += stop - start if lengths is None else 0


def _widths(files: list[Path], names: list[str], depth: int) -> tuple[dict[str, int], int]:
    n_rows = 0
    widths: dict[str, set[int]] = {name: set() for name in names}
    for file in files:
        for batch in batches(file):
            for name in names:
                column = batch.column(name)
                for _ in range(depth - 1):
                    column = lists_of(column, name, file)[1]
                lengths = lists_of(column, name, file)[0]
                widths[name] |= set(np.unique(lengths).tolist())
            n_rows += len(lengths)
    for name, sizes in widths.items():
        if len(sizes) != 1 or 0 in sizes:
            got = f"{name} in lists of {sorted(sizes)[:9]}"
            raise foreign(files[0], got, "lists of one length")
    return {name: sizes.pop() for name, sizes in widths.items()}, n_rows


def _lines(
    file: Path,
    batch: pa.RecordBatch,
    hooks: dict[str, str],
    widths: dict[str, int],
    label: str | None,
    depth: int,
) -> _Batch:
    """The sequences of a batch: all its lines as one, or one each."""
    lengths: Array | None = None

    def column_of(name: str, expected: str) -> pa.Array:
        nonlocal lengths
        column = batch.column(name)
        if depth == 2:
            sizes, column = lists_of(column, name, file)
            if lengths is not None and (sizes != lengths).any():
                raise foreign(file, f"{name} of other lengths", expected)
            lengths = sizes
        return column

    rows: list[Array] = []
    for name, dtype in hooks.items():
        flat = lists_of(column_of(name, "those of the other columns"), name, file)[1]
        rows.append(numbers_of(flat, name, dtype, file).reshape(-1, widths[name]))
    ids: Array | None = None
    if label is not None:
        column = column_of(label, "one per row")
        refuse_nulls(column, label, file)
        ids = column.to_numpy(zero_copy_only=False)
    return rows, ids, None if lengths is None else lengths.tolist()
