"""Make a file of chat requests from text that comes with every Python.

    python examples/make_prompts.py demo/prompts.jsonl --n 256

Each request has the same long system prompt, so that an engine with a prefix cache reuses it, and
a user turn made of one docstring or one function of the standard library. The lengths have a long
tail. The same Python release gives the same bytes. Nothing is fetched; the library is read as text.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MODULES = """
abc argparse ast base64 bisect calendar cmd codecs collections/__init__ concurrent/futures/_base
configparser contextlib copy csv dataclasses datetime decimal difflib dis email/message enum
fileinput fnmatch fractions functools getopt gettext glob graphlib gzip hashlib heapq html/parser
http/client http/cookies inspect ipaddress json/decoder linecache locale logging/__init__ lzma
mailbox mimetypes operator os pathlib pickle platform plistlib posixpath pprint queue random
reprlib sched secrets selectors shelve shlex shutil smtplib socket socketserver statistics string
subprocess symtable tarfile tempfile textwrap threading timeit tokenize traceback types typing
unittest/case unittest/mock urllib/parse urllib/request uuid warnings weakref webbrowser zipfile
"""
"""Files of the standard library, by path without ending."""

SYSTEM_PROMPT = """\
You are a careful technical assistant for people who read and maintain Python programs. They show \
you a passage of the standard library: the documentation of a class or a function, or its source. \
Answer the question about that passage and nothing else. Begin with one plain sentence that says \
what the code is for. After that, name the arguments that matter, what is returned, and which \
exceptions a caller has to expect. If the passage does not say something, say that it does not, \
and do not guess from the name. Prefer short words and short sentences. When you quote code, quote \
it exactly as it stands, with its indentation. Never invent a function, an option or a version \
number. When a passage warns of a danger, such as a race, a security problem or a value that is \
silently changed, repeat the warning in your own words before anything else. If the question can \
be answered with yes or no, give that word first. Keep the whole answer under one hundred words, \
and end it without a summary, an offer of more help, or a question back to the reader.\
"""

DOC_QUESTIONS = (
    "What is `{name}` for? This is its documentation:",
    "Explain `{name}` to somebody who has never used it.",
    "Which mistakes does the documentation of `{name}` warn of?",
    "What does `{name}` return, and when does it raise?",
)
CODE_QUESTIONS = (
    "What does this function do?",
    "Find the edge cases that this code handles, and name one that it does not.",
    "Write a docstring of one line for this code.",
    "Can this function change its arguments?",
)

MEDIAN_CHARS = 260
SIGMA = 1.3
MAX_CHARS = 6000


@dataclass(frozen=True)
class Passage:
    """A docstring or a function of the standard library."""

    name: str
    kind: str
    text: str


def passages(stdlib: Path) -> Iterator[Passage]:
    """Yield the passages of the listed modules, in a fixed order."""
    for module in MODULES.split():
        path = stdlib / f"{module}.py"
        if not path.is_file():
            continue
        source = path.read_text(encoding="utf-8")
        dotted = module.replace("/", ".").removesuffix(".__init__")
        yield from _of_node(ast.parse(source), source.split("\n"), dotted)


def _of_node(node: ast.AST, lines: list[str], prefix: str) -> Iterator[Passage]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        name = f"{prefix}.{child.name}"
        doc = ast.get_docstring(child)
        if doc and len(doc) >= 40:
            yield Passage(name, "doc", doc)
        if not isinstance(child, ast.ClassDef):
            # Slicing lines: ast.get_source_segment splits the whole file for every function.
            code = textwrap.dedent("\n".join(lines[child.lineno - 1 : child.end_lineno]))
            if len(code) >= 80:
                yield Passage(name, "code", code)
        yield from _of_node(child, lines, name)


def cut(text: str, limit: int) -> str:
    """Return the text, cut after a whole line where it is longer than the limit."""
    if len(text) <= limit:
        return text
    head = text[:limit]
    line_end = head.rfind("\n")
    return head[:line_end] if line_end > limit // 2 else head


def user_turn(passage: Passage, question: str, limit: int) -> str:
    """Return the question and as much of the passage as fits the limit."""
    words = question.format(name=passage.name)
    body = cut(passage.text, limit)
    if passage.kind == "code":
        return f"{words}\n\n```python\n{body}\n```"
    return f"{words}\n\n{body}"


def requests(n: int, seed: int = 0) -> Iterator[dict[str, object]]:
    """Yield chat requests: every passage once, then again with another question and length."""
    pool = list(passages(Path(sysconfig.get_paths()["stdlib"])))
    if not pool:
        raise SystemExit("make_prompts: this Python carries no sources of its standard library")
    generator = random.Random(seed)
    generator.shuffle(pool)
    for number in range(n):
        lap, place = divmod(number, len(pool))
        passage = pool[place]
        questions = DOC_QUESTIONS if passage.kind == "doc" else CODE_QUESTIONS
        question = questions[(generator.randrange(len(questions)) + lap) % len(questions)]
        limit = int(generator.lognormvariate(math.log(MEDIAN_CHARS), SIGMA))
        turn = user_turn(passage, question, min(max(limit, 60), MAX_CHARS))
        yield {
            "id": f"{number:05d}-{passage.kind}-{passage.name}",
            "label": passage.kind,  # which the harvest does not read: probe.py does
            "messages": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": turn},
            ],
        }


def main() -> None:
    """Write the requests to the file named on the command line, at once or not at all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="JSONL file to write")
    parser.add_argument("--n", type=int, default=256, help="requests, 256 by default")
    parser.add_argument("--seed", type=int, default=0, help="seed of order and lengths")
    arguments = parser.parse_args()
    if arguments.n < 1:
        parser.error("--n needs to be at least 1")
    temporary = arguments.out.with_name(f".{arguments.out.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as stream:
        for request in requests(arguments.n, arguments.seed):
            stream.write(json.dumps(request, ensure_ascii=False) + "\n")
    temporary.replace(arguments.out)
    print(f"make_prompts: {arguments.n} requests in {arguments.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
