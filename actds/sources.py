"""What became of the records of the sources of a dataset, over all its runs; their labels."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.format import tables
from actds.format.labels import Label, label_text, parse_labels
from actds.reading import Catalog
from actds.text import counted

__all__ = [
    "LabelCount",
    "LabelFacts",
    "SourceFacts",
    "UnservedFacts",
    "label_facts",
    "read_records",
    "source_facts",
]

N_LARGEST = 8
_COLUMNS = ("source", "source_row", "finish_reason", "prompt_len", "reason", "labels")


@dataclass(frozen=True)
class UnservedFacts:
    """Records that no engine was given, of one finish reason and error code.

    Args:
        finish_reason: ``skipped`` or ``unbegun``.
        n_records: how many.
        n_tokens: tokens of their prompts; those that could not be encoded have none.
        reason: of the first of them.
    """

    finish_reason: str
    n_records: int
    n_tokens: int
    reason: str


@dataclass(frozen=True)
class SourceFacts:
    """The records of one source. One that any run served is served, whatever another says.

    Args:
        source: as the requests name it; None for requests whose source is not known.
        n_read: records that were read, None if no run record says it.
        n_served: records that an engine was given.
        n_unlisted: records that were read and are in no request.
        unserved: the others.
    """

    source: str | None
    n_read: int | None
    n_served: int
    n_unlisted: int
    unserved: list[UnservedFacts]

    def words(self) -> str:
        """Return the sum of the records in words."""
        parts = [f"{self.n_served:,} served"]
        for reason in tables.UNSERVED:
            some = [one for one in self.unserved if one.finish_reason == reason]
            if some:
                n, tokens = (sum(getattr(one, name) for one in some)
                             for name in ("n_records", "n_tokens"))  # fmt: skip
                parts.append(f"{n:,} {reason} ({counted(tokens, 'token')})")
        parts += [f"{self.n_unlisted:,} in no request"] if self.n_unlisted else []
        total = sum(one.n_records for one in self.unserved) + self.n_served + self.n_unlisted
        return f"{self.source}: {counted(total, 'record')} = {' + '.join(parts)}"


@dataclass(frozen=True)
class LabelCount:
    """A value of a label, and how many records have it."""

    value: Label
    n_records: int


@dataclass(frozen=True)
class LabelFacts:
    """A label of the records.

    Args:
        name: the label.
        n_records: records that have it.
        n_values: its different values.
        largest: those of most records, the largest first.
    """

    name: str
    n_records: int
    n_values: int
    largest: list[LabelCount]

    def words(self) -> str:
        """Return the values in words."""
        values = f"{counted(self.n_values, 'value')} in {counted(self.n_records, 'record')}"
        some = [f"{label_text(one.value)} ({one.n_records:,})"
                for one in self.largest]  # fmt: skip
        more = self.n_values - len(some)
        return f"{self.name}: {values}: {', '.join([*some, *([f'{more:,} more'] if more else [])])}"


def read_records(catalog: Catalog) -> pa.Table:
    """Return a line of the requests for each record, the one that says most of it.

    Raises:
        ActdsError: as ``Catalog.table``.
    """
    parts = [catalog.table("requests", run).select(_COLUMNS) for run in catalog.run_ids]
    lines = pa.concat_tables([tables.empty("requests").select(_COLUMNS), *parts])
    return lines.take(_once(lines))


def label_facts(records: pa.Table) -> list[LabelFacts]:
    """Return the labels of records, by name.

    Raises:
        ActdsError: E102 or E103 labels that are none.

    Spec: 0.1 section 6.3.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for line in pc.value_counts(records["labels"].drop_null()).to_pylist():
        for name, value in parse_labels(line["values"], "requests labels").items():
            counts[name][json.dumps(value)] += line["counts"]
    found = []
    for name, values in sorted(counts.items()):
        ranked = sorted(values.items(), key=lambda item: (-item[1], item[0]))
        largest = [LabelCount(json.loads(text), n) for text, n in ranked[:N_LARGEST]]
        found.append(LabelFacts(name, values.total(), len(values), largest))
    return found


def source_facts(catalog: Catalog, records: pa.Table) -> list[SourceFacts]:
    """Return what became of the records of every source that the requests name.

    Requests whose source is not known are told of only where some of them were not served.

    Args:
        catalog: the dataset.
        records: its records, of ``read_records``.

    Spec: 0.1 section 6.3.
    """
    read, named = _records_read(catalog), records["source"]
    found = []
    for source in pc.unique(named).to_pylist():
        own = records.filter(pc.is_null(named) if source is None else pc.equal(named, source))
        served = tables.is_served(own)
        unserved = _unserved(own.filter(pc.invert(served)))
        n_read = read.get(source)
        if source is not None or unserved:
            n_served = pc.sum(served).as_py()
            n_unlisted = max(0, (n_read or 0) - own.num_rows)
            found.append(SourceFacts(source, n_read, n_served, n_unlisted, unserved))
    return found


def _once(lines: pa.Table) -> pa.Array:
    """Return the line of each record that says most of it: served, else skipped, else unbegun."""
    words = pc.dictionary_encode(lines["source"].fill_null("")).unify_dictionaries()
    source = words.combine_chunks().indices.to_numpy()
    row = lines["source_row"].fill_null(-1).to_numpy()
    unserved = pc.index_in(lines["finish_reason"], pa.array(tables.UNSERVED)).fill_null(-1)
    order = np.lexsort((unserved.to_numpy(), row, source))
    key = np.stack([source[order], row[order]])
    # Of a request without a record nothing says that another one is the same.
    first = np.append(True, (key[:, 1:] != key[:, :-1]).any(axis=0))[: len(order)] | (key[1] < 0)
    return pa.array(np.sort(order[first]))


def _records_read(catalog: Catalog) -> dict[object, int]:
    found: dict[object, int] = {}
    for record in catalog.runs.values():
        fields = (record.fields.get(f"prompts.{name}") for name in ("source", "n_records"))
        named, n = (None if field is None else field.value for field in fields)
        if named is not None and isinstance(n, int):
            found[named] = max(n, found.get(named, 0))
    return found


def _unserved(lines: pa.Table) -> list[UnservedFacts]:
    found: dict[tuple[str, str], tuple[int, int, str]] = {}
    columns = (lines[name].to_pylist() for name in ("finish_reason", "prompt_len", "reason"))
    for finish_reason, n_tokens, reason in zip(*columns, strict=True):
        words = reason or "no reason given"
        key = finish_reason, words.partition(" ")[0]
        n, total, first = found.get(key, (0, 0, words))
        found[key] = n + 1, total + n_tokens, first
    return [UnservedFacts(finish_reason, *one) for (finish_reason, _), one in found.items()]
