"""Tests that every engine and every hook kind has to pass, for those who write one.

They use the public API alone, as a user would: a harvest with ``actds.write``, then the dataset.
Subclass, say which model, and let pytest collect (``pip install pytest``)::

    from actds.testing import EngineTests

    class TestMine(EngineTests):
        engine = "mine"

        @pytest.fixture(scope="class")
        @classmethod
        def model(cls):
            return Path("models/tiny")

actds' own engines pass the same tests.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

import actds

if TYPE_CHECKING:
    from actds.explore.dataset import Dataset

Rows = npt.NDArray[np.float32]
_PARTS = ("captured", "recomputed", "rejected", "dropped", "aborted", "filtered", "undelivered")


class HarvestTests(ABC):
    """Tests of one harvest; ``EngineTests`` and ``HookKindTests`` say what the rows have to be.

    Attributes:
        engine: name of the engine, as for ``actds.write(engine=…)``.
        engine_args: its options.
        hooks: what is captured.
        settings: further arguments of ``actds.write``.
        tolerance: largest relative L2 distance of a row from its reference: 1e-5 for float32, 0.02
            for bfloat16.
        prompts: records of the prompts. Some begin alike, so that a prefix cache has hits; one has
            a single token or few.
    """

    engine: ClassVar[str]
    engine_args: ClassVar[Mapping[str, Any]] = {}
    hooks: ClassVar[str] = "resid_post:0"
    settings: ClassVar[Mapping[str, Any]] = {}
    tolerance: ClassVar[float] = 1e-5
    prompts: ClassVar[tuple[Mapping[str, Any], ...]] = tuple(
        {"id": f"q{n}", "prompt": f"{'all work and no play makes a dull day ' * 4}"[: 1 + 16 * n]}
        for n in range(8)
    )

    @classmethod
    @abstractmethod
    def model(cls, *fixtures: Any) -> Any:
        """Return the folder of a small model: a pytest fixture of the scope ``class``."""

    @abstractmethod
    def reference(self, model: Path, token_ids: list[int], hook: str) -> Rows:
        """Return what the model computes for tokens on their own, ``(len(token_ids), d_model)``.

        It must come from elsewhere than the engine: a plain forward of the model's own library.
        """

    @pytest.fixture(scope="class")
    @classmethod
    def dataset(cls, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
        """Harvest all prompts, two of them again on their own (``canary``)."""
        folder = tmp_path_factory.mktemp("harvest")
        source = folder / "prompts.jsonl"
        source.write_text("".join(json.dumps(record) + "\n" for record in cls.prompts), "utf-8")
        settings = {"max_tokens": 6, "canary": "2", **cls.settings}
        actds.write(
            out=folder / "acts",
            model=model,
            prompts=source,
            hooks=cls.hooks,
            engine=cls.engine,
            engine_args=dict(cls.engine_args),
            **settings,
        )
        return actds.open(folder / "acts")

    def test_a_validator_finds_nothing(self, dataset: Dataset) -> None:
        """Validate to the last bit: tables, digests, accounting, values, readouts."""
        report = actds.validate(dataset.path, level="deep")
        assert not report.errors, [finding.line() for finding in report.errors[:8]]

    def test_every_position_has_one_fate_and_every_step_adds_up(self, dataset: Dataset) -> None:
        """Recount the census with sets (spec 0.1 sections 7.1 and 7.3)."""
        spans = dataset.spans().to_pylist()
        requests = dataset.requests().to_pylist()
        assert len(requests) == len(self.prompts)
        for request in requests:
            owed = request["prompt_len"] + max(request["generated_len"] - 1, 0)
            ranges = sorted(
                (s["start"], s["stop"]) for s in spans if s["request"] == request["request"]
            )
            ends = [0, *(stop for _, stop in ranges)]
            assert [start for start, _ in ranges] == ends[:-1], f"a gap or an overlap: {ranges}"
            assert ends[-1] >= owed, f"{request}: {ends[-1]} positions of {owed}"
        captured = {
            (span["request"], position)
            for span in spans
            if span["disposition"] == "captured"
            for position in range(span["start"], span["stop"])
        }
        for hook in dataset.hooks:
            tokens = [s.tokens(["request", "position"]) for s in dataset.shards_of(hook)]
            keys = [(r["request"], r["position"]) for table in tokens for r in table.to_pylist()]
            assert len(keys) == len(set(keys)), f"{hook}: a position has two rows"
            assert set(keys) == captured, f"{hook}: rows are not the captured positions"
        for step in dataset.steps().to_pylist():
            assert step["batch_tokens"] == sum(step[f"{part}_tokens"] for part in _PARTS), step

    def test_each_row_is_that_of_its_own_position(self, dataset: Dataset, model: Path) -> None:
        """Compare every row with the reference of its position, and with those beside it.

        A row that came a position or a step late is close to the wrong reference.
        """
        tokens, sequences = dataset.tokens(), _sequences(dataset)
        at = np.stack([tokens[name].to_numpy() for name in ("request", "position")], axis=1)
        for hook in dataset.hooks:
            rows = np.asarray(dataset.array(hook)[:])
            states = {key: self.reference(model, ids, hook) for key, ids in sequences.items()}
            compared = 0
            for row, (request, position) in zip(rows, at.tolist(), strict=True):
                if request not in states:
                    continue
                compared += 1
                distance = _relative_l2(row, states[request])
                assert distance[position] <= self.tolerance, f"{hook} {request}:{position}"
                apart = _relative_l2(states[request][position], states[request])
                wrong = (distance < distance[position]) & (apart > 2 * self.tolerance)
                assert not wrong.any(), f"{hook} {request}:{position} is the row of another one"
            assert compared >= len(rows) // 2, "half of the rows have a reference at least"

    def test_requests_served_again_on_their_own_give_the_same_rows(self, dataset: Dataset) -> None:
        """A row depends on no neighbour in its batch, and on no chunk or cache (section 7.9)."""
        verdicts = Counter(dataset.canary()["verdict"].to_pylist())
        assert verdicts["same"] > 0 and not verdicts["foreign"], verdicts

    def test_the_run_record_says_what_ran(self, dataset: Dataset) -> None:
        """Every fact is observed or declared, or says why it is unknown (section 6.1)."""
        for record in dataset.runs.values():
            assert record.fields["engine.name"].value == self.engine
            assert record.fields["numerics.dtype"].origin == "observed"
            for name, entry in record.fields.items():
                assert (entry.origin == "unknown") == bool(entry.reason), name


class EngineTests(HarvestTests):
    """An engine of ``actds.engines``: rows are those of a plain forward in ``transformers``.

    The reference knows ``embed`` and ``resid_post`` of every layer but the last, whose output
    ``transformers`` gives behind the final norm; override it for other hooks or another library.
    """

    def reference(self, model: Path, token_ids: list[int], hook: str) -> Rows:
        """Return the hidden states of the model's float32 weights."""
        import torch
        from transformers import AutoModelForCausalLM

        plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        kind, _, layer = hook.rpartition(".")
        number = {"embed": 0, "resid_post": int(layer) + 1}[kind]
        with torch.no_grad():
            ids = torch.tensor([token_ids])
            states = plain.eval()(ids, output_hidden_states=True).hidden_states
        rows: Rows = states[number][0].float().numpy()
        return rows


class HookKindTests(HarvestTests):
    """A hook kind of ``actds.hook_kinds``: its rows are those that ``reference`` computes.

    Set ``hooks`` to places of the kind, and ``engine`` to one that captures it.
    """

    engine = "vllm"

    def test_the_hooks_are_of_the_kind_and_as_wide_as_the_reference(
        self, dataset: Dataset, model: Path
    ) -> None:
        """Compare ``actds.json`` with the reference."""
        ids = next(iter(_sequences(dataset).values()))
        for name, hook in dataset.hooks.items():
            assert name == f"{hook.kind}.{hook.layer}"
            assert self.reference(model, ids, name).shape == (len(ids), hook.d_model)


def _sequences(dataset: Dataset) -> dict[int, list[int]]:
    ids: dict[int, dict[int, int]] = {}
    for row in dataset.tokens().select(["request", "position", "token_id"]).to_pylist():
        ids.setdefault(row["request"], {})[row["position"]] = row["token_id"]
    for span in dataset.spans().to_pylist():
        if span["disposition"] == "cache_ref" and span["ref_request"] in ids:
            of_reference = ids[span["ref_request"]]
            for position in range(span["start"], span["stop"]):
                if position in of_reference:
                    ids.setdefault(span["request"], {})[position] = of_reference[position]
    return {
        request: [at[position] for position in range(len(at))]
        for request, at in ids.items()
        if set(at) == set(range(len(at)))
    }


def _relative_l2(row: Rows, rows: Rows) -> Rows:
    distance: Rows = np.linalg.norm(rows - row, axis=-1) / np.linalg.norm(rows, axis=-1)
    return distance
