"""Asynchronous scheduling on a CPU, where vLLM's platform forces it off."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from actds_writers.engines.vllm.plugin import when_imported


def allow_async_scheduling() -> None:
    """Switch asynchronous scheduling on in every engine that this process configures."""
    when_imported("vllm.platforms.cpu", _unforce)


def _unforce(module: ModuleType) -> None:
    forced: Any = module.CpuPlatform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        forced(config)
        config.scheduler_config.async_scheduling = True

    module.CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
