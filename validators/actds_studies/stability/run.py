"""One engine: dictionaries of every arm and seed are trained, then compared pair by pair."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actds.exchange.containers import NewTensor, write_tensors
from actds.format.tables import PHASES
from actds.store import refuse_within_dataset
from actds.text import storable
from actds.version import __version__
from actds_studies.dictionaries import Dictionary
from actds_studies.dictionaries.dictionary import Source
from actds_studies.dictionaries.places import places_of
from actds_studies.dictionaries.saelens import CONFIG, WEIGHTS
from actds_studies.stability.arms import Arm, most, words_of
from actds_studies.stability.fit import Fitted, Trainer
from actds_studies.stability.judge import answer, compare, verdicts
from actds_studies.stability.matching import chance, features_of, match_directions
from actds_studies.stability.result import (
    ArmResult,
    Likeness,
    Limits,
    PairKind,
    PairResult,
    Stability,
    Trained,
)
from actds_studies.stability.rows import Errors, Gathered, Plan, cross_values, errors_of, gather
from actds_validators.arrays import Bools
from actds_validators.audit.outputs import unwritable
from actds_validators.sections import about

if TYPE_CHECKING:
    from scipy.sparse import csr_array  # type: ignore[import-untyped]


def refuse_out(out: Path) -> None:
    """Refuse a folder for dictionaries that cannot be made anew.

    Raises:
        ActdsError: E009 it is inside a dataset; E503 something is there already, or the folder
            around it is not.
    """
    refuse_within_dataset(out, "out")
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise unwritable(out, "it is there already", "Give a new folder.")
    if not out.parent.is_dir():
        raise unwritable(out, f"no folder {out.parent}", "Make the folder, or give another path.")


def save(
    folder: Path, dictionary: Dictionary, arm: Arm, hook: str, held_out: float, trained: Any
) -> None:
    """Write a dictionary with the record of what it was trained on.

    Args:
        held_out: share of the requests that it has not seen.

    Raises:
        ActdsError: E503 the folder cannot be written.
    """
    dataset, path = arm.dataset, storable(arm.dataset.path)
    models = about(dataset.catalog, "").models
    model = models[0] if len(models) == 1 else None
    config = {
        "architecture": "topk",
        "d_in": dictionary.d_model,
        "d_sae": dictionary.n_features,
        "k": dictionary.k,
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "metadata": {
            "sae_lens_version": "6.0.0",
            "model_name": model,
            "hook_name": _name_elsewhere(hook, model),
            "actds": {
                "format": "actds.loader",
                "actds": __version__,
                "dataset": path,
                "digest": dataset.digest,
                "datasets": [{"path": path, "digest": dataset.digest}],
                "models": list(dataset.models),
                "hooks": [hook],
                "split": ["train", held_out],
                "stability": trained,
            },
        },
    }
    arrays = {
        "W_enc": dictionary.w_enc,
        "b_enc": dictionary.b_enc,
        "W_dec": dictionary.w_dec,
        "b_dec": dictionary.b_dec,
    }
    try:
        folder.mkdir(parents=True)
        tensors = {
            name: NewTensor("float32", array.shape, [np.ascontiguousarray(array)])
            for name, array in arrays.items()
        }
        write_tensors(folder / WEIGHTS, tensors, {})
        (folder / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error.strerror or str(error), "Give another folder.") from None


def _name_elsewhere(hook: str, model: str | None) -> str:
    """Return what SAELens calls a hook; its own name where there is none."""
    kind, _, layer = hook.rpartition(".")
    names = [f"blocks.{layer}.hook_{kind}", f"blocks.{layer}.hook_{kind.removesuffix('_post')}"]
    names += [f"blocks.{layer}.attn.hook_{name}" for name in (kind, f"rot_{kind}")]
    return next((name for name in names if places_of(name, model)[:1] == (hook,)), hook)


@dataclass(frozen=True)
class _Scored:
    """A trained dictionary with what it does to the held-out rows of all arms."""

    trained: Trained
    dictionary: Dictionary
    alive: Bools
    errors: list[Errors]
    features: csr_array


def measure(
    arms: Sequence[Arm],
    hook: str,
    planned: Plan,
    limits: Limits,
    out: Path | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Stability:
    """Train the dictionaries of all arms and seeds, and say how alike they are.

    Args:
        arms: the arms, the reference first; nothing that one scores is trained on by another.
        out: new folder for the dictionaries, ``ARM/seed-N``; None keeps none.

    Raises:
        ActdsError: E014 rows that cannot be trained on; E503; what reading raises.
    """
    import torch

    progress(f"reading {planned.n_rows:,} rows of each arm")
    rows = gather(arms, hook, planned.n_rows)
    trainer = Trainer(
        planned.n_features,
        limits.k,
        limits.batch,
        limits.epochs,
        limits.learning_rate,
        rows.scale,
        rows.centre,
    )
    seeds = list(range(limits.seed, limits.seed + limits.seeds))
    # Those of another order, with the starts of the reference's own.
    plans = [(n, seed, seed) for n in range(len(arms)) for seed in seeds]
    plans += [(0, seed, seed + limits.seeds) for seed in seeds]
    made: dict[tuple[int, int, int], _Scored] = {}
    for done, (n, seed, order) in enumerate(plans, 1):
        progress(f"dictionary {done} of {len(plans)}, arm {arms[n].name}, seed {seed}")
        fitted = trainer.fit(rows.arms[n].train, seed, order)
        made[n, seed, order] = _one(rows, n, hook, seed, order, fitted, limits, out)
    progress("matching")
    pairs = _pairs(arms, made, seeds)
    by_chance = chance(planned.n_features, len(rows.centre))
    comparisons = compare(pairs, arms[0].name, by_chance, limits)
    judged = verdicts(comparisons, arms[0].name, by_chance, limits)
    cross = [
        value
        for n, trained_on in enumerate(arms)
        for m, rows_of in enumerate(arms)
        for value in cross_values(
            trained_on.name,
            rows_of.name,
            [made[n, s, s].errors[m] for s in seeds],
            rows.arms[m].scored,
            rows.arms[0].scored,
        )
    ]
    return Stability(
        limits=limits,
        hook=hook,
        d_model=len(rows.centre),
        n_features=planned.n_features,
        n_rows=planned.n_rows,
        n_seen=limits.epochs * (planned.n_rows // limits.batch) * limits.batch,
        scale=rows.scale,
        n_threads=torch.get_num_threads(),
        rare=rows.rare,
        chance=by_chance,
        answer=answer(judged, comparisons, arms[0].name, len(seeds)),
        arms=_arm_results(rows, hook),
        verdicts=judged,
        comparisons=comparisons,
        pairs=pairs,
        cross=cross,
        dictionaries=[made_one.trained for made_one in made.values()],
    )


def _one(
    rows: Gathered,
    n: int,
    hook: str,
    seed: int,
    order: int,
    fitted: Fitted,
    limits: Limits,
    out: Path | None,
) -> _Scored:
    from scipy.sparse import vstack

    arm = rows.arms[n].arm
    name = f"seed-{seed}" if order == seed else f"seed-{seed}-order-{order}"
    folder = None if out is None else out / arm.name / name
    arrays = (fitted.w_enc, fitted.b_enc, fitted.w_dec, fitted.b_dec)
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    source = Source("saelens", str(folder or f"{arm.name} {name}"), digest.hexdigest(), hook)
    dictionary = Dictionary("topk", *arrays, source, k=limits.k)
    trained = Trained(
        arm=arm.name,
        seed=seed,
        order=order,
        fvu=fitted.fvu,
        n_alive=int(fitted.alive.sum()),
        sha256=digest.hexdigest(),
        path=None if folder is None else storable(str(folder)),
    )
    if folder is not None:
        facts = {
            "arm": words_of(arm.words),
            "seed": seed,
            "order": order,
            "rows": len(rows.arms[n].entries),
            "epochs": limits.epochs,
        }
        save(folder, dictionary, arm, hook, limits.held_out, facts)
    scores = [errors_of(dictionary, of_arm.scored.rows) for of_arm in rows.arms]
    features = vstack([features_of_arm for _, features_of_arm in scores], format="csr")
    return _Scored(trained, dictionary, fitted.alive, [errors for errors, _ in scores], features)


def _pairs(
    arms: Sequence[Arm], made: dict[tuple[int, int, int], _Scored], seeds: Sequence[int]
) -> list[PairResult]:
    """Return how alike pairs are: each seed with itself, and with the next one."""
    k = len(seeds)
    pair_results = []
    for at, seed in enumerate(seeds):
        first, after = made[0, seed, seed], seeds[(at + 1) % k]
        kinds: list[tuple[int, PairKind, int, int]] = [
            (0, "other order", seed, seed + k),
            (0, "other seed", after, after),
        ]
        for n in range(1, len(arms)):
            kinds += [(n, "same start", seed, seed), (n, "other seed", after, after)]
        pair_results += [
            PairResult(
                arm=arms[n].name,
                kind=kind,
                seeds=(seed, start),
                likeness=_likeness(first, made[n, start, order]),
            )
            for n, kind, start, order in kinds
        ]
    return pair_results


def _likeness(first: _Scored, second: _Scored) -> Likeness:
    directions = first.dictionary.w_dec, second.dictionary.w_dec
    matched = match_directions(*directions, (first.alive, second.alive))
    return Likeness(
        matched=matched.mean,
        nearest=matched.nearest,
        share_70=matched.share(0.7),
        share_90=matched.share(0.9),
        features=features_of(first.features, second.features),
    )


def _arm_results(rows: Gathered, hook: str) -> list[ArmResult]:
    reference = rows.arms[0].entries.key
    known = [about(arm.arm.dataset.catalog, "") for arm in rows.arms]
    return [
        ArmResult(
            name=arm.arm.name,
            words=words_of(arm.arm.words),
            digest=arm.arm.dataset.digest,
            models=list(of.models),
            engines=list(of.engines),
            started_ns=of.started_ns,
            dtype=arm.arm.dataset.hooks[hook].dtype,
            n_there=most(arm.arm.train, arm.arm.shares),
            n_rows=len(arm.entries),
            shares={phase: int((arm.entries.phase == n).sum()) for n, phase in enumerate(PHASES)},
            n_common=int(np.isin(arm.entries.key, reference).sum()),
            n_sinks=arm.n_sinks,
            n_scored=len(arm.scored.entries),
            n_requests=len(np.unique(arm.scored.entries.request)),
        )
        for arm, of in zip(rows.arms, known, strict=True)
    ]
