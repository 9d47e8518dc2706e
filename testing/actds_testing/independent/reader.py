"""A reader over the same modules: opens a sealed dataset, and gives rows and tables."""

from __future__ import annotations

from pathlib import Path

from actds_testing.independent.arrays import Bits, read_array
from actds_testing.independent.findings import Findings
from actds_testing.independent.layout import Folder, Json
from actds_testing.independent.ledger import Ledger
from actds_testing.independent.manifests import Shard
from actds_testing.independent.tables import read_run_tables, read_tokens
from actds_testing.independent.validator import Validator


class IndependentReader:
    """A dataset that section 10.1 lets a reader open; ``shards`` are in the order committed.

    Raises:
        Breach: the first thing that a reader refuses.
    """

    def __init__(self, root: Path) -> None:
        found = Findings()
        self.root, self.folder = root, Folder(root)
        self.ledger = Ledger(self.folder, found)
        for run in self.ledger.runs.values():
            if run.shards and run.record is None:
                found.add("E401", "runs", "rows without a run record")
        for shard in self.ledger.shards:
            with found.catching():
                for entry in shard.manifest["files"]:
                    self.folder.reach(shard.path(entry["path"]), entry["nbytes"])
        found.throw()
        self.seal, self.digest = self.ledger.seal, self.ledger.digest
        self.runs, self.shards = self.ledger.runs, self.ledger.shards
        self.hooks: dict[str, Json] = {hook["name"]: hook for hook in self.ledger.genesis["hooks"]}

    def tokens(self, shard: Shard) -> list[Json]:
        """Return the lines of a shard's token table, in the order of the rows."""
        return read_tokens(self.folder, shard)

    def array(self, shard: Shard, hook: str) -> Bits:
        """Return the bits ``(n_rows, d_model)`` of a hook of a shard."""
        bits = read_array(self.folder, shard, self.hooks[hook])
        assert bits is not None
        return bits

    def tables(self, run: str) -> dict[str, list[Json]]:
        """Return the tables of a run."""
        found = Findings()
        tables = read_run_tables(self.folder, self.runs[run], found)
        found.throw()
        return tables

    def account(self) -> dict[str, int]:
        """Return the totals of all runs, once everything agrees with everything (section 7)."""
        found = Findings()
        looked = Validator(self.root, found, deep=False)
        looked.run()
        found.throw()
        return dict(looked.true_seal_totals())
