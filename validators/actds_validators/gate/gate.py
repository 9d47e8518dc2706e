"""The gate: validate, audit if the policy asks for it, and name every reason against a dataset.

With what other programs read of that: JUnit XML, SARIF 2.1.0, annotations of GitHub Actions.
"""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from actds.errors import CODES, ActdsError, Finding, RefusedError
from actds.executor import ExecutorName
from actds.text import counted, printable
from actds.version import __version__
from actds_validators.gate.policy import Policy, read_policy
from actds_validators.gate.rules import refusals
from actds_validators.validate.validation import Level, Progress, Validation, validate

if TYPE_CHECKING:
    from actds.explore.dataset import Dataset

INVALID, UNREADABLE, REFUSED = 1, 3, 5
"""Exit codes beside 0: findings, not readable as a dataset, refused by the policy alone."""


@dataclass(frozen=True)
class Passage:
    """What the gate says of one dataset.

    Args:
        policy: None where only the spec was asked.
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
        findings = self.validation.errors + (self.validation.warnings if self.strict else [])
        return [*findings, *self.refused]

    def as_json(self) -> dict[str, Any]:
        """Return the facts as ``actds validate --json`` prints them."""
        facts = self.validation.as_json(strict=self.strict)
        facts |= {"ok": self.exit_code == 0, "exit_code": self.exit_code}
        if self.policy is not None:
            facts["policy"] = {
                "name": self.policy.name,
                "verdict": self.verdict,
                "refused": [finding.as_json() for finding in self.refused],
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
        level: how much is validated; that of the policy when None, ``full`` without one.
        strict: whether warnings are findings; a policy may ask for it as well.
        progress: as of ``validate``, like executor and seal.
        auditing: as ``progress`` of ``audit``, which runs where the policy asks for it.
        validation: the validation, where there is one already.

    Raises:
        ActdsError: E011 a package of the audit is not installed; what ``validate`` and ``audit``
            raise.

    Spec: 0.1 section 12.
    """
    asks = policy is not None and policy.audit.worst is not None
    if asks:
        from actds_validators.sections import need_extra

        need_extra()  # before minutes of hashing
    strict = strict or (policy is not None and not policy.warnings)
    chosen: Level = level or (policy.level if policy is not None else "full")
    imported = policy is not None and policy.provenance.imported
    validated = validation or validate(path, chosen, progress, executor, seal, imported=imported)
    catalog = validated.catalog
    if policy is None or catalog is None or validated.exit_code(strict=strict):
        return Passage(validated, policy, strict=strict)
    result = None
    if asks and not any(map(catalog.is_imported, catalog.runs_with_data)):
        from actds_validators.audit.api import audit

        result = audit(path, accept=policy.audit.accept, progress=auditing).result
    refused = refusals(policy, catalog, validated.runs, result)
    verdict = None if result is None else result.answer.level
    return Passage(validated, policy, refused, verdict, strict)


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


_SARIF = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_SARIF_LEVELS = {"error": "error", "warning": "warning", "note": "note"}
_GITHUB_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


def junit(passages: Sequence[Passage]) -> str:
    """Return JUnit XML: a suite per dataset, a case per check and one for the policy."""
    root = ET.Element("testsuites", name="actds validate")
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for passage in passages:
        suite = _suite(passage)
        root.append(suite)
        for name in totals:
            totals[name] += int(suite.get(name, "0"))
    for name, value in totals.items():
        root.set(name, str(value))
    root.set("time", f"{sum(passage.validation.duration_s for passage in passages):.3f}")
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(passage: Passage) -> ET.Element:
    validation = passage.validation
    suite = ET.Element("testsuite", name=printable(validation.path))
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}

    def case(name: str, findings: list[Finding], state: str, detail: str = "") -> None:
        counts["tests"] += 1
        # The whole time belongs to the suite: checks share what they read.
        element = ET.SubElement(
            suite, "testcase", classname=printable(validation.path), name=name, time="0.000"
        )
        if state == "skipped":
            counts["skipped"] += 1
            ET.SubElement(element, "skipped", message=printable(detail))
        elif state in ("failed", "unreadable"):
            counts["failures" if state == "failed" else "errors"] += 1
            tag = "failure" if state == "failed" else "error"
            lines = [printable(finding.line()) for finding in findings]
            message = lines[0] if len(lines) == 1 else counted(len(lines), "finding")
            failure = ET.SubElement(
                element, tag, type=findings[0].code if findings else "", message=message
            )
            failure.text = "\n".join(lines)
        elif findings:
            ET.SubElement(element, "system-out").text = "\n".join(
                f"{finding.severity} {printable(finding.line())}" for finding in findings
            )

    unreadable = passage.exit_code == UNREADABLE
    for check in validation.checks:
        matches = validation.found_by(check.name)
        state: str = "unreadable" if unreadable and check.state == "failed" else check.state
        if state == "passed" and passage.strict and any(f.severity == "warning" for f in matches):
            state = "failed"
        case(check.name, matches, state, check.detail)
    if passage.policy is not None:
        name = f"policy {printable(passage.policy.name)}".strip()
        if validation.exit_code(strict=passage.strict):
            case(name, [], "skipped", "only a valid dataset is compared with a policy")
        else:
            case(name, passage.refused, "failed" if passage.refused else "passed")
    for key, value in counts.items():
        suite.set(key, str(value))
    suite.set("time", f"{validation.duration_s:.3f}")
    return suite


def sarif(passages: Sequence[Passage]) -> str:
    """Return a SARIF 2.1.0 log: one run of the tool, a result per finding."""
    findings = [(passage, finding) for passage in passages for finding in _all(passage)]
    codes = sorted({finding.code for _, finding in findings})
    number = {code: n for n, code in enumerate(codes)}
    log = {
        "$schema": _SARIF,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "actds",
                        "version": __version__,
                        "rules": [_rule(code) for code in codes],
                    }
                },
                "columnKind": "utf16CodeUnits",
                "invocations": [
                    {
                        "executionSuccessful": all(
                            passage.exit_code != UNREADABLE for passage in passages
                        )
                    }
                ],
                "results": [_result(passage, finding, number) for passage, finding in findings],
            }
        ],
    }
    return json.dumps(log, indent=2, sort_keys=True) + "\n"


def _all(passage: Passage) -> Iterator[Finding]:
    yield from passage.validation.findings
    yield from passage.refused


def _rule(code: str) -> dict[str, Any]:
    entry = CODES[code]
    return {
        "id": code,
        "name": "".join(word.capitalize() for word in entry.title.replace("-", " ").split()),
        "shortDescription": {"text": entry.title},
        "fullDescription": {"text": entry.meaning},
        "help": {"text": entry.next_step},
        "properties": {"tags": [entry.family]},
    }


def _result(passage: Passage, finding: Finding, number: dict[str, int]) -> dict[str, Any]:
    return {
        "ruleId": finding.code,
        "ruleIndex": number[finding.code],
        "level": _SARIF_LEVELS[finding.severity],
        "message": {
            "text": printable(
                f"{finding.place}: {finding.got}; expected {finding.expected}. {finding.next_step}"
            )
        },
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": quote(_file(passage, finding))}},
                "logicalLocations": [{"fullyQualifiedName": printable(finding.place)}],
            }
        ],
        "partialFingerprints": {"actds/v1": f"{finding.code} {printable(finding.place)}"},
    }


def _file(passage: Passage, finding: Finding) -> str:
    """Return the file that a finding is about; its dataset where it names none."""
    path = passage.validation.path
    place = finding.place.split(" ")[0]
    if finding.code == "E701" or ("/" not in place and not place.endswith(".json")):
        return path
    return os.path.join(path, place)


def github(passages: Sequence[Passage]) -> str:
    """Return workflow commands of GitHub Actions: an annotation per finding, the verdict last."""
    lines = []
    for passage in passages:
        for finding in _all(passage):
            level = _GITHUB_LEVELS[finding.severity]
            if passage.strict and level == "warning":
                level = "error"
            title = f"{finding.code} {CODES[finding.code].title}"
            place = f"file={_property(_file(passage, finding))},title={_property(title)}"
            text = f"{finding.place}: {finding.got}; expected {finding.expected}."
            lines.append(f"::{level} {place}::{_message(f'{text} Next: {finding.next_step}')}")
    for passage in passages:
        state = "passes" if passage.exit_code == 0 else f"exit {passage.exit_code}"
        lines.append(printable(f"{passage.validation.path}: {state}"))
    return "\n".join(lines) + "\n"


def _message(text: str) -> str:
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
