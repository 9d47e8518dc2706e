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

from actds.apart import Apart, Reply, Request, cpu_seconds
from actds.errors import ActdsError
from actds.exchange.arrow_sets import open_datasets, open_sae_lens
from actds.exchange.containers import READERS, features_of, foreign, leaves, read_document
from actds.exchange.foreign import Block, ForeignHook, ForeignSet, open_npy, open_tensors
from actds.format.arrays import DTYPES
from actds.text import storable

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
        dtype: as ``open_set``.

    Raises:
        ActdsError: as ``open_set``, E019 also for a file that ends its parser; E009 an unknown
            kind.
    """
    if kind is not None and kind not in KINDS:
        expected = f"one of {', '.join(KINDS)}"
        raise ActdsError("E009", "kind", got=repr(kind)[:80], expected=expected)
    try:
        return _open(path, kind, dtype)
    except OSError as error:
        if isinstance(error, ActdsError):
            raise
        words = error.strerror or str(error)
        raise foreign(path, words, "a file, or a folder of files") from None


def _open(path: Path, kind: str | None, dtype: str | None) -> ForeignSet:
    names = ", ".join(KINDS)
    if not path.exists():
        raise foreign(path, "no such path", "a file, or a folder of files")
    found = {k: files for k in KINDS if kind in (None, k) and (files := files_of(path, k))}
    if kind is not None and path.is_file():  # whatever its name
        found = {kind: [path]}
    if len(found) > 1:
        expected = f'one kind, for example kind="{next(iter(found))}"'
        raise foreign(path, f"files of {' and '.join(found)}", expected)
    if not found:
        raise foreign(path, f"no file of {kind or names}", "a set of activations")
    [(kind, files)] = found.items()
    [(words, _)] = reader.ask(_request("open", path, kind, files, dtype))
    hooks = [ForeignHook(*hook) for hook in words["hooks"]]
    for hook in hooks:
        if not 1 <= hook.d_model <= MAX_CHANNELS:
            got = f"{hook.called} rows of {hook.d_model} channels".strip()
            raise foreign(path, got, f"1 to {MAX_CHANNELS}")

    def blocks() -> Iterator[Block]:
        for words, body in reader.ask(_request("blocks", path, kind, files, dtype)):
            yield _block(path, hooks, words, body)

    left_out = [*words["left_out"], *_files_left_out(path, files)]
    unknown, n_rows = tuple(words["unknown"]), words["n_rows"]
    return ForeignSet(kind, files, hooks, unknown, n_rows, blocks, tuple(left_out))


def open_set(path: Path, kind: str, files: list[Path], dtype: str | None = None) -> ForeignSet:
    """Return what a set holds, after a look at the form of each of its files.

    Raises:
        ActdsError: E019 it is no such set, truncated, or mixes widths or types; E011 ``.pt`` files
            without torch.
    """
    return KINDS[kind][1](path, files, dtype)


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


def arrays_of(kind: str, file: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return name, type and shape of each array of a file.

    Raises:
        ActdsError: E019 it cannot be read, or ends its parser; E011 ``.pt`` without torch.
    """
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for words, _ in reader.ask(_request("arrays", file, kind, [file], None)):
        found += [(name, dtype, tuple(shape)) for name, dtype, shape in words["arrays"]]
    return found


def _files_left_out(path: Path, files: list[Path]) -> list[str]:
    """Names of files that look like arrays and are not of the set."""
    if path.is_file():
        return []
    suffixes = {suffix for suffix, _ in KINDS.values() if suffix} | {".pth", ".bin", ".parquet"}
    others = {
        storable(one.name) for one in path.iterdir() if one.suffix in suffixes and one.is_file()
    }
    found = sorted(others - {storable(file.name) for file in files})
    more = len(found) - MAX_LEFT_OUT
    return [*found[:MAX_LEFT_OUT], *([f"and {more} more files"] if more > 0 else [])]


def _request(what: str, path: Path, kind: str, files: list[Path], dtype: str | None) -> Request:
    sizes = [file.stat().st_size for file in files]
    words = {
        "what": what, "path": os.path.abspath(path), "kind": kind, "dtype": dtype,
        "files": [os.path.abspath(file) for file in files],
    }  # fmt: skip
    return Request(
        words,
        [],
        str(path),
        "E019",
        "a set of arrays that can be read",
        _SLACK_NBYTES + _TIMES * max(sizes, default=0),
        cpu_seconds(sum(sizes)) + _OPEN_S + len(files) // _FILES_A_SECOND,
        ("torch",) if kind == "pt" else (),
    )


def _block(path: Path, hooks: list[ForeignHook], words: dict[str, Any], body: pa.Buffer) -> Block:
    """Positions, tokens where there are any, then bits of each hook."""
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
    """The handler in the other process."""
    files, kind = [Path(file) for file in request["files"]], request["kind"]
    if request["what"] == "arrays":
        [file] = files
        node = READERS[kind](file)
        name = "" if isinstance(node, dict | list) else file.stem
        found = [(name, leaf.dtype, leaf.shape) for name, leaf in leaves(name, node)]
        yield Reply({"arrays": found})
        return
    opened = open_set(Path(request["path"]), kind, files, request["dtype"])
    if request["what"] == "open":
        hooks = [(storable(hook.called), hook.d_model, hook.dtype) for hook in opened.hooks]
        left_out = [storable(name)[:MAX_NAME] for name in opened.left_out[:MAX_LEFT_OUT]]
        if len(opened.left_out) > MAX_LEFT_OUT:
            left_out.append(f"and {len(opened.left_out) - MAX_LEFT_OUT} more")
        words = {"hooks": hooks, "n_rows": opened.n_rows}
        yield Reply({**words, "unknown": opened.unknown, "left_out": left_out})
        return
    for block in opened.blocks():
        ids = [] if block.token_ids is None else [block.token_ids.astype("<i8")]
        parts = [block.position.astype("<i8"), *ids, *block.bits]
        words = {"sequence": block.sequence, "n": len(block.position), "tokens": bool(ids)}
        yield Reply(words, sum(part.nbytes for part in parts), _writer(parts))


def _writer(parts: list[Any]) -> Any:
    def write(sink: Any) -> None:
        for part in parts:
            sink.write(np.ascontiguousarray(part).data)

    return write
