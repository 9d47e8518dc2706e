"""``python -m actds_validators.simulate``: write a simulated dataset of known truth."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import click

from actds.errors import ActdsError
from actds_validators.simulate.dataset import write_dataset, write_tables
from actds_validators.simulate.losses import Truth
from actds_validators.simulate.run import simulate
from actds_validators.simulate.scenario import SCENARIOS


def _described() -> str:
    lines = [f"  {name:<16} {scenario.description}" for name, scenario in SCENARIOS.items()]
    return "\b\nScenarios:\n" + "\n".join(lines)


@click.command(epilog=_described())
@click.argument("scenario", type=click.Choice(list(SCENARIOS)), metavar="SCENARIO")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1), help="Steps of the run.  [default: 40,000]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed.")
@click.option("--rate", type=click.FloatRange(0, 1, max_open=True), help="Share of rows lost.")
@click.option(
    "--tokens", type=click.IntRange(1), help="Write so many tokens instead, of one channel each."
)
def main(
    scenario: str, out: Path, steps: int | None, seed: int, rate: float | None, tokens: int | None
) -> None:
    """Write a simulated dataset to OUT, and print what is known about its losses as JSON."""
    if tokens is not None and steps is not None:
        raise click.UsageError("--tokens and --steps exclude each other")
    chosen = SCENARIOS[scenario]
    if rate is not None:
        chosen = replace(chosen, rate=rate)
    try:
        if tokens is not None:
            write_tables(out, tokens, scenario=chosen, seed=seed)
            return
        simulated = simulate(replace(chosen, n_steps=steps or chosen.n_steps), seed)
        write_dataset(simulated, out)
    except ActdsError as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps(_summary(simulated.truth), indent=2, sort_keys=True))


def _summary(truth: Truth) -> dict[str, object]:
    arrays = ("step_probability", "row_probability")
    return {name: value for name, value in asdict(truth).items() if name not in arrays}


if __name__ == "__main__":
    main(prog_name="python -m actds_validators.simulate")
