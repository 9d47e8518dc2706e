"""What the golden test compares: harvests, audits and the spec as plain JSON values.

Every import of this project's own modules stands at the top of this file, so that a move of modules
changes these lines and no recorded value. The commands run as ``python -m actds`` does.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.metadata
import io
import json
import math
import re
import runpy
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

# The project's own modules: the public names, then those that move with the tree.
import actds
from actds.format.readouts import Readouts
from actds_testing.places import ROOT
from actds_testing.simulate import SCENARIOS, simulate, write_dataset
from actds_testing.synthetic import make_dataset
from actds_testing.synthetic_engine import SyntheticEngine, pipeline_for
from actds_writers.ipc.messages import (
    ClientFacts,
    HookSpec,
    LeftOut,
    Reference,
    RequestArrived,
    RequestFinished,
    StepScheduled,
)

HERE = Path(__file__).resolve().parent
NOW_NS = 1_750_000_000_000_000_000
AUDITED: dict[str, dict[str, Any]] = {
    "none": {},
    "mcar_steps": {"rate": 0.03},
    "queue": {"rate": 0.04},
    "mnar_content": {},
    "mnar_projection": {},
    "heavy": {},
    "mar_load": {"rate": 0.03},
}
"""Scenarios of the simulator whose audits are recorded, with changes; the last with its weights."""
N_STEPS, SEED = 2000, 7
STRIPPED = {"actds", "version", "software", "writer", "duration_s", "peak_nbytes"}
"""Keys that name versions of software, or what a command took."""
DIGESTS = {"sha256", "prev", "previous", "root", "nbytes", "manifest_sha256", "head", "digest"}
"""Keys of documents that follow from bytes of other files."""
LIVE = {"dataset", "chain", "compression", "genesis_sha256", "heads"}
"""Keys of documents that differ from one live run to the next: random ids, the disk's pace."""
LIVE_COLUMNS = ("queue_depth", "depth", "compression_backlog", "disk_write_latency")
"""How columns begin that differ likewise."""
LIVE_TABLES = {"stalls", "occupancy"}
"""Tables of times and depths: of live runs only the columns are compared."""
RELATIVE, ABSOLUTE = 1e-9, 1e-12
"""Floats are recorded with 12 significant digits and compared with these tolerances: BLAS and numpy
choose their kernels by processor, so that the last bits of sums and exponentials differ between
machines, and a cancelled sum differs in more than those. A rounding alone would not do: two values
a bit apart can lie on both sides of where it cuts."""
REGIMES_RELATIVE = 1e-5
"""Of values of regimes: differences of sums that are nearly equal."""
KEPT = ("level", "kind")
"""Keys of a verdict that must not depend on the processor."""
_RANDOM_ID = re.compile(r"\b([a-z])-[0-9a-f]{16}\b")

Json = Any


# The commands ---------------------------------------------------------------------------------


def command(folder: Path, *args: object) -> str:
    """Return what ``python -m actds ARGS`` prints in a folder, whatever its exit code."""
    out = io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["actds", *map(str, args)]),
        contextlib.redirect_stdout(out),
    ):
        try:
            runpy.run_module("actds", run_name="__main__")
        except SystemExit as end:
            assert end.code in (0, 1, None), f"actds {args}: exit code {end.code}\n{out.getvalue()}"
    return out.getvalue()


def result_of(folder: Path, *args: object) -> Json:
    """Return the JSON that a command prints, less versions and times."""
    return rounded(stripped(json.loads(command(folder, *args)), STRIPPED))


def stripped(value: Json, without: set[str]) -> Json:
    """Return a value without some keys and without times, and with no random id of a chain."""
    if isinstance(value, dict):
        return {
            key: stripped(inner, without)
            for key, inner in value.items()
            if key not in without and not key.endswith("_ns")
        }
    if isinstance(value, list):
        return [stripped(inner, without) for inner in value]
    if isinstance(value, str):
        return _RANDOM_ID.sub(r"\1-ID", value)
    return value


def rounded(value: Json) -> Json:
    """Return a value with every float at 12 significant digits."""
    if isinstance(value, float):
        return float(f"{value:.12g}") if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return value


# Harvests -------------------------------------------------------------------------------------


@contextlib.contextmanager
def frozen(ids: str) -> Iterator[None]:
    """Stop the clock, and let every random id be one: a process gets another by its kind."""
    with (
        mock.patch.object(time, "time_ns", lambda: NOW_NS),
        mock.patch.object(secrets, "token_hex", lambda nbytes=8: ids.rjust(2 * nbytes, "0")),
    ):
        yield


def synthetic(path: Path) -> Path:
    """Two runs and two seals: two hooks, readouts, references, drops, filtered rows, aborts."""
    readouts = Readouts(4, seed=5)
    # d_model 16: the directions are plus and minus a quarter, so that the products are exact.
    with frozen("a1"):
        make_dataset(path, n_requests=24, seed=1, drops=True, filtered=True, readouts=readouts)
    with frozen("a2"):
        make_dataset(
            path, n_requests=9, seed=1, run="r-second", order="sequence", rows_per_shard=40,
            readouts=readouts,
        )  # fmt: skip
    return path


def wide(path: Path) -> Path:
    """One run of wider rows: what the codec stores split in planes, and as float32."""
    with frozen("b1"):
        make_dataset(path, n_requests=30, seed=4, d_model=512, rows_per_shard=512, dtype="float32")
    return path


def simulated(path: Path) -> Path:
    """A run of the simulator whose queue overflowed: drops, stalls, occupancy, readouts."""
    with frozen("c1"):
        run = simulate(replace(SCENARIOS["queue"], n_steps=400), SEED)
        write_dataset(run, path, rows_per_shard=2048)
    return path


class _Engine(SyntheticEngine):
    """Rows of small whole numbers: exact in bfloat16, and so are their readouts."""

    def row_bits(self, number: int, positions: np.ndarray) -> np.ndarray:
        n_hooks, d_model = len(self.hooks), self.hooks[0].d_model
        hook, channel = np.arange(n_hooks)[:, None, None], np.arange(d_model)
        values = (number * 31 + positions[:, None] * 7 + channel * 5 + hook) % 101 - 50
        values[..., 0], values[..., 1] = number, positions
        return (values.astype("<f4").view("<u4") >> 16).astype(np.uint16)

    def reusing(self, number: int, of: int, n_reused: int, n: int, reason: str) -> None:
        """Serve a request in one step, behind a prefix that another one computed."""
        self.scheduler.send(
            RequestArrived(number, f"p{number}-x", f"p{number}", n, 1, None, None, LeftOut())
        )
        one = np.array([number], np.int64)
        reference = Reference(number, 0, n_reused, of)
        self.scheduler.send(
            StepScheduled(
                self.n_steps, 1, one, one * 0 + n_reused, one * 0 + n - n_reused, (reference,),
                0, 1, (), 0.1,
            )
        )  # fmt: skip
        self.worker_step(number, n_reused, n)
        digest = hashlib.sha256(np.arange(n, dtype="<u4").tobytes()).hexdigest()
        self.scheduler.send(RequestFinished(number, 2, reason, 1, digest))

    def worker_step(self, number: int, start: int, stop: int) -> None:
        """Run the worker's side of a step that the scheduler has told of already."""
        with mock.patch.object(self.scheduler, "send", lambda message: None):
            self.step(number, start, stop, prompt_len=stop)


def live(path: Path) -> Path:
    """The writer and the census as processes, fed by an engine without a model; sealed.

    Two hooks, readouts, reused prefixes, rows left out by a rule, several shards.
    """
    hooks = tuple(HookSpec(f"resid_post.{i}", "resid_post", i, 16, "bfloat16") for i in (1, 2))
    left_out = LeftOut(decode="sampling:prefill_only")
    with pipeline_for(path, hooks=hooks, readouts=Readouts(4, seed=5), run="r-live") as pipeline:
        engine = _Engine(pipeline, hooks=hooks)
        for number in range(12):
            if number % 4 == 3:
                engine.reusing(number, number - 1, 8, 12, "stop")
            elif number % 4 == 2:
                engine.request(number, left_out)
            else:
                engine.request(number)
        engine.drain(pipeline)
        engine.close()
        pipeline.send_client_facts(ClientFacts())
        pipeline.finish("finished")
    command(path.parent, "seal", path.name)
    return path


HARVESTS: dict[str, Callable[[Path], Path]] = {
    "synthetic": synthetic,
    "wide": wide,
    "simulated": simulated,
    "live": live,
}
BY_BYTES = ("synthetic", "wide")
"""Harvests of which every byte is fixed: the rows and readouts are exact on any processor."""


def made(name: str, folder: Path) -> Path:
    """Return the path of a harvest that is written once per folder."""
    path = folder / name
    return path if path.exists() else HARVESTS[name](path)


def libraries() -> dict[str, str]:
    """Return the versions of the libraries that the bytes of files depend on."""
    names = ("numpy", "pyarrow", "zstandard", "pydantic")
    return {name: importlib.metadata.version(name) for name in names}


def file_digests(path: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a dataset."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {
        file.relative_to(path).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def content(path: Path, is_live: bool) -> Json:
    """Return what a dataset holds: documents, tables column by column, rows.

    Args:
        path: the dataset.
        is_live: leave out what differs from one live run to the next.
    """
    found: dict[str, Json] = {"documents": {}, "tables": {}, "rows": {}}
    for file in sorted(path.rglob("*.json")):
        name = _RANDOM_ID.sub(r"\1-ID", file.relative_to(path).as_posix())
        if is_live and name.startswith("ledger/"):
            continue  # how many records there are depends on the pace of the disk
        without = STRIPPED | DIGESTS | (LIVE if is_live else set())
        found["documents"][name] = stripped(json.loads(file.read_text()), without)
    tables: dict[str, list[pa.Table]] = {}
    for file in sorted(path.rglob("*.parquet")):
        name = file.relative_to(path).as_posix()
        if is_live:  # in how many parts a table is written, too
            name = re.sub(r"-\d{6}\.parquet$", "", _RANDOM_ID.sub(r"\1-ID", name))
        tables.setdefault(name, []).append(pq.read_table(file))
    for name, parts in tables.items():
        found["tables"][name] = table_content(pa.concat_tables(parts), name, is_live)
    for shard in actds.open(path).shards:
        for hook in shard.manifest.hooks:
            rows = np.ascontiguousarray(shard.array(hook).read_all())
            name = _RANDOM_ID.sub(r"\1-ID", shard.manifest.shard)
            digest = hashlib.sha256(rows.tobytes()).hexdigest()
            found["rows"][f"{name} {hook}"] = [list(rows.shape), digest]
    return rounded(found)


def table_content(table: pa.Table, name: str, is_live: bool) -> Json:
    """Return the type and the values of each column: digests, of floats a few sums."""
    if is_live:  # the pace decides which rows come together, and so in which order
        names = ("request", "position", "start", "step", "hook")
        keys = [(key, "ascending") for key in names if key in table.column_names]
        table = table.sort_by(keys) if keys else table
    is_timing = is_live and name.rpartition("/")[2] in LIVE_TABLES
    found: dict[str, Json] = {} if is_timing else {"n_rows": len(table)}
    for column in table.column_names:
        values = table[column]
        told: list[Json] = [str(values.type)]
        is_pace = column.endswith("_ns") or column.startswith(LIVE_COLUMNS)
        if not is_timing and not (is_live and is_pace):
            told.append(column_content(values))
        found[column] = told
    return found


def column_content(values: pa.ChunkedArray) -> Json:
    """Return the SHA-256 of the values as JSON; of floats sums that bear rounding."""
    flat = values.combine_chunks()
    if pa.types.is_list(flat.type) or pa.types.is_fixed_size_list(flat.type):
        flat = flat.flatten()
    if pa.types.is_floating(flat.type):
        known = np.asarray(flat.drop_null(), np.float64)
        place = np.arange(1, len(known) + 1) / max(1, len(known))
        sums = (known.sum(), np.abs(known).sum(), (known * known).sum(), (known * place).sum())
        return {"n": len(flat), "n_known": len(known), "sums": [float(x) for x in sums]}
    text = json.dumps(flat.to_pylist(), default=lambda raw: raw.hex())
    return hashlib.sha256(text.encode()).hexdigest()


# What is recorded -----------------------------------------------------------------------------


def harvest(name: str, folder: Path) -> Json:
    """Return what a harvest must be."""
    path = made(name, folder)
    found = {"content": content(path, is_live=name == "live")}
    if name == "simulated":
        found["arithmetic"] = arithmetic()
    if name in BY_BYTES:
        found |= {"libraries": libraries(), "files": file_digests(path)}
    return found


def validated(name: str, folder: Path) -> Json:
    """Return what ``actds validate --level deep`` says of a harvest."""
    path = made(name, folder)
    result = result_of(folder, "validate", "--level", "deep", "--json", path.name)
    if name == "simulated":
        return {"arithmetic": arithmetic(), "result": stripped(result, DIGESTS)}
    if name == "live":  # how many records and files there are depends on the pace of the disk
        for check in result["checks"]:
            check["detail"] = re.sub(r"(records|files) \d+", r"\1 N", check["detail"])
    return stripped(result, LIVE | DIGESTS) if name == "live" else result


def audited(name: str, folder: Path) -> Json:
    """Return what the audit says of a simulated run; of ``mar_load``, its weights as well."""
    path, weights = folder / f"audited-{name}", folder / "weights.parquet"
    with frozen("d1"):
        run = simulate(replace(SCENARIOS[name], n_steps=N_STEPS, **AUDITED[name]), SEED)
        write_dataset(run, path, rows_per_shard=1 << 15)
    more = ("--weights", weights.name) if name == "mar_load" else ()
    result = result_of(folder, "audit", path.name, "--json", "-", *more)
    found = {"arithmetic": arithmetic(), "audit": result}
    if more:
        found["weights"] = rounded(table_content(pq.read_table(weights), "weights", False))
    return found


def compared(folder: Path) -> Json:
    """Return regimes of a dataset and the same one in another type, and of its phases."""
    paths = []
    for dtype in ("float32", "float16"):
        paths.append(folder / f"compared-{dtype}")
        with frozen("e1"):
            make_dataset(
                paths[-1], n_requests=90, seed=3, drops=True, rows_per_shard=512, dtype=dtype,
            )  # fmt: skip
    first, second = (path.name for path in paths)
    return {
        f"regimes-{name}": result_of(folder, "regimes", *arms, "--json", "-")
        for name, arms in (("types", (first, second)), ("phases", (first,)))
    }


def spec() -> Json:
    """Return the SHA-256 of every file of the spec: text, schemas, vectors."""
    files = (file for file in (ROOT / "spec").rglob("*") if file.is_file())
    return {
        file.relative_to(ROOT).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(files)
        if "__pycache__" not in file.parts and file.suffix != ".py"
    }


def arithmetic() -> str:
    """Return a digest of what this processor's kernels make of float32 products and functions.

    The simulator's values go through them and are then rounded to bfloat16: where they differ in
    the last bit, another run is simulated, alike but not the same.
    """
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 257, 65))
    made = [
        a,
        b,
        a @ b.T,
        np.exp(a),
        np.log(np.abs(a)),
        np.sqrt(np.abs(a)),
        np.linalg.norm(a, axis=1),
    ]
    a, b = a.astype(np.float32), b.astype(np.float32)
    made += [a @ b.T, a @ b[0], np.exp(a), np.log(np.abs(a)), np.linalg.norm(a, axis=1)]
    return hashlib.sha256(b"".join(array.tobytes() for array in made)).hexdigest()


def comparable(now: Json, then: Json) -> tuple[Json, Json]:
    """Return the parts of two values that must agree where they were made.

    With other libraries the same values have other bytes: the content decides alone. On another
    kind of processor a simulated run is another one: its verdict decides alone.
    """
    if not isinstance(now, dict):
        return now, then
    without = set()
    if now.get("libraries") != then.get("libraries"):
        without |= {"libraries", "files"}
    if now.get("arithmetic") != then.get("arithmetic"):
        verdicts = [
            {"verdict": {key: value.get("audit", {}).get("verdict", {}).get(key) for key in KEPT}}
            for value in (now, then)
        ]
        return verdicts[0], verdicts[1]
    first, second = ({k: v for k, v in value.items() if k not in without} for value in (now, then))
    return first, second


RECORDED: dict[str, Callable[[Path], Json]] = {
    "spec": lambda folder: spec(),
    **{f"harvest-{name}": lambda folder, name=name: harvest(name, folder) for name in HARVESTS},
    **{f"validate-{name}": lambda folder, name=name: validated(name, folder) for name in HARVESTS},
    **{f"audit-{name}": lambda folder, name=name: audited(name, folder) for name in AUDITED},
    "regimes": compared,
}
"""Each recorded file, and what makes its value in a folder for datasets."""


def recorded_path(name: str) -> Path:
    """Return the file of a recorded value: of audits and regimes, which are long, gzip."""
    is_long = name.startswith(("audit-", "regimes"))
    return HERE / "recorded" / f"{name}.json{'.gz' if is_long else ''}"


def read(name: str) -> Json:
    """Return a recorded value."""
    data = recorded_path(name).read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)


def write(name: str, value: Json) -> None:
    """Record a value."""
    data = (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
    path = recorded_path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)


def differences(now: Json, then: Json, place: str = "") -> list[str]:
    """Return where a value differs from the recorded one, a line each."""
    if isinstance(now, dict) and isinstance(then, dict):
        return [
            line
            for key in sorted(now.keys() | then.keys())
            for line in (
                differences(now[key], then[key], f"{place}/{key}")
                if key in now and key in then
                else [f"{place}/{key}: {'new' if key in now else 'gone'}"]
            )
        ]
    if isinstance(now, list) and isinstance(then, list) and len(now) == len(then):
        return [
            line
            for i, (a, b) in enumerate(zip(now, then, strict=True))
            for line in differences(a, b, f"{place}/{i}")
        ]
    if isinstance(now, float) and isinstance(then, float):
        relative = REGIMES_RELATIVE if place.startswith("/regimes-") else RELATIVE
        is_same = math.isclose(now, then, rel_tol=relative, abs_tol=ABSOLUTE)
    else:
        is_same = type(now) is type(then) and now == then
    return [] if is_same else [f"{place}: {str(now)[:120]} and not {str(then)[:120]}"]
