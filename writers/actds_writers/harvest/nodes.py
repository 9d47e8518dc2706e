"""What several nodes that write one dataset ask of its store, of its seal and of a trainer.

Beside the plan of one node: each has the load and the stages of it, and the store is of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from actds.errors import ActdsError
from actds_writers.sizing import GB

if TYPE_CHECKING:
    from actds_writers.config import PlanSettings
    from actds_writers.sizing import Capacity

ASSUMED_GBPS, ASSUMED_PUTS = 5.0, 3500.0
"""Of a bucket: bytes per second, and writing requests per second and prefix that S3 promises."""
PUTS_OF_HOOK, PUTS_OF_SHARD, PUTS_OF_READOUTS = 2, 6, 2
"""Array and metadata; group, tokens, manifest, ledger record and two of the census journal; part
and record (``benchmarks/bench_puts.py``)."""
SEAL_CPU_S, SEAL_GETS = 0.0027, 3
"""Of each shard (``benchmarks/bench_seal_nodes.py``)."""
DAY_S = 86_400


@dataclass(frozen=True)
class Nodes:
    """Nodes with the load of a plan each, of one dataset.

    Args:
        n: nodes.
        tokens_per_s: of one node.
        nbytes: stored for each token.
        puts: writing requests for each token.
        shards: for each token.
        gbps: rate of the store; ``puts_per_s`` the writing requests that it takes.
        assumed: which of the two nobody gave.
        train_rows: rows per second that a trainer reads meanwhile, 0 without one.
    """

    n: int
    tokens_per_s: float
    nbytes: float
    puts: float
    shards: float
    gbps: float
    puts_per_s: float
    assumed: tuple[str, ...]
    train_rows: float

    @classmethod
    def of(cls, n: int, settings: PlanSettings, needs: Capacity) -> Nodes:
        geometry, shard = needs.geometry, needs.sizes.rows_per_shard
        puts = PUTS_OF_HOOK * geometry.n_hooks + PUTS_OF_SHARD
        puts += PUTS_OF_READOUTS if geometry.n_readouts else 0
        return cls(
            n,
            needs.load.mean,
            needs.stored_nbytes,
            puts / shard,
            1 / shard,
            settings.store_gbps or ASSUMED_GBPS,
            settings.store_puts or ASSUMED_PUTS,
            tuple(n for n in ("store_gbps", "store_puts") if getattr(settings, n) is None),
            settings.train_rows or 0.0,
        )

    @property
    def written_gbps(self) -> float:
        return self.n * self.tokens_per_s * self.nbytes / GB

    @property
    def read_gbps(self) -> float:
        return self.train_rows * self.nbytes / GB

    @property
    def most(self) -> tuple[int, str]:
        """Return how many nodes the store carries beside the trainer, and what its limit is."""
        by_bytes = (self.gbps - self.read_gbps) * GB / (self.tokens_per_s * self.nbytes)
        by_puts = self.puts_per_s / (self.tokens_per_s * self.puts)
        limit = (by_bytes, "bytes") if by_bytes <= by_puts else (by_puts, "PUTs")
        return max(int(limit[0]), 0), limit[1]

    @property
    def fits(self) -> bool:
        return self.n <= self.most[0]

    def lines(self) -> list[tuple[str, str]]:
        tokens = self.n * self.tokens_per_s
        most, limit = self.most
        shards = tokens * self.shards * DAY_S
        lines = [
            ("nodes", f"{self.n}, each with the load and the stages above: {tokens:,.0f} tokens/s"),
            (
                "store",
                f"{self.written_gbps:.3g} GB/s written of {self.gbps:g} "
                f"({self._origin('store_gbps')}), {tokens * self.puts:,.0f} PUTs/s of "
                f"{self.puts_per_s:,.0f} ({self._origin('store_puts')})",
            ),
        ]
        if self.train_rows:
            words = f"{self.train_rows:,.0f} rows/s: {self.read_gbps:.3g} GB/s read, as many as "
            words += f"{self.train_rows / self.tokens_per_s:.3g} nodes write"
            lines.append(("trainer", words))
        lines.append(("limit", f"the store's {limit} carry {most} nodes"))
        seal = f"{shards:,.0f} shards a day: {shards * SEAL_CPU_S / 60:,.1f} min of CPU in one "
        lines.append(("seal", seal + f"process, {shards * SEAL_GETS:,.0f} GETs"))
        return lines

    def _origin(self, name: str) -> str:
        return "assumed" if name in self.assumed else "given"


def nodes_of(settings: PlanSettings, needs: Capacity) -> Nodes | None:
    """Return what nodes ask of their store together, None where nobody asks.

    Raises:
        ActdsError: E009 a store or a trainer of nobody.
    """
    if settings.nodes is not None:
        return Nodes.of(settings.nodes, settings, needs)
    for name in ("store_gbps", "store_puts", "train_rows"):
        if getattr(settings, name) is not None:
            raise ActdsError("E009", name, got="no nodes", expected="nodes beside it")
    return None
