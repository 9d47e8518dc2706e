"""What we write opens in other zarr implementations, and zarr-python knows bfloat16."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import ml_dtypes
import numcodecs
import numpy as np
import pytest
import tensorstore
import zarr
from test_arrays import reader, write
from zarr.storage import LocalStore

from actds import zarr_plugin
from actds.format.array_metadata import array_metadata
from actds.format.arrays import group_metadata
from actds.format.codec import MAX_BLOCK_NBYTES
from actds.zarr_plugin import BFloat16, FrameBlosc, FrameBloscCodec

BLOSC = {
    "name": "blosc",
    "configuration": {
        "cname": "zstd",
        "clevel": 1,
        "shuffle": "shuffle",
        "typesize": 2,
        "blocksize": MAX_BLOCK_NBYTES,
    },
}


def patterns():
    """All 65,536 patterns, rows of one value, rows of fill; two chunks and a padded third."""
    bits = np.random.default_rng(0).integers(0x3F00, 0x4100, (2500, 576)).astype(np.uint16)
    bits.reshape(-1)[:65536] = np.arange(65536)
    bits[1200:1300] = 0x8000
    bits[2400:] = 0x7FC0
    return bits


@pytest.fixture(scope="module", params=["huffman", "raw"])
def stored(request, tmp_path_factory):
    """Return the folder of one array that holds every pattern, and its bits."""
    folder = tmp_path_factory.mktemp("array")
    bits = patterns()
    write(folder, bits, raw=request.param == "raw")
    return folder, bits


@pytest.fixture
def our_encoder():
    zarr_plugin.register_codec()
    yield
    zarr_plugin.unregister_codec()


def create(folder, bits, compressors):
    """Write bits through zarr-python in the geometry of the format."""
    array = zarr.create_array(
        folder,
        shape=bits.shape,
        chunks=(1024, bits.shape[1]),
        shards=(-(-len(bits) // 1024) * 1024, bits.shape[1]),
        dtype=ml_dtypes.bfloat16,
        fill_value=float("nan"),
        compressors=compressors,
        # Without it zarr compares with the fill value, turns -0.0 to 0.0 and warns of NaN.
        config={"write_empty_chunks": True},
    )
    array[:] = bits.view(ml_dtypes.bfloat16)
    return array


def test_our_reader_returns_every_pattern(stored):
    folder, bits = stored
    with reader(folder) as array:
        assert np.array_equal(array.read_all(), bits)


def test_zarr_python_returns_every_pattern(stored):
    folder, bits = stored
    array = zarr.open_array(folder, mode="r")
    assert array.dtype == ml_dtypes.bfloat16
    assert np.isnan(array.fill_value)
    assert np.array_equal(array[:].view(np.uint16), bits)


def test_tensorstore_returns_every_pattern(stored):
    folder, bits = stored
    spec = {"driver": "zarr3", "kvstore": f"file://{folder}/"}
    values = tensorstore.open(spec, read=True).result().read().result()
    assert values.dtype == ml_dtypes.bfloat16
    assert np.array_equal(values.view(np.uint16), bits)


def test_zarrs_returns_every_pattern_without_a_plugin(stored):
    """The Rust implementation, given zarr.json and the store alone: no data type of ours."""
    internal = pytest.importorskip("zarrs._internal")
    folder, bits = stored
    metadata = (folder / "zarr.json").read_text()
    shard_shape = json.loads(metadata)["chunk_grid"]["configuration"]["chunk_shape"]
    everything = [slice(0, size) for size in bits.shape]
    pipeline = internal.CodecPipelineImpl(
        metadata, store_config=LocalStore(folder), validate_checksums=True
    )
    item = internal.ChunkItem("c/0/0", everything, shard_shape, everything, list(bits.shape))
    out = np.zeros_like(bits)
    pipeline.retrieve_chunks_and_apply_index([item], out)
    assert np.array_equal(out, bits)


def test_group_opens(tmp_path):
    write(tmp_path / "resid_post.10", patterns())
    (tmp_path / "zarr.json").write_bytes(group_metadata())
    group = zarr.open_group(tmp_path, mode="r")
    assert [name for name, _ in group.arrays()] == ["resid_post.10"]


def test_entry_point_names_our_data_type():
    (entry,) = entry_points(group="zarr.data_type", name="bfloat16")
    assert entry.load() is BFloat16


# zarr 3.1 collects the entry points of data types and never loads them.
LOADS_ENTRY_POINTS = tuple(map(int, zarr.__version__.split(".")[:2])) >= (3, 4)


@pytest.mark.standard
def test_fresh_process_opens_our_array(stored):
    folder, bits = stored
    code = "import sys, zarr; a = zarr.open_array(sys.argv[1], mode='r'); print(a.dtype, *a.shape)"
    if not LOADS_ENTRY_POINTS:
        code = f"import actds.zarr_plugin; {code}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["bfloat16", *map(str, bits.shape)]


def test_zarr_python_keeps_its_encoder_until_asked(tmp_path):
    array = create(tmp_path / "a", patterns(), [BLOSC, {"name": "crc32c"}])
    assert type(array.metadata.codecs[0].codecs[1]) is zarr.codecs.BloscCodec


def test_zarr_python_writes_through_our_encoder(tmp_path, our_encoder):
    bits = patterns()
    array = create(tmp_path / "a", bits, [BLOSC, {"name": "crc32c"}])
    assert type(array.metadata.codecs[0].codecs[1]) is FrameBloscCodec
    ours = write(tmp_path / "b", bits)
    # The padding of zarr-python's last chunk is the same fill, so the file is byte for byte ours.
    assert (tmp_path / "a/c/0/0").read_bytes() == b"".join(ours.parts)
    zarr_plugin.unregister_codec()
    assert np.array_equal(zarr.open_array(tmp_path / "a")[:].view(np.uint16), bits)


def test_other_blosc_configurations_stay_with_c_blosc(tmp_path, our_encoder):
    bits = patterns()
    default = {"name": "blosc", "configuration": {**BLOSC["configuration"], "clevel": 5}}
    ours = create(tmp_path / "a", bits, [default])
    zarr_plugin.unregister_codec()
    stock = create(tmp_path / "b", bits, [default])
    assert isinstance(ours.metadata.codecs[0].codecs[1], FrameBloscCodec)
    assert ours.nbytes_stored() == stock.nbytes_stored()


def test_numcodecs_counterpart(our_encoder):
    bits = patterns()
    config = {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1}
    codec = numcodecs.get_codec({**config, "blocksize": MAX_BLOCK_NBYTES})
    assert isinstance(codec, FrameBlosc)
    frame = codec.encode(bits)
    assert numcodecs.blosc.decompress(frame) == bits.tobytes()
    stock = numcodecs.blosc.Blosc("zstd", 1, 1, MAX_BLOCK_NBYTES)
    assert frame != stock.encode(bits)
    assert numcodecs.get_codec({**config, "blocksize": 0}).encode(bits) == numcodecs.blosc.Blosc(
        "zstd", 1, 1, 0
    ).encode(bits)
    zarr_plugin.unregister_codec()
    assert type(numcodecs.get_codec(config)) is numcodecs.blosc.Blosc


def bits_of(scalar):
    return int(np.asarray(scalar).view(np.uint16)[()])


@pytest.mark.parametrize(
    "bits", [0, 0x8000, 0x3F80, 1, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFC0]
)
def test_fill_values_round_trip_through_json(bits):
    kind = BFloat16()
    scalar = np.array(bits, np.uint16).view(ml_dtypes.bfloat16)[()]
    written = json.loads(json.dumps(kind.to_json_scalar(scalar, zarr_format=3), allow_nan=False))
    assert bits_of(kind.from_json_scalar(written, zarr_format=3)) == bits


@pytest.mark.parametrize("fill", [float("inf"), float("-inf"), float("nan"), 1.5, -0.0])
def test_fill_values_are_read_alike_by_tensorstore(tmp_path, fill):
    zarr.create_array(tmp_path, shape=(2,), chunks=(2,), dtype=ml_dtypes.bfloat16, fill_value=fill)
    ours = zarr.open_array(tmp_path, mode="r")[:]
    spec = {"driver": "zarr3", "kvstore": f"file://{tmp_path}/"}
    theirs = tensorstore.open(spec, read=True).result().read().result()
    assert ours.tobytes() == theirs.tobytes()


def test_nan_is_the_string_of_the_format():
    assert BFloat16().to_json_scalar(float("nan"), zarr_format=3) == "NaN"
    assert bits_of(BFloat16().from_json_scalar("NaN", zarr_format=3)) == 0x7FC0
    assert BFloat16.from_json("bfloat16", zarr_format=3).to_json(3) == "bfloat16"
    assert json.loads(array_metadata(1, 1, "bfloat16"))["data_type"] == BFloat16._zarr_v3_name


def test_refuses_what_is_no_bfloat16():
    kind = BFloat16()
    for data in ("x", "0x7fc", "0xzzzz", "-0x001", None, True, [1]):
        with pytest.raises(TypeError):
            kind.from_json_scalar(data, zarr_format=3)
    with pytest.raises(TypeError):
        kind.cast_scalar("no number")
    with pytest.raises(ValueError):
        BFloat16.from_native_dtype(np.dtype("f2"))
    with pytest.raises(ValueError):
        BFloat16.from_json("float16", zarr_format=3)
    with pytest.raises(ValueError):
        kind.to_json(2)
    with pytest.raises(ValueError):
        BFloat16(endianness="big").to_native_dtype()
