"""The scheduler side of the account in vLLM: requests, steps and prefix-cache hits.

It remembers which request computed each prefix block, so that a hit can name the request whose row
was reused, and which blocks a KV connector brought from outside, where no request has rows. What
became of a step's rows is known when the scheduler takes its results, which under asynchronous
scheduling is after the next step was scheduled: only then is the step reported.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from actds.errors import ActdsError
from actds.format import tables
from actds.format.inclusion import KeepRule, about_request
from actds.format.telemetry import Attending
from actds.text import printable
from actds_writers.engines import wrap
from actds_writers.engines.account import Channel, SchedulerSide, encodable, in_json
from actds_writers.engines.vllm.answers import Answers
from actds_writers.engines.vllm.options import adapter_sha256
from actds_writers.engines.vllm.requests import (
    OUTSIDE,
    Blocks,
    ChatRoles,
    Owners,
    StopStrings,
    WrittenBlocks,
    blocks_of_step,
    recorded,
    take_regime,
    take_roles,
    take_turn,
)
from actds_writers.ipc.messages import Reference, RequestFinished, StepScheduled
from actds_writers.prompts.conversation import UNKNOWN, Turn
from actds_writers.sampling import (
    EVERYTHING,
    HOOKS,
    MIXED_WEIGHTS,
    OFF,
    POSITIONS,
    Labels,
    LeftOut,
    Regime,
    SamplingRules,
    hooks_asked,
    positions_asked,
)

log = logging.getLogger("vllm.actds")
DIGEST_NBYTES = 16
"""Bytes kept of each prefix-block digest."""
OWNERS_PER_BLOCK = 4
"""Remembered prefix blocks per KV block: a block in use may be touched less often than new ones are
added, and a hit on a forgotten block cannot be resolved."""
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
"""What the engine adds to the client's id."""
_WORDS = {"repetition": "stop"}
"""The spec's words for vLLM's reasons of an end, where they differ."""


@dataclass
class _Tracked:
    number: int
    prompt_len: int
    """At arrival: the prompt of a session grows."""
    left_out: LeftOut
    regime: Regime
    turn: Turn = UNKNOWN
    chat: ChatRoles | None = None
    stops: StopStrings | None = None
    high_water: int = 0
    """With the steps in flight, as if all their drafts were accepted."""
    settled_water: int = 0
    n_owned_blocks: int = 0
    loading: tuple[int, int] = (0, 0)
    """Positions that the KV connector was to load when the request was last admitted."""
    external_end: int = 0
    """Position after the last one that the connector has supplied."""
    admitted: bool = False
    as_reported: bool = True
    """Whether the engine's count of cached tokens is of those that it served."""
    continues: bool = False
    """Whether a run before has begun it."""
    mixed: bool = False
    """Whether it is computed on KV of other weights than the run's."""
    loses: bool = False
    """Whether that began behind rows of it, so that its steps are lost from then on."""

    @property
    def is_stopped(self) -> bool:
        return self.stops is not None and self.stops.n_delivered is not None

    def n_sampled(self, request: Any) -> int:
        """Return how many sampled tokens are the request's: none behind a stop string."""
        n = int(request.num_output_tokens)
        late = self.stops.n_delivered if self.stops is not None else None
        return n if late is None else min(n, late)


@dataclass(frozen=True)
class Settled:
    """How many of the last rows of a step are not handed over, by request number."""

    step: int
    n_cut: dict[int, int]


@dataclass(frozen=True)
class StepMark:
    """What a ``SchedulerOutput`` carries to the workers; requests are numbered by engine id.

    Args:
        finished: numbers of the requests that ended since the last step.
        left_out: by engine id, what the sampling rules leave out.
        regimes: of the requests that are new in the run, by their numbers.
        settled: the steps whose results were taken since the last mark, in order.
        weights: digest of the weights that the step computes with, ``None`` where nobody looks.
        lost: why no row of the step may be stored.
    """

    step: int
    numbers: dict[str, int]
    finished: tuple[int, ...]
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    regimes: dict[int, Regime] = field(default_factory=dict)
    settled: tuple[Settled, ...] = ()
    weights: str | None = None
    lost: str | None = None


@dataclass
class _Part:
    """What a step computes of one request.

    Args:
        n_drafts: of its ``count`` rows, the last ones that are drafts.
        n_good: rows of tokens that the results let stand, ``None`` when they were not asked.
        is_discarded: whether the engine discards the results and computes them again.
        n_sampled: tokens that the request had sampled before the results were taken.
    """

    request: Any
    tracked: _Tracked
    start: int
    count: int
    n_drafts: int
    n_good: int | None = None
    is_discarded: bool = False
    n_sampled: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.count

    def settle(self) -> tuple[int, int]:
        """Return how many rows are undelivered, and how many rejected after them (spec 7.2)."""
        request = self.request
        n_positions = request.num_prompt_tokens + max(self.tracked.n_sampled(request) - 1, 0)
        within = min(max(n_positions - self.start, 0), self.count)
        if self.is_discarded:
            return 0, self.count - within
        n_good = self.count if self.n_good is None else self.n_good
        has_ended = request.is_finished() or self.tracked.is_stopped
        kept = min(within, n_good) if has_ended else n_good
        return n_good - kept, self.count - n_good


@dataclass
class _Flying:
    message: StepScheduled
    parts: dict[str, _Part]
    mark: StepMark | None = None
    n_drafted: int = 0
    n_accepted: int = 0


class VllmSchedulerSide(SchedulerSide):
    """Follows one vLLM scheduler.

    Args:
        block_size: tokens per prefix block.
        n_blocks: KV blocks of the cache; bounds the remembered prefix blocks.
        adapters: whether every request has the same LoRA adapter, so that rows are stored.
        entropy: whether the tokens that requests get are reported.
        keep: the rules for shares, of an engine whose clients do not answer what they ask.
        tokenizer: returns the front end's, by which it looks for stop strings.
        written: the KV blocks that the run's weights computed, of a run that began when they
            changed; ``None`` where there are no others.
        answers: what requests are told that ask for their score or handle.
        attending: whose attention is looked at: they compute their own keys.
        switch: file during whose presence nothing of new requests is stored.
        before: that of the run before with the same weights: what KV there is came from outside.
    """

    def __init__(
        self,
        census: Channel,
        block_size: int,
        n_blocks: int | None = None,
        rules: SamplingRules | None = None,
        *,
        adapters: bool = False,
        entropy: bool = False,
        keep: tuple[KeepRule, ...] | None = None,
        tokenizer: Callable[[], Any] = lambda: None,
        written: WrittenBlocks | None = None,
        weights: str | None = None,
        answers: Answers | None = None,
        attending: Attending | None = None,
        switch: str | None = None,
        before: VllmSchedulerSide | None = None,
    ) -> None:
        super().__init__(census)
        self._answers, self._attending, self._switch = answers, attending, switch
        self._tokenizer = functools.cache(tokenizer)
        self._written, self.weights = written, weights
        self._entropy, self._keep = entropy, keep
        self._adapters = adapters
        self._adapter_digests: dict[int, str | None] = {}
        self._block_size = block_size
        self._rules = rules
        self._tracked: dict[str, _Tracked] = {}
        # In order: the steps in flight, and behind each the requests that ended meanwhile.
        self._unsent: deque[_Flying | RequestFinished] = deque()
        self._settled: list[Settled] = []
        self._speculates = False
        unknown = (None, 0) if before is None else (None, OUTSIDE)
        limit = None if n_blocks is None else OWNERS_PER_BLOCK * n_blocks
        self.owners = Owners(limit, unknown)
        if before is not None:
            self._written, self.weights = before._written, before.weights

    def follow(self, connector: Any) -> None:
        """Note what a ``KVConnectorBase_V1`` supplies, from the two calls that admit requests."""

        @wrap(connector, "get_num_new_matched_tokens")
        def matching(matched: Any, request: Any, n_local: int, *args: Any, **kwargs: Any) -> Any:
            if (tracked := self._tracked.get(request.request_id)) is not None:
                tracked.loading = (n_local, n_local)
            return matched(request, n_local, *args, **kwargs)

        @wrap(connector, "update_state_after_alloc")
        def allocating(
            allocated: Any, request: Any, blocks: Any, n_external: int, *args: Any, **kwargs: Any
        ) -> Any:
            tracked = self._tracked.get(request.request_id)
            # 0 when the rest is allocated after an asynchronous load.
            if tracked is not None and n_external:
                tracked.loading = (tracked.loading[0], tracked.loading[0] + n_external)
            return allocated(request, blocks, n_external, *args, **kwargs)

    def known(self, request: Any) -> _Tracked | None:
        return self._tracked.get(request.request_id)

    def take_over(self, before: VllmSchedulerSide, requests: Iterable[Any]) -> None:
        """Report the requests that go on from the run before, which had the same weights."""
        for request in requests:
            known = before.known(request)
            self.arrived(request, known, mixed=known is not None and known.mixed)
            # The engine has told the run before what it served from its cache.
            self._tracked[request.request_id].continues = request.num_computed_tokens > 0

    def hand_on(self) -> None:
        """Report the requests that no step of the run has computed: they are of the next one."""
        for tracked in self._tracked.values():
            if not tracked.admitted:
                self.report(RequestFinished(tracked.number, time.time_ns(), "unbegun", 0, ""))

    def arrived(
        self, request: Any, known: _Tracked | None = None, *, mixed: bool | None = None
    ) -> None:
        """Number and report a request that the scheduler took.

        One that cannot be described is left out, so that nobody else's capture ends with it. The
        run before, to which it may be ``known``, has taken the roles of its chat, and its turn.
        """
        if request.request_id in self._tracked:
            return  # the next input of a session
        prompt_len = request.num_prompt_tokens
        external_id = _RANDOM_SUFFIX.sub("", request.request_id)
        stops, regime, chat, turn = None, None, None, UNKNOWN
        try:
            regime = take_regime(request.sampling_params) if self._keep is None else None
            chat = take_roles(request.sampling_params, prompt_len)
            turn = take_turn(request.sampling_params)
            about = self._described(request, external_id)
            if getattr(request.sampling_params, "stop", None):
                stops = StopStrings(self._tokenizer(), request)
        except Exception as error:
            words = printable(external_id[:80])
            log.warning("actds: request %s is left out: %r", words, error)
            about = {"sampling": None, "left_out": _unsupported("request")}
        # What runs on from the run before has KV of its weights.
        if mixed is None:
            mixed = self._written is not None and request.num_computed_tokens > 0
        if mixed:
            about["left_out"] = _mixed(about["left_out"])
        if known is not None:
            chat, turn = known.chat, known.turn
        if about["left_out"].stored(prompt_len + 1, prompt_len):
            about["turn"] = turn
        roles = regime.roles if regime else chat.prompt if chat else ""
        number = self.number_request(
            external_id, prompt_len, internal_id=request.request_id, roles=roles, **about
        )
        if self._attending is not None and self._attending.draws([number])[0]:
            request.skip_reading_prefix_cache = True
        if regime is None:
            about_this = about_request(encodable(external_id), None, in_json(about["sampling"]))
            regime = Regime.of(self._keep or (), roles, about_this)
        self._tracked[request.request_id] = _Tracked(
            number, prompt_len, about["left_out"], regime, turn, chat, stops, mixed=mixed
        )

    def _described(self, request: Any, external_id: str) -> dict[str, Any]:
        left_out = self._left_out(request, external_id)
        about: dict[str, Any] = {
            "sampling": None,
            "arrival_ns": int(request.arrival_time * 1e9),
            "left_out": left_out,
            "adapter": self._adapter(request),
        }
        if not left_out.is_private:
            n_blocks = request.num_prompt_tokens // self._block_size
            blocks = request.block_hashes[:n_blocks]
            about["sampling"] = recorded(request.sampling_params)
            about["block_digests"] = tuple(bytes(block)[:DIGEST_NBYTES] for block in blocks)
        return about

    def scheduled(self, scheduler: Any, output: Any, preempted: tuple[str, ...]) -> StepMark:
        n_tokens, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        tracked_of = {request: self._tracked[request] for request in n_tokens}
        parts: dict[str, _Part] = {}
        references: list[Reference] = []
        mixed: list[int] = []
        regimes: dict[int, Regime] = {}
        blocks = blocks_of_step(output) if self._written is not None else ({}, {})
        for engine_id, count in n_tokens.items():
            request, tracked = scheduler.requests[engine_id], tracked_of[engine_id]
            # schedule() has advanced the count by what it scheduled.
            start, is_new = request.num_computed_tokens - count, not tracked.admitted
            if is_new:
                regimes[tracked.number] = tracked.regime
            references += self._references(request, tracked, start)
            if self._written is not None and self._mixes(engine_id, tracked, start, *blocks):
                tracked.mixed = True
                if is_new:
                    mixed.append(tracked.number)
                    tracked.left_out = _mixed(tracked.left_out)
                else:
                    tracked.loses = True
            tracked.high_water = max(tracked.high_water, start + count)
            self._own_blocks(request, tracked, tracked.high_water)
            n_drafts = len(drafts.get(engine_id, ()))
            parts[engine_id] = _Part(request, tracked, start, count, n_drafts)
        self._speculates = scheduler.num_spec_tokens > 0
        step, finished = self.number_step(
            [tracked.number for tracked in tracked_of.values()],
            [part.start for part in parts.values()],
            list(n_tokens.values()),
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            references=tuple(references),
            preempted=tuple(self._tracked[p].number for p in preempted),
            kv_usage=float(scheduler.kv_cache_manager.usage),
            mixed=tuple(mixed),
        )
        loses = any(tracked.loses for tracked in tracked_of.values())
        mark = StepMark(
            step,
            {request: tracked.number for request, tracked in tracked_of.items()},
            finished,
            {
                request: tracked.left_out
                for request, tracked in tracked_of.items()
                if tracked.left_out != EVERYTHING
            },
            regimes,
            self.take_settled(),
            self.weights,
            tables.CHANGED_WEIGHTS if loses else None,
        )
        if parts:
            last = self._unsent[-1]
            assert isinstance(last, _Flying)
            last.parts, last.mark = parts, mark
        return mark

    def answer(self, outputs: Any) -> None:
        """Add scores and handles to the responses of requests that asked for them."""
        if self._answers is not None:
            self._answers.answer(outputs)

    def take_settled(self) -> tuple[Settled, ...]:
        settled, self._settled = tuple(self._settled), []
        return settled

    def _mixes(
        self,
        engine_id: str,
        tracked: _Tracked,
        start: int,
        admitted: dict[str, Blocks],
        further: dict[str, Blocks],
    ) -> bool:
        """Follow the KV blocks of a scheduled request; return whether it becomes a mixed one.

        It has ``start`` positions from KV when it is admitted.
        """
        assert self._written is not None
        began, blocks = False, admitted.get(engine_id)
        first_loaded, loaded = tracked.loading
        if blocks is None:
            start, blocks = 0, further.get(engine_id, ())
        elif not tracked.mixed:
            # Of KV from outside nobody knows the weights.
            began = loaded > first_loaded or not self._written.serve(blocks, start)
        if blocks:
            self._written.write(blocks, start, mixed=tracked.mixed or began)
        return began

    @property
    def has_news(self) -> bool:
        """Return whether results were taken that no mark has told the workers, or a score waits."""
        return bool(self._settled) or (self._answers is not None and self._answers.is_waiting)

    def report(self, message: StepScheduled | RequestFinished) -> None:
        """Send the census a step or an end, behind the steps in flight."""
        if isinstance(message, StepScheduled):
            self._unsent.append(_Flying(message, {}))
        elif self._unsent:
            self._unsent.append(message)
        else:
            super().report(message)

    def taking(self, output: Any, results: Any) -> None:
        """Look at the results of a step before the scheduler takes them."""
        flying = self._of(output)
        if flying is None:
            return
        for engine_id, part in flying.parts.items():
            request = part.request
            part.n_sampled = request.num_output_tokens
            if request.is_finished():
                continue
            # Before 0.27 the results of a preempted request stand, unless it counts them off.
            stale = getattr(request, "num_stale_output_tokens", 0) > 0
            part.is_discarded = (stale and bool(request.drop_stale_output)) or (
                getattr(request, "async_tokens_to_discard", 0) > 0
            )
            sampled = results.sampled_token_ids
            n_sampled = len(sampled[results.req_id_to_index[engine_id]]) if sampled else 0
            n_accepted = max(n_sampled - 1, 0) if part.n_drafts else 0
            part.n_good = part.count - part.n_drafts + n_accepted
            if part.is_discarded or not part.n_drafts or not n_sampled:
                continue
            invalid = output.num_invalid_spec_tokens or {}
            flying.n_drafted += part.n_drafts - invalid.get(engine_id, 0)
            flying.n_accepted += n_accepted
            for later in self._unsent if not stale else ():
                # It was scheduled as if nothing was rejected.
                ahead = self._part_of(request, later)
                if ahead is not None and later is not flying:
                    ahead.start -= part.count - part.n_good

    def taken(self, output: Any) -> None:
        """Settle a step whose results the scheduler has taken, and report it."""
        flying = self._of(output)
        if flying is None:
            return
        assert self._unsent[0] is flying, "results in another order than the steps"
        self._unsent.popleft()
        undelivered, rejected = [], []
        stopped = [part for part in flying.parts.values() if self._stops(part)]
        for part in flying.parts.values():
            late, wrong = part.settle()
            undelivered.append(late)
            rejected.append(wrong)
            tracked = part.tracked
            tracked.settled_water = max(tracked.settled_water, part.stop - wrong)
            if wrong:
                ahead = (self._part_of(part.request, unsent) for unsent in self._unsent)
                stops = [later.stop for later in ahead if later is not None]
                tracked.high_water = max([tracked.settled_water, *stops])
            self._own_blocks(part.request, tracked, tracked.settled_water)
        n_late, n_rejected = np.array(undelivered, np.int64), np.array(rejected, np.int64)
        n_cut = n_late + n_rejected
        requests = flying.message.requests
        self._settled.append(
            Settled(
                flying.message.step,
                dict(zip(requests[n_cut > 0].tolist(), n_cut[n_cut > 0].tolist(), strict=True)),
            )
        )
        super().report(
            replace(
                flying.message,
                starts=np.array([part.start for part in flying.parts.values()], np.int64),
                n_undelivered=n_late if n_late.any() else None,
                n_rejected=n_rejected if n_rejected.any() else None,
                drafted_tokens=flying.n_drafted if self._speculates else None,
                accepted_tokens=flying.n_accepted if self._speculates else None,
            )
        )
        if self._entropy:
            self._tell_sampled(flying)
        for part in stopped:
            super().report(self._end_of(part.request, part.tracked, "stop"))
        self._send_ends()

    @staticmethod
    def _stops(part: _Part) -> bool:
        stops, request = part.tracked.stops, part.request
        return stops is not None and not request.is_finished() and stops.read(request)

    def _tell_sampled(self, flying: _Flying) -> None:
        """Report the tokens that requests got from a step; E501 for one not of its last row."""
        got = [
            part
            for part in flying.parts.values()
            if part.tracked.n_sampled(part.request) > part.n_sampled
            and part.tracked.left_out.decode is None
        ]
        positions = [part.request.num_prompt_tokens + part.n_sampled for part in got]
        if any(part.stop != position for part, position in zip(got, positions, strict=True)):
            raise ActdsError(
                "E501",
                f"step {flying.message.step}",
                got=f"sampled tokens at {positions}",
                expected=f"{[part.stop for part in got]}, behind the last computed row",
            )
        tokens = [part.request.output_token_ids[part.n_sampled] for part in got]
        numbers = [part.tracked.number for part in got]
        self.tell_sampled(flying.message.step, numbers, positions, tokens)

    def close(self) -> None:
        """Report the steps in flight, whose rows nobody gets, and close the connection."""
        with contextlib.suppress(OSError):  # the census is gone
            while self._unsent:
                step = self._unsent.popleft()
                assert isinstance(step, _Flying)
                # None of a request that has ended is for its client.
                late = np.array([part.settle()[0] for part in step.parts.values()], np.int64)
                super().report(
                    replace(step.message, n_undelivered=late) if late.any() else step.message
                )
                self._send_ends()
        super().close()

    def _send_ends(self) -> None:
        while self._unsent and isinstance(self._unsent[0], RequestFinished):
            super().report(self._unsent.popleft())  # type: ignore[arg-type]

    def _of(self, output: Any) -> _Flying | None:
        """Return the step in flight that an output is of, if it has tokens and is of this run."""
        mark = getattr(output, "_actds", None)
        for flying in self._unsent:
            if isinstance(flying, _Flying) and mark is not None and flying.mark is mark:
                return flying
        return None

    @staticmethod
    def _part_of(request: Any, unsent: _Flying | RequestFinished) -> _Part | None:
        return unsent.parts.get(request.request_id) if isinstance(unsent, _Flying) else None

    def finished(self, request: Any) -> None:
        """Report the end of a request, unless a stop string has ended it before."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self.retire(tracked.number)
        if self._answers is not None:
            n = request.num_prompt_tokens + tracked.n_sampled(request)
            n_positions = n - 1 if n > tracked.prompt_len else n
            stored = tracked.left_out.stored(n_positions, tracked.prompt_len)
            about = (n_positions, stored, tracked.left_out.hooks)
            self._answers.ended(request, tracked.number, self.last_step, *about)
        if tracked.is_stopped:
            return
        reason = request.get_finished_reason()  # an enumeration of integers, from 0
        words = "abort" if reason is None else str(reason)
        if tracked.stops is not None and tracked.stops.read(request):
            words = "stop"
        self.report(self._end_of(request, tracked, _WORDS.get(words, words)))

    def _end_of(self, request: Any, tracked: _Tracked, reason: str) -> RequestFinished:
        # What a session was given later follows the prompt that it arrived with.
        n_prompt = tracked.prompt_len
        n_tokens = request.num_prompt_tokens + tracked.n_sampled(request)
        tokens = list(request.all_token_ids[:n_tokens])
        end = self.end_of(
            tracked.number,
            reason,
            tokens,
            n_prompt,
            cached_as_reported=tracked.as_reported,
            # The last sampled token is never fed.
            roles=tracked.chat.sampled(tokens[n_prompt:-1]) if tracked.chat else "",
        )
        return replace(end, token_digest="") if tracked.left_out.is_private else end

    def _adapter(self, request: Any) -> tuple[str, str | None] | None:
        """Return name and digest of a request's LoRA adapter, ``None`` without one.

        It is loaded once for each number, whatever becomes of the files or has the same name.
        """
        lora = getattr(request, "lora_request", None)
        if not lora:
            return None
        number = int(lora.lora_int_id)
        if number not in self._adapter_digests or getattr(lora, "load_inplace", False):
            self._adapter_digests[number] = adapter_sha256(str(lora.lora_path))
        return str(lora.lora_name), self._adapter_digests[number]

    def _left_out(self, request: Any, external_id: str) -> LeftOut:
        if getattr(request, "lora_request", None) and not self._adapters:
            return _unsupported("lora")
        for kind, attribute in _KINDS.items():
            value = getattr(request, attribute, None)
            is_empty = isinstance(value, list | tuple) and not value
            if value is not None and value is not False and not is_empty:
                return _unsupported(kind)
        if self._rules is None:
            return EVERYTHING
        if self._switch is not None and os.path.exists(self._switch):
            return LeftOut(OFF, OFF)
        params = request.sampling_params
        xargs = (params.extra_args if params is not None else None) or {}
        out = self._rules.left_out(Labels(external_id, getattr(request, "session_id", None), xargs))
        if out.is_private:
            return out
        if (text := xargs.get(POSITIONS)) is not None:
            out = replace(out, ranges=positions_asked(text, request.num_prompt_tokens))
        if (text := xargs.get(HOOKS)) is not None:
            out = replace(out, hooks=hooks_asked(text, self._rules.choices))
        return out

    def _references(self, request: Any, tracked: _Tracked, start: int) -> list[Reference]:
        """Return the hits between the high-water mark and ``start``: from here and from outside."""
        first_loaded, loaded = tracked.loading
        if not tracked.admitted:
            # What failed to load, or was loaded to its last token, is computed nevertheless.
            is_reported = loaded <= start and not tracked.continues
            tracked.admitted, tracked.as_reported = True, is_reported
        tracked.loading = first_loaded, loaded = first_loaded, min(loaded, start)
        references: list[Reference] = []
        position = tracked.high_water
        while position < start:
            block = position // self._block_size
            owner, edge = None, min((block + 1) * self._block_size, start)
            if first_loaded <= position < loaded:
                external, stop = True, min(edge, loaded)
                tracked.external_end = stop
            else:
                owner, first = self.owners.find(request, block)
                external = position < first
                stop = min(edge, first) if external else edge
                if position < first_loaded < loaded:
                    stop = min(stop, first_loaded)
            owner = None if external else owner
            last = references[-1] if references else None
            if last is not None and (last.ref_request, last.external) == (owner, external):
                references[-1] = replace(last, stop=stop)
            else:
                references.append(Reference(tracked.number, position, stop, owner, external))
            position = stop
        local = min(start, first_loaded) if loaded > first_loaded else start
        tracked.n_owned_blocks = max(tracked.n_owned_blocks, local // self._block_size)
        return references

    def _own_blocks(self, request: Any, tracked: _Tracked, high_water: int) -> None:
        if tracked.mixed:
            return
        n_full = min(high_water // self._block_size, len(request.block_hashes))
        for block in range(tracked.n_owned_blocks, n_full):
            # A block that was evicted and computed again is served from the new computation.
            owner = (tracked.number, tracked.external_end)
            self.owners.note(bytes(request.block_hashes[block]), owner)
        tracked.n_owned_blocks = max(tracked.n_owned_blocks, n_full)


_KINDS = {
    "streaming": "resumable",
    "prompt_embeds": "prompt_embeds",
    "pooling": "pooling_params",
    "multimodal": "mm_features",
}
"""Requests whose rows are not those of the tokens that the account names, by an attribute that
they alone have: the prompt grows, or has no tokens, or is a pooler's, or is of images."""


def _unsupported(kind: str) -> LeftOut:
    reason = f"unsupported:{kind}"
    return LeftOut(reason, reason)


def _mixed(left_out: LeftOut) -> LeftOut:
    return LeftOut(left_out.prefill or MIXED_WEIGHTS, left_out.decode or MIXED_WEIGHTS)
