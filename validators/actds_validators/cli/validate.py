"""The command ``actds validate``: a verdict, the checks, the findings, the totals."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from actds.cli.command import FiniteRange, ResultCommand, envelope, print_json, print_lines
from actds.executor import EXECUTORS, ExecutorName
from actds.text import Line, Style, counted, printable
from actds_validators.cli.results import keep_little

if TYPE_CHECKING:
    from actds.errors import Finding
    from actds_validators.gate.gate import Passage
    from actds_validators.gate.policy import Policy
    from actds_validators.validate.validation import Level, Progress, Validation

LEVELS = ("quick", "standard", "full", "deep")
FORMATS = ("text", "json", "junit", "sarif", "github")
MAX_FINDINGS = 50
_MARKS = {"passed": "✓", "failed": "✗", "skipped": "-"}
_STYLES: dict[str, Style] = {"passed": "good", "failed": "bad", "skipped": "dim"}
_QUIET_S = 2.0
_SEVEREST = (3, 1, 5, 0)
"""Exit codes of one dataset; of several, the first of these that any of them has."""


def _policy() -> type[Policy]:
    from actds_validators.gate.policy import Policy

    return Policy


@click.command(cls=ResultCommand, reads={"policy": _policy})
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    help="quick: ledger, documents, sizes. standard: + tables, accounting. "
    "full: + digests of every file. deep: + decode every chunk, NaN, zero and repeated rows. "
    "Default: that of the policy, else full.",
)
@click.option(
    "--policy", metavar="FILE", help="Refuse what this TOML file refuses; actds schema policy."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="What is printed: a page, JSON (actds.validate 1; of several datasets actds.validations "
    "1), JUnit XML, SARIF 2.1.0, or annotations of GitHub Actions.",
)
@click.option("--json", "as_json", is_flag=True, help="As --format json.")
@click.option("--strict", is_flag=True, help="Fail on warnings as well.")
@click.option("--seal", metavar="SHA256", help="Refuse a dataset that does not extend this seal.")
@click.option(
    "--executor",
    type=click.Choice(EXECUTORS),
    default="threads",
    show_default=True,
    help="Where files are hashed and rows decoded.",
)
@click.option(
    "--watch",
    is_flag=True,
    help="Follow a harvest: validate each shard once it is committed, and all at the seal.",
)
@click.option(
    "--interval",
    type=FiniteRange(0.01),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks of --watch.",
)
@click.option(
    "--idle",
    type=FiniteRange(0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Without a writer and without news for so long, --watch takes the harvest for ended.",
)
def validate(
    paths: tuple[str, ...],
    level: Level | None,
    policy: str | None,
    form: str,
    as_json: bool,
    strict: bool,
    seal: str | None,
    executor: ExecutorName,
    watch: bool,
    interval: float,
    idle: float,
) -> None:
    """Check datasets before training on them.

    PATH is a dataset's folder or its URI. Exit codes: 0 clean, 1 not valid, 2 usage or a policy
    that cannot be used, 3 not readable as a dataset, 4 internal error, 5 valid but refused by the
    policy; of several datasets 3 before 1 before 5. Every finding has a code; actds explain CODE
    says more.

    \b
    Examples:
      actds validate acts
      actds validate acts --level deep
      actds validate acts --policy policy.toml
      actds validate runs/a runs/b --format junit > validate.xml
      actds validate acts --watch
      actds validate acts --seal sha256:4f0c...
    """
    from actds_validators.gate.gate import judge
    from actds_validators.gate.policy import read_policy

    keep_little()
    form = "json" if as_json else form
    if watch and len(paths) > 1:
        raise click.UsageError("--watch follows one dataset")
    rules = None if policy is None else read_policy(policy)
    passages = []
    for path in paths:
        seen = None
        if watch:
            chosen = level or (rules.level if rules is not None else "full")
            seen = _follow(path, chosen, interval, idle, executor, seal)
        with counting() as progress:
            passages.append(
                judge(
                    path, level=level, policy=rules, strict=strict, progress=progress,
                    executor=executor, seal=seal, validation=seen,
                )
            )  # fmt: skip
    _print(passages, form)
    sys.exit(next(code for code in _SEVEREST if any(p.exit_code == code for p in passages)))


def _print(passages: list[Passage], form: str) -> None:
    if form == "text":
        for number, passage in enumerate(passages):
            if number:
                click.echo()
            print_lines(passage_page(passage))
    elif form == "json":
        if len(passages) == 1:
            print_json(envelope("validate", passages[0].as_json()))
        else:
            print_json(envelope("validations", {"datasets": [p.as_json() for p in passages]}))
    else:
        from actds_validators.gate.gate import github, junit, sarif

        write = {"junit": junit, "sarif": sarif, "github": github}[form]
        click.echo(write(passages), nl=False)


def _follow(
    path: str, level: Level, interval: float, idle: float, executor: ExecutorName, seal: str | None
) -> Validation:
    """Return the validation at the end of a harvest; what is seen meanwhile goes to stderr."""
    from actds_validators.validate.validation import Seen, watch

    def say(seen: Seen) -> None:
        state = f"{seen.n_open} of {counted(seen.n_chains, 'chain')} open"
        done = f"{counted(seen.n_shards, 'shard')}, {counted(seen.n_rows, 'row')}"
        click.echo(f"{done}, {seen.nbytes / 1e6:.1f} MB hashed, {state}", err=True)
        for finding in seen.findings:
            click.echo(f"  {printable(finding.line())}", err=True)

    click.echo(f"watching {printable(path)} at level {level}", err=True)
    with counting() as progress:
        return watch(
            path, level, interval_s=interval, idle_s=idle, seen=say, progress=progress,
            executor=executor, seal=seal,
        )  # fmt: skip


@contextmanager
def counting() -> Iterator[Progress]:
    """Yield what shows the work on stderr, as bars: on a terminal, and when it takes a while."""
    if not sys.stderr.isatty():
        yield lambda what, amount: None
        return
    done = {"bytes": 0, "rows": 0, "values": 0}
    totals = dict.fromkeys(done, 0)
    began = time.monotonic()
    shown: list[Callable[[dict[str, int], dict[str, int]], None]] = []

    def progress(what: str, amount: int) -> None:
        if what.startswith("all "):
            totals[what.removeprefix("all ")] += amount
            return
        done[what] += amount
        if not shown and time.monotonic() - began >= _QUIET_S:
            shown.append(stack.enter_context(_bars()))
        for show in shown:
            show(done, totals)

    with ExitStack() as stack:
        yield progress


@contextmanager
def _bars() -> Iterator[Callable[[dict[str, int], dict[str, int]], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    units = {
        "bytes": ("hashed", 1e9, "GB"),
        "rows": ("accounted for", 1e6, "M rows"),
        "values": ("decoded", 1e9, "GB"),
    }
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=5) as bars:

        def show(done: dict[str, int], totals: dict[str, int]) -> None:
            for what, total in totals.items():
                words, unit, name = units[what]
                if total and what not in tasks:
                    tasks[what] = bars.add_task(words, total=total, amount="")
                if what in tasks:
                    amount = f"{done[what] / unit:.2f} of {total / unit:.2f} {name}"
                    bars.update(tasks[what], completed=done[what], total=total, amount=amount)

        yield show


def passage_page(passage: Passage) -> Iterator[Line]:
    """Yield the page of the gate: that of the validation, then what the policy says."""
    yield from page(passage.validation, strict=passage.strict)
    for line in _policy_lines(passage):
        yield Line(printable(line.text), line.style)


def _policy_lines(passage: Passage) -> Iterator[Line]:
    if passage.policy is None:
        return
    name = f"the policy {passage.policy.name}".strip()
    yield Line("")
    if passage.validation.exit_code(strict=passage.strict):
        yield Line(f"{name}: not asked; only a valid dataset is compared with a policy", "dim")
        return
    verdict = f" (audit: {passage.verdict})" if passage.verdict else ""
    if not passage.refused:
        level = f" at {_level(passage.validation)}" if passage.validation.not_read else ""
        yield Line(f"PASSES {name}{level}{verdict}", "good")
        return
    yield Line(f"REFUSED by {name}: {counted(len(passage.refused), 'rule')}{verdict}", "bad")
    for finding in passage.refused[:MAX_FINDINGS]:
        yield Line(finding.line(), "bad")
    more = len(passage.refused) - MAX_FINDINGS
    if more > 0:
        yield Line(f"and {more:,} more; --format json lists them all", "warn")


def page(validation: Validation, *, strict: bool = False) -> Iterator[Line]:
    """Yield the page, line by line; no line holds a control character."""
    for line in _page(validation, strict):
        yield Line(printable(line.text), line.style)


def _page(validation: Validation, strict: bool) -> Iterator[Line]:
    yield verdict_line(validation, strict=strict)
    for check in validation.checks:
        text = f"  {_MARKS[check.state]} {check.name.ljust(10)}  {check.detail}".rstrip()
        yield Line(text, _STYLES[check.state])
    yield from finding_lines(validation)
    yield from _totals(validation)


def verdict_line(validation: Validation, *, strict: bool = False) -> Line:
    """Return the verdict: what was found, at which level, of which content."""
    n_errors, n_warnings = len(validation.errors), len(validation.warnings)
    code = validation.exit_code(strict=strict)
    if code == 3:
        return Line(f"UNREADABLE {validation.path}: not a dataset that can be checked", "bad")
    count = f"{counted(n_errors, 'error')}, {counted(n_warnings, 'warning')}"
    if code:
        return Line(f"REFUSED {validation.path} at level {validation.level}: {count}", "bad")
    pinned = validation.pinned
    extends = "" if pinned in (None, validation.seal) else f", extends the pinned seal {pinned}"
    warned = f", {counted(n_warnings, 'warning')}" if n_warnings else ""
    # Below level full nobody looked at the activations: that is no verdict on the dataset.
    verdict = "NO ERROR in" if validation.not_read else "VALID"
    return Line(
        f"{verdict} {validation.path} at {_level(validation)}: seal {validation.seal}, "
        f"digest {(validation.digest or '')[:16]}{extends}{warned}",
        "good",
    )


def _level(validation: Validation) -> str:
    """Return the level, with what it does not look at."""
    but = f", at which {validation.not_read}" if validation.not_read else ""
    return f"level {validation.level}{but}"


def finding_lines(validation: Validation, room: int = MAX_FINDINGS) -> Iterator[Line]:
    if not validation.findings:
        return
    yield Line("")
    advised: set[str] = set()
    for finding in validation.findings[:room]:
        yield Line(f"{_label(finding)}{finding.line()}", _style(finding))
        if finding.code not in advised:
            advised.add(finding.code)
            yield Line(f"    Next: {finding.next_step}", "dim")
    more = len(validation.findings) - room
    if more > 0:
        yield Line(f"and {more:,} more findings; --json lists them all", "warn")


def _label(finding: Finding) -> str:
    return "" if finding.severity == "error" else f"{finding.severity} "


def _style(finding: Finding) -> Style:
    return "bad" if finding.severity == "error" else "warn"


def _totals(validation: Validation) -> Iterator[Line]:
    if not validation.runs:
        return
    totals = validation.totals
    yield Line("")
    yield Line(_sentence(totals), "title")
    if len(validation.runs) > 1:
        for run, counts in validation.runs.items():
            yield Line(f"  run {run}: {_sentence(counts)}")


def _sentence(totals: dict[str, int]) -> str:
    parts = [f"{totals['rows']:,} rows of {totals['requests']:,} requests"]
    words = {
        "cache_ref": "prefix-cache hits",
        "unresolved": "of them unresolved",
        "external": "of them from outside",
        "dropped": "dropped",
        "aborted": "aborted",
        "filtered": "filtered",
        "recomputed": "recomputed",
    }
    shown = {name: word for name, word in words.items() if name != "external" or totals[name]}
    parts += [f"{totals[name]:,} {word}" for name, word in shown.items()]
    # Of engines that schedule ahead or draft.
    parts += [f"{totals[n]:,} {n}" for n in ("undelivered", "rejected") if totals[n]]
    return f"{', '.join(parts)}; {totals['scheduled']:,} tokens scheduled"
