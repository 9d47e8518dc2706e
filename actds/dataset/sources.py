"""What became of the records of the sources of a dataset, over all its runs; their labels."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.catalog import Catalog
from actds.errors import ActdsError
from actds.format import tables
from actds.format.labels import Label, label_text, parse_labels
from actds.format.schema import PART, parse_part
from actds.store import layout
from actds.text import counted

N_LARGEST = 8
Source = tuple[str | None, str | None]
"""Name of a source, and SHA-256 of its bytes; None where it is not known."""
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
        parts = [f"{self.n_served:,} served"]
        for reason in tables.UNSERVED:
            groups = [group for group in self.unserved if group.finish_reason == reason]
            if groups:
                n = sum(group.n_records for group in groups)
                tokens = sum(group.n_tokens for group in groups)
                parts.append(f"{n:,} {reason} ({counted(tokens, 'token')})")
        parts += [f"{self.n_unlisted:,} in no request"] if self.n_unlisted else []
        total = sum(group.n_records for group in self.unserved) + self.n_served + self.n_unlisted
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
        values = f"{counted(self.n_values, 'value')} in {counted(self.n_records, 'record')}"
        some = [f"{label_text(count.value)} ({count.n_records:,})" for count in self.largest]
        more = self.n_values - len(some)
        return f"{self.name}: {values}: {', '.join([*some, *([f'{more:,} more'] if more else [])])}"


def missing_parts(catalog: Catalog) -> list[str]:
    """Return the parts of the prompts that no run was to serve, where runs serve parts.

    A run that serves all prompts, as one that goes on with what parts have left, lacks none.

    Raises:
        ActdsError: E103 a part that is none.
    """
    counts: dict[int, set[int]] = defaultdict(set)
    for run in catalog.runs_with_data:
        text = catalog.runs[run].part if run in catalog.runs else ""
        if not text:
            return []
        try:
            number, n_parts = parse_part(text)
        except ValueError as error:
            place = f"{layout.run_path(run)} {PART}"
            raise ActdsError("E103", place, got=text[:80], expected=str(error)) from None
        counts[n_parts].add(number)
    n_parts = max(counts, default=0)
    return [f"{k}/{n_parts}" for k in range(1, n_parts + 1) if k not in counts[n_parts]]


def read_records(catalog: Catalog) -> pa.Table:
    """Return a line of the requests for each record, the one that says most of it.

    A record is a row of a source of the same bytes, and of a replay a request of its source; where
    a run says neither, as a server's, each request is one.

    Raises:
        ActdsError: as ``Catalog.table``.
    """
    parts = [tables.empty("requests").select(_COLUMNS)]
    keys, sources = [np.zeros((2, 0), np.int64)], dict[str | None, int]()
    for run in catalog.run_ids:
        requests = catalog.table("requests", run, ["request", *_COLUMNS])
        keys.append(_record_keys(catalog, run, requests, sources))
        parts.append(requests.select(_COLUMNS))
    lines, key = pa.concat_tables(parts), np.concatenate(keys, axis=1)
    # Served, else skipped, else unbegun.
    rank = pc.index_in(lines["finish_reason"], pa.array(tables.UNSERVED)).fill_null(-1).to_numpy()
    order = np.lexsort((rank, key[1], key[0]))
    key = key[:, order]
    first = np.append(True, (key[:, 1:] != key[:, :-1]).any(axis=0))[: len(order)]
    return lines.take(pa.array(np.sort(order[first])))


def _record_keys(
    catalog: Catalog, run: str, requests: pa.Table, sources: dict[str | None, int]
) -> npt.NDArray[np.int64]:
    """Return two numbers that name the record of each request in all runs, ``(2, n)``.

    Args:
        sources: number of each source and run that had one before; new ones are added.
    """

    def number(name: str | None) -> int:
        return sources.setdefault(name, len(sources))

    (_, digest), _ = _prompts(catalog, run)
    names = requests["source"].combine_chunks().dictionary_encode()
    codes = pc.fill_null(names.indices, len(names.dictionary)).to_numpy()
    named = (f"{digest} {name}" for name in names.dictionary.to_pylist())
    known = np.array([*map(number, named), number(None)])
    of_run = requests["request"].to_numpy().astype(np.int64)
    key = np.stack([known[codes], pc.fill_null(requests["source_row"], -1).to_numpy()])
    origins = catalog.table("origins", run, ["request", "source_run", "source_request"])
    order = np.argsort(of_run)
    place = order[np.searchsorted(of_run, origins["request"].to_numpy(), sorter=order)]
    key[0, place] = [number(f"run {name}") for name in origins["source_run"].to_pylist()]
    key[1, place] = origins["source_request"].to_numpy()
    alone = key[1] < 0
    key[:, alone] = np.stack([np.full(alone.sum(), number(f"alone in {run}")), of_run[alone]])
    return key


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
    facts = []
    for name, values in sorted(counts.items()):
        ranked = sorted(values.items(), key=lambda item: (-item[1], item[0]))
        largest = [LabelCount(json.loads(text), n) for text, n in ranked[:N_LARGEST]]
        facts.append(LabelFacts(name, values.total(), len(values), largest))
    return facts


def source_facts(catalog: Catalog, records: pa.Table) -> list[SourceFacts]:
    """Return what became of the records of every source that the requests name.

    Requests whose source is not known are told of only where some of them were not served.

    Args:
        catalog: the dataset.
        records: its records, of ``read_records``.

    Spec: 0.1 section 6.3.
    """
    named = records["source"]
    n_records: dict[str | None, int] = {}
    for (source, _), n in records_read(catalog).items():
        if n is not None:
            n_records[source] = n_records.get(source, 0) + n
    facts = []
    for source in pc.unique(named).to_pylist():
        lines = records.filter(pc.is_null(named) if source is None else pc.equal(named, source))
        served = tables.is_served(lines)
        unserved = _unserved(lines.filter(pc.invert(served)))
        n_read = n_records.get(source)
        if source is not None or unserved:
            n_served = pc.sum(served).as_py()
            n_unlisted = max(0, (n_read or 0) - lines.num_rows)
            facts.append(SourceFacts(source, n_read, n_served, n_unlisted, unserved))
    return facts


def records_read(catalog: Catalog) -> dict[Source, int | None]:
    """Return how many records were read of each source; None where no run over it says.

    A run that goes on with a source says it again: the largest number counts. Runs that ended
    before they began are left out.

    Spec: 0.1 section 6.3.
    """
    read: dict[Source, int | None] = {}
    for run in catalog.runs_with_data:
        key, n = _prompts(catalog, run)
        read[key] = max((m for m in (n, read.get(key)) if m is not None), default=None)
    return read


def _prompts(catalog: Catalog, run: str) -> tuple[Source, int | None]:
    fields = catalog.runs[run].fields if run in catalog.runs else {}
    name, digest, n = (
        fields[key].value if key in fields else None
        for key in ("prompts.source", "prompts.sha256", "prompts.n_records")
    )
    source = (None if name is None else str(name), None if digest is None else str(digest))
    return source, n if isinstance(n, int) else None


def _unserved(lines: pa.Table) -> list[UnservedFacts]:
    groups: dict[tuple[str, str], tuple[int, int, str]] = {}
    columns = (lines[name].to_pylist() for name in ("finish_reason", "prompt_len", "reason"))
    for finish_reason, n_tokens, reason in zip(*columns, strict=True):
        words = reason or "no reason given"
        key = finish_reason, words.partition(" ")[0]
        n, total, first = groups.get(key, (0, 0, words))
        groups[key] = n + 1, total + n_tokens, first
    return [UnservedFacts(finish_reason, *sums) for (finish_reason, _), sums in groups.items()]
