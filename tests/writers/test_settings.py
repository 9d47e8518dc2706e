"""Settings stand once: options, keyword arguments and the keys of a server are the same fields."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel

import actds
from actds.cli import cli
from actds.errors import ActdsError
from actds_testing.places import ROOT
from actds_testing.synthetic import make_dataset
from actds_writers.cli import plan as plan_command
from actds_writers.cli import write as write_command
from actds_writers.config import HarvestSettings, LiveSettings, PlanSettings, WriteSettings
from actds_writers.engines.vllm.options import graph_key
from actds_writers.ipc.link import ENVIRONMENT, Link

NEEDED = {"out": "acts", "model": "m", "prompts": "p.jsonl", "hooks": "resid_post:0"}


@pytest.mark.parametrize(
    ("command", "model", "skip"),
    [(write_command, WriteSettings, {"out"}), (plan_command, PlanSettings, set())],
)
def test_every_setting_is_an_option_with_the_default_and_the_words_of_its_field(
    command: click.Command, model: type[BaseModel], skip: set[str]
) -> None:
    options = {o.name: o for o in command.get_params(click.Context(command))}
    assert set(model.model_fields) - skip <= set(options)
    for name in set(model.model_fields) - skip:
        option, field = options[name], model.model_fields[name]
        assert isinstance(option, click.Option)
        assert option.required == field.is_required()
        assert option.help == f"{field.description}."
        if not option.multiple and field.default is not None:
            assert option.required or option.default == field.default


@pytest.mark.parametrize("model", [WriteSettings, PlanSettings])
def test_the_functions_show_the_fields_as_their_keywords(model: type[BaseModel]) -> None:
    function = actds.write if model is WriteSettings else actds.plan
    shown = inspect.signature(function).parameters
    assert set(model.model_fields) <= set(shown)
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in shown.values())


def test_every_key_of_a_server_is_in_its_guide() -> None:
    guide = (ROOT / "docs" / "live.md").read_text()
    table = guide[guide.index("## Settings") : guide.index("## What is stored")]
    assert set(LiveSettings.model_fields) <= set(re.findall(r"`([a-z_0-9]+)`", table))


def test_settings_reach_the_processes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveSettings(out="acts", hooks="resid_post:1", fraction="0.5", store_dtype="float32")
    link = Link(
        folder="f", key="00", run="r", hooks=(("resid_post", 1),), settings=live, ring_nbytes=1,
        staging_nbytes=2, client_pid=3,
    )  # fmt: skip
    monkeypatch.setenv(ENVIRONMENT, link.to_environment())
    found = Link.from_environment()
    assert found is not None
    shared = {name: getattr(live, name) for name in HarvestSettings.model_fields}
    assert found.settings == HarvestSettings(**shared)
    assert found.hooks == link.hooks


def test_a_compiled_graph_is_used_again_only_for_rows_of_the_same_type() -> None:
    links = [
        Link(
            folder="f", key="00", run=f"r-{n}", hooks=(("resid_post", 1),), ring_nbytes=1,
            staging_nbytes=2, client_pid=3,
            settings=LiveSettings(out="acts", hooks="resid_post:1", store_dtype=stored),
        )
        for n, stored in enumerate(["float32", "float32", "bfloat16", None])
    ]  # fmt: skip
    first, again, narrow, computed = map(graph_key, links)
    assert first == again
    assert len({json.dumps(key) for key in (first, narrow, computed)}) == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ring_mb": 4}, "E009 ring_mb: .*expected ring_mib"),
        ({"ring_mib": "4"}, "E009 ring_mib: '4'; expected a valid integer"),
        ({"ring_mib": 0}, "E009 ring_mib: 0; expected greater than or equal to 1"),
        ({"overflow": "drop"}, "E009 overflow: 'drop'; expected .*'drop_newest'"),
        ({"engine": "vlm"}, "E009 engine: 'vlm'; expected vllm"),
        ({"engine": "transformers", "engine_args": {"block_size": 1}}, "E009 .*block_size"),
        ({"canary": "many"}, "E009 canary"),
        ({"seed": -5}, "E009 seed: -5; expected greater than or equal to 0"),
        ({"seed": 2**32}, "E009 seed: 4294967296; expected less than 4294967296"),
        ({"max_tokens": 0}, "E009 max_tokens: 0; expected greater than or equal to 1"),
        ({"max_tokens": 2**64}, "E009 max_tokens: .*expected less than 2147483648"),
        ({"continue_at": 2**64}, "E009 continue_at: .*expected less than 2147483648"),
    ],
)
def test_write_refuses_bad_keywords_before_anything_is_made(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ActdsError, match=words):
        actds.write(**{**NEEDED, "out": tmp_path / "acts", **fields})
    with pytest.raises(ActdsError, match="E009 hooks: nothing; expected a value"):
        actds.write(out=tmp_path / "acts", model="m", prompts="p")
    assert not list(tmp_path.iterdir())


def test_old_names_of_options_say_the_new_ones() -> None:
    words = [f"--{name}={value}" for name, value in NEEDED.items() if name != "out"]
    old = CliRunner().invoke(cli, ["write", "acts", *words, "--writer", "transformers"])
    assert old.exit_code == 2 and "--engine" in old.stderr
    old = CliRunner().invoke(cli, ["write", "acts", *words, "--engine", "block_size=32"])
    assert old.exit_code == 2 and "E009" in old.stderr and "--engine-arg" in old.stderr


@pytest.mark.parametrize("command", ["write", "plan", "recover"])
def test_help_ends_with_examples_whose_options_exist(command: str) -> None:
    text = CliRunner().invoke(cli, [command, "--help"]).output
    examples = text[text.index("Examples:") :]
    assert 2 <= examples.count(f"actds {command} ") <= 3
    assert set(re.findall(r"--[a-z-]+", examples)) <= set(
        re.findall(r"--[a-z-]+", text[: text.index("Examples:")])
    )


def test_plan_returns_what_the_command_prints() -> None:
    found = actds.plan(
        d_model=2048, layers=24, hooks="resid_post:10,20", prefill_rate=9_000, bursts=["4:10"],
        threads=2,
    )  # fmt: skip
    words = ["--d-model", "2048", "--layers", "24", "--hooks", "resid_post:10,20",
             "--prefill-rate", "9000", "--burst", "4:10", "--threads", "2"]  # fmt: skip
    printed = CliRunner().invoke(cli, ["plan", *words, "--json"])
    facts = json.loads(printed.output)
    assert (facts.pop("format"), facts.pop("version")) == ("actds.plan", "1")
    assert facts == json.loads(json.dumps(found.as_json()))
    assert found.fits and found.profile is None
    with pytest.raises(ActdsError, match="E009 bursts"):
        actds.plan(d_model=8, layers=2, prefill_rate=1.0, bursts=["4"])


def test_recover_returns_what_became_of_every_run(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "d", n_requests=4)
    result = actds.recover(dataset)
    assert [run.outcome for run in result.runs] == ["accounted"]
    assert result.error is None and result.seal is not None
    assert result.runs[0].n_rows == result.seal.totals["rows"]
    with pytest.raises(ActdsError, match="E101"):
        actds.recover(tmp_path)
