"""The command ``actds check``: valid or not, and may I train on it, in one screen."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actds.cli.command import envelope, print_json, print_lines
from actds.text import Line, printable, storable
from actds_validators.cli.results import (
    accept_option,
    keep_little,
    need_folders,
    no_dash,
    told,
    write_text,
)
from actds_validators.cli.validate import counting, finding_lines, verdict_line

if TYPE_CHECKING:
    from actds_validators.check import CheckResult, ImportedRows
    from actds_validators.pages.index import Entry

_MAX_FINDINGS, _MAX_STEPS = 2, 3


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=no_dash,
    help="Write the audit's report; of several datasets an index, with their reports beside it.",
)
@accept_option()
@click.option(
    "--imported",
    is_flag=True,
    help="Take imported rows, which have no census: no only for what is wrong with the rows.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON (actds.check 1).")
@click.option("--strict", is_flag=True, help="Fail on warnings, WARN and INCONCLUSIVE as well.")
@click.pass_context
def check(
    ctx: click.Context,
    /,
    paths: tuple[str, ...],
    html: Path | None,
    accept: tuple[str, ...],
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
      actds check runs/* --html index.html
    """
    from actds_validators.audit.outputs import refuse_outputs
    from actds_validators.check import check as run
    from actds_validators.pages.index import page_beside
    from actds_validators.pages.index import render as render_index
    from actds_validators.sections import need_extra

    need_extra(*(["jinja2"] if html else []))
    refuse_outputs({"--html": html}, {})
    need_folders(html)
    keep_little()
    several = len(paths) > 1
    codes: list[int] = []
    documents: list[dict[str, Any]] = []
    entries: list[Entry] = []
    for n, path in enumerate(paths, 1):
        with counting() as validating:
            checked = run(
                path,
                accept=accept,
                i_accept_unprovenanced=imported,
                validating=validating,
                auditing=told(),
            )
        report = page_beside(html, n, path) if several and html is not None else html
        if report is not None and checked.audit is not None:
            command = shlex.join(["actds", "audit", path, "--html", str(report)])
            write_text(report, _report(checked, command))
        codes.append(checked.exit_code(strict=strict))
        entries.append(_entry(checked, report))
        if as_json:
            documents.append(checked.as_json(strict=strict))
            continue
        print_lines([Line("")] if n > 1 else [])
        print_lines(page(checked, report, strict=strict))
    if several and html is not None:
        command = storable(shlex.join(["actds", "check", *paths, "--html", str(html)]))
        write_text(html, render_index(entries, command))
        print_lines([] if as_json else [Line(""), Line(f"index: {printable(str(html))}")])
    if as_json:
        whole = {"strict": strict, "ok": not any(codes), "exit_code": max(codes)}
        print_json(envelope("check", whole | {"datasets": documents} if several else documents[0]))
    sys.exit(max(codes))


def _entry(checked: CheckResult, report: Path | None) -> Entry:
    from actds_validators.pages.index import Entry
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


def _report(checked: CheckResult, command: str) -> str:
    from actds_validators.pages.report import render
    from actds_validators.sections import about

    assert checked.audit is not None, "there is a result to report"
    return render(checked.audit.result, about(checked.audit.catalog, command))


def page(checked: CheckResult, html: Path | None = None, *, strict: bool = False) -> Iterator[Line]:
    """Yield the screen, line by line; no line holds a control character.

    Args:
        html: where the report was asked for.
        strict: whether warnings make it no valid dataset.
    """
    for line in _page(checked, html, strict):
        yield Line(printable(line.text), line.style)


def _page(checked: CheckResult, html: Path | None, strict: bool) -> Iterator[Line]:
    path = shlex.quote(checked.validation.path)
    valid = verdict_line(checked.validation, strict=strict)
    if checked.audit is None:
        known = checked.verdict == "INCONCLUSIVE"
        yield Line(f"{'?' if known else '✗'} {checked.answer}", "title" if known else "bad")
        yield valid
        yield from finding_lines(checked.validation, _MAX_FINDINGS)
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
    yield from finding_lines(checked.validation, _MAX_FINDINGS)
    yield from (line for line in rest if line.text.split() != ["Command"])
    steps = result.answer.next_steps
    if steps:
        yield Line("What to do", "title")
        yield from (Line(f"  {n}. {step}") for n, step in enumerate(steps[:_MAX_STEPS], 1))
    if html is not None:
        yield Line(f"report: {html}")
    yield Line(f"More: actds validate {path}; actds audit {path}", "dim")


def _imported_lines(rows: ImportedRows) -> Iterator[Line]:
    """Yield what can be said of imported rows, then what nobody can know."""
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
