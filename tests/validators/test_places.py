"""The seven places: how much went there, how far off a mean can be by it, and the answer."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pytest

import actds
from actds.errors import ActdsError
from actds.format.readouts import Readouts
from actds_testing.schedules import busy_shares, simulate
from actds_testing.synthetic import make_dataset, make_thinned
from actds_validators.audit.covariates import position_band
from actds_validators.audit.coverage import CoverageCounts, coverage
from actds_validators.audit.passes import ClassCounts
from actds_validators.audit.place import TITLES, Level, Place, PlaceName, Worst, places_of
from actds_validators.audit.places import conclude, worst_of
from actds_validators.audit.result import Audit, Queues, Stall, TracePoint
from actds_validators.audit.verdict import _stored
from actds_validators.cli.commands import audit as audit_command
from actds_validators.cli.commands import check as check_command


def audited(path: Path, **given: Any) -> Audit:
    return actds.audit(path, **given).result


def place_of(result: Audit, name: PlaceName) -> Place:
    return next(place for place in result.places if place.name == name)


def with_records(n_skipped: int, tokens: int, *, n_requests: int = 12) -> Any:
    """Return a schedule with further records that were skipped, each of so many tokens."""
    schedule = simulate(n_requests, 0, cache=False)
    lines = schedule.requests.to_pylist()
    blank = next(line for line in lines if line["finish_reason"] != "skipped")
    for k in range(n_skipped):
        number = n_requests + k
        lines.append(
            dict.fromkeys(blank)
            | {
                "request": number,
                "external_id": f"x{number}",
                "source": "long",
                "prompt_len": tokens,
            }
            | {"source_row": number, "finish_reason": "skipped", "generated_len": 0}
            | {
                "cached_tokens": 0,
                "n_preemptions": 0,
                "reason": f"E004 long row {number}: too long",
            }
        )
    return schedule.with_(requests=pa.Table.from_pylist(lines, schedule.requests.schema))


# source ----------------------------------------------------------------------------------------


def test_skipped_records_are_counted_in_records_and_in_tokens(tmp_path: Path) -> None:
    schedule = with_records(6, 500)
    path = make_dataset(tmp_path / "acts", schedule=schedule)
    result = audited(path)
    source, place = result.source, place_of(result, "source")
    assert source is not None
    lines = schedule.requests.to_pylist()
    served = [line for line in lines if line["finish_reason"] != "skipped"]
    assert (source.records, source.served) == (len(lines), len(served))
    assert source.tokens == sum(line["prompt_len"] for line in lines)
    assert source.served_tokens == sum(line["prompt_len"] for line in served)
    assert place.share == pytest.approx(1 - source.served_tokens / source.tokens)
    assert place.level == "FAIL" and result.answer.place == "source"
    assert result.answer.decision == "no" and "never served" in result.answer.words
    assert (place.worst and place.worst.label) in ("long", "255 to 510 tokens")
    assert {one.reason for one in source.left_out} >= {"prompt too long (E004)"}
    assert sum(band.records for band in source.lengths) + source.unmeasured == source.records
    assert audited(path, accept=["source"]).answer.decision != "no"


def test_a_record_that_a_later_run_served_counts_as_served(tmp_path: Path) -> None:
    first = with_records(3, 40)
    path = make_dataset(tmp_path / "acts", schedule=first, sealed=False)
    lines = first.requests.to_pylist()
    renamed = {
        line["request"]: (line["source"], line["source_row"])
        for line in lines
        if line["finish_reason"] == "skipped"
    }
    again = simulate(12, 5, cache=False)
    others = again.requests.to_pylist()
    live = [line for line in others if line["finish_reason"] != "skipped"]
    for line, (source, row) in zip(live, renamed.values(), strict=False):
        line["source"], line["source_row"] = source, row
    requests = pa.Table.from_pylist(others, again.requests.schema)
    make_dataset(path, run="r-later", seed=5, schedule=again.with_(requests=requests))
    source = audited(path).source
    assert source is not None and not [one for one in source.left_out if "E004" in one.reason]


def test_a_source_that_is_not_on_record_is_not_known(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", cache=False, facts={"prompts.n_records": None})
    result = audited(path, accept=["ends"])
    assert place_of(result, "source").level == "INCONCLUSIVE"
    assert result.answer.decision == "not known" and result.answer.place == "source"
    waived = audited(path, accept=["source", "ends"])
    assert waived.answer.decision == "yes" and waived.answer.accepted == ["source", "ends"]
    assert place_of(waived, "source").level == "INCONCLUSIVE"  # what is waived is not forgotten


def test_records_without_a_line_are_left_out(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", cache=False, facts={"prompts.n_records": 100})
    source = audited(path).source
    assert source is not None and source.records == 100
    silent = [one for one in source.left_out if one.what == "not on record"]
    assert silent[0].n == 100 - len(simulate(12, 0, cache=False).requests)
    assert silent[0].n_tokens is None


# prefix cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_bias_of_rows_that_count_once_is_the_largest_there_is(seed: int) -> None:
    """Brute force: of many functions of a row none is farther off, and the worst one just is."""
    random = np.random.default_rng(seed)
    times = random.geometric(0.4, 200) - 1
    counts = CoverageCounts()
    band = position_band(np.arange(200))
    counts.rows.count(
        special=np.zeros(200, bool), prefill=np.ones(200, bool), served=times, label=None,
        band=band, bits=np.zeros(200, np.int64),
    )  # fmt: skip
    counts.referenced += np.bincount(band, weights=times, minlength=len(counts.referenced)).astype(
        int
    )
    found = coverage(counts)
    assert found is not None
    p = (1 + times) / (1 + times).sum()

    def off(x: np.ndarray[Any, Any]) -> float:
        mean = p @ x
        return abs(x.mean() - mean) / float(np.sqrt(p @ (x - mean) ** 2))

    worst = off(1 / (200 * p))
    assert found.once_bias == pytest.approx(worst)
    assert max(off(random.normal(size=200)) for _ in range(300)) < worst
    weights = 1.0 + times
    assert found.effective_rows == pytest.approx(weights.sum() ** 2 / (weights**2).sum())


def test_sums_of_multiplicities_add_over_parts() -> None:
    random = np.random.default_rng(0)
    served = random.integers(0, 5, 90)
    whole, parts = ClassCounts(), ClassCounts()

    def add(to: ClassCounts, some: slice) -> None:
        n = len(served[some])
        to.count(special=np.zeros(n, bool), prefill=np.ones(n, bool), served=served[some],
                 label=None, band=np.zeros(n, np.int64), bits=np.zeros(n, np.int64))  # fmt: skip

    add(whole, slice(None))
    for k in range(3):
        part = ClassCounts()
        add(part, slice(30 * k, 30 * k + 30))
        parts.add(part)
    m = 1.0 + served
    assert whole.inverses == pytest.approx((1 / m - 1).sum())
    assert whole.squares == pytest.approx((m**2 - 1).sum())
    assert (parts.inverses, parts.squares) == pytest.approx((whole.inverses, whole.squares))


def test_hits_are_repaired_by_multiplicity_and_the_loader_takes_the_line(tmp_path: Path) -> None:
    # Simulated hits of the synthetic schedule leave none without a row.
    path = make_dataset(tmp_path / "acts", n_requests=40, seed=2)
    result = audited(path, accept=["source", "ends"])
    cache = place_of(result, "cache")
    assert cache.n == result.accounting.cache_ref > 0
    if result.accounting.unresolved:
        pytest.fail("the schedule was to have every row")
    assert cache.level == "WARN" and cache.loaded == {"weights": ["multiplicity"]}
    assert result.answer.decision == "yes, loaded like this"
    assert result.answer.load == f'actds.Loader({str(path)!r}, weights="multiplicity")'
    with eval(
        result.answer.load.replace(")", ", hooks='resid_post.0', batch=8)"), {"actds": actds}
    ) as loader:
        n = sum(len(batch) for batch in loader)
    served = result.accounting.captured + result.accounting.cache_ref
    assert served - 8 < n <= served
    assert any("effective" in step for step in result.answer.next_steps)


def test_hits_of_rows_that_were_drawn_are_weighted_by_both(tmp_path: Path) -> None:
    schedule = simulate(40, 2)
    path = make_thinned(tmp_path / "acts", schedule, busy_shares(schedule))
    cache = place_of(audited(path), "cache")
    assert cache.level == "WARN" and cache.loaded == {"weights": ["multiplicity", "inclusion"]}
    assert any('weights=["multiplicity", "inclusion"]' in step for step in cache.to_do)


def test_a_token_that_would_dominate_is_left_out_by_the_same_line(tmp_path: Path) -> None:
    path = make_dataset(
        tmp_path / "acts", n_requests=40, seed=2, sinks=True, readouts=Readouts(1, seed=0)
    )
    cache = place_of(audited(path), "cache")
    assert (
        cache.loaded["weights"] == ["multiplicity"] and "first_position" in cache.loaded["exclude"]
    )
    assert any("squared deviation of the norm" in step for step in cache.to_do)


def test_references_without_a_row_cannot_be_weighted(tmp_path: Path) -> None:
    # Whole steps are lost, and with them rows that later requests were served again.
    path = make_dataset(tmp_path / "acts", n_requests=60, seed=3, drops=True)
    result = audited(path, limits={"max_loss": 1.0})
    cache, account = place_of(result, "cache"), result.accounting
    assert account.unresolved > result.limits.max_unresolved * account.cache_ref
    assert cache.level == "WARN" and not cache.loaded and result.answer.load is None
    assert any("--only missing" in step and "once=True" in step for step in cache.to_do)
    schedule = simulate(60, 3, drops=True)
    drawn = make_thinned(tmp_path / "drawn", schedule, busy_shares(schedule))
    cache = place_of(audited(drawn), "cache")
    assert any("actds replay" in step and "--only missing" not in step for step in cache.to_do)
    strict = place_of(audited(path, limits={"max_loss": 1e-6}), "cache")
    assert strict.level == "FAIL"


# ends ------------------------------------------------------------------------------------------


def test_requests_that_ended_early_did_not_run_to_their_end_though_no_row_is_missing(
    tmp_path: Path,
) -> None:
    schedules = (simulate(6, seed, cache=False) for seed in itertools.count())
    ends = {"stop", "length"}
    schedule = next(s for s in schedules if set(s.requests["finish_reason"].to_pylist()) <= ends)
    whole = place_of(audited(make_dataset(tmp_path / "whole", schedule=schedule)), "ends")
    assert (whole.n, whole.headline) == (0, "every request ran to its end")
    lines = schedule.requests.to_pylist()
    for line in lines[:3]:
        line["finish_reason"] = "abort"
    cut = schedule.with_(requests=pa.Table.from_pylist(lines, schedule.requests.schema))
    place = place_of(audited(make_dataset(tmp_path / "cut", schedule=cut)), "ends")
    assert place.n == 0 and place.level == "PASS"
    assert place.headline == "3 requests ended early, and no position was lost by it"
    assert "every request" not in place.sentence.lower()


def test_what_is_called_stored_is_what_was_computed_and_no_more() -> None:
    def account(**given: int) -> Any:
        return SimpleNamespace(
            **{"captured": 5, "thinned": 0, "filtered": 0, "undelivered": 0, **given}
        )

    assert _stored(account()) == "every computed token is stored"
    rest = "every computed token is stored, but for 2 that a rule left out"
    assert _stored(account(filtered=2)) == rest
    drawn = "every computed token is stored, but for 4 that were not drawn"
    assert _stored(account(thinned=4)) == drawn
    both = f"{rest} and 3 computed past the end of a request"
    assert _stored(account(filtered=2, undelivered=3)) == both
    assert _stored(account(captured=0, filtered=9)) == "no computed token was to be stored"


# rules, values, identity -----------------------------------------------------------------------


def test_filtered_positions_are_a_limit_until_they_are_accepted(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", cache=False, filtered=True)
    result = audited(path, accept=["source", "ends"])
    rules = place_of(result, "rules")
    assert rules.n == result.accounting.filtered > 0 and rules.level == "WARN"
    assert result.answer.place == "rules" and "left out by a rule" in result.answer.words
    waived = audited(path, accept=["rules", "source", "ends"])
    assert waived.answer.decision == "yes" and "rules" in waived.answer.words


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        ({"model.weights_sha256": "1" * 64}, "FAIL"),
        ({"model.weights_sha256": None}, "INCONCLUSIVE"),
        ({"capture.overflow_policy": "drop_newest"}, "WARN"),
        ({"numerics.dtype": "float16"}, "WARN"),
        ({}, "PASS"),
    ],
)
def test_runs_that_differ_are_named(tmp_path: Path, facts: dict[str, Any], level: Level) -> None:
    same = {"model.weights_sha256": "0" * 64}
    path = make_dataset(tmp_path / "acts", cache=False, sealed=False, facts=same)
    make_dataset(path, cache=False, run="r-second", seed=3, facts=same | facts)
    place = place_of(audited(path), "identity")
    assert place.level == level
    if level in ("FAIL", "WARN"):
        assert next(iter(facts)) in place.sentence
        assert any("r-second" in step for step in place.to_do)


@pytest.mark.parametrize(
    ("second", "level"),
    [
        ({"model.parameters_sha256": "1" * 64}, "FAIL"),
        # Other weights, or the same ones in the form of another engine: nobody can say.
        ({"model.parameters_sha256": "1" * 64, "serving.tensor_parallel": 2}, "INCONCLUSIVE"),
        ({"model.parameters_sha256": "1" * 64, "model.weights_sha256": "0" * 64}, "FAIL"),
        ({}, "INCONCLUSIVE"),
    ],
)
def test_weights_that_no_file_has_are_told_apart_in_the_memory_of_one_engine(
    tmp_path: Path, second: dict[str, Any], level: Level
) -> None:
    same = {"model.weights_sha256": "0" * 64, "model.parameters_sha256": "0" * 64}
    path = make_dataset(tmp_path / "acts", cache=False, sealed=False, facts=same)
    loaded = same | {"model.weights_sha256": None} | second
    make_dataset(path, cache=False, run="r-second", seed=3, facts=loaded)
    place = place_of(audited(path), "identity")
    assert place.level == level
    if level == "FAIL":
        assert "different models" in place.sentence and len(place.to_do) == 2


def test_rows_of_an_adapter_beside_those_of_the_model_are_two_models(tmp_path: Path) -> None:
    schedule = simulate(12, 0, cache=False)
    lines = schedule.requests.to_pylist()
    for line in lines[::2]:
        line["adapter"], line["adapter_sha256"] = "tuned", "a" * 64
    requests = pa.Table.from_pylist(lines, schedule.requests.schema)
    path = make_dataset(tmp_path / "acts", schedule=schedule.with_(requests=requests))
    rows = actds.open(path).tokens().to_pandas()["request"]
    tuned = int(rows.isin([line["request"] for line in lines[::2]]).sum())
    place = place_of(audited(path), "identity")
    assert place.level == "FAIL" and place.n == min(tuned, len(rows) - tuned) > 0
    assert place.loaded == {"where": ["request.adapter is None"]}
    loader = actds.Loader(path, "resid_post.0", where=place.loaded["where"][0], batch=8)
    assert loader.n_rows == len(rows) - tuned


# the answer ------------------------------------------------------------------------------------


def made(name: PlaceName, level: Level, *, loaded: bool = False, bias: float = 0.1) -> Place:
    return Place(
        name=name, level=level, n=1, of=2, unit="rows", share=0.5, bias=bias, limit="none",
        headline=f"head {name}", sentence=f"sentence {name}.", to_do=[f"do {name}"],
        loaded={"weights": ["multiplicity"]} if loaded else {},
    )  # fmt: skip


LEVELS: tuple[Level, ...] = ("PASS", "WARN", "INCONCLUSIVE", "FAIL")


@pytest.mark.parametrize(("first", "second"), list(itertools.product(LEVELS, LEVELS)))
def test_the_worst_place_decides(first: Level, second: Level) -> None:
    wanted = max(first, second, key=LEVELS.index)
    places, answer = conclude([made("rules", first), made("ends", second)], (), "acts", None)
    assert answer.level == wanted and [p.name for p in places] == ["rules", "ends"]
    decided = {"rules": first, "ends": second}
    assert answer.place is None if wanted == "PASS" else decided[answer.place] == wanted  # type: ignore[index]


def test_of_equal_places_the_larger_bias_decides_and_all_say_what_to_do() -> None:
    some = [made("rules", "WARN", bias=0.1), made("ends", "WARN", bias=0.7)]
    _, answer = conclude(some, (), "acts", None)
    assert answer.place == "ends" and answer.next_steps == ["do ends", "do rules"]


def test_arguments_repair_only_where_every_place_has_some() -> None:
    loaded, failing = made("cache", "WARN", loaded=True), made("source", "FAIL")
    _, answer = conclude([loaded], (), "a b", None)
    assert answer.load == "actds.Loader('a b', weights=\"multiplicity\")"
    _, answer = conclude([loaded, failing], (), "acts", None)
    assert answer.load is None and answer.decision == "no"
    _, answer = conclude([loaded, failing], ("source",), "acts", None)
    assert answer.decision == "yes, loaded like this" and answer.accepted == ["source"]


def test_only_places_can_be_accepted() -> None:
    assert places_of(["values", "source"]) == ["source", "values"]
    with pytest.raises(
        ActdsError, match=r"E009 accept: rule; expected some of source, cache, rules"
    ):
        places_of(["rule"])
    assert json.loads(json.dumps(list(TITLES))) == [
        "source", "cache", "rules", "ends", "queues", "values", "identity",
    ]  # fmt: skip


def test_the_commands_offer_every_place() -> None:
    for command in (audit_command, check_command):
        [option] = [one for one in command.params if one.name == "accept"]
        assert isinstance(option.type, click.Choice) and [*option.type.choices] == [*TITLES]


def test_the_worst_group_is_large_enough_and_worse_than_its_kind() -> None:
    def group(label: str, n: int, of: int, kind: str = "role") -> Worst:
        return Worst(kind=kind, label=label, n=n, of=of, unit="positions")

    few = [group("a", 1, 1), group("b", 90, 100), group("c", 60, 1000)]
    assert worst_of(few) == few[1]  # one position is no tenth of what was left out
    assert worst_of([group("a", 5, 10), group("b", 50, 100)]) is None  # all alike
    assert worst_of([]) is None


@pytest.mark.parametrize("stage", ["pool", "ring"])
@pytest.mark.parametrize(
    ("seconds", "dropped", "told"),
    [(0.9, 0, False), (4.0, 0, False), (6.0, 0, True), (6.0, 3, False), (90.0, 0, True)],
)
def test_a_stall_without_a_loss_is_a_near_miss(
    seconds: float, dropped: int, told: bool, stage: str
) -> None:
    trace = [TracePoint(t_s=t, seconds=50.0, computed=10, lost=0, load=1.0) for t in (0.0, 50.0)]
    stall = Stall(stage=stage, n=7, seconds=seconds, marks_s=[])
    queues = Queues(trace=trace, stalls=[stall], occupancy=[], lags=[], loss_by_load=[])
    place = made("queues", "PASS").model_copy(update={"n": dropped})
    _, answer = conclude([place], (), "acts", queues)
    assert bool(answer.near_misses) == told
    if told:
        [words] = answer.near_misses
        assert ("held up the engine" in words) == (stage == "ring")  # the pool holds up the writer
        assert f"7 waits at the {stage}" in words and f"{seconds:.0f}" in words.replace(
            "1:30", "90"
        )
    assert answer.decision == "yes"  # nothing was lost
