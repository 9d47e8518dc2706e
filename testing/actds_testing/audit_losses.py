"""Losses made by hand: rows taken out of tables that have them all, and accounted as dropped."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pyarrow as pa

from actds.format import tables

Tables = dict[str, pa.Table]
Chooses = Callable[[pd.DataFrame], np.ndarray]


def rows_of(found: Tables) -> pd.DataFrame:
    """Return the stored rows with what their requests and readouts say of them, in step order."""
    rows = found["tokens"].to_pandas()[["request", "position", "token_id", "step", "flags"]]
    rows = rows.astype({"request": int, "position": int, "token_id": int, "step": int})
    about = found["requests"].to_pandas()
    about["own"] = (
        about["prompt_len"].astype(int) + np.maximum(about["generated_len"].astype(int), 1) - 1
    )
    rows = rows.merge(about[["request", "prompt_len", "own", "source"]], on="request")
    if "readouts" in found and len(found["readouts"]):
        values = found["readouts"].to_pandas()
        values = values[values["hook"] == values["hook"].min()]
        values = values.drop_duplicates(["request", "position", "step"])
        rows = rows.merge(values[["request", "position", "step", "norm", "projections"]], "left",
                          on=["request", "position", "step"])  # fmt: skip
    return rows.sort_values(["step", "request", "position"]).reset_index(drop=True)


def lose(found: Tables, choose: Chooses) -> Tables:
    """Return the tables of a run that dropped the chosen ones of its stored rows.

    Args:
        found: tables of a run, by name.
        choose: of the rows of `rows_of`, which are lost, ``(n_rows,)`` boolean.
    """
    rows = rows_of(found)
    gone = rows[np.asarray(choose(rows), bool)]
    assert len(gone)
    keys = set(zip(gone["request"].tolist(), gone["position"].tolist(), strict=True))
    kept = found["tokens"].to_pandas()
    pairs = zip(kept["request"].tolist(), kept["position"].tolist(), strict=True)
    stored = kept[[pair not in keys for pair in pairs]]
    n_lost = gone.groupby("step").size()
    steps = found["steps"].to_pandas()
    moved = steps["step"].map(n_lost).fillna(0).astype(np.uint32)
    steps["captured_tokens"] -= moved
    steps["dropped_tokens"] += moved
    drops = _drops(gone, found["drops"].to_pandas(), steps)
    return {
        **found,
        "tokens": _table("tokens", stored),
        "steps": _table("steps", steps),
        "drops": _table("drops", drops),
        "spans": _table("spans", _spans(found["spans"].to_pandas(), gone, rows)),
    }


def _table(name: str, frame: pd.DataFrame) -> pa.Table:
    made = pa.Table.from_pandas(frame, tables.bare_schema(name), preserve_index=False)  # type: ignore[arg-type]
    return made


def _drops(gone: pd.DataFrame, before: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return one line a step, request and stretch of positions."""
    gone = gone.sort_values(["step", "request", "position"])
    new = (gone[["step", "request"]].diff() != 0).any(axis=1) | (gone["position"].diff() != 1)
    group = new.cumsum()
    lines = gone.groupby(group).agg(
        step=("step", "first"), request=("request", "first"),
        start=("position", "first"), stop=("position", "last"),
    )  # fmt: skip
    lines["stop"] += 1
    lines["drop"] = pd.factorize(lines["step"])[0] + before["drop"].nunique()
    of_event = (lines["stop"] - lines["start"]).groupby(lines["drop"]).transform("sum")
    of_step = steps.set_index("step").loc[lines["step"].to_numpy()]
    lines = lines.assign(drop_reason="queue_full", policy="drop_newest", n_tokens=of_event,
                         t_ns=of_step["t_ns"].to_numpy() + 5,
                         batch_tokens=of_step["batch_tokens"].to_numpy(),
                         max_seq_len=of_step["max_seq_len"].to_numpy())  # fmt: skip
    return pd.concat([before, lines.reindex(columns=before.columns)])


def _spans(spans: pd.DataFrame, gone: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the spans with the captured ones of the losers' requests cut anew."""
    mine = (spans["disposition"] == "captured") & spans["request"].isin(gone["request"])
    some = rows[rows["request"].isin(gone["request"])].sort_values(["request", "position"])
    lost = some.merge(gone[["request", "position"]].assign(lost=True), "left")["lost"].notna()
    some = some.reset_index(drop=True).assign(lost=lost.to_numpy())
    new = (some["request"].diff() != 0) | (some["position"].diff() != 1)
    new |= some["lost"] != some["lost"].shift()
    lines = some.groupby(new.cumsum()).agg(
        request=("request", "first"), start=("position", "first"), stop=("position", "last"),
        step=("step", "first"), lost=("lost", "first"),
    )  # fmt: skip
    lines["stop"] += 1
    lines["disposition"] = np.where(lines["lost"], "dropped", "captured")
    lines["reason"] = np.where(lines["lost"], "queue_full", None)
    lines["ref_request"] = None
    made = pd.concat([spans[~mine], lines.reindex(columns=spans.columns)])
    return made.sort_values(["request", "start"])
