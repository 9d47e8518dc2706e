"""Fuzzing of every parser that meets a stranger's bytes, with inputs of the right structure.

    python -m actds_testing.fuzz [TARGET ...] [--seconds N] [--seed N]

A target makes an input of bytes that atheris chooses: a document with values of other types, a
frame or an index whose checksums are right again, a table that Arrow wrote and then lost a bit, a
whole dataset forged anew. It may be refused, with a code; whatever else happens is a finding, and
the bytes are kept in the folder ``build/fuzz``. ``make fuzz MINUTES=60`` runs each in turn.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

import actds
from actds.errors import ActdsError
from actds.format import arrays, canonical, codec, pages, readouts, schema, tables
from actds.format.apart import TablesApart
from actds.store import layout
from actds.store.local import LocalFile
from actds_testing.forge import rehash, relink
from actds_testing.places import ROOT, VECTORS
from actds_validators.validate.validation import validate

__all__ = ["TARGETS", "main"]

MINIMAL = VECTORS / "valid" / "minimal"
MAX_RSS_MIB, TIMEOUT_S = 2048, 180  # with torch, on a machine that does more than this
Provider = Any
"""``atheris.FuzzedDataProvider``: numbers, bytes and choices, made of the fuzzer's bytes."""
TARGETS: dict[str, Callable[[Provider], None]] = {}

_ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    "",
    "a",
    "..",
    "../../etc",
    "\ud800",
    "x" * 5000,
    [],
    {},
    [[]],
    {"a": 1},
    [1, "a"],
    "0" * 64,
    "\x00",
    1.5,
    float("nan"),
]


def target(fuzz: Callable[[Provider], None]) -> Callable[[Provider], None]:
    """Register a target under its name."""
    TARGETS[fuzz.__name__] = fuzz
    return fuzz


def _flipped(given: Provider, data: bytes, most: int = 8) -> bytes:
    """Return bytes with some of them changed, cut or grown."""
    out = bytearray(data)
    for _ in range(given.ConsumeIntInRange(1, most)):
        at = given.ConsumeIntInRange(0, max(0, len(out) - 1))
        match given.ConsumeIntInRange(0, 5):
            case 0:
                del out[at:]
            case 1:
                out[at:at] = given.ConsumeBytes(8)
            case 2:
                size = given.PickValueInList([1, 2, 4, 8])
                value = given.PickValueInList(
                    [0, 1, 2**7, 2**15, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
                )
                out[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
            case 3:
                out[at : at + 1] = given.ConsumeBytes(1)
            case _:
                if out:
                    out[at] ^= 1 << given.ConsumeIntInRange(0, 7)
    return bytes(out)


def _changed(given: Provider, document: Any) -> Any:
    """Change a document in place, at some of its values; return it."""
    for _ in range(given.ConsumeIntInRange(1, 4)):
        at = document
        while isinstance(at, dict | list) and at:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = given.PickValueInList(keys)
            if isinstance(at[key], dict | list) and at[key] and given.ConsumeIntInRange(0, 3):
                at = at[key]
                continue
            match given.ConsumeIntInRange(0, 3):
                case 0:
                    del at[key]
                case 1 if isinstance(at, dict):
                    at[given.PickValueInList(["", "a", "0" * 70, "\ud800", str(key)])] = deepcopy(
                        at[key]
                    )
                case 2 if isinstance(at, list):
                    at.append(deepcopy(at[key]))
                case _:
                    at[key] = deepcopy(given.PickValueInList(_ODD))
            break
    return document


def _bytes_of(document: Any) -> bytes:
    """Return canonical bytes where there are any, else JSON with what must not be in it."""
    with suppress(TypeError, ValueError):
        return canonical.dump(document)
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"


@cache
def _documents() -> list[tuple[str, bytes]]:
    found = [("genesis", "actds.json"), ("run", "runs/*.json"), ("shard", "shards/*/shard.json")]
    found += [("ledger", "ledger/*/*.json"), ("seal", "seal/[0-9]*.json")]
    return [
        (kind, path.read_bytes()) for kind, glob in found for path in sorted(MINIMAL.glob(glob))
    ]


@target
def document(given: Provider) -> None:
    """A genesis, run record, manifest, ledger record or seal."""
    kind, data = given.PickValueInList(_documents())
    data = _bytes_of(_changed(given, json.loads(data)))
    if given.ConsumeBool():
        data = _flipped(given, data)
    with suppress(ActdsError):
        found = schema.parse(schema.DOCUMENTS[kind], data, "x")
        if isinstance(found, schema.LedgerRecord):
            found.typed_body()
        if isinstance(found, schema.RunRecord):
            readouts.readouts_of(found)


@target
def canonical_json(given: Provider) -> None:
    """Any bytes as canonical JSON; what is taken is written the same."""
    text = given.PickValueInList(
        [b'{"a":[1,"\\u00e9"]}\n', b"[" * 20, b'"\\ud800"\n', b'{"a":1,"a":2}\n']
    )
    data = given.ConsumeBytes(200) if given.ConsumeBool() else _flipped(given, text)
    with suppress(ActdsError):
        assert canonical.dump(canonical.parse(data, "x")) == data


@target
def readouts_field(given: Provider) -> None:
    """The value of ``capture.readouts``, and the file of probes."""
    fields = {"n_probes": 2, "n_projections": 4, "probes_sha256": "0" * 64, "seed": 1}
    text = _bytes_of(_changed(given, fields)).decode("utf-8", "surrogateescape").rstrip("\n")
    with suppress(ActdsError):
        readouts.Readouts.from_field(text, "x")
    probes = readouts.probe_bytes(np.zeros((1, 2, 16), np.float32))
    with suppress(ActdsError):
        readouts.load_probes(_flipped(given, probes), "x", (1, 2, 16))


@cache
def _array() -> tuple[bytes, bytes]:
    folder = next(iter(sorted(MINIMAL.glob("shards/*/acts.zarr/resid_post.0"))))
    return (folder / "zarr.json").read_bytes(), (folder / "c/0/0").read_bytes()


@target
def array(given: Provider) -> None:
    """Metadata, index, chunks; checksums are right where the fuzzer says so."""
    metadata, data = _array()
    if given.ConsumeBool():
        metadata = _bytes_of(_changed(given, json.loads(metadata)))
    body, index = data[:-20], data[-20:-4]  # one chunk, and the checksum of the index
    if given.ConsumeBool():
        frame = _flipped(given, body[:-4])
        body = frame + struct.pack("<I", codec.crc32c(frame))
        index = struct.pack("<QQ", 0, len(body))
    if given.ConsumeBool():
        index = _flipped(given, index)
    data = body + index + struct.pack("<I", codec.crc32c(index))
    with tempfile.NamedTemporaryFile(dir=_memory()) as file:
        file.write(data)
        file.flush()
        with (
            suppress(ActdsError),
            arrays.ArrayReader(metadata, LocalFile(file.name, "x"), "x") as it,
        ):
            it.read_all()
            it.gather([0])


@target
def frame(given: Provider) -> None:
    """A frame of blosc, from its header on."""
    itemsize = given.PickValueInList([2, 4])
    items = np.arange(given.PickValueInList([64, 4096, 140_000]), dtype=f"<u{itemsize}")
    mode = given.PickValueInList(["huffman", "zstd", "raw"])
    data = _flipped(given, codec.encode_chunk(items, itemsize=itemsize, mode=mode), 4)
    with suppress(codec.CodecError):
        codec.decode_chunk(data, bytearray(items.nbytes), itemsize=itemsize)


@cache
def _tables() -> list[tuple[tables.TableName, pa.Table]]:
    folders = [MINIMAL, VECTORS / "valid" / "readouts"]
    found = [path for folder in folders for path in sorted(folder.rglob("*.parquet"))]
    names = [
        (path.name.split("-")[0].split(".")[-2 if "seal" in path.parts else 0], path)
        for path in found
    ]
    return [(name, tables.from_parquet(name, path.read_bytes(), "x")) for name, path in names]


@cache
def _apart() -> TablesApart:
    return TablesApart(1 << 16)


@target
def parquet(given: Provider) -> None:
    """A table in any form that Arrow writes, then changed."""
    import io

    name, table = given.PickValueInList(_tables())
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        store_schema=given.ConsumeIntInRange(0, 9) == 0,
        compression=given.PickValueInList(["zstd", "none", "snappy", "gzip"]),
        use_dictionary=given.ConsumeBool(),
        write_page_checksum=given.ConsumeIntInRange(0, 9) > 0,
        data_page_version=given.PickValueInList(["1.0", "2.0"]),
        version=given.PickValueInList(["1.0", "2.6"]),
        row_group_size=given.PickValueInList([1, 7, 1000]),
    )
    data = _flipped(given, sink.getvalue(), 3)
    with suppress(ActdsError):
        read = _apart().from_parquet(name, data, "x")
        assert read.schema.equals(tables.bare_schema(name))
        read.to_pylist()
    _apart.cache_clear()


@target
def dataset(given: Provider) -> None:
    """A whole dataset of which one file was changed, and every digest above it."""
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        root = _forged(given, Path(folder))
        found = validate(root, given.PickValueInList(["standard", "full", "deep"]))
        assert not [line for line in found.findings if line.code == "E901"], found.findings
        with suppress(ActdsError):
            actds.open(root)


# doors ------------------------------------------------------------------------------------------


def _forged(given: Provider, folder: Path) -> Path:
    """Return a dataset of which one file was changed, and every digest above it."""
    root = Path(shutil.copytree(MINIMAL, folder / "d"))
    path = given.PickValueInList(sorted(path for path in root.rglob("*") if path.is_file()))
    data = path.read_bytes()
    if path.suffix == ".json" and given.ConsumeIntInRange(0, 4):
        path.write_bytes(_bytes_of(_changed(given, json.loads(data))))
    else:
        path.write_bytes(_flipped(given, data))
    with suppress(Exception):  # what cannot be forged stays as it is
        for manifest in root.glob("shards/*/shard.json"):
            rehash(manifest)
        relink(root)
    return root


def _given(given: Provider, kind: str, folder: Path) -> Path:
    """Return a file of a kind that a person hands to a door, changed or not."""
    path = folder / next(name for name in _foreign() if name.endswith(kind))
    data = _foreign()[path.name]
    path.write_bytes(_flipped(given, data) if given.ConsumeBool() else data)
    return path


@cache
def _foreign() -> dict[str, bytes]:
    """Return files of other libraries by name: rows of 16 channels, as people save them."""
    import io

    import torch
    from safetensors.numpy import save

    rows = np.arange(96, dtype=np.float32).reshape(6, 16)
    files: dict[str, Any] = {}
    for name, data in {
        "rows.pt": {"acts": torch.from_numpy(rows), "labels": torch.ones(6)},
        "texts.pt": [torch.from_numpy(rows[:2]), torch.from_numpy(rows[2:])],
        "sample.pt": {"input_ids": torch.arange(6), "hidden_states": [torch.from_numpy(rows)] * 2},
    }.items():
        sink = io.BytesIO()
        torch.save(data, sink)
        files[name] = sink.getvalue()
    for name, write in {
        "rows.npy": lambda sink: np.save(sink, rows),
        "rows.npz": lambda sink: np.savez(sink, acts=rows, tokens=np.arange(6)),
        "small.npz": lambda sink: np.savez_compressed(sink, acts=rows),
    }.items():
        sink = io.BytesIO()
        write(sink)
        files[name] = sink.getvalue()
    states = {"hidden_states": rows.reshape(6, 1, 16), "token_ids": np.arange(6)}
    files["states.safetensors"] = save(states)
    files["probes.safetensors"] = save({"weights": rows[:2]})
    files["encoder.safetensors"] = save({"W_enc": np.ones((16, 4), np.float32)})
    return files


def _saved_lists(given: Provider, folder: Path) -> None:
    """Write a saved dataset of ``datasets``, of lists or of SAELens' windows, one file changed."""
    windows = given.ConsumeBool()
    flat = pa.array(np.arange(96, dtype=np.float32))
    rows = pa.ListArray.from_arrays(np.arange(0, 97, 16, dtype=np.int32), flat)
    ids: pa.Array = pa.array(range(6), pa.int32())
    feature: Any = {"_type": "List"}
    if windows:
        ends = np.array([0, 3, 6], np.int32)
        rows, ids = (pa.ListArray.from_arrays(ends, one) for one in (rows, ids))
        feature = {"_type": "Array2D", "shape": [3, 16], "dtype": "float32"}
    sink = pa.BufferOutputStream()
    table = pa.table({"acts": rows, "token_ids": ids})
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=given.PickValueInList([1, 100]))
    state = {"_data_files": [{"filename": "data-0.arrow"}]}
    files = {
        "data-0.arrow": sink.getvalue().to_pybytes(),
        "state.json": json.dumps(state).encode(),
        "dataset_info.json": json.dumps({"features": {"acts": feature, "token_ids": {}}}).encode(),
    }
    chosen = given.PickValueInList(list(files))
    if chosen.endswith(".json") and given.ConsumeBool():
        files[chosen] = _bytes_of(_changed(given, json.loads(files[chosen])))
    else:
        files[chosen] = _flipped(given, files[chosen])
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _foreign_set(given: Provider, folder: Path) -> Path:
    """Return a file or a folder that a stranger made."""
    if given.ConsumeIntInRange(0, 2) == 0:
        _saved_lists(given, folder)
        return folder
    path = _given(given, given.PickValueInList(list(_foreign())), folder)
    return path if given.ConsumeBool() else folder


@target
def doctor(given: Provider) -> None:
    """The doctor on files of other libraries: a fault has a code, and nothing else happens."""
    with tempfile.TemporaryDirectory(dir=_memory()) as folder, suppress(ActdsError):
        for found in actds.doctor(
            _foreign_set(given, Path(folder)), values=given.ConsumeBool()
        ).sets:
            assert all(fault[0] == "E" or fault.startswith("and ") for fault in found.faults)


@target
def import_(given: Provider) -> None:
    """An import of files of other libraries: whole or not at all, and every row once."""
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        source, out = Path(folder) / "in", Path(folder) / "out"
        source.mkdir()
        path = _foreign_set(given, source)
        hooks = ["resid_post.0", "resid_post.1"][: given.ConsumeIntInRange(1, 2)]
        done = None
        with suppress(ActdsError):
            done = actds.import_foreign(path, out, hooks=hooks, dtype="float32")
        assert sorted(one.name for one in Path(folder).iterdir()) == ["in", *["out"] * bool(done)]
        if done is not None:
            found = actds.check(out)
            codes = {finding.code for finding in found.validation.errors}
            assert codes == {"E306", "E403"} and found.imported is not None, codes


def _door(given: Provider, call: Callable[[Path, Path], object]) -> None:
    """Call a door with a dataset that was forged; an error has a code."""
    with tempfile.TemporaryDirectory(dir=_memory()) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = _forged(given, Path(folder)) if given.ConsumeIntInRange(0, 3) else MINIMAL
        with suppress(ActdsError):
            call(root, Path(folder))


@target
def audit(given: Provider) -> None:
    """The audit of a dataset that a stranger made, with classes that one gave."""

    def call(root: Path, folder: Path) -> object:
        classes = None
        if given.ConsumeBool():
            table = pa.table({
                "request": pa.array([0, 1], pa.uint32()), "start": pa.array([0, 1], pa.uint32()),
                "stop": pa.array([2, 3], pa.uint32()), "class": ["a", "b"],
            })  # fmt: skip
            classes = folder / "classes.parquet"
            pq.write_table(table, classes)
            classes.write_bytes(_flipped(given, classes.read_bytes(), 3))
        return actds.audit(root, classes=classes)

    _door(given, call)


@target
def view(given: Provider) -> None:
    """A page of a dataset that a stranger made, with directions that one gave."""

    def call(root: Path, folder: Path) -> object:
        match given.ConsumeIntInRange(0, 3):
            case 0:
                return actds.view(root, probe=_given(given, "rows.npy", folder))
            case 1:
                encoder = _given(given, "encoder.safetensors", folder)
                return actds.view(root, sae=encoder, features=[0])
            case 2:
                (folder / "tokenizer.json").write_bytes(_flipped(given, _tokenizer()))
                return actds.view(root, tokenizer=folder)
            case _:
                return actds.view(root, stats=given.ConsumeBool())

    _door(given, call)


@cache
def _tokenizer() -> bytes:
    from tokenizers import Tokenizer, decoders, models

    made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(40)}, "w0"))
    made.decoder = decoders.Replace("w", "word ")  # type: ignore[assignment]
    return made.to_str().encode()


@target
def regimes(given: Provider) -> None:
    """A comparison of datasets that a stranger made, with probes and dictionaries that one gave."""

    def call(root: Path, folder: Path) -> object:
        arms = [f"G={root}:phase=decode", f"R={root}:phase=prefill"]
        given_files: dict[str, Any] = {}
        if given.ConsumeBool():
            given_files["probes"] = [str(_given(given, "probes.safetensors", folder))]
        elif given.ConsumeBool():
            given_files["sae"] = [str(_given(given, "rows.pt", folder))]
        return actds.regimes(*arms, **given_files)

    _door(given, call)


@target
def recover(given: Provider) -> None:
    """A recovery of a dataset that a stranger made: its seal or its census may be gone."""

    def call(root: Path, folder: Path) -> object:
        if root == MINIMAL:
            root = Path(shutil.copytree(MINIMAL, folder / "d"))
        if given.ConsumeBool():
            shutil.rmtree(root / "seal", ignore_errors=True)
        if given.ConsumeBool():
            shutil.rmtree(next(iter(sorted(root.glob("ledger/c-*")))), ignore_errors=True)
            segment = root / layout.journal_path("r-vector", 0)
            segment.parent.mkdir(parents=True)
            segment.write_bytes(_flipped(given, _segment()))
        return actds.recover(root, clear=given.ConsumeBool())

    _door(given, call)


@cache
def _segment() -> bytes:
    dataset = json.loads((MINIMAL / layout.GENESIS).read_bytes())["dataset"]
    header = {"dataset": dataset, "format": "actds.journal", "n_messages": 0, "prev": "0" * 64,
              "run": "r-vector", "segment": 0, "version": "0.1"}  # fmt: skip
    return bytes(zstandard.compress(json.dumps(header).encode() + b"\n"))


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


# running ----------------------------------------------------------------------------------------


@contextmanager
def _corpus(name: str) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of a target's inputs, kept from run to run, and that of its findings."""
    kept = ROOT / "build" / "fuzz" / name
    for folder in (kept / "corpus", kept / "findings"):
        folder.mkdir(parents=True, exist_ok=True)
    yield kept / "corpus", kept / "findings"


def _run_one(name: str, seconds: int, seed: int) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""
    import atheris

    def one(data: bytes) -> None:
        TARGETS[name](atheris.FuzzedDataProvider(data))

    # Coverage of what was imported above: the parsers themselves.
    for module in (canonical, schema, arrays, codec, readouts, pages):
        for attribute, value in list(vars(module).items()):
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                setattr(module, attribute, atheris.instrument_func(value))
    with _corpus(name) as (corpus, findings):
        options = [
            f"-max_total_time={seconds}",
            f"-rss_limit_mb={MAX_RSS_MIB}",
            f"-timeout={TIMEOUT_S}",
            f"-seed={seed}",
            f"-artifact_prefix={findings}/",
            "-max_len=512",
            "-len_control=0",
            "-print_final_stats=1",
            "-verbosity=0",
        ]
        atheris.Setup([sys.argv[0], *options, str(corpus)], one)
        atheris.Fuzz()


def main() -> int:
    """Fuzz targets one after the other, each in a process; return 1 where one found something."""
    parser = argparse.ArgumentParser(description="Fuzz the parsers.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--here", action="store_true", help="in this process, which then ends")
    chosen = parser.parse_args()
    if chosen.here:
        _run_one(chosen.targets[0], chosen.seconds, chosen.seed)
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("skipped: atheris is not installed (it has builds for Linux and CPython alone)")
        return 0
    failed = []
    for name in chosen.targets or TARGETS:
        options = ["--here", f"--seconds={chosen.seconds}", f"--seed={chosen.seed}"]
        command = [sys.executable, "-m", __spec__.name, name, *options]
        said = subprocess.run(command, capture_output=True, text=True, errors="replace")
        n = [line.split()[-1] for line in said.stderr.splitlines() if "number_of_executed" in line]
        found = "a finding" if said.returncode else "no finding"
        print(f"{name}: {(n or ['?'])[-1]} executions, {found}", flush=True)
        if said.returncode:
            failed.append(name)
            print(said.stdout[-4000:], said.stderr[-4000:], sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
