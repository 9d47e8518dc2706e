"""The training loader: shuffled batches as torch tensors, in an order that can be told again."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from math import gcd
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from actds import canonical
from actds.arrays import chunk_rows, to_torch
from actds.dataset import Dataset
from actds.dataset import open as open_dataset
from actds.errors import ActdsError
from actds.pool import Batch, Pipeline, Selection, n_batches
from actds.row_weights import read_row_weights
from actds.sampling_order import ORDER_VERSION, Geometry, Pieces, order_key
from actds.schema.v0_1 import Hook
from actds.shard import Shard
from actds.tables import PHASES
from actds.weights import served_counts

if TYPE_CHECKING:
    import torch

__all__ = ["Loader", "select_hooks", "select_shards"]

_LANES = 8
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
_STATE_VERSION = 1
MULTIPLICITY = "multiplicity"
_WEIGHTS = "'multiplicity', the path of a weights file, or one of each"


class Loader(Iterator[Any]):
    """An iterator of training batches in an order that depends on nothing but its arguments.

    A batch of one hook is a tensor ``(n, d_model)`` in the dataset's own type (bfloat16 as a
    rule); of several hooks a dict of such tensors by hook, whose rows belong together. Tensors are
    fresh memory in every batch: they may be kept and written into.

    The order is a pure function of dataset digest, seed, epoch, phase, multiplicity, ``batch``,
    ``lanes`` and ``window_rows``. Threads, hooks, a weights file, ``rank`` and ``world`` do not
    change it: the batches of all ranks of a step, joined in rank order, are the same for every
    world size.

    Every row of the selection is seen exactly once per epoch; with ``weights="multiplicity"``
    exactly as often as it was served, once plus once per prefix-cache hit. With ``drop_last`` the
    rows after the last full batch are left out: ``len(rows) mod batch`` of them (``n_dropped``),
    other ones in each epoch. Without it they make one short batch, of which a rank may have
    no row; all ranks still have the same number of batches.

    With a weights file (section 10.4) batches are ``(batch, rows)``, and ``rows["weight"]`` is
    float32 ``(n,)``: what each row counts for in a loss or a mean. Neither the rows nor how often
    they come change. Together with multiplicity, a row comes as often as it was served, each time
    with its weight: their product.

    Memory: two windows of ``window_rows / world`` rows per hook, a few batches, and 4 bytes for
    each row of the selection with a weights file.

    The loader is its own iterator and ends after ``epochs``; ``close()`` it, leave its ``with``
    block or drop it, and its threads end.

    Args:
        source: path or URI of a dataset, or an open ``Dataset``.
        hooks: names of hooks; None takes all.
        batch: rows of a batch over all ranks; each rank gets ``batch / world`` of them.
        phase: ``prefill`` or ``decode``; None takes both.
        window_rows: rows that are held and shuffled together, over all ranks.
        weights: ``multiplicity`` for the served distribution, the path of a weights file, or a
            pair of both; None for neither.
        seed: seed of the order, at least 0.
        rank: this process, from 0.
        world: number of processes; it divides ``lanes``.
        epochs: passes over the data; None never ends.
        threads: threads that read and decode, beside the one that makes batches.
        provenance: yield ``(batch, rows)``, with ``rows`` a dict of numpy columns run, request,
            position, token_id, phase and step; and weight, with a weights file.
        drop_last: leave out the short batch at the end of an epoch.
        lanes: parallel streams that a batch is drawn from; it divides ``batch``. The greatest
            common divisor of ``batch`` and 8 when None.
        i_accept_unsealed: read a dataset that is not sealed.
        i_accept_unprovenanced: read a dataset whose provenance is missing.

    Raises:
        ActdsError: E014 when an argument selects nothing or cannot be used; E018 when the weights
            file is not one of this dataset; E306, E401 and others when the dataset is refused;
            while iterating, E104 and E2xx when data is damaged.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Dataset,
        hooks: str | Sequence[str] | None = None,
        *,
        batch: int = 4096,
        phase: Literal["prefill", "decode"] | None = None,
        window_rows: int = 65536,
        weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        epochs: int | None = 1,
        threads: int = 2,
        provenance: bool = False,
        drop_last: bool = True,
        lanes: int | None = None,
        i_accept_unsealed: bool = False,
        i_accept_unprovenanced: bool = False,
    ) -> None:
        for name, value, low in (
            ("batch", batch, 1),
            ("window_rows", window_rows, 1),
            ("seed", seed, 0),
            ("world", world, 1),
            ("rank", rank, 0),
            ("epochs", 1 if epochs is None else epochs, 1),
            ("threads", threads, 1),
            ("lanes", 1 if lanes is None else lanes, 1),
        ):
            _check_int(name, value, low)
        lanes = gcd(batch, _LANES) if lanes is None else lanes
        _check_lanes(batch, lanes, rank, world)
        served, file = _split_weights(weights)
        if isinstance(source, Dataset):
            dataset = source
        else:
            dataset = open_dataset(
                os.fspath(source),
                i_accept_unsealed=i_accept_unsealed,
                i_accept_unprovenanced=i_accept_unprovenanced,
            )
        self.dataset = dataset
        self._hooks = select_hooks(dataset, hooks)
        shards = select_shards(dataset, self._hooks, phase)
        piece_rows = max(
            chunk_rows(hook.d_model, _ITEMSIZE[hook.dtype]) for hook in dataset.hooks.values()
        )
        counts = _counts(dataset, shards, served)
        geometry = Geometry(batch, lanes, window_rows, piece_rows, phase, served)
        row_weights = None if file is None else read_row_weights(file, dataset)
        by_shard = row_weights.of_shards([s.name for s in shards]) if row_weights else {}
        self._weights_sha256 = row_weights.sha256 if row_weights else None
        per_rank = lanes // world
        self._digest, self._seed = dataset.digest, seed
        self._selection = Selection(
            shards=shards,
            hooks=self._hooks,
            counts=counts,
            pieces=Pieces.of_shards([shard.n_rows for shard in shards], piece_rows, counts),
            geometry=geometry,
            key=order_key(dataset.digest, seed),
            lanes=range(rank * per_rank, (rank + 1) * per_rank),
            provenance=provenance,
            weights=[by_shard[shard.name] for shard in shards] if row_weights else None,
        )
        self._epochs, self._threads, self._drop_last = epochs, threads, drop_last
        first = self._selection.order(0)
        self._n_batches, self._n_left = n_batches(first, drop_last), first.n_left
        if not self._n_batches:
            raise _bad("batch", str(batch), f"at most the {first.n_entries} rows of the selection")
        self._epoch = self._step = 0
        self._pipeline: Pipeline | None = None
        self._closed = False
        self._finalizer: weakref.finalize[..., Any] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Return the batches of one epoch, the same for every rank."""
        return self._n_batches

    @property
    def n_dropped(self) -> int:
        """Return the rows that one epoch leaves out, over all ranks."""
        return self._n_left if self._drop_last else 0

    def __len__(self) -> int:
        """Return the batches of all epochs."""
        if self._epochs is None:
            raise TypeError("a loader with epochs=None never ends")
        return self._epochs * self._n_batches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch; threads start with the first one."""
        if self._closed or (self._epochs is not None and self._epoch >= self._epochs):
            raise StopIteration
        if self._pipeline is None:
            self._start()
        assert self._pipeline is not None
        batch = self._pipeline.next()
        if batch is None:
            self._stop()
            raise StopIteration
        self._epoch, self._step = batch.epoch, batch.step
        if self._epochs is not None and self._epoch >= self._epochs:
            self._stop()
        return self._present(batch)

    def _present(self, batch: Batch) -> Any:
        tensors: dict[str, torch.Tensor] = {
            hook.name: to_torch(batch.acts[hook.name], hook.dtype) for hook in self._hooks
        }
        acts = tensors if len(tensors) > 1 else tensors[self._hooks[0].name]
        return acts if batch.rows is None else (acts, batch.rows)

    def _start(self) -> None:
        self._pipeline = Pipeline(
            self._selection,
            epoch=self._epoch,
            step=self._step,
            n_epochs=self._epochs,
            drop_last=self._drop_last,
            n_threads=self._threads,
        )
        # The threads hold the pipeline and not the loader, so a loader that is dropped ends them.
        self._finalizer = weakref.finalize(self, self._pipeline.close)

    def _stop(self) -> None:
        self._pipeline = None
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None

    def close(self) -> None:
        """End the threads and the iteration; closing twice is fine."""
        self._closed = True
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration stands: what was handed out, not what was read ahead.

        The state holds numbers and strings only, and is the same on every rank: it may be loaded
        on another world size.
        """
        return {**self._identity(), "epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: the next batch is the one that would have come next.

        Raises:
            ActdsError: E014 when the state is of another dataset, seed, geometry or weights file.
        """
        mine = self._identity()
        for key, value in mine.items():
            if state.get(key) != value:
                raise _bad(f"state {key}", repr(state.get(key))[:200], repr(value)[:200])
        epoch, step = state.get("epoch"), state.get("step")
        _check_int("state epoch", epoch, 0)
        _check_int("state step", step, 0)
        assert isinstance(epoch, int) and isinstance(step, int)
        if step >= self._n_batches:
            # A state of drop_last=False may stand before the short batch that is left out here.
            epoch, step = epoch + 1, 0
        self._stop()
        self._epoch, self._step, self._closed = epoch, step, False

    def _identity(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "order": ORDER_VERSION,
            "digest": self._digest,
            "seed": self._seed,
            "geometry": self._selection.geometry.as_dict(),
            "shards": canonical.digest(canonical.dump([s.name for s in self._selection.shards])),
            "weights_sha256": self._weights_sha256,
        }


def select_hooks(dataset: Dataset, hooks: str | Sequence[str] | None) -> list[Hook]:
    """Return the named hooks of a dataset, in the order named; all when None.

    Raises:
        ActdsError: E014 when there is none of that name, or none is named, or one twice.
    """
    names = list(dataset.hooks) if hooks is None else [hooks] if isinstance(hooks, str) else hooks
    known = ", ".join(dataset.hooks)
    if not names or len(set(names)) != len(names):
        raise _bad("hooks", repr(list(names)), f"different ones of {known}")
    for name in names:
        if name not in dataset.hooks:
            raise _bad("hooks", repr(name), f"one of {known}")
    return [dataset.hooks[name] for name in names]


def select_shards(dataset: Dataset, hooks: Sequence[Hook], phase: str | None) -> list[Shard]:
    """Return the shards that hold the hooks' rows of a phase, of both when None.

    Raises:
        ActdsError: E014 when there is no such phase, no row of it, or the hooks have shards of
            their own.
    """
    if phase is not None and phase not in PHASES:
        raise _bad("phase", repr(phase), f"None or one of {', '.join(PHASES)}")
    wanted = {hook.name for hook in hooks}
    shards = [
        shard
        for shard in dataset.shards
        if phase in (None, shard.phase) and not wanted.isdisjoint(shard.hooks)
    ]
    if not shards:
        raise _bad("phase", f"no {phase or ''} row".replace("  ", " "), "at least one row")
    for shard in shards:
        # Stages of a pipeline-parallel engine write their own layers in shards of their own.
        for name in sorted(wanted.difference(shard.hooks)):
            raise _bad("hooks", f"no {name} in shard {shard.name}", "hooks of the same shards")
    return shards


def _counts(
    dataset: Dataset, shards: Sequence[Shard], weights: str | None
) -> list[np.ndarray[Any, np.dtype[np.uint32]] | None]:
    if weights is None:
        return [None] * len(shards)
    served = dataset.multiplicity()
    counts = []
    for shard in shards:
        tokens = shard.tokens(["request", "position"])
        request, position = (tokens[name].to_numpy() for name in ("request", "position"))
        counts.append(served_counts(shard.run, request, position, served))
    return counts


def _split_weights(
    weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
) -> tuple[str | None, Path | None]:
    """Return ``multiplicity`` if it is asked for, and the weights file if one is."""
    if weights is None:
        return None, None
    given = list(weights) if isinstance(weights, list | tuple) else [weights]
    files = [
        Path(one) for one in given if isinstance(one, str | os.PathLike) and one != MULTIPLICITY
    ]
    if not given or len(files) > 1 or len(given) != len(files) + (MULTIPLICITY in given):
        raise _bad("weights", repr(weights)[:200], _WEIGHTS)
    if files and not files[0].is_file():
        raise _bad("weights", f"no file {str(files[0])!r}", _WEIGHTS)
    return MULTIPLICITY if MULTIPLICITY in given else None, files[0] if files else None


def _check_int(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        raise _bad(name, repr(value)[:80], f"an integer from {low}")


def _check_lanes(batch: int, lanes: int, rank: int, world: int) -> None:
    if batch % lanes:
        raise _bad("lanes", str(lanes), f"a divisor of batch {batch}")
    if lanes % world:
        raise _bad("world", str(world), f"a divisor of lanes {lanes}; give lanes=")
    if rank >= world:
        raise _bad("rank", str(rank), f"less than world {world}")


def _bad(name: str, got: str, expected: str) -> ActdsError:
    return ActdsError("E014", name, got=got, expected=expected)
