"""The interface of an engine, and how engines are found.

An engine is a package that registers an ``EngineKind`` under the entry point group
``actds.engines``. None is imported before it is asked for.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actds.errors import ActdsError
from actds.text import one_line
from actds_writers.capture.hooks import load_registered
from actds_writers.config import explained
from actds_writers.ipc.link import Link
from actds_writers.model_folder import ModelFiles
from actds_writers.sampling import Regime

GROUP = "actds.engines"
OPTION = "engine_args"
"""The argument with the options of an engine; the place that errors name."""

EngineValue = bool | int | float | str | list[Any] | dict[str, Any] | None
Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Finished:
    """A request that ended.

    Args:
        key: the id under which it was added.
        cached_tokens: prefix-cache hits as the engine reports them, ``None`` when it does not.
        token_ids: the sampled tokens, as the client gets them.
    """

    key: str
    cached_tokens: int | None
    token_ids: tuple[int, ...] = ()


class Engine(Protocol):
    """A running engine that captures, driven from the command's process."""

    @property
    def max_model_len(self) -> int:
        """Return the effective maximum of positions per request."""

    @property
    def max_num_seqs(self) -> int:
        """Return the effective maximum of requests per step."""

    def add(
        self, key: str, token_ids: list[int], max_tokens: int, regime: Regime | None = None
    ) -> None:
        """Add a request; its scheduler side tells each worker its regime, before its first step.

        Raises:
            ValueError: the engine refuses it, with the engine's own message.
            ActdsError: E504 when the engine has died.
        """

    def step(self) -> list[Finished]:
        """Run the engine until it returns; return the requests that ended.

        Raises:
            ActdsError: E504 when the engine has died.
        """

    def abort(self, keys: list[str]) -> None:
        """Abort requests."""

    def shutdown(self) -> None:
        """End the engine and its links."""


class EngineOptions(BaseModel):
    """Options of an engine as the user gave them, with those that every engine has.

    Args:
        max_model_len: positions per request, ``None`` for the engine's own choice.
        max_num_seqs: requests per step, ``None`` for the engine's own choice.
        served_model_name: what the model is called, ``None`` for the name of its folder.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    max_model_len: Positive | None = None
    max_num_seqs: Positive | None = None
    served_model_name: str | None = None

    def files(self, model: Path) -> ModelFiles:
        """Return the folders that have the files of a model.

        Raises:
            ActdsError: E005 one that is not there.
        """
        return ModelFiles.of(model)

    @property
    def n_samples(self) -> int:
        """Return how many times each prompt is sampled, each time as a request of its own."""
        return 1

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Return the sampling parameters of every request, besides those of the settings."""
        return {}


@dataclass(frozen=True)
class Workers:
    """The workers of one engine that capture.

    Args:
        stages: pipeline stages, each with layers of its own.
        in_flight: most steps whose results the scheduler has not taken.
    """

    stages: int = 1
    in_flight: int = 1

    def layers(self, n_layers: int) -> tuple[range, ...]:
        """Return the decoder layers of each stage, as vLLM splits them unless it is told otherwise.

        What is left over goes to the stages before the last one, which has the final norm.
        """
        sizes = [n_layers // self.stages] * self.stages
        for k in range(n_layers % self.stages):
            sizes[-(k + 2)] += 1
        ends = list(itertools.accumulate(sizes))
        return tuple(range(end - n, end) for end, n in zip(ends, sizes, strict=True))


OptionsT = TypeVar("OptionsT", bound=EngineOptions)


class EngineKind(ABC, Generic[OptionsT]):
    """An engine before it runs: the object that an entry point names.

    Only ``start`` imports the engine itself.
    """

    name: ClassVar[str]
    option_type: type[OptionsT] = EngineOptions  # type: ignore[assignment]
    uncompiled: ClassVar[Mapping[str, EngineValue]] = {}
    """Options without compilation: every operation rounds by itself."""
    intervenes: ClassVar[bool] = False
    """Whether its workers make the edits of a harvest where the regime of each request says."""
    attends: ClassVar[bool] = False
    """Whether its workers look at the attention of decode steps."""

    @abstractmethod
    def start(
        self, model: Path, options: OptionsT, link: Link, *, temperature: float, seed: int
    ) -> Engine:
        """Return a running engine with its hooks installed and connected to writer and census.

        Args:
            options: the user's options, of type ``option_type``.

        Raises:
            ActdsError: E504 when the engine does not start; E005, E007, E009, E012 what it cannot
                run or capture; E011 a missing package.
        """

    def options(self, given: Mapping[str, object]) -> OptionsT:
        """Return validated options.

        Raises:
            ActdsError: E009 a bad name or value, E012 one that breaks accounting.
        """
        try:
            return self.option_type.model_validate(dict(given))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            if first["type"] == "extra_forbidden":
                key, known = str(first["loc"][0]), list(self.option_type.model_fields)
                close = difflib.get_close_matches(key, known, n=2) or known
                got = f"an option that the {self.name} engine does not have"
                raise bad_option(key, got, " or ".join(close)) from None
            raise explained(error, lambda key: f"{OPTION} {key}", "E009") from None

    def parse(self, words: Sequence[str]) -> OptionsT:
        """Return the options of ``key=value`` arguments; raises as ``parse_words``, ``checked``."""
        return self.checked(parse_words(words))

    def checked(self, given: Mapping[str, object]) -> OptionsT:
        """Return validated options whose names the installed engine knows.

        Raises:
            ActdsError: as ``options``; E011 when the names cannot be checked.
        """
        return self.options(given)

    def replicas(self, options: OptionsT) -> int:
        """Return how many engines the options ask for, each with a share of the prompts."""
        return 1

    def require_logits(self, options: OptionsT) -> None:
        """Raise unless the engine records entropies where the settings of its link ask for them.

        Raises:
            ActdsError: E012 an engine, or options, with which it does not.
        """
        raise refused(
            "entropy",
            f"the engine {self.name}, which does not read its logits",
            "an engine that does: vllm or transformers",
        )

    def workers(self, options: OptionsT) -> Workers:
        """Return the workers of one engine that capture, as far as the options say."""
        return Workers()

    def devices(self, options: OptionsT) -> int:
        """Return how many devices one engine takes, where it computes on devices."""
        return 1

    def require_one_node(self, options: OptionsT, what: str) -> None:
        """Raise E012 where the options start ranks on other nodes, which ``what`` cannot have."""

    def of_replica(self, options: OptionsT, number: int) -> OptionsT:
        """Return the options of one of several replicas, by its number."""
        return options

    def alone(self, options: OptionsT) -> OptionsT:
        """Return the options of the same engine with one request at a time and no prefix cache."""
        return options.model_copy(update={"max_num_seqs": 1})

    def adapter_sha256(self, options: OptionsT) -> str | None:
        """Return the digest of the adapter that every request has, ``None`` without one."""
        return None


def engine_names() -> list[str]:
    """Return the names of all registered engines."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


@functools.cache
def find_engine(name: str) -> EngineKind[Any]:
    """Return an engine by name.

    Raises:
        ActdsError: E009 when no package registers the name, E011 when it cannot be imported.
    """
    engine: EngineKind[Any] | None = load_registered(GROUP, name, "engine")
    if engine is None:
        names = engine_names()
        close = difflib.get_close_matches(name, names, n=1) or names
        raise ActdsError(
            "E009",
            "engine",
            got=repr(name)[:80],
            expected=", ".join(close),
            next_step=f"Options of an engine: {OPTION} KEY=VALUE." if "=" in name else None,
        )
    return engine


def parse_words(items: Sequence[str]) -> dict[str, EngineValue]:
    """Return engine options by name from ``key=value`` arguments.

    A value is read as JSON (``true``, ``64``, ``{"a":1}``), else as a string. Dashes in a key are
    read as underscores.

    Raises:
        ActdsError: E009 for an argument that is not ``key=value``, or a repeated key.
    """
    options: dict[str, EngineValue] = {}
    for item in items:
        key, equals, text = item.partition("=")
        key = key.strip().replace("-", "_")
        text = text.strip()
        if not equals or not key.isidentifier() or not key.isascii():
            expected = "key=value, for example max_model_len=4096"
            raise ActdsError("E009", OPTION, got=repr(item[:80]), expected=expected)
        if not text:
            raise bad_option(key, "no value", f"{key}=VALUE")
        if key in options:
            raise bad_option(key, "the same option twice", "each option once")
        options[key] = _value(key, text)
    return options


def engine_error(error: Exception) -> ActdsError:
    """Return E504 for whatever an engine raises, in one line."""
    return ActdsError("E504", "engine", got=one_line(error, 400), expected="an engine that runs")


def refused(place: str, got: str, expected: str, next_step: str | None = None) -> ActdsError:
    """Return E012 for what capture cannot account for."""
    return ActdsError("E012", place, got=got, expected=expected, next_step=next_step)


def bad_option(key: str, got: str, expected: str) -> ActdsError:
    """Return E009 for an option of an engine."""
    return ActdsError("E009", f"{OPTION} {key}", got=got, expected=expected)


_WORDS: Mapping[str, EngineValue] = {"True": True, "False": False, "None": None}


def _value(key: str, text: str) -> EngineValue:
    if text in _WORDS:
        # As a string, False would be true.
        return _WORDS[text]
    try:
        value: EngineValue = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        if text[0] in '{["':
            raise bad_option(key, f"{text[:80]!r}", "a value that is JSON") from None
        return text
    return value


def _no_constant(text: str) -> EngineValue:
    raise ValueError(text)
