"""Section 7.10: which positions are drawn, recomputed one by one with Python's integers."""

from __future__ import annotations

import json
import re
from collections.abc import Set

from actds_testing.independent.conservation import Account, keys
from actds_testing.independent.findings import need
from actds_testing.independent.layout import Json, parse
from actds_testing.independent.tables import WORDS

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
    need(is_share(said["minimum"]), "E103", place, field["value"])
    minimum = float(said["minimum"])
    keep = said["keep"]
    need(isinstance(keep, list) and len(keep) <= 64, "E103", place, field["value"])
    for rule in keep:
        need(_is_rule(rule), "E103", place, rule)
    return {"salt": int(said["salt"], 16), "minimum": minimum, "unit": said["unit"], "keep": keep}


DECIMAL = re.compile(r"\d{1,16}(\.\d{1,24})?(e-?\d{1,3})?", re.ASCII)


def _is_decimal(text: object) -> bool:
    return isinstance(text, str) and DECIMAL.fullmatch(text) is not None


def is_share(text: object) -> bool:
    return _is_decimal(text) and 0 < float(str(text)) <= 1


def _is_rule(rule: object) -> bool:
    names = {"entropy", "phase", "position", "probe", "request", "role", "share"}
    if not isinstance(rule, dict) or set(rule) != names or not is_share(rule["share"]):
        return False
    fits = rule["phase"] in (None, "prefill", "decode") and rule["role"] in (None, *WORDS["role"])
    place, bounds, request = (rule[name] for name in ("position", "entropy", "request"))
    if place is not None:
        fits &= isinstance(place, list) and len(place) == 2
        fits = fits and type(place[0]) is int and place[0] >= 0
        fits = fits and (place[1] is None or type(place[1]) is int)
    probe = rule["probe"]
    if probe is not None:
        fits = fits and isinstance(probe, list) and len(probe) == 4
        fits = fits and isinstance(probe[0], str) and type(probe[1]) is int and probe[1] >= 0
        texts = [bound for bound in probe[2:] if bound is not None] if fits else []
        fits = fits and all(isinstance(text, str) for text in texts)
        fits = fits and all(_is_decimal(text.removeprefix("-")) for text in texts)
    if bounds is not None:
        fits = fits and isinstance(bounds, list) and len(bounds) == 2
        fits = fits and all(bound is None or _is_decimal(bound) for bound in bounds)
    if request is not None:
        fits = fits and isinstance(request, list) and len(request) > 0
        fits = fits and all(is_condition(pair) for pair in request)
    return fits


def is_condition(pair: object) -> bool:
    if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
        return False
    column, _, name = pair[0].partition(".")
    named = bool(name) if column in ("labels", "xargs") else pair[0] == "external_id"
    return named and max(map(len, pair)) <= 512


def judge_draw(account: Account, design: Json | None, *, read: bool, redacted: Set[int]) -> None:
    """Note what the draw does not imply (E424), and readouts that are missing (E416).

    Args:
        account: the run, settled.
        design: as ``design_of`` returns it.
        redacted: requests whose shares are not known any more.
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
        if share is not None and span["request"] not in redacted:
            known &= share == _share(account, design, span["request"], span["step"])
            for key in keys(span):
                inclusion = _inclusion(account, design, *key, span["step"])
                known &= inclusion is not None and _number(design, *key) >= inclusion
        found.check(known, "E424", place, span)
    if read:
        lines = {(line["request"], line["position"]) for line in account.table("readouts")}
        for span in spans:
            if span["disposition"] == "thinned" and span["request"] not in redacted:
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
    role = "" if is_prompt else "assistant"
    asks = is_prompt and any(rule["role"] for rule in design["keep"])
    for part in account.table("roles") if asks else []:
        if part["request"] == request and part["start"] <= position < part["stop"]:
            role = part["role"]
    of_token: Json | None = None
    if any(rule["entropy"] or rule["probe"] for rule in design["keep"]):
        for sampled in reversed(account.table("sampled")):
            if (sampled["request"], sampled["position"]) == (request, position):
                of_token = sampled
    probes: list[object] = []
    for rule in design["keep"]:
        if rule["probe"] and rule["probe"][:2] not in probes:
            probes.append(rule["probe"][:2])
    for rule in design["keep"]:
        holds = rule["phase"] in (None, "prefill" if is_prompt else "decode")
        if rule["position"] is not None:
            first, last = rule["position"]
            holds &= position >= first and (last is None or position < last)
        for name in ("entropy", "probe"):
            if rule[name] is None:
                continue
            low, high = (None if bound is None else float(bound) for bound in rule[name][-2:])
            value = None
            if of_token is not None and name == "entropy":
                value = of_token["entropy"]
            elif of_token is not None:
                place = probes.index(rule["probe"][:2])
                value = dict(enumerate(of_token["scores"])).get(place)
            holds = holds and value is not None
            holds = holds and (low is None or value >= low) and (high is None or value < high)
        holds = holds and rule["role"] in (None, role)
        for name, pattern in rule["request"] or []:
            text = None if line is None else text_of(line, name)
            holds = holds and text is not None and fits(text, pattern)
        if holds:
            return share * float(rule["share"])
    return share


def text_of(request: Json, name: str) -> str | None:
    """Return what a rule asks of a request, as text."""
    column, _, key = name.partition(".")
    if column == "external_id":
        return str(request[column])
    try:
        members = json.loads(request["labels" if column == "labels" else "sampling"] or "{}")
        value = (members if column == "labels" else members["extra_args"])[key]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int) else None


def fits(text: str, pattern: str) -> bool:
    """Return whether a text fits a pattern, by the lengths of its beginnings that do so far."""
    lengths = {0}
    for letter in pattern:
        if letter == "*":
            lengths = set(range(min(lengths), len(text) + 1)) if lengths else lengths
        else:
            lengths = {n + 1 for n in lengths if n < len(text) and letter in ("?", text[n])}
    return len(text) in lengths


def _share(account: Account, design: Json, request: int, step: int | None) -> float | None:
    if design["unit"] == "request":
        steps = [span["step"] for span in account.spans.get(request, [])]
        step = min((number for number in steps if number is not None), default=None)
    line = account.steps.get(-1 if step is None else step)
    return None if line is None else line["inclusion"]
