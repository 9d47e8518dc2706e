"""What is compared, in words: arms as ``G=acts:phase=decode``, contrasts as ``G-R``; opened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from actds.errors import ActdsError
from actds.explore.dataset import Dataset, open_apart
from actds.format.tables import PHASES
from actds.text import storable
from actds_studies.regimes.arms import Arm
from actds_studies.regimes.result import DatasetResult
from actds_validators.about import began, recorded

SELECTION_KEYS = ("phase", "where", "exclude")
MIXTURE_KEYS = (*SELECTION_KEYS, *PHASES, "weights")
"""Keys of an arm that something is trained on: its shares by phase, and how rows count."""
_ONCE = ("phase", "where", *PHASES)
_OTHER_KEY = re.compile(r":([a-z_]+)=(?!=)")
_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9_]{0,31})=(.*)", re.DOTALL)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class ArmWords:
    """An arm as it was asked for.

    Args:
        phase: ``prefill``, ``decode`` or None for both.
        where: expression that keeps rows; None for all.
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


Words = str | os.PathLike[str]


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
    """Return the arms that are asked for, one or more.

    Args:
        words: each ``[NAME=]PATH[:KEY=VALUE,...]``.
        keys: the keys that there are; ``exclude`` and ``weights`` may come again.

    Raises:
        ActdsError: as `parse_arms`; and shares that are none, or do not add up to 1.
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

    Args:
        asked: contrasts; with none every later arm is compared with the first.

    Raises:
        ActdsError: E009 no such arm, or not two of them.
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


def open_arms(
    words: Sequence[Words],
    contrasts: Sequence[str],
    hooks: Sequence[str],
    held_out: float | None,
    floor: str | None,
) -> tuple[dict[str, Arm], list[tuple[str, str]], list[str]]:
    """Return the arms that are compared, by name; the contrasts, reference first; the hooks.

    Raises:
        ActdsError: E009 an argument that cannot be used; E014 a hook that an arm lacks, or none
            that all have; and as ``actds.open``.
    """
    if held_out is not None and not 0 < held_out < 1:
        raise ActdsError("E009", "held_out", got=f"{held_out}", expected="a share from 0 to 1")
    arms = _open(words, held_out)
    pairs = parse_contrasts(list(arms), contrasts)
    if floor is not None:
        alike = parse_contrasts(list(arms), [floor], "floor")
        pairs = list(dict.fromkeys([*alike, *pairs]))
    compared = {name: arm for name, arm in arms.items() if any(name in pair for pair in pairs)}
    return compared, pairs, _shared_hooks(list(compared.values()), hooks)


def _open(words: Sequence[Words], held_out: float | None) -> dict[str, Arm]:
    """Return the arms by name; a dataset that several name is opened once."""
    requested = parse_arms(words)
    paths: dict[str, Dataset] = {}
    datasets: dict[str, Dataset] = {}
    for arm in requested:
        if arm.path not in paths:
            dataset = open_apart(arm.path)
            paths[arm.path] = datasets.setdefault(dataset.digest, dataset)
    return {
        arm.name: Arm(
            arm.name,
            paths[arm.path],
            arm.phase,
            arm.where,
            arm.exclude,
            None if held_out is None else "held_out",
            held_out or 0.0,
        )
        for arm in requested
    }


def _shared_hooks(arms: Sequence[Arm], hooks: Sequence[str]) -> list[str]:
    """Return the hooks to compare, in the order of the first arm's dataset."""
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


def dataset_results(arms: Iterable[Arm], hooks: Sequence[str]) -> list[DatasetResult]:
    datasets = {arm.dataset.digest: arm.dataset for arm in arms}
    return [_dataset_result(dataset, hooks) for dataset in datasets.values()]


def _dataset_result(dataset: Dataset, hooks: Sequence[str]) -> DatasetResult:
    catalog = dataset.catalog
    return DatasetResult(
        path=storable(dataset.path),
        digest=dataset.digest,
        models=list(recorded(catalog, "model.name")),
        engines=list(recorded(catalog, "engine.name", "engine.version")),
        hooks=[
            f"{hook.name} ({hook.d_model:,} × {hook.dtype})"
            for hook in catalog.genesis.hooks
            if hook.name in hooks
        ],
        started_ns=began(catalog),
    )
