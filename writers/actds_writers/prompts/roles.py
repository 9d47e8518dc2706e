"""Roles of a chat's positions: who wrote each token, found by marks that pass the model's template.

Every text of the conversation is put between two private characters and the chat is rendered
again. When the rendering without the marks is the real one, the marks say which characters came
from which message; all others are the template's own. When it is not, under none of the ways to
place the marks, nothing is known: a role is never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from actds_writers.ipc.messages import LETTERS, UNKNOWN
from actds_writers.prompts.records import Message

Render = Callable[[list[Message], "list[Message] | None"], str]
"""Returns messages and tool definitions as the text that the template makes of them."""

_SYSTEM, _USER, _ASSISTANT, _THINKING, _TOOL, _TEMPLATE = LETTERS.values()

_LETTER_OF = {
    "system": _SYSTEM,
    "developer": _SYSTEM,
    "user": _USER,
    "human": _USER,
    "assistant": _ASSISTANT,
    "model": _ASSISTANT,
    "gpt": _ASSISTANT,
    "tool": _TOOL,
    "function": _TOOL,
    "ipython": _TOOL,
    "observation": _TOOL,
}
"""By the role of a message; of any other one nothing is known."""
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")
_DEFINED_FIELDS = ("name", "description")
"""Texts of a tool's definition that are marked: templates compare others, such as types."""

_OPEN, _CLOSE, _N_MARKS = 0xF0000, 0x100000, 0xFFFE
"""The two planes for private use: a mark and its number are one character."""
_MARK = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_KEPT = re.compile(r"([<◁][^<>◁▷\s]{1,64}[>▷]|\[/?[A-Z_]{1,64}\]|\s+)")
"""What stays unmarked in pieces: tags, which templates look for, and white space."""
_INDENTS = (None, 4, 2)

THINKING_TOKENS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Tokens between which models think."""


class Unlabelled(Exception):
    """The roles of a chat cannot be known; the text says why."""


@dataclass(frozen=True)
class ThinkingMarks:
    """The token ids that begin and end a thought; none of either for most tokenizers."""

    begin: frozenset[int] = frozenset()
    end: frozenset[int] = frozenset()

    @classmethod
    def of(cls, vocabulary: dict[str, int]) -> ThinkingMarks:
        """Return the marks among the added tokens of a tokenizer."""
        pairs = [
            (vocabulary[begin], vocabulary[end])
            for begin, end in THINKING_TOKENS
            if begin in vocabulary and end in vocabulary
        ]
        return cls(frozenset(a for a, _ in pairs), frozenset(b for _, b in pairs))


def character_labels(
    messages: list[Message], tools: list[Message] | None, text: str, render: Render
) -> str:
    """Return who wrote each character of a rendered chat.

    Returns:
        A letter of ``LETTERS`` or ``UNKNOWN`` for each character.

    Raises:
        Unlabelled: no marked rendering is the real one.
    """
    if _MARK.search(json.dumps([messages, tools], ensure_ascii=False, default=str) + text):
        raise Unlabelled("characters for private use in the chat")
    for cut in (_whole, _inner, _pieces):
        marks = _Marks(cut)
        try:
            marked = render(*marks.mark(messages, tools))
        except Unlabelled:
            raise
        # The template is the model's code: what it makes of marks may be any error.
        except Exception:
            continue
        labels = marks.labels(marked, text)
        if labels is not None:
            return labels
    raise Unlabelled("the template changes the texts of messages")


def token_labels(labels: str, text: str, offsets: Iterable[tuple[int, int]]) -> str:
    """Return the label of each token.

    A token of several labels has the first one that is not the template's. White space counts
    only in tokens that are nothing else: ``" Hello"`` is the message's.
    """
    of_tokens = []
    for start, stop in offsets:
        word = text[start:stop]
        if core := word.strip():
            start += len(word) - len(word.lstrip())
            stop = start + len(core)
        # A token of no character, as a tokenizer may put before the first one, has that of its
        # place.
        written = labels[start : max(stop, start + 1)].lstrip(_TEMPLATE)
        of_tokens.append(written[0] if written else _TEMPLATE)
    return "".join(of_tokens)


def with_generation(labels: str, mask: Sequence[int]) -> str:
    """Return labels of tokens with what a template's ``{% generation %}`` says is the model's."""
    return "".join(
        _ASSISTANT if given and label == _TEMPLATE else label
        for label, given in zip(labels, mask, strict=True)
    )


def with_thinking(
    labels: str, token_ids: Sequence[int], marks: ThinkingMarks, *, thinks: bool = False
) -> tuple[str, bool]:
    """Return labels of tokens with the thoughts in the assistant's text, and whether one is open.

    The marks are part of a thought, where they are not the template's.
    """
    if not thinks and marks.begin.isdisjoint(token_ids):
        return labels, False
    of_tokens = []
    for label, token in zip(labels, token_ids, strict=True):
        ours = label in (_ASSISTANT, _THINKING, _TEMPLATE)
        thinks = ours and (thinks or token in marks.begin)
        of_tokens.append(_THINKING if thinks and label == _ASSISTANT else label)
        thinks = thinks and token not in marks.end
    return "".join(of_tokens), thinks


def sampled_labels(token_ids: Sequence[int], marks: ThinkingMarks, *, thinks: bool) -> str:
    return with_thinking(_ASSISTANT * len(token_ids), token_ids, marks, thinks=thinks)[0]


# How the marks are placed in a text: each returns its pieces, marked ones at odd places.
def _whole(text: str) -> list[str]:
    return ["", text, ""] if text else [""]


def _inner(text: str) -> list[str]:
    """The template may strip the text: white space stays outside."""
    core = text.strip()
    return [*text.partition(core)] if core else [text]


def _pieces(text: str) -> list[str]:
    """The template may look for tags in the text, and cut it there: they stay unmarked, too."""
    parts, words = [""], _KEPT.split(text)
    for number, part in enumerate(words):
        if number % 2 or not part:
            parts[-1] += part
        else:
            parts += [part, ""]
    if len(parts) == 1 and text.strip():
        raise Unlabelled("a message of nothing but tags, which the template changes")
    return parts


@dataclass(frozen=True)
class _Piece:
    """A marked piece.

    Args:
        before: text between it and the piece before, or before the first one, in its source.
        after: text after the last piece of its source.
        is_first: whether it is the first one of its source.
        is_once: whether only its first place counts, as of the name of a called tool, which
            templates write over the tool's answer again.
    """

    label: str
    before: str = ""
    after: str = ""
    is_first: bool = True
    is_once: bool = False


class _Marks:
    """Marks the texts of one conversation, and reads the marks in its rendering."""

    def __init__(self, cut: Callable[[str], list[str]]) -> None:
        self._cut = cut
        self._pieces: list[_Piece] = []
        self._objects: list[tuple[str, Any]] = []

    def mark(
        self, messages: list[Message], tools: list[Message] | None
    ) -> tuple[list[Message], list[Message] | None]:
        marked = None if tools is None else [self._object(_TOOL, tool) for tool in tools]
        return [self._message(message) for message in messages], marked

    def labels(self, marked: str, text: str) -> str | None:
        placed = self._placed(marked, text)
        if placed is None:
            return None
        letters = bytearray(_TEMPLATE.encode() * len(text))

        def put(label: str, start: int, stop: int) -> None:
            letters[start:stop] = label.encode() * (stop - start)

        last, end, seen = -1, 0, set()
        for number, start, stop in placed:
            piece = self._pieces[number]
            if piece.is_once and number in seen:
                continue
            seen.add(number)
            put(piece.label, start, stop)
            if piece.is_first:
                if piece.before and text[end:start].endswith(piece.before):
                    put(piece.label, start - len(piece.before), start)
            elif number == last + 1 and text[end:start] in (piece.before, _escaped(piece.before)):
                put(piece.label, end, start)
            if piece.after and text.startswith(piece.after, stop):
                put(piece.label, stop, stop + len(piece.after))
            last, end = number, stop
        for label, value in self._objects:
            for start, stop in _json_places(value, marked):
                put(label, start, stop)
        return letters.decode()

    def _placed(self, marked: str, text: str) -> list[tuple[int, int, int]] | None:
        """Return number, start and stop of every piece in the text, in order."""
        if _MARK.sub("", marked) != text:
            return None
        placed: list[tuple[int, int, int]] = []
        opened: tuple[int, int] | None = None
        for n_before, mark in enumerate(_MARK.finditer(marked)):
            code, at = ord(mark[0]), mark.start() - n_before
            if code < _CLOSE:
                if opened is not None:
                    return None
                opened = code - _OPEN, at
            else:
                if opened is None or opened[0] != code - _CLOSE:
                    return None
                placed.append((opened[0], opened[1], at))
                opened = None
        return placed if opened is None else None

    def _message(self, message: Message) -> Message:
        label = _LETTER_OF.get(str(message.get("role")), UNKNOWN)
        marked = dict(message)
        if isinstance(content := message.get("content"), str):
            marked["content"] = self._text(label, content)
        elif content is not None:
            marked["content"] = self._parts(label, content)
        for name in _THOUGHT_FIELDS:
            if isinstance(message.get(name), str):
                marked[name] = self._text(_THINKING, message[name])
        if isinstance(calls := message.get("tool_calls"), list):
            marked["tool_calls"] = [self._call(label, call) for call in calls]
        return marked

    def _parts(self, label: str, content: Any) -> list[Message]:
        """Return the content of a message in parts, as some templates want it, with marks."""
        parts = content if isinstance(content, list) else [content]
        if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
            raise Unlabelled("a message with a part that is no text")
        return [{**part, "text": self._text(label, part["text"])} for part in parts]

    def _text(self, label: str, text: str) -> str:
        parts = self._cut(text)
        for place in range(1, len(parts), 2):
            after = parts[-1] if place == len(parts) - 2 else ""
            is_first = place == 1
            # White space at the edges may be the template's own.
            before = parts[place - 1].lstrip() if is_first else parts[place - 1]
            piece = _Piece(label, before, after.rstrip(), is_first)
            parts[place] = self._wrapped(parts[place], piece)
        return "".join(parts)

    def _object(self, label: str, value: Any) -> Any:
        """Return a tool's definition with its texts marked."""

        def mark(value: Any, name: str = "") -> Any:
            if isinstance(value, dict):
                return {key: mark(part, key) for key, part in value.items()}
            if isinstance(value, list):
                return [mark(part) for part in value]
            if isinstance(value, str) and value and name in _DEFINED_FIELDS:
                return self._wrapped(value, _Piece(label))
            return value

        marked = mark(value)
        self._note(label, marked, "function")
        return marked

    def _call(self, label: str, call: Any) -> Any:
        """Return a call of a tool with its name and arguments marked."""

        def mark(value: Any) -> Any:
            if isinstance(value, dict):
                return {mark(key): mark(part) for key, part in value.items()}
            if isinstance(value, list):
                return [mark(part) for part in value]
            if isinstance(value, str) and value:
                return self._wrapped(value, _Piece(label, is_once=True))
            return value

        if not isinstance(call, dict):
            return call
        inner = call.get("function", call)
        if not isinstance(inner, dict):
            return call
        named = {key: mark(inner[key]) for key in ("name", "arguments") if key in inner}
        marked = {**inner, **named}
        self._note(label, marked, "arguments")
        return {**call, "function": marked} if "function" in call else marked

    def _note(self, label: str, value: Any, part: str) -> None:
        """Note an object and a part of it, which the template may write as JSON."""
        self._objects.append((label, value))
        if isinstance(value, dict) and isinstance(value.get(part), dict):
            self._objects.append((label, value[part]))

    def _wrapped(self, text: str, piece: _Piece) -> str:
        number = len(self._pieces)
        if number >= _N_MARKS:
            raise Unlabelled(f"more than {_N_MARKS} pieces of text")
        self._pieces.append(piece)
        return chr(_OPEN + number) + text + chr(_CLOSE + number)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_places(value: Any, marked: str) -> Iterable[tuple[int, int]]:
    """Yield where, in the text without marks, a marked object stands as JSON."""
    for indent in _INDENTS:
        written = json.dumps(value, ensure_ascii=False, indent=indent)
        # Without a mark in it, it could be anybody's.
        at = marked.find(written) if _MARK.search(written) else -1
        while at >= 0:
            start = len(_MARK.sub("", marked[:at]))
            yield start, start + len(_MARK.sub("", written))
            at = marked.find(written, at + len(written))
