"""Files of other libraries, read apart: what of them is parsed is parsed in a bounded process.

Names, types and shapes come back as words, rows as bytes of a block at a time; both are checked
again here, and no file is parsed in the process of the caller.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from actds.errors import ActdsError
from actds.exchange.containers import (
    ARROW_ERRORS,
    READERS,
    features_of,
    foreign,
    leaves,
    read_document,
    reading,
)
from actds.exchange.foreign import (
    RECORD_FILE,
    ROWS_FILE,
    Block,
    ForeignHook,
    ForeignSet,
    open_datasets,
    open_npy,
    open_sae_lens,
    open_tensors,
)
from actds.format.apart import Apart, Reply, Request, cpu_seconds
from actds.format.arrays import DTYPES
from actds.text import storable

INCLUSION = "inclusion"
"""The column of ``rows.parquet`` with the probability that each row was drawn with."""
_SLACK_NBYTES, _TIMES = 256 << 20, 8
"""Memory for a file, and more for each of its bytes: compressed activations hardly get smaller."""
MAX_CHANNELS = 2**20  # of the format
MAX_LEFT_OUT, MAX_NAME = 1000, 200  # for a run record, which is bounded
_FILES_A_SECOND, _OPEN_S = 20, 8
_NUMBERS = re.compile(r"(\d+)").split
Opener = Callable[[Path, list[Path], "str | None"], ForeignSet]
KINDS: dict[str, tuple[str, Opener]] = {
    "sae-lens": ("", open_sae_lens),
    "datasets": ("", open_datasets),
    "safetensors": (".safetensors", lambda *given: open_tensors("safetensors", *given)),
    "pt": (".pt", lambda *given: open_tensors("pt", *given)),
    "npy": (".npy", open_npy),
    "npz": (".npz", lambda *given: open_tensors("npz", *given)),
}
"""What ``actds import --from`` knows: the suffix of its files, and what opens them."""
reader = Apart(f"{__name__}:answer")


def open_foreign(path: Path, kind: str | None = None, dtype: str | None = None) -> ForeignSet:
    """Return what a set holds, after a look at the form of each of its files.

    Args:
        path: a file, or a folder of them.
        kind: one of ``KINDS``; None looks at the names of the files.
        dtype: type of two-byte values without a name, and of values that the format has no type
            for, which are rounded.

    Raises:
        ActdsError: E009 an unknown kind; E019 it is no such set, truncated, mixes widths or types,
            or ends its parser; E011 ``.pt`` files without torch.
    """
    if kind is not None and kind not in KINDS:
        expected = f"one of {', '.join(KINDS)}"
        raise ActdsError("E009", "kind", got=repr(kind)[:80], expected=expected)
    with reading(path, "a file, or a folder of files"):
        kind, files = _kind_and_files(path, kind)
        [(words, _)] = reader.ask(_request("open", path, kind, files, dtype))
        left_out = (*words["left_out"], *_files_left_out(path, files))
    hooks = [ForeignHook(*hook) for hook in words["hooks"]]
    for hook in hooks:
        if not 1 <= hook.d_model <= MAX_CHANNELS:
            got = f"{hook.called} rows of {hook.d_model} channels".strip()
            raise foreign(path, got, f"1 to {MAX_CHANNELS}")

    def blocks() -> Iterator[Block]:
        for words, body in reader.ask(_request("blocks", path, kind, files, dtype)):
            yield _block(path, hooks, words, body)

    return ForeignSet(
        kind, files, hooks, tuple(words["unknown"]), words["n_rows"], blocks, left_out
    )


def _kind_and_files(path: Path, kind: str | None) -> tuple[str, list[Path]]:
    if not path.exists():
        raise foreign(path, "no such path", "a file, or a folder of files")
    if kind is not None and path.is_file():  # whatever its name
        return kind, [path]
    sets = {k: files for k in KINDS if kind in (None, k) and (files := files_of(path, k))}
    if len(sets) > 1:
        expected = f'one kind, for example kind="{next(iter(sets))}"'
        raise foreign(path, f"files of {' and '.join(sets)}", expected)
    if not sets:
        raise foreign(path, f"no file of {kind or ', '.join(KINDS)}", "a set of activations")
    return sets.popitem()


def files_of(path: Path, kind: str) -> list[Path]:
    """Return the files of a kind, in the order of the numbers in their names.

    Raises:
        ActdsError: E019 the folder cannot be listed, has one file twice, or ``state.json`` of a
            saved Arrow dataset names what is not there.
    """
    suffix = KINDS[kind][0]
    with reading(path, "files that can be read"):
        if not suffix:
            files = _arrow_files(path, kind)
        elif path.is_file():
            return [path] if path.suffix == suffix else []
        else:
            files = [file for file in path.iterdir() if file.suffix == suffix and file.is_file()]
            files.sort(key=lambda f: [int(w) if w.isdigit() else w for w in _NUMBERS(f.name)])
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
    windows = any(isinstance(entry, dict) and entry.get("_type") == "Array2D" for entry in features)
    if windows != (kind == "sae-lens"):
        return []
    document = read_document(state)
    try:
        names = [str(entry["filename"]) for entry in document["_data_files"]]
    except (KeyError, TypeError):
        raise foreign(state, "a document that cannot be read", "data files") from None
    # Old versions of datasets saved a selection as an index beside the unselected rows.
    if document.get("_indices_data_files"):
        raise foreign(state, "a saved selection", "a dataset saved after flatten_indices()")
    present = {file.name for file in path.iterdir() if file.is_file()}
    for name in names:
        if name not in present:
            got = f"no such file in the folder: {name[:80]!r}"
            raise foreign(state, got, "every file that it names")
    return [path / name for name in names]


def arrays_of(kind: str, file: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return name, type and shape of each array of a file; raises as ``open_foreign``."""
    [(words, _)] = reader.ask(_request("arrays", file, kind, [file], None))
    return [(name, dtype, tuple(shape)) for name, dtype, shape in words["arrays"]]


def inclusion_of_export(path: Path, n_rows: int) -> np.ndarray[Any, Any] | None:
    """Return the inclusion of each row of a set, float64 ``(n_rows,)``; None where none says any.

    It is in ``rows.parquet``, which ``actds export`` writes beside the files.

    Raises:
        ActdsError: E019 a table that is not there, or is of other rows; a probability that is none.
    """
    folder = path if path.is_dir() else path.parent
    file = folder / ROWS_FILE
    if not (folder / RECORD_FILE).is_file():
        return None
    drawn = read_document(folder / RECORD_FILE).get("drawn") is True
    if not file.is_file():
        if drawn:
            raise foreign(file, "no such file", "the inclusion of each row, which was drawn")
        return None
    replies = reader.ask(_request("inclusion", folder, "parquet", [file], None))
    parts = [np.frombuffer(body, "<f8") for _, body in replies]
    if not parts:
        return None
    inclusion: np.ndarray[Any, Any] = np.concatenate(parts)
    if len(inclusion) != n_rows:
        got = f"{n_rows:,} rows, and inclusion of {len(inclusion):,}"
        raise foreign(path, got, f"all files of the export: {folder}")
    if not ((inclusion > 0) & (inclusion <= 1)).all():
        raise foreign(file, "an inclusion that is no probability", "above 0, up to 1")
    return inclusion


def _files_left_out(path: Path, files: list[Path]) -> list[str]:
    if path.is_file():
        return []
    suffixes = {suffix for suffix, _ in KINDS.values() if suffix} | {".pth", ".bin", ".parquet"}
    rest = {storable(f.name) for f in path.iterdir() if f.suffix in suffixes and f.is_file()}
    return _bounded(sorted(rest - {storable(file.name) for file in files}), " files")


def _bounded(names: list[str], noun: str = "") -> list[str]:
    more = len(names) - MAX_LEFT_OUT
    return [*names[:MAX_LEFT_OUT], f"and {more} more{noun}"] if more > 0 else names


def _request(what: str, path: Path, kind: str, files: list[Path], dtype: str | None) -> Request:
    sizes = [file.stat().st_size for file in files]
    words = {"what": what, "path": os.path.abspath(path), "kind": kind, "dtype": dtype}
    return Request(
        words={**words, "files": [os.path.abspath(file) for file in files]},
        parts=[],
        place=str(path),
        code="E019",
        expected="a set of arrays that can be read",
        nbytes=_SLACK_NBYTES + _TIMES * max(sizes, default=0),
        cpu_s=cpu_seconds(sum(sizes)) + _OPEN_S + len(files) // _FILES_A_SECOND,
        imports=("torch",) if kind == "pt" else (),
    )


def _block(path: Path, hooks: list[ForeignHook], words: dict[str, Any], body: pa.Buffer) -> Block:
    n, at = words["n"], 0

    def take(dtype: np.dtype[Any], *shape: int) -> np.ndarray[Any, Any]:
        nonlocal at
        array = np.frombuffer(body, dtype, int(np.prod(shape)), at).reshape(shape)
        at += array.nbytes
        return array

    position = take(np.dtype("<i8"), n)
    ids = take(np.dtype("<i8"), n) if words["tokens"] else None
    bits = [take(DTYPES[hook.dtype].bits, n, hook.d_model) for hook in hooks]
    if at != body.size:
        raise foreign(path, f"{body.size} bytes of a block", f"{at}")
    return Block(words["sequence"], position, ids, bits)


# the other process ------------------------------------------------------------------------------


def answer(request: dict[str, Any], body: pa.Buffer) -> Iterator[Reply]:
    files, kind = [Path(file) for file in request["files"]], request["kind"]
    if request["what"] == "arrays":
        [file] = files
        node = READERS[kind](file)
        name = "" if isinstance(node, dict | list) else file.stem
        yield Reply({"arrays": [(at, leaf.dtype, leaf.shape) for at, leaf in leaves(name, node)]})
        return
    if request["what"] == "inclusion":
        yield from _inclusions(*files)
        return
    opened = KINDS[kind][1](Path(request["path"]), files, request["dtype"])
    if request["what"] == "open":
        hooks = [(storable(hook.called), hook.d_model, hook.dtype) for hook in opened.hooks]
        left_out = _bounded([storable(name)[:MAX_NAME] for name in sorted(opened.left_out)])
        words = {"hooks": hooks, "n_rows": opened.n_rows}
        yield Reply({**words, "unknown": sorted(opened.unknown), "left_out": left_out})
        return
    for block in opened.blocks():
        ids = [] if block.token_ids is None else [block.token_ids.astype("<i8")]
        parts = [block.position.astype("<i8"), *ids, *map(np.ascontiguousarray, block.bits)]
        words = {"sequence": block.sequence, "n": len(block.position), "tokens": bool(ids)}
        yield Reply(words, parts)


def _inclusions(file: Path) -> Iterator[Reply]:
    if INCLUSION not in READERS["parquet"](file):
        return
    with reading(file, "a Parquet file, whole", ARROW_ERRORS), pq.ParquetFile(file) as opened:
        for batch in opened.iter_batches(1 << 16, columns=[INCLUSION]):
            values = batch.column(0).cast(pa.float64()).to_numpy(zero_copy_only=False)
            yield Reply({}, [np.ascontiguousarray(values, "<f8")])
