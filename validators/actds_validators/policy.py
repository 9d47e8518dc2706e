"""Policies: a TOML file in which a team says which datasets it does not train on."""

from __future__ import annotations

import math
import os
import re
import time
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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

from actds.dataset.catalog import Catalog
from actds.dataset.fates import fate_counts, n_computed
from actds.dataset.info import sample_of_run
from actds.errors import CODES, ActdsError, Finding
from actds.format.schema import REQUIRED_PROVENANCE, DType, OpenBody, ProvenanceField, RunRecord
from actds_validators.audit.place import LEVELS, TITLES, PlaceName
from actds_validators.audit.result import Audit
from actds_validators.validate.validation import Level

if TYPE_CHECKING:
    from actds.publish.attestation import Attestation

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
    max_thinned: Share | None = Field(
        default=None,
        description="positions not drawn (--overflow thin) of those computed, at most: no other "
        "rule counts them",
    )
    min_effective: Share | None = Field(
        default=None,
        description="effective rows of the stored ones, weighted by 1 / inclusion, at least",
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


class _KeyRules(_Section):
    required: bool = Field(
        default=False,
        description="refuse a dataset without one that a key of ACTDS_TRUSTED_KEYS signed",
    )
    keys: list[Pattern] | None = Field(
        default=None, description="files of public keys that are trusted, beside the policy file"
    )
    need: Annotated[int, Field(ge=1)] = Field(
        default=1, description="how many of the keys must have signed"
    )


class SignatureRules(_KeyRules):
    """Who has to have signed the seal."""

    identity: Pattern | None = Field(
        default=None, description="who must have signed without a key: an address or a URI"
    )
    issuer: Pattern | None = Field(
        default=None, description="who must have vouched for the identity, a URL"
    )


class AttestationRules(_KeyRules):
    """Who has to have served a random part again, and found the model and precision on record."""

    min_fraction: Share = Field(default=0.0, description="probability of a request, at least")
    min_requests: Annotated[int, Field(ge=0)] = Field(
        default=0, description="requests that were compared, at least"
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
    attestation: AttestationRules = AttestationRules()
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
    rules: SignatureRules | AttestationRules
    for section, rules in (("signature", policy.signature), ("attestation", policy.attestation)):
        if rules.keys is not None:
            keys = [str(path.parent / key) for key in rules.keys]
            changed[section] = rules.model_copy(update={"keys": keys})
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


def check_signature(rules: SignatureRules, catalog: Catalog) -> Iterator[Finding]:
    """Yield why the seal of a dataset is not signed as the rules ask.

    Raises E009 nobody to trust, E021 a key that cannot be used, E011 a package not installed.

    Spec: 0.1 section 15.4.
    """
    if not rules.required and rules.keys is None and rules.identity is None:
        return
    from actds.publish.signing import verify

    try:
        verify(
            catalog.store.uri,
            rules.keys or (),
            need=rules.need,
            identity=rules.identity,
            issuer=rules.issuer,
        )
    except ActdsError as error:
        if CODES[error.code].family != "trust":
            raise
        rule = "signature.keys" if rules.keys is not None else "signature.required"
        rule = rule if rules.identity is None else "signature.identity"
        yield Finding("E701", rule, f"{error.code} {error.got}"[:400], error.expected[:400])


def check_attestations(rules: AttestationRules, catalog: Catalog) -> Iterator[Finding]:
    """Yield why a replay of a random part is not attested as the rules ask.

    One trusted key that found another model outweighs any number that found the same.

    Raises as ``check_signature``.

    Spec: 0.1 section 15.7.
    """
    if rules == AttestationRules():
        return
    from actds.publish.attestation import attestations
    from actds.publish.signing import trusted_of

    rule = "attestation.keys" if rules.keys is not None else "attestation.required"
    trusted = trusted_of(rules.keys or (), catalog.store, rules.need)
    try:
        attested = list(attestations(catalog, trusted))
    except ActdsError as error:
        if CODES[error.code].family not in ("trust", "structure"):
            raise
        yield Finding("E701", rule, f"{error.code} {error.got}"[:400], error.expected[:400])
        return
    accepted: set[str] = set()
    lacking = []
    for attestation, keys in attested:
        names = ", ".join(key.keyid[:16] for key in keys)
        if attestation.verdict == "another":
            got = f"key {names} attests: {attestation.reason}"
            yield Finding("E701", rule, got[:400], "no trusted key that attests another model")
        lacks = _too_little(rules, attestation)
        if lacks is None:
            accepted |= {key.keyid for key in keys}
        else:
            lacking.append(f"that of key {names}: {lacks}")
    if len(accepted) < rules.need:
        got = "; ".join([f"attestations of {len(accepted)} trusted keys", *lacking])
        expected = f"those of {rules.need}: actds attest PATH --model FOLDER --key FILE"
        yield Finding("E701", rule, got[:400], expected)


def _too_little(rules: AttestationRules, attestation: Attestation) -> str | None:
    """Return what an attestation lacks, None where it is as the rules ask."""
    if attestation.verdict != "same":
        return attestation.verdict
    if attestation.fraction < rules.min_fraction:
        return f"a fraction of {attestation.fraction:g}"
    if attestation.n_requests < rules.min_requests:
        return f"{attestation.n_requests} requests"
    return None


_NS_PER_DAY = 86_400_000_000_000
_AHEAD_DAYS = 300 / 86_400
"""How far the clock of another machine may be ahead of this one's: five minutes."""
_UNKNOWN = ProvenanceField(value=None, origin="unknown", reason="the run record lacks the field")


def refusals(
    policy: Policy, catalog: Catalog, runs: dict[str, dict[str, int]], audit: Audit | None = None
) -> list[Finding]:
    """Return the rules that a dataset does not comply with, each as a finding E701.

    Args:
        runs: totals by run, from the accounting; empty where it was not done.
        audit: what the audit says; None where it was not asked.
    """
    now = time.time_ns()
    refused = [
        *_hooks(policy, catalog),
        *_writers(policy, catalog),
        *check_signature(policy.signature, catalog),
        *check_attestations(policy.attestation, catalog),
    ]
    for run in catalog.runs_with_data:
        record = catalog.runs.get(run)
        if record is None:
            continue  # E401, a finding of the validation
        refused += _provenance(policy, run, record)
        refused += _numerics(policy, run, record)
        refused += _harvest(policy, catalog, run, record, now)
        refused += _prefix_cache(policy, run, record, runs.get(run))
        refused += _losses(policy.losses, run, catalog if run in runs else None)
    return [*refused, *_audit(policy, audit)]


def _audit(policy: Policy, audit: Audit | None) -> Iterator[Finding]:
    worst = policy.audit.worst
    if worst is None:
        return
    expected = f"{worst} or better"
    if audit is None:
        got = "no verdict: no imported run has a census to audit"
        yield _refused("audit.worst", got, expected)
    elif not audit.places and LEVELS.index(audit.answer.level) > LEVELS.index(worst):
        yield _refused("audit.worst", f"{audit.answer.level}: {audit.answer.sentence}", expected)
    for place in audit.places if audit is not None else ():
        if LEVELS.index(place.counts_as) > LEVELS.index(worst):
            got = f"{place.counts_as}: {place.headline}"
            yield _refused(f"audit.worst ({TITLES[place.name]})", got, expected)


def _refused(rule: str, got: str, expected: str, run: str | None = None) -> Finding:
    place = rule if run is None else f"{rule} (run {run})"
    return Finding("E701", place, got[:400], expected[:400])


def _provenance(policy: Policy, run: str, record: RunRecord) -> Iterator[Finding]:
    for rule in ("known", "observed"):
        for pattern in getattr(policy.provenance, rule):
            for name in sorted(n for n in record.fields if fnmatchcase(n, pattern)):
                field = record.fields[name]
                if field.origin == "unknown" or (rule == "observed" and field.origin != rule):
                    got = f"{name} {_said(field)}"
                    expected = "a known value" if rule == "known" else "an observed value"
                    yield _refused(f"provenance.{rule}", got, expected, run)


def _said(field: ProvenanceField) -> str:
    if field.origin == "unknown":
        return f"unknown: {field.reason}"
    return f"{str(field.value)[:120]}, {field.origin}"


def _numerics(policy: Policy, run: str, record: RunRecord) -> Iterator[Finding]:
    rules = policy.numerics
    for name in ("dtype", "quantization"):
        allowed: list[str] | None = getattr(rules, name)
        if allowed is not None:
            field = _field(record, f"{'model' if name == 'quantization' else 'numerics'}.{name}")
            yield from _listed(f"numerics.{name}", field, allowed, run)
    if rules.deterministic is not None:
        field = _field(record, "numerics.deterministic")
        if _observed(field) is not rules.deterministic:
            wanted = "true, observed" if rules.deterministic else "false, observed"
            yield _refused("numerics.deterministic", _said(field), wanted, run)


def _field(record: RunRecord, name: str) -> ProvenanceField:
    return record.fields.get(name, _UNKNOWN)


def _observed(field: ProvenanceField) -> object:
    """Return the value of a field that a program has seen; None for one that was only declared."""
    return field.value if field.origin == "observed" else None


def _listed(rule: str, field: ProvenanceField, allowed: list[str], run: str) -> Iterator[Finding]:
    # One value may name several: hooks of different types.
    value = _observed(field)
    if value is None or not any(fnmatchcase(str(value), pattern) for pattern in allowed):
        yield _refused(rule, _said(field), f"one of {', '.join(allowed)}, observed", run)


def _hooks(policy: Policy, catalog: Catalog) -> Iterator[Finding]:
    stored = policy.numerics.stored
    for hook in catalog.genesis.hooks if stored is not None else []:
        if hook.dtype not in (stored or []):
            got = f"hook {hook.name} of {hook.dtype}"
            yield _refused("numerics.stored", got, f"one of {', '.join(stored or [])}")


def _harvest(
    policy: Policy, catalog: Catalog, run: str, record: RunRecord, now_ns: int
) -> Iterator[Finding]:
    rules = policy.harvest
    check = _field(record, "capture.check")
    if rules.check and _observed(check) in (None, "none"):
        yield _refused("harvest.check", _said(check), "rows compared with the model's own", run)
    if rules.canary and not sum(part.n_rows for part in catalog.parts.get((run, "canary"), [])):
        yield _refused("harvest.canary", "no replayed row", "a table canary with rows", run)
    if rules.max_age_days is not None and catalog.is_imported(run):
        got, expected = "unknown: imported", f"at most {rules.max_age_days:g} days"
        yield _refused("harvest.max_age_days", got, expected, run)
    elif rules.max_age_days is not None:
        days = (now_ns - record.started_ns) / _NS_PER_DAY
        if not -_AHEAD_DAYS <= days <= rules.max_age_days:
            got = f"{days:.1f} days" if days > 0 else f"a begin {-days:.2g} days from now"
            expected = f"at most {rules.max_age_days:g} days"
            yield _refused("harvest.max_age_days", got, expected, run)
    if rules.models is not None:
        yield from _listed("harvest.models", _field(record, "model.name"), rules.models, run)
    if rules.engines is not None:
        name, version = (_observed(_field(record, f"engine.{n}")) for n in ("name", "version"))
        engine = f"{name or 'unknown'} {version or 'unknown'}"
        if not any(fnmatchcase(engine, pattern) for pattern in rules.engines):
            yield _refused("harvest.engines", engine, f"one of {', '.join(rules.engines)}", run)


def _writers(policy: Policy, catalog: Catalog) -> Iterator[Finding]:
    """Yield the programs that wrote a chain of a run and are not among those that may."""
    allowed = policy.harvest.writers
    if allowed is None:
        return
    wrote = {catalog.genesis.writer}
    for chain in catalog.chains.values():
        opening = chain.records[0].typed_body() if chain.records else None
        if isinstance(opening, OpenBody) and opening.kind != "tool":
            wrote.add(opening.software)
    for program in sorted(wrote):
        if not any(fnmatchcase(program, pattern) for pattern in allowed):
            yield _refused("harvest.writers", program, f"one of {', '.join(allowed)}")


def _prefix_cache(
    policy: Policy, run: str, record: RunRecord, totals: dict[str, int] | None
) -> Iterator[Finding]:
    rules = policy.prefix_cache
    on = _field(record, "serving.prefix_caching")
    if not rules.allowed and _observed(on) is not False:
        yield _refused("prefix_cache.allowed", _said(on), "the prefix cache off", run)
    if rules.max_unresolved is not None:
        rule = "prefix_cache.max_unresolved"
        if totals is None:
            yield _not_accounted(rule, run)
        elif totals["cache_ref"]:
            share = totals["unresolved"] / totals["cache_ref"]
            got = f"{share:.4%} of {totals['cache_ref']:,} prefix-cache hits without a stored row"
            yield from _at_most(rule, share, rules.max_unresolved, got, run)


def _losses(rules: LossRules, run: str, accounted: Catalog | None) -> Iterator[Finding]:
    """Yield the shares above their limits, of the same positions as in the audit.

    ``accounted`` is None where the positions of the run were not accounted for.
    """
    limits = ("max_dropped", "max_aborted", "max_filtered", "max_thinned", "min_effective")
    used = [limit for limit in limits if getattr(rules, limit) is not None]
    names = [limit.removeprefix("max_") for limit in used if limit != "min_effective"]
    if accounted is None:
        yield from (_not_accounted(f"losses.{limit}", run) for limit in used)
        return
    if rules.min_effective is not None and (sample := sample_of_run(accounted, run)) is not None:
        part = sample.effective_rows / sample.n_rows
        if part < rules.min_effective:
            expected = f"at least {rules.min_effective:.4%} of the stored rows"
            yield _refused("losses.min_effective", f"{part:.4%}: {sample}", expected, run)
    if names:
        fates = fate_counts(accounted.table("spans", run))
        for name in names:
            n = sum(count for (fate, _), count in fates.items() if fate == name)
            # What a rule or the draw left out is none of the positions that could have been stored.
            whole = n_computed(fates) + (n if name in ("filtered", "thinned") else 0)
            share = n / whole if whole else 0.0
            got = f"{share:.4%} of {whole:,} computed positions {name}"
            yield from _at_most(
                f"losses.max_{name}", share, getattr(rules, f"max_{name}"), got, run
            )


def _at_most(rule: str, share: float, limit: float, got: str, run: str) -> Iterator[Finding]:
    if share > limit:
        yield _refused(rule, got, f"at most {limit:.4%}", run)


def _not_accounted(rule: str, run: str) -> Finding:
    expected = "level standard or above, and tables that can be read"
    return _refused(rule, "positions that are not accounted for", expected, run)
