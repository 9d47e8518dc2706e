"""A KV connector for tests: vLLM's example connector, which can also load late, and fail.

It also loads for a request that was preempted after its own tokens had filled a block: there the
example connector looks for a file that nobody wrote.

Named to vLLM by ``kv_connector_module_path``. In ``kv_connector_extra_config``:

- ``shared_storage_path``: the folder, as in the example connector;
- ``late``: load between steps, as connectors over a network do, and not before the forward;
- ``fail``: numbers of loads, from 0, of which all blocks but the first fail.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
    ReqMeta,
)


@dataclass
class Metadata(ExampleConnectorMetadata):
    """``loads``: by request."""

    loads: list[tuple[str, ReqMeta]] = field(default_factory=list)


class _Layers(dict[str, None]):
    """Metadata of attention layers of whatever name: not MLA's."""

    def __missing__(self, name: str) -> None:
        return None


class TestConnector(ExampleConnector):
    """One object in the scheduler and one in the worker, as of every connector."""

    __test__ = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = self._kv_transfer_config.get_from_extra_config
        self._late: bool = options("late", False)
        self._fail: list[int] = options("fail", [])
        self._n_loads = 0
        self._waiting: list[tuple[Any, list[int]]] = []
        self._done: set[str] = set()
        self._failed: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, n_local: int) -> tuple[int, bool]:
        """Return how many tokens can be loaded, and whether between steps."""
        n = max(super().get_num_new_matched_tokens(request, n_local)[0] or 0, 0)
        return n, self._late and n > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, n_external: int) -> None:
        """Note a load."""
        if n_external:
            self._waiting.append((request, blocks.get_block_ids()[0]))

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """Return what the worker is to load and to store."""
        meta = Metadata(super().build_connector_meta(scheduler_output).requests)
        for request, blocks in self._waiting:
            tokens = list(request.prompt_token_ids)
            what = ReqMeta.make_meta(tokens, blocks, self._block_size, False, [])
            meta.loads.append((request.request_id, what))
        self._waiting = []
        return meta

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load, but for the blocks that fail."""
        meta: Any = self._get_connector_metadata()
        context: Any = SimpleNamespace(
            attn_metadata=_Layers(), no_compile_layers=forward_context.no_compile_layers
        )
        for _, one in meta.loads:
            self.bind_connector_metadata(Metadata([one]))
            super().start_load_kv(context)
            if self._n_loads in self._fail:
                blocks = one.slot_mapping[:: self._block_size] // self._block_size
                self._failed |= set(blocks.tolist()[1:])
                for layer in forward_context.no_compile_layers.values():
                    layer.kv_cache[blocks[1:]] = 7.0  # something that nobody computed
            self._n_loads += 1
        self.bind_connector_metadata(meta)
        if self._late:
            self._done |= {request for request, _ in meta.loads}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """Return the requests whose loads have ended."""
        done, self._done = self._done, set()
        return None, done or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded."""
        failed, self._failed = self._failed, set()
        return failed
