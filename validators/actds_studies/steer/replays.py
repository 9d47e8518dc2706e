"""The replays of a steering study: the source's own tokens, once plain and once for each variant.

All are requests of one run. What stands before the changed position is served from the prefix cache
to every variant, so that a variant costs what comes behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import actds
from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds.explore.requests import TokenSequence
from actds.format.interventions import Part
from actds_validators.arrays import Floats, Ints, Rows
from actds_writers.config import ReplaySettings
from actds_writers.harvest.prepare import Served
from actds_writers.harvest.replay import Replays
from actds_writers.harvest.result import Observer
from actds_writers.harvest.run import harvest

PLAIN = "plain"
LEAST_TOKENS = 16
N_PROVED = 256
"""Entropies that the unembedding is proved by."""


@dataclass(frozen=True)
class Variant:
    """What is added to the rows of a hook, where, and how much of a request is served.

    Args:
        vector: row of the file of vectors, ``None`` of the plain one.
        start, stop: positions of the part that are changed; ``n``, that are served.
        part: what was generated, or all of the request.
        among: numbers of the sequences that are served, ``None`` for all.
    """

    name: str
    vector: int | None
    strength: float
    start: int
    stop: int | None
    n: int
    part: Part | None = "generated"
    among: Sequence[int] | None = None


@dataclass(frozen=True)
class Serving:
    """How a source is served, whose ``hook`` is changed; ``options`` as of ``actds replay``."""

    source: Dataset
    hook: str
    options: Mapping[str, Any]

    def serve(
        self,
        sequences: Sequence[TokenSequence],
        variants: Sequence[Variant],
        vectors: Rows,
        folder: Path,
        *,
        whole: bool = False,
        n_sampled: int = 1,
    ) -> Replayed:
        """Serve sequences, plain (``whole`` or in part) and in every variant, into a folder.

        So many tokens are sampled behind each: one is that of the largest logit.
        """
        longest = 1 << 31 if whole else max(variant.n for variant in variants)
        every = [Variant(PLAIN, None, 0.0, 0, None, longest), *variants]
        folder.mkdir()
        np.save(folder / "vectors.npy", vectors)
        edit = {"hook": self.hook, "op": "add", "vector": "vectors.npy"}
        items = []
        for v in variants:
            edits = [edit | {"row": v.vector, "strength": v.strength}]
            where = {"part": v.part, "start": v.start, "stop": v.stop}
            items.append({"name": v.name, "edits": edits, "requests": [f"id *#{v.name}"], **where})
        file = folder / "interventions.json"
        document = {"schema": "actds.interventions/1", "interventions": items}
        file.write_text(json.dumps(document), encoding="utf-8")
        places = {"source": self.source.path, "out": str(folder / "rows"), "intervene": str(file)}
        hooks = f"{self.hook.replace('.', ':')};final"
        what = {"hooks": hooks, "readouts": False, "entropy": True}
        settings = ReplaySettings.of({**places, **what, **self.options})
        numbers = range(len(sequences))
        served = [_cut(sequences[n], n, v) for v in every for n in v.among or numbers]
        requests = Replays(settings, self.source, Observer(), sequences=served)

        def served_by(*args: Any) -> Served:
            of = requests.served(*args)
            return replace(of, encoded=[replace(e, max_tokens=n_sampled) for e in of.encoded])

        write = settings.as_write(str(settings.hooks))
        how = {"max_tokens": n_sampled, "temperature": float(n_sampled > 1)}
        harvest(write.model_copy(update=how), served_by=served_by)
        return Replayed(actds.open(settings.out), sequences)


def _cut(sequence: TokenSequence, number: int, variant: Variant) -> TokenSequence:
    """Return the beginning of a sequence, named after its number and a variant."""
    n = variant.n + (sequence.n_given if variant.part else 0)
    return replace(
        sequence,
        n_given=min(sequence.n_given, n),
        token_id=sequence.token_id[:n],
        role=sequence.role[:n],
        line={**sequence.line, "external_id": f"{number}#{variant.name}"},
    )


class Replayed:
    """What a replay stored: last rows by sequence, variant and generated position."""

    def __init__(self, dataset: Dataset, sequences: Sequence[TokenSequence]) -> None:
        self.dataset = dataset
        self.last = next(name for name in dataset.hooks if name.startswith("final."))
        self._given = np.array([sequence.n_given for sequence in sequences])
        lines = dataset.requests().select(["external_id", "request"]).to_pydict()
        self._number = dict(zip(lines["external_id"], lines["request"], strict=True))
        self._rows: dict[str, Ints] = {}

    def rows(self, variant: str, at: Ints) -> Ints:
        """Return numbers of rows ``(n_sequences, n_positions)`` at generated positions from 0."""
        numbers = np.arange(len(self._given))[:, np.newaxis]
        return self.at(variant, numbers, self._given[:, np.newaxis] + at)

    def at(self, variant: str, number: Ints, position: Ints | int) -> Ints:
        """Return the number of the row at positions of sequences by number, -1 for none."""
        number, position = np.broadcast_arrays(number, position)
        rows = np.full(number.shape, -1, np.int64)
        for n in np.unique(number).tolist():
            name = f"{n}#{variant}"
            if name not in self._rows:
                of = self.dataset.request(self._number[name], hook=self.last)
                self._rows[name] = of.row
            known, here = self._rows[name], number == n
            within = here & (position < len(known))
            rows[within] = known[position[within]]
        return rows

    def values(self, rows: Ints, hook: str | None = None) -> Rows:
        """Return rows by their numbers ``(..., d_model)``, NaN for -1."""
        values = self.dataset.array(hook or self.last)[np.maximum(rows, 0).ravel()]
        values[rows.ravel() < 0] = np.nan
        return np.asarray(values.reshape(*rows.shape, values.shape[1]))

    def looks(self, variant: str) -> Floats:
        """Return the mean entropy of each continuation and the share of its 4-grams that repeat.

        ``(n, 2)``, without those of fewer than `LEAST_TOKENS`.
        """
        table = self.dataset.sampled().sort_by(
            [("request", "ascending"), ("position", "ascending")]
        )
        request, token, entropy = (table[k].to_numpy() for k in ("request", "token_id", "entropy"))
        result = []
        for n in range(len(self._given)):
            of = request == self._number[f"{n}#{variant}"]
            if of.sum() >= LEAST_TOKENS:
                grams = np.lib.stride_tricks.sliding_window_view(token[of], 4)
                repeated = 1 - len(np.unique(grams, axis=0)) / len(grams)
                result.append((float(entropy[of].mean()), repeated))
        return np.array(result, np.float64).reshape(-1, 2)

    def recorded(self) -> tuple[Rows, Floats]:
        """Return some sequences' last rows, and the entropies that the engine recorded there."""
        rows, entropies = [], []
        for line in self.dataset.sampled()[:N_PROVED].to_pylist():
            known = self.dataset.request(line["request"], hook=self.last).row
            if (at := line["position"] - 1) < len(known) and known[at] >= 0:
                rows.append(known[at])
                entropies.append(line["entropy"])
        return self.values(np.array(rows, np.int64)), np.array(entropies, np.float64)


def prompt_of(sequence: TokenSequence) -> bytes:
    """Return what tells the prompt of a request from others: its tokens."""
    return sequence.token_id[: sequence.n_given].tobytes()


def chosen(
    sequences: Sequence[TokenSequence], least: int, n: int, seed: int
) -> list[TokenSequence]:
    """Return sequences with so many generated positions, drawn and in a drawn order.

    Raises:
        ActdsError: E014 fewer than two prompts.
    """
    long = [s for s in sequences if s.unknown is None and len(s.token_id) - s.n_given >= least]
    n_prompts = len(set(map(prompt_of, long)))
    if n_prompts < 2:
        longest = max((len(s.token_id) - s.n_given for s in sequences), default=0)
        got = f"{n_prompts} prompts with {least} generated tokens; the longest has {longest}"
        step = "Steer at earlier steps, read sooner after, or harvest longer answers."
        raise ActdsError("E014", "at", got=got, expected="two at least", next_step=step)
    order = np.random.default_rng(seed).permutation(len(long))[:n]
    return [long[k] for k in order.tolist()]
