"""The part on missingness: forest plots and the table of differences.

A family of charts of the report; from the result's section of the same name.
"""

from __future__ import annotations

from actds_validators.audit.result import Difference, Limits, Missingness
from actds_validators.report.bound import bound_curve
from actds_validators.report.forest import forest, stored_bias, worst_first
from actds_validators.report.parts import Part, Row, Table, first
from actds_validators.report.strata import heat_map
from actds_validators.report.svg import Picture
from actds_validators.report.words import (
    GROUPS,
    Sentence,
    count,
    estimate,
    many,
    number,
    p_value,
    percent,
)

__all__ = ["missingness_part"]

_MAX_STRATA = 10


def missingness_part(section: Missingness, limits: Limits, n_events: int | None = None) -> Part:
    """Return the part on missingness.

    Args:
        section: of the result.
        limits: settings.
        n_events: independent loss events, ``None`` where nobody counted them.
    """
    lead = (
        "Standardised mean differences (SMD): how far the mean of the lost tokens lies from the "
        "mean of all computed tokens, in standard deviations of all, with intervals from a block "
        "jackknife. The bias of the stored rows is the same distance of what is stored, and far "
        f"smaller where little is lost. Up to {number(limits.negligible_bias)} it counts as none; "
        f"with a rejected test, more than {number(limits.serious)} is serious."
    )
    few = ""
    if n_events is not None and n_events < limits.min_events:
        few = (
            f" All losses make {many(n_events, 'independent event')}: "
            f"with fewer than {count(limits.min_events)} the intervals are too narrow."
        )
    pictures: list[Picture] = []
    for group in GROUPS:
        members = [d for d in section.differences if d.covariate.group == group]
        if members:
            pictures.append(forest(group, members, few))
    if any(d.before_weighting for d in section.differences):
        pictures.append(stored_bias(section.differences, limits, few))
    if any(d.strata for d in section.differences):
        pictures.append(heat_map(worst_first(section.differences)))
    pictures.append(bound_curve(section.bound, limits))
    notes = [
        *(Sentence(f"Could be asked: {question}") for question in section.could_ask[:16]),
        *(Sentence(f"Could not be asked: {question}") for question in section.could_not_ask[:16]),
    ]
    if section.whole_requests:
        notes.append(
            Sentence(
                f"{many(section.whole_requests, 'request')} lost every computed token. One request "
                "is one loss, however long: what counts is whether requests of one kind go."
            )
        )
    tables = [_strata(section)] if section.n_strata else []
    tables += [_table(section.differences)] if section.differences else []
    return Part("missingness", "Missingness", Sentence(lead + few), pictures, tables, notes)


def _strata(section: Missingness) -> Table:
    """Return the kinds of token that lost too much."""
    some, more = first(section.worst_strata, _MAX_STRATA)
    rows = [
        Row(
            (
                s.kind,
                s.label,
                percent(s.rate),
                count(s.n_lost),
                count(s.n),
                count(s.n_blocks),
                p_value(s.adjusted_p),
            ),
            "bad",
        )
        for s in some
    ]
    head = ("kind", "which", "lost", "lost tokens", "of", "in stretches", "adjusted p")
    caption = (
        f"Kinds of token that lost too much, beyond chance: {count(len(section.worst_strata))} of "
        f"{count(section.n_strata)} that were looked at"
    )
    rows = rows or [Row(("none", "", "", "", "", "", ""), "good")]
    return Table(caption, head, rows, frozenset({0, 1}), more)


def _table(differences: list[Difference]) -> Table:
    some, more = first(worst_first(differences))
    rows = [
        Row(
            (
                d.covariate.label,
                d.covariate.group,
                number(d.mean_all),
                number(d.mean_lost),
                d.covariate.unit or "-",
                estimate(d.smd),
                "-" if d.total_variation is None else number(d.total_variation),
                "-" if d.jensen_shannon is None else number(d.jensen_shannon),
            )
        )
        for d in some
    ]
    head = (
        "covariate",
        "kind",
        "mean of all",
        "mean of lost",
        "unit",
        "SMD [95 %]",
        "total variation",
        "Jensen–Shannon distance",
    )
    return Table("Differences, the largest first", head, rows, frozenset({0, 1, 4}), more)
