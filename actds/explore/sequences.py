"""The token sequence of every request of a dataset, so that it can be served again.

Tokens come from rows, from the rows that prefix-cache references name, and from readouts, which
lost rows have too. The digest of the census says whether they are the right ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from actds.explore.dataset import Dataset
from actds.format.positions import Keys, position_key
from actds.format.roles import Roles
from actds.format.tables import UNSERVED

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenSequence:
    """What a request fed to the model, prompt and sampled tokens; ``n`` positions.

    One that was never served has the positions of its prompt, and no token.

    Args:
        run: run of the request.
        request: number of the request.
        line: its line of the table ``requests``.
        token_id: token of each position, int64 ``(n,)``; -1 where none is known.
        role: who wrote each, None where that is not known.
        n_given: positions from 0 that were given; those after them were sampled. Of a request that
            was a replay itself, as its own origin says.
        unknown: why the sequence is not known, in words; None where it has the census' digest.
    """

    run: str
    request: int
    line: dict[str, Any]
    token_id: Ints
    role: list[str | None]
    n_given: int
    unknown: str | None


def token_sequences(dataset: Dataset) -> Iterator[TokenSequence]:
    """Yield the token sequence of every request, by run and number.

    Holds 16 bytes for each row and readout of a run while it works on it.

    Raises:
        ActdsError: as reading tables.

    Spec: 0.1 sections 6.3 and 7.4.
    """
    for run in dataset.catalog.run_ids:
        requests = dataset.catalog.table("requests", run).sort_by("request").to_pylist()
        if not requests:
            continue
        tokens = _Tokens(dataset, run)
        spans = _by_request(dataset.catalog.table("spans", run).sort_by("start").to_pylist())
        origins = dataset.catalog.table("origins", run)
        given = dict(
            zip(origins["request"].to_pylist(), origins["n_given"].to_pylist(), strict=True)
        )
        roles = Roles(dataset.catalog.table("roles", run))
        for line in requests:
            number, n_sampled = line["request"], line["generated_len"]
            n = line["prompt_len"] + max(n_sampled - 1, 0)
            token_id = tokens.of(spans.get(number, []), number, n)
            role = roles.of(np.full(n, number, np.int64), np.arange(n)).to_pylist()
            n_given = min(given.get(number, line["prompt_len"]), n)
            why = _unknown(line, token_id)
            yield TokenSequence(run, number, line, token_id, role, n_given, why)


class _Tokens:
    def __init__(self, dataset: Dataset, run: str) -> None:
        catalog = dataset.catalog
        names = ["request", "position", "token_id"]
        parts = [shard.tokens(names) for shard in dataset.shards if shard.run == run]
        if (run, "readouts") in catalog.parts:
            parts.append(catalog.table("readouts", run).select(names))
        keys: list[Keys] = [position_key(part["request"], part["position"]) for part in parts]
        ids = [part["token_id"].to_numpy().astype(np.int64) for part in parts]
        self._keys, first = np.unique(
            np.concatenate([*keys, np.empty(0, np.uint64)]), return_index=True
        )
        self._ids: Ints = np.concatenate([*ids, np.empty(0, np.int64)])[first]

    def of(self, spans: list[dict[str, Any]], request: int, n: int) -> Ints:
        """Return the tokens of the positions [0, n) of a request, -1 where none is known."""
        token_id: Ints = np.full(n, -1, np.int64)
        for span in spans:
            is_reference = span["disposition"] == "cache_ref"
            owner = span["ref_request"] if is_reference else request
            start, stop = span["start"], min(span["stop"], n)
            if owner is None or start >= stop or not len(self._keys):
                continue
            wanted = position_key(owner, np.arange(start, stop))
            at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
            known = self._keys[at] == wanted
            token_id[start:stop][known] = self._ids[at[known]]
        return token_id


def _by_request(lines: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    by_request: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        by_request.setdefault(line["request"], []).append(line)
    return by_request


def _unknown(line: dict[str, Any], token_id: Ints) -> str | None:
    """Return why a request's tokens are not known, None where they are."""
    if line["finish_reason"] in UNSERVED:
        return f"it was {line['finish_reason']} ({line['reason']})"
    if line["token_digest"] is None:
        return f"its census states no digest of its tokens ({line['finish_reason']})"
    n_unknown = int((token_id < 0).sum())
    if n_unknown or not len(token_id):
        return f"no row, reference or readout has {n_unknown} of its {len(token_id)} tokens"
    got = hashlib.sha256(token_id.astype("<u4").tobytes()).hexdigest()
    if got != line["token_digest"]:
        return f"its tokens have the digest {got[:16]}, the census says {line['token_digest'][:16]}"
    return None
