"""Accounting: what became of every position, in sums that grow with requests and steps only.

First section of the audit. ``actds validate`` accounts position by position; here counts and sums
of positions and of their squares stand for the sets, so that a hundred million rows need no memory.
Imports `sources` and the result.
"""

from __future__ import annotations

from collections import Counter

from actds_validators.audit.result import Accounting, Finding, WaterfallStep
from actds_validators.audit.sources import RunSource

__all__ = ["account_run", "accounting"]

MAX_FINDINGS = 20
Counts = Counter[tuple[str, str | None]]

NEVER = "never computed"
# Section 7.2: an aborted position without a step is owed, and no step computed it.
_FATE = f"case when disposition = 'aborted' and step is null then '{NEVER}' else disposition end"
_LENGTH = "stop::bigint - start"
# Sums over [start, stop) of 1, of 2p + 1 and of 3p^2 + 3p + 1 are differences of stop, its square
# and its cube.
_SPAN = (
    f"sum({_LENGTH}) n, sum(stop::hugeint * stop - start::hugeint * start) s1, "
    "sum(stop::hugeint * stop * stop - start::hugeint * start * start) s2"
)
_ROW = (
    "count(*) n, 2 * sum(position) + count(*) s1, "
    "3 * sum(position::ubigint * position) + 3 * sum(position) + count(*) s2"
)
_REQUEST = "n, n * n s1, n * n * n s2"  # of one span from 0 to n
# Section 7.1: a request that an engine computed past its end owes that as well.
_OWED = (
    "select request, case when finish_reason = 'skipped' then 0::hugeint else greatest("
    "prompt_len::hugeint + greatest(generated_len, 1) - 1, coalesce(reached, 0)) end n "
    "from requests left join (select request, max(stop) reached from spans "
    "where step is not null group by request) using (request)"
)
_NO_SUMS = "0 s1, 0 s2"
# Each: code, what differs, left query, right query, expected. Equal counts and sums over the same
# key are equal sets but for cancellations that no fault makes by chance.
_CHECKS = (
    (
        "E404",
        "census/{run}/spans request",
        f"select request k, {_SPAN} from spans group by request",
        f"select request k, {_REQUEST} from ({_OWED}) where n > 0",
        "spans that partition the request's positions",
    ),
    (
        "E406",
        "shards (run {run}) rows of request",
        f"select request k, {_ROW} from tokens group by request",
        f"select request k, {_SPAN} from spans where disposition = 'captured' group by request",
        "the census' captured positions",
    ),
    (
        "E408",
        "losses/{run} drops of request",
        f"select request k, {_SPAN} from drops group by request",
        f"select request k, {_SPAN} from spans where disposition = 'dropped' group by request",
        "the census' dropped positions",
    ),
    (
        "E412",
        "shards (run {run}) rows of step",
        f"select step k, count(*) n, {_NO_SUMS} from tokens group by step",
        f"select step k, captured_tokens n, {_NO_SUMS} from steps where captured_tokens > 0",
        "the census' captured_tokens",
    ),
    (
        "E408",
        "losses/{run} drops of step",
        f"select step k, sum({_LENGTH}) n, {_NO_SUMS} from drops group by step",
        f"select step k, dropped_tokens n, {_NO_SUMS} from steps where dropped_tokens > 0",
        "the census' dropped_tokens",
    ),
    (
        "E409",
        "census/{run}/steps step",
        f"select step k, batch_tokens n, {_NO_SUMS} from steps",
        "select step k, captured_tokens::bigint + dropped_tokens + aborted_tokens "
        f"+ filtered_tokens + recomputed_tokens n, {_NO_SUMS} from steps",
        "the sum of what became of them",
    ),
    *(
        (
            "E409",
            f"census/{{run}}/spans {word} in all:",
            f"select 'steps' k, coalesce(sum({_LENGTH}), 0) n, {_NO_SUMS} from spans "
            f"where disposition = '{word}' and step is not null",
            f"select 'steps' k, coalesce(sum({word}_tokens), 0) n, {_NO_SUMS} from steps",
            f"the census' {word}_tokens",
        )
        for word in ("aborted", "filtered")
    ),
)


def account_run(source: RunSource) -> tuple[Counts, Counter[str], list[Finding]]:
    """Return positions by fate and reason, other counts, and what does not add up.

    The fate is the disposition, or ``never computed``.
    """
    spans: Counts = Counter()
    for disposition, reason, n in source.rows(
        f"select {_FATE} fate, reason, sum(stop::bigint - start) from spans group by all"
    ):
        spans[disposition, reason] += int(n)
    [never] = source.one(
        f"select count(distinct request) from spans where {_FATE} = '{NEVER}' and stop > start"
    )
    [requests, steps, recomputed] = source.one(
        "select (select count(*) from requests), (select count(*) from steps), "
        "(select coalesce(sum(recomputed_tokens), 0) from steps)"
    )
    [unresolved] = source.one(
        "with served as (select ref_request, start, stop from spans where disposition = "
        "'cache_ref'), kept as (select request, start, stop from spans where disposition = "
        "'captured') select (select coalesce(sum(stop::bigint - start), 0) from served) - "
        "coalesce(sum(greatest(0, least(s.stop, k.stop)::bigint "
        "- greatest(s.start, k.start)::bigint)), 0) "
        "from served s join kept k on s.ref_request = k.request"
    )
    counts = Counter(
        requests=int(requests),
        steps=int(steps),
        recomputed=int(recomputed),
        unresolved=int(unresolved),
        never_computed_requests=int(never),
    )
    return spans, counts, [f for check in _CHECKS for f in _differing(source, *check)]


def accounting(spans: Counts, counts: Counter[str], findings: list[Finding]) -> Accounting:
    """Return the section over all runs."""
    total = sum(spans.values())
    by = Counter[str]()
    for (disposition, _), n in spans.items():
        by[disposition] += n
    computed = by["captured"] + by["dropped"] + by["aborted"]
    waterfall = [WaterfallStep(name="positions", n_positions=total, share=1.0 if total else 0.0)]
    for name in ("cache_ref", "filtered", NEVER, "aborted", "dropped", "captured"):
        for (disposition, reason), n in sorted(spans.items(), key=lambda item: str(item[0])):
            if disposition == name and n:
                waterfall.append(
                    WaterfallStep(name=name, reason=reason, n_positions=n, share=n / total)
                )
    return Accounting(
        positions=total,
        computed=computed,
        captured=by["captured"],
        cache_ref=by["cache_ref"],
        dropped=by["dropped"],
        aborted=by["aborted"],
        never_computed=by[NEVER],
        never_computed_requests=counts["never_computed_requests"],
        filtered=by["filtered"],
        recomputed=counts["recomputed"],
        unresolved=counts["unresolved"],
        requests=counts["requests"],
        steps=counts["steps"],
        loss_share=(by["dropped"] + by["aborted"]) / computed if computed else 0.0,
        waterfall=waterfall,
        findings=findings,
    )


def _differing(
    source: RunSource, code: str, place: str, left: str, right: str, expected: str
) -> list[Finding]:
    rows = source.rows(
        f"select coalesce(l.k, r.k) k, coalesce(l.n, 0), coalesce(r.n, 0) from ({left}) l "
        f"full join ({right}) r on l.k = r.k where "
        + " or ".join(f"coalesce(l.{c}, 0) <> coalesce(r.{c}, 0)" for c in ("n", "s1", "s2"))
        + f" order by k limit {MAX_FINDINGS}"
    )
    return [
        Finding(
            code=code,
            place=f"{place.format(run=source.run)} {key}",
            got=f"{got} tokens" if got != wanted else f"{got} tokens, at other positions",
            expected=f"{wanted}, {expected}",
            severity="error",
        )
        for key, got, wanted in rows
    ]
