"""The sampling parameters of a vLLM request, on its way to the table ``requests``.

The scheduler has them as the front end made them of what the client asked for, of its own defaults
and of the model's generation config.
"""

from __future__ import annotations

import functools
from typing import Any

from actds_writers.provenance import in_words

ALWAYS = ("max_tokens", "min_p", "seed", "temperature", "top_k", "top_p")
"""Parameters that are recorded whatever their value; others where they are not the default."""
FLOATS = ("min_p", "temperature", "top_p")
OF_THE_OUTPUT = frozenset(
    ("output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "flat_logprobs")
)
"""Parameters that say how tokens are handed out, and not which ones are sampled."""


def recorded(params: Any) -> dict[str, object] | None:
    """Return the parameters of a request in words, ``None`` for one that samples nothing."""
    if params is None:
        return None
    default = _default(type(params))  # type: ignore[arg-type]
    given: dict[str, Any] = {name: getattr(params, name) for name in ALWAYS}
    given |= {name: float(given[name]) for name in FLOATS}
    if (eos := getattr(params, "_eos_token_id", None)) is not None:
        given["eos_token_id"] = eos  # the tokenizer's; those of the generation config stop, too
    for name in params.__struct_fields__:
        value, usual = getattr(params, name), getattr(default, name, None)
        if name.startswith("_") or name in given or name in OF_THE_OUTPUT or value == usual:
            continue
        # The front end puts an empty value, or False, for one that is not given.
        if usual or not (value is False or value in ([], {})):
            given[name] = value
    return {name: in_words(value) for name, value in given.items()}


@functools.cache
def _default(kind: Any) -> Any:
    return kind()
