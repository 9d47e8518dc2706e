"""Packages that the statistics and the pages need, and that not every reader has."""

from __future__ import annotations

from importlib.util import find_spec

from actds.errors import not_installed


def need_extra(*more: str) -> None:
    """Raise E011 when a package of the extra ``audit``, or one that is named, is not installed."""
    for name in ("scipy", *more):
        if find_spec(name) is None:
            raise not_installed(name, "audit", "actds audit")
