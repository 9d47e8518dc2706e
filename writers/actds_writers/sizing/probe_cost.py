"""What linear probes cost on paper: operations and bytes of a generated token, with and without.

A probe is one product with a row that the forward pass has computed anyway. Its share of the
operations is the floor; what it costs by the clock is another question (``probe_fit``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actds_writers.sizing.weights import Weights

PROBE_ITEMSIZE = 4
"""Probes and scores are float32, whatever the rows are."""


@dataclass(frozen=True)
class Attention:
    """Attention of a generated token over the positions before it.

    Args:
        flops: operations of queries with keys and of weights with values, all layers.
        kv_nbytes: bytes of keys and values that are read for it.
        unknown: why both are not known, and then 0; ``None`` where they are.
    """

    flops: float
    kv_nbytes: float
    unknown: str | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], context: int, itemsize: int) -> Attention:
        """Return the attention at a context.

        Args:
            context: positions that a token attends to, its own included.
            itemsize: bytes of a key's or value's number.
        """
        heads = config.get("num_attention_heads")
        odd = [name for name in config if name.startswith(("mamba", "ssm_", "kv_lora", "linear_"))]
        if not isinstance(heads, int) or odd:
            return cls(0.0, 0.0, f"config.json has {odd[0] if odd else 'no num_attention_heads'}")
        n_layers = int(config["num_hidden_layers"])
        kinds = config.get("layer_types") or ["full_attention"] * n_layers
        window = config.get("sliding_window")
        if config.get("use_sliding_window") is False or not isinstance(window, int):
            window = None
        if window is not None and "layer_types" not in config and window < context:
            return cls(0.0, 0.0, "a sliding window, and no layer_types")
        if set(kinds) - {"full_attention", "sliding_attention"}:
            return cls(0.0, 0.0, f"layers of {', '.join(sorted(set(kinds)))}")
        width = config.get("head_dim") or int(config["hidden_size"]) // heads
        kv_heads = config.get("num_key_value_heads") or heads
        positions = sum(
            min(context, window) if kind == "sliding_attention" and window else context
            for kind in kinds
        )
        return cls(4.0 * heads * width * positions, 2.0 * kv_heads * width * positions * itemsize)


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a decode step of ``batch`` requests.

    Args:
        weights: weights of the model that are read.
        kv: keys and values that are read.
        probes: weights of the probes.
        scores: what the probes say, from the device to the host.
    """

    batch: int
    weights: float
    kv: float
    probes: int
    scores: int

    @property
    def ratio(self) -> float:
        """Return bytes of probes and scores over those of the forward pass."""
        return (self.probes + self.scores) / (self.weights + self.kv)


@dataclass(frozen=True)
class ProbeArithmetic:
    """What probes cost on paper.

    Args:
        n_probes: at each hook.
        context: positions that a generated token attends to.
        widths: channels of each hook.
        steps: bytes, by batch.
    """

    n_probes: int
    context: int
    widths: tuple[int, ...]
    weights: Weights
    attention: Attention
    steps: tuple[StepBytes, ...]

    @classmethod
    def of(
        cls,
        n_probes: int,
        widths: Sequence[int],
        weights: Weights,
        attention: Attention,
        context: int,
        batches: Sequence[int],
    ) -> ProbeArithmetic:
        """Return the cost at some batches."""
        steps = tuple(
            StepBytes(
                batch=batch,
                weights=weights.step_nbytes(batch),
                kv=batch * attention.kv_nbytes,
                probes=PROBE_ITEMSIZE * n_probes * sum(widths),
                scores=PROBE_ITEMSIZE * n_probes * len(widths) * batch,
            )
            for batch in batches
        )
        return cls(n_probes, context, tuple(widths), weights, attention, steps)

    @property
    def forward_flops(self) -> float:
        """Return the operations of a generated token, without probes."""
        return 2 * self.weights.n_active + self.attention.flops

    @property
    def probe_flops(self) -> int:
        """Return the operations of all probes on a generated token."""
        return 2 * self.n_probes * sum(self.widths)

    @property
    def ratio(self) -> float:
        """Return operations of the probes over those of the forward pass: the floor."""
        return self.probe_flops / self.forward_flops

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON; what is not known is null."""
        known = self.attention.unknown is None
        return {
            "n_probes": self.n_probes,
            "n_hooks": len(self.widths),
            "context": self.context,
            "n_params": self.weights.n_params,
            "n_active": self.weights.n_active,
            "n_experts": self.weights.n_experts,
            "experts_per_token": self.weights.top_k,
            "forward_flops": self.forward_flops,
            "attention_flops": self.attention.flops if known else None,
            "attention_unknown": self.attention.unknown,
            "probe_flops": self.probe_flops,
            "ratio": self.ratio,
            "ratio_of_one_probe": self.ratio / max(1, self.n_probes * len(self.widths)),
            "steps": [
                {**vars(step), "kv": step.kv if known else None, "ratio": step.ratio}
                for step in self.steps
            ],
        }
