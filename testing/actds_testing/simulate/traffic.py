"""Traffic: bursty arrivals of requests with long-tailed lengths and shared prefixes.

Left of the scheduler. Imports the scenario only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from actds_testing.simulate.scenario import Scenario

__all__ = ["PREFIX_TOKENS", "SOURCES", "Traffic"]

SOURCES = ("web", "chat", "code")
PREFIX_TOKENS = (16, 128)
"""Shortest and longest shared prefix."""
_LONGEST_PROMPT, _LONGEST_ANSWER = 1500, 500


@dataclass
class Traffic:
    """The requests of a run, drawn as they are needed; lists by request number.

    Arrivals are a Poisson process whose rate is modulated by a Markov chain of two states: quiet
    times of mean ``quiet_s``, and bursts of mean ``busy_s`` in which the rate is ``burst_factor``
    times as high. A request's own prompt and its number of sampled tokens are log-normal, cut at
    1,500 and 500. With probability ``prefix_share`` it begins with a shared prefix, the k-th
    most popular with a probability proportional to 1/k; prefixes have 16 to 128 tokens. Its
    source is one of ``SOURCES``, with probabilities 0.5, 0.3 and 0.2.

    Args:
        scenario: the parameters.
        rng: where every draw comes from.
        arrival_s: time of arrival.
        prompt: prompt length, prefix included, at least one token more than it.
        generated: sampled tokens, at least 1.
        prefix: number of the shared prefix, -1 for none.
        source: index into ``SOURCES``.
        in_burst: whether it arrived in a burst.
        stopped: whether it ends at a stop token rather than at a limit.
        prefix_len: length of each shared prefix.
    """

    scenario: Scenario
    rng: np.random.Generator
    arrival_s: list[float] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    in_burst: list[bool] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    prefix_len: list[int] = field(default_factory=list)
    _until_s: float = 0.0
    _bursting: bool = False

    def __post_init__(self) -> None:
        """Draw the shared prefixes and a first stretch of requests."""
        low, high = PREFIX_TOKENS
        count = max(1, self.scenario.n_prefixes)
        self.prefix_len = self.rng.integers(low, high + 1, count).tolist()
        self.more()

    def more(self) -> None:
        """Draw the requests of the next stretch of time; at least one."""
        scenario = self.scenario
        before = len(self.arrival_s)
        while len(self.arrival_s) == before:
            end_s = self._until_s + scenario.n_steps * scenario.mean_step_s / 4
            while self._until_s < end_s:
                self._one_state()
        self._lengths(len(self.arrival_s) - before)

    def _one_state(self) -> None:
        """Draw the arrivals until the traffic changes between quiet and burst."""
        scenario, rng = self.scenario, self.rng
        length_s = rng.exponential(scenario.busy_s if self._bursting else scenario.quiet_s)
        rate = self._quiet_rate() * (scenario.burst_factor if self._bursting else 1.0)
        times = np.sort(rng.random(rng.poisson(rate * length_s))) * length_s + self._until_s
        self.arrival_s += times.tolist()
        self.in_burst += [self._bursting] * len(times)
        self._until_s += length_s
        self._bursting = not self._bursting

    def _quiet_rate(self) -> float:
        """Return the requests per second outside bursts that give the mean load, about."""
        scenario = self.scenario
        tail = math.exp(scenario.length_sigma**2 / 2)
        tokens = (scenario.prompt_median + scenario.generated_median) * tail
        period_s = scenario.quiet_s + scenario.busy_s
        factor = (scenario.quiet_s + scenario.busy_s * scenario.burst_factor) / period_s
        return scenario.mean_rows_per_s / tokens / factor

    def _lengths(self, n: int) -> None:
        scenario, rng = self.scenario, self.rng
        own = rng.lognormal(math.log(scenario.prompt_median), scenario.length_sigma, n)
        answer = rng.lognormal(math.log(scenario.generated_median), scenario.length_sigma, n)
        weights = 1.0 / np.arange(1, len(self.prefix_len) + 1)
        prefix = rng.choice(len(weights), n, p=weights / weights.sum())
        prefix = np.where(rng.random(n) < scenario.prefix_share, prefix, -1)
        shared = np.where(prefix >= 0, np.array(self.prefix_len)[prefix], 0)
        self.prompt += (shared + np.clip(own, 2, _LONGEST_PROMPT).astype(int)).tolist()
        self.generated += np.clip(answer, 1, _LONGEST_ANSWER).astype(int).tolist()
        self.prefix += prefix.tolist()
        self.source += rng.choice(len(SOURCES), n, p=(0.5, 0.3, 0.2)).tolist()
        self.stopped += (rng.random(n) < 0.7).tolist()
