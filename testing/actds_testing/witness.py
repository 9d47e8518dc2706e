"""The account of a harvest against a witness: what was fed, and what clients got.

``actds_testing.witnessed_engine`` writes both down and knows nothing of the account. From these two
alone follows which rows there must be. The rows are those of a plain forward of ``transformers``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.explore.dataset import Dataset
from actds_testing import harvest as h
from actds_testing.independent.draw import number
from actds_testing.tiny import make_random_model
from actds_testing.witnessed_engine import Facts

LAYERS = (0, 2)
HOOKS = tuple(f"resid_post.{layer}" for layer in LAYERS)
NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
}  # fmt: skip
CROWDED = {"num_gpu_blocks_override": 11, "max_num_batched_tokens": 64, "max_num_seqs": 8}
REPLICA_WITNESS = """
from pathlib import Path
from actds_testing.witnessed_engine import watch_to_the_end
watch_to_the_end(Path({folder!r}))
"""


def make_model(path: Path) -> Path:
    """Make a tiny model with so many stop tokens that a request ends after some 30 sampled ones."""
    model = make_random_model(path)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(2, 10))}))
    return model


def make_prompts(path: Path) -> Path:
    """Write sixteen prompts, every other one with a shared beginning of three KV blocks."""
    shared = "a shared beginning that fills three blocks of the prefix cache " * 2
    records = [
        {"id": f"q{i}", "prompt": f"{shared * (i % 2)}number {i} goes on and on " + "x" * (6 * i)}
        for i in range(16)
    ]
    return h.write_prompts(path, records)


@dataclass
class Harvest:
    """A harvest with a witness, and how its engine ended."""

    dataset: Dataset
    facts: Facts
    run: str

    def table(self, name: Any) -> pa.Table:
        """Return a table of the run."""
        return self.dataset.catalog.table(name, self.run)

    def tokens(self) -> list[dict[str, Any]]:
        """Return one line per row of the run."""
        found = self.dataset.tokens(run=True)
        mine: list[dict[str, Any]] = found.filter(pc.equal(found["run"], self.run)).to_pylist()
        return mine

    def total(self, name: str) -> int:
        """Return a total of the seal."""
        assert self.dataset.seal is not None
        return int(self.dataset.seal.totals[name])


def transfer(folder: Path, role: str = "kv_both") -> dict[str, Any]:
    """Return ``kv_transfer_config`` of the tests' connector over a folder."""
    return {
        "kv_connector": "TestConnector", "kv_role": role,
        "kv_connector_module_path": "actds_testing.kv_connector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }  # fmt: skip


def serve(
    where: Path, model: Path, prompts: Path, *, cold: bool = False, **task: Any
) -> subprocess.CompletedProcess[str]:
    """Run a witnessed harvest to whatever end; ``engine`` and ``settings`` in a task are added."""
    engine = {
        "dtype": "float32", "block_size": 32, "enforce_eager": True, "max_model_len": 320,
        "distributed_executor_backend": "uni", **task.pop("engine", {}),
    }  # fmt: skip
    settings = {
        "out": str(where / "acts"), "model": str(model), "prompts": str(prompts),
        "hooks": f"resid_post:{','.join(map(str, LAYERS))}", "engine_args": engine,
        "max_tokens": 60, **task.pop("settings", {}),
    }  # fmt: skip
    several = engine["distributed_executor_backend"] == "mp"
    task = {"settings": settings, "fork": cold and several, **task}
    (where / "task.json").write_text(json.dumps(task))
    words = ["-m", "actds_testing.witnessed_engine", str(where / "task.json"),
             str(where / "facts.json"), "--model", str(model)]  # fmt: skip
    if cold:
        return subprocess.run([sys.executable, *words], env=h.environment(**h.ONE_PROCESS),
                              capture_output=True, text=True, timeout=h.TIMEOUT_S)  # fmt: skip
    forked = {"ACTDS_FORK_WORKERS": "1"} if several else {}
    timeout_s = h.FORKED_TIMEOUT_S if several else h.TIMEOUT_S
    return h.warm_engine().run(words, h.environment(**h.ONE_PROCESS, **forked), timeout_s)


def harvest(where: Path, model: Path, prompts: Path, **task: Any) -> Harvest:
    """Run a witnessed harvest that must succeed, and validate it."""
    done = serve(where, model, prompts, **task)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    dataset = h.validated(where / "acts")
    (run,) = dataset.runs
    return Harvest(dataset, Facts.read(where / "facts.json"), run)


def harvest_replicas(where: Path, model: Path, prompts: Path, *options: str) -> list[Harvest]:
    """Run a harvest with an engine in each of several processes; return the run of each."""
    (where / "sitecustomize.py").write_text(REPLICA_WITNESS.format(folder=str(where / "facts")))
    (where / "facts").mkdir()
    path = f"{where}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    dataset = h.harvest(where / "acts", model, prompts, *options, *h.ALONE, PYTHONPATH=path,
                        **h.ONE_PROCESS)  # fmt: skip
    by_names = {
        frozenset(facts.got): facts
        for facts in (Facts.read(found) for found in (where / "facts").iterdir())
    }
    found = []
    for run in dataset.runs:
        ids = dataset.catalog.table("requests", run)["internal_id"].to_pylist()
        found.append(Harvest(dataset, by_names[frozenset(name_of(one) for one in ids)], run))
    return found


def name_of(internal_id: str) -> str:
    """Return the engine's name of a request without the suffix that it adds."""
    return internal_id[:-9]


@dataclass
class Oracle:
    """What became of the rows, from what was fed and what clients got alone.

    Args:
        captured: step of each ``(request, position)`` that was computed for its client, the first
            time.
        recomputed_tokens: by step, computed for its client again.
        other_tokens: by step, the rest: of drafts that did not stand, or past the end.
        late: by request, one more than the last position computed past its end.
    """

    captured: dict[tuple[str, int], int] = field(default_factory=dict)
    recomputed_tokens: Counter[int] = field(default_factory=Counter)
    other_tokens: Counter[int] = field(default_factory=Counter)
    late: dict[str, int] = field(default_factory=dict)


def judge(facts: Facts, prompt_len: Mapping[str, int]) -> Oracle:
    """Return what must have become of every row that was fed."""
    found, mark = Oracle(), dict.fromkeys(facts.got, 0)
    stood = {(step, name): n for step, name, n in facts.stood}
    batches: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for step, name, position, token in facts.fed:
        batches.setdefault((step, name), []).append((position, token))
    for (step, name), rows in batches.items():
        tokens, n_prompt = facts.got[name], prompt_len[name]
        own = max(len(tokens) - 1, n_prompt)
        assert [p for p, _ in rows] == list(range(rows[0][0], rows[0][0] + len(rows)))
        mark[name] = max(mark[name], rows[0][0])  # what is skipped was served from the cache
        for i, (position, token) in enumerate(rows):
            if position >= own or i >= stood.get((step, name), len(rows)):
                found.other_tokens[step] += 1
                if position >= own:
                    found.late[name] = max(found.late.get(name, 0), position + 1)
                continue
            assert token == tokens[position]
            if position < mark[name]:
                found.recomputed_tokens[step] += 1
            else:
                found.captured[name, position] = step
                mark[name] = position + 1
    return found


def compare(one: Harvest) -> dict[str, dict[str, Any]]:
    """Check the account of a run against its witness; return its requests by name."""
    facts = one.facts
    requests = {name_of(r["internal_id"]): r for r in one.table("requests").to_pylist()}
    names = {r["request"]: name for name, r in requests.items()}
    assert set(requests) == set(facts.got)
    for name, r in requests.items():
        assert r["prompt_len"] + r["generated_len"] == len(facts.got[name]), name
        assert r["finish_reason"] == ("abort" if name in facts.left else facts.ended[name]), name
    oracle = judge(facts, {name: r["prompt_len"] for name, r in requests.items()})
    rows = {(names[row["request"]], row["position"]): row for row in one.tokens()}
    steps = {s["step"]: s for s in one.table("steps").to_pylist()}
    assert set(steps) == {step for step, *_ in facts.fed}
    inclusion, drawn = _draw(one, oracle, {name: k for k, name in names.items()}, steps)
    assert rows.keys() == drawn
    for (name, position), row in rows.items():
        assert facts.got[name][position] == row["token_id"]
        assert row["inclusion"] == inclusion[name, position]
    captured = Counter(oracle.captured[key] for key in drawn)
    thinned = Counter(oracle.captured[key] for key in oracle.captured.keys() - drawn)
    for step, s in steps.items():
        assert s["captured_tokens"] == captured[step]
        assert s["thinned_tokens"] == thinned[step]
        assert s["recomputed_tokens"] == oracle.recomputed_tokens[step]
        others = s["undelivered_tokens"] + s["rejected_tokens"]
        assert others == oracle.other_tokens[step], step
    _compare_ends(one, requests, oracle)
    return requests


def _draw(
    one: Harvest, oracle: Oracle, requests: Mapping[str, int], steps: Mapping[int, Any]
) -> tuple[dict[tuple[str, int], float | None], set[tuple[str, int]]]:
    """Return the inclusion of every computed position, and which of them the hash draws."""
    field = one.dataset.runs[one.run].fields.get("capture.inclusion")
    design = json.loads(str(field.value)) if field is not None and field.value else None
    if design is None:
        return dict.fromkeys(oracle.captured), set(oracle.captured)
    whole, salt = design["unit"] == "request", int(design["salt"], 16)
    first: dict[str, int] = {}
    for step, name, *_ in one.facts.fed:
        first.setdefault(name, step)
    inclusion = {
        (name, position): steps[first[name] if whole else step]["inclusion"]
        for (name, position), step in oracle.captured.items()
    }
    drawn = {
        (name, position)
        for (name, position), share in inclusion.items()
        if number(salt, requests[name], 0 if whole else position) < share
    }
    return inclusion, drawn


def _compare_ends(one: Harvest, requests: Mapping[str, dict[str, Any]], oracle: Oracle) -> None:
    facts, steps, spans = one.facts, one.table("steps"), one.table("spans").to_pylist()
    names = {r["request"]: name for name, r in requests.items()}
    late = {name: (max(len(facts.got[name]) - 1, r["prompt_len"])) for name, r in requests.items()}
    for span in spans:
        name = names[span["request"]]
        if span["disposition"] == "undelivered":
            assert span["start"] == late[name] and span["stop"] <= oracle.late[name]
            assert span["reason"] == "after_end"
        else:
            assert span["stop"] <= late[name]
    assert h.total(steps, "rejected_tokens") == facts.drafted - facts.accepted
    if facts.drafted:
        assert h.total(steps, "drafted_tokens") == facts.drafted
        assert h.total(steps, "accepted_tokens") == facts.accepted
        return
    stops = {names[s["request"]]: s["stop"] for s in spans if s["disposition"] == "undelivered"}
    assert stops == oracle.late


def compare_rows(model: Path, harvests: Sequence[Harvest]) -> None:
    """Check that the rows are those of a plain forward of what the clients got."""
    tokens = {
        r["external_id"]: one.facts.got[name_of(r["internal_id"])]
        for one in harvests
        for r in one.table("requests").to_pylist()
    }
    compare_with_forward(model, harvests[0].dataset, tokens)


def compare_with_forward(model: Path, dataset: Dataset, tokens: Mapping[str, list[int]]) -> None:
    """Check that the rows of ``HOOKS`` are those of a plain forward of tokens by external id."""
    import torch
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    states = {}
    for name, ids in tokens.items():
        with torch.no_grad():
            states[name] = plain(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer, hook in zip(LAYERS, HOOKS, strict=True):
        rows = h.rows_of(dataset, hook)
        got = np.stack(list(rows.values()))
        want = np.stack([states[name][layer + 1][0][p].numpy() for name, p in rows])
        assert h.relative_l2(got, want).max() <= 1e-5
        shifted = np.stack([states[name][layer + 1][0][p - 1].numpy() for name, p in rows])
        assert h.relative_l2(got, shifted).mean() > 1e-2


def counts(one: Harvest) -> dict[str, int]:
    """Return what happened in a run, by what the tests are about."""
    steps, requests = one.table("steps"), one.table("requests")
    return {
        **{
            name: h.total(steps, f"{name}_tokens")
            for name in ("recomputed", "undelivered", "rejected", "accepted")
        },
        "hits": h.total(requests, "cached_tokens"),
        "preempted": h.total(requests, "n_preemptions"),
        "left": len(one.facts.left),
        "chunks": sum(row["chunk"] > 0 and row["phase"] == "prefill" for row in one.tokens()),
    }
