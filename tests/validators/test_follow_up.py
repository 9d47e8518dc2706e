"""Follow-ups: a replay of a random part of the losses says how far means are off, by design."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

import actds
from actds.cli import cli
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.explore.requests import lacking, token_sequences
from actds.format import tables
from actds.format.inclusion import is_drawn, salt_of, uniform
from actds.store.local import LocalStore
from actds_testing import harvest as h
from actds_testing import schedules, synthetic
from actds_testing.simulate import SCENARIOS, simulate, write_dataset
from actds_testing.synthetic import make_thinned
from actds_testing.synthetic_engine import Stalled
from actds_testing.tiny import make_random_model
from actds_validators.audit.follow_up import ClusterSums, Compared, StoredSums
from actds_validators.audit.missingness import bound
from actds_validators.audit.result import (
    Accounting,
    Estimate,
    FollowUp,
    FollowUpHook,
    Limits,
)
from actds_validators.audit.verdict import Evidence, judge
from actds_validators.statistics.design import mean_of_clusters
from actds_writers.config import WriteSettings
from actds_writers.harvest.replay import missing
from actds_writers.harvest.run import harvest

# drawn by hash -------------------------------------------------------------------------------


def split_mix(x: int) -> int:
    """Return the finalizer of SplitMix64, in Python's whole numbers, from the spec's text."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_the_number_of_a_position_is_that_of_the_spec() -> None:
    salt = int(salt_of("actds replay", 7, "d", "r-1"))
    assert salt == int(sha256(b"actds replay\n7\nd\nr-1").hexdigest()[:16], 16)
    for request, position in [(0, 0), (1, 0), (0, 1), (2**32 - 1, 2**31), (12345, 67)]:
        want = (split_mix(split_mix(request << 32 | position) ^ salt) >> 11) * 2.0**-53
        assert uniform(np.uint64(salt), [request], [position]).tolist() == [want]
        assert float(uniform(np.uint64(salt), request, position)) == want


def test_a_part_lies_in_a_larger_part_of_the_same_seed_and_has_its_size() -> None:
    numbers = np.arange(200_000)
    small, large, other = (
        is_drawn(seed, "d", "r", numbers, share) for seed, share in [(1, 0.02), (1, 0.3), (2, 0.3)]
    )
    assert not (small & ~large).any()
    for drawn, share in [(small, 0.02), (large, 0.3), (other, 0.3)]:
        assert abs(drawn.mean() - share) < 5 * np.sqrt(share * (1 - share) / len(numbers))
    both = (large & other).mean()  # independent of another seed
    assert abs(both - 0.09) < 5 * np.sqrt(0.09 * 0.91 / len(numbers))
    assert is_drawn(1, "d", "r", numbers, 1.0).all()


# the estimate --------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_intervals_hold_the_mean_of_all_rows_whatever_the_requests_are_like(
    fraction: float,
) -> None:
    rng = np.random.default_rng(int(100 * fraction))
    n_requests, n_trials = 800, 1000
    n = rng.geometric(1 / 30, n_requests).astype(float)
    level = np.log(n) + rng.gamma(1.0, size=n_requests)  # skewed, and goes with the length
    total = np.stack([n * level, n * (rng.random(n_requests) < 0.1)], axis=1)
    truth = total.sum(axis=0) / n.sum()
    hit = np.zeros(2)
    for _ in range(n_trials):
        drawn = rng.random(n_requests) < fraction
        mean = mean_of_clusters(n[drawn], total[drawn], fraction)
        low, high = mean.interval(0.95, 1)
        hit += (low <= truth) & (truth <= high)
    assert ((hit / n_trials > 0.93) & (hit / n_trials < 0.985)).all(), hit / n_trials


def test_a_census_has_no_error_and_one_request_has_every() -> None:
    n, total = np.array([3.0, 5.0]), np.array([[3.0], [10.0]])
    whole = mean_of_clusters(n, total, 1.0)
    assert whole.mean.tolist() == [13 / 8] and whole.error.tolist() == [0]
    one = mean_of_clusters(n[:1], total[:1], 0.5)
    assert np.isinf(one.interval(0.95, 10)).all()


# the verdict ---------------------------------------------------------------------------------


def lost(n: int) -> Evidence:
    computed = 10_000
    share = n / computed
    account = Accounting(
        positions=computed, computed=computed, captured=computed - n, cache_ref=0, dropped=n,
        aborted=0, filtered=0, recomputed=0, unresolved=0, requests=100, steps=100,
        loss_share=share, waterfall=[], findings=[],
    )  # fmt: skip
    assert bound(share).bias > Limits().negligible_bias
    return Evidence(account)


def follow_up(low: float, high: float, numerics: float = 0.0, answered: int = 200) -> FollowUp:
    bias = Estimate(value=(low + high) / 2, low=low, high=high)
    hook = FollowUpHook(
        hook="resid_post.1", n_channels=64, n_rows=answered, n_clusters=40, variable="channel 3",
        bias=bias, numerics=numerics, proven=max(0.0, low - numerics, -high - numerics),
    )  # fmt: skip
    return FollowUp(
        path="part", digest="0" * 64, fraction=0.1, seed=1, n_missing=2000, share=0.2,
        n_requests=40, n_drawn=200, n_answered=answered, n_shared=10, hooks=[hook],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "level", "kind"),
    [
        (follow_up(-0.01, 0.015), "PASS", "by-design"),
        (follow_up(-0.01, 0.015, numerics=0.01), "FAIL", "heavy"),  # undecided: as without it
        (follow_up(-0.01, 0.015, answered=150), "FAIL", "heavy"),
        (follow_up(0.03, 0.06), "WARN", "biased"),
        (follow_up(-0.2, -0.12), "FAIL", "biased"),
        (follow_up(0.03, 0.06, numerics=0.02), "FAIL", "heavy"),
    ],
)
def test_the_follow_up_decides_where_it_can(found: FollowUp, level: str, kind: str) -> None:
    verdict = judge(replace(lost(2000), follow_up=found), Limits())
    assert (verdict.level, verdict.kind) == (level, kind)
    assert "drawn with probability 0.1 computed" in verdict.sentence
    decided = kind in ("by-design", "biased")
    assert bool(verdict.lacks) != decided
    assert verdict.deciding.ok == (level == "PASS")
    assert any("by the follow-up" in number.name for number in verdict.numbers)


def test_a_whole_follow_up_that_lacks_rows_asks_for_no_larger_one() -> None:
    found = follow_up(0.01, 0.01, answered=100).model_copy(
        update={"fraction": 1.0, "n_requests": 5}
    )
    verdict = judge(replace(lost(2000), follow_up=found), Limits())
    assert verdict.kind == "heavy" and not any("--fraction" in words for words in verdict.lacks)
    assert any("has no row of 100 of the 200" in words for words in verdict.lacks)


def test_one_request_says_nothing_of_others() -> None:
    hooks, one = {"resid_post.1": 2}, np.zeros(3, np.int64)
    rows = np.arange(9.0).reshape(3, 3)
    sums = ClusterSums.of_each(hooks)["resid_post.1"]
    sums.add(one, np.arange(3), rows)
    stored = StoredSums(3, rows.sum(axis=0), (rows**2).sum(axis=0))
    with pytest.raises(ActdsError, match=r"E009 follow_up: .*lost rows of one request"):
        Compared(3, 0.5, 3).hook("resid_post.1", stored, sums, sums)


# real rows -----------------------------------------------------------------------------------

N_PROMPTS, LENGTH = 60, 60
ENGINE: dict[str, Any] = {"engine": "transformers", "check": False}


@pytest.fixture(scope="module")
def harvests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same prompts harvested with losses and whole.

    The writer stands still while they are served, so the last requests are lost; they are of
    other letters than the first.
    """
    root = tmp_path_factory.mktemp("follow")
    model = make_random_model(root / "model")
    rng = np.random.default_rng(0)
    letters = ["abcdefgh", "stuvwxyz"]
    records = [
        {"id": f"q{n}", "prompt": f"no {n:02} " + "".join(rng.choice(list(some), LENGTH))}
        for n, some in enumerate(letters[2 * n // N_PROMPTS] for n in range(N_PROMPTS))
    ]
    prompts = h.write_prompts(root / "prompts.jsonl", records)
    common = {
        "model": model, "prompts": prompts, "hooks": "resid_post:all", "max_tokens": 8,
        "engine_args": {"max_num_batched_tokens": 256}, **ENGINE,
    }  # fmt: skip
    tight = {"overflow": "drop_newest", "ring_mib": 1, "staging_mib": 1}
    harvest(WriteSettings.of({"out": root / "lossy", **common, **tight}), feed=Stalled)
    harvest(WriteSettings.of({"out": root / "whole", **common}))
    return root


def values(dataset: actds.Dataset, hook: str) -> np.ndarray:
    rows = np.stack(list(h.rows_of(dataset, hook).values())).astype(np.float64)
    return np.concatenate([rows, np.linalg.norm(rows, axis=1, keepdims=True)], axis=1)


@pytest.mark.standard
def test_a_replay_of_a_part_of_the_losses_holds_the_bias_of_every_mean(
    harvests: Path, tmp_path: Path
) -> None:
    lossy, whole = (h.validated(harvests / name) for name in ("lossy", "whole"))
    part = tmp_path / "part"
    given = {"source": lossy.path, "model": harvests / "model", "only": "missing", **ENGINE}
    actds.replay(out=part, fraction=0.7, seed=3, **given)
    owed = missing(lossy)
    drawn = {name for name in owed if is_drawn(3, lossy.catalog.genesis.dataset, *name, 0.7)}
    served = {
        (line["source_run"], line["source_request"])
        for line in actds.open(part).origins().to_pylist()
    }
    unknown = {(s.run, s.request) for s in token_sequences(lossy) if s.unknown}
    assert served | unknown >= drawn >= served and drawn < set(owed)

    result = actds.audit(lossy.path, follow_up=part).result
    section = result.follow_up
    assert section is not None and (section.fraction, section.seed) == (0.7, 3)
    assert section.n_missing == sum(positions.n_keys for positions in owed.values())
    assert section.n_drawn == sum(owed[name].n_keys for name in drawn)
    assert (result.verdict.level, result.verdict.kind) == ("FAIL", "biased")
    assert "means of the stored rows are off" in result.verdict.sentence
    [queues] = [place for place in result.places if place.name == "queues"]
    assert queues.bias == abs(section.farthest.bias.value) and queues.bias_is == "estimated"
    shown = CliRunner().invoke(cli, ["audit", lossy.path, "--follow-up", str(part)])
    assert shown.exit_code == 1 and "Follow-up of the losses" in shown.output
    for hook in section.hooks:
        every, stored = values(whole, hook.hook), values(lossy, hook.hook)
        bias = (stored.mean(axis=0) - every.mean(axis=0)) / every.std(axis=0)
        at = -1 if hook.variable == "norm" else int(hook.variable.removeprefix("channel "))
        width = hook.numerics or 0.0
        assert hook.bias.low - width <= bias[at] <= hook.bias.high + width
        assert np.abs(bias).max() <= hook.reach + 0.05
        assert hook.numerics is not None and hook.numerics < 1e-4

    # Together they are read once a position, and each drawn row counts for those it represents.
    counted = dict.fromkeys([*lossy.runs, *actds.open(part).runs], 0.0)
    with actds.Loader(
        [lossy.path, part], hooks="resid_post.1", once=True, weights="inclusion", batch=64,
        drop_last=False, provenance=["run"],
    ) as loader:  # fmt: skip
        for _, rows in loader:
            for run, weight in zip(rows["run"].tolist(), rows["weight"].tolist(), strict=True):
                assert weight == (1 if run in lossy.runs else np.float32(1 / 0.7))
                counted[run] += weight
    assert [counted[run] for run in lossy.runs] == [lossy.n_rows]
    represented = sum(counted.values()) - lossy.n_rows
    assert represented == pytest.approx(section.n_answered / 0.7, rel=1e-6)

    # The whole of the losses again: no error is left but the numerics.
    actds.replay(out=tmp_path / "all", **given)
    again = actds.audit(lossy.path, follow_up=tmp_path / "all").result.follow_up
    assert again is not None
    for hook in again.hooks:
        every, stored = values(whole, hook.hook), values(lossy, hook.hook)
        bias = (stored.mean(axis=0) - every.mean(axis=0)) / every.std(axis=0)
        if again.n_answered == again.n_missing:
            assert np.abs(np.abs(bias).max() - abs(hook.bias.value)) < 1e-3
            assert hook.bias.low == hook.bias.high

    with pytest.raises(ActdsError, match=r"E010 (replay.seed|prompts.n_records)"):
        actds.replay(out=part, fraction=0.7, seed=4, resume=True, **given)


@pytest.mark.standard
def test_what_is_no_sample_of_the_dataset_is_refused(harvests: Path, tmp_path: Path) -> None:
    lossy, whole = str(harvests / "lossy"), str(harvests / "whole")
    with pytest.raises(ActdsError, match=r"E009 follow_up: .*no run record that says how"):
        actds.audit(lossy, follow_up=whole)
    part = tmp_path / "part"
    actds.replay(source=whole, out=part, model=harvests / "model", fraction=0.2, seed=1, **ENGINE)
    with pytest.raises(ActdsError, match=r"E009 follow_up: .*no row of a position that lacks one"):
        actds.audit(lossy, follow_up=part)


def test_a_row_that_was_not_drawn_counts_once(tmp_path: Path) -> None:
    path = write_dataset(simulate(replace(SCENARIOS["none"], n_steps=60), 1), tmp_path / "acts")
    with actds.Loader(path, weights="inclusion", where="inclusion == 1", batch=64) as loader:
        for _, rows in loader:
            assert (rows["weight"] == 1).all()
        assert loader.config["weights"] == "1 / inclusion"


def test_what_was_not_drawn_is_no_loss_that_a_replay_makes_up_for(tmp_path: Path) -> None:
    schedule = schedules.simulate(4, seed=166, drops=True, budget=16)
    shares = dict.fromkeys(schedule.steps["step"].to_pylist(), 0.5)
    path = make_thinned(tmp_path / "acts", schedule, shares)
    catalog = read_catalog(LocalStore(path))
    (run,) = catalog.runs
    lost = sum(d["stop"] - d["start"] for d in schedule.drops.to_pylist())
    hits = [s for s in schedule.spans.to_pylist() if s["disposition"] == "cache_ref"]
    assert hits and lost
    dropped = {(d["request"], p) for d in schedule.drops.to_pylist()
               for p in range(d["start"], d["stop"])}  # fmt: skip
    owed = lost + sum(
        (s["ref_request"], p) in dropped for s in hits for p in range(s["start"], s["stop"])
    )
    assert lacking(catalog, run).n_keys == owed


def test_a_follow_up_of_drawn_rows_says_what_was_lost_beside_the_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lossy = schedules.simulate(300, seed=166, drops=True, cache=False)
    steps = lossy.steps["step"].to_pylist()
    shares = {step: (1.0, 0.5)[k % 2] for k, step in enumerate(steps)}
    path = make_thinned(tmp_path / "acts", lossy, shares)
    catalog = read_catalog(LocalStore(path))
    (run,), dataset = catalog.runs, catalog.genesis.dataset
    owed = lacking(catalog, run)
    whole = schedules.simulate(300, seed=166, cache=False)  # the same requests, nothing lost
    assert whole.requests["token_digest"] == lossy.requests["token_digest"]

    def origins(told: schedules.Schedule) -> pa.Table:
        number = np.array(told.requests["request"])
        number = number[is_drawn(3, dataset, run, number, 0.5)]
        return tables.build("origins", {
            "request": number, "source_dataset": [dataset] * len(number),
            "source_seal": ["cd" * 32] * len(number), "source_run": [run] * len(number),
            "source_request": number, "n_given": [0] * len(number),
        })  # fmt: skip

    monkeypatch.setattr(synthetic, "_origin_table", origins)
    facts: dict[str, Any] = {"replay.fraction": "0.5", "replay.seed": 3}
    part = synthetic.make_dataset(
        tmp_path / "part", schedule=whole, facts=facts, origins=True, run="r-again"
    )
    result = actds.audit(path, follow_up=part).result
    section, sample = result.follow_up, result.sample
    assert section is not None and sample is not None
    assert section.n_missing == owed.n_keys and section.n_drawn > section.n_answered > 100

    stored, all_rows = (actds.open(of) for of in (path, part))
    lost = {
        (d["request"], p) for d in lossy.drops.to_pylist() for p in range(d["start"], d["stop"])
    }
    for hook in section.hooks:
        w: list[float] = []
        for shard in stored.shards:
            w += (1 / shard.tokens(["inclusion"])["inclusion"].to_numpy()).tolist()
        rows = values(stored, hook.hook)
        every = h.rows_of(all_rows, hook.hook)
        names = {n: name for (_, n), name in h.external_ids(all_rows).items()}
        again = np.stack([
            every[names[request], position] for request, position in sorted(lost)
            if is_drawn(3, dataset, run, request, 0.5) and (names[request], position) in every
        ]).astype(float)  # fmt: skip
        again = np.concatenate([again, np.linalg.norm(again, axis=1, keepdims=True)], axis=1)
        mean, share = np.array(w) @ rows / sum(w), owed.n_keys / (owed.n_keys + sum(w))
        square = (1 - share) * (np.array(w) @ rows**2) / sum(w) + share * (again**2).mean(axis=0)
        sd = np.sqrt(square - ((1 - share) * mean + share * again.mean(axis=0)) ** 2)
        bias = share * (mean - again.mean(axis=0)) / sd
        at = -1 if hook.variable == "norm" else int(hook.variable.removeprefix("channel "))
        assert hook.n_rows == len(again) and hook.numerics == 0
        assert hook.bias.value == pytest.approx(bias[at], abs=1e-9)
        assert section.share == pytest.approx(share, rel=0.01)
        truth = values(all_rows, hook.hook).mean(axis=0)
        assert (np.abs((mean - truth) / sd) <= hook.reach + 1.1 * sample.farthest.reach).all()
    assert "A replay of requests drawn with probability 0.5" in result.verdict.sentence
    assert not any("direction" in words for words in result.would_not_notice)


def test_a_follow_up_of_a_dataset_without_losses_is_not_read(tmp_path: Path) -> None:
    path = write_dataset(simulate(replace(SCENARIOS["none"], n_steps=300), 1), tmp_path / "acts")
    result = actds.audit(path, follow_up=tmp_path / "nothing").result
    assert result.accounting.loss_share == 0 and result.follow_up is None
