"""Alerts of a dataset: which requests left the regime of a profile, where, and how many may."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from scipy import special  # type: ignore[import-untyped]

from actds.errors import ActdsError
from actds.explore.dataset import Dataset, open_apart
from actds.explore.requests import Tokenizer
from actds.format import canonical
from actds.format.canonical import MAX_DOCUMENT_NBYTES
from actds.format.profile import OPENING, Calibration, Kept, Look, Profile, features
from actds.format.telemetry import KINDS, profile_entry
from actds_studies.monitoring import Looks, Rows, kept, need_entropy, read_rows, regime_in, score
from actds_validators.sections import Document, LimitsSection, Section

AROUND = 24
"""Tokens of text on either side of an alert."""
MAX_TEXTS = 500
"""Alerts with their text, those with the highest scores: each is looked up in the dataset."""
_N_TRACES = 8


class AlertLimits(LimitsSection):
    """The settings of what is said of a rate of alerts."""

    options: ClassVar = frozenset[str]()

    p: float = Field(
        default=0.01, gt=0, lt=1, description="chance of as many alerts in the regime: departed"
    )


class Alert(Section):
    """A request whose trajectory left the regime."""

    run: str
    request: int
    external_id: str
    position: int = Field(description="of the row after which its score was first above")
    depth: int = Field(description="the same, from the end of the prompt")
    role: str = Field(description="of the position, empty where it is not known")
    kind: str = Field(description="what was rare: drift of the last 8 looks, or the opening")
    score: float = Field(description="at the end, in nats")
    before: str = Field(description="text up to the position, or tokens without a tokenizer")
    after: str = Field(description="the text that follows")


class Unusual(Section):
    """How unusual rows are beside those of the profile, in nats: 0.69 and 3.0 in the regime."""

    name: str = Field(description="phase, and role of a prompt")
    n_rows: int
    median: float
    high: float = Field(description="of 95 % of the rows no more")


class Trace(Section):
    """Scores of a request by depth."""

    request: int
    depth: list[int]
    score: list[float]


class Recorded(Section):
    """Alerts in the dataset's own table, beside those that its readouts give."""

    n: int = Field(description="requests with alerts")
    n_unlike: int = Field(description="with an alert in one of the two alone, or elsewhere")


class AlertsAnswer(Section):
    """What the alerts come to."""

    outcome: Literal["in the regime", "departed", "undecided"]
    words: str
    next_steps: list[str]


class Alerts(Document):
    """Requests whose readouts left the regime of a profile."""

    schema_: Literal["actds.alerts/1"] = Field(default="actds.alerts/1", alias="schema")
    path: str
    digest: str = Field(description="of the dataset's seal")
    profile: str = Field(description="SHA-256 of the profile")
    profile_dataset: str
    profile_digest: str = Field(description="of the seal of the profile's dataset")
    profile_created_ns: int
    hooks: list[str]
    look: Look
    limits: AlertLimits
    calibration: Calibration
    promised: list[Kept] = Field(description="of requests of the profile's dataset")
    differences: list[str] = Field(description="from the profile's regime, accepted by the caller")
    n_requests: int
    n_seen: int = Field(description="of these, chosen to be looked at")
    n_blind: int = Field(description="of these, without a look: too short, or no entropy as high")
    n_adapted: int = Field(description="left out, since an adapter changed the weights")
    n_looks: int
    n_lost: int = Field(description="positions without readouts, which no look was at")
    recorded: Recorded | None = Field(description="by the runs themselves, of the same profile")
    rates: list[Kept]
    p: float | None = Field(description="of as many alerts, were these requests of the regime")
    parts: list[Unusual]
    alerts: list[Alert]
    usual: list[tuple[int, float, float]] = Field(
        description="first depth of a band; median and 95 % of the scores of the others in it"
    )
    traces: list[Trace] = Field(description="of the requests with the highest scores")
    answer: AlertsAnswer


def alerts(
    dataset: str | os.PathLike[str] | Dataset,
    profile: str | os.PathLike[str] | Profile | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    other_regime: bool = False,
    limits: AlertLimits | None = None,
) -> Alerts:
    """Return which requests of a sealed dataset left the regime of a profile, and where.

    Args:
        dataset: path or URI, or an open one, with readouts.
        profile: a profile, or its file; by default that which the runs were served beside.
        tokenizer: decodes the text around an alert.
        other_regime: score rows of other weights or precision, to see how far they are: what the
            profile promises does not hold for them. Hooks and readouts have to be the same.
        limits: of what is said.

    Raises:
        ActdsError: E014 no readouts, no entropy, or no profile that all runs have; E024 another
            regime, or no profile; and as ``actds.open``.
    """
    opened = dataset if isinstance(dataset, Dataset) else open_apart(os.fspath(dataset))
    if profile is None:
        profile = _served_beside(opened)
    given = profile if isinstance(profile, Profile) else Profile.read(profile)
    regime = regime_in(opened, given.hooks)
    differences = given.differences(regime)
    if not other_regime or any(d.startswith(("hooks", "capture.")) for d in differences):
        given.require(regime, opened.path)
    everything = read_rows(opened, given.hooks)
    need_entropy(opened, given.look, everything)
    seen = np.concatenate(
        [
            given.look.requests(run, everything.requests[everything.runs == run])
            for run in dict.fromkeys(everything.runs.tolist())
        ]
    )
    scored = score(given, everything.only(seen[everything.of]))
    threshold, chosen = given.calibration, np.flatnonzero(seen)
    rates = kept(scored, chosen, everything.lengths(), threshold)
    first = {} if threshold.threshold is None else scored.first_above(threshold.threshold)
    p = _chance(threshold, rates)
    limits = limits or AlertLimits()
    last = scored.last
    looked = np.bincount(scored.rows.of, minlength=len(seen)) > 0
    return Alerts(
        path=opened.path,
        digest=opened.digest,
        profile=given.sha256,
        profile_dataset=given.dataset,
        profile_digest=given.digest,
        profile_created_ns=given.created_ns,
        hooks=given.hooks,
        look=given.look,
        limits=limits,
        calibration=threshold,
        promised=given.kept,
        differences=differences,
        n_requests=len(seen),
        n_seen=len(chosen),
        n_blind=int((~looked[chosen]).sum()),
        n_adapted=everything.n_adapted,
        n_looks=len(scored.rows.of),
        n_lost=everything.n_lost,
        recorded=_recorded(opened, given, scored, first),
        rates=rates,
        p=p,
        parts=list(_parts(given, everything)),
        alerts=[
            _alert(opened if k < MAX_TEXTS else None, scored, r, at, tokenizer)
            for k, (r, at) in enumerate(sorted(first.items(), key=lambda hit: -last[hit[0]]))
        ],
        usual=_usual(scored, first),
        traces=[_trace(scored, r) for r in np.argsort(-last)[:_N_TRACES].tolist()],
        answer=_answer(threshold, rates, p, limits, differences),
    )


def _served_beside(dataset: Dataset) -> Profile:
    """Return the profile of all runs of a dataset."""
    entries = [profile_entry(record) for record in dataset.runs.values()]
    first = entries[0] if entries else None
    if first is None or any(e is None or e.sha256 != first.sha256 for e in entries):
        got = "runs without a profile, or with several"
        next_step = "Name one of actds profile: profile=FILE."
        raise ActdsError("E014", dataset.path, got=got, expected="one", next_step=next_step)
    data = dataset.catalog.store.read(first.path, MAX_DOCUMENT_NBYTES, first.sha256)
    return Profile.parse(bytes(data), first.path)


def _recorded(
    dataset: Dataset, profile: Profile, scored: Looks, first: dict[int, int]
) -> Recorded | None:
    """Return what the runs have recorded, where that was beside the same profile."""
    data, rows = canonical.digest(profile.as_bytes()), scored.rows
    entries = [profile_entry(record) for record in dataset.runs.values()]
    if not entries or any(entry is None or entry.sha256 != data for entry in entries):
        return None
    recorded: dict[tuple[str, int], int] = {}
    for run in dataset.catalog.run_ids:
        lines = dataset.catalog.table("alerts", run).select(["request", "position"])
        for request, position in zip(*lines.to_pydict().values(), strict=True):
            key = run, request
            recorded[key] = min(position, recorded.get(key, position))
    again = {
        (str(rows.runs[n]), int(rows.requests[n])): int(rows.position[at])
        for n, at in first.items()
    }
    unlike = {key for key, _ in recorded.items() ^ again.items()}
    return Recorded(n=len(recorded), n_unlike=len(unlike))


def _chance(threshold: Calibration, rates: Sequence[Kept]) -> float | None:
    """Return the chance of as many alerts or more if the requests are as those of the calibration.

    The threshold is one of their scores: the number above it is beta-binomial, which allows for the
    calibration's own chance, and holds exactly whatever the scores are.
    """
    if not rates:
        return None
    above, below = threshold.n + 1 - threshold.rank, threshold.rank
    n, hits = rates[0].n, np.arange(rates[0].n_alerts, rates[0].n + 1)
    ways = -special.betaln(hits + 1, n - hits + 1) - np.log(n + 1)
    logs = ways + special.betaln(hits + above, n - hits + below) - special.betaln(above, below)
    return min(1.0, float(np.exp(logs).sum()))


def _parts(profile: Profile, rows: Rows) -> Iterator[Unusual]:
    """Yield how unusual rows are beside those of their phase and role, and answers beside prompts.

    Of prompts a part alone has rows: the prefix cache computes none.
    """
    chosen = {
        "decode": rows.depth >= 0,
        "opening": (rows.depth < 0) & (rows.depth >= -OPENING),
        "prefill": (rows.depth < 0) & (rows.position > 0),
    }
    for phase, role in profile.parts:
        here = chosen[phase] & (True if role is None else rows.role == role)
        named = [(f"{phase} {role or ''}".strip(), here)]
        if (phase, role) == ("prefill", None):
            named.append(("decode beside prefill", chosen["decode"]))
        for name, some in named:
            if some.any():
                place = (rows.position if phase == "prefill" else rows.depth)[some]
                nats = profile.distances(features(rows.readouts[some]), place, phase, role)
                median, high = np.quantile(nats, (0.5, 0.95)).tolist()
                yield Unusual(name=name, n_rows=len(nats), median=median, high=high)


def _alert(
    dataset: Dataset | None, scored: Looks, number: int, at: int, tokenizer: Tokenizer | None
) -> Alert:
    rows = scored.rows
    run, request, position = (
        str(rows.runs[number]),
        int(rows.requests[number]),
        int(rows.position[at]),
    )
    start, stop, words = max(0, position + 1 - AROUND), position + 1 + AROUND, [""]
    if dataset is not None:
        places = dataset.request(request, run=run)
        words = [f" {token}" for token in places.token_id[start:stop].tolist()]
        words = words if tokenizer is None else places.pieces(tokenizer, start, stop)
    cut = position + 1 - start
    return Alert(
        run=run,
        request=request,
        external_id=str(rows.names[number]),
        position=position,
        depth=int(rows.depth[at]),
        role=str(rows.role[at]),
        kind=KINDS[int(scored.kind[at])],
        score=float(scored.last[number]),
        before="".join(words[:cut]),
        after="".join(words[cut:]),
    )


def _usual(scored: Looks, first: dict[int, int]) -> list[tuple[int, float, float]]:
    """Return median and 95 % of the scores of requests without an alert, by doubling depths."""
    plain = ~np.isin(scored.rows.of, list(first))
    depth, scores = scored.rows.depth[plain], scored.scores[plain]
    bands = np.where(depth > 0, 2 ** np.log2(np.maximum(depth, 1)).astype(np.int64), 0)
    quantiles = {
        band: np.quantile(scores[bands == band], (0.5, 0.95)).tolist()
        for band in np.unique(bands).tolist()
    }
    return [(band, median, high) for band, (median, high) in quantiles.items()]


def _trace(scored: Looks, number: int) -> Trace:
    at = np.flatnonzero(scored.rows.of == number)
    depth, path = scored.rows.depth[at].tolist(), scored.scores[at].tolist()
    return Trace(request=int(scored.rows.requests[number]), depth=depth, score=path)


def _answer(
    threshold: Calibration,
    rates: Sequence[Kept],
    p: float | None,
    limits: AlertLimits,
    differences: Sequence[str],
) -> AlertsAnswer:
    if threshold.threshold is None or p is None or not rates:
        need = int(np.ceil(1 / threshold.alpha - 1 - 1e-9))
        words = f"Undecided: {threshold.n} held-out requests promise no {threshold.alpha:.3g}"
        steps = [f"Fit a profile with {need:,} held-out requests or more, or a larger alpha."]
        if threshold.threshold is not None:
            words, steps = "Undecided: no request was looked at", ["Serve more requests."]
        return AlertsAnswer(outcome="undecided", words=words, next_steps=steps)
    rate = rates[0]
    shares = (
        f"{rate.n_alerts:,} of {rate.n:,} answers ({rate.n_alerts / rate.n:.1%}) left the regime, "
        f"{threshold.alpha:.1%} of usual ones may"
    )
    if p < limits.p:
        steps = [
            "Read the text of the alerts: what do they have in common?",
            "Do not apply dictionaries or probes of the regime to these answers unchecked.",
            "If this traffic is to stay, harvest it, and fit a profile and a dictionary to it.",
        ]
        return AlertsAnswer(outcome="departed", words=f"Departed: {shares}", next_steps=steps)
    if differences:
        words = f"Undecided: another regime by its record, and readouts do not show it. {shares}"
        steps = ["Believe the record: fit a profile to a dataset of these weights and precision."]
        return AlertsAnswer(outcome="undecided", words=words, next_steps=steps)
    steps = ["Nothing: false alarms are expected at the promised rate."]
    return AlertsAnswer(outcome="in the regime", words=f"In the regime: {shares}", next_steps=steps)
