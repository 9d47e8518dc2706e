"""Attacks of ``spec/0.1/attacks``: built as its README says, and judged in a process of their own.

A process per attack, so that one that kills its validator is a result like any other, and so that
time and memory are those of that attack alone.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actds_testing.places import ATTACKS, VECTORS
from actds_validators.validate.validation import validate

__all__ = ["Attack", "Outcome", "attacks", "judge", "refused", "unpack"]

TIMEOUT_S = 60
"""Far above what any of them takes: past it, the validator hangs."""


@dataclass(frozen=True)
class Attack:
    """One attack as its folder says it; fields as the keys of ``expect.json``."""

    folder: Path
    base: str
    remove: list[str]
    links: dict[str, str]
    folders: list[str]
    group: str
    what: str
    code: str
    place: str
    level: str
    also: list[str]
    severity: str

    @property
    def name(self) -> str:
        """Return its folder below ``spec/0.1/attacks``."""
        return f"{self.folder.parent.name}/{self.folder.name}"


@dataclass(frozen=True)
class Outcome:
    """What became of an attack.

    Args:
        findings: code, place and severity of each finding.
        exit_code: what ``actds validate`` would return; None when it did not get there.
        error: the traceback of an exception that nobody expected, or how the process died.
        duration_s: CPU time of the validation.
        peak_nbytes: memory at its peak, above what the imports hold.
    """

    findings: list[tuple[str, str, str]]
    exit_code: int | None
    error: str | None
    duration_s: float
    peak_nbytes: int


def attacks() -> list[Attack]:
    """Return every attack, by family and name."""
    found = sorted(ATTACKS.glob("*/*/expect.json"))
    return [Attack(path.parent, **json.loads(path.read_text("utf-8"))) for path in found]


def unpack(attack: Attack, out: Path) -> Path:
    """Build the dataset of an attack, and return its folder."""
    shutil.copytree(VECTORS / attack.base, out)
    for path in attack.remove:
        (out / path).unlink()
        for folder in (out / path).parents:
            if folder == out or any(folder.iterdir()):
                break
            folder.rmdir()
    if (attack.folder / "files").is_dir():
        shutil.copytree(attack.folder / "files", out, dirs_exist_ok=True)
    for path in attack.folders:
        (out / path).mkdir(parents=True)
    for path, target in attack.links.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).symlink_to(target)
    return out


def judge(dataset: Path, level: str) -> Outcome:
    """Return what ``actds validate`` says of a dataset, from a process that only does that."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w", encoding="utf-8") as out:
            json.dump(_judged(dataset, level), out)
        os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + TIMEOUT_S
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.002)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    with os.fdopen(reading, encoding="utf-8") as said:
        text = said.read()
    if os.waitstatus_to_exitcode(ended[1]) or not text:
        died = f"the process ended with {os.waitstatus_to_exitcode(ended[1])}"
        return Outcome([], None, died, 0.0, 0)
    fields = json.loads(text)
    return Outcome(**{**fields, "findings": [tuple(one) for one in fields["findings"]]})


def _judged(dataset: Path, level: str) -> dict[str, Any]:
    validate(VECTORS / "valid" / "minimal", "deep")  # imports what is imported when it is needed
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the peak begins anew
    before, began = _memory("VmRSS"), resource.getrusage(resource.RUSAGE_SELF)
    findings: list[tuple[str, str, str]] = []
    exit_code, error = None, None
    try:
        found = validate(dataset, level)  # type: ignore[arg-type]
        findings = [(one.code, one.place, one.severity) for one in found.findings]
        exit_code = found.exit_code()
    except BaseException:
        error = traceback.format_exc()
    ended = resource.getrusage(resource.RUSAGE_SELF)
    took = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    return asdict(Outcome(findings, exit_code, error, took, _memory("VmHWM") - before))


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name}")


def refused(attack: Attack, outcome: Outcome) -> Iterator[str]:
    """Yield what is wrong with an outcome: nothing for an attack that was refused as it should."""
    if outcome.error is not None:
        yield outcome.error
    found = {code for code, _, _ in outcome.findings}
    if attack.code not in found:
        yield f"{attack.name}: found {sorted(found)}, and not {attack.code}"
    elif not any(
        (code, severity) == (attack.code, attack.severity) and place.startswith(attack.place)
        for code, place, severity in outcome.findings
    ):
        places = [place for code, place, _ in outcome.findings if code == attack.code]
        yield f"{attack.name}: {attack.code} at {places}, and not at {attack.place}"
    if found - {attack.code, *attack.also}:
        yield f"{attack.name}: also {sorted(found - {attack.code, *attack.also})}"
    if outcome.exit_code not in ((1, 3) if attack.severity == "error" else (0,)):
        yield f"{attack.name}: exit code {outcome.exit_code}"
