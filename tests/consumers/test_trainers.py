"""Trainers of sparse autoencoders: every update happens, on the stored rows, and says on which."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import actds

BATCH, STEPS = 8, 100


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def float64(batches: Any) -> np.ndarray[Any, Any]:
    return torch.cat(list(batches)).double().numpy()


@pytest.mark.parametrize("epochs", [1, None])
def test_dictionary_learning(
    path: Path, hook: str, tmp_path: Path, epochs: int | None, capsys: Any
) -> None:
    from dictionary_learning import AutoEncoder
    from dictionary_learning.trainers import StandardTrainer
    from dictionary_learning.training import trainSAE

    updates = []
    start: dict[str, torch.Tensor] = {}

    class Counted(StandardTrainer):  # type: ignore[misc]
        def update(self, step: int, activations: torch.Tensor) -> None:
            start.update({k: v.clone() for k, v in self.ae.state_dict().items() if not start})
            updates.append(activations.clone())
            super().update(step, activations)

    def loader() -> actds.Loader:
        # One epoch holds more than the 100 batches of the norm, and less than both passes.
        return actds.Loader(
            path, hook, batch=BATCH, epochs=epochs, seed=1, exclude="first_position",
            dtype="float32",
        )  # fmt: skip

    data = loader()
    d_model = actds.open(path).hooks[hook].d_model
    assert STEPS < data.batches_per_epoch < 2 * STEPS
    config = {
        "trainer": Counted, "steps": STEPS, "activation_dim": d_model, "dict_size": 2 * d_model,
        "layer": 20, "lm_name": "SmolLM2-135M", "device": "cpu", "warmup_steps": 5,
        "sparsity_warmup_steps": 5, "dict_class": AutoEncoder,
    }  # fmt: skip
    trainSAE(
        data, [config], steps=STEPS, save_dir=str(tmp_path), device="cpu",
        normalize_activations=True,
    )  # fmt: skip
    assert len(updates) == STEPS
    # The norm is that of the batches which it was estimated on: the first 101 of a pass.
    seen = float64(itertools.islice(loader(), STEPS + 1))
    factor = np.sqrt((seen**2).sum(axis=1).mean())
    told = float(capsys.readouterr().out.split("Norm factor: ")[1].split()[0])
    assert np.isclose(told, factor, rtol=1e-5)
    # And the updates are on the next pass, of one epoch or of the endless one.
    again = loader()
    list(itertools.islice(again, STEPS + 2))
    for got, batch in zip(updates, again, strict=False):
        assert torch.allclose(got * told, batch, rtol=1e-5, atol=1e-6)
    saved = torch.load(tmp_path / "trainer_0" / "ae.pt")
    moved = [not torch.allclose(saved[k], start[k], rtol=1e-3) for k in ("encoder.weight",)]
    assert all(moved)
    recorded = json.loads((tmp_path / "trainer_0" / "config.json").read_text())
    assert recorded["buffer"] == data.config
    assert recorded["buffer"]["digest"] == actds.open(path).digest


def test_dictionary_learning_on_an_iterator_trains_on_less_and_that_is_said(
    path: Path, hook: str
) -> None:
    """Its estimate takes 102 batches of the one pass that ``iter(loader)`` is."""
    from dictionary_learning import AutoEncoder
    from dictionary_learning.trainers import StandardTrainer
    from dictionary_learning.training import trainSAE

    loader = actds.Loader(path, hook, batch=BATCH // 2, dtype="float32")
    d_model, n = actds.open(path).hooks[hook].d_model, loader.batches_per_epoch
    updates = []

    class Counted(StandardTrainer):  # type: ignore[misc]
        def update(self, step: int, activations: torch.Tensor) -> None:
            updates.append(step)
            super().update(step, activations)

    config = {
        "trainer": Counted, "steps": n, "activation_dim": d_model, "dict_size": d_model,
        "layer": 0, "lm_name": "", "device": "cpu", "warmup_steps": 5, "sparsity_warmup_steps": 5,
        "dict_class": AutoEncoder,
    }  # fmt: skip
    with pytest.warns(UserWarning, match=f"of the {n} batches .* took 102 and .* loader itself"):
        trainSAE(iter(loader), [{**config}], steps=n, device="cpu", normalize_activations=True)
    assert len(updates) == n - 102
    updates.clear()
    trainSAE(loader, [config], steps=n, device="cpu", normalize_activations=True)
    assert len(updates) == n


def sae(d_model: int) -> Any:
    from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig

    config = TopKTrainingSAEConfig(
        d_in=d_model, d_sae=2 * d_model, k=8, normalize_activations="expected_average_only_in"
    )
    return TopKTrainingSAE(config)


def trainer_config() -> Any:
    from sae_lens.config import LoggingConfig, SAETrainerConfig

    return SAETrainerConfig(
        total_training_samples=STEPS * BATCH,
        train_batch_size_samples=BATCH,
        lr=1e-3,
        lr_end=1e-3,
        device="cpu",
        n_batches_for_norm_estimate=50,
        logger=LoggingConfig(log_to_wandb=False),
    )


def test_sae_lens_trainer(path: Path, hook: str, tmp_path: Path) -> None:
    from sae_lens import SAE
    from sae_lens.training.sae_trainer import SAETrainer

    d_model = actds.open(path).hooks[hook].d_model
    options: dict[str, Any] = {"batch": BATCH, "dtype": "float32", "exclude": "sink"}
    loader = actds.Loader(path, hook, epochs=None, **options)
    model = sae(d_model)
    start = model.W_enc.detach().clone()
    model.cfg.metadata.actds = loader.config
    seen: list[torch.Tensor] = []
    provider = (seen.append(batch) or batch for batch in loader)  # type: ignore[func-returns-value]
    trainer = SAETrainer(trainer_config(), model, provider)
    factors = []
    estimate = trainer.activation_scaler.estimate_scaling_factor

    def estimated(**arguments: Any) -> None:
        estimate(**arguments)
        factors.append(trainer.activation_scaler.scaling_factor)

    trainer.activation_scaler.estimate_scaling_factor = estimated
    trained = trainer.fit()
    assert trainer.n_training_steps == STEPS and len(seen) == STEPS + 50
    assert not torch.allclose(trained.W_enc, start, rtol=1e-3)
    same = actds.Loader(path, hook, epochs=None, **options)
    with same:
        assert all(a.equal(b) for a, b in zip(seen, same, strict=False))
    norms = np.linalg.norm(float64(seen[:50]), axis=1)
    assert np.isclose(factors[0], d_model**0.5 / norms.mean(), rtol=1e-5)
    trained.save_model(str(tmp_path))
    assert SAE.load_from_disk(str(tmp_path)).cfg.metadata.actds == loader.config
    loader.close()


def test_sae_lens_runs_dry_aloud(path: Path, hook: str) -> None:
    from sae_lens.training.sae_trainer import SAETrainer

    d_model = actds.open(path).hooks[hook].d_model
    loader = actds.Loader(path, hook, batch=BATCH, dtype="float32")
    trainer = SAETrainer(trainer_config(), sae(d_model), iter(loader))
    trainer.cfg.total_training_samples *= 2
    with pytest.raises(StopIteration):
        trainer.fit()


def test_sae_lens_multi_trainer(path: Path, hooks: list[str], tmp_path: Path) -> None:
    from sae_lens.training.multi_sae_trainer import MultiSAETrainer

    dataset = actds.open(path)
    loader = actds.Loader(
        dataset, hooks, batch=BATCH, epochs=None, dtype="float32", exclude="first_position"
    )
    models = {name: sae(dataset.hooks[name].d_model) for name in hooks}
    start = {name: model.W_enc.detach().clone() for name, model in models.items()}
    for model in models.values():
        model.cfg.metadata.actds = loader.config
    factors: dict[str, float] = {}
    trainer = MultiSAETrainer(trainer_config(), models, {n: n for n in hooks}, iter(loader))
    estimate = trainer._estimate_scaling_factors

    def estimated() -> None:
        estimate()
        factors.update({n: t.activation_scaler.scaling_factor for n, t in trainer.trainers.items()})

    trainer._estimate_scaling_factors = estimated
    trained = trainer.fit()
    assert trainer.n_training_steps == STEPS
    again = actds.Loader(dataset, hooks, batch=BATCH, epochs=None, exclude="first_position")
    first = list(itertools.islice(again, 50))
    for name in hooks:
        assert not torch.allclose(trained[name].W_enc, start[name], rtol=1e-3)
        norms = np.linalg.norm(float64(batch[name] for batch in first), axis=1)
        assert np.isclose(
            factors[name], dataset.hooks[name].d_model ** 0.5 / norms.mean(), rtol=1e-5
        )
        trained[name].save_model(str(tmp_path / name))
        config = json.loads((tmp_path / name / "cfg.json").read_text())
        assert config["metadata"]["actds"]["digest"] == dataset.digest
    loader.close()
    again.close()


def test_sparsify_coder(path: Path, hook: str, tmp_path: Path) -> None:
    from sparsify import SparseCoder, SparseCoderConfig

    d_model = actds.open(path).hooks[hook].d_model
    coder = SparseCoder(d_model, SparseCoderConfig(expansion_factor=2, k=8))
    optimizer = torch.optim.Adam(coder.parameters(), lr=1e-3)
    loader = actds.Loader(path, hook, batch=BATCH, dtype="float32", exclude="sink")
    updates, losses = 0, []
    for _ in range(2):
        for batch in loader:
            out = coder(batch)
            rows, rebuilt = batch.double(), out.sae_out.detach().double()
            unexplained = (rows - rebuilt).square().sum() / (rows - rows.mean(0)).square().sum()
            assert np.isclose(out.fvu.item(), unexplained.item(), rtol=1e-4)
            optimizer.zero_grad()
            out.fvu.backward()
            optimizer.step()
            updates += 1
            losses.append(out.fvu.item())
    assert updates == 2 * len(loader)
    assert np.mean(losses[-20:]) < np.mean(losses[:20])
    coder.save_to_disk(tmp_path)
    (tmp_path / "data.json").write_text(json.dumps(loader.config))
    assert json.loads((tmp_path / "data.json").read_text())["digest"] == actds.open(path).digest


def test_bfloat16_batches_in_dictionary_learning_are_what_float32_is_for(
    path: Path, hook: str, capsys: Any
) -> None:
    """Why trainers are given float32: this one adds norms up in the type of the batches."""
    from dictionary_learning.training import get_norm_factor

    def off(**options: Any) -> float:
        loader = actds.Loader(path, hook, batch=BATCH, exclude="first_position", **options)
        # A mean of the batches' means, as there: the last batch is a short one, another each pass.
        batches = list(loader)
        true = np.sqrt(np.mean([(float64([b]) ** 2).sum(axis=1).mean() for b in batches]))
        return abs(float(get_norm_factor(batches, steps=10_000)) / true - 1)

    assert max(off(dtype="float32", seed=seed) for seed in range(4)) < 1e-5
    # How far off depends on the order of the rows: now and then the roundings cancel.
    assert max(off(seed=seed) for seed in range(4)) > 1e-3
