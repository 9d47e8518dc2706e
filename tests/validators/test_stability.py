"""Stability: matching, partners, order and arms against what others compute, and planted arms."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from itertools import combinations, permutations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner, Result
from scipy.sparse import csr_array
from scipy.sparse.csgraph import min_weight_full_bipartite_matching

import actds
from actds.errors import ActdsError
from actds.loader.selection import held_out_requests
from actds_studies.cli.commands import stability as command
from actds_studies.pages.stability import facts, page, words_of_art
from actds_studies.regimes.api import MIXTURE_KEYS, ArmWords, parse_arms, parse_named
from actds_studies.stability import rows as order
from actds_studies.stability.api import Trainer, stability
from actds_studies.stability.matching import (
    EXPLAINED,
    MOST,
    PART,
    chance,
    correlations,
    features_of,
    match,
    match_directions,
    parts_of,
)
from actds_studies.stability.result import (
    MIN_SEEDS,
    CrossValue,
    Features,
    Gap,
    Likeness,
    Limits,
    PairResult,
    Stability,
    answer,
    compare,
    judged_gaps,
    sign_test,
    uses,
    verdicts,
)
from actds_studies.stability.rows import (
    ENTRY,
    Arm,
    chosen,
    most,
    name_hash,
    open_arm,
    rare_tokens,
    scored_apart,
)
from actds_studies.stability.scores import (
    Entries,
    Scored,
    Scores,
    areas,
    cross_values,
    ridge,
)
from actds_testing.cli_tree import printed
from actds_testing.places import SCHEMAS
from actds_testing.planted import directions, planted_dataset, rotated
from actds_testing.regime_datasets import other_continuations
from actds_testing.schedules import busy_shares, simulate
from actds_testing.stability_results import hostile, made, many
from actds_testing.synthetic import make_dataset, make_thinned
from actds_validators.dictionaries import Dictionary, Source
from actds_validators.dictionaries.formats import load_dictionary

HOOK = "resid_post.0"
PLANTED = directions(12, 8)
SMALL = {"features": 12, "k": 2, "batch": 64, "epochs": 20, "learning_rate": 5e-3, "margin": 0.1}
QUICK = SMALL | {"seeds": 2, "epochs": 1}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A; B of the same directions, other rows; C with half of the directions turned."""
    folder = tmp_path_factory.mktemp("sets")
    common = {"n_requests": 120, "hooks": (HOOK,)}
    return {
        "A": planted_dataset(folder / "a", PLANTED, **common),
        "B": planted_dataset(folder / "b", PLANTED, seed=1, run="r-b", **common),
        "C": planted_dataset(folder / "c", rotated(PLANTED, 0.5), run="r-c", **common),
    }


@pytest.fixture(scope="module")
def result(sets: dict[str, Path]) -> Stability:
    arms = [f"{name}={path}" for name, path in sets.items()]
    return stability(*arms, limits=SMALL | {"seeds": 7})


def run(*args: object) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args], prog_name="actds stability")


# Matching


def test_the_matching_is_the_best_of_all_permutations() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        similarity = rng.normal(size=(5, 5))
        best = max(sum(similarity[i, p[i]] for i in range(5)) for p in permutations(range(5)))
        assert match(similarity).cosine.sum() == pytest.approx(best)


def test_the_matching_is_that_of_another_algorithm_of_scipy() -> None:
    similarity = np.random.default_rng(1).uniform(0.1, 1, size=(60, 40))
    found = match(similarity)
    rows, columns = min_weight_full_bipartite_matching(csr_array(similarity), maximize=True)
    assert found.cosine.sum() == pytest.approx(similarity[rows, columns].sum())
    assert len(found.cosine) == 40 and found.n == 60


def test_a_direction_without_a_match_counts_nothing() -> None:
    one, other = np.eye(4), np.eye(4)[:3]
    found = match_directions(one, other, (np.ones(4, bool), np.ones(3, bool)))
    assert (found.mean, found.share(0.9)) == (0.75, 0.75)
    assert found.cosine.tolist() == [1, 1, 1]
    assert match(np.empty((0, 3))).mean == 0.0


def test_features_that_never_were_active_are_not_alike_for_that_alone() -> None:
    one = np.array([[1.0, 0], [0, 1]])
    other = np.array([[0.6, 0.8], [0, 1]])
    dead = np.array([True, False])
    assert match_directions(one, other, (dead, dead)).mean == pytest.approx(0.6)


# Features kept, split, merged and gone


def sparse(*columns: np.ndarray) -> csr_array:
    return csr_array(np.column_stack(columns).astype(np.float32))


def activations(n_rows: int, n: int, seed: int, share: float = 0.1) -> np.ndarray:
    """Activations of features that are active apart from one another, by chance."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random((n_rows, n)) < share, rng.gamma(2.0, size=(n_rows, n)), 0.0)


def halved(values: np.ndarray, parts: int, seed: int) -> np.ndarray:
    """Each feature in parts, of which each row has one."""
    part = np.random.default_rng(seed).integers(0, parts, values.shape)
    return np.concatenate([np.where(part == k, values, 0.0) for k in range(parts)], axis=1)


def test_equal_dictionaries_keep_every_feature_and_split_and_merge_none() -> None:
    rng = np.random.default_rng(2)
    values = activations(2_000, 60, 1)
    # Features that are often active together, in the same amount, are no split of one another.
    values[:, 30:45] = np.where(rng.random((2_000, 15)) < 0.7, values[:, :15], values[:, 30:45])
    correlated = np.corrcoef(values.T)[:15, 30:45].diagonal()
    assert (correlated > 0.5).all()
    order = rng.permutation(60)
    for other in (values, (values * rng.uniform(0.1, 9, 60))[:, order]):
        found = features_of(sparse(values), sparse(other))
        assert found is not None
        assert (found.kept, found.split, found.merged, found.gone) == (1.0, 0.0, 0.0, 0.0)
        assert found.split_into == found.merged_from == [0.0, 0.0, 0.0] and found.n == 60


@pytest.mark.parametrize("parts", [2, 3, 4, 5])
def test_a_dictionary_in_parts_splits_every_feature_and_the_other_way_merges_them(
    parts: int,
) -> None:
    whole = activations(4_000, 40, 3)
    other = halved(whole, parts, 4)
    split, merged = (features_of(*map(sparse, pair)) for pair in ((whole, other), (other, whole)))
    assert split is not None and merged is not None
    each = [float(parts == 2), float(parts == 3), float(parts > 3)]
    assert (split.kept, split.split, split.merged, split.gone) == (0.0, 1.0, 0.0, 0.0)
    assert split.split_into == each and merged.merged_from == each
    assert (merged.kept, merged.split, merged.merged, merged.gone) == (0.0, 0.0, 1.0, 0.0)


def test_the_halves_of_a_dictionary_on_rows_are_a_split_in_two() -> None:
    """A dictionary and its refinement by the sign of a further channel, both encoding rows."""
    rng = np.random.default_rng(5)
    n, d = 12, 13
    values = activations(3_000, n, 6)
    sign = rng.choice([-1.0, 1.0], 3_000)
    rows = np.column_stack([values, 50 * sign]).astype(np.float32)
    one = np.eye(n, d, dtype=np.float32)

    def dictionary(w_dec: np.ndarray, w_enc: np.ndarray, b_enc: np.ndarray) -> Dictionary:
        arrays = (w_enc.astype(np.float32), b_enc.astype(np.float32), w_dec, np.zeros(d, "f4"))
        return Dictionary("standard", *arrays, Source("saelens", "made", "0" * 64))

    whole = dictionary(one, one.T, np.zeros(n))
    # Active with the channel's sign alone: a + 50 * (s - 1) and a + 50 * (-s - 1) are below 0 else.
    apart = np.concatenate([one, one]).T.copy()
    apart[-1, :n], apart[-1, n:] = 1.0, -1.0
    halves = dictionary(np.concatenate([one, one]), apart, np.full(2 * n, -50.0))
    encoded = [each.encode_sparse(rows) for each in (whole, halves)]
    assert encoded[0].nnz == encoded[1].nnz > 0
    found = features_of(*encoded)
    assert found is not None and (found.split, found.split_into) == (1.0, [1.0, 0.0, 0.0])
    back = features_of(*encoded[::-1])
    assert back is not None and (back.merged, back.merged_from) == (1.0, [1.0, 0.0, 0.0])
    again = features_of(encoded[0], encoded[0])
    assert again is not None and again.kept == 1.0


def test_a_mixture_of_fates_is_found_in_its_shares() -> None:
    kept, split, whole, new = (activations(4_000, n, seed) for n, seed in
                               ((10, 7), (6, 8), (4, 9), (20, 10)))  # fmt: skip
    gone = activations(4_000, 5, 11)
    first = np.concatenate([kept, split, halved(whole, 2, 12), gone], axis=1)  # 10, 6, 8, 5
    noise = 0.3 * activations(4_000, 10, 13)
    second = np.concatenate([new, halved(split, 3, 14), whole, kept + noise], axis=1)
    found = features_of(sparse(first), sparse(second))
    assert found is not None and found.n == 29
    shares = [found.kept, found.split, found.merged, found.gone]
    assert [round(29 * share) for share in shares] == [10, 6, 8, 5]
    assert sum(shares) == pytest.approx(1)
    assert found.split_into == [0.0, found.split, 0.0]
    assert found.merged_from == [found.merged, 0.0, 0.0]


def parts(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    one, other = sparse(first), sparse(second)
    return parts_of(correlations(one, other), correlations(other, other))


def test_parts_are_those_of_least_squares_step_by_step() -> None:
    base = activations(600, 9, 15, 0.3)
    sums = [base[:, [k, (k + 1) % 9, (k + 2) % 9]].sum(axis=1) for k in range(9)]
    parted = activations(600, 1, 16, 0.3)[:, 0]
    most = np.where(np.arange(600) % 5 > 0, parted, 0.0)  # four fifths of it: kept
    first = np.column_stack([base[:, :3], *sums, parted, activations(600, 2, 17, 0.3)])
    # Each of them has some of its neighbour as well, so they are correlated.
    second = np.column_stack([base + 0.5 * np.roll(base, 1, axis=1), most, parted - most])
    n_parts, chosen = parts(first, second)

    def left(feature: int, some: list[int]) -> np.ndarray:
        """What least squares leaves of a feature, over its spread."""
        design = np.column_stack([second[:, some], np.ones(600)])
        y = first[:, feature]
        return np.asarray(y - design @ np.linalg.lstsq(design, y, rcond=None)[0]) / y.std()

    for feature in range(first.shape[1]):
        some: list[int] = []
        for _ in range(MOST):
            rest = left(feature, some)
            rises = [c for c in range(second.shape[1])
                     if c not in some and np.cov(rest, second[:, c])[0, 1] > 0]  # fmt: skip
            after = {c: left(feature, [*some, c]).var() for c in rises}
            if not after or rest.var() - min(after.values()) < PART:
                break
            some.append(min(after, key=lambda c: after[c]))
            if len(some) == 1 and left(feature, some).var() <= 1 - EXPLAINED:
                break
        assert chosen[feature, : len(some)].tolist() == some
        enough = bool(some) and left(feature, some).var() <= 1 - EXPLAINED
        assert n_parts[feature] == (len(some) if enough else 0)
    assert set(n_parts.tolist()) >= {0, 1, 2, 3}


def test_halves_explain_what_no_other_choice_of_two_does() -> None:
    whole = activations(2_000, 5, 21)
    second = np.concatenate([halved(whole, 2, 22), activations(2_000, 4, 23)], axis=1)
    n_parts, chosen = parts(whole, second)
    assert n_parts.tolist() == [2] * 5
    for feature in range(5):
        y = whole[:, feature]
        explained = {}
        for some in combinations(range(14), 2):
            design = np.column_stack([second[:, some], np.ones(2_000)])
            rest = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
            explained[some] = 1 - rest.var() / y.var()
        best = max(explained, key=lambda some: explained[some])
        assert explained[best] == pytest.approx(1)
        assert sorted(chosen[feature, :2].tolist()) == list(best) == [feature, feature + 5]


def test_what_is_less_another_feature_is_no_split() -> None:
    halves = halved(activations(4_000, 1, 18), 2, 19)
    both = np.column_stack([halves.sum(axis=1), halves[:, 1]])
    n_parts, _ = parts(halves[:, :1], both)  # the sum less the other half
    assert n_parts.tolist() == [0]
    found = features_of(sparse(halves), sparse(both))
    assert found is not None and (found.kept, found.merged) == (0.5, 0.5)


def test_correlations_are_those_of_numpy() -> None:
    values = activations(500, 7, 20, 0.4)
    expected = np.corrcoef(values.T)[:3, 3:]
    found = correlations(csr_array(values[:, :3]), csr_array(values[:, 3:]))
    assert found == pytest.approx(expected)


def test_a_feature_that_is_rare_or_alike_on_all_rows_is_not_counted() -> None:
    always, some = np.ones(50), np.repeat([1.0, 0.0], 25)
    rare = np.repeat([1.0, 0.0], [19, 31])
    found = features_of(sparse(always, some, rare), sparse(some))
    assert found is not None and (found.n, found.kept) == (1, 1.0)
    assert features_of(sparse(rare), sparse(some)) is None
    alone = features_of(sparse(some), sparse(rare))
    assert alone is not None and alone.gone == 1.0


# Order


def test_rows_that_two_arms_share_come_in_one_order() -> None:
    rng = np.random.default_rng(3)
    request, position = rng.integers(0, 9, 300).astype(np.uint64), rng.integers(0, 60, 300)
    copy = order.copies(request, position, rng.integers(0, 99, 300).astype(np.uint64))
    keys = order.row_keys(request, position, copy)
    assert len(np.unique(keys)) == 300, "a row at one place twice is two rows"
    some = np.sort(rng.choice(300, 120, replace=False))
    whole, part = order.epoch_order(keys, 5, 2), order.epoch_order(keys[some], 5, 2)
    assert sorted(whole.tolist()) == list(range(300))
    assert keys[some][part].tolist() == [k for k in keys[whole].tolist() if k in set(keys[some])]
    for other in (order.epoch_order(keys, 6, 2), order.epoch_order(keys, 5, 3)):
        assert (other != whole).mean() > 0.9


# Arms


def opened(*words: str, held_out: float = 0.2) -> list[Arm]:
    asked = parse_named(words, MIXTURE_KEYS)
    return [open_arm(one, actds.open(one.path), HOOK, held_out) for one in asked]


def test_an_arm_says_its_shares_and_weights() -> None:
    (one,) = parse_named(["M=s3://b/a:c:prefill=0.25,decode=0.75,weights=multiplicity,weights=w"],
                         MIXTURE_KEYS)  # fmt: skip
    mix = (("prefill", 0.25), ("decode", 0.75))
    assert one == ArmWords("M", "s3://b/a:c", mix=mix, weights=("multiplicity", "w"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a:prefill=0.5", "shares of 0.5"),
        ("a:prefill=0.5,decode=0.6", "shares of 1.1"),
        ("a:prefill=half,decode=0.5", "the share half"),
        ("a:prefill=0,decode=1", "the share 0"),
        ("a:phase=decode,prefill=0.5,decode=0.5", "a phase and shares"),
        ("a:prefill=0.5,prefill=0.5", "prefill twice"),
        ("a:shares=1", "the key shares"),
    ],
)
def test_shares_that_cannot_be_meant_are_refused(words: str, said: str) -> None:
    with pytest.raises(ActdsError, match=f"E009.*{said}"):
        parse_named([words], MIXTURE_KEYS)


def test_what_trains_nothing_has_no_shares() -> None:
    for words in ("a:prefill=0.5,decode=0.5", "a:weights=multiplicity"):
        with pytest.raises(ActdsError, match=r"E009.*the keys phase, where, exclude"):
            parse_arms([words, "b"])


def test_a_hybrid_has_its_shares_exactly_and_the_rows_of_its_parts(sets: dict[str, Path]) -> None:
    path = sets["A"]
    whole, prefill, hybrid = scored_apart(
        opened(str(path), f"P={path}:phase=prefill", f"M={path}:prefill=0.7,decode=0.3")
    )
    n = most(hybrid.train, hybrid.shares)
    for rows in (10, 101, n):
        entries = chosen(hybrid.train, hybrid.shares, rows)
        counts = np.bincount(entries["phase"], minlength=2)
        assert counts.sum() == rows and abs(counts[0] - 0.7 * rows) < 1
    assert most(whole.train, whole.shares) == len(whole.train[0])
    # The prefill rows of the mixture are the first ones of the arm of prefill rows.
    of_prefill = chosen(prefill.train, prefill.shares, int((entries["phase"] == 0).sum()))
    assert entries[entries["phase"] == 0]["row"].tolist() == of_prefill["row"].tolist()


def test_a_weighted_arm_has_each_row_as_often_as_it_was_served(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "a", n_requests=40, hooks=(HOOK,))
    stored, served = opened(str(path), f"W={path}:weights=multiplicity")
    times = actds.open(path).multiplicity()
    assert len(served.train[0]) > len(stored.train[0]) and times.num_rows
    found = np.bincount(served.train[0]["row"])
    expected = actds.Loader(path, HOOK, weights="multiplicity", split="train", held_out=0.2,
                            exclude=["bos", "first_position"], batch=1)  # fmt: skip
    assert found.sum() == expected.batches_per_epoch
    assert len(np.unique(served.train[0]["key"])) == len(served.train[0])
    assert np.bincount(served.scored[0]["row"]).max() == 1


def test_a_weighted_arm_has_the_rows_of_a_harvest_without_a_cache(tmp_path: Path) -> None:
    cached, uncached = (
        make_dataset(tmp_path / name, schedule=simulate(60, 0, cache=cache), hooks=(HOOK,),
                     run=name)
        for name, cache in (("a", True), ("b", False))
    )  # fmt: skip
    arms = opened(str(cached), f"W={cached}:weights=multiplicity", str(uncached), held_out=0.5)
    stored, served, every = (arm.train[0] for arm in scored_apart(arms))
    assert len(stored) < len(served)
    # A simulated request that is aborted ends elsewhere without a cache.
    whole = [
        name_hash(line["external_id"], line["source_row"])
        for line in actds.open(cached).requests().to_pylist()
        if line["finish_reason"] in ("stop", "length")
    ]
    one, other = (e[np.isin(e["request"], whole)] for e in (served, every))
    assert len(one) > 200
    for name in ("key", "request", "token_id", "prefix"):
        assert one[name].tolist() == other[name].tolist()
    # So also where the request that computed a shared prefix is held out.
    computed = actds.open(cached).tokens(HOOK)["request"].to_numpy()[served["row"]]
    numbers, held = held_out_requests(actds.open(cached), "a", 0.5)
    assert np.isin(computed, numbers[held]).any()


def test_rows_that_were_drawn_weigh_what_they_represent(tmp_path: Path) -> None:
    schedule = simulate(60, 3)
    path = make_thinned(tmp_path / "acts", schedule, busy_shares(schedule), hooks=[HOOK])
    inclusion = actds.open(path).tokens(HOOK)["inclusion"].to_numpy()
    for words in (f"W={path}", f"W={path}:weights=inclusion"):
        (arm,) = opened(words)
        for entries in (*arm.train, *arm.scored):
            assert set(entries["weight"]) == {1, 4}
            assert entries["weight"].tolist() == (1 / inclusion[entries["row"]]).tolist()
            assert entries["represents"].tolist() == entries["weight"].tolist()


def test_weights_of_an_expression_weigh_the_loss(sets: dict[str, Path]) -> None:
    (arm,) = opened(f"W={sets['A']}:weights=1 + position")
    tokens = actds.open(sets["A"]).tokens(HOOK)
    expected = 1 + tokens["position"].to_numpy()[arm.train[0]["row"]]
    assert arm.train[0]["weight"].tolist() == expected.tolist()


def test_a_lossy_arm_takes_the_weights_that_an_audit_wrote(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "a", n_requests=60, hooks=(HOOK,), drops=True)
    file = tmp_path / "weights.parquet"
    actds.audit(path, weights=file)
    (arm,) = opened(f"W={path}:weights={file},weights=multiplicity")
    weights = actds.open(path).row_weights(file)
    shards = actds.open(path).shards_of(HOOK)
    by_shard = weights.of_shards([shard.name for shard in shards])
    every = np.concatenate([by_shard[shard.name] for shard in shards])
    assert arm.train[0]["weight"].tolist() == every[arm.train[0]["row"]].tolist()
    assert len(set(arm.train[0]["weight"].tolist())) > 1


def test_nothing_that_one_arm_scores_is_trained_on_by_another(tmp_path: Path) -> None:
    # The other arm has other answers to the same prompts, so a loader holds out others of them.
    told = simulate(60, 0, cache=False)
    one = make_dataset(tmp_path / "a", schedule=told, hooks=(HOOK,))
    other = make_dataset(
        tmp_path / "b", schedule=other_continuations(told), run="r-b", hooks=(HOOK,)
    )
    arms = scored_apart(opened(str(one), f"{other}:phase=decode"))
    train = [part for arm in arms for part in arm.train]
    scored = [part for arm in arms for part in arm.scored]
    for a in train:
        for b in scored:
            assert not np.intersect1d(a["request"], b["request"]).size
            assert not np.intersect1d(a["prefix"][a["prefix"] > 0], b["prefix"]).size
    prefixes = scored[0]["prefix"][scored[0]["prefix"] > 0]
    assert len(prefixes) == len(np.unique(prefixes)) > 50
    # The requests are those that a loader holds out.
    loader = actds.Loader(one, HOOK, split="held_out", held_out=0.2, batch=1, provenance=True)
    held = {int(rows["request"][0]) for _, rows in loader}
    tokens = actds.open(one).tokens(HOOK)
    assert set(tokens["request"].to_numpy()[scored[0]["row"]].tolist()) <= held


# Cross-reconstruction


def test_rare_tokens_are_the_least_frequent_tenth() -> None:
    tokens = np.repeat([7, 8, 9, 10, 11], [1, 2, 2, 5, 40])
    rare, frequent = rare_tokens(tokens)
    assert (rare.most, rare.share, frequent.tolist()) == (2, 0.1, [10, 11])


@pytest.mark.parametrize("drawn", [False, True])
def test_unexplained_variance_is_that_of_numpy_with_groups_left_out(
    sets: dict[str, Path], drawn: bool
) -> None:
    (arm,) = scored_apart(opened(str(sets["A"])))
    entries = arm.scored[0].copy()
    rng = np.random.default_rng(0)
    if drawn:
        entries["represents"] = rng.choice([1, 2, 8], len(entries))
    w = entries["represents"]
    rows = rng.normal(3, 1, size=(len(entries), 8)).astype(np.float32)
    group = np.unique(entries["request"], return_inverse=True)[1] % 9
    scored = Scored(rows, entries, group, rng.random(len(rows)) < 0.3)
    squared = [rng.gamma(1, size=len(rows)) for _ in range(2)]
    errors = [Scores(one, np.full(len(rows), 2)) for one in squared]
    values = {one.rows: one for one in cross_values({"A": errors}, "A", scored, scored)}
    steps = {"decode step 1", "decode step 6 to 10"}
    assert set(values) == {"all", "prefill", "decode", "rare tokens", *steps}

    def fvu(mask: np.ndarray) -> float:
        x = rows[mask].astype(np.float64)
        spread = w[mask] @ np.square(x - np.average(x, axis=0, weights=w[mask])).sum(axis=1)
        return float(np.mean([w[mask] @ one[mask] / spread for one in squared]))

    everything = np.ones(len(rows), bool)
    assert values["all"].value == pytest.approx(fvu(everything), rel=1e-6)
    assert values["all"].fvu_reference == pytest.approx(fvu(everything), rel=1e-6)
    assert values["rare tokens"].value == pytest.approx(fvu(scored.rare), rel=1e-6)
    x = rows.astype(np.float64)
    rare = scored.rare
    error = np.mean([np.average(one[rare], weights=w[rare]) for one in squared])
    spread = np.square(x - np.average(x, axis=0, weights=w)).sum(axis=1)
    of_reference = error / np.average(spread, weights=w)
    assert values["rare tokens"].fvu_reference == pytest.approx(of_reference, rel=1e-6)
    without = np.array([fvu(group != g) for g in range(9)])
    error = math.sqrt(8 / 9 * np.square(without - without.mean()).sum())
    one = values["all"]
    assert one.low is not None and one.high is not None and one.value is not None
    assert one.value - one.low == pytest.approx(one.high - one.value)
    assert 1.96 * error < one.high - one.value < 4 * error


# What dictionaries are used for


def schedule_and_steps() -> tuple[Any, Callable[[int, int], int]]:
    """A schedule, and the decode step of a request's position; 0 in its prompt."""
    schedule = simulate(320, 0, cache=False)
    prompt = dict(zip(*(schedule.requests[n].to_pylist() for n in ("request", "prompt_len")),
                      strict=True))  # fmt: skip
    return schedule, lambda request, position: max(0, position - prompt[request] + 1)


CORPORA = ("prefill={0}:phase=prefill", "decode={0}:phase=decode",
           "hybrid={0}:prefill=0.5,decode=0.5")  # fmt: skip
CORPUS = SMALL | {"features": 16, "k": 3, "seeds": 6, "epochs": 40, "held_out": 0.3}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Stability:
    """Decode rows have a direction of their own, longer at each step, and the label another."""
    schedule, step_of = schedule_and_steps()
    late, told = np.eye(16)[8], np.eye(16)[9]

    def more(request: int, position: int) -> Any:
        step = step_of(request, position)
        return 0.4 * step * late + 2.0 * (step > 0) * (request % 2) * told

    planted = np.pad(directions(12, 8), ((0, 0), (0, 8)))
    path = planted_dataset(
        tmp_path_factory.mktemp("corpora") / "a", planted, more=more, schedule=schedule,
        hooks=(HOOK,),
    )  # fmt: skip
    arms = [arm.format(path) for arm in CORPORA]
    return stability(*arms, label="request % 2 == 1", limits=CORPUS)


def of_cross(result: Stability, use: str) -> dict[tuple[str, str, str], Any]:
    return {(v.trained_on, v.rows_of, v.rows): v for v in result.cross if v.use == use}


@pytest.mark.standard
def test_a_dictionary_of_prefill_explains_less_the_later_the_decode_step(
    corpora: Stability,
) -> None:
    fvu = of_cross(corpora, "FVU")
    first, late = (f"decode step {band}" for band in ("1", "6 to 10"))
    gaps = {(arm, rows): fvu[arm, "decode", rows].difference
            for arm in ("prefill", "hybrid") for rows in (first, late)}  # fmt: skip
    assert gaps["prefill", late].value > gaps["prefill", first].value + 0.2
    assert gaps["prefill", late].outcome == "beyond the floor"
    assert gaps["prefill", late].low > gaps["hybrid", late].high
    assert fvu["decode", "prefill", "all"].difference.value > -0.02
    (said,) = (
        words for words in corpora.answer.uses if words.startswith("FVU on held-out rows of decode")
    )
    assert f", {late}: " in said
    assert f"prefill {gaps['prefill', late].value:+.3f}" in said and "beyond the floor" in said


@pytest.mark.standard
def test_a_label_that_only_decode_has_is_found_there_alone(corpora: Stability) -> None:
    for use in ("AUROC of maxima", "AUROC of means"):
        area = of_cross(corpora, use)
        for name in ("raw rows", "hybrid"):
            in_prompt, in_answer = (area[name, arm, "all"] for arm in ("prefill", "decode"))
            assert 0.3 < in_prompt.value < 0.7 and in_prompt.low < 0.6 and in_answer.low > 0.9
        assert area["raw rows", "decode", "all"].difference.outcome is None
        # A handful of requests of either label are no sample.
        assert area["decode", "decode", "decode step 6 to 10"].value is None
    only = [v for v in corpora.cross if v.trained_on == "raw rows"]
    assert {v.use for v in only} == {"AUROC of maxima", "AUROC of means"}
    assert corpora.label == "request % 2 == 1"


@pytest.mark.standard
def test_corpora_of_the_same_directions_have_no_verdict_beyond_the_floor(tmp_path: Path) -> None:
    schedule, _ = schedule_and_steps()
    path = planted_dataset(tmp_path / "a", PLANTED, schedule=schedule, hooks=(HOOK,))
    arms = [arm.format(path) for arm in CORPORA]
    found = stability(*arms, label="request % 2 == 1", limits=CORPUS)
    beyond = [v for v in found.cross if v.difference and v.difference.outcome == "beyond the floor"]
    assert not beyond
    assert len(found.answer.uses) == 9 and not any("beyond" in words for words in found.answer.uses)


def test_a_difference_of_fvu_is_paired_by_row(sets: dict[str, Path]) -> None:
    """Rows that are hard for every dictionary widen neither's difference."""
    (arm,) = scored_apart(opened(str(sets["A"])))
    entries, rng = arm.scored[0], np.random.default_rng(0)
    rows = rng.normal(size=(len(entries), 8)).astype(np.float32)
    group = np.unique(entries["request"], return_inverse=True)[1] % 9
    scored = Scored(rows, entries, group, np.zeros(len(rows), bool))
    hard = rng.gamma(1, 1 + 5 * group)
    few = np.full(len(rows), 2)
    scores = {"A": [Scores(hard, few)] * 2, "B": [Scores(hard + 0.5, few), Scores(hard + 0.7, few)]}
    found = {v.trained_on: v for v in cross_values(scores, "A", scored, scored) if v.rows == "all"}
    gap, own = found["B"].difference, found["A"]
    assert found["A"].difference is None and gap is not None and own.low is not None
    spread = np.square(rows - rows.mean(axis=0)).sum()
    assert gap.value == pytest.approx(0.6 * len(rows) / spread, rel=1e-4)
    assert (gap.high - gap.low) < 0.2 * (own.high - own.low) and gap.floor == 0
    assert gap.p is not None and gap.p < 1e-6
    back = [v.difference for v in cross_values(scores, "B", scored, scored)
            if (v.trained_on, v.rows) == ("A", "all")]  # fmt: skip
    assert back[0] is not None and back[0].value == pytest.approx(-gap.value)
    assert back[0].floor == pytest.approx(0.2 * len(rows) / spread, rel=1e-4)


def test_areas_are_those_of_scikit_learn_with_groups_left_out() -> None:
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    label, group = rng.integers(0, 2, 300), rng.integers(0, 7, 300)
    score = np.round(rng.normal(size=300) + label, 1)  # with ties
    expected = [roc_auc_score(label, score)]
    expected += [roc_auc_score(label[group != g], score[group != g]) for g in range(7)]
    assert areas(score, label, group, 7) == pytest.approx(np.array(expected))


def test_a_probe_is_a_ridge_regression_on_scaled_columns() -> None:
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import StandardScaler

    dense = activations(400, 12, 30, 0.3).astype(np.float32)
    label = (dense[:, 0] + np.random.default_rng(1).normal(size=400) > 1).astype(np.int64)
    dense[:, 5] = 0  # a dead feature
    scaler = StandardScaler().fit(dense.astype(np.float64))
    expected = Ridge(alpha=400).fit(scaler.transform(dense.astype(np.float64)), label).coef_
    for features in (dense.astype(np.float64), csr_array(dense)):
        assert ridge(features, label) == pytest.approx(expected / scaler.scale_, abs=1e-5)


def test_a_request_counts_once_by_its_largest_and_by_its_mean_score() -> None:
    rng = np.random.default_rng(2)
    entries = np.zeros(600, ENTRY)
    entries["request"], entries["represents"] = rng.integers(0, 90, 600), rng.choice([1, 4], 600)
    entries["label"] = np.where(entries["request"] % 9 == 0, -1, entries["request"] % 2)
    score = rng.normal(size=600) + 0.3 * entries["label"]
    scored = Scored(rng.normal(size=(600, 4)).astype(np.float32), entries,
                    (entries["request"] % 11).astype(np.int64), np.zeros(600, bool))  # fmt: skip
    scores = {"A": [Scores(np.ones(600), np.ones(600, int), score)]}
    found = {v.use: v for v in cross_values(scores, "A", scored, scored, score)
             if (v.trained_on, v.rows) == ("A", "all")}  # fmt: skip
    by_request: dict[str, list[float]] = {"AUROC of maxima": [], "AUROC of means": []}
    requests = [r for r in np.unique(entries["request"]) if r % 9]
    for request in requests:
        of = entries["request"] == request
        by_request["AUROC of maxima"].append(score[of].max())
        by_request["AUROC of means"].append(
            np.average(score[of], weights=entries["represents"][of])
        )
    label = np.array(requests) % 2
    for use, values in by_request.items():
        expected = areas(np.array(values), label.astype(int), np.zeros(len(label), int), 1)[0]
        assert found[use].value == pytest.approx(expected)
        assert found[use].low < expected < found[use].high  # type: ignore[operator]


# Judgement


def test_six_seeds_are_the_fewest_that_reach_five_per_cent() -> None:
    assert sign_test(6, 6) == sign_test(0, 6) == pytest.approx(2 / 2**6)
    assert sign_test(5, 5) == pytest.approx(2 / 2**5) and MIN_SEEDS == 6
    assert sign_test(5, 6) == pytest.approx(2 * 7 / 2**6)
    assert sign_test(6, 6, two_sided=False) == pytest.approx(1 / 2**6)
    assert sign_test(0, 0) == 1.0


def likeness(matched: float) -> Likeness:
    features = Features(n=99, kept=matched, split=0, merged=0, gone=1 - matched,
                        split_into=[0, 0, 0], merged_from=[0, 0, 0])  # fmt: skip
    return Likeness(matched=matched, nearest=0.9, share_70=0.5, share_90=0.1, features=features)


def pairs(cosines: list[float], floor: float = 0.6, arm: str = "B") -> list[PairResult]:
    told = []
    for seed, cosine in enumerate(cosines):
        seeds = (seed, (seed + 1) % len(cosines))
        for name, kind, value in (
            ("R", "other order", 0.9), ("R", "other seed", floor),
            (arm, "same start", 0.9), (arm, "other seed", cosine),
        ):  # fmt: skip
            told.append(PairResult(arm=name, kind=kind, seeds=seeds, likeness=likeness(value)))
    return told


@pytest.mark.parametrize(
    ("arm", "floor", "outcome", "short"),
    [
        ([0.4] * 6, 0.6, "beyond the floor", ""),
        ([0.59] * 6, 0.6, "within the floor", ""),  # below each time, and by less than counts
        ([0.7] * 6, 0.6, "within the floor", ""),
        ([0.4, 0.4, 0.4, 0.4, 0.4, 0.7], 0.6, "undecided", "no difference is shown"),
        ([0.4] * 5, 0.6, "undecided", "5 seeds describe, they do not test"),
        ([0.2] * 6, 0.21, "undecided", "little above the 0.200 of random directions"),
    ],
)
def test_a_verdict_is_a_sign_test_over_seeds(
    arm: list[float], floor: float, outcome: str, short: str
) -> None:
    found = compare(pairs(arm, floor), "R", 0.2, Limits())
    (verdict,) = verdicts(found, "R", 0.2, Limits())
    assert verdict.outcome == outcome
    about = [words for words in verdict.short if words.startswith("other seed")]
    assert (short in about[0]) if short else not about
    tested = {(one.floor, one.measure) for one in found if one.p is not None}
    floors = {("other seed", "matched"), ("other order", "matched")}
    assert tested == (floors if len(arm) >= MIN_SEEDS else set())


# Training


def rows_of(n: int, weight: object = 1, seed: int = 0) -> tuple[Any, Entries]:
    import torch

    values = np.random.default_rng(seed).normal(size=(n, 8)).astype(np.float32)
    entries = np.zeros(n, ENTRY)
    entries["key"], entries["weight"] = np.arange(n), weight
    return torch.from_numpy(values), entries


def trainer(epochs: int = 2) -> Trainer:
    return Trainer(Limits(k=2, batch=16, epochs=epochs), 12, 2.0, np.full(8, 0.5))


def fitted(values: Any, entries: Entries, seed: int, order: int, epochs: int = 2) -> Any:
    return trainer(epochs).fit(values, entries, seed, order)[0]


@pytest.mark.standard
def test_the_start_follows_from_the_seed_alone() -> None:
    one, same, other = (trainer().start(seed) for seed in (1, 1, 2))
    assert all((one[name] == same[name]).all() for name in one)
    assert not (one["w_dec"] == other["w_dec"]).any()
    assert np.linalg.norm(one["w_dec"], axis=1) == pytest.approx(np.ones(12), rel=1e-6)


@pytest.mark.standard
def test_equal_rows_give_equal_weights_and_rows_of_no_weight_none() -> None:
    values, entries = rows_of(64)
    one, again = fitted(values, entries, 1, 2), fitted(values, entries, 1, 2)
    assert (one[0] == again[0]).all() and (one[2] == again[2]).all()
    assert not (fitted(values, entries, 1, 3)[2] == one[2]).all()
    entries["weight"][::2] = 0
    changed = values.clone()
    changed[::2] = 0  # what a sink is
    left = [fitted(v, entries, 1, 2)[2] for v in (values, changed)]
    assert np.allclose(left[0], left[1], atol=1e-6)


@pytest.mark.standard
def test_a_batch_of_one_row_that_weighs_something_teaches_nothing() -> None:
    values, entries = rows_of(64, 0)
    first = order.epoch_order(entries["key"], 2, 0)[[3, 20, 21, 22]]  # of batches of 16 the first
    entries["weight"][first] = 1
    weights, fvu, _ = trainer(1).fit(values, entries, 1, 2)
    assert np.isfinite(weights[2]).all() and np.isfinite(fvu)
    entries["weight"][np.flatnonzero(entries["weight"])[1:]] = 0
    with pytest.raises(ActdsError, match=r"E014 training rows: no batch"):
        trainer().fit(values, entries, 1, 2)


@pytest.mark.standard
def test_order_and_training_do_not_depend_on_the_digest(tmp_path: Path) -> None:
    common = {"n_requests": 60, "hooks": (HOOK,)}
    one = planted_dataset(tmp_path / "a", PLANTED, **common)
    other = planted_dataset(
        tmp_path / "b", PLANTED, run="r-other", rows_per_shard=40, order="sequence", **common
    )
    assert actds.open(one).digest != actds.open(other).digest
    assert (actds.open(one).array(HOOK)[:99] != actds.open(other).array(HOOK)[:99]).any()
    found = stability(one, other, limits=QUICK)
    by = {(d.arm, d.seed, d.order): d.sha256 for d in found.dictionaries}
    for seed in (0, 1):
        assert by["A", seed, seed] == by["B", seed, seed] != by["A", seed, seed + 2]
    assert by["A", 0, 0] != by["A", 1, 1]
    assert found.arms[1].n_common == found.n_rows
    for pair in found.pairs:
        if pair.kind == "same start":
            assert pair.likeness.matched == pytest.approx(1, abs=1e-6)
    assert all(v == 0 for c in found.comparisons if c.floor == "other seed" for v in c.differences)


@pytest.mark.standard
def test_planted_arms_end_within_and_beyond_the_floor(result: Stability) -> None:
    assert [(one.arm, one.outcome) for one in result.verdicts] == [
        ("B", "within the floor"), ("C", "beyond the floor"),
    ]  # fmt: skip
    assert result.verdicts[1].against_order == "beyond the floor"
    assert (result.answer.outcome, result.answer.arms) == ("beyond the floor", ["C"])
    assert result.answer.words == "Yes: C changes the dictionary more than another seed does"
    by = {(one.arm, one.floor, one.measure): one for one in result.comparisons}
    assert by["C", "other seed", "matched"].n_below == 7
    # Of the directions that another seed finds again C finds about half, and B all.
    floor = by["C", "other seed", "share_90"].of_floor
    assert 0.25 * floor < by["C", "other seed", "share_90"].of_arm < 0.75 * floor
    assert by["B", "other seed", "share_90"].of_arm > 0.8 * floor
    floor = by["C", "other seed", "kept"].of_floor
    assert by["C", "other seed", "kept"].of_arm < 0.75 * floor
    assert by["B", "other seed", "kept"].of_arm > 0.8 * floor
    assert by["C", "other seed", "gone"].of_arm > by["B", "other seed", "gone"].of_arm
    assert result.n_seen == 20 * (result.n_rows // 64) * 64
    assert {one.n_rows for one in result.arms} == {result.n_rows}
    fvu = {(one.trained_on, one.rows_of): one.value for one in result.cross if one.rows == "all"}
    assert max(fvu["A", "A"], fvu["A", "B"], fvu["C", "C"]) < 0.2 < 0.4 < fvu["A", "C"]


@pytest.mark.standard
def test_written_dictionaries_are_read_again_with_what_they_have_not_seen(
    sets: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    found = stability(f"H={sets['A']}", limits=QUICK | {"held_out": 0.25}, out=out)
    assert sorted(p.name for p in (out / "H").iterdir()) == [
        "seed-0", "seed-0-order-2", "seed-1", "seed-1-order-3",
    ]  # fmt: skip
    assert found.verdicts == [] and {one.kind for one in found.pairs} == {
        "other seed",
        "other order",
    }
    one = load_dictionary(out / "H" / "seed-1", HOOK, 8)
    assert (one.kind, one.k, one.n_features, one.hook) == ("topk", 2, 12, HOOK)
    assert one.source.trained_on == (actds.open(sets["A"]).digest,)
    assert one.source.held_out == 0.25 and one.source.hook_from == "file"
    config = json.loads((out / "H" / "seed-1" / "cfg.json").read_text())
    assert config["metadata"]["hook_name"] == "blocks.0.hook_resid_post"
    x = actds.open(sets["A"]).array(HOOK)[:50]
    away = x - one.decode(one.encode(x), x)
    assert 0 < np.square(away).sum() < np.square(x - x.mean(axis=0)).sum() * 2
    with pytest.raises(ActdsError, match=r"E503.*there already"):
        stability(f"H={sets['A']}", limits=QUICK, out=out)
    # It is scored on what it has not seen, and on nothing else.
    pair, sae = (f"{sets['A']}:phase=decode", f"{sets['C']}:phase=decode"), [str(out / "H/seed-1")]
    with pytest.raises(ActdsError, match=r"(?s)E015.*held_out=0.25"):
        actds.regimes(*pair, sae=sae)
    scored = actds.regimes(*pair, sae=sae, held_out=0.25)
    assert {one.instrument for one in scored.contrasts[0].verdicts} > {"dictionary"}


# The command


@pytest.mark.standard
def test_the_command_writes_what_it_finds(sets: dict[str, Path], tmp_path: Path) -> None:
    file, out = tmp_path / "page.html", tmp_path / "result.json"
    options = [
        f"--limit={name}={value}" if name == "margin" else f"--{name.replace('_', '-')}={value}"
        for name, value in QUICK.items()
    ]
    told = run(f"A={sets['A']}", f"C={sets['C']}", *options, "--html", file, "--json", out)
    assert told.exit_code == 0, told.output
    assert told.stdout.startswith("? Undecided whether C changes the dictionary more than another")
    found = Stability.from_json(out.read_bytes())
    schema = json.loads((SCHEMAS / "stability.json").read_bytes())
    jsonschema.validate(json.loads(out.read_text()), schema)
    assert found.verdicts[0].sentence in told.stdout and "2 seeds describe" in told.stdout
    assert found.limits.seeds == 2
    again = run(f"A={sets['A']}", f"C={sets['C']}", *options, "--fail-on", "undecided")
    assert again.exit_code == 1


def test_the_published_schema_is_that_of_the_model() -> None:
    from actds.cli.command import document_schema

    published = json.loads((SCHEMAS / "stability.json").read_bytes())
    assert published == document_schema(Stability, "serialization"), (
        "run: actds schema --write spec/0.1/schemas"
    )


@pytest.mark.parametrize("make", [made, many, hostile])
def test_the_page_is_whole_small_and_without_script(make: Callable[[], Stability]) -> None:
    source = page(make(), "actds stability <b>\x1b").html()
    assert "<script" not in source and "\x1b" not in source and "<b>" not in source.split("h1")[0]
    assert len(source.encode()) < 1_000_000
    for svg in re.findall(r"<svg viewBox.*?</svg>", source, re.DOTALL):
        ElementTree.fromstring(svg)
    for line in page(make(), "actds stability\x1b").lines():
        assert line.text.isprintable() or not line.text


def test_the_page_says_what_the_result_says() -> None:
    result = made()
    source = page(result, "actds stability").html()
    lines = [line.text for line in page(result, "actds stability").lines()]
    assert lines[0] == "! Yes: hybrid changes the dictionary more than another seed does"
    assert lines[0][2:] in source
    for verdict in result.verdicts:
        assert any(verdict.sentence in line for line in lines) and verdict.sentence in source
    assert len(result.answer.uses) == 9
    for words in result.answer.uses:
        assert html.escape(words, quote=False) in source and any(words in line for line in lines)
    assert "(AUROC) for labels.label == 'code', by request" in html.unescape(source)
    assert "Probes through" not in page(result.model_copy(update={"label": None}), "c").html()
    assert "matched at 0.7 or more" in source and "features gone" in source
    for words in ("0.200 is chance", words_of_art(result)):
        assert words in source and any(words in line for line in lines)
    steps = result.answer.next_steps
    assert steps[0].startswith("Say which harvest a dictionary was trained on: one of hybrid")
    assert len(steps) == len(set(steps))
    few = [
        one.model_copy(update={"outcome": "undecided", "short": [f"{floor}: few seeds"]})
        for one in result.verdicts for floor in ("other seed", "other order")
    ]  # fmt: skip
    arms = ", ".join(dict.fromkeys(one.arm for one in result.verdicts))
    assert answer(few, [], "cached", 2).next_steps[0] == f"{arms}: few seeds."
    assert any("0.260 to 0.327" in line for line in lines) and "0.260 to 0.327" in source
    assert source.count('class="floor mark"') == 14 and source.count("stored-mark mark") == 28


def head(source: str) -> str:
    found = source[source.index("<header") : source.index("</header>")]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", found)).split())


def test_the_large_numbers_are_those_of_the_arm_with_their_unit_and_direction() -> None:
    result = made()
    lines = [line.text for line in page(result, "actds stability").lines()][:4]
    for words in (head(page(result, "actds stability").html()), " ".join("\n".join(lines).split())):
        cosine = words.index("Likeness of hybrid to cached")
        kept = words.index("Features of cached kept in hybrid")
        assert re.search(r"cached:? 0\.300 ", words[cosine:kept])
        for said_of_it in (
            "matched cosine", "1 is the same dictionary, 0.200 is chance",
            "It is 0.200 below that of two seeds of cached, 0.500 (lower in 7 of 7 seeds)",
            "lower is less alike",
        ):  # fmt: skip
            assert said_of_it in words[cosine:kept]
        assert re.search(r"hybrid:? 25 % \(45 %\)", words[kept:])
        assert "Split 5 % (5 %), merged 3 % (3 %), gone 67 % (47 %)" in words[kept:]
        start = "from the same start 55 % are kept (of two dictionaries of cached 85 %)"
        assert start in words[kept:]
    same = made(("cached", "uncached"))
    assert "0.500" in facts(same)[0].value and "equal to that of two" in facts(same)[0].note
    alone = facts(made(("cached",)))
    assert [fact.value for fact in alone] == ["0.500", "45 %"]
    assert "two seeds of cached" in alone[0].title


def test_the_head_says_model_hook_rows_engine_date_and_command() -> None:
    told = dict(
        re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page(made(), "actds stability a").html())
    )
    assert told["Model"] == "org/model-8b" and told["Command"] == "actds stability a"
    assert told["Hook"] == "resid_post.10 (576 × bfloat16)" and "17,253" in told["Rows"]
    assert told["Harvested"] == (
        "cached: 2025-11-22 08:26 UTC with vllm 0.11.0; "
        "uncached, hybrid: 2025-11-22 09:26 UTC with vllm 0.11.0"
    )


def test_words_of_art_are_said_in_plain_words_before_they_are_used() -> None:
    words = head(page(made(), "actds stability").html())
    meanings = {
        "seed": "random start of its training (another seed)", "arm": "An arm is the rows",
        "order": "an order the sequence", "floor": "A floor is",
    }  # fmt: skip
    for word, meaning in meanings.items():
        assert re.search(rf"\b{word}s?\b", words).start() >= words.index(meaning)  # type: ignore[union-attr]


def test_a_mixture_lies_between_where_its_interval_is_apart_from_both() -> None:
    def cross(hybrid: tuple[float, float, float], seeds: int = 6) -> list[CrossValue]:
        gaps = {"decode": None, "prefill": (0.1, 0.08, 0.12), "hybrid": hybrid}
        values = [
            CrossValue(trained_on=name, rows_of="decode", rows="decode step 40 to 60", use="FVU",
                       n_rows=99, n_requests=40, value=0.3, difference=gap and Gap(
                           value=gap[0], low=gap[1], high=gap[2], floor=0.01, p=1e-9))
            for name, gap in gaps.items()
        ]  # fmt: skip
        return judged_gaps(values, Limits(seeds=seeds))

    (between,) = uses(cross((0.04, 0.03, 0.05)))
    assert between == (
        "FVU on held-out rows of decode, decode step 40 to 60: 0.300 by its own dictionaries; by "
        "those of prefill +0.100 (+0.080 to +0.120), beyond the floor of 0.010; by those of hybrid "
        "+0.040 (+0.030 to +0.050), between these and prefill."
    )
    assert "between" not in uses(cross((0.07, 0.05, 0.09)))[0]  # may be as far as prefill
    assert "no difference" in uses(cross((0.01, 0.0, 0.015)))[0]
    # Fewer seeds than can test describe, and what seeds differ by is no difference of corpora.
    assert {v.difference.outcome for v in cross((0.04, 0.03, 0.05), 5) if v.difference} == {
        "undecided"
    }
    wide = [
        v.model_copy(update={"difference": v.difference.model_copy(update={"floor": 0.2})})
        for v in cross((0.04, 0.03, 0.05))
        if v.difference
    ]
    small = judged_gaps(wide, Limits())
    assert {v.difference.outcome for v in small if v.difference} == {"undecided"}


@pytest.mark.parametrize(
    ("matched", "outcome", "arms"),
    [
        ({"B": 0.59, "C": 0.3, "D": 0.4}, "beyond the floor", ["C", "D"]),
        ({"B": 0.59, "C": 0.61}, "within the floor", ["B", "C"]),
    ],
)
def test_the_answer_and_its_arms_are_data_of_the_result(
    matched: dict[str, float], outcome: str, arms: list[str]
) -> None:
    told = [pair for arm, cosine in matched.items() for pair in pairs([cosine] * 7, arm=arm)]
    found = compare(told, "R", 0.2, Limits(seeds=7))
    judged = verdicts(found, "R", 0.2, Limits(seeds=7))
    one = answer(judged, found, "R", 7)
    assert (one.outcome, one.arms) == (outcome, arms) and one.largest is not None
    largest = (one.largest.arm, one.largest.floor, one.largest.measure)
    assert largest == (arms[0], "other seed", "matched")
    assert one.largest.of_arm == pytest.approx(matched[arms[0]])
    assert one.within_and_changed == []
    alone = answer([], [], "R", 7)
    assert (alone.outcome, alone.arms, alone.largest) == ("undecided", [], None)
    assert alone.words == "Nothing to compare: one arm, 7 seeds described"
    changed = [
        verdict.model_copy(update={"outcome": "within the floor",
                                   "against_order": "beyond the floor"})
        for verdict in judged
    ]  # fmt: skip
    again = answer(changed, found, "R", 7)
    assert again.within_and_changed == list(matched)


def test_page_and_terminal_say_the_answer_that_json_and_python_have() -> None:
    result = Stability.from_json(made().to_json())
    assert json.loads(made().to_json())["answer"]["words"] == result.answer.words
    for words, outcome, mark in (
        (result.answer.words, "beyond the floor", "!"),
        ("No: as was said", "within the floor", "✓"),
    ):
        other = {"outcome": outcome, "words": words, "next_steps": ["Do as was said."]}
        changed = result.model_copy(update={"answer": result.answer.model_copy(update=other)})
        assert words in head(page(changed, "c").html())
        assert "Do as was said." in page(changed, "c").html()
        lines = [line.text for line in page(changed, "c").lines()]
        assert lines[0] == f"{mark} {words}" and "  1. Do as was said." in lines


def test_features_of_too_few_held_out_rows_are_not_known() -> None:
    result = made()
    none = [
        pair.model_copy(update={"likeness": pair.likeness.model_copy(update={"features": None})})
        for pair in result.pairs
    ]
    left = compare(none, "cached", result.chance, result.limits)
    assert {one.measure for one in left} == {"matched", "nearest", "share_70", "share_90"}
    lacking = result.model_copy(update={"pairs": none, "comparisons": left})
    source = page(lacking, "c").html()
    assert "too few held-out rows" in head(source) and 'id="features-title"' not in source
    lines = [line.text for line in page(lacking, "c").lines()]
    assert any(line.split()[-4:] == ["-"] * 4 for line in lines)


def test_the_terminal_says_how_many_lines_it_leaves_out() -> None:
    lines = [line.text for line in page(many(), "c").lines()]
    assert (
        "  and 2 more, all in the result (--json)" in lines
    )  # of 26 arms, each in two kinds of pair


def test_one_arm_is_not_told_to_look_at_the_rows_of_others() -> None:
    assert any("the other rows" in step for step in made().answer.next_steps)
    alone = made(("cached",))
    assert alone.answer.next_steps == ["Name a second arm: a test needs both."]
    few = made(("cached",), 2).answer.next_steps
    assert few == ["Name a second arm, and --seeds 6 at least: a test needs both."]
    once = alone.model_copy(update={"rare": alone.rare.model_copy(update={"most": 1})})
    assert "come at most 1 time in" in page(once, "actds stability").html()


@pytest.mark.parametrize(
    ("arms", "options", "words"),
    [
        (["{A}"], ["--hook", "resid_post.9"], "E014 --hook: resid_post.9"),
        (["{A}", "{wide}"], [], "E014 arm B at resid_post.0: rows of 16 channels.*8"),
        (["{A}"], ["--features", "2", "--k", "3"], "E009 --features: 2 features, 3"),
        (["{A}"], ["--rows", "99999"], "E009 --rows: 99,999.*rows of arm A"),
        (["{A}"], ["--rows", "8", "--batch", "16"], "E009 --rows: 8 rows"),
        (["{A}"], ["--batch", "65536"], "E009 --batch"),
        (
            ["{A}"],
            ["--max-memory", "1", "--features", "4096"],
            "E009 --max-memory.*fewer features",
        ),
        (["{A}"], ["--held-out", "0.0001"], "E014 arm A: no request in held_out"),
        (["{A}:where=position > 9999"], [], "E014 arm A: .*true for no row"),
        (["{A}:prefill=0.5,decode=0.6"], [], "E009 .*shares of 1.1"),
        (["{A}:weights=nothing.npz"], [], "E014"),
        (
            ["{A}"],
            ["--label", "position >= 0", "--batch", "64"],
            "E014 --label: true of .* of arm A",
        ),
        (["{A}"], ["--label", "labels.kind == 'a'"], "E014 .*requests have no labels"),
        (["{A}"], ["--label", "position >"], "E014 --label: invalid syntax"),
        (["A={A}", "A={B}"], [], "E009 arms: A twice"),
        (["{A}"], ["--html", "{A}/page.html"], "E009 --html"),
        (["{A}"], ["--out", "{A}"], "E503.*there already"),
        (["{A}"], ["--out", "{A}-no/such/out"], "E503.*no folder"),
        (["{A}"], ["--out", "{A}/out"], "E009 --out .*inside the dataset"),
        (["{A}"], ["--out", "{A}-x", "--html", "{A}-x"], "E009 --out .*the file of --html"),
        (["{A}", "{A}:exclude=bos"], [], "E014 arms A and B: the same rows"),
        (["{A}", "{A}:weights=0"], ["--batch", "64"], "E014 arm B .*no finite row with a weight"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_trained(
    sets: dict[str, Path], tmp_path: Path, arms: list[str], options: list[str], words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    places = {name: str(path) for name, path in sets.items()}
    if "{wide}" in arms:
        places["wide"] = str(make_dataset(tmp_path / "wide", hooks=(HOOK,)))
    monkeypatch.setattr(Trainer, "fit", None)
    told = run(*(text.format(**places) for text in (*arms, *options)))
    error = printed(told, command)
    assert re.search(words, error.replace("\n", " ")), error


def test_a_run_without_requests_takes_no_part(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", n_requests=20, run="r-1", sealed=False)
    path = make_dataset(tmp_path / "d", schedule=simulate(0), run="r-2")
    [arm] = opened(str(path))
    assert len(arm.train[0]) and len(arm.scored[0])


def test_one_seed_is_refused(sets: dict[str, Path]) -> None:
    assert run(sets["A"], "--seeds", "1").exit_code == 2
    with pytest.raises(ActdsError, match="E009 limits seeds: 1"):
        stability(str(sets["A"]), limits={"seeds": 1})


def test_random_directions_are_alike_by_chance() -> None:
    assert 0.3 < chance(64, 16) < 0.9
    assert chance(64, 256) < chance(64, 16)
