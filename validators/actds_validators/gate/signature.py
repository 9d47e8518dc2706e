"""Signatures as a policy asks for them: the one place where the gate meets signing."""

from __future__ import annotations

from collections.abc import Iterator

from actds.dataset.reading import Catalog
from actds.errors import CODES, ActdsError, Finding
from actds_validators.gate.policy import SignatureRules

__all__ = ["check_signature"]


def check_signature(rules: SignatureRules, catalog: Catalog) -> Iterator[Finding]:
    """Yield why the seal of a dataset is not signed as the rules ask.

    Args:
        rules: those of the policy.
        catalog: the dataset.

    Raises:
        ActdsError: E009 there is nobody to trust; E021 a key that cannot be used; E011 a package
            is not installed.

    Spec: 0.1 section 15.4.
    """
    if not rules.required and rules.keys is None and rules.identity is None:
        return
    from actds.trust.signing import verify

    try:
        verify(
            catalog.store.uri, rules.keys or (), need=rules.need,
            identity=rules.identity, issuer=rules.issuer,
        )  # fmt: skip
    except ActdsError as error:
        if CODES[error.code].family != "trust":
            raise
        rule = "signature.keys" if rules.keys is not None else "signature.required"
        rule = rule if rules.identity is None else "signature.identity"
        yield Finding("E701", rule, f"{error.code} {error.got}"[:400], error.expected[:400])
