"""What a run looked at while it served: the run record's fields of alerts and of attention.

Writer, validator and reader compute from these which lines of the two tables there may be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format import canonical
from actds.format.inclusion import uniform
from actds.format.schema import FileEntry, RunRecord
from actds.store import layout

PROFILE = "capture.profile"
"""The run record's field with the profile whose alerts a run has (section 7.12)."""
ATTENTION = "capture.attention"
"""The run record's field with the layers and requests of the table ``attention`` (section 7.13)."""
KINDS = ("drift", "opening")
"""What is rare of a request: the mean of its last looks, or the last rows of its prompt."""
N_TOP = 8
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SALT = re.compile(r"[0-9a-f]{16}")
_SHARE = re.compile(r"[0-9]{1,16}(\.[0-9]{1,24})?(e-?[0-9]{1,3})?")


def profile_field(data: bytes) -> str:
    """Return the value of ``capture.profile`` for the bytes of a profile."""
    return _text({"nbytes": len(data), "sha256": canonical.digest(data)})


def profile_entry(record: RunRecord) -> FileEntry | None:
    """Return the file of a run's profile, ``None`` for a run without alerts.

    Raises:
        ActdsError: E102 or E103 when the field is no value of the spec.
    """
    fields = _fields(record, PROFILE, {"nbytes", "sha256"})
    if fields is None:
        return None
    nbytes, digest = fields["nbytes"], fields["sha256"]
    right = type(nbytes) is int and 0 < nbytes <= canonical.MAX_DOCUMENT_NBYTES
    if not right or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise _wrong(record, PROFILE, str(fields), "size and digest of a document")
    return FileEntry(path=layout.profile_path(record.run), nbytes=nbytes, sha256=digest)


@dataclass(frozen=True)
class Attending:
    """Which attention a run looks at: of some layers, at every n-th step of drawn requests.

    Args:
        layers: ascending.
        every: decode steps 0, ``every`` and so on, counted from the end of the prompt.
        share: of the requests, by hash.
        salt: of the hash, 16 hexadecimal digits.

    Spec: 0.1 section 7.13.
    """

    layers: tuple[int, ...]
    every: int
    share: float
    salt: str

    def as_field(self) -> str:
        """Return the value of ``capture.attention`` in the run record."""
        return _text({**self.__dict__, "layers": list(self.layers), "share": repr(self.share)})

    def draws(self, request: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return which requests are looked at, ``(n,)``."""
        return np.asarray(uniform(np.uint64(int(self.salt, 16)), request) < self.share)


def attending_of(record: RunRecord) -> Attending | None:
    """Return which attention a run looked at, ``None`` for one that looked at none.

    Raises:
        ActdsError: E102 or E103 when the field is no value of the spec.
    """
    fields = _fields(record, ATTENTION, {"layers", "every", "share", "salt"})
    if fields is None:
        return None
    layers, every, share, salt = (fields[n] for n in ("layers", "every", "share", "salt"))
    right = isinstance(layers, list) and all(type(n) is int and 0 <= n < 1 << 16 for n in layers)
    right = right and layers == sorted(set(layers)) != []
    right = right and type(every) is int and every > 0
    right = right and isinstance(share, str) and _SHARE.fullmatch(share) is not None
    right = right and 0 < float(share) <= 1
    if not right or not isinstance(salt, str) or not _SALT.fullmatch(salt):
        raise _wrong(record, ATTENTION, str(fields), "layers, every, share and salt")
    return Attending(tuple(layers), every, float(share), salt)


def _fields(record: RunRecord, name: str, keys: set[str]) -> dict[str, Any] | None:
    field = record.fields.get(name)
    if field is None or field.value is None:
        return None
    fields = canonical.parse(f"{field.value}\n".encode(), f"runs/{record.run}.json {name}")
    if not isinstance(fields, dict) or set(fields) != keys:
        raise _wrong(record, name, str(field.value), "the spec's fields")
    return fields


def _wrong(record: RunRecord, name: str, got: str, expected: str) -> ActdsError:
    return ActdsError("E103", f"runs/{record.run}.json {name}", got=got[:200], expected=expected)


def _text(fields: dict[str, Any]) -> str:
    return canonical.dump(fields).decode("ascii").rstrip("\n")
