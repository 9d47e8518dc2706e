"""Steering from Python: a vector, its dose, replays of a dataset's own answers, and what they say.

Tokens are fixed, those of the source, so that only depth changes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from actds.errors import ActdsError
from actds.explore.dataset import Dataset, open_apart
from actds.explore.requests import token_sequences
from actds.text import storable
from actds_studies.regimes.arms import named
from actds_studies.regimes.entropies import Unembedding
from actds_studies.steer.measure import (
    Read,
    calibrated,
    decay_of,
    differences,
    effects_of,
    estimate,
    groups_by_prompt,
    prove,
    strata_of,
    survival_of,
)
from actds_studies.steer.refit import Directions
from actds_studies.steer.refit import refit as refit_of
from actds_studies.steer.replays import PLAIN, Replayed, Serving, Variant, chosen, prompt_of
from actds_studies.steer.result import (
    Decay,
    Dose,
    Effect,
    Limits,
    Steering,
    Survival,
    Vector,
    Way,
    answer,
)
from actds_validators.arrays import Floats, Ints, Rows
from actds_validators.audit.result import Estimate
from actds_validators.dictionaries.formats import dictionary_feature
from actds_validators.sections import need_extra, settings_of

N_CALIBRATED = 64
"""Generated tokens of a request that the dose is calibrated on."""
AGAIN = "again"
REFIT_SHARES = tuple(2.0**k for k in range(-3, 4))
"""Strengths of a direction and its refit, over that of a dose of 1."""


def steer(
    dataset: str | os.PathLike[str],
    *,
    model: str | Path,
    hook: str,
    vector: str | Path | tuple[str, str],
    doses: Sequence[float] = (0.5, 1.0, 2.0),
    at: Sequence[int] = (1, 10, 50, 200),
    after: Sequence[int] = (1, 5, 20),
    engine: str = "vllm",
    engine_args: Mapping[str, Any] | None = None,
    refit: bool = False,
    survival: int = 0,
    limits: Limits | Mapping[str, float] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Steering:
    """Say whether a steering vector still works later in an answer.

    The dataset's own answers are served again, plain and with the vector: at one step and read
    there (pulse), or later (kept: what it left in the KV cache), and from a step on (held). Beside
    it are its negative, random vectors of its length, and a vector of zeros.

    Args:
        dataset: a sealed dataset with rows of the hook, whose answers are long enough.
        model: the folder that it was harvested from.
        hook: whose rows the vector is added to, such as ``resid_post.10``.
        vector: an npy file ``(d_model,)``; ``DICTIONARY:FEATURE``, whose direction in the decoder
            it is; or two expressions, the mean of the rows where the first holds less that of the
            second's, over requests that are not steered.
        doses: strengths; 1 is the one at which a quantile of tokens diverges by so many nats.
        at: decode steps, from 1, at which it begins; the effect at the others is beside the first.
        after: steps later that it is read.
        engine: as of ``actds.replay``.
        engine_args: likewise.
        refit: say of two expressions as well whether the direction of prompts loses its effect in
            answers because another one is theirs (regime), or for any (component).
        survival: tokens that are sampled on from the steps, with the vector held; 0 for none.
        limits: settings by name, or as the result has them.
        progress: receives what is being done.

    Returns:
        Divergences of the next token with intervals over requests, the decay of each way, the dose,
        and what the controls do.

    Raises:
        ActdsError: E009 an argument that cannot be used; E014 too few prompts, too short answers,
            no rows of the hook, no dose within the strengths that are tried, an unembedding that
            does not give the engine's entropies; E015 a vector that does not fit; and as
            ``actds.replay``.
    """
    need_extra()
    chosen_limits = settings_of(Limits, limits)
    source = open_apart(os.fspath(dataset))
    if hook not in source.hooks:
        expected = f"one of {', '.join(source.hooks)}"
        raise ActdsError("E014", "hook", got=hook[:80], expected=expected)
    steps, delays, sizes = _checked(at, after, doses)
    if refit and not isinstance(vector, tuple):
        expected = "two expressions, of which there are rows in prompts and in answers"
        raise ActdsError("E009", "refit", got="a vector that is given", expected=expected)
    study = _Study(source, Path(model), hook, (steps, delays, sizes), chosen_limits, refit)
    options = {"model": model, "engine": engine, "engine_args": dict(engine_args or {})}
    return study.run(vector, options, survival, progress)


def _checked(
    at: Sequence[int], after: Sequence[int], doses: Sequence[float]
) -> tuple[list[int], list[int], list[float]]:
    steps, delays, sizes = sorted(set(at)), sorted(set(after)), sorted(set(doses))
    for name, values, least, n in (
        ("at", steps, 1, 2),
        ("after", delays, 1, 1),
        ("dose", sizes, 0, 1),
    ):
        if len(values) < n or min(values) < least or (name == "dose" and 1.0 not in sizes):
            expected = f"numbers from {least}, {n} at least" + ", 1 among them" * (name == "dose")
            raise ActdsError("E009", name, got=str(list(values)), expected=expected)
    return steps, delays, sizes


class _Study:
    def __init__(
        self,
        source: Dataset,
        model: Path,
        hook: str,
        grid: tuple[list[int], list[int], list[float]],
        limits: Limits,
        refit: bool,
    ) -> None:
        self.source, self.hook, self.limits = source, hook, limits
        (self.steps, self.after, self.doses), self.refit = grid, refit
        self.unembedding = Unembedding(model, int(source.hooks[hook].d_model))
        self._differences = partial(differences, self.unembedding)
        self.every = every = list(token_sequences(source))
        least = max(self.steps) + max(self.after)
        self.sequences = chosen(every, least, limits.requests, limits.seed)
        self.group = groups_by_prompt(self.sequences, limits.seed)
        self.acting = [*self.sequences]  # and, of a refit, half of the others at most
        for n_more in (2 * limits.requests, 0) if refit else (0,):
            steered = set(map(prompt_of, self.acting))
            self.free = np.array([prompt_of(s) not in steered for s in every])
            further = [s for s, is_free in zip(every, self.free, strict=True) if is_free]
            n = min(n_more, len(further) // 2)
            self.acting += chosen(further, 1, n, limits.seed) if n else []
        short = min(N_CALIBRATED, least)
        try:
            self.calibrated = chosen(further, short, limits.calibration, limits.seed)
        except ActdsError:  # a small dataset: on the requests of the study
            self.calibrated = self.sequences[: limits.calibration]

    def run(
        self,
        of: str | Path | tuple[str, str],
        options: Mapping[str, Any],
        n_sampled: int,
        progress: Callable[[str], None],
    ) -> Steering:
        serving, contrast = Serving(self.source, self.hook, options), None
        if isinstance(of, tuple):
            of_source = self.source, self.hook, self.every, self.free
            contrast = Directions(*of_source, of, self.limits.seed)
        unit, words = self._unit(contrast or os.fspath(of))  # type: ignore[arg-type]
        norm = self._median_norm()
        with tempfile.TemporaryDirectory(prefix="actds-", ignore_cleanup_errors=True) as folder:
            progress("calibrating the dose")
            curve, strength = self._dose(serving, unit, norm, Path(folder))
            progress("serving the variants")
            vectors = self._vectors(unit)
            variants = self._variants(strength, len(vectors))
            replayed = serving.serve(self.sequences, variants, vectors, Path(folder) / "study")
            proof = prove(self.unembedding, *replayed.recorded(), f"{options['model']}")
            components = None
            if self.refit and contrast is not None:
                progress("serving a direction and its refit")
                serve = partial(serving.serve, folder=Path(folder) / "refit", whole=True)
                shares = np.array(REFIT_SHARES) * strength / norm
                steered = self.acting, self._median_norm, shares, self.limits
                components = refit_of(contrast, *steered, serve, self.unembedding)
            survivals = []
            if n_sampled:
                progress("sampling on")
                out = Path(folder) / "survival"
                survivals = self._survivals(serving, unit[np.newaxis], strength, n_sampled, out)
            result = self._result(replayed, (unit, words), (curve, strength, norm), proof)
            return result.model_copy(update={"components": components, "survival": survivals})

    # the vector -----------------------------------------------------------------------------------

    def _unit(self, of: Directions | str) -> tuple[Rows, str]:
        """Return the direction, of length 1, and where it comes from in words."""
        d_model = self.source.hooks[self.hook].d_model
        if isinstance(of, Directions):
            vector, words = of.direction(), of.words
        elif (parts := of.rpartition(":"))[2].isdecimal() and parts[0]:
            feature = dictionary_feature(parts[0], int(parts[2]), hook=self.hook)
            vector = np.asarray(feature.decoder, np.float64)
            words = f"feature {parts[2]} of {Path(parts[0]).name}"
        else:
            try:
                vector = np.load(of, allow_pickle=False).astype(np.float64)
            except (OSError, ValueError, EOFError) as error:
                words = str(error).splitlines()[0][:200]
                expected = "a readable npy file of floats"
                raise ActdsError("E015", of, got=words, expected=expected) from None
            words = Path(of).name
        length = float(np.linalg.norm(vector)) if vector.shape == (d_model,) else float("nan")
        if not np.isfinite(length) or length == 0:
            got = f"shape {vector.shape}" if vector.shape != (d_model,) else "no direction"
            raise ActdsError("E015", words, got=got, expected=f"({d_model},), finite, not 0")
        return np.asarray(vector / length, np.float32), words

    def _vectors(self, unit: Rows) -> Rows:
        """Return the vector, its negative, and random ones of length 1."""
        rng = np.random.default_rng(self.limits.seed)
        random = rng.normal(size=(self.limits.random, len(unit)))
        random /= np.linalg.norm(random, axis=1, keepdims=True)
        return np.concatenate([unit[np.newaxis], -unit[np.newaxis], random]).astype(np.float32)

    def _median_norm(self, members: Sequence[int] | None = None, at: int | None = None) -> float:
        """Return the median norm of rows of the hook: in answers, or at a position of requests."""
        parts = [np.zeros(0, np.int64)]
        for n in range(len(self.sequences)) if members is None else members:
            s = self.acting[n]
            rows = self.source.request(s.request, run=s.run, hook=self.hook).row
            parts.append(rows[s.n_given :] if at is None else rows[at : at + 1])
        numbers = np.unique(np.concatenate(parts))
        numbers = numbers[numbers >= 0][:4096]
        if not len(numbers):
            expected = "some in prompts and in answers"
            raise ActdsError("E014", self.hook, got="no row where it acts", expected=expected)
        values = self.source.array(self.hook)[numbers].astype(np.float32)
        return float(np.median(np.linalg.norm(values, axis=1)))

    # the dose -------------------------------------------------------------------------------------

    def _dose(
        self, serving: Serving, unit: Rows, norm: float, folder: Path
    ) -> tuple[list[tuple[float, float]], float]:
        """Return strengths with the quantile of the divergence over tokens, and that of a dose."""
        n = min(min(len(s.token_id) - s.n_given for s in self.calibrated), N_CALIBRATED)
        at = np.arange(n)

        def quantiles(shares: Sequence[float]) -> list[float]:
            strengths = enumerate(np.array(shares) * norm)
            variants = [Variant(f"c{k}", 0, float(s), 0, None, n) for k, s in strengths]
            out = folder / f"dose-{min(shares):g}"
            replayed = serving.serve(self.calibrated, variants, unit[np.newaxis], out)
            plain = replayed.rows(PLAIN, at)
            read = [self._differences(replayed, replayed.rows(v.name, at), plain) for v in variants]
            return [_quantile(divergence, self.limits.quantile) or 0.0 for divergence, _ in read]

        curve, share = calibrated(quantiles, self.limits.nats)
        return [(share * norm, value) for share, value in curve], share * norm

    # the study ------------------------------------------------------------------------------------

    def _variants(self, strength: float, n_vectors: int) -> list[Variant]:
        longest = max(self.steps) + max(self.after)
        variants = [Variant(AGAIN, 0, 0.0, 0, None, longest)]
        for vector in range(n_vectors):
            for dose in self.doses if vector == 0 else [1.0]:
                for step in self.steps:
                    for way, stop in (("pulse", step), ("held", None)):
                        name = f"{way}-{vector}-{dose:g}-{step}"
                        end = step + max(self.after)
                        variants.append(Variant(name, vector, dose * strength, step - 1, stop, end))
        return variants

    def _reads(self, replayed: Replayed, n_vectors: int) -> Iterator[Read]:
        kinds: dict[Vector, list[int]] = {"vector": [0], "negative": [1]}
        kinds["random"] = list(range(2, n_vectors))
        ways: list[tuple[Way, str, int]] = [("pulse", "pulse", 0)]
        ways += [("kept", "pulse", k) for k in self.after]
        ways += [("held", "held", k) for k in (0, *self.after)]
        for way, served, k in ways:
            at = np.array(self.steps) - 1 + k
            plain = replayed.rows(PLAIN, at)
            for kind, vectors in kinds.items():
                for dose in self.doses if kind == "vector" else [1.0]:
                    names = [f"{served}-{v}-{dose:g}" for v in vectors]
                    steered = [self._at(replayed, name, at) for name in names]
                    parts = [self._differences(replayed, rows, plain) for rows in steered]
                    divergence = np.mean([part[0] for part in parts], axis=0)
                    change = np.mean([part[1] for part in parts], axis=0)
                    yield Read(way, kind, dose, k, divergence, change, self.group)

    def _at(self, replayed: Replayed, name: str, at: Ints) -> Ints:
        places = zip(self.steps, np.split(at, len(at)), strict=True)
        return np.concatenate([replayed.rows(f"{name}-{step}", p) for step, p in places], axis=1)

    def _survivals(
        self, serving: Serving, unit: Rows, strength: float, n_sampled: int, folder: Path
    ) -> list[Survival]:
        """Return the share of continuations that are like some without the vector, by dose."""
        doses = [0.0, 0.0, *self.doses]  # those of the first are what the others have to be like
        sequences = [self.sequences[n] for n in np.unique(self.group, return_index=True)[1]]
        places = [(step, k) for step in self.steps for k in range(len(doses))]
        variants = [
            Variant(f"s{k}-{step}", 0, doses[k] * strength, step - 1, None, step)
            for step, k in places
        ]
        replayed = serving.serve(sequences, variants, unit, folder, n_sampled=n_sampled)
        looks = {(step, k): replayed.looks(f"s{k}-{step}") for step, k in places}
        return [
            survival_of(looks[step, 0], looks[step, k], step, doses[k]) for step, k in places if k
        ]

    def _result(
        self,
        replayed: Replayed,
        vector: tuple[Rows, str],
        dose: tuple[list[tuple[float, float]], float, float],
        proof: float,
    ) -> Steering:
        longest = np.arange(max(self.steps) + max(self.after))
        plain = replayed.rows(PLAIN, longest)
        floor = self._floor(replayed, longest)
        reads = list(self._reads(replayed, 2 + self.limits.random))
        effects: list[Effect] = []
        decays: list[Decay] = []
        strata = []
        at = np.array(self.steps) - 1
        entropy, roles = self._plain(replayed, at)
        for read in reads:
            of_read = effects_of(read, self.steps)
            effects += of_read
            if read.vector == "vector":
                decays.append(decay_of(read, of_read, floor, self.limits))
                if read.dose == 1.0 and read.after in (0, max(self.after)):
                    strata += strata_of(read, entropy, roles)
        curve, strength, norm = dose
        n_held = self.steps[0] + max(self.after)
        rows = replayed.rows(f"held-0-1-{self.steps[0]}", longest[:n_held])
        at_first = self._differences(replayed, rows, plain[:, :n_held])[0]
        kept = _quantile(at_first, self.limits.quantile)
        unit, words = vector
        return Steering(
            limits=self.limits,
            dataset=storable(self.source.path),
            **named(self.source),
            hook=self.hook,
            vector=storable(words),
            vector_sha256=hashlib.sha256(unit.astype("<f4").tobytes()).hexdigest(),
            n_requests=len(self.sequences),
            n_prompts=len(set(map(prompt_of, self.sequences))),
            floor=floor,
            dose=Dose(strength=strength, median_norm=norm, kept=kept, curve=curve),
            unembedding=proof,
            norms=self._norms(replayed, at),
            effects=effects,
            decays=decays,
            strata=strata,
            answer=answer(self._leading(decays), self._specific(reads)),
        )

    def _floor(self, replayed: Replayed, at: Ints) -> Estimate | None:
        """Return the divergence of a vector of zeros: numerics alone."""
        rows = replayed.rows(AGAIN, at), replayed.rows(PLAIN, at)
        again = self._differences(replayed, *rows)[0]
        return estimate(np.nanmean(again, axis=1), self.group)

    def _plain(self, replayed: Replayed, at: Ints) -> tuple[Floats, np.ndarray]:
        """Return entropy of the plain next token, and the role of the token fed, at each step."""
        rows = replayed.rows(PLAIN, at)
        entropy = np.full(rows.shape, np.nan)
        entropy[rows >= 0] = self.unembedding.entropies(replayed.values(rows)[rows >= 0])[0]
        roles = [[s.role[s.n_given + k] or "" for k in at.tolist()] for s in self.sequences]
        return entropy, np.array(roles)

    def _norms(self, replayed: Replayed, at: Ints) -> list[tuple[int, float]]:
        norms = np.linalg.norm(replayed.values(replayed.rows(PLAIN, at), self.hook), axis=2)
        of_step = zip(self.steps, norms.T, strict=True)
        return [(k, float(np.nanmedian(n))) for k, n in of_step if np.isfinite(n).any()]

    def _specific(self, reads: Sequence[Read]) -> bool | None:
        """Return whether the vector does more at the first step than random ones, paired."""
        of = {read.vector: read for read in reads if (read.way, read.dose) == ("pulse", 1.0)}
        gap = estimate(of["vector"].divergence[:, 0] - of["random"].divergence[:, 0], self.group)
        return None if gap is None else gap.low > 0

    def _leading(self, decays: Sequence[Decay]) -> list[Decay]:
        """Return the decay of each way at a dose of 1: the pulse, kept soon, held for long."""
        wanted = [("pulse", 0), ("kept", min(self.after)), ("held", max(self.after))]
        return [d for at in wanted for d in decays if (d.way, d.after) == at and d.dose == 1.0]


def _quantile(divergence: Floats, quantile: float) -> float | None:
    known = divergence[np.isfinite(divergence)]
    return float(np.quantile(known, quantile)) if len(known) else None
