"""The command ``actds plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from actds.cli.command import SettingsCommand

if TYPE_CHECKING:
    from pydantic import BaseModel

    from actds_writers.config import PlanOptions
    from actds_writers.sizing.needs import Profile

EXAMPLES = """\b
Examples:
  actds plan --model models/small --hooks resid_post:10,20 --prefill-rate 9000 --decode-rate 1000
  actds plan --d-model 4096 --layers 32 --profile acts --measure /data --burst 4:10 --json
  actds plan --model models/small --hooks resid_post:10 --probes 100 --measure
"""


def _settings() -> type[PlanOptions]:
    from actds_writers.config import PlanOptions

    return PlanOptions


@click.command(cls=SettingsCommand, settings=_settings, epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON (actds.plan 1).")
def plan(as_json: bool, engine_args: tuple[str, ...], **settings: Any) -> None:
    """Size a harvest: bytes per second at every stage, disk, rings, memory.

    Shows which stage saturates first, and what a disk stall costs under each overflow policy.
    Sizes for the burst, not for the mean. Exits with 1 when a stage cannot carry the mean load,
    or rows were lost under --stress. With --probes it says instead what linear probes cost.
    """
    from actds.cli.command import envelope, print_json
    from actds_writers.config import PlanSettings
    from actds_writers.engine_protocol import parse_words
    from actds_writers.harvest.plan import plan as size

    given = {**settings, "engine_args": parse_words(engine_args)}
    if settings["probes"] is not None:
        _say_probes(given, as_json=as_json)
        return
    _refuse_others(PlanSettings, "--probes N beside it")
    result = size(**{name: given[name] for name in PlanSettings.model_fields})
    if result.profile is not None:
        _say_profile(result.profile)
    if result.measured:
        rates = ", ".join(f"{name} {gbps:.2f}" for name, gbps in sorted(result.measured.items()))
        click.echo(f"measured: {rates} GB/s", err=True)
    if as_json:
        print_json(envelope("plan", result.as_json()))
    else:
        click.echo("\n".join(result.lines()))
    if not result.fits:
        click.get_current_context().exit(1)


def _say_probes(given: dict[str, Any], *, as_json: bool) -> None:
    """Print what probes cost.

    Raises:
        ActdsError: E009 for an option of sizing beside them; as ``probe_cost``.
    """
    from actds.cli.command import envelope, print_json
    from actds.errors import ActdsError
    from actds_writers.config import ProbeSettings
    from actds_writers.harvest.probe_cost import probe_cost

    _refuse_others(ProbeSettings, "no --probes beside it")
    if given["model"] is None:
        expected = "a model folder with config.json and weights"
        raise ActdsError("E009", "--model", got="no model folder", expected=expected)
    questions = {name: given[name] for name in ProbeSettings.model_fields}
    questions["batches"] = questions["batches"] or ProbeSettings.model_fields["batches"].default
    cost = probe_cost(progress=lambda line: click.echo(line, err=True), **questions)
    if as_json:
        print_json(envelope("plan", cost.as_json()))
    else:
        click.echo("\n".join(cost.lines()))


def _refuse_others(settings: type[BaseModel], expected: str) -> None:
    """Refuse options that were given and are not those of the question; raises E009."""
    from actds.errors import ActdsError

    context = click.get_current_context()
    known = {*settings.model_fields, "as_json", "help"}
    for param in context.command.get_params(context):
        name = param.name or ""
        source = context.get_parameter_source(name)
        if name not in known and source is ParameterSource.COMMANDLINE:
            got = "an option of the other question of this command"
            raise ActdsError("E009", param.opts[0], got=got, expected=expected)


def _say_profile(profile: Profile) -> None:
    for windows in profile.windows:
        click.echo(
            f"profile: windows of {windows.seconds:g} s: mean {windows.mean:,.0f}, "
            f"p50 {windows.p50:,.0f}, p99 {windows.p99:,.0f}, max {windows.max:,.0f} tokens/s "
            f"({windows.n} windows{', too few for p99' if profile.is_short else ''})",
            err=True,
        )
