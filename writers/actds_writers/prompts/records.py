"""Prompts: read a source of prompts into records, and say which record is no prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from actds.errors import ActdsError
from actds_writers.prompts.sources import Broken, Record, Source, open_source

OnBroken = Literal["error", "skip"]
Message = dict[str, Any]

__all__ = ["OnBroken", "Prompt", "PromptSet", "PromptSource", "SkippedRecord", "read_prompts"]

FIELDS = ("messages", "prompt", "text")
"""Where a record may hold its prompt; the first that is there and not null is taken."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: text as it stands, or messages for the chat template.

    Args:
        index: number of the request in the run, from 0. Skipped records take a number too.
        source: last path segment of the source.
        row: record of the source, from 0; blank lines are no records.
        text: the prompt, or None when it is messages.
        messages: a list of ``{"role": str, "content": str, ...}``, or None when it is text.
        external_id: the record's ``id``, else ``row-<row>``. It need not be unique.
    """

    index: int
    source: str
    row: int
    text: str | None
    messages: list[Message] | None
    external_id: str


@dataclass(frozen=True)
class SkippedRecord:
    """A record that is no prompt, left out because the caller asked for it.

    Args:
        index: number of the request in the run, from 0.
        source: last path segment of the source.
        row: record of the source, from 0.
        external_id: the record's ``id`` when that much could be read, else ``row-<row>``.
        reason: code, place and words, for the requests table.
    """

    index: int
    source: str
    row: int
    external_id: str
    reason: str


@dataclass(frozen=True)
class PromptSource:
    """What the prompts were read from, as it stands in the run record.

    Args:
        kind: ``jsonl``, ``json``, ``parquet``, ``text`` or ``hf``.
        name: last path segment.
        sha256: digest of the file as it was read; None for a folder.
        sha256_reason: why there is no digest, else None.
        n_records: records found, broken ones included.
        fields: the record fields that prompts were taken from, sorted.
    """

    kind: str
    name: str
    sha256: str | None
    sha256_reason: str | None
    n_records: int
    fields: tuple[str, ...]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a source, the records that are none, and the source itself."""

    prompts: list[Prompt]
    skips: list[SkippedRecord]
    source: PromptSource


def read_prompts(spec: str, on_broken: OnBroken = "error") -> PromptSet:
    """Return the prompts of a source, read once from its beginning to its end.

    A record is a JSON object or a table row with ``messages`` (a list of role and content),
    ``prompt`` or ``text`` (a string), and optionally ``id``; of a text file, a line that is not
    blank.

    Args:
        spec: path of a ``.jsonl``, ``.ndjson``, ``.json``, ``.parquet`` or ``.txt`` file, or
            ``hf:FOLDER`` for a folder made by ``save_to_disk`` or one of Parquet or JSONL files.
        on_broken: ``error`` refuses the source at its first broken record; ``skip`` records it.

    Raises:
        ActdsError: E001 when the source is missing, unreadable or of no known kind; E002 at a
            broken record, with its line or row; E003 when there is no record at all.
    """
    prompts: list[Prompt] = []
    skips: list[SkippedRecord] = []
    fields: set[str] = set()
    source = open_source(spec)
    for row, record in enumerate(_records(source, spec)):
        external_id = f"row-{row}"
        try:
            value = record.value
            if isinstance(value, Broken):
                raise value
            external_id = _external_id(value, external_id)
            field, text, messages = _content(value)
        except Broken as broken:
            error = ActdsError("E002", record.place, got=broken.got, expected=broken.expected)
            if on_broken == "error":
                raise error from None
            reason = f"E002 {record.place}: {broken.got}; expected {broken.expected}"
            skips.append(SkippedRecord(row, source.name, row, external_id, reason))
            continue
        fields.add(field)
        prompts.append(Prompt(row, source.name, row, text, messages, external_id))
    if not prompts and not skips:
        raise ActdsError("E003", source.name, got="no record", expected="at least one prompt")
    facts = PromptSource(
        kind=source.kind,
        name=source.name,
        sha256=source.sha256(),
        sha256_reason=source.sha256_reason,
        n_records=len(prompts) + len(skips),
        fields=tuple(sorted(fields)),
    )
    return PromptSet(prompts, skips, facts)


def _records(source: Source, spec: str) -> Iterator[Record]:
    try:
        yield from source.records()
    except ActdsError:
        raise
    except OSError as error:
        place = Path(spec).name
        got = error.strerror or str(error)
        raise ActdsError("E001", place, got=got, expected="a readable source") from None


def _content(record: Any) -> tuple[str, str | None, list[Message] | None]:
    if not isinstance(record, dict):
        raise Broken(f"a JSON {_kind(record)}", "an object with `prompt` or `messages`")
    for field in FIELDS:
        value = record.get(field)
        if value is None:
            continue
        if field == "messages":
            return field, None, _messages(value)
        if not isinstance(value, str):
            raise Broken(f"`{field}` is a {_kind(value)}", "a string")
        if not value:
            raise Broken(f"`{field}` is empty", "a string with text in it")
        _require_unicode(value, f"`{field}`")
        return field, value, None
    present = ", ".join(sorted(str(key) for key in record)[:8]) or "none"
    raise Broken(f"fields {present}", "a `prompt` string or a `messages` list")


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise Broken(f"`messages` is a {_kind(value)}", "a list of messages")
    if not value:
        raise Broken("`messages` is empty", "at least one message")
    messages: list[Message] = []
    for number, message in enumerate(value):
        place = f"message {number}"
        if not isinstance(message, dict):
            raise Broken(f"{place} is a {_kind(message)}", "an object with role and content")
        for key in ("role", "content"):
            part = message.get(key)
            if not isinstance(part, str):
                found = "is missing" if part is None else f"is a {_kind(part)}"
                raise Broken(f"`{key}` of {place} {found}", "a string")
            _require_unicode(part, f"`{key}` of {place}")
        # Table files give every message every key of the column, null where it has none.
        messages.append({key: part for key, part in message.items() if part is not None})
    return messages


def _external_id(record: Any, default: str) -> str:
    value = record.get("id") if isinstance(record, dict) else None
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Broken(f"`id` is a {_kind(value)}", "a string or an integer")
    text = str(value)
    if not text or len(text) > 256:
        raise Broken(f"`id` of {len(text)} characters", "1 to 256 characters")
    _require_unicode(text, "`id`")
    return text


def _require_unicode(text: str, place: str) -> None:
    # JSON may escape half of a surrogate pair; neither a tokenizer nor Arrow can hold it.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Broken(f"{place} holds an unpaired surrogate", "valid Unicode") from None


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number" if isinstance(value, int | float) else "value")
