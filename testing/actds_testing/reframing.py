"""The same values in other frames, and frames with one fault: what a decoder must tell apart.

Frames are built as section 4.2.1 of the specification says, without any encoder of blosc.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zstandard

from actds_testing.independent.arrays import cut, decode
from actds_testing.independent.findings import Breach

FAULTS = (
    "version", "inner", "flags", "typesize", "nbytes", "blocksize", "cbytes", "gap", "tail",
    "shared block", "two frames", "skippable", "long", "short", "empty stream", "checksum",
    "table", "value", "padding",
)  # fmt: skip


def reframe(root: Path, rng: random.Random) -> str:
    """Write the chunks of an array in other frames, half of the time with a fault in one."""
    file = rng.choice(sorted(root.glob("shards/*/acts.zarr/*/c/0/0")))
    metadata = json.loads((file.parents[2] / "zarr.json").read_bytes())
    (n, d), dtype = metadata["shape"], metadata["data_type"]
    r = metadata["codecs"][0]["configuration"]["chunk_shape"][0]
    try:
        chunks = cut(file.read_bytes(), -(-n // r), r * d, dtype, "")
        values = [decode(chunk, r * d, dtype, "").copy() for chunk in chunks]
    except Breach:
        return f"{file.relative_to(root)} left as it is, damaged"
    fault = rng.choice(FAULTS) if rng.random() < 0.6 else ""
    at = rng.randrange(len(values))
    if fault == "value":
        values[at][rng.randrange(r * d if at < len(values) - 1 else (n - at * r) * d)] ^= 1
    elif fault == "padding":
        values[-1][-1] ^= 1
    out, index = b"", b""
    for k, chunk in enumerate(values):
        frame = encode(chunk, rng, fault if k == at else "")
        frame += struct.pack("<I", google_crc32c.value(frame) ^ (fault == "checksum" and k == at))
        index += struct.pack("<QQ", len(out), len(frame))
        out += frame
    file.write_bytes(out + index + struct.pack("<I", google_crc32c.value(index)))
    return f"{file.relative_to(root)} {fault or 'no fault'} in chunk {at}"


def encode(values: np.ndarray[Any, Any], rng: random.Random, fault: str = "") -> bytes:
    """Return values as a frame of section 4.2.1, in one of the many ways."""
    plain, size = values.tobytes(), values.itemsize
    if rng.random() < 0.2:
        return header(rng, fault, 0x83 | rng.choice((0, 0x10)), size, plain, len(plain), plain)
    sizes = [b for b in (128, 256, 512, 1024, 4096, len(plain)) if b <= len(plain)]
    blocksize, unsplit = rng.choice(sizes), rng.random() < 0.4
    starts = range(0, len(plain), blocksize)
    blocks = []
    for start in starts:
        block = plain[start : start + blocksize]
        shuffled = np.frombuffer(block, np.uint8).reshape(-1, size).T.tobytes()
        split = not unsplit and blocksize // size >= 128 and len(block) == blocksize
        step = len(block) // (size if split else 1)
        parts = [shuffled[k : k + step] for k in range(0, len(shuffled), step)]
        blocks.append(b"".join(stream(part, rng, fault) for part in parts))
    order = list(range(len(blocks)))
    if rng.random() < 0.3:
        rng.shuffle(order)
    table, body = [0] * len(blocks), b""
    if fault == "gap":
        body = b"\0"
    for k in order:
        table[k] = 16 + 4 * len(blocks) + len(body)
        body += blocks[k]
    if fault == "shared block":
        table[-1] = table[0]
    elif fault == "table":
        table[0] = rng.choice((-1, 0, 15, 16, 1 << 30))
    elif fault == "tail":
        body += b"\0"
    body = struct.pack(f"<{len(table)}i", *table) + body
    return header(rng, fault, 0x91 if unsplit else 0x81, size, plain, blocksize, body)


def header(
    rng: random.Random, fault: str, flags: int, size: int, plain: bytes, blocksize: int, body: bytes
) -> bytes:
    fields = {
        "version": 2,
        "inner": 1,
        "flags": flags,
        "typesize": size,
        "nbytes": len(plain),
        "blocksize": blocksize,
        "cbytes": len(body) + 16,
    }
    if fault in fields:
        fields[fault] = max(0, fields[fault] + rng.choice((-4, -1, 1, 2, 4)))
    return struct.pack("<BBBBiii", *fields.values()) + body


def stream(part: bytes, rng: random.Random, fault: str) -> bytes:
    """Return a stream: the bytes as they are, or one zstd frame of them."""
    coder = zstandard.ZstdCompressor(
        level=rng.choice((1, 3, 19)),
        write_content_size=rng.random() < 0.7,
        write_checksum=rng.random() < 0.3,
    )
    said = {"long": part + b"\0", "short": part[:-1]}.get(fault, part)
    coded = coder.compress(said)
    if fault == "two frames":
        coded = coder.compress(part[: len(part) // 2]) + coder.compress(part[len(part) // 2 :])
    elif fault == "skippable":
        coded = struct.pack("<II", 0x184D2A50, 1) + b"\0" + coded
    if fault == "empty stream":
        coded = b""
    elif len(coded) >= len(part) or (not fault and rng.random() < 0.2):
        coded = part
    return struct.pack("<i", len(coded)) + coded
