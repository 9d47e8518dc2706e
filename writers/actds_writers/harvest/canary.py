"""Canary: a replay, alone, of a share of the requests of a harvest, and the comparison of its rows.

The sequences are those that the client sent and received, not those of the harvest's tables: so
these are compared with what they do not know.
"""

from __future__ import annotations

import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.commit import commit_part, in_parts
from actds.dataset.ledger import Chain
from actds.dataset.reading import Catalog
from actds.errors import ActdsError
from actds.explore.requests import TokenSequence
from actds.store import local_folder, open_store
from actds.text import counted
from actds_writers.config import WriteSettings
from actds_writers.engine_protocol import Finished, find_engine
from actds_writers.harvest.compare import Compared, compare, pairs_of
from actds_writers.harvest.prepare import Plan, as_requests, request_key

SPARE = 16
"""Extra requests whose tokens are kept, in case some are aborted."""
POLL_S = 0.2


@dataclass(frozen=True)
class Share:
    """How many requests are replayed."""

    percent: Decimal | None
    count: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """Return what ``--canary`` says: ``0.1%`` or ``5``."""
        try:
            value = Decimal(text.strip().removesuffix("%"))
            percent = text.strip().endswith("%")
            if 0 < value <= (100 if percent else 1_000_000) and (percent or value % 1 == 0):
                return cls(value, 0) if percent else cls(None, int(value))
        except InvalidOperation:
            pass
        raise ActdsError(
            "E009", "canary", got=repr(text)[:80], expected="a share such as 0.1% or a number"
        )

    def of(self, n_requests: int) -> int:
        if self.percent is None:
            return min(self.count, n_requests)
        return min(max(1, math.ceil(self.percent * n_requests / 100)), n_requests)


@dataclass(frozen=True)
class Outcome(Compared):
    """The result of a canary."""

    n_requests: int
    n_same_token: int | None

    def line(self) -> str:
        words = f"{counted(self.n_requests, 'request')} replayed alone, {self.n_rows:,} rows: "
        words += self.words()
        if self.n_same_token is not None:
            words += f"; same last token in {self.n_same_token:,}"
        return words


class Canary:
    """The canaries of one run; ``canary`` is set in its settings."""

    def __init__(self, settings: WriteSettings, plan: Plan) -> None:
        self._settings, self._plan = settings, plan
        servable = [encoded for encoded in plan.encoded if encoded.skip is None]
        self._wanted = Share.parse(settings.canary or "").of(len(servable))
        order = np.random.Generator(np.random.Philox(key=settings.seed)).permutation(len(servable))
        chosen = [servable[i] for i in order[: 2 * self._wanted + SPARE]]
        self._candidates = {request_key(encoded.prompt.index): encoded for encoded in chosen}
        self._sampled: dict[str, tuple[int, ...]] = {}

    def finished(self, finished: Finished) -> None:
        if finished.key in self._candidates and finished.token_ids:
            self._sampled[finished.key] = finished.token_ids

    def replay(
        self,
        run: str,
        software: str,
        interrupted: Callable[[], int],
        say: Callable[[str], None],
    ) -> Outcome | None:
        """Replay, compare and commit the table; return the result, ``None`` when interrupted.

        Args:
            interrupted: returns the number of interruptions so far.
        """
        catalog = Catalog.read(open_store(self._settings.out))
        sequences, last = self._sequences(catalog, run)
        if not sequences:
            raise _nothing(run, "no finished request with a stored row")
        say(f"Replaying {len(sequences)} requests alone ...")
        lines: list[pa.Table] = []
        beside = local_folder(self._settings.out)
        parent = beside.absolute().parent if beside else None
        folder = Path(tempfile.mkdtemp(prefix=".actds-canary-", dir=parent))
        try:
            sampled = self._serve(folder / "acts", catalog, sequences, interrupted)
            if sampled is None:
                return None
            alone = Catalog.read(open_store(folder / "acts"))
            compared = compare(
                catalog,
                alone,
                pairs_of(alone, sequences),
                keep=lines.append,
                rows_at_a_time=sys.maxsize,  # a row may be that of any other request
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if compared.n_unreplayed:
            got = f"{compared.n_unreplayed} positions without a row"
            raise ActdsError("E504", "canary replay", got=got, expected="every row")
        if not compared.n_rows:
            raise _nothing(run, "no stored row of the requests that were replayed")
        n_same = sum(sampled.get(key) == token for key, token in last.items())
        outcome = Outcome(
            **vars(compared),
            n_requests=len(sequences),
            n_same_token=n_same if self._settings.temperature == 0 else None,
        )
        _commit(catalog, run, software, pa.concat_tables(lines), outcome)
        return outcome

    def _sequences(self, catalog: Catalog, run: str) -> tuple[list[TokenSequence], dict[str, int]]:
        """Return what is replayed: what each request fed, as the client knows it.

        Also the last token of each, which it sampled and did not feed, by the key of its replay.
        """
        rows = [encoded.prompt.row for encoded in self._candidates.values()]
        requests, stored = _served(catalog, run, rows)
        sequences: list[TokenSequence] = []
        last: dict[str, int] = {}
        for name, encoded in self._candidates.items():
            line = requests.get(encoded.prompt.row)
            if name in self._sampled and line is not None and line["request"] in stored:
                tokens = [*encoded.token_ids, *self._sampled[name]]
                fed = tokens[:-1]
                last[request_key(len(sequences))] = tokens[-1]
                roles: list[str | None] = [None] * len(fed)
                ids, n_given = np.array(fed, np.int64), len(encoded.token_ids)
                sequence = TokenSequence(run, line["request"], line, ids, roles, n_given, None)
                sequences.append(sequence)
            if len(sequences) == self._wanted:
                break
        return sequences, last

    def _serve(
        self,
        out: Path,
        catalog: Catalog,
        sequences: list[TokenSequence],
        interrupted: Callable[[], int],
    ) -> dict[str, int] | None:
        encoded, client = as_requests(sequences, catalog)
        engine = find_engine(self._settings.engine).alone(self._plan.engine)
        plan = replace(self._plan, engine=engine, encoded=tuple(encoded), client=tuple(client))
        return _run(_alone(self._settings, out), plan, interrupted)


def _served(
    catalog: Catalog, run: str, source_rows: list[int]
) -> tuple[dict[int, dict[str, Any]], set[int]]:
    """Return the requests of source rows by these, and the numbers of those that have a row.

    Aborted ones are left out. A row that a prefix-cache hit names will do.
    """
    requests = catalog.table("requests", run)
    ended = pc.is_in(requests["finish_reason"], pa.array(["stop", "length"]))
    chosen = pc.is_in(requests["source_row"], pa.array(source_rows, pa.int64()))
    requests = requests.filter(pc.and_(ended, chosen))
    spans = catalog.table("spans", run)
    stored = pc.or_(pc.equal(spans["disposition"], "captured"), pc.is_valid(spans["ref_request"]))
    spans = spans.filter(pc.and_(stored, pc.is_in(spans["request"], requests["request"])))
    lines = {line["source_row"]: line for line in requests.to_pylist()}
    return lines, set(spans["request"].to_pylist())


def _nothing(run: str, got: str) -> ActdsError:
    return ActdsError(
        "E006",
        f"canary/{run}",
        got=got,
        expected="at least one to compare",
        next_step="Nothing was compared; harvest more requests.",
    )


def _alone(settings: WriteSettings, out: Path) -> WriteSettings:
    return settings.model_copy(
        update={
            "out": str(out),
            "resume": False,
            "canary": None,
            "entropy": False,
            "temperature": 0.0,
            "order": "sequence",
            "overflow": "block",
            "metrics_port": None,
        }
    )


def _run(
    settings: WriteSettings, plan: Plan, interrupted: Callable[[], int]
) -> dict[str, int] | None:
    process = subprocess.Popen(
        [sys.executable, "-m", "actds_writers.harvest.run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C reaches the command, which forwards it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    n_forwarded = interrupted()
    try:
        pickle.dump((settings, plan), process.stdin)
        process.stdin.close()
        while True:
            try:
                code = process.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                if interrupted() > n_forwarded:
                    n_forwarded = interrupted()
                    process.send_signal(signal.SIGINT)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    answer = process.stdout.read()
    if code == 1 and answer:
        raise pickle.loads(answer)
    if code == 0:
        sampled: dict[str, int] = pickle.loads(answer)
        return sampled
    if code != 2:
        raise ActdsError(
            "E504", "canary replay", got=f"it ended with code {code}", expected="a replay"
        )
    return None


def _commit(catalog: Catalog, run: str, software: str, table: pa.Table, outcome: Outcome) -> None:
    table = table.sort_by([(name, "ascending") for name in ("request", "position", "hook")])
    chain = Chain.begin(catalog.store, catalog.genesis.dataset, run, "tool", software)
    for n, piece in in_parts(table):
        commit_part(catalog.store, chain, "canary", run, n, piece)
    totals = {"requests": outcome.n_requests, "foreign": outcome.n_foreign}
    chain.close("finished", totals)
