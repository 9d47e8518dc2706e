"""The command ``actds alerts``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from actds_studies.study import exit_code, result_options
from actds_validators.cli.results import COMMAND, LimitsCommand, Outputs

if TYPE_CHECKING:
    from actds_studies.alerts import Alerts

WORST = ("departed", "undecided")


def _result() -> type[Alerts]:
    from actds_studies.alerts import Alerts

    return Alerts


@click.command(cls=LimitsCommand, result=_result)
@click.argument("path", metavar="PATH")
@click.option(
    "--profile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="What actds profile wrote. Default: that which the dataset was served beside.",
)
@click.option("--tokenizer", metavar="FOLDER", help="Model folder with tokenizer.json, for text.")
@click.option(
    "--other-regime",
    is_flag=True,
    help="Score rows of other weights or precision, for which nothing is promised.",
)
@result_options("Write the page, which holds text of the alerts.", WORST)
@click.pass_context
def alerts(
    ctx: click.Context,
    /,
    path: str,
    profile: Path | None,
    tokenizer: str | None,
    other_regime: bool,
    html: Path | None,
    json_out: Path | None,
    fail_on: str,
    limits: dict[str, str],
) -> None:
    """Say which requests left the regime of a profile, and where.

    PATH is the dataset's folder or its s3:// URI, sealed, with readouts, of the weights, hooks and
    precision of the profile. Each trajectory is scored as a server would while it decodes. Shown
    are the rate of alerts beside the promised one, and each alert with the text around it. Exit
    codes: 0, or 1 by --fail-on; 2 usage; 3 not readable; 4 not writable.

    \b
    Examples:
      actds alerts acts
      actds alerts acts --profile profile.json --tokenizer models/small
      actds alerts acts --profile profile.json --html alerts.html --json alerts.json
    """
    outputs = Outputs(html, json_out, inputs={"--profile": [profile] if profile else []})
    from actds_studies.alerts import AlertLimits
    from actds_studies.alerts import alerts as run
    from actds_studies.pages.monitoring import alerts_page
    from actds_studies.view.requests import read_tokenizer
    from actds_validators.sections import settings_of

    words = None if tokenizer is None else read_tokenizer(tokenizer)
    chosen = settings_of(AlertLimits, limits)
    result = run(path, profile, tokenizer=words, other_regime=other_regime, limits=chosen)
    page = alerts_page(result, ctx.meta[COMMAND])
    outputs.write(result.to_json(), page.html, page.lines)
    sys.exit(exit_code([result.answer.outcome], fail_on, WORST))
