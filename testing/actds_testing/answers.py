"""Nine datasets: one for each thing that can be wrong between a source and a batch, one clean.

    python -m actds_testing.answers docs/answers

writes the page of each as people see it first, and ``docs/answers.md`` beside them. Harvests are
real where the engine of ``transformers`` shows the fault; else they are simulated or synthetic.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

import actds
from actds_testing.schedules import Schedule
from actds_testing.schedules import simulate as schedule_of
from actds_testing.simulate import SCENARIOS, simulate, write_dataset
from actds_testing.synthetic import make_dataset
from actds_testing.tiny import make_random_model
from actds_validators.audit.place import Decision, PlaceName
from actds_writers.harvest.result import Observer
from actds_writers.monitor.progress import Snapshot

WORDS = "the disk and the ring "


@dataclass(frozen=True)
class Case:
    """A dataset whose truth is known.

    Args:
        make: writes it at a path.
        truth: what is wrong with it, in words.
        place: the place that has to decide, None for the clean one.
        decision: the answer.
        says: words that the first line has to have.
        beside: places that do not pass either, as what is interrupted is cut off.
    """

    make: Callable[[Path], Path]
    truth: str
    place: PlaceName | None
    decision: Decision
    says: str
    beside: tuple[PlaceName, ...] = ()


def harvest(path: Path, prompts: list[str], model: Path | None = None, **settings: Any) -> Path:
    """Harvest prompts with the engine of transformers and a tiny model; return the dataset."""
    with tempfile.TemporaryDirectory() as folder:
        model = model or make_random_model(Path(folder) / "model")
        source = Path(folder) / "prompts.jsonl"
        records = [{"id": str(n), "prompt": text} for n, text in enumerate(prompts)]
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
        actds.write(
            out=str(path), model=str(model), prompts=str(source), hooks="resid_post:1",
            engine="transformers", engine_args={"max_num_seqs": 4}, max_tokens=4, check=False,
            **settings,
        )  # fmt: skip
    return path


def clean(path: Path) -> Path:
    """Everything is served and stored."""
    return harvest(path, [f"{n} {WORDS}" for n in range(24)])


def skipped(path: Path) -> Path:
    """The longest third of the prompts does not fit the model."""
    return harvest(path, [WORDS * (60 if n % 3 == 0 else 1 + n % 5) for n in range(24)])


class _Interrupted(Observer):
    """Interrupts the harvest, as Ctrl-C does, once four requests have ended."""

    @contextmanager
    def _until(self, snapshot: Callable[[], Snapshot]) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.002):
                if snapshot().requests_done >= 4:
                    os.kill(os.getpid(), signal.SIGINT)
                    return

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def harvesting(self, snapshot: Callable[[], Snapshot]) -> AbstractContextManager[object]:
        return self._until(snapshot)


def interrupted(path: Path) -> Path:
    """The harvest is interrupted when a part of the prompts has been served."""
    return harvest(path, [f"{n} {WORDS}" for n in range(48)], observer=_Interrupted())


def cached(path: Path) -> Path:
    """Half of the requests share prefixes, which the cache serves."""
    return write_dataset(simulate(replace(SCENARIOS["none"], n_steps=400), 1), path)


def _schedule(*, aborted: bool = False, **changes: Any) -> Schedule:
    """Return a synthetic schedule in which no request is skipped, and some are aborted or none."""
    for seed in range(200):
        made = schedule_of(7, seed, cache=False, **changes)
        lost = pc.sum(pc.equal(made.spans["disposition"], "aborted")).as_py()
        if bool(lost) == aborted:
            return made
    raise AssertionError("no seed has such a schedule")


def filtered(path: Path) -> Path:
    """A rule leaves some positions out."""
    return make_dataset(path, schedule=_schedule(filtered=True))


def cut_off(path: Path) -> Path:
    """Clients cancel requests that wait or are in the middle of their prompt."""
    return make_dataset(path, schedule=_schedule(aborted=True))


def dropped(path: Path) -> Path:
    """A disk that is too slow drops whole steps under load."""
    scenario = replace(SCENARIOS["heavy"], n_steps=400, prefix_share=0.0)
    return write_dataset(simulate(scenario, 1), path)


def not_finite(path: Path) -> Path:
    """One token has an embedding that is no number: its row, and every later one, is NaN."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        model = make_random_model(Path(folder) / "model")
        weights = load_file(model / "model.safetensors")
        token = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("~")
        weights["model.embed_tokens.weight"][token] = torch.nan
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        prompts = [f"{n} {'~' if n % 6 == 0 else ''}{WORDS}" for n in range(24)]
        return harvest(path, prompts, model)


def two_models(path: Path) -> Path:
    """Two runs of one dataset are of different weights."""
    for n, run in enumerate(("r-first", "r-second")):
        weights = {"model.weights_sha256": str(n) * 64}
        make_dataset(path, schedule=_schedule(), run=run, sealed=bool(n), facts=weights)
    return path


CASES: dict[str, Case] = {
    "clean": Case(
        clean, "Every record was served, every row is stored.", None, "yes", "Yes: train on it",
    ),
    "skipped": Case(
        skipped, "The longest third of the prompts does not fit the model and was skipped.",
        "source", "no", "of the source was never served",
    ),
    "interrupted": Case(
        interrupted, "The harvest was interrupted before most of its prompts were begun.", "source",
        "no", "(interrupted)", ("ends",),
    ),
    "cached": Case(
        cached, "The prefix cache served shared prefixes: their rows are stored once.", "cache",
        "yes, loaded like this", "the prefix cache served",
    ),
    "filtered": Case(
        filtered, "A rule of the harvest left positions out.", "rules", "yes, with limits",
        "left out by a rule",
    ),
    "cut-off": Case(
        cut_off, "Clients cancelled requests in the middle of their prompts.", "ends",
        "not known",
        "cut off with their request",
    ),
    "dropped": Case(
        dropped, "A slow disk dropped whole steps under load.", "queues", "no",
        "of the computed rows were dropped",
    ),
    "not-finite": Case(
        not_finite, "One token makes its row and every later one NaN.", "values", "no",
        "are not finite",
    ),
    "two-models": Case(
        two_models, "The dataset has runs of two different sets of weights.", "identity", "no",
        "runs of more than one model",
    ),
}  # fmt: skip
"""Every case by name; the clean one first, the others in the order of the places."""

_LEAD = """\
# What the first screen says

Nine datasets whose truth is known, and what `actds check` and the head of the page say: one clean,
one for each thing that can be wrong ([audit](audit.md#the-answer-seven-places)). Made by
`python -m actds_testing.answers docs/answers`, of tiny or simulated harvests: shares are large.
"""
_WIDTH = 900


def main() -> None:
    """Write a picture of each page, and the guide that shows them."""
    from actds_testing.browser import Browser, chromium

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    executable = chromium()
    if executable is None:
        raise SystemExit("no Chromium is installed")
    text = [_LEAD]
    with tempfile.TemporaryDirectory() as work, Browser(executable) as browser:
        os.chdir(work)
        for name, case in CASES.items():
            case.make(Path(name))
            html = Path(f"{name}.html")
            lines = "\n".join(_screen(name, html))
            browser.open(html.absolute(), width=_WIDTH)
            height = browser.evaluate(
                "document.querySelector('header').getBoundingClientRect().bottom"
            )
            browser.screenshot(folder / f"{name}.png", height=height + 8)
            alt = f"The head of the page: {case.truth}"
            text += [f"## {case.truth}\n", f"```text\n{lines}\n```\n",
                     f"![{alt}](answers/{name}.png)\n"]  # fmt: skip
    folder.with_suffix(".md").write_text("\n".join(text), encoding="utf-8")


def _screen(path: str, html: Path) -> list[str]:
    """Return the lines of ``actds check``, up to what the dataset is; write its page."""
    from click.testing import CliRunner

    from actds.cli import cli

    shown = CliRunner().invoke(cli, ["check", path, "--html", str(html)], prog_name="actds")
    lines = shown.stdout.splitlines()
    facts = next(n for n, line in enumerate(lines) if line.startswith("  Model"))
    return [f"$ actds check {path}", *lines[:facts]]


if __name__ == "__main__":
    main()
