"""The labels that users give their prompts: read from every kind of source, refused if unfit."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actds.errors import ActdsError
from actds.format.labels import parse_labels
from actds_testing.tiny import make_tiny_model
from actds_writers.config import WriteSettings
from actds_writers.engine_protocol import find_engine
from actds_writers.harvest.prepare import make_plan
from actds_writers.prompts.records import read_prompts

COLUMNS = ("domain", "level", "shared", "score", "my name")
RECORDS: list[dict[str, Any]] = [
    {"prompt": "a", "domain": "code", "level": 3, "shared": True, "score": 0.1, "other": 1},
    {"prompt": "b", "domain": "été", "level": -(2**62), "shared": False, "my name": ""},
    {"prompt": "c", "domain": None, "score": 1e22},
    {"prompt": "d"},
]
LABELS = [
    {"domain": "code", "level": 3, "shared": True, "score": "0.1"},
    {"domain": "été", "level": -(2**62), "shared": False, "my name": ""},
    {"score": "1e+22"},
    None,
]


def source(folder: Path, kind: str) -> str:
    """Write the records as a source of a kind; return its name."""
    path = folder / f"p.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    elif kind == "json":
        path.write_text(json.dumps(RECORDS))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(RECORDS, schema()), path)
    else:
        datasets = pytest.importorskip("datasets")
        saved = datasets.Dataset(pa.Table.from_pylist(RECORDS, schema()))
        saved.save_to_disk(folder / "saved")
        return f"hf:{folder / 'saved'}"
    return str(path)


def schema() -> pa.Schema:
    kinds = {"prompt": pa.string(), "domain": pa.string(), "level": pa.int64(),
             "shared": pa.bool_(), "score": pa.float64(), "my name": pa.string()}  # fmt: skip
    return pa.schema(kinds)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "hf"])
def test_labels_come_from_every_kind_of_source(tmp_path: Path, kind: str) -> None:
    found = read_prompts(source(tmp_path, kind), label_columns=COLUMNS)
    told = [one.labels and parse_labels(one.labels, "") for one in found.prompts]
    assert told == LABELS
    assert found.label_columns == tuple(sorted(COLUMNS))


def test_a_number_of_32_bits_is_its_own_shortest_text(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"], "score": pa.array([0.1], pa.float32())})
    pq.write_table(table, tmp_path / "p.parquet")
    (one,) = read_prompts(str(tmp_path / "p.parquet"), label_columns=["score"]).prompts
    assert one.labels == '{"score":"0.1"}'


def test_equal_labels_are_held_once(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "domain": "code"}\n' * 3)
    assert (
        len({id(one.labels) for one in read_prompts(str(path), "error", ["domain"]).prompts}) == 1
    )


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (["code"], "the label `domain` is a list"),
        ({"a": 1}, "the label `domain` is a object"),
        ("x" * 257, "the label `domain` has 257 characters"),
        (float("nan"), "the label `domain` is nan"),
        (2**63, f"the label `domain` is {2**63}"),
        ("\ud800", "the label `domain` has an unpaired surrogate"),
    ],
)
def test_a_label_that_is_none_breaks_its_record(tmp_path: Path, value: Any, got: str) -> None:
    path = tmp_path / "p.jsonl"
    records = [{"prompt": "a", "domain": "x" * 256}, {"prompt": "b", "domain": value, "level": 3}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ActdsError) as caught:
        read_prompts(str(path), label_columns=["domain"])
    error = caught.value
    assert (error.code, error.place, error.got) == ("E002", "p.jsonl line 2", got)
    found = read_prompts(str(path), "skip", ["domain"])
    assert len(found.prompts) == 1
    assert found.skips[0].broken.startswith(f"E002 p.jsonl line 2: {got}")
    assert read_prompts(str(path), label_columns=[]).prompts[1].labels is None


def test_a_date_of_a_table_is_no_label(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"], "day": [datetime.date(2020, 1, 1)]})
    pq.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(ActdsError, match=r"E002 p\.parquet row 0: the label `day` is a value"):
        read_prompts(str(tmp_path / "p.parquet"), label_columns=["day"])


def test_a_broken_record_keeps_the_labels_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": 7, "domain": "code"}\n{"prompt": "a"}\n')
    (skip,) = read_prompts(str(path), "skip", ["domain"]).skips
    assert skip.labels == '{"domain":"code"}'


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "hf"])
def test_a_label_that_no_record_has_is_refused_with_those_there_are(
    tmp_path: Path, kind: str
) -> None:
    with pytest.raises(ActdsError) as caught:
        read_prompts(source(tmp_path, kind), label_columns=["domain", "langauge"])
    error = caught.value
    assert (error.code, error.place, error.got) == ("E009", "label_columns", "langauge")
    assert error.expected.startswith("some of domain, level, my name, ")
    assert all(name in error.expected for name in ("prompt", "score", "shared"))


def test_the_field_label_is_taken_by_itself_where_it_is_one(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    values: list[Any] = ["spam", 1, ["spam", "ham"], None, "x" * 300]
    path.write_text("".join(json.dumps({"prompt": "a", "label": value}) + "\n" for value in values))
    found = read_prompts(str(path))
    assert [one.labels for one in found.prompts] == [
        '{"label":"spam"}', '{"label":1}', None, None, None,
    ]  # fmt: skip
    assert found.label_columns == ("label",)
    assert not read_prompts(str(path), label_columns=[]).label_columns
    (tmp_path / "q.jsonl").write_text('{"prompt": "a"}\n')
    assert not read_prompts(str(tmp_path / "q.jsonl")).label_columns


@pytest.mark.parametrize(
    ("given", "expected"),
    [("domain, language", ("domain", "language")), ("", ()), (["a,b"], ("a,b",)), (None, None)],
)
def test_columns_are_named_in_one_word_or_a_list(given: Any, expected: Any) -> None:
    settings = WriteSettings.of(
        {"out": "o", "model": Path("m"), "prompts": "p", "hooks": "final", "label_columns": given}
    )
    assert settings.label_columns == expected


@pytest.mark.parametrize("given", ["a,,b", "a,a", ",".join(map(str, range(33))), "x" * 257, "a\n"])
def test_columns_that_cannot_be_used_are_refused(given: str) -> None:
    named = [given] if "\n" in given else given
    with pytest.raises(ActdsError, match=r"E009 label_columns: .*at most 32 names"):
        WriteSettings.of(
            {"out": "o", "model": Path("m"), "prompts": "p", "hooks": "final",
             "label_columns": named}
        )  # fmt: skip


def test_the_plan_has_the_labels_of_each_prompt_and_their_names(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", tokenizer=True)
    settings = WriteSettings.of(
        {"out": "nowhere", "model": model, "prompts": source(tmp_path, "jsonl"),
         "hooks": "resid_post:0", "engine": "transformers", "label_columns": "domain,score"}
    )  # fmt: skip
    plan = make_plan(settings, find_engine("transformers").options({}))
    told = [one.labels and json.loads(one.labels) for one in plan.client]
    assert told == [{"domain": "code", "score": "0.1"}, {"domain": "été"}, {"score": "1e+22"}, None]
    facts = {fact.name: fact.value for fact in plan.facts}
    assert facts["prompts.label_columns"] == '["domain","score"]'
    assert np.all([len(one.token_ids) == 1 for one in plan.encoded])


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        ("label domain=code and role assistant: 1; 0.1", None),
        ("label level=3: 1", "level, which no prompt has.*domain, score"),
        ("xarg domain=code: 1", "xarg domain, which no prompt has"),
        ("role user: 1; 0.1", "user, and no prompt whose roles are known .a text, no chat"),
    ],
)
def test_a_rule_for_what_no_prompt_has_is_refused(
    tmp_path: Path, keep: str, words: str | None
) -> None:
    model = make_tiny_model(tmp_path / "model", tokenizer=True)
    settings = WriteSettings.of(
        {"out": "nowhere", "model": model, "prompts": source(tmp_path, "jsonl"), "keep": keep,
         "hooks": "resid_post:0", "engine": "transformers", "label_columns": "domain,score"}
    )  # fmt: skip
    options = find_engine("transformers").options({})
    if words is not None:
        with pytest.raises(ActdsError, match=words) as refusal:
            make_plan(settings, options)
        assert refusal.value.code == "E009"
        return
    plan = make_plan(settings, options)
    assert [plan.regimes[one.key].takes[0] for one in plan.client] == [True, False, False, False]
