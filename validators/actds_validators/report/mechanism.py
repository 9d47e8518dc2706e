"""The part on mechanism: the family of tests, and what decides in it.

From the result's section of the same name; tables only.
"""

from __future__ import annotations

from actds_validators.audit.result import Association, Limits, Mechanism
from actds_validators.report.parts import Part, Row, Table, first
from actds_validators.report.words import Sentence, count, number, p_value

MIN_BLAMED = 3  # as the verdict has it

__all__ = ["mechanism_part", "smallest_first"]


def smallest_first(tests: list[Association]) -> list[Association]:
    """Return the tests, rejected ones first, then by adjusted p."""
    return sorted(tests, key=lambda t: (not t.rejected, t.adjusted_p, t.p))


def mechanism_part(section: Mechanism, limits: Limits) -> Part:
    """Return the part on what the loss goes with."""
    lead = (
        f"Independent loss events: {count(section.n_events)}, in {count(section.n_steps)} steps; "
        f"{count(section.n_lost_steps)} steps lost tokens, {count(section.n_partial_steps)} of "
        "them only some. Tokens of a step are lost together, so each test counts steps, blocks or "
        f"requests, never tokens. One family of {count(len(section.tests))} tests, false discovery "
        f"rate {number(limits.fdr)} after Benjamini and Hochberg."
    )
    if section.n_events < MIN_BLAMED:
        lead += (
            f" Under {MIN_BLAMED} events nothing is blamed: whatever so few bursts met looks like "
            "a cause."
        )
    some, more = first(smallest_first(section.tests))
    rows = [
        Row(
            (
                "yes" if t.rejected else "no",
                t.name,
                t.covariate.label,
                t.covariate.group,
                number(t.statistic),
                p_value(t.p),
                p_value(t.adjusted_p),
                f"{count(t.n_units)} {t.unit}",
                "-" if t.naive_p is None else f"({p_value(t.naive_p)})",
            ),
            "bad" if t.rejected else "",
            t.note,
        )
        for t in some
    ]
    head = (
        "rejected",
        "test",
        "covariate",
        "kind",
        "statistic",
        "p",
        "adjusted p",
        "effective units",
        "naive p (not deciding)",
    )
    notes = [Sentence(_on_content(section.tests))] if section.tests else []
    if section.detectable is not None:
        notes.append(
            Sentence(
                "The widest interval of a content covariate or readout would show a bias of the "
                f"stored rows of {number(section.detectable)} standard deviations with power 0.8. "
                "The tests, "
                "adjusted over the family, and those of the load need more."
            )
        )
    if section.tests:
        notes.append(
            Sentence(
                "Effective units: neighbouring shifts of the losses are alike, so the thousands "
                "that a p counts are worth as many independent ones as stand there."
            )
        )
    if any(t.naive_p is not None for t in section.tests):
        notes.append(
            Sentence(
                "The naive p stands in brackets: a test over tokens as if each were lost by "
                "itself. It rejects harmless bursts nearly always, and nothing here rests on it."
            )
        )
    caption = (
        f"Tests, the smallest adjusted p first (blocks of {count(section.block_steps)} steps, "
        f"{count(section.n_blocks)} of them)"
    )
    tables = [Table(caption, head, rows, frozenset(range(4)), more)] if rows else []
    return Part("mechanism", "Mechanism", Sentence(lead), (), tables, notes)


def _on_content(tests: list[Association]) -> str:
    """Return which tests tell content from load."""
    said = (
        "Only the test within compares tokens of one step, which met the same load. The others "
        "compare steps: what they find of phase, position and length can come from the load, with "
        "which the mix of tokens changes (missing at random, given the load); what they find of "
        "values can, in part."
    )
    if any(t.name == "within" for t in tests):
        return said
    return f"{said} Here too few steps lost only some of their tokens for a test within."
