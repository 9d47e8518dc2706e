"""What the scheduler and the front end of vLLM have of requests: KV blocks, parameters, roles.

Of a KV block: which request computed it, whether the present weights did, and if it was loaded. A
hit on a block refers to the rows of the request that computed it, a block of other weights has no
row of the run, and neither has a step that read what was in a block whose KV a connector failed to
load. vLLM's runners ask the connector behind every forward which those are, and the scheduler then
lets the engine compute them (spec section 7.4).

The scheduler has a request's parameters as the front end made them of what the client asked for,
of its own defaults and of the model's generation config. Stop strings the front end finds where it
makes text of tokens, and aborts the request, to the scheduler as any other abort: so the tokens are
read here as there, by its own detokenizer. The messages of a chat it alone knows: their roles
travel among the request's ``extra_args``, from which the scheduler side takes them before anything
else reads these. Serving comes first: a chat that cannot be labelled, or not in time, is served
without roles.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from actds.errors import ActdsError
from actds.format.interventions import Applied
from actds_writers.engines import wrap
from actds_writers.interventions import XARG, names_in
from actds_writers.ipc.messages import count_packed, packed
from actds_writers.prompts.conversation import UNKNOWN, Turn, turn_of
from actds_writers.prompts.encoding import NO_OFFSETS, Rendered, chat_roles
from actds_writers.prompts.roles import ThinkingMarks, Unlabelled, sampled_labels
from actds_writers.provenance import in_words
from actds_writers.sampling import (
    HOOKS,
    POSITIONS,
    HookNames,
    Regime,
    choice_of,
    hooks_asked,
    positions_asked,
)


class LoadErrors:
    def __init__(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        self._blocks: set[int] = set()
        if not has_kv_transfer_group():
            return

        @wrap(get_kv_transfer_group(), "get_block_ids_with_load_errors")
        def getting(get: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = get(*args, **kwargs)
            self._blocks |= set(blocks or ())
            return blocks

    def touch(self, scheduled: Any) -> bool:
        blocks, self._blocks = self._blocks, set()
        return were_read(blocks, scheduled)


def were_read(blocks: Collection[int] | None, scheduled: Any) -> bool:
    """Return whether the forward of a step read one of some blocks that were not loaded.

    Blocks are loaded for requests that are new or resumed in a step. Those of requests that still
    wait for theirs have been read by nobody.
    """
    if not blocks:
        return False
    admitted, _ = blocks_of_step(scheduled)
    return any(
        not set(blocks).isdisjoint(group) for groups in admitted.values() for group in groups
    )


def refuse_unseen(scheduler: Any, scheduled: Any, result: Any) -> None:
    """Stop where the worker that captures cannot know of every row on blocks that were not loaded.

    Another rank may have failed to load its share; and a step that was scheduled before the results
    of this one were seen has read the same blocks. Raises E501 when the forward read blocks that
    were not loaded, and either holds.
    """
    failed = getattr(result.kv_connector_output, "invalid_block_ids", None)
    config = scheduler.vllm_config
    ranks, batches = int(config.parallel_config.world_size), int(config.max_concurrent_batches)
    if (ranks > 1 or batches > 1) and were_read(failed, scheduled):
        raise ActdsError(
            "E501",
            f"step {scheduled._actds.step}",
            got=f"rows on KV blocks that could not be loaded, with {ranks} ranks and {batches} "
            "steps at a time",
            expected="KV that a model computed",
        )


Owner = tuple[int | None, int]
"""The request that computed a block, and the first position that it computed there itself: those
before came from outside."""


OUTSIDE = 2**31
"""Above every position: all that a block serves came from outside the run."""


class Owners:
    """Who computed each prefix block; least recently used ones are forgotten first.

    Args:
        unknown: of a block that is not known: no request, and how many positions came from outside.
    """

    def __init__(self, limit: int | None, unknown: Owner = (None, 0)) -> None:
        self._limit, self._unknown = limit, unknown
        self.requests: OrderedDict[bytes, Owner] = OrderedDict()

    def find(self, request: Any, block: int) -> Owner:
        hashes = request.block_hashes
        digest = bytes(hashes[block]) if block < len(hashes) else b""
        if digest in self.requests:
            self.requests.move_to_end(digest)
        return self.requests.get(digest, self._unknown)

    def note(self, block: bytes, owner: Owner) -> None:
        self.requests[block] = owner
        self.requests.move_to_end(block)
        if self._limit is not None and len(self.requests) > self._limit:
            self.requests.popitem(last=False)


Blocks = Sequence[Sequence[int]]
"""Ids of the KV blocks of a request, by group of layers; 0 is none."""


class WrittenBlocks:
    """The KV blocks that the present weights have computed, since a change.

    Every other block that serves a request is of old weights, or of both.
    """

    def __init__(self, block_sizes: Collection[int]) -> None:
        self._sizes = tuple(block_sizes)
        self._ids: set[int] = set()

    def serve(self, blocks: Blocks, n_served: int) -> bool:
        """Return whether all blocks are known that serve the first positions of a request."""
        return all(
            self._ids.issuperset(set(served) - {0}) for served, _ in self._split(blocks, n_served)
        )

    def write(self, blocks: Blocks, n_served: int, *, mixed: bool) -> None:
        """Note the blocks behind those that serve a request, which computes them now.

        ``mixed``: on KV of other weights.
        """
        for _, new in self._split(blocks, n_served):
            if mixed:
                self._ids.difference_update(new)
            else:
                self._ids.update(new)

    def _split(
        self, blocks: Blocks, n_served: int
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        for ids, size in zip(blocks, self._sizes, strict=True):
            n = -(-n_served // size)
            yield ids[:n], ids[n:]


def blocks_of_step(scheduled: Any) -> tuple[dict[str, Blocks], dict[str, Blocks]]:
    """Return by request all blocks of those that a step admits, and the further ones of others."""
    admitted: dict[str, Blocks] = {
        new.req_id: new.block_ids for new in scheduled.scheduled_new_reqs
    }
    further: dict[str, Blocks] = {}
    cached = scheduled.scheduled_cached_reqs
    for request, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if blocks is not None:
            (admitted if request in cached.resumed_req_ids else further)[request] = blocks
    return admitted, further


class StopStrings:
    def __init__(self, tokenizer: Any, request: Any) -> None:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        self._n_read = 0
        self.n_delivered: int | None = None
        """Sampled tokens up to the one that completes a stop string, once there is one."""

    def read(self, request: Any) -> bool:
        tokens = list(request.output_token_ids[self._n_read : request.num_output_tokens])
        self._n_read += len(tokens)
        if self.n_delivered is not None or not tokens:
            return False
        # With the token that ended it the front end gets no text.
        stopped = request.is_finished() and str(request.get_finished_reason()) == "stop"
        if not self._detokenizer.update(tokens, stopped):
            return False
        self.n_delivered = self._detokenizer.num_output_tokens()
        return True


def tokenizer_of(scheduler: Any) -> Any:
    """Return the tokenizer of the front end of a scheduler, ``None`` where it has none."""
    from vllm.tokenizers import cached_tokenizer_from_config

    model = scheduler.vllm_config.model_config
    return None if model.skip_tokenizer_init else cached_tokenizer_from_config(model)


ALWAYS = ("max_tokens", "min_p", "seed", "temperature", "top_k", "top_p")
"""Parameters that are recorded whatever their value; others where they are not the default."""
FLOATS = ("min_p", "temperature", "top_p")
OF_THE_OUTPUT = frozenset(
    ("output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "flat_logprobs")
)
"""Parameters that say how tokens are handed out, and not which ones are sampled."""


def recorded(params: Any) -> dict[str, object] | None:
    if params is None:
        return None
    default = _default(type(params))  # type: ignore[arg-type]
    given: dict[str, Any] = {name: getattr(params, name) for name in ALWAYS}
    given |= {name: float(given[name]) for name in FLOATS}
    if (eos := getattr(params, "_eos_token_id", None)) is not None:
        given["eos_token_id"] = eos  # the tokenizer's; those of the generation config stop, too
    for name in params.__struct_fields__:
        value, usual = getattr(params, name), getattr(default, name, None)
        if name.startswith("_") or name in given or name in OF_THE_OUTPUT or value == usual:
            continue
        # The front end puts an empty value, or False, for one that is not given.
        if usual or not (value is False or value in ([], {})):
            given[name] = value
    return {name: in_words(value) for name, value in given.items()}


@functools.cache
def _default(kind: Any) -> Any:
    return kind()


KEY, TURN = "actds.roles", "actds.turn"
CONVERSATION = "actds_conversation"
"""What names the conversation of a request, in its ``vllm_xargs``."""
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
        return packed(sampled_labels(token_ids, self.marks, thinks=self.thinks))

    def to_argument(self) -> dict[str, Any]:
        begin, end = sorted(self.marks.begin), sorted(self.marks.end)
        return {"prompt": self.prompt, "thinks": self.thinks, "begin": begin, "end": end}


def take_roles(params: Any, prompt_len: int) -> ChatRoles | None:
    """Return the roles that came with a request, and remove them from its ``SamplingParams``."""
    extra = getattr(params, "extra_args", None) or {}
    if KEY not in extra:
        return None
    params.extra_args = {name: value for name, value in extra.items() if name != KEY} or None
    try:
        value = extra[KEY]
        marks = ThinkingMarks(frozenset(value["begin"]), frozenset(value["end"]))
        roles = ChatRoles(value["prompt"], bool(value["thinks"]), marks)
        return roles if count_packed(roles.prompt) == prompt_len else None
    # A client may have put anything there, where the front end is of another version.
    except (KeyError, TypeError, ValueError):
        return None


def take_turn(params: Any) -> Turn:
    """Return the turn that came with a request, and remove it from its ``SamplingParams``.

    So too the name that a client gives its conversation, of which a digest is kept.
    """
    extra = getattr(params, "extra_args", None) or {}
    if TURN not in extra and CONVERSATION not in extra:
        return UNKNOWN
    rest = {name: value for name, value in extra.items() if name not in (TURN, CONVERSATION)}
    params.extra_args = rest or None
    named = turn_of((), extra.get(CONVERSATION)).conversation
    match extra.get(TURN):
        case [str(opening), int(number)]:
            return Turn(named or opening, number)
    return Turn(named)


REGIME = "actds.regime"


def give_regime(params: Any, regime: Regime) -> None:
    """Let what rules ask of a request travel with its ``SamplingParams``."""
    given = {
        "roles": regime.roles,
        "takes": list(regime.takes.items()),
        "applied": [list(part) for part in regime.applied],
    }
    params.extra_args = {**(params.extra_args or {}), REGIME: given}


def take_regime(params: Any) -> Regime | None:
    """Return the regime that came with a request, and remove it from its ``SamplingParams``."""
    extra = getattr(params, "extra_args", None) or {}
    if REGIME not in extra:
        return None
    params.extra_args = {name: value for name, value in extra.items() if name != REGIME} or None
    given = extra[REGIME]
    parts = tuple(Applied(*part) for part in given["applied"])
    return Regime(given["roles"], dict(given["takes"]), parts)


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
    """Labels the chats of one front end's ``HfRenderer``, on a thread of its own."""

    def __init__(self, renderer: Any) -> None:
        # Renders on copies, so that several threads may use it.
        self._tokenizer = renderer.get_tokenizer()
        self._model_config = renderer.model_config
        self._marks = ThinkingMarks.of(self._tokenizer.get_added_vocab())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="actds-roles")
        self._stuck: Future[ChatRoles] | None = None
        self._has_failed = False

    async def label(self, chat: Any, prompt: Any, offsets: Any, params: Any) -> None:
        """Put the roles of a chat into its prompt, an ``EngineInput``, where they are known."""
        if self._stuck is not None and self._stuck.running():
            return
        call = None
        try:
            call = self._thread.submit(self.roles, chat, prompt, offsets, params)
            roles = await asyncio.wait_for(asyncio.wrap_future(call), TIMEOUT_S)
            prompt[KEY] = roles.to_argument()
        except Unlabelled:
            pass
        except Exception as error:  # the request is served without
            if call is not None and call.running():
                self._stuck = call
            if not self._has_failed:
                log.warning("actds: chats without roles, served as usual; the first: %r", error)
            self._has_failed = True

    def roles(self, chat: Any, prompt: Any, offsets: Any, params: Any) -> ChatRoles:
        """Return the roles of a chat; raises ``Unlabelled`` where they cannot be known.

        Args:
            chat: messages, as they are given to the template.
            offsets: where each token stands in the text, ``None`` if that is not known.
            params: the ``ChatParams`` with which it was rendered.
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
        labels = chat_roles(given["conversation"], given["tools"], rendered, self._marks, apply)
        return ChatRoles(*labels, self._marks)


def label_chats(processor: Any) -> None:
    from vllm.renderers.hf import HfRenderer
    from vllm.renderers.params import TokenizeParams

    renderer = processor.renderer
    if not isinstance(renderer, HfRenderer) or renderer.tokenizer is None:
        return
    replace(TokenizeParams(max_total_tokens=None), return_token_offsets=True)  # or raises now
    labeller = ChatLabeller(renderer)

    @wrap(renderer, "render_chat_async")
    async def rendering(
        render: Any, conversations: Any, chat_params: Any, tok_params: Any = None, **options: Any
    ) -> Any:
        given = tok_params or renderer.default_chat_tok_params
        placing = replace(given, return_token_offsets=True)
        chats, prompts = await render(conversations, chat_params, placing, **options)
        for chat, prompt in zip(chats, prompts, strict=True):
            offsets = prompt.get("prompt_token_offsets")
            if not given.return_token_offsets:
                prompt.pop("prompt_token_offsets", None)
            with suppress(Exception):  # messages of another kind are served without
                prompt[TURN] = turn_of(chat)
            # What a cut prompt begins with may be within a thought.
            if given.truncate_prompt_tokens is None:
                await labeller.label(chat, prompt, offsets, chat_params)
        return chats, prompts

    @wrap(processor, "process_inputs")
    def processing(process: Any, request_id: str, prompt: Any, *args: Any, **options: Any) -> Any:
        request = process(request_id, prompt, *args, **options)
        params = getattr(request, "sampling_params", None)
        if params is not None:
            take_roles(params, 0)  # a client's own word
            extra = {
                name: value for name, value in (params.extra_args or {}).items() if name != TURN
            }
            if isinstance(prompt, dict):
                extra |= {name: prompt[name] for name in (KEY, TURN) if name in prompt}
            params.extra_args = extra or None
        return request


def named_by(params: Any) -> str | None:
    """Return the intervention that a client names, ``None`` without one."""
    name = (getattr(params, "extra_args", None) or {}).get(XARG)
    return name if name is None or isinstance(name, str) else f"{name!r}, no text"


def refuse_unlisted(params: Any, names: Sequence[str]) -> None:
    """Refuse a request that names an intervention which the server does not allow.

    Raises what vLLM answers as a bad request.
    """
    name = named_by(params)
    if name is not None and name not in names:
        allowed = ", ".join(names) or "none: the server was started without interventions"
        raise _bad_request()(f"{XARG}: {name[:80]!r} is not allowed here; allowed: {allowed}")


def refuse_choices(params: Any, choices: Collection[HookNames]) -> None:
    """Refuse a request for positions or hooks that it cannot choose; raises the same."""
    xargs = getattr(params, "extra_args", None) or {}
    try:
        if POSITIONS in xargs:
            positions_asked(xargs[POSITIONS], 1)
        if HOOKS in xargs:
            hooks_asked(xargs[HOOKS], choices)
    except ValueError as error:
        raise _bad_request()(str(error)) from None


def _bad_request() -> type[Exception]:
    try:
        from vllm.exceptions import VLLMValidationError
    except ImportError:  # a vLLM that answers so to any ValueError
        return ValueError
    kind: type[Exception] = VLLMValidationError
    return kind


def refuse_in(processor: Any, document: Mapping[str, Any]) -> None:
    """Let a server's front end refuse what it does not know of interventions, positions and hooks.

    ``document``: the settings of its live harvest, as they were given.
    """
    file = document.get("intervene")
    names = () if file is None else names_in(file)
    choices = [choice_of(str(text)) for text in document.get("hook_choices") or ()]

    @wrap(processor, "process_inputs")
    def processing(process: Any, key: str, prompt: Any, params: Any, *more: Any, **kw: Any) -> Any:
        refuse_unlisted(params, names)
        refuse_choices(params, choices)
        return process(key, prompt, params, *more, **kw)
