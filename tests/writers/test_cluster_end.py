"""The end of a harvest on a cluster: an engine is left for the prompts of one that dies late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actds.errors import ActdsError
from actds_writers.harvest.cluster import Node, _Harvest
from actds_writers.ipc.messages import PromptFact

pytestmark = pytest.mark.fast


def idle(node: Node) -> None:
    node.wants = SimpleNamespace(n_left=0)  # type: ignore[assignment]


def prompts_of(node: Node) -> list[int]:
    """Return how many prompts the pieces have that the node was given; 0 ends it."""
    return [len(piece.encoded) for piece in node.pieces.values()]


def test_an_engine_waits_until_the_others_have_committed_everything() -> None:
    prompt = SimpleNamespace(prompt=SimpleNamespace(index=0), skip=None)
    plan: Any = SimpleNamespace(
        encoded=(prompt,), client=(PromptFact("p0", "a", None, None),), regimes={}
    )
    first, second, third = nodes = [Node(number, None, heard=number) for number in range(3)]
    harvest = _Harvest(None, SimpleNamespace(), plan, SimpleNamespace(), nodes)  # type: ignore[arg-type]
    harvest._queue.clear()  # noqa: SLF001
    first.handed = [0]
    for node in nodes:
        idle(node)
    harvest._hand_out()  # noqa: SLF001
    assert list(map(prompts_of, nodes)) == [[0], [0], []]
    # The first one dies at its last commit, and is taken over.
    first.failure = ActdsError("E504", "engine 0", got="gone", expected="a node that runs")
    second.ended = SimpleNamespace()  # type: ignore[assignment]
    harvest._hand_out()  # noqa: SLF001
    assert prompts_of(third) == []
    first.handed = []
    harvest._queue.append(0)  # noqa: SLF001
    harvest._hand_out()  # noqa: SLF001
    assert prompts_of(third) == [1]
    idle(third)
    harvest._hand_out()  # noqa: SLF001
    assert prompts_of(third) == [1, 0]
