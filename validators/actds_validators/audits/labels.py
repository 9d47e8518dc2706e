"""Labels: token classes that somebody gave, such as system, user, assistant, template, code.

Beside the coverage. A dataset stores no text and so no roles; whoever made the prompts knows them.
Imports the format room's errors and pyarrow.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actds.errors import ActdsError

__all__ = ["Labels", "class_words", "labels_of", "read_labels"]

COLUMNS = {
    "request": pa.uint32(),
    "start": pa.uint32(),
    "stop": pa.uint32(),
    "class": pa.string(),
}
MAX_CLASSES = 32


def read_labels(path: Path) -> pa.Table:
    """Return labels: request, half-open range of positions, class, and maybe run.

    Ranges of one request must not overlap. Without ``run`` they are of every run.

    Raises:
        ActdsError: E009 when the file cannot be read, lacks a column or has too many classes.
    """
    try:
        table = pq.read_table(path)
        found = pa.table({name: table[name].cast(kind) for name, kind in COLUMNS.items()})
        if "run" in table.column_names:
            found = found.append_column("run", table["run"].cast(pa.string()))
    except (pa.ArrowException, OSError, KeyError) as error:
        raise _bad(path, str(error).splitlines()[0][:200]) from None
    if any(column.null_count for column in found.columns):
        raise _bad(path, "a null")
    n_classes = pc.count_distinct(found["class"]).as_py()
    if n_classes > MAX_CLASSES:
        raise _bad(path, f"{n_classes} classes, more than {MAX_CLASSES}")
    if pc.any(pc.less_equal(found["stop"], found["start"])).as_py():
        raise _bad(path, "a range that ends before it begins")
    return found


class Labels:
    """The labels of one run, asked row by row.

    Args:
        table: as `read_labels` returns it, of one run.
        words: names of all classes; a label's code is its place among them.
    """

    def __init__(self, table: pa.Table, words: tuple[str, ...]) -> None:
        self.words = words
        request, start, stop = (
            table[name].to_numpy().astype(np.int64) for name in ("request", "start", "stop")
        )
        keys = (request << 32) | start  # below 0 for a request from 2^31 on, as in `of`
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._request, self._stop = request[order], stop[order]
        code = {word: k for k, word in enumerate(words)}
        codes = [code[word] for word in table["class"].to_pylist()]
        self._code = np.array(codes, np.int64)[order]

    def of(
        self, request: npt.NDArray[np.int64], position: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the code of the class of each position, -1 for one without a label."""
        if not len(self._keys):
            return np.full(len(request), -1, np.int64)
        at = np.searchsorted(self._keys, (request << 32) | position, side="right") - 1
        labelled, at = at >= 0, np.maximum(at, 0)
        labelled &= (self._request[at] == request) & (position < self._stop[at])
        return np.where(labelled, self._code[at], -1)


def class_words(labels: pa.Table) -> tuple[str, ...]:
    """Return the names of all classes."""
    return tuple(sorted(labels["class"].unique().to_pylist()))


def labels_of(labels: pa.Table, run: str) -> Labels:
    """Return the labels of a run."""
    words = class_words(labels)
    if "run" in labels.column_names:
        labels = labels.filter(pc.equal(labels["run"], run))
    return Labels(labels, words)


def _bad(path: Path, got: str) -> ActdsError:
    return ActdsError(
        "E009",
        f"--classes {path}",
        got=got,
        expected="a Parquet file with request, start, stop, class, and maybe run",
    )
