"""The options of the transformers engine, without torch or transformers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from actds_writers.engine_protocol import EngineOptions


class Options(EngineOptions):
    """Options of the transformers engine.

    Args:
        max_model_len: positions per request, ``None`` for the model's own limit.
        max_num_seqs: requests per batch.
        max_num_batched_tokens: tokens per step, padding included.
        dtype: type to compute in; ``auto`` is the type of the weights.
        attn_implementation: attention of transformers, ``None`` for its own choice.
        device: torch device, ``None`` for a GPU where there is one.
    """

    max_num_seqs: Annotated[int, Field(ge=1)] = 8
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 2048
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    attn_implementation: str | None = None
    device: str | None = None
