"""Ceph of one machine: a monitor, an OSD on a file and a RADOS gateway, which speaks S3."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from actds_testing.s3_server import BUCKET, KEY

PROGRAMS = ("ceph", "ceph-mon", "monmaptool", "ceph-osd", "radosgw", "radosgw-admin", "setpriv")
START_TIMEOUT_S = 120
GATEWAY_LOG = "client.rgw.log"  # has a line for every request
# Nothing is replicated, nothing listens beyond the loopback, no key rings: a store for tests.
SETTINGS = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon}
public addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
run dir = {folder}
admin socket =
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
mon data = {folder}/$name
mon data avail crit = 1
mon allow pool size one = true
mgr data = {folder}/$name
osd data = {folder}/$name
osd objectstore = bluestore
osd memory target = 1073741824
bluestore block size = 10737418240
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd class update on start = false
rgw data = {folder}/$name
rgw frontends = beast endpoint=127.0.0.1:{gateway} tcp_nodelay=1
rgw enable usage log = false
rgw run sync thread = false
"""


def ceph_lacks() -> str | None:
    """Return which program of Ceph this machine lacks, None when it has all of them."""
    return next((name for name in PROGRAMS if shutil.which(name) is None), None)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def ceph(folder: Path) -> Iterator[int]:
    """Yield the port of a gateway with the user of ``s3_environment`` and one bucket.

    Args:
        folder: where everything is kept; up to 10 GiB, and on a disk: it is opened with O_DIRECT.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
    mon, gateway = free_port(), free_port()
    settings = folder / "ceph.conf"
    settings.write_text(SETTINGS.format(fsid=fsid, folder=folder, mon=mon, gateway=gateway))
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CEPH_ARGS")}
    common = ("-c", str(settings))

    def run(program: str, *words: str) -> str:
        done = subprocess.run(
            [program, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        )
        assert done.returncode == 0, f"{program} {words}: {done.stderr[-2000:]}"
        return done.stdout

    with ExitStack() as running:

        def start(program: str, *words: str) -> None:
            with (folder / f"{program}.out").open("wb") as said:
                process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", program, "-f", *common, *words],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
            running.callback(_end, process)

        monmap = str(folder / "monmap")
        run(
            "monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{mon}]", monmap
        )
        for name in ("mon.a", "osd.0", "client.rgw"):
            (folder / name).mkdir()
        run("ceph-mon", *common, "--mkfs", "-i", "a", "--monmap", monmap)
        start("ceph-mon", "-i", "a")
        run("ceph", *common, "--connect-timeout", str(START_TIMEOUT_S), "osd", "new", osd)
        run("ceph-osd", *common, "-i", "0", "--mkfs", "--osd-uuid", osd)
        start("ceph-osd", "-i", "0")
        user = (
            "--uid",
            "actds",
            "--display-name",
            "actds",
            "--access-key",
            KEY,
            "--secret-key",
            KEY,
        )
        run("radosgw-admin", *common, "user", "create", *user)
        start("radosgw", "-n", "client.rgw")
        _make_bucket(gateway)
        yield gateway


def _make_bucket(port: int) -> None:
    import boto3
    from botocore.exceptions import BotoCoreError

    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=KEY,
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            return
        except BotoCoreError:
            assert time.monotonic() < deadline, "the gateway does not come up"
            time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
