"""What is asked for, in words: arms as ``G=acts:phase=decode``, contrasts as ``G-R``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from actds.errors import ActdsError
from actds.format.tables import PHASES

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
    names: Sequence[str], asked: Sequence[str], argument: str = "contrasts"
) -> list[tuple[str, str]]:
    """Return the contrasts as (reference, other): ``G-R`` compares G with the reference R.

    Args:
        asked: contrasts; with none every later arm is compared with the first.

    Raises:
        ActdsError: E009 no such arm, or not two of them.
    """
    if not asked:
        return [(names[0], other) for other in names[1:]]
    found = []
    for words in dict.fromkeys(asked):
        parts = words.split("-")
        if len(parts) != 2 or parts[0] == parts[1] or not set(parts) <= set(names):
            expected = f"two of {', '.join(names)}, as {names[1]}-{names[0]}"
            raise ActdsError("E009", argument, got=words[:80], expected=expected)
        found.append((parts[1], parts[0]))
    return found


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
