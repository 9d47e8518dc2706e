from __future__ import annotations

from pathlib import Path

import pytest

from actds.errors import ActdsError
from actds_writers.capture.hooks import parse_hooks
from actds_writers.model_folder import model_config


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        ("resid_post:10,20", [10, 20]),
        ("resid_post:20, 10", [10, 20]),
        ("resid_post:0-29", list(range(30))),
        ("resid_post:all", list(range(30))),
        ("resid_post:-1,-30", [0, 29]),
        ("resid_post:-3--1", [27, 28, 29]),
        ("resid_post:27--1", [27, 28, 29]),
        ("resid_post:3,2-4,3", [2, 3, 4]),
        (" resid_post : 1 ; resid_post:2; ", [1, 2]),
    ],
)
def test_specification_names_its_layers_in_order_and_once(spec: str, layers: list[int]) -> None:
    places = parse_hooks(spec, 30)
    assert [place.layer for place in places] == layers
    assert [place.name for place in places] == [f"resid_post.{layer}" for layer in layers]


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("resid_mid:8;mlp_out:8", ["mlp_out.8", "resid_mid.8"]),
        ("embed", ["embed.0"]),
        ("embed:0; final", ["embed.0", "final.29"]),
        ("final:-1;embed:all;final:all", ["embed.0", "final.29"]),
    ],
)
def test_kinds_stand_side_by_side_and_some_have_one_place(spec: str, names: list[str]) -> None:
    assert [place.name for place in parse_hooks(spec, 30)] == names


@pytest.mark.parametrize("layer", ["30", "-31", "0-30", "999999", "29-31"])
def test_layer_that_the_model_lacks_is_refused_with_the_range(layer: str) -> None:
    with pytest.raises(ActdsError) as caught:
        parse_hooks(f"resid_post:{layer}", 30)
    assert caught.value.code == "E007"
    assert caught.value.expected == "layers 0 to 29, or -30 to -1 from the end"


@pytest.mark.parametrize(
    "spec",
    [
        "",
        ";",
        "resid_post",
        "resid_post:",
        "resid_post:,",
        "resid_post:1,",
        "resid_post:x",
        "resid_post:1.5",
        "resid_post:5-3",
        "resid_post:1-2-3",
        "resid_post:\u0663",
        "resid_pro:1",
        "embed:1",
        "final:0",
        "10,20",
        "resid_post:1234567",
        "resid_post:" + "1," * 4096 + "1",
    ],
)
def test_malformed_specification_is_refused(spec: str) -> None:
    with pytest.raises(ActdsError) as caught:
        parse_hooks(spec, 30)
    assert caught.value.code == "E007"


@pytest.mark.parametrize("arch", ["gpt2", "bloom", "mpt", "gptj", "gpt_bigcode", "dbrx"])
def test_a_model_folder_says_layers_and_width_under_any_name(arch: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(arch)
    config.save_pretrained(tmp_path)
    found = model_config(tmp_path)
    assert found["num_hidden_layers"] == config.num_hidden_layers > 1
    assert found["hidden_size"] == config.hidden_size > 1


def test_a_folder_without_a_decoder_model_is_refused(tmp_path: Path) -> None:
    for config in ('{"model_type": "resnet"}', '{"model_type": "unheard_of"}', "{}"):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(ActdsError, match=r"E005 .*no num_hidden_layers"):
            model_config(tmp_path)
    for config in ("[]", "[" * 100_000, '{"text_config": 3}'):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(ActdsError, match=r"E005 .*config.json: .*expected a model folder"):
            model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": -4, "hidden_size": 8}')
    with pytest.raises(ActdsError, match=r"E005 .*no num_hidden_layers"):
        model_config(tmp_path)
