"""Changes of the weights in a live engine: how they are seen, and what is known of the new ones.

Beside the data path, in the engine core: every call to the workers passes ``WeightsWatch``. One
that may set weights is followed, before the next step, by a look at their digest; where it is
another one, the plugin ends the run and begins the next. The digest reads every byte; for edits
that no call announces, some bytes of each tensor are compared at every step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actds.errors import ActdsError
from actds_writers.engines.vllm.runner import loaded_model
from actds_writers.ipc.link import Link
from actds_writers.ipc.messages import Fact
from actds_writers.provenance import observed

CHUNK_WORDS = 1 << 20
"""Words of 8 bytes that are multiplied at a time; as much memory is taken on the device, twice."""
SAMPLE_NBYTES = 32
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, with bits of no pattern; as a signed number."""
_PLACE = 2654435761


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the SHA-256 of names, shapes, types and sums of some tensors.

    The sums are of all bits, each word of 8 bytes times an odd number of its place, modulo 2^64.
    Tensors that differ have other sums, but for accidents of 1 in 2^64. Equal on every device.
    """
    heads, sums = [], []
    factors: torch.Tensor | None = None
    for name, tensor in tensors:
        words = _words(bytes_of(tensor))
        n = min(len(words), CHUNK_WORDS)
        if factors is None or factors.device != words.device or len(factors) < n:
            factors = _factors(n, words.device)
        chunks = [words[i : i + CHUNK_WORDS] for i in range(0, max(len(words), 1), CHUNK_WORDS)]
        parts = [(chunk * factors[: len(chunk)]).sum() for chunk in chunks]
        heads.append(f"{name} {tuple(tensor.shape)} {tensor.dtype} {len(parts)}\n")
        sums.append(torch.stack(parts))
    digest = hashlib.sha256("".join(heads).encode())
    for of_tensor in sums:
        digest.update(of_tensor.cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


class WeightsSample:
    """Some bytes of each parameter as they are now, to compare with what is there later.

    Parameters on another device than the first, or that cannot be read, are left out.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._owners = [module._parameters for module in model.modules() if module._parameters]
        self._places = self._where()
        self._views: list[torch.Tensor] = []
        readable = filter(is_readable, model.parameters())
        for number, parameter in enumerate(readable, 1):
            whole = bytes_of(parameter)
            room = max(len(whole) - SAMPLE_NBYTES, 0)
            first = number * _PLACE % (room + 1) // 8 * 8
            if not self._views or whole.device == self._views[0].device:
                self._views.append(whole[first : first + SAMPLE_NBYTES])
        self._before = self._read()

    def changed(self) -> torch.Tensor:
        """Return bool ``(1, 1, 1)``: is a byte, or the memory of a parameter, another one."""
        now = self._read()
        if self._places != self._where():
            return torch.ones(1, 1, 1, dtype=torch.bool, device=now.device)
        return (now != self._before).any().view(1, 1, 1)

    def _where(self) -> list[int]:
        return [p.data_ptr() for owner in self._owners for p in owner.values() if p is not None]

    def _read(self) -> torch.Tensor:
        # One call for all tensors: it costs 0.13 µs for each on a CPU.
        return torch.cat(self._views) if self._views else torch.empty(0, dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that a tensor spans as bytes, without a copy, or raise RuntimeError."""
    if tensor.is_meta:
        raise RuntimeError("a tensor without memory")
    span = 0
    if tensor.numel():
        ends = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in ends)
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    first = tensor.storage_offset() * tensor.itemsize
    with torch.no_grad():
        return whole.set_(tensor.untyped_storage(), first, (span * tensor.itemsize,), (1,))


def is_readable(tensor: torch.Tensor) -> bool:
    try:
        bytes_of(tensor)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def _words(whole: torch.Tensor) -> torch.Tensor:
    """Return bytes as int64 words, the last one filled up with zeros."""
    if whole.data_ptr() % 8:
        whole = whole.clone()
    rest = len(whole) % 8
    if not rest:
        return whole.view(torch.int64)
    last = whole[len(whole) - rest :]
    filled = torch.nn.functional.pad(last, (0, 8 - rest))
    words = whole[: len(whole) - rest].view(torch.int64)
    return torch.cat([words, filled.view(torch.int64)])


def _factors(n: int, device: torch.device) -> torch.Tensor:
    """Return an odd number for each place, int64 ``(n,)``."""
    places = np.arange(1, n + 1, dtype=np.int64)
    spread = places * np.int64(_SPREAD)
    mixed = (spread ^ (spread >> np.int64(29))) * np.int64(_SPREAD)
    return torch.from_numpy(mixed | 1).to(device)


_HARMLESS = """
    check_health compile_or_warm_up_model compute_weight_checksums determine_available_memory
    execute_dummy_batch execute_model get_cache_block_size_bytes get_kv_cache_spec
    get_kv_connector_handshake_metadata get_model_inspection get_supported_kv_cache_layouts
    get_supported_tasks init_weight_transfer_engine initialize_from_config list_loras profile
    reset_encoder_cache reset_mm_cache sample_tokens save_sharded_state save_tensorized_model
    set_kv_cache_layout shutdown shutdown_weight_transfer_engine supports_draft_weight_updates
    synchronize_device take_draft_token_ids update_max_model_len
"""
HARMLESS = frozenset(_HARMLESS.split())
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
    model = loaded_model(worker.model_runner)
    tensors, whole = readable_weights(model)
    capture = getattr(worker, "_actds", None)
    if capture is not None:
        capture.sample = WeightsSample(model)
    with torch.inference_mode():
        return weights_digest(tensors), whole


def change_run(worker: Any, link: Link, settled: tuple[Any, ...]) -> None:
    """Let a worker capture for another run; each gets the call, also one that does not capture.

    ``settled`` are steps of the old run whose results the scheduler took since its last mark.
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
    probed = {
        name: module
        for name, module in packed.items()
        if isinstance(getattr(module, "input_size_per_partition", None), int)
        and hasattr(module, "cpu_linear")
    }
    unread = [name for name, p in model.named_parameters() if not is_readable(p)]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            if name not in unread:
                yield name, parameter
        for name, module in probed.items():
            yield f"{name} products", _products(module)

    return tensors(), len(probed) == len(packed) and not unread


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
    """Other weights than before, by calls that were seen or by none.

    ``folder``: where all of them were loaded from, ``None`` when that is not known.
    """

    digest: str
    calls: tuple[str, ...]
    folder: Path | None

    def words(self) -> str:
        return ", ".join(dict.fromkeys(self.calls)) or "something that no call announced"


class WeightsWatch:
    """Sees the calls that may set weights, and says when they are others than before.

    Args:
        executor: vLLM's, complete; its calls to the workers pass this object from now on.
        folder: the model that the engine was started with.
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
        return (self.digest is None or bool(self._calls) or self.is_suspected) and not self._asleep

    def look(self) -> Change | None:
        digest, whole = self._read()
        calls, self._calls, self.is_suspected = self._calls, [], False
        before, self.digest = self.digest, digest
        if before is None or (digest == before and (whole or not calls)):
            return None
        names = tuple(name for name, _ in calls)
        return Change(digest, names, calls[0][1] if names == (RELOAD,) else None)

    def verify(self, timeout_s: float | None = None) -> None:
        """Compare the weights with those of the last look, where no call may have set others.

        Raises E509 they differ: nobody knows since when.
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
            given = kwargs.get("kwargs") or (args[2] if len(args) > 2 else None) or {}
            if name in WAKE and "weights" in (given.get("tags") or ("weights",)):
                self._asleep = False
            self._note(name, given)

    def _note(self, name: str, given: Mapping[str, Any]) -> None:
        folder = None
        if name == RELOAD and not given.get("weights_iterator"):
            self._folder = Path(given.get("weights_path") or self._folder)
            folder = self._folder
        self._calls.append((name, folder))


def weights_facts(change: Change, before: str, *, hashed: bool) -> list[Fact]:
    from actds_writers.model_folder import weights_sha256

    digest = None
    reason = f"changed in the live engine by {change.words()}; run {before} had others"
    if change.folder is not None and change.folder.is_dir():
        digest = weights_sha256(change.folder) if hashed else None
    return [observed("model.weights_sha256", digest, reason[:500])]
