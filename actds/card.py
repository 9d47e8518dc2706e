"""The dataset card: ``README.md``, generated at every seal, never read back."""

from __future__ import annotations

import re
from collections.abc import Iterator

from actds.describe import Facts, describe
from actds.format import layout
from actds.reading import Catalog
from actds.text import human_nbytes, printable, share

__all__ = ["card", "write"]

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&])")


def write(catalog: Catalog) -> None:
    """Write the card of a sealed dataset over an older one.

    Raises:
        ActdsError: E503 when the disk refuses.

    Spec: 0.1 section 2.4.
    """
    catalog.store.replace(layout.CARD, card(catalog).encode())


def card(catalog: Catalog) -> str:
    """Return the card: front matter that previews the tables, and what a visitor asks first.

    Spec: 0.1 section 2.4.
    """
    facts = describe(catalog)
    return "\n".join([*_front_matter(catalog), "", *_body(facts), ""])


def _front_matter(catalog: Catalog) -> Iterator[str]:
    # Only the tables: the hub infers one builder per repository, and arrays are none of its kinds.
    yield from ("---", "tags:", "- actds", "- activations", "configs:")
    configs = []
    if catalog.shards:
        configs.append(("tokens", "shards/*/tokens.parquet"))
    for table in ("requests", "steps", "spans", "drops", "stalls"):
        if any(name == table for _, name in catalog.parts):
            path = layout.part_path(table, "*", 0).replace("000000", "*")
            configs.append((table, path))
    if catalog.seal is not None:
        configs.append(("multiplicity", catalog.seal.multiplicity.path))
    for name, path in configs:
        yield from (f"- config_name: {name}", f'  data_files: "{path}"')
    yield "---"


def _body(facts: Facts) -> Iterator[str]:
    models = sorted({_fact(run.provenance, "model.name") for run in facts.runs})
    engines = sorted(
        {
            f"{_fact(run.provenance, 'engine.name')} {_fact(run.provenance, 'engine.version')}"
            for run in facts.runs
        }
    )
    yield f"# Activations of {', '.join(models)}"
    yield ""
    rows = sum(facts.phases.values())
    phases = ", ".join(f"{n:,} {phase}" for phase, n in facts.phases.items())
    yield (
        f"{rows:,} rows ({phases}) captured in {', '.join(engines)}. "
        f"Format actds {facts.format_version}; dataset `{facts.dataset}`, digest `{facts.digest}`."
    )
    yield from ("", "| hook | layer | rows | d_model | type | size | stored |")
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for hook in facts.hooks:
        sizes = f"{human_nbytes(hook.nbytes)} | {human_nbytes(hook.stored_nbytes)}"
        yield (
            f"| {_text(hook.name)} | {hook.layer} | {hook.n_rows:,} | {hook.d_model} "
            f"| {hook.dtype} | {sizes} |"
        )
    yield from ("", "## What became of every position", "", "| what | positions | share |")
    yield "| --- | --- | --- |"
    positions = sum(run.n_positions or 0 for run in facts.runs)
    for name in ("captured", "cache_ref", "dropped", "aborted", "filtered"):
        count = facts.totals.get(name, 0)
        yield f"| {_text(name)} | {count:,} | {share(count, positions)} |"
    unresolved = facts.totals.get("unresolved", 0)
    yield ""
    yield f"Of the cache references {unresolved:,} positions refer to no row."
    yield from ("", "## Use", "", "```python", "import actds", "")
    first = facts.hooks[0].name
    yield from (
        'dataset = actds.open("PATH")',
        f'rows = dataset.array("{first}")[:1024]',
        "```",
        "",
    )
    yield "`actds info PATH` shows the provenance of every run; `actds validate PATH` checks all."


def _fact(provenance: dict[str, dict[str, object]], name: str) -> str:
    value = provenance.get(name, {}).get("value")
    return "(unknown)" if value is None else _text(str(value))


def _text(text: str) -> str:
    """Return text that Markdown and HTML take literally."""
    return _SPECIAL.sub(r"\\\1", printable(text)).replace("\\<", "&lt;").replace("\\>", "&gt;")
