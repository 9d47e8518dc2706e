"""Prompts read from files and folders, and the records that are not prompts."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actds.errors import ActdsError
from actds.format.canonical import MAX_INTEGER
from actds.format.labels import MAX_LENGTH, Label, dump_labels
from actds_writers.prompts.conversation import UNKNOWN, Turn, turn_of

OnBroken = Literal["error", "skip"]
Message = dict[str, Any]


FIELDS = ("prompt_token_ids", "messages", "prompt", "text", "input_ids")
"""Fields that may have the prompt; the first one that is not null is used. ``input_ids`` beside a
text may be of another tokenizer, and the text is used."""
IDS = ("prompt_token_ids", "input_ids")
MASK = "attention_mask"
CHAT_OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
"""Fields beside ``messages`` that say how they are rendered, as in requests to a server."""
TEXT_PARTS = ("text", "input_text", "output_text")
MAX_TOKEN_ID = 2**31 - 1
CONVERSATION = "conversation_id"
"""Field that names the conversation; without it the opening of the messages does."""
LABEL = "label"
"""The field that is a label where nobody names others."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: text, messages for the chat template, or token ids.

    Args:
        index: number of the request in the run, from 0; skipped records are numbered too.
        row: record of the source, from 0; blank lines are not counted.
        external_id: the record's ``id``, else ``row-<row>``; need not be unique.
        labels: what the user says of it, as in the table ``requests``; None for nothing.
        turn: which conversation it is of, and its turn there.
        broken: why the record is no prompt, None where it is.
    """

    index: int
    source: str
    row: int
    text: str | None
    messages: list[Message] | None
    external_id: str
    tools: list[Message] | None = None
    labels: str | None = None
    token_ids: list[int] | None = None
    options: dict[str, Any] | None = None
    turn: Turn = UNKNOWN
    broken: str | None = None


@dataclass(frozen=True)
class PromptSource:
    """The source of the prompts, as in the run record."""

    kind: str
    name: str
    sha256: str | None
    sha256_reason: str | None
    n_records: int


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a source, its broken records, the source itself, and who labels them.

    Args:
        skips: broken records, skipped at the caller's request; with labels, if these could be read.
        label_columns: fields that are labels, sorted.
    """

    prompts: list[Prompt]
    skips: list[Prompt]
    source: PromptSource
    label_columns: tuple[str, ...] = ()


def read_prompts(
    spec: str, on_broken: OnBroken = "error", label_columns: Sequence[str] | None = None
) -> PromptSet:
    """Return the prompts of a source, read once from beginning to end.

    A record is a JSON object or a table row with ``messages`` (a list of role and content, and
    optionally ``tools`` beside it), ``prompt`` or ``text`` (a string), or ``prompt_token_ids`` or
    ``input_ids`` (a list of token ids, of which an ``attention_mask`` leaves out the padding), and
    optionally ``id``; of a text file, a line that is not blank.

    Args:
        spec: path of a ``.jsonl``, ``.ndjson``, ``.json``, ``.parquet`` or ``.txt`` file, or
            ``hf:FOLDER`` for a folder made by ``save_to_disk`` or one of Parquet or JSONL files.
        on_broken: ``error`` raises for the first broken record; ``skip`` skips it.
        label_columns: fields whose values are labels; None takes ``label`` where it is one.

    Raises:
        ActdsError: E001 when the source is missing, unreadable or of unknown kind; E002 for a
            broken record, with its line or row; E003 when there is no record at all; E009 for a
            label that no record has.
    """
    prompts: list[Prompt] = []
    skips: list[Prompt] = []
    wanted = (LABEL,) if label_columns is None else tuple(label_columns)
    source = open_source(spec, wanted)
    for row, (place, value) in enumerate(source.records()):
        external_id, labels = f"row-{row}", None
        try:
            if isinstance(value, Broken):
                raise value
            external_id = _name(value, "id") or external_id
            labels = _labels(value, wanted, is_asked=label_columns is not None)
            content = _content(value)
            content["turn"] = turn_of(content["messages"] or (), _name(value, CONVERSATION))
        except Broken as broken:
            error = ActdsError("E002", place, got=broken.got, expected=broken.expected)
            if on_broken == "error":
                raise error from None
            reason = f"E002 {place}: {broken.got}; expected {broken.expected}"
            content = {"text": None, "messages": None, "broken": reason}
        prompt = Prompt(row, source.name, row, external_id=external_id, labels=labels, **content)
        (prompts if prompt.broken is None else skips).append(prompt)
    if not prompts and not skips:
        raise ActdsError("E003", source.name, got="no record", expected="at least one prompt")
    unknown = sorted(set(wanted) - source.fields)
    if unknown and label_columns is not None:
        got, present = ", ".join(unknown), ", ".join(sorted(source.fields)[:40])
        raise ActdsError("E009", "label_columns", got=got, expected=f"some of {present}")
    named = tuple(sorted(set(wanted) & source.fields))
    return PromptSet(prompts, skips, source.facts(len(prompts) + len(skips)), named)


def _labels(record: Any, names: tuple[str, ...], *, is_asked: bool) -> str | None:
    labels: dict[str, Label] = {}
    for name in names if isinstance(record, dict) else ():
        value = record.get(name)
        if value is None:
            continue
        try:
            labels[name] = _label(value, f"the label `{name}`")
        except Broken:
            if is_asked:
                raise
    text = dump_labels(labels)
    return None if text is None else sys.intern(text)  # few texts, and millions of records


def _label(value: Any, place: str) -> Label:
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise Broken(f"{place} is {str(value)[:24]}", "an integer of 64 bits")
        return value
    if not isinstance(value, str):
        kind = str(value) if isinstance(value, float) else f"a {_kind(value)}"
        raise Broken(f"{place} is {kind}", "a string, an integer, a boolean or a finite number")
    if len(value) > MAX_LENGTH:
        raise Broken(f"{place} has {len(value)} characters", f"at most {MAX_LENGTH}")
    _require_unicode(value, place)
    return value


def _content(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise Broken(f"a JSON {_kind(record)}", "an object with `prompt` or `messages`")
    for name in FIELDS:
        value = record.get(name)
        if value is None:
            continue
        if name == "messages":
            chat = {"messages": _messages(value), "tools": _tools(record.get("tools"))}
            return {"text": None, **chat, "options": _chat_options(record)}
        if name in IDS:
            ids = _token_ids(value, name, record.get(MASK) if name == "input_ids" else None)
            return {"text": None, "messages": None, "token_ids": ids}
        if not isinstance(value, str):
            raise Broken(f"`{name}` is a {_kind(value)}", "a string")
        if not value:
            raise Broken(f"`{name}` is empty", "a string that is not empty")
        _require_unicode(value, f"`{name}`")
        return {"text": value, "messages": None}
    present = ", ".join(sorted(str(key) for key in record)[:8]) or "none"
    raise Broken(f"fields {present}", "a `prompt` string, a `messages` list or `input_ids`")


def _token_ids(value: Any, name: str, mask: Any) -> list[int]:
    if not isinstance(value, list) or not value:
        raise Broken(f"`{name}` is {'empty' if value == [] else f'a {_kind(value)}'}", "token ids")
    for place, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            got = f"`{name}` has {str(token)[:40]!r} at {place}"
            raise Broken(got, f"integers from 0 to {MAX_TOKEN_ID}")
    if mask is None:
        return value
    if not isinstance(mask, list) or len(mask) != len(value) or not set(mask) <= {0, 1}:
        raise Broken(f"`{MASK}` is no mask of `{name}`", f"{len(value)} times 0 or 1")
    return [token for token, is_real in zip(value, mask, strict=True) if is_real]


def _chat_options(record: dict[str, Any]) -> dict[str, Any] | None:
    options = {name: value for name in CHAT_OPTIONS if (value := record.get(name)) is not None}
    further = options.pop("chat_template_kwargs", {})
    if isinstance(further, str):
        further = _parse(further)
    if not isinstance(further, dict):
        raise Broken(f"`chat_template_kwargs` is a {_kind(further)}", "an object")
    for name, value in options.items():
        if not isinstance(value, bool):
            raise Broken(f"`{name}` is a {_kind(value)}", "true or false")
    if options.get("continue_final_message"):
        if options.get("add_generation_prompt"):
            raise Broken("`add_generation_prompt` and `continue_final_message`", "one of them")
        options["add_generation_prompt"] = False
    return {**further, **options} or None


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
        message = {key: part for key, part in message.items() if part is not None}
        if message.get("tool_calls"):  # which may have no words beside it
            message.setdefault("content", "")
        if isinstance(message.get("content"), list):
            message["content"] = _joined(message["content"], f"`content` of {place}")
        for key in ("role", "content"):
            part = message.get(key)
            if not isinstance(part, str):
                how = "is missing" if part is None else f"is a {_kind(part)}"
                raise Broken(f"`{key}` of {place} {how}", "a string")
            _require_unicode(part, f"`{key}` of {place}")
        messages.append(message)
    return messages


def _joined(parts: list[Any], place: str) -> str:
    """Return content that stands in parts as one text, as vLLM's server joins them."""
    texts: list[str] = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else _kind(part)
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise Broken(f"{place} has a part of type {str(kind)[:40]}", "parts that are text")
        texts.append(text)
    if not texts:
        raise Broken(f"{place} is an empty list", "a string, or parts that are text")
    return "\n".join(texts)


def _tools(value: Any) -> list[Message] | None:
    """Return definitions of tools: a list of objects, which table files may hold as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Broken("`tools` is a string", "a list of objects, or one as JSON") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Broken(f"`tools` is a {_kind(value)}", "a list of objects")
    return value


def _filled(value: Any) -> Any:
    """Return a value without nulls.

    In table files every object has every key of the column, null where it is missing.
    """
    if isinstance(value, dict):
        return {key: _filled(part) for key, part in value.items() if part is not None}
    return [_filled(part) for part in value] if isinstance(value, list) else value


def _name(record: Any, field: str) -> str | None:
    value = record.get(field) if isinstance(record, dict) else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Broken(f"`{field}` is a {_kind(value)}", "a string or an integer")
    text = str(value)
    if not text or len(text) > 256:
        raise Broken(f"`{field}` of {len(text)} characters", "1 to 256 characters")
    _require_unicode(text, f"`{field}`")
    return text


def _require_unicode(text: str, place: str) -> None:
    # JSON may escape half of a surrogate pair, which neither tokenizers nor Arrow can represent.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Broken(f"{place} has an unpaired surrogate", "valid Unicode") from None


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number" if isinstance(value, int | float) else "value")


Records = Iterator[tuple[str, Any]]
"""Place and value of each raw record."""
Reader = Callable[["_HashedLines", str, "Source"], Records]
COLUMNS = ("id", CONVERSATION, *FIELDS, "tools", MASK, *CHAT_OPTIONS)
BATCH_ROWS = 1024
BLOCK_NBYTES = 1 << 20


class Broken(Exception):
    """A record that cannot be read as a prompt: what was found, and what was expected."""

    def __init__(self, got: str, expected: str) -> None:
        super().__init__(got, expected)
        self.got = got
        self.expected = expected


@dataclass(frozen=True)
class Source:
    """A stream of records, and after the last one the digest of a single file.

    Args:
        labels: fields that are labels.
        fields: those of the records that were read.
    """

    kind: str
    name: str
    files: list[tuple[str, _HashedLines]]
    read: Reader
    labels: tuple[str, ...] = ()
    fields: set[str] = field(default_factory=set)

    def records(self) -> Records:
        try:
            for place, lines in self.files:
                yield from self.read(lines, place, self)
        except ActdsError:
            raise
        except OSError as error:
            got = error.strerror or str(error)
            raise _unreadable(self.name, got, "a readable source") from None

    def facts(self, n_records: int) -> PromptSource:
        """Return what the run record says of it, after the last record."""
        folder = self.kind == "hf"
        digest = None if folder else self.files[0][1].hexdigest()
        why = f"the source is a folder of {len(self.files)} files" if folder else None
        return PromptSource(self.kind, self.name, digest, why, n_records)


def open_source(spec: str, labels: tuple[str, ...] = ()) -> Source:
    """Return the source that a specification names, unread; raises E001 for a bad one."""
    if spec.startswith("hf:"):
        if not (folder := spec.removeprefix("hf:")) or folder.startswith("//"):
            raise _unreadable(spec, "no folder", "hf:FOLDER, a folder on this machine")
        return _open_folder(Path(folder), spec, labels)
    path = Path(spec)
    if path.is_dir():
        raise _unreadable(path.name, "a folder", "a file, or hf:FOLDER for a folder of prompts")
    if not path.exists():
        raise _unreadable(spec, "no such file", "a JSONL, Parquet or text file, or hf:FOLDER")
    return _open_file(path, labels)


def _open_file(path: Path, labels: tuple[str, ...]) -> Source:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        got = f"a file with suffix {path.suffix!r}" if path.suffix else "a file without suffix"
        raise _unreadable(path.name, got, f"one of {', '.join(sorted(_READERS))}")
    kind, read = reader
    return Source(kind, path.name, [(path.name, _HashedLines(path))], read, labels)


class _HashedLines:
    """The lines of a file, and the digest of all its bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        self._complete = False

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as stream:
            for line in stream:
                self._digest.update(line)
                yield line
        self._complete = True

    def hexdigest(self) -> str:
        if not self._complete:
            with self.path.open("rb") as stream:
                self._digest = hashlib.file_digest(stream, "sha256")
            self._complete = True
        return self._digest.hexdigest()


def _numbered(lines: _HashedLines, name: str) -> Iterator[tuple[str, str | Broken]]:
    """Yield (place, text) of the lines that are not blank; lines are counted from 1."""
    for number, raw in enumerate(lines, start=1):
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if not raw.strip():
            continue
        place = f"{name} line {number}"
        try:
            yield place, raw.decode("utf-8")
        except UnicodeDecodeError as error:
            yield place, Broken(f"byte {raw[error.start]:#04x} at {error.start}", "UTF-8")


def _read_text(lines: _HashedLines, name: str, source: Source) -> Records:
    source.fields.add("text")
    for place, text in _numbered(lines, name):
        value = text if isinstance(text, Broken) else {"text": text.rstrip("\r\n")}
        yield place, value


def _read_jsonl(lines: _HashedLines, name: str, source: Source) -> Records:
    for place, text in _numbered(lines, name):
        value = text if isinstance(text, Broken) else _parse(text)
        source.fields.update(value if isinstance(value, dict) else ())
        yield place, value


def _read_json(lines: _HashedLines, name: str, source: Source) -> Records:
    """Yield the members of a JSON array; a ``.json`` file of JSON lines is accepted too."""
    with lines.path.open("rb") as stream:
        head = stream.read(BLOCK_NBYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head and not head.startswith(b"["):
        yield from _read_jsonl(lines, name, source)
        return
    try:
        members = json.loads(b"".join(lines).decode("utf-8-sig").strip() or "[]")
    except (ValueError, RecursionError) as error:
        raise ActdsError("E002", name, got=first_line(error), expected="a JSON array") from None
    for row, value in enumerate(members):
        source.fields.update(value if isinstance(value, dict) else ())
        yield f"{name} row {row}", value


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Broken(first_line(error), "a JSON object on one line")


def _read_parquet(lines: _HashedLines, name: str, source: Source) -> Records:
    try:
        with pq.ParquetFile(lines.path) as file:
            columns = _columns(file.schema_arrow.names, name, source)
            yield from _rows(file.iter_batches(BATCH_ROWS, columns=columns), name)
    except pa.ArrowException as error:
        raise _unreadable(name, first_line(error), "a Parquet file") from None


def _read_arrow(lines: _HashedLines, name: str, source: Source) -> Records:
    try:
        with pa.memory_map(str(lines.path)) as file, pa.ipc.open_stream(file) as stream:
            columns = _columns(stream.schema.names, name, source)
            yield from _rows((batch.select(columns) for batch in stream), name)
    except pa.ArrowException as error:
        raise _unreadable(name, first_line(error), "an Arrow file of save_to_disk") from None


def _columns(names: list[str], place: str, source: Source) -> list[str]:
    columns = [name for name in COLUMNS if name in names]
    if not set(columns) & {*FIELDS}:
        got = f"columns {', '.join(names[:8]) or 'none'}"
        raise ActdsError("E002", place, got=got, expected=f"a column {' or '.join(FIELDS)}")
    source.fields.update(names)
    return [
        *columns,
        *(name for name in source.labels if name in names and name not in columns),
    ]


def _rows(batches: Iterator[pa.RecordBatch], name: str) -> Records:
    row = 0
    for batch in batches:
        for value in _doubles(batch).to_pylist():
            yield f"{name} row {row}", _filled(value)
            row += 1


def _doubles(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose numbers of 32 bits are those of 64 with the same shortest text."""
    for place, column in enumerate(batch.columns):
        if pa.types.is_float32(column.type):
            wide = pc.cast(pc.cast(column, pa.string()), pa.float64())
            batch = batch.set_column(place, batch.schema.names[place], wide)
    return batch


def _open_folder(root: Path, spec: str, labels: tuple[str, ...]) -> Source:
    if root.is_file():
        return _open_file(root, labels)
    if not root.is_dir():
        raise _unreadable(spec, "no such folder", "a folder on this machine")
    name = root.resolve().name
    if (root / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in root.glob("*/state.json"))
        example = f"{spec}/{splits[0]}" if splits else "a dataset with a split"
        raise _unreadable(spec, f"splits {', '.join(splits) or 'none'}", f"one split: {example}")
    if (root / "state.json").is_file():
        return _folder(name, root, _saved_files(root, spec), _read_arrow, labels)
    paths = {
        suffix: sorted(path for path in root.rglob(f"*{suffix}") if path.is_file())
        for suffix in (".parquet", ".jsonl")
    }
    suffixes = [suffix for suffix, members in paths.items() if members]
    if len(suffixes) != 1:
        got = "both Parquet and JSONL files" if suffixes else "no Parquet or JSONL file"
        raise _unreadable(spec, got, "a folder of save_to_disk, of Parquet or of JSONL files")
    return _folder(name, root, paths[suffixes[0]], _READERS[suffixes[0]][1], labels)


def _folder(
    name: str, root: Path, paths: list[Path], read: Reader, labels: tuple[str, ...]
) -> Source:
    places = [f"{name}/{path.relative_to(root).as_posix()}" for path in paths]
    files = list(zip(places, map(_HashedLines, paths), strict=True))
    return Source("hf", name, files, read, labels)


def _saved_files(root: Path, spec: str) -> list[Path]:
    """Return the data files of a saved dataset, in its order."""
    try:
        state = json.loads((root / "state.json").read_text(encoding="utf-8"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(spec, f"state.json: {first_line(error)}", "a saved dataset") from None
    # Old versions of datasets saved a selection as an index beside the unselected rows.
    if state.get("_indices_data_files"):
        raise _unreadable(spec, "a saved selection", "a dataset saved after flatten_indices()")
    missing = [name for name in names if not (root / name).is_file()]
    if missing or any(Path(name).name != name for name in names):
        raise _unreadable(spec, f"no data file {(missing or names)[0]}", "the files it names")
    return [root / name for name in names]


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def _unreadable(place: str, got: str, expected: str) -> ActdsError:
    return ActdsError("E001", place, got=got, expected=expected)


_READERS: dict[str, tuple[str, Reader]] = {
    ".jsonl": ("jsonl", _read_jsonl),
    ".ndjson": ("jsonl", _read_jsonl),
    ".json": ("json", _read_json),
    ".parquet": ("parquet", _read_parquet),
    ".txt": ("text", _read_text),
}
