"""Attention from stored rows is the model's own, or it is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds_studies.attention import api, rows
from actds_studies.attention.api import Model
from actds_testing.attending import ATTENDING, Attending, requests_of
from actds_writers.capture.scheme import Scheme

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=ATTENDING)
def family(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Attending, Path]:
    folder = tmp_path_factory.mktemp("family")
    attending = Attending(ATTENDING[request.param], folder / "model")
    return attending, attending.write(folder / "acts")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Attending:
    return Attending(ATTENDING["grouped heads"], tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def acts(llama: Attending, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama.write(tmp_path_factory.mktemp("acts") / "acts")


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
        "role user": float(shares[(role == "user") & (place > 0)].sum()),
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
    n = 0
    for request, _, steps in rows.attention_rows(dataset, requests_of(dataset), [layer], 1):
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


FAULTS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 1.02 / 32**0.5},
    "window": {"window": 5},
    "blocks": {"chunk": 8},
    "cap": {"cap": 1.5},
    "alibi": {"slopes": np.full(4, 0.3, np.float32)},
    "sinks": {"sinks": np.zeros(4, np.float32)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_attention_is_refused(
    llama: Attending, acts: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Model.scheme
    wrong = FAULTS[fault]
    monkeypatch.setattr(Model, "scheme", lambda model, at: replace(right(model, at), **wrong))
    with pytest.raises(ActdsError, match="from the stored z") as raised:
        api.attention(acts, model=llama.folder)
    assert raised.value.code == "E014" and "decode step" in str(raised.value)


def test_another_map_of_heads_is_refused(
    llama: Attending, acts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Scheme.attend

    def other_way(scheme: Scheme, q: Any, k: Any, position: Any) -> Any:
        keys = k.reshape(len(k), scheme.n_kv_heads, -1)[:, ::-1].reshape(k.shape)
        return right(scheme, q, keys, position)

    monkeypatch.setattr(Scheme, "attend", other_way)
    with pytest.raises(ActdsError, match="from the stored z"):
        api.attention(acts, model=llama.folder)


def test_shares_that_add_up_without_a_key_are_refused(
    llama: Attending, acts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Scheme.attend

    def without(scheme: Scheme, q: Any, k: Any, position: Any) -> Any:
        for some, low, shares in right(scheme, q, k, position):
            shares[..., 2] = 0
            yield some, low, shares / shares.sum(axis=2, keepdims=True)

    monkeypatch.setattr(Scheme, "attend", without)
    with pytest.raises(ActdsError, match="from the stored z"):
        api.attention(acts, model=llama.folder)


@pytest.mark.parametrize("heads", [2, 8])
def test_a_configuration_of_other_heads_is_refused(
    llama: Attending, tmp_path: Path, heads: int
) -> None:
    shutil.copytree(llama.folder, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    changed = config | {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    (tmp_path / "model/config.json").write_text(json.dumps(changed | {"head_dim": 128 // heads}))
    recorded = llama.write(tmp_path / "recorded")
    with pytest.raises(ActdsError, match=r"E014 model .*another config than that of the rows"):
        api.attention(recorded, model=tmp_path / "model")
    unknown = llama.write(tmp_path / "unknown", facts={"model.config_sha256": None})
    with pytest.raises(ActdsError, match="from the stored z"):
        api.attention(unknown, model=tmp_path / "model")


def test_blocks_of_scores_and_batches_of_requests_change_nothing(
    family: tuple[Attending, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    attending, path = family
    whole = api.attention(path, model=attending.folder)
    monkeypatch.setattr("actds_writers.capture.scheme.BLOCK_NBYTES", 1 << 11)
    monkeypatch.setattr("actds_studies.attention.rows.BATCH_NBYTES", 1)
    apart = api.attention(path, model=attending.folder)
    for first, second in zip(whole.layers, apart.layers, strict=True):
        pairs = zip(first.values, second.values, strict=True)
        assert all(a.value == pytest.approx(b.value, abs=1e-5) for a, b in pairs)


def test_rows_that_were_rounded_afterwards_are_proved_less_closely(
    llama: Attending, tmp_path: Path
) -> None:
    plain = llama.write(tmp_path / "plain", dtype="bfloat16")
    cast = llama.write(
        tmp_path / "cast",
        dtype="bfloat16",
        facts={"capture.cast": "float32 to bfloat16, nearest even"},
    )
    for path, limit in ((plain, 0.01), (cast, 0.08)):
        result = api.attention(path, model=llama.folder)
        assert [layer.proof.limit for layer in result.layers] == [limit, limit]
