"""One engine over several nodes: the first rank tells those of further nodes the harvest.

Before weights are loaded, over the store of the process group. A further node has no writer: its
ranks only take part in what all ranks of a tensor-parallel group do.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import platform
import signal
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from actds.errors import ActdsError
from actds.text import one_line
from actds_writers.engine_protocol import refused
from actds_writers.ipc.link import Link


def require_near(link: Link) -> None:
    """Raise E012 in a worker that captures, on another machine than the writer of its rows."""
    from vllm.distributed import get_tp_group

    if not get_tp_group().rank_in_group and not link.is_near:
        raise refused(
            "worker",
            f"one that captures on {platform.node()}, where the memory of the harvest is not",
            "the first rank of every pipeline stage on the machine of the writer",
            "Start the engine's first node where the harvest is, with one pipeline stage.",
        )


NODES_TIMEOUT_S = 120.0
"""How long ranks wait for one another; they meet when the process group is there."""
_HARVEST = "actds/harvest"


def tell(link: Link, parallel: Any, alike: Mapping[str, str]) -> None:
    """Tell the ranks of other nodes the harvest, if this is the first rank.

    It goes through the store of the process group. Raises E506 for a rank that does not ask, E012
    for one that has another version, option or model.

    Args:
        alike: as ``worker.agreed`` returns it.
    """
    if torch.distributed.get_rank():
        return
    world, store = torch.distributed.get_world_size(), _store()
    for rank in range(world // int(parallel.nnodes), world):
        its = json.loads(_ask(store, f"actds/rank-{rank}", f"rank {rank} of another node"))
        for name, value in alike.items():
            if its["alike"].get(name) != value:
                raise refused(
                    f"nodes {name}",
                    f"{its['alike'].get(name)} at rank {rank} on {its['host']}",
                    f"{value}, as at rank 0",
                    "Start every node with the same options, model and packages.",
                )
    path = link.interventions_path
    edits = None if path is None else base64.b64encode(Path(path).read_bytes()).decode()
    store.set(_HARVEST, json.dumps([link.far(None).to_environment(), edits]))


def join(alike: Mapping[str, str]) -> Link:
    """Return the harvest of the engine that this rank of another node is of; raises as ``tell``.

    The process ends when the first rank does, which vLLM does not tell it.
    """
    store, rank = _store(), torch.distributed.get_rank()
    its = {"host": platform.node(), "alike": alike}
    store.set(f"actds/rank-{rank}", json.dumps(its))
    text, edits = json.loads(_ask(store, _HARVEST, "rank 0, which captures"))
    threading.Thread(target=_end_with, args=(store.clone(),), daemon=True).start()
    if edits is None:
        return Link.of(text)
    memory = os.memfd_create("actds-interventions")
    os.write(memory, base64.b64decode(edits))
    return Link.of(text).far(f"/proc/self/fd/{memory}")


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _ask(store: Any, key: str, who: str) -> str:
    try:
        store.wait([key], timedelta(seconds=NODES_TIMEOUT_S))
        return str(store.get(key).decode())
    except torch.distributed.DistError as error:
        raise ActdsError(
            "E506",
            "nodes",
            got=f"{one_line(error, 100)}: nothing of {who}",
            expected="a rank that joins the harvest",
            next_step='Give each further node the plugin, and additional_config {"actds": {}}.',
        ) from None


def _end_with(store: Any) -> None:
    while True:
        try:
            store.wait(["actds/never"], timedelta(days=1))
        except torch.distributed.DistStoreError:
            continue
        except torch.distributed.DistError:
            logging.getLogger("vllm.actds").warning("actds: the first node has ended")
            os.kill(os.getpid(), signal.SIGTERM)
            return
