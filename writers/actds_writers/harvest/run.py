"""One harvest from the caller's process: plan, the runs of its engines, seal.

``python -m actds_writers.harvest.run`` replays canaries.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow.compute as pc

from actds.dataset.catalog import Catalog
from actds.dataset.info import recorded_cast
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.format.arrays import DTYPES
from actds.format.schema import RowCounts, Seal
from actds.format.telemetry import PROFILE
from actds.publish.sealing import seal
from actds.store import open_store
from actds_writers.config import WriteSettings, keywords_of
from actds_writers.engine_protocol import Finished, find_engine, refused
from actds_writers.harvest.canary import n_replayed
from actds_writers.harvest.one_engine import Ended, Feed, Run
from actds_writers.harvest.prepare import (
    Plan,
    ServedBy,
    check_metrics,
    check_out,
    compare_plan,
    discard_empty,
    finished_rows,
    has_dataset,
    hold,
    is_servable,
    is_taken,
    make_plan,
    require_prompt,
    runs_of,
    say_second_bos,
    without_finished,
)
from actds_writers.harvest.recover import clear_ended, recover_runs, require_accounted
from actds_writers.harvest.replicas import harvest_replicas, shares
from actds_writers.harvest.result import OF_CENSUS, HarvestResult, Observer, Totals


@keywords_of(WriteSettings)
def write(*, observer: Observer | None = None, **settings: Any) -> HarvestResult:
    """Harvest activations from a real engine into a new dataset, or resume one.

    Serves every prompt, stores the activations of every token that the engine computes, accounts
    for every token, and seals. Prints nothing. On the main thread, the first Ctrl-C or SIGTERM
    ends the harvest in order.

    Args:
        observer: receives progress and result.
        settings: the fields of ``WriteSettings``, the options of ``actds write``: ``out``,
            ``model``, ``prompts`` and ``hooks`` are required.

    Raises:
        ActdsError: what stopped it; everything committed before is sealed if possible.

    Example:
        >>> result = actds.write(
        ...     out="acts", model="models/small", prompts="prompts.jsonl", hooks="resid_post:10,20",
        ...     engine="transformers", engine_args={"max_num_seqs": 4}, max_tokens=64,
        ... )  # doctest: +SKIP
        >>> result.seal.totals["rows"]  # doctest: +SKIP
        18_432

    Spec: 0.1 section 9.
    """
    return harvest(WriteSettings.of(settings), observer)


_harvesting = threading.Lock()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Refuse a second harvest beside another one; raises E009.

    Engines find their harvest in the environment, of which a process has one.
    """
    if not _harvesting.acquire(blocking=False):
        got = "a second harvest in this process, while the first is under way"
        expected = "one after the other"
        step = "Wait for the first, or start each in a process of its own."
        raise ActdsError("E009", "actds.write", got=got, expected=expected, next_step=step)
    try:
        yield
    finally:
        _harvesting.release()


@_one_at_a_time()
def harvest(
    settings: WriteSettings,
    observer: Observer | None = None,
    feed: type[Feed] | None = None,
    *,
    served_by: ServedBy | None = None,
    alone: bool = False,
) -> HarvestResult:
    """Harvest into a new or a resumed dataset; raises as ``write``."""
    began, observer = time.monotonic(), observer or Observer()
    kind = find_engine(settings.engine)
    engine = kind.checked(settings.engine_args)
    engine = kind.alone(engine) if alone else engine
    n_replicas = kind.replicas(engine)
    for what in ("canary", "executor"):
        if getattr(settings, what) is not None:
            kind.require_one_node(engine, what)
    if settings.executor is not None and n_replicas > 1:
        got = f"{n_replicas} replicas on one machine, and a cluster"
        raise ActdsError("E009", "executor", got=got, expected="engines=N")
    if settings.canary is not None:
        n_replayed(settings.canary, 0)
        if engine.n_samples > 1:
            got = f"{engine.n_samples} samples of each prompt"
            expected = "one: a replay must know which of them it compares with"
            raise ActdsError("E009", "canary", got=got, expected=expected)
    if settings.entropy:
        kind.require_logits(engine)
    if settings.intervene is not None and not kind.intervenes:
        got, expected = f"the engine {kind.name}, which changes no rows", "vllm or transformers"
        raise refused("intervene", got, expected)
    if settings.attention is not None and not kind.attends:
        got = f"the engine {kind.name}, which looks at no attention"
        raise refused("attention", got, "vllm, or rows of q, k, v and z: actds attention")
    check_out(settings)
    check_metrics(settings)
    observer.doing(f"Reading {settings.prompts}, and the weights of {settings.model} for a digest")
    plan = make_plan(settings, engine, n_replicas, served_by)
    say_second_bos(plan, observer.said)
    created = not is_taken(settings.out)
    if created:
        require_prompt(settings, plan)
    lock = hold(settings.out, shared=bool(settings.part or settings.executor))
    try:
        is_begun = has_dataset(settings.out)
        if settings.resume and is_begun:
            observer.doing(f"Looking for the requests that {settings.out} has")
            done = finished_rows(settings.out, plan, settings.part, observer.said)
            plan = without_finished(plan, done)
            if not is_servable(plan):
                sealed = None if settings.part else seal(open_store(settings.out))
                result = HarvestResult(settings.out, None, "finished", sealed)
                observer.ended(result)
                return result
        elif is_begun and settings.part is not None:
            compare_plan(read_catalog(open_store(settings.out)), plan)
        if settings.executor == "ray":
            from actds_writers.harvest.cluster import harvest_cluster

            ended = harvest_cluster(settings, plan, observer)
        elif n_replicas > 1:
            ended = harvest_replicas(settings, shares(settings, plan, n_replicas), lock, observer)
        else:
            ended = [Run(settings, plan, lock, began, observer, feed or Feed).run()]
        return _result(settings, ended, began, observer)
    finally:
        os.close(lock)
        if created and settings.part is None:  # another part may begin there
            discard_empty(settings.out)


@_one_at_a_time()
def harvest_plan(
    settings: WriteSettings,
    plan: Plan,
    heard: Callable[[Finished], None] | None = None,
    feed: type[Feed] | None = None,
) -> HarvestResult:
    """Harvest a plan into a new dataset, reporting finished requests; raises as ``write``."""
    lock = hold(settings.out)
    try:
        began, observer = time.monotonic(), Observer()
        run = Run(settings, plan, lock, began, observer, feed or Feed)
        if heard is not None:
            run.feed.heard = heard
        return _result(settings, [run.run()], began, observer)
    finally:
        os.close(lock)


def _result(
    settings: WriteSettings, runs: Sequence[Ended], began: float, observer: Observer
) -> HarvestResult:
    """Seal the dataset after all runs have ended; return the result, or raise what stopped one."""
    failure = next((ended.failure for ended in runs if ended.failure is not None), None)
    if failure is not None:
        _seal_what_there_is(settings, observer)
        raise failure
    if not has_dataset(settings.out):
        raise ActdsError(
            "E006", "harvest", got="interrupted before the first step", expected="a step"
        )
    sealed = None
    if settings.part is None:
        observer.doing(f"Sealing {settings.out}")
        sealed = seal(open_store(settings.out))
    # A replica that was interrupted before its first step has written nothing.
    counted = [ended for ended in runs if ended.totals and "captured" in ended.totals["census"]]
    outcomes = [ended.outcome for ended in runs if ended.outcome is not None]
    result = HarvestResult(
        path=settings.out,
        run=counted[0].run if counted else runs[0].run,
        reason="interrupted" if any(ended.interrupted for ended in runs) else "finished",
        seal=sealed,
        totals=_totals(settings.out, counted, time.monotonic() - began, sealed)
        if counted
        else None,
        canary=outcomes[0] if len(outcomes) == 1 else None,
        runs=tuple(ended.run for ended in counted if ended.run is not None),
    )
    observer.ended(result)
    for ended in runs:
        wrong = ended.outcome.error("canary") if ended.outcome is not None else None
        if wrong or ended.replay_failure:
            raise wrong or ended.replay_failure  # type: ignore[misc]
    return result


def _seal_what_there_is(settings: WriteSettings, observer: Observer) -> None:
    """Seal what was committed before a failure, if possible and nobody else is at work there."""
    out, part = settings.out, settings.part
    try:
        if not has_dataset(out):
            return
        store = open_store(out)
        only = runs_of(read_catalog(store), part)
        recovered = recover_runs(store, only=only, beside="seen", alone=part is None)
        require_accounted(recovered)
        clear_ended(store, recovered)
        if part is not None:
            return
        sealed = seal(store)
    except ActdsError as error:
        observer.said(f"{out} is not sealed: {error}")
    else:
        observer.said(f"{out} is sealed with {sealed.totals['rows']:,} rows.")


def _totals(out: str, runs: Sequence[Ended], elapsed_s: float, sealed: Seal | None) -> Totals:
    """Return the counts of every request and position of all runs together."""
    catalog = read_catalog(open_store(out))
    hooks = catalog.genesis.hooks
    row_nbytes = sum(hook.d_model * DTYPES[hook.dtype].itemsize for hook in hooks)
    whole: Totals | None = None
    for ended in runs:
        assert ended.totals is not None and ended.run is not None
        totals = _totals_of(catalog, ended.run, ended.totals, row_nbytes)
        totals.check()
        whole = totals if whole is None else whole.plus(totals)
    assert whole is not None
    lines = [ended.outcome.line() for ended in runs if ended.outcome is not None]
    return replace(
        whole,
        path=out,
        elapsed_s=elapsed_s,
        unresolved=sealed.totals.get("unresolved", 0) if sealed else 0,
        external=sealed.totals.get("external", 0) if sealed else 0,
        seal=catalog.seal_sha256 if sealed else None,
        canary="; ".join(lines) or None,
        alerts=_alerts_of(catalog)
        if any(PROFILE in record.fields for record in catalog.runs.values())
        else None,
    )


def _alerts_of(catalog: Catalog) -> str:
    lines = [catalog.table("alerts", run)["request"] for run in catalog.run_ids]
    n = sum(len(pc.unique(requests)) for requests in lines)
    return f"{n:,} requests left the regime of the profile"


def _totals_of(
    catalog: Catalog, run: str, ended: dict[str, dict[str, int]], row_nbytes: int
) -> Totals:
    shards = [shard for shard in catalog.shards if shard.run == run]
    requests = catalog.table("requests", run)
    reasons = requests["finish_reason"].value_counts().to_pylist()
    skipped = requests.filter(pc.equal(requests["finish_reason"], "skipped"))
    census = ended["census"]
    counts: dict[str, Any] = {name: census[name] for name in OF_CENSUS}
    spans = catalog.table("spans", run)
    never = pc.and_(pc.equal(spans["disposition"], "aborted"), pc.is_null(spans["step"]))
    owed = spans.filter(never)
    return Totals(
        path=catalog.store.uri,
        elapsed_s=0.0,
        requests={row["values"]: row["counts"] for row in reasons},
        scheduled=census["scheduled_tokens"],
        **counts,
        aborted_uncomputed=pc.sum(pc.subtract(owed["stop"], owed["start"])).as_py() or 0,
        skipped_tokens=pc.sum(skipped["prompt_len"]).as_py() or 0,
        unresolved=0,
        n_hooks=len(catalog.genesis.hooks),
        n_shards=len(shards),
        row_nbytes=ended["writer"]["rows"] * row_nbytes,
        stored_nbytes=sum(entry.nbytes for shard in shards for entry in shard.files),
        seal=None,
        values=RowCounts.by_hook(shard.values for shard in shards),
        cast=recorded_cast(catalog.runs.get(run)),
    )


def replay_canaries() -> int:
    """Replay canaries, in a process where the engine has no state of the harvest's.

    Reads settings and plan; writes the sampled tokens by key, or the error, pickled.
    """
    settings, plan = pickle.load(sys.stdin.buffer)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # an engine may print
    sampled: dict[str, int] = {}

    def heard(finished: Finished) -> None:
        sampled[finished.key] = finished.token_ids[-1]

    with answer:
        try:
            result = harvest_plan(settings, plan, heard)
        except ActdsError as error:
            pickle.dump(error, answer)
            return 1
        pickle.dump(sampled, answer)
    return 0 if result.reason == "finished" else 2


if __name__ == "__main__":
    # Under its own name, so that what is sent can be read by the command.
    from actds_writers.harvest import run

    sys.exit(run.replay_canaries())
