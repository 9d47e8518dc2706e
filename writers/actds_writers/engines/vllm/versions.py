"""The versions of vLLM that the tests ran with, and what starts with another one.

This package is the seam to vLLM: no module outside it imports vLLM or knows its internals, and a
version that differs is told apart here or where a lookup falls back, by ``getattr``, in the module
that needs it. ``docs/versions.md`` says what was run.
"""

from __future__ import annotations

import logging
import re

from actds.errors import ActdsError

TESTED = ("0.31", "0.32")
"""Minor versions with which tests of ``tests/engine`` pass; ``docs/versions.md`` says which."""


def installed() -> str:
    """Return the version of the installed vLLM, importing it."""
    import vllm

    return str(vllm.__version__)


def is_tested(version: str) -> bool:
    """Return whether the tests ran with a version, whatever its patch and its build."""
    found = re.match(r"\d+\.\d+(?=\.|$)", version)
    return found is not None and found[0] in TESTED


def admit(check: bool) -> None:
    """Warn of a vLLM that the tests never ran with; it runs only with the check of the hooks.

    Args:
        check: whether the rows of the hooks are checked before the first request.

    Raises:
        ActdsError: E012 for such a version without the check.
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
    logging.getLogger("actds").warning(
        "actds: the tests never ran with vLLM %s, but with %s. The check of the hooks compares "
        "rows before the first request; keep it on, and validate what you harvest.",
        version,
        known,
    )
