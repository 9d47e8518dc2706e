"""Rows: what the dictionaries of an arm are trained on, and the held-out ones that score them.

Tables are read first, and activations once it is known of which rows. Position 0 and BOS are left
out: their rows are sinks. The order of rows is a function of what a row is (request, position,
which of several there) and of a seed: rows that two arms share come in the same order in both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from actds.dataset.multiplicity import resolved_references
from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds.explore.requests import prefix_hashes
from actds.format.arrays import DTYPES
from actds.format.inclusion import mixed
from actds.format.positions import Keys, position_key
from actds.format.tables import PHASES
from actds.loader.filters import SINK_NORM, need_known
from actds.loader.selection import Selection, held_out_requests, select, split_weights
from actds_studies.regimes.api import ArmWords, labels_of
from actds_studies.regimes.arms import APART, Requests, first_sampled
from actds_studies.stability.result import Limits, Rare
from actds_studies.stability.scores import Entries, Scored, groups_of
from actds_validators.arrays import Bools, Floats, Ints, Rows

if TYPE_CHECKING:
    import torch

_POSITION, _COPY = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)

ENTRY = np.dtype(
    [
        ("key", "u8"),  # what the row is, alike in every dataset
        ("row", "i8"),  # number in ``Dataset.array(hook)``
        ("request", "u8"),  # hash of the request that it was served to
        ("token_id", "i8"),
        ("phase", "i8"),  # place in ``PHASES``, or -1
        ("step", "i8"),  # of decode, from 1; below it in what was given
        ("label", "i8"),  # 1, 0, or -1 where there is none
        ("prefix", "u8"),  # hash of the tokens up to it; 0 where it is not known
        ("weight", "f8"),  # in the loss
        ("represents", "f8"),  # rows that it was drawn from: 1 / inclusion
    ]
)


def in_order(entries: Entries) -> Entries:
    return entries[np.argsort(entries["key"], kind="stable")]


def name_hash(*names: object) -> int:
    text = "\0".join("" if name is None else f"={name}" for name in names)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def row_keys(request: Keys, position: Ints, copy: Ints) -> Keys:
    """Return a number for each row, alike in every dataset that has it ``(n,)``.

    Args:
        copy: which of several rows of a request and position it is ``(n,)``.
    """
    return mixed(
        request ^ mixed(position.astype(np.uint64) * _POSITION + copy.astype(np.uint64) * _COPY)
    )


def copies(request: Keys, position: Ints, prefix: Keys) -> Ints:
    """Return for each row how many of its request and position come before it ``(n,)``.

    Args:
        prefix: hash of the tokens up to it ``(n,)``, which orders those at one place.
    """
    order = np.lexsort((prefix, position, request))
    other = [np.diff(column[order]) != 0 for column in (request, position)]
    starts = np.flatnonzero(np.concatenate([[True], other[0] | other[1]])[: len(order)])
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
    return numbers


def epoch_order(keys: Keys, seed: int, epoch: int) -> Ints:
    """Return the order of rows in an epoch, a permutation ``(n,)``."""
    salt = np.uint64(name_hash("order", seed, epoch))
    return np.argsort(mixed(keys ^ salt), kind="stable").astype(np.int64)


@dataclass(frozen=True)
class Arm:
    """The rows of one arm at a hook.

    Args:
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
        return self.words.name


def open_arm(
    words: ArmWords, dataset: Dataset, hook: str, held_out: float, label: str | None = None
) -> Arm:
    """Return the rows of an arm; no activation is read.

    Args:
        held_out: share of the requests that only score dictionaries, as a loader holds them out.
        label: expression that is true of the rows that probes should find.
    """
    served, weight = split_weights(list(words.weights) or None)
    entries, is_held, n_stored = _servings(dataset, hook, words.name, held_out, served)
    if label is not None:
        entries["label"] = labels_of(dataset, hook, label)[entries["row"]]
    exclude = tuple(dict.fromkeys((*APART, *words.exclude)))
    is_stored = np.arange(len(entries)) < n_stored
    parts = words.mix or ((words.phase, 1.0),)
    train, scored = [], []
    try:
        selections = [
            select(dataset, hook, phase, where=words.where, exclude=exclude, weights=weight)
            for phase, _ in parts
        ]
        for selection in selections:
            weights = _weights(selection)
            train.append(_side(entries, weights, ~is_held, "train"))
            scored.append(_side(entries, weights, is_held & is_stored, "held_out"))
    except ActdsError as error:
        if error.code != "E014":
            raise
        got, expected = error.got or "", error.expected or ""
        raise ActdsError("E014", f"arm {words.name}", got=got, expected=expected) from None
    return Arm(words, dataset, tuple(share for _, share in parts), tuple(train), tuple(scored))


def _weights(selection: Selection) -> Floats:
    """Return the weight of each row of the hook, nan for one that is left out ``(n_rows,)``.

    Without weights of the arm's that of what it was drawn from.
    """
    given: Sequence[npt.NDArray[np.floating]] | None = selection.weights()
    if given is None:
        given = [1 / inclusion for inclusion in selection.inclusion()]
    by_shard: dict[str, Floats] = {}
    for n, (shard, count) in enumerate(zip(selection.shards, selection.counts, strict=True)):
        weight = given[n].astype(np.float64)
        by_shard[shard.name] = weight if count is None else np.where(count > 0, weight, np.nan)
    shards = selection.dataset.shards_of(selection.hooks[0].name)
    return np.concatenate([by_shard.get(s.name, np.full(s.n_rows, np.nan)) for s in shards])


def _side(entries: Entries, weights: Floats, on_side: Bools, side: str) -> Entries:
    weight = weights[entries["row"]]
    kept = on_side & ~np.isnan(weight)
    if not kept.any():
        expected = "a share that leaves one"
        raise ActdsError("E014", "arm", got=f"no request in {side}", expected=expected)
    of_side = entries[kept]
    of_side["weight"] = weight[kept]
    return in_order(of_side)


def _servings(
    dataset: Dataset, hook: str, name: str, held_out: float, again: bool
) -> tuple[Entries, Bools, int]:
    """Return the rows of a hook, each once, and with ``again`` once more per cache reference.

    What was served again is known as a harvest without a cache would have it: by the request that
    it was served to.

    Returns:
        The rows, whether the request of each is held out, and how many are stored: those behind
        the first so many were served again.
    """
    requests = Requests(dataset)
    named = np.array(list(map(name_hash, requests.external_id, requests.source_row)), np.uint64)
    shards = dataset.shards_of(hook)
    parts = [[np.empty(0, np.int64)] * 4]
    for shard in shards:
        need_known(shard, ("request", "position", "token_id"), f"arm {name}")
        tokens = shard.tokens(["request", "position", "token_id"])
        request = requests.index(shard.run, tokens["request"].to_numpy())
        phase = -1 if "phase" in shard.unknown else PHASES.index(shard.phase)
        columns = [tokens[c].to_numpy().astype(np.int64) for c in ("position", "token_id")]
        parts.append([request, *columns, np.full(shard.n_rows, phase)])
    request, position, token, phase_of = (np.concatenate(c) for c in zip(*parts, strict=True))
    row = np.arange(n_stored := len(request))
    if again:
        more = _served_again(dataset, requests, position_key(request, position))
        row, request = (np.concatenate(pair) for pair in zip((row, request), more, strict=True))
    position, prefix = position[row], prefix_hashes(dataset, shards)[row]
    step = position - first_sampled(dataset, requests)[request] + 1
    key = row_keys(named[request], position, copies(named[request], position, prefix))
    is_held = np.zeros(len(requests), np.bool_)
    for run in dataset.catalog.run_ids:
        number, apart = held_out_requests(dataset, run, held_out)
        is_held[requests.index(run, number)] = apart
    entries = np.empty(len(row), ENTRY)
    inclusion = dataset.inclusion(shards)
    represents = np.ones(n_stored) if inclusion is None else 1 / np.concatenate(inclusion)
    what = (named[request], token[row], phase_of[row], step, -1, prefix)
    fields = (key, row, *what, 1, represents[row])
    for field, values in zip(ENTRY.names or (), fields, strict=True):
        entries[field] = values
    return entries, is_held[request], n_stored


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
    held_requests = np.unique(np.concatenate([e["request"] for arm in arms for e in arm.scored]))
    train = [tuple(e[~np.isin(e["request"], held_requests)] for e in arm.train) for arm in arms]
    seen = np.unique(np.concatenate([e["prefix"] for parts in train for e in parts]))
    return [
        replace(arm, train=parts, scored=tuple(_unseen(e, seen) for e in arm.scored))
        for arm, parts in zip(arms, train, strict=True)
    ]


def _unseen(entries: Entries, seen: Keys) -> Entries:
    known = np.flatnonzero(entries["prefix"] != 0)
    kept: Bools = entries["prefix"] == 0
    kept[known[np.unique(entries["prefix"][known], return_index=True)[1]]] = True
    return entries[kept & ~np.isin(entries["prefix"], seen[seen != 0])]


def refuse_same(arms: Sequence[Arm]) -> None:
    for first, second in combinations(arms, 2):
        if (first.dataset.digest, first.shares) == (second.dataset.digest, second.shares) and all(
            np.array_equal(ours[["row", "weight"]], other[["row", "weight"]])
            for ours, other in zip(first.train, second.train, strict=True)
        ):
            place = f"arms {first.name} and {second.name}"
            raise ActdsError("E014", place, got="the same rows", expected="rows that differ")


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
    return in_order(np.concatenate([e[:m] for e, m in zip(parts, counts, strict=True)]))


def _split(n: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers in the ratio of shares, which add up to ``n``."""
    counts = [int(n * share + 1e-9) for share in shares]
    for i in sorted(range(len(shares)), key=lambda i: counts[i] - n * shares[i]):
        counts[i] += sum(counts) < n
    return counts


def sizes(arms: Sequence[Arm], hook: str, limits: Limits) -> tuple[int, int]:
    """Return how many rows of an arm and how many features there will be."""
    d_model = arms[0].dataset.hooks[hook].d_model
    n_features = limits.features or 4 * d_model
    if n_features < limits.k:
        got = f"{n_features:,} features, {limits.k:,} of them active"
        raise ActdsError("E009", "features", got=got, expected=f"{limits.k:,} at least, as k")
    available = {arm.name: most(arm.train, arm.shares) for arm in arms}
    name, least = min(available.items(), key=lambda pair: pair[1])
    n_rows = least if limits.rows is None else limits.rows
    if n_rows > least:
        got, expected = f"{n_rows:,}", f"at most the {least:,} rows of arm {name}"
        raise ActdsError("E009", "rows", got=got, expected=expected)
    if n_rows < limits.batch:
        option = "batch" if limits.rows is None else "rows"
        got = f"{n_rows:,} rows of arm {name} and batches of {limits.batch:,}"
        raise ActdsError("E009", option, got=got, expected="one batch at least")
    for arm in arms:
        if not most(arm.scored, arm.shares):
            raise ActdsError(
                "E014",
                f"arm {arm.name}",
                got="no held-out row that no arm is trained on",
                expected="some",
                next_step="Hold out a larger share of the requests: held_out=0.5",
            )
    _need_memory(arms, hook, limits, n_rows, n_features)
    return n_rows, n_features


N_SCORED = 8192
"""Held-out rows of an arm that score dictionaries, at most."""
_BLOCK = 65_536


def _need_memory(
    arms: Sequence[Arm], hook: str, limits: Limits, n_rows: int, n_features: int
) -> None:
    of_hook = arms[0].dataset.hooks[hook]
    row_nbytes = of_hook.d_model * DTYPES[of_hook.dtype].itemsize
    n_dictionaries = (len(arms) + 1) * limits.seeds
    n_scored = sum(min(N_SCORED, most(arm.scored, arm.shares)) for arm in arms)
    fixed = n_dictionaries * (8 * n_features * of_hook.d_model + 8 * limits.k * n_scored)
    fixed += 4 * n_scored * of_hook.d_model + 24 * n_features**2
    budget = limits.max_memory << 20
    need = fixed + len(arms) * n_rows * row_nbytes
    if need > budget:
        fitting = (budget - fixed) // (len(arms) * row_nbytes)
        fewer = f"rows={fitting}" if fitting >= limits.batch else "fewer features"
        raise ActdsError(
            "E009",
            "max_memory",
            got=f"{need >> 20:,} MiB for {n_rows:,} rows of {len(arms)} arms and "
            f"{n_dictionaries} dictionaries",
            expected=f"at most {limits.max_memory:,} MiB",
            next_step=f"Give {fewer}, or max_memory={(need >> 20) + 1}",
        )


@dataclass(frozen=True)
class ArmRows:
    """The rows of one arm in memory.

    Args:
        entries: the rows to train on ``(n,)``; sinks and what is not finite weigh nothing.
        values: the same as they are stored, 0 where they weigh nothing ``(n, d_model)``.
        n_sinks: rows that are sinks or not finite.
    """

    arm: Arm
    entries: Entries
    values: torch.Tensor
    scored: Scored
    n_sinks: int


def gather(
    arms: Sequence[Arm], hook: str, n_rows: int
) -> tuple[list[ArmRows], float, Floats, Rare]:
    """Read the rows of all arms.

    Returns:
        The rows of each arm; what brings the reference's rows to a mean norm of the square root of
        ``d_model``, and their mean ``(d_model,)``; and which tokens are rare.
    """
    entries = [chosen(arm.train, arm.shares, n_rows) for arm in arms]
    values = [
        arm.dataset.array(hook).torch(entry["row"])
        for arm, entry in zip(arms, entries, strict=True)
    ]
    norms = [_norms(rows) for rows in values]
    finite = norms[0][np.isfinite(norms[0])]
    limit = SINK_NORM * float(np.median(finite)) if len(finite) else 0.0
    n_sinks = []
    for arm, rows, norm, entry in zip(arms, values, norms, entries, strict=True):
        is_sink = norm > limit
        n_sinks.append(int(is_sink.sum()))
        rows[is_sink], entry["weight"][is_sink] = 0, 0
        if not limit or not (entry["weight"] > 0).any():
            got = "no finite row with a weight"
            raise ActdsError("E014", f"arm {arm.name} at {hook}", got=got, expected="some")
    counted = entries[0]["weight"] > 0
    rare, frequent = rare_tokens(entries[0]["token_id"])
    scored = [_scored_rows(arm, hook, limit) for arm in arms]
    groups = groups_of([entry for entry, _ in scored])
    scored_of_arms = [
        Scored(rows, entry, group, ~np.isin(entry["token_id"], frequent))
        for (entry, rows), group in zip(scored, groups, strict=True)
    ]
    of_arms = list(map(ArmRows, arms, entries, values, scored_of_arms, n_sinks))
    represents = np.where(counted, entries[0]["represents"], 0)
    mean_norm = np.average(norms[0][counted], weights=represents[counted])
    scale = float(values[0].shape[1] ** 0.5 / mean_norm)
    return of_arms, scale, _mean(values[0], represents), rare


def labelled(arm: ArmRows) -> tuple[Entries, Rows]:
    """Return rows of training requests that have a label; E014 where it is true of all or none."""
    entries = arm.entries
    known = np.flatnonzero((entries["label"] >= 0) & (entries["weight"] > 0))[:N_SCORED]
    n_true = int((entries["label"][known] == 1).sum())
    if not 0 < n_true < len(known):
        got = f"true of {n_true:,} of {len(known):,} rows of arm {arm.arm.name} that have one"
        raise ActdsError("E014", "label", got=got, expected="some, and not all")
    return entries[known], arm.values[known].float().numpy()


def _scored_rows(arm: Arm, hook: str, limit: float) -> tuple[Entries, Rows]:
    entries = chosen(arm.scored, arm.shares, min(N_SCORED, most(arm.scored, arm.shares)))
    values = arm.dataset.array(hook).torch(entries["row"])
    kept = _norms(values) <= limit
    if not kept.any():
        got = "held-out rows that are all sinks or not finite"
        raise ActdsError("E014", f"arm {arm.name} at {hook}", got=got, expected="others")
    return entries[kept], values.float().numpy()[kept]


def _norms(rows: torch.Tensor) -> Floats:
    """Return the length of each row, infinite for one that is not finite ``(n,)``."""
    import torch

    norms = torch.cat([block.float().norm(dim=1) for block in torch.split(rows, _BLOCK)]).numpy()
    return np.where(np.isfinite(norms), norms.astype(np.float64), np.inf)


def _mean(rows: torch.Tensor, weight: Floats) -> Floats:
    import torch

    parts = zip(*(torch.split(x, _BLOCK) for x in (rows, torch.from_numpy(weight))), strict=True)
    total = sum((block.double() * w[:, None])[w > 0].sum(dim=0) for block, w in parts)
    return np.asarray(total / weight.sum())


RARE = 0.1


def rare_tokens(token_id: Ints) -> tuple[Rare, Ints]:
    """Return which tokens are rare, and those that are not.

    Rare are the least frequent token ids that together make a tenth of the reference's rows; ids
    that come as often as the last of them are all rare, and so is one that never comes.
    """
    ids, counts = np.unique(token_id, return_counts=True)
    order = np.argsort(counts, kind="stable")
    rows = np.cumsum(counts[order])
    most = int(counts[order][np.searchsorted(rows, RARE * len(token_id))])
    share = float(counts[counts <= most].sum() / len(token_id))
    return Rare(most=most, share=share), ids[counts > most]
