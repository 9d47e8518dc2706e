"""Activation datasets that say how they were harvested.

``actds.open`` reads a dataset, ``actds.Loader`` feeds torch, ``actds.load_dataset`` feeds the
Hugging Face ``datasets`` library. What the commands do is here under their names:
``actds.validate``, ``actds.audit``, ``actds.check``, ``actds.regimes``, ``actds.stability``,
``actds.view``, ``actds.seal``, ``actds.recover``, ``actds.export``, ``actds.push``,
``actds.doctor``. ``actds.require`` opens a dataset only if it passes the gate. Each name is
imported when it is first used; errors are those of ``actds.errors``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actds.errors import ActdsError as ActdsError
    from actds.exchange.doctor import doctor as doctor
    from actds.exchange.export import export as export
    from actds.exchange.importing import import_foreign as import_foreign
    from actds.hub.card import card as card
    from actds.hub.transfer import pull as pull
    from actds.hub.transfer import push as push
    from actds.load.dataset import Dataset as Dataset
    from actds.load.dataset import open as open
    from actds.load.hf import load_dataset as load_dataset
    from actds.load.loader import Loader as Loader
    from actds.load.mixing import mixing_report as mixing_report
    from actds.recompression import recompress as recompress
    from actds.sealing import seal as seal
    from actds.shuffling import shuffle as shuffle
    from actds.trust.signing import sign as sign
    from actds.trust.signing import verify as verify
    from actds_validators.audit.api import audit as audit
    from actds_validators.check import check as check
    from actds_validators.gate.gate import require as require
    from actds_validators.regimes.api import regimes as regimes
    from actds_validators.stability.api import stability as stability
    from actds_validators.validate.validation import validate as validate
    from actds_validators.view.api import view as view
    from actds_writers.harvest.plan import plan as plan
    from actds_writers.harvest.probe_cost import probe_cost as probe_cost
    from actds_writers.harvest.recover import recover as recover
    from actds_writers.harvest.replay import replay as replay
    from actds_writers.harvest.run import write as write

__version__ = "0.1.0"

# The module of each name; the imports above give the same names to type checkers.
_LAZY = {
    "ActdsError": "actds.errors",
    "Dataset": "actds.load.dataset",
    "Loader": "actds.load.loader",
    "audit": "actds_validators.audit.api",
    "card": "actds.hub.card",
    "check": "actds_validators.check",
    "doctor": "actds.exchange.doctor",
    "export": "actds.exchange.export",
    "import_foreign": "actds.exchange.importing",
    "load_dataset": "actds.load.hf",
    "mixing_report": "actds.load.mixing",
    "open": "actds.load.dataset",
    "plan": "actds_writers.harvest.plan",
    "probe_cost": "actds_writers.harvest.probe_cost",
    "pull": "actds.hub.transfer",
    "push": "actds.hub.transfer",
    "recompress": "actds.recompression",
    "recover": "actds_writers.harvest.recover",
    "regimes": "actds_validators.regimes.api",
    "replay": "actds_writers.harvest.replay",
    "require": "actds_validators.gate.gate",
    "seal": "actds.sealing",
    "shuffle": "actds.shuffling",
    "sign": "actds.trust.signing",
    "stability": "actds_validators.stability.api",
    "validate": "actds_validators.validate.validation",
    "verify": "actds.trust.signing",
    "view": "actds_validators.view.api",
    "write": "actds_writers.harvest.run",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    """Return a public name, importing its module on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module 'actds' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
