"""The options of the vLLM engine, and those that capture cannot account for.

Workers, scheduler and server refuse by the same tables. vLLM is imported for the names of its
arguments alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from actds.errors import ActdsError, not_installed
from actds_writers.engine_protocol import (
    OPTION,
    EngineOptions,
    EngineValue,
    bad_option,
)
from actds_writers.ipc.link import Link
from actds_writers.model_folder import ModelFiles, find_model

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
    """An engine option that capture cannot account for.

    Args:
        allowed: the values that are allowed; every other one is refused.
        reason: what would go wrong.
    """

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
    "nnodes": Refused((None, 1), "the writer reaches only workers on one machine"),
    "distributed_executor_backend": Refused(
        (None, "mp", "uni"), "the writer reaches only worker processes that vLLM starts here"
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


REFUSED_CONNECTORS: Mapping[str, str] = {
    "DecodeBenchConnector": "it fills KV blocks with made-up values, and rows follow from them",
}
"""KV connectors that are refused with E012, and why."""


def refuse_options(options: Mapping[str, object]) -> None:
    """Raise for a configuration that capture cannot account for.

    Args:
        options: engine arguments by name, from a command line or from a live engine. What holds
            for a ``speculative_config`` is its method.

    Raises:
        ActdsError: E012 with the option and the reason.
    """
    for key, rule in REFUSED.items():
        value = options.get(key)
        if isinstance(value, Mapping):
            # vLLM's own default, if the name or type of the model says nothing else.
            value = value.get("method") or ("draft_model" if value.get("model") else value)
        # True == 1 in Python, so the types have to agree too.
        if any(value == allowed and type(value) is type(allowed) for allowed in rule.allowed):
            continue
        usable = " or ".join(json.dumps(allowed) for allowed in rule.allowed if allowed is not None)
        raise ActdsError(
            "E012",
            f"{OPTION} {key}",
            got=f"{str(value)[:80]}: {rule.reason}",
            expected=usable or "no such option",
        )
    stages = options.get("pipeline_parallel_size") or 1
    if stages != 1 and any(options.get(name) for name in DRAFTS):
        raise ActdsError(
            "E012",
            f"{OPTION} speculative_config",
            got=f"drafts with {stages} pipeline stages: {_STAGED_DRAFTS}",
            expected="no drafts, or one stage",
        )
    transfer = str(options.get("kv_transfer_config") or "")
    for connector, reason in REFUSED_CONNECTORS.items():
        if connector in transfer:  # also inside a MultiConnector
            raise ActdsError(
                "E012",
                f"{OPTION} kv_transfer_config",
                got=f"{connector}: {reason}",
                expected="a connector of KV that a model computed",
            )


UNREAD: Mapping[str, str] = {
    **dict.fromkeys(DRAFTS, "an accepted draft is of the logits of another row than its own"),
    "pipeline_parallel_size": "the stage that samples may have no hook, and then does not capture",
}
"""Options with which no entropy is recorded, and why."""


def refuse_unread(options: Mapping[str, object], place: str) -> None:
    """Raise for a configuration whose sampled tokens cannot be followed to their logits.

    Args:
        options: engine arguments by name; of a ``speculative_config`` its method is enough.
        place: what the error names before the option.

    Raises:
        ActdsError: E012 with the option and the reason.
    """
    for key, reason in UNREAD.items():
        if options.get(key) not in (None, 1):
            raise ActdsError(
                "E012",
                f"{place} {key}",
                got=f"{str(options[key])[:80]} with entropy: {reason}",
                expected="no such option, or entropy=False",
            )


def argument_names() -> frozenset[str]:
    """Return the argument names of the installed vLLM, importing it; raises E011 without it."""
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
        """Return what the user gave to ``EngineArgs``, by name; revisions are in the folders."""
        apart = {"lora", "sampling_params", "revision", "tokenizer_revision"}
        return self.model_dump(exclude_unset=True, exclude=apart)

    def files(self, model: Path) -> ModelFiles:
        """Return the folders of a model's files; raises as ``EngineOptions.files``."""

        def found(name: str, revision: str | None = None) -> Path:
            value = getattr(self, name)
            return find_model(value, revision, f"{OPTION} {name}") if value else model

        config = found("hf_config_path")
        generation = config
        if self.generation_config not in (None, "auto", "vllm"):
            generation = found("generation_config")
        tokenizer = found("tokenizer", self.tokenizer_revision)
        if self.tokenizer is None and self.tokenizer_revision is not None:
            raise bad_option("tokenizer_revision", "no tokenizer beside it", "tokenizer=org/name")
        return ModelFiles(model, config, tokenizer, generation)

    @property
    def n_samples(self) -> int:
        """Return how many times each prompt is sampled."""
        n = self.sampling_params.get("n", 1)
        return n if isinstance(n, int) else 1

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Return the further sampling parameters."""
        return self.sampling_params


def graph_key(link: Link) -> dict[str, Any]:
    """Return what capture adds to the model's graph: that alone is in the compile cache's key."""
    hooks = [f"{kind}:{layer}" for kind, layer in link.hooks]
    # The type of the rows is this one, or follows from the model's, which is in the key as well.
    return {"hooks": hooks, "readouts": link.readouts, "store_dtype": link.settings.store_dtype}
