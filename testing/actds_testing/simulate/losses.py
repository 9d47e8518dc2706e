"""Which rows are lost, and the truth about it. Right of rows and pipeline.

Every mechanism has a known probability for each step or row; only the queue has none but its own
outcome, because nothing in it is left to chance once traffic and disk are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from actds_testing.simulate.content import Computed, Rows
from actds_testing.simulate.pipeline import Pipeline
from actds_testing.simulate.scenario import Scenario

__all__ = ["LOAD_HALF_LIFE", "Truth", "covariates", "draw_losses", "load_of", "tell_truth"]

LOAD_HALF_LIFE = 8.0
"""Steps after which a step counts half in the load."""

Kind = Literal["none", "MCAR", "MAR", "MNAR"]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Truth:
    """What is known of a simulated loss because it was made.

    Args:
        kind: ``none``; ``MCAR``, no dependence; ``MAR``, on the load, which the steps table
            shows; ``MNAR``, on the value or the token of the row itself.
        depends_on: ``nothing``, ``load``, ``norm``, ``projection`` or ``rarity``.
        whole_steps: whether a step is lost as a whole.
        step_probability: probability that a step loses a row drawn from it, float64
            ``(n_steps,)``; for the queue 1 where it did and 0 elsewhere.
        row_probability: probability of each computed row, float64 ``(n_computed,)``.
        loss_share: share of the computed rows that is lost, as it came out.
        smd: by covariate, the mean of the lost rows less that of all, in standard deviations of
            all, as the probabilities make it in expectation.
        bias: the same of the stored rows less all: what training on them would see.
    """

    kind: Kind
    depends_on: str
    whole_steps: bool
    step_probability: Floats
    row_probability: Floats
    loss_share: float
    smd: dict[str, float]
    bias: dict[str, float]


_KINDS: dict[str, Kind] = {
    "none": "none",
    "mcar_steps": "MCAR",
    "mcar_bursts": "MCAR",
    "few_events": "MCAR",
    "mar_load": "MAR",
    "queue": "MAR",
    "mnar_rows": "MNAR",
    "mnar_steps": "MNAR",
}


def load_of(n_tokens: npt.NDArray[Any]) -> Floats:
    """Return the load: the exponential moving average of the tokens per step, ``(n_steps,)``.

    A step counts half after ``LOAD_HALF_LIFE`` steps; the average begins at the overall mean.
    """
    keep = 0.5 ** (1 / LOAD_HALF_LIFE)
    out = np.empty(len(n_tokens))
    state = float(np.mean(n_tokens))
    for i, n in enumerate(n_tokens.tolist()):
        state = out[i] = keep * state + (1 - keep) * n
    return out


def draw_losses(
    scenario: Scenario,
    computed: Computed,
    rows: Rows,
    n_tokens: npt.NDArray[np.int64],
    pipeline: Pipeline,
    rng: np.random.Generator,
) -> tuple[Bools, Floats]:
    """Return which computed rows are lost, and the probability of each.

    - ``mcar_steps``: each step with probability ``rate``.
    - ``mcar_bursts``: bursts of steps, geometric of mean ``burst_steps``, with geometric gaps
      between them such that a share ``rate`` of the steps is lost.
    - ``few_events``: ``n_events`` bursts of equal length at random places, together a share
      ``rate`` of the steps.
    - ``mar_load``: each step with a probability proportional to exp(``strength`` z), z the
      standardised load (``load_of``).
    - ``mnar_rows``: each row with a probability proportional to exp(``strength`` z), z the
      standardised norm, projection or rarity; rows of a step are lost one by one.
    - ``mnar_steps``: each step likewise, z that of the mean of its rows.
    - ``queue``: what the pipeline dropped.

    Every z is cut at 4 on both sides, and the factor is such that a row is lost with probability
    ``rate``.
    """
    step, n_steps = computed.step, len(n_tokens)
    rate = scenario.rate or 0.0
    if scenario.mechanism == "mnar_rows":
        p = _tilted(_looked_at(scenario, computed, rows), None, rate, scenario.strength)
        return rng.random(len(p)) < p, p
    match scenario.mechanism:
        case "none":
            p_step, lost = np.zeros(n_steps), np.zeros(n_steps, bool)
        case "queue":
            lost = np.zeros(n_steps, bool)
            lost[list(pipeline.dropped)] = True
            p_step = lost.astype(float)
        case "mcar_bursts":
            p_step, lost = np.full(n_steps, rate), _bursts(scenario, n_steps, rng)
        case "few_events":
            p_step, lost = np.full(n_steps, rate), _events(scenario, n_steps, rng)
        case "mcar_steps":
            p_step = np.full(n_steps, rate)
            lost = rng.random(n_steps) < p_step
        case "mar_load":
            p_step = _tilted(load_of(n_tokens), n_tokens, rate, scenario.strength)
            lost = rng.random(n_steps) < p_step
        case "mnar_steps":
            of_rows = _looked_at(scenario, computed, rows)
            mean = np.bincount(step, of_rows, n_steps) / n_tokens
            p_step = _tilted(mean, n_tokens, rate, scenario.strength)
            lost = rng.random(n_steps) < p_step
    some = rng.random(len(step)) < scenario.lost_part if scenario.lost_part < 1 else True
    return lost[step] & some, p_step[step] * scenario.lost_part


def _looked_at(scenario: Scenario, computed: Computed, rows: Rows) -> Floats:
    column = {"norm": 0, "projection": 1}.get(scenario.depends_on)
    found = computed.rarity if column is None else rows.readouts[:, column]
    return found.astype(np.float64)


def _tilted(
    x: Floats, weights: npt.NDArray[np.int64] | None, rate: float, strength: float
) -> Floats:
    """Return probabilities that grow with x and have the mean ``rate``."""
    mean = np.average(x, weights=weights)
    sd = np.sqrt(np.average((x - mean) ** 2, weights=weights))
    relative = np.exp(strength * np.clip((x - mean) / max(sd, 1e-12), -4, 4))
    factor = rate / np.average(relative, weights=weights)
    for _ in range(20):  # what is cut at 1 has to be made up for
        p: Floats = np.minimum(factor * relative, 1.0)
        got = np.average(p, weights=weights)
        if not rate or abs(got / rate - 1) < 1e-6:
            break
        factor *= rate / got
    return p


def _bursts(scenario: Scenario, n_steps: int, rng: np.random.Generator) -> Bools:
    lost = np.zeros(n_steps, bool)
    if not scenario.rate:
        return lost
    gap = scenario.burst_steps * (1 - scenario.rate) / scenario.rate
    at = int(rng.geometric(1 / gap)) - 1
    while at < n_steps:
        length = int(rng.geometric(1 / scenario.burst_steps))
        lost[at : at + length] = True
        at += length + int(rng.geometric(1 / gap))
    return lost


def _events(scenario: Scenario, n_steps: int, rng: np.random.Generator) -> Bools:
    lost = np.zeros(n_steps, bool)
    length = round((scenario.rate or 0.0) * n_steps / scenario.n_events)
    for begin in rng.integers(0, max(1, n_steps - length), scenario.n_events):
        lost[begin : begin + length] = True
    return lost


def covariates(
    computed: Computed,
    rows: Rows,
    prompt: npt.NDArray[Any],
    n_tokens: npt.NDArray[Any],
) -> dict[str, npt.NDArray[Any]]:
    """Return a number per computed row for every covariate, ``(n_computed,)`` each."""
    found: dict[str, npt.NDArray[Any]] = {
        "batch_tokens": n_tokens[computed.step],
        "load": load_of(n_tokens)[computed.step],
        "position": computed.position,
        "prompt_len": prompt[computed.request],
        "prefill": computed.prefill,
        "rarity": computed.rarity,
        "norm": rows.readouts[:, 0],
    }
    for k in range(rows.readouts.shape[1] - 1):
        found[f"projection_{k}"] = rows.readouts[:, 1 + k]
    return found


def tell_truth(
    scenario: Scenario,
    computed: Computed,
    lost: Bools,
    p: Floats,
    by_name: dict[str, npt.NDArray[Any]],
    n_steps: int,
) -> Truth:
    """Return the truth about a loss whose probabilities are known."""
    depends = "nothing"
    if scenario.mechanism in ("mar_load", "queue"):
        depends = "load"
    elif scenario.mechanism in ("mnar_rows", "mnar_steps"):
        depends = scenario.depends_on
    total, share = float(p.sum()), float(p.mean())
    # Equal probabilities leave every mean as it is, to the last bit.
    level = total == 0 or bool((p == p[0]).all())
    smd: dict[str, float] = {}
    bias: dict[str, float] = {}
    for name, values in by_name.items():
        x = values.astype(np.float64)
        sd = float(x.std())
        off = 0.0 if level or not sd else float((p @ x / total - x.mean()) / sd)
        smd[name] = off
        bias[name] = -off * share / (1 - share) if share < 1 else 0.0
    n_tokens = np.bincount(computed.step, minlength=n_steps)
    return Truth(
        kind=_KINDS[scenario.mechanism],
        depends_on=depends,
        whole_steps=scenario.mechanism != "mnar_rows",
        step_probability=np.bincount(computed.step, p, n_steps) / n_tokens,
        row_probability=p,
        loss_share=float(lost.mean()),
        smd=smd,
        bias=bias,
    )
