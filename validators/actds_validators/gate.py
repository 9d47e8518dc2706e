"""The gate: is a dataset valid, does it pass a team's policy, and may I train on it.

``require`` and ``actds validate`` name every reason against a dataset, also as JUnit XML, SARIF
2.1.0 and annotations of GitHub Actions. ``check`` validates and audits. Imported datasets have no
census to audit: there the rows themselves are read, and the answer is what can be said of rows
when nobody recorded how they were made. ``Attester`` signs a verdict, whatever it is.
"""

from __future__ import annotations

import json
import os
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from actds.dataset.catalog import Catalog
from actds.dataset.info import HookValues, values_in_words
from actds.dataset.reading import unknown_columns
from actds.errors import CODES, ActdsError, Finding, RefusedError
from actds.executor import ExecutorName
from actds.format import canonical
from actds.format.arrays import DTYPES
from actds.text import counted, printable
from actds.version import __version__
from actds_validators.audit.result import Audit, Limits
from actds_validators.policy import Policy, read_policy, refusals
from actds_validators.validate.shards import hash_rows
from actds_validators.validate.validation import LEVELS, Level, Progress, Validation, validate

if TYPE_CHECKING:
    from actds.exchange.doctor import Lack
    from actds.explore.dataset import Dataset
    from actds.publish.attestation import VerdictAttestation
    from actds_validators.audit.place import Level as AnswerLevel
    from actds_validators.audit.run import AuditResult

INVALID, UNREADABLE, REFUSED = 1, 3, 5
"""Exit codes beside 0: findings, not readable as a dataset, refused by the policy alone."""


@dataclass(frozen=True)
class Passage:
    """What the gate says of one dataset.

    Args:
        refused: the rules that it does not comply with; empty of a dataset that is not valid.
        verdict: level of the audit's answer; None where the policy does not ask for one.
    """

    validation: Validation
    policy: Policy | None = None
    refused: list[Finding] = field(default_factory=list)
    verdict: str | None = None
    strict: bool = False

    @property
    def exit_code(self) -> int:
        """Return 0 it passes, 1 it is not valid, 3 it cannot be read, 5 the policy refuses it."""
        return self.validation.exit_code(strict=self.strict) or (REFUSED if self.refused else 0)

    @property
    def reasons(self) -> list[Finding]:
        """Return everything that is against it, findings of the validation first."""
        findings = self.validation.errors + (self.validation.warnings if self.strict else [])
        return [*findings, *self.refused]

    def as_json(self) -> dict[str, Any]:
        """Return the facts as ``actds validate --json`` prints them."""
        facts = self.validation.as_json(strict=self.strict)
        facts |= {"ok": self.exit_code == 0, "exit_code": self.exit_code}
        if self.policy is not None:
            facts["policy"] = {
                "name": self.policy.name,
                "verdict": self.verdict,
                "refused": [finding.as_json() for finding in self.refused],
            }
        return facts


def judge(
    path: str | Path,
    *,
    level: Level | None = None,
    policy: Policy | None = None,
    strict: bool = False,
    progress: Progress = lambda what, amount: None,
    executor: ExecutorName = "threads",
    seal: str | None = None,
    validation: Validation | None = None,
    follow_up: str | Path | None = None,
) -> Passage:
    """Return what the gate says of a dataset.

    Args:
        level: how much is validated; that of the policy when None, ``full`` without one.
        validation: the validation, where there is one already.
        follow_up: as of ``audit``, where the policy asks for it.

    Raises:
        ActdsError: E009 a follow-up, and no audit; E011 a package of the audit is not installed; as
            ``validate`` and ``audit``.

    Spec: 0.1 section 12.
    """
    asks = policy is not None and policy.audit.worst is not None
    if follow_up is not None and not asks:
        got, expected = "a follow-up", "a policy with audit.worst, which it is for"
        raise ActdsError("E009", "follow_up", got=got, expected=expected)
    if asks:
        from actds_validators.sections import need_extra

        need_extra()  # before minutes of hashing
    strict = strict or (policy is not None and not policy.warnings)
    chosen: Level = level or (policy.level if policy is not None else "full")
    imported = policy is not None and policy.provenance.imported
    validated = validation or validate(path, chosen, progress, executor, seal, imported=imported)
    catalog = validated.catalog
    if policy is None or catalog is None or validated.exit_code(strict=strict):
        return Passage(validated, policy, strict=strict)
    result = None
    if asks and not any(map(catalog.is_imported, catalog.runs_with_data)):
        from actds_validators.audit.api import audit

        result = audit(path, accept=policy.audit.accept, follow_up=follow_up).result
    refused = refusals(policy, catalog, validated.runs, result)
    verdict = None if result is None else result.answer.level
    return Passage(validated, policy, refused, verdict, strict)


def require(
    path: str | os.PathLike[str],
    *,
    level: Level | None = None,
    policy: Policy | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    follow_up: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Return a dataset, opened, if it passes the gate; raise one error with every reason if not.

    ``actds.require("acts", policy="policy.toml")`` is the line before training.

    Args:
        path: the dataset's folder, or its URI.
        level: ``quick``, ``standard``, ``full`` or ``deep``, as of ``actds validate``; that of
            the policy when None, ``full`` without one.
        policy: what to refuse beyond what is no valid dataset: a TOML file, its content as a
            mapping, or a ``Policy``.
        follow_up: a replay of a random part of the requests of a lossy dataset, which the audit
            that the policy asks for estimates the losses from.

    Raises:
        RefusedError: E701 it is not valid, or the policy refuses it; ``reasons`` has every
            finding and every rule.
        ActdsError: E020 the policy cannot be used; E009 no such level; E101 to E107 there is no
            dataset, or its ``actds.json`` cannot be read; E011 a package of the audit is missing.

    Spec: 0.1 section 12.2.
    """
    import actds

    if level is not None and level not in LEVELS:
        expected = f"one of {', '.join(LEVELS)}"
        raise ActdsError("E009", "level", got=repr(level)[:80], expected=expected)
    rules = None if policy is None else read_policy(policy)
    again = None if follow_up is None else os.fspath(follow_up)
    passage = judge(os.fspath(path), level=level, policy=rules, follow_up=again)
    if passage.exit_code == UNREADABLE:
        raise passage.validation.findings[0].error()
    if passage.exit_code:
        n = len(passage.reasons)
        raise RefusedError(
            "E701",
            os.fspath(path),
            got=f"{n} reason{'' if n == 1 else 's'} against it",
            expected="a dataset that is valid" + (f" and passes {_called(rules)}" if rules else ""),
            next_step=passage.reasons[0].next_step,
            reasons=passage.reasons,
        )
    accepted = rules is not None and rules.provenance.imported
    return actds.open(os.fspath(path), i_accept_unprovenanced=accepted)


def _called(policy: Policy) -> str:
    return f"the policy {policy.name}" if policy.name else "the policy"


MAX_ZERO = Limits().max_loss
"""Share of the rows of a hook that may be all zero, as in the audit's place of values."""
_BLOCK_NBYTES = 1 << 24
_NOTHING_RECORDED = "nobody recorded how these rows were made"


@dataclass(frozen=True)
class ImportedHook:
    """The rows of a hook; ``n_repeated`` are bitwise copies of an earlier one, zeros are none."""

    name: str
    dtype: str
    d_model: int
    n_rows: int
    n_not_finite: int
    n_zero: int
    n_repeated: int


@dataclass(frozen=True)
class ImportedRows:
    """What can be said of an imported dataset.

    Args:
        accepted: whether the caller takes imported rows, by name.
        odd: which rows are not finite, zero or repeated, in words.
        lacks: what the set does not say, and what nobody can know without it.
    """

    accepted: bool
    sealed: bool
    hooks: list[ImportedHook]
    odd: list[str]
    lacks: list[Lack]

    @property
    def reason(self) -> str | None:
        """Return why not to train on the rows, in a few words; None where nothing says so."""
        if not self.accepted:
            return _NOTHING_RECORDED
        if not self.sealed:
            return "it is not sealed"
        for hook in self.hooks:
            for n, most, words in (
                (hook.n_not_finite, 0, "not finite"),
                (hook.n_zero, MAX_ZERO * hook.n_rows, "all zero"),
            ):
                if n > most:
                    return f"{n:,} of {hook.n_rows:,} rows of {hook.name} are {words}"
        return None

    @property
    def answer(self) -> str:
        """Return whether to train on them, in a few words."""
        return f"Not known: {_NOTHING_RECORDED}" if self.reason is None else f"No: {self.reason}"

    def as_json(self) -> dict[str, Any]:
        """Return it as ``actds check --json`` prints it."""
        return asdict(self)


def imported_rows(
    catalog: Catalog, *, accepted: bool, progress: Callable[[str], None] = lambda what: None
) -> ImportedRows | None:
    """Return what can be said of the rows, all of which are read; None where no run is imported.

    Takes 8 bytes of memory for a row. Raises E204 where a chunk is damaged.
    """
    runs = [run for run in catalog.runs_with_data if catalog.is_imported(run)]
    if not runs:
        return None
    from actds.explore.dataset import Dataset

    dataset = Dataset(catalog)
    hooks = []
    for name in dataset.hooks:
        progress(f"reading the rows of {name}")
        hooks.append(_read(dataset, name))
    counts = [HookValues(h.name, h.n_rows, h.n_not_finite, h.n_zero) for h in hooks]
    odd = [
        *values_in_words(counts),
        *(
            f"{hook.n_repeated:,} of {hook.n_rows:,} rows of {hook.name} are copies of another row"
            for hook in hooks
            if hook.n_repeated
        ),
    ]
    return ImportedRows(accepted, catalog.is_sealed, hooks, odd, list(_lacks(catalog, runs)))


def _read(dataset: Dataset, name: str) -> ImportedHook:
    rows = dataset.array(name)
    kind, d_model = DTYPES[rows.hook.dtype], rows.hook.d_model
    step = max(1, _BLOCK_NBYTES // (d_model * kind.itemsize))
    hashes = [np.zeros(0, np.uint64)]
    not_finite, zero = 0, 0
    for start in range(0, len(rows), step):
        bits = rows.bits(start, min(start + step, len(rows)))
        is_zero = ~(bits & kind.magnitude).any(axis=1)
        not_finite += int(((bits & kind.exponent) == kind.exponent).any(axis=1).sum())
        zero += int(is_zero.sum())
        hashes.append(hash_rows(bits[~is_zero]))
    every = np.concatenate(hashes)
    repeated = len(every) - len(np.unique(every))
    return ImportedHook(name, rows.hook.dtype, d_model, len(rows), not_finite, zero, repeated)


def _lacks(catalog: Catalog, runs: list[str]) -> Iterator[Lack]:
    from actds.exchange.doctor import lacks_of_columns, lacks_of_every_set

    records = [catalog.runs[run] for run in runs]
    yield from lacks_of_columns(set().union(*map(unknown_columns, records)))
    if not all("import.dataset_digest" in record.fields for record in records):
        # Its digests are those of the import: of what it was before nobody knows.
        yield from lacks_of_every_set()


# The verdicts that are no reason to train on it as it is.
_FAILING = {False: {"FAIL"}, True: {"FAIL", "INCONCLUSIVE", "WARN"}}


@dataclass(frozen=True)
class CheckResult:
    """What ``actds check`` says.

    Args:
        validation: the validation at level ``full``.
        audit: the audit; None of a dataset that is not valid, which nothing can be said about,
            and of an imported one, which has no census to audit.
        imported: what can be said of imported rows; None where there are none.
    """

    validation: Validation
    audit: AuditResult | None
    imported: ImportedRows | None = None

    @property
    def is_valid(self) -> bool:
        return self.validation.exit_code() == 0

    @property
    def answer(self) -> str:
        """Return whether to train on it, in a few words."""
        if self.audit is not None:
            return self.audit.result.answer.words
        if self.imported is not None:
            return self.imported.answer
        if self.validation.dataset is None:
            return "No: it cannot be read as a dataset"
        return "No: it is not valid"

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 0 valid and the answer is not no, 1 otherwise, 3 not readable as a dataset.

        Args:
            strict: warnings, and every answer but yes, end with 1 as well.
        """
        return self.validation.exit_code(strict=strict) or int(self.verdict in _FAILING[strict])

    @property
    def verdict(self) -> AnswerLevel | None:
        """Return the level of the answer; None of a dataset that is not valid."""
        if self.imported is not None:
            return "INCONCLUSIVE" if self.imported.reason is None else "FAIL"
        return None if self.audit is None else self.audit.result.answer.level

    def as_json(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the result as ``actds check --json`` prints it."""
        result = None if self.audit is None else self.audit.result
        return {
            "path": self.validation.path,
            "strict": strict,
            "ok": self.exit_code(strict=strict) == 0,
            "exit_code": self.exit_code(strict=strict),
            "valid": self.is_valid,
            "verdict": self.verdict,
            "answer": self.answer,
            "validation": self.validation.as_json(strict=strict),
            "audit": None if result is None else result.as_json(),
            "imported": None if self.imported is None else self.imported.as_json(),
        }


def check(
    path: str | Path,
    *,
    accept: Sequence[str] = (),
    i_accept_unprovenanced: bool = False,
    follow_up: str | Path | None = None,
    validating: Progress = lambda what, amount: None,
    auditing: Callable[[str], None] = lambda what: None,
) -> CheckResult:
    """Validate a dataset with every byte of it, then audit it if it is valid.

    An imported dataset has no census to audit: its rows are read, and the answer is what can be
    said of them.

    Args:
        path: the dataset.
        accept: places that are waived by name, as of ``audit``.
        i_accept_unprovenanced: take imported rows: then the answer is no only where something
            speaks against the rows themselves, and else that it is not known.
        follow_up: as of ``audit``.
        validating: as ``progress`` of ``validate``.
        auditing: as ``progress`` of ``audit``.

    Raises:
        ActdsError: E011 a package of the audit is not installed; and as ``audit``.

    Spec: 0.1 sections 12 and 14.
    """
    from actds_validators.audit.api import audit
    from actds_validators.sections import need_extra

    need_extra()  # before minutes of hashing
    validation = validate(path, "full", validating, imported=i_accept_unprovenanced)
    if validation.catalog and {finding.code for finding in validation.errors} <= {"E306", "E403"}:
        rows = imported_rows(validation.catalog, accepted=i_accept_unprovenanced, progress=auditing)
        if rows is not None:
            return CheckResult(validation, None, rows)
    if validation.exit_code():
        return CheckResult(validation, None)
    audited = audit(path, accept=accept, follow_up=follow_up, progress=auditing)
    return CheckResult(validation, audited)


class Attester:
    """Signs verdicts on datasets; what cannot be signed or written is refused before the work.

    Args:
        paths: the datasets.
        key: PEM file of an Ed25519 private key; None: nothing is attested.
        policy: file of the policy that they are compared with, if any.

    Raises:
        ActdsError: E021 a key that cannot be used; E503 a dataset that cannot be written; E011.

    Spec: 0.1 section 15.8.
    """

    def __init__(self, paths: Sequence[str], key: str | None, policy: str | None = None) -> None:
        from actds.publish.attestation import attester

        self._signers = {} if key is None else {path: attester(path, key) for path in paths}
        data = Path(policy).read_bytes() if policy is not None and self._signers else b""
        self._policy_sha256 = canonical.digest(data)

    def put(self, path: str, result: Passage | CheckResult | AuditResult) -> str | None:
        """Add a verdict to the attestations; return what was done in words, None without a key.

        Raises:
            ActdsError: as ``put_attestation``.
        """
        from actds.publish.attestation import put_attestation

        if path not in self._signers:
            return None
        document = verdict_of(result, self._policy_sha256)
        if document is None:
            return f"not attested: no seal covers the whole of {path}"
        file = put_attestation(path, document, self._signers[path])
        return f"attested: {document.verdict}, in {os.path.join(path, file)}"


def verdict_of(
    result: Passage | CheckResult | AuditResult, policy_sha256: str
) -> VerdictAttestation | None:
    """Return what is attested of a verdict (15.8); None of a dataset that no seal covers."""
    from actds.publish.attestation import VerdictAttestation

    facts: dict[str, Any] = {"validation": None, "audit": None}
    of: Validation | Audit
    if isinstance(result, Passage):
        of, facts["kind"] = result.validation, "validation"
        facts |= {"verdict": _verdict(result), "reason": _counts(result)}
        facts["validation"] = _validation_facts(result, policy_sha256)
    elif isinstance(result, CheckResult):
        of, facts["kind"] = result.validation, "check"
        facts |= {"verdict": result.verdict or "not valid", "reason": result.answer}
        facts["validation"] = _validation_facts(Passage(of), "")
        facts["audit"] = None if result.audit is None else _audit_facts(result.audit.result)
    else:
        of, facts["kind"] = result.result, "audit"
        facts |= {"verdict": of.answer.level, "reason": of.answer.words, "audit": _audit_facts(of)}
    if of.seal is None:
        return None
    facts |= {"dataset": of.dataset, "seal": of.seal, "digest": of.digest}
    facts |= {"software": f"actds {__version__}", "attested_ns": time.time_ns()}
    return VerdictAttestation(format="actds.verdict", version="1", **facts)


def _verdict(passage: Passage) -> str:
    passed = "no error" if passage.validation.not_read else "valid"
    return {0: passed, REFUSED: "refused"}.get(passage.exit_code, "not valid")


def _counts(passage: Passage) -> str:
    validation, n_refused = passage.validation, len(passage.refused)
    parts = [counted(len(validation.errors), "error"), counted(len(validation.warnings), "warning")]
    parts += [f"{counted(n_refused, 'rule')} of the policy not met"] if n_refused else []
    return ", ".join([*parts, *filter(None, [validation.not_read])])


def _validation_facts(passage: Passage, policy_sha256: str) -> dict[str, Any]:
    validation = passage.validation
    policy: dict[str, Any] | None = None
    if passage.policy is not None:
        rules = sorted({finding.place for finding in passage.refused})
        policy = {"name": passage.policy.name, "sha256": policy_sha256}
        policy |= {"refused": rules, "audit": passage.verdict}
    findings = Counter((f.code, f.severity) for f in [*validation.findings, *passage.refused])
    return {
        "level": validation.level,
        "strict": passage.strict,
        "pinned": validation.pinned,
        "policy": policy,
        "findings": [{"code": c, "severity": s, "n": n} for (c, s), n in sorted(findings.items())],
    }


def _audit_facts(audit: Audit) -> dict[str, Any]:
    default, classes, follow_up = Limits(), audit.options.classes, audit.follow_up
    limits = audit.limits.model_dump().items()
    given = {} if classes is None else {"classes": classes.sha256}
    return {
        "answer": audit.answer.model_dump(),
        "places": [place.model_dump() for place in audit.places],
        "limits": {name: value for name, value in limits if value != getattr(default, name)},
        "given": given | ({} if follow_up is None else {"follow_up": follow_up.digest}),
    }


_SARIF = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_SARIF_LEVELS = {"error": "error", "warning": "warning", "note": "note"}
_GITHUB_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


def junit(passages: Sequence[Passage]) -> str:
    """Return JUnit XML: a suite per dataset, a case per check and one for the policy."""
    root = ET.Element("testsuites", name="actds validate")
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for passage in passages:
        suite = _suite(passage)
        root.append(suite)
        for name in totals:
            totals[name] += int(suite.get(name, "0"))
    for name, value in totals.items():
        root.set(name, str(value))
    root.set("time", f"{sum(passage.validation.duration_s for passage in passages):.3f}")
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(passage: Passage) -> ET.Element:
    validation = passage.validation
    suite = ET.Element("testsuite", name=printable(validation.path))
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}

    def case(name: str, findings: list[Finding], state: str, detail: str = "") -> None:
        counts["tests"] += 1
        # The whole time belongs to the suite: checks share what they read.
        element = ET.SubElement(
            suite, "testcase", classname=printable(validation.path), name=name, time="0.000"
        )
        if state == "skipped":
            counts["skipped"] += 1
            ET.SubElement(element, "skipped", message=printable(detail))
        elif state in ("failed", "unreadable"):
            counts["failures" if state == "failed" else "errors"] += 1
            tag = "failure" if state == "failed" else "error"
            lines = [printable(finding.line()) for finding in findings]
            message = lines[0] if len(lines) == 1 else counted(len(lines), "finding")
            failure = ET.SubElement(
                element, tag, type=findings[0].code if findings else "", message=message
            )
            failure.text = "\n".join(lines)
        elif findings:
            ET.SubElement(element, "system-out").text = "\n".join(
                f"{finding.severity} {printable(finding.line())}" for finding in findings
            )

    unreadable = passage.exit_code == UNREADABLE
    for check in validation.checks:
        matches = validation.found_by(check.name)
        state: str = "unreadable" if unreadable and check.state == "failed" else check.state
        if state == "passed" and passage.strict and any(f.severity == "warning" for f in matches):
            state = "failed"
        case(check.name, matches, state, check.detail)
    if passage.policy is not None:
        name = f"policy {printable(passage.policy.name)}".strip()
        if validation.exit_code(strict=passage.strict):
            case(name, [], "skipped", "only a valid dataset is compared with a policy")
        else:
            case(name, passage.refused, "failed" if passage.refused else "passed")
    for key, value in counts.items():
        suite.set(key, str(value))
    suite.set("time", f"{validation.duration_s:.3f}")
    return suite


def sarif(passages: Sequence[Passage]) -> str:
    """Return a SARIF 2.1.0 log: one run of the tool, a result per finding."""
    findings = [(passage, finding) for passage in passages for finding in _all(passage)]
    codes = sorted({finding.code for _, finding in findings})
    number = {code: n for n, code in enumerate(codes)}
    driver = {"name": "actds", "version": __version__, "rules": [_rule(code) for code in codes]}
    readable = all(passage.exit_code != UNREADABLE for passage in passages)
    run = {
        "tool": {"driver": driver},
        "columnKind": "utf16CodeUnits",
        "invocations": [{"executionSuccessful": readable}],
        "results": [_result(passage, finding, number) for passage, finding in findings],
    }
    log = {"$schema": _SARIF, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, sort_keys=True) + "\n"


def _all(passage: Passage) -> Iterator[Finding]:
    yield from passage.validation.findings
    yield from passage.refused


def _rule(code: str) -> dict[str, Any]:
    entry = CODES[code]
    return {
        "id": code,
        "name": "".join(word.capitalize() for word in entry.title.replace("-", " ").split()),
        "shortDescription": {"text": entry.title},
        "fullDescription": {"text": entry.meaning},
        "help": {"text": entry.next_step},
        "properties": {"tags": [entry.family]},
    }


def _result(passage: Passage, finding: Finding, number: dict[str, int]) -> dict[str, Any]:
    place = printable(finding.place)
    text = f"{finding.place}: {finding.got}; expected {finding.expected}. {finding.next_step}"
    location = {
        "physicalLocation": {"artifactLocation": {"uri": quote(_file(passage, finding))}},
        "logicalLocations": [{"fullyQualifiedName": place}],
    }
    return {
        "ruleId": finding.code,
        "ruleIndex": number[finding.code],
        "level": _SARIF_LEVELS[finding.severity],
        "message": {"text": printable(text)},
        "locations": [location],
        "partialFingerprints": {"actds/v1": f"{finding.code} {place}"},
    }


def _file(passage: Passage, finding: Finding) -> str:
    """Return the file that a finding is about; its dataset where it names none."""
    path = passage.validation.path
    place = finding.place.split(" ")[0]
    if finding.code == "E701" or ("/" not in place and not place.endswith(".json")):
        return path
    return os.path.join(path, place)


def github(passages: Sequence[Passage]) -> str:
    """Return workflow commands of GitHub Actions: an annotation per finding, the verdict last."""
    lines = []
    for passage in passages:
        for finding in _all(passage):
            level = _GITHUB_LEVELS[finding.severity]
            if passage.strict and level == "warning":
                level = "error"
            title = f"{finding.code} {CODES[finding.code].title}"
            place = f"file={_property(_file(passage, finding))},title={_property(title)}"
            text = f"{finding.place}: {finding.got}; expected {finding.expected}."
            lines.append(f"::{level} {place}::{_message(f'{text} Next: {finding.next_step}')}")
    for passage in passages:
        state = "passes" if passage.exit_code == 0 else f"exit {passage.exit_code}"
        lines.append(printable(f"{passage.validation.path}: {state}"))
    return "\n".join(lines) + "\n"


def _message(text: str) -> str:
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
