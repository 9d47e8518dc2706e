"""The page of an audit: one self-contained HTML file without script, under a strict policy.

After the audit; imports the parts of the report, and Jinja2 when it is called. Every text of the
result is anybody's: it is cut, freed of control characters and escaped in one place, here.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

from actds_validators.audit.result import Accounting, Audit
from actds_validators.report.accounting import accounting_part, coverage_part
from actds_validators.report.drift import drift_parts
from actds_validators.report.mechanism import mechanism_part, queues_part, weights_part
from actds_validators.report.missingness import missingness_part
from actds_validators.report.summary import blind_part, check_part, settings_part
from actds_validators.report.words import Absent, Part, Sentence, against, clean, kept, measured

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["MARKS", "render"]

MARKS = {"PASS": "✓", "WARN": "!", "FAIL": "✗", "INCONCLUSIVE": "?"}
"""What stands beside a verdict, so that no reader depends on its colour."""

_ABSENT = {
    "coverage": ("Coverage", "the tables hold no token classes or positions to map"),
    "missingness": ("Missingness", "no token was lost, so nothing can differ"),
    "mechanism": ("Mechanism", "no token was lost, so there is nothing to test"),
    "queues": ("Time and queues", "the run records neither steps nor queues"),
    "weighting": ("Weights", "no token was dropped: every weight is 1"),
    "drift": ("Drift", "no other rows were named: actds audit --against OTHER, or --by COLUMN"),
}
_OF_LOSSES = ("missingness", "mechanism", "weighting")


def render(audit: Audit) -> str:
    """Return the page: HTML in UTF-8, under 1 MB whatever the dataset.

    Raises:
        ImportError: Jinja2 is not installed (the extra ``audit``).
    """
    environment = _environment()
    style = environment.loader.get_source(environment, "page.css")[0]  # type: ignore[union-attr]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    deciding = audit.verdict.deciding
    return environment.get_template("page.html.j2").render(
        audit=audit,
        style=_exact(style),
        policy=Sentence(
            f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
        ),
        mark=MARKS[audit.verdict.level],
        sentence=Sentence(audit.verdict.sentence),
        value=measured(deciding.value, deciding.unit),
        held=f"{against(deciding)}, {kept(deciding)}" if deciding.limit is not None else "",
        next_steps=[Sentence(step) for step in audit.verdict.next_steps[:20]],
        lacks=[Sentence(lack) for lack in audit.verdict.lacks[:20]],
        parts=_parts(audit),
        absent=_absent(audit),
    )


def _parts(audit: Audit) -> list[Part]:
    parts = [check_part(audit.verdict), accounting_part(audit.accounting)]
    if audit.coverage is not None:
        parts.append(coverage_part(audit.coverage))
    if audit.missingness is not None:
        n_events = audit.mechanism.n_events if audit.mechanism else None
        parts.append(missingness_part(audit.missingness, audit.limits, n_events))
    if audit.mechanism is not None:
        parts.append(mechanism_part(audit.mechanism, audit.limits))
    if audit.queues is not None:
        parts.append(queues_part(audit.queues))
    if audit.weighting is not None:
        parts.append(weights_part(audit.weighting))
    parts += drift_parts(audit.drift)
    if audit.would_not_notice:
        parts.append(blind_part(audit))
    return [*parts, settings_part(audit)]


def _absent(audit: Audit) -> list[Absent]:
    """Return the sections that the result lacks, each with the reason that the result shows."""
    unexplained = any(finding.severity == "error" for finding in audit.accounting.findings)
    reasons: dict[str, list[str]] = {}
    for name, (title, why) in _ABSENT.items():
        if getattr(audit, name):
            continue
        if unexplained and name != "drift":
            why = "the accounting does not add up, and no estimate stands on such a census"
        elif name in _OF_LOSSES:
            why = _without_losses(name, audit.accounting) or why
        reasons.setdefault(f"Left out: {why}.", []).append(title)
    return [Absent(", ".join(titles), Sentence(why)) for why, titles in reasons.items()]


def _without_losses(name: str, account: Accounting) -> str:
    """Return why a section on losses is missing; empty where nothing was lost."""
    if account.dropped and name == "weighting" and not account.captured:
        return "no row is stored that a weight could be given to"
    if account.dropped:
        return "the result does not hold it, although tokens were dropped"
    if account.aborted and name != "weighting":
        return "no token was dropped; those of aborted requests are counted, not compared"
    return ""


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("actds_validators.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.globals["long"] = Sentence
    return environment


def _finalize(value: Any) -> Any:
    """Return what the template writes: text that can do no harm, numbers to a tenth of a pixel."""
    if hasattr(value, "__html__"):  # markup of the template itself
        return value
    if isinstance(value, float):
        return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")
    return clean(value) if isinstance(value, str) else value


def _exact(style: str) -> Any:
    """Return the style sheet as markup: its digest is of these bytes, unescaped."""
    from markupsafe import Markup

    return Markup(style)
