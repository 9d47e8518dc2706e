"""Section 7: what a request owes, spans, and the identities between the witnesses.

Positions are kept one by one, in dictionaries: for small datasets only.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from actds_testing.independent.findings import Findings
from actds_testing.independent.layout import Json
from actds_testing.independent.tables import UNSERVED

Key = tuple[int, int]
"""Request and position."""
COMPUTED = ("captured", "dropped", "aborted", "filtered", "undelivered", "thinned")
SCHEDULED = (*COMPUTED, "recomputed", "rejected")


@dataclass
class Account:
    """The tables of a run, and what section 7 makes of them.

    ``rows`` are the rows of each hook: lines of the token tables with the ``shard`` they are in.
    """

    run: str
    tables: dict[str, list[Json]]
    rows: dict[str, list[Json]]
    found: Findings
    requests: dict[int, Json] = field(default_factory=dict)
    spans: dict[int, list[Json]] = field(default_factory=dict)
    steps: dict[int, Json] = field(default_factory=dict)
    owner: dict[Key, Json] = field(default_factory=dict)
    """The span of each position."""
    row: dict[Key, Json] = field(default_factory=dict)
    """A row of each position that has one."""
    totals: Counter[str] = field(default_factory=Counter)
    served: Counter[Key] = field(default_factory=Counter)
    """References to each row."""

    def place(self, table: str) -> str:
        return f"{ {'drops': 'losses'}.get(table, 'census') }/{self.run}/{table}"

    def table(self, name: str) -> list[Json]:
        return self.tables.get(name, [])

    def settle(self) -> None:
        """Compare everything with everything else; what differs is in ``found``."""
        self._index()
        for spans in self.spans.values():
            for span in spans:
                self._judge_span(span)
        for request in self.requests.values():
            self._judge_request(request)
        for hook, rows in self.rows.items():
            self._judge_rows(hook, rows)
        self._judge_drops()
        self._judge_steps()
        self._judge_references()
        for hook, rows in self.rows.items():
            ids = {(row["request"], row["position"]): row["token_id"] for row in rows}
            for request in self.requests.values():
                self._judge_tokens(hook, ids, request)
        self._count()

    def _index(self) -> None:
        for request in self.table("requests"):
            twice = request["request"] in self.requests
            self.found.check(not twice, "E405", self.place("requests"), f"{request['request']}")
            self.requests[request["request"]] = request
        whole = sorted(self.requests) == list(range(len(self.requests)))
        self.found.check(whole, "E404", self.place("requests"), "a number is left out")
        for step in self.table("steps"):
            twice = step["step"] in self.steps
            self.found.check(not twice, "E412", self.place("steps"), f"step {step['step']} twice")
            self.steps[step["step"]] = step
        whole = self.requests.keys() == set(range(len(self.requests)))
        self.found.check(whole, "E404", self.place("requests"), "numbers with a gap")
        self.spans = {number: [] for number in self.requests}
        for span in self.table("spans"):
            if span["start"] >= span["stop"] or span["request"] not in self.requests:
                self.found.add("E405", self.place("spans"), span)
                continue
            self.spans[span["request"]].append(span)
        for spans in self.spans.values():
            spans.sort(key=lambda span: int(span["start"]))
            for span in spans:
                for key in keys(span):
                    self.owner.setdefault(key, span)
        for rows in self.rows.values():
            for row in rows:
                self.row.setdefault((row["request"], row["position"]), row)

    # ---- 7.1 and 7.2

    def _judge_span(self, span: Json) -> None:
        place, kind = self.place("spans"), span["disposition"]
        if kind == "cache_ref":
            self.found.check(span["reason"] in (None, "external"), "E402", place, span)
        else:
            explained = span["reason"] is None if kind == "captured" else bool(span["reason"])
            self.found.check(explained, "E402", place, span)
        refers = kind == "cache_ref" and span["reason"] != "external"
        self.found.check(refers or span["ref_request"] is None, "E103", place, span)
        if span["step"] is None:
            never = ("cache_ref", "aborted", "filtered")
            self.found.check(kind in never, "E412", place, span)
        else:
            known = span["step"] in self.steps and kind != "cache_ref"
            self.found.check(known, "E412", place, span)

    def _judge_request(self, request: Json) -> None:
        place, number = self.place("spans"), request["request"]
        if request["finish_reason"] in UNSERVED:
            said = bool(request["reason"])
            self.found.check(said, "E402", self.place("requests"), f"{number} without a reason")
        spans, end = self.spans[number], 0
        for span in spans:
            if span["start"] != end:
                code = "E404" if span["start"] > end else "E405"
                self.found.add(code, place, f"request {number} from {end}: {span}")
            end = max(end, span["stop"])
        n = self.owed(request)
        if end != n:
            self.found.add("E404" if end < n else "E405", place, f"request {number}: {end} of {n}")
        steps = [span["step"] for span in spans if span["step"] is not None]
        self.found.check(steps == sorted(steps), "E412", place, f"request {number}: steps {steps}")
        hits = 0
        for span in spans:
            hit = span["disposition"] == "cache_ref" or (
                span["disposition"] == "filtered" and span["step"] is None
            )
            if not hit or span["start"] > hits:
                break
            hits = span["stop"]
        told = (request["cached_tokens"], request["engine_cached_tokens"])
        same = told[0] == hits and told[1] in (None, hits)
        self.found.check(same, "E411", self.place("requests"), f"{number}: {hits}, told {told}")
        ended = request["finish_reason"] not in (*UNSERVED, "unfinished")
        for span in spans:
            self._judge_end(span, own(request), ended)

    def _judge_end(self, span: Json, own: int, ended: bool) -> None:  # 7.2, past the end
        if span["disposition"] == "undelivered":
            right = ended and span["start"] >= own
        else:
            free = span["step"] is None or span["disposition"] == "filtered"
            right = free or not ended or span["stop"] <= own
        self.found.check(right, "E419", self.place("spans"), span)

    def owed(self, request: Json) -> int:
        """Return N, the positions that a request owes (7.1)."""
        if request["finish_reason"] in UNSERVED:
            return 0
        return max(own(request), self.computed(request["request"]))

    def computed(self, number: int) -> int:
        """Return 1 + the last computed position of a request, 0 if there is none."""
        spans = self.spans.get(number, [])
        return max((span["stop"] for span in spans if span["step"] is not None), default=0)

    # ---- 7.3

    def _judge_rows(self, hook: str, rows: list[Json]) -> None:
        """Hold the rows of a hook against the census: identities 1, 4 and 5."""
        keyed = Counter((row["request"], row["position"]) for row in rows)
        for row in rows:
            if keyed[row["request"], row["position"]] > 1:
                self.found.add("E407", row["shard"], f"{hook}: {row}")
        captured = {k for k, span in self.owner.items() if span["disposition"] == "captured"}
        for key in sorted(captured ^ keyed.keys()):
            place = self.row[key]["shard"] if key in keyed else "shards"
            self.found.add("E406", place, f"{hook}: request {key[0]} position {key[1]}")
        per_step = Counter(row["step"] for row in rows)
        phases = Counter((row["step"], row["phase"]) for row in rows)
        for row in rows:
            self.found.check(row["step"] in self.steps, "E412", row["shard"], f"{hook}: {row}")
            self._judge_row(row)
        for number, step in self.steps.items():
            said = f"{hook}: step {number} has {per_step[number]} rows"
            same = per_step[number] == step["captured_tokens"]
            self.found.check(same, "E412", "shards", said)
            for phase in ("prefill", "decode"):
                fewer = phases[number, phase] <= step[f"{phase}_tokens"]
                self.found.check(fewer, "E412", "shards", f"{said}, {phase}")
        flags = dict[int, int]()
        for row in rows:
            if row["flags"] > 7 or keyed[row["request"], row["position"]] > 1:
                continue  # a finding already
            same = flags.setdefault(row["token_id"], row["flags"]) == row["flags"]
            self.found.check(same, "E414", row["shard"], f"{row}: other flags of the token")
        self._judge_order(rows)

    def _judge_row(self, row: Json) -> None:
        request = self.requests.get(row["request"])
        if request is not None:
            phase = "prefill" if row["position"] < request["prompt_len"] else "decode"
            self.found.check(row["phase"] == phase, "E414", row["shard"], f"{row} is {phase}")
            spans = self.spans.get(row["request"], [])
            failed = any(span["reason"] == "failed_load" for span in spans)
            known = failed or row["attempt"] <= request["n_preemptions"]
            self.found.check(known, "E414", row["shard"], f"{row}: an attempt that never was")
        span = self.owner.get((row["request"], row["position"]))
        if span and span["disposition"] == "captured" and span["start"] == row["position"]:
            same = span["step"] == row["step"]
            self.found.check(same, "E414", row["shard"], f"{row} in step {span['step']}")

    def _judge_order(self, rows: list[Json]) -> None:
        """Steps, chunks and attempts of a request ascend with its positions (6.3)."""
        ordered = sorted(rows, key=lambda row: (row["request"], row["position"]))
        for one, other in itertools.pairwise(ordered):
            if one["request"] != other["request"]:
                continue
            ascend = all(one[name] <= other[name] for name in ("step", "chunk", "attempt"))
            moves = (one["step"] == other["step"]) == (one["chunk"] == other["chunk"])
            self.found.check(ascend and moves, "E414", other["shard"], f"{one} before {other}")

    def _judge_drops(self) -> None:  # identity 2
        place, drops = self.place("drops"), self.table("drops")
        lost: dict[tuple[Key, str], Json] = {}
        events: dict[int, list[Json]] = defaultdict(list)
        for drop in drops:
            self.found.check(drop["start"] < drop["stop"], "E408", place, drop)
            events[drop["drop"]].append(drop)
            for key in keys(drop):
                twice = (key, drop["drop_reason"]) in lost
                self.found.check(not twice, "E408", place, f"{key} twice")
                lost[key, drop["drop_reason"]] = drop
        for lines in events.values():
            total = sum(line["stop"] - line["start"] for line in lines)
            one = {(line["t_ns"], line["n_tokens"]) for line in lines}
            self.found.check(one == {(lines[0]["t_ns"], total)}, "E408", place, lines)
            self.found.check(len({line["step"] for line in lines}) == 1, "E408", place, lines)
        reasons = {drop["drop_reason"] for drop in drops}
        self.found.check(len(reasons) <= 256, "E408", place, f"{len(reasons)} reasons")
        ordered = sorted(drops, key=lambda drop: (drop["request"], drop["start"]))
        for one_drop, other in itertools.pairwise(ordered):
            follows = one_drop["request"] != other["request"] or one_drop["step"] <= other["step"]
            self.found.check(follows, "E408", place, f"{one_drop} before {other}")
        spans = {
            (key, span["reason"]): span
            for key, span in self.owner.items()
            if span["disposition"] == "dropped"
        }
        for key, reason in sorted(spans.keys() ^ lost.keys(), key=str):
            self.found.add("E408", place, f"request {key[0]} position {key[1]}: {reason}")
        for (key, reason), span in spans.items():
            drop = lost.get((key, reason))
            if drop is not None and key[1] == span["start"]:
                self.found.check(drop["step"] == span["step"], "E408", place, f"{span}: {drop}")
        per_step = Counter[int]()
        for drop in drops:
            per_step[drop["step"]] += drop["stop"] - drop["start"]
        told = Counter({n: step["dropped_tokens"] for n, step in self.steps.items()})
        self.found.check(+per_step == +told, "E408", place, "tokens of steps differ")

    def _judge_steps(self) -> None:  # identity 3
        place = self.place("steps")
        for step in self.steps.values():
            became = sum(step[f"{kind}_tokens"] for kind in SCHEDULED)
            phases = step["prefill_tokens"] + step["decode_tokens"]
            same = step["batch_tokens"] == became == phases
            self.found.check(same, "E409", place, f"step {step['step']}")
            drafted, accepted = step["drafted_tokens"], step["accepted_tokens"]
            if drafted is not None and accepted is not None:
                fits = accepted <= drafted <= accepted + step["rejected_tokens"]
                self.found.check(fits, "E409", place, f"drafts of step {step['step']}")
        begun: Counter[tuple[int, str]] = Counter()
        lengths: Counter[str] = Counter()
        for spans in self.spans.values():
            for span in spans:
                if span["step"] is not None:
                    begun[span["step"], span["disposition"]] += 1
                    lengths[span["disposition"]] += span["stop"] - span["start"]
        for kind in COMPUTED:
            told = sum(step[f"{kind}_tokens"] for step in self.steps.values())
            self.found.check(told == lengths[kind], "E409", place, f"{kind}: {told}")
        for (number, kind), n_spans in begun.items():  # identity 4
            step = self.steps.get(number)
            if step is not None and kind in COMPUTED:
                fits = n_spans <= step[f"{kind}_tokens"]
                self.found.check(fits, "E412", place, f"{n_spans} spans of {kind} in {number}")

    # ---- 7.4 to 7.6

    def _judge_references(self) -> None:
        for spans in self.spans.values():
            for span in spans:
                if span["disposition"] != "cache_ref":
                    continue
                self._judge_source(span)
                for _, position in keys(span):
                    source = (span["ref_request"], position)
                    if source in self.row:
                        self.served[source] += 1
                    if span["reason"] == "external":
                        self.totals["external"] += 1
                    elif source not in self.row and not self.is_thinned(source):
                        self.totals["unresolved"] += 1
                        self.found.add("E410", self.place("spans"), span, "warning")

    def is_thinned(self, key: Key) -> bool:
        return key in self.owner and self.owner[key]["disposition"] == "thinned"

    def _judge_source(self, span: Json) -> None:
        """A reference names who computed the positions, with the same adapter."""
        source = self.requests.get(span["ref_request"])
        served = any(
            other["disposition"] == "cache_ref"
            and other["start"] < span["stop"]
            and span["start"] < other["stop"]
            for other in self.spans.get(span["ref_request"], [])
        )
        mine = self.requests[span["request"]]["adapter"]
        same = source is None or source["adapter"] == mine
        right = same and not served
        self.found.check(right, "E410", self.place("spans"), f"{span}: no computation of it")

    def _judge_tokens(self, hook: str, ids: dict[Key, int], request: Json) -> None:
        """Hold the tokens of rows against the digest of the census: identity 5."""
        number, digest = request["request"], self.digest(request, ids)
        same = digest in (None, request["token_digest"]) or request["token_digest"] is None
        self.found.check(same, "E414", "shards", f"{hook}: token ids of request {number}")

    def digest(self, request: Json, ids: dict[Key, int]) -> str | None:
        """Return the digest of a request's tokens, None unless all are known.

        Args:
            request: its line.
            ids: tokens by request and position; a reference takes the one that it refers to.
        """
        number, words = request["request"], b""
        for position in range(own(request)):
            span = self.owner.get((number, position))
            refers = span is not None and span["disposition"] == "cache_ref" and not span["reason"]
            token = ids.get((number, position))
            if refers and token is None:
                token = ids.get((span["ref_request"], position))
            if token is None:
                return None
            words += struct.pack("<I", token)
        return hashlib.sha256(words).hexdigest()

    def _count(self) -> None:
        for span in (span for spans in self.spans.values() for span in spans):
            self.totals[span["disposition"]] += span["stop"] - span["start"]
        for step in self.steps.values():
            self.totals["scheduled"] += step["batch_tokens"]
            self.totals["recomputed"] += step["recomputed_tokens"]
            self.totals["rejected"] += step["rejected_tokens"]
        self.totals["rows"] = max((len(rows) for rows in self.rows.values()), default=0)
        self.totals["requests"] = len(self.table("requests"))


def keys(line: Json) -> list[Key]:
    return [(line["request"], position) for position in range(line["start"], line["stop"])]


def own(request: Json) -> int:
    """Return the positions of a request up to its last sampled token, which is never fed (7.1)."""
    p, g = request["prompt_len"], request["generated_len"]
    return int(p + g - 1 if g else p)
