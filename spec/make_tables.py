"""Write the generated blocks of the specification from the code: tables, examples, error codes.

    python spec/make_tables.py            write
    python spec/make_tables.py --check    say what differs, change nothing

A block stands between ``<!-- begin generated: KIND NAME -->`` and ``<!-- end generated -->``.
Examples of documents come from the test vector ``spec/0.1/vectors/valid/minimal``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actds.errors import CODES
from actds.format import schema, tables
from actds.format.arrays import array_metadata, group_metadata
from actds.format.schema import v0_1
from actds_validators.audit.result import Limits

SPEC = Path(__file__).resolve().parent / "0.1"
MINIMAL = SPEC / "vectors" / "valid" / "minimal"
BLOCK = re.compile(
    r"(<!-- begin generated: (?P<kind>\w+)(?: (?P<name>\w+))? -->\n).*?(<!-- end generated -->)",
    re.DOTALL,
)
DOCUMENTS: dict[str, type[v0_1.Document]] = {
    **schema.DOCUMENTS,
    "hook": v0_1.Hook,
    "provenance_field": v0_1.ProvenanceField,
    "file": v0_1.FileEntry,
    "row_counts": v0_1.RowCounts,
    "head": v0_1.Head,
}
TYPES = {
    "Genesis": "Genesis",
    "Hook": "Hook",
    "ProvenanceField": "provenance field",
    "FileEntry": "file entry",
    "RowCounts": "row counts",
    "Head": "Head",
}
PATTERNS = {
    r"^[a-z0-9][a-z0-9._-]{0,63}$": "Segment",
    r"^[0-9a-f]{64}$": "Digest",
    r"^[0-9a-f]{32}$": "32 hexadecimal digits",
    r"^[a-z0-9_]+(\.[a-z0-9_]+)+$": "name",
}
MEANINGS = {
    "format": "what the document is",
    "version": "format version",
    "dataset": "id of the dataset",
    "run": "the run",
    "shard": "the shard",
    "chain": "the chain",
    "hooks": "the hooks",
    "phase": "phase of all rows",
    "n_rows": "number of rows",
    "n_records": "number of records",
    "order": "order of the rows, section 5.3",
    "compression": "`raw` when all frames are copied",
    "first_step": "lowest step of the rows",
    "last_step": "highest step of the rows",
    "files": "the files",
    "file": "the file",
    "started_ns": "when it began",
    "sealed_ns": "when it was sealed",
    "fields": "name to provenance field",
    "value": "the fact",
    "origin": "who says so",
    "nbytes": "size in bytes",
    "sha256": "digest of the file",
    "manifest_sha256": "digest of `shard.json`",
    "genesis_sha256": "digest of `actds.json`",
    "kind": "what the process is",
    "software": "program and version",
    "table": "the table",
    "reason": "why",
    "totals": "what the process counted",
    "seq": "number of the record, from 0",
    "type": "type of the record",
    "body": "what it says, by type",
    "n": "number of the seal, from 1",
    "heads": "chain to Head",
    "state": "how the chain ended",
    "multiplicity": "the multiplicity table",
}
"""Of fields that the schema leaves undescribed; a field in neither is an error."""
UNITS = (
    (r"_ns$", "ns"),
    (r"_bytes$", "bytes"),
    (r"latency", "s"),
    (r"(_tokens|_len)$", "tokens"),
    (r"(_usage|_ratio|inclusion)$", "1"),
)


def main() -> int:
    """Write the blocks, or with --check return 1 when a file would change."""
    check = "--check" in sys.argv[1:]
    stale = [path for path, text in render() if path.read_text() != text]
    if not check:
        for path, text in render():
            path.write_text(text)
        return 0
    for path in stale:
        print(f"{path.relative_to(SPEC.parent)} differs; run: python spec/make_tables.py")
    return 1 if stale else 0


def render() -> Iterator[tuple[Path, str]]:
    """Yield every page of the specification with the text that it should have."""
    for path in sorted([*SPEC.glob("*.md"), *SPEC.glob("annexes/*.md")]):
        yield path, BLOCK.sub(_fill, path.read_text())


def _fill(match: re.Match[str]) -> str:
    make = {
        "document": _document,
        "bodies": _bodies,
        "provenance": _provenance,
        "table": _table,
        "errors": _errors,
        "example": _example,
        "limits": _limits,
    }[match["kind"]]
    lines = make(match["name"]) if match["name"] else make()  # type: ignore[operator]
    return match[1] + "\n" + "\n".join(lines) + "\n\n" + match[4]


def _document(name: str) -> list[str]:
    model = DOCUMENTS[name]
    return _fields(model.model_json_schema(), ["field", "type", "meaning"])


def _fields(document: dict[str, Any], head: list[str]) -> list[str]:
    rows = [
        [f"`{field}`", _type(spec), spec.get("description") or MEANINGS[field]]
        for field, spec in document["properties"].items()
    ]
    return _markdown(head, rows)


def _type(spec: dict[str, Any]) -> str:
    if "const" in spec:
        return f'`"{spec["const"]}"`'
    if "enum" in spec:
        return " or ".join(f"`{word}`" for word in spec["enum"])
    if "anyOf" in spec:
        return " or ".join(dict.fromkeys(_type(option) for option in spec["anyOf"]))
    if "$ref" in spec:
        return TYPES[spec["$ref"].rpartition("/")[2]]
    kind = spec.get("type")
    if kind == "integer":
        low, high = spec.get("minimum"), spec.get("maximum")
        if (low, high) == (0, 2**63 - 1):
            return "Count"
        return "integer" + (f" from {low}" if low is not None else "") + _up_to(high)
    if kind == "string":
        if spec.get("pattern") in PATTERNS:
            return PATTERNS[spec["pattern"]]
        if "pattern" in spec:
            return "path, section 2.1"
        return "Text" if spec.get("maxLength") == 4096 else "string"
    if kind == "array":
        return f"list of {_type(spec['items'])}"
    if kind == "object":
        values = spec.get("additionalProperties")
        return f"object, {_type(values)} by name" if isinstance(values, dict) else "object"
    return str(kind)


def _up_to(high: int | None) -> str:
    return "" if high is None else f" to {high}"


def _bodies() -> list[str]:
    lines = []
    for kind, model in v0_1.BODIES.items():
        summary = (model.__doc__ or "").strip().splitlines()[0]
        lines += [f"**`{kind}`** {summary}", ""]
        lines += [*_fields(model.model_json_schema(), ["field", "type", "meaning"]), ""]
    return lines[:-1]


def _provenance() -> list[str]:
    rows = [[f"`{name}`", meaning] for name, meaning in v0_1.REQUIRED_PROVENANCE.items()]
    return _markdown(["name", "value"], rows)


def _table(name: str) -> list[str]:
    rows = [
        [
            f"`{field.name}`",
            str(field.type)
            .replace("element: ", "")
            .replace("item: ", "")
            .replace("double", "float64"),
            _unit(field.name),
            "yes" if field.nullable else "",
            (field.metadata or {}).get(b"meaning", b"").decode(),
        ]
        for field in tables.SCHEMAS[name]  # type: ignore[index]
    ]
    return _markdown(["column", "type", "unit", "may be null", "meaning"], rows)


def _unit(column: str) -> str:
    return next((unit for pattern, unit in UNITS if re.search(pattern, column)), "")


def _errors() -> list[str]:
    rows = [
        [code, entry.family, entry.title, entry.meaning, entry.next_step, entry.clause]
        for code, entry in sorted(CODES.items())
    ]
    return _markdown(["code", "family", "title", "meaning", "next step", "section"], rows)


def _limits() -> list[str]:
    rows = [
        [f"`{name}`", f"{field.default:g}", str(field.description)]
        for name, field in Limits.model_fields.items()
    ]
    return _markdown(["limit", "default", "meaning"], rows)


def _example(name: str) -> list[str]:
    documents = {
        "group": lambda: json.loads(group_metadata()),
        "array": lambda: json.loads(array_metadata(3000, 576, "bfloat16")),
        "genesis": lambda: _vector("actds.json"),
        "field": _run_fields,
        "shard": lambda: _vector("shards/*/shard.json"),
        "ledger": lambda: _vector("ledger/w-*/00000000.json"),
        "seal": lambda: _vector("seal/0001.json"),
    }
    return ["```json", *_pretty(documents[name]()).splitlines(), "```"]


def _vector(pattern: str) -> Any:
    return json.loads(sorted(MINIMAL.glob(pattern))[0].read_bytes())


def _run_fields() -> Any:
    fields = _vector("runs/*.json")["fields"]
    return {name: fields[name] for name in ("serving.block_size", "serving.max_model_len")}


def _pretty(value: Any, indent: str = "", width: int = 116) -> str:
    """Return JSON that breaks lines only where it must."""
    flat = json.dumps(value, sort_keys=True)
    if len(indent) + len(flat) <= width or not isinstance(value, dict | list) or not value:
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        items = [
            f"{inner}{json.dumps(k)}: {_pretty(v, inner, width)}" for k, v in sorted(value.items())
        ]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _pretty(v, inner, width) for v in value) + f"\n{indent}]"


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *escaped]
    return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
    sys.exit(main())
