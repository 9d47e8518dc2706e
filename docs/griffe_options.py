"""Keywords that a function takes as ``**options: Unpack[...]``, shown as what they are."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class Options(griffe.Extension):
    """Replaces unpacked keywords by the keys of their ``TypedDict``, inherited ones too."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        options = [p for p in func.parameters if str(p.annotation).startswith("Unpack[")]
        if not options or func.parent is None:
            return
        annotation = options[0].annotation
        assert isinstance(annotation, griffe.ExprSubscript)
        kind = _object(str(annotation.slice.canonical_path))  # type: ignore[union-attr]
        owner = func.parent if func.name == "__init__" else func
        defaults = inspect.signature(_object(owner.path)).parameters
        del func.parameters[options[0].name]
        for name, typed in kind.__annotations__.items():
            default = repr(defaults[name].default) if name in defaults else "..."
            words = getattr(typed, "__forward_arg__", str(typed))
            keyword = griffe.ParameterKind.keyword_only
            func.parameters.add(
                griffe.Parameter(name, annotation=words, kind=keyword, default=default)
            )


def _object(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
