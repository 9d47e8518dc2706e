"""The text of the specification says what the code does: tables, clauses, examples, figures."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from actds.dataset import account as accounting
from actds.errors import CODES
from actds.format import arrays, canonical, codec, tables
from actds.format.arrays import MAX_CHUNK_NBYTES
from actds.format.shard import row_set_sha256
from actds.store.local import LocalFile
from actds_studies.regimes.entropies import AGREE
from actds_studies.regimes.instruments.probes import MIN_LABELLED
from actds_studies.stability import result as stability
from actds_studies.stability.rows import N_SCORED
from actds_testing.places import ROOT
from actds_validators.audit.covariates import LOADS, MAX_PROBES
from actds_validators.audit.missingness import LEVEL, MIN_TOKENS
from actds_validators.audit.result import MIN_BLAMED, PROVEN, Limits
from actds_validators.audit.weights import ENTROPY_EDGES, POSITION_EDGES, RARITY_EDGES
from actds_validators.audit.wording import CLEAR_P
from actds_validators.statistics.intervals import loss_that_allows
from actds_validators.statistics.strata import CUTS, MIN_HITS

SPEC = ROOT / "spec" / "0.1"
PAGES = {
    path.name[:2]: path.read_text()
    for path in sorted(SPEC.rglob("[0-9][0-9]-*.md"), key=lambda path: path.name)
}
TEXT = "\n".join(PAGES.values())
CLAUSES = set(re.findall(r"^#+ (\d+(?:\.\d+)*) ", TEXT, re.MULTILINE))


def test_the_format_is_short_and_every_page_is_listed() -> None:
    pages = sorted(SPEC.glob("[0-9][0-9]-*.md"))
    assert [path.name[:2] for path in pages] == [f"{n:02}" for n in (*range(1, 9), 10, 11, 13)]
    # The tables that are made from the code grow with it.
    generated = re.compile(r"<!-- begin generated.*?<!-- end generated -->", re.S)
    assert sum(len(generated.sub("", path.read_text()).encode()) for path in pages) <= 106_400
    listed = re.findall(r"\]\((0\.1/[^)#]+\.md)\) \|", (SPEC.parent / "README.md").read_text())
    written = [*pages, *SPEC.glob("annexes/*.md")]
    assert set(listed) == {f"0.1/{path.relative_to(SPEC)}" for path in written}
    assert not [name for name in ("witness", "*Ascending*") if name in TEXT]


def test_generated_blocks_are_those_of_the_code() -> None:
    loaded = importlib.util.spec_from_file_location("make_tables", ROOT / "spec" / "make_tables.py")
    assert loaded is not None and loaded.loader is not None
    make_tables = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(make_tables)
    stale = [path.name for path, text in make_tables.render() if path.read_text() != text]
    assert not stale, "run: python spec/make_tables.py"
    assert TEXT.count("<!-- begin generated") == TEXT.count("<!-- end generated") > 20


def test_every_error_code_stands_on_a_clause_and_every_code_in_the_text_exists() -> None:
    assert {entry.clause for entry in CODES.values()} <= CLAUSES
    named = set(re.findall(r"\bE\d{3}\b", TEXT))
    assert named == set(CODES)


def test_every_dataset_rule_is_named_by_its_code_outside_the_error_table() -> None:
    prose = "\n".join(text for page, text in PAGES.items() if page != "12")
    for low, high in re.findall(r"\bE(\d{3}) to E(\d{3})\b", prose):
        prose += "".join(f" E{number}" for number in range(int(low), int(high) + 1))
    ruled = {code for code in CODES if "E101" <= code < "E500" or code > "E600"}
    ruled -= {"E701", "E901"}  # of programs, not of datasets
    assert ruled <= set(re.findall(r"\bE\d{3}\b", prose))


def test_every_clause_that_a_docstring_or_the_text_cites_exists() -> None:
    cited: dict[str, str] = {}
    for room in ("actds", "writers", "validators"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for line in re.findall(r"Spec: 0\.1 sections? ([^\n]*)", path.read_text()):
                cited |= dict.fromkeys(re.findall(r"\d+(?:\.\d+)*", line), path.name)
    for page, text in PAGES.items():
        text = re.sub(r"RFC \d+, section [\d.]+", "", " ".join(text.split()))
        for line in re.findall(r"\bsections? (\d[\d.]*(?:(?: to | and |, )\d[\d.]*)*)", text):
            cited |= dict.fromkeys(re.findall(r"\d+(?:\.\d+)*", line), page)
    assert len(cited) > 15
    assert not {clause: place for clause, place in cited.items() if clause not in CLAUSES}


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*SPEC.rglob("[0-9][0-9]-*.md"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    pages.append(ROOT / "spec" / "README.md")
    broken = [
        f"{page.name}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert not broken


def test_examples_of_canonical_json_digest_and_roots_hold() -> None:
    line = next(line for line in PAGES["02"].splitlines() if line.startswith('    {"a"'))
    data = line.strip().encode() + b"\n"
    assert canonical.parse(data, "example") == {"b": [1, True, None], "a": "é\n/"}
    prose = " ".join(PAGES["02"].split())
    assert f"these {len(data)} bytes" in prose and canonical.digest(data) in prose
    assert canonical.merkle_root([b"a\n", b"b\n", b"c\n"]) in PAGES["02"]
    assert row_set_sha256([0, 1, 0], [0, 0, 1]) in PAGES["05"]
    assert f"{canonical.MAX_DOCUMENT_NBYTES:,} bytes" in prose
    assert f"at most {canonical.MAX_DEPTH} objects" in prose


def _hex_examples() -> list[bytes]:
    blocks, lines = [], []
    for line in [*PAGES["04"].splitlines(), ""]:
        pairs = re.match(r"    ((?:[0-9a-f]{2} {1,2})*[0-9a-f]{2})(?:  |$)", line)
        if pairs:
            lines.append(pairs[1])
        elif lines:
            blocks.append(bytes.fromhex("".join(lines)))
            lines = []
    return blocks


def test_examples_of_frames_decode_to_what_the_text_says(tmp_path: Path) -> None:
    frame, shard = _hex_examples()
    ones = np.zeros(128, np.uint16)
    codec.decode_chunk(frame, ones)
    assert (ones == 0x3F80).all() and len(frame) == 62
    (tmp_path / "0").write_bytes(shard)
    metadata = arrays.array_metadata(1, 2, "bfloat16")
    with arrays.ArrayReader(metadata, LocalFile(tmp_path / "0", "0"), "0") as reader:
        np.testing.assert_array_equal(reader.read_all(), [[0x3F80, 0xBF80]])
    assert codec.crc32c(b"123456789") == 0xE3069283 and "0xE3069283" in PAGES["04"]


def test_fill_bits_limits_and_block_size_of_the_text_are_those_of_the_code() -> None:
    prose = " ".join(PAGES["04"].split())
    for kind in arrays.DTYPES.values():
        assert f"0x{kind.fill:0{2 * kind.itemsize}X} ({kind.name})" in prose
    assert f"{codec.MAX_BLOCK_NBYTES:,} bytes" in prose
    assert f"{MAX_CHUNK_NBYTES:,} bytes" in prose


def _percent(part: float) -> str:
    return f"{100 * part:.2g} %"


def _listed(numbers: Sequence[float], last: str = ", ") -> str:
    return last.join(", ".join(f"{n:g}" for n in numbers).rsplit(", ", 1))


LIMITS = Limits()
NEGLIGIBLE = f"{LIMITS.negligible_bias:g} SD"
WARNS, FAILS = (_percent(s) for s in (LIMITS.worst_stratum_warn, LIMITS.worst_stratum_fail))
AUDIT_SAYS = {
    "docs/audit.md": (
        f"at most {NEGLIGIBLE} ({_percent(loss_that_allows(LIMITS.negligible_bias))})",
        f"within {_percent(LIMITS.max_shift)} (total variation)",
        f"of any mean is at most {NEGLIGIBLE}",
        f"over all, within {NEGLIGIBLE}",
        f"or {WARNS} of a kind of token is lost; or prefix-cache hits",
        f"or {FAILS} of a kind of token is lost; or losses",
        f"at least {LIMITS.min_events} independent loss events",
        f"a {_percent(PROVEN)} interval of the bias",
        f"±`negligible_bias` ({NEGLIGIBLE})",
        f"(`≤ {_percent(LIMITS.max_loss)}`, `≥ {LIMITS.min_events}`)",
        f"what lost {WARNS} (WARN, `worst_stratum_warn`)",
        f"or {FAILS} (FAIL, `worst_stratum_fail`)",
        f"your probes ({MAX_PROBES} a hook)",
        "where 2 % are, rare sources",  # of a measurement
    ),
    "spec/0.1/annexes/14-audit.md": (
        f"over the last {_listed(LOADS, ' and ')} steps",
        f"the moving average over {LOADS[0]} steps",
        f"{MAX_PROBES} of a hook",
        f"the {_percent(PROVEN)} interval of the bias",
        f"(two one-sided tests at {_percent((1 - PROVEN) / 2)})",
        f"that of each covariate at {_percent((1 - PROVEN) / 2)}",
        f"under {MIN_BLAMED} independent events",
        f"fewer than {MIN_BLAMED} events",
        f"(adjusted p up to {CLEAR_P:g})",
        f"where it holds {MIN_TOKENS} of them",
        f"strata of fewer than {MIN_TOKENS} tokens or of fewer than {MIN_HITS} stretches",
        f"over c of {_listed(CUTS, ' and ')}, times four",
        f"is to be at most {LEVEL:g}, and three blocks are to be hit",
        f"by rarity ({_listed(RARITY_EDGES)} bits)",
        f"by position ({_listed(POSITION_EDGES)})",
        f"({_listed(ENTROPY_EDGES)} bits)",
    ),
}


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("stability", f"less than the margin ({stability.Limits().margin:g} of matched cosine,"),
        ("stability", f"`--limit fvu={stability.Limits().fvu:g}`"),
        ("stability", f"`--limit auc={stability.Limits().auc:g}`"),
        ("stability", f"{MIN_LABELLED} requests of either label are the fewest"),
        ("stability", f"fitted on up to {N_SCORED:,} training rows"),
        ("stability", f"each arm is tested at {_percent(stability.LEVEL)}"),
        ("regimes", f"by more than {AGREE:g} nats in the median"),
    ],
)
def test_numbers_of_the_studies_in_the_guides_are_those_of_the_code(page: str, words: str) -> None:
    assert words in " ".join((ROOT / "docs" / f"{page}.md").read_text("utf-8").split())


@pytest.mark.parametrize("page", AUDIT_SAYS)
def test_numbers_of_the_audit_in_the_text_are_those_of_the_code(page: str) -> None:
    text = " ".join((ROOT / page).read_text("utf-8").split())
    text = re.sub("<!-- begin generated.*?<!-- end generated -->", "", text)
    for words in AUDIT_SAYS[page]:
        assert words in text, f"{page} does not say: {words}"
    for words in sorted(AUDIT_SAYS[page], key=len, reverse=True):
        text = text.replace(words, "")
    shares = [value for name, value in LIMITS if isinstance(value, float)]
    limits = [NEGLIGIBLE, *map(_percent, [*shares, PROVEN])]
    beyond = [re.findall(rf".{{30}}(?<![\w.]){re.escape(limit)}.{{10}}", text) for limit in limits]
    assert not any(beyond), "these are written by hand, and no test holds them"
    assert (len(CUTS), MIN_HITS) == (4, 3)  # in words


def _table_after(marker: str) -> list[dict[str, str]]:
    lines = PAGES["17"].split(f"<!-- example: {marker} -->")[1].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    block = rows[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(rows))]
    return [dict(zip(block[0], row, strict=True)) for row in block[2:]]


def _number(cell: str) -> int | None:
    return int(cell) if cell else None


def _scheduled(cell: str) -> list[tuple[int, range]]:
    found = re.findall(r"(\d+)(?: again)?: \[(\d+), (\d+)\)", cell)
    return [(int(r), range(int(a), int(b))) for r, a, b in found]


def _example_tables() -> dict[str, pa.Table]:
    """Return the tables of the worked example of section 17.1, as the text prints it."""
    prompt, generated = {0: 9, 1: 10, 2: 99}, {0: 3, 1: 2, 2: 0}
    ids = hashlib.sha256(struct.pack("<11I", *range(11))).hexdigest()
    spans = _table_after("spans")
    steps = _table_after("steps")
    names = ("batch", "captured", "recomputed", "dropped", "undelivered")
    counts = {name: [int(step[name]) for step in steps] for name in names}
    scheduled = [_scheduled(step["scheduled (request: positions)"]) for step in steps]
    prefill = [sum(p < prompt[r] for r, rng in step for p in rng) for step in scheduled]
    assert [sum(len(rng) for _, rng in step) for step in scheduled] == counts["batch"]
    n = len(steps)
    lost = [span for span in spans if span["disposition"] == "dropped"]

    def filled(name: tables.TableName, size: int, columns: dict[str, object]) -> pa.Table:
        defaults = {
            field.name: [None if field.nullable else "x" if field.type == pa.string() else 0] * size
            for field in tables.SCHEMAS[name]
        }
        return tables.build(name, {**defaults, **columns})

    return {
        "requests": filled(
            "requests",
            3,
            {
                "request": [0, 1, 2],
                "prompt_len": list(prompt.values()),
                "generated_len": list(generated.values()),
                "cached_tokens": [0, 8, 0],
                "engine_cached_tokens": [0, 8, None],
                "n_preemptions": [1, 0, 0],
                "finish_reason": ["length", "abort", "skipped"],
                "reason": [None, None, "E004 too long"],
                "token_digest": [ids, None, None],
            },
        ),
        "steps": filled(
            "steps",
            n,
            {
                "step": [int(step["step"]) for step in steps],
                "prefill_tokens": prefill,
                "decode_tokens": [b - p for b, p in zip(counts["batch"], prefill, strict=True)],
                **{f"{name}_tokens": counts[name] for name in names},
            },
        ),
        "spans": filled(
            "spans",
            len(spans),
            {
                **{k: [int(s[k]) for s in spans] for k in ("request", "start", "stop")},
                "disposition": [s["disposition"] for s in spans],
                "reason": [s["reason"] or None for s in spans],
                **{k: [_number(s[k]) for s in spans] for k in ("step", "ref_request")},
            },
        ),
        "drops": filled(
            "drops",
            len(lost),
            {
                **{k: [int(s[k]) for s in lost] for k in ("request", "start", "stop", "step")},
                "drop_reason": [s["reason"] for s in lost],
                "n_tokens": [int(s["stop"]) - int(s["start"]) for s in lost],
            },
        ),
        "tokens": _example_rows(scheduled, spans, prompt),
    }


def _example_rows(
    scheduled: list[list[tuple[int, range]]], spans: list[dict[str, str]], prompt: dict[int, int]
) -> pa.Table:
    """Return the rows that the captured spans ask for, each at its first computation."""
    captured = {
        (int(s["request"]), p)
        for s in spans
        if s["disposition"] == "captured"
        for p in range(int(s["start"]), int(s["stop"]))
    }
    rows: dict[tuple[int, int], tuple[int, int]] = {}
    chunks = dict.fromkeys(prompt, 0)
    for step, batch in enumerate(scheduled):
        for request, positions in batch:
            for position in positions:
                if (request, position) in captured:
                    rows.setdefault((request, position), (step, chunks[request]))
            chunks[request] += 1
    return tables.build(
        "tokens",
        {
            "request": [r for r, _ in rows],
            "position": [p for _, p in rows],
            "token_id": [p for _, p in rows],
            "phase": ["prefill" if p < prompt[r] else "decode" for r, p in rows],
            "step": [step for step, _ in rows.values()],
            "attempt": [int(step == 4) for step, _ in rows.values()],
            "chunk": [chunk for _, chunk in rows.values()],
            "flags": [0] * len(rows),
        },
    )


def test_worked_example_adds_up_to_the_totals_that_the_text_prints() -> None:
    example = _example_tables()
    census = [example[name] for name in ("requests", "steps", "spans", "drops")]
    account = accounting.account("r", *census, [example["tokens"]])
    assert account.findings == []
    printed = {name: int(total) for name, total in _table_after("totals")[0].items()}
    assert account.totals == printed
    line = {"run": "r", "request": 0, "start": 0, "stop": 8, "count": 2}
    assert account.multiplicity.to_pylist() == [line]


@pytest.mark.parametrize(
    ("table", "column", "row", "value", "code"),
    [
        ("spans", "start", 2, 9, "E404"),
        ("spans", "stop", 2, 11, "E405"),
        ("spans", "disposition", 0, "filtered", "E406"),
        ("drops", "drop_reason", 0, "disk_full", "E408"),
        ("steps", "recomputed_tokens", 4, 1, "E409"),
        ("requests", "engine_cached_tokens", 1, 4, "E411"),
        ("steps", "captured_tokens", 2, 2, "E412"),
        ("tokens", "token_id", 5, 77, "E414"),
    ],
)
def test_worked_example_with_one_number_changed_is_found_out(
    table: str, column: str, row: int, value: object, code: str
) -> None:
    example = _example_tables()
    lines = example[table].to_pylist()
    assert lines[row][column] != value
    lines[row][column] = value
    example[table] = pa.Table.from_pylist(lines, schema=example[table].schema)
    census = [example[name] for name in ("requests", "steps", "spans", "drops")]
    account = accounting.account("r", *census, [example["tokens"]])
    assert code in {finding.code for finding in account.findings}


def test_json_examples_are_what_they_stand_for() -> None:
    examples = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)]
    assert len(examples) == 7
    assert canonical.dump(examples[2]) == arrays.array_metadata(3000, 576, "bfloat16")
