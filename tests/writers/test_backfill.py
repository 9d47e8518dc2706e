"""Backfill: the requests of a lossy harvest served again, and held against what is left of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds.load.sequences import token_sequences
from actds_testing import harvest as h
from actds_testing.schedules import simulate
from actds_testing.synthetic import make_dataset
from actds_testing.synthetic_engine import writer_stopped
from actds_testing.tiny import make_random_model
from actds_writers.config import WriteSettings
from actds_writers.engine_protocol import Engine
from actds_writers.harvest.backfill import compare, lacking
from actds_writers.harvest.one_engine import Feed
from actds_writers.harvest.processes import Pipeline
from actds_writers.harvest.run import harvest
from actds_writers.monitor.progress import Observer

N_PROMPTS, LENGTH = 60, 60
ENGINE: dict[str, Any] = {"engine": "transformers", "check": False}


def test_what_lacks_a_row_is_found_position_by_position(tmp_path: Path) -> None:
    dataset = actds.open(make_dataset(tmp_path / "acts", schedule=simulate(12, 5, drops=True)))
    stored = {
        (row["request"], row["position"])
        for row in dataset.tokens(columns=["request", "position"]).to_pylist()
    }
    want: dict[tuple[str, int], int] = {}
    for span in dataset.spans().to_pylist():
        owner = span["request"] if span["disposition"] != "cache_ref" else span["ref_request"]
        wanted = span["step"] is not None or span["disposition"] == "cache_ref"
        if not wanted or span["disposition"] == "undelivered":
            continue
        n = sum((owner, position) not in stored for position in range(span["start"], span["stop"]))
        if n:
            name = "r-synthetic", span["request"]
            want[name] = want.get(name, 0) + n
    assert lacking(dataset) == want and want
    kinds = {span["disposition"] for span in dataset.spans().to_pylist()
             if ("r-synthetic", span["request"]) in want}  # fmt: skip
    assert {"dropped", "cache_ref"} <= kinds


def test_rows_that_are_not_those_of_the_source_are_refused(tmp_path: Path) -> None:
    source = actds.open(make_dataset(tmp_path / "acts", n_requests=6))
    same = compare(source, source)
    # Behind a token that nothing knows is no prefix to pair by: a row of an aborted request.
    assert (same.n_new, same.n_both) == (1, source.n_rows - 1)
    assert (same.p99, same.n_far) == (0.0, 0)
    same.require_same("acts")
    other = actds.open(make_dataset(tmp_path / "other", n_requests=6, sinks=True))
    told = compare(source, other)
    firsts = np.asarray(other.tokens(columns=["position"])["position"]) == 0
    assert told.n_far == 2 * int(firsts.sum())  # at both hooks, rows 256 times as long
    with pytest.raises(ActdsError, match=f"E418 .*{told.n_far} rows far"):
        told.require_same("other")


def prefixes(dataset: actds.Dataset) -> list[tuple[int, ...]]:
    """Return the tokens up to each stored row."""
    tokens = {(one.run, one.request): one.token_id for one in token_sequences(dataset)}
    return [
        tuple(tokens[row["run"], row["request"]][: row["position"] + 1].tolist())
        for row in dataset.tokens(columns=["request", "position"], run=True).to_pylist()
    ]


class Stalled(Feed):
    """Serves while the writer stands still for some seconds, so that its ring runs over."""

    def serve(self, engine: Engine) -> None:
        pipeline = self.poll.__self__  # type: ignore[attr-defined]
        assert isinstance(pipeline, Pipeline)
        with writer_stopped(pipeline, 4.0):
            super().serve(engine)


class Heard(Observer):
    """Keeps what a person would be told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def said(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.standard
def test_after_a_backfill_no_position_of_a_lossy_harvest_lacks_a_row(tmp_path: Path) -> None:
    model = make_random_model(tmp_path / "tiny")
    records = [{"id": f"q{n}", "prompt": f"no {n:02} " + "abcdefgh" * (LENGTH // 8)}
               for n in range(N_PROMPTS)]  # fmt: skip
    prompts = h.write_prompts(tmp_path / "prompts.jsonl", records)
    settings = WriteSettings.of(
        {"out": tmp_path / "lossy", "model": model, "prompts": prompts, "hooks": "resid_post:all",
         "max_tokens": 8, "overflow": "drop_newest", "ring_mib": 1, "staging_mib": 1,
         "engine_args": {"max_num_batched_tokens": 256}, **ENGINE}
    )  # fmt: skip
    harvest(settings, feed=Stalled)
    source = h.validated(tmp_path / "lossy")
    lost = lacking(source)
    assert sum(lost.values()) == h.total(source.drops(), "stop") - h.total(source.drops(), "start")
    assert 0 < len(lost) < N_PROMPTS, "some requests have to lose rows, and some must not"

    heard, filled = Heard(), tmp_path / "filled"
    result = actds.replay(
        source=source.path, out=filled, model=model, only="missing", observer=heard, **ENGINE
    )
    assert result.reason == "finished"
    again = h.validated(filled)
    assert {(line["source_run"], line["source_request"])
            for line in again.origins().to_pylist()} == set(lost)  # fmt: skip
    told = compare(source, again)
    # Other requests have the tokens at which the prompts begin: nothing is missing there.
    before, after = set(prefixes(source)), prefixes(again)
    owed = {tuple(one.token_id[: n + 1].tolist())
            for one in token_sequences(source) for n in range(len(one.token_id))}  # fmt: skip
    assert before < owed and before.union(after) == owed
    assert (told.n_new, told.n_both > 0) == (sum(one not in before for one in after), True)
    assert told.p99 <= 1e-5 and told.line() in heard.lines
    with pytest.raises(ActdsError, match=r"E006 .*no request that lacks a row"):
        actds.replay(source=filled, out=tmp_path / "more", model=model, only="missing", **ENGINE)
    assert not (tmp_path / "more").exists()
