from __future__ import annotations

import dataclasses
import io
import re

import pytest

from actds.errors import ActdsError
from actds_writers.progress import Progress, Snapshot, format_line, format_seconds
from actds_writers.summary import Totals, format_summary

NOW = Snapshot(
    elapsed_s=20.0,
    requests_done=128,
    requests_total=256,
    scheduled_tokens=40_000,
    cached_tokens=12_345,
    rows=39_000,
    row_nbytes=80_000_000,
    dropped_tokens=0,
    queue_depths=(0, 3, None),
)
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
    seal="0123456789abcdef" * 4,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def show(snapshots: list[Snapshot], *, terminal: bool) -> str:
    stream, clock = io.StringIO(), Clock()
    with Progress(stream, terminal=terminal, clock=clock) as progress:
        for snapshot in snapshots:
            clock.now = 100.0 + snapshot.elapsed_s
            progress.update(snapshot)
    return stream.getvalue()


def test_line_says_every_counter_and_rates_since_the_start() -> None:
    assert format_line(NOW) == (
        "20.0 s  128/256 requests  2,000 tokens/s  4.0 MB/s  39,000 rows  0.080 GB  "
        "12,345 cached  queues 0/3/-  0 dropped"
    )


def test_rates_are_those_since_the_earlier_snapshot() -> None:
    before = dataclasses.replace(NOW, elapsed_s=10.0, scheduled_tokens=35_000, row_nbytes=0)
    assert "  500 tokens/s  8.0 MB/s  " in format_line(NOW, before)
    assert "  - tokens/s  - MB/s  " in format_line(NOW, NOW)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.97, "1:00"), (119.6, "2:00"), (7405, "2:03:25")],
)
def test_seconds_are_written_as_people_read_them(seconds: float, words: str) -> None:
    assert format_seconds(seconds) == words


def test_plain_stream_gets_a_line_every_five_seconds_and_one_at_the_end() -> None:
    snapshots = [dataclasses.replace(NOW, elapsed_s=tenth / 10) for tenth in range(0, 121)]
    lines = show(snapshots, terminal=False).splitlines()
    assert [line.split(" s ")[0] for line in lines] == ["5.0", "10.0", "12.0"]


def test_drops_stand_in_the_last_line_even_of_a_short_harvest() -> None:
    dropped = dataclasses.replace(NOW, elapsed_s=0.5, dropped_tokens=1_234)
    assert show([dropped], terminal=False).endswith("1,234 dropped\n")
    assert show([], terminal=False) == ""


def test_terminal_shows_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = show([dataclasses.replace(NOW, elapsed_s=1.0), NOW], terminal=True)
    assert "20.0 s  128/256 requests" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)


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
    assert "unresolved 7 of the cache_ref positions have no row here (E410)" in text
    assert "my acts (not sealed)" in text
    assert text.endswith("next       actds seal 'my acts'")
