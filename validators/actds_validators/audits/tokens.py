"""Tokens: one pass over the rows and losses of a run, down to sums per tick and per block.

Third stage of the audit. What is summed are the covariates of every computed token, over all and
over the lost ones. Imports `sources` and `series`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from actds_validators.audits.result import Covariate
from actds_validators.audits.series import Series
from actds_validators.audits.sources import RunSource

__all__ = [
    "MAY_BE_NULL",
    "Bands",
    "CovariateSums",
    "Tokens",
    "banded",
    "open_lines",
    "prepare",
    "token_sums",
    "value_sums",
    "values_of",
    "within_cells",
]

MAX_SOURCES = 8
RARITY_BANDS = 8
Floats = npt.NDArray[np.float64]
Columns = dict[str, npt.NDArray[np.float64]]
Banded = tuple[list[int], Floats]

CONTENT = {
    "position": ("position in the request", "log2 tokens", "log2(position + 1)"),
    "prompt_len": ("prompt length of the request", "log2 tokens", "prompt_log"),
    "request_len": ("length of the request", "log2 tokens", "request_log"),
    "prefill": ("prefill, against decode", "share", "(position < prompt_len)::double"),
    "special": ("special token", "share", "special::double"),
    "rarity": ("rarity of the token", "bits", "rarity"),
}
"""Content covariates: label, unit, and expression over a computed token."""
MAY_BE_NULL = "rarity"
"""The only one of them that a token may lack."""


@dataclass(frozen=True)
class Tokens:
    """What is known of the computed tokens of a run, after `prepare`.

    Args:
        covariates: content covariates, with their expressions.
        has_ids: whether the token ids of lost tokens are known.
        has_losses: whether the run dropped anything.
    """

    covariates: dict[str, tuple[Covariate, str]]
    has_ids: bool
    has_losses: bool


@dataclass(frozen=True)
class CovariateSums:
    """One covariate over the series.

    Args:
        covariate: which.
        n: tokens that have a value, ``(n_ticks,)``.
        sums: ``(3, n_ticks)``: x and its square over all computed tokens, x over the lost ones.
        n_lost: lost tokens that have a value, ``(n_ticks,)``.
    """

    covariate: Covariate
    n: Floats
    sums: Floats
    n_lost: Floats


@dataclass
class Bands:
    """Computed and lost tokens of each block by the bands of a variable.

    Args:
        labels: of the bands, in order.
        n: computed tokens ``(n_blocks, n_bands)``.
        lost: lost ones.
        edges: low and high of each band, ``None`` for classes.
    """

    labels: list[str]
    n: Floats
    lost: Floats
    edges: list[tuple[float, float] | None] = field(default_factory=list)


def open_lines(source: RunSource) -> None:
    """Make ``lost_rows``, every dropped token, and ``lines``, one readout per token and hook.

    A row that a preemption made the engine compute again has several readouts, and an aborted one
    may have some. Of the requests that had either, only the lines of stored and of dropped rows
    stay, each at its own step.

    Spec: 0.1 section 7.8.
    """
    run = source.connection
    run.execute(
        "create temp table lost_rows as select step, request, "
        "unnest(range(start::bigint, stop::bigint))::uinteger as position from drops"
    )
    run.execute(
        "create temp table odd as select request from requests where n_preemptions > 0 "
        "union select request from spans where disposition = 'aborted'"
    )
    if not source.hooks or not source.one("select count(*) from odd")[0]:
        run.execute("create view lines as select * from readouts")
        return
    run.execute(
        "create temp table odd_rows as select step, request, position from ("
        "select step, request, position from tokens union all from lost_rows) "
        "semi join odd using (request)"
    )
    run.execute(
        "create view lines as select r.* from readouts r "
        "left join odd o on r.request = o.request left join odd_rows k "
        "on r.step = k.step and r.request = k.request and r.position = k.position "
        "where o.request is null or k.request is not null"
    )


def prepare(source: RunSource, sources: list[str], *, has_ids: bool) -> Tokens:
    """Make the views ``stored`` and ``gone``: computed tokens with everything that is known.

    Args:
        source: the run, after `open_lines`, with ``step_tick`` and, for ids, ``vocabulary``.
        sources: prompt sources that get a covariate each.
        has_ids: whether the readouts name the ids of lost tokens.
    """
    run = source.connection
    run.execute(
        "create temp table asked as select *, log2(prompt_len + 1) prompt_log, "
        "log2(request_len + 1) request_log, floor(prompt_log)::int prompt_band, "
        "floor(request_log)::int request_band from (select request, prompt_len::bigint prompt_len, "
        "prompt_len::bigint + greatest(generated_len, 1) - 1 request_len, source from requests)"
    )
    [n_lost] = source.one("select count(*) from lost_rows")
    run.execute(
        "create temp table gone_rows as select l.*, r.token_id from lost_rows l left join ("
        "select step, request, position, token_id from lines "
        "where hook = (select min(hook) from readouts)) r using (step, request, position)"
        if has_ids and n_lost
        else "create temp table gone_rows as select *, null::uinteger token_id from lost_rows"
    )
    rare = "vocabulary.rarity" if has_ids else "null::double"
    marked = "coalesce(vocabulary.special, false)" if has_ids else "null::boolean"
    words = "left join vocabulary using (token_id)" if has_ids else ""
    for view, rows in (("stored", "tokens"), ("gone", "gone_rows")):
        run.execute(
            f"create view {view} as select t.step, t.request, t.position, k.tick, k.block, "
            f"k.partial, k.load, asked.* exclude (request), "
            f"{rare} rarity, {marked} special "
            f"from {rows} t join step_tick k using (step) join asked using (request) {words}"
        )
    covariates = {
        name: (Covariate(name=name, label=label, unit=unit, group="content"), expression)
        for name, (label, unit, expression) in CONTENT.items()
        if has_ids or name not in ("rarity", "special")
    }
    for number, name in enumerate(sources[:MAX_SOURCES]):
        covariates[f"source_{number}"] = (
            Covariate(name=f"source:{name}", label=f"from {name}", unit="share", group="content"),
            f"coalesce(source = {_quoted(name)}, false)::double",
        )
    return Tokens(covariates, has_ids, n_lost > 0)


def token_sums(source: RunSource, tokens: Tokens, series: Series) -> list[CovariateSums]:
    """Return the sums of every content covariate over the ticks of the whole series."""
    columns = ", ".join(
        f"count({e if name == MAY_BE_NULL else '*'}) as n_{k}, sum({e}) as x_{k}, "
        f"sum(({e}) * ({e})) as xx_{k}"
        for k, (name, (_, e)) in enumerate(tokens.covariates.items())
    )
    stored = _per_tick(source, f"select tick, {columns} from stored group by tick", series)
    gone = _per_tick(source, f"select tick, {columns} from gone group by tick", series)
    return [
        CovariateSums(
            covariate,
            stored[f"n_{k}"] + gone[f"n_{k}"],
            np.stack(
                [stored[f"x_{k}"] + gone[f"x_{k}"], stored[f"xx_{k}"] + gone[f"xx_{k}"],
                 gone[f"x_{k}"]]
            ),
            gone[f"n_{k}"],
        )
        for k, (covariate, _) in enumerate(tokens.covariates.values())
    ]  # fmt: skip


def values_of(source: RunSource) -> Iterator[tuple[Covariate, str, str]]:
    """Yield the readouts as covariates, with their hook and expression over a readout."""
    for hook in source.hooks:
        names = {"norm": "norm"}
        for k in range(source.n_projections):
            names[f"projection {k}"] = f"projections[{k + 1}]"
        for name, value in names.items():
            yield (
                Covariate(
                    name=f"{hook} {name}",
                    label=f"{name} at {hook}",
                    unit="activation units",
                    group="values",
                ),
                hook,
                f"case when isfinite({value}) then {value}::double end",
            )


def value_sums(source: RunSource, series: Series) -> Iterator[CovariateSums]:
    """Yield the sums of the readouts: norm and projections of every hook."""
    for hook, group in groupby(values_of(source), key=lambda value: value[1]):
        values = list(group)
        columns = ", ".join(
            f"count({e}) as n_{k}, sum({e}) as x_{k}, sum(({e}) * ({e})) as xx_{k}"
            for k, (_, _, e) in enumerate(values)
        )
        rows = f"lines join step_tick using (step) where hook = {_quoted(hook)}"
        every = _per_tick(source, f"select tick, {columns} from {rows} group by tick", series)
        gone = _per_tick(
            source,
            f"select tick, {columns} from (select lines.*, tick from {rows}) v "
            "semi join lost_rows using (step, request, position) group by tick",
            series,
        )
        for k, (covariate, _, _) in enumerate(values):
            yield CovariateSums(
                covariate,
                every[f"n_{k}"],
                np.stack([every[f"x_{k}"], every[f"xx_{k}"], gone[f"x_{k}"]]),
                gone[f"n_{k}"],
            )


def banded(
    source: RunSource, bands: dict[str, str], cell: str, n_blocks: int
) -> tuple[dict[str, Banded], dict[int, tuple[int, int]]]:
    """Return computed and lost tokens by bands, and by cell, in one pass over the rows.

    Args:
        source: the run, prepared.
        bands: by name, the whole number of a token's band; tokens where it is null are left out.
        cell: whole number of a token's cell.
        n_blocks: blocks of the series.

    Returns:
        Band numbers with counts ``(2, n_blocks, n_bands)`` by name, and computed and lost tokens
        by cell.
    """
    names = list(bands)
    keys = ", ".join(f"b_{k}" for k in range(len(names)))
    columns = ", ".join(f"({e})::bigint as b_{k}" for k, e in enumerate(bands.values()))
    sets = ", ".join(["(cell)", *(f"(block, b_{k})" for k in range(len(names)))])
    counts: dict[str, list[list[tuple[int, int, int]]]] = {name: [[], []] for name in names}
    cells: dict[int, tuple[int, int]] = {}
    for lost, view in enumerate(("stored", "gone")):
        for *values, block, at, n, in_set in source.rows(
            f"select {keys}, block, cell, count(*), grouping(cell, {keys}) from "
            f"(select block, {columns}, ({cell})::bigint as cell from {view}) "
            f"group by grouping sets ({sets})"
        ):
            if not in_set >> len(names) & 1:
                before = cells.get(at, (0, 0))
                cells[at] = before[0] + n, before[1] + n * lost
                continue
            k = next(k for k in range(len(names)) if not in_set >> (len(names) - 1 - k) & 1)
            if values[k] is not None:
                counts[names[k]][lost].append((values[k], block, n))
    return {name: _dense(both[0], both[1], n_blocks) for name, both in counts.items()}, cells


def _dense(
    stored: list[tuple[int, int, int]], gone: list[tuple[int, int, int]], n_blocks: int
) -> Banded:
    numbers = sorted({band for band, _, _ in stored} | {band for band, _, _ in gone})
    column = {band: k for k, band in enumerate(numbers)}
    table = np.zeros((2, n_blocks, len(numbers)))
    for band, block, n in stored:
        table[0, block, column[band]] += n
    for band, block, n in gone:
        table[:, block, column[band]] += n
    return numbers, table


def within_cells(source: RunSource, expression: str, hook: str | None = None) -> Columns:
    """Return step, request, n, sx, n_lost and lx of the cells of partially lost steps.

    Args:
        source: the run, prepared.
        expression: the covariate over a computed token, or over a readout.
        hook: whose readouts; ``None`` for a content covariate.
    """
    rows = (
        f"select step, request, ({expression}) x, false as lost from stored where partial "
        f"union all select step, request, ({expression}) x, true as lost from gone where partial"
    )
    if hook is not None:
        rows = (
            f"select r.step, r.request, ({expression}) x, l.request is not null lost "
            "from lines r join step_tick k using (step) left join lost_rows l "
            "on r.step = l.step and r.request = l.request and r.position = l.position "
            f"where k.partial and r.hook = {_quoted(hook)}"
        )
    return source.columns(
        "select step::bigint step, request::bigint request, count(x)::double n, "
        "coalesce(sum(x), 0)::double sx, count(x) filter (lost)::double n_lost, "
        f"coalesce(sum(x) filter (lost), 0)::double lx from ({rows}) "
        "group by step, request having count(x) > 0"
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _per_tick(source: RunSource, sql: str, series: Series) -> dict[str, Floats]:
    found = source.columns(sql)
    tick = found.pop("tick").astype(np.int64)
    columns = {}
    for name, values in found.items():
        dense = np.zeros(series.n_ticks)
        dense[tick] = np.nan_to_num(values.astype(np.float64))
        columns[name] = dense
    return columns
