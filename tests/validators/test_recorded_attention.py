"""Lines of a request, found in the table of attention that an engine wrote."""

from __future__ import annotations

import secrets

import pyarrow as pa

from actds_studies.attention.recorded import RecordedLayer
from actds_studies.attention.rows import Request


def test_each_request_has_its_own_lines_whatever_the_names_of_runs() -> None:
    """The order of groups is not that of the table, as hashes of some names meet."""
    for _ in range(300):
        run = f"r-{secrets.token_hex(8)}"
        numbers = [number for number in range(16) for _ in range(28)]
        lines = pa.table({"run": [run] * len(numbers), "request": pa.array(numbers, pa.uint32())})
        layer = RecordedLayer(0, lines, 4)
        for number in range(16):
            of_request = layer.of(Request(run, number, number, 1, 9))
            assert set(of_request["request"].to_pylist()) == {number} and len(of_request) == 28
        assert len(layer.of(Request("r-another", 0, 0, 1, 9))) == 0
