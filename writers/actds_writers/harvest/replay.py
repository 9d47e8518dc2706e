"""Replay: the exact token sequences of a dataset, prompt and sampled tokens, served again.

A source of requests for the same harvest, not a second one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from actds.dataset.catalog import Catalog
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.explore import dataset as reading
from actds.explore.dataset import Dataset
from actds.explore.requests import RowRanges, TokenSequence, lacking, token_sequences
from actds.format.inclusion import is_drawn
from actds.format.interventions import interventions_of
from actds.format.positions import Intervals, difference, position_key, split_key
from actds.format.schema import Hook
from actds.format.tables import UNSERVED
from actds.store import open_store
from actds.text import counted
from actds_writers.capture.hooks import hook_specs, parse_hooks
from actds_writers.config import ReplaySettings, WriteSettings, keywords_of
from actds_writers.engine_protocol import OPTION, EngineOptions, find_engine
from actds_writers.harvest.canary import compare, pairs_of
from actds_writers.harvest.prepare import Served, as_requests, files_facts, roles_field
from actds_writers.harvest.result import HarvestResult, Observer
from actds_writers.harvest.run import harvest
from actds_writers.ipc.messages import Fact
from actds_writers.model_folder import ModelFiles, file_sha256, model_config, model_name
from actds_writers.prompts.encoding import Encoded, load_tokenizer
from actds_writers.provenance import observed


def missing(dataset: Dataset) -> dict[tuple[str, int], Intervals]:
    """Return the positions that lack a row, by run and request; only requests that have some.

    Spec: 0.1 sections 7.2 and 7.4.
    """
    lacked: dict[tuple[str, int], Intervals] = {}
    for run in dataset.catalog.run_ids:
        owed = lacking(dataset.catalog, run)
        request, _ = split_key(owed.start)
        numbers, first = np.unique(request, return_index=True)
        starts, stops = (np.split(ends, first[1:]) for ends in (owed.start, owed.stop))
        for number, start, stop in zip(numbers.tolist(), starts, stops, strict=False):
            lacked[run, number] = Intervals(start, stop)
    return lacked


@dataclass(frozen=True)
class Filled:
    n_lacked: int
    why: Mapping[str, int]

    @property
    def n_left(self) -> int:
        return sum(self.why.values())

    def line(self) -> str:
        words = f"{self.n_lacked - self.n_left:,} of {self.n_lacked:,} positions that lacked a row "
        words += "have one now"
        if not self.n_left:
            return words
        reasons = ", ".join(f"{n:,} {why}" for why, n in self.why.items())
        return f"{words}; {self.n_left:,} still lack one: {reasons}"


def filled(owed: Mapping[tuple[str, int], Intervals], replay: Catalog) -> Filled:
    """Return of which missing positions a replay has a row, and why not of the others."""
    left = dict(owed)
    reasons = dict.fromkeys(owed, "not served")
    for run in replay.run_ids:
        rows = RowRanges.of(replay, run).positions
        unserved = {
            line["request"]: line
            for line in replay.table("requests", run).to_pylist()
            if line["finish_reason"] in UNSERVED
        }
        for line in replay.table("origins", run).to_pylist():
            name, again = (line["source_run"], line["source_request"]), line["request"]
            if name not in left:
                continue
            if again in unserved:
                if unserved[again]["finish_reason"] == "skipped":
                    code = (unserved[again]["reason"] or "").partition(" ")[0]
                    reasons[name] = f"in requests that cannot be served again ({code})"
                continue
            moved = position_key(again, 0) - position_key(name[1], 0)
            _, first, after = rows.cut(left[name].start + moved, left[name].stop + moved)
            left[name] = difference(left[name], Intervals(first - moved, after - moved))
            reasons[name] = "lost again"
    why: Counter[str] = Counter()
    for name, positions in left.items():
        if positions.n_keys:
            why[reasons[name]] += positions.n_keys
    return Filled(sum(intervals.n_keys for intervals in owed.values()), dict(why))


KIND = "dataset"
"""Value of ``prompts.kind`` in the run record of a replay."""


@keywords_of(ReplaySettings)
def replay(*, observer: Observer | None = None, **settings: Any) -> HarvestResult:
    """Serve the exact token sequences of a dataset again under other settings, into a new one.

    Each request of the source becomes one prompt, its sampled tokens included, so that every
    token is computed in prefill. The table ``origins`` leads each request to its source and says
    which tokens had been sampled there. Requests whose tokens are not all known are skipped, and
    are in the table ``requests`` with the reason.

    Args:
        observer: receives progress and result.
        settings: the fields of ``ReplaySettings``, the options of ``actds replay``: ``source``,
            ``out`` and ``model`` are required.

    Raises:
        ActdsError: E022 another model or tokenizer than the source's; E006 no request whose tokens
            are known, or that lacks a row, or nothing to compare; E418 a row that is not that of
            its replay; as ``open`` of the source, and as ``write``.

    Example:
        >>> actds.replay(
        ...     source="acts", out="alone", model="models/small", alone=True
        ... )  # doctest: +SKIP

    Spec: 0.1 section 6.3.
    """
    given = ReplaySettings.of(settings)
    source = reading.open(given.source)
    hooks = given.hooks or hooks_of(source.hooks.values())
    requests = Replays(given, source, observer or Observer())
    result = harvest(given.as_write(hooks), observer, served_by=requests.served, alone=given.alone)
    if given.compares and result.reason == "finished":
        requests.compare()
    return result


def hooks_of(hooks: Iterable[Hook]) -> str:
    """Return hooks as ``--hooks`` names them, for example ``resid_post:10,20;final``."""
    by_kind: dict[str, list[int | None]] = {}
    for hook in hooks:
        by_kind.setdefault(hook.kind, []).append(hook.layer)
    return ";".join(
        kind if kind in ("embed", "final") else f"{kind}:{','.join(map(str, layers))}"
        for kind, layers in by_kind.items()
    )


@dataclass(frozen=True)
class Replays:
    """The requests of a source, as a harvest serves them."""

    settings: ReplaySettings
    source: Dataset
    observer: Observer
    drawn: Set[tuple[str, int]] | None = None
    """Runs and numbers of the requests, where they were drawn otherwise than by the settings."""
    sequences: Sequence[TokenSequence] | None = None
    """What is served instead of the source's requests: parts of these, perhaps several times."""

    @cached_property
    def owed(self) -> dict[tuple[str, int], Intervals] | None:
        """Return the positions that are to be filled, by request; ``None`` to serve every one."""
        if self.settings.only != "missing":
            return None
        return {name: keys for name, keys in missing(self.source).items() if self._is_drawn(*name)}

    def _is_drawn(self, run: str, request: int) -> bool:
        if self.drawn is not None:
            return (run, request) in self.drawn
        dataset = self.source.catalog.genesis.dataset
        return bool(is_drawn(self.settings.seed, dataset, run, request, self.settings.fraction))

    def served(self, settings: WriteSettings, engine: EngineOptions, limit: int) -> Served:
        if engine.n_samples > 1:
            got = f"{engine.n_samples} samples of each request"
            raise ActdsError("E009", OPTION, got=got, expected="one: nothing is sampled")
        model = engine.files(settings.model)
        files = files_facts(model)
        self._require_model(model, files)
        if self.settings.compares:
            self._require_common_hook(settings, model)
            self._require_unchanged()
        adapter = find_engine(settings.engine).adapter_sha256(engine)
        encoded, client = as_requests(
            self._chosen(), self.source.catalog, lambda sequence: _skip(sequence, adapter, limit)
        )
        self._say_skipped(encoded)
        order = self._order(len(encoded))
        return Served(
            load_tokenizer(model.tokenizer),
            [encoded[i] for i in order],
            client,
            [*self._facts(encoded), *files],
        )

    def compare(self) -> None:
        """Say how the rows of the replay compare with those of the source, and what was filled.

        Raises:
            ActdsError: E418 a row that is not that of its replay; E006 nothing to compare.

        Spec: 0.1 section 7.9.
        """
        again = read_catalog(open_store(self.settings.out))
        if self.owed is not None:
            self.observer.compared("backfill", filled(self.owed, again).line())
        compared = compare(self.source.catalog, again, pairs_of(again, self._sequences()))
        words = f"{compared.n_rows:,} positions have a row in both: {compared.words()}"
        if not compared.n_rows:
            words = "NOTHING WAS COMPARED: no position has a row in both"
        self.observer.compared("compared", words)
        # A backfill of requests that lost every row has nothing to compare with.
        if not compared.n_rows and (self.settings.compare or compared.n_unreplayed):
            got, expected = "no position with a row in both", "at least one to compare"
            step = "Replay requests of which the source has rows: see actds info."
            raise ActdsError("E006", self.settings.out, got=got, expected=expected, next_step=step)
        wrong = compared.error(
            self.settings.source, "Do not join the two: what was computed differs."
        )
        if wrong is not None:
            raise wrong

    def _sequences(self) -> Iterator[TokenSequence]:
        for sequence in token_sequences(self.source):
            name = sequence.run, sequence.request
            if self._is_drawn(*name) if self.owed is None else name in self.owed:
                yield sequence

    def _chosen(self) -> list[TokenSequence]:
        if self.sequences is not None:
            return list(self.sequences)
        sequences = list(islice(self._sequences(), self.settings.max_requests))
        if not sequences and (self.owed is not None or self.settings.fraction < 1):
            lacks = " that lacks a row" if self.owed is not None else ""
            share = f" in a fraction of {self.settings.fraction:g}" * (self.settings.fraction < 1)
            step = "Nothing is missing: a row that was not drawn is not."
            if share:
                step = "Take a larger fraction, or another seed."
            got, place = f"no request{lacks}{share}", self.settings.source
            raise ActdsError("E006", place, got=got, expected="one to serve again", next_step=step)
        return sequences

    def _order(self, n: int) -> Sequence[int]:
        if self.settings.neighbours is None:
            return range(n)
        generator = np.random.Generator(np.random.Philox(key=self.settings.neighbours))
        order: list[int] = generator.permutation(n).tolist()
        return order

    def _facts(self, encoded: Sequence[Encoded]) -> list[Fact]:
        settings = self.settings
        return [
            Fact("prompts.source", PurePosixPath(self.source.path).name, "declared"),
            Fact("prompts.kind", KIND, "declared"),
            Fact("replay.only", settings.only or "all", "declared"),
            Fact("replay.fraction", repr(settings.fraction), "declared"),
            Fact("replay.seed", settings.seed, "declared"),
            Fact("replay.alone", settings.alone, "declared"),
            Fact(
                "replay.neighbours",
                "none" if settings.neighbours is None else settings.neighbours,
                "declared",
            ),
            observed("prompts.n_records", len(encoded)),
            observed("prompts.n_skipped", sum(e.skip is not None for e in encoded)),
            observed("prompts.sha256", self.source.digest),
            observed("prompts.roles", roles_field(encoded)),
            observed("tokenizer.chat_template_sha256", "none"),
        ]

    def _say_skipped(self, encoded: Sequence[Encoded]) -> None:
        skips = [e.skip for e in encoded if e.skip is not None]
        if skips:
            words = f"{len(skips)} of {counted(len(encoded), 'request')} are left out"
            self.observer.said(f"{words}; the first: {skips[0]}")

    def _require_common_hook(self, settings: WriteSettings, model: ModelFiles) -> None:
        config = model_config(model.config)
        places = parse_hooks(settings.hooks, int(config["num_hidden_layers"]))
        if not {hook.name for hook in hook_specs(places, config, "float32")} & set(
            self.source.hooks
        ):
            expected = f"some of {', '.join(self.source.hooks)}, to compare with"
            raise ActdsError("E009", "hooks", got=settings.hooks, expected=expected)

    def _require_unchanged(self) -> None:
        """Refuse to compare rows that interventions changed with rows that they did not."""
        changed = [run for run, record in self.source.runs.items() if interventions_of(record)]
        if changed or self.settings.intervene is not None:
            got = f"{changed[0]} with interventions" if changed else "interventions in the replay"
            expected = "rows that nothing changed on either side"
            raise ActdsError("E022", "compare", got=got, expected=expected)

    def _require_model(self, model: ModelFiles, files: Sequence[Fact]) -> None:
        given = {fact.name: fact.value for fact in files}
        given["model.config_sha256"] = file_sha256(model.config / "config.json")
        unknown: Counter[str] = Counter()
        for run in self.source.catalog.runs_with_data:
            record = self.source.runs[run]
            for name, value in given.items():
                field = record.fields.get(name)
                theirs = field.value if field is not None else None
                if theirs is None or value is None:
                    unknown[name] += 1
                elif theirs != value:
                    got = f"{str(value)[:16]}... of {model_name(model.weights)}"
                    expected = f"{str(theirs)[:16]}..., as in {run} of {self.settings.source}"
                    raise ActdsError("E022", name, got=got, expected=expected)
        for name in sorted(unknown):
            self.observer.said(f"{name} is not known on both sides, and was not compared.")


def _skip(sequence: TokenSequence, adapter: str | None, limit: int) -> str | None:
    """Return why a request cannot be served again, None where it can."""
    place = f"request {sequence.request} of {sequence.run}"
    if sequence.unknown is not None:
        return f"E022 {place}: {sequence.unknown}"
    if sequence.line["adapter"] is not None or adapter is not None:
        theirs = sequence.line["adapter_sha256"]
        if theirs is None or theirs != adapter:
            name = sequence.line["adapter"]
            words = "without an adapter" if name is None else f"with the adapter {name[:80]}"
            return f"E022 {place}: it was computed {words}, and this engine differs in that"
    n = len(sequence.token_id)
    if n >= limit:
        return (
            f"E004 {place}: {n} tokens leave no room for a generated one; expected at most "
            f"{limit - 1}"
        )
    return None
