"""The capture op: what hooks leave in their buffers, traced into a compiled graph too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actds.errors import ActdsError
from actds.format.readouts import Readouts, compute, matrix
from actds_testing.synthetic_engine import ResidualStack
from actds_writers.capture import op as capture
from actds_writers.capture.taps import StreamForm, decoder_layers
from actds_writers.ipc.messages import HookSpec


class Layer(torch.nn.Module):
    """A decoder layer in vLLM's manner: hidden and residual, whose sum is the stream."""

    def __init__(self, scale: float, *, split: bool) -> None:
        super().__init__()
        self.scale, self.split = scale, split

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        stream = hidden if residual is None else hidden + residual
        return (stream * self.scale, stream) if self.split else stream * (1 + self.scale)


def layered(*, split: bool) -> ResidualStack:
    return ResidualStack(Layer(0.5 + i, split=split) for i in range(3))


def installed(
    model: torch.nn.Module,
    layers: list[int],
    dtype: torch.dtype,
    directions: np.ndarray | None = None,
    form: StreamForm = "unverified",
) -> capture.HookBuffers:
    stored = next(name for name, one in capture.TORCH_TYPES.items() if one == dtype)
    return capture.install(
        model,
        [HookSpec(f"resid_post.{n}", "resid_post", n, 8, stored) for n in layers],
        max_rows=16,
        device=torch.device("cpu"),
        form=form,
        directions=None if directions is None else list(directions),
    )


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_buffers_hold_the_residual_stream_after_each_layer(split: bool, compiled: bool) -> None:
    model = layered(split=split)
    buffers = installed(model, [0, 2], torch.float32)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    for n in (5, 9):
        hidden = torch.randn(n, 8)
        buffers.reset()
        with torch.no_grad():
            run(hidden)
        assert buffers.seen.tolist() == [n, n]
        after_first = hidden * 1.5
        assert torch.allclose(buffers.rows[0][:n], after_first)
        assert torch.allclose(buffers.rows[1][:n], after_first * 2.5 * 3.5)


def test_a_hook_that_did_not_run_has_seen_nothing() -> None:
    model = layered(split=True)
    buffers = installed(model, [1], torch.float32)
    model(torch.randn(4, 8))
    buffers.reset()
    assert buffers.seen.tolist() == [0]


def test_a_cast_rounds_to_nearest_even() -> None:
    model = layered(split=False)
    buffers = installed(model, [0], torch.bfloat16)
    hidden = torch.randn(4, 8)
    model(hidden)
    assert torch.equal(buffers.rows[0][:4], (hidden * 1.5).to(torch.bfloat16))


def test_a_layer_that_does_not_exist_is_named() -> None:
    with pytest.raises(ActdsError, match="E007 resid_post:7: no such decoder layer"):
        installed(layered(split=True), [7], torch.float32)


@pytest.mark.parametrize("path", ["transformer.h", "transformer.blocks", "model.decoder.layers"])
def test_layers_are_found_under_the_names_that_families_give_them(path: str) -> None:
    model, stack = torch.nn.Module(), layered(split=False).layers
    stack[0].layers = layered(split=False).layers  # a layer may have a stack of its own inside
    *parents, name = path.split(".")
    inner = model
    for parent in parents:
        inner.add_module(parent, torch.nn.Module())
        inner = inner.get_submodule(parent)
    inner.add_module(name, stack)
    assert decoder_layers(model) == dict(enumerate(stack))


class Composed(torch.nn.Module):
    """A model of a vision tower and a language model, which it names in vLLM's manner."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = layered(split=True)
        self.vision_tower = torch.nn.Module()
        self.vision_tower.blocks = torch.nn.ModuleList(Layer(9.0, split=False) for _ in range(5))


def test_the_layers_of_a_composed_model_are_those_of_its_language_model() -> None:
    model = Composed()
    model.get_language_model = lambda: model.language_model  # type: ignore[assignment]
    assert decoder_layers(model) == dict(enumerate(model.language_model.layers))


def test_layers_in_two_places_are_refused_and_named() -> None:
    with pytest.raises(ActdsError, match=r"E007.*language_model\.layers, vision_tower\.blocks"):
        decoder_layers(Composed())


def test_the_layers_of_a_vision_model_of_transformers_are_those_that_decode() -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3",
        text_config={**small, "num_hidden_layers": 3, "num_key_value_heads": 1, "vocab_size": 64},
        vision_config={**small, "num_hidden_layers": 5, "image_size": 28, "patch_size": 14},
    )
    model = AutoModelForImageTextToText.from_config(config)
    assert decoder_layers(model) == dict(enumerate(model.model.language_model.layers))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_readouts_are_those_of_the_stored_rows(dtype: torch.dtype, compiled: bool) -> None:
    model = layered(split=True)
    probes = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    packed = matrix(Readouts(8, seed=3, n_probes=5), probes, 2, 8)
    buffers = installed(model, [0, 2], dtype, packed)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    for n in (7, 3):
        with torch.no_grad():
            run(torch.randn(n, 8))
        for hook in range(2):
            rows = buffers.rows[hook][:n].float().numpy()
            want = compute(rows, packed[hook])
            assert np.allclose(buffers.readouts[hook, :n].numpy(), want, rtol=1e-5, atol=1e-5)
            assert np.allclose(want[:, 9:], rows @ probes[hook].T, rtol=1e-5, atol=1e-5)
    assert buffers.readouts.shape == (2, 16, 14)


def test_without_readouts_there_is_no_column() -> None:
    assert installed(layered(split=True), [0], torch.float32).readouts.shape == (1, 16, 0)
