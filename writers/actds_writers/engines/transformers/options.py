"""Engine options of the transformers writer: few, typed, all known before a model is loaded.

Stands before the token's way; imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from actds.errors import ActdsError
from actds_writers.engines.options import parse_engine_options

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Options:
    """How the model is run.

    Args:
        max_num_seqs: requests of a batch at most.
        max_num_batched_tokens: tokens of a step at most, padding included.
        max_model_len: positions per request, ``None`` for what the model was made for.
        dtype: type to compute in; ``auto`` is the type of the weights.
        attn_implementation: attention of transformers, ``None`` for its own choice.
        device: torch device, ``None`` for a GPU where there is one.
    """

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    dtype: str = "auto"
    attn_implementation: str | None = None
    device: str | None = None


def parse_options(items: Sequence[str]) -> dict[str, Any]:
    """Return the options of ``--engine key=value`` words.

    Raises:
        ActdsError: E009 for a key or value that cannot be used.
    """
    parsed = parse_engine_options(items)
    resolve(parsed)
    return dict(parsed)


def resolve(given: Mapping[str, object]) -> Options:
    """Return options with every default filled in.

    Raises:
        ActdsError: E009 for a key or value that cannot be used.
    """
    known = [field.name for field in fields(Options)]
    for key, value in given.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=2) or known
            raise _bad(key, "an option that the transformers writer does not have", *close)
        if key in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if type(value) is not int or value < 1:
                raise _bad(key, str(value)[:80], "a whole number from 1")
        elif not isinstance(value, str):
            raise _bad(key, str(value)[:80], "a word")
    options = Options(**given)  # type: ignore[arg-type]
    if options.dtype not in DTYPES:
        raise _bad("dtype", options.dtype[:80], *DTYPES)
    if options.max_num_batched_tokens < options.max_num_seqs:
        got = f"{options.max_num_batched_tokens} tokens for {options.max_num_seqs} requests"
        raise _bad("max_num_batched_tokens", got, "at least max_num_seqs")
    return options


def _bad(key: str, got: str, *expected: str) -> ActdsError:
    return ActdsError("E009", f"--engine {key}", got=got, expected=" or ".join(expected))
