"""The page: from the datasets of the arms to README.md, pictures and figures.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from analysis import (
    COVARIATES,
    Difference,
    Estimate,
    Run,
    Stratum,
    difference,
    loss_rate,
    read,
    relative_speed,
    speed,
    strata,
)
from figures import Point, forest, rates, timeline

from actds_validators.pages.words import percent

DROPPING = ("drop_oldest", "drop_newest")
NEGLIGIBLE = 0.1
"""A standardised difference below this is customarily called negligible."""


@dataclass(frozen=True)
class Setting:
    """How the experiment was made; rates in bytes per second."""

    machine: str
    command: str
    model: str
    hooks: str
    engine: list[str]
    traffic: dict[str, Any]
    share: float
    rate: int
    written: dict[str, int]


@dataclass(frozen=True)
class Arm:
    """A harvest and its dataset."""

    name: str
    path: Path


def write_page(folder: Path, setting: Setting, arms: list[Arm]) -> None:
    """Write page, pictures and figures into a folder."""
    runs = {arm.name: read(arm.path) for arm in arms}
    names = [n for n in COVARIATES if all(n in runs[p].tokens for p in DROPPING)]
    found = {p: {n: difference(runs[p], n) for n in names} for p in DROPPING}
    layers = {p: {n: strata(runs[p], n) for n in ("batch_tokens", "context")} for p in DROPPING}
    phases = {p: _phases(runs[p]) for p in DROPPING}
    speeds = {n: relative_speed(run, runs["plain"]) for n, run in runs.items() if n != "plain"}
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "timeline.svg": _timeline(runs),
        "loss_rates.svg": _rates(runs, layers, phases),
        "differences.svg": _forest(names, found),
        "speed.svg": forest(
            "speed",
            "Engine speed under each policy",
            list(speeds),
            [("", [_triple(e) for e in speeds.values()])],
            "tokens per busy second, relative to the first plain run",
            around=1.0,
            x_text=percent,
        ),
    }
    for name, picture in pictures.items():
        (folder / name).write_text(picture)
    text = _page(setting, runs, speeds, found, layers, phases)
    (folder / "README.md").write_text(text)
    figures = {
        "setting": asdict(setting),
        "tokens_per_busy_s": {n: asdict(speed(run)) for n, run in runs.items()},
        "relative_speed": {n: asdict(e) for n, e in speeds.items()},
        "lost_share": {n: asdict(loss_rate(run)) for n, run in runs.items()},
        "loss_rate_by_phase": {
            p: {name: asdict(e) for name, e in phases[p].items()} for p in DROPPING
        },
        "loss_rate_by_decile": {
            p: {n: [asdict(s) for s in found_] for n, found_ in layers[p].items()} for p in DROPPING
        },
        "difference": {p: {n: asdict(d) for n, d in found[p].items()} for p in DROPPING},
        "stalls": {n: run.stalls for n, run in runs.items()},
    }
    (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")


def _phases(run: Run) -> dict[str, Estimate]:
    prefill = run.tokens["prefill"] > 0
    return {"prefill": loss_rate(run, prefill), "decode": loss_rate(run, ~prefill)}


def _triple(e: Estimate) -> Point:
    return e.value, e.low, e.high


def _timeline(runs: dict[str, Run]) -> str:
    shown = {n: run for n, run in runs.items() if n != "plain again"}
    seconds = min(60.0, max(float(run.t_s.max()) for run in shown.values()))
    return timeline(
        [(n, run.t_s, run.tokens["lost"]) for n, run in shown.items()], seconds, seconds / 120
    )


def _label(s: Stratum) -> str:
    return f"{s.low:.0f}" if round(s.low) == round(s.high) else f"{s.low:.0f}–{s.high:.0f}"


def _rates(
    runs: dict[str, Run],
    layers: dict[str, dict[str, list[Stratum]]],
    phases: dict[str, dict[str, Estimate]],
) -> str:
    grid = []
    for policy in DROPPING:
        panels = [
            (words, [(_label(s), _triple(s.rate)) for s in layers[policy][name]])
            for name, words in (
                ("batch_tokens", "tokens in the step (deciles)"),
                ("context", "context length in tokens (deciles)"),
            )
        ]
        panels.append(("phase", [(n, _triple(e)) for n, e in phases[policy].items()]))
        grid.append((policy, loss_rate(runs[policy]).value, panels))
    return rates(grid)


def _forest(names: list[str], found: dict[str, dict[str, Difference]]) -> str:
    return forest(
        "differences",
        "Standardised differences of the lost tokens",
        [COVARIATES[n] for n in names],
        [(p, [_triple(e) if (e := found[p][n].smd) else None for n in names]) for p in DROPPING],
        "lost minus all, in standard deviations of all",
        around=0.0,
        band=NEGLIGIBLE,
    )


def verdict(d: Difference) -> str:
    """Return what an interval allows to say."""
    e = d.smd
    if e is None:
        return "not settled"
    if min(abs(e.low), abs(e.high)) > NEGLIGIBLE and e.low * e.high > 0:
        return "higher" if e.value > 0 else "lower"
    if max(abs(e.low), abs(e.high)) < NEGLIGIBLE:
        return "alike"
    return "not settled"


def _interval(e: Estimate, scale: float = 1.0, digits: int = 2, unit: str = "") -> str:
    low, value, high = (f"{scale * v:.{digits}f}" for v in (e.low, e.value, e.high))
    return f"{value}{unit} [{low}, {high}]"


def _share(e: Estimate) -> str:
    """Return a share of all in per cent; no share lies outside of 0 and 1."""
    inside = Estimate(e.value, max(e.low, 0.0), min(e.high, 1.0))
    return _interval(inside, 100, 1, " %")


def _page(
    setting: Setting,
    runs: dict[str, Run],
    speeds: dict[str, Estimate],
    found: dict[str, dict[str, Difference]],
    layers: dict[str, dict[str, list[Stratum]]],
    phases: dict[str, dict[str, Estimate]],
) -> str:
    lines = [
        "# Is what a slow disk costs like what it leaves?",
        "",
        "*Written by `run.py` from the run it describes; do not edit.*",
        "",
        _summary(runs, speeds, found),
        "",
        "## The experiment",
        "",
        *_setting(setting, runs),
        "",
        "## What each policy cost",
        "",
        "| run | engine, tokens per busy second | relative to plain | lost tokens | dropped steps "
        "| stalls |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_row(name, run, speeds) for name, run in runs.items()),
        "",
        "Busy means that at least one request was there. Intervals are 95 %, from leaving out one "
        "burst at a time. *Plain again* is the first run repeated: how far it lies from 100 % is "
        "what such a comparison cannot see on this machine.",
        "A stall is a wait for room in the named stage: `staging` is the engine itself, `ring` the "
        "transfer behind it, `pool` the writer that waits for the disk.",
        "",
        "![Engine speed under each policy](speed.svg)",
        "",
        "![Stored and lost tokens along the runs](timeline.svg)",
        "",
        "## Loss by batch, length and phase",
        "",
        "Under `block` nothing is lost. Under the other two, the share of tokens lost, by tokens "
        "in the step, by context length and by phase; the grey line is the share over all tokens.",
        "",
        "![Loss rates by batch, context length and phase](loss_rates.svg)",
        "",
        "| policy | prefill lost | decode lost | smallest to largest batch | shortest to longest "
        "context |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| `{p}` | {_share(phases[p]['prefill'])} | {_share(phases[p]['decode'])} | "
            f"{_ends(layers[p]['batch_tokens'])} | {_ends(layers[p]['context'])} |"
            for p in DROPPING
        ),
        "",
        "## How far the lost tokens lie from all tokens",
        "",
        "Mean of the lost minus mean of all, in standard deviations of all (SMD). The grey band "
        f"is ±{NEGLIGIBLE:g}, customarily called negligible. `p` is the share of circular shifts "
        "of the losses along the run that lie as far out; it is given for each comparison alone, "
        "without a correction for their number.",
        "",
        "![Standardised differences of the lost tokens](differences.svg)",
        "",
        "| what | policy | SMD | p (shift) | the lost tokens' mean is |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {COVARIATES[name]} | `{p}` | {_interval(d.smd) if d.smd else 'none'} | "
            f"{'none' if d.p is None else f'{d.p:.3f}'} | {verdict(d)} |"
            for name in found[DROPPING[0]]
            for p in DROPPING
            for d in (found[p][name],)
        ),
        "",
        "*Higher* and *lower*: the whole interval lies beyond the band. *Alike*: the whole "
        "interval lies within it. *Not settled*: neither, and more bursts would be needed.",
        "",
        "## What this does and does not say",
        "",
        *_limits(setting),
        "",
    ]
    return "\n".join(lines)


def _summary(
    runs: dict[str, Run],
    speeds: dict[str, Estimate],
    found: dict[str, dict[str, Difference]],
) -> str:
    said = []
    for p in DROPPING:
        words = [
            f"{COVARIATES[n]} {verdict(d)} ({f'SMD {d.smd.value:+.2f}' if d.smd else 'no SMD'})"
            for n, d in found[p].items()
            if n in ("batch_tokens", "context", "prefill")
        ]
        said.append(
            f"`{p}` lost {_share(loss_rate(runs[p]))} of the tokens, and of the lost ones, "
            f"against all: {'; '.join(words)}."
        )
    return (
        "Under `block` nothing was lost and the engine ran at "
        f"{_interval(speeds['block'], 100, 0, ' %')} of its plain speed. "
        f"{' '.join(said)} In this run, then, loss under backpressure was "
        f"{_at_random(found)}. This is one model, one machine and one kind of traffic."
    )


def _at_random(found: dict[str, dict[str, Difference]]) -> str:
    asked = ("batch_tokens", "context", "prefill")
    verdicts = [verdict(found[p][n]) for p in DROPPING for n in asked]
    if any(v in ("higher", "lower") for v in verdicts):
        return "not a random thinning of the data: it depends on what was being computed"
    if all(v == "alike" for v in verdicts):
        return "close to a random thinning of the data, as far as these three covariates show"
    return "not shown to differ from a random thinning, nor shown to be one"


def _row(name: str, run: Run, speeds: dict[str, Estimate]) -> str:
    relative = _interval(speeds[name], 100, 0, " %") if name in speeds else "100 %"
    stalls = "; ".join(
        f"{n} at {stage}, {seconds:.1f} s" for stage, (n, seconds) in sorted(run.stalls.items())
    )
    lost = f"{_share(loss_rate(run))}" if run.n_drops else "0"
    return (
        f"| {name if name.startswith('plain') else f'`{name}`'} | {_interval(speed(run), 1, 0)} | "
        f"{relative} | {lost} | {run.n_drops:,} of {run.n_steps:,} | {stalls or 'none'} |"
    )


def _ends(found: list[Stratum]) -> str:
    first, last = found[0], found[-1]
    return (
        f"{100 * first.rate.value:.0f} % ({_label(first)}) to "
        f"{100 * last.rate.value:.0f} % ({_label(last)})"
    )


def _setting(setting: Setting, runs: dict[str, Run]) -> list[str]:
    t = setting.traffic
    plain = runs["plain"]
    model = setting.model or (
        "a Llama of 4 layers and 512 channels with random weights and a byte tokenizer"
    )
    return [
        f"- **Engine**: vLLM on the CPU, {model}; `{'`, `'.join(setting.engine)}`; hooks "
        f"`{setting.hooks}`, readouts on.",
        f"- **Traffic**: {t['n_bursts']} bursts of {t['requests_per_burst']:g} requests on average "
        f"(Poisson), {t['spread_s']:g} s between two of a burst and {t['pause_s']:g} s between two "
        "bursts on average (exponential); the next burst waits until the last one is served. "
        f"Prompts of {t['prompt_tokens'][0]:g} tokens (median; log-normal, sigma "
        f"{t['prompt_tokens'][1]:g}) cut from Python's standard library, and "
        f"{t['generated_tokens'][0]:g} to generate (sigma {t['generated_tokens'][1]:g}). "
        f"Seed {t['seed']} everywhere; {len(plain.tokens['lost']):,} tokens in "
        f"{plain.n_steps:,} steps.",
        f"- **Disk**: every write below the dataset's folder goes through a preloaded library "
        f"(`testing/actds_testing/faulty_disk.c`) that lets {setting.rate / 1e6:.2f} MB/s pass: "
        f"{100 * setting.share:.0f} % of what the plain run wrote per busy second. The rings are "
        "as small as the engine's step allows, and a shard has 64 rows, so that a burst does "
        "not fit into memory.",
        "- **Figures**: read from the datasets' own tables (requests, steps, spans, tokens, drops, "
        "stalls, readouts) only. Before anything is computed, rows, drop log and census must name "
        "the same number of positions. `figures.json` holds every number.",
        f"- **Machine**: {setting.machine}.",
        f"- **Again**: `{setting.command}`",
    ]


def _limits(setting: Setting) -> list[str]:
    model = "" if setting.model else " The model's weights are random, which is enough for when "
    model += "" if setting.model else "steps come and how large they are, and not for what the "
    model += "" if setting.model else "rows hold: the readout line says nothing about a real model."
    return [
        "- The unit of evidence is the burst, not the token: drops take whole steps and follow one "
        "another, so a p-value over tokens would call any loss significant. The shift keeps the "
        "bursts of both series and only moves one along the other.",
        "- It is an association in this run. Batch, phase, length and time since the burst began "
        "hang together: a burst opens with prefill in large steps while the buffers are empty, and "
        "goes on with decode while they are full. The tables do not say which of them is the "
        "cause, and the sign of an association may turn with buffer sizes, disk speed and traffic.",
        "- The disk was throttled in `write`; a real one may be slow in `fsync`, in bursts of its "
        "own, or because of other tenants.",
        f"- Other work on the same cores changes the speed column; the losses less.{model}",
        "- What to take from it: with a policy that drops, look at the drop log before training. "
        "It names every lost position with the step, the batch and the queues of the moment, so "
        "the same tables can be made for any dataset, and weights for them.",
    ]
