"""What the driver of ``--executor ray`` costs by prompts: CPU seconds of the command itself.

A cluster of this machine, the toy engine without pauses. The start is measured by few prompts and
taken off; engines and the processes of Ray are not the driver's.

    python benchmarks/bench_driver.py --prompts 200 2200 --nodes 2
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from actds_testing import harvest as h
from actds_testing import toy

OPTIONS = ("--engine", "toy", "--hooks", "resid_post:0", "--max-tokens", "4", "--executor", "ray")


def measure(address: str, scratch: Path, model: Path, n_prompts: int) -> tuple[float, float]:
    """Return CPU and wall seconds of a command that harvests so many prompts and seals."""
    records = [{"id": f"q{n}", "prompt": "all work and no play"} for n in range(n_prompts)]
    prompts = h.write_prompts(scratch / f"{n_prompts}.jsonl", records)
    began = time.monotonic()
    process = subprocess.Popen(
        h.command(scratch / f"{began}", model, prompts, *OPTIONS),
        env=h.environment(RAY_ADDRESS=address),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, said.decode()
    return used.ru_utime + used.ru_stime, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, nargs=2, default=[200, 2200])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    few, many = given.prompts
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        site, model = toy.register(scratch / "site"), toy.write_model(scratch / "toy")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(given.nodes):
                cluster.add_node(num_cpus=1)
            for _ in range(given.rounds):
                cpu, wall = zip(
                    *(measure(cluster.address, scratch, model, n) for n in (few, many)), strict=True
                )
                print(
                    json.dumps(
                        {
                            "nodes": given.nodes,
                            "prompts": given.prompts,
                            "cpu_s": [round(s, 1) for s in cpu],
                            "wall_s": [round(s, 1) for s in wall],
                            "cpu_s_per_1000_prompts": round(
                                1000 * (cpu[1] - cpu[0]) / (many - few), 2
                            ),
                        }
                    ),
                    flush=True,
                )
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
