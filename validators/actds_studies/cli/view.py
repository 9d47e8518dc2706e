"""The command ``actds view``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from actds.text import format_nbytes, printable
from actds_validators.cli.results import need_folders, no_dash


class _Request(click.ParamType[tuple[str, int] | int]):
    """``N``, or ``RUN:N``."""

    name = "request"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int] | int:
        run, _, number = str(value).rpartition(":")
        if not number.isdecimal():
            self.fail(f"{value!r} is neither N nor RUN:N", param, ctx)
        return (run, int(number)) if run else int(number)


@click.command()
@click.argument("path", metavar="PATH")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default="view.html",
    show_default=True,
    callback=no_dash,
    help="Write the page here.",
)
@click.option("--hook", metavar="HOOK", help="Whose rows tokens are coloured by; the first.")
@click.option(
    "--request",
    "requests",
    type=_Request(),
    multiple=True,
    metavar="[RUN:]N",
    help="Show this request; repeatable. Else a few, evenly spaced, and who lost the most.",
)
@click.option(
    "--start", type=click.IntRange(0), default=0, show_default=True, help="First position shown."
)
@click.option(
    "--tokens",
    "n_tokens",
    type=click.IntRange(1),
    default=2000,
    show_default=True,
    help="Positions of a request shown at most; a page holds 12,000.",
)
@click.option("--tokenizer", metavar="FOLDER", help="Model folder with tokenizer.json, for text.")
@click.option("--probe", metavar="FILE.npy", help="Colour by products with these directions.")
@click.option("--sae", metavar="FILE", help="Colour by features of this dictionary.")
@click.option(
    "--feature",
    "features",
    type=click.IntRange(0),
    multiple=True,
    metavar="N",
    help="Which feature of --sae, or row of --probe; up to 3.",
)
@click.option("--model", metavar="NAME", help="What dictionaries call the rows' model.")
@click.option("--imported", is_flag=True, help="Show an imported dataset, which has no census.")
@click.option("--stats", is_flag=True, help="Read every row once for mean norms; they are kept.")
def view(path: str, out: Path, imported: bool, **options: Any) -> None:
    """Write a page to look at a dataset: hooks, norms, coverage, losses, text.

    PATH is the dataset's folder, sealed. The page is one file without script: what became of the
    positions, norms by position, and the text of some requests, coloured by the norm of each
    row, by a probe or by features of a dictionary. It holds the text of the prompts.

    \b
    Examples:
      actds view acts --tokenizer models/small
      actds view acts --request 17 --hook resid_post.10 --probe probe.npy
      actds view acts --sae sae_weights.safetensors --feature 12 --feature 480
    """
    from actds_studies.view import view as make

    need_folders(out)
    page = make(path, i_accept_unprovenanced=imported, **options)
    page.save(out)
    click.echo(f"page: {printable(str(out))} ({format_nbytes(len(page.html.encode()))})")
