"""Section 7.11: which positions interventions changed, one by one."""

from __future__ import annotations

import re

from actds_testing.independent.conservation import Account
from actds_testing.independent.draw import fits, is_condition, text_of
from actds_testing.independent.findings import need
from actds_testing.independent.layout import Json, parse

FIELD = "capture.interventions"
NAME = re.compile(r"[A-Za-z0-9_.+-]{1,80}", re.ASCII)
DECIMAL = re.compile(r"-?\d{1,16}(\.\d{1,24})?(e-?\d{1,3})?", re.ASCII)
DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


def changes_of(record: Json | None, place: str) -> list[Json]:
    """Return the interventions of a run, none where it has no such field (E102, E103)."""
    field = (record or {"fields": {}})["fields"].get(FIELD)
    if field is None or field["value"] is None:
        return []
    need(isinstance(field["value"], str), "E103", place, "no text")
    changes = parse(field["value"].encode() + b"\n", place)
    need(isinstance(changes, list) and 1 <= len(changes) <= 4096, "E103", place, field["value"])
    need(all(_is_change(change) for change in changes), "E103", place, field["value"])
    need(len({change["name"] for change in changes}) == len(changes), "E103", place, "names")
    return list(changes)


def _is_change(change: object) -> bool:
    names = {"edits", "name", "part", "positions", "request"}
    if not isinstance(change, dict) or set(change) != names:
        return False
    positions, request, edits = (change[name] for name in ("positions", "request", "edits"))
    right = isinstance(change["name"], str) and NAME.fullmatch(change["name"]) is not None
    right = right and change["part"] in (None, "prompt", "generated")
    right = right and isinstance(positions, list) and len(positions) == 2
    right = right and type(positions[0]) is int and positions[0] >= 0
    after = positions[1] if right else None
    right = right and (after is None or (type(after) is int and after > positions[0]))
    if request is not None:
        right = right and isinstance(request, list) and len(request) > 0
        right = right and all(is_condition(pair) for pair in request)
    right = right and isinstance(edits, list) and len(edits) > 0
    right = right and all(_is_edit(edit) for edit in edits)
    return right and len({edit["hook"] for edit in edits}) == len(edits)


def _is_edit(edit: object) -> bool:
    if not isinstance(edit, dict) or set(edit) != {"hook", "op", "sha256", "strength"}:
        return False
    if not all(isinstance(text, str) for text in edit.values()) or not edit["hook"]:
        return False
    right = edit["op"] in ("add", "project", "clamp", "patch")
    right = right and DIGEST.fullmatch(edit["sha256"]) is not None
    right = right and DECIMAL.fullmatch(edit["strength"]) is not None
    return right and abs(float(edit["strength"])) != float("inf")


def judge_marks(account: Account, changes: list[Json]) -> None:
    """Note rows with another mark than the run record implies (E425)."""
    given = {line["request"]: line["n_given"] for line in account.table("origins")}
    for rows in account.rows.values():
        for row in rows:
            mark = _mark(account.requests.get(row["request"]), given, changes, row["position"])
            account.found.check(row["intervention"] == mark, "E425", row["shard"], row)


def _mark(request: Json | None, given: Json, changes: list[Json], position: int) -> int:
    if request is None:
        return 0
    n = given.get(request["request"], request["prompt_len"])
    for number, change in enumerate(changes, 1):
        texts = [(text_of(request, name), pattern) for name, pattern in change["request"] or []]
        if any(text is None or not fits(text, pattern) for text, pattern in texts):
            continue
        if change["part"] is not None and (position < n) != (change["part"] == "prompt"):
            continue
        first, last = change["positions"]
        place = position - n if change["part"] == "generated" else position
        if place >= first and (last is None or place < last):
            return number
    return 0
