"""Replacement: which shards stand, once every ``replace`` record of a ledger is taken.

Stands between the ledger and the catalogue; pure, imports the documents only.
"""

from __future__ import annotations

from dataclasses import dataclass

from actds.errors import ActdsError
from actds.schema import FileEntry, ReplaceBody, ShardManifest

__all__ = ["Replacement", "Standing", "resolve"]

TOKENS = "tokens.parquet"
SAME_FIELDS = (
    "run",
    "phase",
    "n_rows",
    "hooks",
    "order",
    "permutation_seed",
    "first_step",
    "last_step",
    "row_set_sha256",
)


@dataclass(frozen=True)
class Replacement:
    """A ``replace`` record, the place of the record, and the manifest that it commits."""

    body: ReplaceBody
    place: str
    manifest: ShardManifest


@dataclass(frozen=True)
class Standing:
    """What the replace records of a ledger make of its shards.

    Args:
        shards: shards that are read; one that replaces another stands in its place.
        replaced: shards that are read no more.
        errors: E311 of each record that does not hold; it has no effect.
    """

    shards: list[ShardManifest]
    replaced: list[ShardManifest]
    errors: list[ActdsError]


def resolve(committed: list[ShardManifest], replacements: list[Replacement]) -> Standing:
    """Return which shards stand.

    Chains have no order among each other, so a record waits until the shard that it replaces is
    committed, by a ``shard`` or by another ``replace`` record.

    Args:
        committed: shards of the ``shard`` records, in the order of a reader.
        replacements: the ``replace`` records, each chain's in order.

    Spec: 0.1 section 8.5.
    """
    shards, replaced, errors = list(committed), list[ShardManifest](), list[ActdsError]()
    at = {manifest.shard: index for index, manifest in enumerate(shards)}
    waiting, n_before = list(replacements), -1
    while waiting and len(waiting) != n_before:
        n_before, later = len(waiting), list[Replacement]()
        for one in waiting:
            index = at.get(one.body.replaced)
            if index is None:
                later.append(one)
                continue
            try:
                _check(one, shards[index])
            except ActdsError as error:
                errors.append(error)
                continue
            replaced.append(shards[index])
            shards[index] = one.manifest
            at[one.manifest.shard] = index
        waiting = later
    for one in waiting:
        errors.append(
            _misfit(one, f"shard {one.body.replaced}, which is not committed", "a committed shard")
        )
    return Standing(shards, replaced, errors)


def _check(one: Replacement, old: ShardManifest) -> None:
    """Check that a shard stands and that another one holds the same rows in the same order.

    Raises:
        ActdsError: E311.
    """
    if old.shard != one.body.replaced:
        raise _misfit(one, f"shard {one.body.replaced}, replaced already", "a shard that stands")
    for name in SAME_FIELDS:
        got, expected = getattr(one.manifest, name), getattr(old, name)
        if got != expected:
            raise _misfit(one, f"{name} {got}", f"{expected}, as of shard {old.shard}")
    got_tokens, tokens = _tokens(one.manifest), _tokens(old)
    if got_tokens != tokens:
        raise _misfit(one, f"other bytes in {TOKENS}", f"those of shard {old.shard}")


def _tokens(manifest: ShardManifest) -> list[FileEntry]:
    return [entry for entry in manifest.files if entry.path == TOKENS]


def _misfit(one: Replacement, got: str, expected: str) -> ActdsError:
    return ActdsError("E311", one.place, got=got[:400], expected=expected[:400])
