"""The host ring hands out contiguous, disjoint slices and takes them back in order."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actds.errors import ActdsError
from actds_writers import ring


@given(st.lists(st.tuples(st.integers(1, 900), st.booleans()), max_size=200))
def test_slices_in_use_never_overlap_and_never_wrap(moves: list[tuple[int, bool]]) -> None:
    capacity = 2048
    space = ring.RingSpace(capacity)
    in_use: deque[tuple[int, int]] = deque()
    for nbytes, free_one in moves:
        if free_one and in_use:
            offset, size = in_use.popleft()
            space.free(ring.end_of(offset, size))
        offset_now = space.reserve(nbytes)
        if offset_now is None:
            assert in_use, "an empty ring must take any slice that fits"
            continue
        in_use.append((offset_now, nbytes))
        taken = np.zeros(capacity, dtype=int)
        for offset, size in in_use:
            first = offset % capacity
            assert first + size <= capacity
            taken[first : first + size] += 1
        assert taken.max() == 1
        assert space.depth == len(in_use)


def test_a_slice_larger_than_the_ring_is_refused() -> None:
    with pytest.raises(ActdsError, match="E009 ring"):
        ring.RingSpace(1024).reserve(1025)


def test_another_process_s_view_sees_what_was_written(tmp_path: Path) -> None:
    memory = ring.create(tmp_path / "ring", 8192)
    rows = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    ring.view(memory, 8192 + 64, (2, 3, 4), np.uint16)[:] = rows
    other = ring.attach(tmp_path / "ring", 8192)
    assert np.array_equal(ring.view(other, 64, (2, 3, 4), np.uint16), rows)


def test_memory_that_cannot_be_reserved_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ActdsError, match="E503"):
        ring.create(tmp_path / "missing" / "ring", 4096)
