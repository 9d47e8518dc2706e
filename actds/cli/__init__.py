"""The command line: what this package does to datasets, and what other packages add.

Everything heavy is imported inside the command that needs it, so that ``actds --help`` is fast.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from actds.cli import exchange, use
from actds.cli.command import as_typed, of_word, refuse_empty
from actds.errors import ActdsError
from actds.text import printable, shortened
from actds.version import __version__

ENTRY_POINTS = "actds.commands"
_WORDS = "actds.words"
GROUPS = {
    "Harvest": ("plan", "write", "replay", "recover", "seal"),
    "Judge": ("check", "validate", "audit", "doctor", "explain"),
    "Use": ("info", "view", "shuffle", "recompress", "export", "import", "schema"),
    "Study": ("regimes", "stability"),
    "Publish": ("card", "push", "pull", "sign", "verify"),
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


for _module in (use, exchange):
    for _command in vars(_module).values():
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
