"""The files of examples/deploy: they ask for metrics that are served, and are what they claim."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_metrics import Samples, served
from test_progress import COUNTED, ODD, WITH_LANE, snapshot

from actds.dataset.ledger import read_ledger
from actds.dataset.reading import read_genesis
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing import toy
from actds_writers.cli import write
from actds_writers.config import LiveSettings
from actds_writers.engines.vllm.serving import parse_live_settings
from actds_writers.harvest.prepare import finished_of
from actds_writers.ipc.messages import RunInfo
from actds_writers.sizing import LANE_NBYTES

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
SBATCH = DEPLOY / "write.sbatch"


def executable(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def samples() -> Samples:
    """Return what a port serves that knows everything but a profile."""
    commits = dataclasses.replace(WITH_LANE.commits, values=ODD)
    of_run = RunInfo("r-1", "tiny", "0123", "live")
    written = dataclasses.replace(WITH_LANE, commits=commits, of_run=of_run)
    return served(snapshot(written, dataclasses.replace(COUNTED, lane_depth=1)))


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DEPLOY / "dashboard.json").read_text())
    return document


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    variables = dashboard()["templating"]["list"]
    found += [v["query"] for v in variables if v["type"] == "query"]
    return found + [rule["expr"] for rule in alerts()]


def test_every_expression_is_of_metrics_and_labels_that_are_served(samples: Samples) -> None:
    labels: dict[str, dict[str, set[str]]] = {}
    for name, pairs in samples:
        known = labels.setdefault(name, {})
        for label, value in pairs:
            known.setdefault(label, set()).add(value)
    of_target = {"job", "instance"}
    for text in expressions():
        asked = re.findall(r"(actds_\w+)(?:\{([^}]*)\})?", text)
        assert asked, text
        for name, selector in asked:
            assert name in labels, f"{name} is not served: {text}"
            for label, sign, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', selector):
                assert label in of_target | set(labels[name]), text
                assert sign == "=~" or value in labels[name][label], text
        kept = of_target.union(*(labels[name] for name, _ in asked))
        for group in re.findall(r"(?:by|on|ignoring|group_left) \(([^)]*)\)", text):
            assert set(group.split(", ")) <= kept, text
        for counter in re.findall(r"(?:rate|increase)\((actds_\w+)", text):
            assert counter.endswith(("_total", "_bucket")), text


def test_the_dashboard_has_a_panel_for_each_thing_to_watch() -> None:
    document = dashboard()
    asked = " ".join(target["expr"] for p in document["panels"] for target in p["targets"])
    for name in (
        *("rows_total", "dropped_tokens_total", "compression_backlog_bytes", "queue_fill_ratio"),
        *("queue_depth", "commit_latency_seconds_bucket", "not_finite_rows_total", "capturing"),
    ):
        assert f"actds_{name}" in asked
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        assert panel["type"] in ("timeseries", "stat", "table") and panel["title"]
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["targets"] and len({t["refId"] for t in panel["targets"]}) == len(
            panel["targets"]
        )
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])


def test_every_alert_has_a_severity_and_says_what_happened() -> None:
    rules = alerts()
    assert {"ActdsCaptureEnded", "ActdsRowsDropped", "ActdsWriterBehind", "ActdsRowsNotFinite"} <= {
        rule["alert"] for rule in rules
    }
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def documents(name: str) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()) if d]


def pods() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield kind, pod and container of what the manifests start."""
    for name in ("server.yaml", "write.yaml", "seal.yaml"):
        for document in documents(name):
            if document["kind"] in ("Deployment", "Job"):
                pod = document["spec"]["template"]["spec"]
                yield document["kind"], pod, pod["containers"][0]


def servers() -> dict[str, tuple[list[str], int]]:
    """Return the words of each vllm serve, and for how long its end is waited for."""
    unit = (DEPLOY / "actds-vllm.service").read_text().replace("\\\n", " ")
    seconds = int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)[0])
    words = shlex.split(re.findall(r"^ExecStart=(.*)$", unit, re.M)[0])
    found = {"systemd": (words, seconds)}
    for kind, pod, container in pods():
        if kind == "Deployment":
            found[kind] = container["args"], pod["terminationGracePeriodSeconds"]
    return found


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_every_server_has_settings_that_are_taken_and_time_to_end() -> None:
    for kind, (words, patience_s) in servers().items():
        settings = parse_live_settings(json.loads(option(words, "--additional-config"))["actds"])
        assert settings.metrics_port == 9400, kind
        assert patience_s >= 2 * int(option(words, "--shutdown-timeout")) > 0, kind


def test_systemd_signals_the_server_alone() -> None:
    # A signal to all processes of the unit would end the engine before it has drained.
    assert "\nKillMode=mixed\n" in (DEPLOY / "actds-vllm.service").read_text()


def test_shared_memory_holds_rings_and_lanes() -> None:
    for kind, pod, container in pods():
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
        if "/dev/shm" not in mounts:
            assert container["command"][:2] == ["actds", "seal"]
            continue
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        memory = volumes[mounts["/dev/shm"]]["emptyDir"]
        assert memory["medium"] == "Memory"
        needed = LiveSettings.model_fields["ring_mib"].default + (LANE_NBYTES >> 20)
        assert int(memory["sizeLimit"].removesuffix("Gi")) << 10 >= 2 * needed, kind


def test_nobody_runs_as_root_and_credentials_are_a_secret() -> None:
    for _, pod, container in pods():
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert (
            container["envFrom"] == [{"secretRef": {"name": "actds-s3"}}] and "env" not in container
        )
    assert "\nUSER 10001\n" in (DEPLOY / "Containerfile").read_text()


@pytest.mark.standard
@pytest.mark.parametrize(
    ("task", "part"), [("0", "1/16"), ("15", "16/16")], ids=["the first", "the last"]
)
def test_the_parts_of_job_and_array_are_those_of_one_harvest(
    task: str, part: str, tmp_path: Path
) -> None:
    [job] = documents("write.yaml")
    assert job["spec"]["completionMode"] == "Indexed"
    [(_, _, container)] = [pod for pod in pods() if "JOB_COMPLETION_INDEX" in str(pod)]
    array = SBATCH.read_text()
    n_parts = int(re.findall(r"^#SBATCH --array=1-(\d+)$", array, re.M)[0])
    assert n_parts == job["spec"]["completions"] == 16
    # Real shells; what they would start only says with which words.
    executable(tmp_path / "actds", 'printf "%s\\n" "$@"')
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "JOB_COMPLETION_INDEX": task,
        "SLURM_ARRAY_TASK_ID": str(int(task) + 1),
    }
    for command in (container["command"], ["bash", str(SBATCH)]):
        words = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        context = write.make_context("write", words[1:], resilient_parsing=True)
        assert words[0] == "write" and option(words, "--part") == part
        assert not context.args and context.params["resume"]


class SlurmTask:
    """The shell of a task of the array, with what it starts from a folder, and a scontrol there."""

    def __init__(self, folder: Path, restarts: int = 0, **variables: str) -> None:
        self._calls = folder / "scontrol.calls"
        executable(folder / "scontrol", f'echo "$@" >> {self._calls}')
        of_slurm = {"SLURM_JOB_ID": "100", "SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": "3"}
        if restarts:
            of_slurm["SLURM_RESTART_COUNT"] = str(restarts)
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        self.shell = subprocess.Popen(
            ["bash", str(SBATCH)],
            env=h.environment(PATH=path, **of_slurm, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def signal(self) -> None:
        """Signal as B:TERM does: the shell alone."""
        self.shell.send_signal(signal.SIGTERM)

    def ended(self) -> tuple[int, list[str], str]:
        """Return the exit code, what scontrol was asked for, and what was said."""
        said, _ = self.shell.communicate(timeout=300)
        calls = self._calls.read_text().splitlines() if self._calls.exists() else []
        return self.shell.returncode, calls, said


def await_that(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


AGAIN = ["requeue Incomplete 100_3"]  # by task: 100 alone is the whole array


@pytest.mark.standard
@pytest.mark.parametrize(
    ("is_signalled", "code", "restarts", "calls"),
    [
        pytest.param(True, 1, 0, AGAIN, id="ended in order with more to do"),
        pytest.param(True, 1, 19, AGAIN, id="the last restart"),
        pytest.param(True, 1, 20, [], id="restarted for ever"),
        pytest.param(True, 0, 0, [], id="finished meanwhile"),
        pytest.param(True, 143, 0, AGAIN, id="signalled before it began to serve"),
        pytest.param(False, 4, 0, [], id="an error that comes again"),
        pytest.param(False, 1, 0, [], id="an error of Python"),
        pytest.param(False, 0, 3, [], id="finished after restarts"),
    ],
)
def test_a_slurm_task_is_queued_again_only_when_a_signal_ended_it(
    is_signalled: bool, code: int, restarts: int, calls: list[str], tmp_path: Path
) -> None:
    begun, end = tmp_path / "begun", f"exit {code}" if code < 128 else "trap - TERM; kill -TERM $$"
    # It ends some time after the signal, as a harvest that drains.
    wait = "while [ ! $ended ]; do sleep 0.02; done; sleep 0.3" if is_signalled else ""
    executable(tmp_path / "actds", f"trap 'ended=1' TERM; touch {begun}; {wait}\n{end}")
    task = SlurmTask(tmp_path, restarts)
    if is_signalled:
        await_that(begun.exists)
        time.sleep(0.1)  # until the shell has its trap
        task.signal()
    assert task.ended()[:2] == (code, calls)


@pytest.mark.standard
def test_a_signalled_slurm_task_ends_in_order_and_the_next_one_serves_what_is_left(
    tmp_path: Path,
) -> None:
    site, out = toy.register(tmp_path / "site"), tmp_path / "acts"
    words = [{"id": f"q{n}", "prompt": "all work"} for n in range(16 * 12)]
    variables = {
        "OUT": str(out),
        "MODEL": str(toy.write_model(tmp_path / "toy")),
        "PROMPTS": str(h.write_prompts(tmp_path / "prompts.jsonl", words)),
        "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
    }
    options = "--engine toy --hooks resid_post:0 --max-tokens 4 --rows-per-shard 16"
    slow = "--engine-arg max_num_seqs=2 --engine-arg step_s=0.5"
    executable(tmp_path / "actds", f'exec {sys.executable} -m actds "$@" {options} {slow}')
    first = SlurmTask(tmp_path, **variables)
    await_that(lambda: first.shell.poll() or len(list(out.glob("shards/*/shard.json"))) >= 3)
    first.signal()
    code, calls, said = first.ended()
    assert (code, calls) == (1, AGAIN) and "Continue with the same command" in said, said
    ledger = read_ledger(open_store(out), read_genesis(open_store(out)).dataset)
    assert {chain.state for chain in ledger.values()} == {"closed"}, said
    second = SlurmTask(tmp_path, restarts=1, **variables)
    code, calls, said = second.ended()
    assert (code, calls) == (0, AGAIN), said  # not asked for once more
    seal(out)
    dataset = h.validated(out)
    served = [finished_of(dataset.catalog, run) for run in dataset.runs]
    assert len(served) == 2 and all(served), served
    assert sorted(row for rows in served for row in rows) == list(range(2, 16 * 12, 16))
