"""Roles of a server's chats: labelled where it renders them, carried to the scheduler side.

A server's front end knows the messages, its engine only token ids. The labels travel among the
request's ``extra_args``, from which the scheduler side takes them before anything else reads these.
Serving comes first: a chat that cannot be labelled, or not in time, is served without roles.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from actds_writers.prompts.encoding import NO_OFFSETS, Rendered, chat_roles
from actds_writers.prompts.roles import ThinkingMarks, Unlabelled, sampled_labels
from actds_writers.roles import count, packed

KEY = "actds.roles"
TIMEOUT_S = 1.0
"""Longest that a chat waits for its labels, those of others before it included."""
log = logging.getLogger("vllm.actds")


@dataclass(frozen=True)
class ChatRoles:
    """Roles of a prompt, packed, and what those of the tokens sampled after it depend on."""

    prompt: str
    thinks: bool
    marks: ThinkingMarks

    def sampled(self, token_ids: Sequence[int]) -> str:
        """Return the roles of sampled tokens, packed."""
        return packed(sampled_labels(token_ids, self.marks, thinks=self.thinks))

    def to_argument(self) -> dict[str, Any]:
        """Return them as a value of ``extra_args``."""
        begin, end = sorted(self.marks.begin), sorted(self.marks.end)
        return {"prompt": self.prompt, "thinks": self.thinks, "begin": begin, "end": end}


def take_roles(params: Any, prompt_len: int) -> ChatRoles | None:
    """Return the roles that came with a request, and remove them from its parameters.

    Args:
        params: its ``SamplingParams``, or ``None``.
    """
    extra = getattr(params, "extra_args", None) or {}
    if KEY not in extra:
        return None
    params.extra_args = {name: value for name, value in extra.items() if name != KEY} or None
    try:
        value = extra[KEY]
        marks = ThinkingMarks(frozenset(value["begin"]), frozenset(value["end"]))
        found = ChatRoles(value["prompt"], bool(value["thinks"]), marks)
        return found if count(found.prompt) == prompt_len else None
    # A client may have put anything there, where the front end is of another version.
    except (KeyError, TypeError, ValueError):
        return None


class _Unapplied:
    """A tokenizer that returns the arguments with which its template would be applied."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @staticmethod
    def apply_chat_template(**given: Any) -> dict[str, Any]:
        return given


class ChatLabeller:
    """Labels the chats of one front end, on a thread of its own.

    Args:
        renderer: the front end's, an ``HfRenderer``.
    """

    def __init__(self, renderer: Any) -> None:
        # Renders on copies, so that several threads may use it.
        self._tokenizer = renderer.get_tokenizer()
        self._model_config = renderer.model_config
        self._marks = ThinkingMarks.of(self._tokenizer.get_added_vocab())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="actds-roles")
        self._stuck: Future[ChatRoles] | None = None
        self._has_failed = False

    async def label(self, chat: Any, prompt: Any, offsets: Any, params: Any) -> None:
        """Put the roles of a chat into its prompt; does nothing where they are not known.

        Args:
            prompt: an ``EngineInput``.
            chat, offsets, params: as for ``roles``.
        """
        if self._stuck is not None and self._stuck.running():
            return
        call = None
        try:
            call = self._thread.submit(self.roles, chat, prompt, offsets, params)
            found = await asyncio.wait_for(asyncio.wrap_future(call), TIMEOUT_S)
            prompt[KEY] = found.to_argument()
        except Unlabelled:
            pass
        except Exception as error:  # the request is served without
            if call is not None and call.running():
                self._stuck = call
            if not self._has_failed:
                log.warning("actds: chats without roles, served as usual; the first: %r", error)
            self._has_failed = True

    def roles(self, chat: Any, prompt: Any, offsets: Any, params: Any) -> ChatRoles:
        """Return the roles of a chat.

        Args:
            chat: messages, as they are given to the template.
            offsets: where each token stands in the text, ``None`` if that is not known.
            params: the ``ChatParams`` with which it was rendered.

        Raises:
            Unlabelled: they cannot be known.
        """
        from vllm.renderers.hf import safe_apply_chat_template

        if prompt["type"] != "token" or "prompt" not in prompt or offsets is None:
            raise Unlabelled(NO_OFFSETS)
        given: Any = safe_apply_chat_template(
            self._model_config,
            _Unapplied(self._tokenizer),
            chat,
            **params.get_apply_chat_template_kwargs(),
        )
        if given.get("documents"):
            raise Unlabelled("documents, which have no author")

        def apply(messages: Any, tools: Any, **more: Any) -> Any:
            changed = {"conversation": messages, "tools": tools, **more}
            return self._tokenizer.apply_chat_template(**{**given, **changed})

        ids = list(prompt["prompt_token_ids"])
        rendered = Rendered(prompt["prompt"], ids, offsets, given["chat_template"])
        found = chat_roles(given["conversation"], given["tools"], rendered, self._marks, apply)
        return ChatRoles(*found, self._marks)


def label_chats(processor: Any) -> None:
    """Label the chats that a front end renders from now on.

    Args:
        processor: its ``InputProcessor``, which makes requests of rendered prompts.
    """
    from vllm.renderers.hf import HfRenderer
    from vllm.renderers.params import TokenizeParams

    renderer = processor.renderer
    if not isinstance(renderer, HfRenderer) or renderer.tokenizer is None:
        return
    replace(TokenizeParams(max_total_tokens=None), return_token_offsets=True)  # or raises now
    labeller = ChatLabeller(renderer)
    render, process = renderer.render_chat_async, processor.process_inputs

    @functools.wraps(render)
    async def rendering(
        conversations: Any, chat_params: Any, tok_params: Any = None, **options: Any
    ) -> Any:
        asked = tok_params or renderer.default_chat_tok_params
        placing = replace(asked, return_token_offsets=True)
        chats, prompts = await render(conversations, chat_params, placing, **options)
        for chat, prompt in zip(chats, prompts, strict=True):
            offsets = prompt.get("prompt_token_offsets")
            if not asked.return_token_offsets:
                prompt.pop("prompt_token_offsets", None)
            # What a cut prompt begins with may be within a thought.
            if asked.truncate_prompt_tokens is None:
                await labeller.label(chat, prompt, offsets, chat_params)
        return chats, prompts

    @functools.wraps(process)
    def processing(request_id: str, prompt: Any, *args: Any, **options: Any) -> Any:
        request = process(request_id, prompt, *args, **options)
        params = getattr(request, "sampling_params", None)
        if params is not None:
            take_roles(params, 0)  # a client's own word
            if isinstance(prompt, dict) and KEY in prompt:
                params.extra_args = {**(params.extra_args or {}), KEY: prompt[KEY]}
        return request

    renderer.render_chat_async, processor.process_inputs = rendering, processing
