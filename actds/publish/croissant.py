"""Croissant metadata: the files of a dataset with their digests, and the tables as record sets.

https://docs.mlcommons.org/croissant/docs/croissant-spec.html, version 1.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from actds.dataset.reading import Catalog
from actds.format.schema import FileEntry
from actds.format.tables import SCHEMAS, TableName

_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
} | {
    name: f"cr:{name}"
    for name in (
        *("citeAs", "column", "equivalentProperty", "extract", "field", "fileObject", "fileSet"),
        *("fileProperty", "format", "includes", "isLiveDataset", "jsonPath", "key", "md5"),
        *("parentField", "path", "recordSet", "references", "regex", "repeated", "replace"),
        *("samplingRate", "separator", "source", "subField", "transform"),
    )
}
_PARQUET = "application/x-parquet"


def croissant(
    catalog: Catalog, name: str, description: str, licence: str, tables: Mapping[str, list[str]]
) -> bytes:
    """Return ``croissant.json`` of a sealed dataset.

    Args:
        catalog: the dataset.
        name: its title.
        description: what it is, in a sentence.
        licence: identifier of its licence, or ``unknown``.
        tables: the tables, each with its files or a pattern of them, as the card lists them.

    Spec: 0.1 section 2.4.
    """
    seal = catalog.seal
    n, sealed_ns = (0, catalog.genesis.created_ns) if seal is None else (seal.n, seal.sealed_ns)
    document = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": name,
        "description": description,
        "license": licence,
        "version": f"{n}.0.0",
        "datePublished": _date(sealed_ns),
        "distribution": [
            # zarr's own metadata is pinned by the manifests; listed, it would be most of the list.
            *(
                _file(path, entry)
                for path, entry in sorted(catalog.files.items())
                if not path.endswith("zarr.json")
            ),
            *(_file_set(table, includes) for table, includes in tables.items()),
        ],
        "recordSet": [_record_set(table) for table in tables],
    }
    return (json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


def _date(time_ns: int) -> str:
    try:
        return datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%d")
    except (OverflowError, ValueError):
        return "1970-01-01"


def _file(path: str, entry: FileEntry) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": path,
        "name": path,
        "contentUrl": path,
        "contentSize": f"{entry.nbytes} B",
        "encodingFormat": _PARQUET if path.endswith(".parquet") else "application/octet-stream",
        "sha256": entry.sha256,
    }


def _file_set(table: str, includes: list[str]) -> dict[str, Any]:
    return {
        "@type": "cr:FileSet",
        "@id": f"{table}-files",
        "name": f"{table}-files",
        "encodingFormat": _PARQUET,
        "includes": includes,
    }


def _record_set(table: str) -> dict[str, Any]:
    return {
        "@type": "cr:RecordSet",
        "@id": table,
        "name": table,
        "field": list(_fields(table)),
    }


def _fields(table: Any) -> Iterator[dict[str, Any]]:
    known: TableName = table
    for column in SCHEMAS[known]:
        repeated = pa.types.is_list(column.type)
        yield {
            "@type": "cr:Field",
            "@id": f"{table}/{column.name}",
            "name": column.name,
            "description": (column.metadata or {}).get(b"meaning", b"").decode(),
            "dataType": _data_type(column.type.value_type if repeated else column.type),
            **({"repeated": True} if repeated else {}),
            "source": {"fileSet": {"@id": f"{table}-files"}, "extract": {"column": column.name}},
        }


def _data_type(kind: pa.DataType) -> str:
    if pa.types.is_integer(kind):
        return "sc:Integer"
    if pa.types.is_floating(kind):
        return "sc:Float"
    return "sc:Boolean" if pa.types.is_boolean(kind) else "sc:Text"
