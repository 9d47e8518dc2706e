"""The account of a source is whole: every record has a line that says what became of it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actds
from actds.dataset.info import describe, missing
from actds.dataset.sources import read_records, source_facts
from actds.errors import ActdsError
from actds_testing import harvest as h
from actds_testing.independent import validator as independent
from actds_testing.tiny import byte_tokenizer, make_random_model
from actds_writers.config import WriteSettings
from actds_writers.engine_protocol import Engine
from actds_writers.harvest.one_engine import Feed
from actds_writers.harvest.recover import recover
from actds_writers.harvest.run import harvest

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
    facts = describe(dataset.catalog)
    assert facts.runs[0].prompt_tokens == sum(lengths) - sum(long)
    words = [line.text for line in missing(facts)]
    assert any(w.startswith(f"  4 prompts skipped ({sum(long):,} tokens); the first: E004")
               for w in words)  # fmt: skip
    assert any(w.startswith("  1 prompt skipped (0 tokens): E002") for w in words)


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


# ---- prompts that were never begun

N = 30
SERVED = [{"id": f"q{i}", "prompt": f"the ring of {i} "} for i in range(N)]
LONG = {"id": "long", "prompt": "the disk " * 40}


class Ended(Feed):
    """Ends its run when a few requests have finished."""

    def step(self, engine: Engine) -> None:
        super().step(engine)
        if self.n_finished >= 6 and not self.interrupted:
            self.end()

    def end(self) -> None:
        signal.raise_signal(signal.SIGINT)


class Failed(Ended):
    def end(self) -> None:
        raise ActdsError("E504", "engine", got="its time has come", expected="more")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return h.write_prompts(tmp_path / "p.jsonl", [*SERVED, LONG])


def of_reason(dataset: actds.Dataset, reason: str, run: str | None = None) -> list[dict[str, Any]]:
    lines = dataset.requests(run=True).to_pylist()
    return [r for r in lines if r["finish_reason"] == reason and run in (None, r["run"])]


def settings(model: Path, prompts: Path, out: Path, **more: Any) -> WriteSettings:
    given = {"out": out, "model": model, "prompts": prompts, **HARVEST, **more}
    return WriteSettings.of({**given, "engine_args": {"max_num_seqs": 2}})


@pytest.mark.parametrize(
    ("feed", "why"),
    [
        (Ended, "the harvest was interrupted before it was served"),
        (Failed, "the harvest failed (E504) before it was served"),
    ],
)
def test_prompts_that_an_ended_harvest_never_began_are_listed_and_a_resumed_one_serves_them(
    model: Path, prompts: Path, tmp_path: Path, feed: type[Feed], why: str
) -> None:
    out = tmp_path / "acts"
    with suppress(ActdsError):
        result = harvest(settings(model, prompts, out), feed=feed)
        assert " unbegun" in result.summary
    first = validated(out)
    lines = by_row(first)
    assert sorted(lines) == list(range(N + 1))  # every record, once
    unbegun = of_reason(first, "unbegun")
    n_begun = N - len(unbegun)
    assert 6 <= n_begun <= 10 and {r["source_row"] for r in unbegun} == set(range(n_begun, N))
    for line in unbegun:
        assert (line["reason"], line["token_digest"], line["arrival_ns"]) == (why, None, None)
        assert line["prompt_len"] == len(SERVED[line["source_row"]]["prompt"])
        assert line["external_id"] == f"q{line['source_row']}"
    assert [r["source_row"] for r in of_reason(first, "skipped")] == [N]
    owing = set(first.spans()["request"].to_pylist())
    assert owing.isdisjoint(line["request"] for line in unbegun)
    (source,) = source_facts(first.catalog, read_records(first.catalog))
    assert (source.n_read, source.n_served, source.n_unlisted) == (N + 1, n_begun, 0)

    harvest(settings(model, prompts, out, resume=True))
    whole = validated(out)
    (run,) = set(whole.runs) - set(first.runs)
    assert {r["source_row"] for r in of_reason(whole, "length", run)} >= set(range(n_begun, N))
    assert {r["source_row"] for r in of_reason(whole, "length")} == set(range(N))
    # What any run served is served; what never fits stands in both.
    (source,) = source_facts(whole.catalog, read_records(whole.catalog))
    assert source.words() == "p.jsonl: 31 records = 30 served + 1 skipped (360 tokens)"
    assert not [line for line in missing(describe(whole.catalog)) if "unbegun" in line.text]


def test_a_harvest_that_was_killed_with_all_its_processes_names_what_it_never_began(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "acts"
    prompts = h.write_prompts(
        tmp_path / "p.jsonl", [{"id": f"q{i}", "prompt": f"{i} " * 9} for i in range(800)]
    )
    words = [
        "--hooks",
        "resid_post:0",
        "--engine",
        "transformers",
        "--no-check",
        "--engine-arg",
        "max_num_seqs=2",
        "--max-tokens",
        "8",
        "--rows-per-shard",
        "64",
    ]
    process = subprocess.Popen(h.command(out, model, prompts, *words), env=h.environment())
    while not list(out.glob("shards/*/shard.json")):
        assert process.poll() is None
        time.sleep(0.02)
    h.kill(process)
    assert [run.outcome for run in recover(out).runs] == ["recovered"]
    dataset = validated(out)
    lines = by_row(dataset)
    assert sorted(lines) == list(range(800))
    unbegun = of_reason(dataset, "unbegun")
    assert len(unbegun) > 100
    assert {line["reason"] for line in unbegun} == {"the process ended before it was served"}
    assert all(line["prompt_len"] == 9 * (1 + len(str(line["source_row"]))) for line in unbegun)
    # They are the last of the source: prompts are begun in its order.
    assert min(r["source_row"] for r in unbegun) == 800 - len(unbegun)


# ---- labels


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_labels_travel_from_the_source_to_where_and_into_a_replay(
    model: Path, tmp_path: Path, kind: str
) -> None:
    told = [one | {"domain": ("code", "web")[i % 2], "level": i} for i, one in enumerate(SERVED)]
    told = [*told[:8], LONG | {"domain": "code", "level": 8}, SERVED[9]]
    prompts = tmp_path / f"p.{kind}"
    if kind == "jsonl":
        h.write_prompts(prompts, told)
    else:
        pq.write_table(pa.Table.from_pylist(told), prompts)
    out = tmp_path / "acts"
    harvest(settings(model, prompts, out, label_columns="domain,level"), feed=Ended)
    first = validated(out)
    wanted = {row: {name: one[name] for name in ("domain", "level") if name in one}
              for row, one in enumerate(told)}  # fmt: skip
    assert {
        row: json.loads(line["labels"] or "{}") for row, line in by_row(first).items()
    } == wanted
    assert {"unbegun", "skipped"} <= {line["finish_reason"] for line in by_row(first).values()}
    fields = next(iter(first.runs.values())).fields
    assert fields["prompts.label_columns"].value == '["domain","level"]'

    with pytest.raises(ActdsError, match=r"E010 prompts\.label_columns: 'none'"):
        harvest(settings(model, prompts, out, resume=True))
    harvest(settings(model, prompts, out, resume=True, label_columns=["level", "domain"]))
    whole = validated(out)
    lines = {(r["run"], r["request"]): r for r in whole.requests(run=True).to_pylist()}
    loader = actds.Loader(out, "resid_post.0", batch=4, provenance=True, drop_last=False,
                          where="labels.domain == 'code' and labels.level < 7")  # fmt: skip
    rows = [key for _, batch in loader for key in zip(batch["run"], batch["request"], strict=True)]
    got = {lines[str(run), int(request)]["source_row"] for run, request in rows}
    assert got == {0, 2, 4, 6}
    labels = json.dumps({"domain": "code", "level": 2})
    (request,) = {key for key, line in lines.items() if line["source_row"] == 2
                  and line["finish_reason"] == "length"}  # fmt: skip
    shown = whole.request(request[1], run=request[0])
    assert shown.labels == json.loads(labels) and "; domain code; level 2>" in repr(shown)

    actds.replay(source=out, out=tmp_path / "again", model=model, engine="transformers",
                 check=False)  # fmt: skip
    again = validated(tmp_path / "again")
    for line in again.requests().to_pylist():
        assert json.loads(line["labels"] or "{}") == wanted[line["source_row"]]
    domain, level = describe(whole.catalog).labels
    assert domain.words() == "domain: 2 values in 9 records: code (5), web (4)"
    assert (level.name, level.n_values) == ("level", 9)
