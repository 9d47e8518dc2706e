"""The command: arms in words, what it prints and writes, how it ends, and what it refuses."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file
from scipy import stats

import actds
from actds.cli import cli
from actds.errors import ActdsError
from actds.explore.requests import prefix_hashes
from actds.loader.selection import held_out_requests
from actds_studies.cli.commands import regimes as command
from actds_studies.pages.regimes import page as page_of
from actds_studies.regimes.api import ArmWords, parse_arms, parse_contrasts, regimes
from actds_studies.regimes.arms import TRAINED, Arm, read_arm
from actds_studies.regimes.contrast import contrast
from actds_studies.regimes.instruments.probes import read_probes
from actds_studies.regimes.result import Regimes
from actds_testing.cli_tree import printed
from actds_testing.places import SCHEMAS
from actds_testing.regime_datasets import HOOKS, other_continuations, three_arms
from actds_testing.schedules import simulate
from actds_testing.synthetic import make_dataset

HOOK = HOOKS[1]
D_MODEL = 16
Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A: a run; B: other tokens behind its prompts; C: its tokens, in float32."""
    return three_arms(tmp_path_factory.mktemp("arms"))


def run(*args: object) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args], prog_name="actds regimes")


def dictionary(folder: Path, d: int = D_MODEL, **changes: Any) -> Path:
    """Write a SAELens dictionary of random directions, d channels to 24 features."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    w_dec = rng.normal(size=(24, d)).astype(np.float32)
    w_dec /= np.linalg.norm(w_dec, axis=1, keepdims=True)
    weights = {
        "W_enc": np.ascontiguousarray(w_dec.T), "W_dec": w_dec,
        "b_enc": np.full(24, -0.3, np.float32), "b_dec": np.zeros(d, np.float32),
    }  # fmt: skip
    save_file(weights | changes.pop("weights", {}), folder / "sae_weights.safetensors")
    metadata = {"sae_lens_version": "6.0.0", "hook_name": "blocks.1.hook_resid_post"}
    metadata |= changes.pop("metadata", {})
    config = {"architecture": "standard", "d_in": d, "d_sae": 24,
              "normalize_activations": "none", "metadata": metadata}  # fmt: skip
    (folder / "cfg.json").write_text(json.dumps(config | changes))
    return folder


def test_an_arm_is_a_path_with_a_name_before_it_and_selections_after() -> None:
    texts = (
        "s3://bucket/a:b/acts",
        "G=acts:phase=decode,where=role in ('user', 'tool') and position == 3,exclude=sink",
        "./x=y:exclude=special,exclude=eos",
        "_R=acts",  # no name: a path
    )
    assert parse_arms(texts) == [
        ArmWords("A", "s3://bucket/a:b/acts"),
        ArmWords("G", "acts", "decode", "role in ('user', 'tool') and position == 3", ("sink",)),
        ArmWords("C", "./x=y", exclude=("special", "eos")),
        ArmWords("D", "_R=acts"),
    ]
    assert parse_arms([Path("a"), Path("b/c")]) == parse_arms(["a", "b/c"])
    assert parse_arms([Path("acts")]) == parse_arms(["acts"])
    assert parse_arms(["acts:where=position < 9"]) == [
        ArmWords("H", "acts", "prefill", "position < 9"),
        ArmWords("G", "acts", "decode", "position < 9"),
    ]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a:phrase=decode", "b"], "the key phrase"),
        (["a:phase=decode,phase=prefill", "b"], "phase twice"),
        (["A=x", "A=y"], "A twice"),
        (["b", "A=y"], "names of their own"),  # not of this one: the first is called A
        (["G=:phase=decode", "b"], "no path"),
        (["acts:phase=decode"], "prefill and decode rows"),
        (["G=acts"], "prefill and decode rows"),
        ([], "0 of them"),
    ],
)
def test_an_arm_that_cannot_be_meant_is_refused(texts: list[str], words: str) -> None:
    with pytest.raises(ActdsError, match=rf"E009.*{words}"):
        parse_arms(texts)


def test_a_contrast_names_the_arm_and_then_its_reference() -> None:
    names = ["H", "R", "G"]
    assert parse_contrasts(names, []) == [("H", "R"), ("H", "G")]
    assert parse_contrasts(names, ["G-R", "R-H", "G-R"]) == [("R", "G"), ("H", "R")]
    for wrong in ("G", "G-X", "G-G", "G-R-H"):
        with pytest.raises(ActdsError, match=r"E009 contrasts"):
            parse_contrasts(names, [wrong])


def test_computation_and_authorship_are_named_from_the_pairs(arms: dict[str, Path]) -> None:
    given = [f"{name}={path}:phase=decode" for name, path in arms.items()]
    found = regimes(*given, hooks=[HOOK], limits={"outliers": 0.5})
    assert {c.name: (c.pairing, c.about) for c in found.contrasts} == {
        "B-A": ("position", "authorship"),
        "C-A": ("token", "computation"),
    }
    assert [arm.n_decode for c in found.contrasts for arm in (c.first, c.second)] == [
        arm.n_rows for c in found.contrasts for arm in (c.first, c.second)
    ]


def test_no_outlier_in_too_few_rows_is_undecided_for_want_of_rows(arms: dict[str, Path]) -> None:
    given = [f"{name}={arms[name]}" for name in "AC"]
    found = regimes(*given, hooks=[HOOK], limits={"outliers": 1 / 8192})
    (value,) = (
        v for v in found.contrasts[0].values
        if (v.axis, v.measure) == ("all", "outlier rate of rows")
    )  # fmt: skip
    assert (value.value, value.outcome) == (0.0, "undecided")
    needed = "about 24,576 rows are needed to rule out such a share, "
    assert value.short == f"{needed}{min(value.n_rows):,} are there"


def test_one_dataset_is_compared_by_phase(arms: dict[str, Path]) -> None:
    found = regimes(arms["A"], hooks=[HOOK])
    (contrast,) = found.contrasts
    assert (contrast.name, contrast.pairing, contrast.about) == ("G-H", "unpaired", "both")
    assert (contrast.first.n_decode, contrast.second.n_decode) == (0, contrast.second.n_rows)


def test_a_shared_system_prompt_does_not_tie_the_requests_to_one_another(tmp_path: Path) -> None:
    """Found on a real harvest: 96 requests were 2 groups, and nothing could be estimated."""
    one = actds.open(make_dataset(tmp_path / "a", n_requests=30, cache=False))
    other = actds.open(
        make_dataset(tmp_path / "b", n_requests=30, cache=False, rows_per_shard=40, run="r-other")
    )
    plan, first, second = contrast(Arm("A", one), Arm("B", other), HOOK)
    assert len(np.unique(plan.first.cluster)) == first.n_requests == second.n_requests
    assert first.n_repeats > 50
    # Each prefix counts for the first request that has it, wherever its row is stored.
    rows = read_arm(Arm("A", one), HOOK)
    shared = np.flatnonzero(rows.position == 1)
    assert len(np.unique(rows.prefix[shared])) == len(shared) < 30


def test_json_on_stdout_is_the_result_and_keeps_its_schema(arms: dict[str, Path]) -> None:
    told = run(arms["A"], arms["C"], "--hook", HOOK, "--json", "-", "--limit", "outliers=0.5")
    assert told.stderr == ""
    document = json.loads(told.stdout)
    schema = json.loads((SCHEMAS / "regimes.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    assert document["schema"] == "actds.regimes/1" and document["limits"]["outliers"] == 0.5
    assert json.loads(Regimes.from_json(told.stdout).to_json()) == document
    assert told.exit_code == 0, "float32 of the same values in bfloat16 carries over"


def test_the_published_schema_is_that_of_the_model() -> None:
    from actds.cli.command import document_schema

    published = json.loads((SCHEMAS / "regimes.json").read_bytes())
    assert published == document_schema(Regimes, "serialization"), (
        "run: actds schema --write spec/0.1/schemas"
    )


def test_files_are_written_and_the_page_says_where(arms: dict[str, Path], tmp_path: Path) -> None:
    html, out = tmp_path / "page.html", tmp_path / "result.json"
    told = run(f"X={arms['A']}", f"Y={arms['C']}", "--hook", HOOK, "--limit", "outliers=0.5",
               "--html", html, "--json", out)  # fmt: skip
    assert told.exit_code == 0, told.output
    assert sorted(tmp_path.iterdir()) == [html, out]
    lines = told.stdout.splitlines()
    assert lines[0] == "✓ No: 2 verdicts, and all carry over"
    assert lines[-2:] == [f"report: {html}", f"result: {out}"]
    result = Regimes.from_json(out.read_bytes())
    for verdict in result.contrasts[0].verdicts:
        assert verdict.sentence in told.stdout and verdict.sentence in html.read_text()
    assert "not computation" not in told.stdout.splitlines()[0]
    assert "Y-X at resid_post.1" in told.stdout and f"actds regimes X={arms['A']}" in told.stdout


def test_pages_say_what_was_compared_as_the_audits_do(
    arms: dict[str, Path], tmp_path: Path
) -> None:
    html = tmp_path / "page.html"
    told = run(f"X={arms['A']}", f"Y={arms['C']}:phase=decode", "--hook", HOOK, "--html", html)
    page = re.sub(r"<[^>]*>|\s+", " ", html.read_text())
    dataset = actds.open(arms["A"])
    (run_record,) = dataset.runs.values()
    day = datetime.fromtimestamp(run_record.started_ns // 10**9, UTC)
    for words in (
        "synthetic-2-layers", "resid_post.1 (16 × bfloat16)", "resid_post.1 (16 × float32)",
        f"{day:%Y-%m-%d %H:%M} UTC with synthetic", f"X={arms['A']}", "actds audit",
        "Y is generated tokens, one a step in decode. Y-X is Y compared with its reference, X.",
    ):  # fmt: skip
        assert words in told.stdout and words in re.sub(" +", " ", page), words


def test_the_answer_is_in_the_result_and_pages_only_word_it(arms: dict[str, Path]) -> None:
    given = [f"{name}={path}:phase=decode" for name, path in arms.items()]
    told = run(*given, "--hook", HOOK, "--limit", "relative_l2=1e-6", "--json", "-")
    document = json.loads(told.stdout)
    answer, datasets = document["answer"], document["datasets"]
    assert answer["outcome"] == "shifts" and answer["n_shifts"] >= 1
    assert answer["separated"] in ("computation", "not separated", "both") and answer["reason"]
    value = answer["largest"]["value"]
    (contrast,) = (c for c in document["contrasts"] if c["name"] == answer["largest"]["contrast"])
    assert value | {"elements": []} in [v | {"elements": []} for v in contrast["values"]]
    assert value["outcome"] == "shifts" and value["axis"] == "all" and answer["next_steps"]
    assert [one["digest"] for one in datasets] == [actds.open(p).digest for p in arms.values()]
    changed = Regimes.from_json(told.stdout)
    other = {"separated": "neither", "reason": "as was said", "words": "Yes: in other words"}
    shown = page_of(
        changed.model_copy(update={"answer": changed.answer.model_copy(update=other)}), "x"
    )
    first = next(shown.lines()).text
    assert first == "! Yes: in other words" and "Yes: in other words" in shown.html()
    assert "neither" in shown.html() and "as was said" in shown.html()
    assert next(page_of(changed, "x").lines()).text == f"! {answer['words']}"


@pytest.mark.parametrize(
    ("options", "argument", "option"),
    [
        (["--contrast", "X-A"], {"contrasts": ["X-A"]}, "--contrast"),
        (["--hook", "resid_post.9"], {"hooks": ["resid_post.9"]}, "--hook"),
        (["--floor", "A-X"], {"floor": "A-X"}, "--floor"),
        (["--label", "role == 'user'"], {"label": "role == 'user'"}, "--label"),
    ],
)
def test_an_error_names_the_argument_as_it_was_given(
    arms: dict[str, Path], options: list[str], argument: dict[str, Any], option: str
) -> None:
    given = [f"{name}={arms[name]}" for name in "AC"]
    (name,) = argument
    with pytest.raises(ActdsError) as raised:
        regimes(*given, **argument)
    assert raised.value.place == name
    told = run(*given, *options)
    assert printed(told, command).split(": ")[0].endswith(f" {option}")
    assert told.exception.got == raised.value.got
    with pytest.raises(ActdsError) as raised:
        regimes(*given, held_out=2.0)
    assert raised.value.place == "held_out"


def test_a_path_of_bytes_that_are_no_text_stands_in_all_that_is_written(
    arms: dict[str, Path], tmp_path: Path
) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/a\xff")
    shutil.copytree(arms["A"], odd)
    out = tmp_path / "out"
    told = run(odd, arms["C"], "--hook", HOOK, "--json", out, "--html", tmp_path / "page.html")
    assert told.exit_code == 0, told.output
    assert Regimes.from_json(out.read_bytes()).contrasts[0].first.words.endswith(r"/a\udcff")


@pytest.mark.parametrize(
    ("fail_on", "codes"),
    [(None, (0, 0, 1)), ("undecided", (0, 1, 1)), ("never", (0, 0, 0))],
)
def test_the_exit_code_is_that_of_the_worst_verdict(
    arms: dict[str, Path], fail_on: str | None, codes: tuple[int, int, int]
) -> None:
    option = [] if fail_on is None else ["--fail-on", fail_on]
    common = ("--hook", HOOK, *option)
    same = run(arms["A"], arms["C"], "--limit", "outliers=0.5", *common)
    undecided = run(arms["A"], *common)  # few decode rows have a token of a prompt
    shifts = run(arms["A"], arms["C"], "--limit", "relative_l2=1e-6", *common)
    said = [told.stdout.splitlines()[0].split(":")[0] for told in (same, undecided, shifts)]
    assert said == ["✓ No", "? Undecided", "! Yes"]
    assert (same.exit_code, undecided.exit_code, shifts.exit_code) == codes


def test_a_dictionary_is_scored_and_its_fit_is_that_of_numpy(
    arms: dict[str, Path], tmp_path: Path
) -> None:
    path = dictionary(tmp_path / "sae", metadata={"prepend_bos": True})
    given = [f"{name}={arms[name]}:phase=decode" for name in "AC"]
    found = regimes(*given, hooks=[HOOK], sae=[path])
    contrast = found.contrasts[0]
    value = next(v for v in contrast.values if v.measure == "FVU over the arm's own variance"
                 and v.axis == "all")  # fmt: skip
    x = compared(arms)
    w = np.load(_as_npz(path))
    rebuilt = np.maximum(x @ w["W_enc"] + w["b_enc"], 0) @ w["W_dec"]
    fvu = np.square(x - rebuilt).sum() / np.square(x - x.mean(axis=0)).sum()
    assert value.arms is not None
    assert value.arms[0] == pytest.approx(fvu, rel=1e-4)
    assert [v.instrument for v in contrast.verdicts] == [
        "dictionary", "overlap", "moments", "numerics"
    ]  # fmt: skip
    (used,) = found.used
    assert (used.hook, used.kind) == (HOOK, "dictionary") and "no request has one" in used.words
    # What is told one by one is what the rows say.
    elements = next(v for v in contrast.values if v.elements).elements
    active = (x @ w["W_enc"] + w["b_enc"] > 0).mean(axis=0)
    for element in elements:
        assert element.arms is not None
        assert element.arms[0] == pytest.approx(active[int(element.name)], abs=1e-6)


@pytest.mark.parametrize("normalization", ["layer_norm", "constant_norm_rescale"])
def test_a_dictionary_that_normalizes_rows_is_scored_in_the_units_of_the_rows(
    arms: dict[str, Path], tmp_path: Path, normalization: str
) -> None:
    path = dictionary(tmp_path / "sae", normalize_activations=normalization)
    given = [f"{name}={arms[name]}:phase=decode" for name in "AC"]
    found = regimes(*given, hooks=[HOOK], sae=[str(path)])
    x, w = compared(arms), np.load(_as_npz(path))
    centre, length = 0.0, np.sqrt((x**2).sum(axis=1, keepdims=True) / x.shape[1])
    if normalization == "layer_norm":
        centre, length = x.mean(axis=1, keepdims=True), x.std(axis=1, ddof=1, keepdims=True)
    z = (x - centre) / (length + 1e-5 * (normalization == "layer_norm"))
    rebuilt = np.maximum(z @ w["W_enc"] + w["b_enc"], 0) @ w["W_dec"] * length + centre
    fvu = np.square(x - rebuilt).sum() / np.square(x - x.mean(axis=0)).sum()
    value = next(v for v in found.contrasts[0].values if v.axis == "all"
                 and v.measure == "FVU over the arm's own variance")  # fmt: skip
    assert value.arms is not None and value.arms[0] == pytest.approx(fvu, rel=1e-4)
    assert f"{normalization} of each row" in found.used[0].words


def compared(arms: dict[str, Path]) -> Any:
    """Return the decode rows of A that have a partner in C."""
    one, other = (Arm(name, actds.open(arms[name]), phase="decode") for name in "AC")
    plan = contrast(one, other, HOOK)[0]
    return one.dataset.array(HOOK)[plan.first.row].astype(np.float64)


def _as_npz(folder: Path) -> Path:
    from safetensors.numpy import load_file

    out = folder.with_suffix(".npz")
    np.savez(out, **load_file(folder / "sae_weights.safetensors"))
    return out


def test_probes_of_a_file_are_scored(arms: dict[str, Path], tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(size=(2, D_MODEL)).astype(np.float32)
    file = tmp_path / "probes.safetensors"
    save_file({"weights": weights, "bias": np.array([1, 2], np.float32)}, file,
              {"hook": HOOK, "names": '["refuses", "lies"]'})  # fmt: skip
    given = [f"{name}={arms[name]}:phase=decode" for name in "AC"]
    found = regimes(*given, probes=[file])
    value = next(v for v in found.contrasts[-1].values if v.instrument == "probes"
                 and v.axis == "all")  # fmt: skip
    assert value.hook == HOOK and value.element in ("refuses", "lies") and value.arms is not None
    which = ["refuses", "lies"].index(value.element)
    x = compared(arms)
    assert value.arms[0] == pytest.approx((x @ weights[which]).mean() + which + 1, rel=1e-5)
    np.savez(tmp_path / "probes.npz", weights=weights)
    again = read_probes(tmp_path / "probes.npz")
    assert again.names == ("0", "1") and again.hook is None and not again.bias.any()


def test_probes_are_compared_by_the_area_of_their_labels(
    arms: dict[str, Path], tmp_path: Path
) -> None:
    weights = np.random.default_rng(1).normal(size=(1, D_MODEL))
    np.savez(tmp_path / "probes.npz", weights=weights)
    given = [f"{name}={arms[name]}:phase=decode" for name in "AC"]
    label = "position % 3 == 0 and token_id > 5"
    found = regimes(*given, hooks=[HOOK], probes=[str(tmp_path / "probes.npz")], label=label)
    value = next(v for v in found.contrasts[0].values if v.measure == "ROC area"
                 and v.axis == "all")  # fmt: skip
    one, other = (Arm(name, actds.open(arms[name]), phase="decode") for name in "AC")
    row = contrast(one, other, HOOK)[0].first.row
    tokens = one.dataset.tokens(HOOK).take(row)
    truth = (tokens["position"].to_numpy() % 3 == 0) & (tokens["token_id"].to_numpy() > 5)
    score = one.dataset.array(HOOK)[row].astype(np.float64) @ weights[0]
    expected = stats.mannwhitneyu(score[truth], score[~truth]).statistic
    expected /= truth.sum() * (~truth).sum()
    assert value.arms is not None and value.arms[0] == pytest.approx(expected, abs=0.005)
    with pytest.raises(ActdsError, match=r"E009 label: no probes"):
        regimes(*given, hooks=[HOOK], label=label)
    np.savez(tmp_path / "many.npz", weights=np.ones((33, D_MODEL)))
    with pytest.raises(ActdsError, match=r"E009 label: 33 probes"):
        regimes(*given, hooks=[HOOK], probes=[str(tmp_path / "many.npz")], label=label)
    for alike in ("position >= 0", "position < 0"):
        with pytest.raises(ActdsError, match=r"E014 label: true of .* rows of arm A and false"):
            regimes(*given, hooks=[HOOK], probes=[str(tmp_path / "probes.npz")], label=alike)
    with pytest.raises(ActdsError, match=r"E014 .*labl"):
        regimes(*given, hooks=[HOOK], probes=[str(tmp_path / "probes.npz")], label="labl == 1")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda p: None, "no such file"),
        (lambda p: p.write_bytes(pickle.dumps({"weights": [1]})), "Nothing in it was run"),
        (lambda p: np.savez(p, weights=np.array([{}], object)), "may be code"),
        (lambda p: np.savez(p, weights=np.full((2, 4), np.nan)), "NaN or infinity"),
        (lambda p: np.savez(p, weights=np.full((2, 4), 1e200)), r"1e\+200; expected at most"),
        (lambda p: np.savez(p, weights=np.ones(4)), r"expected \(n_probes, d_model\)"),
        (lambda p: np.savez(p, weights=np.ones((2, 4)), bias=np.ones(3)), r"bias: \(3,\)"),
        (lambda p: np.savez(p, weights=np.ones((2, 4), np.int64)), "int64"),
        (lambda p: np.savez(p, probes=np.ones((2, 4))), "no weights"),
    ],
)
def test_a_bad_file_of_probes_is_refused(tmp_path: Path, write: Any, words: str) -> None:
    path = tmp_path / "probes.npz"
    write(path)
    with pytest.raises(ActdsError, match=rf"(?s)E015.*{words}"):
        read_probes(path)


@pytest.mark.parametrize(
    "names",
    [
        '["a", ""]',
        '["a", "\\ud800"]',
        f'["a", "{"b" * 81}"]',
        "[1, 2]",
        '["a"]',
        '["a", "a"]',
        "{",
        "[" * 9999,
    ],
)
def test_names_of_probes_are_one_each(tmp_path: Path, names: str) -> None:
    path = tmp_path / "probes.safetensors"
    save_file({"weights": np.ones((2, 4), np.float32)}, path, {"names": names})
    with pytest.raises(ActdsError, match=r"E015.*names"):
        read_probes(path)


def test_a_contrast_of_what_was_served_alike_is_the_floor_of_the_others(
    arms: dict[str, Path], tmp_path: Path
) -> None:
    schedule = simulate(40, 0, cache=False)
    again = make_dataset(
        tmp_path / "d", schedule=schedule, hooks=HOOKS, dtype="float32", run="r-again"
    )
    sae = dictionary(tmp_path / "sae")
    words = [f"R={arms['C']}", f"other={arms['A']}", f"again={again}"]
    told = regimes(*words, hooks=[HOOK], sae=[str(sae)], contrasts=["other-R"], floor="again-R")
    assert [one.name for one in told.contrasts] == ["again-R", "other-R"]
    alike, other = ({(v.measure, v.axis, v.stratum): v for v in one.values if v.kind == "size"}
                    for one in told.contrasts)  # fmt: skip
    assert {name for name, axis, _ in other if axis == "all"} == {
        "relative L2", "drift over the dictionary's error", "features that switch",
        "features of a token that differ",
    }  # fmt: skip
    for key, value in other.items():
        if value.value is not None:
            assert value.floor == alike[key].value == 0
            assert value.note == "floor: again-R"
    assert (other["relative L2", "all", "all"].value or 0) > 1e-3
    with pytest.raises(ActdsError, match=r"E009 floor.*two of R, other, again"):
        regimes(*words, floor="X-R")
    with pytest.raises(ActdsError, match=r"E014 floor.*paired by position"):
        regimes(f"R={arms['C']}", f"other={arms['B']}", floor="other-R")


@pytest.mark.parametrize("tensor", ["W_enc", "W_dec"])
def test_a_dictionary_beyond_float32_is_refused_when_it_meets_rows(
    arms: dict[str, Path], tmp_path: Path, tensor: str
) -> None:
    shape = (D_MODEL, 24) if tensor == "W_enc" else (24, D_MODEL)
    large = {tensor: np.full(shape, 3e38, np.float32), "b_enc": np.ones(24, np.float32)}
    path = dictionary(tmp_path / "large", weights=large)
    told = run(arms["A"], arms["C"], "--sae", str(path))
    assert isinstance(told.exception, ActdsError), told.output
    assert _matches("E015.*large.*not finite in float32", str(told.exception))


def test_what_cannot_be_compared_is_refused_before_rows_are_read(
    arms: dict[str, Path], tmp_path: Path
) -> None:
    good, probes = dictionary(tmp_path / "good"), tmp_path / "probes.npz"
    np.savez(probes, weights=np.ones((2, 8)))
    model = {"metadata": {"model_name": "gpt2", "hook_name": "blocks.1.hook_resid_post"}}
    cases: list[tuple[list[str], str]] = [
        (["--hook", "resid_post.9"], "E014 --hook"),
        (["--contrast", "X-A"], "E009 --contrast"),
        (["--held-out", "0.1"], "E014 arm A.*requests.*8 at least"),
        (["--sae", str(tmp_path / "none")], "E015"),
        (["--sae", f"{HOOKS[0]}={good}"], "E015.*resid_post.0"),
        (["--hook", HOOKS[0], "--sae", str(good)], "E015.*resid_post.0"),
        (["--sae", str(good), "--sae", str(good)], "E009 --sae: two"),
        (["--sae", f"q.1={good}"], "E009 --sae: q.1"),
        (["--sae", str(dictionary(tmp_path / "m", **model))], "E015.*dictionary of gpt2"),
        (["--sae", str(dictionary(tmp_path / "f",
                                  normalize_activations="expected_average_only_in"))],
         "E015.*expected_average_only_in"),
        (["--sae", str(dictionary(tmp_path / "w", d_in=17))], "E015"),
        (["--sae", str(dictionary(tmp_path / "x", weights={
            "b_enc": np.full(24, np.nan, np.float32)}))], "E015.*NaN"),
        (["--hook", HOOK, "--probes", str(probes)], "E015.*probes.npz: probes of 8 channels"),
        (["--html", str(arms["A"] / "page.html")], "E009 --html"),
        (["--html", str(tmp_path / "no" / "page.html")], "E503"),
    ]  # fmt: skip
    for extra, words in cases:
        told = run(arms["A"], arms["C"], *extra)
        assert _matches(words, printed(told, command)), (extra, printed(told, command))
    for words in (f"B={arms['A']}", f"B={arms['A']}:phase=decode"):
        told = run(f"A={arms['A']}", words, "--hook", HOOK)
        assert _matches("E014 arms A and B at resid_post.1: the same rows", str(told.exception))
    before = (good / "cfg.json").read_bytes()
    told = run(arms["A"], arms["C"], "--sae", f"{HOOK}={good}", "--json", good / "cfg.json")
    assert _matches("E009 --json .*cfg.json: the file of --sae", str(told.exception))
    assert (good / "cfg.json").read_bytes() == before
    other = make_dataset(tmp_path / "other", n_requests=20, seed=5)
    told = run(arms["A"], other, "--pairing", "token")
    assert _matches("E014 arms A and B.*pair by token", str(told.exception))
    unsealed = make_dataset(tmp_path / "unsealed", sealed=False)
    assert "E306" in str(run(arms["A"], unsealed).exception)


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, " ".join(text.split())) is not None


def test_a_dictionary_is_not_scored_on_what_it_was_fitted_on(
    arms: dict[str, Path], tmp_path: Path
) -> None:
    dataset = actds.open(arms["A"])
    record = {"format": "actds.loader", "digest": dataset.digest, "hooks": [HOOK]}
    given = [str(arms["A"]), str(arms["C"])]
    all_rows = dictionary(tmp_path / "all", metadata={"actds": record})
    half = dictionary(tmp_path / "half", metadata={"actds": record | {"split": ["train", 0.5]}})
    for path, held_out in ((all_rows, None), (all_rows, 0.5), (half, None), (half, 0.7)):
        with pytest.raises(ActdsError, match=r"E015.*fitted on rows of arm A"):
            regimes(*given, hooks=[HOOK], sae=[str(path)], held_out=held_out)
    found = regimes(*given, hooks=[HOOK], sae=[str(half)], held_out=0.5)
    assert found.contrasts[0].first.n_requests < len(dataset.requests())
    assert "held_out (0.5 held out)" in found.contrasts[0].first.words


def test_an_arm_of_other_tokens_than_the_dictionary_saw_is_compared_whole(
    arms: dict[str, Path], tmp_path: Path
) -> None:
    dataset = actds.open(arms["A"])
    record = {"format": "actds.loader", "digest": dataset.digest, "hooks": [HOOK]}
    half = dictionary(tmp_path / "half", metadata={"actds": record | {"split": ["train", 0.5]}})
    other = make_dataset(tmp_path / "other", n_requests=40, seed=5)
    given = [str(arms["A"]), str(other), str(arms["C"])]
    found = regimes(*given, hooks=[HOOK], sae=[str(half)], held_out=0.5, pairing="unpaired")
    n = [arm.n_requests for c in found.contrasts for arm in (c.first, c.second)]
    assert n[0] == n[2] == n[3] < 30 < n[1]  # C has the tokens of A
    with_split = regimes(*given[:2], hooks=[HOOK], held_out=0.5, pairing="unpaired")
    assert with_split.contrasts[0].second.n_requests < 30


def test_no_arm_is_scored_on_a_prefix_that_the_dictionary_saw(
    arms: dict[str, Path], tmp_path: Path
) -> None:
    dataset = actds.open(arms["A"])
    record = {"format": "actds.loader", "digest": dataset.digest, "hooks": [HOOK]}
    half = dictionary(tmp_path / "half", metadata={"actds": record | {"split": ["train", 0.5]}})
    schedule = other_continuations(simulate(40, 0, cache=False))
    again = make_dataset(tmp_path / "r", schedule=schedule, hooks=HOOKS, run="r-again")
    given = [*(f"{name}={arms[name]}" for name in "AB"), f"R={again}"]
    contrasts = ["B-A", "R-B"]  # B goes on from the prompts of A
    found = regimes(*given, contrasts=contrasts, hooks=[HOOK], sae=[str(half)], held_out=0.5)
    told = found.contrasts[1].first
    shards = dataset.shards_of(HOOK)
    number, held = held_out_requests(dataset, dataset.catalog.run_ids[0], 0.5)
    fitted = np.isin(dataset.tokens(HOOK)["request"].to_numpy(), number[~held])
    seen = np.unique(prefix_hashes(dataset, shards)[fitted])
    whole = read_arm(Arm("B", actds.open(arms["B"])), HOOK)
    n_seen = int(np.isin(whole.prefix, seen[seen != 0]).sum())
    assert n_seen > 0 and told.n_rows <= len(whole) - n_seen and told.n_apart[TRAINED] >= n_seen


def test_a_model_may_be_named_as_dictionaries_name_it(
    arms: dict[str, Path], tmp_path: Path
) -> None:
    path = dictionary(tmp_path / "sae", metadata={"model_name": "lab/model-9b"})
    given = [f"{name}={arms[name]}" for name in "AC"]
    with pytest.raises(ActdsError, match=r"E015.*model-9b"):
        regimes(*given, hooks=[HOOK], sae=[str(path)])
    assert regimes(*given, hooks=[HOOK], sae=[str(path)], model="model-9b").used


@pytest.mark.standard
def test_neither_an_engine_nor_a_trainer_is_imported(arms: dict[str, Path]) -> None:
    code = (
        "import sys; from actds_studies.cli.commands import regimes as c; "
        f"c.main([{str(arms['A'])!r}, {str(arms['C'])!r}], standalone_mode=False)"
    )
    script = f"try:\n  exec({code!r})\nexcept SystemExit: pass\n" + (
        "import sys\n"
        "print([m for m in ('vllm', 'transformers', 'torch', 'sae_lens') if m in sys.modules])"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert told.stdout.splitlines()[-1] == "[]"


def test_the_command_is_found_and_listed() -> None:
    """By entry point: an environment that was installed before this command lacks it."""
    from importlib.metadata import entry_points

    if "regimes" not in {entry.name for entry in entry_points(group="actds.commands")}:
        pytest.skip("installed before this command: make install")
    told = CliRunner().invoke(cli, ["regimes", "--help"], prog_name="actds")
    assert told.exit_code == 0 and "--contrast" in told.stdout and "--limit" in told.stdout
