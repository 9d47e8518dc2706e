"""Paths and names of the files of a dataset."""

from __future__ import annotations

import re
import secrets

from actds.errors import ActdsError

GENESIS = "actds.json"
CARD = "README.md"
CROISSANT = "croissant.json"
DERIVED = (CARD, CROISSANT)
"""The card: made from the dataset, replaced at the next seal, and read by no reader."""
SUMS = "SHA256SUMS"
BESIDE = (*DERIVED, SUMS)
"""What follows from the dataset and is no part of it."""
_OF_THE_HUB = (".gitattributes", ".git", ".cache")
_SEGMENT = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def segment(text: str, place: str) -> str:
    """Return a path segment unchanged when it keeps the naming rule.

    Raises:
        ActdsError: E107 otherwise.

    Spec: 0.1 section 2.1.
    """
    if not _SEGMENT.fullmatch(text):
        raise ActdsError("E107", place, got=repr(text)[:80], expected="[a-z0-9][a-z0-9._-]{0,63}")
    return text


def is_of_the_hub(path: str) -> bool:
    """Return whether a copy from the Hub, by git or its client, brings such a file along."""
    return path.partition("/")[0] in _OF_THE_HUB


def new_id(kind: str) -> str:
    """Return a random id such as ``r-0123456789abcdef``.

    Kinds: ``r`` a run, ``w`` a writer chain, ``c`` a census chain, ``t`` a tool chain.
    """
    return f"{kind}-{secrets.token_hex(8)}"


def run_path(run: str) -> str:
    """Return the path of a run record."""
    return f"runs/{run}.json"


def shard_dir(shard: str) -> str:
    """Return the folder of a shard."""
    return f"shards/{shard}"


def manifest_path(shard: str) -> str:
    """Return the path of a shard's manifest."""
    return f"shards/{shard}/shard.json"


def shard_of(path: str) -> str | None:
    """Return the shard whose manifest is at a path, None where another file is."""
    folder, _, name = path.rpartition("/")
    top, _, shard = folder.partition("/")
    return shard if (top, name) == ("shards", "shard.json") and "/" not in shard else None


def committed_path(path: str) -> str:
    """Return the path by which a record commits a file: of a shard's file that of its manifest."""
    return manifest_path(path.split("/")[1]) if path.startswith("shards/") else path


def array_dir(hook: str) -> str:
    """Return the folder of a hook's array, relative to the shard folder."""
    return f"acts.zarr/{hook}"


_CENSUS = ("requests", "steps", "spans", "roles", "origins", "sampled")
_TABLES = {
    **dict.fromkeys(_CENSUS, ("census", "census")),
    **dict.fromkeys(("drops", "stalls", "occupancy"), ("losses", "writer")),
    **dict.fromkeys(("readouts", "alerts", "attention"), ("readouts", "writer")),
    "canary": ("canary", "tool"),
}


def chain_kind_of(table: str) -> str:
    """Return which kind of chain commits the parts of a table."""
    return _TABLES[table][1]


def part_path(table: str, run: str, n: int) -> str:
    """Return the path of a table part; census and writer have folders of their own."""
    return f"{_TABLES[table][0]}/{run}/{table}-{n:06d}.parquet"


def is_part_path(path: str, table: str, run: str) -> bool:
    """Return whether a path is that of a part, of any number, of a table of a run."""
    stem = part_path(table, run, 0).removesuffix("000000.parquet")
    return re.fullmatch(re.escape(stem) + r"[0-9]{6,9}\.parquet", path) is not None


def probes_path(run: str) -> str:
    """Return the path of the probes of a run, which its run record pins."""
    return f"readouts/{run}/probes.npy"


def profile_path(run: str) -> str:
    """Return the path of the profile of a run, which its run record pins."""
    return f"readouts/{run}/profile.json"


def journal_path(run: str, n: int) -> str:
    """Return the path of a segment of a census journal, which lives until the census closes."""
    return f"journal/{run}/{n:06d}.jsonl.zst"


def heartbeat_path(run: str, chain: str) -> str:
    """Return the path of the heartbeat of an open chain."""
    return f"journal/{run}/{chain}.json"


def record_path(chain: str, seq: int) -> str:
    """Return the path of a ledger record."""
    return f"ledger/{chain}/{seq:08d}.json"


def seal_path(n: int) -> str:
    """Return the path of a seal, from 1."""
    return f"seal/{n:04d}.json"


def envelope_path(n: int) -> str:
    """Return the path of the envelope that holds signatures of a seal by keys."""
    return f"seal/{n:04d}.dsse.json"


def bundle_path(n: int) -> str:
    """Return the path of the bundle that holds a signature of a seal by an identity."""
    return f"seal/{n:04d}.sigstore.json"


def attestations_path(n: int) -> str:
    """Return the path of the in-toto bundle of what others attest of a seal, one a line."""
    return f"seal/{n:04d}.intoto.jsonl"


def multiplicity_path(n: int) -> str:
    """Return the path of the multiplicity table that belongs to a seal."""
    return f"seal/{n:04d}.multiplicity.parquet"
