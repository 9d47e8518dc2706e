"""Without ``-m matrix`` nothing here is even imported: that alone takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder alone unless it is asked for."""
    return None if "matrix" in str(config.getoption("markexpr")) else True
