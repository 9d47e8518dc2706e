"""Activation datasets that say how they were harvested.

``actds.open`` reads a dataset, ``actds.Loader`` feeds torch, ``actds.load_dataset`` feeds the
Hugging Face ``datasets`` library. What the commands do is here under their names:
``actds.validate``, ``actds.audit``, ``actds.seal``, ``actds.recover``, ``actds.export``. Each name
is imported when it is first used; errors are those of ``actds.errors``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actds.errors import ActdsError as ActdsError
    from actds.exchange.export import export as export
    from actds.exchange.importing import import_foreign as import_foreign
    from actds.load.dataset import Dataset as Dataset
    from actds.load.dataset import open as open
    from actds.load.hf import load_dataset as load_dataset
    from actds.load.loader import Loader as Loader
    from actds.recompression import recompress as recompress
    from actds.sealing import seal as seal
    from actds_validators.audit.api import audit as audit
    from actds_validators.validate.validation import validate as validate
    from actds_writers.harvest.plan import plan as plan
    from actds_writers.harvest.recover import recover as recover
    from actds_writers.harvest.run import write as write

__version__ = "0.1.0"

# One line per name: the module that holds it, and what it is called there. The import above gives
# the same name to type checkers.
_LAZY = {
    "ActdsError": "actds.errors:ActdsError",
    "Dataset": "actds.load.dataset:Dataset",
    "Loader": "actds.load.loader:Loader",
    "audit": "actds_validators.audit.api:audit",
    "export": "actds.exchange.export:export",
    "import_foreign": "actds.exchange.importing:import_foreign",
    "load_dataset": "actds.load.hf:load_dataset",
    "open": "actds.load.dataset:open",
    "plan": "actds_writers.harvest.plan:plan",
    "recompress": "actds.recompression:recompress",
    "recover": "actds_writers.harvest.recover:recover",
    "seal": "actds.sealing:seal",
    "validate": "actds_validators.validate.validation:validate",
    "write": "actds_writers.harvest.run:write",
}

__all__ = [
    "ActdsError",
    "Dataset",
    "Loader",
    "__version__",
    "audit",
    "export",
    "import_foreign",
    "load_dataset",
    "open",
    "plan",
    "recompress",
    "recover",
    "seal",
    "validate",
    "write",
]


def __getattr__(name: str) -> Any:
    """Return a public name, importing its module on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module 'actds' has no attribute {name!r}")
    module, _, attribute = _LAZY[name].partition(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
