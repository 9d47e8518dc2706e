"""The commands of ``actds``, for tests that sweep over all of them."""

from __future__ import annotations

from collections.abc import Iterator

import click
from click.testing import Result

from actds.cli.command import as_typed
from actds.errors import ActdsError

__all__ = ["leaves", "printed"]


def printed(result: Result, command: click.Command) -> str:
    """Return the error that ended a command which was called without its group, as it is shown."""
    assert isinstance(result.exception, ActdsError), result.output
    return str(as_typed(result.exception, command.get_params(click.Context(command))))


def leaves(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the names that lead to each command that is no group, and the command."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    ctx = click.Context(command)
    for name in command.list_commands(ctx):
        sub = command.get_command(ctx, name)
        assert sub is not None, f"{name} is listed"
        yield from leaves(sub, (*path, name))
