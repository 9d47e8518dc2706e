"""The command ``actds doctor``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from actds.cli.output import envelope, print_json, print_lines
from actds.text import Line, counted, format_nbytes, printable

if TYPE_CHECKING:
    from actds.exchange.doctor import FoundSet, Report, ValueCounts

_MAX_ARRAYS = 12


@click.command("doctor")
@click.argument("path", metavar="PATH")
@click.option(
    "--hook", "hooks", multiple=True, metavar="KIND.LAYER",
    help="Place of the model, for the command, in the order of the set; repeatable.",
)  # fmt: skip
@click.option("--values", is_flag=True, help="Read all values: count NaN, infinity, zero rows.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON (actds.doctor 1).")
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
    from dataclasses import asdict

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
    for one in report.sets:
        yield from _set(report.path, one)
    if report.elsewhere:
        yield Line("")
        yield Line("folders below, which were not looked at:", "title")
        yield from (Line(f"  {name}") for name in report.elsewhere)
    if report.others:
        yield Line(f"{counted(report.others, 'further file')} of no known form", "dim")


def _set(path: str, one: FoundSet) -> Iterator[Line]:
    size = f"{counted(one.n_files, 'file')}, {format_nbytes(one.nbytes)}"
    yield Line(f"{path}: {one.kind}, {size}, {counted(one.n_rows, 'row')}", "title")
    for array in one.arrays[:_MAX_ARRAYS]:
        shape = ", ".join("·" if n is None else f"{n:,}" for n in array.shape)
        number = "" if array.n == 1 else f", {array.n:,} times"
        yield Line(f"  {array.name or '(no name)'}  {array.dtype} ({shape}){number}")
    more = len(one.arrays) - _MAX_ARRAYS
    if more > 0:
        yield Line(f"  and {more:,} more; --json lists them all", "dim")
    yield from (Line(f"  {fault}", "bad") for fault in one.faults)
    yield Line("What it does not say, and what nobody can know without it", "title")
    for lack in one.lacks:
        yield Line(f"  {lack.missing}: {lack.unknowable}")
    for counts in one.values or ():
        yield _values(counts)
    if one.refused is not None:
        yield Line(f"It cannot be imported as it is: {one.refused}", "bad")
    if one.recipe:
        yield Line("Bring it in; what it does not say stays marked unknown", "title")
        words = ["--declare model.name=NAME adds what you know"]
        if "KIND." in one.recipe[-1]:
            words.insert(0, "KIND.LAYER: each place, in the set's order, as resid_post.10")
        yield from (Line(f"  {line}", "dim") for line in words)
        yield from (Line(f"  {line}") for line in one.recipe)


def _values(counts: ValueCounts) -> Line:
    wrong = {"NaN or infinite": counts.not_finite, "all zeros": counts.zero}
    wrong |= {f"beyond {dtype}": n for dtype, n in counts.overflow.items()}
    words = ", ".join(f"{n:,} {what}" for what, n in wrong.items() if n) or "none of them wrong"
    text = f"  {counts.hook or '(no name)'}: {counted(counts.n_rows, 'row')}, {words}"
    return Line(text, "bad" if counts.not_finite or counts.zero else "plain")
