"""The requests of a dataset, and which of two datasets are of one origin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds.format.positions import Keys, pair_key, split_key
from actds_validators.arrays import Bools, Ints


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
        generated = ordered["generated_len"].to_numpy().astype(np.int64)
        prompt = ordered["prompt_len"].to_numpy().astype(np.int64)
        self.n_fed: Ints = prompt + np.maximum(generated - 1, 0)

    def __len__(self) -> int:
        return len(self.keys)

    def index(self, run: str, request: npt.NDArray[Any]) -> Ints:
        """Return the index of requests of a run.

        Raises:
            ActdsError: E405 a row's request has no line.
        """
        key = pair_key(self._runs[run], request)
        at = np.searchsorted(self.keys, key)
        if len(key) and not np.array_equal(self.keys.take(at, mode="clip"), key):
            raise ActdsError(
                "E405", f"runs/{run}", got="rows of unknown requests", expected="a line for each"
            )
        return at

    def runs_of(self, request: npt.NDArray[Any]) -> set[int]:
        """Return the numbers of the runs that requests, by index, belong to."""
        return set(np.unique(split_key(self.keys[np.unique(request)])[0]).tolist())

    def of_run(self, run: str) -> slice:
        """Return where the requests of a run stand."""
        n = self._runs[run]
        low, high = np.searchsorted(self.keys, pair_key([n, n + 1], 0))
        return slice(int(low), int(high))


def match(
    first: Requests,
    second: Requests,
    eligible: tuple[Bools, Bools],
) -> Ints:
    """Return for each request of the second the same prompt's of the first, -1 if none.

    Equal token digests come first, with the same id and source where there are several; then
    the same id, source and source row; then the same id and source row. What is not unique by
    name is not matched by it: tokens decide later which positions are the same.
    """
    found = np.full(len(second), -1, np.int64)
    free = [np.flatnonzero(eligible[0]).tolist(), np.flatnonzero(eligible[1]).tolist()]
    for by_tokens, keys in (
        (True, ("token_digest", "external_id", "source", "source_row")),
        (True, ("token_digest",)),
        (False, ("external_id", "source", "source_row")),
        (False, ("external_id", "source_row")),
    ):
        here, there = (
            _by_key(requests, rows, keys)
            for requests, rows in zip((first, second), free, strict=True)
        )
        for key, theirs in there.items():
            ours = here.get(key, [])
            if not by_tokens and (len(ours) > 1 or len(theirs) > 1):
                continue
            for one, other in zip(ours, theirs, strict=False):
                found[other] = one
        taken = set(found.tolist())
        free = [
            [row for row in free[0] if row not in taken],
            [row for row in free[1] if found[row] < 0],
        ]
    return found


def _by_key(
    requests: Requests, rows: list[int], names: tuple[str, ...]
) -> dict[Hashable, list[int]]:
    columns = [getattr(requests, name) for name in names]
    found: dict[Hashable, list[int]] = defaultdict(list)
    for row in rows:
        key = tuple(column[row] for column in columns)
        if key[0] is not None:
            found[key].append(row)
    return found
