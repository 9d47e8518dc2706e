"""The command of any study, and the options that those of arms share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from actds.cli.command import FiniteRange
from actds_validators.cli.results import (
    COMMAND,
    LimitsCommand,
    Outputs,
    html_option,
    json_option,
    told,
)

if TYPE_CHECKING:
    from actds_studies.regimes.result import StudyResult
    from actds_studies.study import Study
    from actds_validators.pages.answer import AnswerPage

Command = TypeVar("Command", bound="Callable[..., Any] | click.Command")
PAIRINGS = ("token", "position", "unpaired")
WORST = ("shifts", "undecided")
"""Outcomes that may fail a command, the worst first."""


def command_of(study: Study) -> click.Command:
    """Return the command of a study, for the entry point group ``actds.commands``."""

    @click.command(
        study.name,
        cls=LimitsCommand,
        result=lambda: study.result,
        help=f"{study.summary}\n\n{ARMS}",
    )
    @compare_options
    @result_options("Write the report as one HTML page.", WORST)
    @click.pass_context
    def run(
        ctx: click.Context,
        /,
        arms: tuple[str, ...],
        html: Path | None,
        json_out: Path | None,
        fail_on: str,
        **options: Any,
    ) -> None:
        outputs = Outputs(html, json_out)
        result = study.run(*arms, **options, progress=told())
        finish(result, study.page(result, ctx.meta[COMMAND]), outputs, fail_on)

    return run


ARMS = (
    "Each of A, B, ... is an arm: [NAME=]PATH[:KEY=VALUE,...], a sealed and valid dataset and, "
    "after a colon, which of its rows: phase=prefill or decode, where=EXPRESSION, exclude=FILTER. "
    "One dataset alone is its prefill rows (H) against its decode rows (G). Exit codes: 0, or 1 by "
    "--fail-on; 2 usage; 3 not readable; 4 not writable."
)


def compare_options(function: Command) -> Command:
    """Add the arguments of `Study.run` to a command."""
    for option in reversed(
        (
            click.argument("arms", metavar="A [B ...]", nargs=-1, required=True),
            click.option(
                "--contrast",
                "contrasts",
                multiple=True,
                metavar="G-R",
                help="Compare arm G with the reference R; repeatable. Every later arm with the "
                "first if none.",
            ),
            click.option(
                "--floor",
                metavar="again-R",
                help="Compare arms that were served alike, as a replay made twice: the floor of "
                "numerics.",
            ),
            click.option(
                "--hook",
                "hooks",
                multiple=True,
                metavar="NAME",
                help="Hook to compare; repeatable. All that the arms share if none.",
            ),
            click.option(
                "--held-out",
                type=FiniteRange(0, 1, min_open=True, max_open=True),
                metavar="SHARE",
                help='Compare what a loader with split="train" and this share leaves out.',
            ),
            click.option(
                "--pairing",
                type=click.Choice(PAIRINGS),
                help="How rows belong together. The closest that there is if not given.",
            ),
        )
    ):
        function = option(function)
    return function


def result_options(html: str, worst: Sequence[str]) -> Callable[[Command], Command]:
    """Return what adds ``--html``, ``--json`` and ``--fail-on`` to a command.

    Args:
        html: help of the page.
        worst: outcomes that may fail, the worst first.
    """
    words = [outcome.split()[0] for outcome in worst]

    def add(function: Command) -> Command:
        fail_on = click.option(
            "--fail-on",
            type=click.Choice([*words, "never"]),
            default=words[0],
            show_default=True,
            help="Exit 1 when a verdict ends so, or worse.",
        )
        return html_option(html)(json_option()(fail_on(function)))

    return add


def exit_code(outcomes: Iterable[str], fail_on: str, worst: Sequence[str] = WORST) -> int:
    """Return 1 when an outcome is among those that fail, else 0."""
    n = next((k for k, outcome in enumerate(worst, 1) if outcome.startswith(fail_on)), 0)
    return int(not set(worst[:n]).isdisjoint(outcomes))


def finish(result: StudyResult, page: AnswerPage, outputs: Outputs, fail_on: str) -> None:
    """Write a result where it was asked for, and exit by its verdicts."""
    outputs.write(result.to_json(), page.html, page.lines)
    outcomes = {verdict.outcome for contrast in result.contrasts for verdict in contrast.verdicts}
    sys.exit(exit_code(outcomes, fail_on))
