"""A steering study finds what was planted: effects that decay, reverse, hold, or are none."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds.explore.requests import token_sequences
from actds_studies.pages.steer import page
from actds_studies.regimes.entropies import Unembedding
from actds_studies.stability.result import SteeredPair
from actds_studies.stability.steering import steered
from actds_studies.steer.api import REFIT_SHARES, steer
from actds_studies.steer.measure import (
    Read,
    along,
    calibrated,
    decay_of,
    effects_of,
    estimate,
    prove,
    strength_at,
    survival_of,
)
from actds_studies.steer.refit import Acted, components_of, places_of
from actds_studies.steer.replays import chosen, prompt_of
from actds_studies.steer.result import ARMS, SIDES, Components, Limits, Steering
from actds_testing import harvest as h
from actds_testing.tiny import make_random_model

STEPS = [1, 10, 50, 200]
D, N = 32, 16


def planted(law: Any, seed: int, *, size: float = 1.0, noise: float = 0.15) -> Read:
    """Return effects of a toy model: a change of length ``law(t)`` along one direction.

    The divergence is half the squared length of the change, as of normal distributions; requests
    differ in how far they are moved, and every change has noise in all directions.
    """
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=D)
    direction /= np.linalg.norm(direction)
    moved = size * np.exp(0.2 * rng.normal(size=(N, 1))) * np.array([law(t) for t in STEPS])
    change = moved[..., np.newaxis] * direction
    change = change + noise / np.sqrt(D) * rng.normal(size=change.shape)
    divergence = (change**2).sum(axis=2) / 2
    return Read("held", "vector", 1.0, 5, divergence, change.astype(np.float32), np.arange(N))


def outcome(read: Read, seed: int) -> tuple[str, str | None]:
    # A vector of zeros moves by the noise alone.
    floor = estimate(planted(lambda t: 0.0, 1000 + seed).divergence.mean(axis=1), np.arange(N))
    effects = effects_of(read, STEPS)
    decay = decay_of(read, effects, floor, Limits())
    return decay.outcome, decay.reason


@pytest.mark.parametrize(
    ("law", "size", "wanted"),
    [
        (lambda t: np.exp(-t / 100), 1.0, "decays"),
        (lambda t: 1.0, 1.0, "holds"),
        (lambda t: 1.0 if t < 50 else -0.8, 1.0, "reverses"),
        (lambda t: 1.0, 0.0, "undecided"),
    ],
)
def test_what_was_planted_is_found_and_nothing_else(law: Any, size: float, wanted: str) -> None:
    found = [outcome(planted(law, seed, size=size), seed) for seed in range(20)]
    assert sum(got == wanted for got, _ in found) >= 19, found
    if wanted == "undecided":
        assert all("no more than numerics" in str(reason) for _, reason in found[:1])


def test_the_ratio_is_that_of_the_law() -> None:
    read = planted(lambda t: np.exp(-t / 100), 3)
    decay = decay_of(read, effects_of(read, STEPS), None, Limits())
    for step, ratio in zip(STEPS, decay.ratio, strict=True):
        assert ratio is not None
        law = np.exp(-2 * (step - 1) / 100)  # of squares
        assert ratio.low - 0.03 <= law <= ratio.high + 0.03
    assert decay.isotonic == sorted(decay.isotonic, reverse=True)


def test_a_change_along_the_others_is_not_its_own() -> None:
    """Of noise alone nothing is along the mean of the others; of a shared change all of it is."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(400, 2, D))
    signed = along(noise, np.arange(400))
    assert abs(signed[:, 1].mean()) < 0.5 and abs(np.median(signed[:, 0])) < 0.5
    # Answers to one prompt share their noise: none of it is along the others'.
    shared = along(np.repeat(noise[:100], 4, axis=0), np.repeat(np.arange(100), 4))
    assert abs(shared[:, 0].mean()) < 0.75
    shared = np.ones((8, 2, D)) * np.array([1.0, -0.5])[:, np.newaxis]
    np.testing.assert_allclose(along(shared, np.arange(8)), [[1.0, -0.5]] * 8)


def test_the_dose_is_where_the_curve_crosses() -> None:
    curve = [(s, 0.25 * s**2) for s in (0.5, 1.0, 2.0, 4.0)]
    assert strength_at(curve, 1.0) == pytest.approx(2.0)
    assert strength_at(curve, 0.5) == pytest.approx(2**0.5)
    assert strength_at(curve, 100.0) is None
    assert strength_at(curve, 0.01) is None


@pytest.mark.parametrize(("scale", "lowest"), [(1e-4, 0), (1e4, -8), (1e12, None)])
def test_a_dose_beyond_the_grid_is_looked_for_until_it_is_bracketed(
    scale: float, lowest: int | None
) -> None:
    """A vector of which the weakest strength is too much has a dose below it, or none."""
    served: list[list[float]] = []

    def quantiles(shares: Any) -> list[float]:
        served.append(list(shares))
        return [scale * share**2 for share in shares]

    if lowest is None:
        with pytest.raises(ActdsError, match="less than 1 nats at the weakest strength"):
            calibrated(quantiles, 1.0)
    else:
        curve, strength = calibrated(quantiles, 1.0)
        assert strength == pytest.approx(scale**-0.5) and curve == sorted(curve)
        assert curve[0][1] < 1 <= curve[-1][1]
    assert len(served) <= 1 + 3
    # Nothing is ever too weak without an end, either.
    with pytest.raises(ActdsError, match=r"0 nats at 0\.0156 of a row to 0 nats at"):
        calibrated(lambda shares: [0.0] * len(shares), 1.0)


def test_answers_to_one_prompt_count_once() -> None:
    """Four times the same answers have the interval of one, and not one of half the width."""
    read = planted(lambda t: np.exp(-t / 100), 0)
    every = np.repeat(np.arange(N), 4)
    several = replace(
        read, divergence=read.divergence[every], change=read.change[every], group=every
    )
    for once, four in zip(effects_of(read, STEPS), effects_of(several, STEPS), strict=True):
        for name in ("divergence", "along"):
            first, second = getattr(once, name), getattr(four, name)
            assert (second.low, second.high) == pytest.approx((first.low, first.high))
    alone = estimate(several.divergence[:, 0], np.arange(4 * N))
    assert alone is not None and once.divergence is not None
    first = effects_of(read, STEPS)[0].divergence
    assert first is not None and alone.high - alone.low < 0.6 * (first.high - first.low)


def test_what_collapses_or_loops_does_not_survive() -> None:
    rng = np.random.default_rng(0)

    def looks(entropy: float, repeats: float, n: int = 40) -> Any:
        return np.stack([rng.normal(entropy, 0.3, n), rng.beta(1, 20, n) + repeats], axis=1)

    like = looks(2.5, 0.0)
    for values, dose, low, high in (
        (looks(2.5, 0.0), 0.0, 0.7, 1.0),
        (looks(0.4, 0.0), 1.0, 0.0, 0.1),  # one token for all
        (looks(6.0, 0.0), 2.0, 0.0, 0.1),  # noise
        (looks(2.5, 0.7), 4.0, 0.0, 0.1),  # a loop
    ):
        found = survival_of(like, values, 1, dose)
        assert found.share is not None and found.n == 40
        assert low <= found.share.value <= high and found.share.low < found.share.high, found
    assert survival_of(like, looks(2.5, 0.0, 0), 1, 1.0).share is None


# regime or component ------------------------------------------------------------------------------


def toy(seed: int, *, cosine: float, gain: float, carried: float = 1.0) -> Components:
    """Return what a linear model says, whose answers read another direction, or read it less.

    A row of prompts is read along one direction, one of answers along another with ``cosine`` to it
    and by ``gain``; what is read moves the aim, and whatever is added moves all else a little.
    Directions are fitted on noisy rows of two classes, and requests differ in how far they move.
    """
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(D, 2)))[0].T
    reads = {"prompts": basis[0], "answers": cosine * basis[0] + (1 - cosine**2) ** 0.5 * basis[1]}
    gains = {"prompts": 1.0, "answers": gain}
    fitted, halves = [], {}
    for side in SIDES:
        noise = rng.normal(size=(2, 800, D)) * 2
        both = (carried if side == "answers" else 1.0) * reads[side] + noise.mean(axis=1)
        both /= np.linalg.norm(both, axis=1, keepdims=True)
        halves[side] = float(both[0] @ both[1])
        fitted.append(both.sum(axis=0) / np.linalg.norm(both.sum(axis=0)))
    random = rng.normal(size=D)
    fitted.append(random / np.linalg.norm(random))
    other = 0.6 * rng.normal(size=(D, D)) / np.sqrt(D)
    shares, group = 2.0 ** np.arange(-2, 5), np.repeat(np.arange(N), 4)
    acted = {}
    for name, (side, vector) in ARMS.items():
        size = np.exp(0.2 * rng.normal(size=(len(group), 1))) * shares
        along = size * gains[side] * float(reads[side] @ fitted[vector])
        rest = size * float(np.linalg.norm(other @ fitted[vector]))
        aimed = along + 0.1 * shares * rng.normal(size=(len(group), 1))
        acted[name] = Acted(aimed, (aimed**2 + rest**2) / 2, group)
    return components_of(
        acted,
        shares,
        Limits(),
        {"positions": [(40, N)], "cosine": float(fitted[0] @ fitted[1]), "split_half": halves},
    )


@pytest.mark.parametrize(
    ("planted", "wanted"),
    [
        ({"cosine": 0.1, "gain": 1.0}, "regime"),
        ({"cosine": 1.0, "gain": 0.15}, "component"),
        ({"cosine": 1.0, "gain": 1.0}, "neither lost"),
        # The rows of answers tell nothing of the direction: a refit of noise is no evidence.
        ({"cosine": 0.1, "gain": 1.0, "carried": 0.0}, "undecided"),
        # Both: half of it comes back.
        ({"cosine": 0.1, "gain": 0.5}, "undecided"),
    ],
)
def test_a_regime_is_told_from_a_component(planted: dict[str, float], wanted: str) -> None:
    found = [toy(seed, **planted) for seed in range(20)]  # type: ignore[arg-type]
    assert sum(c.outcome == wanted for c in found) >= 19, [(c.by_dosing, c.restored) for c in found]
    assert all((c.reason is None) == (c.outcome != "undecided") for c in found)


def test_an_arm_whose_dose_was_not_served_decides_nothing() -> None:
    weak = {n: Acted(np.ones((8, 2)), np.full((8, 2), 0.1), np.arange(8)) for n in ARMS}
    about = {"positions": [(9, 8)], "cosine": 1.0, "split_half": dict.fromkeys(SIDES, 1.0)}
    result = components_of(weak, np.array([1.0, 2.0]), Limits(), about)
    assert result.outcome == "undecided"
    assert all(arm.aimed is None and arm.share is None for arm in result.arms)


# matched features ---------------------------------------------------------------------------------


def test_doses_and_decays_of_matched_features_are_those_that_were_planted() -> None:
    """Toy dictionaries: a feature's dose and law are known by its direction."""
    rng, n = np.random.default_rng(2), 12
    first, other = (np.linalg.qr(rng.normal(size=(D, D)))[0][:n] for _ in range(2))
    gains = [np.exp(rng.normal(size=n)), np.exp(rng.normal(size=n))]
    gains[1] = gains[0] / (2.5 * np.exp(0.1 * rng.normal(size=n)))
    laws = {True: lambda t: 1.0, False: lambda t: np.exp(-t / 40)}
    holds = [np.ones(n, bool), np.arange(n) < 9]

    def measure(units: np.ndarray) -> list[Any]:
        found = []
        for unit in units:
            near = [np.abs(of @ unit) for of in (first, other)]
            side = int(near[1].max() > near[0].max())
            k = int(near[side].argmax())
            curve = [(2.0**p, (gains[side][k] * 2.0**p) ** 2 / 2) for p in range(-9, 9)]
            read = planted(laws[bool(holds[side][k])], 7 * k + side)
            decay = decay_of(read, effects_of(read, STEPS), None, Limits())
            found.append((strength_at(curve, 1.0), decay))
        return found

    def of(arm: str, kind: Any, second: np.ndarray) -> list[Any]:
        return [
            (SteeredPair(arm=arm, kind=kind, features=(k, k), cosine=0.5), 3 * first[k], second[k])
            for k in range(n)
        ]

    pairs = of("prefill", "other order", first) + of("decode", "same start", 2 * other)
    result = steered(pairs, measure, STEPS, N)
    floor, arm = result.arms
    assert (floor.ratio, floor.low, floor.high, floor.agree) == (1.0, 1.0, 1.0, 1.0)
    assert arm.ratio == pytest.approx(np.median(gains[0] / gains[1]), rel=1e-3)
    assert arm.low is not None and arm.high is not None and 2 < arm.low < 2.5 < arm.high < 3
    assert (arm.n_decided, arm.agree) == (12, 9 / 12)
    assert [pair.outcomes for pair in result.pairs[-4:]] == [["holds", "holds"]] + 3 * [
        ["holds", "decays"]
    ]
    few = steered(pairs[:5], measure, STEPS, N).arms[0]
    assert (few.ratio, few.low) == (1.0, None)  # five describe


# with a real engine -------------------------------------------------------------------------------

STUDY = """
import sys
from actds_studies.steer.api import steer

source, model, out = sys.argv[1:]
engine = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 256,
          "distributed_executor_backend": "uni", "sampling_params": {"ignore_eos": True}}
result = steer(
    source, model=model, hook="resid_post.1", doses=(1.0, 300.0), at=(1, 12), after=(1, 6),
    vector=("labels.label == 'x'", "labels.label == 'y'"), engine_args=engine,
    limits={"requests": 6, "calibration": 3, "random": 2, "nats": 0.005}, refit=True, survival=20,
)
open(out, "w").write(result.to_json())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def source(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    records = [
        {"id": f"s{n}", "prompt": "a prompt " * (3 + 4 * (n % 3)) + str(n), "label": "xy"[n % 2]}
        for n in range(30)
    ]
    prompts = h.write_prompts(folder / "prompts.jsonl", records)
    params = json.dumps({"ignore_eos": True})
    h.harvest_alone(
        folder / "acts", model, prompts, "--hooks", "resid_post:1", "--max-tokens", "24",
        "--temperature", "1.0", "--engine-arg", "dtype=float32", "--engine-arg", "block_size=32",
        "--engine-arg", "max_model_len=256", "--engine-arg", f"sampling_params={params}", *h.EAGER,
    )  # fmt: skip
    return folder / "acts"


@pytest.mark.engine
def test_effects_are_those_of_plain_forwards_with_the_same_vector(
    source: Path, model: Path, tmp_path: Path
) -> None:
    words = [str(source), str(model), str(tmp_path / "result.json")]
    done = h.warm_engine().run(["-c", STUDY, *words], h.environment(**h.ONE_PROCESS), h.TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    result = Steering.model_validate_json((tmp_path / "result.json").read_text())
    assert result.unembedding < 0.01 and result.floor is not None and result.floor.high < 1e-5
    shown = page(result, "actds steer")
    assert "<svg" in shown.html() and len(list(shown.lines())) > 20
    forward = Forward(source, model)
    expected = forward.divergences(result)
    for effect in result.effects:
        if effect.vector == "vector":
            assert effect.divergence is not None and effect.n == 6
            want = expected[effect.way, effect.dose, effect.step, effect.after]
            assert effect.divergence.value == pytest.approx(want, rel=2e-3, abs=1e-6), effect
    assert [(s.step, s.dose, s.n) for s in result.survival] == [
        (step, dose, 6) for step in (1, 12) for dose in (0.0, 1.0, 300.0)
    ]
    # The direction of prompts and its refit, at the same positions of prompts and answers.
    assert result.components is not None
    cosine = forward.direction("prompts") @ forward.direction("answers")
    assert result.components.cosine == pytest.approx(cosine, abs=1e-4)
    places = places_of(forward.acting, Limits(requests=6))
    assert [(p, len(of["prompts"])) for p, of in places.items()] == result.components.positions
    shares = np.array(REFIT_SHARES) * result.dose.strength / result.dose.median_norm
    dose = None
    for arm in ("in prompts", "carried", "refitted"):
        curve = np.array([forward.acted(places, arm, share) for share in shares])
        of = [a for a in result.components.arms if a.arm == arm]
        dose = dose or of[0].share
        assert of[0].share == pytest.approx(
            strength_at(np.column_stack([shares, curve[:, 0]]).tolist(), 0.005), rel=1e-3
        )
        assert dose is not None and of[1].share == dose
        for acted in of:
            assert acted.aimed is not None and acted.share is not None
            want = np.interp(acted.share, shares, curve[:, 1])
            assert acted.aimed.value == pytest.approx(want, rel=5e-3, abs=1e-5), arm


class Forward:
    """Forwards of transformers over whole requests, and directions of the source's own rows."""

    def __init__(self, source: Path, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.dataset = actds.open(source)
        self.every = list(token_sequences(self.dataset))
        self.steered = chosen(self.every, 18, 6, 0)
        prompts = {prompt_of(s) for s in self.steered}
        further = [s for s in self.every if prompt_of(s) not in prompts]
        self.acting = [*self.steered, *chosen(further, 1, 12, 0)]

    def rows(self, sequence: Any) -> np.ndarray:
        return np.asarray(self.dataset.request(sequence.request, hook="resid_post.1").acts()[1])

    def gap(self, rows: Any, side: str | None = None) -> np.ndarray:
        """Return the mean of x less that of y: each prefix once, no BOS and no position 0."""
        of: dict[str, list[np.ndarray]] = {"x": [], "y": []}
        seen: set[tuple[str, bytes]] = set()
        table = self.dataset.tokens("resid_post.1").to_pydict()
        flags = dict(
            zip(zip(table["request"], table["position"], strict=True), table["flags"], strict=True)
        )
        for sequence in self.every:
            request, mask = self.dataset.request(sequence.request), []
            label = str(request.labels["label"])
            for p in range(len(sequence.token_id)):
                prefix = label, sequence.token_id[: p + 1].tobytes()
                flag = flags.get((sequence.request, p))  # None of a row that another request has
                is_row = flag is not None and not flag & 2 and p > 0 and prefix not in seen
                mask.append(
                    is_row and (side is None or (p >= sequence.n_given) == (side == "answers"))
                )
                seen |= {prefix} if flag is not None else set()
            if not any(sequence is acting for acting in self.acting):
                of[label].append(rows(sequence)[np.array(mask)])
        x, y = (np.concatenate(parts).mean(axis=0, dtype=np.float64) for parts in of.values())
        return np.asarray(x - y)

    @functools.cached_property
    def aim(self) -> np.ndarray:
        return np.mean([self.gap(lambda s: self.plain(s)[1], side) for side in SIDES], axis=0)

    def direction(self, side: str | None = None) -> np.ndarray:
        gap = self.gap(self.rows, side)
        return gap / np.linalg.norm(gap)

    def __call__(self, ids: Any, added: np.ndarray, where: slice) -> tuple[Any, np.ndarray]:
        """Return log-probabilities and last rows of a request with a vector added at positions."""
        import torch

        def edit(_module: Any, _args: Any, output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            rows[0, where] += torch.from_numpy(added.astype(np.float32))

        hook = self.model.model.layers[1].register_forward_hook(edit)
        with torch.no_grad():
            last = self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
            logits = self.model.lm_head(last)
        hook.remove()
        return torch.log_softmax(logits.double(), dim=1), last.numpy()

    def plain(self, sequence: Any) -> tuple[Any, np.ndarray]:
        return self(sequence.token_id.tolist(), np.zeros(64), slice(0, 0))

    def divergences(self, result: Steering) -> dict[tuple[str, float, int, int], float]:
        """Return mean divergences of next tokens by way, dose, step and delay."""
        vector = self.direction()
        expected: dict[tuple[str, float, int, int], list[float]] = {}
        for sequence in self.steered:
            ids, given = sequence.token_id.tolist(), sequence.n_given
            base, _ = self.plain(sequence)
            for dose in (1.0, 300.0):
                for step in (1, 12):
                    at = given + step - 1
                    for way, where in (("pulse", slice(at, at + 1)), ("held", slice(at, None))):
                        log, _ = self(ids, dose * result.dose.strength * vector, where)
                        kl = (log.exp() * (log - base)).sum(dim=1)
                        for k in (0, 1, 6):
                            name = way if way == "held" or not k else "kept"
                            expected.setdefault((name, dose, step, k), []).append(float(kl[at + k]))
        return {key: float(np.mean(values)) for key, values in expected.items()}

    def acted(self, places: Any, arm: str, share: float) -> tuple[float, float]:
        """Return the quantile of the divergence and the mean aimed effect of an arm's strength."""
        side = ARMS[arm][0]  # type: ignore[index]
        vector = self.direction("answers" if arm == "refitted" else "prompts")
        nats, aimed = [], []
        for p, members in places.items():
            norm = np.median([np.linalg.norm(self.rows(self.acting[n])[p]) for n in members[side]])
            for n in members[side]:
                base, before = self.plain(self.acting[n])
                added = share * norm * vector
                log, after = self(self.acting[n].token_id.tolist(), added, slice(p, p + 1))
                nats.append(float((log[p].exp() * (log[p] - base[p])).sum()))
                aimed.append(float((after[p] - before[p]) @ self.aim / (self.aim @ self.aim)))
        return float(np.quantile(nats, 0.95)), float(np.mean(aimed))


def test_an_unembedding_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    right = Unembedding(model, 64)
    entropies = right.entropies(rows)[0]
    assert prove(right, rows, entropies, "here") < 1e-6
    # Dummy weights are the same in every folder of one seed: change them.
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    for file in model.glob("*.safetensors"):
        tensors = {name: 30.0 * tensor for name, tensor in load_file(file).items()}
        save_file(tensors, tmp_path / file.name)
    with pytest.raises(ActdsError, match="from the engine's own"):
        prove(Unembedding(tmp_path, 64), rows, entropies, "here")


@pytest.mark.engine
def test_what_cannot_be_steered_is_said(source: Path, model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.ones(7, np.float32))
    vector = tmp_path / "v.npy"
    plain: dict[str, Any] = {"model": model, "hook": "resid_post.1", "vector": vector}
    for change, code, words in (
        ({"hook": "resid_post.3"}, "E014", "one of resid_post.1"),
        ({"at": (1, 500)}, "E014", "the longest has"),
        ({"at": (0, 5)}, "E009", "numbers from 1"),
        ({"doses": (0.5,)}, "E009", "1 among them"),
        ({"at": (1, 5), "after": (1,)}, "E015", r"shape \(7,\)"),
        ({"refit": True}, "E009", "two expressions"),
    ):
        with pytest.raises(ActdsError, match=words) as raised:
            steer(source, **{**plain, **change})
        assert raised.value.code == code


OF_FEATURES = """
import json, sys
import numpy as np
from pathlib import Path
import actds
from actds_studies.stability.steering import FeatureDirections

source, model, vectors = sys.argv[1:]
engine = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 256,
          "distributed_executor_backend": "uni"}
options = {"model": model, "engine": "vllm", "engine_args": engine}
study = FeatureDirections(actds.open(source), Path(model), "resid_post.1", 0.005, 0)
found = study.measured(np.load(vectors), options)
curve = [[dose, decay.model_dump()] for dose, decay in found]
print(json.dumps([study.steps, curve]))
"""


@pytest.mark.full
@pytest.mark.engine
def test_equal_directions_have_one_dose_and_one_decay_and_another_has_its_own(
    source: Path, model: Path, tmp_path: Path
) -> None:
    vectors = np.random.default_rng(5).normal(size=(2, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    np.save(tmp_path / "v.npy", vectors[[0, 1, 0]])
    words = [str(source), str(model), str(tmp_path / "v.npy")]
    done = h.warm_engine().run(
        ["-c", OF_FEATURES, *words], h.environment(**h.ONE_PROCESS), h.TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    steps, (first, second, again) = json.loads(done.stdout.splitlines()[-1])
    assert steps[0] == 1 and steps[-1] == 18
    assert first[0] == pytest.approx(again[0], rel=1e-4)
    assert abs(first[0] / second[0] - 1) > 0.01
    ratios = [of[1]["ratio"][-1]["value"] for of in (first, second, again)]
    assert ratios[0] == pytest.approx(ratios[2], rel=1e-3) != pytest.approx(ratios[1], rel=1e-3)
