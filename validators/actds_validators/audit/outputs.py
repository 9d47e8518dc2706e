"""Outputs: where the files that the audit writes may stand, and the file of weights.

A file written into a dataset breaks it, and the audit would end well.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from actds import layout
from actds.errors import ActdsError
from actds.format.row_weights import FORMAT, GROUP_ROWS, SCHEMA, VERSION
from actds.format.shard import Shard
from actds.reading import Catalog
from actds_validators.audit.lookup import Lookup
from actds_validators.audit.weights import Cells


def refuse_outputs(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None]) -> None:
    """Refuse outputs that would destroy something; nothing is opened.

    Args:
        outputs: by option, such as ``--html``.
        inputs: files that are read, by option; no output may be one of them.

    Raises:
        ActdsError: E009 an output inside a dataset, or a file that another option names as well.
    """
    taken = {option: path for option, path in inputs.items() if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        refuse_within_dataset(option, path)
        for other, its in taken.items():
            if _is_same(path, its):
                raise ActdsError(
                    "E009",
                    f"{option} {path}",
                    got=f"the file of {other}",
                    expected="a path of its own",
                )
        taken[option] = path


def refuse_within_dataset(option: str, path: Path) -> None:
    """Refuse a path inside any dataset, seen through links, or with the name of a genesis.

    Raises:
        ActdsError: E009.
    """
    expected = "a path outside any dataset"
    # A link in a dataset is refused as well, wherever it leads.
    own, real = Path(os.path.realpath(path.parent), path.name), Path(os.path.realpath(path))
    for place in dict.fromkeys((own, real)):
        for folder in place.parents:
            if os.path.lexists(folder / layout.GENESIS):
                raise ActdsError(
                    "E009",
                    f"{option} {path}",
                    got=f"inside the dataset {folder}",
                    expected=expected,
                )
    if layout.GENESIS in (own.name, real.name):
        got = f"{layout.GENESIS}, by which a folder is taken for a dataset"
        raise ActdsError("E009", f"{option} {path}", got=got, expected=expected)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file takes its name at the end, whole or not at all.

    A file that is there is replaced and not written over: it may have other names, one of them in
    a dataset. Devices and pipes are written to as they are.

    Raises:
        ActdsError: E503 the disk refuses.
    """
    target = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        target = temporary = path  # the real path of a pipe behind /dev/stdout is no path
    else:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        if temporary != target:
            os.replace(temporary, target)
    except ActdsError:
        raise
    except OSError as error:
        raise unwritable(path, error.strerror or str(error)) from error
    finally:
        if temporary != target:
            temporary.unlink(missing_ok=True)


def unwritable(
    path: Path, got: str, next_step: str = "Free space, or give another path."
) -> ActdsError:
    """Return the error of an output that cannot be written."""
    return ActdsError(
        "E503", str(path), got=got, expected="a file that can be written", next_step=next_step
    )


def _is_same(one: Path, other: Path) -> bool:
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there yet
        return False


def write_weights(
    out: str | Path,
    catalog: Catalog,
    lookups: Mapping[str, Lookup],
    cells: Cells | None,
    claim: str,
) -> int:
    """Write the weight of every stored row, and return the number of rows.

    The file appears whole or not at all; one that is there already is replaced. About a million
    rows are in memory at a time, or those of the largest shard.

    Args:
        out: a local path outside any dataset.
        catalog: the dataset.
        lookups: of its runs, by name; none when nothing was dropped.
        cells: with their weights; ``None`` when nothing was dropped, and every weight is 1.
        claim: what the weights mend, in words.

    Raises:
        ActdsError: E009 a path inside a dataset; E412 rows of an unknown step; E503 the disk
            refuses; what ``Shard.tokens`` raises.

    Spec: 0.1 section 10.4.
    """
    path = Path(out)
    refuse_within_dataset("--weights", path)
    words = {
        "format": FORMAT,
        "version": VERSION,
        "dataset": catalog.genesis.dataset,
        "digest": catalog.digest,
        "claim": claim,
    }
    n_rows = 0
    with _new_file(path) as file:
        file.add_key_value_metadata({f"actds.{key}": value for key, value in words.items()})
        for table in _in_groups(_tables(catalog, lookups, cells)):
            file.write_table(table, row_group_size=GROUP_ROWS)
            n_rows += table.num_rows
    return n_rows


@contextmanager
def _new_file(path: Path) -> Iterator[pq.ParquetWriter]:
    """Yield a writer to a file that takes its name at the end."""
    with (
        replaced(path) as temporary,
        pq.ParquetWriter(
            temporary,
            SCHEMA,
            compression="zstd",
            store_schema=False,
            write_page_checksum=True,
            use_dictionary=["shard", "weight"],
            column_encoding={"row": "DELTA_BINARY_PACKED"},
        ) as writer,
    ):
        yield writer


def _tables(
    catalog: Catalog, lookups: Mapping[str, Lookup], cells: Cells | None
) -> Iterator[pa.Table]:
    """Yield the file piece by piece, sorted by shard and row."""
    shards = sorted(
        (Shard(catalog.store, manifest) for manifest in catalog.shards), key=lambda s: s.name
    )
    for run, group in groupby(shards, key=lambda shard: shard.run):
        for some in _batches(group):
            yield _table(some, _weights(lookups.get(run), some, cells))


def _batches(shards: Iterator[Shard]) -> Iterator[list[Shard]]:
    """Yield shards together, up to a row group of rows."""
    held: list[Shard] = []
    n_rows = 0
    for shard in shards:
        if held and n_rows + shard.n_rows > GROUP_ROWS:
            yield held
            held, n_rows = [], 0
        held.append(shard)
        n_rows += shard.n_rows
    yield held


def _weights(
    lookup: Lookup | None, shards: list[Shard], cells: Cells | None
) -> npt.NDArray[np.float32]:
    """Return the weights of the rows of shards, one shard behind the other."""
    n_rows = sum(shard.n_rows for shard in shards)
    if cells is None or cells.weights is None:
        return np.ones(n_rows, np.float32)
    tokens = pa.concat_tables(
        [shard.tokens(["step", "position", "token_id"]) for shard in shards]
    ).combine_chunks()
    numbers = {name: tokens[name].to_numpy().astype(np.int64) for name in tokens.column_names}
    step = lookup.steps.of(numbers["step"]) if lookup else np.full(n_rows, -1, np.int64)
    if lookup is None or step.min(initial=0) < 0:
        raise ActdsError(
            "E412",
            f"shards/{shards[0].name} to {shards[-1].name}",
            got=f"{int((step >= 0).sum())} of {n_rows} rows whose step computed something",
            expected="every row",
        )
    token = lookup.vocabulary.places(numbers["token_id"])
    cell = cells.edges.of(lookup, step, numbers["position"], token)
    return cells.weights.reshape(-1)[cell].astype(np.float32)


def _table(shards: list[Shard], weights: npt.NDArray[np.float32]) -> pa.Table:
    sizes = [shard.n_rows for shard in shards]
    names = pa.array([shard.name for shard in shards], pa.string())
    number = np.repeat(np.arange(len(shards)), sizes)
    row = np.concatenate([np.arange(n, dtype=np.uint32) for n in sizes])
    return pa.table([names.take(pa.array(number)), row, weights], schema=SCHEMA)


def _in_groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield tables joined to row groups that are full, all but the last."""
    held: list[pa.Table] = []
    n_rows = 0
    for table in tables:
        held.append(table)
        n_rows += table.num_rows
        if n_rows >= GROUP_ROWS:
            joined, rest = pa.concat_tables(held), n_rows % GROUP_ROWS
            yield joined.slice(0, n_rows - rest)
            held, n_rows = [joined.slice(n_rows - rest)], rest
    if n_rows:
        yield pa.concat_tables(held)
