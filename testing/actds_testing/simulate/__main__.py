"""``python -m actds_testing.simulate``: write a simulated dataset of known truth."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import click

from actds.errors import ActdsError
from actds_testing.simulate.dataset import write_dataset, write_tables
from actds_testing.simulate.losses import Truth
from actds_testing.simulate.run import simulate
from actds_testing.simulate.scenario import SCENARIOS


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
            pieces = _Pieces()
            write_tables(out, tokens, scenario=chosen, seed=seed, told=pieces.add)
            told = pieces.summary()
        else:
            simulated = simulate(replace(chosen, n_steps=steps or chosen.n_steps), seed)
            write_dataset(simulated, out)
            told = _summary(simulated.truth)
    except ActdsError as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps(told, indent=2, sort_keys=True))


class _Pieces:
    """What is known of the losses of a dataset that is simulated in pieces."""

    def __init__(self) -> None:
        self._n_pieces = self._n_computed = 0
        self._n_lost = 0.0
        self._first: dict[str, object] = {}

    def add(self, truth: Truth) -> None:
        """Add a piece."""
        self._first = self._first or _summary(truth)
        self._n_pieces += 1
        self._n_computed += len(truth.row_probability)
        self._n_lost += len(truth.row_probability) * truth.loss_share

    def summary(self) -> dict[str, object]:
        """Return the truth over all pieces; what several have each for themselves is null."""
        if self._n_pieces == 1:
            return self._first
        why = f"null: each of {self._n_pieces} pieces has its own; --steps prints those of one run"
        share = self._n_lost / self._n_computed
        return {**self._first, "loss_share": share, "smd": None, "bias": None, "note": why}


def _summary(truth: Truth) -> dict[str, object]:
    arrays = ("step_probability", "row_probability")
    return {name: value for name, value in asdict(truth).items() if name not in arrays}


if __name__ == "__main__":
    main(prog_name="python -m actds_testing.simulate")
