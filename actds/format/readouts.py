"""Readouts: a few numbers per computed row, which stay when the row itself is lost.

The norm of the row, its products with seeded random directions, and with a user's probes. Stands
beside shards and tables: the writer computes them, a validator computes them again.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format import canonical
from actds.format.schema import FileEntry
from actds.store import layout

if TYPE_CHECKING:
    from actds.format.schema import RunRecord

NONE = "none"
"""The value of ``capture.readouts`` in a run without readouts."""
DEFAULT_PROJECTIONS = 8
MAX_WIDTH = 4096
"""Projections, or probes, of a row."""
_NPY_HEADER = re.compile(
    rb"\{'descr': '<f4', 'fortran_order': False, 'shape': \((\d+), (\d+), (\d+)\), \} *\n"
)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NPY_HEADER_NBYTES = 128
"""Of a version 1.0 file with three sizes: padded to whole 64 bytes, whatever the sizes are."""

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
        counts = ("n_projections", "seed", "n_probes")
        right = isinstance(fields, dict) and set(fields) == {*counts, "probes_sha256"}
        if not right or any(type(fields[name]) is not int or fields[name] < 0 for name in counts):
            raise ActdsError("E103", place, got=text[:200], expected="none, or the spec's fields")
        digest = fields["probes_sha256"]
        pinned = isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None
        if pinned if not fields["n_probes"] else not pinned:
            expected = "a digest of the probes where there are any, else null"
            raise ActdsError("E103", place, got=f"probes_sha256 {digest!r:.80}", expected=expected)
        if max(fields["n_projections"], fields["n_probes"]) > MAX_WIDTH:
            raise ActdsError("E103", place, got=text[:200], expected=f"at most {MAX_WIDTH} of each")
        return cls(**fields)

    def probes_entry(self, run: str, d_models: Sequence[int]) -> FileEntry | None:
        """Return the entry of a run's probes, whose size follows from their shape; None without.

        Args:
            run: the run.
            d_models: channels of each hook of the genesis.

        Raises:
            ActdsError: E103 hooks of several widths, which one array of probes cannot have.

        Spec: 0.1 section 7.8.
        """
        if self.probes_sha256 is None:
            return None
        path = layout.probes_path(run)
        if len(set(d_models)) > 1:
            got = f"probes, and hooks of {', '.join(map(str, sorted(set(d_models))))} channels"
            raise ActdsError("E103", path, got=got, expected="hooks of one width, or no probes")
        nbytes = _NPY_HEADER_NBYTES + 4 * self.n_probes * sum(d_models)
        return FileEntry(path=path, nbytes=nbytes, sha256=self.probes_sha256)


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
    # Read here: numpy's own reader takes a zip for one as well, and believes what a header claims.
    words = data[10 : 10 + int.from_bytes(data[8:10], "little")]
    header = _NPY_HEADER.fullmatch(words)
    if data[:8] != b"\x93NUMPY\x01\x00" or header is None:
        got, expected = repr(data[:10]), "an npy file of float32, version 1.0, C order"
        raise ActdsError("E103", place, got=got, expected=expected)
    got_shape = tuple(map(int, header.groups()))
    body = data[10 + len(words) :]
    if got_shape != shape or len(body) != 4 * math.prod(shape):
        got = f"float32 {got_shape} in {len(body)} bytes"
        raise ActdsError("E103", place, got=got[:200], expected=f"float32 {shape}")
    probes: Floats = np.frombuffer(body, "<f4").reshape(shape)
    return probes
