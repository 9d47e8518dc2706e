"""The page of ``actds validate``: a verdict, the checks, the findings, the totals."""

from __future__ import annotations

from collections.abc import Iterator

from actds.errors import Finding
from actds.text import Line, Style, counted, printable
from actds_validators.validate.validation import Validation

__all__ = ["MAX_FINDINGS", "render"]

MAX_FINDINGS = 50
_MARKS = {"passed": "✓", "failed": "✗", "skipped": "-"}
_STYLES: dict[str, Style] = {"passed": "good", "failed": "bad", "skipped": "dim"}


def render(validation: Validation, *, strict: bool = False) -> Iterator[Line]:
    """Yield the page, line by line; no line holds a control character."""
    for line in _page(validation, strict):
        yield Line(printable(line.text), line.style)


def _page(validation: Validation, strict: bool) -> Iterator[Line]:
    yield _verdict(validation, strict)
    for check in validation.checks:
        text = f"  {_MARKS[check.state]} {check.name.ljust(10)}  {check.detail}".rstrip()
        yield Line(text, _STYLES[check.state])
    yield from _findings(validation)
    yield from _totals(validation)


def _verdict(validation: Validation, strict: bool) -> Line:
    n_errors, n_warnings = len(validation.errors), len(validation.warnings)
    code = validation.exit_code(strict=strict)
    if code == 3:
        return Line(f"UNREADABLE {validation.path}: not a dataset that can be checked", "bad")
    count = f"{counted(n_errors, 'error')}, {counted(n_warnings, 'warning')}"
    if code:
        return Line(f"REFUSED {validation.path} at level {validation.level}: {count}", "bad")
    warned = f", {counted(n_warnings, 'warning')}" if n_warnings else ""
    # Below level full nobody looked at the activations: that is no verdict on the dataset.
    verdict = "VALID" if validation.level in ("full", "deep") else "NO ERROR in"
    return Line(
        f"{verdict} {validation.path} at level {validation.level}: seal {validation.seal}, "
        f"digest {(validation.digest or '')[:16]}{warned}",
        "good",
    )


def _findings(validation: Validation) -> Iterator[Line]:
    if not validation.findings:
        return
    yield Line("")
    advised: set[str] = set()
    for finding in validation.findings[:MAX_FINDINGS]:
        yield Line(f"{_label(finding)}{finding.line()}", _style(finding))
        if finding.code not in advised:
            advised.add(finding.code)
            yield Line(f"    Next: {finding.next_step}", "dim")
    more = len(validation.findings) - MAX_FINDINGS
    if more > 0:
        yield Line(f"and {more:,} more findings; --json lists them all", "warn")


def _label(finding: Finding) -> str:
    return "" if finding.severity == "error" else f"{finding.severity} "


def _style(finding: Finding) -> Style:
    return "bad" if finding.severity == "error" else "warn"


def _totals(validation: Validation) -> Iterator[Line]:
    if not validation.runs:
        return
    totals = validation.totals
    yield Line("")
    yield Line(_sentence(totals), "title")
    if len(validation.runs) > 1:
        for run, counts in validation.runs.items():
            yield Line(f"  run {run}: {_sentence(counts)}")


def _sentence(totals: dict[str, int]) -> str:
    parts = [f"{totals['rows']:,} rows of {totals['requests']:,} requests"]
    words = {
        "cache_ref": "cache references",
        "unresolved": "of them unresolved",
        "dropped": "dropped",
        "aborted": "aborted",
        "filtered": "filtered",
        "recomputed": "recomputed",
    }
    parts += [f"{totals[name]:,} {word}" for name, word in words.items()]
    return f"{', '.join(parts)}; {totals['scheduled']:,} tokens scheduled"
