"""Sets of activations made elsewhere: what they hold, and what they do not say.

Opening one reads the form of every file, so that a truncated file or a width that differs is found
before anything is written. Facts about the forms: SAELens ``cache_activations_runner`` (6.54), the
``ExampleHiddenStatesConnector`` of vLLM (0.32), ``train/data.py`` of speculators.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.errors import ActdsError, not_installed
from actds.exchange.tensors import StoredTensor, foreign, read_header
from actds.format.arrays import DTYPES, from_torch

if TYPE_CHECKING:
    import torch

__all__ = ["KINDS", "Block", "ForeignHook", "ForeignSet", "files_of", "open_foreign"]

Array = npt.NDArray[Any]
BLOCK_ROWS = 4096
"""Rows of a sequence that are read at a time."""
NEVER_SAID = ("attempt", "chunk", "flags", "phase", "step")
"""Columns of the token table that no such set has."""
_ARROW_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_WORDS = re.compile(r"(\d+)").split


@dataclass(frozen=True)
class ForeignHook:
    """The rows of one place in the model.

    Args:
        called: what the set calls it; empty where it gives no name.
        d_model: channels of a row.
        dtype: type of the values.
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
        blocks: reads its rows.
        left_out: what else it holds, which is not imported.
    """

    kind: str
    files: list[Path]
    hooks: list[ForeignHook]
    unknown: tuple[str, ...]
    blocks: Callable[[], Iterator[Block]]
    left_out: tuple[str, ...] = field(default=())


def open_foreign(path: Path, kind: str | None = None, dtype: str | None = None) -> ForeignSet:
    """Return what a set holds, after a look at the form of each of its files.

    Args:
        path: a file, or a folder of them.
        kind: one of ``KINDS``; None looks at the names of the files.
        dtype: type of two-byte values that NumPy has no name for.

    Raises:
        ActdsError: E019 it is no such set, truncated, or mixes widths or types; E009 an unknown
            kind; E011 ``.pt`` files without torch.
    """
    if kind is not None and kind not in KINDS:
        raise ActdsError("E009", "kind", got=repr(kind)[:80], expected=f"one of {_names()}")
    if not path.exists():
        raise foreign(path, "no such path", "a file, or a folder of files")
    found = [kind] if kind is not None else [k for k in KINDS if files_of(path, k)]
    if len(found) > 1:
        raise foreign(
            path, f"files of {' and '.join(found)}", f'one kind, for example kind="{found[0]}"'
        )
    if not found or not (files := files_of(path, found[0])):
        raise foreign(path, f"no file of {found[0] if found else _names()}", "a set of activations")
    return KINDS[found[0]][1](path, files, dtype)


def _names() -> str:
    return ", ".join(KINDS)


def files_of(path: Path, kind: str) -> list[Path]:
    """Return the files of a kind, in the order of the numbers in their names.

    Raises:
        ActdsError: E019 ``state.json`` of a saved Arrow dataset names what is not there.
    """
    if kind == "sae-lens":
        state = path / "state.json"
        if not (state.is_file() and (path / "dataset_info.json").is_file()):
            return []
        try:
            names = [str(one["filename"]) for one in json.loads(state.read_bytes())["_data_files"]]
        except (ValueError, KeyError, TypeError):
            raise foreign(state, "a document that cannot be read", "data files") from None
        files = [path / name for name in names if Path(name).name == name]
        for file in files:
            if not file.is_file():
                raise foreign(file, "no such file", "every file that state.json names")
        return files
    suffix = KINDS[kind][0]
    if path.is_file():
        return [path] if path.suffix == suffix else []
    files = [one for one in path.iterdir() if one.suffix == suffix and one.is_file()]
    return sorted(files, key=lambda one: [int(w) if w.isdigit() else w for w in _WORDS(one.name)])


# Tensors by sequence: vLLM, speculators, and what torch saves.


@dataclass(frozen=True)
class _Sequence:
    """One sequence of rows of a file, not yet read: ``(n, d_model)`` of each hook."""

    rows: list[Array]
    dtypes: list[str]
    token_ids: Array | None
    position: Array | None


def _open_sequences(
    kind: str, files: list[Path], load: Callable[[Path], tuple[list[_Sequence], set[str]]]
) -> ForeignSet:
    """Return a set of files that each hold one sequence or several."""
    forms: dict[tuple[tuple[int, str], ...], Path] = {}
    unknown, left_out = set(NEVER_SAID), set()
    for file in files:
        sequences, other = load(file)
        left_out |= other
        for one in sequences:
            form = tuple(
                (rows.shape[1], name) for rows, name in zip(one.rows, one.dtypes, strict=True)
            )
            forms.setdefault(form, file)
            if len(forms) > 1:
                got, expected = (f"{_form(f)} in {p}" for f, p in reversed(forms.items()))
                raise foreign(file, got, expected)
            unknown |= {"token_id"} if one.token_ids is None else set()
            unknown |= {"position"} if one.position is None else set()
            _check_labels(file, one)
    hooks = [ForeignHook("", width, dtype) for width, dtype in next(iter(forms), ())]

    def blocks() -> Iterator[Block]:
        number = 0
        for file in files:
            for one in load(file)[0]:
                yield from _cut(number, one, "token_id" not in unknown)
                number += 1

    if not hooks:
        raise foreign(files[0], "no row", "activations")
    return ForeignSet(kind, files, hooks, tuple(sorted(unknown)), blocks, tuple(sorted(left_out)))


def _form(form: Sequence[tuple[int, str]]) -> str:
    return ", ".join(f"{dtype} rows of {width}" for width, dtype in form)


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


def _cut(number: int, one: _Sequence, tokens: bool) -> Iterator[Block]:
    for start in range(0, len(one.rows[0]), BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, len(one.rows[0]))
        where = np.arange(start, stop) if one.position is None else one.position[start:stop]
        ids = one.token_ids[start:stop] if tokens and one.token_ids is not None else None
        bits = [
            np.ascontiguousarray(rows[start:stop]).view(DTYPES[dtype].bits)
            for rows, dtype in zip(one.rows, one.dtypes, strict=True)
        ]
        yield Block(number, where, ids, bits)


def _known_type(place: object, dtype: str) -> str:
    if dtype not in DTYPES:
        raise foreign(place, f"values of {dtype}", f"one of {', '.join(DTYPES)}, unrounded")
    return dtype


def _open_safetensors(path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Open files with ``hidden_states (n, n_hooks, d_model)`` and ``token_ids (n,)``."""

    def load(file: Path) -> tuple[list[_Sequence], set[str]]:
        tensors, _ = read_header(file)
        states = tensors.pop("hidden_states", None)
        if states is None or len(states.shape) not in (2, 3):
            got = f"tensors {', '.join(sorted(tensors)) or 'none'}" if states is None else (
                f"hidden_states of shape {states.shape}"
            )  # fmt: skip
            raise foreign(file, got, "hidden_states (tokens, hooks, d_model)")
        kind = _known_type(f"{file} hidden_states", states.dtype)
        values = states.map()
        values = values[:, None] if values.ndim == 2 else values
        rows = [values[:, n] for n in range(values.shape[1])]
        ids = _labels(tensors.pop("token_ids", tensors.pop("input_ids", None)))
        given = _labels(tensors.pop("positions", tensors.pop("position_ids", None)))
        # The connector stores every token that was fed, from the first: one row for each.
        position = np.arange(len(values)) if given is None and ids is not None else given
        return [_Sequence(rows, [kind] * len(rows), ids, position)], set(tensors)

    return _open_sequences("safetensors", files, load)


def _labels(tensor: StoredTensor | None) -> Array | None:
    return None if tensor is None else tensor.map()


def _open_torch(path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Open what torch saved: speculators' samples, or tensors of rows."""
    try:
        import torch
    except ImportError:
        raise not_installed("torch", "torch") from None

    def load(file: Path) -> tuple[list[_Sequence], set[str]]:
        try:
            # Tensors alone: a pickle may run anything.
            data = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            got = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise foreign(file, got, "tensors that torch saved, whole") from None
        if isinstance(data, torch.Tensor):
            return [_of_tensor(file, one) for one in _sequences(file, data)], set()
        if not isinstance(data, dict) or "hidden_states" not in data:
            keys = ", ".join(map(str, data)) if isinstance(data, dict) else type(data).__name__
            raise foreign(file, keys[:200], "a tensor, or a dict with hidden_states")
        given = data.pop("hidden_states")
        if isinstance(given, torch.Tensor):
            given = list(given.unbind(1)) if given.ndim == 3 else [given]
        if not isinstance(given, list) or not all(isinstance(t, torch.Tensor) for t in given):
            raise foreign(file, f"hidden_states of {type(given).__name__}", "tensors")
        ids = data.pop("input_ids", data.pop("token_ids", None))
        if not given or len({tuple(t.shape[:1]) for t in given}) != 1:
            raise foreign(file, f"{len(given)} tensors of other lengths", "one row per token")
        parts = [_of_tensor(file, one) for one in given]
        if not isinstance(ids, torch.Tensor | None):
            raise foreign(file, f"input_ids of {type(ids).__name__}", "a tensor")
        tokens = None if ids is None else ids.reshape(-1).numpy()
        position = None if tokens is None else np.arange(len(parts[0].rows[0]))
        rows, dtypes = [p.rows[0] for p in parts], [p.dtypes[0] for p in parts]
        return [_Sequence(rows, dtypes, tokens, position)], set(map(str, data))

    return _open_sequences("pt", files, load)


def _sequences(file: Path, data: torch.Tensor) -> list[torch.Tensor]:
    if data.ndim not in (2, 3):
        raise foreign(file, f"a tensor {tuple(data.shape)}", "(rows, d_model), or sequences of it")
    return [data] if data.ndim == 2 else list(data)


def _of_tensor(file: Path, tensor: torch.Tensor) -> _Sequence:
    """Return the rows of a tensor of which neither tokens nor positions are known."""
    if tensor.ndim != 2:
        raise foreign(file, f"a tensor {tuple(tensor.shape)}", "(rows, d_model)")
    name = _known_type(file, str(tensor.dtype).removeprefix("torch."))
    return _Sequence([from_torch(tensor)], [name], None, None)


# One array per hook.


def _open_npy(path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Open arrays ``(rows, d_model)`` or ``(sequences, rows, d_model)``, a hook each."""
    arrays = {file: _map_npy(file) for file in files}
    shape = next(iter(arrays.values())).shape[:-1]
    hooks, parts = [], []
    for file, array in arrays.items():
        if array.ndim not in (2, 3) or 0 in array.shape:
            raise foreign(file, f"an array {array.shape}", "(rows, d_model), or sequences of it")
        if array.shape[:-1] != shape:
            raise foreign(file, f"an array {array.shape}", f"rows {shape}, as in {files[0].name}")
        name = _npy_type(file, array, dtype)
        hooks.append(ForeignHook(file.stem, array.shape[-1], name))
        parts.append(array if array.ndim == 3 else array[None])

    def blocks() -> Iterator[Block]:
        dtypes = [hook.dtype for hook in hooks]
        for number in range(len(parts[0])):
            rows = [array[number] for array in parts]
            yield from _cut(number, _Sequence(rows, dtypes, None, None), False)

    unknown = {*NEVER_SAID, "token_id", "position"} | ({"request"} if len(shape) == 1 else set())
    return ForeignSet("npy", files, hooks, tuple(sorted(unknown)), blocks)


def _map_npy(file: Path) -> Array:
    try:
        array: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise foreign(file, str(error)[:200] or "no array", "a .npy file, whole") from None
    return array


def _npy_type(file: Path, array: Array, dtype: str | None) -> str:
    """Return the type of an array's values; two bytes without a name are what the caller says."""
    for name, kind in DTYPES.items():
        if array.dtype == kind.native and name != "bfloat16":
            return name
    if array.dtype in (np.dtype("V2"), np.dtype("<u2")):
        if dtype in ("bfloat16", "float16"):
            return dtype
        raise foreign(file, f"values of {array.dtype}", 'a name for them: dtype="bfloat16"')
    return _known_type(file, str(array.dtype))


# SAELens.


def _open_sae_lens(path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Open a saved Arrow dataset with one two-dimensional array per hook and window."""
    info = path / "dataset_info.json"
    features: dict[str, Any] = {}
    with suppress(ValueError, AttributeError):
        features = json.loads(info.read_bytes()).get("features", {})
    try:
        two = {n: f for n, f in features.items() if f.get("_type") == "Array2D"}
        sizes = {int(f["shape"][0]) for f in two.values()}
        hooks = [
            ForeignHook(name, int(f["shape"][1]), _known_type(info, str(f["dtype"])))
            for name, f in two.items()
        ]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise foreign(info, "features that cannot be read", "windows of activations") from None
    if len(sizes) != 1 or not hooks:
        got = f"windows of {', '.join(map(str, sorted(sizes))) or 'no hook'}"
        raise foreign(info, got, "Array2D features of one context size")
    size, tokens = sizes.pop(), "token_ids" in features
    names = [hook.called for hook in hooks] + (["token_ids"] if tokens else [])
    for file in files:
        _check_end(file)

    def blocks() -> Iterator[Block]:
        number = 0
        for batch, file in _batches(files, names):
            bits = [_flat(batch.column(h.called), h, size, batch.num_rows, file) for h in hooks]
            ids = _tokens(batch, size, file) if tokens else None
            for n in range(batch.num_rows):
                cut = slice(n * size, (n + 1) * size)
                part = _Sequence(
                    [b[cut] for b in bits], [h.dtype for h in hooks],
                    None if ids is None else ids[cut], None,
                )  # fmt: skip
                yield from _cut(number, part, tokens)
                number += 1

    unknown = {*NEVER_SAID, "position"} | (set() if tokens else {"token_id"})
    # What actds export packs are rows of any requests.
    unknown |= {"request"} if (path / "actds_export.json").exists() else set()
    other = tuple(sorted(set(features) - set(names)))
    return ForeignSet("sae-lens", files, hooks, tuple(sorted(unknown)), blocks, other)


def _check_end(file: Path) -> None:
    """Refuse a stream without its end marker, which pyarrow takes for a whole one."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - len(_ARROW_END)))
        if stream.read() != _ARROW_END:
            raise foreign(file, "no end marker", "an Arrow stream, whole")


def _batches(files: list[Path], names: list[str]) -> Iterator[tuple[pa.RecordBatch, Path]]:
    for file in files:
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                missing = [name for name in names if name not in stream.schema.names]
                if missing:
                    got = f"columns {', '.join(stream.schema.names)}"
                    raise foreign(file, got, f"also {', '.join(missing)}")
                for batch in stream:
                    yield batch, file
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, ActdsError):
                raise
            raise foreign(file, str(error).splitlines()[0][:200], "an Arrow stream") from None


def _flat(column: pa.Array, hook: ForeignHook, size: int, n_windows: int, file: Path) -> Array:
    """Return the rows of a column of windows, after a look at the length of each."""
    windows = column.storage if isinstance(column, pa.ExtensionArray) else column
    rows = windows.flatten()
    wrong = n_windows != len(windows) or windows.null_count or rows.null_count
    widths = set(rows.value_lengths().unique().to_pylist()) if not wrong else set()
    lengths = set(windows.value_lengths().unique().to_pylist()) if not wrong else set()
    flat = rows.flatten()
    if wrong or flat.null_count or not widths <= {hook.d_model} or not lengths <= {size}:
        got = f"{hook.called} windows of {sorted(lengths)} rows of {sorted(widths)}"
        raise foreign(file, got, f"{size} rows of {hook.d_model}")
    values = flat.to_numpy(zero_copy_only=True)
    if values.dtype != DTYPES[hook.dtype].native:
        raise foreign(file, f"{hook.called} of {values.dtype}", hook.dtype)
    shaped: Array = values.reshape(-1, hook.d_model)
    return shaped


def _tokens(batch: pa.RecordBatch, size: int, file: Path) -> Array:
    column = batch.column("token_ids")
    ids = column.flatten()
    if column.null_count or ids.null_count or len(ids) != batch.num_rows * size:
        raise foreign(file, f"{len(ids)} token_ids", f"{size} for each of {batch.num_rows} windows")
    values: Array = ids.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "iu" or (len(values) and values.min() < 0):
        raise foreign(file, f"token_ids of {values.dtype}", "numbers from 0")
    return values


Opener = Callable[[Path, list[Path], "str | None"], ForeignSet]
KINDS: dict[str, tuple[str, Opener]] = {
    "sae-lens": ("", _open_sae_lens),
    "safetensors": (".safetensors", _open_safetensors),
    "pt": (".pt", _open_torch),
    "npy": (".npy", _open_npy),
}
"""What ``actds import --from`` knows: the suffix of its files, and what opens them."""
