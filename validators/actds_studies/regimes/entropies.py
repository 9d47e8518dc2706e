"""Entropies of given text: from stored rows of the last layer, and the model's unembedding.

A harvest records what the logits said where the model sampled. After a token that was given they
follow from its row: that of hook ``final``, or of the last ``resid_post`` through the final norm.
How a model's norm and logits are scaled is not looked up by its family: of the forms that there
are, that one is taken which gives the entropies that were recorded, and none if none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.exchange.containers import read_document, read_header
from actds.explore.dataset import Dataset
from actds.format.schema import Hook
from actds_studies.regimes.arms import Arm, ArmRows, Sampled, read_arm
from actds_validators.arrays import Floats, Rows, Whole
from actds_validators.sections import recorded

AGREE = 0.05
"""Nats that computed entropies may differ from recorded ones, median over `N_CHECKED` rows at most:
the engine rounds its logits, and rows are stored in 16 bits."""
MIN_CHECKED, N_CHECKED = 32, 256
_N_ROWS, _N_TOKENS = 2048, 8192  # of a block of logits, 64 MiB
_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_FLOATS = ("float32", "bfloat16", "float16")
_NORMS = ("norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "final_norm")


def model_folder(model: str | None) -> Path | None:
    """Return the folder that a name of a model is, None where it is only a name."""
    path = None if model is None else Path(model)
    return path if path is not None and (path / "config.json").is_file() else None


class Unembedding:
    """The final norm and the unembedding of a folder: ``config.json`` and ``.safetensors`` files.

    Raises:
        ActdsError: E014 no unembedding of that width in them; E019 a file that is truncated.
    """

    def __init__(self, folder: Path, d_model: int) -> None:
        self._config = _config(folder)
        self._stored = {
            name: tensor
            for path in sorted(folder.glob("*.safetensors"))
            for name, tensor in read_header(path)[0].items()
        }
        name = next(
            (
                name
                for end in (*_HEADS, *_EMBEDDINGS)
                for name, tensor in self._stored.items()
                if f".{name}".endswith(f".{end}")
                and tensor.shape[1:] == (d_model,)
                and tensor.dtype in _FLOATS
            ),
            None,
        )
        if name is None:
            got = f"no unembedding of {d_model:,} channels among {len(self._stored):,} tensors"
            expected = f"{' or '.join(_HEADS)}, or an embedding, in its .safetensors files"
            raise ActdsError("E014", f"model {folder}", got=got, expected=expected)
        self._weight, self._bias = self._read(name), self._bias_of(name)

    def forms(self, kind: str) -> list[Callable[[Rows], Rows]]:
        """Return what may make the input of the unembedding of rows ``(n, d_model)`` of a hook."""
        if kind == "final":
            return [lambda rows: rows]
        names = [name for name in self._stored if _is_final_norm(name)]
        if len(names) != 1:
            return []
        weight, bias = self._read(names[0]).astype(np.float32), self._bias_of(names[0])
        ends = ("norm_eps", "norm_epsilon")
        eps = next((float(v) for k, v in self._config.items() if k.endswith(ends) and v), 1e-5)
        if bias is not None:
            return [partial(_layer_norm, weight=weight, bias=bias.astype(np.float32), eps=eps)]
        plain = np.zeros_like(weight)
        return [
            partial(_rms_norm, weight=weight, eps=eps),
            partial(_rms_norm, weight=weight + 1, eps=eps),
            partial(_layer_norm, weight=weight, bias=plain, eps=eps),
        ]

    def entropies(self, rows: Rows) -> tuple[Floats, Floats]:
        """Return entropies of the softmax and margins of the two largest logits, nats, ``(n,)``."""
        n = len(rows)
        at = np.arange(n)
        largest, second = np.full(n, -np.inf), np.full(n, -np.inf)
        total, weighted = np.zeros(n), np.zeros(n)
        for start in range(0, len(self._weight), _N_TOKENS):
            logits = self._logits(rows, slice(start, start + _N_TOKENS))
            place = logits.argmax(axis=1)
            top = logits[at, place]
            logits[at, place] = -np.inf
            two = np.sort([largest, second, top, logits.max(axis=1)], axis=0)[-2:]
            logits[at, place] = top
            # Sums so far are about the largest of the blocks before.
            scale = np.exp(largest - two[1])
            below = logits - two[1][:, np.newaxis].astype(np.float32)
            odds = np.exp(below)
            weighted = (weighted + total * np.where(total > 0, largest - two[1], 0)) * scale
            weighted += (odds * below).sum(axis=1, dtype=np.float64)
            total = total * scale + odds.sum(axis=1, dtype=np.float64)
            second, largest = two
        return np.log(total) - weighted / total, largest - second

    def divergences(self, rows: Rows, beside: Rows) -> Floats:
        """Return the Kullback-Leibler divergence of each softmax from another's, nats ``(n,)``."""
        totals = [self._log_total(values)[:, np.newaxis] for values in (rows, beside)]
        result = np.zeros(len(rows))
        for start in range(0, len(self._weight), _N_TOKENS):
            tokens = slice(start, start + _N_TOKENS)
            first, second = (
                self._logits(values, tokens) - total
                for values, total in zip((rows, beside), totals, strict=True)
            )
            result += (np.exp(first) * (first - second)).sum(axis=1)
        return np.maximum(result, 0.0)

    def _log_total(self, rows: Rows) -> Floats:
        """Return the logarithm of the sum of all odds ``(n,)``."""
        result = np.full(len(rows), -np.inf)
        for start in range(0, len(self._weight), _N_TOKENS):
            logits = self._logits(rows, slice(start, start + _N_TOKENS)).astype(np.float64)
            top = logits.max(axis=1, keepdims=True)
            part = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
            result = np.logaddexp(result, part)
        return result

    def _logits(self, rows: Rows, tokens: slice) -> Rows:
        """Return logits ``(n, tokens)``, scaled and capped as the model's configuration says."""
        logits: Rows = rows @ self._weight[tokens].astype(np.float32).T
        if self._bias is not None:
            logits += self._bias[tokens].astype(np.float32)
        logits *= float(self._config.get("logit_scale") or 1)
        logits /= float(self._config.get("logits_scaling") or 1)
        cap = self._config.get("final_logit_softcapping")
        return np.asarray(cap * np.tanh(logits / cap), np.float32) if cap else logits

    def _bias_of(self, weight: str) -> npt.NDArray[Any] | None:
        name = weight.removesuffix("weight") + "bias"
        return self._read(name) if name in self._stored else None

    def _read(self, name: str) -> npt.NDArray[Any]:
        values = self._stored[name].map()
        return values.view(ml_dtypes.bfloat16) if values.dtype == np.uint16 else values


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = read_document(folder / "config.json")
        return dict(config) | dict(config.get("text_config") or {})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        got = f"config.json: {error}"[:200]
        raise ActdsError("E014", f"model {folder}", got=got, expected="an object") from None


def _is_final_norm(name: str) -> bool:
    *parts, last = name.split(".")
    in_layer = any(part.isdigit() for part in parts)
    return last == "weight" and not in_layer and bool(parts) and parts[-1] in _NORMS


def _rms_norm(rows: Rows, weight: Rows, eps: float) -> Rows:
    return np.asarray(rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + eps) * weight)


def _layer_norm(rows: Rows, weight: Rows, bias: Rows, eps: float) -> Rows:
    centred = rows - rows.mean(axis=1, keepdims=True)
    return np.asarray(_rms_norm(centred, weight, eps) + bias)


class Entropies:
    """Entropies of the rows of arms of one model, computed where none was recorded.

    Rows of the last layer must be of the same shards as those of the hook. What the arms recorded
    is what the computation is checked with.

    Raises:
        ActdsError: E014 the folder has no unembedding, or its entropies are not the recorded ones:
            another model; and as `read_arm`.
    """

    def __init__(
        self, folder: Path, arms: Sequence[Arm], hook: str, progress: Callable[[str], None]
    ) -> None:
        self._progress = progress
        self._last: dict[str, tuple[str, Callable[[Rows], Rows]]] = {}
        self._values: dict[str, Floats] = {}
        self.lacks = "no rows of the last layer (final, or the last resid_post) are stored"
        hooks = [(arm, last) for arm in arms if (last := _last_hook(arm.dataset, hook))]
        if not hooks:
            return
        self._model = Unembedding(folder, hooks[0][1].d_model)
        self.lacks = f"fewer than {MIN_CHECKED} recorded entropies to check computed ones with"
        checked: dict[tuple[str, str], Callable[[Rows], Rows]] = {}
        for arm, last in hooks:
            rows, entropy = _recorded(arm, last.name, hook)
            if len(rows) >= MIN_CHECKED:
                checked[_weights(arm), last.kind] = self._agreeing(folder, last.kind, rows, entropy)
        for arm, last in hooks:
            if form := checked.get((_weights(arm), last.kind)):
                self._last[arm.dataset.digest] = last.name, form

    def filled(self, dataset: Dataset, hook: str, rows: ArmRows) -> ArmRows:
        """Return rows with an entropy and a margin each, where they can be computed.

        A token that was not sampled stays unknown.
        """
        last, form = self._last.get(dataset.digest, (None, None))
        if last is None or form is None or not _same_shards(dataset, last, hook):
            return rows
        unknown = np.full(len(rows), np.nan, np.float32)
        known = rows.sampled or Sampled(np.full(len(rows), -1, np.int64), unknown, unknown)
        array = dataset.array(last)
        if dataset.digest not in self._values:
            self._values[dataset.digest] = np.full((array.shape[0], 2), np.nan)
        values = self._values[dataset.digest]
        missing = np.isnan(known.entropy)
        wanted = rows.row[missing].astype(np.int64)
        row = wanted[np.isnan(values[wanted, 0])]
        for start in range(0, len(row), _N_ROWS):
            self._progress(f"entropies of {dataset.path}: row {start:,} of {len(row):,}")
            some = row[start : start + _N_ROWS]
            values[some] = np.column_stack(self._model.entropies(form(array[some])))
        entropy, margin = known.entropy.copy(), known.margin.copy()
        entropy[missing], margin[missing] = values[wanted].T
        return replace(rows, sampled=replace(known, entropy=entropy, margin=margin))

    def _agreeing(
        self, folder: Path, kind: str, rows: Rows, entropy: Floats
    ) -> Callable[[Rows], Rows]:
        distances = [
            (float(np.median(np.abs(self._model.entropies(form(rows))[0] - entropy))), n, form)
            for n, form in enumerate(self._model.forms(kind))
        ]
        best = min(distances, default=None)
        if best is None or not best[0] <= AGREE:
            differ = "of an unknown final norm" if best is None else f"{best[0]:.2g} nats apart"
            raise ActdsError(
                "E014",
                f"model {folder}",
                got=f"entropies {differ} from those that the harvest recorded",
                expected=f"{AGREE:g} at most, median of {len(rows)}: the model of the rows",
            )
        return best[2]


def _weights(arm: Arm) -> str:
    return ", ".join(recorded(arm.dataset.catalog, "model.weights_sha256"))


def _last_hook(dataset: Dataset, hook: str) -> Hook | None:
    """Return the hook of the same shards whose rows the logits follow from; None without one."""
    n_layers = recorded(dataset.catalog, "model.n_layers")
    for last in sorted(dataset.hooks.values(), key=lambda place: place.kind != "final"):
        is_last = last.kind == "resid_post" and (str(last.layer + 1),) == n_layers
        if (last.kind == "final" or is_last) and _same_shards(dataset, last.name, hook):
            return last
    return None


def _same_shards(dataset: Dataset, first: str, second: str) -> bool:
    return [s.name for s in dataset.shards_of(first)] == [s.name for s in dataset.shards_of(second)]


def _recorded(arm: Arm, last: str, hook: str) -> tuple[Rows, Floats]:
    rows = read_arm(arm, hook)
    if rows.sampled is None:
        return np.empty((0, 0), np.float32), np.empty(0)
    known: Whole = np.flatnonzero(np.isfinite(rows.sampled.entropy))
    known = known[:: len(known) // N_CHECKED + 1]
    values = arm.dataset.array(last)[rows.row[known].astype(np.int64)]
    return values, rows.sampled.entropy[known].astype(np.float64)
