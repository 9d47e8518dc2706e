"""One harvest from the caller's process: plan, the runs of its engines, seal."""

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

from actds.dataset.info import recorded_cast
from actds.dataset.reading import Catalog
from actds.errors import ActdsError
from actds.format.arrays import DTYPES
from actds.format.schema import RowCounts, Seal
from actds.publish.sealing import seal
from actds.store import open_store
from actds.text import counted
from actds_writers.config import WriteSettings, keywords_of
from actds_writers.engine_protocol import Finished, find_engine
from actds_writers.harvest.canary import Share
from actds_writers.harvest.one_engine import Ended, Feed, Run
from actds_writers.harvest.prepare import (
    SECOND_BOS,
    Identity,
    Plan,
    ServedBy,
    discard_empty,
    finished_rows,
    has_dataset,
    hold,
    identity,
    is_taken,
    make_plan,
    request_key,
)
from actds_writers.harvest.recover import recover_runs, require_accounted
from actds_writers.harvest.replicas import harvest_replicas, shares
from actds_writers.harvest.result import HarvestResult, Observer, Totals
from actds_writers.monitor.progress import Snapshot


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
        raise ActdsError(
            "E009",
            "actds.write",
            got="a second harvest in this process, while the first is under way",
            expected="one after the other",
            next_step="Wait for the first, or start each in a process of its own.",
        )
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
    if settings.canary is not None:
        Share.parse(settings.canary)
        if engine.n_samples > 1:
            raise ActdsError(
                "E009",
                "canary",
                got=f"{engine.n_samples} samples of each prompt",
                expected="one: a replay must know which of them it compares with",
            )
    if settings.entropy:
        kind.require_logits(engine)
    _check_out(settings)
    _check_metrics(settings)
    observer.doing(f"Reading {settings.prompts}, and the weights of {settings.model} for a digest")
    plan = make_plan(settings, engine, n_replicas, served_by)
    _say_second_bos(plan, observer)
    created = not is_taken(settings.out)
    if created:
        _require_prompt(settings, plan)
    lock = hold(settings.out)
    try:
        if settings.resume:
            observer.doing(f"Looking for the requests that {settings.out} has")
            plan = _without(plan, finished_rows(settings.out, plan, observer.said))
            if not _servable(plan):
                sealed = seal(open_store(settings.out))
                result = HarvestResult(settings.out, None, "finished", sealed)
                observer.ended(result)
                return result
        if n_replicas > 1:
            ended = harvest_replicas(settings, shares(settings, plan, n_replicas), lock, observer)
        else:
            ended = [Run(settings, plan, lock, began, observer, feed or Feed).run()]
        return _result(settings, ended, began, observer)
    finally:
        os.close(lock)
        if created:
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


def _say_second_bos(plan: Plan, observer: Observer) -> None:
    n = next((fact.value for fact in plan.facts if fact.name == SECOND_BOS), None)
    if n:
        observer.said(
            f"{counted(int(n), 'prompt')} of {len(plan.encoded):,} begin with BOS twice: the text "
            "has one, and the tokenizer adds one. Give chats as messages, or token ids."
        )


def _servable(plan: Plan) -> bool:
    return any(encoded.skip is None for encoded in plan.encoded)


def _require_prompt(settings: WriteSettings, plan: Plan) -> None:
    if _servable(plan):
        return
    skips = [prompt.skip for prompt in plan.client if prompt.skip]
    raise ActdsError(
        "E006",
        settings.prompts,
        got=f"{len(skips)} prompts, all skipped; the first: {skips[0] if skips else 'none'}",
        expected="at least one prompt that fits the model",
    )


def _check_out(settings: WriteSettings) -> None:
    if settings.resume and not has_dataset(settings.out):
        raise ActdsError(
            "E010",
            settings.out,
            got="no dataset",
            expected="a dataset to resume",
            next_step="To write a new dataset, leave out resume=True.",
        )
    if not settings.resume and is_taken(settings.out):
        raise ActdsError(
            "E008",
            settings.out,
            got="it exists",
            expected="a new path",
            next_step="Choose a new path, or continue with resume=True.",
        )


def _check_metrics(settings: WriteSettings) -> None:
    if settings.metrics_port is not None:
        from actds_writers.monitor.metrics import serve_metrics

        idle = Snapshot(elapsed_s=0.0, requests_done=0, requests_total=0)
        serve_metrics(settings.metrics_host, settings.metrics_port, lambda: idle).close()


def _without(plan: Plan, done: set[Identity]) -> Plan:
    client = tuple(prompt for prompt in plan.client if identity(prompt) not in done)
    keys = {prompt.key for prompt in client}
    encoded = tuple(e for e in plan.encoded if request_key(e.prompt.index) in keys)
    return replace(plan, encoded=encoded, client=client)


def _result(
    settings: WriteSettings, runs: Sequence[Ended], began: float, observer: Observer
) -> HarvestResult:
    """Seal the dataset after all runs have ended; return the result, or raise what stopped one."""
    failure = next((ended.failure for ended in runs if ended.failure is not None), None)
    if failure is not None:
        _seal_what_there_is(settings.out, observer)
        raise failure
    if not has_dataset(settings.out):
        raise ActdsError(
            "E006", "harvest", got="interrupted before the first step", expected="a step"
        )
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


def _seal_what_there_is(out: str, observer: Observer) -> None:
    """Seal what was committed before a failure, if possible and nobody else is at work there."""
    try:
        if not has_dataset(out):
            return
        store = open_store(out)
        require_accounted(recover_runs(store, beside_others=True))
        sealed = seal(store)
    except ActdsError as error:
        observer.said(f"{out} is not sealed: {error}")
    else:
        observer.said(f"{out} is sealed with {sealed.totals['rows']:,} rows.")


def _totals(out: str, runs: Sequence[Ended], elapsed_s: float, sealed: Seal) -> Totals:
    """Return the counts of every request and position of all runs together."""
    catalog = Catalog.read(open_store(out))
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
        unresolved=sealed.totals.get("unresolved", 0),
        external=sealed.totals.get("external", 0),
        seal=catalog.seal_sha256,
        canary="; ".join(lines) or None,
    )


def _totals_of(
    catalog: Catalog, run: str, ended: dict[str, dict[str, int]], row_nbytes: int
) -> Totals:
    shards = [shard for shard in catalog.shards if shard.run == run]
    requests = catalog.table("requests", run)
    reasons = requests["finish_reason"].value_counts().to_pylist()
    skipped = requests.filter(pc.equal(requests["finish_reason"], "skipped"))
    census = ended["census"]
    spans = catalog.table("spans", run)
    never = pc.and_(pc.equal(spans["disposition"], "aborted"), pc.is_null(spans["step"]))
    owed = spans.filter(never)
    return Totals(
        path=catalog.store.uri,
        elapsed_s=0.0,
        requests={row["values"]: row["counts"] for row in reasons},
        scheduled=census["scheduled_tokens"],
        recomputed=census["recomputed"],
        captured=census["captured"],
        cache_ref=census["cache_ref"],
        dropped=census["dropped"],
        aborted=census["aborted"],
        filtered=census["filtered"],
        undelivered=census["undelivered"],
        rejected=census["rejected"],
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
    sys.exit(replay_canaries())
