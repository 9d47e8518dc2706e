"""Which rows a loader reads and how often each comes: hooks, phase, filters, split, frequency."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.multiplicity import Servings, served_again, served_counts
from actds.errors import ActdsError, not_installed
from actds.explore.dataset import Dataset
from actds.format import canonical, tables
from actds.format.inclusion import Sample, is_drawn_from
from actds.format.interventions import interventions_of
from actds.format.row_weights import RowWeights
from actds.format.schema import Hook
from actds.format.shard import Shard
from actds.loader.filters import (
    FILTERS,
    FINITE,
    NOT_FINITE,
    Filter,
    Mask,
    applied,
    bad,
    check_finite,
    finite_rows,
    is_by_norm,
    median,
    need_known,
    norms_of_hook,
    token_columns,
)
from actds.loader.where import INCLUSION, ROLE, Expression, Kind, RowValues, parse_expression

MULTIPLICITY = "multiplicity"
_WEIGHTS = (
    "'multiplicity', 'inclusion', the path of a weights file or an expression, or one of each"
)


def provenance_columns(
    argument: str, names: Sequence[str], known: Sequence[str], shards: Iterable[Shard]
) -> tuple[str, ...]:
    """Return the columns that an argument names beside ``role``."""
    for name in names:
        if name not in (*known, ROLE) or names.count(name) > 1:
            raise bad(argument, repr(name), f"different ones of {', '.join((*known, ROLE))}")
    needed = [n for n in names if n != ROLE] + (["request", "position"] if ROLE in names else [])
    for shard in shards:
        need_known(shard, needed, argument)
    return tuple(names)


def split_weights(
    weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
) -> tuple[bool, str | os.PathLike[str] | None]:
    """Return whether ``multiplicity`` is asked for, and the weights file or expression."""
    if weights is None:
        return False, None
    given = list(weights) if isinstance(weights, list | tuple) else [weights]
    further = [
        value for value in given if isinstance(value, str | os.PathLike) and value != MULTIPLICITY
    ]
    if not given or len(further) > 1 or len(given) != len(further) + (MULTIPLICITY in given):
        raise bad("weights", repr(weights)[:200], _WEIGHTS)
    return MULTIPLICITY in given, further[0] if further else None


def key_of(what: object) -> str:
    """Return the digest of JSON with floats, as of a split, which the canonical form refuses."""
    return canonical.digest(canonical.dump(json.loads(json.dumps(what), parse_float=str)))


def check_numbers(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None or name not in ("epochs", "lanes", "window_rows"):
            check_int(name, value, 0 if name in ("seed", "rank") else 1)


def check_int(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        raise bad(name, repr(value)[:80], f"an integer from {low}")


def check_torch() -> None:
    """Raise E011 where torch cannot be imported: every batch is made of its tensors."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise not_installed("torch", "torch", "actds.Loader") from error


def check_worker(rank: int, world: int) -> None:
    """Refuse to serve the same batches in several workers of a torch DataLoader."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    if info is None or (world % info.num_workers == 0 and rank % info.num_workers == info.id):
        return
    raise bad(
        "world",
        f"rank {rank} of {world} in worker {info.id} of {info.num_workers}",
        f"num_workers=0, or rank {info.id} of {info.num_workers}: each worker would give all rows",
    )


def check_lanes(batch: int, lanes: int, rank: int, world: int) -> None:
    if batch % lanes:
        raise bad("lanes", str(lanes), f"a divisor of batch {batch}")
    if lanes % world:
        raise bad("world", str(world), f"a divisor of lanes {lanes}; give lanes=")
    if rank >= world:
        raise bad("rank", str(rank), f"less than world {world}")


Counts = npt.NDArray[np.unsignedinteger[Any]]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PROVENANCE_COLUMNS = ("run", "request", "position", "token_id", "phase", "step")
"""Columns of a batch, or of an example."""
WEIGHT = "weight"
"""The column of the row weights."""
LEAVE_OUT = f'exclude="{NOT_FINITE}" leaves them out; actds check counts them.'
SPLITS = ("train", "held_out")
_SPLIT_SALT = b"actds held-out requests\n"


class RowFilter:
    """Which rows of a dataset are read: those that names, expression and split leave.

    Args:
        served: rows belong to all requests that they were served to, not only to the one that
            computed them: the split decides in `served_counts`, and leaves out no row here.

    Raises:
        ActdsError: E014 no such name, an expression that cannot be used, or norms of a run that
            has no norm readouts; E416 a row without its readout.

    Spec: 0.1 sections 6.3, 7.8 and 10.3.
    """

    def __init__(
        self,
        dataset: Dataset,
        hooks: Sequence[Hook],
        *,
        exclude: str | Sequence[str] = (),
        where: str | None = None,
        split: str | None = None,
        held_out: float = 0.0,
        served: bool = False,
    ) -> None:
        self._dataset, self._hooks, self._served = dataset, hooks, served
        self.values = RowValues(dataset, hooks)
        self.where = None if where is None else parse_expression(where, "where")
        self.names = _known_names(exclude)
        self.split = checked_split(split, held_out)
        self._filters = [FILTERS[name] for name in self.names]
        self._by_norm = [FILTERS[name] for name in self.names if is_by_norm(name)]
        self._finite: dict[str, Mask] = {}
        self._masks: dict[tuple[str, str], Mask] = {}  # of filters by norm
        self._sides: dict[str, Ints] = {}
        self._again: dict[str, Servings] = {}
        if self._by_norm:
            self._apply_norms()

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "exclude": list(self.names),
            "where": None if self.where is None else self.where.text,
            "split": None if self.split is None else list(self.split),
        }

    def left_out(self, shard: Shard) -> dict[str, Mask]:
        """Return per name which rows of a shard it leaves out, each of shape ``(n_rows,)``."""
        by_tokens = [chosen for chosen in self._filters if chosen not in self._by_norm]
        columns = self._columns(shard, by_tokens)
        masks = {chosen.name: applied(chosen, columns, shard) for chosen in by_tokens}
        masks |= {chosen.name: self._masks[chosen.name, shard.name] for chosen in self._by_norm}
        return {name: masks[name] for name in self.names}

    def kept(self, shard: Shard) -> Mask | None:
        """Return which rows of a shard are read, bool ``(n_rows,)``; None for all."""
        return self.kept_of(shard, self.left_out(shard))

    def kept_of(self, shard: Shard, left_out: Mapping[str, Mask]) -> Mask | None:
        """Return which rows are read, given what the names leave out."""
        kept = [~mask for mask in left_out.values() if mask.any()]
        if self.where is not None:
            decided = self.where.known(self.values.constant(shard))
            if decided is False:
                return np.zeros(shard.n_rows, np.bool_)
            if decided is None:
                columns = self.values.of(shard, self.where.columns)
                kept.append(self.where.mask(columns, shard.n_rows))
        if self.split is not None and not self._served:
            kept.append(self._in_split(shard))
        return np.logical_and.reduce(kept) if kept else None

    def served_counts(self, shard: Shard) -> Counts | None:
        """Return how often each row was served to requests of the split, ``(n_rows,)``.

        Without a split to all requests. None where every count is 1.

        Raises:
            ActdsError: E306 a dataset without a seal; and as ``Catalog.table``.

        Spec: 0.1 section 7.5.
        """
        if self._dataset.catalog.is_imported(shard.run):
            got = f"how often rows of the imported run {shard.run} were served is unknown"
            raise bad("weights", got, "runs with a census")
        tokens = shard.tokens(["request", "position"])
        request, position = (tokens[name].to_numpy() for name in ("request", "position"))
        if self.split is None:
            times = served_counts(shard.run, request, position, self._dataset.multiplicity())
            return None if times is None else _small(times)
        if shard.run not in self._again:
            requests = self.requests_of(shard.run)
            spans = self._dataset.catalog.table("spans", shard.run)
            self._again[shard.run] = served_again(spans, requests)
        computed = self._in_split(shard).astype(np.uint32)
        return _small(computed + self._again[shard.run].of(request, position).astype(np.uint32))

    def requests_of(self, run: str) -> Ints:
        assert self.split is not None
        part, share = self.split
        number, is_held_out = held_out_requests(self._dataset, run, share)
        chosen: Ints = number[is_held_out == (part == "held_out")]
        return chosen

    def _in_split(self, shard: Shard) -> Mask:
        if shard.run not in self._sides:
            self._sides[shard.run] = self.requests_of(shard.run)
        request = shard.tokens(["request"])["request"].to_numpy()
        return np.isin(request, self._sides[shard.run])

    def _apply_norms(self) -> None:
        # Of all shards: medians need every norm, and a mask is smaller than the norms.
        by_hook = [norms_of_hook(self._dataset, hook.name) for hook in self._hooks]
        medians = np.array([median(np.concatenate(list(norms.values()))) for norms in by_hook])
        for shard in self._dataset.shards:
            if all(shard.name in norms for norms in by_hook):
                columns = self._columns(shard, self._by_norm)
                columns["norm"] = np.stack([norms[shard.name] for norms in by_hook], axis=1)
                columns["median_norm"] = medians
                for chosen in self._by_norm:
                    self._masks[chosen.name, shard.name] = applied(chosen, columns, shard)

    def _columns(self, shard: Shard, filters: Sequence[Filter]) -> dict[str, npt.NDArray[Any]]:
        """Return what filters ask for beside norms; the rows of a shard are read for it once."""
        columns = token_columns(shard, filters)
        if any(FINITE in mask.columns for mask in filters):
            finite = self._finite.get(shard.name)
            if finite is None:
                by_hook = [finite_rows(shard, hook) for hook in self._hooks]
                whole = np.ones(shard.n_rows, np.bool_)
                finite = np.stack([whole if mask is None else mask for mask in by_hook], axis=1)
                if not finite.all():
                    self._finite[shard.name] = finite
            columns[FINITE] = finite
        return columns


def _known_names(exclude: str | Sequence[str]) -> tuple[str, ...]:
    names = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    for name in names:
        if name not in FILTERS:
            raise bad("exclude", repr(name)[:80], f"some of {', '.join(FILTERS)}")
    return tuple(name for name in FILTERS if name in names)


def held_out_requests(dataset: Dataset, run: str, share: float) -> tuple[Ints, Mask]:
    """Return the requests of a run, sorted, and which of them a split holds out ``(n,)``.

    Args:
        share: share of the requests that are held out, as the digests of their conversations
            fall, or else of their tokens.

    Raises:
        ActdsError: E014 a run without a census whose rows do not say which request they are of.

    Spec: 0.1 section 10.3.
    """
    lines = dataset.catalog.table("requests", run)
    number = lines["request"].to_numpy().astype(np.int64)
    # Later turns repeat the earlier ones.
    names = pc.coalesce(lines["conversation"], lines["token_digest"])
    digests: list[str | None] = names.to_pylist()
    if not len(number):  # no census: read all the same, by somebody who said so
        number = _requests_of_rows(dataset, run)
        digests = [None] * len(number)
    is_held_out = np.array(
        [
            _fraction(digest or f"{run}/{request}") < share
            for digest, request in zip(digests, number.tolist(), strict=True)
        ],
        np.bool_,
    )
    order = np.argsort(number, kind="stable")
    return number[order], is_held_out[order]


def _requests_of_rows(dataset: Dataset, run: str) -> Ints:
    shards = [shard for shard in dataset.shards if shard.run == run]
    if not shards:
        return np.empty(0, np.int64)
    need_known(shards[0], ["request"], "split")
    parts = [np.unique(shard.tokens(["request"])["request"].to_numpy()) for shard in shards]
    return np.unique(np.concatenate(parts)).astype(np.int64)


def checked_split(split: str | None, held_out: float) -> tuple[str, float] | None:
    if isinstance(held_out, bool) or not isinstance(held_out, int | float):
        raise bad("held_out", repr(held_out)[:80], "a share from 0 to 1")
    if split is None and not held_out:
        return None
    if not 0 < held_out < 1:
        raise bad("held_out", repr(held_out), "a share between 0 and 1")
    if split not in SPLITS:
        raise bad("split", repr(split)[:80], f"one of {', '.join(SPLITS)}")
    return split, float(held_out)


def _fraction(name: str) -> float:
    """Return where a request falls between 0 and 1: the same in every harvest of its tokens."""
    digest = hashlib.sha256(_SPLIT_SALT + name.encode()).digest()
    return int.from_bytes(digest[:8], "little") / 2.0**64


def warn_where_unequal(
    sample: Sample | None, selections: Sequence[Selection], stacklevel: int
) -> None:
    """Warn of rows with different inclusion, where nothing that was asked for names it."""
    if sample is not None and sample.is_unequal and not any(s.names_inclusion for s in selections):
        warnings.warn(
            f"{sample}. A mean in which each counts alike is not that of the rows they represent: "
            "weights='inclusion' gives each row its weight.",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def sample_of(selections: Sequence[Selection]) -> Sample | None:
    """Return what the inclusion of the rows that are read comes to, ``None`` where all is 1."""
    if not any(is_drawn_from(s.dataset.runs.get(run)) for s in selections for run in s.runs):
        return None
    kept = [
        shares if count is None else shares[count > 0]
        for selection in selections
        for shares, count in zip(selection.inclusion(), selection.counts, strict=True)
    ]
    return Sample.of(np.concatenate(kept))


def warn_where_none(
    excluded: Mapping[str, int], selections: Sequence[Selection], stacklevel: int
) -> None:
    """Warn of names that leave out no row: a sink whose token has no flag would stay unseen.

    Not of a filter by norm where another hook of the dataset has such rows: what ``actds check``
    advises holds for a dataset, and not every layer has sinks.
    """
    for name, n in excluded.items():
        if not (n or name == NOT_FINITE or any(_is_of_other_hooks(name, s) for s in selections)):
            warnings.warn(
                f"exclude={name!r} leaves out no row of this selection: nothing in it is one. "
                "Sinks without a token of their own are found by first_position and sink.",
                UserWarning,
                stacklevel=stacklevel + 1,
            )


def _is_of_other_hooks(name: str, selection: Selection) -> bool:
    dataset, hooks = selection.dataset, {hook.name for hook in selection.hooks}
    for hook in dataset.hooks.values():
        if hook.name in hooks or not is_by_norm(name):
            continue
        try:
            row_filter = RowFilter(dataset, [hook], exclude=name)
        except ActdsError:  # readouts that lack a row of it: nothing says that there are any
            continue
        if any(row_filter.left_out(shard)[name].any() for shard in dataset.shards_of(hook.name)):
            return True
    return False


@dataclass(frozen=True)
class Selection:
    """Which rows of a dataset are read, and how often each comes.

    Args:
        excluded: how many rows each name of ``exclude`` leaves out.
        n_kept: rows that are read, each counted once.
        counts: how often each row of a shard comes, ``(n_rows,)``, 0 for one that is left out;
            None where each comes once.
        row_weights: the weights file; None without.
        loss_weight: the expression that gives each row its weight; None without.
        in_union: probability that each row of each shard is in the union with other datasets;
            None where it is read alone.
        n_others: rows that are not read since their requests chose other hooks.
    """

    dataset: Dataset
    hooks: Sequence[Hook]
    shards: Sequence[Shard]
    filter: RowFilter
    excluded: dict[str, int]
    n_kept: int
    counts: Sequence[Counts | None]
    row_weights: RowWeights | None = None
    loss_weight: Expression | None = None
    frequency: Expression | None = None
    in_union: Sequence[Floats] | None = None
    n_others: int = 0

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(sorted({shard.run for shard in self.shards}))

    @property
    def n_stored(self) -> int:
        return sum(shard.n_rows for shard in self.shards)

    def weights(self) -> list[npt.NDArray[np.float32]] | None:
        """Return the weight of each row of each shard, float32 ``(n_rows,)``; None without.

        Raises:
            ActdsError: E014 a weight that is not recorded, not finite or negative.
        """
        if self.row_weights is not None:
            by_shard = self.row_weights.of_shards([shard.name for shard in self.shards])
            return [by_shard[shard.name] for shard in self.shards]
        if self.loss_weight is None:
            return None
        weights = self._numbers("weights", self.loss_weight)
        return [values.astype(np.float32) for values in weights]

    @property
    def weight(self) -> RowWeights | Expression | None:
        """Return what gives each row its weight in a loss."""
        return self.row_weights or self.loss_weight

    @property
    def names_inclusion(self) -> bool:
        """Return whether weights or frequency are in terms of inclusion."""
        expressions = (self.loss_weight, self.frequency)
        return any(item is not None and INCLUSION in item.columns for item in expressions)

    @property
    def weighs_by_inclusion(self) -> bool:
        return self.loss_weight is not None and self.loss_weight.text == f"1 / {INCLUSION}"

    def inclusion(self) -> list[Floats]:
        """Return the probability that each row of each shard is there with, ``(n_rows,)``."""
        inclusion = self.in_union or self.dataset.inclusion(self.shards)
        return [np.ones(s.n_rows) for s in self.shards] if inclusion is None else [*inclusion]

    def frequencies(self) -> list[Floats] | None:
        """Return what rows come in proportion to, float64 ``(n_rows,)``; None without.

        Rows that are left out have 0; a row that is served more often has as many times more.

        Raises:
            ActdsError: E014 as ``weights``; or all are 0.
        """
        if self.frequency is None:
            return None
        numbers = self._numbers("frequency", self.frequency)
        for values, count in zip(numbers, self.counts, strict=True):
            if count is not None:
                values *= count
        if not any(values.any() for values in numbers):
            raise bad("frequency", f"{self.frequency}, 0 for every row", "a row above 0")
        return numbers

    def _numbers(self, argument: str, expression: Expression) -> list[Floats]:
        in_union: Sequence[Floats | None] = self.in_union or [None] * len(self.shards)
        return [
            numbers_of(argument, expression, shard, self.filter.values, count, inclusion)
            for shard, count, inclusion in zip(self.shards, self.counts, in_union, strict=True)
        ]


def numbers_of(
    argument: str,
    expression: Expression,
    shard: Shard,
    rows: RowValues,
    kept: Counts | Mask | None,
    inclusion: Floats | None = None,
) -> Floats:
    """Return the numbers of an expression for the rows of a shard, 0 for those not kept.

    Args:
        inclusion: of each row, where it is another one than the dataset says.

    Raises:
        ActdsError: E014 one of a kept row that is not recorded, not finite or negative.
    """
    columns = rows.of(shard, expression.columns)
    if inclusion is not None and INCLUSION in columns:
        columns[INCLUSION] = pa.array(inclusion)
    values = expression.numbers(columns, shard.n_rows)
    wrong = ~(np.isfinite(values) & (values >= 0))
    if kept is not None:
        wrong &= kept > 0
        values[kept == 0] = 0
    if wrong.any():
        row = int(np.argmax(wrong))
        got = f"{values[row]} for row {row} of shards/{shard.name}"
        raise bad(argument, got, "finite numbers of at least 0")
    return values


def select(
    dataset: Dataset,
    hooks: str | Sequence[str] | None = None,
    phase: str | None = None,
    *,
    exclude: str | Sequence[str] = (),
    where: str | None = None,
    split: Literal["train", "held_out"] | None = None,
    held_out: float = 0.0,
    multiplicity: bool = False,
    weights: str | os.PathLike[str] | None = None,
    frequency: str | None = None,
    finite: bool = True,
) -> Selection:
    """Return what the arguments of a loader choose.

    Args:
        multiplicity: let each row come as often as it was served, in a split to its requests.
        weights: a weights file of the dataset, or an expression.
        finite: refuse rows that are not finite; without, the caller leaves them out.

    Raises:
        ActdsError: E014 when an argument selects nothing or cannot be used; E018 when the weights
            file is not one of this dataset; E306, E416.
    """
    chosen = _select_hooks(dataset, hooks)
    shards, n_others = _select_shards(dataset, chosen, phase)
    refuse_changed(dataset, where)
    file, loss_weight = _weights(weights)
    rate = None if frequency is None else parse_expression(frequency, "frequency", Kind.NUMBER)
    row_weights = None if file is None else dataset.row_weights(file)
    row_filter = RowFilter(
        dataset,
        chosen,
        exclude=exclude,
        where=where,
        split=split,
        held_out=held_out,
        served=multiplicity,
    )
    excluded = dict.fromkeys(row_filter.names, 0)
    counts, n_kept = [], 0
    for shard in shards:
        count, n_left = _row_counts(shard, row_filter, excluded, multiplicity)
        counts.append(count)
        n_kept += n_left
    if not n_kept:
        raise _nothing(row_filter)
    if finite and NOT_FINITE not in excluded:
        for hook in chosen:
            check_finite(hook, shards, counts, LEAVE_OUT)
    return Selection(
        dataset,
        chosen,
        shards,
        row_filter,
        excluded,
        n_kept,
        counts,
        row_weights,
        loss_weight,
        rate,
        n_others=n_others,
    )


def refuse_changed(dataset: Dataset, where: str | None) -> None:
    """Refuse rows of runs with interventions, unless an expression asks about these (E014)."""
    changed = [run for run, record in dataset.runs.items() if interventions_of(record)]
    if not changed:
        return
    columns = () if where is None else parse_expression(where, "where").columns
    if "intervention" not in columns:
        got = f"rows of {changed[0]}, in which interventions changed some, and others follow them"
        expected = "an expression about that, such as intervention == 0, or >= 0 for all of them"
        raise bad("where", got, expected)


def _nothing(row_filter: RowFilter) -> ActdsError:
    if row_filter.where is not None:
        return bad("where", f"{row_filter.where}, true for no row", "an expression that keeps one")
    if row_filter.split is not None:
        return bad("held_out", f"no request in {row_filter.split[0]}", "a share that leaves one")
    return bad("exclude", ", ".join(row_filter.names), "names that leave a row")


def _weights(
    weights: str | os.PathLike[str] | None,
) -> tuple[os.PathLike[str] | str | None, Expression | None]:
    if weights is None:
        return None, None
    if os.path.isfile(weights):
        return weights, None
    text = f"1 / {INCLUSION}" if weights == INCLUSION else os.fspath(weights)
    try:
        return None, parse_expression(text, "weights", Kind.NUMBER)
    except ActdsError as error:
        got = f"no file {os.fspath(weights)!r}, and no expression: {error.got}"
        raise bad("weights", got, "the path of a weights file, or numbers, as 1 / norm") from None


def _select_hooks(dataset: Dataset, hooks: str | Sequence[str] | None) -> list[Hook]:
    names = list(dataset.hooks) if hooks is None else [hooks] if isinstance(hooks, str) else hooks
    known = ", ".join(dataset.hooks)
    if not names or len(set(names)) != len(names):
        raise bad("hooks", repr(list(names)), f"different ones of {known}")
    for name in names:
        if name not in dataset.hooks:
            raise bad("hooks", repr(name), f"one of {known}")
    return [dataset.hooks[name] for name in names]


def _select_shards(
    dataset: Dataset, hooks: Sequence[Hook], phase: str | None
) -> tuple[list[Shard], int]:
    """Return the shards to read, and how many rows have other hooks, which requests chose."""
    if phase is not None and phase not in tables.PHASES:
        raise bad("phase", repr(phase), f"None or one of {', '.join(tables.PHASES)}")
    wanted = {hook.name for hook in hooks}
    of_phase = [shard for shard in dataset.shards if phase in (None, shard.phase)]
    names, n_others, shards = ", ".join(sorted(wanted)), 0, list[Shard]()
    for shard in of_phase:
        if dataset.catalog.has_choices(shard.run) and not wanted.issubset(shard.hooks):
            n_others += shard.n_rows
        elif not wanted.isdisjoint(shard.hooks):
            shards.append(shard)
    if not shards:
        got = f"no {phase or ''} row of {dataset.path} that has {names}".replace("  ", " ")
        raise bad("hooks" if of_phase else "phase", got, "at least one row")
    if n_others:
        warnings.warn(
            f"{n_others:,} rows of {dataset.path} have not all of {names}: their requests chose "
            "other hooks. They are left out, and what is read of it is of its other requests.",
            UserWarning,
            stacklevel=4,
        )
    for shard in shards:
        # Stages of a pipeline-parallel engine write their own layers in shards of their own.
        if phase is not None:
            need_known(shard, ["phase"], "phase")
        for name in sorted(wanted.difference(shard.hooks)):
            raise bad("hooks", f"no {name} in shard {shard.name}", "hooks of the same shards")
    return shards, n_others


def _row_counts(
    shard: Shard, row_filter: RowFilter, excluded: dict[str, int], multiplicity: bool
) -> tuple[Counts | None, int]:
    """Return how often each row of a shard comes, and how many rows do; add to ``excluded``."""
    count = row_filter.served_counts(shard) if multiplicity else None
    out = row_filter.left_out(shard)
    for name, mask in out.items():
        excluded[name] += int(mask.sum())
    kept = row_filter.kept_of(shard, out)
    if kept is not None and not kept.all():
        count = kept.astype(np.uint8) if count is None else count * kept
    return count, shard.n_rows if count is None else int(np.count_nonzero(count))


def _small(counts: Counts) -> Counts:
    """Return counts in the smallest type that holds them: there is one for each row."""
    return counts.astype(np.min_scalar_type(int(counts.max(initial=0))))
