"""The command ``actds steer``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click

from actds_studies.study import Command, finish, result_options
from actds_validators.cli.results import COMMAND, LimitsCommand, Outputs, told

WORST = ("reverses", "decays", "undecided")
PATH = click.Path(path_type=Path)


def _numbers(names: str, kind: type, default: str, words: str) -> Callable[[Command], Command]:
    """Return an option of numbers with commas between them."""

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> tuple[Any, ...]:
        try:
            return tuple(map(kind, value.split(",")))
        except ValueError:
            message = f"{value!r}: numbers with commas between them"
            raise click.BadParameter(message, ctx, param) from None

    return click.option(
        *names.split(),
        default=default,
        show_default=True,
        metavar="N,...",
        callback=parse,
        help=words,
    )


@click.command(
    cls=LimitsCommand, result=partial(resolve_name, "actds_studies.steer.result:Steering")
)
@click.argument("dataset", metavar="SOURCE")
@click.option("--model", required=True, type=PATH, help="Folder that SOURCE was harvested from.")
@click.option("--hook", required=True, help="Hook whose rows are changed, as resid_post.10.")
@click.option("--vector", metavar="PATH", help="Its npy file, or DICTIONARY:FEATURE.")
@click.option("--from", "first", help="Or the mean row where this holds, less that of --against.")
@click.option("--against", "second", help="See --from; of requests that are not steered.")
@_numbers("--dose doses", float, "0.5,1,2", "Doses; 1 has to be among them.")
@_numbers("--at", int, "1,10,50,200", "Decode steps at which it begins, from 1.")
@_numbers("--after", int, "1,5,20", "Steps later that it is read, beside at once.")
@click.option("--refit", is_flag=True, help="Say of --from why it does less in answers.")
@click.option("--survival", default=0, metavar="N", help="Sample N tokens on from each step, too.")
@click.option("--engine", default="vllm", show_default=True, help="Engine, as of actds replay.")
@click.option("--engine-arg", "engine_args", multiple=True, metavar="KEY=VALUE", help="Its option.")
@result_options("Write the report as one HTML page.", WORST)
@click.pass_context
def steer(
    ctx: click.Context, /, html: Path | None, json_out: Path | None, fail_on: str, **options: Any
) -> None:
    """Say whether a steering vector still works later in an answer.

    The answers of SOURCE are served again by an engine, plain and with the vector added: at one
    step and read there (pulse), or later (kept: what it left in the KV cache), and from a step on
    (held), beside its negative, random vectors of its length, and a vector of zeros. A dose of 1 is
    the strength at which 95 % of the tokens diverge by less than 1 nat. Each way holds, decays,
    reverses or is undecided, with intervals over prompts. Exit codes: 0, or 1 by --fail-on; 2
    usage; 3 not readable; 4 not writable.

    \b
    Examples:
      actds steer acts --model models/small --hook resid_post.10 --vector calm.npy
      actds steer acts --model models/small --hook resid_post.10 --from "labels.label == 'code'" \\
        --against "labels.label == 'prose'" --refit --at 1,10,50 --html steering.html
    """
    from actds_writers.engine_protocol import parse_words

    outputs = Outputs(html, json_out)
    vector, pair = options.pop("vector"), (options.pop("first"), options.pop("second"))
    if (vector is None) != (None not in pair) or (vector and pair != (None, None)):
        raise click.UsageError("Either --vector, or --from and --against.")
    from actds_studies.pages.steer import page
    from actds_studies.steer.api import steer as run

    options["engine_args"] = parse_words(options["engine_args"])
    result = run(options.pop("dataset"), vector=vector or pair, **options, progress=told())
    outcomes = result.answer.by_way.values()
    finish(result, page(result, ctx.meta[COMMAND]), outputs, outcomes, fail_on, WORST)
