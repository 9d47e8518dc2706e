"""What the commands share that write a result as JSON and a page."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from actds.cli.command import ResultCommand, model_options, print_lines
from actds.text import Line, storable

if TYPE_CHECKING:
    from actds_validators.sections import LimitsSection

Command = TypeVar("Command", bound="Callable[..., Any] | click.Command")
COMMAND = "actds.command"
"""Key of a context under which the command stands as it was typed."""


class LimitsCommand(ResultCommand):
    """A command with ``--limit NAME=VALUE`` for the limits of its result.

    The model of the result has a field ``limits``, a ``LimitsSection``. The function gets all of
    them as ``limits``, by name.
    """

    def limits(self) -> type[LimitsSection]:
        """Return the model of the limits."""
        assert self.result is not None
        return cast("type[LimitsSection]", self.result().model_fields["limits"].annotation)

    def thresholds(self) -> dict[str, tuple[str, str]]:
        """Return what ``--limit`` may set, by name: its default, and what it is."""
        fields = self.limits().thresholds()
        return {name: (f"{f.default:g}", f.description or "") for name, f in fields.items()}

    @cached_property
    def _settings(self) -> list[click.Option]:
        limits = self.limits()
        return list(model_options(limits, limits.thresholds()))

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters: those of the command, --limit, the settings, --help."""
        params, n = super().get_params(ctx), len(self.params)
        return [*params[:n], _LIMIT, *self._settings, *params[n:]]

    def invoke(self, ctx: click.Context) -> Any:
        """Call the function with the limits and settings that were given."""
        given = ctx.params["limits"]
        for option in self._settings:
            assert option.name is not None
            if option.name in given:
                message = f"{option.name} is an option of its own: {option.opts[0]}"
                raise click.BadParameter(message, ctx, _LIMIT)
            given[option.name] = ctx.params.pop(option.name)
        return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and remember them as they were typed: the report names them."""
        ctx.meta[COMMAND] = storable(shlex.join([*ctx.command_path.split(), *args]))
        return super().parse_args(ctx, args)


def _by_name(ctx: click.Context, param: click.Parameter, words: tuple[str, ...]) -> dict[str, str]:
    """Return the values of ``NAME=VALUE`` as they are; the model of the limits judges them."""
    values: dict[str, str] = {}
    for word in words:
        name, is_set, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not is_set or not name:
            raise click.BadParameter(f"{word[:80]!r} is not NAME=VALUE", ctx, param)
        if name in values:
            raise click.BadParameter(f"{name[:80]} twice", ctx, param)
        values[name] = value.strip()
    return values


_LIMIT = click.Option(
    ["--limit", "limits"],
    multiple=True,
    metavar="NAME=VALUE",
    callback=_by_name,
    help="A limit in place of its default; repeatable. actds schema limits lists them.",
)


def html_option(words: str) -> Callable[[Command], Command]:
    """Return the option of the page, with its help."""
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option("--html", type=kind, callback=no_dash, help=words)


def accept_option() -> Callable[[Command], Command]:
    """Return the option that waives places by name: ``accept``."""
    names = ("source", "cache", "rules", "ends", "queues", "values", "identity")
    return click.option(
        "--accept",
        type=click.Choice(names),
        multiple=True,
        help="Waive a place where rows go, though it does not pass; repeatable.",
    )


def json_option() -> Callable[[Command], Command]:
    """Return the option of the result as JSON: ``json_out``."""
    return click.option(
        "--json",
        "json_out",
        type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
        help="Write the result as JSON; - prints it instead of the page.",
    )


def no_dash(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse ``-``: of all outputs only the result can go to the terminal."""
    if value is not None and str(value) == "-":
        raise click.BadParameter("'-' is no file; only --json can print", ctx, param)
    return value


class Outputs:
    """Where a result goes: a page, JSON, the terminal. What cannot be written is refused at once.

    Args:
        html: file of the page, if any.
        json_out: file of the JSON, ``-`` for the terminal, if any.
        further: other files that the command writes, by option.

    Raises:
        ActdsError: E009 two options with one file; E011 a package that is not installed; E503 a
            folder that is not there.
    """

    def __init__(
        self,
        html: Path | None,
        json_out: Path | None,
        further: Mapping[str, Path | None] | None = None,
        inputs: Mapping[str, Sequence[Path]] | None = None,
    ) -> None:
        from actds_validators.audit.outputs import refuse_outputs
        from actds_validators.sections import need_extra

        need_extra(*(["jinja2"] if html else []))
        self.on_terminal = json_out is None or str(json_out) != "-"
        self._html, self._json = html, json_out if self.on_terminal else None
        files = {"--html": html, "--json": self._json, **(further or {})}
        refuse_outputs(files, dict(inputs or {}))
        need_folders(*files.values())
        keep_little()

    def write(
        self, text: str, page: Callable[[], str], lines: Callable[[], Iterable[Line]]
    ) -> None:
        """Write the result.

        Raises:
            ActdsError: E503 a file that cannot be written.
        """
        if self._json is not None:
            write_text(self._json, text + "\n")
        if self._html is not None:
            write_text(self._html, page())
        if not self.on_terminal:
            click.echo(text)
            return
        print_lines(lines())
        self.say({"report": self._html, "result": self._json})

    def say(self, files: Mapping[str, Path | None]) -> None:
        """Say where files are, unless the terminal has the JSON."""
        for what, path in files.items():
            if self.on_terminal and path is not None:
                click.echo(f"{what}: {storable(str(path))}")


def files_of(words: Iterable[str]) -> list[Path]:
    """Return the files that ``[HOOK=]PATH`` may mean: PATH, and the files of a folder."""
    files = []
    for text in words:
        for path in (Path(text), Path(text.partition("=")[2] or text)):
            # os.path answers for a name that is too long as well.
            is_folder = os.path.isdir(path)
            files += [path / name for name in os.listdir(path)] if is_folder else [path]
    return files


def keep_little() -> None:
    """Let the C library give memory back that an array of a megabyte or more had.

    By default it raises that size to the largest array it has seen freed, up to 32 MB, and keeps
    an arena per thread: arrays of 10 MB by the thousand then leave 80 to 120 MB that nobody uses
    (measured with 11 million readouts). It would also give back and fetch again the few megabytes
    of every batch.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
        mallopt(-1, 16 << 20)  # M_TRIM_THRESHOLD
        mallopt(-8, 2)  # M_ARENA_MAX


def need_folders(*outputs: Path | None) -> None:
    """Refuse a file inside a dataset (E009), or in a folder that is not there (E503), at once."""
    from actds.store import refuse_within_dataset
    from actds_validators.audit.outputs import unwritable

    for out in outputs:
        if out is not None:
            refuse_within_dataset(out, "the output")
        if out is not None and not out.parent.is_dir():
            next_step = "Make the folder, or give another path."
            raise unwritable(out, f"no folder {out.parent}", next_step)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; raises E503 where it cannot be written."""
    from actds_validators.audit.outputs import replaced

    with replaced(path) as new:
        new.write_text(text, encoding="utf-8")


def told() -> Callable[[str], None]:
    """Return what says on a terminal what is being done."""
    if not sys.stderr.isatty():
        return lambda what: None
    return lambda what: click.echo(f"{what} …", err=True)
