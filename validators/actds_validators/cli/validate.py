"""The command ``actds validate``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from actds.cli.output import envelope, print_json, print_lines

if TYPE_CHECKING:
    from actds_validators.validate.validation import Progress

LEVELS = ("quick", "standard", "full", "deep")
_QUIET_S = 2.0


@click.command()
@click.argument("path", metavar="PATH")
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="full",
    show_default=True,
    help="quick: ledger, documents, sizes. standard: + tables, accounting. "
    "full: + digests of every file. deep: + decode every chunk, NaN, zero and repeated rows.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON (actds.validate 1)."
)
@click.option("--strict", is_flag=True, help="Fail on warnings as well.")
def validate(path: str, level: str, as_json: bool, strict: bool) -> None:
    """Check a dataset before training on it.

    PATH is the dataset's folder. Exit codes: 0 clean, 1 findings, 2 usage, 3 not readable as a
    dataset. Every finding has a code; actds explain CODE says more.

    \b
    Examples:
      actds validate acts
      actds validate acts --level deep
      actds validate acts --level quick --json
    """
    from actds_validators.report.text import render
    from actds_validators.validate import validation as validation_module

    with _progress() as progress:
        result = validation_module.validate(path, level, progress)  # type: ignore[arg-type]
    if as_json:
        print_json(envelope("validate", result.as_json(strict=strict)))
    else:
        print_lines(render(result, strict=strict))
    sys.exit(result.exit_code(strict=strict))


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield what counts the work on stderr: on a terminal, and only when it takes a while."""
    if not sys.stderr.isatty():
        yield lambda what, amount: None
        return
    done = {"bytes": 0, "rows": 0, "values": 0}
    began = last = time.monotonic()

    def progress(what: str, amount: int) -> None:
        nonlocal last
        done[what] += amount
        now = time.monotonic()
        if now - began < _QUIET_S or now - last < 0.2:
            return
        last = now
        sys.stderr.write(
            f"\r{done['bytes'] / 1e9:.2f} GB hashed, {done['rows']:,} rows accounted for, "
            f"{done['values'] / 1e9:.2f} GB decoded, {now - began:.0f} s "
        )
        sys.stderr.flush()

    try:
        yield progress
    finally:
        if last > began:
            sys.stderr.write("\n")
