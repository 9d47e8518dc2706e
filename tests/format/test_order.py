"""The order of training rows, as a pure function."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actds.dataset.multiplicity import served_counts
from actds.format import tables
from actds.loader.order import (
    Epoch,
    EpochOrder,
    Geometry,
    frequency_counts,
    order_key,
    piece_order,
    visit_counts,
)

KEY = order_key("0" * 64, 7)


def lane_entries(order: EpochOrder, lane: int) -> list[tuple[int, int, int]]:
    """Return (shard, piece start, entry of the visit and the visit) of a lane in serving order."""
    out: list[tuple[int, int, int]] = []
    for index in range(order.n_windows(lane)):
        window = order.window(lane, index)
        assert window.first == len(out)
        used = [
            (int(piece), entry)
            for piece, a, b in zip(window.pieces, window.start, window.stop, strict=True)
            for entry in range(a, b)
        ]
        assert sorted(window.order.tolist()) == list(range(len(used)))
        out += [(used[k][0], used[k][1], lane) for k in window.order]
    assert len(out) == order.lane_entries(lane)
    return out


@given(n=st.integers(0, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_the_pieces_of_an_epoch_are_a_permutation_of_any_size(
    n: int, seed: int, epoch: int
) -> None:
    order = piece_order(n, order_key("0" * 64, seed), epoch)
    assert order.dtype == np.int64 and sorted(order.tolist()) == list(range(n))


def test_neighbouring_pieces_come_apart_in_every_epoch_and_seed() -> None:
    orders = [piece_order(10**5, key, epoch) for key in (KEY, (1, 2)) for epoch in (0, 1)]
    for k, order in enumerate(orders):
        assert np.mean(np.abs(np.diff(order)) < 1000) == pytest.approx(0.02, abs=0.005)
        for other in orders[:k]:  # as many pieces in the same place as chance puts there
            assert np.count_nonzero(order == other) < 12


def test_the_pieces_do_not_share_a_stream_with_a_window() -> None:
    order = EpochOrder([4096], Geometry(1, 1, 4096, 1), KEY, 0)
    assert not np.array_equal(order.window(0, 0).order, piece_order(4096, KEY, 0))


@given(
    n_rows=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    piece_rows=st.sampled_from([1, 8, 32, 256]),
    lanes=st.sampled_from([1, 2, 3, 8]),
    per_lane=st.integers(1, 9),
    window_rows=st.integers(1, 400),
    epoch=st.integers(0, 3),
    counted=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_lanes_partition_the_entries_for_any_geometry(
    n_rows: list[int],
    piece_rows: int,
    lanes: int,
    per_lane: int,
    window_rows: int,
    epoch: int,
    counted: bool,
) -> None:
    rng = np.random.default_rng(sum(n_rows))
    counts = [rng.integers(1, 9, n).astype(np.uint32) for n in n_rows] if counted else None
    geometry = Geometry(lanes * per_lane, lanes, window_rows, piece_rows)
    order = EpochOrder(n_rows, geometry, KEY, epoch, counts)
    entries = [entry for lane in range(lanes) for entry in lane_entries(order, lane)]
    n_entries = sum(int(c.sum()) for c in counts) if counts else sum(n_rows)
    assert len(entries) == order.n_entries == n_entries
    assert len({entry[:2] for entry in entries}) == n_entries
    sizes = [order.lane_entries(lane) for lane in range(lanes)]
    assert max(sizes) - min(sizes) <= 1
    # What drop_last leaves out is the remainder and nothing more: the full batches fit each lane.
    whole = Epoch([order], [1], geometry)
    assert whole.n_full_batches * per_lane <= min(sizes)
    assert whole.n_left == n_entries % geometry.batch
    for lane in range(lanes):
        for index in range(order.n_windows(lane)):
            window = order.window(lane, index)
            n_rows_of = (order.stop - order.start)[window.pieces]
            held = np.minimum(window.stop - window.start, n_rows_of).sum()
            assert held <= geometry.max_window_rows
    for lane in range(lanes):
        for position in range(0, sizes[lane], 7):
            window = order.window(lane, order.window_at(lane, position))
            assert window.first <= position < window.first + window.order.size


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    n_visits=st.integers(1, 20),
)
def test_visits_partition_the_copies_of_every_row(counts: list[int], n_visits: int) -> None:
    array = np.array(counts, np.uint32)
    parts = [visit_counts(array, visit, n_visits) for visit in range(n_visits)]
    assert np.array_equal(np.sum(parts, axis=0), array)
    assert max(p.max() for p in parts) <= -(-max(counts) // n_visits)
    # Copies are spread as evenly as they can be.
    assert all((p >= array // n_visits).all() for p in parts)


def test_a_much_served_piece_is_split_in_visits_of_about_its_rows() -> None:
    counts = np.ones(64, np.uint32)
    counts[:16] = 29
    order = EpochOrder([64, 10], Geometry(1, 1, 1, 64), KEY, 0, [counts, None])
    assert order.shard.tolist() == [0] * 8 + [1]
    assert order.n_visits.tolist() == [8] * 8 + [1]
    assert order.sizes.sum() == 16 * 29 + 48 + 10
    assert order.sizes[:8].max() - order.sizes[:8].min() <= 16


def test_the_order_never_changes_between_versions() -> None:
    # Golden: a changed value breaks every saved state, and asks for a new ORDER_VERSION.
    hasher = hashlib.sha256()
    for epoch in (0, 1):
        order = EpochOrder([700, 40, 513], Geometry(32, 4, 256, 64), order_key("a" * 64, 3), epoch)
        for lane in range(4):
            for index in range(order.n_windows(lane)):
                window = order.window(lane, index)
                for part in (window.pieces, window.start, window.stop, window.order):
                    hasher.update(part.astype("<i8").tobytes())
    assert hasher.hexdigest() == "304bfde1be6ba547cf9aebf60e7a29b8844069a1a8e4627f4093636feda5a4c5"


def test_another_seed_epoch_or_dataset_gives_another_order() -> None:
    geometry = Geometry(64, 4, 1024, 64)
    orders = [
        EpochOrder([4096], geometry, order_key(digest * 64, seed), epoch).window(0, 0)
        for digest, seed, epoch in [("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0)]
    ]
    assert len({order.pieces.tobytes() for order in orders}) == 4
    assert len({order.order.tobytes() for order in orders}) == 4


def test_served_counts_follow_the_intervals_of_the_run() -> None:
    table = tables.build(
        "multiplicity",
        {
            "run": ["r", "r", "other", "r"],
            "request": [2, 0, 0, 2],
            "start": [5, 0, 0, 0],
            "stop": [6, 3, 9, 2],
            "count": [7, 2, 9, 3],
        },
    )
    request = np.array([0, 0, 2, 2, 2, 2, 1, 9], np.uint32)
    position = np.array([2, 3, 0, 2, 5, 6, 0, 0], np.uint32)
    counts = served_counts("r", request, position, table)
    assert counts is not None and counts.tolist() == [2, 1, 3, 1, 7, 1, 1, 1]
    assert served_counts("r", request[-1:], position[-1:], table) is None
    assert served_counts("absent", request, position, table) is None


def test_pieces_whose_rows_are_all_left_out_are_not_read() -> None:
    counts = [np.array([0, 0, 0, 0, 1, 0, 2, 1], np.uint32), np.zeros(3, np.uint32)]
    geometry = Geometry(batch=2, lanes=2, window_rows=8, piece_rows=4)
    order = EpochOrder([8, 3], geometry, (1, 2), 0, counts)
    assert order.shard.tolist() == [0] and order.start.tolist() == [4]
    assert order.n_entries == 4
    windows = [order.window(lane, 0) for lane in range(2) if order.n_windows(lane)]
    assert sum(window.order.size for window in windows) == 4
    assert all((window.stop > window.start).all() for window in windows)


@given(
    sizes=st.lists(st.integers(40, 400), min_size=2, max_size=4),
    shares=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    lanes=st.sampled_from([1, 2, 3, 8]),
    per_lane=st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
def test_every_batch_has_the_shares_of_a_mixture_until_a_part_runs_out(
    sizes: list[int], shares: list[int], lanes: int, per_lane: int
) -> None:
    shares = shares[: len(sizes)]
    geometry = Geometry(lanes * per_lane, lanes, 64, 16)
    orders = [EpochOrder([n], geometry, KEY, 0) for n in sizes]
    epoch = Epoch(orders, shares, geometry)
    given = np.zeros((lanes, len(sizes)), int)
    for step in range(epoch.n_full_batches):
        taken = np.array([epoch.sizes(lane, step) for lane in range(lanes)])
        assert (taken.sum(axis=1) == per_lane).all() and (taken >= 0).all()
        exact = geometry.batch * np.array(shares) / sum(shares)
        assert (np.abs(taken.sum(axis=0) - exact) < 2 * len(sizes)).all()
        given += taken
        assert (np.abs(given.sum(axis=0) - (step + 1) * exact) < len(sizes)).all()
    have = np.array([[o.lane_entries(lane) for o in orders] for lane in range(lanes)])
    assert (given <= have).all()
    after = [epoch.sizes(lane, epoch.n_full_batches) for lane in range(lanes)]
    assert (given + np.array(after) > have).any()


@given(
    numbers=st.lists(
        st.lists(st.floats(0, 1e6), min_size=0, max_size=30), min_size=1, max_size=4
    ).filter(lambda lists: sum(map(sum, lists)) > 1e-3),
    n_entries=st.integers(1, 500),
)
@settings(max_examples=80, deadline=None)
def test_rows_come_in_proportion_and_an_epoch_keeps_its_length(
    numbers: list[list[float]], n_entries: int
) -> None:
    arrays = [np.array(part, np.float64) for part in numbers]
    whole = np.concatenate(arrays)
    exact = whole / whole.sum() * n_entries
    for epoch in range(3):
        counts = np.concatenate(frequency_counts(arrays, n_entries, KEY, epoch))
        assert counts.sum() == n_entries and (counts >= 0).all()
        assert (np.abs(counts - exact) < 1 + 1e-6).all()
        assert not counts[whole == 0].any()


def test_frequencies_are_exact_in_the_mean_of_epochs() -> None:
    numbers = np.random.default_rng(0).gamma(0.5, size=50)
    counts = np.mean([frequency_counts([numbers], 40, KEY, e)[0] for e in range(4000)], axis=0)
    exact = numbers / numbers.sum() * 40
    spread = np.sqrt((exact % 1) * (1 - exact % 1) / 4000)
    assert (np.abs(counts - exact) < 5 * spread + 1e-9).all()
