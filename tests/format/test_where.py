"""Row expressions: what they keep, as SQLite keeps it, and what is refused."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import actds
from actds.format.labels import dump_labels
from actds.format.readouts import Readouts
from actds.loader.where import COLUMNS, SAMPLED, Kind, parse_expression
from actds_testing.schedules import Schedule, busy_shares, simulate, table_of
from actds_testing.synthetic import make_dataset, make_thinned

HOOKS = ("resid_post.0", "resid_post.1")
Key = tuple[str, int, int]


def labelled(told: Schedule) -> Schedule:
    """Return a schedule whose requests have labels of every type; some have none."""
    lines = told.requests.to_pylist()
    for line in lines:
        n = line["request"]
        labels: dict[str, Any] = {"domain": ("code", "web", "maths")[n % 3]} if n % 4 else {}
        labels |= {"level": n, "my name": n % 2 == 0} if n % 5 else {}
        line["labels"] = dump_labels(labels)
    return told.with_(requests=table_of("requests", lines))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("where") / "acts"
    make_dataset(
        folder, schedule=labelled(simulate(25, 3)), seed=3, hooks=HOOKS, sealed=False,
        rows_per_shard=90, readouts=Readouts(1, seed=0),
    )  # fmt: skip
    return make_dataset(
        folder, n_requests=20, seed=4, hooks=HOOKS, run="r-second", readouts=Readouts(1, seed=0),
        roles=True, entropy=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def database(path: Path) -> sqlite3.Connection:
    """Return the rows with all columns that an expression may name, in a table of SQLite."""
    dataset = actds.open(path)
    connection = sqlite3.connect(":memory:")
    for name in ("tokens", "requests", "steps", "readouts", "roles", "sampled"):
        table = getattr(dataset, name)(run=True)
        lists = [f.name for f in table.schema if pa.types.is_nested(f.type)]
        table = table.drop_columns(lists)
        columns = ", ".join(f'"{column}"' for column in table.column_names)
        connection.execute(f"create table {name} ({columns})")
        marks = ", ".join("?" * table.num_columns)
        lines = zip(*(column.to_pylist() for column in table.columns), strict=True)
        connection.executemany(f"insert into {name} values ({marks})", lines)

    def renamed(table: str, key: str) -> str:
        columns = [r[1] for r in connection.execute(f"pragma table_info({table})")]
        return ", ".join(f'{table}."{c}" as "{key}.{c}"' for c in columns if c != "run")

    before = [f'{name} as "sampled.{name}"' for name in SAMPLED]
    after = [f'"sampled.{name}"' for name in SAMPLED]
    connection.execute(
        "create table rows as select tokens.*, n.norm, flags & 1 as special, "
        f"flags >> 1 & 1 as bos, flags >> 2 & 1 as eos, "
        "(select role from roles o where o.run = tokens.run and o.request = tokens.request "
        "and o.start <= position and position < o.stop) as role, "
        f"{renamed('requests', 'request')}, {renamed('steps', 'step')}, "
        f"{', '.join(after)}, {', '.join(LABELS.values())} "
        "from tokens join requests using (run, request) join steps using (run, step) "
        f"left join (select run, request, position - 1 as position, {', '.join(before)} "
        "from sampled) using (run, request, position) "
        "join (select run, request, position, min(norm) as norm from readouts "
        f"where hook = '{HOOKS[0]}' group by 1, 2, 3) n using (run, request, position)"
    )
    (n,) = connection.execute("select count(*) from rows").fetchone()
    assert n == dataset.n_rows
    return connection


LABELS = {
    written: f'json_extract(requests.labels, \'$."{name}"\') as "{column}"'
    for written, name, column in (
        ("labels.domain", "domain", "labels.domain"),
        ("labels.level", "level", "labels.level"),
        ("labels['my name']", "my name", "labels.mine"),
    )
}
"""Columns of the labels, by how an expression names them."""


def in_sql(expression: str) -> str:
    """Return an expression as SQLite writes it."""
    for written, column in LABELS.items():
        expression = expression.replace(written, column.rpartition(" as ")[2])
    for name in sorted(COLUMNS, key=len, reverse=True):
        if "." in name:
            expression = expression.replace(name, f'"{name}"')
    return expression.replace(" None", " null")


EXPRESSIONS = [
    "position >= 5",
    "phase == 'decode'",
    "phase == 'decode' and position % 3 == 1",
    "phase != 'decode' or token_id in (1, 2, 3, 5, 8, 13)",
    "not (4 < token_id) and position < 20",
    "run == 'r-second' and not position < 3",
    "position - request.prompt_len < -2",
    "request.prompt_len - position <= 3",
    "request.source is None",
    "request.source is not None and position > 1",
    "not request.engine_cached_tokens > 3",
    "request.engine_cached_tokens > 3 or position == 0",
    "request.engine_cached_tokens not in (0, 1)",
    "request.finish_reason == 'stop' and step.batch_tokens > 8",
    "step.kernel_mode == 'eager' or position == 1",
    "step.queue_depth_stage1 > 0",
    "attempt > 0 or chunk * 2 + 1 >= 3",
    "special == False and bos == False",
    "token_id / 2.0 > 12.5 and -position < -4",
    "norm > 3.9 and norm * norm < 20",
    "request in (0, 3, 4) and step >= 2",
    "role == 'assistant'",
    "sampled.entropy > 1",
    "sampled.entropy is None and phase == 'decode'",
    "sampled.margin * 2 < -sampled.logprob or sampled.token_id in (7, 8)",
    "role != 'assistant' and position >= 2",
    "role is None and run == 'r-second'",
    "labels.domain == 'code'",
    "labels.domain != 'code' and position > 2",
    "labels.domain in ('web', 'maths') or labels.level is None",
    "not labels.level >= 7",
    "labels.level > 2 and labels.level < 9 and labels.level * 2 > position",
    "labels['my name'] == True",
    "labels['my name'] and phase == 'prefill'",
    "'web' == labels.domain or not labels['my name']",
    "labels.domain is not None and labels.domain not in ('web', 'x')",
    "role in ('user', 'template') or not role == 'assistant' and phase == 'decode'",
]


def rows_of(loader: actds.Loader) -> list[Key]:
    found: list[Key] = []
    for _, rows in loader:
        columns = (rows[name].tolist() for name in ("run", "request", "position"))
        found += zip(*columns, strict=True)
    return sorted(found)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_rows_are_those_of_sqlite_each_once(
    path: Path, database: sqlite3.Connection, expression: str
) -> None:
    sql = f"select run, request, position from rows where {in_sql(expression)} order by 1, 2, 3"
    expected = [tuple(row) for row in database.execute(sql).fetchall()]
    options: dict[str, Any] = {"batch": 4, "lanes": 4, "window_rows": 128, "drop_last": False}
    if not expected:
        with pytest.raises(actds.ActdsError, match=r"E014 where: .* true for no row"):
            actds.Loader(path, HOOKS[0], where=expression, **options)
        return
    loader = actds.Loader(path, HOOKS[0], where=expression, provenance=True, **options)
    assert rows_of(loader) == expected
    assert loader.n_rows == len(expected)
    total = actds.open(path).n_rows
    shown = parse_expression(expression, "where").text
    assert f"{len(expected):,} of " in repr(loader) and shown in repr(loader)
    assert loader.config["where"] == [shown] and loader.config["rows_per_epoch"] <= total


def test_at_least_half_of_the_expressions_keep_some_rows_and_not_all(
    path: Path, database: sqlite3.Connection
) -> None:
    total = actds.open(path).n_rows
    kept = [
        database.execute(f"select count(*) from rows where {in_sql(e)}").fetchone()[0]
        for e in EXPRESSIONS
    ]
    assert sum(0 < n < total for n in kept) > len(EXPRESSIONS) * 0.7


@pytest.mark.parametrize("streaming", [True, False])
def test_datasets_keeps_the_same_rows(
    path: Path, database: sqlite3.Connection, streaming: bool, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    expression = "phase == 'decode' and request.prompt_len > 6"
    sql = f"select run, request, position from rows where {in_sql(expression)} order by 1, 2, 3"
    found = actds.load_dataset(
        path, streaming=streaming, hooks=HOOKS[0], where=expression, cache_dir=tmp_path,
        columns=["run", "request", "position"],
    )  # fmt: skip
    rows = sorted((row["run"], int(row["request"]), int(row["position"])) for row in found)
    assert rows == [tuple(row) for row in database.execute(sql).fetchall()]


@pytest.mark.parametrize(
    "expression, got, expected",
    [
        ("positon > 3", r"no column 'positon' in 'positon' at character 1", "one of position"),
        ("position > 'a'", r"a string in \"'a'\" at character 12", "a number"),
        ("phase == 3", r"a number in '3' at character 10", "a string"),
        ("position", "a number in 'position'", "true or false"),
        ("position and bos", "a number in 'position'", "true or false"),
        ("position >", "invalid syntax", "an expression"),
        ("", "''", "an expression"),
        ("phase == None", "a comparison with None", "is None"),
        ("position is 3", "another value after is", "None"),
        ("labels.domain == None", "a comparison with None", "is None"),
        ("labels.level < True", "true or false with an order", "== or !="),
        ("labels.domain in ()", "no list after in", "values"),
        ("labels[0] == 1", "no part of an expression", "columns"),
        ("token_id in 5", "no list after in", "values"),
        ("token_id in ()", "no list after in", "values"),
        ("token_id in (position,)", "no plain value after in", "values"),
        ("token_id in ('a',)", "a string", "a number"),
        ("bos < eos", "true or false with an order", "== or !="),
        ("__import__('os').system('x')", "no part of an expression", "columns"),
        ("(lambda: True)()", "no part of an expression", "columns"),
        ("[position for position in (1,)] == 1", "no part of an expression", "columns"),
        ("request.block_digests == 'a'", "no column 'request.block_digests'", "one of"),
        ("position == 1j", "a value of another type", "64 bits"),
        (f"position == {2**64}", "a value of another type", "64 bits"),
        ("not " * 2000 + "bos", "nested too deep", "an expression"),
        ("(" * 3000, "", "an expression"),
        ("bos or " * 2000 + "bos", "characters", "at most"),
        ("a" + ".b" * 900 + " > 1", "nested too deep", "at most 100 levels"),
        ("bos\x00", "null bytes", "an expression"),
        ("(" * 900 + "bos" + ")" * 900, "nested parentheses", "an expression"),
        ("position + " * 200 + "1 > 0", "nested too deep", "at most 100 levels"),
        ("pos > 3", "no column 'pos'", r"one of position\..*Columns: attempt, bos, .*step"),
        ("prompt_len > 3", "no column 'prompt_len'", r"one of request.prompt_len\."),
        ("colour == 'red'", "no column 'colour'", r"a column\..*Columns: attempt.*labels.NAME"),
        (f"step in ({2**53 + 1}, 1.5)", "above 2..53 beside fractions", "64 bits"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(
    path: Path, expression: str, got: str, expected: str
) -> None:
    with pytest.raises(actds.ActdsError, match=f"(?s)E014 where: .*{got}.*; expected .*{expected}"):
        actds.Loader(path, batch=4, where=expression)


def test_a_label_that_no_request_has_is_refused_with_those_there_are(path: Path) -> None:
    with pytest.raises(actds.ActdsError, match=r"E014 labels\.domian: .*domain, level, my name"):
        actds.Loader(path, batch=4, where="labels.domian == 'code'")


def test_comparisons_within_comparisons_take_no_longer_with_each_level() -> None:
    inner = "labels.a == 1"
    for _ in range(24):
        inner = f"labels.a == ({inner}) == labels.b"
    assert parse_expression(inner, "where").columns == ("labels.a", "labels.b")


def test_an_integer_that_leaves_64_bits_is_refused(path: Path) -> None:
    with pytest.raises(actds.ActdsError, match=r"E014 expression .*overflow"):
        actds.Loader(path, batch=4, where=f"(position + 1) * {2**62} > 0")


INTEGERS = [0, 1, -1, 3, -7, 1000, -1000, 2**53 + 1, -(2**53) - 1, 1_700_000_000_123_456_789, 2**62]


@pytest.mark.parametrize("divisor", [1, -1, 2, -3, 1000, 10**9, 2**53 + 1])
def test_integers_divide_as_those_of_python_do(divisor: int) -> None:
    values = {"position": pa.array(INTEGERS)}
    for sign, right in (("//", int.__floordiv__), ("%", int.__mod__)):
        for number in INTEGERS:
            expected = right(number, divisor)
            found = parse_expression(f"position {sign} {divisor} == {expected}", "where")
            assert found.mask(values, len(INTEGERS))[INTEGERS.index(number)], (number, sign)
            beside = parse_expression(f"position {sign} {divisor} == {expected + 1}", "where")
            assert not beside.mask(values, len(INTEGERS))[INTEGERS.index(number)], (number, sign)


def test_what_would_be_rounded_is_refused_and_nothing_is_known_of_a_division_by_zero() -> None:
    times = {"step.t_ns": pa.array([1_700_000_000_123_456_789])}
    for text in ("step.t_ns > 0.5", "step.t_ns / 1000 > 1", "step.t_ns * 1.0 > 1"):
        with pytest.raises(actds.ActdsError, match=r"E014 .*; expected .*2\*\*53"):
            parse_expression(text, "where").mask(times, 1)
    with pytest.raises(actds.ActdsError, match=r"E014 .*; expected .*2\*\*53"):
        parse_expression("step.t_ns", "weights", Kind.NUMBER).numbers(times, 1)
    for text in ("step.t_ns % 0 == 0", "not step.t_ns // 0 == 0"):
        assert not parse_expression(text, "where").mask(times, 1).any()
    assert parse_expression("step.t_ns % 0 is None", "where").mask(times, 1).all()


def test_a_norm_of_several_hooks_is_refused(path: Path) -> None:
    with pytest.raises(actds.ActdsError, match=r"E014 norm: .*resid_post.1; expected .*one hook"):
        actds.Loader(path, HOOKS, batch=4, where="norm > 1")


def test_a_state_of_another_expression_is_refused(path: Path) -> None:
    state = actds.Loader(path, batch=4, where="position > 3").state_dict()
    same = actds.Loader(path, batch=4, where="position>3")
    same.load_state_dict(state)
    with pytest.raises(actds.ActdsError, match="E014 state where"):
        actds.Loader(path, batch=4, where="position > 4").load_state_dict(state)


def test_shards_that_the_manifest_decides_are_not_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actds.format.shard import Shard

    dataset, read = actds.open(path), []
    tokens = Shard.tokens

    def watched(self: Shard, columns: list[str] | None = None) -> Any:
        read.append(self.phase)
        return tokens(self, columns)

    monkeypatch.setattr(Shard, "tokens", watched)
    loader = actds.Loader(dataset, HOOKS[0], batch=4, where="phase == 'decode' and position > 2")
    assert set(read) == {"decode"} and loader.n_rows > 0
    read.clear()
    actds.Loader(dataset, HOOKS[0], batch=4, where="phase == 'decode' and run != 'r-second'")
    assert not read


def test_only_rows_that_are_kept_are_held(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from actds.format.arrays import ArrayReader

    dataset = actds.open(path)
    sizes = []
    by_chunk = ArrayReader.by_chunk

    def watched(self: ArrayReader, rows: np.ndarray[Any, Any]) -> Any:
        sizes.append(len(rows))
        return by_chunk(self, rows)

    monkeypatch.setattr(ArrayReader, "by_chunk", watched)
    loader = actds.Loader(dataset, HOOKS[0], batch=2, where="position == 3", drop_last=False)
    assert sum(len(batch) for batch in loader) == sum(sizes) == loader.n_rows


def test_inclusion_is_that_of_the_row_times_that_of_its_request(tmp_path: Path) -> None:
    schedule = simulate(20, 3)
    facts = {"replay.fraction": "0.5"}
    path = make_thinned(tmp_path / "acts", schedule, busy_shares(schedule), facts=facts)
    make_dataset(path, n_requests=5, seed=3, run="r-second")
    tokens = actds.open(path).tokens(columns=["inclusion"], run=True).to_pylist()
    n_drawn = sum(row["inclusion"] == 0.25 for row in tokens)
    n_second = sum(row["run"] == "r-second" for row in tokens)
    assert n_drawn and n_second
    for where, n in (
        ("inclusion == 0.125", n_drawn),
        ("inclusion == 1", n_second),
        ("inclusion < 1 and run == 'r-second'", 0),
        ("inclusion < 1 and position >= 0", len(tokens) - n_second),
    ):
        if not n:
            with pytest.raises(actds.ActdsError, match="true for no row"):
                actds.Loader(path, HOOKS[0], batch=1, where=where, weights="inclusion")
        else:
            loader = actds.Loader(path, HOOKS[0], batch=1, where=where, weights="inclusion")
            assert loader.n_rows == n
    loader = actds.Loader(
        path, HOOKS[0], batch=1, weights=["multiplicity", "inclusion"], frequency="1 / inclusion"
    )
    weights = np.concatenate([rows["weight"] for _, rows in loader])
    assert set(weights.tolist()) == {1, 2, 8}
