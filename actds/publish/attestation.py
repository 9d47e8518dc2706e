"""Attestations: what a replay of requests, a validation or an audit said of a dataset, signed.

Each is an in-toto statement about a seal in a DSSE envelope, one a line of a file beside the seal.
Who reads one believes it for its key alone: nothing here repeats what was done.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from actds.dataset.catalog import Catalog
from actds.dataset.reading import read_dataset
from actds.errors import ActdsError, Severity
from actds.format import canonical
from actds.publish.card import AuditAnswer, AuditPlace
from actds.publish.envelope import (
    MAX_ENVELOPE_NBYTES,
    MAX_SIGNATURES,
    Judgement,
    TrustedKey,
    judge,
    of_form,
    parse,
    signer,
    with_signature,
)
from actds.publish.sealing import STATEMENT_TYPE
from actds.store import Store, layout, local_folder, open_for_writing
from actds.store.local import lock_dataset
from actds.text import when

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

MAX_ATTESTATIONS = MAX_SIGNATURES
AnswerName = Literal["same", "another", "cannot tell"]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
Distance = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HookScore(_Part):
    """What was compared at one hook; distances are relative L2, medians over requests."""

    hook: str
    n_pairs: Count = Field(description="rows with a readout in the dataset and in both replays")
    distance: Distance = Field(description="of the dataset from the reference replay")
    floor: Distance = Field(
        description="of the first replay from the reference, at least that of the type"
    )
    ratio: Distance = Field(description="distance over floor")
    low: Distance = Field(description="lower end of its interval, of all hooks at once")
    high: Distance = Field(description="upper end")
    n_far: Count = Field(description="pairs that are another row, or that of another hook")


class Power(_Part):
    """Whether a copy of the model with rounded weights would have been found at these requests."""

    bits: Annotated[int, Field(ge=1)]
    distance: Distance = Field(description="expected of such a copy from the reference")
    seen: bool


class Attestation(_Part):
    """The answer of a replay of a random part of a dataset, and what decided it."""

    predicate_type: ClassVar[str] = "actds:replay/0.1"
    kind: ClassVar[str] = "replay"
    format: Literal["actds.attest"] = "actds.attest"
    version: Literal["1"] = "1"
    dataset: str
    seal: Annotated[int, Field(ge=1)]
    digest: Digest = Field(description="of the seal")
    verdict: AnswerName = Field(
        description="same: model and precision as recorded; another: not; or cannot tell"
    )
    reason: str
    fraction: Annotated[float, Field(gt=0, le=1)] = Field(description="probability of a request")
    seed: Count
    n_requests: Count = Field(description="requests that were compared")
    n_skipped: Count = Field(description="drawn, and not to be served again, or without a pair")
    far_requests: list[str] = Field(description="requests whose readouts are of other rows")
    served: dict[str, str | None] = Field(
        description="fields of the run record of the first replay: model, precision, engine"
    )
    hooks: list[HookScore]
    power: list[Power]
    not_seen: list[str] = Field(description="what no such replay can find")

    @property
    def looked_at(self) -> str:
        return f"{self.n_requests} requests replayed, a fraction of {self.fraction}"


class FindingCount(_Part):
    """How many findings have a code."""

    code: Annotated[str, Field(pattern="^E[0-9]{3}$")]
    severity: Severity
    n: Annotated[int, Field(ge=1)]


class AppliedPolicy(_Part):
    """The policy that a dataset was compared with."""

    name: str
    sha256: Digest = Field(description="of its file")
    refused: list[str] = Field(description="rules that the dataset does not comply with")
    audit: str | None = Field(description="level of the audit's answer; null where not asked for")


class ValidationFacts(_Part):
    """How a dataset was validated, and the findings by code."""

    level: Literal["quick", "standard", "full", "deep"]
    strict: bool = Field(description="whether warnings counted as errors")
    pinned: int | None = Field(description="number of the pinned seal that it extends, if any")
    policy: AppliedPolicy | None
    findings: list[FindingCount]


class AuditFacts(_Part):
    """The answer of an audit, and what could have made it another one."""

    answer: AuditAnswer
    places: list[AuditPlace]
    limits: dict[str, float] = Field(description="those that are not the default")
    given: dict[str, Digest] = Field(description="digests of the classes and of the follow-up")


class VerdictAttestation(_Part):
    """The verdict of a validation, an audit or both on a sealed dataset, and what decided it."""

    predicate_type: ClassVar[str] = "actds:verdict/0.1"
    format: Literal["actds.verdict"]
    version: Literal["1"]
    dataset: str
    seal: Annotated[int, Field(ge=1)]
    digest: Digest = Field(description="of the seal")
    kind: Literal["validation", "audit", "check"] = Field(
        description="check: a validation, and an audit of what is valid"
    )
    verdict: Literal[
        "valid", "no error", "not valid", "refused", "PASS", "WARN", "INCONCLUSIVE", "FAIL"
    ] = Field(
        description="of a validation: no error where not every byte was read, refused by the "
        "policy alone; of an audit: the level of its answer"
    )
    reason: str
    validation: ValidationFacts | None = Field(description="null of an audit alone")
    audit: AuditFacts | None = Field(description="null where there was none")
    software: str = Field(description="program and version")
    attested_ns: Count = Field(description="when, by the clock of who attests")

    @property
    def looked_at(self) -> str:
        words: list[str] = [self.kind]
        if (of := self.validation) is not None:
            words[0] += f" at level {of.level}"
            words += ["warnings counted"] if of.strict else []
            words += [f"policy {p.name} sha256:{p.sha256}" for p in [of.policy] if p is not None]
        if self.audit is not None:
            words += [f"limit {name} {value:g}" for name, value in self.audit.limits.items()]
            words += [f"{place.name} accepted" for place in self.audit.places if place.accepted]
        return ", ".join([*words, self.software, when(self.attested_ns)])


Document = Attestation | VerdictAttestation


def statement(attestation: Document) -> bytes:
    """Return the statement that is signed (15.7, 15.8), canonical JSON; its fractions are texts."""
    name = layout.seal_path(attestation.seal)
    subject = {"digest": {"sha256": attestation.digest}, "name": name}
    return canonical.dump(
        {
            "_type": STATEMENT_TYPE,
            "subject": [subject],
            "predicateType": attestation.predicate_type,
            "predicate": _in_texts(attestation.model_dump()),
        }
    )


def _in_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_texts(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_in_texts(part) for part in value]
    return repr(value) if isinstance(value, float) else value


def attester(path: str, key: str | os.PathLike[str]) -> CryptoSigner:
    """Return what signs attestations of a dataset; E021, E011 as ``signer``, E503 not writable."""
    return signer(key, open_for_writing(path))


def put_attestation(path: str, attestation: Document, private: CryptoSigner) -> str:
    """Sign an attestation and add it to those of its seal; return the path of their file.

    Raises:
        ActdsError: E804 the dataset was sealed again meanwhile; E009 there are too many; E503.

    Spec: 0.1 sections 15.7 and 15.8.
    """
    store = open_for_writing(path)
    with ExitStack() as stack:
        folder = local_folder(store.uri)
        if folder is not None and folder.is_dir():
            stack.callback(os.close, lock_dataset(folder))
        catalog = read_dataset(store)  # of one that is not valid, too
        if not catalog.is_sealed or catalog.digest != attestation.digest:
            got, expected = f"seal {catalog.digest[:16]}...", f"{attestation.digest[:16]}..."
            raise ActdsError("E804", path, got=got, expected=f"{expected}, as when it was read")
        file = layout.attestations_path(attestation.seal)
        before = store.read(file, MAX_ENVELOPE_NBYTES) if store.exists(file) else b""
        envelope = with_signature(statement(attestation), None, private)
        assert envelope is not None, "it has no signature yet"
        after = before + envelope.to_bytes()
        n_lines = after.count(b"\n")
        if n_lines > MAX_ATTESTATIONS or len(after) > MAX_ENVELOPE_NBYTES:
            got, expected = f"{n_lines} attestations", f"at most {MAX_ATTESTATIONS}, of 8 MiB"
            raise ActdsError("E009", file, got=got, expected=expected)
        store.replace(file, after)
    return file


def attestations(
    catalog: Catalog, trusted: Sequence[TrustedKey]
) -> Iterator[tuple[Attestation, tuple[TrustedKey, ...]]]:
    """Yield what trusted keys attest of replays, each with the keys that signed it.

    Raises:
        ActdsError: as ``judged``.

    Spec: 0.1 section 15.7.
    """
    for attestation, judgement in judged(catalog, trusted):
        if isinstance(attestation, Attestation):
            yield attestation, judgement.accepted


def judged(
    catalog: Catalog, trusted: Sequence[TrustedKey]
) -> Iterator[tuple[Document | None, Judgement]]:
    """Yield each line beside the last seal, and who signed it; None of one of no trusted key.

    Raises:
        ActdsError: E102, E103 a line that is no envelope, or no attestation; E803 a trusted key
            signed one of another seal.

    Spec: 0.1 sections 15.7 and 15.8.
    """
    n = len(catalog.seals)
    file = layout.attestations_path(n)
    for number, line in enumerate(_lines(catalog.store, file), start=1):
        place = f"{file} line {number}"
        envelope = parse(line, place)
        judgement = judge(envelope, trusted)
        if not judgement.accepted:
            yield None, judgement  # whatever it says
            continue
        document = canonical.parse(envelope.payload, place)
        document = document if isinstance(document, dict) else {}
        named = document.get("predicateType")
        models: tuple[type[Document], ...] = (Attestation, VerdictAttestation)
        model = next((model for model in models if model.predicate_type == named), None)
        if model is None:
            continue  # a bundle may have statements of others
        attestation: Document = of_form(model, document.get("predicate"), place, "predicate")
        is_of_seal = (attestation.digest, attestation.seal) == (catalog.digest, n)
        if not is_of_seal or envelope.payload != statement(attestation):
            expected = f"one about seal {n}, {catalog.digest[:16]}..."
            raise ActdsError("E803", place, got="another statement", expected=expected)
        yield attestation, judgement


def _lines(store: Store, file: str) -> list[bytes]:
    if not store.exists(file):
        return []
    lines = store.read(file, MAX_ENVELOPE_NBYTES).splitlines(keepends=True)
    if len(lines) > MAX_ATTESTATIONS:
        got, expected = f"{len(lines)} lines", f"at most {MAX_ATTESTATIONS}"
        raise ActdsError("E102", file, got=got, expected=expected)
    return lines
