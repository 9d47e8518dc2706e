"""What only a GPU can say of the ladder: one command each.

    python examples/regimes/gpu.py invariant --model MODEL   batch-invariant kernels, and without
    python examples/regimes/gpu.py graphs --model MODEL      CUDA graphs against eager
    python examples/regimes/gpu.py fp8 --model MODEL         an FP8 cache against the model's type

Each serves the same documents twice or more, continued by the model greedily, and compares the rows
of equal tokens with ``actds regimes``: up to the first token at which two answers part.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from run import actds, documents

CASES: dict[str, tuple[dict[str, tuple[list[str], dict[str, str]]], list[str]]] = {
    "invariant": (
        {
            "together": ([], {}),
            "one_by_one": (["max_num_seqs=1"], {}),
            "invariant_together": ([], {"VLLM_BATCH_INVARIANT": "1"}),
            "invariant_one_by_one": (["max_num_seqs=1"], {"VLLM_BATCH_INVARIANT": "1"}),
        },
        ["one_by_one-together", "invariant_one_by_one-invariant_together"],
    ),
    "graphs": (
        {"graphs": ([], {}), "again": ([], {}), "eager": (["enforce_eager=true"], {})},
        ["again-graphs", "eager-graphs"],
    ),
    "fp8": (
        {"plain": ([], {}), "again": ([], {}), "fp8": (["kv_cache_dtype=fp8"], {})},
        ["again-plain", "fp8-plain"],
    ),
}
"""Per case its harvests, each with engine arguments and environment, and what is compared."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--model", type=Path, default=Path("demo/model"), help="model folder")
    parser.add_argument("--out", type=Path, default=Path("build/regimes-gpu"), help="datasets")
    parser.add_argument("--hooks", default="resid_post:10,20", help="as of actds write")
    parser.add_argument("--documents", type=int, default=48, help="one of each topic")
    parser.add_argument("--given", type=int, default=64, help="tokens given of each")
    parser.add_argument("--sampled", type=int, default=200, help="tokens after them at most")
    parser.add_argument("--engine-arg", action="append", default=[], help="of every harvest")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    out = args.out / args.case
    out.mkdir(parents=True, exist_ok=True)
    args.out = out
    documents(args)
    harvests, contrasts = CASES[args.case]
    for name, (engine, environment) in harvests.items():
        if not (out / name).exists():
            options = [
                part for one in (*args.engine_arg, *engine) for part in ("--engine-arg", one)
            ]
            actds(
                "write", str(out / name), "--model", str(args.model), "--hooks", args.hooks,
                "--prompts", str(out / "documents.jsonl"), "--continue", str(args.given),
                "--max-tokens", str(args.sampled), "--temperature", "0", "--entropy", "--quiet",
                *options, environment=environment,
            )  # fmt: skip
    said = actds(
        "regimes", *(f"{name}={out / name}" for name in harvests),
        *(part for pair in contrasts for part in ("--contrast", pair)),
        "--pairing", "token", "--fail-on", "never",
        "--json", str(out / "regimes.json"), "--html", str(out / "regimes.html"),
    )  # fmt: skip
    print(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
