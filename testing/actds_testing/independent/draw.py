"""Section 7.10: which positions are drawn, recomputed one by one with Python's integers."""

from __future__ import annotations

from actds_testing.independent.conservation import Account, keys
from actds_testing.independent.findings import need
from actds_testing.independent.layout import Json, parse

MASK = 2**64 - 1


def mix(x: int) -> int:  # 9.11
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def number(salt: int, request: int, position: int) -> float:
    return float(mix(mix((request << 32) + position) ^ salt) >> 11) * 2.0**-53


def design_of(record: Json | None, place: str) -> Json | None:
    """Return the design of a run, None for one that stores every row (E102, E103)."""
    field = (record or {"fields": {}})["fields"].get("capture.inclusion")
    if field is None or field["value"] is None:
        return None
    need(isinstance(field["value"], str), "E103", place, "no text")
    said = parse(field["value"].encode() + b"\n", place)
    fits = isinstance(said, dict) and set(said) == {"keep", "minimum", "salt", "unit"}
    need(fits, "E103", place, field["value"])
    right = isinstance(said["salt"], str) and len(said["salt"]) == 16
    right = right and not set(said["salt"]) - set("0123456789abcdef")
    need(right and said["unit"] in ("row", "request"), "E103", place, field["value"])
    try:
        minimum = float(said["minimum"]) if isinstance(said["minimum"], str) else 0.0
    except ValueError:
        minimum = 0.0
    need(0 < minimum <= 1, "E103", place, field["value"])
    keep = said["keep"]
    for rule in keep if isinstance(keep, list) else [None]:
        names = {"entropy", "phase", "position", "share"}
        need(isinstance(rule, dict) and set(rule) == names, "E103", place, field["value"])
        phases = (None, "prefill", "decode")
        need(rule["phase"] in phases and 0 < float(rule["share"]) <= 1, "E103", place, rule)
    return {"salt": int(said["salt"], 16), "minimum": minimum, "unit": said["unit"], "keep": keep}


def judge_draw(account: Account, design: Json | None, *, read: bool) -> None:
    """Note what the draw does not imply (E424), and readouts that are missing (E416).

    Args:
        account: the run, settled.
        design: as ``design_of`` returns it.
        read: whether the run has readouts, and every chain of it closed as finished.
    """
    place, found = account.place("spans"), account.found
    spans = [span for of_request in account.spans.values() for span in of_request]
    rows = [row for of_hook in account.rows.values() for row in of_hook]
    if design is None:
        lines = [*account.steps.values(), *spans, *rows]
        found.check(all(line["inclusion"] is None for line in lines), "E424", place, "a draw")
        found.check(all(s["disposition"] != "thinned" for s in spans), "E424", place, "thinned")
        return
    for step in account.steps.values():
        share = step["inclusion"]
        fits = share is None or design["minimum"] <= share <= 1
        found.check(fits, "E424", account.place("steps"), step["step"])
    for row in rows:
        share = _inclusion(account, design, row["request"], row["position"], row["step"])
        drawn = share is not None and _number(design, row["request"], row["position"]) < share
        found.check(row["inclusion"] == share and drawn, "E424", row["shard"], row)
    for span in spans:
        kind, share = span["disposition"], span["inclusion"]
        known = share is not None if kind == "thinned" else share is None or kind == "dropped"
        if share is not None:
            known &= share == _share(account, design, span["request"], span["step"])
            for key in keys(span):
                inclusion = _inclusion(account, design, *key, span["step"])
                known &= inclusion is not None and _number(design, *key) >= inclusion
        found.check(known, "E424", place, span)
    if read:
        lines = {(line["request"], line["position"]) for line in account.table("readouts")}
        for span in spans:
            if span["disposition"] == "thinned":
                missing = [key for key in keys(span) if key not in lines]
                words = f"{missing} have no line"
                found.check(not missing, "E416", f"readouts/{account.run}", words)


def _number(design: Json, request: int, position: int) -> float:
    return number(design["salt"], request, 0 if design["unit"] == "request" else position)


def _inclusion(
    account: Account, design: Json, request: int, position: int, step: int | None
) -> float | None:
    """Return the inclusion of a row: that of its step times the share of the rules."""
    share = _share(account, design, request, step)
    if share is None:
        return None
    line = account.requests.get(request)
    is_prompt = line is not None and position < line["prompt_len"]
    entropy = None
    if any(rule["entropy"] for rule in design["keep"]):
        of_position = [
            sampled["entropy"]
            for sampled in account.table("sampled")
            if (sampled["request"], sampled["position"]) == (request, position)
        ]
        entropy = of_position[0] if of_position else None
    for rule in design["keep"]:
        holds = rule["phase"] in (None, "prefill" if is_prompt else "decode")
        if rule["position"] is not None:
            first, last = rule["position"]
            holds &= position >= first and (last is None or position < last)
        if rule["entropy"] is not None:
            low, high = (None if bound is None else float(bound) for bound in rule["entropy"])
            holds &= entropy is not None
            holds = holds and (low is None or entropy >= low) and (high is None or entropy < high)
        if holds:
            return share * float(rule["share"])
    return share


def _share(account: Account, design: Json, request: int, step: int | None) -> float | None:
    if design["unit"] == "request":
        steps = [span["step"] for span in account.spans.get(request, [])]
        step = min((number for number in steps if number is not None), default=None)
    line = account.steps.get(-1 if step is None else step)
    return None if line is None else line["inclusion"]
