"""Errors and findings: a code, a place, what is there, what was expected, and the next step.

An error has a class by what a caller can do about it; several are standard ones as well, so that
``except FileNotFoundError`` works. ``actds.codes`` maps each code to its class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, Self

from actds.codes import CODES as CODES
from actds.codes import Code as Code

Severity = Literal["error", "warning", "note"]
CheckName = Literal["ledger", "structure", "integrity", "provenance", "accounting", "values"]


class ActdsError(Exception):
    """An error of actds: a code, a place, what is there, what is expected, what to do.

    It is the base of every error: ``ActdsError(code, …)`` makes one of the class of its code. Its
    text is ``CODE PLACE: GOT; expected EXPECTED.``, then the next step.

    Args:
        code: for example ``E203``; a key of ``actds.errors.CODES``.
        place: where: a path inside the dataset, an option, a line.
        got: what is there.
        expected: what is expected there.
        next_step: what to do; the advice of the code when None, in which PLACE is the place.

    Attributes: the arguments by their names, and ``exit_code``.

    Spec: 0.1 section 12.
    """

    def __new__(cls, code: str, *_: Any, **__: Any) -> Self:
        kind: type[ActdsError] = globals()[CODES[code].error] if cls is ActdsError else cls
        # One argument: OSError's own reads two of them as an errno and its words.
        return super(ActdsError, kind).__new__(kind, code)  # type: ignore[return-value]

    def __init__(
        self, code: str, place: str, *, got: str, expected: str, next_step: str | None = None
    ) -> None:
        self.code = code
        self.place = place
        self.got = got
        self.expected = expected
        self.next_step = next_step or advice(code, place)
        first = " ".join(f"{code} {place}: {got}; expected {expected}.".splitlines())
        self.args = (f"{first}\n{self.next_step}",)

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def exit_code(self) -> int:
        """Return the exit code of a command that ends with this error.

        2 for wrong use (E0xx), 3 for a dataset that cannot be used (E1xx to E4xx, E6xx,
        E8xx), 4 when the engine or actds failed (E5xx, E9xx), 5 for one that a policy refuses
        (E7xx).
        """
        return CODES[self.code].exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        words = {"got": self.got, "expected": self.expected, "next_step": self.next_step}
        return (partial(type(self), **words), (self.code, self.place))


class InvalidInputError(ActdsError, ValueError):
    """An argument, an option or an input file cannot be used: correct it."""


class NotFoundError(ActdsError, FileNotFoundError):
    """The path does not exist: give another path."""


class ExistsError(ActdsError, FileExistsError):
    """The path exists already: give another one, or resume what is there."""


class BusyError(ActdsError, BlockingIOError):
    """Another program works on the dataset, or has fenced this chain: wait, or start a new run."""


class NotSealedError(ActdsError):
    """The dataset is not complete yet: wait for its writers, recover it, or seal it."""


class NoProvenanceError(ActdsError):
    """The run record or the census is missing: do not train on these rows."""


class InvalidDatasetError(ActdsError):
    """The dataset breaks the format: restore it from a copy, or write it again."""


class UntrustedError(ActdsError):
    """Nobody whom the caller trusts vouches for the dataset as it is: get it from its source."""


class RefusedError(ActdsError):
    """The gate does not let the dataset pass: train on another one, or fix what it lists.

    Attributes:
        reasons: every finding of the validation and every rule of the policy that it fails.
    """

    def __init__(
        self,
        code: str,
        place: str,
        *,
        got: str,
        expected: str,
        next_step: str | None = None,
        reasons: Sequence[Finding] = (),
    ) -> None:
        super().__init__(code, place, got=got, expected=expected, next_step=next_step)
        self.reasons = tuple(reasons)
        if reasons:
            first, _, rest = str(self).partition("\n")
            self.args = ("\n".join([first, *(f"  {reason.line()}" for reason in reasons), rest]),)

    def __reduce__(self) -> tuple[Any, ...]:
        return (*super().__reduce__(), {"reasons": self.reasons, "args": self.args})


class StoreError(ActdsError, OSError):
    """The disk or the object store refused: free space or fix it, then try again."""


class EngineError(ActdsError, RuntimeError):
    """The engine, or a process of the harvest, failed: see its log, then resume."""


class MissingDependencyError(ActdsError, ImportError):
    """An optional package is not installed: install the named extra."""


class InternalError(ActdsError, RuntimeError):
    """actds failed unexpectedly: report it."""


def advice(code: str, place: str) -> str:
    """Return what to do about a code at a place."""
    return re.sub(r"\bPLACE\b", lambda _: " ".join(place.split()), CODES[code].next_step)


def code_entry(code: str) -> Code:
    """Return what a code means.

    Raises:
        ActdsError: E013 when there is no such code.
    """
    entry = CODES.get(code)
    if entry is None:
        raise ActdsError("E013", code, got="an unknown code", expected="one of actds explain")
    return entry


def not_installed(package: str, extra: str, place: str | None = None) -> ActdsError:
    """Return E011 for a missing package, with the command that installs it.

    Args:
        extra: the extra of actds that brings it; several are joined by a comma.
        place: what needs it, by default the package.
    """
    return ActdsError(
        "E011",
        place or package,
        got=f"the package {package} is not installed",
        expected=f"the extra {extra} of actds",
        next_step=f"In a checkout of actds: pip install '.[{extra}]'",
    )


@dataclass(frozen=True)
class Finding:
    """One fact about one place of a dataset, with a stable code.

    Args:
        code: a key of ``CODES``.
        place: path inside the dataset, with the row, request or field where it applies.
        got: what is there.
        expected: what the spec asks for.
        severity: ``error`` fails the check; ``warning`` and ``note`` do not.
        next_step: what to do about it; the advice of the code without.

    Spec: 0.1 section 12.
    """

    code: str
    place: str
    got: str
    expected: str
    severity: Severity = "error"
    next_step: str = ""

    def __post_init__(self) -> None:
        if not self.next_step:
            object.__setattr__(self, "next_step", code_entry(self.code).next_step)

    def line(self) -> str:
        return f"{self.code} {self.place}: {self.got}; expected {self.expected}."

    def as_json(self) -> dict[str, Any]:
        """Return the finding as ``actds validate --json`` lists it."""
        return asdict(self)

    @classmethod
    def from_error(cls, error: ActdsError) -> Finding:
        return cls(error.code, error.place, error.got, error.expected, next_step=error.next_step)

    def error(self) -> ActdsError:
        return ActdsError(
            self.code, self.place, got=self.got, expected=self.expected, next_step=self.next_step
        )


class Findings:
    """What was found so far, by check.

    Args:
        strict: raise the first finding of severity ``error``.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._found: list[tuple[CheckName, Finding]] = []

    def __iter__(self) -> Iterator[tuple[CheckName, Finding]]:
        return iter(self._found)

    def take(self, check: CheckName, finding: Finding | ActdsError) -> None:
        """Note a finding, or an error as one; a strict one raises it."""
        if isinstance(finding, ActdsError):
            if self._strict:
                raise finding
            finding = Finding.from_error(finding)
        elif self._strict and finding.severity == "error":
            raise finding.error()
        self._found.append((check, finding))

    def add(
        self,
        check: CheckName,
        code: str,
        place: str,
        got: str,
        expected: str,
        severity: Severity = "error",
    ) -> None:
        self.take(check, Finding(code, place, got, expected, severity))

    @contextmanager
    def noting(self, check: CheckName) -> Iterator[None]:
        """Run a block; the error that ends it becomes a finding of a check, as in ``take``."""
        try:
            yield
        except ActdsError as error:
            self.take(check, error)
