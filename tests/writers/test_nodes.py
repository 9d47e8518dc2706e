"""What ranks on other nodes than the writer's are told, over a real store of torch.distributed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actds.errors import ActdsError
from actds_writers.config import WriteSettings
from actds_writers.engines.vllm import nodes
from actds_writers.ipc.link import Link
from actds_writers.model_folder import weights_sample

ALIKE = {"vllm": "0.32.0", "seed": "0"}


@pytest.fixture
def link(tmp_path: Path) -> Link:
    folder = tmp_path / "shm"
    folder.mkdir()
    (folder / "edits").write_bytes(b"\x00vectors")
    settings = WriteSettings(out="acts", model="m", prompts="p", hooks="z:1")
    return Link(
        folder=str(folder), key="5ec2e7", run="r", hooks=(("z", 1),), settings=settings,
        ring_nbytes=1, staging_nbytes=2, client_pid=3, interventions_path=str(folder / "edits"),
    )  # fmt: skip


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yield what rank 1, on a thread of its own, gets; it asks with what the test appends first."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    monkeypatch.setattr(nodes, "_store", store.clone)
    monkeypatch.setattr(nodes, "_end_with", lambda store: None)
    monkeypatch.setattr(nodes, "NODES_TIMEOUT_S", 1.0)
    main = threading.current_thread()
    rank = lambda: int(threading.current_thread() is not main)  # noqa: E731
    monkeypatch.setattr(torch.distributed, "get_rank", rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    yield []


def ask(alike: dict[str, str], got: list[Any]) -> threading.Thread:
    def asking() -> None:
        try:
            got.append(nodes.join(alike))
        except ActdsError as error:
            got.append(error)

    thread = threading.Thread(target=asking)
    thread.start()
    return thread


def test_a_rank_of_another_node_gets_the_harvest_and_no_way_into_it(
    link: Link, told: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = ask(ALIKE, told)
    nodes.tell(link, SimpleNamespace(nnodes=2), ALIKE)
    thread.join()
    (far,) = told
    assert (far.hooks, far.run, far.settings.overflow) == (link.hooks, "r", "block")
    assert (far.folder, far.key, far.is_near, link.is_near) == ("", "", False, True)
    assert [Path(far.interventions_path).read_bytes() for _ in range(2)] == [b"\x00vectors"] * 2
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    far.note("Loading the weights")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_rank_with_another_option_is_refused_with_its_name(link: Link, told: list[Any]) -> None:
    thread = ask({**ALIKE, "seed": "7"}, told)
    with pytest.raises(ActdsError, match=r"E012 nodes seed: 7 at rank 1 on .*; expected 0, as at"):
        nodes.tell(link, SimpleNamespace(nnodes=2), ALIKE)
    thread.join()
    assert told[0].code == "E506" and "nothing of rank 0, which captures" in told[0].got


def test_a_rank_that_never_asks_is_named(link: Link, told: list[Any]) -> None:
    with pytest.raises(ActdsError, match=r"(?s)E506 nodes: .*nothing of rank 1 .*additional_conf"):
        nodes.tell(link, SimpleNamespace(nnodes=2), ALIKE)


def test_a_worker_that_captures_elsewhere_than_its_writer_is_refused(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(rank_in_group=0)
    monkeypatch.setitem(
        sys.modules, "vllm.distributed", SimpleNamespace(get_tp_group=lambda: group)
    )
    nodes.require_near(link)
    elsewhere = replace(link, folder="/dev/shm/actds-of-another-machine")
    with pytest.raises(ActdsError, match=r"E012 worker: one that captures on .*where the memory"):
        nodes.require_near(elsewhere)
    group.rank_in_group = 1
    nodes.require_near(elsewhere)  # it gives its heads, and has no ring


def test_other_weights_of_the_same_size_show_in_their_sample(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(1 << 20))
    before = weights_sample(tmp_path)
    assert weights_sample(tmp_path) == before
    file.write_bytes(b"\x01" * (1 << 20))
    assert weights_sample(tmp_path) != before
