"""Inclusion by hash: the number in [0, 1) of each row, that writer, validator and reader compute.

Whoever is below a probability is included: so a sample of 1 % lies within one of 2 % of the same
salt, and the probability of every row is known before the row is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format import canonical
from actds.format.positions import position_key
from actds.format.schema import RunRecord

if TYPE_CHECKING:  # engines that do not capture load this module too: no tables for them
    from actds.format.shard import Shard

INCLUSION = "capture.inclusion"
"""The run record's field with the design of a run that draws its rows (section 7.10)."""
IMPORTED = "import.inclusion"
"""The field of an imported run whose set said the inclusion of each row (section 6.3)."""
Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Unit = Literal["row", "request"]
Role = Literal["system", "user", "assistant", "thinking", "tool", "template"]
MAX_RULES = 64
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class KeepRule:
    """The share of the rows of some positions; all that it names has to hold.

    Args:
        share: probability of a row, in (0, 1].
        phase: of the position.
        position: first one and the one after the last, ``None`` for no end.
        entropy: of the logits that the token at the position was sampled from, in nats: from,
            and below; ``None`` for no bound. Never of a prompt position, or of an unknown one.
        role: of a prompt position; every generated one is the assistant's.
        request: names of ``about_request`` and patterns that the request has to match, all of them.
        probe: hook and number of a probe, and from and below what its score has to be at the row
            whose logits the token was sampled from; as ``entropy``.

    Spec: 0.1 section 7.10.
    """

    share: float
    phase: Literal["prefill", "decode"] | None = None
    position: tuple[int, int | None] | None = None
    entropy: tuple[float | None, float | None] | None = None
    role: Role | None = None
    request: tuple[tuple[str, str], ...] = ()
    probe: tuple[str, int, float | None, float | None] | None = None

    @property
    def reads_sampled(self) -> bool:
        """Return whether it asks what was known when a token was sampled."""
        return self.entropy is not None or self.probe is not None

    def takes(self, about: Mapping[str, str]) -> bool:
        """Return whether it can be of positions of a request; ``about`` as ``about_request``."""
        return matches(self.request, about)

    def holds(
        self,
        position: npt.NDArray[np.int64],
        prompt_len: npt.NDArray[np.int64],
        entropy: npt.NDArray[np.float64] | None,
        role: npt.NDArray[np.str_ | np.object_] | None = None,
        score: npt.NDArray[np.float64] | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Return of which positions it is if it takes their requests, bool ``(n,)``.

        Arguments as of ``Design.shares``; ``score`` is that of its probe.
        """
        of, in_prompt = np.ones(len(position), bool), position < prompt_len
        if self.phase is not None:
            of &= in_prompt == (self.phase == "prefill")
        if self.role is not None:
            same = False if role is None else role == self.role
            of &= np.where(in_prompt, same, self.role == "assistant")
        if self.position is not None:
            first, last = self.position
            of &= (position >= first) & (position < (np.inf if last is None else last))
        for bounds, known in ((self.entropy, entropy), (self.probe and self.probe[2:], score)):
            if bounds is not None:
                low, high = bounds
                known = np.full(len(position), np.nan) if known is None else known
                of &= known >= (-np.inf if low is None else low)
                of &= known < (np.inf if high is None else high)
        return of

    def as_json(self) -> dict[str, object]:
        bounds = None if self.entropy is None else [_text(bound) for bound in self.entropy]
        place = None if self.position is None else list(self.position)
        return {
            "entropy": bounds,
            "phase": self.phase,
            "position": place,
            "probe": self.probe and [*self.probe[:2], *map(_text, self.probe[2:])],
            "request": [list(pair) for pair in self.request] or None,
            "role": self.role,
            "share": repr(self.share),
        }

    @classmethod
    def from_json(cls, fields: object) -> KeepRule | None:
        """Return the rule in a run record, ``None`` where it is none."""
        if not isinstance(fields, dict) or fields.keys() != cls(1.0).as_json().keys():
            return None
        share, phase = _share(fields["share"]), fields["phase"]
        place, bounds = fields["position"], fields["entropy"]
        role, request, probe = fields["role"], fields["request"], fields["probe"]
        if share is None or phase not in (None, "prefill", "decode"):
            return None
        if role not in (None, *get_args(Role)):
            return None
        if request is not None and not (isinstance(request, list) and request):
            return None
        if not all(map(is_condition, request or ())):
            return None
        if place is not None and not _is_range(place):
            return None
        entropy = None if bounds is None else _bounds(bounds, _NUMBER)
        if bounds is not None and entropy is None:
            return None
        of_probe = None
        if probe is not None:
            if not (isinstance(probe, list) and len(probe) == 4 and type(probe[1]) is int):
                return None
            scores = _bounds(probe[2:], _SIGNED)
            if not isinstance(probe[0], str) or probe[1] < 0 or scores is None:
                return None
            of_probe = (probe[0], probe[1], *scores)
        conditions = tuple((name, pattern) for name, pattern in request or ())
        where = place and (place[0], place[1])
        return cls(share, phase, where, entropy, role, conditions, of_probe)


def _bounds(bounds: object, number: re.Pattern[str]) -> tuple[float | None, float | None] | None:
    """Return from and below, ``None`` where it is not two decimals or nulls."""
    if not isinstance(bounds, list) or len(bounds) != 2:
        return None
    if not all(b is None or (isinstance(b, str) and number.fullmatch(b)) for b in bounds):
        return None
    low, high = (None if bound is None else float(bound) for bound in bounds)
    return low, high


def _text(number: float | None) -> str | None:
    return None if number is None else repr(number)


def _share(text: object) -> float | None:
    """Return a probability in (0, 1] from its decimal, ``None`` for another text."""
    if not isinstance(text, str) or not _NUMBER.fullmatch(text):
        return None
    return float(text) if 0 < float(text) <= 1 else None


def _is_range(place: object) -> bool:
    if not isinstance(place, list) or len(place) != 2:
        return False
    first, last = place
    return type(first) is int and first >= 0 and (last is None or type(last) is int)


def is_condition(pair: object) -> bool:
    """Return whether it is a name and a pattern, as a condition of a rule has them."""
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(text, str) and len(text) <= MAX_PATTERN for text in pair)
        and _REQUEST_NAME.fullmatch(pair[0]) is not None
    )


def matches(request: Sequence[tuple[str, str]], about: Mapping[str, str]) -> bool:
    """Return whether a request has what each condition names, in the form of its pattern."""
    return all(
        name in about and fnmatchcase(about[name], pattern.replace("[", "[[]"))
        for name, pattern in request
    )


def about_request(external_id: str, labels: str | None, sampling: str | None) -> dict[str, str]:
    """Return what rules may ask of a request, as text by name.

    Names are ``external_id``, ``labels.NAME`` and ``xargs.NAME``, of the ``extra_args`` that it was
    sampled with.

    Args:
        external_id: column of the table ``requests``, as the others; what is no object is nothing.

    Spec: 0.1 section 7.10.
    """
    about, extra = {"external_id": external_id}, _members(sampling).get("extra_args")
    for column, members in (("labels", _members(labels)), ("xargs", extra)):
        for name, value in members.items() if isinstance(members, dict) else ():
            if isinstance(value, str | int):
                about[f"{column}.{name}"] = value if isinstance(value, str) else json.dumps(value)
    return about


def _members(text: str | None) -> dict[str, object]:
    try:
        parsed = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


@dataclass(frozen=True)
class Design:
    """How the rows of a run are drawn: each with a known probability, its *inclusion*.

    Args:
        salt: of the numbers that are compared with the inclusion.
        minimum: lowest inclusion of a step, in (0, 1].
        unit: ``row``, whose inclusion is that of its step, or ``request``, which is stored whole or
            not at all, with the inclusion of the step in which it was first computed.
        keep: rules for shares; the first that holds of a position counts, 1 where none does. The
            inclusion of a row is the product.

    Spec: 0.1 section 7.10.
    """

    salt: np.uint64
    minimum: float
    unit: Unit = "row"
    keep: tuple[KeepRule, ...] = ()

    @property
    def least(self) -> float:
        """Return the lowest inclusion that a row can have."""
        return self.minimum * min((rule.share for rule in self.keep), default=1.0)

    @property
    def reads_sampled(self) -> bool:
        """Return whether a share depends on what was known when a token was sampled."""
        return any(rule.reads_sampled for rule in self.keep)

    @property
    def probes(self) -> tuple[tuple[str, int], ...]:
        """Return hooks and numbers of the probes that rules read, each once, as first read."""
        return tuple(dict.fromkeys(rule.probe[:2] for rule in self.keep if rule.probe))

    @property
    def reads_roles(self) -> bool:
        return any(rule.role is not None for rule in self.keep)

    @property
    def reads_requests(self) -> bool:
        return any(rule.request for rule in self.keep)

    def shares(
        self,
        position: npt.NDArray[np.int64],
        prompt_len: npt.NDArray[np.int64],
        entropy: npt.NDArray[np.float64] | None = None,
        role: npt.NDArray[np.str_ | np.object_] | None = None,
        takes: Mapping[int, npt.NDArray[np.bool_]] | None = None,
        scores: npt.NDArray[np.float64] | None = None,
    ) -> npt.NDArray[np.float64]:
        """Return the share that the rules give each position, float64 ``(n,)``.

        Args:
            position: int64 ``(n,)``.
            prompt_len: prompt tokens of the request of each.
            entropy: of the logits that its token was sampled from, NaN where that is not known.
            role: of each prompt position, empty where that is not known.
            takes: by the number of each rule for requests, whether it takes the request of each
                position; without it none of them does.
            scores: of ``probes`` at the row whose logits its token was sampled from, float64
                ``(n_probes, n)``, NaN where that is not known.
        """
        probes = self.probes
        shares, open_ = np.ones(len(position)), np.ones(len(position), bool)
        for number, rule in enumerate(self.keep):
            score = None
            if rule.probe is not None and scores is not None:
                score = scores[probes.index(rule.probe[:2])]
            of = open_ & rule.holds(position, prompt_len, entropy, role, score)
            if rule.request:
                of &= False if takes is None else takes[number]
            shares[of] = rule.share
            open_ &= ~of
        return shares

    def numbers(self, request: npt.ArrayLike, position: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the number of each position, float64 ``(n,)``: it is drawn if below inclusion."""
        return uniform(self.salt, request, 0 if self.unit == "request" else position)

    def as_field(self) -> str:
        """Return the value of ``capture.inclusion`` in the run record."""
        fields = {
            "keep": [rule.as_json() for rule in self.keep],
            "minimum": repr(self.minimum),
            "salt": f"{int(self.salt):016x}",
            "unit": self.unit,
        }
        return canonical.dump(fields).decode("ascii").rstrip("\n")

    @classmethod
    def of(cls, record: RunRecord | None) -> Design | None:
        """Return the design in a run record, ``None`` for a run that stores every row.

        Raises:
            ActdsError: E102 or E103 when the text is no value of the spec.
        """
        field = None if record is None else record.fields.get(INCLUSION)
        if record is None or field is None or field.value is None:
            return None
        place, text = f"runs/{record.run}.json {INCLUSION}", str(field.value)
        fields = canonical.parse(f"{text}\n".encode(), place)
        names = {"keep", "minimum", "salt", "unit"}
        if isinstance(fields, dict) and fields.keys() == names and isinstance(fields["keep"], list):
            minimum, salt, unit = _share(fields["minimum"]), fields["salt"], fields["unit"]
            rules = [KeepRule.from_json(rule) for rule in fields["keep"]]
            keep = tuple(rule for rule in rules if rule is not None)
            is_salt = isinstance(salt, str) and _SALT.fullmatch(salt)
            are_rules = len(keep) == len(rules) <= MAX_RULES
            if minimum and is_salt and unit in get_args(Unit) and are_rules:
                return cls(np.uint64(int(salt, 16)), minimum, unit, keep)
        raise ActdsError("E103", place, got=text[:200], expected="the spec's fields")


_SALT = re.compile(r"[0-9a-f]{16}")
MAX_PATTERN = 512
_REQUEST_NAME = re.compile(r"external_id|(?:labels|xargs)\..+", re.DOTALL)
_NUMBER = re.compile(r"[0-9]{1,16}(\.[0-9]{1,24})?(e-?[0-9]{1,3})?")
_SIGNED = re.compile(f"-?{_NUMBER.pattern}")


@cache
def salt_of(*words: str | int) -> np.uint64:
    """Return the first 64 bits of the SHA-256 of words joined by newlines, big-endian.

    Spec: 0.1 section 9.11.
    """
    digest = hashlib.sha256("\n".join(map(str, words)).encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "big"))


def uniform(
    salt: np.uint64, request: npt.ArrayLike, position: npt.ArrayLike = 0
) -> npt.NDArray[np.float64]:
    """Return the number of each row, float64 ``(n,)`` in [0, 1); of a request that of position 0.

    Args:
        salt: of the choice: another salt gives independent numbers.
        request: request of each row, below 2^32.
        position: its position, below 2^32.

    Spec: 0.1 section 9.11.
    """
    key = mixed(position_key(request, position)) ^ salt
    return (mixed(key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def is_drawn(
    seed: int, dataset: str, run: str, request: npt.ArrayLike, fraction: float
) -> npt.NDArray[np.bool_]:
    """Return which requests a replay draws of a run of its source, ``(n,)``.

    Args:
        seed: of the draw.
        dataset: id of the source.
        fraction: probability of each request.

    Spec: 0.1 section 9.11.
    """
    return uniform(salt_of("actds replay", seed, dataset, run), request) < fraction


def inclusion_of(record: RunRecord | None) -> float:
    """Return the probability with which a row of a run was drawn: 1 but in a replay of a part.

    Spec: 0.1 section 9.11.
    """
    field = None if record is None else record.fields.get("replay.fraction")
    return 1.0 if field is None or field.value is None else float(str(field.value))


def draws_rows(record: RunRecord | None) -> bool:
    """Return whether a run drew its rows, so that each says its probability."""
    fields = {} if record is None else record.fields
    return any(name in fields and fields[name].value is not None for name in (INCLUSION, IMPORTED))


def is_drawn_from(record: RunRecord | None) -> bool:
    """Return whether rows of a run may be there with a probability below 1."""
    return draws_rows(record) or inclusion_of(record) < 1


def inclusion_of_rows(shard: Shard, record: RunRecord | None) -> Floats:
    """Return the probability that each row of a shard is there with, float64 ``(n_rows,)``.

    It is that of the row in its run, 1 where that stores every row, times that of its request in a
    replay of a part.

    Args:
        shard: the shard.
        record: of its run.

    Raises:
        ActdsError: E424 a probability that is none; and as ``Shard.tokens``.

    Spec: 0.1 section 7.10.
    """
    fraction = inclusion_of(record)
    if not draws_rows(record):
        return np.full(shard.n_rows, fraction)
    column = shard.tokens(["inclusion"])["inclusion"]
    inclusion = np.array(column.fill_null(1.0).to_numpy(), np.float64)
    wrong = ~((inclusion > 0) & (inclusion <= 1))
    if wrong.any():
        row = int(np.argmax(wrong))
        got = f"{float(inclusion[row])!r} in row {row}"
        place = f"shards/{shard.name}/tokens.parquet inclusion"
        raise ActdsError("E424", place, got=got, expected="above 0, up to 1")
    inclusion *= fraction
    return inclusion


@dataclass(frozen=True)
class Sample:
    """Rows that were drawn, each with a known probability, its inclusion.

    Args:
        n_rows: rows.
        n_represented: rows that they stand for: the sum of 1 over their inclusion.
        least: lowest inclusion.
        greatest: highest.
        effective_rows: of the weights 1 over inclusion.
    """

    n_rows: int
    n_represented: float
    least: float
    greatest: float
    effective_rows: float

    @classmethod
    def of(cls, inclusion: Floats) -> Sample | None:
        """Return what the inclusion of rows ``(n_rows,)`` comes to, ``None`` where all is 1."""
        if not (inclusion < 1).any():
            return None
        weights = 1 / inclusion
        least, greatest = float(inclusion.min()), float(inclusion.max())
        represented = float(weights.sum())
        return cls(len(inclusion), represented, least, greatest, effective_rows(weights))

    @property
    def is_unequal(self) -> bool:
        """Return whether rows had different probabilities: a plain mean over them is biased."""
        return self.least < self.greatest

    def __str__(self) -> str:
        share = f"{self.least:.3g}"
        share += f" to {self.greatest:.3g}" if self.is_unequal else ""
        return (
            f"{self.n_rows:,} rows drawn with probability {share}, which represent about "
            f"{self.n_represented:,.0f}: {self.effective_rows:,.0f} effective rows"
        )


def effective_rows(weights: npt.ArrayLike) -> float:
    """Return how many rows of equal weight estimate a mean as well; 0 without a row.

    Kish's ``(sum w)^2 / sum w^2`` (1965), for values that do not depend on the weights.
    """
    w = np.asarray(weights, np.float64)
    squares = float(w @ w)
    return float(w.sum()) ** 2 / squares if squares else 0.0


def mixed(x: Keys) -> Keys:
    """Return a number that looks random for each number (SplitMix64), in place."""
    with np.errstate(over="ignore"):  # of a single number NumPy warns
        x += _INCREMENT
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            x ^= x >> np.uint64(shift)
            x *= np.uint64(factor)
    return x
