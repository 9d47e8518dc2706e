"""A steering study finds what was planted: effects that decay, reverse, hold, or are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds_studies.pages.steer import page
from actds_studies.regimes.entropies import Unembedding
from actds_studies.steer.api import VectorOf, steer
from actds_studies.steer.measure import (
    Read,
    along,
    decay_of,
    effects_of,
    estimate,
    prove,
    strength_at,
)
from actds_studies.steer.result import Limits, Steering
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
    assert abs(along(noise, np.arange(400))[:, 1].mean()) < 0.5
    shared = np.ones((8, 2, D)) * np.array([1.0, -0.5])[:, np.newaxis]
    np.testing.assert_allclose(along(shared, np.arange(8)), [[1.0, -0.5]] * 8)


def test_the_dose_is_where_the_curve_crosses() -> None:
    curve = [(s, 0.25 * s**2) for s in (0.5, 1.0, 2.0, 4.0)]
    assert strength_at(curve, 1.0) == pytest.approx(2.0)
    assert strength_at(curve, 0.5) == pytest.approx(2**0.5)
    assert strength_at(curve, 100.0) is None
    assert strength_at(curve, 0.01) is None


# with a real engine -------------------------------------------------------------------------------

STUDY = """
import sys
from actds_studies.steer.api import steer

source, model, vector, out = sys.argv[1:]
engine = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 256,
          "distributed_executor_backend": "uni"}
result = steer(
    source, model=model, hook="resid_post.1", vector=vector, doses=(1.0, 2.0), at=(1, 12),
    after=(1, 6), engine_args=engine,
    limits={"requests": 5, "calibration": 3, "random": 2, "nats": 0.005},
)
open(out, "w").write(result.to_json())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def source(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    records = [{"id": f"s{n}", "prompt": "a prompt " * (3 + n % 3) + str(n)} for n in range(10)]
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
    vector = np.random.default_rng(5).normal(size=64).astype(np.float32)
    np.save(tmp_path / "v.npy", vector)
    words = [str(source), str(model), str(tmp_path / "v.npy"), str(tmp_path / "result.json")]
    done = h.warm_engine().run(["-c", STUDY, *words], h.environment(**h.ONE_PROCESS), h.TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    result = Steering.model_validate_json((tmp_path / "result.json").read_text())
    assert result.unembedding < 0.01 and result.floor is not None and result.floor.high < 1e-5
    shown = page(result, "actds steer")
    assert "<svg" in shown.html() and len(list(shown.lines())) > 20
    expected = plain_divergences(result, source, model, vector)
    for effect in result.effects:
        if effect.vector == "vector":
            assert effect.divergence is not None and effect.n == 5
            want = expected[effect.way, effect.dose, effect.step, effect.after]
            assert effect.divergence.value == pytest.approx(want, rel=2e-3, abs=1e-6), effect


def plain_divergences(
    result: Any, source: Path, model: Path, vector: np.ndarray
) -> dict[tuple[str, float, int, int], float]:
    """Return mean divergences of next tokens, by forwards of transformers over whole requests."""
    import torch
    from transformers import AutoModelForCausalLM

    from actds.explore.requests import token_sequences
    from actds_studies.steer.replays import chosen

    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    dataset = actds.open(source)
    sequences = chosen(list(token_sequences(dataset)), 18, 5, 0)
    added = torch.from_numpy(vector / np.linalg.norm(vector))

    def log_odds(ids: Any, strength: float, where: slice) -> Any:
        def edit(_module: Any, _args: Any, output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            rows[0, where] += strength * added

        hook = plain.model.layers[1].register_forward_hook(edit)
        with torch.no_grad():
            logits = plain(torch.tensor([ids]), use_cache=False).logits[0]
        hook.remove()
        return torch.log_softmax(logits, dim=1)

    expected: dict[tuple[str, float, int, int], list[float]] = {}
    for sequence in sequences:
        ids, given = sequence.token_id.tolist(), sequence.n_given
        base = log_odds(ids, 0.0, slice(0, 0))
        for dose in (1.0, 2.0):
            for step in (1, 12):
                at = given + step - 1
                for way, where in (("pulse", slice(at, at + 1)), ("held", slice(at, None))):
                    log = log_odds(ids, dose * result.dose.strength, where)
                    kl = (log.exp() * (log - base)).sum(dim=1)
                    for k in (0, 1, 6):
                        name = way if way == "held" or not k else "kept"
                        expected.setdefault((name, dose, step, k), []).append(float(kl[at + k]))
    return {key: float(np.mean(values)) for key, values in expected.items()}


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
    vector = VectorOf(file=tmp_path / "v.npy")
    plain: dict[str, Any] = {"model": model, "hook": "resid_post.1", "vector": vector}
    for change, code, words in (
        ({"hook": "resid_post.3"}, "E014", "one of resid_post.1"),
        ({"at": (1, 500)}, "E014", "the longest has"),
        ({"at": (0, 5)}, "E009", "numbers from 1"),
        ({"doses": (0.5,)}, "E009", "1 among them"),
        ({"at": (1, 5), "after": (1,)}, "E015", r"shape \(7,\)"),
    ):
        with pytest.raises(ActdsError, match=words) as raised:
            steer(source, **{**plain, **change})
        assert raised.value.code == code
