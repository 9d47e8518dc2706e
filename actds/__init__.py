"""Activation datasets that say how they were harvested.

``actds.open`` reads a dataset, ``actds.Loader`` feeds torch, ``actds.load_dataset`` feeds the
Hugging Face ``datasets`` library. What the commands do is here under their names:
``actds.validate``, ``actds.audit``, ``actds.check``, ``actds.regimes``, ``actds.stability``,
``actds.attention``, ``actds.steer``, ``actds.profile``, ``actds.alerts``, ``actds.view``,
``actds.seal``, ``actds.recover``, ``actds.export``, ``actds.push``, ``actds.doctor``.
``actds.require`` opens a dataset only if it passes the gate. Each name is imported when it is first
used; errors are those of ``actds.errors``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from actds.version import __version__ as __version__

FUNCTIONS = "actds.functions"
"""The entry-point group in which other packages add names to this one; ours win."""

_MODULES = {
    "ActdsError": "actds.errors",
    "card": "actds.publish.card",
    "Dataset": "actds.explore.dataset",
    "doctor": "actds.exchange.doctor",
    "export": "actds.exchange.export",
    "import_foreign": "actds.exchange.importing",
    "load_dataset": "actds.loader.hf",
    "Loader": "actds.loader.loader",
    "mixing_report": "actds.loader.order",
    "open": "actds.explore.dataset",
    "pool": "actds.loader.pools",
    "pull": "actds.publish.transfer",
    "push": "actds.publish.transfer",
    "recompress": "actds.rewrite.recompression",
    "redact": "actds.rewrite.redaction",
    "seal": "actds.publish.sealing",
    "shuffle": "actds.rewrite.shuffling",
    "sign": "actds.publish.signing",
    "verify": "actds.publish.signing",
}
"""The module of each name of this package; ``__init__.pyi`` has all of them for type checkers."""


def __getattr__(name: str) -> Any:
    """Return a public name, importing its module on first use."""
    if name == "__all__":
        return ["__version__", *sorted({*_MODULES, *entry_points(group=FUNCTIONS).names})]
    if name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        added = () if name.startswith("_") else tuple(entry_points(group=FUNCTIONS, name=name))
        if not added:
            raise AttributeError(f"module 'actds' has no attribute {name!r}")
        value = added[0].load()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
