"""The card: front matter that stock ``datasets`` reads, facts, gaps, verdict; croissant.json."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

import actds
from actds.cli import cli
from actds.dataset.info import describe, page
from actds.dataset.reading import read_catalog
from actds.format.readouts import Readouts
from actds.publish.card import methods
from actds.publish.croissant import About, croissant
from actds.store.local import LocalStore
from actds_testing.schedules import busy_shares, simulate
from actds_testing.synthetic import make_dataset, make_thinned

datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of two runs: one with drops, none with a stall, so that files are empty."""
    folder = tmp_path_factory.mktemp("card") / "acts"
    common: dict[str, Any] = {"readouts": Readouts(4, seed=0)}
    make_dataset(folder, n_requests=20, drops=True, sealed=False, **common)
    return make_dataset(folder, n_requests=6, run="r-second", seed=3, **common)


def front(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((path / "README.md").read_text().split("---\n")[1])
    return found


def files_of(path: Path, table: str) -> list[Path]:
    pattern = "tokens.parquet" if table == "tokens" else f"*{table}*.parquet"
    return sorted(path.rglob(pattern))


def audit_of(path: Path, file: Path, **changes: Any) -> Path:
    answer = {"level": "warn", "words": "Yes *with* <limits>", "sentence": "Rows.", "load": None}
    place = {"name": "rules", "level": "WARN", "accepted": True, "headline": "3 % left out"}
    document = {"format": "actds.audit", "digest": actds.open(path).digest, "answer": answer,
                "places": [place], "more": 1} | changes  # fmt: skip
    file.write_text(json.dumps(document))
    return file


def test_stock_datasets_loads_every_table_of_the_folder(path: Path, tmp_path: Path) -> None:
    names = [one["config_name"] for one in front(path)["configs"]]
    # Stalls have no row here, and a Parquet file without one is more than ``datasets`` bears.
    assert names == ["tokens", "requests", "steps", "spans", "drops", "readouts", "multiplicity"]
    assert datasets.get_dataset_config_names(str(path)) == names
    for name in names:
        rows = datasets.load_dataset(str(path), name, split="train", cache_dir=str(tmp_path))
        parts = [pq.read_table(part) for part in files_of(path, name)]
        assert rows.num_rows == sum(part.num_rows for part in parts) > 0
        assert rows.column_names == parts[0].column_names


def test_a_part_without_rows_is_not_listed(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=3, span_parts=40)
    listed = {one["config_name"]: one["data_files"] for one in front(path)["configs"]}
    assert 0 < len(listed["spans"]) < 40 and listed["steps"] == ["census/*/steps-*.parquet"]
    rows = datasets.load_dataset(str(path), "spans", split="train", cache_dir=str(tmp_path))
    assert rows.num_rows == read_catalog(LocalStore(path)).table("spans").num_rows


def test_the_card_says_size_licence_precision_gaps_and_verdict(path: Path, tmp_path: Path) -> None:
    seal = (path / "seal/0001.json").read_bytes()
    assert actds.card(path) == ["README.md", "croissant.json"]
    assert (front(path)["license"], front(path)["size_categories"]) == ("unknown", ["n<1K"])
    text = (path / "README.md").read_text()
    for title in ("Precision and determinism", "Provenance", "Known gaps", "Audit", "Use"):
        assert f"\n## {title}\n" in text
    assert "| numerics.dtype | bfloat16 |" in text
    assert "| capture.cast | unknown: a simulated run has none |" in text
    assert "dropped" in text.split("## Known gaps")[1].split("##")[0]
    assert "whose row is missing" in text and "Not part of this card" in text
    actds.card(path, licence="cc-by-4.0", audit=audit_of(path, tmp_path / "audit.json"))
    text = (path / "README.md").read_text()
    assert front(path)["license"] == "cc-by-4.0" and front(path)["tags"][0] == "actds"
    assert "**warn**: Yes \\*with\\* &lt;limits&gt;. Rows." in text
    assert "- rules: WARN \\(accepted\\), 3 % left out" in text
    assert json.loads((path / "croissant.json").read_text())["license"] == "cc-by-4.0"
    # The card is no part of the dataset: seal, digest and verdict of validate are as before.
    assert (path / "seal/0001.json").read_bytes() == seal
    result = actds.validate(path)
    assert not [f for f in result.findings if f.code == "E105"] and not result.errors


def test_the_card_has_a_paragraph_for_a_paper(path: Path) -> None:
    facts = describe(read_catalog(LocalStore(path)))
    text = methods(facts)
    for run in facts.runs:
        run.provenance["numerics.batch_invariant"] = {"value": True}
        run.provenance["numerics.tf32"] = {"value": False}
    assert facts.digest in text and facts.dataset in text and "computed in bfloat16" in text
    of_all = f"Of {sum(run.n_positions or 0 for run in facts.runs):,} positions "
    assert of_all in text and f"{facts.totals['captured']:,} (" in text
    # Only who knows that the kernels do not look at the batch is spared the sentence.
    assert "Batch-invariant kernels were not on record" in text and "last bits of a row" in text
    invariant = methods(facts)
    assert "kernels were on" in invariant and "TF32 off." in invariant
    assert "last bits" not in invariant
    facts.runs[0].provenance["numerics.dtype"] = {"value": "float32"}
    facts.runs[0].provenance["numerics.tf32"] = {"value": True}
    other = replace(facts.runs[0], provenance={"numerics.dtype": {"value": "float16"}})
    both = methods(replace(facts, runs=[facts.runs[0], other]))
    assert "computed in float32 / float16" in both and "TF32 on / not on record" in both
    assert "> Activations of " in (path / "README.md").read_text()


@pytest.mark.parametrize("unit", ["row", "request"])
def test_card_and_info_say_that_rows_are_a_sample(tmp_path: Path, unit: str) -> None:
    schedule = simulate(20, 3)
    path = make_thinned(tmp_path / "acts", schedule, busy_shares(schedule), unit)
    weights = [1 / row["inclusion"] for row in actds.open(path).tokens().to_pylist()]
    kish = sum(weights) ** 2 / sum(w * w for w in weights)
    words = (
        f"a sample by {unit}: {len(weights)} rows drawn with probability 0.25 to 1, which "
        f"represent about {sum(weights):,.0f}: {kish:,.0f} effective rows"
    )
    facts = describe(read_catalog(LocalStore(path)))
    assert words in methods(facts) and words in "\n".join(line.text for line in page(facts))
    actds.card(path)
    assert (path / "README.md").read_text().count(words) == 2
    assert "were not drawn, each with a known probability" in methods(facts)


def test_the_paragraph_says_whose_tokens_were_fed(path: Path) -> None:
    facts = describe(read_catalog(LocalStore(path)))
    run = facts.runs[0]

    def told(**known: object) -> str:
        values = {name.replace("__", "."): {"value": value} for name, value in known.items()}
        own = replace(run, provenance={**run.provenance, **values})
        return methods(replace(facts, runs=[own]))

    assert "temperature" in told() and "replay" not in told()
    words = told(replay__only="all", prompts__source="/home/me/G")
    assert "This is a replay: token sequences of another dataset" in words
    assert "sampled in them included" in words and "/home" not in words
    assert "temperature" not in words
    document = {"by": "document", "max_tokens": 150, "n_prompt": 64}
    words = told(prompts__continue=json.dumps(document))
    assert "those of documents: the first 64 of each and up to 150 that follow" in words
    assert "temperature" not in words
    words = told(
        prompts__continue=json.dumps({**document, "by": "model"}), sampling__temperature="1.0"
    )
    params = '{"stop":["END"],"top_p":"0.9"}'
    assert f"further sampling parameters {params}" in told(sampling__params=params)
    assert "further" not in told(sampling__params="none") and "further" not in told()
    assert "replay" not in told(prompts__continue="{") and "temperature" in told(
        prompts__continue="1"
    )
    assert "up to 150 were sampled after them" in words and "temperature 1.0" in words


def test_refuses_a_licence_or_an_audit_that_does_not_fit(path: Path, tmp_path: Path) -> None:
    before = (path / "README.md").read_bytes()
    for licence in ("", "CC BY 4.0", "mit\ntags: [x]", "-", "a" * 80):
        with pytest.raises(actds.ActdsError, match="E009 licence"):
            actds.card(path, licence=licence)
    file = tmp_path / "audit.json"
    with pytest.raises(actds.ActdsError, match=r"E009 audit .*No such file"):
        actds.card(path, audit=file)
    for changes in ({"digest": "0" * 64}, {"format": "actds.validate"}):
        with pytest.raises(actds.ActdsError, match="Audit the dataset as it is now"):
            actds.card(path, audit=audit_of(path, file, **changes))
    file.write_text("[]")
    with pytest.raises(actds.ActdsError, match="another document"):
        actds.card(path, audit=file)
    unsealed = make_dataset(tmp_path / "open", n_requests=3, sealed=False)
    with pytest.raises(actds.ActdsError, match="E306"):
        actds.card(unsealed)
    assert (path / "README.md").read_bytes() == before and not (unsealed / "README.md").exists()


def test_the_command_shows_the_verdict_of_a_real_audit(path: Path, tmp_path: Path) -> None:
    runner, file = CliRunner(), str(tmp_path / "audit.json")
    runner.invoke(cli, ["audit", str(path), "--json", file])
    found = json.loads(Path(file).read_text())
    said = runner.invoke(cli, ["card", str(path), "--audit", file, "--licence", "mit"])
    assert said.exit_code == 0, said.output
    card = (path / "README.md").read_text()
    assert f"**{found['answer']['level']}**" in card
    assert all(f"- {place['name']}: {place['level']}" in card for place in found["places"])
    # What an audit said is the owner's word: the card is still that of the seal.
    assert not [f for f in actds.validate(path).findings if f.code == "E110"]


def test_a_seal_writes_croissant_anew_where_there_is_one(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=3)
    assert not (path / "croissant.json").exists()
    actds.card(path)
    make_dataset(path, n_requests=3, run="r-second", seed=3)
    document = json.loads((path / "croissant.json").read_text())
    assert document["version"] == "2.0.0" and actds.open(path).digest in document["description"]


def test_croissant_lists_the_files_with_their_digests_and_the_columns(path: Path) -> None:
    actds.card(path)
    document = json.loads((path / "croissant.json").read_text())
    files = [one for one in document["distribution"] if one["@type"] == "cr:FileObject"]
    assert {one["@id"] for one in files} >= {
        file.relative_to(path).as_posix()
        for pattern in ("shards/*/tokens.parquet", "shards/*/acts.zarr/*/c/0/0", "census/*/*")
        for file in path.glob(pattern)
    }
    for one in files:
        data = (path / one["contentUrl"]).read_bytes()
        assert one["sha256"] == hashlib.sha256(data).hexdigest()
        assert one["contentSize"] == f"{len(data)} B"
    assert document["version"] == "1.0.0"
    hooks = {hook.name: hook for hook in describe(read_catalog(LocalStore(path))).hooks}
    for records in document["recordSet"]:
        if records["name"] in hooks:
            [rows] = records["field"]
            hook = hooks.pop(records["name"])
            assert (rows["isArray"], rows["arrayShape"]) == (True, f"-1,{hook.d_model}")
            continue
        columns = pq.read_schema(files_of(path, records["name"])[0]).names
        assert [one["name"] for one in records["field"]] == columns
    assert not hooks


def test_croissant_says_where_rows_come_from_and_what_is_known_to_lack(
    path: Path, tmp_path: Path
) -> None:
    actds.card(path)
    document = json.loads((path / "croissant.json").read_text())
    facts = describe(read_catalog(LocalStore(path)))
    assert document["conformsTo"][0].endswith("/croissant/1.1")
    activities = document["prov:wasGeneratedBy"]
    assert [one["prov:label"].split(",")[0] for one in activities] == [
        f"run {run.run}" for run in facts.runs
    ]
    assert {one["@type"] for one in activities} == {"prov:Activity"}
    assert document["prov:wasDerivedFrom"] == []  # a simulated run was given no prompts
    for name, value in (("source", "chats.jsonl"), ("sha256", "ab" * 32)):
        facts.runs[0].provenance[f"prompts.{name}"] = {"value": value}
    about = About("n", "d", "unknown", "m", [], [])
    made = json.loads(croissant(read_catalog(LocalStore(path)), facts, about, {}))
    assert made["prov:wasDerivedFrom"] == [
        {"@type": "prov:Entity", "prov:label": "chats.jsonl", "identifier": f"sha256:{'ab' * 32}"}
    ]
    assert document["rai:dataCollection"] == methods(facts)
    assert any("dropped" in gap for gap in document["rai:dataLimitations"])
    assert "rai:dataBiases" not in document
    # The verdict is the owner's to add, and what it says is not made again to compare it.
    actds.card(path, audit=audit_of(path, tmp_path / "audit.json"))
    document = json.loads((path / "croissant.json").read_text())
    assert document["rai:dataBiases"][1] == "rules: WARN (accepted), 3 % left out"
    assert not [f for f in actds.validate(path).findings if f.place.startswith("croissant")]
    other = json.dumps({**document, "rai:dataLimitations": []}, separators=(",", ":"))
    (path / "croissant.json").write_text(other + "\n")
    [finding] = [f for f in actds.validate(path).findings if f.place.startswith("croissant")]
    assert finding.code == "E110"
    actds.card(path)
