"""The crash soak in short: sudden ends at random, of which none may cost an acknowledged row.

``make crash`` runs the long one. In a process of its own: it forks, and this one has threads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from actds_testing.crash import power

pytestmark = pytest.mark.standard


TIMEOUT_S = 600


def soak(*arguments: str) -> dict[str, Any]:
    """Run the soak; return its figures."""
    done = subprocess.run(
        [sys.executable, "-m", "actds_testing.crash.soak", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return dict(json.loads(done.stdout)["figures"])


def test_no_kill_costs_an_acknowledged_row() -> None:
    figures = soak("--kills", "12", "--seed", "11")["kills"]
    assert figures["ends"] == 12
    assert figures["acknowledged"] > 0
    assert figures["recovered"] > 0
    assert (figures["lost"], figures["phantom"], figures["faults"]) == (0, 0, [])


def test_no_power_cut_costs_an_acknowledged_row_and_without_fsync_it_does() -> None:
    reason = power.why_not()
    if reason is not None:
        pytest.skip(reason)
    figures = soak("--power-cuts", "4", "--seed", "12")
    cuts, control = figures["power cuts"], figures["control without fsync"]
    assert cuts["ends"] >= 4
    assert cuts["acknowledged"] > 0
    assert (cuts["lost"], cuts["phantom"], cuts["faults"]) == (0, 0, [])
    assert control["lost"] > 0
