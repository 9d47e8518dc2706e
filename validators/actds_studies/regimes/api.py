"""Regimes from Python: `regimes`, which the command calls as well."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.exchange.containers import read_header
from actds.explore.dataset import Dataset
from actds.format.tables import UNSERVED
from actds.loader.where import RowValues, parse_expression
from actds.text import storable
from actds_studies.dictionaries import load_dictionary
from actds_studies.dictionaries.places import same_place
from actds_studies.dictionaries.tensors import (
    file_sha256,
    is_npz,
    of_names,
    read_npz,
    read_safetensors,
    refused,
)
from actds_studies.regimes.arms import Arm
from actds_studies.regimes.asking import dataset_results, open_arms
from actds_studies.regimes.result import Limits, Regimes, Used
from actds_validators.about import recorded
from actds_validators.arrays import Bools
from actds_validators.sections import need_extra, settings_of

if TYPE_CHECKING:
    from actds_studies.dictionaries import Dictionary
    from actds_studies.regimes.contrast import Pairing
    from actds_studies.regimes.run import AnyInstrument
    from actds_validators.arrays import Rows

MAX_PROBES = 1024
MAX_NAME = 80
_MAX_WEIGHT = float(np.finfo(np.float32).max)
_EXPECTED = "a .safetensors or .npz file with weights (n_probes, d_model)"
_NEXT_STEP = (
    "Save float weights (n_probes, d_model), and bias (n_probes,), with safetensors or numpy.savez."
)


@dataclass(frozen=True)
class ProbeFile:
    """Linear probes of a file.

    Args:
        weights: float64 ``(n_probes, d_model)``.
        bias: float64 ``(n_probes,)``.
        names: of the probes; their numbers where the file has none.
        hook: that they are for; None where the file does not say.
    """

    path: str
    sha256: str
    weights: npt.NDArray[np.float64]
    bias: npt.NDArray[np.float64]
    names: tuple[str, ...]
    hook: str | None


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
        or not all(isinstance(name, str) and _is_name(name) for name in names)
        or len(set(names)) != n
        or len(names) != n
    ):
        expected = f"a JSON list of {n} different names of up to {MAX_NAME} characters"
        raise refused(f"{path} names", text[:80], expected, _NEXT_STEP)
    return tuple(names)


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= MAX_NAME and not any("\ud800" <= c <= "\udfff" for c in text)


MAX_LABELLED = 32
"""Probes of which ROC areas are compared: counts in bins, by group and stratum."""


def regimes(
    *arms: str | os.PathLike[str],
    contrasts: Sequence[str] = (),
    hooks: Sequence[str] = (),
    sae: Sequence[str | os.PathLike[str]] = (),
    probes: Sequence[str | os.PathLike[str]] = (),
    label: str | None = None,
    model: str | os.PathLike[str] | None = None,
    held_out: float | None = None,
    pairing: Pairing | None = None,
    floor: str | None = None,
    limits: Limits | Mapping[str, float] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Regimes:
    """Say whether the way it was served changes what is measured on the rows.

    Args:
        arms: each ``[NAME=]PATH[:KEY=VALUE,...]``, with the keys ``phase``, ``where`` and
            ``exclude``; one alone is its prefill rows, H, against its decode rows, G.
        contrasts: which to compare, as ``G-R``: G with the reference R; every later arm with the
            first by default.
        hooks: hooks to compare; those that all arms have by default.
        sae: dictionaries, each ``[HOOK=]PATH``; one to a hook.
        probes: files of linear probes, each ``[HOOK=]FILE``; one to a hook.
        label: expression that is true of the rows that the probes should find; a row of which it
            is not known whether it is true has no label.
        model: what dictionaries call the model of the rows; the name in the run record by default.
            Where it is the model's folder, entropies of given text are computed with it, of stored
            rows of the last layer.
        held_out: compare the requests alone that a loader with ``split="train"`` and this share
            leaves out. An arm that has no token sequence in common with what dictionaries were
            fitted on is compared whole, but for prefixes that they have seen.
        pairing: ``token``, ``position`` or ``unpaired``; the closest that there is by default.
        floor: a contrast of arms that were served alike, as ``again-R``: its distances of equal
            tokens are the floor of the other contrasts'. It is compared as well.
        limits: settings by name, or as the result has them.
        progress: receives what is being done.

    Returns:
        The result: verdicts, every value with its interval and floor, and what is short.

    Raises:
        ActdsError: E009 an argument that cannot be used; E011 a package that is not installed;
            E014 arms that cannot be compared: no such hook, no row, too few requests, no pair; E015
            a dictionary or probes that do not fit the rows, or were fitted on them; and as
            ``actds.open``.
    """
    need_extra()
    from actds_studies.regimes.entropies import Entropies, model_folder
    from actds_studies.regimes.run import Asked, compare

    chosen = settings_of(Limits, limits)
    model = None if model is None else os.fspath(model)
    compared, pairs, shared = open_arms(arms, contrasts, hooks, held_out, floor)
    dictionaries = _dictionaries(sae, shared, list(compared.values()), model)
    compared = _whole_where_unseen(compared, list(dictionaries.values()))
    linear = _probes(probes, shared, list(compared.values()))
    _check_labels(label, linear)
    requested = [
        Asked(
            f"{other}-{first}",
            compared[first],
            compared[other],
            hook,
            _instruments(
                (compared[first], compared[other]), hook, dictionaries, linear.get(hook), label
            ),
            pairing,
        )
        for first, other in pairs
        for hook in shared
    ]
    folder = model_folder(model)
    entropies = None
    if folder is not None:
        entropies = Entropies(folder, list(compared.values()), shared[0], progress)
    result = compare(requested, chosen, progress, floor=floor, entropies=entropies)
    used = [
        _dictionary_used(hook, dictionary, compared, result)
        for hook, dictionary in dictionaries.items()
    ]
    used += [_probes_used(hook, dictionary) for hook, dictionary in linear.items()]
    datasets = dataset_results(compared.values(), shared)
    return result.model_copy(update={"used": used, "datasets": datasets})


def _hook_and_path(
    text: str | os.PathLike[str], hooks: Sequence[str], argument: str
) -> tuple[str | None, str]:
    """Return the hook that ``HOOK=PATH`` names, None for a path alone."""
    text = os.fspath(text)
    head, is_named, path = text.partition("=")
    if not is_named or "/" in head:
        return None, text
    if head not in hooks:
        expected = f"one of the hooks that are compared: {', '.join(hooks)}"
        raise ActdsError("E009", argument, got=head[:80], expected=expected)
    return head, path


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


def _dictionaries(
    words: Sequence[str | os.PathLike[str]],
    hooks: Sequence[str],
    arms: Sequence[Arm],
    model: str | None,
) -> dict[str, Dictionary]:
    name = model or _model_of(arms)
    result: dict[str, Dictionary] = {}
    for text in words:
        hook, path = _hook_and_path(text, hooks, "sae")
        width = None if hook is None else arms[0].dataset.hooks[hook].d_model
        dictionary = load_dictionary(path, hook, width, model=name)
        if hook is None:
            hook = _of_hook(path, dictionary.hook, hooks)
            width = arms[0].dataset.hooks[hook].d_model
        if dictionary.d_model != width:
            expected = f"{width:,}, as {hook} has"
            raise refused(path, f"a dictionary of {dictionary.d_model:,} channels", expected)
        if hook in result:
            raise ActdsError("E009", "sae", got=f"two for {hook}", expected="one to a hook")
        _refuse_fitted(path, dictionary, arms)
        result[hook] = dictionary
    return result


def _model_of(arms: Sequence[Arm]) -> str | None:
    """Return the model of the arms' runs; None where they name none, or several."""
    names = {name for arm in arms for name in recorded(arm.dataset.catalog, "model.name")}
    return names.pop() if len(names) == 1 else None


def _refuse_fitted(path: str, dictionary: Dictionary, arms: Sequence[Arm]) -> None:
    for arm in arms:
        if arm.dataset.digest not in dictionary.source.trained_on:
            continue
        kept = dictionary.source.held_out
        if kept is not None and arm.split == "held_out" and arm.held_out <= kept:
            continue
        if kept is None:
            next_step = (
                'Fit it with actds.Loader(split="train", held_out=0.5), then score it with '
                "held_out=0.5"
            )
        else:
            next_step = f"Score it on what its loader held out: held_out={kept:g}"
        got = f"fitted on rows of arm {arm.name}, as its loader recorded"
        raise refused(path, got, "rows that it was not fitted on", next_step)


def _whole_where_unseen(
    arms: Mapping[str, Arm], dictionaries: Sequence[Dictionary]
) -> dict[str, Arm]:
    """Return the arms, whole where no dictionary has seen a token sequence of theirs.

    Prefixes that one has seen are left out of all of them. The split goes by token sequence: of one
    document that the model and its author continued it would take the two sides apart, and leave a
    quarter of the pairs.
    """
    fitted = {digest for dictionary in dictionaries for digest in dictionary.source.trained_on}
    known = {arm.dataset.digest: arm for arm in arms.values() if arm.dataset.digest in fitted}
    if not known:
        return dict(arms)
    seen = set().union(*(_sequences(arm.dataset) for arm in known.values()))
    result = {}
    for name, arm in arms.items():
        elsewhere = tuple(
            dictionary for digest, dictionary in known.items() if digest != arm.dataset.digest
        )
        result[name] = replace(arm, fitted=elsewhere)
        if None not in (sequences := _sequences(arm.dataset)) and sequences.isdisjoint(seen):
            result[name] = replace(result[name], split=None, held_out=0.0)
    return result


def _sequences(dataset: Dataset) -> set[str | None]:
    """Return the digests of the token sequences of a dataset, None for one that is not known."""
    lines = dataset.requests(run=False).select(["token_digest", "finish_reason"]).to_pylist()
    return {line["token_digest"] for line in lines if line["finish_reason"] not in UNSERVED}


def _probes(
    words: Sequence[str | os.PathLike[str]], hooks: Sequence[str], arms: Sequence[Arm]
) -> dict[str, ProbeFile]:
    result: dict[str, ProbeFile] = {}
    for text in words:
        hook, path = _hook_and_path(text, hooks, "probes")
        probes = read_probes(path)
        if hook is not None and probes.hook is not None and not same_place(hook, probes.hook):
            raise refused(path, f"probes of {probes.hook}", hook)
        hook = hook or _of_hook(path, probes.hook, hooks)
        width = arms[0].dataset.hooks[hook].d_model
        if probes.weights.shape[1] != width:
            got = f"probes of {probes.weights.shape[1]:,} channels"
            raise refused(path, got, f"{width:,}, as {hook} has")
        if hook in result:
            raise ActdsError("E009", "probes", got=f"two for {hook}", expected="one to a hook")
        result[hook] = probes
    return result


class _Finite:
    """A dictionary on rows of which some may not be finite: those count as zeros, and are unused.

    Args:
        dictionary: the dictionary.

    Raises:
        ActdsError: E015 it makes numbers of finite rows that are not finite.
    """

    def __init__(self, dictionary: Dictionary) -> None:
        self._dictionary = dictionary

    def encode(self, rows: Rows) -> Rows:
        """Return the features ``(n, n_features)`` of rows ``(n, d_model)``."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self._checked("features", self._dictionary.encode(_finite(rows)))

    def decode(self, features: Rows, rows: Rows | None = None) -> Rows:
        """Return the rows ``(n, d_model)`` of features ``(n, n_features)``."""
        finite_rows = None if rows is None else _finite(rows)
        with np.errstate(over="ignore", invalid="ignore"):
            return self._checked("rows", self._dictionary.decode(features, finite_rows))

    def _checked(self, what: str, values: Rows) -> Rows:
        if not np.isfinite(values.sum(dtype=np.float64)):
            got = f"{what} that are not finite in float32"
            raise refused(self._dictionary.source.path, got, "finite ones of finite rows")
        return values

    def frame(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return what a normalization takes off each row and divides it by, each ``(n, 1)``."""
        return self._dictionary.frame(_finite(rows))


def _finite(rows: Rows) -> Rows:
    """Return rows ``(n, d_model)``, those that are not finite as zeros."""
    fine: Bools = np.asarray(np.isfinite(rows).all(axis=1))
    return rows if fine.all() else np.where(fine[:, np.newaxis], rows, np.float32(0))


def _labels(arm: Arm, hook: str, label: str) -> npt.NDArray[np.int8]:
    """Return the label of each row of an arm's array ``(n_rows,)``: 1, 0, or -1 for unknown."""
    expressions = (parse_expression(label, "label"), parse_expression(f"not ({label})", "label"))
    values = RowValues(arm.dataset, [arm.dataset.hooks[hook]])
    parts = [np.empty(0, np.int8)]
    for shard in arm.dataset.shards_of(hook):
        true, false = (
            expression.mask(values.of(shard, expression.columns), shard.n_rows)
            for expression in expressions
        )
        parts.append(np.where(true, 1, np.where(false, 0, -1)).astype(np.int8))
    return np.concatenate(parts)


def _check_labels(label: str | None, linear: Mapping[str, ProbeFile]) -> None:
    """Refuse labels without probes, or of more probes than there is memory for."""
    if label is None:
        return
    if not linear:
        raise ActdsError("E009", "label", got="no probes", expected="probes as well")
    most = max(len(file.names) for file in linear.values())
    if most > MAX_LABELLED:
        expected = f"at most {MAX_LABELLED}: each takes 9 MB"
        raise ActdsError("E009", "label", got=f"{most:,} probes", expected=expected)


def _instruments(
    arms: tuple[Arm, Arm],
    hook: str,
    dictionaries: Mapping[str, Dictionary],
    probes: ProbeFile | None,
    label: str | None,
) -> list[AnyInstrument]:
    """Return instruments that nothing else uses: they keep what they learn of a reference."""
    from actds_studies.regimes.equal_tokens import Numerics
    from actds_studies.regimes.instruments import Remembered
    from actds_studies.regimes.instruments.moments import Moments
    from actds_studies.regimes.instruments.probes import Probes
    from actds_studies.regimes.instruments.reconstruction import Overlap, Reconstruction

    instruments: list[AnyInstrument] = []
    if hook not in dictionaries:
        instruments += [Moments(), Numerics()]
    else:
        dictionary = Remembered(_Finite(dictionaries[hook]))
        instruments += [
            Reconstruction(dictionary),
            Overlap(dictionary),
            Moments(),
            Numerics(dictionary),
        ]
    if probes is not None:
        labels = None
        if label is not None:
            labels = _labels(arms[0], hook, label), _labels(arms[1], hook, label)
        instruments.append(Probes(probes.weights, probes.bias, probes.names, labels))
    return instruments


def _dictionary_used(
    hook: str, dictionary: Dictionary, arms: Mapping[str, Arm], result: Regimes
) -> Used:
    source = dictionary.source
    words = [f"{dictionary.kind}, {dictionary.n_features:,} features, {source.format}"]
    if dictionary.normalization != "none":
        words.append(f"{dictionary.normalization} of each row, by that row's own numbers")
    if source.hook_from != "file":
        who = {"path": "the names of its folders say", "caller": "only the command says"}
        words.append(f"that it is for this hook {who.get(source.hook_from or '', 'nothing says')}")
    if source.model is None:
        words.append("it does not say which model it was trained on")
    if source.prepend_bos and not any(
        arm.n_apart.get("bos") for c in result.contrasts for arm in (c.first, c.second)
    ):
        words.append("it was trained on sequences with BOS, and no request has one")
    return Used(
        hook=hook,
        kind="dictionary",
        path=storable(source.path),
        sha256=source.sha256,
        words="; ".join(words),
    )


def _probes_used(hook: str, probes: ProbeFile) -> Used:
    words = f"{len(probes.names):,} probes"
    if probes.hook is None:
        words += "; that they are for this hook only the command says"
    return Used(
        hook=hook, kind="probes", path=storable(probes.path), sha256=probes.sha256, words=words
    )
