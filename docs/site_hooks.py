"""What the documentation site adds to mkdocs: pages in their places, and the list of public names.

A page of the site has the path that its source has in the repository, so that a link which works
there works here, and a broken one fails the build.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import actds

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "*.md",
    "CITATION.cff",
    "docs/*.md",
    "docs/*.svg",
    "docs/answers/*.png",
    "spec/*.md",
    "spec/*/*.md",
    "spec/*/annexes/*.md",
    "spec/*/schemas/*.json",
    "spec/*/vectors/README.md",
    "spec/*/attacks/README.md",
    "benchmarks/*.md",
    "benchmarks/gpu/*.md",
    "benchmarks/results/*.md",
    "examples/*/README.md",
    "examples/*/*.svg",
    "examples/deploy/*.yaml",
    "examples/deploy/*.sbatch",
    "examples/*.ipynb",
)
API_PAGE = "docs/api.md"
PACKAGES = {
    "actds": ROOT,
    "actds_writers": ROOT / "writers",
    "actds_validators": ROOT / "validators",
    "actds_studies": ROOT / "validators",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the theme, and the pages at their paths in the repository."""
    found = sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)})
    pages = [
        File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
        for path in found
    ]
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *pages])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page; that of Python with everything in ``actds.__all__``."""
    if page.file.src_uri != API_PAGE:
        return markdown
    parts = [markdown]
    for heading, paths in public_names().items():
        parts += [f"## {heading}", *(f"::: {path}" for path in paths)]
    return "\n\n".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page without the roles of docstrings, such as ``:class:``."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):(?=<code>)", "", html)


def public_names() -> dict[str, list[str]]:
    """Return the paths of the public names and of the types that they return, by heading.

    Raises:
        PluginError: a name in ``actds.__all__`` that no import or definition stands for, or a
            public function, class or method without a docstring.
    """
    loader = griffe.GriffeLoader(search_paths=list(PACKAGES.values()))
    for package in PACKAGES:
        loader.load(package)
    loader.resolve_aliases()
    headings: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": [], "Constants": []}
    public = []
    for name in sorted(set(actds.__all__) - {"__version__"}):
        target = _find(f"actds.{name}", loader)
        if target is None:
            raise PluginError(f"actds.{name}: not found; name it in actds/__init__.pyi")
        public.append(target)
        headings[_heading(target)].append(f"actds.{name}")
    headings["Types that these return"] = _reached(public, loader)
    bare = sorted({path for target in public for path in _undocumented(target)})
    if bare:
        raise PluginError(f"public doors without a docstring: {', '.join(bare)}")
    return {heading: paths for heading, paths in headings.items() if paths}


def _find(path: str, loader: griffe.GriffeLoader) -> griffe.Object | None:
    try:
        found = loader.modules_collection[path]
        return found.final_target if isinstance(found, griffe.Alias) else found
    except (KeyError, griffe.AliasResolutionError):
        return None


def _undocumented(door: griffe.Object) -> Iterator[str]:
    if not door.has_docstring and isinstance(door, griffe.Class | griffe.Function):
        yield door.path
    if isinstance(door, griffe.Class):
        for name, member in door.members.items():
            if not name.startswith("_") and isinstance(member, griffe.Function):
                yield from _undocumented(member)


def _heading(target: griffe.Object) -> str:
    if target.is_class:
        return "Errors" if target.name.endswith("Error") else "Classes"
    return "Functions" if target.is_function else "Constants"


def _reached(public: list[griffe.Object], loader: griffe.GriffeLoader) -> list[str]:
    """Return the paths of our classes that one gets from the public names, and from those."""
    known = {target.path for target in public}
    reached = []
    todo = list(public)
    while todo:
        for path in _returned(todo.pop()):
            target = _find(path, loader) if path.split(".")[0] in PACKAGES else None
            if target is not None and target.is_class and target.path not in known:
                known.add(target.path)
                reached.append(target.path)
                todo.append(target)
    return sorted(reached)


def _returned(value: griffe.Object | griffe.Alias) -> Iterator[str]:
    """Yield the paths in what a function returns, or in the attributes and methods of a class."""
    if isinstance(value, griffe.Class):
        for name, member in value.members.items():
            if not name.startswith("_"):
                yield from _returned(member)
    elif isinstance(value, griffe.Function | griffe.Attribute):
        annotation = value.returns if isinstance(value, griffe.Function) else value.annotation
        if isinstance(annotation, griffe.Expr):
            names = annotation.iterate(flat=True)
            yield from (name.canonical_path for name in names if isinstance(name, griffe.ExprName))
