"""The built-in kinds: where models have them, what they read, and what is refused by name."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actds.errors import ActdsError
from actds_testing.families.layouts import hooks_of, stack_of
from actds_testing.families.models import FAMILIES, N_LAYERS, TOKENS, Family
from actds_testing.tiny import make_random_model
from actds_writers.capture import op as capture
from actds_writers.capture.check import load_reference, reference_states, require_sums
from actds_writers.capture.hooks import BUILT_IN, find_kind, hook_specs
from actds_writers.engines.vllm import runner, worker
from actds_writers.ipc.messages import HookSpec

NAMES = (
    "Llama", "Gemma 2", "OLMo 2", "GLM-4", "GPT-2", "GPT-NeoX, parallel residual", "OPT", "Bloom",
    "GPT-NeoX, serial residual", "Falcon, 40B form", "Granite-MoE-hybrid", "Cohere", "AFMoE",
    "Phi", "Hunyuan, MoE", "Zamba2", "LFM2", "EXAONE-MoE",
)  # fmt: skip
SOME = [family for family in FAMILIES if family.name in NAMES]


def plain_model(family: Family) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family.model_type, **{**TOKENS, **family.options})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("family", SOME, ids=lambda family: family.slug)
def test_the_places_that_are_found_are_those_written_down_by_hand(family: Family) -> None:
    model = plain_model(family)
    found, refused = set(), set()
    for kind in BUILT_IN.values():
        for layer in kind.layers(N_LAYERS):
            try:
                kind.reference(model, layer)
                found.add(f"{kind.name}.{layer}")
            except ActdsError as error:
                assert error.code == "E007" and error.place == f"{kind.name}:{layer}"
                refused.add(f"{kind.name}.{layer}")
    wanted = set(hooks_of(list(stack_of(model, N_LAYERS)), family))
    if family.name == "Bloom":  # its queries never leave its module
        wanted = {name for name in wanted if name[:2] not in ("q.", "k.", "v.")}
    assert found == wanted
    assert "resid_post.0" in found and refused


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_reference(make_random_model(tmp_path_factory.mktemp("llama") / "m"), 100_000)


PROMPTS = ([5, 6, 7, 8, 9], [11, 12, 13])


def test_keys_and_values_are_those_of_the_cache(llama: Any) -> None:
    """Of the cache of a plain forward, which holds keys after rotary embedding."""
    states = reference_states(llama, PROMPTS, ["k", "v", "q", "z"])
    caches = [llama(torch.tensor([list(p)]), use_cache=True).past_key_values for p in PROMPTS]
    for layer in states["k"]:
        for kind, name in (("k", "keys"), ("v", "values")):
            want = torch.cat(
                [getattr(c.layers[layer], name)[0].transpose(0, 1).flatten(1) for c in caches]
            )
            assert torch.allclose(torch.from_numpy(states[kind][layer]), want, atol=1e-6)
        attention = llama.model.layers[layer].self_attn
        n_heads = attention.config.num_attention_heads
        assert states["q"][layer].shape == (8, n_heads * attention.head_dim)
        assert states["z"][layer].shape == states["q"][layer].shape


def test_rows_of_a_plain_forward_add_up_and_the_last_norm_s_are_the_logits(llama: Any) -> None:
    states = reference_states(llama, PROMPTS, [name for name in BUILT_IN if name != "router"])
    assert set(states) == set(BUILT_IN) - {"router", "attn_out_post", "mlp_out_post"}
    for layer, middle in states["resid_mid"].items():
        before, after = states["resid_pre"][layer], states["resid_post"][layer]
        assert abs(before + states["attn_out"][layer] - middle).max() < 1e-5
        assert abs(middle + states["mlp_out"][layer] - after).max() < 1e-5
    (final,) = states["final"].values()
    logits = torch.cat([llama(torch.tensor([list(p)])).logits[0] for p in PROMPTS])
    assert torch.allclose(llama.lm_head(torch.from_numpy(final)), logits, atol=1e-4)
    table = llama.model.embed_tokens.weight[torch.tensor([*PROMPTS[0], *PROMPTS[1]])]
    assert torch.equal(torch.from_numpy(states["embed"][0]), table)


BEFORE, ATTENTION, MLP = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0)) * 3
MIDDLE, AFTER = BEFORE + ATTENTION, BEFORE + ATTENTION + MLP
USUAL = {"resid_pre": BEFORE, "resid_mid": MIDDLE, "resid_post": AFTER, "attn_out": ATTENTION,
         "mlp_out": MLP}  # fmt: skip


def odd(**changed: torch.Tensor | None) -> set[str]:
    rows = {kind: rows for kind, rows in {**USUAL, **changed}.items() if rows is not None}
    places = {kind: [0] for kind in rows}
    return {kind for kind, _ in require_sums({(k, 0): r for k, r in rows.items()}, places)}


def test_rows_that_do_not_add_up_are_no_reference() -> None:
    assert odd() == set()
    assert odd(attn_out=0.3 * ATTENTION, mlp_out=2 * MLP) == set()  # scaled as they are added
    assert odd(attn_out=MLP, mlp_out=ATTENTION) == {"attn_out", "mlp_out", "resid_mid"}
    assert odd(attn_out_post=ATTENTION, attn_out=9 * MLP) == set()  # of the norm's input
    assert odd(mlp_out=MLP + 0.1 * BEFORE) == {"mlp_out"}
    assert odd(resid_mid=BEFORE + MLP) >= {"resid_mid"}
    assert odd(attn_out=ATTENTION.roll(1, 0)) == {"attn_out", "resid_mid"}


def test_attention_and_mlp_side_by_side_have_no_stream_between_them() -> None:
    assert odd(resid_mid=None) == set()
    assert odd(resid_mid=BEFORE) == {"resid_mid"}
    assert odd(resid_mid=None, mlp_out=ATTENTION) == {"attn_out", "mlp_out"}


class Gated(torch.nn.Module):
    """A layer of another width than its configuration says."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, :4]


def test_rows_of_another_width_are_refused() -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Gated()])
    spec = HookSpec("resid_post.0", "resid_post", 0, 8, "float32")
    capture.install(model, [spec], max_rows=4, device=torch.device("cpu"), form="first")
    with pytest.raises(ActdsError, match=r"E007 hook resid_post.0: rows of 4 channels; expected 8"):
        model.layers[0](torch.randn(2, 8))
    compiled = torch.compile(model.layers[0], backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"E007 hook resid_post.0: rows of 4 channels; expected 8"):
        compiled(torch.randn(2, 8))


def test_only_kinds_of_heads_are_gathered_from_ranks(llama: Any) -> None:
    gathered = []

    def gather(part: torch.Tensor, width: int) -> torch.Tensor:
        gathered.append((part.shape[-1], width))
        return torch.cat([part, part], -1)  # of a second rank

    config = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "head_dim": 32}
    places = [("embed", 0), ("resid_post", 1), ("attn_out", 1), ("mlp_out", 1), ("z", 1)]
    specs = hook_specs(places, config, "float32")
    cpu = torch.device("cpu")
    model = copy.deepcopy(llama)
    buffers = capture.install(model, specs, max_rows=8, device=cpu, form="first", gather=gather)
    # Of a rank that only gives: it takes part, and keeps next to nothing.
    capture.install(model, specs[-1:], max_rows=1, device=cpu, form="first", gather=gather)
    model(torch.arange(5)[None])
    assert gathered == [(64, 128)] * 2
    assert buffers.seen.tolist() == [5] * 5
    assert torch.equal(buffers.rows[-1][:5, :64], buffers.rows[-1][:5, 64:])


@pytest.mark.parametrize("n_heads", [1, 2, 4, 8])
def test_a_head_that_several_ranks_share_is_taken_once(
    n_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_ranks, rows = 4, torch.randn(7, n_heads * 3)
    shared = max(n_ranks // n_heads, 1)
    parts = [rows.view(7, n_ranks // shared, -1)[:, rank // shared]
             for rank in range(n_ranks)]  # fmt: skip
    monkeypatch.setitem(
        sys.modules,
        "vllm.distributed",
        SimpleNamespace(
            get_tensor_model_parallel_world_size=lambda: n_ranks,
            tensor_model_parallel_all_gather=lambda _part, dim: torch.cat(parts, dim),
        ),
    )
    for part in parts:
        assert torch.equal(runner.whole(part, rows.shape[-1]), rows)


def test_all_hooks_that_a_model_lacks_are_named_at_once() -> None:
    model = plain_model(SOME[0])
    specs = [HookSpec(f"{kind}.{layer}", kind, layer, 128, "float32")
             for kind in ("attn_out_post", "resid_post", "router") for layer in (1, 2)]  # fmt: skip
    with pytest.raises(ActdsError) as caught:
        capture.find_taps(model, specs, "first")
    assert caught.value.place == "4 hooks"
    for name in ("attn_out_post:1, attn_out_post:2: ", "router:1, router:2: "):
        assert name in caught.value.got
    assert "resid_post" not in caught.value.got


def test_widths_come_from_the_configuration_under_any_of_its_names() -> None:
    llama = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    kinds = [("q", 0), ("k", 0), ("v", 0), ("z", 0), ("mlp_in", 0)]

    def widths(config: dict[str, Any]) -> list[int]:
        return [hook.d_model for hook in hook_specs(kinds, config, "bfloat16")]

    assert widths(llama) == [128, 32, 32, 128, 64]
    assert widths({"hidden_size": 64, "n_head": 4}) == [64] * 5
    one = {"hidden_size": 64, "num_attention_heads": 4, "multi_query": True}
    assert widths(one) == [64, 16, 16, 64, 64]
    latent = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
              "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}  # fmt: skip
    assert widths(latent) == [128, 128, 64, 64, 64]
    (router,) = hook_specs([("router", 1)], {**llama, "n_routed_experts": 6}, "bfloat16")
    assert (router.d_model, router.dtype) == (6, "float32")
    with pytest.raises(ActdsError, match=r"E007 router:1: a configuration that lacks 'num_experts"):
        hook_specs([("router", 1)], llama, "bfloat16")


def test_without_the_check_only_kinds_that_were_compared_are_taken() -> None:
    link: Any = SimpleNamespace(hooks=[("mlp_out", 3)], settings=SimpleNamespace(check=False))
    with pytest.raises(ActdsError, match="E007 mlp_out:3: a kind that was never verified"):
        worker.require_kinds("OtherForCausalLM", link, 1)
    with pytest.raises(ActdsError, match="E007 mlp_out:3: a kind that was never verified"):
        worker.require_kinds("LlamaForCausalLM", link, 2)


def test_a_partial_sum_of_a_rank_is_refused() -> None:
    model = plain_model(SOME[0])
    projection = model.model.layers[1].self_attn.o_proj
    projection.reduce_results, projection.tp_size = False, 2
    with pytest.raises(ActdsError, match=r"E007 attn_out:1: .*part of the sum"):
        find_kind("attn_out").tap(model, 1, "sum")
