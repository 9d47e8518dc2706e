"""Write the test vectors of spec 0.1: small conforming datasets, and one broken copy per code.

    python spec/0.1/make_vectors.py [FOLDER]

Every invalid vector is a valid one with a single fault, kept as the files that differ. Where
the fault is not a changed file itself, everything above it is written again (digests, roots,
ledger, totals, seal), so that nothing else is wrong: a checker of digests alone passes it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from vector_faults import FAULTS
from vector_signatures import write_signatures
from vector_tools import HOOK, OTHER_HOOK, PREFILL, RUN, Vector

from actds.dataset.commit import commit_shard
from actds.format import canonical
from actds.format.labels import dump_labels
from actds.format.readouts import Readouts
from actds.format.shard import HOOK_CHOICES
from actds.format.telemetry import ATTENTION, KINDS, PROFILE, Attending, profile_field
from actds.rewrite.recompression import recompress
from actds.rewrite.redaction import redact
from actds_testing.places import VECTORS
from actds_testing.schedules import WALL_NS, Schedule, simulate, table_of, thinned
from actds_testing.synthetic import SALT, make_dataset, sampled_table, thinned_facts


def write(root: Path) -> None:
    """Write every vector below a folder that is made anew."""
    for kind in ("valid", "invalid"):
        shutil.rmtree(root / kind, ignore_errors=True)
    _write_minimal(root / "valid" / "minimal")
    _write_minimal(root / "valid" / "readouts", readouts=Readouts(2, seed=4))
    _write_minimal(root / "valid" / "external", external=True)
    _write_minimal(root / "valid" / "roles", roles=True)
    _write_minimal(root / "valid" / "origins", origins=True)
    _write_minimal(root / "valid" / "sampled", entropy=True)
    _write_minimal(root / "valid" / "unserved", unserved=True)
    _write_minimal(root / "valid" / "thinned", readouts=Readouts(2, seed=4), unit="row")
    _write_minimal(root / "valid" / "thinned-requests", unit="request")
    _write_minimal(root / "valid" / "thinned-rules", unit="row", roles=True, rules=True)
    _write_minimal(root / "valid" / "interventions", origins=True, changes=True)
    _write_minimal(root / "valid" / "chosen-hooks", chosen=True)
    _write_minimal(root / "valid" / "looks", readouts=Readouts(2, seed=4), looks=True)
    _write_replaced(root / "valid" / "replaced")
    _write_redacted(root / "valid" / "redacted")
    for one in FAULTS:
        valid = root / "valid" / one.base
        folder = root / "invalid" / f"{one.code}-{one.name}"
        with tempfile.TemporaryDirectory() as temporary:
            vector = Vector(Path(temporary) / "dataset")
            shutil.copytree(valid, vector.path)
            one.make(vector)
            removed = _overlay(valid, vector.path, folder / "files")
        expect = {
            "base": f"valid/{one.base}",
            "remove": removed,
            "what": one.what,
            "code": one.code,
            "place": one.place,
            "severity": one.severity,
            "level": one.level,
            "also": list(one.also),
        }
        text = json.dumps(expect, indent=2) + "\n"
        (folder / "expect.json").write_text(text, encoding="utf-8")
    write_signatures(root)


def _write_minimal(
    path: Path,
    readouts: Readouts | None = None,
    *,
    external: bool = False,
    roles: bool = False,
    origins: bool = False,
    entropy: bool = False,
    unserved: bool = False,
    unit: str | None = None,
    rules: bool = False,
    changes: bool = False,
    looks: bool = False,
    chosen: bool = False,
) -> None:
    """Write the minimal dataset.

    Args:
        external: the KV of every hit came from outside.
        unserved: two more prompts, one of which does not fit the model; of the other the turn never
            came. All but the first have labels.
        unit: what is drawn by hash, with one of three probabilities by step; ``None`` for nothing.
        changes: interventions have changed rows.
        looks: requests have left the regime of a profile, and attention was looked at.
        rules: draw also by rules for roles, ids and labels, which all but the first have.
        chosen: there are two hooks, and a request has chosen the second.
    """
    facts: dict[str, bool | int | str | None] = {}
    with _fixed_ids():
        schedule = simulate(4, seed=166, drops=True, budget=16)
        if external:
            spans = schedule.spans.to_pylist()
            for span in spans:
                if span["disposition"] == "cache_ref":
                    span.update(reason="external", ref_request=None)
            schedule = schedule.with_(spans=table_of("spans", spans))
        if unserved:
            requests = schedule.requests.to_pylist()
            for name, n, why in (
                ("skipped", 5000, "E004 synthetic.jsonl row 4: 5000 prompt tokens"),
                ("unbegun", 12, "the harvest was interrupted before it was served"),
            ):
                row = len(requests)
                requests.append({
                    "request": row, "external_id": f"prompt-{row}", "source": "synthetic.jsonl",
                    "source_row": row, "prompt_len": n, "generated_len": 0, "cached_tokens": 0,
                    "n_preemptions": 0, "finish_reason": name, "reason": why,
                })  # fmt: skip
            schedule = schedule.with_(requests=table_of("requests", requests))
        if unserved or rules:
            requests = schedule.requests.to_pylist()
            for row, request in enumerate(requests[1:]):
                labels = {"domain": ("code", "maths")[row % 2], "level": row, "é": row < 3}
                request["labels"] = dump_labels(labels)
                request["conversation"], request["turn"] = f"{row // 2:032x}", row % 2
            schedule = schedule.with_(requests=table_of("requests", requests))
        if chosen:
            facts = {HOOK_CHOICES: f'[["{OTHER_HOOK}"]]'}
            requests = schedule.requests.to_pylist()
            requests[1]["hooks"] = OTHER_HOOK
            schedule = schedule.with_(requests=table_of("requests", requests))
        if unit is not None:
            shares = {
                step: (1.0, 0.5, 0.125)[step % 3] for step in schedule.steps["step"].to_pylist()
            }
            share = partial(_share, schedule) if rules else lambda *key: 1.0
            schedule = thinned(schedule, SALT, shares, unit, rules=share)
            facts = thinned_facts(unit, RULES if rules else "[]")
        if changes:
            facts |= {"capture.interventions": canonical.dump(CHANGES).decode("ascii").strip()}
            schedule = schedule.with_(rows=_marked(schedule))
        if looks:
            facts |= {PROFILE: profile_field(PROFILE_BYTES), ATTENTION: ATTENDING.as_field()}
        make_dataset(
            path,
            facts=facts,
            schedule=schedule,
            hooks=[HOOK, OTHER_HOOK] if chosen else [HOOK],
            d_model=8,
            run=RUN,
            span_parts=1,
            readouts=readouts,
            roles="thinking" if rules else roles,  # for a rule it is the assistant's all the same
            origins=origins,
            entropy=entropy or rules,
            looks=_looks(schedule) if looks else None,
            profile=PROFILE_BYTES if looks else None,
        )


PROFILE_BYTES = b"{}\n"
ATTENDING = Attending((0, 3), 2, 0.875, "9f86d081884c7d65")


def _looks(schedule: Schedule) -> dict[Any, pa.Table]:
    """Return alerts at rows of the first request that was decoded, and attention of all drawn."""
    prompts = {r["request"]: r["prompt_len"] for r in schedule.requests.to_pylist()}
    rows = [r for r in schedule.rows.to_pylist() if r["position"] >= prompts[r["request"]] - 1]
    rows.sort(key=lambda row: (row["request"], row["position"]))
    of_first = [row for row in rows if row["request"] == rows[0]["request"]][:3]
    names = ("request", "position", "step")
    alerts = [
        {**{n: row[n] for n in names}, "score": 6.5 + n, "kind": KINDS[n == 0], "hook": HOOK}
        for n, row in enumerate(of_first)
    ]
    attention = [
        {
            **{n: row[n] for n in names},
            **{"layer": layer, "head": head, "keys": row["position"] + 1, "entropy": 1.5},
            **{"first": 0.5, "prompt": 0.25, "generated": 0.125, "sinks": 0.125},
            **{"roles": [0.125, 0.125, 0.0, 0.0, 0.0, 0.0] if head else []},
            **{"top": [0, row["position"]], "shares": [0.5, 0.125]},
        }
        for row in rows
        for depth in [row["position"] - prompts[row["request"]]]
        if depth >= 0 and depth % ATTENDING.every == 0 and ATTENDING.draws(row["request"])
        for layer in ATTENDING.layers
        for head in range(2)
    ]
    assert alerts and attention
    return {"alerts": table_of("alerts", alerts), "attention": table_of("attention", attention)}


def _rule(share: str, **asked: Any) -> dict[str, Any]:
    names = ("entropy", "phase", "position", "probe", "request", "role")
    return {**dict.fromkeys(names), **asked, "share": share}


RULES = canonical.dump([
    _rule("1.0", request=[["labels.domain", "ma?h*"], ["labels.é", "true"]], role="user"),
    _rule("0.75", request=[["external_id", "*-0"]], phase="prefill"),
    _rule("0.625", role="template"),
    _rule("0.875", probe=[HOOK, 0, "-0.5", "2.5"]),
    _rule("0.5", role="assistant"),
    _rule("0.25"),
]).decode("ascii").strip()  # fmt: skip


def _change(name: str, op: str, strength: str, **asked: Any) -> dict[str, Any]:
    digest = canonical.digest(name.encode())
    edits = [{"hook": HOOK, "op": op, "sha256": digest, "strength": strength}]
    whole = {"part": None, "positions": [0, None], "request": None}
    return {**whole, **asked, "edits": edits, "name": name}


CHANGES = [
    _change("steer", "add", "4.0", part="generated", positions=[1, 9],
            request=[["external_id", "prompt-?"]]),
    _change("edge", "project", "1.0", part="prompt", positions=[0, 3]),
    _change("rest", "clamp", "-0.5", positions=[2, None], request=[["external_id", "*-2"]]),
]  # fmt: skip


def _marked(schedule: Schedule) -> pa.Table:
    """Return the rows with the marks of ``CHANGES``; of all but the last request half was given."""
    requests = schedule.requests.to_pylist()
    rows = schedule.rows.to_pylist()
    for row in rows:
        request, position = row["request"], row["position"]
        given = requests[request]["prompt_len"] // (2 if request < len(requests) - 1 else 1)
        if given + 1 <= position < given + 9:
            row["intervention"] = 1
        elif position < min(3, given):
            row["intervention"] = 2
        elif request == 2 and position >= 2:
            row["intervention"] = 3
    return table_of("tokens", rows)


def _share(schedule: Schedule, request: int, position: int) -> float:
    """Return what ``RULES`` give a position of a chat as ``make_dataset`` writes them."""
    edge = schedule.requests.to_pylist()[request]["prompt_len"]
    if position >= edge:
        for line in sampled_table(schedule, 1).to_pylist():
            if (line["request"], line["position"]) == (request, position):
                return 0.875 if -0.5 <= line["scores"][0] < 2.5 else 0.5
        return 0.5
    is_user = 3 <= position < edge - 2
    if request == 2 and is_user:  # the one with the label maths
        return 1.0
    if request == 0:
        return 0.75
    return 0.625 if position and not is_user else 0.25


def _write_replaced(path: Path) -> None:
    """Write the minimal dataset with raw shards, one of them replaced since."""
    with (
        mock.patch("actds_testing.synthetic.commit_shard", partial(commit_shard, raw=True)),
        mock.patch("actds.rewrite.recompression.__version__", "vectors"),
    ):
        _write_minimal(path)
        with _fixed_ids(10**6):
            recompress(path, [PREFILL.rpartition("/")[2]])


def _write_redacted(path: Path) -> None:
    """Write the dataset with readouts, of which two requests are taken out."""
    _write_minimal(path, readouts=Readouts(2, seed=4))
    with mock.patch("actds.rewrite.redaction.__version__", "vectors"), _fixed_ids(10**6):
        redact(path, [f"{RUN}/1", f"{RUN}/2"])


def _overlay(base: Path, changed: Path, out: Path) -> list[str]:
    """Write the files that differ from the base, and return those of the base that are gone."""
    before, after = _files(base), _files(changed)
    out.mkdir(parents=True)
    for path in sorted(after):
        if path not in before or (base / path).read_bytes() != (changed / path).read_bytes():
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(changed / path, out / path)
    return sorted(before - after)


def _files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


@contextmanager
def _fixed_ids(first: int = 1) -> Iterator[None]:
    """Give ids and clocks fixed values, so that the vectors change only where the format does."""
    numbers = iter(range(first, first + 10**6))
    with (
        mock.patch("secrets.token_hex", lambda n: f"{next(numbers):0{2 * n}x}"),
        mock.patch("time.time_ns", lambda: WALL_NS),
    ):
        yield


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else VECTORS)
