"""Where the parts of the checkout are that tests and benchmarks read and write."""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "ATTACKS",
    "BENCHMARKS",
    "DEMO_MODEL",
    "DOCS",
    "EXAMPLES",
    "ROOT",
    "SCHEMAS",
    "SPEC",
    "VECTORS",
]

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "spec"
VECTORS = SPEC / "0.1" / "vectors"
ATTACKS = SPEC / "0.1" / "attacks"
SCHEMAS = SPEC / "0.1" / "schemas"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
BENCHMARKS = ROOT / "benchmarks"
# The small real model of the examples: make demo/model/config.json.
DEMO_MODEL = ROOT / "demo" / "model"
