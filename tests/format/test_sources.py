"""What became of the records of a source, over the runs of a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import actds
from actds.dataset.sources import LabelCount, UnservedFacts, label_facts, read_records, source_facts
from actds.format.labels import dump_labels
from actds.format.schema import ProvenanceField
from actds_testing.schedules import Schedule, simulate, table_of
from actds_testing.synthetic import make_dataset
from actds_validators.audit.census import source_account

WHY = "the harvest was interrupted before it was served"


def with_unbegun(told: Schedule, *rows: int) -> Schedule:
    """Return a schedule with records of which the turn never came."""
    lines = told.requests.to_pylist()
    for number, row in enumerate(rows, len(lines)):
        lines.append({
            "request": number, "external_id": f"prompt-{row}", "source": "synthetic.jsonl",
            "source_row": row, "prompt_len": 100 + row, "generated_len": 0, "cached_tokens": 0,
            "n_preemptions": 0, "finish_reason": "unbegun", "reason": WHY,
        })  # fmt: skip
    return told.with_(requests=table_of("requests", lines))


def edited(told: Schedule, **columns: Any) -> Schedule:
    lines = [line | {name: change(line) for name, change in columns.items()}
             for line in told.requests.to_pylist()]  # fmt: skip
    return told.with_(requests=table_of("requests", lines))


def test_a_record_that_any_run_served_is_served_and_no_record_counts_twice(tmp_path: Path) -> None:
    path, first = tmp_path / "acts", with_unbegun(simulate(12), 20, 21, 32)
    second = edited(simulate(12, 1), source_row=lambda line: 20 + line["request"])
    make_dataset(path, schedule=first, run="r-a", sealed=False)
    catalog = actds.open(make_dataset(path, schedule=second, run="r-b")).catalog
    n_long = sum(told.requests["prompt_len"][7].as_py() for told in (first, second))
    (found,) = source_facts(catalog, read_records(catalog))
    assert (found.source, found.n_read, found.n_served, found.n_unlisted) == (
        "synthetic.jsonl", None, 22, 0,
    )  # fmt: skip
    assert found.unserved == [
        UnservedFacts("skipped", 2, n_long, "E004 prompt too long"),
        UnservedFacts("unbegun", 1, 132, WHY),
    ]
    named = ProvenanceField(value="synthetic.jsonl", origin="observed", reason=None)
    n_read = named.model_copy(update={"value": 30})
    catalog.runs["r-b"].fields.update({"prompts.source": named, "prompts.n_records": n_read})
    (found,) = source_facts(catalog, read_records(catalog))
    assert found.words() == (
        f"synthetic.jsonl: 30 records = 22 served + 2 skipped ({n_long} tokens) + "
        "1 unbegun (132 tokens) + 5 in no request"
    )


def test_a_source_of_other_bytes_is_another_one_though_it_has_the_name(tmp_path: Path) -> None:
    path = tmp_path / "acts"
    make_dataset(path, schedule=simulate(12), run="r-a", sealed=False)
    catalog = actds.open(make_dataset(path, schedule=simulate(12, 1), run="r-b")).catalog
    assert read_records(catalog).num_rows == 12
    for run, digest in {"r-a": "a" * 64, "r-b": "b" * 64}.items():
        values = {"source": "synthetic.jsonl", "sha256": digest, "n_records": 12}
        catalog.runs[run].fields.update({
            f"prompts.{name}": ProvenanceField(value=value, origin="observed", reason=None)
            for name, value in values.items()
        })  # fmt: skip
    records = read_records(catalog)
    assert records.num_rows == 24
    (facts,) = source_facts(catalog, records)
    assert (facts.n_read, facts.n_unlisted) == (24, 0)
    assert source_account(catalog, records).records == 24


def test_requests_without_a_source_are_told_of_where_some_were_not_served(tmp_path: Path) -> None:
    told = edited(simulate(12), source=lambda line: None, source_row=lambda line: None)
    catalog = actds.open(make_dataset(tmp_path / "a", schedule=told)).catalog
    (found,) = source_facts(catalog, read_records(catalog))
    assert (found.source, found.n_served, len(found.unserved)) == (None, 11, 1)
    served = edited(simulate(5), source=lambda line: None)
    catalog = actds.open(make_dataset(tmp_path / "b", schedule=served)).catalog
    assert source_facts(catalog, read_records(catalog)) == []


def test_labels_are_counted_by_record_the_largest_first(tmp_path: Path) -> None:
    def labels(line: dict[str, Any]) -> str | None:
        n = line["request"]
        own = {"domain": ("code", "web")[n % 3 > 0], "level": n} | ({"3": 3} if n == 5 else {})
        return None if n == 11 else dump_labels(own)

    path = tmp_path / "acts"
    make_dataset(path, schedule=edited(simulate(12), labels=labels), run="r-a", sealed=False)
    again = edited(simulate(12, 1), labels=labels)  # the same records, served once more
    catalog = actds.open(make_dataset(path, schedule=again, run="r-b")).catalog
    three, domain, level = label_facts(read_records(catalog))
    assert (three.name, three.n_records, three.largest) == ("3", 1, [LabelCount(3, 1)])
    assert domain.words() == "domain: 2 values in 11 records: web (7), code (4)"
    assert (level.n_values, len(level.largest)) == (11, 8) and level.words().endswith(", 3 more")
