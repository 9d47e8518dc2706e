"""The command ``actds regimes``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actds_studies.study import WORST, compare_options, finish, result_options
from actds_validators.cli.results import COMMAND, LimitsCommand, Outputs, files_of, told

if TYPE_CHECKING:
    from actds_studies.regimes.result import Regimes


def _result() -> type[Regimes]:
    from actds_studies.regimes.result import Regimes

    return Regimes


@click.command(cls=LimitsCommand, result=_result)
@compare_options
@click.option(
    "--sae",
    multiple=True,
    metavar="[HOOK=]PATH",
    help="Dictionary of a hook: SAELens folder, Gemma Scope params.npz, ae.pt; repeatable.",
)
@click.option(
    "--probes",
    multiple=True,
    metavar="[HOOK=]FILE",
    help="Linear probes of a hook: .safetensors or .npz with weights and bias; repeatable.",
)
@click.option(
    "--label",
    metavar="EXPRESSION",
    help="True of the rows that the probes should find: their ROC area in either arm.",
)
@click.option(
    "--model",
    metavar="NAME",
    help="What dictionaries call the rows' model, or its folder: entropies of given text, too.",
)
@result_options("Write the decode-regime calibration report.", WORST)
@click.pass_context
def regimes(
    ctx: click.Context,
    /,
    arms: tuple[str, ...],
    sae: tuple[str, ...],
    probes: tuple[str, ...],
    html: Path | None,
    json_out: Path | None,
    fail_on: str,
    **options: Any,
) -> None:
    """Say whether the way it was served changes what is measured.

    Each of A, B, ... is an arm: [NAME=]PATH[:KEY=VALUE,...], a sealed and valid dataset and, after
    a colon, which of its rows: phase=prefill or decode, where=EXPRESSION, exclude=FILTER (again for
    more). One dataset alone is its prefill rows (H) against its decode rows (G). The hook's rows,
    a dictionary and probes are compared; each ends in carries over, shifts or undecided, with what
    is short. Exit codes: 0, or 1 by --fail-on; 2 usage; 3 not readable; 4 not writable.

    \b
    Examples:
      actds regimes acts --html regimes.html
      actds regimes cached uncached --hook resid_post.10
      actds regimes H=docs:phase=prefill R=replayed G=acts:phase=decode \\
        --contrast R-H --contrast G-R --contrast G-H --sae sae/ --held-out 0.5
    """
    read = {"--sae": files_of(sae), "--probes": files_of(probes)}
    outputs = Outputs(html, json_out, inputs=read)
    from actds_studies.pages.regimes import page
    from actds_studies.regimes.api import regimes as run

    result = run(*arms, sae=sae, probes=probes, **options, progress=told())
    finish(result, page(result, ctx.meta[COMMAND]), outputs, fail_on)
