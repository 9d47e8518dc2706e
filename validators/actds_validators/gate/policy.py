"""Policies: a TOML file in which a team says which datasets it does not train on."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from actds.errors import ActdsError
from actds.format.schema import REQUIRED_PROVENANCE, DType
from actds_validators.audit.place import PlaceName
from actds_validators.validate.validation import Level

MAX_NBYTES = 1 << 20
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%")


def _share(given: object) -> float:
    """Return a share from a number of 0 to 1 or a text such as ``0.1 %``."""
    value = math.nan
    if isinstance(given, str) and (match := _PERCENT.fullmatch(given)):
        value = float(match[1]) / 100
    elif isinstance(given, int | float) and not isinstance(given, bool):
        value = float(given)
    if not 0 <= value <= 1:
        raise PydanticCustomError("share", "a share: 0 to 1, or a text such as '0.1 %'")
    return value


Share = Annotated[
    float,
    BeforeValidator(_share),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": 1},
                {"type": "string", "pattern": f"^{_PERCENT.pattern}$"},
            ]
        }
    ),
]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def _field_pattern(given: object) -> object:
    """Refuse a name of the run record that nothing could ever have: a typo would pass for ever."""
    from fnmatch import fnmatchcase

    if isinstance(given, str) and not any(fnmatchcase(n, given) for n in REQUIRED_PROVENANCE):
        raise PydanticCustomError("field", "a field of the run record, or a pattern of such names")
    return given


FieldPattern = Annotated[Pattern, BeforeValidator(_field_pattern)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class ProvenanceRules(_Section):
    """What the run records have to know. Names may be patterns: ``numerics.*``."""

    known: list[FieldPattern] = Field(default=[], description="fields that may not be unknown")
    observed: list[FieldPattern] = Field(
        default=[], description="fields that have to be observed, not declared and not unknown"
    )
    imported: bool = Field(
        default=False, description="whether imported runs are accepted, which have no census (E403)"
    )


class LossRules(_Section):
    """How much of what was computed may be missing, per run."""

    max_dropped: Share | None = Field(
        default=None, description="dropped positions of those computed, at most"
    )
    max_aborted: Share | None = Field(
        default=None,
        description="aborted positions, that a step computed, of those computed, at most",
    )
    max_filtered: Share | None = Field(
        default=None, description="filtered positions of those computed, at most"
    )


class PrefixCacheRules(_Section):
    """What is accepted of a prefix cache."""

    allowed: bool = Field(default=True, description="whether the prefix cache may have been on")
    max_unresolved: Share | None = Field(
        default=None,
        description="prefix-cache hits that refer to no stored row, of all hits, at most",
    )


class NumericsRules(_Section):
    """In which precision the rows were computed and stored."""

    dtype: list[DType] | None = Field(
        default=None, description="types that the model may compute in"
    )
    stored: list[DType] | None = Field(default=None, description="types that the rows may have")
    quantization: list[Pattern] | None = Field(
        default=None, description="quantization methods, as patterns; none is a method too"
    )
    deterministic: bool | None = Field(
        default=None, description="whether torch has to have run deterministic algorithms, or not"
    )


class HarvestRules(_Section):
    """How, when and by whom the rows were written."""

    check: bool = Field(
        default=False, description="rows were compared with the model's own (--check)"
    )
    canary: bool = Field(
        default=False, description="requests of every run were replayed (--canary)"
    )
    max_age_days: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="days since the oldest run began, at most"
    )
    writers: list[Pattern] | None = Field(
        default=None, description="programs that may have written, as patterns: 'actds 0.1.*'"
    )
    engines: list[Pattern] | None = Field(
        default=None, description="engines and versions, as patterns: 'vllm 0.32.*'"
    )
    models: list[Pattern] | None = Field(default=None, description="names of models, as patterns")


class SignatureRules(_Section):
    """Who has to have signed the seal."""

    required: bool = Field(
        default=False,
        description="refuse a dataset without a good signature of a key of ACTDS_TRUSTED_KEYS",
    )
    keys: list[Pattern] | None = Field(
        default=None, description="files of public keys that are trusted, beside the policy file"
    )
    need: Annotated[int, Field(ge=1)] = Field(
        default=1, description="how many of the keys must have signed"
    )
    identity: Pattern | None = Field(
        default=None, description="who must have signed without a key: an address or a URI"
    )
    issuer: Pattern | None = Field(
        default=None, description="who must have vouched for the identity, a URL"
    )


class AuditRules(_Section):
    """What the audit may say."""

    worst: Literal["PASS", "WARN", "INCONCLUSIVE", "FAIL"] | None = Field(
        default=None,
        description="the worst level of a place that is accepted, from PASS to FAIL in this order",
    )
    accept: list[PlaceName] = Field(
        default=[], description="places where rows go that are waived, whatever their level"
    )


class Policy(_Section):
    """What a team refuses, beyond what is no valid dataset."""

    format: Literal["actds.policy"] = "actds.policy"
    version: Literal["1"] = "1"
    name: Annotated[str, StringConstraints(max_length=200)] = Field(
        default="", description="what reports call the policy; the name of its file without it"
    )
    level: Level = Field(
        default="full", description="how much is validated, unless an argument says it"
    )
    warnings: bool = Field(
        default=True, description="whether warnings of the validation are accepted"
    )
    provenance: ProvenanceRules = ProvenanceRules()
    losses: LossRules = LossRules()
    prefix_cache: PrefixCacheRules = PrefixCacheRules()
    numerics: NumericsRules = NumericsRules()
    harvest: HarvestRules = HarvestRules()
    signature: SignatureRules = SignatureRules()
    audit: AuditRules = AuditRules()


def read_policy(source: Policy | Mapping[str, Any] | str | os.PathLike[str]) -> Policy:
    """Return a policy from its TOML file, from its content as a mapping, or as it is.

    Raises:
        ActdsError: E020 it cannot be read, has an unknown rule, or a value that a rule cannot
            have; the place names the file, the line and the rule.
    """
    if isinstance(source, Policy):
        return source
    if isinstance(source, Mapping):
        return _parsed(source, "policy", "")
    path = Path(source)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
        text = data.decode()
    except OSError as error:
        raise _bad(str(path), error.strerror or str(error), "a readable file") from None
    except UnicodeDecodeError:
        raise _bad(str(path), "bytes that are no UTF-8", "a TOML file") from None
    if len(data) > MAX_NBYTES:
        raise _bad(str(path), f"more than {MAX_NBYTES} bytes", "a policy")
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _bad(str(path), str(error)[:200] or "too deep", "a TOML file") from None
    policy = _parsed(document, str(path), text)
    changed: dict[str, Any] = {} if policy.name else {"name": path.stem[:200]}
    if policy.signature.keys is not None:
        keys = [str(path.parent / key) for key in policy.signature.keys]
        changed["signature"] = policy.signature.model_copy(update={"keys": keys})
    return policy.model_copy(update=changed)


def _parsed(document: Mapping[str, Any], place: str, text: str) -> Policy:
    try:
        return Policy.model_validate(dict(document))
    except ValidationError as error:
        problems = error.errors(include_url=False)
    lines = [_line_of(text, [str(part) for part in problem["loc"]]) for problem in problems]
    first = min(range(len(problems)), key=lambda n: lines[n] or len(text))
    problem, more = problems[first], len(problems) - 1
    rule = ".".join(str(part) for part in problem["loc"])
    where = f"{place} line {lines[first]} {rule}" if lines[first] else f"{place} {rule}"
    got, expected = repr(problem.get("input"))[:120], problem["msg"]
    if problem["type"] == "extra_forbidden":
        got, expected = "an unknown rule", f"one of {', '.join(_known(problem['loc'][:-1]))}"
    raise _bad(where + (f" (and {more} more)" if more else ""), got, expected)


def _known(section: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Policy
    for part in section:
        kind = model.model_fields[str(part)].annotation
        assert isinstance(kind, type) and issubclass(kind, BaseModel), "sections are models"
        model = kind
    return list(model.model_fields)


def _line_of(text: str, rule: list[str]) -> int | None:
    """Return the line of a file in which a rule is set, which TOML readers do not tell."""
    section: list[str] = []
    best: tuple[int, int] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\[?([^\]]+)\]", line)
        key = re.match(r"\s*([\w\"'.-]+)\s*=", line)
        if header:
            section = _parts(header[1])
        names = section if header else [*section, *_parts(key[1])] if key else []
        if names and names == rule[: len(names)] and (best is None or len(names) > best[0]):
            best = len(names), number
    return best[1] if best else None


def _parts(key: str) -> list[str]:
    return [part.strip().strip("\"'") for part in key.split(".")]


def _bad(place: str, got: str, expected: str) -> ActdsError:
    return ActdsError("E020", place, got=got, expected=expected)
