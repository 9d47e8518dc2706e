from __future__ import annotations

import functools
import itertools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actds.format import tables
from actds_testing.chat_templates import CHATS, compare, texts_by_role
from actds_testing.places import DEMO_MODEL
from actds_testing.tiny import CHAT_TEMPLATE, byte_tokenizer
from actds_writers.ipc.messages import LETTERS, count_packed, intervals, packed
from actds_writers.prompts.encoding import Encoded, encode, load_tokenizer
from actds_writers.prompts.records import Message, Prompt
from actds_writers.prompts.roles import (
    ThinkingMarks,
    Unlabelled,
    character_labels,
    sampled_labels,
    token_labels,
    with_thinking,
)

VLLM = find_spec("vllm")
INSTALLED = (
    sorted(Path(VLLM.origin or "").parent.glob("transformers_utils/chat_templates/*.jinja"))
    if VLLM
    else []
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What families do with the texts of messages, each in a template of its own.
SHAPES = {
    "strips": "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }};{% endfor %}",
    "system in the last user message": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]"
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n"
        "{% endif %}{{ m.content }}[/INST]{% elif m.role != 'system' %}{{ m.content }}</s>"
        "{% endif %}{% endfor %}"
    ),
    "cuts thoughts": (
        "{% for m in messages %}[{{ m.role }}]"
        "{% set c = m.content %}{% if m.role == 'assistant' and '</think>' in c %}"
        "{% set c = c.split('</think>')[-1] %}{% endif %}{{ c }}<e>{% endfor %}[assistant]<think>"
    ),
    "moves thoughts": (
        "{% for m in messages %}[{{ m.role }}]{% set c = m.content %}"
        "{% if m.role == 'assistant' and '</think>' in c %}"
        "{% set t = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "<think>\n{{ t }}\n</think>\n\n{{ c.split('</think>')[-1].lstrip('\n') }}"
        "{% else %}{{ c }}{% endif %}<e>{% endfor %}"
    ),
    "keeps thoughts apart": (
        "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<e>{% endfor %}"
    ),
    "writes JSON": (
        "{% for t in tools or [] %}{{ t | tojson(indent=4) }}\n{% endfor %}"
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'tool' %}{{ m.content | tojson }}"
        "{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "{% endfor %}{% endif %};{% endfor %}"
    ),
    "says what the model writes": (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<e>{% endgeneration %}{% else %}{{ m.content }}<e>{% endif %}{% endfor %}"
    ),
    "has a date": "{{ strftime_now('%d %b %Y') }}" + CHATML,
}


@functools.cache
def render(template: str) -> Any:
    tokenizer = byte_tokenizer(chat_template=template)
    return lambda messages, tools: tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )


def labelled(template: str, messages: list[Message], tools: Any = None) -> list[tuple[str, str]]:
    """Return the runs of a rendered chat, each with its role's letter."""
    made = render(template)
    text = made(messages, tools)
    labels = character_labels(messages, tools, text, made)
    pairs = itertools.groupby(zip(labels, text, strict=True), key=lambda pair: pair[0])
    return [(label, "".join(c for _, c in run)) for label, run in pairs]


def said(*turns: tuple[str, str]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in turns]


def one(template: str, messages: list[Message], tokenizer: Any = None) -> Encoded:
    tokenizer = tokenizer or byte_tokenizer(chat_template=template)
    return encode([Prompt(0, "p", 0, None, messages, "row-0")], tokenizer, 10_000, 8)[0]


@functools.cache
def demo_tokenizer() -> Any:
    return load_tokenizer(DEMO_MODEL)


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_of_a_role_are_the_texts_of_its_messages(name: str) -> None:
    outcomes = list(compare(SHAPES[name]))
    assert {outcome.verdict for outcome in outcomes} <= {"equal", "refused"}, outcomes
    assert sum(outcome.verdict == "equal" for outcome in outcomes) >= 8


@pytest.mark.parametrize("path", INSTALLED, ids=lambda path: path.stem)
def test_templates_that_come_with_the_engine_are_labelled(path: Path) -> None:
    verdicts = {outcome.verdict for outcome in compare(path.read_text())}
    assert verdicts <= {"equal", "refused"}


@pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="no demo model")
@pytest.mark.parametrize("chat", CHATS)
def test_merges_of_a_real_tokenizer_keep_the_texts_apart(chat: str) -> None:
    messages, tools = CHATS[chat]
    tokenizer = demo_tokenizer()
    (encoded,) = encode([Prompt(0, "p", 0, None, messages, "row-0", tools)], tokenizer, 10_000, 8)
    assert encoded.roles_unknown is None
    texts = texts_by_role(encoded, tokenizer)
    for role in ("system", "user", "assistant", "tool"):
        # Line ends of template and message may be one token, of the message.
        whole = "".join(m["content"] for m in messages if m["role"] == role)
        assert "".join(texts.get(role, "").split()) == "".join(whole.split())
    assert intervals(encoded.roles)[-1][1] == len(encoded.token_ids)


def test_every_position_of_a_chat_has_its_role() -> None:
    chat = said(("system", "Be brief."), ("user", "hi"), ("assistant", "yes"), ("user", "who?"))
    assert labelled(CHATML, chat) == [
        ("t", "<|im_start|>system\n"), ("s", "Be brief."),
        ("t", "<|im_end|>\n<|im_start|>user\n"), ("u", "hi"),
        ("t", "<|im_end|>\n<|im_start|>assistant\n"), ("a", "yes"),
        ("t", "<|im_end|>\n<|im_start|>user\n"), ("u", "who?"),
        ("t", "<|im_end|>\n<|im_start|>assistant\n"),
    ]  # fmt: skip
    encoded = one(CHATML, chat)
    assert encoded.roles == "t19s9t28u2t33a3t28u4t33"
    assert (encoded.roles_unknown, encoded.thinks) == (None, False)


def test_text_that_is_moved_keeps_its_author() -> None:
    chat = said(("system", "S."), ("user", "u1"), ("assistant", "a"), ("user", "u2"))
    assert labelled(SHAPES["system in the last user message"], chat) == [
        ("t", "[INST]"), ("u", "u1"), ("t", "[/INST]"), ("a", "a"), ("t", "</s>[INST]"),
        ("s", "S."), ("t", "\n\n"), ("u", "u2"), ("t", "[/INST]"),
    ]  # fmt: skip


def test_thoughts_are_cut_moved_or_kept_and_the_answer_stays_the_assistants() -> None:
    chat = said(("user", "q"), ("assistant", "<think>\nfour\n</think>\n\nIt is 4."))
    assert labelled(SHAPES["cuts thoughts"], chat) == [
        ("t", "[user]"), ("u", "q"), ("t", "<e>[assistant]\n\n"), ("a", "It is 4."),
        ("t", "<e>[assistant]<think>"),
    ]  # fmt: skip
    moved = labelled(SHAPES["moves thoughts"], chat)
    assert moved[-2:] == [("a", "<think>\nfour\n</think>\n\nIt is 4."), ("t", "<e>")]
    apart = [
        *said(("user", "q")),
        {"role": "assistant", "content": "4", "reasoning_content": "2+2"},
    ]
    assert labelled(SHAPES["keeps thoughts apart"], apart)[-5:] == [
        ("t", "<e>[assistant]<think>"), ("k", "2+2"), ("t", "</think>"), ("a", "4"), ("t", "<e>"),
    ]  # fmt: skip


def test_tools_their_calls_and_their_answers() -> None:
    messages, tools = CHATS["called"]
    runs = labelled(SHAPES["writes JSON"], messages, tools)
    assert runs[0][0] == "o"
    assert runs[0][1].startswith('{\n    "type": "function"')
    call = '{"name": "get_weather", "arguments": {"city": "Paris, France", "days": 2}}'
    assert [text for label, text in runs if label == "a"] == [call, "Clear."]
    assert [text for label, text in runs if label == "o"][1] == (
        '{\\"sky\\": \\"clear\\",\\n \\"t\\": 21.5}'
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content[:3] }};{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{{ m.content }};{% endfor %}",
        "{% for m in messages %}{% if m.content == 'hello' %}{{ 'HI' }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content | reverse }};{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson(ensure_ascii=true) }};{% endfor %}",
    ],
)
def test_roles_that_would_be_a_guess_are_unknown(template: str) -> None:
    with pytest.raises(Unlabelled):
        labelled(template, said(("user", "hello")))
    encoded = one(template, said(("user", "hello")))
    assert (encoded.roles, encoded.skip) == ("", None)
    assert encoded.roles_unknown == "the template changes the texts of messages"


def test_a_message_in_parts_has_its_role_and_one_with_an_image_makes_all_unknown() -> None:
    parts: list[Message] = [{"type": "text", "text": "hi"}, {"type": "text", "text": " you"}]
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    chat: list[Message] = [{"role": "user", "content": parts}, *said(("assistant", "ok"))]
    found = labelled(template, chat)
    assert [text for label, text in found if label == "u"] == ["hi", " you"]
    assert [text for label, text in found if label == "a"] == ["ok"]
    for other in ({"type": "image"}, "text", 4):
        with pytest.raises(Unlabelled, match="no text"):
            labelled("{% for m in messages %}{{ m.role }}{% endfor %}",
                     [{"role": "user", "content": [*parts, other]}])  # fmt: skip


def test_packed_labels_are_counted_and_nothing_else_is_taken_for_them() -> None:
    assert [count_packed(runs) for runs in ("", "t2u5-3", packed("ttsu"))] == [0, 10, 4]
    for other in ("x3", "t", "3", "t-2", "t2 u1", "t2\n", "t1234567890"):
        with pytest.raises(ValueError, match="packed"):
            count_packed(other)


def test_chat_with_characters_that_serve_as_marks_is_unknown() -> None:
    encoded = one(CHATML, said(("user", "hi \U000f0001 there")))
    assert encoded.roles_unknown == "characters for private use in the chat"


def test_author_that_no_role_names_is_unknown_and_the_others_are_not() -> None:
    runs = labelled(CHATML, said(("critic", "bad"), ("user", "hi")))
    assert [label for label, _ in runs] == ["t", "-", "t", "u", "t"]
    assert intervals("t2-3u1") == [(0, 2, "template"), (5, 6, "user")]


def test_texts_and_slow_tokenizers_have_no_roles() -> None:
    tokenizer = byte_tokenizer()
    (text,) = encode([Prompt(0, "p", 0, "hi", None, "row-0")], tokenizer, 100, 8)
    assert (text.roles, text.roles_unknown) == ("", "a text, no chat")

    class Slow:
        """A tokenizer that knows no offsets, as those of Mistral's own library."""

        is_fast = False

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: list[str], **options: Any) -> Any:
            assert not options.pop("return_offsets_mapping")
            return tokenizer(text, **options)

    chat = one(CHAT_TEMPLATE, said(("user", "hi")), Slow())
    assert chat.roles == ""
    assert "which part of the text" in (chat.roles_unknown or "")


def test_token_of_two_authors_is_the_messages_and_white_space_decides_nothing() -> None:
    #         0123456789
    text = "T:\n hi.\nT"
    labels = "ttt" + "uuuu" + "t" * 2
    places = [(0, 2), (2, 4), (3, 6), (6, 8), (8, 9), (0, 0), (5, 5)]
    # "T:", "\n ", " hi", ".\n", "T", and two tokens of no character.
    assert token_labels(labels, text, places) == "tuuuttu"
    # The first of two messages.
    assert token_labels("sut", "abc", [(0, 3)]) == "s"


def lowercasing() -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [
        "▁",
        *["▁hello", "▁strasse", "▁wie", "▁geht's", "?", ":", "u", "▁u"],
        *"abcdefghijklmnopqrstuvwxyz'.;[",
    ]
    backend = Tokenizer(models.Unigram([(word, -1.0) for word in dict.fromkeys(words)], 0))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="▁",
        chat_template="{% for m in messages %}u: {{ m.content }};{% endfor %}",
    )


def test_tokenizer_that_normalizes_and_prepends_a_space_keeps_the_places() -> None:
    tokenizer = lowercasing()
    encoded = one("", said(("user", "Hello STRASSE ﬁ wie geht's?")), tokenizer)
    assert encoded.roles_unknown is None
    spoken = {
        role: tokenizer.convert_ids_to_tokens(encoded.token_ids[start:stop])
        for start, stop, role in intervals(encoded.roles)
    }
    assert spoken["user"] == ["▁hello", "▁strasse", "▁", "f", "i", "▁wie", "▁geht's", "?"]
    assert intervals(encoded.roles)[0][2] == "template"


THINK, END = 300, 301
MARKS = ThinkingMarks(frozenset([THINK]), frozenset([END]))


def test_thoughts_stand_between_the_tokenizers_own_marks() -> None:
    assert ThinkingMarks.of({"<think>": THINK, "</think>": END, "<pad>": 0}) == MARKS
    assert ThinkingMarks.of({"<think>": THINK}) == ThinkingMarks()
    ids = [5, THINK, 6, END, 7]
    assert sampled_labels(ids, MARKS, thinks=False) == "akkka"
    assert sampled_labels([5, END, 7], MARKS, thinks=True) == "kka"
    assert sampled_labels(ids, ThinkingMarks(), thinks=False) == "aaaaa"
    # The template's marks stay its own; what it opens, the assistant goes on with.
    assert with_thinking("taat", [THINK, 6, END, 9], MARKS) == ("tkkt", False)
    assert with_thinking("uuat", [5, THINK, 6, THINK], MARKS) == ("uuat", True)
    # A mark in the user's words opens no thought.
    assert with_thinking("ut", [THINK, 9], MARKS) == ("ut", False)


def test_prompt_that_ends_in_a_thought_says_so() -> None:
    tokenizer = byte_tokenizer(chat_template=SHAPES["cuts thoughts"])
    tokenizer.add_tokens(["<think>", "</think>"])
    encoded = one("", said(("user", "what is <think>?")), tokenizer)
    assert encoded.thinks
    closed = byte_tokenizer(chat_template=SHAPES["cuts thoughts"] + "\n</think>")
    closed.add_tokens(["<think>", "</think>"])
    assert not one("", said(("user", "what is <think>?")), closed).thinks


def test_letters_are_the_roles_of_the_specification() -> None:
    assert tuple(LETTERS) == tables.ROLES


@given(st.text(alphabet="".join(LETTERS.values()) + "-"))
def test_packed_labels_say_what_the_labels_said(labels: str) -> None:
    found = ["-"] * len(labels)
    for start, stop, role in intervals(packed(labels)):
        found[start:stop] = LETTERS[role] * (stop - start)
    assert "".join(found) == labels
    edges = [edge for start, stop, _ in intervals(packed(labels)) for edge in (start, stop)]
    assert edges == sorted(edges)


WORDS = st.lists(
    st.sampled_from(
        ["hi", "<think>", "</think>", "\n", " ", "  ", "[INST]", "user", "é🙂", "%", '"']
    )
)


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), WORDS), min_size=1, max_size=4),
)
def test_labelled_text_is_the_messages_or_nothing_is_known(
    name: str, turns: list[tuple[str, list[str]]]
) -> None:
    messages = said(*((role, "".join(words)) for role, words in turns))
    try:
        runs = labelled(SHAPES[name], messages)
    except Unlabelled:
        return
    for letter, role in (("u", "user"), ("a", "assistant")):
        spoken = "".join("".join(text.split()) for label, text in runs if label == letter)
        whole = "".join("".join(m["content"].split()) for m in messages if m["role"] == role)
        spoken = spoken.replace("<e>", "")  # of {% generation %}
        # In order and nothing beside: what a template leaves out may be missing.
        rest = iter(whole)
        assert all(character in rest for character in spoken)
