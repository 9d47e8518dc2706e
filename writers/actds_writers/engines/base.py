"""What the command asks of an engine, whichever it is.

Stands at the client's side, outside the token's way; imports no engine before one is started.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from actds_writers.ipc.link import Link

WriterName = Literal["vllm", "transformers"]


@dataclass(frozen=True)
class Finished:
    """A request that ended.

    Args:
        key: the id under which it was added.
        cached_tokens: prefix hits as the engine reports them, ``None`` when it does not.
        token_ids: the sampled tokens, as the client gets them.
    """

    key: str
    cached_tokens: int | None
    token_ids: tuple[int, ...] = ()


class Engine(Protocol):
    """An engine that captures, driven from the command's process."""

    @property
    def max_model_len(self) -> int:
        """Return the effective number of positions per request."""

    @property
    def max_num_seqs(self) -> int:
        """Return the effective number of requests per step."""

    def add(self, key: str, token_ids: list[int], max_tokens: int) -> None:
        """Add a request.

        Raises:
            ValueError: the engine does not take it, with the engine's own words.
        """

    def step(self) -> list[Finished]:
        """Run until the engine says something; return the requests that ended.

        Raises:
            ActdsError: E504 when the engine has died.
        """

    def abort(self, keys: list[str]) -> None:
        """End requests before their time."""

    def shutdown(self) -> None:
        """End the engine and its links."""


def start_engine(
    writer: WriterName,
    model: Path,
    options: dict[str, Any],
    link: Link,
    *,
    temperature: float,
    seed: int,
) -> Engine:
    """Return a running engine.

    Args:
        writer: which engine.
        model: model folder.
        options: engine arguments of the user.
        link: where writer and census listen.
        temperature: sampling temperature.
        seed: engine seed.

    Raises:
        ActdsError: E504 when the engine does not start; E005, E007, E011 what it lacks.
    """
    if writer == "transformers":
        from actds_writers.engines.transformers.engine import Engine as TransformersEngine

        return TransformersEngine(model, options, link, temperature=temperature, seed=seed)
    from actds_writers.engines.vllm.engine import Engine as VllmEngine

    return VllmEngine(model, options, link, temperature=temperature, seed=seed)
