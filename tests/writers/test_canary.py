"""Canary replay finds rows of another request, and takes no rounding for one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.compute as pc
import pytest

import actds
from actds.dataset.commit import commit_part
from actds.dataset.ledger import Chain
from actds.errors import ActdsError
from actds.explore.pairs import prefix_sums
from actds.explore.sequences import TokenSequence, token_sequences
from actds.format import tables
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing.synthetic import make_dataset
from actds_testing.tiny import make_random_model
from actds_validators.validate.validation import validate
from actds_writers.harvest import canary as compare
from actds_writers.harvest.canary import n_replayed
from actds_writers.harvest.result import HarvestResult, Observer

N_REQUESTS, LENGTH, D_MODEL = 6, 40, 64


def states(seed: int = 0) -> np.ndarray:
    """Return float32 rows of requests that share a large common part, as residual streams do."""
    rng = np.random.default_rng(seed)
    common = rng.normal(0, 3, D_MODEL)
    rows = common + rng.normal(0, 1, (N_REQUESTS * LENGTH, D_MODEL))
    rows[::LENGTH] *= 100  # the first position of a request has massive activations
    return rows.astype(np.float32)


def verdicts(
    stored: np.ndarray, replayed: np.ndarray, prefix: np.ndarray | None = None
) -> np.ndarray:
    relative, _ = compare.distances(stored, replayed)
    unlike = np.arange(len(stored)) if prefix is None else prefix
    return compare.is_foreign(stored, replayed, relative, unlike, "bfloat16")


def noisy(rows: np.ndarray, relative: float, seed: int = 1) -> np.ndarray:
    """Return rows moved by a share of their norm, and rounded to bfloat16."""
    noise = np.random.default_rng(seed).normal(0, 1, rows.shape)
    noise *= (
        relative * np.linalg.norm(rows, axis=1)[:, None] / np.linalg.norm(noise, axis=1)[:, None]
    )
    return (rows + noise).astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("relative", [0.0, 0.01, 0.04, 0.12])
def test_rounding_noise_is_no_other_row(relative: float) -> None:
    rows = states()
    assert not verdicts(noisy(rows, relative), rows).any()


@pytest.mark.parametrize("shift", [1, LENGTH])
def test_a_shifted_or_exchanged_row_is_always_found(shift: int) -> None:
    rows = states()
    stored = noisy(rows, 0.01)
    moved = np.roll(stored, shift, axis=0)
    ordinary = np.arange(len(rows)) % LENGTH > shift % LENGTH
    assert verdicts(moved, rows)[ordinary].all()
    one = stored.copy()
    one[[3, 3 + LENGTH]] = one[[3 + LENGTH, 3]]
    assert np.flatnonzero(verdicts(one, rows)).tolist() == [3, 3 + LENGTH]


def test_a_row_near_another_one_is_foreign_below_the_far_limit() -> None:
    rows = states()
    near, far = compare.NEAR["bfloat16"], compare.FAR["bfloat16"]
    rows[8] = rows[7] * (1 + (near + far) / 2)
    stored = rows.copy()
    stored[8] = rows[7]
    assert np.flatnonzero(verdicts(stored, rows)).tolist() == [8]


def test_equal_tokens_may_stand_for_each_other() -> None:
    rows = states()
    stored = noisy(rows, 0.05)
    rows[LENGTH + 2] = stored[2]  # the twin's replay hits the stored row to the bit
    told = [prefix_sums(np.array(one)) for one in ([1, 2, 3], [1, 2, 3, 4], [9, 2, 3])]
    _, number = np.unique(np.concatenate(told), return_inverse=True)
    names = {n: i for i, n in enumerate(dict.fromkeys(number.tolist()))}
    assert [names[n] for n in number.tolist()] == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6]
    prefix = np.arange(len(rows))
    assert verdicts(stored, rows, prefix)[2]
    prefix[LENGTH + 2] = prefix[2]
    assert not verdicts(stored, rows, prefix)[2]


def test_a_row_that_is_not_finite_is_foreign() -> None:
    rows = states()
    stored = rows.copy()
    stored[5, 3] = np.nan
    stored[6] = 0
    assert np.flatnonzero(verdicts(stored, rows)).tolist() == [5, 6]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_alike_not_finite_are_the_same_and_hide_no_other(bad: float) -> None:
    rows = states()
    near, far = compare.NEAR["bfloat16"], compare.FAR["bfloat16"]
    rows[8] = rows[7] * (1 + (near + far) / 2)
    rows[20, 3] = bad
    stored = rows.copy()
    stored[8] = rows[7]
    assert np.flatnonzero(verdicts(stored, rows)).tolist() == [8]
    stored[20, 4] += 1
    assert np.flatnonzero(verdicts(stored, rows)).tolist() == [8, 20]


def pair(run: str, one: TokenSequence, other: TokenSequence) -> compare.Pair:
    return compare.Pair(run, one.request, run, other.request, other.token_id)


def test_a_worker_that_mixes_up_rows_and_tokens_together_is_found(tmp_path: Path) -> None:
    """Its tables agree with each other, and not with what the client sent and received."""
    dataset = actds.open(make_dataset(tmp_path / "acts", n_requests=8, cache=False))
    [run] = dataset.runs
    known = [one for one in token_sequences(dataset) if one.unknown is None]
    honest = [pair(run, one, one) for one in known]
    assert compare.compare(dataset.catalog, dataset.catalog, honest).n_foreign == 0
    # Two requests have each other's rows and tokens.
    mixed = [pair(run, known[0], known[1]), pair(run, known[1], known[0]), *honest[2:]]
    lines: list[Any] = []
    found = compare.compare(dataset.catalog, dataset.catalog, mixed, keep=lines.append)
    error = found.error("canary")
    assert error is not None and error.code == "E418"
    rows = [row for table in lines for row in table.to_pylist()]
    assert {row["request"] for row in rows if row["verdict"] == "foreign"} == {
        known[0].request, known[1].request,
    }  # fmt: skip
    for row in rows:  # a row under the token of another one is foreign
        if row["token_id"] != row["replayed_token_id"]:
            assert row["verdict"] == "foreign"
        elif row["request"] not in (known[0].request, known[1].request):
            assert row["verdict"] == "same"


@pytest.mark.parametrize(
    ("text", "n", "wanted"), [("0.1%", 10_000, 10), ("0.1%", 3, 1), ("5", 100, 5), ("5", 2, 2)]
)
def test_a_share_is_a_number_of_requests(text: str, n: int, wanted: int) -> None:
    assert n_replayed(text, n) == wanted


@pytest.mark.parametrize("text", ["", "0", "-1", "101%", "2.5", "all", "nan%", "NaN", "inf"])
def test_other_shares_are_refused(text: str) -> None:
    with pytest.raises(ActdsError, match="E009"):
        n_replayed(text, 9)


def with_canary(path: Path, **changes: Any) -> list[str]:
    """Add a line of canary for a stored row; return what validate says."""
    dataset = actds.open(path)
    shard = dataset.shards[0]
    token = shard.tokens().slice(0, 1).to_pylist()[0]
    line = {name: token[name] for name in ("request", "position", "step", "token_id")}
    line |= {"hook": shard.hooks[0], "replayed_token_id": token["token_id"]}
    line |= {"relative_l2": 0.01, "cosine": 0.99, "verdict": "same", **changes}
    store = open_store(path)
    chain = Chain.begin(store, dataset.catalog.genesis.dataset, shard.run, "tool", "test")
    table = tables.build("canary", {name: [value] for name, value in line.items()})
    commit_part(store, chain, "canary", shard.run, 0, table)
    chain.close("finished", {})
    seal(store)
    return [finding.line() for finding in validate(path, "standard").errors]


def test_validate_takes_a_canary_that_sings(copy_dataset: Any) -> None:
    assert with_canary(copy_dataset()) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"verdict": "foreign"}, "E418"),
        ({"verdict": "fine"}, "E414"),
        ({"hook": "resid_post.99"}, "E414"),
        ({"position": 4_000_000}, "E414"),
    ],
)
def test_validate_refuses_canaries(changes: dict[str, Any], code: str, copy_dataset: Any) -> None:
    found = with_canary(copy_dataset(), **changes)
    assert len(found) == 1
    assert found[0].startswith(f"{code} canary/")


class Heard(Observer):
    def __init__(self) -> None:
        self.results: list[HarvestResult] = []

    def ended(self, result: HarvestResult) -> None:
        self.results.append(result)


def mixing_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let the real engine of this process hand two requests each other's rows; return options."""
    from actds_writers.engines.transformers.engine import Capture

    after_step = Capture.after_step

    def mixing(self: Any, step: int, finished: Any, columns: Any, *more: Any) -> None:
        (block,) = self.buffers.blocks
        rows = block.clone()
        width = columns.width
        # Requests 0 and 1 of the batch, whose prompts have the same length.
        block[:, :width] = rows[:, width : 2 * width]
        block[:, width : 2 * width] = rows[:, :width]
        after_step(self, step, finished, columns, *more)

    monkeypatch.setattr(Capture, "after_step", mixing)
    for name, value in h.ENGINE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    model = make_random_model(tmp_path / "model")
    prompts = h.write_prompts(
        tmp_path / "prompts.jsonl",
        [{"id": f"q{i}", "prompt": f"{i}{i} and {i} ".ljust(20, "xyzw"[i])} for i in range(4)],
    )
    return {
        "out": tmp_path / "acts", "model": model, "prompts": prompts, "hooks": "resid_post:1,2",
        "max_tokens": 4, "engine": "transformers", "engine_args": {"max_num_seqs": 4},
        "ring_mib": 1, "staging_mib": 1, "readouts": False,
    }  # fmt: skip


@pytest.mark.engine
def test_a_capture_that_mixes_requests_up_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay is served by another process, whose engine does not mix them up."""
    options, observer = mixing_engine(tmp_path, monkeypatch), Heard()
    out = options["out"]
    with pytest.raises(ActdsError, match="E418") as caught:
        actds.write(**options, canary="100%", observer=observer)
    # The result is told before the error, and the error is not lost with it.
    [result] = observer.results
    assert result.canary is not None and result.canary.n_foreign
    assert "request 0" in caught.value.place
    # The evidence is sealed, and the gate refuses it.
    dataset = actds.open(out)
    canary = dataset.canary().to_pylist()
    of = {verdict: {row["request"] for row in canary if row["verdict"] == verdict}
          for verdict in ("same", "foreign", "diverged")}  # fmt: skip
    assert of["foreign"] == {0, 1}
    assert {2, 3} <= of["same"]
    assert {row["hook"] for row in canary} == {"resid_post.1", "resid_post.2"}
    assert len(canary) == 2 * dataset.n_rows
    assert {finding.code for finding in validate(out, "standard").errors} == {"E418"}
    assert not list(tmp_path.glob(".actds-canary-*"))
    shutil.rmtree(out)


@pytest.mark.engine
def test_a_compared_replay_finds_what_a_sealed_dataset_has_mixed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        options = mixing_engine(tmp_path, patched)
        actds.write(**options)
    source = actds.open(options["out"])
    assert validate(options["out"], "deep").errors == [], "no sum and no digest shows it"
    replay: dict[str, Any] = {
        "source": source.path, "model": options["model"], "engine": "transformers", "alone": True,
        "check": False,
    }  # fmt: skip
    with pytest.raises(
        ActdsError, match=r"E418 .* request 0 position \d+ hook resid_post.1"
    ) as caught:
        actds.replay(out=tmp_path / "alone", compare=True, **replay)
    # Rows of requests 0 and 1 at all their positions, as their prompts differ from the first on.
    two = pc.less(source.tokens()["request"], 2)
    assert caught.value.got == f"{pc.sum(two).as_py()} rows far from their replay"
    h.validated(tmp_path / "alone")
