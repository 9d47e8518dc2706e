"""Run by test_engine_lora.py in a process of its own: what an engine with a LoRA adapter computes.

Prints, as JSON, how far the rows of a request without an adapter are from those of the base model
and from those of the adapter, when it runs alone and beside a request with the adapter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from actds_testing.tiny import make_random_model

RANK = 4
PROMPT = [3 + (7 * i * i + 11 * i) % 250 for i in range(40)]


def make_adapter(path: Path, model: Path) -> Path:
    """Write an adapter of the query and output projections in the format of PEFT."""
    hidden = json.loads((model / "config.json").read_text())["hidden_size"]
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for layer in range(4):
        for name in ("q_proj", "o_proj"):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, hidden)), ("lora_B", (hidden, RANK))):
                weights[f"{module}.{part}.weight"] = torch.randn(shape, generator=generator) / 8
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj", "o_proj"], "lora_dropout": 0.0, "bias": "none",
        "base_model_name_or_path": str(model),
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def main(folder: Path) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    model = make_random_model(folder / "model")
    adapter = LoRARequest("poet", 1, str(make_adapter(folder / "poet", model)))
    other = LoRARequest("scribe", 2, adapter.lora_path)
    llm = LLM(
        str(model), dtype="float32", enforce_eager=True, block_size=32, max_model_len=128,
        enable_prefix_caching=False, distributed_executor_backend="uni", async_scheduling=False,
        enable_lora=True, max_loras=1, max_lora_rank=8,
    )  # fmt: skip
    core: Any = llm.llm_engine.engine_core
    layers = core.engine_core.model_executor.driver_worker.worker.model_runner.model.model.layers
    seen: list[torch.Tensor] = []
    layers[-1].register_forward_hook(lambda _m, _i, output: seen.append(output[0] + output[1]))

    def rows(*adapters: LoRARequest | None) -> np.ndarray:
        """Return the rows of one step, ``(n_requests, n_positions, d_model)``."""
        seen.clear()
        prompts = [{"prompt_token_ids": PROMPT}] * len(adapters)
        params = SamplingParams(temperature=0, max_tokens=1)
        llm.generate(prompts, params, lora_request=list(adapters), use_tqdm=False)
        assert len(seen) == 1 and len(seen[0]) == len(adapters) * len(PROMPT)
        return seen[0].numpy().reshape(len(adapters), len(PROMPT), -1).copy()

    def distance(got: np.ndarray, want: np.ndarray) -> float:
        return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max())

    base, poet = rows(None)[0], rows(adapter)[0]
    alone = rows(None)[0]
    beside = rows(None, adapter)[0]
    found = {
        "adapter against base": distance(poet, base),
        "alone against base": distance(alone, base),
        "beside against base": distance(beside, base),
        "beside against adapter": distance(beside, poet),
    }
    found["equal prefix blocks"] = equal_blocks([None, adapter, other])
    print("FOUND " + json.dumps(found))


def equal_blocks(adapters: list[Any]) -> int:
    """Return how many prefix blocks of one prompt have equal digests under several adapters."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(8, sha256)
    params = SamplingParams(temperature=0, max_tokens=1)
    hashes: list[set[bytes]] = []
    for one in adapters:
        request = Request("r", PROMPT, params, None, lora_request=one, block_hasher=hasher)
        hashes.append(set(request.block_hashes))
        assert len(hashes[-1]) == len(PROMPT) // 8
    return sum(len(a & b) for n, a in enumerate(hashes) for b in hashes[:n])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
