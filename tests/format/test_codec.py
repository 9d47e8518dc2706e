"""The chunk codec: bit-exact for every pattern, and closed to hostile frames."""

import contextlib
import struct
from concurrent.futures import ThreadPoolExecutor

import numcodecs.blosc
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from actds.format.codec import (
    MAX_BLOCK_NBYTES,
    CodecError,
    block_nbytes,
    crc32c,
    decode_chunk,
    encode_chunk,
)

MODES = ("huffman", "zstd", "raw")


def activations(n_rows, d_model, seed=0):
    """bf16 bits of Gaussians whose channels differ in scale, as those of a residual stream do."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.standard_normal(d_model, dtype=np.float32))
    values = rng.standard_normal((n_rows, d_model), dtype=np.float32) * scale
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def decoded(frame, like):
    out = np.full_like(like, 0x5A5A)
    decode_chunk(frame, out)
    return out


@pytest.mark.parametrize("mode", MODES)
def test_every_bf16_pattern_survives(mode):
    bits = np.arange(65536, dtype=np.uint16)
    assert np.array_equal(decoded(encode_chunk(bits, mode=mode), bits), bits)


@settings(deadline=None, max_examples=60)
@given(
    bits=hnp.arrays(np.uint16, hnp.array_shapes(min_dims=1, max_dims=2, max_side=700)),
    mode=st.sampled_from(MODES),
)
def test_any_bits_come_back_exactly(bits, mode):
    assert np.array_equal(decoded(encode_chunk(bits, mode=mode), bits), bits)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32), n_items=st.integers(1, 400_000), itemsize=st.sampled_from((2, 4))
)
def test_large_chunks_come_back_exactly_from_c_blosc_too(seed, n_items, itemsize):
    bits = np.random.default_rng(seed).integers(0, 1 << 10, n_items).astype(f"<u{itemsize}") << 4
    frame = encode_chunk(bits, itemsize=itemsize)
    assert len(frame) <= bits.nbytes + 16
    assert np.array_equal(decoded(frame, bits), bits)
    assert numcodecs.blosc.decompress(frame) == bits.tobytes()


@pytest.mark.parametrize("shape", [(256, 2048), (1024, 576), (251, 2003), (64, 2048), (1, 1)])
@pytest.mark.parametrize("kind", ["activations", "constant", "padded", "sparse", "noise"])
def test_kinds_of_chunks_come_back_exactly(shape, kind):
    rng = np.random.default_rng(1)
    bits = activations(*shape)
    if kind == "constant":
        bits[:] = 0x8000
    elif kind == "padded":
        bits[len(bits) // 3 :] = 0x7FC0
    elif kind == "sparse":
        bits[rng.random(shape) < 0.9] = 0
    elif kind == "noise":
        bits = rng.integers(0, 65536, shape).astype(np.uint16)
    assert np.array_equal(decoded(encode_chunk(bits), bits), bits)


def test_activations_reach_the_byte_plane_limit():
    bits = activations(256, 2048)
    share = np.bincount((bits >> 8).reshape(-1), minlength=256) / bits.size
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
    limit = 16 / (8 + entropy)
    assert bits.nbytes / len(encode_chunk(bits)) > 0.985 * limit
    # The tail block is stored unsplit: without even division this shape loses more than 1 %.
    odd = activations(1024, 576)
    assert odd.nbytes / len(encode_chunk(odd)) > 0.985 * limit


def test_constant_and_padded_chunks_are_smaller_than_entropy_coding():
    constant = np.full((256, 2048), 0x7FC0, np.uint16)
    assert len(encode_chunk(constant)) < 1000
    padded = activations(256, 2048)
    padded[128:] = 0x7FC0
    half = len(encode_chunk(padded[:128]))
    assert len(encode_chunk(padded)) < 1.02 * half


def test_repeated_rows_are_no_larger_than_plain_zstd():
    values = np.random.default_rng(0).integers(0, 1 << 16, 20).astype(np.uint16)
    row = values[np.random.default_rng(1).integers(0, 20, 2048)]
    repeated = np.tile(row, (256, 1))
    assert len(encode_chunk(repeated)) <= len(encode_chunk(repeated, mode="zstd"))


def test_raw_frames_are_copies():
    bits = activations(64, 64)
    frame = encode_chunk(bits, mode="raw")
    assert frame[16:] == bits.tobytes()
    assert numcodecs.blosc.decompress(frame) == bits.tobytes()


def test_frames_of_c_blosc_are_read():
    bits = activations(256, 2048)
    frame = numcodecs.blosc.compress(bits, b"zstd", 1, numcodecs.blosc.SHUFFLE, MAX_BLOCK_NBYTES)
    assert np.array_equal(decoded(frame, bits), bits)


@pytest.mark.parametrize(("nbytes", "itemsize"), [(1 << 20, 2), (1024 * 576 * 2, 2), (768, 4)])
def test_blocks_are_equal_and_bounded(nbytes, itemsize):
    block = block_nbytes(nbytes, itemsize)
    assert block <= MAX_BLOCK_NBYTES
    assert nbytes % block == 0
    assert block % itemsize == 0


def test_threads_do_not_share_state():
    chunks = [activations(64, 512, seed) for seed in range(32)]
    alone = [encode_chunk(chunk) for chunk in chunks]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encode_chunk, chunks)) == alone
        assert all(map(np.array_equal, pool.map(decoded, alone, chunks), chunks))


def test_refuses_chunks_it_cannot_encode():
    for items in (
        np.zeros(0, np.uint16),
        np.zeros((4, 4), np.uint16)[:, ::2],
        np.zeros(3, np.uint8),
    ):
        with pytest.raises(ValueError):
            encode_chunk(items)
    with pytest.raises(ValueError, match="itemsize"):
        encode_chunk(np.zeros(8, np.uint64), itemsize=8)
    with pytest.raises(ValueError, match="mode"):
        encode_chunk(np.zeros(8, np.uint16), mode="lz4")


BITS = activations(256, 1024)  # 512 KiB: two blocks of two streams


def patched(offset, form, *values):
    frame = bytearray(encode_chunk(BITS))
    struct.pack_into(form, frame, offset, *values)
    return bytes(frame)


def _swapped_starts():
    """Two blocks that share one place: a decoder reads the first block's bytes twice."""
    first, _ = struct.unpack_from("<2i", encode_chunk(BITS), 16)
    return patched(16, "<2i", first, first)


def _overlapping_starts():
    first, second = struct.unpack_from("<2i", encode_chunk(BITS), 16)
    return patched(16, "<2i", first, second - 8)


def _oversized_stream():
    """A first plane one byte longer than its place, everything else within its bounds."""
    body = struct.pack("<i", 2049) + bytes(2049) + struct.pack("<i", 9) + bytes(9)
    head = struct.pack("<BBBBiii", 2, 1, 0x81, 2, 4096, 4096, 20 + len(body))
    frame = head + struct.pack("<i", 20) + body
    return frame, 4096


def _zstd_bomb():
    """A sound frame around a zstd stream that unpacks to far more than its plane."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    body = struct.pack("<i", len(bomb)) + bomb
    head = struct.pack("<BBBBiii", 2, 1, 0x91, 2, 4096, 4096, 20 + len(body))
    return head + struct.pack("<i", 20) + body, 4096


ATTACKS = {
    "empty": b"",
    "header_only": encode_chunk(BITS)[:15],
    "truncated": encode_chunk(BITS)[:-1],
    "truncated_and_relabelled": patched(12, "<i", 1000)[:1000],
    "trailing_bytes": encode_chunk(BITS) + b"\0",
    "nbytes_smaller": patched(4, "<i", BITS.nbytes - 2),
    "nbytes_larger": patched(4, "<i", BITS.nbytes + 2),
    "nbytes_huge": patched(4, "<i", 2**31 - 1),
    "nbytes_negative": patched(4, "<i", -1),
    "cbytes_smaller": patched(12, "<i", 100),
    "cbytes_larger": patched(12, "<i", 2**31 - 1),
    "blocksize_zero": patched(8, "<i", 0),
    "blocksize_negative": patched(8, "<i", -262144),
    "blocksize_tiny": patched(8, "<i", 2),
    "blocksize_odd": patched(8, "<i", 1001),
    "blocksize_larger_than_chunk": patched(8, "<i", BITS.nbytes * 2),
    "version": patched(0, "<B", 3),
    "coder_version": patched(1, "<B", 2),
    "bitshuffle": patched(2, "<B", 0x84),
    "no_shuffle": patched(2, "<B", 0x80),
    "reserved_flag": patched(2, "<B", 0x89),
    "another_compressor": patched(2, "<B", 0x21),
    "memcpyed_but_short": patched(2, "<B", 0x83),
    "typesize_zero": patched(3, "<B", 0),
    "typesize_255": patched(3, "<B", 255),
    "block_before_the_frame": patched(16, "<i", -4),
    "block_in_the_header": patched(16, "<i", 0),
    "block_past_the_end": patched(20, "<i", 2**31 - 8),
    "block_twice": _swapped_starts(),
    "blocks_overlap": _overlapping_starts(),
    "stream_negative": patched(24, "<i", -1),
    "stream_empty": patched(24, "<i", 0),
    "stream_larger_than_plane": patched(24, "<i", MAX_BLOCK_NBYTES // 2 + 1),
    "stream_past_the_end": patched(24, "<i", 2**31 - 1),
    "stream_runs_into_the_next_block": patched(24, "<i", MAX_BLOCK_NBYTES // 2 - 1),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_refuses_hostile_frame_before_the_decoder_sees_it(name, monkeypatch):
    def called(*_):
        raise AssertionError("the C decoder was called")

    monkeypatch.setattr(numcodecs.blosc, "decompress", called)
    out = np.full_like(BITS, 0x5A5A)
    with pytest.raises(CodecError):
        decode_chunk(ATTACKS[name], out, itemsize=2)
    assert (out == 0x5A5A).all()


def test_refuses_stream_that_is_longer_than_its_plane():
    frame, nbytes = _oversized_stream()
    with pytest.raises(CodecError, match="a stream of 2049 bytes"):
        decode_chunk(frame, np.empty(nbytes, np.uint8))


def test_refuses_zstd_stream_larger_than_its_plane():
    frame, nbytes = _zstd_bomb()
    guard = np.full(nbytes + 64, 0xA5, np.uint8)
    with pytest.raises(CodecError, match="do not decode"):
        decode_chunk(frame, guard[:nbytes])
    assert (guard[nbytes:] == 0xA5).all()


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_flipped_bytes_never_escape_as_another_error(data):
    frame = bytearray(encode_chunk(BITS[:8]))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    guard = np.full(BITS[:8].nbytes + 64, 0xA5, np.uint8)
    with contextlib.suppress(CodecError):
        decode_chunk(bytes(frame), guard[:-64])
    assert (guard[-64:] == 0xA5).all()


def test_refuses_another_item_size():
    frame = encode_chunk(BITS)
    with pytest.raises(CodecError, match="items of 2 bytes"):
        decode_chunk(frame, np.empty_like(BITS), itemsize=4)


def test_refuses_read_only_output():
    with pytest.raises(ValueError, match="read-only"):
        decode_chunk(encode_chunk(BITS), bytes(BITS.nbytes))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, "u1")])
def test_crc32c_is_castagnoli_for_any_buffer(kind):
    assert crc32c(kind(b"123456789")) == 0xE3069283
