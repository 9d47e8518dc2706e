"""Attention from Python: one pass over the requests, sums by stratum and group of requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.explore.dataset import Dataset, open_apart
from actds.format.positions import split_key
from actds.format.sampled import Sampled
from actds.format.tables import ROLES
from actds.format.telemetry import attending_of
from actds.text import storable
from actds_studies.attention.recorded import RecordedLayer, recorded_layers, recorded_rows
from actds_studies.attention.result import (
    Attention,
    AttentionValue,
    Jumps,
    LayerAttention,
    Limits,
    SelfProof,
    Trace,
    answer,
    outcome_of,
)
from actds_studies.attention.rows import (
    CAST,
    MEASURES,
    Attended,
    LayerRows,
    Proof,
    Read,
    Request,
    attention_rows,
)
from actds_studies.regimes.arms import Requests, first_sampled, named
from actds_validators.arrays import Bools, Floats, Ints, Rows
from actds_validators.audit.result import Estimate
from actds_validators.sections import need_extra, recorded, settings_of
from actds_writers.capture.hooks import n_heads_of
from actds_writers.capture.scheme import LIMITS, Scheme, full_config, sinks_of
from actds_writers.model_folder import file_sha256, find_model, model_config, weights_sha256

if TYPE_CHECKING:
    from actds_validators.statistics.intervals import Interval

BANDS = ("1", "2", *(f"{2**n + 1} to {2 ** (n + 1)}" for n in range(1, 24)))
"""Of decode steps: each band is twice as long as the one before."""
STRATA = {
    "all": ("all",),
    "decode step": BANDS,
    "role": ROLES,
    "entropy": tuple(f"quintile {n}" for n in range(1, 6)),
    "jump": ("large", "others"),
}
"""By axis: steps, their depth, the role of the token fed, the entropy of the token sampled after
it, and whether the attention jumped there."""
LEAST_STEPS = 20
"""With a jump and a change, of an answer whose jumps are compared."""
N_TRACES, N_TRACE_STEPS = 3, 300
_OUTCOMES = 4  # of a step: whether its change is large, one a window later, size, direction


def attention(
    dataset: str | os.PathLike[str],
    *,
    model: str | Path | None = None,
    layers: Sequence[int] = (),
    unproved: bool = False,
    limits: Limits | Mapping[str, float] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Attention:
    """Say where generated text looks, and whether certainty changes where it jumps.

    From stored queries and keys, proved by stored values and outputs of heads.

    Args:
        dataset: a sealed dataset with hooks ``q`` and ``k``, and ``v`` and ``z`` for the proof; or
            one whose engine has looked at attention.
        model: the folder that it was harvested from, or ``org/name`` of the local hub cache; the
            name in the run record by default. Its configuration says how attention is computed.
        layers: layers to look at; all that have the hooks by default.
        unproved: go on where ``v`` and ``z`` are not stored, and mark the result.
        limits: settings by name, or as the result has them.
        progress: receives what is being done.

    Returns:
        Means by depth, role, entropy and jump with intervals over groups of requests, heads, and
        whether the sampled tokens' entropy changes at large jumps.

    Raises:
        ActdsError: E005 no such model; E009 an argument that cannot be used; E014 no layer with the
            hooks, another model, no ``v`` and ``z``, an attention that does not give the stored
            ``z``, no step that has all its keys; and as ``actds.open``.
    """
    need_extra()
    chosen = settings_of(Limits, limits)
    opened = open_apart(os.fspath(dataset))
    has_rows = any(hook.kind in "qk" for hook in opened.hooks.values())
    if not has_rows and (looked_at := recorded_layers(opened, layers)):
        return _Study(opened, looked_at, chosen).run(None, progress)
    of_model = Model(opened, model)
    of_layers = _layers(opened, of_model, layers, unproved)
    return _Study(opened, of_layers, chosen).run(of_model, progress)


def _layers(
    dataset: Dataset, model: Model, layers: Sequence[int], unproved: bool
) -> list[LayerRows]:
    stored = [hook for hook in dataset.hooks if dataset.shards_of(hook)]
    known = {
        layer: [kind for kind in "qkvz" if f"{kind}.{layer}" in stored]
        for layer in sorted({hook.layer for hook in dataset.hooks.values()})
    }
    usable = [layer for layer, kinds in known.items() if kinds[:2] == ["q", "k"]]
    wanted = sorted(set(layers)) or usable
    if not wanted or not set(wanted) <= set(usable):
        got = f"layers {', '.join(map(str, wanted))}" if wanted else ", ".join(stored)
        expected = f"one of {', '.join(map(str, usable))}" if usable else "hooks q.L and k.L"
        next_step = None if usable else "Harvest hooks q, k, v and z of a layer, and entropies."
        raise ActdsError("E014", "layers", got=got[:200], expected=expected, next_step=next_step)
    is_cast = any(cast != "none" for cast in recorded(dataset.catalog, "capture.cast"))
    result = []
    for layer in wanted:
        proof = None
        if known[layer] == list("qkvz"):
            limit = max(LIMITS[dataset.hooks[f"{kind}.{layer}"].dtype] for kind in "qkvz")
            proof = Proof(CAST * limit, limit) if is_cast else Proof(limit, limit / 4)
        elif not unproved:
            raise ActdsError(
                "E014",
                f"layer {layer}",
                got=f"rows of {' and '.join(known[layer])}: nothing proves the attention",
                expected="rows of v and z as well",
                next_step="Harvest v and z of the layer too, or take numbers without a proof: "
                "unproved=True",
            )
        result.append(LayerRows(layer, model.scheme(layer), proof))
    return result


class Model:
    """The folder of the model that a dataset was made with.

    Args:
        folder: or ``org/name`` of the local hub cache; None takes the name in the run record.

    Raises:
        ActdsError: E005 no such folder; E014 another model than that of the dataset.
    """

    def __init__(self, dataset: Dataset, folder: str | Path | None) -> None:
        self._dataset = dataset
        names = recorded(dataset.catalog, "model.name")
        if folder is None and len(names) != 1:
            got = f"{len(names)} models in the run records"
            raise ActdsError("E014", "model", got=got, expected="model, the folder of one")
        try:
            self.folder = find_model(names[0] if folder is None else folder)
            self.config = full_config(model_config(self.folder), self.folder)
        except ActdsError as error:
            if folder is not None:
                raise
            raise ActdsError(
                "E005",
                error.place,
                got=error.got,
                expected="the folder of the model, for the scale and the reach of its attention",
                next_step="Name it: model=FOLDER, or org/name of the local hub cache.",
            ) from None
        self.is_checked = self._check("config", file_sha256(self.folder / "config.json"))

    def _check(self, what: str, sha256: str | None) -> bool:
        """Return whether the dataset says which it is; E014 where it is another."""
        digests = recorded(self._dataset.catalog, f"model.{what}_sha256")
        if digests and digests != (sha256,):
            raise ActdsError(
                "E014",
                f"model {self.folder}",
                got=f"another {what} than that of the rows ({(sha256 or 'none')[:16]})",
                expected=f"{', '.join(digest[:16] for digest in digests)}, by the run record",
            )
        return bool(digests)

    def scheme(self, layer: int) -> Scheme:
        """Return how a layer attends; E014 where its hooks' widths do not fit the heads."""
        hooks = self._dataset.hooks
        q, k = (hooks[f"{kind}.{layer}"].d_model for kind in "qk")
        sinks = sinks_of(self.folder, layer, n_heads_of(self.config))
        if sinks is not None:
            self._check("weights", self._weights_sha256)
        try:
            return Scheme.of(self.config, layer, q, k, sinks)
        except ValueError as error:
            expected = f"those of {n_heads_of(self.config)} heads, as {self.folder} has"
            place = f"layer {layer}"
            raise ActdsError("E014", place, got=str(error), expected=expected) from None

    @cached_property
    def _weights_sha256(self) -> str | None:
        return weights_sha256(self.folder)


class _Entropies:
    """Entropies of the tokens sampled after decode steps, and their changes, by request.

    Args:
        window: tokens before and after a step, whose mean entropies make a change.
    """

    def __init__(self, study: _Study, window: int, largest: float) -> None:
        catalog, self._window = study.dataset.catalog, window
        tables = {run: Sampled(catalog.table("sampled", run)) for run in catalog.run_ids}
        self._of: dict[int, tuple[Floats, Floats]] = {}
        for request in study.requests:
            position = np.arange(request.n_given, request.n_fed)
            after = tables[request.run].after(
                "entropy", np.full(len(position), request.number), position
            )
            entropy = after.fill_null(np.nan).to_numpy(zero_copy_only=False).astype(np.float64)
            self._of[request.index] = entropy, _changes(entropy, window)
        entropy, change = (np.concatenate(side) for side in zip(*self._of.values(), strict=True))
        entropy, change = entropy[np.isfinite(entropy)], np.abs(change[np.isfinite(change)])
        self.is_known = bool(len(change))
        self.edges: Floats = np.quantile(entropy, [0.2, 0.4, 0.6, 0.8]) if len(entropy) else entropy
        self.large = float(np.quantile(change, 1 - largest)) if len(change) else np.inf

    def at(self, request: Request, step: Ints) -> tuple[Floats, Floats, Floats]:
        """Return entropy, change, and that a window later, NaN where there is none ``(n,)``."""
        entropy, change = self._of[request.index]
        later = np.concatenate([change, np.full(self._window, np.nan)])[self._window :]
        return entropy[step - 1], change[step - 1], later[step - 1]


def _changes(entropy: Floats, window: int) -> Floats:
    """Return the mean of the entropies after each step less that of those before it ``(n,)``."""
    change = np.full(len(entropy), np.nan)
    if len(entropy) > 2 * window:
        means = np.convolve(entropy, np.full(window, 1 / window), "valid")
        change[window:-window] = means[window + 1 :] - means[: -window - 1]
    return change


class _Sums:
    """What is added up of a layer, by group of requests."""

    def __init__(self, n_heads: int, n_groups: int) -> None:
        self.strata = [(axis, name) for axis, names in STRATA.items() for name in names]
        starts = np.cumsum([0, *map(len, STRATA.values())])
        self._start = dict(zip(STRATA, starts.tolist(), strict=False))
        shape = (len(MEASURES), n_groups)
        # Weights, and weights times values.
        self.of_strata = np.zeros((2, len(self.strata), *shape))
        self.of_heads = np.zeros((2, n_heads, *shape))
        self.counts = np.zeros((2, len(self.strata), len(MEASURES)), np.int64)
        self.jumps = np.zeros((3 + 2 * _OUTCOMES, n_groups))

    def add(self, values: Rows, codes: Mapping[str, Ints], weight: Floats, group: int) -> None:
        """Add the steps of a request: ``(n, n_heads, measures)``, weights ``(n,)``."""
        known = np.isfinite(values)
        pair = np.stack([known, np.where(known, values, 0)]) * weight[:, np.newaxis, np.newaxis]
        self.of_heads[..., group] += pair.sum(axis=1)
        means = pair.mean(axis=2)
        for axis, code in codes.items():
            for place in np.unique(code[code >= 0]).tolist():
                rows, at = code == place, self._start[axis] + place
                self.of_strata[:, at, :, group] += means[:, rows].sum(axis=1)
                n = known[rows].any(axis=1).sum(axis=0)
                self.counts[:, at] += np.stack([n, n > 0])

    def values(self) -> list[AttentionValue]:
        """Return the mean of each measure in each stratum, and of each head, where there is one."""
        n_heads = self.of_heads.shape[1]
        places = [*self.strata, *(("head", str(head)) for head in range(n_heads))]
        sums = np.concatenate([self.of_strata, self.of_heads], axis=1)
        counts = np.concatenate([self.counts, self.counts[:, :1].repeat(n_heads, axis=1)], axis=1)
        return [
            AttentionValue(
                measure=MEASURES[m],
                axis=axis,
                stratum=stratum,
                value=float(x.sum() / w.sum()),
                low=interval and interval.low,
                high=interval and interval.high,
                n_steps=int(counts[0, n, m]),
                n_requests=int(counts[1, n, m]),
            )
            for n, (axis, stratum) in enumerate(places)
            for m, (w, x, interval) in enumerate(zip(*sums[:, n], _means(sums[:, n]), strict=True))
            if w.any()
        ]


def _means(sums: Floats) -> Sequence[Interval | None]:
    """Return intervals of means: of weights, and weights times values ``(2, n, n_groups)``."""
    from actds_validators.statistics.intervals import jackknife_many

    some = sums[:, :, (sums[0] > 0).any(axis=0)]
    return jackknife_many(some, _ratio) if some.shape[2] > 1 else [None] * sums.shape[1]


def _ratio(sums: Floats) -> Floats:
    ratio: Floats = np.full_like(sums[0], np.nan)
    np.divide(sums[1], sums[0], out=ratio, where=sums[0] > 1e-9)
    return ratio


class _Study:
    def __init__(
        self,
        dataset: Dataset,
        layers: Sequence[LayerRows] | Sequence[RecordedLayer],
        limits: Limits,
    ) -> None:
        self.dataset, self.layers, self.limits = dataset, layers, limits
        self.known = Requests(dataset)
        n_given = first_sampled(dataset, self.known)
        answered = np.flatnonzero(self.known.n_fed > n_given)
        if isinstance(layers[0], RecordedLayer):
            n_given = self.known.n_prompt
            answered = answered[_were_drawn(dataset, self.known.keys[answered])]
        if not len(answered):
            raise ActdsError("E014", "requests", got="no generated token", expected="answers")
        if limits.requests is not None and limits.requests < len(answered):
            rng = np.random.default_rng(limits.seed)
            answered = np.sort(rng.choice(answered, limits.requests, replace=False))
        run, number = split_key(self.known.keys[answered])
        runs = dataset.catalog.run_ids
        self.requests = [
            Request(runs[r], n, index, int(n_given[index]), int(self.known.n_fed[index]))
            for r, n, index in zip(run.tolist(), number.tolist(), answered.tolist(), strict=True)
        ]
        # Answers to one prompt are no independent ones.
        numbers: dict[object, int] = {}
        prompts = zip(self.known.source, self.known.source_row, strict=True)
        keys = (n if row is None else (source, row) for n, (source, row) in enumerate(prompts))
        clusters = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
        from actds_studies.regimes.contrast import groups_of

        cluster = clusters[answered]
        self.n_groups, group_of = groups_of((cluster, cluster), limits.seed)
        self.group = dict(zip(answered.tolist(), group_of[cluster].tolist(), strict=True))
        self.entropies = _Entropies(self, limits.window, limits.largest)
        self.sums = [_Sums(layer.n_heads, self.n_groups) for layer in layers]
        self.traces: list[list[Trace]] = [[] for _ in layers]
        longest = sorted(answered, key=lambda i: n_given[i] - self.known.n_fed[i])
        self.traced = {int(index) for index in longest[:N_TRACES]}

    def run(self, model: Model | None, progress: Callable[[str], None]) -> Attention:
        read, weights = self._read()
        for request, at, steps in read:
            progress(f"layer {self.layers[at].layer}, request {request.number:,} of {request.run}")
            of_layer = weights[at]
            weight = np.ones(len(steps.step)) if of_layer is None else of_layer[steps.row]
            self._add(at, request, steps, weight)
        if not any(layer.n_decode - layer.absent.total() for layer in self.layers):
            (reason, _), *_ = self.layers[0].absent.most_common(1)
            raise ActdsError(
                "E014",
                self.dataset.path,
                got=f"no decode step with all its keys: {reason}",
                expected="rows of q and k at every position before a step",
            )
        return self._result(model)

    def _read(self) -> tuple[Iterator[Read], list[Floats | None]]:
        """Return the attention rows, and by layer the weight of each row of the dataset."""
        dataset = self.dataset
        of_rows = [layer for layer in self.layers if isinstance(layer, LayerRows)]
        if not of_rows:
            looked_at = [layer for layer in self.layers if isinstance(layer, RecordedLayer)]
            return recorded_rows(dataset, self.requests, looked_at), [None] * len(looked_at)
        shards = [dataset.shards_of(layer.hooks[0]) for layer in of_rows]
        inclusion = [dataset.inclusion(of_layer) for of_layer in shards]
        weights = [None if of is None else 1 / np.concatenate(of) for of in inclusion]
        return attention_rows(dataset, self.requests, of_rows, self.limits.every), weights

    def _add(self, at: int, request: Request, steps: Attended, weight: Floats) -> None:
        entropy, change, later = self.entropies.at(request, steps.step)
        jump = steps.values[:, :, MEASURES.index("jump")].mean(axis=1).astype(np.float64)
        kind = np.where(np.isfinite(jump), 1, -1)
        usable = np.isfinite(jump) & np.isfinite(change) & np.isfinite(later)
        if len(known := jump[np.isfinite(jump)]) >= LEAST_STEPS:
            kind[jump > np.quantile(known, 1 - self.limits.largest)] = 0
        else:
            kind[:] = -1
        depth = np.ceil(np.log2(steps.step)).astype(np.int64)
        quintile = np.searchsorted(self.entropies.edges, entropy)
        codes = {
            "all": np.zeros(len(depth), np.int64),
            "decode step": depth,
            "role": steps.role,
            "entropy": np.where(np.isfinite(entropy), quintile, -1),
            "jump": kind,
        }
        sums, group = self.sums[at], self.group[request.index]
        sums.add(steps.values, codes, weight, group)
        is_large = np.abs(change) >= self.entropies.large
        is_large_later = np.abs(later) >= self.entropies.large
        outcomes = np.stack([is_large, is_large_later, np.abs(change), change])
        cell = depth * len(STRATA["entropy"]) + quintile
        sums.jumps[:, group] += _matched(
            kind[usable] == 0, cell[usable], outcomes[:, usable], weight[usable]
        )
        if request.index in self.traced:
            marked = steps.step[usable & is_large & (kind == 0)]
            self.traces[at].append(self._trace(request, steps, jump, entropy, marked))

    def _trace(
        self, request: Request, steps: Attended, jump: Floats, entropy: Floats, marked: Ints
    ) -> Trace:
        prompt = steps.values[:, :, MEASURES.index("prompt")].mean(axis=1)
        n = slice(N_TRACE_STEPS)
        return Trace(
            request=self.known.external_id[request.index],
            steps=steps.step[n].tolist(),
            prompt=np.round(prompt[n], 4).tolist(),
            jump=_nullable(jump[n]),
            entropy=_nullable(entropy[n]),
            marked=[step for step in marked.tolist() if step in steps.step[n]],
        )

    def _result(self, model: Model | None) -> Attention:
        layers = [self._layer(at) for at in range(len(self.layers))]
        n_decode = sum(layer.n_decode for layer in layers)
        return Attention(
            limits=self.limits,
            dataset=storable(self.dataset.path),
            **named(self.dataset),
            model_checked=model is None or model.is_checked,
            n_requests=len(self.requests),
            n_groups=self.n_groups,
            share=sum(layer.n_steps for layer in layers) / n_decode,
            answer=answer(layers, *_ends_of(layers)),
            layers=layers,
        )

    def _layer(self, at: int) -> LayerAttention:
        layer, sums = self.layers[at], self.sums[at]
        reason = "no step has all its keys" if layer.proof else "the dataset has no rows of v and z"
        proof = SelfProof(outcome="not proved", reason=reason)
        if layer.proof is not None and layer.proof.n:
            of = {name: getattr(layer.proof, name) for name in ("limit", "largest", "mean", "n")}
            proof = SelfProof(outcome="proved", **of)
        elif isinstance(layer, RecordedLayer):
            proof = SelfProof(outcome="proved", n=layer.lines.num_rows)
        scheme = layer.scheme
        return LayerAttention(
            layer=layer.layer,
            n_heads=layer.n_heads,
            n_kv_heads=None if scheme is None else scheme.n_kv_heads,
            head_dim=None if scheme is None else scheme.head_dim,
            scheme="looked at in the engine" if scheme is None else scheme.words,
            proof=proof,
            n_decode=layer.n_decode,
            n_steps=layer.n_decode - layer.absent.total(),
            absent=dict(layer.absent.most_common()),
            values=sums.values(),
            jumps=self._jumps(sums.jumps),
            traces=self.traces[at],
        )

    def _jumps(self, sums: Floats) -> Jumps:
        """Return what follows large jumps, of the sums of `_matched` by group."""
        from actds_validators.statistics.intervals import jackknife

        if not self.entropies.is_known:
            reason = "the harvest recorded no entropies of sampled tokens (actds write --entropy)"
            return Jumps(outcome="not known", reason=reason)
        n_jumps, n_matched, total, *rest = sums
        after, matched = np.split(np.array(rest), 2)
        has = total > 0
        if has.sum() < 2:
            reason = f"large jumps with a change are in {int(has.sum())} groups of requests"
            return Jumps(outcome="not known", reason=reason)

        def of(top: Floats) -> Estimate | None:
            return Estimate.of(jackknife(np.stack([total[has], top[has]]), _ratio))

        level = 1 - 0.05 / len(self.layers)
        apart = jackknife(np.stack([total[has], (after - matched)[0][has]]), _ratio)
        difference = Estimate.of(None if apart is None else apart.at(level))
        return Jumps(
            outcome=outcome_of(difference, self.limits.margin),
            n_jumps=int(n_jumps.sum()),
            n_matched=int(n_matched.sum()),
            large_change=self.entropies.large,
            after_jumps=of(after[0]),
            after_matched=of(matched[0]),
            difference=difference,
            later=of(after[1] - matched[1]),
            size=of(after[2] - matched[2]),
            direction=of(after[3] - matched[3]),
        )


def _were_drawn(dataset: Dataset, keys: npt.NDArray[np.uint64]) -> Bools:
    """Return which requests the engine has looked at ``(n,)``."""
    run, number = split_key(keys)
    drawn = np.zeros(len(keys), bool)
    for n, name in enumerate(dataset.catalog.run_ids):
        attending = attending_of(dataset.runs[name])
        if attending is not None:
            drawn[run == n] = attending.draws(number[run == n])
    return drawn


def _matched(is_jump: Bools, cell: Ints, outcomes: Floats, weight: Floats) -> Floats:
    """Return what large jumps of an answer are followed by, beside other steps of their cell.

    Args:
        cell: steps of one depth and entropy are alike ``(n,)``.
        outcomes: of each step ``(k, n)``.

    Returns:
        Jumps, those with a step to compare, their weight, and sums of the outcomes of these and of
        the means of the others in their cells, weighted alike ``(3 + 2 k,)``.
    """
    jumps = np.bincount(cell, weight * is_jump, 1)
    plain = np.bincount(cell, weight * ~is_jump, len(jumps))
    sums = np.zeros(3 + 2 * len(outcomes))
    sums[0] = is_jump.sum()
    has_pair = (jumps > 0) & (plain > 0)
    sums[1] = (is_jump & has_pair[cell]).sum()
    sums[2] = jumps[has_pair].sum()
    for n, outcome in enumerate(outcomes):
        of_jumps = np.bincount(cell, weight * is_jump * outcome, len(jumps))
        of_plain = np.bincount(cell, weight * ~is_jump * outcome, len(jumps))
        sums[3 + n] = of_jumps[has_pair].sum()
        sums[3 + len(outcomes) + n] = (of_plain[has_pair] / plain[has_pair] * jumps[has_pair]).sum()
    return sums


def _ends_of(layers: Sequence[LayerAttention]) -> tuple[str, str]:
    """Return the first band of steps, and the last that half of the requests reach."""
    bands = {
        v.stratum: v.n_requests
        for v in layers[0].values
        if (v.measure, v.axis) == ("prompt", "decode step")
    }
    most = max(bands.values(), default=0)
    reached = [band for band, n in bands.items() if 2 * n >= most]
    return (reached[0], reached[-1]) if reached else ("1", "1")


def _nullable(values: Floats) -> list[float | None]:
    return [round(v, 4) if np.isfinite(v) else None for v in values.tolist()]
