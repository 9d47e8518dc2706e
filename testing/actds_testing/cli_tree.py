"""The commands of ``actds``, for tests that sweep over all of them."""

from __future__ import annotations

from collections.abc import Iterator

import click

__all__ = ["leaves"]


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
