"""The command ``actds stability``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actds_studies.study import exit_code, result_options
from actds_validators.cli.results import COMMAND, LimitsCommand, Outputs, no_dash, told

if TYPE_CHECKING:
    from actds_studies.stability.result import Stability

WORST = ("beyond the floor", "undecided")


def _result() -> type[Stability]:
    from actds_studies.stability.result import Stability

    return Stability


@click.command(cls=LimitsCommand, result=_result)
@click.argument("arms", metavar="A [B ...]", nargs=-1, required=True)
@click.option("--hook", metavar="NAME", help="Hook to train on. The only one if not given.")
@click.option(
    "--label",
    metavar="EXPRESSION",
    help="True of the rows that a probe on the features should find: its ROC area, by request.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    callback=no_dash,
    help="New folder for the dictionaries, ARM/seed-N, as SAELens saves them.",
)
@result_options("Write the report as one HTML page.", WORST)
@click.pass_context
def stability(
    ctx: click.Context,
    /,
    arms: tuple[str, ...],
    out: Path | None,
    html: Path | None,
    json_out: Path | None,
    fail_on: str,
    **options: Any,
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
      actds stability prefill=acts:phase=prefill decode=acts:phase=decode \\
        --label "labels.label == 'code'"
      actds stability cached weighted=cached:weights=multiplicity uncached --out dictionaries
    """
    outputs = Outputs(html, json_out, {"--out": out})
    from actds_studies.pages.stability import page
    from actds_studies.stability.api import stability as run

    result = run(*arms, out=out, **options, progress=told())
    shown = page(result, ctx.meta[COMMAND])
    outputs.write(result.to_json(), shown.html, shown.lines)
    outputs.say({"dictionaries": out})
    sys.exit(exit_code((verdict.outcome for verdict in result.verdicts), fail_on, WORST))
