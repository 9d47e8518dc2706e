"""Validation: the gate before training. Every check that a level asks for, and what they found.

Ledger and files are checked here: no other files than are named, arrays of the one form, every byte
as committed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from actds import __version__, layout
from actds.accounting.account import TOTALS
from actds.errors import ActdsError, CheckName, Finding
from actds.executor import ExecutorName, open_executor
from actds.format import arrays
from actds.reading import Catalog, read_dataset
from actds.schema import ShardManifest
from actds.sealing import check_provenance
from actds.store import Store, file_sha256, open_store
from actds_validators.validate.accounting import RunAccount, check_accounting, check_canary
from actds_validators.validate.values import RunReadouts, check_readouts, check_values

Level = Literal["quick", "standard", "full", "deep"]
State = Literal["passed", "failed", "skipped"]
Progress = Callable[[str, int], None]

LEVELS: tuple[Level, ...] = ("quick", "standard", "full", "deep")
CHECKS: dict[CheckName, Level] = {
    "ledger": "quick",
    "structure": "quick",
    "integrity": "quick",
    "provenance": "quick",
    "accounting": "standard",
    "values": "deep",
}
"""Every check and the lowest level that runs it; integrity grows with the level."""

MAX_UNREACHABLE = 20
_INTEGRITY = {
    "quick": "sizes of all files, digests of documents",
    "standard": "sizes of all files, digests of documents and tables",
    "full": "digests of all files",
    "deep": "digests of all files, checksums of all chunks",
}


@dataclass(frozen=True)
class Check:
    """One check: what it looked at, and whether it passed."""

    name: CheckName
    state: State
    detail: str


@dataclass(frozen=True)
class Validation:
    """What ``actds validate`` says.

    Args:
        path: the dataset's path as it was given.
        level: how much was checked.
        dataset: its id; None when ``actds.json`` cannot be read.
        seal: number of the seal that covers the whole ledger, if there is one.
        digest: digest of that seal, which names the dataset's content.
        checks: every check, in order.
        findings: everything found, errors first.
        runs: totals by run; empty below level ``standard``.
        duration_s: how long it took.
    """

    path: str
    level: Level
    dataset: str | None
    seal: int | None
    digest: str | None
    checks: list[Check]
    findings: list[Finding]
    runs: dict[str, dict[str, int]]
    duration_s: float

    @property
    def errors(self) -> list[Finding]:
        """Return the findings that fail the validation."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """Return the findings that fail it only when asked to be strict."""
        return [finding for finding in self.findings if finding.severity == "warning"]

    @property
    def totals(self) -> dict[str, int]:
        """Return the totals over all runs; empty below level ``standard``."""
        if not self.runs:
            return {}
        return {name: sum(run[name] for run in self.runs.values()) for name in TOTALS}

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 0 clean, 1 findings, 3 not readable as a dataset.

        Args:
            strict: count warnings as findings.
        """
        if self.dataset is None:
            return 3
        return int(bool(self.errors or (strict and self.warnings)))

    def as_json(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the validation as ``actds validate --json`` prints it."""
        return {
            "actds": __version__,
            "path": self.path,
            "dataset": self.dataset,
            "level": self.level,
            "strict": strict,
            "ok": self.exit_code(strict=strict) == 0,
            "exit_code": self.exit_code(strict=strict),
            "sealed": self.seal is not None,
            "seal": self.seal,
            "digest": self.digest,
            "checks": [
                {"name": check.name, "state": check.state, "detail": check.detail}
                for check in self.checks
            ],
            "findings": [finding.as_json() for finding in self.findings],
            "runs": self.runs,
            "totals": self.totals,
            "duration_s": round(self.duration_s, 3),
        }


def validate(
    path: str | Path | Store,
    level: Level = "full",
    progress: Progress = lambda what, amount: None,
    executor: ExecutorName = "threads",
) -> Validation:
    """Check a dataset against the spec and return everything that was found.

    ``quick`` reads the ledger, the documents and the sizes of all files. ``standard`` reads the
    tables as well and accounts for every position. ``full`` reads and hashes every byte. ``deep``
    decodes every chunk and looks at the values. ``full`` is the default: it is the lowest level
    that would notice changed activations, and a gate that lets those through is none.

    A file is hashed before it is parsed, and one whose digest differs is not parsed at all.

    Args:
        path: the dataset.
        level: how much to check.
        progress: called with what is done (``bytes``, ``rows``, ``values``) and how much of it.
        executor: where the files are hashed: ``threads`` or ``processes`` of this machine, or
            ``ray``.

    Spec: 0.1 section 12.
    """
    began = time.monotonic()
    store = open_store(path)
    try:
        catalog = read_dataset(store)
    except ActdsError as error:
        return _unreadable(store, level, error, began)
    _check_ledger(catalog)
    _check_structure(catalog)
    check_provenance(catalog, catalog.findings)
    if level in ("full", "deep"):
        _check_digests(catalog, lambda amount: progress("bytes", amount), executor)
        _check_indexes(catalog)
    accounts: list[RunAccount] = []
    readouts: dict[str, RunReadouts] = {}
    if level != "quick":
        accounts = check_accounting(catalog, lambda amount: progress("rows", amount))
        check_canary(catalog)
        readouts = check_readouts(catalog, values=level == "deep")
    if level == "deep":
        check_values(catalog, lambda amount: progress("values", amount), readouts)
    return _result(catalog, level, accounts, began)


def _check_ledger(catalog: Catalog) -> None:
    """Check that the ledger is complete: every chain ended, a seal over all; notes E305, E306.

    Spec: 0.1 sections 8.2 and 8.4.
    """
    for name, state in catalog.chains.items():
        if state.state == "open":
            got = f"an open {state.kind} chain of run {state.run}"
            catalog.findings.add("ledger", "E305", f"ledger/{name}", got, "a close or a fence")
    if not catalog.chains:
        expected = "at least one, closed and sealed"
        catalog.findings.add("ledger", "E306", "ledger", "no chain", expected)
    elif not catalog.is_sealed:
        got = "seals that leave chains out" if catalog.seals else "no seal"
        catalog.findings.add("ledger", "E306", "seal", got, "a seal over every chain")


def _check_structure(catalog: Catalog) -> None:
    """Check the files of the dataset and the metadata of its arrays.

    Notes E105, E107, E108, E203; missing files and sizes are noted where the ledger is read.

    Spec: 0.1 sections 2, 4 and 5.
    """
    _check_unreachable(catalog)
    for manifest in catalog.shards:
        _check_group(catalog, manifest)
        for hook in manifest.hooks:
            with catalog.findings.noting("structure"):
                _check_array(catalog, manifest, hook)


def _check_unreachable(catalog: Catalog) -> None:
    """Note files that nothing reaches, and links wherever they stand.

    A stray file beside the data is a leftover, for example of a writer that was killed before its
    commit; inside the folder of a committed shard a generic zarr reader would take it for data.
    """
    known = catalog.reached | {layout.GENESIS, *layout.DERIVED}
    committed = {layout.shard_dir(manifest.shard) for manifest in catalog.shards}
    stray: list[str] = []
    for path in catalog.store.list():
        if path in known:
            continue
        shown = path.encode("unicode_escape").decode("ascii")
        folder = "/".join(path.split("/")[:2])
        if _is_link(catalog, path):
            catalog.findings.add("structure", "E107", shown, "a link", "regular files only")
        elif folder in catalog.opaque:
            continue  # its document is the finding; what it would name is not known
        elif folder in committed:
            catalog.findings.add(
                "structure", "E105", shown, "a file", "no file: the manifest lacks it"
            )
        else:
            stray.append(shown)
    for shown in stray[:MAX_UNREACHABLE]:
        catalog.findings.add(
            "structure", "E105", shown, "a file", "no file: nothing names it", "warning"
        )
    if len(stray) > MAX_UNREACHABLE:
        more = f"{len(stray) - MAX_UNREACHABLE} further files"
        catalog.findings.add("structure", "E105", ".", more, "none: nothing names them", "warning")


def _is_link(catalog: Catalog, path: str) -> bool:
    uri = catalog.store.uri
    try:
        return stat.S_ISLNK((Path(uri) / path).lstat().st_mode)
    except OSError:
        return False  # gone meanwhile: no link, and told as unreachable


def _check_group(catalog: Catalog, manifest: ShardManifest) -> None:
    path = f"{layout.shard_dir(manifest.shard)}/acts.zarr/zarr.json"
    if path in catalog.unsound:
        return
    with catalog.findings.noting("integrity"):
        if catalog.file(path) != arrays.group_metadata():
            catalog.findings.add(
                "structure", "E108", path, "other metadata", "the fixed group metadata"
            )


def _check_array(catalog: Catalog, manifest: ShardManifest, hook: str) -> None:
    path = f"{layout.shard_dir(manifest.shard)}/{layout.array_dir(hook)}/zarr.json"
    if path in catalog.unsound:
        return
    try:
        data = catalog.file(path)
    except ActdsError as error:
        catalog.unsound.add(path)
        catalog.findings.take("integrity", error)
        return
    shape = arrays.parse_metadata(data, path)
    told = next(entry for entry in catalog.genesis.hooks if entry.name == hook)
    got, expected = (shape.dtype.name, shape.d_model), (told.dtype, told.d_model)
    if got != expected:
        catalog.findings.add(
            "structure",
            "E108",
            path,
            f"{got[0]} of {got[1]} channels",
            f"{expected[0]} of {expected[1]}, as in {layout.GENESIS}",
        )
    if shape.n_rows != manifest.n_rows:
        catalog.findings.add(
            "integrity", "E203", path, f"{shape.n_rows} rows", f"{manifest.n_rows}, as the manifest"
        )


@dataclass(frozen=True)
class _Digest:
    """The digest of a file, or the error that there was instead."""

    sha256: str
    error: ActdsError | None = None


def _check_digests(
    catalog: Catalog, progress: Callable[[int], None], executor: ExecutorName
) -> None:
    """Check the SHA-256 of every pinned file; what differs is not parsed afterwards.

    Args:
        catalog: the dataset; notes E202, and E104 for what cannot be read.
        progress: called with the bytes of each file that is done.
        executor: where the files are read.

    Spec: 0.1 section 2.3.
    """
    paths = sorted(set(catalog.files) - catalog.unsound)

    n_workers = max(min(8, os.cpu_count() or 1), catalog.store.n_readers)
    with open_executor(executor, n_workers if executor == "threads" else None) as on:
        digests = on.map(partial(_digest, catalog.store), paths)
        for path, got in zip(paths, digests, strict=True):
            entry = catalog.files[path]
            progress(entry.nbytes)
            error = got.error
            if error is not None:
                catalog.findings.add("integrity", error.code, path, error.got, error.expected)
            elif got.sha256 != entry.sha256:
                found = f"sha256 {got.sha256}"
                catalog.findings.add("integrity", "E202", path, found, entry.sha256)
            else:
                continue
            catalog.unsound.add(path)


def _digest(store: Store, path: str) -> _Digest:
    """Return the digest of a file, or why it has none."""
    try:
        return _Digest(file_sha256(store, path))
    except ActdsError as error:
        return _Digest("", error)
    except (OSError, EOFError) as error:
        got = getattr(error, "strerror", None) or str(error)
        return _Digest("", ActdsError("E104", path, got=got, expected="a readable file"))


def _check_indexes(catalog: Catalog) -> None:
    """Check that the index of every array names whole chunks inside its file; notes E204.

    Spec: 0.1 section 4.
    """
    for manifest in catalog.shards:
        for hook in manifest.hooks:
            folder = f"{layout.shard_dir(manifest.shard)}/{layout.array_dir(hook)}"
            paths = [f"{folder}/zarr.json", f"{folder}/{arrays.SHARD_PATH}"]
            if catalog.unsound & set(paths):
                continue
            try:
                file = catalog.store.open_file(paths[1])
                arrays.ArrayReader(catalog.file(paths[0]), file, paths[1]).close()
            except ActdsError as error:
                catalog.unsound.add(paths[1])
                if error.code != "E108":  # told by the check of structure
                    catalog.findings.take("integrity", error)


def _unreadable(store: Store, level: Level, error: ActdsError, began: float) -> Validation:
    name: CheckName = "structure"
    checks = [Check(check, "failed" if check == name else "skipped", "") for check in CHECKS]
    finding = Finding.from_error(error)
    took = time.monotonic() - began
    return Validation(store.uri, level, None, None, None, checks, [finding], {}, took)


def _result(catalog: Catalog, level: Level, accounts: list[RunAccount], began: float) -> Validation:
    order = {"error": 0, "warning": 1, "note": 2}
    found = [finding for _, finding in catalog.findings]
    findings = sorted(
        dict.fromkeys(found), key=lambda finding: (order[finding.severity], finding.code)
    )
    seal = catalog.seal if catalog.is_sealed else None
    return Validation(
        path=catalog.store.uri,
        level=level,
        dataset=catalog.genesis.dataset,
        seal=seal.n if seal else None,
        digest=catalog.seal_sha256 if seal else None,
        checks=[_check(catalog, name, level, accounts) for name in CHECKS],
        findings=findings,
        runs={one.run: one.account.totals for one in accounts},
        duration_s=time.monotonic() - began,
    )


def _check(catalog: Catalog, name: CheckName, level: Level, accounts: list[RunAccount]) -> Check:
    if LEVELS.index(CHECKS[name]) > LEVELS.index(level):
        return Check(name, "skipped", f"level {CHECKS[name]} runs it")
    failed = any(
        check == name and finding.severity == "error" for check, finding in catalog.findings
    )
    unjudged = name == "accounting" and any(not one.complete for one in accounts)
    state: State = "failed" if failed or unjudged else "passed"
    return Check(name, state, _detail(catalog, name, level, accounts))


def _detail(catalog: Catalog, name: CheckName, level: Level, accounts: list[RunAccount]) -> str:
    """Return what a check looked at, in a few words."""
    match name:
        case "ledger":
            n_records = sum(len(chain.records) for chain in catalog.chains.values())
            return f"chains {len(catalog.chains)}, records {n_records}, seals {len(catalog.seals)}"
        case "structure":
            n_hooks = len(catalog.genesis.hooks)
            return f"shards {len(catalog.shards)}, hooks {n_hooks}, files {len(catalog.files)}"
        case "integrity":
            return _INTEGRITY[level]
        case "provenance":
            return f"run records {len(catalog.runs)}"
        case "accounting":
            return _accounted(catalog, accounts)
        case "values":
            return "every row of every hook decoded"


def _accounted(catalog: Catalog, accounts: list[RunAccount]) -> str:
    judged = [one for one in accounts if one.complete]
    rows = sum(one.account.totals["rows"] for one in judged)
    runs = catalog.runs_with_data
    text = f"runs {len(judged)} of {len(runs)}, rows {rows:,} against the census"
    return text if len(judged) == len(runs) else f"{text}; the others cannot be read"
