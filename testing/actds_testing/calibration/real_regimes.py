"""The same on rows of a real model: how often arms shift that differ in nothing, and what is found.

    python -m actds_testing.calibration.real_regimes [--runs 100] [--jobs 2] [--scenario NAME ...]

The real engine serves sources of Python's standard library, with their own text (H), and continued
by the model (G), which is read again (R). A dictionary is trained on half of H. The arms are then
dealt by chance from the rows of the other half, so that what differs between them is known:
requests change sides, or rows are left out by position or token alone. What is to be found is put
into rows of one arm. What is harvested stays in --work.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import actds
from actds_studies.regimes.arms import Arm, ArmRows, read_arm
from actds_studies.regimes.conclusions import verdicts
from actds_studies.regimes.contrast import matched_requests, plan
from actds_studies.regimes.instruments import Moments, Remembered
from actds_studies.regimes.instruments.reconstruction import Overlap, Reconstruction
from actds_studies.regimes.result import Limits
from actds_studies.regimes.run import conclude, measure
from actds_studies.regimes.strata import POSITION_EDGES
from actds_testing.calibration.regimes import Goal, calibrate, finds, others, parser
from actds_testing.harvest import environment
from actds_testing.places import DEMO_MODEL, ROOT
from actds_validators.dictionaries import Dictionary
from actds_validators.dictionaries.formats import load_dictionary

HOOK = "resid_post.10"
GIVEN, SAMPLED = 64, 200
N_DOCUMENTS = 192
HELD_OUT = 0.5
N_FEATURES = 1152
SHARE = 0.5
"""Of the rows, drawn by chance in each run: what a run takes is mostly to encode them."""
ENGINE = ("enforce_eager=true", "block_size=32", "max_model_len=512", "max_num_seqs=64",
          "max_num_batched_tokens=512", "dtype=float32")  # fmt: skip
SCENARIOS: dict[str, Goal] = {
    "swapped": ("own and sampled text of a request change sides by chance", "most", 0.09),
    "halves": ("requests dealt to two arms by chance, unpaired", "most", 0.09),
    "position": ("the same, rows left out by position alone", "most", 0.09),
    "mix": ("the same, rows left out by token alone", "most", 0.09),
    "channel": ("a channel moves by half of its SD", "least", 0.95),
    "rate": ("a feature's rate triples, 0.1 to 0.3", "least", 0.95),
    "turn": ("a feature's direction turns by 45 degrees", "least", 0.95),
    "step": ("a channel moves by its SD at decode steps 160 to 240 only", "least", 0.95),
}
Rows = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pool:
    """The rows that arms are dealt from: of each request its own text, and what was sampled.

    Args:
        told: tables of all rows; `ArmRows.row` is the place in `rows`.
        sampled: whether the model wrote a row's token ``(n,)``.
        rows: ``(n, d_model)``.
        dictionary: trained on other requests.
        features: of the rows ``(n, n_features)``.
    """

    told: ArmRows
    sampled: npt.NDArray[np.bool_]
    rows: Rows
    dictionary: Dictionary
    features: npt.NDArray[np.float32]


def harvest(work: Path) -> None:
    """Harvest the arms and train the dictionary, each unless it is there."""
    work.mkdir(parents=True, exist_ok=True)
    documents = work / "documents.jsonl"
    if not documents.exists():
        documents.write_text("".join(json.dumps(one) + "\n" for one in _documents()))
    write = ["--prompts", str(documents), "--hooks", HOOK.replace(".", ":"), "--continue",
             str(GIVEN), "--max-tokens", str(SAMPLED)]  # fmt: skip
    for name, words in {
        "H": ["write", "OUT", *write, "--continued-by", "document"],
        "G": ["write", "OUT", *write, "--temperature", "1"],
        "R": ["replay", str(work / "G"), "OUT"],
    }.items():
        options = [part for one in ENGINE for part in ("--engine-arg", one)]
        _once(work / name, *words, "--model", str(DEMO_MODEL), "--quiet", *options)
    _once(
        work / "sae", "stability", f"H={work / 'H'}", "--hook", HOOK, "--seeds", "2",
        "--features", str(N_FEATURES), "--held-out", str(HELD_OUT), "--fail-on", "never",
        "--out", "OUT",
    )  # fmt: skip


def _documents() -> list[dict[str, str]]:
    """Return sources of the standard library that are long enough."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    found: list[dict[str, str]] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(errors="replace")[:4000]
        if len(tokenizer(text)["input_ids"]) >= GIVEN + SAMPLED:
            found.append({"id": path.stem, "text": text})
    return found[:N_DOCUMENTS]


def _once(out: Path, *words: str) -> None:
    done = out.with_suffix(".done")
    if done.exists():
        return
    command = [str(out) if word == "OUT" else word for word in words]
    told = environment(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    resume = ["--resume"] if out.exists() and words[0] != "stability" else []
    subprocess.run([sys.executable, "-m", "actds", *command, *resume], env=told, check=True)
    done.touch()


@cache
def pool(work: Path) -> Pool:
    """Return the rows behind the given tokens of requests that the dictionary has not seen."""
    where = f"position >= {GIVEN}"
    own, again = actds.open(work / "H"), actds.open(work / "R")
    first = read_arm(Arm("H", own, where=where, held_out=HELD_OUT), HOOK)
    second = read_arm(Arm("R", again, where=where), HOOK)
    of_first = matched_requests(first, second, same_dataset=False)[second.request]
    there = np.flatnonzero(np.isin(of_first, first.request))
    second = second.take(there)
    rows = np.concatenate([
        dataset.array(HOOK)[told.row.astype(np.int64)].astype(np.float32)
        for dataset, told in ((own, first), (again, second))
    ])  # fmt: skip
    dictionary = load_dictionary(work / "sae" / "H" / "seed-0", HOOK, rows.shape[1])
    parts = [dictionary.encode(rows[at : at + 2048]) for at in range(0, len(rows), 2048)]
    return Pool(
        joined(first, second, of_first[there]),
        np.arange(len(rows)) >= len(first),
        rows,
        dictionary,
        np.concatenate(parts),
    )


def joined(first: ArmRows, second: ArmRows, request: Ints) -> ArmRows:
    """Return the rows of two arms as those of one, numbered from 0.

    Args:
        first: the arm whose requests they are.
        second: rows behind those of the first.
        request: index in the first's requests of each of the second's ``(n,)``.
    """
    names = ("position", "token_id", "prefix", "decode_step", "chunk", "kernel_mode", "role")
    both = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in names}
    return replace(
        first,
        row=np.arange(len(first) + len(second)),
        request=np.concatenate([first.request, request]),
        sampled=None,
        **both,
    )


def deal(of: Pool, scenario: str, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Return which rows the reference has, and which the other arm."""
    told, n = of.told, len(of.told.requests)
    kept = rng.random(len(told)) < SHARE
    side = rng.random(n)[told.request] < 0.5
    if scenario in ("halves", "position", "mix"):
        if scenario == "position":
            band = np.searchsorted(POSITION_EDGES, told.position, side="right")
            early = np.interp(band, [band.min(), band.max()], [1.0, 0.2])
            kept &= rng.random(len(told)) < np.where(side, early, 1.2 - early)
        if scenario == "mix":
            often = rng.uniform(0.2, 1.0, int(told.token_id.max()) + 1)[told.token_id]
            kept &= rng.random(len(told)) < np.where(side, often, 1.2 - often)
    else:
        side ^= of.sampled
    return np.flatnonzero(kept & ~side), np.flatnonzero(kept & side)


def plant(of: Pool, rows: Rows, which: Ints, scenario: str, rng: np.random.Generator) -> str | None:
    """Change rows ``(n, d_model)`` in place; return the element that is to be found.

    Args:
        of: the pool.
        rows: those of the arm.
        which: their places in the pool ``(n,)``.
        scenario: what is planted.
        rng: chooses where.
    """
    if scenario in ("channel", "step"):
        channel = int(rng.integers(rows.shape[1]))
        step = of.told.decode_step[which]
        there = (step >= 160) & (step <= 240) if scenario == "step" else np.ones(len(rows), bool)
        rows[there, channel] += (1 if scenario == "step" else 0.5) * of.rows[:, channel].std()
        return str(channel)
    if scenario in ("rate", "turn"):
        active = of.features > 0
        rate = active.mean(axis=0)
        feature = int(rng.choice(np.argsort(np.abs(rate - 0.1))[:20]))
        direction = of.dictionary.decode(np.eye(len(rate), dtype=np.float32)[[feature]])[0]
        direction = direction - of.dictionary.decode(np.zeros((1, len(rate)), np.float32))[0]
        there = np.flatnonzero(active[which, feature])
        if scenario == "turn":
            aside = rng.standard_normal(len(direction))
            aside -= (aside @ direction) / (direction @ direction) * direction
            aside *= np.linalg.norm(direction) / np.linalg.norm(aside)
            angle = np.radians(45)
            moved = (np.cos(angle) - 1) * direction + np.sin(angle) * aside
            rows[there] += of.features[which[there], feature][:, None] * moved.astype(np.float32)
        else:
            off = np.flatnonzero(~active[which, feature])
            chosen = rng.random(len(off)) < 2 * rate[feature] / (1 - rate[feature])
            # As much as in its strongest rows: else others are among the k largest.
            amounts = np.sort(of.features[active[:, feature], feature])[-len(rows) // 100 :]
            amount = rng.choice(amounts, int(chosen.sum()))
            rows[off[chosen]] += amount[:, None] * direction
        return str(feature)
    return None


def compare(of: Pool, scenario: str, seed: int) -> dict[str, Any]:
    """Deal and compare the arms of one run, and return what it finds."""
    began, limits, rng = time.monotonic(), Limits(seed=seed), np.random.default_rng(seed)
    places = deal(of, scenario, rng)
    first, second = (replace(of.told.take(own), row=np.arange(len(own))) for own in places)
    rows = of.rows[places[0]], of.rows[places[1]]
    element = plant(of, rows[1], places[1], scenario, rng)
    told = plan(first, second, seed=seed)
    one = Remembered(of.dictionary)
    instruments = [Moments(), Reconstruction(one), Overlap(one)]
    (values,) = conclude([measure(told, rows, instruments, limits, HOOK)], limits)
    shifted = [value for value in values if value.outcome == "shifts"]
    return {
        "scenario": scenario,
        "seed": seed,
        "pairing": told.pairing,
        "found": finds(SCENARIOS[scenario], scenario, shifted, element),
        "others": others(scenario, shifted, element),
        "verdicts": [f"{v.instrument}: {v.outcome}" for v in verdicts(values)],
        "n_tests": sum(value.p is not None for value in values),
        "seconds": time.monotonic() - began,
    }


def run_one(task: tuple[str, int], work: Path) -> dict[str, Any]:
    """Make one run on the rows that were harvested.

    Args:
        task: scenario and seed.
        work: folder of the harvests.
    """
    return compare(pool(work), *task)


def main() -> None:
    options = parser(__doc__.splitlines()[0], SCENARIOS, 100, "calibration-real-regimes.jsonl")
    work = ROOT / "build" / "real-regimes"
    options.add_argument("--work", type=Path, default=work, help="harvests and dictionary")
    args = options.parse_args()
    harvest(args.work)
    calibrate(partial(run_one, work=args.work), SCENARIOS, args)


if __name__ == "__main__":
    main()
