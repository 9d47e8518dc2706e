"""Overflow policies: what becomes of a step for which a ring has no room.

One class each; the name stands in options, run records and drop logs. Imports nothing heavy, so
that the command can list them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol


class Rings(Protocol):
    """What a policy can do: the handover's side of both rings."""

    def wait(self, entry: Any, stage: str) -> None:
        """Let a step wait for room in ``staging`` or ``ring``."""

    def drop_staged(self) -> bool:
        """Give up the oldest step that waits in stage 1; return whether there was one."""

    def drop_ready(self) -> bool:
        """Give up the oldest step in stage 2 that the writer does not hold; return as above."""


class Policy(ABC):
    """What becomes of a step for which a ring has no room.

    Both methods are called under the handover's lock, again until the step fits. They return
    whether it is worth another try: if not, the step itself is given up.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """Half a line of help."""

    @abstractmethod
    def staging_is_full(self, rings: Rings, entry: Any) -> bool:
        """Make room in stage 1, in the engine's thread."""

    def ring_is_full(self, rings: Rings, entry: Any) -> bool:
        """Make room in stage 2, in the transfer's thread: wait, and let stage 1 fill up."""
        rings.wait(entry, "ring")
        return True


class Block(Policy):
    """Nothing is lost, and the engine is slowed to the pace of the disk."""

    name = "block"
    summary = "the engine waits"

    def staging_is_full(self, rings: Rings, entry: Any) -> bool:
        """Let the engine wait."""
        rings.wait(entry, "staging")
        return True


class DropOldest(Policy):
    """What has waited longest is lost, at either ring."""

    name = "drop_oldest"
    summary = "the steps that waited longest are lost, and recorded"

    def staging_is_full(self, rings: Rings, entry: Any) -> bool:
        """Give up the oldest step that waits in stage 1."""
        return rings.drop_staged()

    def ring_is_full(self, rings: Rings, entry: Any) -> bool:
        """Give up the oldest step that the writer does not hold."""
        return rings.drop_ready()


class DropNewest(Policy):
    """What comes now is lost."""

    name = "drop_newest"
    summary = "the newest steps are lost, and recorded"

    def staging_is_full(self, rings: Rings, entry: Any) -> bool:
        """Give up the step itself."""
        return False


POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (Block(), DropOldest(), DropNewest())
}
