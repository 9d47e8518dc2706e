"""The zarr-python data type bfloat16, and our chunk encoder as an optional codec.

zarr 3.4 finds ``BFloat16`` through the ``zarr.data_type`` entry point. zarr 3.1, the last for
Python 3.11, collects these entry points and never loads them, so there this module must be imported
once. The encoder
replaces the codec ``blosc`` only after ``register_codec()``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import ml_dtypes
import numcodecs.blosc
import numcodecs.compat
import numcodecs.registry
import numpy as np
import zarr
import zarr.registry
from zarr.codecs import BloscCodec
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

from actds.format.codec import MAX_BLOCK_NBYTES, encode_chunk

try:
    from zarr.errors import DataTypeValidationError
except ImportError:  # zarr 3.1 has it with the data types, where 3.4 warns of it
    from zarr.dtype import DataTypeValidationError

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NAN_BITS = 0x7FC0
_SPECIAL = {"NaN": _NAN_BITS, "Infinity": 0x7F80, "-Infinity": 0xFF80}
_STOCK_CODEC = "zarr.codecs.blosc.BloscCodec"


@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[Any, Any], HasEndianness, HasItemSize):  # type: ignore[misc]
    """The zarr-extensions data type ``bfloat16``: no configuration, zarr v3 only.

    Spec: 0.1 section 4.
    """

    dtype_cls: ClassVar[Any] = type(_BFLOAT16)
    _zarr_v3_name: ClassVar[Literal["bfloat16"]] = "bfloat16"

    @property
    def item_size(self) -> int:
        return 2

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """Return the data type of numpy's ``ml_dtypes.bfloat16``.

        Raises:
            DataTypeValidationError: ``dtype`` is another one.
        """
        if dtype != _BFLOAT16:
            raise DataTypeValidationError(f"{dtype} is not {_BFLOAT16}")
        return cls()

    def to_native_dtype(self) -> Any:
        """Return ``ml_dtypes.bfloat16`` as a numpy dtype.

        Raises:
            ValueError: the byte order is big: ml_dtypes knows the machine's order only.
        """
        if self.endianness == "big":
            raise ValueError("big-endian bfloat16 is not supported; expected little")
        return _BFLOAT16

    @classmethod
    def _check_json_v2(cls, data: object) -> bool:
        return False

    @classmethod
    def _check_json_v3(cls, data: object) -> bool:
        return data == cls._zarr_v3_name

    @classmethod
    def _from_json_v2(cls, data: object) -> Self:
        raise DataTypeValidationError(f"zarr v2 has no bfloat16: {data!r}")

    @classmethod
    def _from_json_v3(cls, data: object) -> Self:
        if not cls._check_json_v3(data):
            raise DataTypeValidationError(f"data type {data!r}; expected {cls._zarr_v3_name!r}")
        return cls()

    def to_json(self, zarr_format: int) -> str:
        """Return the name of the data type.

        Raises:
            ValueError: the format is not zarr v3.
        """
        if zarr_format != 3:
            raise ValueError(f"zarr v{zarr_format} has no bfloat16; expected zarr v3")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        if isinstance(data, str):
            try:
                float(data)
            except ValueError:
                return False
            return True
        return isinstance(data, int | float | np.integer | np.floating | ml_dtypes.bfloat16)

    def _cast_scalar_unchecked(self, data: Any) -> Any:
        if isinstance(data, ml_dtypes.bfloat16):
            return data
        return ml_dtypes.bfloat16(float(data))

    def cast_scalar(self, data: object) -> Any:
        """Return a number, or a string of one, as ``ml_dtypes.bfloat16``; NaN bits survive.

        Raises:
            TypeError: ``data`` is no number.
        """
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} of {type(data).__name__} is no bfloat16 scalar")
        return self._cast_scalar_unchecked(data)

    def default_scalar(self) -> Any:
        return ml_dtypes.bfloat16(0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:
        """Return the scalar of a fill value: a number, ``NaN``, ``Infinity`` or ``0x`` bits.

        Raises:
            TypeError: ``data`` is none of these.
        """
        if isinstance(data, str):
            bits = _SPECIAL.get(data)
            if bits is None and data.startswith("0x") and len(data) == 6:
                try:
                    bits = int(data[2:], 16)
                except ValueError:
                    bits = None
            if bits is not None and bits >= 0:
                return np.array(bits, "<u2").view(_BFLOAT16)[()]
        elif isinstance(data, int | float) and not isinstance(data, bool):
            return ml_dtypes.bfloat16(float(data))
        raise TypeError(f"fill value {data!r}; expected a number, NaN, Infinity or 0x and 4 digits")

    def to_json_scalar(self, data: object, *, zarr_format: int) -> float | str:
        """Return a scalar as JSON; any NaN but the usual one as its ``0x`` bits."""
        scalar = self.cast_scalar(data)
        bits = int(np.asarray(scalar, _BFLOAT16).view("<u2")[()])
        for name, special in _SPECIAL.items():
            if bits == special:
                return name
        value = float(scalar)
        return f"0x{bits:04x}" if value != value else value


def _is_ours(typesize: int, cname: str, clevel: int, shuffle: bool, blocksize: int) -> bool:
    """Say whether a blosc configuration is the one of the format; others stay with c-blosc."""
    return (
        (cname, clevel, shuffle) == ("zstd", 1, True)
        and typesize in (2, 4)
        and blocksize == MAX_BLOCK_NBYTES
    )


class FrameBloscCodec(BloscCodec):  # type: ignore[misc]
    """zarr's ``blosc`` codec with our encoder for the configuration of the format.

    Level 1 zstd with byte shuffle, items of 2 or 4 bytes and blocks of 262144 bytes go through
    ``actds.format.codec.encode_chunk``; any other configuration, and all decoding, is
    c-blosc's.
    It is made for floats: integers that repeat or count up come out larger than from c-blosc.

    Spec: 0.1 section 4.2.
    """

    def _encode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer | None:
        array = chunk_bytes.as_numpy_array()
        if array.nbytes == 0 or array.nbytes % self.typesize or not self._is_ours():
            return chunk_spec.prototype.buffer.from_bytes(self._blosc_codec.encode(array))
        frame = encode_chunk(np.ascontiguousarray(array), itemsize=self.typesize)
        return chunk_spec.prototype.buffer.from_bytes(frame)

    async def _encode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer | None:
        return await asyncio.to_thread(self._encode_sync, chunk_bytes, chunk_spec)

    def _is_ours(self) -> bool:
        # The JSON form: zarr 3.1 keeps enums in the attributes, 3.4 strings.
        config: Any = self.to_dict()["configuration"]
        return _is_ours(
            config["typesize"],
            config["cname"],
            config["clevel"],
            config["shuffle"] == "shuffle",
            config["blocksize"],
        )


class FrameBlosc(numcodecs.blosc.Blosc):  # type: ignore[misc]
    """numcodecs' ``blosc`` codec with our encoder for the configuration of the format.

    Spec: 0.1 section 4.2.
    """

    def encode(self, buf: Any) -> bytes:
        array = numcodecs.compat.ensure_contiguous_ndarray(buf)
        # Before numcodecs 0.16 the item size was always the buffer's.
        itemsize = getattr(self, "typesize", None) or array.itemsize
        shuffled = self.shuffle == numcodecs.blosc.SHUFFLE
        if (
            array.nbytes
            and array.nbytes % itemsize == 0
            and _is_ours(itemsize, self.cname, self.clevel, shuffled, self.blocksize)
        ):
            return encode_chunk(array.view(np.uint8), itemsize=itemsize)
        stock: bytes = super().encode(buf)
        return stock


def register_codec() -> None:
    """Make zarr and numcodecs encode the format's ``blosc`` configuration with our encoder.

    Reading is unchanged, and so is what the files are: standard blosc frames. Arrays opened or
    created before, and codec objects made by hand, keep the encoder that they have.
    """
    zarr.registry.register_codec("blosc", FrameBloscCodec)
    zarr.config.set({"codecs.blosc": zarr.registry.fully_qualified_name(FrameBloscCodec)})
    numcodecs.registry.register_codec(FrameBlosc)


def unregister_codec() -> None:
    """Undo ``register_codec()``: zarr and numcodecs go back to their own encoders."""
    zarr.config.set({"codecs.blosc": _STOCK_CODEC})
    numcodecs.registry.register_codec(numcodecs.blosc.Blosc)


data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)
