"""Attention from stored rows is the model's own, or it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds_studies.attention import api, rows
from actds_studies.attention.model import Model, Scheme
from actds_testing.attending import ATTENDING, Attending

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=ATTENDING)
def family(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Attending, Path]:
    folder = tmp_path_factory.mktemp("family")
    attending = Attending(ATTENDING[request.param], folder / "model")
    return attending, attending.write(folder / "acts")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Attending:
    return Attending(ATTENDING["grouped heads"], tmp_path_factory.mktemp("llama") / "model")


def naive(shares: np.ndarray, n_given: int, role: np.ndarray) -> dict[str, float]:
    """Return what is said of one row of one head's attention, by the definitions."""
    place, some = np.arange(len(shares)), shares[shares > 0]
    rest = 1 - shares.sum()
    outcomes = [*some, rest] if rest > 1e-5 else some
    return {
        "entropy": float(-sum(p * np.log2(p) for p in outcomes)),
        "position 0": float(shares[0]),
        "prompt": float(shares[(place > 0) & (place < n_given)].sum()),
        "generated": float(shares[place >= n_given].sum()),
        "role user": float(shares[role == "user"].sum()),
    }


def test_equals_output_attentions_of_eager_transformers(family: tuple[Attending, Path]) -> None:
    attending, path = family
    dataset = actds.open(path)
    model = Model(dataset, attending.folder)
    n_hits = n_steps = 0
    for layer in attending.layers:
        scheme = model.scheme(layer)
        for line in dataset.requests().to_pylist():
            number, n = line["request"], line["prompt_len"] + line["generated_len"] - 1
            of = {k: dataset.request(number, hook=f"{k}.{layer}") for k in "qk"}
            if n < 1 or (of["q"].row < 0).any():
                continue
            n_hits += int((of["q"].owner != number).sum())
            q, k = (r.array[r.row] for r in of.values())
            want = attending.attention[layer][number]
            for some, low, shares in scheme.attend(q, k, np.arange(n)):
                whole = np.zeros((shares.shape[0], scheme.n_heads, n))
                whole[..., low : low + shares.shape[2]] = shares
                expected = want[:, np.arange(n)[some], :n].transpose(1, 0, 2)
                assert np.abs(whole - expected).max() <= TOLERANCE
                n_steps += len(shares)
    assert n_steps > 100 and n_hits > 0  # some keys are those of another request


def test_what_is_said_of_a_step_follows_from_the_attention(family: tuple[Attending, Path]) -> None:
    attending, path = family
    dataset = actds.open(path)
    layer = rows.LayerRows(1, Model(dataset, attending.folder).scheme(1), rows.Proof(1e-4, 1e-4))
    requests = [
        rows.Request(dataset.catalog.run_ids[0], line["request"], 0, line["prompt_len"])
        for line in dataset.requests().to_pylist()
        if line["generated_len"] > 1
    ]
    n = 0
    for request, _, steps in rows.attention_rows(dataset, requests, [layer], 1):
        role = dataset.request(request.number, hook="q.1").role
        whole = attending.attention[1][request.number]
        for at, step in enumerate(steps.step.tolist()):
            position = request.n_given + step - 1
            for head in range(whole.shape[0]):
                shares = whole[head, position, : position + 1]
                for name, value in naive(shares, request.n_given, role[: len(shares)]).items():
                    got = steps.values[at, head, rows.MEASURES.index(name)]
                    assert got == pytest.approx(value, abs=1e-3), name
                if at and step == steps.step[at - 1] + 1:
                    before = whole[head, position - 1]
                    tops = [{*np.argsort(-s)[:8].tolist()} & {*np.flatnonzero(s).tolist()}
                            for s in (before[:position], shares)]  # fmt: skip
                    jump = 1 - len(tops[0] & tops[1]) / len(tops[0] | tops[1])
                    got = steps.values[at, head, rows.MEASURES.index("jump")]
                    assert got == pytest.approx(jump, abs=1e-6)
            n += 1
    assert n > 50 and layer.proof is not None and layer.proof.largest < 1e-4


FAULTS = {
    "scale": lambda s: s | {"scale": 1.05 * s["scale"]},
    "no grouped heads": lambda s: s | {"n_kv_heads": 1, "head_dim": s["head_dim"]},
    "window": lambda s: s | {"window": 5},
    "cap": lambda s: s | {"cap": 1.5},
    "alibi": lambda s: s | {"slopes": np.full(s["n_heads"], 0.3, np.float32)},
    "sinks": lambda s: s | {"sinks": np.zeros(s["n_heads"], np.float32)},
}


@pytest.mark.parametrize("fault", ["scale", "window", "cap", "alibi", "sinks"])
def test_another_attention_is_refused(
    llama: Attending, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = llama.write(tmp_path / "acts")
    right = Model.scheme

    def scheme(model: Model, layer: int) -> Scheme:
        return Scheme(**FAULTS[fault](vars(right(model, layer))))

    monkeypatch.setattr(Model, "scheme", scheme)
    with pytest.raises(ActdsError, match="from the stored z") as raised:
        api.attention(path, model=llama.folder)
    assert raised.value.code == "E014" and "decode step" in str(raised.value)


def test_another_map_of_heads_is_refused(
    llama: Attending, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = llama.write(tmp_path / "acts")
    right = Scheme._shares

    def interleaved(scheme: Scheme, q: Any, k: Any, *rest: Any) -> Any:
        keys = k.reshape(len(k), scheme.n_kv_heads, -1)[:, ::-1].reshape(k.shape)
        return right(scheme, q, keys, *rest)

    monkeypatch.setattr(Scheme, "_shares", interleaved)
    with pytest.raises(ActdsError, match="E014.*from the stored z"):
        api.attention(path, model=llama.folder)


def test_a_key_that_is_left_out_is_refused(
    llama: Attending, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares that are made to add up without one key are no attention."""
    path = llama.write(tmp_path / "acts")
    right = Scheme._shares

    def renormalised(scheme: Scheme, q: Any, k: Any, position: Any, low: int) -> Any:
        shares = right(scheme, q, k, position, low)
        shares[..., 2] = 0
        return shares / shares.sum(axis=2, keepdims=True)

    monkeypatch.setattr(Scheme, "_shares", renormalised)
    with pytest.raises(ActdsError, match="E014.*from the stored z"):
        api.attention(path, model=llama.folder)
