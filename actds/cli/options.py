"""Command line options made from a model of settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pydantic import BaseModel


class FiniteRange(click.FloatRange):
    """A number in a range; neither NaN, which no bound refuses, nor infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; raises ``click.BadParameter`` without one."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return float(number)


class SettingsCommand(click.Command):
    """A command with an option for each field of a model, made on first use.

    The options come before the command's own; the model is not imported for ``actds --help``.

    Args:
        settings: returns the model.
        skip: fields that are no options.
    """

    def __init__(
        self,
        *args: Any,
        settings: Callable[[], type[BaseModel]],
        skip: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._settings, self._skip = settings, skip
        self._options: list[click.Option] | None = None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters: arguments, the model's options, the command's own, --help."""
        if self._options is None:
            self._options = list(model_options(self._settings(), self._skip))
        params = super().get_params(ctx)
        arguments = [param for param in params if isinstance(param, click.Argument)]
        own = [param for param in params if not isinstance(param, click.Argument)]
        return [*arguments, *self._options, *own]


def model_options(model: type[BaseModel], skip: Collection[str] = ()) -> Iterator[click.Option]:
    """Yield an option for each field of a model: the required ones, its own, the inherited ones.

    A field may say in its ``json_schema_extra`` what its option is called (``option``) and what
    its value is called in the help (``metavar``), and what it means without one (``flag_value``). A
    list or an object is an option that may be repeated.
    """
    schema = model.model_json_schema()
    required, own = schema.get("required", ()), vars(model).get("__annotations__", {})
    names = [name for name in schema["properties"] if name not in skip]
    for name in sorted(names, key=lambda name: (name not in required, name not in own)):
        yield _option(name, schema["properties"][name], required=name in required)


def _option(name: str, found: Mapping[str, Any], *, required: bool) -> click.Option:
    kind = next(k for k in found.get("anyOf", [found]) if k.get("type") != "null")
    flag, default = found.get("option", f"--{name.replace('_', '-')}"), found.get("default")
    words = found["description"]
    given: dict[str, Any] = {
        "help": f"{words[0].upper()}{words[1:]}.",
        "metavar": found.get("metavar"),
    }
    if kind["type"] == "boolean":
        names = f"{flag}/--no-{flag[2:]}" if default else flag
        return click.Option(
            [names, name], is_flag=True, default=default, show_default=default, **given
        )
    if kind["type"] in ("array", "object"):
        if kind.get("items", {}).get("type") == "integer":
            given["type"] = _type(kind["items"])
        return click.Option([flag, name], multiple=True, **given)
    if "flag_value" in found:
        given |= {"is_flag": False, "flag_value": found["flag_value"]}
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
