"""A study of another package: an instrument with its words, found by its entry point."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds_studies.regimes.conclusions import Words, register_words
from actds_testing import norms, synthetic
from actds_testing.norms import NORMS
from actds_testing.regime_datasets import HOOKS
from actds_testing.schedules import simulate
from actds_testing.synthetic import make_dataset

HOOK = HOOKS[0]


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A: a run; C: the same in float32; L: the same with rows 1.5 times as long."""
    folder, schedule = tmp_path_factory.mktemp("norms"), simulate(40, 0, cache=False)
    made = {
        "A": make_dataset(folder / "a", schedule=schedule, hooks=HOOKS),
        "C": make_dataset(folder / "c", schedule=schedule, hooks=HOOKS, dtype="float32"),
    }
    states = synthetic.states

    def longer(*args: Any) -> Any:
        bits = states(*args)
        return (np.float32(1.5) * bits.view(np.float32)).view(bits.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "states", longer)
        made["L"] = make_dataset(folder / "l", schedule=schedule, hooks=HOOKS, dtype="float32")
    return made


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which a package brings the command, as pip would install it."""
    folder = tmp_path_factory.mktemp("package")
    facts = folder / "norms_study-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: norms-study\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(
        "[actds.commands]\nnorms = actds_testing.norms:command\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def actds_command(env: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "actds", *(str(word) for word in words)]
    return subprocess.run(line, env=env, capture_output=True, text=True)


def norms_of(path: Path) -> Any:
    """Return the lengths of the rows that count, by NumPy: each prefix once, no position 0."""
    dataset = actds.open(path)
    table = dataset.tokens(hook=HOOK).to_pandas()
    table["norm"] = np.linalg.norm(np.asarray(dataset.array(HOOK)[:], np.float64), axis=1)
    by_prefix: dict[tuple[int, ...], float] = {}
    for _, rows in table.sort_values(["request", "position"]).groupby("request"):
        tokens = rows["token_id"].tolist()
        for n, norm in enumerate(rows["norm"]):
            by_prefix.setdefault(tuple(tokens[: n + 1]), norm)
    return np.array([norm for prefix, norm in by_prefix.items() if len(prefix) > 1])


def test_numbers_and_verdicts_are_right(arms: dict[str, Path]) -> None:
    names = [f"{name}={path}" for name, path in arms.items()]
    result = NORMS.run(*names, hooks=[HOOK], limits={"mean_norm": 0.2})
    same, longer = result.contrasts
    assert (same.name, longer.name, result.schema_) == ("C-A", "L-A", "actds.norms/1")
    reference = norms_of(arms["A"])
    for contrast, path in ((same, arms["C"]), (longer, arms["L"])):
        norms = norms_of(path)
        values = {v.measure: v for v in contrast.values if v.axis == "all"}
        assert values["mean norm"].n_rows == (len(reference), len(norms))
        expected = np.log(norms.mean() / reference.mean())
        assert values["mean norm"].value == pytest.approx(expected, abs=1e-9)
        assert values["mean norm"].arms == pytest.approx((reference.mean(), norms.mean()))
        spreads = norms.std() / norms.mean(), reference.std() / reference.mean()
        assert values["spread of norms"].value == pytest.approx(spreads[0] - spreads[1], abs=1e-9)
    assert [v.outcome for v in same.verdicts] == ["carries over"]
    assert [v.outcome for v in longer.verdicts] == ["shifts"]
    assert result.answer.largest is not None
    assert result.answer.largest.value.value == pytest.approx(np.log(1.5), abs=1e-3)
    assert "the mean norm of rows of L is 1.5 times that of A" in result.answer.largest.sentence
    [step] = result.answer.next_steps
    assert step == f"Scale rows of A and L each by a mean norm of its own ({HOOK})."


@pytest.mark.standard
def test_its_command_is_found_and_writes_json_page_and_terminal(
    arms: dict[str, Path], package: dict[str, str], tmp_path: Path
) -> None:
    words = ["norms", arms["A"], arms["L"], "--hook", HOOK, "--limit", "mean_norm=0.2"]
    html, out = tmp_path / "norms.html", tmp_path / "norms.json"
    done = actds_command(package, *words, "--html", html, "--json", out)
    assert done.returncode == 1 and done.stderr == "", done.stderr
    assert done.stdout.startswith("! Yes: 1 of 1 verdict shift")
    assert "Largest shift: 1.5 × the norm (B-A at resid_post.0, over all rows" in done.stdout
    page = html.read_text()
    assert "Do the rows of these arms differ in length?" in page and "Hook by position" in page
    assert "The leading measure is mean norm" in page and "actds norms " in page
    document = json.loads(out.read_text())
    schema = json.loads(actds_command(package, "schema", "norms").stdout)
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)
    assert document["schema"] == "actds.norms/1"
    limits = {"fdr": 0.05, "seed": 0, "mean_norm": 0.2, "spread": 0.1}
    assert document["limits"] == limits
    read = NORMS.result.from_json(out.read_text())
    assert read.to_json() + "\n" == out.read_text()
    assert NORMS.page(read, "actds norms").html().count("1.5 × the norm")
    quiet = actds_command(package, *words, "--fail-on", "never", "--json", "-")
    assert quiet.returncode == 0 and json.loads(quiet.stdout)["limits"] == limits


@pytest.mark.standard
def test_its_limits_and_errors_are_those_of_every_study(
    arms: dict[str, Path], package: dict[str, str]
) -> None:
    with pytest.raises(ActdsError, match=r"E009 limits mean_nrom: no such limit.*\n.*mean_norm\?"):
        NORMS.run(arms["A"], arms["C"], limits={"mean_nrom": 1})
    done = actds_command(package, "norms", arms["A"], "--limit", "spread=-1")
    assert done.returncode == 2 and done.stderr.startswith("E009 --limit spread: -1; expected")
    listed = actds_command(package, "schema", "limits").stdout
    assert "norms\n  fdr " in listed
    assert "  mean_norm           0.1     ln of the ratio of mean norms\n" in listed
    with pytest.raises(ActdsError, match="E009 instrument: moments"):
        register_words("moments", Words("nothing"))


def test_the_recipe_is_as_short_as_it_says() -> None:
    lines = Path(inspect.getfile(norms)).read_text().splitlines()
    assert len(lines) <= 200
