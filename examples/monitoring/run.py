"""Can readouts tell that answers left the regime? Planted departures, a real engine.

    python examples/monitoring/run.py [--out build/monitoring]

serves traffic.py with vLLM on the CPU, fits profiles to the honest part, and writes figures.json
and the tables of README.md beside this file. What is in --out is kept: a run that was cut off goes
on. About an hour on two cores; demo/model is made by `make demo`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import traffic  # noqa: E402

import actds  # noqa: E402
from actds.format.profile import Calibration, Look, Profile, features  # noqa: E402
from actds.format.telemetry import KINDS  # noqa: E402
from actds_studies.monitoring import (  # noqa: E402
    LENGTHS,
    Looks,
    Rows,
    fit,
    read_rows,
    regime_in,
    score,
)
from actds_studies.view.requests import read_tokenizer  # noqa: E402
from actds_testing.harvest import ENGINE_ENVIRONMENT  # noqa: E402
from actds_testing.places import DEMO_MODEL  # noqa: E402
from actds_validators.statistics.design import exact_share  # noqa: E402

HOOKS = "resid_post:10,20,28"
OPTIONS = (
    "--hooks", HOOKS, "--max-tokens", "96", "--temperature", "0.7", "--engine-arg", "block_size=32",
    "--engine-arg", "max_model_len=2048", "--engine-arg", "enforce_eager=true", "--no-check",
    "--quiet",
)  # fmt: skip
ARMS = (
    "same",
    "system",
    "storyteller",
    "language",
    "jailbreak",
    "loops",
    "long loops",
    "int8",
    "int4",
)
ALPHA, N_SPLITS, N_PROBES, N_PROJECTIONS = 0.05, 20, 16, 8
N_FEW = 3
"""Splits of all that is not the default."""
SHARES = (1 / 3, 1 / 3)
"""Of the honest requests, for the threshold and for the rate that is kept; the rest is the fit."""
BEGIN, END = "<!-- begin: {} -->\n\n", "\n\n<!-- end: {} -->"
WORDS = {
    "French": ["le", "la", "les", "des", "est", "une", "dans", "pour", "vous", "que"],
    "Spanish": ["el", "los", "las", "es", "una", "para", "que", "con", "por", "como"],
    "German": ["der", "die", "das", "und", "ist", "ein", "eine", "nicht", "Sie", "mit"],
    "English": ["the", "is", "a", "of", "to", "and", "that", "in", "for", "this"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/monitoring"), help="datasets")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    harvest(args.out)
    figures = measure(args.out)
    (HERE / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    text = (HERE / "README.md").read_text()
    for name, table in tables(figures):
        begin, end = BEGIN.format(name), END.format(name)
        text = f"{text.split(begin)[0]}{begin}{table}{end}{text.split(end)[1]}"
        print(table, end="\n\n")
    (HERE / "README.md").write_text(text)
    return 0


# ---- harvests


def harvest(out: Path) -> None:
    """Serve honest traffic and departures; each is a dataset of its own."""
    prompts = {"honest": traffic.honest(), **traffic.departures()}
    prompts["pilot"] = prompts["honest"][:32]
    paths = {name: traffic.write(out / f"{name}.jsonl", some) for name, some in prompts.items()}
    models = {
        "int8": traffic.quantized(DEMO_MODEL, out / "model-int8", 8, None),
        "int4": traffic.quantized(DEMO_MODEL, out / "model-int4", 4, 64),
    }
    serve(out / "pilot", DEMO_MODEL, paths["pilot"])
    probes = out / "probes.npy"
    if not probes.exists():
        np.save(probes, traffic.principal_directions(decode_rows(out / "pilot"), N_PROBES))
    more = ("--probes", str(probes), "--entropy")
    serve(out / "honest", DEMO_MODEL, paths["honest"], *more)
    for arm in ARMS:
        model = models.get(arm, DEMO_MODEL)
        serve(out / arm, model, paths.get(arm, paths["same"]), *more)


def serve(out: Path, model: Path, prompts: Path, *more: str) -> None:
    if (out / "seal").exists():
        return
    print(f"serving {out.name}", file=sys.stderr)
    words = ["write", str(out), "--model", str(model), "--prompts", str(prompts), *OPTIONS, *more]
    command = [sys.executable, "-m", "actds", *words]
    environment = {**os.environ, **ENGINE_ENVIRONMENT}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def decode_rows(path: Path) -> dict[str, np.ndarray]:
    dataset = actds.open(path)
    rows = {}
    for hook in dataset.hooks:
        decode = np.asarray(dataset.tokens(hook)["phase"]) == "decode"
        rows[hook] = np.asarray(dataset.array(hook)[np.flatnonzero(decode)], np.float32)
    return rows


# ---- figures


def measure(out: Path) -> dict[str, Any]:
    """Return the figures: kept rates over splits, power of each arm, what looks and probes do."""
    hooks = sorted(actds.open(out / "honest").hooks)
    honest = read_rows(actds.open(out / "honest"), hooks)
    arms = {arm: read_rows(actds.open(out / arm), hooks) for arm in ARMS}
    regime = regime_in(actds.open(out / "honest"), hooks)
    origin = {"dataset": "honest", "digest": "0" * 64, "regime": regime, "hooks": hooks}
    texts = {arm: answers(out / arm) for arm in ("honest", *ARMS)}
    default = list(splits(honest, arms, origin, Look(), N_SPLITS))
    print("splits: done", file=sys.stderr)
    variants = {
        "every step": (Look(every=1), slice(None)),
        "every 4 (default)": (Look(), slice(None)),
        "every 16": (Look(every=16), slice(None)),
        "every step above 1 nat": (Look(every=1, above=1.0), slice(None)),
        "every 4, 8 projections, no probes": (Look(), slice(1 + N_PROJECTIONS)),
    }
    return {
        "n_honest": len(honest.requests),
        "n_rows": int((honest.depth >= 0).sum()),
        "lengths": np.bincount(np.searchsorted(LENGTHS, honest.lengths(), "right")).tolist(),
        "splits": [
            {**split, "arms": {arm: share_of(some) for arm, some in split["arms"].items()}}
            for split in default
        ],
        "kept": pooled(default),
        "arms": {arm: of_arm(arm, arms[arm], texts[arm], default) for arm in ARMS},
        "honest_loops": sum(is_loop(ids) for ids, _ in texts["honest"]),
        "alone": alone(honest, arms, origin),
        "variants": {
            name: variant(
                list(splits(cut(honest, width), cut_all(arms, width), origin, look, N_FEW)))
            for name, (look, width) in variants.items()
        },
        "refusals": {arm: refusal(out, arm) for arm in ("int8", "int4")},
    }  # fmt: skip


def cut(rows: Rows, width: slice) -> Rows:
    return replace(rows, readouts=rows.readouts[:, :, width])


def cut_all(arms: dict[str, Rows], width: slice) -> dict[str, Rows]:
    return {arm: cut(rows, width) for arm, rows in arms.items()}


def splits(
    honest: Rows, arms: dict[str, Rows], origin: dict[str, Any], look: Look, n: int
) -> Iterator[dict[str, Any]]:
    """Yield what profiles of other thirds of the honest requests keep, and find in each arm."""
    for seed in range(n):
        profile = fit(honest, origin, look, ALPHA, SHARES, seed)
        scored = {arm: score(profile, rows) for arm, rows in arms.items()}
        yield {
            "seed": seed,
            "threshold": profile.calibration.threshold,
            "kept": [kept.model_dump() for kept in profile.kept],
            "arms": {arm: alerts_of(profile, some) for arm, some in scored.items()},
        }


def alerts_of(profile: Profile, scored: Looks) -> dict[str, Any]:
    assert profile.calibration.threshold is not None
    first = scored.first_above(profile.calibration.threshold)
    at = list(first.values())
    return {
        "n": len(scored.rows.requests),
        "requests": sorted(first),
        "depths": scored.rows.depth[at].tolist(),
        "kinds": [KINDS[kind] for kind in scored.kind[at]],
    }


def alone(honest: Rows, arms: dict[str, Rows], origin: dict[str, Any]) -> dict[str, Any]:
    """Return what each statistic finds with a threshold of its own, and the mean of 8 distances."""
    names = (*KINDS, "mean of 8 distances")
    shares: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in arms} for name in names}
    for seed in range(N_FEW):
        profile = fit(honest, origin, Look(), ALPHA, SHARES, seed)
        order = np.random.default_rng(seed).permutation(len(honest.requests))
        of_threshold = order[: round(len(order) * SHARES[0])]
        peaks = peaks_of(profile, honest)[of_threshold]
        of_arms = {arm: peaks_of(profile, rows) for arm, rows in arms.items()}
        for k, name in enumerate(names):
            threshold = Calibration.of(peaks[:, k], ALPHA).threshold
            for arm in arms:
                shares[name][arm].append(float(np.mean(of_arms[arm][:, k] > threshold)))
    return {name: {arm: float(np.mean(s)) for arm, s in by.items()} for name, by in shares.items()}


def peaks_of(profile: Profile, rows: Rows) -> np.ndarray:
    """Return the peaks of KINDS, and the largest mean of the last 8 distances, by request."""
    looks = score(profile, rows)
    seen = looks.rows.only(looks.rows.depth >= 0)
    nats = profile.distances(features(seen.readouts), seen.depth)
    largest = np.zeros(len(rows.requests))
    for request in np.unique(seen.of):
        padded = np.concatenate([np.ones(7), nats[seen.of == request]])
        largest[request] = np.convolve(padded, np.ones(8) / 8, "valid").max()
    return np.column_stack([looks.peaks, largest])


def pooled(splits: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return rates by stratum over all splits: means; the splits share requests."""
    by: dict[str, list[dict[str, Any]]] = {}
    for split in splits:
        for kept in split["kept"]:
            by.setdefault(kept["stratum"], []).append(kept)
    return {
        name: {
            "n": sum(k["n"] for k in some) / len(splits),
            "rate": sum(k["n_alerts"] for k in some) / sum(k["n"] for k in some),
            "least": min(k["n_alerts"] / k["n"] for k in some),
            "most": max(k["n_alerts"] / k["n"] for k in some),
        }
        for name, some in by.items()
    }


def of_arm(
    arm: str,
    rows: Rows,
    texts: Sequence[tuple[list[int], str]],
    splits: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    first = splits[0]["arms"][arm]
    n, n_alerts = first["n"], len(first["requests"])
    low, high = exact_share(np.array([n_alerts]), np.array([n]), 0.95)
    rates = [share_of(split["arms"][arm]) for split in splits]
    did = [departed(arm, ids, text) for ids, text in texts]
    among = [k for k, it_did in enumerate(did) if it_did]
    hits = [len(set(among) & set(split["arms"][arm]["requests"])) for split in splits]
    return {
        "n": n,
        "n_alerts": n_alerts,
        "low": float(low[0]),
        "high": float(high[0]),
        "mean": float(np.mean(rates)),
        "least": min(rates),
        "most": max(rates),
        "median_depth": float(np.median(first["depths"])) if n_alerts else None,
        "by_opening": first["kinds"].count("opening"),
        "median_length": float(np.median(rows.lengths())),
        "n_did": len(among),
        "mean_of_did": float(np.mean(hits)) / len(among) if among else None,
    }


def share_of(alerts: dict[str, Any]) -> float:
    return float(len(alerts["requests"]) / alerts["n"])


def variant(splits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kept": pooled(splits)["all"]["rate"],
        **{
            arm: float(np.mean([share_of(split["arms"][arm]) for split in splits])) for arm in ARMS
        },
    }  # fmt: skip


def answers(path: Path) -> list[tuple[list[int], str]]:
    """Return tokens and text of each answer."""
    dataset, tokenizer = actds.open(path), read_tokenizer(DEMO_MODEL)
    texts = []
    for line in dataset.requests().select(["request", "prompt_len"]).to_pylist():
        ids = dataset.request(line["request"]).token_id[line["prompt_len"] :].tolist()
        texts.append((ids, tokenizer.decode(ids) if ids else ""))
    return texts


def departed(arm: str, ids: list[int], text: str) -> bool:
    """Return whether the answer shows what the arm planted, by a crude sign in its words."""
    if arm in ("loops", "long loops"):
        return is_loop(ids)
    if arm == "jailbreak":
        return "FREEBOT" in text.upper()
    if arm in ("system", "storyteller"):
        return any(word in text.lower() for word in (" sea", "sail", "ship", "storm", "dear child"))
    if arm == "language":
        words = text.split()
        counts = {name: sum(word in of for word in words) for name, of in WORDS.items()}
        return max(counts, key=lambda name: counts[name]) != "English" and max(counts.values()) > 2
    return arm != "same"


def is_loop(ids: list[int]) -> bool:
    """Return whether nine in ten tokens of the second half stand one period before as well."""
    tokens = np.array(ids)
    half = len(tokens) // 2
    return len(tokens) >= 16 and any(
        np.mean(tokens[half:] == tokens[half - period : -period]) >= 0.9
        for period in range(1, min(48, half) + 1)
    )


def refusal(out: Path, arm: str) -> dict[str, Any]:
    """Return what the command says of an arm of other weights, and with --other-regime."""
    profile = out / "profile.json"
    command = [sys.executable, "-m", "actds"]
    made = [*command, "profile", str(out / "honest"), "-o", str(profile)]
    if not profile.exists():
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    words = [*command, "alerts", str(out / arm), "--profile", str(profile)]
    done = subprocess.run(words, capture_output=True, text=True)
    forced = subprocess.run([*words, "--other-regime"], capture_output=True, text=True)
    return {
        "exit": done.returncode,
        "words": done.stderr.replace(str(out), "OUT").splitlines(),
        "other_regime": forced.stdout.splitlines()[0],
        "other_regime_exit": forced.returncode,
    }


# ---- tables


def tables(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    kept = figures["kept"]
    all_rates = [s["kept"][0]["n_alerts"] / s["kept"][0]["n"] for s in figures["splits"]]
    rows = [
        (name, f"{of['n']:.0f}", f"{of['rate']:.1%}", f"{of['least']:.1%} to {of['most']:.1%}")
        for name, of in kept.items()
    ]
    head: tuple[str, ...] = ("requests", "in a split", "kept, mean of 20", "least and most")
    listed = ", ".join(f"{rate:.1%}" for rate in all_rates)
    yield "kept", f"{markdown(head, rows)}\n\nThe 20 of all requests: {listed}."
    head = ("arm", "alerts, split 0", "95 %", "mean of 20 splits", "least and most", "by opening")
    head += ("median depth", "did", "power of these")
    yield "power", markdown(head, [row_of(arm, of) for arm, of in figures["arms"].items()])
    rows = [
        (name, f"{of['kept']:.1%}", *(f"{of[arm]:.0%}" for arm in ARMS))
        for name, of in figures["variants"].items()
    ]
    yield "variants", markdown(("looks and readouts", "kept", *ARMS), rows)
    rows = [(name, *(f"{of[arm]:.0%}" for arm in ARMS)) for name, of in figures["alone"].items()]
    yield "alone", markdown(("statistic alone", *ARMS), rows)
    lines = ["```"]
    for arm, of in figures["refusals"].items():
        command = f"$ actds alerts {arm} --profile profile.json"
        lines += [f"{command}    # exit {of['exit']}", *of["words"]]
        lines += [f"{command} --other-regime    # exit {of['other_regime_exit']}"]
        lines += [of["other_regime"]]
    yield "refusals", "\n".join([*lines, "```"])


def row_of(arm: str, of: dict[str, Any]) -> tuple[str, ...]:
    return (
        arm,
        f"{of['n_alerts']} of {of['n']}",
        f"{of['low']:.0%} to {of['high']:.0%}",
        f"{of['mean']:.0%}",
        f"{of['least']:.0%} to {of['most']:.0%}",
        str(of["by_opening"]),
        "-" if of["median_depth"] is None else f"{of['median_depth']:.0f}",
        str(of["n_did"]),
        "-" if of["mean_of_did"] is None else f"{of['mean_of_did']:.0%}",
    )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
