"""The writer's own witness: which rows are new, which phase they are, how they are labelled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from actds.format.tables import FLAG_BOS, FLAG_EOS, FLAG_SPECIAL
from actds_writers.ipc.link import RowLayout
from actds_writers.ipc.messages import HookSpec, StepRows
from actds_writers.model_folder import SpecialTokens
from actds_writers.shards import Assembly, ShardBuffer


def step(
    number: int, *pieces: tuple[int, int, int, int], finished: tuple[int, ...] = ()
) -> StepRows:
    """Return a step of (request, start, stop, prompt length) pieces; token id = position + 100."""
    requests, starts, stops, prompts = (np.array(c, np.int64) for c in zip(*pieces, strict=True))
    positions = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])
    return StepRows(
        step=number,
        offset=0,
        nbytes=0,
        requests=requests,
        n_rows=stops - starts,
        prompt_lens=prompts,
        positions=positions,
        token_ids=positions + 100,
        finished=finished,
    )


def rows_for(message: StepRows) -> tuple[np.ndarray]:
    """Return one hook of one channel whose value is the row's place in the step."""
    return (np.arange(len(message.positions), dtype=np.uint16)[None, :, None],)


def stored(slices: dict, phase: str) -> list[tuple[int, int, int]]:
    """Return (request, position, value) of the rows of a phase."""
    piece = slices[phase, None]
    (rows,) = piece.rows
    values = rows[0, :, 0] if piece.select is None else rows[0, piece.select, 0]
    return list(
        zip(piece.columns["request"].tolist(), piece.columns["position"].tolist(),
            values.tolist(), strict=True)
    )  # fmt: skip


def test_a_mixed_step_is_split_by_phase_without_moving_a_row() -> None:
    message = step(5, (7, 10, 11, 10), (8, 0, 3, 6), (9, 4, 6, 5))
    slices = Assembly(SpecialTokens()).slices(message, rows_for(message))
    assert stored(slices, "decode") == [(7, 10, 0), (9, 5, 5)]
    assert stored(slices, "prefill") == [(8, 0, 1), (8, 1, 2), (8, 2, 3), (9, 4, 4)]


def test_recomputed_positions_are_counted_and_not_stored() -> None:
    assembly = Assembly(SpecialTokens())
    first = step(0, (1, 0, 8, 8))
    assembly.slices(first, rows_for(first))
    again = step(1, (1, 0, 6, 8))
    assert assembly.slices(again, rows_for(again)) == {}
    beyond = step(2, (1, 6, 10, 8))
    slices = assembly.slices(beyond, rows_for(beyond))
    assert stored(slices, "decode") == [(1, 8, 2), (1, 9, 3)]
    assert slices["decode", None].columns["attempt"].tolist() == [1, 1]
    assert slices["decode", None].columns["chunk"].tolist() == [2, 2]
    assert assembly.recomputed_tokens == 8


def test_a_jump_over_cached_positions_is_no_new_attempt() -> None:
    assembly = Assembly(SpecialTokens())
    message = step(0, (1, 32, 40, 50))
    slices = assembly.slices(message, rows_for(message))
    assert slices["prefill", None].columns["attempt"].tolist() == [0] * 8


def test_a_finished_request_s_number_is_forgotten() -> None:
    assembly = Assembly(SpecialTokens())
    message = step(0, (1, 0, 4, 4))
    assembly.slices(message, rows_for(message))
    follower = step(1, (1, 0, 4, 4), finished=(1,))
    assert len(stored(assembly.slices(follower, rows_for(follower)), "prefill")) == 4


def test_rows_of_chosen_hooks_are_of_these_hooks_alone() -> None:
    hooks = tuple(
        HookSpec(f"resid_post.{i}", "resid_post", i, width, "bfloat16")
        for i, width in enumerate((1, 2, 1))
    )
    layout = RowLayout(hooks)
    message = replace(
        step(0, (7, 0, 3, 4), (8, 0, 2, 2), (9, 0, 4, 4)),
        hooks=(("resid_post.2",), None, ("resid_post.2",)),
        kept=np.array([1, 1, 0, 1, 1, 1, 1, 0, 1], bool),
    )
    rows = layout.empty(message.n_kept)
    for number, (block, place) in enumerate(layout.places):
        rows[block][place] = 100 * number + np.flatnonzero(message.kept)[:, None]
    slices = Assembly(SpecialTokens()).slices(message, rows)
    stored = {}
    buffer = ShardBuffer(hooks, 16)
    for (phase, chosen), piece in slices.items():
        buffer.clear(chosen)
        buffer.append(piece)
        keys = zip(*(buffer.columns()[n].tolist() for n in ("request", "position")), strict=True)
        values = {name: bits[:, 0].tolist() for name, bits in buffer.rows_by_hook().items()}
        stored[phase, chosen] = [*keys], values
        assert buffer.dtypes.keys() == values.keys()
        assert buffer.nbytes == 2 * buffer.n_rows * (4 if chosen is None else 1)
    assert stored == {
        ("prefill", ("resid_post.2",)): (
            [(7, 0), (7, 1), (9, 0), (9, 1), (9, 3)],
            {"resid_post.2": [200, 201, 205, 206, 208]},
        ),
        ("prefill", None): (
            [(8, 0), (8, 1)],
            {"resid_post.0": [3, 4], "resid_post.1": [103, 104], "resid_post.2": [203, 204]},
        ),
    }


def test_flags_mark_special_tokens() -> None:
    tokens = SpecialTokens(special=(100, 102), bos=100, eos=(102,))
    message = step(0, (1, 0, 3, 3))
    slices = Assembly(tokens).slices(message, rows_for(message))
    assert slices["prefill", None].columns["flags"].tolist() == [
        FLAG_SPECIAL | FLAG_BOS, 0, FLAG_SPECIAL | FLAG_EOS,
    ]  # fmt: skip


def test_the_worker_side_knows_the_hit_ratio_of_every_step_dropped_or_not() -> None:
    assembly = Assembly(SpecialTokens())
    ratios = []
    for message in (
        step(0, (0, 0, 40, 40)),
        step(1, (0, 40, 41, 40)),
        step(2, (1, 32, 40, 40), (2, 16, 40, 40), (0, 41, 42, 40)),
        step(3, (2, 0, 8, 40)),  # resumed after a preemption: begun before
        step(4, (1, 8, 9, 40), finished=(1,)),  # the number of an ended request is new again
    ):
        assembly.lost(message)
        ratios.append(assembly.cache_hit_ratio)
    assert ratios == [0.0, None, 48 / 80, None, 8 / 40]
