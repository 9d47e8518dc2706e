"""Overflow policies: what becomes of a step for which a ring has no room.

One class each; the name stands in options, run records and drop logs. Imports nothing heavy, so
that the command can list them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from actds_writers.capture.overflow import Entry, Handover

__all__ = ["POLICIES", "Policy"]


class Policy(ABC):
    """What becomes of a step for which a ring has no room.

    Both methods are called under the handover's lock, again until the step fits. They return
    whether it is worth another try: if not, the step itself is given up.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """Half a line of help."""
    loses: ClassVar[bool]
    """Whether rows are lost under it, rather than time."""

    @abstractmethod
    def staging_is_full(self, handover: Handover, entry: Entry) -> bool:
        """Make room in stage 1, in the engine's thread."""

    def ring_is_full(self, handover: Handover, entry: Entry) -> bool:
        """Make room in stage 2, in the transfer's thread: wait, and let stage 1 fill up."""
        handover.wait(entry, "ring")
        return True


class Block(Policy):
    """Nothing is lost, and the engine is slowed to the pace of the disk."""

    name = "block"
    summary = "the engine waits"
    loses = False

    def staging_is_full(self, handover: Handover, entry: Entry) -> bool:
        """Let the engine wait."""
        handover.wait(entry, "staging")
        return True


class DropOldest(Policy):
    """What has waited longest is lost, at either ring."""

    name = "drop_oldest"
    summary = "the steps that waited longest are lost, and recorded"
    loses = True

    def staging_is_full(self, handover: Handover, entry: Entry) -> bool:
        """Give up the oldest step that waits in stage 1."""
        return handover.drop_staged()

    def ring_is_full(self, handover: Handover, entry: Entry) -> bool:
        """Give up the oldest step that the writer does not hold."""
        return handover.drop_ready()


class DropNewest(Policy):
    """What comes now is lost."""

    name = "drop_newest"
    summary = "the newest steps are lost, and recorded"
    loses = True

    def staging_is_full(self, handover: Handover, entry: Entry) -> bool:
        """Give up the step itself."""
        return False


POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (Block(), DropOldest(), DropNewest())
}
