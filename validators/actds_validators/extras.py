"""Packages that the statistics and the pages need, and that not every reader has."""

from __future__ import annotations

from importlib.util import find_spec

from actds.errors import ActdsError

__all__ = ["need_extra"]


def need_extra(*more: str) -> None:
    """Raise E011 when a package of the extra ``audit``, or one that is named, is not installed."""
    for name in ("scipy", *more):
        if find_spec(name) is None:
            raise ActdsError(
                "E011",
                "actds audit",
                got=f"the package {name} is not installed",
                expected="the extra actds[audit]",
                next_step='pip install "actds[audit]"',
            )
