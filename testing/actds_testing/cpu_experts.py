"""Replicas of a mixture of experts on CPUs, whose communicator lacks what they share experts by.

vLLM's communicator of CPUs has neither of the two collectives with which a replica gives the rows
of its step to the experts of all others and takes their sums back: here they are, by gloo's.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from actds_writers.engines.vllm.plugin import when_imported


def share_experts(dummies: Path) -> None:
    """Let the replicas that this process may become share experts.

    Args:
        dummies: folder where each worker writes a line for every batch that it ran without a
            request, since another replica had one.
    """
    when_imported("vllm.distributed.device_communicators.cpu_communicator", _complete)

    def watch(module: ModuleType) -> None:
        run = module.Worker.execute_dummy_batch

        def running(self: Any) -> None:
            with (dummies / str(os.getpid())).open("a") as lines:
                lines.write("a batch\n")
            run(self)

        module.Worker.execute_dummy_batch = running

    when_imported("vllm.v1.worker.gpu_worker", watch)


def _complete(module: ModuleType) -> None:
    def all_gatherv(self: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        assert dim == 0
        if not isinstance(given, torch.Tensor):
            return [all_gatherv(self, part, dim, sizes) for part in given]
        sizes = sizes or [len(given)] * self.world_size
        padded = [given.new_zeros((max(sizes), *given.shape[1:])) for _ in (*sizes, 0)]
        padded[-1][: len(given)] = given
        torch.distributed.all_gather(padded[:-1], padded[-1], group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(padded, sizes, strict=False)])

    def reduce_scatterv(
        self: Any, given: torch.Tensor, dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor:
        assert dim == 0
        sums = given.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(sums, group=self.device_group)
        sizes = sizes or [len(given) // self.world_size] * self.world_size
        begin = sum(sizes[: self.rank_in_group])
        return sums[begin : begin + sizes[self.rank_in_group]].clone()

    communicator = module.CpuCommunicator
    communicator.all_gatherv, communicator.reduce_scatterv = all_gatherv, reduce_scatterv
