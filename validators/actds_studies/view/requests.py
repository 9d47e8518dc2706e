"""Requests to look at: their tokens, what became of each, and the scores of their rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.apart import Apart, Reply, Request, cpu_seconds
from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds.format.tables import FLAG_BOS, FLAG_EOS, FLAG_SPECIAL, is_served
from actds_studies.view.scores import Score

if TYPE_CHECKING:
    from actds.explore.context import RequestRows, Tokenizer

N_EVEN, N_LOST = 6, 2
MAX_TOKENS = 12_000
"""Of a page: more make a browser slow."""
_SPECIAL = FLAG_SPECIAL | FLAG_BOS | FLAG_EOS


@dataclass(frozen=True)
class ShownRequest:
    """Positions of a request, from ``start`` on; ``n`` of them.

    Args:
        source: prompt source, if any.
        finish: how it ended, and why it was not served.
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
) -> Iterator[ShownRequest]:
    """Yield requests with the scores of their rows, until the page is full.

    Args:
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
        yield ShownRequest(
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
    if find_spec("tokenizers") is None:
        raise ActdsError(
            "E011", "tokenizer", got="the package tokenizers is not installed",
            expected="it", next_step="pip install tokenizers",
        )  # fmt: skip
    _decoder.deaths.clear()
    words = _WholeText(path)
    words.decode([])  # it can be read
    return words


class _WholeText:
    """Decodes apart: special tokens too, with the space before a word.

    A decoder may replace each letter by a thousand, and again: its text is bounded, and its memory.
    """

    def __init__(self, path: Path) -> None:
        self._path, status = path, path.stat()
        self._nbytes = status.st_size
        self._file = [os.path.abspath(path), status.st_size, status.st_mtime_ns]

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens."""
        request = Request(
            {"file": self._file, "token_ids": token_ids},
            [],
            f"tokenizer {self._path}",
            "E009",
            "a tokenizer",
            _DECODER_NBYTES + _DECODER_TIMES * self._nbytes,
            cpu_seconds(self._nbytes) + _DECODER_TIMES,
        )
        [(words, _)] = _decoder.ask(request)
        return str(words["text"])


_MAX_CHARACTERS = 4096  # of a token
_DECODER_NBYTES, _DECODER_TIMES = 256 << 20, 32
_decoder = Apart(f"{__name__}:answer")


def answer(request: dict[str, Any], body: pa.Buffer) -> Iterator[Reply]:
    """Answer with the text of tokens: the handler in the other process."""
    token_ids, decode = request["token_ids"], _read(*request["file"]).decode

    def text(ids: list[int]) -> str:
        found: str = decode(ids, skip_special_tokens=False)
        if len(found) > _MAX_CHARACTERS * max(len(ids), 1):
            got = f"{len(found):,} characters of {len(ids)} tokens"
            raise ActdsError("E009", "tokenizer", got=got, expected="the text of tokens")
        return found

    words = text(token_ids)
    # Some decoders take the space off a text that begins with one: not after another token.
    behind = text([*token_ids[:1], *token_ids])
    is_longer = len(behind) > 2 * len(words)
    yield Reply({"text": behind.removeprefix(words) if is_longer else words})


@lru_cache(1)
def _read(path: str, nbytes: int, changed_ns: int) -> Any:
    """Return the tokenizer of a file, which is read again where it changed."""
    from tokenizers import Tokenizer as Fast

    return Fast.from_file(path)
