"""The command ``actds write``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from actds.cli.command import SettingsCommand

if TYPE_CHECKING:
    from actds_writers.config import WriteSettings

EXAMPLES = """\b
Examples:
  actds write acts --model models/small --prompts prompts.jsonl --hooks resid_post:10,20
  actds write acts --model models/small --prompts prompts.jsonl --hooks resid_post:10,20 --resume
  actds write s3://bucket/acts --model models/small --prompts hf:chats --hooks resid_post:all \\
      --engine transformers --engine-arg max_num_seqs=4 --canary 0.1%
"""


def _settings() -> type[WriteSettings]:
    from actds_writers.config import WriteSettings

    return WriteSettings


def _renamed(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        words = (
            "No such option '--writer': --engine names the engine, --engine-arg sets its options."
        )
        raise click.UsageError(words, ctx)


@click.command(cls=SettingsCommand, settings=_settings, skip=["out"], epilog=EXAMPLES)
@click.argument("out", metavar="OUT")
@click.option(
    "--writer", hidden=True, expose_value=False, callback=_renamed, help="Renamed to --engine."
)
@click.option("--quiet", is_flag=True, help="Show no progress; the summary is still printed.")
def write(out: str, quiet: bool, engine_args: tuple[str, ...], **settings: Any) -> None:
    """Harvest activations from a real engine into OUT.

    Serves every prompt, stores the activations of every token that the engine computes, and
    accounts for every token. Ctrl-C drains, commits and seals; --resume continues.
    """
    from actds_writers.cli.terminal import run_shown
    from actds_writers.engine_protocol import parse_words
    from actds_writers.harvest.run import write as run

    run_shown(run, out, quiet=quiet, engine_args=parse_words(engine_args), **settings)
