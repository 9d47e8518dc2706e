"""croissant.json: files, tables, arrays, where a dataset comes from, and what is known to lack.

https://docs.mlcommons.org/croissant/docs/croissant-spec-1.1.html, and its vocabulary for
responsible AI, http://mlcommons.org/croissant/RAI/1.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from actds.dataset.catalog import Catalog
from actds.dataset.info import Facts, HookFacts, RunFacts
from actds.format.arrays import SHARD_PATH
from actds.format.tables import SCHEMAS
from actds.store import layout

CONFORMS = ["http://mlcommons.org/croissant/1.1", "http://mlcommons.org/croissant/RAI/1.0"]
BIASES = "rai:dataBiases"
_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "prov": "http://www.w3.org/ns/prov#",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
} | {
    name: f"cr:{name}"
    for name in (
        *("annotation", "arrayShape", "citeAs", "column", "containedIn", "equivalentProperty"),
        *("excludes", "extract", "field", "fileObject", "fileProperty", "fileSet", "format"),
        *("includes", "isArray", "isLiveDataset", "jsonPath", "key", "md5", "parentField"),
        *("readLines", "recordSet", "references", "regex", "sdVersion", "separator", "source"),
        *("subField", "transform", "unArchive", "value", "path", "repeated", "replace"),
        "samplingRate",
    )
}
_PARQUET, _BYTES = "application/x-parquet", "application/octet-stream"
_SENSITIVE = "Others: token ids are prompts and answers, and activations may give them away"


@dataclass(frozen=True)
class About:
    """What the card says in words.

    Args:
        made: how the rows were made.
        gaps: what is missing or unknown.
        biases: verdict of an audit, empty without one.
    """

    name: str
    description: str
    licence: str
    made: str
    gaps: list[str]
    biases: list[Any]


def croissant(
    catalog: Catalog, facts: Facts, about: About, tables: Mapping[str, list[str]]
) -> bytes:
    """Return ``croissant.json`` of a sealed dataset."""
    seal = catalog.seal
    n, sealed_ns = (0, catalog.genesis.created_ns) if seal is None else (seal.n, seal.sealed_ns)
    files = {f"{table}-files": (_PARQUET, includes) for table, includes in tables.items()}
    hooks = [hook for hook in facts.hooks if hook.n_rows]
    files |= {
        f"{hook.name}-files": (_BYTES, [f"shards/*/{layout.array_dir(hook.name)}/{SHARD_PATH}"])
        for hook in hooks
    }
    document = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS,
        "name": about.name,
        "description": about.description,
        "license": about.licence,
        "version": f"{n}.0.0",
        "datePublished": _time(sealed_ns)[:10],
        "rai:dataCollection": about.made,
        "rai:dataCollectionType": "Software Collection",
        "rai:dataCollectionTimeframe": [
            *(_time(run.started_ns) for run in facts.runs if run.started_ns is not None),
            _time(sealed_ns),
        ],
        "rai:dataLimitations": about.gaps,
        "rai:personalSensitiveInformation": _SENSITIVE,
        **({BIASES: about.biases} if about.biases else {}),
        "prov:wasGeneratedBy": [_activity(run) for run in facts.runs],
        "prov:wasDerivedFrom": list(_sources(facts)),
        # zarr's own metadata is pinned by the manifests; listed, it would be most of the list.
        "distribution": [
            *(
                {
                    "@type": "cr:FileObject",
                    "@id": path,
                    "name": path,
                    "contentUrl": path,
                    "contentSize": f"{entry.nbytes} B",
                    "encodingFormat": _PARQUET if path.endswith(".parquet") else _BYTES,
                    "sha256": entry.sha256,
                }
                for path, entry in sorted(catalog.files.items())
                if not path.endswith("zarr.json")
            ),
            *(
                {
                    "@type": "cr:FileSet",
                    "@id": name,
                    "name": name,
                    "encodingFormat": kind,
                    "includes": includes,
                }
                for name, (kind, includes) in files.items()
            ),
        ],
        "recordSet": [
            *(_records(table, list(_fields(table))) for table in tables),
            *(_records(hook.name, [_array(hook)]) for hook in hooks),
        ],
    }
    return (json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


def _time(time_ns: int) -> str:
    try:
        return datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError):
        return "1970-01-01T00:00:00Z"


def _activity(run: RunFacts) -> dict[str, Any]:
    """Return a run as an activity: its engine, and the model that it used."""
    engine = " ".join(filter(None, (_fact(run, "engine.name"), _fact(run, "engine.version"))))
    mode = _fact(run, "serving.mode")
    model = _entity(_fact(run, "model.name"), _fact(run, "model.weights_sha256"))
    agent = {"@type": "prov:SoftwareAgent", "prov:label": engine}
    return {
        "@type": "prov:Activity",
        "prov:label": f"run {run.run}" + (f", {mode}" if mode else ""),
        **({} if run.started_ns is None else {"prov:startedAtTime": _time(run.started_ns)}),
        **({"prov:wasAssociatedWith": agent} if engine else {}),
        **({"prov:used": model} if model else {}),
    }


def _sources(facts: Facts) -> Iterator[dict[str, Any]]:
    """Yield what prompts were read from, and the dataset that a replay served again; each once."""
    names = ("prompts.source", "prompts.sha256")
    for name, sha256 in dict.fromkeys(
        (_fact(run, names[0]), _fact(run, names[1])) for run in facts.runs
    ):
        if entity := _entity(name, sha256):
            yield entity


def _entity(name: str | None, sha256: str | None) -> dict[str, Any]:
    known = {"prov:label": name, "identifier": f"sha256:{sha256}" if sha256 else None}
    known = {key: value for key, value in known.items() if value}
    return {"@type": "prov:Entity", **known} if known else {}


def _fact(run: RunFacts, name: str) -> str | None:
    value = run.provenance.get(name, {}).get("value")
    return value if isinstance(value, str) else None


def _records(name: str, fields: list[dict[str, Any]]) -> dict[str, Any]:
    return {"@type": "cr:RecordSet", "@id": name, "name": name, "field": fields}


def _array(hook: HookFacts) -> dict[str, Any]:
    """Return the array of a hook, one record a shard; its chunks need a reader of zarr."""
    return {
        "@type": "cr:Field",
        "@id": f"{hook.name}/rows",
        "name": "rows",
        "description": f"{hook.dtype}; the file is the shard of a zarr 3 array, with its codecs",
        "dataType": "sc:Float",
        "isArray": True,
        "arrayShape": f"-1,{hook.d_model}",
        "source": {
            "fileSet": {"@id": f"{hook.name}-files"},
            "extract": {"fileProperty": "content"},
        },
    }


def _fields(table: Any) -> Iterator[dict[str, Any]]:
    for column in SCHEMAS[table]:
        is_list = pa.types.is_list(column.type)
        yield {
            "@type": "cr:Field",
            "@id": f"{table}/{column.name}",
            "name": column.name,
            "description": (column.metadata or {}).get(b"meaning", b"").decode(),
            "dataType": _data_type(column.type.value_type if is_list else column.type),
            **({"isArray": True, "arrayShape": "-1"} if is_list else {}),
            "source": {"fileSet": {"@id": f"{table}-files"}, "extract": {"column": column.name}},
        }


def _data_type(kind: pa.DataType) -> str:
    if pa.types.is_integer(kind):
        return "sc:Integer"
    if pa.types.is_floating(kind):
        return "sc:Float"
    return "sc:Boolean" if pa.types.is_boolean(kind) else "sc:Text"
