"""Rules: what of a policy a valid dataset does not comply with.

What is not known is never taken for compliance: a rule that cannot be judged refuses, and so does
one about a fact that somebody only declared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from fnmatch import fnmatchcase

from actds.dataset.fates import fate_counts, n_computed
from actds.dataset.reading import Catalog
from actds.errors import CODES, ActdsError, Finding
from actds.format.schema import OpenBody, ProvenanceField, RunRecord
from actds_validators.audit.place import LEVELS, TITLES
from actds_validators.audit.result import Audit
from actds_validators.gate.policy import LossRules, Policy, SignatureRules


def check_signature(rules: SignatureRules, catalog: Catalog) -> Iterator[Finding]:
    """Yield why the seal of a dataset is not signed as the rules ask.

    Raises:
        ActdsError: E009 there is nobody to trust; E021 a key that cannot be used; E011 a package
            is not installed.

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


_NS_PER_DAY = 86_400_000_000_000
_AHEAD_DAYS = 300 / 86_400
"""How far the clock of another machine may be ahead of this one's: five minutes."""
_UNKNOWN = ProvenanceField(value=None, origin="unknown", reason="the run record lacks the field")


def refusals(
    policy: Policy,
    catalog: Catalog,
    runs: dict[str, dict[str, int]],
    audit: Audit | None = None,
    now_ns: int | None = None,
) -> list[Finding]:
    """Return the rules that a dataset does not comply with, each as a finding E701.

    Args:
        runs: totals by run, from the accounting; empty where it was not done.
        audit: what the audit says; None where it was not asked.
        now_ns: the wall clock; that of this machine when None.

    Returns:
        The findings; ``place`` is the rule, and the run that it is about.
    """
    now = time.time_ns() if now_ns is None else now_ns
    refused = [
        *_hooks(policy, catalog),
        *_writers(policy, catalog),
        *check_signature(policy.signature, catalog),
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
    """Yield every place of the audit's answer that is worse than the policy accepts."""
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

    Args:
        accounted: the dataset, ``None`` where the positions of the run were not accounted for.
    """
    names = [
        n for n in ("dropped", "aborted", "filtered") if getattr(rules, f"max_{n}") is not None
    ]
    if accounted is None:
        yield from (_not_accounted(f"losses.max_{name}", run) for name in names)
    elif names:
        fates = fate_counts(accounted.table("spans", run))
        for name in names:
            n = sum(count for (fate, _), count in fates.items() if fate == name)
            # What a rule left out is none of the computed positions that could have been stored.
            whole = n_computed(fates) + (n if name == "filtered" else 0)
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
