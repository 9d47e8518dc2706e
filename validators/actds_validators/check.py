"""May I train on it: whether a dataset is valid, and if it is, the verdict of its audit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actds_validators.audit.run import AuditResult
    from actds_validators.validate.validation import Progress, Validation

# The verdicts that are no reason to train on it as it is.
_FAILING = {False: {"FAIL"}, True: {"FAIL", "INCONCLUSIVE", "WARN"}}


@dataclass(frozen=True)
class CheckResult:
    """What ``actds check`` says.

    Args:
        validation: the validation at level ``full``.
        audit: the audit; None of a dataset that is not valid, which nothing can be said about.
    """

    validation: Validation
    audit: AuditResult | None

    @property
    def is_valid(self) -> bool:
        """Return whether the dataset conforms, every byte of it."""
        return self.validation.exit_code() == 0

    @property
    def answer(self) -> str:
        """Return whether to train on it, in a few words."""
        if self.audit is not None:
            return self.audit.result.answer.words
        if self.validation.dataset is None:
            return "No: it cannot be read as a dataset"
        return "No: it is not valid"

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 0 valid and the answer is not no, 1 otherwise, 3 not readable as a dataset.

        Args:
            strict: warnings, and every answer but yes, end with 1 as well.
        """
        code = self.validation.exit_code(strict=strict)
        if code or self.audit is None:
            return code
        return int(self.audit.result.answer.level in _FAILING[strict])

    def as_json(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the result as ``actds check --json`` prints it."""
        result = None if self.audit is None else self.audit.result
        return {
            "path": self.validation.path,
            "strict": strict,
            "ok": self.exit_code(strict=strict) == 0,
            "exit_code": self.exit_code(strict=strict),
            "valid": self.is_valid,
            "verdict": None if result is None else result.answer.level,
            "answer": self.answer,
            "validation": self.validation.as_json(strict=strict),
            "audit": None if result is None else result.as_json(),
        }


def check(
    path: str | Path,
    *,
    accept: Sequence[str] = (),
    validating: Progress = lambda what, amount: None,
    auditing: Callable[[str], None] = lambda what: None,
) -> CheckResult:
    """Validate a dataset with every byte of it, then audit it if it is valid.

    Args:
        path: the dataset.
        accept: places that are waived by name, as of ``audit``.
        validating: as ``progress`` of ``validate``.
        auditing: as ``progress`` of ``audit``.

    Raises:
        ActdsError: E011 a package of the audit is not installed; and as ``audit``.

    Spec: 0.1 sections 12 and 14.
    """
    from actds_validators.audit.api import audit
    from actds_validators.extras import need_extra
    from actds_validators.validate.validation import validate

    need_extra()  # before minutes of hashing
    validation = validate(path, "full", validating)
    if validation.exit_code():
        return CheckResult(validation, None)
    return CheckResult(validation, audit(path, accept=accept, progress=auditing))
