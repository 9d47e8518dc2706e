"""The drop log: what an overflow policy cost, event by event.

Beside stage 3, inside the writer process: the writer-side witness of every loss.
"""

from __future__ import annotations

import pyarrow.compute as pc

from actds.ledger import Chain
from actds.store import Store
from actds_writers.ipc.messages import StepDropped
from actds_writers.shards.assembly import Interval
from actds_writers.shards.table_log import TableLog


class DropLog:
    """Collects the drops of a run.

    Spec: 0.1 section 6.3.
    """

    def __init__(self) -> None:
        self._log = TableLog("drops")
        self._n_events = 0
        self._last_step = -1
        self.n_tokens = 0

    def add(
        self, dropped: StepDropped, intervals: list[Interval], state: dict[str, int | float | None]
    ) -> None:
        """Log one dropped step.

        Args:
            dropped: the event.
            intervals: positions that would have been stored.
            state: depths and latencies of the queues when it was logged.
        """
        n_tokens = sum(interval.stop - interval.start for interval in intervals)
        event = {
            "drop": self._n_events,
            "t_ns": dropped.t_ns,
            "step": dropped.rows.step,
            "drop_reason": dropped.reason,
            "policy": dropped.policy,
            "n_tokens": n_tokens,
            "batch_tokens": len(dropped.rows.positions),
            "max_seq_len": int(dropped.rows.positions.max()) + 1,
            **state,
        }
        self._log.add({**event, **interval._asdict()} for interval in intervals)
        self._n_events += bool(intervals)
        self._last_step = dropped.rows.step
        self.n_tokens += n_tokens

    def keep_through(self, step: int) -> None:
        """Forget the drops of later steps: without readouts they count as aborted."""
        if self._last_step > step:
            kept = self._log.keep_through(step)
            lengths = pc.subtract(kept["stop"], kept["start"])
            self.n_tokens = int(pc.sum(lengths).as_py() or 0)

    def commit(self, store: Store, chain: Chain, run: str) -> None:
        """Commit the log in parts; nothing when there was no drop."""
        self._log.commit(store, chain, run)
