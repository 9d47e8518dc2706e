"""Scenarios: what is served, by which pipeline, and how rows are lost. Imports nothing here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["SCENARIOS", "DependsOn", "Mechanism", "Policy", "Scenario"]

Mechanism = Literal[
    "none",
    "mcar_steps",
    "mcar_bursts",
    "few_events",
    "mar_load",
    "queue",
    "mnar_rows",
    "mnar_steps",
]
"""How rows are lost, see ``losses``."""
Policy = Literal["block", "drop_oldest", "drop_newest"]
DependsOn = Literal["norm", "projection", "rarity"]
"""What a loss by content looks at: a row's norm, its first projection, its token's rarity."""


@dataclass(frozen=True)
class Scenario:
    """The parameters of a simulated run.

    Lengths are in tokens, times in seconds of simulated time, rates per second of it.

    Args:
        name: name in ``SCENARIOS``, or any other.
        description: one line for a person.
        mechanism: how rows are lost.
        policy: overflow policy in the run record and the drop log. Queues themselves overflow
            under ``queue`` only; in any other scenario the pipeline makes the engine wait.
        rate: share of computed tokens that is lost, in expectation; for ``queue`` the share that
            the disk's speed is chosen for, ``None`` takes ``disk_rows_per_s`` as it is.
        depends_on: what ``mnar_rows`` and ``mnar_steps`` look at.
        strength: change of the log probability per standard deviation of what it depends on.
        burst_steps: mean length of a burst of lost steps.
        n_events: bursts of ``few_events``.
        lost_part: share of a lost step's rows that are lost, drawn at random.
        n_steps: steps of the run, exactly.
        mean_batch_tokens: tokens per step, about, on average.
        max_batch_tokens: token budget of a step.
        max_num_seqs: requests of a step at most.
        burst_factor: arrival rate in a burst over that outside.
        quiet_s: mean time between bursts of traffic.
        busy_s: mean length of a burst of traffic.
        burst_content: shift of the rarity of requests that arrive in a burst, in standard
            deviations of the request effect.
        prompt_median: median of the log-normal length of a request's own prompt.
        generated_median: median of the log-normal number of sampled tokens.
        length_sigma: standard deviation of both log lengths.
        prefix_share: share of requests that begin with a shared prefix.
        n_prefixes: shared prefixes; their popularity is 1 over their rank.
        cache_steps: steps for which a computed prefix stays in the prefix cache.
        cancel_share: share of requests that are cancelled: the position computed after the
            cancellation is ``undelivered``.
        vocabulary: ordinary tokens; three special ones come first.
        step_s: time of a step without tokens.
        token_s: time of a token in a step.
        staging_slots: step slices that the staging ring holds.
        ring_slots: step slices that the host ring holds.
        pool_rows: rows that shard buffers hold.
        rows_per_shard: rows of a shard.
        dma_rows_per_s: rows from staging to host ring.
        disk_rows_per_s: rows that the disk takes; ``None`` takes four times the mean load.
        disk_stall_every_s: mean time between stalls of the disk; 0 for no stall.
        disk_stall_s: median of the log-normal length of such a stall.
        d_model: channels of a row.
        n_projections: projections in the readouts.
        readouts: whether every computed row leaves readouts.
    """

    name: str = "none"
    description: str = ""
    mechanism: Mechanism = "none"
    policy: Policy = "drop_newest"
    rate: float | None = 0.005
    depends_on: DependsOn = "norm"
    strength: float = 1.0
    burst_steps: float = 8.0
    n_events: int = 3
    lost_part: float = 1.0
    n_steps: int = 40_000
    mean_batch_tokens: float = 30.0
    max_batch_tokens: int = 96
    max_num_seqs: int = 48
    burst_factor: float = 3.0
    quiet_s: float = 3.0
    busy_s: float = 0.8
    burst_content: float = 0.0
    prompt_median: float = 40.0
    generated_median: float = 30.0
    length_sigma: float = 0.9
    prefix_share: float = 0.5
    n_prefixes: int = 200
    cache_steps: int = 4000
    cancel_share: float = 0.0
    vocabulary: int = 32_000
    step_s: float = 0.008
    token_s: float = 0.00015
    staging_slots: int = 8
    ring_slots: int = 64
    pool_rows: int = 4096
    rows_per_shard: int = 2048
    dma_rows_per_s: float = 200_000.0
    disk_rows_per_s: float | None = None
    disk_stall_every_s: float = 20.0
    disk_stall_s: float = 0.2
    d_model: int = 8
    n_projections: int = 4
    readouts: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        injected = self.mechanism not in ("none", "queue")
        rules = {
            "n_steps must be at least 1": self.n_steps >= 1,
            "max_num_seqs must not exceed max_batch_tokens": (
                1 <= self.max_num_seqs <= self.max_batch_tokens
            ),
            "pool_rows must hold a step of max_batch_tokens": (
                self.pool_rows >= self.max_batch_tokens
            ),
            "the policy block loses nothing": not injected or self.policy != "block",
            "rate must lie in [0, 1)": self.rate is None or 0 <= self.rate < 1,
            "an injected loss needs a rate": not injected or self.rate is not None,
            "d_model, n_projections, n_events and burst_steps must be at least 1": (
                min(self.d_model, self.n_projections, self.n_events, self.burst_steps) >= 1
            ),
            "bursts of that rate leave no gap": (
                self.mechanism != "mcar_bursts"
                or (self.rate or 0.0) * (self.burst_steps + 1) <= self.burst_steps
            ),
        }
        for rule, kept in rules.items():
            if not kept:
                raise ValueError(f"scenario {self.name}: {rule}")

    @property
    def mean_step_s(self) -> float:
        """Return the time of a step of ``mean_batch_tokens``."""
        return self.step_s + self.token_s * self.mean_batch_tokens

    @property
    def mean_rows_per_s(self) -> float:
        """Return the rows that the engine makes per second, about."""
        return self.mean_batch_tokens / self.mean_step_s


_ALL = [
    Scenario("none", "nothing is lost, the disk keeps up", policy="block"),
    Scenario(
        "block",
        "the disk is too slow for bursts; the engine waits, nothing is lost",
        policy="block",
        disk_rows_per_s=2_600.0,
        pool_rows=768,
        rows_per_shard=256,
        ring_slots=16,
        staging_slots=4,
    ),
    Scenario("mcar_steps", "whole steps are lost at random", "mcar_steps"),
    Scenario(
        "mcar_bursts", "bursts of whole steps are lost, whatever load and content", "mcar_bursts"
    ),
    Scenario(
        "few_events", "three long bursts of whole steps are lost: too few to tell", "few_events"
    ),
    Scenario("mar_load", "a step is lost more likely after steps of high load", "mar_load"),
    Scenario(
        "queue",
        "rings overflow under drop_newest when traffic outruns the disk",
        "queue",
        burst_content=0.5,
        pool_rows=768,
        rows_per_shard=256,
        ring_slots=16,
        staging_slots=4,
    ),
    Scenario(
        "queue_oldest",
        "rings overflow under drop_oldest when traffic outruns the disk",
        "queue",
        policy="drop_oldest",
        burst_content=0.5,
        pool_rows=768,
        rows_per_shard=256,
        ring_slots=16,
        staging_slots=4,
    ),
    Scenario("mnar_content", "a row of large norm is lost more likely", "mnar_rows"),
    Scenario(
        "mnar_projection",
        "a row of large first projection is lost more likely",
        "mnar_rows",
        depends_on="projection",
    ),
    Scenario(
        "mnar_rarity",
        "the row of a rare token is lost more likely",
        "mnar_rows",
        depends_on="rarity",
    ),
    Scenario(
        "mnar_steps", "a step of rows of large norm is lost more likely, as a whole", "mnar_steps"
    ),
    Scenario(
        "large_batch",
        "queue, with steps of 400 tokens: for datasets of many tokens",
        "queue",
        readouts=False,
        mean_batch_tokens=400.0,
        max_batch_tokens=1024,
        max_num_seqs=512,
        token_s=0.00002,
        n_prefixes=1000,
        pool_rows=8192,
        rows_per_shard=2048,
        ring_slots=16,
        staging_slots=4,
        dma_rows_per_s=2_000_000.0,
    ),
    Scenario("heavy", "a fifth of all steps is lost at random", "mcar_steps", rate=0.2),
    Scenario(
        "negligible",
        "one row in ten thousand is lost, by its norm: too few to matter",
        "mnar_rows",
        rate=0.0001,
    ),
]


SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _ALL}
"""The named scenarios; ``dataclasses.replace`` changes a parameter."""
