"""Unless the full tier or the matrix is asked for, nothing here is imported: it takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder alone unless it is asked for."""
    asked = str(config.getoption("markexpr"))
    return None if "matrix" in asked or "full" in asked else True
