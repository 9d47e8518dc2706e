"""Queries, keys and values as a ``transformers`` model gives them to its attention function.

Those functions are no modules: each is replaced by one that first hands what it is given to a
module beside the attention, where an attention has one, and then does the same as before.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

_NAME = "_actds_attended"


class Attended(torch.nn.Module):
    """Is called with query, key and value, ``(batch, heads, n, head_dim)``, before they are used.

    Keys and values are those of the positions that are computed, without the cache's.
    """

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Return nothing: hooks read the arguments."""


def attended(attention: Any) -> Attended:
    """Return the module that is called whenever an attention of ``transformers`` attends.

    It is never called for a model that does not use the interface of attention functions.
    """
    found: Attended | None = getattr(attention, _NAME, None)
    if found is None:
        _watch(str(attention.config._attn_implementation))
        found = Attended()
        setattr(attention, _NAME, found)
    return found


@functools.cache
def _watch(name: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    known = ALL_ATTENTION_FUNCTIONS.get(name)

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        told = getattr(module, _NAME, None)
        if told is not None:
            n = query.shape[2]
            told(query, key[:, :, -n:], value[:, :, -n:])
        return (known or _own_function(module))(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(name, attend)


def _own_function(module: Any) -> Any:
    """Return the attention function of a model's own file, which is its default."""
    name = "eager_attention_forward"
    files = (vars(sys.modules[base.__module__]) for base in type(module).__mro__)
    return next(names[name] for names in files if name in names)
