"""The engines, and how methods that are not theirs are wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], Any]:
    """Replace a method of a class or object by the decorated function.

    It is called with the method that it replaces, and then as that one.
    """
    original = getattr(owner, name)

    def replace(body: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return body(original, *args, **kwargs)

        setattr(owner, name, wrapped)
        return wrapped

    return replace
