"""What a rule of the text says when it is broken: a code and a place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One breach of the text: the code of section 12, the place, what is wrong."""

    code: str
    place: str
    said: str
    severity: str = "error"

    def __str__(self) -> str:
        return f"{self.code} {self.place}: {self.said}"


class Breach(Exception):
    """A rule is broken, and what follows cannot be read."""

    def __init__(self, code: str, place: str, said: object) -> None:
        self.finding = Finding(code, place, str(said))
        super().__init__(str(self.finding))


def need(condition: bool, code: str, place: str, said: object) -> None:
    """Raise a breach unless the condition holds."""
    if not condition:
        raise Breach(code, place, said)


class Findings:
    """Collects what is wrong, so that one breach does not hide the next."""

    def __init__(self) -> None:
        self.all: list[Finding] = []

    def add(self, code: str, place: str, said: object, severity: str = "error") -> None:
        self.all.append(Finding(code, place, str(said), severity))

    def check(self, condition: bool, code: str, place: str, said: object) -> None:
        if not condition:
            self.add(code, place, said)

    def throw(self) -> None:
        """Raise the first error that was noted."""
        for finding in self.all:
            if finding.severity == "error":
                raise Breach(finding.code, finding.place, finding.said)

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Note a breach within the block, and go on behind it."""
        try:
            yield
        except Breach as breach:
            self.all.append(breach.finding)
