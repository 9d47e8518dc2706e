"""Requests to look at: their tokens, what became of each, and the scores of their rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.errors import ActdsError
from actds.exchange.containers import map_npy
from actds.explore.dataset import Dataset
from actds.format.apart import Apart, Reply, Request, cpu_seconds
from actds.format.tables import FLAG_BOS, FLAG_EOS, FLAG_SPECIAL, is_served
from actds_validators.arrays import Array
from actds_validators.dictionaries import Dictionary
from actds_validators.dictionaries.formats import CONFIG, PARAMETERS, WEIGHTS, load_dictionary
from actds_validators.dictionaries.tensors import is_npz, is_torch, read_npz, read_safetensors

if TYPE_CHECKING:
    from actds.explore.requests import RequestRows, Tokenizer

MAX_SCORES = 4
"""The norm, and three more."""
_ENCODERS = ("W_enc", "encoder.weight")


@dataclass(frozen=True)
class Score:
    """One number per row.

    Args:
        of: from rows ``(n, d_model)``, float32, to numbers ``(n,)``.
    """

    name: str
    words: str
    of: Callable[[Array], Array]


NORM = Score("norm", "Euclidean norm of the row", lambda rows: np.linalg.norm(rows, axis=1))


def read_probe(path: str | Path, d_model: int, chosen: Sequence[int] = ()) -> list[Score]:
    """Return the scores of probes: the product of a row with each.

    Args:
        path: ``.npy`` file, ``(d_model,)`` or ``(n_probes, d_model)``.
        chosen: which probes; the first ones by default.

    Raises:
        ActdsError: E015 no such file, another shape, or values that are not finite numbers.
    """
    path = Path(path)
    if is_npz(path):
        raise _bad(path, "several arrays", "an .npy file of one")
    try:
        array = map_npy(path).read()
    except OSError as error:
        raise _bad(path, error.strerror or str(error), "an .npy file of floats") from None
    except ActdsError as error:
        raise _bad(path, error.got, "an .npy file of floats") from None
    probes = array[None] if array.ndim == 1 else array
    if probes.ndim != 2 or probes.shape[1] != d_model or probes.dtype.kind != "f":
        expected = f"floats ({d_model},) or (n_probes, {d_model})"
        raise _bad(path, f"{array.dtype} {array.shape}", expected)
    return [
        _linear(path, f"probe {n}", f"product with row {n} of {path.name}", probes[n])
        for n in _chosen(path, chosen or range(min(len(probes), MAX_SCORES - 1)), len(probes))
    ]


def read_sae(
    path: str | Path,
    d_model: int,
    chosen: Sequence[int],
    hook: str | None = None,
    model: str | None = None,
) -> list[Score]:
    """Return the scores of features of a dictionary: their activations.

    A file of its own, without ``cfg.json``, may be an encoder alone: ReLU of its product and bias,
    of the row less the decoder's bias where the file has one; a feature that has a threshold is 0
    up to it, and a top-k is not known. Names are those of SAELens and of dictionary_learning.

    Args:
        path: what ``load_dictionary`` takes, or a ``.safetensors`` or ``.npz`` file of an encoder.
        hook: the hook, in the names of actds; None where it is not known.
        model: the model of the rows; None where it is not known.

    Raises:
        ActdsError: E015 no such file or feature, another width, hook or model, or no encoder in it.
    """
    path = Path(path)
    is_whole = path.name == WEIGHTS and path.with_name(CONFIG).exists()
    if is_whole or path.is_dir() or path.name in (CONFIG, PARAMETERS) or is_torch(path):
        dictionary = load_dictionary(path, hook, d_model, model=model)
        return _of_dictionary(path, dictionary, chosen)
    # Those of .safetensors stay on the disk.
    read = {".safetensors": read_safetensors, ".npz": read_npz}.get(path.suffix)
    if read is None:
        raise _bad(path, f"a {path.suffix or 'bare'} file", "a .safetensors or .npz file")
    tensors = read(path)
    name = next((n for n in _ENCODERS if n in tensors), None)
    if name is None:
        raise _bad(path, f"tensors {', '.join(sorted(tensors))[:200]}", " or ".join(_ENCODERS))
    encoder = tensors[name].T if name == "W_enc" else tensors[name]  # (n_features, d_model)
    if encoder.ndim != 2 or encoder.shape[1] != d_model:
        raise _bad(path, f"{name} {tensors[name].shape}", f"an encoder of {d_model} channels")
    n = len(encoder)
    numbers = _named(path, chosen, n)
    bias = _vector(path, tensors, ("b_enc", "encoder.bias"), n)
    centre = _vector(path, tensors, ("b_dec", "bias", "decoder.bias"), d_model)
    threshold = _vector(path, tensors, ("threshold",), n)
    scores = []
    for k in numbers:
        words = f"activation of feature {k} of {path.name}, before any top-k"
        shift = 0.0 if bias is None else float(bias[k])
        least = 0.0 if threshold is None else max(0.0, float(threshold[k]))
        scores.append(_linear(path, f"feature {k}", words, encoder[k], shift, centre, least))
    return scores


def _of_dictionary(path: Path, dictionary: Dictionary, chosen: Sequence[int]) -> list[Score]:
    last: list[tuple[Array, Any]] = []

    def activation(k: int, rows: Array) -> Array:
        if not last or last[0][0] is not rows:
            last[:] = [(rows, dictionary.encode_sparse(rows).tocsc())]
        return np.asarray(last[0][1][:, [k]].toarray()[:, 0])

    return [
        Score(f"feature {k}", f"activation of feature {k} of {path.name}", partial(activation, k))
        for k in _named(path, chosen, dictionary.n_features)
    ]


def _linear(
    path: Path,
    name: str,
    words: str,
    direction: Array,
    shift: float = 0.0,
    centre: Array | None = None,
    least: float | None = None,
) -> Score:
    """Return the score of products with a direction; of a feature, 0 up to its ``least``."""
    weights = np.asarray(direction, np.float32)
    if not np.isfinite(weights).all():
        raise _bad(path, "values that are not finite", "finite numbers")
    shift -= 0.0 if centre is None else float((centre[None] @ weights)[0])

    def of(rows: Array) -> Array:
        product = np.asarray(rows, np.float32) @ weights + shift
        return product if least is None else np.where(product > least, product, 0.0)

    return Score(name, words, of)


def _named(path: Path, chosen: Sequence[int], n: int) -> Sequence[int]:
    if not chosen:
        raise _bad(path, f"{n:,} features and none of them named", "features to look at")
    return _chosen(path, chosen, n)


def _chosen(path: Path, chosen: Sequence[int], n: int) -> Sequence[int]:
    for k in chosen:
        if not 0 <= k < n:
            raise _bad(path, f"number {k}", f"0 to {n - 1}")
    if len(chosen) > MAX_SCORES - 1:
        raise _bad(path, f"{len(chosen)} numbers", f"at most {MAX_SCORES - 1}")
    return chosen


def _vector(
    path: Path, tensors: Mapping[str, Array], names: tuple[str, ...], n: int
) -> Array | None:
    name = next((name for name in names if name in tensors), None)
    if name is None:
        return None
    values = np.asarray(tensors[name], np.float32)
    if values.shape != (n,) or not np.isfinite(values).all():
        raise _bad(path, f"{name} {values.shape}", f"finite numbers ({n},)")
    return values


def _bad(path: Path, got: str, expected: str) -> ActdsError:
    return ActdsError("E015", str(path), got=got, expected=expected)


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
        is_lost = pc.is_in(spans["disposition"], pa.array(["dropped", "aborted"]))
        spans = spans.filter(is_lost)
        length = pc.subtract(spans["stop"], spans["start"]).to_numpy()
        lost = np.bincount(spans["request"].to_numpy(), weights=length)
        losers += [(-int(lost[k]), run, int(k)) for k in np.argsort(-lost, kind="stable")[:N_LOST]]
    n = min(N_EVEN, len(everyone))
    chosen = [everyone[k * len(everyone) // n] for k in range(n)]
    chosen += [(run, number) for n_lost, run, number in sorted(losers)[:N_LOST] if n_lost]
    return list(dict.fromkeys(chosen))


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
    """
    room = MAX_TOKENS
    for run, number in wanted:
        if room <= 0:
            return
        rows = dataset.request(number, run=run, hook=hook)
        stop = min(len(rows), start + min(n_tokens, room))
        shown = slice(min(start, stop), stop)
        requests = dataset.catalog.table("requests", rows.run)
        line = requests.filter(pc.equal(requests["request"], number)).to_pylist()[0]
        row = rows.row[shown]
        stored = np.flatnonzero(row >= 0)
        values = np.full((len(scores), len(row)), np.nan)
        special = np.zeros(len(row), bool)
        if stored.size:
            acts = rows.array[row[stored]]
            for k, score in enumerate(scores):
                values[k, stored] = score.of(acts)
            special[stored] = _flags(dataset, hook, row[stored]) & _SPECIAL != 0
        ids = rows.token_id[shown].tolist()
        pieces = (
            ["?" if token < 0 else f"{token} " for token in ids]
            if tokenizer is None
            else rows.pieces(tokenizer, shown.start, shown.stop)
        )
        room -= len(pieces)
        yield ShownRequest(
            rows,
            line["external_id"],
            line["source"],
            ": ".join(filter(None, (line["finish_reason"], line["reason"]))),
            line["prompt_len"],
            shown.start,
            pieces,
            special,
            values,
        )


def _flags(dataset: Dataset, hook: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
    """Return the flags of rows of a hook, uint16 ``(n,)``; of the shards that hold them."""
    flags, start = np.zeros(len(rows), np.uint16), 0
    for shard in dataset.shards_of(hook):
        here = (rows >= start) & (rows < start + shard.n_rows)
        if here.any():
            flags[here] = shard.tokens(["flags"])["flags"].to_numpy()[rows[here] - start]
        start += shard.n_rows
    return flags


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a model folder; nothing is fetched, and no code in it is run."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ActdsError("E009", "tokenizer", got=f"no file {path}", expected="a model folder")
    if find_spec("tokenizers") is None:
        raise ActdsError(
            "E011",
            "tokenizer",
            got="the package tokenizers is not installed",
            expected="it",
            next_step="pip install tokenizers",
        )
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
        decoded: str = decode(ids, skip_special_tokens=False)
        if len(decoded) > _MAX_CHARACTERS * max(len(ids), 1):
            got = f"{len(decoded):,} characters of {len(ids)} tokens"
            raise ActdsError("E009", "tokenizer", got=got, expected="the text of tokens")
        return decoded

    words = text(token_ids)
    # Some decoders take the space off a text that begins with one: not after another token.
    behind = text([*token_ids[:1], *token_ids])
    is_longer = len(behind) > 2 * len(words)
    yield Reply({"text": behind.removeprefix(words) if is_longer else words})


@lru_cache(1)
def _read(path: str, nbytes: int, changed_ns: int) -> Any:
    from tokenizers import Tokenizer as Fast

    return Fast.from_file(path)
