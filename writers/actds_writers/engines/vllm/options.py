"""What of vLLM capture can account for: its versions, model classes and options.

This package is the seam to vLLM: no module outside it imports vLLM or knows its internals, and a
version that differs is told apart here or where a lookup falls back, by ``getattr``, in the module
that needs it. ``docs/versions.md`` says what was run. Workers, scheduler and server refuse options
by the same tables.

Of model classes the rows are those of ``transformers``, as ``tests/matrix`` found: by class the
form of the residual stream, and the kinds that were right beside ``resid_post`` in every family of
the class, as ``docs/families.md`` lists them. A class or kind that is missing is harvested only if
the check of the hooks confirms its rows.

vLLM 0.32.0 on a CPU: in ``vllm/lora``, ``punica_wrapper/utils.py:35`` uses -1 for "no adapter", and
``ops/torch_ops/lora_ops.py:31, 74 and 119`` index with it: in PyTorch that is the last adapter. So
requests without an adapter get one, in a step beside a request that has one; requests with an
adapter have rows of their own adapter. ``tests/engine/test_engine_lora.py`` shows both. The Triton
kernels leave at -1 (``ops/triton_ops/lora_shrink_op.py:160``), but no measurement on a GPU of ours
says so. A harvest has therefore one adapter for every request, or none; a server with adapters is
captured if the check of the hooks sees that its requests without one have rows of the base model.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from actds.errors import not_installed
from actds.format.canonical import read_bounded
from actds_writers.capture.taps import StreamForm
from actds_writers.engine_protocol import OPTION, EngineOptions, EngineValue, bad_option, refused
from actds_writers.ipc.link import Link
from actds_writers.model_folder import ModelFiles, file_sha256, find_model

if TYPE_CHECKING:
    import torch

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
    "data_parallel_index world_size nnodes node_rank distributed_executor_backend worker_cls "
    "enable_dbo ubatch_size",
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
        nodes = ast.walk(tree) if tree is not None else iter(())
        classes = (node for node in nodes if isinstance(node, ast.ClassDef))
        named = (node for node in classes if node.name == class_name)
        scope = next(named, None) if class_name else tree
        present = _names(scope) if scope is not None else frozenset[str]()
        where = f"{file}:{class_name}." if class_name else f"{file}:"
        lacks += [where + name for name in names.split() if name not in present]
    return lacks


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

    Such a one is looked through for all that is read in it by name, before anything starts. Raises
    E012 for such a version without the check, and for one that lacks a name.
    """
    version = installed()
    if is_tested(version):
        return
    known = ", ".join(TESTED)
    if not check:
        raise refused(
            f"vLLM {version}",
            "a version that the tests never ran with, and the check is off",
            f"one of {known}, or the check of the hooks",
            "Leave the check on: it compares rows before the first request.",
        )
    lacks = missing(folder())
    if lacks:
        raise refused(
            f"vLLM {version}",
            f"a version without {', '.join(lacks)}",
            f"all names that capture reads there, as in {known}",
            f"pip install 'vllm=={TESTED[-1]}.*'",
        )
    logging.getLogger("actds").warning(
        "actds: the tests never ran with vLLM %s, but with %s. The check of the hooks compares "
        "rows before the first request; keep it on, and validate what you harvest.",
        version,
        known,
    )


CONFIG = "adapter_config.json"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for ``max_lora_rank``."""


@dataclass(frozen=True)
class Adapter:
    name: str
    folder: Path
    rank: int

    @property
    def arguments(self) -> dict[str, Any]:
        most = next((rank for rank in RANKS if rank >= self.rank), self.rank)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": most}

    def request(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.name, 1, str(self.folder))


def read_adapter(folder: str) -> Adapter:
    """Return the adapter of a folder; raises E009 for one that holds none."""
    path = Path(folder).expanduser().absolute()
    try:
        rank = int(json.loads(read_bounded(path / CONFIG))["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        got = f"{folder[:80]}: {type(error).__name__} at {CONFIG}"
        raise bad_option("lora", got, "a folder with a LoRA adapter, as PEFT saves it") from None
    return Adapter(path.name, path, rank)


@contextlib.contextmanager
def random_adapters(worker: Any, model: torch.nn.Module) -> Iterator[Any]:
    """Fill all places for adapters of an idle worker with random ones; yield one for a request."""
    import torch
    from vllm.lora.request import LoRARequest

    manager, config = worker.model_runner.lora_manager, worker.vllm_config.lora_config
    adapters = [
        LoRARequest(f"actds-check-{number}", number, "/nowhere")
        for number in range(1, int(config.max_loras) + 1)
    ]
    with manager.dummy_lora_cache():
        for adapter in adapters:
            manager.add_dummy_lora(adapter, rank=min(int(config.max_lora_rank), 8))
            manager._adapter_manager.activate_adapter(adapter.lora_int_id)
    places = list(_places(model))
    with torch.inference_mode():
        for number, place in enumerate(places):
            chance = torch.Generator(place.device).manual_seed(number)
            place.normal_(std=place.shape[-1] ** -0.5, generator=chance)
    try:
        yield adapters[0]
    finally:
        with torch.inference_mode():
            for place in places:
                place.zero_()
        manager.remove_all_adapters()


def _places(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            tensors = vars(module).get(name, ())
            yield from tensors if isinstance(tensors, tuple | list) else (tensors,)


def adapter_sha256(folder: str) -> str | None:
    """Return the SHA-256 over the sorted 'name sha256' lines of the adapter's files, if any."""
    path = Path(folder)
    files = [file for kind in (CONFIG, "*.safetensors", "*.bin") for file in path.glob(kind)]
    lines = "".join(f"{file.name} {file_sha256(file)}\n" for file in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest() if files else None


OWNED: Mapping[str, str] = {
    "model": "the argument model",
    "seed": "the argument seed",
    "additional_config": "nothing: actds sets it to configure the workers",
}
"""Options that ``actds write`` sets itself, and what to use in their place."""
OWNED_PARAMS: Mapping[str, str] = {
    "temperature": "the argument temperature",
    "max_tokens": "max_tokens of the harvest",
    "output_kind": "nothing: the command reads whole outputs",
}
"""Sampling parameters that it sets itself, likewise."""
_SAMPLING = "sampling_params"


@dataclass(frozen=True)
class Refused:
    """An engine option of which capture can account for some values, and why for no other."""

    allowed: tuple[EngineValue, ...]
    reason: str


_SPLIT = "the tokens of a step are split over ranks, and no worker sees all of them"
_SPECULATION = "the account of this way to draft was never tested"
_STAGED_DRAFTS = (
    "vLLM's first model runner makes a drafter on the last stage only, and fails on the others"
)
DRAFTED_BY = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
"""Methods of speculative decoding whose account is tested.

vLLM may find another method than was given, by a draft model's name or type, so that a worker
compares again.
"""
DRAFTS = ("speculative_config", "spec_method", "spec_model")
"""Options with which an engine drafts."""
_KV_FROM_OUTSIDE = ("kv_transfer_config", "kv_offloading_size")
_WRAPPED = "capture is in vLLM's own worker and scheduler, and another class may bypass it"
_LORA = (
    "only the check of a server's hooks can say that requests without an adapter have rows of the "
    "base model; lora=FOLDER harvests all requests with one adapter"
)
_REPLICAS = "actds write starts every replica itself; use data_parallel_size"
_MICROBATCH = "a step is run in parts, and the capture buffer holds only the last"

REFUSED: Mapping[str, Refused] = {
    "data_parallel_size": Refused(
        (None, 1),
        "replicas of a mixture of experts share its experts and step together, and actds write "
        "starts engines that do not know of each other; capture a server that has them",
    ),
    "data_parallel_rank": Refused((None,), _REPLICAS),
    "data_parallel_size_local": Refused((None,), _REPLICAS),
    "data_parallel_external_lb": Refused((None, False), _REPLICAS),
    "data_parallel_hybrid_lb": Refused((None, False), _REPLICAS),
    "prefill_context_parallel_size": Refused((None, 1), _SPLIT),
    "decode_context_parallel_size": Refused((None, 1), _SPLIT),
    "enable_hc_sp": Refused((None, False), _SPLIT),
    "distributed_executor_backend": Refused(
        (None, "mp", "uni"),
        "of workers that another program places nobody knows whether their machine is the writer's",
    ),
    "speculative_config": Refused((None, *DRAFTED_BY), _SPECULATION),
    "spec_method": Refused((None, *DRAFTED_BY), _SPECULATION),
    "diffusion_config": Refused((None,), "positions are computed many times"),
    "ec_transfer_config": Refused((None,), "embeddings are computed outside this engine"),
    "kv_sharing_fast_prefill": Refused(
        (None, False), "upper layers skip prefill positions, and their rows would be stale"
    ),
    "enable_dbo": Refused((None, False), _MICROBATCH),
    "ubatch_size": Refused((None, 0, 1), _MICROBATCH),
    "tokenizer_mode": Refused((None, "auto", "hf"), "prompts are encoded by the tokenizer.json"),
    "code_revision": Refused((None,), "a model's own code is not run to read its prompts"),
    "override_generation_config": Refused(
        (None,),
        "it changes what a server's clients get by default, and here nothing; use "
        "temperature, max_tokens and sampling_params",
    ),
    "skip_tokenizer_init": Refused((None, False), "prompts cannot be encoded"),
    "tokens_only": Refused((None, False), "prompts cannot be encoded"),
    "enable_prompt_embeds": Refused((None, False), "a prompt of embeddings has no token ids"),
    "enable_lora": Refused((None, False), _LORA),
    "runner": Refused((None, "auto", "generate"), "only generation is harvested"),
    "convert": Refused((None, "auto", "none"), "only generation is harvested"),
    "worker_cls": Refused((None, "auto"), _WRAPPED),
    "scheduler_cls": Refused((None,), _WRAPPED),
}
"""Options that are refused with E012, and why."""

OVER_NODES: Mapping[str, Refused] = {
    "node_rank": Refused(
        (None, 0), "capture is of the first node; the others run vLLM without one"
    ),
    "pipeline_parallel_size": Refused(
        (None, 1), "the ring of a stage is in the memory of its node, and no writer is there"
    ),
    "data_parallel_size": Refused(
        (None, 1), "replicas over nodes were never tested; give each its nodes, and a part"
    ),
    "distributed_executor_backend": Refused(
        (None, "mp"), "vLLM starts no workers for the other nodes"
    ),
}
"""Options that are refused with E012 beside ``nnodes``, and why."""
SECOND_ENGINE = "its other nodes have joined one engine, and a second one would wait for them"

REFUSED_CONNECTORS: Mapping[str, str] = {
    "DecodeBenchConnector": "it fills KV blocks with made-up values, and rows follow from them"
}
"""KV connectors that are refused with E012, and why."""


def n_nodes(options: Mapping[str, object]) -> int:
    """Return over how many nodes the ranks of one engine are."""
    given = options.get("nnodes")
    return given if isinstance(given, int) else 1


def refuse_options(options: Mapping[str, object], place: str = OPTION) -> None:
    """Raise for a configuration that capture cannot account for.

    Raises E012 with the option and the reason.

    Args:
        options: engine arguments by name, from a command line or from a live engine. What holds
            for a ``speculative_config`` is its method.
        place: what the error names before the option.
    """
    rules = [*(OVER_NODES.items() if n_nodes(options) > 1 else ()), *REFUSED.items()]
    for key, rule in rules:
        value = options.get(key)
        if isinstance(value, Mapping):
            # vLLM's own default, if the name or type of the model says nothing else.
            value = value.get("method") or ("draft_model" if value.get("model") else value)
        # True == 1 in Python, so the types have to agree too.
        if any(value == allowed and type(value) is type(allowed) for allowed in rule.allowed):
            continue
        usable = " or ".join(json.dumps(allowed) for allowed in rule.allowed if allowed is not None)
        raise refused(
            f"{place} {key}", f"{str(value)[:80]}: {rule.reason}", usable or "no such option"
        )
    stages = options.get("pipeline_parallel_size") or 1
    if stages != 1 and any(options.get(name) for name in DRAFTS):
        raise refused(
            f"{place} speculative_config",
            f"drafts with {stages} pipeline stages: {_STAGED_DRAFTS}",
            "no drafts, or one stage",
        )
    transfer = str(options.get("kv_transfer_config") or "")
    for connector, reason in REFUSED_CONNECTORS.items():
        if connector in transfer:  # also inside a MultiConnector
            raise refused(
                f"{place} kv_transfer_config",
                f"{connector}: {reason}",
                "a connector of KV that a model computed",
            )


UNREAD: Mapping[str, str] = {
    **dict.fromkeys(DRAFTS, "an accepted draft is of the logits of another row than its own"),
    "pipeline_parallel_size": "the stage that samples may have no hook, and then does not capture",
}
"""Options with which no entropy is recorded, and why."""


def refuse_unread(options: Mapping[str, object], place: str) -> None:
    """Raise E012 for a configuration whose sampled tokens cannot be followed to their logits."""
    for key, reason in UNREAD.items():
        if options.get(key) not in (None, 1):
            raise refused(
                f"{place} {key}",
                f"{str(options[key])[:80]} with entropy: {reason}",
                "no such option, or entropy=False",
            )


def argument_names() -> frozenset[str]:
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:
        raise not_installed(error.name or "vllm", "vllm", "vllm") from None
    names: Collection[str] = EngineArgs.__dataclass_fields__
    return frozenset(name for name in names if not name.startswith("_"))


class VllmOptions(EngineOptions):
    """Arguments of vLLM's ``EngineArgs``; vLLM itself validates their values."""

    model_config = ConfigDict(extra="allow")

    max_model_len: Any = None
    pipeline_parallel_size: Annotated[int, Field(ge=1)] | None = None
    async_scheduling: bool | None = None
    data_parallel_size: Annotated[int, Field(ge=1)] | None = None
    served_model_name: Any = None
    revision: str | None = None
    """Of the repository that ``--model`` names."""
    tokenizer: str | None = None
    """Folder or repository of the tokenizer, if it is not that of the model."""
    tokenizer_revision: str | None = None
    hf_config_path: str | None = None
    """Folder of ``config.json``, likewise."""
    generation_config: str | None = None
    """Folder of ``generation_config.json``, likewise; ``auto`` and ``vllm`` are the model's."""
    lora: str | None = None
    """Folder of the adapter of every request."""
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of ``SamplingParams`` for every request."""

    def arguments(self) -> dict[str, Any]:
        apart = {"lora", "sampling_params", "revision", "tokenizer_revision"}
        return self.model_dump(exclude_unset=True, exclude=apart)

    def files(self, model: Path) -> ModelFiles:
        def folder(name: str, revision: str | None = None) -> Path:
            value = getattr(self, name)
            return find_model(value, revision, f"{OPTION} {name}") if value else model

        config = folder("hf_config_path")
        generation = config
        if self.generation_config not in (None, "auto", "vllm"):
            generation = folder("generation_config")
        tokenizer = folder("tokenizer", self.tokenizer_revision)
        if self.tokenizer is None and self.tokenizer_revision is not None:
            raise bad_option("tokenizer_revision", "no tokenizer beside it", "tokenizer=org/name")
        return ModelFiles(model, config, tokenizer, generation)

    @property
    def n_samples(self) -> int:
        n = self.sampling_params.get("n", 1)
        return n if isinstance(n, int) else 1

    @property
    def sampling(self) -> Mapping[str, Any]:
        return self.sampling_params


def graph_key(link: Link) -> dict[str, Any]:
    """Return what capture adds to the model's graph: that alone is in the compile cache's key."""
    hooks = [f"{kind}:{layer}" for kind, layer in link.hooks]
    # The type of the rows is this one, or follows from the model's, which is in the key as well.
    key: dict[str, Any] = {
        "hooks": hooks,
        "readouts": link.readouts,
        "store_dtype": link.settings.store_dtype,
    }
    if link.interventions_path is not None:
        from actds_writers.interventions import Planned

        sizes = Planned.read(link.interventions_path).table_sizes
        key["interventions"] = [f"{hook}:{n}" for hook, n in sizes]
    return key
