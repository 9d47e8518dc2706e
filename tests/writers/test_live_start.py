"""What the plugin's configuration asks for is what a served engine's dataset has and tells."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import stat
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_live import engine_config

import actds
from actds.dataset.reading import read_dataset, read_genesis
from actds.errors import ActdsError
from actds.format.readouts import NONE, readouts_of
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing.server import LANE, scrape
from actds_testing.synthetic import make_dataset
from actds_testing.synthetic_engine import D_MODEL, GENERATED, HOOKS, PROMPT_LEN, SyntheticEngine
from actds_validators.validate.validation import validate
from actds_writers.engines.vllm import serving
from actds_writers.engines.vllm.rotation import Rotation
from actds_writers.engines.vllm.serving import LiveRun
from actds_writers.sampling import LeftOut

pytestmark = pytest.mark.standard


N_POSITIONS = PROMPT_LEN + GENERATED - 1
N_REQUESTS = 8
TIMEOUT_S = 60


def config(**parallel: Any) -> Any:
    """Return what vLLM's configuration of a small model looks like to the plugin."""
    found = engine_config(**{"data_parallel_index": 0, **parallel})
    found.additional_config = {"another": "plugin"}
    found.model_config = SimpleNamespace(
        **vars(found.model_config),
        hf_text_config=SimpleNamespace(num_hidden_layers=4),
        hf_config=SimpleNamespace(_commit_hash="0123abcd"),
        get_hidden_size=lambda: D_MODEL,
        skip_tokenizer_init=True,
        model="nobody/model",
        tokenizer="nobody/model",
        revision=None,
        tokenizer_revision=None,
        hf_config_path=None,
        generation_config="auto",
        seed=0,
    )
    return found


def document(out: str | Path, **other: Any) -> dict[str, Any]:
    hooks = f"resid_post:{','.join(str(hook.layer) for hook in HOOKS)}"
    return {"out": str(out), "hooks": hooks, "overflow": "block", "rows_per_shard": 40, **other}


def serve(run: LiveRun, left_out: LeftOut | None = None) -> SyntheticEngine:
    """Serve some requests and wait until the writer has them; the engine stays."""
    engine = SyntheticEngine(run)  # type: ignore[arg-type]
    for number in range(N_REQUESTS):
        engine.request(number, left_out or LeftOut())
    assert run.drain(lambda: engine.n_steps - 1, TIMEOUT_S)
    return engine


def end(run: LiveRun, engine: SyntheticEngine) -> None:
    engine.close()
    run.end("finished")
    assert run.failure is None


def sealed(out: str | Path) -> actds.Dataset:
    seal(open_store(out))
    report = validate(out, level="deep")
    assert not report.findings, report.findings
    return actds.open(out)


def said(caplog: pytest.LogCaptureFixture, words: str) -> re.Match[str]:
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := re.search(words, caplog.text)):
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.02)
    return found


@pytest.fixture(params=["a folder", "an object store"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "a folder":
        return str(tmp_path / "acts")
    return str(request.getfixturevalue("s3_root"))


def test_probes_readouts_and_metrics_of_the_configuration_reach_dataset_and_port(
    out: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.actds")
    probes = np.random.default_rng(2).normal(size=(3, D_MODEL)).astype(np.float32)
    np.save(tmp_path / "probes.npy", probes)
    engine_side = config()
    run = serving.start(
        engine_side,
        document(out, probes=str(tmp_path / "probes.npy"), seed=7, metrics_port=0),
    )
    engine = serve(run)
    port = int(said(caplog, r"metrics at http://127\.0\.0\.1:(\d+)/metrics")[1])
    samples = scrape(port)
    n_rows = N_REQUESTS * N_POSITIONS
    assert samples["actds_scheduled_tokens_total", ()] == n_rows
    assert samples["actds_rows_total", (("stage", "ring"),)] == n_rows
    width = 1 + 8 + len(probes)
    assert samples["actds_stage_bytes_total", LANE] == 4 * width * len(HOOKS) * n_rows
    assert not [name for name, _ in samples if name == "actds_requests_planned"]
    end(run, engine)
    with pytest.raises(OSError):
        scrape(port)  # the port is given back with the run

    dataset = sealed(out)
    assert dataset.path == out
    assert dataset.n_rows == n_rows
    [record] = dataset.runs.values()
    planned = readouts_of(record)
    assert planned is not None
    assert (planned.n_projections, planned.seed, planned.n_probes) == (8, 7, 3)
    table = dataset.readouts()
    assert table.num_rows == n_rows * len(HOOKS)
    row = next(r for r in table.to_pylist() if (r["request"], r["position"]) == (3, 5))
    bits = np.full(D_MODEL, 3 * 100 + 5 + 1 + [h.name for h in HOOKS].index(row["hook"]), np.uint16)
    values = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.allclose(row["probes"], probes @ values, rtol=1e-4)
    # What the compile cache sees of us: what changes the graph, and the other plugin's own.
    assert engine_side.additional_config == {
        "another": "plugin",
        "actds": {
            "hooks": ["resid_post:1", "resid_post:2"],
            "readouts": planned.as_field(),
            "store_dtype": None,
        },
    }


def test_readouts_may_be_left_out_and_then_there_is_no_lane(
    out: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.actds")
    run = serving.start(config(), document(out, readouts=False, metrics_port=0))
    assert run.link.readouts == NONE
    engine = serve(run, LeftOut(prefill="sampling:phase"))
    samples = scrape(int(said(caplog, r":(\d+)/metrics")[1]))
    assert not [key for key in samples if key[1] == LANE]
    end(run, engine)
    dataset = sealed(out)
    assert dataset.readouts().num_rows == 0
    assert dataset.n_rows == N_REQUESTS * (GENERATED - 1)


def test_a_second_engine_joins_the_dataset_and_one_with_other_hooks_is_refused(out: str) -> None:
    first = serving.start(config(), document(out))
    one = serve(first)
    second = serving.start(config(), document(out, seed=1))
    other = serve(second)
    with pytest.raises(ActdsError, match=r"E010.*resid_post\.0"):
        serving.start(config(), document(out, hooks="resid_post:0"))
    end(first, one)
    end(second, other)
    dataset = sealed(out)
    assert len(dataset.runs) == 2
    assert dataset.n_rows == 2 * N_REQUESTS * N_POSITIONS
    seeds = {readouts.seed for r in dataset.runs.values() if (readouts := readouts_of(r))}
    assert seeds == {0, 1}


def test_a_port_that_is_taken_costs_the_metrics_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = serving.start(config(), document(tmp_path / "acts", metrics_port=port))
        engine = serve(run)
        assert "E009" in said(caplog, r"no metrics: .*")[0]
        end(run, engine)
    assert sealed(tmp_path / "acts").n_rows == N_REQUESTS * N_POSITIONS


def test_the_port_says_that_capture_has_ended_while_serving_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.actds")
    out = tmp_path / "acts"
    run = serving.start(config(), document(out, metrics_port=0))
    engine = serve(run)
    port = int(said(caplog, r":(\d+)/metrics")[1])
    samples = scrape(port)
    assert samples["actds_capturing", ()] == 1
    [about] = [dict(labels) for name, labels in samples if name == "actds_run_info"]
    assert about["run"] == run.link.run
    assert about["dataset"] == read_genesis(open_store(out)).dataset
    os.kill(run.pipeline.processes["writer"].pid, signal.SIGKILL)
    said(caplog, "CAPTURE HAS ENDED, serving continues")
    samples = scrape(port)
    assert samples["actds_capturing", ()] == 0
    assert samples["actds_scheduled_tokens_total", ()] == N_REQUESTS * N_POSITIONS
    engine.close()
    run.end("finished")


def modes(out: Path) -> dict[str, int]:
    """Return the mode of the dataset's folder and of all that is in it."""
    paths = [out, *out.rglob("*")]
    return {str(path.relative_to(out)): stat.S_IMODE(path.stat().st_mode) for path in paths}


@pytest.mark.parametrize(
    ("settings", "of_file", "of_folder"),
    [({}, 0o600, 0o700), ({"group_readable": True}, 0o640, 0o750)],
)
def test_nobody_else_can_read_what_clients_have_asked(
    settings: dict[str, Any], of_file: int, of_folder: int
) -> None:
    # Outside pytest's own folder, which nobody else can enter anyway.
    with tempfile.TemporaryDirectory() as open_folder:
        os.chmod(open_folder, 0o755)
        out, before = Path(open_folder) / "acts", os.umask(0o022)
        try:
            run = serving.start(config(), document(out, **settings))
            assert os.umask(0o022) == 0o022  # that of the server stays
        finally:
            os.umask(before)
        engine = serve(run)
        running = modes(out)  # with the journal of the census and what holds back disk space
        assert any(name.startswith("journal/") for name in running)
        end(run, engine)
        written = {**running, **modes(out)}
        kinds = {name: (out / name).is_dir() for name in written if (out / name).exists()}
        assert sum(not is_folder for is_folder in kinds.values()) > 10
        assert set(written.values()) == {of_file, of_folder}
        for name, is_folder in kinds.items():
            assert written[name] == (of_folder if is_folder else of_file), name
        sealed(out)
        if os.geteuid() == 0 and not settings:
            # As another user of the machine, who may do all but enter.
            pid = os.fork()
            if pid == 0:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
                try:
                    actds.open(out)
                except ActdsError as error:
                    is_clear = error.code == "E104" and "Permission denied" in str(error)
                    is_clear &= "as the user who wrote it" in str(error)
                    os._exit(0 if is_clear else 2)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_each_replica_has_a_port_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.actds")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = serving.start(
        config(data_parallel_index=2), document(tmp_path / "acts", metrics_port=port - 2)
    )
    engine = serve(run)
    assert int(said(caplog, r"metrics at http://127\.0\.0\.1:(\d+)/")[1]) == port
    end(run, engine)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"readouts": False, "probes": "p.npy"}, r"E017 .*actds\.probes: .*readouts is false"),
        ({"probes": "none.npy"}, r"E015 .*none\.npy"),
        ({"probes": "narrow.npy"}, r"E015 .*narrow\.npy"),
        ({"out": "s3://"}, r"E017 .*actds\.out"),
        ({"keep_datasets": 3}, r"E017 .*keep_datasets: 3; expected with rotate_minutes"),
        (
            {"out": "s3://b/p", "keep_datasets": 3, "rotate_minutes": 5},
            r"E017 .*keep_datasets: 3; expected in a local folder",
        ),
        ({"rotate_minutes": 0}, r"E017 .*rotate_minutes"),
        ({"hooks": "resid_post:9"}, "E007"),
    ],
)
def test_what_is_wrong_is_said_before_a_process_or_a_dataset_begins(
    other: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "narrow.npy", np.ones((3, D_MODEL - 1), np.float32))
    with pytest.raises(ActdsError, match=words):
        serving.start(config(), document(**{"out": tmp_path / "acts", **other}))
    assert not list(tmp_path.glob("acts/*"))


def test_a_dataset_ends_when_it_is_due_and_the_next_one_is_ready_beside_it(
    out: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.actds")
    run = serving.start(config(), document(out, rotate_gib=1e-6, commit_seconds=0.01))
    first = serve(run)
    deadline = time.monotonic() + TIMEOUT_S
    while (following := run.take_following()) is None:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.02)
    assert run.take_following() is None, "it is handed out once"
    first.close()
    run.end_aside("finished", following)
    second = serve(following)
    end(following, second)
    assert run.dataset != following.dataset
    for one in (run, following):
        dataset = actds.open(one.link.settings.out)  # each has sealed its own
        assert dataset.digest and dataset.n_rows == N_REQUESTS * N_POSITIONS
        assert dataset.catalog.genesis.dataset == one.dataset
        assert not validate(one.link.settings.out, level="deep").findings
        assert one.link.settings.out.startswith(f"{out}/")


@pytest.mark.parametrize("when", ["at once", "at its start"])
def test_a_next_dataset_that_cannot_begin_is_tried_again(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.actds")
    monkeypatch.setattr(serving, "RETRY_S", 0.1)
    out = str(tmp_path / "datasets")
    run = serving.start(config(), document(out, rotate_gib=1e-6, commit_seconds=0.01))
    begin, tries = run._begin, []  # noqa: SLF001

    def failing(settings: Any) -> Any:
        tries.append(settings.run)
        if len(tries) <= 2 and when == "at once":
            raise OSError("no memory")
        begun = begin(settings)
        if len(tries) <= 2:
            for process in begun[0].processes.values():
                process.kill()
        return begun

    run._begin = failing  # noqa: SLF001
    first = serve(run)
    deadline = time.monotonic() + 4 * TIMEOUT_S  # of three starts
    while (following := run.take_following()) is None:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.02)
    assert run.failure is None and len(tries) == 3
    assert caplog.text.count("another is tried in") == 2 and "HAS ENDED" not in caplog.text
    first.close()
    run.end_aside("finished", following)
    end(following, serve(following))
    while len(list(Path(out).iterdir())) > 2:  # folders of the tries
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.02)
    sealed = sorted(path.name for path in Path(out).iterdir())
    assert sealed == sorted(Path(r.link.settings.out).name for r in (run, following))
    assert all(actds.open(f"{out}/{name}").n_rows == N_REQUESTS * N_POSITIONS for name in sealed)


def test_sealed_datasets_beyond_the_number_to_keep_are_removed(tmp_path: Path) -> None:
    names = [f"2026112{day}t120000z-r-{day:016x}" for day in range(1, 6)]
    for name in names:
        (tmp_path / name / "seal").mkdir(parents=True)
        if name != names[1]:  # one that could not be sealed stays
            (tmp_path / name / "seal" / "0001.json").write_text("{}")
    (tmp_path / "of-somebody").mkdir()
    make_dataset(tmp_path / names[4] / "d")
    rotation = Rotation(str(tmp_path), 60, None, 2)
    rotation.seal(str(tmp_path / names[4] / "d"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [names[1], *names[3:], "of-somebody"]
    assert not rotation.is_due(1e9, 0, 0) and rotation.is_due(60, 1, 0)
    assert not rotation.is_due(59, 1, 10**9) and Rotation("", None, 5, None).is_due(0, 1, 5)


def test_rows_that_wait_too_long_are_committed_while_it_serves(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    run = serving.start(config(), document(out, rows_per_shard=10**4, commit_seconds=0.2))
    engine = serve(run)
    deadline = time.monotonic() + TIMEOUT_S
    while sum(m.n_rows for m in read_dataset(open_store(out)).shards) < N_REQUESTS * N_POSITIONS:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    end(run, engine)
    sealed(out)
