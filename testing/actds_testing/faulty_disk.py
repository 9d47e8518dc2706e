"""A disk that misbehaves on demand: slow, stalled, full or failing, for files below one folder.

The faults are put between a process and the kernel's file calls by a library that is compiled
here and preloaded (``faulty_disk.c``). A page of shared memory tells it what to do; what the test
writes there counts from the next call on, and what the library counts can be read there.
Processes that are started inside ``with disk.injected():`` have it, nobody else.
"""

from __future__ import annotations

import functools
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
FIELDS = ("rate", "stalled", "space", "fail_write", "fail_sync", "n_waiting", "n_bytes", "n_writes",
          "n_syncs", "n_failed", "free_at_ns", "n_links", "fail_close")  # fmt: skip
ONLY, ONLY_NBYTES = 256, 64
ENDLESS = -1
FLAGS = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror")
PATIENCE_S = 120.0


def unavailable() -> str | None:
    """Return why faults cannot be injected on this machine, ``None`` where they can."""
    if not sys.platform.startswith("linux"):
        return "faults are injected through the preloading of Linux"
    return None if compiler() else "no C compiler to build the fault injection with"


def compiler() -> str | None:
    """Return a C compiler, ``None`` where there is none."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@functools.cache
def library() -> Path:
    """Return the compiled library; it is built once in a process."""
    out = Path(tempfile.mkdtemp(prefix="faulty-disk-")) / "faulty_disk.so"
    built = subprocess.run(
        [str(compiler()), *FLAGS, "-o", str(out), str(SOURCE), "-ldl"],
        capture_output=True,
        text=True,
    )
    if built.returncode:
        raise RuntimeError(f"the fault injection does not compile:\n{built.stderr}")
    return out


class FaultyDisk:
    """The files below a folder, as processes with the library see them.

    Args:
        folder: the folder; it need not exist yet.
        control: file of the control page, made here; it must lie elsewhere.
    """

    def __init__(self, folder: Path, control: Path) -> None:
        self.folder = Path(os.path.realpath(folder))
        self._control = control
        control.write_bytes(bytes(mmap.PAGESIZE))
        with control.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._set("space", ENDLESS)

    def environment(self) -> dict[str, str]:
        """Return the variables that give a process this disk."""
        loaded = os.environ.get("LD_PRELOAD", "")
        return {
            "LD_PRELOAD": f"{library()}:{loaded}" if loaded else str(library()),
            "FAULTY_DISK_CONTROL": str(self._control),
            "FAULTY_DISK_FOLDER": str(self.folder),
        }

    @contextmanager
    def injected(self) -> Iterator[None]:
        """Give the disk to every process that is started meanwhile."""
        added = self.environment()
        before = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def throttle(self, bytes_per_s: int) -> None:
        """Let the disk take so many bytes a second; 0 for as many as come."""
        self._set("rate", bytes_per_s)

    def stall(self) -> None:
        """Let every call wait from now on."""
        self._set("stalled", 1)

    def release(self) -> None:
        """End a stall."""
        self._set("stalled", 0)

    def fill(self, nbytes_left: int) -> None:
        """Let the disk be full after so many more bytes."""
        self._set("space", nbytes_left)

    def make_room(self) -> None:
        """Let the disk be endless again."""
        self._set("space", ENDLESS)

    def only(self, text: str) -> None:
        """Let stalls and errors strike paths that hold this text; an empty one for all."""
        self._page[ONLY : ONLY + ONLY_NBYTES] = text.encode().ljust(ONLY_NBYTES, b"\0")

    def fail_write(self, k: int) -> None:
        """Let the k-th write from now fail with EIO, and none after it."""
        self._set("fail_write", k)

    def fail_sync(self, k: int) -> None:
        """Let the k-th fsync from now fail with EIO, and none after it."""
        self._set("fail_sync", k)

    def fail_close(self, k: int) -> None:
        """Let the k-th close of a file from now report EIO, and none after it."""
        self._set("fail_close", k)

    def read(self, name: str) -> int:
        """Return a field: ``n_waiting``, ``n_bytes``, ``n_writes``, ``n_syncs``, ..."""
        return int(struct.unpack_from("<q", self._page, 8 * FIELDS.index(name))[0])

    def _set(self, name: str, value: int) -> None:
        struct.pack_into("<q", self._page, 8 * FIELDS.index(name), value)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must come; fail loudly when it does not.

    Raises:
        TimeoutError: it did not come.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited in vain for {what}")
        time.sleep(0.005)
