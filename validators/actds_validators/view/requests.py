"""Requests to look at: their tokens, what became of each, and the scores of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.errors import ActdsError
from actds.format.tables import FLAG_BOS, FLAG_EOS, FLAG_SPECIAL, is_served
from actds.load.dataset import Dataset
from actds_validators.view.scores import Score

if TYPE_CHECKING:
    from actds.load.context import RequestRows, Tokenizer

__all__ = ["MAX_TOKENS", "Shown", "read_requests", "read_tokenizer", "sample"]

N_EVEN, N_LOST = 6, 2
MAX_TOKENS = 12_000
"""Of a page: more make a browser slow."""
_SPECIAL = FLAG_SPECIAL | FLAG_BOS | FLAG_EOS


@dataclass(frozen=True)
class Shown:
    """Positions of a request, from ``start`` on; ``n`` of them.

    Args:
        rows: the request, all of it.
        external_id: id that the client gave.
        source: prompt source, if any.
        finish: how it ended, and why it was not served.
        prompt_len: prompt tokens.
        start: first position that is shown.
        pieces: text of each position; the number of its token without a tokenizer.
        special: whether its token is special, bool ``(n,)``; False where no row says so.
        scores: float64 ``(n_scores, n)``; nan where no row is stored.
    """

    rows: RequestRows
    external_id: str
    source: str | None
    finish: str
    prompt_len: int
    start: int
    pieces: list[str]
    special: npt.NDArray[np.bool_]
    scores: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.pieces)


def sample(dataset: Dataset) -> list[tuple[str, int]]:
    """Return run and number of requests to look at: evenly spaced ones, and who lost the most."""
    everyone: list[tuple[str, int]] = []
    losers: list[tuple[int, str, int]] = []
    for run in dataset.catalog.run_ids:
        requests = dataset.catalog.table("requests", run)
        served = requests.filter(is_served(requests))
        everyone += [(run, number) for number in served["request"].to_pylist()]
        spans = dataset.catalog.table("spans", run)
        gone = pc.is_in(spans["disposition"], pa.array(["dropped", "aborted"]))
        spans = spans.filter(gone)
        length = pc.subtract(spans["stop"], spans["start"]).to_numpy()
        lost = np.bincount(spans["request"].to_numpy(), weights=length)
        losers += [(-int(lost[k]), run, int(k)) for k in np.argsort(-lost, kind="stable")[:N_LOST]]
    n = min(N_EVEN, len(everyone))
    found = [everyone[k * len(everyone) // n] for k in range(n)]
    found += [(run, number) for n_lost, run, number in sorted(losers)[:N_LOST] if n_lost]
    return list(dict.fromkeys(found))


def read_requests(
    dataset: Dataset,
    hook: str,
    wanted: Sequence[tuple[str | None, int]],
    scores: Sequence[Score],
    tokenizer: Tokenizer | None,
    start: int,
    n_tokens: int,
) -> Iterator[Shown]:
    """Yield requests with the scores of their rows, until the page is full.

    Args:
        dataset: the dataset.
        hook: whose rows.
        wanted: run and number of each; no run where there is one.
        scores: what to compute of each row.
        tokenizer: decodes tokens; None leaves them numbers.
        start: first position to show.
        n_tokens: positions of a request to show at most.

    Raises:
        ActdsError: E014 no such run or request; and as reading tables and rows.
    """
    flags = _Flags(dataset, hook)
    room = MAX_TOKENS
    for run, number in wanted:
        if room <= 0:
            return
        rows = dataset.request(number, run=run, hook=hook)
        stop = min(len(rows), start + min(n_tokens, room))
        there = slice(min(start, stop), stop)
        requests = dataset.catalog.table("requests", rows.run)
        line = requests.filter(pc.equal(requests["request"], number)).to_pylist()[0]
        row = rows.row[there]
        stored = np.flatnonzero(row >= 0)
        values = np.full((len(scores), len(row)), np.nan)
        special = np.zeros(len(row), bool)
        if stored.size:
            acts = rows.array[row[stored]]
            for k, score in enumerate(scores):
                values[k, stored] = score.of(acts)
            special[stored] = flags.of(row[stored]) & _SPECIAL != 0
        ids = rows.token_id[there].tolist()
        pieces = (
            ["?" if token < 0 else f"{token} " for token in ids]
            if tokenizer is None
            else rows.pieces(tokenizer, there.start, there.stop)
        )
        room -= len(pieces)
        yield Shown(
            rows,
            line["external_id"],
            line["source"],
            ": ".join(filter(None, (line["finish_reason"], line["reason"]))),
            line["prompt_len"],
            there.start,
            pieces,
            special,
            values,
        )


class _Flags:
    """Flags of rows of a hook, from the token tables of the shards that hold them."""

    def __init__(self, dataset: Dataset, hook: str) -> None:
        self._shards = dataset.shards_of(hook)
        self._starts = np.cumsum([0, *(shard.n_rows for shard in self._shards)])
        self._kept: tuple[int, npt.NDArray[np.uint16]] = (-1, np.empty(0, np.uint16))

    def of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
        """Return the flags of rows, uint16 ``(n,)``."""
        found = np.zeros(len(rows), np.uint16)
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(numbers).tolist():
            here = numbers == number
            found[here] = self._flags(number)[rows[here] - self._starts[number]]
        return found

    def _flags(self, number: int) -> npt.NDArray[np.uint16]:
        if self._kept[0] != number:
            self._kept = number, self._shards[number].tokens(["flags"])["flags"].to_numpy()
        return self._kept[1]


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a model folder; nothing is fetched, and no code in it is run.

    Raises:
        ActdsError: E009 no tokenizer in it; E011 the package ``tokenizers`` is not installed.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ActdsError("E009", "tokenizer", got=f"no file {path}", expected="a model folder")
    try:
        from tokenizers import Tokenizer as Fast
    except ImportError:
        raise ActdsError(
            "E011", "tokenizer", got="the package tokenizers is not installed",
            expected="it", next_step="pip install tokenizers",
        ) from None  # fmt: skip
    try:
        return _WholeText(Fast.from_file(str(path)))
    except Exception as error:  # the package raises nothing narrower
        raise ActdsError(
            "E009", "tokenizer", got=f"{path}: {error}"[:300], expected="a tokenizer"
        ) from None


class _WholeText:
    """Decodes special tokens too, and keeps the space before a word.

    Args:
        fast: a tokenizer of the package ``tokenizers``.
    """

    def __init__(self, fast: object) -> None:
        self._fast = fast

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens."""
        words = self._text(token_ids)
        # Some decoders take the space off a text that begins with one: not after another token.
        behind = self._text([*token_ids[:1], *token_ids])
        return behind.removeprefix(words) if len(behind) > 2 * len(words) else words

    def _text(self, token_ids: list[int]) -> str:
        return cast("str", self._fast.decode(token_ids, skip_special_tokens=False))  # type: ignore[attr-defined]
