"""Entropies: what is read from logits, and which of it becomes lines."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from actds.errors import ActdsError
from actds_testing import toy
from actds_writers.capture.op import Reading
from actds_writers.census import census
from actds_writers.census.census import SampledLog
from actds_writers.engine_protocol import find_engine
from actds_writers.ipc.messages import LogitsRead, TokensSampled


def read(logits: torch.Tensor, token_ids: list[int]) -> np.ndarray:
    """Return entropy, log-probability and margin, ``(n, 3)``."""
    found = Reading.of(logits).of_tokens(torch.tensor(token_ids))
    assert found.dtype == torch.int32 and found[:, 0].tolist() == token_ids
    return np.ascontiguousarray(found.numpy()[:, 1:]).view(np.float32)


def expected(logits: torch.Tensor, token_ids: list[int]) -> np.ndarray:
    values = logits.double().numpy()
    below = log_softmax(values, axis=1)
    largest = np.sort(values, axis=1)[:, -2:]
    with np.errstate(invalid="ignore"):
        entropy = -np.nansum(np.exp(below) * below, axis=1)
    own = below[np.arange(len(values)), token_ids]
    return np.stack([entropy, own, largest[:, 1] - largest[:, 0]], axis=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocabulary", [64, 100, 50_257, 128_256])
@pytest.mark.parametrize("scale", [0.0, 0.1, 4.0, 60.0])
def test_values_are_those_of_a_softmax_in_double(
    dtype: torch.dtype, vocabulary: int, scale: float
) -> None:
    """Also of all-equal and of peaked logits, far from 0, one of them without a probability."""
    random = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(3, vocabulary, generator=random) * scale + 25).to(dtype)
    logits[1, 7] = -torch.inf
    token_ids = [0, 8, int(logits[2].argmax())]
    found = read(logits, token_ids)
    assert found == pytest.approx(expected(logits, token_ids), abs=1e-4)
    assert (found[:, 0] >= 0).all() and (found[:, 1] <= 0).all() and (found[:, 2] >= 0).all()


@pytest.mark.parametrize("vocabulary", [128, 100])
def test_the_second_largest_may_be_anywhere_and_a_tie_has_no_margin(vocabulary: int) -> None:
    for second in range(1, vocabulary):
        logits = torch.zeros(2, vocabulary)
        logits[:, 0], logits[0, second], logits[1, second] = 3.0, 2.0, 3.0
        assert read(logits, [0, 0])[:, 2].tolist() == [1.0, 0.0]


def test_what_a_sampler_does_to_the_logits_is_not_seen() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(2, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
        before = expected(logits, [5, 9])
        reading_ = Reading.of(logits)
        if dtype == torch.float32:
            logits /= 0.5  # vLLM's temperature, in place
        logits[:, 10:] = -torch.inf  # a grammar's mask, which spares the sampled token
        bits = reading_.of_tokens(torch.tensor([5, 9])).numpy()[:, 1:]
        assert np.ascontiguousarray(bits).view(np.float32) == pytest.approx(before, abs=1e-5)


def test_logits_that_are_no_number_stay_so() -> None:
    """They are refused by validation (E423), and not made into a sound value here."""
    logits = torch.zeros(2, 64)
    logits[0, 3] = torch.nan
    found = read(logits, [1, 1])
    assert np.isnan(found[0]).any() and np.isfinite(found[1]).all()


def test_rows_are_read_alike_one_by_one_and_together() -> None:
    logits = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([3] * 7)
    alone, some, together = (Reading.of(logits, n).of_tokens(ids) for n in (1, 3, 7))
    assert torch.equal(alone, some) and torch.equal(some, together)
    padded = torch.cat([logits, torch.full((7, 30), 99.0)], dim=1)[:, :64]  # as vLLM returns them
    assert torch.equal(Reading.of(padded).of_tokens(ids), alone)
    assert Reading.of(logits[:0]).of_tokens(ids[:0]).shape == (0, 4)


# ---- lines


def given(step: int, *tokens: tuple[int, int, int]) -> TokensSampled:
    return TokensSampled(step, *np.array(tokens, np.int64).T)


def logits_of(
    step: int, *tokens: tuple[int, int], value: float = 0.5, n_scores: int = 0
) -> LogitsRead:
    requests, ids = np.array(tokens, np.int64).T
    values = np.array([
        [value, -request, position, *(10 * request + k for k in range(n_scores))]
        for position, (request, _) in enumerate(tokens)
    ])  # fmt: skip
    return LogitsRead(step, requests, ids, values.astype(np.float32).ravel())


def lines(log: SampledLog, *n_positions: int) -> list[tuple[Any, ...]]:
    table = log.table(np.array(n_positions, np.int64)).to_pylist()
    return [(*list(line.values())[:-1], *line["scores"]) for line in table]


@pytest.mark.parametrize("worker_first", [False, True])
def test_only_tokens_that_a_request_got_are_lines(worker_first: bool) -> None:
    """Request 1 was in the middle of its prompt: the engine sampled, and nobody got the token."""
    log = SampledLog()
    told = [(log.give, given(4, (2, 7, 30), (0, 5, 10))),
            (log.read, logits_of(4, (0, 10), (1, 20), (2, 30)))]  # fmt: skip
    for take, message in reversed(told) if worker_first else told:
        take(message)  # type: ignore[operator]
    assert lines(log, 9, 9, 9) == [(0, 5, 4, 10, 0.5, 0, 0), (2, 7, 4, 30, 0.5, -2, 2)]
    assert log.mismatch is None


def test_a_token_that_the_worker_did_not_sample_stops_the_run() -> None:
    for read_ in (logits_of(1, (0, 11)), logits_of(1, (3, 10))):
        log = SampledLog()
        log.give(given(1, (0, 5, 10)))
        log.read(read_)
        assert isinstance(log.mismatch, ActdsError) and log.mismatch.code == "E501"
        assert "step 1 request 0" in log.mismatch.place and not lines(log, 9)


def test_a_token_beyond_what_the_census_knows_is_no_line() -> None:
    """Of a request that never ended, the last sampled token was not fed: nobody counts it."""
    log = SampledLog()
    for step, position in enumerate((5, 6)):
        log.give(given(step, (0, position, 10)))
        log.read(logits_of(step, (0, 10)))
    assert [line[1] for line in lines(log, 6)] == [5]


def test_steps_from_which_nobody_got_a_token_are_not_kept() -> None:
    """A long prompt in chunks: hundreds of bytes a step, until the end of the run."""
    log = SampledLog()
    tracemalloc.start()
    try:
        for step in range(2000):
            if step == 1000:
                before, _ = tracemalloc.get_traced_memory()
            log.read(logits_of(step, (0, 10)))
            log.give(TokensSampled(step, *np.empty((3, 0), np.int64)))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 50_000 and not lines(log, 9)


@pytest.mark.parametrize("n_scores", [0, 2])
def test_packed_lines_come_back(n_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "BLOCK_LINES", 3)
    log = SampledLog()
    for step in range(8):
        log.read(logits_of(step, (0, step), (1, 50 + step), value=step / 8, n_scores=n_scores))
        log.give(given(step, (1, 4 + step, 50 + step), (0, 9 + step, step)))
    assert lines(log, 99, 99) == [
        *((0, 9 + step, step, step, step / 8, 0, 0, *(0, 1)[:n_scores]) for step in range(8)),
        *(
            (1, 4 + step, step, 50 + step, step / 8, -1, 1, *(10, 11)[:n_scores])
            for step in range(8)
        ),
    ]


# ---- engines


@pytest.mark.parametrize(
    ("engine", "given", "place"),
    [
        ("vllm", {"speculative_config": {"method": "ngram"}}, "engine_args speculative_config"),
        ("vllm", {"spec_method": "ngram"}, "engine_args spec_method"),
        ("vllm", {"pipeline_parallel_size": 2}, "engine_args pipeline_parallel_size"),
    ],
)
def test_engines_whose_tokens_cannot_be_followed_are_refused(
    engine: str, given: dict[str, object], place: str
) -> None:
    kind = find_engine(engine)
    with pytest.raises(ActdsError, match="E012") as refused:
        kind.require_logits(kind.options(given))
    assert refused.value.place == place


def test_an_engine_that_does_not_read_its_logits_is_refused() -> None:
    with pytest.raises(ActdsError, match="E012 entropy: the engine toy"):
        toy.TOY.require_logits(toy.TOY.options({}))
    for name in ("vllm", "transformers"):
        kind = find_engine(name)
        kind.require_logits(kind.options({}))
