"""The versions of vLLM that the tests ran with, and what starts with another one.

This package is the seam to vLLM: no module outside it imports vLLM or knows its internals, and a
version that differs is told apart here or where a lookup falls back, by ``getattr``, in the module
that needs it. ``docs/versions.md`` says what was run.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from actds.errors import ActdsError
from actds_writers.engines.vllm.seams import missing

TESTED = ("0.31", "0.32")
"""Minor versions with which tests of ``tests/engine`` pass; ``docs/versions.md`` says which."""


def installed() -> str:
    """Return the version of the installed vLLM, importing it."""
    import vllm

    return str(vllm.__version__)


def folder() -> Path:
    """Return the folder of the installed package ``vllm``, importing it."""
    import vllm

    return Path(vllm.__path__[0])


def is_tested(version: str) -> bool:
    """Return whether the tests ran with a version, whatever its patch and its build."""
    found = re.match(r"\d+\.\d+(?=\.|$)", version)
    return found is not None and found[0] in TESTED


def admit(check: bool) -> None:
    """Warn of a vLLM that the tests never ran with; it runs only with the check of the hooks.

    Such a one is looked through for all that is read in it by name, before anything starts.

    Args:
        check: whether the rows of the hooks are checked before the first request.

    Raises:
        ActdsError: E012 for such a version without the check, and for one that lacks a name.
    """
    version = installed()
    if is_tested(version):
        return
    known = ", ".join(TESTED)
    if not check:
        raise ActdsError(
            "E012",
            f"vLLM {version}",
            got="a version that the tests never ran with, and the check is off",
            expected=f"one of {known}, or the check of the hooks",
            next_step="Leave the check on: it compares rows before the first request.",
        )
    lacks = missing(folder())
    if lacks:
        raise ActdsError(
            "E012",
            f"vLLM {version}",
            got=f"a version without {', '.join(lacks)}",
            expected=f"all names that capture reads there, as in {known}",
            next_step=f"pip install 'vllm=={TESTED[-1]}.*'",
        )
    logging.getLogger("actds").warning(
        "actds: the tests never ran with vLLM %s, but with %s. The check of the hooks compares "
        "rows before the first request; keep it on, and validate what you harvest.",
        version,
        known,
    )
