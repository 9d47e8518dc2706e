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
import numpy.typing as npt
from pydantic import ValidationError

from actds.dataset.commit import ShardRows, commit_shard
from actds.dataset.ledger import Chain
from actds.errors import ActdsError
from actds.exchange.apart import open_foreign, reader
from actds.exchange.containers import foreign as bad_set
from actds.exchange.containers import read_document
from actds.exchange.export import BLOCK_NBYTES, RECORD_FILE
from actds.exchange.foreign import Block, ForeignHook, ForeignSet, own_name
from actds.format import schema
from actds.format.arrays import DTYPES
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
    """What was imported.

    Args:
        kind: the form of the set.
        run: the run of the rows.
        hooks: hooks of the dataset.
        n_rows: rows.
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
    positions count from 0 where the set says so. Everything else that a harvest would know is
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
    found = open_foreign(path, kind, dtype)
    named = _name_hooks(found, hooks, path)
    run = layout.new_id("r")
    record = _fields(found, path, hooks is not None, named, declare or {})
    with new_folder(os.fspath(out)) as folder:
        store = LocalStore(folder)
        software = f"actds {__version__} import"
        try:
            genesis = Genesis(
                dataset=secrets.token_hex(16),
                created_ns=time.time_ns(),
                writer=software,
                hooks=named,
            )
        except ValidationError:
            raise bad_set(path, f"{len(named)} hooks", "as many as a dataset may have") from None
        store.put_new(layout.GENESIS, [schema.to_bytes(genesis)])
        chain = Chain.begin(store, genesis.dataset, run, "writer", software)
        began = RunRecord(
            dataset=genesis.dataset, run=run, started_ns=genesis.created_ns, fields=record
        )
        written = store.put_new(layout.run_path(run), [schema.to_bytes(began)])
        chain.append("run", RunBody(run=run, sha256=written.sha256))
        n_rows, n_sequences = 0, 0
        for number, (rows, last) in enumerate(_shards(found, named)):
            shard = f"{run}-{number:06d}"
            commit_shard(store, chain, rows, shard=shard, run=run, order="permuted", seed=number)
            n_rows, n_sequences = n_rows + len(rows.tokens["request"]), last + 1
            progress(n_rows)
        if not n_rows or n_rows != found.n_rows:
            got, expected = f"{n_rows} rows", f"{found.n_rows}, as when it was opened"
            raise bad_set(path, got if n_rows else "no row", expected if n_rows else "activations")
        totals = {"rows": n_rows, "dropped_tokens": 0, "recomputed_tokens": 0}
        chain.close("finished", totals)
    return Imported(
        kind=found.kind,
        run=run,
        hooks=[hook.name for hook in named],
        n_rows=n_rows,
        n_sequences=n_sequences,
        unknown=list(found.unknown),
        left_out=list(found.left_out),
    )


def _name_hooks(found: ForeignSet, given: str | Sequence[str] | None, path: Path) -> list[Hook]:
    if given is None:
        called = [own_name(hook) for hook in found.hooks]
    else:
        called = [given] if isinstance(given, str) else list(given)
    if len(called) != len(found.hooks):
        raise ActdsError(
            "E007", str(path), got=f"{len(called)} names", expected=f"{len(found.hooks)} hooks",
            next_step='Name each with hooks="KIND.LAYER", in the order of the set.',
        )  # fmt: skip
    hooks = []
    for name, one in zip(called, found.hooks, strict=True):
        hook = named_hook(name, one)
        if hook is None:
            got = f"the hook {name!r}" if name else "a hook without a name"
            raise ActdsError(
                "E007", str(path), got=got, expected="KIND.LAYER, for example resid_post.10",
                next_step='Say with hooks="KIND.LAYER" which place of the model the rows are of.',
            )  # fmt: skip
        hooks.append(hook)
    if len({hook.name for hook in hooks}) < len(hooks):
        raise ActdsError("E007", str(path), got=", ".join(called), expected="different hooks")
    return hooks


def named_hook(name: str, one: ForeignHook) -> Hook | None:
    """None where the name is not ``KIND.LAYER``."""
    match = _OWN.fullmatch(name)
    if match is None:
        return None
    try:
        return Hook(
            name=name,
            kind=match[1],
            layer=int(match[2]),
            d_model=one.d_model,
            dtype=one.dtype,  # type: ignore[arg-type]  # one of the format's
        )
    except ValidationError:
        return None


def _shards(found: ForeignSet, hooks: list[Hook]) -> Iterator[tuple[ShardRows, int]]:
    """Rows of shards of bounded size, each with the number of its last sequence."""
    row_nbytes = sum(hook.d_model * DTYPES[hook.dtype].itemsize for hook in hooks)
    most = max(1, BLOCK_NBYTES // row_nbytes)
    held: list[Block] = []
    n_held = 0
    for block in found.blocks():
        for start in range(0, len(block.position), most):
            piece = _slice(block, start, start + most)
            if n_held + len(piece.position) > most:
                yield _joined(held, hooks), held[-1].sequence
                held, n_held = [], 0
            held.append(piece)
            n_held += len(piece.position)
    if held:
        yield _joined(held, hooks), held[-1].sequence


def _slice(block: Block, start: int, stop: int) -> Block:
    ids = None if block.token_ids is None else block.token_ids[start:stop]
    bits = [rows[start:stop] for rows in block.bits]
    return Block(block.sequence, block.position[start:stop], ids, bits)


def _joined(held: list[Block], hooks: list[Hook]) -> ShardRows:
    lengths = [len(block.position) for block in held]
    n_rows = sum(lengths)
    nothing = {
        "token_id": np.uint32, "step": np.uint64, "attempt": np.uint16, "chunk": np.uint32,
        "flags": np.uint16,
    }  # fmt: skip
    tokens: dict[str, npt.NDArray[Any]] = {n: np.zeros(n_rows, t) for n, t in nothing.items()}
    tokens["request"] = np.repeat([block.sequence for block in held], lengths).astype(np.uint32)
    tokens["position"] = np.concatenate([block.position for block in held]).astype(np.uint32)
    ids = [block.token_ids for block in held if block.token_ids is not None]
    if ids:
        tokens["token_id"] = np.concatenate(ids).astype(np.uint32)
    return ShardRows(
        hooks={
            hook.name: np.concatenate([block.bits[n] for block in held])
            for n, hook in enumerate(hooks)
        },
        dtypes={hook.name: hook.dtype for hook in hooks},
        tokens=tokens,
        phase="prefill",
        first_step=0,
        last_step=0,
    )


def _fields(
    found: ForeignSet, path: Path, hooks_given: bool, hooks: list[Hook], declare: Mapping[str, Any]
) -> dict[str, ProvenanceField]:
    """All unknown but for what is seen and declared."""
    reason = f"imported from a set ({found.kind}) that does not say it"
    fields = {
        name: ProvenanceField(value=None, origin="unknown", reason=reason)
        for name in REQUIRED_PROVENANCE
    }
    observed: dict[str, Any] = {
        "capture.order": "permuted",
        "import.kind": found.kind,
        "import.source": storable(path.absolute().name),
        "import.sha256": _digest(found.files),
        "import.n_files": len(found.files),
        "import.left_out": list(found.left_out),
        UNKNOWN_FIELD: list(found.unknown),
    }
    exported = (path if path.is_dir() else path.parent) / RECORD_FILE
    if exported.is_file():
        digest = read_document(exported).get("digest")
        declare = {"import.dataset_digest": digest, **declare} if digest else declare
    called = [hook.called or "none" for hook in found.hooks]
    observed["import.hooks_called"] = called
    if hooks_given:
        declare = {"import.hooks": [hook.name for hook in hooks], **declare}
    origins: tuple[tuple[Literal["observed", "declared"], Mapping[str, Any]], ...] = (
        ("observed", observed),
        ("declared", declare),
    )
    for origin, facts in origins:
        for name, value in facts.items():
            known = name in REQUIRED_PROVENANCE or name.startswith("import.")
            try:
                if not known:
                    raise ValueError(name)
                fields[name] = ProvenanceField(value=value, origin=origin, reason=None)
            except (ValidationError, ValueError):
                raise ActdsError(
                    "E009", "declare", got=f"{name} = {value!r}"[:200],
                    expected="a name of the run record, and a boolean, integer or string",
                ) from None  # fmt: skip
    return fields


def _digest(files: list[Path]) -> str:
    """SHA-256 over the sorted ``name sha256`` lines of files, as of model weights."""
    lines = []
    for path in files:
        with path.open("rb") as file:
            lines.append(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n")
    return hashlib.sha256("".join(sorted(lines)).encode(errors="surrogateescape")).hexdigest()
