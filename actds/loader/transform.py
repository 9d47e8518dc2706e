"""What a loader does to rows before it hands them out: normalize, cast, send to a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from actds.explore.stats import Stats
from actds.format import canonical
from actds.format.arrays import to_torch
from actds.format.schema import Hook
from actds.loader.filters import bad

if TYPE_CHECKING:
    import torch

Normalize = Literal["norm", "channel"] | Mapping[str, Stats]

_DTYPES = ("float32", "bfloat16", "float16")
_HOW = "'norm', 'channel', or Stats by hook"


class Transform:
    """Turns the bit patterns of a batch into what the trainer gets.

    ``norm`` divides by one number, so that the mean norm of a row is the square root of
    ``d_model``; ``channel`` subtracts the mean of each channel and divides by its standard
    deviation. Both are computed in float32.

    Args:
        hooks: the hooks of a batch by name.
        stats_of: returns the statistics of a hook by name.
        normalize: ``norm`` or ``channel``; ``Stats`` by hook, for ``channel`` with these; or None.
        dtype: type of the tensors; None for the stored one, or float32 where they are normalized.
        device: where the tensors go; None leaves them in host memory.

    Raises:
        ActdsError: E014 another name, a hook without statistics, a device that is not there; and
            as ``Dataset.stats``.

    Attributes:
        pinned: whether batches are best made in pinned memory.
    """

    def __init__(
        self,
        hooks: Mapping[str, Hook],
        stats_of: Callable[[str], Stats],
        normalize: Normalize | None,
        dtype: str | None,
        device: str | torch.device | None,
    ) -> None:
        if dtype not in (None, *_DTYPES):
            raise bad("dtype", repr(dtype)[:80], f"None or one of {', '.join(_DTYPES)}")
        self._hooks, self.dtype = hooks, dtype
        if normalize is not None and dtype is None:
            self.dtype = "float32"
        self._device = None if device is None else _checked_device(device)
        self.pinned = self._device is not None and self._device.type == "cuda"
        self._affine = _affine(hooks, stats_of, normalize)
        self._on_device: dict[str, tuple[Any, Any]] = {}
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()

    @property
    def identity(self) -> str | None:
        if not self._affine:
            return None
        values = {name: list(constants.values()) for name, constants in self.normalization.items()}
        return canonical.digest(repr(values).encode())

    @property
    def normalization(self) -> dict[str, dict[str, Any]]:
        """Return ``shift`` and ``scale`` by hook, as JSON; empty when rows are not normalized.

        A normalized row is ``(row - shift) * scale``; ``shift`` is None for 0, and ``scale`` one
        number or one for each channel.
        """
        return {
            name: {"shift": None if shift is None else shift.tolist(), "scale": scale.tolist()}
            for name, (shift, scale) in self._affine.items()
        }

    def __call__(self, acts: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        import torch

        tensors: dict[str, torch.Tensor] = {}
        for name, hook in self._hooks.items():
            rows = to_torch(acts[name], hook.dtype)
            if self._device is not None:
                rows = self._sent(rows)
            if name in self._affine:
                shift, scale = self._constants(name)
                rows = rows.to(torch.float32, copy=True)
                rows = (rows if shift is None else rows.sub_(shift)).mul_(scale)
            tensors[name] = rows if self.dtype is None else rows.to(getattr(torch, self.dtype))
        return tensors

    def _sent(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, which is under way; host memory is held until it is made."""
        import torch

        sent = rows.to(self._device, non_blocking=self.pinned)
        if self.pinned:
            copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._under_way.append((copied, rows))
            while self._under_way[0][0].query() and len(self._under_way) > 1:
                self._under_way.popleft()
        return sent

    def _constants(self, hook: str) -> tuple[Any, Any]:
        """Return what to subtract and to multiply with, float32 on the device."""
        import torch

        if hook not in self._on_device:
            self._on_device[hook] = tuple(  # type: ignore[assignment]
                None
                if values is None
                else torch.from_numpy(values.astype(np.float32)).to(self._device)
                for values in self._affine[hook]
            )
        return self._on_device[hook]


def _affine(
    hooks: Mapping[str, Hook], stats_of: Callable[[str], Stats], normalize: Normalize | None
) -> dict[str, tuple[npt.NDArray[np.float64] | None, npt.NDArray[np.float64]]]:
    if normalize is None:
        return {}
    if isinstance(normalize, str) and normalize not in ("norm", "channel"):
        raise bad("normalize", repr(normalize)[:80], _HOW)
    if not isinstance(normalize, str | Mapping):
        raise bad("normalize", repr(normalize)[:80], _HOW)
    affine: dict[str, tuple[npt.NDArray[np.float64] | None, npt.NDArray[np.float64]]] = {}
    for name, hook in hooks.items():
        if isinstance(normalize, Mapping):
            stats = normalize.get(name)
            if not isinstance(stats, Stats) or stats.mean.shape != (hook.d_model,):
                raise bad("normalize", f"no Stats of {hook.d_model} channels for {name}", _HOW)
        else:
            stats = stats_of(name)
        if normalize == "norm":
            scale = np.array(np.sqrt(hook.d_model) / stats.mean_norm)
            affine[name] = (None, _finite("mean norm", name, scale))
        else:
            # A channel that never changes has nothing to be divided by.
            std = np.where(stats.std > 0, stats.std, 1.0)
            affine[name] = (stats.mean, _finite("variance", name, 1.0 / std))
    return affine


def _finite(what: str, hook: str, scale: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if not np.isfinite(scale).all():
        raise bad("normalize", f"a {what} of {hook} that is no number", "rows of finite values")
    return scale


def _checked_device(device: str | torch.device) -> torch.device:
    import torch

    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        first = str(error).partition("\n")[0][:200]
        raise bad("device", f"{device!r}: {first}", "a device that torch has here") from None
