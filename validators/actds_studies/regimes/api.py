"""Regimes from Python: arms and contrasts in words, opened, and `regimes`, which the command calls.

An arm is ``G=acts:phase=decode``, a contrast ``G-R``; `Study` opens them here as well.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.explore.dataset import Dataset, open_apart
from actds.format.tables import PHASES, UNSERVED
from actds.loader.where import RowValues, parse_expression
from actds.text import storable
from actds_studies.regimes.arms import Arm, named
from actds_studies.regimes.result import DatasetResult, Limits, Regimes, StudyLimits, Used
from actds_validators.dictionaries import by_hook, same_place
from actds_validators.dictionaries.formats import load_dictionary
from actds_validators.dictionaries.tensors import refused
from actds_validators.sections import about, need_extra, recorded, settings_of

if TYPE_CHECKING:
    from actds_studies.regimes.contrast import Pairing
    from actds_studies.regimes.entropies import Entropies
    from actds_studies.regimes.instruments.probes import ProbeFile
    from actds_studies.regimes.run import AnyInstrument, Result
    from actds_validators.dictionaries import Dictionary

SELECTION_KEYS = ("phase", "where", "exclude")
MIXTURE_KEYS = (*SELECTION_KEYS, *PHASES, "weights")
"""Keys of an arm that something is trained on: its shares by phase, and how rows count."""
MAX_LABELLED = 32
"""Probes of which ROC areas are compared: counts in bins, by group and stratum."""
_ONCE = ("phase", "where", *PHASES)
_OTHER_KEY = re.compile(r":([a-z_]+)=(?!=)")
_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9_]{0,31})=(.*)", re.DOTALL)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Words = str | os.PathLike[str]


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

    chosen = settings_of(Limits, limits)
    model = None if model is None else os.fspath(model)
    opened = open_arms(arms, contrasts, hooks, held_out, floor)
    dictionaries = _dictionaries(sae, opened, model)
    opened = replace(opened, arms=_whole_where_unseen(opened.arms, list(dictionaries.values())))
    linear = _probes(probes, opened)
    _check_labels(label, linear)
    folder = model_folder(model)
    entropies = None
    if folder is not None:
        entropies = Entropies(folder, list(opened.arms.values()), opened.hooks[0], progress)
    result = opened.compared(
        lambda first, second, hook: _instruments(
            (first, second), hook, dictionaries.get(hook), linear.get(hook), label
        ),
        pairing,
        chosen,
        progress,
        entropies,
        kind=Regimes,
    )
    used = [_dictionary_used(hook, each, result) for hook, each in dictionaries.items()]
    used += [_probes_used(hook, each) for hook, each in linear.items()]
    return result.model_copy(update={"used": used})


@dataclass(frozen=True)
class ArmWords:
    """An arm in words.

    Args:
        mix: shares by phase, which add up to 1; empty for rows as they are.
        weights: ``multiplicity``, a weights file or an expression, as of the loader.
    """

    name: str
    path: str
    phase: str | None = None
    where: str | None = None
    exclude: tuple[str, ...] = ()
    mix: tuple[tuple[str, float], ...] = ()
    weights: tuple[str, ...] = ()


def parse_arms(words: Sequence[Words]) -> list[ArmWords]:
    """Return the arms that are asked for; one alone is its prefill rows, H, and decode rows, G.

    Each is ``[NAME=]PATH[:KEY=VALUE,...]`` with the keys ``phase``, ``where`` and ``exclude``,
    which may come again. Arms without a name are called A, B, C in their order.

    Raises:
        ActdsError: E009 an unknown key, one that comes twice, no path, or a name that comes twice.
    """
    arms = parse_named(words)
    if len(arms) == 1:
        text = os.fspath(words[0])
        only, named = arms[0], _NAMED.fullmatch(text)
        if only.phase is not None or named:
            got = "a name or a phase of the only arm"
            expected = "a dataset, whose prefill and decode rows are compared, or two arms"
            raise ActdsError("E009", text[:200], got=got, expected=expected)
        return [
            ArmWords(name, only.path, phase, only.where, only.exclude)
            for name, phase in (("H", "prefill"), ("G", "decode"))
        ]
    return arms


def parse_named(words: Sequence[Words], keys: Sequence[str] = SELECTION_KEYS) -> list[ArmWords]:
    """Return the arms that are asked for, one or more; errors are those of `parse_arms`.

    Keys are those that there are; ``exclude`` and ``weights`` may come again. E009 also for shares
    that are none, or do not add up to 1.
    """
    if not words or len(words) > len(_LETTERS):
        expected = f"1 to {len(_LETTERS)} arms"
        raise ActdsError("E009", "arms", got=f"{len(words)} of them", expected=expected)
    arms = [
        _parse(os.fspath(text), letter, keys) for text, letter in zip(words, _LETTERS, strict=False)
    ]
    names = [arm.name for arm in arms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ActdsError("E009", "arms", got=f"{twice} twice", expected="names of their own")
    return arms


def parse_contrasts(
    names: Sequence[str], requested: Sequence[str], argument: str = "contrasts"
) -> list[tuple[str, str]]:
    """Return the contrasts as (reference, other): ``G-R`` compares G with the reference R.

    Every later arm is compared with the first where none is requested. E009 for no such arm.
    """
    if not requested:
        return [(names[0], other) for other in names[1:]]
    result = []
    for words in dict.fromkeys(requested):
        parts = words.split("-")
        if len(parts) != 2 or parts[0] == parts[1] or not set(parts) <= set(names):
            expected = f"two of {', '.join(names)}, as {names[1]}-{names[0]}"
            raise ActdsError("E009", argument, got=words[:80], expected=expected)
        result.append((parts[1], parts[0]))
    return result


def _parse(text: str, letter: str, keys: Sequence[str]) -> ArmWords:
    named = _NAMED.fullmatch(text)
    name, rest = (named[1], named[2]) if named else (letter, text)
    # A URI has colons and an expression has commas: both divide before a key only.
    key_ahead = f"(?=(?:{'|'.join(keys)})=(?!=))"
    path, *selections = re.split(":" + key_ahead, rest, maxsplit=1)
    other = _OTHER_KEY.search(path)
    if other or not path:
        got = f"the key {other[1]}" if other else "no path"
        expected = f"[NAME=]PATH[:KEY=VALUE,...] with the keys {', '.join(keys)}"
        raise ActdsError("E009", text[:200], got=got, expected=expected)
    values: dict[str, list[str]] = {key: [] for key in MIXTURE_KEYS}
    for selection in re.split("," + key_ahead, selections[0]) if selections else []:
        key, _, value = selection.partition("=")
        values[key].append(value.strip())
    for key in _ONCE:
        if len(values[key]) > 1:
            raise ActdsError("E009", text[:200], got=f"{key} twice", expected="each key once")
    phase, where = (values[key][0] if values[key] else None for key in ("phase", "where"))
    mix = tuple((key, _share(text, values[key][0])) for key in PHASES if values[key])
    if mix and (phase is not None or abs(sum(share for _, share in mix) - 1) > 1e-6):
        got = "a phase and shares" if phase else f"shares of {sum(s for _, s in mix):g}"
        raise ActdsError("E009", text[:200], got=got, expected="shares by phase that add up to 1")
    exclude, weights = tuple(values["exclude"]), tuple(values["weights"])
    return ArmWords(name, path, phase, where, exclude, mix, weights)


def _share(text: str, value: str) -> float:
    with suppress(ValueError):
        if 0 < (share := float(value)) <= 1:
            return share
    raise ActdsError("E009", text[:200], got=f"the share {value[:40]}", expected="0 to 1, above 0")


@dataclass(frozen=True)
class Opened:
    """Arms that are compared, by name; contrasts, reference first; hooks; the floor's contrast."""

    arms: dict[str, Arm]
    pairs: list[tuple[str, str]]
    hooks: list[str]
    floor: str | None

    @property
    def widths(self) -> dict[str, int]:
        hooks = next(iter(self.arms.values())).dataset.hooks
        return {name: hooks[name].d_model for name in self.hooks}

    def compared(
        self,
        instruments: Callable[[Arm, Arm, str], Sequence[AnyInstrument]],
        pairing: Pairing | None,
        limits: StudyLimits,
        progress: Callable[[str], None],
        entropies: Entropies | None = None,
        *,
        kind: type[Result],
    ) -> Result:
        """Return what every contrast finds at every hook, and what the datasets are."""
        from actds_studies.regimes.run import Asked, compare

        questions = [
            Asked(f"{b}-{a}", arms[0], arms[1], hook, instruments(*arms, hook), pairing)
            for a, b in self.pairs
            for arms in [(self.arms[a], self.arms[b])]
            for hook in self.hooks
        ]
        result = compare(
            questions, limits, progress, floor=self.floor, entropies=entropies, kind=kind
        )
        datasets = {arm.dataset.digest: arm.dataset for arm in self.arms.values()}
        of = [_dataset_result(dataset, self.hooks) for dataset in datasets.values()]
        return result.model_copy(update={"datasets": of})


def open_arms(
    words: Sequence[Words],
    contrasts: Sequence[str],
    hooks: Sequence[str],
    held_out: float | None,
    floor: str | None,
) -> Opened:
    """Return the arms that contrasts name, opened; a dataset that several name is opened once.

    Raises:
        ActdsError: E009 an argument that cannot be used; E014 a hook that an arm lacks, or none
            that all have; and as ``actds.open``.
    """
    if held_out is not None and not 0 < held_out < 1:
        raise ActdsError("E009", "held_out", got=f"{held_out}", expected="a share from 0 to 1")
    requested = parse_arms(words)
    paths: dict[str, Dataset] = {}
    datasets: dict[str, Dataset] = {}
    for arm in requested:
        if arm.path not in paths:
            dataset = open_apart(arm.path)
            paths[arm.path] = datasets.setdefault(dataset.digest, dataset)
    names = [arm.name for arm in requested]
    pairs = parse_contrasts(names, contrasts)
    if floor is not None:
        pairs = list(dict.fromkeys([*parse_contrasts(names, [floor], "floor"), *pairs]))
    arms = {
        arm.name: Arm(arm.name, paths[arm.path], arm.phase, arm.where, arm.exclude, held_out)
        for arm in requested
        if any(arm.name in pair for pair in pairs)
    }
    return Opened(arms, pairs, _shared_hooks(list(arms.values()), hooks), floor)


def _shared_hooks(arms: Sequence[Arm], hooks: Sequence[str]) -> list[str]:
    shared = [
        hook for hook in arms[0].dataset.hooks if all(hook in arm.dataset.hooks for arm in arms)
    ]
    for hook in hooks:
        if hook not in shared:
            expected = f"one of {', '.join(shared)}" if shared else "a hook that all arms have"
            raise ActdsError("E014", "hooks", got=hook[:80], expected=expected)
    if not shared:
        names = "; ".join(f"{arm.name}: {', '.join(arm.dataset.hooks)}" for arm in arms)
        raise ActdsError("E014", "hooks", got=names[:200], expected="a hook that all arms have")
    return [hook for hook in shared if not hooks or hook in hooks]


def _dataset_result(dataset: Dataset, hooks: Sequence[str]) -> DatasetResult:
    words = zip(about(dataset.catalog, "").hooks, dataset.catalog.genesis.hooks, strict=True)
    of_hooks = [word for word, hook in words if hook.name in hooks]
    return DatasetResult(path=storable(dataset.path), hooks=of_hooks, **named(dataset))


def _dictionaries(
    words: Sequence[Words], opened: Opened, model: str | None
) -> dict[str, Dictionary]:
    arms = list(opened.arms.values())
    named = {name for arm in arms for name in recorded(arm.dataset.catalog, "model.name")}
    name = model or (named.pop() if len(named) == 1 else None)

    def load(path: str, hook: str | None, width: int | None) -> Dictionary:
        dictionary = load_dictionary(path, hook, width, model=name)
        _refuse_fitted(path, dictionary, arms)
        return dictionary

    return by_hook("sae", words, opened.widths, load)


def _refuse_fitted(path: str, dictionary: Dictionary, arms: Sequence[Arm]) -> None:
    for arm in arms:
        if arm.dataset.digest not in dictionary.source.trained_on:
            continue
        kept = dictionary.source.held_out
        if kept is not None and arm.held_out is not None and arm.held_out <= kept:
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
            result[name] = replace(result[name], held_out=None)
    return result


def _sequences(dataset: Dataset) -> set[str | None]:
    """Return the digests of the token sequences of a dataset, None for one that is not known."""
    lines = dataset.requests(run=False).select(["token_digest", "finish_reason"]).to_pylist()
    return {line["token_digest"] for line in lines if line["finish_reason"] not in UNSERVED}


def _probes(words: Sequence[Words], opened: Opened) -> dict[str, ProbeFile]:
    from actds_studies.regimes.instruments.probes import read_probes

    def load(path: str, hook: str | None, width: int | None) -> ProbeFile:
        probes = read_probes(path)
        if hook is not None and probes.hook is not None and not same_place(hook, probes.hook):
            raise refused(path, f"probes of {probes.hook}", hook)
        return probes

    return by_hook("probes", words, opened.widths, load)


def labels_of(dataset: Dataset, hook: str, label: str) -> npt.NDArray[np.int8]:
    """Return the label of each row of a hook's array ``(n_rows,)``: 1, 0, or -1 for unknown."""
    expressions = (parse_expression(label, "label"), parse_expression(f"not ({label})", "label"))
    values = RowValues(dataset, [dataset.hooks[hook]])
    parts = [np.empty(0, np.int8)]
    for shard in dataset.shards_of(hook):
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
    dictionary: Dictionary | None,
    probes: ProbeFile | None,
    label: str | None,
) -> list[AnyInstrument]:
    """Return instruments that nothing else uses: they keep what they learn of a reference."""
    from actds_studies.regimes.instruments import Moments, Numerics, Remembered
    from actds_studies.regimes.instruments.probes import Probes
    from actds_studies.regimes.instruments.reconstruction import Overlap, Reconstruction

    instruments: list[AnyInstrument] = [Moments(), Numerics()]
    if dictionary is not None:
        features = Remembered(dictionary, dictionary.source.path)
        instruments = [Reconstruction(features), Overlap(features), Moments(), Numerics(features)]
    if probes is not None:
        labels = label and (
            labels_of(arms[0].dataset, hook, label),
            labels_of(arms[1].dataset, hook, label),
        )
        instruments.append(Probes(probes.weights, probes.bias, probes.names, labels or None))
    return instruments


def _dictionary_used(hook: str, dictionary: Dictionary, result: Regimes) -> Used:
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
