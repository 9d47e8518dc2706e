"""Prompts to token ids, with the model's own tokenizer and chat template."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from actds.errors import ActdsError
from actds.text import one_line
from actds_writers.ipc.messages import packed
from actds_writers.model_folder import SpecialTokens
from actds_writers.prompts.records import Message, OnBroken, Prompt, first_line
from actds_writers.prompts.roles import (
    ThinkingMarks,
    Unlabelled,
    character_labels,
    token_labels,
    with_generation,
    with_thinking,
)

BATCH_PROMPTS = 1024
NO_CHAT = "a text, no chat"
ONLY_IDS = "token ids, no chat"
NO_OFFSETS = "a tokenizer that does not say which part of the text a token is"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Continuation:
    """Documents instead of prompts: their first tokens, and who writes what follows.

    Both authors fill the same positions, so that two harvests of the same documents differ in
    nothing else: the model samples at most ``max_tokens``, the last of which is never fed, or the
    document's own next ``max_tokens - 1`` tokens are given with the prompt.
    """

    n_prompt: int
    by: Literal["model", "document"]

    def cut(self, ids: list[int], max_tokens: int) -> tuple[list[int], int]:
        """Return the tokens of a document to serve, and how many to generate at most."""
        if self.by == "model":
            return ids[: self.n_prompt], max_tokens
        return ids[: self.n_prompt + max_tokens - 1], 1


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    all_special_ids: list[int]
    is_fast: bool
    bos_token_id: int | None
    eos_token_id: int | None

    def __call__(self, text: list[str], **options: Any) -> Any:
        """Return the encoding of a batch of texts."""

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any:
        """Return the conversation as one text."""

    def get_added_vocab(self) -> dict[str, int]:
        """Return the added tokens with their ids."""

    def get_chat_template(self) -> str:
        """Return the template; raises ValueError without one."""


@dataclass(frozen=True)
class Encoded:
    """A prompt as the engine gets it.

    Args:
        token_ids: its tokens with special tokens, also when it is skipped; empty when it could not
            be encoded.
        max_tokens: maximum of generated tokens, limited by the model's context.
        thinks: whether the prompt ends within a thought, which the model goes on with.
    """

    prompt: Prompt
    token_ids: list[int]
    max_tokens: int
    skip: str | None
    roles: str = ""
    roles_unknown: str | None = NO_CHAT
    thinks: bool = False


def load_tokenizer(model: Path) -> Tokenizer:
    """Return the tokenizer of a model folder; downloads nothing and runs no code of it."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ActdsError(
            "E011",
            "transformers",
            got="not installed",
            expected="transformers, which vllm needs too",
            next_step="pip install transformers",
        ) from None
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # whatever a family's code raises
        got, expected = one_line(error, 400), "a readable tokenizer"
        raise ActdsError("E005", f"{model.name} tokenizer", got=got, expected=expected) from None
    return tokenizer


def encode(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    max_model_len: int,
    max_tokens: int,
    on_broken: OnBroken = "error",
    continuation: Continuation | None = None,
) -> list[Encoded]:
    """Return every prompt as token ids, in order, with a reason for each that is skipped.

    Text is encoded unchanged, with the tokenizer's own special tokens; messages are rendered by
    the chat template, with the generation prompt at the end unless the record says otherwise; token
    ids are served as they are.

    Args:
        on_broken: ``error`` raises for the first prompt that the template or the tokenizer
            refuses; ``skip`` skips it with E002. A prompt that leaves no room for one generated
            token is always skipped, with E004, and a document that ends with its prompt with E023.
        continuation: take prompts for documents; None takes them as they are.

    Raises:
        ActdsError: E002 for a prompt that cannot be encoded, and for messages when the model
            has no chat template; E009 when ``max_tokens`` is less than 1.
    """
    if max_tokens < 1:
        raise ActdsError("E009", "max_tokens", got=str(max_tokens), expected="at least 1")
    _require_template(prompts, tokenizer)
    encoded: list[Encoded] = []
    marks = ThinkingMarks.of(tokenizer.get_added_vocab())
    for first in range(0, len(prompts), BATCH_PROMPTS):
        batch = prompts[first : first + BATCH_PROMPTS]
        texts, failures = _texts(batch, tokenizer)
        for number, (ids, offsets) in enumerate(_ids(batch, texts, tokenizer)):
            prompt = batch[number]
            broken = failures.get(number)
            if continuation is not None and prompt.messages is not None:
                broken = "a chat, and continue_at cuts texts"
            if broken is None and not ids:
                broken = "text that encodes to no token"
            if broken is not None and on_broken == "error":
                expected = "a prompt that the model can take"
                raise ActdsError("E002", _place(prompt), got=broken, expected=expected)
            if broken is None:
                fitted = _fitted(prompt, ids, max_model_len, max_tokens, continuation)
                if prompt.token_ids is not None:
                    fitted = replace(fitted, roles_unknown=ONLY_IDS)
            else:
                fitted = Encoded(prompt, ids, 0, f"E002 {_place(prompt)}: {broken}")
            skip = fitted.skip
            if prompt.messages is not None and skip is None:
                fitted = _with_roles(fitted, texts[number], offsets, tokenizer, marks)
            encoded.append(fitted)
    return encoded


def _fitted(
    prompt: Prompt,
    ids: list[int],
    max_model_len: int,
    max_tokens: int,
    continuation: Continuation | None,
) -> Encoded:
    """Return a prompt, or the beginning of a document, that fits the model, or why it does not."""
    n_prompt = len(ids) if continuation is None else continuation.n_prompt
    room = max_model_len - n_prompt
    if continuation is not None and len(ids) <= n_prompt:
        words = f"{len(ids)} tokens; expected more than the {n_prompt} of continue_at"
        return Encoded(prompt, ids, 0, f"E023 {_place(prompt)}: {words}")
    if room < 1:
        words = f"{n_prompt} prompt tokens leave no room for a generated one"
        skip = f"E004 {_place(prompt)}: {words}; expected at most {max_model_len - 1}"
        return Encoded(prompt, ids[:n_prompt], 0, skip)
    most = min(max_tokens, room)
    if continuation is not None:
        ids, most = continuation.cut(ids, most)
    return Encoded(prompt, ids, most, None)


def _with_roles(
    encoded: Encoded,
    text: str,
    offsets: list[tuple[int, int]] | None,
    tokenizer: Tokenizer,
    marks: ThinkingMarks,
) -> Encoded:
    if offsets is None:
        return replace(encoded, roles_unknown=NO_OFFSETS)
    try:
        roles, thinks = chat_roles(
            encoded.prompt.messages or [],
            encoded.prompt.tools,
            Rendered(text, encoded.token_ids, offsets, tokenizer.get_chat_template()),
            marks,
            lambda *given, **more: _apply(tokenizer, encoded.prompt.options, *given, **more),
        )
    except Unlabelled as unlabelled:
        return replace(encoded, roles_unknown=str(unlabelled))
    return replace(encoded, roles=roles, roles_unknown=None, thinks=thinks)


@dataclass(frozen=True)
class Rendered:
    text: str
    token_ids: list[int]
    offsets: list[tuple[int, int]]
    template: str


def chat_roles(
    messages: list[Message],
    tools: list[Message] | None,
    rendered: Rendered,
    marks: ThinkingMarks,
    apply: Callable[..., Any],
) -> tuple[str, bool]:
    """Return the roles of a chat's positions, packed, and whether it ends within a thought.

    Args:
        apply: called with messages and tools, applies the template as it was for ``rendered``;
            further arguments are those of ``apply_chat_template``.
    """
    text = rendered.text
    labels = character_labels(
        messages, tools, text, lambda *given: str(apply(*given, tokenize=False))
    )
    tokens = token_labels(labels, text, rendered.offsets)
    if _GENERATION.search(rendered.template):
        mask = apply(
            messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        if mask["input_ids"] == rendered.token_ids:
            tokens = with_generation(tokens, mask["assistant_masks"])
    tokens, thinks = with_thinking(tokens, rendered.token_ids, marks)
    return packed(tokens), thinks


def _apply(
    tokenizer: Tokenizer,
    of_record: dict[str, Any] | None,
    messages: list[Message],
    tools: list[Message] | None,
    **options: Any,
) -> Any:
    given = {"add_generation_prompt": True, **(of_record or {}), **options}
    return tokenizer.apply_chat_template(messages, tools=tools, **given)


def chat_template_sha256(prompts: Iterable[Prompt], tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of the template that the prompts need, ``none`` when they need none."""
    if all(prompt.messages is None for prompt in prompts):
        return "none"
    return hashlib.sha256(tokenizer.get_chat_template().encode("utf-8")).hexdigest()


def n_second_bos(encoded: Iterable[Encoded], bos: int | None) -> int:
    """Return how many prompts begin with BOS twice: a rendered text, and the tokenizer's own."""
    texts = [e.token_ids for e in encoded if e.prompt.text is not None]
    return 0 if bos is None else sum(ids[:2] == [bos, bos] for ids in texts)


def special_tokens(tokenizer: Tokenizer, generation_eos: Iterable[int] = ()) -> SpecialTokens:
    """Return the ids by which rows are flagged; BOS and EOS count as special too."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token for token, entry in added.items() if getattr(entry, "special", False)}
    special.update(tokenizer.all_special_ids)
    eos = set(generation_eos)
    if tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    return SpecialTokens(tuple(sorted(special | eos)), tokenizer.bos_token_id, tuple(sorted(eos)))


def _require_template(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> None:
    first = next((prompt for prompt in prompts if prompt.messages is not None), None)
    if first is None:
        return
    try:
        tokenizer.get_chat_template()
    except ValueError:
        raise ActdsError(
            "E002",
            _place(first),
            got="messages, but the model's tokenizer has no chat template",
            expected="a `prompt` string",
            next_step="Give prompts as text, or use a model folder with a chat template.",
        ) from None


def _texts(batch: Sequence[Prompt], tokenizer: Tokenizer) -> tuple[list[str], dict[int, str]]:
    """Return the text of each prompt of a batch, and by number what the template refused."""
    texts: list[str] = []
    failures: dict[int, str] = {}
    for number, prompt in enumerate(batch):
        text = prompt.text or ""
        if prompt.messages is not None:
            try:
                text = _apply(
                    tokenizer, prompt.options, prompt.messages, prompt.tools, tokenize=False
                )
            # The template is the model's code and may raise anything: jinja's errors, TypeError.
            except Exception as error:
                failures[number] = f"the chat template raised {first_line(error)!r}"
        texts.append(text)
    return texts, failures


def _ids(
    batch: Sequence[Prompt], texts: list[str], tokenizer: Tokenizer
) -> list[tuple[list[int], list[tuple[int, int]] | None]]:
    """Return the ids of a batch, and of chats where in the text each stands, if that is known.

    A rendered template has its own special tokens.
    """
    ids: list[tuple[list[int], list[tuple[int, int]] | None]] = [
        (prompt.token_ids or [], None) for prompt in batch
    ]
    for bare in (False, True):
        members = [
            n
            for n, prompt in enumerate(batch)
            if prompt.token_ids is None and (prompt.messages is None) == bare
        ]
        if not members:
            continue
        placed = tokenizer.is_fast and not bare
        rows = tokenizer(
            [texts[n] for n in members],
            add_special_tokens=bare,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_offsets_mapping=placed,
            verbose=False,
        )
        places = rows["offset_mapping"] if placed else [None] * len(members)
        for n, row, offsets in zip(members, rows["input_ids"], places, strict=True):
            ids[n] = [int(token) for token in row], offsets
    return ids


def _place(prompt: Prompt) -> str:
    return f"{prompt.source} row {prompt.row}"
