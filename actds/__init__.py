"""Activation datasets that say how they were harvested.

``actds.open`` reads a dataset, ``actds.Loader`` feeds torch, ``actds.load_dataset`` feeds the
Hugging Face ``datasets`` library. Each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actds.errors import ActdsError as ActdsError
    from actds.load.dataset import Dataset as Dataset
    from actds.load.dataset import open as open
    from actds.load.hf import load_dataset as load_dataset
    from actds.load.loader import Loader as Loader
    from actds_validators.audit.api import audit as audit

__version__ = "0.1.0"

_LAZY = {
    "ActdsError": "actds.errors",
    "Dataset": "actds.load.dataset",
    "Loader": "actds.load.loader",
    "audit": "actds_validators.audit.api",
    "load_dataset": "actds.load.hf",
    "open": "actds.load.dataset",
}

__all__ = ["ActdsError", "Dataset", "Loader", "__version__", "audit", "load_dataset", "open"]


def __getattr__(name: str) -> Any:
    """Return a public name, importing its module on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module 'actds' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
