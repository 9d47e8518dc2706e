"""Why an engine with LoRA adapters is refused: what the engine itself computes there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from actds_testing import harvest as h

pytestmark = pytest.mark.engine


@pytest.mark.full
def test_this_engine_adds_an_adapter_to_requests_without_one(tmp_path: Path) -> None:
    """When this fails, vLLM may have mended it: check again, then lift the refusal."""
    done = subprocess.run(
        [sys.executable, "-m", "actds_testing.lora_engine", str(tmp_path)],
        env=h.environment(**h.ONE_PROCESS),
        capture_output=True,
        text=True,
        timeout=h.TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.rpartition("FOUND ")[2])
    assert found["adapter against base"] > 0.01
    assert found["alone against base"] < 1e-5
    # The rows of the base request, in one step with a request of the adapter.
    assert found["beside against base"] > 0.01
    assert found["beside against adapter"] < 1e-5
