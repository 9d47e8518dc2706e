"""Row expressions: ``where="phase == 'decode' and position >= 16 and request.source == 'wiki'"``.

An expression is parsed and its types are checked before anything is read; it then says which
columns it needs, and gives a mask of the rows of a shard. The syntax is Python's, and nothing of
Python is run: names, numbers, strings, comparisons, ``in``, ``is None``, ``and``, ``or``, ``not``
and arithmetic.
"""

from __future__ import annotations

import ast
import difflib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds.format import tables
from actds.format.inclusion import draws_rows, inclusion_of, inclusion_of_rows
from actds.format.labels import label_table, of_type
from actds.format.roles import Roles
from actds.format.sampled import Sampled
from actds.format.schema import Hook
from actds.format.shard import Shard
from actds.format.tables import TableName
from actds.loader.filters import bad, norms_of_hook

Values = Mapping[str, pa.Array]
Compiled = Callable[[Values], Any]

MAX_LENGTH = 10_000
"""Characters of an expression: more is a mistake, or an attack on the parser."""
MAX_DEPTH = 100
"""Levels of an expression."""


_NUMBERS = "integers of 64 bits, up to 2**53 beside fractions and /"
SAMPLED = ("token_id", "entropy", "logprob", "margin")
"""Columns of the table ``sampled`` that rows are joined to."""


class Kind(Enum):
    NUMBER = "a number"
    TEXT = "a string"
    TRUTH = "true or false"
    LABEL = "a label"


@dataclass(frozen=True)
class Column:
    """A column that an expression may name.

    Args:
        table: ``tokens``, ``requests``, ``steps`` or ``sampled``; ``readouts`` for ``norm``,
            ``roles`` for ``role``, ``labels`` for ``labels.NAME``, ``inclusion`` for itself; None
            for what is the same in all rows of a shard.
        flag: the bit of ``flags`` that it is; 0 for none.
    """

    name: str
    table: str | None
    kind: Kind
    flag: int = 0

    @property
    def arrow_type(self) -> pa.DataType:
        return _ARROW_TYPES[self.kind]


_ARROW_TYPES = {
    Kind.NUMBER: pa.int64(),
    Kind.TEXT: pa.string(),
    Kind.TRUTH: pa.bool_(),
    Kind.LABEL: pa.string(),
}


INCLUSION = "inclusion"
"""Probability with which the row was drawn (section 7.10)."""


def _columns() -> dict[str, Column]:
    columns = [Column("run", None, Kind.TEXT), Column("phase", None, Kind.TEXT)]
    columns.append(Column(INCLUSION, INCLUSION, Kind.NUMBER))
    for table, prefix in (("tokens", ""), ("requests", "request."), ("steps", "step.")):
        for field in tables.SCHEMAS[table]:  # type: ignore[index]
            kind = Kind.TEXT if pa.types.is_string(field.type) else Kind.NUMBER
            if not pa.types.is_nested(field.type):
                columns.append(Column(prefix + field.name, table, kind))
    flags = {"special": tables.FLAG_SPECIAL, "bos": tables.FLAG_BOS, "eos": tables.FLAG_EOS}
    columns += [Column(name, "tokens", Kind.TRUTH, flag) for name, flag in flags.items()]
    columns.append(Column("norm", "readouts", Kind.NUMBER))
    columns.append(Column("role", "roles", Kind.TEXT))
    columns += [Column(f"sampled.{name}", "sampled", Kind.NUMBER) for name in SAMPLED]
    # The manifest says the phase of a shard: its column needs no reading.
    return {column.name: column for column in reversed(columns)}


COLUMNS: dict[str, Column] = _columns()
"""Every column that an expression may name, but for the labels of a dataset's requests."""
LABELS = "labels."
ROLE = "role"
"""Who wrote the position (section 6.3): a column of batches and examples on request."""


def column_of(name: str) -> Column:
    return Column(name, "labels", Kind.LABEL) if name.startswith(LABELS) else COLUMNS[name]


_COMPARE = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def _divide(a: Any, b: Any) -> Any:
    return pc.divide(pc.cast(a, pa.float64()), pc.cast(b, pa.float64()))


def _floor_divide(a: Any, b: Any) -> Any:
    if not _are_integers(a, b):
        return pc.floor(_divide(a, b))
    b = pc.if_else(pc.equal(b, 0), pa.scalar(None, pa.int64()), b)  # by 0: nothing is known
    quotient = pc.divide_checked(a, b)  # towards 0
    rest = pc.subtract(a, pc.multiply(quotient, b))
    below = pc.and_(pc.not_equal(rest, 0), pc.not_equal(pc.less(rest, 0), pc.less(b, 0)))
    return pc.subtract(quotient, pc.cast(below, pa.int64()))


def _modulo(a: Any, b: Any) -> Any:
    # What wraps here in the product of integers wraps back in the difference.
    return pc.subtract(a, pc.multiply(b, _floor_divide(a, b)))


def _are_integers(a: Any, b: Any) -> bool:
    return bool(pa.types.is_integer(a.type) and pa.types.is_integer(b.type))


_ARITHMETIC = {
    ast.Add: pc.add_checked,
    ast.Sub: pc.subtract_checked,
    ast.Mult: pc.multiply_checked,
    ast.Div: _divide,
    ast.FloorDiv: _floor_divide,
    ast.Mod: _modulo,
}


@dataclass(frozen=True)
class Expression:
    """A checked expression over the rows of a dataset.

    A comparison with a value that is not recorded is unknown, as in SQL: ``not`` of it is unknown,
    too, and rows of which the whole is unknown are left out. ``is None`` asks for it.

    Args:
        text: the expression in one form, whatever its spaces and quotes were.
        columns: the names in it, sorted.
        kind: the type of its value.
    """

    text: str
    columns: tuple[str, ...]
    kind: Kind
    _compiled: Compiled
    _asks_for_none: bool

    def __str__(self) -> str:
        return self.text

    def mask(self, values: Values, n_rows: int) -> npt.NDArray[np.bool_]:
        """Return which rows it is true for, bool ``(n_rows,)``."""
        value = self._evaluate(values)
        if isinstance(value, pa.Scalar):
            return np.full(n_rows, value.as_py() is True)
        return np.asarray(pc.fill_null(value, False).to_numpy(zero_copy_only=False), np.bool_)

    def numbers(self, values: Values, n_rows: int) -> npt.NDArray[np.float64]:
        """Return its values as a new array, float64 ``(n_rows,)``; nan where they are unknown."""
        value = self._evaluate(values)
        if isinstance(value, pa.Scalar):
            value = pa.repeat(value, n_rows)
        with self._in_64_bits():
            floats = pc.cast(value, pa.float64())
        return np.array(floats.to_numpy(zero_copy_only=False), np.float64)

    def known(self, values: Values) -> bool | None:
        """Return what it is for every row with these values; None when other columns decide."""
        if self._asks_for_none:
            return None
        further = [name for name in self.columns if name not in values]
        unknown = {name: pa.nulls(1, column_of(name).arrow_type) for name in further}
        result = self._evaluate({**unknown, **values})
        value = result.as_py() if isinstance(result, pa.Scalar) else result[0].as_py()
        return value if isinstance(value, bool) else None

    def _evaluate(self, values: Values) -> Any:
        with self._in_64_bits():
            return self._compiled(values)

    @contextmanager
    def _in_64_bits(self) -> Iterator[None]:
        try:
            yield
        except pa.ArrowInvalid as error:
            raise ActdsError(
                "E014", f"expression {self.text}", got=str(error), expected=_NUMBERS
            ) from None


def parse_expression(text: str, argument: str, kind: Kind = Kind.TRUTH) -> Expression:
    compiler = _Compiler(text, argument)
    tree = compiler.parse()
    compiled = compiler.typed(tree, kind)
    return Expression(
        ast.unparse(tree), tuple(sorted(compiler.names)), kind, compiled, compiler.asks_for_none
    )


class _Compiler:
    """Turns a syntax tree into functions of columns, and checks types on the way."""

    def __init__(self, text: str, argument: str) -> None:
        self._text, self._argument = text, argument
        self._compiled: dict[ast.expr, tuple[Compiled, Kind]] = {}
        self.names: set[str] = set()
        self.asks_for_none = False

    def parse(self) -> ast.expr:
        if not isinstance(self._text, str) or not self._text.strip():
            raise self._bad(repr(self._text)[:80], "an expression, as phase == 'decode'")
        if len(self._text) > MAX_LENGTH:
            raise self._bad(f"{len(self._text)} characters", f"at most {MAX_LENGTH}")
        try:
            tree = ast.parse(self._text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            offset = getattr(error, "offset", None)  # none of a null byte
            at = "" if offset is None else f" at character {offset}"
            words = error.msg if isinstance(error, SyntaxError) else "nested too deep"
            if isinstance(error, ValueError) and not isinstance(error, SyntaxError):
                words = str(error)  # of a null byte, in older releases of Python
            raise self._bad(f"{words}{at}", "an expression, as phase == 'decode'") from None
        level, depth = [tree], 0
        while level := [child for node in level for child in ast.iter_child_nodes(node)]:  # type: ignore[misc]
            depth += 1
            if depth > MAX_DEPTH:
                expected = f"an expression of at most {MAX_DEPTH} levels"
                raise self._bad("parts nested too deep", expected)
        return tree

    def refuse(
        self, node: ast.expr, got: str, expected: str, next_step: str | None = None
    ) -> ActdsError:
        part = ast.get_source_segment(self._text.strip(), node) or ast.unparse(node)
        return self._bad(
            f"{got} in {part[:80]!r} at character {node.col_offset + 1}", expected, next_step
        )

    def _bad(self, got: str, expected: str, next_step: str | None = None) -> ActdsError:
        return ActdsError("E014", self._argument, got=got, expected=expected, next_step=next_step)

    def compile(self, node: ast.expr) -> tuple[Compiled, Kind]:
        if node in self._compiled:  # between two comparisons: nested ones would double each time
            return self._compiled[node]
        compiled = self._compiled[node] = self._compile(node)
        return compiled

    def _compile(self, node: ast.expr) -> tuple[Compiled, Kind]:
        match node:
            case ast.Constant():
                return self._constant(node)
            case ast.Name() | ast.Attribute():
                return self._column(node, ast.unparse(node))
            case ast.Subscript(value=ast.Name("labels"), slice=ast.Constant(str(name))):
                return self._column(node, LABELS + name)
            case ast.BoolOp(op=op, values=values):
                join = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
                parts = [self.typed(value, Kind.TRUTH) for value in values]
                return (lambda v: reduce(join, [part(v) for part in parts])), Kind.TRUTH
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.typed(operand, Kind.TRUTH)
                return (lambda v: pc.invert(inner(v))), Kind.TRUTH
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.typed(operand, Kind.NUMBER)
                return (lambda v: pc.negate_checked(inner(v))), Kind.NUMBER
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                act = _ARITHMETIC[type(op)]
                a, b = self.typed(left, Kind.NUMBER), self.typed(right, Kind.NUMBER)
                return (lambda v: act(a(v), b(v))), Kind.NUMBER
            case ast.Compare():
                return self._comparison(node), Kind.TRUTH
        raise self.refuse(
            node, "what is no part of an expression", "columns, values, comparisons, and, or, not"
        )

    def typed(self, node: ast.expr, kind: Kind) -> Compiled:
        compiled, actual = self.compile(node)
        if actual is Kind.LABEL:
            return _of_kind(compiled, kind)
        if actual is not kind:
            raise self.refuse(node, actual.value, kind.value)
        return compiled

    def _constant(self, node: ast.Constant) -> tuple[Compiled, Kind]:
        value = node.value
        if isinstance(value, bool):
            constant, kind = pa.scalar(value), Kind.TRUTH
        elif isinstance(value, str):
            constant, kind = pa.scalar(value, pa.string()), Kind.TEXT
        elif isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63):
            constant, kind = pa.scalar(value), Kind.NUMBER
        else:
            raise self.refuse(node, "a value of another type", "a number of 64 bits or a string")
        return (lambda _: constant), kind

    def _column(self, node: ast.expr, name: str) -> tuple[Compiled, Kind]:
        if name not in COLUMNS and not name.startswith(LABELS):
            known = f"{', '.join(sorted(COLUMNS))}, and labels.NAME"
            near = _near(name)
            raise self.refuse(
                node,
                f"no column {name!r}",
                f"one of {', '.join(near)}" if near else "a column",
                f"Columns: {known}.",
            )
        self.names.add(name)
        return operator.itemgetter(name), column_of(name).kind

    def _comparison(self, node: ast.Compare) -> Compiled:
        """Return all links of a chain of comparisons, joined by ``and``."""
        sides = [node.left, *node.comparators]
        links = [
            self._link(left, op, right)
            for left, op, right in zip(sides, node.ops, sides[1:], strict=False)
        ]
        return lambda v: reduce(pc.and_kleene, [link(v) for link in links])

    def _link(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Compiled:
        a, kind = self.compile(left)
        if isinstance(op, ast.In | ast.NotIn):
            if kind is Kind.LABEL:
                kind = self._kind_in(right)
                a = _of_kind(a, kind)
            member = self._member(a, kind, right)
            return member if isinstance(op, ast.In) else lambda v: pc.invert(member(v))
        if isinstance(op, ast.Is | ast.IsNot):
            if not isinstance(right, ast.Constant) or right.value is not None:
                raise self.refuse(right, "another value after is", "None")
            self.asks_for_none = True
            ask = pc.is_null if isinstance(op, ast.Is) else pc.is_valid
            return lambda v: ask(a(v))
        if isinstance(right, ast.Constant) and right.value is None:
            raise self.refuse(right, "a comparison with None", "is None, or is not None")
        if kind is Kind.LABEL:  # as what stands beside it; two labels as strings
            kind = self.compile(right)[1]
            kind = Kind.TEXT if kind is Kind.LABEL else kind
            a = _of_kind(a, kind)
        b = self.typed(right, kind)
        if kind is Kind.TRUTH and isinstance(op, _ORDERED):
            raise self.refuse(left, "true or false with an order", "== or !=")
        compare = _COMPARE[type(op)]
        return lambda v: compare(a(v), b(v))

    def _kind_in(self, right: ast.expr) -> Kind:
        match right:
            case ast.Tuple(elts=[first, *_]) | ast.List(elts=[first, *_]) | ast.Set([first, *_]):
                kind = self.compile(first)[1]
                return Kind.TEXT if kind is Kind.LABEL else kind
        return Kind.TEXT

    def _member(self, a: Compiled, kind: Kind, right: ast.expr) -> Compiled:
        if not isinstance(right, ast.Tuple | ast.List | ast.Set) or not right.elts:
            raise self.refuse(right, "no list after in", "values, as (1, 2, 3)")
        values = [self._value(element, kind) for element in right.elts]
        try:
            options = pa.array(values)
        except pa.ArrowInvalid:
            raise self.refuse(right, "an integer above 2**53 beside fractions", _NUMBERS) from None

        def member(columns: Values) -> Any:
            value = a(columns)
            # is_in says False of an unknown value, of which nothing is known.
            return pc.if_else(
                pc.is_valid(value), pc.is_in(value, options), pa.scalar(None, pa.bool_())
            )

        return member

    def _value(self, node: ast.expr, kind: Kind) -> Any:
        constant = node.operand if isinstance(node, ast.UnaryOp) else node
        if not isinstance(constant, ast.Constant):
            raise self.refuse(node, "no plain value after in", "values, as (1, 2, 3)")
        return self.typed(node, kind)({}).as_py()


def _near(name: str) -> list[str]:
    """Return the columns that may be meant: those that begin or end so, else of like letters."""
    begun = [column for column in COLUMNS if column.startswith(name) or column.endswith(f".{name}")]
    return sorted(begun, key=len)[:3] or difflib.get_close_matches(name, COLUMNS, n=3)


def _of_kind(label: Compiled, kind: Kind) -> Compiled:
    """Return labels as values of a type; one that has another is not known."""
    return lambda v: of_type(label(v), _ARROW_TYPES[kind])


class RowValues:
    """The columns that an expression names, joined to the rows of a shard.

    Args:
        hooks: the hooks that are read; ``norm`` is of the only one.
    """

    def __init__(self, dataset: Dataset, hooks: Sequence[Hook]) -> None:
        self._dataset, self._hooks = dataset, hooks
        self._tables: dict[tuple[str, str], pa.Table] = {}
        self._norms: dict[str, npt.NDArray[np.float32]] | None = None
        self._roles: dict[str, Roles] = {}
        self._sampled: dict[str, Sampled] = {}
        self._labels: dict[str, dict[str, pa.DictionaryArray]] = {}

    def constant(self, shard: Shard) -> dict[str, pa.Array]:
        """Return what manifest and run record say of all rows of a shard, each of length 1."""
        phase = None if "phase" in shard.unknown else shard.phase
        columns = {"run": pa.array([shard.run]), "phase": pa.array([phase], pa.string())}
        record = self._dataset.runs.get(shard.run)
        if not draws_rows(record):
            columns[INCLUSION] = pa.array([inclusion_of(record)])
        return columns

    def of(self, shard: Shard, names: Sequence[str]) -> dict[str, pa.Array]:
        """Return the named columns, each of ``n_rows``; integers as int64, null where unknown.

        Raises:
            ActdsError: E014 norms of several hooks, or of a run that has no norm readouts, or a
                label that no request has; E416 a row without its readout; and as
                ``Shard.tokens``.
        """
        chosen = [column_of(name) for name in names]
        constant = self.constant(shard)
        wanted = {
            "flags" if column.flag else column.name for column in chosen if column.table == "tokens"
        }
        if any(column.table in ("requests", "labels") for column in chosen):
            wanted |= {"request"}
        wanted |= {"step"} if any(column.table == "steps" for column in chosen) else set()
        if any(column.table in ("roles", "sampled") for column in chosen):
            wanted |= {"request", "position"}
        tokens = shard.tokens(sorted(wanted)) if wanted else None
        columns: dict[str, pa.Array] = {}
        for column in chosen:
            if column.name in constant:
                columns[column.name] = pa.repeat(constant[column.name][0], shard.n_rows)
            elif column.table == "readouts":
                columns[column.name] = pa.array(self._norm(shard))
            elif column.table == "roles":
                assert tokens is not None
                columns[column.name] = self._role(shard, tokens)
            elif column.table == "labels":
                assert tokens is not None
                columns[column.name] = self._label(column.name.removeprefix(LABELS), shard, tokens)
            elif column.table == "sampled":
                assert tokens is not None
                columns[column.name] = self._sampled_after(column.name, shard, tokens)
            elif column.table == INCLUSION:
                columns[column.name] = pa.array(self.inclusion(shard))
            else:
                assert tokens is not None and column.table is not None
                columns[column.name] = self._column(
                    column.name, column.table, column.flag, shard, tokens
                )
        return columns

    def inclusion(self, shard: Shard) -> npt.NDArray[np.float64]:
        """Return the probability that each row of a shard is there with, ``(n_rows,)``."""
        return inclusion_of_rows(shard, self._dataset.runs.get(shard.run))

    def provenance(self, shard: Shard, names: Sequence[str]) -> pa.Table:
        """Return columns of the token table, ``run`` and ``role``, ``(n_rows,)`` each.

        As stored, but for ``inclusion``, which every row has.
        """
        stored = [name for name in names if name not in ("run", ROLE)]
        wanted = {*stored, *(("request", "position") if ROLE in names else ())}
        tokens = shard.tokens(sorted(wanted)) if wanted else None
        columns: dict[str, Any] = {}
        for name in names:
            if name == "run":
                columns[name] = pa.repeat(pa.scalar(shard.run), shard.n_rows)
            elif name == INCLUSION:
                columns[name] = self.inclusion(shard)
            elif tokens is not None:
                columns[name] = self._role(shard, tokens) if name == ROLE else tokens[name]
        return pa.table(columns)

    def _column(self, name: str, table: str, flag: int, shard: Shard, tokens: pa.Table) -> pa.Array:
        source = "flags" if flag else name.partition(".")[0]
        if source in shard.unknown:
            return pa.nulls(shard.n_rows, column_of(name).arrow_type)
        if flag:
            return pa.array((tokens["flags"].to_numpy() & flag) != 0)
        if table == "tokens":
            return _wide(tokens[name])
        prefix, _, column = name.partition(".")
        lines = self._table(shard.run, cast("TableName", table))
        if not lines.num_rows:  # no census: read all the same, by somebody who said so
            return pa.nulls(shard.n_rows, column_of(name).arrow_type)
        at = np.searchsorted(lines[prefix].to_numpy(), tokens[prefix].to_numpy())
        return _wide(lines[column].take(pa.array(at)))

    def _label(self, name: str, shard: Shard, tokens: pa.Table) -> pa.Array:
        if not self._labels:
            for run in self._dataset.catalog.run_ids:
                self._labels[run] = label_table(self._table(run, "requests")["labels"])
        known = sorted({label for labels in self._labels.values() for label in labels})
        if name not in known:
            expected = f"one of {', '.join(known)}" if known else "none: requests have no labels"
            raise bad(LABELS + name, "no request has it", expected)
        labels = self._labels[shard.run].get(name)
        if labels is None or "request" in shard.unknown:
            return pa.nulls(shard.n_rows, pa.string())
        number = self._table(shard.run, "requests")["request"].to_numpy()
        at = np.searchsorted(number, tokens["request"].to_numpy())
        return labels.take(pa.array(at))

    def _table(self, run: str, name: TableName) -> pa.Table:
        if (run, name) not in self._tables:
            self._tables[run, name] = self._dataset.catalog.table(name, run).sort_by(name[:-1])
        return self._tables[run, name]

    def _role(self, shard: Shard, tokens: pa.Table) -> pa.Array:
        if not shard.unknown.isdisjoint(("request", "position")):
            return pa.nulls(shard.n_rows, pa.string())
        if shard.run not in self._roles:
            self._roles[shard.run] = Roles(self._dataset.catalog.table("roles", shard.run))
        return self._roles[shard.run].of(tokens["request"], tokens["position"])

    def _sampled_after(self, name: str, shard: Shard, tokens: pa.Table) -> pa.Array:
        if shard.run not in self._sampled:
            self._sampled[shard.run] = Sampled(self._dataset.catalog.table("sampled", shard.run))
        column = name.partition(".")[2]
        if not shard.unknown.isdisjoint(("request", "position")):
            return pa.nulls(shard.n_rows, tables.SCHEMAS["sampled"].field(column).type)
        values = self._sampled[shard.run].after(column, tokens["request"], tokens["position"])
        return _wide(pa.chunked_array([values]))

    def _norm(self, shard: Shard) -> npt.NDArray[np.float32]:
        if len(self._hooks) != 1:
            names = ", ".join(hook.name for hook in self._hooks)
            raise bad("norm", f"the norms of {names}", "an expression over norm with one hook")
        if self._norms is None:
            self._norms = norms_of_hook(self._dataset, self._hooks[0].name)
        return self._norms[shard.name]


def _wide(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array; integers as int64, in which differences do not wrap."""
    whole = column.combine_chunks()
    return pc.cast(whole, pa.int64()) if pa.types.is_integer(whole.type) else whole
