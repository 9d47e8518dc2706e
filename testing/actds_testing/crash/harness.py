"""Sudden ends of a harvest on the synthetic engine, and what must be true after each.

Run from ``soak.py``: a process that has imported everything and started no thread forks the
producer, which forks writer and census. They are the real processes; only exec is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import actds
from actds.dataset.ledger import Chain
from actds.errors import ActdsError
from actds.format.schema import ShardBody
from actds_testing import synthetic_engine
from actds_testing.synthetic_engine import D_MODEL, HOOKS, SyntheticEngine, pipeline_for
from actds_validators.validate.validation import validate
from actds_writers import writer_process
from actds_writers.census import process as census_process
from actds_writers.harvest.processes import Pipeline
from actds_writers.harvest.recover import recover
from actds_writers.ipc import link
from actds_writers.ipc.link import Link

MAX_REQUESTS = 300
"""Above 325 the label of a row would be a NaN in bfloat16."""
END_TIMEOUT_S = 150.0
FIRST_CONTACT_S = 5.0
POLICIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("block", "drop_oldest", "drop_newest", "thin")},
    "thin, whole requests": {"thin_unit": "request"},
    "drop_newest, some always": {"always": 1 / 32},
}
"""Settings of a pipeline by policy, whose name comes first."""
VICTIMS = (
    ("writer",),
    ("writer",),
    ("census",),
    ("producer",),
    ("producer",),
    ("writer", "census"),
    ("producer", "writer", "census"),
)


@dataclass(frozen=True)
class Acknowledged:
    """A shard whose rows were acknowledged before the end."""

    shard: str
    n_rows: int
    manifest_sha256: str


Look = Callable[[actds.Dataset, list[Acknowledged], dict[str, Any]], None]


@dataclass
class Figures:
    """What was seen, over all sudden ends of one kind."""

    ends: int = 0
    acknowledged: int = 0
    lost: int = 0
    phantom: int = 0
    recovered: int = 0
    before_the_first_record: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, noted: list[Acknowledged], found: dict[str, Any]) -> None:
        """Count one examined dataset."""
        self.ends += 1
        self.acknowledged += sum(one.n_rows for one in noted)
        self.lost += found["lost"]
        self.phantom += found["phantom"]
        self.recovered += found["recovered"]
        self.before_the_first_record += found["empty"]
        self.faults += found["faults"]


class Child:
    """A forked process with the methods of ``subprocess.Popen`` that a pipeline needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, ``None`` while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""
        deadline = time.monotonic() + (timeout or END_TIMEOUT_S)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked", timeout or END_TIMEOUT_S)
            time.sleep(0.002)
        return self._status or 0

    def kill(self) -> None:
        """Kill it."""
        os.kill(self.pid, signal.SIGKILL)


def fork(body: Callable[[], int]) -> int:
    """Run a function in a child that never returns; return its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        status = body()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class ForkedPipeline(Pipeline):
    """A pipeline whose processes are forked instead of started anew.

    ``voice`` is where pids and acknowledgements are told; ``synced`` whether fsync works.
    """

    voice = -1
    synced = True

    def _start(self, module: str, settings: Any, lock: int) -> Any:
        name = "writer" if module == "writer_process" else "census"
        say(self.voice, {"folder": self.link.folder})

        def body() -> int:
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            silence()
            link.FIRST_CONTACT_S = FIRST_CONTACT_S
            if not self.synced:
                os.fsync = lambda descriptor: None
            if name == "writer":
                tell_acknowledgements(self.voice)
                return writer_process.WriterProcess(self.link, settings).run()
            return census_process.CensusProcess(self.link, settings).run()

        child = Child(fork(body))
        say(self.voice, {"pid": child.pid, "role": name})
        return child


def silence() -> None:
    """Send what a dying process says to nowhere; the figures say what matters."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)


def say(voice: int, facts: dict[str, Any]) -> None:
    """Tell the watcher; one write, so that lines never mix."""
    os.write(voice, json.dumps(facts).encode() + b"\n")


def tell_acknowledgements(voice: int) -> None:
    """Make the ledger's append tell of every shard once it has returned: that is the promise."""
    append = Chain.append

    def told(self: Chain, record_type: Any, body: Any) -> Any:
        record = append(self, record_type, body)
        if isinstance(body, ShardBody):
            say(voice, {"ack": [body.shard, body.n_rows, body.manifest_sha256]})
        return record

    Chain.append = told


def produce(out: Path, voice: int, policy: str, n_requests: int, *, synced: bool) -> int:
    """Harvest; end as a command does whose engine or pipeline fails."""
    silence()
    # A peer may have died before it listened.
    Link.connect.__defaults__ = (FIRST_CONTACT_S, *Link.connect.__defaults__[1:])
    ForkedPipeline.voice, ForkedPipeline.synced = voice, synced
    synthetic_engine.Pipeline = ForkedPipeline
    pipeline = pipeline_for(out, policy.split(",")[0], **POLICIES[policy])
    reason: Any = "finished"
    with contextlib.suppress(ActdsError, OSError), pipeline:
        engine = SyntheticEngine(pipeline)
        try:
            for number in range(n_requests):
                engine.request(number)
                pipeline.poll()
            engine.drain(pipeline)
        except (ActdsError, OSError):
            reason = "failed"
        with contextlib.suppress(ActdsError, OSError):
            engine.close()
        pipeline.finish(reason)
    return 0


class Harvest:
    """A harvest in processes of its own, watched from outside."""

    def __init__(self, out: Path, policy: str, n_requests: int, *, synced: bool = True) -> None:
        self.out = out
        self._voice, voice = os.pipe()
        os.set_blocking(self._voice, False)
        self._heard = b""
        self.pids: dict[str, int] = {}
        self.acknowledged: list[Acknowledged] = []
        self._folders: set[str] = set()

        def body() -> int:
            os.close(self._voice)
            os.setsid()
            return produce(out, voice, policy, n_requests, synced=synced)

        self.pids["producer"] = fork(body)
        os.close(voice)

    def hear(self) -> list[Acknowledged]:
        """Take what was told; return every shard acknowledged up to now."""
        with contextlib.suppress(BlockingIOError):
            while said := os.read(self._voice, 1 << 16):
                self._heard += said
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            facts = json.loads(line)
            if "ack" in facts:
                self.acknowledged.append(Acknowledged(*facts["ack"]))
            elif "folder" in facts:
                self._folders.add(facts["folder"])
            else:
                self.pids[facts["role"]] = facts["pid"]
        return list(self.acknowledged)

    def kill(self, roles: tuple[str, ...]) -> None:
        """Kill processes that are still there."""
        self.hear()
        for role in roles:
            if role in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[role], signal.SIGKILL)

    def join(self) -> None:
        """Wait until every process has ended; kill what does not."""
        deadline = time.monotonic() + END_TIMEOUT_S
        self.hear()
        for pid in list(self.pids.values()):
            while not ended(pid):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.out}: {self.pids} does not end")
                time.sleep(0.002)
        os.close(self._voice)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def visible(out: Path) -> list[Acknowledged]:
    """Return every shard whose ledger record can be seen: after a kill it must be there."""
    found = []
    for path in sorted(out.glob("ledger/w-*/[0-9]*.json")):
        record = json.loads(path.read_bytes())
        if record["type"] == "shard":
            body = record["body"]
            found.append(Acknowledged(body["shard"], body["n_rows"], body["manifest_sha256"]))
    return found


def ended(pid: int) -> bool:
    """Return whether a process is gone; orphans are ours to reap."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return not Path(f"/proc/{pid}").exists()


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent is killed (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def kill_round(work: Path, number: int, rng: random.Random, figures: Figures) -> None:
    """One harvest, killed somewhere at random, then recovered and examined."""
    out = work / f"kill-{number}"
    n_requests = rng.choice((20, 60, MAX_REQUESTS))
    harvest = Harvest(out, rng.choice(tuple(POLICIES)), n_requests)
    wait_until(harvest, rng.choice((0, 0, 1, 2, 3, 5, 8)), rng.random() * 0.05)
    victims = rng.choice(VICTIMS)
    told = harvest.hear()
    noted = {one.shard: one for one in (*told, *visible(out))}
    harvest.kill(victims)
    try:
        harvest.join()
    except TimeoutError as error:
        figures.faults.append(str(error))
        harvest.kill(tuple(harvest.pids))
        return
    found = examined(out, list(noted.values()))
    found["faults"] = [f"round {number} {victims}: {fault}" for fault in found["faults"]]
    figures.add(list(noted.values()), found)
    if found["faults"] or found["lost"] or found["phantom"]:
        print(f"kept {out}", found, file=sys.stderr)
    else:
        shutil.rmtree(out, ignore_errors=True)


def wait_until(harvest: Harvest, n_shards: int, delay_s: float) -> None:
    """Wait for acknowledged shards and a moment more, or for the end of the harvest."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while len(harvest.hear()) < n_shards and time.monotonic() < deadline:
        if not Path(f"/proc/{harvest.pids['producer']}/exe").exists():
            break
        time.sleep(0.001)
    if n_shards == 0:
        while "writer" not in harvest.pids and time.monotonic() < deadline:
            harvest.hear()
            time.sleep(0.001)
    time.sleep(delay_s * (1 if n_shards else 6))


def examined(out: Path, noted: list[Acknowledged], look: Look | None = None) -> dict[str, Any]:
    """Recover and examine a dataset in a process of its own; return what was found."""
    reader, writer = os.pipe()

    def body() -> int:
        say(writer, examine(out, noted, look))
        return 0

    pid = fork(body)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return json.loads(said) if said else {**NOTHING, "faults": ["the examination died"]}


def warm_up(work: Path) -> None:
    """Import what a harvest and its examination import late, so that every fork has it."""
    reader, writer = os.pipe()
    before = set(sys.modules)

    def body() -> int:
        out = work / "warm-up"
        harvest = Harvest(out, "block", 20)
        harvest.join()
        examine(out, [])
        names = sorted(set(sys.modules) - before)
        os.write(writer, json.dumps(names).encode())
        return 0

    pid = fork(body)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        names = json.loads(answer.read())
    os.waitpid(pid, 0)
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    shutil.rmtree(work / "warm-up")


NOTHING: dict[str, Any] = {"lost": 0, "phantom": 0, "recovered": 0, "empty": 0, "faults": []}


def examine(out: Path, noted: list[Acknowledged], look: Look | None = None) -> dict[str, Any]:
    """Recover a dataset, validate it deeply and look at every row of it."""
    found: dict[str, Any] = {**NOTHING, "faults": []}
    try:
        recovery = recover(out)
    except (ActdsError, FileNotFoundError) as error:
        return begun_too_late(found, noted, error)
    if recovery.error is not None:
        return begun_too_late(found, noted, recovery.error)
    found["recovered"] = sum(run.outcome == "recovered" for run in recovery.runs)
    report = validate(out, level="deep")
    odd = [
        f.line() for f in report.findings if f.severity == "error" or f.code not in ("E105", "E421")
    ]
    found["faults"] += odd[:3]
    if not odd:
        (look or look_at_labels)(actds.open(out), noted, found)
    return found


def begun_too_late(
    found: dict[str, Any], noted: list[Acknowledged], error: Exception
) -> dict[str, Any]:
    """Judge a dataset that is not one yet: fine as long as nothing was promised."""
    code = getattr(error, "code", "E101")
    if noted:
        found["lost"] = sum(one.n_rows for one in noted)
    elif code in ("E101", "E305"):  # no genesis, or no chain after it
        found["empty"] = 1
    else:
        found["faults"].append(str(error))
    return found


def look_at_labels(
    dataset: actds.Dataset, noted: list[Acknowledged], found: dict[str, Any]
) -> None:
    """Count acknowledged rows that are not there, and rows that nobody served."""
    seen: set[tuple[int, int]] = set()
    there: dict[str, int] = {}
    for shard in dataset.shards:
        tokens = shard.tokens(["request", "position"])
        request, position = tokens["request"].to_numpy(), tokens["position"].to_numpy()
        good = np.ones(len(request), bool)
        for index, hook in enumerate(HOOKS):
            rows = shard.array(hook.name).read_all()
            label = (request * 100 + position + 1 + index).astype(np.uint16)
            good &= (rows == np.broadcast_to(label[:, None], (len(label), D_MODEL))).all(axis=1)
        keys = set(zip(request.tolist(), position.tolist(), strict=True))
        found["phantom"] += int((~good).sum()) + len(seen & keys) + len(request) - len(keys)
        seen |= keys
        there[shard.name] = int(good.sum())
    for one in noted:
        found["lost"] += one.n_rows - min(there.get(one.shard, 0), one.n_rows)
