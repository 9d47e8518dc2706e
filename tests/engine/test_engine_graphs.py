"""What GPUs run, compiled pieces in CUDA graphs: their rows are those of the eager engine.

On a CPU, with a graph that replays as CUDA's do: see ``actds_testing.cpu_graphs``. Every dataset
passes the deep validation, which computes the readouts again from the rows.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # bfloat16, by name
import numpy as np
import pytest

from actds.explore.dataset import Dataset
from actds_testing import cpu_graphs
from actds_testing import harvest as h
from actds_testing.tiny import make_random_model

pytestmark = pytest.mark.engine

EACH = ["resid_pre", "resid_mid", "resid_post", "attn_out", "z", "q", "k", "v", "mlp_in", "mlp_out"]
HOOKS = ";".join(["embed", *(f"{kind}:all" for kind in EACH), "final"])
OPTIONS = (
    "--entropy", "--max-tokens", "6", "--engine-arg", "max_model_len=128",
    "--engine-arg", "max_num_batched_tokens=96", "--engine-arg", "max_num_seqs=8",
    "--engine-arg", "block_size=32", "--engine-arg", "dtype=float32",
)  # fmt: skip
LOOKS = ("--attention", "1,3", "--every", "2", "--attention-share", "1.0")

INTERPRETED = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


def of_second_runner(test: Any) -> Any:
    """Mark a test of the second runner, whose own kernels are of Triton."""
    lacks = importlib.util.find_spec("triton") is None
    reason = "vLLM's second model runner needs Triton, here its interpreter: pip install triton"
    return pytest.mark.full(pytest.mark.skipif(lacks, reason=reason)(test))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of some full steps, of which graphs have none, and smaller ones behind."""
    texts = [f"number {i} goes on " + "x" * (7 * i) for i in range(10)]
    records = [{"id": f"g{i}", "prompt": text} for i, text in enumerate(texts)]
    return h.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", records)


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("probes") / "probes.npy"
    np.save(path, np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32))
    return "--probes", str(path)


@pytest.fixture(scope="module")
def eager(
    model: Path, prompts: Path, probes: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Dataset:
    out = tmp_path_factory.mktemp("eager") / "acts"
    return h.harvest_alone(
        out, model, prompts, "--hooks", HOOKS, *probes, *LOOKS, *OPTIONS, *h.EAGER
    )


def compare(dataset: Dataset, eager: Dataset, tolerance: float) -> None:
    """Check rows, scores and entropies by request and position, and how the steps ran."""
    assert set(dataset.hooks) == set(eager.hooks)
    for hook in dataset.hooks:
        ours, theirs = h.rows_of(dataset, hook), h.rows_of(eager, hook)
        assert ours.keys() == theirs.keys() and len(ours) > 400
        got, want = (np.stack([side[key] for key in theirs]) for side in (ours, theirs))
        assert h.relative_l2(got, want).max() <= tolerance, hook
    keys = ["hook", "request", "position"]
    got_scores, want_scores = (
        one.readouts().to_pandas().sort_values(keys).reset_index(drop=True)
        for one in (dataset, eager)
    )
    assert got_scores[keys].equals(want_scores[keys])
    np.testing.assert_allclose(
        np.stack(got_scores["probes"]), np.stack(want_scores["probes"]), atol=40 * tolerance
    )
    got_tokens, want_tokens = (one.sampled().to_pandas() for one in (dataset, eager))
    names = ["request", "position", "token_id"]
    assert got_tokens[names].equals(want_tokens[names])
    for name in ("entropy", "logprob", "margin"):
        np.testing.assert_allclose(got_tokens[name], want_tokens[name], atol=10 * tolerance)
    h.compare_attention(dataset, eager)


def compare_steps(dataset: Dataset, counts: dict[str, int], mode: str) -> None:
    """Check that steps which graphs have room for were replays, padded to their sizes.

    Args:
        mode: vLLM's ``cudagraph_mode``; with two, the first is for steps of decoding requests.
    """
    steps, sizes = dataset.steps().to_pylist(), cpu_graphs.SIZES
    decoding, _, mixed = mode.lower().partition("_and_")
    replayed = {"full": 1, "piecewise": 1}  # the two steps of the check of the hooks
    if not mixed:
        replayed = {decoding: 2}
    for step in steps:
        n = step["batch_tokens"]
        graph = decoding if n == step["decode_tokens"] else mixed or decoding
        assert step["kernel_mode"] == (graph if n <= sizes[-1] else "compiled")
        assert step["padded_tokens"] == next((size for size in sizes if size >= n), n)
        if step["kernel_mode"] != "compiled":
            replayed[step["kernel_mode"]] += 1
    assert any(step["padded_tokens"] > step["batch_tokens"] for step in steps)
    assert any(step["kernel_mode"] == "compiled" for step in steps)
    pieces = {"full": 1, "piecewise": 1 + 4}  # one behind the attention of each layer
    assert counts["replayed"] == sum(pieces[name] * n for name, n in replayed.items())
    assert sum(replayed.values()) > 2 and counts["moved"] == 0


@pytest.mark.parametrize(
    ("backend", "tolerance"),
    [("eager", 0.0), pytest.param("inductor", 2e-6, marks=pytest.mark.full)],
)
def test_rows_of_graphs_are_those_of_the_eager_engine(
    backend: str, tolerance: float, eager: Dataset, model: Path, prompts: Path,
    probes: tuple[str, str], tmp_path: Path,
) -> None:  # fmt: skip
    dataset, counts = cpu_graphs.harvest(
        tmp_path / "acts", model, prompts, "--hooks", HOOKS, *probes, *LOOKS, *OPTIONS,
        backend=backend, VLLM_CACHE_ROOT=str(tmp_path / "cache"),
    )  # fmt: skip
    compare_steps(dataset, counts, "PIECEWISE")
    compare(dataset, eager, tolerance)
    fields, plain = (next(iter(one.runs.values())).fields for one in (dataset, eager))
    check = json.loads(str(fields["capture.check"].value))
    assert check["against"] == "transformers" and float(check["eager"]) <= tolerance
    assert "eager" not in json.loads(str(plain["capture.check"].value))
    passes = "numerics.compiler_passes"
    assert (fields[passes].value, plain[passes].value) == ("eliminate_noops", "none")


@of_second_runner
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_rows_of_whole_models_in_graphs_are_those_of_the_eager_engine(
    mode: str, eager: Dataset, model: Path, prompts: Path, probes: tuple[str, str], tmp_path: Path
) -> None:
    dataset, counts = cpu_graphs.harvest(
        tmp_path / "acts", model, prompts, "--hooks", HOOKS, *probes, *LOOKS, *OPTIONS,
        backend="eager", mode=mode, VLLM_CACHE_ROOT=str(tmp_path / "cache"), **INTERPRETED,
    )  # fmt: skip
    compare_steps(dataset, counts, mode)
    compare(dataset, eager, 2e-6)


@of_second_runner
def test_the_check_sees_what_layers_read_where_whole_models_are_replayed(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    """There is nothing else to compare with: a replay would show it no module's inputs."""
    dataset, _ = cpu_graphs.harvest(
        tmp_path / "acts", model, prompts, "--hooks", "resid_post:0,3", *OPTIONS,
        "--engine-arg", "load_format=dummy", backend="eager", mode="FULL",
        VLLM_CACHE_ROOT=str(tmp_path / "cache"), **INTERPRETED,
    )  # fmt: skip
    (run,) = dataset.runs.values()
    check = json.loads(str(run.fields["capture.check"].value))
    assert check["against"] == "engine" and set(check["hooks"]) == set(dataset.hooks)
    assert float(check["eager"]) < 1e-5


@pytest.mark.full
def test_graphs_whose_rows_are_not_those_of_the_eager_engine_are_refused(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    """Graphs that leave the results of their capture; weights to which nothing else compares."""
    words = cpu_graphs.arguments(
        tmp_path / "acts", model, prompts, "--hooks", "mlp_out:1", *OPTIONS, backend="eager",
    )  # fmt: skip
    script = "from actds_testing import cpu_graphs as g; g._leave = lambda *_: None; g.main()"
    dummy = ("--engine-arg", "load_format=dummy")
    environment = h.environment(**h.ONE_PROCESS, VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    done = h.warm_engine().run(["-c", script, *words, *dummy], environment, h.TIMEOUT_S)
    assert done.returncode != 0
    assert "E507" in done.stderr and "without compilation and graphs" in done.stderr
    assert "Use another cudagraph_mode, or enforce_eager=true." in done.stderr


@pytest.mark.full
def test_rows_of_two_types_share_a_compile_cache_and_no_graph(
    eager: Dataset, model: Path, prompts: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    for n, dtype in enumerate(["float32", "bfloat16", "float32"]):
        dataset, counts = cpu_graphs.harvest(
            tmp_path / f"{n}", model, prompts, "--hooks", "resid_post:1,3", "--store-dtype", dtype,
            *OPTIONS, backend="eager", VLLM_CACHE_ROOT=str(cache),
        )  # fmt: skip
        assert counts["replayed"]
        for hook in dataset.hooks:
            ours, theirs = h.rows_of(dataset, hook), h.rows_of(eager, hook)
            got, want = (np.stack([side[key] for key in theirs]) for side in (ours, theirs))
            assert np.array_equal(got, want.astype(dtype).astype(np.float32))
    # The last one has found the artefact of the first.
    artefacts = cache / "torch_compile_cache" / "torch_aot_compile"
    assert len(list(artefacts.iterdir())) == 2
