"""The check of the hooks: whether captured rows are the model's own, before one is stored.

Stands at the hooks, before the staging ring, and knows no engine: each engine runs the check's
prompts through its hooked model and hands over rows and what they are held against. The result is
the fact ``capture.check`` of the run record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from actds.errors import ActdsError
from actds.format import canonical
from actds_writers.ipc.messages import Fact, HookSpec

__all__ = [
    "FIELD",
    "NO_CHECK",
    "HookCheck",
    "bound",
    "check_prompts",
    "compare_with_forward",
    "compare_with_next",
    "relative_l2",
]

FIELD = "capture.check"
NO_CHECK = Fact(FIELD, "none", "declared")
"""The fact of a run whose check was switched off."""
PROMPT_LENS = (24, 17)
BOUNDS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest mean relative L2 by the type the model computes in. Right rows were measured at 1e-6 in
float32 and up to 2 % in bfloat16; a residual that counts twice or not at all at 24 % and more."""
CAST_BOUND = 1e-2
"""The same where float32 is computed and a 16-bit type stored."""
ROW_FACTOR = 5.0
"""A single row may be so many bounds away. A row of another position, whose cosine to the right one
is about two thirds, is further away than that under every bound."""
CLEARLY = 0.5
"""Another layer fits better when it is nearer than this share of the hook's own distance."""

Against = Literal["transformers", "engine", "table"]


@dataclass(frozen=True)
class HookCheck:
    """What the check came to.

    Args:
        against: ``transformers``, a plain forward of the same weights; ``engine``, what the next
            layer reads in the same engine; ``table``, a model class that was verified before,
            where neither could be had.
        distances: mean relative L2 of the rows by hook.
        bounds: the largest one that passes, by hook.
        n_rows: rows compared per hook.
        reason: why it was not held against ``transformers``, empty when it was.
    """

    against: Against
    distances: Mapping[str, float]
    bounds: Mapping[str, float]
    n_rows: int
    reason: str = ""

    def fact(self) -> Fact:
        """Return the fact of the run record; what is not whole is a decimal string.

        Spec: 0.1 section 6.1.
        """
        document: dict[str, object] = {"against": self.against}
        if self.distances:
            bounds = {name: _decimal(self.bounds[name]) for name in self.distances}
            one = set(bounds.values())
            document["bound"] = one.pop() if len(one) == 1 else bounds
            document["hooks"] = {name: _decimal(d) for name, d in self.distances.items()}
            document["rows"] = self.n_rows
        if self.reason:
            document["reason"] = self.reason[:300]
        return Fact(FIELD, canonical.dump(document).decode().strip(), "observed")

    def require(self) -> None:
        """Refuse rows that are not the model's.

        Raises:
            ActdsError: E507 with the hook, its distance and the bound.
        """
        for name, distance in self.distances.items():
            # Also not-a-number, which is what rows without a finite value come to.
            if not distance <= self.bounds[name]:
                raise _mismatch(name, distance, self.bounds[name], f"against {self.against}")


def check_prompts(vocab_size: int, max_len: int) -> tuple[list[int], ...]:
    """Return two short prompts of token ids.

    Ids come from the middle of the vocabulary, where no special tokens are: some of those stand
    for images.

    Args:
        vocab_size: tokens of the model.
        max_len: tokens of a prompt at most.
    """
    draw = np.random.default_rng(0)
    low, high = vocab_size // 8, max(vocab_size // 2, vocab_size // 8 + 1)
    return tuple(
        draw.integers(low, high, size=max(1, min(length, max_len))).tolist()
        for length in PROMPT_LENS
    )


def bound(computed: str, stored: str, *, coarse: bool = False) -> float:
    """Return the largest mean relative L2 that passes.

    Args:
        computed: type the model computes in.
        stored: type of the rows.
        coarse: whether products or keys and values are kept in less than that type.
    """
    limit = BOUNDS[computed]
    if coarse:
        return BOUNDS["bfloat16"]
    return max(limit, CAST_BOUND) if stored != computed else limit


def compare_with_forward(
    rows: Mapping[HookSpec, np.ndarray],
    states: Mapping[str, Mapping[int, np.ndarray]],
    bounds: Mapping[str, float],
    decoded: np.ndarray | None = None,
) -> HookCheck:
    """Hold the rows of every hook against the same place at every layer of a plain forward.

    Prompts and decoded tokens are compared apart, and the greater distance counts: a decode step
    has few rows, and a mean over all would hide them.

    Args:
        rows: float32 ``(n, d_model)`` by hook.
        states: float32 ``(n, d_model)`` by kind and layer.
        bounds: largest mean relative L2 that passes, by hook.
        decoded: bool ``(n,)``: rows of a decode step; ``None`` where there is none.

    Raises:
        ActdsError: E507 when rows differ, or equal another layer's.
    """
    n_rows = len(next(iter(rows.values())))
    parts = [np.ones(n_rows, bool)] if decoded is None else [~decoded, decoded]
    found: dict[str, float] = {}
    for hook, got in rows.items():
        limit = bounds[hook.name]
        apart = {layer: row_distances(got, s) for layer, s in states[hook.kind].items()}
        distances = {
            layer: float(np.max([one[part].mean() for part in parts if part.any()]))
            for layer, one in apart.items()
        }
        own, worst = distances[hook.layer], float(apart[hook.layer].max())
        finite = {layer: d for layer, d in distances.items() if np.isfinite(d)}
        nearest = min(finite, key=lambda layer: finite[layer], default=hook.layer)
        if nearest != hook.layer and not distances[nearest] >= CLEARLY * own:
            words = f"nearer to layer {nearest} ({_decimal(distances[nearest])})"
            raise _mismatch(hook.name, own, limit, words)
        if own <= limit and not worst <= ROW_FACTOR * limit:
            words = f"one row {_decimal(worst)}, against transformers"
            raise _mismatch(hook.name, own, limit, words)
        found[hook.name] = own
    check = HookCheck("transformers", found, bounds, n_rows)
    check.require()
    return check


def compare_with_next(
    distances: Mapping[str, float], bounds: Mapping[str, float], n_rows: int, reason: str
) -> HookCheck:
    """Judge the distances between rows and what the part behind each hook reads.

    Args:
        distances: smallest mean relative L2 by hook.
        bounds: largest one that passes, by hook.
        n_rows: rows compared per hook.
        reason: why no plain forward could be had.

    Raises:
        ActdsError: E507 when rows differ.
    """
    check = HookCheck("engine", distances, bounds, n_rows, reason)
    check.require()
    return check


def relative_l2(got: np.ndarray, want: np.ndarray) -> float:
    """Return the mean over rows of the relative L2 distance.

    Args:
        got: float32 ``(n, d_model)``.
        want: float32 ``(n, d_model)``.
    """
    return float(row_distances(got, want).mean())


def row_distances(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the relative L2 distance of each row, ``(n,)``."""
    norms = np.linalg.norm(want, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        distances: np.ndarray = np.linalg.norm(got - want, axis=-1) / norms
    return distances


def _mismatch(hook: str, distance: float, limit: float, words: str) -> ActdsError:
    return ActdsError(
        "E507",
        f"hook {hook}",
        got=f"rows {_decimal(distance)} (mean relative L2) from the model's own, {words}",
        expected=f"at most {_decimal(limit)}",
    )


def _decimal(value: float) -> str:
    return f"{value:.3g}"
