"""Words of the verdict: what losses go with, and what to do about it.

Beside the verdict, which asks for them; from the result's models alone.
"""

from __future__ import annotations

from actds_validators.audits.result import (
    Accounting,
    Association,
    Mechanism,
    Missingness,
    Weighting,
)

WORTHWHILE = 0.9
"""Weights are advised where they bring the largest bias below so much of itself."""

__all__ = ["asked", "dependence", "fewer", "look_when", "on_reuse", "remedy", "training"]


def dependence(mechanism: Mechanism, content: list[Association]) -> str:
    """Return what the losses go with, and whether the load can be why.

    Tokens of one step met the same load: only `within` tells content from it. The other tests
    compare steps, whose mix of phases, positions and lengths changes with the load: a queue that
    prefill filled overflows some steps later, under drop_newest over more decode than usual.
    """
    within = [t for t in content if t.name == "within"]
    first = min(within or content, key=lambda t: (t.adjusted_p, -abs(t.statistic)))
    named, p = first.covariate.label, f"adjusted p {first.adjusted_p:.2g}"
    words = {"content": "content", "values": "the values"}
    what = " and ".join(words[g] for g in sorted({t.covariate.group for t in content}))
    if within:
        return (
            f"Losses go with {what}: {named} differs even among the tokens of one step ({p}), "
            "which the load of the step does not explain."
        )
    if any(t.name == "within" for t in mechanism.tests):
        inside = "Tests among the tokens of one step, which met the same load, reject nothing."
    else:
        inside = "No test among the tokens of one step could be made to tell content from load."
    if what == "content":
        return (
            f"Losses go with what the steps held ({named}, {p}), which can come from the load "
            f"alone: the mix of phases, positions and lengths changes with it. {inside}"
        )
    with_load = any(
        t.rejected and t.covariate.group == "system" and t.name != "change" for t in mechanism.tests
    )
    load = (
        "They go with the load too, which can be why."
        if with_load
        else "No test of the load is rejected."
    )
    return f"Losses go with {what} of whole steps ({named}, {p}). {load} {inside}"


def fewer(test: Association, missing: Missingness) -> str:
    """Return which steps are under-represented among the stored rows."""
    if test.name == "change":
        return f"its rate changed, {test.note}" if test.note else "its rate changed"
    smd = next(
        (d.smd.value for d in missing.differences if d.covariate == test.covariate),
        test.statistic,
    )
    if test.covariate.name.startswith("load_"):
        return f"{'busy' if smd > 0 else 'quiet'} times are under-represented"
    side = "above" if smd > 0 else "below"
    return f"steps where that is {side} its mean are under-represented"


def look_when(rejected: list[Association]) -> list[str]:
    """Return what to do about a loss rate that changed in time, which no weight mends."""
    if not any(t.name == "change" for t in rejected):
        return []
    return ["Look at the trace: what changed at that time? Weights by load do not mend it."]


def remedy(weighting: Weighting | None, words: str) -> list[str]:
    """Return the step to train with weights, with what they do; none where they do little."""
    if weighting is None:
        return []
    before, after = (
        max((getattr(b, side) for b in weighting.balance), default=0.0)
        for side in ("before", "after")
    )
    if not after < WORTHWHILE * before:
        return []
    changes = ", ".join(
        f"{b.group} from {b.before:.3g} to {b.after:.3g}" for b in weighting.balance
    )
    return [f"{words}; the largest bias of a mean of stored rows changes: {changes}."]


def asked(missing: Missingness, both: str = "and") -> str:
    """Return what was tested beside the system; ``both`` joins content and readouts."""
    has_values = any(d.covariate.group == "values" for d in missing.differences)
    other = f"{both} readout" if has_values else "that was tested"
    return f"content covariate {other}"


def training(missing: Missingness) -> list[str]:
    """Return the step to train, with what could not be asked."""
    if any(d.covariate.group == "values" for d in missing.differences):
        return ["Train on it."]
    return [
        "Train on it, if what you study is not the values themselves: without readouts nobody can "
        "say whether losses go with them."
    ]


def on_reuse(account: Accounting) -> list[str]:
    """Return the step to weigh rows as they were served, where any were served again."""
    if not account.cache_ref:
        return []
    reused = account.cache_ref / max(1, account.positions)
    return [
        f"{reused:.0%} of the positions were served from the prefix cache: to weigh rows as they "
        'were served, load with weights="multiplicity".'
    ]
