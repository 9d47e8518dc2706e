"""An arm: the rows of a dataset that its dictionaries are trained on, and those that score them.

Tables are read, and no activation. Position 0 and BOS are left out: their rows are sinks. The order
of rows is a function of what a row is (request, position, which of several there) and of a seed:
rows that two arms share come in the same order in both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from actds.dataset.multiplicity import resolved_references
from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds.explore.pairs import prefix_hashes
from actds.format.positions import Keys, position_key
from actds.format.tables import PHASES
from actds.loader.filters import need_known
from actds.loader.selection import Selection, held_out_requests, select, split_weights
from actds.text import storable
from actds_studies.regimes.api import ArmWords
from actds_studies.regimes.arms import APART, Requests
from actds_validators.arrays import Bools, Floats, Ints

_POSITION, _COPY = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


def name_hash(*names: object) -> int:
    """Return a number of 64 bits for names."""
    text = "\0".join("" if name is None else f"={name}" for name in names)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def row_keys(request: Keys, position: Ints, copy: Ints) -> Keys:
    """Return a number for each row, alike in every dataset that has it ``(n,)``.

    Args:
        request: hash of each row's request ``(n,)``.
        position: position in the request ``(n,)``.
        copy: which of several rows there it is ``(n,)``.
    """
    return _mixed(
        request ^ _mixed(position.astype(np.uint64) * _POSITION + copy.astype(np.uint64) * _COPY)
    )


def copies(request: Keys, position: Ints, prefix: Keys) -> Ints:
    """Return for each row how many of its request and position come before it ``(n,)``.

    Args:
        request: hash of each row's request ``(n,)``.
        position: position in the request ``(n,)``.
        prefix: hash of the tokens up to it ``(n,)``, which orders those at one place.
    """
    order = np.lexsort((prefix, position, request))
    ordered, place = request[order], position[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (ordered[1:] != ordered[:-1]) | (place[1:] != place[:-1])
    starts = np.flatnonzero(first)
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
    return numbers


def epoch_order(keys: Keys, seed: int, epoch: int) -> Ints:
    """Return the order of rows in an epoch, a permutation ``(n,)``.

    Args:
        keys: the number of each row ``(n,)``.
        epoch: from 0.
    """
    salt = np.uint64(name_hash("order", seed, epoch))
    return np.argsort(_mixed(keys ^ salt), kind="stable").astype(np.int64)


def _mixed(x: npt.NDArray[np.uint64]) -> Keys:
    """Return a number that looks random for each number (the finalizer of SplitMix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)), np.uint64)


@dataclass(frozen=True)
class Entries:
    """Rows of a hook's array in the order of their keys, each as often as it is served.

    Args:
        key: what the row is, alike in every dataset ``(n,)``, ascending.
        row: number in ``Dataset.array(hook)`` ``(n,)``.
        request: hash of the request that it was served to ``(n,)``.
        token_id: token fed there ``(n,)``.
        phase: place in ``PHASES`` ``(n,)``.
        prefix: hash of the tokens up to it ``(n,)``; 0 where it is not known.
        weight: weight in the loss ``(n,)``.
    """

    key: Keys
    row: Ints
    request: Keys
    token_id: Ints
    phase: Ints
    prefix: Keys
    weight: Floats

    def __len__(self) -> int:
        return len(self.row)

    def take(self, kept: Ints | Bools) -> Entries:
        """Return some of the rows."""
        return Entries(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))

    @classmethod
    def joined(cls, parts: Sequence[Entries]) -> Entries:
        """Return the rows of all parts in the order of their keys."""
        whole = cls(*(np.concatenate([getattr(p, n) for p in parts]) for n in _FIELDS))
        return whole.take(np.argsort(whole.key, kind="stable"))


_FIELDS = tuple(Entries.__dataclass_fields__)


@dataclass(frozen=True)
class Arm:
    """The rows of one arm at a hook.

    Args:
        words: as it was asked for.
        shares: share of each part; one of 1 where nothing is mixed.
        train: the rows of each part to train on.
        scored: the held-out rows of each part.
    """

    words: ArmWords
    dataset: Dataset
    shares: tuple[float, ...]
    train: tuple[Entries, ...]
    scored: tuple[Entries, ...]

    @property
    def name(self) -> str:
        """Return what it is called."""
        return self.words.name


def open_arm(words: ArmWords, dataset: Dataset, hook: str, held_out: float) -> Arm:
    """Return the rows of an arm; no activation is read.

    Args:
        words: the arm as it was asked for.
        held_out: share of the requests that only score dictionaries, as a loader holds them out.

    Raises:
        ActdsError: E014 an expression that keeps no row, no request on a side, or a run that does
            not say which request and token a row is; E018 weights of another dataset.
    """
    served, weight = split_weights(list(words.weights) or None)
    servings = _servings(dataset, hook, words.name, held_out, served)
    parts = words.mix or ((words.phase, 1.0),)
    try:
        chosen = [
            select(
                dataset,
                hook,
                phase,
                where=words.where,
                exclude=tuple(dict.fromkeys((*APART, *words.exclude))),
                weights=weight,
            )
            for phase, _ in parts
        ]
        train = tuple(
            servings.entries(selection, held_out=False, again=True) for selection in chosen
        )
        scored = tuple(
            servings.entries(selection, held_out=True, again=False) for selection in chosen
        )
    except ActdsError as error:
        if error.code != "E014":
            raise
        got, expected = error.got or "", error.expected or ""
        raise ActdsError("E014", f"arm {words.name}", got=got, expected=expected) from None
    return Arm(words, dataset, tuple(share for _, share in parts), train, scored)


@dataclass(frozen=True)
class _Servings:
    """All rows of a hook, and for each request that the prefix cache served one that row again.

    Args:
        entries_of: what each is, of the request that it was served to.
        held_out: whether that request is held out ``(n,)``.
        n_rows: rows of the hook; those behind the first so many were served again.
    """

    entries_of: Entries
    held_out: Bools
    n_rows: int

    def entries(self, chosen: Selection, *, held_out: bool, again: bool) -> Entries:
        """Return those of a selection on one side of the split, in the order of their keys.

        Raises:
            ActdsError: E014 there is none.
        """
        keep, weight = np.zeros(self.n_rows, np.bool_), np.ones(self.n_rows)
        weights = chosen.weights()
        starts, at = {}, 0
        for shard in chosen.dataset.shards_of(chosen.hooks[0].name):
            starts[shard.name], at = at, at + shard.n_rows
        for n, (shard, count) in enumerate(zip(chosen.shards, chosen.counts, strict=True)):
            rows = slice(starts[shard.name], starts[shard.name] + shard.n_rows)
            keep[rows] = True if count is None else count > 0
            if weights is not None:
                weight[rows] = weights[n]
        entries = self.entries_of
        kept = np.flatnonzero(keep[entries.row] & (self.held_out == held_out))
        kept = kept if again else kept[kept < self.n_rows]
        if not len(kept):
            got = f"no request in {'held_out' if held_out else 'train'}"
            raise ActdsError("E014", "arm", got=got, expected="a share that leaves one")
        chosen_entries = replace(entries.take(kept), weight=weight[entries.row[kept]])
        return chosen_entries.take(np.argsort(chosen_entries.key, kind="stable"))


def _servings(dataset: Dataset, hook: str, name: str, held_out: float, again: bool) -> _Servings:
    """Return the rows of a hook, each once, and with ``again`` once more per cache reference.

    What was served again is known as a harvest without a cache would have it: by the request that
    it was served to.
    """
    requests = Requests(dataset)
    named = np.array(
        list(map(name_hash, requests.external_id, requests.source_row)),
        np.uint64,
    )
    shards = dataset.shards_of(hook)
    parts: list[list[Ints]] = []
    for shard in shards:
        need_known(shard, ("request", "position", "token_id"), f"arm {name}")
        tokens = shard.tokens(["request", "position", "token_id"])
        request = requests.index(shard.run, tokens["request"].to_numpy())
        phase = -1 if "phase" in shard.unknown else PHASES.index(shard.phase)
        columns = [tokens[c].to_numpy().astype(np.int64) for c in ("position", "token_id")]
        parts.append([request, *columns, np.full(shard.n_rows, phase)])
    request, position, token, phase_of = (np.concatenate(c) for c in zip(*parts, strict=True))
    n_rows = len(request)
    row = np.arange(n_rows)
    if again:
        more = _served_again(dataset, requests, position_key(request, position))
        row, request = (np.concatenate(pair) for pair in zip((row, request), more, strict=True))
    position, prefix = position[row], prefix_hashes(dataset, shards)[row]
    key = row_keys(named[request], position, copies(named[request], position, prefix))
    weight = np.ones(len(row))
    entries = Entries(key, row, named[request], token[row], phase_of[row], prefix, weight)
    is_held = np.zeros(len(requests), np.bool_)
    for run in dataset.catalog.run_ids:
        number, apart = held_out_requests(dataset, run, held_out)
        is_held[requests.index(run, number)] = apart
    return _Servings(entries, is_held[request], n_rows)


def _served_again(dataset: Dataset, requests: Requests, rows: Keys) -> tuple[Ints, Ints]:
    """Return the rows that the prefix cache served, and to which request, once for each time.

    Args:
        rows: key of each row: its request's index and its position ``(n,)``.
    """
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    parts: list[tuple[Ints, Ints]] = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for run in dataset.catalog.run_ids:
        lines = resolved_references(dataset.catalog.table("spans", run))
        start, stop = (lines[c].to_numpy().astype(np.int64) for c in ("start", "stop"))
        to, of = (requests.index(run, lines[c].to_numpy()) for c in ("request", "ref_request"))
        length = stop - start
        before = np.repeat(np.cumsum(length) - length, length)
        position = np.arange(length.sum()) - before + np.repeat(start, length)
        wanted = position_key(np.repeat(of, length), position)
        at = np.searchsorted(ordered, wanted)
        stored = ordered.take(at, mode="clip") == wanted
        parts.append((order[at[stored]], np.repeat(to, length)[stored]))
    row, request = (np.concatenate(part) for part in zip(*parts, strict=True))
    return row, request


def scored_apart(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms with nothing scored that any of them is trained on.

    A request that one arm holds out is trained on in none. Of the held-out rows each prefix stays
    once, and those stay away whose prefix a request to train on has as well, as a system prompt.
    """
    held_requests = np.unique(np.concatenate([e.request for arm in arms for e in arm.scored]))
    train = [tuple(e.take(~np.isin(e.request, held_requests)) for e in arm.train) for arm in arms]
    seen = np.unique(np.concatenate([e.prefix for parts in train for e in parts]))
    return [
        Arm(arm.words, arm.dataset, arm.shares, parts, tuple(_unseen(e, seen) for e in arm.scored))
        for arm, parts in zip(arms, train, strict=True)
    ]


def refuse_same(arms: Sequence[Arm]) -> None:
    """Refuse an arm that would be compared with itself.

    Raises:
        ActdsError: E014 two arms of one dataset with the same rows, shares and weights.
    """
    for first, second in combinations(arms, 2):
        if (first.dataset.digest, first.shares) == (second.dataset.digest, second.shares) and all(
            np.array_equal(ours.row, other.row) and np.array_equal(ours.weight, other.weight)
            for ours, other in zip(first.train, second.train, strict=True)
        ):
            place = f"arms {first.name} and {second.name}"
            raise ActdsError("E014", place, got="the same rows", expected="rows that differ")


def _unseen(entries: Entries, seen: Keys) -> Entries:
    known = np.flatnonzero(entries.prefix != 0)
    kept = entries.prefix == 0
    kept[known[np.unique(entries.prefix[known], return_index=True)[1]]] = True
    kept &= ~np.isin(entries.prefix, seen[seen != 0])
    return entries.take(kept)


def most(parts: Sequence[Entries], shares: Sequence[float]) -> int:
    n = min(int(len(e) / share + 1e-9) for e, share in zip(parts, shares, strict=True))
    while n and any(count > len(e) for count, e in zip(_split(n, shares), parts, strict=True)):
        n -= 1
    return n


def chosen(parts: Sequence[Entries], shares: Sequence[float], n: int) -> Entries:
    """Return ``n`` rows of the parts in their shares: those of the smallest keys.

    A sample by what rows are: of two arms that share rows it takes the same ones.
    """
    counts = _split(n, shares)
    return Entries.joined([e.take(np.arange(m)) for e, m in zip(parts, counts, strict=True)])


def _split(n: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers in the ratio of shares, which add up to ``n``."""
    counts = [int(n * share + 1e-9) for share in shares]
    for i in sorted(range(len(shares)), key=lambda i: counts[i] - n * shares[i]):
        counts[i] += sum(counts) < n
    return counts


def words_of(words: ArmWords) -> str:
    parts = [storable(words.path)]
    parts += [f"phase {words.phase}"] if words.phase else []
    parts += [", ".join(f"{share:.0%} {phase}" for phase, share in words.mix)] if words.mix else []
    parts += [words.where] if words.where else []
    parts += [f"without {name}" for name in words.exclude]
    parts += [f"weights {weight}" for weight in words.weights]
    return ", ".join(parts)
