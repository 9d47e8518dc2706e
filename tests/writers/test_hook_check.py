"""The check of the hooks: what passes, what stops a run, what the run record says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actds.errors import ActdsError
from actds_testing.tiny import make_random_model, make_tiny_model
from actds_writers.capture import check as hook_check
from actds_writers.capture import check as reference
from actds_writers.capture.check import (
    DID_NOT_RUN,
    HookCheck,
    NoReferenceError,
    load_reference,
    reference_states,
    require_finite,
    states_in_fresh_process,
)
from actds_writers.ipc.messages import HookSpec

BOUND = {"resid_post.1": 1e-3}
DRAW = np.random.default_rng(0)
STATES = DRAW.normal(size=(4, 20, 16)).cumsum(axis=0).astype(np.float32)


def compared(
    rows: np.ndarray, layer: int = 1, limit: float = 1e-3, decoded: np.ndarray | None = None
) -> hook_check.HookCheck:
    name = f"resid_post.{layer}"
    hook = HookSpec(name, "resid_post", layer, 16, "float32")
    states = {"resid_post": dict(enumerate(STATES))}
    return hook_check.compare_with_forward({hook: rows}, states, {name: limit}, decoded)


def test_rows_of_the_layer_pass_and_their_distance_is_on_record() -> None:
    noise = DRAW.normal(size=STATES[1].shape).astype(np.float32)
    noise *= 1e-5 * np.linalg.norm(STATES[1], axis=1, keepdims=True) / 4
    fact = compared(STATES[1] + noise).fact()
    said = json.loads(str(fact.value))
    assert (fact.name, fact.origin) == ("capture.check", "observed")
    assert said["against"] == "transformers" and said["rows"] == 20
    assert float(said["hooks"]["resid_post.1"]) == pytest.approx(1e-5, rel=0.3)


def test_a_residual_that_counts_twice_is_refused_with_hook_distance_and_bound() -> None:
    with pytest.raises(ActdsError) as caught:
        compared(STATES[1] + 0.4 * STATES[0])
    assert caught.value.code == "E507" and caught.value.place == "hook resid_post.1"
    assert "0.00" not in caught.value.got and "at most 0.001" in str(caught.value)


def test_rows_of_graphs_are_held_against_eager_ones_prompts_and_decoded_apart() -> None:
    served, decoded = STATES[1].copy(), np.arange(20) == 19
    served[0] = 0  # a row of zeros equals itself
    hook = HookSpec("resid_post.1", "resid_post", 1, 16, "float32")
    parts, eager = [~decoded, decoded], {hook: served.copy()}
    served[:19] *= 1.0001
    compare = hook_check.compare_with_eager
    assert compare({hook: served}, eager, BOUND, parts) == pytest.approx(95e-6, rel=0.1)
    served[19] = STATES[1][18]  # one row of twenty, of another token
    with pytest.raises(
        ActdsError, match=r"E507 hook resid_post\.1: .* without compilation"
    ) as raised:
        compare({hook: served}, eager, BOUND, parts)
    assert "another cudagraph_mode" in raised.value.next_step
    assert compare({hook: served}, eager, BOUND, parts[:1]) < 1e-3
    fact = HookCheck("table", {}, {}, 0, "no weights", 2e-6).fact()
    assert json.loads(str(fact.value))["eager"] == "2e-06"


def test_rows_of_another_layer_are_refused_and_the_layer_named() -> None:
    with pytest.raises(ActdsError, match=r"E507 hook resid_post\.1: .* nearer to layer 2"):
        compared(STATES[2])


def test_another_layer_is_named_even_where_the_bound_is_wide() -> None:
    with pytest.raises(ActdsError, match="nearer to layer 2"):
        compared(STATES[2] * 1.001, limit=10.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_refused(value: float) -> None:
    rows = STATES[1].copy()
    rows[3, 3] = value
    with pytest.raises(ActdsError, match="E507"):
        compared(rows)


def test_rows_that_are_not_finite_are_refused_by_what_made_them_so() -> None:
    spec = HookSpec("resid_post.1", "resid_post", 1, 8, "float16")
    rows = np.ones((5, 8), np.float32)
    require_finite({spec: rows}, "bfloat16")
    require_finite({spec: np.full((5, 8), DID_NOT_RUN)}, "bfloat16")  # E507 says so
    rows[2, 3] = np.inf
    with pytest.raises(
        ActdsError, match=r"E601 .*1 of 5 .*after the cast from bfloat16 to float16"
    ):
        require_finite({spec: rows}, "bfloat16")
    with pytest.raises(ActdsError, match=r"E601 .*1 of 5 .*as the model computes them in float16"):
        require_finite({spec: rows}, "float16")
    rows[4, 0] = np.nan
    with pytest.raises(ActdsError, match=r"E601 .*2 of 5 .*as the model computes them in bfloat16"):
        require_finite({spec: rows}, "bfloat16")


def test_one_wrong_row_in_twenty_is_enough_in_float32() -> None:
    rows = STATES[1].copy()
    rows[7] = STATES[1, 8]
    with pytest.raises(ActdsError, match="E507"):
        compared(rows)


@pytest.mark.parametrize("limit", [1e-3, 1e-2, 1e-1])
def test_wrong_decoded_rows_do_not_hide_behind_the_prompts(limit: float) -> None:
    decoded = np.zeros(20, bool)
    decoded[[12, 19]] = True
    rows = STATES[1].copy()
    rows[decoded] += 2 * limit * STATES[1][decoded]
    with pytest.raises(ActdsError, match="E507"):
        compared(rows, limit=limit, decoded=decoded)
    assert 2 * limit * decoded.mean() < limit  # which a mean over all rows would let pass


@pytest.mark.parametrize("limit", [1e-2, 1e-1])
def test_one_row_of_another_position_is_seen_under_any_bound(limit: float) -> None:
    rows = STATES[1].copy()
    rows[7] = STATES[1, 8]
    with pytest.raises(ActdsError, match="E507 hook"):
        compared(rows, limit=limit)


def test_without_a_second_model_the_next_reader_decides_and_the_record_says_so() -> None:
    found = HookCheck("engine", {"resid_post.1": 0.0}, BOUND, 41, "it is too large").require()
    said = json.loads(str(found.fact().value))
    assert said == {
        "against": "engine",
        "bound": "0.001",
        "hooks": {"resid_post.1": "0"},
        "reason": "it is too large",
        "rows": 41,
    }
    with pytest.raises(ActdsError, match="E507"):
        HookCheck("engine", {"resid_post.1": 0.5}, BOUND, 41, "it is too large").require()


def test_bounds_follow_the_coarsest_type_on_the_way() -> None:
    assert hook_check.bound("float32", "float32") == 1e-3
    assert hook_check.bound("float32", "bfloat16") == 1e-2
    assert hook_check.bound("bfloat16", "bfloat16") == 1e-1
    assert hook_check.bound("bfloat16", "float32") == 1e-1
    assert hook_check.bound("float32", "float32", coarse=True) == 1e-1


def test_prompts_of_the_check_fit_the_engine_and_avoid_special_tokens() -> None:
    first, second = hook_check.check_prompts(320, 1000)
    assert (len(first), len(second)) == hook_check.PROMPT_LENS and first[:17] != second
    assert min(first + second) >= 40 and max(first + second) < 160
    assert [len(p) for p in hook_check.check_prompts(320, 5)] == [5, 5]


def test_the_reference_is_transformers_hidden_states_and_draws_no_random_number(
    tmp_path: Path,
) -> None:
    model = load_reference(make_random_model(tmp_path / "m"), 100_000)
    before = torch.get_rng_state()
    states = reference_states(model, [[5, 6, 7, 8]])["resid_post"]
    assert torch.equal(torch.get_rng_state(), before)
    said = model(torch.tensor([[5, 6, 7, 8]]), output_hidden_states=True).hidden_states
    assert {layer: rows.shape for layer, rows in states.items()} == dict.fromkeys(range(4), (4, 64))
    assert np.allclose(states[1], said[2][0].detach().numpy())
    assert not np.allclose(states[3], said[4][0].detach().numpy())  # behind the final norm


@pytest.mark.full
def test_a_fresh_process_computes_the_same_states_and_says_why_it_cannot(tmp_path: Path) -> None:
    folder, prompts = make_random_model(tmp_path / "m"), [[5, 6, 7, 8], [9]]
    own = reference_states(load_reference(folder, 100_000), prompts)["resid_post"]
    fresh = states_in_fresh_process(folder, 100_000, prompts, trust_remote_code=False)
    assert own[0].shape == (5, 64)
    assert own.keys() == fresh["resid_post"].keys() == set(range(4))
    assert all(np.array_equal(own[n], fresh["resid_post"][n]) for n in own)
    with pytest.raises(NoReferenceError, match=r"^transformers does not load it"):
        states_in_fresh_process(tmp_path / "nothing", 100_000, prompts)


def test_there_is_no_reference_without_weights_or_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path / "m", dtype="float32")
    with pytest.raises(NoReferenceError, match="transformers does not load it"):
        load_reference(folder, 100_000)
    with pytest.raises(NoReferenceError, match="billion parameters take too long"):
        monkeypatch.setattr(reference, "free_nbytes", lambda: 10**15)
        load_reference(folder, 10**12)
    with pytest.raises(NoReferenceError, match=r"4\.0 GB of float32 weights, 2\.0 GB free"):
        monkeypatch.setattr(reference, "free_nbytes", lambda: 2 * 10**9)
        load_reference(folder, 10**9)


class Scaled(torch.nn.Module):
    """A model that calls something else its hidden states than what its layers return."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.device = model, torch.device("cpu")

    def forward(self, **arguments: object) -> SimpleNamespace:
        hidden = self.model(**arguments).hidden_states
        return SimpleNamespace(hidden_states=[state * 1.01 for state in hidden])


def test_layers_that_do_not_return_the_hidden_states_are_no_reference(tmp_path: Path) -> None:
    model = Scaled(load_reference(make_random_model(tmp_path / "m"), 100_000))
    with pytest.raises(NoReferenceError, match=r"hidden_states are not what its layer 0"):
        reference_states(model, [[5, 6, 7]])
