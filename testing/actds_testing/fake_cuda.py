"""CUDA without a GPU: streams are threads, which run what is queued on them late and in pieces.

A tensor of the fake device says ``cuda:0`` and holds its values in host memory. What is done to it
is queued on the current stream, in order; streams wait for each other at events only, and the host
for a stream where CUDA would make it wait. Copies arrive row by row, in any order. So a missing
wait shows as wrong rows. Not modelled: how fast anything is, and memory that is given back.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
LONGEST_DELAY_S = 0.0005
ALREADY_REGISTERED = 712
UNINITIALIZED = 0xAB
"""Each byte of memory that nothing was written to."""

Work = Callable[[], object]


class FakeCuda:
    """The device: its default stream, its host registrations, and how late its streams are.

    Args:
        nbytes: its memory.
    """

    def __init__(self, seed: int = 0, nbytes: int = 80 << 30) -> None:
        self.nbytes, self.taken = nbytes, 0
        """Memory, and how much of it was ever given out for tensors that were asked for."""
        self.random = random.Random(seed)
        self.errors: list[BaseException] = []
        self.n_copies_to_host = 0
        self.registered: dict[int, int] = {}
        self.local = threading.local()
        self.default = Stream()

    def pause(self) -> None:
        """Wait as long as a busy device might: mostly not at all, sometimes long."""
        time.sleep(self.random.random() ** 3 * LONGEST_DELAY_S)

    def enqueue(self, work: Work) -> None:
        """Queue work on the current stream, or on the graph that is captured there."""
        graph = getattr(self.local, "graph", None)
        if graph is not None:
            graph.works.append(work)
        else:
            current_stream().put(work)

    def take(self, tensor: torch.Tensor) -> None:
        """Count the memory of a new tensor."""
        self.taken += tensor.nbytes
        if self.taken > self.nbytes:
            raise torch.cuda.OutOfMemoryError(f"{self.taken} of {self.nbytes} bytes")

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        """Lock a range, as ``cudaHostRegister``: one that overlaps a locked one is refused."""
        ends = self.registered.items()
        if any(start < address + nbytes and address < start + n for start, n in ends):
            return ALREADY_REGISTERED
        self.registered[address] = nbytes
        return 0

    def host_unregister(self, address: int) -> int:
        """Unlock a range, as ``cudaHostUnregister``."""
        return 0 if self.registered.pop(address, None) is not None else 713

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """Return whether copies to and from a host tensor may be asynchronous."""
        address = tensor.data_ptr()
        return any(start <= address < start + n for start, n in self.registered.items())


_cuda: FakeCuda


class Event:
    """As ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.passed = threading.Event()
        self.passed.set()
        self._timed, self._at = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        passed = self.passed = threading.Event()

        def pass_it() -> None:
            self._at = time.monotonic()
            passed.set()

        (stream or current_stream()).put(pass_it, late=False)

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()

    def elapsed_time(self, other: Event) -> float:
        if not (self._timed and other._timed and self.query() and other.query()):
            raise RuntimeError("events without timing, or not completed")
        return (other._at - self._at) * 1e3


class Stream:
    """As ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = DEVICE
        self._queue: queue.SimpleQueue[tuple[Work, bool]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Work, *, late: bool = True) -> None:
        self._queue.put((work, late))

    def wait_event(self, event: Event) -> None:
        self.put(event.passed.wait, late=False)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        arrived = threading.Event()
        self.put(arrived.set, late=False)
        arrived.wait()

    def _run(self) -> None:
        while True:
            work, late = self._queue.get()
            if late:
                _cuda.pause()
            try:
                work()
            except BaseException as error:  # on a GPU the context would be dead
                _cuda.errors.append(error)


class Graph:
    """As ``torch.cuda.CUDAGraph``: what was queued while it was captured, on the same memory."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def replay(self) -> None:
        for work in self.works:
            current_stream().put(work)


def current_stream(device: Any = None) -> Stream:
    """As ``torch.cuda.current_stream``."""
    return getattr(_cuda.local, "stream", _cuda.default)


@contextmanager
def _set(name: str, value: object) -> Iterator[None]:
    before = getattr(_cuda.local, name, None)
    setattr(_cuda.local, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(_cuda.local, name)
        else:
            setattr(_cuda.local, name, before)


class DeviceTensor(torch.Tensor):
    """A tensor of the fake device over one in host memory."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> DeviceTensor:
        self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, device=torch.device("cpu"),  # what torch without CUDA can slice
        )  # fmt: skip
        self.host = host
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    def cpu(self, *_: Any) -> torch.Tensor:
        return _copy(torch.empty_like(self.host), self, non_blocking=False)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a cuda:0 tensor to numpy")

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


def _on_host(value: Any) -> Any:
    return value.host if isinstance(value, DeviceTensor) else value


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator at once where it has one, and queue what it computes."""
    aten, schema = torch.ops.aten, func._schema  # noqa: SLF001
    if func is aten.copy_.default:
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return _copy(args[0], args[1], non_blocking=non_blocking)
    if schema.name == "aten::_to_copy":
        to = kwargs.pop("device", DEVICE)
        kwargs.pop("pin_memory", None)
        blocking = not kwargs.pop("non_blocking", False)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        shape = torch.empty_like(_on_host(args[0]), **kwargs)
        if torch.device(to).type != "cuda":
            return _copy(shape, args[0], non_blocking=False)
        return _copy(uninitialized(shape), args[0], non_blocking=not blocking)
    writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    if is_view or func in (aten.detach.default, aten.alias.default):
        result = func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        return tree_map(lambda t: DeviceTensor(t) if isinstance(t, torch.Tensor) else t, result)
    if schema.name in ("aten::_local_scalar_dense", "aten::equal"):
        current_stream().synchronize()
        return func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor) and leaf.dim():
            raise RuntimeError(f"{schema.name}: tensors on cuda:0 and on the cpu")
    inputs, named = tree_map(_on_host, args), tree_map(_on_host, kwargs)
    if any(writes):
        _cuda.enqueue(lambda: func(*inputs, **named))
        at = writes.index(True)
        return kwargs["out"] if "out" in kwargs else args[at] if schema.returns else None
    named.pop("device", None)
    with torch.device("meta"):
        shaped = tree_map(lambda t: t.to("meta") if isinstance(t, torch.Tensor) else t, inputs)
        shape = func(*shaped, **named)
    if not isinstance(shape, torch.Tensor):
        raise NotImplementedError(f"{schema.name} on the fake device")
    result = uninitialized(shape)
    _cuda.enqueue(lambda: result.host.copy_(func(*inputs, **named)))
    return result


def uninitialized(like: torch.Tensor) -> DeviceTensor:
    """Return new memory of the device, of a shape and type; nothing was written to it."""
    host = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    if host.numel():
        host.view(-1).view(torch.uint8).fill_(UNINITIALIZED)
    return DeviceTensor(host)


def _copy(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
    """Queue a copy, as ``cudaMemcpyAsync``; the host waits where the memory makes it."""
    into, what = _on_host(target), _on_host(source)
    to_host = not isinstance(target, DeviceTensor)
    from_host = not isinstance(source, DeviceTensor)
    if from_host and not _cuda.is_locked(what):
        what = what.clone()  # staged before the call returns
    _cuda.n_copies_to_host += to_host
    _cuda.enqueue(lambda: _in_pieces(into, what))
    if (from_host or to_host) and (not non_blocking or (to_host and not _cuda.is_locked(into))):
        current_stream().synchronize()
    return target


def _in_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy row by row, in any order, with pauses."""
    source = source.expand(target.shape)
    if target.dim() < 2 or target.shape[1] < 2:
        target.copy_(source)
        return
    places = list(range(target.shape[1]))
    _cuda.random.shuffle(places)
    for n, place in enumerate(places):
        target[:, place].copy_(source[:, place])
        if n % 8 == 0:
            _cuda.pause()


@contextmanager
def fake_cuda(
    patch: pytest.MonkeyPatch, seed: int = 0, nbytes: int = 80 << 30
) -> Iterator[FakeCuda]:
    """Put the fake in the place of ``torch.cuda`` while a block runs.

    Args:
        seed: of the delays and of the order in which rows arrive.
        nbytes: memory of the device.
    """
    global _cuda
    _cuda = cuda = FakeCuda(seed, nbytes)
    patch.setattr(
        torch.cuda, "mem_get_info", lambda device: (cuda.nbytes - cuda.taken, cuda.nbytes)
    )
    for name in ("memory_reserved", "memory_allocated"):
        patch.setattr(torch.cuda, name, lambda device: cuda.taken)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph", lambda graph: _set("graph", graph))
    patch.setattr(torch.cuda, "stream", lambda stream: _set("stream", stream))
    patch.setattr(torch.cuda, "current_stream", current_stream)
    patch.setattr(torch.cuda, "synchronize", lambda device=None: current_stream().synchronize())
    patch.setattr(torch.cuda, "set_device", lambda device: None)
    patch.setattr(
        torch.cuda, "cudart",
        lambda: SimpleNamespace(
            cudaHostRegister=cuda.host_register, cudaHostUnregister=cuda.host_unregister
        ),
    )  # fmt: skip
    for name in ("empty", "zeros", "randn"):
        patch.setattr(torch, name, _creating(getattr(torch, name)))
    for name in ("to", "cuda", "pin_memory"):
        patch.setattr(torch.Tensor, name, _moving(name, getattr(torch.Tensor, name)))
    # Modules put new parameters in the place of theirs, as theirs cannot become device tensors.
    patch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
    yield cuda
    assert not cuda.errors, cuda.errors


def _creating(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def created(
        *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        if device is None or torch.device(device).type != "cuda":
            tensor = create(*args, device=device, **kwargs)
            return tensor.pin_memory() if pin_memory else tensor
        host = create(*args, **kwargs)
        _cuda.take(host)
        return uninitialized(host) if create.__name__ == "empty" else DeviceTensor(host)

    return created


def _moving(name: str, move: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if name == "pin_memory":
            _cuda.registered[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor
        where = args[0] if args else kwargs.get("device")
        to = torch.device(where) if isinstance(where, torch.device | str) else None
        if isinstance(tensor, DeviceTensor) and to is not None:
            return tensor.cpu() if to.type == "cpu" else tensor
        if isinstance(tensor, DeviceTensor) or not (name == "cuda" or (to and to.type == "cuda")):
            return move(tensor, *args, **kwargs)
        _cuda.take(tensor)
        return _copy(uninitialized(tensor), tensor, non_blocking=kwargs.get("non_blocking", False))

    return moved
