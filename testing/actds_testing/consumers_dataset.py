"""Make the dataset that the consumers read: a real harvest, and a second run beside it.

python -m actds_testing.consumers_dataset OUT, where vLLM is installed. The first run is
SmolLM2-135M in a real vLLM: its first position is a sink, hundreds of times longer than other
rows, which the prefix cache serves to every request. The second one is simulated, with request
numbers that begin at 0 again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from actds.format.readouts import Readouts
from actds_testing.harvest import REAL_MODEL, run
from actds_testing.synthetic import make_dataset

HOOKS = ("resid_post.10", "resid_post.20")
SYSTEM = "You answer questions about the standard library of Python in a few plain sentences. " * 6
QUESTIONS = (
    "What does hashlib do?",
    "How do I read a file line by line?",
    "Why is a default argument evaluated once?",
    "What is the difference between a list and a tuple, and when does it matter?",
    "Explain generators.",
    "When is a set faster than a list?",
    "What does functools.lru_cache keep, and for how long?",
    "How does struct.unpack read little-endian numbers?",
)


def main() -> None:
    out = Path(sys.argv[1])
    prompts = out.with_suffix(".jsonl")
    with prompts.open("w", encoding="utf-8") as file:
        for question in QUESTIONS:
            file.write(message(question))
    options = ["--hooks", "resid_post:10,20", "--max-tokens", "24", "--quiet"]
    engine = ["block_size=32", "max_model_len=1024", "max_num_seqs=2", "enforce_eager=true"]
    numerics = ["--engine-arg", "dtype=float32", "--store-dtype", "bfloat16"]
    options += [word for one in engine for word in ("--engine-arg", one)] + numerics
    done = run(out, REAL_MODEL, prompts, *options)
    if done.returncode:
        sys.exit(done.stderr)
    make_dataset(
        out,
        n_requests=80,
        run="r-second",
        hooks=HOOKS,
        d_model=576,
        seed=4,
        sinks=True,
        readouts=Readouts(8, seed=0),
    )


def message(question: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return json.dumps({"messages": messages}) + "\n"


if __name__ == "__main__":
    main()
