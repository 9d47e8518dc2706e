"""Three arms of the same documents: their own text, the model's, and the model's read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import actds
from actds.errors import ActdsError
from actds_studies.regimes.arms import Arm, read_arm
from actds_studies.regimes.contrast import contrast
from actds_studies.regimes.strata import strata_of
from actds_testing import harvest as h
from actds_testing.tiny import make_random_model

pytestmark = pytest.mark.standard

ENGINE: dict[str, Any] = {"engine": "transformers", "check": False}
N_PROMPT, N_MORE = 12, 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["the quick brown fox jumps over the lazy dog, once again "[i:] for i in range(10)]
    records = [{"id": f"d{i}", "text": word} for i, word in enumerate([*words, "too short"])]
    return h.write_prompts(tmp_path_factory.mktemp("documents") / "documents.jsonl", records)


@pytest.fixture(scope="module")
def arms(
    model: Path, documents: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, actds.Dataset]:
    """H: the document's own text; G: the model's; R: the tokens of G read again."""
    folder = tmp_path_factory.mktemp("arms")
    for name, by in (("H", "document"), ("G", "model")):
        actds.write(
            out=folder / name, model=model, prompts=documents, hooks="resid_post:1",
            continue_at=N_PROMPT, continued_by=by, max_tokens=N_MORE, **ENGINE,
        )  # fmt: skip
    actds.replay(source=folder / "G", out=folder / "R", model=model, **ENGINE)
    return {name: h.validated(folder / name) for name in ("H", "G", "R")}


def test_the_arms_differ_in_author_or_computation_and_in_nothing_else(
    arms: dict[str, actds.Dataset],
) -> None:
    lines = {
        name: {line["external_id"]: line for line in arm.requests().to_pylist()}
        for name, arm in arms.items()
    }
    assert {name: len(arm) for name, arm in lines.items()} == dict.fromkeys("HGR", 11)
    for name in (f"d{i}" for i in range(10)):
        given, sampled, again = (lines[arm][name] for arm in "HGR")
        assert len({(line["source"], line["source_row"]) for line in (given, sampled, again)}) == 1
        assert sampled["prompt_len"] == N_PROMPT
        assert given["prompt_len"] == N_PROMPT + N_MORE - 1
        assert again["token_digest"] == sampled["token_digest"]
    assert {lines[arm]["d10"]["finish_reason"] for arm in "HGR"} == {"skipped"}
    assert "E023" in lines["G"]["d10"]["reason"] and "E023" in lines["H"]["d10"]["reason"]
    phases = {name: set(arm.tokens()["phase"].to_pylist()) for name, arm in arms.items()}
    assert phases == {"H": {"prefill"}, "G": {"prefill", "decode"}, "R": {"prefill"}}
    n_given = set(arms["R"].origins()["n_given"].to_pylist())
    # The skipped one has no position, and keeps its length.
    assert n_given == {N_PROMPT, lines["G"]["d10"]["prompt_len"]}


def test_pairs_are_by_token_for_computation_and_by_position_for_authorship(
    arms: dict[str, actds.Dataset],
) -> None:
    hook, after = "resid_post.1", f"position >= {N_PROMPT}"  # the prompt is the same in all three
    for first, second, pairing in (("R", "G", "token"), ("H", "R", "position")):
        found, rows, others = contrast(
            Arm(first, arms[first], where=after), Arm(second, arms[second], where=after), hook
        )
        assert (found.pairing, found.coverage) == (pairing, 1.0)
        assert len(found.pairs[0]) == len(rows) == len(others)


def test_a_prompt_that_both_arms_were_given_does_not_decide_how_they_are_paired(
    arms: dict[str, actds.Dataset],
) -> None:
    hook = "resid_post.1"
    for first, second, pairing in (
        ("R", "G", "token"),
        ("H", "R", "position"),
        ("H", "G", "position"),
    ):
        found, rows, others = contrast(Arm(first, arms[first]), Arm(second, arms[second]), hook)
        assert found.pairing == pairing
        one = found.pairs[0]
        if pairing == "token":
            assert len(one) == len(rows) == len(others)
            continue
        # Most rows are of the prompt, equal tokens twice: a comparison of nothing with nothing.
        after = [int((own.position >= N_PROMPT).sum()) for own in (rows, others)]
        assert len(one) == after[0] == after[1] < len(rows) / 2


def test_a_document_that_was_given_whole_has_the_decode_steps_of_its_model(
    arms: dict[str, actds.Dataset],
) -> None:
    rows = {name: read_arm(Arm(name, arm), "resid_post.1") for name, arm in arms.items()}
    for own in rows.values():
        assert (own.decode_step == own.position - N_PROMPT + 1).all()
        assert own.decode_step.max() == N_MORE - 1
    for name in "HR":
        told = strata_of(rows[name])
        there = {told.strata[k].name for k in told.codes["decode step"] if k >= 0}
        assert there == {"1", "6 to 10"}


def test_the_run_record_says_how_documents_were_continued(
    arms: dict[str, actds.Dataset], model: Path, documents: Path
) -> None:
    said = {name: next(iter(arm.runs.values())).fields for name, arm in arms.items()}
    assert json.loads(str(said["G"]["prompts.continue"].value)) == {
        "by": "model", "max_tokens": N_MORE, "n_prompt": N_PROMPT,
    }  # fmt: skip
    assert said["H"]["sampling.max_tokens"].value == 1
    with pytest.raises(ActdsError, match=r"E010 prompts\.continue"):
        actds.write(
            out=arms["G"].path, model=model, prompts=documents, hooks="resid_post:1",
            continue_at=N_PROMPT + 1, max_tokens=N_MORE, resume=True, **ENGINE,
        )  # fmt: skip


def test_what_makes_no_arm_is_refused_before_an_engine_starts(
    model: Path, documents: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "out": tmp_path / "out", "model": model, "prompts": documents, "hooks": "resid_post:1",
        **ENGINE,
    }  # fmt: skip
    with pytest.raises(ActdsError, match="E009 continued_by"):
        actds.write(continued_by="document", **options)
    with pytest.raises(ActdsError, match=r"E006 .*E023"):
        actds.write(continue_at=500, **options)
    assert not (tmp_path / "out").exists()
