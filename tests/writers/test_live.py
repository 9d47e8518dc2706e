"""Live harvests on a synthetic engine: several engines in one dataset, and ends of every kind."""

from __future__ import annotations

import dataclasses
import importlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import actds
from actds.dataset.ledger import fence, read_ledger
from actds.errors import ActdsError
from actds.format.readouts import NONE
from actds.publish.sealing import seal
from actds.store import open_store
from actds.store.local import lock_dataset
from actds_testing.synthetic_engine import (
    GENERATED,
    HOOKS,
    PROMPT_LEN,
    RING_NBYTES,
    SyntheticEngine,
    pipeline_for,
)
from actds_validators.validate.validation import validate
from actds_writers.census.process import from_line, to_line
from actds_writers.config import HarvestSettings, WriterSettings
from actds_writers.engines.vllm import serving
from actds_writers.engines.vllm.plugin import when_imported
from actds_writers.engines.vllm.scheduler import OWNERS_PER_BLOCK, VllmSchedulerSide
from actds_writers.engines.vllm.serving import LiveRun, parse_live_settings
from actds_writers.engines.vllm.worker import WorkerCapture
from actds_writers.harvest.processes import Pipeline
from actds_writers.ipc.link import Sender
from actds_writers.ipc.messages import ClientFacts, Fact
from actds_writers.model_folder import SpecialTokens
from actds_writers.sampling import LeftOut, SamplingRules

pytestmark = pytest.mark.standard


N_POSITIONS = PROMPT_LEN + GENERATED - 1
TIMEOUT_S = 120


def live_run(out: Path, run: str, rules: SamplingRules | None = None) -> LiveRun:
    """Return the run of one engine among several."""
    out.mkdir(exist_ok=True)
    settings = WriterSettings(
        harvest=HarvestSettings(out=str(out), hooks="resid_post:1,2", seed=3),
        dataset=secrets.token_hex(16), run=run, resume=False, started_ns=1, software="test",
        facts=(), tokens=SpecialTokens(), rows_per_shard=40, n_threads=1, shared=True,
        readouts=NONE,
    )  # fmt: skip

    def begin(settings: WriterSettings) -> tuple[Pipeline, Callable[[], None]]:
        lock = lock_dataset(out, shared=True)
        try:
            hooks = tuple((h.kind, h.layer) for h in HOOKS)
            sizes = {"ring_nbytes": RING_NBYTES, "staging_nbytes": 0}
            return Pipeline(settings, hooks, os.getpid(), lock, **sizes), lambda: None
        finally:
            os.close(lock)

    return LiveRun(begin, settings, rules or SamplingRules())


def clean(path: Path) -> actds.Dataset:
    report = validate(path, level="deep")
    assert not report.errors, report.errors
    # A killed writer leaves files of a shard that it never committed; they are no data.
    assert {finding.code for finding in report.warnings} <= {"E105", "E421"}
    return actds.open(path)


def wait_for(what: Any) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := what()):
        assert time.monotonic() < deadline, "nothing within the time"
        time.sleep(0.02)
    return found


def chains(out: Path, run: str) -> dict[str, Any]:
    """Return the chains of a run by kind."""
    dataset = actds.format.schema.parse(
        actds.format.schema.Genesis, (out / "actds.json").read_bytes(), "actds.json"
    ).dataset
    found = read_ledger(open_store(out), dataset).values()
    return {state.kind: state for state in found if state.run == run}


def n_shards(out: Path, run: str) -> int:
    if not (out / "actds.json").exists() or "writer" not in (found := chains(out, run)):
        return 0
    return sum(record.type == "shard" for record in found["writer"].records)


def serve_for_ever(out: Path, run: str) -> None:
    """Serve until somebody kills this process."""
    engine = SyntheticEngine(live_run(out, run))  # type: ignore[arg-type]
    for number in range(10**6):
        engine.request(number)
        time.sleep(0.001)


def test_engines_share_a_dataset_and_one_that_is_killed_costs_the_others_nothing(
    tmp_path: Path,
) -> None:
    out = tmp_path / "acts"
    first = live_run(out, "r-first")
    engine = SyntheticEngine(first)  # type: ignore[arg-type]
    engine.request(0)
    doomed = subprocess.Popen(
        [sys.executable, "-c", f"import test_live as t, pathlib;"
         f"t.serve_for_ever(pathlib.Path({str(out)!r}), 'r-doomed')"],
        cwd=Path(__file__).parent,
    )  # fmt: skip
    try:
        wait_for(lambda: n_shards(out, "r-doomed") >= 2 or doomed.poll() is not None)
        with pytest.raises(ActdsError, match="E010"):
            lock_dataset(out)  # nobody works on the whole while engines write
    finally:
        doomed.kill()
        assert doomed.wait() == -signal.SIGKILL
    again = live_run(out, "r-again")  # restarted: a run of its own
    restarted = SyntheticEngine(again)  # type: ignore[arg-type]
    for number in range(7):
        restarted.request(number)
        engine.request(number + 1)
    for one, run, wanted in ((engine, first, 8), (restarted, again, 7)):
        assert run.drain(lambda one=one: one.n_steps - 1, TIMEOUT_S)  # type: ignore[misc]
        one.close()
        run.end("finished")
        assert run.failure is None, wanted
    # Nobody ends the killed engine's processes: they notice, commit and close by themselves.
    wait_for(lambda: {s.state for s in chains(out, "r-doomed").values()} == {"closed"})
    wait_for(lambda: _free(out))
    seal(open_store(out))
    dataset = clean(out)
    rows = {run: 0 for run in ("r-first", "r-doomed", "r-again")}
    for shard in dataset.shards:
        rows[shard.manifest.run] += shard.manifest.n_rows
    assert (rows["r-first"], rows["r-again"]) == (8 * N_POSITIONS, 7 * N_POSITIONS)
    assert rows["r-doomed"] >= 2 * 40
    closes = [record.body for record in chains(out, "r-doomed")["writer"].records][-1]
    assert closes["reason"] == "interrupted"


def _free(out: Path) -> bool:
    try:
        os.close(lock_dataset(out))
    except ActdsError:
        return False
    return True


def test_a_late_commit_of_a_fenced_writer_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    zombie, heir = live_run(out, "r-zombie"), live_run(out, "r-heir")
    engine, other = SyntheticEngine(zombie), SyntheticEngine(heir)  # type: ignore[arg-type]
    wait_for(lambda: engine.request(engine.n_steps // GENERATED) or n_shards(out, "r-zombie") >= 2)
    if not engine.n_steps // GENERATED * N_POSITIONS % 40:  # not every row is in a full shard
        engine.request(engine.n_steps // GENERATED)
    assert zombie.drain(lambda: engine.n_steps - 1, TIMEOUT_S)
    writer = zombie.pipeline.processes["writer"].pid
    os.kill(writer, signal.SIGSTOP)
    try:
        state = chains(out, "r-zombie")["writer"]
        dataset = state.records[0].dataset
        fenced = fence(open_store(out), dataset, state.chain, "its engine was restarted")
        for number in range(5):
            other.request(number)
    finally:
        os.kill(writer, signal.SIGCONT)
    engine.close()
    zombie.end("finished")  # its last buffers come after the fence
    assert heir.drain(lambda: other.n_steps - 1, TIMEOUT_S)
    other.close()
    heir.end("finished")
    after = chains(out, "r-zombie")["writer"]
    assert (after.state, after.head) == ("fenced", fenced.head)
    wait_for(lambda: _free(out))
    seal(open_store(out))
    found = clean(out)
    acknowledged = sum(s.manifest.n_rows for s in found.shards if s.manifest.run == "r-zombie")
    n_served = engine.n_steps // GENERATED * N_POSITIONS
    spans = [s for s in found.spans(run=True).to_pylist() if s["run"] == "r-zombie"]
    late = sum(s["stop"] - s["start"] for s in spans if s["disposition"] == "aborted")
    assert 80 <= acknowledged < n_served
    assert acknowledged + late == n_served


def test_serving_goes_on_when_the_writer_dies_and_the_rest_is_accounted(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    run = live_run(out, "r-test")
    engine = SyntheticEngine(run)  # type: ignore[arg-type]
    wait_for(lambda: engine.request(engine.n_steps // GENERATED) or n_shards(out, "r-test") >= 2)
    before = engine.n_steps // GENERATED
    os.kill(run.pipeline.processes["writer"].pid, signal.SIGKILL)
    wait_for(lambda: run.failure is not None)
    assert "E502" in str(run.failure)
    engine.stages.close()  # as the plugin detaches the worker; the scheduler serves on

    class NoWorker:
        def hand_over(self, *_: Any, **__: Any) -> None: ...

        def learn(self, *_: Any) -> None: ...

    engine.stages = NoWorker()  # type: ignore[assignment]
    for number in range(before, before + 4):
        engine.request(number)
    engine.scheduler.close()
    run.end("finished")
    wait_for(lambda: _free(out))
    seal(open_store(out))
    dataset = clean(out)
    aborted = [s for s in dataset.spans().to_pylist() if s["disposition"] == "aborted"]
    lost = sum(s["stop"] - s["start"] for s in aborted)
    assert dataset.n_rows >= 80
    assert dataset.n_rows + lost == (before + 4) * N_POSITIONS
    assert {s["request"] for s in aborted} >= set(range(before, before + 4))
    assert chains(out, "r-test")["census"].records[-1].body["reason"] == "failed"


def test_a_census_that_stands_still_holds_up_no_request(tmp_path: Path) -> None:
    """It is stopped for as long as it takes to send it more than a socket holds."""
    out = tmp_path / "acts"
    pipeline = pipeline_for(out, "drop_newest", live=True)
    engine, n = SyntheticEngine(pipeline), 300
    engine.request(0)
    engine.drain(pipeline)
    census = pipeline.processes["census"].pid
    os.kill(census, signal.SIGSTOP)

    def serve() -> None:
        for number in range(1, n):
            engine.request(number)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    held_up = thread.is_alive()
    os.kill(census, signal.SIGCONT)
    assert not held_up
    with pipeline:
        engine.drain(pipeline)
        engine.close()
        pipeline.send_client_facts(ClientFacts())
        ended = pipeline.finish("finished")["census"]
    seal(open_store(out))
    assert clean(out).n_rows + ended["dropped"] == n * N_POSITIONS


def test_rules_reach_both_sides_and_the_processes_are_not_descendants(
    tmp_path: Path,
) -> None:
    out = tmp_path / "acts"
    run = live_run(out, "r-test")
    engine = SyntheticEngine(run)  # type: ignore[arg-type]
    for process in run.pipeline.processes.values():
        stat = Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        assert int(stat[1]) != os.getpid()  # a server that kills its tree does not reach them
        assert process.poll() is None
    for number in range(9):
        rule = (LeftOut(), LeftOut("sampling:phase"), LeftOut("sampling:skip", "sampling:skip"))
        engine.request(number, rule[number % 3])
    assert run.drain(lambda: engine.n_steps - 1, TIMEOUT_S)
    engine.close()
    run.end("finished")
    assert {process.poll() for process in run.pipeline.processes.values()} == {0}
    serving.compare_hooks(str(out), HOOKS)
    with pytest.raises(ActdsError, match=r"E010.*resid_post\.7"):
        serving.compare_hooks(str(out), [dataclasses.replace(HOOKS[0], name="resid_post.7")])
    seal(open_store(out))
    dataset = clean(out)
    assert dataset.n_rows == 3 * N_POSITIONS + 3 * (GENERATED - 1)
    filtered = [s for s in dataset.spans().to_pylist() if s["disposition"] == "filtered"]
    assert {(s["request"] % 3, s["start"], s["stop"], s["reason"]) for s in filtered} == {
        (1, 0, PROMPT_LEN, "sampling:phase"), (2, 0, N_POSITIONS, "sampling:skip"),
    }  # fmt: skip


GOOD = {"out": "/x", "hooks": "resid_post:1"}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("yes", ["actds", "'yes'", "an object"]),
        ({**GOOD, "fracton": 0.1}, ["actds.fracton", "unknown key", "fraction"]),
        ({**GOOD, "overflow": "drop"}, ["actds.overflow", "'drop'", "drop_newest"]),
        ({**GOOD, "fraction": 2}, ["actds.fraction", "2", "less than or equal to 1"]),
        ({**GOOD, "fraction": "half"}, ["actds.fraction", "'half'", "decimal"]),
        ({**GOOD, "ring_mib": "256"}, ["actds.ring_mib", "'256'", "integer"]),
        ({**GOOD, "phases": ["decod"]}, ["actds.phases.0", "'decod'", "'decode'"]),
        ({**GOOD, "only": [{"header": "x-team", "values": ["a"]}]}, ["only.0.header", "x-team"]),
        ({**GOOD, "skip": [{"values": ["a"]}]}, ["actds.skip.0", "either header or xarg"]),
        ({"out": "/x"}, ["actds.hooks", "nothing", "a value"]),
    ],
)
def test_refuses_settings_and_names_the_key(document: Any, words: list[str]) -> None:
    with pytest.raises(ActdsError, match="E017") as caught:
        parse_live_settings(document)
    for word in words:
        assert word in str(caught.value)


def test_settings_have_defaults_that_put_serving_first() -> None:
    settings = parse_live_settings(GOOD)
    assert settings.overflow == "drop_newest"
    assert settings.rules().describe() == "all"


def test_a_place_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file"):
        with pytest.raises(ActdsError, match=r"E017.*actds\.out"):
            serving.destination(str(out))
    made = tmp_path / "a" / "b"
    assert serving.destination(str(made)) == str(made)
    assert made.is_dir()


def engine_config(**parallel: Any) -> SimpleNamespace:
    """Return what a plain engine's configuration looks like to the checks."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{
                "data_parallel_size": 1, "data_parallel_index": 0, "pipeline_parallel_size": 1,
                "nnodes": 1,
                "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1,
                "enable_hc_sp": False, "distributed_executor_backend": "mp", "enable_dbo": False,
                "ubatch_size": 0, "worker_cls": "vllm.v1.worker.gpu_worker.Worker", **parallel,
            }
        ),
        cache_config=SimpleNamespace(kv_offloading_size=None, kv_sharing_fast_prefill=False),
        model_config=SimpleNamespace(enable_prompt_embeds=False, runner_type="generate"),
        scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=True),
        speculative_config=None, diffusion_config=None, kv_transfer_config=None,
        ec_transfer_config=None, lora_config=None,
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace()),
    )  # fmt: skip


def test_refuses_an_engine_whose_steps_cannot_be_accounted_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving.refuse(engine_config(), check=True)
    serving.refuse(engine_config(data_parallel_size=2), check=True)  # of a mixture of experts
    for option, value in (
        ("prefill_context_parallel_size", 2),
        ("worker_cls", "mine.Worker"),
        ("distributed_executor_backend", "ray"),
    ):  # fmt: skip
        with pytest.raises(ActdsError, match=f"E012 engine option {option}"):
            serving.refuse(engine_config(**{option: value}), check=True)
    serving.refuse(engine_config(nnodes=2), check=True)
    for option in ("pipeline_parallel_size", "data_parallel_size"):
        with pytest.raises(ActdsError, match=f"E012 engine option {option}: 2: .*node"):
            serving.refuse(engine_config(nnodes=2, **{option: 2}), check=True)
    drafting = engine_config()
    drafting.speculative_config = SimpleNamespace(method="ngram")
    serving.refuse(drafting, check=True)
    drafting.speculative_config = SimpleNamespace(method="dflash")
    with pytest.raises(ActdsError, match=r"E012 engine option speculative_config.*ngram"):
        serving.refuse(drafting, check=True)
    with pytest.raises(ActdsError, match=r"E012 .*speculative_config: dflash.*eagle3"):
        WorkerCapture.refuse(drafting)  # whatever method actds write was given
    drafting.speculative_config = SimpleNamespace(method="eagle", enable_adaptive_verification=True)
    with pytest.raises(ActdsError, match=r"E012 .*speculative_config\.enable_adaptive_verif"):
        WorkerCapture.refuse(drafting)  # only the device knows which drafts a step verifies
    with_adapters = engine_config()
    with_adapters.lora_config = SimpleNamespace(max_loras=2)
    with pytest.raises(ActdsError, match=r"E012 engine option enable_lora.*without an adapter"):
        serving.refuse(with_adapters, check=False)
    serving.refuse(with_adapters, check=True)  # which decides
    rows_apart = engine_config()
    rows_apart.compilation_config.pass_config.enable_sp = True
    with pytest.raises(ActdsError, match=r"E012 engine option .*pass_config\.enable_sp"):
        WorkerCapture.refuse(rows_apart)
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")  # its KV cache may leave no room
    with pytest.raises(ActdsError, match="E012 engine option VLLM_ENABLE_STARTUP_PLAN: in use"):
        WorkerCapture.refuse(engine_config())


def test_the_plugin_imports_nothing_and_comes_in_when_the_engine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_engine.py").write_text("NAME = 'engine'\n")
    monkeypatch.syspath_prepend(tmp_path)
    before, seen = list(sys.meta_path), []
    when_imported("late_engine", lambda module: seen.append(module.NAME))
    assert (seen, "late_engine" in sys.modules) == ([], False)
    importlib.import_module("late_engine")
    assert seen == ["engine"]
    assert sys.meta_path == before
    when_imported("late_engine", lambda module: seen.append(module.__name__))
    assert seen == ["engine", "late_engine"]
    del sys.modules["late_engine"]


def request(engine_id: str, n_blocks: int, first: int = 0, **fields: Any) -> SimpleNamespace:
    """Return a request of whole blocks of 4 tokens, as a scheduler holds it."""
    return SimpleNamespace(
        request_id=engine_id, num_prompt_tokens=4 * n_blocks, num_computed_tokens=0,
        block_hashes=[f"{first + n}".encode() for n in range(n_blocks)], arrival_time=1.0,
        sampling_params=None, num_output_tokens=0, is_finished=lambda: False, **fields,
    )  # fmt: skip


class Told(list[Any]):
    send = list.append


def test_the_scheduler_side_forgets_the_least_recently_used_blocks_and_says_so() -> None:
    told = Told()
    witness = VllmSchedulerSide(told, 4, n_blocks=1)
    limit = OWNERS_PER_BLOCK

    def schedule(one: SimpleNamespace, start: int) -> Any:
        n = one.num_prompt_tokens - start
        one.num_computed_tokens = one.num_prompt_tokens
        scheduler = SimpleNamespace(
            requests={one.request_id: one}, waiting=[], running=[one], num_spec_tokens=0,
            kv_cache_manager=SimpleNamespace(usage=0.0),
        )  # fmt: skip
        witness.arrived(one)
        output = SimpleNamespace(
            num_scheduled_tokens={one.request_id: n}, scheduled_spec_decode_tokens={}
        )
        vars(output)["_actds"] = witness.scheduled(scheduler, output, ())
        witness.taken(output)
        return told[-1]

    schedule(request("a-00000000", limit), 0)
    hit = schedule(request("b-00000000", 2), 4)  # touches block 0, computes block 1 again
    assert [(r.start, r.stop, r.ref_request) for r in hit.references] == [(0, 4, 0)]
    schedule(request("c-00000000", 2, first=50), 0)  # forgets the two that are longest unused
    assert len(witness.owners.requests) == limit
    again = schedule(request("d-00000000", 4), 12)
    owners = [(r.start, r.stop, r.ref_request) for r in again.references]
    assert owners == [(0, 4, 0), (4, 8, 1), (8, 12, None)]
    assert not any(r.external for r in again.references)


def test_the_scheduler_side_marks_what_the_rules_leave_out() -> None:
    told = Told()
    rules = SamplingRules.model_validate({"skip": [{"header": "x-session-id", "values": ["s"]}]})
    witness = VllmSchedulerSide(told, 4, 8, rules)
    for one in (
        request("cmpl-x-0-0123abcd", 1),
        request("cmpl-y-0-0123abcd", 1, session_id="s"),
        request(
            "cmpl-z-0-0123abcd",
            1,
            lora_request=SimpleNamespace(lora_name="z", lora_int_id=1, lora_path="/nowhere"),
        ),
    ):
        witness.arrived(one)
    skip, lora = (LeftOut(w, w) for w in ("sampling:skip", "unsupported:lora"))
    assert [m.left_out for m in told] == [LeftOut(), skip, lora]
    assert [m.external_id for m in told] == ["cmpl-x-0", "cmpl-y-0", "cmpl-z-0"]


class Unheard:
    """What no version of an engine has sent yet: every look at it fails."""

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(name)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"resumable": True}, "streaming"),
        ({"prompt_embeds": np.zeros((4, 8), np.float32)}, "prompt_embeds"),
        ({"pooling_params": Unheard()}, "pooling"),
        ({"mm_features": [Unheard()]}, "multimodal"),
        ({"sampling_params": Unheard()}, "request"),
        ({"block_hashes": [Unheard()]}, "request"),
        ({"arrival_time": None}, "request"),
    ],
)
def test_a_request_that_cannot_be_stored_is_left_out_and_no_other_with_it(
    fields: dict[str, Any], kind: str
) -> None:
    told = Told()
    witness = VllmSchedulerSide(told, 4, 8, SamplingRules())
    odd = request("s\ud800-0123abcd", 1)
    vars(odd).update(fields)
    for one in (request("a-0123abcd", 1), odd, odd, request("b-0123abcd", 1)):
        witness.arrived(one)
    reason = f"unsupported:{kind}"
    assert [m.request for m in told] == [0, 1, 2]
    assert [m.left_out for m in told] == [LeftOut(), LeftOut(reason, reason), LeftOut()]
    assert told[1].external_id == r"s\ud800"
    for message in told:
        assert from_line(to_line(message)) == message


def test_a_sender_never_waits_and_refuses_to_lose_a_message() -> None:
    here, there = Pipe()
    sender = Sender(here, limit=500)
    big = b"x" * 4096
    for _ in range(400):  # far more than a socket holds, and nobody reads
        sender.send(big)
    with pytest.raises(ActdsError, match="E505"):
        for _ in range(600):
            sender.send(big)
    there.close()
    sender.close()


def test_a_sender_sends_in_order_and_ends_with_everything_sent() -> None:
    here, there = Pipe()
    sender = Sender(here)
    for number in range(100):
        sender.send(number)
    sender.close()
    assert [there.recv() for _ in range(100)] == list(range(100))
    with pytest.raises(EOFError):
        there.recv()


def test_steps_with_other_weights_are_dropped_and_another_run_of_the_engine_follows(
    tmp_path: Path,
) -> None:
    out = tmp_path / "acts"
    first = live_run(out, "r-first")
    watch: Any = SimpleNamespace(is_suspected=False)
    first.watch = watch
    engine = SyntheticEngine(first)  # type: ignore[arg-type]
    engine.changed = torch.zeros(1, 1, 1, dtype=torch.bool)
    engine.request(0)
    assert first.drain(lambda: engine.n_steps - 1, TIMEOUT_S) and not watch.is_suspected
    engine.changed = ~engine.changed
    engine.request(1)
    wait_for(lambda: watch.is_suspected)
    assert first.drain(lambda: engine.n_steps - 1, TIMEOUT_S)

    second = first.follow([Fact("model.loaded_by", "update_weights", "observed")])
    assert second.link.run != "r-first" and second.watch is watch
    engine.close()
    first.end_aside("finished")
    engine = SyntheticEngine(second)  # type: ignore[arg-type]
    engine.request(0)
    assert second.drain(lambda: engine.n_steps - 1, TIMEOUT_S)
    engine.close()
    second.end("finished")  # which waits for the end of the first
    assert first.failure is None and second.failure is None

    seal(open_store(out))
    dataset = clean(out)
    assert dataset.n_rows == 2 * N_POSITIONS
    dropped = [s for s in dataset.spans(run=True).to_pylist() if s["disposition"] == "dropped"]
    assert {(s["run"], s["request"], s["reason"]) for s in dropped} == {
        ("r-first", 1, "changed_weights")
    }
    assert sum(s["stop"] - s["start"] for s in dropped) == N_POSITIONS
    record = dataset.runs[second.link.run].fields
    assert record["model.loaded_by"].value == "update_weights"


def test_weights_that_changed_nobody_knows_when_are_on_record_and_fail_the_audit(
    tmp_path: Path,
) -> None:
    out = tmp_path / "acts"
    run = live_run(out, "r-doubtful")
    engine = SyntheticEngine(run)  # type: ignore[arg-type]
    engine.request(0)
    assert run.drain(lambda: engine.n_steps - 1, TIMEOUT_S)
    run.fail(ActdsError("E509", "weights", got="others", expected="those of the run"))
    engine.close()
    run.end("finished")
    seal(open_store(out))
    assert clean(out).n_rows == N_POSITIONS
    assert chains(out, "r-doubtful")["census"].close.totals["unknown_weights"] == 1
    (place,) = [p for p in actds.audit(out).result.places if p.name == "identity"]
    assert place.level == "FAIL" and "r-doubtful" in place.sentence
    assert place.n == N_POSITIONS
