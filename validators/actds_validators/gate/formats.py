"""What other programs read of a passage: JUnit XML, SARIF 2.1.0, annotations of GitHub Actions."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from actds.errors import CODES, Finding
from actds.text import counted, printable
from actds.version import __version__
from actds_validators.gate.gate import UNREADABLE, Passage

__all__ = ["github", "junit", "sarif"]

_SARIF = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_SARIF_LEVELS = {"error": "error", "warning": "warning", "note": "note"}
_GITHUB_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


def junit(passages: Sequence[Passage]) -> str:
    """Return JUnit XML: a suite per dataset, a case per check and one for the policy."""
    root = ET.Element("testsuites", name="actds validate")
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for one in passages:
        suite = _suite(one)
        root.append(suite)
        for name in totals:
            totals[name] += int(suite.get(name, "0"))
    for name, value in totals.items():
        root.set(name, str(value))
    root.set("time", f"{sum(one.validation.duration_s for one in passages):.3f}")
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(passage: Passage) -> ET.Element:
    validation = passage.validation
    suite = ET.Element("testsuite", name=printable(validation.path))
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}

    def case(name: str, found: list[Finding], state: str, detail: str = "") -> None:
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
            lines = [printable(one.line()) for one in found]
            message = lines[0] if len(lines) == 1 else counted(len(lines), "finding")
            failure = ET.SubElement(
                element, tag, type=found[0].code if found else "", message=message
            )
            failure.text = "\n".join(lines)
        elif found:
            ET.SubElement(element, "system-out").text = "\n".join(
                f"{one.severity} {printable(one.line())}" for one in found
            )

    unreadable = passage.exit_code == UNREADABLE
    for check in validation.checks:
        found = validation.found_by(check.name)
        state: str = "unreadable" if unreadable and check.state == "failed" else check.state
        if state == "passed" and passage.strict and any(f.severity == "warning" for f in found):
            state = "failed"
        case(check.name, found, state, check.detail)
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
    found = [(one, finding) for one in passages for finding in _all(one)]
    codes = sorted({finding.code for _, finding in found})
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
                        "executionSuccessful": all(one.exit_code != UNREADABLE for one in passages),
                    }
                ],
                "results": [_result(one, finding, number) for one, finding in found],
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
        "message": {"text": printable(f"{finding.place}: {finding.got}; expected "
                                      f"{finding.expected}. {finding.next_step}")},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": quote(_file(passage, finding))}},
                "logicalLocations": [{"fullyQualifiedName": printable(finding.place)}],
            }
        ],
        "partialFingerprints": {"actds/v1": f"{finding.code} {printable(finding.place)}"},
    }  # fmt: skip


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
    for one in passages:
        for finding in _all(one):
            level = _GITHUB_LEVELS[finding.severity]
            if one.strict and level == "warning":
                level = "error"
            title = f"{finding.code} {CODES[finding.code].title}"
            place = f"file={_property(_file(one, finding))},title={_property(title)}"
            text = f"{finding.place}: {finding.got}; expected {finding.expected}."
            lines.append(f"::{level} {place}::{_message(f'{text} Next: {finding.next_step}')}")
    for one in passages:
        state = "passes" if one.exit_code == 0 else f"exit {one.exit_code}"
        lines.append(printable(f"{one.validation.path}: {state}"))
    return "\n".join(lines) + "\n"


def _message(text: str) -> str:
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
