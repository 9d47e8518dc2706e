"""The gate: validate, audit if the policy asks for it, and say every reason against a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actds.errors import ActdsError, Finding, RefusedError
from actds.executor import ExecutorName
from actds_validators.gate.policy import Policy, read_policy
from actds_validators.gate.rules import refusals
from actds_validators.validate.validation import Level, Progress, Validation, validate

if TYPE_CHECKING:
    from actds.explore.dataset import Dataset

__all__ = ["REFUSED", "UNREADABLE", "Passage", "judge", "require"]

INVALID, UNREADABLE, REFUSED = 1, 3, 5
"""Exit codes beside 0: findings, not readable as a dataset, refused by the policy alone."""


@dataclass(frozen=True)
class Passage:
    """What the gate says of one dataset.

    Args:
        validation: the validation.
        policy: the policy; None where only the spec was asked.
        refused: the rules that it does not comply with; empty of a dataset that is not valid.
        verdict: level of the audit's answer; None where the policy does not ask for one.
        strict: whether warnings are findings.
    """

    validation: Validation
    policy: Policy | None = None
    refused: list[Finding] = field(default_factory=list)
    verdict: str | None = None
    strict: bool = False

    @property
    def exit_code(self) -> int:
        """Return 0 it passes, 1 it is not valid, 3 it cannot be read, 5 the policy refuses it."""
        return self.validation.exit_code(strict=self.strict) or (REFUSED if self.refused else 0)

    @property
    def reasons(self) -> list[Finding]:
        """Return everything that is against it, findings of the validation first."""
        found = self.validation.errors + (self.validation.warnings if self.strict else [])
        return [*found, *self.refused]

    def as_json(self) -> dict[str, Any]:
        """Return the facts as ``actds validate --json`` prints them."""
        facts = self.validation.as_json(strict=self.strict)
        facts |= {"ok": self.exit_code == 0, "exit_code": self.exit_code}
        if self.policy is not None:
            facts["policy"] = {
                "name": self.policy.name,
                "verdict": self.verdict,
                "refused": [one.as_json() for one in self.refused],
            }
        return facts


def judge(
    path: str | Path,
    *,
    level: Level | None = None,
    policy: Policy | None = None,
    strict: bool = False,
    progress: Progress = lambda what, amount: None,
    auditing: Callable[[str], None] = lambda what: None,
    executor: ExecutorName = "threads",
    seal: str | None = None,
    validation: Validation | None = None,
) -> Passage:
    """Return what the gate says of a dataset.

    Args:
        path: the dataset.
        level: how much is validated; that of the policy when None, ``full`` without one.
        policy: what is refused beyond the spec.
        strict: whether warnings are findings; a policy may ask for it as well.
        progress: as of ``validate``.
        auditing: as ``progress`` of ``audit``, which runs where the policy asks for it.
        executor: as of ``validate``.
        seal: as of ``validate``.
        validation: the validation, where there is one already.

    Raises:
        ActdsError: E011 a package of the audit is not installed; what ``validate`` and ``audit``
            raise.

    Spec: 0.1 section 12.
    """
    asks = policy is not None and policy.audit.worst is not None
    if asks:
        from actds_validators.extras import need_extra

        need_extra()  # before minutes of hashing
    strict = strict or (policy is not None and not policy.warnings)
    chosen: Level = level or (policy.level if policy is not None else "full")
    imported = policy is not None and policy.provenance.imported
    found = validation or validate(path, chosen, progress, executor, seal, imported=imported)
    catalog = found.catalog
    if policy is None or catalog is None or found.exit_code(strict=strict):
        return Passage(found, policy, strict=strict)
    result = None
    if asks and not any(map(catalog.is_imported, catalog.runs_with_data)):
        from actds_validators.audit.api import audit

        result = audit(path, accept=policy.audit.accept, progress=auditing).result
    refused = refusals(policy, catalog, found.runs, result)
    verdict = None if result is None else result.answer.level
    return Passage(found, policy, refused, verdict, strict)


def require(
    path: str | os.PathLike[str],
    *,
    level: Level | None = None,
    policy: Policy | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Dataset:
    """Return a dataset, opened, if it passes the gate; raise one error with every reason if not.

    ``actds.require("acts", policy="policy.toml")`` is the line before training.

    Args:
        path: the dataset's folder, or its URI.
        level: ``quick``, ``standard``, ``full`` or ``deep``, as of ``actds validate``; that of
            the policy when None, ``full`` without one.
        policy: what to refuse beyond what is no valid dataset: a TOML file, its content as a
            mapping, or a ``Policy``.

    Raises:
        RefusedError: E701 it is not valid, or the policy refuses it; ``reasons`` has every
            finding and every rule.
        ActdsError: E020 the policy cannot be used; E009 no such level; E101 to E107 there is no
            dataset, or its ``actds.json`` cannot be read; E011 a package of the audit is missing.

    Spec: 0.1 section 12.2.
    """
    import actds
    from actds_validators.validate.validation import LEVELS

    if level is not None and level not in LEVELS:
        expected = f"one of {', '.join(LEVELS)}"
        raise ActdsError("E009", "level", got=repr(level)[:80], expected=expected)
    rules = None if policy is None else read_policy(policy)
    passage = judge(os.fspath(path), level=level, policy=rules)
    if passage.exit_code == UNREADABLE:
        raise passage.validation.findings[0].error()
    if passage.exit_code:
        n = len(passage.reasons)
        raise RefusedError(
            "E701",
            os.fspath(path),
            got=f"{n} reason{'' if n == 1 else 's'} against it",
            expected="a dataset that is valid" + (f" and passes {_called(rules)}" if rules else ""),
            next_step=passage.reasons[0].next_step,
            reasons=passage.reasons,
        )
    accepted = rules is not None and rules.provenance.imported
    return actds.open(os.fspath(path), i_accept_unprovenanced=accepted)


def _called(policy: Policy) -> str:
    return f"the policy {policy.name}" if policy.name else "the policy"
