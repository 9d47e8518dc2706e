"""Our engines, and an engine and a hook kind of another package, pass the tests we give others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actds.testing import EngineTests, HookKindTests, Rows
from actds_testing import toy
from actds_testing.harvest import ENGINE_ENVIRONMENT, ONE_PROCESS
from actds_testing.tiny import make_random_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def small_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    site = toy.register(tmp_path_factory.mktemp("site"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENGINE_ENVIRONMENT | ONE_PROCESS).items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
        patch.syspath_prepend(str(site))
        yield


class Ours(EngineTests):
    hooks = "embed;resid_post:0,1"

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.standard
class TestTransformers(Ours):
    engine = "transformers"
    engine_args = {"max_num_seqs": 3, "max_num_batched_tokens": 48}  # noqa: RUF012


@pytest.mark.standard
class TestToy(HookKindTests):
    engine = "toy"
    engine_args = {"max_num_seqs": 3, "chunk": 16}  # noqa: RUF012
    hooks = "toy_mlp:1"

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return toy.write_model(tmp_path_factory.mktemp("model") / "toy")

    def reference(self, model: Path, token_ids: list[int], hook: str) -> Rows:
        kind, _, layer = hook.rpartition(".")
        plain = toy.load_model(model)
        rows = [
            toy.plain_forward(plain, [token], position)[kind][int(layer)][0].float().numpy()
            for position, token in enumerate(token_ids)
        ]
        return np.stack(rows)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of vLLM, which runs in this process
class TestVLLM(Ours):
    engine = "vllm"
    engine_args = {  # noqa: RUF012
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 256,
        "max_num_batched_tokens": 128,
        "enforce_eager": True,
    }


@pytest.mark.standard
def test_the_kit_finds_late_lost_and_repeated_rows(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit: Any = TestToy()
    model = toy.write_model(tmp_path_factory.mktemp("model") / "toy")
    dataset = TestToy.dataset.__wrapped__.__func__(TestToy, model, tmp_path_factory)
    rows, shards = np.asarray(dataset.array("toy_mlp.1")[:]), dataset.shards_of("toy_mlp.1")
    with monkeypatch.context() as patch:
        patch.setattr(type(dataset), "array", lambda *_: np.roll(rows, 1, axis=0))
        with pytest.raises(AssertionError, match=r"toy_mlp\.1 \d+:\d+"):
            kit.test_each_row_is_that_of_its_own_position(dataset, model)
    for wrong, words in ((shards[1:], "not the captured"), ([*shards, shards[0]], "two rows")):
        monkeypatch.setattr(type(dataset), "shards_of", lambda *_, wrong=wrong: wrong)
        with pytest.raises(AssertionError, match=words):
            kit.test_every_position_has_one_fate_and_every_step_adds_up(dataset)
