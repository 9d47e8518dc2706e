"""Datasets that differ in one thing each: who wrote the tokens, or how rows were computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from actds_testing.schedules import Schedule, simulate
from actds_testing.synthetic import make_dataset

__all__ = ["HOOKS", "other_continuations", "three_arms"]

HOOKS = ("resid_post.0", "resid_post.1")


def three_arms(folder: Path, n_requests: int = 40) -> dict[str, Path]:
    """Write A, B with other continuations of A's prompts, and C with A's tokens in float32.

    Returns:
        The paths by name.
    """
    schedule = simulate(n_requests, 0, cache=False)
    return {
        "A": make_dataset(folder / "a", schedule=schedule, hooks=HOOKS),
        "B": make_dataset(folder / "b", schedule=other_continuations(schedule), hooks=HOOKS),
        "C": make_dataset(folder / "c", schedule=schedule, hooks=HOOKS, dtype="float32"),
    }


def other_continuations(schedule: Schedule) -> Schedule:
    """Return a schedule whose sampled tokens are other ones."""
    prompt = dict(
        zip(*(schedule.requests[n].to_pylist() for n in ("request", "prompt_len")), strict=True)
    )
    rows = schedule.rows.to_pylist()
    for row in rows:
        row["token_id"] += 7 * (row["position"] >= prompt[row["request"]])
    ids = [
        [t + 7 * (p >= prompt.get(r, 0)) for p, t in enumerate(tokens)]
        for r, tokens in enumerate(schedule.token_ids)
    ]
    requests = schedule.requests.to_pylist()
    for line in requests:
        line["token_digest"] = None
    return replace(
        schedule,
        rows=pa.Table.from_pylist(rows, schema=schedule.rows.schema),
        requests=pa.Table.from_pylist(requests, schema=schedule.requests.schema),
        token_ids=ids,
    )
