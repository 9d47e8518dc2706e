"""Which conversation a chat is of, and its turn: from its messages, or by a client's word.

Requests of one conversation share its opening: what comes before the first answer. So do others
that begin with the same words, unless who sends them names each conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from actds.format import canonical


class Turn(NamedTuple):
    """The columns ``conversation`` and ``turn`` of a request; None where they are not known."""

    conversation: str | None = None
    number: int | None = None


UNKNOWN = Turn()


def turn_of(messages: Iterable[Mapping[str, Any]], named: object = None) -> Turn:
    """Return the turn that the messages of a chat end with.

    Args:
        messages: with ``role`` and ``content``, as the chat template gets them.
        named: the name of the conversation, where somebody gives one.

    Spec: 0.1 section 6.3.
    """
    opening: list[list[str]] = []
    number, before = -1, ""
    for message in messages:
        role = str(message.get("role"))
        number += role == "user" and before != "user"
        before = role
        if number < 0 or (number == 0 and role == "user"):
            opening.append([role, _text(message.get("content"))])
    if named is not None:
        return Turn(_digest(str(named)), number if number >= 0 else None)
    return Turn(_digest(opening), number) if number >= 0 else UNKNOWN


def _text(content: Any) -> str:
    parts = content if isinstance(content, list | tuple) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


def _digest(value: str | list[list[str]]) -> str:
    return hashlib.sha256(canonical.dump(value)).hexdigest()[:32]
