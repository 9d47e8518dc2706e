"""Section 4: the metadata of an array, its chunks, frames and values."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import google_crc32c
import numpy as np
import zstandard

from actds_testing.independent.documents import KINDS
from actds_testing.independent.findings import Breach, Findings, need
from actds_testing.independent.layout import Folder, Json, canonical, parse
from actds_testing.independent.manifests import Shard

GROUP = canonical({"attributes": {}, "node_type": "group", "zarr_format": 3})
MAX_METADATA_NBYTES, MAX_CHUNK_NBYTES = 1 << 16, 1 << 26
ITEMS = {"bfloat16": "<u2", "float16": "<u2", "float32": "<u4"}
EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
FILL = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}
Bits = np.ndarray[Any, Any]
Key = tuple[int, int]


def form(n: int, d: int, r: int, dtype: str) -> Json:  # 4.1
    """Return the one metadata document of an array of n rows, R per chunk."""
    little = {"configuration": {"endian": "little"}, "name": "bytes"}
    blosc = {"blocksize": 262144, "clevel": 1, "cname": "zstd", "shuffle": "shuffle"}
    blosc["typesize"] = np.dtype(ITEMS[dtype]).itemsize
    sharding = {
        "chunk_shape": [r, d],
        "codecs": [little, {"configuration": blosc, "name": "blosc"}, {"name": "crc32c"}],
        "index_codecs": [little, {"name": "crc32c"}],
        "index_location": "end",
    }
    grid = {"chunk_shape": [-(-n // r) * r, d]}
    return {
        "attributes": {},
        "chunk_grid": {"configuration": grid, "name": "regular"},
        "chunk_key_encoding": {"configuration": {"separator": "/"}, "name": "default"},
        "codecs": [{"configuration": sharding, "name": "sharding_indexed"}],
        "data_type": dtype,
        "fill_value": "NaN",
        "node_type": "array",
        "shape": [n, d],
        "zarr_format": 3,
    }


def rows_per_chunk(data: bytes, shard: Shard, hook: Json, place: str) -> int:
    """Return R of an array whose metadata has the form of section 4.1 (E108, E203)."""
    need(len(data) <= MAX_METADATA_NBYTES, "E108", place, "more than 64 KiB")
    try:
        metadata = parse(data, place)
        n, d = metadata["shape"]
        r = metadata["codecs"][0]["configuration"]["chunk_shape"][0]
        whole = all(type(number) is int and number > 0 for number in (n, d, r))
        same = whole and metadata == form(n, d, r, hook["dtype"])
    except (Breach, KeyError, IndexError, TypeError, ValueError):
        raise Breach("E108", place, "not the form of section 4.1") from None
    need(same and _strict(metadata), "E108", place, "not the form of section 4.1")
    need(d == hook["d_model"], "E108", place, f"{d} channels, the genesis says {hook['d_model']}")
    need(r & (r - 1) == 0, "E108", place, f"{r} rows a chunk, no power of two")
    nbytes = r * d * np.dtype(ITEMS[hook["dtype"]]).itemsize
    need(nbytes <= MAX_CHUNK_NBYTES, "E108", place, f"chunks of {nbytes} bytes")
    need(n == shard.manifest["n_rows"], "E203", place, f"{n} rows")
    return int(r)


def _strict(value: object) -> bool:
    """Return whether no truth value stands for a number: in Python True equals 1."""
    if isinstance(value, dict):
        return all(map(_strict, value.values()))
    return all(map(_strict, value)) if isinstance(value, list) else not isinstance(value, bool)


def read_array(folder: Folder, shard: Shard, hook: Json, *, deep: bool = True) -> Bits | None:
    """Return the bits ``(n_rows, d_model)`` of a hook of a shard; None unless ``deep``.

    Not ``deep`` leaves the chunks as they are and looks at metadata, sizes and index.
    """
    name, dtype, d = hook["name"], hook["dtype"], hook["d_model"]
    path = f"acts.zarr/{name}/zarr.json"
    r = rows_per_chunk(shard.read(folder, path), shard, hook, shard.path(path))
    file = f"acts.zarr/{name}/c/0/0"
    place, data = shard.path(file), shard.read(folder, file)
    chunks = cut(data, -(-shard.manifest["n_rows"] // r), r * d, dtype, place)
    longest = r * d * np.dtype(ITEMS[dtype]).itemsize + 20  # of a copied frame, with its checksum
    copied = shard.manifest["compression"] != "raw" or all(len(c) == longest for c in chunks)
    need(copied, "E415", f"{shard.folder}/shard.json", "raw, and chunks that are coded")
    if not deep:
        return None
    rows = [decode(chunk, r * d, dtype, f"{place} chunk {k}") for k, chunk in enumerate(chunks)]
    values = np.concatenate(rows).reshape(-1, d)
    padding = values[shard.manifest["n_rows"] :]
    need(bool((padding == FILL[dtype]).all()), "E204", place, "padding that is not the fill value")
    return values[: shard.manifest["n_rows"]]


def cut(data: bytes, n_chunks: int, n_values: int, dtype: str, place: str) -> list[bytes]:  # 4.2
    """Return the chunks of a shard file, checksums included, as its index says (E204)."""
    item = np.dtype(ITEMS[dtype]).itemsize
    n_index = 16 * n_chunks
    need(len(data) >= n_index + 4, "E204", place, "shorter than its index")
    index, (checksum,) = data[len(data) - n_index - 4 : -4], struct.unpack("<I", data[-4:])
    need(google_crc32c.value(index) == checksum, "E204", place, "the index fails its checksum")
    chunks, end = [], 0
    for offset, length in struct.iter_unpack("<2Q", index):
        need(offset == end, "E204", place, "chunks with a gap or an overlap")
        need(20 < length <= n_values * item + 20, "E204", place, f"a chunk of {length} bytes")
        end = offset + length
        chunks.append(data[offset:end])
    need(end + n_index + 4 == len(data), "E204", place, "the index does not follow the last chunk")
    return chunks


def decode(chunk: bytes, n_values: int, dtype: str, place: str) -> Bits:  # 4.2.1
    """Return the values of a chunk: checksum, header, blocks, streams (E204)."""
    frame, (checksum,) = chunk[:-4], struct.unpack("<I", chunk[-4:])
    need(google_crc32c.value(frame) == checksum, "E204", place, "the chunk fails its checksum")
    item = np.dtype(ITEMS[dtype])
    version, inner, flags, typesize, nbytes, blocksize, cbytes = struct.unpack_from(
        "<BBBBiii", frame
    )
    need((version, inner) == (2, 1), "E204", place, f"versions {version}, {inner}")
    need(flags in (0x81, 0x83, 0x91, 0x93), "E204", place, f"flags {flags:#x}")
    need(typesize == item.itemsize, "E204", place, f"typesize {typesize}")
    need(nbytes == n_values * typesize, "E204", place, f"nbytes {nbytes}")
    need(cbytes == len(frame) <= nbytes + 16, "E204", place, f"cbytes {cbytes}")
    fits = 1 <= blocksize <= nbytes and blocksize % typesize == 0
    need(fits and (blocksize >= 128 or blocksize == nbytes), "E204", place, "blocksize")
    if flags & 0x02:
        need(cbytes == nbytes + 16, "E204", place, "a copied frame of another length")
        return np.frombuffer(frame, item, offset=16)
    out, taken = bytearray(), []
    n_blocks = -(-nbytes // blocksize)
    table_end = 16 + 4 * n_blocks
    need(table_end <= cbytes, "E204", place, "a frame without its table")
    for k, (at,) in enumerate(struct.iter_unpack("<i", frame[16:table_end])):
        size = min(blocksize, nbytes - k * blocksize)
        whole = size == blocksize
        split = not flags & 0x10 and blocksize // typesize >= 128 and whole
        start, shuffled = at, b""
        need(at >= table_end, "E204", place, "a block within the table")
        for _ in range(typesize if split else 1):
            part, at = _stream(frame, at, size // typesize if split else size, place)
            shuffled += part
        taken.append((start, at))
        out += np.frombuffer(shuffled, np.uint8).reshape(typesize, -1).T.tobytes()
    edges = [(table_end, table_end), *sorted(taken), (cbytes, cbytes)]
    filled = all(one[1] == other[0] for one, other in itertools.pairwise(edges))
    need(filled, "E204", place, "blocks with a gap or an overlap")
    return np.frombuffer(bytes(out), item)


def _stream(frame: bytes, at: int, size: int, place: str) -> tuple[bytes, int]:
    """Return the bytes that a stream stands for, and where it ends."""
    need(at + 4 <= len(frame), "E204", place, "a stream beyond the frame")
    (length,) = struct.unpack_from("<i", frame, at)
    at, end = at + 4, at + 4 + length
    need(1 <= length <= size and end <= len(frame), "E204", place, "a stream beyond its bounds")
    if length == size:
        return frame[at:end], end
    coded = frame[at:end]
    try:
        claimed = zstandard.frame_content_size(coded)
        need(claimed in (-1, size), "E204", place, f"a zstd frame of {claimed} bytes")
        plain = zstandard.ZstdDecompressor().decompress(
            coded, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        need(False, "E204", place, error)
    need(len(plain) == size, "E204", place, f"a zstd frame of {len(plain)} bytes")
    return plain, end


def judge_values(
    bits: dict[str, Bits], hooks: dict[str, Json], shard: Shard, keys: list[Key], found: Findings
) -> None:  # 4.4
    """Note what is odd in the values of a shard.

    Args:
        bits: of each hook ``(n_rows, d_model)``.
        hooks: the hooks of the genesis by name.
        shard: the shard.
        keys: position and token id of each row.
        found: takes E601 to E604.
    """
    for name, rows in bits.items():
        place, exponent = shard.path(f"acts.zarr/{name}"), EXPONENT[hooks[name]["dtype"]]
        magnitude = rows & rows.dtype.type((1 << (8 * rows.dtype.itemsize - 1)) - 1)
        broken = np.flatnonzero(((rows & exponent) == exponent).any(axis=1))
        for i in broken:
            found.add("E601", f"{place} row {i}", "not finite")
        zero = np.flatnonzero(~magnitude.any(axis=1))
        for i in zero:
            found.add("E602", f"{place} row {i}", "zero in every channel")
        said = shard.manifest["values"][name]  # 5.2
        infinite = int((magnitude[broken].max(axis=1) == exponent).sum())
        counts = {"not_finite": len(broken), "zero": len(zero), "infinite": infinite}
        same = {"infinite": 0} | said == counts
        found.check(same, "E604", shard.path("shard.json"), f"{name}: {said}")
        seen: dict[bytes, int] = {}
        for i, row in enumerate(rows):
            first = seen.setdefault(row.tobytes(), i)
            if keys[first][1] != keys[i][1] and magnitude[i].any():
                found.add("E603", f"{place} row {i}", f"the bits of row {first}")
    for one, other in itertools.combinations(sorted(bits), 2):
        if bits[one].shape == bits[other].shape and bits[one].dtype == bits[other].dtype:
            same = (bits[one] == bits[other]).all(axis=1)
            for i in np.flatnonzero(same):
                if not one_place(hooks[one], hooks[other], keys[i][0]):
                    found.add("E603", shard.path(f"acts.zarr/{one} row {i}"), f"that of {other}")


def one_place(one: Json, other: Json, position: int) -> bool:  # 3.1
    """Return whether two hooks are one place by definition, for a row of a position."""
    first, second = sorted((one, other), key=lambda hook: KINDS.index(hook["kind"]))
    kinds, gap = (first["kind"], second["kind"]), second["layer"] - first["layer"]
    if kinds == ("resid_pre", "resid_post"):
        return bool(gap == -1)
    if kinds == ("embed", "resid_pre"):
        return bool(second["layer"] == 0)
    return bool(
        gap == 0 and (kinds == ("resid_mid", "mlp_in") or (kinds == ("z", "v") and not position))
    )
