"""Wording: what losses depend on, what to do about it, and what an audit would not notice."""

from __future__ import annotations

import math

from actds_validators.audit.covariates import COVARIATES, MAX_PROBES, CovariateDef, Widths
from actds_validators.audit.missingness import MIN_TOKENS
from actds_validators.audit.result import (
    MIN_BLAMED,
    Accounting,
    Association,
    Coverage,
    Limits,
    Mechanism,
    Missingness,
    StratumLoss,
    Weighting,
)
from actds_validators.statistics.strata import MIN_HITS

CLEAR_P = 0.001
"""Tests of an adjusted p up to this are told apart by their differences, not by their p."""
DOMINANT = 0.1
"""Share of the squared deviation from which one token id at one position is an outlier."""
WORTHWHILE = 0.9
"""Weights are advised where they reduce the largest bias to less than this share of it."""


def largest(tests: list[Association], missing: Missingness) -> Association:
    """Return the test to name: of those clearly rejected, the one of the largest difference.

    Which of two tiny p is smaller says nothing. Where none is clear, the smallest p.
    """
    smd = {d.covariate.name: abs(d.smd.value) for d in missing.differences}
    least = min(t.adjusted_p for t in tests)
    clear = [t for t in tests if t.adjusted_p <= max(least, CLEAR_P)]
    return max(clear, key=lambda t: (smd.get(t.covariate.name, 0.0), -t.adjusted_p))


def adjusted(test: Association) -> str:
    """Return a test's adjusted p in words; which of two tiny ones it is says nothing."""
    p = test.adjusted_p
    return "adjusted p < 0.0001" if p < 1e-4 else f"adjusted p {p:.2g}"


def dependence(mechanism: Mechanism, missing: Missingness, content: list[Association]) -> str:
    """Return what the losses depend on, and whether the load can be the cause.

    Tokens of one step met the same load: only `within` separates content from it. The other tests
    compare steps, whose mix of phases, positions and lengths changes with the load: a queue that
    prefill filled overflows some steps later, under drop_newest over more decode than usual.
    """
    within = [t for t in content if t.name == "within"]
    first = largest(within or content, missing)
    named, p = first.covariate.label, adjusted(first)
    words = {"content": "content", "values": "the values"}
    what = " and ".join(words[g] for g in sorted({t.covariate.group for t in content}))
    if within:
        return (
            f"Losses depend on {what}: {named} differs even among the tokens of one step ({p}), "
            "which the load of the step does not explain."
        )
    if any(t.name == "within" for t in mechanism.tests):
        inside = "No test among the tokens of one step, which have the same load, is rejected."
    else:
        inside = "Content cannot be separated from load: no step could be tested by its own tokens."
    with_load = any(
        t.rejected and t.covariate.group == "system" and t.name != "change" for t in mechanism.tests
    )
    if what == "content":
        too = "They depend on the load too. " if with_load else ""
        return (
            f"Losses depend on the content of the steps ({named}, {p}), which can come from the "
            f"load alone: the mix of phases, positions and lengths changes with it. {too}{inside}"
        )
    load = (
        "They depend on the load too, which can be the cause."
        if with_load
        else "No test of the load is rejected."
    )
    return f"Losses depend on {what} of whole steps ({named}, {p}). {load} {inside}"


def fewer(test: Association) -> str:
    """Return which steps are under-represented among the stored rows, as the test found them.

    Its own sign says so: the mean over lost tokens, in which wide steps weigh more, may lie on the
    other side.
    """
    if test.name == "change":
        return f"its rate changed, {test.note}" if test.note else "its rate changed"
    one = COVARIATES.get(test.covariate.name, CovariateDef)
    return f"{one.sides[0 if test.statistic > 0 else 1]} are under-represented"


def unproven(mechanism: Mechanism, least: int) -> str:
    """Return what is said where no cause is named and none is excluded.

    No covariate is named: of thirty intervals some leave out 0 in most runs, however harmless.
    """
    n = mechanism.n_events
    if n < least:
        return (
            f"All losses are {n} independent event{'' if n == 1 else 's'}: too few to tell a cause "
            "from chance."
        )
    return "No test finds a pattern, but there is too little evidence to exclude one."


def lost(account: Accounting) -> str:
    """Return the share lost in words, with the largest cause where there are several."""
    said = f"{account.loss_share:.2%} of the computed tokens were lost"
    causes = [w for w in account.waterfall if w.name in ("dropped", "aborted")]
    if len(causes) > 1:
        most = max(causes, key=lambda w: w.n_positions)
        part = most.n_positions / sum(w.n_positions for w in causes)
        said += f" ({part:.0%} of them {most.name}: {most.reason or 'no reason given'})"
    return said


_PLACES = {
    "special tokens": "the special tokens",
    "position": "the tokens at position {}",
    "position from the end": "the tokens {} positions before the last of their request",
    "phase": "the {} tokens",
    "tail of a value": "the {}",
    "first prompt block": "the requests of first prompt block {}",
}


def stratum_words(stratum: StratumLoss) -> str:
    """Return the name of a stratum in a sentence."""
    if (stratum.kind, stratum.label) == ("position from the end", "0"):
        return "the last token of each request"
    words = _PLACES.get(stratum.kind, f"{stratum.kind} {{}}")
    return words.format(stratum.label.replace("{", "").replace("}", ""))


def on_strata(found: list[StratumLoss], share: float) -> str:
    """Return what the worst stratum lost, beside all."""
    worst = found[0]
    if worst.n_lost == worst.n:
        said = f"All {worst.n:,} rows of {stratum_words(worst)} were lost"
    else:
        said = (
            f"{worst.rate:.0%} of the rows of {stratum_words(worst)} were lost "
            f"({worst.n_lost:,} of {worst.n:,})"
        )
    others = len(found) - 1
    more = (
        f"; {others} more strat{'a have' if others > 1 else 'um has'} excess loss" if others else ""
    )
    return f"{said}, against {share:.2%} of all{more}."


def unresolved_first(account: Accounting) -> str:
    """Return the prefix-cache hits without a stored row, in a sentence."""
    share = account.unresolved / max(1, account.own_hits)
    return (
        f"{share:.1%} of the prefix-cache hits ({account.unresolved:,} positions, more than were "
        "lost) have no stored row."
    )


def events_needed(mechanism: Mechanism, missing: Missingness, limits: Limits) -> int:
    """Return about how many loss events the widest equivalence interval would need, at least.

    An interval narrows with the root of the number of events.
    """
    halves = [
        (d.equivalence.high - d.equivalence.low) / 2
        for d in missing.differences
        if d.equivalence and d.covariate.group != "system"
    ]
    widest = max(halves, default=0.0) / limits.negligible_bias
    return math.ceil(mechanism.n_events * max(1.0, widest**2) - 1e-6)


def on_unresolved(account: Accounting, limits: Limits) -> list[str]:
    """Return the step for prefix-cache hits without a stored row, where there are too many."""
    share = account.unresolved / max(1, account.own_hits)
    if share <= limits.max_unresolved:
        return []
    return [
        f"{share:.1%} of the prefix-cache hits have no stored row, and no weight makes up for "
        "them. Harvest with an empty prefix cache, or leave those prompts out."
    ]


def on_external(account: Accounting) -> list[str]:
    """Return the step for positions whose KV came from outside the run, where there are any."""
    if not account.external:
        return []
    share = account.external / account.positions
    return [
        f"{share:.1%} of the positions ({account.external:,}) were served from KV that came from "
        "outside: another engine or an earlier run computed their rows, and only its dataset "
        "can have them. Train on both, or know that these prompts are not in this one."
    ]


def look_when(rejected: list[Association]) -> list[str]:
    """Return what to do about a loss rate that changed in time, which no weight fixes."""
    if not any(t.name == "change" for t in rejected):
        return []
    return ["Look at the trace: what changed at that time? Weights by load do not fix it."]


def remedy(weighting: Weighting | None, words: str) -> list[str]:
    """Return the step to train with weights, with what they do.

    None where they do little; where they make something worse, what that is instead.
    """
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
    if weighting.worse:
        worst = weighting.worse[0]
        others = len(weighting.worse) - 1
        more = f", and {others} more" if others else ""
        return [
            f"Weights (--weights) are not advised: they change the largest biases ({changes}), but "
            f"make {worst.label} worse ({worst.before:.3g} to {worst.after:.3g}{more})."
        ]
    return [f"{words}; the largest bias of a mean of stored rows changes: {changes}."]


def asked(missing: Missingness, both: str = "and") -> str:
    """Return what was tested beside the system; ``both`` joins content and readouts."""
    has_values = any(d.covariate.group == "values" for d in missing.differences)
    other = f"{both} readout" if has_values else "that was tested"
    return f"content covariate {other}"


def training(missing: Missingness) -> list[str]:
    """Return the step to train, with what was not tested."""
    if any(d.covariate.group == "values" for d in missing.differences):
        return ["Train on it."]
    return [
        "Train on it, unless you study the activation values themselves: without readouts it is "
        "unknown whether losses depend on them."
    ]


def on_reuse(account: Accounting, coverage: Coverage | None) -> list[str]:
    """Return the step to weight rows by how often they were served, where any were served again.

    With it, which rows would be most of what such weights see, and how to leave them out.
    """
    if not account.own_hits:
        return []
    reused = account.own_hits / max(1, account.positions)
    said = (
        f"{reused:.0%} of the positions are prefix-cache hits: to weight rows by how often they "
        'were served, load with weights="multiplicity"'
    )
    cell = coverage.dominant if coverage else None
    if cell is None or cell.share < DOMINANT or not cell.exclude:
        return [f"{said}."]
    names = ", ".join(f'"{name}"' for name in cell.exclude)
    exclude = names if len(cell.exclude) == 1 else f"({names})"
    rows = f"{cell.n_rows:,} row{'' if cell.n_rows == 1 else 's'}"
    return [
        f"{said}, exclude={exclude}. Without exclude, token id {cell.token_id} at position "
        f"{cell.position} ({rows}, served {cell.n_served:,} times) is {cell.share:.0%} of the "
        f"squared deviation of the norm at {cell.hook}: special tokens and attention sinks would "
        "be most of what a model of the rows learns."
    ]


def blind_spots(hooks: tuple[str, ...], widths: Widths, n_probes: int) -> list[str]:
    """Return what the audit of some runs cannot detect, each in a sentence.

    Args:
        hooks: hooks with readouts in every run that lost something.
        widths: numbers of a readout.
        n_probes: user's probes of a hook, those that are not looked at as well.

    Spec: 0.1 section 14.9.
    """
    if hooks:
        seen = f"the norm, {widths.n_projections} random projections"
        seen += f" and {widths.n_probes} probes" if widths.n_probes else ""
        values = (
            f"losses that depend on a direction of the activations that no readout has ({seen} of "
            "each hook are all that is known of a lost row)"
        )
    else:
        values = (
            "losses that depend on the values of the rows or on token ids: without readouts "
            "neither is known of a lost row"
        )
    more = []
    if n_probes > MAX_PROBES:
        more.append(
            f"losses that depend on a probe beyond the first {MAX_PROBES} of a hook (there are "
            f"{n_probes})"
        )
    return [
        values,
        *more,
        f"any pattern in fewer than {MIN_BLAMED} independent loss events",
        "a dependence on load or content that is too weak for its number of events",
        "losses that follow the load after a longer time than its moving averages cover",
        f"the loss of a token id, source or other kind of fewer than {MIN_TOKENS} tokens, or lost "
        f"in fewer than {MIN_HITS} blocks of the run (one request, one burst)",
        "a pattern in aborted tokens, which were computed when a request or run ended: they count "
        "in the share lost, and are in no test",
        "the loss of all requests of one user, where neither the source nor the first block of "
        "the prompts identifies that user",
        "losses by the meaning of a text, where its token ids, lengths, positions and sources are "
        "like the rest",
        "tokens that never reached the engine: requests that were refused, skipped or never sent",
        "rows that are stored but wrong: the audit reads tables; actds validate and the check "
        "before a harvest look at values, and actds regimes compares those of phases, runs or "
        "datasets",
    ]
