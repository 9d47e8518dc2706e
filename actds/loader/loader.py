"""The training loader: shuffled batches as torch tensors, in a reproducible order."""

from __future__ import annotations

import inspect
import os
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack, cast

from actds.errors import ActdsError
from actds.executor import ExecutorName
from actds.explore import show
from actds.explore.dataset import Dataset, OpenOptions
from actds.explore.stats import Stats
from actds.format.schema import Hook
from actds.loader.filters import bad
from actds.loader.mixture import (
    Mixture,
    Side,
    Source,
    batch_hooks,
    batch_spec,
    default_window_rows,
    make_mixture,
    open_partners,
    open_sources,
    row_columns,
    rows_of_pieces,
    statistics,
    with_partners,
)
from actds.loader.once import are_replays, read_once
from actds.loader.order import ORDER_VERSION, BatchSpec, Geometry
from actds.loader.pipeline import Batch, Normalize, Pipeline, Transform
from actds.loader.selection import (
    MULTIPLICITY,
    Selection,
    check_int,
    check_lanes,
    check_numbers,
    check_torch,
    check_worker,
    sample_of,
    select,
    split_weights,
    warn_where_none,
    warn_where_unequal,
)
from actds.version import __version__

if TYPE_CHECKING:
    import torch

_LANES = 8
_STATE_VERSION = 2
_NOT_SELECTION = {
    *("format", "actds", "dataset", "digest", "datasets", "sealed", "runs", "hooks", "dtype"),
    *(
        "excluded",
        "sample",
        "rows_per_epoch",
        "dropped_per_epoch",
        "order",
        "lanes",
        "window_rows",
        "batch",
    ),
    *("drop_last", "epochs", "rank", "world", "seed"),
}
"""What a loader's ``config`` says beside its selection of rows."""


class RowOptions(TypedDict, total=False):
    """Which rows the batches of a ``Loader`` have."""

    phase: Literal["prefill", "decode"] | None
    where: str | None
    exclude: str | Sequence[str]
    split: Side | None
    held_out: float
    mix: Mapping[str, float] | None
    paired: Mapping[str, Source] | None
    once: bool
    frequency: str | None
    weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


class OrderOptions(TypedDict, total=False):
    """In which order they come, and to which process."""

    batch: int
    window_rows: int | None
    lanes: int | None
    seed: int
    rank: int
    world: int
    epochs: int | None
    drop_last: bool | None


class OutputOptions(TypedDict, total=False):
    """What a batch is."""

    normalize: Normalize | None
    dtype: Literal["float32", "bfloat16", "float16"] | None
    device: str | torch.device | None
    provenance: bool | Sequence[str]
    threads: int


class LoaderOptions(RowOptions, OrderOptions, OutputOptions, OpenOptions, total=False):
    """The keywords of a ``Loader``."""


_NUMBERS = {"batch": 4096, "seed": 0, "rank": 0, "world": 1, "epochs": 1, "threads": 2}
_FALSE = ("once", "provenance", "i_accept_unsealed", "i_accept_unprovenanced")
_DEFAULTS: dict[str, Any] = dict.fromkeys(LoaderOptions.__annotations__)
_DEFAULTS |= {**_NUMBERS, **dict.fromkeys(_FALSE, False), "exclude": (), "held_out": 0.0}


def _with_defaults(options: LoaderOptions) -> LoaderOptions:
    for name in options.keys() - _DEFAULTS.keys():
        raise TypeError(f"Loader.__init__() got an unexpected keyword argument {name!r}")
    given = _DEFAULTS | dict(options)
    check_numbers(**{name: given[name] for name in (*_NUMBERS, "window_rows", "lanes")})
    return cast("LoaderOptions", given)


def _signature() -> inspect.Signature:
    """Return the keywords and their defaults, as notebooks and ``help`` show them."""
    place, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    first = [inspect.Parameter("source", place), inspect.Parameter("hooks", place, default=None)]
    keywords = [inspect.Parameter(k, keyword, default=v) for k, v in _DEFAULTS.items()]
    return inspect.Signature([*first, *keywords])


class Loader:
    """Training batches in a reproducible order.

    ``for batch in loader`` is a *pass*: ``epochs`` epochs, each in an order of its own. Each
    ``for`` begins a new pass, at the next epoch, also where the one before was left early. The
    first ``for`` after ``load_state_dict`` continues the pass of the state. An iterator of an
    earlier pass raises ``RuntimeError``. With ``epochs=None`` there is one pass, which never ends,
    and every ``for`` continues it.

    A batch of one hook is a CPU tensor ``(n, d_model)`` in the stored type (bfloat16 as a rule);
    of several hooks a dict of such tensors by hook, whose rows belong together. Each batch has
    memory of its own: it may be kept and written into.

    The order is a pure function of dataset digests, seed, epoch, what chooses the rows, ``batch``,
    ``lanes`` and ``window_rows``. Threads, hooks, weights of a loss, ``rank`` and ``world`` do not
    change it: the batches of all ranks of a step, joined in rank order, are the same for every
    world size.

    Every row of the selection comes exactly once per epoch; with ``weights="multiplicity"``
    exactly as often as it was served, once plus once per prefix-cache hit; with ``frequency`` in
    proportion to a number. With ``drop_last`` the rows after the last full batch are left out:
    ``len(rows) mod batch`` of them (``n_dropped``, which ``repr``, ``config`` and ``progress``
    say), other ones in each epoch. Without it they make one short batch, of which a rank may have
    no row; all ranks still have the same number of batches.

    *Expressions* choose and weight rows: ``where="phase == 'decode' and position >= 16"``. They
    have Python's syntax and name columns of the token table, ``request.COLUMN`` and ``step.COLUMN``
    of these tables, ``run``, ``inclusion``, ``special``, ``bos``, ``eos``, and ``norm`` where there
    are norm readouts and one hook. A comparison with a value that is not recorded is unknown, and a
    row of which the whole is unknown is left out; ``is None`` asks for it.

    *Mixtures* take a share of every batch from each of several parts: phases, expressions
    (``mix={"prefill": 0.5, "decode": 0.5}``) or datasets (``{"a": 0.7, "b": 0.3}`` as source).
    Shares hold over any number of batches to fewer rows than there are parts. An epoch ends before
    the first part that would run out, and no row of a part comes twice in it.

    With row weights (a weights file of section 14.11, or an expression) batches are
    ``(batch, rows)``, and ``rows["weight"]`` is float32 ``(n,)``: the weight of each row in a loss
    or a mean. It changes neither the rows nor how often they come. With multiplicity as well, a
    row comes as often as it was served, each time with its weight.

    Memory: two windows of ``window_rows / world`` rows per hook and part, a few batches, 1 byte for
    each row where some are left out, and 4 bytes with row weights.

    ``close()`` it, leave its ``with`` block or drop it, and its threads end.

    Keywords that belong together may be dicts, as in ``Loader(path, hook, **rows, **order)``. Their
    types are ``RowOptions``, ``OrderOptions`` and ``OutputOptions``, in ``actds.loader.loader``.

    Args:
        source: path or URI of a dataset, or an open ``Dataset``; several are read as one, and a
            mapping gives each its share.
        hooks: names of hooks; None takes all.
        batch: rows of a batch over all ranks; each rank gets ``batch / world`` of them.
        phase: ``prefill`` or ``decode``; None takes both.
        where: an expression: the rows to read.
        exclude: rows to leave out, one name or several: ``special``, ``bos`` and ``eos`` tokens,
            the ``first_position`` of each request, and ``sink``, a norm above 10 medians of a
            chosen hook (needs norm readouts); ``not_finite``, a value that is NaN or infinite in a
            chosen hook: without it such rows are refused; or a name given to ``register_filter``.
        split: ``train`` or ``held_out``: the requests of one side. Which side a request is on
            follows from its tokens, in every dataset that has them.
        held_out: the share of requests that are held out.
        mix: shares by phase or by expression, which add up to 1.
        paired: other datasets by name, of which each batch has the rows that belong to its own, as
            ``NAME/HOOK``: those of the same tokens up to the same position, whatever the harvest
            was. Rows without a partner are left out. For crosscoders over models or settings.
        once: of a dataset and its replays, ``[source, missing]``, read each position once: a row of
            a replay only where no dataset before it has a row of the position (docs/replay.md).
        frequency: an expression that rows come in proportion to; an epoch keeps its length, and
            rows come as often as they should to less than one in each, exactly so in the mean.
        weights: ``multiplicity`` for the served distribution; the path of a weights file, or an
            expression; ``inclusion`` for ``1 / inclusion``, over the probability with which a row
            was stored (``actds write --overflow thin``, ``actds replay --fraction``); a pair of
            multiplicity and one of these; None for neither.
        normalize: ``norm`` divides by one number, so that the mean norm is the square root of
            ``d_model``; ``channel`` gives each channel mean 0 and variance 1; ``Stats`` by hook do
            so with these. Statistics are those of ``stats()``, of what the batches hold, over both
            sides of a split: the first loader of a dataset reads all rows once for them, before it
            returns. ``config["normalization"]`` says how to get the stored rows back.
        dtype: type of the batches; None for the stored type, or float32 where they are normalized.
        device: where the batches go, through pinned memory for a GPU; None for host memory.
        window_rows: rows that are held and shuffled together, over all ranks. None takes the power
            of two that fits 128 MiB of the dataset's widest hook, and 65,536 at least. How well
            that mixes says ``actds.mixing_report``; ``actds shuffle`` mixes a dataset of any size.
        seed: seed of the order, at least 0.
        rank: this process, from 0.
        world: number of processes; it divides ``lanes``.
        epochs: epochs of a pass; None never ends.
        threads: threads that read and decode, beside the one that makes batches.
        provenance: yield ``(batch, rows)``, with ``rows`` a dict of numpy columns: run, request,
            position, token_id, phase and step, or those that are named; part, of a mixture; weight,
            with row weights. ``role`` is a further name: who wrote the position, None where that is
            not known.
        drop_last: leave out the short batch at the end of an epoch. None does so but with ``once``,
            and in one epoch of a dataset and its replays, which are to give all that there is.
        lanes: parallel streams that a batch is drawn from; it divides ``batch``. The greatest
            common divisor of ``batch`` and 8 when None.
        seal: digest of a seal, as of ``actds.open``, where the source is one path.
        i_accept_unsealed: read a dataset that is not sealed.
        i_accept_unprovenanced: read a dataset whose provenance is missing.

    Raises:
        ActdsError: E011 torch is not installed; E014 when an argument selects nothing or cannot be
            used, or rows that are not finite would come; E018 when the weights
            file is not one of this dataset; E416 when a row has no readout and ``exclude`` needs
            it; and as ``actds.open``.

    Attributes:
        dataset: the dataset that it reads, the first of several.
        datasets: all of them.
        sample: how the stored rows that it reads were drawn, None where every row is stored;
            weighted, they say as much of a mean as ``sample.effective_rows`` of equal weight.

    Spec: 0.1 section 10.
    """

    __signature__ = _signature()

    def __init__(
        self,
        source: Source | Sequence[Source] | Mapping[Source, float],
        hooks: str | Sequence[str] | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        check_torch()
        given = _with_defaults(options)
        self._seed, self._rank, self._world = given["seed"], given["rank"], given["world"]
        self._epochs, self._threads = given["epochs"], given["threads"]
        lanes = given["lanes"] or gcd(given["batch"], _LANES)
        check_lanes(given["batch"], lanes, self._rank, self._world)
        self._served, weight = split_weights(given["weights"])
        how: OpenOptions = {
            "i_accept_unsealed": given["i_accept_unsealed"],
            "i_accept_unprovenanced": given["i_accept_unprovenanced"],
        }
        self.datasets, shares = open_sources(source, {**how, "seal": given["seal"]})
        self.dataset = self.datasets[0]
        partners = open_partners(given["paired"], how)

        def rows(split: Side | None, held_out: float) -> Mixture:
            def chosen(dataset: Dataset, phase: str | None, where: str | None) -> Selection:
                return select(
                    dataset,
                    hooks,
                    phase,
                    where=where,
                    exclude=given["exclude"],
                    split=split,
                    held_out=held_out,
                    multiplicity=self._served,
                    weights=weight,
                    frequency=given["frequency"],
                )

            of = given["mix"], given["phase"], given["where"]
            mixture = make_mixture(self.datasets, shares, *of, chosen)
            mixture = with_partners(mixture, partners) if partners else mixture
            return read_once(mixture, served=self._served) if given["once"] else mixture

        self._rows = rows(given["split"], given["held_out"])
        self._drop_last = self._whole_batches(given["drop_last"], given["once"])
        warn_where_none(self._rows.excluded, self._rows.selections, stacklevel=2)
        self.sample = sample_of(self._rows.selections)
        warn_where_unequal(self.sample, self._rows.selections, stacklevel=2)
        shards = [shard for selection in self._rows.selections for shard in selection.shards]
        columns = row_columns(given["provenance"], shards)
        normalize, stats = given["normalize"], dict[str, Stats]()
        if isinstance(normalize, str) and normalize in ("norm", "channel"):
            # Both sides of a split are scaled alike, and neither by rows that are left out.
            stats = statistics(rows(None, 0.0) if given["split"] else self._rows, self._served)
        self._transform = Transform(
            batch_hooks(self._rows), stats, normalize, given["dtype"], given["device"]
        )
        self._normalize = normalize if isinstance(normalize, str) else normalize and "stats"
        window_rows = given["window_rows"] or default_window_rows(self.datasets)
        geometry = Geometry(
            given["batch"],
            lanes,
            window_rows,
            rows_of_pieces(self.datasets, window_rows // lanes),
            given["phase"],
            MULTIPLICITY if self._served else None,
        )
        per_rank = lanes // self._world
        own_lanes = range(self._rank * per_rank, (self._rank + 1) * per_rank)
        self._spec = batch_spec(
            self._rows, geometry, self._seed, own_lanes, columns, self._transform.pinned
        )
        first = self._spec.epoch(0)
        self._n_batches, self._n_left = first.n_batches(self._drop_last), first.n_left
        self._n_entries = sum(order.n_entries for order in first.orders)
        if not self._n_batches:
            expected = f"at most the {self._n_entries} rows of the selection"
            raise bad("batch", str(given["batch"]), expected)
        self._began = self._waited = 0.0
        self._n_given = 0
        self._epoch = self._step = 0  # of the next batch
        self._pass_start, self._begun, self._end_told = 0, False, False
        self._n_iterators = 0
        self._pipeline: Pipeline | None = None
        self._closed = False
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._pid = os.getpid()

    def _whole_batches(self, drop_last: bool | None, once: bool) -> bool:
        is_mixed = len(self._rows.parts) > 1
        if is_mixed and drop_last is False:
            raise bad("drop_last", "False with a mixture", "True: a mixture has whole batches only")
        gives_all = once or (self._epochs == 1 and are_replays(self.datasets))
        return (is_mixed or not gives_all) if drop_last is None else drop_last

    @property
    def hooks(self) -> dict[str, Hook]:
        """Return the hooks of a batch by name, in its order; each says its ``d_model``."""
        return dict(batch_hooks(self._rows))

    @property
    def batches_per_epoch(self) -> int:
        """Return the batches of one epoch, the same for every rank."""
        return self._n_batches

    @property
    def batch_spec(self) -> BatchSpec:
        return self._spec

    @property
    def n_dropped(self) -> int:
        """Return the rows that one epoch leaves out, over all ranks."""
        return self._n_left if self._drop_last else 0

    @property
    def excluded(self) -> dict[str, int]:
        """Return how many stored rows each name of ``exclude`` leaves out."""
        return self._rows.excluded

    @property
    def n_rows(self) -> int:
        """Return the stored rows that are read, each counted once."""
        return self._rows.n_kept

    def stats(self, *, executor: ExecutorName = "threads") -> dict[str, Stats]:
        """Return statistics of what the batches hold, by hook: each row as often as it comes.

        Multiplicity, ``frequency`` and the shares of a mixture count, in the mean of many epochs;
        weights of a loss do not, but for ``weights="inclusion"``: then the statistics estimate
        those of the rows that the stored ones were drawn from, each counted ``1 / inclusion``
        times (Hajek). They are computed in one pass and kept, as those of ``Dataset.stats``.

        Args:
            executor: where the shards are read, as of ``Dataset.stats``.

        Raises:
            ActdsError: E104, E108, E201 to E204 when a shard is missing or damaged.
        """
        return statistics(self._rows, self._served, executor)

    @property
    def progress(self) -> Progress:
        """Return how far the epoch is, and how fast the batches come to this rank."""
        seconds = time.perf_counter() - self._began if self._n_given else 0.0
        return Progress(
            self._epoch,
            self._step,
            self._n_batches,
            self._n_given,
            seconds,
            self._waited,
            self.n_dropped,
        )

    def __repr__(self) -> str:
        rows = self._rows
        where = rows.selections[0].filter.where
        return (
            f"<actds.Loader {', '.join(d.path for d in self.datasets)}: "
            f"{', '.join(hook.name for hook in rows.hooks)}, {rows.n_kept:,} of {rows.n_stored:,} "
            f"rows ({rows.n_kept / rows.n_stored:.1%})"
            + (f" where {where}" if where is not None and not rows.names else "")
            + "".join(
                f", {sum(selection.n_kept for selection in part):,} {name}"
                for name, part in zip(rows.names, rows.parts, strict=False)
            )
            + "".join(f", without {n:,} {name}" for name, n in rows.excluded.items())
            + f"; {self._n_batches:,} batches of {self._spec.geometry.batch:,} an epoch"
            + (f", which leaves out {self.n_dropped:,} rows" if self.n_dropped else "")
            + ("" if self.sample is None else f"; {self.sample}")
            + ">"
        )

    def _repr_html_(self) -> str:
        config, progress = self.config, self.progress
        chosen = ", ".join(
            f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}"
            for key, value in config.items()
            if key not in _NOT_SELECTION
            and not key.endswith("sha256")
            and value not in (None, [], False, 0)
        )
        n_stored = sum(dataset.n_rows for dataset in self.datasets)
        facts = {
            "datasets": ", ".join(dataset.path for dataset in self.datasets),
            "hooks": f"{', '.join(config['hooks'])} as {config['dtype']}",
            "rows": f"{self.n_rows:,} of {n_stored:,}",
            "selection": chosen or "every row",
            "left out": ", ".join(f"{n:,} {name}" for name, n in self.excluded.items()) or "none",
            **({} if self.sample is None else {"drawn": str(self.sample)}),
            "batches": f"{self._n_batches:,} of {config['batch']:,} rows an epoch"
            + (f", which leaves out {self.n_dropped:,} rows" if self.n_dropped else ""),
            "epochs": "without end" if self._epochs is None else str(self._epochs),
            "now": f"epoch {progress.epoch}, batch {progress.step:,} of {self._n_batches:,}",
            "rank": f"{config['rank']} of {config['world']}, seed {config['seed']}",
        }
        return show.page("actds.Loader", facts)

    @property
    def config(self) -> dict[str, Any]:
        """Return which rows the batches have, as JSON: store it beside what was trained on them.

        Keys: ``format``, ``actds`` (version), ``dataset`` (path), ``digest``, ``datasets``,
        ``sealed``, ``models`` (``name`` and ``weights_sha256`` of each), ``runs``, ``hooks``,
        ``dtype``, ``normalize``, ``normalize_sha256``,
        ``normalization`` (``shift`` and ``scale`` by hook: a batch is ``(rows - shift) * scale``),
        ``phase``, ``multiplicity``, ``paired``, ``once``, ``where``, ``exclude``, ``split``,
        ``mix``, ``frequency``, ``weights_sha256``, ``weights``, ``excluded`` (rows by name),
        ``other_hooks`` (rows whose requests chose others), ``sample`` (of rows that were drawn),
        ``rows_per_epoch``, ``dropped_per_epoch`` (of these, those that come in no batch), ``seed``,
        ``order`` (its version), ``batch``, ``lanes``, ``window_rows``, ``drop_last``, ``epochs``,
        ``rank``, ``world``.
        """
        geometry, rows = self._spec.geometry, self._rows
        return {
            "format": "actds.loader",
            "actds": __version__,
            "dataset": self.dataset.path,
            "digest": rows.digest,
            "datasets": [{"path": d.path, "digest": d.digest} for d in self.datasets],
            "sealed": all(dataset.seal is not None for dataset in self.datasets),
            "models": list({str(m): m for d in self.datasets for m in d.models}.values()),
            "runs": list(rows.runs),
            "hooks": list(batch_hooks(rows)),
            "paired": {label: [d.path, d.digest] for label, d in rows.others.items()},
            "dtype": self._transform.dtype or ", ".join(sorted({h.dtype for h in rows.hooks})),
            "normalize": self._normalize,
            "normalize_sha256": self._transform.identity,
            "normalization": self._transform.normalization or None,
            "phase": geometry.phase,
            "multiplicity": geometry.weights is not None,
            **{key: value for key, value in rows.identity.items() if key != "shards"},
            "exclude": rows.identity["exclude"] or [],
            "excluded": self.excluded,
            "other_hooks": sum(selection.n_others for selection in rows.selections),
            "sample": None if self.sample is None else asdict(self.sample),
            "rows_per_epoch": self._n_entries,
            "dropped_per_epoch": self.n_dropped,
            "seed": self._seed,
            "order": ORDER_VERSION,
            "batch": geometry.batch,
            "lanes": geometry.lanes,
            "window_rows": geometry.window_rows,
            "drop_last": self._drop_last,
            "epochs": self._epochs,
            "rank": self._rank,
            "world": self._world,
        }

    def __len__(self) -> int:
        if self._epochs is None:
            raise TypeError("a loader with epochs=None never ends")
        return self._epochs * self._n_batches

    def __getitem__(self, index: object) -> Any:
        """Refuse: batches come in an order, and a DataLoader that asks for them by number errs."""
        raise ActdsError(
            "E014",
            "loader",
            got=f"batch {index!r:.40} by number, as a torch DataLoader asks for those of a set",
            expected="for batch in loader",
            next_step="It makes whole batches in threads of its own: give it to the trainer in the "
            "place of a DataLoader. One that must have a DataLoader takes an IterableDataset whose "
            "__iter__ returns iter(loader), with batch_size=None and num_workers=0.",
        )

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass, or continue the current one if it has given no batch yet.

        Raises:
            ValueError: the loader is closed.
            ActdsError: E014 in a process forked from the one that reads.
        """
        self._check_open()
        if self._epochs is not None:
            if self._begun:
                self._begin_pass()
            self._n_iterators += 1
        return _Pass(self, self._n_iterators)

    def __next__(self) -> Any:
        """Return the next batch of the current pass; threads start with the first one.

        Raises:
            StopIteration: the pass has ended; another call begins the next pass.
            ValueError: the loader is closed.
            ActdsError: E014 in a process forked from the one that reads, or in one of several
                DataLoader workers; E104, E108 and E201 to E206 when data is missing or damaged.
        """
        self._check_open()
        if self._at_end:
            if not self._end_told:
                self._end_told = True
                raise StopIteration
            self._begin_pass()
        if self._pipeline is None:
            self._start()
        assert self._pipeline is not None
        began = time.perf_counter()
        self._began = self._began or began
        batch = self._pipeline.next()
        self._waited += time.perf_counter() - began
        if batch is None:
            # The pipeline ends before the pass only when another thread closed the loader.
            raise ValueError("the loader was closed in the middle of a pass")
        self._epoch, self._step, self._begun = batch.epoch, batch.step, True
        if self._at_end:
            self._stop()
        return self._present(batch)

    def __getstate__(self) -> dict[str, Any]:
        if self._pipeline is not None:
            expected = "one that has given no batch yet, or a loader made there"
            raise bad("loader", "a loader that is reading, for another process", expected)
        return self.__dict__

    @property
    def _pass_end(self) -> int | None:
        return None if self._epochs is None else self._pass_start + self._epochs

    @property
    def _at_end(self) -> bool:
        return self._pass_end is not None and self._epoch >= self._pass_end

    def _begin_pass(self) -> None:
        self._stop()
        if self._step:
            self._epoch, self._step = self._epoch + 1, 0
        self._pass_start, self._begun, self._end_told = self._epoch, False, False

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the loader is closed; load_state_dict opens it again")
        if self._pipeline is not None and self._pid != os.getpid():
            raise bad("loader", "a process forked from the one that reads", "a loader of its own")

    def _present(self, batch: Batch) -> Any:
        tensors = self._transform(batch.acts)
        acts = tensors if len(tensors) > 1 else next(iter(tensors.values()))
        self._n_given += len(batch.acts[self._rows.hooks[0].name])
        return acts if batch.rows is None else (acts, batch.rows)

    def _start(self) -> None:
        check_worker(self._rank, self._world)
        self._pid = os.getpid()
        self._pipeline = Pipeline(
            self._spec,
            epoch=self._epoch,
            step=self._step,
            n_epochs=self._pass_end,
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
        """End the threads; closing twice is fine, any other use raises."""
        self._closed = True
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration: what was handed out, not what was read ahead.

        The state is JSON and the same on every rank: it may be loaded on another world size. Keys:
        ``epoch``, ``step`` and ``pass_start``, the position; what has to be the same where it is
        loaded: ``version``, ``order``, ``digest``, ``seed``, ``geometry``, ``shards``, and what
        chooses and weights the rows.
        """
        place = {"epoch": self._epoch, "step": self._step, "pass_start": self._pass_start}
        return {**self._identity(), **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state: the next batch is the one that would have come next.

        The pass of the state continues to its end; a state after the last batch of a pass is
        one before the next pass. Opens a loader that is closed.

        Args:
            state: what ``state_dict`` returned.

        Raises:
            ActdsError: E014 when the state is of another dataset, seed, geometry, weights file, or
                leaves out other rows.
        """
        if not isinstance(state, Mapping) or not state:
            raise bad("state", repr(state)[:80], "what state_dict() returned")
        identity = self._identity()
        for key, value in identity.items():
            if state.get(key) != value:
                raise bad(f"state {key}", repr(state.get(key))[:200], repr(value)[:200])
        epoch, step = state.get("epoch"), state.get("step")
        check_int("state epoch", epoch, 0)
        check_int("state step", step, 0)
        start = state.get("pass_start", 0)  # a state from before there were passes: its only one
        check_int("state pass_start", start, 0)
        assert isinstance(epoch, int) and isinstance(step, int)
        if step >= self._n_batches:
            # A state of drop_last=False may be that before the short batch that is left out here.
            epoch, step = epoch + 1, 0
        self._stop()
        self._epoch, self._step, self._closed = epoch, step, False
        self._pass_start, self._begun, self._end_told = start, False, False
        if self._at_end or start > epoch:
            self._pass_start = epoch

    def _identity(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "order": ORDER_VERSION,
            "digest": self._rows.digest,
            "seed": self._seed,
            "geometry": asdict(self._spec.geometry),
            **self._rows.identity,
        }


@dataclass(frozen=True)
class Progress:
    """How far a loader is, and how fast.

    Args:
        epoch: the present epoch, from 0.
        step: batches of it that were handed out.
        n_batches: batches of an epoch.
        n_rows: rows that this loader object has handed out to its rank.
        seconds: since it was first asked for a batch.
        waited_s: seconds of these that the trainer waited for a batch.
        n_dropped: rows that each epoch leaves out, over all ranks.
    """

    epoch: int
    step: int
    n_batches: int
    n_rows: int
    seconds: float
    waited_s: float
    n_dropped: int = 0

    @property
    def rows_per_s(self) -> float:
        """Return the rows per second, of the trainer and the loader together."""
        return self.n_rows / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        share = self.waited_s / self.seconds if self.seconds else 0.0
        dropped = f" ({self.n_dropped:,} rows in no batch)" if self.n_dropped else ""
        return (
            f"epoch {self.epoch}, batch {self.step:,} of {self.n_batches:,}{dropped}, "
            f"{self.rows_per_s:,.0f} rows/s, {share:.0%} of the time waiting for data"
        )


class _Pass(Iterator[Any]):
    """The iterator of one ``for``: it ends with its pass, and is of no use in a later one.

    A trainer that estimates a scale in a loop of its own leaves the rest of ``iter(loader)`` to the
    loop that trains: whoever loops twice is told at the end.
    """

    def __init__(self, loader: Loader, number: int) -> None:
        self._loader, self._number, self._ended = loader, number, False
        self._n_given, self._begins = 0, list[int]()

    def __iter__(self) -> Self:
        if len(self._begins) < 3:
            self._begins.append(self._n_given)
        return self

    def __next__(self) -> Any:
        if self._ended:
            self._tell()
            raise StopIteration
        if self._number != self._loader._n_iterators:
            raise RuntimeError(
                "this iterator is outdated: iter() was called on its loader again, "
                "which began a pass of its own"
            )
        try:
            batch = next(self._loader)
        except StopIteration:
            self._ended = True
            self._tell()
            raise
        self._n_given += 1
        return batch

    def _tell(self) -> None:
        """Warn that two loops shared a pass; more of them read it in parts, as with islice."""
        if len(self._begins) == 2 and self._begins[1]:
            warnings.warn(
                f"of the {self._n_given:,} batches of this iterator the first loop over it took "
                f"{self._begins[1]:,} and the second the rest: loop over the loader itself, which "
                "begins a pass at every for",
                UserWarning,
                stacklevel=3,
            )
