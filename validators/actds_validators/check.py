"""May I train on it: whether a dataset is valid, and if it is, the verdict of its audit.

Imported datasets have no census to audit: there the rows themselves are read, and the answer is
what can be said of rows when nobody recorded how they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actds.dataset.info import HookValues, values_in_words
from actds.dataset.reading import Catalog, unknown_columns
from actds.exchange.doctor import Lack, lacks_of_columns, lacks_of_every_set
from actds.explore.dataset import Dataset
from actds.format.arrays import DTYPES
from actds_validators.audit.result import Limits
from actds_validators.validate.values import hash_rows

if TYPE_CHECKING:
    from actds_validators.audit.place import Level
    from actds_validators.audit.run import AuditResult
    from actds_validators.validate.validation import Progress, Validation

MAX_ZERO = Limits().max_loss
"""Share of the rows of a hook that may be all zero, as in the audit's place of values."""
_BLOCK_NBYTES = 1 << 24
_NOTHING_RECORDED = "nobody recorded how these rows were made"


@dataclass(frozen=True)
class ImportedHook:
    """The rows of a hook.

    Args:
        n_not_finite: rows with a value that is NaN or infinite.
        n_zero: rows of zeros alone.
        n_repeated: rows that are bitwise copies of an earlier one; zeros are none.
    """

    name: str
    dtype: str
    d_model: int
    n_rows: int
    n_not_finite: int
    n_zero: int
    n_repeated: int


@dataclass(frozen=True)
class ImportedRows:
    """What can be said of an imported dataset.

    Args:
        accepted: whether the caller takes imported rows, by name.
        sealed: whether a seal covers them.
        hooks: of each its rows.
        odd: which rows are not finite, zero or repeated, in words.
        lacks: what the set does not say, and what nobody can know without it.
    """

    accepted: bool
    sealed: bool
    hooks: list[ImportedHook]
    odd: list[str]
    lacks: list[Lack]

    @property
    def reason(self) -> str | None:
        """Return why not to train on the rows, in a few words; None where nothing says so."""
        if not self.accepted:
            return _NOTHING_RECORDED
        if not self.sealed:
            return "it is not sealed"
        for hook in self.hooks:
            for n, most, words in (
                (hook.n_not_finite, 0, "not finite"),
                (hook.n_zero, MAX_ZERO * hook.n_rows, "all zero"),
            ):
                if n > most:
                    return f"{n:,} of {hook.n_rows:,} rows of {hook.name} are {words}"
        return None

    @property
    def answer(self) -> str:
        """Return whether to train on them, in a few words."""
        return f"Not known: {_NOTHING_RECORDED}" if self.reason is None else f"No: {self.reason}"

    def as_json(self) -> dict[str, Any]:
        """Return it as ``actds check --json`` prints it."""
        return asdict(self)


def imported_rows(
    catalog: Catalog, *, accepted: bool, progress: Callable[[str], None] = lambda what: None
) -> ImportedRows | None:
    """Return what can be said of the rows, all of which are read; None where no run is imported.

    Takes 8 bytes of memory for a row.

    Args:
        catalog: of a dataset of which nothing but seal and census may be missing.
        accepted: whether imported rows are taken, by name.
        progress: called with what is being done.

    Raises:
        ActdsError: E204 a chunk is damaged.
    """
    runs = [run for run in catalog.runs_with_data if catalog.is_imported(run)]
    if not runs:
        return None
    dataset = Dataset(catalog)
    hooks = []
    for name in dataset.hooks:
        progress(f"reading the rows of {name}")
        hooks.append(_read(dataset, name))
    counts = [HookValues(h.name, h.n_rows, h.n_not_finite, h.n_zero) for h in hooks]
    odd = [
        *values_in_words(counts),
        *(
            f"{hook.n_repeated:,} of {hook.n_rows:,} rows of {hook.name} are copies of another row"
            for hook in hooks
            if hook.n_repeated
        ),
    ]
    return ImportedRows(accepted, catalog.is_sealed, hooks, odd, list(_lacks(catalog, runs)))


def _read(dataset: Dataset, name: str) -> ImportedHook:
    """Return what the rows of a hook are, whatever its manifests say of them."""
    rows = dataset.array(name)
    kind, d_model = DTYPES[rows.hook.dtype], rows.hook.d_model
    step = max(1, _BLOCK_NBYTES // (d_model * kind.itemsize))
    hashes = [np.zeros(0, np.uint64)]
    not_finite, zero = 0, 0
    for start in range(0, len(rows), step):
        bits = rows.bits(start, min(start + step, len(rows)))
        is_zero = ~(bits & kind.magnitude).any(axis=1)
        not_finite += int(((bits & kind.exponent) == kind.exponent).any(axis=1).sum())
        zero += int(is_zero.sum())
        hashes.append(hash_rows(bits[~is_zero]))
    every = np.concatenate(hashes)
    repeated = len(every) - len(np.unique(every))
    return ImportedHook(name, rows.hook.dtype, d_model, len(rows), not_finite, zero, repeated)


def _lacks(catalog: Catalog, runs: list[str]) -> Iterator[Lack]:
    records = [catalog.runs[run] for run in runs]
    yield from lacks_of_columns(set().union(*map(unknown_columns, records)))
    if not all("import.dataset_digest" in record.fields for record in records):
        # Its digests are those of the import: of what it was before nobody knows.
        yield from lacks_of_every_set()


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
    from actds_validators.sections import need_extra
    from actds_validators.validate.validation import validate

    need_extra()  # before minutes of hashing
    validation = validate(path, "full", validating, imported=i_accept_unprovenanced)
    if validation.catalog and {finding.code for finding in validation.errors} <= {"E306", "E403"}:
        rows = imported_rows(validation.catalog, accepted=i_accept_unprovenanced, progress=auditing)
        if rows is not None:
            return CheckResult(validation, None, rows)
    if validation.exit_code():
        return CheckResult(validation, None)
    return CheckResult(validation, audit(path, accept=accept, progress=auditing))
