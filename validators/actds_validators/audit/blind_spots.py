"""Blind spots: what an audit would not notice, said beside what it found.

From what could be looked at alone, whatever was found. Imports the limits of the other stages.
"""

from __future__ import annotations

from actds_validators.audit.scale import MAX_PROBES, Widths
from actds_validators.audit.strata import MIN_TOKENS
from actds_validators.audit.verdict import MIN_BLAMED
from actds_validators.statistics.strata import MIN_HITS

__all__ = ["blind_spots"]


def blind_spots(hooks: tuple[str, ...], widths: Widths, n_probes: int) -> list[str]:
    """Return what the audit of some runs would not notice, each in a sentence.

    Args:
        hooks: hooks with readouts in every run that lost something.
        widths: numbers of a readout.
        n_probes: user's probes of a hook, those that are not looked at as well.

    Spec: 0.1 section 14.10.
    """
    if hooks:
        seen = f"the norm, {widths.n_projections} random projections"
        seen += f" and {widths.n_probes} probes" if widths.n_probes else ""
        values = (
            f"losses that go with a direction of the activations that no readout sees ({seen} of "
            "each hook are all that is known of a lost row)"
        )
    else:
        values = (
            "losses that go with the values of the rows or with token ids: without readouts a "
            "lost row left neither"
        )
    more = []
    if n_probes > MAX_PROBES:
        more.append(
            f"losses that go with a probe beyond the first {MAX_PROBES} of a hook (there are "
            f"{n_probes})"
        )
    return [
        values,
        *more,
        f"any pattern where all losses are fewer than {MIN_BLAMED} independent events",
        "a dependence on load or content that is too weak for its number of events",
        "losses that follow the load after a longer time than its moving averages remember",
        f"the loss of a token id, source or other kind of fewer than {MIN_TOKENS} tokens, or lost "
        f"in fewer than {MIN_HITS} stretches of the run (one request, one burst)",
        "what aborted tokens are like, computed when a request or run ended: they count in the "
        "share that is lost, and in no test",
        "the loss of all that one user sent, where neither the source nor the first block of the "
        "prompts tells that user from others",
        "losses by what a text means, where its token ids, lengths, positions and sources are "
        "like the rest",
        "tokens that never reached the engine: requests that were refused, skipped or never sent",
        "rows that are stored but wrong: the audit reads tables; actds validate and the check "
        "before a harvest look at values",
    ]
