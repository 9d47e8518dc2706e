"""The command ``actds audit``."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from actds.cli.options import model_options
from actds.cli.output import ResultCommand, print_lines

if TYPE_CHECKING:
    from actds_validators.audit.drift.rows import Column
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
_COMMAND = "actds.audit.command"
COLUMNS = ("phase", "kernel_mode", "run", "source")


class _Audit(ResultCommand):
    """The command with an option for each limit, made from the model when somebody asks."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters: those of the command, the limits, --help."""
        params, n = super().get_params(ctx), len(self.params)
        return [*params[:n], *_limit_options(), *params[n:]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and remember them as they were typed: the report names them."""
        ctx.meta[_COMMAND] = shlex.join([*ctx.command_path.split(), *args])
        return super().parse_args(ctx, args)


@cache
def _limit_options() -> list[click.Option]:
    """Return an option for each limit, named, typed and described as in the result."""
    from actds_validators.audit.result import Limits

    return list(model_options(Limits))


def _result() -> type[Audit]:
    from actds_validators.audit.result import Audit

    return Audit


def no_dash(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse ``-``: of all outputs only the result can go to the terminal."""
    if value is not None and str(value) == "-":
        raise click.BadParameter("'-' is no file; only --json can print", ctx, param)
    return value


def _no_engine(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Refuse the option that an engine's name once went by here."""
    if value is not None:
        raise click.UsageError("No such option: --engine. Did you mean --executor?", ctx)


@click.command(cls=_Audit, result=_result)
@click.argument("path", metavar="PATH")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=no_dash,
    help="Write the report.",
)
@click.option(
    "--json",
    "json_out",
    type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
    help="Write the result as JSON; - prints it instead of the page.",
)
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
@click.option("--against", metavar="OTHER", help="Compare the values with those of this dataset.")
@click.option(
    "--by", type=click.Choice(COLUMNS), multiple=True, help="Compare the values by this column."
)
@click.option(
    "--rows", type=click.IntRange(100), default=20_000, show_default=True,
    help="Rows per side that --against and --by read.",
)  # fmt: skip
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
@click.option(
    "--engine", expose_value=False, hidden=True, is_eager=True, callback=_no_engine,
    help="Refused.",
)  # fmt: skip
@click.pass_context
def audit(
    ctx: click.Context,
    /,
    path: str,
    html: Path | None,
    json_out: Path | None,
    weights: Path | None,
    classes: Path | None,
    against: str | None,
    by: tuple[Column, ...],
    rows: int,
    fail_on: str,
    strict: bool,
    executor: ExecutorName,
    **limits: Any,
) -> None:
    """Estimate what a dataset lost, and whether it matters.

    PATH is the dataset's folder, sealed and valid (actds validate). The audit compares what was
    captured with what was computed and served, and ends in PASS, WARN, FAIL or INCONCLUSIVE with
    the number that decided. It reads tables only; --against and --by read rows as well. Exit codes:
    0, or 1 by --fail-on; 2 usage; 3 not readable; 4 not writable.
    """
    if strict and _is_given(ctx, "fail_on") and fail_on != "warn":
        raise click.UsageError(f"--strict is --fail-on warn and contradicts --fail-on {fail_on}")
    from actds_validators.audit.api import audit as run_audit
    from actds_validators.audit.api import need_extra

    need_extra(*(["jinja2"] if html else []))
    to_stdout = json_out is not None and str(json_out) == "-"
    json_file = None if to_stdout else json_out
    from actds_validators.audit.outputs import refuse_outputs

    refuse_outputs(
        {"--html": html, "--json": json_file, "--weights": weights}, {"--classes": classes}
    )
    need_folders(html, json_file, weights)
    from actds_validators.report import html as page
    from actds_validators.report import summary, terminal

    keep_little()
    found = run_audit(
        path, limits=limits, weights=weights, classes=classes, against=against, by=by, rows=rows,
        executor=executor, progress=told(),
    )  # fmt: skip
    result = found.result
    text = json.dumps(result.as_json(), indent=2, sort_keys=True)
    if json_file is not None:
        write_text(json_file, text + "\n")
    about = summary.about(found.catalog, ctx.meta[_COMMAND])
    if html is not None:
        write_text(html, page.render(result, about))
    if to_stdout:
        click.echo(text)
    else:
        print_lines(terminal.render(result, about))
        for what, out in (("report", html), ("result", json_out), ("weights", weights)):
            if what == "weights" and out is not None and not result.accounting.is_sound:
                click.echo("weights: not written, because of accounting mismatches")
            elif out is not None:
                click.echo(f"{what}: {out}")
    if found.failure is not None:
        raise found.failure
    sys.exit(exit_code(result, "warn" if strict else fail_on))


def keep_little() -> None:
    """Let the C library give memory back that an array of a megabyte or more had.

    By default it raises that size to the largest array it has seen freed, up to 32 MB, and keeps
    an arena per thread: arrays of 10 MB by the thousand then leave 80 to 120 MB that nobody uses
    (measured with 11 million readouts). It would also give back and fetch again the few megabytes
    of every batch.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
        mallopt(-1, 16 << 20)  # M_TRIM_THRESHOLD
        mallopt(-8, 2)  # M_ARENA_MAX


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is not ParameterSource.DEFAULT


def need_folders(*outputs: Path | None) -> None:
    """Raise E503 for a file that is asked for in a folder that is not there, before the audit."""
    from actds_validators.audit.outputs import unwritable

    for out in outputs:
        if out is not None and not out.parent.is_dir():
            next_step = "Make the folder, or give another path."
            raise unwritable(out, f"no folder {out.parent}", next_step)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; raises E503 where it cannot be written."""
    from actds_validators.audit.outputs import replaced

    with replaced(path) as new:
        new.write_text(text, encoding="utf-8")


def exit_code(result: Audit, fail_on: str) -> int:
    """Return 1 when the verdict is among those that fail, else 0."""
    return int(result.verdict.level in _FAILING[fail_on])


def told() -> Callable[[str], None]:
    """Return what says on a terminal what is being done."""
    if not sys.stderr.isatty():
        return lambda what: None
    return lambda what: click.echo(f"{what} …", err=True)
