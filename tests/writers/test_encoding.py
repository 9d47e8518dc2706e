from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from actds.errors import ActdsError
from actds_testing.tiny import CHAT_TEMPLATE, byte_tokenizer, make_tiny_model
from actds_writers.prompts.encoding import (
    Continuation,
    chat_template_sha256,
    encode,
    load_tokenizer,
    n_second_bos,
    special_tokens,
)
from actds_writers.prompts.records import Prompt


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def text(index: int, words: str) -> Prompt:
    return Prompt(index, "p.jsonl", index, words, None, f"row-{index}")


def chat(index: int, words: str, role: str = "user") -> Prompt:
    messages = [{"role": role, "content": words}]
    return Prompt(index, "p.jsonl", index, None, messages, f"row-{index}")


def test_messages_get_the_template_and_text_stays_as_it_is(tokenizer: Any) -> None:
    prompts = [chat(0, "hi"), text(1, "hi"), chat(2, "grün")]
    first, second, third = encode(prompts, tokenizer, 100, 8)
    assert tokenizer.decode(first.token_ids) == "<|start|>user\nhi<|end|><|start|>assistant\n"
    assert tokenizer.decode(second.token_ids) == "hi"
    # What transformers itself makes of the same conversation, one at a time.
    assert third.token_ids == tokenizer.apply_chat_template(
        prompts[2].messages, add_generation_prompt=True, return_dict=False
    )
    assert [encoded.skip for encoded in (first, second, third)] == [None, None, None]
    assert [encoded.prompt for encoded in (first, second, third)] == prompts


def test_bos_is_added_to_text_and_never_doubled_by_the_template() -> None:
    prompts = [text(0, "hi"), chat(1, "hi")]
    of_text, of_chat = encode(prompts, byte_tokenizer(add_bos=True), 100, 8)
    assert of_text.token_ids[:2].count(1) == 1
    assert of_chat.token_ids[:2].count(1) == 1


def test_a_text_that_has_bos_already_is_counted() -> None:
    tokenizer = byte_tokenizer(add_bos=True)
    rendered = tokenizer.apply_chat_template(chat(0, "hi").messages, tokenize=False)
    encoded = encode([text(0, rendered), text(1, "hi"), chat(2, "hi")], tokenizer, 100, 8)
    assert encoded[0].token_ids[:2] == tokenizer(rendered)["input_ids"][:2] == [1, 1]
    assert n_second_bos(encoded, tokenizer.bos_token_id) == 1
    assert n_second_bos(encoded, None) == 0


def test_token_ids_are_served_as_they_are_and_fitted_like_others(tokenizer: Any) -> None:
    given = [[1, 1, 90], [5] * 30]
    prompts = [
        Prompt(n, "p", n, None, None, f"row-{n}", token_ids=ids) for n, ids in enumerate(given)
    ]
    fits, long = encode([*prompts], byte_tokenizer(add_bos=True), 20, 8)
    assert (fits.token_ids, fits.max_tokens, fits.skip) == (given[0], 8, None)
    assert long.skip is not None and long.skip.startswith("E004")
    (cut,) = encode(prompts[1:], tokenizer, 20, 8, continuation=Continuation(4, "document"))
    assert cut.token_ids == [5] * 11


@pytest.mark.parametrize(
    "options",
    [{"add_generation_prompt": False}, {"continue_final_message": True}, {"enable_thinking": True}],
)
def test_chats_are_rendered_as_their_record_says(tokenizer: Any, options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, I"}]
    named = {"continue_final_message": {"add_generation_prompt": False}}
    further = named.get(next(iter(options)), {})
    prompt = Prompt(0, "p", 0, None, messages, "row-0", options={**options, **further})
    (one,) = encode([prompt], tokenizer, 100, 8)
    want = tokenizer.apply_chat_template(
        messages, return_dict=False, **{"add_generation_prompt": True, **options, **further}
    )
    assert one.token_ids == want
    assert one.roles and one.roles_unknown is None


def test_prompt_without_room_for_one_token_is_skipped_and_the_one_before_is_not(
    tokenizer: Any,
) -> None:
    fits, full, long = encode(
        [text(0, "a" * 19), text(1, "a" * 20), text(2, "a" * 21)], tokenizer, 20, 8
    )
    assert (fits.skip, fits.max_tokens) == (None, 1)
    assert full.skip == (
        "E004 p.jsonl row 1: 20 prompt tokens leave no room for a generated one; "
        "expected at most 19"
    )
    assert (long.max_tokens, len(long.token_ids)) == (0, 21)


def test_generated_tokens_are_cut_to_the_context(tokenizer: Any) -> None:
    short, long = encode([text(0, "a" * 4), text(1, "a" * 15)], tokenizer, 20, 8)
    assert (short.max_tokens, long.max_tokens) == (8, 5)


def test_conversation_that_the_template_refuses_is_an_error_or_a_skip(tokenizer: Any) -> None:
    prompts = [chat(0, "hi"), chat(1, "hi", role="wizard"), chat(2, "hi")]
    with pytest.raises(ActdsError) as caught:
        encode(prompts, tokenizer, 100, 8)
    assert (caught.value.code, caught.value.place) == ("E002", "p.jsonl row 1")
    assert "unknown role wizard" in caught.value.got
    skips = [encoded.skip for encoded in encode(prompts, tokenizer, 100, 8, on_broken="skip")]
    assert skips == [None, f"E002 p.jsonl row 1: {caught.value.got}", None]


def test_messages_for_a_model_without_a_template_are_refused() -> None:
    bare = byte_tokenizer(chat_template=None)
    with pytest.raises(ActdsError, match="no chat template") as caught:
        encode([text(0, "hi"), chat(1, "hi")], bare, 100, 8)
    assert (caught.value.code, caught.value.place) == ("E002", "p.jsonl row 1")
    assert encode([text(0, "hi")], bare, 100, 8)[0].skip is None


def test_template_digest_is_that_of_the_template_or_none_when_it_is_not_used(
    tokenizer: Any,
) -> None:
    assert chat_template_sha256([text(0, "hi")], tokenizer) == "none"
    expected = hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()
    assert chat_template_sha256([text(0, "hi"), chat(1, "hi")], tokenizer) == expected


def test_special_tokens_hold_every_special_token_and_the_models_own_ends(tokenizer: Any) -> None:
    found = special_tokens(tokenizer, generation_eos=[9])
    assert (found.special, found.bos, found.eos) == ((0, 1, 2, 9), 1, (2, 9))


def test_tokenizer_of_a_model_folder_loads_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", tokenizer=True)
    (encoded,) = encode([chat(0, "hi")], load_tokenizer(model), 100, 8)
    assert encoded.token_ids[0] == 1
    with pytest.raises(ActdsError) as caught:
        load_tokenizer(make_tiny_model(tmp_path / "bare"))
    assert caught.value.code == "E005"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_attention_heads": 7}))
    with pytest.raises(ActdsError, match=r"E005 tiny tokenizer: .*multiple of the number of att"):
        load_tokenizer(model)


def test_no_generated_token_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ActdsError) as caught:
        encode([text(0, "hi")], tokenizer, 100, 0)
    assert caught.value.code == "E009"


def test_documents_are_continued_by_the_model_or_themselves_at_the_same_positions(
    tokenizer: Any,
) -> None:
    words = ("a" * 30, "b" * 11, "c" * 10, "d" * 9)
    documents = [text(i, word) for i, word in enumerate(words)]
    by_model = encode(documents, tokenizer, 100, 8, continuation=Continuation(10, "model"))
    by_itself = encode(documents, tokenizer, 100, 8, continuation=Continuation(10, "document"))
    for sampled, given in zip(by_model[:2], by_itself[:2], strict=True):
        assert len(sampled.token_ids) == 10 and sampled.max_tokens == 8
        assert given.token_ids[:10] == sampled.token_ids and given.max_tokens == 1
    # The last sampled token is never fed: 10 + 8 - 1 positions; the document's end may come before.
    assert [len(given.token_ids) for given in by_itself[:2]] == [17, 11]
    # The same documents are served by both, and those that end with the prompt by none.
    skips = [[one.skip for one in arm[2:]] for arm in (by_model, by_itself)]
    assert skips[0] == skips[1]
    assert skips[0][0] == "E023 p.jsonl row 2: 10 tokens; expected more than the 10 of continue_at"


def test_a_long_document_is_cut_where_a_prompt_of_its_length_is_skipped(tokenizer: Any) -> None:
    long = [text(0, "a" * 500)]
    assert "E004" in (encode(long, tokenizer, 20, 8)[0].skip or "")
    (sampled,) = encode(long, tokenizer, 20, 99, continuation=Continuation(12, "model"))
    (given,) = encode(long, tokenizer, 20, 99, continuation=Continuation(12, "document"))
    assert (len(sampled.token_ids), sampled.max_tokens) == (12, 8)
    assert (len(given.token_ids), given.max_tokens) == (19, 1)
    (beyond,) = encode(long, tokenizer, 20, 8, continuation=Continuation(20, "model"))
    assert "E004 p.jsonl row 0: 20 prompt tokens leave no room" in (beyond.skip or "")


def test_chats_are_no_documents(tokenizer: Any) -> None:
    arguments = ([chat(0, "hi")], tokenizer, 100, 8)
    with pytest.raises(ActdsError, match=r"E002 .* a chat, and continue_at cuts texts"):
        encode(*arguments, continuation=Continuation(1, "model"))
    (one,) = encode(*arguments, "skip", Continuation(1, "model"))
    assert (one.skip or "").startswith("E002 p.jsonl row 0: a chat")
