"""A dataset through the Hugging Face ``datasets`` library: streamed, map-style, and its tables.

python examples/load_hf.py PATH
"""

import argparse
from pathlib import Path

import datasets

import actds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="a sealed dataset")
    args = parser.parse_args()
    datasets.disable_progress_bars()

    # Streamed: nothing is copied to a cache, and tensors keep their type.
    stream = actds.load_dataset(args.path, streaming=True)
    example = next(iter(stream))
    hook = next(name for name in example if "." in name)
    print("stream:", hook, tuple(example[hook].shape), example[hook].dtype)

    # Map-style: random access, shuffle, select, filter on the provenance columns.
    rows = actds.load_dataset(args.path, hooks=hook)
    prompt = rows.filter(lambda phase: phase == "prefill", input_columns="phase")
    print("map-style:", len(rows), "rows,", len(prompt), "of prompts,", prompt[:4][hook].dtype)

    # The provenance is plain Parquet, which needs no actds at all.
    files = sorted(str(file) for file in args.path.glob("census/*/steps-*.parquet"))
    steps = datasets.load_dataset("parquet", data_files=files, split="train")
    print("steps:", len(steps), "with", sum(steps["batch_tokens"]), "tokens scheduled")


if __name__ == "__main__":
    main()
