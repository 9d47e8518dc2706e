"""Token sequences as the requests of a harvest: how replay and canary serve them again.

Each sequence is one prompt. The token that an engine has to sample is never fed, so every position
has the token that it had, and none is generated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath

from actds.dataset.reading import Catalog
from actds.explore.sequences import TokenSequence
from actds_writers.harvest.prepare import request_key
from actds_writers.ipc.messages import PromptFact, Replayed
from actds_writers.prompts.encoding import Encoded
from actds_writers.prompts.records import Prompt
from actds_writers.roles import LETTERS, UNKNOWN, packed

NO_ROLES = "a request without roles in the source"


def as_requests(
    sequences: Iterable[TokenSequence],
    source: Catalog,
    skip: Callable[[TokenSequence], str | None] = lambda one: one.unknown,
) -> tuple[list[Encoded], list[PromptFact]]:
    """Return sequences as prompts in their order, and what the tables say of each.

    Args:
        sequences: the sequences.
        source: the dataset of their requests.
        skip: returns the reason to skip one, ``None`` to serve it.
    """
    encoded, client = [], []
    for index, one in enumerate(sequences):
        encoded.append(_encoded(index, one, PurePosixPath(source.store.uri).name, skip(one)))
        client.append(_client(index, one, source, encoded[-1]))
    return encoded, client


def _encoded(index: int, one: TokenSequence, name: str, skip: str | None) -> Encoded:
    labels = "".join(LETTERS[role] if role else UNKNOWN for role in one.role)
    known = bool(labels.strip(UNKNOWN)) and skip is None
    return Encoded(
        Prompt(index, name, index, None, None, one.line["external_id"]),
        [] if skip else one.token_id.tolist(),
        max_tokens=1,
        skip=skip,
        roles=packed(labels) if known else "",
        roles_unknown=None if known else NO_ROLES,
    )


def _client(index: int, one: TokenSequence, source: Catalog, encoded: Encoded) -> PromptFact:
    return PromptFact(
        request_key(index),
        one.line["external_id"],
        one.line["source"],
        one.line["source_row"],
        encoded.skip,
        encoded.roles,
        Replayed(
            source.genesis.dataset,
            source.digest,
            one.run,
            one.request,
            one.n_given,
        ),
        len(one.token_id),
        one.line["labels"] and sys.intern(one.line["labels"]),
    )
