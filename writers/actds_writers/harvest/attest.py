"""Attestation: a random share of the requests of a dataset, served twice again by a stranger.

Before `fingerprints`, which judges: draws the requests, replays them in the precision on record and
in float32, and pairs the readouts of the dataset with those of the rows of both. No array of the
dataset is read.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.catalog import Catalog
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError, not_installed
from actds.explore.dataset import Dataset, open_apart
from actds.explore.requests import TokenSequence, token_sequences
from actds.format import tables
from actds.format.inclusion import salt_of, uniform
from actds.format.interventions import interventions_of
from actds.format.positions import position_key
from actds.format.readouts import Readouts, compute, directions, readouts_of
from actds.format.schema import DType, Hook, RunRecord
from actds.publish.attestation import Attestation, attester, put_attestation
from actds.store import open_store
from actds_writers.config import AttestSettings, ReplaySettings, keywords_of
from actds_writers.engine_protocol import find_engine
from actds_writers.harvest.canary import (
    ROWS_AT_A_TIME,
    Pair,
    computed_type,
    gather,
    locate,
    owners,
    pairs_of,
)
from actds_writers.harvest.fingerprints import MIN_REQUESTS, Answer, HookPairs, distances, score
from actds_writers.harvest.replay import Replays, hooks_of
from actds_writers.harvest.result import Observer
from actds_writers.harvest.run import harvest

Name = tuple[str, int]
"""Run and number of a request."""
Numbers = npt.NDArray[np.float32]
REFERENCE: DType = "float32"
PRECISION = ("numerics.dtype", "numerics.kv_cache_dtype", "model.quantization", "capture.cast")
EAGER = "serving.enforce_eager"
MODEL = ("model.name", "model.weights_sha256", "model.config_sha256", "tokenizer.sha256")
SERVED = (*MODEL, "engine.name", "engine.version", "machine.processor", *PRECISION, EAGER)
"""Fields of the run record of the first replay that an attestation names."""


@keywords_of(AttestSettings)
def attest(*, observer: Observer | None = None, **settings: Any) -> Attestation:
    """Serve a random share of a dataset again, and say whether its rows are of model and precision.

    The requests are served twice: in the precision on record, and in float32. The readouts of the
    dataset are compared with those of the rows of both, and no array of it is read. With a key the
    answer is signed, as an in-toto attestation beside the seal.

    Args:
        observer: receives progress.
        settings: the fields of ``AttestSettings``, the options of ``actds attest``: ``source`` and
            ``model`` are required.

    Raises:
        ActdsError: E006 no readout, or no request to serve again; E022 another model or precision
            than is on record; E011 scipy is not installed; as ``replay``, and as ``sign`` with a
            key.

    Example:
        >>> actds.attest(source="acts", model="models/small", fraction=0.01)  # doctest: +SKIP

    Spec: 0.1 section 15.7.
    """
    given = AttestSettings.of(settings)
    try:
        import scipy  # type: ignore[import-untyped]  # noqa: F401
    except ImportError:
        raise not_installed("scipy", "audit", "actds attest") from None
    seed = secrets.randbits(32) if given.seed is None else given.seed
    private = None if given.key is None else attester(given.source, given.key)
    source = open_apart(given.source)
    readouts = _readouts_of(source)
    drawn = draw(source, list(readouts), seed, given.fraction)
    with tempfile.TemporaryDirectory(prefix="actds-attest-", ignore_cleanup_errors=True) as folder:
        serving = _Serving(given, source, drawn, observer or Observer())
        replay = serving.serve(f"{folder}/replay")
        reference = serving.serve(f"{folder}/reference", REFERENCE)
        answer = compare_with(source, replay, reference, drawn, readouts)
        record = replay.runs[replay.runs_with_data[0]]
    assert source.catalog.seal is not None, "it is opened sealed"
    attestation = Attestation(
        dataset=source.catalog.genesis.dataset,
        seal=source.catalog.seal.n,
        digest=source.digest,
        verdict=answer.verdict,
        reason=answer.reason,
        fraction=given.fraction,
        seed=seed,
        n_requests=answer.n_requests,
        n_skipped=len(drawn) - answer.n_requests,
        far_requests=answer.far_requests[:20],
        served={name: _fact(record, name) for name in SERVED},
        hooks=answer.hooks,
        power=answer.power,
        not_seen=answer.not_seen,
    )
    if private is not None:
        put_attestation(given.source, attestation, private)
    return attestation


def _readouts_of(source: Dataset) -> dict[str, Readouts]:
    """Return the readouts of each run that has projections; raises E006 where none has."""
    readouts = {
        run: of_run
        for run in source.catalog.runs_with_data
        if run in source.runs
        and (of_run := readouts_of(source.runs[run])) is not None
        and of_run.n_projections
        and not interventions_of(source.runs[run])
    }
    if not readouts:
        step = "Write it with readouts, the default; or compare arrays: actds replay --compare."
        got, expected = "no readouts with projections", "a dataset that was written with readouts"
        raise ActdsError("E006", source.path, got=got, expected=expected, next_step=step)
    return readouts


def draw(
    source: Dataset, runs: Sequence[str], seed: int, fraction: float
) -> dict[Name, TokenSequence]:
    """Return the drawn requests of those whose tokens are all known, at least 5 of them.

    Raises:
        ActdsError: E006 there is none.

    Spec: 0.1 section 15.7.
    """
    dataset = source.catalog.genesis.dataset
    salts = {run: salt_of("actds attest", seed, dataset, run) for run in runs}
    below: list[tuple[float, Name, TokenSequence]] = []
    lowest: list[tuple[float, Name, TokenSequence]] = []
    for sequence in token_sequences(source):
        if sequence.run not in salts or sequence.unknown is not None or not len(sequence.token_id):
            continue
        number = float(uniform(salts[sequence.run], sequence.request))
        entry = (number, (sequence.run, sequence.request), sequence)
        if number < fraction:
            below.append(entry)
        else:
            lowest = sorted([*lowest, entry], key=itemgetter(0, 1))[:MIN_REQUESTS]
    lacking = max(0, MIN_REQUESTS - len(below))
    drawn = sorted([*below, *lowest[:lacking]], key=itemgetter(0, 1))
    if not drawn:
        got, expected = "no request whose tokens are all known", "some to serve again"
        raise ActdsError("E006", source.path, got=got, expected=expected)
    return {name: sequence for _, name, sequence in drawn}


@dataclass(frozen=True)
class _Serving:
    """How the drawn requests are served again."""

    given: AttestSettings
    source: Dataset
    drawn: Mapping[Name, TokenSequence]
    observer: Observer

    def serve(self, out: str, dtype: DType | None = None) -> Catalog:
        """Return a replay in the precision on record, or in another type and stored in it.

        Raises:
            ActdsError: E022 the replay does not compute as is on record.
        """
        records = [self.source.runs[run] for run in {name[0] for name in self.drawn}]
        recorded = {_fact(record, "numerics.dtype") for record in records}
        stored = {hook.dtype for hook in self.source.hooks.values()}
        options = {**find_engine(self.given.engine).uncompiled, **self.given.engine_args}
        if dtype is not None:
            options["dtype"] = dtype
        elif len(recorded) == 1 and None not in recorded:
            options = {"dtype": next(iter(recorded)), **options}
        is_cast = dtype is None and len(stored) == 1 and stored != recorded
        settings = ReplaySettings.of(
            {
                "source": self.given.source,
                "out": out,
                "model": self.given.model,
                "engine": self.given.engine,
                "engine_args": options,
                "store_dtype": next(iter(stored)) if is_cast else None,
                "order": "sequence",
                "readouts": False,
                "check": dtype is None,
            }
        )
        replays = Replays(settings, self.source, self.observer, self.drawn.keys())
        hooks = hooks_of(self.source.hooks.values())
        result = harvest(settings.as_write(hooks), self.observer, served_by=replays.served)
        if result.reason != "finished":
            raise ActdsError("E006", out, got="an interrupted replay", expected="a whole one")
        replay = read_catalog(open_store(out))
        if dtype is None:
            _require_precision(replay, records)
        return replay


def _require_precision(replay: Catalog, records: Sequence[RunRecord]) -> None:
    """Raise E022 unless a replay computes in the precision of run records, and is not compiled.

    Compiled rows lie nearer to exact ones than honest eager ones, which would be accused.
    """
    step = "Give in engine_args the options that the engine of the dataset had."
    required = [(name, {_fact(record, name) for record in records}, step) for name in PRECISION]
    required.append((EAGER, {"True"}, "Give the engine no option that compiles."))
    for name, values, step in required:
        theirs = values - {None}
        ours = {_fact(replay.runs[run], name) for run in replay.runs_with_data} - {None}
        if theirs and ours and theirs != ours:
            got, expected = (" and ".join(sorted(map(str, v))) for v in (ours, theirs))
            raise ActdsError("E022", name, got=got, expected=expected, next_step=step)


def _fact(record: RunRecord, name: str) -> str | None:
    field = record.fields.get(name)
    return None if field is None or field.value is None else str(field.value)


# the pairs ----------------------------------------------------------------------------------------


def compare_with(
    source: Dataset,
    replay: Catalog,
    reference: Catalog,
    drawn: Mapping[Name, TokenSequence],
    readouts: Mapping[str, Readouts],
) -> Answer:
    """Return the answer of two replays of drawn requests.

    Args:
        readouts: of each run.
    """
    names = list(drawn)
    parts: dict[str, list[HookPairs]] = {name: [] for name in source.hooks}
    types: list[DType] = []
    for run in dict.fromkeys(run for run, _ in names):
        of_run = {name[1]: n for n, name in enumerate(names) if name[0] == run}
        lines = readout_lines(source.catalog, run, {r: len(drawn[run, r].token_id) for r in of_run})
        again = [
            list(pairs_of(replayed, (drawn[run, request] for request in of_run)))
            for replayed in (replay, reference)
        ]
        types += [computed_type(source.catalog, run, replay, p.again_run) for p in again[0][:1]]
        for hook in source.hooks.values():
            of_hook = lines.filter(pc.equal(lines["hook"], hook.name))
            packed = directions(readouts[run].n_projections, hook.d_model, readouts[run].seed)
            parts[hook.name].append(
                _hook_pairs(of_hook, hook, packed, of_run, (replay, reference), again)
            )
    if not types:
        expected = "some that the engine takes"
        raise ActdsError("E006", source.path, got="no request was served", expected=expected)
    order: tuple[DType, ...] = ("bfloat16", "float16", "float32")
    words = [f"{run} request {request}" for run, request in names]
    whole = {
        name: _joined(of_hook, depth_of(source.hooks[name], source))
        for name, of_hook in parts.items()
    }
    return score(whole, words, min(types, key=order.index))


def readout_lines(catalog: Catalog, run: str, lengths: Mapping[int, int]) -> pa.Table:
    """Return the readouts of requests, the last one of each position and hook."""
    drawn = pa.array(list(lengths), pa.uint32())
    parts = [tables.empty("readouts")]
    for body in catalog.parts.get((run, "readouts"), []):  # not all of a large one at once
        part = catalog.read_table("readouts", body.file.path)
        parts.append(part.filter(pc.is_in(part["request"], drawn)))
    table = pa.concat_tables(parts)
    limit = np.array([lengths[request] for request in table["request"].to_pylist()], np.int64)
    table = table.filter(pa.array(table["position"].to_numpy() < limit))
    table = table.sort_by([(name, "ascending") for name in ("hook", "request", "position", "step")])
    hook = pc.index_in(table["hook"], pc.unique(table["hook"])).to_numpy()
    key = position_key(table["request"].to_numpy(), table["position"].to_numpy())
    last = np.append((hook[1:] != hook[:-1]) | (key[1:] != key[:-1]), True)[: len(key)]
    return table.filter(pa.array(last))


def _hook_pairs(
    lines: pa.Table,
    hook: Hook,
    packed: Numbers,
    numbers: Mapping[int, int],
    catalogs: Sequence[Catalog],
    served: Sequence[Sequence[Pair]],
) -> HookPairs:
    request, position = (
        lines[name].to_numpy().astype(np.int64) for name in ("request", "position")
    )
    flat = lines["projections"].combine_chunks().flatten().to_numpy()
    if len(flat) != len(lines) * packed.shape[1]:
        expected = f"{packed.shape[1]} a line, as the run record says"
        raise ActdsError("E109", f"readouts of {hook.name}", got="projections", expected=expected)
    stored = np.concatenate(
        [lines["norm"].to_numpy()[:, None], flat.reshape(len(lines), packed.shape[1])], axis=1
    )
    again, exact = (
        replayed_readouts(catalog, pairs, hook.name, packed, request, position)
        for catalog, pairs in zip(catalogs, served, strict=True)
    )
    has = ~(np.isnan(again[:, 0]) | np.isnan(exact[:, 0]))
    of_request = np.array([numbers[number] for number in request.tolist()], np.int64)
    apart, floor = (distances(rows[has], exact[has], hook.d_model) for rows in (stored, again))
    return HookPairs(of_request[has], apart, floor)


def replayed_readouts(
    replay: Catalog,
    pairs: Sequence[Pair],
    hook: str,
    packed: Numbers,
    request: npt.NDArray[np.int64],
    position: npt.NDArray[np.int64],
) -> Numbers:
    """Return the readouts of rows of a replay, ``(n, 1 + k)``; NaN where it has no row."""
    numbers = np.full((len(request), packed.shape[1] + 1), np.nan, np.float32)
    for run in {pair.again_run for pair in pairs}:
        of_run = {pair.request: pair for pair in pairs if pair.again_run == run}
        owner = owners(replay, run, {p.again: len(p.token_id) for p in of_run.values()})
        rows = np.flatnonzero(np.isin(request, list(of_run)))
        places = zip(request[rows].tolist(), position[rows].tolist(), strict=True)
        whose = [owner[of_run[number].again][at] for number, at in places]
        shards = [shard for shard in replay.shards_of(run) if hook in shard.hooks]
        at = locate(shards, position_key(np.array(whose, np.int64), position[rows]))
        present = np.flatnonzero(at.shard >= 0)
        for first in range(0, len(present), ROWS_AT_A_TIME):
            some = present[first : first + ROWS_AT_A_TIME]
            numbers[rows[some]] = compute(gather(shards, at.only(some), hook), packed)
    return numbers


def depth_of(hook: Hook, source: Dataset) -> float | None:
    """Return the share of the layers that are before a hook, None at the embedding."""
    layers = {_fact(record, "model.n_layers") for record in source.runs.values()} - {None}
    n = max([1 + (h.layer or 0) for h in source.hooks.values()] + [int(n or 0) for n in layers])
    return None if hook.kind == "embed" else 1.0 if hook.layer is None else (1 + hook.layer) / n


def _joined(parts: Sequence[HookPairs], depth: float | None) -> HookPairs:
    columns = ("request", "dataset", "replay")
    request, stored, again = (
        np.concatenate([getattr(part, name) for part in parts]) for name in columns
    )
    return HookPairs(request, stored, again, depth)
