"""Alerts while an engine serves are those that its dataset shows afterwards."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.explore.dataset import Dataset
from actds_testing.harvest import EAGER, harvest_alone, run_alone, validated, write_prompts

pytest.importorskip("vllm")
from actds_testing.server import Server, scrape, wait_until_ended
from actds_testing.tiny import make_random_model

pytestmark = pytest.mark.engine

OPTIONS = (
    *EAGER,
    *("--engine-arg", "block_size=32"),
    *("--engine-arg", "max_model_len=256"),
    *("--engine-arg", "dtype=float32"),
)
SAMPLED = ("--hooks", "resid_post:0,2", "--max-tokens", "24", "--temperature", "1.0")
LOOKS: dict[str, Any] = {"alpha": 0.2, "every": 2}


def prompts(path: Path, n: int, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    texts = ["".join(map(chr, rng.integers(97, 123, rng.integers(12, 60)))) for _ in range(n)]
    return write_prompts(path, [{"prompt": text} for text in texts])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alerts")
    return make_random_model(folder / "model", n_layers=3)


@pytest.fixture(scope="module")
def regime(model: Path) -> Dataset:
    """A harvest of the regime; the engine is preempted, and tokens have entropies."""
    source = prompts(model.parent / "regime.jsonl", 120, 1)
    options = (*SAMPLED, "--entropy", *OPTIONS)
    return harvest_alone(model.parent / "regime", model, source, *options)


def alerted(dataset: Dataset) -> dict[tuple[str, int], list[dict[str, Any]]]:
    lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in dataset.alerts(run=True).to_pylist():
        lines.setdefault((row["run"], row["request"]), []).append(row)
    return lines


@pytest.mark.parametrize("above", [None, 4.0])
def test_alerts_of_a_harvest_are_those_of_its_dataset(
    regime: Dataset, model: Path, tmp_path: Path, above: float | None
) -> None:
    profile = actds.profile(regime.path, above=above, **LOOKS)
    (tmp_path / "p.json").write_bytes(profile.as_bytes())
    source = prompts(tmp_path / "later.jsonl", 60, 2)
    # Few KV blocks, so that requests are preempted, and computed again.
    blocks = ("--engine-arg", "num_gpu_blocks_override=24", "--engine-arg", "max_num_seqs=32")
    options = (*SAMPLED, "--entropy", "--seed", "0", *OPTIONS, *blocks)
    dataset = harvest_alone(
        tmp_path / "later", model, source, *options, "--profile", str(tmp_path / "p.json")
    )
    assert any(dataset.requests()["n_preemptions"].to_pylist())
    result, lines = actds.alerts(dataset.path), alerted(dataset)
    assert result.profile == profile.sha256 and 0 < len(result.alerts) < 60
    assert {(alert.run, alert.request) for alert in result.alerts} == lines.keys()
    for alert in result.alerts:
        of_request = lines[alert.run, alert.request]
        assert of_request[0]["position"] == alert.position
        assert of_request[-1]["score"] == pytest.approx(alert.score, rel=1e-6)
        assert alert.kind in {line["kind"] for line in of_request}


def test_a_harvest_beside_the_profile_of_other_weights_ends_before_it_has_written(
    regime: Dataset, tmp_path: Path
) -> None:
    (tmp_path / "p.json").write_bytes(actds.profile(regime.path, **LOOKS).as_bytes())
    other = make_random_model(tmp_path / "model", n_layers=3, hidden=128, n_heads=4)
    source = prompts(tmp_path / "few.jsonl", 4, 3)
    beside = ("--profile", str(tmp_path / "p.json"))
    done = run_alone(tmp_path / "acts", other, source, *SAMPLED, *OPTIONS, *beside)
    assert done.returncode == 2
    assert "E024" in done.stderr and "model.weights_sha256" in done.stderr
    assert not (tmp_path / "acts" / "actds.json").exists()
    hooks = ("--hooks", "resid_post:0", "--max-tokens", "4")
    done = run_alone(tmp_path / "acts", other, source, *hooks, *OPTIONS, *beside)
    assert done.returncode == 2 and "a profile of resid_post.2" in done.stderr


class _Receiver(BaseHTTPRequestHandler):
    received: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(json.loads(body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def wait_for_metrics(port: int, name: str, value: float) -> dict[Any, float]:
    """Return what a port of metrics says once one of them has a value: it is behind by a moment."""
    while (metrics := scrape(port)).get((name, ())) != value:
        time.sleep(0.1)
    return metrics


PATIENT = """
from actds_writers.engines.vllm import answers
answers.PATIENCE_S = 300
"""


def test_a_server_tells_clients_urls_and_metrics_who_left_the_regime(
    regime: Dataset, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that a busy machine has no say in what is answered. Read by every process of the server.
    (tmp_path / "sitecustomize.py").write_text(PATIENT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    profile = actds.profile(regime.path, **LOOKS)
    (tmp_path / "p.json").write_bytes(profile.as_bytes())
    received: list[dict[str, Any]] = []
    handler = type("Handler", (_Receiver,), {"received": received})
    with HTTPServer(("127.0.0.1", 0), handler) as url:
        threading.Thread(target=url.serve_forever, daemon=True).start()
        capture = {
            "out": str(tmp_path / "acts"),
            "hooks": "resid_post:0,2",
            "profile": str(tmp_path / "p.json"),
            "alert_url": f"http://127.0.0.1:{url.server_port}/alerts",
            "metrics_port": 0,
        }
        server = Server(
            model, tmp_path / "log", capture, "--enforce-eager", "--max-model-len", "256",
            "--load-format", "auto", "--distributed-executor-backend", "uni",
            "--shutdown-timeout", "60",
        )  # fmt: skip
        answers: dict[str, dict[str, Any] | None] = {}
        try:
            records = prompts(tmp_path / "live.jsonl", 24, 4).read_text().splitlines()
            for n, record in enumerate(records):
                body = {**json.loads(record), "max_tokens": 64, "temperature": 1.0}
                body["ignore_eos"] = True
                if n % 2:
                    body["vllm_xargs"] = {"actds_score": 1}
                answer = server.post("/v1/completions", body, {"X-Request-Id": f"n{n}"})
                answers[f"cmpl-n{n}-0"] = answer.get("kv_transfer_params")
            found = re.search(r"metrics at http://[\d.]+:(\d+)/", server.log.read_text())
            assert found is not None
            metrics = wait_for_metrics(int(found[1]), "actds_watched_requests_total", 24)
            assert server.stop() == 0
        finally:
            server.kill()
        wait_until_ended(capture["out"])
        url.shutdown()
    actds.seal(tmp_path / "acts")
    dataset = validated(tmp_path / "acts")
    result = actds.alerts(dataset.path)
    first = {alert.request: alert.position for alert in result.alerts}
    assert first and len(first) < 24
    requests = dataset.requests().to_pylist()
    for row in requests:
        answer = answers[row["external_id"]]
        if int(row["external_id"].split("-")[1][1:]) % 2 == 0:
            assert answer is None
            continue
        assert answer is not None
        score = answer["actds"]
        assert score["request"] == row["request"] and score["profile"] == profile.sha256
        depth = row["generated_len"] - 2  # of the last token that is fed
        assert score["position"] == row["prompt_len"] + depth - depth % LOOKS["every"]
        assert score["alert"] == first.get(row["request"])
        assert (score["alert"] is not None) == (score["score"] > score["threshold"])
    assert {doc["request"]: doc["position"] for doc in received} == first
    assert all(doc["dataset"] == dataset.catalog.genesis.dataset for doc in received)
    told = "left the regime of the profile at position"
    assert (tmp_path / "log").read_text().count(told) == len(first)
    by_hook = {
        labels[0][1]: n for (name, labels), n in metrics.items() if name == "actds_alerts_total"
    }
    assert set(by_hook) == {"resid_post.0", "resid_post.2"}
    n_answered = sum(answer["actds"]["alert"] is not None for answer in answers.values() if answer)
    assert n_answered <= sum(by_hook.values()) <= len(first)
    assert metrics["actds_profile", (("sha256", profile.sha256),)] == 1
