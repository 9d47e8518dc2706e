from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from actds.errors import ActdsError
from actds_writers.engine_protocol import engine_names, find_engine
from actds_writers.engines import vllm as vllm_engine
from actds_writers.engines.vllm import OWNED, REFUSED, VLLM, VllmOptions, refuse_options

KNOWN = frozenset({"max_model_len", "enforce_eager", "dtype", "hf_overrides", "swap", "revision"})


@pytest.fixture(autouse=True)
def known_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "argument_names", lambda: KNOWN)


def parse(*items: str) -> dict[str, object]:
    options = VLLM.parse(items)
    assert isinstance(options, VllmOptions)
    return options.arguments()


def refusal(*items: str) -> ActdsError:
    with pytest.raises(ActdsError) as caught:
        VLLM.parse(items)
    return caught.value


def test_values_are_json_where_they_can_be_and_strings_else() -> None:
    items = ["max-model-len=64", "enforce_eager=True", 'hf_overrides={"a": [1]}', "dtype=float32"]
    assert parse(*items, "swap=0.5", "revision = null") == {
        "max_model_len": 64,
        "enforce_eager": True,
        "hf_overrides": {"a": [1]},
        "dtype": "float32",
        "swap": 0.5,
        "revision": None,
    }


@pytest.mark.parametrize(
    "item", ["", "swap", "=1", "swap=", "a b=1", "--swap=1", "swap={1", 'swap="x', "1x=2", "é=1"]
)
def test_malformed_word_is_refused(item: str) -> None:
    assert refusal(item).code == "E009"


def test_unknown_key_is_refused_with_the_nearest_name() -> None:
    error = refusal("max_model_length=64")
    assert (error.code, error.place) == ("E009", "--engine-arg max_model_length")
    assert "max_model_len" in error.expected


def test_repeated_key_is_refused_under_either_spelling() -> None:
    assert refusal("max_model_len=1", "max-model-len=2").code == "E009"


@pytest.mark.parametrize("key", OWNED)
def test_option_that_the_command_sets_itself_is_refused(key: str) -> None:
    assert refusal(f"{key}=x").code == "E009"


@pytest.mark.parametrize(
    "item",
    [
        "pipeline_parallel_size=2",
        "pipeline-parallel-size=2",
        "data_parallel_size=2",
        "data_parallel_size=true",
        'data_parallel_size="1"',
        'speculative_config={"method": "ngram"}',
        'kv_transfer_config={"kv_connector": "x"}',
        "async_scheduling=true",
        "async_scheduling=1",
        "skip_tokenizer_init=true",
        "enable_lora=true",
        "enable-lora=True",
        "worker_cls=my.Worker",
        "runner=pooling",
    ],
)
def test_configuration_that_capture_cannot_account_for_is_refused_with_the_reason(
    item: str,
) -> None:
    error = refusal(item)
    key = item.split("=")[0].replace("-", "_")
    assert (error.code, error.place) == ("E012", f"--engine-arg {key}")
    assert REFUSED[key].reason in error.got


def test_harmless_value_of_a_refused_option_passes() -> None:
    items = ["pipeline_parallel_size=1", "async_scheduling=false", "speculative_config=null"]
    assert parse(*items) == {
        "pipeline_parallel_size": 1,
        "async_scheduling": False,
        "speculative_config": None,
    }


def test_live_configuration_is_held_against_the_same_rules() -> None:
    refuse_options({"async_scheduling": False, "pipeline_parallel_size": 1, "other": 3})
    with pytest.raises(ActdsError, match="E012 --engine-arg async_scheduling"):
        refuse_options({"async_scheduling": True})


def test_every_option_that_has_a_rule_is_one_that_vllm_takes() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    # Read, not imported: the import takes longer than all the tests of this file.
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    classes = ast.parse(source.read_text(encoding="utf-8")).body
    engine_args = next(n for n in classes if isinstance(n, ast.ClassDef) and n.name == "EngineArgs")
    names = {ast.unparse(n.target) for n in engine_args.body if isinstance(n, ast.AnnAssign)}
    assert set(REFUSED) | set(OWNED) <= names


def test_an_engine_that_nobody_registers_is_refused_with_the_nearest_name() -> None:
    own = ["transformers", "vllm"]
    assert set(own) <= set(engine_names())
    assert [find_engine(name).name for name in own] == own
    with pytest.raises(ActdsError, match=r"E009.*'transformer'.*transformers"):
        find_engine("transformer")


def test_a_replay_runs_one_request_at_a_time_and_reuses_no_prefix() -> None:
    given = VLLM.options({"max_num_seqs": 8, "enforce_eager": True})
    alone = VLLM.alone(given)
    assert isinstance(alone, VllmOptions)
    assert alone.arguments() == {
        "max_num_seqs": 1,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    transformers = find_engine("transformers")
    assert transformers.alone(transformers.options({"dtype": "float32"})).max_num_seqs == 1
