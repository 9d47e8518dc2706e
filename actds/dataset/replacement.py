"""Replacement: what a tool commits stands in the place of an older shard or part.

Between the ledger and the catalogue: a record that does not fit has no effect and is E311.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from actds.errors import ActdsError, Findings
from actds.format.schema import (
    Body,
    FileEntry,
    PartBody,
    RedactBody,
    ReplaceBody,
    ShardBody,
    ShardManifest,
)
from actds.format.shard import TOKENS
from actds.store import layout

_SAME_ROWS = (
    "run",
    "phase",
    "n_rows",
    "hooks",
    "values",
    "order",
    "permutation_seed",
    "first_step",
    "last_step",
    "row_set_sha256",
)
_SAME_IN_REDACTION = ("run", "phase", "hooks", "order", "permutation_seed")

Item = TypeVar("Item", ShardManifest, PartBody)


@dataclass(frozen=True)
class Replacement:
    """A ``replace`` or ``redact`` record.

    Args:
        run: of its chain.
        place: path of the record.
        body: its body.
        manifest: the manifest that it commits; None for a part, and for a shard without rows.

    Spec: 0.1 sections 8.5 and 8.6.
    """

    run: str
    place: str
    body: ReplaceBody | RedactBody
    manifest: ShardManifest | None = None

    @property
    def old(self) -> str:
        """Return the path of the manifest or part that it replaces."""
        if isinstance(self.body, ReplaceBody):
            return layout.manifest_path(self.body.replaced)
        return self.body.replaced

    @property
    def shard(self) -> str | None:
        """Return the shard that it replaces, None for a part."""
        return layout.shard_of(self.old)

    @property
    def part(self) -> str | None:
        """Return the path of the part that it commits, if it commits one."""
        if isinstance(self.body, ReplaceBody) or self.body.file is None or self.shard is not None:
            return None
        return self.body.file.path

    @property
    def requests(self) -> list[int]:
        """Return the requests that are gone with it."""
        return self.body.requests if isinstance(self.body, RedactBody) else []

    def misfit(self, got: str, expected: str) -> ActdsError:
        return ActdsError("E311", self.place, got=got[:400], expected=expected[:400])


def path_of(item: ShardManifest | PartBody) -> str:
    """Return the path under which a record commits a shard or part."""
    return layout.manifest_path(item.shard) if isinstance(item, ShardManifest) else item.file.path


def committed(body: Body) -> str | None:
    """Return the path of the manifest or part that a record commits."""
    if isinstance(body, ShardBody | ReplaceBody):
        return layout.manifest_path(body.shard)
    if isinstance(body, PartBody | RedactBody):
        return None if body.file is None else body.file.path
    return None


def resolve(
    replacements: Iterable[Replacement],
    items: list[Item],
    new: Callable[[Replacement, Item], Item | None],
    findings: Findings,
) -> tuple[list[Item], list[Item], list[Replacement]]:
    """Return what is current after replacements, what they replaced, and those that fit.

    Chains have no order among each other, so a record waits until what it replaces is committed,
    by another record of its kind, too.

    Args:
        replacements: of items; those that do not fit are noted (E311).
        items: what was committed, in an order that current ones keep.
        new: returns what stands in the place of an item, or raises E311.

    Spec: 0.1 sections 8.5 and 8.6.
    """
    slots: list[Item | None] = list(items)
    at = {path_of(item): n for n, item in enumerate(items)}
    replaced, fitting = list[Item](), list[Replacement]()
    waiting, n_before = list(replacements), -1
    while waiting and len(waiting) != n_before:
        n_before, later = len(waiting), list[Replacement]()
        for replacement in waiting:
            index = at.get(replacement.old)
            if index is None:
                later.append(replacement)
                continue
            old = slots[index]
            try:
                if old is None or path_of(old) != replacement.old:
                    raise replacement.misfit(
                        f"{replacement.old}, replaced already", "a current one"
                    )
                item = new(replacement, old)
            except ActdsError as error:
                findings.take("ledger", error)
                continue
            replaced.append(old)
            fitting.append(replacement)
            slots[index] = item
            if item is not None:
                at[path_of(item)] = index
        waiting = later
    for replacement in waiting:
        got = f"{replacement.old}, which is not committed"
        findings.take("ledger", replacement.misfit(got, "a committed one"))
    return [item for item in slots if item is not None], replaced, fitting


def new_shard(replacement: Replacement, old: ShardManifest) -> ShardManifest | None:
    """Return the manifest in the place of another: of the same rows, or of those that are left."""
    manifest, is_redaction = replacement.manifest, isinstance(replacement.body, RedactBody)
    if manifest is None:
        if replacement.run != old.run:
            raise replacement.misfit(f"shard {old.shard}", f"one of run {replacement.run}")
        return None
    for name in _SAME_IN_REDACTION if is_redaction else _SAME_ROWS:
        got, expected = getattr(manifest, name), getattr(old, name)
        if got != expected:
            raise replacement.misfit(f"{name} {got}", f"{expected}, as of shard {old.shard}")
    if is_redaction:
        if manifest.n_rows >= old.n_rows:
            raise replacement.misfit(f"{manifest.n_rows} rows", f"fewer than {old.n_rows}")
    elif _tokens(manifest) != _tokens(old):
        raise replacement.misfit(f"other bytes in {TOKENS}", f"those of shard {old.shard}")
    return manifest


def new_part(replacement: Replacement, old: PartBody) -> PartBody:
    """Return the part in the place of another part of the same table."""
    body, table = replacement.body, old.table
    assert isinstance(body, RedactBody)
    is_of_run = layout.is_part_path(old.file.path, table, replacement.run)
    if body.file is None or not layout.is_part_path(body.file.path, table, replacement.run):
        got = body.file.path if body.file else "nothing"
        raise replacement.misfit(
            got, layout.part_path(table, replacement.run, 0) + " or a later part"
        )
    if not is_of_run or body.n_rows > old.n_rows:
        got = f"{body.n_rows} rows in place of {old.file.path}"
        raise replacement.misfit(got, f"{old.n_rows} at most, of run {replacement.run}")
    return PartBody(table=table, file=body.file, n_rows=body.n_rows)


def _tokens(manifest: ShardManifest) -> list[FileEntry]:
    return [entry for entry in manifest.files if entry.path == TOKENS]
