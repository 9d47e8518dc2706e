"""The commands for others: files of other libraries, the card, the hub, and signatures."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from actds.cli.command import (
    FiniteRange,
    ResultCommand,
    default_option,
    envelope,
    executor_option,
    json_option,
    print_json,
    print_lines,
    print_result,
)
from actds.executor import ExecutorName
from actds.text import Line, counted, format_nbytes, printable

if TYPE_CHECKING:
    from actds.exchange.doctor import FoundSet, Report, ValueCounts
    from actds.publish.attestation import VerdictAttestation
    from actds.publish.envelope import Rejected
    from actds.publish.transfer import Transfer

_MAX_ARRAYS = 12


def _hook_option(help_text: str) -> Callable[[Any], Any]:
    return click.option("--hook", "hooks", multiple=True, metavar="KIND.LAYER", help=help_text)


@click.command("export")
@click.argument("path", metavar="PATH")
@click.argument("out", metavar="OUT")
@click.option(
    "--to",
    required=True,
    type=click.Choice(["sae-lens", "safetensors", "memmap", "parquet"]),
    help="SAELens' cached activations; one safetensors file per request, as speculators and vLLM "
    "write; one .npy file per hook; or one Parquet file.",
)
@click.option("--hooks", metavar="NAME,...", help="Names of hooks; all without it.")
@click.option("--phase", type=click.Choice(["prefill", "decode"]), help="Only rows of this phase.")
@click.option("--where", metavar="EXPR", help="Only rows for which this is true.")
@click.option(
    "--exclude",
    multiple=True,
    metavar="NAME",
    help="Leave out special, bos, eos, first_position, sink or not_finite; repeatable.",
)
@click.option("--split", type=click.Choice(["train", "held_out"]), help="One part of a split.")
@click.option(
    "--held-out",
    type=FiniteRange(0, 1),
    default=0.0,
    metavar="SHARE",
    help="Share of the requests in held_out.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Type of the values; the stored one, or float32 where the form has no bfloat16.",
)
@default_option(
    "--context-size", click.IntRange(1), 128, "Rows of a window of SAELens.", metavar="N"
)
@click.option("--imported", is_flag=True, help="Export an imported dataset, which has no census.")
@json_option("Print actds_export.json (actds.export 1).")
def export_command(
    path: str, out: str, hooks: str | None, imported: bool, as_json: bool, **options: Any
) -> None:
    """Write rows as files that another library reads, with where they come from.

    PATH is the dataset's folder or its s3:// URI, OUT a new folder. Rows are sorted by run,
    request and position; actds_export.json says what they are, rows.parquet which row is which.

    \b
    Examples:
      actds export acts cache --to sae-lens --hooks resid_post.10 --context-size 256
      actds export acts files --to safetensors --where "phase == 'decode'"
      actds export acts arrays --to memmap --exclude first_position
    """
    from actds.exchange.export import export

    names = None if hooks is None else [name.strip() for name in hooks.split(",")]
    record = export(path, out, hooks=names, i_accept_unprovenanced=imported, **options)
    if as_json:
        print_json(record.model_dump(mode="json"))
        return
    types = ", ".join(
        f"{hook.name} {hook.written}"
        + ("" if hook.written == hook.stored else f" (stored as {hook.stored})")
        for hook in record.hooks
    )
    click.echo(f"{record.n_rows:,} rows of {types}")
    if record.n_left_out:
        click.echo(f"{record.n_left_out:,} rows at the end did not fill a window and are left out")
    click.echo(f"from {record.digest}")


@click.command("import")
@click.argument("foreign", metavar="FOREIGN")
@click.argument("out", metavar="OUT")
@click.option(
    "--from",
    "kind",
    type=click.Choice(["sae-lens", "datasets", "safetensors", "pt", "npy", "npz"]),
    help="Form of the set; by the names of its files without it.",
)
@_hook_option("Place of the model, in the order of the set; repeatable.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Type of two-byte values without a name (.npy), and of float64, which is rounded.",
)
@click.option(
    "--declare",
    multiple=True,
    metavar="NAME=VALUE",
    help="A fact of the run record, for example model.name=Qwen3-8B; repeatable.",
)
@json_option("Print what was done (actds.import 1).")
def import_command(
    foreign: str,
    out: str,
    hooks: tuple[str, ...],
    declare: tuple[str, ...],
    as_json: bool,
    **how: Any,
) -> None:
    """Write activations that were made elsewhere as a dataset.

    FOREIGN is a file or a folder: a cache of SAELens, hidden states of vLLM's connector or
    speculators, .pt, .safetensors, .npz or .npy files, a saved dataset of lists; actds doctor says
    which of its arrays are rows. What it does not say is marked unknown. The dataset has no
    census: only actds seal --imported seals it, and readers refuse it unless an argument or a
    policy accepts that.

    \b
    Examples:
      actds import cache acts
      actds import hidden_states acts --hook resid_post.1 --hook resid_post.17
      actds import rows.npy acts --hook resid_post.10 --declare model.name=Qwen3-8B
    """
    from actds.exchange.importing import import_foreign

    facts = dict(map(_fact, declare))
    done = import_foreign(foreign, out, hooks=hooks or None, declare=facts, **how)
    lines = [
        f"{done.n_rows:,} rows of {', '.join(done.hooks)} in {done.n_sequences:,} sequences",
        f"unknown: {', '.join(done.unknown)}",
        *([f"left out: {', '.join(done.left_out)}"] if done.left_out else []),
        f"no census: seal it with actds seal {shlex.quote(out)} --imported",
    ]
    print_result("import", done, as_json, lines)


def _fact(text: str) -> tuple[str, Any]:
    """Return name and value; a value that is no boolean or integer in JSON is a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--declare")
    try:
        parsed = json.loads(value)
    except ValueError:
        return name, value
    return name, parsed if isinstance(parsed, bool | int) else value


@click.command("doctor")
@click.argument("path", metavar="PATH")
@_hook_option("Place of the model, for the command, in the order of the set; repeatable.")
@click.option("--values", is_flag=True, help="Read all values: count NaN, infinity, zero rows.")
@json_option("Print the facts as JSON (actds.doctor 1).")
def doctor_command(path: str, hooks: tuple[str, ...], values: bool, as_json: bool) -> None:
    """Say what a set of activations made elsewhere holds, and what it can never answer.

    PATH is a file or a folder: a cache of SAELens, hidden states of vLLM or speculators, .pt, .npy
    or .npz files, Parquet, a saved Hugging Face dataset. Only headers are read without --values,
    nothing is written, and of .pt files only tensors are opened. It ends with the command that
    imports the set. Exit codes: 0 it can be imported, or is a dataset of actds; 1 it cannot; 2 no
    such path.

    \b
    Examples:
      actds doctor cache
      actds doctor rows.pt --hook resid_post.10 --values
      actds doctor hidden_states --json
    """
    from actds.exchange.doctor import doctor

    report = doctor(path, hooks=hooks or None, values=values)
    if as_json:
        print_json(envelope("doctor", {**asdict(report), "can_import": report.can_import}))
    else:
        print_lines(Line(printable(line.text), line.style) for line in _page(report))
    sys.exit(0 if report.can_import or report.is_dataset else 1)


def _page(report: Report) -> Iterator[Line]:
    if report.is_dataset:
        yield Line(f"{report.path} is a dataset of actds", "good")
        yield Line(f"  Next: actds validate {shlex.quote(report.path)}", "dim")
        return
    if not report.sets:
        yield Line(f"{report.path}: no activations of a form that is known", "bad")
    for foreign_set in report.sets:
        yield from _set(report.path, foreign_set)
    if report.elsewhere:
        yield Line("")
        yield Line("folders below, which were not looked at:", "title")
        yield from (Line(f"  {name}") for name in report.elsewhere)
    if report.others:
        yield Line(f"{counted(report.others, 'further file')} of no known form", "dim")


def _set(path: str, found_set: FoundSet) -> Iterator[Line]:
    size = f"{counted(found_set.n_files, 'file')}, {format_nbytes(found_set.nbytes)}"
    yield Line(f"{path}: {found_set.kind}, {size}, {counted(found_set.n_rows, 'row')}", "title")
    for array in found_set.arrays[:_MAX_ARRAYS]:
        shape = ", ".join("·" if n is None else f"{n:,}" for n in array.shape)
        number = "" if array.n == 1 else f", {array.n:,} times"
        yield Line(f"  {array.name or '(no name)'}  {array.dtype} ({shape}){number}")
    more = len(found_set.arrays) - _MAX_ARRAYS
    if more > 0:
        yield Line(f"  and {more:,} more; --json lists them all", "dim")
    yield from (Line(f"  {fault}", "bad") for fault in found_set.faults)
    yield Line("What it does not say, and what nobody can know without it", "title")
    for lack in found_set.lacks:
        yield Line(f"  {lack.missing}: {lack.unknowable}")
    for counts in found_set.values or ():
        yield _values(counts)
    if found_set.refused is not None:
        yield Line(f"It cannot be imported as it is: {found_set.refused}", "bad")
    if found_set.recipe:
        yield Line("Bring it in; what it does not say stays marked unknown", "title")
        words = ["--declare model.name=NAME adds what you know"]
        if "KIND." in found_set.recipe[-1]:
            words.insert(0, "KIND.LAYER: each place, in the set's order, as resid_post.10")
        yield from (Line(f"  {line}", "dim") for line in words)
        yield from (Line(f"  {line}") for line in found_set.recipe)


def _values(counts: ValueCounts) -> Line:
    wrong = {"NaN or infinite": counts.not_finite, "all zeros": counts.zero}
    wrong |= {f"beyond {dtype}": n for dtype, n in counts.overflow.items()}
    words = ", ".join(f"{n:,} {what}" for what, n in wrong.items() if n) or "none of them wrong"
    text = f"  {counts.hook or '(no name)'}: {counted(counts.n_rows, 'row')}, {words}"
    return Line(text, "bad" if counts.not_finite or counts.zero else "plain")


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
    # Some twenty lines, however many files there are.
    if n_done == n_files or n_done % max(n_files // 20, 1) == 0:
        sizes = f"{format_nbytes(done_nbytes)} of {format_nbytes(nbytes)}"
        click.echo(f"{n_done:,} of {n_files:,} files, {sizes}", err=True)


def _print_transfer(name: str, done: Transfer, as_json: bool) -> None:
    moved = f"{counted(done.n_moved, 'file')} moved, {format_nbytes(done.moved_nbytes)}"
    checked = f"{counted(done.n_files, 'file')} checked, {moved}"
    lines = [checked, f"{done.path} {done.uri}@{done.revision}", f"digest {done.digest}"]
    print_result(name, done, as_json, lines)


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
    who = "identity" if done.keyid is None else f"key {done.keyid}"
    words = f"{'signed' if done.is_new else 'signed before'} by {who}: {done.file}"
    print_result("sign", done, as_json, [f"seal {done.seal} sha256:{done.digest}", words])


def _verdict() -> type[VerdictAttestation]:
    from actds.publish.attestation import VerdictAttestation

    return VerdictAttestation


@click.command("verify", cls=ResultCommand, reads={"verdict": _verdict})
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
    with the seal. Replays, validations and audits that somebody attests are listed, with who signed
    them.

    \b
    Examples:
      actds verify acts --key key.pub
      actds verify acts --key alice.pub --key bob.pub --need 2
      actds verify acts --identity me@example.org --issuer https://accounts.google.com
    """
    from actds.publish.signing import verify

    verified = verify(path, keys, **options)
    if as_json:
        print_json(envelope("verify", asdict(verified, dict_factory=_plain)))
        return
    looked = "ledger, documents and signatures were checked, no table and no array was read"
    click.echo(f"seal {verified.seal} sha256:{verified.digest}: {looked}")
    for key in verified.keys:
        click.echo(f"signed by key {key.keyid} ({printable(key.file)})")
    if verified.identity is not None:
        who = verified.identity
        click.echo(f"signed by {printable(who.identity)}, vouched for by {printable(who.issuer)}")
    for rejected in verified.rejected:
        click.echo(f"not counted: signature {_named(rejected)}", err=True)
    for line in verified.attestations:
        if line.verdict is None:
            names = "; ".join(map(_named, line.rejected))
            click.echo(f"not counted: attestation signed by {names}", err=True)
            continue
        names = ", ".join(f"{key.keyid} ({printable(key.file)})" for key in line.keys)
        words = f"{line.verdict} ({line.looked_at}): {line.reason}"
        click.echo(f"attested by key {names}: {printable(words)}")
    click.echo(f"every byte: actds validate PATH --seal sha256:{verified.digest}", err=True)


def _named(rejected: Rejected) -> str:
    return f"{printable(rejected.keyid[:64]) or 'without an id'}, {rejected.why}"


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields that JSON can hold: of a key its id and file."""
    return {name: value for name, value in items if name != "key"}
