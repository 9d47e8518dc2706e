"""The command ``actds stability``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actds_validators.cli.results import (
    COMMAND,
    LimitsCommand,
    Outputs,
    html_option,
    json_option,
    no_dash,
    told,
)

if TYPE_CHECKING:
    from actds_studies.stability.result import Stability

FAIL_ON = ("beyond", "undecided", "never")
_FAILING = {
    "beyond": {"beyond the floor"},
    "undecided": {"beyond the floor", "undecided"},
    "never": set[str](),
}


def _result() -> type[Stability]:
    from actds_studies.stability.result import Stability

    return Stability


@click.command(cls=LimitsCommand, result=_result)
@click.argument("arms", metavar="A [B ...]", nargs=-1, required=True)
@click.option("--hook", metavar="NAME", help="Hook to train on. The only one if not given.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    callback=no_dash,
    help="New folder for the dictionaries, ARM/seed-N, as SAELens saves them.",
)
@html_option("Write the report as one HTML page.")
@json_option()
@click.option(
    "--fail-on", type=click.Choice(FAIL_ON), default="beyond", show_default=True,
    help="Exit 1 when an arm ends so, or worse.",
)  # fmt: skip
@click.pass_context
def stability(
    ctx: click.Context,
    /,
    arms: tuple[str, ...],
    hook: str | None,
    out: Path | None,
    html: Path | None,
    json_out: Path | None,
    fail_on: str,
    limits: dict[str, Any],
) -> None:
    """Say whether the harvest changes a dictionary more than another seed does.

    Each of A, B, ... is an arm: [NAME=]PATH[:KEY=VALUE,...], a sealed and valid dataset and, after
    a colon, which of its rows: phase=prefill or decode, where=EXPRESSION, exclude=FILTER, shares as
    prefill=0.5,decode=0.5, and weights=multiplicity or a weights file. A dictionary is trained for
    each arm and seed, on equally many rows; the first arm is the reference. Exit codes: 0, or 1 by
    --fail-on; 2 usage; 3 not readable; 4 not writable.

    \b
    Examples:
      actds stability acts --hook resid_post.10 --seeds 4
      actds stability prefill=acts:phase=prefill hybrid=acts:prefill=0.5,decode=0.5 \\
        --hook resid_post.10 --html stability.html
      actds stability cached weighted=cached:weights=multiplicity uncached --out dictionaries
    """
    outputs = Outputs(html, json_out, {"--out": out})
    from actds_studies.pages.stability import page
    from actds_studies.stability.api import stability as run

    result = run(*arms, hook=hook, out=out, limits=limits, progress=told())
    shown = page(result, ctx.meta[COMMAND])
    outputs.write(result.to_json(), shown.html, shown.lines)
    outputs.say({"dictionaries": out})
    sys.exit(exit_code(result, fail_on))


def exit_code(result: Stability, fail_on: str) -> int:
    """Return 1 when a verdict is among those that fail, else 0."""
    found = {verdict.outcome for verdict in result.verdicts}
    return int(not found.isdisjoint(_FAILING[fail_on]))
