"""Roles of chats against chat templates: what the labels say, against the messages themselves.

    python -m actds_testing.chat_templates FOLDER

renders a number of conversations with each ``*.jinja`` of a folder, encodes them with a tokenizer
of bytes as the writer does, decodes the tokens of each role and compares them with the texts of
the messages with that role. No mark has a part in the comparison.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from actds_testing.tiny import byte_tokenizer
from actds_writers.ipc.messages import intervals
from actds_writers.prompts.encoding import Encoded, encode
from actds_writers.prompts.records import Message, Prompt

__all__ = ["CHATS", "Outcome", "compare", "main", "texts_by_role"]

TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather at a place.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "City and country"},
                    "days": {"type": "integer", "description": "How many days"},
                },
                "required": ["city"],
            },
        },
    }
]
_QUESTION = "What is 2 + 2?\n\n- really <b>now</b>?"
_WIDE = "Danke schön 🙂 日本語"
_THOUGHT = "Two and two is\nfour."
_INLINE = f"<think>\n{_THOUGHT}\n</think>\n\nFour."
_CALL = {"name": "get_weather", "arguments": {"city": "Paris, France", "days": 2}}


def _said(*turns: tuple[str, str]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in turns]


def _called(answer: str) -> list[Message]:
    call = {"type": "function", "id": "call12345", "function": _CALL}
    return [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": answer, "tool_call_id": "call12345", "name": "get_weather"},
    ]


CHATS: dict[str, tuple[list[Message], list[Message] | None]] = {
    "one": (_said(("user", "Hello there!")), None),
    "system": (
        _said(("system", "You are a pirate. Speak so."), ("user", _QUESTION),
              ("assistant", "Four, matey: 4."), ("user", _WIDE)),
        None,
    ),
    "turns": (_said(("user", _QUESTION), ("assistant", "Four: 4."), ("user", _WIDE)), None),
    "spaces": (
        _said(("user", "  Hello \n"), ("assistant", "\n\n Hi. "), ("user", "\tcode:\n  x = 1\n")),
        None,
    ),
    "words": (_said(("user", "user"), ("assistant", "user"), ("user", "assistant")), None),
    "inline": (_said(("user", "Think."), ("assistant", _INLINE), ("user", "More.")), None),
    "thought": (
        [*_said(("user", "Think.")),
         {"role": "assistant", "content": "Four.", "reasoning_content": _THOUGHT},
         *_said(("user", "More."))],
        None,
    ),
    "tags": (_said(("user", "What do <think>, </think>, </s>, <|im_end|> and [INST] do?")), None),
    "called": (
        [*_called('{"sky": "clear",\n "t": 21.5}'),
         *_said(("assistant", "Clear."), ("user", "Thanks!"))],
        TOOLS,
    ),
    "calls": ([*_said(("system", "Be brief.")), *_called("clear")], TOOLS),
}  # fmt: skip
"""Messages and tool definitions, by name."""
_PROBE = "Zqxv wjk"


@dataclass(frozen=True)
class Outcome:
    """What became of one conversation under one template.

    Args:
        verdict: ``equal``, ``refused`` by the template, ``unknown`` roles, or ``differs``.
        words: why, for the last three.
        n_dropped: texts that the template leaves out.
    """

    chat: str
    verdict: str
    words: str = ""
    n_dropped: int = 0


def compare(template: str) -> Iterator[Outcome]:
    """Yield what becomes of each conversation under a template."""
    tokenizer = byte_tokenizer(chat_template=template)
    for name, (messages, tools) in CHATS.items():
        try:
            (one,) = encode([_prompt(messages, tools)], tokenizer, 10**6, 1, "skip")
        except Exception as error:  # a template may raise anything
            yield Outcome(name, "refused", repr(error)[:100])
            continue
        if one.skip is not None:
            yield Outcome(name, "refused", one.skip)
        elif one.roles_unknown is not None:
            yield Outcome(name, "unknown", one.roles_unknown)
        else:
            yield _compared(name, one, tokenizer)


def texts_by_role(one: Encoded, tokenizer: Any) -> dict[str, str]:
    """Return the decoded tokens of each role, all of a role together."""
    found: dict[str, str] = {}
    for start, stop, role in intervals(one.roles):
        text = tokenizer.decode(one.token_ids[start:stop], skip_special_tokens=False)
        found[role] = found.get(role, "") + text
    return found


def _compared(name: str, one: Encoded, tokenizer: Any) -> Outcome:
    messages, tools = CHATS[name]
    got = {role: _bare(text) for role, text in texts_by_role(one, tokenizer).items()}
    rendered = _bare(tokenizer.decode(one.token_ids))
    wanted: dict[str, list[str]] = {}
    n_dropped = 0
    for number, message in enumerate(messages):
        for field, role in (("reasoning_content", "thinking"), ("content", message["role"])):
            text = _bare(message.get(field, ""))
            if text and _escaped(text) in rendered and text not in rendered:
                text = _escaped(text)
            if text and (text not in rendered or not _is_kept(tokenizer, name, number, field)):
                n_dropped += 1
                text = text.rpartition("</think>")[2] if text.startswith("<think>") else ""
                text = text if text in rendered else ""
            wanted.setdefault(role, []).append(text)
    # A template that says itself what the model writes counts tags and ends of turns to it.
    says = re.search(r"{%-? generation", tokenizer.get_chat_template())
    for role in ("system", "user", "assistant", "thinking", "tool"):
        found, texts = got.get(role, ""), wanted.get(role, [])
        if role == "assistant" and (says or tools):
            if tools and "Paris,France" in rendered:
                texts = ["get_weather", "Paris,France", *texts]
            same = re.search(".*".join(map(re.escape, texts)), found) is not None
        else:
            # The definitions of tools stand before what they answer.
            expected = "".join(texts)
            same = found.endswith(expected) if tools and role == "tool" else found == expected
        if not same:
            return Outcome(name, "differs", f"{role}: {found!r}, not {texts!r}", n_dropped)
    return Outcome(name, "equal", n_dropped=n_dropped)


def _is_kept(tokenizer: Any, name: str, number: int, field: str) -> bool:
    """Return whether another text in the same place comes through the template."""
    messages, tools = CHATS[name]
    other = [dict(message) for message in messages]
    other[number][field] = _PROBE
    text = tokenizer.apply_chat_template(
        other, tools=tools, tokenize=False, add_generation_prompt=True
    )
    return _PROBE in text


def _prompt(messages: list[Message], tools: list[Message] | None) -> Prompt:
    return Prompt(0, "chats", 0, None, messages, "row-0", tools)


def _bare(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def main(folder: str) -> int:
    """Print the outcome of every template; return 1 when a label differs."""
    total: Counter[str] = Counter()
    templates = sorted(Path(folder).glob("*.jinja"))
    for path in templates:
        outcomes = list(compare(path.read_text(encoding="utf-8")))
        total.update(outcome.verdict for outcome in outcomes)
        total["dropped"] += sum(outcome.n_dropped for outcome in outcomes)
        kinds = {v: [*of] for v, of in groupby(sorted(outcomes, key=_verdict), key=_verdict)}
        print(path.stem, {verdict: len(of) for verdict, of in kinds.items()})
        for outcome in (*kinds.get("differs", []), *kinds.get("unknown", [])):
            print(f"    {outcome.chat}: {outcome.verdict}: {outcome.words}")
    print(f"{len(templates)} templates: {dict(total)}")
    return 1 if total["differs"] else 0


def _verdict(outcome: Outcome) -> str:
    return outcome.verdict


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
