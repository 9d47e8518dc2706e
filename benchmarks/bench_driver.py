"""CPU of the command that drives a harvest on a Ray cluster, for each prompt.

    python benchmarks/bench_driver.py --sizes 1000 9000 --nodes 2

Reading and encoding prompts, handing them out, hearing the engines, and the seal. The engines are
a stand-in without a model (``actds_testing.toy``), on Ray's own cluster of this machine. What is
the same for every size (imports, Ray, the start) drops out of the difference of the two sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from actds_testing import harvest, toy

OPTIONS = ("--engine", "toy", "--hooks", "resid_post:0", "--max-tokens", "2", "--executor", "ray")
ENGINE = ("--engine-arg", "max_num_seqs=64", "--engine-arg", "step_s=0")


def measure(address: str, folder: Path, model: Path, n: int) -> dict[str, Any]:
    """Return CPU and wall seconds of a harvest of ``n`` prompts."""
    records = [{"id": f"q{i}", "prompt": f"{i} and no play"} for i in range(n)]
    prompts = harvest.write_prompts(folder / f"{n}.jsonl", records)
    began = time.perf_counter()
    command = subprocess.Popen(
        harvest.command(folder / f"acts-{n}", model, prompts, *OPTIONS, *ENGINE),
        env=harvest.environment(RAY_ADDRESS=address),
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(command.pid, 0)
    if status:
        raise SystemExit(f"a harvest of {n} prompts ended with {status}")
    wall_s = time.perf_counter() - began
    return {"prompts": n, "cpu_s": used.ru_utime + used.ru_stime, "wall_s": wall_s}


def main() -> None:
    from ray.cluster_utils import Cluster

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs=2, default=(1000, 9000))
    parser.add_argument("--nodes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "site").mkdir()
        site = toy.register(folder / "site")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        sys.path.insert(0, str(site))
        model = toy.write_model(folder / "toy")
        head = {"num_cpus": 0, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(options.nodes):
                cluster.add_node(num_cpus=1)
            small, large = (measure(cluster.address, folder, model, n) for n in options.sizes)
        finally:
            cluster.shutdown()
    n = large["prompts"] - small["prompts"]
    each = (large["cpu_s"] - small["cpu_s"]) / n
    print(json.dumps({"runs": [small, large], "cpu_s_per_prompt": each}, indent=2))


if __name__ == "__main__":
    main()
