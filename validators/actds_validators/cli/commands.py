"""Commands ``validate``: is it valid; ``audit``: what was lost; ``check``: may I train on it."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from actds.cli.command import FiniteRange, ResultCommand, envelope, print_json, print_lines
from actds.executor import EXECUTORS, ExecutorName
from actds.text import Line, Style, counted, printable, storable
from actds_validators.cli.results import (
    COMMAND,
    LimitsCommand,
    Outputs,
    files_of,
    html_option,
    json_option,
    keep_little,
    no_dash,
    told,
    write_text,
)

if TYPE_CHECKING:
    from actds_validators.audit.passes import ExecutorName as AuditExecutorName
    from actds_validators.audit.result import Audit
    from actds_validators.audit.run import AuditResult
    from actds_validators.gate import Attester, CheckResult, ImportedRows, Passage
    from actds_validators.pages.report import Entry
    from actds_validators.policy import Policy
    from actds_validators.validate.validation import Level, Progress, Validation

LEVELS = ("quick", "standard", "full", "deep")
FORMATS = ("text", "json", "junit", "sarif", "github")
MAX_FINDINGS = 50
_MARKS = {"passed": "✓", "failed": "✗", "skipped": "-"}
_STYLES: dict[str, Style] = {"passed": "good", "failed": "bad", "skipped": "dim"}
_WORK = {
    "bytes": ("hashed", 1e9, "GB"),
    "rows": ("accounted for", 1e6, "M rows"),
    "values": ("decoded", 1e9, "GB"),
}
"""Of each kind of work its words, how many make a unit of it, and the unit."""
_QUIET_S = 2.0
_SEVEREST = (3, 1, 5, 0)
"""Exit codes of one dataset; of several, the first of these that any of them has."""


_accept_option = click.option(
    "--accept",
    type=click.Choice(("source", "cache", "rules", "ends", "queues", "values", "identity")),
    multiple=True,
    help="Waive a place where rows go, though it does not pass; repeatable.",
)
_follow_up_option = click.option(
    "--follow-up",
    metavar="DATASET",
    help="A replay of a random part of the requests (actds replay --fraction): its rows say how "
    "far means are off.",
)
_key_option = click.option(
    "--key",
    metavar="FILE",
    help="PEM file of an Ed25519 private key: sign the verdict, whatever it is, as an attestation "
    "beside the seal.",
)


def _attest(
    attester: Attester, results: Iterable[tuple[str, Passage | CheckResult | AuditResult]]
) -> None:
    """Sign verdicts, after they are printed."""
    for path, result in results:
        if (words := attester.put(path, result)) is not None:
            click.echo(printable(words), err=True)


def _policy() -> type[Policy]:
    from actds_validators.policy import Policy

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
@_follow_up_option
@_key_option
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
    follow_up: str | None,
    key: str | None,
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
      actds validate acts --policy policy.toml --key key.pem
      actds validate acts --watch
      actds validate acts --seal sha256:4f0c...
    """
    from actds_validators.gate import Attester, judge
    from actds_validators.policy import read_policy

    keep_little()
    form = "json" if as_json else form
    if watch and len(paths) > 1:
        raise click.UsageError("--watch follows one dataset")
    _need_one(follow_up, paths)
    rules = None if policy is None else read_policy(policy)
    attester = Attester(paths, key, policy)
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
                    executor=executor, seal=seal, validation=seen, follow_up=follow_up,
                )
            )  # fmt: skip
    _print(passages, form)
    _attest(attester, zip(paths, passages, strict=True))
    sys.exit(next(code for code in _SEVEREST if any(p.exit_code == code for p in passages)))


def _need_one(follow_up: str | None, paths: tuple[str, ...]) -> None:
    if follow_up is not None and len(paths) > 1:
        raise click.UsageError("--follow-up is of one dataset")


def _print(passages: list[Passage], form: str) -> None:
    if form == "text":
        for number, passage in enumerate(passages):
            if number:
                click.echo()
            print_lines(_page(passage.validation, passage.strict))
            print_lines(_policy_lines(passage))
    elif form == "json":
        if len(passages) == 1:
            print_json(envelope("validate", passages[0].as_json()))
        else:
            print_json(envelope("validations", {"datasets": [p.as_json() for p in passages]}))
    else:
        from actds_validators.gate import github, junit, sarif

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
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    amount_of = "{task.completed:.2f} of {task.total:.2f} {task.fields[unit]}"
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(amount_of))
    bars = Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), refresh_per_second=5
    )
    tasks: dict[str, TaskID] = {}
    began = time.monotonic()

    def progress(what: str, amount: int) -> None:
        words, size, unit = _WORK[what.removeprefix("all ")]
        if what.startswith("all "):
            tasks[what.removeprefix("all ")] = bars.add_task(
                words, total=amount / size, unit=unit, visible=amount > 0
            )
            return
        bars.advance(tasks[what], amount / size)
        if time.monotonic() - began >= _QUIET_S:
            bars.start()

    try:
        yield progress
    finally:
        bars.stop()


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


def _page(validation: Validation, strict: bool) -> Iterator[Line]:
    yield verdict_line(validation, strict=strict)
    for check in validation.checks:
        text = f"  {_MARKS[check.state]} {check.name.ljust(10)}  {check.detail}".rstrip()
        yield Line(text, _STYLES[check.state])
    yield from finding_lines(validation)
    yield from _totals(validation)


def verdict_line(validation: Validation, *, strict: bool = False) -> Line:
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
    but = f", at which {validation.not_read}" if validation.not_read else ""
    return f"level {validation.level}{but}"


def finding_lines(validation: Validation, room: int = MAX_FINDINGS) -> Iterator[Line]:
    if not validation.findings:
        return
    yield Line("")
    advised: set[str] = set()
    for finding in validation.findings[:room]:
        is_error = finding.severity == "error"
        label = "" if is_error else f"{finding.severity} "
        yield Line(f"{label}{finding.line()}", "bad" if is_error else "warn")
        if finding.code not in advised:
            advised.add(finding.code)
            yield Line(f"    Next: {finding.next_step}", "dim")
    more = len(validation.findings) - room
    if more > 0:
        yield Line(f"and {more:,} more findings; --json lists them all", "warn")


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
    parts += [f"{totals[n]:,} {n}" for n in ("thinned", "undelivered", "rejected") if totals[n]]
    return f"{', '.join(parts)}; {totals['scheduled']:,} tokens scheduled"


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
@_accept_option
@_follow_up_option
@_key_option
@click.option(
    "--sae",
    multiple=True,
    metavar="[HOOK=]PATH",
    help="Dictionary of a hook, for the rates of its features where rows were drawn: SAELens "
    "folder, Gemma Scope params.npz, ae.pt; repeatable.",
)
@click.option("--model", metavar="NAME", help="What dictionaries call the rows' model.")
@click.option(
    "--fail-on",
    type=click.Choice(("fail", "inconclusive", "warn", "never")),
    default="fail",
    show_default=True,
    help="Exit 1 at this verdict or worse.",
)
@click.option("--strict", is_flag=True, help="As --fail-on warn.")
@click.option(
    "--executor",
    type=click.Choice(("threads", "ray")),
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
    follow_up: str | None,
    key: str | None,
    sae: tuple[str, ...],
    model: str | None,
    fail_on: str,
    strict: bool,
    executor: AuditExecutorName,
    limits: dict[str, Any],
) -> None:
    """Estimate what a dataset lost, and whether it matters.

    PATH is the dataset's folder, sealed and valid (actds validate). The audit compares what was
    captured with what was computed and served, and ends in PASS, WARN, FAIL or INCONCLUSIVE with
    the number that decided. It reads tables, and activations where rows were drawn or with
    --follow-up: actds regimes compares values. Exit codes: 0, or 1 by --fail-on; 2 usage; 3 not
    readable, or imported, without a census to compare with; 4 not writable.
    """
    is_default = ctx.get_parameter_source("fail_on") is ParameterSource.DEFAULT
    if strict and not is_default and fail_on != "warn":
        raise click.UsageError(f"--strict is --fail-on warn and contradicts --fail-on {fail_on}")
    from actds_validators.audit.api import audit as run_audit

    outputs = Outputs(
        html,
        json_out,
        {"--weights": weights},
        {"--classes": [classes] if classes else [], "--sae": files_of(sae)},
    )
    from actds_validators.audit import place
    from actds_validators.gate import Attester
    from actds_validators.pages.report import render, render_lines
    from actds_validators.sections import about as describe

    attester = Attester([path], key)
    audited = run_audit(
        path,
        limits=limits,
        weights=weights,
        classes=classes,
        accept=accept,
        follow_up=follow_up,
        sae=sae,
        model=model,
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
    if sae and result.sample is None and outputs.on_terminal:
        click.echo("features: not counted, because no row was left out by a draw")
    _attest(attester, [(path, audited)])
    worst = "WARN" if strict else fail_on.upper()
    failing = [] if worst == "NEVER" else place.LEVELS[place.LEVELS.index(worst) :]
    sys.exit(int(result.answer.level in failing))


_MAX_FEW_FINDINGS, _MAX_STEPS = 2, 3


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@html_option(
    "Write the audit's report; of several datasets an index, with their reports beside it."
)
@_accept_option
@_follow_up_option
@_key_option
@click.option(
    "--imported",
    is_flag=True,
    help="Take imported rows, which have no census: no only for what is wrong with the rows.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON (actds.check 1).")
@click.option("--strict", is_flag=True, help="Fail on warnings, WARN and INCONCLUSIVE as well.")
def check(
    paths: tuple[str, ...],
    html: Path | None,
    accept: tuple[str, ...],
    follow_up: str | None,
    key: str | None,
    imported: bool,
    as_json: bool,
    strict: bool,
) -> None:
    """Say whether a dataset is valid, and whether to train on it.

    PATH is the dataset's folder. This is actds validate and, if the dataset is valid, actds audit,
    on one screen; each of them says more. An imported dataset has no census to audit: what can be
    said of its rows is the answer, which is no without --imported. Of several datasets each has its
    screen. Exit codes: 0 valid, and the audit does not FAIL; 1 any other answer; 2 usage; 3 not
    readable as a dataset; 4 not writable. The worst of several counts.

    \b
    Examples:
      actds check acts
      actds check acts --html audit.html
      actds check acts --json --strict
      actds check acts --key key.pem
      actds check runs/* --html index.html
    """
    from actds_validators.gate import Attester
    from actds_validators.gate import check as run
    from actds_validators.pages.report import page_beside, render, render_index
    from actds_validators.sections import about

    _need_one(follow_up, paths)
    Outputs(html, None)  # what cannot be written is refused before minutes of hashing
    attester, several = Attester(paths, key), len(paths) > 1
    results: list[tuple[str, CheckResult]] = []
    codes: list[int] = []
    documents: list[dict[str, Any]] = []
    entries: list[Entry] = []
    for n, path in enumerate(paths, 1):
        with counting() as validating:
            checked = run(
                path,
                accept=accept,
                i_accept_unprovenanced=imported,
                follow_up=follow_up,
                validating=validating,
                auditing=told(),
            )
        report = page_beside(html, n, path) if several and html is not None else html
        if report is not None and checked.audit is not None:
            command = shlex.join(["actds", "audit", path, "--html", str(report)])
            known = about(checked.audit.catalog, command)
            write_text(report, render(checked.audit.result, known))
        results += [] if key is None else [(path, checked)]
        codes.append(checked.exit_code(strict=strict))
        entries.append(_entry(checked, report))
        if as_json:
            documents.append(checked.as_json(strict=strict))
            continue
        print_lines([Line("")] if n > 1 else [])
        print_lines(_screen(checked, report, strict))
    if several and html is not None:
        command = storable(shlex.join(["actds", "check", *paths, "--html", str(html)]))
        write_text(html, render_index(entries, command))
        print_lines([] if as_json else [Line(""), Line(f"index: {printable(str(html))}")])
    if as_json:
        whole = {"strict": strict, "ok": not any(codes), "exit_code": max(codes)}
        print_json(envelope("check", whole | {"datasets": documents} if several else documents[0]))
    _attest(attester, results)
    sys.exit(max(codes))


def _entry(checked: CheckResult, report: Path | None) -> Entry:
    from actds_validators.pages.report import Entry
    from actds_validators.sections import about

    path, answer = checked.validation.path, checked.answer
    if checked.audit is None:
        first = next(iter(checked.validation.errors), None)
        why = "" if first is None else first.line()
        if checked.imported is not None:
            why = "; ".join(checked.imported.odd) or why
        return Entry(path, answer, why=why, unaudited=checked.verdict or "FAIL")
    page = "" if report is None else report.name
    known = about(checked.audit.catalog, "")
    return Entry(path, answer, checked.audit.result, known, page=page)


def _screen(checked: CheckResult, html: Path | None, strict: bool) -> Iterator[Line]:
    path = shlex.quote(checked.validation.path)
    valid = verdict_line(checked.validation, strict=strict)
    if checked.audit is None:
        known = checked.verdict == "INCONCLUSIVE"
        yield Line(f"{'?' if known else '✗'} {checked.answer}", "title" if known else "bad")
        yield valid
        yield from finding_lines(checked.validation, _MAX_FEW_FINDINGS)
        if checked.imported is not None:
            yield from _imported_lines(checked.imported)
        if html is not None:
            why = "only a valid dataset, with a census, can be audited"
            yield Line(f"report: not written; {why}")
        yield Line(f"More: actds validate {path}", "dim")
        return
    from actds_validators.pages.report import first_screen
    from actds_validators.sections import about

    result = checked.audit.result
    answer, *rest = first_screen(result, about(checked.audit.catalog, ""))
    yield answer
    yield valid
    yield from finding_lines(checked.validation, _MAX_FEW_FINDINGS)
    yield from (line for line in rest if line.text.split() != ["Command"])
    steps = result.answer.next_steps
    if steps:
        yield Line("What to do", "title")
        yield from (Line(f"  {n}. {step}") for n, step in enumerate(steps[:_MAX_STEPS], 1))
    if html is not None:
        yield Line(f"report: {html}")
    yield Line(f"More: actds validate {path}; actds audit {path}", "dim")


def _imported_lines(rows: ImportedRows) -> Iterator[Line]:
    yield Line("")
    yield Line("What can be said of the rows", "title")
    for hook in rows.hooks:
        yield Line(
            f"  {hook.name}: {hook.n_rows:,} rows of {hook.d_model:,} channels, {hook.dtype}"
        )
    odd = [Line(f"  {words}", "warn") for words in rows.odd]
    yield from odd or [Line("  every row is finite, none is all zero, none a copy of another")]
    yield Line("What is not on record, and what nobody can know without it", "title")
    yield from (Line(f"  {lack.missing}: {lack.unknowable}", "dim") for lack in rows.lacks)
