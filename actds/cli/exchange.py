"""The commands export, import and doctor: files of other libraries."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from actds.cli.options import FiniteRange, default_option, json_option
from actds.cli.output import envelope, print_json, print_lines
from actds.text import Line, counted, format_nbytes, printable

if TYPE_CHECKING:
    from actds.exchange.doctor import FoundSet, Report, ValueCounts

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
    kind: Any,
    hooks: tuple[str, ...],
    dtype: Any,
    declare: tuple[str, ...],
    as_json: bool,
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
    done = import_foreign(foreign, out, kind=kind, hooks=hooks or None, dtype=dtype, declare=facts)
    if as_json:
        print_json(envelope("import", asdict(done)))
        return
    click.echo(f"{done.n_rows:,} rows of {', '.join(done.hooks)} in {done.n_sequences:,} sequences")
    click.echo(f"unknown: {', '.join(done.unknown)}")
    if done.left_out:
        click.echo(f"left out: {', '.join(done.left_out)}")
    click.echo(f"no census: seal it with actds seal {shlex.quote(out)} --imported")


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
