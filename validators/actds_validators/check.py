"""May I train on it: whether a dataset is valid, and if it is, the verdict of its audit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actds_validators.audit.place import Level
    from actds_validators.audit.run import AuditResult
    from actds_validators.imported import ImportedRows
    from actds_validators.validate.validation import Progress, Validation

# The verdicts that are no reason to train on it as it is.
_FAILING = {False: {"FAIL"}, True: {"FAIL", "INCONCLUSIVE", "WARN"}}


@dataclass(frozen=True)
class CheckResult:
    """What ``actds check`` says.

    Args:
        validation: the validation at level ``full``.
        audit: the audit; None of a dataset that is not valid, which nothing can be said about,
            and of an imported one, which has no census to audit.
        imported: what can be said of imported rows; None where there are none.
    """

    validation: Validation
    audit: AuditResult | None
    imported: ImportedRows | None = None

    @property
    def is_valid(self) -> bool:
        """Return whether the dataset conforms, every byte of it."""
        return self.validation.exit_code() == 0

    @property
    def answer(self) -> str:
        """Return whether to train on it, in a few words."""
        if self.audit is not None:
            return self.audit.result.answer.words
        if self.imported is not None:
            return self.imported.answer
        if self.validation.dataset is None:
            return "No: it cannot be read as a dataset"
        return "No: it is not valid"

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 0 valid and the answer is not no, 1 otherwise, 3 not readable as a dataset.

        Args:
            strict: warnings, and every answer but yes, end with 1 as well.
        """
        return self.validation.exit_code(strict=strict) or int(self.verdict in _FAILING[strict])

    @property
    def verdict(self) -> Level | None:
        """Return the level of the answer; None of a dataset that is not valid."""
        if self.imported is not None:
            return "INCONCLUSIVE" if self.imported.reason is None else "FAIL"
        return None if self.audit is None else self.audit.result.answer.level

    def as_json(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the result as ``actds check --json`` prints it."""
        result = None if self.audit is None else self.audit.result
        return {
            "path": self.validation.path,
            "strict": strict,
            "ok": self.exit_code(strict=strict) == 0,
            "exit_code": self.exit_code(strict=strict),
            "valid": self.is_valid,
            "verdict": self.verdict,
            "answer": self.answer,
            "validation": self.validation.as_json(strict=strict),
            "audit": None if result is None else result.as_json(),
            "imported": None if self.imported is None else self.imported.as_json(),
        }


def check(
    path: str | Path,
    *,
    accept: Sequence[str] = (),
    i_accept_unprovenanced: bool = False,
    validating: Progress = lambda what, amount: None,
    auditing: Callable[[str], None] = lambda what: None,
) -> CheckResult:
    """Validate a dataset with every byte of it, then audit it if it is valid.

    An imported dataset has no census to audit: its rows are read, and the answer is what can be
    said of them.

    Args:
        path: the dataset.
        accept: places that are waived by name, as of ``audit``.
        i_accept_unprovenanced: take imported rows: then the answer is no only where something
            speaks against the rows themselves, and else that it is not known.
        validating: as ``progress`` of ``validate``.
        auditing: as ``progress`` of ``audit``.

    Raises:
        ActdsError: E011 a package of the audit is not installed; and as ``audit``.

    Spec: 0.1 sections 12 and 14.
    """
    from actds_validators.audit.api import audit
    from actds_validators.extras import need_extra
    from actds_validators.imported import imported_rows
    from actds_validators.validate.validation import validate

    need_extra()  # before minutes of hashing
    validation = validate(path, "full", validating, imported=i_accept_unprovenanced)
    if validation.catalog and {one.code for one in validation.errors} <= {"E306", "E403"}:
        rows = imported_rows(validation.catalog, accepted=i_accept_unprovenanced, progress=auditing)
        if rows is not None:
            return CheckResult(validation, None, rows)
    if validation.exit_code():
        return CheckResult(validation, None)
    return CheckResult(validation, audit(path, accept=accept, progress=auditing))
