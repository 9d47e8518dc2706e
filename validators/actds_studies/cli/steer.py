"""The command ``actds steer``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actds_studies.study import exit_code, result_options
from actds_validators.cli.results import COMMAND, LimitsCommand, Outputs, told

if TYPE_CHECKING:
    from actds_studies.steer.result import Steering

WORST = ("reverses", "decays", "undecided")


def _result() -> type[Steering]:
    from actds_studies.steer.result import Steering

    return Steering


class _Numbers(click.ParamType[Any]):
    """Numbers with commas between them."""

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.name, self._kind = "numbers", kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        try:
            return value if isinstance(value, tuple) else tuple(map(self._kind, value.split(",")))
        except ValueError:
            self.fail(f"{value!r}: numbers with commas between them", param, ctx)


@click.command(cls=LimitsCommand, result=_result)
@click.argument("dataset", metavar="SOURCE")
@click.option(
    "--model",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Model that SOURCE was harvested from.",
)
@click.option(
    "--hook",
    required=True,
    metavar="NAME",
    help="Hook whose rows the vector is added to, as resid_post.10.",
)
@click.option(
    "--vector",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Vector: an npy file, (d_model,).",
)
@click.option(
    "--from",
    "first",
    metavar="EXPRESSION",
    help="Or the mean row that this is true of, less the one of --against, over requests that "
    "are not steered.",
)
@click.option("--against", "second", metavar="EXPRESSION", help="See --from.")
@click.option(
    "--dictionary",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Or the direction of --feature of this dictionary.",
)
@click.option("--feature", type=click.IntRange(0), metavar="N", help="See --dictionary.")
@click.option(
    "--dose",
    "doses",
    type=_Numbers(float),
    default="0.5,1,2",
    show_default=True,
    metavar="D,...",
    help="Doses; 1 has to be among them.",
)
@click.option(
    "--at",
    type=_Numbers(int),
    default="1,10,50,200",
    show_default=True,
    metavar="STEP,...",
    help="Decode steps at which it begins, from 1.",
)
@click.option(
    "--after",
    type=_Numbers(int),
    default="1,5,20",
    show_default=True,
    metavar="K,...",
    help="Steps later that it is read, beside at once.",
)
@click.option("--engine", default="vllm", show_default=True, help="Engine, as of actds replay.")
@click.option(
    "--engine-arg",
    "engine_args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the engine; repeatable.",
)
@result_options("Write the report as one HTML page.", WORST)
@click.pass_context
def steer(
    ctx: click.Context,
    /,
    dataset: str,
    file: Path | None,
    first: str | None,
    second: str | None,
    dictionary: Path | None,
    feature: int | None,
    engine_args: tuple[str, ...],
    html: Path | None,
    json_out: Path | None,
    fail_on: str,
    **options: Any,
) -> None:
    """Say whether a steering vector still works later in an answer.

    The answers of SOURCE are served again by an engine, plain and with the vector added: at one
    step and read there (pulse), or later (kept: what it left in the KV cache), and from a step on
    (held), beside its negative, random vectors of its length, and a vector of zeros. A dose of 1 is
    the strength at which 95 % of the tokens diverge by less than 1 nat. Each way holds, decays,
    reverses or is undecided, with intervals over requests. Exit codes: 0, or 1 by --fail-on; 2
    usage; 3 not readable; 4 not writable.

    \b
    Examples:
      actds steer acts --model models/small --hook resid_post.10 --vector calm.npy
      actds steer acts --model models/small --hook resid_post.10 --from "role == 'assistant'" \\
        --against "role == 'user'" --at 1,10,50 --html steering.html
    """
    from actds_writers.engine_protocol import parse_words

    outputs = Outputs(html, json_out)
    pairs = {
        "--vector": (file, file),
        "--from and --against": (first, second),
        "--dictionary and --feature": (dictionary, feature),
    }
    given = [name for name, pair in pairs.items() if any(x is not None for x in pair)]
    if len(given) != 1 or any(x is None for x in pairs[given[0]]):
        raise click.UsageError(f"One of {', '.join(pairs)}.")
    from actds_studies.pages.steer import page
    from actds_studies.steer.api import VectorOf
    from actds_studies.steer.api import steer as run

    contrast = (first, second) if first is not None and second is not None else None
    of = (dictionary, feature) if dictionary is not None and feature is not None else None
    vector = VectorOf(file, contrast, of)
    result = run(
        dataset, vector=vector, engine_args=parse_words(engine_args), **options, progress=told()
    )
    shown = page(result, ctx.meta[COMMAND])
    outputs.write(result.to_json(), shown.html, shown.lines)
    sys.exit(exit_code(result.answer.by_way.values(), fail_on, WORST))
