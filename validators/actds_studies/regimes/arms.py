"""An arm: rows of one dataset that were made in one way, and what the tables say of each.

Token, request and step tables are read, shard by shard, and no activation. Position 0 and BOS are
left out: their rows are sinks, hundreds of times longer than the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.multiplicity import Servings, served_again
from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds.explore.requests import prefix_hashes
from actds.format import canonical
from actds.format.positions import Keys, pair_key, split_key
from actds.format.readouts import NONE
from actds.format.shard import Shard
from actds.format.tables import PHASES, ROLES
from actds.loader.filters import need_known
from actds.loader.selection import held_out_requests, select
from actds.text import storable
from actds_validators.arrays import Bools, Ints, Whole, narrow
from actds_validators.sections import about


def named(dataset: Dataset) -> dict[str, Any]:
    """Return what results say of a dataset: its digest, models, engines, and when it began."""
    of = about(dataset.catalog, "")
    words = {"models": list(of.models), "engines": list(of.engines)}
    return {"digest": dataset.digest, **words, "started_ns": of.started_ns}


class Requests:
    """The requests of all runs of a dataset, by run and number."""

    def __init__(self, dataset: Dataset) -> None:
        table = dataset.requests(run=True)
        self._runs = {run: n for n, run in enumerate(dataset.catalog.run_ids)}
        run = np.array([self._runs[name] for name in table["run"].to_pylist()], np.int64)
        key = pair_key(run, table["request"].to_numpy())
        order = np.argsort(key, kind="stable")
        self.keys: Keys = key[order]
        ordered = table.take(order)
        self.external_id: list[str] = ordered["external_id"].to_pylist()
        self.source: list[str | None] = ordered["source"].to_pylist()
        self.source_row: list[int | None] = ordered["source_row"].to_pylist()
        self.token_digest: list[str | None] = ordered["token_digest"].to_pylist()
        prompt, generated = (
            ordered[name].to_numpy().astype(np.int64) for name in ("prompt_len", "generated_len")
        )
        self.n_prompt: Ints = prompt
        self.n_fed: Ints = prompt + np.maximum(generated - 1, 0)

    def __len__(self) -> int:
        return len(self.keys)

    def index(self, run: str, request: npt.NDArray[Any]) -> Ints:
        """Return the index of requests of a run; E405 where one has no line."""
        key = pair_key(self._runs[run], request)
        at = np.searchsorted(self.keys, key)
        if len(key) and not np.array_equal(self.keys.take(at, mode="clip"), key):
            raise ActdsError(
                "E405", f"runs/{run}", got="rows of unknown requests", expected="a line for each"
            )
        return at

    def runs_of(self, request: npt.NDArray[Any]) -> set[int]:
        return set(np.unique(split_key(self.keys[np.unique(request)])[0]).tolist())

    def of_run(self, run: str) -> slice:
        n = self._runs[run]
        low, high = np.searchsorted(self.keys, pair_key([n, n + 1], 0))
        return slice(int(low), int(high))


def match(first: Requests, second: Requests, eligible: tuple[Bools, Bools]) -> Ints:
    """Return for each request of the second the same prompt's of the first, -1 if none.

    Equal token digests come first, with the same id and source where there are several; then
    the same id, source and source row; then the same id and source row. What is not unique by
    name is not matched by it: tokens decide later which positions are the same.
    """
    numbers = np.full(len(second), -1, np.int64)
    free = [np.flatnonzero(present).tolist() for present in eligible]
    for by_tokens, keys in (
        (True, ("token_digest", "external_id", "source", "source_row")),
        (True, ("token_digest",)),
        (False, ("external_id", "source", "source_row")),
        (False, ("external_id", "source_row")),
    ):
        here, second_by_key = (
            _by_key(requests, rows, keys)
            for requests, rows in zip((first, second), free, strict=True)
        )
        for key, theirs in second_by_key.items():
            ours = here.get(key, [])
            if not by_tokens and (len(ours) > 1 or len(theirs) > 1):
                continue
            for our, other in zip(ours, theirs, strict=False):
                numbers[other] = our
        taken = set(numbers.tolist())
        free = [
            [row for row in free[0] if row not in taken],
            [row for row in free[1] if numbers[row] < 0],
        ]
    return numbers


def _by_key(
    requests: Requests, rows: list[int], names: tuple[str, ...]
) -> dict[Hashable, list[int]]:
    result: dict[Hashable, list[int]] = defaultdict(list)
    for row in rows:
        key = tuple(getattr(requests, name)[row] for name in names)
        if key[0] is not None:
            result[key].append(row)
    return result


APART = ("bos", "first_position")
"""Filters whose rows are counted and left out of every estimate."""
TRAINED = "prefix of the training side"
"""Name of what is left out where a dictionary was fitted: rows whose tokens it has seen."""
_COLUMNS = ("request", "position", "token_id", "chunk", "phase", "step.kernel_mode", "role")
_SAMPLED = ("sampled.token_id", "sampled.entropy", "sampled.margin")
KERNEL_MODES = ("eager", "compiled", "piecewise", "full")
_MAX_REPEATS = 4096


@dataclass(frozen=True)
class Arm:
    """Rows of one dataset.

    Args:
        exclude: filters of the loader that leave out more than `APART`.
        held_out: share of the requests that are compared alone, to score a dictionary on others
            than it was fitted on; None for all of them.
        fitted: held-out arms of other datasets that a dictionary was fitted on: rows with a prefix
            of their training side are left out.
    """

    name: str
    dataset: Dataset
    phase: str | None = None
    where: str | None = None
    exclude: tuple[str, ...] = ()
    held_out: float | None = None
    fitted: tuple[Arm, ...] = ()

    @property
    def words(self) -> str:
        words = [storable(self.dataset.path)]
        words += [f"phase {self.phase}"] if self.phase else []
        words += [self.where] if self.where else []
        words += [] if self.held_out is None else [f"held_out ({self.held_out:g} held out)"]
        return ", ".join(words)


@dataclass(frozen=True)
class Sampled:
    """What the model sampled after each row ``(n,)``, -1 and NaN where it sampled none.

    Entropy of the distribution, in nats, and margin, the largest logit less the second largest.
    """

    token_id: Whole
    entropy: npt.NDArray[np.float32]
    margin: npt.NDArray[np.float32]


@dataclass(frozen=True)
class ArmRows:
    """The rows of an arm at a hook, each prefix once: some 30 bytes for each.

    Args:
        row: number in ``Dataset.array(hook)`` ``(n,)``, ascending.
        request: index in ``requests`` ``(n,)``.
        position: position in the request ``(n,)``.
        token_id: token fed there ``(n,)``.
        prefix: hash of the tokens up to the row, uint64 ``(n,)``; 0 where one is not known.
        decode_step: 1 for the first sampled token that was fed ``(n,)``, in a replay as its source
            sampled it, in a document that was given whole where the model would have gone on; 0 or
            less in a prompt.
        chunk: steps of the request before this one ``(n,)``, -1 unknown.
        kernel_mode: place in `KERNEL_MODES` ``(n,)``, -1 unknown.
        role: place in ``ROLES`` ``(n,)``, -1 unknown.
        sampled: what was sampled after them; None of a dataset that does not record it.
        represents: rows that each was drawn from, 1 / inclusion ``(n,)``; None where all are 1.
        n_repeats: rows left out because an earlier one has the same prefix.
        n_decode: rows that decode steps computed; None where the phase of one is not known.
        repeats: numbers of rows ``(n,)``, and of others with the same prefix that were left out:
            some tokens that the arm computed twice, in one run and phase.
    """

    row: Whole
    request: Whole
    position: Whole
    token_id: Whole
    prefix: Keys
    decode_step: Whole
    chunk: Whole
    kernel_mode: Whole
    role: Whole
    requests: Requests
    sampled: Sampled | None = None
    represents: npt.NDArray[np.float32] | None = None
    n_apart: dict[str, int] = field(default_factory=dict)
    n_repeats: int = 0
    n_decode: int | None = None
    repeats: tuple[Whole, Whole] = field(
        default_factory=lambda: (np.empty(0, np.int64), np.empty(0, np.int64))
    )

    def __len__(self) -> int:
        return len(self.row)

    @property
    def n_requests(self) -> int:
        return len(np.unique(self.request))

    def take(self, kept: Whole) -> ArmRows:
        """Return some of the rows; what was left out stays as it is."""
        columns: dict[str, Any] = {
            name: column[kept]
            for name, column in vars(self).items()
            if isinstance(column, np.ndarray)
        }
        if self.sampled is not None:
            columns["sampled"] = Sampled(*(column[kept] for column in vars(self.sampled).values()))
        return replace(self, **columns)


def read_arm(arm: Arm, hook: str) -> ArmRows:
    """Return the rows of an arm at a hook; no activation is read.

    A prefix that several requests computed counts once, for the first of them: as units of a test
    they would not be independent. Positions that the prefix cache served have no row at all.

    Raises:
        ActdsError: E014 no such hook, an expression that keeps no row, or a run that does not say
            which request and token a row is; E405 a row of an unknown request; E102 or E103
            a run record of which it cannot be read how documents were continued.
    """
    dataset = arm.dataset
    exclude = tuple(dict.fromkeys((*APART, *arm.exclude)))
    chosen = select(
        dataset,
        hook,
        arm.phase,
        exclude=exclude,
        where=arm.where,
        split=None if arm.held_out is None else "held_out",
        held_out=arm.held_out or 0.0,
        finite=False,  # their sums count them and leave them out
    )
    requests = Requests(dataset)
    sampled_from = first_sampled(dataset, requests)
    shards = dataset.shards_of(hook)
    starts = accumulate((shard.n_rows for shard in shards), initial=0)
    start_of = {shard.name: start for shard, start in zip(shards, starts, strict=False)}
    hashes = prefix_hashes(dataset, chosen.shards)
    trained = _trained(arm, hook, chosen.shards, hashes)
    apart = dict(chosen.excluded)
    if chosen.n_others:
        apart["of other hooks"] = chosen.n_others
    if trained is not None:
        apart[TRAINED] = 0
    is_sampled = dataset.sampled(run=False).num_rows > 0
    inclusion = dataset.inclusion(chosen.shards)
    parts: dict[str, list[npt.NDArray[Any]]] = defaultdict(list)
    at = 0
    for number, (shard, count) in enumerate(zip(chosen.shards, chosen.counts, strict=True)):
        need_known(shard, ("request", "position", "token_id"), f"arm {arm.name}")
        kept = np.arange(shard.n_rows) if count is None else np.flatnonzero(count)
        if trained is not None:
            seen = trained[at + kept]
            apart[TRAINED] += int(seen.sum())
            kept = kept[~seen]
        table = chosen.filter.values.of(shard, _COLUMNS)
        values = {name: _whole(table[name], name)[kept] for name in _COLUMNS}
        values["kernel_mode"] = values.pop("step.kernel_mode")
        values["request"] = request = requests.index(shard.run, values["request"])
        values["row"] = start_of[shard.name] + kept
        values["decode_step"] = values["position"] - sampled_from[request] + 1
        for name, column in values.items():
            parts[name].append(narrow(column))
        if inclusion is not None:
            parts["represents"].append((1 / inclusion[number][kept]).astype(np.float32))
        if is_sampled:
            after = chosen.filter.values.of(shard, _SAMPLED)
            parts[_SAMPLED[0]].append(narrow(_whole(after[_SAMPLED[0]], _SAMPLED[0])[kept]))
            for name in _SAMPLED[1:]:
                known = after[name].fill_null(np.nan).to_numpy(zero_copy_only=False)
                parts[name].append(known.astype(np.float32)[kept])
        parts["prefix"].append(hashes[at : at + shard.n_rows][kept])
        at += shard.n_rows
    del hashes
    columns: dict[str, Any] = {name: np.concatenate(parts.pop(name)) for name in list(parts)}
    row, prefix = columns["row"], columns["prefix"]
    once = _once(prefix, columns["request"])
    n_repeats = int(len(once) - np.count_nonzero(once))
    run = split_key(requests.keys[columns["request"]])[0]
    repeats = _repeats(row, prefix, once, pair_key(run, columns["phase"] + 1))
    del run, prefix
    if n_repeats or (row[1:] <= row[:-1]).any():
        kept = np.flatnonzero(once)
        kept = kept[np.argsort(row[kept], kind="stable")]
        for name in columns:
            columns[name] = columns[name][kept]
    phase = columns.pop("phase")
    n_decode = None if (phase < 0).any() else int((phase == PHASES.index("decode")).sum())
    sampled = Sampled(*(columns.pop(name) for name in _SAMPLED)) if is_sampled else None
    columns |= {"n_apart": apart, "n_repeats": n_repeats, "n_decode": n_decode, "repeats": repeats}
    return ArmRows(**columns, requests=requests, sampled=sampled)


def _trained(arm: Arm, hook: str, shards: Sequence[Shard], hashes: Keys) -> Bools | None:
    """Return which rows of an arm a dictionary may have been fitted on, over its shards ``(n,)``.

    Of the held-out side those of `_fitted`, and of any arm rows with the same prefix as one of
    these, of whatever phase, or of a dataset that it was fitted on. None where there are none.
    """
    known = list(arm.fitted)
    result = np.zeros(len(hashes), np.bool_)
    if arm.held_out is not None:
        known.append(arm)
        fitted = _fitted(arm, hook)
        result = np.concatenate([fitted[shard.name] for shard in shards])
    if not known:
        return None
    for side in known:
        rows = np.concatenate(list(_fitted(side, hook).values()))
        seen = prefix_hashes(side.dataset, side.dataset.shards_of(hook))[rows]
        result |= np.isin(hashes, np.unique(seen[seen != 0]))
    return result


def _fitted(arm: Arm, hook: str) -> dict[str, Bools]:
    """Return by shard which rows of an arm's dataset the other side of its split has.

    Those of requests that are not held out, and what the prefix cache served these.
    """
    sides: dict[str, tuple[Ints, Servings]] = {}
    parts: dict[str, Bools] = {}
    for shard in arm.dataset.shards_of(hook):
        if shard.run not in sides:
            number, is_held = held_out_requests(arm.dataset, shard.run, arm.held_out or 0.0)
            spans = arm.dataset.catalog.table("spans", shard.run)
            sides[shard.run] = number[~is_held], served_again(spans, number[~is_held])
        fitted, served = sides[shard.run]
        tokens = shard.tokens(["request", "position"])
        request, position = (tokens[name].to_numpy() for name in ("request", "position"))
        parts[shard.name] = np.isin(request, fitted) | (served.of(request, position) > 0)
    return parts


def first_sampled(dataset: Dataset, requests: Requests) -> Ints:
    """Return the position of each request that decode step 1 feeds: that behind what was given.

    Of most requests that is their prompt. A replay has the whole sequence as its prompt, and so has
    a document that was given with its own continuation: that length says nothing of where its
    source, or the model, would have sampled.
    """
    numbers = np.full(len(requests), -1, np.int64)
    lines = dataset.origins(run=True)
    for run in dataset.catalog.run_ids:
        numbers[requests.of_run(run)] = _continued_at(dataset, run)
        origins = lines.filter(pc.equal(lines["run"], run))
        numbers[requests.index(run, origins["request"].to_numpy())] = origins["n_given"].to_numpy()
    return np.where(numbers >= 0, numbers, requests.n_prompt)


def _continued_at(dataset: Dataset, run: str) -> int:
    """Return the tokens of each document that were its prompt, -1 without documents: 6.3."""
    field = dataset.runs[run].fields.get("prompts.continue")
    if field is None or field.value in (None, NONE):
        return -1
    place, text = f"runs/{run} prompts.continue", str(field.value)
    document = canonical.parse(f"{text}\n".encode(), place)
    n_prompt = document.get("n_prompt") if isinstance(document, dict) else None
    if type(n_prompt) is not int or n_prompt < 1:
        raise ActdsError("E103", place, got=text[:200], expected="none, or n_prompt and more")
    return n_prompt


def described_rows(arm: Arm, rows: ArmRows) -> str:
    """Return what the rows of an arm are, in words: who wrote their tokens, how they came to be."""
    if rows.n_decode is None:
        return "tokens that were computed in an unknown way"
    decode = rows.n_decode / max(len(rows), 1)
    if decode == 1:
        return "generated tokens, one a step in decode"
    if decode > 0:
        return f"{decode:.0%} generated tokens, one a step in decode, the others given"
    # A step that computed one token of a prompt had as many before it as the token has.
    is_single = float((rows.chunk == rows.position).mean()) > 0.5 if len(rows) else False
    how = "one a step" if is_single else "many a step in prefill"
    if arm.dataset.origins(run=False).num_rows:
        return f"tokens of another harvest, given again as prompts, {how}"
    return f"given tokens, {how}"


def need_requests(arm: Arm, hook: str, rows: ArmRows, least: int) -> None:
    """Refuse, E014, an arm of fewer requests than ``least``."""
    if rows.n_requests < least:
        raise ActdsError(
            "E014",
            f"arm {arm.name} at {hook}",
            got=f"rows of {rows.n_requests} requests",
            expected=f"{least} at least: nothing is estimated from fewer",
        )


def _once(prefix: Keys, request: Whole) -> Bools:
    """Return which rows count for their prefix: those of its first request.

    By row number it would be any request that shares a system prompt: another one in each harvest,
    and pairs of them would tie all requests to one another. One whose prefix is not known is kept.
    """
    order = np.lexsort((request, prefix))
    ordered = prefix[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]]) | (ordered == 0)
    kept = np.zeros(len(prefix), np.bool_)
    kept[order[first]] = True
    return kept


def _repeats(row: Whole, prefix: Keys, once: Bools, way: Keys) -> tuple[Whole, Whole]:
    """Return numbers of rows that count for their prefix, and of one other row of the same.

    The other row is one that was computed in the same way.
    """
    other = np.flatnonzero(~once)
    first = np.flatnonzero(once & np.isin(prefix, prefix[other]))
    first = first[np.argsort(prefix[first])]
    other = other[way[other] == way[first[np.searchsorted(prefix[first], prefix[other])]]]
    other = other[np.unique(prefix[other], return_index=True)[1]]
    other = other[:: len(other) // _MAX_REPEATS + 1]
    return row[first[np.searchsorted(prefix[first], prefix[other])]], row[other]


def _whole(column: pa.Array, name: str) -> Ints:
    """Return a column as whole numbers, -1 where it is not known; strings as their places."""
    words = {"step.kernel_mode": KERNEL_MODES, "role": ROLES, "phase": PHASES}.get(name)
    if words is not None:
        column = pc.index_in(column.cast(pa.string()), pa.array(words))
    numbers: Ints = column.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers
