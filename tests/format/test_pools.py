"""Means by turn and by request are those of the rows that each request was served."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds_testing.schedules import simulate, table_of
from actds_testing.synthetic import make_dataset, make_thinned

pytestmark = pytest.mark.fast
HOOK, KEYS = "resid_post.0", ("request", "turn", "role")
CUTS = ((0, 1, "template"), (1, 3, "system"), (3, 6, "user"), (6, 7, "template"), (7, 8, "user"),
        (8, 12, "assistant"), (12, 13, "template"), (13, 16, "user"))  # fmt: skip
"""Of every prompt, as far as it goes: of the second user message the first turn has a part."""


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> actds.Dataset:
    """Return chats of two turns, with prefix hits, losses, and a conversation for each two."""
    schedule = simulate(20, 3, drops=True)
    lines: list[dict[str, Any]] = []
    requests = schedule.requests.to_pylist()
    for request in requests:
        n = request["prompt_len"]
        parts = [(start, min(stop, n), role) for start, stop, role in CUTS if start < n]
        parts.append((n, n + request["generated_len"] - 1, "assistant"))
        lines += [
            {"request": request["request"], "start": start, "stop": stop, "role": role}
            for start, stop, role in parts
            if start < stop
        ]
        request["conversation"] = f"{request['request'] // 2:032x}"
    path = make_dataset(
        tmp_path_factory.mktemp("pools") / "chats",
        schedule=schedule.with_(requests=table_of("requests", requests)),
        roles=table_of("roles", lines),
    )
    return actds.open(path)


def turns(line_roles: np.ndarray) -> np.ndarray:
    """Return the turn of each position of a request, by walking over it."""
    turn, before, found = -1, "", []
    for role in line_roles:
        if role != "template":
            turn += role == "user" and before != "user"
            before = role
        found.append(turn)
    return np.array(found)


def by_walking(
    dataset: actds.Dataset, by: str, *, history: bool, kept: np.ndarray
) -> dict[tuple[Any, ...], tuple[int, int, np.ndarray]]:
    """Return positions, rows and mean of each group, request by request."""
    found: dict[tuple[Any, ...], tuple[int, int, np.ndarray]] = {}
    for line in dataset.requests().to_pylist():
        rows = dataset.request(line["request"], hook=HOOK)
        roles = rows.role[: line["prompt_len"] + max(line["generated_len"], 1) - 1]
        turn, groups = turns(roles), defaultdict(list)
        for position, role in enumerate(roles):
            if by == "request":
                groups[line["request"], None, None].append(position)
            elif role not in ("", "template") and (history or turn[position] == turn.max()):
                at = int(turn[position])
                groups[line["request"], at if at >= 0 else None, str(role)].append(position)
        for key, positions in groups.items():
            at = rows.row[positions]
            at = at[at >= 0]
            at = at[kept[at]]
            if len(at):
                mean = dataset.array(HOOK)[at].astype(np.float64).mean(0)
                found[key] = len(positions), len(at), mean
    return found


@pytest.mark.parametrize("by", ["turn", "request"])
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("where", [None, "position >= 4"])
def test_means_are_those_of_the_rows_of_each_request(
    chats: actds.Dataset, by: Any, history: bool, where: str | None
) -> None:
    kept = chats.tokens(HOOK)["position"].to_numpy() >= (4 if where else 0)
    wanted = by_walking(chats, by, history=history, kept=kept)
    pooled = actds.pool(chats, HOOK, by, history=history, where=where)
    keys = zip(*(pooled.table[name].to_pylist() for name in KEYS), strict=True)
    got = {key: number for number, key in enumerate(keys)}
    assert got.keys() == wanted.keys()
    assert len({key[1] for key in wanted}) == (1 if by == "request" else 3)
    assert any(n_rows < n for n, n_rows, _ in wanted.values())
    for key, (n, n_rows, mean) in wanted.items():
        line = pooled.table.slice(got[key], 1).to_pylist()[0]
        assert (line["positions"], line["rows"]) == (n, n_rows)
        assert line["conversation"] == f"{key[0] // 2:032x}"
        assert np.allclose(pooled.acts[got[key]], mean, atol=1e-5)


def test_a_served_prefix_counts_for_each_who_was_served(chats: actds.Dataset) -> None:
    hits = chats.spans().to_pylist()
    served = {line["request"] for line in hits if line["ref_request"] is not None}
    assert served
    rows = actds.pool(chats, HOOK, "request").table
    n = dict(zip(rows["request"].to_pylist(), rows["rows"].to_pylist(), strict=True))
    own = chats.tokens(HOOK)["request"].to_pylist()
    assert all(n[request] > own.count(request) for request in served)


def test_a_conversation_is_on_one_side_of_a_split(chats: actds.Dataset) -> None:
    sides = [actds.pool(chats, HOOK, split=side, held_out=0.4) for side in ("train", "held_out")]
    first, second = (set(side.table["conversation"].to_pylist()) for side in sides)
    assert first and second and not first & second
    assert sum(map(len, sides)) == len(actds.pool(chats, HOOK))
    how = {"split": "held_out", "held_out": 0.4, "batch": 1, "provenance": True}
    with actds.Loader(chats, HOOK, **how) as some:  # type: ignore[arg-type]
        read = {int(request) for _, rows in some for request in rows["request"]}
    assert {f"{request // 2:032x}" for request in read} <= second


def test_drawn_rows_count_by_their_inclusion(tmp_path: Path) -> None:
    schedule = simulate(12, 0)
    shares = {step: (1.0, 0.25)[step % 2] for step in schedule.steps["step"].to_pylist()}
    dataset = actds.open(make_thinned(tmp_path / "thin", schedule, shares))
    pooled = actds.pool(dataset, HOOK, "request")
    share = np.concatenate(dataset.inclusion(dataset.shards_of(HOOK)) or [])
    request = dataset.tokens(HOOK)["request"].to_numpy()
    assert len(np.unique(share)) > 1
    rows = dataset.array(HOOK)[:]
    for line, mean in zip(pooled.table.to_pylist(), pooled.acts, strict=True):
        some = request == line["request"]
        if line["rows"] == some.sum():  # of the others some rows are those of a prefix
            assert np.allclose(mean, np.average(rows[some], 0, 1 / share[some]), atol=1e-5)


def test_what_cannot_be_pooled_is_refused(chats: actds.Dataset, dataset_path: Path) -> None:
    for source, options in (
        (chats, {"by": "message"}),
        (chats, {"split": "train"}),
        (chats, {"where": "position > 9999"}),
        (dataset_path, {}),  # prompts that are texts
    ):
        with pytest.raises(ActdsError, match="E014"):
            actds.pool(source, HOOK, **options)  # type: ignore[arg-type]
    with pytest.raises(ActdsError, match="E014"):
        actds.pool(chats, "resid_post.9")
