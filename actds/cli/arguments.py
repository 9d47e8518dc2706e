"""Arguments in errors: functions name their own, and the command line the options that set them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from actds.errors import ActdsError, advice

_PATHS = re.compile("PATH|FILE|FOLDER")


def refuse_empty(command: click.Command, context: click.Context, words: Sequence[str]) -> None:
    """Refuse an argument, or an option that takes a path, that is empty: Python reads it as ``.``.

    Args:
        command: the command.
        context: that it is called from.
        words: the words after its name.

    Raises:
        ActdsError: E009 with the argument or option.
    """
    own = click.Context(command, parent=context)
    try:
        given, _, _ = command.make_parser(own).parse_args(list(words))
    except click.UsageError:  # which the command says itself
        return
    for param in command.get_params(own):
        values = given.get(param.name or "")
        takes_path = isinstance(param.type, click.Path) or _PATHS.search(param.metavar or "")
        if not isinstance(param, click.Argument) and not takes_path:
            continue
        if "" in (values if isinstance(values, list | tuple) else [values]):
            place, expected = _shown(param), "a path or a name"
            raise ActdsError("E009", place, got="an empty word", expected=expected)


def of_word(error: Exception, words: Sequence[str]) -> ActdsError | None:
    """Return E009 for a word of the command line that the system cannot take as a path, or None.

    Args:
        error: what the system, or Python, raised: a name that is too long, or is no text.
        words: the words after ``actds``.
    """
    if isinstance(error, UnicodeEncodeError):
        text, got = error.object, "bytes that are no UTF-8"
    elif isinstance(error, OSError) and isinstance(error.filename, str):
        text, got = error.filename, error.strerror or str(error)
    else:
        return None
    for before, word in zip(("", *words), words, strict=False):
        option, equals, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
        if not value or value not in text:
            continue
        place = option if equals else before if before.startswith("--") else value[:80]
        return ActdsError("E009", place, got=f"{value[:80]!r}: {got}", expected="a path to use")
    return None


def as_typed(error: ActdsError, params: Sequence[click.Parameter]) -> ActdsError:
    """Return an error of a function as the caller of a command reads it.

    Its place and its advice name options instead of arguments: ``rows_per_shard`` becomes
    ``--rows-per-shard``, ``dtype="bfloat16"`` becomes ``--dtype bfloat16``, ``resume=True`` becomes
    ``--resume``. What was found there is the caller's and stays as it is.

    Args:
        params: the parameters of the command that ended with the error.
    """
    by_name = {param.name: param for param in params if param.name}
    if not by_name:
        return error
    words = _Words(by_name)
    place = words.place(error.place) if error.code < "E100" else error.place
    got, expected = error.got, words.text(error.expected)
    if error.next_step == advice(error.code, error.place):
        next_step = advice(error.code, place)
    else:
        next_step = words.text(error.next_step)
    if (place, expected, next_step) == (error.place, error.expected, error.next_step):
        return error
    renamed = ActdsError(error.code, place, got=got, expected=expected, next_step=next_step)
    # What follows the first line, such as the reasons of a refusal, stays.
    between = str(error).splitlines()[1:-1]
    first, *rest = str(renamed).splitlines()
    renamed.args = ("\n".join([first, *between, *rest]),)
    return renamed


class _Words:
    def __init__(self, by_name: dict[str, click.Parameter]) -> None:
        self._by_name = by_name
        names = "|".join(sorted(map(re.escape, by_name), key=len, reverse=True))
        self._first = re.compile(rf"(?:{names})(?:, (?:{names}))*(?= |$)")
        self._name = re.compile(rf"\b(?:{names})\b")
        value = r'"(?P<text>[^"]*)"|(?P<flag>True|False)\b|'
        self._set = re.compile(rf"(?<![\w./-])(?P<name>{names})=(?:{value})")
        long = [re.escape(name) for name in by_name if "_" in name]
        self._long = re.compile(rf"(?<![\w./-])(?:{'|'.join(long)})\b") if long else None

    def place(self, text: str) -> str:
        """Return a place that begins with arguments as one that begins with their options."""
        head = self._first.match(text)
        if head is None:
            return text
        # "arms A and B" is no argument with its value, but what the argument gave.
        if head[0] != text and isinstance(self._by_name.get(head[0]), click.Argument):
            return text
        return self._name.sub(lambda m: self._option(m[0]), head[0]) + text[head.end() :]

    def text(self, text: str) -> str:
        """Return a sentence with options for the arguments that it sets, or names with a ``_``."""
        text = self._set.sub(self._setting, text)
        if self._long is None:
            return text
        return self._long.sub(lambda m: self._option(m[0]), text)

    def _setting(self, found: re.Match[str]) -> str:
        option = self._option(found["name"], off=found["flag"] == "False")
        if found["flag"] is not None:
            return option
        return f"{option} {found['text'] or ''}"

    def _option(self, name: str, *, off: bool = False) -> str:
        return _shown(self._by_name[name], off=off)


def _shown(param: click.Parameter, *, off: bool = False) -> str:
    """Return a parameter as the help of its command has it."""
    if isinstance(param, click.Argument):
        metavar = param.metavar or ""
        return metavar if metavar.isalpha() else param.name or ""
    options = param.secondary_opts if off and param.secondary_opts else param.opts
    return max(options, key=len)
