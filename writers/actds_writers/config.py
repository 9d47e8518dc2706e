"""Settings of a run that the command decides and its processes obey.

Stands at the start of the token's way; imports the messages only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actds.format.readouts import NONE
from actds_writers.ipc.messages import Fact
from actds_writers.shards.assembly import SpecialTokens


@dataclass(frozen=True)
class WriterSettings:
    """What the writer process needs to know.

    Args:
        root: folder of the dataset.
        dataset: id for a new dataset.
        run: id of the run.
        resume: whether the dataset is there already.
        started_ns: wall clock of the start.
        software: program and version.
        facts: provenance that only the command knows.
        tokens: ids that set row flags.
        rows_per_shard: rows after which a shard is committed, at a step's end.
        order: row order inside a shard.
        seed: seed of the row order.
        n_threads: threads that encode.
        shared: whether other engines may write the dataset too; whoever is first begins it.
        raw_threshold_nbytes: bytes that wait, from which shards are written raw; 0 never.
        readouts: value of ``capture.readouts``.
    """

    root: str
    dataset: str
    run: str
    resume: bool
    started_ns: int
    software: str
    facts: tuple[Fact, ...]
    tokens: SpecialTokens
    rows_per_shard: int
    order: Literal["permuted", "sequence"]
    seed: int
    n_threads: int
    shared: bool = False
    raw_threshold_nbytes: int = 0
    readouts: str = NONE


@dataclass(frozen=True)
class CensusSettings:
    """What the census process needs to know; fields as in ``WriterSettings``.

    Args:
        reserve_nbytes: disk space held back, so that a full disk can still be accounted for.
    """

    root: str
    run: str
    software: str
    reserve_nbytes: int = 4 << 20
