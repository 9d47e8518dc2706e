"""The trainers of examples/: each runs as it stands, on the stored rows, and says on which."""

from __future__ import annotations

import csv
import json
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import actds
from actds.errors import ActdsError
from actds_testing.places import ROOT

BATCH, STEPS = 16, 160
N_BATCHES = STEPS + 110
"""Some trainers estimate the scale of the rows before they train: on up to 102 batches."""
SMALL: dict[str, list[str]] = {
    "sae": ["--expansion", "2"],
    "transcoder": ["--expansion", "1"],
    "crosscoder": ["--latents", "256"],
    "probe": [],
    "sae_saelens": ["--expansion", "1"],
    "sae_dictionary_learning": ["--expansion", "1"],
    "sae_sparsify": ["--expansion", "1"],
}


@dataclass
class Example:
    """One of the examples: its names, its arguments and what they say."""

    file: Path
    argv: list[str]
    names: Namespace

    def args(self) -> Any:
        return self.names.parse_args(self.argv)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_example(path: Path, tmp_path: Path) -> Callable[..., Example]:
    """Return a function that gives an example by name, with labels that say the run."""

    def make(name: str, *options: str) -> Example:
        file = ROOT / "examples" / f"{name}.py"
        argv = [str(path), "--steps", str(STEPS), "--batch", str(BATCH), *SMALL[name], *options]
        if name == "probe" and "--labels" not in options:
            labels = {line["external_id"]: line["run"] for line in requests(path)}
            argv += ["--labels", str(write_labels(tmp_path / "labels.jsonl", labels))]
        return Example(file, argv, Namespace(**runpy.run_path(str(file))))

    return make


@pytest.fixture(params=SMALL)
def example(request: pytest.FixtureRequest, make_example: Callable[..., Example]) -> Example:
    return make_example(request.param)


def requests(path: Path) -> list[dict[str, Any]]:
    table = actds.open(path).requests(run=True)
    return table.select(["run", "request", "external_id"]).to_pylist()  # type: ignore[no-any-return]


def write_labels(file: Path, labels: dict[str, str]) -> Path:
    with file.open("w", encoding="utf-8", newline="") as stream:
        if file.suffix == ".csv":
            csv.writer(stream).writerows([("id", "label"), *labels.items()])
        else:
            for name, label in labels.items():
                stream.write(json.dumps({"id": name, "label": label}) + "\n")
    return file


@pytest.fixture
def from_memory(
    path: Path, truth_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Example, Any], list[Any]]:
    """Return a function that makes an example's batches from rows that tensorstore decoded.

    The loader only says the order, by run, request and position, and what it normalizes with.
    """

    def batches(example: Example, args: Any) -> list[Any]:
        plain = actds.Loader

        def told(*arguments: Any, **options: Any) -> actds.Loader:
            return plain(*arguments, **{**options, "provenance": True})

        monkeypatch.setattr(actds, "Loader", told)
        loader = example.names.open_loader(args)
        monkeypatch.undo()
        hooks = loader.config["hooks"]
        normalization = loader.config["normalization"] or {}
        tokens = actds.open(path).tokens(hooks[0], run=True)
        keys = [tokens[name].to_pylist() for name in ("run", "request", "position")]
        place = {key: at for at, key in enumerate(zip(*keys, strict=True))}
        rows_of = {hook: truth_of(hook).rows.astype(np.float32) for hook in hooks}
        made: list[Any] = []
        with loader:
            for _, columns in islice(loader, N_BATCHES):
                named = (columns[name].tolist() for name in ("run", "request", "position"))
                at = [place[key] for key in zip(*named, strict=True)]
                tensors = {}
                for hook in hooks:
                    rows = rows_of[hook][at]
                    with_ = normalization.get(hook, {"shift": None, "scale": 1.0})
                    if with_["shift"] is not None:
                        rows = rows - np.array(with_["shift"], np.float32)
                    tensors[hook] = torch.from_numpy(rows * np.array(with_["scale"], np.float32))
                batch = tensors if len(hooks) > 1 else tensors[hooks[0]]
                made.append((batch, columns) if "labels" in args else batch)
        return made

    return batches


def trained(example: Example, batches: Any, args: Any) -> tuple[Any, list[float]]:
    (d_model,) = {hook.d_model for hook in actds.open(args.path).hooks.values()}
    return example.names.train(batches, d_model, args)  # type: ignore[no-any-return]


def test_every_loss_is_that_of_the_same_rows_from_memory(
    example: Example, from_memory: Callable[[Example, Any], list[Any]]
) -> None:
    args = example.args()
    with example.names.open_loader(args) as loader:
        assert loader.batches_per_epoch < STEPS
        _, losses = trained(example, loader, args)
    batches = from_memory(example, args)
    backwards = batches[::-1]
    if example.file.stem == "sae_dictionary_learning":  # it writes into its batches
        backwards = [batch.clone() for batch in backwards]
    _, again = trained(example, iter(batches), args)
    assert len(losses) == STEPS and losses == again
    # The losses tell one order from another, and the rows are learned from.
    _, other = trained(example, iter(backwards), args)
    assert losses != other
    assert np.mean(losses[-20:]) < np.mean(losses[:20])


def saved_config(example: Example, out: Path) -> Any:
    """Return what an example left beside its weights; both can be read."""
    match example.file.stem:
        case "sae_saelens":
            from sae_lens import SAE

            return SAE.load_from_disk(str(out)).cfg.metadata.actds
        case "sae_dictionary_learning":
            assert torch.load(out / "trainer_0" / "ae.pt")
            return json.loads((out / "trainer_0" / "config.json").read_text())["buffer"]
        case "sae_sparsify":
            from sparsify import SparseCoder

            assert SparseCoder.load_from_disk(out)
            return json.loads((out / "loader.json").read_text())
        case _:
            return torch.load(out, weights_only=True)["data"]


def test_it_runs_as_it_stands_and_keeps_what_it_was_trained_on(
    example: Example, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", [str(example.file), *example.argv, "--out", str(out)])
    runpy.run_path(str(example.file), run_name="__main__")
    assert "loss" in capsys.readouterr().out
    with example.names.open_loader(example.args()) as loader:
        assert saved_config(example, out) == loader.config


@pytest.mark.parametrize("name", ["sae_saelens", "sae_dictionary_learning"])
def test_a_dictionary_is_scored_on_requests_that_it_left_out(
    name: str,
    path: Path,
    tmp_path: Path,
    make_example: Callable[..., Example],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from actds_studies.regimes.api import regimes

    for share in ("0.5", "0"):
        example, out = make_example(name, "--held-out", share), tmp_path / share
        monkeypatch.setattr(sys, "argv", [str(example.file), *example.argv, "--out", str(out)])
        runpy.run_path(str(example.file), run_name="__main__")
        hook = example.names.open_loader(example.args()).config["hooks"][0]
        sae = out if name == "sae_saelens" else out / "trainer_0"
        options: Any = {"hooks": [hook], "sae": [f"{hook}={sae}"], "held_out": 0.5}
        if share == "0":
            with pytest.raises(ActdsError, match=r"E015 .*fitted on rows of arm"):
                regimes(str(path), **options)
            continue
        told = regimes(str(path), **options)
        assert [Path(one.path).parent for one in told.used] == [sae]
        (contrast,) = told.contrasts
        # Random prompts have hardly a token in common with answers: there may be no estimate.
        assert "dictionary" in {verdict.instrument for verdict in contrast.verdicts}
        assert "prefix of the training side" in contrast.first.n_apart


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_probe_knows_the_labels_of_requests_that_it_has_not_seen(
    path: Path, tmp_path: Path, make_example: Callable[..., Example], kind: str
) -> None:
    """Both runs number their requests from 0: the number alone would mix up the labels."""
    labels = {line["external_id"]: line["run"] for line in requests(path)}
    accuracy, n = held_out(make_example, write_labels(tmp_path / f"labels.{kind}", labels))
    assert accuracy == 1.0 and 10 < n < len(labels) / 2


def test_a_probe_cannot_know_labels_that_were_drawn(
    path: Path, tmp_path: Path, make_example: Callable[..., Example]
) -> None:
    """What a request's other rows say of it does not reach the held-out ones."""
    drawn = np.random.default_rng(0).integers(2, size=len(requests(path)))
    labels = {
        line["external_id"]: str(label) for line, label in zip(requests(path), drawn, strict=True)
    }
    accuracy, _ = held_out(make_example, write_labels(tmp_path / "labels.csv", labels))
    assert accuracy < 0.85


def test_a_probe_leaves_out_requests_without_a_label(
    path: Path, tmp_path: Path, make_example: Callable[..., Example]
) -> None:
    labels = {line["external_id"]: line["run"] for line in requests(path)[::2]}
    _, n = held_out(make_example, write_labels(tmp_path / "labels.csv", labels))
    assert 5 < n < len(labels) / 2
    with pytest.raises(SystemExit):
        make_example(
            "probe", "--labels", str(write_labels(tmp_path / "none.csv", {"none": "x"}))
        ).args()


def held_out(make_example: Callable[..., Example], labels: Path) -> tuple[float, int]:
    example = make_example("probe", "--labels", str(labels))
    args = example.args()
    with example.names.open_loader(args) as loader:
        probe, _ = trained(example, loader, args)
    return example.names.held_out_accuracy(probe, args)  # type: ignore[no-any-return]


def test_a_trainer_that_writes_into_its_batches_harms_no_other_batch(
    make_example: Callable[..., Example],
) -> None:
    """dictionary_learning divides its batches by their norm in place."""
    example = make_example("sae_dictionary_learning")
    args = example.args()
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watched(loader: actds.Loader) -> Iterator[torch.Tensor]:
        for batch in loader:
            kept.append((batch, batch.clone()))
            yield batch

    with example.names.open_loader(args) as loader:
        trained(example, watched(loader), args)
    written = [not batch.equal(copy) for batch, copy in kept]
    assert sum(written) == STEPS + 1 and all(written[-STEPS:])
    with example.names.open_loader(args) as loader:
        for (_, copy), batch in zip(kept, loader, strict=False):
            assert batch.equal(copy)


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"normalize": "channel"}], ids=str)
@pytest.mark.parametrize("n_hooks", [1, 3])
def test_batches_are_the_trainers_own(
    path: Path, hooks: list[str], n_hooks: int, options: dict[str, Any]
) -> None:
    """Memory is used again when a batch is dropped; one that is kept or overwritten is left be."""

    def loader() -> actds.Loader:
        return actds.Loader(path, hooks[:n_hooks], batch=BATCH, epochs=2, **options)

    def tensors(batch: Any) -> list[torch.Tensor]:
        return list(batch.values()) if isinstance(batch, dict) else [batch]

    clean = [[tensor.clone() for tensor in tensors(batch)] for batch in loader()]
    kept = []
    for number, batch in enumerate(loader()):
        for tensor, wanted in zip(tensors(batch), clean[number], strict=True):
            assert tensor.equal(wanted)
            if number % 3:
                tensor.fill_(float("nan"))
            else:
                kept.append((tensor, wanted))
    assert len(kept) > 50 and all(tensor.equal(wanted) for tensor, wanted in kept)
