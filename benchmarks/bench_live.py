"""Latency of a live server with and without capture, under bursty HTTP load on loopback.

    python benchmarks/bench_live.py [--model FOLDER] [--rounds 6] [--requests 60]

All servers are up at the same time and loaded one after the other, in an order that turns every
round: what else the machine does then falls on all of them. Two are equal and capture nothing;
their difference is the floor below which no difference means anything. Bounded in requests and
in time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from actds_testing.server import Server
from actds_testing.tiny import make_tiny_model

HOOKS = "resid_post:1,2"
ROUND_LIMIT_S = 120.0


@dataclass
class Load:
    """One round of traffic, the same for every server: bursts with pauses, long tails."""

    seed: int
    n_requests: int
    rate: float

    def requests(self) -> list[tuple[float, dict[str, Any]]]:
        """Return when each request is sent, in seconds, and its body."""
        rng = random.Random(self.seed)
        at = 0.0
        found: list[tuple[float, dict[str, Any]]] = []
        while len(found) < self.n_requests:
            burst = min(1 + int(rng.paretovariate(1.2)), 12, self.n_requests - len(found))
            for _ in range(burst):
                length = min(int(16 * rng.paretovariate(1.1)), 700)
                tokens = min(int(4 * rng.paretovariate(1.1)), 128)
                text = "".join(rng.choices("abcdefgh ijklmn opqrst", k=length))
                found.append((at, {"prompt": text, "max_tokens": tokens}))
            at += rng.expovariate(self.rate / burst)
        return found


@dataclass
class Seen:
    """What the clients of one server measured, in seconds; one list per round."""

    latency: list[list[float]] = field(default_factory=list)
    first: list[list[float]] = field(default_factory=list)
    n_tokens: int = 0
    n_failed: int = 0


def play(server: Server, load: Load, seen: Seen) -> None:
    """Send one round of traffic; wait for every answer."""
    latency: list[float] = []
    first: list[float] = []
    lock = threading.Lock()

    def one(body: dict[str, Any]) -> None:
        streamed = {**body, "stream": True, "ignore_eos": True, "temperature": 0}
        began, ttft, n = time.monotonic(), None, 0
        try:
            request = server.request("/v1/completions", streamed)
            with urllib.request.urlopen(request, timeout=ROUND_LIMIT_S) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        n += 1
                        ttft = ttft or time.monotonic() - began
        except OSError:
            with lock:
                seen.n_failed += 1
            return
        with lock:
            latency.append(time.monotonic() - began)
            first.append(ttft or float("nan"))
            seen.n_tokens += n

    began, threads = time.monotonic(), []
    for at, body in load.requests():
        time.sleep(max(0.0, began + at - time.monotonic()))
        thread = threading.Thread(target=one, args=(body,), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, began + ROUND_LIMIT_S - time.monotonic()))
    seen.latency.append(latency)
    seen.first.append(first)


def table(found: dict[str, Seen]) -> list[str]:
    """Return the lines of the result."""
    lines = [
        f"{'server':<28}{'requests':>9}{'failed':>7}{'TTFT p50':>10}{'p99':>9}"
        f"{'latency p50':>13}{'p99':>9}{'p50 against plain, by round':>34}"
    ]
    plain = found["plain"]
    for name, seen in found.items():
        first, latency = np.concatenate(seen.first), np.concatenate(seen.latency)
        ratios = [
            np.median(mine) / np.median(theirs)
            for mine, theirs in zip(seen.latency, plain.latency, strict=True)
        ]
        quantiles = [
            f"{1e3 * np.nanquantile(v, q):.1f}" for v in (first, latency) for q in (0.5, 0.99)
        ]
        lines.append(
            f"{name:<28}{len(latency):>9}{seen.n_failed:>7}{quantiles[0]:>10}{quantiles[1]:>9}"
            f"{quantiles[2]:>13}{quantiles[3]:>9}"
            f"{np.median(ratios):>16.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="model folder; default: a tiny one, no weights")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=60, help="requests per round and server")
    parser.add_argument("--rate", type=float, default=15.0, help="requests per second, on average")
    parser.add_argument("--hooks", default=HOOKS)
    parser.add_argument("--servers", type=int, default=4, help="how many of the four, 2 at least")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = options.model or make_tiny_model(
            folder / "model", n_layers=8, hidden=256, n_heads=4, n_kv_heads=4, head_dim=64,
            dtype="float32", tokenizer=True,
        )  # fmt: skip
        capture = {"hooks": options.hooks, "out": str(folder / "acts")}
        sampled = {**capture, "out": str(folder / "sampled"), "fraction": 0.1}
        configurations = {
            "plain": None,
            "capture": capture,
            "plain again": None,
            "capture, fraction 0.1": sampled,
        }
        servers: dict[str, Server] = {}
        try:
            for name, configuration in list(configurations.items())[: options.servers]:
                servers[name] = Server(
                    model, folder / f"{len(servers)}.log", configuration,
                    "--enforce-eager", "--max-model-len", "1024", "--no-async-scheduling",
                    "--distributed-executor-backend", "uni", "--shutdown-timeout", "60",
                )  # fmt: skip
                print(f"{name}: ready", file=sys.stderr, flush=True)
            found = measure(servers, options)
            for server in servers.values():
                server.stop()
        finally:
            for server in servers.values():
                server.kill()
    print("\n".join(table(found)))
    if options.json:
        options.json.write_text(
            json.dumps({k: {"latency": v.latency, "first": v.first} for k, v in found.items()})
        )


def measure(servers: dict[str, Server], options: argparse.Namespace) -> dict[str, Seen]:
    """Load every server in every round, each round beginning with another one."""
    found = {name: Seen() for name in servers}
    names = list(servers)
    for name in names:  # caches, lazy imports and first steps belong to no round
        play(servers[name], Load(0, 20, options.rate), Seen())
    for number in range(options.rounds):
        load = Load(number + 1, options.requests, options.rate)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            play(servers[name], load, found[name])
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
