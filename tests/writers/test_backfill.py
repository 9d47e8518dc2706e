"""Backfill: the requests of a lossy harvest served again, and held against what is left of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds.explore.requests import token_sequences
from actds.format.positions import Intervals, position_key
from actds_testing import harvest as h
from actds_testing.schedules import simulate, table_of
from actds_testing.synthetic import make_dataset
from actds_testing.synthetic_engine import Stalled
from actds_testing.tiny import make_random_model
from actds_writers.config import ReplaySettings, WriteSettings
from actds_writers.harvest.canary import Pair, compare, pairs_of
from actds_writers.harvest.replay import Replays, filled, missing
from actds_writers.harvest.result import Observer
from actds_writers.harvest.run import harvest

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
    found = missing(dataset)
    assert {name: one.n_keys for name, one in found.items()} == want and want
    kinds = {span["disposition"] for span in dataset.spans().to_pylist()
             if ("r-synthetic", span["request"]) in want}  # fmt: skip
    assert {"dropped", "cache_ref"} <= kinds


def pairs(source: actds.Dataset, replay: actds.Dataset) -> list[Pair]:
    """Return requests of equal numbers as replays of each other."""
    [mine], [theirs] = source.runs, replay.runs
    return [
        Pair(mine, one.request, theirs, one.request, one.token_id)
        for one in token_sequences(source)
        if one.unknown is None
    ]


@pytest.mark.parametrize("rows_at_a_time", [7, 1 << 20])
def test_rows_that_are_not_those_of_the_source_are_refused(
    rows_at_a_time: int, tmp_path: Path
) -> None:
    source = actds.open(make_dataset(tmp_path / "acts", n_requests=6))
    lines: list[Any] = []
    same = compare(
        source.catalog, source.catalog, pairs(source, source),
        keep=lines.append, rows_at_a_time=rows_at_a_time,
    )  # fmt: skip
    requests = {one.request for one in pairs(source, source)}
    spans = [span for span in source.spans().to_pylist() if span["request"] in requests]
    n = sum(span["stop"] - span["start"] for span in spans
            if span["disposition"] in ("captured", "cache_ref"))  # fmt: skip
    assert any(span["disposition"] == "cache_ref" for span in spans)
    assert (same.n_rows, same.n_unreplayed, same.p99, same.n_foreign) == (n, 0, 0.0, 0)
    assert sum(table.num_rows for table in lines) == n * len(source.hooks)
    assert same.error("acts") is None
    other = actds.open(make_dataset(tmp_path / "other", n_requests=6, sinks=True))
    told = compare(
        source.catalog, other.catalog, pairs(source, other), rows_at_a_time=rows_at_a_time
    )
    assert told.n_foreign == len(requests)  # the first position of each, rows 256 times as long
    error = told.error("acts")
    assert error is not None and error.code == "E418"
    assert error.got == f"{told.n_foreign} rows far from their replay"
    assert error.place == "acts/r-synthetic request 0 position 0 hook resid_post.0"


def test_what_a_replay_did_not_fill_is_counted_by_reason(tmp_path: Path) -> None:
    source = actds.open(make_dataset(tmp_path / "acts", schedule=simulate(12, 5, drops=True)))
    owed = missing(source)
    nothing = filled(owed, source.catalog)  # which replays nothing
    n = sum(one.n_keys for one in owed.values())
    assert (nothing.n_lacked, nothing.n_left, nothing.why) == (n, n, {"not served": n})
    assert nothing.line() == (
        f"0 of {n:,} positions that lacked a row have one now; {n:,} still lack one: "
        f"{n:,} not served"
    )


def test_requests_of_which_no_row_is_stored_have_nothing_to_compare(tmp_path: Path) -> None:
    schedule = simulate(12, 12, drops=True)
    source = actds.open(make_dataset(tmp_path / "acts", schedule=schedule))
    spans = schedule.spans.to_pylist()
    stored = {span["request"] for span in spans if span["disposition"] in ("captured", "cache_ref")}
    lost = {span["request"] for span in spans} - stored
    [run] = source.runs
    none = [Pair(run, number, run, number, np.array(schedule.token_ids[number])) for number in lost]
    found = compare(source.catalog, source.catalog, none)
    assert none and (found.n_rows, found.n_unreplayed, found.n_foreign) == (0, 0, 0)


@pytest.mark.parametrize(
    ("reason", "why"),
    [("skipped", "in requests that cannot be served again (E004)"), ("unbegun", "not served")],
)
def test_a_request_that_the_replay_did_not_serve_is_none_that_it_lost(
    tmp_path: Path, reason: str, why: str
) -> None:
    told = simulate(12)
    requests = told.requests.to_pylist()
    requests[7]["finish_reason"] = reason
    told = told.with_(requests=table_of("requests", requests))
    replay = actds.open(make_dataset(tmp_path / "out", schedule=told, origins=True))
    source = [replace(one, run="r-source", request=10 + one.request)
              for one in token_sequences(replay)]  # fmt: skip
    lines = replay.requests().to_pylist()[:-1]  # the last has no origin
    served = {line["request"] for line in lines} - {7}
    assert {pair.again for pair in pairs_of(replay.catalog, source)} == served
    owed = {("r-source", 17): Intervals(position_key([17], [0]), position_key([17], [5]))}
    assert filled(owed, replay.catalog).why == {why: 5}


@pytest.mark.parametrize(
    ("option", "fails"), [({"only": "missing"}, False), ({"compare": True}, True)]
)
def test_a_comparison_of_nothing_is_said_loudly(
    option: dict[str, Any], *, fails: bool, tmp_path: Path
) -> None:
    source = actds.open(make_dataset(tmp_path / "acts", schedule=simulate(12, 5, drops=True)))
    out = make_dataset(tmp_path / "out", run="r-other", origins=True)  # of another dataset's runs
    given = ReplaySettings.of(
        {"source": source.path, "out": str(out), "model": tmp_path, **option}
    )  # fmt: skip
    heard = Heard()
    replays = Replays(given, source, heard)
    if fails:
        with pytest.raises(ActdsError, match=r"E006 .*no position with a row in both"):
            replays.compare()
    else:
        replays.compare()
        assert "still lack one" in heard.summary["backfill"]
    assert heard.summary["compared"].startswith("NOTHING WAS COMPARED")


def prefixes(dataset: actds.Dataset) -> list[tuple[int, ...]]:
    """Return the tokens up to each stored row."""
    tokens = {(one.run, one.request): one.token_id for one in token_sequences(dataset)}
    return [
        tuple(tokens[row["run"], row["request"]][: row["position"] + 1].tolist())
        for row in dataset.tokens(columns=["request", "position"], run=True).to_pylist()
    ]


class Heard(Observer):
    """Keeps what the summary would say."""

    def __init__(self) -> None:
        self.summary: dict[str, str] = {}

    def compared(self, label: str, words: str) -> None:
        self.summary[label] = words


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
    lost = missing(source)
    # On a busy machine the end of the run cuts rows off, and their readouts with them.
    unknown = {(one.run, one.request) for one in token_sequences(source) if one.unknown}
    sequences = [one for one in token_sequences(source) if not one.unknown]
    n_lost = sum(span["stop"] - span["start"] for span in source.spans().to_pylist()
                 if span["disposition"] in ("dropped", "aborted"))  # fmt: skip
    n_unknown = sum(lost[name].n_keys for name in unknown)
    assert sum(one.n_keys for one in lost.values()) == n_lost
    assert len(unknown) < len(lost) < N_PROMPTS, "some requests lose rows, and some do not"

    heard, out = Heard(), tmp_path / "filled"
    result = actds.replay(
        source=source.path, out=out, model=model, only="missing", observer=heard, **ENGINE
    )
    assert result.reason == "finished"
    again = h.validated(out)
    assert {(line["source_run"], line["source_request"])
            for line in again.origins().to_pylist()} == set(lost)  # fmt: skip
    words = f"{n_lost - n_unknown:,} of {n_lost:,} positions that lacked a row have one now"
    if n_unknown:
        words += f"; {n_unknown:,} still lack one: {n_unknown:,} in requests that cannot be "
        words += "served again (E022)"
    assert heard.summary["backfill"] == words
    # Other requests have the tokens at which the prompts begin: nothing is missing there.
    before, after = set(prefixes(source)), set(prefixes(again))
    owed = {tuple(one.token_id[: n + 1].tolist())
            for one in sequences for n in range(len(one.token_id))}  # fmt: skip
    assert after <= owed <= before | after and not owed <= before
    n_both = again.n_rows - (n_lost - n_unknown)
    assert n_both > 0
    assert heard.summary["compared"].startswith(f"{n_both:,} positions have a row in both: ")
    assert heard.summary["compared"].endswith("foreign 0")

    # Together they are read once a position: what training on both needs.
    want = {(one.run, one.request, n) for one in sequences for n in range(len(one.token_id))}
    for weights in (None, "multiplicity"):
        read = read_once([source.path, out], weights)
        assert len(read) == len(set(read)) == source.n_rows + n_lost - n_unknown
        assert want <= set(read)
    with pytest.raises(ActdsError, match=r"E006 .*no request that lacks a row"):
        actds.replay(source=out, out=tmp_path / "more", model=model, only="missing", **ENGINE)
    assert not (tmp_path / "more").exists()

    # A canary of a sealed dataset: its first requests again, and compared.
    actds.replay(
        source=source.path, out=tmp_path / "canary", model=model, compare=True, alone=True,
        max_requests=3, observer=heard, **ENGINE,
    )  # fmt: skip
    assert "backfill" in heard.summary and heard.summary["compared"].endswith("foreign 0")
    with pytest.raises(ActdsError, match="E009 hooks: embed; expected some of resid"):
        actds.replay(
            source=source.path, out=tmp_path / "no", model=model, compare=True, hooks="embed",
            **ENGINE,
        )  # fmt: skip


@pytest.mark.standard
def test_rows_drawn_by_rules_and_a_replay_of_a_part_weigh_by_their_inclusion_in_both(
    tmp_path: Path,
) -> None:
    model = make_random_model(tmp_path / "tiny")
    records = [
        {"id": f"q{n}", "prompt": f"{n:02} is the number of this one", "topic": "abb"[n % 3]}
        for n in range(20)
    ]
    prompts = h.write_prompts(tmp_path / "prompts.jsonl", records)
    settings = {
        "out": tmp_path / "source",
        "model": model,
        "prompts": prompts,
        "max_tokens": 8,
        "hooks": "resid_post:0",
        "label_columns": ["topic"],
        "keep": "label topic=a: 0.125; entropy 0-5.7549: 1; decode: 0.5; position 0-8: 0.5; 0.25",
        "entropy": True,
        **ENGINE,
    }
    harvest(WriteSettings.of(settings))
    source = h.validated(tmp_path / "source")
    part = tmp_path / "part"
    actds.replay(source=source.path, out=part, model=model, fraction=0.5, seed=2, **ENGINE)
    [origins] = [actds.open(part).origins(run=True)]
    drawn = dict(zip(origins["request"].to_pylist(), origins["source_request"].to_pylist(),
                     strict=True))  # fmt: skip
    lengths = {line["request"]: (line["prompt_len"], line["prompt_len"] + line["generated_len"] - 1)
               for line in source.requests().to_pylist()}  # fmt: skip
    stored = {(row["request"], row["position"])
              for row in source.tokens(columns=["request", "position"]).to_pylist()}  # fmt: skip
    weights = {}
    with actds.Loader(
        [source.path, part], hooks=["resid_post.0"], once=True, weights="inclusion", batch=64,
        provenance=["run", "request", "position"], drop_last=False,
    ) as loader:  # fmt: skip
        for _, rows in loader:
            columns = (rows[name].tolist() for name in ("run", "request", "position", "weight"))
            for run, request, position, weight in zip(*columns, strict=True):
                request = request if run in source.runs else drawn[request]
                assert (request, position) not in weights
                weights[request, position] = weight
    assert 0 < len(drawn) < 20
    assert set(weights) == stored | {
        (request, position) for request in drawn.values() for position in range(lengths[request][1])
    }
    entropy = {(line["request"], line["position"]): line["entropy"]
               for line in source.sampled().to_pylist()}  # fmt: skip
    topic = {line["request"]: records[line["source_row"]]["topic"]
             for line in source.requests().to_pylist()}  # fmt: skip
    shares = set()
    for (request, position), weight in weights.items():
        is_half = position < 8 or position >= lengths[request][0]
        share = 1.0 if entropy.get((request, position), 9.0) < 5.7549 else 0.5 if is_half else 0.25
        share = 0.125 if topic[request] == "a" else share
        shares.add((share, position >= lengths[request][0]))
        assert weight == pytest.approx(1 / (1 - (1 - share) * 0.5))
    of_labels = {(0.125, True), (0.125, False)}
    assert shares == {(1.0, True), (0.5, True), (0.5, False), (0.25, False)} | of_labels


def read_once(paths: list[str | Path], weights: str | None = None) -> list[tuple[str, int, int]]:
    """Return the positions of the source for which the rows stand that a loader of both reads."""
    with actds.Loader(
        paths, hooks=["resid_post.0"], once=True, weights=weights, batch=64,
        provenance=["run", "request", "position"], drop_last=False,
    ) as loader:  # fmt: skip
        origins = {
            (line["run"], line["request"]): (line["source_run"], line["source_request"])
            for line in loader.datasets[1].origins(run=True).to_pylist()
        }
        found = []
        for _, rows in loader:
            names = zip(rows["run"].tolist(), rows["request"].tolist(), strict=True)
            found += [
                (*origins.get(name, name), position)
                for name, position in zip(names, rows["position"].tolist(), strict=True)
            ]
    return found
