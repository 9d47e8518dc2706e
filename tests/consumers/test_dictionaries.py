"""Dictionaries as SAELens and dictionary_learning wrote them: what they mean is what these compute.

Every file here is one that the library itself saved, with random or freshly trained weights; its
own features and reconstructions of random rows are compared with ours, to 1e-5 of the largest.
"""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import actds
from actds.errors import ActdsError
from actds_validators.dictionaries import Dictionary
from actds_validators.dictionaries.formats import load_dictionary

D_MODEL, N_FEATURES, N_ROWS = 24, 96, 400
HOOK = "blocks.7.hook_resid_post"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def rows(scale: float = 3.0) -> torch.Tensor:
    """Return rows with a mean and one large channel, as models have; some are very short."""
    found = torch.randn(N_ROWS, D_MODEL, generator=torch.Generator().manual_seed(1)) * scale + 0.5
    found[:, 3] *= 20
    found[::5] *= 1e-3  # near the epsilon of layer_norm
    return found


def close(got: Any, want: torch.Tensor) -> bool:
    array = want.detach().float().numpy()
    assert np.shape(got) == array.shape and np.isfinite(array).all()
    return bool(np.allclose(got, array, rtol=1e-5, atol=1e-5 * np.abs(array).max()))


def equals(ours: Dictionary, theirs: Any, x: torch.Tensor | None = None) -> None:
    """Compare features and reconstructions, dense and sparse; some features are active, not all."""
    x = rows() if x is None else x
    flat = x.reshape(len(x), -1)
    with torch.no_grad():
        features = theirs.encode(x)
        rebuilt = theirs(x).reshape(flat.shape)
    share = float((features > 0).float().mean())
    assert 0.01 < share < 0.99
    got = ours.encode(flat.numpy())
    assert close(got, features)
    assert close(ours.encode_sparse(flat.numpy()).toarray(), features)
    assert close(ours.decode(got, flat.numpy()), rebuilt)
    assert close(ours.decode(ours.encode_sparse(flat.numpy()), flat.numpy()), rebuilt)
    assert close(ours.decode(ours.encode(flat.numpy()), flat.numpy()), rebuilt)


def randomize(module: torch.nn.Module) -> None:
    """Give every weight a random value: thresholds, gates and biases that are 0 hide mistakes."""
    with torch.no_grad():
        for name, value in module.named_parameters():
            value.normal_(std=D_MODEL**-0.5 if value.ndim == 2 else 0.5)
            if name == "threshold":
                value.abs_()


def sae(architecture: str, *, training: bool = False, **options: Any) -> Any:
    from sae_lens.registry import get_sae_class, get_sae_training_class
    from sae_lens.saes.sae import SAEMetadata

    get = get_sae_training_class if training else get_sae_class
    kind, config = get(architecture)
    metadata = SAEMetadata(hook_name=HOOK, model_name="gpt2", prepend_bos=True)
    if "topk" in architecture:
        options = {"k": 7, **options}
    made = kind(config(d_in=D_MODEL, d_sae=N_FEATURES, metadata=metadata, **options))
    randomize(made)
    return made


ARCHITECTURES = ["standard", "topk", "jumprelu", "gated"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("normalization", ["none", "layer_norm", "constant_norm_rescale"])
@pytest.mark.parametrize("centred", [True, False])
def test_sae_lens(architecture: str, normalization: str, centred: bool, tmp_path: Path) -> None:
    from sae_lens import SAE

    sae(architecture, normalize_activations=normalization, apply_b_dec_to_input=centred).save_model(
        tmp_path
    )
    ours = load_dictionary(tmp_path, hook="resid_post.7", d_model=D_MODEL, model="/models/gpt2")
    assert (ours.kind, ours.source.model, ours.source.prepend_bos) == (architecture, "gpt2", True)
    assert (ours.hook, ours.source.hook_from) == ("resid_post.7", "file")
    equals(ours, SAE.load_from_disk(tmp_path))


@pytest.mark.parametrize("rescale", [True, False])
def test_sae_lens_selects_by_the_length_of_directions(rescale: bool, tmp_path: Path) -> None:
    from sae_lens import SAE

    sae("topk", rescale_acts_by_decoder_norm=rescale).save_model(tmp_path)
    equals(load_dictionary(tmp_path), SAE.load_from_disk(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("standard", {}),
        ("topk", {"rescale_acts_by_decoder_norm": True}),
        ("jumprelu", {}),
        ("gated", {}),
        ("batchtopk", {"rescale_acts_by_decoder_norm": True}),
        ("batchtopk", {"rescale_acts_by_decoder_norm": False}),
        ("matryoshka_batchtopk", {"matryoshka_widths": [32, 96]}),
    ],
)
def test_sae_lens_checkpoint_of_a_trainer(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """What a trainer saved is read as what SAELens makes of it for inference."""
    from sae_lens import SAE

    made = sae(architecture, training=True, **options)
    if "batchtopk" in architecture:
        made.topk_threshold = torch.tensor(0.4, dtype=torch.float64)
    made.save_model(tmp_path / "training")
    made.save_inference_model(tmp_path / "inference")
    ours = load_dictionary(tmp_path / "training")
    assert ours.kind == architecture.removeprefix("matryoshka_")
    theirs = SAE.load_from_disk(tmp_path / "inference")
    equals(ours, theirs)
    equals(load_dictionary(tmp_path / "inference"), theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_sae_lens_weights_of_other_types(dtype: str, tmp_path: Path) -> None:
    from sae_lens import SAE

    sae("jumprelu").to(dtype=getattr(torch, dtype)).save_model(tmp_path)
    equals(load_dictionary(tmp_path), SAE.load_from_disk(tmp_path, dtype="float32"))


def test_sae_lens_heads_side_by_side(tmp_path: Path) -> None:
    from sae_lens import SAE

    made = sae("standard")
    made.cfg.reshape_activations = "hook_z"
    made.cfg.metadata.hook_name = "blocks.2.attn.hook_z"
    made.save_model(tmp_path)
    heads = rows().reshape(N_ROWS, 4, -1)
    equals(load_dictionary(tmp_path, hook="z.2"), SAE.load_from_disk(tmp_path), heads)


def test_sae_lens_folded_is_read_and_unfolded_is_refused(tmp_path: Path) -> None:
    from sae_lens import SAE

    made = sae("jumprelu", normalize_activations="expected_average_only_in")
    made.save_model(tmp_path / "checkpoint")
    with pytest.raises(ActdsError, match=r"E015 .*not folded") as refused:
        load_dictionary(tmp_path / "checkpoint")
    assert "fold_activation_norm_scaling_factor" in str(refused.value)
    made.fold_activation_norm_scaling_factor(0.2)  # the method that the refusal names
    made.save_model(tmp_path / "folded")
    equals(load_dictionary(tmp_path / "folded"), SAE.load_from_disk(tmp_path / "folded"))


@pytest.mark.parametrize(
    ("architecture", "further"),
    [
        ("standard", {"activation_fn_str": "relu"}),
        ("standard", {"activation_fn": "relu", "prepend_bos": False, "hook_head_index": None}),
        ("topk", {"architecture": "standard", "activation_fn": "topk",
                  "activation_fn_kwargs": {"k": 5}}),
        ("jumprelu", {"architecture": "jumprelu", "normalize_activations": "layer_norm"}),
        ("gated", {"architecture": "gated", "apply_b_dec_to_input": False}),
    ],
)  # fmt: skip
def test_sae_lens_before_version_6(
    architecture: str, further: dict[str, Any], tmp_path: Path
) -> None:
    from sae_lens import SAE

    sae(architecture).save_model(tmp_path)
    old = {
        "d_in": D_MODEL, "d_sae": N_FEATURES, "dtype": "torch.float32", "device": "cpu",
        "hook_point": "blocks.8.hook_resid_pre", "hook_point_layer": 8, "model_name": "gpt2-small",
        "normalize_activations": "none", **further,
    }  # fmt: skip
    (tmp_path / "cfg.json").write_text(json.dumps(old))
    theirs = SAE.load_from_disk(tmp_path)
    ours = load_dictionary(tmp_path, hook="resid_post.7", model="openai-community/gpt2")
    assert ours.kind == theirs.cfg.architecture() == architecture
    assert ours.source.prepend_bos is theirs.cfg.metadata.prepend_bos
    assert ours.normalization == theirs.cfg.normalize_activations
    equals(ours, theirs)


def test_sae_lens_threshold_of_an_older_trainer(tmp_path: Path) -> None:
    from sae_lens import TrainingSAE
    from safetensors.torch import load_file, save_file

    sae("jumprelu", training=True).save_model(tmp_path)
    state = load_file(tmp_path / "sae_weights.safetensors")
    state["log_threshold"] = state.pop("threshold").log()
    save_file(state, tmp_path / "sae_weights.safetensors")
    equals(load_dictionary(tmp_path), TrainingSAE.load_from_disk(tmp_path))


@pytest.mark.parametrize("site", ["res", "mlp", "att"])
def test_gemma_scope(site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sae_lens import SAE
    from sae_lens.loading import pretrained_sae_loaders as loaders

    repository, folder = f"google/gemma-scope-2b-pt-{site}", "layer_20/width_16k/average_l0_71"
    inside = tmp_path / f"models--{repository.replace('/', '--')}" / "snapshots" / "0a1b" / folder
    inside.mkdir(parents=True)
    state = sae("jumprelu").state_dict()
    np.savez(inside / "params.npz", **{name: value.numpy() for name, value in state.items()})
    monkeypatch.setattr(loaders, "hf_hub_download", lambda **_: str(inside / "params.npz"))

    def loader(path: Any, device: str, cfg_overrides: Any) -> Any:
        sizes = {"d_in": D_MODEL, "d_sae": N_FEATURES}
        return loaders.gemma_2_sae_huggingface_loader(
            repository, folder, device, cfg_overrides=sizes
        )[:2]

    theirs = SAE.load_from_disk(inside, converter=loader)
    ours = load_dictionary(inside, d_model=D_MODEL)
    called = {"res": "blocks.20.hook_resid_post", "mlp": "blocks.20.hook_mlp_out",
              "att": "blocks.20.attn.hook_z"}  # fmt: skip
    assert theirs.cfg.metadata.hook_name == called[site]
    hooks = {"res": "resid_post.20", "mlp": "mlp_out_post.20", "att": "z.20"}
    assert (ours.hook, ours.source.hook_from) == (hooks[site], "path")
    assert ours.source.model == theirs.cfg.metadata.model_name == "gemma-2-2b"
    assert ours.source.prepend_bos is theirs.cfg.metadata.prepend_bos
    equals(ours, theirs, rows().reshape(N_ROWS, 4, -1) if site == "att" else None)


TRAINERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "AutoEncoder": ("standard", "StandardTrainer", {"warmup_steps": 5}),
    "AutoEncoder, not of unit length": (
        "standard", "StandardTrainerAprilUpdate", {"warmup_steps": 5},
    ),
    "GatedAutoEncoder": ("gdm", "GatedSAETrainer", {"warmup_steps": 5}),
    "JumpReluAutoEncoder": ("jumprelu", "JumpReluTrainer", {"warmup_steps": 5}),
    "AutoEncoderTopK": ("top_k", "TopKTrainer", {"k": 6, "threshold_start_step": 2}),
    "BatchTopKSAE": ("batch_top_k", "BatchTopKTrainer", {"k": 6, "threshold_start_step": 2}),
    "MatryoshkaBatchTopKSAE": (
        "matryoshka_batch_top_k", "MatryoshkaBatchTopKTrainer",
        {"k": 6, "threshold_start_step": 2, "group_fractions": [0.25, 0.75]},
    ),
}  # fmt: skip


def trained(name: str, folder: Path, data: Any, d_model: int, **further: Any) -> Path:
    """Train for 30 steps, as a user does; return the folder of ``ae.pt`` and ``config.json``."""
    import importlib

    from dictionary_learning.training import trainSAE

    module, trainer, options = copy.deepcopy(TRAINERS[name])
    config: dict[str, Any] = {
        "trainer": getattr(
            importlib.import_module(f"dictionary_learning.trainers.{module}"), trainer
        ),
        "steps": 30, "activation_dim": d_model, "dict_size": N_FEATURES, "layer": 7,
        "lm_name": "openai-community/gpt2", "device": "cpu", "lr": 1e-2, **options, **further,
    }  # fmt: skip
    if "TopK" not in name:
        config["sparsity_warmup_steps"] = 5
    else:
        config["warmup_steps"] = 5
    trainSAE(
        data, [config], steps=30, save_dir=str(folder), device="cpu", normalize_activations=True
    )
    return folder / "trainer_0"


@pytest.mark.parametrize("name", TRAINERS)
def test_dictionary_learning(name: str, tmp_path: Path) -> None:
    from dictionary_learning.utils import load_dictionary as their_load

    x = rows()
    # Of each its own: this trainer divides its batches in place.
    data = [part.clone() for part in itertools.islice(itertools.cycle(x.split(50)), 200)]
    folder = trained(name, tmp_path, data, D_MODEL, submodule_name="resid_post_layer_7")
    ours = load_dictionary(folder, hook="resid_post.7", d_model=D_MODEL, model="gpt2")
    theirs, config = their_load(str(folder), device="cpu")
    assert config["trainer"]["dict_class"] == name.partition(",")[0]
    assert (ours.n_features, ours.source.hook_from) == (N_FEATURES, "file")
    equals(ours, theirs, x)


@pytest.mark.parametrize("name", ["AutoEncoder", "GatedAutoEncoder", "JumpReluAutoEncoder",
                                  "MatryoshkaBatchTopKSAE"])  # fmt: skip
def test_dictionary_learning_weights_of_any_value(name: str, tmp_path: Path) -> None:
    """Without ``config.json`` too, where the names of the tensors tell the class."""
    import dictionary_learning.utils as utils

    sizes: tuple[Any, ...] = (D_MODEL, N_FEATURES)
    theirs = getattr(utils, name)(*sizes, *((7, [32, 64]) if name.startswith("Matr") else ()))
    randomize(theirs)
    if name.startswith("Matr"):
        theirs.threshold.fill_(0.3)
    torch.save(theirs.state_dict(), tmp_path / "ae.pt")
    if name == "AutoEncoder":
        theirs = utils.AutoEncoder.from_pretrained(tmp_path / "ae.pt")
    equals(load_dictionary(tmp_path / "ae.pt"), theirs)


def test_dictionary_learning_without_bias_at_its_input(tmp_path: Path) -> None:
    from dictionary_learning.dictionary import AutoEncoderNew

    theirs = AutoEncoderNew(D_MODEL, N_FEATURES)
    randomize(theirs)
    torch.save(theirs.state_dict(), tmp_path / "ae.pt")
    equals(load_dictionary(tmp_path), theirs)


def test_a_dictionary_knows_the_rows_of_actds_that_it_was_trained_on(
    path: Path, hook: str, tmp_path: Path
) -> None:
    dataset = actds.open(path)
    d_model = dataset.hooks[hook].d_model

    def loader(**options: Any) -> actds.Loader:
        return actds.Loader(path, hook, batch=8, dtype="float32", epochs=None, **options)

    folder = trained("AutoEncoder", tmp_path / "raw", loader(), d_model)
    ours = load_dictionary(folder, hook=hook, d_model=d_model)
    assert ours.source.trained_on == (dataset.digest,)
    assert (ours.hook, ours.source.hook_from) == (hook, "file")
    normalized = trained("AutoEncoder", tmp_path / "n", loader(normalize="channel"), d_model)
    with pytest.raises(ActdsError, match=r"E015 .*config\.json.*the loader normalized"):
        load_dictionary(normalized)
    made = sae("standard")
    made.cfg.metadata.actds = loader().config
    made.cfg.metadata.hook_name = None
    made.save_model(tmp_path / "sae")
    of_sae_lens = load_dictionary(tmp_path / "sae", hook=hook)
    assert of_sae_lens.source.trained_on == (dataset.digest,)
    assert (of_sae_lens.hook, of_sae_lens.source.hook_from) == (hook, "file")
