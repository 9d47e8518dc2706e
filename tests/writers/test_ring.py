"""The host ring hands out contiguous, disjoint slices and takes them back in order."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actds.errors import ActdsError
from actds_testing.synthetic_engine import pipeline_for
from actds_writers.harvest import processes
from actds_writers.ipc.link import ALIGNMENT, RingSpace, attach_memory, create_memory, view_memory


@given(st.lists(st.tuples(st.integers(1, 900), st.none() | st.integers(0, 99)), max_size=200))
def test_slices_in_use_never_overlap_and_never_wrap(moves: list[tuple[int, int | None]]) -> None:
    capacity = 2048
    space = RingSpace(capacity)
    in_use: list[tuple[int, int]] = []
    for nbytes, free_one in moves:
        if free_one is not None and in_use:
            offset, _ = in_use.pop(free_one % len(in_use))
            space.free(offset)
        taken = np.zeros(capacity, dtype=int)
        for offset, size in in_use:
            taken[offset : offset + -(-size // ALIGNMENT) * ALIGNMENT] += 1
        offset_now = space.reserve(nbytes)
        if offset_now is None:
            size = -(-nbytes // ALIGNMENT) * ALIGNMENT
            room = np.convolve(taken == 0, np.ones(size), "valid")
            assert room.max() < size, "a slice that fits must be taken"
            continue
        assert offset_now + nbytes <= capacity
        assert not taken[offset_now : offset_now + nbytes].any()
        in_use.append((offset_now, nbytes))
        assert space.depth == len(in_use)


def test_slices_that_come_back_in_order_are_reused_without_end() -> None:
    space = RingSpace(1024)
    in_use = [space.reserve(256) for _ in range(4)]
    for _ in range(1000):
        assert space.reserve(256) is None
        space.free(in_use.pop(0))
        in_use.append(space.reserve(256))
        assert in_use[-1] is not None


def test_a_slice_larger_than_the_ring_is_refused() -> None:
    with pytest.raises(ActdsError, match="E009 ring"):
        RingSpace(1024).reserve(1025)


def test_another_process_s_view_sees_what_was_written(tmp_path: Path) -> None:
    memory = create_memory(tmp_path / "ring", 8192)
    rows = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    view_memory(memory, 64, (2, 3, 4), np.uint16)[:] = rows
    other = attach_memory(tmp_path / "ring", 8192)
    assert np.array_equal(view_memory(other, 64, (2, 3, 4), np.uint16), rows)


def test_memory_that_cannot_be_reserved_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ActdsError, match="E503"):
        create_memory(tmp_path / "missing" / "ring", 4096)


@pytest.mark.skipif(not processes.SHARED_MEMORY.is_dir(), reason="the system has no /dev/shm")
def test_shared_memory_that_is_too_small_is_told_before_an_engine_is_started(
    tmp_path: Path,
) -> None:
    folder = processes.SHARED_MEMORY
    with (
        tempfile.TemporaryDirectory(dir=folder) as own,
        pytest.raises(ActdsError, match=r"E503 .*No space left.*\n.*shm-size"),
    ):
        create_memory(Path(own) / "ring", 1 << 60)
    with pytest.raises(ActdsError, match=rf"E503 {folder}.*bytes are free.*\n.*shm-size"):
        pipeline_for(tmp_path / "acts", ring_nbytes=1 << 60)
