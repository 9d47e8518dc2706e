"""Tiers of the tests: each test is in exactly one, and its markers say which.

- ``fast``: starts no process; ``make check``.
- ``standard``: processes of the pipeline, servers, one session of a real engine; ``make test``.
- ``full``: every variant of the engine, packages, browsers, calibration, matrices; ``make
  test-all``.

A pytest plugin, named in ``pyproject.toml``.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

TIERS = ("fast", "standard", "full")
# What a test needs, and the tier that has it unless the test says another one.
NEEDS = {
    "engine": "standard",
    "package": "full",
    "browser": "full",
    "matrix": "full",
    "attack": "full",
    "consumers": "full",
    "gpu": "full",
}
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")

_current: list[pytest.Item] = []


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test.

    Raises:
        pytest.UsageError: its markers name two tiers.
    """
    named = {name for name in TIERS if item.get_closest_marker(name)}
    if len(named) > 1:
        raise pytest.UsageError(f"{item.nodeid} is in the tiers {sorted(named)}")
    if named:
        return named.pop()
    needed = {tier for need, tier in NEEDS.items() if item.get_closest_marker(need)}
    return max(needed, key=TIERS.index, default="fast")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with its tier, before ``-m`` chooses."""
    for item in items:
        item.add_marker(getattr(pytest.mark, tier_of(item)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Remember which test runs."""
    _current.append(item)
    try:
        return (yield)
    finally:
        _current.pop()


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if "from actds.format.apart import serve" in repr(arguments):
        return  # a parser of what strangers made, which a test process starts once
    if event in STARTS and _current and tier_of(_current[-1]) == "fast":
        raise RuntimeError(
            f"{_current[-1].nodeid} starts a process ({event} {arguments!r:.200}): mark it standard"
        )


sys.addaudithook(_refuse_processes)
