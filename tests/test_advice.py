"""What errors, reports and pages tell a reader to type, open or install is there."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator

import click
import pytest

import actds
from actds.cli import cli
from actds.cli.command import as_typed
from actds.errors import CODES, ActdsError
from actds_testing.cli_tree import leaves
from actds_testing.places import DOCS, EXAMPLES, ROOT

COMMANDS = {path[0]: command for path, command in leaves(cli)}
OPTIONS = {
    name: {
        option
        for param in command.get_params(click.Context(command))
        for option in (*param.opts, *param.secondary_opts)
    }
    for name, command in COMMANDS.items()
}
PACKAGES = ("actds", "writers/actds_writers", "validators")
EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
PROSE = "projections|did|dataset|sets|to|where"
COMMAND = re.compile(rf"(?:^|[\s`(;:])actds (?!(?:{PROSE})\b)([a-z]+)\b")
OF_OTHERS = {
    "--additional-config", "--enable-lora", "--no-enable-prefix-caching", "--shutdown-timeout",
    "--pipeline-parallel-size", "--served-model-name",
}  # fmt: skip
"""Options of vLLM's server."""

# A report is printed by a command and names its options; an error of a function names arguments.
REPORTS = {
    "validators/actds_validators/audit/missingness.py": ("write",),
    "validators/actds_validators/audit/places.py": ("check",),
    "validators/actds_validators/audit/verdict.py": ("audit", "write"),
    "validators/actds_validators/audit/wording.py": ("audit", "replay", "write"),
    "validators/actds_validators/policy.py": ("write",),
    "validators/actds_studies/regimes/run.py": ("regimes", "write"),
    "validators/actds_validators/pages/accounting.py": ("audit",),
    "validators/actds_validators/pages/mechanism.py": ("audit",),
    "validators/actds_validators/pages/answer.py": ("audit", "regimes", "stability"),
    "validators/actds_studies/pages/regimes.py": ("regimes",),
    "validators/actds_validators/pages/report.py": ("audit",),
    "validators/actds_validators/pages/words.py": ("audit",),
    "validators/actds_studies/stability/result.py": ("stability",),
    "validators/actds_studies/attention/result.py": ("write",),
    "validators/actds_studies/steer/result.py": ("steer",),
    "validators/actds_studies/view/__init__.py": ("view",),
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))


def sentences(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module, no docstring, no word of a command line that a list makes."""
    aside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            aside |= {id(word) for word in node.elts if _is_word(word)}
        elif isinstance(node, ast.JoinedStr):
            aside |= set(map(id, node.values))
        elif isinstance(node, ast.Dict):  # of the options that a model of settings makes
            keys = [getattr(key, "value", None) for key in node.keys]
            aside |= {id(v) for k, v in zip(keys, node.values, strict=True) if k == "option"}
    for node in ast.walk(tree):
        if id(node) in aside:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield node.lineno, "".join(map(str, parts))


def _is_word(node: ast.expr) -> bool:
    value = getattr(node, "value", None)
    return isinstance(value, str) and value.startswith("-") and " " not in value


def wrong_options(text: str, commands: Iterable[str] = ()) -> Iterator[str]:
    """Yield what a sentence names and no command has.

    Args:
        commands: whose options the sentence may name without them.
    """
    for name in COMMAND.findall(text):
        if name not in COMMANDS:
            yield f"actds {name}"
    for found in OPTION.finditer(text):
        before = [name for name in COMMAND.findall(text[: found.start()]) if name in COMMANDS]
        owners = before[-1:] or commands
        if not any(found[0] in OPTIONS[owner] for owner in owners):
            yield found[0]


def is_cli(file: str) -> bool:
    ends = ("writers/config.py", "writers/cli.py", "actds_studies/study.py", "actds/codes.py")
    return "/cli/" in file or file.endswith(ends)


def test_an_error_of_a_function_names_no_option_and_a_report_those_of_its_command() -> None:
    wrong = [
        f"{file}:{line}: {name}: {text[:100]!r}"
        for file, tree in sources()
        if not is_cli(file)
        for line, text in sentences(tree)
        for name in wrong_options(text, REPORTS.get(file, ()))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_advice_of_a_code_names_what_it_is_about_and_commands_that_exist() -> None:
    for code, entry in CODES.items():
        advice = entry.next_step.replace("actds --debug", "")
        assert not list(wrong_options(advice)), code
        assert "named option" not in advice and "named argument" not in advice, code
        assert len(advice.split()) >= 3 or "actds" in advice, code


VAGUE = re.compile(
    r"named (?:line|file|key|rule|option|argument)\b|what was expected|value that was expected"
    r"|the (?:argument|option)\b(?! [a-z_]+\b)|^(?:Check|Correct|Fix|See|Try again)\b[^;,:]*\.$"
)
"""What advice must not say: it speaks of something without its name, or of no deed."""


def test_advice_names_the_thing_and_what_to_do_with_it() -> None:
    given = {code: [entry.next_step] for code, entry in CODES.items()}
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "next_step":
                given[f"{file}:{node.value.lineno}"] = [text for _, text in sentences(node.value)]
    vague = {place: text for place, texts in given.items() for text in texts if VAGUE.search(text)}
    assert len(given) > len(CODES) + 50 and not vague


def test_the_place_of_an_error_stands_in_its_advice_as_the_reader_knows_it() -> None:
    places = [code for code, entry in CODES.items() if "PLACE" in entry.next_step]
    assert {"E002", "E009", "E012", "E014", "E017", "E019", "E020"} <= {*places}
    for code in places:
        error = ActdsError(code, "rows_per_shard", got="x", expected="y")
        assert "rows_per_shard" in error.next_step and "PLACE" not in str(error)
    error = ActdsError("E009", "rows_per_shard", got="0", expected="1 or more")
    write = COMMANDS["write"].get_params(click.Context(COMMANDS["write"]))
    assert as_typed(error, write).next_step == "Give --rows-per-shard as it is expected."
    # A place with a backslash, as of an expression, is taken as it is.
    assert r"at a\1" in ActdsError("E014", r"a\1", got="x", expected="y").next_step


def test_a_page_names_commands_and_options_that_exist() -> None:
    every = set().union(*OPTIONS.values(), OF_OTHERS, {"--debug", "--version"})
    wrong = []
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *EXAMPLES.glob("*/README.md")]
    pages += (ROOT / "spec" / "0.1").rglob("[0-9][0-9]-*.md")
    for page in sorted(pages):
        text = page.read_text("utf-8").replace("\\\n", " ")
        for line in re.findall(r"^    .*$|`[^`\n]+`|^actds .*$", text, re.MULTILINE):
            command = re.search(r"(?:^|\s|`|/)actds ([a-z]+)(?=[ `]|$)", line)
            if command is None:
                known = every if line.lstrip("` ").startswith("--") else None
            elif command[1] not in COMMANDS:
                wrong.append(f"{page.name}: {line.strip()}")
                continue
            else:
                known = OPTIONS[command[1]]
                line = re.split(r"[;|#] ?", line[command.start() :])[0]
            wrong += [
                f"{page.name}: {option}: {line.strip()}"
                for option in OPTION.findall(line)
                if known is not None and option not in known
            ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_no_message_points_at_a_file_that_a_wheel_lacks() -> None:
    path = re.compile(r"\b(?:docs|spec|examples|benchmarks|tests)/[\w./-]*\w")
    wrong = [
        f"{file}:{line}: {found}"
        for file, tree in sources()
        for line, text in sentences(tree)
        for found in path.findall(text)
        if "https://" not in text and f"{file}" != "actds/cli/reference.py"
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_nothing_says_to_install_actds_from_an_index() -> None:
    by_name = re.compile(r"pip install (?:[\w-]+ )*[\"']?actds\b(?! @)")
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *DOCS.glob("*.md"),
        *EXAMPLES.rglob("*.md"),
    ]
    texts = [(page.name, page.read_text("utf-8")) for page in pages]
    texts += [(file, text) for file, tree in sources() for _, text in sentences(tree)]
    assert [file for file, text in texts if by_name.search(text)] == []
    named = {
        (file, extra)
        for file, text in texts
        for listed in re.findall(r"pip install [\"']?\.\[([\w,]+)\]", text)
        for extra in listed.split(",")
        if listed != "X"
    }
    assert named and not {(file, extra) for file, extra in named if extra not in EXTRAS | {"EXTRA"}}


def test_a_function_names_its_argument_and_a_command_the_option_that_sets_it() -> None:
    with pytest.raises(ActdsError) as raised:
        actds.regimes("nowhere", held_out=2.0)
    assert raised.value.place == "held_out" and "--" not in str(raised.value)
    params = COMMANDS["regimes"].get_params(click.Context(COMMANDS["regimes"]))
    assert str(as_typed(raised.value, params)).startswith("E009 --held-out: 2.0;")
    same = ActdsError("E014", "arms A and B", got="the same rows", expected="others")
    assert as_typed(same, params) is same  # no value of the argument
    error = ActdsError(
        "E009", "kind /some/path", got="kind=1", expected='one, for example kind="npy"',
        next_step="Or resume=True, check=False, rows_per_shard.",
    )  # fmt: skip
    params = [
        click.Option(["--from", "kind"]), click.Option(["--resume"], is_flag=True),
        click.Option(["--check/--no-check"]), click.Option(["--rows-per-shard"]),
    ]  # fmt: skip
    assert str(as_typed(error, params)) == (
        "E009 --from /some/path: kind=1; expected one, for example --from npy.\n"
        "Or --resume, --no-check, --rows-per-shard."
    )
