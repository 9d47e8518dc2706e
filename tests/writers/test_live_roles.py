"""Roles in live serving, by the server's own renderer: as a harvest has them, never in the way."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from actds_testing.chat_templates import CHATS
from actds_testing.tiny import byte_tokenizer, make_tiny_model
from actds_writers.engines.vllm.requests import (
    CONVERSATION,
    KEY,
    TURN,
    ChatLabeller,
    ChatRoles,
    take_roles,
    take_turn,
)
from actds_writers.engines.vllm.scheduler import VllmSchedulerSide
from actds_writers.ipc.messages import count_packed, packed
from actds_writers.prompts.conversation import turn_of
from actds_writers.prompts.encoding import encode
from actds_writers.prompts.records import Prompt
from actds_writers.prompts.roles import ThinkingMarks

pytestmark = pytest.mark.standard

LIVE = {"actds": {"out": "/nowhere", "hooks": "resid_post:0"}}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}\n{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
IN_PARTS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|end|>{% endfor %}"
)
HELLO = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}]


class FrontEnd:
    """What a server has between its clients and its engine: vLLM's own classes, no engine."""

    def __init__(self, model: Path, additional: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.renderers.online_renderer import OnlineRenderer
        from vllm.v1.engine import input_processor

        # Loads the plugin.
        config = AsyncEngineArgs(
            model=str(model), max_model_len=1024, dtype="float32", additional_config=additional
        ).create_engine_config()
        self.processor = input_processor.InputProcessor(config)
        self.renderer = OnlineRenderer(
            config.model_config, self.processor.renderer, request_logger=None, chat_template=None,
            chat_template_content_format="auto", trust_request_chat_template=True,
        )  # fmt: skip

    def prompt(self, messages: Any, **body: Any) -> Any:
        """Return the engine's input for the body of a chat request."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(model="m", messages=messages, **body)
        _conversation, (prompt,) = asyncio.run(self.renderer.render_chat(request))
        return prompt

    def request(self, prompt: Any, extra: dict[str, Any] | None = None) -> Any:
        """Return the engine's request for a prompt."""
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.5, max_tokens=7, extra_args=extra)
        request = self.processor.process_inputs("id", prompt, params, ("generate",))
        assert params.extra_args == extra
        return request


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_model(tmp_path_factory.mktemp("front") / "model", dtype="float32")
    byte_tokenizer(chat_template=TEMPLATE).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def live(model: Path) -> FrontEnd:
    return FrontEnd(model, LIVE)


@pytest.fixture(scope="module")
def plain(model: Path) -> FrontEnd:
    return FrontEnd(model, {})


def labels(front: FrontEnd, prompt: Any) -> dict[str, str] | None:
    """Return the text of each role of a prompt, ``None`` where it comes without roles."""
    request = front.request(prompt)
    found = take_roles(request.sampling_params, len(request.prompt_token_ids))
    return None if found is None else texts(found.prompt, request.prompt_token_ids)


def texts(runs: str, ids: list[int]) -> dict[str, str]:
    letters = re.sub(r"(.)(\d+)", lambda run: run[1] * int(run[2]), runs)
    found: dict[str, list[int]] = {}
    for letter, token in zip(letters, ids, strict=True):
        found.setdefault(letter, []).append(token)
    return {letter: byte_tokenizer().decode(tokens) for letter, tokens in found.items()}


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as clients send them: arguments of a call are JSON in a string."""
    sent: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


@pytest.mark.parametrize("name", CHATS)
def test_a_server_labels_a_chat_as_a_harvest_does(name: str, live: FrontEnd) -> None:
    messages, tools = CHATS[name]
    request = live.request(live.prompt(as_sent(messages), tools=tools, tool_choice="none"))
    found = take_roles(request.sampling_params, len(request.prompt_token_ids))
    prompt = Prompt(0, "p", 0, None, messages, None, tools)
    (wanted,) = encode([prompt], byte_tokenizer(chat_template=TEMPLATE), 1024, 1)
    assert request.prompt_token_ids == wanted.token_ids
    assert found is not None and wanted.roles
    assert (found.prompt, found.thinks) == (wanted.roles, wanted.thinks)


def test_parts_of_a_message_and_its_last_words_have_its_role(live: FrontEnd) -> None:
    parts = [{"type": "text", "text": "One. "}, {"type": "text", "text": "Two."}]
    chat = [{"role": "system", "content": parts}, {"role": "user", "content": "Hello!"}]
    whole = {"s": "One. \nTwo.", "u": "Hello!"}  # vLLM joins them for this template
    found = labels(live, live.prompt(chat)) or {}
    assert {letter: found[letter] for letter in "su"} == whole
    found = labels(live, live.prompt(chat, chat_template=IN_PARTS)) or {}
    assert {letter: found[letter] for letter in "su"} == {"s": "One. Two.", "u": "Hello!"}
    # No template here knows developers: vLLM makes system messages of them.
    found = labels(live, live.prompt([{**HELLO[0], "role": "developer"}, HELLO[1]])) or {}
    assert {letter: found[letter] for letter in "su"} == {"s": "Be kind.", "u": "Hello!"}
    begun = [*HELLO, {"role": "assistant", "content": "Hel"}]
    how = {"add_generation_prompt": False, "continue_final_message": True}
    assert (labels(live, live.prompt(begun, **how)) or {})["a"] == "Hel"


def test_chats_that_come_at_once_are_all_labelled(live: FrontEnd) -> None:
    from vllm.renderers.params import ChatParams

    async def burst() -> list[Any]:
        render = live.processor.renderer.render_chat_async
        how = ChatParams(chat_template_kwargs={"tokenize": False})
        chats_at_once = [[{"role": "user", "content": "x" * n}] for n in range(1, 20)]
        return await asyncio.gather(*(render([chat], how) for chat in chats_at_once))

    found = [labels(live, prompt) for _chats, (prompt,) in asyncio.run(burst())]
    assert [(one or {})["u"] for one in found] == ["x" * n for n in range(1, 20)]


def test_what_has_no_text_or_no_author_has_no_roles(live: FrontEnd) -> None:
    from vllm.renderers.params import TokenizeParams

    renderer, how = live.processor.renderer, TokenizeParams(max_total_tokens=99)
    (text,) = renderer.render_cmpl([{"prompt": "user"}], how)
    (ids,) = renderer.render_cmpl([{"prompt_token_ids": [65, 66]}], how)
    chats_without = [
        live.prompt(HELLO, truncate_prompt_tokens=20),
        live.prompt(HELLO, documents=[{"title": "t", "text": "x"}]),
        live.prompt([{"role": "user", "content": "\U000f0001"}]),
        live.prompt(HELLO, chat_template="{% for m in messages %}{{ m.content[3:] }}{% endfor %}"),
    ]
    for prompt in (text, ids, *chats_without):
        assert labels(live, prompt) is None
    assert labels(live, live.prompt(HELLO)) is not None


def test_the_request_is_that_of_a_server_without_actds(live: FrontEnd, plain: FrontEnd) -> None:
    assert "render_chat_async" not in vars(plain.processor.renderer)
    assert "process_inputs" not in vars(plain.processor)
    extra = {"consent": "no"}
    for body in ({}, {"return_token_offsets": True}, {"cache_salt": "s"}):
        ours, theirs = live.prompt(HELLO, **body), plain.prompt(HELLO, **body)
        for prompt in (ours, theirs):
            prompt.pop("arrival_time", None)
        assert set(ours) - set(theirs) == {KEY, TURN}
        assert {name: ours[name] for name in ours if name not in (KEY, TURN)} == theirs
        got, wanted = live.request(ours, extra), plain.request(theirs, extra)
        assert take_roles(got.sampling_params, len(got.prompt_token_ids)) is not None
        assert take_turn(got.sampling_params) == turn_of(HELLO)
        assert got.sampling_params == wanted.sampling_params
        assert got.sampling_params.extra_args == extra
        assert got.cache_salt == wanted.cache_salt
    assert KEY not in plain.prompt(HELLO)
    off = FrontEnd(Path(live.processor.model_config.model), {"actds": {"roles": False}})
    assert KEY not in off.prompt(HELLO)


def test_a_client_cannot_tell_the_roles(live: FrontEnd) -> None:
    theirs = {"prompt": "u9", "thinks": False, "begin": [], "end": []}
    request = live.request({"type": "token", "prompt_token_ids": [65] * 9}, {KEY: theirs, "a": 1})
    assert request.sampling_params.extra_args == {"a": 1}
    # Where nothing labels, nothing removes it either.
    for value in ("u9", 9, None, {}, {**theirs, "prompt": "x9"}, {**theirs, "prompt": "u8"},
                  {**theirs, "begin": 4}, {**theirs, "prompt": ["u9"]}):  # fmt: skip
        params = SimpleNamespace(extra_args={KEY: value})
        assert take_roles(params, 9) is None
        assert params.extra_args is None


def test_turns_are_those_of_a_harvest_and_a_client_may_name_the_conversation(
    live: FrontEnd,
) -> None:
    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}]
    answer, more = {"role": "assistant", "content": "a"}, {"role": "user", "content": "m"}
    opening = [{"role": "system", "content": parts}, {"role": "user", "content": "hi"}]
    turns = [
        take_turn(live.request(live.prompt(chat), given).sampling_params)
        for chat, given in (
            (opening, None),
            ([*opening, answer, more], None),
            ([*opening, more, {"role": "tool", "content": "t", "tool_call_id": "1"}], None),
            ([*opening, answer, more, more, answer, more], {CONVERSATION: "c-1"}),
            ([*opening, more], {TURN: ["f" * 32, 7]}),
        )
    ]
    one, named = turns[0].conversation, turn_of((), "c-1").conversation
    other = turns[2].conversation
    assert turns == [(one, 0), (one, 1), (other, 0), (named, 2), (other, 0)]
    assert len({one, named, other}) == 3
    joined = [{"role": "system", "content": "be\nkind"}, *opening[1:]]
    assert turn_of(joined) == (one, 0)
    assert turn_of([{"role": "system", "content": "s"}]) == turn_of(()) == (None, None)
    # Where nothing says what a client means, nothing is known.
    for value in ("x", 7, {}, ["f", "g"], [1, 1]):
        params = SimpleNamespace(extra_args={TURN: value, "a": 1})
        assert take_turn(params) == (None, None)
        assert params.extra_args == {"a": 1}


def test_a_chat_of_unknown_messages_is_served_without_a_turn(
    live: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actds_writers.engines.vllm.requests.turn_of", lambda chat: chat.nothing)
    request = live.request(live.prompt(HELLO))
    assert take_turn(request.sampling_params) == (None, None)


def test_a_chat_that_cannot_be_labelled_is_served_and_said_once(
    live: FrontEnd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = live.prompt(HELLO)
    ready, n_calls = threading.Event(), Counter[str]()

    class Counting(ThreadPoolExecutor):
        def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
            n_calls[call.__name__] += 1
            return super().submit(call, *args, **kwargs)

    monkeypatch.setattr("actds_writers.engines.vllm.requests.ThreadPoolExecutor", Counting)

    def breaks(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no labels today")

    def waits(*_: Any, **__: Any) -> Any:
        ready.wait(60)

    caplog.set_level(logging.WARNING, "vllm.actds")
    for broken in (breaks, waits):
        labeller = ChatLabeller(live.processor.renderer)
        monkeypatch.setattr(labeller, "roles", broken)
        monkeypatch.setattr("actds_writers.engines.vllm.requests.TIMEOUT_S", 0.05)
        caplog.clear()
        for _ in range(2):
            prompt = {name: value for name, value in wanted.items() if name != KEY}
            before = dict(prompt)
            asyncio.run(labeller.label(HELLO, prompt, [], None))
            assert prompt == before
        (record,) = caplog.records
        assert "served as usual" in record.getMessage()
    # Nobody waits behind one that never ends.
    assert n_calls == {"breaks": 2, "waits": 1}
    ready.set()


def test_a_front_end_that_is_another_has_no_roles_and_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another(_processor: Any) -> None:
        raise ImportError("another vLLM")

    monkeypatch.setattr("actds_writers.engines.vllm.requests.label_chats", another)
    front = FrontEnd(model, LIVE)
    assert KEY not in front.prompt(HELLO)


class Told(list[Any]):
    send = list.append


def test_the_scheduler_side_tells_the_roles_of_prompt_and_sampled_tokens() -> None:
    begin, end = 300, 301
    roles = ChatRoles("t2u5t2", False, ThinkingMarks(frozenset({begin}), frozenset({end})))
    tokens = [*range(9), begin, 7, end, 8, 9, 2]

    def request(extra: Any, n_sampled: int) -> Any:
        params = SimpleNamespace(
            extra_args=extra, logprobs=None, prompt_logprobs=None, max_tokens=6, min_p=0.0,
            seed=None, temperature=1.0, top_k=0, top_p=1.0, __struct_fields__=("extra_args",),
        )  # fmt: skip
        return SimpleNamespace(
            request_id=f"chatcmpl-{n_sampled}-0123abcd", num_prompt_tokens=9, block_hashes=[],
            arrival_time=1.0, sampling_params=params, num_output_tokens=n_sampled,
            all_token_ids=tokens[: 9 + n_sampled], get_finished_reason=lambda: "stop",
        )  # fmt: skip

    told = Told()
    side = VllmSchedulerSide(told, 4, 8)
    requests = [request({KEY: roles.to_argument()}, n) for n in (6, 1, 0)]
    requests.append(request(None, 5))
    for one in requests:
        side.arrived(one)
        side.finished(one)
    arrived, finished = told[::2], told[1::2]
    assert [m.roles for m in arrived] == ["t2u5t2"] * 3 + [""]
    assert [m.roles for m in finished] == [packed("kkkaa"), "", "", ""]
    assert len({m.sampling for m in arrived}) == 1 and KEY not in arrived[0].sampling
    assert [count_packed(m.roles) for m in finished] == [5, 0, 0, 0]
