"""Chunk frames: 16- and 32-bit floats as standard blosc frames, and their bounded decoding.

The frames are ordinary blosc 1 frames (zstd, byte shuffle), so any zarr reader opens them. Only
the *encoder* is special: it knows that the low byte of a float is noise and stores it as it is,
and that the high byte has skewed values but no repeats, so an entropy coder is all it needs.
"""

from __future__ import annotations

import struct
import threading
from functools import cache
from typing import Any, Literal

import google_crc32c
import numpy as np
import numpy.typing as npt
import zstandard

from actds.store import buffers

MAX_BLOCK_NBYTES = 262_144
"""Largest block of a frame; half of it, one byte plane of bf16, is exactly one zstd block."""

Mode = Literal["huffman", "raw", "zstd"]
Bytes = npt.NDArray[np.uint8]
BytesLike = bytes | bytearray | memoryview | npt.NDArray[Any]
"""What holds bytes: one C-contiguous block."""

_HEADER = struct.Struct("<BBBBiii")
_SIZE = struct.Struct("<i")
_FORMAT_VERSION, _ZSTD_VERSION = 2, 1
_SHUFFLE, _MEMCPYED, _DONT_SPLIT, _ZSTD = 0x01, 0x02, 0x10, 4 << 5
_MIN_SPLIT_ITEMS = 128  # c-blosc never splits a block of fewer items, nor the shorter last block
_N_SAMPLES, _MAX_NOISE_COUNT = 512, 16
_ZSTD_MAGIC, _ZSTD_MIN_NBYTES, _ZSTD_RLE = b"\x28\xb5\x2f\xfd", 9, 1
_MAX_ZSTD_BLOCKS = 1 << 16  # a block may be empty: without a limit, each of them costs time


class CodecError(ValueError):
    """A frame that is damaged, hostile, or not of the form that the format allows.

    Spec: 0.1 section 4.2.
    """


class _Coders(threading.local):
    """One set of compressors per thread: zstd contexts cannot be shared."""

    def __init__(self) -> None:
        # Measured: min_match 7 with a 64-entry hash finds next to no match and costs next to
        # nothing, so zstd is left with its Huffman stage; target_length must stay 0, because
        # any other value under STRATEGY_FAST switches literal compression off.
        huffman = zstandard.ZstdCompressionParameters(
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            strategy=zstandard.STRATEGY_FAST,
        )
        self.huffman = zstandard.ZstdCompressor(compression_params=huffman)
        self.zstd = zstandard.ZstdCompressor(level=1)


_coders = _Coders()


def crc32c(data: BytesLike) -> int:
    """Return the CRC-32C (Castagnoli) of bytes.

    Spec: 0.1 section 4.2.
    """
    if isinstance(data, bytes):
        return int(google_crc32c.value(data))
    # google_crc32c refuses memoryview and bytearray, and takes a numpy array without copying.
    return int(google_crc32c.value(np.frombuffer(data, np.uint8)))


def block_nbytes(nbytes: int, itemsize: int) -> int:
    """Return the block size of a frame over ``nbytes`` bytes of ``itemsize``-byte items.

    Blocks are equal and at most ``MAX_BLOCK_NBYTES`` where the number of items allows: c-blosc
    stores a shorter last block unsplit, and that costs 1.6 % of the ratio (measured).

    Spec: 0.1 section 4.2.
    """
    n_items = nbytes // itemsize
    fewest = -(-nbytes // MAX_BLOCK_NBYTES)
    for n_blocks in range(fewest, 2 * fewest + 1):
        if n_items % n_blocks == 0:
            return nbytes // n_blocks
    return -(-n_items // fewest) * itemsize


def encode_chunk(items: npt.NDArray[Any], *, itemsize: int = 2, mode: Mode = "huffman") -> bytes:
    """Return one chunk as a standard blosc 1 frame (zstd, byte shuffle).

    Args:
        items: as for ``encode_into``.
        itemsize: as for ``encode_into``.
        mode: as for ``encode_into``.

    Returns:
        The frame, at most ``items.nbytes + 16`` bytes.

    Raises:
        ValueError: the chunk is empty, not contiguous, or no whole number of items.

    Spec: 0.1 section 4.2.
    """
    out = buffers.of_thread("frame", frame_capacity(items.nbytes, itemsize))
    return out[: encode_into(items, out, itemsize=itemsize, mode=mode)].tobytes()


def frame_capacity(nbytes: int, itemsize: int) -> int:
    """Return the bytes of a buffer in which a chunk of so many bytes can be encoded."""
    n_blocks = 2 * -(-nbytes // MAX_BLOCK_NBYTES)  # at most: see block_nbytes
    return 16 + nbytes + (4 + 4 * itemsize) * n_blocks


def top_bytes(items: npt.NDArray[Any], itemsize: int) -> Bytes:
    """Return the top byte of every item of a chunk, valid until this thread's next chunk."""
    flat = items.reshape(-1).view(np.dtype(f"<u{itemsize}"))
    tops = buffers.of_thread("plane", flat.size)
    np.right_shift(flat, 8 * (itemsize - 1), out=tops, casting="unsafe")
    return tops


def encode_into(
    items: npt.NDArray[Any],
    out: Bytes,
    *,
    itemsize: int = 2,
    mode: Mode = "huffman",
    tops: Bytes | None = None,
) -> int:
    """Encode one chunk at the begin of a buffer; return the bytes of the frame.

    Args:
        items: the chunk, C-contiguous, any shape: ``uint16`` or ``uint32`` bit patterns, or their
            bytes as ``uint8``.
        out: the buffer, of at least ``frame_capacity`` bytes; what is past the frame is undefined.
        itemsize: bytes of one item, 2 (bfloat16, float16) or 4 (float32).
        mode: ``huffman`` stores noisy byte planes as they are and the others entropy coded;
            ``zstd`` is plain zstd level 1 on every plane; ``raw`` copies the chunk.
        tops: the ``top_bytes`` of the chunk, where the caller has them.

    Returns:
        The size of the frame, at most ``items.nbytes + 16``.

    Raises:
        ValueError: the chunk is empty, not contiguous, or no whole number of items.

    Spec: 0.1 section 4.2.
    """
    if itemsize not in (2, 4):
        raise ValueError(f"itemsize is {itemsize}; expected 2 or 4")
    if mode not in ("huffman", "raw", "zstd"):
        raise ValueError(f"mode is {mode!r}; expected 'huffman', 'raw' or 'zstd'")
    if not items.flags.c_contiguous:
        raise ValueError("the chunk is not C-contiguous")
    if not 0 < items.nbytes < 2**31 - 16 or items.nbytes % itemsize:
        raise ValueError(f"a chunk of {items.nbytes} bytes; expected a multiple of {itemsize}")
    nbytes = items.nbytes
    block = block_nbytes(nbytes, itemsize)
    if mode == "raw" or block // itemsize < _MIN_SPLIT_ITEMS:
        return _raw_frame(items, itemsize, block, out)

    flat = items.reshape(-1).view(np.dtype(f"<u{itemsize}"))
    # The top bytes of all blocks at once: each call of numpy gives other threads a turn.
    tops = top_bytes(items, itemsize) if tops is None else tops
    n_blocks = -(-nbytes // block)
    starts, position, step = [], 16 + 4 * n_blocks, block // itemsize
    for first in range(0, flat.size, step):
        starts.append(position)
        part = flat[first : first + step]
        if part.size == step:
            top = tops[first : first + step]
            position = _encode_planes(part, top, itemsize, mode, out, position)
        else:
            position = _encode_last(part, itemsize, mode, out, position)
    if position >= nbytes + 16:
        return _raw_frame(items, itemsize, block, out)
    flags = _SHUFFLE | _ZSTD
    _HEADER.pack_into(
        out.data, 0, _FORMAT_VERSION, _ZSTD_VERSION, flags, itemsize, nbytes, block, position
    )
    struct.pack_into(f"<{n_blocks}i", out.data, 16, *starts)
    return position


def _raw_frame(items: npt.NDArray[Any], itemsize: int, block: int, out: Bytes) -> int:
    flags, nbytes = _SHUFFLE | _MEMCPYED | _ZSTD, items.nbytes
    size = nbytes + 16
    _HEADER.pack_into(
        out.data, 0, _FORMAT_VERSION, _ZSTD_VERSION, flags, itemsize, nbytes, block, size
    )
    np.copyto(out[16:size], items.reshape(-1).view(np.uint8))
    return size


def _encode_planes(
    part: npt.NDArray[Any], top: Bytes, itemsize: int, mode: Mode, out: Bytes, position: int
) -> int:
    """Append one block, split in its byte planes, lowest first; return where it ends."""
    for index in range(itemsize - 1):
        # A plane that is stored as it is goes straight to its place: no second copy.
        plane = out[position + 4 : position + 4 + part.size]
        if index == 0:
            np.copyto(plane, part, casting="unsafe")  # the lowest byte: a third faster than a shift
        else:
            np.right_shift(part, 8 * index, out=plane, casting="unsafe")
        stream = None if mode == "huffman" and _is_noise(plane) else _compressed(plane, mode)
        if stream is None:
            _SIZE.pack_into(out.data, position, part.size)
            position += 4 + part.size
        else:
            position = _append(out, position, stream)
    return _append(out, position, _compressed(top, mode) or top.data)


def _encode_last(
    part: npt.NDArray[Any], itemsize: int, mode: Mode, out: Bytes, position: int
) -> int:
    """Append the shorter last block, which blosc stores as one stream; return where it ends."""
    shuffled = np.ascontiguousarray(part.view(np.uint8).reshape(-1, itemsize).T).reshape(-1)
    return _append(out, position, _compressed(shuffled, mode) or shuffled.data)


def _is_noise(plane: Bytes) -> bool:
    """Say whether no byte value is frequent, by 512 samples: 16 of one is 8 times its share.

    Uniform noise has 16 of one value about once in 10^10. A plane too small to sample is tried.
    """
    # An odd stride: an even one would meet the same few channels of every row.
    sample = plane[:: max(1, plane.size // _N_SAMPLES - 1) | 1][:_N_SAMPLES]
    return sample.size == _N_SAMPLES and int(np.bincount(sample).max()) < _MAX_NOISE_COUNT


def _compressed(plane: Bytes, mode: Mode) -> bytes | None:
    """Return the stream of a plane; None where the plane itself is smaller.

    Constant, padded and sparse planes need no other coder: measured, the runs that count are
    found with these parameters too, and plain zstd level 1 was never smaller.
    """
    coder = _coders.zstd if mode == "zstd" else _coders.huffman
    stream: bytes = coder.compress(plane.data)
    return stream if len(stream) < plane.size else None


def _append(out: Bytes, position: int, stream: bytes | memoryview) -> int:
    end = position + 4 + len(stream)
    _SIZE.pack_into(out.data, position, len(stream))
    out.data[position + 4 : end] = stream
    return end


def decode_chunk(frame: BytesLike, out: BytesLike, *, itemsize: int | None = None) -> None:
    """Decode one frame into a buffer of exactly the size that is expected.

    Every field of the frame is checked before the C decoder sees it: sizes against the buffers,
    and every stream of every block against the bounds of the frame and of its neighbours. No byte
    of a frame stands for nothing: blocks fill it, and a coded stream is one zstd frame.

    Args:
        frame: the whole frame and nothing else.
        out: writable, C-contiguous; its size is the expected number of bytes.
        itemsize: the expected item size in bytes; None takes 2 and 4.

    Raises:
        CodecError: the frame is not a sound blosc 1 frame of that size.

    Spec: 0.1 section 4.2.
    """
    source = np.frombuffer(frame, np.uint8)
    target = np.frombuffer(out, np.uint8)
    if not target.flags.writeable:
        raise ValueError("the output buffer is read-only")
    flags, typesize, block = _check_header(source, target.size)
    if itemsize is not None and typesize != itemsize:
        raise CodecError(f"items of {typesize} bytes; expected {itemsize}")
    if flags & _MEMCPYED:
        target[:] = source[16:]
        return
    _check_streams(source, target.size, flags, typesize, block)
    try:
        _blosc().decompress(source, target)
    except (RuntimeError, ValueError) as error:
        raise CodecError(f"the streams do not decode: {error}") from None


def copied_items(frame: memoryview, nbytes: int, itemsize: int) -> memoryview | None:
    """Return the items of a frame that copies them; None for one that has to be decoded.

    Args:
        frame: the whole frame and nothing else.
        nbytes: the expected number of bytes.
        itemsize: the expected item size in bytes.

    Spec: 0.1 section 4.2.
    """
    if len(frame) != nbytes + 16 or not frame[2] & _MEMCPYED:
        return None
    try:
        _, typesize, _ = _check_header(np.frombuffer(frame, np.uint8), nbytes)
    except CodecError:
        return None  # decoding says what is wrong with it
    return frame[16:] if typesize == itemsize else None


@cache
def _blosc() -> Any:
    import numcodecs.blosc

    # zarr does the same at import: the pool inside c-blosc is global, and not safe beside ours.
    numcodecs.blosc.use_threads = False
    return numcodecs.blosc


def _check_header(source: Bytes, expected_nbytes: int) -> tuple[int, int, int]:
    """Return flags, item size and block size of a frame whose header is sound."""
    if source.size < 16:
        raise CodecError(f"a frame of {source.size} bytes; expected at least 16")
    version, coder, flags, typesize, nbytes, block, cbytes = _HEADER.unpack_from(source.data)
    if (version, coder) != (_FORMAT_VERSION, _ZSTD_VERSION):
        raise CodecError(f"frame version {version}.{coder}; expected 2.1")
    if flags & ~(_MEMCPYED | _DONT_SPLIT) != _SHUFFLE | _ZSTD:
        raise CodecError(f"flags {flags:#04x}; expected zstd with byte shuffle")
    if typesize not in (2, 4):
        raise CodecError(f"items of {typesize} bytes; expected 2 or 4")
    if nbytes != expected_nbytes or nbytes <= 0 or nbytes % typesize:
        raise CodecError(f"the frame claims {nbytes} bytes; expected {expected_nbytes}")
    if cbytes != source.size or cbytes > nbytes + 16:
        raise CodecError(f"the frame claims to be {cbytes} bytes long; it is {source.size}")
    if not 0 < block <= nbytes or block % typesize or (block < 128 and block != nbytes):
        raise CodecError(f"blocks of {block} bytes; expected whole items of at most {nbytes}")
    if flags & _MEMCPYED and cbytes != nbytes + 16:
        raise CodecError(f"a copied frame of {cbytes} bytes; expected {nbytes + 16}")
    return flags, typesize, block


def _check_streams(source: Bytes, nbytes: int, flags: int, typesize: int, block: int) -> None:
    """Check that blocks and streams lie in the frame, apart from each other, and fit the output."""
    n_blocks = -(-nbytes // block)
    head = 16 + 4 * n_blocks
    if head > source.size:
        raise CodecError(f"{n_blocks} blocks; a frame of {source.size} bytes cannot hold them")
    starts = struct.unpack_from(f"<{n_blocks}i", source.data, 16)
    can_split = not flags & _DONT_SPLIT and block // typesize >= _MIN_SPLIT_ITEMS
    # c-blosc writes blocks in the order in which its threads finish: sort, then compare.
    end = head
    for index in sorted(range(n_blocks), key=starts.__getitem__):
        size = min(block, nbytes - index * block)
        n_streams = typesize if can_split and size == block else 1
        if starts[index] != end:
            raise CodecError(f"block {index} starts at {starts[index]}; expected {end}")
        end = _check_block(source, end, n_streams, size // n_streams)
    if end != source.size:
        raise CodecError(f"the blocks end at {end}; the frame has {source.size} bytes")


def _check_block(source: Bytes, position: int, n_streams: int, stream_nbytes: int) -> int:
    for _ in range(n_streams):
        if position > source.size - 4:
            raise CodecError(f"a stream starts at {position} of {source.size} bytes")
        (size,) = struct.unpack_from("<i", source.data, position)
        position += 4
        if not 0 < size <= min(stream_nbytes, source.size - position):
            raise CodecError(f"a stream of {size} bytes at {position} of {source.size}")
        if size < stream_nbytes:
            _check_zstd(source[position : position + size].data, position)
        position += size
    return position


def _check_zstd(stream: memoryview, at: int) -> None:
    """Check that a stream is one zstd frame, from its first byte to its last (RFC 8878, 3.1.1).

    A decoder takes several frames, and frames to skip, for one stream: bytes that no reader sees.
    """
    if bytes(stream[:4]) != _ZSTD_MAGIC or len(stream) < _ZSTD_MIN_NBYTES:
        raise CodecError(f"the stream at {at} begins with no zstd frame")
    described = stream[4]
    single = described >> 5 & 1
    position = 6 - single + (0, 1, 2, 4)[described & 3] + (single, 2, 4, 8)[described >> 6]
    last = n_blocks = 0
    while not last:
        n_blocks += 1
        if n_blocks > _MAX_ZSTD_BLOCKS:
            raise CodecError(f"the zstd frame at {at} has more than {_MAX_ZSTD_BLOCKS} blocks")
        header = int.from_bytes(stream[position : position + 3], "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        position += 3 + (1 if kind == _ZSTD_RLE else size)
        if position > len(stream):
            raise CodecError(f"the zstd frame at {at} is cut")
    position += 4 * (described >> 2 & 1)
    if position != len(stream):
        raise CodecError(f"{len(stream)} bytes at {at}; expected one zstd frame, of {position}")
