"""The file of ``--intervene``: what it says is read once, checked, and turned into arrays.

Every process of a harvest gets the arrays from the link, and the run record says their digests, so
that a file that changes meanwhile changes nothing. No torch here: a harvest is planned without it.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from actds.errors import ActdsError
from actds.format.interventions import (
    FIELD,
    MAX_INTERVENTIONS,
    Edit,
    Intervention,
    Op,
    Part,
    as_field,
    parse_field,
)
from actds_writers.config import explained
from actds_writers.ipc.messages import Fact, HookSpec
from actds_writers.sampling import request_condition

Floats = npt.NDArray[np.float32]
KINDS = (
    "resid_pre",
    "resid_mid",
    "resid_post",
    "attn_out",
    "attn_out_post",
    "mlp_out",
    "mlp_out_post",
)
"""Hook kinds whose rows may be changed: every tensor-parallel rank has them whole."""
XARG = "actds_intervene"
"""What a request to a server says in ``vllm_xargs``: the name of an intervention."""
UNUSED = -math.inf
LEAST_LINES = 16
"""Tables have a power of two of lines, so that graphs are compiled for few sizes."""
MAX_NBYTES = 1 << 28
KEYS = "a key that the file of interventions may have"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class EditOf(_Model):
    """One edit, as the file has it."""

    hook: str
    op: Op
    vector: str | None = None
    row: Annotated[int, Field(ge=0)] | None = None
    dictionary: str | None = None
    feature: Annotated[int, Field(ge=0)] | None = None
    rows: str | None = None
    strength: Annotated[float, Field(ge=-1e9, le=1e9)] | None = None
    value: Annotated[float, Field(ge=-1e9, le=1e9)] | None = None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        sources = [self.vector is not None, self.dictionary is not None, self.rows is not None]
        if sum(sources) != 1 or (self.op == "patch") != (self.rows is not None):
            raise ValueError("a vector or a dictionary and its feature; rows for patch")
        if (self.dictionary is None) != (self.feature is None):
            raise ValueError("a dictionary with the number of a feature")
        if (self.op == "clamp") != (self.value is not None):
            raise ValueError("a value for clamp, and for nothing else")
        if self.strength is not None and self.op not in ("add", "project"):
            raise ValueError("a strength for add and project only")
        if self.row is not None and self.vector is None:
            raise ValueError("a row of a vector's file only")
        return self


class InterventionOf(_Model):
    """One intervention, as the file has it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+-]{1,80}$")]
    edits: Annotated[list[EditOf], Field(min_length=1, max_length=64)]
    part: Part | None = None
    start: Annotated[int, Field(ge=0, lt=2**32)] = 0
    stop: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    requests: list[str] = []

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        if self.stop is not None and self.stop <= self.start:
            raise ValueError("a stop behind the start")
        if len({edit.hook for edit in self.edits}) < len(self.edits):
            raise ValueError("one edit for each hook")
        return self


class File(_Model):
    """A file of interventions; the first that holds of a position counts."""

    schema_: Annotated[Literal["actds.interventions/1"], Field(alias="schema")]
    interventions: Annotated[
        list[InterventionOf], Field(min_length=1, max_length=MAX_INTERVENTIONS)
    ]

    @model_validator(mode="after")
    def _tells_them_apart(self) -> Self:
        if len({item.name for item in self.interventions}) < len(self.interventions):
            raise ValueError("one intervention of each name")
        return self


class Arrays(NamedTuple):
    """What an edit needs, of rows ``x``: ``keep x + (bias + gain act(x readers + shift)) vectors``.

    ``act`` gives 0 where the product is not above ``threshold``. An edit has one line of each, a
    patch one for each position: float32 ``(n, d_model)`` and ``(n, 5)``.
    """

    readers: Floats
    vectors: Floats
    scalars: Floats
    """By line: keep, bias, gain, shift, threshold."""


class Planned(NamedTuple):
    """Interventions of a run: their value in the run record, and the arrays of each edit."""

    interventions: tuple[Intervention, ...]
    arrays: tuple[tuple[Arrays, ...], ...]

    def to_bytes(self) -> bytes:
        """Return what ``from_bytes`` reads, for the other processes of a harvest."""
        named: dict[str, Any] = {"field": np.array(as_field(self.interventions))}
        for i, edits in enumerate(self.arrays):
            for j, arrays in enumerate(edits):
                named |= {f"{i}.{j}.{k}": array for k, array in enumerate(arrays)}
        file = io.BytesIO()
        np.savez(file, **named)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Planned:
        with np.load(io.BytesIO(data), allow_pickle=False) as named:
            items = parse_field(str(named["field"]), "interventions")
            arrays = tuple(
                tuple(
                    Arrays(*(named[f"{i}.{j}.{k}"] for k in range(3)))
                    for j in range(len(item.edits))
                )
                for i, item in enumerate(items)
            )
        return cls(items, arrays)

    @classmethod
    @functools.cache
    def read(cls, path: str) -> Planned:
        return cls.from_bytes(Path(path).read_bytes())

    @property
    def sha256(self) -> str:
        """Return the digest of what the run record says of them."""
        return hashlib.sha256(as_field(self.interventions).encode()).hexdigest()

    @property
    def fact(self) -> Fact:
        """Return what the run record says of them."""
        return Fact(FIELD, as_field(self.interventions), "declared")

    @property
    def table_sizes(self) -> list[tuple[str, int]]:
        """Return, for each hook, how many lines its tables have: a power of two, line 0 is none."""
        edits = zip(self.interventions, self.arrays, strict=True)
        n_lines = dict.fromkeys(self.hooks, 1)
        for item, arrays in edits:
            for edit, of_edit in zip(item.edits, arrays, strict=True):
                n_lines[edit.hook] += len(of_edit.vectors)
        return [(hook, max(LEAST_LINES, 1 << (n - 1).bit_length())) for hook, n in n_lines.items()]

    @property
    def hooks(self) -> tuple[str, ...]:
        """Return the hooks whose rows are changed, each once."""
        names = [edit.hook for item in self.interventions for edit in item.edits]
        return tuple(dict.fromkeys(names))


def plan_interventions(
    path: str | Path, specs: Mapping[str, HookSpec], *, live: bool = False
) -> Planned:
    """Return the interventions of a file.

    Args:
        path: the file; files that it names are beside it.
        specs: by name, the hooks of the model that may be named.
        live: whether requests of a server ask for interventions by name.

    Raises:
        ActdsError: E015 what the file says, or an array that does not fit; E007 a hook that the
            model lacks, or whose rows cannot be changed.
    """
    place = Path(path)
    parsed = _parse(place)
    planned: list[tuple[Intervention, tuple[Arrays, ...]]] = []
    for item in parsed.interventions:
        if live and item.requests:
            got = "requests in a file of a server"
            expected = f"requests that name it, as {XARG} in vllm_xargs"
            raise _bad(place, item.name, got, expected)
        arrays = tuple(_arrays(place, item, edit, specs) for edit in item.edits)
        planned.append((_intervention(place, item, arrays, live), arrays))
    items, every = zip(*planned, strict=True)
    return Planned(items, every)


def names_in(file: str | Path) -> tuple[str, ...]:
    """Return the names of the interventions of a file; raises E015 as ``plan_interventions``."""
    return tuple(item.name for item in _parse(Path(file)).interventions)


def _parse(path: Path) -> File:
    try:
        if path.stat().st_size > MAX_NBYTES:
            raise _bad(path, "", "more than 256 MiB", "a file of interventions")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(path, "", str(error).splitlines()[0][:200], "a readable JSON file") from None
    try:
        return File.model_validate(document)
    except ValidationError as error:
        raise explained(error, lambda key: f"{path} {key}".rstrip(), "E015", KEYS) from None


def _intervention(
    path: Path, item: InterventionOf, arrays: Sequence[Arrays], live: bool
) -> Intervention:
    stop = item.stop
    for edit, lines in zip(item.edits, arrays, strict=True):
        n = len(lines.vectors)
        if edit.op == "patch" and (stop is None or stop - item.start > n):
            stop = item.start + n
    try:
        request = tuple(request_condition(words) for words in item.requests)
    except ValueError as error:
        raise _bad(path, item.name, str(error), "id GLOB, label NAME=GLOB") from None
    if live:
        request = ((f"xargs.{XARG}", item.name),)
    edits = tuple(
        Edit(edit.hook, edit.op, _strength(edit), _digest(lines))
        for edit, lines in zip(item.edits, arrays, strict=True)
    )
    return Intervention(item.name, edits, item.part, (item.start, stop), request)


def _strength(edit: EditOf) -> float:
    if edit.value is not None:
        return edit.value
    return 1.0 if edit.strength is None else edit.strength


def _digest(arrays: Arrays) -> str:
    """Return the SHA-256 of what an edit reads and writes, whatever its strength."""
    digest = hashlib.sha256()
    for values in (arrays.readers, arrays.vectors, arrays.scalars[:, 3:]):
        digest.update(np.ascontiguousarray(values, "<f4").tobytes())
    return digest.hexdigest()


def _arrays(
    path: Path, item: InterventionOf, edit: EditOf, specs: Mapping[str, HookSpec]
) -> Arrays:
    spec = specs.get(edit.hook)
    if spec is None or spec.kind not in KINDS:
        got = "a hook that the model lacks" if spec is None else "rows that cannot be changed"
        place, expected = (
            f"{path} {item.name}: {edit.hook[:80]}",
            f"KIND.LAYER of {', '.join(KINDS)}",
        )
        raise ActdsError("E007", place, got=got, expected=expected)
    reader, vector, shift, threshold = _read(path, item, edit, spec.d_model)
    strength = np.float32(_strength(edit))
    keep, bias, gain = {
        "add": (1.0, strength, 0.0),
        "project": (1.0, 0.0, -strength),
        "clamp": (1.0, strength, -1.0),
        "patch": (0.0, 1.0, 0.0),
    }[edit.op]
    scalars = np.tile(np.array([keep, bias, gain, shift, threshold], np.float32), (len(vector), 1))
    return Arrays(reader, vector, scalars)


def _read(
    path: Path, item: InterventionOf, edit: EditOf, d_model: int
) -> tuple[Floats, Floats, float, float]:
    """Return reader and vector ``(n, d_model)``, shift and threshold of an edit."""
    if edit.dictionary is not None:
        import actds

        of = actds.dictionary_feature(
            path.parent / edit.dictionary, int(edit.feature or 0), hook=edit.hook
        )
        vector = of.decoder[np.newaxis]
        if len(of.decoder) != d_model:
            raise _bad(path, item.name, f"{len(of.decoder)} channels", f"{d_model}, as the rows")
        if edit.op == "clamp":
            if of.encoder is None:
                got = "a feature that depends on more than its own product with the row"
                raise _bad(path, item.name, got, "one of a standard, JumpReLU or BatchTopK one")
            return of.encoder[np.newaxis], vector, of.shift, of.threshold
        if edit.op == "project":  # what of the row lies along the feature's direction
            vector = _unit(path, item, vector)
            return vector, vector, 0.0, UNUSED
        return np.zeros_like(vector), vector, 0.0, UNUSED
    file = path.parent / (edit.vector or edit.rows or "")
    values = _load(path, item, file)
    if edit.vector is not None and values.ndim == 2 and edit.row is not None:
        values = values[edit.row : edit.row + 1]
    values = values[np.newaxis] if values.ndim == 1 else values
    if values.ndim != 2 or values.shape[1] != d_model or not len(values):
        raise _bad(path, item.name, f"{file.name} of shape {values.shape}", f"(n, {d_model})")
    if edit.vector is not None and len(values) > 1:
        raise _bad(path, item.name, f"{len(values)} vectors in {file.name}", "one, or its row")
    if edit.op in ("project", "clamp"):
        unit = _unit(path, item, values)
        return unit, unit, 0.0, UNUSED
    return np.zeros_like(values), values, 0.0, UNUSED


def _load(path: Path, item: InterventionOf, file: Path) -> Floats:
    try:
        if file.stat().st_size > MAX_NBYTES:
            raise ValueError("more than 256 MiB")
        values = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        words = str(error).splitlines()[0][:200]
        raise _bad(path, item.name, f"{file.name}: {words}", "a readable npy file") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
        raise _bad(path, item.name, f"{file.name}: no floats", "an npy file of floats")
    values = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(values).all():
        raise _bad(path, item.name, f"{file.name}: NaN or infinity", "finite values")
    return values


def _unit(path: Path, item: InterventionOf, vectors: Floats) -> Floats:
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    if not norms.all():
        raise _bad(path, item.name, "a vector of zeros", "a direction")
    return np.asarray(vectors / norms, np.float32)


def _bad(path: Path, name: str, got: str, expected: str) -> ActdsError:
    return ActdsError("E015", f"{path} {name}".rstrip(), got=got, expected=expected)
