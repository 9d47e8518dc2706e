"""An arm: the rows of a dataset that its dictionaries are trained on, and those that score them.

Tables are read, and no activation. Position 0 and BOS are left out: their rows are sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from actds.dataset.multiplicity import resolved_references
from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds.explore.pairs import prefix_hashes
from actds.format.positions import Keys, position_key
from actds.format.tables import PHASES
from actds.loader.filters import need_known
from actds.loader.selection import Selection, held_out_requests, select, split_weights
from actds.text import storable
from actds_studies.regimes.arms import APART
from actds_studies.regimes.asking import ArmWords
from actds_studies.regimes.requests import Requests
from actds_studies.stability.order import copies, name_hash, row_keys
from actds_validators.arrays import Bools, Floats, Ints


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

    def take(self, which: Ints | Bools) -> Entries:
        """Return some of the rows."""
        return Entries(*(getattr(self, name)[which] for name in self.__dataclass_fields__))

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
                dataset, hook, phase, where=words.where,
                exclude=tuple(dict.fromkeys((*APART, *words.exclude))), weights=weight,
            )
            for phase, _ in parts
        ]  # fmt: skip
        train = tuple(servings.entries(one, held=False, again=True) for one in chosen)
        scored = tuple(servings.entries(one, held=True, again=False) for one in chosen)
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
        held: whether that request is held out ``(n,)``.
        n_rows: rows of the hook; those behind the first so many were served again.
    """

    entries_of: Entries
    held: Bools
    n_rows: int

    def entries(self, chosen: Selection, *, held: bool, again: bool) -> Entries:
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
        told = self.entries_of
        which = np.flatnonzero(keep[told.row] & (self.held == held))
        which = which if again else which[which < self.n_rows]
        if not len(which):
            got = f"no request in {'held_out' if held else 'train'}"
            raise ActdsError("E014", "arm", got=got, expected="a share that leaves one")
        found = replace(told.take(which), weight=weight[told.row[which]])
        return found.take(np.argsort(found.key, kind="stable"))


def _servings(dataset: Dataset, hook: str, name: str, held_out: float, again: bool) -> _Servings:
    """Return the rows of a hook, each once, and with ``again`` once more per cache reference.

    What was served again is known as a harvest without a cache would have it: by the request that
    it was served to.
    """
    requests = Requests(dataset)
    named = np.array(
        [
            name_hash(*one)
            for one in zip(requests.external_id, requests.source_row, strict=True)
        ],
        np.uint64,
    )  # fmt: skip
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
    told = Entries(key, row, named[request], token[row], phase_of[row], prefix, weight)
    held = np.zeros(len(requests), np.bool_)
    for run in dataset.catalog.run_ids:
        number, apart = held_out_requests(dataset, run, held_out)
        held[requests.index(run, number)] = apart
    return _Servings(told, held[request], n_rows)


def _served_again(dataset: Dataset, requests: Requests, rows: Keys) -> tuple[Ints, Ints]:
    """Return the rows that the prefix cache served, and to which request, once for each time.

    Args:
        rows: key of each row: its request's index and its position ``(n,)``.
    """
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    found: list[tuple[Ints, Ints]] = [(np.empty(0, np.int64), np.empty(0, np.int64))]
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
        found.append((order[at[stored]], np.repeat(to, length)[stored]))
    row, request = (np.concatenate(part) for part in zip(*found, strict=True))
    return row, request


def scored_apart(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms with nothing scored that any of them is trained on.

    A request that one arm holds out is trained on in none. Of the held-out rows each prefix stays
    once, and those stay away whose prefix a request to train on has as well, as a system prompt.
    """
    held = np.unique(np.concatenate([e.request for arm in arms for e in arm.scored]))
    train = [tuple(e.take(~np.isin(e.request, held)) for e in arm.train) for arm in arms]
    seen = np.unique(np.concatenate([e.prefix for parts in train for e in parts]))
    return [
        Arm(
            arm.words,
            arm.dataset,
            arm.shares,
            parts,
            tuple(_unseen(e, seen) for e in arm.scored),
        )
        for arm, parts in zip(arms, train, strict=True)
    ]


def refuse_same(arms: Sequence[Arm]) -> None:
    """Refuse an arm that would be compared with itself.

    Raises:
        ActdsError: E014 two arms of one dataset with the same rows, shares and weights.
    """
    for first, second in combinations(arms, 2):
        if (first.dataset.digest, first.shares) == (second.dataset.digest, second.shares) and all(
            np.array_equal(one.row, other.row) and np.array_equal(one.weight, other.weight)
            for one, other in zip(first.train, second.train, strict=True)
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
    """Return how many rows the parts have in these shares."""
    n = min(int(len(e) / share + 1e-9) for e, share in zip(parts, shares, strict=True))
    while n and any(
        count > len(e) for count, e in zip(_split(n, shares), parts, strict=True)
    ):  # fmt: skip
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
    """Return what selects the rows of an arm, in words."""
    said = [storable(words.path)]
    said += [f"phase {words.phase}"] if words.phase else []
    said += [", ".join(f"{share:.0%} {phase}" for phase, share in words.mix)] if words.mix else []
    said += [words.where] if words.where else []
    said += [f"without {name}" for name in words.exclude]
    said += [f"weights {one}" for one in words.weights]
    return ", ".join(said)
