"""Made-up input of known truth for parts of the audit: more hooks, partial steps, rows of steps."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa

from actds_validators.arrays import Floats
from actds_validators.audit.covariates import squares
from actds_validators.audit.lookup import MAX_ROWS
from actds_validators.audit.mechanism import WithinTest, selections
from actds_validators.audit.passes import CONTENT, PartialRows
from actds_validators.audit.result import Covariate

Tables = dict[str, pa.Table]
Way = Literal["tokens", "cells", "requests"]
N_BLOCKS = 20
SINK = 100.0
"""Times the median norm; one row in `RARE` is such a one."""
RARE = 500


def with_hooks(found: Tables, n_hooks: int, seed: int) -> Tables:
    """Return the tables with further hooks, whose readouts are noise that knows of nothing.

    Args:
        found: tables of a run with readouts of one hook.
        n_hooks: hooks in all.
        seed: of the noise.
    """
    readouts = found.get("readouts")
    if readouts is None or n_hooks == 1:
        return found
    rng = np.random.default_rng([seed, 99])
    n, width = len(readouts), len(readouts["projections"][0].as_py())
    offsets = pa.array(np.arange(n + 1, dtype=np.int32) * width)
    every = [readouts]
    for k in range(1, n_hooks):
        noise = pa.array(rng.normal(size=n * width).astype(np.float32))
        columns = {
            "hook": pa.repeat(pa.scalar(f"noise.{k}"), n),
            "norm": pa.array(rng.lognormal(size=n).astype(np.float32)),
            "projections": pa.ListArray.from_arrays(offsets, noise),
        }
        one = readouts
        for name, column in columns.items():
            field = readouts.schema.field(name)
            one = one.set_column(one.column_names.index(name), field, column.cast(field.type))
        every.append(one)
    return {**found, "readouts": pa.concat_tables(every)}


def made_rows(
    n_lost: int,
    rng: np.random.Generator,
    way: Way = "tokens",
    n_hooks: int = 1,
    sinks: float = 1.0,
    width: int = 1,
) -> tuple[dict[str, list[PartialRows]], np.ndarray]:
    """Return the rows of steps that lost a part, and the block in which each request began.

    A step has two prefill chunks of 8 tokens and 14 tokens of requests that decode for 60 steps on
    average, or ``width`` times as many; one token of a step, or as many cells or requests as come
    to that, are lost by coin. Of content there are a
    number, and flags that one token in 50 and one in 500 has; of a hook the norm, one in 500 of
    which is a sink, and 8 numbers.

    Args:
        n_lost: tokens, about.
        rng: draws.
        way: what the coin is thrown for.
        n_hooks: hooks.
        sinks: how many times as likely a sink is lost, where tokens are.
        width: of a step, in 30 tokens.
    """
    size, slots = 30 * width, 14 * width
    n_steps = min(int(np.ceil(n_lost)), MAX_ROWS // size)
    decoding = np.cumsum(rng.random((n_steps, slots)) < 1 / 60, axis=0) * slots + np.arange(slots)
    first = int(decoding.max()) + 1
    chunk = np.arange(2 * width * n_steps).reshape(n_steps, -1)
    request = np.concatenate([decoding, first + np.repeat(chunk, 8, axis=1)], axis=1).reshape(-1)
    step = np.repeat(np.arange(n_steps), size)
    position = np.arange(len(step))  # unique within each request: all that is asked of it
    norm = rng.lognormal(0, 0.3, (n_hooks, len(step)))
    is_sink = rng.random(len(step)) < 1 / RARE
    norm[:, is_sink] *= SINK
    unit = {"tokens": position, "cells": step * (request.max() + 1) + request, "requests": request}
    of = np.unique(unit[way], return_inverse=True)[1].reshape(-1)
    lost = (rng.random(of.max() + 1) < 1 / size)[of]
    if sinks != 1.0:
        lost |= is_sink & (rng.random(len(step)) < (sinks - 1) / size)
    n_in = np.bincount(step, lost)
    kept = ((n_in > 0) & (n_in < size))[step]
    content = np.stack(
        [rng.normal(size=len(step)), *(rng.random(len(step)) < 1 / n for n in (50, RARE))]
    )
    numbers = [CONTENT, *(f"hook.{k}" for k in range(n_hooks))]
    values: list[Floats] = [content]
    for k in range(n_hooks):
        values.append(np.concatenate([norm[k : k + 1], rng.normal(size=(8, len(step)))]))
    found = {
        name: [PartialRows(step[kept], request[kept], position[kept], lost[kept], x[:, kept])]
        for name, x in zip(numbers, values, strict=True)
    }
    began = np.zeros(int(request.max()) + 1, np.int64)
    began[request[::-1]] = step[::-1] * N_BLOCKS // n_steps
    return found, began


def selections_of(
    made: tuple[dict[str, list[PartialRows]], np.ndarray], n_draws: int, seed: int
) -> list[list[WithinTest]]:
    """Return the tests of content, then of values, of what `made_rows` made."""
    runs, began = made
    covariates = {}
    for group, (rows,) in runs.items():
        kind = "content" if group == CONTENT else "values"
        some = [
            Covariate(name=f"{group} {k}", label=f"{group} {k}", unit="", group=kind)  # type: ignore[arg-type]
            for k in range(len(rows.values))
        ]
        covariates[group] = some if group == CONTENT else [*some, *squares(some)]
    away = {g: rows.values.mean(axis=1) for g, (rows,) in runs.items() if g != CONTENT}
    return [found for found, _ in selections(runs, covariates, away, [began], n_draws, seed)]
