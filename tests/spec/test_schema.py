"""Schemas: strict documents, and published JSON Schemas that say the same."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from actds.cli import cli
from actds.errors import ActdsError
from actds.format import canonical, schema
from actds.format.schema import DOCUMENTS
from actds_testing.places import SCHEMAS
from actds_testing.synthetic import make_dataset

REGENERATE = "run: actds schema --write spec/0.1/schemas"


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    root = make_dataset(tmp_path_factory.mktemp("schema") / "d", n_requests=4)
    patterns = {
        "genesis": "actds.json",
        "run": "runs/*.json",
        "shard": "shards/*/shard.json",
        "ledger": "ledger/*/*.json",
        "seal": "seal/*.json",
    }
    return {name: [p.read_bytes() for p in root.glob(glob)] for name, glob in patterns.items()}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_published_schemas_are_those_of_the_code(name: str) -> None:
    assert json.loads((SCHEMAS / f"{name}.json").read_bytes()) == schema.json_schema(name), (
        REGENERATE
    )


def test_the_schema_of_the_audit_is_printed_and_is_the_published_one() -> None:
    told = CliRunner().invoke(cli, ["schema", "audit"])
    published = json.loads((SCHEMAS / "audit.json").read_bytes())
    assert told.exit_code == 0 and json.loads(told.stdout) == published, REGENERATE
    jsonschema.Draft202012Validator.check_schema(published)
    assert published["properties"]["format"]["const"] == "actds.audit"
    for part in (published, *published["$defs"].values()):
        # Every field is always there, so that null is told from an older program's silence.
        assert part["additionalProperties"] is False
        assert sorted(part["required"]) == sorted(part["properties"])


def test_every_published_schema_is_one_that_the_command_writes(tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["schema", "--write", str(tmp_path)]).exit_code == 0
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in SCHEMAS.iterdir()}, REGENERATE


@pytest.mark.parametrize("name", DOCUMENTS)
def test_real_documents_keep_both_schemas(name: str, documents: dict[str, list[bytes]]) -> None:
    published = json.loads((SCHEMAS / f"{name}.json").read_bytes())
    assert documents[name]
    for data in documents[name]:
        document = schema.parse(DOCUMENTS[name], data, name)
        assert schema.to_bytes(document) == data
        jsonschema.validate(json.loads(data), published)
        if name == "ledger":
            record = json.loads(data)
            body = {**published, "$ref": f"#/$defs/{record['type']}_body"}
            jsonschema.validate(record["body"], {k: body[k] for k in ("$defs", "$ref")})


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_field_may_be_missing_unknown_or_of_another_type(
    name: str, documents: dict[str, list[bytes]]
) -> None:
    good = json.loads(documents[name][0])

    def refused(document: dict[str, Any]) -> str:
        with pytest.raises(ActdsError) as caught:
            schema.parse(DOCUMENTS[name], canonical.dump(document), name)
        return caught.value.code

    assert refused({**good, "surprise": 1}) == "E103"
    assert refused({**good, "version": "9.9"}) == "E106"
    for field in good:
        # A number written as a string must not be taken for a number, nor null for anything.
        assert refused({**good, field: {"a": [None]}}) == "E103"
        if field not in ("format", "version"):
            assert refused({k: v for k, v in good.items() if k != field}) == "E103"


@pytest.mark.parametrize(
    "field",
    [
        {"value": None, "origin": "observed", "reason": None},
        {"value": None, "origin": "unknown", "reason": None},
        {"value": 0, "origin": "unknown", "reason": "why"},
        {"value": 0, "origin": "declared", "reason": "why"},
    ],
)
def test_an_unknown_fact_has_a_reason_and_a_known_one_has_none(
    field: dict[str, Any], documents: dict[str, list[bytes]]
) -> None:
    record = json.loads(documents["run"][0])
    record["fields"]["engine.name"] = field
    with pytest.raises(ActdsError) as caught:
        schema.parse(DOCUMENTS["run"], canonical.dump(record), "runs/r.json")
    assert caught.value.code == "E402"
    assert "engine.name" in caught.value.place


@pytest.mark.parametrize("path", ["../x", "/x", "a/../b", "a//b", "A", "a\n", "a/", "x" * 65])
def test_no_document_names_a_path_outside(path: str, documents: dict[str, list[bytes]]) -> None:
    manifest = json.loads(documents["shard"][0])
    manifest["files"][0]["path"] = path
    with pytest.raises(ActdsError, match="E103"):
        schema.parse(DOCUMENTS["shard"], canonical.dump(manifest), "shard.json")
