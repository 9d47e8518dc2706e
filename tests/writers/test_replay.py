"""Replay: the token sequences of a dataset, known or not, served again and paired row by row."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import actds
from actds.cli import cli
from actds.errors import ActdsError
from actds.explore.requests import find_partners, prefix_hashes, token_sequences
from actds.format.readouts import Readouts
from actds_testing import harvest as h
from actds_testing.schedules import simulate
from actds_testing.synthetic import make_dataset
from actds_testing.tiny import make_random_model
from actds_writers.config import ReplaySettings
from actds_writers.engine_protocol import find_engine
from actds_writers.harvest.replay import Replays, hooks_of
from actds_writers.harvest.result import Observer
from actds_writers.provenance import Fact

HOOKS = ("resid_post.0", "resid_post.2")
ENGINE: dict[str, Any] = {"engine": "transformers", "check": False}
LENGTHS = (1, 5, 73, 3, 40, 12)
CHAT = [{"role": "user", "content": "hello"}]


class Heard(Observer):
    """Keeps what a person would be told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def said(self, line: str) -> None:
        self.lines.append(line)


# ---- sequences


def test_sequences_are_those_that_were_fed_also_of_lost_and_cached_positions(
    tmp_path: Path,
) -> None:
    told = simulate(12, 5, drops=True)
    path = make_dataset(tmp_path / "acts", schedule=told, readouts=Readouts(2, seed=1))
    dataset = actds.open(path)
    assert {"dropped", "cache_ref"} <= set(dataset.spans()["disposition"].to_pylist())
    n_known = 0
    for one in token_sequences(dataset):
        if one.line["finish_reason"] == "skipped":
            assert one.unknown and "skipped" in one.unknown
            continue
        n_known += one.unknown is None
        assert one.token_id.tolist() == told.token_ids[one.request][: len(one.token_id)]
        assert (
            one.token_id.tolist()
            == dataset.request(one.request).token_id.tolist()[: len(one.token_id)]
        )
        digest = hashlib.sha256(one.token_id.astype("<u4").tobytes()).hexdigest()
        assert digest == one.line["token_digest"] and one.unknown is None
        assert one.n_given == one.line["prompt_len"]
    assert n_known > 8


def test_without_readouts_a_loss_leaves_the_sequence_unknown(tmp_path: Path) -> None:
    dataset = actds.open(make_dataset(tmp_path / "acts", schedule=simulate(12, 5, drops=True)))
    lost = {line["request"] for line in dataset.drops().to_pylist()}
    unknown = {one.request for one in token_sequences(dataset) if one.unknown is not None}
    assert lost and lost <= unknown
    words = next(one.unknown for one in token_sequences(dataset) if one.request in lost)
    assert words is not None and "no row, reference or readout" in words


def test_a_replay_of_a_replay_keeps_what_was_given_at_first(tmp_path: Path) -> None:
    dataset = actds.open(make_dataset(tmp_path / "acts", n_requests=6, origins=True))
    given = dict(
        zip(*(dataset.origins()[name].to_pylist() for name in ("request", "n_given")), strict=True)
    )
    for one in token_sequences(dataset):
        if one.line["finish_reason"] != "skipped":
            assert one.n_given == given.get(one.request, one.line["prompt_len"])


# ---- what is served


def served(source: Path, model: Path, tmp_path: Path, **more: Any) -> tuple[Any, list[str]]:
    """Return what a replay serves, without an engine, and what it says."""
    given = ReplaySettings.of(
        {"source": str(source), "out": str(tmp_path / "out"), "model": model, **ENGINE, **more}
    )
    dataset, heard = actds.open(source), Heard()
    hooks = hooks_of(dataset.hooks.values())
    engine = find_engine("transformers").options({})
    return Replays(given, dataset, heard).served(given.as_write(hooks), engine, 1024), heard.lines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "tiny")


def test_what_is_not_known_is_left_out_by_name_and_counted(model: Path, tmp_path: Path) -> None:
    source = make_dataset(tmp_path / "acts", schedule=simulate(12, 5, drops=True))
    found, lines = served(source, model, tmp_path)
    skips = [one.skip for one in found.encoded if one.skip is not None]
    assert skips and all(skip.startswith("E022 request ") for skip in skips)
    assert any(f"{len(skips)} of 12 requests are left out" in line for line in lines)
    facts = {fact.name: fact.value for fact in found.facts if isinstance(fact, Fact)}
    assert (facts["prompts.n_records"], facts["prompts.n_skipped"]) == (12, len(skips))
    assert facts["prompts.sha256"] == actds.open(source).digest
    # The simulated run has no digest of weights: nothing is claimed of them.
    assert any("model.weights_sha256 is not known" in line for line in lines)


def test_other_company_is_another_order_of_the_same_requests(model: Path, tmp_path: Path) -> None:
    source = make_dataset(tmp_path / "acts", n_requests=12)
    plain, _ = served(source, model, tmp_path, max_requests=9)
    other, _ = served(source, model, tmp_path, max_requests=9, neighbours=4)
    again, _ = served(source, model, tmp_path, max_requests=9, neighbours=4)
    orders = [[one.prompt.index for one in found.encoded] for found in (plain, other, again)]
    assert orders[0] == list(range(9)) and orders[1] == orders[2] != orders[0]
    assert sorted(orders[1]) == orders[0]
    assert plain.client == other.client


def test_an_option_of_one_word_names_it_and_refuses_others() -> None:
    shown = CliRunner().invoke(cli, ["replay", "--help"]).output
    assert "--only [missing]" in shown
    done = CliRunner().invoke(cli, ["replay", "A", "B", "--model", ".", "--only", "lost"])
    assert done.exit_code == 2 and "'lost' is not 'missing'" in done.output


def test_hooks_are_named_as_the_option_takes_them(tmp_path: Path) -> None:
    dataset = actds.open(make_dataset(tmp_path / "acts", hooks=("resid_post.3", "resid_post.10")))
    assert hooks_of(dataset.hooks.values()) == "resid_post:3,10"


# ---- through an engine


@pytest.fixture(scope="module")
def source(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    records: list[dict[str, Any]] = [
        {"id": f"q{i}", "prompt": ("abcdefgh" * 20)[i : i + n]} for i, n in enumerate(LENGTHS)
    ]
    records += [{"id": "chat", "messages": CHAT}, {"id": "long", "prompt": "x" * 2000}]
    prompts = h.write_prompts(folder / "prompts.jsonl", records)
    actds.write(
        out=folder / "acts", model=model, prompts=prompts, hooks="resid_post:0,2", max_tokens=7,
        engine_args={"max_num_seqs": 4, "max_num_batched_tokens": 48}, **ENGINE,
    )  # fmt: skip
    return folder / "acts"


@pytest.fixture(scope="module")
def replayed(source: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("replayed") / "acts"
    result = actds.replay(source=source, out=out, model=model, alone=True, neighbours=1, **ENGINE)
    assert result.reason == "finished" and "1 skipped" in result.summary
    h.validated(out)
    return out


@pytest.mark.standard
def test_every_row_of_the_source_pairs_with_one_of_the_replay(source: Path, replayed: Path) -> None:
    mine, theirs = actds.open(source), actds.open(replayed)
    for hook in HOOKS:
        shards = mine.shards_of(hook)
        partners = find_partners(prefix_hashes(mine, shards), shards, "R", theirs, hook)
        assert partners.n_pairs == mine.n_rows == theirs.n_rows
        own = np.arange(mine.n_rows)
        got = theirs.array(hook)[np.concatenate(list(partners.rows))]
        assert h.relative_l2(got, mine.array(hook)[own]).max() <= 1e-5
    batch = next(iter(actds.Loader(source, hooks=[HOOKS[0]], paired={"R": replayed}, batch=32)))
    assert batch[f"R/{HOOKS[0]}"].shape == batch[HOOKS[0]].shape


@pytest.mark.standard
def test_origins_lead_to_the_source_and_say_what_was_sampled(source: Path, replayed: Path) -> None:
    mine, theirs = actds.open(source), actds.open(replayed)
    before = {line["request"]: line for line in mine.requests().to_pylist()}
    after = {line["request"]: line for line in theirs.requests().to_pylist()}
    origins = theirs.origins().to_pylist()
    assert {line["source_request"] for line in origins} == set(before)
    for line in origins:
        assert line["source_seal"] == mine.digest
        assert line["source_dataset"] == mine.catalog.genesis.dataset
        here, there = after[line["request"]], before[line["source_request"]]
        for name in ("external_id", "source", "source_row"):
            assert here[name] == there[name]
        if there["finish_reason"] == "skipped":
            assert here["finish_reason"] == "skipped" and "E022" in here["reason"]
            continue
        assert here["token_digest"] == there["token_digest"]
        assert line["n_given"] == there["prompt_len"]
        assert here["prompt_len"] == there["prompt_len"] + there["generated_len"] - 1
    assert set(theirs.tokens()["phase"].to_pylist()) == {"prefill"}
    assert {step["n_requests"] for step in theirs.steps().to_pylist()} == {1}


@pytest.mark.standard
def test_the_roles_of_a_chat_are_those_of_its_source(source: Path, replayed: Path) -> None:
    def roles(path: Path) -> list[tuple[str, int, int]]:
        return [tuple(line.values())[1:] for line in actds.open(path).roles().to_pylist()]

    assert roles(source) == roles(replayed)
    assert {"template", "user", "assistant"} <= {role for *_, role in roles(source)}


@pytest.mark.standard
def test_a_finished_replay_resumes_to_nothing_and_another_source_is_refused(
    source: Path, replayed: Path, model: Path
) -> None:
    options: dict[str, Any] = {"out": replayed, "model": model, "resume": True, **ENGINE}
    again = actds.replay(source=source, alone=True, neighbours=1, **options)
    assert again.run is None and again.reason == "finished"
    with pytest.raises(ActdsError, match="E010 prompts"):
        actds.replay(source=replayed, **options)


@pytest.mark.standard
def test_another_model_is_refused_before_an_engine_starts(
    source: Path, model: Path, tmp_path: Path
) -> None:
    heard = Heard()
    for name, fact in (
        ("model.safetensors", "model.weights_sha256"),
        ("tokenizer.json", "tokenizer.sha256"),
        ("config.json", "model.config_sha256"),
    ):
        other = shutil.copytree(model, tmp_path / name)
        data = bytearray((other / name).read_bytes())
        if name.endswith(".json"):
            data += b"\n"
        else:
            data[-1] ^= 1  # a bit of the last weight
        (other / name).write_bytes(data)
        with pytest.raises(ActdsError, match=f"E022 {re.escape(fact)}"):
            actds.replay(source=source, out=tmp_path / "out", model=other, observer=heard, **ENGINE)
    assert not (tmp_path / "out").exists()
    assert not any("Starting" in line for line in heard.lines)


@pytest.mark.standard
def test_a_source_that_is_no_sealed_dataset_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ActdsError, match="E101"):
        actds.replay(source=tmp_path, out=tmp_path / "out", model=model, **ENGINE)


@pytest.mark.parametrize("field", ["neighbours", "max_requests"])
def test_a_number_that_no_run_record_can_hold_is_refused(field: str) -> None:
    with pytest.raises(ActdsError, match=rf"E009 {field}: 9223372036854775808; expected less"):
        ReplaySettings.of({"source": "acts", "out": "o", "model": "m", field: 2**63})
