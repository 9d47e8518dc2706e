"""The commands export and import: files of other libraries."""

from __future__ import annotations

import json
import shlex
from typing import Any

import click

from actds.cli.options import FiniteRange
from actds.cli.output import envelope, print_json


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
@click.option(
    "--context-size",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    metavar="N",
    help="Rows of a window of SAELens.",
)
@click.option("--imported", is_flag=True, help="Export an imported dataset, which has no census.")
@click.option("--json", "as_json", is_flag=True, help="Print actds_export.json (actds.export 1).")
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
@click.option(
    "--hook",
    "hooks",
    multiple=True,
    metavar="KIND.LAYER",
    help="Place of the model, in the order of the set; repeatable.",
)
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
@click.option("--json", "as_json", is_flag=True, help="Print what was done (actds.import 1).")
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
    from dataclasses import asdict

    from actds.exchange.importing import import_foreign

    said = dict(_fact(one) for one in declare)
    done = import_foreign(foreign, out, kind=kind, hooks=hooks or None, dtype=dtype, declare=said)
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
