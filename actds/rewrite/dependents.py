"""Dependents: files that name a dataset, because they were made from it.

Weights files, probes and policies, replays and shuffled copies say which dataset or seal they are
of. What says nothing is not found: a matrix in a file without a header, an archive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actds.dataset.reading import Catalog
from actds.store import Store, layout, local_folder

_BLOCK = 1 << 23


def find_dependents(store: Store, where: Iterable[str | Path]) -> list[str]:
    """Return the files that hold the id of a dataset or the digest of one of its seals.

    Args:
        store: the dataset's store.
        where: files, and folders with all that is under them. Of a dataset there its folder is
            returned.

    Raises:
        ActdsError: what the catalogue raises.
    """
    catalog, own = Catalog.read(store), local_folder(store.uri)
    names = [catalog.genesis.dataset, *catalog.seal_digests]
    found: dict[str, None] = {}
    for file in (file for place in where for file in _files(Path(place))):
        dataset = _dataset_of(file)
        if own is not None and dataset is not None and dataset.resolve() == own.resolve():
            continue
        if _names(file, names):
            found[str(file if dataset is None else dataset)] = None
    return [*found]


def _files(place: Path) -> Iterator[Path]:
    if not place.is_dir():
        yield place
        return
    yield from sorted(file for file in place.rglob("*") if file.is_file())


def _dataset_of(file: Path) -> Path | None:
    return next((folder for folder in file.parents if (folder / layout.GENESIS).exists()), None)


def _names(file: Path, names: list[str]) -> bool:
    if file.name.startswith("origins-") and file.suffix == ".parquet":
        return _in_origins(file, names)
    wanted, overlap = [name.encode() for name in names], max(map(len, names)) - 1
    tail = b""
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            block = tail + block
            if any(name in block for name in wanted):
                return True
            tail = block[-overlap:]
    return False


def _in_origins(file: Path, names: list[str]) -> bool:
    try:
        table = pq.read_table(file, columns=["source_dataset", "source_seal"])
    except (pa.ArrowException, OSError, KeyError):
        return False  # no table of origins, whatever its name says
    return any(pc.any(pc.is_in(column, pa.array(names))).as_py() for column in table.columns)
