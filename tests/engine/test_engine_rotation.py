"""A server as people run it: chats that choose their rows, datasets that end while it serves."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import actds
from actds.dataset.catalog import Catalog
from actds.dataset.reading import read_catalog
from actds.rewrite.redaction import redact
from actds.store import open_store
from actds_testing.harvest import validated

pytest.importorskip("vllm")
from actds_testing.server import Server
from actds_testing.tiny import make_tiny_model
from actds_writers.prompts.conversation import turn_of

pytestmark = pytest.mark.engine
openai = pytest.importorskip("openai")

N_CHATS, N_CLIENTS = 200, 8
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs"]
EVERY = ["resid_post.0", "resid_post.1", "resid_post.2"]
HOOKS = (None, "resid_post.2", "all", "resid_post.1, resid_post.0", None)
ASKS = ("all", "last_prompt", "all_generated", "last_prompt,all_generated", "0-8", "none")


@dataclass(frozen=True)
class Chat:
    """What a client knows of one of its chats."""

    name: str
    asked: str | None
    answer: Any
    """None of one that it gave up."""
    conversation: str | None = None
    hooks: str | None = None

    @property
    def handle(self) -> dict[str, Any]:
        handle: dict[str, Any] = self.answer.kv_transfer_params["actds"]
        return handle

    @property
    def tokens(self) -> list[int]:
        return [*self.answer.prompt_token_ids, *self.answer.choices[0].token_ids]


def chat(client: Any, n: int) -> Chat:
    draw = random.Random(n)
    name = f"private-{n}" if n % 10 == 3 else f"open-{n}"
    asked = None if n % 2 else ASKS[n // 2 % len(ASKS)]
    xargs: dict[str, Any] = {"actds_handle": 1}
    if asked is not None:
        xargs["actds_positions"] = asked
    hooks = HOOKS[n % len(HOOKS)]
    if hooks is not None:
        xargs["actds_hooks"] = hooks
    if n % 3:
        xargs["actds_conversation"] = f"c-{n % 7}"
    system = {"role": "system", "content": "You are terse. " * 4}  # more than a block
    messages = [system, {"role": "user", "content": " ".join(draw.choices(WORDS, k=n % 23 + 1))}]
    body = {"vllm_xargs": xargs, "return_token_ids": True, "ignore_eos": True}
    options = {
        "model": "tiny", "messages": messages, "max_tokens": 4 + n % 29, "extra_body": body,
        "extra_headers": {"X-Request-Id": name},
    }  # fmt: skip
    if n % 13 == 5:
        with client.chat.completions.create(**options, stream=True) as stream:
            for _ in zip(range(2), stream, strict=False):
                pass  # and it is given up
        return Chat(name, asked, None, hooks=hooks)
    conversation = turn_of(messages, xargs.get("actds_conversation")).conversation
    return Chat(name, asked, client.chat.completions.create(**options), conversation, hooks)


def datasets_of(out: Path) -> dict[str, Catalog]:
    catalogs = [read_catalog(open_store(path)) for path in sorted(out.iterdir())]
    return {catalog.genesis.dataset: catalog for catalog in catalogs}


def rows_by_name(catalogs: list[Catalog]) -> dict[str, dict[int, int]]:
    """Return the token of every stored position, by the id of its request, over all datasets."""
    rows: dict[str, dict[int, int]] = defaultdict(dict)
    for catalog in catalogs:
        for run in catalog.runs_with_data:
            requests = catalog.table("requests", run).to_pylist()
            name_of = {line["request"]: line["external_id"] for line in requests}
            for shard in catalog.shards_of(run):
                for line in shard.tokens().to_pylist():
                    name, position = name_of[line["request"]], line["position"]
                    assert position not in rows[name], "no position has two rows"
                    rows[name][position] = line["token_id"]
    return rows


def test_two_hundred_chats_over_datasets_that_end_while_it_serves(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", n_layers=3, dtype="float32", tokenizer=True)
    out, switch = tmp_path / "acts", tmp_path / "off"
    capture = {
        "out": str(out), "hooks": "resid_post:0,1,2", "switch": str(switch), "rows_per_shard": 4096,
        "rotate_minutes": 0.05, "commit_seconds": 0.5, "overflow": "block",
        "skip": [{"header": "X-Request-Id", "values": ["private-*"]}],
        "hook_choices": ["resid_post.2", "resid_post.0,resid_post.1"],
    }  # fmt: skip
    server = Server(
        model, tmp_path / "log", capture, "--enforce-eager", "--max-model-len", "512",
        "--max-num-batched-tokens", "256", "--distributed-executor-backend", "uni",
        "--shutdown-timeout", "120", "--enable-prompt-tokens-details",
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{server.port}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        with ThreadPoolExecutor(N_CLIENTS) as pool:
            chats = []
            while len(chats) < N_CHATS or len(list(out.iterdir())) < 4:
                assert len(chats) < 30 * N_CHATS, "no dataset has ended"
                numbers = range(len(chats), len(chats) + N_CHATS // 2)
                chats += pool.map(lambda n: chat(client, n), numbers)
        hello = [{"role": "user", "content": "hi"}]
        for name, word in (("actds_positions", "the last one"), ("actds_hooks", "resid_post.0")):
            bad = {"vllm_xargs": {name: word}}
            with pytest.raises(openai.BadRequestError, match=name):
                client.chat.completions.create(model="tiny", messages=hello, extra_body=bad)
        switch.touch()
        off = chat(client, len(chats) + 1)
        switch.unlink()
        on = chat(client, len(chats) + 2)
        assert server.stop() == 0
    finally:
        server.kill()
    deadline = time.monotonic() + 120
    while any(not list(path.glob("seal/0001.json")) for path in out.iterdir()):
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-4000:]
        time.sleep(0.2)
    catalogs = datasets_of(out)
    assert len(catalogs) >= 3, "datasets ended while it served"
    _check_chats([*chats, on], catalogs)
    # What came while it was off is in the account, and nothing of it is stored.
    handle = off.handle
    spans = catalogs[handle["dataset"]].table("spans", handle["run"]).to_pylist()
    of_off = [span for span in spans if span["request"] == handle["request"]]
    assert {span["reason"] for span in of_off} == {"sampling:off"} and handle["stored"] == []
    _check_redaction(chats[1], catalogs)


def _check_chats(chats: list[Chat], catalogs: dict[str, Catalog]) -> None:
    """Every handle leads to exactly its rows; nothing that is to be stored lacks."""
    rows, fates = rows_by_name([*catalogs.values()]), Counter[str]()
    spans: dict[str, list[dict[str, Any]]] = defaultdict(list)
    hooks_of: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for catalog in catalogs.values():
        validated(open_store(catalog.store.uri).uri)
        for run in catalog.runs_with_data:
            lines = catalog.table("requests", run).to_pylist()
            name_of = {line["request"]: line["external_id"] for line in lines}
            for shard in catalog.shards_of(run):
                for request in set(shard.tokens(["request"])["request"].to_pylist()):
                    hooks_of[name_of[request]].add(tuple(shard.hooks))
            for span in catalog.table("spans", run).to_pylist():
                spans[name_of[span["request"]]].append(span)
    for one in chats:
        name = f"chatcmpl-{one.name}"
        if one.answer is None:
            continue
        tokens, handle = one.tokens, one.handle
        stored = {p for start, stop in handle["stored"] for p in range(start, stop)}
        assert handle["positions"] == len(tokens) - 1
        assert stored == _wanted(one, len(tokens) - 1), one
        assert all(tokens[p] == token for p, token in rows[name].items())
        assert rows[name].keys() <= stored
        # The others were served from the cache, whose rows are those of another request, or of a
        # run before.
        hits = {
            p
            for span in spans[name]
            if span["disposition"] == "cache_ref"
            for p in range(span["start"], span["stop"])
        }
        assert stored <= rows[name].keys() | hits, (one.name, stored - rows[name].keys() - hits)
        chosen = _chosen(one)
        assert handle.get("hooks") == (None if chosen == EVERY else chosen)
        assert not rows[name] or hooks_of[name] == {tuple(chosen)}
        line = catalogs[handle["dataset"]].table("requests", handle["run"]).to_pylist()
        assert line[handle["request"]]["external_id"] == name
        if one.name.startswith("private") or one.asked == "none":
            one = replace(one, conversation=None)
        wanted = None if chosen == EVERY else ",".join(chosen)
        assert line[handle["request"]]["hooks"] == wanted
        turn = None if one.conversation is None else 0
        about = line[handle["request"]]
        assert (about["conversation"], about["turn"]) == (one.conversation, turn)
        assert "actds_conversation" not in (about["sampling"] or "")
        fates["of one run" if min(s["start"] for s in spans[name]) == 0 else "odd"] += 1
    assert set(fates) == {"of one run"}
    lost = [s for of_name in spans.values() for s in of_name if s["disposition"] == "dropped"]
    assert not lost


def _chosen(one: Chat) -> list[str]:
    if one.hooks in (None, "all") or one.name.startswith("private"):
        return EVERY
    return sorted(name.strip() for name in str(one.hooks).split(","))


def _wanted(one: Chat, n: int) -> set[int]:
    edge = len(one.answer.prompt_token_ids)
    ranges = {
        "all": [(0, n)], "last_prompt": [(edge - 1, edge)], "all_generated": [(edge, n)],
        "last_prompt,all_generated": [(edge - 1, n)], "0-8": [(0, 8)], "none": [],
    }  # fmt: skip
    if one.name.startswith("private"):
        return set()
    return {p for a, b in ranges[one.asked or "all"] for p in range(a, min(b, n))}


def _check_redaction(one: Chat, catalogs: dict[str, Catalog]) -> None:
    """A chat that is redacted is in no file, and all else validates."""
    path = Path(catalogs[one.handle["dataset"]].store.uri)
    before = rows_by_name([read_catalog(open_store(path))])
    redact(path, [one.answer.id])
    name = f"chatcmpl-{one.name}"
    after = rows_by_name([read_catalog(open_store(path))])
    assert before[name] and {n: of for n, of in before.items() if n != name and of} == {
        n: of for n, of in after.items() if of
    }
    for file in path.rglob("*"):
        if file.suffix == ".json":
            assert one.name not in json.dumps(json.loads(file.read_text()))
    assert {f.code for f in actds.validate(path, level="deep").findings} <= {"E410"}
