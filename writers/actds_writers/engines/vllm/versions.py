"""What of vLLM was tested: its versions, and its model classes; and what starts with another one.

This package is the seam to vLLM: no module outside it imports vLLM or knows its internals, and a
version that differs is told apart here or where a lookup falls back, by ``getattr``, in the module
that needs it. ``docs/versions.md`` says what was run.

Of model classes the rows are those of ``transformers``, as ``tests/matrix`` found: by class the
form of the residual stream, and the kinds that were right beside ``resid_post`` in every family of
the class, as ``docs/families.md`` lists them. A class or kind that is missing is harvested only if
the check of the hooks confirms its rows.
"""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

from actds.errors import ActdsError
from actds_writers.capture.taps import StreamForm

_SUM = """
    AfmoeForCausalLM ApertusForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM
    ExaoneMoeForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM GemmaForCausalLM Glm4ForCausalLM
    Glm4MoeForCausalLM GptOssForCausalLM Llama4ForCausalLM LlamaForCausalLM Mamba2ForCausalLM
    MistralForCausalLM MixtralForCausalLM NemotronForCausalLM NemotronHForCausalLM
    OlmoeForCausalLM Phi3ForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM
    Qwen3MoeForCausalLM Qwen3NextForCausalLM
"""
_FIRST = """
    BloomForCausalLM CohereForCausalLM Exaone4ForCausalLM FalconForCausalLM FalconH1ForCausalLM
    GPT2LMHeadModel GPTJForCausalLM Gemma4ForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
    GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM HyperCLOVAXForCausalLM
    MiniCPM3ForCausalLM OPTForCausalLM PhiMoEForCausalLM StablelmForCausalLM Zamba2ForCausalLM
"""
VERIFIED: dict[str, StreamForm] = {
    **dict.fromkeys(_SUM.split(), "sum"),
    **dict.fromkeys(_FIRST.split(), "first"),
}
"""Form by class of the loaded vLLM model, as ``docs/families.md`` lists them."""

_KINDS = """
    embed resid_pre resid_mid attn_out z q k v mlp_in mlp_out final: ApertusForCausalLM
        Ernie4_5ForCausalLM GPT2LMHeadModel GemmaForCausalLM GraniteForCausalLM LlamaForCausalLM
        MistralForCausalLM NemotronForCausalLM Phi3ForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM
        StablelmForCausalLM;
    embed resid_pre resid_mid attn_out z q k v mlp_in mlp_out router final: Ernie4_5_MoeForCausalLM
        ExaoneMoeForCausalLM Glm4MoeForCausalLM GptOssForCausalLM GraniteMoeForCausalLM
        MixtralForCausalLM OlmoeForCausalLM PhiMoEForCausalLM Qwen2MoeForCausalLM
        Qwen3MoeForCausalLM Qwen3NextForCausalLM;
    embed resid_pre resid_mid attn_out attn_out_post z q k v mlp_in mlp_out mlp_out_post final:
        Exaone4ForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Glm4ForCausalLM
        HyperCLOVAXForCausalLM;
    embed resid_pre attn_out z q k v mlp_in mlp_out final: CohereForCausalLM NemotronHForCausalLM;
    embed resid_pre attn_out z mlp_in mlp_out final: FalconForCausalLM GPTJForCausalLM;
    embed resid_pre resid_mid attn_out attn_out_post z q k v mlp_in mlp_out mlp_out_post router
        final: AfmoeForCausalLM;
    embed resid_pre resid_mid attn_out z mlp_in mlp_out final: BloomForCausalLM;
    embed resid_pre z q k v mlp_in mlp_out final: FalconH1ForCausalLM;
    embed resid_pre resid_mid attn_out attn_out_post z q k v mlp_in final: Gemma4ForCausalLM;
    embed resid_pre attn_out z q k v mlp_in final: GraniteMoeHybridForCausalLM;
    embed resid_pre resid_mid attn_out z q k v mlp_in router final: GraniteMoeSharedForCausalLM;
    embed resid_pre resid_mid attn_out z v mlp_in mlp_out router final: Llama4ForCausalLM;
    embed resid_pre resid_mid attn_out z q k mlp_in mlp_out final: MiniCPM3ForCausalLM;
    embed resid_pre resid_mid attn_out z k v mlp_in mlp_out final: OPTForCausalLM;
    embed resid_pre final: Zamba2ForCausalLM
"""
VERIFIED_KINDS: dict[str, frozenset[str]] = {
    name: frozenset(kinds.split())
    for kinds, _, names in (entry.partition(":") for entry in _KINDS.split(";"))
    for name in names.split()
}
"""Kinds beside ``resid_post`` by class; with one tensor-parallel rank, as they were compared."""


def is_verified(model: str, kind: str, ranks: int) -> bool:
    """Return whether a kind was right in every family of a model class of vLLM.

    With several tensor-parallel ranks only ``resid_post`` was compared.
    """
    if kind == "resid_post":
        return model in VERIFIED
    return ranks == 1 and kind in VERIFIED_KINDS.get(model, ())


_RUNNER = "get_model model_config vllm_config device max_num_tokens kv_cache_config kv_cache_dtype"
SEAMS: dict[str, str] = {
    "v1/worker/gpu_worker.py Worker": "load_model execute_model compile_or_warm_up_model",
    "v1/worker/gpu_model_runner.py GPUModelRunner": f"{_RUNNER} sample_tokens execute_model_state "
    "input_batch input_ids positions _sample set_forward_context cudagraph_runtime_mode",
    "v1/worker/gpu/model_runner.py GPUModelRunner": f"{_RUNNER} sample_tokens execute_model_state "
    "input_buffers sample set_forward_context cudagraph_runtime_mode run_fullgraph",
    "v1/worker/gpu/model_runner.py": "ModelCudaGraphManager dispatch_cg_and_sync_dp need_eager",
    "v1/worker/gpu/input_batch.py InputBatch": "req_ids query_start_loc_np",
    "v1/worker/gpu/input_batch.py InputBuffers": "input_ids positions",
    "v1/worker/gpu_input_batch.py InputBatch": "req_ids",
    "forward_context.py": "get_forward_context set_forward_context skip_compiled "
    "cudagraph_runtime_mode batch_descriptor",
    "v1/core/sched/scheduler.py Scheduler": "add_request schedule update_from_output _free_request "
    "running waiting requests connector kv_cache_config kv_cache_manager block_size "
    "num_spec_tokens get_num_unfinished_requests",
    "v1/core/sched/interface.py SchedulerInterface": "has_requests",
    "v1/core/sched/output.py SchedulerOutput": "make_empty scheduled_new_reqs "
    "scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens "
    "scheduled_spec_decode_tokens finished_req_ids num_invalid_spec_tokens",
    "v1/core/sched/output.py NewRequestData": "req_id prompt_token_ids block_ids lora_request "
    "num_computed_tokens sampling_params",
    "v1/core/sched/output.py CachedRequestData": "req_ids resumed_req_ids new_token_ids "
    "new_block_ids num_computed_tokens num_output_tokens",
    "v1/request.py Request": "request_id arrival_time block_hashes sampling_params all_token_ids "
    "output_token_ids num_prompt_tokens num_computed_tokens num_output_tokens is_finished "
    "get_finished_reason",
    "v1/outputs.py ModelRunnerOutput": "req_id_to_index sampled_token_ids kv_connector_output",
    "v1/engine/core.py EngineCore": "shutdown scheduler step_fn batch_queue model_executor",
    "v1/engine/llm_engine.py LLMEngine": "from_engine_args usage_context add_request add_lora "
    "abort_request step engine_core model_config vllm_config",
    "v1/executor/abstract.py Executor": "__init__",
    "config/vllm.py VllmConfig": "additional_config speculative_config kv_transfer_config "
    "max_concurrent_batches lora_config diffusion_config ec_transfer_config",
    "config/parallel.py ParallelConfig": "tensor_parallel_size pipeline_parallel_size "
    "prefill_context_parallel_size decode_context_parallel_size data_parallel_size "
    "data_parallel_index world_size nnodes distributed_executor_backend worker_cls enable_dbo "
    "ubatch_size",
    "config/cache.py CacheConfig": "kv_sharing_fast_prefill num_gpu_blocks block_size",
    "config/model.py ModelConfig": "enable_prompt_embeds runner_type enforce_eager hf_text_config "
    "get_hidden_size get_vocab_size max_model_len",
    "config/scheduler.py SchedulerConfig": "scheduler_cls async_scheduling max_num_batched_tokens "
    "max_num_seqs",
    "config/compilation.py CompilationConfig": "mode cudagraph_mode pass_config "
    "static_forward_context",
    "distributed/kv_transfer/kv_transfer_state.py": "_KV_CONNECTOR_AGENT",
}
"""By file and class, or file alone: what this package reads there by name, as definition, attribute
or use. What a version may lack, ``getattr`` asks for where it is needed, and it is not here."""
_SECOND_RUNNER = "v1/worker/gpu/"


def missing(root: Path) -> list[str]:
    """Return what the vLLM in a folder lacks, as ``file:Class.name``, but for a second runner.

    Read from its sources: to import them all takes longer than a short harvest, and names that a
    class gets in its constructor are in no class.
    """
    names_of: dict[str, ast.Module | None] = {}
    lacks = []
    for place, names in SEAMS.items():
        file, _, class_name = place.partition(" ")
        if file not in names_of:
            path = root / file
            names_of[file] = ast.parse(path.read_bytes()) if path.exists() else None
        tree = names_of[file]
        if tree is None and file.startswith(_SECOND_RUNNER):
            continue
        scope = _scope(tree, class_name) if tree is not None else None
        present = _names(scope) if scope is not None else frozenset[str]()
        where = f"{file}:{class_name}." if class_name else f"{file}:"
        lacks += [where + name for name in names.split() if name not in present]
    return lacks


def _scope(tree: ast.Module, class_name: str) -> ast.AST | None:
    if not class_name:
        return tree
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return next((node for node in classes if node.name == class_name), None)


def _names(scope: ast.AST) -> frozenset[str]:
    # Of definitions and imports the name, of attributes, names and arguments as they are called.
    fields = ("asname", "name", "attr", "id", "arg")
    named = ([getattr(node, field, None) for field in fields] for node in ast.walk(scope))
    return frozenset(next((name for name in names if name), "") for names in named)


TESTED = ("0.31", "0.32")
"""Minor versions with which tests of ``tests/engine`` pass; ``docs/versions.md`` says which."""


def installed() -> str:
    import vllm

    return str(vllm.__version__)


def folder() -> Path:
    import vllm

    return Path(vllm.__path__[0])


def is_tested(version: str) -> bool:
    match = re.match(r"\d+\.\d+(?=\.|$)", version)
    return match is not None and match[0] in TESTED


def admit(check: bool) -> None:
    """Warn of a vLLM that the tests never ran with; it runs only with the check of the hooks.

    Such a one is looked through for all that is read in it by name, before anything starts.

    Raises:
        ActdsError: E012 for such a version without the check, and for one that lacks a name.
    """
    version = installed()
    if is_tested(version):
        return
    known = ", ".join(TESTED)
    if not check:
        raise ActdsError(
            "E012",
            f"vLLM {version}",
            got="a version that the tests never ran with, and the check is off",
            expected=f"one of {known}, or the check of the hooks",
            next_step="Leave the check on: it compares rows before the first request.",
        )
    lacks = missing(folder())
    if lacks:
        raise ActdsError(
            "E012",
            f"vLLM {version}",
            got=f"a version without {', '.join(lacks)}",
            expected=f"all names that capture reads there, as in {known}",
            next_step=f"pip install 'vllm=={TESTED[-1]}.*'",
        )
    logging.getLogger("actds").warning(
        "actds: the tests never ran with vLLM %s, but with %s. The check of the hooks compares "
        "rows before the first request; keep it on, and validate what you harvest.",
        version,
        known,
    )
