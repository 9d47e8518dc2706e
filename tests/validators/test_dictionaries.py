"""Dictionaries: the formulas against plain numpy, and files that are refused before they are used.

What SAELens and dictionary_learning compute with the same files is compared in
``tests/consumers/test_dictionaries.py``, where these libraries are.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from actds.errors import ActdsError
from actds_testing.places import ROOT
from actds_validators import dictionaries as dictionary
from actds_validators.dictionaries import Dictionary, Source, places_of, same_model, same_place
from actds_validators.dictionaries.formats import load_dictionary

D_MODEL, N_FEATURES = 6, 20
SOURCE = Source("saelens", "weights", "0" * 64, "resid_post.3")
Arrays = dict[str, Any]


def weights(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    return {
        "W_enc": normal(D_MODEL, N_FEATURES), "b_enc": normal(N_FEATURES),
        "W_dec": normal(N_FEATURES, D_MODEL), "b_dec": normal(D_MODEL),
    }  # fmt: skip


def rows(n: int = 50) -> Any:
    found = np.random.default_rng(1).normal(size=(n, D_MODEL), loc=2).astype(np.float32)
    found[::5] *= 1e-3  # near the epsilon of layer_norm
    return found


def made(kind: Any, **further: Any) -> Dictionary:
    rng = np.random.default_rng(2)
    w = weights()
    extra: Arrays = {
        "standard": {},
        "topk": {"k": 4},
        "jumprelu": {"threshold": rng.uniform(0, 3, N_FEATURES).astype(np.float32)},
        "batchtopk": {"threshold": np.full(N_FEATURES, 1.5, np.float32)},
        "gated": {"gain": rng.uniform(0.5, 2, N_FEATURES).astype(np.float32),
                  "b_mag": rng.normal(size=N_FEATURES).astype(np.float32)},
    }[kind]  # fmt: skip
    names = ("W_enc", "b_enc", "W_dec", "b_dec")
    return Dictionary(kind, *(w[name] for name in names), SOURCE, **{**extra, **further})


def by_hand(one: Dictionary, x: Any) -> tuple[Any, Any]:
    """Return features and rebuilt rows by the formulas, row for row, in float64."""
    features, rebuilt = [], []
    for row in x.astype(np.float64):
        mean, length = 0.0, 1.0
        if one.normalization == "layer_norm":
            mean, length = row.mean(), row.std(ddof=1)
            z = (row - mean) / (length + 1e-5)
        elif one.normalization == "constant_norm_rescale":
            length = np.sqrt((row**2).sum() / len(row))
            z = row / length
        else:
            z = row
        h = (z - one.b_dec if one.apply_b_dec_to_input else z) @ one.w_enc.astype(np.float64)
        before = h + one.b_enc
        active = before > 0
        if one.threshold is not None:
            active &= before > one.threshold
        if one.gain is not None:
            before = h * one.gain + one.b_mag
        f = np.where(active & (before > 0), before, 0)
        if one.k is not None:
            f[np.argsort(f)[: -one.k]] = 0
        features.append(f)
        rebuilt.append((f @ one.w_dec + one.b_dec) * length + mean)
    return np.array(features), np.array(rebuilt)


KINDS = ["standard", "topk", "jumprelu", "batchtopk", "gated"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalization", ["none", "layer_norm", "constant_norm_rescale"])
@pytest.mark.parametrize("centred", [True, False])
def test_features_and_rebuilt_rows_are_the_formulas(
    kind: str, normalization: Any, centred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(kind, normalization=normalization, apply_b_dec_to_input=centred)
    features, rebuilt = by_hand(one, rows())
    assert 0.02 < (features > 0).mean() < 0.8
    for block in (1 << 22, 3 * N_FEATURES, 1):  # all at once; 17 blocks; a row at a time
        monkeypatch.setattr(dictionary, "BLOCK", block)
        got = one.encode(rows())
        assert got.dtype == np.float32
        assert np.allclose(got, features, rtol=1e-5, atol=1e-5)
        sparse = one.encode_sparse(rows())
        assert np.array_equal(sparse.toarray(), got) and sparse.nnz == (got != 0).sum()
        for there in (got, sparse):
            assert np.allclose(one.decode(there, rows()), rebuilt, rtol=1e-5, atol=1e-4)
        assert np.allclose(one.decode(one.encode(rows()), rows()), rebuilt, rtol=1e-5, atol=1e-4)


def test_no_rows_have_no_features() -> None:
    one = made("topk")
    empty = rows()[:0]
    assert one.encode(empty).shape == one.encode_sparse(empty).shape == (0, N_FEATURES)
    assert one.decode(one.encode(empty), empty).shape == (0, D_MODEL)


def test_a_row_that_is_constant_or_zero_has_finite_features() -> None:
    flat = np.array([[0] * D_MODEL, [3] * D_MODEL], np.float32)
    for normalization in ("layer_norm", "constant_norm_rescale"):
        one = made("standard", normalization=normalization)
        assert (
            np.isfinite(one.encode(flat)).all()
            and np.isfinite(one.decode(one.encode(flat), flat)).all()
        )


def test_what_does_not_fit_the_dictionary_is_refused() -> None:
    one = made("standard", normalization="layer_norm")
    with pytest.raises(ActdsError, match=r"E015 weights: rows \(4, 5\)"):
        one.encode(np.zeros((4, 5)))
    bad = rows()
    bad[7, 2] = np.inf
    for use in (one.encode, one.encode_sparse, one.frame):
        with pytest.raises(ActdsError, match=r"E601 resid_post\.3: 1 of 50 rows"):
            use(bad)
    with pytest.raises(ValueError, match="layer_norm"):
        one.decode(one.encode(rows()))


@pytest.mark.parametrize(
    ("kind", "further", "words"),
    [
        ("topk", {"k": None}, "k None in a topk"),
        ("topk", {"k": 0}, "k 0"),
        ("topk", {"k": N_FEATURES + 1}, "k 21"),
        ("standard", {"k": 3}, "k 3 in a standard"),
        ("jumprelu", {"threshold": None}, "no threshold in a jumprelu"),
        ("standard", {"threshold": np.zeros(N_FEATURES)}, "a threshold in a standard"),
        ("jumprelu", {"threshold": np.zeros(3)}, r"threshold \(3,\)"),
        ("jumprelu", {"threshold": np.full(N_FEATURES, 1e300)}, "infinity in threshold"),
        ("gated", {"gain": np.full(N_FEATURES, np.nan)}, "NaN or infinity in gain"),
        ("gated", {"b_mag": None}, "no b_mag"),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_refused(
    kind: str, further: Arrays, words: str
) -> None:
    with pytest.raises(ActdsError, match=f"E015 weights: .*{words}"):
        made(kind, **further)


def test_nobody_changes_its_arrays() -> None:
    one = made("gated")
    for array in (one.w_enc, one.b_enc, one.w_dec, one.b_dec, one.gain, one.b_mag):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0  # type: ignore[index]


# What the names of other libraries stand for.


def test_names_elsewhere_are_those_of_the_specification() -> None:
    """Each kind of the table of section 16.1 that has one name there and the same rows."""
    text = (ROOT / "spec" / "0.1" / "annexes" / "16-models.md").read_text()
    table = text.split("## 16.1")[1].split("## 16.2")[0]
    found = 0
    for kind, names in re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE):
        for name in re.findall(r"`(blocks\.L\.(?:attn\.)?hook_\w+)`", names):
            places = places_of(name.replace("L", "5", 1))
            assert f"{kind}.5" in places, (kind, name)
            found += 1
    assert found == 9
    # Two places of one name: the model tells which.
    for model, kind in [("google/gemma-2-2b", "mlp_out_post"), ("Gemma-3-1b", "mlp_out_post")]:
        assert places_of("blocks.5.hook_mlp_out", model) == (f"{kind}.5",)
    assert places_of("blocks.5.hook_mlp_out", "gpt2") == ("mlp_out.5", "mlp_out_post.5")


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("resid_post.8", "resid_post.8"),
        ("model.layers.8", "resid_post.8"),
        ("model.language_model.layers.8", "resid_post.8"),
        ("transformer.h.8.mlp", "mlp_out.8"),
        ("model.layers.8.self_attn.output", "attn_out.8"),
    ],
)
def test_modules_and_own_names_are_places(name: str, hook: str) -> None:
    assert places_of(name) == (hook,)


@pytest.mark.parametrize("name", [
    "blocks.5.hook_mlp_in", "blocks.5.attn.hook_q", "blocks.5.ln2.hook_normalized", "hook_embed",
    "ln_final.hook_normalized", "blocks.x.hook_resid_post", "", "blocks.5.hook_resid_post\n",
])  # fmt: skip
def test_a_place_that_is_no_hook_has_no_name(name: str) -> None:
    assert places_of(name) == ()


def test_the_stream_before_a_layer_is_that_after_the_last() -> None:
    assert same_place("resid_pre.8", "resid_post.7") and same_place("z.3", "z.3")
    assert not same_place("resid_pre.8", "resid_post.8")
    assert not same_place("resid_pre.0", "resid_post.0")
    assert same_model("google/gemma-2-2b", "/models/Gemma-2-2b/")
    assert same_model("gpt2-small", "openai-community/gpt2")
    assert not same_model("gemma-2-2b", "gemma-2-2b-it")


# Files of each format, as its library writes them.

CONFIG: Arrays = {
    "architecture": "standard", "d_in": D_MODEL, "d_sae": N_FEATURES, "dtype": "float32",
    "apply_b_dec_to_input": True, "normalize_activations": "none", "reshape_activations": "none",
    "metadata": {"sae_lens_version": "6.54.12", "hook_name": "blocks.3.hook_resid_post",
                 "model_name": "gpt2", "prepend_bos": True},
}  # fmt: skip


def saelens(folder: Path, tensors: Arrays | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(weights() if tensors is None else tensors, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def gemma(folder: Path, **further: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    thresholds = np.ones(N_FEATURES, np.float32)
    np.savez(folder / "params.npz", **{**weights(), "threshold": thresholds, **further})
    return folder


def autoencoder(folder: Path, state: Any = None, trainer: Arrays | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(state_of("AutoEncoder") if state is None else state, folder / "ae.pt")
    if trainer is not None:
        said = {"activation_dim": D_MODEL, "dict_size": N_FEATURES, "layer": 3, "lm_name": "gpt2"}
        (folder / "config.json").write_text(json.dumps({"trainer": {**said, **trainer}}))
    return folder


def state_of(name: str, **further: Any) -> Arrays:
    w = {key: torch.from_numpy(value) for key, value in weights().items()}
    linear = {
        "encoder.weight": w["W_enc"].T, "encoder.bias": w["b_enc"], "decoder.weight": w["W_dec"].T,
    }  # fmt: skip
    found = {
        "AutoEncoder": {**linear, "bias": w["b_dec"]},
        "TopK": {**linear, "b_dec": w["b_dec"], "k": torch.tensor(4, dtype=torch.int),
                 "threshold": torch.tensor(1.5)},
    }[name]  # fmt: skip
    return {**found, **further}


def test_each_format_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    w = weights()
    for path in (saelens(tmp_path / "a"), tmp_path / "a" / "cfg.json"):
        one = load_dictionary(path, hook="resid_post.3", d_model=D_MODEL)
        assert np.array_equal(one.w_enc, w["W_enc"]) and one.kind == "standard"
    two = gemma(tmp_path / "b")
    (two / "params.npz").rename(two / "sae.bin")  # the name does not matter
    jump = load_dictionary(two / "sae.bin", hook="mlp_out.3")
    assert (jump.kind, jump.apply_b_dec_to_input, jump.hook) == ("jumprelu", False, "mlp_out.3")
    assert jump.source.hook_from == "caller" and jump.source.prepend_bos is None
    assert np.array_equal(jump.w_dec, w["W_dec"])
    three = autoencoder(tmp_path / "c")
    (three / "ae.pt").rename(three / "sae.bin")
    ae = load_dictionary(three / "sae.bin")
    norms = np.linalg.norm(w["W_dec"], axis=1)
    assert (ae.kind, ae.hook) == ("standard", None)
    assert np.allclose(ae.w_enc, w["W_enc"] * norms) and np.allclose(
        ae.w_dec, w["W_dec"] / norms[:, None]
    )
    assert len({one.source.sha256, jump.source.sha256, ae.source.sha256}) == 3


def test_batch_top_k_has_the_threshold_of_its_file(tmp_path: Path) -> None:
    kinds = {"AutoEncoderTopK": "topk", "BatchTopKSAE": "batchtopk"}
    for name, kind in kinds.items():
        folder = autoencoder(tmp_path / name, state_of("TopK"), {"dict_class": name, "k": 4})
        one = load_dictionary(folder, hook="resid_post.3")
        assert (one.kind, one.k) == (kind, 4 if kind == "topk" else None)
        assert one.threshold is None or (one.threshold == 1.5).all()
        assert one.source.hook_from == "caller"  # the layer is said, its kind is not
        with pytest.raises(ActdsError, match=r"E015 .*layer 3; expected resid_post\.4"):
            load_dictionary(folder, hook="resid_post.4")


@pytest.mark.parametrize("kind", ["topk", "batchtopk", "gated", "jumprelu"])
def test_what_a_folder_of_sae_lens_means(kind: str, tmp_path: Path) -> None:
    """By its formulas, row for row; SAELens itself is asked in tests/consumers."""
    w, rng = weights(), np.random.default_rng(3)
    lengths = np.linalg.norm(w["W_dec"], axis=1)
    before = (rows() - w["b_dec"]) @ w["W_enc"]
    config: Arrays = {"rescale_acts_by_decoder_norm": True, "k": 3}
    if kind == "topk":
        f = np.maximum((before + w["b_enc"]) * lengths, 0)
        f = np.where(f >= np.sort(f, axis=1)[:, -3:-2], f, 0)
    elif kind == "batchtopk":
        w["topk_threshold"] = np.array(2.0)
        f = (before + w["b_enc"]) * lengths
        f = np.where(f > 2, f, 0)
    elif kind == "jumprelu":
        w["threshold"] = rng.uniform(0, 2, N_FEATURES).astype(np.float32)
        f = np.where(before + w["b_enc"] > w["threshold"], before + w["b_enc"], 0)
    else:
        w["b_gate"] = w.pop("b_enc")
        w["b_mag"], w["r_mag"] = rng.normal(size=(2, N_FEATURES)).astype(np.float32)
        f = np.maximum(before * np.exp(w["r_mag"]) + w["b_mag"], 0) * (before > -w["b_gate"])
    rescaled = f / lengths if "topk" in kind else f
    one = load_dictionary(saelens(tmp_path / "it", w, architecture=kind, **config))
    assert one.kind == kind and 0.05 < (f > 0).mean() < 0.8
    assert np.allclose(one.encode(rows()), f, rtol=1e-5, atol=1e-5)
    rebuilt = rescaled @ w["W_dec"] + w["b_dec"]
    assert np.allclose(one.decode(one.encode(rows()), rows()), rebuilt, rtol=1e-5, atol=1e-5)


def test_dictionary_learning_takes_the_bias_off_where_its_class_does(tmp_path: Path) -> None:
    w = {name: torch.from_numpy(value) for name, value in weights().items()}
    jump = load_dictionary(autoencoder(tmp_path / "a", {**w, "threshold": torch.zeros(N_FEATURES)}))
    new = state_of("AutoEncoder")
    new["decoder.bias"] = new.pop("bias")
    plain = load_dictionary(autoencoder(tmp_path / "b", new))
    for one, kind in ((jump, "jumprelu"), (plain, "standard")):
        f = np.maximum(rows() @ weights()["W_enc"] + weights()["b_enc"], 0)
        assert one.kind == kind and np.allclose(one.encode(rows()), f, rtol=1e-5, atol=1e-5)


def test_float16_and_bfloat16_are_read_as_what_they_are(tmp_path: Path) -> None:
    import safetensors.torch as st

    state = {name: torch.from_numpy(value) for name, value in weights().items()}
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        typed = {name: value.to(kind) for name, value in state.items()}
        st.save_file(typed, saelens(tmp_path / "a") / "sae_weights.safetensors")
        one = load_dictionary(tmp_path / "a")
        assert np.array_equal(one.w_enc, typed["W_enc"].float().numpy())
        typed = {name: value.to(kind) for name, value in state_of("AutoEncoder").items()}
        two = load_dictionary(autoencoder(tmp_path / "b", typed))
        assert np.array_equal(two.b_dec, typed["bias"].float().numpy())


# Files that are refused.


class Code:
    """Code in a pickle: a file that exists afterwards says that it ran."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def with_code_npz(folder: Path) -> Path:
    return gemma(folder, b_dec=np.array([Code(folder / "ran")] * D_MODEL, object))


def bare_pickle(folder: Path) -> Path:
    path = folder / "ae.pt"
    folder.mkdir()
    path.write_bytes(pickle.dumps(Code(folder / "ran")))
    return path


def cut(path: Path, nbytes: int) -> Path:
    path.write_bytes(path.read_bytes()[:nbytes])
    return path.parent


def with_header(folder: Path, change: Callable[[Arrays], None]) -> Path:
    """Change the header of a safetensors file, and nothing after it."""
    path = saelens(folder) / "sae_weights.safetensors"
    data = path.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + n])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + n :])
    return folder


def with_members(path: Path, change: Callable[[str, bytes], bytes], kind: int = 0) -> Path:
    """Change members of a zip."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in members.items():
            archive.writestr(name, change(name, data))
    return path.parent


def claiming(folder: Path) -> Path:
    """Claim an encoder of 8 TB in the header of an array."""

    def change(name: str, data: bytes) -> bytes:
        if name != "W_enc.npy":
            return data
        file = io.BytesIO()
        header = {"descr": "<f4", "fortran_order": False, "shape": (D_MODEL, 1 << 38)}
        np.lib.format.write_array_header_1_0(file, header)
        return file.getvalue() + data[-64:]

    return with_members(gemma(folder) / "params.npz", change)


def with_npy_header(folder: Path, header: str) -> Path:
    """Put other text in the header of an array."""
    text = header.encode()
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
    return with_members(gemma(folder) / "params.npz", lambda name, data: array)


def a_pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path.parent


def longer_storage(folder: Path) -> Path:
    """Claim a storage of 255 floats over the 6 of a bias."""
    state = {"bias": torch.arange(6.0)}
    path = autoencoder(folder, state) / "ae.pt"

    def change(name: str, data: bytes) -> bytes:
        # numel of the storage, then the size of the tensor: both are K 6.
        return data.replace(b"K\x06", b"K\xff") if name.endswith("data.pkl") else data

    return with_members(path, change)


def wide(folder: Path, scalar: bool = False) -> Path:
    """Save a bias of a billion values that are all one."""
    return autoencoder(folder, state_of("AutoEncoder", bias=torch.zeros(1).expand(1 << 30)))


nan = np.full(D_MODEL, np.nan, np.float32)
NOT_FOLDED = {"normalize_activations": "expected_average_only_in"}
NORMALIZED = {"format": "actds.loader", "normalize": "channel", "normalization": {"x": 1}}
BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing there": (lambda p: p / "nope", "no such file or folder"),
    "an empty folder": (lambda p: p.mkdir() or p, "a folder with nothing"),  # type: ignore[func-returns-value]
    "another folder": (lambda p: cut(gemma(p) / "params.npz", 9) and (p / "params.npz").rename(
        p / "other.npz").parent, "a folder with other.npz"),
    "two formats": (lambda p: gemma(saelens(p)), "params.npz; expected the path of one"),
    "no configuration": (lambda p: (saelens(p) / "cfg.json").unlink() or p, "cfg.json"),  # type: ignore[func-returns-value]
    "a pipe for a configuration": (lambda p: a_pipe(saelens(p) / "cfg.json"), "no regular file"),
    "a pipe for weights": (lambda p: a_pipe(saelens(p) / "sae_weights.safetensors"),
                           "sae_weights.safetensors: no regular file"),
    "a key twice": (lambda p: (saelens(p) / "cfg.json").write_text(
        '{"d_in": 6, "d_sae": 20, "d_in": 6}') and p, "cfg.json: d_in twice"),
    "a configuration that is no JSON": (lambda p: cut(saelens(p) / "cfg.json", 30), "Invalid JSON"),
    "a width of words": (lambda p: saelens(p, d_in="wide"), "cfg.json d_in: 'wide'"),
    "an unknown architecture": (lambda p: saelens(p, architecture="temporal"), "'temporal'"),
    "a transcoder": (lambda p: saelens(p, architecture="skip_transcoder"), "'skip_transcoder'"),
    "a later SAELens": (lambda p: saelens(p, sae_lens_version="7.0.0"), "SAELens 7.0.0"),
    "two hooks": (lambda p: saelens(p, metadata={
        **CONFIG["metadata"], "hook_name_out": "blocks.3.hook_mlp_out"}), "no transcoder"),
    "one head": (lambda p: saelens(p, metadata={**CONFIG["metadata"], "hook_head_index": 0}),
                 "head 0 alone"),
    "normalization not folded": (lambda p: saelens(p, **NOT_FOLDED), "not folded"),
    "whitening not folded": (lambda p: saelens(p, normalize_activations="covariance_whitening"),
                             "not folded"),
    "normalization of before 4": (lambda p: saelens(p, metadata={}, normalize_activations=True),
                                  "not folded"),
    "another normalization": (lambda p: saelens(p, normalize_activations="rms"), "'rms'"),
    "rows that a loader normalized": (lambda p: saelens(p, metadata={
        **CONFIG["metadata"], "actds": NORMALIZED}), r"the loader normalized \(channel\)"),
    "another activation": (lambda p: saelens(p, metadata={}, activation_fn_str="tanh-relu"),
                           "'tanh-relu'"),
    "no k": (lambda p: saelens(p, architecture="topk"), "cfg.json k: None"),
    "half a feature": (lambda p: saelens(p, architecture="topk", k=2.5), "cfg.json k: 2.5"),
    "more than all features": (lambda p: saelens(p, architecture="topk", k=21), "k 21"),
    "a tensor missing": (lambda p: saelens(p, architecture="jumprelu"), "no threshold"),
    "a tensor too many": (lambda p: saelens(p, {**weights(), "W_skip": nan}), "also W_skip"),
    "another shape": (lambda p: saelens(p, {**weights(), "W_dec": weights()["W_dec"][:9]}),
                      r"W_dec: \(9, 6\); expected \(20, 6\), as cfg.json"),
    "another width than said": (lambda p: saelens(p, d_in=7), r"W_enc: \(6, 20\)"),
    "NaN": (lambda p: saelens(p, {**weights(), "b_dec": nan}), "NaN or infinity in b_dec"),
    "integers": (lambda p: saelens(p, {**weights(), "b_dec": np.zeros(6, np.int64)}), "int64"),
    "truncated safetensors": (lambda p: cut(saelens(p) / "sae_weights.safetensors", 900),
                              "truncated"),
    "no safetensors": (lambda p: cut(saelens(p) / "sae_weights.safetensors", 5), "5 bytes"),
    "a shape larger than its bytes": (lambda p: with_header(p, lambda h: h["W_enc"].update(
        shape=[D_MODEL, 1 << 40])), "W_enc"),
    "bytes after the file": (lambda p: with_header(p, lambda h: h["W_enc"].update(
        data_offsets=[1 << 50, (1 << 50) + 480])), "truncated"),
    "bytes before the file": (lambda p: with_header(p, lambda h: h["W_enc"].update(
        data_offsets=[-(1 << 20), 480 - (1 << 20)])), "sae_weights"),
    "bytes of the header": (lambda p: with_header(p, lambda h: h["b_dec"].update(
        data_offsets=[-24, 0])), "b_dec"),
    "metadata that are no words": (lambda p: with_header(p, lambda h: h.update(
        __metadata__={"hook": 3})), "a header that cannot be read"),
    "a type of no floats": (lambda p: with_header(p, lambda h: h["b_dec"].update(
        dtype="F8_E5M2")), "F8_E5M2"),
    "a scale that is left": (lambda p: saelens(p, {
        **weights(), "scaling_factor": np.full(N_FEATURES, 2, np.float32)}), "scaling_factor"),
    "a feature without a direction": (lambda p: saelens(p, {
        **weights(), "W_dec": np.zeros((N_FEATURES, D_MODEL), np.float32)},
        architecture="topk", k=2, rescale_acts_by_decoder_norm=True), "20 features without"),
    "directions too long": (lambda p: autoencoder(p, state_of("AutoEncoder", **{
        "decoder.weight": torch.full((D_MODEL, N_FEATURES), 3e38)})), "infinity in w_enc"),
    "a transcoder of Gemma": (lambda p: gemma(
        p / "gemma-scope-2b-pt-transcoders" / "layer_3"), "a transcoder"),
    "an embedding of Gemma": (lambda p: gemma(
        p / "gemma-scope-2b-pt-res" / "embedding" / "layer_0"), "embedding"),
    "an array of Gemma missing": (lambda p: with_members(
        gemma(p, extra=nan) / "params.npz", lambda n, d: d), "also extra"),
    "infinity in Gemma": (lambda p: gemma(p, b_dec=nan), "NaN or infinity"),
    "code in an array": (with_code_npz, "may be code"),
    "a claim of 8 TB": (claiming, "W_enc.npy: .* bytes for float32"),
    "a header too deep": (lambda p: with_npy_header(p, "-" * 9000 + "1"), "params.npz: "),
    "a header that does not end": (lambda p: with_npy_header(p, "[" * 150), "params.npz: "),
    "a bomb": (lambda p: with_members(gemma(p, b_dec=np.zeros(1 << 18)) / "params.npz",
                                      lambda n, d: d, zipfile.ZIP_DEFLATED), "weights as they"),
    "a cut npz": (lambda p: cut(gemma(p) / "params.npz", 700) / "params.npz", "that is cut"),
    "code in a pickle": (lambda p: autoencoder(p, {"bias": Code(p / "ran")}), "mkdir"),
    "a pickle and no zip": (bare_pickle, "a bare pickle"),
    "a whole module": (lambda p: autoencoder(p, torch.nn.Linear(2, 2)), "Linear"),
    "a list": (lambda p: autoencoder(p, [torch.zeros(2)]), "a list"),
    "numbers for tensors": (lambda p: autoencoder(p, {"bias": 1.0}), "bias: a float"),
    "a sparse tensor": (lambda p: autoencoder(p, {"bias": torch.eye(2).to_sparse()}), "sparse"),
    "a billion values in four bytes": (wide, r"bias: \(1073741824,\)"),
    "a storage longer than its bytes": (longer_storage, "ae.pt: unreadable: "),
    "other tensors": (lambda p: autoencoder(p, {"weight": torch.zeros(2)}), "tensors weight"),
    "no class": (lambda p: autoencoder(p, state_of("TopK")), "AutoEncoderTopK or of BatchTopK"),
    "another class": (lambda p: autoencoder(p, None, {"dict_class": "GatedAutoEncoder"}),
                      "no decoder_bias"),
    "an unknown class": (lambda p: autoencoder(p, None, {"dict_class": "CrossCoder"}),
                         "config.json trainer.dict_class: 'CrossCoder'"),
    "a k that differs": (lambda p: autoencoder(
        p, state_of("TopK"), {"dict_class": "AutoEncoderTopK", "k": 9}), "4 here, 9 in config"),
    "a threshold never estimated": (lambda p: autoencoder(
        p, state_of("TopK", threshold=torch.tensor(-1.0)), {"dict_class": "BatchTopKSAE"}),
        "never estimated"),
    "other sizes than said": (lambda p: autoencoder(p, None, {"dict_size": 21}), r"\(6, 21\)"),
    "NaN in a pickle": (lambda p: autoencoder(p, state_of(
        "AutoEncoder", bias=torch.full((D_MODEL,), torch.nan))), "NaN or infinity in b_dec"),
    "a decoder of other features": (lambda p: autoencoder(p, state_of(
        "AutoEncoder", **{"decoder.weight": torch.zeros(D_MODEL, 9)})), "a decoder"),
    "a bias of other features": (lambda p: autoencoder(p, state_of(
        "AutoEncoder", **{"encoder.bias": torch.zeros(9)})), r"encoder.bias: \(9,\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_name_and_nothing_of_it_runs(name: str, tmp_path: Path) -> None:
    make, words = BAD[name]
    path = make(tmp_path / "it")
    tracemalloc.start()
    try:
        with pytest.raises(ActdsError, match=rf"E015 (?s:.)*{words}") as refused:
            load_dictionary(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    first, _, next_step = str(refused.value).partition("\n")
    assert str(tmp_path) in first and "expected" in first and next_step
    assert not (tmp_path / "it" / "ran").exists()


def test_a_record_of_a_loader_that_is_none_says_nothing(tmp_path: Path) -> None:
    record = {"format": "actds.loader", "digest": [{}], "datasets": [[1], {"digest": {}}]}
    path = saelens(tmp_path / "it", metadata={**CONFIG["metadata"], "actds": record})
    assert load_dictionary(path).source.trained_on == ()


def test_the_model_of_the_rows_is_known_where_only_the_loader_says_it(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"weights").hexdigest()
    models = [{"name": "org/gpt2", "weights_sha256": digest}]
    record = {"format": "actds.loader", "models": models}
    said = {"hook_name": "blocks.3.hook_resid_post", "actds": record}
    path = saelens(tmp_path / "it", metadata={"sae_lens_version": "6.0.0", **said})
    source = load_dictionary(path, model="gpt2").source
    assert (source.model, source.weights) == ("org/gpt2", (digest,))
    with pytest.raises(ActdsError, match=r"E015 .*of org/gpt2; expected pythia"):
        load_dictionary(path, model="pythia")
    record["models"] = [*models, {"name": "other", "weights_sha256": None}]
    path = saelens(tmp_path / "two", metadata={"sae_lens_version": "6.0.0", **said})
    assert load_dictionary(path, model="pythia").source.model is None


def test_damaged_files_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    files = [
        saelens(tmp_path / "a") / "sae_weights.safetensors",
        tmp_path / "a" / "cfg.json",
        gemma(tmp_path / "b") / "params.npz",
        autoencoder(tmp_path / "c") / "ae.pt",
        autoencoder(tmp_path / "d", state_of("TopK"), {"dict_class": "BatchTopKSAE"})
        / "config.json",
    ]
    rng = np.random.default_rng(0)
    for file in files:
        whole, refused = file.read_bytes(), 0
        for _ in range(16):
            data = bytearray(whole)
            at = int(rng.integers(len(data)))
            data[at : at + int(rng.integers(3))] = rng.bytes(int(rng.integers(1, 3)))
            file.write_bytes(data[: at + 1] if rng.random() < 0.2 else data)
            try:
                load_dictionary(file.parent)
            except ActdsError as error:
                assert error.code == "E015"
                refused += 1
        assert refused > 2, file


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"hook": "resid_post.4"}, r"blocks\.3\.hook_resid_post, which is resid_post\.3; expected"),
        ({"hook": "resid_pre.3"}, r"expected resid_pre\.3"),
        ({"hook": "mlp_out.3"}, r"expected mlp_out\.3"),
        ({"d_model": 7, "hook": "resid_post.3"}, "6 channels; expected 7, as resid_post.3 has"),
        ({"model": "/models/SmolLM2-135M"}, "of gpt2; expected /models/SmolLM2-135M"),
    ],
)
def test_a_dictionary_of_other_rows_is_refused_before_its_weights_are_read(
    asked: Arrays, words: str, tmp_path: Path
) -> None:
    saelens(tmp_path)
    assert load_dictionary(tmp_path, hook="resid_pre.4", d_model=6, model="m/gpt2").n_features
    (tmp_path / "sae_weights.safetensors").write_bytes(b"")
    with pytest.raises(ActdsError, match=rf"E015 .*cfg\.json: .*{words}"):
        load_dictionary(tmp_path, **asked)


def test_a_hook_that_actds_does_not_have_is_nobodys(tmp_path: Path) -> None:
    said = {**CONFIG["metadata"], "hook_name": "blocks.3.hook_mlp_in"}
    saelens(tmp_path, metadata=said)
    assert load_dictionary(tmp_path).hook is None
    with pytest.raises(ActdsError, match=r"E015 .*of blocks\.3\.hook_mlp_in; expected mlp_in\.3"):
        load_dictionary(tmp_path, hook="mlp_in.3")


def test_folders_of_gemma_scope_say_where_it_was_trained(tmp_path: Path) -> None:
    inside = tmp_path / "models--google--gemma-scope-9b-it-res" / "x" / "layer_20" / "width_16k"
    folder = gemma(inside)
    one = load_dictionary(folder)
    assert (one.hook, one.source.hook_from) == ("resid_post.20", "path")
    assert (one.source.model, one.source.prepend_bos) == ("gemma-2-9b-it", True)
    assert load_dictionary(folder, hook="resid_pre.21", model="google/gemma-2-9b-it").hook
    for asked in ({"hook": "resid_post.21"}, {"model": "gemma-2-9b"}, {"d_model": 2304}):
        with pytest.raises(ActdsError, match=r"E015 .*params\.npz"):
            load_dictionary(folder, **asked)  # type: ignore[arg-type]
    bare = gemma(tmp_path / "layer_5")  # of a repository that is not named: the layer is
    assert load_dictionary(bare, hook="z.5").hook == "z.5"
    with pytest.raises(ActdsError, match=r"layer 5; expected z\.6"):
        load_dictionary(bare, hook="z.6")
