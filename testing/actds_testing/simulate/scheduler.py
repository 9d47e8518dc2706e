"""The serving scheduler: continuous batching with chunked prefill and a prefix cache.

Right of the traffic, left of the pipeline. Imports both, and the scenario.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actds_testing.simulate.pipeline import Pipeline
from actds_testing.simulate.scenario import Scenario
from actds_testing.simulate.traffic import Traffic

__all__ = ["Schedule", "schedule"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Schedule:
    """What was computed when; requests are those that were scheduled, in order of arrival.

    Args:
        prompt: prompt tokens of each request, int64 ``(n_requests,)``.
        generated: sampled tokens of each request, at least 1.
        cached: positions served from the prefix cache.
        reference: request that computed those, -1 for none.
        last_prefill: step of the last prefill chunk.
        chunk_request: request of each prefill chunk, int64 ``(n_chunks,)``.
        chunk_start: its first position.
        chunk_stop: the position after its last.
        chunk_step: its step.
        t_s: time of each step, float64 ``(n_steps,)``.
        duration_s: its length, without waits.
        offered_s: when its rows were there.
        n_tokens: tokens of each step, int64 ``(n_steps,)``.
        waiting: requests that wait after scheduling.
        running: requests that run after scheduling.
    """

    prompt: Ints
    generated: Ints
    cached: Ints
    reference: Ints
    last_prefill: Ints
    chunk_request: Ints
    chunk_start: Ints
    chunk_stop: Ints
    chunk_step: Ints
    t_s: Floats
    duration_s: Floats
    offered_s: Floats
    n_tokens: Ints
    waiting: Ints
    running: Ints


def schedule(scenario: Scenario, traffic: Traffic, pipeline: Pipeline | None) -> Schedule:
    """Return the schedule of exactly ``n_steps`` steps of at least one token each.

    In every step each decoding request has one token; what is left of ``max_batch_tokens`` goes
    to the oldest prompts, cut in chunks where it has to be, as long as the step has no more than
    ``max_num_seqs`` requests. A prompt that begins with a shared prefix is served it from the
    cache if a request computed the whole prefix in an earlier step, at most ``cache_steps`` ago.
    A step takes ``step_s`` and ``token_s`` for each of its tokens; without work the engine sleeps
    until the next arrival. Nobody is preempted. When the steps are used up, what was not given to
    a request counts as never asked for: its prompt or answer is cut there.

    Args:
        scenario: the parameters.
        traffic: the requests; it draws more when they run out.
        pipeline: takes each step's rows, and may hold up the engine; ``None`` takes none.
    """
    n_steps, budget_of_step = scenario.n_steps, scenario.max_batch_tokens
    prompt, generated, prefix = traffic.prompt, traffic.generated, traffic.prefix
    arrival_s, prefix_len = traffic.arrival_s, traffic.prefix_len
    change = [0] * (n_steps + 1)  # of the decoding requests, by step
    owner, ready = [-1] * len(prefix_len), [-1] * len(prefix_len)
    cached: list[int] = []
    reference: list[int] = []
    last_prefill: list[int] = []
    chunks: list[tuple[int, int, int, int]] = []
    steps: list[tuple[float, float, float, int, int, int]] = []
    waiting: deque[int] = deque()
    current = -1  # the request whose prompt is half done, and how far
    done = 0
    n_arrived = n_decoding = 0
    now_s = 0.0
    for step in range(n_steps):
        n_decoding += change[step]
        if n_arrived == len(arrival_s):
            traffic.more()
        if not n_decoding and not waiting and current < 0:
            now_s = max(now_s, arrival_s[n_arrived])
        while arrival_s[n_arrived] <= now_s:
            waiting.append(n_arrived)
            n_arrived += 1
            if n_arrived == len(arrival_s):
                traffic.more()
        budget = budget_of_step - n_decoding
        n_seqs = n_decoding
        while budget and (current >= 0 or waiting) and n_seqs < scenario.max_num_seqs:
            if current < 0:
                current = waiting.popleft()
                group, done = prefix[current], 0
                if group >= 0 and ready[group] >= 0 and step <= ready[group] + scenario.cache_steps:
                    done = prefix_len[group] if ready[group] < step else 0
                cached.append(done)
                reference.append(owner[group] if done else -1)
                last_prefill.append(-1)
            stop = min(prompt[current], done + budget)
            chunks.append((current, done, stop, step))
            budget -= stop - done
            n_seqs += 1
            group = prefix[current]
            if group >= 0 and not cached[current] and done < prefix_len[group] <= stop:
                owner[group], ready[group] = current, step
            done = stop
            if stop == prompt[current]:
                last_prefill[current] = step
                first, end = step + 1, step + generated[current]
                if first <= n_steps:
                    change[first] += 1
                if end <= n_steps:
                    change[end] -= 1
                current = -1
        n_tokens = budget_of_step - budget
        n_running = n_seqs + (current >= 0 and n_seqs == n_decoding)
        length_s = scenario.step_s + scenario.token_s * n_tokens
        end_s = now_s + length_s
        steps.append((now_s, length_s, end_s, n_tokens, len(waiting), n_running))
        now_s = end_s if pipeline is None else pipeline.offer(step, n_tokens, end_s)
    if current >= 0:
        prompt[current], generated[current], last_prefill[current] = done, 1, n_steps - 1
    return _as_arrays(scenario, traffic, cached, reference, last_prefill, chunks, steps)


def _as_arrays(
    scenario: Scenario,
    traffic: Traffic,
    cached: list[int],
    reference: list[int],
    last_prefill: list[int],
    chunks: list[tuple[int, int, int, int]],
    steps: list[tuple[float, float, float, int, int, int]],
) -> Schedule:
    n_requests = len(cached)
    last = np.array(last_prefill, np.int64)
    t_s, duration_s, offered_s, n_tokens, waiting, running = np.array(steps).T
    chunk = np.array(chunks, np.int64).T
    return Schedule(
        prompt=np.array(traffic.prompt[:n_requests], np.int64),
        generated=np.minimum(traffic.generated[:n_requests], scenario.n_steps - last),
        cached=np.array(cached, np.int64),
        reference=np.array(reference, np.int64),
        last_prefill=last,
        chunk_request=chunk[0],
        chunk_start=chunk[1],
        chunk_stop=chunk[2],
        chunk_step=chunk[3],
        t_s=t_s,
        duration_s=duration_s,
        offered_s=offered_s,
        n_tokens=n_tokens.astype(np.int64),
        waiting=waiting.astype(np.int64),
        running=running.astype(np.int64),
    )
