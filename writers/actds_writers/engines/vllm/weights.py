"""Changes of the weights in a live engine: how they are seen, and what is known of the new ones.

Beside the data path, in the engine core: every call to the workers passes ``WeightsWatch``. One
that may set weights is followed, before the next step, by a look at their digest; where it is
another one, the plugin ends the run and begins the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actds.errors import ActdsError
from actds_writers.capture.weights import WeightsSample, is_readable, weights_digest
from actds_writers.ipc.link import Link
from actds_writers.ipc.messages import Fact
from actds_writers.provenance import observed

HARMLESS = frozenset({
    "check_health", "compile_or_warm_up_model", "compute_weight_checksums",
    "determine_available_memory", "execute_dummy_batch", "execute_model",
    "get_cache_block_size_bytes", "get_kv_cache_spec", "get_kv_connector_handshake_metadata",
    "get_model_inspection", "get_supported_kv_cache_layouts", "get_supported_tasks",
    "init_weight_transfer_engine", "initialize_from_config", "list_loras", "profile",
    "reset_encoder_cache", "reset_mm_cache", "sample_tokens", "save_sharded_state",
    "save_tensorized_model", "set_kv_cache_layout", "shutdown", "shutdown_weight_transfer_engine",
    "supports_draft_weight_updates", "synchronize_device", "take_draft_token_ids",
    "update_max_model_len",
})  # fmt: skip
"""Worker methods that set no weights, in vLLM 0.32; any other one may, and every function."""
SLEEP = frozenset({"sleep", "discard", "checkpoint_prepare"})
WAKE = frozenset({"wake_up", "checkpoint_restore"})
"""Between them, weights have no memory that can be read."""
RELOAD = "reload_weights"
CATCH_UP_S = 60.0
"""How long the change of a run waits for the writer."""
N_PROBES = 4

# in the workers ----------------------------------------------------------------------------------


def read_digest(worker: Any) -> tuple[str, bool]:
    """Return the digest of a worker's weights, and whether it is of all of them.

    What is compared after each step is from then on what is there now.
    """
    worker = getattr(worker, "worker", worker)
    from actds_writers.engines.vllm.worker import loaded_model

    model = loaded_model(worker.model_runner)
    tensors, whole = readable_weights(model)
    capture = getattr(worker, "_actds", None)
    if capture is not None:
        capture.sample = WeightsSample(model)
    with torch.inference_mode():
        return weights_digest(tensors), whole


def change_run(worker: Any, link: Link, settled: tuple[Any, ...]) -> None:
    """Let a worker capture for another run; each gets the call, also one that does not capture.

    Args:
        settled: steps of the old run whose results the scheduler has taken since its last mark.
    """
    worker = getattr(worker, "worker", worker)
    capture = getattr(worker, "_actds", None)
    if capture is not None:
        capture.end_run(settled, link, CATCH_UP_S)


def readable_weights(model: torch.nn.Module) -> tuple[Iterator[tuple[str, torch.Tensor]], bool]:
    """Return the weights of a model by name, and whether they are all of them.

    vLLM's CPU kernels keep the weights of linear layers in a form of their own: of them it is the
    products with a few vectors, four of which are single columns.
    """
    packed = {
        name: module
        for name, module in model.named_modules()
        if isinstance(weight := getattr(module, "weight", None), torch.nn.Parameter)
        and not weight.numel()
    }
    probed = {name: m for name, m in packed.items() if _n_inputs(m) is not None}
    unread = [name for name, p in model.named_parameters() if not is_readable(p)]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            if name not in unread:
                yield name, parameter
        for name, module in probed.items():
            yield f"{name} products", _products(module)

    return tensors(), len(probed) == len(packed) and not unread


def _n_inputs(module: torch.nn.Module) -> int | None:
    """Return the inputs of a linear layer whose weights are in a CPU kernel's own form."""
    n = getattr(module, "input_size_per_partition", None)
    return n if isinstance(n, int) and hasattr(module, "cpu_linear") else None


def _products(module: Any) -> torch.Tensor:
    n, dtype = int(module.input_size_per_partition), module.weight.dtype
    places = torch.arange(n)
    rows = [(places == (n * (2 * k + 1)) // (2 * N_PROBES)) for k in range(N_PROBES)]
    # Signs without a pattern, and of each channel another combination.
    rows += [1 - 2 * ((places * (40503 + 2 * k) >> 7) & 1) for k in range(N_PROBES)]
    products: torch.Tensor = module.cpu_linear(torch.stack([r.to(dtype) for r in rows]), None, None)
    return products


# in the engine core ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Other weights than before.

    Args:
        digest: of the new ones.
        calls: what may have set them; empty when no call was seen.
        folder: where all of them were loaded from, ``None`` when that is not known.
    """

    digest: str
    calls: tuple[str, ...]
    folder: Path | None

    def words(self) -> str:
        """Return what changed them."""
        return ", ".join(dict.fromkeys(self.calls)) or "something that no call announced"


class WeightsWatch:
    """Sees the calls that may set weights, and says when they are others than before.

    Args:
        executor: vLLM's, complete; its calls to the workers pass this object from now on.
        folder: the model that the engine was started with.
        fail: takes an error that ends the capture.
    """

    def __init__(self, executor: Any, folder: Path, fail: Callable[[Exception], None]) -> None:
        self.rpc: Callable[..., Any] = executor.collective_rpc
        executor.collective_rpc = self._calling
        self._folder, self._fail = folder, fail
        self._calls: list[tuple[str, Path | None]] = []
        self._asleep = False
        self.digest: str | None = None
        """Of the weights that the steps since the last look computed with."""
        self.is_suspected = False
        """Whether a step has seen other weights without a call."""

    @property
    def is_due(self) -> bool:
        """Return whether the weights have to be looked at before the next step."""
        return (self.digest is None or bool(self._calls) or self.is_suspected) and not self._asleep

    def look(self) -> Change | None:
        """Return a change since the last look; the first one is none."""
        digest, whole = self._read()
        calls, self._calls, self.is_suspected = self._calls, [], False
        before, self.digest = self.digest, digest
        if before is None or (digest == before and (whole or not calls)):
            return None
        names = tuple(name for name, _ in calls)
        return Change(digest, names, calls[0][1] if names == (RELOAD,) else None)

    def verify(self, timeout_s: float | None = None) -> None:
        """Compare the weights with those of the last look, where no call may have set others.

        Args:
            timeout_s: how long the workers may take.

        Raises:
            ActdsError: E509 they differ: nobody knows since when.
        """
        if self.digest is None or self._calls or self._asleep:
            return
        if self._read(timeout_s)[0] != self.digest:
            raise ActdsError(
                "E509",
                "weights",
                got="others than those of the run, and neither a call nor a step has shown since "
                "when",
                expected="changes by a call to the workers",
            )

    def _read(self, timeout_s: float | None = None) -> tuple[str, bool]:
        answers = self.rpc(read_digest, timeout=timeout_s)
        whole = all(whole for _, whole in answers)
        if len(answers) == 1:
            return answers[0][0], whole
        return hashlib.sha256("".join(d for d, _ in answers).encode()).hexdigest(), whole

    def _calling(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(method, str) and method in HARMLESS:
            return self.rpc(method, *args, **kwargs)
        try:
            self.verify()
        except Exception as error:
            self._fail(error)
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        if name in SLEEP:
            self._asleep = True
        try:
            return self.rpc(method, *args, **kwargs)
        finally:
            given = _keywords(args, kwargs)
            if name in WAKE and "weights" in (given.get("tags") or ("weights",)):
                self._asleep = False
            self._note(name, given)

    def _note(self, name: str, given: Mapping[str, Any]) -> None:
        folder = None
        if name == RELOAD and not given.get("weights_iterator"):
            self._folder = Path(given.get("weights_path") or self._folder)
            folder = self._folder
        self._calls.append((name, folder))


def _keywords(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a worker's method, from those of ``collective_rpc``."""
    given = kwargs.get("kwargs") or (args[2] if len(args) > 2 else None)
    return dict(given or {})


def weights_facts(change: Change, before: str, *, hashed: bool) -> list[Fact]:
    """Return the facts of a run's weights after a change.

    Args:
        before: the run that it ended.
        hashed: whether weight files are hashed.
    """
    from actds_writers.model_folder import weights_sha256

    digest = None
    reason = f"changed in the live engine by {change.words()}; run {before} had others"
    if change.folder is not None and change.folder.is_dir():
        digest = weights_sha256(change.folder) if hashed else None
    return [observed("model.weights_sha256", digest, reason[:500])]
