"""The commands for a dataset at hand: what it is, and copies of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actds.cli.command import (
    ResultCommand,
    default_option,
    document_schema,
    envelope,
    executor_option,
    json_option,
    print_json,
    print_lines,
    print_result,
)
from actds.errors import CODES, ActdsError, Code, code_entry
from actds.text import Line, counted, format_nbytes, printable

if TYPE_CHECKING:
    from pydantic import BaseModel


@click.command("info")
@click.argument("path", metavar="PATH")
@json_option("Print the facts as JSON (actds.info 1).")
def info_command(path: str, as_json: bool) -> None:
    """Show what a dataset is, where it came from, and what it lacks.

    PATH is the dataset's folder or its s3:// URI; it need not be sealed. The facts are those of
    the dataset's documents; actds validate checks them against the data.

    \b
    Examples:
      actds info acts
      actds info s3://bucket/acts
      actds info acts --json
    """
    from actds.dataset.info import describe, page
    from actds.dataset.reading import Catalog
    from actds.store import open_store

    facts = describe(Catalog.read(open_store(path), apart=True))
    if as_json:
        print_json(envelope("info", asdict(facts)))
    else:
        print_lines(page(facts))


@click.command("explain")
@click.argument("code", required=False, metavar="[CODE]")
@json_option("Print as JSON (actds.explain 1).")
def explain_command(code: str | None, as_json: bool) -> None:
    """Explain an error code, or list all codes.

    CODE is a code such as E203, in upper or lower case.

    \b
    Examples:
      actds explain E203
      actds explain
      actds explain --json
    """
    if code is None:
        if as_json:
            print_json(_codes(CODES))
            return
        family = ""
        for name, entry in CODES.items():
            if entry.family != family:
                family = entry.family
                click.echo(family)
            click.echo(f"  {name}  {entry.title}")
        return
    name = code.upper()
    entry = code_entry(name)
    if as_json:
        print_json(_codes({name: entry}))
        return
    click.echo(f"{name}: {entry.title} ({entry.family})")
    click.echo(f"  {entry.meaning}")
    click.echo(f"  Next: {entry.next_step}")
    click.echo(f"  Spec: 0.1 section {entry.clause}. Exit code: {entry.exit_code}.")
    click.echo(f"  Python: actds.errors.{entry.error}.")


def _codes(codes: dict[str, Code]) -> dict[str, Any]:
    return envelope("explain", {"codes": {name: asdict(entry) for name, entry in codes.items()}})


@click.command("schema")
@click.argument("name", required=False, metavar="[NAME]")
@click.option(
    "--write",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write every schema to DIR/NAME.json.",
    metavar="DIR",
)
def schema_command(name: str | None, folder: Path | None) -> None:
    """Print the JSON Schema of a document, or list the documents.

    NAME is a document of a dataset (genesis, run, shard, ledger, seal), the result of a command
    (audit, regimes, stability: what they write with --json) or a file that one reads
    (policy, of actds validate). limits lists what --limit NAME=VALUE may set, by command, with
    its default.

    \b
    Examples:
      actds schema
      actds schema seal
      actds schema limits
      actds schema --write schemas
    """
    if name == "limits" and folder is None:
        print_lines(_limits())
        return
    schemas = _schemas(name)
    if name is not None and name not in schemas:
        known = f"{', '.join(_schemas())}, or limits"
        raise ActdsError("E009", "NAME", got=f"no document {name!r}", expected=f"one of {known}")
    if folder is not None:
        from actds.store import refuse_within_dataset

        refuse_within_dataset(folder, "--write")
        folder.mkdir(parents=True, exist_ok=True)
        for document, (_, make) in schemas.items():
            path = folder / f"{document}.json"
            text = json.dumps(make(), indent=2, sort_keys=True)
            path.write_text(text + "\n", encoding="utf-8")
            click.echo(f"wrote {printable(str(path))}", err=True)
    elif name is not None:
        print_json(schemas[name][1]())
    else:
        for document, (words, _) in schemas.items():
            click.echo(f"{document:8}{words}")


def _schemas(name: str | None = None) -> dict[str, tuple[str, Callable[[], dict[str, Any]]]]:
    """Title of each document, and what makes its schema; of one or of all."""
    from actds.format.schema import DOCUMENTS, json_schema

    schemas: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
        document: (_summary(model), partial(json_schema, document))
        for document, model in DOCUMENTS.items()
        if name in (None, document)
    }
    if name in schemas:
        return schemas
    for command_name, command in _result_commands():
        for document, read in command.reads.items():
            if name in (None, document):
                schemas[document] = _summary(read()), partial(document_schema, read(), "validation")
        if command.result is not None and name in (None, command_name):
            model = command.result()
            make = partial(document_schema, model, "serialization")
            schemas[command_name] = _summary(model), make
    return schemas


def _result_commands() -> Iterator[tuple[str, ResultCommand]]:
    root = click.get_current_context().find_root()
    group = root.command
    assert isinstance(group, click.Group)
    for name in group.list_commands(root):
        command = group.get_command(root, name)
        if isinstance(command, ResultCommand):
            yield name, command


def _limits() -> Iterator[Line]:
    """Yield what ``--limit`` may set: by command the name, its default and what it is."""
    for name, command in _result_commands():
        thresholds = command.thresholds()
        if thresholds:
            yield Line(name, "title")
        for limit, (default, words) in thresholds.items():
            yield Line(f"  {limit:<20}{default:<8}{words}")


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").splitlines()[0]


@click.command("seal")
@click.argument("path", metavar="PATH")
@click.option(
    "--imported",
    is_flag=True,
    help="Seal imported runs, which have no census: the dataset stays unprovenanced (E403).",
)
@json_option("Print the seal, a document of the dataset, as JSON.")
def seal_command(path: str, imported: bool, as_json: bool) -> None:
    """Seal a dataset: account for every position, then fix its content.

    PATH is the dataset's folder or its s3:// URI. Every chain must be closed or fenced. A dataset
    that did not change since its seal keeps it.

    \b
    Examples:
      actds seal acts
      actds seal acts --json
    """
    from actds.dataset.account import TOTALS
    from actds.format import canonical
    from actds.format.schema import to_bytes
    from actds.publish.sealing import seal

    document = seal(path, imported=imported)
    if as_json:
        print_json(document.model_dump(mode="json"))
        return
    totals = ", ".join(f"{name} {document.totals.get(name, 0):,}" for name in TOTALS)
    click.echo(f"seal {document.n} {canonical.digest(to_bytes(document))}")
    click.echo(totals)


@click.command("recompress")
@click.argument("path", metavar="PATH")
@click.option("--shard", "shards", multiple=True, metavar="ID", help="Only this shard; repeatable.")
@click.option("--keep", is_flag=True, help="Leave the files of the replaced shards in place.")
@executor_option("Where the shards are written anew.")
@json_option("Print what was done as JSON (actds.recompress 1).")
def recompress_command(path: str, shards: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Compress the shards that a harvest under pressure wrote raw.

    PATH is the dataset's folder. Every row is compared bit by bit before a new shard replaces a
    raw one. A sealed dataset is sealed again, so its digest changes; then the raw files are
    removed. A run that was interrupted is finished by the next one.

    \b
    Examples:
      actds recompress acts
      actds recompress acts --keep
      actds recompress acts --shard w-1a2b-000003
    """
    from actds.format.schema import ShardManifest
    from actds.rewrite.recompression import recompress

    def report(old: ShardManifest, new: ShardManifest) -> None:
        click.echo(f"{old.shard} -> {new.shard}: {old.n_rows:,} rows", err=True)

    done = recompress(path, shards or None, progress=report, **options)
    words = "no raw shard to compress"
    if done.shards:
        before, after = format_nbytes(done.nbytes_before), format_nbytes(done.nbytes_after)
        ratio = done.nbytes_before / done.nbytes_after
        words = f"{len(done.shards)} raw shards: {before} now {after} ({ratio:.3f}x)"
    files = f"files removed {done.n_removed}, kept {done.n_kept}"
    state = "not sealed" if done.seal is None else f"seal {done.seal}"
    print_result("recompress", done, as_json, [words, files, f"{state} {done.digest}"])


@click.command("shuffle")
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@default_option("--seed", click.IntRange(0), 0, "Seed of the order.")
@default_option(
    "--codec",
    click.Choice(["default", "raw"]),
    "default",
    "Compress the arrays, or copy them: a raw dataset is larger and read faster.",
)
@default_option(
    "--rows-per-shard",
    click.IntRange(1),
    1 << 16,
    "Rows of a new shard, unless memory allows fewer.",
)
@click.option(
    "--memory-mib",
    "memory_nbytes",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    callback=lambda _ctx, _param, mib: mib << 20,
    help="Memory for rows, about, of each worker.",
)
@executor_option("Where the rows are moved: several workers see IN and OUT at the same paths.")
@json_option("Print what was done as JSON (actds.shuffle 1).")
def shuffle_command(source: str, out: Path, as_json: bool, **options: Any) -> None:
    """Copy a sealed dataset with its rows in one random order, for training.

    IN is the dataset's folder or its s3:// URI. OUT is a new folder: a sealed dataset with the
    same rows and the same account, whose run records name the digest of IN. The rows of each run
    and phase are permuted over all its shards; every order is equally likely, and follows from
    the digest of IN and the seed.

    The work is done in OUT.partial, which needs room for the uncompressed rows and the copy. A
    call that was interrupted is continued by the same call.

    \b
    Examples:
      actds shuffle acts acts-shuffled
      actds shuffle acts acts-shuffled --codec raw --seed 1
    """
    from actds.rewrite.shuffling import shuffle

    shown = {"scatter": 0, "write": 0}

    def report(stage: str, n_done: int, n_all: int) -> None:
        percent = 100 * n_done // n_all
        if percent >= shown[stage] + 5 or n_done == n_all:
            shown[stage] = percent
            click.echo(f"{stage}: {n_done:,} of {n_all:,} rows", err=True)

    done = shuffle(source, out, progress=report, **options)
    before, after = format_nbytes(done.nbytes_before), format_nbytes(done.nbytes_after)
    rows = f"{done.n_rows:,} rows in {counted(done.n_shards, 'shard')}: {before}, now {after}"
    made = f"copy of {done.source_digest}, seed {done.seed}"
    print_result("shuffle", done, as_json, [rows, made, f"seal {done.seal} {done.digest}"])
