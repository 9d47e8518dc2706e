"""The commands ``regimes``, ``stability``, ``attention``, ``profile``, ``alerts``, ``view``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click

from actds.cli.command import FiniteRange, ResultCommand, default_option, print_lines
from actds.text import format_nbytes, printable
from actds_studies.study import WORST, compare_options, finish, outcomes_of, result_options
from actds_validators.cli.results import (
    COMMAND,
    LimitsCommand,
    Outputs,
    files_of,
    html_option,
    json_option,
    need_folders,
    no_dash,
    told,
    write_text,
)

BEYOND = ("beyond the floor", "undecided")
DEPARTED = ("departed", "undecided")
OPEN = FiniteRange(0, 1, min_open=True, max_open=True)
_tokenizer = click.option(
    "--tokenizer", metavar="FOLDER", help="Model folder with tokenizer.json, for text."
)


@click.command(
    cls=LimitsCommand, result=partial(resolve_name, "actds_studies.regimes.result:Regimes")
)
@compare_options
@click.option(
    "--sae",
    multiple=True,
    metavar="[HOOK=]PATH",
    help="Dictionary of a hook: SAELens folder, Gemma Scope params.npz, ae.pt; repeatable.",
)
@click.option(
    "--probes",
    multiple=True,
    metavar="[HOOK=]FILE",
    help="Linear probes of a hook: .safetensors or .npz with weights and bias; repeatable.",
)
@click.option(
    "--label",
    metavar="EXPRESSION",
    help="True of the rows that the probes should find: their ROC area in either arm.",
)
@click.option(
    "--model",
    metavar="NAME",
    help="What dictionaries call the rows' model, or its folder: entropies of given text, too.",
)
@result_options("Write the decode-regime calibration report.", WORST)
@click.pass_context
def regimes(
    ctx: click.Context,
    /,
    arms: tuple[str, ...],
    sae: tuple[str, ...],
    probes: tuple[str, ...],
    html: Path | None,
    json_out: Path | None,
    fail_on: str,
    **options: Any,
) -> None:
    """Say whether the way it was served changes what is measured.

    Each of A, B, ... is an arm: [NAME=]PATH[:KEY=VALUE,...], a sealed and valid dataset and, after
    a colon, which of its rows: phase=prefill or decode, where=EXPRESSION, exclude=FILTER (again for
    more). One dataset alone is its prefill rows (H) against its decode rows (G). The hook's rows,
    a dictionary and probes are compared; each ends in carries over, shifts or undecided, with what
    is short. Exit codes: 0, or 1 by --fail-on; 2 usage; 3 not readable; 4 not writable.

    \b
    Examples:
      actds regimes acts --html regimes.html
      actds regimes cached uncached --hook resid_post.10
      actds regimes H=docs:phase=prefill R=replayed G=acts:phase=decode \\
        --contrast R-H --contrast G-R --contrast G-H --sae sae/ --held-out 0.5
    """
    read = {"--sae": files_of(sae), "--probes": files_of(probes)}
    outputs = Outputs(html, json_out, inputs=read)
    from actds_studies.pages.regimes import page
    from actds_studies.regimes.api import regimes as run

    result = run(*arms, sae=sae, probes=probes, **options, progress=told())
    finish(result, page(result, ctx.meta[COMMAND]), outputs, outcomes_of(result), fail_on)


@click.command(
    cls=LimitsCommand, result=partial(resolve_name, "actds_studies.stability.result:Stability")
)
@click.argument("arms", metavar="A [B ...]", nargs=-1, required=True)
@click.option("--hook", metavar="NAME", help="Hook to train on. The only one if not given.")
@click.option(
    "--label",
    metavar="EXPRESSION",
    help="True of the rows that a probe on the features should find: its ROC area, by request.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    callback=no_dash,
    help="New folder for the dictionaries, ARM/seed-N, as SAELens saves them.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Model that A was harvested from, for --steer.",
)
@click.option("--engine", default="vllm", show_default=True, help="Engine of --steer.")
@click.option(
    "--engine-arg",
    "engine_args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the engine; repeatable.",
)
@result_options("Write the report as one HTML page.", BEYOND)
@click.pass_context
def stability(
    ctx: click.Context,
    /,
    arms: tuple[str, ...],
    out: Path | None,
    engine_args: tuple[str, ...],
    html: Path | None,
    json_out: Path | None,
    fail_on: str,
    **options: Any,
) -> None:
    """Say whether the harvest changes a dictionary more than another seed does.

    Each of A, B, ... is an arm: [NAME=]PATH[:KEY=VALUE,...], a sealed and valid dataset and, after
    a colon, which of its rows: phase=prefill or decode, where=EXPRESSION, exclude=FILTER, shares as
    prefill=0.5,decode=0.5, and weights=multiplicity or a weights file. A dictionary is trained for
    each arm and seed, on equally many rows; the first arm is the reference. Exit codes: 0, or 1 by
    --fail-on; 2 usage; 3 not readable; 4 not writable.

    \b
    Examples:
      actds stability acts --hook resid_post.10 --seeds 4
      actds stability prefill=acts:phase=prefill hybrid=acts:prefill=0.5,decode=0.5 \\
        --hook resid_post.10 --html stability.html
      actds stability prefill=acts:phase=prefill decode=acts:phase=decode \\
        --label "labels.label == 'code'"
      actds stability cached weighted=cached:weights=multiplicity uncached --out dictionaries
      actds stability prefill=acts:phase=prefill decode=acts:phase=decode --steer 12 \\
        --model models/small
    """
    from actds_writers.engine_protocol import parse_words

    outputs = Outputs(html, json_out, {"--out": out})
    from actds_studies.pages.stability import page
    from actds_studies.stability.api import stability as run

    result = run(*arms, out=out, engine_args=parse_words(engine_args), **options, progress=told())
    shown = page(result, ctx.meta[COMMAND])
    outcomes = [verdict.outcome for verdict in result.verdicts]
    finish(result, shown, outputs, outcomes, fail_on, BEYOND, {"dictionaries": out})


@click.command(
    cls=LimitsCommand, result=partial(resolve_name, "actds_studies.attention.result:Attention")
)
@click.argument("dataset", metavar="DATASET")
@click.option(
    "--model",
    metavar="FOLDER",
    help="Model that it was harvested from, or org/name of the local hub cache. The name in the "
    "run record if not given.",
)
@click.option(
    "--layer",
    "layers",
    type=click.IntRange(0),
    multiple=True,
    metavar="L",
    help="Layer to look at; repeatable. All with hooks q.L and k.L if none.",
)
@click.option("--unproved", is_flag=True, help="Go on where v and z are not stored; marked so.")
@html_option("Write the report as one HTML page.")
@json_option()
@click.pass_context
def attention(
    ctx: click.Context, /, dataset: str, html: Path | None, json_out: Path | None, **options: Any
) -> None:
    """Say where generated text looks, and whether certainty changes where it jumps.

    From stored rows of hooks q and k alone: the attention of every decode step is computed again,
    and proved by rows of v and z of the same layer. Where softmax(q k) v is not the stored z, the
    command refuses (E014) and reports nothing. Shares of the attention by part and role of the
    keys, entropy and jumps come with intervals over groups of requests, by depth, role, entropy and
    jump. A step of which a key is not stored has no number. For the drift of queries compare them
    as any other hook: actds regimes DATASET --hook q.L. Exit codes: 0; 2 usage or refused; 3 not
    readable; 4 not writable.

    \b
    Examples:
      actds write acts --hooks 'q:10;k:10;v:10;z:10' --entropy ...
      actds attention acts --model models/small --html attention.html
      actds attention acts --layer 10 --every 4 --requests 500 --json attention.json
    """
    outputs = Outputs(html, json_out)
    from actds_studies.attention.api import attention as run
    from actds_studies.pages.attention import page

    result = run(dataset, **options, progress=told())
    shown = page(result, ctx.meta[COMMAND])
    outputs.write(result.to_json(), shown.html, shown.lines)


@click.command(cls=ResultCommand, result=partial(resolve_name, "actds.format.profile:Profile"))
@click.argument("path", metavar="PATH")
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=no_dash,
    required=True,
    help="Write the profile here.",
)
@click.option(
    "--hook", "hooks", multiple=True, metavar="NAME", help="Hook whose readouts count; repeatable."
)
@default_option("--alpha", OPEN, 0.05, "Promised rate of false alarms per request.")
@default_option("--every", click.IntRange(1), 4, "Decode steps from one look to the next.")
@click.option(
    "--above",
    type=FiniteRange(0),
    metavar="NATS",
    help="Look only where the logits have this entropy or more.",
)
@default_option(
    "--share",
    FiniteRange(0, 1, min_open=True),
    1.0,
    "Look at this share of later requests, chosen by hash.",
)
@default_option("--calibration", OPEN, 0.25, "Share of the requests that only set the threshold.")
@default_option("--check", OPEN, 0.25, "Share that only show which rate is kept.")
@default_option("--seed", click.IntRange(0), 0, "Seed of the choice of requests, and of the hash.")
def profile(path: str, out: Path, **options: Any) -> None:
    """Fit what readouts are like in one regime, with a threshold for alerts.

    PATH is the dataset's folder or its s3:// URI, sealed, with readouts; requests that are usual
    for the regime. The profile is one JSON file: quantiles and moments of the readouts by hook,
    phase, role and depth, the threshold from requests that the fit did not see, and the rate of
    false alarms that others kept. actds alerts compares a dataset with it.

    \b
    Examples:
      actds profile acts -o profile.json
      actds profile acts -o profile.json --hook resid_post.20 --alpha 0.01 --every 8
    """
    need_folders(out)
    from actds_validators.sections import need_extra

    need_extra("jinja2")
    from actds_studies.monitoring import profile as fit
    from actds_studies.pages.monitoring import profile_lines

    made = fit(path, **options)
    write_text(out, made.as_bytes().decode())
    print_lines(profile_lines(made, str(out)))


@click.command(cls=LimitsCommand, result=partial(resolve_name, "actds_studies.alerts:Alerts"))
@click.argument("path", metavar="PATH")
@click.option(
    "--profile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="What actds profile wrote. Default: that which the dataset was served beside.",
)
@_tokenizer
@click.option(
    "--other-regime",
    is_flag=True,
    help="Score rows of other weights or precision, for which nothing is promised.",
)
@result_options("Write the page, which holds text of the alerts.", DEPARTED)
@click.pass_context
def alerts(
    ctx: click.Context,
    /,
    path: str,
    profile: Path | None,
    tokenizer: str | None,
    other_regime: bool,
    html: Path | None,
    json_out: Path | None,
    fail_on: str,
    limits: dict[str, str],
) -> None:
    """Say which requests left the regime of a profile, and where.

    PATH is the dataset's folder or its s3:// URI, sealed, with readouts, of the weights, hooks and
    precision of the profile. Each trajectory is scored as a server would while it decodes. Shown
    are the rate of alerts beside the promised one, and each alert with the text around it. Exit
    codes: 0, or 1 by --fail-on; 2 usage; 3 not readable; 4 not writable.

    \b
    Examples:
      actds alerts acts
      actds alerts acts --profile profile.json --tokenizer models/small
      actds alerts acts --profile profile.json --html alerts.html --json alerts.json
    """
    outputs = Outputs(html, json_out, inputs={"--profile": [profile] if profile else []})
    from actds_studies.alerts import AlertLimits
    from actds_studies.alerts import alerts as run
    from actds_studies.pages.monitoring import alerts_page
    from actds_studies.view.requests import read_tokenizer
    from actds_validators.sections import settings_of

    words = None if tokenizer is None else read_tokenizer(tokenizer)
    chosen = settings_of(AlertLimits, limits)
    result = run(path, profile, tokenizer=words, other_regime=other_regime, limits=chosen)
    page = alerts_page(result, ctx.meta[COMMAND])
    finish(result, page, outputs, [result.answer.outcome], fail_on, DEPARTED)


class _Request(click.ParamType[tuple[str, int] | int]):
    """``N``, or ``RUN:N``."""

    name = "request"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int] | int:
        run, _, number = str(value).rpartition(":")
        if not number.isdecimal():
            self.fail(f"{value!r} is neither N nor RUN:N", param, ctx)
        return (run, int(number)) if run else int(number)


@click.command()
@click.argument("path", metavar="PATH")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default="view.html",
    show_default=True,
    callback=no_dash,
    help="Write the page here.",
)
@click.option("--hook", metavar="HOOK", help="Whose rows tokens are coloured by; the first.")
@click.option(
    "--request",
    "requests",
    type=_Request(),
    multiple=True,
    metavar="[RUN:]N",
    help="Show this request; repeatable. Else a few, evenly spaced, and who lost the most.",
)
@click.option(
    "--start", type=click.IntRange(0), default=0, show_default=True, help="First position shown."
)
@click.option(
    "--tokens",
    "n_tokens",
    type=click.IntRange(1),
    default=2000,
    show_default=True,
    help="Positions of a request shown at most; a page holds 12,000.",
)
@_tokenizer
@click.option("--probe", metavar="FILE.npy", help="Colour by products with these directions.")
@click.option("--sae", metavar="FILE", help="Colour by features of this dictionary.")
@click.option(
    "--feature",
    "features",
    type=click.IntRange(0),
    multiple=True,
    metavar="N",
    help="Which feature of --sae, or row of --probe; up to 3.",
)
@click.option("--model", metavar="NAME", help="What dictionaries call the rows' model.")
@click.option("--imported", is_flag=True, help="Show an imported dataset, which has no census.")
@click.option("--stats", is_flag=True, help="Read every row once for mean norms; they are kept.")
def view(path: str, out: Path, imported: bool, **options: Any) -> None:
    """Write a page to look at a dataset: hooks, norms, coverage, losses, text.

    PATH is the dataset's folder, sealed. The page is one file without script: what became of the
    positions, norms by position, and the text of some requests, coloured by the norm of each
    row, by a probe or by features of a dictionary. It holds the text of the prompts.

    \b
    Examples:
      actds view acts --tokenizer models/small
      actds view acts --request 17 --hook resid_post.10 --probe probe.npy
      actds view acts --sae sae_weights.safetensors --feature 12 --feature 480
    """
    from actds_studies.view import view as make

    need_folders(out)
    page = make(path, i_accept_unprovenanced=imported, **options)
    page.save(out)
    click.echo(f"page: {printable(str(out))} ({format_nbytes(len(page.html.encode()))})")
