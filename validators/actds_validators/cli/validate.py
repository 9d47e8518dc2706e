"""The command ``actds validate``: a verdict, the checks, the findings, the totals."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from actds.cli.output import envelope, print_json, print_lines
from actds.executor import EXECUTORS, ExecutorName
from actds.text import Line, Style, counted, printable

if TYPE_CHECKING:
    from actds.errors import Finding
    from actds_validators.validate.validation import Progress, Validation

LEVELS = ("quick", "standard", "full", "deep")
MAX_FINDINGS = 50
_MARKS = {"passed": "✓", "failed": "✗", "skipped": "-"}
_STYLES: dict[str, Style] = {"passed": "good", "failed": "bad", "skipped": "dim"}
_QUIET_S = 2.0


@click.command()
@click.argument("path", metavar="PATH")
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="full",
    show_default=True,
    help="quick: ledger, documents, sizes. standard: + tables, accounting. "
    "full: + digests of every file. deep: + decode every chunk, NaN, zero and repeated rows.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON (actds.validate 1)."
)
@click.option("--strict", is_flag=True, help="Fail on warnings as well.")
@click.option(
    "--executor", type=click.Choice(EXECUTORS), default="threads", show_default=True,
    help="Where the files are hashed.",
)  # fmt: skip
def validate(path: str, level: str, as_json: bool, strict: bool, executor: ExecutorName) -> None:
    """Check a dataset before training on it.

    PATH is the dataset's folder. Exit codes: 0 clean, 1 findings, 2 usage, 3 not readable as a
    dataset. Every finding has a code; actds explain CODE says more.

    \b
    Examples:
      actds validate acts
      actds validate acts --level deep
      actds validate acts --level quick --json
    """
    from actds_validators.validate import validation as validation_module

    with counting() as progress:
        result = validation_module.validate(path, level, progress, executor)  # type: ignore[arg-type]
    if as_json:
        print_json(envelope("validate", result.as_json(strict=strict)))
    else:
        print_lines(page(result, strict=strict))
    sys.exit(result.exit_code(strict=strict))


@contextmanager
def counting() -> Iterator[Progress]:
    """Yield what counts the work on stderr: on a terminal, and only when it takes a while."""
    if not sys.stderr.isatty():
        yield lambda what, amount: None
        return
    done = {"bytes": 0, "rows": 0, "values": 0}
    began = last = time.monotonic()

    def progress(what: str, amount: int) -> None:
        nonlocal last
        done[what] += amount
        now = time.monotonic()
        if now - began < _QUIET_S or now - last < 0.2:
            return
        last = now
        sys.stderr.write(
            f"\r{done['bytes'] / 1e9:.2f} GB hashed, {done['rows']:,} rows accounted for, "
            f"{done['values'] / 1e9:.2f} GB decoded, {now - began:.0f} s "
        )
        sys.stderr.flush()

    try:
        yield progress
    finally:
        if last > began:
            sys.stderr.write("\n")


def page(validation: Validation, *, strict: bool = False) -> Iterator[Line]:
    """Yield the page, line by line; no line holds a control character."""
    for line in _page(validation, strict):
        yield Line(printable(line.text), line.style)


def _page(validation: Validation, strict: bool) -> Iterator[Line]:
    yield verdict_line(validation, strict=strict)
    for check in validation.checks:
        text = f"  {_MARKS[check.state]} {check.name.ljust(10)}  {check.detail}".rstrip()
        yield Line(text, _STYLES[check.state])
    yield from finding_lines(validation)
    yield from _totals(validation)


def verdict_line(validation: Validation, *, strict: bool = False) -> Line:
    """Return the verdict: what was found, at which level, of which content."""
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


def finding_lines(validation: Validation, room: int = MAX_FINDINGS) -> Iterator[Line]:
    """Yield the first findings, errors first, each code with its next step once."""
    if not validation.findings:
        return
    yield Line("")
    advised: set[str] = set()
    for finding in validation.findings[:room]:
        yield Line(f"{_label(finding)}{finding.line()}", _style(finding))
        if finding.code not in advised:
            advised.add(finding.code)
            yield Line(f"    Next: {finding.next_step}", "dim")
    more = len(validation.findings) - room
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
        "cache_ref": "prefix-cache hits",
        "unresolved": "of them unresolved",
        "dropped": "dropped",
        "aborted": "aborted",
        "filtered": "filtered",
        "recomputed": "recomputed",
    }
    parts += [f"{totals[name]:,} {word}" for name, word in words.items()]
    return f"{', '.join(parts)}; {totals['scheduled']:,} tokens scheduled"
