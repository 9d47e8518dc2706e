"""Rotation: a serving engine ends its dataset by age or size, begins another, and seals the old.

Above the run of an engine: the next one is prepared while the present one is served, so that the
scheduler only has to change over. Sealing is a process of its own: no request waits for it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

from actds.store import layout, local_folder
from actds_writers.config import LiveSettings

log = logging.getLogger("vllm.actds")
_NAME = re.compile(r"[0-9]{8}t[0-9]{6}z-r-[0-9a-f]{16}")
_NICENESS = 10


@dataclass(frozen=True)
class Rotation:
    """When a dataset ends, and where those of a server are.

    Args:
        out: folder or URI that holds the datasets.
        age_s: age from which one with rows ends.
        nbytes: size of its files from which it ends.
        n_kept: sealed datasets that stay in a local folder, ``None`` for all.
    """

    out: str
    age_s: float | None
    nbytes: int | None
    n_kept: int | None

    @classmethod
    def of(cls, settings: LiveSettings) -> Rotation | None:
        """Return that of a server, ``None`` for one dataset to its end."""
        minutes, gib = settings.rotate_minutes, settings.rotate_gib
        if minutes is None and gib is None:
            return None
        age_s = None if minutes is None else 60 * minutes
        nbytes = None if gib is None else int(gib * 2**30)
        folder = local_folder(settings.out)
        out = settings.out if folder is None else str(folder.expanduser().absolute())
        return cls(out, age_s, nbytes, settings.keep_datasets)

    def dataset(self, run: str) -> str:
        """Return where the dataset of a run is that begins now."""
        began = time.strftime("%Y%m%dt%H%M%Sz", time.gmtime())
        return f"{self.out.rstrip('/')}/{began}-{run}"

    def is_due(self, age_s: float, n_rows: int, nbytes: int) -> bool:
        """Return whether a dataset of so many committed rows and bytes has to end."""
        if not n_rows:
            return False
        is_old = self.age_s is not None and age_s >= self.age_s
        return is_old or (self.nbytes is not None and nbytes >= self.nbytes)

    def seal(self, dataset: str) -> None:
        """Seal a dataset whose run has ended, and remove the oldest ones beyond ``n_kept``."""
        command = [sys.executable, "-m", "actds", "seal", dataset]
        try:
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as ps:
                os.setpriority(os.PRIO_PROCESS, ps.pid, _NICENESS)
                words = ps.communicate()[1].decode(errors="replace").strip()
        except OSError as error:
            log.error("actds: %s is not sealed: %s", dataset, error)
            return
        if ps.returncode:
            log.error("actds: %s is not sealed: %s", dataset, words[:400])
            return
        log.info("actds: sealed %s", dataset)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        folder = local_folder(self.out)
        if folder is None or self.n_kept is None:
            return
        datasets = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
        sealed = [path for path in sorted(datasets) if (path / layout.seal_path(1)).exists()]
        for path in sealed[: -self.n_kept]:
            shutil.rmtree(path, ignore_errors=True)  # another engine may be removing it
            log.info("actds: removed %s, by keep_datasets", path)
