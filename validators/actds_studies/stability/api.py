"""Stability from Python: `stability`, which the command calls as well."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from actds.errors import ActdsError
from actds.explore.dataset import Dataset, open_apart
from actds_studies.regimes.api import MIXTURE_KEYS, parse_named
from actds_studies.stability.fit import need_torch
from actds_studies.stability.result import Limits, Stability
from actds_validators.sections import need_extra, settings_of


def stability(
    *arms: str | os.PathLike[str],
    hook: str | None = None,
    out: str | Path | None = None,
    limits: Limits | Mapping[str, float] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Stability:
    """Train dictionaries of several harvests and seeds, and say what the harvest changes in them.

    Args:
        arms: each ``[NAME=]PATH[:KEY=VALUE,...]``, with the keys ``phase``, ``where``,
            ``exclude``, ``prefill`` and ``decode`` (shares that add up to 1) and ``weights``; the
            first is the reference, and one alone says how far seeds and orders differ.
        hook: hook whose rows to train on; the only one by default.
        out: new folder for the dictionaries, which SAELens and ``actds regimes --sae`` read.
        limits: settings by name, or as the result has them.
        progress: receives what is being done.

    Returns:
        The result: verdicts, likenesses of pairs with their floors, cross-reconstruction.

    Raises:
        ActdsError: E009 an argument that cannot be used; E011 a package that is not installed;
            E014 arms that cannot be compared: no such hook, other widths, no row, the same rows,
            nothing held out; E018 weights of another dataset; E503 a folder that cannot be
            written; and as ``actds.open``.
    """
    need_extra()
    need_torch()
    from actds_studies.stability.arms import open_arm, refuse_same, scored_apart
    from actds_studies.stability.rows import plan
    from actds_studies.stability.run import measure, refuse_out

    chosen = settings_of(Limits, limits)
    words = parse_named(arms, MIXTURE_KEYS)
    folder = None if out is None else Path(out)
    if folder is not None:
        refuse_out(folder)
    datasets: dict[str, Dataset] = {}
    for arm in words:
        if arm.path not in datasets:
            datasets[arm.path] = open_apart(arm.path)
    name = _hook_of([(arm.name, datasets[arm.path]) for arm in words], hook)
    progress("reading tables")
    opened = scored_apart(
        [open_arm(arm, datasets[arm.path], name, chosen.held_out) for arm in words]
    )
    refuse_same(opened)
    return measure(opened, name, plan(opened, name, chosen), chosen, folder, progress)


def _hook_of(arms: list[tuple[str, Dataset]], hook: str | None) -> str:
    first, dataset = arms[0]
    shared = [name for name in dataset.hooks if all(name in other.hooks for _, other in arms)]
    if hook is None and len(shared) == 1:
        hook = shared[0]
    if hook is None or hook not in shared:
        got = "none" if hook is None else hook[:80]
        expected = f"one of {', '.join(shared)}" if shared else "a hook that all arms have"
        raise ActdsError("E014", "hook", got=got, expected=expected)
    width = dataset.hooks[hook].d_model
    for name, other in arms[1:]:
        if other.hooks[hook].d_model != width:
            raise ActdsError(
                "E014",
                f"arm {name} at {hook}",
                got=f"rows of {other.hooks[hook].d_model} channels",
                expected=f"{width}, as arm {first} has",
            )
    return hook
