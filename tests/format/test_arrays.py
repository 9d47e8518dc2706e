"""One zarr shard per hook: written whole, read in ranges, refused when damaged."""

import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actds.errors import ActdsError
from actds.format import canonical
from actds.format.arrays import (
    DTYPES,
    ArrayReader,
    array_metadata,
    as_ml_dtypes,
    chunk_rows,
    from_torch,
    group_metadata,
    to_torch,
)
from actds.format.codec import crc32c
from actds.format.encoding import encode_array
from actds.store.local import LocalFile


def random_bits(n_rows, d_model, dtype="bfloat16", seed=0):
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype].bits
    return rng.integers(0, np.iinfo(kind).max, (n_rows, d_model), kind, endpoint=True)


def write(folder, bits, dtype="bfloat16", **options):
    """Write an array as an actds shard holds it; return the encoded array."""
    encoded = encode_array(bits, dtype, **options)
    (folder / "c/0").mkdir(parents=True, exist_ok=True)
    (folder / "zarr.json").write_bytes(encoded.metadata)
    (folder / "c/0/0").write_bytes(b"".join(encoded.parts))
    return encoded


def reader(folder, metadata=None):
    metadata = (folder / "zarr.json").read_bytes() if metadata is None else metadata
    return ArrayReader(metadata, LocalFile(folder / "c/0/0", "a/b"), "a/b")


def test_every_bf16_pattern_survives(tmp_path):
    bits = np.arange(65536, dtype=np.uint16).reshape(-1, 96 // 3)
    write(tmp_path, bits)
    with reader(tmp_path) as array:
        assert np.array_equal(array.read_all(), bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("n_rows", "d_model"), [(1, 1), (3, 7), (1024, 576), (3000, 576), (700, 2048)]
)
def test_arrays_come_back_exactly(tmp_path, dtype, raw, n_rows, d_model):
    bits = random_bits(n_rows, d_model, dtype)
    write(tmp_path, bits, dtype, raw=raw)
    if raw:
        assert (tmp_path / "c/0/0").stat().st_size > bits.nbytes
    with reader(tmp_path) as array:
        assert (array.n_rows, array.d_model, array.dtype) == (n_rows, d_model, dtype)
        assert array.nbytes == bits.nbytes
        assert np.array_equal(array.read_all(), bits)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_range_and_any_rows_come_back_exactly(tmp_path_factory, data):
    n_rows, d_model = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 9))
    bits = random_bits(n_rows, d_model, seed=data.draw(st.integers(0, 99)))
    folder = tmp_path_factory.mktemp("array")
    write(folder, bits)
    with reader(folder) as array:
        start = data.draw(st.integers(0, n_rows))
        stop = data.draw(st.integers(start, n_rows))
        assert np.array_equal(array.read(start, stop), bits[start:stop])
        rows = data.draw(st.lists(st.integers(0, n_rows - 1), max_size=80))
        assert np.array_equal(array.gather(rows), bits[rows])


def test_ranges_across_chunks_come_back_exactly(tmp_path):
    bits = random_bits(2500, 2048)
    write(tmp_path, bits)
    with reader(tmp_path) as array:
        assert array.rows_per_chunk == 256
        assert array.n_chunks == 10
        for start, stop in ((0, 2500), (0, 0), (255, 257), (300, 400), (256, 512), (100, 2499)):
            assert np.array_equal(array.read(start, stop), bits[start:stop])
        assert np.array_equal(array.read_chunks(8, 10), bits[2048:])
        out = np.empty((512, 2048), np.uint16)
        assert array.read_chunks(3, 5, out) is out
        assert np.array_equal(out, bits[768:1280])
        rows = np.random.default_rng(0).integers(0, 2500, 4000)
        assert np.array_equal(array.gather(rows), bits[rows])


def test_threads_read_side_by_side(tmp_path):
    bits = random_bits(4000, 1024)
    with ThreadPoolExecutor(4) as pool:
        pooled = encode_array(bits, "bfloat16", pool=pool)
        assert pooled == write(tmp_path, bits)
        with reader(tmp_path) as array:
            assert np.array_equal(array.read_all(pool), bits)
            starts = list(range(0, 4000, 123))
            for start, got in zip(
                starts, pool.map(lambda s: array.read(s, 4000), starts), strict=True
            ):
                assert np.array_equal(got, bits[start:])


def test_answers_belong_to_the_caller(tmp_path):
    bits = random_bits(2500, 2048)
    write(tmp_path, bits)
    with reader(tmp_path) as array:
        answers = [array.read(5, 9), array.gather([5, 6, 7, 8]), array.read(5, 9)]
        for answer in answers:
            assert np.array_equal(answer, bits[5:9])
            answer[:] = 0
        assert np.array_equal(array.read(5, 9), bits[5:9])


@pytest.mark.parametrize("raw", [False, True])
def test_arrays_that_are_read_in_turns_keep_apart(tmp_path, raw):
    """What ``by_chunk`` yields, and its chunks to come, outlast other reads of the thread."""
    names = ["a", "b"]
    bits = {name: random_bits(1500, 2048, seed=i) & 0x0F07 for i, name in enumerate(names)}
    for name in names:
        write(tmp_path / name, bits[name], raw=raw)
    with reader(tmp_path / "a") as a, reader(tmp_path / "b") as b:
        every = np.arange(1500)
        for (low, high, of_a), (_, _, of_b) in zip(
            a.by_chunk(every), b.by_chunk(every), strict=True
        ):
            assert np.array_equal(b.read(3, 700), bits["b"][3:700])
            assert np.array_equal(a.gather([9, 1400]), bits["a"][[9, 1400]])
            assert np.array_equal(of_a, bits["a"][low:high])
            assert np.array_equal(of_b, bits["b"][low:high])


def test_last_chunk_is_padded_with_fill(tmp_path):
    """The file holds whole chunks: what stands past the end is NaN, as the metadata says."""
    bits = random_bits(300, 2048)
    encoded = write(tmp_path, bits)
    longer = json.loads(encoded.metadata)
    longer["shape"] = [512, 2048]
    with reader(tmp_path, canonical.dump(longer)) as array:
        assert (array.read(300, 512) == 0x7FC0).all()


@pytest.mark.parametrize(
    ("d_model", "itemsize", "rows"),
    [
        (2048, 2, 256),
        (576, 2, 1024),
        (4096, 2, 128),
        (2048, 4, 128),
        (1 << 30, 2, 1),
        (1, 2, 1 << 19),
    ],
)
def test_chunks_are_about_one_mebibyte(d_model, itemsize, rows):
    assert chunk_rows(d_model, itemsize) == rows


def test_metadata_is_canonical():
    for data in (group_metadata(), array_metadata(3000, 576, "bfloat16")):
        assert canonical.dump(canonical.parse(data, "zarr.json")) == data


def _changed(path, value):
    document = json.loads(array_metadata(3000, 576, "bfloat16"))
    *parents, last = path
    at = document
    for key in parents:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return canonical.dump(document)


SHARDING = ("codecs", 0, "configuration")
FORBIDDEN = {
    "zarr_v2": _changed(("zarr_format",), 2),
    "group": group_metadata(),
    "int16": _changed(("data_type",), "int16"),
    "data_type_no_string": _changed(("data_type",), {"name": "bfloat16"}),
    "another_float": _changed(("data_type",), "float16").replace(b'"typesize":2', b'"typesize":4'),
    "fill": _changed(("fill_value",), "0x7fc1"),
    "attributes": _changed(("attributes",), {"a": 1}),
    "extra_key": _changed(("storage_transformers",), []),
    "no_shape": _changed(("shape",), None),
    "three_axes": _changed(("shape",), [3, 1000, 576]),
    "no_rows": _changed(("shape",), [0, 576]),
    "negative_rows": _changed(("shape",), [-3000, 576]),
    "rows_as_bool": _changed(("shape",), [True, 576]),
    "two_shards": _changed(("chunk_grid", "configuration", "chunk_shape"), [2048, 576]),
    "key_encoding": _changed(("chunk_key_encoding", "configuration", "separator"), "."),
    "second_codec": _changed(("codecs",), [{"name": "bytes"}, {"name": "gzip"}]),
    "index_at_start": _changed((*SHARDING, "index_location"), "start"),
    "index_without_crc": _changed((*SHARDING, "index_codecs"), [{"name": "bytes"}]),
    "without_crc": _changed((*SHARDING, "codecs", 2), None),
    "big_endian": _changed((*SHARDING, "codecs", 0, "configuration", "endian"), "big"),
    "lz4": _changed((*SHARDING, "codecs", 1, "configuration", "cname"), "lz4"),
    "bitshuffle": _changed((*SHARDING, "codecs", 1, "configuration", "shuffle"), "bitshuffle"),
    "chunk_not_a_power_of_two": _changed((*SHARDING, "chunk_shape"), [1000, 576]),
    "chunk_too_large": _changed((*SHARDING, "chunk_shape"), [1 << 20, 576]),
    "chunk_of_part_of_a_row": _changed((*SHARDING, "chunk_shape"), [1024, 288]),
    "not_json": b"{",
    "not_canonical": json.dumps(json.loads(array_metadata(3000, 576, "bfloat16"))).encode(),
    "too_large": b" " * (1 << 17),
    "list": b"[]\n",
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_refuses_metadata_of_another_form(tmp_path, name):
    write(tmp_path, random_bits(3000, 576))
    with pytest.raises(ActdsError) as error:
        reader(tmp_path, FORBIDDEN[name])
    assert (error.value.code, error.value.place) == ("E108", "a/b")


def _with_index(entries, body=bytes(100)):
    index = struct.pack(f"<{len(entries)}Q", *entries)
    return body + index + struct.pack("<I", crc32c(index))


def damages(data):
    """Every way to damage a shard file of one hook with three chunks, by name."""
    index = list(struct.unpack("<6Q", data[-52:-4]))
    body = data[:-52]
    flipped = bytearray(data)
    flipped[index[2] + 5000] ^= 1
    return {
        "empty": b"",
        "short": data[:-1],
        "longer": data + b"\0",
        "front_cut": data[1:],
        "bit_in_a_chunk": bytes(flipped),
        "bit_in_the_index": data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
        "chunk_missing": _with_index([*index[:4], 2**64 - 1, 2**64 - 1], body),
        "chunk_twice": _with_index([*index[:2], *index[:2], *index[4:]], body),
        "chunks_swapped": _with_index([*index[2:4], *index[:2], *index[4:]], body),
        "chunk_huge": _with_index([*index[:5], 2**62], body),
        "chunk_empty": _with_index([0, 0, 0, index[1], *index[4:]], body),
        "gap": _with_index([*index[:4], index[4] + 4, index[5]], body + bytes(4)),
    }


@pytest.mark.parametrize("name", damages(bytes(5500) + bytes(52)))
def test_refuses_damaged_shard_file(tmp_path, name):
    write(tmp_path, random_bits(3000, 576))
    path = tmp_path / "c/0/0"
    path.write_bytes(damages(path.read_bytes())[name])
    with pytest.raises(ActdsError) as error, reader(tmp_path) as array:
        array.read_all()
    assert error.value.code == "E204"


def test_refuses_damaged_frame_under_a_right_checksum(tmp_path):
    bits = random_bits(4, 8)
    encoded = write(tmp_path, bits)
    frame = bytearray(encoded.parts[0][:-4])  # without its checksum
    struct.pack_into("<i", frame, 4, 1 << 30)
    index = struct.pack("<2Q", 0, len(frame) + 4)
    parts = (frame, struct.pack("<I", crc32c(frame)), index, struct.pack("<I", crc32c(index)))
    (tmp_path / "c/0/0").write_bytes(b"".join(parts))
    with reader(tmp_path) as array, pytest.raises(ActdsError, match="claims 1073741824 bytes"):
        array.read_all()


def test_refuses_absurd_row_count_before_it_allocates(tmp_path):
    write(tmp_path, random_bits(4, 8))
    with pytest.raises(ActdsError) as error:
        reader(tmp_path, array_metadata(2**47, 8, "bfloat16"))
    assert error.value.code == "E204"


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ActdsError) as error:
        reader(tmp_path, array_metadata(4, 8, "bfloat16"))
    assert (error.value.code, error.value.place) == ("E104", "a/b")
    (tmp_path / "c/0").mkdir(parents=True)
    (tmp_path / "c/0/0").symlink_to("0")  # a loop: nothing that can be opened
    with pytest.raises(ActdsError) as error:
        reader(tmp_path, array_metadata(4, 8, "bfloat16"))
    assert (error.value.code, error.value.place) == ("E104", "a/b")


def test_file_cut_while_open_is_damage(tmp_path):
    write(tmp_path, random_bits(3000, 576))
    with reader(tmp_path) as array:
        os.truncate(tmp_path / "c/0/0", 1000)
        with pytest.raises(ActdsError) as error:
            array.read_all()
    assert error.value.code == "E204"


def test_refuses_arguments_out_of_range(tmp_path):
    write(tmp_path, random_bits(10, 4))
    with reader(tmp_path) as array:
        for call in (
            lambda: array.read(0, 11),
            lambda: array.read(-1, 3),
            lambda: array.read(3, 2),
            lambda: array.read_chunks(0, 2),
            lambda: array.read(0, 2, np.empty((3, 4), np.uint16)),
            lambda: array.read(0, 2, np.empty((2, 4), np.int16)),
            lambda: array.read(0, 2, np.empty((2, 8), np.uint16)[:, ::2]),
            lambda: array.gather([10]),
            lambda: array.gather([-1]),
            lambda: array.gather([0.5]),
        ):
            with pytest.raises(ValueError):
                call()
    with pytest.raises(ValueError, match="closed"):
        array.read(0, 1)


def test_refuses_rows_it_cannot_encode():
    for rows, dtype in (
        (np.zeros((4, 4), np.uint16), "float32"),
        (np.zeros((4, 4), np.uint16), "int16"),
        (np.zeros((4, 4), np.float16), "float16"),
        (np.zeros(4, np.uint16), "bfloat16"),
        (np.zeros((0, 4), np.uint16), "bfloat16"),
        (np.zeros((4, 8), np.uint16)[:, ::2], "bfloat16"),
    ):
        with pytest.raises(ValueError):
            encode_array(rows, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_round_trip_keeps_every_bit_and_the_memory(dtype):
    torch = pytest.importorskip("torch")
    bits = random_bits(64, 1024, dtype)
    bits[: 65536 // 1024] = np.arange(65536, dtype=bits.dtype).reshape(-1, 1024)
    tensor = to_torch(bits, dtype)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.shape == bits.shape
    assert tensor.data_ptr() == bits.ctypes.data
    assert np.array_equal(from_torch(tensor), bits)
    assert np.array_equal(from_torch(tensor.t()), bits.T)


def test_values_are_those_of_torch():
    torch = pytest.importorskip("torch")
    bits = np.array([[0x3F80, 0xC000, 0x7F80, 0x0001]], np.uint16)
    assert as_ml_dtypes(bits).astype(np.float32).tolist() == to_torch(bits).float().tolist()
    assert to_torch(bits)[0, :2].tolist() == [1.0, -2.0]
    with pytest.raises(ValueError):
        as_ml_dtypes(bits, "float32")
    with pytest.raises(ValueError):
        to_torch(bits.astype(np.uint32))
    with pytest.raises(ValueError):
        from_torch(torch.zeros(3, dtype=torch.int64))
