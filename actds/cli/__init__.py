"""The command line: commands for a dataset at hand, for others, and what other packages add.

Everything heavy is imported inside the command that needs it, so that ``actds --help`` is fast.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from difflib import get_close_matches
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actds.cli import exchange
from actds.cli.command import (
    ResultCommand,
    as_typed,
    default_option,
    document_schema,
    envelope,
    executor_option,
    json_option,
    of_word,
    print_json,
    print_lines,
    print_result,
    refuse_empty,
)
from actds.errors import CODES, ActdsError, Code, code_entry
from actds.text import Line, counted, format_nbytes, printable, shortened
from actds.version import __version__

if TYPE_CHECKING:
    from pydantic import BaseModel

ENTRY_POINTS = "actds.commands"
_WORDS = "actds.words"
GROUPS = {
    "Harvest": ("plan", "write", "replay", "recover", "seal"),
    "Judge": ("check", "validate", "audit", "doctor", "explain"),
    "Use": ("info", "view", "shuffle", "recompress", "redact", "export", "import", "schema"),
    "Study": ("regimes", "stability", "attention", "steer", "profile", "alerts"),
    "Publish": ("card", "push", "pull", "sign", "verify", "attest"),
}
"""The commands by purpose, in the order of the work; ``actds --help`` lists others at the end."""


class ActdsGroup(click.Group):
    """The commands of this package and of every installed one; errors without tracebacks.

    A package that adds commands may hold ``SUMMARIES`` beside them, one line of help by name: then
    ``actds --help`` lists them without importing them.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *plugins()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        plugin = plugins().get(cmd_name)
        return super().get_command(ctx, cmd_name) or (_load(plugin) if plugin else None)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Those of other packages stay unloaded where they can."""
        names = self.list_commands(ctx)
        longest = max(map(len, names))
        room = formatter.width - 6 - longest
        rest = tuple(name for name in names if name not in sum(GROUPS.values(), ()))
        for group, members in {**GROUPS, "Other packages": rest}.items():
            rows = [
                (name.ljust(longest), self._summary(ctx, name).get_short_help_str(room))
                for name in members
                if name in names
            ]
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)

    def _summary(self, ctx: click.Context, name: str) -> click.Command:
        plugin = plugins().get(name)
        if plugin is not None and name not in self.commands:
            try:
                package = import_module(plugin.module.rpartition(".")[0])
            except ImportError as error:
                return _unavailable(name, str(error))
            summary = getattr(package, "SUMMARIES", {}).get(name)
            if summary is not None:
                return click.Command(name, help=summary)
        command = self.get_command(ctx, name)
        assert command is not None, f"{name} is listed"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """A mistyped command gets a suggestion; E009 a path or name that is empty."""
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not near:
                raise
            words = f"No such command {args[0]!r}. Did you mean {near[0]!r}?"
            raise click.UsageError(words, ctx) from error
        if command is not None:
            refuse_empty(command, ctx, rest)
        return name, command, rest

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Accept ``--debug`` anywhere: it is appended when a command is repeated."""
        end = args.index("--") if "--" in args else len(args)
        rest = [arg for arg in args[:end] if arg != "--debug"] + args[end:]
        if len(rest) < len(args):
            rest.insert(0, "--debug")
        ctx.meta[_WORDS] = tuple(rest)
        return super().parse_args(ctx, rest)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error is printed on stderr and sets the exit code."""
        if ctx.params.get("debug"):
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            vars(error)["message"] = shortened(error.message)
            raise
        except (click.Abort, click.exceptions.Exit):
            raise
        except ActdsError as error:
            _fail(ctx, error)
        except BrokenPipeError:
            raise
        except Exception as error:
            # An unexpected exception gets a code as well.
            got = f"{type(error).__name__}: {error}"[:1000]
            unexpected = ActdsError("E901", "actds", got=got, expected="no such failure")
            _fail(ctx, of_word(error, ctx.meta[_WORDS]) or unexpected)


@cache
def plugins() -> dict[str, EntryPoint]:
    # Cached: each look reads the metadata of every installed package.
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _load(entry: EntryPoint) -> click.Command:
    """The command of an entry point, or one that fails with the reason."""
    try:
        command = entry.load()
    except ImportError as error:
        return _unavailable(entry.name, str(error))
    if not isinstance(command, click.Command):
        return _unavailable(entry.name, f"{entry.value} is no click command")
    return command


def _unavailable(name: str, why: str) -> click.Command:
    def callback(args: tuple[str, ...]) -> None:
        expected = "the package of that command, whole and of this version"
        raise ActdsError("E011", name, got=why, expected=expected)

    return click.Command(
        name,
        callback=callback,
        params=[click.Argument(["args"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        short_help=f"(not available: {why})",
    )


def _fail(ctx: click.Context, error: ActdsError) -> None:
    command = ctx.command.get_command(ctx, ctx.invoked_subcommand or "")  # type: ignore[attr-defined]
    params = [] if command is None else command.get_params(click.Context(command, parent=ctx))
    for line in str(as_typed(error, params)).splitlines():
        click.echo(shortened(printable(line)), err=True)
    ctx.exit(error.exit_code)


@click.group(cls=ActdsGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="actds", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Activation datasets that say how they were harvested.

    \b
    Example, from a model to a batch:
      actds write acts --model FOLDER --prompts prompts.jsonl --hooks resid_post:10
      actds check acts
      python -c "import actds; print(next(actds.Loader('acts', 'resid_post.10')))"
    """


@cli.command("info")
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
    from actds.dataset.reading import read_catalog
    from actds.store import open_store

    facts = describe(read_catalog(open_store(path), apart=True))
    if as_json:
        print_json(envelope("info", asdict(facts)))
    else:
        print_lines(page(facts))


@cli.command("explain")
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


@cli.command("schema")
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
    (audit, regimes, stability, attention, steer, alerts: what they write with --json; profile) or a
    file that one reads (policy, of actds validate). limits lists what --limit NAME=VALUE may set,
    by command, with its default.

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


@cli.command("seal")
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
    that did not change since its seal keeps it. Says which parts of the prompts no run has served.

    \b
    Examples:
      actds seal acts
      actds seal acts --json
    """
    from actds.dataset.account import TOTALS
    from actds.dataset.sources import missing_parts
    from actds.format import canonical
    from actds.format.schema import to_bytes
    from actds.publish.sealing import sealed_catalog

    catalog = sealed_catalog(path, imported=imported)
    document = catalog.seal
    assert document is not None
    if missing := missing_parts(catalog):
        words = f"{counted(len(missing), 'part')} of the prompts missing: {', '.join(missing[:32])}"
        click.echo(f"{words}{' ...' if len(missing) > 32 else ''}", err=True)
    if as_json:
        print_json(document.model_dump(mode="json"))
        return
    totals = ", ".join(f"{name} {document.totals.get(name, 0):,}" for name in TOTALS)
    click.echo(f"seal {document.n} {canonical.digest(to_bytes(document))}")
    click.echo(totals)


@cli.command("recompress")
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


@cli.command("redact")
@click.argument("path", metavar="DATASET")
@click.option(
    "--request",
    "requests",
    multiple=True,
    metavar="ID",
    help="Id that the client gave or that the response had, or RUN/NUMBER; repeatable.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="NAME=VALUE",
    help="Requests with this label; with several, those that have all of them.",
)
@click.option(
    "--dependents",
    multiple=True,
    metavar="PATH",
    type=click.Path(exists=True, path_type=Path),
    help="File or folder to search for what was made from this dataset; repeatable.",
)
@json_option("Print what was done as JSON (actds.redact 1).")
def redact_command(
    path: str,
    requests: tuple[str, ...],
    labels: tuple[str, ...],
    dependents: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Take requests out of every file of a dataset.

    Their tokens, rows, ids, labels and readouts are gone afterwards; the account of every position
    still adds up, and says "redacted". A sealed dataset is sealed again, so its digest changes, and
    who pinned an older seal is refused (E805). Copies elsewhere (backups, versions of a bucket,
    the Hub, what was trained) are yours to find: --dependents lists files that name the dataset.

    \b
    Examples:
      actds redact acts --request chatcmpl-8f14e45f
      actds redact acts --label user=u-1017 --dependents runs/
    """
    from actds.rewrite.redaction import redact

    known = {}
    for label in labels:
        name, equals, known[name] = label.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{label!r} is not NAME=VALUE", param_hint="--label")
    done = redact(path, requests, labels=known, dependents=dependents)
    n = sum(map(len, done.requests.values()))
    lines = [
        f"{counted(n, 'request')} redacted: {done.n_rows:,} rows, "
        f"{counted(len(done.shards), 'shard')} and {counted(done.n_parts, 'part')} written anew",
        f"files removed {done.n_removed}",
        *(f"made from this dataset: {printable(name)}" for name in done.dependents),
        f"{'not sealed' if done.seal is None else f'seal {done.seal}'} {done.digest}",
    ]
    print_result("redact", done, as_json, lines)


@cli.command("shuffle")
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


for _command in vars(exchange).values():
    if isinstance(_command, click.Command):
        cli.add_command(_command)


_WITHOUT_PANDAS = ("info", "recompress", "seal", "shuffle", "validate")


class _NoPandas:
    """An import finder for which pandas is not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("this command does without pandas", name=name)


def main() -> None:
    """Run the command line, in a process of its own."""
    # pyarrow imports pandas, where it is installed, at its first conversion from or to NumPy: that
    # takes longer than all the rest of a check of a small dataset. It goes on without; None in
    # sys.modules does not stop its compiled import. Who calls ``cli`` or the library has pandas.
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    if command in _WITHOUT_PANDAS:
        sys.meta_path.insert(0, _NoPandas)
    # The words alone: the line of this library that warns tells nobody anything.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        cli(prog_name="actds")
    finally:
        with suppress(ValueError):
            sys.meta_path.remove(_NoPandas)
