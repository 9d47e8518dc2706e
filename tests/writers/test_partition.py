"""A machine that is cut off from the store while another one takes its part over.

The machine is a set of namespaces: network, process ids and host name of its own, with a veth pair
to the server. The cable is cut by sending its packets to an address that no card has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import actds
from actds.cli import cli
from actds.dataset.ledger import read_ledger
from actds.dataset.reading import read_catalog, read_genesis
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing import toy
from actds_testing.s3_server import BUCKET, s3_environment, s3_server
from actds_writers.harvest.prepare import finished_of

pytestmark = pytest.mark.full
SPACE, SERVER, CLIENT = "actds-cut", "10.231.77.1", "10.231.77.2"
NOBODY = "02:00:00:00:00:99"
N_PROMPTS = 48
PROMPTS = [{"id": f"q{n}", "prompt": "all work and no play makes a dull toy"[: 2 + n % 30]}
           for n in range(N_PROMPTS)]  # fmt: skip
OPTIONS = ("--engine", "toy", "--hooks", "resid_post:0", "--max-tokens", "4", "--rows-per-shard",
           "8", "--engine-arg", "max_num_seqs=2", "--engine-arg")  # fmt: skip
PART = ("--part", "1/2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def link() -> Iterator[str]:
    """Yield the device of the other machine, connected to this one; skip where it cannot be."""
    if shutil.which("ip") is None or shutil.which("unshare") is None or os.geteuid():
        pytest.skip("network namespaces need root, ip and unshare")
    try:
        ip("netns", "add", SPACE)
        ip("link", "add", "actds-a", "type", "veth", "peer", "name", "actds-b", "netns", SPACE)
        ip("addr", "add", f"{SERVER}/30", "dev", "actds-a")
        ip("-n", SPACE, "addr", "add", f"{CLIENT}/30", "dev", "actds-b")
        for words in (
            ("link", "set", "actds-a", "up"),
            ("-n", SPACE, "link", "set", "actds-b", "up"),
            ("-n", SPACE, "link", "set", "lo", "up"),
        ):
            ip(*words)
        yield "actds-b"
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be connected here: {error.stderr!r}")
    finally:
        subprocess.run(["ip", "netns", "del", SPACE], capture_output=True)


def cut(device: str) -> None:
    words = ("neigh", "replace", SERVER, "lladdr", NOBODY, "dev", device, "nud", "permanent")
    ip("-n", SPACE, *words)


def mend(device: str) -> None:
    ip("-n", SPACE, "neigh", "del", SERVER, "dev", device)


def elsewhere(command: list[str]) -> list[str]:
    spaces = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    named = ["sh", "-c", 'hostname elsewhere; exec "$@"', "sh"]
    return ["ip", "netns", "exec", SPACE, *spaces, *named, *command]


def await_shards(out: str, n_shards: int) -> str:
    """Wait until a run has committed so many shards; return its id."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        store = open_store(out)
        if store.exists("actds.json"):
            for state in read_ledger(store, read_genesis(store).dataset).values():
                if sum(record.type == "shard" for record in state.records) >= n_shards:
                    return state.run
        time.sleep(0.5)
    raise AssertionError("nothing is committed")


def test_a_machine_that_was_cut_off_ends_at_the_fence_and_nothing_is_there_twice(
    link: str, tmp_path: Path
) -> None:
    site, model = toy.register(tmp_path / "site"), toy.write_model(tmp_path / "toy")
    prompts = h.write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    out = f"s3://{BUCKET}/cut/acts"
    with pytest.MonkeyPatch.context() as patch, s3_server(SERVER) as port:
        s3_environment(patch, port, SERVER)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
        first = subprocess.Popen(
            elsewhere(h.command(out, model, prompts, *OPTIONS, "step_s=1.5", *PART)),
            env=h.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            run = await_shards(out, 2)
            cut(link)
            began = time.monotonic()
            second = h.run(out, model, prompts, *OPTIONS, "step_s=0", *PART, "--resume")
            assert second.returncode == 0, second.stderr
            seconds = time.monotonic() - began
            assert seconds > 60, "it was not watched for a minute"
            assert first.poll() is None, "it ended before the link was there again"
            mend(link)
            said, _ = first.communicate(timeout=300)
        finally:
            first.kill()
        print(f"cut off for {seconds:.0f} s; then, after {time.monotonic() - began:.0f} s:\n{said}")
        assert first.returncode and "E308" in said, said
        done = h.run(out, model, prompts, *OPTIONS, "step_s=0", "--part", "2/2")
        assert done.returncode == 0, done.stderr
        sealed = CliRunner().invoke(cli, ["seal", out])
        assert sealed.exit_code == 0 and "missing" not in sealed.output, sealed.output
        dataset = h.validated(out)
        chains = read_catalog(open_store(out)).chains.values()
        # Closed is that of who took it over.
        of_run = [(state.kind, state.state) for state in chains if state.run == run]
        assert {("writer", "fenced"), ("census", "fenced")} <= {*of_run}
        served = Counter(p for r in dataset.runs for p in finished_of(dataset.catalog, r))
        assert served == Counter(range(N_PROMPTS)) and len(dataset.runs) == 3
        assert actds.open(out).catalog.is_sealed
