"""Import: a set made elsewhere becomes a dataset whose record says what nobody knows about it."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from actds.dataset.commit import ShardRows, commit_shard
from actds.dataset.ledger import Chain
from actds.errors import ActdsError
from actds.exchange.containers import foreign as bad_set
from actds.exchange.containers import read_document
from actds.exchange.foreign import (
    BLOCK_NBYTES,
    RECORD_FILE,
    Block,
    ForeignHook,
    ForeignSet,
    own_name,
)
from actds.exchange.opening import INCLUSION, inclusion_of_export, open_foreign, reader
from actds.format import schema
from actds.format.arrays import DTYPES
from actds.format.inclusion import IMPORTED
from actds.format.schema import (
    REQUIRED_PROVENANCE,
    Genesis,
    Hook,
    ProvenanceField,
    RunBody,
    RunRecord,
)
from actds.format.tables import UNKNOWN_FIELD
from actds.store import layout
from actds.store.folders import new_folder
from actds.store.local import LocalStore
from actds.text import storable
from actds.version import __version__

_OWN = re.compile(r"([a-z0-9_]+)\.(0|[1-9][0-9]*)")
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Imported:
    """What was imported, and under which run.

    Args:
        n_sequences: sequences of the set, which are the requests of the run.
        unknown: columns of the token table of which the set says nothing.
        left_out: what the set holds beside activations, tokens and positions.
    """

    kind: str
    run: str
    hooks: list[str]
    n_rows: int
    n_sequences: int
    unknown: list[str]
    left_out: list[str]


def import_foreign(
    foreign: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    kind: Literal["sae-lens", "datasets", "safetensors", "pt", "npy", "npz"] | None = None,
    hooks: str | Sequence[str] | None = None,
    dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    declare: Mapping[str, bool | int | str] | None = None,
    progress: Progress = lambda n_rows: None,
) -> Imported:
    """Write a set of activations that was made elsewhere as a dataset.

    Values keep their bits. A sequence of the set is a request, numbered in the order of the files;
    positions count from 0 where the set says so. Rows of an export that were drawn keep their
    inclusion. Everything else that a harvest would know is
    marked ``unknown`` with a reason: the dataset has no census, is sealed only as imported
    (``actds.seal(out, imported=True)``), and read only with ``i_accept_unprovenanced=True``. It
    appears whole or not at all.

    Args:
        foreign: a file of the set, or its folder.
        out: the new dataset's folder.
        kind: ``sae-lens``, a cache of SAELens; ``safetensors``, hidden states as vLLM's connector
            and speculators write them; ``pt``, what torch saved; ``npy``, an array per hook. None
            looks at the names of the files.
        hooks: names of the hooks, ``KIND.LAYER``, in the order of the set; None where the set
            names them itself.
        dtype: type of two-byte values in ``.npy`` files, which have no name for bfloat16.
        declare: facts of the run record by name, for example ``model.name``, which are then
            ``declared``.
        progress: called with the rows that were written so far.

    Raises:
        ActdsError: E008 ``out`` exists; E009 an argument that cannot be used; E007 hooks that
            are not named, or of another number; E011 ``.pt`` files without torch; E019 the set is
            truncated, mixes widths or types, or is none; E503 the disk is full.

    Spec: 0.1 sections 6.1 and 6.3.
    """
    path = Path(foreign)
    reader.deaths.clear()
    opened = open_foreign(path, kind, dtype)
    named = _name_hooks(opened, hooks, path)
    run = layout.new_id("r")
    fields = _fields(opened, path, named if hooks is not None else [], declare or {})
    inclusion = inclusion_of_export(path, opened.n_rows)
    if inclusion is not None:
        fields[IMPORTED] = ProvenanceField(value=True, origin="observed", reason=None)
    with new_folder(os.fspath(out)) as folder:
        store = LocalStore(folder)
        chain = _begin(store, run, named, fields, path)
        n_rows, n_sequences = 0, 0
        for number, (rows, last) in enumerate(_shards(opened, named)):
            shard, stop = f"{run}-{number:06d}", n_rows + len(rows.tokens["request"])
            if inclusion is not None:
                rows.tokens[INCLUSION] = inclusion[n_rows:stop]
            commit_shard(store, chain, rows, shard=shard, run=run, order="permuted", seed=number)
            n_rows, n_sequences = stop, last + 1
            progress(n_rows)
        if not n_rows:
            raise bad_set(path, "no row", "activations")
        if n_rows != opened.n_rows:
            raise bad_set(path, f"{n_rows} rows", f"{opened.n_rows}, as when it was opened")
        chain.close("finished", {"rows": n_rows, "dropped_tokens": 0, "recomputed_tokens": 0})
    return Imported(
        kind=opened.kind,
        run=run,
        hooks=[hook.name for hook in named],
        n_rows=n_rows,
        n_sequences=n_sequences,
        unknown=list(opened.unknown),
        left_out=list(opened.left_out),
    )


def _begin(
    store: LocalStore, run: str, hooks: list[Hook], fields: dict[str, ProvenanceField], path: Path
) -> Chain:
    """Write genesis and run record; return the chain that names them."""
    software, dataset, now = f"actds {__version__} import", secrets.token_hex(16), time.time_ns()
    try:
        genesis = Genesis(dataset=dataset, created_ns=now, writer=software, hooks=hooks)
    except ValidationError:
        raise bad_set(path, f"{len(hooks)} hooks", "as many as a dataset may have") from None
    store.put_new(layout.GENESIS, [schema.to_bytes(genesis)])
    chain = Chain.begin(store, dataset, run, "writer", software)
    record = RunRecord(dataset=dataset, run=run, started_ns=now, fields=fields)
    written = store.put_new(layout.run_path(run), [schema.to_bytes(record)])
    chain.append("run", RunBody(run=run, sha256=written.sha256))
    return chain


def _name_hooks(opened: ForeignSet, given: str | Sequence[str] | None, path: Path) -> list[Hook]:
    step = 'Name each with hooks="KIND.LAYER", in the order of the set.'
    if given is None:
        called = [own_name(hook) for hook in opened.hooks]
    else:
        called = [given] if isinstance(given, str) else list(given)
    if len(called) != len(opened.hooks):
        got, expected = f"{len(called)} names", f"{len(opened.hooks)} hooks"
        raise ActdsError("E007", str(path), got=got, expected=expected, next_step=step)
    hooks = []
    for name, place in zip(called, opened.hooks, strict=True):
        hook = named_hook(name, place)
        if hook is None:
            got = f"the hook {name!r}" if name else "a hook without a name"
            expected = "KIND.LAYER, for example resid_post.10"
            step = 'Say with hooks="KIND.LAYER" which place of the model the rows are of.'
            raise ActdsError("E007", str(path), got=got, expected=expected, next_step=step)
        hooks.append(hook)
    if len({hook.name for hook in hooks}) < len(hooks):
        raise ActdsError("E007", str(path), got=", ".join(called), expected="different hooks")
    return hooks


def named_hook(name: str, place: ForeignHook) -> Hook | None:
    """None where the name is not ``KIND.LAYER``."""
    match = _OWN.fullmatch(name)
    if match is None:
        return None
    facts = {"name": name, "kind": match[1], "layer": int(match[2])}
    try:
        return Hook.model_validate({**facts, "d_model": place.d_model, "dtype": place.dtype})
    except ValidationError:
        return None


def _shards(opened: ForeignSet, hooks: list[Hook]) -> Iterator[tuple[ShardRows, int]]:
    row_nbytes = sum(hook.d_model * DTYPES[hook.dtype].itemsize for hook in hooks)
    most = max(1, BLOCK_NBYTES // row_nbytes)
    pieces: list[Block] = []
    n_rows = 0
    for block in opened.blocks():
        for start in range(0, len(block.position), most):
            cut = slice(start, start + most)
            ids = None if block.token_ids is None else block.token_ids[cut]
            bits = [rows[cut] for rows in block.bits]
            piece = Block(block.sequence, block.position[cut], ids, bits)
            if n_rows + len(piece.position) > most:
                yield _joined(pieces, hooks), pieces[-1].sequence
                pieces, n_rows = [], 0
            pieces.append(piece)
            n_rows += len(piece.position)
    if pieces:
        yield _joined(pieces, hooks), pieces[-1].sequence


def _joined(pieces: list[Block], hooks: list[Hook]) -> ShardRows:
    lengths = [len(block.position) for block in pieces]
    columns = {"token_id": "u4", "step": "u8", "attempt": "u2", "chunk": "u4", "flags": "u2"}
    tokens = {name: np.zeros(sum(lengths), dtype) for name, dtype in columns.items()}
    tokens["request"] = np.repeat([block.sequence for block in pieces], lengths).astype("u4")
    tokens["position"] = np.concatenate([block.position for block in pieces]).astype("u4")
    ids = [block.token_ids for block in pieces if block.token_ids is not None]
    if ids:
        tokens["token_id"] = np.concatenate(ids).astype("u4")
    bits = {h.name: np.concatenate([b.bits[n] for b in pieces]) for n, h in enumerate(hooks)}
    return ShardRows(
        hooks=bits,
        dtypes={hook.name: hook.dtype for hook in hooks},
        tokens=tokens,
        phase="prefill",
        first_step=0,
        last_step=0,
    )


def _fields(
    opened: ForeignSet, path: Path, named: list[Hook], declare: Mapping[str, Any]
) -> dict[str, ProvenanceField]:
    """All unknown but for what is seen and declared; the caller ``named`` these hooks."""
    reason = f"imported from a set ({opened.kind}) that does not say it"
    unknown = ProvenanceField(value=None, origin="unknown", reason=reason)
    fields = dict.fromkeys(REQUIRED_PROVENANCE, unknown)
    observed: dict[str, Any] = {
        "capture.order": "permuted",
        "import.kind": opened.kind,
        "import.source": storable(path.absolute().name),
        "import.sha256": _digest(opened.files),
        "import.n_files": len(opened.files),
        "import.left_out": list(opened.left_out),
        "import.hooks_called": [hook.called or "none" for hook in opened.hooks],
        UNKNOWN_FIELD: list(opened.unknown),
    }
    exported = (path if path.is_dir() else path.parent) / RECORD_FILE
    if exported.is_file() and (digest := read_document(exported).get("digest")):
        declare = {"import.dataset_digest": digest, **declare}
    if named:
        declare = {"import.hooks": [hook.name for hook in named], **declare}
    for name, value in (*observed.items(), *declare.items()):
        origin = "observed" if name in observed and name not in declare else "declared"
        try:
            if name not in REQUIRED_PROVENANCE and not name.startswith("import."):
                raise ValueError(name)
            facts = {"value": value, "origin": origin, "reason": None}
            fields[name] = ProvenanceField.model_validate(facts)
        except ValueError:
            got = f"{name} = {value!r}"[:200]
            expected = "a name of the run record, and a boolean, integer or string"
            raise ActdsError("E009", "declare", got=got, expected=expected) from None
    return fields


def _digest(files: list[Path]) -> str:
    """SHA-256 over the sorted ``name sha256`` lines of files, as of model weights."""
    lines = []
    for path in files:
        with path.open("rb") as file:
            lines.append(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n")
    return hashlib.sha256("".join(sorted(lines)).encode(errors="surrogateescape")).hexdigest()
