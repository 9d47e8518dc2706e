"""Documents of the format: the current names, and a registry of the versions that can be read.

Everything outside this package imports the names from here. A further version is one module beside
``v0_1`` and one ``register``; what its documents are read into are subclasses of the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from actds.errors import ActdsError
from actds.format import canonical
from actds.format.schema import v0_1
from actds.format.schema.v0_1 import BODIES, Document
from actds.format.schema.v0_1 import FORMAT_VERSION as FORMAT_VERSION
from actds.format.schema.v0_1 import HOOK_KINDS as HOOK_KINDS
from actds.format.schema.v0_1 import PART as PART
from actds.format.schema.v0_1 import REQUIRED_PROVENANCE as REQUIRED_PROVENANCE
from actds.format.schema.v0_1 import Body as Body
from actds.format.schema.v0_1 import ChainKind as ChainKind
from actds.format.schema.v0_1 import CloseBody as CloseBody
from actds.format.schema.v0_1 import CloseReason as CloseReason
from actds.format.schema.v0_1 import DType as DType
from actds.format.schema.v0_1 import FenceBody as FenceBody
from actds.format.schema.v0_1 import FileEntry as FileEntry
from actds.format.schema.v0_1 import Genesis as Genesis
from actds.format.schema.v0_1 import Head as Head
from actds.format.schema.v0_1 import Hook as Hook
from actds.format.schema.v0_1 import LedgerRecord as LedgerRecord
from actds.format.schema.v0_1 import OpenBody as OpenBody
from actds.format.schema.v0_1 import Origin as Origin
from actds.format.schema.v0_1 import PartBody as PartBody
from actds.format.schema.v0_1 import PartTable as PartTable
from actds.format.schema.v0_1 import Phase as Phase
from actds.format.schema.v0_1 import ProvenanceField as ProvenanceField
from actds.format.schema.v0_1 import RecordType as RecordType
from actds.format.schema.v0_1 import RedactBody as RedactBody
from actds.format.schema.v0_1 import ReplaceBody as ReplaceBody
from actds.format.schema.v0_1 import RowCounts as RowCounts
from actds.format.schema.v0_1 import RunBody as RunBody
from actds.format.schema.v0_1 import RunRecord as RunRecord
from actds.format.schema.v0_1 import Seal as Seal
from actds.format.schema.v0_1 import ShardBody as ShardBody
from actds.format.schema.v0_1 import ShardManifest as ShardManifest
from actds.format.schema.v0_1 import parse_part as parse_part

Model = TypeVar("Model", bound=Document)
_MAX_FAULTS = 1000


@dataclass(frozen=True)
class FormatVersion:
    """One version of the format.

    Args:
        version: as documents name it.
        documents: the model of each document by its name: ``genesis``, ``run``, ``shard``,
            ``ledger``, ``seal``; each the current one or a subclass of it.
    """

    version: str
    documents: Mapping[str, type[Document]]


DOCUMENTS: dict[str, type[Document]] = {
    "genesis": Genesis,
    "run": RunRecord,
    "shard": ShardManifest,
    "ledger": LedgerRecord,
    "seal": Seal,
}
"""The documents of the current version, which is the one that is written."""

VERSIONS: dict[str, FormatVersion] = {}
"""The versions that this reader knows."""


def register(version: FormatVersion) -> None:
    """Let documents of a format version be read.

    Raises:
        ValueError: the version is known already, or a model is none of the document's.
    """
    if version.version in VERSIONS:
        raise ValueError(f"format version {version.version} is registered already")
    for name, current in DOCUMENTS.items():
        if not issubclass(version.documents[name], current):
            raise ValueError(f"{version.documents[name]} is no {current.__name__}")
    VERSIONS[version.version] = version


STATED = ("format", "version")
"""What every document says of itself."""

register(FormatVersion(v0_1.FORMAT_VERSION, DOCUMENTS))


def parse(model: type[Model], data: bytes, place: str, version: str | None = None) -> Model:
    """Return a document of the format from its canonical bytes.

    Args:
        model: the document by its current name.
        data: the bytes.
        place: what an error names.
        version: of the dataset, from its genesis; None takes the document's own.

    Raises:
        ActdsError: E102 malformed, E106 a version this reader does not know, E103 against the
            schema; E402 for a provenance field that is null without a reason.

    Spec: 0.1 sections 2.2 and 11.
    """
    document = canonical.parse(data, place)
    if isinstance(document, dict):
        stated = document.get("version")
        if isinstance(stated, str) and stated not in VERSIONS:
            known = ", ".join(VERSIONS)
            raise ActdsError(
                "E106", place, got=f"format version {stated[:40]}", expected=f"one of {known}"
            )
        model = _of_version(model, version or stated)
        for name in STATED:
            if name not in document:
                raise ActdsError("E103", f"{place} {name}", got="nothing", expected=f"its {name}")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        if error.error_count() > _MAX_FAULTS:  # to list them takes a kilobyte for each
            got = f"{error.error_count()} faults"
            raise ActdsError("E103", place, got=got, expected=f"a {model.__name__}") from None
        first: Any = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or model.__name__
        unexplained = "null with a reason" in first["msg"]
        raise ActdsError(
            "E402" if unexplained else "E103",
            f"{place} {field}",
            got=repr(first.get("input"))[:120],
            expected=first["msg"],
        ) from None


def _of_version(model: type[Model], version: object) -> type[Model]:
    """Return a version's model of a document; the current model for an unknown version."""
    known = VERSIONS.get(version) if isinstance(version, str) else None
    for name, current in DOCUMENTS.items():
        if current is model and known is not None:
            return known.documents[name]  # type: ignore[return-value]  # register checked it
    return model


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
    schema["required"] = [*STATED, *schema.get("required", ())]
    if name == "ledger":
        for kind, body in BODIES.items():
            sub = body.model_json_schema(ref_template="#/$defs/{model}")
            schema.setdefault("$defs", {}).update(sub.pop("$defs", {}))
            schema["$defs"][f"{kind}_body"] = sub
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
