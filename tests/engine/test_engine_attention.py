"""Attention that is looked at while an engine serves is what its rows give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import actds
from actds.explore.dataset import Dataset
from actds_studies.attention.api import Model
from actds_testing.harvest import EAGER, harvest_alone, run, run_alone, run_forked, write_prompts

pytest.importorskip("vllm")
from actds_testing.tiny import make_random_model
from actds_writers.capture.scheme import Scheme

pytestmark = pytest.mark.engine

EVERY, LAYERS = 3, (0, 2)
TIED = 1e-6  # between shares, that engine and study compute from the same rows each in its way
SHARED = "You are a careful assistant, and say what you know in a few plain words. "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attention") / "model"
    return make_random_model(folder, n_layers=3, n_heads=4, n_kv_heads=2)


def harvest(folder: Path, model: Path, *options: str) -> Dataset:
    rng = np.random.default_rng(3)
    texts = ["".join(map(chr, rng.integers(97, 123, rng.integers(20, 90)))) for _ in range(16)]
    source = write_prompts(folder / "prompts.jsonl", [{"prompt": SHARED + t} for t in texts])
    fixed = (
        *("--hooks", "q:0,2;k:0,2;v:0,2;z:0,2", "--max-tokens", "20", "--temperature", "1.0"),
        *("--engine-arg", "block_size=32", "--engine-arg", "max_model_len=256"),
        *("--engine-arg", "max_num_batched_tokens=64", "--engine-arg", "dtype=float32"),
    )
    looks = ("--attention", "0,2", "--every", str(EVERY), "--attention-share", "0.5")
    return harvest_alone(folder / "acts", model, source, *fixed, *looks, *options)


def plain(dataset: Dataset, model: Path, request: int, layer: int) -> tuple[Scheme, np.ndarray]:
    """Return the attention of each position of a request, from its stored rows."""
    scheme = Model(dataset, model).scheme(layer)
    at = dataset.request(request).row
    rows = {kind: dataset.array(f"{kind}.{layer}")[at] for kind in "qk"}
    position = np.arange(len(rows["q"]))
    whole = np.zeros((len(position), scheme.n_heads, len(position)), np.float32)
    for some, low, shares in scheme.attend(rows["q"], rows["k"], position):
        whole[some, :, low : low + shares.shape[2]] = shares
    return scheme, whole


@pytest.mark.parametrize("options", [EAGER, ("--engine-arg", "num_gpu_blocks_override=14", *EAGER)])
def test_lines_are_the_attention_of_the_stored_rows(
    model: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    dataset = harvest(tmp_path, model, *options)
    lines = dataset.attention().to_pylist()
    requests = {row["request"]: row for row in dataset.requests().to_pylist()}
    drawn = {line["request"] for line in lines}
    assert 0 < len(drawn) < 16
    # They compute their own keys; others are served from the prefix cache.
    assert all(requests[number]["cached_tokens"] == 0 for number in drawn)
    assert any(row["cached_tokens"] for row in requests.values())
    wanted = [
        (number, position, layer, head)
        for number in sorted(drawn)
        for position in range(
            requests[number]["prompt_len"],
            requests[number]["prompt_len"] + requests[number]["generated_len"] - 1,
            EVERY,
        )
        for layer in LAYERS
        for head in range(4)
    ]
    keys = ("request", "position", "layer", "head")
    assert sorted(tuple(line[key] for key in keys) for line in lines) == wanted
    for request in drawn:
        for layer in LAYERS:
            _, whole = plain(dataset, model, request, layer)
            some = [line for line in lines if (line["request"], line["layer"]) == (request, layer)]
            for line in some:
                at, n = line["position"], requests[request]["prompt_len"]
                shares = whole[at, line["head"], : at + 1]
                masses = [shares[0], shares[1:n].sum(), shares[n:].sum(), 0.0]
                stated = [line[name] for name in ("first", "prompt", "generated", "sinks")]
                assert np.allclose(stated, masses, atol=1e-5)
                bits = -(shares * np.log2(np.maximum(shares, 1e-30))).sum()
                assert line["entropy"] == pytest.approx(bits, abs=1e-4)
                order = np.argsort(-shares, kind="stable")[:8]
                assert np.allclose(line["shares"], shares[line["top"]], atol=1e-5)
                assert np.allclose(line["shares"], shares[order], atol=1e-5)
    _compare_study(dataset, model)


def _compare_study(dataset: Dataset, model: Path) -> None:
    """Check that the study has of the table what it has of the rows, step by step."""
    from actds_studies.attention import api
    from actds_studies.attention.recorded import recorded_layers, recorded_rows
    from actds_studies.attention.result import Limits
    from actds_studies.attention.rows import MEASURES, attention_rows

    looked_at = recorded_layers(dataset, ())
    study = api._Study(dataset, looked_at, Limits())  # noqa: SLF001
    layers = api._layers(dataset, Model(dataset, model), LAYERS, unproved=False)  # noqa: SLF001
    recorded = recorded_rows(dataset, study.requests, looked_at)
    again = attention_rows(dataset, study.requests, layers, EVERY)
    got, want = ({(r.number, at): steps for r, at, steps in of} for of in (recorded, again))
    assert got.keys() == want.keys()
    continuous = [MEASURES.index(n) for n in MEASURES if not n.startswith("role") and n != "jump"]
    jump, decided = MEASURES.index("jump"), 0
    given = {request.number: request.n_given for request in study.requests}
    for key, steps in want.items():
        assert (got[key].step == steps.step).all()
        of, other = got[key].values, steps.values
        assert np.allclose(of[..., continuous], other[..., continuous], atol=1e-3, equal_nan=True)
        # Which keys are the largest 8 is open where the eighth and the ninth are as large.
        shares = -np.sort(-plain(dataset, model, key[0], LAYERS[key[1]])[1])
        clear = shares[..., 7] - shares[..., 8] > TIED
        sure = clear[steps.step - 1 + given[key[0]]]
        sure[1:] &= sure[:-1]
        assert np.allclose(of[sure, jump], other[sure, jump], equal_nan=True)
        decided += np.isfinite(other[sure, jump]).sum()
    assert decided > 100


SCALE = """
import dataclasses
from actds_writers.capture import scheme
of = scheme.Scheme.of.__func__
def other(cls, *given):
    right = of(cls, *given)
    return dataclasses.replace(right, scale=2 * right.scale)
scheme.Scheme.of = classmethod(other)
"""
HEADS = """
from actds_writers.capture import scheme
outputs = scheme.Scheme.outputs
scheme.Scheme.outputs = lambda self, shares, v: outputs(self, shares[:, ::-1], v)
"""
KEY = """
from actds_writers.capture import scheme
attend = scheme.Scheme.attend
def without(self, q, k, position):
    k = k.copy()
    k[3] = 0
    return attend(self, q, k, position)
scheme.Scheme.attend = without
"""


@pytest.mark.parametrize("patch", [SCALE, HEADS, KEY], ids=["scale", "heads", "key"])
def test_an_attention_that_is_not_the_models_is_not_stored(
    model: Path, tmp_path: Path, patch: str
) -> None:
    source = write_prompts(tmp_path / "p.jsonl", [{"prompt": SHARED}] * 4)
    options = ("--hooks", "resid_post:0", "--max-tokens", "8", "--attention", "0", "--every", "2")
    more = ("--attention-share", "1.0", "--engine-arg", "block_size=32", *EAGER)
    more += ("--engine-arg", "dtype=float32")
    done = run_forked(tmp_path / "acts", model, source, *options, *more, patch=patch)
    assert done.returncode == 2 and "softmax(q k) v is" in done.stderr
    actds.recover(tmp_path / "acts")
    assert not actds.open(tmp_path / "acts").attention().num_rows


def test_an_unknown_layer_and_an_engine_that_looks_at_none_are_refused(
    model: Path, tmp_path: Path
) -> None:
    source = write_prompts(tmp_path / "p.jsonl", [{"prompt": "a"}])
    hooks = ("--hooks", "resid_post:0", "--max-tokens", "4")
    done = run_alone(tmp_path / "acts", model, source, *hooks, "--attention", "3")
    assert done.returncode == 2 and "E007" in done.stderr
    done = run(
        tmp_path / "acts", model, source, *hooks, "--attention", "0", "--engine", "transformers"
    )
    assert done.returncode == 2 and "E012 --attention" in done.stderr
