"""``bench_probes.py``: what a probe costs on paper, and the line through measured steps."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_probes
import numpy as np
import pytest
from bench_probes import arms_of, on_paper, require_memory
from model_weights import Attention, Weights, read_weights
from probe_cost import (
    Arm,
    ProbeArithmetic,
    Timed,
    Timing,
    TimingTask,
    counts_timed,
    fit,
    fitted,
    log_bars,
)

from actds.errors import ActdsError
from actds_testing.tiny import VOCAB_SIZE, make_random_model, make_tiny_model

Shapes = dict[str, tuple[int, ...]]


def write_model(
    folder: Path, config: dict[str, Any], shapes: Shapes, dtype: str = "BF16", file: str = "model"
) -> Path:
    """Write a model folder whose files have headers and no data."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header = {
        "__metadata__": {"format": "pt"},
        **{name: {"dtype": dtype, "shape": list(shape)} for name, shape in shapes.items()},
    }
    data = json.dumps(header).encode()
    (folder / f"{file}.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    return folder


def layers(n: int, one: Shapes) -> Shapes:
    return {f"model.layers.{i}.{name}": shape for i in range(n) for name, shape in one.items()}


SMOL_CONFIG = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "head_dim": 64,
    "num_key_value_heads": 3, "dtype": "bfloat16", "tie_word_embeddings": True,
}  # fmt: skip
SMOL = {
    "model.embed_tokens.weight": (49152, 576),
    "model.norm.weight": (576,),
    **layers(
        30,
        {
            "self_attn.q_proj.weight": (576, 576),
            "self_attn.o_proj.weight": (576, 576),
            "self_attn.k_proj.weight": (192, 576),
            "self_attn.v_proj.weight": (192, 576),
            "mlp.gate_proj.weight": (1536, 576),
            "mlp.up_proj.weight": (1536, 576),
            "mlp.down_proj.weight": (576, 1536),
            "input_layernorm.weight": (576,),
            "post_attention_layernorm.weight": (576,),
        },
    ),
}
MIXTRAL_CONFIG = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "sliding_window": None, "dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = {
    "model.embed_tokens.weight": (32000, 4096),
    "lm_head.weight": (32000, 4096),
    "model.norm.weight": (4096,),
    **layers(
        32,
        {
            "self_attn.q_proj.weight": (4096, 4096),
            "self_attn.o_proj.weight": (4096, 4096),
            "self_attn.k_proj.weight": (1024, 4096),
            "self_attn.v_proj.weight": (1024, 4096),
            "block_sparse_moe.gate.weight": (8, 4096),
            "input_layernorm.weight": (4096,),
            "post_attention_layernorm.weight": (4096,),
            **{
                f"block_sparse_moe.experts.{e}.{name}.weight": shape
                for e in range(8)
                for name, shape in (
                    ("w1", (14336, 4096)),
                    ("w2", (4096, 14336)),
                    ("w3", (14336, 4096)),
                )
            },
        },
    ),
}


def test_smollm2_has_the_parameters_of_its_model_card_and_all_of_them_are_multiplied(
    tmp_path: Path,
) -> None:
    found = read_weights(write_model(tmp_path / "m", SMOL_CONFIG, SMOL))
    assert found.n_params == 134_515_008
    # The tied embedding is the head; 61 norms of 576 are no matrices.
    assert found.n_active == found.n_multiplied == 134_515_008 - 61 * 576
    assert found.step_nbytes(1) == found.step_nbytes(32) == 2 * 134_515_008


def test_mixtral_has_46_7_billion_parameters_of_which_a_token_passes_12_9(tmp_path: Path) -> None:
    found = read_weights(write_model(tmp_path / "m", MIXTRAL_CONFIG, MIXTRAL))
    assert found.n_params == 46_702_792_704
    # Published are 12,879,925,248 active; the embedding of 131,072,000 is looked up, and 65 norms
    # are no matrices.
    assert found.n_active == 12_879_925_248 - 131_072_000 - 65 * 4096
    dense = 46_702_792_704 - 32 * 8 * 3 * 14336 * 4096 - 131_072_000
    assert found.step_nbytes(1) == 2 * (dense + 32 * 2 * 3 * 14336 * 4096)
    # Two tokens pass 8 (1 - (3/4)^2) = 3.5 experts of a layer, if they choose at random.
    assert found.step_nbytes(2) == pytest.approx(2 * (dense + 32 * 3.5 * 3 * 14336 * 4096))


def test_one_probe_is_six_in_ten_million_of_the_operations_of_a_7b_model() -> None:
    weights = Weights(7_000_000_000, 7_000_000_000, 0, 14_000_000_000, 0)
    paper = ProbeArithmetic(1, [4096], weights, Attention(0.0, 0.0), 1, [1, 32])
    assert paper.probe_flops == 8192 and paper.forward_flops == 14e9
    assert paper.ratio == pytest.approx(5.85e-7, rel=1e-3)
    thousand = ProbeArithmetic(1000, [4096], weights, Attention(0.0, 0.0), 1, [1, 32])
    # Probes of 16 MB beside the 14 GB of the model's weights, whatever the batch is.
    assert [step.probes for step in thousand.steps] == [16_384_000, 16_384_000]
    assert [step.scores for step in thousand.steps] == [4_000, 128_000]
    assert thousand.steps[0].ratio == pytest.approx(16_388_000 / 14e9)


@pytest.mark.parametrize("n_kv_heads", [2, 1])
def test_operations_are_those_that_torch_counts(n_kv_heads: int, tmp_path: Path) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    folder = make_random_model(tmp_path / "m", n_layers=3, hidden=48, n_kv_heads=n_kv_heads)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    context = 11
    ids = torch.arange(3, 3 + context)[None]
    with torch.no_grad():
        past = model(ids[:, :-1], use_cache=True).past_key_values
        with FlopCounterMode(display=False) as counter:
            model(ids[:, -1:], past_key_values=past)
    config = json.loads((folder / "config.json").read_text())
    attention = Attention.of(config, context, 4)
    assert attention.unknown is None
    assert attention.kv_nbytes == 2 * 3 * context * n_kv_heads * 32 * 4
    paper = ProbeArithmetic(5, [48], read_weights(folder), attention, context, [1])
    assert counter.get_total_flops() == paper.forward_flops
    with FlopCounterMode(display=False) as counter:
        torch.ones(1, 48) @ torch.ones(48, 5)
    assert counter.get_total_flops() == paper.probe_flops


def test_operations_of_a_mixture_of_experts_are_those_that_torch_counts(tmp_path: Path) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, vocab_size=64,
        head_dim=16,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    model.save_pretrained(tmp_path)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.tensor([[5]]))
    found = json.loads((tmp_path / "config.json").read_text())
    paper = ProbeArithmetic(1, [32], read_weights(tmp_path), Attention.of(found, 1, 4), 1, [1])
    assert paper.weights.n_experts == 4 and paper.weights.top_k == 2
    assert counter.get_total_flops() == paper.forward_flops


def test_what_a_sliding_window_hides_is_not_read() -> None:
    config = {
        "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    assert Attention.of(config, 100, 2).flops == 4 * 64 * (100 + 8)
    assert Attention.of({**config, "sliding_window": None}, 100, 2).flops == 4 * 64 * 200
    for unknown in (
        {**config, "layer_types": ["full_attention", "linear_attention"]},
        {**config, "kv_lora_rank": 512},
        {key: value for key, value in config.items() if key != "layer_types"},
        {key: value for key, value in config.items() if key != "num_attention_heads"},
    ):
        found = Attention.of(unknown, 100, 2)
        assert found.unknown and found.flops == 0


def timed(
    n_rounds: int, s: float, m: float, counts: tuple[int, ...], sigma: float, seed: int = 0
) -> list[Timed]:
    """Return rounds of steps on a machine whose speed changes from round to round."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(n_rounds):
        step = 0.02 * rng.uniform(1, 3)
        arms = [(Arm("none"), 1.0), (Arm("again"), 1.0)]
        arms += [(Arm("packed", n), 1 + s + m * n) for n in counts]
        for arm, factor in arms:
            seconds = step * factor * math.exp(sigma * rng.standard_normal())
            found.append(Timed(arm, 8, number, seconds, 2 * seconds))
    return found


def test_a_fit_recovers_the_costs_that_were_planted() -> None:
    counts = (0, 1, 16, 64, 256, 1000)
    found = fit(timed(5, 0.02, 3e-5, counts, 0.0), "packed", 8)
    assert found.s.value == pytest.approx(0.02) and found.m.value == pytest.approx(3e-5)
    assert found.ratios[1000] == pytest.approx(0.05)
    assert found.n_for(0.01) == pytest.approx(333.33, rel=1e-4)
    assert found.words() == "1 % in all: none, s alone exceeds it; 1 % more: 333 probes"
    cheap = fit(timed(5, 0.004, 3e-5, counts, 0.0), "packed", 8)
    assert cheap.words() == "1 % in all: 200 probes; 1 % more: 333 probes"
    # numpy's line through the medians of the ratios, under noise.
    noisy = timed(9, 0.02, 3e-5, counts, 0.01)
    by_round = {n: {t.arm: t.wall for t in noisy if t.round == n} for n in range(9)}
    medians = [
        np.median(
            [
                2 * r[Arm("packed", n)] / (r[Arm("none")] + r[Arm("again")]) - 1
                for r in by_round.values()
            ]
        )
        for n in counts
    ]
    slope, intercept = np.polyfit(counts, medians, 1)
    line = fit(noisy, "packed", 8)
    assert line.m.value == pytest.approx(slope) and line.s.value == pytest.approx(intercept)
    assert fit(noisy, "packed", 8, "cpu").m.value == pytest.approx(slope)


def test_intervals_hold_what_was_planted_about_as_often_as_they_say() -> None:
    counts, inside = (0, 16, 64, 256), {"s": 0, "m": 0, "again": 0}
    for seed in range(100):
        rounds = timed(12, 0.03, 2e-4, counts, 0.02, seed)
        found = fit(rounds, "packed", 8, seed=seed)
        inside["s"] += found.s.low <= 0.03 <= found.s.high
        inside["m"] += found.m.low <= 2e-4 <= found.m.high
        inside["again"] += found.noise.low <= 0 <= found.noise.high
    # 95 % of 100 is 95; percentiles of few rounds are a little narrow.
    assert all(84 <= n <= 100 for n in inside.values()), inside


def test_a_cost_that_cannot_be_told_from_nothing_has_no_n_that_costs_1_percent() -> None:
    found = fit(timed(8, 0.02, 0.0, (0, 16, 64), 0.05), "packed", 8)
    assert found.m.low <= 0 <= found.m.high
    assert found.n_for(0.01) is None and found.n_for(0.01, 0.02) is None
    assert found.words().startswith("not measurable: 64 probes cost less than ")
    # A slope that differs from 0, of probes that cost less than the engine differs from itself.
    steps = timed(8, 0.02, 1e-4, (0, 64), 0.0)
    other = [replace(one, wall=one.wall * (1.03 if one.arm.way == "again" else 1)) for one in steps]
    small, clear = fit(other, "packed", 8), fit(steps, "packed", 8)
    assert small.m.low > 0 and not small.is_measured and clear.is_measured
    assert small.words() == "not measurable: 64 probes cost less than 3.0%"
    with pytest.raises(ValueError, match="naive: 0 N"):
        fit(timed(3, 0.0, 0.0, (0, 4), 0.0), "naive", 8)


def test_counts_end_at_the_one_asked_for() -> None:
    assert counts_timed(1000, restarts=False) == (0, 1, 16, 64, 256, 1000)
    assert counts_timed(16, restarts=False) == (0, 1, 16)
    assert counts_timed(1, restarts=False) == counts_timed(1, restarts=True) == (0, 1)
    assert counts_timed(1000, restarts=True) == (0, 125, 1000)


def test_naive_hooks_score_the_rows_and_leave_with_the_arm_that_had_them() -> None:
    import probe_timing
    import torch

    from actds_writers.capture.taps import Tap

    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    taps = [
        Tap(model[0], lambda args, kwargs, output: (output, output)),
        Tap(model[1], lambda args, kwargs, output: (args[0], None), before=True),
    ]
    rng = np.random.default_rng(0)
    probes = rng.standard_normal((2, 3, 6)).astype(np.float32)
    alone = probe_timing.ModelState.of(model)
    scores = probe_timing.add_naive(taps, probes, torch.device("cpu"))
    wrapped = Tap(model[1], lambda args, kwargs, output: (args[0], None), wrapped=True)
    again = probe_timing.add_naive([wrapped], probes[1:], torch.device("cpu"))
    both = probe_timing.ModelState.of(model)
    rows = torch.ones(5, 4)
    with torch.no_grad():
        inner = model[0](rows).numpy()
        for state, n_scored in ((alone, 0), (both, 3), (alone, 0), (both, 3)):
            state.restore()
            for found in (*scores, *again):
                found.clear()
            model(rows)
            assert [len(found) for found in (*scores, *again)] == [n_scored] * 3
    np.testing.assert_allclose(np.stack(scores[0], 1), 2 * inner @ probes[0].T, rtol=1e-5)
    for found in (scores[1], again[0]):
        np.testing.assert_allclose(np.stack(found, 1), inner @ probes[1].T, rtol=1e-5)
    alone.restore()
    assert "forward" not in vars(model[1])


def test_what_was_measured_is_said_with_its_noise_and_drawn(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", SMOL_CONFIG, SMOL)
    paper = on_paper(folder, 1000, "resid_post:10", batches=[8])
    steps = timed(6, 0.02, 3e-5, (0, 64, 1000), 0.0)
    for one in [step for step in steps if step.arm.way == "none"]:
        for n in (0, 100):
            steps.append(Timed(Arm("naive", n), 8, one.round, one.wall * (2 + n / 100), one.cpu))
    facts = dict.fromkeys(("engine", "mode", "dtype", "threads", "cores", "positions"), "x")
    facts |= {"cudagraphs": "none", "device": "cpu"}
    found = fitted(paper.hooks, paper.arithmetic, Timing(tuple(steps), facts))
    text = "\n".join(found.lines())
    assert "twice the engine alone differs by +0.0% [+0.0%, +0.0%]" in text
    assert "packed   s = +2.0% [+2.0%, +2.0%]   m = +0.003% [+0.003%, +0.003%]" in text
    assert "naive    s = +100.0% [+100.0%, +100.0%]   m = +1.000% [+1.000%, +1.000%]" in text
    chart = text[text.index("log scale:") :]
    # 0.02 + 3e-5 x 1000, measured; 1 + 1000 / 100, of which 100 were measured.
    assert re.search(r"packed, batch 8, by the clock +5 %  #", chart)
    assert re.search(r"naive, batch 8, by the clock, by its line +1100 %  #", chart)
    assert len({one.clock for one in found.fits}) == 2
    measured = found.as_json()["probes"]["measured"]
    (line,) = [f for f in measured["fits"] if (f["way"], f["clock"]) == ("packed", "wall")]
    assert line["n_for_1_percent"] is None and round(line["n_for_1_percent_more"]) == 333
    # On a GPU, CPU time of a process that waits is not what a step takes.
    facts["device"] = "NVIDIA H100"
    on_gpu = fitted(paper.hooks, paper.arithmetic, Timing(tuple(steps), facts))
    assert {one.clock for one in on_gpu.fits} == {"wall"}


def test_a_compiled_engine_is_started_anew_for_each_variant_of_each_round(tmp_path: Path) -> None:
    from probe_timing import sessions

    packed, naive = (Arm("packed", 0), Arm("packed", 9)), (Arm("naive", 0), Arm("naive", 9))
    arms = (Arm("none"), *packed, *naive)
    task = TimingTask(tmp_path, {"enforce_eager": True}, (), arms, (1,), 3, tmp_path)
    (one,) = sessions(task)
    assert one.eager and one.task == task
    found = list(sessions(replace(task, engine_args={"dtype": "float32"})))
    assert [session.first_round for session in found] == [0] * 4 + [1] * 4 + [2] * 4
    for number in range(3):
        mine = [session for session in found if session.first_round == number]
        assert all(session.task.n_rounds == 1 for session in mine)
        assert {session.task.arms for session in mine} == {
            (Arm("none"),), (packed[0],), (packed[1],), naive
        }  # fmt: skip
        for session in mine:
            assert session.eager == (session.task.arms == naive)
            assert session.task.is_eager == session.eager


def test_bars_are_as_long_as_their_logarithm() -> None:
    bars = {"a": 0.01, "bc": 1.0, "d": 10.0, "e": 0.0, "f": -0.5}
    assert log_bars(bars, width=30) == [
        "            0.01      0.1       1         10",
        "a   0.01 %  #",
        "bc     1 %  ####################",
        "d     10 %  ##############################",
        "e      0 %",
        "f     -0 %",
    ]
    assert log_bars({"a": -1.0, "b": 0.0}) == []


def test_the_program_says_on_paper_what_the_function_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "m", SMOL_CONFIG, SMOL)
    words = ["--model", str(folder), "--probes", "100", "--hooks", "resid_post:10,20",
             "--context", "128", "--batch", "4", "2"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["bench_probes.py", *words, "--json"])
    bench_probes.main()
    facts = json.loads(capsys.readouterr().out)
    paper = on_paper(folder, 100, "resid_post:10,20", 128, (4, 2))
    assert facts == json.loads(json.dumps(paper.as_json()))
    assert facts["probes"]["measured"] is None and facts["probes"]["n_hooks"] == 2
    assert facts["probes"]["forward_flops"] == 2 * 134_479_872 + 4 * 576 * 128 * 30
    text = "\n".join(paper.lines())
    assert text.startswith("probes   100 probes at each of 2 hooks, float32")
    assert "one probe 4.1e-06" in text and "clock    not measured" in text
    assert "batch 4: 269 MB weights" in text and "batch 32" not in text
    assert "operations" in text[text.index("log scale:") :]


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("max_num_seqs", 8, "E009 engine_args max_num_seqs: 8; expected at least 32, the largest"),
        ("max_model_len", 31, "E009 engine_args max_model_len: 31; expected at least 32"),
        ("tensor_parallel_size", 2, "E012 engine_args tensor_parallel_size"),
    ],
)
def test_an_option_with_which_steps_cannot_be_timed_is_refused(
    option: str, value: int, error: str, tmp_path: Path
) -> None:
    from probe_timing import with_step_options

    task = TimingTask(tmp_path, {option: value}, (), (Arm("none"),), (1, 32), 5, tmp_path)
    with pytest.raises(ActdsError, match=error):
        with_step_options(task)


def test_more_probes_than_a_dataset_or_memory_takes_and_mixed_widths_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "m", SMOL_CONFIG, SMOL)
    hooks = on_paper(folder, 1).hooks
    with pytest.raises(ActdsError, match="E009 probes: 5,000; expected at most 4,096"):
        arms_of(hooks, 5000, {})
    with pytest.raises(ActdsError, match="E015 hooks"):
        arms_of(on_paper(folder, 1, "resid_post:1;k:1").hooks, 3, {})
    monkeypatch.setattr(bench_probes, "free_nbytes", lambda: 1 << 30)
    arms = arms_of(hooks, 4096, {})
    with pytest.raises(ActdsError, match=r"E009 probes: .* GB for the probes, and 1.07 GB free"):
        require_memory(TimingTask(folder, {}, hooks, arms, (1,), 5, tmp_path))


@pytest.mark.parametrize(
    ("config", "shapes", "dtype", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, SMOL, "BF16", "quantized weights"),
        ({}, SMOL, "I32", "weights of I32"),
        ({}, MIXTRAL, "BF16", "8 experts in the files, 0 of 0 in config.json"),
        ({"num_experts": 4, "num_experts_per_tok": 2}, MIXTRAL, "BF16", "8 experts in the files"),
        ({"text_config": SMOL_CONFIG}, SMOL, "BF16", "a multimodal model"),
        ({}, {}, "BF16", "no [*].safetensors"),
    ],
)
def test_weights_that_cannot_be_counted_are_refused(
    config: dict[str, Any], shapes: Shapes, dtype: str, words: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m", {**SMOL_CONFIG, **config}, shapes, dtype)
    with pytest.raises(ActdsError, match=f"E009 model .*{words}"):
        read_weights(folder)


def test_a_folder_without_readable_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ActdsError, match="E005"):
        read_weights(tmp_path / "none")
    folder = make_tiny_model(tmp_path / "m")
    with pytest.raises(ActdsError, match=r"E009 .*no \*\.safetensors"):
        read_weights(folder)
    for broken in (b"", b"\xff" * 64, (5).to_bytes(8, "little") + b"[1,2]"):
        (folder / "model.safetensors").write_bytes(broken)
        with pytest.raises(ActdsError, match=r"E009 .*no header of safetensors"):
            read_weights(folder)


def test_weights_of_a_fused_mixture_and_of_drafting_layers_are_known(tmp_path: Path) -> None:
    config = {**SMOL_CONFIG, "num_hidden_layers": 1, "num_experts": 16, "num_experts_per_tok": 4}
    shapes = {
        "model.embed_tokens.weight": (VOCAB_SIZE, 576),
        "lm_head.weight": (VOCAB_SIZE, 576),
        "model.layers.0.mlp.experts.gate_up_proj": (16, 576, 128),
        "model.layers.0.mlp.experts.gate_up_proj_bias": (16, 128),
        "model.layers.0.mlp.router.weight": (16, 576),
        "model.layers.1.eh_proj.weight": (576, 1152),
    }
    found = read_weights(write_model(tmp_path / "m", config, shapes))
    assert found.n_active == VOCAB_SIZE * 576 + 16 * 576 + 4 * 576 * 128
    assert found.n_params == 2 * VOCAB_SIZE * 576 + 16 * 576 * 128 + 16 * 128 + 16 * 576
