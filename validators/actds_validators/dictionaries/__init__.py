"""The dictionary: an encoder and a decoder as arrays, and what they do to rows.

What the numbers mean is what SAELens 6 does with them (``sae_lens.saes``), in float32, whatever
type the file has. Everything that can be folded into the weights is folded when a file is read.
Which rows a dictionary is for is known by the names that files and loaders give them:
``actds.Loader.config`` is beside one that was trained on a loader's batches.

Spec: 0.1 section 16.1; ``hook_names`` of TransformerLens, and the modules of
``transformers`` that SAELens hooks by their own names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds_validators.arrays import Rows
from actds_validators.dictionaries.tensors import refused

if TYPE_CHECKING:
    from scipy.sparse import csr_array  # type: ignore[import-untyped]

T = TypeVar("T")
HookFrom = Literal["file", "path", "caller"]
Kind = Literal["standard", "topk", "jumprelu", "gated", "batchtopk"]
Normalization = Literal["none", "layer_norm", "constant_norm_rescale"]
Format = Literal["saelens", "gemma_scope", "dictionary_learning"]

LAYER_NORM_EPSILON = np.float32(1e-5)
BLOCK = 1 << 22
"""Products computed at a time: 16 MiB, which stays in the cache of a core or two."""


@dataclass(frozen=True)
class Source:
    """Where a dictionary comes from, and what it says of its training.

    Args:
        hook: place that it was trained at, in the names of actds; None where nothing says it.
        hook_from: who says so: the ``file``, the names of its folders (``path``), or nobody but the
            ``caller``.
        model: model that it was trained on; None where nothing says it.
        prepend_bos: whether its sequences began with BOS; None where nothing says it.
        trained_on: digests of the datasets of actds that it was fitted on, as its loader recorded.
        held_out: share of the requests of these that the loader held out; None for none.
        weights: digests of the weights of the models of these, likewise.
    """

    format: Format
    path: str
    sha256: str
    hook: str | None = None
    hook_from: HookFrom | None = None
    model: str | None = None
    prepend_bos: bool | None = None
    trained_on: tuple[str, ...] = ()
    held_out: float | None = None
    weights: tuple[str, ...] = ()


class Feature(NamedTuple):
    """One feature: ``z = row @ encoder + shift``, and it is ``z`` above ``threshold``, else 0.

    ``encoder`` and ``decoder`` are float32 ``(d_model,)``; ``encoder`` is None where a feature
    depends on more than that: on the other features of a row, or on the row's own mean and length.
    """

    decoder: Rows
    encoder: Rows | None
    shift: float
    threshold: float


@dataclass(frozen=True, eq=False)
class Dictionary:
    """A sparse autoencoder at one hook.

    With ``z`` the normalized row less ``b_dec`` where `apply_b_dec_to_input`, and
    ``h = z @ w_enc``, the features are

    - ``standard``: ``relu(h + b_enc)``;
    - ``topk``: the same, the ``k`` largest of each row, the others 0;
    - ``jumprelu``, ``batchtopk``: the same where ``h + b_enc > threshold``, else 0;
    - ``gated``: ``relu(h * gain + b_mag)`` where ``h + b_enc > 0``, else 0.

    A row is rebuilt as ``features @ w_dec + b_dec``, normalized back.

    Args:
        kind: how a feature becomes active. ``batchtopk`` is read with the threshold that its
            trainer estimated: what a row's features are does not depend on its neighbours.
        w_enc: float32 ``(d_model, n_features)``.
        b_enc: float32 ``(n_features,)``.
        w_dec: float32 ``(n_features, d_model)``; its rows are the features' directions.
        b_dec: float32 ``(d_model,)``.
        source: where it comes from.
        k: active features of a row; ``topk`` only.
        threshold: float32 ``(n_features,)``; ``jumprelu`` and ``batchtopk`` only.
        gain: float32 ``(n_features,)``, above 0; ``gated`` only.
        b_mag: float32 ``(n_features,)``; ``gated`` only.
        apply_b_dec_to_input: whether the decoder's bias is taken off a row before it is encoded.
        normalization: what is done to each row, by its own numbers, before and after.

    Raises:
        ActdsError: E015 arrays that do not fit each other, or values that are not finite.
    """

    kind: Kind
    w_enc: Rows = field(repr=False)
    b_enc: Rows = field(repr=False)
    w_dec: Rows = field(repr=False)
    b_dec: Rows = field(repr=False)
    source: Source
    k: int | None = None
    threshold: Rows | None = field(default=None, repr=False)
    gain: Rows | None = field(default=None, repr=False)
    b_mag: Rows | None = field(default=None, repr=False)
    apply_b_dec_to_input: bool = True
    normalization: Normalization = "none"

    def __post_init__(self) -> None:
        if self.w_enc.ndim != 2 or not self.w_enc.size:
            raise self._bad(f"an encoder {self.w_enc.shape}", "(d_model, n_features)")
        d, m = self.w_enc.shape
        shapes: dict[str, tuple[int, ...]] = {
            "w_enc": (d, m),
            "b_enc": (m,),
            "w_dec": (m, d),
            "b_dec": (d,),
            "threshold": (m,),
            "gain": (m,),
            "b_mag": (m,),
        }
        for name, shape in shapes.items():
            array = getattr(self, name)
            wanted = self.kind in _OF_KINDS.get(name, (self.kind,))
            if (array is not None) != wanted:
                got = f"{'no' if wanted else 'a'} {name} in a {self.kind} dictionary"
                raise self._bad(got, f"{name} {shape}" if wanted else "none")
            if array is not None:
                object.__setattr__(self, name, self._checked(name, array, shape))
        if (self.k is not None) != (self.kind == "topk"):
            raise self._bad(f"k {self.k} in a {self.kind} dictionary", "a k for topk only")
        if self.k is not None and not 1 <= self.k <= m:
            raise self._bad(f"k {self.k}", f"1 to {m:,}, the features")

    @property
    def d_model(self) -> int:
        return int(self.w_enc.shape[0])

    @property
    def n_features(self) -> int:
        return int(self.w_enc.shape[1])

    @property
    def hook(self) -> str | None:
        return self.source.hook

    def feature(self, number: int) -> Feature:
        """Return one feature.

        Raises:
            ActdsError: E015 there is none of that number.
        """
        if not 0 <= number < self.n_features:
            raise self._bad(f"feature {number}", f"0 to {self.n_features - 1:,}")
        encoder, shift = self.w_enc[:, number], float(self.b_enc[number])
        if self.apply_b_dec_to_input:
            shift -= float(self.b_dec @ encoder)
        is_apart = (
            self.kind in ("standard", "jumprelu", "batchtopk") and self.normalization == "none"
        )
        threshold = 0.0 if self.threshold is None else max(float(self.threshold[number]), 0.0)
        return Feature(self.w_dec[number], encoder if is_apart else None, shift, threshold)

    def encode(self, rows: npt.NDArray[Any]) -> Rows:
        """Return the features of rows, float32 ``(n, n_features)``.

        Args:
            rows: ``(n, d_model)``.

        Raises:
            ActdsError: E015 rows of another width; E601 rows that are not finite.
        """
        features, at = np.empty((len(rows), self.n_features), np.float32), 0
        for block in self._encoded(rows):
            features[at : at + len(block)] = block
            at += len(block)
        return features

    def encode_sparse(self, rows: npt.NDArray[Any]) -> csr_array:
        """Return the features of rows as a sparse array of float32, ``(n, n_features)``.

        What is kept in memory grows with the active features: 16,384 features of a million rows
        are 64 GiB dense, and 0.8 GiB at 100 active ones. Features of a row are in rising order.

        Args:
            rows: ``(n, d_model)``.

        Raises:
            ActdsError: as `encode`.
        """
        from scipy.sparse import csr_array

        counts, where, values = [], [], []
        for features in self._encoded(rows):
            at, feature = np.nonzero(features)
            counts.append(np.bincount(at, minlength=len(features)))
            where.append(feature.astype(np.int32))
            values.append(features[at, feature])
        starts = np.concatenate([[0], *counts]).cumsum()
        kind = np.int32 if starts[-1] < 2**31 else np.int64
        parts = (_joined(values, np.float32), _joined(where, kind), starts.astype(kind))
        return csr_array(parts, shape=(len(rows), self.n_features))

    def decode(
        self, features: npt.NDArray[Any] | csr_array, rows: npt.NDArray[Any] | None = None
    ) -> Rows:
        """Return the rows that features stand for, float32 ``(n, d_model)``.

        Args:
            features: ``(n, n_features)``, dense or sparse.
            rows: the rows that they are features of: with a normalization the mean and the length
                of a row are its own, and no feature has them.

        Raises:
            ActdsError: as `encode`.
            ValueError: a dictionary with normalization, and no rows.
        """
        rebuilt = np.asarray(features @ self.w_dec, np.float32)
        rebuilt += self.b_dec
        if self.normalization == "none":
            return rebuilt
        if rows is None:
            raise ValueError(f"rows are needed to undo {self.normalization}")
        centre, scale = self.frame(rows)
        rebuilt *= scale
        rebuilt += centre
        return rebuilt

    def frame(self, rows: npt.NDArray[Any]) -> tuple[Rows, Rows]:
        """Return what normalization takes off each row and divides it by, each ``(n, 1)``.

        Zeros and ones without a normalization. In the units of a row, feature ``f`` has the
        direction ``scale * w_dec[f]``.

        Args:
            rows: ``(n, d_model)``.

        Raises:
            ActdsError: as `encode`.
        """
        rows = self._rows(rows)
        centre = np.zeros((len(rows), 1), np.float32)
        if self.normalization == "none":
            return centre, np.ones_like(centre)
        if self.normalization == "layer_norm":
            centre = rows.mean(axis=1, keepdims=True)
            # torch.std: over d - 1.
            squares = np.square(rows - centre).sum(axis=1, keepdims=True)
            return centre, np.sqrt(squares / np.float32(max(self.d_model - 1, 1)))
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return centre, norms / np.float32(np.sqrt(self.d_model))

    def _encoded(self, rows: npt.NDArray[Any]) -> Iterator[Rows]:
        """Yield the features of rows, block by block; each is written over the one before."""
        rows, size = self._rows(rows), max(1, BLOCK // self.n_features)
        buffer = np.empty((min(len(rows), size), self.n_features), np.float32)
        for start in range(0, len(rows), size):
            block = rows[start : start + size]
            features = np.matmul(self._inner(block), self.w_enc, out=buffer[: len(block)])
            if self.gain is not None and self.b_mag is not None:
                shut = features <= -self.b_enc
                features *= self.gain
                features += self.b_mag
                features[shut] = 0
            else:
                features += self.b_enc
            if self.threshold is not None:
                features[features <= self.threshold] = 0
            if self.k is not None and self.k < self.n_features:
                # Before the rest is 0: a partition of equal numbers takes ten times as long.
                largest = np.argpartition(features, -self.k, axis=1)[:, -self.k :]
                values = np.take_along_axis(features, largest, axis=1)
                features[...] = 0
                np.put_along_axis(features, largest, values, axis=1)
            yield np.maximum(features, 0, out=features)

    def _inner(self, rows: Rows) -> Rows:
        if self.normalization != "none":
            centre, scale = self.frame(rows)
            if self.normalization == "layer_norm":
                scale = scale + LAYER_NORM_EPSILON
            # A row of zeros stays one: SAELens divides 0 by 0.
            rows = np.divide(rows - centre, scale, out=np.zeros_like(rows), where=scale > 0)
        return rows - self.b_dec if self.apply_b_dec_to_input else rows

    def _rows(self, rows: npt.NDArray[Any]) -> Rows:
        if rows.ndim != 2 or rows.shape[1] != self.d_model:
            raise self._bad(f"rows {rows.shape}", f"(n, {self.d_model})")
        rows = np.asarray(rows, np.float32)
        if not np.isfinite(rows).all():
            n = int((~np.isfinite(rows).all(axis=1)).sum())
            got = f"{n:,} of {len(rows):,} rows with NaN or infinity"
            raise ActdsError("E601", self.hook or "rows", got=got, expected="finite rows")
        return rows

    def _checked(self, name: str, array: npt.NDArray[Any], shape: tuple[int, ...]) -> Rows:
        if array.shape != shape:
            raise self._bad(f"{name} {array.shape}", f"{shape}")
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinity, and said below
            array = np.array(array, np.float32, order="C")  # of its own: files are mapped
        step = max(1, BLOCK // max(1, array[:1].size))
        if not all(np.isfinite(array[at : at + step]).all() for at in range(0, len(array), step)):
            raise self._bad(f"NaN or infinity in {name}", "finite numbers")
        array.flags.writeable = False
        return array

    def _bad(self, got: str, expected: str) -> ActdsError:
        return refused(self.source.path, got, expected)


_OF_KINDS: dict[str, tuple[Kind, ...]] = {
    "threshold": ("jumprelu", "batchtopk"),
    "gain": ("gated",),
    "b_mag": ("gated",),
}
"""Arrays that not every dictionary has, and the kinds that have them."""


def _joined(parts: list[npt.NDArray[Any]], kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(kind) if parts else np.empty(0, kind)


# which rows it is for -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """The rows that a dictionary is wanted for; None for what the caller does not say.

    Args:
        model: name of the model, or the path of its folder.
    """

    hook: str | None = None
    d_model: int | None = None
    model: str | None = None

    def refuse_other_width(self, place: object, d_model: int | None) -> None:
        if self.d_model is not None and d_model not in (None, self.d_model):
            expected = f"{self.d_model:,}{f', as {self.hook} has' if self.hook else ''}"
            raise refused(place, f"a dictionary of {d_model:,} channels", expected)

    def hook_of(
        self,
        place: object,
        called: str | None,
        places: tuple[str, ...],
        said_by: HookFrom,
        *,
        model: str | None,
        d_model: int | None = None,
        layer: int | None = None,
    ) -> tuple[str | None, HookFrom | None]:
        """Return the hook of a dictionary, and who says so.

        Args:
            called: what the dictionary calls its hook; None where it says nothing, as all below.
            places: hooks that this may be, the usual one first.
            said_by: where it is called so.
        """
        if self.model is not None and model is not None and not same_model(self.model, model):
            next_step = "Give a dictionary of this model: directions of another mean nothing here."
            raise refused(place, f"a dictionary of {model}", self.model, next_step)
        self.refuse_other_width(place, d_model)
        if self.hook is None:
            return (places[0], said_by) if places else (None, None)
        if called is None:
            if layer is not None and layer not in _layers_of(self.hook):
                raise refused(place, f"a dictionary of layer {layer}", self.hook)
            return self.hook, "caller"
        if any(same_place(self.hook, candidate) for candidate in places):
            return self.hook, said_by
        got = f"a dictionary of {called}"
        if places and places[0] != called:
            got += f", which is {' or '.join(places)}"
        raise refused(place, got, self.hook)


class OfHook(Protocol):
    """What is read from a file for the rows of a hook: a dictionary, or probes."""

    @property
    def hook(self) -> str | None: ...

    @property
    def d_model(self) -> int: ...


Loaded = TypeVar("Loaded", bound=OfHook)


def by_hook(
    argument: str,
    words: Sequence[str | os.PathLike[str]],
    hooks: Mapping[str, int],
    load: Callable[[str, str | None, int | None], Loaded],
) -> dict[str, Loaded]:
    """Return what was loaded of ``[HOOK=]PATH``, by hook.

    Args:
        argument: its name.
        hooks: channels of each hook that there is.
        load: called with the path, and with hook and channels where the hook is named.

    Raises:
        ActdsError: E009 no such hook, or two for one; E015 of another hook or width.
    """
    result: dict[str, Loaded] = {}
    for given in words:
        word = os.fspath(given)
        head, is_named, path = word.partition("=")
        hook = head if is_named and "/" not in head else None
        if hook is None:
            path = word
        elif hook not in hooks:
            expected = f"one of the hooks that there are: {', '.join(hooks)}"
            raise ActdsError("E009", argument, got=head[:80], expected=expected)
        loaded = load(path, hook, None if hook is None else hooks[hook])
        hook = hook or _of_hook(path, loaded.hook, list(hooks))
        if loaded.d_model != hooks[hook]:
            what = "probes" if argument == "probes" else "a dictionary"
            got, expected = f"{what} of {loaded.d_model:,} channels", f"{hooks[hook]:,}"
            raise refused(path, got, f"{expected}, as {hook} has")
        if hook in result:
            raise ActdsError("E009", argument, got=f"two for {hook}", expected="one to a hook")
        result[hook] = loaded
    return result


def _of_hook(place: str, hook: str | None, hooks: Sequence[str]) -> str:
    """Return which of the hooks a file is for: its own word, or the only hook there is."""
    if hook is None and len(hooks) == 1:
        return hooks[0]
    if hook is None:
        next_step = f"Name the hook: {hooks[0]}={place}"
        raise refused(place, "no word of its hook", "a hook", next_step)
    same = next((name for name in hooks if same_place(name, hook)), None)
    if same is None:
        raise refused(place, f"of {hook}", f"one of {', '.join(hooks)}")
    return same


def recorded(place: object, config: Any, source: Source) -> Source:
    """Return a source with what a loader recorded, as it is where the value is not of one.

    Its hook is None where batches had several, its model where several are named, or none.
    """
    if not isinstance(config, dict) or config.get("format") != "actds.loader":
        return source
    if config.get("normalization") or config.get("normalize"):
        got = f"trained on rows that the loader normalized ({config.get('normalize')})"
        next_step = (
            "Fold the normalization into the weights, set `normalize` and `normalization` of the "
            "recorded configuration to null, and save again."
        )
        raise refused(place, got, "weights for rows as they are", next_step)
    hooks = _all(config.get("hooks"), str)
    datasets, models = (_all(config.get(name), dict) for name in ("datasets", "models"))
    digests = _all([config.get("digest"), *(entry.get("digest") for entry in datasets)], str)
    names = {entry.get("name") for entry in models}
    return replace(
        source,
        hook=hooks[0] if len(hooks) == 1 else None,
        model=next(iter(_all(list(names), str)), None) if len(names) == 1 else None,
        trained_on=tuple(dict.fromkeys(digests)),
        held_out=_held_out(config.get("split")),
        weights=tuple(sorted({*_all([entry.get("weights_sha256") for entry in models], str)})),
    )


def _all(value: Any, kind: type[T]) -> list[T]:
    return [v for v in value if isinstance(v, kind)] if isinstance(value, list) else []


def _held_out(split: Any) -> float | None:
    if not isinstance(split, list) or len(split) != 2 or split[0] != "train":
        return None
    return float(split[1]) if isinstance(split[1], float) and 0 < split[1] < 1 else None


_LENS = re.compile(r"blocks\.(\d{1,6})\.(?:attn\.)?hook_([a-z_]+)")
_MODULE = re.compile(
    r"(?:[a-z_]+\.){0,3}(?:layers|h|blocks)\.(\d{1,6})(?:\.(mlp|self_attn|attn|attention))?"
    r"(?:\.output)?"
)
_OWN = re.compile(r"([a-z][a-z0-9_]{0,63})\.(\d{1,6})")
_KINDS: dict[str, tuple[str, ...]] = {
    "resid_pre": ("resid_pre",),
    "resid_mid": ("resid_mid",),
    "resid_post": ("resid_post",),
    # Before rotary embedding hook_q and hook_k are no hook of actds, except in models without one.
    "rot_q": ("q",),
    "rot_k": ("k",),
    "v": ("v",),
    "z": ("z",),
    "attn_out": ("attn_out", "attn_out_post"),
    "mlp_out": ("mlp_out", "mlp_out_post"),
}
# Their hook_attn_out and hook_mlp_out are after the norm that follows (Gemma 2, 3; GLM-4; OLMo 2;
# EXAONE 4). The module of transformers is before it.
_POST_NORMS = re.compile(r"gemma-?[23]|glm-?4|olmo-?2|exaone-?4")
_ALIASES = {"gpt2-small": "gpt2"}  # of TransformerLens


def places_of(name: str, model: str | None = None) -> tuple[str, ...]:
    """Return the hooks that a name elsewhere may stand for, the usual one first; none if unknown.

    ``blocks.L.hook_attn_out`` and ``hook_mlp_out`` are two: before or after the norm that some
    models have there. A known model decides.

    Args:
        name: of TransformerLens, of a module of ``transformers``, or of actds itself.
        model: name of the model, where known.
    """
    if match := _LENS.fullmatch(name):
        kinds = _KINDS.get(match[2], ())
        if len(kinds) == 2 and model is not None and _POST_NORMS.search(model.lower()):
            kinds = kinds[1:]
        return tuple(f"{kind}.{int(match[1])}" for kind in kinds)
    if match := _MODULE.fullmatch(name):
        kind = {None: "resid_post", "mlp": "mlp_out"}.get(match[2], "attn_out")
        return (f"{kind}.{int(match[1])}",)
    if match := _OWN.fullmatch(name):
        return (f"{match[1]}.{int(match[2])}",)
    return ()


def same_place(first: str, second: str) -> bool:
    """Return whether two hooks hold the same rows by definition.

    ``resid_pre.L`` and ``resid_post.L-1`` do: the stream before a layer is that after the last.
    """
    return _canonical(first) == _canonical(second)


def _layers_of(hook: str) -> set[int]:
    """Return the layers that a hook can be counted to: its own, and that of the same rows."""
    names = (hook, _canonical(hook))
    return {int(layer) for name in names if (layer := name.rpartition(".")[2]).isdecimal()}


def same_model(first: str, second: str) -> bool:
    """Return whether two names can be those of one model: their last segments, in any case."""
    return _segment(first) == _segment(second)


def _canonical(hook: str) -> str:
    kind, _, layer = hook.rpartition(".")
    if kind == "resid_pre" and layer.isdecimal() and int(layer) > 0:
        return f"resid_post.{int(layer) - 1}"
    return hook


def _segment(name: str) -> str:
    last = re.split(r"[/\\]", name.strip().rstrip("/\\").lower())[-1]
    return _ALIASES.get(last, last)
