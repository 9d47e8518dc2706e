"""The command ``actds recover``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actds_writers.harvest.recover import RecoverResult, RunFound

_SHOWN = 20
_WORDS = {
    "accounted": "its census is complete",
    "recovered": "accounted for from its journal",
    "empty": "it committed nothing",
    "imported": "it never had a census",
    "unaccountable": "it has neither census nor journal",
}


EXAMPLES = """\b
Examples:
  actds recover acts
  actds recover acts --clear
  actds recover s3://bucket/acts --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("path", metavar="PATH")
@click.option(
    "--clear", is_flag=True, help="Remove files that no record names: uncommitted shards, journals."
)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON (actds.recover 1).")
def recover(path: str, clear: bool, as_json: bool) -> None:
    """Recover a dataset whose harvest was killed or lost its power.

    PATH is the dataset's folder or its s3:// location. Keeps every acknowledged row, accounts for
    all others as aborted, closes open ledger chains and seals the dataset. Refuses while a process
    still writes: one of this machine is looked up, one of another is watched for a minute.
    """
    from actds.cli.command import envelope, print_json
    from actds_writers.harvest.recover import recover as run

    done = run(path, clear=clear, say=lambda line: click.echo(line, err=True))
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
    if done.seal is not None:
        yield f"sealed: seal {done.seal.n}, {done.seal.totals['rows']:,} rows"


def _run_lines(run: RunFound) -> Iterator[str]:
    yield f"run {run.run}: {run.outcome}, {_WORDS[run.outcome]}"
    chains = ", ".join(f"{chain} {state}" for chain, state in run.chains.items())
    yield f"  found: chains {chains}; {run.n_segments} journal segments"
    text = f"  kept: {run.n_rows:,} acknowledged rows"
    aborted = run.totals.get("aborted")
    yield text if aborted is None else f"{text}; {aborted:,} tokens accounted for as aborted"
