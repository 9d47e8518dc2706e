"""What attention says of a dataset: steps without numbers, strata, intervals, jumps, the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner

import actds
from actds.cli import cli
from actds.errors import ActdsError
from actds.format.shard import HOOK_CHOICES
from actds_studies.attention import api
from actds_studies.attention import rows as rows_module
from actds_studies.attention.api import Model
from actds_studies.attention.result import Attention, Trace, outcome_of
from actds_studies.attention.rows import MEASURES, LayerRows, Request, attention_rows
from actds_studies.pages.attention import page
from actds_testing import synthetic
from actds_testing.attending import ATTENDING, Attending, requests_of
from actds_testing.places import SCHEMAS, VECTORS
from actds_testing.schedules import simulate, table_of, thinned
from actds_validators.audit.result import Estimate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Attending:
    folder = tmp_path_factory.mktemp("study") / "model"
    return Attending(ATTENDING["sliding window"], folder, n_requests=24)


@pytest.fixture(scope="module")
def acts(model: Attending, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model.write(tmp_path_factory.mktemp("acts") / "acts")


@pytest.fixture(scope="module")
def result(model: Attending, acts: Path) -> Attention:
    return actds.attention(acts, model=model.folder)


def run(*words: object) -> Any:
    return CliRunner().invoke(cli, [str(word) for word in words], prog_name="actds")


def steps_of(path: Path, model: Attending, every: int = 1) -> dict[int, Any]:
    dataset = actds.open(path)
    layer = LayerRows(0, Model(dataset, model.folder).scheme(0), None)
    rows = attention_rows(dataset, requests_of(dataset), [layer], every)
    return {request.number: steps for request, _, steps in rows}


def test_a_step_without_one_of_its_keys_has_no_number_but_a_reason(
    model: Attending, tmp_path: Path
) -> None:
    schedule = simulate(24, 3, drops=True, longest=40)
    assert schedule.token_ids == model.schedule.token_ids
    lossy = Attending.__new__(Attending)
    vars(lossy).update(vars(model) | {"schedule": schedule})
    path = lossy.write(tmp_path / "lossy")
    dataset, n_short = actds.open(path), 0
    for number, steps in steps_of(path, model).items():
        rows = dataset.request(number, hook="q.0")
        line = dataset.requests().to_pylist()[number]
        n_given, n_fed = line["prompt_len"], line["prompt_len"] + line["generated_len"] - 1
        expected = [
            p - n_given + 1
            for p in range(n_given, n_fed)
            if (rows.row[max(0, p - 8) : p + 1] >= 0).all()
        ]
        assert steps.step.tolist() == expected
        n_short += n_fed - n_given - len(expected)
    result = actds.attention(path, model=model.folder)
    layer = result.layers[0]
    assert n_short == layer.n_decode - layer.n_steps == sum(layer.absent.values()) > 0
    assert set(layer.absent) <= {
        f"{what} is not stored ({fate})"
        for what in ("a key", "its row")
        for fate in ("dropped", "cache_ref", "aborted")
    }
    assert "Look at the steps without numbers" in " ".join(result.answer.next_steps)
    assert "have no number: a key is not stored (dropped)" in page(result, "").html()


def test_a_dataset_of_which_no_step_has_its_keys_is_refused(
    model: Attending, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model.write(tmp_path / "acts")
    right = rows_module.attended

    def decode_alone(of_layer: Any, request: Request, rows: Any, has_rows: Any, *rest: Any) -> Any:
        return right(of_layer, request, rows, has_rows & (np.arange(len(rows)) % 4 > 0), *rest)

    monkeypatch.setattr(rows_module, "attended", decode_alone)
    with pytest.raises(ActdsError, match="no decode step with all its keys: a key is not stored"):
        api.attention(path, model=model.folder)


def test_a_dataset_without_answers_is_refused(model: Attending, tmp_path: Path) -> None:
    path = model.write(tmp_path / "acts", schedule=simulate(6, 3, longest=1))
    with pytest.raises(ActdsError, match="no generated token"):
        api.attention(path, model=model.folder)


def test_without_v_and_z_it_refuses_or_says_that_nothing_is_proved(
    model: Attending, result: Attention, tmp_path: Path
) -> None:
    path = model.write(tmp_path / "acts", kinds="qk")
    with pytest.raises(ActdsError, match="nothing proves the attention") as raised:
        actds.attention(path, model=model.folder)
    assert raised.value.code == "E014"
    told = run("attention", path, "--model", model.folder)
    assert told.exit_code == 2 and "take numbers without a proof: --unproved" in told.stderr
    unproved = actds.attention(path, model=model.folder, unproved=True)
    assert not unproved.answer.is_proved
    assert {layer.proof.outcome for layer in unproved.layers} == {"not proved"}
    for first, other in zip(unproved.layers, result.layers, strict=True):
        assert first.values == other.values
    assert "NOT PROVED" in page(unproved, "").html()
    assert "? NOT PROVED" in run("attention", path, "--model", model.folder, "--unproved").stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--layer", "7"], "E014 --layer: layers 7; expected one of 0, 1"),
        (["--model", "nowhere"], "E005"),
        ([], "E005 synthetic-2-layers"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(
    model: Attending, acts: Path, words: list[str], error: str
) -> None:
    named = ["--model", model.folder] if words == ["--layer", "7"] else []
    told = run("attention", acts, *named, *words)
    assert told.exit_code != 0 and error in told.stderr, told.stderr
    assert "Traceback" not in told.stderr and told.stdout == ""


def test_a_dataset_without_queries_and_keys_is_refused_with_the_hooks_to_harvest(
    model: Attending, tmp_path: Path
) -> None:
    path = model.write(tmp_path / "acts", kinds="z")
    with pytest.raises(ActdsError, match=r"expected hooks q\.L and k\.L") as raised:
        actds.attention(path, model=model.folder)
    assert "Harvest hooks q, k, v and z of a layer, and entropies" in str(raised.value)


def choosing(model: Attending, path: Path, *choices: str | None) -> Path:
    """Write the rows of the model, of which each request chose the hooks in its turn."""
    requests = model.schedule.requests.to_pylist()
    for line in requests:
        kinds = choices[line["request"] % len(choices)]
        line["hooks"] = kinds and ",".join(f"{k}.{n}" for k in sorted(kinds) for n in model.layers)
    names = [line["hooks"].split(",") for line in requests[: len(choices)] if line["hooks"]]
    schedule = model.schedule.with_(requests=table_of("requests", requests))
    return model.write(path, facts={HOOK_CHOICES: json.dumps(names)}, schedule=schedule)


def test_a_step_has_a_number_where_its_request_and_those_before_it_chose_all_hooks(
    model: Attending, acts: Path, tmp_path: Path
) -> None:
    path = choosing(model, tmp_path / "chosen", "qk", None, "vz")
    chosen, whole = actds.open(path), actds.open(acts)
    whole_steps, n_short = steps_of(acts, model), 0
    for number, steps in steps_of(path, model).items():
        rows = [chosen.request(number, hook=hook).row for hook in ("q.0", "k.0")]
        n_given = whole.requests().to_pylist()[number]["prompt_len"]
        has_rows = np.all([row >= 0 for row in rows], axis=0)
        kept = [
            has_rows[max(0, n_given + s - 9) : n_given + s].all()
            for s in whole_steps[number].step.tolist()
        ]
        assert steps.step.tolist() == whole_steps[number].step[kept].tolist()
        np.testing.assert_array_equal(steps.values[:, :, 0], whole_steps[number].values[kept, :, 0])
        n_short += len(kept) - sum(kept)
    assert n_short > 0
    layer = actds.attention(path, model=model.folder).layers[0]
    assert layer.n_steps > 0 and "its row is not stored (other hooks were chosen)" in layer.absent


def test_hooks_that_no_request_chose_are_none_to_look_at(model: Attending, tmp_path: Path) -> None:
    for kinds, error in (("vz", r"expected hooks q\.L and k\.L"), ("qk", "nothing proves the att")):
        path = choosing(model, tmp_path / kinds, kinds)
        with pytest.raises(ActdsError, match=error):
            actds.attention(path, model=model.folder)


def test_values_are_means_over_steps_in_their_strata(
    model: Attending, acts: Path, result: Attention
) -> None:
    dataset = actds.open(acts)
    layer, of = result.layers[0], steps_of(acts, model)
    sampled = {(r["request"], r["position"]): r["entropy"] for r in dataset.sampled().to_pylist()}
    n_given = {r["request"]: r["prompt_len"] for r in dataset.requests().to_pylist()}
    step = np.concatenate([s.step for s in of.values()])
    means = np.concatenate([s.values.mean(axis=1) for s in of.values()])
    entropy = np.array(
        [sampled[n, n_given[n] + at] for n, s in of.items() for at in s.step.tolist()]
    )
    edges = np.quantile(entropy, [0.2, 0.4, 0.6, 0.8])
    for axis, stratum, some in (
        ("all", "all", step > 0),
        ("decode step", "9 to 16", (step >= 9) & (step <= 16)),
        ("entropy", "quintile 5", entropy > edges[3]),
        ("role", "assistant", step > 0),
    ):
        for name in ("entropy", "prompt", "role user", "jump"):
            known = some & np.isfinite(means[:, MEASURES.index(name)])
            value = layer.value(name, axis, stratum)
            assert value is not None and value.n_steps == known.sum()
            want = means[known, MEASURES.index(name)].astype(np.float64).mean()
            assert value.value == pytest.approx(want, abs=1e-5), (axis, name)
            assert value.low is not None and value.high is not None
            assert value.low < value.value < value.high or not value.value
    heads = [v for v in layer.values if (v.measure, v.axis) == ("prompt", "head")]
    whole = layer.value("prompt", "all", "all")
    assert whole is not None and len(heads) == layer.n_heads
    assert np.mean([head.value for head in heads]) == pytest.approx(whole.value, abs=1e-6)


def test_rows_that_were_drawn_count_for_those_they_were_drawn_from(
    model: Attending, tmp_path: Path
) -> None:
    shares = {step: 0.5 for step in range(0, 400, 2)}
    drawn = thinned(model.schedule, synthetic.SALT, shares, "request")
    facts = synthetic.thinned_facts("request")
    path = model.write(tmp_path / "acts", schedule=drawn, facts=facts)
    dataset, of = actds.open(path), steps_of(path, model)
    inclusion = np.concatenate(dataset.inclusion(dataset.shards_of("q.0")) or [])
    weight = np.concatenate([1 / inclusion[s.row] for s in of.values()])
    assert {*weight.tolist()} == {1.0, 2.0}
    entropy = np.concatenate([s.values[..., 0].mean(axis=1) for s in of.values()])
    value = actds.attention(path, model=model.folder).layers[0].value("entropy", "all", "all")
    assert value is not None
    assert value.value == pytest.approx(np.average(entropy, weights=weight), abs=1e-5)
    assert abs(value.value - entropy.mean()) > 1e-4


def test_steps_of_a_replay_begin_where_its_source_sampled(
    model: Attending, result: Attention, tmp_path: Path
) -> None:
    replay = actds.attention(model.write(tmp_path / "acts", origins=True), model=model.folder)
    assert replay.layers[0].n_decode > result.layers[0].n_decode


def test_every_fourth_step_is_looked_at_and_jumps_are_since_the_last(
    model: Attending, acts: Path
) -> None:
    some, all_steps = steps_of(acts, model, every=4), steps_of(acts, model)
    jump = MEASURES.index("jump")
    for number, steps in some.items():
        assert (steps.step % 4 == 1).all()
        at = np.isin(all_steps[number].step, steps.step)
        same = [n for n in range(len(MEASURES)) if n != jump]
        whole = all_steps[number].values[at]
        np.testing.assert_allclose(steps.values[..., same], whole[..., same], atol=1e-5)
        assert np.isfinite(steps.values[1:, :, jump]).all()


def test_a_change_is_the_mean_after_a_step_less_that_before_it() -> None:
    entropy = np.random.default_rng(0).random(30)
    changes = api._changes(entropy, 4)  # noqa: SLF001
    for at in range(30):
        if 4 <= at < 26:
            want = entropy[at + 1 : at + 5].mean() - entropy[at - 4 : at].mean()
            assert changes[at] == pytest.approx(want)
        else:
            assert np.isnan(changes[at])


def test_jumps_are_compared_with_other_steps_of_their_cell() -> None:
    is_jump = np.array([True, False, False, True, False, True])
    cell = np.array([0, 0, 0, 1, 1, 2])  # the last has no step to compare
    outcome = np.array([[1.0, 0, 1, 1, 0, 1]])
    sums = api._matched(is_jump, cell, outcome, np.ones(6))  # noqa: SLF001
    assert sums.tolist() == [3, 2, 2, 2, 0.5]


@pytest.mark.parametrize("effect", [0.0, 0.4])
def test_jumps_at_changes_are_told_from_those_that_do_not(
    result: Attention, model: Attending, acts: Path, effect: float
) -> None:
    """Of 60 planted datasets without an effect few may say yes; with one nearly all do."""
    dataset = actds.open(acts)
    of_layer = LayerRows(0, Model(dataset, model.folder).scheme(0), None)
    study = api._Study(dataset, [of_layer], result.limits)  # noqa: SLF001
    rng, said = np.random.default_rng(1), []
    for _ in range(60):
        sums = np.zeros((11, 24))
        for group in range(24):
            is_jump = rng.random(150) < 0.1
            large = rng.random(150) < 0.1 + effect * is_jump
            outcomes = np.stack([large] * 4).astype(float)
            cells = rng.integers(0, 8, 150)
            sums[:, group] = api._matched(is_jump, cells, outcomes, np.ones(150))  # noqa: SLF001
        said.append(study._jumps(sums).outcome)  # noqa: SLF001
    assert said.count("more") >= 58 if effect else said.count("more") <= 5


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [(0.01, 0.2, "more"), (-0.02, 0.04, "no more"), (-0.02, 0.1, "undecided")],
)
def test_an_outcome_follows_from_the_interval(low: float, high: float, outcome: str) -> None:
    assert outcome_of(Estimate(value=0, low=low, high=high), 0.05) == outcome


def test_without_entropies_what_jumps_bring_is_not_known(model: Attending, tmp_path: Path) -> None:
    path = model.write(tmp_path / "acts", entropy=False)
    result = actds.attention(path, model=model.folder)
    assert {layer.jumps.outcome for layer in result.layers} == {"not known"}
    assert "--entropy" in result.answer.next_steps[-1]
    assert all(v.axis != "entropy" for layer in result.layers for v in layer.values)


def test_some_requests_are_drawn_by_the_seed(model: Attending, acts: Path) -> None:
    limits = {"requests": 8, "seed": 5}
    first, again = (actds.attention(acts, model=model.folder, limits=limits) for _ in range(2))
    assert first == again and first.n_requests == 8
    other = actds.attention(acts, model=model.folder, limits={**limits, "seed": 6})
    assert other.layers[0].values != first.layers[0].values


def test_command_writes_page_json_and_terminal(
    model: Attending, acts: Path, result: Attention, tmp_path: Path
) -> None:
    html, out = tmp_path / "a.html", tmp_path / "a.json"
    words = ("--model", model.folder, "--html", html, "--json", out)
    told = run("attention", acts, *words)
    assert told.exit_code == 0 and told.stderr == "", told.stderr
    assert told.stdout.startswith("✓ Attention on the prompt: layer 0 ")
    document = json.loads(out.read_text())
    schema = json.loads((SCHEMAS / "attention.json").read_bytes())
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)
    assert Attention.from_json(out.read_text()) == result
    text = html.read_text()
    for words_shown in ("Self-proof", "Attention by decode step", "By role, entropy and jump",
                        "Jumps and entropy", "95 % interval", "actds attention"):  # fmt: skip
        assert words_shown in text
    assert len(text) < 1_000_000


def test_help_names_regimes_for_the_drift_of_queries() -> None:
    assert "actds regimes DATASET --hook q.L" in " ".join(run("attention", "--help").stdout.split())


def test_many_layers_are_one_page(result: Attention) -> None:
    many = [layer.model_copy(update={"layer": n}) for n in range(16) for layer in result.layers[:1]]
    shown = page(result.model_copy(update={"layers": many}), "actds attention")
    assert len(shown.html()) < 1_000_000 and list(shown.lines())
    assert replace(shown, answer="x").html() != shown.html()


def test_charts_have_their_numbers_and_mark_jumps_at_a_change(result: Attention) -> None:
    steps, values = list(range(1, 41)), [0.5] * 40
    trace = Trace(
        request="<b>r</b>", steps=steps, prompt=values, jump=[None, *values[1:]], entropy=values,
        marked=[9, 30],
    )  # fmt: skip
    layer = result.layers[0].model_copy(update={"traces": [trace]})
    shown = page(result.model_copy(update={"layers": [layer]}), "actds attention")
    pictures = {p.name: p for section in shown.sections for p in section.pictures}
    assert pictures.keys() == {"depth", "roles", "against", "trace0"}
    for picture in pictures.values():
        assert picture.data.rows
        assert {len(row) for row in picture.data.rows} == {len(picture.data.header)}
    marks = [shape for shape in pictures["trace0"].shapes if shape.tag == "polygon"]
    assert [mark.title for mark in marks] == ["step 9: jump 0.50", "step 30: jump 0.50"]
    lines = [row for row in pictures["depth"].data.rows if row[1] == "prompt"]
    known = [v for v in layer.values if (v.measure, v.axis) == ("prompt", "decode step")]
    assert [row[4:7] for row in lines] == [(v.value, v.low, v.high) for v in known]
    assert "<b>r</b>" not in shown.html()


def test_what_an_engine_looked_at_is_summed_as_rows_are() -> None:
    result = actds.attention(VECTORS / "valid" / "looks")
    assert [layer.layer for layer in result.layers] == [0, 3]
    for layer in result.layers:
        assert (layer.n_heads, layer.n_kv_heads, layer.proof.outcome) == (2, None, "proved")
        assert 0 < layer.n_steps < layer.n_decode + 1
        values = {v.measure: v.value for v in layer.values if v.axis == "all"}
        assert (values["entropy"], values["position 0"], values["sinks"]) == (1.5, 0.5, 0.125)
        assert (values["prompt"], values["generated"]) == (0.25, 0.125)
    assert result.answer.is_proved and "while it was served" in page(result, "x").html()
