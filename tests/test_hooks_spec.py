from __future__ import annotations

import pytest

from actds.errors import ActdsError
from actds_writers.hooks_spec import parse_hooks


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
        "resid_mid:1",
        "10,20",
        "resid_post:1234567",
        "resid_post:" + "1," * 4096 + "1",
    ],
)
def test_malformed_specification_is_refused(spec: str) -> None:
    with pytest.raises(ActdsError) as caught:
        parse_hooks(spec, 30)
    assert caught.value.code == "E007"
