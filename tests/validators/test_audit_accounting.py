"""The audit accounts first: whatever does not add up fails before a number is estimated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from actds_testing.audit_tokens import audited, changed, tables_of
from actds_testing.simulate import SCENARIOS, simulate
from actds_validators.audit.result import Limits
from actds_validators.audit.verdict import judge
from actds_validators.pages.accounting import balance, map_of, never_computed

Tables = dict[str, pa.Table]


@pytest.fixture(scope="module")
def sound() -> Tables:
    scenario = replace(SCENARIOS["mnar_rarity"], n_steps=400, rate=0.05, cancel_share=0.1)
    return tables_of(simulate(scenario, 11))


def refused(found: Tables) -> set[str]:
    """Return the codes of the findings, of an audit that stopped there and failed."""
    sections = audited(found)
    verdict = judge(sections, Limits())
    assert (verdict.level, verdict.kind) == ("FAIL", "unaccounted")
    assert verdict.deciding.value == len(sections.accounting.findings) > 0
    assert sections.missingness is sections.mechanism is sections.weighting is None
    assert sections.coverage is sections.queues is None
    return {finding.code for finding in sections.accounting.findings}


@pytest.mark.parametrize("name", SCENARIOS)
def test_sound_tables_have_no_finding(name: str) -> None:
    run = simulate(replace(SCENARIOS[name], n_steps=600, cancel_share=0.1), 12)
    assert audited(tables_of(run)).accounting.findings == []


def dropped_row(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(index=17)


def doubled_row(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([frame, frame.iloc[[17]]])


def later_row(frame: pd.DataFrame) -> pd.DataFrame:
    frame.loc[frame.index[-1], "position"] += 1
    return frame


def rows_that_change_requests(frame: pd.DataFrame) -> pd.DataFrame:
    """Give two rows of one step, at different positions, the other's request."""
    for _, some in frame.groupby("step"):
        first, other = some.iloc[0], some.iloc[-1]
        if first["request"] != other["request"] and first["position"] != other["position"]:
            frame.loc[[first.name, other.name], "request"] = [other["request"], first["request"]]
            return frame
    raise AssertionError("no step with two requests")


def rows_that_move_apart(frame: pd.DataFrame) -> pd.DataFrame:
    """Move two rows of one request by one position, in opposite directions."""
    for _, some in frame.groupby("request"):
        if len(some) > 9:
            frame.loc[some.index[[2, 6]], "position"] += pd.Series([1, -1]).to_numpy()
            return frame.astype({"position": "uint32"})
    raise AssertionError("no request of that length")


def rows_that_change_steps(frame: pd.DataFrame) -> pd.DataFrame:
    frame.loc[frame.index[0], "step"] = frame["step"].max() - frame.loc[frame.index[0], "step"]
    return frame


def moved(frame: pd.DataFrame, at: int = 0) -> pd.DataFrame:
    frame.loc[frame.index[at], ["start", "stop"]] += 1
    return frame


def of(disposition: str, change: Callable[[pd.DataFrame], pd.DataFrame]) -> Callable[..., Any]:
    """Return the change of the spans of a disposition alone."""

    def done(frame: pd.DataFrame) -> pd.DataFrame:
        mine = frame["disposition"] == disposition
        return pd.concat([frame[~mine], change(frame[mine].copy())])

    done.__name__ = f"{disposition}_{change.__name__}"
    return done


def without_the_last(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.iloc[:-1]


def backwards(frame: pd.DataFrame) -> pd.DataFrame:
    frame.loc[frame.index[0], ["start", "stop"]] = [9, 3]
    return frame


def captured_instead(frame: pd.DataFrame) -> pd.DataFrame:
    frame.loc[frame.index[0], ["disposition", "reason"]] = ["captured", None]
    return frame


def dropped_instead(frame: pd.DataFrame) -> pd.DataFrame:
    frame.loc[frame.index[0], ["disposition", "reason"]] = ["dropped", "queue_full"]
    return frame


def of_another_request(frame: pd.DataFrame) -> pd.DataFrame:
    other = frame["request"].unique()
    frame.loc[frame["request"] == other[0], "request"] = other[0] + 1
    return frame


def of_another_step(frame: pd.DataFrame) -> pd.DataFrame:
    frame.loc[frame.index[0], "step"] = frame["step"].max() + 1
    return frame


def counted(column: str, by: int) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def done(frame: pd.DataFrame) -> pd.DataFrame:
        at = frame.index[frame[column] > 0][0]
        frame.loc[at, column] = int(frame.loc[at, column]) + by
        return frame

    done.__name__ = f"{column}_{by:+d}"
    return done


def traded(frame: pd.DataFrame) -> pd.DataFrame:
    """Let a step call a captured token a dropped one: its sum stays."""
    at = frame.index[frame["captured_tokens"] > 0][0]
    frame.loc[at, "captured_tokens"] -= 1
    frame.loc[at, "dropped_tokens"] += 1
    return frame


@pytest.mark.parametrize(
    ("table", "change", "codes"),
    [
        ("tokens", dropped_row, {"E406", "E412"}),
        ("tokens", doubled_row, {"E406", "E412"}),
        ("tokens", later_row, {"E406"}),
        ("tokens", rows_that_change_requests, {"E406"}),
        ("tokens", rows_that_move_apart, {"E406"}),
        ("tokens", rows_that_change_steps, {"E412"}),
        ("spans", of("captured", moved), {"E404", "E406"}),
        ("spans", of("captured", without_the_last), {"E404", "E406"}),
        ("spans", of("dropped", moved), {"E404", "E408"}),
        ("spans", of("dropped", captured_instead), {"E406", "E408"}),
        ("spans", of("undelivered", without_the_last), {"E409"}),
        ("spans", of("undelivered", dropped_instead), {"E408", "E409"}),
        ("spans", of("cache_ref", moved), {"E404"}),
        ("spans", of("cache_ref", backwards), {"E404"}),
        ("drops", without_the_last, {"E408"}),
        ("drops", moved, {"E408"}),
        ("drops", of_another_request, {"E408"}),
        ("drops", of_another_step, {"E408"}),
        ("steps", counted("captured_tokens", 1), {"E409", "E412"}),
        ("steps", counted("dropped_tokens", -1), {"E408", "E409"}),
        ("steps", counted("undelivered_tokens", 1), {"E409"}),
        ("steps", counted("batch_tokens", 1), {"E409"}),
        ("steps", traded, {"E408", "E412"}),
        ("requests", counted("prompt_len", 1), {"E404"}),
        ("requests", without_the_last, {"E404"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_found(sound: Tables, table: str, change: Any, codes: set[str]) -> None:
    assert refused(changed(sound, table, change)) == codes


def test_a_finding_says_where_and_what(sound: Tables) -> None:
    request = sound["tokens"]["request"][17].as_py()
    found = audited(changed(sound, "tokens", dropped_row)).accounting.findings
    [finding] = [f for f in found if f.code == "E406"]
    assert finding.place == f"shards (run r-0) rows of request {request}"
    n = int(finding.got.split()[0])
    assert finding.expected.startswith(f"{n + 1}, ") and finding.severity == "error"


def test_a_table_that_is_gone_is_many_findings_but_not_all(sound: Tables) -> None:
    codes = refused({**sound, "tokens": sound["tokens"].slice(0, 0)})
    assert codes == {"E406", "E412"}
    found = audited({**sound, "tokens": sound["tokens"].slice(0, 0)}).accounting.findings
    assert len(found) == 40  # 20 a check


def test_positions_beyond_any_integer_are_findings_and_no_error(sound: Tables) -> None:
    def far(frame: pd.DataFrame) -> pd.DataFrame:
        frame.loc[frame.index[0], ["start", "stop"]] = [0, 2**32 - 1]
        return frame

    assert "E408" in refused(changed(sound, "drops", far))
    assert "E404" in refused(changed(sound, "spans", far))


def test_positions_that_no_step_computed_are_in_no_loss_rate(sound: Tables) -> None:
    """Clients that leave the queue owe a prompt that nobody computed."""
    n = 445
    first = int(sound["requests"]["request"].to_numpy().max()) + 1
    prompt = 10 + np.arange(n) % 7

    def requests(frame: pd.DataFrame) -> pd.DataFrame:
        more = frame.iloc[np.zeros(n, int)].assign(
            request=first + np.arange(n), prompt_len=prompt, generated_len=0, cached_tokens=0,
            finish_reason="abort", token_digest=None,
        )  # fmt: skip
        return pd.concat([frame, more.astype(frame.dtypes.to_dict())])

    def spans(frame: pd.DataFrame) -> pd.DataFrame:
        more = pd.DataFrame({"request": first + np.arange(n), "start": 0, "stop": prompt,
                             "disposition": "aborted", "reason": "client_abort", "step": None,
                             "ref_request": None, "inclusion": None})  # fmt: skip
        return pd.concat([frame, more[frame.columns]])

    before = audited(sound).accounting
    left = changed(changed(sound, "requests", requests), "spans", spans)
    found = audited(left)
    account, lines = found.accounting, left["spans"].to_pandas()
    assert account.findings == []
    lines["n"] = lines["stop"].astype(int) - lines["start"].astype(int)
    reached = lines[lines["step"].notna()].groupby("disposition")["n"].sum()
    lost = reached["dropped"]
    assert account.never_computed == prompt.sum() == lines["n"].sum() - before.positions
    assert account.never_computed_requests == n
    assert account.computed == lost + reached["captured"] == before.computed
    assert account.loss_share == lost / account.computed == before.loss_share
    assert (account.aborted, account.undelivered) == (0, reached["undelivered"])
    [step] = [w for w in account.waterfall if w.name == "never computed"]
    assert (step.reason, step.n_positions) == ("client_abort", account.never_computed)
    assert found.coverage is not None
    assert sum(c.lost for c in found.coverage.cells) == lost
    words = never_computed(account)
    assert f"Never computed: {prompt.sum():,} positions of 445 requests" in words
    assert f"{prompt.sum():,} never computed" in balance(account)


def test_positions_from_outside_are_a_column_of_their_own_and_in_no_share(sound: Tables) -> None:
    """Every other reference becomes one to KV that another engine computed."""

    def outside(frame: pd.DataFrame) -> pd.DataFrame:
        some = frame.index[::2]
        frame.loc[some, "reason"] = "external"
        frame.loc[some, "ref_request"] = None
        return frame

    given = changed(sound, "spans", of("cache_ref", outside))
    lines = given["spans"].to_pandas().query("reason == 'external'")
    prompt = dict(zip(*(sound["requests"][c].to_pylist() for c in ("request", "prompt_len")),
                      strict=True))  # fmt: skip
    wanted: Counter[tuple[str, int]] = Counter()
    for line in lines.itertuples():
        for position in range(line.start, line.stop):
            word = "prompt" if position < prompt[line.request] else "generated"
            wanted[word, 2 ** int(np.log2(position + 1)) - 1] += 1
    found, before = audited(given), audited(sound)
    assert found.accounting.findings == []
    assert found.accounting.external == wanted.total() > 0
    assert found.coverage is not None and before.coverage is not None
    cells = found.coverage.cells
    assert {(c.token_class, c.low): c.external for c in cells if c.external} == wanted
    n_reused = sum(c.reused for c in before.coverage.cells) - sum(c.reused for c in cells)
    assert n_reused == wanted.total()
    for cell in cells:
        n = cell.stored + cell.reused + cell.lost
        assert cell.stored_share == (pytest.approx(cell.stored / n) if n else None)
    picture = map_of(cells)
    assert picture is not None and "KV from outside" in [s.text for s in picture.shapes]
    plain = map_of(before.coverage.cells)
    assert plain is not None and "KV from outside" not in [s.text for s in plain.shapes]
