"""The transformers engine: its entry point and options, without torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from actds_writers.engine_protocol import Engine, EngineKind, EngineOptions, bad_option
from actds_writers.ipc.link import Link


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


class Transformers(EngineKind[Options]):
    """The model's own code, with static batches."""

    name = "transformers"
    option_type = Options

    def options(self, given: Mapping[str, object]) -> Options:
        """Return validated options; raises as ``EngineKind.options``."""
        options = super().options(given)
        if options.max_num_batched_tokens < options.max_num_seqs:
            got = f"{options.max_num_batched_tokens} tokens for {options.max_num_seqs} requests"
            raise bad_option("max_num_batched_tokens", got, "at least max_num_seqs")
        return options

    def require_logits(self, options: Options) -> None:
        """Return: the engine samples from its model's logits itself."""

    def start(
        self, model: Path, options: Options, link: Link, *, temperature: float, seed: int
    ) -> Engine:
        from actds_writers.engines.transformers.engine import Engine as TransformersEngine

        return TransformersEngine(model, options, link, temperature=temperature, seed=seed)


TRANSFORMERS = Transformers()
