"""Readouts: a few numbers per computed row, which stay when the row itself is lost.

The norm of the row, its products with seeded random directions, and with a user's probes. Stands
beside shards and tables: the writer computes them, a validator computes them again.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from actds import canonical, layout
from actds.errors import ActdsError

if TYPE_CHECKING:
    from actds.schema import RunRecord

__all__ = [
    "NONE",
    "Readouts",
    "compute",
    "directions",
    "load_probes",
    "matrix",
    "probe_bytes",
    "readouts_of",
]

NONE = "none"
"""The value of ``capture.readouts`` in a run without readouts."""
DEFAULT_PROJECTIONS = 8

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Readouts:
    """Which readouts a run has.

    Args:
        n_projections: random directions.
        seed: seed of the directions.
        n_probes: user's probes per hook.
        probes_sha256: digest of the probes' file in the dataset, ``None`` without probes.

    Spec: 0.1 section 7.8.
    """

    n_projections: int
    seed: int
    n_probes: int = 0
    probes_sha256: str | None = None

    @property
    def width(self) -> int:
        """Return the numbers per row: the norm and every product."""
        return 1 + self.n_projections + self.n_probes

    def as_field(self) -> str:
        """Return the value of ``capture.readouts`` in the run record."""
        return canonical.dump(self.__dict__).decode("ascii").rstrip("\n")

    @classmethod
    def from_field(cls, text: str, place: str) -> Readouts | None:
        """Return the specification in a run record, ``None`` for a run without readouts.

        Raises:
            ActdsError: E102 or E103 when the text is no value of the spec.
        """
        if text == NONE:
            return None
        fields = canonical.parse(f"{text}\n".encode(), place)
        kinds: dict[str, type] = {"n_projections": int, "seed": int, "n_probes": int}
        right = isinstance(fields, dict) and set(fields) == {*kinds, "probes_sha256"}
        if not right or any(
            type(fields[name]) is not kind or fields[name] < 0 for name, kind in kinds.items()
        ):
            raise ActdsError("E103", place, got=text[:200], expected="none, or the spec's fields")
        return cls(**fields)


def readouts_of(record: RunRecord) -> Readouts | None:
    """Return the readouts of a run, ``None`` for one without or that does not know.

    Raises:
        ActdsError: E102 or E103 when ``capture.readouts`` is no value of the spec.
    """
    value = record.fields["capture.readouts"].value
    if value is None:
        return None
    return Readouts.from_field(str(value), f"{layout.run_path(record.run)} capture.readouts")


def directions(n_projections: int, d_model: int, seed: int) -> Floats:
    """Return the seeded random directions, float32 ``(d_model, n_projections)``.

    Every entry is plus or minus ``1 / sqrt(d_model)``; the signs are bits of a SHAKE-256 stream,
    so that any language makes the same ones.

    Spec: 0.1 section 7.8.
    """
    name = f"actds projections {seed} {d_model}".encode("ascii")
    n_bits = n_projections * d_model
    stream = hashlib.shake_256(name).digest(-(-n_bits // 8))
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), count=n_bits, bitorder="little")
    signs = 1.0 - 2.0 * bits.reshape(n_projections, d_model).astype(np.float32)
    return np.ascontiguousarray(signs.T / np.float32(np.sqrt(d_model)), dtype=np.float32)


def matrix(readouts: Readouts, probes: Floats | None, n_hooks: int, d_model: int) -> Floats:
    """Return the packed matrix of each hook, float32 ``(n_hooks, d_model, width - 1)``.

    Args:
        readouts: which.
        probes: ``(n_hooks, n_probes, d_model)`` or ``None``.
        n_hooks: hooks of the run.
        d_model: channels of a row.
    """
    random = directions(readouts.n_projections, d_model, readouts.seed)
    packed = np.repeat(random[None], n_hooks, axis=0)
    if probes is not None:
        packed = np.concatenate([packed, probes.transpose(0, 2, 1)], axis=2)
    return np.ascontiguousarray(packed, dtype=np.float32)


def compute(rows: Floats, packed: Floats) -> Floats:
    """Return the readouts of rows: the norm, then the products, float32 ``(n, width)``.

    Args:
        rows: the stored rows as float32 ``(n, d_model)``.
        packed: the hook's matrix ``(d_model, width - 1)``.

    Spec: 0.1 section 7.8.
    """
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    numbers: Floats = np.concatenate([norms, rows @ packed], axis=1).astype(np.float32)
    return numbers


def probe_bytes(probes: Floats) -> bytes:
    """Return the probes of a run as the bytes of their file: npy, float32, C order."""
    sink = io.BytesIO()
    np.save(sink, np.ascontiguousarray(probes, dtype="<f4"), allow_pickle=False)
    return sink.getvalue()


def load_probes(data: bytes, place: str, shape: tuple[int, int, int]) -> Floats:
    """Return the probes in a dataset's file, float32 ``(n_hooks, n_probes, d_model)``.

    Raises:
        ActdsError: E103 when the bytes are no such array.
    """
    try:
        found = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ActdsError(
            "E103", place, got=str(error)[:200], expected="an npy file of float32"
        ) from None
    if found.dtype != np.dtype("<f4") or found.shape != shape:
        raise ActdsError(
            "E103", place, got=f"{found.dtype} {found.shape}", expected=f"float32 {shape}"
        )
    probes: Floats = found
    return probes
