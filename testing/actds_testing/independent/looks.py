"""Sections 7.12 and 7.13: alerts and attention, line by line."""

from __future__ import annotations

import math
from collections import defaultdict

from actds_testing.independent.conservation import Account
from actds_testing.independent.documents import COUNT, DIGEST, document, integer
from actds_testing.independent.draw import is_share, number
from actds_testing.independent.findings import need
from actds_testing.independent.layout import Folder, Json, parse, sha256

PROFILE = document(nbytes=integer(1, 1 << 24), sha256=DIGEST)
SLACK = 1e-3


def _said(record: Json | None, name: str, run: str) -> tuple[Json | None, str]:
    place = f"runs/{run}.json capture.{name}"
    field = (record or {"fields": {}})["fields"].get(f"capture.{name}")
    if field is None or field["value"] is None:
        return None, place
    need(isinstance(field["value"], str), "E103", place, "no text")
    said = parse(field["value"].encode() + b"\n", place)
    need(isinstance(said, dict), "E103", place, said)
    return dict(said), place


def _is_computed(account: Account, line: Json) -> bool:
    computed = line["position"] < account.computed(line["request"])
    return computed and line["step"] in account.steps


def judge_alerts(
    account: Account, folder: Folder, record: Json | None, hooks: dict[str, Json]
) -> None:
    """Note lines that are of no alert of the run (E426)."""
    place, lines = f"readouts/{account.run}/alerts", account.table("alerts")
    said, where = _said(record, "profile", account.run)
    if said is not None:
        need(PROFILE(said), "E103", where, said)
        path = f"readouts/{account.run}/profile.json"
        folder.reach(path, said["nbytes"])
        need(sha256(folder.read(path)) == said["sha256"], "E202", path, "another digest")
    account.found.check(said is not None or not lines, "E426", place, "of a run without a profile")
    before: dict[int, tuple[int, float]] = defaultdict(lambda: (-1, 0.0))
    for line in sorted(lines, key=lambda line: (line["request"], line["position"])):
        fits = _is_computed(account, line) and line["hook"] in hooks
        fits &= line["kind"] in ("drift", "opening") and math.isfinite(line["score"])
        position, score = before[line["request"]]
        fits &= line["position"] > position and line["score"] > score
        before[line["request"]] = line["position"], line["score"]
        account.found.check(fits or said is None, "E426", place, line)


def judge_attention(account: Account, record: Json | None) -> None:
    """Note lines that are of no step that was looked at, or say what none can (E426)."""
    place, lines = f"readouts/{account.run}/attention", account.table("attention")
    said, where = _said(record, "attention", account.run)
    if said is None:
        account.found.check(not lines, "E426", place, "of a run that looked at none")
        return
    need(set(said) == {"every", "layers", "salt", "share"}, "E103", where, said)
    layers, salt = said["layers"], said["salt"]
    right = isinstance(layers, list) and bool(layers) and all(COUNT(n) for n in layers)
    right = right and layers == sorted(set(layers)) and layers[-1] < 1 << 16
    right = right and COUNT(said["every"]) and said["every"] > 0 and is_share(said["share"])
    right = right and isinstance(salt, str) and len(salt) == 16
    right = right and not set(salt) - set("0123456789abcdef")
    need(right, "E103", where, said)
    seen = set[tuple[int, ...]]()
    for line in lines:
        request = account.requests.get(line["request"])
        depth = line["position"] - (request["prompt_len"] if request else 0)
        fits = request is not None and _is_computed(account, line) and line["layer"] in layers
        fits &= depth >= 0 and depth % said["every"] == 0
        fits &= number(int(salt, 16), line["request"], 0) < float(said["share"])
        key = tuple(line[name] for name in ("request", "position", "layer", "head"))
        fits &= key not in seen and _is_attention(line)
        seen.add(key)
        account.found.check(fits, "E426", place, line)


def _is_attention(line: Json) -> bool:
    shares = [line[name] for name in ("first", "prompt", "generated", "sinks")]
    fits = all(0 <= share <= 1 + SLACK for share in shares) and abs(sum(shares) - 1) <= SLACK
    fits &= 1 <= line["keys"] <= line["position"] + 1
    fits = fits and 0 <= line["entropy"] <= math.log2(line["keys"] + 1) + SLACK
    roles = line["roles"]
    fits &= len(roles) in (0, 6) and all(share >= 0 for share in roles)
    fits &= sum(roles) <= line["prompt"] + SLACK
    top, of_top = line["top"], line["shares"]
    fits &= 0 < len(top) == len(of_top) == len(set(top)) <= 8 and max(top) <= line["position"]
    fits &= of_top == sorted(of_top, reverse=True) and all(share >= 0 for share in of_top)
    return bool(fits and sum(of_top) <= 1 + SLACK)
