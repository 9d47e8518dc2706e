"""What a harvest says while it runs and at its end: readable, true, and never in the way."""

from __future__ import annotations

import dataclasses
import io
import re
import threading
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from actds.errors import ActdsError
from actds.format.schema import RowCounts
from actds.text import format_nbytes, format_seconds
from actds_writers.engines.vllm.options import VllmOptions
from actds_writers.harvest.one_engine import Run
from actds_writers.harvest.processes import Pipeline
from actds_writers.harvest.result import Terminal, Totals, format_summary
from actds_writers.ipc.messages import CensusProgress, CommitTotals, StageState, WriterProgress
from actds_writers.monitor.progress import (
    WIDTH,
    Snapshot,
    Stage,
    eta_s,
    format_line,
    format_screen,
    show_progress,
    take_snapshot,
)

SECOND = 10**9
WRITTEN = WriterProgress(
    n_rows=39_000,
    last_step=120,
    row_nbytes=2_304,
    queue_depth=1,
    ring_nbytes=90_000_000,
    backlog_nbytes=15_000_000,
    commits=CommitTotals(
        n_shards=5,
        n_raw_shards=1,
        n_rows=36_000,
        nbytes_in=82_944_000,
        nbytes_out=56_600_000,
        seconds=1.75,
        buckets=(0, 0, 0, 0, 2, 4, 5, 5, 5, 5, 5, 5),
        p50_s=0.31,
        p99_s=0.5234,
        last_ns=1 * SECOND,
    ),
    stages=(
        StageState("staging", 0, 20_000, 50_000_000, 4e6, 0, 0),
        StageState("ring", 1, 110_000, 100_000_000, 4e6, 3, 1_200_000_000),
        StageState("pool", 1, 2, None, 0, 2, 300_000_000),
    ),
    memory_nbytes=1_900_000_000,
    t_ns=4 * SECOND,
)
COUNTED = CensusProgress(
    scheduled_tokens=40_000,
    cached_tokens=12_345,
    n_finished=128,
    waiting=98,
    running=30,
    ring_depth=15,
    last_step=121,
    connected=True,
    staging_depth=2,
    queried_tokens=60_000,
    recomputed_tokens=3,
)


def snapshot(
    written: WriterProgress | None = WRITTEN, counted: CensusProgress | None = COUNTED, **other: Any
) -> Snapshot:
    facts = {"elapsed_s": 20.0, "requests_done": 128, "requests_total": 256}
    return take_snapshot(written, counted, now_ns=5 * SECOND, **{**facts, **other})


NOW = snapshot()
TOTALS = Totals(
    path="demo/acts",
    elapsed_s=40.0,
    requests={"length": 250, "abort": 2, "skipped": 4},
    scheduled=1_000,
    recomputed=40,
    captured=900,
    cache_ref=500,
    dropped=30,
    aborted=30,
    aborted_uncomputed=5,
    filtered=5,
    unresolved=0,
    n_hooks=2,
    n_shards=3,
    row_nbytes=2_000_000,
    stored_nbytes=1_000_000,
    skipped_tokens=5_000,
    seal="0123456789abcdef" * 4,
)


def screen(now: Snapshot, before: Snapshot | None = None, started: Snapshot | None = None) -> str:
    """Return what a terminal of 80 columns shows."""
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    console.print(format_screen(now, before, started))
    return console.export_text()


def test_line_says_every_counter_and_rates_since_the_start() -> None:
    assert format_line(NOW) == (
        "20.0 s  128/256 requests  2,000 tokens/s  4.49 MB/s  39,000 rows  89.9 MB  "
        "12,345 cached  queues 2/15/1  0 dropped"
    )


def test_line_says_what_is_left_where_the_total_is_known() -> None:
    started = dataclasses.replace(NOW, elapsed_s=4.0, requests_done=0)
    assert "  128/256 requests  16.0 s left  " in format_line(NOW, None, started)
    nobody_knows = dataclasses.replace(NOW, requests_total=None)
    assert "  128 requests  2,000 tokens/s" in format_line(nobody_knows, None, started)


def test_rates_are_those_since_the_earlier_snapshot() -> None:
    before = dataclasses.replace(NOW, elapsed_s=10.0, scheduled_tokens=35_000, rows=0)
    assert "  500 tokens/s  8.99 MB/s  " in format_line(NOW, before)
    assert "  - tokens/s  -  " in format_line(NOW, NOW)


def test_screen_says_all_there_is_to_know() -> None:
    before = dataclasses.replace(
        NOW,
        elapsed_s=10.0,
        scheduled_tokens=35_000,
        stages=tuple(Stage(stage.name, nbytes=stage.nbytes // 2) for stage in NOW.stages),
        commits=CommitTotals(nbytes_out=6_600_000),
    )
    started = dataclasses.replace(NOW, elapsed_s=4.0, requests_done=0)
    assert screen(NOW, before, started).splitlines() == [
        "time      20.0 s   16.0 s left",
        "requests  128/256 (50%)   30 running   98 waiting",
        "tokens    40,000 scheduled   500/s   cache hits 20.6%   3 recomputed",
        "rows      39,000 captured   36,000 durable",
        "staging   ##........  16% 2 steps        4.61 MB/s captured",
        "ring      ######....  60% 15 steps       4.50 MB/s taken  3 stalls 1.2 s",
        "pool      #####.....  50% 1 shard        4.15 MB/s committed  2 stalls 0.3 s",
        "disk      56.6 MB   5.00 MB/s   1.47x   15.0 MB to encode",
        "commits   5 (1 raw)   p50 0.31 s   p99 0.523 s   last 4.0 s ago",
        "memory    1.90 GB at most, all stages",
        "dropped   0",
    ]


WITH_LANE = dataclasses.replace(
    WRITTEN,
    stages=(
        *WRITTEN.stages,
        StageState("readouts", 3, None, 32_000_000, 1e5, 7, 2_500_000_000, moved_nbytes=8_000_000),
    ),
)


def test_the_lane_of_readouts_is_a_line_of_the_screen_with_its_waits() -> None:
    counted = dataclasses.replace(COUNTED, lane_depth=304)
    now = snapshot(WITH_LANE, counted)
    assert now.lane == Stage("readouts", 8_000_000, 304, None, 0.95, 7, 2.5)
    line = "readouts  ##########  95% 304 steps      0.40 MB/s taken  7 stalls 2.5 s"
    lines = screen(now).splitlines()
    assert lines[7] == line.replace("0.40 MB", " 400 kB")
    earlier = dataclasses.replace(now, elapsed_s=10.0, lane=Stage("readouts", 3_000_000))
    assert " 500 kB/s taken" in screen(now, earlier)
    assert not any(line.startswith("readouts") for line in screen(NOW).splitlines())
    assert snapshot(WITH_LANE).lane.depth == 3  # the writer's word, while the census has none


def test_screen_is_loud_about_losses_and_a_writer_that_waits() -> None:
    lost = dataclasses.replace(COUNTED, dropped={"queue_full": 1_200, "dma_backpressure": 34})
    text = format_screen(snapshot(dataclasses.replace(WRITTEN, t_ns=-395 * SECOND), lost))
    lines = text.plain.splitlines()
    assert lines[-1] == "dropped   34 dma_backpressure, 1,200 queue_full"
    assert "writer    no message for 6:40; it waits for the disk" in lines
    (style,) = {s.style for s in text.spans if text.plain[s.start : s.end].startswith("34 dma")}
    assert style == "bold red"


ODD = {
    "resid_post.0": RowCounts(not_finite=0, zero=0),
    "resid_post.1": RowCounts(not_finite=13, zero=2, infinite=12),
    "resid_post.2": RowCounts(not_finite=1_200, zero=0),  # NaN, of which a cast makes none
    "resid_post.3": RowCounts(not_finite=1_200, zero=0),
}
CAST = "float32 to float16, nearest even"


def test_rows_that_are_not_finite_are_said_by_hook_while_they_come_and_at_the_end() -> None:
    commits = dataclasses.replace(WRITTEN.commits, values=ODD)
    now = snapshot(dataclasses.replace(WRITTEN, commits=commits))
    worst = "1,200 of 36,000 rows of resid_post.2, resid_post.3 are not finite (NaN or infinity)"
    few = "13 of 36,000 rows of resid_post.1 are not finite (NaN or infinity)"
    zero = "2 of 36,000 rows of resid_post.1 are zero in every channel"
    assert format_line(now) == "  ".join((format_line(NOW), worst, few, zero))
    lines = screen(now).splitlines()
    assert lines[-4:-1] == [f"values    {words}"[:WIDTH] for words in (worst, few, zero)]
    assert not any(line.startswith("values") for line in screen(NOW).splitlines())
    summary = format_summary(dataclasses.replace(TOTALS, values=ODD))
    assert re.findall("^values     (.*)$", summary, re.MULTILINE) == [
        words.replace("36,000", "900") for words in (worst, few, zero)
    ]
    assert "values" not in format_summary(TOTALS)


def test_a_cast_is_named_where_rows_became_infinite_and_nowhere_else() -> None:
    commits = dataclasses.replace(WRITTEN.commits, values={"resid_post.1": ODD["resid_post.1"]})
    now = snapshot(dataclasses.replace(WRITTEN, commits=commits, cast=CAST))
    words = f"(NaN or infinity); 12 overflowed in the cast {CAST}"
    assert format_line(now).count(CAST) == 1 and words in format_line(now)
    summary = format_summary(dataclasses.replace(TOTALS, values=ODD, cast=CAST))
    assert summary.count(words) == 1 == summary.count(CAST)
    clean = dataclasses.replace(WRITTEN, cast=CAST)
    assert CAST not in format_line(snapshot(clean)) + screen(snapshot(clean))
    assert CAST not in format_summary(dataclasses.replace(TOTALS, cast=CAST))


@pytest.mark.parametrize("factor", [0, 1, 10**3, 10**7])
def test_screen_fits_80_columns_whatever_the_numbers(factor: int) -> None:
    written = dataclasses.replace(
        WRITTEN,
        n_rows=39_000 * factor,
        ring_nbytes=10**8 * factor,
        memory_nbytes=10**8 * factor,
        backlog_nbytes=10**8 * factor,
        t_ns=-factor * SECOND,
    )
    counted = dataclasses.replace(
        COUNTED,
        scheduled_tokens=40_000 * factor,
        waiting=factor,
        running=factor,
        dropped={"queue_full": factor, "dma_backpressure": factor, "writer_timeout": factor},
    )
    now = snapshot(
        written,
        counted,
        elapsed_s=20.0 * factor,
        requests_done=factor,
        requests_total=10 * factor,
    )
    lines = screen(now, None, snapshot(elapsed_s=0.0, requests_done=0)).splitlines()
    assert max(len(line) for line in lines) <= WIDTH
    assert len(lines) >= 10
    assert len(screen(snapshot(None, None)).splitlines()) == 10


def test_what_nobody_knows_yet_is_not_zero() -> None:
    empty = snapshot(None, None)
    assert empty.cache_hit_share is None and empty.last_commit_age_s is None
    assert [stage.depth for stage in empty.stages] == [None, None, None]
    assert "queues -/-/-" in format_line(empty)
    assert "cache hits -" in screen(empty)


def test_eta_counts_from_the_first_step_and_is_none_where_nothing_tells() -> None:
    started = dataclasses.replace(NOW, elapsed_s=15.0, requests_done=64)
    assert eta_s(NOW, started) == 10.0
    assert eta_s(NOW, None) is None
    assert eta_s(NOW, NOW) is None
    assert eta_s(dataclasses.replace(NOW, requests_total=None), started) is None
    # One of 40 that run side by side has ended: the others do not take 39 times as long.
    first = dataclasses.replace(NOW, requests_done=65, running=39)
    assert eta_s(first, started) is None and " left" not in format_line(first, None, started)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.97, "1:00"), (119.6, "2:00"), (7405, "2:03:25")],
)
def test_seconds_are_written_as_people_read_them(seconds: float, words: str) -> None:
    assert format_seconds(seconds) == words


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (2_304, "2.30 kB"),
        (99_950_000, "100 MB"),
        (1.3e9, "1.30 GB"),
        (4.2e15, "4200 TB"),
    ],
)
def test_bytes_have_three_figures(nbytes: float, words: str) -> None:
    assert format_nbytes(nbytes) == words


class Taken:
    """A snapshot function that ends the harvest after some views."""

    def __init__(self, snapshots: list[Snapshot]) -> None:
        self._snapshots = iter(snapshots)
        self._last = snapshots[-1]
        self.ended = threading.Event()

    def __call__(self) -> Snapshot:
        try:
            self._last = next(self._snapshots)
        except StopIteration:
            self.ended.set()
        return self._last


def show(snapshots: list[Snapshot], **options: Any) -> str:
    stream, taken = io.StringIO(), Taken(snapshots)
    with show_progress(taken, stream, interval_s=0.001, **options):
        taken.ended.wait()
    return stream.getvalue()


def test_plain_stream_gets_a_line_each_time_and_one_for_the_whole_at_the_end() -> None:
    snapshots = [snapshot(elapsed_s=5.0), snapshot(elapsed_s=10.0), snapshot(elapsed_s=12.0)]
    lines = show(snapshots, terminal=False).splitlines()
    assert [line.split(" s ")[0] for line in lines[:3]] == ["5.0", "10.0", "12.0"]
    assert lines[-1] == format_line(snapshots[-1])


def test_drops_stand_in_the_last_line_even_of_a_short_harvest() -> None:
    stream = io.StringIO()
    dropped = dataclasses.replace(NOW, dropped={"queue_full": 1_234})
    with show_progress(lambda: dropped, stream, terminal=False, interval_s=60.0):
        pass
    assert stream.getvalue() == format_line(dropped) + "\n"
    assert stream.getvalue().endswith("1,234 dropped\n")


def test_terminal_shows_the_screen_and_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", show([NOW], terminal=True))
    assert "ring      ######....  60% 15 steps" in shown
    stream = io.StringIO()
    with Terminal("acts", quiet=True, stream=stream).harvesting(lambda: NOW):
        pass
    assert stream.getvalue() == ""


class Stuck(io.StringIO):
    """A terminal that takes no words until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.released = threading.Event(), threading.Event()

    def write(self, words: str) -> int:
        self.reached.set()
        self.released.wait()
        return super().write(words)


def test_a_terminal_that_takes_no_words_does_not_stop_the_harvest() -> None:
    stream = Stuck()
    with show_progress(lambda: NOW, stream, terminal=False, interval_s=0.001) as display:
        stream.reached.wait()
        assert display.is_alive()  # the display waits, and the harvest has come as far as here
        stream.released.set()
    assert not display.is_alive()
    assert stream.getvalue()


class Gone(io.StringIO):
    """A terminal that was closed."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.n_words = error, 0

    def write(self, words: str) -> int:
        self.n_words += 1
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O on closed file")])
def test_a_terminal_that_is_gone_does_not_end_the_harvest(error: Exception) -> None:
    stream = Gone(error)
    with show_progress(lambda: NOW, stream, terminal=False, interval_s=60.0):
        pass
    assert stream.n_words == 1


def test_summary_adds_up() -> None:
    lines = format_summary(TOTALS).splitlines()
    assert lines == [
        "dataset    demo/acts (sealed 0123456789abcdef)",
        "requests   256 = 250 length + 2 abort + 4 skipped",
        "scheduled  1,000 tokens = 900 captured + 40 recomputed + 30 dropped + 25 aborted "
        "+ 5 filtered",
        "positions  1,465 = 900 captured + 500 cache_ref + 30 dropped + 30 aborted + 5 filtered",
        "rows       900 x 2 hooks in 3 shards",
        "size       0.002 GB of rows, 0.001 GB stored (2.000x)",
        "time       40.0 s, 25 tokens/s, 0.1 MB/s of rows",
        "skipped    4 prompts of 5,000 tokens",
        "next       actds validate demo/acts",
        "           actds info demo/acts",
    ]
    for line in lines[1:4]:
        left, right = line.split(" = ")
        numbers = [int(word.replace(",", "")) for word in re.findall(r"[0-9][0-9,]*", right)]
        assert int(left.split()[1].replace(",", "")) == sum(numbers)


@pytest.mark.parametrize("field", ["scheduled", "recomputed", "captured", "dropped", "aborted"])
def test_summary_that_does_not_add_up_is_refused(field: str) -> None:
    wrong = dataclasses.replace(TOTALS, **{field: getattr(TOTALS, field) + 1})
    with pytest.raises(ActdsError) as caught:
        format_summary(wrong)
    assert caught.value.code == "E409"


def test_summary_says_what_is_unresolved_and_what_is_not_sealed() -> None:
    text = format_summary(dataclasses.replace(TOTALS, unresolved=7, seal=None, path="my acts"))
    assert "unresolved 7 prefix-cache hits have no stored row (E410)" in text
    assert "my acts (not sealed)" in text
    assert text.endswith("next       actds seal 'my acts'")


def test_a_harvest_ends_when_all_samples_of_its_prompts_are_written() -> None:
    """A prompt is as many requests of the scheduler as it has samples, which end in other steps."""
    state = [(4, 7, 7), (5, 8, 8), (6, 9, 8), (6, 9, 9)]  # ended; last steps of census and writer

    class Polled(Pipeline):
        def __init__(self) -> None:
            self.polls = iter(state)

        def poll(self) -> None:
            n_finished, counted, written = next(self.polls)
            self.counted = dataclasses.replace(COUNTED, n_finished=n_finished, last_step=counted)
            self.written = dataclasses.replace(WRITTEN, last_step=written)

    run = object.__new__(Run)
    run._pipeline, run.feed = Polled(), mock.Mock(n_finished=2)
    run._plan = mock.Mock(engine=VllmOptions(sampling_params={"n": 3}))
    run._drain()
    assert run._pipeline.written is not None and run._pipeline.written.last_step == 9
