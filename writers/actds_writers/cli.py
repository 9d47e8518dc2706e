"""The commands ``actds write``, ``replay``, ``attest``, ``recover`` and ``plan``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import actds
from actds.cli.command import ResultCommand, SettingsCommand

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel

    from actds.publish.attestation import Attestation
    from actds.text import Line, Style
    from actds_writers.harvest.plan import Profile
    from actds_writers.harvest.recover import RecoverResult, RunFound
    from actds_writers.harvest.result import HarvestResult


def _model(name: str) -> Callable[[], type[BaseModel]]:
    return lambda: getattr(import_module("actds_writers.config"), name)


def _renamed(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        words = (
            "No such option '--writer': --engine names the engine, --engine-arg sets its options."
        )
        raise click.UsageError(words, ctx)


WRITE_EXAMPLES = """\b
Examples:
  actds write acts --model models/small --prompts prompts.jsonl --hooks resid_post:10,20
  actds write acts --model models/small --prompts prompts.jsonl --hooks resid_post:10,20 --resume
  actds write s3://bucket/acts --model models/small --prompts hf:chats --hooks resid_post:all \\
      --engine transformers --engine-arg max_num_seqs=4 --canary 0.1%
"""


@click.command(
    cls=SettingsCommand, settings=_model("WriteSettings"), skip=["out"], epilog=WRITE_EXAMPLES
)
@click.argument("out", metavar="OUT")
@click.option(
    "--writer", hidden=True, expose_value=False, callback=_renamed, help="Renamed to --engine."
)
@click.option("--quiet", is_flag=True, help="Show no progress; the summary is still printed.")
def write(
    out: str,
    quiet: bool,
    engine_args: tuple[str, ...],
    ray_options: tuple[str, ...],
    **settings: Any,
) -> None:
    """Harvest activations from a real engine into OUT.

    Serves every prompt, stores the activations of every token that the engine computes, and
    accounts for every token. Ctrl-C drains, commits and seals; --resume continues.
    """
    from actds_writers.engine_protocol import parse_words

    options = parse_words(ray_options)
    _run_shown(actds.write, out, engine_args, quiet=quiet, ray_options=options, **settings)


REPLAY_EXAMPLES = """\b
Examples:
  actds replay acts alone --model models/small --alone
  actds replay acts other --model models/small --neighbours 7
  actds replay acts missing --model models/small --only missing
  actds replay acts exact --model models/small --engine-arg dtype=float32 --max-requests 64
"""


@click.command(
    cls=SettingsCommand,
    settings=_model("ReplaySettings"),
    skip=["source", "out"],
    epilog=REPLAY_EXAMPLES,
)
@click.argument("source", metavar="SOURCE")
@click.argument("out", metavar="OUT")
@click.option("--quiet", is_flag=True, help="Show no progress; the summary is still printed.")
def replay(out: str, quiet: bool, engine_args: tuple[str, ...], **settings: Any) -> None:
    """Serve the token sequences of SOURCE again under other settings, into OUT.

    Each request of SOURCE, a sealed dataset, becomes one prompt, its sampled tokens included: every
    token is read in prefill, and nothing is generated. The table origins of OUT leads each request
    to its source and says which tokens had been sampled. Requests whose tokens are not all known
    are skipped and counted.
    """
    _run_shown(actds.replay, out, engine_args, quiet=quiet, **settings)


def _run_shown(
    run: Callable[..., HarvestResult],
    out: str,
    engine_args: tuple[str, ...],
    *,
    quiet: bool,
    **settings: Any,
) -> None:
    """Run ``actds.write`` or ``actds.replay`` on a terminal; exits with 1 when interrupted."""
    from actds_writers.engine_protocol import parse_words
    from actds_writers.harvest.result import Terminal

    terminal = Terminal(out, quiet=quiet)
    options = parse_words(engine_args)
    try:
        result = run(observer=terminal, out=out, engine_args=options, **settings)
    except BaseException:
        terminal.failed()
        raise
    if result.reason == "interrupted":
        click.echo(
            f"Interrupted. Everything committed is {'sealed' if result.seal else 'kept'}. "
            "Continue with the same command and --resume.",
            err=True,
        )
        click.get_current_context().exit(1)


class _AttestCommand(SettingsCommand, ResultCommand):
    """A command with the options of a model, and a document as its result."""


def _attestation() -> type[Attestation]:
    from actds.publish.attestation import Attestation

    return Attestation


ATTEST_EXAMPLES = """\b
Examples:
  actds attest acts --model models/small
  actds attest acts --model models/small --fraction 0.05 --seed 7 --key key.pem
  actds attest s3://bucket/acts --model org/name --json attested.json --strict
"""


@click.command(
    cls=_AttestCommand,
    settings=_model("AttestSettings"),
    skip=["source"],
    result=_attestation,
    epilog=ATTEST_EXAMPLES,
)
@click.argument("source", metavar="DATASET")
@click.option(
    "--json",
    "json_out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result as JSON.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 also where it cannot tell.")
@click.option("--quiet", is_flag=True, help="Show no progress; the answer is still printed.")
def attest(
    source: str,
    json_out: Path | None,
    strict: bool,
    quiet: bool,
    engine_args: tuple[str, ...],
    **settings: Any,
) -> None:
    """Serve a random share of DATASET again, and say whether its rows are of this model.

    The drawn requests are served twice, in the precision on record and in float32, into a temporary
    folder. The readouts of DATASET are compared with the rows of both, and no array of it is read.
    The answer is same, another, or cannot tell; with --key it is signed, beside the seal. Exit
    codes: 0 same, or cannot tell; 1 another; 2 usage; 3 not readable, or another model than is on
    record; 4 an engine that fails.
    """
    from actds.cli.command import print_lines
    from actds.store import refuse_within_dataset
    from actds.store.folders import replaced
    from actds_writers.engine_protocol import parse_words
    from actds_writers.harvest.attest import attest as run
    from actds_writers.harvest.result import Terminal

    class Progress(Terminal):
        def ended(self, result: HarvestResult) -> None:
            """Say nothing: the replay is no result."""

    if json_out is not None:
        refuse_within_dataset(json_out, "--json")
    terminal = Progress(f"{Path(source).name}.attest", quiet=quiet)
    options = parse_words(engine_args)
    try:
        result = run(source=source, engine_args=options, observer=terminal, **settings)
    except BaseException:
        terminal.failed()
        raise
    if json_out is not None:
        with replaced(json_out) as new:
            new.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print_lines(_attested(result, settings["key"] is not None))
    sys.exit(int(result.verdict == "another" or (strict and result.verdict != "same")))


_ANSWERS: dict[str, tuple[str, Style]] = {
    "same": ("✓ The model and precision on record", "good"),
    "another": ("✗ Another model or precision, or other rows", "bad"),
    "cannot tell": ("? Cannot tell", "warn"),
}


def _attested(result: Attestation, is_signed: bool) -> Iterator[Line]:
    from actds.store import layout
    from actds.text import Line, counted

    words, style = _ANSWERS[result.verdict]
    yield Line(f"{words}: {result.reason}", style)
    drawn = (
        f"{counted(result.n_requests, 'request')} compared, {result.n_skipped} drawn and skipped"
    )
    yield Line(f"seal {result.seal} sha256:{result.digest}: {drawn}, seed {result.seed}")
    yield Line(
        "  hook: rows, distance from the reference, floor, ratio with its interval, far rows"
    )
    for hook in result.hooks:
        yield Line(
            f"  {hook.hook}: {hook.n_pairs:,}, {hook.distance:.2g}, {hook.floor:.2g}, "
            f"{hook.ratio:.2f} ({hook.low:.2f} to {hook.high:.2f}), {hook.n_far:,}"
        )
    for power in result.power:
        seen = "would have been found" if power.seen else "would not have been found"
        yield Line(f"  a copy with weights of {power.bits} bits {seen}")
    yield Line("Not shown by this", "title")
    yield from (Line(f"  {words}", "dim") for words in result.not_seen)
    if is_signed:
        yield Line(f"signed: {layout.attestations_path(result.seal)}")


_SHOWN = 20
_WORDS = {
    "accounted": "its census is complete",
    "recovered": "accounted for from its journal",
    "empty": "it committed nothing",
    "imported": "it never had a census",
    "unaccountable": "it has neither census nor journal",
    "at work": "its processes live, and it was left alone",
}
RECOVER_EXAMPLES = """\b
Examples:
  actds recover acts
  actds recover acts --clear
  actds recover s3://bucket/acts --json
"""


@click.command(epilog=RECOVER_EXAMPLES)
@click.argument("path", metavar="PATH")
@click.option(
    "--clear", is_flag=True, help="Remove files that no record names: uncommitted shards, journals."
)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON (actds.recover 1).")
def recover(path: str, clear: bool, as_json: bool) -> None:
    """Recover a dataset whose harvest was killed or lost its power.

    PATH is the dataset's folder or its s3:// location. Keeps every acknowledged row, accounts for
    all others as aborted, closes open ledger chains and seals the dataset. A process of this
    machine is looked up, one of another is watched for a minute. Runs whose processes live are left
    alone; the dataset is then not sealed, and without a run to recover this is refused.
    """
    from actds.cli.command import envelope, print_json

    done = actds.recover(path, clear=clear, say=lambda line: click.echo(line, err=True))
    if as_json:
        print_json(envelope("recover", done.as_json()))
    else:
        for line in _lines(done):
            click.echo(line)
    if done.error is not None:
        raise done.error


def _lines(done: RecoverResult) -> Iterator[str]:
    from actds.text import printable

    for run in done.runs:
        yield from _run_lines(run)
    nbytes = sum(done.unreachable.values())
    verb = "removed" if done.cleared else "kept; --clear removes them"
    if done.unreachable:
        yield f"{len(done.unreachable)} unreachable files, {nbytes:,} bytes: {verb}"
        for path in list(done.unreachable)[:_SHOWN]:
            yield f"  {printable(path)}"
        if len(done.unreachable) > _SHOWN:
            yield f"  and {len(done.unreachable) - _SHOWN} more"
    if done.seal is None and done.error is None:
        yield "not sealed: others are at work; actds seal when they have ended"
    if done.seal is not None:
        yield f"sealed: seal {done.seal.n}, {done.seal.totals['rows']:,} rows"


def _run_lines(run: RunFound) -> Iterator[str]:
    yield f"run {run.run}: {run.outcome}, {_WORDS[run.outcome]}"
    chains = ", ".join(f"{chain} {state}" for chain, state in run.chains.items())
    yield f"  found: chains {chains}; {run.n_segments} journal segments"
    text = f"  kept: {run.n_rows:,} acknowledged rows"
    aborted = run.totals.get("aborted")
    yield text if aborted is None else f"{text}; {aborted:,} tokens accounted for as aborted"


PLAN_EXAMPLES = """\b
Examples:
  actds plan --model models/small --hooks resid_post:10,20 --prefill-rate 9000 --decode-rate 1000
  actds plan --d-model 4096 --layers 32 --profile acts --measure /data --burst 4:10 --json
"""


@click.command(cls=SettingsCommand, settings=_model("PlanSettings"), epilog=PLAN_EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON (actds.plan 1).")
def plan(as_json: bool, engine_args: tuple[str, ...], **settings: Any) -> None:
    """Size a harvest: bytes per second at every stage, disk, rings, memory.

    Shows which stage saturates first, and what a disk stall costs under each overflow policy.
    Sizes for the burst, not for the mean. Exits with 1 when a stage cannot carry the mean load.
    """
    from actds.cli.command import envelope, print_json
    from actds_writers.engine_protocol import parse_words

    result = actds.plan(engine_args=parse_words(engine_args), **settings)
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


def _say_profile(profile: Profile) -> None:
    for windows in profile.windows:
        click.echo(
            f"profile: windows of {windows.seconds:g} s: mean {windows.mean:,.0f}, "
            f"p50 {windows.p50:,.0f}, p99 {windows.p99:,.0f}, max {windows.max:,.0f} tokens/s "
            f"({windows.n} windows{', too few for p99' if profile.is_short else ''})",
            err=True,
        )
