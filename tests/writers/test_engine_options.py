from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

import actds
from actds.errors import ActdsError
from actds_writers.engine_protocol import engine_names, find_engine
from actds_writers.engines import vllm as vllm_engine
from actds_writers.engines.vllm import VLLM
from actds_writers.engines.vllm.options import (
    OVER_NODES,
    OWNED,
    REFUSED,
    VllmOptions,
    read_adapter,
    refuse_options,
)

KNOWN = frozenset({"max_model_len", "enforce_eager", "dtype", "hf_overrides", "swap", "load_format",
                   "async_scheduling", "spec_model", "nnodes", "node_rank",
                   "tensor_parallel_size"})  # fmt: skip


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
    assert parse(*items, "swap=0.5", "load_format = null") == {
        "max_model_len": 64,
        "enforce_eager": True,
        "hf_overrides": {"a": [1]},
        "dtype": "float32",
        "swap": 0.5,
        "load_format": None,
    }


@pytest.mark.parametrize(
    "item", ["", "swap", "=1", "swap=", "a b=1", "--swap=1", "swap={1", 'swap="x', "1x=2", "é=1"]
)
def test_malformed_word_is_refused(item: str) -> None:
    assert refusal(item).code == "E009"


def test_unknown_key_is_refused_with_the_nearest_name() -> None:
    error = refusal("max_model_length=64")
    assert (error.code, error.place) == ("E009", "engine_args max_model_length")
    assert "max_model_len" in error.expected


def test_repeated_key_is_refused_under_either_spelling() -> None:
    assert refusal("max_model_len=1", "max-model-len=2").code == "E009"


@pytest.mark.parametrize("key", OWNED)
def test_option_that_the_command_sets_itself_is_refused(key: str) -> None:
    assert refusal(f"{key}=x").code == "E009"


@pytest.mark.parametrize(
    "item",
    [
        "prefill_context_parallel_size=2",
        "prefill-context-parallel-size=2",
        "data_parallel_rank=1",
        "data_parallel_external_lb=true",
        'speculative_config={"method": "suffix"}',
        'speculative_config={"method": "extract_hidden_states", "num_speculative_tokens": 1}',
        'speculative_config={"num_speculative_tokens": 2}',
        "spec_method=medusa",
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
    assert (error.code, error.place) == ("E012", f"engine_args {key}")
    assert REFUSED[key].reason in error.got


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "eagle3", "mtp"])
def test_ways_to_draft_whose_account_is_tested_pass(method: str) -> None:
    for item in (f'speculative_config={{"method": "{method}"}}', f"spec_method={method}"):
        parse(item)
    # vLLM looks for the method itself; what it found is compared when the engine starts.
    parse('speculative_config={"model": "x", "num_speculative_tokens": 2}')
    parse("spec_model=x")


@pytest.mark.parametrize(
    "drafts", ['speculative_config={"method": "ngram"}', "spec_method=ngram", "spec_model=x"]
)
def test_drafts_with_pipeline_stages_are_refused_with_the_reason(drafts: str) -> None:
    with pytest.raises(ActdsError, match="drafts with 2 pipeline stages"):
        parse("pipeline_parallel_size=2", drafts)
    parse("pipeline_parallel_size=1", drafts)
    parse("pipeline_parallel_size=2")


def test_kv_that_no_model_computed_is_refused() -> None:
    inner = '{"connectors": [{"kv_connector": "DecodeBenchConnector"}]}'
    for item in (
        'kv_transfer_config={"kv_connector": "DecodeBenchConnector"}',
        f'kv_transfer_config={{"kv_connector_extra_config": {inner}}}',
    ):
        error = refusal(item)
        assert (error.code, error.place) == ("E012", "engine_args kv_transfer_config")
        assert "made-up values" in error.got


@pytest.mark.parametrize(
    "item",
    ["pipeline_parallel_size=2", "data_parallel_size=2", "node_rank=1",
     "distributed_executor_backend=uni", "distributed_executor_backend=ray"],
)  # fmt: skip
def test_what_the_first_of_several_nodes_cannot_account_for_is_refused(item: str) -> None:
    over = ("nnodes=2", "tensor_parallel_size=4")
    error = refusal(*over, item)
    key = item.split("=")[0]
    assert (error.code, error.place) == ("E012", f"engine_args {key}")
    assert OVER_NODES[key].reason in error.got
    parse(*over, "node_rank=0", "distributed_executor_backend=mp")


@pytest.mark.parametrize("what", [{"canary": "4"}, {"executor": "ray"}])
def test_a_second_engine_beside_one_over_nodes_is_refused(
    what: dict[str, Any], tmp_path: Path
) -> None:
    settings = {
        "out": str(tmp_path / "acts"),
        "model": "m",
        "prompts": "p",
        "hooks": "resid_post:1",
    }
    with pytest.raises(ActdsError, match=r"E012 engine_args nnodes: 2, and (canary|executor): "):
        actds.write(**settings, engine_args={"nnodes": 2}, **what)


def test_harmless_value_of_a_refused_option_passes() -> None:
    items = ["data_parallel_size=1", "async_scheduling=true", "spec_method=ngram"]
    assert parse(*items, 'speculative_config={"method": "ngram"}') == {
        "data_parallel_size": 1,
        "async_scheduling": True,
        "spec_method": "ngram",
        "speculative_config": {"method": "ngram"},
    }


@pytest.mark.parametrize("value", ["0", "true", '"1"', "1.5"])
def test_replicas_are_a_number_of_engines(value: str) -> None:
    assert parse("data_parallel_size=3") == {"data_parallel_size": 3}
    assert VLLM.replicas(VLLM.options({"data_parallel_size": 3})) == 3
    assert VLLM.replicas(VLLM.options({})) == 1
    error = refusal(f"data_parallel_size={value}")
    assert (error.code, error.place) == ("E009", "engine_args data_parallel_size")


def test_live_configuration_is_held_against_the_same_rules() -> None:
    refuse_options({"async_scheduling": True, "data_parallel_size": 1, "other": 3})
    with pytest.raises(ActdsError, match="E012 engine_args enable_dbo"):
        refuse_options({"enable_dbo": True})


def test_every_option_that_has_a_rule_is_one_that_vllm_takes() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    # Read, not imported: the import takes longer than all the tests of this file.
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    classes = ast.parse(source.read_text(encoding="utf-8")).body
    engine_args = next(n for n in classes if isinstance(n, ast.ClassDef) and n.name == "EngineArgs")
    names = {ast.unparse(n.target) for n in engine_args.body if isinstance(n, ast.AnnAssign)}
    assert set(REFUSED) | set(OVER_NODES) | set(OWNED) <= names


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


def test_a_replay_computes_all_of_its_kv_itself() -> None:
    given = VLLM.options({"kv_transfer_config": {"kv_connector": "ExampleConnector"}})
    alone = VLLM.alone(given)
    assert isinstance(alone, VllmOptions)
    assert alone.arguments()["kv_transfer_config"] is None


def test_an_adapter_is_an_option_of_this_engine_and_none_of_vllm(tmp_path: Path) -> None:
    error = refusal(f"lora={tmp_path}")
    assert (error.code, error.place) == ("E009", "engine_args lora")
    (tmp_path / "adapter_config.json").write_text('{"r": 9}')
    given = VLLM.parse([f"lora={tmp_path}", "max_model_len=64"])
    assert isinstance(given, VllmOptions)
    assert given.lora == str(tmp_path) and given.arguments() == {"max_model_len": 64}
    adapter = read_adapter(str(tmp_path))
    assert adapter.arguments == {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16}
    assert refusal("enable_lora=true").code == "E012"
