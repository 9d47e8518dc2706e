"""Attestations: honest rows pass, another model, other rows and another layer are found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file, save_file

import actds
from actds.errors import ActdsError, RefusedError
from actds.explore import dataset as reading
from actds.format.inclusion import is_drawn, salt_of, uniform
from actds_testing import harvest as h
from actds_testing.synthetic import make_dataset
from actds_testing.tiny import make_random_model
from actds_writers.cli import attest as command
from actds_writers.config import WriteSettings
from actds_writers.engine_protocol import find_engine
from actds_writers.engines.vllm import VLLM
from actds_writers.harvest import prepare
from actds_writers.harvest.attest import _require_precision, attest, draw
from actds_writers.harvest.fingerprints import MIN_REQUESTS, Answer, HookPairs, distances, score
from actds_writers.harvest.run import harvest

# the answer ---------------------------------------------------------------------------------------

D_MODEL, K = 256, 8
NOISE = 0.008
Rows = dict[str, np.ndarray]
HOOKS = ("resid_post.1", "resid_post.2")


def readouts(rows: np.ndarray, signs: np.ndarray) -> np.ndarray:
    norm = np.sqrt((rows**2).sum(axis=1, keepdims=True))
    return np.concatenate([norm, rows @ signs.T / np.sqrt(rows.shape[1])], axis=1).astype("f4")


@dataclass
class Made:
    """Readouts of rows of a model: those of a dataset, of a replay and of the reference.

    Args:
        more: what another model adds to the rows of the dataset, relative.
        rounding: of the dataset's machine, in that of the replay's.
    """

    rng: np.random.Generator
    n_requests: int = 8
    n_rows: int = 60
    noise: float = NOISE
    more: float = 0.0
    rounding: float = 1.0

    def __post_init__(self) -> None:
        self.request = np.repeat(np.arange(self.n_requests), self.n_rows)
        signs = self.rng.choice([-1.0, 1.0], (K, D_MODEL))
        self.dataset, self.replay, self.reference = Rows(), Rows(), Rows()
        for hook in HOOKS:
            rows = self.rng.normal(size=(len(self.request), D_MODEL))
            stored = rows + self.apart(rows, self.noise * self.rounding)
            stored += self.apart(rows, self.more)
            again = rows + self.apart(rows, self.noise)
            for where, values in ((self.dataset, stored), (self.replay, again),
                                  (self.reference, rows)):  # fmt: skip
                where[hook] = readouts(values, signs)

    def apart(self, rows: np.ndarray, scale: float) -> np.ndarray:
        size = np.sqrt((rows**2).mean(axis=1, keepdims=True))
        noise: np.ndarray = scale * size * self.rng.normal(size=rows.shape)
        return noise

    def pairs(self) -> dict[str, HookPairs]:
        return {
            hook: HookPairs(
                self.request,
                distances(self.dataset[hook], self.reference[hook], D_MODEL),
                distances(self.replay[hook], self.reference[hook], D_MODEL),
            )
            for hook in HOOKS
        }

    def answer(self) -> Answer:
        return score(self.pairs(), names(self.n_requests), "bfloat16")


def names(n: int) -> list[str]:
    return [f"r request {i}" for i in range(n)]


def test_the_distance_is_that_of_the_rows() -> None:
    pairs = Made(np.random.default_rng(0), 40, more=0.03).pairs()[HOOKS[0]]
    for estimate, want in ((pairs.dataset, np.hypot(NOISE, 0.03)), (pairs.replay, NOISE)):
        assert np.sqrt((estimate**2).mean()) == pytest.approx(want, rel=0.03)
    rows = Made(np.random.default_rng(1)).reference[HOOKS[0]]
    assert distances(rows * np.float32(1.1), rows, D_MODEL).min() > 0.1
    assert distances(rows, rows, D_MODEL).max() == 0


@pytest.mark.parametrize(
    ("rounding", "more", "verdict"),
    [(1.0, 0.0, "same"), (0.0, 0.0, "same"), (1.2, 0.0, "same"), (1.0, 0.016, "another"),
     (1.0, 0.1, "another")],
)  # fmt: skip
def test_rounding_of_another_machine_is_the_same_and_of_weights_is_not(
    rounding: float, more: float, verdict: str
) -> None:
    """Over 200 draws: as many errors as a level of 1 % leaves, by the binomial, at most 7."""
    rng = np.random.default_rng(1)
    answers = [
        Made(rng, MIN_REQUESTS, 40, rounding=rounding, more=more).answer() for _ in range(200)
    ]
    assert sum(answer.verdict != verdict for answer in answers) <= 7


def test_one_that_is_near_the_tolerance_is_left_undecided() -> None:
    answer = Made(np.random.default_rng(2), rounding=1.5).answer()
    assert answer.verdict == "cannot tell" and "tolerance is 1.5" in answer.reason


def test_few_requests_and_coarse_numerics_cannot_tell() -> None:
    rng = np.random.default_rng(3)
    few = Made(rng, MIN_REQUESTS - 1, 200).answer()
    assert few.verdict == "cannot tell" and "5 are needed" in few.reason
    one = Made(rng, 1, 200).answer()
    assert one.verdict == "cannot tell" and not any(power.seen for power in one.power)
    coarse = Made(rng, noise=0.03).answer()
    assert coarse.verdict == "cannot tell" and "8 bits would hide" in coarse.reason
    assert {p.bits: p.seen for p in coarse.power} == {8: False, 4: True}


def test_rows_of_another_request_are_found_and_named() -> None:
    made = Made(np.random.default_rng(4), 100, 20)
    rows, other = (np.flatnonzero(made.request == n) for n in (7, 8))
    made.dataset[HOOKS[1]][rows] = made.dataset[HOOKS[1]][other]
    answer = made.answer()
    assert answer.verdict == "another" and answer.far_requests == ["r request 7"]
    assert [hook.n_far for hook in answer.hooks] == [0, 20]
    made = Made(np.random.default_rng(5), 10, 40)
    made.dataset[HOOKS[0]][3] = made.dataset[HOOKS[0]][5]
    one = made.answer()
    assert one.verdict == "cannot tell" and one.reason.startswith("1 row far")


def test_rows_of_another_hook_are_found() -> None:
    made = Made(np.random.default_rng(6))
    made.dataset[HOOKS[0]] = made.dataset[HOOKS[1]]
    answer = made.answer()
    assert answer.verdict == "another" and len(answer.far_requests) == 8
    assert answer.hooks[1].n_far == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_far_where_the_replay_is_finite(bad: float) -> None:
    made = Made(np.random.default_rng(7))
    made.dataset[HOOKS[0]][:60] = bad
    assert made.answer().far_requests == ["r request 0"]
    made.replay[HOOKS[0]][:60] = bad
    assert made.answer().far_requests == []


def test_a_hook_without_rounding_hides_no_other_one() -> None:
    made = Made(np.random.default_rng(8), more=0.03)
    made.dataset[HOOKS[0]] = made.replay[HOOKS[0]] = made.reference[HOOKS[0]]
    exact, other = made.pairs().values()
    exact = replace(exact, depth=None)
    answer = score({"embed": exact, **dict.fromkeys("abc", other)}, names(8), "bfloat16")
    assert answer.verdict == "another" and answer.hooks[0].ratio == 1
    alone = score({"embed": exact}, names(8), "bfloat16")
    assert alone.verdict == "cannot tell", "no rounding of weights is seen before the first layer"


# the draw -----------------------------------------------------------------------------------------


def test_requests_are_drawn_by_the_hash_of_the_spec(tmp_path: Path) -> None:
    source = reading.open(make_dataset(tmp_path / "acts", n_requests=60, seed=3))
    run, dataset = next(iter(source.runs)), source.catalog.genesis.dataset
    salt = salt_of("actds attest", 9, dataset, run)
    assert int(salt) == int(
        sha256(f"actds attest\n9\n{dataset}\n{run}".encode()).hexdigest()[:16], 16
    )
    everything = draw(source, [run], 9, 1.0)
    number = {name: float(uniform(salt, name[1])) for name in everything}
    half = draw(source, [run], 9, 0.5)
    assert set(half) == {name for name, u in number.items() if u < 0.5}
    few = draw(source, [run], 9, 1e-6)
    assert list(few) == sorted(number, key=lambda name: number[name])[:MIN_REQUESTS]
    of_replay = is_drawn(9, dataset, run, [name[1] for name in number], 0.5)
    assert {name[1] for name in half} != set(np.flatnonzero(of_replay).tolist())


# through an engine --------------------------------------------------------------------------------

ENGINE: dict[str, Any] = {"engine": "transformers"}
Write = Callable[..., Path]


def rounded(model: Path, out: Path, bits: int) -> Path:
    """Return a copy of a model whose matrices are rounded to so many bits, by rows."""
    shutil.copytree(model, out)
    levels = 2 ** (bits - 1) - 1
    tensors = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "embed" not in name:
            step = tensor.float().abs().amax(1, keepdim=True) / levels
            tensors[name] = ((tensor.float() / step).round() * step).to(tensor.dtype)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "true")


@pytest.fixture
def written(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return what writes a dataset with some model and says that it was the true one."""
    prompts = h.write_prompts(
        tmp_path / "prompts.jsonl",
        [
            {"id": f"q{n}", "prompt": "all work and no play " * (1 + n % 3) + f"{n:02}"}
            for n in range(12)
        ],
    )

    def write(by: Path, **settings: Any) -> Path:
        out = tmp_path / f"acts-{by.name}"
        kind = find_engine("transformers")
        facts = prepare.files_facts(kind.checked({}).files(model))
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "files_facts", lambda files: facts)
            common = {"out": out, "model": by, "prompts": prompts, "hooks": "resid_post:all",
                      "max_tokens": 6, **ENGINE}  # fmt: skip
            harvest(WriteSettings.of(common | settings))
        return out

    return write


@pytest.mark.standard
def test_a_dataset_of_its_model_is_attested_and_one_of_rounded_weights_is_not(
    written: Write, model: Path, tmp_path: Path
) -> None:
    honest = written(model)
    # Arrays take no part: what is read is ledger, tables and readouts.
    for file in honest.glob("shards/*/acts.zarr/*/c/0/0"):
        file.write_bytes(bytes(file.stat().st_size))
    result = attest(source=honest, model=model, fraction=0.5, seed=1, **ENGINE)
    assert result.verdict == "same" and result.n_skipped == 0
    assert result.digest == actds.open(honest).digest
    assert result.n_requests == len(draw(actds.open(honest), list(actds.open(honest).runs), 1, 0.5))
    assert {hook.hook for hook in result.hooks} == set(actds.open(honest).hooks)
    assert all(hook.distance < 1e-5 and hook.n_far == 0 for hook in result.hooks)
    assert list(tmp_path.glob("actds-attest-*")) == []

    for bits in (8, 4):
        lying = written(rounded(model, tmp_path / f"bits-{bits}", bits))
        found = attest(source=lying, model=model, seed=1, **ENGINE)
        assert found.verdict == "another" and found.n_requests == MIN_REQUESTS, bits

    file = tmp_path / "found.json"
    told = CliRunner().invoke(
        command,
        [str(tmp_path / "acts-bits-4"), "--model", str(model), "--engine", "transformers",
         "--json", str(file), "--quiet"],
    )  # fmt: skip
    assert told.exit_code == 1 and "✗ Another model or precision" in told.output
    assert '"verdict": "another"' in file.read_text()


@pytest.mark.standard
def test_an_attestation_of_rows_in_another_type_is_signed_and_lets_a_policy_pass(
    written: Write, model: Path, tmp_path: Path
) -> None:
    acts = written(model, store_dtype="bfloat16")
    key, public = tmp_path / "key.pem", tmp_path / "key.pub"
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    private = Ed25519PrivateKey.generate()
    key.write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(private.public_key().public_bytes(pem, form))
    with pytest.raises(ActdsError, match="E021"):  # before anything is served
        attest(source=acts, model=tmp_path, key=public, **ENGINE)

    policy = {"attestation": {"keys": [str(public)], "min_requests": 6}, "level": "deep"}
    result = attest(source=acts, model=model, seed=1, key=key, **ENGINE)
    assert result.verdict == "same" and result.served["capture.cast"] != "none"
    assert all(1e-4 < hook.distance < 4e-3 for hook in result.hooks), "what the cast rounds"
    with pytest.raises(RefusedError, match="5 requests"):
        actds.require(acts, policy=policy)
    attest(source=acts, model=model, seed=1, fraction=1.0, key=key, **ENGINE)
    assert actds.require(acts, policy=policy).n_rows
    assert len((acts / "seal/0001.intoto.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.standard
def test_a_model_that_is_not_on_record_is_refused(
    written: Write, model: Path, tmp_path: Path
) -> None:
    acts = written(model)
    other = rounded(model, tmp_path / "other", 8)
    with pytest.raises(ActdsError, match=r"E022 model\.weights_sha256"):
        attest(source=acts, model=other, **ENGINE)
    with pytest.raises(ActdsError, match=r"E022 numerics\.dtype: bfloat16; expected float32"):
        attest(source=acts, model=model, engine_args={"dtype": "bfloat16"}, **ENGINE)


def test_a_compiled_replay_would_accuse_honest_eager_rows() -> None:
    """On a CPU eager rows of bfloat16 lie 1.6 times as far from float32 ones as compiled ones."""

    def record(**fields: object) -> Any:
        return SimpleNamespace(
            fields={n.replace("_", ".", 1): SimpleNamespace(value=v) for n, v in fields.items()}
        )

    def check(is_eager: bool) -> None:
        replay: Any = SimpleNamespace(
            runs={"r": record(numerics_dtype="bfloat16", serving_enforce_eager=is_eager)},
            runs_with_data=["r"],
        )
        _require_precision(replay, [record(numerics_dtype="bfloat16", serving_enforce_eager=False)])

    check(True)
    with pytest.raises(ActdsError, match=r"E022 serving\.enforce_eager: False; expected True"):
        check(False)
    assert VLLM.uncompiled == {"enforce_eager": True}


@pytest.mark.standard
def test_without_readouts_there_is_nothing_to_compare(written: Write, model: Path) -> None:
    acts = written(model, readouts=False)
    with pytest.raises(ActdsError, match=r"E006 .*no readouts with projections") as caught:
        attest(source=acts, model=model, **ENGINE)
    assert "actds replay --compare" in caught.value.next_step
