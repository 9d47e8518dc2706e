"""Entropies of given text: those of torch, checked with what a harvest recorded, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import actds
from actds.errors import ActdsError
from actds.format import tables
from actds_studies.regimes.api import regimes
from actds_studies.regimes.arms import Arm, read_arm
from actds_studies.regimes.entropies import Entropies, Unembedding
from actds_studies.regimes.strata import has_entropies
from actds_testing import synthetic
from actds_testing.schedules import simulate
from actds_testing.synthetic import make_dataset

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HOOK, LAST = "resid_post.0", "resid_post.1"
D_MODEL = 16
SMALL: dict[str, Any] = {
    "hidden_size": D_MODEL, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 9000,
    "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "LlamaForCausalLM": ("LlamaConfig", {"tie_word_embeddings": False}),
    "Gemma2ForCausalLM": ("Gemma2Config", {"final_logit_softcapping": 2.0}),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": D_MODEL, "n_layer": 2, "n_head": 2}),
    "CohereForCausalLM": ("CohereConfig", {"logit_scale": 0.25}),
    "GraniteForCausalLM": ("GraniteConfig", {"logits_scaling": 3.0}),
    "PhiForCausalLM": ("PhiConfig", {}),
}


def model_of(name: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Save a model of random weights, norms and biases included, and return it."""
    config, own = MODELS[name]
    small = {k: v for k, v in SMALL.items() if name != "GPT2LMHeadModel" or k == "vocab_size"}
    torch.manual_seed(seed)
    model = getattr(transformers, name)(
        getattr(transformers, config)(**{**small, **own}, **changes)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.7)
    model.save_pretrained(folder)
    return model.eval()


def truth(logits: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return entropy and margin of logits ``(n, vocabulary)``, by torch in float64."""
    logarithm = torch.log_softmax(logits.double(), dim=-1)
    two = logits.topk(2, dim=-1).values
    entropy = -(logarithm.exp() * logarithm).sum(dim=-1)
    return entropy.numpy(), (two[:, 0] - two[:, 1]).double().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_entropies_and_margins_are_those_of_the_models_own_logits(
    name: str, tmp_path: Path
) -> None:
    """Over blocks of the vocabulary; of the forms of a final norm one is the model's."""
    model = model_of(name, tmp_path)
    before: list[Any] = []
    base = model.base_model
    norm = next(getattr(base, n) for n in ("norm", "ln_f", "final_layernorm") if hasattr(base, n))
    norm.register_forward_pre_hook(lambda module, args: before.append(args[0]))
    with torch.no_grad():
        done = model(torch.randint(0, 9000, (3, 7)), output_hidden_states=True)
    entropy, margin = truth(done.logits.flatten(0, 1))
    assert entropy.std() > 0.01
    unembedding = Unembedding(tmp_path, D_MODEL)
    (final,) = unembedding.forms("final")
    last = done.hidden_states[-1].flatten(0, 1).numpy()
    found = unembedding.entropies(final(last))
    assert np.allclose(found[0], entropy, atol=2e-4) and np.allclose(found[1], margin, atol=2e-4)
    rows = before[0].flatten(0, 1).detach().numpy()
    away = [abs(unembedding.entropies(form(rows))[0] - entropy).max()
            for form in unembedding.forms("resid_post")]  # fmt: skip
    assert min(away) < 2e-4
    if len(away) > 1:
        assert sorted(away)[1] > 2e-3, "no other form gives the same"


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """G: sampled tokens with the entropies that its rows give; H: its tokens, given as prompts.

    Model: the folder.
    """
    model = model_of("LlamaForCausalLM", tmp_path / "model")
    schedule = simulate(90, 0, cache=False)
    options: dict[str, Any] = {"cache": False, "dtype": "float32", "schedule": schedule}
    plain = actds.open(make_dataset(tmp_path / "plain", **options))
    tokens = plain.tokens(LAST)
    with torch.no_grad():
        logits = model.lm_head(model.model.norm(torch.from_numpy(plain.array(LAST)[:])))
    at = {
        key: n
        for n, key in enumerate(zip(*(tokens[c].to_pylist() for c in ("request", "position")),
                                    strict=True))
    }  # fmt: skip
    entropy, margin = truth(logits)
    whole = synthetic.sampled_table

    def sampled(told: Any, n_scores: int) -> pa.Table:
        lines = whole(told, n_scores).to_pydict()
        keys = zip(lines["request"], lines["position"], strict=True)
        row = [at.get((request, position - 1)) for request, position in keys]
        for name, values in (("entropy", entropy), ("margin", margin)):
            lines[name] = [0.5 if n is None else float(values[n]) for n in row]
        return tables.build("sampled", lines)

    monkeypatch.setattr(synthetic, "sampled_table", sampled)
    make_dataset(tmp_path / "G", entropy=True, run="r-g", **options)
    make_dataset(tmp_path / "H", run="r-h", **options)
    return {name: tmp_path / name for name in ("model", "G", "H")}


def arms_of(datasets: dict[str, Path]) -> list[Arm]:
    return [Arm(name, actds.open(datasets[name])) for name in "HG"]


def test_given_text_has_the_entropies_of_its_own_rows(datasets: dict[str, Path]) -> None:
    arms = arms_of(datasets)
    rows = read_arm(arms[0], HOOK)
    assert rows.sampled is None and not has_entropies(rows).any()
    done: list[str] = []
    entropies = Entropies(datasets["model"], arms, HOOK, done.append)
    found = entropies.filled(arms[0].dataset, HOOK, rows)
    assert done and has_entropies(found).all() and found.sampled is not None
    assert (found.sampled.token_id == -1).all(), "what was sampled stays unknown"
    sampled = read_arm(arms[1], HOOK).sampled
    assert sampled is not None
    known = np.isfinite(sampled.entropy)
    assert known.sum() > 300 and not known.all()
    assert np.allclose(found.sampled.entropy[known], sampled.entropy[known], atol=1e-3)
    assert np.allclose(found.sampled.margin[known], sampled.margin[known], atol=1e-3)
    n = len(done)
    again = entropies.filled(arms[0].dataset, HOOK, rows)
    assert len(done) == n and again.sampled is not None, "each row is computed once"
    assert np.array_equal(again.sampled.entropy, found.sampled.entropy)


def test_bands_of_entropy_are_formed_only_where_both_arms_have_one(
    datasets: dict[str, Path],
) -> None:
    """Of the same prompts and answers, unpaired: H knows no entropy of its own."""
    given = [f"{name}={datasets[name]}" for name in "HG"]
    alone = regimes(*given, hooks=[HOOK], pairing="unpaired").contrasts[0]
    assert not {"entropy", "margin"} & {value.axis for value in alone.values}
    (words,) = alone.left_out
    assert "none of the rows of H" in words and "--model" in words
    both = regimes(
        *given, hooks=[HOOK], pairing="unpaired", model=str(datasets["model"])
    ).contrasts[0]
    assert {"entropy", "margin"} <= {value.axis for value in both.values} and not both.left_out
    rows = {v.stratum: v.n_rows for v in both.values if v.axis == "entropy"}
    assert len(rows) == 5 and all(one == other for one, other in rows.values())


def test_a_prompts_last_tokens_are_no_band_of_its_entropies(datasets: dict[str, Path]) -> None:
    """One dataset: after a prompt the model sampled, at its last token alone."""
    found = regimes(str(datasets["G"]), hooks=[HOOK]).contrasts[0]
    assert not {"entropy", "margin"} & {value.axis for value in found.values}
    assert "of the rows of H and 100.0% of the rows of G" in found.left_out[0]


def test_the_folder_of_another_model_is_refused(datasets: dict[str, Path]) -> None:
    model_of("LlamaForCausalLM", datasets["model"], seed=1)
    with pytest.raises(ActdsError, match=r"E014 model .*nats apart from those that the harvest"):
        regimes(*(f"{n}={datasets[n]}" for n in "HG"), hooks=[HOOK], model=str(datasets["model"]))
    for file in datasets["model"].glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ActdsError, match=r"E014 model .*no unembedding of 16 channels"):
        regimes(*(f"{n}={datasets[n]}" for n in "HG"), hooks=[HOOK], model=str(datasets["model"]))
    (datasets["model"] / "config.json").write_text("[1")
    with pytest.raises(ActdsError, match=r"E014 model .*config.json: .*expected an object"):
        regimes(*(f"{n}={datasets[n]}" for n in "HG"), hooks=[HOOK], model=str(datasets["model"]))


def test_what_nobody_recorded_cannot_be_checked_and_is_left_out(datasets: dict[str, Path]) -> None:
    arms = arms_of(datasets)[:1]
    entropies = Entropies(datasets["model"], arms, HOOK, lambda what: None)
    assert entropies.lacks.startswith("fewer than 32 recorded entropies")
    rows = read_arm(arms[0], HOOK)
    assert entropies.filled(arms[0].dataset, HOOK, rows).sampled is None
