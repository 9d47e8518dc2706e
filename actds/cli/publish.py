"""The commands card, push, pull, sign and verify: a dataset for others."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from actds.cli.options import default_option, executor_option, json_option
from actds.cli.output import envelope, print_json
from actds.executor import ExecutorName

if TYPE_CHECKING:
    from actds.publish.transfer import Transfer


@click.command("card")
@click.argument("path", metavar="PATH")
@click.option("--licence", default="unknown", show_default=True, metavar="ID", help="Its licence.")
@click.option(
    "--audit", metavar="FILE", help="Show the verdict of this audit (actds audit --json FILE)."
)
def card_command(path: str, licence: str, audit: str | None) -> None:
    """Write the card of a sealed dataset: README.md and croissant.json.

    PATH is the dataset's folder or its s3:// URI. Each seal writes a card without licence and
    verdict, and croissant.json where there is one.

    \b
    Examples:
      actds card acts --licence cc-by-4.0
      actds card acts --audit audit.json
    """
    from actds.publish.card import card

    for name in card(path, licence=licence, audit=audit):
        click.echo(f"wrote {name}", err=True)


@click.command("push")
@click.argument("path", metavar="PATH")
@click.argument("uri", metavar="URI")
@click.option("--public", is_flag=True, help="Make a public repository, where none is there yet.")
@executor_option("Where files are compared with their digests before they leave.")
@json_option("Print what was done (actds.push 1).")
def push_command(path: str, uri: str, public: bool, executor: ExecutorName, as_json: bool) -> None:
    """Upload a sealed dataset to the Hugging Face Hub.

    PATH is the dataset's folder, URI is hf://datasets/OWNER/NAME. Every file is checked against
    its digest before it leaves and after it arrived, and the seal is the last to go. Run it again
    to continue a push that was cut, or to add what is new. The token is that of HF_TOKEN or of
    hf auth login.

    \b
    Examples:
      actds push acts hf://datasets/someone/acts
      actds push acts hf://datasets/someone/acts --public
    """
    from actds.publish.transfer import push

    done = push(path, uri, private=not public, progress=_transfer_line, executor=executor)
    _print_transfer("push", done, as_json)


@click.command("pull")
@click.argument("uri", metavar="URI")
@click.argument("out", metavar="OUT")
@click.option("--seal", metavar="SHA256", help="Refuse a dataset that does not extend this seal.")
@json_option("Print what was done (actds.pull 1).")
def pull_command(uri: str, out: str, seal: str | None, as_json: bool) -> None:
    """Download a dataset from the Hugging Face Hub.

    URI is hf://datasets/OWNER/NAME, or with @REVISION. Every file is checked against its digest as
    it arrives. OUT appears when all of them are there; until then they are in OUT.partial, and the
    same command continues.

    \b
    Examples:
      actds pull hf://datasets/someone/acts acts
      actds pull hf://datasets/someone/acts@v1 acts
    """
    from actds.publish.transfer import pull

    _print_transfer("pull", pull(uri, out, seal=seal, progress=_transfer_line), as_json)


def _transfer_line(n_done: int, n_files: int, done_nbytes: int, nbytes: int) -> None:
    from actds.text import format_nbytes

    # Some twenty lines, however many files there are.
    if n_done == n_files or n_done % max(n_files // 20, 1) == 0:
        sizes = f"{format_nbytes(done_nbytes)} of {format_nbytes(nbytes)}"
        click.echo(f"{n_done:,} of {n_files:,} files, {sizes}", err=True)


def _print_transfer(name: str, done: Transfer, as_json: bool) -> None:
    from actds.text import counted, format_nbytes

    if as_json:
        print_json(envelope(name, asdict(done)))
        return
    moved = f"{counted(done.n_moved, 'file')} moved, {format_nbytes(done.moved_nbytes)}"
    click.echo(f"{counted(done.n_files, 'file')} checked, {moved}")
    click.echo(f"{done.path} {done.uri}@{done.revision}")
    click.echo(f"digest {done.digest}")


@click.command("sign")
@click.argument("path", metavar="PATH")
@click.option("--key", metavar="FILE", help="PEM file of an Ed25519 private key.")
@click.option(
    "--keyless", is_flag=True, help="Sign with an OIDC identity instead, through Sigstore."
)
@json_option("Print what was signed (actds.sign 1).")
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
    from actds.publish.signing import sign

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
@default_option(
    "--need", click.IntRange(1), 1, "How many of the keys must have signed.", metavar="N"
)
@click.option("--identity", metavar="NAME", help="Who must have signed keyless: address or URI.")
@click.option("--issuer", metavar="URL", help="Who must have vouched for the identity.")
@click.option("--trusted-root", metavar="FILE", help="Root of another instance of Sigstore.")
@click.option("--offline", is_flag=True, help="Take the root of Sigstore that is on this machine.")
@click.option("--seal", metavar="SHA256", help="The seal of this digest, not the present one.")
@json_option("Print who signed (actds.verify 1).")
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
    from actds.publish.signing import verify
    from actds.text import printable

    verified = verify(path, keys, **options)
    if as_json:
        facts = asdict(verified, dict_factory=_plain)
        print_json(envelope("verify", facts))
        return
    looked = "ledger, documents and signatures were checked, no table and no array was read"
    click.echo(f"seal {verified.seal} sha256:{verified.digest}: {looked}")
    for key in verified.keys:
        click.echo(f"signed by key {key.keyid} ({printable(key.file)})")
    if verified.identity is not None:
        who = verified.identity
        click.echo(f"signed by {printable(who.identity)}, vouched for by {printable(who.issuer)}")
    for rejected in verified.rejected:
        keyid = printable(rejected.keyid[:64]) or "without an id"
        click.echo(f"not counted: signature {keyid}, {rejected.why}", err=True)
    click.echo(f"every byte: actds validate PATH --seal sha256:{verified.digest}", err=True)


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields that JSON can hold: of a key its id and file."""
    return {name: value for name, value in items if name != "key"}
