"""The command ``actds plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from actds.cli.options import SettingsCommand

if TYPE_CHECKING:
    from actds_writers.config import PlanSettings
    from actds_writers.sizing.needs import Profile

EXAMPLES = """\b
Examples:
  actds plan --model models/small --hooks resid_post:10,20 --prefill-rate 9000 --decode-rate 1000
  actds plan --d-model 4096 --layers 32 --profile acts --measure /data
  actds plan --model models/small --prefill-rate 9000 --burst 4:10 --stall 30 --json
"""


def _settings() -> type[PlanSettings]:
    from actds_writers.config import PlanSettings

    return PlanSettings


@click.command(cls=SettingsCommand, settings=_settings, epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON (actds.plan 1).")
def plan(as_json: bool, engine_args: tuple[str, ...], **settings: Any) -> None:
    """Size a harvest: bytes per second at every stage, disk, rings, memory.

    Shows which stage saturates first, and what a disk stall costs under each overflow policy.
    Sizes for the burst, not for the mean. Exits with 1 when a stage cannot carry the mean load,
    or rows were lost under --stress.
    """
    from actds.cli.output import envelope, print_json
    from actds_writers.engine_protocol import parse_words
    from actds_writers.harvest.plan import plan as size

    found = size(engine_args=parse_words(engine_args), **settings)
    if found.profile is not None:
        _say_profile(found.profile)
    if found.measured:
        rates = ", ".join(f"{name} {gbps:.2f}" for name, gbps in sorted(found.measured.items()))
        click.echo(f"measured: {rates} GB/s", err=True)
    if as_json:
        print_json(envelope("plan", found.as_json()))
    else:
        click.echo("\n".join(found.lines()))
    if not found.fits:
        click.get_current_context().exit(1)


def _say_profile(profile: Profile) -> None:
    for windows in profile.windows:
        click.echo(
            f"profile: windows of {windows.seconds:g} s: mean {windows.mean:,.0f}, "
            f"p50 {windows.p50:,.0f}, p99 {windows.p99:,.0f}, max {windows.max:,.0f} tokens/s "
            f"({windows.n} windows{', too few for p99' if profile.is_short else ''})",
            err=True,
        )
