"""Readouts' tokens: those of the stored rows, one per position, and those of the census' digests.

Beside ``readouts``, whose tables it takes; knows no values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.format import layout, tables
from actds.format.positions import Keys, position_key, split_key
from actds.format.shard import TOKENS
from actds_validators.validate.inventory import Inventory

_Tokens = tuple[Keys, npt.NDArray[np.int64]]
"""Keys of positions, and the token of each."""
KEY = ["request", "position"]


class _Lines(Protocol):
    @property
    def table(self) -> pa.Table:
        """Return the lines of one hook: request, position, step and token_id at least."""


def check_tokens(inventory: Inventory, run: str, hooks: Mapping[str, _Lines]) -> None:
    """Check the tokens that the readouts of a run name; notes E417.

    Args:
        inventory: the dataset.
        run: whose readouts.
        hooks: the readouts by hook.

    Spec: 0.1 section 7.8.
    """
    known: _Tokens = (np.empty(0, np.uint64), np.empty(0, np.int64))
    for manifest in inventory.shards:
        path = f"{layout.shard_dir(manifest.shard)}/{TOKENS}"
        if manifest.run == run and path not in inventory.unsound:
            columns = [*KEY, "token_id"]
            rows = tables.from_parquet("tokens", inventory.read(path), path, columns)
            known = _joined(known, _tokens(rows))
    wrong = 0
    for hook, lines in hooks.items():
        keys, ids = _tokens(lines.table)
        both = _joined(known, (keys, ids))
        at = np.searchsorted(both[0], keys)
        differ = np.flatnonzero(both[1][at] != ids)
        if len(differ):
            wrong += 1
            _note(inventory, run, hook, (keys[differ], ids[differ]), int(both[1][at[differ[0]]]))
        known = both
    if not wrong:
        _check_digests(inventory, run, known)


def keys_of(table: pa.Table) -> Keys:
    """Return the key of the position of each line."""
    return position_key(*(table[name].to_numpy() for name in KEY))


def _note(inventory: Inventory, run: str, hook: str, lines: _Tokens, want: int) -> None:
    (keys, ids), n_more = lines, len(lines[0]) - 1
    request, position = split_key(keys[0])
    inventory.add(
        "accounting",
        "E417",
        f"readouts/{run} {hook} request {request} position {position} token_id "
        f"(and {n_more} more lines)",
        str(int(ids[0])),
        f"{want}, as its row or another line says",
    )


def _check_digests(inventory: Inventory, run: str, known: _Tokens) -> None:
    """Compare the tokens of every request of which all are known with the census' digest."""
    requests_read = inventory.sound_table(run, "requests")
    spans_read = inventory.sound_table(run, "spans")
    if requests_read is None or spans_read is None:
        return
    keys, ids = known
    spans = spans_read.filter(pc.is_valid(spans_read["ref_request"]))
    references: dict[int, list[tuple[int, int, int]]] = {}
    names = ("request", "start", "stop", "ref_request")
    for request, *span in zip(*(spans[name].to_pylist() for name in names), strict=True):
        references.setdefault(request, []).append((span[0], span[1], span[2]))
    names = ("request", "prompt_len", "generated_len", "token_digest")
    columns = (requests_read[name].to_pylist() for name in names)
    for request, prompt_len, generated_len, digest in zip(*columns, strict=True):
        length = prompt_len + max(generated_len - 1, 0)
        if digest is None or not 0 < length <= len(keys):
            continue
        whose = np.full(length, request, np.int64)
        for start, stop, of in references.get(request, []):
            whose[start:stop] = of
        wanted = position_key(whose, np.arange(length))
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        if not (keys[at] == wanted).all():
            continue
        got = hashlib.sha256(ids[at].astype("<u4").tobytes()).hexdigest()
        if got != digest:
            inventory.add(
                "accounting",
                "E417",
                f"readouts/{run} request {request} token_id",
                f"ids of digest {got[:16]}...",
                f"{digest[:16]}..., the census' token_digest",
            )


def _tokens(table: pa.Table) -> _Tokens:
    return keys_of(table), table["token_id"].to_numpy().astype(np.int64)


def _joined(known: _Tokens, more: _Tokens) -> _Tokens:
    """Return the keys of both, each once and sorted, with the token that was known first."""
    keys, first = np.unique(np.concatenate([known[0], more[0]]), return_index=True)
    return keys, np.concatenate([known[1], more[1]])[first]
