"""Every computed token of simulated runs, one line each: what the audit sums, done the long way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import ArrayLike
from scipy.signal import lfilter

from actds.format import tables
from actds_testing.simulate import Simulated
from actds_validators.audit.data import RUN_TABLES, RunSource, TablePart, source_of
from actds_validators.audit.result import Limits
from actds_validators.audit.run import Sections, audit_sources
from actds_validators.statistics.association import Within, within_cells

TABLES = ("requests", "steps", "spans", "drops", "stalls", "occupancy", "tokens", "readouts")


def tables_of(run: Simulated) -> dict[str, pa.Table]:
    """Return the tables of a simulated run by name."""
    return {name: getattr(run, name) for name in TABLES if getattr(run, name) is not None}


def changed(found: dict[str, pa.Table], name: str, change: Any) -> dict[str, pa.Table]:
    """Return the tables with one of them changed as a data frame."""
    frame = change(found[name].to_pandas())
    made = pa.Table.from_pandas(frame, tables.bare_schema(name), preserve_index=False)
    return {**found, name: made}


def arrow_source(
    run: str, given: Mapping[str, pa.Table], labels: Mapping[str, str] | None = None
) -> RunSource:
    """Return tables in memory as the audit reads those of a run."""
    every = {name: given.get(name, tables.empty(name)) for name in RUN_TABLES}
    parts = {name: (TablePart(name, t.num_rows, table=t),) for name, t in every.items()}
    return source_of(run, parts, labels or {})


@contextmanager
def sources_of(runs: Sequence[dict[str, pa.Table]]) -> Iterator[list[RunSource]]:
    """Yield the runs as the audit reads them, named r-0 and so on."""
    yield [arrow_source(f"r-{k}", run) for k, run in enumerate(runs)]


def audited(*runs: dict[str, pa.Table], limits: Limits | None = None) -> Sections:
    """Return what the audit finds in the tables of some runs."""
    with sources_of(runs) as sources:
        return audit_sources(sources, limits or Limits())


def expand(spans: pa.Table) -> pd.DataFrame:
    """Return one line per position of a table with start and stop."""
    frame = spans.to_pandas()
    length = (frame["stop"].astype(int) - frame["start"].astype(int)).to_numpy()
    lines = frame.loc[frame.index.repeat(length)].reset_index(drop=True)
    within = np.arange(len(lines)) - np.repeat(np.cumsum(length) - length, length)
    lines["position"] = lines["start"].astype(int) + within
    return lines


def computed_steps(run: dict[str, pa.Table]) -> pd.DataFrame:
    """Return the steps that computed a token that could be stored, with its loads."""
    steps = run["steps"].to_pandas().sort_values("step")
    for n in (8, 32, 128):
        steps[f"load_{n}"] = lfilter([1 / n], [1, 1 / n - 1], steps["batch_tokens"].astype(float))
    steps["n"] = steps["captured_tokens"].astype(int) + steps["dropped_tokens"].astype(int)
    return steps[steps["n"] > 0].reset_index(drop=True)


def tokens_of(runs: Sequence[dict[str, pa.Table]], *, ids: bool) -> pd.DataFrame:
    """Return every captured and dropped token with all its covariates.

    Args:
        runs: tables of the runs, all with readouts or all without.
        ids: whether the readouts name the ids of lost tokens.
    """
    frames = []
    first_tick = 0
    for number, run in enumerate(runs):
        stored = run["tokens"].to_pandas()[["step", "request", "position", "token_id"]]
        gone = expand(run["drops"])[["step", "request", "position"]]
        if ids:
            names = run["readouts"].to_pandas()
            names = names[names["hook"] == names["hook"].min()]
            gone = gone.merge(names[["request", "position", "token_id"]], how="left")
        one = pd.concat([stored.assign(lost=False), gone.assign(lost=True)], ignore_index=True)
        requests = run["requests"].to_pandas()
        requests["request_len"] = (
            requests["prompt_len"].astype(int)
            + np.maximum(requests["generated_len"].astype(int), 1) - 1
        )  # fmt: skip
        one = one.merge(requests[["request", "prompt_len", "request_len", "source"]], on="request")
        steps = computed_steps(run)
        steps["tick"] = first_tick + np.arange(len(steps))
        first_tick += len(steps)
        columns = ["step", "tick", "n", "dropped_tokens", "batch_tokens", "n_requests", "waiting",
                   "max_seq_len", "load_8", "load_32", "load_128"]  # fmt: skip
        frames.append(one.merge(steps[columns], on="step").assign(run=number))
    every = pd.concat(frames, ignore_index=True)
    counted = every if ids else every[~every["lost"]]
    share = counted["token_id"].value_counts(normalize=True)
    special = {
        int(token)
        for run in runs
        for token in run["tokens"].to_pandas().query("flags % 2 == 1")["token_id"]
    }
    every["rarity"] = -np.log2(every["token_id"].map(share))
    every["special"] = every["token_id"].isin(special)
    every["partial"] = (every["dropped_tokens"] > 0) & (every["dropped_tokens"] < every["n"])
    return every


def covariates(every: pd.DataFrame, *, ids: bool) -> dict[str, np.ndarray]:
    """Return the content and system covariates of every computed token, by name."""
    found = {name: np.log2(every[name].astype(float) + 1)
             for name in ("position", "prompt_len", "request_len")}  # fmt: skip
    found["prefill"] = every["position"].astype(int) < every["prompt_len"].astype(int)
    if ids:
        found |= {"special": every["special"], "rarity": every["rarity"]}
    names = every[["run", "request", "source"]].drop_duplicates()["source"].value_counts()
    if len(names) > 1:
        for name in names.index[:8]:
            found[f"source:{name}"] = every["source"] == name
    for name in ("batch_tokens", "load_8", "load_32", "load_128", "waiting", "max_seq_len"):
        found[name] = every[name]
    found["requests"] = every["n_requests"]
    return {name: np.asarray(values, np.float64) for name, values in found.items()}


def within(step: ArrayLike, request: ArrayLike, x: ArrayLike, lost: ArrayLike) -> Within | None:
    """Return the test of selection within steps, of tokens one by one ``(n_tokens,)`` each."""
    keys = np.stack([np.asarray(step, np.int64), np.asarray(request, np.int64)])
    value, gone = np.asarray(x, np.float64), np.asarray(lost, np.float64)
    cells, at = np.unique(keys, axis=1, return_inverse=True)
    weights = np.ones_like(value), value, gone, gone * value
    sums = (np.bincount(at.reshape(-1), w, minlength=cells.shape[1]) for w in weights)
    return within_cells(*cells, *sums)
