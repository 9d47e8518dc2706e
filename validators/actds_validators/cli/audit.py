"""The command ``actds audit``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from actds_validators.cli.results import (
    COMMAND,
    LimitsCommand,
    Outputs,
    accept_option,
    html_option,
    json_option,
    no_dash,
    told,
)

if TYPE_CHECKING:
    from actds_validators.audit.passes import ExecutorName
    from actds_validators.audit.result import Audit

FAIL_ON = ("fail", "inconclusive", "warn", "never")
_FAILING = {
    "fail": {"FAIL"},
    "inconclusive": {"FAIL", "INCONCLUSIVE"},
    "warn": {"FAIL", "INCONCLUSIVE", "WARN"},
    "never": set[str](),
}
EXECUTORS = ("threads", "ray")


def _result() -> type[Audit]:
    from actds_validators.audit.result import Audit

    return Audit


@click.command(cls=LimitsCommand, result=_result)
@click.argument("path", metavar="PATH")
@html_option("Write the report.")
@json_option()
@click.option(
    "--weights",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=no_dash,
    help="Write inverse-probability weights, one per stored row.",
)
@click.option(
    "--classes",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Token classes for the coverage map: Parquet with request, start, stop, class.",
)
@accept_option()
@click.option(
    "--fail-on",
    type=click.Choice(FAIL_ON),
    default="fail",
    show_default=True,
    help="Exit 1 at this verdict or worse.",
)
@click.option("--strict", is_flag=True, help="As --fail-on warn.")
@click.option(
    "--executor",
    type=click.Choice(EXECUTORS),
    default="threads",
    show_default=True,
    help="Where the rows are read: the numbers are the same.",
)
@click.pass_context
def audit(
    ctx: click.Context,
    /,
    path: str,
    html: Path | None,
    json_out: Path | None,
    weights: Path | None,
    classes: Path | None,
    accept: tuple[str, ...],
    fail_on: str,
    strict: bool,
    executor: ExecutorName,
    limits: dict[str, Any],
) -> None:
    """Estimate what a dataset lost, and whether it matters.

    PATH is the dataset's folder, sealed and valid (actds validate). The audit compares what was
    captured with what was computed and served, and ends in PASS, WARN, FAIL or INCONCLUSIVE with
    the number that decided. It reads tables and no activation: actds regimes compares values. Exit
    codes: 0, or 1 by --fail-on; 2 usage; 3 not readable, or imported, without a census to compare
    with; 4 not writable.
    """
    if strict and _is_given(ctx, "fail_on") and fail_on != "warn":
        raise click.UsageError(f"--strict is --fail-on warn and contradicts --fail-on {fail_on}")
    from actds_validators.audit.api import audit as run_audit

    outputs = Outputs(
        html, json_out, {"--weights": weights}, {"--classes": [classes] if classes else []}
    )
    from actds_validators.pages.report import render, render_lines
    from actds_validators.sections import about as describe

    audited = run_audit(
        path,
        limits=limits,
        weights=weights,
        classes=classes,
        accept=accept,
        executor=executor,
        progress=told(),
    )
    result = audited.result
    about = describe(audited.catalog, ctx.meta[COMMAND])
    outputs.write(
        json.dumps(result.as_json(), indent=2, sort_keys=True),
        lambda: render(result, about),
        lambda: render_lines(result, about),
    )
    if result.accounting.is_sound:
        outputs.say({"weights": weights})
    elif outputs.on_terminal and weights is not None:
        click.echo("weights: not written, because of accounting mismatches")
    sys.exit(exit_code(result, "warn" if strict else fail_on))


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is not ParameterSource.DEFAULT


def exit_code(result: Audit, fail_on: str) -> int:
    """Return 1 when the verdict is among those that fail, else 0."""
    return int(result.answer.level in _FAILING[fail_on])
