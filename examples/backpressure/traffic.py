"""Long-tail traffic in bursts, and a harvest that is driven by it.

The workload is a prompts file for ``actds write`` and, beside it, when each request comes and how
many tokens it wants. A burst begins some time after the burst before has been served: so every
policy, fast or slow, sees the same bursts, and the disk has the same pauses.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Traffic:
    """A workload, drawn from a seed.

    Args:
        n_bursts: bursts of requests.
        requests_per_burst: mean of a Poisson number, one at least.
        seed: seed of everything drawn.
        prompt_tokens: median and sigma of the log-normal prompt length.
        generated_tokens: median and sigma of the log-normal number of tokens to generate.
        longest: tokens at most, of a prompt and of a generation.
        spread_s: mean seconds between two requests of a burst.
        pause_s: mean seconds between the end of a burst and the next.
        characters_per_token: characters of text that are taken for a token.
    """

    n_bursts: int
    requests_per_burst: float = 8.0
    seed: int = 0
    prompt_tokens: tuple[float, float] = (48.0, 1.0)
    generated_tokens: tuple[float, float] = (32.0, 0.8)
    longest: tuple[int, int] = (640, 256)
    spread_s: float = 0.05
    pause_s: float = 1.0
    characters_per_token: int = 4

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write prompts and schedule; return their paths."""
        rng = np.random.default_rng(self.seed)
        text = library_text()
        prompts: list[dict[str, Any]] = []
        schedule: list[dict[str, Any]] = []
        for burst in range(self.n_bursts):
            pause = float(rng.exponential(self.pause_s)) if burst else 0.0
            after = 0.0
            for _ in range(max(1, int(rng.poisson(self.requests_per_burst)))):
                n_prompt = _long_tail(rng, *self.prompt_tokens, self.longest[0])
                length = n_prompt * self.characters_per_token
                start = int(rng.integers(len(text) - length))
                prompts.append({"prompt": text[start : start + length]})
                schedule.append(
                    {
                        "burst": burst,
                        "pause_s": pause,
                        "after_s": after,
                        "max_tokens": _long_tail(rng, *self.generated_tokens, self.longest[1]),
                    }
                )
                after += float(rng.exponential(self.spread_s))
        paths = folder / "prompts.jsonl", folder / "schedule.jsonl"
        for path, records in zip(paths, (prompts, schedule), strict=True):
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return paths


def library_text() -> str:
    """Return real text that stands on every machine: Python's own standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    return "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)


def _long_tail(rng: np.random.Generator, median: float, sigma: float, longest: int) -> int:
    return int(np.clip(round(float(rng.lognormal(np.log(median), sigma))), 4, longest))


def harvest(schedule: Path, arguments: list[str]) -> int:
    """Run ``actds write`` with these arguments, its prompts fed by the schedule.

    Feeding is the one thing that differs from the command; engine, writer, census, policies and
    seal are its own.
    """
    from actds.cli import main
    from actds_writers.harvest import one_engine
    from actds_writers.harvest import run as command

    entries = [json.loads(line) for line in schedule.read_text().splitlines()]

    class Bursts(one_engine.Feed):
        def serve(self, engine: Any) -> None:
            burst, began = 0, time.monotonic()
            while self.queue or self.live:
                if self.interrupted:
                    self.abort(engine, self.live)
                    return
                while self.queue and _is_due(entries[self._row()], burst, began):
                    wanted = entries[self._row()]["max_tokens"]
                    self.add(engine, replace(self.queue.pop(), max_tokens=wanted))
                if self.queue and not self.live:
                    if (entry := entries[self._row()])["burst"] > burst:
                        burst, began = entry["burst"], time.monotonic() + entry["pause_s"]
                    else:
                        time.sleep(0.002)
                self.step(engine)

        def _row(self) -> int:
            return self.queue[-1].prompt.row

    command.Feed = Bursts  # type: ignore[attr-defined]
    sys.argv = ["actds", "write", *arguments]
    return main() or 0


def _is_due(entry: dict[str, Any], burst: int, began: float) -> bool:
    return entry["burst"] == burst and time.monotonic() >= began + float(entry["after_s"])


if __name__ == "__main__":
    sys.exit(harvest(Path(sys.argv[1]), sys.argv[2:]))
