"""The command ``actds profile``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actds.cli.command import FiniteRange, ResultCommand, default_option, print_lines
from actds_validators.cli.results import need_folders, no_dash, write_text

if TYPE_CHECKING:
    from actds.format.profile import Profile

OPEN = FiniteRange(0, 1, min_open=True, max_open=True)


def _result() -> type[Profile]:
    from actds.format.profile import Profile

    return Profile


@click.command(cls=ResultCommand, result=_result)
@click.argument("path", metavar="PATH")
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=no_dash,
    required=True,
    help="Write the profile here.",
)
@click.option(
    "--hook", "hooks", multiple=True, metavar="NAME", help="Hook whose readouts count; repeatable."
)
@default_option("--alpha", OPEN, 0.05, "Promised rate of false alarms per request.")
@default_option("--every", click.IntRange(1), 4, "Decode steps from one look to the next.")
@click.option(
    "--above",
    type=FiniteRange(0),
    metavar="NATS",
    help="Look only where the logits have this entropy or more.",
)
@default_option(
    "--share",
    FiniteRange(0, 1, min_open=True),
    1.0,
    "Look at this share of later requests, chosen by hash.",
)
@default_option("--calibration", OPEN, 0.25, "Share of the requests that only set the threshold.")
@default_option("--check", OPEN, 0.25, "Share that only show which rate is kept.")
@default_option("--seed", click.IntRange(0), 0, "Seed of the choice of requests, and of the hash.")
def profile(path: str, out: Path, **options: Any) -> None:
    """Fit what readouts are like in one regime, with a threshold for alerts.

    PATH is the dataset's folder or its s3:// URI, sealed, with readouts; requests that are usual
    for the regime. The profile is one JSON file: quantiles and moments of the readouts by hook,
    phase, role and depth, the threshold from requests that the fit did not see, and the rate of
    false alarms that others kept. actds alerts compares a dataset with it.

    \b
    Examples:
      actds profile acts -o profile.json
      actds profile acts -o profile.json --hook resid_post.20 --alpha 0.01 --every 8
    """
    need_folders(out)
    from actds_validators.sections import need_extra

    need_extra("jinja2")
    from actds_studies.monitoring import profile as fit
    from actds_studies.pages.monitoring import profile_lines

    made = fit(path, **options)
    write_text(out, made.as_bytes().decode())
    print_lines(profile_lines(made, str(out)))
