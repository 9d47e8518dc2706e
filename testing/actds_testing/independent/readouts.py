"""Sections 6.3, 7.8 and 7.9: tables that name positions and rows of the others."""

from __future__ import annotations

import hashlib
import io
import math
from collections import Counter
from collections.abc import Set
from typing import Any

import numpy as np

from actds_testing.independent.arrays import Bits
from actds_testing.independent.conservation import Account
from actds_testing.independent.documents import (
    COUNT,
    DATASET,
    DIGEST,
    document,
    either,
    map_of,
    null,
)
from actds_testing.independent.findings import Breach, need
from actds_testing.independent.layout import Folder, Json, is_segment, parse, sha256
from actds_testing.independent.tables import UNSERVED

SETTINGS = document(
    n_probes=COUNT, n_projections=COUNT, probes_sha256=either(DIGEST, null), seed=COUNT
)
ORIGIN = document(
    source_dataset=DATASET,
    source_seal=DIGEST,
    source_run=is_segment,
    source_request=COUNT,
)
LABELS = map_of(
    lambda name: 0 < len(name) <= 256,
    lambda value: isinstance(value, int) or (isinstance(value, str) and len(value) <= 256),
)
TOLERANCE = 1e-4
Floats = np.ndarray[Any, Any]


def judge_roles(account: Account) -> None:  # 6.3
    """Note role lines without a position (E420)."""
    place, ends = f"census/{account.run}/roles", dict[int, int]()
    for line in sorted(account.table("roles"), key=lambda line: (line["request"], line["start"])):
        spans = account.spans.get(line["request"], [])
        stop = max((span["stop"] for span in spans), default=0)
        fits = ends.get(line["request"], 0) <= line["start"] < line["stop"] <= stop
        account.found.check(fits, "E420", place, line)
        ends[line["request"]] = line["stop"]


def judge_labels(account: Account) -> None:  # 6.3
    """Note labels that are not canonical (E102) or of another form (E103)."""
    place = f"census/{account.run}/requests labels"
    for said in {line["labels"] for line in account.table("requests")} - {None}:
        try:
            labels = parse(said.encode() + b"\n", place)
            need(LABELS(labels) and 0 < len(labels) <= 32, "E103", place, said[:200])
        except Breach as breach:
            account.found.all.append(breach.finding)


def judge_origins(account: Account) -> None:  # 6.3
    """Note names that are none (E103), and origins of no request or a second one (E422)."""
    place, seen = f"census/{account.run}/origins", set[int]()
    for line in account.table("origins"):
        named = ORIGIN({name: line[name] for name in line if name.startswith("source_")})
        account.found.check(named, "E103", place, line)
        request = account.requests.get(line["request"])
        fits = request is not None and line["request"] not in seen
        if request is not None and request["finish_reason"] not in UNSERVED:
            fits &= line["n_given"] <= request["prompt_len"]
        account.found.check(fits, "E422", place, line)
        seen.add(line["request"])


def judge_sampled(
    account: Account, said: object, rules: object, *, cut: bool, redacted: Set[int]
) -> None:  # 6.3
    """Note what is wrong with the lines of sampled tokens, or with their number (E423).

    Args:
        said: value of ``capture.entropy``.
        rules: value of ``capture.sampling``.
        cut: whether a process of the run did not end in order.
        redacted: requests that owe no line.
    """
    place, found, lines = f"census/{account.run}/sampled", account.found, account.table("sampled")
    is_one = said is None or isinstance(said, bool)  # 1 is True in Python
    found.check(is_one, "E103", f"runs/{account.run}.json", f"entropy {said}")
    if said is not True:
        found.check(not lines, "E423", place, "of a run that has none")
        return
    seen = set[tuple[int, int]]()
    for line in lines:
        request, key = account.requests.get(line["request"]), (line["request"], line["position"])
        fits = request is not None and key not in seen and line["step"] in account.steps
        if request is not None:
            after = line["position"] - request["prompt_len"]
            fits &= 0 <= after < request["generated_len"]
        numbers = (line["entropy"], -line["logprob"], line["margin"])
        fits &= all(math.isfinite(number) and number >= 0 for number in numbers)
        row = account.row.get(key)
        fits &= row is None or row["token_id"] == line["token_id"]
        found.check(fits, "E423", place, line)
        seen.add(key)
    for request in account.requests.values():
        if request["finish_reason"] == "unfinished" or request["request"] in redacted:
            continue
        first = request["prompt_len"]
        n = sum((request["request"], first + i) in seen for i in range(request["generated_len"]))
        spans = account.spans[request["request"]]
        ruled = rules not in (None, "all") or any(s["disposition"] == "filtered" for s in spans)
        if n < request["generated_len"] and (n or not ruled):
            words = f"request {request['request']} has {n} of {request['generated_len']} lines"
            found.add("E423", place, words, "warning" if cut else "error")


def judge_canary(account: Account, hooks: dict[str, Json]) -> None:  # 7.9
    """Note replays of rows that are not there (E414) or are of another request (E418)."""
    place = f"canary/{account.run}"
    for line in account.table("canary"):
        key = (line["request"], line["position"])
        span = account.owner.get(key)
        kind = span["disposition"] if span else None
        stored = kind == "captured" or (kind == "cache_ref" and span["ref_request"] is not None)
        account.found.check(stored and line["hook"] in hooks, "E414", place, line)
        known = line["verdict"] in ("same", "diverged", "foreign")
        account.found.check(known, "E414", place, f"verdict {line['verdict']}")
        account.found.check(line["verdict"] != "foreign", "E418", place, line)


def settings(record: Json, place: str) -> Json | None:
    """Return what the run record says of readouts, None without (7.8)."""
    value = record["fields"]["capture.readouts"]["value"]
    if value is None or value == "none":
        return None
    need(isinstance(value, str), "E103", place, "capture.readouts is no text")
    said = parse(value.encode() + b"\n", place)
    need(SETTINGS(said), "E103", place, f"capture.readouts is {value}")
    need((said["probes_sha256"] is None) == (said["n_probes"] == 0), "E103", place, value)
    return dict(said)


def judge_readouts(
    account: Account, said: Json, hooks_of: dict[str, list[str]], redacted: Set[int]
) -> None:
    """Hold the lines against rows, drops and tokens: E416, E417.

    Args:
        account: the run, settled.
        said: the settings.
        hooks_of: hooks by shard; the empty name has all of the genesis.
        redacted: requests that owe no line.
    """
    place, found = f"readouts/{account.run}", account.found
    lines: Counter[tuple[int, int, int, str]] = Counter()
    ids = {key: row["token_id"] for key, row in account.row.items()}
    stored = dict(ids)
    for line in account.table("readouts"):
        key = (line["request"], line["position"])
        lines[(*key, line["step"], line["hook"])] += 1
        computed = line["position"] < account.computed(line["request"])
        known = computed and line["step"] in account.steps and line["hook"] in hooks_of[""]
        found.check(known, "E416", place, line)
        same = line["token_id"] == ids.setdefault(key, line["token_id"])
        found.check(same, "E417", f"{place} {line['hook']} request {key[0]}", line)
        lengths = (len(line["projections"]), len(line["probes"]))
        whole = lengths == (said["n_projections"], said["n_probes"])
        found.check(whole, "E416", place, f"{lengths} numbers in {line}")
    for name, count in lines.items():
        found.check(count == 1, "E416", place, f"{name} {count} times")
    wanted = [
        (row["request"], row["position"], row["step"], hook)
        for hook, rows in account.rows.items()
        for row in rows
    ]
    for drop in (drop for drop in account.table("drops") if drop["request"] not in redacted):
        for position in range(drop["start"], drop["stop"]):
            for hook in hooks_of[""]:
                name = (drop["request"], position, drop["step"], hook)
                if drop["drop_reason"] == "readouts_full":
                    found.check(name not in lines, "E416", place, f"{name} has a line")
                elif drop["drop_reason"] != "failed_load":
                    wanted.append(name)
    for name in wanted:
        found.check(name in lines, "E416", place, f"{name} has no line")
    for request in account.requests.values():
        number, digest = request["request"], account.digest(request, ids)
        from_rows = account.digest(request, stored) is not None  # judged there, E414
        same = digest in (None, request["token_digest"]) or request["token_digest"] is None
        found.check(same or from_rows, "E417", f"{place} request {number}", "token ids")


def read_probes(folder: Folder, run: str, said: Json, hooks: list[Json]) -> Floats | None:
    """Return the user's probes ``(n_hooks, n_probes, d_model)``, None without (E104, E202)."""
    if said["probes_sha256"] is None:
        return None
    path = f"readouts/{run}/probes.npy"
    nbytes = 128 + 4 * len(hooks) * said["n_probes"] * hooks[0]["d_model"]
    need(len({hook["d_model"] for hook in hooks}) == 1, "E103", path, "hooks of several widths")
    folder.reach(path, nbytes)
    data = folder.read(path)
    need(sha256(data) == said["probes_sha256"], "E202", path, "another digest")
    shape = (len(hooks), said["n_probes"], hooks[0]["d_model"])
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    try:
        probes = np.load(io.BytesIO(data), allow_pickle=False)
    except ValueError as error:
        raise Breach("E206", path, error) from None
    fits = data[6:8] == b"\1\0" and probes.shape == shape and probes.dtype == header["descr"]
    need(bool(fits), "E206", path, f"{probes.dtype} {probes.shape}")
    return np.asarray(probes)


def directions(said: Json, d: int) -> Floats:
    """Return the random directions ``(n_projections, d)``."""
    k, text = said["n_projections"], f"actds projections {said['seed']} {d}"
    stream = hashlib.shake_256(text.encode("ascii")).digest(-(-k * d // 8))
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), bitorder="little")[: k * d]
    return (1.0 - 2.0 * bits.reshape(k, d)) / math.sqrt(d)


def compare(
    account: Account, said: Json, hook: Json, rows: list[Json], bits: Bits, probes: Floats | None
) -> None:
    """Hold readouts against those of the stored rows, within 1e-4 of norms (E417)."""
    place = rows[0]["shard"] if rows else "shards"
    lines = {
        (line["request"], line["position"], line["step"]): line
        for line in account.table("readouts")
        if line["hook"] == hook["name"]
    }
    random = directions(said, hook["d_model"])
    for row, x in zip(rows, values(bits, hook["dtype"]), strict=True):
        line = lines.get((row["request"], row["position"], row["step"]))
        norm = float(np.linalg.norm(x))
        if line is None or not np.isfinite(x).all() or norm > np.finfo(np.float32).max:
            continue
        lost = hook["d_model"] * 2.0**-126
        pairs = [(line["norm"], norm, norm + math.sqrt(lost) / TOLERANCE)]
        for name, matrix in (("projections", random), ("probes", probes)):
            if matrix is not None and len(line[name]) == len(matrix):
                sizes = np.linalg.norm(matrix.astype(np.float64), axis=1)
                sizes = sizes * norm + lost * (1 + sizes) / TOLERANCE
                pairs += zip(line[name], matrix.astype(np.float64) @ x, sizes, strict=True)
        near = all(abs(told - true) <= TOLERANCE * size for told, true, size in pairs)
        account.found.check(near, "E417", place, f"{hook['name']}: {row}")


def values(bits: Bits, dtype: str) -> Floats:
    """Return the values of rows in float64."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(np.float16 if dtype == "float16" else np.float32).astype(np.float64)
