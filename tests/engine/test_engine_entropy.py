"""Entropies of sampled tokens against the full logits of ``transformers``.

What each client got is known from a witness that knows nothing of the account. From the tokens
alone follows which lines there must be, and from a plain forward what they must say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from scipy.special import log_softmax

from actds.format.inclusion import Design
from actds_testing import harvest as h
from actds_testing import witness
from actds_testing.independent import validator as independent
from actds_testing.independent.draw import number
from actds_testing.tiny import byte_tokenizer
from actds_testing.witness import CROWDED, Harvest, compare, counts, harvest, name_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return witness.make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return witness.make_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


def full_logits(model: Path, tokens: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Return the logits ``(n, vocabulary)`` of a plain forward of each sequence, in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return {
            name: plain(torch.tensor([ids])).logits[0].double().numpy()
            for name, ids in tokens.items()
        }


def compare_entropies(model: Path, one: Harvest, tolerance: float = 2e-4) -> int:
    """Check the lines of a run against full logits; return how many there are."""
    requests = {r["request"]: r for r in one.table("requests").to_pylist()}
    name = {number: name_of(r["internal_id"]) for number, r in requests.items()}
    lines = {(name[x["request"]], x["position"]): x for x in one.table("sampled").to_pylist()}
    got = one.facts.got
    first = {name[number]: r["prompt_len"] for number, r in requests.items()}
    assert set(lines) == {(n, p) for n in got for p in range(first[n], len(got[n]))}
    assert len(lines) == one.table("sampled").num_rows
    last_row = {(n, p): step for step, n, p, _ in one.facts.fed}
    logits = full_logits(model, got)
    for (n, p), line in lines.items():
        assert line["token_id"] == got[n][p]
        assert line["step"] <= last_row[n, p - 1], "the step that computed the row before, or later"
        below = log_softmax(logits[n][p - 1])
        second, largest = np.sort(logits[n][p - 1])[-2:]
        assert line["entropy"] == pytest.approx(-(np.exp(below) * below).sum(), abs=tolerance)
        assert line["logprob"] == pytest.approx(below[got[n][p]], abs=tolerance)
        assert line["margin"] == pytest.approx(largest - second, abs=tolerance)
    return len(lines)


@pytest.mark.parametrize("ahead", [False, True])
def test_entropies_are_those_of_full_logits(
    ahead: bool, model: Path, prompts: Path, tmp_path: Path
) -> None:
    """Prompts in chunks, prefix hits, preemptions, clients that leave; sampled at random."""
    one = harvest(
        tmp_path, model, prompts, asynchronous=ahead, leave=0.005, engine=CROWDED,
        settings={"entropy": True, "temperature": 1.0, "max_tokens": 24},
    )  # fmt: skip
    compare(one)
    assert compare_entropies(model, one) > 100
    happened = counts(one)
    assert all(happened[name] for name in ("hits", "preempted", "left", "chunks")), happened
    assert happened["undelivered"] or not ahead
    assert one.dataset.runs[one.run].fields["capture.entropy"].value is True


@pytest.mark.parametrize("ahead", [False, True])
def test_rules_store_the_rows_of_uncertain_tokens_roles_labels_and_ids(
    ahead: bool, model: Path, prompts: Path, tmp_path: Path
) -> None:
    """The draw of every row computed anew: from sampled tokens, the prompts, and the hash alone."""
    tokenizer = byte_tokenizer()
    by_id: dict[str, Any] = {}
    for i, line in enumerate(prompts.read_text().splitlines()):
        record = {**json.loads(line), "topic": ("maths", "code")[i % 2]}
        if not i % 3:
            text = record.pop("prompt")
            turns = ("system", f"be brief {i}"), ("user", text[:90])
            record["messages"] = [{"role": role, "content": text} for role, text in turns]
        by_id[record["id"]] = record
    mixed = h.write_prompts(tmp_path / "mixed.jsonl", list(by_id.values()))
    d_model = json.loads((model / "config.json").read_text())["hidden_size"]
    probes = np.random.default_rng(3).normal(size=(2, d_model)).astype(np.float32)
    np.save(tmp_path / "probes.npy", probes)
    keep = (
        "label topic=ma* and role user: 1; role system: 0.75; "
        "probe resid_post.2 1 >= 0.5: 0.625; entropy 5.7552-: 0.875; "
        "role assistant: 0.25; id q1?: 0.5; 0.1"
    )
    one = harvest(
        tmp_path, model, mixed, asynchronous=ahead, engine=CROWDED,
        settings={"entropy": True, "temperature": 1.0, "max_tokens": 24, "keep": keep,
                  "label_columns": ["topic"], "probes": str(tmp_path / "probes.npy")},
    )  # fmt: skip

    def of_prompt(request: dict[str, Any], position: int) -> float:
        record = by_id[request["external_id"]]
        for turn in record.get("messages", ()):
            ids = tokenizer.apply_chat_template(
                record["messages"], add_generation_prompt=True, return_dict=False
            )
            assert len(ids) == request["prompt_len"]
            said = tokenizer.encode(turn["content"])
            at = next(k for k in range(len(ids)) if ids[k : k + len(said)] == said)
            if at <= position < at + len(said):
                if turn["role"] == "system":
                    return 0.75
                if record["topic"] == "maths":
                    return 1.0
        return 0.5 if len(record["id"]) == 3 else 0.1

    design = Design.of(one.dataset.runs[one.run])
    assert design is not None
    lines = one.table("sampled").to_pylist()
    # What the readouts say of the row whose logits a token came from, in the step of the logits.
    score = {
        (line["request"], line["position"] + 1, line["step"]): line["probes"][1]
        for line in one.dataset.readouts().to_pylist()
        if line["hook"] == "resid_post.2"
    }
    of_token = {}
    for line in lines:
        key = line["request"], line["position"]
        assert line["scores"] == [score[*key, line["step"]]]
        of_entropy = 0.875 if line["entropy"] >= 5.7552 else 0.25
        of_token[key] = 0.625 if line["scores"][0] >= 0.5 else of_entropy
    computed = {
        (span["request"], p)
        for span in one.table("spans").to_pylist()
        if span["disposition"] in ("captured", "thinned")
        for p in range(span["start"], span["stop"])
    }
    requests = {line["request"]: line for line in one.table("requests").to_pylist()}
    shares = {
        key: of_prompt(requests[key[0]], key[1])
        if key[1] < requests[key[0]]["prompt_len"]
        else of_token[key]
        for key in computed
    }
    expected = {
        (*key, share) for key, share in shares.items() if number(int(design.salt), *key) < share
    }
    rows = one.tokens()
    assert {(row["request"], row["position"], row["inclusion"]) for row in rows} == expected
    assert len({share for *_, share in expected}) == 7
    assert not [f for f in independent.validate(Path(one.dataset.path)) if f.severity == "error"]


@pytest.mark.full
def test_what_a_sampler_changes_in_place_is_not_what_is_read(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    """In float32 vLLM's sampler works on the model's own logits."""
    changing = {
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "top_k": 20, "top_p": 0.9,
        "min_p": 0.01, "bad_words": ["e"], "logprobs": 3, "prompt_logprobs": 1,
        "logit_bias": {"40": -2.0},
    }  # fmt: skip
    one = harvest(
        tmp_path, model, prompts, engine={"sampling_params": changing},
        settings={"entropy": True, "temperature": 0.7, "max_tokens": 12},
    )  # fmt: skip
    assert compare_entropies(model, one) > 100


@pytest.mark.full
def test_a_constrained_token_has_its_unconstrained_entropy(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    choice = {"structured_outputs": {"choice": ["abcdef", "ghijkl"]}}
    one = harvest(
        tmp_path, model, prompts, engine={"sampling_params": choice},
        settings={"entropy": True, "max_tokens": 12},
    )  # fmt: skip
    assert compare_entropies(model, one) >= 32


@pytest.mark.full
def test_tokens_and_rows_are_the_same_bits_without(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    made = []
    for entropy in (False, True):
        where = tmp_path / str(entropy)
        where.mkdir()
        made.append(
            harvest(where, model, prompts, engine=CROWDED,
                    settings={"entropy": entropy, "temperature": 1.0, "max_tokens": 24})
        )  # fmt: skip
    without, with_ = made
    assert with_.facts.got == without.facts.got
    assert not without.dataset.sampled().num_rows and with_.dataset.sampled().num_rows
    for hook in witness.HOOKS:
        ours, theirs = (h.rows_of(one.dataset, hook) for one in (with_, without))
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(row, theirs[key]) for key, row in ours.items())


def test_the_transformers_engine_reads_the_same(model: Path, prompts: Path, tmp_path: Path) -> None:
    """Prompts in chunks of a padded batch: only their last columns sample."""
    dataset = h.harvest_warm(
        tmp_path / "acts", model, prompts, "--hooks", "resid_post:0", "--entropy",
        "--engine", "transformers",
        "--temperature", "1", "--max-tokens", "8", "--engine-arg", "max_num_batched_tokens=128",
        "--engine-arg", "dtype=float32", "--engine-arg", "max_num_seqs=4",
    )  # fmt: skip
    lines, tokens = dataset.sampled().to_pylist(), dataset.tokens()
    fed = {}
    for row in tokens.to_pylist():
        fed.setdefault(row["request"], {})[row["position"]] = row["token_id"]
    sequences = {str(r): [ids[p] for p in sorted(ids)] for r, ids in fed.items()}
    logits = full_logits(model, sequences)
    requests = {r["request"]: r for r in dataset.requests().to_pylist()}
    assert len(lines) == pc.sum(dataset.requests()["generated_len"]).as_py() > 50
    for line in lines:
        below = log_softmax(logits[str(line["request"])][line["position"] - 1])
        assert line["entropy"] == pytest.approx(-(np.exp(below) * below).sum(), abs=2e-4)
        assert line["logprob"] == pytest.approx(below[line["token_id"]], abs=2e-4)
        request = requests[line["request"]]
        last = request["prompt_len"] + request["generated_len"] - 1
        assert (
            line["position"] == last or fed[line["request"]][line["position"]] == (line["token_id"])
        )
