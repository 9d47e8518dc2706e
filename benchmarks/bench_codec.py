"""Codecs on activations: ratio, share of the byte-plane limit, CPU-seconds per GB.

    python benchmarks/bench_codec.py [DATASET] [--acts FILE.npy ...] [--json]

DATASET is a folder that ``actds.open`` reads (``demo/acts`` when it is there); ``--acts`` takes
``.npy`` files of bf16 bit patterns, ``uint16 (n_rows, d_model)``. Without either, synthetic rows
stand in: Gaussians whose channels differ in scale.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numcodecs
import numcodecs.blosc
import numpy as np

from actds.format.arrays import chunk_rows
from actds.format.codec import decode_chunk, encode_chunk

SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Codec:
    """One way to encode a chunk of bf16 bits ``(n_rows, d_model)`` and to have it back."""

    name: str
    encode: Callable[[np.ndarray], bytes]
    decode: Callable[[bytes, np.ndarray], None]


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; GB are 10^9 bytes of decoded rows, one thread."""

    data: str
    codec: str
    ratio: float
    limit_percent: float
    encode_cpu_s_per_gb: float
    encode_wall_s_per_gb: float
    decode_cpu_s_per_gb: float
    decode_wall_s_per_gb: float


def _blosc(
    name: str, clevel: int, shuffle: int, blocksize: int, compressor: bytes = b"zstd"
) -> Codec:
    def encode(chunk: np.ndarray) -> bytes:
        return numcodecs.blosc.compress(chunk, compressor, clevel, shuffle, blocksize)

    return Codec(name, encode, lambda data, out: numcodecs.blosc.decompress(data, out))


def _zstd(level: int) -> Codec:
    codec = numcodecs.Zstd(level)
    return Codec(f"zstd {level}", codec.encode, lambda data, out: codec.decode(data, out))


def _pcodec() -> Codec:
    from pcodec import ChunkConfig, standalone

    config = ChunkConfig()

    def decode(data: bytes, out: np.ndarray) -> None:
        standalone.simple_decompress_into(data, out.reshape(-1))

    # pcodec has no bfloat16: it sees the bits as integers.
    return Codec(
        "pcodec (u16)", lambda chunk: standalone.simple_compress(chunk.reshape(-1), config), decode
    )


def _zipnn() -> Codec:
    from zipnn import ZipNN

    codec = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)

    def decode(data: bytes, out: np.ndarray) -> None:
        np.copyto(out.reshape(-1), np.frombuffer(codec.decompress(data), np.uint16))

    # ZipNN changes its input in place.
    return Codec("ZipNN", lambda chunk: bytes(codec.compress(bytearray(chunk.tobytes()))), decode)


def codecs() -> tuple[list[Codec], dict[str, str]]:
    """Return the codecs that can run here, and why the others cannot."""
    found = [
        Codec("actds", encode_chunk, decode_chunk),
        Codec("actds raw", lambda c: encode_chunk(c, mode="raw"), decode_chunk),
        _blosc("blosc zstd 5 shuffle (zarr's default)", 5, numcodecs.blosc.SHUFFLE, 0),
        _blosc("blosc zstd 1 shuffle, 256 KiB blocks", 1, numcodecs.blosc.SHUFFLE, 1 << 18),
        _blosc("blosc zstd 5 bitshuffle", 5, numcodecs.blosc.BITSHUFFLE, 0),
        _blosc("blosc lz4 1 shuffle", 1, numcodecs.blosc.SHUFFLE, 1 << 18, b"lz4"),
        _blosc("blosc lz4 1 bitshuffle", 1, numcodecs.blosc.BITSHUFFLE, 1 << 18, b"lz4"),
        _zstd(0),
    ]
    skipped: dict[str, str] = {}
    for name, make in (("pcodec", _pcodec), ("ZipNN", _zipnn)):
        try:
            found.append(make())
        except ImportError as error:
            skipped[name] = f"{error}; install it with: pip install {name.lower()}"
    return found, skipped


def plane_limit(bits: np.ndarray) -> float:
    """Return the ratio of a coder that is ideal on single high bytes and leaves the low ones."""
    share = np.bincount((bits >> 8).reshape(-1), minlength=256) / bits.size
    share = share[share > 0]
    return float(16 / (8 - (share * np.log2(share)).sum()))


def synthetic(n_rows: int, d_model: int = 2048) -> np.ndarray:
    """Return bf16 bits of Gaussians whose channel scales are log-normal, by a fixed seed."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.standard_normal(d_model, dtype=np.float32) * 0.7)
    values = rng.standard_normal((n_rows, d_model), dtype=np.float32) * scale
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def load(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Return bf16 bits by the name of where they come from, at most ``--mib`` of each."""
    limit = args.mib << 20
    found: dict[str, np.ndarray] = {}
    if args.dataset is not None:
        import actds

        dataset = actds.open(args.dataset)
        for name, hook in dataset.hooks.items():
            array = dataset.array(name)
            if hook.dtype == "bfloat16" and len(array):
                found[name] = array.bits(0, min(len(array), max(1, limit // (2 * hook.d_model))))
    for path in args.acts:
        bits = np.load(path, mmap_mode="r", allow_pickle=False)
        if bits.dtype != np.uint16 or bits.ndim != 2:
            raise SystemExit(
                f"{path}: {bits.dtype} {bits.shape}; expected uint16 (n_rows, d_model)"
            )
        found[Path(path).stem] = np.ascontiguousarray(bits[: max(1, limit // (2 * bits.shape[1]))])
    return found or {SYNTHETIC: synthetic(limit // 4096)}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return CPU-seconds of the process and wall seconds of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def measure(name: str, bits: np.ndarray, contenders: list[Codec], rounds: int) -> list[Result]:
    """Return one result per codec; the codecs take turns, so that a slow spell hits them all."""
    step = chunk_rows(bits.shape[1], 2)
    chunks = [bits[i : i + step] for i in range(0, len(bits), step)]
    frames: dict[str, list[bytes]] = {}
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    outs = [np.empty_like(chunk) for chunk in chunks]

    def encode(codec: Codec) -> None:
        frames[codec.name] = [codec.encode(chunk) for chunk in chunks]

    def decode(codec: Codec) -> None:
        for frame, out in zip(frames[codec.name], outs, strict=True):
            codec.decode(frame, out)

    for _ in range(rounds):
        for codec in contenders:
            times.setdefault((codec.name, "encode"), []).append(timed(lambda c=codec: encode(c)))
            for out in outs:
                out[:] = 0
            times.setdefault((codec.name, "decode"), []).append(timed(lambda c=codec: decode(c)))
            if not all(map(np.array_equal, outs, chunks)):
                raise SystemExit(f"{codec.name} does not return the bits of {name}")
    limit, gigabytes = plane_limit(bits), bits.nbytes / 1e9
    results = []
    for codec in contenders:
        ratio = bits.nbytes / sum(map(len, frames[codec.name]))
        seconds = [
            statistics.median(pair[which] for pair in times[codec.name, work]) / gigabytes
            for work in ("encode", "decode")
            for which in (0, 1)
        ]
        results.append(Result(name, codec.name, ratio, 100 * ratio / limit, *seconds))
    return results


def table(rows: list[dict[str, object]]) -> str:
    """Return rows as a markdown table."""
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads)]
    lines += [
        [f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "demo/acts" if Path("demo/acts/actds.json").exists() else None
    parser.add_argument("dataset", nargs="?", default=default)
    parser.add_argument("--acts", nargs="+", default=[], metavar="FILE.npy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=16, help="bytes of each hook that are measured")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    contenders, skipped = codecs()
    for name, reason in skipped.items():
        print(f"{name} skipped: {reason}", file=sys.stderr)
    results: list[Result] = []
    for name, bits in load(args).items():
        results += measure(name, bits, contenders, args.rounds)
    rows = [asdict(result) for result in results]
    if args.json:
        print(json.dumps({"schema": "actds.bench_codec/1", "skipped": skipped, "results": rows}))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
