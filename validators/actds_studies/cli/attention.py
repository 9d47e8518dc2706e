"""The command ``actds attention``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actds_validators.cli.results import (
    COMMAND,
    LimitsCommand,
    Outputs,
    html_option,
    json_option,
    told,
)

if TYPE_CHECKING:
    from actds_studies.attention.result import Attention


def _result() -> type[Attention]:
    from actds_studies.attention.result import Attention

    return Attention


@click.command(cls=LimitsCommand, result=_result)
@click.argument("dataset", metavar="DATASET")
@click.option(
    "--model",
    metavar="FOLDER",
    help="Model that it was harvested from, or org/name of the local hub cache. The name in the "
    "run record if not given.",
)
@click.option(
    "--layer",
    "layers",
    type=click.IntRange(0),
    multiple=True,
    metavar="L",
    help="Layer to look at; repeatable. All with hooks q.L and k.L if none.",
)
@click.option("--unproved", is_flag=True, help="Go on where v and z are not stored; marked so.")
@html_option("Write the report as one HTML page.")
@json_option()
@click.pass_context
def attention(
    ctx: click.Context,
    /,
    dataset: str,
    html: Path | None,
    json_out: Path | None,
    **options: Any,
) -> None:
    """Say where generated text looks, and whether certainty changes where it jumps.

    From stored rows of hooks q and k alone: the attention of every decode step is computed again,
    and proved by rows of v and z of the same layer. Where softmax(q k) v is not the stored z, the
    command refuses (E014) and reports nothing. Shares of the attention by part and role of the
    keys, entropy and jumps come with intervals over groups of requests, by depth, role, entropy and
    jump. A step of which a key is not stored has no number. For the drift of queries compare them
    as any other hook: actds regimes DATASET --hook q.L. Exit codes: 0; 2 usage or refused; 3 not
    readable; 4 not writable.

    \b
    Examples:
      actds write acts --hooks 'q:10;k:10;v:10;z:10' --entropy ...
      actds attention acts --model models/small --html attention.html
      actds attention acts --layer 10 --every 4 --requests 500 --json attention.json
    """
    outputs = Outputs(html, json_out)
    from actds_studies.attention.api import attention as run
    from actds_studies.pages.attention import page

    result = run(dataset, **options, progress=told())
    shown = page(result, ctx.meta[COMMAND])
    outputs.write(result.to_json(), shown.html, shown.lines)
