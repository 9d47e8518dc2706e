"""What a drift comparison says in one sentence: numeric drift and population shift, never mixed.

After the measures. Imports their models only.
"""

from __future__ import annotations

from actds_validators.audit.drift.numeric import MIN_PAIRS, PairedHook
from actds_validators.audit.drift.selection import Selection
from actds_validators.audit.result import DriftMeasure, Limits

__all__ = ["numeric_sentence", "population_sentence", "repeats_words"]

_WHY = {
    "phase": "Prompt text and generated text are other tokens by construction",
    "kernel_mode": "Steps of one kernel mode hold other tokens than those of another",
}


def repeats_words(n: int) -> str:
    """Return the end of a note that says how many repeated prefixes were left out."""
    return f"; each prefix counts once, {n} repeats of one left out" if n else ""


def numeric_sentence(
    first: Selection,
    second: Selection,
    hooks: list[PairedHook],
    measures: list[DriftMeasure],
    share: float,
) -> str:
    """Return the sentence of a numeric drift.

    Args:
        first: one side.
        second: the other.
        hooks: what the pairs measure.
        measures: the measures of all hooks.
        share: share of the rows that have a partner.
    """
    means = [one for one in measures if one.name == "relative L2, mean"]
    n_pairs = max((hook.n_pairs for hook in hooks), default=0)
    if not means and not n_pairs:
        return f"No pair of rows of {first.name} and {second.name} could be compared."
    if not means:
        tokens = (
            "token with the same prefix was" if n_pairs == 1 else "tokens with the same prefix were"
        )
        return (
            f"Only {n_pairs} {tokens} computed in {first.name} and in {second.name}: too few to "
            f"tell, {MIN_PAIRS} are needed."
        )
    worst = max(means, key=lambda one: one.value)
    floor = "no floor is known" if worst.floor is None else f"the floor is {worst.floor:.2g}"
    what = "are equal" if worst.value == 0 else f"differ by {worst.value:.2g} of their norm"
    return (
        f"{n_pairs:,} tokens with the same prefix were computed in "
        f"{first.name} and in {second.name}: their rows {what} ({worst.hook}; {floor})"
        f"{_shifted(hooks, measures)}. {share:.0%} of the rows have such a partner."
    )


def population_sentence(
    first: Selection, second: Selection, measures: list[DriftMeasure], limits: Limits
) -> str:
    """Return the sentence of a population shift, by the hook that is told apart best."""
    areas = [one for one in measures if one.name == "classifier AUC"]
    if not areas:
        return (
            f"The rows of {first.name} and {second.name} could not be compared: too few are finite."
        )
    one = max(areas, key=lambda area: area.value)
    p = one.adjusted_p
    floor = "" if one.floor is None else f", floor {one.floor:.2f}"
    rows = f"the rows of {first.name} and of {second.name}"
    if p is None:
        said = f"Too few requests to test {rows} ({one.hook}; AUC {one.value:.2f}{floor})"
    else:
        can = "A classifier tells" if p <= limits.fdr else "No classifier told"
        said = f"{can} {rows} apart ({one.hook}; AUC {one.value:.2f}{floor}, p {p:.2g})"
    why = _WHY.get(first.column or "", "The tokens are not the same")
    return f"{said}. {why}: this compares populations and does not show a numerical difference."


def _shifted(hooks: list[PairedHook], measures: list[DriftMeasure]) -> str:
    shares = {one.hook: one.value for one in measures if one.name == "channels shifted"}
    if not shares:
        return ""
    counts = {
        hook.hook: round(shares[hook.hook] * hook.means.shape[1])
        for hook in hooks
        if hook.hook in shares
    }
    told = [f"{n} channel{'s' if n > 1 else ''} of {name}" for name, n in counts.items() if n]
    return f"; shifted on average: {', '.join(told)}" if told else "; no channel shifts on average"
