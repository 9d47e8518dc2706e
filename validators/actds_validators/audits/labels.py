"""Labels: token classes that somebody gave, such as system, user, assistant, template, code.

Beside the coverage. A dataset stores no text and so no roles; whoever made the prompts knows them.
Imports the format room's errors and pyarrow.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actds.errors import ActdsError

__all__ = ["labels_of", "read_labels"]

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


def labels_of(labels: pa.Table, run: str) -> pa.Table:
    """Return the labels of a run, as the coverage joins them."""
    if "run" in labels.column_names:
        labels = labels.filter(pc.equal(labels["run"], run)).drop_columns("run")
    return labels.rename_columns(["label_request", "start", "stop", "class"])


def _bad(path: Path, got: str) -> ActdsError:
    return ActdsError(
        "E009",
        f"--classes {path}",
        got=got,
        expected="a Parquet file with request, start, stop, class, and maybe run",
    )
