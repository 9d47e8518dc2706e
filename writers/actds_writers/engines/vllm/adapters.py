"""LoRA adapters: which one a harvest runs with, its digest, and whether base rows are the base's.

vLLM 0.32.0 on a CPU: in ``vllm/lora``, ``punica_wrapper/utils.py:35`` uses -1 for "no adapter", and
``ops/torch_ops/lora_ops.py:31, 74 and 119`` index with it: in PyTorch that is the last adapter. So
requests without an adapter get one, in a step beside a request that has one; requests with an
adapter have rows of their own adapter. ``tests/engine/test_engine_lora.py`` shows both. The Triton
kernels leave at -1 (``ops/triton_ops/lora_shrink_op.py:160``), but no measurement on a GPU of ours
says so. A harvest has therefore one adapter for every request, or none; a server with adapters is
captured if the check of the hooks sees that its requests without one have rows of the base model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actds.format.canonical import read_bounded
from actds_writers.engine_protocol import bad_option
from actds_writers.model_folder import file_sha256

if TYPE_CHECKING:
    import torch

CONFIG = "adapter_config.json"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for ``max_lora_rank``."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in the format of PEFT.

    Args:
        name: last segment of its folder.
        rank: of its matrices.
    """

    name: str
    folder: Path
    rank: int

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the engine's arguments, which the user's own override."""
        most = next((rank for rank in RANKS if rank >= self.rank), self.rank)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": most}

    def request(self) -> Any:
        """Return vLLM's ``LoRARequest``."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.name, 1, str(self.folder))


def read_adapter(folder: str) -> Adapter:
    """Return the adapter of a folder.

    Raises:
        ActdsError: E009 for a folder that holds none.
    """
    path = Path(folder).expanduser().absolute()
    try:
        rank = int(json.loads(read_bounded(path / CONFIG))["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        got = f"{folder[:80]}: {type(error).__name__} at {CONFIG}"
        raise bad_option("lora", got, "a folder with a LoRA adapter, as PEFT saves it") from None
    return Adapter(path.name, path, rank)


@contextlib.contextmanager
def random_adapters(worker: Any, model: torch.nn.Module) -> Iterator[Any]:
    """Fill all places for adapters of an idle worker with random ones; yield one for a request.

    Args:
        model: the worker's, whose layers vLLM has given these places.
    """
    import torch
    from vllm.lora.request import LoRARequest

    manager, config = worker.model_runner.lora_manager, worker.vllm_config.lora_config
    adapters = [
        LoRARequest(f"actds-check-{number}", number, "/nowhere")
        for number in range(1, int(config.max_loras) + 1)
    ]
    with manager.dummy_lora_cache():
        for adapter in adapters:
            manager.add_dummy_lora(adapter, rank=min(int(config.max_lora_rank), 8))
            manager._adapter_manager.activate_adapter(adapter.lora_int_id)
    places = list(_places(model))
    with torch.inference_mode():
        for number, place in enumerate(places):
            chance = torch.Generator(place.device).manual_seed(number)
            place.normal_(std=place.shape[-1] ** -0.5, generator=chance)
    try:
        yield adapters[0]
    finally:
        with torch.inference_mode():
            for place in places:
                place.zero_()
        manager.remove_all_adapters()


def _places(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            found = vars(module).get(name, ())
            yield from found if isinstance(found, tuple | list) else (found,)


def adapter_sha256(folder: str) -> str | None:
    """Return the SHA-256 over the sorted 'name sha256' lines of the adapter's files, if any.

    Spec: 0.1 section 6.3.
    """
    path = Path(folder)
    files = [file for kind in (CONFIG, "*.safetensors", "*.bin") for file in path.glob(kind)]
    lines = "".join(f"{file.name} {file_sha256(file)}\n" for file in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest() if files else None
