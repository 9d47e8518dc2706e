"""Probes: whether the scores of linear probes move, and whether they still tell labels apart.

Scores are counted in bins, so that the area under the ROC curve needs one pass and no memory: ties
within a bin count half, which costs less than one part in the number of bins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.exchange.containers import read_header
from actds_studies.regimes.inference import Measure
from actds_studies.regimes.instruments import difference, mean_of
from actds_studies.regimes.result import Limits
from actds_studies.regimes.strata import GroupSums, Part
from actds_validators.arrays import Floats, Ints, Rows, Whole
from actds_validators.dictionaries.tensors import (
    file_sha256,
    is_npz,
    of_names,
    read_npz,
    read_safetensors,
    refused,
)

MAX_PROBES = 1024
MAX_NAME = 80
_MAX_WEIGHT = float(np.finfo(np.float32).max)
_EXPECTED = "a .safetensors or .npz file with weights (n_probes, d_model)"
_NEXT_STEP = (
    "Save float weights (n_probes, d_model), and bias (n_probes,), with safetensors or numpy.savez."
)
N_BINS = 512
MIN_LABELLED = 20
"""Rows of either label that an arm must have for an area."""


class Probes:
    """Linear probes ``rows @ weights.T + bias``.

    Args:
        names: of the probes; None for their numbers.
        labels: for either arm the label of each row of its array ``(n_rows,)``: 1, 0, or -1 where
            there is none; None without labels.

    Raises:
        ActdsError: E014 weights that are not finite or not of two axes, or a bias or names of
            another number.
    """

    name = "probes"

    def __init__(
        self,
        weights: npt.ArrayLike,
        bias: npt.ArrayLike | None = None,
        names: Sequence[str] | None = None,
        labels: tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]] | None = None,
    ) -> None:
        self._weights = np.asarray(weights, np.float64)
        if self._weights.ndim != 2 or not np.isfinite(self._weights).all():
            got = f"weights of shape {self._weights.shape}"
            raise ActdsError("E014", "probes", got=got, expected="finite (n_probes, d_model)")
        n = len(self._weights)
        self._bias = np.zeros(n) if bias is None else np.asarray(bias, np.float64)
        self._names = [str(k) for k in range(n)] if names is None else list(names)
        if self._bias.shape != (n,) or len(self._names) != n:
            got = f"bias of {self._bias.shape}, {len(self._names)} names"
            raise ActdsError("E014", "probes", got=got, expected=f"{n} of each")
        self._labels = labels
        self.width = 0 if labels is None else n * N_BINS
        self._edges: Floats = np.zeros((n, N_BINS - 1))

    def need_labels(self, names: tuple[str, str], rows: tuple[Whole, Whole]) -> None:
        """Refuse, E014, labels that are true of all rows of an arm that have one, or of none."""
        for name, labels, row in zip(names, self._labels or (), rows, strict=False):
            n_false, n_true = ((labels[row] == value).sum() for value in (0, 1))
            if not n_false or not n_true:
                got = f"true of {n_true:,} rows of arm {name} and false of {n_false:,}"
                raise ActdsError("E014", "label", got=got, expected="some of either")

    def prepare(self, sample: Rows) -> None:
        """Take the edges of the bins from scores of the reference; E014 for another width."""
        if sample.shape[1] != self._weights.shape[1]:
            got = f"weights of {self._weights.shape[1]} channels"
            raise ActdsError("E014", "probes", got=got, expected=f"{sample.shape[1]}, as the hook")
        scores = self._scores(sample)
        mean, spread = scores.mean(axis=0), scores.std(axis=0)
        reach = np.linspace(-6, 6, N_BINS - 1)
        self._edges = mean[:, None] + np.maximum(spread, 1e-12)[:, None] * reach

    def parts(self, rows: Rows, side: int, row: Ints) -> Iterator[Part]:
        """Yield scores, their squares, and counts of labelled scores by bin."""
        scores = self._scores(rows)
        middle = self._edges.mean(axis=1)
        yield Part("score", scores - middle)
        yield Part("score²", np.square(scores - middle))
        if self._labels is None:
            return
        label = self._labels[side][row]
        for value in (0, 1):
            counts = np.zeros((len(rows), len(self._names) * N_BINS), np.float32)
            labelled = np.flatnonzero(label == value)
            for k, edges in enumerate(self._edges):
                at = np.searchsorted(edges, scores[labelled, k], side="right")
                counts[labelled, k * N_BINS + at] = 1.0
            yield Part(f"label {value}", counts)

    def measures(self, reference: GroupSums, limits: Limits) -> list[Measure]:
        """Return the shift of the scores and, with labels, that of the area."""
        spread = _spread(reference)
        scale = np.where(spread > 1e-12, spread, np.nan)
        middle = self._edges.mean(axis=1)
        n = len(self._names)

        def score(sums: GroupSums) -> Floats:
            return np.asarray(mean_of(sums, "score") / scale)

        measures = [
            difference(
                "score",
                score,
                "standard deviations of the reference",
                limits.score,
                arm_value=lambda sums: mean_of(sums, "score") + middle,
                labels=self._names,
            )
        ]
        if self._labels is not None:

            def areas(sums: GroupSums) -> Floats:
                first, other = (
                    sums[f"label {v}"].reshape(*sums[f"label {v}"].shape[:-1], n, N_BINS)
                    for v in (0, 1)
                )
                return area(first, other)

            measures.append(
                difference(
                    "ROC area",
                    areas,
                    "difference of areas",
                    limits.auc,
                    arm_value=areas,
                    labels=self._names,
                )
            )
        return measures

    def _scores(self, rows: Rows) -> Floats:
        return np.asarray(rows.astype(np.float64) @ self._weights.T + self._bias)


def area(negative: Floats, positive: Floats) -> Floats:
    """Return the area under the ROC curve of counts by rising bins ``(..., n_bins)``.

    NaN with under `MIN_LABELLED` rows of either label.
    """
    n, m = negative.sum(axis=-1), positive.sum(axis=-1)
    below = np.cumsum(negative, axis=-1) - negative
    won = ((below + negative / 2) * positive).sum(axis=-1)
    enough = (n >= MIN_LABELLED) & (m >= MIN_LABELLED)
    return np.asarray(np.where(enough, won / np.where(enough, n * m, np.nan), np.nan))


def _spread(sums: GroupSums) -> Floats:
    mean = mean_of(sums, "score")
    return np.asarray(np.sqrt(np.maximum(mean_of(sums, "score²") - mean**2, 0.0)))


@dataclass(frozen=True)
class ProbeFile:
    """Linear probes of a file; ``hook`` is None where the file does not say it."""

    path: str
    sha256: str
    weights: npt.NDArray[np.float64]
    bias: npt.NDArray[np.float64]
    names: tuple[str, ...]
    hook: str | None

    @property
    def d_model(self) -> int:
        return int(self.weights.shape[1])


def read_probes(path: str | Path) -> ProbeFile:
    """Return the probes of a file; nothing in it is run.

    ``.safetensors`` with the tensors ``weights`` ``(n_probes, d_model)`` and, where wanted,
    ``bias`` ``(n_probes,)``; its metadata may say ``hook``, and ``names`` as a JSON list. Or
    ``.npz`` with the same two arrays.

    Raises:
        ActdsError: E015 no such file, another format, a pickle, other shapes, more than 1,024
            probes, values that are not finite, or names of another number.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise refused(path, "no such file", _EXPECTED, _NEXT_STEP)
        if is_npz(path):
            tensors, metadata = read_npz(path), {}
        elif path.suffix == ".safetensors":
            tensors, metadata = read_safetensors(path), read_header(path)[1]
        else:
            got = f"a {path.suffix or 'bare'} file"
            raise refused(path, got, _EXPECTED, f"Nothing in it was run. {_NEXT_STEP}")
        arrays = of_names(path, tensors, ("weights",), ("bias",))
    except OSError as error:
        if isinstance(error, ActdsError):
            raise
        raise refused(path, error.strerror or error, _EXPECTED, _NEXT_STEP) from None
    weights = arrays["weights"].astype(np.float64)
    if weights.ndim != 2 or not 1 <= len(weights) <= MAX_PROBES or not weights.shape[1]:
        expected = f"(n_probes, d_model), at most {MAX_PROBES:,} probes"
        raise refused(f"{path} weights", str(weights.shape), expected, _NEXT_STEP)
    n = len(weights)
    bias = arrays["bias"].astype(np.float64) if "bias" in arrays else np.zeros(n)
    if bias.shape != (n,):
        raise refused(f"{path} bias", str(bias.shape), f"({n},)", _NEXT_STEP)
    for name, array in (("weights", weights), ("bias", bias)):
        if not np.isfinite(array).all():
            raise refused(f"{path} {name}", "NaN or infinity", "finite numbers", _NEXT_STEP)
        # Products with rows, and their squares, have to be finite as well.
        if np.abs(array).max() > _MAX_WEIGHT:
            got = f"{np.abs(array).max():g}"
            raise refused(f"{path} {name}", got, f"at most {_MAX_WEIGHT:g}", _NEXT_STEP)
    names = _names(path, metadata.get("names"), n)
    return ProbeFile(str(path), file_sha256(path), weights, bias, names, metadata.get("hook"))


def _names(path: Path, text: str | None, n: int) -> tuple[str, ...]:
    if text is None:
        return tuple(str(k) for k in range(n))
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if (
        not isinstance(names, list)
        or not all(
            isinstance(name, str)
            and 1 <= len(name) <= MAX_NAME
            and not any("\ud800" <= c <= "\udfff" for c in name)
            for name in names
        )
        or len(set(names)) != n
        or len(names) != n
    ):
        expected = f"a JSON list of {n} different names of up to {MAX_NAME} characters"
        raise refused(f"{path} names", text[:80], expected, _NEXT_STEP)
    return tuple(names)
