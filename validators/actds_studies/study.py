"""A study of arms: an instrument with its words, and its command; all else comes from here.

Arms in words, choice and pairing of rows, estimates with intervals, floors and tests, verdicts, the
answer, JSON, page, terminal and command are those of ``actds regimes``, which is the first study.
Nothing heavy is imported before a study runs: a command's help needs none of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

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
    from actds_studies.regimes.conclusions import Words
    from actds_studies.regimes.contrast import Pairing
    from actds_studies.regimes.result import StudyLimits, StudyResult
    from actds_studies.regimes.run import AnyInstrument
    from actds_validators.pages.answer import AnswerPage
    from actds_validators.sections import Document

Command = TypeVar("Command", bound="Callable[..., Any] | click.Command")
PAIRINGS = ("token", "position", "unpaired")
WORST = ("shifts", "undecided")
"""Outcomes that may fail a command, the worst first."""
ARMS = (
    "Each of A, B, ... is an arm: [NAME=]PATH[:KEY=VALUE,...], a sealed and valid dataset and, "
    "after a colon, which of its rows: phase=prefill or decode, where=EXPRESSION, exclude=FILTER. "
    "One dataset alone is its prefill rows (H) against its decode rows (G). Exit codes: 0, or 1 by "
    "--fail-on; 2 usage; 3 not readable; 4 not writable."
)


@dataclass(frozen=True)
class Study:
    """A study that compares arms by instruments of its own.

    Args:
        name: of its command, and of its result, ``actds.NAME/1``.
        summary: the first line of its help.
        question: that its page answers: yes where an instrument shifts.
        instruments: makes instruments that nothing else uses, an `Instrument` or `PairInstrument`
            each: they keep what they learn of a reference.
        words: of each instrument, by its name.
        limits: by name the default of a limit, and what it limits: a number above 0. Instruments
            read them by these names, callers set them by ``limits``.

    Raises:
        ActdsError: E009 another study has an instrument of that name.
    """

    name: str
    summary: str
    question: str
    instruments: Callable[[], Sequence[AnyInstrument]]
    words: Mapping[str, Words]
    limits: Mapping[str, tuple[float, str]]

    def __post_init__(self) -> None:
        from actds_studies.regimes.conclusions import register_words

        for instrument, words in self.words.items():
            register_words(instrument, words)

    @cached_property
    def result(self) -> type[StudyResult]:
        from pydantic import Field, create_model

        from actds_studies.regimes.result import StudyLimits, StudyResult

        fields: dict[str, Any] = {
            name: (float, Field(default=default, gt=0, description=words))
            for name, (default, words) in self.limits.items()
        }
        limits = create_model("Limits", __base__=StudyLimits, __doc__=self.question, **fields)
        schema = f"actds.{self.name}/1"
        fields = {
            "schema_": (Literal[schema], Field(default=schema, alias="schema")),
            "limits": (limits, Field()),
        }
        return create_model(
            f"{self.name.capitalize()}Result", __base__=StudyResult, __doc__=self.summary, **fields
        )

    def run(
        self,
        *arms: str | os.PathLike[str],
        contrasts: Sequence[str] = (),
        hooks: Sequence[str] = (),
        held_out: float | None = None,
        pairing: Pairing | None = None,
        floor: str | None = None,
        limits: StudyLimits | Mapping[str, float] | None = None,
        progress: Callable[[str], None] = lambda what: None,
    ) -> StudyResult:
        """Compare arms; arguments and errors are those of `actds.regimes`."""
        from actds_validators.sections import need_extra, settings_of

        need_extra()
        from actds_studies.regimes.api import open_arms

        model: Any = self.result.model_fields["limits"].annotation
        chosen = settings_of(model, limits)
        opened = open_arms(arms, contrasts, hooks, held_out, floor)
        return opened.compared(
            lambda first, second, hook: self.instruments(),
            pairing,
            chosen,
            progress,
            kind=self.result,
        )

    def page(self, result: StudyResult, command: str = "") -> AnswerPage:
        """Return the page of a result; it has ``html()`` and, for a terminal, ``lines()``."""
        from actds_studies.pages.regimes import page

        return page(result, command or f"actds {self.name}", self.question)


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
        page = study.page(result, ctx.meta[COMMAND])
        finish(result, page, outputs, outcomes_of(result), fail_on)

    return run


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
    """Return what adds ``--html``, ``--json`` and ``--fail-on``, the worst outcome first."""
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


def outcomes_of(result: StudyResult) -> set[str]:
    return {verdict.outcome for contrast in result.contrasts for verdict in contrast.verdicts}


def finish(
    result: Document,
    page: AnswerPage,
    outputs: Outputs,
    outcomes: Iterable[str],
    fail_on: str,
    worst: Sequence[str] = WORST,
    files: Mapping[str, Path | None] | None = None,
) -> None:
    """Write a result where it was asked for, name ``files``, and exit by its outcomes."""
    outputs.write(result.to_json(), page.html, page.lines)
    outputs.say(files or {})
    sys.exit(exit_code(outcomes, fail_on, worst))
