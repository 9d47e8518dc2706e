"""The commands sign and verify: who vouches for the seal of a dataset."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from actds.cli.output import envelope, print_json


@click.command("sign")
@click.argument("path", metavar="PATH")
@click.option("--key", metavar="FILE", help="PEM file of an Ed25519 private key.")
@click.option(
    "--keyless", is_flag=True, help="Sign with an OIDC identity instead, through Sigstore."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was signed (actds.sign 1).")
def sign_command(path: str, key: str | None, keyless: bool, as_json: bool) -> None:
    """Sign the seal of a dataset.

    PATH is the dataset's folder or its s3:// URI. The signature is of the present seal: sign again
    after the dataset was sealed again. Several keys may sign, one call each. ACTDS_KEY_PASSWORD
    has the password of an encrypted key. --keyless takes the token of SIGSTORE_IDENTITY_TOKEN or
    of the CI that it runs in; the identity becomes public in Sigstore's log.

    \b
    Examples:
      openssl genpkey -algorithm ed25519 -out key.pem
      openssl pkey -in key.pem -pubout -out key.pub
      actds sign acts --key key.pem
      actds sign acts --keyless
    """
    from actds.trust.signing import sign

    done = sign(path, key, keyless=keyless)
    if as_json:
        print_json(envelope("sign", asdict(done)))
        return
    who = "identity" if done.keyid is None else f"key {done.keyid}"
    click.echo(f"seal {done.seal} sha256:{done.digest}")
    click.echo(f"{'signed' if done.is_new else 'signed before'} by {who}: {done.file}")


@click.command("verify")
@click.argument("path", metavar="PATH")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="FILE",
    help="PEM file of public keys that you trust; repeatable. ACTDS_TRUSTED_KEYS names one, too.",
)
@click.option(
    "--need",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="How many of the keys must have signed.",
)
@click.option("--identity", metavar="NAME", help="Who must have signed keyless: address or URI.")
@click.option("--issuer", metavar="URL", help="Who must have vouched for the identity.")
@click.option("--trusted-root", metavar="FILE", help="Root of another instance of Sigstore.")
@click.option("--offline", is_flag=True, help="Take the root of Sigstore that is on this machine.")
@click.option("--seal", metavar="SHA256", help="The seal of this digest, not the present one.")
@click.option("--json", "as_json", is_flag=True, help="Print who signed (actds.verify 1).")
def verify_command(path: str, keys: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Check who signed the seal of a dataset.

    PATH is the dataset's folder or URI. You say whom you trust; nothing is taken from the dataset.
    Ledger and documents are checked; actds validate with the digest as --seal compares every byte
    with the seal.

    \b
    Examples:
      actds verify acts --key key.pub
      actds verify acts --key alice.pub --key bob.pub --need 2
      actds verify acts --identity me@example.org --issuer https://accounts.google.com
    """
    from actds.text import printable
    from actds.trust.signing import verify

    found = verify(path, keys, **options)
    if as_json:
        facts = asdict(found, dict_factory=_plain)
        print_json(envelope("verify", facts))
        return
    looked = "ledger, documents and signatures were checked, no table and no array was read"
    click.echo(f"seal {found.seal} sha256:{found.digest}: {looked}")
    for key in found.keys:
        click.echo(f"signed by key {key.keyid} ({printable(key.file)})")
    if found.identity is not None:
        who = found.identity
        click.echo(f"signed by {printable(who.identity)}, vouched for by {printable(who.issuer)}")
    for one in found.rejected:
        keyid = printable(one.keyid[:64]) or "without an id"
        click.echo(f"not counted: signature {keyid}, {one.why}", err=True)
    click.echo(f"every byte: actds validate PATH --seal sha256:{found.digest}", err=True)


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields that JSON can hold: of a key its id and file."""
    return {name: value for name, value in items if name != "key"}
