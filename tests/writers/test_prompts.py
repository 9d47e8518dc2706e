from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actds.errors import ActdsError
from actds_writers.prompts.records import PromptSet, read_prompts

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
GOOD: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "id": "tale"},
    {"text": "grün 😀"},
    {"messages": MESSAGES, "id": 7},
]
CONTENT = [("Once upon a time", None), ("grün 😀", None), (None, MESSAGES)]
IDS = ["tale", "row-1", "7"]


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def content(found: PromptSet) -> list[tuple[str | None, Any]]:
    return [(prompt.text, prompt.messages) for prompt in found.prompts]


def refusal(path: Path | str) -> ActdsError:
    with pytest.raises(ActdsError) as caught:
        read_prompts(str(path))
    return caught.value


def test_jsonl_gives_text_messages_ids_rows_and_the_digest_of_the_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", *GOOD)
    found = read_prompts(str(path))
    assert content(found) == CONTENT
    assert [prompt.external_id for prompt in found.prompts] == IDS
    assert [(prompt.index, prompt.row) for prompt in found.prompts] == [(0, 0), (1, 1), (2, 2)]
    assert found.source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (found.source.kind, found.source.name, found.source.n_records) == ("jsonl", "p.jsonl", 3)


def test_blank_lines_and_a_byte_order_mark_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt":"a"}\r\n\n  \n{"prompt":"b"}')
    found = read_prompts(str(path))
    assert [(prompt.row, prompt.text) for prompt in found.prompts] == [(0, "a"), (1, "b")]
    assert found.source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("as_lines", [False, True])
def test_json_is_read_as_an_array_or_as_lines(tmp_path: Path, as_lines: bool) -> None:
    path = tmp_path / "p.json"
    if as_lines:
        write_lines(path, *GOOD)
    else:
        path.write_text(json.dumps(GOOD, indent=1), encoding="utf-8")
    found = read_prompts(str(path))
    assert content(found) == CONTENT
    assert found.source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_text_file_gives_one_prompt_per_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("first \n\n  second\r\n", encoding="utf-8", newline="")
    assert [prompt.text for prompt in read_prompts(str(path)).prompts] == ["first ", "  second"]


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    columns = {
        "other": [1, 2, 3],
        "id": ["tale", None, "7"],
        "prompt": ["Once upon a time", "grün 😀", None],
        "messages": [None, None, MESSAGES],
    }
    pq.write_table(pa.table(columns), path, row_group_size=2)
    found = read_prompts(str(path))
    assert content(found) == CONTENT
    assert [prompt.external_id for prompt in found.prompts] == IDS
    assert found.source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_tools_and_calls_without_words_are_read_from_every_kind_of_file(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"n": 1}}}}]
    call = {"function": {"name": "f", "arguments": {"x": None}}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": said, "tools": tools}) + "\n")
    (prompt,) = read_prompts(str(tmp_path / "p.jsonl")).prompts
    assert prompt.messages == [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert prompt.tools == tools
    # A column of objects has every key of each of them; of JSON it has those that are there.
    more = [*tools, {"type": "function", "function": {"name": "g"}}]
    talk = [{"role": "user", "content": "a"}]
    for name, column in (("a", [more]), ("b", [json.dumps(more)]), ("c", [None])):
        pq.write_table(
            pa.table({"messages": [talk], "tools": column}), tmp_path / f"{name}.parquet"
        )
        (prompt,) = read_prompts(str(tmp_path / f"{name}.parquet")).prompts
        assert (prompt.messages, prompt.tools) == (talk, None if column == [None] else more)
    for bad in ("no JSON", {"a": 1}, [1]):
        (tmp_path / "p.jsonl").write_text(json.dumps({"messages": talk, "tools": bad}) + "\n")
        with pytest.raises(ActdsError, match="`tools` is a"):
            read_prompts(str(tmp_path / "p.jsonl"))


def test_messages_of_a_table_lose_the_keys_that_are_null(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "x"}]
    pq.write_table(pa.table({"messages": [messages]}), tmp_path / "p.parquet")
    assert read_prompts(str(tmp_path / "p.parquet")).prompts[0].messages == messages


TOKENS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7]},
    {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1]},  # padded on the left
    {"input_ids": [5, 6], "text": "of another tokenizer, perhaps"},
    {"prompt_token_ids": [1, 5], "prompt": "as vLLM returns both", "attention_mask": [0, 1]},
]


@pytest.mark.parametrize("as_table", [False, True])
def test_token_ids_are_prompts(tmp_path: Path, as_table: bool) -> None:
    path = tmp_path / ("p.parquet" if as_table else "p.jsonl")
    if as_table:
        pq.write_table(pa.Table.from_pylist([{k: one.get(k) for k in dict.fromkeys(
            name for line in TOKENS for name in line)} for one in TOKENS]), path)  # fmt: skip
    else:
        write_lines(path, *TOKENS)
    found = read_prompts(str(path)).prompts
    assert [(one.token_ids, one.text) for one in found] == [
        ([5, 6, 7], None), ([5, 6], None), (None, TOKENS[2]["text"]), ([1, 5], None),
    ]  # fmt: skip


def test_content_in_parts_is_one_text_and_a_chat_may_be_exact(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What"}, {"type": "text", "text": "is it?"}]
    user = {"role": "user", "content": parts}
    path = write_lines(
        tmp_path / "p.jsonl",
        {"messages": [user], "add_generation_prompt": False},
        {"messages": [user], "continue_final_message": True},
        {"messages": [user], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [user]},
    )
    found = read_prompts(str(path)).prompts
    # As vLLM's server joins them for a template that takes strings.
    assert {one.messages[0]["content"] for one in found if one.messages} == {"What\nis it?"}
    assert [one.options for one in found] == [
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"enable_thinking": False},
        None,
    ]


@pytest.mark.parametrize(
    ("record", "got"),
    [
        ({"input_ids": []}, "`input_ids` is empty"),
        ({"input_ids": "5 6"}, "`input_ids` is a string"),
        ({"prompt_token_ids": [5, -1]}, "`prompt_token_ids` has '-1' at 1"),
        ({"prompt_token_ids": [5, True]}, "has 'True' at 1"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, "`attention_mask` is no mask"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": MESSAGES, "add_generation_prompt": "no"}, "is a string"),
    ],
)
def test_what_is_no_prompt_of_tokens_or_parts_is_refused(
    tmp_path: Path, record: dict[str, Any], got: str
) -> None:
    error = refusal(write_lines(tmp_path / "p.jsonl", record))
    assert error.code == "E002" and got in error.got


def test_folder_of_save_to_disk_is_read_in_its_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    records = [{"prompt": f"p{n}", "id": str(n)} for n in range(20)]
    saved = datasets.Dataset.from_list(records).shuffle(seed=1).select(range(15))
    expected = saved["prompt"][:]
    saved.save_to_disk(tmp_path / "plain", num_shards=3)
    found = read_prompts(f"hf:{tmp_path / 'plain'}")
    assert [prompt.text for prompt in found.prompts] == expected
    assert [prompt.row for prompt in found.prompts] == list(range(15))
    assert found.source.sha256 is None
    assert found.source.sha256_reason == "the source is a folder of 3 files"

    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "splits")
    error = refusal(f"hf:{tmp_path / 'splits'}")
    assert error.code == "E001"
    assert "test, train" in error.got
    assert len(read_prompts(f"hf:{tmp_path / 'splits'}/train").prompts) == 15


def test_folder_of_files_is_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data/b.jsonl", {"prompt": "2"}, {"prompt": "3"})
    write_lines(tmp_path / "data/a.jsonl", {"prompt": "1"})
    found = read_prompts(f"hf:{tmp_path}")
    assert [(prompt.row, prompt.text) for prompt in found.prompts] == [(0, "1"), (1, "2"), (2, "3")]
    pq.write_table(pa.table({"prompt": ["4"]}), tmp_path / "c.parquet")
    assert refusal(f"hf:{tmp_path}").got == "both Parquet and JSONL files"


@pytest.mark.parametrize(
    ("line", "got"),
    [
        (b"{broken", "Expecting property name"),
        (b'["a"]', "a JSON list"),
        (b'"a"', "a JSON string"),
        (b"{}", "fields none"),
        (b'{"question": "a"}', "fields question"),
        (b'{"prompt": null}', "fields prompt"),
        (b'{"prompt": 3}', "`prompt` is a number"),
        (b'{"prompt": ""}', "`prompt` is empty"),
        (b'{"prompt": "\\ud800"}', "unpaired surrogate"),
        (b'{"prompt": "\xff"}', "byte 0xff"),
        (b'{"messages": []}', "`messages` is empty"),
        (b'{"messages": "a"}', "`messages` is a string"),
        (b'{"messages": ["a"]}', "message 0 is a string"),
        (b'{"messages": [{"role": "user"}]}', "`content` of message 0 is missing"),
        (b'{"messages": [{"role": "user", "content": ["a"]}]}', "has a part of type string"),
        (b'{"prompt": "a", "id": true}', "`id` is a boolean"),
        (b'{"prompt": "a", "id": ""}', "`id` of 0 characters"),
        (b"[" * 100_000, "a JSON"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value.replace(" ", "-"),
)
def test_broken_line_is_refused_with_its_number_or_skipped_on_request(
    tmp_path: Path, line: bytes, got: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n' + line + b'\n{"prompt": "b"}\n')
    error = refusal(path)
    assert (error.code, error.place) == ("E002", "prompts.jsonl line 3")
    if not line.startswith(b"[["):
        assert got in error.got

    found = read_prompts(str(path), on_broken="skip")
    assert [(prompt.index, prompt.text) for prompt in found.prompts] == [(0, "a"), (2, "b")]
    (skip,) = found.skips
    assert (skip.index, skip.row, skip.external_id) == (1, 1, "row-1")
    assert skip.broken == f"E002 prompts.jsonl line 3: {error.got}; expected {error.expected}"
    assert found.source.n_records == 3


def test_broken_row_of_a_table_is_refused_with_its_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", None], "id": ["x", "y"]}), tmp_path / "p.parquet")
    assert refusal(tmp_path / "p.parquet").place == "p.parquet row 1"
    (skip,) = read_prompts(str(tmp_path / "p.parquet"), on_broken="skip").skips
    assert skip.external_id == "y"


def test_table_without_a_prompt_column_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["x"], "question": ["?"]}), tmp_path / "p.parquet")
    error = refusal(tmp_path / "p.parquet")
    assert (error.code, error.got) == ("E002", "columns id, question")


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.txt"])
def test_source_without_a_record_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\n \n", encoding="utf-8")
    assert refusal(tmp_path / name).code == "E003"


def test_source_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_bytes(b"PAR1 no Parquet PAR1")
    (tmp_path / "p.yaml").write_text("a")
    (tmp_path / "noending").write_text("a")
    for name in ("gone.jsonl", "p.parquet", "p.yaml", "noending", "."):
        assert refusal(tmp_path / name).code == "E001", name
    for name in ("gone", "."):
        assert refusal(f"hf:{tmp_path / name}").code == "E001", name
