"""Arms of real datasets: which rows belong together, which are left out, which are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds_studies.regimes import contrast as contrast_module
from actds_studies.regimes.arms import TRAINED, Arm, ArmRows, read_arm
from actds_studies.regimes.contrast import contrast, groups_of, plan
from actds_studies.regimes.instruments import Moments, Numerics
from actds_studies.regimes.result import Limits, Regimes
from actds_studies.regimes.run import Asked, compare
from actds_studies.regimes.strata import MARGIN_EDGES, banded, entropy_edges, fine_bands, strata_of
from actds_testing.regime_datasets import other_continuations
from actds_testing.schedules import busy_shares, simulate
from actds_testing.synthetic import make_dataset, make_thinned

HOOK = "resid_post.1"


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Prompts of few prefixes, some of them served from the cache."""
    path = tmp_path_factory.mktemp("cached")
    return actds.open(make_dataset(path / "d", n_requests=30, roles=True, dtype="float32"))


@pytest.fixture(scope="module")
def uncached(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The same prompts, every position computed; rows in bfloat16."""
    path = tmp_path_factory.mktemp("uncached")
    return actds.open(make_dataset(path / "d", n_requests=30, cache=False, roles=True))


def prefixes(dataset: Dataset) -> dict[int, tuple[int, ...]]:
    """Return the tokens up to each row of the hook, by row number."""
    found = {}
    for request in dataset.requests()["request"].to_pylist():
        told = dataset.request(request, hook=HOOK)
        for position in range(len(told)):
            if told.row[position] >= 0 and told.owner[position] == request:
                found[int(told.row[position])] = tuple(told.token_id[: position + 1].tolist())
    return found


def test_an_arm_has_each_prefix_once_and_no_first_position(uncached: Dataset) -> None:
    rows = read_arm(Arm("A", uncached), HOOK)
    known = prefixes(uncached)
    assert Counter(known.values()).most_common(1)[0][1] > 1
    kept = [known[row] for row in rows.row.tolist()]
    assert len(set(kept)) == len(kept)
    assert set(kept) == {prefix for prefix in known.values() if len(prefix) > 1}
    assert rows.n_apart["first_position"] == sum(len(prefix) == 1 for prefix in known.values())
    assert (np.diff(rows.row) > 0).all()


@pytest.mark.parametrize("name", ["cached", "uncached"])
def test_a_held_out_arm_has_no_prefix_that_the_other_side_was_served(
    name: str, request: pytest.FixtureRequest
) -> None:
    dataset: Dataset = request.getfixturevalue(name)
    whole = read_arm(Arm("A", dataset), HOOK)
    rows = read_arm(Arm("A", dataset, held_out=0.4), HOOK)
    tokens = dataset.tokens(HOOK)["request"].to_numpy()
    loader = actds.Loader(
        dataset.path, HOOK, split="train", held_out=0.4, batch=1, provenance=["request"]
    )
    fitted = {int(one["request"][0]) for _, one in loader}
    served = set()
    for number in fitted:
        sequence = dataset.request(number, hook=HOOK).token_id.tolist()
        served |= {tuple(sequence[: n + 1]) for n in range(len(sequence))}
    known = prefixes(dataset)
    own = [row for row in whole.row.tolist() if int(tokens[row]) not in fitted]
    assert 0 < len(rows) < len(own)
    kept = {known[row] for row in rows.row.tolist()}
    assert kept == {known[row] for row in own} - served
    assert rows.n_apart[TRAINED] > 0 and TRAINED not in whole.n_apart


def test_rows_that_repeat_were_computed_in_one_phase_and_run(tmp_path: Path) -> None:
    schedule = simulate(30, 0, cache=False, turns=True)
    make_dataset(tmp_path / "d", schedule=schedule, run="r-1", sealed=False)
    dataset = actds.open(make_dataset(tmp_path / "d", schedule=schedule, run="r-2"))
    rows, tokens = read_arm(Arm("A", dataset), HOOK), dataset.tokens(HOOK, run=True)
    names = ("run", "phase", "position", "token_id")
    one, other = (tokens.select(names).take(part) for part in rows.repeats)
    assert one.equals(other) and 0 < len(one) < rows.n_repeats
    assert not (rows.repeats[0] == rows.repeats[1]).any()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_held_out_arm_has_no_prefix_of_another_phase_of_the_other_side(
    tmp_path: Path, phase: str
) -> None:
    schedule = simulate(40, 0, cache=False, turns=True)
    dataset = actds.open(make_dataset(tmp_path / "d", schedule=schedule))
    rows = read_arm(Arm("A", dataset, phase=phase, held_out=0.5), HOOK)
    tokens, known = dataset.tokens(HOOK)["request"].to_numpy(), prefixes(dataset)
    loader = actds.Loader(
        dataset.path, HOOK, split="train", held_out=0.5, batch=1, provenance=["request"]
    )
    fitted = {int(one["request"][0]) for _, one in loader}
    seen = {prefix for row, prefix in known.items() if int(tokens[row]) in fitted}
    assert len(rows) and {known[row] for row in rows.row.tolist()}.isdisjoint(seen)


def test_pairs_by_token_have_the_same_prefix(cached: Dataset, uncached: Dataset) -> None:
    told, known, _ = contrast(Arm("A", cached), Arm("B", uncached), HOOK)
    assert told.pairing == "token"
    first, second = prefixes(cached), prefixes(uncached)
    one, other = told.pairs
    pairs = zip(told.first.row[one].tolist(), told.second.row[other].tolist(), strict=True)
    for mine, theirs in pairs:
        assert first[mine] == second[theirs]
    # Of a prefix with a lost row the digest of the request still tells.
    assert 0.9 * len(known) < (known.prefix != 0).sum() < len(known)
    common = {first[row] for row in known.row.tolist()} & set(second.values())
    assert len(one) == len(common)
    # A pair stands in one group on both sides.
    assert (told.first.group[one] == told.second.group[other]).all()


@pytest.mark.parametrize("names", ["ab", "aa"], ids=["datasets", "runs"])
def test_other_tokens_of_one_prompt_are_paired_by_position(tmp_path: Path, names: str) -> None:
    schedule = simulate(30, 0, cache=False)
    changed = other_continuations(schedule)
    make_dataset(tmp_path / names[0], schedule=schedule, run="r-1", sealed=names == "ab")
    make_dataset(tmp_path / names[1], schedule=changed, run="r-2")
    sets = {name: actds.open(tmp_path / name) for name in set(names)}
    arms = [
        Arm(name, sets[name], where=f"position >= request.prompt_len and run == 'r-{k}'")
        for k, name in enumerate(names, 1)
    ]
    told, first, second = contrast(*arms, HOOK)
    assert told.pairing == "position"
    at = {int(row): k for k, row in enumerate(first.row)}
    to = {int(row): k for k, row in enumerate(second.row)}
    for mine, theirs in zip(*told.pairs, strict=True):
        i, j = at[int(told.first.row[mine])], to[int(told.second.row[theirs])]
        assert first.position[i] == second.position[j]
        names = first.requests.external_id[first.request[i]]
        assert names == second.requests.external_id[second.request[j]]
        assert first.token_id[i] != second.token_id[j]
    assert len(told.pairs[0]) == len(first)


@pytest.mark.parametrize(("n_common", "pairing"), [(3, "unpaired"), (8, "token")])
def test_prefixes_of_few_requests_are_no_pairing(
    uncached: Dataset, n_common: int, pairing: str
) -> None:
    """Other requests of one template have its first tokens in common, and nothing else."""
    even, odd = (
        read_arm(Arm(name, uncached, where=f"request % 2 == {n}"), HOOK)
        for n, name in enumerate("AB")
    )
    n = len(even) + len(odd)
    hashes = np.arange(1, n + 1, dtype=np.uint64)
    other = replace(odd, prefix=hashes[len(even) :].copy(), token_id=odd.token_id.copy())
    even = replace(even, prefix=hashes[: len(even)])
    for request in np.unique(even.request)[:n_common]:
        mine = int(np.flatnonzero(even.request == request)[0])
        theirs = np.flatnonzero(
            (other.position == even.position[mine]) & (other.prefix > len(even))
        )
        other.prefix[theirs[0]] = even.prefix[mine]
        other.token_id[theirs[0]] = even.token_id[mine]
    assert plan(even, other, same_dataset=True).pairing == pairing


def test_a_text_does_not_choose_the_rows_of_another(tmp_path: Path) -> None:
    """Of other tokens each row stands where its own entropy is, or in no such stratum."""
    schedule = simulate(30, 0, cache=False)
    make_dataset(tmp_path / "a", schedule=schedule, run="r-1", entropy=True)
    make_dataset(tmp_path / "b", schedule=other_continuations(schedule), run="r-2", entropy=True)
    make_dataset(tmp_path / "silent", schedule=schedule, run="r-3")
    arms = {
        name: Arm(name, actds.open(tmp_path / name), where="position >= request.prompt_len")
        for name in ("a", "b", "silent")
    }
    told, *rows = contrast(arms["a"], arms["b"], HOOK)
    edges = entropy_edges(*rows)
    own = [strata_of(of_arm, edges) for of_arm in rows]
    assert told.pairing == "position"
    codes = own[0].codes
    for side, of_arm, strata in zip((told.first, told.second), rows, own, strict=True):
        place = np.searchsorted(of_arm.row, side.row)
        for axis, layer in zip(codes, side.layers, strict=True):
            if axis in ("entropy", "margin"):
                known = layer.stratum >= 0
                assert known.sum() > 50
                assert np.array_equal(layer.stratum[known], strata.codes[axis][place][known])
    told, *_ = contrast(arms["silent"], arms["b"], HOOK)
    known = [told.strata[k].axis for layer in told.first.layers for k in np.unique(layer.stratum)
             if k >= 0]  # fmt: skip
    assert "decode step" in known
    assert not {"entropy", "margin"} & set(known)


def test_an_unpaired_reference_is_weighted_to_tokens_and_positions(uncached: Dataset) -> None:
    # Requests of even and of odd numbers share prompts, and so tokens and positions.
    even, odd = (
        Arm(name, uncached, where=f"request % 2 == {k}") for k, name in enumerate(("even", "odd"))
    )
    told, first, second = contrast(even, odd, HOOK, pairing="unpaired")
    assert told.adjusted and told.pairing == "unpaired"
    sums = []
    for rows, own in ((first, told.first), (second, told.second)):
        layer = own.layers[0]
        assert layer.weight is not None
        cells: Counter[tuple[int, int]] = Counter()
        bands = fine_bands(rows.position)
        for token, band, weight in zip(rows.token_id, bands, layer.weight, strict=True):
            cells[int(token), int(band)] += float(weight)
        sums.append({cell: round(n, 4) for cell, n in cells.items() if n})
    assert sums[0] == sums[1]
    assert 0 < told.coverage < 1


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return rows of which a quarter is stored in busy steps, in another type."""
    schedule = simulate(60, 0, cache=False)
    path = tmp_path_factory.mktemp("drawn") / "acts"
    shares = busy_shares(schedule)
    return actds.open(make_thinned(path, schedule, shares, hooks=[HOOK], dtype="float16"))


def test_rows_that_were_drawn_count_what_they_represent(uncached: Dataset, drawn: Dataset) -> None:
    arms = Arm("A", uncached), Arm("B", drawn)
    rows = read_arm(arms[1], HOOK)
    inclusion = drawn.tokens(HOOK)["inclusion"].to_numpy()[rows.row]
    assert rows.represents is not None and rows.represents.tolist() == (1 / inclusion).tolist()
    assert set(inclusion) == {0.25, 1}
    found = compare([Asked("B-A", *arms, HOOK, [Numerics()], "token")])
    (told,) = found.contrasts
    assert any("the rows of B were drawn" in words for words in told.left_out)
    value = next(v for v in told.values if v.axis == "all" and v.measure == "relative L2")
    plan_of, *_ = contrast(*arms, HOOK, pairing="token")
    a, b = plan_of.first.row[plan_of.pairs[0]], plan_of.second.row[plan_of.pairs[1]]
    a, b = a.astype(np.int64), b.astype(np.int64)
    w = 1 / drawn.tokens(HOOK)["inclusion"].to_numpy()[b]
    x, y = uncached.array(HOOK)[a].astype(float), drawn.array(HOOK)[b].astype(float)
    away = np.linalg.norm(y - x, axis=1) / np.linalg.norm(x, axis=1)
    assert len(a) == told.n_pairs and set(w) == {1, 4}
    assert value.value == pytest.approx(np.average(away, weights=w), rel=1e-5)
    assert value.value != pytest.approx(away.mean(), rel=1e-5)


def test_an_unpaired_reference_is_weighted_to_what_was_drawn_from(
    uncached: Dataset, drawn: Dataset
) -> None:
    arms = Arm("A", uncached), Arm("B", drawn)
    told, first, second = contrast(*arms, HOOK, pairing="unpaired")
    inclusion = drawn.tokens(HOOK)["inclusion"].to_numpy()[second.row]
    mass, sums = [], []
    for rows, own in ((first, told.first), (second, told.second)):
        cells: Counter[tuple[int, int]] = Counter()
        weight = own.layers[0].weight
        assert weight is not None
        for token, band, w in zip(rows.token_id, fine_bands(rows.position), weight, strict=True):
            cells[int(token), int(band)] += float(w)
        sums.append({cell: round(n, 3) for cell, n in cells.items() if n})
        mass.append(float(weight.sum()))
    assert sums[0] == sums[1] and mass[1] > len(second)
    assert told.coverage == pytest.approx(mass[1] / (1 / inclusion).sum())


@pytest.mark.parametrize(("n_both", "n_alone"), [(0, 9), (4, 4), (1, 7), (16, 16), (30, 5)])
def test_every_group_has_requests_of_both_arms(n_both: int, n_alone: int) -> None:
    both, alone = np.arange(n_both), n_both + np.arange(n_alone)
    arms = np.append(both, alone), np.append(both, 100 + alone)
    n, group = groups_of(arms, 0)
    assert n == min(32, n_both + n_alone)
    for clusters in arms:
        sizes = np.bincount(group[clusters], minlength=n)
        assert sizes.min() >= 1 and sizes.max() - sizes.min() <= 1


def test_decode_steps_count_from_the_first_sampled_token(cached: Dataset) -> None:
    rows = read_arm(Arm("A", cached, phase="decode"), HOOK)
    lengths = dict(
        zip(*(cached.requests()[n].to_pylist() for n in ("request", "prompt_len")), strict=True)
    )
    tokens = cached.tokens(HOOK).take(rows.row)
    expected = [
        position - lengths[request] + 1
        for request, position in zip(
            tokens["request"].to_pylist(), tokens["position"].to_pylist(), strict=True
        )
    ]
    assert rows.decode_step.tolist() == expected
    told = strata_of(rows)
    names = [told.strata[k].name if k >= 0 else None for k in told.codes["decode step"]]
    assert all((n == "1") == (s == 1) for n, s in zip(names, expected, strict=True))
    roles = {told.strata[k].name for k in told.codes["role"] if k >= 0}
    assert roles == {"assistant"}
    assert {told.strata[k].name for k in told.codes["kernel mode"]} == {"eager"}


def test_decode_steps_of_a_replay_are_those_of_its_source(tmp_path: Path) -> None:
    """All of a replay is prompt: only its origins say what had been sampled."""
    dataset = actds.open(make_dataset(tmp_path / "d", n_requests=30, cache=False, origins=True))
    rows = read_arm(Arm("R", dataset), HOOK)
    lines = {line["request"]: line["prompt_len"] for line in dataset.requests().to_pylist()}
    given = lines | {
        line["request"]: line["n_given"] for line in dataset.origins(run=False).to_pylist()
    }
    tokens = dataset.tokens(HOOK).take(rows.row).to_pylist()
    assert rows.decode_step.tolist() == [t["position"] - given[t["request"]] + 1 for t in tokens]
    assert given != lines and max(lines) not in dataset.origins()["request"].to_pylist()


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Dataset]:
    """The same requests twice, with what the logits said of each sampled token."""
    folder = tmp_path_factory.mktemp("sampled")
    made = [make_dataset(folder / n, n_requests=160, seed=1, cache=False, entropy=True)
            for n in ("a", "b")]  # fmt: skip
    return actds.open(made[0]), actds.open(made[1])


def test_rows_know_what_was_sampled_after_them(sampled: tuple[Dataset, Dataset]) -> None:
    dataset = sampled[0]
    rows = read_arm(Arm("A", dataset), HOOK)
    assert rows.sampled is not None
    lines = {(one["request"], one["position"]): one for one in dataset.sampled().to_pylist()}
    tokens = dataset.tokens(HOOK).take(rows.row).to_pylist()
    after = [lines.get((t["request"], t["position"] + 1)) for t in tokens]
    assert {one is None for one in after} == {True, False}
    assert rows.sampled.token_id.tolist() == [-1 if a is None else a["token_id"] for a in after]
    for name in ("entropy", "margin"):
        wanted = [np.nan if a is None else a[name] for a in after]
        assert np.array_equal(getattr(rows.sampled, name), np.float32(wanted), equal_nan=True)


def test_sampled_tokens_may_be_as_large_as_the_format_lets_them(tmp_path: Path) -> None:
    schedule = simulate(12, 0, cache=False)
    ids = [[token + (1 << 31) for token in tokens] for tokens in schedule.token_ids]
    large = replace(schedule, token_ids=ids)
    dataset = actds.open(make_dataset(tmp_path / "d", schedule=large, entropy=True))
    after = read_arm(Arm("A", dataset, phase="decode"), HOOK).sampled
    assert after is not None and len(after.token_id)
    assert set(after.token_id.tolist()) <= {token for tokens in ids for token in tokens}


def test_entropies_divide_by_the_quintiles_of_the_reference(
    sampled: tuple[Dataset, Dataset],
) -> None:
    one, other = (Arm(name, dataset) for name, dataset in zip("AB", sampled, strict=True))
    told, rows, _ = contrast(one, other, HOOK, pairing="unpaired", adjust=False)
    assert rows.sampled is not None
    # The last token of a prompt is one of some thousand that were given: it is in no quintile.
    known = np.isfinite(rows.sampled.entropy)
    assert (known & (rows.decode_step == 0)).any()
    entropy = rows.sampled.entropy[known & (rows.decode_step > 0)]
    assert entropy_edges(rows, rows) == pytest.approx(np.quantile(entropy, [0.2, 0.4, 0.6, 0.8]))
    layer = next(
        one for one in told.first.layers if told.strata[one.stratum.max()].axis == "entropy"
    )
    counts = Counter(told.strata[k].name for k in layer.stratum[layer.stratum >= 0])
    assert sorted(counts) == [f"quintile {k}" for k in range(1, 6)]
    assert max(counts.values()) - min(counts.values()) <= 2
    assert sum(counts.values()) == len(entropy)


def test_a_band_holds_its_upper_edge() -> None:
    values = np.array([0, 0.1, 0.5, 1, 3, 4, 5, np.nan])
    bands = banded(values.astype(np.float32), np.array(MARGIN_EDGES, np.float32))
    assert bands.tolist() == [0, 0, 1, 1, 2, 2, 3, -1]


def test_forks_are_counted_where_both_sampled_the_next_token(
    sampled: tuple[Dataset, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third token of small margin is made another one in what is read of the second arm."""

    def other(arm: Arm, hook: str) -> ArmRows:
        rows = read_arm(arm, hook)
        if arm.name == "A" or rows.sampled is None:
            return rows
        token = rows.sampled.token_id.copy()
        token[np.flatnonzero(rows.sampled.margin <= 1)[::3]] += 1
        return replace(rows, sampled=replace(rows.sampled, token_id=token))

    monkeypatch.setattr(contrast_module, "read_arm", other)
    arms = [Arm(name, dataset) for name, dataset in zip("AB", sampled, strict=True)]
    found = compare([Asked("B-A", *arms, HOOK, [Numerics()], "token")])
    told = {(v.axis, v.stratum): v.value for v in found.contrasts[0].values
            if v.measure == "forks of the sampled token"}  # fmt: skip
    rows = read_arm(arms[0], HOOK)
    assert rows.sampled is not None
    paired = rows.sampled.token_id >= 0  # behind a lost token too: the digests are equal
    assert (rows.prefix[paired] == 0).any()
    changed = np.zeros(len(rows), bool)
    changed[np.flatnonzero(rows.sampled.margin <= 1)[::3]] = True
    assert told["all", "all"] == pytest.approx(changed[paired].mean())
    assert told["margin", "1 to 4"] == 0
    close = told["margin", "0.1 to 1"]
    assert close is not None and close > 0.1


def test_equal_tokens_in_another_type_carry_over(cached: Dataset, uncached: Dataset) -> None:
    limits = Limits(outliers=0.5)  # of a few dozen rows, no small rate can be excluded
    asked = Asked("b-a", Arm("A", cached), Arm("B", uncached), HOOK, [Moments(), Numerics()])
    found = compare([asked], limits)
    told = found.contrasts[0]
    assert {v.instrument: v.outcome for v in told.verdicts} == {
        "moments": "carries over",
        "numerics": "carries over",
    }
    everything = next(q for q in told.quantiles if q.axis == "all" and q.measure == "relative L2")
    a, b = cached.array(HOOK), uncached.array(HOOK)
    first, second = prefixes(cached), {p: row for row, p in prefixes(uncached).items()}
    pairs = [(row, second[p]) for row, p in first.items() if len(p) > 1 and p in second]
    x, y = (
        array[np.array(rows)] for array, rows in zip((a, b), zip(*pairs, strict=True), strict=True)
    )
    away = np.linalg.norm(y - x, axis=1) / np.linalg.norm(x, axis=1)
    assert everything.p100 == pytest.approx(away.max(), rel=1e-5)
    assert everything.p50 == pytest.approx(np.median(away), rel=0.02)
    assert everything.n_pairs == told.n_pairs


def test_what_is_measured_of_pairs_is_not_its_own_floor(cached: Dataset, uncached: Dataset) -> None:
    asked = Asked("b-a", Arm("A", cached), Arm("B", uncached), HOOK, [Numerics()])
    values = compare([asked]).contrasts[0].values
    assert any(v.measure == "cosine distance" and v.value is not None for v in values)
    # A floor is of tokens that one arm computed twice, and the note says so; else there is none.
    assert all(v.floor is None or v.note.startswith("floor: ") for v in values)


def test_the_same_rows_are_equal_to_the_bit(cached: Dataset, tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", n_requests=30, roles=True, dtype="float32", run="r-again")
    again = actds.open(path)
    asked = Asked("a-a", Arm("A", cached), Arm("B", again), HOOK, [Numerics()])
    values = compare([asked]).contrasts[0].values
    equal = next(v for v in values if v.measure == "equal to the bit" and v.axis == "all")
    assert equal.value == 1
    far = next(v for v in values if v.measure == "relative L2" and v.axis == "all")
    assert far.value == 0 and far.outcome == "carries over"


def test_a_result_survives_json(cached: Dataset, uncached: Dataset) -> None:
    asked = Asked("b-a", Arm("A", cached), Arm("B", uncached), HOOK, [Moments()])
    found = compare([asked])
    text = found.to_json()
    assert '"schema": "actds.regimes/1"' in text
    assert Regimes.from_json(text) == found
    # The same question has the same answer to the bit.
    again = Asked("b-a", Arm("A", cached), Arm("B", uncached), HOOK, [Moments()])
    assert compare([again]).to_json() == text


def test_arms_without_tokens_in_common_are_undecided(uncached: Dataset) -> None:
    arms = Arm("H", uncached, phase="prefill"), Arm("G", uncached, phase="decode")
    told = compare([Asked("G-H", *arms, HOOK, [Moments()])]).contrasts[0]
    assert told.pairing == "unpaired" and told.coverage == 0
    assert [v.outcome for v in told.verdicts] == ["undecided"]
    assert "no row of one arm has a row of the other" in told.verdicts[0].short[0]


def test_refuses_what_cannot_be_compared(cached: Dataset, tmp_path: Path) -> None:
    whole = Arm("A", cached)
    with pytest.raises(ActdsError, match=r"E014 arm A.*resid_post.9"):
        contrast(whole, whole, "resid_post.9")
    few = Arm("few", cached, where="request < 5")
    with pytest.raises(ActdsError, match=r"E014 arm few.*requests"):
        contrast(whole, few, HOOK)
    wide = actds.open(make_dataset(tmp_path / "wide", d_model=8))
    with pytest.raises(ActdsError, match=r"E014 arm W.*8 channels"):
        contrast(whole, Arm("W", wide), HOOK)
    other = actds.open(make_dataset(tmp_path / "other", n_requests=20, seed=5))
    with pytest.raises(ActdsError, match=r"E014 arms A and O.*pair by token"):
        contrast(whole, Arm("O", other), HOOK, pairing="token")
