"""Findings: what a check or a catalogue says about one place of a dataset."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from actds.errors import ActdsError, code_entry

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One fact about one place, with a stable code.

    Args:
        code: a code of ``actds.errors``.
        place: path inside the dataset, with the row, request or field where it applies.
        got: what is there.
        expected: what the spec asks for.
        severity: ``error`` fails the check; ``warning`` and ``note`` do not.

    Spec: 0.1 section 12.
    """

    code: str
    place: str
    got: str
    expected: str
    severity: Severity = "error"

    @property
    def next_step(self) -> str:
        """Return what a person does about it."""
        return code_entry(self.code).next_step

    def line(self) -> str:
        """Return the finding as one line a person can act on."""
        return f"{self.code} {self.place}: {self.got}; expected {self.expected}."

    def as_json(self) -> dict[str, Any]:
        """Return the finding under the versioned JSON schema of ``actds validate --json``."""
        return {**asdict(self), "next_step": self.next_step}

    @classmethod
    def from_error(cls, error: ActdsError) -> Finding:
        """Return the finding that says the same as an error."""
        return cls(error.code, error.place, error.got, error.expected)
