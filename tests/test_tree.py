"""The mass of the tree, and its circles, only shrink: a ratchet at today's numbers.

A change that raises a number says so in its commit. One that lowers a number by more than a
fiftieth writes the new one here.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

from actds_testing.places import ROOT

PACKAGES = {
    "actds": ROOT,
    "actds_writers": ROOT / "writers",
    "actds_validators": ROOT / "validators",
    "actds_studies": ROOT / "validators",
}
MOODS = {
    "asked", "away", "both", "found", "gone", "held", "mine", "one", "others", "own", "said",
    "there", "told", "which",
}  # fmt: skip
"""Names that say how a value was come by, and not what it is."""

LIMITS = {
    "shipped lines": 92_694,
    "modules": 274,
    "modules with one importer": 53,
    "arguments of one function": 15,
    "fmt: skip": 10,
    "public classes of one name in one package": 9,
    "names of mood": 4,
    "modules in circles": 0,
}


@cache
def modules() -> dict[str, Path]:
    """Return the file of each shipped module by its dotted name."""
    return {
        ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
        for package, base in PACKAGES.items()
        for path in sorted((base / package).rglob("*.py"))
    }


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in modules().items()}


@cache
def imports() -> dict[str, frozenset[str]]:
    """Return what each module imports at any time: late, for types, or by a string."""
    return {name: frozenset(imported(name)) - {name} for name in modules()}


def imported(name: str) -> set[str]:
    known, found = modules(), set()
    # Other strings may name a module too: the command of a process, a file format.
    by_string = "import_module" in known[name].read_text()
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {path if path in known else str(node.module) for path in inner}
        elif isinstance(node, ast.Constant) and by_string and isinstance(node.value, str):
            found.add(node.value.partition(":")[0])
    return found & known.keys()


def circles() -> set[frozenset[str]]:
    """Return groups of modules each of which imports, over others, itself."""
    graph = imports()
    reached = {name: below(name, graph) for name in graph}
    return {
        frozenset(other for other in beyond if name in reached[other])
        for name, beyond in reached.items()
        if name in beyond
    }


def below(name: str, graph: Mapping[str, Iterable[str]]) -> set[str]:
    """Return what a module imports, over any number of others."""
    reached: set[str] = set()
    ahead = [name]
    while ahead:
        new = set(graph[ahead.pop()]) - reached
        reached |= new
        ahead += new
    return reached


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])


@cache
def measured() -> dict[str, int]:
    nodes = {name: list(ast.walk(tree)) for name, tree in trees().items()}
    texts = [path.read_text() for path in modules().values()]
    importers = Counter(target for needs in imports().values() for target in needs)
    homes = defaultdict(set)
    for name, every in nodes.items():
        for node in every:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[name.partition(".")[0], node.name].add(name)
    functions = [
        node
        for every in nodes.values()
        for node in every
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    bound = [
        node.id if isinstance(node, ast.Name) else node.arg
        for every in nodes.values()
        for node in every
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    ]
    return {
        "shipped lines": sum(text.count("\n") for text in texts),
        "modules": len(texts),
        "modules with one importer": sum(importers[name] == 1 for name in modules()),
        "arguments of one function": max(map(arguments, functions)),
        "fmt: skip": sum(text.count("# fmt: skip") for text in texts),
        "public classes of one name in one package": sum(len(at) > 1 for at in homes.values()),
        "names of mood": sum(name in MOODS for name in bound),
        "modules in circles": sum(map(len, circles())),
    }


@pytest.mark.parametrize("name", LIMITS)
def test_the_tree_only_shrinks(name: str) -> None:
    now, limit = measured()[name], LIMITS[name]
    assert now <= limit, f"{name}: {now}, and {limit} before; delete first, or name it"
    assert now >= limit - max(1, limit // 50), f"{name}: {now}; write it here"


def test_no_circle_goes_over_packages() -> None:
    crossing = [group for group in circles() if len({name.split(".")[0] for name in group}) > 1]
    assert not crossing, crossing


@pytest.mark.parametrize(
    ("graph", "groups"),
    [
        ({"a": {"b"}, "b": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}}, [{"a", "b", "c"}]),
        ({"a": {"b"}, "b": {"a", "c"}, "c": {"b"}, "d": {"a"}}, [{"a", "b", "c"}]),
        ({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c", "a"}}, [{"a", "b"}, {"c", "d"}]),
    ],
)
def test_circles_are_found(
    graph: dict[str, set[str]], groups: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "imports", lambda: graph)
    assert circles() == set(map(frozenset, groups))
