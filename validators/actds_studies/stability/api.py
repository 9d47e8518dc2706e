"""Stability from Python: dictionaries of every arm and seed are trained, and compared in pairs.

The trainer is a TopK dictionary in PyTorch whose start and order are given. Equal rows in an equal
order from an equal start give equal weights, bit for bit, on one machine and one number of threads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actds.errors import ActdsError, not_installed
from actds.exchange.containers import NewTensor, write_tensors
from actds.explore.dataset import Dataset, open_apart
from actds.format.positions import Keys
from actds.format.tables import PHASES
from actds.store import refuse_within_dataset
from actds.store.folders import unwritable
from actds.text import storable
from actds.version import __version__
from actds_studies.regimes.api import MIXTURE_KEYS, ArmWords, parse_named
from actds_studies.regimes.arms import named
from actds_studies.stability import rows
from actds_studies.stability.matching import chance, features_of, match_directions
from actds_studies.stability.result import (
    RAW,
    ArmResult,
    CrossValue,
    FeatureSteering,
    Likeness,
    Limits,
    PairKind,
    PairResult,
    Rare,
    Stability,
    SteeredPair,
    Trained,
    answer,
    compare,
    judged_gaps,
    verdicts,
)
from actds_studies.stability.scores import Entries, Scores, cross_values, ridge
from actds_validators.arrays import Bools, Floats, Rows
from actds_validators.dictionaries import Dictionary, Source, places_of
from actds_validators.dictionaries.formats import CONFIG, WEIGHTS
from actds_validators.sections import need_extra, recorded, settings_of

if TYPE_CHECKING:
    import torch
    from scipy.sparse import csr_array  # type: ignore[import-untyped]


def stability(
    *arms: str | os.PathLike[str],
    hook: str | None = None,
    label: str | None = None,
    out: str | Path | None = None,
    model: str | Path | None = None,
    engine: str = "vllm",
    engine_args: Mapping[str, Any] | None = None,
    limits: Limits | Mapping[str, float] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Stability:
    """Train dictionaries of several harvests and seeds, and say what the harvest changes in them.

    Args:
        arms: each ``[NAME=]PATH[:KEY=VALUE,...]``, with the keys ``phase``, ``where``,
            ``exclude``, ``prefill`` and ``decode`` (shares that add up to 1) and ``weights``; the
            first is the reference, and one alone says how far seeds and orders differ.
        hook: hook whose rows to train on; the only one by default.
        label: expression that is true of the rows that probes on the features should find; a row
            of which it is not known whether it is true has no label.
        out: new folder for the dictionaries, which SAELens and ``actds regimes --sae`` read.
        model: folder that the reference was harvested from, where features steer (``steer`` of the
            limits).
        engine: that serves its answers again, as of ``actds.replay``.
        engine_args: likewise.
        limits: settings by name, or as the result has them.
        progress: receives what is being done.

    Returns:
        The result: verdicts, likenesses of pairs with their floors, and what the dictionaries of
        each arm do to the rows of each.

    Raises:
        ActdsError: E009 an argument that cannot be used; E011 a package that is not installed;
            E014 arms that cannot be compared: no such hook, other widths, no row, the same rows,
            nothing held out, a label that is true of all rows or of none; E018 weights of another
            dataset; E503 a folder that cannot be written; and as ``actds.open``, ``actds.steer``.
    """
    need_extra()
    if find_spec("torch") is None:
        raise not_installed("torch", "audit,torch", "actds stability")
    chosen = settings_of(Limits, limits)
    if chosen.steer and model is None:
        raise ActdsError("E009", "model", got="none", expected="the folder of the model to steer")
    words = parse_named(arms, MIXTURE_KEYS)
    folder = None if out is None else Path(out)
    if folder is not None:
        _refuse_out(folder)
    datasets: dict[str, Dataset] = {}
    for arm in words:
        if arm.path not in datasets:
            datasets[arm.path] = open_apart(arm.path)
    name = _hook_of([(arm.name, datasets[arm.path]) for arm in words], hook)
    progress("reading tables")
    opened = rows.scored_apart(
        [rows.open_arm(arm, datasets[arm.path], name, chosen.held_out, label) for arm in words]
    )
    rows.refuse_same(opened)
    n_rows, n_features = rows.sizes(opened, name, chosen)
    progress(f"reading {n_rows:,} rows of each arm")
    of_arms, scale, centre, rare = rows.gather(opened, name, n_rows)
    trainer = Trainer(chosen, n_features, scale, centre)
    probed = [] if label is None else [rows.labelled(arm) for arm in of_arms]
    serving = {"model": model, "engine": engine, "engine_args": dict(engine_args or {})}
    return _Study(of_arms, rare, name, trainer, folder, label, probed, serving).run(progress)


def _refuse_out(out: Path) -> None:
    refuse_within_dataset(out, "out")
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise unwritable(out, "it is there already", "Give a new folder.")
    if not out.parent.is_dir():
        raise unwritable(out, f"no folder {out.parent}", "Make the folder, or give another path.")


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
            got = f"rows of {other.hooks[hook].d_model} channels"
            expected = f"{width}, as arm {first} has"
            raise ActdsError("E014", f"arm {name} at {hook}", got=got, expected=expected)
    return hook


_LAST = 20


Weights = tuple[Rows, Rows, Rows, Rows]
"""The matrices and biases of a `Dictionary`, for rows as they are stored."""


@dataclass(frozen=True)
class Trainer:
    """How every dictionary is trained.

    Args:
        scale: what rows are multiplied by, the same for all arms.
        centre: where the decoder's bias starts, in stored units, the same for all arms
            ``(d_model,)``.
    """

    limits: Limits
    n_features: int
    scale: float
    centre: Floats

    def start(self, seed: int) -> dict[str, torch.Tensor]:
        """Return the initial weights of a seed: the same whatever the rows are.

        Directions are random and of length 1, the encoder is their transpose.
        """
        import torch

        generator = torch.Generator().manual_seed(seed)
        atoms = torch.randn(self.n_features, len(self.centre), generator=generator)
        atoms /= atoms.norm(dim=1, keepdim=True)
        return {
            "w_enc": atoms.T.clone(),
            "b_enc": torch.zeros(self.n_features),
            "w_dec": atoms,
            "b_dec": torch.from_numpy(self.centre.astype(np.float32)) * self.scale,
        }

    def fit(
        self, values: torch.Tensor, entries: Entries, seed: int, order: int
    ) -> tuple[Weights, float, Bools]:
        """Train a dictionary.

        Args:
            values: the rows in their stored type, a batch at least; finite ``(n, d_model)``.
            entries: what they are ``(n,)``.

        Returns:
            The weights; the fraction of variance unexplained of the last batches, mean; and which
            features were active in the last pass ``(n_features,)``.
        """
        import torch
        from torch.nn.functional import embedding_bag

        size, epochs = self.limits.batch, self.limits.epochs
        weights = {name: torch.nn.Parameter(value) for name, value in self.start(seed).items()}
        w_enc, b_enc, w_dec, b_dec = weights.values()
        optimizer = torch.optim.Adam(weights.values(), lr=self.limits.learning_rate)
        share = torch.from_numpy(entries["weight"].astype(np.float32))[:, None]
        alive = np.zeros(self.n_features, np.bool_)
        losses: list[float] = []
        for epoch in range(epochs):
            permutation = torch.from_numpy(rows.epoch_order(entries["key"], order, epoch))
            for at in range(0, len(permutation) - size + 1, size):
                batch = permutation[at : at + size]
                x, w = values[batch].float() * self.scale, share[batch]
                if not (w > 0).any():
                    continue
                mean = (w * x).sum(dim=0) / w.sum()
                spread = (w * (x - mean).square()).sum()
                if not spread > 0:  # one row alone: there is no variance to explain
                    continue
                top = ((x - b_dec) @ w_enc + b_enc).topk(self.limits.k, dim=1)
                active = torch.relu(top.values)
                # The product with the k directions alone, in half the time of the whole matrix.
                rebuilt = embedding_bag(top.indices, w_dec, per_sample_weights=active, mode="sum")
                loss = (w * (rebuilt + b_dec - x).square()).sum() / spread
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                with torch.no_grad():
                    w_dec.div_(w_dec.norm(dim=1, keepdim=True))
                losses.append(loss.item())
                if epoch == epochs - 1:
                    alive[top.indices[active > 0].numpy()] = True
        if not losses:
            got = "no batch in which two rows that differ have a weight"
            raise ActdsError("E014", "training rows", got=got, expected="some")
        scale, last = np.float32(self.scale), losses[-_LAST:]
        enc, b, dec, centre = (value.detach().numpy() for value in weights.values())
        arrays: Any = (enc * scale, b, dec / scale, centre / scale)
        return arrays, sum(last) / len(last), alive


@dataclass(frozen=True)
class _Scored:
    """A trained dictionary with what it does to the held-out rows of all arms."""

    trained: Trained
    dictionary: Dictionary
    alive: Bools
    scores: list[Scores]
    features: csr_array


@dataclass(frozen=True)
class _Study:
    """All dictionaries of a study: those of each arm and seed, and of the reference two orders.

    Args:
        out: new folder for the dictionaries, ``ARM/seed-N``; None keeps none.
        probed: rows of each arm that probes are fitted on, and what they are; empty without label.
        serving: model and engine that features steer.
    """

    arms: Sequence[rows.ArmRows]
    rare: Rare
    hook: str
    trainer: Trainer
    out: Path | None
    label: str | None
    probed: Sequence[tuple[Entries, Rows]]
    serving: Mapping[str, Any]

    def run(self, progress: Callable[[str], None]) -> Stability:
        import torch

        limits, arms = self.trainer.limits, self.arms
        names = [arm.arm.name for arm in arms]
        n_rows, n_features = len(arms[0].entries), self.trainer.n_features
        d_model = len(self.trainer.centre)
        seeds = list(range(limits.seed, limits.seed + limits.seeds))
        # Those of another order, with the starts of the reference's own.
        plans = [(n, seed, seed) for n in range(len(arms)) for seed in seeds]
        plans += [(0, seed, seed + limits.seeds) for seed in seeds]
        made: dict[tuple[int, int, int], _Scored] = {}
        for done, (n, seed, order) in enumerate(plans, 1):
            progress(f"dictionary {done} of {len(plans)}, arm {names[n]}, seed {seed}")
            made[n, seed, order] = self._dictionary(n, seed, order)
        progress("matching")
        pairs = _pairs(names, made, seeds)
        by_chance = chance(n_features, d_model)
        comparisons = compare(pairs, names[0], by_chance, limits)
        judged = verdicts(comparisons, names[0], by_chance, limits)
        progress("scoring")
        cross = [value for m in range(len(arms)) for value in self._cross(m, made, seeds)]
        cross.sort(key=lambda value: [*names, RAW].index(value.trained_on))
        cross = judged_gaps(cross, limits)
        return Stability(
            limits=limits,
            hook=self.hook,
            label=self.label,
            d_model=d_model,
            n_features=n_features,
            n_rows=n_rows,
            n_seen=limits.epochs * (n_rows // limits.batch) * limits.batch,
            scale=self.trainer.scale,
            n_threads=torch.get_num_threads(),
            rare=self.rare,
            chance=by_chance,
            answer=answer(judged, comparisons, names[0], len(seeds), cross),
            arms=[_arm_result(arm, arms[0].entries["key"], self.hook) for arm in arms],
            verdicts=judged,
            comparisons=comparisons,
            pairs=pairs,
            cross=cross,
            dictionaries=[scored.trained for scored in made.values()],
            steering=self._steering(made, progress) if limits.steer else None,
        )

    def _steering(
        self, made: Mapping[tuple[int, int, int], _Scored], progress: Callable[[str], None]
    ) -> FeatureSteering:
        """Steer by the best matched features of one seed: another order, and each other arm."""
        from actds_studies.stability.steering import FeatureDirections, steered

        limits, of = self.trainer.limits, self.arms[0].arm
        first, pairs = made[0, limits.seed, limits.seed], []
        for n, arm in enumerate(self.arms):
            kind: PairKind = "same start" if n else "other order"
            second = made[n, limits.seed, limits.seed + (0 if n else limits.seeds)]
            rows_of = first.dictionary.w_dec, second.dictionary.w_dec
            matched = match_directions(*rows_of, (first.alive, second.alive))
            for k in np.argsort(-matched.cosine, kind="stable")[: limits.steer]:
                i, j = matched.pairs[k].tolist()
                what = {"kind": kind, "features": (i, j), "cosine": matched.cosine[k]}
                pairs.append((SteeredPair(arm=arm.arm.name, **what), rows_of[0][i], rows_of[1][j]))
        model = Path(self.serving["model"])
        study = FeatureDirections(of.dataset, model, self.hook, limits.nats, limits.seed)
        progress("steering by matched features")
        measure = partial(study.measured, options=self.serving)
        return steered(pairs, measure, study.steps, len(study.sequences))

    def _cross(
        self, m: int, made: Mapping[tuple[int, int, int], _Scored], seeds: Sequence[int]
    ) -> Iterator[CrossValue]:
        scored, names = self.arms[m].scored, [arm.arm.name for arm in self.arms]
        scores = {name: [made[n, s, s].scores[m] for s in seeds] for n, name in enumerate(names)}
        raw = None
        if self.probed:
            entries, values = self.probed[m]
            raw = scored.rows @ ridge(values.astype(np.float64), entries["label"])
        yield from cross_values(scores, names[m], scored, self.arms[0].scored, raw)

    def _dictionary(self, n: int, seed: int, order: int) -> _Scored:
        from scipy.sparse import vstack

        arm = self.arms[n]
        weights, fvu, alive = self.trainer.fit(arm.values, arm.entries, seed, order)
        name = f"seed-{seed}" if order == seed else f"seed-{seed}-order-{order}"
        folder = None if self.out is None else self.out / arm.arm.name / name
        digest = hashlib.sha256()
        for array in weights:
            digest.update(np.ascontiguousarray(array).tobytes())
        path, sha256 = str(folder or f"{arm.arm.name} {name}"), digest.hexdigest()
        source = Source("saelens", path, sha256, self.hook)
        dictionary = Dictionary("topk", *weights, source, k=self.trainer.limits.k)
        trained = Trained(
            arm=arm.arm.name,
            seed=seed,
            order=order,
            fvu=fvu,
            n_alive=int(alive.sum()),
            sha256=sha256,
            path=None if folder is None else storable(path),
        )
        if folder is not None:
            _save(folder, dictionary, _config(arm, dictionary, trained, self.trainer.limits))
        features, scores = [], []
        for m, held_out in enumerate(of_arm.scored.rows for of_arm in self.arms):
            features.append(dictionary.encode_sparse(held_out))
            error = dictionary.decode(features[-1]) - held_out
            squared = np.einsum("nd,nd->n", error, error, dtype=np.float64)
            probe = None
            if self.probed and order == seed:
                entries, values = self.probed[m]
                probe = features[-1] @ ridge(dictionary.encode_sparse(values), entries["label"])
            scores.append(Scores(squared, np.diff(features[-1].indptr).astype(np.int64), probe))
        return _Scored(trained, dictionary, alive, scores, vstack(features, format="csr"))


def _pairs(
    names: Sequence[str], made: Mapping[tuple[int, int, int], _Scored], seeds: Sequence[int]
) -> list[PairResult]:
    """Return how alike pairs are: each seed with itself, and with the next one."""
    pairs = []
    for at, seed in enumerate(seeds):
        after = seeds[(at + 1) % len(seeds)]
        for n, name in enumerate(names):
            same: PairKind = "same start" if n else "other order"
            another = seed if n else seed + len(seeds)
            for kind, start, order in ((same, seed, another), ("other seed", after, after)):
                likeness = _likeness(made[0, seed, seed], made[n, start, order])
                pairs.append(
                    PairResult(arm=name, kind=kind, seeds=(seed, start), likeness=likeness)
                )
    return pairs


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


def _arm_result(of: rows.ArmRows, reference: Keys, hook: str) -> ArmResult:
    arm, entries, scored = of.arm, of.entries, of.scored.entries
    return ArmResult(
        name=arm.name,
        words=_words_of(arm.words),
        **named(arm.dataset),
        dtype=arm.dataset.hooks[hook].dtype,
        n_there=rows.most(arm.train, arm.shares),
        n_rows=len(entries),
        shares={phase: int((entries["phase"] == n).sum()) for n, phase in enumerate(PHASES)},
        n_common=int(np.isin(entries["key"], reference).sum()),
        n_sinks=of.n_sinks,
        n_scored=len(scored),
        n_requests=len(np.unique(scored["request"])),
    )


def _words_of(words: ArmWords) -> str:
    parts = [storable(words.path)]
    parts += [f"phase {words.phase}"] if words.phase else []
    parts += [", ".join(f"{share:.0%} {phase}" for phase, share in words.mix)] if words.mix else []
    parts += [words.where] if words.where else []
    parts += [f"without {name}" for name in words.exclude]
    parts += [f"weights {weight}" for weight in words.weights]
    return ", ".join(parts)


# the files of a dictionary ------------------------------------------------------------------------


def _config(
    arm: rows.ArmRows, dictionary: Dictionary, trained: Trained, limits: Limits
) -> dict[str, Any]:
    dataset, hook = arm.arm.dataset, dictionary.hook or ""
    path, models = storable(dataset.path), recorded(dataset.catalog, "model.name")
    model = models[0] if len(models) == 1 else None
    return {
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
                "split": ["train", limits.held_out],
                "stability": {
                    "arm": _words_of(arm.arm.words),
                    "seed": trained.seed,
                    "order": trained.order,
                    "rows": len(arm.entries),
                    "epochs": limits.epochs,
                },
            },
        },
    }


def _save(folder: Path, dictionary: Dictionary, config: dict[str, Any]) -> None:
    arrays = {
        name: getattr(dictionary, name.lower()) for name in ("W_enc", "b_enc", "W_dec", "b_dec")
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
