"""Format versions: one module each, and the registry that says which this reader knows."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from actds.errors import ActdsError
from actds.format import canonical
from actds.schema import v0_1
from actds.schema.v0_1 import Document

KNOWN_VERSIONS = ("0.1",)
DOCUMENTS: dict[str, type[Document]] = {
    "genesis": v0_1.Genesis,
    "run": v0_1.RunRecord,
    "shard": v0_1.ShardManifest,
    "ledger": v0_1.LedgerRecord,
    "seal": v0_1.Seal,
}

Model = TypeVar("Model", bound=Document)

__all__ = ["DOCUMENTS", "KNOWN_VERSIONS", "json_schema", "parse", "to_bytes"]


def parse(model: type[Model], data: bytes, place: str) -> Model:
    """Return a document of the format from its canonical bytes.

    Raises:
        ActdsError: E102 malformed, E106 a version this reader does not know, E103 against the
            schema; E402 for a provenance field that is null without a reason.

    Spec: 0.1 sections 2.2 and 11.
    """
    document = canonical.parse(data, place)
    if isinstance(document, dict):
        version = document.get("version")
        if isinstance(version, str) and version not in KNOWN_VERSIONS:
            raise ActdsError(
                "E106",
                place,
                got=f"format version {version[:40]}",
                expected=f"one of {', '.join(KNOWN_VERSIONS)}",
            )
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first: Any = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or model.__name__
        unexplained = "null with a reason" in first["msg"]
        raise ActdsError(
            "E402" if unexplained else "E103",
            f"{place} {field}",
            got=repr(first.get("input"))[:120],
            expected=first["msg"],
        ) from None


def to_bytes(document: Document) -> bytes:
    """Return the canonical bytes of a document.

    Spec: 0.1 section 2.2.
    """
    return canonical.dump(document.model_dump(mode="json"))


def json_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a document, by its key in ``DOCUMENTS``.

    The body of a ledger record is given per type under ``$defs``.
    """
    schema = DOCUMENTS[name].model_json_schema()
    if name == "ledger":
        for kind, body in v0_1.BODIES.items():
            sub = body.model_json_schema(ref_template="#/$defs/{model}")
            schema.setdefault("$defs", {}).update(sub.pop("$defs", {}))
            schema["$defs"][f"{kind}_body"] = sub
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
