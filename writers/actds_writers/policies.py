"""Overflow policies: what happens to a step for which a ring has no room.

One class each; its name is used in options, run records and drop logs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol


class Rings(Protocol):
    """What a policy can do with the two rings."""

    def wait(self, entry: Any, stage: str) -> None:
        """Wait for room in ``staging`` or ``ring``."""

    def drop_staged(self) -> bool:
        """Drop the oldest step that waits in stage 1; return whether there was one."""

    def drop_ready(self) -> bool:
        """Drop the oldest step in stage 2 that the writer has not taken; return as above."""


class Policy(ABC):
    """What happens to a step for which a ring has no room.

    Both methods are called under the handover's lock, again until the step fits. They return
    whether to try again; if not, the step itself is dropped.
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
    """The engine waits; no row is lost."""

    name = "block"
    summary = "the engine waits"

    def staging_is_full(self, rings: Rings, entry: Any) -> bool:
        rings.wait(entry, "staging")
        return True


class DropOldest(Policy):
    """The step that has waited longest is dropped, in either ring."""

    name = "drop_oldest"
    summary = "the steps that waited longest are dropped and recorded"

    def staging_is_full(self, rings: Rings, entry: Any) -> bool:
        return rings.drop_staged()

    def ring_is_full(self, rings: Rings, entry: Any) -> bool:
        return rings.drop_ready()


class DropNewest(Policy):
    """The new step is dropped."""

    name = "drop_newest"
    summary = "the newest steps are dropped and recorded"

    def staging_is_full(self, rings: Rings, entry: Any) -> bool:
        return False


POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (Block(), DropOldest(), DropNewest())
}
