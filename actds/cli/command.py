"""What commands share: options of a model of settings, what they print, errors as typed."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import click

from actds.errors import ActdsError, advice
from actds.executor import EXECUTORS
from actds.text import Line, printable

if TYPE_CHECKING:
    from pydantic import BaseModel

_PATHS = re.compile("PATH|FILE|FOLDER")
Model = Callable[[], "type[BaseModel]"]
"""What imports a model where it is needed."""
Models = Mapping[str, Model]
_NONE: Models = MappingProxyType({})


def refuse_empty(command: click.Command, context: click.Context, words: Sequence[str]) -> None:
    """E009 an argument, or an option that takes a path, is empty: Python reads it as ``.``."""
    ctx = click.Context(command, parent=context)
    try:
        given, _, _ = command.make_parser(ctx).parse_args(list(words))
    except click.UsageError:  # which the command says itself
        return
    for param in command.get_params(ctx):
        values = given.get(param.name or "")
        takes_path = isinstance(param.type, click.Path) or _PATHS.search(param.metavar or "")
        if not isinstance(param, click.Argument) and not takes_path:
            continue
        if "" in (values if isinstance(values, list | tuple) else [values]):
            place, expected = _shown(param), "a path or a name"
            raise ActdsError("E009", place, got="an empty word", expected=expected)


def of_word(error: Exception, words: Sequence[str]) -> ActdsError | None:
    """Return E009 for a word of the command line that the system cannot take as a path, or None."""
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
        """A place that begins with arguments as one that begins with their options."""
        head = self._first.match(text)
        if head is None:
            return text
        # "arms A and B" is no argument with its value, but what the argument gave.
        if head[0] != text and isinstance(self._by_name.get(head[0]), click.Argument):
            return text
        return self._name.sub(lambda m: self._option(m[0]), head[0]) + text[head.end() :]

    def text(self, text: str) -> str:
        """A sentence with options for the arguments that it sets, or names with a ``_``."""
        text = self._set.sub(self._setting, text)
        if self._long is None:
            return text
        return self._long.sub(lambda m: self._option(m[0]), text)

    def _setting(self, setting: re.Match[str]) -> str:
        option = self._option(setting["name"], off=setting["flag"] == "False")
        return option if setting["flag"] else f"{option} {setting['text'] or ''}"

    def _option(self, name: str, *, off: bool = False) -> str:
        return _shown(self._by_name[name], off=off)


def _shown(param: click.Parameter, *, off: bool = False) -> str:
    """As the help of its command has it."""
    if isinstance(param, click.Argument):
        metavar = param.metavar or ""
        return metavar if metavar.isalpha() else param.name or ""
    options = param.secondary_opts if off and param.secondary_opts else param.opts
    return max(options, key=len)


def json_option(help_text: str) -> Callable[[Any], Any]:
    return click.option("--json", "as_json", is_flag=True, help=help_text)


def default_option(
    name: str, kind: click.ParamType[Any], default: Any, help_text: str, **more: Any
) -> Callable[[Any], Any]:
    """An option whose default its help shows."""
    return click.option(name, type=kind, default=default, show_default=True, help=help_text, **more)


def executor_option(help_text: str) -> Callable[[Any], Any]:
    return default_option("--executor", click.Choice(EXECUTORS), "threads", help_text)


class FiniteRange(click.FloatRange):
    """A number in a range; neither NaN, which no bound refuses, nor infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return float(number)


class SettingsCommand(click.Command):
    """A command with an option for each field of a model, made on first use.

    The options come before the command's own; the model is not imported for ``actds --help``.
    """

    def __init__(
        self, *args: Any, settings: Model, skip: Collection[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._settings, self._skip = settings, skip
        self._options: list[click.Option] | None = None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Arguments, the model's options, the command's own, --help."""
        if self._options is None:
            self._options = list(model_options(self._settings(), self._skip))
        params = sorted(super().get_params(ctx), key=lambda p: not isinstance(p, click.Argument))
        n_arguments = sum(isinstance(param, click.Argument) for param in params)
        return [*params[:n_arguments], *self._options, *params[n_arguments:]]


def model_options(model: type[BaseModel], skip: Collection[str] = ()) -> Iterator[click.Option]:
    """Yield an option for each field of a model: the required ones, its own, the inherited ones.

    A field may say in its ``json_schema_extra`` what its option is called (``option``) and what
    its value is called in the help (``metavar``), and what it means without one (``flag_value``). A
    list or an object is an option that may be repeated.
    """
    schema = model.model_json_schema()
    required, declared = schema.get("required", ()), vars(model).get("__annotations__", {})
    names = [name for name in schema["properties"] if name not in skip]
    for name in sorted(names, key=lambda name: (name not in required, name not in declared)):
        yield _option(name, schema["properties"][name], required=name in required)


def _option(name: str, field: Mapping[str, Any], *, required: bool) -> click.Option:
    kind = next(k for k in field.get("anyOf", [field]) if k.get("type") != "null")
    flag, default = field.get("option", f"--{name.replace('_', '-')}"), field.get("default")
    words = field["description"]
    given: dict[str, Any] = {"help": f"{words[0].upper()}{words[1:]}."}
    given |= {"metavar": field.get("metavar")}
    if kind["type"] == "boolean":
        names = f"{flag}/--no-{flag[2:]}" if default else flag
        given |= {"default": default, "show_default": default}
        return click.Option([names, name], is_flag=True, **given)
    if kind["type"] in ("array", "object"):
        return click.Option([flag, name], multiple=True, **given)
    if "flag_value" in field:
        given |= {"is_flag": False, "flag_value": field["flag_value"]}
    if default is not None:
        given |= {"default": default, "show_default": True}
    return click.Option([flag, name], type=_type(kind), required=required, **given)


def _type(kind: Mapping[str, Any]) -> click.ParamType[Any]:
    if "enum" in kind or "const" in kind:
        return click.Choice(kind["enum"] if "enum" in kind else [kind["const"]])
    if kind["type"] in ("integer", "number"):
        low = kind.get("exclusiveMinimum", kind.get("minimum"))
        high = kind.get("exclusiveMaximum", kind.get("maximum"))
        bounds = {"min": low, "max": high}
        bounds |= {"min_open": "exclusiveMinimum" in kind, "max_open": "exclusiveMaximum" in kind}
        whole = kind["type"] == "integer"
        if low is None and high is None:
            return click.INT if whole else FiniteRange()
        return click.IntRange(**bounds) if whole else FiniteRange(**bounds)
    return click.Path() if kind.get("format") == "path" else click.STRING


# what commands print ----------------------------------------------------------------------------

_COLOURS = {"title": "bold", "good": "green", "bad": "bold red", "warn": "yellow", "dim": "dim"}


def envelope(name: str, facts: Mapping[str, Any], version: str = "1") -> dict[str, Any]:
    """Return the one form of what ``--json`` prints: its format, its version, then the facts."""
    return {"format": f"actds.{name}", "version": version, **facts}


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document on stdout, the only thing that a command with ``--json`` prints there."""
    click.echo(json.dumps(document, indent=2, sort_keys=True))


def print_result(name: str, result: Any, as_json: bool, lines: Iterable[str]) -> None:
    """Print what a function did: a dataclass as JSON, else lines of text."""
    if as_json:
        print_json(envelope(name, asdict(result)))
        return
    for line in lines:
        click.echo(line)


def print_lines(lines: Iterable[Line]) -> None:
    if not sys.stdout.isatty():
        for line in lines:
            click.echo(printable(line.text))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        console.print(Text(printable(line.text), _COLOURS.get(line.style, "")), soft_wrap=True)


class ResultCommand(click.Command):
    """A command that prints or reads documents whose schemas ``actds schema`` knows."""

    def __init__(
        self, *args: Any, result: Model | None = None, reads: Models = _NONE, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.result, self.reads = result, reads

    def thresholds(self) -> dict[str, tuple[str, str]]:
        """Return what ``--limit`` may set, by name: its default, and what it is."""
        return {}


def document_schema(
    model: type[BaseModel], mode: Literal["validation", "serialization"]
) -> dict[str, Any]:
    """Return the JSON Schema of a document."""
    schema = model.model_json_schema(by_alias=True, mode=mode)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
