"""Load profile: what an earlier harvest's steps say of mean, bursts and bytes.

Before the token's way; reads an existing dataset, its tables and file sizes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.reading import Catalog
from actds.store import Store
from actds_writers.sizing.needs import MEASURED, Burst, Load, Overhead

__all__ = ["Profile", "Windows", "read_profile", "windows"]

WINDOWS_S = (1.0, 10.0)
FEW_WINDOWS = 20
DTYPE_NBYTES = {"float32": 4}


@dataclass(frozen=True)
class Windows:
    """Tokens per second over windows of one length.

    Args:
        seconds: the length.
        n: how many whole windows.
        mean, p50, p99, max: of their rates, in tokens per second.
    """

    seconds: float
    n: int
    mean: float
    p50: float
    p99: float
    max: float

    @property
    def burst(self) -> Burst:
        """Return the 99th percentile as a burst over the mean."""
        return Burst(max(1.0, self.p99 / self.mean), self.seconds)


@dataclass(frozen=True)
class Profile:
    """What a dataset tells.

    Args:
        windows: by length; those with at least two whole windows.
        load: mean load, with the windows' 99th percentiles as bursts.
        overhead: bytes of tables per token and the ratio of the rows, as they are on its disk.
        is_short: whether there are so few windows that the 99th percentile is the maximum.
    """

    windows: tuple[Windows, ...]
    load: Load
    overhead: Overhead
    is_short: bool


def windows(runs: Iterable[tuple[npt.ArrayLike, npt.ArrayLike]], seconds: float) -> Windows | None:
    """Return the rates over whole windows, ``None`` with fewer than two.

    Args:
        runs: wall clock in nanoseconds and tokens of each step, by run.
        seconds: length of a window.
    """
    rates: list[np.ndarray] = []
    for t_ns, n_tokens in runs:
        t = np.asarray(t_ns, np.int64)
        if not len(t):
            continue
        index = (t - t.min()) // int(seconds * 1e9)
        sums = np.bincount(index, weights=np.asarray(n_tokens, np.float64))
        rates.append(sums[:-1] / seconds)  # the last window is cut by the end of the run
    found = np.concatenate(rates) if rates else np.empty(0)
    if len(found) < 2 or not found.sum():
        return None
    p50, p99 = np.quantile(found, (0.5, 0.99))
    return Windows(
        seconds, len(found), float(found.mean()), float(p50), float(p99), float(found.max())
    )


def read_profile(store: Store) -> Profile:
    """Return the profile of a dataset.

    Raises:
        ActdsError: E009 when its steps are too few to say anything; as ``Catalog.read``.
    """
    catalog = Catalog.read(store)
    steps = [catalog.table("steps", run) for run in catalog.run_ids]
    series = [(s["t_ns"].to_numpy(), s["batch_tokens"].to_numpy()) for s in steps]
    found = tuple(w for seconds in WINDOWS_S if (w := windows(series, seconds)) is not None)
    if not found or not catalog.shards:
        raise ActdsError(
            "E009",
            f"--profile {store.uri}",
            got=f"{sum(s.num_rows for s in steps)} steps in less than two seconds, or no shard",
            expected="a harvest of a few seconds at least",
            next_step="Give --prefill-rate, --decode-rate and --burst instead.",
        )
    prefill = sum(int(s["prefill_tokens"].to_numpy().sum()) for s in steps)
    decode = sum(int(s["decode_tokens"].to_numpy().sum()) for s in steps)
    n_steps = sum(s.num_rows for s in steps)
    n_requests = sum(catalog.table("requests", run).num_rows for run in catalog.run_ids)
    total, mean = prefill + decode, found[0].mean
    return Profile(
        windows=found,
        load=Load(
            prefill=mean * prefill / total,
            decode=mean * decode / total,
            tokens_per_request=total / max(1, n_requests),
            tokens_per_step=total / n_steps,
            bursts=tuple(w.burst for w in found),
        ),
        overhead=_overhead(catalog, store, n_requests, n_steps),
        is_short=found[0].n < FEW_WINDOWS,
    )


def _overhead(catalog: Catalog, store: Store, n_requests: int, n_steps: int) -> Overhead:
    """Return what the files of a dataset say of the bytes beside the rows, and of the ratio."""
    hooks = {hook.name: hook for hook in catalog.genesis.hooks}
    sizes = {hook: h.d_model * DTYPE_NBYTES.get(h.dtype, 2) for hook, h in hooks.items()}
    n_rows = sum(shard.n_rows for shard in catalog.shards)
    rows = sum(shard.n_rows * sizes[hook] for shard in catalog.shards for hook in shard.hooks)
    frames = _nbytes(catalog, lambda path: path.endswith("/c/0/0"))
    tokens = _nbytes(catalog, lambda path: path == "tokens.parquet")
    parts: dict[str, int] = {}
    for (_run, table), bodies in catalog.parts.items():
        parts[table] = parts.get(table, 0) + sum(body.file.nbytes for body in bodies)
    requests = parts.get("requests", 0) + parts.get("spans", 0)
    return replace(
        MEASURED,
        ratio=rows / max(1, frames),
        token=tokens / max(1, n_rows),
        request=requests / max(1, n_requests),
        step=parts.get("steps", 0) / max(1, n_steps),
        source=f"measured: {n_rows:,} rows of {store.uri}",
    )


def _nbytes(catalog: Catalog, wanted: Callable[[str], bool]) -> int:
    return sum(e.nbytes for shard in catalog.shards for e in shard.files if wanted(e.path))
