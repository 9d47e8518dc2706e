"""The doctor: what a set of activations made elsewhere holds, and what it can never answer.

Only headers are read, nothing is written, and nothing is unpickled but tensors.
"""

from __future__ import annotations

import json
import os
import shlex
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from actds import layout
from actds.errors import ActdsError, not_installed
from actds.exchange.export import RECORD_FILE
from actds.exchange.foreign import KINDS, ForeignSet, files_of, open_foreign
from actds.exchange.importing import named_hook, own_name
from actds.exchange.tensors import foreign, read_header
from actds.store import local_folder

__all__ = ["FoundArray", "FoundSet", "Lack", "Report", "doctor"]

MAX_FAULTS = 20
MAX_FOLDERS = 50
_SUFFIXES = {
    "sae-lens": ".arrow", "safetensors": ".safetensors", "pt": ".pt", "npy": ".npy",
    "npz": ".npz", "parquet": ".parquet", "datasets": ".arrow",
}  # fmt: skip
"""Forms, and the suffix of their files; those of ``KINDS`` can be imported."""
_ANY = -1
"""Size of an axis that differs, or of which nobody says it."""
MAX_INFO_NBYTES = 1 << 24
_ALSO_PT = (".pth", ".bin")

_COLUMNS = {
    "token_id": ("token_ids", "input_ids", "token_id", "tokens"),
    "position": ("positions", "position_ids", "position"),
    "request": ("request", "request_id", "request_ids", "doc_id", "sequence_id", "sample_id"),
    "phase": ("phase",),
    "step": ("step", "step_id"),
    "mask": ("attention_mask", "loss_mask"),
}
"""Names under which arrays that label rows are known, by what they label."""
_WORDS = {
    "token_id": "token ids", "position": "positions", "request": "request ids",
    "phase": "the phase (prefill or decode)", "step": "scheduler steps",
    "flags": "flags of special tokens and padding",
}  # fmt: skip
_UNKNOWABLE = {
    "token_id": "which token a row belongs to: no filter or class by token, no text beside a "
    "feature, and repeated prefixes cannot be seen",
    "position": "where in its text a row is: BOS and attention sinks cannot be excluded, and "
    "padding cannot be recognised",
    "request": "which rows are of one text: no split by request, so held-out rows may be of "
    "training texts; how well rows are mixed is unknown",
    "phase": "whether a row is of a prompt or generated: prefill and decode cannot be compared or "
    "weighted",
    "step": "with which others a row was computed: batch composition, load and time cannot be "
    "tested as causes",
    "flags": "which rows are padding or special tokens: a mask applied before is not recorded",
}
"""What cannot be answered without a column of the token table."""
_NEVER = {
    "a drop log": "which computed rows are missing and why: whether loss depends on content "
    "(MNAR) cannot be tested",
    "a census": "how many rows there should be: a short file is a short text",
    "prefix-cache hits": "whether rows of cached prefixes are missing, or are those of another "
    "request",
    "model and weights": "which model, revision and quantization the rows are of",
    "precision": "in which type the rows were computed: float32 files may hold values that were "
    "rounded to bfloat16 before",
    "a check of the rows": "whether the rows are those of a plain forward: an off-by-one layer or "
    "a stale buffer looks the same",
    "digests": "whether a byte changed since it was written",
}
"""What no such set has, and what cannot be answered without it."""


@dataclass(frozen=True)
class FoundArray:
    """Arrays of one name, type and width.

    Args:
        name: as the files call it; of ``.npy`` files the name of the file.
        dtype: type of the values, as the files say it.
        shape: of one; None stands for an axis that differs from file to file.
        n: how many there are.
        n_rows: their rows in all: every axis but the last, as far as it is known, multiplied.
    """

    name: str
    dtype: str
    shape: list[int | None]
    n: int
    n_rows: int


@dataclass(frozen=True)
class Lack:
    """Something that a set does not say, and what nobody can know without it."""

    missing: str
    unknowable: str


@dataclass(frozen=True)
class FoundSet:
    """The files of one form.

    Args:
        kind: the form: one that ``actds import --from`` takes, or ``npz``, ``parquet``,
            ``datasets``.
        n_files: how many files it has.
        nbytes: their size.
        arrays: what is in them.
        hooks: places of the model: name, channels and type of each; empty where it cannot be
            imported.
        n_rows: rows of a hook.
        faults: what is wrong with files, one line each.
        lacks: what it does not say.
        command: what would import it; None where nothing can.
        refused: why it cannot be imported as it is; None where it can.
    """

    kind: str
    n_files: int
    nbytes: int
    arrays: list[FoundArray]
    hooks: list[dict[str, Any]]
    n_rows: int
    faults: list[str]
    lacks: list[Lack]
    command: str | None
    refused: str | None


@dataclass(frozen=True)
class Report:
    """What the doctor says.

    Args:
        path: as it was given.
        is_dataset: it is a dataset of this format already.
        sets: what was found, a set per form of files.
        elsewhere: folders below with such files, which were not looked at.
        others: files of no known form.
    """

    path: str
    is_dataset: bool
    sets: list[FoundSet] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    others: int = 0

    @property
    def can_import(self) -> bool:
        """Return whether there is a command that imports some of it."""
        return any(one.command for one in self.sets)


def doctor(path: str | os.PathLike[str]) -> Report:
    """Return what a set of activations made elsewhere holds, lacks, and how to import it.

    Headers of all files are read, values are not; nothing is written. ``.pt`` files are opened as
    tensors alone: what else a pickle holds is refused, not run.

    Args:
        path: a file, or a folder of files: a cache of SAELens, hidden states of vLLM or
            speculators, ``.pt``, ``.npy``, ``.npz``, Parquet, or a saved Hugging Face dataset.

    Raises:
        ActdsError: E019 there is no such path, or it cannot be listed; E009 it is no local path.
    """
    folder = local_folder(os.fspath(path))
    if folder is None:
        raise ActdsError("E009", "PATH", got=str(path)[:200], expected="a local file or folder")
    if not folder.exists():
        raise foreign(folder, "no such path", "a file, or a folder of files")
    if (folder / layout.GENESIS).is_file():
        return Report(str(path), True)
    try:
        files = [folder] if folder.is_file() else sorted(_files(folder))
    except OSError as error:
        raise foreign(folder, error.strerror or str(error), "a readable folder") from None
    kinds = _kinds(folder, files)
    sets = [_examine(folder, kind, mine) for kind, mine in kinds.items()]
    known = {file for mine in kinds.values() for file in mine}
    elsewhere = [] if folder.is_file() else list(_elsewhere(folder))
    others = [file for file in files if file not in known and file.suffix not in (".json", ".lock")]
    return Report(str(path), False, sets, elsewhere, len(others))


def _files(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file():
                yield folder / entry.name


def _kinds(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Return the files by form; a saved Arrow dataset is SAELens' where its columns say so."""
    found: dict[str, list[Path]] = {}
    for kind, suffix in _SUFFIXES.items():
        mine = [f for f in files if f.suffix == suffix or (kind == "pt" and f.suffix in _ALSO_PT)]
        if mine and kind not in ("sae-lens", "datasets"):
            found[kind] = mine
    arrow = [file for file in files if file.suffix == ".arrow"]
    if arrow:
        try:
            windows = open_foreign(folder, "sae-lens") if folder.is_dir() else None
        except ActdsError:
            windows = None
        found["sae-lens" if windows is not None else "datasets"] = arrow
    return found


def _elsewhere(folder: Path) -> Iterator[str]:
    """Yield the folders below that hold files of a known form, a few of them."""
    n = 0
    for root, folders, names in os.walk(folder):
        folders.sort()
        here = Path(root)
        if len(here.relative_to(folder).parts) >= 3:
            folders.clear()
        if here == folder:
            continue
        suffixes = {Path(name).suffix for name in names}
        if layout.GENESIS in names or suffixes & {*_SUFFIXES.values(), *_ALSO_PT}:
            yield str(here.relative_to(folder))
            n += 1
        if n == MAX_FOLDERS:
            return


def _examine(path: Path, kind: str, files: list[Path]) -> FoundSet:
    """Return what the files of one form hold."""
    seen: dict[tuple[str, str, int | None, int], list[tuple[int, ...]]] = {}
    faults: list[str] = []
    for file in files:
        try:
            for name, dtype, shape in _READERS[kind](file):
                width = shape[-1] if len(shape) > 1 else None
                seen.setdefault((name, dtype, width, len(shape)), []).append(shape)
        except ActdsError as error:
            faults.append(str(error).splitlines()[0])
        except OSError as error:
            faults.append(str(foreign(file, error.strerror or str(error), "a readable file")))
    arrays = [
        FoundArray(name, dtype, _common(shapes), len(shapes), sum(map(_rows, shapes)))
        for (name, dtype, _, _), shapes in sorted(seen.items(), key=lambda one: one[0][:2])
    ]
    opened, command, refused = _importable(path, kind)
    hooks = [] if opened is None else [
        {"name": own_name(hook) or None, "d_model": hook.d_model, "dtype": hook.dtype}
        for hook in opened.hooks
    ]  # fmt: skip
    return FoundSet(
        kind=kind,
        n_files=len(files),
        nbytes=sum(file.stat().st_size for file in files),
        arrays=arrays,
        hooks=hooks,
        n_rows=_n_rows(arrays, kind, len(hooks)),
        faults=[*faults[:MAX_FAULTS],
                *([f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else [])],
        lacks=_lacks(path, opened, {array.name for array in arrays}),
        command=command,
        refused=refused,
    )  # fmt: skip


def _rows(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape[:-1] if len(shape) > 1 else shape:
        n *= 1 if size == _ANY else size
    return n


def _n_rows(arrays: list[FoundArray], kind: str, n_hooks: int) -> int:
    """Return the rows of one hook: of those that a set holds side by side, or one per array."""
    labels = {name for names in _COLUMNS.values() for name in names}
    counts = [one.n_rows for one in arrays if len(one.shape) > 1 and one.name not in labels]
    if kind in ("safetensors", "pt") and n_hooks:
        return sum(counts) // n_hooks
    return max(counts, default=0)


def _common(shapes: list[tuple[int, ...]]) -> list[int | None]:
    axes = [set(sizes) for sizes in zip(*shapes, strict=True)]
    return [sizes.pop() if len(sizes) == 1 and sizes != {_ANY} else None for sizes in axes]


def _importable(path: Path, kind: str) -> tuple[ForeignSet | None, str | None, str | None]:
    """Return the set as an import would open it, the command, or why there is none."""
    if kind not in KINDS:
        words = "actds import does not read this form: save each hook's rows as one .npy file"
        return None, None, words
    more: list[str] = []
    try:
        if not files_of(path, kind):
            return None, None, f"actds import reads {_SUFFIXES[kind]} files: rename them"
        try:
            found = open_foreign(path, kind)
        except ActdsError as error:
            if kind != "npy" or "dtype=" not in error.expected:
                raise
            # Two bytes without a name: of those who save such arrays nearly all mean bfloat16.
            found = open_foreign(path, kind, "bfloat16")
            more = ["--dtype", "bfloat16"]
    except ActdsError as error:
        return None, None, str(error).splitlines()[0]
    if len([k for k in KINDS if _has(path, k)]) > 1:
        more = ["--from", kind, *more]
    if any(named_hook(own_name(hook), hook) is None for hook in found.hooks):
        for _ in found.hooks:
            more += ["--hook", "KIND.LAYER"]
    more += ["--declare", "model.name=NAME"]
    return found, shlex.join(["actds", "import", str(path), "acts", *more]), None


def _has(path: Path, kind: str) -> bool:
    try:
        return bool(files_of(path, kind))
    except ActdsError:
        return False


def _lacks(path: Path, opened: ForeignSet | None, names: set[str]) -> list[Lack]:
    """Return what a set does not say: by what an import would mark, else by names of arrays."""
    if opened is not None:
        unknown = set(opened.unknown)
    else:
        unknown = {column for column in _UNKNOWABLE if not names & set(_COLUMNS.get(column, ()))}
    lacks = [Lack(_WORDS[one], _UNKNOWABLE[one]) for one in _UNKNOWABLE if one in unknown]
    hooks = [] if opened is None else opened.hooks
    if opened is None or any(named_hook(own_name(hook), hook) is None for hook in hooks):
        place = "which layer and which place of it the rows are of, and whether two sets agree"
        lacks.append(Lack("names of hooks", place))
    folder = path if path.is_dir() else path.parent
    if (folder / RECORD_FILE).is_file():
        # Written by actds export: it names the dataset, and that one knows the rest.
        return lacks
    return [*lacks, *(Lack(missing, words) for missing, words in _NEVER.items())]


# What files hold: name, type and shape of each array, from headers alone.

_Arrays = Iterator[tuple[str, str, tuple[int, ...]]]


def _of_safetensors(file: Path) -> _Arrays:
    for name, tensor in read_header(file)[0].items():
        yield name, tensor.dtype, tensor.shape


def _of_torch(file: Path) -> _Arrays:
    try:
        import torch
    except ImportError:
        raise not_installed("torch", "torch") from None
    try:
        data = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        got = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise foreign(file, got, "tensors that torch saved; nothing else is unpickled") from None
    yield from _tensors(file.stem if isinstance(data, torch.Tensor) else "", data, 0)


def _tensors(name: str, data: Any, depth: int) -> _Arrays:
    """Yield the tensors of what a file held, one level of dicts and lists after the other."""
    import torch

    if isinstance(data, torch.Tensor):
        yield name, str(data.dtype).removeprefix("torch."), tuple(data.shape)
    elif isinstance(data, dict) and depth < 3:
        for key, value in data.items():
            yield from _tensors(f"{name}.{key}" if name else str(key)[:200], value, depth + 1)
    elif isinstance(data, list | tuple) and depth < 3:
        for value in data:
            yield from _tensors(name, value, depth + 1)


def _of_npy(file: Path) -> _Arrays:
    with file.open("rb") as opened:
        dtype, shape = _npy_header(file, opened)
    nbytes = file.stat().st_size
    if nbytes < dtype.itemsize * int(np.prod(shape, dtype=object)):
        raise foreign(file, f"{nbytes} bytes", f"values of shape {shape}: it is truncated")
    yield file.stem, str(dtype), shape


def _npy_header(file: Path, opened: Any, name: str = "") -> tuple[np.dtype[Any], tuple[int, ...]]:
    place = f"{file} {name}".strip()
    # Typed as Any: the stubs of NumPy do not know the bound on the header.
    form: Any = np.lib.format
    try:
        version = form.read_magic(opened)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of the header")
        read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
        shape, _, dtype = read(opened, max_header_size=1 << 16)
    except (ValueError, EOFError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        got = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise foreign(place, got, "a .npy array") from None
    if dtype.hasobject:
        raise foreign(place, "pickled objects, which are not read", "an array of numbers")
    return dtype, tuple(int(size) for size in shape)


def _of_npz(file: Path) -> _Arrays:
    try:
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                with archive.open(name) as opened:
                    dtype, shape = _npy_header(file, opened, name)
                yield name.removesuffix(".npy"), str(dtype), shape
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise foreign(file, str(error)[:200] or "no archive", "a .npz file, whole") from None


def _of_arrow(file: Path) -> _Arrays:
    """Yield the columns of an Arrow stream or file, with the sizes that their types say."""
    n_rows = 0
    try:
        with pa.memory_map(str(file)) as source:
            try:
                stream = pa.ipc.open_stream(source)
                schema = stream.schema
                n_rows = sum(batch.num_rows for batch in stream)
            except pa.ArrowInvalid:
                source.seek(0)
                reader = pa.ipc.open_file(source)
                schema = reader.schema
                n_rows = sum(reader.get_batch(n).num_rows for n in range(reader.num_record_batches))
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, ActdsError):
            raise
        raise foreign(file, str(error).splitlines()[0][:200], "an Arrow stream") from None
    features = _features(file.parent)
    for column in schema:
        yield column.name, *_column(column.type, n_rows, features.get(column.name))


def _features(folder: Path) -> dict[str, Any]:
    """Return what ``datasets`` says of the columns; empty where it says nothing."""
    try:
        with (folder / "dataset_info.json").open("rb") as file:
            found = json.loads(file.read(MAX_INFO_NBYTES)).get("features")
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _column(kind: pa.DataType, n_rows: int, feature: Any) -> tuple[str, tuple[int, ...]]:
    """Return the type of a column's values and its shape, as far as somebody says it."""
    given = feature.get("shape") if isinstance(feature, dict) else None
    sizes = [n if isinstance(n, int) else _ANY for n in given] if isinstance(given, list) else []
    if isinstance(kind, pa.BaseExtensionType):  # of a library that is imported here
        kind = kind.storage_type
    shape = [n_rows]
    while (
        pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    ):
        said = kind.list_size if pa.types.is_fixed_size_list(kind) else _ANY
        shape.append(sizes.pop(0) if sizes else said)
        kind = kind.value_type
    return {"float": "float32", "double": "float64"}.get(str(kind), str(kind)), tuple(shape)


def _of_parquet(file: Path) -> _Arrays:
    """Yield the columns by their Parquet types alone: a stored Arrow schema is not parsed."""
    try:
        with pq.ParquetFile(file) as opened:
            metadata = opened.metadata
            columns = [metadata.schema.column(n) for n in range(metadata.num_columns)]
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, ActdsError):
            raise
        raise foreign(file, str(error).splitlines()[0][:200], "a Parquet file, whole") from None
    for column in columns:
        nested = (_ANY,) * column.max_repetition_level
        dtype = _PARQUET.get(column.physical_type, column.physical_type.lower())
        yield column.path.split(".")[0], dtype, (metadata.num_rows, *nested)


_LISTS = (pa.lib.Type_LIST, pa.lib.Type_LARGE_LIST, pa.lib.Type_FIXED_SIZE_LIST)
_PARQUET = {"FLOAT": "float32", "DOUBLE": "float64", "BYTE_ARRAY": "bytes"}
_READERS: dict[str, Callable[[Path], _Arrays]] = {
    "sae-lens": _of_arrow,
    "datasets": _of_arrow,
    "safetensors": _of_safetensors,
    "pt": _of_torch,
    "npy": _of_npy,
    "npz": _of_npz,
    "parquet": _of_parquet,
}
