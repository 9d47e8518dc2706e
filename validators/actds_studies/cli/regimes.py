"""The command ``actds regimes``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actds.cli.options import FiniteRange
from actds_validators.cli.results import (
    COMMAND,
    LimitsCommand,
    Outputs,
    files_of,
    html_option,
    json_option,
    told,
)

if TYPE_CHECKING:
    from actds_studies.regimes.contrast import Pairing
    from actds_studies.regimes.result import Regimes

FAIL_ON = ("shifts", "undecided", "never")
_FAILING = {"shifts": {"shifts"}, "undecided": {"shifts", "undecided"}, "never": set[str]()}
PAIRINGS = ("token", "position", "unpaired")


def _result() -> type[Regimes]:
    from actds_studies.regimes.result import Regimes

    return Regimes


@click.command(cls=LimitsCommand, result=_result)
@click.argument("arms", metavar="A [B ...]", nargs=-1, required=True)
@click.option(
    "--contrast",
    "contrasts",
    multiple=True,
    metavar="G-R",
    help="Compare arm G with the reference R; repeatable. Every later arm with the first if none.",
)
@click.option(
    "--floor",
    metavar="again-R",
    help="Compare arms that were served alike, as a replay made twice: the floor of numerics.",
)
@click.option(
    "--hook",
    "hooks",
    multiple=True,
    metavar="NAME",
    help="Hook to compare; repeatable. All that the arms share if none.",
)
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
@click.option(
    "--held-out",
    type=FiniteRange(0, 1, min_open=True, max_open=True),
    metavar="SHARE",
    help='Compare what a loader with split="train" and this share leaves out.',
)
@click.option(
    "--pairing",
    type=click.Choice(PAIRINGS),
    help="How rows belong together. The closest that there is if not given.",
)
@html_option("Write the decode-regime calibration report.")
@json_option()
@click.option(
    "--fail-on", type=click.Choice(FAIL_ON), default="shifts", show_default=True,
    help="Exit 1 when an instrument ends so, or worse.",
)  # fmt: skip
@click.pass_context
def regimes(
    ctx: click.Context,
    /,
    arms: tuple[str, ...],
    contrasts: tuple[str, ...],
    hooks: tuple[str, ...],
    sae: tuple[str, ...],
    probes: tuple[str, ...],
    label: str | None,
    model: str | None,
    held_out: float | None,
    pairing: Pairing | None,
    floor: str | None,
    html: Path | None,
    json_out: Path | None,
    fail_on: str,
    limits: dict[str, Any],
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

    result = run(
        *arms, contrasts=contrasts, hooks=hooks, sae=sae, probes=probes, label=label, model=model,
        held_out=held_out, pairing=pairing, floor=floor, limits=limits, progress=told(),
    )  # fmt: skip
    shown = page(result, ctx.meta[COMMAND])
    outputs.write(result.to_json(), shown.html, shown.lines)
    sys.exit(exit_code(result, fail_on))


def exit_code(result: Regimes, fail_on: str) -> int:
    """Return 1 when a verdict is among those that fail, else 0."""
    found = {verdict.outcome for contrast in result.contrasts for verdict in contrast.verdicts}
    return int(not found.isdisjoint(_FAILING[fail_on]))
