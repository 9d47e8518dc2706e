"""The transformers engine: its entry point, without torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from actds_writers.engine_protocol import Engine, EngineKind, bad_option
from actds_writers.engines.transformers.options import Options
from actds_writers.ipc.link import Link


class Transformers(EngineKind[Options]):
    """The model's own code, with static batches."""

    name = "transformers"
    option_type = Options
    intervenes = True

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
