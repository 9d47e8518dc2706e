"""Power cuts: the dataset stands on a small file system of its own, whose device is copied live.

What a power cut leaves is what had reached the device. The device is a file behind a loop device;
what a process has written and not synced is in the page cache of the mounted file system, which
the copy does not see. The copy is of one moment: it is taken again when the device was written
meanwhile. (A disk's own cache is not modelled: every write that reaches the device is kept.)
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actds_testing.crash.harness import MAX_REQUESTS, Acknowledged, Figures, Harvest, examined

IMAGE_NBYTES = 48 << 20
COPY_ATTEMPTS = 2000
CUTS_PER_HARVEST = 4
OPTIONS = "commit=600,noatime"
"""Nothing is written back by the clock: what is not synced stays in memory."""


def why_not() -> str | None:
    """Return why power cannot be cut here, ``None`` when it can."""
    if os.geteuid() != 0:
        return "mounting an image needs root"
    for tool in ("mkfs.ext4", "losetup", "mount", "umount"):
        if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin") is None:
            return f"{tool} is not installed"
    with tempfile.TemporaryDirectory(dir=folder()) as work:
        try:
            image = make_image(Path(work) / "probe.img")
            with mounted(image, Path(work) / "mnt"):
                return None
        except (subprocess.CalledProcessError, OSError) as error:
            return f"no image can be mounted: {error}"


def folder() -> Path:
    """Return where images are kept: in memory if possible, so that a copy takes no time."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def run(*command: str) -> str:
    """Run a system tool and return what it says."""
    path = f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin"
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    return done.stdout.strip()


def make_image(path: Path) -> Path:
    """Make a file with an empty ext4 file system."""
    with open(path, "wb") as file:
        file.truncate(IMAGE_NBYTES)
    run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-J", "size=4",
        str(path))  # fmt: skip
    return path


@contextmanager
def mounted(image: Path, where: Path) -> Iterator[str]:
    """Mount an image; yields the loop device. Unmounts and detaches whatever happens."""
    where.mkdir(exist_ok=True)
    device = run("losetup", "--find", "--show", str(image))
    try:
        run("mount", "-t", "ext4", "-o", OPTIONS, device, str(where))
        try:
            yield device
        finally:
            unmount(where)
    finally:
        run("losetup", "--detach", device)


def unmount(where: Path) -> None:
    """Unmount; processes that were just killed may hold it for a moment."""
    for _ in range(100):
        try:
            run("umount", str(where))
            return
        except subprocess.CalledProcessError:
            time.sleep(0.05)
    run("umount", "--lazy", str(where))


def copy_of_one_moment(image: Path, device: str, target: Path) -> bool:
    """Copy a live image; return whether nothing was written to it meanwhile."""
    for _ in range(COPY_ATTEMPTS):
        before = writes(device)
        if before is None:
            time.sleep(0.0005)
            continue
        copy_sparse(image, target)
        if writes(device) == before:
            return True
    return False


def copy_sparse(image: Path, target: Path) -> None:
    """Copy the parts of a file that hold data."""
    with open(image, "rb") as source, open(target, "wb") as copy:
        copy.truncate(IMAGE_NBYTES)
        offset = 0
        while True:
            try:
                offset = os.lseek(source.fileno(), offset, os.SEEK_DATA)
            except OSError:
                return  # no data behind
            end = os.lseek(source.fileno(), offset, os.SEEK_HOLE)
            os.pwrite(copy.fileno(), os.pread(source.fileno(), end - offset, offset), offset)
            offset = end


def writes(device: str) -> int | None:
    """Return how many writes a device has completed, ``None`` while one is under way."""
    fields = (Path("/sys/block") / Path(device).name / "stat").read_text().split()
    return int(fields[4]) if fields[8] == "0" else None


def power_round(
    work: Path, number: int, rng: random.Random, figures: Figures, *, synced: bool = True
) -> None:
    """One harvest whose power is cut several times: each cut is a copy, recovered and examined."""
    base = work / f"power-{number}"
    base.mkdir()
    image = make_image(base / "live.img")
    cuts: list[tuple[Path, list[Acknowledged]]] = []
    with mounted(image, base / "mnt") as device:
        harvest = Harvest(base / "mnt" / "acts", "block", MAX_REQUESTS, synced=synced)
        try:
            for cut in range(CUTS_PER_HARVEST):
                n_more = len(harvest.hear()) + rng.choice((0, 1, 1, 2, 3))
                deadline = time.monotonic() + 30
                while len(harvest.hear()) < n_more and time.monotonic() < deadline:
                    time.sleep(0.001)
                time.sleep(rng.random() * 0.03)
                noted = harvest.hear()
                if copy_of_one_moment(image, device, base / f"cut-{cut}.img"):
                    cuts.append((base / f"cut-{cut}.img", noted))
        finally:
            harvest.kill(("producer", "writer", "census"))
            harvest.join()
    for path, noted in cuts:
        with mounted(path, base / "mnt"):
            found = examined(base / "mnt" / "acts", noted)
        found["faults"] = [f"{path.name} of {number}: {fault}" for fault in found["faults"]]
        figures.add(noted, found)
    shutil.rmtree(base, ignore_errors=True)
