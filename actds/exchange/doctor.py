"""The doctor: what a set of activations made elsewhere holds, and what it can never answer.

Only headers are read, nothing is written, and nothing is unpickled but tensors.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from actds.errors import ActdsError
from actds.exchange.containers import ANY, foreign, itemsize, read_document, reading
from actds.exchange.foreign import LABELS, RECORD_FILE, ForeignSet, own_name
from actds.exchange.importing import named_hook
from actds.exchange.opening import KINDS, arrays_of, files_of, open_foreign, reader
from actds.format.arrays import widen
from actds.store import layout, local_folder

MAX_FAULTS = 20
MAX_FOLDERS = 50
_SUFFIXES = {kind: suffix or ".arrow" for kind, (suffix, _) in KINDS.items()}
_SUFFIXES |= {"parquet": ".parquet", "raw": ".dat"}
"""Forms, and the suffix of their files; those of ``KINDS`` can be imported."""
_ALSO_PT = (".pth", ".bin")
_RAW_SUFFIXES = (".dat", ".raw", ".mmap", ".memmap")
_PICKLE_OR_ZIP = re.compile(rb"\x80[\x00-\x05]|PK\x03\x04")
_DOCUMENTS = "{0}.json {0}_meta.json {0}_metadata.json {0}_shape.json metadata.json meta.json"
_DOCUMENTS += " shape.json"
_WIDTHS = ("d_model", "hidden_size", "d_in", "width", "dim")
_MAX_WIDTH = 1 << 20
_TYPES = {
    "bfloat16": "bfloat16 bf16",
    "float16": "float16 fp16 f16 f2 half",
    "float32": "float32 fp32 f32 f4",
    "float64": "float64 fp64 f64 f8",
}
_WORD = re.compile("[a-z]+[0-9]*")
_SHAPE = re.compile(r"(?<![0-9a-z])[0-9]{1,18}(?:x[0-9]{1,18})+(?![0-9a-z])")
_NARROW = {"float16": 65520.0, "bfloat16": 2.0**128 * (1 - 2.0**-9)}
"""The smallest magnitudes that a narrower type rounds to infinity."""
_COLUMNS = {
    **LABELS,
    "request": ("request", "request_id", "request_ids", "doc_id", "sequence_id", "sample_id"),
    "phase": ("phase",),
    "step": ("step", "step_id"),
    "mask": ("attention_mask", "loss_mask"),
}
"""Names under which arrays that label rows are known, by what they label."""
_UNKNOWABLE = {
    "token_id": "token ids: which token a row belongs to: no filter or class by token, no text "
    "beside a feature, and repeated prefixes cannot be seen",
    "position": "positions: where in its text a row is: BOS and attention sinks cannot be "
    "excluded, and padding cannot be recognised",
    "request": "request ids: which rows are of one text: no split by request, so held-out rows "
    "may be of training texts; how well rows are mixed is unknown",
    "phase": "the phase (prefill or decode): whether a row is of a prompt or generated: prefill "
    "and decode cannot be compared or weighted",
    "step": "scheduler steps: with which others a row was computed: batch composition, load and "
    "time cannot be tested as causes",
    "flags": "flags of special tokens and padding: which rows are padding or special tokens: a "
    "mask applied before is not recorded",
}
"""A column of the token table in words, and what cannot be answered without it."""
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
class ValueCounts:
    """Rows of a hook that are not finite, all zeros, or too large for a narrower type."""

    hook: str
    n_rows: int
    not_finite: int
    zero: int
    overflow: dict[str, int]


@dataclass(frozen=True)
class FoundSet:
    """The files of one form.

    Args:
        kind: the form: one that ``actds import --from`` takes, or ``parquet``, or ``raw``.
        hooks: name, channels and type of each; empty where it cannot be imported.
        n_rows: rows of a hook.
        faults: what is wrong with files, one line each.
        command: what would import it; None where nothing can.
        refused: why it cannot be imported as it is; None where it can.
        recipe: lines of a shell that bring it in: the command, or what comes before it as well.
        values: None where nobody asked, or nothing opens it.
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
    recipe: list[str] = field(default_factory=list)
    values: list[ValueCounts] | None = None


@dataclass(frozen=True)
class Report:
    """What the doctor says.

    Args:
        is_dataset: it is a dataset of this format already.
        sets: a set per form of files.
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
        return any(foreign_set.command for foreign_set in self.sets)


def doctor(
    path: str | os.PathLike[str], *, hooks: str | Sequence[str] | None = None, values: bool = False
) -> Report:
    """Return what a set of activations made elsewhere holds, lacks, and how to import it.

    Headers of all files are read; nothing is written. ``.pt`` files are opened as tensors alone:
    what else a pickle holds is refused, not run. Files are parsed in a process with bounds of
    memory and time, which may die over one.

    Args:
        path: a file, or a folder of files: a cache of SAELens, hidden states of vLLM or
            speculators, ``.pt``, ``.npy``, ``.npz``, Parquet, or a saved Hugging Face dataset.
        hooks: names of the hooks for the command, in the order of the set.
        values: read all values as well, and count rows that are not finite or all zeros.

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
    with reading(folder, "a readable folder"):
        entries = [folder] if folder.is_file() else sorted(_entries(folder))
    reader.deaths.clear()
    files = [entry for entry in entries if entry.is_file()]
    kinds = _kinds(folder, files)
    names = [hooks] if isinstance(hooks, str) else list(hooks or ())
    sets = [_examine(folder, kind, members, names, values) for kind, members in kinds.items()]
    known = {file for members in kinds.values() for file in members}
    elsewhere = [] if folder.is_file() else list(_elsewhere(folder))
    n_others = sum(
        entry not in known
        and entry.suffix not in (".json", ".lock")
        and not layout.is_of_the_hub(entry.name)
        for entry in entries
    )
    return Report(str(path), False, sets, elsewhere, n_others)


def _entries(folder: Path) -> Iterator[Path]:
    """Yield all that is in a folder but folders: special files are counted, and never opened."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir():
                yield folder / entry.name


def _kinds(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Return the files by form; a saved Arrow dataset is SAELens' where its columns say so."""
    raw = [file for file in files if _is_raw(file)]
    by_suffix: dict[str, list[Path]] = {}
    for file in (file for file in files if file not in {*raw}):
        suffix = ".pt" if file.suffix in _ALSO_PT else file.suffix
        by_suffix.setdefault(suffix, []).append(file)
    kinds = {k: by_suffix[x] for k, x in _SUFFIXES.items() if x in by_suffix and x != ".arrow"}
    if ".arrow" in by_suffix:
        kinds["sae-lens" if _has(folder, "sae-lens") else "datasets"] = by_suffix[".arrow"]
    return {**kinds, "raw": raw} if raw else kinds


def _elsewhere(folder: Path) -> Iterator[str]:
    """Yield the folders below that hold files of a known form, a few of them."""
    n = 0
    for root, folders, names in os.walk(folder):
        folders.sort()
        place = Path(root).relative_to(folder)
        if len(place.parts) >= 3:
            folders.clear()
        suffixes = {Path(name).suffix for name in names}
        known = layout.GENESIS in names or suffixes & {*_SUFFIXES.values(), *_ALSO_PT}
        if place.parts and known:
            yield str(place)
            n += 1
        if n == MAX_FOLDERS:
            return


def _examine(path: Path, kind: str, files: list[Path], names: list[str], values: bool) -> FoundSet:
    seen: dict[tuple[str, str, int | None, int], list[tuple[int, ...]]] = {}
    faults: list[str] = []

    @contextmanager
    def noting(file: Path) -> Iterator[None]:
        try:
            with reading(file, "a readable file"):
                yield
        except ActdsError as error:
            faults.append(str(error).splitlines()[0])

    for file in () if kind == "raw" else files:
        with noting(file):
            for name, dtype, shape in arrays_of(kind, file):
                width = shape[-1] if len(shape) > 1 else None
                seen.setdefault((name, dtype, width, len(shape)), []).append(shape)
    arrays = [
        FoundArray(name, dtype, _common(shapes), len(shapes), sum(map(_rows, shapes)))
        for (name, dtype, _, _), shapes in sorted(seen.items(), key=lambda item: item[0][:2])
    ]
    opened, command, refused = _importable(path, kind, names)
    recipe = [command] if command else []
    if kind == "raw":
        refused, recipe = _of_raw(files, names)
    counts = None
    if values and opened is not None:
        with noting(path):
            counts = _count(opened)
    more = len(faults) - MAX_FAULTS
    return FoundSet(
        kind=kind,
        n_files=len(files),
        nbytes=sum(file.stat().st_size for file in files),
        arrays=arrays,
        hooks=[
            {"name": own_name(hook) or None, "d_model": hook.d_model, "dtype": hook.dtype}
            for hook in (opened.hooks if opened else ())
        ],
        n_rows=opened.n_rows if opened else _n_rows(arrays),
        faults=[*faults[:MAX_FAULTS], *([f"and {more} more"] if more > 0 else [])],
        lacks=_lacks(path, opened, {array.name for array in arrays}),
        command=command,
        refused=refused,
        recipe=recipe,
        values=counts,
    )


def _rows(shape: tuple[int, ...]) -> int:
    return prod(n for n in (shape[:-1] if len(shape) > 1 else shape) if n != ANY)


def _count(opened: ForeignSet) -> list[ValueCounts]:
    counts = [np.zeros(3 + len(_NARROW), np.int64) for _ in opened.hooks]
    for block in opened.blocks():
        for hook, total, bits in zip(opened.hooks, counts, block.bits, strict=True):
            rows = widen(bits, hook.dtype)
            is_finite, is_zero = np.isfinite(rows), (rows == 0).all(axis=1)
            total[:3] += len(rows), (~is_finite.all(axis=1)).sum(), is_zero.sum()
            largest = np.abs(np.where(is_finite, rows, 0)).max(axis=1)
            total[3:] += [(largest >= limit).sum() for limit in _NARROW.values()]
    totals = zip(opened.hooks, [total.tolist() for total in counts], strict=True)
    return [
        ValueCounts(own_name(hook), n_rows, odd, zero, dict(zip(_NARROW, over, strict=True)))
        for hook, (n_rows, odd, zero, *over) in totals
    ]


def _n_rows(arrays: list[FoundArray]) -> int:
    labels = {name for names in _COLUMNS.values() for name in names}
    counts = [x.n_rows for x in arrays if len(x.shape) > 1 and x.name not in labels]
    return max(counts, default=0)


def _common(shapes: list[tuple[int, ...]]) -> list[int | None]:
    axes = [set(sizes) for sizes in zip(*shapes, strict=True)]
    return [sizes.pop() if len(sizes) == 1 and sizes != {ANY} else None for sizes in axes]


def _of_raw(files: list[Path], names: list[str]) -> tuple[str, list[str]]:
    """What raw files do not say, and lines that make an array of each, and import them."""
    raw = [_RawFile.guess(file) for file in files]
    words, least = "raw bytes say neither type nor width", max(raw, key=lambda f: len(f.lacks))
    if least.lacks:
        nbytes = f"{least.path.stat().st_size:,} bytes are rows x channels x bytes of a value"
        words += f": put for {' and for '.join(least.lacks)} ({least.path.name}: {nbytes})"
    else:
        guesses = sorted({f"{file.dtype} with {file.d_model:,} channels" for file in raw})
        words += f": by names and documents beside them they are {', '.join(guesses)}"
    odd = {"bfloat16": "bfloat16", "float64": "float32"}
    stored = sorted({odd[file.dtype] for file in raw if file.dtype in odd})
    more = [word for dtype in stored[:1] for word in ("--dtype", dtype)]
    command = _command(Path("raw"), names, [""] * len(files), more)
    return words, ["mkdir raw", *(file.line for file in raw), command]


def _command(path: Path, names: list[str], called: list[str], more: list[str]) -> str:
    """Of hooks without a name it asks for one."""
    if len(names) != len(called):
        numbers = [re.findall(r"[0-9]+", name) for name in called]
        names = [f"KIND.{int(n[0])}" if len(n) == 1 else "KIND.LAYER" for n in numbers]
    hooks = [word for name in names for word in ("--hook", name)]
    return shlex.join(["actds", "import", str(path), "acts", *more, *hooks])


def _importable(
    path: Path, kind: str, names: list[str]
) -> tuple[ForeignSet | None, str | None, str | None]:
    """The set as an import would open it, the command, or why there is none."""
    if kind not in KINDS:
        words = "actds import does not read this form: save each hook's rows as one .npy file"
        return None, None, words
    more: list[str] = []
    try:
        if not files_of(path, kind) and not (kind == "pt" and path.is_file()):
            return None, None, f"actds import reads {_SUFFIXES[kind]} files: rename them"
        try:
            opened = open_foreign(path, kind)
        except ActdsError as error:
            # Two bytes without a name: of those who save such arrays nearly all mean bfloat16.
            match = re.search('dtype="(bfloat16|float32)"', error.expected)
            if match is None:
                raise
            opened = open_foreign(path, kind, match[1])
            more = ["--dtype", match[1]]
    except ActdsError as error:
        return None, None, str(error).splitlines()[0]
    if [k for k in KINDS if _has(path, k)] != [kind]:
        more = ["--from", kind, *more]
    called = [] if _are_named(opened) else [hook.called for hook in opened.hooks]
    return opened, _command(path, names if called else [], called, more), None


def _are_named(opened: ForeignSet) -> bool:
    return all(named_hook(own_name(hook), hook) for hook in opened.hooks)


def _has(path: Path, kind: str) -> bool:
    try:
        return bool(files_of(path, kind))
    except ActdsError:
        return False


def _lacks(path: Path, opened: ForeignSet | None, names: set[str]) -> list[Lack]:
    """What a set does not say: by what an import would mark, else by names of arrays."""
    unnamed = {column for column in _UNKNOWABLE if not names & {*_COLUMNS.get(column, ())}}
    lacks = lacks_of_columns(unnamed if opened is None else opened.unknown)
    if opened is None or not _are_named(opened):
        place = "which layer and which place of it the rows are of, and whether two sets agree"
        lacks.append(Lack("names of hooks", place))
    folder = path if path.is_dir() else path.parent
    if (folder / RECORD_FILE).is_file():
        # Written by actds export: it names the dataset, and that one knows the rest.
        return lacks
    return [*lacks, *lacks_of_every_set()]


def lacks_of_columns(unknown: Collection[str]) -> list[Lack]:
    """What nobody can know without these columns of the token table."""
    known = (words.partition(": ") for name, words in _UNKNOWABLE.items() if name in unknown)
    return [Lack(missing, unknowable) for missing, _, unknowable in known]


def lacks_of_every_set() -> list[Lack]:
    return [Lack(missing, words) for missing, words in _NEVER.items()]


def _is_raw(file: Path) -> bool:
    """By its name, of ``.bin`` by its first bytes."""
    if file.suffix != ".bin":
        return file.suffix in _RAW_SUFFIXES
    try:
        with file.open("rb") as stream:
            return not _PICKLE_OR_ZIP.match(stream.read(4))
    except OSError:
        return False


@dataclass(frozen=True)
class _RawFile:
    """A raw file, the type of its values and the channels of a row; None where nothing says it."""

    path: Path
    dtype: str | None
    d_model: int | None

    @classmethod
    def guess(cls, path: Path) -> _RawFile:
        nbytes, name = path.stat().st_size, path.stem.lower()
        match = _SHAPE.search(name)
        hints = [(tuple(map(int, match[0].split("x"))) if match else (), _dtype(name))]
        beside = (path.with_name(other.format(path.stem)) for other in _DOCUMENTS.split())
        hints += map(_of_document, beside)
        shapes = [shape for shape, _ in hints if shape and 1 <= shape[-1] <= _MAX_WIDTH]
        dtype = next((dtype for _, dtype in hints if dtype), None)
        for shape in shapes:
            if dtype is None and nbytes in (4 * prod(shape), 8 * prod(shape)):
                # Of two bytes there are two types.
                dtype = "float32" if nbytes == 4 * prod(shape) else "float64"
            if nbytes and nbytes % (shape[-1] * (itemsize(dtype) if dtype else 2)) == 0:
                return cls(path, dtype, shape[-1])
        return cls(path, dtype, None)

    @property
    def lacks(self) -> list[str]:
        """What has to be put into the line by hand, in words."""
        words = {"float32 its type": self.dtype, "D_MODEL the channels of a row": self.d_model}
        return [name for name, known in words.items() if known is None]

    @property
    def line(self) -> str:
        """The line of a shell that makes ``raw/NAME.npy`` of it."""
        # NumPy has no bfloat16: an import takes two bytes without a name as --dtype says.
        dtype = "uint16" if self.dtype == "bfloat16" else self.dtype or "float32"
        array = f'np.memmap({str(self.path)!r}, "{dtype}", "r").reshape(-1, '
        array += f"{self.d_model or 'D_MODEL'})"
        save = f"import numpy as np; np.save({f'raw/{self.path.stem}.npy'!r}, {array})"
        return f"python -c {shlex.quote(save)}"


def _dtype(text: str) -> str | None:
    words = set(_WORD.findall(text.lower()))
    return next((dtype for dtype, names in _TYPES.items() if words & {*names.split()}), None)


def _of_document(path: Path) -> tuple[tuple[int, ...], str | None]:
    """Shape (or the width alone) and type that a document says; nothing of none."""
    try:
        document = read_document(path)
    except ActdsError:
        return (), None
    shape, dtype = document.get("shape"), document.get("dtype")
    if not isinstance(shape, list):
        shape = [document[name] for name in _WIDTHS if name in document][:1]
    if not all(type(n) is int and n >= 1 for n in shape):
        shape = []
    return tuple(shape), _dtype(dtype) if isinstance(dtype, str) else None
