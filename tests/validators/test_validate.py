"""``actds validate`` lets nothing through that the spec forbids, and says what it found."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actds.dataset.commit
from actds.cli import cli
from actds.format.apart import TablesApart
from actds.format.readouts import Readouts
from actds.publish.sealing import seal
from actds.store import layout
from actds_testing import forge, synthetic
from actds_testing.places import SCHEMAS, VECTORS
from actds_testing.schedules import simulate
from actds_testing.settling import write_table
from actds_testing.synthetic import make_dataset
from actds_validators.cli.commands import LEVELS as COMMAND_LEVELS
from actds_validators.validate.shards import may_equal
from actds_validators.validate.validation import LEVELS, Validation, validate

MINIMAL = VECTORS / "valid" / "minimal"
Copy = Callable[[], Path]


def lines(found: Validation) -> list[str]:
    return [f"{finding.severity} {finding.line()}" for finding in found.findings]


def codes(found: Validation) -> set[str]:
    return {finding.code for finding in found.errors}


def run(*args: str) -> click.testing.Result:
    # Through the group, as a person does: click keeps what a command says of -h.
    return click.testing.CliRunner().invoke(cli, ["validate", *args], catch_exceptions=False)


def an_array(dataset: Path) -> Path:
    return next(iter(sorted(dataset.glob("shards/*/acts.zarr/*/c/0/0"))))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x20
    path.write_bytes(data)


# ---- what passes


def test_passes_a_conforming_dataset_at_every_level(dataset_path: Path) -> None:
    assert COMMAND_LEVELS == LEVELS
    for level in LEVELS:
        found = validate(dataset_path, level)
        assert codes(found) == set(), lines(found)
        assert found.exit_code() == 0
        assert bool(found.runs) == (level != "quick")
    assert found.totals["rows"] == found.totals["captured"] > 100


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_passes_other_types_and_sequence_order(tmp_path: Path, dtype: Any) -> None:
    path = make_dataset(tmp_path / "d", n_requests=3, dtype=dtype, order="sequence", d_model=5)
    assert lines(validate(path, "deep")) == []


def test_passes_hooks_of_different_widths_and_types_with_readouts_of_each(tmp_path: Path) -> None:
    widths = {"resid_post.0": 16, "resid_post.1": 40, "resid_post.2": 5}
    types: Any = {"resid_post.0": "bfloat16", "resid_post.1": "float16", "resid_post.2": "float32"}
    path = make_dataset(
        tmp_path / "acts", hooks=tuple(widths), d_model=widths, dtype=types,
        readouts=Readouts(2, seed=0), drops=True,
    )  # fmt: skip
    assert lines(validate(path, "deep")) == []


def test_passes_a_second_run_and_keeps_runs_apart(tmp_path: Path) -> None:
    """Both runs number their requests from 0: a checker that pooled them would find doubles."""
    path = make_dataset(tmp_path / "d", n_requests=4, run="r-one")
    make_dataset(path, n_requests=5, seed=3, run="r-two", sealed=False)
    assert codes(validate(path, "standard")) == {"E306"}
    seal(path)
    found = validate(path, "full")
    assert lines(found) == [] and found.seal == 2
    assert list(found.runs) == ["r-one", "r-two"]
    assert found.totals["requests"] == 9


def _stages(monkeypatch: pytest.MonkeyPatch, leave_out: str | None = None) -> None:
    """Let every hook write shards of its own, as the stages of a pipeline do."""
    real = synthetic.commit_shard

    def commit(store: Any, writer: Any, rows: Any, *, shard: str, **more: Any) -> None:
        for hook in rows.hooks:
            if shard != leave_out or hook == "resid_post.0":
                part = dataclasses.replace(rows, hooks={hook: rows.hooks[hook]})
                real(store, writer, part, shard=f"{shard}-{hook}", **more)

    monkeypatch.setattr(synthetic, "commit_shard", commit)


def test_passes_stages_that_write_disjoint_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stages(monkeypatch)
    path = make_dataset(tmp_path / "d", n_requests=4)
    assert lines(validate(path, "deep")) == []


def test_every_hook_accounts_for_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stages(monkeypatch, leave_out="r-synthetic-decode-0000")
    path = make_dataset(tmp_path / "d", n_requests=4, sealed=False)
    found = validate(path, "standard")
    assert codes(found) == {"E306", "E406", "E412"}, lines(found)
    missing = [finding for finding in found.errors if finding.code == "E406"]
    assert all(finding.place.endswith("(hooks resid_post.1)") for finding in missing)


# ---- what does not


def test_notices_any_changed_byte_of_any_file(tmp_path: Path) -> None:
    """Every file but those that are derived: one bit flipped, and the file cut or gone."""
    files = [p.relative_to(MINIMAL) for p in sorted(MINIMAL.rglob("*")) if p.is_file()]
    assert len(files) > 25
    work = Path(shutil.copytree(MINIMAL, tmp_path / "d"))
    rng = np.random.default_rng(7)
    for number, name in enumerate(files):
        if name.as_posix() in layout.BESIDE:
            continue
        whole = (MINIMAL / name).read_bytes()
        flip(work / name, int(rng.integers(len(whole))))
        assert validate(work, "full").exit_code() != 0, f"a flipped bit in {name}"
        if number % 2:
            (work / name).write_bytes(whole[:-1])
        else:
            (work / name).unlink()
        assert validate(work, "quick").exit_code() != 0, f"{name} cut or gone"
        (work / name).write_bytes(whole)
    assert lines(validate(work, "deep")) == []


def test_a_run_record_that_no_ledger_names_is_none(tmp_path: Path) -> None:
    """Nothing pins it: it could say anything, and the dataset would keep its digest."""
    path = Path(shutil.copytree(MINIMAL, tmp_path / "d"))
    (named,) = (p for p in path.glob("ledger/*/*.json") if b'"type":"run"' in p.read_bytes())
    later = [p for p in sorted(named.parent.glob("*.json")) if p.name > named.name]
    for place, record in zip([named, *later[:-1]], later, strict=True):
        number = int(place.stem)
        place.write_bytes(record.read_bytes())
        forge.edit(place, lambda r, number=number: r.update(seq=number))
    later[-1].unlink()
    forge.relink(path)
    found = validate(path, "full")
    assert "E401" in {finding.code for finding in found.errors}, lines(found)


@pytest.mark.parametrize("name", ["format", "version"])
@pytest.mark.parametrize(
    ("schema", "pattern"),
    {"genesis": "actds.json", "run": "runs/*.json", "shard": "shards/*/shard.json",
     "ledger": "ledger/*/00000001.json", "seal": "seal/????.json"}.items(),
)  # fmt: skip
def test_every_document_says_what_it_is(
    tmp_path: Path, schema: str, pattern: str, name: str
) -> None:
    path = Path(shutil.copytree(MINIMAL, tmp_path / "d"))
    document = sorted(path.glob(pattern))[0]
    forge.edit(document, lambda d: d.pop(name))
    forge.relink(path)
    (finding,) = (one for one in validate(path, "quick").errors if one.code == "E103")
    assert finding.place == f"{document.relative_to(path).as_posix()} {name}"
    published = json.loads((SCHEMAS / f"{schema}.json").read_text("utf-8"))
    assert name in published["required"]


def test_a_list_with_a_null_is_refused(tmp_path: Path) -> None:
    path = Path(shutil.copytree(VECTORS / "valid" / "readouts", tmp_path / "d"))
    (part,) = path.glob("readouts/*/readouts-000000.parquet")
    table = pq.read_table(part)
    at, lists = table.column_names.index("projections"), table["projections"].to_pylist()
    lists[0] = [None, *lists[0][1:]]
    field = table.schema.field("projections")
    write_table(part, table.set_column(at, field, pa.array(lists, field.type)))
    forge.relink(path)
    assert "E109" in codes(validate(path, "deep"))


def test_only_a_level_that_hashes_notices_changed_activations(copy_dataset: Copy) -> None:
    path = copy_dataset()
    flip(an_array(path), 40)
    assert codes(validate(path, "standard")) == set()
    assert codes(validate(path, "full")) == {"E202"}
    assert run(str(path)).exit_code == 1, "the default level has to notice it"


def test_finds_every_fault_and_not_only_the_first(copy_dataset: Copy) -> None:
    path = copy_dataset()
    arrays = sorted(path.glob("shards/*/acts.zarr/*/c/0/0"))
    flip(arrays[0], 40)
    arrays[1].write_bytes(arrays[1].read_bytes()[:-2])
    (path / "shards" / arrays[2].relative_to(path).parts[1] / "acts.zarr" / "x").write_text("x")
    next(iter(path.glob("runs/*.json"))).unlink()
    shutil.rmtree(path / "seal")
    found = validate(path, "deep")
    assert {"E202", "E201", "E105", "E401", "E306"} <= codes(found), lines(found)


@pytest.mark.parametrize("level", ["standard", "deep"])
def test_hashes_a_file_before_it_parses_it(
    copy_dataset: Copy, monkeypatch: pytest.MonkeyPatch, level: Any
) -> None:
    path = copy_dataset()
    tokens = sorted(path.glob("shards/*/tokens.parquet"))[0]
    spans = sorted(path.glob("census/*/spans-*.parquet"))[0]
    for file in (tokens, spans):
        flip(file, 50)
    parsed: list[str] = []
    real = TablesApart.from_parquet

    def parse(self: Any, name: Any, data: Any, place: str, *columns: Any, **more: Any) -> Any:
        parsed.append(place)
        return real(self, name, data, place, *columns, **more)

    monkeypatch.setattr(TablesApart, "from_parquet", parse)
    found = validate(path, level)
    bad = {file.relative_to(path).as_posix() for file in (tokens, spans)}
    assert {f.place for f in found.findings} == bad, lines(found)
    assert codes(found) == {"E202"}
    assert parsed and not bad & set(parsed)


def test_refuses_links(copy_dataset: Copy, tmp_path: Path) -> None:
    path = copy_dataset()
    array = an_array(path)
    outside = tmp_path / "outside"
    shutil.move(array, outside)
    array.symlink_to(outside)
    (path / "shards" / "s-linked").symlink_to(tmp_path)
    found = validate(path, "quick")
    assert [f.code for f in found.errors] == ["E107", "E107"], lines(found)


def test_a_leftover_of_a_killed_writer_is_a_warning(copy_dataset: Copy) -> None:
    path = copy_dataset()
    shard = next(iter((path / "shards").iterdir()))
    shutil.copytree(shard, path / "shards" / "s-never-acknowledged")
    found = validate(path, "full")
    assert {(f.code, f.severity) for f in found.findings} >= {("E105", "warning")}
    assert (found.exit_code(), found.exit_code(strict=True)) == (0, 1)


def test_refuses_rows_without_provenance(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", n_requests=3, sealed=False)
    (path / "runs" / "r-synthetic.json").unlink()
    found = validate(path, "quick")
    assert codes(found) == {"E401", "E306"}
    assert next(c.state for c in found.checks if c.name == "provenance") == "failed"


def test_finds_a_shard_that_claims_to_be_shuffled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actds.dataset.commit, "row_order", lambda n, seed: np.arange(n))
    path = make_dataset(tmp_path / "d", n_requests=12, rows_per_shard=1000)
    found = validate(path, "standard")
    assert codes(found) == {"E415"}, lines(found)
    assert all("order" in finding.place for finding in found.errors)


# ---- values: hashed, sealed, accounted for, and wrong


def with_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any, str], Any], dtype: Any
) -> Validation:
    """Return what ``deep`` says of a dataset whose capture point was broken from the start."""
    real = synthetic.states

    def states(tokens: Any, token_ids: Any, hook: Any) -> Any:
        return spoil(real(tokens, token_ids, hook), hook.name)

    monkeypatch.setattr(synthetic, "states", states)
    path = make_dataset(tmp_path / "d", n_requests=4, dtype=dtype)
    assert codes(validate(path, "full")) == set(), "only the values are wrong"
    return validate(path, "deep")


def _one_nan(bits: Any, hook: str) -> Any:
    bits[2, 5] = {2: 0x7FC1, 4: 0x7FC00001}[bits.itemsize]
    return bits


def _one_infinity(bits: Any, hook: str) -> Any:
    bits[2, 5] = {2: 0xFF80, 4: 0xFF800000}[bits.itemsize]
    return bits


def _all_zero(bits: Any, hook: str) -> Any:
    return np.zeros_like(bits) if hook == "resid_post.1" else bits


def _negative_zero(bits: Any, hook: str) -> Any:
    bits[4] = 1 << (8 * bits.itemsize - 1)
    return bits


def _stale_buffer(bits: Any, hook: str) -> Any:
    bits[3:6] = bits[2]
    return bits


def _last_state_of_everybody(bits: Any, hook: str) -> Any:
    return np.broadcast_to(bits[-1], bits.shape).copy()


@pytest.mark.parametrize(
    ("spoil", "code", "dtype"),
    [
        (_one_nan, "E601", "bfloat16"),
        (_one_nan, "E601", "float32"),
        (_one_infinity, "E601", "bfloat16"),
        (_all_zero, "E602", "bfloat16"),
        (_negative_zero, "E602", "float32"),
        (_stale_buffer, "E603", "bfloat16"),
        (_last_state_of_everybody, "E603", "float32"),
    ],
)
def test_deep_finds_values_that_no_model_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, code: str, dtype: str
) -> None:
    found = with_states(tmp_path, monkeypatch, spoil, dtype)
    assert codes(found) == {code}, lines(found)
    assert all("request" in finding.place for finding in found.errors)


def test_deep_finds_two_hooks_that_share_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[int, Any] = {}

    def alias(bits: Any, hook: str) -> Any:
        return kept.setdefault(len(bits), bits) if hook == "resid_post.0" else kept[len(bits)]

    found = with_states(tmp_path, monkeypatch, alias, "bfloat16")
    assert codes(found) == {"E603"}, lines(found)
    assert all(finding.got == "the bits of hook resid_post.0" for finding in found.errors)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("resid_post.3", "resid_pre.4", True),
        ("resid_pre.4", "resid_post.3", True),
        ("resid_pre.3", "resid_post.3", False),
        ("resid_post.4", "resid_pre.4", False),
        ("embed.0", "resid_pre.0", True),
        ("embed.0", "resid_post.0", False),
        ("mlp_in.2", "resid_mid.2", True),
        ("mlp_in.2", "resid_mid.3", False),
        ("v.1", "z.1", True),
        ("k.1", "v.1", False),
        ("mlp_out.1", "attn_out.1", False),
    ],
)
def test_places_that_are_the_same_by_definition_may_have_equal_rows(
    one: str, other: str, same: bool
) -> None:
    assert may_equal(one, other) is same


def test_equal_prefixes_are_no_repeated_rows(tmp_path: Path) -> None:
    """Without a cache every request computes its first tokens itself, to the same bits."""
    schedule = simulate(8, seed=2, cache=False)
    bos = [p == 0 for p in schedule.rows["position"].to_pylist()]
    assert sum(bos) > 4
    path = make_dataset(tmp_path / "d", schedule=schedule, rows_per_shard=1000)
    assert lines(validate(path, "deep")) == []


# ---- the command


def test_exit_codes(copy_dataset: Copy, tmp_path: Path) -> None:
    path = copy_dataset()
    assert run(str(path)).exit_code == 0
    assert run(str(path), "--level", "nonsense").exit_code == 2
    assert run().exit_code == 2
    assert run(str(tmp_path / "nothing")).exit_code == 3
    shutil.rmtree(path / "seal")
    assert run(str(path), "--level", "quick").exit_code == 1
    (path / "actds.json").write_text("{}")
    assert run(str(path)).exit_code == 3


def test_page_says_verdict_finding_and_next_step(copy_dataset: Copy) -> None:
    path = copy_dataset()
    page = run(str(path)).stdout
    assert page.startswith("VALID ") and "✓ accounting" in page and "✗" not in page
    totals = validate(path).totals
    assert f"{totals['rows']:,} rows of {totals['requests']:,} requests" in page
    quick, deep = (run(str(path), "--level", level).stdout for level in ("quick", "deep"))
    assert quick.startswith("NO ERROR in ") and "VALID" not in quick and deep.startswith("VALID ")
    assert f"{totals['dropped']:,} dropped" in page and f"{totals['aborted']:,} aborted" in page
    array = an_array(path)
    array.write_bytes(array.read_bytes()[:-1])
    page = run(str(path)).stdout
    assert page.startswith("REFUSED ") and "✗ integrity" in page
    assert f"E201 {array.relative_to(path).as_posix()}: " in page
    assert "Next: Restore the file from a copy" in page


def test_page_prints_no_control_character_of_a_hostile_name(copy_dataset: Copy) -> None:
    path = copy_dataset()
    (path / "a\x1b[31mred\nE000 fake").write_text("x")
    page = run(str(path), "--level", "quick").stdout
    assert "\x1b" not in page and "\nE000" not in page
    assert "E105" in page


def test_json_says_the_same_under_its_schema(copy_dataset: Copy) -> None:
    path = copy_dataset()
    (path / "stray.txt").write_text("x")
    document = json.loads(run(str(path), "--json", "--strict").stdout)
    found = validate(path)
    assert (document["format"], document["version"]) == ("actds.validate", "1")
    assert (document["ok"], document["exit_code"], document["strict"]) == (False, 1, True)
    assert document["totals"] == found.totals
    assert document["runs"] == found.runs
    assert document["digest"] == found.digest
    assert [f["code"] for f in document["findings"]] == [f.code for f in found.findings]
    keys = {"code", "place", "got", "expected", "severity", "next_step"}
    assert all(set(f) == keys for f in document["findings"])
    assert [c["name"] for c in document["checks"]] == [
        "ledger",
        "structure",
        "integrity",
        "provenance",
        "accounting",
        "values",
    ]
    assert {c["state"] for c in document["checks"]} == {"passed", "skipped"}
