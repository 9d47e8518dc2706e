"""Slurm of one machine: munged, a controller, and a node on which jobs of an array run."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from actds_testing.ceph import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
START_TIMEOUT_S = 60
# A job that is queued again waits until its old credential has expired, by default 2 minutes.
SETTINGS = """
ClusterName=actds
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=30
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=first Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


def slurm_lacks() -> str | None:
    """Return which program of Slurm this machine lacks, None when it has all of them."""
    return next((name for name in PROGRAMS if shutil.which(name) is None), None)


class Cluster:
    """The commands of a user of the cluster."""

    def __init__(self, folder: Path) -> None:
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *words: str, environment: Mapping[str, str] = {}) -> str:
        """Return what a command of Slurm printed; a failure raises with what it said."""
        result = subprocess.run(
            words,
            env={**os.environ, **environment, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 0, f"{words}: {result.stderr}"
        return result.stdout.strip()

    def signal(self, task: str) -> None:
        """Send SIGTERM to the script of a task, as ``--signal=B:TERM`` does."""
        # It asks again until the task is another one, and fails when that is queued again.
        words = ("scancel", "--batch", "--signal=TERM", task)
        subprocess.run(words, env={**os.environ, **self.environment}, timeout=300)

    def jobs(self, array: str) -> dict[int, dict[str, Any]]:
        """Return the fields of each task of an array, those that ended too."""
        shown = self.call("scontrol", "show", "job", array, "--oneliner")
        rows = [
            dict(w.split("=", 1) for w in line.split() if "=" in w) for line in shown.splitlines()
        ]
        return {
            int(row["ArrayTaskId"]): row for row in rows if row.get("ArrayTaskId", "").isdigit()
        }


@contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    """Yield a cluster whose node takes two tasks at a time, whatever memory they ask for.

    Args:
        folder: where keys, states and logs are kept.
    """
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key, settings = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    ports = {"controller": free_port(), "node": free_port()}
    settings.write_text(SETTINGS.format(folder=folder, user=getpass.getuser(), **ports))
    of_munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    cluster = Cluster(folder)
    with ExitStack() as stack:
        for words in (
            ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *of_munge],
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D", "-N", "localhost"],
        ):
            log = stack.enter_context((folder / f"{words[0]}.log").open("w"))
            process = subprocess.Popen(
                words, env={**os.environ, **cluster.environment}, stdout=log, stderr=log
            )
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        deadline = time.monotonic() + START_TIMEOUT_S
        while "State=IDLE" not in _shown(cluster):
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.2)
        stack.callback(cluster.call, "scancel", f"--user={getpass.getuser()}")
        yield cluster


def _shown(cluster: Cluster) -> str:
    try:
        return cluster.call("scontrol", "show", "node", "--oneliner")
    except AssertionError:  # the controller is not up yet
        return ""
