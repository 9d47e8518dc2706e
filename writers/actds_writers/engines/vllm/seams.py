"""What this package reads in vLLM by name, and which of it an installed vLLM lacks.

Read from its sources: to import them all takes longer than a short harvest, and names that a class
gets in its constructor are in no class. What a version may lack, ``getattr`` asks for where it is
needed, and it is not here.
"""

from __future__ import annotations

import ast
from pathlib import Path

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
"""By file and class, or file alone: names that must be there, as definition, attribute or use."""
_SECOND_RUNNER = "v1/worker/gpu/"


def missing(root: Path) -> list[str]:
    """Return what a vLLM lacks, as ``file:Class.name``; versions with one runner need no second.

    Args:
        root: folder of the package ``vllm``.
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
        there = _names(scope) if scope is not None else frozenset[str]()
        where = f"{file}:{class_name}." if class_name else f"{file}:"
        lacks += [where + name for name in names.split() if name not in there]
    return lacks


def _scope(tree: ast.Module, class_name: str) -> ast.AST | None:
    if not class_name:
        return tree
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return next((node for node in classes if node.name == class_name), None)


def _names(scope: ast.AST) -> frozenset[str]:
    """Return every name that is defined, assigned or used in a scope."""
    names: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return frozenset(names)
