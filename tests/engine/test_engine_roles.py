"""Roles of a harvest's chats: of every position, stored or not, those that the messages say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import actds
from actds.explore.dataset import Dataset
from actds.format.inclusion import Design
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing.chat_templates import CHATS
from actds_testing.independent.draw import number
from actds_testing.server import Server, wait_until_ended
from actds_testing.tiny import byte_tokenizer, make_tiny_model
from actds_validators.audit.api import audit
from actds_writers.prompts.conversation import turn_of

pytestmark = pytest.mark.engine

GENERATED = 7
HOOK = "resid_post.1"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tokenizer() -> Any:
    return byte_tokenizer(chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats beside texts, twice each, so that a prefix cache has hits in every role."""
    folder = tmp_path_factory.mktemp("roles")
    model = make_tiny_model(folder / "model", dtype="float32", tokenizer=True)
    tokenizer().save_pretrained(model)
    records: list[dict[str, Any]] = [
        {"id": f"{name}-{n}", "messages": messages, "tools": tools}
        for n in range(2)
        for name, (messages, tools) in CHATS.items()
    ]
    records += [{"id": f"text-{n}", "prompt": "user and assistant " * n} for n in range(1, 3)]
    prompts = h.write_prompts(folder / "prompts.jsonl", records)
    h.harvest_alone(
        folder / "acts", model, prompts, "--hooks", "resid_post:1", *h.TINY, *h.EAGER,
        "--max-tokens", str(GENERATED), "--engine-arg", "max_num_batched_tokens=96",
        "--engine-arg", "max_num_seqs=4", "--engine-arg", "max_model_len=1024",
        "--rows-per-shard", "500",
    )  # fmt: skip
    return folder / "acts"


@pytest.fixture(scope="module")
def dataset(path: Path) -> Dataset:
    return actds.open(path)


def roles_of(dataset: Dataset) -> dict[int, dict[int, str]]:
    """Return the role of each position that has one, by request."""
    found: dict[int, dict[int, str]] = {}
    for line in dataset.roles().to_pylist():
        mine = found.setdefault(line["request"], {})
        for position in range(line["start"], line["stop"]):
            assert position not in mine
            mine[position] = line["role"]
    return found


def test_the_tokens_of_each_role_are_the_texts_of_its_messages(dataset: Dataset) -> None:
    roles, decode = roles_of(dataset), tokenizer().decode
    requests = dataset.requests().to_pylist()
    assert len(requests) == 2 * len(CHATS) + 2
    for line in requests:
        rows = dataset.request(line["request"])
        ids = rows.token_id.tolist()
        name = line["external_id"].rpartition("-")[0]
        mine = roles.get(line["request"], {})
        if name == "text":
            assert mine == {}
            continue
        n, prompt = line["prompt_len"] + line["generated_len"] - 1, line["prompt_len"]
        assert sorted(mine) == list(range(n))
        assert {mine[position] for position in range(prompt, n)} == {"assistant"}
        assert rows.role.tolist() == [mine[position] for position in range(n)]
        messages, _tools = CHATS[name]
        for role in ("system", "user"):
            said = [ids[p] for p in range(prompt) if mine[p] == role]
            assert decode(said) == "".join(m["content"] for m in messages if m["role"] == role)
        words = decode([ids[p] for p in range(prompt) if mine[p] == "assistant"])
        for message in messages:
            assert message["role"] != "assistant" or message["content"] in words


def test_turns_are_those_of_the_messages_and_means_those_of_their_rows(dataset: Dataset) -> None:
    conversations = set()
    pooled = actds.pool(dataset, HOOK).table
    turns = dict(zip(pooled["request"].to_pylist(), pooled["turn"].to_pylist(), strict=True))
    for line in dataset.requests().to_pylist():
        name = line["external_id"].rpartition("-")[0]
        said = None, None
        if name != "text":
            said = turn_of(CHATS[name][0])
            assert turns[line["request"]] == said[1]
            conversations.add((name, said[0]))
        assert (line["conversation"], line["turn"]) == said
    assert len(conversations) == len(CHATS)
    assert {turn for turn in turns.values()} >= {0, 1}


def test_loaders_choose_by_role_and_rows_of_the_cache_have_theirs(
    path: Path, dataset: Dataset
) -> None:
    roles = roles_of(dataset)
    spans = dataset.spans().to_pylist()
    assert any(s["disposition"] == "cache_ref" for s in spans)
    tokens = dataset.tokens(columns=["request", "position"]).to_pylist()
    for role in ("assistant", "user", "tool"):
        wanted = sum(roles.get(t["request"], {}).get(t["position"]) == role for t in tokens)
        where = f"role == '{role}'"
        assert actds.Loader(path, HOOK, where=where, batch=8).n_rows == wanted > 0
        assert len(actds.load_dataset(path, hooks=HOOK, where=where)) == wanted
    texts = actds.Loader(path, HOOK, where="role is None", batch=8)
    assert texts.n_rows == sum(t["request"] not in roles for t in tokens)


def test_the_coverage_map_has_the_roles_by_itself_and_the_record_says_how_many(
    path: Path, dataset: Dataset
) -> None:
    coverage = audit(path).result.coverage
    assert coverage is not None
    classes = {cell.token_class for cell in coverage.cells}
    assert {"system", "user", "assistant", "tool", "template", "prompt", "generated"} <= classes
    (record,) = dataset.catalog.runs.values()
    assert record.fields["prompts.roles"].value == (
        f'{{"known":{2 * len(CHATS)},"unknown":{{"a text, no chat":2}}}}'
    )


def drawn_by_rules(live: Dataset, roles: dict[int, dict[int, str]]) -> set[float]:
    """Return the shares of the rows, which are those that the hash draws and no others."""
    design = Design.of(*live.catalog.runs.values())
    assert design is not None
    requests = {line["request"]: line for line in live.requests().to_pylist()}
    expected = {}
    for span in live.spans().to_pylist():
        line, of_request = requests[span["request"]], roles.get(span["request"], {})
        for p in range(span["start"], span["stop"]):
            role = "assistant" if p >= line["prompt_len"] else of_request.get(p)
            share = {"user": 0.5, "assistant": 0.75}.get(str(role), 0.875)
            if line["external_id"].startswith("cmpl-"):
                share = 0.25
            if line["external_id"] == "chatcmpl-rare":
                share = 1
            is_computed = span["disposition"] in ("captured", "thinned")
            if is_computed and number(int(design.salt), span["request"], p) < share:
                expected[span["request"], p] = share
    rows = live.tokens(columns=["request", "position", "inclusion"]).to_pylist()
    assert {(row["request"], row["position"]): row["inclusion"] for row in rows} == expected
    return set(expected.values())


def test_a_server_has_the_roles_that_the_harvest_of_the_same_chats_has(
    path: Path, dataset: Dataset, tmp_path: Path
) -> None:
    out = str(tmp_path / "acts")
    keep = "xarg regime=ra?e: 1; role user: 0.5; id cmpl-*: 0.25; role assistant: 0.75; 0.875"
    settings = {"out": out, "hooks": "resid_post:1", "keep": keep}
    server = Server(
        path.parent / "model", tmp_path / "log", settings,
        "--enforce-eager", "--max-model-len", "1024", "--max-num-batched-tokens", "512",
        "--distributed-executor-backend", "uni", "--shutdown-timeout", "120",
        ACTDS_FORK_WORKERS="1",
    )  # fmt: skip
    answers = {}
    more = {"max_tokens": GENERATED, "ignore_eos": True, "return_token_ids": True}
    try:
        for name, (messages, tools) in CHATS.items():
            sent = json.loads(json.dumps(messages))
            for call in (call for message in sent for call in message.get("tool_calls", ())):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            body = {"messages": sent, "tools": tools, "tool_choice": "none", **more}
            headers = {"X-Request-Id": name}
            answers[name] = server.post("/v1/chat/completions", body, headers)
        rare = {"messages": CHATS["one"][0], "vllm_xargs": {"regime": "rare"}, **more}
        server.post("/v1/chat/completions", rare, {"X-Request-Id": "rare"})
        several = {"messages": CHATS["one"][0], "n": 2, **more}
        server.post("/v1/chat/completions", several, {"X-Request-Id": "several"})
        said = CHATS["one"][0][0]["content"]
        server.post("/v1/responses", {"input": said, "max_output_tokens": GENERATED})
        server.post("/v1/completions", {"prompt": "user", **more}, {"X-Request-Id": "text"})
        server.post("/v1/completions", {"prompt": [65, 66], **more}, {"X-Request-Id": "ids"})
        assert server.stop() == 0
    finally:
        server.kill()
    wait_until_ended(out)
    seal(open_store(out))
    live = h.validated(out)
    wanted = {
        line["external_id"].removesuffix("-0"): roles
        for line in dataset.requests().to_pylist()
        if (roles := roles_of(dataset).get(line["request"]))
    }
    found = roles_of(live)
    requests = {line["external_id"]: line for line in live.requests().to_pylist()}
    for name, answer in answers.items():
        line = requests[f"chatcmpl-{name}"]
        assert found[line["request"]] == wanted[name]
        ids = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
        rows = live.request(line["request"])
        assert rows.token_id.tolist() == ids[:-1]
        assert rows.role.tolist() == [wanted[name][position] for position in range(len(ids) - 1)]
    for sample in range(2):
        assert found[requests[f"{sample}_chatcmpl-several"]["request"]] == wanted["one"]
    (response,) = (line for name, line in requests.items() if name.startswith("resp_"))
    prompt = range(response["prompt_len"])
    assert [found[response["request"]][p] for p in prompt] == [wanted["one"][p] for p in prompt]
    for name in ("text", "ids"):
        assert requests[f"cmpl-{name}-0"]["request"] not in found
    others = ("resp_", "chatcmpl-rare")
    chats = {line["sampling"] for name, line in requests.items() if not name.startswith(others)}
    assert len(chats) == 1  # those of completions, too
    assert drawn_by_rules(live, found) == {1, 0.5, 0.25, 0.75, 0.875}
    assert "roles" not in json.dumps(answers) and "actds" not in json.dumps(answers)
    (record,) = live.catalog.runs.values()
    assert record.fields["prompts.roles"].origin == "unknown"
