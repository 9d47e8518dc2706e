"""The account of a source is whole: every record has a line that says what became of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import actds
from actds.info import describe, missing
from actds.reading import Catalog
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing.independent import validator as independent
from actds_testing.tiny import byte_tokenizer, make_random_model

pytestmark = pytest.mark.standard

MAX_LEN = 128
HARVEST: dict[str, Any] = {
    "hooks": "resid_post:0", "engine": "transformers", "engine_args": {"max_num_seqs": 4},
    "max_tokens": 3, "check": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_random_model(folder, n_layers=2, max_len=MAX_LEN)


def records(n: int) -> list[dict[str, Any]]:
    """Return records of which every third is too long for the model."""
    return [{"id": f"q{i}", "prompt": "the ring " * (1 + i % 9 if i % 3 else 20 + i)}
            for i in range(n)]  # fmt: skip


def by_row(dataset: actds.Dataset) -> dict[int, dict[str, Any]]:
    return {line["source_row"]: line for line in dataset.requests(run=False).to_pylist()}


def validated(path: Path) -> actds.Dataset:
    """Return a dataset in which neither validator finds an error."""
    assert not [one for one in independent.validate(path, deep=True) if one.severity == "error"]
    return h.validated(path)


def test_skipped_records_have_the_length_that_the_tokenizer_gave(
    model: Path, tmp_path: Path
) -> None:
    told = records(12)
    prompts = h.write_prompts(tmp_path / "p.jsonl", [*told, {"id": "broken", "prompt": 7}])
    result = actds.write(
        out=tmp_path / "acts", model=model, prompts=prompts, skip_broken=True, **HARVEST
    )
    lengths = [len(ids) for ids in byte_tokenizer()([one["prompt"] for one in told])["input_ids"]]
    long = [n for n in lengths if n >= MAX_LEN]
    assert len(long) == 4
    dataset = validated(tmp_path / "acts")
    lines = by_row(dataset)
    assert [lines[row]["prompt_len"] for row in range(12)] == lengths
    for row, n in enumerate(lengths):
        is_long = n >= MAX_LEN
        assert (lines[row]["finish_reason"] == "skipped") == is_long
        assert (lines[row]["reason"] or "").startswith("E004") == is_long
    assert (lines[12]["finish_reason"], lines[12]["prompt_len"]) == ("skipped", 0)
    # Nobody owes what was never served, and no count of what was served has it.
    spans = dataset.spans()
    assert set(spans["request"].to_pylist()).isdisjoint(
        line["request"] for line in lines.values() if line["finish_reason"] == "skipped"
    )
    assert "requests   13 = 8 length + 5 skipped\n" in result.summary
    assert f"skipped    5 prompts of {sum(long):,} tokens\n" in result.summary
    facts = describe(Catalog.read(open_store(tmp_path / "acts")))
    assert facts.runs[0].prompt_tokens == sum(lengths) - sum(long)
    words = [line.text for line in missing(facts)]
    assert any(w.startswith(f"  4 requests skipped ({sum(long):,} prompt tokens); the first: E004")
               for w in words)  # fmt: skip
    assert any(w.startswith("  1 request skipped (0 prompt tokens): E002") for w in words)


def test_a_prompt_that_the_engine_refuses_and_a_short_document_have_their_lengths(
    model: Path, tmp_path: Path
) -> None:
    # With scaled positions the limit is known when the engine has started, and not before.
    scaled = make_random_model(tmp_path / "scaled", n_layers=2, max_len=MAX_LEN)
    config = json.loads((scaled / "config.json").read_text())
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 1.0, "rope_theta": 1e4}}
    (scaled / "config.json").write_text(json.dumps(config))
    prompts = h.write_prompts(tmp_path / "p.jsonl", records(4))
    actds.write(out=tmp_path / "refused", model=scaled, prompts=prompts, **HARVEST)
    lines = by_row(validated(tmp_path / "refused"))
    assert "the engine takes" in lines[0]["reason"]
    assert [lines[row]["prompt_len"] for row in range(4)] == [180, 18, 27, 207]

    actds.write(out=tmp_path / "cut", model=model, prompts=prompts, continue_at=30, **HARVEST)
    lines = by_row(validated(tmp_path / "cut"))
    assert [lines[row]["finish_reason"] for row in range(4)] == [
        "length", "skipped", "skipped", "length",
    ]  # fmt: skip
    assert lines[1]["reason"].startswith("E023")
    assert [lines[row]["prompt_len"] for row in range(4)] == [30, 18, 27, 30]
