"""What is not stored: rows that sampling rules leave out, and steps for which a ring has no room.

What the rules leave out is computed and served like the rest; the census calls it ``filtered``. The
name of an overflow policy is used in options, run records and drop logs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Annotated, Any, Literal, Protocol, Self, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_serializer,
    model_validator,
)

from actds.format import canonical
from actds.format.inclusion import MAX_RULES, KeepRule, Role
from actds.format.interventions import Applied

HookNames = tuple[str, ...]
"""Names of hooks, sorted."""
Lot = tuple[str, HookNames | None]
"""Phase and hooks, ``None`` for all, of rows that are in one shard."""


class Rings(Protocol):
    """What a policy can do with the two rings."""

    def wait(self, entry: Any, stage: str) -> bool:
        """Wait for room in ``staging`` or ``ring``; return that it is worth another try."""

    def drop_staged(self) -> bool:
        """Drop the oldest step that waits in stage 1; return whether there was one."""

    def drop_ready(self) -> bool:
        """Drop the oldest step in stage 2 that the writer has not taken; return as above."""


MakesRoom = Callable[[Rings, Any], bool]
"""Makes room for a step; called under the handover's lock, again until the step fits. Returns
whether to try again; if not, the step itself is dropped."""


@dataclass(frozen=True)
class Policy:
    """What happens to a step for which a ring has no room.

    Args:
        summary: half a line of help.
        staging_is_full: makes room in stage 1, in the engine's thread.
        ring_is_full: makes room in stage 2, in the transfer's thread: mostly it waits, and lets
            stage 1 fill up.
    """

    name: str
    summary: str
    staging_is_full: MakesRoom
    ring_is_full: MakesRoom = lambda rings, entry: rings.wait(entry, "ring")


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("block", "the engine waits", lambda rings, entry: rings.wait(entry, "staging")),
        Policy(
            "thin",
            "rows are drawn with a probability that falls as it fills, and is recorded",
            lambda rings, entry: rings.wait(entry, "staging"),
        ),
        Policy(
            "drop_oldest",
            "the steps that waited longest are dropped and recorded",
            lambda rings, _: rings.drop_staged(),
            lambda rings, _: rings.drop_ready(),
        ),
        Policy("drop_newest", "the newest steps are dropped and recorded", lambda *_: False),
    )
}
Phase = Literal["prefill", "decode"]
_HASH_RANGE = 2**64
_ENGINE_ID = re.compile(r"(?:[0-9]+_)?(?:cmpl-(?P<completion>.+)-[0-9]+|chatcmpl-(?P<chat>.+))")


_SHARE_RULE = re.compile(
    r"(?:(?P<phase>prefill|decode)|position (?P<first>[0-9]{1,9})-(?P<last>[0-9]{1,9})?"
    r"|entropy (?P<low>[0-9.]{1,16})?-(?P<high>[0-9.]{1,16})?"
    r"|probe (?P<hook>[a-z0-9_.+]{1,80}) (?P<probe>[0-9]{1,4}) ?(?P<side>>=|<) ?"
    r"(?P<bound>-?[0-9]{1,15}(?:\.[0-9]{1,16})?)"
    rf"|role (?P<role>{'|'.join(get_args(Role))})|id (?P<id>.{{1,512}})"
    r"|(?P<column>label|xarg) (?P<name>[^=]{1,256})=(?P<value>.{0,512}))",
    re.DOTALL,
)


def keep_rules(text: str) -> tuple[KeepRule, ...]:
    """Return rules for shares from ``decode: 1; position 0-16: 1; entropy 2.5-: 1; 0.1``.

    Each is of conditions, joined by ``and``, and a share; a share alone is of all that is left.
    Raises ValueError for another text.
    """
    rules = tuple(_keep_rule(part.strip()) for part in text.split(";") if part.strip())
    if len(rules) > MAX_RULES:
        raise ValueError(f"{MAX_RULES} rules at most, got {len(rules)}")
    return rules


def _keep_rule(text: str) -> KeepRule:
    conditions, _, number = text.rpartition(":")
    try:
        share = float(number)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"a share above 0, and 1 at most: {text}")
    rule = KeepRule(share)
    for words in conditions.split(" and ") if conditions.strip() else ():
        match = _SHARE_RULE.fullmatch(words.strip())
        if match is None:
            raise ValueError(
                "prefill, decode, position A-B, entropy A-B, probe HOOK K >= X, probe HOOK K < X, "
                f"role NAME, label NAME=GLOB, xarg NAME=GLOB or id GLOB: {words.strip()!r}"
            )
        if match["phase"] is not None:
            rule = replace(rule, phase="prefill" if match["phase"] == "prefill" else "decode")
        elif match["first"] is not None:
            last = None if match["last"] is None else int(match["last"])
            rule = replace(rule, position=(int(match["first"]), last))
        elif match["hook"] is not None:
            of, bound = (match["hook"], int(match["probe"])), float(match["bound"])
            _, _, low, high = rule.probe or (*of, None, None)
            if rule.probe is not None and rule.probe[:2] != of:
                raise ValueError(f"one probe of one hook in a rule: {text}")
            low, high = (bound, high) if match["side"] == ">=" else (low, bound)
            rule = replace(rule, probe=(*of, low, high))
        elif match["role"] is not None:
            rule = replace(rule, role=cast(Role, match["role"]))
        elif match["id"] is not None:
            rule = replace(rule, request=(*rule.request, ("external_id", match["id"])))
        elif match["column"] is not None:
            condition = f"{match['column']}s.{match['name']}", match["value"]
            rule = replace(rule, request=(*rule.request, condition))
        else:
            low, high = (None if b is None else float(b) for b in match.group("low", "high"))
            rule = replace(rule, entropy=(low, high))
    return rule


def request_condition(words: str) -> tuple[str, str]:
    """Return name and pattern of ``id GLOB``, ``label NAME=GLOB`` or ``xarg NAME=GLOB``.

    Raises ValueError for another text.
    """
    rule = _keep_rule(f"{words}: 1")
    if len(rule.request) != 1 or rule != KeepRule(1.0, request=rule.request):
        raise ValueError(words[:80])
    return rule.request[0]


@dataclass(frozen=True)
class Regime:
    """What is known of a request before its rows are computed.

    Args:
        roles: of the prompt, packed; empty where they are not known.
        takes: by the number of each rule for requests, whether it takes this one.
        applied: the positions that interventions change.
    """

    roles: str = ""
    takes: Mapping[int, bool] = field(default_factory=dict)
    applied: tuple[Applied, ...] = ()

    @classmethod
    def of(cls, rules: Sequence[KeepRule], roles: str, about: Mapping[str, str]) -> Regime:
        """Return that of a request; ``about`` as ``about_request`` returns it."""
        return cls(roles, {k: rule.takes(about) for k, rule in enumerate(rules) if rule.request})


MIXED_WEIGHTS = "unsupported:mixed_weights"
"""Why rows of a request are not stored whose KV was computed with other weights than the run's."""


@dataclass(frozen=True)
class Labels:
    """The properties of a request that rules can match.

    Args:
        external_id: id that the server gave the engine, as in the table ``requests``.
    """

    external_id: str
    session_id: str | None = None
    xargs: Mapping[str, Any] = field(default_factory=dict)

    def header(self, name: str) -> str | None:
        """Return a header that vLLM passes to its engine, ``None`` when it was not sent."""
        if name == "x-request-id":
            return client_request_id(self.external_id)
        return self.session_id


@dataclass(frozen=True)
class LeftOut:
    """Why rows of a request are not stored, per phase; ``None`` where they are.

    Args:
        prefill: reason for prompt positions, such as ``sampling:fraction``.
        decode: reason for generated positions.
    """

    prefill: str | None = None
    decode: str | None = None
    ranges: tuple[tuple[int, int], ...] | None = None
    """Positions that the client asked for, ``None`` for all; others are left out as ``ASKED``."""
    hooks: HookNames | None = None
    """Hooks that the client asked for, ``None`` for all; rows of it have no others."""

    def stored(self, n: int, prompt_len: int) -> list[tuple[int, int]]:
        """Return which of the positions [0, n) are not left out, as intervals."""
        phases = ((self.prefill, 0, min(prompt_len, n)), (self.decode, prompt_len, n))
        parts = [(start, stop) for reason, start, stop in phases if reason is None and start < stop]
        if len(parts) == 2:
            parts = [(0, n)]
        if self.ranges is None:
            return parts
        cut = [(max(a, c), min(b, d)) for a, b in parts for c, d in self.ranges]
        return [(start, stop) for start, stop in cut if start < stop]

    @property
    def takes_all(self) -> bool:
        """Return whether every position is stored."""
        return self.prefill is None and self.decode is None and self.ranges is None

    @property
    def is_private(self) -> bool:
        """Whether a rule names its user, or nobody is captured: no digest of it is kept either."""
        return self.prefill in (SKIP, ONLY, OFF)


EVERYTHING = LeftOut()
"""Nothing of the request is left out."""
POSITIONS, HOOKS = "actds_positions", "actds_hooks"
"""What a request says in ``vllm_xargs`` of the positions, and hooks, that are to be stored."""
ASKED, OFF = "sampling:request", "sampling:off"
"""Why a position is left out: its client asked for others; the capture was switched off."""
SKIP, ONLY = "sampling:skip", "sampling:only"
"""Why a request is: it matches one of ``skip``, or none of ``only``."""
_END = 2**31
_RANGE = re.compile(r"(?P<first>[0-9]{1,9})-(?P<last>[0-9]{1,9})?")


def positions_asked(text: object, prompt_len: int) -> tuple[tuple[int, int], ...]:
    """Return the positions that a client asks to store, as ascending intervals.

    ``all``, ``none``, ``prompt``, ``last_prompt``, ``all_generated``, and ranges such as ``0-16``
    (without 16) or ``100-``; several with commas. Raises ValueError for anything else.
    """
    named = {
        "all": (0, _END),
        "none": (0, 0),
        "prompt": (0, prompt_len),
        "last_prompt": (max(prompt_len - 1, 0), prompt_len),
        "all_generated": (prompt_len, _END),
    }
    intervals = list[tuple[int, int]]()
    for word in str(text).split(",") if isinstance(text, str) and len(text) < 1024 else [""]:
        match = _RANGE.fullmatch(word.strip())
        interval = named.get(word.strip(), (-1, -1))
        if match is not None and int(match["first"]) <= int(match["last"] or _END):
            interval = int(match["first"]), int(match["last"] or _END)
        if interval[0] < 0:
            raise ValueError(
                f"{POSITIONS}: {str(text)[:80]!r}; expected {', '.join(named)}, or ranges such as "
                "0-16,100-"
            )
        intervals.append(interval)
    joined = list[tuple[int, int]]()
    for start, stop in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def hooks_asked(text: object, choices: Collection[HookNames]) -> HookNames | None:
    """Return the hooks that a client asks to store, ``None`` for ``all``.

    Args:
        choices: what a request may choose, each sorted as ``choice_of`` does.

    Raises ValueError for anything else.
    """
    names = choice_of(text) if isinstance(text, str) and len(text) < 4096 else ()
    if names == ("all",):
        return None
    if names not in choices:
        allowed = "; ".join(["all", *map(",".join, choices)])
        raise ValueError(
            f"{HOOKS}: {str(text)[:80]!r} is no choice here; expected one of: {allowed}"
        )
    return names


def choice_of(text: str) -> HookNames:
    """Return the hooks that a text names, with commas between: sorted, each once."""
    return tuple(sorted({name.strip() for name in text.split(",")}))


def client_request_id(external_id: str) -> str:
    """Return the ``X-Request-Id`` inside the id that the OpenAI server made from it."""
    match = _ENGINE_ID.fullmatch(external_id)
    return (match["completion"] or match["chat"]) if match else external_id


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Match(_Model):
    """A condition on a request: one property, and shell patterns for its value."""

    header: Literal["x-request-id", "x-session-id"] | None = None
    xarg: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    values: Annotated[list[str], Field(min_length=1, max_length=1024)]

    @model_validator(mode="before")
    @classmethod
    def _lower(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("header"), str):
            return {**data, "header": data["header"].lower()}
        return data

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.header is None) == (self.xarg is None):
            raise ValueError("either header or xarg")
        return self

    def holds(self, labels: Labels) -> bool:
        if self.header is not None:
            value: Any = labels.header(self.header)
        else:
            value = labels.xargs.get(self.xarg or "")
        words = value if isinstance(value, list) else [value]
        return any(
            fnmatchcase(str(word), pattern)
            for word in words
            if word is not None
            for pattern in self.values
        )


def _decimal(value: Any) -> Any:
    """Return the decimal as written: 0.1 is a tenth, not the nearest float."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    try:
        return Decimal(str(value))
    except ArithmeticError:
        raise ValueError("a decimal number") from None


class SamplingRules(_Model):
    """Which requests and phases are stored.

    A share is drawn by a hash of ``external_id``; with one seed, a larger share contains the
    smaller one.
    """

    fraction: Annotated[Decimal, BeforeValidator(_decimal), Field(ge=0, le=1)] = Field(
        default=Decimal(1), description="Share of the requests to store"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0, description="Seed of the share, of the row order and of the readouts"
    )
    phases: Annotated[list[Phase], Field(min_length=1)] = Field(
        default=["prefill", "decode"], description="Phases to store"
    )
    only: list[Match] = Field(default=[], description="A request must match one of these")
    skip: list[Match] = Field(
        default=[], description="A request that matches one of these is never stored"
    )

    hook_choices: Annotated[list[str], Field(max_length=16)] = Field(
        default=[],
        description='Hooks that a request may choose, as ["embed.0", "embed.0,resid_post.3"]; each '
        "choice takes the memory of two shards",
    )

    @property
    def choices(self) -> tuple[HookNames, ...]:
        return tuple(dict.fromkeys(map(choice_of, self.hook_choices)))

    @field_serializer("fraction")
    def _plain(self, fraction: Decimal) -> str:
        return format(fraction.normalize(), "f")

    def left_out(self, labels: Labels) -> LeftOut:
        reason = self._request_reason(labels)
        if reason is not None:
            return LeftOut(reason, reason)
        if len(set(self.phases)) == 2:
            return EVERYTHING
        return LeftOut(
            None if "prefill" in self.phases else "sampling:phase",
            None if "decode" in self.phases else "sampling:phase",
        )

    def describe(self) -> str:
        """Return the fact ``capture.sampling``: ``all``, or the rules as canonical JSON.

        Spec: 0.1 section 6.1.
        """
        if self == SamplingRules(seed=self.seed, hook_choices=self.hook_choices):
            return "all"
        document = self.model_dump(mode="json", exclude_none=True, exclude={"hook_choices"})
        document["phases"] = sorted(set(self.phases))
        return canonical.dump(document).decode("ascii").rstrip("\n")

    def _request_reason(self, labels: Labels) -> str | None:
        if any(match.holds(labels) for match in self.skip):
            return SKIP
        if self.only and not any(match.holds(labels) for match in self.only):
            return ONLY
        return None if self._drawn(labels.external_id) else "sampling:fraction"

    def _drawn(self, external_id: str) -> bool:
        digest = hashlib.sha256(f"{self.seed}:{external_id}".encode(errors="surrogatepass"))
        return int.from_bytes(digest.digest()[:8], "big") < int(
            Fraction(self.fraction) * _HASH_RANGE
        )
