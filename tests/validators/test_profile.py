"""Profiles and alerts: the promised rate is kept, planted departures are found, others refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner, Result

import actds
from actds.cli import cli
from actds.errors import ActdsError
from actds.format.profile import (
    KINDS,
    OPENING,
    REGIME,
    Calibration,
    Look,
    Profile,
    Tail,
    Trajectories,
)
from actds.format.readouts import Readouts
from actds.format.tables import is_served
from actds_studies.alerts import AlertLimits, Alerts
from actds_studies.monitoring import Rows, fit, score
from actds_studies.pages.monitoring import alerts_page
from actds_testing.places import SCHEMAS
from actds_testing.synthetic import make_dataset

HOOKS = ["resid_post.0", "resid_post.1"]
WIDTH = 17
REGIME_OF_FIT = {name: "x" for name in (*REGIME, "hooks")}
ORIGIN: dict[str, Any] = {
    "dataset": "d", "digest": "0" * 64, "regime": REGIME_OF_FIT, "hooks": HOOKS,
}  # fmt: skip
Plant = Callable[[np.ndarray, int], None]
"""Changes a request's values ``(length, n_hooks, products)`` from the end of its prompt on."""


def make_rows(n: int, seed: int, plant: Plant | None = None) -> Rows:
    """Return requests whose rows wander about a point of each, with heavy tails."""
    rng = np.random.default_rng(seed)
    prompts, answers = rng.integers(4, 30, n), rng.integers(6, 90, n)
    mix = np.random.default_rng(99).normal(size=(WIDTH - 1, WIDTH - 1))
    parts, of = [], np.repeat(np.arange(n), prompts + answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        noise = rng.standard_t(5, size=(prompt + answer, len(HOOKS), WIDTH - 1))
        values = (0.5 * rng.normal(size=(len(HOOKS), WIDTH - 1)) + noise) @ mix
        if plant is not None:
            plant(values, prompt)
        parts.append(values)
    position = np.concatenate([np.arange(len(part)) for part in parts])
    norm = np.exp(rng.normal(3, 0.1, size=(len(of), len(HOOKS), 1)))
    readouts = np.concatenate([norm, norm * np.concatenate(parts)], axis=2).astype(np.float32)
    depth = position - prompts[of]
    entropy = rng.exponential(1, len(of))
    role = np.where(depth < 0, "user", "assistant")
    names, runs = np.array([f"q{k}" for k in range(n)]), np.full(n, "r")
    return Rows(
        runs, np.arange(n), names, of, position, depth, readouts, role, entropy, 0, 0
    )  # fmt: skip


def shifted(values: np.ndarray, start: int) -> None:
    values[start:] += 3 * np.sign(values[start:].mean(axis=(0, 1)))


def looping(values: np.ndarray, start: int) -> None:
    again = values[start : start + 2].copy()
    for at in range(start, len(values)):
        values[at] = again[(at - start) % len(again)]


def asked(values: np.ndarray, start: int) -> None:
    values[start - 4 : start] += 4


def made(rows: Rows, look: Look | None = None, alpha: float = 0.05, seed: int = 0) -> Profile:
    return fit(rows, ORIGIN, look or Look(), alpha, (0.25, 0.25), seed)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return made(make_rows(600, 1), Look(every=2))


@pytest.mark.full
def test_the_promised_rate_is_kept_over_splits_and_seeds() -> None:
    n = alerts = 0
    for seed in range(12):
        kept = made(make_rows(320, seed), alpha=0.1, seed=seed).kept[0]
        n, alerts = n + kept.n, alerts + kept.n_alerts
    # 960 requests; the standard error of the mean over 12 thresholds and checks is 0.014.
    assert 0.06 < alerts / n < 0.1 + 0.04


@pytest.mark.parametrize(("n", "rank"), [(18, None), (19, 19), (20, 20), (39, 38), (100, 96)])
def test_too_few_held_out_requests_are_undecided(n: int, rank: int | None) -> None:
    calibration = Calibration.of(np.arange(1, n + 1)[::-1].astype(float), 0.05)
    assert calibration.threshold == (None if rank is None else pytest.approx(rank, rel=1e-8))
    assert calibration.threshold is None or calibration.threshold > calibration.rank


@pytest.mark.parametrize(
    ("plant", "kind"), [(shifted, "drift"), (looping, "drift"), (asked, "opening")]
)
def test_a_planted_departure_is_found_by_what_it_changes(
    profile: Profile, plant: Plant, kind: str
) -> None:
    share, kinds, depth = power(profile, make_rows(200, 2, plant))
    assert share > 0.8
    assert np.mean(kinds == KINDS.index(kind)) > 0.9
    assert np.mean(depth < 0) == (kind == "opening") or np.mean(depth >= 0) > 0.9


def power(profile: Profile, rows: Rows) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the share of requests that alert, and kinds and depths of their alerts."""
    assert profile.calibration.threshold is not None
    scored = score(profile, rows)
    first = scored.first_above(profile.calibration.threshold)
    at = list(first.values())
    return len(first) / len(rows.requests), scored.kind[at], scored.rows.depth[at]


def test_rows_one_by_one_have_the_scores_of_the_whole_dataset(profile: Profile) -> None:
    rows = make_rows(70, 4)
    rng, state = np.random.default_rng(5), Trajectories(profile)
    state.look(["gone"], rows.readouts[:1], rows.depth[:1])  # its slot is used again
    state.end("gone")
    ahead = [
        list(np.flatnonzero((rows.of == k) & profile.look.rows(rows.depth))) for k in range(70)
    ]
    last = np.zeros(70)
    while waiting := [k for k, rest in enumerate(ahead) if rest]:
        batch = rng.permutation(waiting)[: rng.integers(1, 9)]
        at = np.array([ahead[k].pop(0) for k in batch])
        scores = state.look(batch.tolist(), rows.readouts[at], rows.depth[at])
        assert (scores >= last[batch]).all(), "a score never falls"
        last[batch] = scores
    assert np.allclose(last, score(profile, rows).last, rtol=1e-10, atol=0)
    assert len(state) == 70


def test_a_row_that_is_not_finite_is_as_unusual_as_a_row_can_be(profile: Profile) -> None:
    rows = make_rows(3, 6)
    rows.readouts[(rows.of == 0) & (rows.depth >= 0)] = np.nan
    last = score(profile, rows).last
    assert np.isfinite(last).all()
    assert last[0] > max(last[1:])


def test_requests_are_chosen_by_hash_again_and_within_a_larger_share() -> None:
    request = np.arange(4000)
    some, more = (Look(share=share).requests("r", request) for share in (0.1, 0.3))
    assert 0.08 < some.mean() < 0.12
    assert more[some].all()
    assert np.array_equal(some, Look(share=0.1).requests("r", request))
    assert np.array_equal(some[::-1], Look(share=0.1).requests("r", request[::-1]))
    for other in (
        Look(share=0.1, salt="1").requests("r", request),
        Look(share=0.1).requests("s", request),
    ):
        assert (some & other).mean() < 0.02


def test_looks_are_at_the_steps_and_entropies_of_the_profile() -> None:
    rows = make_rows(300, 7)
    rows.entropy[::3] = np.nan
    profile = made(rows, Look(every=3, above=1.0))
    seen = score(profile, rows).rows
    begun = seen.depth >= 0
    assert (seen.depth[begun] % 3 == 0).all() and (seen.depth >= -OPENING).all()
    assert (seen.entropy[begun] >= 1).all() and (~begun).sum() == 300 * OPENING
    entropies = (rows.depth >= 0) & (rows.depth % 3 == 0) & (rows.entropy >= 1)
    assert begun.sum() == entropies.sum()


def test_a_tail_is_one_nat_on_average_and_rises_beyond_the_fit() -> None:
    values = np.random.default_rng(0).normal(size=20_000) ** 2
    tail = Tail.of(values)
    assert abs(tail.nats(values).mean() - 1) < 0.03
    beyond = tail.nats(values.max() * np.array([1.0, 1.5, 2.0, 1e9, np.nan]))
    assert (np.diff(beyond[:4]) > 0).all()
    assert beyond[3] == beyond[4] == 50


@pytest.mark.parametrize("name", REGIME_OF_FIT)
@pytest.mark.parametrize("value", ["y", None])
def test_another_or_an_unknown_regime_is_refused(
    profile: Profile, name: str, value: str | None
) -> None:
    profile.require(REGIME_OF_FIT, "here")
    with pytest.raises(ActdsError, match=rf"(?s)E024 here: {name} .*actds profile") as caught:
        profile.require({**REGIME_OF_FIT, name: value}, "here")
    assert ("not recorded" in str(caught.value)) is (value is None)
    unknown = profile.model_copy(update={"regime": {**REGIME_OF_FIT, name: None}})
    assert unknown.differences({**REGIME_OF_FIT, name: None}), "nobody knows that they are the same"


def test_a_profile_file_is_the_profile_and_a_changed_one_is_refused(
    profile: Profile, tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(profile.as_bytes())
    assert Profile.read(path).as_bytes() == profile.as_bytes()
    fields = json.loads(path.read_bytes())
    assert fields["sha256"] == profile.sha256
    bare = {name: value for name, value in fields.items() if name != "sha256"}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":")) + "\n"
    assert hashlib.sha256(text.encode()).hexdigest() == fields["sha256"]
    schema = json.loads((SCHEMAS / "profile.json").read_text())
    jsonschema.validate(fields, schema)
    fields["calibration"]["threshold"] = 99.0
    for data in (json.dumps(fields), "{}", "[]", "no json", json.dumps({**fields, "hooks": 3})):
        path.write_text(data)
        with pytest.raises(ActdsError, match="E024"):
            Profile.read(path)
    with pytest.raises(ActdsError, match="E024"):
        Profile.read(tmp_path / "none.json")


# ---- datasets and commands

FACTS = {
    "model.weights_sha256": "a" * 64,
    "numerics.dtype": "bfloat16",
    "numerics.kv_cache_dtype": "bfloat16",
}


def write(path: Path, seed: int = 0, **more: Any) -> Path:
    facts = {**FACTS, **more.pop("facts", {})}
    return make_dataset(
        path, n_requests=160, seed=seed, readouts=Readouts(4, 0), entropy=True, facts=facts, **more
    )


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_a_dataset_is_scored_beside_the_profile_of_another(tmp_path: Path) -> None:
    acts, more = write(tmp_path / "acts", drops=True), write(tmp_path / "more", seed=1)
    profile = tmp_path / "profile.json"
    done = run("profile", acts, "-o", profile, "--alpha", 0.1, "--every", 1)
    assert done.exit_code == 0, done.output
    assert "promised   10 % of the requests" in done.output
    page, out = tmp_path / "alerts.html", tmp_path / "alerts.json"
    done = run("alerts", more, "--profile", profile, "--html", page, "--json", out)
    assert done.exit_code in (0, 1), done.output
    result = Alerts.from_json(out.read_text())
    assert (done.exit_code == 1) is (result.answer.outcome == "departed")
    opened = actds.open(more)
    assert result.digest == opened.digest
    assert result.profile_digest == actds.open(acts).digest
    served = opened.requests().filter(is_served(opened.requests())).num_rows
    assert result.rates[0].n == result.n_requests == served
    read = opened.readouts().to_pandas()
    read = read[read.hook == HOOKS[0]]
    prompt_len = opened.requests().to_pandas().set_index("request").prompt_len
    depth = read.position.astype(int) - read.request.map(prompt_len).astype(int)
    assert result.n_looks == int((depth >= -OPENING).sum()), "rows that were lost have readouts"
    assert result.answer.words in page.read_text().replace("&#39;", "'")
    for alert in result.alerts:
        assert alert.score > result.calibration.threshold
        tokens = opened.request(alert.request).token_id[: alert.position + 1].tolist()
        assert alert.before.split() == [str(token) for token in tokens[-24:]]


def test_a_dataset_of_other_weights_is_scored_only_when_asked_to(tmp_path: Path) -> None:
    acts = write(tmp_path / "acts")
    other = write(tmp_path / "other", facts={"model.weights_sha256": "b" * 64})
    unknown = write(tmp_path / "unknown", facts={"model.weights_sha256": None})
    profile = actds.profile(acts, alpha=0.2)
    for path, words in ((other, "bbbb"), (unknown, "not recorded")):
        with pytest.raises(ActdsError, match=rf"E024 .*model.weights_sha256 {words}"):
            actds.alerts(path, profile)
        result = actds.alerts(path, profile, other_regime=True)
        assert [words.partition(" ")[0] for words in result.differences] == ["model.weights_sha256"]
        assert result.answer.outcome != "in the regime", "the record says that it is another one"
    readouts = make_dataset(tmp_path / "more", n_requests=20, readouts=Readouts(5, 0), facts=FACTS)
    with pytest.raises(ActdsError, match=r"E024 .*capture\.readouts"):
        actds.alerts(readouts, profile, other_regime=True)
    (tmp_path / "p.json").write_bytes(profile.as_bytes())
    assert run("alerts", other, "--profile", tmp_path / "p.json").exit_code == 2


def test_a_profile_of_few_requests_promises_nothing_and_alerts_nobody(tmp_path: Path) -> None:
    acts = write(tmp_path / "acts")
    profile = actds.profile(acts, alpha=0.01)
    assert profile.calibration.threshold is None
    result = actds.alerts(acts, profile)
    assert result.answer.outcome == "undecided"
    assert not result.alerts and not result.rates
    assert "99 held-out requests" in result.answer.next_steps[0]


def test_as_many_alerts_as_in_the_regime_are_no_departure(tmp_path: Path) -> None:
    acts = write(tmp_path / "acts")
    profile = actds.profile(acts, alpha=0.2)
    result = actds.alerts(acts, profile, limits=AlertLimits(p=1e-6))
    assert result.answer.outcome == "in the regime"
    assert result.p is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"alpha": 0.0}, "E009 alpha"),
        ({"calibration": 0.6, "check": 0.5}, "E009 c"),
        ({"hooks": ["resid_post.9"]}, "E014"),
    ],
)
def test_arguments_out_of_range_are_refused(
    dataset_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ActdsError, match=words):
        actds.profile(dataset_path, **arguments)


def test_a_dataset_without_readouts_or_entropy_is_refused(
    dataset_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(ActdsError, match=r"E014 .*readouts"):
        actds.profile(dataset_path)
    acts = make_dataset(tmp_path / "acts", readouts=Readouts(4, 0), facts=FACTS)
    with pytest.raises(ActdsError, match=r"E014 .*entropy"):
        actds.profile(acts, above=1.0)


def test_a_share_of_the_requests_is_scored_as_if_all_were(tmp_path: Path) -> None:
    acts = write(tmp_path / "acts")
    whole, half = (actds.profile(acts, alpha=0.2, share=share) for share in (1.0, 0.5))
    assert half.calibration == whole.calibration, "the threshold is that of every request"
    every, some = actds.alerts(acts, whole), actds.alerts(acts, half)
    assert 0.3 < some.n_seen / some.n_requests < 0.7
    assert some.rates[0].n == some.n_seen
    assert {a.request for a in some.alerts} <= {a.request for a in every.alerts}
    assert "by hash" in "".join(line.text for line in alerts_page(some, "").lines())


class Evil:
    """Decodes every token to markup."""

    def decode(self, token_ids: list[int]) -> str:
        return "<script>alert(1)</script>\x1b[31m"


def test_the_text_of_alerts_does_no_harm_to_page_or_terminal(tmp_path: Path) -> None:
    acts = write(tmp_path / "acts")
    profile = actds.profile(acts, alpha=0.2)
    low = profile.calibration.model_copy(update={"threshold": 0.0})
    result = actds.alerts(acts, profile.model_copy(update={"calibration": low}), tokenizer=Evil())
    assert len(result.alerts) > 50
    page = alerts_page(result, "actds alerts")
    assert "<script" not in page.html() and "&lt;script" in page.html()
    assert "This page holds text of requests" in page.html()
    assert "\x1b" not in "".join(line.text for line in page.lines())
