"""A live harvest: its start inside a vLLM engine core, and the supervision of its processes.

It starts before the engine's workers exist, so that errors of the configuration are raised before
the server is up. Supervision runs on thread ``actds-live``: no request waits for it, and no failure
there ends the service.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from actds.dataset.reading import read_genesis
from actds.errors import ActdsError
from actds.format import tables
from actds.format.readouts import NONE
from actds.format.schema import CloseReason
from actds.store import layout, local_folder, open_store
from actds_writers.capture.hooks import hook_specs, parse_hooks
from actds_writers.config import HarvestSettings, LiveSettings, WriterSettings, settings_of
from actds_writers.engines.account import layer_config
from actds_writers.engines.vllm.options import admit, graph_key, refuse_options, refuse_unread
from actds_writers.engines.vllm.rotation import Rotation
from actds_writers.engines.vllm.weights import WeightsWatch
from actds_writers.engines.vllm.worker import model_files
from actds_writers.harvest.prepare import discard_empty, hold, looked_at, plan_edits, plan_profile
from actds_writers.harvest.processes import Pipeline
from actds_writers.ipc.link import Link
from actds_writers.ipc.messages import Fact, HookSpec
from actds_writers.model_folder import SpecialTokens
from actds_writers.monitor.progress import Snapshot, take_snapshot
from actds_writers.provenance import capture_facts, model_facts, observed
from actds_writers.sampling import SamplingRules

log = logging.getLogger("vllm.actds")
PLACE = "additional_config actds"
POLL_S = 0.25
RETRY_S = 60.0
"""After this time another next dataset is begun, where the one before could not be."""


def _bad_setting(place: str, got: str, expected: str, next_step: str | None = None) -> ActdsError:
    return ActdsError("E017", place, got=got, expected=expected, next_step=next_step)


def parse_live_settings(document: Any) -> LiveSettings:
    if not isinstance(document, dict):
        expected = 'an object such as {"out": "...", "hooks": "..."}'
        raise _bad_setting(PLACE, repr(document)[:80], expected)
    return settings_of(
        LiveSettings, document, lambda key: f"{PLACE}.{key}" if key else PLACE, "E017"
    )


Begin = Callable[[WriterSettings], tuple[Pipeline, Callable[[], None]]]


class LiveRun:
    """Writer and census of one engine, supervised in the background.

    Args:
        begin: starts both processes, which are not yet connected, and returns what releases the
            lock of their dataset.
        metrics: host and port where metrics are served.
        before: the run of the same engine that this one follows.
        switch: file during whose presence nothing of new requests is stored.
        rotation: when the dataset ends and another begins; ``None`` for never.
        is_spare: it is prepared for a change over, while another one captures.
    """

    def __init__(
        self,
        begin: Begin,
        writer: WriterSettings,
        rules: SamplingRules,
        metrics: tuple[str, int] | None = None,
        before: LiveRun | None = None,
        switch: str | None = None,
        rotation: Rotation | None = None,
        is_spare: bool = False,
    ) -> None:
        self._begin, self._writer, self.switch = begin, writer, switch
        self._metrics_at, self._metrics, self._rotation = metrics, metrics, rotation
        self.pipeline, self._release = begin(writer)
        self.link: Link = self.pipeline.link
        self.watch: WeightsWatch | None = None
        self._n_changed = 0
        """Tokens that were computed with other weights, as far as the census has said."""
        self._before = before
        self._following: LiveRun | None = None
        """The run of the next dataset, when this one is due."""
        self._is_followed, self._next_try = False, 0.0
        self._is_spare = is_spare
        self.is_up = False
        self._began = time.monotonic()
        self.rules = rules
        self.failure: Exception | None = None
        self._unknown_weights = False
        self._failing = threading.Lock()
        self._ending = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._supervise, name="actds-live", daemon=True)
        self._thread.start()

    def follow(self, facts: Sequence[Fact]) -> LiveRun:
        """Return the next run, of other weights, after the end of this one's supervision."""
        self._ending.set()  # a port of metrics is free when the thread has ended
        self._thread.join()
        if self._following is not None:  # of the weights before
            self._following.end_aside("finished")
            self._following = None
        known = {fact.name: fact for fact in (*self._writer.facts, *facts)}
        harvest = self._writer.harvest
        if harvest.profile is not None:
            log.warning("actds: no alerts any more: the profile is of the weights before")
            harvest = harvest.model_copy(update={"profile": None, "alert_url": None})
        run = self._next(harvest, tuple(known.values()), self._metrics_at)
        run.watch = self.watch
        return run

    def _next(
        self,
        harvest: HarvestSettings,
        facts: tuple[Fact, ...],
        metrics: tuple[str, int] | None,
        *,
        is_spare: bool = False,
    ) -> LiveRun:
        run = layout.new_id("r")
        if self._rotation is not None:
            harvest = harvest.model_copy(update={"out": self._rotation.dataset(run)})
        dataset = self._writer.dataset if self._rotation is None else secrets.token_hex(16)
        writer = replace(
            self._writer,
            harvest=harvest,
            facts=facts,
            run=run,
            dataset=dataset,
            started_ns=time.time_ns(),
        )
        more = self.switch, self._rotation, is_spare
        return LiveRun(self._begin, writer, self.rules, metrics, self, *more)

    def end_aside(self, reason: CloseReason, heir: LiveRun | None = None) -> None:
        """End the run on a thread of its own, which the end of the next run waits for.

        ``heir`` serves its metrics from then on.
        """
        supervising = self._thread

        def ending() -> None:
            self._ending.set()
            supervising.join()
            if heir is not None:  # the port is free
                heir._metrics = heir._metrics_at = self._metrics_at
            self.end(reason)

        self._thread = threading.Thread(target=ending, name="actds-end")
        self._thread.start()

    def fail(self, error: Exception) -> None:
        self._unknown_weights |= isinstance(error, ActdsError) and error.code == "E509"
        with self._failing:
            if self.failure is not None:
                return
            self.failure = error
        if self._is_spare:
            return
        log.error(
            "actds: CAPTURE HAS ENDED, serving continues. %s Committed rows are kept; every token "
            "from here on is accounted as aborted.",
            str(error).splitlines()[0],  # the next step after it is for a command
        )

    def drain(self, last_step: Callable[[], int], timeout_s: float) -> bool:
        """Wait until the writer has every step of the scheduler that had tokens."""
        deadline = time.monotonic() + timeout_s
        while self.failure is None and time.monotonic() < deadline:
            if self.pipeline.has_reached(last_step()):
                return True
            time.sleep(0.02)
        return False

    def end(self, reason: CloseReason) -> None:
        if self._ended:
            return
        self._ended = True
        self._ending.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        if self._before is not None:
            self._before.wait()
            self._before = None
        if self._following is not None:
            self._following.end("finished")
            self._following = None
        try:
            with self.pipeline:
                ended = self.pipeline.finish(
                    "failed" if self.failure is not None else reason,
                    unknown_weights=self._unknown_weights,
                )
            log.info(
                "actds: run %s is complete: %s rows stored, %s positions dropped, %s aborted, "
                "%s filtered.%s",
                self.link.run,
                *(
                    ended["census"].get(n, 0)
                    for n in ("captured", "dropped", "aborted", "filtered")
                ),
                "" if self._rotation else " When all engines have ended: actds seal",
            )
        except ActdsError as error:
            log.error("actds: run %s: %s", self.link.run, error)
        finally:
            self._release()
        out = self.link.settings.out
        if self._rotation is not None and open_store(out).exists(layout.GENESIS):
            self._rotation.seal(out)
        elif self._rotation is not None:
            discard_empty(out)

    @property
    def is_off(self) -> bool:
        """Return whether capture is switched off for now."""
        return self.switch is not None and os.path.exists(self.switch)

    def wait(self) -> None:
        self._thread.join()

    def _supervise(self) -> None:
        try:
            self.pipeline.connect()
        except (ActdsError, OSError) as error:
            self.fail(error)
            return
        self.is_up, writer_ends = True, False
        with ExitStack() as watch:
            while not self._ending.wait(POLL_S):
                writer_ends = self._poll(writer_ends)
                counted = self.pipeline.counted
                # Only now: the engine may fork before its scheduler has connected.
                if self._is_due():
                    self._prepare()
                if self._metrics is not None and counted is not None and counted.connected:
                    self._serve_metrics(watch, *self._metrics)
                    self._metrics = None

    def _is_due(self) -> bool:
        written = self.pipeline.written
        if self._rotation is None or self._is_followed or written is None or self.failure:
            return False
        if self._following is not None:
            return self._following.failure is not None
        if time.monotonic() < self._next_try:
            return False
        age_s = time.monotonic() - self._began
        return self._rotation.is_due(age_s, written.n_rows, written.commits.nbytes_out)

    def _prepare(self) -> None:
        """Start the processes of the next dataset; the scheduler changes over when they are up.

        Those that could not start are ended, and others are tried later.
        """
        failed, self._following = self._following, None
        try:
            if failed is not None:
                failed._before = None  # which is this one, and goes on
                failed.end_aside("failed")
                raise failed.failure or AssertionError
            self._following = self._next(
                self._writer.harvest, self._writer.facts, None, is_spare=True
            )
        except (ActdsError, OSError) as error:
            self._next_try = time.monotonic() + RETRY_S
            log.error(
                "actds: no next dataset, this one goes on, and another is tried in %d s: %s",
                *(RETRY_S, error),
            )

    @property
    def dataset(self) -> str:
        """Return the id of the dataset that is of this run alone, empty for one of several."""
        return "" if self._rotation is None else self._writer.dataset

    def take_following(self) -> LiveRun | None:
        """Return the run of the next dataset, once, when it is due and its processes are up."""
        following = self._following
        if following is None or not following.is_up or self.failure is not None:
            return None
        self._is_followed = True
        self._following, following.watch, following._is_spare = None, self.watch, False
        return following

    def _poll(self, writer_ends: bool) -> bool:
        """Take the messages of the processes; return whether the writer knows of a failure."""
        try:
            self.pipeline.poll()
        except ActdsError as error:
            self.fail(error)
        counted = self.pipeline.counted
        n_changed = counted.dropped.get(tables.CHANGED_WEIGHTS, 0) if counted else 0
        if self.watch is not None and n_changed > self._n_changed:
            self._n_changed, self.watch.is_suspected = n_changed, True
        if self.failure is not None and not writer_ends:
            # Let the writer commit its buffers now; the census continues to the end.
            self.pipeline.end_writer("failed")
            return True
        return writer_ends

    def _serve_metrics(self, watch: ExitStack, host: str, port: int) -> None:
        try:
            from actds_writers.monitor.metrics import serve_metrics

            server = watch.enter_context(serve_metrics(host, port, self._snapshot))
        except ActdsError as error:
            log.error("actds: no metrics: %s", error)
        else:
            log.info("actds: metrics at http://%s:%s/metrics", host, server.port)

    def _snapshot(self) -> Snapshot:
        counted = self.pipeline.counted
        return take_snapshot(
            self.pipeline.written,
            counted,
            elapsed_s=time.monotonic() - self._began,
            requests_done=counted.n_finished if counted else 0,
            requests_total=None,
            is_capturing=self.failure is None and not self.is_off,
        )


PER_REQUEST = "chosen by each client; see sampling in the table requests"
LIVE_TRAFFIC = "live traffic: prompts come from clients"


def start(config: Any, document: Any) -> LiveRun:
    """Start writer and census of a serving engine; return the run.

    Raises E017 a bad setting, E007 an unknown layer, E012 an engine option that breaks accounting,
    E010 a dataset with other hooks or in use.

    Args:
        config: vLLM's effective configuration; gets what capture adds to the graph.
    """
    settings = parse_live_settings(document)
    admit(settings.check)
    refuse(config, check=settings.check)
    if settings.entropy:
        parallel = config.parallel_config
        method = getattr(config.speculative_config, "method", None)
        stages = parallel.pipeline_parallel_size
        options = {"speculative_config": method, "pipeline_parallel_size": stages}
        refuse_unread(options, "engine option")
    model = config.model_config
    n_layers = int(model.hf_text_config.num_hidden_layers)
    config_of = layer_config(model.hf_text_config, int(model.get_hidden_size()), n_layers)
    # The widest type, for sizes: a kind may have another one than the model.
    places = parse_hooks(settings.hooks, n_layers)
    hooks = hook_specs(places, config_of, "float32")
    looked_at(settings, n_layers)
    _check_choices(settings, hooks)
    rotation, run = Rotation.of(settings), layout.new_id("r")
    mode = 0o777 & ~settings.umask
    out = destination(settings.out if rotation is None else rotation.dataset(run), mode)
    settings = settings.model_copy(update={"out": out})
    if rotation is None:
        compare_hooks(out, hooks)
    readouts, probes = _readouts(settings, hooks)
    edits = plan_edits(settings.intervene, config_of, live=True)
    writer = _writer_settings(settings, model, hooks, readouts, _replica(config))
    writer = replace(writer, run=run)
    if edits is not None:
        writer = replace(writer, facts=(*writer.facts, edits.fact))
    profile = None
    if settings.profile is not None:
        dtype = observed("numerics.dtype", str(model.dtype).removeprefix("torch."))
        names = [hook.name for hook in hooks]
        profile = plan_profile(settings, names, readouts, (*writer.facts, dtype))
    # The client of an engine core in its own process is the parent.
    in_child = multiprocessing.parent_process() is not None
    pipeline = functools.partial(
        Pipeline,
        hooks=tuple(places),
        client_pid=os.getppid() if in_child else os.getpid(),
        files={
            "probes": probes,
            "interventions": None if edits is None else edits.to_bytes(),
            "profile": profile,
        },
    )

    def begin(writer: WriterSettings) -> tuple[Pipeline, Callable[[], None]]:
        lock = hold(destination(writer.harvest.out, mode), shared=True)
        try:
            return pipeline(writer, lock=lock), functools.partial(os.close, lock)
        except BaseException:
            os.close(lock)
            raise

    metrics = None
    if settings.metrics_port is not None:
        replica = config.parallel_config.data_parallel_index if settings.metrics_port else 0
        metrics = (settings.metrics_host, settings.metrics_port + replica)
    rules = settings.rules()
    live = LiveRun(begin, writer, rules, metrics, switch=settings.switch, rotation=rotation)
    config.additional_config = {**config.additional_config, "actds": graph_key(live.link)}
    log.info(
        "actds: capturing %s into %s as run %s; sampling %s; when the ring is full: %s",
        ", ".join(hook.name for hook in hooks),
        out,
        writer.run,
        rules.describe(),
        settings.overflow,
    )
    return live


def _replica(config: Any) -> tuple[int, int]:
    """Return this engine's number among replicas, and how many there are, 0 if not known.

    vLLM tells it replicas of a mixture of experts. The size of a dense one it sets to 1; that there
    are others shows in the name of its process only.
    """
    several = multiprocessing.current_process().name.startswith("EngineCore_DP")
    parallel = config.parallel_config
    size = int(parallel.data_parallel_size)
    return int(parallel.data_parallel_index), 0 if several and size == 1 else size


def refuse(config: Any, *, check: bool) -> None:
    """Raise E012 for an effective configuration that capture cannot account for.

    ``check``: the check of the hooks will run.
    """
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    worker, backend = str(parallel.worker_cls), parallel.distributed_executor_backend
    options: dict[str, object] = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "enable_hc_sp": getattr(parallel, "enable_hc_sp", None),  # since 0.29
        "nnodes": parallel.nnodes,
        # Of one node: vLLM's own replicas are, and each has a writer.
        "data_parallel_size": _replica(config)[1] if parallel.nnodes > 1 else 1,
        "distributed_executor_backend": backend if isinstance(backend, str | None) else "a class",
        "speculative_config": getattr(config.speculative_config, "method", None),
        "diffusion_config": config.diffusion_config,
        "kv_transfer_config": config.kv_transfer_config,
        "ec_transfer_config": config.ec_transfer_config,
        "kv_sharing_fast_prefill": cache.kv_sharing_fast_prefill,
        "enable_lora": config.lora_config is not None and not check,
        "enable_dbo": parallel.enable_dbo,
        "ubatch_size": parallel.ubatch_size,
        "enable_prompt_embeds": model.enable_prompt_embeds,
        "runner": model.runner_type,
        "worker_cls": "auto" if worker.startswith("vllm.") else worker,
        "scheduler_cls": config.scheduler_config.scheduler_cls,
    }
    refuse_options(options, "engine option")


def destination(out: str, mode: int = 0o700) -> str:
    """Return the location of the dataset, absolute if local; raises for a bad one.

    ``mode``: of a folder that is made.
    """
    place = f"{PLACE}.out"
    try:
        folder = local_folder(out)
        if folder is None:
            # Sends no request; checks the URI and that its package is installed.
            open_store(out, write=True)
            return out
        folder = folder.expanduser().absolute()
        folder.mkdir(mode, parents=True, exist_ok=True)
        # Another engine may be creating the dataset, in a temporary file.
        names = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
        foreign = bool(names) and layout.GENESIS not in names
    except OSError as error:
        raise _bad_setting(
            place, f"{out}: {error.strerror}", "a folder that can be created, or a dataset"
        ) from None
    except ActdsError as error:
        advice = error.next_step if error.code == "E011" else None
        raise _bad_setting(place, f"{out}: {error.got}", error.expected, advice) from None
    if foreign:
        raise _bad_setting(
            place, f"{out}: a folder with other files", "a new or empty folder, or a dataset"
        )
    return str(folder)


def compare_hooks(out: str, hooks: Sequence[HookSpec]) -> None:
    """Raise for a dataset with other hooks; the writer compares types and widths later."""
    store = open_store(out)
    if not store.exists(layout.GENESIS):
        return
    present = [hook.name for hook in read_genesis(store).hooks]
    wanted = [hook.name for hook in hooks]
    if present != wanted:
        expected = f"{', '.join(present)}, as there"
        raise ActdsError("E010", f"{out} hooks", got=", ".join(wanted), expected=expected)


def _readouts(settings: LiveSettings, hooks: Sequence[HookSpec]) -> tuple[str, bytes | None]:
    from actds_writers.capture.hooks import plan_readouts

    if not settings.readouts:
        if settings.probes is not None:
            raise _bad_setting(
                f"{PLACE}.probes", "a file, but readouts is false", "readouts true, or no probes"
            )
        return NONE, None
    readouts, probes = plan_readouts(settings.seed, settings.probes, hooks, settings.keep)
    return readouts.as_field(), probes


def _writer_settings(
    settings: LiveSettings,
    model: Any,
    hooks: Sequence[HookSpec],
    readouts: str,
    replica: tuple[int, int],
) -> WriterSettings:
    from actds_writers.sizing import Geometry, rows_per_shard

    row_nbytes, n_choices = Geometry.of(hooks).row_nbytes, len(settings.choices)
    rows = settings.rows_per_shard or rows_per_shard(row_nbytes, n_choices)
    return WriterSettings(
        harvest=settings,
        facts=tuple(_facts(settings, model, rows, readouts)),
        tokens=_special_tokens(model),
        rows_per_shard=rows,
        # Leave most of the machine to the engine.
        n_threads=max(1, (os.cpu_count() or 2) // 4),
        shared=True,
        replica=replica,
        readouts=readouts,
    )


def _check_choices(settings: LiveSettings, hooks: Sequence[HookSpec]) -> None:
    names = {hook.name for hook in hooks}
    for chosen in settings.choices:
        if not names > set(chosen):
            got, expected = ",".join(chosen), f"some, not all, of {', '.join(sorted(names))}"
            raise ActdsError("E017", "actds.hook_choices", got=got, expected=expected)


def _special_tokens(model: Any) -> SpecialTokens:
    from actds_writers.model_folder import generation_eos
    from actds_writers.prompts.encoding import load_tokenizer, special_tokens

    if model.skip_tokenizer_init:
        return SpecialTokens()
    files = model_files(model)
    return special_tokens(load_tokenizer(files.tokenizer), generation_eos(files.generation))


def _facts(settings: LiveSettings, model: Any, rows: int, readouts: str) -> list[Fact]:
    unknown = {
        "sampling.temperature": PER_REQUEST,
        "sampling.max_tokens": PER_REQUEST,
        "sampling.params": PER_REQUEST,
        "prompts.roles": "the table roles has what is known of each chat",
        "tokenizer.chat_template_sha256": "applied by the server, and a client may send its own",
        **{f"prompts.{n}": LIVE_TRAFFIC for n in ("source", "sha256", "n_records", "n_skipped")},
    }
    facts = [
        *capture_facts(settings, rows, readouts, settings.rules().describe()),
        observed("serving.mode", "live"),
        observed("sampling.seed", int(model.seed or 0)),
        *(observed(name, None, reason) for name, reason in unknown.items()),
        *model_facts(
            model_files(model),
            weights=settings.weights_digest,
            no_tokenizer="no tokenizer.json in a folder of this machine",
        ),
    ]
    revision = getattr(model.hf_config, "_commit_hash", None)
    if revision:
        facts.append(observed("model.revision", str(revision)))
    return facts
