"""The command ``actds replay``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from actds.cli.command import SettingsCommand

if TYPE_CHECKING:
    from actds_writers.config import ReplaySettings

EXAMPLES = """\b
Examples:
  actds replay acts alone --model models/small --alone
  actds replay acts other --model models/small --neighbours 7
  actds replay acts missing --model models/small --only missing
  actds replay acts exact --model models/small --engine-arg dtype=float32 --max-requests 64
"""


def _settings() -> type[ReplaySettings]:
    from actds_writers.config import ReplaySettings

    return ReplaySettings


@click.command(cls=SettingsCommand, settings=_settings, skip=["source", "out"], epilog=EXAMPLES)
@click.argument("source", metavar="SOURCE")
@click.argument("out", metavar="OUT")
@click.option("--quiet", is_flag=True, help="Show no progress; the summary is still printed.")
def replay(
    source: str, out: str, quiet: bool, engine_args: tuple[str, ...], **settings: Any
) -> None:
    """Serve the token sequences of SOURCE again under other settings, into OUT.

    Each request of SOURCE, a sealed dataset, becomes one prompt, its sampled tokens included: every
    token is read in prefill, and nothing is generated. The table origins of OUT leads each request
    to its source and says which tokens had been sampled. Requests whose tokens are not all known
    are skipped and counted.
    """
    from actds_writers.cli.terminal import run_shown
    from actds_writers.engine_protocol import parse_words
    from actds_writers.harvest.replay import replay as run

    options = {"source": source, "engine_args": parse_words(engine_args), **settings}
    run_shown(run, out, quiet=quiet, **options)
